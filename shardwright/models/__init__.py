"""Well-known models as nn.Modules with children `sparse`, `dense` and `loss`, or transformer blocks."""

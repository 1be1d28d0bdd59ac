"""Well-known models as plain nn.Modules: children `sparse`, `dense` and `loss`, or blocks of a transformer."""

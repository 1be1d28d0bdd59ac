"""How feature vectors meet.

Shape legend: B samples, F vectors, D columns, P pairs.
"""

import torch
from torch import Tensor, nn


class DotInteraction(nn.Module):
    """The dot product of every pair of distinct vectors: (B, F, D) -> (B, F * (F - 1) / 2)."""

    def __init__(self, num_vectors: int) -> None:
        super().__init__()
        self.num_vectors = num_vectors
        pairs = torch.triu_indices(num_vectors, num_vectors, offset=1)
        self.register_buffer("pairs", pairs[0] * num_vectors + pairs[1], persistent=False)

    @property
    def out_features(self) -> int:
        return self.num_vectors * (self.num_vectors - 1) // 2

    def forward(self, x_BFD: Tensor) -> Tensor:
        square_BFF = torch.bmm(x_BFD, x_BFD.transpose(1, 2))
        return square_BFF.flatten(1).index_select(1, self.get_buffer("pairs"))

    def reset_parameters(self) -> None:
        """Fill the pair index anew, after `to_empty` on a model built on the meta device."""
        pairs = torch.triu_indices(self.num_vectors, self.num_vectors, offset=1)
        self.get_buffer("pairs").copy_(pairs[0] * self.num_vectors + pairs[1])

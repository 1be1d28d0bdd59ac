"""Feature interactions, and embeddings of numeric features.

Shape legend: B samples, F vectors, D columns, W width of a flat input, N numeric features, H heads, K columns
of a head.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from shardwright.errors import UserError
from shardwright.kernels.field_attention import field_attention
from shardwright.kernels.pair_dots import pair_dots


class DotInteraction(nn.Module):
    """Dot products of all pairs of distinct vectors: (B, F, D) -> (B, F * (F - 1) / 2)."""

    def __init__(self, num_vectors: int) -> None:
        super().__init__()
        self.num_vectors = num_vectors

    @property
    def out_features(self) -> int:
        return self.num_vectors * (self.num_vectors - 1) // 2

    def forward(self, x_BFD: Tensor) -> Tensor:
        return pair_dots(x_BFD)


class FactorizationMachine(nn.Module):
    """Sum of the dot products of all pairs, in linear time: (B, F, D) -> (B,)."""

    def forward(self, x_BFD: Tensor) -> Tensor:
        return ((x_BFD.sum(1) ** 2) - (x_BFD**2).sum(1)).sum(1) / 2


class Cross(nn.Module):
    """x0 (x . w) + b: (B, W), (B, W) -> (B, W). `skip` adds x, as DCN does and DHEN does not."""

    def __init__(self, width: int, *, skip: bool = True) -> None:
        super().__init__()
        self.skip = skip
        self.weight = nn.Parameter(torch.empty(width))
        self.bias = nn.Parameter(torch.empty(width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.weight.numel() ** -0.5)
        nn.init.zeros_(self.bias)

    def forward(self, first_BW: Tensor, x_BW: Tensor) -> Tensor:
        crossed_BW = first_BW * (x_BW @ self.weight).unsqueeze(1) + self.bias
        return crossed_BW + x_BW if self.skip else crossed_BW


class CrossV2(nn.Module):
    """x0 * (V U x + b) + x: (B, W), (B, W) -> (B, W).

    U and V have rank `rank`; 0: a full matrix instead of V U. `skip` adds x, as DCN does and DHEN does not.
    """

    def __init__(self, width: int, *, rank: int = 0, skip: bool = True) -> None:
        super().__init__()
        self.skip = skip
        self.down = nn.Linear(width, rank, bias=False) if rank else nn.Identity()
        self.up = nn.Linear(rank or width, width)

    def forward(self, first_BW: Tensor, x_BW: Tensor) -> Tensor:
        crossed_BW = first_BW * self.up(self.down(x_BW))
        return crossed_BW + x_BW if self.skip else crossed_BW


class FieldAttention(nn.Module):
    """Self-attention over a sample's vectors, a linear shortcut, ReLU: (B, F, D) -> (B, F, H * K)."""

    def __init__(self, dim: int, *, num_heads: int, head_dim: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(dim, 3 * num_heads * head_dim, bias=False)
        self.shortcut = nn.Linear(dim, num_heads * head_dim, bias=False)

    def forward(self, x_BFD: Tensor) -> Tensor:
        return functional.relu(field_attention(self.qkv(x_BFD), self.num_heads) + self.shortcut(x_BFD))


class NumericEmbedding(nn.Module):
    """One learned vector per numeric feature, multiplied by its value: (B, N) -> (B, N, D)."""

    def __init__(self, num_dense: int, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_dense, dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.weight.numel():
            nn.init.normal_(self.weight, std=0.01)

    def forward(self, numbers_BN: Tensor) -> Tensor:
        return numbers_BN.unsqueeze(2) * self.weight


def numeric_columns(numbers_BN: Tensor, embedding: NumericEmbedding | None) -> Tensor:
    """Columns of the numeric features: their values (B, N), or their vectors (B, N * D)."""
    return numbers_BN if embedding is None else embedding(numbers_BN).flatten(1)


class NumericLinear(nn.Module):
    """One weight per numeric feature, and a bias, which begins at `start`: (B, N) -> (B,)."""

    def __init__(self, num_dense: int, start: float = 0.0) -> None:
        super().__init__()
        self.start = start
        self.weight = nn.Parameter(torch.empty(num_dense))
        self.bias = nn.Parameter(torch.empty(()))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.bias, self.start)
        if self.weight.numel():
            nn.init.zeros_(self.weight)

    def forward(self, numbers_BN: Tensor) -> Tensor:
        return numbers_BN @ self.weight + self.bias


def num_deep_columns(dims: tuple[int, ...]) -> int:
    """Number of columns of the deep vectors; the wide vectors, with one column each, must come last."""
    num_wide = sum(dim == 1 for dim in dims)
    if not num_wide or any(dim == 1 for dim in dims[: len(dims) - num_wide]):
        raise UserError(f"the features' dims are {dims}; wanted the deep features first, then the wide ones (dim 1)")
    return sum(dims[: len(dims) - num_wide])

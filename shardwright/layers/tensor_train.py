"""A table of embeddings as a product of three small tensors, a tensor train; its tensors are part of the dense model.

The number of a row is written with three digits, (i, j, k), and its vector is a product of matrices that each depend on
one digit (TT-Rec, Yin et al. 2021):

    vector[a, b, c] = sum over r and s of  first[i][a, r] * middle[j][r, b, s] * last[k][s, c]

So rows with a common digit share numbers: unlike all other ways to keep a table here, this one is a different model.

Shape legend: N ids, U distinct rows, B bags, D columns.
"""

from math import ceil, prod

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding_bag

from shardwright.errors import UserError


class TensorTrainBag(nn.Module):
    """An `nn.EmbeddingBag(mode="sum")` of `rows` x `dim` numbers in about rank^2 * dim^(1/3) * rows^(1/3) of them."""

    def __init__(self, rows: int, dim: int, rank: int, *, std: float = 0.01) -> None:
        """`std`: standard deviation of the initial vectors."""
        super().__init__()
        if min(rows, dim, rank) < 1:
            raise UserError(f"a tensor train of {rows} rows, {dim} columns and rank {rank}: all must be positive")
        self.rows, self.dim, self.rank = rows, dim, rank
        self.digits, self.widths = _row_digits(rows), _factors(dim)
        (i, j, k), (a, b, c) = self.digits, self.widths
        self.first = nn.Parameter(torch.empty(i, a, rank))
        self.middle = nn.Parameter(torch.empty(j, rank, b, rank))
        self.last = nn.Parameter(torch.empty(k, rank, c))
        self.std = std
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Each number of a vector is a sum of rank^2 products of three."""
        for core in self.parameters():
            nn.init.normal_(core, std=(self.std / self.rank) ** (1 / 3))

    def forward(self, values_N: Tensor, offsets: Tensor, weights_N: Tensor | None = None) -> Tensor:
        """(B, D) The sums of bags; `offsets` has B + 1 positions, as `shardwright.jagged.offsets`."""
        rows_U, inverse_N = values_N, torch.arange(len(values_N), device=values_N.device)
        if not values_N.is_meta:  # where a model is traced, ids have no values
            rows_U, inverse_N = torch.unique(values_N, return_inverse=True)
            self._check(rows_U)
        return embedding_bag(
            inverse_N,
            self.vectors(rows_U),
            offsets,
            mode="sum",
            per_sample_weights=weights_N,
            include_last_offset=True,
        )

    def vectors(self, rows_U: Tensor) -> Tensor:
        """(U, D) The vectors of rows."""
        _, num_j, num_k = self.digits
        i, j, k = rows_U // (num_j * num_k), rows_U // num_k % num_j, rows_U % num_k
        pairs = torch.einsum("uar,urbs->uabs", self.first[i], self.middle[j])
        return torch.einsum("uabs,usc->uabc", pairs, self.last[k]).reshape(len(rows_U), self.dim)

    def _check(self, rows_U: Tensor) -> None:
        """Raise an error for ids out of range; they are in order."""
        if len(rows_U) and not 0 <= int(rows_U[0]) <= int(rows_U[-1]) < self.rows:
            raise UserError(f"an id outside 0 to {self.rows - 1} in a tensor train of {self.rows} rows")

    @property
    def num_values(self) -> int:
        return sum(core.numel() for core in self.parameters())

    def extra_repr(self) -> str:
        return f"{self.rows}, {self.dim}, rank={self.rank}, {self.rows * self.dim / self.num_values:.0f} times smaller"


def _row_digits(rows: int) -> tuple[int, int, int]:
    """The numbers of values of three digits that number so many rows, as equal as may be."""
    first = ceil(rows ** (1 / 3) - 1e-9)
    middle = ceil((rows / first) ** 0.5 - 1e-9)
    return first, middle, ceil(rows / (first * middle))


def _factors(dim: int) -> tuple[int, int, int]:
    """Three factors of `dim` with the smallest sum."""
    pairs = [(a, b) for a in range(1, dim + 1) if dim % a == 0 for b in range(1, dim // a + 1) if dim // a % b == 0]
    a, b = min(pairs, key=lambda pair: (sum(pair) + dim // prod(pair), pair))
    return a, b, dim // (a * b)

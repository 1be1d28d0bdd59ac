"""Updates of rows that are pushed to their owners; one may stand for several steps.

Shape legend: V rows, U distinct rows, E rows of a table, D columns, S columns of squares.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwright.kernels import embedding
from shardwright.kernels.arguments import POOLINGS, Ids, TableState
from shardwright.kernels.gradient_sums import sum_at_positions
from shardwright.spec.optimizer import AdaGrad, RowWiseAdaGrad, SparseOptimizer


@dataclass(frozen=True, slots=True, eq=False)
class RowUpdates:
    """By row: the number of updates, how often their batches used the row, the sum of their gradients, and what AdaGrad
    adds for the squares of each."""

    rows_V: Tensor
    counts_V: Tensor
    uses_V: Tensor
    sums_VD: Tensor
    squares_VS: Tensor

    def select(self, index: Tensor) -> "RowUpdates":
        return RowUpdates(*(column[index] for column in self.columns))

    @property
    def columns(self) -> tuple[Tensor, ...]:
        return self.rows_V, self.counts_V, self.uses_V, self.sums_VD, self.squares_VS

    @property
    def bytes_(self) -> int:
        return sum(column.nbytes for column in self.columns)

    def part(self, number: int, num: int) -> "RowUpdates":
        """One of `num` parts with about as many rows each, in order."""
        start, stop = (len(self.rows_V) * end // num for end in (number, number + 1))
        return RowUpdates(*(column[start:stop] for column in self.columns))

    @staticmethod
    def concat(parts: "Sequence[RowUpdates]") -> "RowUpdates":
        return RowUpdates(*map(torch.cat, zip(*(part.columns for part in parts), strict=True)))


def squares_of(optimizer: SparseOptimizer, grad_VD: Tensor) -> Tensor:
    """(V, S) What AdaGrad adds to its sums for these gradients."""
    match optimizer:
        case AdaGrad():
            return grad_VD**2
        case RowWiseAdaGrad():
            return (grad_VD**2).sum(1, keepdim=True) / grad_VD.shape[1]
        case _:
            return grad_VD[:, :0]


def apply_gradients(
    optimizer: SparseOptimizer,
    weight_ED: Tensor,
    state: Mapping[str, Tensor],
    rows_U: Tensor,
    grad_UD: Tensor,
    step: int,
) -> None:
    """One optimizer step of distinct rows."""
    ids = Ids(rows_U, torch.tensor([0, len(rows_U)]), None, [0], [POOLINGS.index("none")])
    table = TableState(weight_ED, tuple(state.values()), step, 0)
    embedding.update([table], ids, [grad_UD.new_empty(1, 0), grad_UD], optimizer)


def apply_updates(
    optimizer: SparseOptimizer, weight_ED: Tensor, state: Mapping[str, Tensor], updates: RowUpdates, step: int
) -> None:
    """One optimizer step of distinct rows. Where it stands for several, AdaGrad's sums get the squares of each one's
    gradient, not the square of their sum."""
    if updates.squares_VS.numel():
        merged = (updates.counts_V > 1).nonzero().flatten()
        sums = state["sum"] if state["sum"].dim() == 2 else state["sum"].unsqueeze(1)
        sums[updates.rows_V[merged]] += updates.squares_VS[merged] - squares_of(optimizer, updates.sums_VD[merged])
    apply_gradients(optimizer, weight_ED, state, updates.rows_V, updates.sums_VD, step)


def sum_by_row(updates: RowUpdates) -> tuple[RowUpdates, Tensor]:
    """The total of each row's updates, in order, and by row the number of these updates."""
    rows_U, inverse_V, num_U = updates.rows_V.unique(return_inverse=True, return_counts=True)
    values = torch.cat([updates.sums_VD, updates.squares_VS], 1)
    ids = Ids(inverse_V, torch.tensor([0, len(inverse_V)]), None, [0], [POOLINGS.index("none")])
    (total,) = sum_at_positions(ids, [values.new_empty(1, 0), values], [len(rows_U)], [values.shape[1]])
    counts_U, uses_U = (
        torch.zeros_like(rows_U).index_add_(0, inverse_V, column) for column in (updates.counts_V, updates.uses_V)
    )
    dim = updates.sums_VD.shape[1]
    return RowUpdates(rows_U, counts_U, uses_U, total[:, :dim].contiguous(), total[:, dim:]), num_U

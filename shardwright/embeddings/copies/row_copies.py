"""Copies of rows that other ranks own: what a rank that reads them keeps.

A copy is on a line of a cache: the row and its optimizer state as the owner sent them, with this rank's own updates
since. It has a lease: until that batch it may be read without asking its owner. Phases of a batch:
    plan    find lines for its rows; which rows to ask for, since their lease has ended; which ones send their updates
    fill    the owners' answers: a longer lease, or the row
    sent    the updates to send
    update  apply own gradients to the copies, and keep what is not sent

A version is how many updates of the row a copy has seen; the owner counts an update for each batch of a rank that had
the row.

Shape legend: R rows of a batch, A rows that are asked for, F rows that the owner sent, V rows whose updates are sent,
L lines, D columns, X values of a row and its optimizer state.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwright.embeddings.copies.updates import (
    RowUpdates,
    apply_gradients,
    apply_updates,
    num_squares,
    squares_of,
)
from shardwright.kernels.cache_index import CacheIndex
from shardwright.spec.optimizer import SparseOptimizer, state_shapes
from shardwright.spec.row_cache import HALF_LIFE_BATCHES, MAX_UNSENT_BATCHES

NO_VERSION = -1  # of a row without a copy


@dataclass(frozen=True, slots=True)
class Lease:
    """How long copies may be read: a read misses at most `pull` updates of the `others` that their owner had, or could
    have had, since it sent the row."""

    pull: int
    others: int  # ranks that also update the rows

    def batches(self, missed: Tensor) -> Tensor:
        """For how many batches after this one a copy may be read that misses so many updates now; below 0: not now.
        In each, every other rank may update the row once."""
        return torch.div(self.pull - missed, max(1, self.others), rounding_mode="floor")


@dataclass(frozen=True, slots=True, eq=False)
class PlannedRows:
    """`is_asked_R`, `is_sent_R`: whether the owner is asked for a row, and gets its updates. `overdue`: updates of
    rows that lost their lines, or that have waited too long."""

    rows_R: Tensor
    lines_R: Tensor
    is_asked_R: Tensor
    is_sent_R: Tensor
    overdue: RowUpdates

    @property
    def sent_rows_V(self) -> Tensor:
        return torch.cat([self.overdue.rows_V, self.rows_R[self.is_sent_R]])


class RowCopies:
    """`push`: a row has at most so many updates that were not sent."""

    def __init__(
        self, num_lines: int, dim: int, optimizer: SparseOptimizer, push: int, dtype: torch.dtype, table: str = ""
    ) -> None:
        self._index_arguments = num_lines, HALF_LIFE_BATCHES, table
        self.index = CacheIndex(*self._index_arguments, adapts=True)
        num_lines = self.index.num_lines
        self.weight_LD = torch.empty(num_lines, dim, dtype=dtype)
        shapes = state_shapes(optimizer, num_lines, dim)
        self.state = {name: torch.empty(shape, dtype=dtype) for name, shape in shapes.items()}
        self.push = push
        self._last_step = 1
        self.batch = 0
        self._row_of_L = torch.full((num_lines,), -1)
        self._version_L = torch.full((num_lines,), NO_VERSION)
        self._lease_L = torch.full((num_lines,), -1)  # the last batch that may read the copy
        self._unsent_L = torch.zeros(num_lines, dtype=torch.int64)
        self._sum_LD = torch.zeros(num_lines, dim, dtype=dtype)
        self._squares_LS = torch.zeros(num_lines, num_squares(optimizer, dim), dtype=dtype)

    def plan(self, rows_R: Tensor) -> PlannedRows:
        """Begin a batch with these distinct rows: their lines stay theirs until `update`."""
        self.batch += 1
        placed = self.index.place(rows_R)
        lines_R, new_L = placed.lines_U, placed.lines_U[placed.missing_U]
        evicted = self._take(placed.written_lines)
        for lines in (placed.written_lines, new_L):
            self._version_L[lines], self._lease_L[lines], self._row_of_L[lines] = NO_VERSION, -1, -1
        self._row_of_L[new_L] = rows_R[placed.missing_U]
        is_sent_R = self._unsent_L[lines_R] >= self.push
        overdue = RowUpdates.concat([evicted, self._take(self._overdue_lines(lines_R))])
        return PlannedRows(rows_R, lines_R, self._lease_L[lines_R] < self.batch, is_sent_R, overdue)

    def _overdue_lines(self, lines_R: Tensor) -> Tensor:
        """Lines of other rows that have unsent updates, of one of MAX_UNSENT_BATCHES parts of the cache."""
        num, part = len(self._row_of_L), self.batch % MAX_UNSENT_BATCHES
        begin, end = num * part // MAX_UNSENT_BATCHES, num * (part + 1) // MAX_UNSENT_BATCHES
        lines = self._unsent_L[begin:end].nonzero().flatten() + begin
        return lines[~torch.isin(lines, lines_R)] if len(lines) else lines

    def versions(self, planned: PlannedRows) -> Tensor:
        """(A,) Of the copies that are asked for."""
        return self._version_L[planned.lines_R[planned.is_asked_R]]

    def fill(
        self,
        planned: PlannedRows,
        leases_A: Tensor,
        is_new_A: Tensor,
        values_FX: Tensor,
        versions_F: Tensor,
        optimizer: SparseOptimizer,
    ) -> None:
        """Extend leases of copies, and replace those whose rows were sent, with own unsent updates on top."""
        lines_A = planned.lines_R[planned.is_asked_R]
        self._lease_L[lines_A] = self.batch + leases_A
        lines_F = lines_A[is_new_A]
        put_rows(self.weight_LD, self.state, lines_F, values_FX)
        self._version_L[lines_F] = versions_F
        again = lines_F[self._unsent_L[lines_F] > 0]
        if len(again):
            apply_updates(optimizer, self.weight_LD, self.state, self._unsent(again, again), self._last_step)

    def read(self, planned: PlannedRows) -> Tensor:
        return self.weight_LD[planned.lines_R]

    def counts_to_send(self, planned: PlannedRows) -> Tensor:
        """(V,) How many updates each row in `sent_rows_V` stands for."""
        return torch.cat([planned.overdue.counts_V, self._unsent_L[planned.lines_R[planned.is_sent_R]] + 1])

    def sent(self, planned: PlannedRows, grad_RD: Tensor, optimizer: SparseOptimizer) -> RowUpdates:
        """The updates that are sent with this batch, whose gradients these are, in the order of `sent_rows_V`."""
        grad_VD = grad_RD[planned.is_sent_R]
        lines_V = planned.lines_R[planned.is_sent_R]
        before = self._unsent(lines_V, planned.rows_R[planned.is_sent_R])
        squares_VS = before.squares_VS + squares_of(optimizer, grad_VD)
        now = RowUpdates(before.rows_V, before.counts_V + 1, before.sums_VD + grad_VD, squares_VS)
        return RowUpdates.concat([planned.overdue, now])

    def update(self, planned: PlannedRows, grad_RD: Tensor, optimizer: SparseOptimizer, step: int) -> None:
        """Apply the gradients of a batch to its copies; ends its use of their lines."""
        lines_R, self._last_step = planned.lines_R, step
        apply_gradients(optimizer, self.weight_LD, self.state, lines_R, grad_RD, step)
        self._unsent_L[lines_R] += 1
        kept = ~planned.is_sent_R
        self._clear(lines_R[planned.is_sent_R])
        lines_K, grad_KD = lines_R[kept], grad_RD[kept]
        self._sum_LD[lines_K] += grad_KD
        self._squares_LS[lines_K] += squares_of(optimizer, grad_KD)
        self.index.release(lines_R, written=True)

    def forget(self) -> RowUpdates:
        """Forget all copies, between batches; returns their unsent updates."""
        updates = self._take(self._unsent_L.nonzero().flatten())
        counts = self.index.counts
        self.index = CacheIndex(*self._index_arguments, adapts=True)
        self.index.counts = counts
        self._version_L.fill_(NO_VERSION)
        self._lease_L.fill_(-1)
        self._row_of_L.fill_(-1)
        self.batch = 0
        return updates

    def _unsent(self, lines: Tensor, rows: Tensor) -> RowUpdates:
        return RowUpdates(rows, self._unsent_L[lines], self._sum_LD[lines], self._squares_LS[lines])

    def _take(self, lines: Tensor) -> RowUpdates:
        """The unsent updates of lines, which have none then: their copies have seen them."""
        lines = lines[self._unsent_L[lines] > 0]
        taken = self._unsent(lines, self._row_of_L[lines])
        self._clear(lines)
        return taken

    def _clear(self, lines: Tensor) -> None:
        self._version_L[lines] += self._unsent_L[lines]
        self._unsent_L[lines] = 0
        self._sum_LD[lines] = 0
        self._squares_LS[lines] = 0


def row_values(weight_ED: Tensor, state: Mapping[str, Tensor], rows_F: Tensor) -> Tensor:
    """(F, X) The weights and the optimizer state of rows."""
    parts = [weight_ED, *(part.view(len(weight_ED), -1) for part in state.values())]
    return torch.cat([part[rows_F] for part in parts], 1)


def put_rows(weight_ED: Tensor, state: Mapping[str, Tensor], rows_F: Tensor, values_FX: Tensor) -> None:
    """Set the weights and the optimizer state of rows."""
    parts = [weight_ED, *(part.view(len(weight_ED), -1) for part in state.values())]
    for part, values in zip(parts, values_FX.split([part.shape[1] for part in parts], 1), strict=True):
        part[rows_F] = values

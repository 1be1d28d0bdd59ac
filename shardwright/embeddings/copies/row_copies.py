"""Copies of rows that other ranks own: what a rank that reads them keeps.

A copy is on a line of a cache: the row and its optimizer state as the owner sent them, plus this rank's own later
updates. Until its lease ends it may be read without validation. Phases of a batch:
    find_lines          lines for the rows of the batch, expired leases, and updates to push
    fill                the owners' renewals: longer leases, and rows
    updates_to_push     unpushed updates and the batch's gradients
    update              apply the batch's gradients to the copies; keep those that are not pushed

A version is the number of a row's updates that a copy has seen. The owner adds one to it for each rank's batch that
contains the row. `push` and `pull` count uses: a batch that has an id 30 times uses its row 30 times.

Shape legend: R rows of a batch, A rows to validate, F rows that owners send, V rows whose updates are pushed, K rows
whose updates are kept, L lines, E rows of a table, D columns, S columns of squares, X values of a row and its state.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shardwright.embeddings.copies.updates import (
    RowUpdates,
    apply_gradients,
    apply_updates,
    squares_of,
)
from shardwright.errors import UserError
from shardwright.kernels.cache_index import CacheIndex
from shardwright.spec.optimizer import SparseOptimizer, num_squares, state_shapes
from shardwright.spec.row_cache import COPIES_HALF_LIFE_BATCHES, MAX_UNPUSHED_BATCHES

NO_VERSION = -1  # of a row without a copy
LONGEST_LEASE = 1 << 30  # batches


@dataclass(frozen=True, slots=True)
class Lease:
    """Grants leases: the uses in what a copy missed when it was validated, plus those in one update of each other rank
    for each batch of the lease, are at most `pull`."""

    pull: int
    num_others: int  # ranks that also update the rows

    def num_batches(self, missed: Tensor, uses_per_update: Tensor) -> Tensor:
        """Further batches in which a copy that misses so many updates may be read; negative: the row must be sent.
        `uses_per_update`: the mean of the row, at least 1."""
        if not self.num_others:
            return torch.full_like(missed, LONGEST_LEASE)
        batches = (self.pull / uses_per_update - missed).div(self.num_others).floor()
        return batches.clamp(max=LONGEST_LEASE).long()


@dataclass(slots=True, eq=False)
class BatchCopies:
    """Lines of a batch's rows. `is_expired_R`, `is_pushed_R`: whether the lease of a row has expired, and whether its
    updates are pushed with this batch. `overdue`: updates of evicted rows, and of rows that were not pushed for
    MAX_UNPUSHED_BATCHES. `is_updated_R`: of the rows that the batch updates; None: all."""

    rows_R: Tensor
    uses_R: Tensor
    lines_R: Tensor
    is_expired_R: Tensor
    is_pushed_R: Tensor
    overdue: RowUpdates
    is_updated_R: Tensor | None = None

    @property
    def pushed_rows_V(self) -> Tensor:
        return torch.cat([self.overdue.rows_V, self.rows_R[self.is_pushed_R]])


class RowCopies:
    """Copies of rows on this rank. `push`: most uses in the unpushed updates of a copy."""

    def __init__(
        self, num_lines: int, dim: int, optimizer: SparseOptimizer, push: int, dtype: torch.dtype, tables: str = ""
    ) -> None:
        self._index_arguments = num_lines, COPIES_HALF_LIFE_BATCHES, tables
        self._tables = tables
        self.index = CacheIndex(*self._index_arguments, adapts=True)
        num_lines = self.index.num_lines
        self.weight_LD = torch.empty(num_lines, dim, dtype=dtype)
        shapes = state_shapes(optimizer, num_lines, dim)
        self.state = {name: torch.empty(shape, dtype=dtype) for name, shape in shapes.items()}
        self.push = push
        self._last_step = 1
        self.num_batches = 0  # since copies were dropped
        self._in_use: BatchCopies | None = None
        self._canceled: list[RowUpdates] = []  # of rows without copies, which a failed batch would have pushed
        self._row_of_L = torch.full((num_lines,), -1)
        self._version_L = torch.full((num_lines,), NO_VERSION)
        self._lease_end_L = torch.full((num_lines,), -1)  # the last batch that may read the copy
        self._unpushed_L = torch.zeros(num_lines, dtype=torch.int64)
        self._uses_L = torch.zeros(num_lines, dtype=torch.int64)  # in the unpushed updates
        self._sum_LD = torch.zeros(num_lines, dim, dtype=dtype)
        self._squares_LS = torch.zeros(num_lines, num_squares(optimizer, dim), dtype=dtype)

    def find_lines(self, rows_R: Tensor, uses_R: Tensor) -> BatchCopies:
        """Begin a batch with these distinct rows, ascending; their lines stay pinned until `update`."""
        self.num_batches += 1
        try:
            placed = self.index.place(rows_R)
        except UserError:
            raise UserError(
                f'the {len(rows_R)} rows of a batch do not fit in the {self.index.num_lines} copies of tables "'
                f'{self._tables}": raise copies in Bounded, or use smaller batches'
            ) from None
        lines_R, new_L, evicted_L = placed.lines_U, placed.lines_U[placed.missing_U], placed.written_lines
        evicted = self._pop_unpushed(evicted_L)
        for lines in (evicted_L, new_L):
            self._version_L[lines], self._lease_end_L[lines], self._row_of_L[lines] = NO_VERSION, -1, -1
        self._row_of_L[new_L] = rows_R[placed.missing_U]
        evicted = self._move_unpushed(RowUpdates.concat([*self._canceled, evicted]), rows_R, lines_R)
        self._canceled = []
        part = self._lines_due()
        is_due_R = (lines_R >= part.start) & (lines_R < part.stop) & (self._unpushed_L[lines_R] > 0)
        is_pushed_R = (self._uses_L[lines_R] + uses_R > self.push) | is_due_R
        due_L = self._unpushed_L[part].nonzero().flatten() + part.start
        overdue = self._pop_unpushed(due_L[~torch.isin(due_L, lines_R)] if len(due_L) else due_L)
        overdue = RowUpdates.concat([evicted, overdue])
        is_expired_R = self._lease_end_L[lines_R] < self.num_batches
        self._in_use = BatchCopies(rows_R, uses_R, lines_R, is_expired_R, is_pushed_R, overdue)
        return self._in_use

    def _move_unpushed(self, evicted: RowUpdates, rows_R: Tensor, lines_R: Tensor) -> RowUpdates:
        """Move the updates of rows that were evicted and belong to the batch to their new lines; returns the others.
        Rows that were in the set of another row are placed anew with each batch."""
        index_V = torch.searchsorted(rows_R, evicted.rows_V).clamp(max=max(0, len(rows_R) - 1))
        is_moved_V = rows_R[index_V] == evicted.rows_V if len(rows_R) else evicted.rows_V < 0
        if not is_moved_V.any():
            return evicted
        moved, lines = evicted.select(is_moved_V.nonzero().flatten()), lines_R[index_V[is_moved_V]]
        self._unpushed_L[lines], self._uses_L[lines] = moved.counts_V, moved.uses_V
        self._sum_LD.index_copy_(0, lines, moved.sums_VD)
        self._squares_LS.index_copy_(0, lines, moved.squares_VS)
        return evicted.select((~is_moved_V).nonzero().flatten())

    def _lines_due(self) -> slice:
        """One of MAX_UNPUSHED_BATCHES parts of the cache: with this batch its updates are pushed."""
        num, part = len(self._row_of_L), self.num_batches % MAX_UNPUSHED_BATCHES
        return slice(num * part // MAX_UNPUSHED_BATCHES, num * (part + 1) // MAX_UNPUSHED_BATCHES)

    def versions(self, copies: BatchCopies) -> Tensor:
        """(A,) Of the copies to validate."""
        return self._version_L[copies.lines_R[copies.is_expired_R]]

    def fill(
        self,
        copies: BatchCopies,
        leases_A: Tensor,
        is_new_A: Tensor,
        values_FX: Tensor,
        versions_F: Tensor,
        optimizer: SparseOptimizer,
    ) -> None:
        """Extend leases, and replace copies whose rows were sent; own unpushed updates are applied again."""
        lines_A = copies.lines_R[copies.is_expired_R]
        self._lease_end_L[lines_A] = self.num_batches + leases_A
        lines_F = lines_A[is_new_A]
        put_rows(self.weight_LD, self.state, lines_F, values_FX)
        self._version_L[lines_F] = versions_F
        updated = lines_F[self._unpushed_L[lines_F] > 0]
        if len(updated):
            apply_updates(optimizer, self.weight_LD, self.state, self._unpushed(updated, updated), self._last_step)

    def read(self, copies: BatchCopies) -> Tensor:
        return self.weight_LD.index_select(0, copies.lines_R)

    def counts_to_push(self, copies: BatchCopies) -> tuple[Tensor, Tensor]:
        """(V,) The number of updates merged in each of `updates_to_push`, and of uses."""
        lines, uses = copies.lines_R[copies.is_pushed_R], copies.uses_R[copies.is_pushed_R]
        counts_V = torch.cat([copies.overdue.counts_V, self._unpushed_L[lines] + 1])
        return counts_V, torch.cat([copies.overdue.uses_V, self._uses_L[lines] + uses])

    def updates_to_push(self, copies: BatchCopies, grad_RD: Tensor, optimizer: SparseOptimizer) -> RowUpdates:
        """The updates that are pushed with this batch, which has these gradients; in the order of `pushed_rows_V`."""
        pushed_V = copies.is_pushed_R.nonzero().flatten()
        grad_VD = grad_RD.index_select(0, pushed_V)
        unpushed = self._unpushed(copies.lines_R[pushed_V], copies.rows_R[pushed_V])
        squares_VS = unpushed.squares_VS + squares_of(optimizer, grad_VD)
        uses_V = unpushed.uses_V + copies.uses_R[pushed_V]
        total = RowUpdates(unpushed.rows_V, unpushed.counts_V + 1, uses_V, unpushed.sums_VD + grad_VD, squares_VS)
        return RowUpdates.concat([copies.overdue, total])

    def update(self, copies: BatchCopies, grad_RD: Tensor, optimizer: SparseOptimizer, step: int) -> None:
        """Apply the gradients of a batch to its copies; ends its use of their lines."""
        lines_R, self._last_step = copies.lines_R, step
        if copies.is_updated_R is not None:
            self.index.release(lines_R[~copies.is_updated_R], written=True)
            updated = copies.is_updated_R.nonzero().flatten()
            lines_R, grad_RD = lines_R[updated], grad_RD.index_select(0, updated)
            is_pushed_R, uses_R = copies.is_pushed_R[updated], copies.uses_R[updated]
            copies = replace(copies, lines_R=lines_R, is_pushed_R=is_pushed_R, uses_R=uses_R)
        apply_gradients(optimizer, self.weight_LD, self.state, lines_R, grad_RD, step)
        self._unpushed_L[lines_R] += 1
        self._uses_L[lines_R] += copies.uses_R
        self._mark_pushed(lines_R[copies.is_pushed_R])
        kept_K = (~copies.is_pushed_R).nonzero().flatten()
        lines_K, grad_KD = lines_R[kept_K], grad_RD.index_select(0, kept_K)
        self._sum_LD.index_add_(0, lines_K, grad_KD)
        if self._squares_LS.numel():
            self._squares_LS.index_add_(0, lines_K, squares_of(optimizer, grad_KD))
        self.index.release(lines_R, written=True)
        self._in_use = None

    def cancel(self) -> None:
        """End a batch whose step has failed; the updates that it would have pushed wait for the next batch."""
        if self._in_use is not None:
            self.index.release(self._in_use.lines_R, written=True)
            self._canceled.append(self._return_unpushed(self._in_use.overdue))
            self._in_use = None

    def _return_unpushed(self, updates: RowUpdates) -> RowUpdates:
        """Undo `_pop_unpushed` for the rows that still have copies; returns the updates of the others."""
        order_V = updates.rows_V.argsort()
        sorted_V = updates.rows_V[order_V]
        lines_K = torch.isin(self._row_of_L, sorted_V).nonzero().flatten()
        returned_K = order_V[torch.searchsorted(sorted_V, self._row_of_L[lines_K])]
        returned = updates.select(returned_K)
        self._raise_versions(lines_K, -returned.counts_V)
        self._unpushed_L[lines_K], self._uses_L[lines_K] = returned.counts_V, returned.uses_V
        self._sum_LD.index_copy_(0, lines_K, returned.sums_VD)
        self._squares_LS.index_copy_(0, lines_K, returned.squares_VS)
        is_other_V = torch.ones(len(sorted_V), dtype=torch.bool)
        is_other_V[returned_K] = False
        return updates.select(is_other_V.nonzero().flatten())

    def drop(self) -> RowUpdates:
        """Drop all copies, between batches; returns their unpushed updates."""
        updates = RowUpdates.concat([*self._canceled, self._pop_unpushed(self._unpushed_L.nonzero().flatten())])
        self._canceled = []
        counts = self.index.counts
        self.index = CacheIndex(*self._index_arguments, adapts=True)
        self.index.counts = counts
        self._version_L.fill_(NO_VERSION)
        self._lease_end_L.fill_(-1)
        self._row_of_L.fill_(-1)
        self.num_batches = 0
        return updates

    def _unpushed(self, lines: Tensor, rows: Tensor) -> RowUpdates:
        sums = self._sum_LD.index_select(0, lines)
        squares = self._squares_LS.index_select(0, lines)
        return RowUpdates(rows, self._unpushed_L[lines], self._uses_L[lines], sums, squares)

    def _pop_unpushed(self, lines: Tensor) -> RowUpdates:
        """The unpushed updates of lines, which the versions of their copies then include."""
        lines = lines[self._unpushed_L[lines] > 0]
        updates = self._unpushed(lines, self._row_of_L[lines])
        self._mark_pushed(lines)
        return updates

    def _mark_pushed(self, lines: Tensor) -> None:
        self._raise_versions(lines, self._unpushed_L[lines])
        self._unpushed_L[lines] = self._uses_L[lines] = 0
        self._sum_LD.index_fill_(0, lines, 0)
        self._squares_LS.index_fill_(0, lines, 0)

    def _raise_versions(self, lines: Tensor, counts: Tensor) -> None:
        """Not of lines whose rows have not arrived."""
        version = self._version_L[lines]
        self._version_L[lines] = torch.where(version == NO_VERSION, version, version + counts)


def row_values(weight_ED: Tensor, state: Mapping[str, Tensor], rows_F: Tensor) -> Tensor:
    """(F, X) The weights and the optimizer state of rows."""
    return torch.cat([part.index_select(0, rows_F) for part in _columns(weight_ED, state)], 1)


def put_rows(weight_ED: Tensor, state: Mapping[str, Tensor], rows_F: Tensor, values_FX: Tensor) -> None:
    """Set the weights and the optimizer state of rows."""
    parts = _columns(weight_ED, state)
    for part, values in zip(parts, values_FX.split([part.shape[1] for part in parts], 1), strict=True):
        part.index_copy_(0, rows_F, values)


def _columns(weight_ED: Tensor, state: Mapping[str, Tensor]) -> list[Tensor]:
    """The weight, and each part of the optimizer state with one or D columns."""
    return [weight_ED, *(part if part.dim() == 2 else part.unsqueeze(1) for part in state.values())]

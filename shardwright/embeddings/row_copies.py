"""Copies of table rows that other ranks own, with bounded staleness: what a reading rank keeps.

A copy is on a line of a cache: a row and its optimizer state as the owner sent them, with this rank's own updates since.
It has a lease: until that batch it may be read without asking its owner. A batch goes through these phases, several
batches at a time, each phase in the order of batches:
    plan    find lines for its rows; which ones to ask for, since their lease ends; which ones send their updates with it
    ask     the versions of the copies that it asks for
    extend  the owners' answers: a longer lease, or a new row
    fill    the new rows
    update  apply own gradients to the copies, and collect what is sent
All depends only on which rows batches use, so owners and readers know the sizes of messages two batches ahead.

A version is how many updates of the row a copy has seen, of those that the owner has applied; the owner counts an update
for each batch of a rank that had the row.

Shape legend: U distinct rows of a batch, A rows that are asked for, F rows that the owner sent, V rows whose updates are
sent, L lines, D columns.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwright.kernels import reference
from shardwright.kernels.cache_index import CacheIndex
from shardwright.spec.optimizer import AdaGrad, RowWiseAdaGrad, SparseOptimizer
from shardwright.spec.row_cache import HALF_LIFE_BATCHES

NO_VERSION = -1  # of a row without a copy


@dataclass(frozen=True, slots=True)
class Bounds:
    """A read misses at most `pull` updates of other ranks that their owner had, or could have had, since the copy was
    sent, and of each of the `others` at most `push` that it had not sent by then."""

    pull: int
    push: int
    others: int  # ranks that also update the rows

    @property
    def lease(self) -> int:
        """Batches for which a new row may be read after the one for which it was sent."""
        return self.pull // self.others if self.others else 1 << 30

    @property
    def least_lease(self) -> int:
        """Of any answer: the next batch is planned before the answer is known."""
        return min(1, self.lease)


@dataclass(frozen=True, slots=True, eq=False)
class SentUpdates:
    """Updates of rows for their owners: how many, the sum of their gradients, and of the squares of these gradients,
    if the optimizer needs them."""

    rows_V: Tensor
    counts_V: Tensor
    sums_VD: Tensor
    squares_V: Tensor  # (V,), (V, D), or (V, 0)

    @staticmethod
    def concat(parts: "list[SentUpdates]") -> "SentUpdates":
        columns = [[part.rows_V, part.counts_V, part.sums_VD, part.squares_V] for part in parts]
        return SentUpdates(*(torch.cat(column) for column in zip(*columns, strict=True)))


@dataclass(frozen=True, slots=True, eq=False)
class PlannedBatch:
    """`is_sent_U`: the owner gets the updates of the row with this batch. `evicted`: of rows that lost their lines."""

    number: int
    rows_U: Tensor
    lines_U: Tensor
    is_asked_U: Tensor
    is_sent_U: Tensor
    evicted: SentUpdates


class RowCopies:
    """`parts_L`: lines for a weight and its optimizer states by name, of the owner's dtypes."""

    def __init__(self, parts_L: Mapping[str, Tensor], optimizer: SparseOptimizer, bounds: Bounds) -> None:
        self.weight_LD, self.state_L = parts_L["weight"], {name: x for name, x in parts_L.items() if name != "weight"}
        num_lines, dim = self.weight_LD.shape
        self.index = CacheIndex(num_lines, HALF_LIFE_BATCHES)
        self._optimizer, self._bounds = optimizer, bounds
        self._row_of_L = torch.full((num_lines,), -1)
        self._version_L = torch.full((num_lines,), NO_VERSION)
        self._lease_L = torch.full((num_lines,), -1)  # the last batch that may read the copy
        self._planned_L = torch.zeros(num_lines, dtype=torch.int64)  # unsent updates once all planned batches are done
        self._unsent_L = torch.zeros(num_lines, dtype=torch.int64)
        self._sum_LD = torch.zeros(num_lines, dim, dtype=self.weight_LD.dtype)
        self._squares_L = squares_of(optimizer, self._sum_LD)

    def plan(self, number: int, rows_U: Tensor) -> PlannedBatch:
        """Find lines for the distinct rows of batch `number`; they stay theirs until `update`."""
        placed = self.index.place(rows_U)
        evicted = self._take(placed.written_lines)
        new_L = placed.lines_U[placed.missing_U]
        for lines in (placed.written_lines, new_L):
            self._version_L[lines], self._lease_L[lines] = NO_VERSION, -1
            self._planned_L[lines], self._row_of_L[lines] = 0, -1
        self._row_of_L[new_L] = rows_U[placed.missing_U]
        lines_U = placed.lines_U
        is_asked_U = self._lease_L[lines_U] < number
        self._lease_L[lines_U[is_asked_U]] = number + self._bounds.least_lease
        counts_U = self._planned_L[lines_U] + 1
        is_sent_U = counts_U > self._bounds.push
        self._planned_L[lines_U] = torch.where(is_sent_U, 0, counts_U)
        return PlannedBatch(number, rows_U, lines_U, is_asked_U, is_sent_U, evicted)

    def ask(self, batch: PlannedBatch) -> Tensor:
        """(A,) The versions of the copies that a batch asks for."""
        return self._version_L[batch.lines_U[batch.is_asked_U]]

    def extend(self, batch: PlannedBatch, leases_A: Tensor) -> None:
        """Read the copies that a batch has asked for until so many batches after it."""
        lines_A = batch.lines_U[batch.is_asked_U]
        self._lease_L[lines_A] = torch.maximum(self._lease_L[lines_A], batch.number + leases_A)

    def fill(
        self, batch: PlannedBatch, is_new_A: Tensor, parts_F: Mapping[str, Tensor], versions_F: Tensor, step: int
    ) -> None:
        """Replace copies by rows that the owner has sent, and apply own unsent updates on top."""
        lines_F = batch.lines_U[batch.is_asked_U][is_new_A]
        self.weight_LD[lines_F] = parts_F["weight"]
        for name, part_L in self.state_L.items():
            part_L[lines_F] = parts_F[name]
        self._version_L[lines_F] = versions_F
        again = lines_F[self._unsent_L[lines_F] > 0]
        if len(again):
            own = SentUpdates(again, self._unsent_L[again], self._sum_LD[again], self._squares_L[again])
            apply_merged(self._optimizer, self.weight_LD, self.state_L, own, own.counts_V > 1, step)

    def update(self, batch: PlannedBatch, grad_UD: Tensor, step: int) -> SentUpdates:
        """Apply the gradients of a batch's rows to their copies; returns the updates that are sent."""
        lines_U = batch.lines_U
        reference.update(self._optimizer, self.weight_LD, self.state_L, (lines_U, grad_UD), step=step)
        self._sum_LD[lines_U] += grad_UD
        self._squares_L[lines_U] += squares_of(self._optimizer, grad_UD)
        self._unsent_L[lines_U] += 1
        sent = self._take(lines_U[batch.is_sent_U])
        self.index.release(lines_U, written=True)
        return SentUpdates.concat([batch.evicted, sent])

    def flush(self) -> SentUpdates:
        """All unsent updates; no batch may be in flight."""
        self._planned_L.zero_()
        return self._take(self._unsent_L.nonzero().flatten())

    def _take(self, lines: Tensor) -> SentUpdates:
        """The unsent updates of lines, which have none then; their copies have seen them."""
        lines = lines[self._unsent_L[lines] > 0]
        counts = self._unsent_L[lines]
        taken = SentUpdates(self._row_of_L[lines], counts, self._sum_LD[lines], self._squares_L[lines])
        self._version_L[lines] += counts
        self._unsent_L[lines] = 0
        self._sum_LD[lines] = 0
        self._squares_L[lines] = 0
        return taken


def squares_of(optimizer: SparseOptimizer, grad_UD: Tensor) -> Tensor:
    """What AdaGrad adds to its sums for these gradients; without columns for other optimizers."""
    match optimizer:
        case AdaGrad():
            return grad_UD**2
        case RowWiseAdaGrad():
            return (grad_UD**2).sum(1) / grad_UD.shape[1]
        case _:
            return grad_UD[:, :0]


def apply_merged(
    optimizer: SparseOptimizer,
    weight: Tensor,
    state: Mapping[str, Tensor],
    updates: SentUpdates,
    is_merged_V: Tensor,
    step: int,
) -> None:
    """One optimizer step; where it stands for several steps, AdaGrad's sums get the squares of each one's gradient."""
    if updates.squares_V.numel() and is_merged_V.any():
        difference = updates.squares_V - squares_of(optimizer, updates.sums_VD)
        state["sum"][updates.rows_V[is_merged_V]] += difference[is_merged_V]
    reference.update(optimizer, weight, state, (updates.rows_V, updates.sums_VD), step=step)

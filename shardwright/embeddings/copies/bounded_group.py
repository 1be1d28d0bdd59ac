"""A group of tables that ranks read from copies (bounded_tables.py): the copies of this rank, and its own rows.

The rows of the tables are numbered one after another, and each has one owner.

Shape legend: R ranks, U distinct rows of a batch, A rows that are asked for, F rows that follow the answers, V rows
with updates, D columns, X values of a row and its optimizer state, S row ranges.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from shardwright.embeddings.copies.row_clocks import RowClocks
from shardwright.embeddings.copies.row_copies import NO_VERSION, Lease, PlannedRows, RowCopies, row_values
from shardwright.embeddings.copies.updates import RowUpdates, num_squares, squares_of
from shardwright.embeddings.layout import Layout
from shardwright.embeddings.local_shards import LocalShards
from shardwright.errors import UserError
from shardwright.layers.embedding import EmbeddingTables
from shardwright.spec.optimizer import SparseOptimizer

COUNTS = 2  # of rows that are asked for, of rows with updates
NEW_ROW = -1  # in place of a lease: the row follows


@dataclass(slots=True, eq=False)
class CopiedBatch:
    """A batch in one group: what this rank reads, then what other ranks ask of it; filled phase by phase."""

    rows_U: Tensor  # distinct, ascending
    owned_O: Tensor  # positions in U of this rank's own rows
    other_R: Tensor  # and of other ranks' rows
    planned: PlannedRows | None  # None: without training, all rows of other ranks are asked for
    asked_A: Tensor  # positions in U, by owner
    versions_A: Tensor
    order_V: Tensor  # of the rows whose updates are sent: by owner
    counts_R: Tensor  # (R, COUNTS) for each owner
    received_counts_R: Tensor | None = None
    # As owner, by rank: rows to send; rows whose updates follow, and how many each one stands for.
    sent_rows: Sequence[Tensor] = ()
    updated_rows: Sequence[tuple[Tensor, Tensor]] = ()
    answers: Sequence[Tensor] = ()
    # As reader: of the rows that are asked for.
    is_new_A: Tensor | None = None
    leases_A: Tensor | None = None
    new_versions_A: Tensor | None = None
    grad_UD: Tensor | None = None
    received_updates: Sequence[Tensor] = ()


@dataclass(frozen=True, slots=True)
class CopyCounts:
    """What this rank has counted: distinct rows of others that its batches read, how many it asked for, got, and sent
    updates of. `missed`: by power of two (0, 1, 2 to 3, 4 to 7, ...), how many of the
    copies that this rank was asked about missed so many updates."""

    read: int
    asked: int
    received: int
    updated: int
    missed: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RowNumbers:
    """Numbers of the rows of several tables, one after another, and where they are."""

    first_row: Mapping[int, int]  # by table
    starts_S: Tensor  # first number of each row range
    owner_S: Tensor
    local_S: Tensor  # number of its first row among the rows of its owner

    @staticmethod
    def of(layout: Layout, key: tuple[int, ...]) -> "RowNumbers":
        ranges = []
        for owner, groups in enumerate(layout.table_groups):
            for group in (group for group in groups if group.bounded == key):
                firsts = accumulate((shard.rows[1] - shard.rows[0] for shard in group.shards), initial=0)
                ranges += [
                    (shard.table, shard.rows, owner, first) for shard, first in zip(group.shards, firsts, strict=False)
                ]
        ranges.sort()
        first_row, num_rows = dict[int, int](), 0
        for table in dict.fromkeys(table for table, *_ in ranges):
            first_row[table] = num_rows
            num_rows += layout.row_boundaries[table][-1]
        starts = [first_row[table] + rows[0] for table, rows, _, _ in ranges]
        owners, locals_ = [owner for *_, owner, _ in ranges], [local for *_, local in ranges]
        return RowNumbers(first_row, torch.tensor(starts), torch.tensor(owners), torch.tensor(locals_))

    def owners(self, rows: Tensor) -> Tensor:
        return self.owner_S[self._ranges(rows)]

    def local_rows(self, rows: Tensor) -> Tensor:
        """Their numbers on their owner."""
        ranges = self._ranges(rows)
        return rows - self.starts_S[ranges] + self.local_S[ranges]

    def counts(self, rows_U: Tensor) -> list[int]:
        """How many of these ascending rows each table has."""
        begins = torch.searchsorted(rows_U, torch.tensor([*self.first_row.values()])).tolist()
        return [end - begin for begin, end in pairwise([*begins, len(rows_U)])]

    def _ranges(self, rows: Tensor) -> Tensor:
        return torch.searchsorted(self.starts_S, rows, right=True) - 1


class BoundedGroup:
    """The tables of one group: their copies on this rank, and its own rows."""

    def __init__(
        self, bags: EmbeddingTables, layout: Layout, key: tuple[int, ...], shards: LocalShards | None, rank: int
    ) -> None:
        self.dim, pull, push = key
        self.numbers, self._num_ranks, self._rank = RowNumbers.of(layout, key), len(layout.table_groups), rank
        self.tables = [bags.tables[table] for table in self.numbers.first_row]
        assert bags.optimizer is not None
        num_lines = sum(layout.num_copies[table] for table in self.numbers.first_row)
        dtype = bags.holder(self.tables[0].name).weight.dtype
        self._num_squares = num_squares(bags.optimizer, self.dim)
        name = self.tables[0].name
        self.copies = RowCopies(num_lines, self.dim, bags.optimizer, push, dtype, name)
        self._no_updates = RowUpdates(
            torch.empty(0, dtype=torch.int64),
            torch.empty(0, dtype=torch.int64),
            torch.empty(0, self.dim, dtype=dtype),
            torch.empty(0, self._num_squares, dtype=dtype),
        )
        lease = Lease(pull, self._num_ranks - 1)
        self._shards = shards
        flat = shards.flat if shards is not None else None
        weight = self.copies.weight_LD[:0] if flat is None else flat.weight
        state = {name: part[:0] for name, part in self.copies.state.items()} if flat is None else flat.state
        self.clocks = RowClocks(weight, state, lease)
        self.row_width = self.dim + sum(part[:1].numel() for part in self.copies.state.values())
        self.update_width = self.dim + self._num_squares
        self._counted = [0, 0, 0, 0]  # the first fields of CopyCounts

    @property
    def counts(self) -> CopyCounts:
        read, asked, received, updated = self._counted
        return CopyCounts(read, asked, received, updated, tuple(self.clocks.missed.tolist()))

    def plan(self, rows_U: Tensor, *, training: bool) -> CopiedBatch:
        owner_U = self.numbers.owners(rows_U)
        is_own_U = owner_U == self._rank
        owned_O, other_R = is_own_U.nonzero().flatten(), (~is_own_U).nonzero().flatten()
        if training:
            planned = self.copies.plan(rows_U[other_R])
            asked, versions = other_R[planned.is_asked_R], self.copies.versions(planned)
            sent_V = planned.sent_rows_V
        else:
            planned, asked, versions, sent_V = None, other_R, torch.full_like(other_R, NO_VERSION), other_R[:0]
        order_A = owner_U[asked].argsort(stable=True)
        owner_V = self.numbers.owners(sent_V)
        counts = [torch.bincount(owners, minlength=self._num_ranks) for owners in (owner_U[asked], owner_V)]
        order_V = owner_V.argsort(stable=True)
        if training:
            self._count(len(other_R), len(asked), 0, len(sent_V))
        return CopiedBatch(
            rows_U, owned_O, other_R, planned, asked[order_A], versions[order_A], order_V, torch.stack(counts, 1)
        )

    def _count(self, *numbers: int) -> None:
        self._counted = [before + number for before, number in zip(self._counted, numbers, strict=True)]

    def questions(self, batch: CopiedBatch) -> Iterator[list[Tensor]]:
        """For each owner: rows that are asked for, versions of their copies; rows with updates, numbers of updates."""
        asked, sent = batch.counts_R.T.tolist()
        rows_V, counts_V = self._sent_counts(batch)
        columns = (batch.rows_U[batch.asked_A], asked), (batch.versions_A, asked), (rows_V, sent), (counts_V, sent)
        return map(list, zip(*(values.split(sizes) for values, sizes in columns), strict=True))

    def _sent_counts(self, batch: CopiedBatch) -> tuple[Tensor, Tensor]:
        if batch.planned is None:
            return batch.order_V, batch.order_V
        return batch.planned.sent_rows_V[batch.order_V], self.copies.counts_to_send(batch.planned)[batch.order_V]

    def receive_questions(self, batch: CopiedBatch, words: Sequence[Tensor]) -> list[Tensor]:
        """Take the questions of each rank to this one; returns the answers."""
        assert batch.received_counts_R is not None
        rows, versions, updated = list[Tensor](), list[Tensor](), list[tuple[Tensor, Tensor]]()
        for flat, (num_asked, num_updated) in zip(words, batch.received_counts_R.tolist(), strict=True):
            asked, version, row, count = flat.long().split([num_asked, num_asked, num_updated, num_updated])
            rows.append(self.numbers.local_rows(asked))
            versions.append(version)
            updated.append((self.numbers.local_rows(row), count))
        sizes = [len(rows_A) for rows_A in rows]
        is_new, leases, now = self.clocks.answer(torch.cat(rows), torch.cat(versions))
        batch.sent_rows = [rows_A[is_new_A] for rows_A, is_new_A in zip(rows, is_new.split(sizes), strict=True)]
        batch.updated_rows = updated
        answers = torch.stack([torch.where(is_new, NEW_ROW - leases, leases), now], 1)
        return list(answers.split(sizes))

    def receive_answers(self, batch: CopiedBatch, answers_A2: Tensor) -> None:
        leases_A, batch.new_versions_A = answers_A2.long().T
        batch.is_new_A = leases_A <= NEW_ROW
        batch.leases_A = torch.where(batch.is_new_A, NEW_ROW - leases_A, leases_A)

    def num_new_rows(self, batch: CopiedBatch) -> list[int]:
        """By owner, rows that follow."""
        assert batch.is_new_A is not None
        return [int(part.sum()) for part in batch.is_new_A.split(batch.counts_R[:, 0].tolist())]

    def rows_to_send(self, batch: CopiedBatch) -> list[Tensor]:
        rows = [len(rows_F) for rows_F in batch.sent_rows]
        return list(row_values(self.clocks.weight_ED, self.clocks.state, torch.cat(list(batch.sent_rows))).split(rows))

    def read(self, batch: CopiedBatch, values_FX: Tensor, optimizer: SparseOptimizer) -> Tensor:
        """(U, D) The rows of a batch: own ones, copies, and those that their owners sent."""
        assert batch.is_new_A is not None and batch.leases_A is not None and batch.new_versions_A is not None
        weight_UD = values_FX.new_empty(len(batch.rows_U), self.dim)
        weight_UD[batch.owned_O] = self.clocks.weight_ED[self.numbers.local_rows(batch.rows_U[batch.owned_O])]
        if batch.planned is None:
            weight_UD[batch.asked_A] = values_FX[:, : self.dim]
            return weight_UD
        # From the order of owners to the order of rows, which is the one of the copies.
        order_A = batch.asked_A.argsort()
        is_new_A = batch.is_new_A[order_A]
        order_F = batch.asked_A[batch.is_new_A].argsort()
        versions_F = batch.new_versions_A[batch.is_new_A][order_F]
        leases_A = batch.leases_A[order_A]
        self._count(0, 0, len(values_FX), 0)
        self.copies.fill(batch.planned, leases_A, is_new_A, values_FX[order_F], versions_F, optimizer)
        weight_UD[batch.other_R] = self.copies.read(batch.planned)
        return weight_UD

    def updates_to_send(self, batch: CopiedBatch, grad_UD: Tensor, optimizer: SparseOptimizer) -> list[Tensor]:
        """By owner, sums of gradients and squares of the rows whose updates are sent."""
        assert batch.planned is not None
        batch.grad_UD = grad_UD
        sent = self.copies.sent(batch.planned, grad_UD[batch.other_R], optimizer)
        values = torch.cat([sent.sums_VD, sent.squares_VS], 1)[batch.order_V]
        return list(values.split(batch.counts_R[:, 1].tolist()))

    def update(self, batch: CopiedBatch, optimizer: SparseOptimizer, steps: Mapping[str, int]) -> None:
        """Update own rows from what all ranks have sent, and copies from own gradients."""
        assert batch.planned is not None and batch.grad_UD is not None
        step = self.step_of(steps)
        grad_OD = batch.grad_UD[batch.owned_O]
        rows_O = self.numbers.local_rows(batch.rows_U[batch.owned_O])
        own = RowUpdates(rows_O, torch.ones_like(rows_O), grad_OD, squares_of(optimizer, grad_OD))
        updates = [
            own if rank == self._rank else self._received(*of_rank, values)
            for rank, (of_rank, values) in enumerate(zip(batch.updated_rows, batch.received_updates, strict=True))
        ]
        self.apply(updates, optimizer, step)
        self.copies.update(batch.planned, batch.grad_UD[batch.other_R], optimizer, step)

    def step_of(self, steps: Mapping[str, int]) -> int:
        """The number of the tables' step."""
        by_table = {table.name: steps[table.name] for table in self.tables}
        if len(set(by_table.values())) > 1:
            raise UserError(
                f"tables with bounded staleness have had different numbers of steps, {by_table}: give them different "
                "bounds, or plan them exact"
            )
        return next(iter(by_table.values()))

    def _received(self, rows_V: Tensor, counts_V: Tensor, values: Tensor) -> RowUpdates:
        sums, squares = values.split([self.dim, self._num_squares], 1)
        return RowUpdates(rows_V, counts_V, sums, squares)

    def apply(self, updates: Sequence[RowUpdates], optimizer: SparseOptimizer, step: int) -> None:
        rows_U = self.clocks.apply(optimizer, updates, step)
        if self._shards is not None:
            self._shards.mark_flat_rows(rows_U)

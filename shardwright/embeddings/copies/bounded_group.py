"""Tables with equal columns, pull and push, which share their copies: the copies of this rank and the rows it owns.

Rows have consecutive numbers, table after table; each row has one owner: a rank, or a table server.

Shape legend: R ranks, U distinct rows of a batch, A rows whose copies are validated, F rows that owners send, V rows
with updates, O rows of this rank, D columns, X values of a row and its optimizer state, S row ranges.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from shardwright.embeddings.copies.row_clocks import RowClocks
from shardwright.embeddings.copies.row_copies import NO_VERSION, BatchCopies, Lease, RowCopies, row_values
from shardwright.embeddings.copies.updates import RowUpdates, squares_of
from shardwright.embeddings.layout import Layout, TableGroup
from shardwright.embeddings.local_shards import LocalShards
from shardwright.errors import UserError
from shardwright.layers.embedding import EmbeddingTables
from shardwright.spec.optimizer import LAMB, Adam, PartialRowWiseAdam, SparseOptimizer, num_squares

COUNTS = 2  # of rows to validate, of rows with updates
Owners = Sequence[Sequence[TableGroup]]  # the table groups of each owner of rows
NEW_ROW = -1  # a renewal with the row has NEW_ROW - lease in place of the lease, so that it is negative


@dataclass(slots=True, eq=False)
class CopiedBatch:
    """A batch in one group: the rows that this rank reads, and the requests of other ranks to it. Each phase fills its
    fields."""

    rows_U: Tensor  # distinct, ascending
    uses_U: Tensor  # how often the batch has them
    owned_O: Tensor  # positions in U of this rank's own rows
    other_R: Tensor  # and of other ranks' rows
    copies: BatchCopies | None  # None: without training, all rows of other ranks are requested
    expired_A: Tensor  # positions in U, by owner
    versions_A: Tensor
    order_V: Tensor  # of the rows whose updates are pushed: by owner
    counts_R: Tensor  # (R, COUNTS) for each owner
    values_FX: Tensor | None = None  # the rows that servers have sent
    received_counts_R: Tensor | None = None
    # As owner, by rank: rows to send; rows whose updates follow, how many each one stands for, and their uses.
    sent_rows: Sequence[Tensor] = ()
    updated_rows: Sequence[tuple[Tensor, Tensor, Tensor]] = ()
    renewals: Sequence[Tensor] = ()
    # As reader: of the rows that are validated.
    is_new_A: Tensor | None = None
    leases_A: Tensor | None = None
    new_versions_A: Tensor | None = None
    grad_UD: Tensor | None = None
    received_updates: Sequence[Tensor] = ()


@dataclass(frozen=True, slots=True)
class CopyCounts:
    """Counts of this rank since the start. `read`: distinct rows of other ranks in its batches; of these, `validated`
    had an expired lease, `sent` were sent by their owners, and `pushed` had updates pushed. `lookups`: ids of these
    rows in batches, of which `sent_lookups` had their row sent. `missed`: of the copies that this rank validated as
    owner, how many missed 0, 1, 2 to 3, 4 to 7, ... updates."""

    read: int
    validated: int
    sent: int
    pushed: int
    lookups: int
    sent_lookups: int
    missed: tuple[int, ...]

    @property
    def numbers(self) -> list[int]:
        own = [self.read, self.validated, self.sent, self.pushed, self.lookups, self.sent_lookups]
        return [*own, *self.missed]


@dataclass(frozen=True, slots=True)
class RowNumbers:
    """Numbers of the rows of several tables, one after another, and where they are."""

    first_row: Mapping[int, int]  # by table
    starts_S: Tensor  # first number of each row range
    owner_S: Tensor
    local_S: Tensor  # number of its first row among the rows of its owner
    num_rows: int

    @staticmethod
    def number_rows(layout: Layout, owners: Owners, key: tuple[int, ...]) -> "RowNumbers":
        ranges = []
        for owner, groups in enumerate(owners):
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
        return RowNumbers(first_row, torch.tensor(starts), torch.tensor(owners), torch.tensor(locals_), num_rows)

    def num_rows_of(self, owner: int) -> int:
        ends = [*self.starts_S[1:].tolist(), self.num_rows]
        sizes = torch.tensor(ends) - self.starts_S
        return int(sizes[self.owner_S == owner].sum())

    def owners(self, rows: Tensor) -> Tensor:
        return self.owner_S[self._ranges(rows)]

    def local_rows(self, rows: Tensor) -> Tensor:
        """Their positions among the rows of their owner."""
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
        self,
        bags: EmbeddingTables,
        layout: Layout,
        key: tuple[int, ...],
        shards: LocalShards | None = None,
        rank: int | None = None,
    ) -> None:
        """`rank`: of the owners; None: servers own the rows."""
        self.key = key
        self.dim, self.pull, push = key
        owners = layout.table_groups if rank is not None else layout.served
        self.numbers, self._num_owners = RowNumbers.number_rows(layout, owners, key), len(owners)
        self._rank = -1 if rank is None else rank
        self.tables = [bags.tables[table] for table in self.numbers.first_row]
        assert bags.optimizer is not None
        num_lines = sum(layout.num_copies[table] for table in self.numbers.first_row)
        dtype = bags.holder(self.tables[0].name).weight.dtype
        self._num_squares = num_squares(bags.optimizer, self.dim)
        self.names = ", ".join(table.name for table in self.tables)
        self.copies = RowCopies(num_lines, self.dim, bags.optimizer, push, dtype, self.names)
        lease = Lease(self.pull, len(layout.table_groups) - 1)
        self._counts_steps = isinstance(bags.optimizer, Adam | PartialRowWiseAdam | LAMB)
        self._shards = shards
        flat = shards.flat if shards is not None else None
        weight = self.copies.weight_LD[:0] if flat is None else flat.weight
        state = {name: part[:0] for name, part in self.copies.state.items()} if flat is None else flat.state
        self.clocks = RowClocks(weight, state, lease)
        self.row_width = self.dim + sum(part[:1].numel() for part in self.copies.state.values())
        self.update_width = self.dim + self._num_squares
        self._counted = Counter[str]()  # the first fields of CopyCounts

    @property
    def counts(self) -> CopyCounts:
        own = {name: self._counted[name] for name in ("read", "validated", "sent", "pushed", "lookups", "sent_lookups")}
        return CopyCounts(**own, missed=tuple(self.clocks.missed.tolist()))

    def find_copies(self, rows_U: Tensor, uses_U: Tensor, *, training: bool) -> CopiedBatch:
        owner_U = self.numbers.owners(rows_U)
        is_own_U = owner_U == self._rank
        owned_O, other_R = is_own_U.nonzero().flatten(), (~is_own_U).nonzero().flatten()
        if training:
            copies = self.copies.find_lines(rows_U[other_R], uses_U[other_R])
            expired, versions = other_R[copies.is_expired_R], self.copies.versions(copies)
            pushed_V = copies.pushed_rows_V
        else:
            copies, expired, versions, pushed_V = None, other_R, torch.full_like(other_R, NO_VERSION), other_R[:0]
        order_A = owner_U[expired].argsort(stable=True)
        owner_V = self.numbers.owners(pushed_V)
        counts = [torch.bincount(owners, minlength=self._num_owners) for owners in (owner_U[expired], owner_V)]
        order_V = owner_V.argsort(stable=True)
        if training:
            self._counted.update(read=len(other_R), validated=len(expired), pushed=len(pushed_V))
            self._counted["lookups"] += int(uses_U[other_R].sum())
        counts_R = torch.stack(counts, 1)
        expired_A, versions_A = expired[order_A], versions[order_A]
        return CopiedBatch(rows_U, uses_U, owned_O, other_R, copies, expired_A, versions_A, order_V, counts_R)

    def validation_requests(self, batch: CopiedBatch) -> Iterator[list[Tensor]]:
        """By owner: rows to validate, versions of their copies; rows with updates, numbers of updates and of uses."""
        num_expired, num_pushed = batch.counts_R.T.tolist()
        of_expired = batch.rows_U[batch.expired_A], batch.versions_A
        columns = [column.split(num_expired) for column in of_expired]
        columns += [column.split(num_pushed) for column in self._pushed_counts(batch)]
        return map(list, zip(*columns, strict=True))

    def _pushed_counts(self, batch: CopiedBatch) -> tuple[Tensor, Tensor, Tensor]:
        if batch.copies is None:
            return batch.order_V, batch.order_V, batch.order_V
        counts_V, uses_V = self.copies.counts_to_push(batch.copies)
        rows_V, order_V = batch.copies.pushed_rows_V, batch.order_V
        return rows_V[order_V], counts_V[order_V], uses_V[order_V]

    def receive_validations(self, batch: CopiedBatch, words: Sequence[Tensor]) -> list[Tensor]:
        """Take the requests of each rank to this one; returns the renewals."""
        assert batch.received_counts_R is not None
        rows, versions, updated = list[Tensor](), list[Tensor](), list[tuple[Tensor, Tensor, Tensor]]()
        for flat, (num_expired, num_updated) in zip(words, batch.received_counts_R.tolist(), strict=True):
            expired, version, row, count, uses = flat.long().split([num_expired] * 2 + [num_updated] * 3)
            rows.append(self.numbers.local_rows(expired))
            versions.append(version)
            updated.append((self.numbers.local_rows(row), count, uses))
        sizes = [len(rows_A) for rows_A in rows]
        is_new, leases, now = self.clocks.renew(torch.cat(rows), torch.cat(versions))
        batch.sent_rows = [rows_A[is_new_A] for rows_A, is_new_A in zip(rows, is_new.split(sizes), strict=True)]
        batch.updated_rows = updated
        renewals = torch.stack([torch.where(is_new, NEW_ROW - leases, leases), now], 1)
        return list(renewals.split(sizes))

    def receive_renewals(self, batch: CopiedBatch, renewals_A2: Tensor) -> None:
        leases_A, batch.new_versions_A = renewals_A2.long().T
        if self._rank < 0:  # servers do not report what copies missed
            self.clocks.count_missed(batch.new_versions_A, batch.versions_A)
        batch.is_new_A = leases_A <= NEW_ROW
        batch.leases_A = torch.where(batch.is_new_A, NEW_ROW - leases_A, leases_A)

    def num_new_rows(self, batch: CopiedBatch) -> list[int]:
        """By owner, how many rows it sends with the vectors."""
        assert batch.is_new_A is not None
        return [int(part.sum()) for part in batch.is_new_A.split(batch.counts_R[:, 0].tolist())]

    def rows_to_send(self, batch: CopiedBatch) -> list[Tensor]:
        rows = [len(rows_F) for rows_F in batch.sent_rows]
        return list(row_values(self.clocks.weight_ED, self.clocks.state, torch.cat(list(batch.sent_rows))).split(rows))

    def read(self, batch: CopiedBatch, values_FX: Tensor, optimizer: SparseOptimizer) -> Tensor:
        """(U, D) The rows of a batch: own ones, copies, and those that owners have sent."""
        assert batch.is_new_A is not None and batch.leases_A is not None and batch.new_versions_A is not None
        weight_UD = values_FX.new_empty(len(batch.rows_U), self.dim)
        owned_rows = self.numbers.local_rows(batch.rows_U[batch.owned_O])
        weight_UD.index_copy_(0, batch.owned_O, self.clocks.weight_ED.index_select(0, owned_rows))
        if batch.copies is None:
            weight_UD.index_copy_(0, batch.expired_A, values_FX[:, : self.dim])
            return weight_UD
        # From the order of owners to the order of rows, which is the one of the copies.
        order_A = batch.expired_A.argsort()
        is_new_A = batch.is_new_A[order_A]
        order_F = batch.expired_A[batch.is_new_A].argsort()
        versions_F = batch.new_versions_A[batch.is_new_A][order_F]
        leases_A = batch.leases_A[order_A]
        sent_lookups = int(batch.uses_U[batch.expired_A[batch.is_new_A]].sum())
        self._counted.update(sent=len(values_FX), sent_lookups=sent_lookups)
        self.copies.fill(batch.copies, leases_A, is_new_A, values_FX[order_F], versions_F, optimizer)
        weight_UD.index_copy_(0, batch.other_R, self.copies.read(batch.copies))
        return weight_UD

    def updates_to_push(self, batch: CopiedBatch, grad_UD: Tensor, optimizer: SparseOptimizer) -> list[Tensor]:
        """By owner, sums of gradients and of squares of the rows whose updates are pushed."""
        assert batch.copies is not None
        batch.grad_UD = grad_UD
        pushed = self.copies.updates_to_push(batch.copies, grad_UD.index_select(0, batch.other_R), optimizer)
        values = torch.cat([pushed.sums_VD, pushed.squares_VS], 1)[batch.order_V]
        return list(values.split(batch.counts_R[:, 1].tolist()))

    def update_only(self, batch: CopiedBatch, is_used_U: Tensor) -> None:
        """Let the batch update only these of its rows, all of which others own."""
        assert batch.copies is not None
        batch.copies.is_updated_R = is_used_U[batch.other_R]
        batch.copies.is_pushed_R &= batch.copies.is_updated_R
        owner_V = self.numbers.owners(batch.copies.pushed_rows_V)
        batch.order_V = owner_V.argsort(stable=True)
        batch.counts_R[:, 1] = torch.bincount(owner_V, minlength=self._num_owners)

    def update(self, batch: CopiedBatch, optimizer: SparseOptimizer, steps: Mapping[str, int]) -> None:
        """Update own rows from the updates of all ranks, and copies from own gradients."""
        assert batch.copies is not None and batch.grad_UD is not None
        step = self.max_step(steps)
        grad_OD = batch.grad_UD.index_select(0, batch.owned_O)
        rows_O = self.numbers.local_rows(batch.rows_U[batch.owned_O])
        uses_O = batch.uses_U[batch.owned_O]
        own = RowUpdates(rows_O, torch.ones_like(rows_O), uses_O, grad_OD, squares_of(optimizer, grad_OD))
        updates = [
            own if rank == self._rank else RowUpdates(*of_rank, *self.split_values(values))
            for rank, (of_rank, values) in enumerate(zip(batch.updated_rows, batch.received_updates, strict=True))
        ]
        self.apply(updates, optimizer, step)
        self.copies.update(batch.copies, batch.grad_UD.index_select(0, batch.other_R), optimizer, step)

    def max_step(self, steps: Mapping[str, int]) -> int:
        return max(1, *(steps[table.name] for table in self.tables))

    def check_steps(self, steps: Mapping[str, int]) -> None:
        """Raise if the tables have had different numbers of steps: their rows are updated in one call."""
        if self._rank < 0 and not self._counts_steps:
            return
        by_table = {table.name: steps[table.name] for table in self.tables}
        if len(set(by_table.values())) > 1:
            raise UserError(
                f"tables that share copies of rows have had different numbers of steps, {by_table}: give each a "
                "different pull or push, so that they do not share copies, or leave one out of keep_on_servers"
            )

    def split_values(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """The sums of gradients and of squares of pushed updates."""
        sums, squares = values.split([self.dim, self._num_squares], 1)
        return sums, squares

    def apply(self, updates: Sequence[RowUpdates], optimizer: SparseOptimizer, step: int) -> None:
        rows_U = self.clocks.apply(optimizer, updates, step)
        if self._shards is not None:
            self._shards.mark_flat_rows(rows_U)

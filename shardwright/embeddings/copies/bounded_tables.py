"""Tables whose rows ranks read from copies, which may miss recent updates of other ranks (bounded staleness).

Every rank keeps copies of rows that other ranks own (row_copies.py); their owners count updates (row_clocks.py). A rank
reads its own rows directly. Phases, between the exchange of ids and the lookup, then with the exchanges of vectors and
of gradients; collectives run on the ids lane:
    copies      find lines for the rows of a batch; decide which copies to validate, and which updates to push
    counts      all-to-all: how many rows
    validate    all-to-all: rows and versions of copies with an expired lease; rows whose updates follow
    renew       all-to-all: for how many batches a copy may be read, or that the row follows
    vectors     rows, after the vectors of other tables
    gradients   updates, after the gradients of other tables
    update      own rows, from the updates of all ranks; copies, from own gradients
    flush       before state is read: all updates are pushed, and copies are dropped
An owner sends a row only if its copy misses too many updates, and receives one pushed update for several steps.

Shape legend: R ranks, U distinct rows of a batch, D columns.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from shardwright.comm import collective
from shardwright.comm.mesh import Group
from shardwright.comm.pending import Pending
from shardwright.embeddings.copies.bounded_group import COUNTS, BoundedGroup, CopiedBatch, CopyCounts
from shardwright.embeddings.copies.updates import RowUpdates
from shardwright.embeddings.layout import Layout
from shardwright.embeddings.local_shards import LocalShards
from shardwright.embeddings.outgoing import DistinctRows
from shardwright.layers.embedding import EmbeddingTables
from shardwright.spec.optimizer import SparseOptimizer

RENEWAL_WORDS = 2  # lease and version


class BoundedTables:
    """The groups of tables with bounded staleness; there may be none."""

    def __init__(
        self, bags: EmbeddingTables, layout: Layout, local_shards: Sequence[LocalShards], ids_lane: Group
    ) -> None:
        self._bags, self._lane = bags, ids_lane
        shards = {local.table_group.bounded: local for local in local_shards}
        keys = {group.bounded for groups in layout.table_groups for group in groups}
        self.groups = [BoundedGroup(bags, layout, key, shards.get(key), ids_lane.index) for key in sorted(keys - {()})]
        self.table_names = frozenset(table.name for group in self.groups for table in group.tables)
        is_large = any(group.numbers.num_rows > torch.iinfo(torch.int32).max for group in self.groups)
        self._word_dtype = torch.int64 if is_large else torch.int32
        self._exchanged = sorted(layout.row_exchange_tables)
        # By group, its tables among those whose rows are exchanged.
        self._positions = [[self._exchanged.index(table) for table in group.numbers.first_row] for group in self.groups]

    def find_rows(self, distinct: DistinctRows) -> list[CopiedBatch]:
        """All phases before the lookup, one after another, without training."""
        batches = self.find_copies(distinct, training=False)
        if batches:
            self.exchange_counts(batches).wait()
            self.validate(batches).wait()
            self.renew(batches).wait()
        return batches

    def find_copies(self, distinct: DistinctRows, *, training: bool) -> list[CopiedBatch]:
        """Without training, all rows of other ranks are requested; all updates must be pushed."""
        for group in self.groups if training else ():
            group.check_steps(self._bags.steps)  # equal on all ranks
        return find_copies_of(self.groups, self._positions, distinct, training=training)

    def exchange_counts(self, batches: Sequence[CopiedBatch]) -> Pending[None]:
        counts = torch.stack([batch.counts_R for batch in batches], 1).flatten(1)

        def receive(received: Tensor) -> None:
            for batch, counts_R in zip(batches, received.view(-1, len(batches), COUNTS).unbind(1), strict=True):
                batch.received_counts_R = counts_R

        return collective.all_to_all_rows(counts, self._lane).then(receive)

    def validate(self, batches: Sequence[CopiedBatch]) -> Pending[None]:
        """All-to-all of validation requests; owners compute the renewals when it ends."""
        by_rank: list[list[Tensor]] = [[] for _ in range(self._lane.size)]
        for group, batch in zip(self.groups, batches, strict=True):
            for message, words in zip(by_rank, group.validation_requests(batch), strict=True):
                message += words
        sent = [sum(map(len, message)) for message in by_rank]
        sizes = [_num_words(batch.received_counts_R) for batch in batches]
        received = [sum(of_rank) for of_rank in zip(*sizes, strict=True)]

        def receive(flat: Tensor) -> None:
            rest = list(flat.split(received))
            for group, batch, of_group in zip(self.groups, batches, sizes, strict=True):
                words, rest = _split_heads(rest, of_group)
                batch.renewals = group.receive_validations(batch, words)

        return collective.all_to_all(self._to_words(by_rank), sent, received, self._lane).then(receive)

    def renew(self, batches: Sequence[CopiedBatch]) -> Pending[None]:
        """All-to-all of renewals."""
        by_rank = [[batch.renewals[rank].flatten() for batch in batches] for rank in range(self._lane.size)]
        sent = [sum(map(len, message)) for message in by_rank]
        sizes = [(batch.counts_R[:, 0] * RENEWAL_WORDS).tolist() for batch in batches]
        received = [sum(of_rank) for of_rank in zip(*sizes, strict=True)]

        def receive(flat: Tensor) -> None:
            rest = list(flat.split(received))
            for group, batch, of_group in zip(self.groups, batches, sizes, strict=True):
                renewals, rest = _split_heads(rest, of_group)
                group.receive_renewals(batch, torch.cat(renewals).view(-1, RENEWAL_WORDS))

        return collective.all_to_all(self._to_words(by_rank), sent, received, self._lane).then(receive)

    def rows_to_send(self, batches: Sequence[CopiedBatch]) -> Iterator[list[Tensor]]:
        """By rank, the rows that follow the vectors of other tables."""
        parts = [group.rows_to_send(batch) for group, batch in zip(self.groups, batches, strict=True)]
        return (list(of_rank) for of_rank in zip(*parts, strict=True))

    def num_row_values(self, batches: Sequence[CopiedBatch]) -> list[int]:
        """By rank, the values of the rows that it sends."""
        return _sum_by_rank(
            [
                [num * group.row_width for num in group.num_new_rows(batch)]
                for group, batch in zip(self.groups, batches, strict=True)
            ],
            self._lane.size,
        )

    def read(self, batches: Sequence[CopiedBatch], values_by_rank: Sequence[Tensor]) -> dict[int, Tensor]:
        """The rows of a batch by table, among those whose rows are exchanged."""
        rest, rows_by_table = list(values_by_rank), dict[int, Tensor]()
        for group, positions, batch in zip(self.groups, self._positions, batches, strict=True):
            sizes = [num * group.row_width for num in group.num_new_rows(batch)]
            values, rest = _split_heads(rest, sizes)
            rows_UD = group.read(batch, torch.cat(values).view(-1, group.row_width), self._optimizer)
            counts = group.numbers.counts(batch.rows_U)
            rows_by_table |= zip(positions, rows_UD.split(counts), strict=True)
        return rows_by_table

    def updates_to_push(self, batches: Sequence[CopiedBatch], sums: Sequence[Tensor]) -> Iterator[list[Tensor]]:
        """By rank, the updates that follow the gradients of other tables; `sums`: of rows, by table."""
        parts = [
            group.updates_to_push(batch, torch.cat([sums[position] for position in positions]), self._optimizer)
            for group, positions, batch in zip(self.groups, self._positions, batches, strict=True)
        ]
        return (list(of_rank) for of_rank in zip(*parts, strict=True))

    def num_update_values(self, batches: Sequence[CopiedBatch]) -> list[int]:
        """By rank, the values of the updates that it sends."""
        return _sum_by_rank(
            [
                [len(rows) * group.update_width for rows, _, _ in batch.updated_rows]
                for group, batch in zip(self.groups, batches, strict=True)
            ],
            self._lane.size,
        )

    def receive_updates(self, batches: Sequence[CopiedBatch], values_by_rank: Sequence[Tensor]) -> None:
        rest = list(values_by_rank)
        for group, batch in zip(self.groups, batches, strict=True):
            sizes = [len(rows) * group.update_width for rows, _, _ in batch.updated_rows]
            values, rest = _split_heads(rest, sizes)
            batch.received_updates = [part.view(-1, group.update_width) for part in values]

    def update(self, batches: Sequence[CopiedBatch], optimizer: SparseOptimizer, steps: Mapping[str, int]) -> None:
        for group, batch in zip(self.groups, batches, strict=True):
            group.update(batch, optimizer, steps)

    def cancel(self) -> None:
        """End a batch whose step has failed."""
        for group in self.groups:
            group.copies.cancel()

    def flush(self) -> None:
        """Push all updates and drop all copies, between steps: all-to-alls on the ids lane. All ranks call it."""
        for group in self.groups:
            if not group.copies.num_batches:  # since the last time; equal on all ranks
                continue
            unpushed = group.copies.drop()
            owners = group.numbers.owners(unpushed.rows_V)
            pushed = unpushed.select(owners.argsort(stable=True))
            counts = torch.bincount(owners, minlength=self._lane.size)
            sizes, received = counts.tolist(), collective.all_to_all_rows(counts.unsqueeze(1), self._lane).wait()
            num_received = received.flatten().tolist()
            rows, num, uses, *values = (
                collective.all_to_all(column, sizes, num_received, self._lane).wait() for column in pushed.columns
            )
            if len(rows):
                updates = RowUpdates(group.numbers.local_rows(rows), num, uses, *values)
                group.apply([updates], self._optimizer, group.max_step(self._bags.steps))
            group.clocks.forget()

    def counts(self) -> dict[str, CopyCounts]:
        """By group, named after its tables."""
        return {group.names: group.counts for group in self.groups}

    def _to_words(self, by_rank: Sequence[Sequence[Tensor]]) -> Tensor:
        return torch.cat([part for message in by_rank for part in message]).to(self._word_dtype)

    @property
    def _optimizer(self) -> SparseOptimizer:
        assert self._bags.optimizer is not None
        return self._bags.optimizer


def find_copies_of(
    groups: Sequence[BoundedGroup], positions: Sequence[Sequence[int]], distinct: DistinctRows, *, training: bool
) -> list[CopiedBatch]:
    """`positions`: by group, its tables among those whose rows are exchanged."""
    if not groups:
        return []
    rows_by_table, uses_by_table, batches = distinct.by_table(), distinct.uses_by_table(), []
    for group, tables in zip(groups, positions, strict=True):
        firsts = group.numbers.first_row.values()
        rows = [rows_by_table[table].long() + first for table, first in zip(tables, firsts, strict=True)]
        uses_U = torch.cat([uses_by_table[table] for table in tables])
        batches.append(group.find_copies(torch.cat(rows), uses_U, training=training))
    return batches


def _num_words(counts_R: Tensor | None) -> list[int]:
    """A row and a version to validate; a row with updates, their number and uses."""
    assert counts_R is not None
    return (counts_R @ torch.tensor([2, 3])).tolist()


def _split_heads(flats: Sequence[Tensor], sizes: Sequence[int]) -> tuple[list[Tensor], list[Tensor]]:
    """Split each tensor after its first `sizes[i]` values."""
    heads = [flat[:size] for flat, size in zip(flats, sizes, strict=True)]
    return heads, [flat[size:] for flat, size in zip(flats, sizes, strict=True)]


def _sum_by_rank(sizes: Sequence[Sequence[int]], num: int) -> list[int]:
    return [sum(of_rank) for of_rank in zip(*sizes, strict=True)] if sizes else [0] * num

"""The update of banks: at once where nobody else has the same rows, after a meeting where others do.

Replicas sum what each was sent, in one order, so that they stay alike to the bit: rows with their sums travel, or whole
tables where those are fewer bytes. Pieces with some of a row's columns add up what an optimizer asks of whole rows.

Shape legend: U distinct rows of a piece, D its columns.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shardwright.comm import collective
from shardwright.comm.mesh import Group
from shardwright.comm.pending import Pending
from shardwright.embeddings.layout import Layout, TableGroup, TableShard, replica_for
from shardwright.embeddings.local_shards import LocalShards
from shardwright.jagged import Jagged
from shardwright.kernels import embedding, reference
from shardwright.kernels.arguments import POOLINGS, Ids, TableState
from shardwright.kernels.gradient_sums import GradientSums, add_at_positions, sum_at_positions, to_global_positions
from shardwright.spec.optimizer import SGD, RowWiseAdaGrad, SparseOptimizer

ROW_ID_VALUES = 2  # that go with a row's own: its place, in 64 bits
ShardKey = tuple[int, int, tuple[tuple[int, int], ...]]  # table, band, columns
RowwiseSteps = Mapping[ShardKey, reference.RowSumGenerator[None]]  # steps that ask for sums over whole rows
PendingRowSums = Pending[dict[ShardKey, Tensor]]


@dataclass(frozen=True, slots=True)
class OptimizerStep:
    """What is done to the rows: the optimizer, and the number of each table's step, from 1."""

    optimizer: SparseOptimizer
    steps: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class ReceivedGradients:
    """Gradients of each bank's vectors, by bank number; for replicas their sums over all replicas, possibly in flight;
    and for each feature whether the loss of some rank used it."""

    gradients: Mapping[int, Sequence[Tensor]]
    replica_sums: Mapping[int, Pending[GradientSums]]
    used_features: tuple[bool, ...]
    host_sum_gradients: Tensor | None = None  # gradients of sums of parts


class TableUpdater:
    """The updates of all banks of a rank; `dtype` is that of gradients."""

    def __init__(self, layout: Layout, local_shards: Sequence[LocalShards], group: Group, dtype: torch.dtype) -> None:
        self._holdings, self._group, self._dtype = local_shards, group, dtype
        self._rank, num = group.index, group.size
        self._everywhere = [at for at, one in enumerate(local_shards) if len(one.table_group.replicas) == num > 1]
        self._columns = any(bank.needs_column_reduce for banks in layout.table_groups for bank in banks)
        mine = {_place(piece): piece for piece in _in_part(layout.table_groups[self._rank])}
        self._sent: list[list[ShardKey]] = [[] for _ in range(num)]
        self._received: list[list[ShardKey]] = [[] for _ in range(num)]
        for rank, banks in enumerate(layout.table_groups if self._columns else ()):
            theirs = {_place(piece): piece for piece in _in_part(banks)}
            if rank != self._rank:
                self._sent[rank] = _told(mine, theirs, self._rank, rank, num)
                self._received[rank] = _told(theirs, mine, rank, self._rank, num)

    def max_replica_values(self, features: Jagged) -> int:
        """Of the rows with gradients, at most, in replicas that serve one rank each: what they would send."""
        ids = dict(enumerate(features.lengths.sum(1).tolist()))
        found = 0
        for at in self._everywhere:
            streams, pieces = self._holdings[at].table_group.streams, self._holdings[at].table_group.shards
            for number, piece in enumerate(pieces):
                rows = piece.rows[1] - piece.rows[0]
                mine = (one.feature for one in streams if one.shard_index == number)
                read = sum(rows if feature is None else ids[feature] for feature in mine)
                found += min(read, rows) * (piece.dim + ROW_ID_VALUES)
        return found

    def start_replica_sums(
        self, local: Mapping[int, tuple[Ids, Sequence[Tensor]]], max_values: float
    ) -> dict[int, Pending[GradientSums]]:
        """Whole tables on their way to all replicas, where no rank's rows are `numbers` that would be fewer."""
        found = {}
        for at in self._everywhere:
            whole = sum(weight.numel() + len(weight) for weight in self._holdings[at].weights)
            if 2 * whole <= max_values:
                found[at] = self._reduced(self._holdings[at], *local[at])
        return found

    def _reduced(self, holding: LocalShards, wanted: Ids, gradients: Sequence[Tensor]) -> Pending[GradientSums]:
        """Every row of the tables: its sum, and on how many ranks it has one."""
        sizes = [weight.numel() for weight in holding.weights]
        rows = [len(weight) for weight in holding.weights]
        flat = torch.zeros(sum(sizes) + sum(rows), dtype=gradients[0].dtype)
        *tables, touched = flat.split([*sizes, sum(rows)])
        marks = touched.split(rows)
        sums = [table.view(len(mark), -1) for table, mark in zip(tables, marks, strict=True)]
        add_at_positions(wanted, gradients, sums)
        touched[to_global_positions(wanted, rows).values] = 1

        def found(_: Tensor) -> GradientSums:
            there = [mark.nonzero().flatten() for mark in marks]
            picked = [table[at] for table, at in zip(sums, there, strict=True)]
            return GradientSums(torch.cat(there), [len(one) for one in there], picked)

        return collective.all_reduce(flat, self._group).then(found)

    def run(self, ids_by_group: Sequence[Ids], received: ReceivedGradients, step: OptimizerStep) -> None:
        """Pieces of columns first: what they ask of whole rows is under way while the others are updated."""
        by_row = self._begun_by_row(ids_by_group, received, step) if self._columns else None
        for at, (holding, ids) in enumerate(zip(self._holdings, ids_by_group, strict=True)):
            bank = holding.table_group
            if bank.needs_column_reduce:
                continue
            if len(bank.replicas) == 1:
                holding.update(ids, received.gradients[at], step.optimizer, step.steps)
            else:
                holding.update_from_sums(self._sums(at, ids, received), step.optimizer, step.steps)
        if by_row is not None:
            self._end_by_row(*by_row, reference.num_row_sums(step.optimizer))

    def _sums(self, at: int, ids: Ids, arrived: ReceivedGradients) -> GradientSums:
        """Of one bank's rows, over all its replicas."""
        if at in arrived.replica_sums:
            return arrived.replica_sums[at].wait()
        sums = self._holdings[at].sum_gradients(ids, arrived.gradients[at])
        return (
            self._with_replicas(self._holdings[at], sums) if len(self._holdings[at].table_group.replicas) > 1 else sums
        )

    def _with_replicas(self, holding: LocalShards, sums: GradientSums) -> GradientSums:
        """What all replicas were sent, each row once."""
        replicas = holding.table_group.replicas
        ranks = [rank in replicas for rank in range(self._group.size)]
        pieces = len(sums.counts)
        counts = torch.tensor(sums.counts)
        told = self._to_all(counts, ranks, [pieces if one else 0 for one in ranks])
        counts_RP = torch.stack(told)
        rows = self._to_all(sums.rows_U, ranks, _by_rank(ranks, counts_RP.sum(1).tolist()))
        dims = torch.tensor([piece.dim for piece in holding.table_group.shards])
        flat = torch.cat([one.flatten() for one in sums.sums])
        numbers = self._to_all(flat, ranks, _by_rank(ranks, (counts_RP * dims).sum(1).tolist()))
        rows_by = [one.split(each.tolist()) for one, each in zip(rows, counts_RP, strict=True)]
        sums_by = [one.split((each * dims).tolist()) for one, each in zip(numbers, counts_RP, strict=True)]
        found_rows, found_sums = [], []
        for at, dim in enumerate(dims.tolist()):
            rows_U, place_N = torch.unique(torch.cat([one[at] for one in rows_by]), return_inverse=True)
            given_ND = torch.cat([one[at].view(-1, dim) for one in sums_by])
            found_rows.append(rows_U)
            found_sums.append(_summed(place_N, given_ND, len(rows_U)))
        return GradientSums(torch.cat(found_rows), [len(one) for one in found_rows], found_sums)

    def _to_all(self, x: Tensor, ranks: Sequence[bool], received: Sequence[int]) -> list[Tensor]:
        """This rank's numbers to each of these ranks, and theirs, in the order of ranks. No other ranks take part, so
        that not all can compare what they do."""
        group = replace(self._group, check=False)
        sent = [len(x) if one else 0 for one in ranks]
        copies = torch.cat([x] * sum(ranks))
        arrived = collective.all_to_all(copies, sent, received, group).wait().split(list(received))
        return [one for one, taken in zip(arrived, ranks, strict=True) if taken]

    def _begun_by_row(
        self, wanted: Sequence[Ids], arrived: ReceivedGradients, rule: OptimizerStep
    ) -> tuple[RowwiseSteps, PendingRowSums]:
        """The optimizer's steps on pieces of columns, and what they ask of whole rows, on its way."""
        running: dict[ShardKey, reference.RowSumGenerator[None]] = {}
        for at, holding in enumerate(self._holdings):
            if not holding.table_group.needs_column_reduce:
                continue
            sums = self._sums(at, wanted[at], arrived)
            rows = sums.rows_U.split(sums.counts)
            for piece, table, state, names, rows_U, sums_UD in zip(
                holding.table_group.shards,
                holding.tables,
                holding.table_states(rule.steps),
                holding.optimizer_states,
                rows,
                sums.sums,
                strict=True,
            ):
                named = dict(zip(names, state.state, strict=True))
                if state.is_trained:
                    if state.changed_rows is not None:
                        state.changed_rows[rows_U] = True
                    running[_place(piece)] = _updating(rule.optimizer, state, named, (rows_U, sums_UD), table.dim)
        return running, self._over_columns({place: next(one) for place, one in running.items()})

    def _end_by_row(self, running: RowwiseSteps, whole: PendingRowSums, num_sums: int) -> None:
        for number in range(num_sums):
            found, partial = whole.wait(), dict[ShardKey, Tensor]()
            for place, one in running.items():
                with suppress(StopIteration):
                    partial[place] = one.send(found[place])
            if number + 1 < num_sums:
                whole = self._over_columns(partial)

    def _over_columns(self, partial: Mapping[ShardKey, Tensor]) -> PendingRowSums:
        """Sums over whole rows, added in the order of their columns."""
        sizes = {(table, band): len(one) for (table, band, _), one in partial.items()}
        parts = [partial[place] for places in self._sent for place in places if place in partial]
        sent = [sum(len(partial[place]) for place in places if place in partial) for places in self._sent]
        expected = [[place for place in places if place[:2] in sizes] for places in self._received]
        received = [sum(sizes[place[:2]] for place in places) for places in expected]
        flat = torch.cat([torch.empty(0, dtype=self._dtype), *parts])

        def added(arrived: Tensor) -> dict[ShardKey, Tensor]:
            places = [place for one in expected for place in one]
            found = dict(zip(places, arrived.split([sizes[place[:2]] for place in places]), strict=True))
            of_rows: dict[tuple[int, int], list[Tensor]] = {}
            for place, one in sorted({**found, **partial}.items()):
                of_rows.setdefault(place[:2], []).append(one)
            return {place: torch.stack(of_rows[place[:2]]).sum(0) for place in partial}

        return collective.all_to_all(flat, sent, received, self._group).then(added)


def _updating(
    optimizer: SparseOptimizer,
    table: TableState,
    state: Mapping[str, Tensor],
    gradient: tuple[Tensor, Tensor],
    dim: int,
) -> reference.RowSumGenerator[None]:
    """`reference.updating`; of the optimizer that most tables have, with the compiled kernels."""
    if not isinstance(optimizer, RowWiseAdaGrad) or optimizer.clip or optimizer.weight_decay:
        yield from reference.update_column_shard(
            optimizer, table.weight, state, gradient, (table.step, table.rounding_key, dim)
        )
        return
    rows_U, grad_UD = gradient
    squares_U = yield torch.linalg.vecdot(grad_UD, grad_UD)
    sum_U = state["sum"][rows_U] + squares_U / dim
    state["sum"][rows_U] = sum_U
    rates_U = optimizer.lr / (sum_U.sqrt() + optimizer.eps)
    ids = Ids(rows_U, torch.tensor([0, len(rows_U)]), rates_U, [0], [POOLINGS.index("none")])
    plain = TableState(table.weight, (), table.step, table.rounding_key)
    embedding.update([plain], ids, [grad_UD.new_empty(1, 0), grad_UD], SGD(lr=1.0))


def _told(
    mine: Mapping[ShardKey, TableShard], theirs: Mapping[ShardKey, TableShard], rank: int, other: int, num: int
) -> list[ShardKey]:
    """The places of `rank` that `other` has other columns of, and asks this rank for."""
    bands = {place[:2] for place in theirs}
    return sorted(
        place
        for place, piece in mine.items()
        if place[:2] in bands and place not in theirs and replica_for(piece.ranks, other, num) == rank
    )


def _place(piece: TableShard) -> ShardKey:
    return piece.table, piece.range_index, piece.cols


def _in_part(banks: Sequence[TableGroup]) -> list[TableShard]:
    return [piece for bank in banks if bank.needs_column_reduce for piece in bank.shards]


def _by_rank(ranks: Sequence[bool], each: Sequence[int]) -> list[int]:
    """The numbers of those ranks that take part, 0 of the others."""
    numbers = iter(each)
    return [next(numbers) if one else 0 for one in ranks]


def _summed(place_N: Tensor, given_ND: Tensor, rows: int) -> Tensor:
    offsets = torch.tensor([0, len(place_N)])
    ids = Ids(place_N, offsets, None, [0], [POOLINGS.index("none")])
    return sum_at_positions(ids, [given_ND.new_empty(1, 0), given_ND], [rows], [given_ND.shape[1]])[0]

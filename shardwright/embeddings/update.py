"""Update table groups, after summing the gradients of rows that several ranks hold.

Replicas sum the gradients of all replicas in the same order, so that they stay bitwise equal. They exchange rows with
their sums, or all-reduce whole tables where that is fewer bytes. Column shards add the partial sums that an optimizer
needs over full rows. All collectives run on the group passed to TableUpdater (the wire lane).

Shape legend: U distinct rows of a shard, D its columns, R replicas, P shards of a table group, N received rows.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count

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

ROW_ID_VALUES = 2  # a row's position is sent with its gradient: 64 bits, the size of two float32 values
ShardKey = tuple[int, int, tuple[tuple[int, int], ...]]  # table, index of the row range, columns
RowwiseSteps = Mapping[
    ShardKey, reference.RowSumGenerator[None]
]  # optimizer steps that yield per-row sums over columns
PendingRowSums = Pending[dict[ShardKey, Tensor]]


@dataclass(frozen=True, slots=True)
class OptimizerStep:
    """The optimizer, and the number of each table's step, from 1."""

    optimizer: SparseOptimizer
    steps: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class ReceivedGradients:
    """Gradients of each table group's vectors, by index of the group."""

    gradients: Mapping[int, Sequence[Tensor]]
    replica_sums: Mapping[int, Pending[GradientSums]]  # sums over all replicas of the groups that are all-reduced
    used_features: tuple[bool, ...]  # by feature: whether the loss of some rank used it
    host_sum_gradients: Tensor | None = None  # gradients of this rank's host sums


class TableUpdater:
    """Updates all table groups of a rank; `dtype`: of gradients."""

    def __init__(self, layout: Layout, local_shards: Sequence[LocalShards], group: Group, dtype: torch.dtype) -> None:
        self._shards, self._group, self._dtype = local_shards, group, dtype
        self._rank, num = group.index, group.size
        self._on_all_ranks = [i for i, shards in enumerate(local_shards) if len(shards.table_group.replicas) == num > 1]
        self._has_column_shards = any(group.needs_column_reduce for groups in layout.table_groups for group in groups)
        local = {_key(shard): shard for shard in _column_shards(layout.table_groups[self._rank])}
        self._sent_keys: list[list[ShardKey]] = [[] for _ in range(num)]
        self._received_keys: list[list[ShardKey]] = [[] for _ in range(num)]
        for rank, groups in enumerate(layout.table_groups if self._has_column_shards else ()):
            remote = {_key(shard): shard for shard in _column_shards(groups)}
            if rank != self._rank:
                self._sent_keys[rank] = _keys_for(local, remote, self._rank, rank, num)
                self._received_keys[rank] = _keys_for(remote, local, rank, self._rank, num)

    def max_replica_values(self, features: Jagged) -> int:
        """Upper bound on the values of this rank's rows with gradients, positions included.
        Counts only table groups that are replicated on all ranks."""
        num_ids = dict(enumerate(features.lengths.sum(1).tolist()))
        total = 0
        for i in self._on_all_ranks:
            streams, shards = self._shards[i].table_group.streams, self._shards[i].table_group.shards
            for index, shard in enumerate(shards):
                rows = shard.rows[1] - shard.rows[0]
                readers = (stream.feature for stream in streams if stream.shard_index == index)
                reads = sum(rows if feature is None else num_ids[feature] for feature in readers)
                total += min(reads, rows) * (shard.dim + ROW_ID_VALUES)
        return total

    def start_replica_sums(
        self, local: Mapping[int, tuple[Ids, Sequence[Tensor]]], max_values: float
    ) -> dict[int, Pending[GradientSums]]:
        """Start all-reduces of whole tables over all ranks, where that is fewer bytes than exchanging rows.
        `local` has the ids and gradients of this rank's table groups, by index; `max_values` is the sum over ranks of
        `max_replica_values`, equal on all ranks."""
        sums = {}
        for index in self._on_all_ranks:
            size = sum(weight.numel() + len(weight) for weight in self._shards[index].weights)
            if 2 * size <= max_values:
                sums[index] = self._all_reduce_tables(self._shards[index], *local[index])
        return sums

    def _all_reduce_tables(self, shards: LocalShards, ids: Ids, gradients: Sequence[Tensor]) -> Pending[GradientSums]:
        """All-reduce the gradient of every row of the tables, and the number of ranks on which the row has one."""
        sizes = [weight.numel() for weight in shards.weights]
        rows = [len(weight) for weight in shards.weights]
        flat = gradients[0].new_zeros(sum(sizes) + sum(rows))
        *tables, all_marks = flat.split([*sizes, sum(rows)])
        marks = all_marks.split(rows)
        sums = [table.view(len(mark), -1) for table, mark in zip(tables, marks, strict=True)]
        add_at_positions(ids, gradients, sums)
        all_marks[to_global_positions(ids, rows).values] = 1

        def select_rows(_: Tensor) -> GradientSums:
            touched_rows = [mark.nonzero().flatten() for mark in marks]
            selected = [table[rows_U] for table, rows_U in zip(sums, touched_rows, strict=True)]
            return GradientSums(torch.cat(touched_rows), [len(rows_U) for rows_U in touched_rows], selected)

        return collective.all_reduce(flat, self._group).then(select_rows)

    def run(self, ids_by_group: Sequence[Ids], received: ReceivedGradients, step: OptimizerStep) -> None:
        """Update all table groups of this rank.
        Column shards start first: their per-row sums over columns are in flight while the other groups are updated."""
        row_sums = self._start_column_shards(ids_by_group, received, step) if self._has_column_shards else None
        for index, (shards, ids) in enumerate(zip(self._shards, ids_by_group, strict=True)):
            group = shards.table_group
            if group.needs_column_reduce or group.bounded:
                continue
            if len(group.replicas) == 1:
                shards.update(ids, received.gradients[index], step.optimizer, step.steps)
            else:
                shards.update_from_sums(self._gradient_sums(index, ids, received), step.optimizer, step.steps)
        if row_sums is not None:
            self._finish_column_shards(*row_sums, reference.num_row_sums(step.optimizer))

    def _gradient_sums(self, index: int, ids: Ids, received: ReceivedGradients) -> GradientSums:
        """Gradient sums of the rows of one table group, over all its replicas."""
        if index in received.replica_sums:
            return received.replica_sums[index].wait()
        sums = self._shards[index].sum_gradients(ids, received.gradients[index])
        return (
            self._sum_replicas(self._shards[index], sums) if len(self._shards[index].table_group.replicas) > 1 else sums
        )

    def _sum_replicas(self, shards: LocalShards, sums: GradientSums) -> GradientSums:
        """Exchange rows and their sums with all replicas of a table group, and add the sums of equal rows."""
        replicas = shards.table_group.replicas
        is_replica = [rank in replicas for rank in range(self._group.size)]
        num_shards = len(sums.counts)
        counts = torch.tensor(sums.counts)
        gathered_counts = self._gather_replicas(counts, is_replica, [num_shards if flag else 0 for flag in is_replica])
        counts_RP = torch.stack(gathered_counts)
        rows = self._gather_replicas(sums.rows_U, is_replica, _by_rank(is_replica, counts_RP.sum(1).tolist()))
        dims = torch.tensor([shard.dim for shard in shards.table_group.shards])
        flat = torch.cat([sums_UD.flatten() for sums_UD in sums.sums])
        values = self._gather_replicas(flat, is_replica, _by_rank(is_replica, (counts_RP * dims).sum(1).tolist()))
        rows_by = [part.split(counts_P.tolist()) for part, counts_P in zip(rows, counts_RP, strict=True)]
        sums_by = [part.split((counts_P * dims).tolist()) for part, counts_P in zip(values, counts_RP, strict=True)]
        all_rows, all_sums = [], []
        for index, dim in enumerate(dims.tolist()):
            rows_U, inverse_N = torch.unique(torch.cat([parts[index] for parts in rows_by]), return_inverse=True)
            sums_ND = torch.cat([parts[index].view(-1, dim) for parts in sums_by])
            all_rows.append(rows_U)
            all_sums.append(_sum_equal_rows(inverse_N, sums_ND, len(rows_U)))
        return GradientSums(torch.cat(all_rows), [len(rows_U) for rows_U in all_rows], all_sums)

    def _gather_replicas(self, x: Tensor, is_replica: Sequence[bool], received_sizes: Sequence[int]) -> list[Tensor]:
        """All-gather among replicas, `received_sizes` rows from each rank: an all-to-all with some empty splits.
        Other ranks do not take part, so the check that all ranks issue the same collective is off."""
        group = replace(self._group, check=False)
        sent_sizes = [len(x) if flag else 0 for flag in is_replica]
        repeated = torch.cat([x] * sum(is_replica))
        by_rank = collective.all_to_all(repeated, sent_sizes, received_sizes, group).wait().split(list(received_sizes))
        return [part for part, flag in zip(by_rank, is_replica, strict=True) if flag]

    def _start_column_shards(
        self, ids_by_group: Sequence[Ids], received: ReceivedGradients, step: OptimizerStep
    ) -> tuple[RowwiseSteps, PendingRowSums]:
        """Start the optimizer's steps on column shards; returns them and their first row sums, in flight."""
        updates: dict[ShardKey, reference.RowSumGenerator[None]] = {}
        for index, shards in enumerate(self._shards):
            if not shards.table_group.needs_column_reduce:
                continue
            sums = self._gradient_sums(index, ids_by_group[index], received)
            rows = sums.rows_U.split(sums.counts)
            for number, shard, table, state, names, rows_U, sums_UD in zip(
                count(),
                shards.table_group.shards,
                shards.tables,
                shards.table_states(step.steps),
                shards.optimizer_states,
                rows,
                sums.sums,
                strict=False,
            ):
                by_name = dict(zip(names, state.state, strict=True))
                if number in shards.caches:  # on lines, whose order differs from rank to rank
                    order_U = shards.caches[number].rows_on(rows_U).argsort()
                    rows_U, sums_UD = rows_U[order_U], sums_UD[order_U]
                if state.is_trained:
                    if state.changed_rows is not None:
                        state.changed_rows[rows_U] = True
                    updates[_key(shard)] = _update_columns(step.optimizer, state, by_name, (rows_U, sums_UD), table.dim)
        return updates, self._sum_columns({key: next(update) for key, update in updates.items()})

    def _finish_column_shards(self, updates: RowwiseSteps, row_sums: PendingRowSums, num_sums: int) -> None:
        """Run the steps to their end; `num_sums`: how often each needs sums over all columns of a row."""
        for number in range(num_sums):
            full, partial = row_sums.wait(), dict[ShardKey, Tensor]()
            for key, update in updates.items():
                with suppress(StopIteration):
                    partial[key] = update.send(full[key])
            if number + 1 < num_sums:
                row_sums = self._sum_columns(partial)

    def _sum_columns(self, partial: Mapping[ShardKey, Tensor]) -> PendingRowSums:
        """Add each row's partial sums of the column shards, in column order: one all-to-all over all ranks."""
        sizes = {(table, index): len(sums_U) for (table, index, _), sums_U in partial.items()}
        parts = [partial[key] for keys in self._sent_keys for key in keys if key in partial]
        sent_sizes = [sum(len(partial[key]) for key in keys if key in partial) for keys in self._sent_keys]
        expected = [[key for key in keys if key[:2] in sizes] for keys in self._received_keys]
        received_sizes = [sum(sizes[key[:2]] for key in keys) for keys in expected]
        flat = torch.cat([torch.empty(0, dtype=self._dtype, device=self._group.device), *parts])

        def add_partial_sums(flat: Tensor) -> dict[ShardKey, Tensor]:
            keys = [key for rank_keys in expected for key in rank_keys]
            remote = dict(zip(keys, flat.split([sizes[key[:2]] for key in keys]), strict=True))
            by_range: dict[tuple[int, int], list[Tensor]] = {}
            for key, sums_U in sorted({**remote, **partial}.items()):
                by_range.setdefault(key[:2], []).append(sums_U)
            return {key: torch.stack(by_range[key[:2]]).sum(0) for key in partial}

        return collective.all_to_all(flat, sent_sizes, received_sizes, self._group).then(add_partial_sums)


def _update_columns(
    optimizer: SparseOptimizer,
    table: TableState,
    state: Mapping[str, Tensor],
    gradient: tuple[Tensor, Tensor],
    dim: int,
) -> reference.RowSumGenerator[None]:
    """`reference.update_column_shard`; compiled for plain row-wise AdaGrad, the usual optimizer."""
    if not isinstance(optimizer, RowWiseAdaGrad) or optimizer.clip or optimizer.weight_decay:
        yield from reference.update_column_shard(
            optimizer, table.weight, state, gradient, (table.step, table.rounding_key, dim), table.row_numbers
        )
        return
    rows_U, grad_UD = gradient
    squares_U = yield torch.linalg.vecdot(grad_UD, grad_UD)
    sum_U = state["sum"][rows_U] + squares_U / dim
    state["sum"][rows_U] = sum_U
    rates_U = optimizer.lr / (sum_U.sqrt() + optimizer.eps)
    ids = Ids(rows_U, torch.tensor([0, len(rows_U)], device=rows_U.device), rates_U, [0], [POOLINGS.index("none")])
    plain = TableState(table.weight, (), table.step, table.rounding_key, row_numbers=table.row_numbers)
    embedding.update([plain], ids, [grad_UD.new_empty(1, 0), grad_UD], SGD(lr=1.0))


def _keys_for(
    local: Mapping[ShardKey, TableShard], remote: Mapping[ShardKey, TableShard], rank: int, other: int, num: int
) -> list[ShardKey]:
    """Column shards of `rank` whose partial sums `other` needs, because it holds other columns of the same rows."""
    ranges = {key[:2] for key in remote}
    return sorted(
        key
        for key, shard in local.items()
        if key[:2] in ranges and key not in remote and replica_for(shard.ranks, other, num) == rank
    )


def _key(shard: TableShard) -> ShardKey:
    return shard.table, shard.range_index, shard.cols


def _column_shards(groups: Sequence[TableGroup]) -> list[TableShard]:
    return [shard for group in groups if group.needs_column_reduce for shard in group.shards]


def _by_rank(is_replica: Sequence[bool], sizes: Sequence[int]) -> list[int]:
    """The sizes of replicas, by rank; 0 for ranks without a replica."""
    remaining = iter(sizes)
    return [next(remaining) if flag else 0 for flag in is_replica]


def _sum_equal_rows(inverse_N: Tensor, sums_ND: Tensor, num_rows: int) -> Tensor:
    """The (num_rows, D) sums of the rows of `sums_ND` with the same index in `inverse_N`."""
    offsets = torch.tensor([0, len(inverse_N)], device=inverse_N.device)
    ids = Ids(inverse_N, offsets, None, [0], [POOLINGS.index("none")])
    return sum_at_positions(ids, [sums_ND.new_empty(1, 0), sums_ND], [num_rows], [sums_ND.shape[1]])[0]

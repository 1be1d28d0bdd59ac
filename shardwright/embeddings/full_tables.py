"""Gather full tables from the shards of all ranks; list this rank's shards as rectangles.

State dicts are made from full tables, checkpoints are written from rectangles. Logical names are "table.weight" and
"table.STATE", where STATE is the name of an optimizer state.

Shape legend: E rows of a table, D its columns.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from shardwright.comm import collective
from shardwright.embeddings.exchange import ShardedTables
from shardwright.embeddings.layout import TableShard
from shardwright.layers.table_weights import torch_state_dtype
from shardwright.rectangle import Rectangle
from shardwright.spec.optimizer import state_shapes


def meta_state(sharded: ShardedTables) -> dict[str, Tensor]:
    """Meta tensors of the weights and optimizer states of all full tables, by logical name."""
    tensors = {}
    for table in sharded.bags.tables:
        optimizer = sharded.bags.optimizer
        states = state_shapes(optimizer, table.rows, table.dim) if optimizer else {}
        dtypes = {"weight": getattr(torch, table.dtype)} | dict.fromkeys(states, torch_state_dtype(table))
        for name, shape in {"weight": (table.rows, table.dim), **states}.items():
            tensors[f"{table.name}.{name}"] = torch.empty(shape, dtype=dtypes[name], device="meta")
    return tensors


@torch.no_grad()
def gather_state(sharded: ShardedTables) -> dict[str, Tensor]:
    """Gather the tensors of `meta_state` at rank 0; other ranks return meta tensors.
    All ranks must call it: one gather per tensor, on the wire lane."""
    tensors = meta_state(sharded)
    is_first = sharded.rank == 0
    for name, like in tensors.items():
        table, _, part = name.rpartition(".")
        full = torch.empty(like.shape, dtype=like.dtype) if is_first else like
        shards = list(_distinct_shards(sharded, table))
        local = [_values(sharded, shard, part).flatten() for rank, shard in shards if rank == sharded.rank]
        sizes = [0] * len(sharded.layout.table_groups)
        for rank, shard in shards:
            sizes[rank] += _numel(shard, like)
        flat = torch.cat([torch.empty(0, dtype=like.dtype), *local])
        all_values = collective.many_to_one(flat, sizes, 0, sharded.lanes.wire).wait()
        if is_first:
            read = 0
            for _, shard in shards:
                size = _numel(shard, like)
                _copy_shard(sharded, full, shard, all_values[read : read + size])
                read += size
            tensors[name] = full
    return tensors


def track_changes(sharded: ShardedTables) -> None:
    """Record which rows are updated from now on; clears earlier records."""
    for shards in sharded.local_shards:
        numbers = [shards.num_rows(index) for index in range(len(shards.weights))]
        shards.changed_rows = [torch.zeros(num, dtype=torch.bool) for num in numbers]


def table_rectangles(sharded: ShardedTables, *, deduplicate: bool = False) -> Iterator[Rectangle]:
    """This rank's shards as rectangles, by the names of `meta_state`.
    `deduplicate`: of the replicas of a shard, only the first rank's."""
    for local in sharded.local_shards:
        for index, (shard, table, weight, states, changed_rows) in enumerate(
            zip(
                local.table_group.shards,
                local.tables,
                local.weights,
                local.optimizer_states,
                local.changed_rows,
                strict=True,
            )
        ):
            if deduplicate and shard.ranks[0] != sharded.rank:
                continue
            rows, parts = sharded.rows_of(shard), local.caches[index].stored_parts() if index in local.caches else ()
            for number, (part, values) in enumerate({"weight": weight, **states}.items()):
                name, is_column_shard = f"{table.name}.{part}", shard.dim < table.dim
                stored = parts[number] if parts else None
                if stored is not None:
                    values = torch.empty(local.num_rows(index), *values.shape[1:], dtype=values.dtype, device="meta")
                if values.dim() == 2:
                    shape, cols = (table.rows, table.dim), shard.cols if is_column_shard else ()
                    yield Rectangle(name, shape, values, rows, cols, changed_rows, stored)
                elif not deduplicate or shard.cols[0][0] == 0:  # equal on the ranks with other columns
                    yield Rectangle(name, (table.rows,), values, rows, (), changed_rows, stored)


def _distinct_shards(sharded: ShardedTables, table: str) -> Iterator[tuple[int, TableShard]]:
    """(first rank with a replica, shard) of each shard of a table, in the order of ranks."""
    names = [table_spec.name for table_spec in sharded.bags.tables]
    for rank, groups in enumerate(sharded.layout.table_groups):
        for group in groups:
            for shard in group.shards:
                if names[shard.table] == table and shard.ranks[0] == rank:
                    yield rank, shard


def _values(sharded: ShardedTables, shard: TableShard, name: str) -> Tensor:
    """The weight or an optimizer state of a shard of this rank."""
    for shards in sharded.local_shards:
        if shard in shards.table_group.shards:
            index = shards.table_group.shards.index(shard)
            if index in shards.caches:
                return shards.caches[index].read_all(["weight", *shards.optimizer_states[index]].index(name))
            return shards.weights[index] if name == "weight" else shards.optimizer_states[index][name]
    raise KeyError(shard)


def _numel(shard: TableShard, like: Tensor) -> int:
    rows = shard.rows[1] - shard.rows[0]
    return rows * shard.dim if like.dim() == 2 else rows


def _copy_shard(sharded: ShardedTables, full: Tensor, shard: TableShard, values: Tensor) -> None:
    """Copy a shard's flattened values to their rows and columns of the full tensor."""
    rows = sharded.orders[shard.table].ids(torch.arange(*shard.rows))
    if full.dim() == 1:
        full[rows] = values
        return
    parts = values.view(len(rows), shard.dim).split([b - a for a, b in shard.cols], 1)
    for (a, b), part in zip(shard.cols, parts, strict=True):
        full[rows, a:b] = part

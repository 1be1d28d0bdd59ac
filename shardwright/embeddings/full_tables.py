"""Gather full tables from the shards of all ranks; list this rank's shards as rectangles.

State dicts are made from full tables, checkpoints are written from rectangles. Logical names are "table.weight" and
"table.STATE", where STATE is the name of an optimizer state.

Shape legend: E rows of a table, D its columns.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from shardwright.comm import collective
from shardwright.embeddings import growing_tables
from shardwright.embeddings.exchange import ShardedTables
from shardwright.embeddings.growing_rows import GrowingRows
from shardwright.embeddings.layout import TableShard
from shardwright.embeddings.service import remote_rows
from shardwright.layers.table_weights import torch_state_dtype
from shardwright.rectangle import Rectangle, loaded_chunks
from shardwright.spec.optimizer import state_shapes
from shardwright.spec.workload import MAX_GROWING_ROWS, Table


def meta_state(sharded: ShardedTables) -> dict[str, Tensor]:
    """Meta tensors of the weights and optimizer states of all full tables, by logical name."""
    tensors = {}
    for table in sharded.bags.tables:
        optimizer, rows = sharded.bags.optimizer, table.rows if table.growth is None else MAX_GROWING_ROWS
        states = state_shapes(optimizer, rows, table.dim) if optimizer else {}
        dtypes = {"weight": getattr(torch, table.dtype)} | dict.fromkeys(states, torch_state_dtype(table))
        for name, shape in {"weight": (rows, table.dim), **states}.items():
            tensors[f"{table.name}.{name}"] = torch.empty(shape, dtype=dtypes[name], device="meta")
        if table.growth is not None:
            tensors |= growing_tables.extra_tensors(table.name)
    return tensors


@torch.no_grad()
def gather_state(sharded: ShardedTables) -> dict[str, Tensor]:
    """Gather the tensors of `meta_state` at rank 0; other ranks return meta tensors. Without tables that grow.
    All ranks must call it: one gather per tensor, on the wire lane."""
    growing = {table.name for table in sharded.bags.tables if table.growth is not None}
    tensors = {name: like for name, like in meta_state(sharded).items() if name.rpartition(".")[0] not in growing}
    is_first = sharded.rank == 0
    for name, like in tensors.items():
        table, _, part = name.rpartition(".")
        full = torch.empty(like.shape, dtype=like.dtype) if is_first else like
        if table in sharded.served.table_names:
            tensors[name] = _read_served(sharded, name, full) if is_first else like
            continue
        shards = list(_distinct_shards(sharded, table))
        local = [_values(sharded, shard, part).flatten().cpu() for rank, shard in shards if rank == sharded.rank]
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


def _read_served(sharded: ShardedTables, name: str, full: Tensor) -> Tensor:
    """A tensor of a table on servers, read by this rank."""
    rectangles = remote_rows.table_rectangles(sharded.served, sharded.layout, sharded.orders, (0, 1))
    for rect in (rect for rect in rectangles if rect.name == name):
        for chunk in loaded_chunks(rect):
            rows = torch.arange(*chunk.rows) if isinstance(chunk.rows, tuple) else chunk.rows.long()
            full[rows] = chunk.values
    return full


@torch.no_grad()
def gather_growing(sharded: ShardedTables) -> dict[str, tuple[Tensor, Tensor]]:
    """Gather the tensors of tables that grow at rank 0, the ids of their rows in ascending order and the values; other
    ranks return none. All ranks must call it: for each tensor an all-reduce and two gathers, on the wire lane."""
    growing = {table.name for table in sharded.bags.tables if table.growth is not None}
    own = [rect for rect in table_rectangles(sharded, deduplicate=True) if rect.name.rpartition(".")[0] in growing]
    found: dict[str, tuple[Tensor, Tensor]] = {}
    for name, like in meta_state(sharded).items():
        if name.rpartition(".")[0] in growing:
            gathered = _gather_by_id(sharded, [rect for rect in own if rect.name == name], name, like)
            found |= {name: gathered} if sharded.rank == 0 else {}
    return found


def _gather_by_id(sharded: ShardedTables, own: Sequence[Rectangle], name: str, like: Tensor) -> tuple[Tensor, Tensor]:
    """The rows of one tensor at rank 0, from the rectangles of all ranks (`own`: of this one)."""
    table, wire, width = name.rpartition(".")[0], sharded.lanes.wire, like.shape[1:].numel()
    shards = list(_distinct_shards(sharded, table))
    is_by_column = _is_by_column(name, like.shape, _dim(sharded, shards[0][1]))
    if not is_by_column:
        shards = [(rank, shard) for rank, shard in shards if shard.cols[0][0] == 0]
    counts = torch.zeros(len(shards), dtype=torch.float64)
    positions = [index for index, (rank, _) in enumerate(shards) if rank == sharded.rank]
    for index, rect in zip(positions, own, strict=True):
        counts[index] = rect.num_rows
    nums = [int(num) for num in collective.all_reduce(counts, wire).wait()]
    values = [rect.values if rect.stored is None else rect.stored.read(0, rect.num_rows) for rect in own]
    sizes, num_values = [0] * wire.size, [0] * wire.size
    for num, (rank, shard) in zip(nums, shards, strict=True):
        sizes[rank] += num
        num_values[rank] += num * (shard.dim if is_by_column else width)
    ids = torch.cat([torch.empty(0, dtype=torch.int64), *(rect.rows for rect in own if isinstance(rect.rows, Tensor))])
    flat = torch.cat([torch.empty(0, dtype=like.dtype), *(part.flatten() for part in values)])
    all_ids = collective.many_to_one(ids, sizes, 0, wire).wait()
    all_values = collective.many_to_one(flat, num_values, 0, wire).wait()
    if sharded.rank:
        return ids, flat
    found = torch.unique(all_ids)
    full, first, read = torch.empty(len(found), *like.shape[1:], dtype=like.dtype), 0, 0
    for num, (_, shard) in zip(nums, shards, strict=True):
        rows = torch.searchsorted(found, all_ids[first : first + num])
        spans = shard.cols if is_by_column else ((0, width),)
        size = num * sum(end - start for start, end in spans)
        part, column = all_values[read : read + size].view(num, -1 if num else 0), 0
        for start, end in spans if num else ():
            full.view(len(found), width)[rows, start:end] = part[:, column : column + end - start]
            column += end - start
        first, read = first + num, read + size
    return found, full


def _is_by_column(name: str, shape: Sequence[int], dim: int) -> bool:
    """Whether a tensor of a table that grows has a number for each of the table's `dim` columns."""
    return tuple(shape[1:]) == (dim,) and name.rpartition(".")[2] not in growing_tables.EXTRAS


def _dim(sharded: ShardedTables, shard: TableShard) -> int:
    return sharded.bags.tables[shard.table].dim


def track_changes(sharded: ShardedTables) -> None:
    """Record which rows are updated from now on; clears earlier records."""
    for shards in sharded.local_shards:
        shards.changed_rows = [
            torch.zeros(shards.num_rows(index), dtype=torch.bool, device=weight.device)
            for index, weight in enumerate(shards.weights)
        ]


def table_rectangles(sharded: ShardedTables, *, deduplicate: bool = False) -> Iterator[Rectangle]:
    """This rank's shards as rectangles, by the names of `meta_state`.
    `deduplicate`: of the replicas of a shard, only the first rank's. Of tables on servers, this rank's share."""
    share = sharded.rank, len(sharded.layout.table_groups)
    yield from remote_rows.table_rectangles(sharded.served, sharded.layout, sharded.orders, share)
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
            if index in local.growing:
                yield from _growing_rectangles(
                    local.growing[index], shard, table, changed_rows, deduplicate=deduplicate
                )
                continue
            rows, parts = sharded.rows_of(shard), local.caches[index].stored_parts() if index in local.caches else ()
            for number, (part, values) in enumerate({"weight": weight, **states}.items()):
                name, is_column_shard = f"{table.name}.{part}", shard.dim < table.dim
                stored = parts[number] if parts else None
                if stored is not None:
                    values = torch.empty(local.num_rows(index), *values.shape[1:], dtype=stored.dtype, device="meta")
                if values.dim() == 2:
                    shape, cols = (table.rows, table.dim), shard.cols if is_column_shard else ()
                    yield Rectangle(name, shape, values, rows, cols, changed_rows, stored)
                elif not deduplicate or shard.cols[0][0] == 0:  # equal on the ranks with other columns
                    yield Rectangle(name, (table.rows,), values, rows, (), changed_rows, stored)


def _growing_rectangles(
    rows: GrowingRows, shard: TableShard, table: Table, changed_rows: Tensor | None, *, deduplicate: bool
) -> Iterator[Rectangle]:
    """With `deduplicate`, what is not a value of a column is of the shard with the first columns only."""
    is_first = shard.cols[0][0] == 0
    for rectangle in growing_tables.value_rectangles(rows, shard, table.name, table.dim, changed_rows):
        if _is_by_column(rectangle.name, rectangle.shape, table.dim) or is_first or not deduplicate:
            yield rectangle
    if is_first or not deduplicate:
        yield from growing_tables.id_rectangles(rows, table.name)


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

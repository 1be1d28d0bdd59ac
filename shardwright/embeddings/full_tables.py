"""Tables put together from all ranks, and taken apart again, by logical name: what a state is read from and back into.

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
    """ "table.weight" and each "table.state" of whole tables, without values."""
    found = {}
    for table in sharded.bags.tables:
        optimizer = sharded.bags.optimizer
        states = state_shapes(optimizer, table.rows, table.dim) if optimizer else {}
        dtypes = {"weight": getattr(torch, table.dtype)} | dict.fromkeys(states, torch_state_dtype(table))
        for name, shape in {"weight": (table.rows, table.dim), **states}.items():
            found[f"{table.name}.{name}"] = torch.empty(shape, dtype=dtypes[name], device="meta")
    return found


@torch.no_grad()
def gather_state(sharded: ShardedTables) -> dict[str, Tensor]:
    """The values of `shapes` at the first rank; elsewhere they stay without. All ranks take part."""
    found = meta_state(sharded)
    first = sharded.rank == 0
    for name, like in found.items():
        table, _, part = name.rpartition(".")
        whole = torch.empty(like.shape, dtype=like.dtype) if first else like
        pieces = list(_told_once(sharded, table))
        mine = [_part(sharded, piece, part).flatten() for rank, piece in pieces if rank == sharded.rank]
        sizes = [0] * len(sharded.layout.table_groups)
        for rank, piece in pieces:
            sizes[rank] += _numel(piece, like)
        flat = torch.cat([torch.empty(0, dtype=like.dtype), *mine])
        arrived = collective.many_to_one(flat, sizes, 0, sharded.lanes.wire).wait()
        if first:
            read = 0
            for _, piece in pieces:
                size = _numel(piece, like)
                _put(sharded, whole, piece, arrived[read : read + size])
                read += size
            found[name] = whole
    return found


def track_changes(sharded: ShardedTables) -> None:
    """Note from now on which rows are updated, and forget those before."""
    for holding in sharded.local_shards:
        holding.changed_rows = [torch.zeros(len(weight), dtype=torch.bool) for weight in holding.weights]


def table_rectangles(sharded: ShardedTables, *, deduplicate: bool = False) -> Iterator[Rectangle]:
    """What this rank holds, by the names of `shapes`; `once`: only what it is the first to hold."""
    for holding in sharded.local_shards:
        for piece, table, weight, states, changed in zip(
            holding.table_group.shards,
            holding.tables,
            holding.weights,
            holding.optimizer_states,
            holding.changed_rows,
            strict=True,
        ):
            if deduplicate and piece.ranks[0] != sharded.rank:
                continue
            rows = sharded.rows_of(piece)
            for part, values in {"weight": weight, **states}.items():
                name, cut = f"{table.name}.{part}", piece.dim < table.dim
                if values.dim() == 2:
                    shape, cols = (table.rows, table.dim), piece.cols if cut else ()
                    yield Rectangle(name, shape, values, rows, cols, changed)
                elif not deduplicate or piece.cols[0][0] == 0:  # ranks with other columns have the same
                    yield Rectangle(name, (table.rows,), values, rows, (), changed)


def _told_once(sharded: ShardedTables, table: str) -> Iterator[tuple[int, TableShard]]:
    """A table's pieces and of each the first rank that has it, in the order of ranks."""
    names = [one.name for one in sharded.bags.tables]
    for rank, banks in enumerate(sharded.layout.table_groups):
        for bank in banks:
            for piece in bank.shards:
                if names[piece.table] == table and piece.ranks[0] == rank:
                    yield rank, piece


def _part(sharded: ShardedTables, piece: TableShard, name: str) -> Tensor:
    for holding in sharded.local_shards:
        if piece in holding.table_group.shards:
            at = holding.table_group.shards.index(piece)
            return holding.weights[at] if name == "weight" else holding.optimizer_states[at][name]
    raise KeyError(piece)


def _numel(piece: TableShard, like: Tensor) -> int:
    rows = piece.rows[1] - piece.rows[0]
    return rows * piece.dim if like.dim() == 2 else rows


def _put(sharded: ShardedTables, whole: Tensor, piece: TableShard, values: Tensor) -> None:
    rows = sharded.orders[piece.table].ids(torch.arange(*piece.rows))
    if whole.dim() == 1:
        whole[rows] = values
        return
    parts = values.view(len(rows), piece.dim).split([b - a for a, b in piece.cols], 1)
    for (a, b), part in zip(piece.cols, parts, strict=True):
        whole[rows, a:b] = part

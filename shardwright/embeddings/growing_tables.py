"""The state of tables that grow, by id: rectangles to write, and ids to load.

Besides weights and optimizer states a table has "counts", uses and last batch of each row; "candidates", those of ids
that have no row yet; and "removed", ids whose rows have ended since the base of an increment. All are named by the ids
themselves, so that any number of ranks can read them: a rank has the ids whose hash is in its range.

Shape legend: E ids with a row, I ids of a saved table.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor

from shardwright.embeddings.exchange import ShardedTables
from shardwright.embeddings.growing_rows import GrowingRows, GrowthNumbers
from shardwright.embeddings.layout import TableShard
from shardwright.errors import UserError
from shardwright.kernels.id_map import KnownIds
from shardwright.rectangle import Rectangle
from shardwright.spec.workload import MAX_GROWING_ROWS

COUNTS, CANDIDATES, REMOVED = "counts", "candidates", "removed"
EXTRAS = MappingProxyType(  # columns and dtype
    {COUNTS: (2, torch.int64), CANDIDATES: (2, torch.int64), REMOVED: (1, torch.int8)}
)


class SavedIds(Protocol):
    """A saved state with tables that grow."""

    def row_ids(self, name: str, removed: str) -> Tensor:
        """(I,) The ids of the rows that a tensor has; `removed`: the name of the tensor of rows that have ended."""
        ...

    def fill(self, rectangles: Sequence[Rectangle]) -> None: ...


def extra_tensors(table: str) -> dict[str, Tensor]:
    """Meta tensors of what a table that grows has besides weights and optimizer states."""
    return {
        f"{table}.{name}": torch.empty(MAX_GROWING_ROWS, columns, dtype=dtype, device="meta")
        for name, (columns, dtype) in EXTRAS.items()
    }


def value_rectangles(
    rows: GrowingRows, shard: TableShard, table: str, dim: int, changed_rows: Tensor | None
) -> Iterator[Rectangle]:
    """The weights and optimizer states of a shard's rows, then their counts."""
    known = rows.rows()
    changed_E = None if changed_rows is None else changed_rows[known.lines_E]
    for name, part in rows.parts_L.items():
        values = torch.empty(len(known.ids_E), *part.shape[1:], dtype=part.dtype, device="meta")
        shape, cols = ((MAX_GROWING_ROWS, dim), shard.cols) if part.dim() == 2 else ((MAX_GROWING_ROWS,), ())
        cols = () if shard.dim == dim else cols
        yield Rectangle(f"{table}.{name}", shape, values, known.ids_E, cols, changed_E, rows.part(name, known.lines_E))
    yield _counts_rectangle(table, COUNTS, known, changed_E)


def id_rectangles(rows: GrowingRows, table: str) -> Iterator[Rectangle]:
    """The candidates of a shard, and the ids whose rows have ended."""
    yield _counts_rectangle(table, CANDIDATES, rows.ids.known_ids(admitted=False), None)
    values = torch.zeros(len(rows.removed), 1, dtype=torch.int8)
    yield Rectangle(f"{table}.{REMOVED}", (MAX_GROWING_ROWS, 1), values, rows.removed)


def growth_counts(sharded: ShardedTables) -> dict[str, dict[str, int]]:
    """By table, over this rank's shards with the first columns: rows, entries of the map, and rows that have ended."""
    counts: dict[str, Counter[str]] = {}
    for local in sharded.local_shards:
        for index, rows in local.growing.items():
            if local.table_group.shards[index].cols[0][0] == 0:
                numbers = rows.ids.numbers
                counts.setdefault(local.tables[index].name, Counter()).update(
                    room=rows.ids.rows,
                    rows=numbers.rows,
                    entries=numbers.entries,
                    expired=numbers.expired,
                    evicted=numbers.evicted,
                )
    return {table: dict(own) for table, own in counts.items()}


def growth_numbers(sharded: ShardedTables) -> dict[str, Any]:
    """What is equal on all ranks, as JSON values; empty if no table grows."""
    return asdict(sharded.growth) if sharded.growth.initial else {}


def load_ids(
    sharded: ShardedTables, names: Mapping[str, str], saved: SavedIds, numbers: Mapping[str, Any] | None
) -> None:
    """Begin anew with a saved state's ids, those of this rank's shards. `names`: in the state, by those here;
    `numbers`: its `growth_numbers`."""
    if not sharded.growth.initial:
        return
    if numbers is None:
        raise UserError("checkpoint: it was saved by a model whose tables do not grow")
    initial = {name: (seed, bound) for name, (seed, bound) in numbers["initial"].items()}
    sharded.growth = GrowthNumbers(numbers["batches"], initial)
    for local in sharded.local_shards:
        for index, rows in local.growing.items():
            shard, table = local.table_group.shards[index], local.tables[index].name
            removed = names[f"{table}.{REMOVED}"]
            known = [
                _read_counts(sharded, shard, (names[f"{table}.{name}"], removed), saved)
                for name in (COUNTS, CANDIDATES)
            ]
            rows.load(sharded.growth.batches, *known)
            rows.initial_numbers = initial[table]


def is_extra(rectangle: Rectangle) -> bool:
    """Whether a rectangle has what `load_ids` reads."""
    return rectangle.shape[0] == MAX_GROWING_ROWS and rectangle.name.rpartition(".")[2] in EXTRAS


def _counts_rectangle(table: str, name: str, known: KnownIds, changed_E: Tensor | None) -> Rectangle:
    values = torch.stack([known.uses_E, known.last_E], 1)
    return Rectangle(f"{table}.{name}", (MAX_GROWING_ROWS, 2), values, known.ids_E, (), changed_E)


def _read_counts(
    sharded: ShardedTables, shard: TableShard, name_and_removed: tuple[str, str], saved: SavedIds
) -> KnownIds:
    """The ids of a shard, in ascending order, with their uses and last batch."""
    name, ids_I = name_and_removed[0], saved.row_ids(*name_and_removed)
    positions = sharded.orders[shard.table].positions(ids_I)
    ids_E = ids_I[(positions >= shard.rows[0]) & (positions < shard.rows[1])].sort().values
    values = torch.empty(len(ids_E), 2, dtype=torch.int64)
    saved.fill([Rectangle(name, (MAX_GROWING_ROWS, 2), values, ids_E)])
    return KnownIds(ids_E, torch.full_like(ids_E, -1), values[:, 0], values[:, 1])

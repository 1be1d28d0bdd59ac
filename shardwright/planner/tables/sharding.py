"""What a table asks of the ranks that hold it, and the ways to cut it: the four of Neo's 4-D parallelism and theirs
over the levels of the network.

A way to cut (`Cut`) says how many pieces the columns make, over how many of the network's levels, inside first, the
rows of each piece are spread, and within how many levels all pieces of a table stay (beside that, what of it travels:
travel.py):

    table          one piece on one rank            row         rows over all ranks
    column         pieces on any ranks              table-row   rows over the ranks of one group
    table-column   pieces on ranks of one group     column-row  pieces, each with rows over a group
    data           a replica on every rank          copy-table  a copy in every innermost group, whole on one rank of it
    copy-column    such copies in pieces            copy-row    such copies with rows over the group

A piece is what is placed (`Unit`). What it asks of each rank of its group is said in bytes, of one step: those of rows
it reads and writes there, and those of vectors that leave there. A copy is asked by its own group alone; of copies one
piece is all that have the same columns.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from math import prod
from typing import Any

import numpy as np

from shardwright.planner.price import primitives
from shardwright.spec import optimizer
from shardwright.spec.cluster import Cluster, Level
from shardwright.spec.workload import (
    DTYPE_BYTES,
    Dtype,
    Feature,
    FeatureStatistics,
    Table,
    Workload,
    state_dtype,
    table_weight_dtype,
)

MIN_SHARD_COLUMNS = 32  # columns of a piece, below which a row is less than two cache lines
MAX_COLUMN_SHARDS = 16
MAX_ROW_RATIO = 2.0  # the rows of a rank, times an even share, at which a split by load stops
SMALL_MEMORY_SHARE = 0.1  # of a rank's room
ID_BYTES = 4
LENGTH_BYTES = 4  # of a bag, in the message of its ids
ROW_ID_BYTES = 8  # of a row's number, between copies
BISECTIONS = 40


@dataclass(frozen=True, slots=True)
class TableLoad:
    """What one sample asks of a table, and what a row of it takes."""

    table: Table
    ids_per_sample: float = 1.0
    pooled_vectors: float = 1.0  # vectors, one of each pooled feature
    unpooled_vectors: float = 0.0  # vectors, one of each id of the others
    distinct_share: float = 1.0  # rows a batch touches, as a share of its ids
    popularity: tuple[tuple[int, float], ...] = ()  # (k, share of the ids that the k hottest rows make)
    weight_bytes: float = 4.0  # of one column of a row
    state_bytes: float = 0.0  # of a row, whatever its columns
    state_column_bytes: float = 0.0  # of one column of a row
    local_pooling: "TableLoad | None" = (
        None  # where distinct rows travel, what is then asked of them at the ranks of the samples
    )
    group_distinct_rows: tuple[
        tuple[int, float], ...
    ] = ()  # (k, distinct rows that the samples of one of k groups of ranks have)

    @property
    def vectors(self) -> float:
        return self.pooled_vectors + self.unpooled_vectors

    def row_bytes(self, columns: int) -> float:
        return columns * (self.weight_bytes + self.state_column_bytes) + self.state_bytes

    def distinct_rows_per_group(self, num_groups: int) -> float:
        return dict(self.group_distinct_rows)[num_groups]

    def hot_id_share(self, rows: Any) -> Any:
        """The share of ids in the hottest so many rows; of a number, or of each of an array."""
        at, shares = _curve(self)
        return np.interp(rows, at, shares)  # pyright: ignore[reportUnknownVariableType]


@lru_cache(maxsize=1 << 14)
def _curve(demand: TableLoad) -> tuple[np.ndarray, np.ndarray]:
    points = np.array(((0, 0.0), *demand.popularity, (demand.table.rows, 1.0)))
    return points[:, 0], points[:, 1]


@dataclass(frozen=True, slots=True)
class Sharding:
    scheme: str
    column_shards: int = 1  # pieces
    row_levels: int = 0  # levels over which the rows of a piece are spread
    within_levels: int | None = None  # levels within which all pieces stay; None: anywhere
    row_exchange: bool = False  # whether distinct rows travel, not vectors
    num_replicas: int = 1  # one in each of so many groups of ranks

    @property
    def reduces_in_host(self) -> bool:
        """Whether parts of vectors meet inside hosts where there are several."""
        return self.row_levels > 0 and self.num_replicas == 1


DATA_PARALLEL = Sharding("data")


@dataclass(frozen=True, slots=True)
class ShardUnit:
    """A piece to be placed on a group of ranks that `reach` levels join, each copy on its own; numbers are those of
    each of its ranks, of lookups their mean."""

    table_number: int  # its place among the demands
    sharding: Sharding
    shard_index: int
    columns: tuple[int, int]
    order: str  # of rows: "id", "load", "hash:0"
    bytes_: float  # of rows and their optimizer state
    buffer_bytes: float  # bytes of vectors, or their parts, and of their gradients, of the whole batch
    lookups: float  # of a global batch
    read_bytes: float  # bytes of rows read
    sent_bytes: float  # bytes of vectors in float32
    lookup_ratios: tuple[float, ...] = ()  # lookups of each of its ranks, over their mean; none: all alike

    @property
    def max_lookup_ratio(self) -> float:
        return max(self.lookup_ratios, default=1.0)


def make_table_loads(workload: Workload, weight_dtype: Dtype | None = None) -> list[TableLoad]:
    """Of every table; a feature without statistics has one id a sample."""
    known = {one.feature: one for one in workload.statistics}
    found: list[TableLoad] = []
    for table in workload.tables:
        features = [feature for feature in workload.features if feature.table == table.name]
        entries = [known.get(feature.name, FeatureStatistics(feature.name, 1.0, 1.0)) for feature in features]
        found.append(_demand(workload, table, features, entries, table_weight_dtype(table, weight_dtype)))
    return found


def _demand(
    workload: Workload,
    table: Table,
    features: Sequence[Feature],
    entries: Sequence[FeatureStatistics],
    dtype: Dtype,
) -> TableLoad:
    ids = sum(entry.ids_per_sample for entry in entries)
    pairs = list(zip(features, entries, strict=True))
    pooled = sum(one.pooling != "none" for one in features)
    sequences = sum(entry.ids_per_sample for one, entry in pairs if one.pooling == "none")
    distinct = sum(entry.distinct_share * entry.ids_per_sample for entry in entries) / ids if ids else 1.0
    state = DTYPE_BYTES[state_dtype(table.dtype)]
    shapes = optimizer.state_shapes(workload.optimizer, 1, 1).values() if workload.optimizer else ()
    return TableLoad(
        table,
        ids,
        pooled,
        sequences,
        distinct,
        _hottest(table, entries),
        DTYPE_BYTES[dtype],
        state_bytes=state * sum(len(shape) == 1 for shape in shapes),
        state_column_bytes=state * sum(len(shape) == 2 for shape in shapes),
    )


def _hottest(table: Table, entries: Sequence[FeatureStatistics]) -> tuple[tuple[int, float], ...]:
    """Of features that share a table, as if the same rows were hot in all."""
    weights = [entry.ids_per_sample for entry in entries if entry.popularity]
    curves = [((0, 0.0), *entry.popularity) for entry in entries if entry.popularity]
    if not curves or not sum(weights):
        return ()
    points = sorted({k for curve in curves for k, _ in curve if 0 < k < table.rows})
    shares = np.zeros(len(points))
    for weight, curve in zip(weights, curves, strict=True):
        shares += weight / sum(weights) * np.interp(points, [k for k, _ in curve], [share for _, share in curve])
    return tuple((k, float(share)) for k, share in zip(points, shares, strict=True))


def enumerate_shardings(table_load: TableLoad, cluster: Cluster) -> Iterator[Sharding]:
    """All ways, inside first; a cluster of one level has no groups."""
    num_levels = len(cluster.levels)
    yield DATA_PARALLEL
    yield Sharding("table")
    inside = [prod(level.num for level in cluster.levels[:reach]) for reach in range(num_levels + 1)]
    groups = range(1, num_levels)
    spread = [reach for reach in groups if table_load.table.rows >= inside[reach]]
    widths = [num for num in range(2, MAX_COLUMN_SHARDS + 1) if is_even_split(table_load.table.dim, num)]
    yield from (Sharding("column", num) for num in widths)
    yield from (Sharding("table-column", num, within_levels=level) for level in groups for num in widths)
    yield from (Sharding("table-row", row_levels=level) for level in spread)
    yield from (Sharding("column-row", num, row_levels=level) for level in spread for num in widths)
    if table_load.table.rows >= inside[-1]:
        yield Sharding("row", row_levels=num_levels)
    if num_levels > 1 and 1 < inside[1] < inside[-1]:
        copies = inside[-1] // inside[1]
        yield Sharding("copy-table", num_replicas=copies)
        yield from (Sharding("copy-column", num, num_replicas=copies) for num in widths)
        yield from (Sharding("copy-row", row_levels=1, num_replicas=copies) for reach in spread if reach == 1)


def is_even_split(dim: int, num: int) -> bool:
    """Whether so many pieces are equal, and wide enough."""
    return dim % num == 0 and dim // num >= MIN_SHARD_COLUMNS


def make_shard_units(
    table_number: int,
    table_load: TableLoad,
    sharding: Sharding,
    cluster: Cluster,
    batch_size: int,
    free_bytes: float | None,
) -> list[ShardUnit]:
    """The pieces of a table on ranks with `room` bytes for tables (None: rows are split evenly by id); none where every
    rank has a replica."""
    if sharding == DATA_PARALLEL:
        return []
    width = table_load.table.dim // sharding.column_shards
    rows = split_rows(table_load, prod(level.num for level in cluster.levels[: sharding.row_levels]), free_bytes)
    return [
        make_shard_unit(
            table_number, table_load, sharding, at, (at * width, (at + 1) * width), cluster, batch_size, rows
        )
        for at in range(sharding.column_shards)
    ]


def make_shard_unit(
    table_number: int,
    table_load: TableLoad,
    sharding: Sharding,
    shard_index: int,
    columns: tuple[int, int],
    cluster: Cluster,
    batch_size: int,
    row_split: tuple[str, int, tuple[float, ...]],
) -> ShardUnit:
    """These columns; `rows` is their order, the most rows of a rank, and the ids' share of each."""
    order, most_rows, loads = row_split
    width, ranks, samples = columns[1] - columns[0], len(loads), batch_size / sharding.num_replicas
    lookups = samples * table_load.ids_per_sample / ranks
    held = samples * width * (table_load.pooled_vectors + table_load.unpooled_vectors * max(loads))
    sent = sum(sent_values_by_level(table_load, width, sharding.row_levels, cluster, batch_size))
    if sharding.num_replicas > 1:  # parts do not meet
        sent = (
            samples
            * width
            * (table_load.pooled_vectors + table_load.unpooled_vectors / ranks)
            * (1 - sharding.num_replicas / cluster.num_ranks)
        )
    return ShardUnit(
        table_number,
        sharding,
        shard_index,
        columns,
        order,
        bytes_=most_rows * table_load.row_bytes(width),
        buffer_bytes=2 * 4 * held,
        lookups=lookups,
        read_bytes=lookups * primitives.cache_line_bytes(round(width * table_load.weight_bytes)),
        sent_bytes=4 * sent,
        lookup_ratios=() if min(loads) == max(loads) else tuple(load * ranks for load in loads) * sharding.num_replicas,
    )


def split_rows(table_load: TableLoad, ranks: int, free_bytes: float | None) -> tuple[str, int, tuple[float, ...]]:
    """The order of rows, the most rows of a rank, and the share of the ids of each.

    By load, which the ranks with cold rows pay with more of them, while that is little of a rank's room; else by hash.
    If `room` is None, evenly by id.
    """
    order = "id"
    if ranks > 1 and table_load.popularity and free_bytes is not None:
        most = max(end - start for start, end in balanced_row_ranges(table_load, ranks))
        order = (
            "load" if most * table_load.row_bytes(table_load.table.dim) <= SMALL_MEMORY_SHARE * free_bytes else "hash:0"
        )
    found = split_rows_by_order(table_load, ranks, order)
    return order, max(end - start for start, end in found), id_shares(table_load, found, order)


@lru_cache(maxsize=1 << 14)
def _shares(demand: TableLoad, found: tuple[tuple[int, int], ...], by_load: bool) -> tuple[float, ...]:
    if by_load:
        ends = demand.hot_id_share(np.array([end for _, end in found]))
        return tuple(float(load) for load in np.diff(ends, prepend=0.0))
    hottest = float(demand.hot_id_share(1)) if demand.popularity and len(found) > 1 else 0.0
    rows = [end - start for start, end in found]
    alike = [
        (1 - hottest) / len(rows) if max(rows) - min(rows) <= 1 else (1 - hottest) * one / sum(rows) for one in rows
    ]
    return (hottest + alike[0], *alike[1:])


def id_shares(table_load: TableLoad, row_ranges: Sequence[tuple[int, int]], order: str) -> tuple[float, ...]:
    """Of the ids, by range of rows. Wherever a hash leaves the hottest row, it counts at the first."""
    return _shares(table_load, tuple(row_ranges), order == "load")


def split_rows_by_order(table_load: TableLoad, ranks: int, order: str) -> list[tuple[int, int]]:
    """Positions by rank; fewer than ranks where there are fewer rows."""
    return balanced_row_ranges(table_load if order == "load" else replace(table_load, popularity=()), ranks)


def balanced_row_ranges(table_load: TableLoad, ranks: int) -> list[tuple[int, int]]:
    """Rows by rank, hottest first, so that the most loaded has least; of even number where no load is known.

    No rank has more than `UNEVEN` times an even number; fewer than `ranks` where there are fewer rows.
    """
    rows = table_load.table.rows
    ranks = min(ranks, rows)
    if not table_load.popularity:
        ends = [rows * (at + 1) // ranks for at in range(ranks)]
        return list(pairwise([0, *ends]))
    most = max(1, int(MAX_ROW_RATIO * rows / ranks))
    low, high = 0.0, 1.0
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (low, middle) if _filled(table_load, ranks, most, middle)[-1][1] == rows else (middle, high)
    return _filled(table_load, ranks, most, high)


def _filled(demand: TableLoad, ranks: int, most: int, load: float) -> list[tuple[int, int]]:
    """Each rank gets rows up to this load and number, and one at least; the last may end before the last row."""
    rows, start = demand.table.rows, 0
    at, share = _curve(demand)
    found: list[tuple[int, int]] = []
    for left in range(ranks, 0, -1):
        wanted = float(np.interp(start, at, share)) + load
        end = rows if wanted >= 1 else int(np.interp(wanted, share, at))
        end = min(max(end, start + 1), start + most, rows - left + 1)
        found.append((start, end))
        start = end
    return found


def sent_values_by_level(
    table_load: TableLoad, columns: int, row_levels: int, cluster: Cluster, batch_size: int
) -> list[float]:
    """Numbers of vectors' columns that a rank of a piece sends on each level.

    Where rows are spread, partial sums meet level by level: after each, a rank holds those of fewer samples. What is
    left goes to the ranks of those samples. Vectors of single ids go there at once.
    """
    levels = cluster.levels
    held = batch_size * table_load.pooled_vectors * columns
    sent: list[float] = []
    for level in levels[:row_levels]:
        sent.append(held * (level.num - 1) / level.num)
        held /= level.num
    sent += _directly(held, levels[row_levels:])
    group = prod(level.num for level in levels[:row_levels])
    alone = _directly(batch_size * table_load.unpooled_vectors * columns / group, levels)
    return [one + other for one, other in zip(sent, alone, strict=True)]


def _directly(held: float, levels: Sequence[Level]) -> list[float]:
    """On each level, of what is for all ranks in equal parts."""
    targets, inside = prod(level.num for level in levels), 1
    sent: list[float] = []
    for level in levels:
        sent.append(held * (level.num - 1) * inside / targets)
        inside *= level.num
    return sent

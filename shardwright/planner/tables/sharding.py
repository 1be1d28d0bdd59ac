"""How a table can be sharded (`Sharding`), the shards to be placed (`ShardUnit`), and what a table costs (`TableLoad`).

A unit is one column shard, with its rows on one rank or split over a group of ranks. Its numbers are per rank of the
group and per step: bytes of rows that the rank reads, bytes of vectors that it sends. A replica serves the ranks of its
own group only; the same columns in all replicas are one unit. The schemes that produce shardings are in schemes.py, the
loads under vector and row exchange in row_exchange.py. Shape legend: R ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple

import numpy as np

from shardwright.errors import UserError
from shardwright.planner.price import primitives
from shardwright.planner.tables.copied_load import CopiedLoad
from shardwright.spec import optimizer
from shardwright.spec.cluster import Cluster, Level
from shardwright.spec.row_cache import id_map_bytes
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

MIN_SHARD_COLUMNS = 32  # below this, a row of a column shard is less than two cache lines
MAX_COLUMN_SHARDS = 16
MAX_ROW_RATIO = 2.0  # largest number of rows of a rank over the average, in a split by load
SMALL_MEMORY_SHARE = 0.1  # of a rank's memory for tables
BISECTIONS = 40


@dataclass(frozen=True, slots=True)
class TableLoad:
    """What a sample reads of a table, and the size of its rows."""

    table: Table
    ids_per_sample: float = 1.0
    pooled_vectors: float = 1.0  # number of pooled features
    unpooled_vectors: float = 0.0  # ids of unpooled features
    distinct_share: float = 1.0  # distinct rows over ids of a global batch
    popularity: tuple[tuple[int, float], ...] = ()  # (k, share of ids that are the k most frequent rows)
    weight_bytes: float = 4.0  # per column of a row
    state_bytes: float = 0.0  # per row, independent of its columns
    state_column_bytes: float = 0.0  # per column of a row
    # With row exchange: the load of pooling the received rows on the ranks of the samples.
    local_pooling: "TableLoad | None" = None
    group_distinct_rows: tuple[tuple[int, float], ...] = ()  # (k, distinct rows in the samples of one of k rank groups)
    copied: CopiedLoad | None = None  # with row exchange, if rows are read from copies
    hits: tuple[tuple[int, float], ...] = ()  # recorded: (lines of a cache, share of a batch's distinct rows found)

    @property
    def vectors(self) -> float:
        return self.pooled_vectors + self.unpooled_vectors

    @property
    def num_values(self) -> int:
        """The number of values of the table."""
        return self.table.rows * self.table.dim

    @property
    def table_bytes(self) -> float:
        """Bytes of the table, including optimizer state."""
        return self.table.rows * self.row_bytes(self.table.dim)

    def row_bytes(self, columns: int) -> float:
        """Bytes of a row with this many columns, including optimizer state, and its id if the table grows."""
        values = columns * (self.weight_bytes + self.state_column_bytes) + self.state_bytes
        return values + id_map_bytes(self.table.growth)

    def distinct_rows_per_group(self, num_groups: int) -> float:
        return dict(self.group_distinct_rows)[num_groups]

    def hot_id_share(self, rows: Any) -> Any:
        """The share of ids that are among the `rows` most frequent rows; `rows` is a number or an array."""
        num_rows, shares = _popularity_curve(self)
        return np.interp(rows, num_rows, shares)  # pyright: ignore[reportUnknownVariableType]


@lru_cache(maxsize=1 << 14)
def _popularity_curve(table_load: TableLoad) -> tuple[np.ndarray, np.ndarray]:
    points = np.array(((0, 0.0), *table_load.popularity, (table_load.table.rows, 1.0)))
    return points[:, 0], points[:, 1]


@dataclass(frozen=True, slots=True)
class Sharding:
    """One way to shard a table."""

    scheme: str  # name of its Scheme
    column_shards: int = 1
    row_levels: int = 0  # rows of a column shard are split over the ranks that this many innermost levels join
    within_levels: int | None = None  # all shards are within one group of this many levels; None: anywhere
    row_exchange: bool = False  # deduplicated rows are exchanged, not pooled vectors
    num_replicas: int = 1  # one in each of as many groups of ranks
    row_ranks: tuple[int, ...] = ()  # the ranks that rows are split over, if they are not a group (rows_on_ranks)

    @property
    def reduces_in_host(self) -> bool:
        """Whether partial sums of vectors are added inside hosts before they cross hosts."""
        return self.row_levels > 0 and self.num_replicas == 1

    def num_row_shards(self, cluster: Cluster) -> int:
        """The number of ranks that share the rows of a column shard, in one replica."""
        return len(self.row_ranks) or cluster.group_size(self.row_levels)

    def num_row_hosts(self, cluster: Cluster) -> int:
        """The number of hosts that share the rows of a column shard, in one replica."""
        if self.row_ranks:
            return len({rank // cluster.ranks_per_host for rank in self.row_ranks})
        return max(1, self.num_row_shards(cluster) // cluster.ranks_per_host)


DATA_PARALLEL = Sharding("data")
SERVED = Sharding("servers", row_exchange=True)  # table servers own the rows


def rows_on_ranks(scheme: str, ranks: Sequence[int], cluster: Cluster, column_shards: int = 1) -> Sharding:
    """A sharding with the rows of each column shard split over these ranks."""
    if not ranks or len(set(ranks)) < len(ranks) or not set(ranks) <= set(range(cluster.num_ranks)):
        raise UserError(f"{scheme}: rows on ranks {tuple(ranks)}; wanted distinct ranks 0 to {cluster.num_ranks - 1}")
    has_neighbours = len({rank // cluster.ranks_per_host for rank in ranks}) < len(ranks)
    return Sharding(scheme, column_shards, len(cluster.levels) if has_neighbours else 0, row_ranks=tuple(ranks))


class RowSplit(NamedTuple):
    """How the rows of a column shard are split over ranks."""

    order: str  # of rows, as in a plan
    max_rows: int  # the largest number of rows of a rank
    id_shares: tuple[float, ...]  # by rank


@dataclass(frozen=True, slots=True)
class ShardUnit:
    """A column shard to be placed; with replicas, the same shard of every replica. Numbers are per rank that holds it.

    `lookups`, `vectors` and `read_bytes` are averages over these ranks.
    """

    table_number: int  # index of its TableLoad
    sharding: Sharding
    shard_index: int
    columns: tuple[int, int]
    order: str  # of rows: "id", "load", "hash:0"
    bytes_: float  # of rows and their optimizer state
    buffer_bytes: float  # of vectors or partial sums, and their gradients, of the global batch
    lookups: float  # of a global batch
    vectors: float  # and partial sums
    read_bytes: float  # of rows
    sent_bytes: float  # of vectors in float32
    lookup_ratios: tuple[float, ...] = ()  # lookups of each rank over their mean; empty: all equal

    @property
    def width(self) -> int:
        """The number of columns."""
        return self.columns[1] - self.columns[0]

    @property
    def total_bytes(self) -> float:
        return self.bytes_ + self.buffer_bytes

    @property
    def max_lookup_ratio(self) -> float:
        return max(self.lookup_ratios, default=1.0)


def make_table_loads(workload: Workload, weight_dtype: Dtype | None = None) -> list[TableLoad]:
    """The load of every table; a feature without statistics has one id per sample."""
    statistics = {entry.feature: entry for entry in workload.statistics}
    loads: list[TableLoad] = []
    for table in workload.tables:
        features = [feature for feature in workload.features if feature.table == table.name]
        entries = [statistics.get(feature.name, FeatureStatistics(feature.name, 1.0, 1.0)) for feature in features]
        loads.append(_table_load(workload, table, features, entries, table_weight_dtype(table, weight_dtype)))
    return loads


def _table_load(
    workload: Workload,
    table: Table,
    features: Sequence[Feature],
    entries: Sequence[FeatureStatistics],
    dtype: Dtype,
) -> TableLoad:
    ids = sum(entry.ids_per_sample for entry in entries)
    pairs = list(zip(features, entries, strict=True))
    pooled = sum(feature.pooling != "none" for feature in features)
    unpooled_ids = sum(entry.ids_per_sample for feature, entry in pairs if feature.pooling == "none")
    distinct = sum(entry.distinct_share * entry.ids_per_sample for entry in entries) / ids if ids else 1.0
    state = DTYPE_BYTES[state_dtype(table.dtype)]
    shapes = optimizer.state_shapes(workload.optimizer, 1, 1).values() if workload.optimizer else ()
    return TableLoad(
        table,
        ids,
        pooled,
        unpooled_ids,
        distinct,
        _mean_popularity(table, entries),
        DTYPE_BYTES[dtype],
        state_bytes=state * sum(len(shape) == 1 for shape in shapes),
        state_column_bytes=state * sum(len(shape) == 2 for shape in shapes),
        hits=next((entry.hits for entry in workload.cache_hits if entry.table == table.name), ()),
    )


def _mean_popularity(table: Table, entries: Sequence[FeatureStatistics]) -> tuple[tuple[int, float], ...]:
    """The popularity of rows over all features of a table, assuming that the same rows are frequent in each."""
    weights = [entry.ids_per_sample for entry in entries if entry.popularity]
    curves = [((0, 0.0), *entry.popularity) for entry in entries if entry.popularity]
    if not curves or not sum(weights):
        return ()
    points = sorted({k for curve in curves for k, _ in curve if 0 < k < table.rows})
    shares = np.zeros(len(points))
    for weight, curve in zip(weights, curves, strict=True):
        shares += weight / sum(weights) * np.interp(points, [k for k, _ in curve], [share for _, share in curve])
    return tuple((k, float(share)) for k, share in zip(points, shares, strict=True))


def even_column_shards(table_load: TableLoad) -> list[int]:
    """The numbers of column shards into which a table can be split, equal and wide enough."""
    dim = table_load.table.dim
    return [n for n in range(2, MAX_COLUMN_SHARDS + 1) if dim % n == 0 and dim // n >= MIN_SHARD_COLUMNS]


def make_shard_units(
    table_number: int,
    table_load: TableLoad,
    sharding: Sharding,
    cluster: Cluster,
    batch_size: int,
    free_bytes: float | None,
) -> list[ShardUnit]:
    """The units of a table on ranks with `free_bytes` for tables (None: rows are split evenly by id); no units if it is
    data-parallel or on servers."""
    if sharding in (DATA_PARALLEL, SERVED):
        return []
    width = table_load.table.dim // sharding.column_shards
    row_split = split_rows(table_load, sharding.num_row_shards(cluster), free_bytes)
    return [
        make_shard_unit(
            table_number, table_load, sharding, i, (i * width, (i + 1) * width), cluster, batch_size, row_split
        )
        for i in range(sharding.column_shards)
    ]


def make_shard_unit(
    table_number: int,
    table_load: TableLoad,
    sharding: Sharding,
    shard_index: int,
    columns: tuple[int, int],
    cluster: Cluster,
    batch_size: int,
    row_split: RowSplit,
) -> ShardUnit:
    """The unit with these columns of a table."""
    order, max_rows, id_shares_R = row_split
    width, num_ranks, samples = columns[1] - columns[0], len(id_shares_R), batch_size / sharding.num_replicas
    lookups = samples * table_load.ids_per_sample / num_ranks
    values = samples * width * (table_load.pooled_vectors + table_load.unpooled_vectors * max(id_shares_R))
    sent_values = sum(sent_values_by_level(table_load, width, sharding.row_levels, cluster, batch_size))
    if sharding.num_replicas > 1:  # partial sums are not added inside hosts
        sent_values = (
            samples
            * width
            * (table_load.pooled_vectors + table_load.unpooled_vectors / num_ranks)
            * (1 - sharding.num_replicas / cluster.num_ranks)
        )
    is_even = min(id_shares_R) == max(id_shares_R)
    return ShardUnit(
        table_number,
        sharding,
        shard_index,
        columns,
        order,
        bytes_=max_rows * table_load.row_bytes(width),
        buffer_bytes=2 * 4 * values,
        lookups=lookups,
        vectors=samples * (table_load.pooled_vectors + table_load.unpooled_vectors / num_ranks),
        read_bytes=lookups * primitives.cache_line_bytes(round(width * table_load.weight_bytes)),
        sent_bytes=4 * sent_values,
        lookup_ratios=() if is_even else tuple(share * num_ranks for share in id_shares_R) * sharding.num_replicas,
    )


def split_rows(table_load: TableLoad, num_ranks: int, free_bytes: float | None) -> RowSplit:
    """Split the rows of a table over ranks.

    A split by load gives more rows to the ranks with infrequent rows; it is used if these are a small part of a rank's
    `free_bytes`, else rows are hashed. Without `free_bytes`, rows are split evenly by id.
    """
    order = "id"
    if num_ranks > 1 and table_load.popularity and free_bytes is not None:
        max_rows = max(end - start for start, end in balanced_row_ranges(table_load, num_ranks))
        max_bytes = max_rows * table_load.row_bytes(table_load.table.dim)
        order = "load" if max_bytes <= SMALL_MEMORY_SHARE * free_bytes else "hash:0"
    order = "hash:0" if table_load.table.growth is not None else order
    row_ranges = split_rows_by_order(table_load, num_ranks, order)
    return RowSplit(order, max(end - start for start, end in row_ranges), id_shares(table_load, row_ranges, order))


@lru_cache(maxsize=1 << 14)
def _id_shares(table_load: TableLoad, row_ranges: tuple[tuple[int, int], ...], by_load: bool) -> tuple[float, ...]:
    if by_load:
        shares = table_load.hot_id_share(np.array([end for _, end in row_ranges]))
        return tuple(float(share) for share in np.diff(shares, prepend=0.0))
    hottest = float(table_load.hot_id_share(1)) if table_load.popularity and len(row_ranges) > 1 else 0.0
    num_rows = [end - start for start, end in row_ranges]
    is_even = max(num_rows) - min(num_rows) <= 1
    rest = [(1 - hottest) / len(num_rows) if is_even else (1 - hottest) * num / sum(num_rows) for num in num_rows]
    return (hottest + rest[0], *rest[1:])


def id_shares(table_load: TableLoad, row_ranges: Sequence[tuple[int, int]], order: str) -> tuple[float, ...]:
    """Each row range's share of the ids. In every order but "load", the most frequent row counts in the first range."""
    return _id_shares(table_load, tuple(row_ranges), order == "load")


def split_rows_by_order(table_load: TableLoad, num_ranks: int, order: str) -> list[tuple[int, int]]:
    """Row ranges by rank, as positions in this order; fewer than ranks if there are fewer rows."""
    return balanced_row_ranges(table_load if order == "load" else replace(table_load, popularity=()), num_ranks)


def balanced_row_ranges(table_load: TableLoad, num_ranks: int) -> list[tuple[int, int]]:
    """Row ranges by rank, most frequent rows first, that minimize the largest load; even without known popularity.

    No rank has more than MAX_ROW_RATIO times the average number of rows; fewer ranges if there are fewer rows.
    """
    rows = table_load.table.rows
    num_ranks = min(num_ranks, rows)
    if not table_load.popularity:
        ends = [rows * (i + 1) // num_ranks for i in range(num_ranks)]
        return list(pairwise([0, *ends]))
    max_rows = max(1, int(MAX_ROW_RATIO * rows / num_ranks))
    low, high = 0.0, 1.0
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        is_enough = _fill_ranks(table_load, num_ranks, max_rows, middle)[-1][1] == rows
        low, high = (low, middle) if is_enough else (middle, high)
    return _fill_ranks(table_load, num_ranks, max_rows, high)


def _fill_ranks(table_load: TableLoad, num_ranks: int, max_rows: int, max_load: float) -> list[tuple[int, int]]:
    """Give each rank rows up to this load and number, at least one; the last range may end before the last row."""
    rows, start = table_load.table.rows, 0
    curve_rows, curve_shares = _popularity_curve(table_load)
    row_ranges: list[tuple[int, int]] = []
    for ranks_left in range(num_ranks, 0, -1):
        end_share = float(np.interp(start, curve_rows, curve_shares)) + max_load
        end = rows if end_share >= 1 else int(np.interp(end_share, curve_shares, curve_rows))
        end = min(max(end, start + 1), start + max_rows, rows - ranks_left + 1)
        row_ranges.append((start, end))
        start = end
    return row_ranges


def sent_values_by_level(
    table_load: TableLoad, columns: int, row_levels: int, cluster: Cluster, batch_size: int
) -> list[float]:
    """The number of vector values that a rank of a unit sends over each level.

    Where rows are split, partial sums are reduce-scattered level by level: after each, a rank holds the sums of fewer
    samples. The sums are then sent to the ranks of their samples. Unpooled vectors are sent there directly.
    """
    levels = cluster.levels
    values = batch_size * table_load.pooled_vectors * columns
    values_by_level: list[float] = []
    for level in levels[:row_levels]:
        values_by_level.append(values * (level.num - 1) / level.num)
        values /= level.num
    values_by_level += _direct_values_by_level(values, levels[row_levels:])
    unpooled_values = batch_size * table_load.unpooled_vectors * columns / cluster.group_size(row_levels)
    unpooled = _direct_values_by_level(unpooled_values, levels)
    return [pooled + other for pooled, other in zip(values_by_level, unpooled, strict=True)]


def _direct_values_by_level(values: float, levels: Sequence[Level]) -> list[float]:
    """The values sent over each level, if equal parts go to all ranks."""
    targets, inside = prod(level.num for level in levels), 1
    values_by_level: list[float] = []
    for level in levels:
        values_by_level.append(values * (level.num - 1) * inside / targets)
        inside *= level.num
    return values_by_level

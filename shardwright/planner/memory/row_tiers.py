"""How the rows of tables are split over memory tiers, fastest first.

A table that does not fit in the fastest tier has lines of a cache there, for the rows that are used most; the others
are in the next tiers. One threshold of lookups per byte applies to all tables of a tier: the lowest at which the rows
of the fullest rank fit. A cache has lines for all rows of the steps in flight, at least.

Shape legend: R ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import ceil, inf, sqrt

import numpy as np

from shardwright.planner.memory.budget import memory_budget
from shardwright.planner.problem import PlacedTables, Problem
from shardwright.planner.tables import cache_hits
from shardwright.planner.tables.sharding import ShardUnit, TableLoad
from shardwright.spec.plan import Share
from shardwright.spec.row_cache import LINE_BYTES, ROW_INDEX_BYTES, SAVED_ROW_BYTES, STEPS_IN_FLIGHT, STORES, WAYS

DENSITY_STEPS = 32  # intervals per segment of a popularity curve
FLOAT32_BYTES = 4.0
SPARE_LINES = 1.25  # lines over the expected rows of the steps in flight: batches differ


@dataclass(frozen=True, slots=True)
class RowTiers:
    """Rows of a table by tier. `shares`: of each shard, as in a plan; `found`: by tier of the device, the share of a
    batch's distinct rows that are found there."""

    shares: tuple[Share, ...]
    found: tuple[float, ...]


def whole_tables(problem: Problem) -> list[RowTiers]:
    """All rows of all tables in the fastest tier."""
    tiers = problem.cluster.device.tiers
    whole = RowTiers((Share(tiers[0].name),), (1.0, *[0.0] * (len(tiers) - 1)))
    return [whole] * len(problem.table_loads)


def split_rows(problem: Problem, placed: PlacedTables) -> list[RowTiers] | None:
    """The tiers of every table; None if there is no room, or if replicas of a table would be on disk or on servers."""
    loads, budget = problem.placed_loads(placed), memory_budget(problem)
    all_rows = [load.table.rows for load in loads]
    if fits_memory(problem, placed, [all_rows]):
        return whole_tables(problem)
    curves = [_lookup_density(load) for load in loads]
    least = [_least_rows(problem, load, placed.num_row_shards(number)) for number, load in enumerate(loads)]
    within: list[list[int]] = []  # by tier but the last, the rows of each table in it and in faster ones
    for _ in budget.tiers[1:]:
        within.append(_most_rows(problem, placed, curves, within, least))
        least = within[-1]
    if not within or not fits_memory(problem, placed, [*within, all_rows]):
        return None
    tables = [_split_table(problem, placed, number, [rows[number] for rows in within]) for number in range(len(loads))]
    return tables if all(_can_be_there(placed, number, table) for number, table in enumerate(tables)) else None


def found_by_tier(problem: Problem, load: TableLoad, rows_within: Sequence[int]) -> tuple[float, ...]:
    """By tier, the share of a batch's distinct rows that are found there. `rows_within`: by tier, the rows in it and in
    faster ones."""
    num_ids, num_tiers = problem.batch_size * load.ids_per_sample, len(problem.cluster.device.tiers)
    shares = [cache_hits.found_share(load, rows, num_ids) for rows in rows_within]
    shares += [1.0] * (num_tiers - len(shares))
    return tuple(float(share) for share in np.diff(shares, prepend=0.0))


def fits_memory(problem: Problem, placed: PlacedTables, rows_within: Sequence[Sequence[int]]) -> bool:
    """Whether every rank has room in all these tiers. `rows_within`: by tier, the rows of each table in it and in
    faster ones."""
    return all(_has_room(problem, placed, rows_within[: num + 1]) for num in range(len(rows_within)))


def _has_room(problem: Problem, placed: PlacedTables, rows_within: Sequence[Sequence[int]]) -> bool:
    """Whether every rank has room for what is in the last of these tiers."""
    num, room = problem.cluster.num_ranks, memory_budget(problem).free_bytes[len(rows_within) - 1]
    faster_rows = rows_within[-2] if len(rows_within) > 1 else [0] * len(problem.table_loads)
    tier_rows = [rows - faster for rows, faster in zip(rows_within[-1], faster_rows, strict=True)]
    if (
        len(rows_within) > 1 and problem.cluster.device.tiers[len(rows_within) - 1].name in STORES
    ):  # has lines' rows too
        tier_rows = [all_rows * (own > 0) for all_rows, own in zip(rows_within[-1], tier_rows, strict=True)]
    bytes_R = placed.sum_by_rank(
        (unit.bytes_ * tier_rows[unit.table_number] / _num_rows(problem, unit) for unit in placed.units), num
    )
    if len(rows_within) == 1:
        bytes_R += placed.sum_by_rank((unit.buffer_bytes for unit in placed.units), num)
        bytes_R += problem.bytes_on_every_rank(placed)
        bytes_R += placed.sum_by_rank((_cache_bytes(problem, unit, tier_rows) for unit in placed.units), num)
    return bool((bytes_R <= room + 1.0).all())  # rounding: one byte


def _cache_bytes(problem: Problem, unit: ShardUnit, fast_rows: Sequence[int]) -> float:
    """Bytes of a unit's cache beside its rows: the index, where other rows are on disk or servers, wider weights."""
    table_rows, lines = _num_rows(problem, unit), fast_rows[unit.table_number]
    if lines == table_rows:
        return 0.0
    load, is_stored = problem.table_loads[unit.table_number], problem.cluster.device.tiers[-1].name in STORES
    unit_rows = unit.bytes_ / load.row_bytes(unit.width)
    wider_bytes = max(0.0, FLOAT32_BYTES - load.weight_bytes) * unit.width if problem.wide_lines else 0.0
    return unit_rows * (
        (LINE_BYTES + wider_bytes) * lines / table_rows + (ROW_INDEX_BYTES + SAVED_ROW_BYTES) * is_stored
    )


def _num_rows(problem: Problem, unit: ShardUnit) -> int:
    return problem.table_loads[unit.table_number].table.rows


def _most_rows(
    problem: Problem,
    placed: PlacedTables,
    curves: Sequence[tuple[np.ndarray, np.ndarray]],
    within: Sequence[Sequence[int]],
    least: Sequence[int],
) -> list[int]:
    """Of each table, rows in the tier after those of `within` and in these: those used most, and at least `least`."""
    levels = np.unique(np.concatenate([densities for densities, _ in curves]))[::-1]

    def rows_at(num_levels: int) -> list[int]:
        """The rows of the densest intervals."""
        dense = _rows_above(curves, float(levels[num_levels - 1]) if num_levels else inf)
        return [_round_rows(problem, placed, number, max(dense[number], least[number])) for number in range(len(dense))]

    low, high = 0, len(levels)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if _has_room(problem, placed, [*within, rows_at(middle)]) else (low, middle - 1)
    return rows_at(low)


def _round_rows(problem: Problem, placed: PlacedTables, number: int, rows: int) -> int:
    """Whole sets of lines in each shard, or the whole table."""
    table_rows, step = problem.table_loads[number].table.rows, WAYS * placed.num_row_shards(number)
    if number in placed.data_parallel_tables or rows > table_rows - step:
        return table_rows
    return rows // step * step


def least_bytes(problem: Problem) -> float:
    """Bytes of the fastest tier that tables need, if each is on one rank."""
    loads = problem.table_loads
    return sum(_least_rows(problem, load, 1) * load.row_bytes(load.table.dim) for load in loads)


def _least_rows(problem: Problem, load: TableLoad, num_shards: int) -> int:
    """Of a table, the rows of the steps in flight over all its shards, with some to spare."""
    if load.table.growth is not None:
        return load.table.rows
    distinct = min(load.table.rows, load.distinct_share * load.ids_per_sample * problem.batch_size)
    rows = STEPS_IN_FLIGHT * problem.accumulate * distinct / num_shards
    lines = ceil((SPARE_LINES * rows + 4 * sqrt(rows)) / WAYS) * WAYS
    return min(load.table.rows, lines * num_shards)


@lru_cache(maxsize=1 << 14)
def _lookup_density(load: TableLoad) -> tuple[np.ndarray, np.ndarray]:
    """Lookups per sample and byte, falling; and the number of rows that are at least so dense.

    Rows are grouped into intervals of the popularity curve.
    """
    points = np.unique([0, load.table.rows, *(k for k, _ in load.popularity)])
    steps = np.arange(1, DENSITY_STEPS + 1)
    ends = np.unique(points[:-1, None] + np.diff(points)[:, None] * steps // DENSITY_STEPS)
    ends = ends[ends > 0]
    shares, sizes = np.diff(load.hot_id_share(ends), prepend=0.0), np.diff(ends, prepend=0)
    densities = shares / sizes * load.ids_per_sample / load.row_bytes(load.table.dim)
    # Intervals of equal density would be a single level, so each counts as slightly less dense than the one before.
    return np.minimum.accumulate(densities) * (1 - 1e-9 * np.arange(len(ends))), ends


def _rows_above(curves: Sequence[tuple[np.ndarray, np.ndarray]], threshold: float) -> list[int]:
    """By table, the number of rows with at least this density."""
    nums = [len(densities) - int(np.searchsorted(densities[::-1], threshold)) for densities, _ in curves]
    return [int(ends[num - 1]) if num else 0 for num, (_, ends) in zip(nums, curves, strict=True)]


def _split_table(problem: Problem, placed: PlacedTables, number: int, rows_within: Sequence[int]) -> RowTiers:
    """The tiers of a table. `rows_within`: by tier but the last, the rows in it and in faster ones."""
    load, num_shards = problem.placed_loads(placed)[number], placed.num_row_shards(number)
    shares, before = list[Share](), 0
    for tier, rows in zip(problem.cluster.device.tiers, (*rows_within, load.table.rows), strict=True):
        if rows == load.table.rows:
            shares.append(Share(tier.name))
            break
        if rows > before:
            shares.append(Share(tier.name, (rows - before) // num_shards))
        before = rows
    return RowTiers(tuple(shares), found_by_tier(problem, load, rows_within))


def _can_be_there(placed: PlacedTables, number: int, table: RowTiers) -> bool:
    """Whether the runtime supports a table there: replicas are in memory."""
    units = placed.units_by_table.get(number, [])
    return table.shares[-1].tier not in STORES or all(unit.sharding.num_replicas == 1 for unit, _ in units)

"""Memory of a rank by tier: what training needs besides tables, and what remains for them.

Shape legend: R ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from shardwright.planner.chunks import ranks_by_stage
from shardwright.planner.memory import dense_model, pipeline_memory
from shardwright.planner.problem import PlacedTables, Problem
from shardwright.planner.tables.sharding import TableLoad
from shardwright.spec.cluster import Tier
from shardwright.spec.plan import Share
from shardwright.spec.wire import ID_BYTES

RESERVED_SHARE = 0.1  # of each tier, for the framework, the network library and fragmentation
BATCHES_IN_FLIGHT = 4  # whose ids are held at once: the leads of the step
DENSITY_STEPS = 32  # intervals per segment of a popularity curve


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """Bytes that a rank needs besides its tables: by purpose in the fastest tier, and offloaded.

    `tiers` are the memory tiers that may hold tables.
    """

    memory_parts: tuple[tuple[str, float], ...]
    offloaded_bytes: float
    tiers: tuple[Tier, ...]

    @property
    def free_bytes(self) -> list[float]:
        """Bytes that remain for tables, by tier."""
        usable = [tier.bytes_ * (1 - RESERVED_SHARE) for tier in self.tiers]
        used = [dense_model.total_bytes(self.memory_parts), self.offloaded_bytes, *[0.0] * len(usable)]
        return [capacity - bytes_ for capacity, bytes_ in zip(usable, used, strict=False)]


def memory_budget(problem: Problem) -> MemoryBudget:
    """The budget of the fullest rank, for the dense model, ids, and vectors with their gradients."""
    parts = (*max(_dense_memory_by_stage(problem), key=dense_model.total_bytes), *_sparse_memory(problem))
    tiers = tuple(tier for tier in problem.cluster.device.tiers if tier.name != "ssd")
    return MemoryBudget(parts, dense_model.offloaded_bytes(problem), tiers)


def memory_parts_by_rank(problem: Problem) -> dict[str, np.ndarray]:
    """Bytes of the fastest tier by purpose and rank, besides tables."""
    by_stage = _dense_memory_by_stage(problem)
    ranks = ranks_by_stage(problem) if problem.pipeline is not None else [tuple(range(problem.cluster.num_ranks))]
    by_name: dict[str, np.ndarray] = {}
    for parts, own in zip(by_stage, ranks, strict=True):
        for name, bytes_ in (*parts, *_sparse_memory(problem)):
            by_name.setdefault(name, np.zeros(problem.cluster.num_ranks))[list(own)] = bytes_
    return by_name


def _sparse_memory(problem: Problem) -> dense_model.MemoryParts:
    loads = [load.local_pooling or load for load in problem.table_loads]
    ids = sum(load.ids_per_sample for load in loads) * problem.local_batch_size * ID_BYTES
    vectors = sum(load.vectors * load.table.dim for load in loads) * problem.local_batch_size * 4
    rows = sum(map(problem.row_buffer_bytes, problem.table_loads))
    return (("ids", 2 * BATCHES_IN_FLIGHT * ids), ("vectors and their gradients", 2 * vectors + rows))


def _dense_memory_by_stage(problem: Problem) -> list[dense_model.MemoryParts]:
    """Bytes that the dense model takes by purpose, for each pipeline rank; without a pipeline, of any rank."""
    return [dense_model.peak_memory(problem)] if problem.pipeline is None else pipeline_memory.memory_by_stage(problem)


def split_rows_by_tier(problem: Problem, placed: PlacedTables) -> tuple[list[float], list[tuple[Share, ...]]] | None:
    """By table, the share of ids with rows in the fastest tier, and how its shards are split over tiers.

    None if the next tier has no room for the rest. One threshold of lookups per byte applies to all tables: the lowest
    at which the hot rows of the fullest rank fit.
    """
    loads = problem.placed_loads(placed)
    tiers, room = problem.cluster.device.tiers, memory_budget(problem).free_bytes[0]
    rows_R, buffers_R = _unit_bytes(problem, placed)
    replicated = problem.bytes_on_every_rank(placed)
    if (rows_R + buffers_R).max(initial=0.0) + replicated <= room:
        return [1.0] * len(loads), [(Share(tiers[0].name),)] * len(loads)
    space = room - replicated - float(buffers_R.max())
    curves = [_lookup_density(load) for load in loads]
    levels = np.unique(np.concatenate([densities for densities, _ in curves]))[::-1]
    low, high = 0, len(levels)  # number of density levels, densest first, that fit
    while low < high:
        middle = (low + high + 1) // 2
        has_room = _fast_bytes(problem, placed, _rows_above(curves, levels[middle - 1])).max() <= space
        low, high = (middle, high) if has_room else (low, middle - 1)
    rows = _rows_above(curves, levels[low - 1] if low else np.inf)
    for number, hot in enumerate(rows):
        is_whole = number in placed.data_parallel_tables or hot == loads[number].table.rows
        rows[number] = loads[number].table.rows if is_whole else hot - hot % placed.num_row_shards(number)
    if not fits_memory(problem, placed, rows):
        return None
    return (
        [float(load.hot_id_share(hot)) for load, hot in zip(loads, rows, strict=True)],
        [_tier_shares(tiers, load, hot, placed, i) for i, (load, hot) in enumerate(zip(loads, rows, strict=True))],
    )


def fits_memory(problem: Problem, placed: PlacedTables, fast_rows: Sequence[int]) -> bool:
    """Whether every rank has room with this many rows of each table in the fastest tier."""
    room = memory_budget(problem).free_bytes
    rows_R, buffers_R = _unit_bytes(problem, placed)
    fast_R = _fast_bytes(problem, placed, fast_rows)
    fits_fast = fast_R + buffers_R + problem.bytes_on_every_rank(placed) <= room[0]
    fits_slow = rows_R - fast_R <= sum(room[1:]) + 1.0  # rounding: one byte
    return bool((fits_fast & fits_slow).all())


def _unit_bytes(problem: Problem, placed: PlacedTables) -> tuple[np.ndarray, np.ndarray]:
    """Bytes by rank of the rows and of the buffers of all units."""
    num = problem.cluster.num_ranks
    rows_R = placed.sum_by_rank((unit.bytes_ for unit in placed.units), num)
    return rows_R, placed.sum_by_rank((unit.buffer_bytes for unit in placed.units), num)


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


def _fast_bytes(problem: Problem, placed: PlacedTables, rows: Sequence[int]) -> np.ndarray:
    """Bytes by rank of the fastest tier with this many hot rows of each table."""
    shares = [num_rows / load.table.rows for num_rows, load in zip(rows, problem.table_loads, strict=True)]
    bytes_ = (unit.bytes_ * shares[unit.table_number] for unit in placed.units)
    return placed.sum_by_rank(bytes_, problem.cluster.num_ranks)


def _tier_shares(
    tiers: Sequence[Tier], load: TableLoad, rows: int, placed: PlacedTables, number: int
) -> tuple[Share, ...]:
    """How the rows of a table's shards are split over tiers: `rows` in the fastest, the rest in the next."""
    if rows >= load.table.rows:
        return (Share(tiers[0].name),)
    num_shards = placed.num_row_shards(number)
    if not rows // num_shards:
        return (Share(tiers[1].name),)
    return Share(tiers[0].name, rows // num_shards), Share(tiers[1].name)


def describe_shortage(problem: Problem) -> str:
    """How many bytes are missing, in which tier or for which table, and what would make the tables fit."""
    memory, num = memory_budget(problem), problem.cluster.num_ranks
    room = sum(memory.free_bytes)
    name = problem.cluster.name
    if memory.free_bytes[0] <= 0:
        reason, most_bytes = max(memory.memory_parts, key=lambda part: part[1])
        can_split = problem.workload.experts and not problem.experts
        remedy = ", split the experts (plan.experts=0)," if can_split else ","
        return (
            f"{name}: without any table a rank needs "
            f"{bytes_text(sum(bytes_ for _, bytes_ in memory.memory_parts))} of its "
            f"{bytes_text(memory.tiers[0].bytes_)} of {memory.tiers[0].name}, {bytes_text(most_bytes)} of them for "
            f"{reason}: make the batch smaller{remedy} or take more ranks"
        )
    sizes = [(load.table_bytes, load) for load in problem.table_loads]
    total = sum(size for size, _ in sizes)
    largest, load = max(sizes, key=lambda pair: pair[0])
    tiers = " and ".join(tier.name for tier in memory.tiers)
    if total > room * num:
        shortage = (
            f"{name}: the tables and their optimizer need {bytes_text(total)}; {num} ranks have "
            f"{bytes_text(room * num)} of {tiers}"
        )
        return f"{shortage}, short by {bytes_text(total - room * num)}. {_suggest_remedies(problem, total, room)}"
    return (
        f"{name}: the tables need {bytes_text(total)} of {bytes_text(room * num)} of {tiers}, but no sharding found "
        f'gives every rank at most {bytes_text(room)}; the largest table is "{load.table.name}" with '
        f"{bytes_text(largest)}: take more ranks, or remove pins"
    )


def _suggest_remedies(problem: Problem, total: float, room: float) -> str:
    """The number of ranks that have enough memory, and what would make the tables smaller."""
    options: list[str] = []
    weights = sum(load.num_values * load.weight_bytes for load in problem.table_loads)
    if any(load.weight_bytes == 4 for load in problem.table_loads):
        options.append(f'"tables.fp16" allowed ({bytes_text(weights / 2)} less)')
    state = sum(load.num_values * load.state_column_bytes for load in problem.table_loads)
    if state:
        options.append(f"row-wise AdaGrad (about {bytes_text(state)} less)")
    hint = f"; to need fewer: {', '.join(options)}" if options else ""
    return f"It takes {-(-total // room):,.0f} ranks{hint}"


def bytes_text(bytes_: float) -> str:
    """A number of bytes with three digits and a decimal unit."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if bytes_ >= size:
            return f"{bytes_ / size:.3g} {unit}"
    return f"{bytes_ / 1e3:.3g} kB"

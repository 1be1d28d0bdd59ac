"""Which bytes lie in which tier of a rank: what training needs beside the tables, and what that leaves for them."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from shardwright.planner.memory import dense_model
from shardwright.planner.problem import PlacedTables, Problem
from shardwright.planner.tables.sharding import TableLoad
from shardwright.spec.cluster import Tier
from shardwright.spec.plan import Share
from shardwright.spec.wire import ID_BYTES

RESERVED_SHARE = 0.1  # of each tier, for the framework, the network library and what fragments
BATCHES_IN_FLIGHT = 4  # whose ids are there at once: the leads of the step
DENSITY_STEPS = 32  # into which rows of one popularity are cut


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """Bytes of one rank beside its tables, by what needs them in the fastest tier, and in the next; `tiers` are those
    that tables may lie in."""

    memory_parts: tuple[tuple[str, float], ...]
    offloaded_bytes: float
    tiers: tuple[Tier, ...]

    @property
    def free_bytes(self) -> list[float]:
        """By tier that tables may lie in, what is left for them."""
        usable = [tier.bytes_ * (1 - RESERVED_SHARE) for tier in self.tiers]
        taken = [dense_model.total_bytes(self.memory_parts), self.offloaded_bytes, *[0.0] * len(usable)]
        return [room - bytes_ for room, bytes_ in zip(usable, taken, strict=False)]


def memory_budget(problem: Problem) -> MemoryBudget:
    homes = [demand.local_pooling or demand for demand in problem.table_loads]
    ids = sum(demand.ids_per_sample for demand in homes) * problem.local_batch_size * ID_BYTES
    vectors = sum(demand.vectors * demand.table.dim for demand in homes) * problem.local_batch_size * 4
    rows = sum(map(problem.row_buffer_bytes, problem.table_loads))
    parts = (
        *dense_model.peak_memory(problem),
        ("ids", 2 * BATCHES_IN_FLIGHT * ids),
        ("vectors and their gradients", 2 * vectors + rows),
    )
    tiers = tuple(tier for tier in problem.cluster.device.tiers if tier.name != "ssd")
    return MemoryBudget(parts, dense_model.offloaded_bytes(problem), tiers)


def split_rows_by_tier(
    problem: Problem, placed: PlacedTables, free_bytes: Sequence[float]
) -> tuple[list[float], list[tuple[Share, ...]]] | None:
    """By table, the share of its ids whose rows lie in the fastest tier, and how its rectangles' rows lie; None where
    the next tier has no room for the rest.

    One threshold of lookups by byte for all tables, the lowest at which the fullest rank's hot rows fit.
    """
    demands = problem.placed_loads(placed)
    num = problem.cluster.num_ranks
    needed_R = placed.sum_by_rank((unit.bytes_ for unit in placed.units), num)
    buffers_R = placed.sum_by_rank((unit.buffer_bytes for unit in placed.units), num)
    everywhere = problem.bytes_on_every_rank(placed)
    tiers = problem.cluster.device.tiers
    if (needed_R + buffers_R).max(initial=0.0) + everywhere <= free_bytes[0]:
        return [1.0] * len(demands), [(Share(tiers[0].name),)] * len(demands)
    near = free_bytes[0] - everywhere - float(buffers_R.max())
    curves = [_density(demand) for demand in demands]
    levels = np.unique(np.concatenate([densities for densities, _ in curves]))[::-1]
    low, high = 0, len(levels)  # so many of the densest levels fit
    while low < high:
        middle = (low + high + 1) // 2
        enough = _fullest(problem, placed, _rows_above(curves, levels[middle - 1])) <= near
        low, high = (middle, high) if enough else (low, middle - 1)
    rows = _rows_above(curves, levels[low - 1] if low else np.inf)
    for at, kept in enumerate(rows):
        whole = at in placed.data_parallel_tables or kept == demands[at].table.rows
        rows[at] = demands[at].table.rows if whole else kept - kept % placed.num_row_shards(at)
    if not fits_memory(problem, placed, rows):
        return None
    return (
        [float(demand.hot_id_share(kept)) for demand, kept in zip(demands, rows, strict=True)],
        [_shares(tiers, demand, kept, placed, at) for at, (demand, kept) in enumerate(zip(demands, rows, strict=True))],
    )


def fits_memory(problem: Problem, placed: PlacedTables, fast_rows: Sequence[int]) -> bool:
    """Whether every rank has room, with so many rows of each table in the fastest tier."""
    num, room = problem.cluster.num_ranks, memory_budget(problem).free_bytes
    all_R = placed.sum_by_rank((unit.bytes_ for unit in placed.units), num)
    buffers_R = placed.sum_by_rank((unit.buffer_bytes for unit in placed.units), num)
    near_R = _near(problem, placed, fast_rows)
    fast = near_R + buffers_R + problem.bytes_on_every_rank(placed) <= room[0]
    slow = all_R - near_R <= sum(room[1:]) + 1.0  # a byte of rounding
    return bool((fast & slow).all())


@lru_cache(maxsize=1 << 14)
def _density(demand: TableLoad) -> tuple[np.ndarray, np.ndarray]:
    """Lookups of a sample for each byte, falling, and how many rows are at least so dense: in small parts."""
    points = np.unique([0, demand.table.rows, *(k for k, _ in demand.popularity)])
    parts = np.arange(1, DENSITY_STEPS + 1)
    ends = np.unique(points[:-1, None] + np.diff(points)[:, None] * parts // DENSITY_STEPS)
    ends = ends[ends > 0]
    shares, at = np.diff(demand.hot_id_share(ends), prepend=0.0), np.diff(ends, prepend=0)
    densities = shares / at * demand.ids_per_sample / demand.row_bytes(demand.table.dim)
    # Equal parts of a table would be one level: each counts as a hair less dense than the one before.
    return np.minimum.accumulate(densities) * (1 - 1e-9 * np.arange(len(ends))), ends


def _rows_above(curves: Sequence[tuple[np.ndarray, np.ndarray]], least: float) -> list[int]:
    """Of each table, the rows at least so dense."""
    nums = [len(densities) - int(np.searchsorted(densities[::-1], least)) for densities, _ in curves]
    return [int(ends[num - 1]) if num else 0 for num, (_, ends) in zip(nums, curves, strict=True)]


def _fullest(problem: Problem, placed: PlacedTables, rows: Sequence[int]) -> float:
    """Bytes of the fastest tier that these hot rows take, at the rank where they take most."""
    return float(_near(problem, placed, rows).max())


def _near(problem: Problem, placed: PlacedTables, rows: Sequence[int]) -> np.ndarray:
    share = [kept / demand.table.rows for kept, demand in zip(rows, problem.table_loads, strict=True)]
    hot = (unit.bytes_ * share[unit.table_number] for unit in placed.units)
    return placed.sum_by_rank(hot, problem.cluster.num_ranks)


def _shares(
    tiers: Sequence[Tier], demand: TableLoad, rows: int, placed: PlacedTables, number: int
) -> tuple[Share, ...]:
    """So many rows of each rectangle in the fastest tier, the rest in the next."""
    if rows >= demand.table.rows:
        return (Share(tiers[0].name),)
    spread = placed.num_row_shards(number)
    if not rows // spread:
        return (Share(tiers[1].name),)
    return Share(tiers[0].name, rows // spread), Share(tiers[1].name)


def describe_shortage(problem: Problem) -> str:
    """Which table or tier is short by how many bytes, and what would make it fit."""
    found, num = memory_budget(problem), problem.cluster.num_ranks
    room = sum(found.free_bytes)
    name = problem.cluster.name
    if found.free_bytes[0] <= 0:
        what, most = max(found.memory_parts, key=lambda part: part[1])
        return (
            f"{name}: without any table a rank needs "
            f"{bytes_text(sum(bytes_ for _, bytes_ in found.memory_parts))} of its "
            f"{bytes_text(found.tiers[0].bytes_)} of {found.tiers[0].name}, {bytes_text(most)} of them for {what}: "
            "make the batch smaller, or take more ranks"
        )
    sizes = [(demand.table.rows * demand.row_bytes(demand.table.dim), demand) for demand in problem.table_loads]
    total = sum(size for size, _ in sizes)
    largest, demand = max(sizes, key=lambda pair: pair[0])
    tiers = " and ".join(tier.name for tier in found.tiers)
    if total > room * num:
        said = (
            f"{name}: the tables and their optimizer need {bytes_text(total)}; {num} ranks have "
            f"{bytes_text(room * num)} of {tiers}"
        )
        return f"{said}, short by {bytes_text(total - room * num)}. {_remedies(problem, total, room)}"
    return (
        f"{name}: the tables need {bytes_text(total)} of {bytes_text(room * num)} of {tiers}, but no way "
        "to cut them was found "
        f'that leaves no rank with more than {bytes_text(room)}; the largest is "{demand.table.name}" with '
        f"{bytes_text(largest)}: "
        "take more ranks, or remove pins"
    )


def _remedies(problem: Problem, total: float, room: float) -> str:
    """More ranks, and what would make less of it."""
    found: list[str] = []
    weights = sum(one.table.rows * one.table.dim * one.weight_bytes for one in problem.table_loads)
    if any(one.weight_bytes == 4 for one in problem.table_loads):
        found.append(f'"tables.fp16" allowed ({bytes_text(weights / 2)} less)')
    state = sum(one.table.rows * one.table.dim * one.state_column_bytes for one in problem.table_loads)
    if state:
        found.append(f"row-wise AdaGrad (about {bytes_text(state)} less)")
    helps = f"; of help: {', '.join(found)}" if found else ""
    return f"It takes {-(-total // room):,.0f} ranks{helps}"


def bytes_text(bytes_: float) -> str:
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if bytes_ >= size:
            return f"{bytes_ / size:.3g} {unit}"
    return f"{bytes_ / 1e3:.3g} kB"

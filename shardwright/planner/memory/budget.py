"""Which bytes lie in which tier of a rank: what training needs beside the tables, and what that leaves for them."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from shardwright.planner.memory import dense_model
from shardwright.planner.problem import Placed, Problem
from shardwright.planner.tables.sharding import ID_BYTES, Demand
from shardwright.spec.cluster import Tier
from shardwright.spec.plan import Share

RESERVED = 0.1  # of each tier, for the framework, the network library and what fragments
BATCHES = 4  # whose ids are there at once: the leads of the step
PARTS = 32  # into which rows of one popularity are cut


@dataclass(frozen=True, slots=True)
class Budget:
    """Bytes of one rank beside its tables, by what needs them in the fastest tier, and in the next; `tiers` are those
    that tables may lie in."""

    parts: tuple[tuple[str, float], ...]
    far: float
    tiers: tuple[Tier, ...]

    @property
    def free(self) -> list[float]:
        """By tier that tables may lie in, what is left for them."""
        usable = [tier.bytes_ * (1 - RESERVED) for tier in self.tiers]
        taken = [dense_model.total(self.parts), self.far, *[0.0] * len(usable)]
        return [room - bytes_ for room, bytes_ in zip(usable, taken, strict=False)]


def budget(problem: Problem) -> Budget:
    homes = [demand.home or demand for demand in problem.demands]
    ids = sum(demand.ids for demand in homes) * problem.own_batch * ID_BYTES
    vectors = sum(demand.vectors * demand.table.dim for demand in homes) * problem.own_batch * 4
    rows = sum(map(problem.arriving_bytes, problem.demands))
    parts = (
        *dense_model.fullest(problem),
        ("ids", 2 * BATCHES * ids),
        ("vectors and their gradients", 2 * vectors + rows),
    )
    tiers = tuple(tier for tier in problem.cluster.device.tiers if tier.name != "ssd")
    return Budget(parts, dense_model.far_bytes(problem), tiers)


def near_shares(
    problem: Problem, placed: Placed, room: Sequence[float]
) -> tuple[list[float], list[tuple[Share, ...]]] | None:
    """By table, the share of its ids whose rows lie in the fastest tier, and how its rectangles' rows lie; None where
    the next tier has no room for the rest.

    One threshold of lookups by byte for all tables, the lowest at which the fullest rank's hot rows fit.
    """
    demands = problem.asked(placed)
    num = problem.cluster.num_ranks
    needed_R = placed.by_rank((unit.bytes_ for unit in placed.units), num)
    buffers_R = placed.by_rank((unit.buffers for unit in placed.units), num)
    everywhere = problem.everywhere_bytes(placed)
    tiers = problem.cluster.device.tiers
    if (needed_R + buffers_R).max(initial=0.0) + everywhere <= room[0]:
        return [1.0] * len(demands), [(Share(tiers[0].name),)] * len(demands)
    near = room[0] - everywhere - float(buffers_R.max())
    curves = [_density(demand) for demand in demands]
    levels = np.unique(np.concatenate([densities for densities, _ in curves]))[::-1]
    low, high = 0, len(levels)  # so many of the densest levels fit
    while low < high:
        middle = (low + high + 1) // 2
        enough = _fullest(problem, placed, _rows_above(curves, levels[middle - 1])) <= near
        low, high = (middle, high) if enough else (low, middle - 1)
    rows = _rows_above(curves, levels[low - 1] if low else np.inf)
    for at, kept in enumerate(rows):
        whole = at in placed.replicas or kept == demands[at].table.rows
        rows[at] = demands[at].table.rows if whole else kept - kept % placed.spread(at)
    if not fits(problem, placed, rows):
        return None
    return (
        [float(demand.load(kept)) for demand, kept in zip(demands, rows, strict=True)],
        [_shares(tiers, demand, kept, placed, at) for at, (demand, kept) in enumerate(zip(demands, rows, strict=True))],
    )


def fits(problem: Problem, placed: Placed, rows: Sequence[int]) -> bool:
    """Whether every rank has room, with so many rows of each table in the fastest tier."""
    num, room = problem.cluster.num_ranks, budget(problem).free
    all_R = placed.by_rank((unit.bytes_ for unit in placed.units), num)
    buffers_R = placed.by_rank((unit.buffers for unit in placed.units), num)
    near_R = _near(problem, placed, rows)
    fast = near_R + buffers_R + problem.everywhere_bytes(placed) <= room[0]
    slow = all_R - near_R <= sum(room[1:]) + 1.0  # a byte of rounding
    return bool((fast & slow).all())


@lru_cache(maxsize=1 << 14)
def _density(demand: Demand) -> tuple[np.ndarray, np.ndarray]:
    """Lookups of a sample for each byte, falling, and how many rows are at least so dense: in small parts."""
    points = np.unique([0, demand.table.rows, *(k for k, _ in demand.hottest)])
    parts = np.arange(1, PARTS + 1)
    ends = np.unique(points[:-1, None] + np.diff(points)[:, None] * parts // PARTS)
    ends = ends[ends > 0]
    shares, at = np.diff(demand.load(ends), prepend=0.0), np.diff(ends, prepend=0)
    densities = shares / at * demand.ids / demand.row_bytes(demand.table.dim)
    # Equal parts of a table would be one level: each counts as a hair less dense than the one before.
    return np.minimum.accumulate(densities) * (1 - 1e-9 * np.arange(len(ends))), ends


def _rows_above(curves: Sequence[tuple[np.ndarray, np.ndarray]], least: float) -> list[int]:
    """Of each table, the rows at least so dense."""
    nums = [len(densities) - int(np.searchsorted(densities[::-1], least)) for densities, _ in curves]
    return [int(ends[num - 1]) if num else 0 for num, (_, ends) in zip(nums, curves, strict=True)]


def _fullest(problem: Problem, placed: Placed, rows: Sequence[int]) -> float:
    """Bytes of the fastest tier that these hot rows take, at the rank where they take most."""
    return float(_near(problem, placed, rows).max())


def _near(problem: Problem, placed: Placed, rows: Sequence[int]) -> np.ndarray:
    share = [kept / demand.table.rows for kept, demand in zip(rows, problem.demands, strict=True)]
    hot = (unit.bytes_ * share[unit.demand] for unit in placed.units)
    return placed.by_rank(hot, problem.cluster.num_ranks)


def _shares(tiers: Sequence[Tier], demand: Demand, rows: int, placed: Placed, number: int) -> tuple[Share, ...]:
    """So many rows of each rectangle in the fastest tier, the rest in the next."""
    if rows >= demand.table.rows:
        return (Share(tiers[0].name),)
    spread = placed.spread(number)
    if not rows // spread:
        return (Share(tiers[1].name),)
    return Share(tiers[0].name, rows // spread), Share(tiers[1].name)


def short_of(problem: Problem) -> str:
    """Which table or tier is short by how many bytes, and what would make it fit."""
    found, num = budget(problem), problem.cluster.num_ranks
    room = sum(found.free)
    name = problem.cluster.name
    if found.free[0] <= 0:
        what, most = max(found.parts, key=lambda part: part[1])
        return (
            f"{name}: without any table a rank needs {told(sum(bytes_ for _, bytes_ in found.parts))} of its "
            f"{told(found.tiers[0].bytes_)} of {found.tiers[0].name}, {told(most)} of them for {what}: "
            "make the batch smaller, or take more ranks"
        )
    sizes = [(demand.table.rows * demand.row_bytes(demand.table.dim), demand) for demand in problem.demands]
    total = sum(size for size, _ in sizes)
    largest, demand = max(sizes, key=lambda pair: pair[0])
    tiers = " and ".join(tier.name for tier in found.tiers)
    if total > room * num:
        said = (
            f"{name}: the tables and their optimizer need {told(total)}; {num} ranks have {told(room * num)} of {tiers}"
        )
        return f"{said}, short by {told(total - room * num)}. {_remedies(problem, total, room)}"
    return (
        f"{name}: the tables need {told(total)} of {told(room * num)} of {tiers}, but no way to cut them was found "
        f'that leaves no rank with more than {told(room)}; the largest is "{demand.table.name}" with {told(largest)}: '
        "take more ranks, or remove pins"
    )


def _remedies(problem: Problem, total: float, room: float) -> str:
    """More ranks, and what would make less of it."""
    found: list[str] = []
    weights = sum(one.table.rows * one.table.dim * one.weight_bytes for one in problem.demands)
    if any(one.weight_bytes == 4 for one in problem.demands):
        found.append(f'"tables.fp16" allowed ({told(weights / 2)} less)')
    state = sum(one.table.rows * one.table.dim * one.state_column_bytes for one in problem.demands)
    if state:
        found.append(f"row-wise AdaGrad (about {told(state)} less)")
    helps = f"; of help: {', '.join(found)}" if found else ""
    return f"It takes {-(-total // room):,.0f} ranks{helps}"


def told(bytes_: float) -> str:
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if bytes_ >= size:
            return f"{bytes_ / size:.3g} {unit}"
    return f"{bytes_ / 1e3:.3g} kB"

"""Row exchange with bounded staleness: which bounds, how many copies, and how many rows ranks then exchange.

A row that a rank's batch uses with probability q, and with it each of the `others`, is asked for when its lease ends,
and sent when it misses more than `pull` updates. So between two times that it is sent, a row that is used seldom is
asked for at nearly every use, one that is used in every batch once.

Shape legend: I intervals of a popularity curve.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from shardwright.planner.memory import budget
from shardwright.planner.problem import Problem
from shardwright.planner.search import Candidate
from shardwright.planner.tables.cache_hits import hits_by_interval
from shardwright.planner.tables.copied_load import CopiedLoad
from shardwright.planner.tables.sharding import TableLoad
from shardwright.spec.plan import Bounded
from shardwright.spec.row_cache import MAX_UNSENT_BATCHES, WAYS
from shardwright.spec.stage_checks import max_staleness

MOST = 1 << 20  # updates, where any number is allowed
PUSH_SHARES = (0.25, 0.5, 0.75)  # of the allowed staleness, for updates that are not sent
MEMORY_SHARE = 0.25  # of a rank's room for tables, for copies
TIE_SHARE = 0.01  # of a step's time, by which copies must be faster
MOST_CHECKS = 200  # of a copy, between two times that it is sent


def allowed_bounds(allow: Sequence[str], num_ranks: int) -> list[Bounded]:
    """Bounds within the allowed staleness: pull + others x push."""
    others, total = num_ranks - 1, min(max_staleness(tuple(allow)), MOST)
    pushes = {int(total * share) // others for share in PUSH_SHARES} if others and total else set[int]()
    return [Bounded(int(total) - others * push, push) for push in sorted(pushes)]


def with_copies(problem: Problem, bounds: Sequence[Bounded]) -> Problem | None:
    """The problem where tables with row exchange have the best of these bounds; None if no table may have."""
    numbers = [number for number, load in enumerate(problem.table_loads) if _may_be_copied(load)]
    if not numbers or not bounds:
        return None
    rows_by_table = {number: _num_copies(problem, number, numbers) for number in numbers}
    options = [
        with_bounds(problem, {number: replace(sync, copies=copies) for number, copies in rows_by_table.items()})
        for sync in bounds
    ]
    return min(
        options,
        key=lambda option: sum(
            option.row_exchange_loads[number].table.dim * option.row_exchange_loads[number].ids_per_sample
            for number in numbers
        ),
    )


def with_bounds(problem: Problem, bounds: Mapping[int, Bounded]) -> Problem:
    """The problem where these tables have copies of rows, if they have row exchange."""
    rows = tuple(
        _copied_load(problem, number, bounds[number]) if number in bounds else load
        for number, load in enumerate(problem.row_exchange_loads)
    )
    return replace(problem, row_exchange_loads=rows)


def _may_be_copied(load: TableLoad) -> bool:
    return load.local_pooling is None and load.table.growth is None and load.weight_bytes >= 4


def _num_copies(problem: Problem, number: int, numbers: Sequence[int]) -> int:
    """Rows of a table of which a rank has copies: all, or the same share of all tables, but those of two batches."""
    total = sum(_copy_bytes(load) * load.table.rows for load in (problem.table_loads[other] for other in numbers))
    room = MEMORY_SHARE * max(0.0, budget.memory_budget(problem).free_bytes[0])
    load = problem.row_exchange_loads[number]
    wanted = max(load.table.rows * min(1.0, room / max(total, 1.0)), 2 * _rows_of_batch(problem, load))
    return max(WAYS, -(-round(min(wanted, load.table.rows)) // WAYS) * WAYS)


def _rows_of_batch(problem: Problem, row_load: TableLoad) -> float:
    return problem.local_batch_size * row_load.ids_per_sample


def _copy_bytes(load: TableLoad) -> float:
    """Of a copy of a row: the row and its state, the sums of unsent gradients and of their squares."""
    values = load.table.dim * (load.weight_bytes + load.state_column_bytes) + load.state_bytes
    return load.row_bytes(load.table.dim) + values


def _copied_load(problem: Problem, number: int, sync: Bounded) -> TableLoad:
    """The load of row exchange in which each row that is sent, there or back, counts half."""
    load, exact = problem.table_loads[number], problem.row_exchange_loads[number]
    num_ids = problem.local_batch_size * load.ids_per_sample
    asked, received, updated = exchanged_shares(load, sync, problem.cluster.num_ranks, num_ids)
    row_values = load.row_bytes(load.table.dim) / load.weight_bytes
    update_values = load.table.dim + (load.state_column_bytes * load.table.dim + load.state_bytes) / load.weight_bytes
    share = min(1.0, (received * row_values + updated * update_values) / (2 * load.table.dim))
    return replace(
        exact,
        ids_per_sample=exact.ids_per_sample * share,
        unpooled_vectors=exact.unpooled_vectors * share,
        copied=CopiedLoad(sync, exact.ids_per_sample, asked, received, updated, sync.copies * _copy_bytes(load)),
    )


def exchanged_shares(load: TableLoad, sync: Bounded, num_ranks: int, num_ids: float) -> tuple[float, float, float]:
    """Of the distinct rows that a rank's batches of `num_ids` ids use: the shares that are asked for, received, and
    whose updates are sent, once the copies are filled."""
    rows_I, uses_I, hits_I = hits_by_interval(load, sync.copies, num_ids)
    asked_I, received_I = _checks_by_use(uses_I, sync.pull, num_ranks - 1)
    weights_I = rows_I * uses_I / max((rows_I * uses_I).sum(), 1e-300)
    missing_I = 1 - hits_I
    most_unsent_I = np.minimum(sync.push + 1, np.maximum(1.0, uses_I * MAX_UNSENT_BATCHES))
    shares = missing_I + hits_I * asked_I, missing_I + hits_I * received_I, missing_I + hits_I / most_unsent_I
    asked, received, updated = (float((weights_I * np.minimum(share_I, 1.0)).sum()) for share_I in shares)
    return asked, received, updated


def _checks_by_use(uses_I: np.ndarray, pull: int, others: int) -> tuple[np.ndarray, np.ndarray]:
    """How often a copy is asked for, and sent, per use of its row; from one time that it is sent to the next."""
    lease, wait_I = pull // others, 1 / np.maximum(uses_I, 1e-12)
    now_I, end_I = np.zeros_like(uses_I), np.full_like(uses_I, lease)
    checks_I, is_current_I = np.zeros_like(uses_I), np.ones(len(uses_I), dtype=bool)
    for _ in range(MOST_CHECKS):
        now_I = np.where(is_current_I, end_I + wait_I, now_I)
        checks_I += is_current_I
        missed_I = others * uses_I * now_I
        is_current_I &= missed_I <= pull
        end_I = now_I + np.maximum(0, pull - missed_I) // others
        if not is_current_I.any():
            break
    used_I = np.maximum(1.0, uses_I * now_I)
    return checks_I / used_I, np.where(is_current_I, 0.0, 1 / used_I)


def describe(rival: Candidate, exact: Candidate, *, is_chosen: bool) -> str:
    """What copies of rows would change, or do."""
    loads = [load.copied for load in rival.problem.placed_loads(rival.placed) if load.copied is not None]
    if not loads:
        return f"copies of rows would not send less; a step takes {1e3 * exact.seconds:.3g} ms"
    rows, others = sum(load.rows_per_sample for load in loads), rival.problem.cluster.num_ranks - 1
    asked, received, updated = (
        100 * sum(getattr(load, name) * load.rows_per_sample for load in loads) / rows
        for name in ("asked", "received", "updated")
    )
    sync, verb = loads[0].sync, "ranks read" if is_chosen else "not used: ranks would read"
    return (
        f"{verb} {len(loads)} tables from copies; owners are asked about {asked:.3g} % of the rows of a batch, send "
        f"{received:.3g} % and get updates of {updated:.3g} %; a read misses at most {sync.pull} + {others} x {sync.push} "
        f"updates; a step takes {1e3 * rival.seconds:.3g} ms with copies, {1e3 * exact.seconds:.3g} ms exact"
    )

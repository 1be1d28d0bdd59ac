"""Row exchange with bounded staleness: which bounds, how many copies, and how many rows ranks then exchange.

Each rank uses a row in a share of its batches, a popular one several times in one of them. A copy is validated when its
lease has expired, and its row is sent if it misses more than `pull` updates. Between two sends, the copy of a rare row
is validated at nearly every use, that of a row in every batch only once.

Shape legend: I intervals of a popularity curve.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from shardwright.planner.memory import budget
from shardwright.planner.problem import Problem
from shardwright.planner.search import Candidate
from shardwright.planner.tables import cache_hits
from shardwright.planner.tables.cache_hits import hits_by_interval
from shardwright.planner.tables.copied_load import CopiedLoad
from shardwright.planner.tables.sharding import TableLoad
from shardwright.spec.optimizer import num_squares
from shardwright.spec.plan import Bounded
from shardwright.spec.row_cache import COPIES_HALF_LIFE_BATCHES, MAX_UNPUSHED_BATCHES, OWNER_BYTES, WAYS, copy_bytes
from shardwright.spec.stage_checks import max_staleness

MAX_BOUND = 1 << 20  # updates, where any number is allowed
PUSH_SHARES = (0.25, 0.5, 0.75)  # of the allowed staleness, for updates that are not pushed
MEMORY_SHARE = 0.25  # of a rank's room for tables, for copies
TIE_SHARE = 0.01  # of a step's time, by which copies must be faster
MAX_VALIDATIONS = 200  # of a copy, between two times that it is sent


def allowed_bounds(allow: Sequence[str], num_ranks: int) -> list[Bounded]:
    """Bounds within the allowed staleness: pull + others x push."""
    others, total = num_ranks - 1, min(max_staleness(tuple(allow)), MAX_BOUND)
    pushes = {int(total * share) // others for share in PUSH_SHARES} if others and total else set[int]()
    return [Bounded(int(total) - others * push, push) for push in sorted(pushes)]


def describe_obstacle(problem: Problem) -> str:
    """Why no table may have copies of rows; "" if some may."""
    optimizer = problem.workload.optimizer
    obstacles = {
        "a pipeline has no tables": problem.pipeline is not None,
        "TorchRec has no bounded staleness": problem.torchrec,
        "bounded staleness does not work with accumulate": problem.accumulate > 1,
        "the tables are frozen": optimizer is None,
        "the tables' optimizer has clip or weight_decay": optimizer is not None
        and bool(optimizer.clip or optimizer.weight_decay),
        "no table may have copies of rows": not any(map(_may_be_copied, problem.table_loads)),
    }
    return next((text for text, is_obstacle in obstacles.items() if is_obstacle), "")


def choose_bounds(problem: Problem, bounds: Sequence[Bounded]) -> Problem:
    """The problem where tables with row exchange have those of the bounds with the fewest messages."""
    numbers = [number for number, load in enumerate(problem.table_loads) if _may_be_copied(load)]
    copies = {number: _num_copies(problem, number, numbers) for number in numbers}

    def sent_values(option: Problem) -> float:
        loads = [option.row_exchange_loads[number] for number in numbers]
        return sum(load.ids_per_sample * load.table.dim for load in loads)

    options = [
        with_bounds(problem, {number: replace(sync, copies=num) for number, num in copies.items()}) for sync in bounds
    ]
    return min(options, key=sent_values)


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
    optimizer, loads = problem.workload.optimizer, [problem.table_loads[other] for other in numbers]
    total = sum(copy_bytes(load.table, optimizer) * load.table.rows for load in loads)
    room = MEMORY_SHARE * max(0.0, budget.memory_budget(problem).free_bytes[0])
    load = problem.row_exchange_loads[number]
    wanted = max(load.table.rows * min(1.0, room / max(total, 1.0)), 2 * _rows_of_batch(problem, load))
    return max(WAYS, -(-round(min(wanted, load.table.rows)) // WAYS) * WAYS)


def _rows_of_batch(problem: Problem, row_load: TableLoad) -> float:
    return problem.local_batch_size * row_load.ids_per_sample


def _copied_load(problem: Problem, number: int, sync: Bounded) -> TableLoad:
    """The load of row exchange in which each row that is sent, there or back, counts half."""
    load, exact = problem.table_loads[number], problem.row_exchange_loads[number]
    num_ids = problem.local_batch_size * load.ids_per_sample
    _, (validated, sent, pushed) = exchanged_shares(load, sync, problem.cluster.num_ranks, num_ids)
    versions = load.table.rows * OWNER_BYTES / problem.cluster.num_ranks
    bytes_ = sync.copies * copy_bytes(load.table, problem.workload.optimizer) + versions
    row_values = load.row_bytes(load.table.dim) / load.weight_bytes
    optimizer = problem.workload.optimizer
    update_values = load.table.dim + (num_squares(optimizer, load.table.dim) if optimizer is not None else 0)
    share = min(1.0, (sent * row_values + pushed * update_values) / (2 * load.table.dim))
    return replace(
        exact,
        ids_per_sample=exact.ids_per_sample * share,
        unpooled_vectors=exact.unpooled_vectors * share,
        copied=CopiedLoad(sync, exact.ids_per_sample, validated, sent, pushed, bytes_),
    )


def exchanged_shares(
    load: TableLoad, sync: Bounded, num_ranks: int, num_ids: float
) -> tuple[float, tuple[float, float, float]]:
    """Distinct rows of a batch of `num_ids` ids of a rank, and the shares of them that are validated, that are sent,
    and whose updates are pushed, once the copies are filled."""
    if num_ranks == 1 or not sync.has_copies:
        return cache_hits.exact_shares(load, sync.copies, num_ranks, num_ids)
    rows_I, uses_I, hits_I = hits_by_interval(load, sync.copies, num_ids, COPIES_HALF_LIFE_BATCHES)
    # Ids of a row in a batch, and in a batch that has it, from the share of batches that have it.
    ids_I = -np.log1p(-np.minimum(uses_I, 1 - 1e-12))
    times_I = np.maximum(1.0, ids_I / np.maximum(uses_I, 1e-300))
    validated_I = _validations_per_use(uses_I, sync.pull / times_I, num_ranks - 1)
    sent_I = _sends_per_use(uses_I, sync.pull / times_I, num_ranks - 1)
    num_rows = float((rows_I * uses_I).sum())
    weights_I = rows_I * uses_I / max(num_rows, 1e-300)
    missing_I = 1 - hits_I
    # Batches with a row until it was used more than `push` times; by how much more, as in `_sends_per_use`.
    steps_per_push_I = np.minimum((sync.push + 1 + ids_I / 2) / times_I, uses_I * MAX_UNPUSHED_BATCHES).clip(1.0)
    shares = missing_I + hits_I * validated_I, missing_I + hits_I * sent_I, missing_I + hits_I / steps_per_push_I
    validated, sent, pushed = (float((weights_I * np.minimum(share_I, 1.0)).sum()) for share_I in shares)
    return num_rows, (validated, sent, pushed)


def _validations_per_use(uses_I: np.ndarray, pull_I: np.ndarray, others: int) -> np.ndarray:
    """How often a copy is validated, per batch that uses its row; from one time that the row is sent to the next.
    `pull_I`: in updates."""
    wait_I = 1 / np.maximum(uses_I, 1e-12)
    now_I, end_I = np.zeros_like(uses_I), pull_I // others
    checks_I, is_current_I = np.zeros_like(uses_I), np.ones(len(uses_I), dtype=bool)
    for _ in range(MAX_VALIDATIONS):
        now_I = np.where(is_current_I, end_I + wait_I, now_I)
        checks_I += is_current_I
        missed_I = others * uses_I * now_I
        is_current_I &= missed_I <= pull_I
        end_I = now_I + np.maximum(0, pull_I - missed_I) // others
        if not is_current_I.any():
            break
    return checks_I / np.maximum(1.0, uses_I * now_I)


def _sends_per_use(uses_I: np.ndarray, pull_I: np.ndarray, others: int) -> np.ndarray:
    """How often a row is sent, per batch that uses it.

    Between two uses of this rank, others update the row `others` times in the mean. It is sent at the use at which
    these sum up to more than `pull`; by how much more, in the mean, follows from the first two moments of the updates
    between two uses (renewal theory), where each rank has the row in a share of its batches, drawn independently.
    """
    return others / (pull_I + (2 - uses_I) * (others + 1) / 2)


def describe(bounded: Candidate, exact: Candidate, *, is_chosen: bool) -> str:
    """The plan's reason: what copies of rows change, or would change."""
    loads = [load.copied for load in bounded.problem.placed_loads(bounded.placed) if load.copied is not None]
    if not loads:
        return f"not used: copies of rows would not save messages; predicted step {1e3 * exact.seconds:.3g} ms"
    rows, others = sum(load.rows_per_sample for load in loads), bounded.problem.cluster.num_ranks - 1
    validated, sent, pushed = (
        100 * sum(getattr(load, name) * load.rows_per_sample for load in loads) / rows
        for name in ("validated", "sent", "pushed")
    )
    sync, verb = loads[0].sync, "ranks read rows of" if is_chosen else "not used: ranks would read rows of"
    return (
        f"{verb} {len(loads)} tables from copies; of the distinct rows of a batch, {validated:.3g} % are validated, "
        f"{sent:.3g} % sent by their owners, {pushed:.3g} % have updates pushed; a read misses at most {sync.pull} + "
        f"{others} x {sync.push} = {sync.max_missed(others + 1)} updates of other ranks; predicted step "
        f"{1e3 * bounded.seconds:.3g} ms with copies, {1e3 * exact.seconds:.3g} ms exact"
    )

"""Tables whose rows table servers own: the copies of each rank, their bounds, and how many rows then move."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from shardwright.errors import UserError
from shardwright.planner import staleness
from shardwright.planner.memory import budget
from shardwright.planner.problem import Problem
from shardwright.planner.search import Candidate
from shardwright.planner.step import server_calls
from shardwright.planner.tables.copied_load import CopiedLoad
from shardwright.planner.tables.sharding import TableLoad
from shardwright.spec.plan import Bounded
from shardwright.spec.row_cache import STORE_SPACE, WAYS, copy_bytes

EXACT = Bounded(0, 0)
BATCHES_OF_COPIES = 2  # whose rows have copies, at least
MEMORY_SHARE = 0.9  # of a rank's room for tables that copies take; they are rounded up to sets of lines
REMEDY = "set servers.own=false, so that ranks own the rows"


def check_owned(problem: Problem) -> None:
    """Raise a UserError for what servers that own rows do not support."""
    optimizer, request = problem.workload.optimizer, problem.servers
    assert optimizer is not None and request is not None
    obstacles = {
        "gradient accumulation (train.accumulate)": problem.accumulate > 1,
        "clip and weight_decay of the tables' optimizer": bool(optimizer.clip or optimizer.weight_decay),
        "tables that grow, and all of these do": not _served_numbers(problem),
    }
    for obstacle, is_obstacle in obstacles.items():
        if is_obstacle:
            raise UserError(f"servers that own rows do not support {obstacle}: {REMEDY}")
    bytes_ = STORE_SPACE * sum(problem.table_loads[number].table_bytes for number in _served_numbers(problem))
    if request.bytes_ and bytes_ > (room := request.num * request.bytes_ * (1 - budget.RESERVED_SHARE)):
        raise UserError(
            f"the rows, and a copy of them while a checkpoint is written, need {budget.bytes_text(bytes_)}, and "
            f"{request.num} table servers have {budget.bytes_text(room)}: use more or larger ones (servers.start, "
            "servers.addresses, servers.memory)"
        )


def give_rows(problem: Problem, sync: Bounded) -> Problem:
    """The problem in which servers own the rows of all tables that they support, with this pull and push, and ranks
    have as many copies as there is room for."""
    numbers = _served_numbers(problem)
    optimizer, loads = problem.workload.optimizer, {number: problem.table_loads[number] for number in numbers}
    others = sum(load.table_bytes for number, load in enumerate(problem.table_loads) if number not in loads)
    buffers = sum(problem.row_buffer_bytes(problem.row_exchange_loads[number]) for number in numbers)
    room = MEMORY_SHARE * (budget.memory_budget(problem).free_bytes[0] - others - buffers)
    least = {number: _least_copies(problem, number) for number in numbers}
    needed = sum(copy_bytes(load.table, optimizer) * least[number] for number, load in loads.items())
    if needed > max(room, 0.0):
        raise UserError(
            f"copies of the rows of {BATCHES_OF_COPIES} batches need {budget.bytes_text(needed)} of each rank, which "
            f"has room for {budget.bytes_text(max(room, 0.0))}: make the batch smaller, or give ranks more memory"
        )
    more = {
        number: copy_bytes(load.table, optimizer) * (load.table.rows - least[number]) for number, load in loads.items()
    }
    share = min(1.0, (room - needed) / max(sum(max(bytes_, 0) for bytes_ in more.values()), 1.0))
    copies = {
        number: round(least[number] + share * max(0, load.table.rows - least[number])) for number, load in loads.items()
    }
    return with_owners(problem, {number: replace(sync, copies=_whole_sets(num)) for number, num in copies.items()})


def with_owners(problem: Problem, syncs: Mapping[int, Bounded]) -> Problem:
    """The problem in which servers own the rows of these tables."""
    rows = tuple(
        _owned_load(problem, number, syncs[number]) if number in syncs else load
        for number, load in enumerate(problem.row_exchange_loads)
    )
    return replace(problem, row_exchange_loads=rows)


def _served_numbers(problem: Problem) -> list[int]:
    return [number for number, load in enumerate(problem.table_loads) if load.table.growth is None]


def _least_copies(problem: Problem, number: int) -> int:
    load = problem.row_exchange_loads[number]
    batches = BATCHES_OF_COPIES * problem.local_batch_size * load.ids_per_sample
    return _whole_sets(round(min(load.table.rows, batches)))


def _whole_sets(num: int) -> int:
    return max(WAYS, -(-num // WAYS) * WAYS)


def _owned_load(problem: Problem, number: int, sync: Bounded) -> TableLoad:
    load, exchanged = problem.table_loads[number], problem.row_exchange_loads[number]
    plain = load.local_pooling or load
    num_ids = problem.local_batch_size * plain.ids_per_sample
    _, (validated, sent, pushed) = staleness.exchanged_shares(plain, sync, problem.cluster.num_ranks, num_ids)
    bytes_ = sync.copies * copy_bytes(load.table, problem.workload.optimizer)
    copied = CopiedLoad(sync, exchanged.ids_per_sample, validated, sent, pushed, bytes_, is_served=True)
    return replace(exchanged, copied=copied)


def describe(chosen: Candidate, rivals: Sequence[Candidate]) -> str:
    """The plan's reason: what servers and ranks exchange, and the step with the other bounds."""
    problem = chosen.problem
    request, link = problem.servers, server_calls.server_link(problem.cluster)
    loads = [load.copied for load in problem.row_exchange_loads if load.copied is not None]
    assert request is not None and loads
    rows = sum(load.rows_per_sample for load in loads)
    validated, sent, pushed = (
        100 * sum(getattr(load, name) * load.rows_per_sample for load in loads) / rows
        for name in ("validated", "sent", "pushed")
    )
    steps = ", ".join(f"{_bounds_text(each)} {1e3 * each.seconds:.3g} ms" for each in (chosen, *rivals))
    return (
        f"table servers ({request.num}) own the rows of {len(loads)} table{'s' * (len(loads) > 1)}, over links of "
        f"{budget.bytes_text(link.bytes_per_second)}/s, and ranks have copies; of the distinct rows of a rank's batch, "
        f"{validated:.3g} % are validated, {sent:.3g} % sent, {pushed:.3g} % have updates pushed; predicted step: "
        f"{steps}"
    )


def _bounds_text(candidate: Candidate) -> str:
    sync = next(load.copied.sync for load in candidate.problem.row_exchange_loads if load.copied is not None)
    num = candidate.problem.cluster.num_ranks
    if not sync.has_copies:
        return "exact"
    return f"a read missing at most {sync.pull} + {num - 1} x {sync.push} = {sync.max_missed(num)} updates"

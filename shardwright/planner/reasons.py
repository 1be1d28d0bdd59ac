"""The reasons of a plan: one sentence for each table, and some for the whole step."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from types import MappingProxyType

from shardwright.planner import dense_strategies, search
from shardwright.planner.memory import budget as memory
from shardwright.planner.pins import Pin
from shardwright.planner.problem import Precision, Problem
from shardwright.planner.search import Candidate
from shardwright.planner.tables.balance import imbalance
from shardwright.planner.tables.schemes import find_scheme
from shardwright.planner.tables.sharding import DATA_PARALLEL, TableLoad
from shardwright.spec.plan import widest_dtype
from shardwright.spec.workload import DTYPE_BYTES, Workload

IDS_REASONS = MappingProxyType(
    {
        "read": "the next batch's ids are sent first, overlapped with lookups",
        "vectors": "the next batch's ids are sent after the vectors, overlapped with the dense forward and backward",
        "gradients": "the next batch's ids are sent after the gradients, overlapped with the update",
    }
)
PRECISION_NAMES = MappingProxyType(
    {
        "tables": "table weights",
        "dense_gradients": "dense gradients on the wire",
        "matmuls": "matrix products",
        "moments": "optimizer moments",
    }
)


def exact_precision(workload: Workload) -> Precision:
    """The workload's own precision: nothing is rounded."""
    width = widest_dtype(workload.tables)
    return Precision(None, width, width, width, width, width)


def list_reasons(
    candidate: Candidate,
    pins: Mapping[str, Pin],
    dense_candidates: Sequence[dense_strategies.DenseCandidate] = (),
    replicated_candidate: Candidate | None = None,
) -> Iterator[tuple[str, str]]:
    """Pairs of subject and reason. `replicas` is the same plan with every small table replicated, to compare."""
    problem = candidate.problem
    average = average_work(candidate)
    for number, demand in enumerate(problem.table_loads):
        pinned = demand.table.name in pins
        reason = "as pinned" if pinned else _layout_reason(candidate, number, demand, average)
        yield (
            f"table {demand.table.name}",
            f"{reason}{_replicated(candidate, number)}{_row_exchange(candidate, number)}",
        )
    if replicated_candidate is not None and replicated_candidate.seconds >= candidate.seconds:
        yield "replicas", _replicas(candidate, replicated_candidate)
    busiest = imbalance(candidate.loads.lookup_R)
    yield "balance", f"lookup on the busiest rank takes {busiest:.2f}x the average over ranks"
    if problem.cluster.num_ranks > 1:
        yield "ids", IDS_REASONS[candidate.ids_after]
    yield "precision", _precision(problem)
    if chosen := dense_strategies.describe_choice(dense_candidates, problem):
        yield "dense", chosen
    budget = memory.memory_budget(problem)
    tiers = " and ".join(
        f"{memory.bytes_text(max(room, 0))} in {tier.name}"
        for room, tier in zip(budget.free_bytes, budget.tiers, strict=True)
    )
    used = memory.bytes_text(float(candidate.loads.bytes_R.max()))
    yield "memory", f"tables take up to {used} of a rank, which has room for {tiers}"
    yield "step", _step(candidate)


def average_work(candidate: Candidate) -> float:
    """Bytes of rows that a rank reads in a step, if all ranks read as many."""
    problem = candidate.problem
    whole = [search.unsharded_unit(problem, number) for number in range(len(problem.table_loads))]
    return sum(unit.read_bytes for unit in whole) / problem.cluster.num_ranks


def _layout_reason(found: Candidate, number: int, demand: TableLoad, average: float) -> str:
    problem, cut = found.problem, found.sharding(number)
    whole = search.unsharded_unit(problem, number)
    if problem.cluster.num_ranks == 1:
        return "one rank holds the whole table"
    if cut == DATA_PARALLEL:
        gradients, vectors = memory.bytes_text(4 * _numbers(demand)), memory.bytes_text(_vector_bytes(problem, demand))
        return f"data-parallel: all-reducing its gradients ({gradients}) sends less than its vectors would ({vectors})"
    layout = find_scheme(cut.scheme).describe(cut, demand)
    room = sum(memory.memory_budget(problem).free_bytes)
    if cut.num_replicas > 1:
        return layout
    if whole.bytes_ > room:
        return (
            f"{layout}; its {memory.bytes_text(whole.bytes_)} exceed the {memory.bytes_text(room)} that a rank "
            "has for tables"
        )
    share = whole.read_bytes / average if average else 0.0
    if cut.scheme == "table":
        return f"{layout}: {share:.2f}x the average work of a rank, {memory.bytes_text(whole.bytes_)}"
    if share < 1:
        return (
            f"{layout}: as a single shard it would be {share:.2f}x the average work of a rank; "
            "smaller shards balance better"
        )
    return f"{layout}: as a single shard its rank would do {share:.1f}x the average work"


def _numbers(demand: TableLoad) -> int:
    return demand.table.rows * demand.table.dim


def _vector_bytes(problem: Problem, demand: TableLoad) -> float:
    """Vectors and their gradients of a rank's local batch."""
    wire = DTYPE_BYTES[problem.precision.vectors] + DTYPE_BYTES[problem.precision.gradients]
    return problem.local_batch_size * demand.vectors * demand.table.dim * wire


def _replicated(found: Candidate, number: int) -> str:
    copies = found.sharding(number).num_replicas
    if copies == 1:
        return ""
    share = 100 * search.replica_exchange_share(found.problem, number, copies)
    bytes_ = f"{share:.0f} % of the bytes that would otherwise cross hosts"
    return f"; {copies} replicas exchange gradients of touched rows: {bytes_}"


def _row_exchange(found: Candidate, number: int) -> str:
    problem, cut = found.problem, found.sharding(number)
    if problem.cluster.num_ranks == 1:
        return ""
    if problem.table_loads[number].local_pooling is not None:
        return "; deduplicated row exchange: not all of its features are pooled"
    if not cut.row_exchange:
        return ""
    share = 100 * search.row_exchange_share(problem, number, cut)
    return f"; deduplicated row exchange ({share:.0f} % of the bytes of pooled vectors)"


def _replicas(found: Candidate, replicas: Candidate) -> str:
    more = [
        number for number in replicas.placed.data_parallel_tables if number not in found.placed.data_parallel_tables
    ]
    bytes_ = sum(4 * _numbers(found.problem.table_loads[number]) for number in more)
    name = found.problem.table_loads[more[0]].table.name
    which = f"the {len(more)} tables" if len(more) > 1 else f'table "{name}"'
    return (
        f"data-parallel replicas of {which} below {100 * search.SMALL_TABLE_SHARE:.0f} % of a rank's "
        "memory would make the step "
        f"{replicas.seconds / found.seconds:.3g}x as long: {memory.bytes_text(bytes_)} of gradients would "
        "be all-reduced"
    )


def _precision(problem: Problem) -> str:
    exactly = exact_precision(problem.workload)
    rounded = [
        f"{PRECISION_NAMES.get(field.name, field.name)} in {getattr(problem.precision, field.name)}"
        for field in fields(Precision)
        if getattr(problem.precision, field.name) != getattr(exactly, field.name)
    ]
    return ", ".join(rounded) or "nothing is rounded"


def _step(found: Candidate) -> str:
    cluster = found.problem.cluster
    rate = found.problem.batch_size / found.seconds
    text = f"predicted {1e3 * found.seconds:.3g} ms a step, {_rounded(rate)} samples/s"
    if cluster.source != "preset":
        return text
    return (
        f"{text}, at the published rates of {cluster.name}; real machines do not reach them: "
        "measure yours (shardwright measure) and plan with that file"
    )


def _rounded(rate: float) -> str:
    """Three digits: a prediction is not more precise."""
    for unit, size in ((" million", 1e6), (" thousand", 1e3)):
        if rate >= size:
            return f"{rate / size:.3g}{unit}" if rate < 1000 * size else f"{rate / size:,.0f}{unit}"
    return f"{rate:.3g}"

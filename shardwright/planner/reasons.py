"""The reasons of a plan: one sentence for each table, and some for the whole step."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from types import MappingProxyType

from shardwright.planner import dense_strategies, search
from shardwright.planner.memory import budget as memory
from shardwright.planner.problem import Precision, Problem
from shardwright.planner.search import Found, Pin
from shardwright.planner.tables.balance import imbalance
from shardwright.planner.tables.sharding import DATA, Cut, Demand
from shardwright.spec.plan import widest
from shardwright.spec.workload import DTYPE_BYTES, Workload

IDS = MappingProxyType(
    {
        "read": "the next batch's ids are sent first, overlapped with lookups",
        "vectors": "the next batch's ids are sent after the vectors, overlapped with the dense forward and backward",
        "gradients": "the next batch's ids are sent after the gradients, overlapped with the update",
    }
)
ROUNDED = MappingProxyType(
    {
        "tables": "table weights",
        "reduced": "dense gradients on the wire",
        "products": "matrix products",
        "moments": "optimizer moments",
    }
)


def exact(workload: Workload) -> Precision:
    """The workload's own precision: nothing is rounded."""
    width = widest(workload.tables)
    return Precision(None, width, width, width, width, width)


def reasons(
    found: Found,
    pins: Mapping[str, Pin],
    ways: Sequence[dense_strategies.Combination] = (),
    replicas: Found | None = None,
) -> Iterator[tuple[str, str]]:
    """Pairs of subject and reason. `replicas` is the same plan with every small table replicated, to compare."""
    problem = found.problem
    average = average_work(found)
    for number, demand in enumerate(problem.demands):
        pinned = demand.table.name in pins
        reason = "as pinned" if pinned else _layout_reason(found, number, demand, average)
        yield f"table {demand.table.name}", f"{reason}{_replicated(found, number)}{_row_exchange(found, number)}"
    if replicas is not None and replicas.seconds >= found.seconds:
        yield "replicas", _replicas(found, replicas)
    busiest = imbalance(found.loads.lookup_R)
    yield "balance", f"lookup on the busiest rank takes {busiest:.2f}x the average over ranks"
    if problem.cluster.num_ranks > 1:
        yield "ids", IDS[found.behind]
    yield "precision", _precision(problem)
    if chosen := dense_strategies.told(ways, problem):
        yield "dense", chosen
    budget = memory.budget(problem)
    tiers = " and ".join(
        f"{memory.told(max(room, 0))} in {tier.name}" for room, tier in zip(budget.free, budget.tiers, strict=True)
    )
    used = memory.told(float(found.loads.bytes_R.max()))
    yield "memory", f"tables take up to {used} of a rank, which has room for {tiers}"
    yield "step", _step(found)


def average_work(found: Found) -> float:
    """Bytes of rows that a rank reads in a step, if all ranks read as many."""
    problem = found.problem
    whole = [search.unit_whole(problem, number) for number in range(len(problem.demands))]
    return sum(unit.work for unit in whole) / problem.cluster.num_ranks


def _layout_reason(found: Found, number: int, demand: Demand, average: float) -> str:
    problem, cut = found.problem, found.cut(number)
    whole = search.unit_whole(problem, number)
    if problem.cluster.num_ranks == 1:
        return "one rank holds the whole table"
    if cut == DATA:
        gradients, vectors = memory.told(4 * _numbers(demand)), memory.told(_vector_bytes(problem, demand))
        return f"data-parallel: all-reducing its gradients ({gradients}) sends less than its vectors would ({vectors})"
    layout = _layout(cut, demand)
    room = sum(memory.budget(problem).free)
    if cut.copies > 1:
        return layout
    if whole.bytes_ > room:
        return f"{layout}; its {memory.told(whole.bytes_)} exceed the {memory.told(room)} that a rank has for tables"
    share = whole.work / average if average else 0.0
    if cut.name == "table":
        return f"{layout}: {share:.2f}x the average work of a rank, {memory.told(whole.bytes_)}"
    if share < 1:
        return (
            f"{layout}: as a single shard it would be {share:.2f}x the average work of a rank; "
            "smaller shards balance better"
        )
    return f"{layout}: as a single shard its rank would do {share:.1f}x the average work"


def _layout(cut: Cut, demand: Demand) -> str:
    pieces = f"{cut.columns} shards of {demand.table.dim // cut.columns} columns"
    return {
        "table": "table-wise",
        "column": f"column-wise, {pieces}",
        "table-column": f"table-column-wise, {pieces} within one group of ranks",
        "table-row": "table-row-wise, rows over one group of ranks",
        "column-row": f"grid, {pieces}, the rows of each over a group of ranks",
        "row": "row-wise over all ranks",
        "copy-table": "a replica in every host, on one rank of it",
        "copy-column": f"a replica in every host, {pieces}",
        "copy-row": "a replica in every host, rows over its ranks",
    }[cut.name]


def _numbers(demand: Demand) -> int:
    return demand.table.rows * demand.table.dim


def _vector_bytes(problem: Problem, demand: Demand) -> float:
    """Vectors and their gradients of a rank's local batch."""
    wire = DTYPE_BYTES[problem.precision.vectors] + DTYPE_BYTES[problem.precision.gradients]
    return problem.own_batch * demand.vectors * demand.table.dim * wire


def _replicated(found: Found, number: int) -> str:
    copies = found.cut(number).copies
    if copies == 1:
        return ""
    share = 100 * search.copied_bytes_share(found.problem, number, copies)
    bytes_ = f"{share:.0f} % of the bytes that would otherwise cross hosts"
    return f"; {copies} replicas exchange gradients of touched rows: {bytes_}"


def _row_exchange(found: Found, number: int) -> str:
    problem, cut = found.problem, found.cut(number)
    if problem.cluster.num_ranks == 1:
        return ""
    if problem.demands[number].home is not None:
        return "; deduplicated row exchange: not all of its features are pooled"
    if not cut.rows:
        return ""
    share = 100 * search.row_bytes_share(problem, number, cut)
    return f"; deduplicated row exchange ({share:.0f} % of the bytes of pooled vectors)"


def _replicas(found: Found, replicas: Found) -> str:
    more = [number for number in replicas.placed.replicas if number not in found.placed.replicas]
    bytes_ = sum(4 * _numbers(found.problem.demands[number]) for number in more)
    name = found.problem.demands[more[0]].table.name
    which = f"the {len(more)} tables" if len(more) > 1 else f'table "{name}"'
    return (
        f"data-parallel replicas of {which} below {100 * search.SMALL:.0f} % of a rank's memory would make the step "
        f"{replicas.seconds / found.seconds:.3g}x as long: {memory.told(bytes_)} of gradients would be all-reduced"
    )


def _precision(problem: Problem) -> str:
    exactly = exact(problem.workload)
    rounded = [
        f"{ROUNDED.get(field.name, field.name)} in {getattr(problem.precision, field.name)}"
        for field in fields(Precision)
        if getattr(problem.precision, field.name) != getattr(exactly, field.name)
    ]
    return ", ".join(rounded) or "nothing is rounded"


def _step(found: Found) -> str:
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

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
from shardwright.spec.row_cache import SERVERS
from shardwright.spec.workload import Workload

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
    layer_reasons: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[tuple[str, str]]:
    """Pairs of subject and reason. `replicated_candidate`: the same plan with every small table replicated.
    `layer_reasons`: why this pipeline and this split of experts, or why none, by subject."""
    problem = candidate.problem
    average = average_work(candidate)
    for number, load in enumerate(problem.table_loads):
        is_pinned = load.table.name in pins
        reason = "as pinned" if is_pinned else _describe_layout(candidate, number, load, average)
        yield (
            f"table {load.table.name}",
            f"{reason}{_describe_replicas(candidate, number)}{_describe_row_exchange(candidate, number)}"
            f"{_describe_tiers(candidate, number)}",
        )
    if replicated_candidate is not None and replicated_candidate.seconds >= candidate.seconds:
        yield "replicas", _compare_replication(candidate, replicated_candidate)
    if problem.table_loads:
        busiest = imbalance(candidate.loads.lookup_R)
        yield "balance", f"lookup on the busiest rank takes {busiest:.2f}x the average over ranks"
        if problem.cluster.num_ranks > 1:
            yield "ids", IDS_REASONS[candidate.ids_after]
    yield "precision", _describe_precision(problem)
    yield from layer_reasons.items()
    if choice := dense_strategies.describe_choice(dense_candidates, problem):
        yield "dense", choice
    budget = memory.memory_budget(problem)
    tiers = " and ".join(
        f"{memory.bytes_text(max(room, 0))} {_tier_text(tier.name)}"
        for room, tier in zip(budget.free_bytes, budget.tiers, strict=True)
    )
    used, copied = memory.bytes_text(float(candidate.loads.bytes_R.max())), _copied_bytes(candidate)
    copies = f", and copies of rows {memory.bytes_text(copied)}" if copied else ""
    yield "memory", f"tables take up to {used} of a rank{copies}, which has room for {tiers}"
    yield "step", _describe_step(candidate)


def _copied_bytes(candidate: Candidate) -> float:
    """Bytes of a rank's copies of rows of other ranks, or of servers."""
    loads = candidate.problem.placed_loads(candidate.placed)
    return sum(load.copied.bytes_ for load in loads if load.copied is not None)


def average_work(candidate: Candidate) -> float:
    """Bytes of table rows that a rank reads in a step, averaged over ranks."""
    problem = candidate.problem
    units = [search.unsharded_unit(problem, number) for number in range(len(problem.table_loads))]
    return sum(unit.read_bytes for unit in units) / problem.cluster.num_ranks


def _describe_layout(candidate: Candidate, number: int, load: TableLoad, average: float) -> str:
    problem, sharding = candidate.problem, candidate.sharding(number)
    if (copied := problem.row_exchange_loads[number].copied) is not None and copied.is_served:
        num_copies = min(copied.sync.copies, load.table.rows)
        return f"table servers own its rows; each rank has copies of up to {num_copies:,} of {load.table.rows:,}"
    unsharded = search.unsharded_unit(problem, number)
    if problem.cluster.num_ranks == 1:
        return "one rank holds the whole table"
    if sharding == DATA_PARALLEL:
        gradients, vectors = memory.bytes_text(4 * load.num_values), memory.bytes_text(_vector_bytes(problem, load))
        return f"data-parallel: all-reducing its gradients ({gradients}) sends less than its vectors would ({vectors})"
    layout = find_scheme(sharding.scheme).describe(sharding, load)
    room = sum(memory.memory_budget(problem).free_bytes)
    if sharding.num_replicas > 1:
        return layout
    if unsharded.bytes_ > room:
        return (
            f"{layout}; its {memory.bytes_text(unsharded.bytes_)} exceed the {memory.bytes_text(room)} that a rank "
            "has for tables"
        )
    share = unsharded.read_bytes / average if average else 0.0
    if sharding.scheme == "table":
        return f"{layout}: {share:.2f}x the average work of a rank, {memory.bytes_text(unsharded.bytes_)}"
    if share < 1:
        return (
            f"{layout}: as a single shard it would be {share:.2f}x the average work of a rank; "
            "smaller shards balance better"
        )
    return f"{layout}: as a single shard its rank would do {share:.1f}x the average work"


def _vector_bytes(problem: Problem, load: TableLoad) -> float:
    """Bytes on the wire of a rank's vectors and their gradients, of a step."""
    return problem.local_batch_size * load.vectors * load.table.dim * problem.precision.exchange_bytes


def _describe_replicas(candidate: Candidate, number: int) -> str:
    replicas = candidate.sharding(number).num_replicas
    if replicas == 1:
        return ""
    share = 100 * search.replica_exchange_share(candidate.problem, number, replicas)
    bytes_ = f"{share:.0f} % of the bytes that would otherwise cross hosts"
    return f"; {replicas} replicas exchange gradients of touched rows: {bytes_}"


def _describe_row_exchange(candidate: Candidate, number: int) -> str:
    problem, sharding = candidate.problem, candidate.sharding(number)
    if problem.cluster.num_ranks == 1 or number in problem.served_tables:
        return ""
    if problem.table_loads[number].local_pooling is not None:
        return "; deduplicated row exchange: not all of its features are pooled"
    if not sharding.row_exchange:
        return ""
    share = 100 * search.row_exchange_share(problem, number, sharding)
    return f"; deduplicated row exchange ({share:.0f} % of the bytes of pooled vectors)"


def _describe_tiers(candidate: Candidate, number: int) -> str:
    shares, found = candidate.tiers[number].shares, candidate.tiers[number].found[0]
    if len(shares) == 1:
        return ""
    rows, num_shards = candidate.problem.table_loads[number].table.rows, candidate.placed.num_row_shards(number)
    *upper, last = (share.tier for share in shares)
    in_cache = (shares[0].rows or 0) * num_shards
    return (
        f"; {' and '.join(upper)} does not hold all: a cache of {in_cache:,} rows ({100 * in_cache / rows:.2g} %) in "
        f"{shares[0].tier}, where {100 * found:.0f} % of a batch's rows are found, the others {_tier_text(last)}"
    )


def _tier_text(tier: str) -> str:
    return "on table servers" if tier == SERVERS else f"in {tier}"


def _compare_replication(candidate: Candidate, replicated: Candidate) -> str:
    extra = [i for i in replicated.placed.data_parallel_tables if i not in candidate.placed.data_parallel_tables]
    bytes_ = sum(4 * candidate.problem.table_loads[number].num_values for number in extra)
    name = candidate.problem.table_loads[extra[0]].table.name
    tables = f"the {len(extra)} tables" if len(extra) > 1 else f'table "{name}"'
    return (
        f"data-parallel replicas of {tables} below {100 * search.SMALL_TABLE_SHARE:.0f} % of a rank's memory would "
        f"make the step {replicated.seconds / candidate.seconds:.3g}x as long: {memory.bytes_text(bytes_)} of "
        "gradients would be all-reduced"
    )


def _describe_precision(problem: Problem) -> str:
    exact = exact_precision(problem.workload)
    parts = [
        f"{PRECISION_NAMES.get(field.name, field.name)} in {getattr(problem.precision, field.name)}"
        for field in fields(Precision)
        if getattr(problem.precision, field.name) != getattr(exact, field.name)
    ]
    return ", ".join(parts) or "nothing is rounded"


def _describe_step(candidate: Candidate) -> str:
    cluster = candidate.problem.cluster
    rate = candidate.problem.batch_size / candidate.seconds
    text = f"predicted {1e3 * candidate.seconds:.3g} ms a step, {_rate_text(rate)} samples/s"
    if cluster.source != "preset":
        return text
    return (
        f"{text}, at the published rates of {cluster.name}; real machines do not reach them: "
        "measure yours (shardwright measure) and plan with that file"
    )


def _rate_text(rate: float) -> str:
    """A rate with three digits: a prediction is not more precise."""
    for unit, size in ((" million", 1e6), (" thousand", 1e3)):
        if rate >= size:
            return f"{rate / size:.3g}{unit}" if rate < 1000 * size else f"{rate / size:,.0f}{unit}"
    return f"{rate:.3g}"

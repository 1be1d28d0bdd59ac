"""The plan that was asked for: the shortest step within what may change the mathematics, and why it is as it is."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from types import MappingProxyType

from shardwright.errors import UserError, did_you_mean
from shardwright.planner import dense_strategies, search
from shardwright.planner.pins import Pin, parse_pin
from shardwright.planner.price.roofline import ResourceUsage, bytes_by_level
from shardwright.planner.problem import PlacedTables, Precision, Problem
from shardwright.planner.reasons import exact_precision, list_reasons
from shardwright.planner.search import Candidate
from shardwright.planner.step import block_stages, stages, tasks, traffic
from shardwright.planner.tables.sharding import DATA_PARALLEL, split_rows_by_order
from shardwright.spec.cluster import Cluster
from shardwright.spec.plan import TABLE_DTYPES, ExchangeMode, Placement, Plan, Rect, TablePlan, Wire
from shardwright.spec.workload import Dtype, Workload, state_dtype, table_weight_dtype

WIRE_DTYPES = MappingProxyType[str, Dtype]({"wire.fp16": "float16", "wire.bf16": "bfloat16"})


@dataclass(frozen=True, slots=True)
class PlanningResult:
    """`ways` has every way to hold the dense part, beside the tables as they were placed first."""

    plan: Plan
    candidate: Candidate
    dense_candidates: tuple[dense_strategies.DenseCandidate, ...] = ()


def make_plan(
    workload: Workload,
    cluster: Cluster,
    *,
    batch_size: int = 0,
    allow: Sequence[str] = (),
    pins: Mapping[str, str] | None = None,
    dense_strategy: str = "",
    torchrec: bool = False,
) -> PlanningResult:
    """The plan of a recommendation model. `batch_size` is the global batch size, `way` the parallelism strategy of the
    dense part if one is set; `torchrec`: plan within TorchRec's limits (`Problem`)."""
    wanted = {name: parse_pin(text) for name, text in (pins or {}).items()}
    names = [table.name for table in workload.tables]
    for name in wanted:
        if name not in names:
            raise UserError(f'pin of unknown table "{name}"{did_you_mean(name, names)}')

    def pose(precision: Precision) -> Problem:
        batch = batch_size or workload.batch_size
        return replace(
            search.define_problem(workload, cluster, batch, precision, torchrec=torchrec), dense_strategy=dense_strategy
        )

    exactly = exact_precision(workload)
    first = _found(pose, exactly, lowest_precision(allow, cluster, exactly), wanted)
    found, ways = dense_strategies.choose_strategy(first, wanted)
    why = tuple(list_reasons(found, wanted, ways, search.with_replicas(found, wanted)))
    return PlanningResult(_written(found, allow, why), found, ways)


def _found(
    pose: Callable[[Precision], Problem], exactly: Precision, most: Precision, pins: Mapping[str, Pin]
) -> Candidate:
    """Exact, and with the `most` that is allowed; of that only what makes the step shorter, or is needed to fit."""
    tried: list[Candidate] = []
    refused: UserError | None = None
    tables_ = replace(exactly, tables=most.tables)
    for precision in dict.fromkeys((exactly, tables_, replace(most, tables=None), most)):
        try:
            tried.append(dense_strategies.place_tables_first(pose(precision), pins))
        except UserError as error:
            refused = error
    if not tried:
        assert refused is not None
        raise refused
    found = min(tried, key=lambda one: one.seconds)
    for field in fields(Precision):
        less = replace(found.problem.precision, **{field.name: getattr(exactly, field.name)})
        if less == found.problem.precision or field.name == "tables":
            continue
        one = search.evaluate(replace(pose(less), dense=found.problem.dense), found.proposal, found.placed)
        if one is not None and one.seconds <= found.seconds * (1 + 1e-9):
            found = one
    return found


def lowest_precision(allow: Sequence[str], cluster: Cluster, exact: Precision) -> Precision:
    """Everything rounded that may be: vectors forward in fp16 and backward in bf16, as Neo has it, where both may."""
    wires: list[Dtype] = [WIRE_DTYPES[entry] for entry in allow if entry in WIRE_DTYPES]
    forward: Dtype = "float16" if "float16" in wires else "bfloat16" if "bfloat16" in wires else exact.vectors
    backward: Dtype = "bfloat16" if "bfloat16" in wires else exact.gradients  # float16 loses small gradients
    known = {(price.op, price.dtype) for price in cluster.device.prices}
    return Precision(
        tables=next((TABLE_DTYPES[entry] for entry in allow if entry in TABLE_DTYPES), None),
        vectors=forward,
        gradients=backward,
        dense_gradients="bfloat16" if "bfloat16" in wires else exact.dense_gradients,
        matmuls="bfloat16" if "dense.bf16" in allow and ("matmul", "bfloat16") in known else exact.matmuls,
        moments="bfloat16" if "optimizer.bf16" in allow and exact.moments == "float32" else exact.moments,
    )


def _written(found: Candidate, allow: Sequence[str], why: tuple[tuple[str, str], ...]) -> Plan:
    problem = found.problem
    cluster, precision = problem.cluster, problem.precision
    axes = tuple((level.name, level.num) for level in reversed(cluster.levels)) or (("data", 1),)
    return Plan(
        version=2,
        workload_digest=problem.workload.digest(),
        cluster_digest=cluster.digest(),
        allow=tuple(allow),
        axes=axes,
        lanes=(*stages.LANES, *block_stages.extra_lanes(problem)),
        tables=tuple(_table(found, number) for number in range(len(problem.table_loads))),
        dense=replace(problem.dense, dtype=precision.matmuls, state=precision.moments),
        wire=Wire(precision.vectors, precision.gradients, precision.dense_gradients),
        stages=tasks.required_stages(problem, found.loads, found.ids_after),
        why=why,
    )


def _table(found: Candidate, number: int) -> TablePlan:
    problem, placed = found.problem, found.placed
    demand = problem.placed_loads(placed)[number]
    table = demand.table
    dtype = table_weight_dtype(table, problem.precision.tables)
    placement = Placement(found.tier_shares[number], dtype, state_dtype(table.dtype))
    travel: ExchangeMode = "vectors" if demand.local_pooling is None else "rows"
    if number in placed.data_parallel_tables:
        everyone = tuple(range(problem.cluster.num_ranks))
        rects = [Rect(table.name, (0, table.rows), (0, table.dim), everyone)]
        return TablePlan(table.name, "id", tuple(rects), placement, travel, DATA_PARALLEL.scheme)
    rects: list[Rect] = []
    order = "id"
    for unit, ranks in placed.units_by_table[number]:
        order, size = unit.order, len(ranks) // unit.sharding.num_replicas
        rows = split_rows_by_order(demand, size, order)
        rects += [Rect(table.name, part, unit.columns, ranks[at::size]) for at, part in enumerate(rows)]
    return TablePlan(table.name, order, tuple(rects), placement, travel, found.sharding(number).scheme)


def table_seconds(candidate: Candidate, table_number: int) -> float:
    """Of lookup and update, at the rank that has most of this table."""
    mine = candidate.placed.units_by_table.get(table_number, [])
    placed = PlacedTables(
        tuple(unit for unit, _ in mine),
        tuple(ranks for _, ranks in mine),
        (table_number,) if table_number in candidate.placed.data_parallel_tables else (),
    )
    loads = tasks.rank_loads(candidate.problem, placed, candidate.fast_id_shares)
    none = tasks.rank_loads(candidate.problem, PlacedTables((), ()), candidate.fast_id_shares)
    return float((loads.lookup_R + loads.update_R - none.lookup_R - none.update_R).max())


def slowest_stage_seconds(candidate: Candidate) -> dict[str, float]:
    """Of each stage, at the slowest rank."""
    made = tasks.stage_tasks(candidate.problem, candidate.placed, candidate.loads)
    num = candidate.problem.cluster.num_ranks
    return {name: max(task.seconds_on(rank) for rank in range(num)) for name, task in made.items()}


def resource_usage(candidate: Candidate) -> ResourceUsage:
    """What a step asks of each resource, where most of it is asked."""
    problem = candidate.problem
    made = tasks.stage_tasks(problem, candidate.placed, candidate.loads)
    flops = sum(task.flops for task in made.values())
    copied = int(candidate.loads.slow_tier_bytes_R.max())
    each = (3 * unit.read_bytes for unit in candidate.placed.units)  # read, and in the update read and written
    rows_R = candidate.placed.sum_by_rank(each, problem.cluster.num_ranks, weight_by_lookups=True)
    traffic_RR = traffic.step_traffic(problem, candidate.placed)
    return ResourceUsage(
        flops=flops,
        dtype=problem.precision.matmuls,
        memory_bytes=int(rows_R.max()),
        link_bytes=bytes_by_level(problem.cluster, traffic_RR),
        shared_link_bytes=bytes_by_level(problem.cluster, traffic_RR, shared=True),
        host_copy_bytes=copied,
    )

"""The plan that was asked for: the shortest step within what may change the mathematics, and why it is as it is."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from types import MappingProxyType

from shardwright.errors import UserError, nearest
from shardwright.planner import dense_strategies, search
from shardwright.planner.price.roofline import Load, bytes_by_level
from shardwright.planner.problem import Placed, Precision, Problem
from shardwright.planner.reasons import exact, reasons
from shardwright.planner.search import Found, Pin
from shardwright.planner.step import block_stages, stages, tasks, traffic
from shardwright.planner.tables import sharding
from shardwright.spec.cluster import Cluster
from shardwright.spec.plan import TABLES, Placement, Plan, Rect, TablePlan, Travel, Wire
from shardwright.spec.workload import Dtype, Workload, held, state_dtype

WIRES = MappingProxyType[str, Dtype]({"wire.fp16": "float16", "wire.bf16": "bfloat16"})


@dataclass(frozen=True, slots=True)
class Answer:
    """`ways` has every way to hold the dense part, beside the tables as they were placed first."""

    plan: Plan
    found: Found
    ways: tuple[dense_strategies.Combination, ...] = ()


def answer(
    workload: Workload,
    cluster: Cluster,
    *,
    batch_size: int = 0,
    allow: Sequence[str] = (),
    pins: Mapping[str, str] | None = None,
    way: str = "",
    torchrec: bool = False,
) -> Answer:
    """The plan of a recommendation model. `batch_size` is the global batch size, `way` the parallelism strategy of the
    dense part if one is set; `torchrec`: plan within TorchRec's limits (`Problem`)."""
    wanted = {name: search.pin(text) for name, text in (pins or {}).items()}
    names = [table.name for table in workload.tables]
    for name in wanted:
        if name not in names:
            raise UserError(f'pin of unknown table "{name}"{nearest(name, names)}')

    def pose(precision: Precision) -> Problem:
        batch = batch_size or workload.batch_size
        return replace(search.pose(workload, cluster, batch, precision, torchrec=torchrec), way=way)

    exactly = exact(workload)
    first = _found(pose, exactly, allowed(allow, cluster, exactly), wanted)
    found, ways = dense_strategies.chosen(first, wanted)
    why = tuple(reasons(found, wanted, ways, search.with_replicas(found, wanted)))
    return Answer(_written(found, allow, why), found, ways)


def _found(pose: Callable[[Precision], Problem], exactly: Precision, most: Precision, pins: Mapping[str, Pin]) -> Found:
    """Exact, and with the `most` that is allowed; of that only what makes the step shorter, or is needed to fit."""
    tried: list[Found] = []
    refused: UserError | None = None
    tables_ = replace(exactly, tables=most.tables)
    for precision in dict.fromkeys((exactly, tables_, replace(most, tables=None), most)):
        try:
            tried.append(dense_strategies.placed_first(pose(precision), pins))
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
        one = search.scored(replace(pose(less), dense=found.problem.dense), found.proposal, found.placed)
        if one is not None and one.seconds <= found.seconds * (1 + 1e-9):
            found = one
    return found


def allowed(allow: Sequence[str], cluster: Cluster, exactly: Precision) -> Precision:
    """Everything rounded that may be: vectors forward in fp16 and backward in bf16, as Neo has it, where both may."""
    wires: list[Dtype] = [WIRES[entry] for entry in allow if entry in WIRES]
    forward: Dtype = "float16" if "float16" in wires else "bfloat16" if "bfloat16" in wires else exactly.vectors
    backward: Dtype = "bfloat16" if "bfloat16" in wires else exactly.gradients  # float16 loses small gradients
    known = {(price.op, price.dtype) for price in cluster.device.prices}
    return Precision(
        tables=next((TABLES[entry] for entry in allow if entry in TABLES), None),
        vectors=forward,
        gradients=backward,
        reduced="bfloat16" if "bfloat16" in wires else exactly.reduced,
        products="bfloat16" if "dense.bf16" in allow and ("matmul", "bfloat16") in known else exactly.products,
        moments="bfloat16" if "optimizer.bf16" in allow and exactly.moments == "float32" else exactly.moments,
    )


def _written(found: Found, allow: Sequence[str], why: tuple[tuple[str, str], ...]) -> Plan:
    problem = found.problem
    cluster, precision = problem.cluster, problem.precision
    axes = tuple((level.name, level.num) for level in reversed(cluster.levels)) or (("data", 1),)
    return Plan(
        version=1,
        workload_digest=problem.workload.digest(),
        cluster_digest=cluster.digest(),
        allow=tuple(allow),
        axes=axes,
        lanes=(*stages.LANES, *block_stages.lanes(problem)),
        tables=tuple(_table(found, number) for number in range(len(problem.demands))),
        dense=replace(problem.dense, dtype=precision.products, state=precision.moments),
        wire=Wire(precision.vectors, precision.gradients, precision.reduced),
        stages=tasks.of(problem, found.loads, found.behind),
        why=why,
    )


def _table(found: Found, number: int) -> TablePlan:
    problem, placed = found.problem, found.placed
    demand = problem.asked(placed)[number]
    table = demand.table
    dtype = held(table, problem.precision.tables)
    placement = Placement(found.shares[number], dtype, state_dtype(table.dtype))
    travel: Travel = "vectors" if demand.home is None else "rows"
    if number in placed.replicas:
        everyone = tuple(range(problem.cluster.num_ranks))
        rects = [Rect(table.name, (0, table.rows), (0, table.dim), everyone)]
        return TablePlan(table.name, "id", tuple(rects), placement, travel)
    rects: list[Rect] = []
    order = "id"
    for unit, ranks in placed.by_table[number]:
        order, size = unit.order, len(ranks) // unit.cut.copies
        rows = sharding.cut_rows(demand, size, order)
        rects += [Rect(table.name, part, unit.columns, ranks[at::size]) for at, part in enumerate(rows)]
    return TablePlan(table.name, order, tuple(rects), placement, travel)


def table_seconds(found: Found, number: int) -> float:
    """Of lookup and update, at the rank that has most of this table."""
    mine = found.placed.by_table.get(number, [])
    placed = Placed(
        tuple(unit for unit, _ in mine),
        tuple(ranks for _, ranks in mine),
        (number,) if number in found.placed.replicas else (),
    )
    loads = tasks.loads(found.problem, placed, found.near)
    none = tasks.loads(found.problem, Placed((), ()), found.near)
    return float((loads.lookup_R + loads.update_R - none.lookup_R - none.update_R).max())


def stage_seconds(found: Found) -> dict[str, float]:
    """Of each stage, at the slowest rank."""
    made = tasks.tasks(found.problem, found.placed, found.loads)
    num = found.problem.cluster.num_ranks
    return {name: max(task.of(rank) for rank in range(num)) for name, task in made.items()}


def load(found: Found) -> Load:
    """What a step asks of each resource, where most of it is asked."""
    problem = found.problem
    made = tasks.tasks(problem, found.placed, found.loads)
    flops = sum(task.flops for task in made.values())
    copied = int(found.loads.far_R.max())
    each = (3 * unit.work for unit in found.placed.units)  # read, and in the update read and written
    rows_R = found.placed.by_rank(each, problem.cluster.num_ranks, looked_up=True)
    traffic_RR = traffic.traffic(problem, found.placed)
    return Load(
        flops=flops,
        dtype=problem.precision.products,
        memory_bytes=int(rows_R.max()),
        link_bytes=bytes_by_level(problem.cluster, traffic_RR),
        shared_bytes=bytes_by_level(problem.cluster, traffic_RR, shared=True),
        host_bytes=copied,
    )

"""The plan that was asked for: the shortest step within what may change the mathematics, and why it is as it is."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import chain
from math import prod
from types import MappingProxyType

from shardwright.errors import UserError, nearest
from shardwright.planner import memory, search, stages, steps, tables, wire
from shardwright.planner.balance import imbalance
from shardwright.planner.problem import Placed, Precision, Problem
from shardwright.planner.roofline import Load, bytes_by_level
from shardwright.planner.search import Found, Pin
from shardwright.planner.tables import DATA, Cut, Demand, Unit
from shardwright.spec.cluster import Cluster
from shardwright.spec.plan import TABLES, Dense, Placement, Plan, Rect, TablePlan, Travel, Wire, widest
from shardwright.spec.workload import DTYPE_BYTES, Dtype, Workload, held, state_dtype

WIRES = MappingProxyType[str, Dtype]({"wire.fp16": "float16", "wire.bf16": "bfloat16"})
IDS = MappingProxyType(
    {
        "read": "ids of the next batch go out first, beside lookups",
        "vectors": "ids of the next batch go out behind the vectors, beside the dense part",
        "gradients": "ids of the next batch go out behind the gradients, beside the update",
    }
)


@dataclass(frozen=True, slots=True)
class Answer:
    plan: Plan
    found: Found


def answer(
    workload: Workload,
    cluster: Cluster,
    *,
    batch_size: int = 0,
    allow: Sequence[str] = (),
    pins: Mapping[str, str] | None = None,
) -> Answer:
    """The plan of a recommendation model; `batch_size` is that of all ranks together."""
    wanted = {name: search.pin(text) for name, text in (pins or {}).items()}
    names = [table.name for table in workload.tables]
    for name in wanted:
        if name not in names:
            raise UserError(f'pin of unknown table "{name}"{nearest(name, names)}')
    found = _found(workload, cluster, batch_size or workload.batch_size, allow, wanted)
    return Answer(_written(found, allow, wanted), found)


def _found(
    workload: Workload, cluster: Cluster, batch_size: int, allow: Sequence[str], pins: Mapping[str, Pin]
) -> Found:
    """Exact, and with all that is allowed; of that only what makes the step shorter, or is needed to fit."""
    exactly = exact(workload)
    most = allowed(allow, cluster, exactly)
    tried: list[Found] = []
    refused: UserError | None = None
    tables_ = replace(exactly, tables=most.tables)
    for precision in dict.fromkeys((exactly, tables_, replace(most, tables=None), most)):
        try:
            tried.append(search.best(search.pose(workload, cluster, batch_size, precision), pins))
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
        one = search.scored(search.pose(workload, cluster, batch_size, less), found.proposal, found.placed)
        if one is not None and one.seconds <= found.seconds * (1 + 1e-9):
            found = one
    return found


def exact(workload: Workload) -> Precision:
    """Nothing rounded."""
    width = widest(workload.tables)
    return Precision(None, width, width, width, width, width)


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


def _written(found: Found, allow: Sequence[str], pins: Mapping[str, Pin]) -> Plan:
    problem = found.problem
    cluster, precision = problem.cluster, problem.precision
    axes = tuple((level.name, level.num) for level in reversed(cluster.levels)) or (("data", 1),)
    return Plan(
        version=1,
        workload_digest=problem.workload.digest(),
        cluster_digest=cluster.digest(),
        allow=tuple(allow),
        axes=axes,
        lanes=stages.LANES,
        tables=tuple(_table(found, number) for number in range(len(problem.demands))),
        dense=Dense(replicate=tuple(name for name, _ in axes), dtype=precision.products, state=precision.moments),
        wire=Wire(precision.vectors, precision.gradients, precision.reduced),
        stages=steps.of(found.loads, found.behind),
        why=tuple(why(found, pins)),
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
        rows = tables.cut_rows(demand, size, order)
        rects += [Rect(table.name, part, unit.columns, ranks[at::size]) for at, part in enumerate(rows)]
    return TablePlan(table.name, order, tuple(rects), placement, travel)


def priced(problem: Problem, plan: Plan) -> Found:
    """The step of a plan that was made before, by whomever, at this batch size on this cluster: its rectangles, tiers
    and precision. Its stages too where they are of the planner's kind, else the best of these."""
    num = problem.cluster.num_ranks
    if prod(size for _, size in plan.axes) != num:
        raise UserError(f"the plan is for axes {dict(plan.axes)}; {problem.cluster.name} has {num} ranks")
    precision = Precision(
        None, plan.wire.vectors, plan.wire.gradients, plan.wire.dense, plan.dense.dtype, plan.dense.state
    )
    dtypes = {table.table: table.placement.weight_dtype for table in plan.tables}
    demands, by_row = (
        tuple(replace(demand, weight_bytes=DTYPE_BYTES[dtypes[demand.table.name]]) for demand in each)
        for each in (problem.demands, problem.by_row)
    )
    problem = replace(problem, precision=precision, demands=demands, by_row=by_row)
    by_name = {demand.table.name: number for number, demand in enumerate(demands)}
    pieces: list[tuple[Unit, tuple[int, ...]]] = []
    replicas: list[int] = []
    for table in plan.tables:
        if len(table.rects) == 1 and len(table.rects[0].ranks) == num > 1:
            replicas.append(by_name[table.table])
        else:
            pieces += _pieces(problem, by_name[table.table], table)
    units, ranks = (tuple(column) for column in zip(*pieces, strict=True)) if pieces else ((), ())
    placed = Placed(units, ranks, tuple(replicas))
    kept = [_kept(problem, placed, by_name[table.table], table) for table in plan.tables]
    rows = [rows for _, rows in sorted(kept)]
    if not memory.fits(problem, placed, rows):
        raise UserError(f"the plan does not fit the memory of {problem.cluster.name}")
    near = tuple(float(demand.load(most)) for demand, most in zip(problem.asked(placed), rows, strict=True))
    shares = {by_name[table.table]: table.placement.tiers for table in plan.tables}
    loads = steps.loads(problem, placed, near)
    orders = tuple(one for one in stages.BEHIND if steps.of(loads, one) == plan.stages)
    return Found(
        problem,
        search.Proposal(),
        placed,
        loads,
        near,
        tuple(shares[at] for at in range(len(demands))),
        *steps.seconds(problem, placed, loads, orders or tuple(stages.BEHIND)),
    )


def _kept(problem: Problem, placed: Placed, number: int, table: TablePlan) -> tuple[int, int]:
    """The table's number, and how many of its rows lie in the fastest tier."""
    rows = problem.demands[number].table.rows
    known = [tier.name for tier in problem.cluster.device.tiers]
    for tier, _ in table.placement.tiers:
        if tier not in known:
            raise UserError(
                f'table "{table.table}" lies in tier "{tier}"; {problem.cluster.name} has {", ".join(known)}'
            )
    first = table.placement.tiers[0]
    if first.tier != problem.cluster.device.tiers[0].name:
        return number, 0
    return number, rows if first.rows is None else min(rows, first.rows * placed.spread(number))


def _pieces(problem: Problem, number: int, table: TablePlan) -> Iterator[tuple[Unit, tuple[int, ...]]]:
    """Column by column, what the planner would have called a piece: each rank has as much as the fullest."""
    levels, copies = problem.cluster.levels, _copies(problem.cluster, table)
    by_row = table.travel == "rows" and problem.demands[number].home is None
    demand = (problem.by_row if by_row else problem.demands)[number]
    sizes = [prod(level.num for level in levels[:reach]) for reach in range(len(levels) + 1)]
    by_columns: dict[tuple[int, int], list[Rect]] = {}
    for rect in table.rects:
        by_columns.setdefault(rect.cols, []).append(rect)
    for at, (columns, rects) in enumerate(sorted(by_columns.items())):
        rows = sorted(rects, key=lambda rect: rect.rows)
        of_copies = list(zip(*(sorted(rect.ranks) for rect in rows), strict=True))
        for ranks in of_copies:
            first = min(ranks) // len(ranks) * len(ranks)
            if len(ranks) not in sizes or sorted(ranks) != list(range(first, first + len(ranks))):
                raise UserError(
                    f'table "{table.table}" has its rows on ranks {ranks}, which is no whole group of a level'
                )
        reach = sizes.index(len(rows))
        name = "row" if reach == len(levels) > 0 else ("table", "table-row")[reach > 0]
        if len(by_columns) > 1:
            name = "column-row" if reach else "column"
        if copies > 1:
            name = "copy-row" if reach else "copy-column" if len(by_columns) > 1 else "copy-table"
        parts = [rect.rows for rect in rows]
        most_rows = max(end - start for start, end in parts)
        yield (
            tables.piece(
                number,
                demand,
                Cut(name, len(by_columns), reach, rows=by_row, copies=copies),
                at,
                columns,
                problem.cluster,
                problem.batch_size,
                (table.order, most_rows, tables.shares(demand, parts, table.order)),
            ),
            tuple(chain.from_iterable(of_copies)),
        )


def _copies(cluster: Cluster, table: TablePlan) -> int:
    """How many there are of a table: one, or one in each group that some of the levels join."""
    nums = {len(rect.ranks) for rect in table.rects}
    if nums == {1}:
        return 1
    copies, num = max(nums), cluster.num_ranks
    groups = {prod(level.num for level in cluster.levels[at:]) for at in range(1, len(cluster.levels))} - {num}
    for rect in table.rects:
        if copies not in groups or [rank * copies // num for rank in sorted(rect.ranks)] != list(range(copies)):
            raise UserError(
                f'table "{table.table}" has replicas on ranks {rect.ranks}; what can be priced is the whole table on '
                "every rank, or one copy of all its rows and columns in every group of a level"
            )
    return copies


def why(found: Found, pins: Mapping[str, Pin]) -> Iterator[tuple[str, str]]:
    problem = found.problem
    even, room = _even_work(found), sum(memory.budget(problem).free)
    for number, demand in enumerate(problem.demands):
        pinned = demand.table.name in pins
        reason = "as pinned" if pinned else _reason(found, number, demand, even, room)
        yield f"table {demand.table.name}", f"{reason}{_copied(found, number)}{_travelling(found, number)}"
    rows = imbalance(found.loads.lookup_R)
    yield "balance", f"the fullest rank looks up for {rows:.2f} times as long as the mean"
    if problem.cluster.num_ranks > 1:
        yield "ids", IDS[found.behind]
    yield "precision", _precision(problem)
    free = memory.budget(problem).free
    used = float(found.loads.bytes_R.max())
    tiers = ", ".join(
        f"{memory.told(max(room, 0))} of {tier.name}"
        for room, tier in zip(free, memory.budget(problem).tiers, strict=True)
    )
    yield "memory", f"tables take {memory.told(used)} of the fullest rank, which has {tiers} for them"
    yield "step", f"predicted {1e3 * found.seconds:.3g} ms, {problem.batch_size / found.seconds:,.0f} samples/s"


def table_seconds(found: Found, number: int) -> float:
    """Of lookup and update, at the rank that has most of this table."""
    mine = found.placed.by_table.get(number, [])
    placed = Placed(
        tuple(unit for unit, _ in mine),
        tuple(ranks for _, ranks in mine),
        (number,) if number in found.placed.replicas else (),
    )
    loads = steps.loads(found.problem, placed, found.near)
    none = steps.loads(found.problem, Placed((), ()), found.near)
    return float((loads.lookup_R + loads.update_R - none.lookup_R - none.update_R).max())


def stage_seconds(found: Found) -> dict[str, float]:
    """Of each stage, at the slowest rank."""
    made = steps.tasks(found.problem, found.placed, found.loads)
    num = found.problem.cluster.num_ranks
    return {name: max(task.of(rank) for rank in range(num)) for name, task in made.items()}


def load(found: Found) -> Load:
    """What a step asks of each resource, where most of it is asked."""
    problem = found.problem
    made = steps.tasks(problem, found.placed, found.loads)
    flops = sum(task.flops for task in made.values())
    copied = int(found.loads.far_R.max())
    each = (3 * unit.work for unit in found.placed.units)  # read, and in the update read and written
    rows_R = found.placed.by_rank(each, problem.cluster.num_ranks, looked_up=True)
    traffic_RR = wire.traffic(problem, found.placed)
    return Load(
        flops=flops,
        dtype=problem.precision.products,
        memory_bytes=int(rows_R.max()),
        link_bytes=bytes_by_level(problem.cluster, traffic_RR),
        shared_bytes=bytes_by_level(problem.cluster, traffic_RR, shared=True),
        host_bytes=copied,
    )


def _even_work(found: Found) -> float:
    problem = found.problem
    whole = [search.unit_whole(problem, number) for number in range(len(problem.demands))]
    return sum(unit.work for unit in whole) / problem.cluster.num_ranks


def cut_of(found: Found, number: int) -> Cut:
    mine = found.placed.by_table.get(number, [])
    return mine[0][0].cut if mine else DATA


def _reason(found: Found, number: int, demand: Demand, even: float, room: float) -> str:
    problem, cut = found.problem, cut_of(found, number)
    whole = search.unit_whole(problem, number)
    size, share = memory.told(whole.bytes_), whole.work / even if even else 0.0
    if problem.cluster.num_ranks == 1:
        return "one rank: whole"
    if cut == DATA:
        return f"a replica on every rank: all-reducing its {size} moves less than its vectors would"
    ways = {
        "table": "whole",
        "column": f"{cut.columns} pieces of {demand.table.dim // cut.columns} columns",
        "table-column": f"{cut.columns} pieces of {demand.table.dim // cut.columns} columns in one group",
        "table-row": "rows over one group",
        "column-row": f"{cut.columns} pieces of columns, the rows of each over a group",
        "row": "rows over all ranks",
        "copy-table": "a copy in every host, whole on a rank",
        "copy-column": f"a copy in every host, in {cut.columns} pieces of columns",
        "copy-row": "a copy in every host, rows over its ranks",
    }
    if cut.copies > 1:
        return ways[cut.name]
    if whole.bytes_ > room:
        return f"{ways[cut.name]}: its {size} do not fit a rank, which has {memory.told(room)} for tables"
    if cut.name == "table":
        return f"whole: {share:.2f} of an even share of the work, {size}"
    return f"{ways[cut.name]}: whole it would be {share:.2f} of an even share of the work"


def _copied(found: Found, number: int) -> str:
    copies = cut_of(found, number).copies
    if copies == 1:
        return ""
    share = search.copied_bytes_share(found.problem, number, copies)
    return f"; {copies} copies exchange rows with gradients: {share:.2f} of the bytes between them if it lay once"


def _travelling(found: Found, number: int) -> str:
    problem, cut = found.problem, cut_of(found, number)
    if problem.cluster.num_ranks == 1:
        return ""
    if problem.demands[number].home is not None:
        return "; distinct rows travel: not all its features are pooled"
    if not cut.rows:
        return ""
    share = search.row_bytes_share(problem, number, cut)
    return f"; distinct rows travel: {share:.2f} of the bytes that its vectors, cut so, would be"


def _precision(problem: Problem) -> str:
    exactly = exact(problem.workload)
    rounded = [
        f"{field.name} in {getattr(problem.precision, field.name)}"
        for field in fields(Precision)
        if getattr(problem.precision, field.name) != getattr(exactly, field.name)
    ]
    return ", ".join(rounded) or "nothing is rounded"

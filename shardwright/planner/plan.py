"""Make a plan: the shortest predicted step within the permitted changes of the mathematics, and its reasons.

Shape legend: R ranks (RR: from, to).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from math import inf
from types import MappingProxyType

from shardwright.errors import UserError, did_you_mean
from shardwright.planner import dense_strategies, expert_split, owned_rows, pipelines, search, servers, staleness
from shardwright.planner.frontier import StalenessOptions
from shardwright.planner.pins import LayerRequest, Pin, TableRequest, parse_pin
from shardwright.planner.price import overheads
from shardwright.planner.price.roofline import ResourceUsage, bytes_by_level
from shardwright.planner.problem import PlacedTables, Precision, Problem
from shardwright.planner.reasons import exact_precision, list_reasons
from shardwright.planner.search import Candidate
from shardwright.planner.step import block_stages, pipeline_step, tasks, traffic
from shardwright.planner.tables.sharding import split_rows_by_order
from shardwright.spec.cluster import Cluster
from shardwright.spec.lanes import EXPERT_LANES, LANES, PIPELINE_LANES
from shardwright.spec.plan import TABLE_DTYPES, Bounded, Exact, ExchangeMode, Placement, Plan, Rect, TablePlan, Wire
from shardwright.spec.row_cache import FLOAT32_LINES
from shardwright.spec.workload import Dtype, Workload, state_dtype, table_weight_dtype

WIRE_DTYPES = MappingProxyType[str, Dtype]({"wire.fp16": "float16", "wire.bf16": "bfloat16"})


@dataclass(frozen=True, slots=True)
class PlanningResult:
    """A plan and the candidate it was made from.

    `dense_candidates`: every parallelism strategy of the dense model, with the first placement of the tables.
    `staleness`: None if no table may have copies of rows.
    """

    plan: Plan
    candidate: Candidate
    dense_candidates: tuple[dense_strategies.DenseCandidate, ...] = ()
    staleness: StalenessOptions | None = None


def make_plan(
    workload: Workload,
    cluster: Cluster,
    *,
    batch_size: int = 0,
    allow: Sequence[str] = (),
    pins: Mapping[str, str] | None = None,
    torchrec: bool = False,
    layers: LayerRequest | None = None,
    tables: TableRequest | None = None,
) -> PlanningResult:
    """Plan a recommendation model.

    `batch_size`: global batch size; 0: the workload's. `torchrec`: plan within TorchRec's limits (`Problem`). `layers`:
    what the user pins of the dense model, a pipeline and expert parallelism.
    """
    layers, tables = layers or LayerRequest(), tables or TableRequest()
    parsed_pins = {name: parse_pin(text) for name, text in (pins or {}).items()}
    names = [table.name for table in workload.tables]
    for name in parsed_pins:
        if name not in names:
            raise UserError(f'pin of unknown table "{name}"{did_you_mean(name, names)}')
    request = tables.servers if not torchrec else None  # which has no servers
    if request is not None:
        servers.check_request(workload, request, parsed_pins)

    def define_problem(precision: Precision) -> Problem:
        problem = search.define_problem(
            workload, cluster, batch_size or workload.batch_size, precision, torchrec=torchrec
        )
        wide, accumulate = FLOAT32_LINES in allow, tables.accumulate
        problem = replace(
            problem, dense_strategy=layers.dense, balance=tables.balance, accumulate=accumulate, wide_lines=wide
        )
        problem = servers.with_servers(problem, request)
        return owned_rows.give_rows(problem, owned_rows.EXACT) if owns else problem

    exact = exact_precision(workload)
    lowest = servers.supported_precision(lowest_precision(allow, cluster, exact), exact, request)
    owns = request is not None and request.own
    if owns:
        owned_rows.check_owned(define_problem(exact))
    pipelines.check_request(define_problem(exact), layers)
    expert_split.check_request([*pipelines.layouts(define_problem(exact), layers)], layers)
    choice = _choose_experts(define_problem, exact, lowest, parsed_pins, layers)
    problem = define_problem(lowest if choice.candidate is None else choice.candidate.problem.precision)
    choice, pipeline_reason = _choose_pipeline(problem, choice, layers)
    if (best := choice.candidate) is None:
        raise choice.shortage
    reasons = {"pipeline": pipeline_reason} if pipeline_reason else {}
    if owns:
        best, options, reasons["servers"] = _choose_bounds(best, parsed_pins, allow)
    else:
        best, options, staleness_reason = _choose_staleness(define_problem(exact), best, parsed_pins, allow)
        reasons |= {"staleness": staleness_reason} if staleness_reason else {}
        reasons |= {"servers": use} if (use := servers.describe_use(best)) else {}
    if workload.experts and cluster.num_ranks > 1:
        reasons["experts"] = expert_split.describe_split(best, choice.unsplit_seconds, layers)
    replicated = search.with_replicas(best, parsed_pins)
    why = tuple(list_reasons(best, parsed_pins, choice.strategies, replicated, reasons))
    return PlanningResult(_to_plan(best, allow, why), best, choice.strategies, options)


def _choose_staleness(
    problem: Problem, exact: Candidate, pins: Mapping[str, Pin], allow: Sequence[str]
) -> tuple[Candidate, StalenessOptions | None, str]:
    """The faster of `exact` and the best candidate with copies of rows; both, None if no table may have copies; and the
    plan's reason, "" if no staleness is allowed."""
    bounds = staleness.allowed_bounds(allow, problem.cluster.num_ranks)
    if not problem.workload.tables or problem.cluster.num_ranks == 1:
        return exact, None, ""
    if obstacle := staleness.describe_obstacle(replace(problem, pipeline=exact.problem.pipeline)):
        return exact, None, f"not used: {obstacle}" if bounds else ""
    problem = replace(problem, dense=exact.problem.dense, experts=exact.problem.experts)
    options = StalenessOptions(problem, pins, exact)
    if not bounds:
        return exact, options, ""
    try:
        bounded = search.find_best(staleness.choose_bounds(problem, bounds), pins)
    except UserError as shortage:
        return exact, options, f"not used: {shortage}"
    is_chosen = bounded.loads.has_copies and bounded.seconds < exact.seconds * (1 - staleness.TIE_SHARE)
    reason = staleness.describe(bounded, exact, is_chosen=is_chosen)
    return (bounded if is_chosen else exact), replace(options, tried=(bounded,)), reason


def _choose_bounds(
    exact: Candidate, pins: Mapping[str, Pin], allow: Sequence[str]
) -> tuple[Candidate, StalenessOptions | None, str]:
    """The fastest of `exact` and of the candidates in which copies of rows of servers are stale within allowed bounds;
    all of them, None for a single rank; and the plan's reason."""
    problem, bounded = exact.problem, list[Candidate]()
    for sync in staleness.allowed_bounds(allow, problem.cluster.num_ranks):
        bounded.append(search.find_best(owned_rows.give_rows(problem, sync), pins))
    best = min((exact, *bounded), key=lambda candidate: candidate.seconds)
    if best.seconds >= exact.seconds * (1 - staleness.TIE_SHARE):
        best = exact
    rivals = bounded if best is exact else [exact]
    options = StalenessOptions(problem, pins, exact, tuple(bounded)) if problem.cluster.num_ranks > 1 else None
    return best, options, owned_rows.describe(best, rivals)


@dataclass(frozen=True, slots=True)
class _Choice:
    """The best candidate and all strategies of its dense model; None and the reason if the model does not fit.
    `unsplit_seconds`: of a step with all experts on every rank; infinity: that does not fit, 0: it was not tried."""

    candidate: Candidate | None
    strategies: tuple[dense_strategies.DenseCandidate, ...] = ()
    shortage: UserError = UserError("")
    unsplit_seconds: float = 0.0


def _choose_pipeline(problem: Problem, choice: _Choice, layers: LayerRequest) -> tuple[_Choice, str]:
    """The choice or a pipeline, and why; "" if no pipeline is considered."""
    if not pipelines.is_proposed(problem, choice.candidate, layers):
        return choice, ""
    rival = pipelines.best_pipeline(problem, layers)
    if rival is None and layers.pipeline:
        raise UserError(pipelines.describe_overflow(problem, layers))
    if rival is None:
        return choice, ""
    reason = pipelines.describe_pipeline(rival, choice.candidate, layers)
    is_chosen = layers.pipeline or pipelines.is_better(rival, choice.candidate)
    return (_Choice(rival.candidate) if is_chosen else choice), reason


def _choose_experts(
    define_problem: Callable[[Precision], Problem],
    exact: Precision,
    lowest: Precision,
    pins: Mapping[str, Pin],
    layers: LayerRequest,
) -> _Choice:
    """The best plan without a pipeline: with all experts on every rank, unless splitting them is faster by more than a
    tie, or the model fits only so."""
    choices: dict[tuple[str, ...], _Choice] = {}
    options = [*expert_split.options(define_problem(exact), layers)]
    for axes in options or [()]:  # a number of ranks that only a pipeline's layout has
        choices[axes] = _choose_strategy(
            lambda precision, axes=axes: expert_split.split(define_problem(precision), axes, layers),
            exact,
            lowest,
            pins,
        )
    best, *others = choices.values()
    for other in others:
        if expert_split.is_better(other.candidate, best.candidate):
            best = other
    whole = choices.get(())
    tried = 0.0 if whole is None else inf if whole.candidate is None else whole.candidate.seconds
    return replace(best, unsplit_seconds=tried)


def _choose_strategy(
    define_problem: Callable[[Precision], Problem], exact: Precision, lowest: Precision, pins: Mapping[str, Pin]
) -> _Choice:
    try:
        first = _choose_precision(define_problem, exact, lowest, pins)
        return _Choice(*dense_strategies.choose_strategy(first, pins))
    except UserError as shortage:
        return _Choice(None, shortage=shortage)


def _choose_precision(
    define_problem: Callable[[Precision], Problem], exact: Precision, lowest: Precision, pins: Mapping[str, Pin]
) -> Candidate:
    """The best candidate with exact or reduced precision; only reductions that shorten the step or make the tables fit
    are kept."""
    candidates: list[Candidate] = []
    last_error: UserError | None = None
    lowest_tables = replace(exact, tables=lowest.tables)
    for precision in dict.fromkeys((exact, lowest_tables, replace(lowest, tables=None), lowest)):
        try:
            candidates.append(dense_strategies.place_tables_first(define_problem(precision), pins))
        except UserError as error:
            last_error = error
    if not candidates:
        assert last_error is not None
        raise last_error
    best = min(candidates, key=lambda candidate: candidate.seconds)
    for field in fields(Precision):
        less_reduced = replace(best.problem.precision, **{field.name: getattr(exact, field.name)})
        if less_reduced == best.problem.precision or field.name == "tables":
            continue
        problem = replace(define_problem(less_reduced), dense=best.problem.dense)
        candidate = search.evaluate(problem, best.proposal, best.placed)
        if candidate is not None and candidate.seconds <= best.seconds * (1 + 1e-9):
            best = candidate
    return best


def lowest_precision(allow: Sequence[str], cluster: Cluster, exact: Precision) -> Precision:
    """The lowest permitted precision; if both are permitted, vectors are fp16 forward and bf16 backward, as in Neo."""
    wires: list[Dtype] = [WIRE_DTYPES[entry] for entry in allow if entry in WIRE_DTYPES]
    forward: Dtype = "float16" if "float16" in wires else "bfloat16" if "bfloat16" in wires else exact.vectors
    backward: Dtype = "bfloat16" if "bfloat16" in wires else exact.gradients  # float16 loses small gradients
    prices = {(price.op, price.dtype) for price in cluster.device.prices}
    return Precision(
        tables=next((TABLE_DTYPES[entry] for entry in allow if entry in TABLE_DTYPES), None),
        vectors=forward,
        gradients=backward,
        dense_gradients="bfloat16" if "bfloat16" in wires else exact.dense_gradients,
        matmuls="bfloat16" if "dense.bf16" in allow and ("matmul", "bfloat16") in prices else exact.matmuls,
        moments="bfloat16" if "optimizer.bf16" in allow and exact.moments == "float32" else exact.moments,
    )


def _to_plan(candidate: Candidate, allow: Sequence[str], why: tuple[tuple[str, str], ...]) -> Plan:
    problem = candidate.problem
    precision = problem.precision
    return Plan(
        version=4,
        workload_digest=problem.workload.digest(),
        cluster_digest=servers.with_servers(problem, None).cluster.digest(),
        allow=tuple(allow),
        axes=problem.mesh_axes,
        lanes=(
            *LANES,
            *(PIPELINE_LANES if problem.pipeline is not None else ()),
            *(EXPERT_LANES if problem.experts else ()),
            *block_stages.extra_lanes(problem),
        ),
        tables=tuple(_to_table_plan(candidate, number) for number in range(len(problem.table_loads))),
        servers=servers.num_servers(candidate),
        dense=replace(problem.dense, dtype=precision.matmuls, state=precision.moments),
        experts=tuple(part.plan for part in problem.experts),
        wire=Wire(precision.vectors, precision.gradients, precision.dense_gradients),
        pipeline=problem.pipeline,
        stages=tasks.required_stages(problem, candidate.loads, candidate.ids_after),
        why=why,
    )


def _to_table_plan(candidate: Candidate, number: int) -> TablePlan:
    problem, placed = candidate.problem, candidate.placed
    load = problem.placed_loads(placed)[number]
    table, dtype = load.table, table_weight_dtype(load.table, problem.precision.tables)
    sync = load.copied.sync if load.copied is not None else Exact()
    placement = Placement(candidate.tiers[number].shares, dtype, state_dtype(table.dtype), sync)
    exchange: ExchangeMode = "vectors" if load.local_pooling is None else "rows"
    scheme = candidate.sharding(number).scheme
    if number in placed.served_tables:
        assert isinstance(sync, Bounded)
        whole = Rect(table.name, (0, table.rows), (0, table.dim), (0,))
        return servers.on_servers(
            TablePlan(table.name, "id", (whole,), placement),
            sync,
            problem.cluster.num_ranks,
            servers.num_servers(candidate),
        )
    if number in placed.data_parallel_tables:
        all_ranks = tuple(range(problem.cluster.num_ranks))
        rect = Rect(table.name, (0, table.rows), (0, table.dim), all_ranks)
        return TablePlan(table.name, "id", (rect,), placement, exchange, scheme)
    rects: list[Rect] = []
    order = "id"
    for unit, ranks in placed.units_by_table[number]:
        order, size = unit.order, len(ranks) // unit.sharding.num_replicas
        row_ranges = split_rows_by_order(load, size, order)
        rects += [Rect(table.name, rows, unit.columns, ranks[i::size]) for i, rows in enumerate(row_ranges)]
    return TablePlan(table.name, order, tuple(rects), placement, exchange, scheme)


def table_seconds(candidate: Candidate, table_number: int) -> float:
    """Seconds of a table's lookup and update, on the rank where they take longest."""
    data_parallel = (table_number,) if table_number in candidate.placed.data_parallel_tables else ()
    placed = PlacedTables.from_pairs(candidate.placed.units_by_table.get(table_number, []), data_parallel)
    found = [table.found for table in candidate.tiers]
    loads = tasks.rank_loads(candidate.problem, placed, found)
    empty = tasks.rank_loads(candidate.problem, PlacedTables((), ()), found)
    return float((loads.lookup_R + loads.update_R - empty.lookup_R - empty.update_R).max())


def slowest_stage_seconds(candidate: Candidate) -> dict[str, float]:
    """Seconds of each stage on its slowest rank."""
    problem, seconds = candidate.problem, dict[str, float]()
    if problem.pipeline is not None:
        for own in pipeline_step.pipeline_calls(problem, 1, one_replica=True):
            for name, task in own.task_of.items():
                seconds[name] = max(seconds.get(name, 0.0), task.seconds_on(0))
        return seconds
    by_stage = tasks.stage_tasks(problem, candidate.placed, candidate.loads)
    num = problem.cluster.num_ranks
    return {name: max(task.seconds_on(rank) for rank in range(num)) for name, task in by_stage.items()}


def resource_usage(candidate: Candidate) -> ResourceUsage:
    """The use of each resource in a step, on the rank or link that uses it most."""
    problem = candidate.problem
    if problem.pipeline is not None:
        by_stage = pipeline_step.pipeline_calls(problem, 1, one_replica=True)
        flops = max(sum(task.flops for task in own.tasks) for own in by_stage)
        traffic_RR = pipeline_step.pipeline_traffic(problem)
    else:
        by_stage = tasks.stage_tasks(problem, candidate.placed, candidate.loads)
        flops = sum(task.flops for task in by_stage.values())
        traffic_RR = traffic.step_traffic(problem, candidate.placed)
    row_bytes = (3 * unit.read_bytes for unit in candidate.placed.units)  # lookup reads, update reads and writes
    has_host_link = overheads.has_price(problem.cluster.device, "host_to_device", "")
    rows_R = candidate.placed.sum_by_rank(row_bytes, problem.cluster.num_ranks, weight_by_lookups=True)
    return ResourceUsage(
        flops=flops,
        dtype=problem.precision.matmuls,
        memory_bytes=int(rows_R.max()),
        link_bytes=bytes_by_level(problem.cluster, traffic_RR),
        shared_link_bytes=bytes_by_level(problem.cluster, traffic_RR, shared=True),
        host_copy_bytes=int(candidate.loads.moved_bytes_R.max()) if has_host_link else 0,
    )

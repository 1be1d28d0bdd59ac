"""What each stage of a recommendation step takes where tables lie as placed, and so the step."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from types import MappingProxyType

import numpy as np

from shardwright.planner.price import overheads, primitives
from shardwright.planner.problem import PlacedTables, Problem
from shardwright.planner.step import block_stages, block_tasks, simulate, traffic
from shardwright.planner.step.loop_cost import LoopCost
from shardwright.planner.step.simulate import Task
from shardwright.planner.step.stages import IDS_AFTER, recommendation_stages
from shardwright.planner.tables.sharding import TableLoad
from shardwright.spec.cluster import Device
from shardwright.spec.plan import Stage
from shardwright.spec.timeline import Timeline
from shardwright.spec.wire import REQUEST_HEADER_BYTES
from shardwright.spec.workload import Dtype

WARM_STEPS, COUNTED_STEPS, TAIL_STEPS = 3, 3, 3  # as many as the largest lead before and after
MANY_ROWS = 1 << 16
CODEC_NAMES = MappingProxyType({"float16": "fp16", "bfloat16": "bf16"})


@dataclass(frozen=True, slots=True)
class RankLoads:
    """By rank, of one step."""

    lookup_R: np.ndarray  # seconds
    update_R: np.ndarray
    prefetch_R: np.ndarray
    slow_tier_bytes_R: np.ndarray  # bytes of rows fetched from a slower tier, and written back
    bytes_R: np.ndarray  # of tables and their state
    sent_bytes_R: np.ndarray  # bytes of vectors in float32
    ids_R: np.ndarray  # that arrive
    reduces_in_host: bool  # whether parts of vectors meet inside hosts
    replica_sum_seconds: float  # seconds of adding up the gradients of replicas


def rank_loads(problem: Problem, placed: PlacedTables, fast_id_shares: Sequence[float]) -> RankLoads:
    """`near`: by demand, the share of its ids whose rows lie in the fastest tier."""
    num, device = problem.cluster.num_ranks, problem.cluster.device
    each = cache(partial(_row_seconds, device))
    units = [
        (unit, problem.table_load(unit.table_number, unit.sharding), unit.columns[1] - unit.columns[0])
        for unit in placed.units
    ]
    asked = [
        (unit.lookups, round(width * demand.weight_bytes), problem.distinct_share(demand, unit.sharding))
        for unit, demand, width in units
    ]
    lookup_R = placed.sum_by_rank(
        (ids * each("lookup", row, new) for ids, row, new in asked), num, weight_by_lookups=True
    )
    update_R = placed.sum_by_rank(
        (ids * each("update", row, new) for ids, row, new in asked), num, weight_by_lookups=True
    )
    far = (
        ids * new * (1 - fast_id_shares[unit.table_number]) * demand.row_bytes(width)
        for (unit, demand, width), (ids, _, new) in zip(units, asked, strict=True)
    )
    far_R = placed.sum_by_rank(far, num)
    bytes_R = placed.sum_by_rank((unit.bytes_ for unit in placed.units), num)
    sent_R = placed.sum_by_rank((unit.sent_bytes for unit in placed.units), num)
    ids_R, summed = placed.sum_by_rank((unit.lookups for unit in placed.units), num, weight_by_lookups=True), 0.0
    for number in placed.data_parallel_tables:
        demand = problem.table_loads[number]
        own, row = problem.local_batch_size * demand.ids_per_sample, round(demand.table.dim * demand.weight_bytes)
        touched = min(demand.table.rows, demand.distinct_share * demand.ids_per_sample * problem.batch_size)
        ids_R += own
        lookup_R += own * each("lookup", row, demand.distinct_share)
        update_R += touched * each("update", row, 1.0)
        summed += own * each("update", row, demand.distinct_share) + block_tasks.memory_pass_seconds(
            device, 2 * row * demand.table.rows
        )
        bytes_R += demand.table.rows * demand.row_bytes(demand.table.dim)
    update_R += _copies_seconds(problem, placed) + _whole_rows_seconds(problem, placed)
    meets = problem.is_hierarchical and any(
        unit.sharding.reduces_in_host and demand.pooled_vectors for unit, demand, _ in units
    )
    lookup_R += primitives.find_price(device, "lookup", "float32").call_seconds
    update_R += primitives.find_price(device, "update", "float32").call_seconds
    return RankLoads(lookup_R, update_R, _copied(problem, far_R), far_R, bytes_R, sent_R, ids_R, meets, summed)


def _copies_seconds(problem: Problem, placed: PlacedTables) -> np.ndarray:
    """By rank, of the updates of copies, beside the sums of their own gradients: the rows of all copies are told apart
    and added up, and each is updated once."""
    num, device = problem.cluster.num_ranks, problem.cluster.device
    given_R, seconds_R = np.zeros(num), np.zeros(num)
    for unit, ranks in zip(placed.units, placed.ranks, strict=True):
        if (copies := unit.sharding.num_replicas) > 1:
            demand, width = problem.table_load(unit.table_number, unit.sharding), unit.columns[1] - unit.columns[0]
            given, rows = (k * demand.distinct_rows_per_group(k) * copies / len(ranks) for k in (copies, 1))
            given_R[list(ranks)] += given
            row_bytes, new = round(width * demand.weight_bytes), min(1.0, rows / max(given, 1.0))
            seconds_R[list(ranks)] += given * _row_seconds(device, "update", 4 * width, new)
            seconds_R[list(ranks)] += rows * _row_seconds(device, "update", row_bytes, 1.0)
    return seconds_R + overheads.ids_seconds(device, given_R, "distinct")


def _whole_rows_seconds(problem: Problem, placed: PlacedTables) -> np.ndarray:
    """By rank, of steps that look at whole rows whose columns lie apart: gradients are added up by row first, what is
    asked of rows goes to all that have others of their columns and is waited for, and then each row is updated."""
    num, device = problem.cluster.num_ranks, problem.cluster.device
    rows_R, seconds_R, of_piece = np.zeros(num), np.zeros(num), overheads.column_shard_seconds(device)
    for unit, ranks in zip(placed.units, placed.ranks, strict=True) if of_piece else ():
        demand, row_bytes = (
            problem.table_load(unit.table_number, unit.sharding),
            4 * (unit.columns[1] - unit.columns[0]),
        )
        if unit.sharding.column_shards > 1 and demand.state_bytes:
            rows = unit.lookups * problem.distinct_share(demand, unit.sharding)
            rows_R[list(ranks)] += rows
            seconds_R[list(ranks)] += rows * _row_seconds(device, "update", row_bytes, 1.0) + of_piece
    if not rows_R.any():
        return seconds_R
    told = primitives.collective_cost(problem.cluster, "all_to_all", problem.level_names, round(4 * rows_R.max()))
    return seconds_R + told.seconds


def _row_seconds(device: Device, op: str, row_bytes: int, distinct: float) -> float:
    """Of each of many rows, of which this share is asked for the first time in the batch; others are in caches."""
    new = _each_of_many(device, op, row_bytes)
    if not overheads.has_price(device, f"{op}.near", "float32"):
        return new
    return distinct * new + (1 - distinct) * min(new, _each_of_many(device, f"{op}.near", row_bytes))


def _each_of_many(device: Device, op: str, row_bytes: int) -> float:
    return (
        primitives.row_access_cost(device, op, MANY_ROWS, row_bytes).seconds
        - primitives.find_price(device, op, "float32").call_seconds
    ) / MANY_ROWS


def _copied(problem: Problem, far_R: np.ndarray) -> np.ndarray:
    """Seconds of fetching rows from a slower tier and writing them back, both ways at once."""
    tiers = problem.cluster.device.tiers
    if not far_R.any() or len(tiers) < 2:
        return np.zeros(len(far_R))
    ways = ((tiers[1].name, tiers[0].name), (tiers[0].name, tiers[1].name))
    each = max(primitives.copy_cost(problem.cluster.device, 1 << 30, *way).seconds for way in ways) / (1 << 30)
    return far_R * each


def stage_tasks(problem: Problem, placed: PlacedTables, loads: RankLoads) -> dict[str, Task]:
    """What each stage takes."""
    cluster, precision, device = problem.cluster, problem.precision, problem.cluster.device
    meet, vectors = traffic.vector_exchange_tasks(problem, placed, precision.vectors, backward=False)
    spread, gradients = traffic.vector_exchange_tasks(problem, placed, precision.gradients, backward=True)
    asked = problem.placed_loads(placed)
    own = problem.local_batch_size * sum(one.vectors * one.table.dim for one in asked) * 4
    decoded, coded_back = (
        _coded(problem, np.array([own]), dtype)[0] for dtype in (precision.vectors, precision.gradients)
    )
    arriving = overheads.columns_seconds(device, *_arriving(problem, placed))
    met = overheads.columns_seconds(device, *_meeting(problem, placed))
    passed_R = np.array([overheads.columns_seconds(device, 1.0, sent / 4) for sent in loads.sent_bytes_R])
    again, summed = _at_home(problem, asked)
    between = traffic.replica_exchange_task(problem, placed)
    looked_R = loads.lookup_R + _coded(problem, loads.sent_bytes_R, precision.vectors)
    updated_R = loads.update_R + _coded(problem, loads.sent_bytes_R, precision.gradients)
    if cluster.num_ranks > 1:
        looked_R, updated_R = looked_R + overheads.ids_seconds(device, loads.ids_R) / 2, updated_R + passed_R
    made = {
        "read": Task(kind="read"),
        "to_device": Task(kind="copy"),
        "request": Task(seconds=_asking(problem, placed, asked)),
        "lengths": traffic.even_all_to_all_task(problem, REQUEST_HEADER_BYTES * cluster.num_ranks),
        "ids": traffic.exchange_task(problem, traffic.id_traffic(problem, placed)),
        "prefetch": Task(seconds=tuple(loads.prefetch_R), kind="copy"),
        "lookup": Task(seconds=tuple(looked_R)),
        "meet": _longer(meet, 2 * met) if meet.is_collective else meet,
        "vectors": vectors,
        "gradients": _concat_tasks(
            gradients, traffic.gradient_reduce_task(problem, traffic.data_parallel_gradient_bytes(problem, placed))
        ),
        "spread": _longer(spread, 2 * met) if spread.is_collective else spread,
        "update": Task(
            seconds=tuple(updated_R + between.seconds_on(0)),
            link_seconds=between.link_seconds,
            latency_seconds=between.latency_seconds,
        ),
        "emit": Task(),
        "step": Task(seconds=block_stages.optimizer_seconds(problem)),
    }
    called = overheads.stage_overhead_seconds(
        device,
        len(problem.workload.features),
        cluster.num_ranks - 1,
        len(placed.row_exchange_tables) + len(placed.data_parallel_tables),
    )
    inside = decoded + arriving + again, coded_back + arriving + summed + loads.replica_sum_seconds
    if block_stages.expands_blocks(problem):
        more = (seconds + called.pop(name, 0.0) for name, seconds in zip(("top", "top.backward"), inside, strict=True))
        made |= block_stages.body_tasks(problem, *more)
        made["gradients"] = replace(
            made["gradients"],
            is_collective=gradients.is_collective,
            levels=gradients.levels,
            compute_slowdown=gradients.compute_slowdown,
        )
    else:
        made |= _as_two(problem, placed, *inside)
    return made | {name: _with_calls(made[name], each) for name, each in called.items()}


def _as_two(problem: Problem, placed: PlacedTables, arrive: float, leave: float) -> dict[str, Task]:
    """The dense part as what is below vectors and what is above; what is handled of them besides."""
    low = [block for block in problem.workload.blocks if not block.needs_vectors]
    top = [block for block in problem.workload.blocks if block.needs_vectors]
    replicas = traffic.data_parallel_gradient_bytes(problem, placed)
    return {
        "bottom": block_tasks.pass_task(problem, low, "forward"),
        "top": _longer(block_tasks.pass_task(problem, top, "forward"), arrive),
        "top.backward": _longer(block_tasks.backward_task(problem, top), leave),
        "reduce": traffic.gradient_reduce_task(problem, block_tasks.total_parameter_bytes(top) + replicas),
        "bottom.backward": block_tasks.backward_task(problem, low),
        "reduce.bottom": traffic.gradient_reduce_task(problem, block_tasks.total_parameter_bytes(low)),
    }


def _asking(problem: Problem, placed: PlacedTables, asked: Sequence[TableLoad]) -> float:
    """Seconds of a rank's ids into messages: where rows travel made distinct, others told apart where rows are cut."""
    homes = [demand.local_pooling for demand in asked if demand.local_pooling is not None]
    cut = (
        asked[number].ids_per_sample
        for number in placed.units_by_table
        if placed.num_row_shards(number) > 1 and not asked[number].local_pooling
    )
    ids = {
        "ids": sum(demand.ids_per_sample for demand in asked) / 2,
        "ids.cut": sum(cut),
        "distinct": sum(one.ids_per_sample for one in homes),
    }
    device, own = problem.cluster.device, problem.local_batch_size
    return sum(float(overheads.ids_seconds(device, np.array([own * num]), op)[0]) for op, num in ids.items())


def _at_home(problem: Problem, asked: Sequence[TableLoad]) -> tuple[float, float]:
    """Seconds of pooling a rank's distinct rows, which caches hold, once they have come; and of summing gradients by
    row on the way back."""
    if problem.cluster.num_ranks == 1:
        return 0.0, 0.0
    device, seconds = problem.cluster.device, {"lookup": 0.0, "update": 0.0}
    vectors = columns = 0.0
    for home in (demand.local_pooling for demand in asked if demand.local_pooling is not None):
        for op in seconds:
            seconds[op] += (
                problem.local_batch_size * home.ids_per_sample * _row_seconds(device, op, 4 * home.table.dim, 0.0)
            )
        vectors += problem.local_batch_size * home.pooled_vectors
        columns += problem.local_batch_size * home.pooled_vectors * home.table.dim
    moved = overheads.columns_seconds(device, vectors, columns)
    return seconds["lookup"] + moved, seconds["update"] + moved


def _arriving(problem: Problem, placed: PlacedTables) -> tuple[float, float]:
    """Vectors, or parts of them, that are put in place for a rank's own samples, and their columns."""
    if problem.cluster.num_ranks == 1:
        return 0.0, 0.0
    vectors = columns = 0.0
    for unit, ranks in zip(placed.units, placed.ranks, strict=True):
        demand, parts = problem.table_load(unit.table_number, unit.sharding), len(ranks) // unit.sharding.num_replicas
        if problem.is_hierarchical and unit.sharding.num_replicas == 1:
            parts = unit.sharding.num_row_hosts(problem.cluster)
        num = problem.local_batch_size * (demand.pooled_vectors * parts + demand.unpooled_vectors)
        vectors += num
        columns += num * (unit.columns[1] - unit.columns[0])
    for demand in (problem.table_loads[number] for number in placed.data_parallel_tables):
        vectors += problem.local_batch_size * demand.vectors
        columns += problem.local_batch_size * demand.vectors * demand.table.dim
    return vectors, columns


def _meeting(problem: Problem, placed: PlacedTables) -> tuple[float, float]:
    """Parts of vectors that a rank copies into messages, or adds up for its host, and their columns."""
    if not problem.is_hierarchical:
        return 0.0, 0.0
    vectors = columns = 0.0
    for unit, ranks in zip(placed.units, placed.ranks, strict=True):
        if (
            unit.sharding.reduces_in_host
        ):  # each host of its ranks has a rank of this place, which adds for one rank of every host
            share = len(ranks) / problem.cluster.num_ranks
            num = problem.batch_size * problem.table_load(unit.table_number, unit.sharding).pooled_vectors * share
            vectors += num
            columns += num * (unit.columns[1] - unit.columns[0])
    return vectors, columns


def _longer(task: Task, seconds: float) -> Task:
    return Task(
        seconds=task.seconds_on(0) + seconds,
        flops=task.flops,
        link_seconds=task.link_seconds,
        latency_seconds=task.latency_seconds,
    )


def _concat_tasks(task: Task, after: Task) -> Task:
    """Two messages, one after the other, as a single task."""
    more = _longer(task, after.seconds_on(0))
    return replace(
        more,
        link_seconds=task.link_seconds + after.link_seconds,
        latency_seconds=task.latency_seconds + after.latency_seconds,
    )


def _with_calls(task: Task, seconds: float) -> Task:
    each = tuple(one + seconds for one in task.seconds) if isinstance(task.seconds, tuple) else task.seconds + seconds
    return replace(task, seconds=each)


def _coded(problem: Problem, bytes_R: np.ndarray, dtype: Dtype) -> np.ndarray:
    """Seconds of vectors of so many bytes of float32 into a codec's form or out of it: half of both."""
    device = problem.cluster.device
    if dtype not in CODEC_NAMES:
        return np.zeros(len(bytes_R))
    if overheads.has_price(device, "codec", CODEC_NAMES[dtype]):
        found = primitives.find_price(device, "codec", CODEC_NAMES[dtype])
        return (found.call_seconds + bytes_R * found.seconds_per_byte) / 2
    return 1.5 * bytes_R / device.tiers[0].read_bytes_per_second


def _order(problem: Problem, found: RankLoads, behind: str) -> list[simulate.Call]:
    return simulate.expand_calls(required_stages(problem, found, behind), WARM_STEPS + COUNTED_STEPS + TAIL_STEPS)


def required_stages(problem: Problem, loads: RankLoads, ids_after: str) -> tuple[Stage, ...]:
    """The stages that this placement needs."""
    return recommendation_stages(
        bool(loads.slow_tier_bytes_R.any()), ids_after, loads.reduces_in_host, block_stages.stage_bodies(problem)
    )


def predict_timeline(
    problem: Problem, placed: PlacedTables, loads: RankLoads, ids_after: str, loop_cost: LoopCost | None = None
) -> Timeline:
    """All ranks; `loop`: what a training loop adds to the step."""
    blocking = problem.cluster.device.kind == "cpu"
    loop_cost = loop_cost or LoopCost()
    listed = loop_cost.add_loop_stages(required_stages(problem, loads, ids_after))
    further = max(stage.lead for stage in listed) - TAIL_STEPS  # a loader worker runs ahead of all other stages
    order = simulate.expand_calls(listed, WARM_STEPS + COUNTED_STEPS + TAIL_STEPS + 2 * further)
    made = stage_tasks(loop_cost.apply_measured_pace(problem), placed, loads) | loop_cost.loop_tasks(problem)
    return simulate.simulate_calls(order, made, problem.cluster.num_ranks, blocking=blocking)


def predict_step(
    problem: Problem, placed: PlacedTables, loads: RankLoads, choices: Sequence[str] = tuple(IDS_AFTER)
) -> tuple[float, str]:
    """Of a step, and what ids are best issued behind, of these. Only ranks that are slowest at something are played: no
    other is ever waited for."""
    made = stage_tasks(problem, placed, loads)
    by_rank = np.array([task.seconds for task in made.values() if isinstance(task.seconds, tuple)])
    played = _undominated(by_rank.T)
    few = {
        name: replace(task, seconds=tuple(task.seconds_on(rank) for rank in played))
        if isinstance(task.seconds, tuple)
        else task
        for name, task in made.items()
    }
    blocking = problem.cluster.device.kind == "cpu"
    ends = {
        behind: counted_step_seconds(
            simulate.simulate_calls(_order(problem, loads, behind), few, len(played), blocking=blocking)
        )
        for behind in choices
    }
    best = min(choices, key=ends.__getitem__)
    return ends[best], best


def counted_step_seconds(timeline: Timeline) -> float:
    """Of one step among those of `timeline` or `seconds`."""
    return simulate.steady_step_seconds(timeline, WARM_STEPS - 1, TAIL_STEPS)


def _undominated(by_rank: np.ndarray) -> list[int]:
    """Ranks than which no other is as slow at everything; of equal ones the first."""
    found: list[int] = []
    for rank in np.lexsort(tuple(-column for column in by_rank.T[::-1])):
        if not any((by_rank[other] >= by_rank[rank]).all() for other in found):
            found.append(int(rank))
    return sorted(found)

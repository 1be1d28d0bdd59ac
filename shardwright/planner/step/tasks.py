"""Stage durations under a table placement, and the predicted step. Shape legend: R ranks, S stages."""

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

WARM_STEPS, COUNTED_STEPS, TAIL_STEPS = 3, 3, 3  # before and after: as many as the largest lead
MANY_ROWS = 1 << 16
CODEC_NAMES = MappingProxyType({"float16": "fp16", "bfloat16": "bf16"})


@dataclass(frozen=True, slots=True)
class RankLoads:
    """What each rank holds and does in one step; arrays are indexed by rank."""

    lookup_R: np.ndarray  # seconds
    update_R: np.ndarray  # seconds
    prefetch_R: np.ndarray  # seconds
    slow_tier_bytes_R: np.ndarray  # bytes of rows fetched from a slower memory tier; as many are written back
    bytes_R: np.ndarray  # bytes of tables and their optimizer state
    sent_bytes_R: np.ndarray  # bytes of vectors sent, in float32
    ids_R: np.ndarray  # ids received
    reduces_in_host: bool  # whether partial sums of vectors are added inside hosts
    replica_sum_seconds: float  # seconds of summing the gradients of data-parallel tables by row


def rank_loads(problem: Problem, placed: PlacedTables, fast_id_shares: Sequence[float]) -> RankLoads:
    """The loads of all ranks. `fast_id_shares`: by table, the share of ids with rows in the fastest tier."""
    num, device = problem.cluster.num_ranks, problem.cluster.device
    row_seconds = cache(partial(_row_seconds, device))
    units = [
        (unit, problem.table_load(unit.table_number, unit.sharding), unit.columns[1] - unit.columns[0])
        for unit in placed.units
    ]
    accesses = [
        (unit.lookups, round(width * load.weight_bytes), problem.distinct_share(load, unit.sharding))
        for unit, load, width in units
    ]
    lookup_R = placed.sum_by_rank(
        (ids * row_seconds("lookup", size, distinct) for ids, size, distinct in accesses), num, weight_by_lookups=True
    )
    update_R = placed.sum_by_rank(
        (ids * row_seconds("update", size, distinct) for ids, size, distinct in accesses), num, weight_by_lookups=True
    )
    slow_bytes = (
        ids * distinct * (1 - fast_id_shares[unit.table_number]) * load.row_bytes(width)
        for (unit, load, width), (ids, _, distinct) in zip(units, accesses, strict=True)
    )
    slow_R = placed.sum_by_rank(slow_bytes, num)
    bytes_R = placed.sum_by_rank((unit.bytes_ for unit in placed.units), num)
    sent_R = placed.sum_by_rank((unit.sent_bytes for unit in placed.units), num)
    ids_R, sums = placed.sum_by_rank((unit.lookups for unit in placed.units), num, weight_by_lookups=True), 0.0
    for number in placed.data_parallel_tables:
        load = problem.table_loads[number]
        num_ids, size = problem.local_batch_size * load.ids_per_sample, round(load.table.dim * load.weight_bytes)
        touched = min(load.table.rows, load.distinct_share * load.ids_per_sample * problem.batch_size)
        ids_R += num_ids
        lookup_R += num_ids * row_seconds("lookup", size, load.distinct_share)
        update_R += touched * row_seconds("update", size, 1.0)
        sums += num_ids * row_seconds("update", size, load.distinct_share) + block_tasks.memory_pass_seconds(
            device, 2 * size * load.table.rows
        )
        bytes_R += load.table.rows * load.row_bytes(load.table.dim)
    update_R += _replica_update_seconds(problem, placed) + _column_shard_update_seconds(problem, placed)
    reduces = problem.is_hierarchical and any(
        unit.sharding.reduces_in_host and load.pooled_vectors for unit, load, _ in units
    )
    lookup_R += primitives.find_price(device, "lookup", "float32").call_seconds
    update_R += primitives.find_price(device, "update", "float32").call_seconds
    return RankLoads(lookup_R, update_R, _copy_seconds(problem, slow_R), slow_R, bytes_R, sent_R, ids_R, reduces, sums)


def _replica_update_seconds(problem: Problem, placed: PlacedTables) -> np.ndarray:
    """Seconds by rank of updating replicas of tables.

    The rows of all replicas are deduplicated and their gradients summed; each distinct row is then updated once.
    """
    num, device = problem.cluster.num_ranks, problem.cluster.device
    received_R, seconds_R = np.zeros(num), np.zeros(num)
    for unit, ranks in zip(placed.units, placed.ranks, strict=True):
        if (replicas := unit.sharding.num_replicas) > 1:
            load, width = problem.table_load(unit.table_number, unit.sharding), unit.columns[1] - unit.columns[0]
            received, distinct = (k * load.distinct_rows_per_group(k) * replicas / len(ranks) for k in (replicas, 1))
            received_R[list(ranks)] += received
            row_bytes, share = round(width * load.weight_bytes), min(1.0, distinct / max(received, 1.0))
            seconds_R[list(ranks)] += received * _row_seconds(device, "update", 4 * width, share)
            seconds_R[list(ranks)] += distinct * _row_seconds(device, "update", row_bytes, 1.0)
    return seconds_R + overheads.ids_seconds(device, received_R, "distinct")


def _column_shard_update_seconds(problem: Problem, placed: PlacedTables) -> np.ndarray:
    """Seconds by rank of updating column shards with row-wise optimizer state.

    Gradients are summed by row; ranks exchange one float32 per row (all-to-all) with those that have its other columns.
    """
    num, device = problem.cluster.num_ranks, problem.cluster.device
    rows_R, seconds_R, shard_seconds = np.zeros(num), np.zeros(num), overheads.column_shard_seconds(device)
    for unit, ranks in zip(placed.units, placed.ranks, strict=True) if shard_seconds else ():
        load, row_bytes = problem.table_load(unit.table_number, unit.sharding), 4 * (unit.columns[1] - unit.columns[0])
        if unit.sharding.column_shards > 1 and load.state_bytes:
            rows = unit.lookups * problem.distinct_share(load, unit.sharding)
            rows_R[list(ranks)] += rows
            seconds_R[list(ranks)] += rows * _row_seconds(device, "update", row_bytes, 1.0) + shard_seconds
    if not rows_R.any():
        return seconds_R
    exchange = primitives.collective_cost(problem.cluster, "all_to_all", problem.level_names, round(4 * rows_R.max()))
    return seconds_R + exchange.seconds


def _row_seconds(device: Device, op: str, row_bytes: int, distinct: float) -> float:
    """Seconds of one row among many; `distinct` is the share of rows not yet in a cache."""
    first = _amortized_row_seconds(device, op, row_bytes)
    if not overheads.has_price(device, f"{op}.near", "float32"):
        return first
    return distinct * first + (1 - distinct) * min(first, _amortized_row_seconds(device, f"{op}.near", row_bytes))


def _amortized_row_seconds(device: Device, op: str, row_bytes: int) -> float:
    """Seconds of one row in a call with many rows, without the fixed cost of the call."""
    return (
        primitives.row_access_cost(device, op, MANY_ROWS, row_bytes).seconds
        - primitives.find_price(device, op, "float32").call_seconds
    ) / MANY_ROWS


def _copy_seconds(problem: Problem, slow_bytes_R: np.ndarray) -> np.ndarray:
    """Seconds by rank of fetching rows from the next memory tier and writing others back, both at once."""
    tiers = problem.cluster.device.tiers
    if not slow_bytes_R.any() or len(tiers) < 2:
        return np.zeros(len(slow_bytes_R))
    pairs = ((tiers[1].name, tiers[0].name), (tiers[0].name, tiers[1].name))
    cost = max(primitives.copy_cost(problem.cluster.device, 1 << 30, *pair).seconds for pair in pairs) / (1 << 30)
    return slow_bytes_R * cost


def stage_tasks(problem: Problem, placed: PlacedTables, loads: RankLoads) -> dict[str, Task]:
    """The task of each stage, by the stage's name."""
    cluster, precision, device = problem.cluster, problem.precision, problem.cluster.device
    reduce, vectors = traffic.vector_exchange_tasks(problem, placed, precision.vectors, backward=False)
    broadcast, gradients = traffic.vector_exchange_tasks(problem, placed, precision.gradients, backward=True)
    table_loads = problem.placed_loads(placed)
    size = problem.local_batch_size * sum(load.vectors * load.table.dim for load in table_loads) * 4
    decoding, encoding = (
        _codec_seconds(problem, np.array([size]), dtype)[0] for dtype in (precision.vectors, precision.gradients)
    )
    placing = overheads.columns_seconds(device, *_received_vectors(problem, placed))
    adding = overheads.columns_seconds(device, *_host_reduced_vectors(problem, placed))
    copying_R = np.array([overheads.columns_seconds(device, 1.0, bytes_ / 4) for bytes_ in loads.sent_bytes_R])
    pooling, summing = _local_pooling_seconds(problem, table_loads)
    exchange = traffic.replica_exchange_task(problem, placed)
    lookup_R = loads.lookup_R + _codec_seconds(problem, loads.sent_bytes_R, precision.vectors)
    update_R = loads.update_R + _codec_seconds(problem, loads.sent_bytes_R, precision.gradients)
    if cluster.num_ranks > 1:
        lookup_R, update_R = lookup_R + overheads.ids_seconds(device, loads.ids_R) / 2, update_R + copying_R
    tasks = {
        "read": Task(kind="read"),
        "to_device": Task(kind="copy"),
        "request": Task(seconds=_request_seconds(problem, placed, table_loads)),
        "lengths": traffic.even_all_to_all_task(problem, REQUEST_HEADER_BYTES * cluster.num_ranks),
        "ids": traffic.exchange_task(problem, traffic.id_traffic(problem, placed)),
        "prefetch": Task(seconds=tuple(loads.prefetch_R), kind="copy"),
        "lookup": Task(seconds=tuple(lookup_R)),
        "meet": _lengthen_task(reduce, 2 * adding) if reduce.is_collective else reduce,
        "vectors": vectors,
        "gradients": _concat_tasks(
            gradients, traffic.gradient_reduce_task(problem, traffic.data_parallel_gradient_bytes(problem, placed))
        ),
        "spread": _lengthen_task(broadcast, 2 * adding) if broadcast.is_collective else broadcast,
        "update": Task(
            seconds=tuple(update_R + exchange.seconds_on(0)),
            link_seconds=exchange.link_seconds,
            latency_seconds=exchange.latency_seconds,
        ),
        "emit": Task(),
        "step": Task(seconds=block_stages.optimizer_seconds(problem)),
    }
    overhead = overheads.stage_overhead_seconds(
        device,
        len(problem.workload.features),
        cluster.num_ranks - 1,
        len(placed.row_exchange_tables) + len(placed.data_parallel_tables),
    )
    extras = decoding + placing + pooling, encoding + placing + summing + loads.replica_sum_seconds
    if block_stages.expands_blocks(problem):
        extra = (time + overhead.pop(name, 0.0) for name, time in zip(("top", "top.backward"), extras, strict=True))
        tasks |= block_stages.body_tasks(problem, *extra)
        tasks["gradients"] = replace(
            tasks["gradients"],
            is_collective=gradients.is_collective,
            levels=gradients.levels,
            compute_slowdown=gradients.compute_slowdown,
        )
    else:
        tasks |= _bottom_and_top_tasks(problem, placed, *extras)
    return tasks | {name: _add_overhead(tasks[name], seconds) for name, seconds in overhead.items()}


def _bottom_and_top_tasks(
    problem: Problem, placed: PlacedTables, vector_seconds: float, gradient_seconds: float
) -> dict[str, Task]:
    """The dense model as bottom (needs no vectors) and top; the top's passes include handling vectors."""
    bottom = [block for block in problem.workload.blocks if not block.needs_vectors]
    top = [block for block in problem.workload.blocks if block.needs_vectors]
    replica_bytes = traffic.data_parallel_gradient_bytes(problem, placed)
    return {
        "bottom": block_tasks.pass_task(problem, bottom, "forward"),
        "top": _lengthen_task(block_tasks.pass_task(problem, top, "forward"), vector_seconds),
        "top.backward": _lengthen_task(block_tasks.backward_task(problem, top), gradient_seconds),
        "reduce": traffic.gradient_reduce_task(problem, block_tasks.total_parameter_bytes(top) + replica_bytes),
        "bottom.backward": block_tasks.backward_task(problem, bottom),
        "reduce.bottom": traffic.gradient_reduce_task(problem, block_tasks.total_parameter_bytes(bottom)),
    }


def _request_seconds(problem: Problem, placed: PlacedTables, table_loads: Sequence[TableLoad]) -> float:
    """Seconds of turning a rank's ids into outgoing requests.

    Ids are deduplicated for row exchange; ids of other tables with row shards are split by row range.
    """
    local_loads = [load.local_pooling for load in table_loads if load.local_pooling is not None]
    split_ids = (
        table_loads[number].ids_per_sample
        for number in placed.units_by_table
        if placed.num_row_shards(number) > 1 and not table_loads[number].local_pooling
    )
    ids = {
        "ids": sum(load.ids_per_sample for load in table_loads) / 2,
        "ids.cut": sum(split_ids),
        "distinct": sum(load.ids_per_sample for load in local_loads),
    }
    device, batch = problem.cluster.device, problem.local_batch_size
    return sum(float(overheads.ids_seconds(device, np.array([batch * num]), op)[0]) for op, num in ids.items())


def _local_pooling_seconds(problem: Problem, table_loads: Sequence[TableLoad]) -> tuple[float, float]:
    """Seconds of pooling exchanged rows, which are in caches, and of summing gradients by row in backward."""
    if problem.cluster.num_ranks == 1:
        return 0.0, 0.0
    device, seconds = problem.cluster.device, {"lookup": 0.0, "update": 0.0}
    vectors = columns = 0.0
    for load in (table_load.local_pooling for table_load in table_loads if table_load.local_pooling is not None):
        for op in seconds:
            seconds[op] += (
                problem.local_batch_size * load.ids_per_sample * _row_seconds(device, op, 4 * load.table.dim, 0.0)
            )
        vectors += problem.local_batch_size * load.pooled_vectors
        columns += problem.local_batch_size * load.pooled_vectors * load.table.dim
    copy_seconds = overheads.columns_seconds(device, vectors, columns)
    return seconds["lookup"] + copy_seconds, seconds["update"] + copy_seconds


def _received_vectors(problem: Problem, placed: PlacedTables) -> tuple[float, float]:
    """Vectors and partial sums that a rank copies into place for its local batch; and their columns in all."""
    if problem.cluster.num_ranks == 1:
        return 0.0, 0.0
    vectors = columns = 0.0
    for unit, ranks in zip(placed.units, placed.ranks, strict=True):
        load, sums = problem.table_load(unit.table_number, unit.sharding), len(ranks) // unit.sharding.num_replicas
        if problem.is_hierarchical and unit.sharding.num_replicas == 1:
            sums = unit.sharding.num_row_hosts(problem.cluster)
        num_vectors = problem.local_batch_size * (load.pooled_vectors * sums + load.unpooled_vectors)
        vectors += num_vectors
        columns += num_vectors * (unit.columns[1] - unit.columns[0])
    for load in (problem.table_loads[number] for number in placed.data_parallel_tables):
        vectors += problem.local_batch_size * load.vectors
        columns += problem.local_batch_size * load.vectors * load.table.dim
    return vectors, columns


def _host_reduced_vectors(problem: Problem, placed: PlacedTables) -> tuple[float, float]:
    """Partial sums that a rank copies into messages or adds up for its host; and their columns in all."""
    if not problem.is_hierarchical:
        return 0.0, 0.0
    vectors = columns = 0.0
    for unit, ranks in zip(placed.units, placed.ranks, strict=True):
        if unit.sharding.reduces_in_host:  # on each host, a rank adds for the ranks of equal position on all hosts
            share = len(ranks) / problem.cluster.num_ranks
            num = problem.batch_size * problem.table_load(unit.table_number, unit.sharding).pooled_vectors * share
            vectors += num
            columns += num * (unit.columns[1] - unit.columns[0])
    return vectors, columns


def _lengthen_task(task: Task, seconds: float) -> Task:
    """The task with more seconds; no longer a collective, only its flops and link times are kept."""
    return Task(
        seconds=task.seconds_on(0) + seconds,
        flops=task.flops,
        link_seconds=task.link_seconds,
        latency_seconds=task.latency_seconds,
    )


def _concat_tasks(task: Task, after: Task) -> Task:
    """Two messages, one after the other, as a single task."""
    total = _lengthen_task(task, after.seconds_on(0))
    return replace(
        total,
        link_seconds=task.link_seconds + after.link_seconds,
        latency_seconds=task.latency_seconds + after.latency_seconds,
    )


def _add_overhead(task: Task, seconds: float) -> Task:
    total = (
        tuple(time + seconds for time in task.seconds) if isinstance(task.seconds, tuple) else task.seconds + seconds
    )
    return replace(task, seconds=total)


def _codec_seconds(problem: Problem, bytes_R: np.ndarray, dtype: Dtype) -> np.ndarray:
    """Seconds of encoding or of decoding vectors of `bytes_R` bytes in float32: half the price of both."""
    device = problem.cluster.device
    if dtype not in CODEC_NAMES:
        return np.zeros(len(bytes_R))
    if overheads.has_price(device, "codec", CODEC_NAMES[dtype]):
        price = primitives.find_price(device, "codec", CODEC_NAMES[dtype])
        return (price.call_seconds + bytes_R * price.seconds_per_byte) / 2
    return 1.5 * bytes_R / device.tiers[0].read_bytes_per_second


def _step_calls(problem: Problem, loads: RankLoads, ids_after: str) -> list[simulate.Call]:
    return simulate.expand_calls(required_stages(problem, loads, ids_after), WARM_STEPS + COUNTED_STEPS + TAIL_STEPS)


def required_stages(problem: Problem, loads: RankLoads, ids_after: str) -> tuple[Stage, ...]:
    """The stages that this placement needs, in issue order."""
    return recommendation_stages(
        bool(loads.slow_tier_bytes_R.any()), ids_after, loads.reduces_in_host, block_stages.stage_bodies(problem)
    )


def predict_timeline(
    problem: Problem, placed: PlacedTables, loads: RankLoads, ids_after: str, loop_cost: LoopCost | None = None
) -> Timeline:
    """The predicted timeline of all ranks. `loop_cost`: what the training loop adds to each step."""
    blocking = problem.cluster.device.kind == "cpu"
    loop_cost = loop_cost or LoopCost()
    stages = loop_cost.add_loop_stages(required_stages(problem, loads, ids_after))
    extra_lead = max(stage.lead for stage in stages) - TAIL_STEPS  # a loader worker runs ahead of all other stages
    calls = simulate.expand_calls(stages, WARM_STEPS + COUNTED_STEPS + TAIL_STEPS + 2 * extra_lead)
    tasks = stage_tasks(loop_cost.apply_measured_pace(problem), placed, loads) | loop_cost.loop_tasks(problem)
    return simulate.simulate_calls(calls, tasks, problem.cluster.num_ranks, blocking=blocking)


def predict_step(
    problem: Problem, placed: PlacedTables, loads: RankLoads, choices: Sequence[str] = tuple(IDS_AFTER)
) -> tuple[float, str]:
    """Seconds of a step, and the best of `choices` for `ids_after`.

    Simulates only ranks that are slowest at some stage; the others never delay a step.
    """
    tasks = stage_tasks(problem, placed, loads)
    seconds_SR = np.array([task.seconds for task in tasks.values() if isinstance(task.seconds, tuple)])
    ranks = _undominated_ranks(seconds_SR.T)
    chosen = {
        name: replace(task, seconds=tuple(task.seconds_on(rank) for rank in ranks))
        if isinstance(task.seconds, tuple)
        else task
        for name, task in tasks.items()
    }
    blocking = problem.cluster.device.kind == "cpu"
    seconds = {
        after: counted_step_seconds(
            simulate.simulate_calls(_step_calls(problem, loads, after), chosen, len(ranks), blocking=blocking)
        )
        for after in choices
    }
    best = min(choices, key=seconds.__getitem__)
    return seconds[best], best


def counted_step_seconds(timeline: Timeline) -> float:
    """Seconds of one step of `timeline`, averaged over the counted steps (without warm-up and tail)."""
    return simulate.steady_step_seconds(timeline, WARM_STEPS - 1, TAIL_STEPS)


def _undominated_ranks(seconds_RS: np.ndarray) -> list[int]:
    """Ranks than which no other is as slow at every stage (Pareto front); of equal ranks the first."""
    front: list[int] = []
    for rank in np.lexsort(tuple(-column for column in seconds_RS.T[::-1])):
        if not any((seconds_RS[other] >= seconds_RS[rank]).all() for other in front):
            front.append(int(rank))
    return sorted(front)

"""Stage durations under a table placement, and the predicted step. Shape legend: R ranks, S stages."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np

from shardwright.planner.price import overheads, primitives
from shardwright.planner.price.row_prices import Op, RowPrices
from shardwright.planner.problem import PlacedTables, Problem
from shardwright.planner.step import block_stages, block_tasks, row_moves, traffic
from shardwright.planner.step.copy_tasks import copied_loads, copy_tasks
from shardwright.planner.step.rank_calls import Task
from shardwright.planner.step.served_tasks import served_tasks
from shardwright.planner.step.stages import pipeline_stages, step_stages, with_copies
from shardwright.planner.tables.sharding import TableLoad
from shardwright.spec.plan import Stage
from shardwright.spec.wire import REQUEST_HEADER_BYTES
from shardwright.spec.workload import Dtype

CODEC_NAMES = MappingProxyType({"float16": "fp16", "bfloat16": "bf16"})


@dataclass(frozen=True, slots=True)
class RankLoads:
    """What each rank holds and does in a step; arrays are indexed by rank."""

    lookup_R: np.ndarray  # seconds
    update_R: np.ndarray  # seconds
    expect_R: np.ndarray  # seconds of the thread that finds distinct rows and lines
    prefetch_R: np.ndarray  # seconds
    moved_bytes_R: np.ndarray  # bytes of rows copied from slower memory tiers; as many are written back
    bytes_R: np.ndarray  # bytes of tables and their optimizer state
    sent_bytes_R: np.ndarray  # bytes of vectors sent, in float32
    ids_R: np.ndarray  # ids received
    reduces_in_host: bool  # whether partial sums of vectors are added inside hosts
    replica_sum_seconds: float  # seconds of summing the gradients of data-parallel tables by row
    has_copies: bool = False  # whether rows are read from copies


def rank_loads(problem: Problem, placed: PlacedTables, found: Sequence[Sequence[float]]) -> RankLoads:
    """The loads of all ranks. `found`: by table and memory tier, the share of a batch's distinct rows found there."""
    num, device = problem.cluster.num_ranks, problem.cluster.device
    prices = RowPrices(device)
    units = [(unit, problem.unit_load(unit)) for unit in placed.units]
    accesses = [
        (unit.lookups, round(unit.width * load.weight_bytes), problem.distinct_share(load, unit.sharding))
        for unit, load in units
    ]
    ops: tuple[Op, Op] = ("lookup", "update")
    lookup_R, update_R = (
        placed.sum_by_rank(
            (ids * prices.id_seconds(op, size, distinct) for ids, size, distinct in accesses),
            num,
            weight_by_lookups=True,
        )
        + placed.sum_by_rank(
            (prices.vector_seconds(op, unit.width, unit.vectors, unit.lookups) for unit in placed.units),
            num,
            weight_by_lookups=op == "update",
        )
        for op in ops
    )
    moves = row_moves.moves_by_rank(problem, placed, found)
    bytes_R = placed.sum_by_rank((unit.bytes_ for unit in placed.units), num)
    sent_R = placed.sum_by_rank((unit.sent_bytes for unit in placed.units), num)
    ids_R, sums = placed.sum_by_rank((unit.lookups for unit in placed.units), num, weight_by_lookups=True), 0.0
    for number in placed.data_parallel_tables:
        load = problem.table_loads[number]
        num_ids, size = problem.local_batch_size * load.ids_per_sample, round(load.table.dim * load.weight_bytes)
        distinct_rows = min(load.table.rows, load.distinct_share * load.ids_per_sample * problem.batch_size)
        ids_R += num_ids
        lookup_seconds, sum_seconds = (
            num_ids * prices.id_seconds(op, size, load.distinct_share)
            + prices.vector_seconds(op, load.table.dim, problem.local_batch_size * load.vectors, num_ids)
            for op in ops
        )
        lookup_R += lookup_seconds
        update_R += prices.sum_seconds(distinct_rows, load.table.dim, row_bytes=size)
        sums += sum_seconds + block_tasks.memory_pass_seconds(device, 2 * size * load.table.rows)
        bytes_R += load.table_bytes
    update_R += _replica_update_seconds(problem, placed, prices) + _column_shard_update_seconds(problem, placed, prices)
    has_sums = any(unit.sharding.reduces_in_host and load.pooled_vectors for unit, load in units)
    reduces = problem.cluster.is_hierarchical and has_sums
    if problem.table_loads:
        lookup_R += primitives.find_price(device, "lookup", "float32").call_seconds
        update_R += primitives.find_price(device, "update", "float32").call_seconds
    moved = moves.place_R, moves.copy_R, moves.bytes_R
    copies = bool(copied_loads(problem, placed) or placed.served_tables)
    return RankLoads(lookup_R, update_R, *moved, bytes_R, sent_R, ids_R, reduces, sums, copies)


def _replica_update_seconds(problem: Problem, placed: PlacedTables, prices: RowPrices) -> np.ndarray:
    """Seconds by rank of updating replicas of tables.

    The rows of all replicas are deduplicated and their gradients summed; each distinct row is then updated once.
    """
    num, device = problem.cluster.num_ranks, problem.cluster.device
    received_R, seconds_R = np.zeros(num), np.zeros(num)
    for unit, ranks in placed.pairs:
        if (replicas := unit.sharding.num_replicas) > 1:
            load = problem.unit_load(unit)
            rows, distinct = (k * load.distinct_rows_per_group(k) * replicas / len(ranks) for k in (replicas, 1))
            received_R[list(ranks)] += rows
            row_bytes, share = round(unit.width * load.weight_bytes), min(1.0, distinct / max(rows, 1.0))
            seconds_R[list(ranks)] += prices.sum_seconds(rows, unit.width, row_bytes=4 * unit.width, distinct=share)
            seconds_R[list(ranks)] += prices.sum_seconds(distinct, unit.width, row_bytes=row_bytes)
    return seconds_R + overheads.ids_seconds(device, received_R, "distinct")


def _column_shard_update_seconds(problem: Problem, placed: PlacedTables, prices: RowPrices) -> np.ndarray:
    """Seconds by rank of updating column shards with row-wise optimizer state.

    Gradients are summed by row; ranks with columns of the same row exchange a float32 per row (all-to-all).
    """
    num, device = problem.cluster.num_ranks, problem.cluster.device
    rows_R, seconds_R, shard_seconds = np.zeros(num), np.zeros(num), overheads.column_shard_seconds(device)
    for unit, ranks in placed.pairs if shard_seconds else ():
        load = problem.unit_load(unit)
        if unit.sharding.column_shards > 1 and load.state_bytes:
            rows = unit.lookups * problem.distinct_share(load, unit.sharding)
            rows_R[list(ranks)] += rows
            seconds_R[list(ranks)] += prices.sum_seconds(rows, unit.width, row_bytes=4 * unit.width) + shard_seconds
    if not rows_R.any():
        return seconds_R
    exchange = primitives.collective_cost(problem.cluster, "all_to_all", problem.level_names, round(4 * rows_R.max()))
    return seconds_R + exchange.seconds


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
        "expect": Task(seconds=tuple(loads.expect_R), kind="copy"),
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
    added = _tasks_of_copies(problem, placed)
    if "update" in added:
        tasks["update"] = tasks["update"].lengthen(added.pop("update").seconds_on(0))
    tasks |= added
    overhead = call_seconds(problem, placed)
    extras = decoding + placing + pooling, encoding + placing + summing + loads.replica_sum_seconds
    if block_stages.expands_blocks(problem):
        extra = (time + overhead.pop(name, 0.0) for name, time in zip(("top", "top.backward"), extras, strict=True))
        tasks |= block_stages.body_tasks(problem, *extra)
    else:
        tasks |= _bottom_and_top_tasks(problem, *extras)
    return tasks | {name: tasks[name].lengthen(seconds) for name, seconds in overhead.items()}


def _tasks_of_copies(problem: Problem, placed: PlacedTables) -> dict[str, Task]:
    """The tasks of stages with copies of rows of ranks or servers; with "update", what they add to this stage."""
    if placed.served_tables:
        return served_tasks(problem, [problem.row_exchange_loads[number] for number in placed.served_tables])
    copied = copied_loads(problem, placed)
    return copy_tasks(problem, copied) if copied else {}


def call_seconds(problem: Problem, placed: PlacedTables) -> dict[str, float]:
    """Seconds by stage of small torch calls, which do not grow with the batch."""
    num_features, num_others = len(problem.workload.features), problem.cluster.num_ranks - 1
    num_tables = len(placed.row_exchange_tables) + len(placed.data_parallel_tables)
    return overheads.stage_overhead_seconds(problem.cluster.device, num_features, num_others, num_tables)


def _bottom_and_top_tasks(problem: Problem, vector_seconds: float, gradient_seconds: float) -> dict[str, Task]:
    """The dense model as bottom (needs no vectors) and top; the top's passes include the work on vectors."""
    bottom, top = block_tasks.split_blocks(problem)
    return {
        "bottom": block_tasks.pass_task(problem, bottom, "forward"),
        "top": _lengthen_task(block_tasks.pass_task(problem, top, "forward"), vector_seconds),
        "top.backward": _lengthen_task(block_tasks.backward_task(problem, top), gradient_seconds),
        "reduce": traffic.gradient_reduce_task(problem, block_tasks.total_parameter_bytes(top)),
        "bottom.backward": block_tasks.backward_task(problem, bottom),
        "reduce.bottom": traffic.gradient_reduce_task(problem, block_tasks.total_parameter_bytes(bottom)),
    }


def _request_seconds(problem: Problem, placed: PlacedTables, table_loads: Sequence[TableLoad]) -> float:
    """Seconds of building a rank's outgoing requests.

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
    if problem.cluster.num_ranks == 1 and not problem.served_tables:
        return 0.0, 0.0
    device, prices = problem.cluster.device, RowPrices(problem.cluster.device)
    seconds: dict[Op, float] = {"lookup": 0.0, "update": 0.0}
    vectors = columns = 0.0
    for load in (table_load.local_pooling for table_load in table_loads if table_load.local_pooling is not None):
        ids, all_vectors = (problem.local_batch_size * num for num in (load.ids_per_sample, load.vectors))
        for op in seconds:
            seconds[op] += ids * prices.id_seconds(op, 4 * load.table.dim, 0.0)
            seconds[op] += prices.vector_seconds(op, load.table.dim, all_vectors, ids)
        vectors += problem.local_batch_size * load.pooled_vectors
        columns += problem.local_batch_size * load.pooled_vectors * load.table.dim
    copy_seconds = overheads.columns_seconds(device, vectors, columns)
    return seconds["lookup"] + copy_seconds, seconds["update"] + copy_seconds


def _received_vectors(problem: Problem, placed: PlacedTables) -> tuple[float, float]:
    """Vectors and partial sums that a rank copies into place for its local batch, and the number of their values."""
    if problem.cluster.num_ranks == 1:
        return 0.0, 0.0
    vectors = columns = 0.0
    for unit, ranks in placed.pairs:
        load, sums = problem.unit_load(unit), len(ranks) // unit.sharding.num_replicas
        if problem.cluster.is_hierarchical and unit.sharding.num_replicas == 1:
            sums = unit.sharding.num_row_hosts(problem.cluster)
        num_vectors = problem.local_batch_size * (load.pooled_vectors * sums + load.unpooled_vectors)
        vectors += num_vectors
        columns += num_vectors * unit.width
    for load in (problem.table_loads[number] for number in placed.data_parallel_tables):
        vectors += problem.local_batch_size * load.vectors
        columns += problem.local_batch_size * load.vectors * load.table.dim
    return vectors, columns


def _host_reduced_vectors(problem: Problem, placed: PlacedTables) -> tuple[float, float]:
    """Partial sums that a rank copies into messages or adds for its host, and the number of their values."""
    if not problem.cluster.is_hierarchical:
        return 0.0, 0.0
    vectors = columns = 0.0
    for unit, ranks in placed.pairs:
        if unit.sharding.reduces_in_host:  # a rank adds sums for the ranks at its own position in every host
            share = len(ranks) / problem.cluster.num_ranks
            num = problem.batch_size * problem.unit_load(unit).pooled_vectors * share
            vectors += num
            columns += num * unit.width
    return vectors, columns


def _lengthen_task(task: Task, seconds: float) -> Task:
    """The task with `seconds` more, as computation: of its other fields only flops and link times remain."""
    return Task(
        seconds=task.seconds_on(0) + seconds,
        flops=task.flops,
        link_seconds=task.link_seconds,
        latency_seconds=task.latency_seconds,
    )


def _concat_tasks(task: Task, after: Task) -> Task:
    """Two collectives over the same ranks, one after the other, as a single task."""
    parts = [(part.seconds_on(0), part.link_share) for part in (task, after)]
    seconds = sum(part_seconds for part_seconds, _ in parts)
    return replace(
        task if task.is_collective else after,
        seconds=seconds,
        link_share=sum(part_seconds * share for part_seconds, share in parts) / seconds if seconds else 1.0,
        bytes_=task.bytes_ + after.bytes_,
        link_seconds=task.link_seconds + after.link_seconds,
        latency_seconds=task.latency_seconds + after.latency_seconds,
    )


def _codec_seconds(problem: Problem, bytes_R: np.ndarray, dtype: Dtype) -> np.ndarray:
    """Seconds of encoding or of decoding vectors of `bytes_R` bytes in float32: half the price of both."""
    device = problem.cluster.device
    if dtype not in CODEC_NAMES:
        return np.zeros(len(bytes_R))
    if overheads.has_price(device, "codec", CODEC_NAMES[dtype]):
        price = primitives.find_price(device, "codec", CODEC_NAMES[dtype])
        return (price.call_seconds + bytes_R * price.seconds_per_byte) / 2
    return 1.5 * bytes_R / device.tiers[0].read_bytes_per_second


def required_stages(problem: Problem, loads: RankLoads, ids_after: str) -> tuple[Stage, ...]:
    """The stages that this placement needs, in issue order."""
    if problem.pipeline is not None:
        return pipeline_stages()
    stages = step_stages(
        has_tables=bool(problem.workload.tables),
        prefetch=bool(loads.moved_bytes_R.any()),
        ids_after=ids_after,
        host_reduce=loads.reduces_in_host,
        bodies=block_stages.stage_bodies(problem),
    )
    return with_copies(stages, of_servers=bool(problem.served_tables)) if loads.has_copies else stages

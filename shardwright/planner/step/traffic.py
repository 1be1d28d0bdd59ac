"""The messages of a step: bytes from rank to rank, and the tasks of the collectives that send them.

Shape legend: R ranks (RR: from, to), C replicas, N ranks of a replica.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from operator import mul

import numpy as np

from shardwright.planner.memory import dense_model
from shardwright.planner.price import primitives
from shardwright.planner.price.axis_groups import AxisGroups, collective_links, group_cost
from shardwright.planner.problem import PlacedTables, Problem
from shardwright.planner.step.rank_calls import Task
from shardwright.planner.tables.sharding import ShardUnit
from shardwright.spec.wire import ID_BYTES, LENGTH_BYTES, ROW_ID_BYTES
from shardwright.spec.workload import DTYPE_BYTES, Block, Dtype

SizedCollective = tuple[str, AxisGroups, int]  # collective, groups, bytes


def even_all_to_all_task(problem: Problem, bytes_: float) -> Task:
    """An all-to-all over all ranks in which every rank sends `bytes_`, in equal parts to all."""
    if problem.cluster.num_ranks == 1:
        return Task()
    cost = primitives.collective_cost(problem.cluster, "all_to_all", problem.level_names, max(1, round(bytes_)))
    return collective_task(problem.all_ranks, "all_to_all", cost.seconds, cost.bytes_, cost.link_share)


def collective_task(groups: AxisGroups, op: str, seconds: float, bytes_: int, link_share: float = 1.0) -> Task:
    """A collective in these groups as a task; all groups are in it at the same time."""
    return Task(
        seconds=seconds,
        ranks=groups.within or None,
        is_collective=True,
        levels=groups.level_names,
        links=collective_links(groups, groups.within),
        link_share=link_share,
        compute_slowdown=primitives.compute_slowdown(groups.cluster, op, groups.level_names, max(bytes_, 1)),
        slowdown=primitives.collective_slowdown(groups.cluster, op, groups.level_names, max(bytes_, 1)),
        bytes_=bytes_,
        link_seconds=seconds,
        latency_seconds=min(seconds, group_cost(groups, op, 1).seconds),
    )


def data_parallel_gradient_bytes(problem: Problem, placed: PlacedTables) -> int:
    """Bytes of the gradients, in float32, of tables with a replica on every rank."""
    return 4 * sum(problem.table_loads[number].num_values for number in placed.data_parallel_tables)


def gradient_wire_bytes(problem: Problem, bytes_: float) -> int:
    """Bytes on the wire of dense gradients that have `bytes_` in float32."""
    return round(bytes_ * DTYPE_BYTES[problem.precision.dense_gradients] / 4)


def _reduce_ops(problem: Problem) -> tuple[str, ...]:
    """The collectives that sum dense gradients over all ranks.

    Reduced-precision gradients of CPUs on one host: all-to-all, local sum, all-gather. With several hosts they are
    first summed inside each host, in full precision, which takes little time; on GPUs NCCL's rings sum them.
    """
    uses_all_reduce = (
        problem.precision.dense_gradients == "float32"
        or problem.cluster.is_hierarchical
        or problem.cluster.device.kind == "cuda"
    )
    return ("all_reduce",) if uses_all_reduce else ("all_to_all", "all_gather")


def gradient_reduce_task(
    problem: Problem, bytes_: float, blocks: Sequence[Block] = (), *, sustained: bool = False
) -> Task:
    """The sum of dense gradients over all ranks, and of those of split experts in `blocks` over their replicas.
    `sustained`: in a long series of collectives."""
    groups = problem.sample_groups
    if not bytes_ or groups.size == 1:
        return Task()
    ops, size = _reduce_ops(problem), max(1, gradient_wire_bytes(problem, bytes_))
    costs = [group_cost(groups, op, size, sustained=sustained) for op in ops]
    seconds, sent_bytes = sum(cost.seconds for cost in costs), sum(cost.bytes_ for cost in costs)
    experts = expert_reduce_task(problem, blocks)
    on_wire = sum(cost.link_share * cost.seconds for cost in costs) + experts.link_share * experts.seconds_on(0)
    seconds += experts.seconds_on(0)
    return collective_task(groups, ops[0], seconds, sent_bytes, min(1.0, on_wire / seconds))


def expert_reduce_task(problem: Problem, blocks: Sequence[Block]) -> Task:
    """The sum of the gradients of a rank's own experts in these blocks over their replicas."""
    groups, bytes_ = problem.expert_replicas, problem.own_expert_bytes(blocks)
    if groups is None or not bytes_:
        return Task()
    cost = group_cost(groups, "all_reduce", max(1, gradient_wire_bytes(problem, bytes_)), sustained=True)
    return collective_task(groups, "all_reduce", cost.seconds, cost.bytes_, cost.link_share)


def id_traffic(problem: Problem, placed: PlacedTables) -> np.ndarray:
    """Bytes of outgoing requests (ids and bag lengths), from every rank to the ranks that hold their rows."""
    num, batch = problem.cluster.num_ranks, problem.batch_size
    total_RR = np.zeros((num, num))
    for replicas, group in placed.by_num_replicas.items():
        received_R = group.sum_by_rank((unit.lookups * ID_BYTES for unit in group.units), num, weight_by_lookups=True)
        bags = (batch / replicas * LENGTH_BYTES * load.pooled_vectors for load in map(problem.unit_load, group.units))
        total_RR += _even_traffic(received_R + group.sum_by_rank(bags, num), replicas).T
    return total_RR


def _even_traffic(bytes_R: np.ndarray, num_replicas: int) -> np.ndarray:
    """Traffic of ranks that each send `bytes_R` in equal parts to all ranks of their replica group."""
    group_size = len(bytes_R) // num_replicas
    group = np.arange(len(bytes_R)) // group_size
    return np.where(group[:, None] == group, (bytes_R / group_size)[:, None], 0.0)


def replica_traffic(problem: Problem, placed: PlacedTables) -> tuple[np.ndarray, np.ndarray]:
    """Bytes of row ids and of gradients that replicas exchange before the update."""
    num = problem.cluster.num_ranks
    ids_RR, gradients_RR = np.zeros((num, num)), np.zeros((num, num))
    for replicas, group in placed.by_num_replicas.items():
        for unit, ranks in group.pairs if replicas > 1 else ():
            ranks_CN = np.array(ranks).reshape(replicas, -1)
            rows = problem.unit_load(unit).distinct_rows_per_group(replicas) / ranks_CN.shape[1]
            ids_RR[ranks_CN[:, None], ranks_CN] += rows * ROW_ID_BYTES
            gradients_RR[ranks_CN[:, None], ranks_CN] += rows * 4 * unit.width
    return ids_RR, gradients_RR


def replica_exchange_task(problem: Problem, placed: PlacedTables) -> Task:
    """The all-to-alls between replicas, one after the other: row counts, row ids, gradients."""
    ids_RR, gradients_RR = replica_traffic(problem, placed)
    counts_RR = np.where(ids_RR > 0, float(ROW_ID_BYTES), 0.0)
    tasks = [exchange_task(problem, bytes_RR) for bytes_RR in (counts_RR, ids_RR, gradients_RR)]
    seconds = sum(task.seconds_on(0) for task in tasks)
    return Task(seconds=seconds, link_seconds=seconds, latency_seconds=sum(task.latency_seconds for task in tasks))


def step_traffic(problem: Problem, placed: PlacedTables) -> np.ndarray:
    """Bytes of all messages of a step, from rank to rank."""
    precision = problem.precision
    total_RR = id_traffic(problem, placed) + sum(replica_traffic(problem, placed))
    forward = vector_hops(problem, placed, precision.vectors, backward=False)
    backward = vector_hops(problem, placed, precision.gradients, backward=True)
    total_RR = total_RR + sum(forward) + sum(backward)
    return total_RR + dense_traffic(problem, data_parallel_gradient_bytes(problem, placed))


def dense_traffic(problem: Problem, replicated: int = 0) -> np.ndarray:
    """Bytes of the collectives of the dense model in a step, from rank to rank; `replicated` as below."""
    return _collective_traffic(problem, _dense_collectives(problem, replicated)) + expert_traffic(problem)


def expert_traffic(problem: Problem) -> np.ndarray:
    """Bytes of the rows of experts in a step, from rank to rank."""
    return _collective_traffic(problem, _expert_exchanges(problem))


def _collective_traffic(problem: Problem, collectives: Iterable[SizedCollective]) -> np.ndarray:
    total_RR = np.zeros((problem.cluster.num_ranks, problem.cluster.num_ranks))
    for op, groups, bytes_ in collectives:
        total_RR = total_RR + sum(round_.traffic_RR for round_ in groups.rounds(op, bytes_))
    return total_RR


def _dense_collectives(problem: Problem, replicated: int) -> Iterator[SizedCollective]:
    """Collectives of the dense model in a step.

    Sharded parameters are all-gathered for both passes and their gradients reduce-scattered, then all-reduced over
    replicas. Other gradients are all-reduced; `replicated`: bytes of the gradients of data-parallel tables.
    """
    total = sum(block.parameter_bytes for block in problem.blocks if dense_model.needs_unshard(problem, block))
    for op in ("all_gather", "all_gather", "reduce_scatter"):
        yield from collectives_by_level(problem, op, total)
    shard_bytes = gradient_wire_bytes(problem, total / problem.shard_groups.size)
    if shard_bytes and problem.replica_groups.levels:
        yield "all_reduce", problem.replica_groups, shard_bytes
    dense_bytes = sum(block.parameter_bytes for block in problem.blocks)
    reduce_bytes = gradient_wire_bytes(problem, dense_bytes - total + replicated)
    if reduce_bytes and problem.sample_groups.size > 1:
        yield from ((op, problem.sample_groups, reduce_bytes) for op in _reduce_ops(problem))
    expert_bytes = gradient_wire_bytes(problem, problem.own_expert_bytes(problem.blocks))
    if expert_bytes and problem.expert_replicas is not None:
        yield "all_reduce", problem.expert_replicas, expert_bytes


def _expert_exchanges(problem: Problem) -> Iterator[SizedCollective]:
    for part in (part for block in problem.blocks for part in problem.experts_of(block)):
        rows = part.mixture.rows * problem.local_batch_share  # there and back, in both passes
        row_bytes = 2 * (part.mixture.row_bytes + part.mixture.result_bytes)
        groups = AxisGroups(problem.cluster, problem.mesh_axes, part.plan.axes, problem.chunk_ranks)
        yield "all_to_all", groups, round(rows * row_bytes)


def collectives_by_level(problem: Problem, op: str, bytes_: int) -> list[SizedCollective]:
    """The collectives of an all-gather or reduce-scatter of sharded parameters.

    GPUs: a single NCCL ring over all shard levels. CPUs: a collective per level, where an all-gather is an all-to-all.
    """
    groups = problem.shard_groups
    if not groups.levels or not bytes_:
        return []
    if problem.cluster.device.kind == "cuda":
        return [("all_gather", groups, bytes_)]
    group_sizes = [1, *accumulate((level.num for level in groups.levels), mul)][:-1]
    op = "all_to_all" if op == "all_gather" else op
    parts = zip(groups.by_level, group_sizes, strict=True)
    return [(op, part, max(1, bytes_ // size)) for part, size in parts]


def exchange_task(problem: Problem, traffic_RR: np.ndarray) -> Task:
    """An all-to-all with these bytes from rank to rank; traffic of a rank with itself is set to 0."""
    np.fill_diagonal(traffic_RR, 0.0)
    if not traffic_RR.any():
        return Task()
    cost = primitives.all_to_all_v_cost(problem.cluster, problem.level_names, traffic_RR)
    return collective_task(problem.all_ranks, "all_to_all", cost.seconds, cost.bytes_, cost.link_share)


def vector_exchange_tasks(problem: Problem, placed: PlacedTables, dtype: Dtype, *, backward: bool) -> tuple[Task, Task]:
    """The exchange inside hosts (host reduce; backward: host broadcast), and the exchange over all ranks."""
    host_RR, rest_RR = vector_hops(problem, placed, dtype, backward=backward)
    return exchange_task(problem, host_RR), exchange_task(problem, rest_RR)


def vector_hops(
    problem: Problem, placed: PlacedTables, dtype: Dtype, *, backward: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Bytes of vectors (`backward`: gradients) inside hosts, for the host reduce, and over all ranks.

    Where several ranks of a host hold rows, each of them adds the partial sums for the ranks at its own position in
    every host, and sends the sums to those ranks.
    """
    num, ranks_per_host = problem.cluster.num_ranks, problem.cluster.ranks_per_host
    ranks = np.arange(num)
    host, position = ranks // ranks_per_host, ranks % ranks_per_host
    same_host, same_position = host[:, None] == host, position[:, None] == position
    host_RR, rest_RR = np.zeros((num, num)), np.zeros((num, num))
    for unit, unit_ranks in placed.pairs:
        if _is_on_row_ranks(problem, unit):
            bytes_ = problem.batch_size * DTYPE_BYTES[dtype] * unit.width * problem.unit_load(unit).pooled_vectors
            _add_row_ranks_traffic(host_RR, rest_RR, unit_ranks, bytes_, ranks_per_host)
    for replicas, group in placed.by_num_replicas.items():
        for row_levels, bytes_R in _vector_bytes_by_levels(problem, group, dtype).items():
            if row_levels and problem.cluster.is_hierarchical and replicas == 1:
                host_RR += np.where(same_host, (bytes_R / ranks_per_host)[:, None], 0.0)
                rest_RR += np.where(same_position, (bytes_R / ranks_per_host / (num // ranks_per_host))[:, None], 0.0)
            else:
                rest_RR += _even_traffic(bytes_R, replicas)
    return (host_RR.T.copy(), rest_RR.T.copy()) if backward else (host_RR, rest_RR)


def _is_on_row_ranks(problem: Problem, unit: ShardUnit) -> bool:
    """Whether the unit's partial sums are added inside hosts that do not all hold rows on every rank."""
    return problem.cluster.is_hierarchical and unit.sharding.reduces_in_host and bool(unit.sharding.row_ranks)


def _add_row_ranks_traffic(
    host_RR: np.ndarray, rest_RR: np.ndarray, ranks: Sequence[int], bytes_: float, ranks_per_host: int
) -> None:
    """Add the messages of a unit whose rows are on these ranks, with `bytes_` of partial sums each."""
    num = len(host_RR)
    for host in {rank // ranks_per_host for rank in ranks}:
        members = [rank for rank in ranks if rank // ranks_per_host == host]
        if len(members) == 1:
            rest_RR[members[0]] += bytes_ / num
            continue
        first = host * ranks_per_host
        host_RR[members, first : first + ranks_per_host] += bytes_ / ranks_per_host
        for position in range(ranks_per_host):
            rest_RR[first + position, position::ranks_per_host] += bytes_ / num


def _vector_bytes_by_levels(problem: Problem, placed: PlacedTables, dtype: Dtype) -> dict[int, np.ndarray]:
    """Bytes of vectors or partial sums that each rank sends, by the number of levels that shard rows.

    Unpooled vectors are never partial sums, and so count as 0 levels.
    """
    num, loads = problem.cluster.num_ranks, list(map(problem.unit_load, placed.units))
    sizes = [problem.batch_size / unit.sharding.num_replicas * DTYPE_BYTES[dtype] * unit.width for unit in placed.units]
    sent_by_levels: dict[int, np.ndarray] = {}
    for row_levels in sorted({unit.sharding.row_levels for unit in placed.units}):
        is_sent = (
            unit.sharding.row_levels == row_levels and not _is_on_row_ranks(problem, unit) for unit in placed.units
        )
        pooled = (size * load.pooled_vectors * sent for size, load, sent in zip(sizes, loads, is_sent, strict=True))
        sent_by_levels[row_levels] = placed.sum_by_rank(pooled, num)
    if any(load.unpooled_vectors for load in loads):
        unpooled = (
            size * load.unpooled_vectors / (len(ranks) // unit.sharding.num_replicas)
            for size, load, (unit, ranks) in zip(sizes, loads, placed.pairs, strict=True)
        )
        sent_by_levels[0] = sent_by_levels.get(0, 0.0) + placed.sum_by_rank(unpooled, num, weight_by_lookups=True)
    return sent_by_levels

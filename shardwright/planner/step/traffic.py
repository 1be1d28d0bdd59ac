"""What a step sends: from rank to rank in bytes, and what that takes."""

from collections.abc import Iterator, Sequence
from itertools import accumulate
from math import prod
from operator import mul

import numpy as np

from shardwright.planner.memory import dense_model
from shardwright.planner.price import primitives
from shardwright.planner.price.rounds import collective_rounds
from shardwright.planner.problem import PlacedTables, Problem
from shardwright.planner.step.simulate import Task
from shardwright.planner.tables.sharding import ShardUnit
from shardwright.spec.wire import ID_BYTES, LENGTH_BYTES, ROW_ID_BYTES
from shardwright.spec.workload import DTYPE_BYTES, Dtype

SizedCollective = tuple[str, tuple[str, ...], int]  # a collective, its levels and its bytes


def even_all_to_all_task(problem: Problem, bytes_: float) -> Task:
    found = primitives.collective_cost(problem.cluster, "all_to_all", problem.level_names, max(1, round(bytes_)))
    return _joint(problem, "all_to_all", found.seconds, found.bytes_)


def _joint(problem: Problem, op: str, seconds: float, bytes_: int) -> Task:
    if not problem.level_names or problem.cluster.num_ranks == 1:
        return Task()
    taken = primitives.compute_slowdown(problem.cluster, op, problem.level_names, max(bytes_, 1))
    latency = min(seconds, primitives.collective_cost(problem.cluster, op, problem.level_names, 1).seconds)
    return Task(
        seconds=seconds,
        is_collective=True,
        levels=problem.level_names,
        compute_slowdown=taken,
        bytes_=bytes_,
        link_seconds=seconds,
        latency_seconds=latency,
    )


def data_parallel_gradient_bytes(problem: Problem, placed: PlacedTables) -> int:
    """Of the gradients of tables of which every rank has a replica."""
    return 4 * sum(
        problem.table_loads[one].table.rows * problem.table_loads[one].table.dim for one in placed.data_parallel_tables
    )


def gradient_wire_bytes(problem: Problem, bytes_: float) -> int:
    return round(bytes_ * DTYPE_BYTES[problem.precision.dense_gradients] / 4)


def _reducing(problem: Problem) -> tuple[str, ...]:
    """What sums gradients. Rounded numbers of CPUs are added where they meet, those of several hosts inside each of
    them first, in full, which takes little; NCCL has rings for them."""
    plain = (
        problem.precision.dense_gradients == "float32"
        or problem.is_hierarchical
        or problem.cluster.device.kind == "cuda"
    )
    return ("all_reduce",) if plain else ("all_to_all", "all_gather")


def gradient_reduce_task(problem: Problem, bytes_: float, *, sustained: bool = False) -> Task:
    if not bytes_ or problem.cluster.num_ranks == 1:
        return Task()
    ops, each = _reducing(problem), max(1, gradient_wire_bytes(problem, bytes_))
    priced = primitives.sustained_cost if sustained else primitives.collective_cost
    found = [priced(problem.cluster, op, problem.level_names, each) for op in ops]
    return _joint(problem, ops[0], sum(one.seconds for one in found), sum(one.bytes_ for one in found))


def id_traffic(problem: Problem, placed: PlacedTables) -> np.ndarray:
    """From every rank to each that it asks its part of what that looks up."""
    num, batch = problem.cluster.num_ranks, problem.batch_size
    total_RR = np.zeros((num, num))
    for copies, part in placed.by_num_replicas.items():
        received_R = part.sum_by_rank((unit.lookups * ID_BYTES for unit in part.units), num, weight_by_lookups=True)
        asked = (problem.table_load(unit.table_number, unit.sharding) for unit in part.units)
        bags = (batch / copies * LENGTH_BYTES * demand.pooled_vectors for demand in asked)
        total_RR += _evenly(received_R + part.sum_by_rank(bags, num), copies).T
    return total_RR


def _evenly(held_R: np.ndarray, copies: int) -> np.ndarray:
    """From each rank as much to all that ask it: those of its group, if there are copies."""
    asking = len(held_R) // copies
    group = np.arange(len(held_R)) // asking
    return np.where(group[:, None] == group, (held_R / asking)[:, None], 0.0)


def _between_copies(problem: Problem, placed: PlacedTables) -> tuple[np.ndarray, np.ndarray]:
    """Numbers of the rows with gradients, and these, from every copy to each other before the update."""
    num = problem.cluster.num_ranks
    numbers_RR, sums_RR = np.zeros((num, num)), np.zeros((num, num))
    for copies, part in placed.by_num_replicas.items():
        for unit, ranks in zip(part.units, part.ranks, strict=True) if copies > 1 else ():
            like_CN = np.array(ranks).reshape(copies, -1)
            rows = (
                problem.table_load(unit.table_number, unit.sharding).distinct_rows_per_group(copies) / like_CN.shape[1]
            )
            numbers_RR[like_CN[:, None], like_CN] += rows * ROW_ID_BYTES
            sums_RR[like_CN[:, None], like_CN] += rows * 4 * (unit.columns[1] - unit.columns[0])
    return numbers_RR, sums_RR


def replica_exchange_task(problem: Problem, placed: PlacedTables) -> Task:
    """The messages between replicas, one after the other: row counts, row ids, gradients."""
    numbers_RR, sums_RR = _between_copies(problem, placed)
    counts_RR = np.where(numbers_RR > 0, float(ROW_ID_BYTES), 0.0)
    found = [exchange_task(problem, one_RR) for one_RR in (counts_RR, numbers_RR, sums_RR)]
    seconds = sum(one.seconds_on(0) for one in found)
    return Task(seconds=seconds, link_seconds=seconds, latency_seconds=sum(one.latency_seconds for one in found))


def step_traffic(problem: Problem, placed: PlacedTables) -> np.ndarray:
    """Bytes of a whole step, from every rank to each."""
    cluster, precision = problem.cluster, problem.precision
    total_RR = id_traffic(problem, placed) + sum(_between_copies(problem, placed))
    there = _traffic(problem, placed, precision.vectors, back=False)
    back = _traffic(problem, placed, precision.gradients, back=True)
    total_RR = total_RR + sum(there) + sum(back)
    for op, levels, bytes_ in _of_dense(problem, data_parallel_gradient_bytes(problem, placed)):
        total_RR = total_RR + sum(one.traffic_RR for one in collective_rounds(cluster, op, levels, bytes_))
    return total_RR


def _of_dense(problem: Problem, replicated: int) -> Iterator[SizedCollective]:
    """Weights gathered for both passes, where they are cut, gradients added up, and these over what is there several
    times."""
    cut = sum(block.parameter_bytes for block in problem.workload.blocks if dense_model.needs_unshard(problem, block))
    for op in ("all_gather", "all_gather", "reduce_scatter"):
        yield from collectives_by_level(problem, op, cut)
    own = gradient_wire_bytes(problem, cut / prod(level.num for level in problem.shard_levels))
    if own and replica_levels(problem):
        yield "all_reduce", replica_levels(problem), own
    reduced = gradient_wire_bytes(problem, problem.workload.dense_bytes - cut + replicated)
    if reduced and problem.cluster.num_ranks > 1:
        yield from ((op, problem.level_names, reduced) for op in _reducing(problem))


def collectives_by_level(problem: Problem, op: str, bytes_: int) -> list[SizedCollective]:
    """What gathers weights that are cut, or adds up their gradients: level by level, of all inside one as one, where
    gathering is an exchange of pieces between pairs; on GPUs by rings of NCCL, one way or the other, in one go."""
    names = tuple(level.name for level in problem.shard_levels)
    if not names or not bytes_:
        return []
    if problem.cluster.device.kind == "cuda":
        return [("all_gather", names, bytes_)]
    inside = [1, *accumulate((level.num for level in problem.shard_levels), mul)][:-1]
    op = "all_to_all" if op == "all_gather" else op
    return [(op, (name,), max(1, bytes_ // num)) for name, num in zip(names, inside, strict=True)]


def replica_levels(problem: Problem) -> tuple[str, ...]:
    """The levels over which what is cut is there several times."""
    return tuple(level.name for level in problem.cluster.levels if level.name not in problem.dense.shard)


def exchange_task(problem: Problem, traffic_RR: np.ndarray) -> Task:
    np.fill_diagonal(traffic_RR, 0.0)
    if not traffic_RR.any():
        return Task()
    found = primitives.all_to_all_v_cost(problem.cluster, problem.level_names, traffic_RR)
    return _joint(problem, "all_to_all", found.seconds, found.bytes_)


def vector_exchange_tasks(problem: Problem, placed: PlacedTables, dtype: Dtype, *, backward: bool) -> tuple[Task, Task]:
    """What meets inside hosts, or spreads there, and all that crosses."""
    met_RR, rest_RR = _traffic(problem, placed, dtype, back=backward)
    return exchange_task(problem, met_RR), exchange_task(problem, rest_RR)


def _traffic(problem: Problem, placed: PlacedTables, dtype: Dtype, *, back: bool) -> tuple[np.ndarray, np.ndarray]:
    """Where rows are spread over the ranks of a host, parts of vectors meet there; then all go to the ranks of their
    samples. And back."""
    num, local = problem.cluster.num_ranks, problem.ranks_per_host
    ranks = np.arange(num)
    host, place = ranks // local, ranks % local
    inside, alike = host[:, None] == host, place[:, None] == place
    met_RR, rest_RR = np.zeros((num, num)), np.zeros((num, num))
    for unit, unit_ranks in zip(placed.units, placed.ranks, strict=True):
        if _is_on_row_ranks(problem, unit):
            load = problem.table_load(unit.table_number, unit.sharding)
            columns = unit.columns[1] - unit.columns[0]
            bytes_ = problem.batch_size * DTYPE_BYTES[dtype] * columns * load.pooled_vectors
            _add_row_ranks_traffic(met_RR, rest_RR, unit_ranks, bytes_, local)
    for copies, part in placed.by_num_replicas.items():
        for reach, held_R in _held_by_reach(problem, part, dtype).items():
            if reach and problem.is_hierarchical and copies == 1:
                met_RR += np.where(inside, (held_R / local)[:, None], 0.0)
                rest_RR += np.where(alike, (held_R / local / (num // local))[:, None], 0.0)
            else:
                rest_RR += _evenly(held_R, copies)
    return (met_RR.T.copy(), rest_RR.T.copy()) if back else (met_RR, rest_RR)


def _is_on_row_ranks(problem: Problem, unit: ShardUnit) -> bool:
    """Whether the unit's partial sums are added inside hosts that do not all hold rows on every rank."""
    return problem.is_hierarchical and unit.sharding.reduces_in_host and bool(unit.sharding.row_ranks)


def _add_row_ranks_traffic(
    met_RR: np.ndarray, rest_RR: np.ndarray, ranks: Sequence[int], bytes_: float, local: int
) -> None:
    """Add the messages of a unit whose rows are on these ranks, with `bytes_` of partial sums each."""
    num = len(met_RR)
    for host in {rank // local for rank in ranks}:
        members = [rank for rank in ranks if rank // local == host]
        if len(members) == 1:
            rest_RR[members[0]] += bytes_ / num
            continue
        first = host * local
        met_RR[members, first : first + local] += bytes_ / local
        for position in range(local):
            rest_RR[first + position, position::local] += bytes_ / num


def _held_by_reach(problem: Problem, placed: PlacedTables, dtype: Dtype) -> dict[int, np.ndarray]:
    """Bytes of vectors, or of parts of them, that each rank has of all who ask it, by how far rows are spread; those of
    single ids are whole wherever they are."""
    num = problem.cluster.num_ranks
    units = [
        (unit, problem.table_load(unit.table_number, unit.sharding), len(ranks) // unit.sharding.num_replicas)
        for unit, ranks in zip(placed.units, placed.ranks, strict=True)
    ]
    batches = [problem.batch_size / unit.sharding.num_replicas * DTYPE_BYTES[dtype] for unit in placed.units]
    each = [batch * (unit.columns[1] - unit.columns[0]) for batch, unit in zip(batches, placed.units, strict=True)]
    found: dict[int, np.ndarray] = {}
    for reach in sorted({unit.sharding.row_levels for unit in placed.units}):
        pooled = (
            bytes_ * demand.pooled_vectors * (unit.sharding.row_levels == reach and not _is_on_row_ranks(problem, unit))
            for bytes_, (unit, demand, _) in zip(each, units, strict=True)
        )
        found[reach] = placed.sum_by_rank(pooled, num)
    if any(demand.unpooled_vectors for _, demand, _ in units):
        alone = (bytes_ * demand.unpooled_vectors / size for bytes_, (_, demand, size) in zip(each, units, strict=True))
        found[0] = found.get(0, 0.0) + placed.sum_by_rank(alone, num, weight_by_lookups=True)
    return found

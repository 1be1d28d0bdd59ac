"""What each stage of a recommendation step takes where tables lie as placed, and so the step."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from types import MappingProxyType

import numpy as np

from shardwright.planner.price import overheads, primitives
from shardwright.planner.problem import Placed, Problem
from shardwright.planner.step import block_stages, block_tasks, simulate, traffic
from shardwright.planner.step.loop_cost import LoopCost
from shardwright.planner.step.simulate import Task
from shardwright.planner.step.stages import BEHIND, stages
from shardwright.planner.tables.sharding import Demand
from shardwright.spec.cluster import Device
from shardwright.spec.plan import Stage
from shardwright.spec.timeline import Timeline
from shardwright.spec.workload import Dtype

WARM_STEPS, COUNTED_STEPS, LAST_STEPS = 3, 3, 3  # as many as the largest lead before and after
MANY = 1 << 16
CODECS = MappingProxyType({"float16": "fp16", "bfloat16": "bf16"})


@dataclass(frozen=True, slots=True)
class Loads:
    """By rank, of one step."""

    lookup_R: np.ndarray  # seconds
    update_R: np.ndarray
    prefetch_R: np.ndarray
    far_R: np.ndarray  # bytes of rows fetched from a slower tier, and written back
    bytes_R: np.ndarray  # of tables and their state
    sent_R: np.ndarray  # bytes of vectors in float32
    ids_R: np.ndarray  # that arrive
    meets: bool  # whether parts of vectors meet inside hosts
    summed: float  # seconds of adding up the gradients of replicas


def loads(problem: Problem, placed: Placed, near: Sequence[float]) -> Loads:
    """`near`: by demand, the share of its ids whose rows lie in the fastest tier."""
    num, device = problem.cluster.num_ranks, problem.cluster.device
    each = cache(partial(_row_seconds, device))
    units = [(unit, problem.demand(unit.demand, unit.cut), unit.columns[1] - unit.columns[0]) for unit in placed.units]
    asked = [
        (unit.lookups, round(width * demand.weight_bytes), problem.new(demand, unit.cut))
        for unit, demand, width in units
    ]
    lookup_R = placed.by_rank((ids * each("lookup", row, new) for ids, row, new in asked), num, looked_up=True)
    update_R = placed.by_rank((ids * each("update", row, new) for ids, row, new in asked), num, looked_up=True)
    far = (
        ids * new * (1 - near[unit.demand]) * demand.row_bytes(width)
        for (unit, demand, width), (ids, _, new) in zip(units, asked, strict=True)
    )
    far_R = placed.by_rank(far, num)
    bytes_R = placed.by_rank((unit.bytes_ for unit in placed.units), num)
    sent_R = placed.by_rank((unit.sent for unit in placed.units), num)
    ids_R, summed = placed.by_rank((unit.lookups for unit in placed.units), num, looked_up=True), 0.0
    for number in placed.replicas:
        demand = problem.demands[number]
        own, row = problem.own_batch * demand.ids, round(demand.table.dim * demand.weight_bytes)
        touched = min(demand.table.rows, demand.distinct * demand.ids * problem.batch_size)
        ids_R += own
        lookup_R += own * each("lookup", row, demand.distinct)
        update_R += touched * each("update", row, 1.0)
        summed += own * each("update", row, demand.distinct) + block_tasks.passes(device, 2 * row * demand.table.rows)
        bytes_R += demand.table.rows * demand.row_bytes(demand.table.dim)
    update_R += _copies_seconds(problem, placed) + _whole_rows_seconds(problem, placed)
    meets = problem.several_hosts and any(unit.cut.meets and demand.pooled for unit, demand, _ in units)
    lookup_R += primitives.price(device, "lookup", "float32").call_seconds
    update_R += primitives.price(device, "update", "float32").call_seconds
    return Loads(lookup_R, update_R, _copied(problem, far_R), far_R, bytes_R, sent_R, ids_R, meets, summed)


def _copies_seconds(problem: Problem, placed: Placed) -> np.ndarray:
    """By rank, of the updates of copies, beside the sums of their own gradients: the rows of all copies are told apart
    and added up, and each is updated once."""
    num, device = problem.cluster.num_ranks, problem.cluster.device
    given_R, seconds_R = np.zeros(num), np.zeros(num)
    for unit, ranks in zip(placed.units, placed.ranks, strict=True):
        if (copies := unit.cut.copies) > 1:
            demand, width = problem.demand(unit.demand, unit.cut), unit.columns[1] - unit.columns[0]
            given, rows = (k * demand.touches(k) * copies / len(ranks) for k in (copies, 1))
            given_R[list(ranks)] += given
            row_bytes, new = round(width * demand.weight_bytes), min(1.0, rows / max(given, 1.0))
            seconds_R[list(ranks)] += given * _row_seconds(device, "update", 4 * width, new)
            seconds_R[list(ranks)] += rows * _row_seconds(device, "update", row_bytes, 1.0)
    return seconds_R + overheads.ids_seconds(device, given_R, "distinct")


def _whole_rows_seconds(problem: Problem, placed: Placed) -> np.ndarray:
    """By rank, of steps that look at whole rows whose columns lie apart: gradients are added up by row first, what is
    asked of rows goes to all that have others of their columns and is waited for, and then each row is updated."""
    num, device = problem.cluster.num_ranks, problem.cluster.device
    rows_R, seconds_R, of_piece = np.zeros(num), np.zeros(num), overheads.piece_seconds(device)
    for unit, ranks in zip(placed.units, placed.ranks, strict=True) if of_piece else ():
        demand, row_bytes = problem.demand(unit.demand, unit.cut), 4 * (unit.columns[1] - unit.columns[0])
        if unit.cut.columns > 1 and demand.state_bytes:
            rows = unit.lookups * problem.new(demand, unit.cut)
            rows_R[list(ranks)] += rows
            seconds_R[list(ranks)] += rows * _row_seconds(device, "update", row_bytes, 1.0) + of_piece
    if not rows_R.any():
        return seconds_R
    told = primitives.collective(problem.cluster, "all_to_all", problem.levels, round(4 * rows_R.max()))
    return seconds_R + told.seconds


def _row_seconds(device: Device, op: str, row_bytes: int, distinct: float) -> float:
    """Of each of many rows, of which this share is asked for the first time in the batch; others are in caches."""
    new = _each_of_many(device, op, row_bytes)
    if not overheads.known(device, f"{op}.near", "float32"):
        return new
    return distinct * new + (1 - distinct) * min(new, _each_of_many(device, f"{op}.near", row_bytes))


def _each_of_many(device: Device, op: str, row_bytes: int) -> float:
    return (
        primitives.rows(device, op, MANY, row_bytes).seconds - primitives.price(device, op, "float32").call_seconds
    ) / MANY


def _copied(problem: Problem, far_R: np.ndarray) -> np.ndarray:
    """Seconds of fetching rows from a slower tier and writing them back, both ways at once."""
    tiers = problem.cluster.device.tiers
    if not far_R.any() or len(tiers) < 2:
        return np.zeros(len(far_R))
    ways = ((tiers[1].name, tiers[0].name), (tiers[0].name, tiers[1].name))
    each = max(primitives.copy(problem.cluster.device, 1 << 30, *way).seconds for way in ways) / (1 << 30)
    return far_R * each


def tasks(problem: Problem, placed: Placed, found: Loads) -> dict[str, Task]:
    """What each stage takes."""
    cluster, precision, device = problem.cluster, problem.precision, problem.cluster.device
    meet, vectors = traffic.vectors(problem, placed, precision.vectors, back=False)
    spread, gradients = traffic.vectors(problem, placed, precision.gradients, back=True)
    asked = problem.asked(placed)
    own = problem.own_batch * sum(one.vectors * one.table.dim for one in asked) * 4
    decoded, coded_back = (
        _coded(problem, np.array([own]), dtype)[0] for dtype in (precision.vectors, precision.gradients)
    )
    arriving = overheads.columns_seconds(device, *_arriving(problem, placed))
    met = overheads.columns_seconds(device, *_meeting(problem, placed))
    passed_R = np.array([overheads.columns_seconds(device, 1.0, sent / 4) for sent in found.sent_R])
    again, summed = _at_home(problem, asked)
    between = traffic.copies_exchanged(problem, placed)
    looked_R = found.lookup_R + _coded(problem, found.sent_R, precision.vectors)
    updated_R = found.update_R + _coded(problem, found.sent_R, precision.gradients)
    if cluster.num_ranks > 1:
        looked_R, updated_R = looked_R + overheads.ids_seconds(device, found.ids_R) / 2, updated_R + passed_R
    made = {
        "read": Task(kind="read"),
        "to_device": Task(kind="copy"),
        "request": Task(seconds=_asking(problem, placed, asked)),
        "lengths": traffic.even(problem, traffic.HEADER_BYTES * cluster.num_ranks),
        "ids": traffic.exchanged(problem, traffic.id_traffic(problem, placed)),
        "prefetch": Task(seconds=tuple(found.prefetch_R), kind="copy"),
        "lookup": Task(seconds=tuple(looked_R)),
        "meet": _longer(meet, 2 * met) if meet.joint else meet,
        "vectors": vectors,
        "gradients": _concat_tasks(gradients, traffic.reduced(problem, traffic.replicated_bytes(problem, placed))),
        "spread": _longer(spread, 2 * met) if spread.joint else spread,
        "update": Task(seconds=tuple(updated_R + between.of(0)), links=between.links, latency=between.latency),
        "emit": Task(),
        "step": Task(seconds=block_stages.optimizer_seconds(problem)),
    }
    called = overheads.called_seconds(
        device, len(problem.workload.features), cluster.num_ranks - 1, len(placed.by_row) + len(placed.replicas)
    )
    inside = decoded + arriving + again, coded_back + arriving + summed + found.summed
    if block_stages.expanded(problem):
        more = (seconds + called.pop(name, 0.0) for name, seconds in zip(("top", "top.backward"), inside, strict=True))
        made |= block_stages.tasks(problem, *more)
        made["gradients"] = replace(
            made["gradients"], joint=gradients.joint, levels=gradients.levels, taken=gradients.taken
        )
    else:
        made |= _as_two(problem, placed, *inside)
    return made | {name: _with_calls(made[name], each) for name, each in called.items()}


def _as_two(problem: Problem, placed: Placed, arrive: float, leave: float) -> dict[str, Task]:
    """The dense part as what is below vectors and what is above; what is handled of them besides."""
    low = [block for block in problem.workload.blocks if not block.needs_vectors]
    top = [block for block in problem.workload.blocks if block.needs_vectors]
    replicas = traffic.replicated_bytes(problem, placed)
    return {
        "bottom": block_tasks.task(problem, low, "forward"),
        "top": _longer(block_tasks.task(problem, top, "forward"), arrive),
        "top.backward": _longer(block_tasks.backward(problem, top), leave),
        "reduce": traffic.reduced(problem, block_tasks.parameter_bytes(top) + replicas),
        "bottom.backward": block_tasks.backward(problem, low),
        "reduce.bottom": traffic.reduced(problem, block_tasks.parameter_bytes(low)),
    }


def _asking(problem: Problem, placed: Placed, asked: Sequence[Demand]) -> float:
    """Seconds of a rank's ids into messages: where rows travel made distinct, others told apart where rows are cut."""
    homes = [demand.home for demand in asked if demand.home is not None]
    cut = (asked[number].ids for number in placed.by_table if placed.spread(number) > 1 and not asked[number].home)
    ids = {
        "ids": sum(demand.ids for demand in asked) / 2,
        "ids.cut": sum(cut),
        "distinct": sum(one.ids for one in homes),
    }
    device, own = problem.cluster.device, problem.own_batch
    return sum(float(overheads.ids_seconds(device, np.array([own * num]), op)[0]) for op, num in ids.items())


def _at_home(problem: Problem, asked: Sequence[Demand]) -> tuple[float, float]:
    """Seconds of pooling a rank's distinct rows, which caches hold, once they have come; and of summing gradients by
    row on the way back."""
    if problem.cluster.num_ranks == 1:
        return 0.0, 0.0
    device, seconds = problem.cluster.device, {"lookup": 0.0, "update": 0.0}
    vectors = columns = 0.0
    for home in (demand.home for demand in asked if demand.home is not None):
        for op in seconds:
            seconds[op] += problem.own_batch * home.ids * _row_seconds(device, op, 4 * home.table.dim, 0.0)
        vectors += problem.own_batch * home.pooled
        columns += problem.own_batch * home.pooled * home.table.dim
    moved = overheads.columns_seconds(device, vectors, columns)
    return seconds["lookup"] + moved, seconds["update"] + moved


def _arriving(problem: Problem, placed: Placed) -> tuple[float, float]:
    """Vectors, or parts of them, that are put in place for a rank's own samples, and their columns."""
    if problem.cluster.num_ranks == 1:
        return 0.0, 0.0
    hosts = problem.cluster.num_ranks // problem.host
    vectors = columns = 0.0
    for unit, ranks in zip(placed.units, placed.ranks, strict=True):
        demand, parts = problem.demand(unit.demand, unit.cut), len(ranks) // unit.cut.copies
        if problem.several_hosts and unit.cut.copies == 1:
            parts = max(1, min(hosts, parts // problem.host))
        num = problem.own_batch * (demand.pooled * parts + demand.sequences)
        vectors += num
        columns += num * (unit.columns[1] - unit.columns[0])
    for demand in (problem.demands[number] for number in placed.replicas):
        vectors += problem.own_batch * demand.vectors
        columns += problem.own_batch * demand.vectors * demand.table.dim
    return vectors, columns


def _meeting(problem: Problem, placed: Placed) -> tuple[float, float]:
    """Parts of vectors that a rank copies into messages, or adds up for its host, and their columns."""
    if not problem.several_hosts:
        return 0.0, 0.0
    vectors = columns = 0.0
    for unit, ranks in zip(placed.units, placed.ranks, strict=True):
        if unit.cut.meets:  # each host of its ranks has a rank of this place, which adds for one rank of every host
            share = len(ranks) / problem.cluster.num_ranks
            num = problem.batch_size * problem.demand(unit.demand, unit.cut).pooled * share
            vectors += num
            columns += num * (unit.columns[1] - unit.columns[0])
    return vectors, columns


def _longer(task: Task, seconds: float) -> Task:
    return Task(seconds=task.of(0) + seconds, flops=task.flops, links=task.links, latency=task.latency)


def _concat_tasks(task: Task, after: Task) -> Task:
    """Two messages, one after the other, as a single task."""
    more = _longer(task, after.of(0))
    return replace(more, links=task.links + after.links, latency=task.latency + after.latency)


def _with_calls(task: Task, seconds: float) -> Task:
    each = tuple(one + seconds for one in task.seconds) if isinstance(task.seconds, tuple) else task.seconds + seconds
    return replace(task, seconds=each)


def _coded(problem: Problem, bytes_R: np.ndarray, dtype: Dtype) -> np.ndarray:
    """Seconds of vectors of so many bytes of float32 into a codec's form or out of it: half of both."""
    device = problem.cluster.device
    if dtype not in CODECS:
        return np.zeros(len(bytes_R))
    if overheads.known(device, "codec", CODECS[dtype]):
        found = primitives.price(device, "codec", CODECS[dtype])
        return (found.call_seconds + bytes_R * found.seconds_per_byte) / 2
    return 1.5 * bytes_R / device.tiers[0].read_bytes_per_second


def _order(problem: Problem, found: Loads, behind: str) -> list[simulate.Call]:
    return simulate.calls(of(problem, found, behind), WARM_STEPS + COUNTED_STEPS + LAST_STEPS)


def of(problem: Problem, found: Loads, behind: str) -> tuple[Stage, ...]:
    """The stages that this placement needs."""
    return stages(bool(found.far_R.any()), behind, found.meets, block_stages.bodies(problem))


def timeline(problem: Problem, placed: Placed, found: Loads, behind: str, loop: LoopCost | None = None) -> Timeline:
    """All ranks; `loop`: what a training loop adds to the step."""
    blocking = problem.cluster.device.kind == "cpu"
    loop = loop or LoopCost()
    listed = loop.stages(of(problem, found, behind))
    further = max(stage.lead for stage in listed) - LAST_STEPS  # a loader worker runs ahead of all other stages
    order = simulate.calls(listed, WARM_STEPS + COUNTED_STEPS + LAST_STEPS + 2 * further)
    made = tasks(loop.paced(problem), placed, found) | loop.tasks(problem)
    return simulate.play(order, made, problem.cluster.num_ranks, blocking=blocking)


def seconds(problem: Problem, placed: Placed, found: Loads, orders: Sequence[str] = tuple(BEHIND)) -> tuple[float, str]:
    """Of a step, and what ids are best issued behind, of these. Only ranks that are slowest at something are played: no
    other is ever waited for."""
    made = tasks(problem, placed, found)
    by_rank = np.array([task.seconds for task in made.values() if isinstance(task.seconds, tuple)])
    played = _undominated(by_rank.T)
    few = {
        name: replace(task, seconds=tuple(task.of(rank) for rank in played))
        if isinstance(task.seconds, tuple)
        else task
        for name, task in made.items()
    }
    blocking = problem.cluster.device.kind == "cpu"
    ends = {
        behind: step_of(simulate.play(_order(problem, found, behind), few, len(played), blocking=blocking))
        for behind in orders
    }
    best = min(orders, key=ends.__getitem__)
    return ends[best], best


def step_of(timeline: Timeline) -> float:
    """Of one step among those of `timeline` or `seconds`."""
    return simulate.step_seconds(timeline, WARM_STEPS - 1, LAST_STEPS)


def _undominated(by_rank: np.ndarray) -> list[int]:
    """Ranks than which no other is as slow at everything; of equal ones the first."""
    found: list[int] = []
    for rank in np.lexsort(tuple(-column for column in by_rank.T[::-1])):
        if not any((by_rank[other] >= by_rank[rank]).all() for other in found):
            found.append(int(rank))
    return sorted(found)

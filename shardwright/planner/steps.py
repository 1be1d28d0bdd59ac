"""What each stage of a recommendation step takes where tables lie as placed, and so the step."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from itertools import chain
from types import MappingProxyType

import numpy as np

from shardwright.planner import cost, simulate
from shardwright.planner.simulate import Task
from shardwright.planner.stages import BEHIND, stages
from shardwright.planner.tables import ID_BYTES, Demand, Unit
from shardwright.spec.cluster import Cluster, Device
from shardwright.spec.plan import Stage
from shardwright.spec.timeline import Timeline
from shardwright.spec.workload import DTYPE_BYTES, Block, Dtype, Workload

WARM_STEPS, COUNTED_STEPS, LAST_STEPS = 3, 3, 3  # as many as the largest lead before and after
LENGTH_BYTES = 8
MANY = 1 << 16
OPTIMIZER_PASSES = 7  # over dense parameters: gradient, weight and two moments read, all but the gradient written
CODECS = MappingProxyType({"float16": "fp16", "bfloat16": "bf16"})


@dataclass(frozen=True, slots=True)
class Precision:
    """What the plan rounds: table weights, vectors and gradients on the wire, dense gradients, dense products."""

    tables: Dtype | None = None  # None: as the model has them
    vectors: Dtype = "float32"
    gradients: Dtype = "float32"
    reduced: Dtype = "float32"
    products: Dtype = "float32"


@dataclass(frozen=True, slots=True)
class Problem:
    """What is planned: a workload at a global batch size on a cluster, in a precision."""

    workload: Workload
    cluster: Cluster
    batch_size: int
    precision: Precision
    demands: tuple[Demand, ...]

    @property
    def own_batch(self) -> float:
        return self.batch_size / self.cluster.num_ranks

    @property
    def levels(self) -> tuple[str, ...]:
        return tuple(level.name for level in self.cluster.levels)


@dataclass(frozen=True)
class Placed:
    """Units, the ranks of each, and the tables of which every rank has a replica."""

    units: tuple[Unit, ...]
    ranks: tuple[tuple[int, ...], ...]
    replicas: tuple[int, ...] = ()

    @cached_property
    def by_table(self) -> dict[int, list[tuple[Unit, tuple[int, ...]]]]:
        """The pieces of each, and the ranks of these; none of replicas."""
        found: dict[int, list[tuple[Unit, tuple[int, ...]]]] = {}
        for unit, ranks in zip(self.units, self.ranks, strict=True):
            found.setdefault(unit.demand, []).append((unit, ranks))
        return found

    def spread(self, table: int) -> int:
        """The number of ranks that rows of a piece of it are on."""
        return max((len(ranks) for _, ranks in self.by_table.get(table, [])), default=1)

    def by_rank(self, values: Iterable[float], num_ranks: int, *, looked_up: bool = False) -> np.ndarray:
        """The sums at each rank of what each unit brings to each of its own; of lookups as these are spread."""
        counts = np.fromiter(map(len, self.ranks), int, len(self.ranks))
        flat = np.fromiter(chain.from_iterable(self.ranks), int, int(counts.sum()))
        weights = np.repeat(np.fromiter(values, float, len(counts)), counts)
        if looked_up:
            for unit, start in zip(self.units, np.cumsum(counts) - counts, strict=True):
                if unit.places:
                    weights[start : start + len(unit.places)] *= unit.places
        return np.bincount(flat, weights, num_ranks).astype(float)


@dataclass(frozen=True, slots=True)
class Loads:
    """By rank, of one step."""

    lookup_R: np.ndarray  # seconds
    update_R: np.ndarray
    prefetch_R: np.ndarray
    far_R: np.ndarray  # bytes of rows fetched from a slower tier, and written back
    bytes_R: np.ndarray  # of tables and their state
    sent_R: np.ndarray  # bytes of vectors in float32


def loads(problem: Problem, placed: Placed, near: Sequence[float]) -> Loads:
    """`near`: by demand, the share of its ids whose rows lie in the fastest tier."""
    num, device = problem.cluster.num_ranks, problem.cluster.device
    each = cache(partial(_row_seconds, device))
    units = [(unit, problem.demands[unit.demand], unit.columns[1] - unit.columns[0]) for unit in placed.units]
    lookups = [(unit.lookups, round(width * demand.weight_bytes)) for unit, demand, width in units]
    lookup_R = placed.by_rank((num_ids * each("lookup", row) for num_ids, row in lookups), num, looked_up=True)
    update_R = placed.by_rank((num_ids * each("update", row) for num_ids, row in lookups), num, looked_up=True)
    far = (
        unit.lookups * demand.distinct * (1 - near[unit.demand]) * demand.row_bytes(width)
        for unit, demand, width in units
    )
    far_R = placed.by_rank(far, num)
    bytes_R = placed.by_rank((unit.bytes_ for unit in placed.units), num)
    sent_R = placed.by_rank((unit.sent for unit in placed.units), num)
    for number in placed.replicas:
        demand = problem.demands[number]
        own, row = problem.own_batch * demand.ids, round(demand.table.dim * demand.weight_bytes)
        lookup_R += own * each("lookup", row)
        touched = min(demand.table.rows, demand.distinct * demand.ids * problem.batch_size)
        update_R += touched * each("update", row)
        bytes_R += demand.table.rows * demand.row_bytes(demand.table.dim)
    lookup_R += cost.price(device, "lookup", "float32").call_seconds
    update_R += cost.price(device, "update", "float32").call_seconds
    return Loads(lookup_R, update_R, _copied(problem, far_R), far_R, bytes_R, sent_R)


def _row_seconds(device: Device, op: str, row_bytes: int) -> float:
    """Of each of many rows."""
    return (cost.rows(device, op, MANY, row_bytes).seconds - cost.price(device, op, "float32").call_seconds) / MANY


def _copied(problem: Problem, far_R: np.ndarray) -> np.ndarray:
    """Seconds of fetching rows from a slower tier and writing them back, both ways at once."""
    tiers = problem.cluster.device.tiers
    if not far_R.any() or len(tiers) < 2:
        return np.zeros(len(far_R))
    ways = ((tiers[1].name, tiers[0].name), (tiers[0].name, tiers[1].name))
    each = max(cost.copy(problem.cluster.device, 1 << 30, *way).seconds for way in ways) / (1 << 30)
    return far_R * each


def tasks(problem: Problem, placed: Placed, found: Loads) -> dict[str, Task]:
    """What each stage takes."""
    cluster, precision = problem.cluster, problem.precision
    vectors = _vectors(problem, placed, precision.vectors, back=False)
    gradients = _vectors(problem, placed, precision.gradients, back=True)
    encoded_R = _coded(problem, found.sent_R, precision.vectors)
    own = problem.own_batch * sum(one.vectors * one.table.dim for one in problem.demands) * 4
    decoded, coded_back = (
        _coded(problem, np.array([own]), dtype)[0] for dtype in (precision.vectors, precision.gradients)
    )
    low = [block for block in problem.workload.blocks if not block.needs_vectors]
    top = [block for block in problem.workload.blocks if block.needs_vectors]
    dense_bytes = sum(block.parameter_bytes for block in (*low, *top))
    return {
        "read": Task(kind="read"),
        "to_device": Task(kind="copy"),
        "lengths": _even(problem, problem.own_batch * len(problem.workload.features) * LENGTH_BYTES),
        "ids": _exchanged(problem, _id_traffic(problem, placed)),
        "prefetch": Task(seconds=tuple(found.prefetch_R), kind="copy"),
        "lookup": Task(seconds=tuple(found.lookup_R + encoded_R)),
        "vectors": vectors,
        "bottom": _dense(problem, low, "forward"),
        "top": _longer(_dense(problem, top, "forward"), decoded),
        "top.backward": _longer(_dense(problem, top, "backward"), coded_back),
        "gradients": gradients,
        "reduce": _reduced(problem, sum(block.parameter_bytes for block in top) + _replicated_bytes(problem, placed)),
        "bottom.backward": _dense(problem, low, "backward"),
        "reduce.bottom": _reduced(problem, sum(block.parameter_bytes for block in low)),
        "update": Task(seconds=tuple(found.update_R + _coded(problem, found.sent_R, precision.gradients))),
        "emit": Task(),
        "step": Task(seconds=OPTIMIZER_PASSES * dense_bytes / cluster.device.tiers[0].read_bytes_per_second),
    }


def _longer(task: Task, seconds: float) -> Task:
    return Task(seconds=task.of(0) + seconds, flops=task.flops)


def _dense(problem: Problem, blocks: Sequence[Block], way: str) -> Task:
    part = problem.own_batch / problem.workload.batch_size
    flops = sum(getattr(block, f"{way}_flops") for block in blocks) * part
    bytes_ = sum(block.parameter_bytes + block.activation_bytes * part for block in blocks)
    seconds = cost.flops(problem.cluster.device, flops, bytes_, problem.precision.products).seconds if blocks else 0.0
    return Task(seconds=seconds, flops=int(flops), bytes_=int(bytes_))


def _coded(problem: Problem, bytes_R: np.ndarray, dtype: Dtype) -> np.ndarray:
    """Seconds of vectors of so many bytes of float32 into a codec's form or out of it: half of both."""
    device = problem.cluster.device
    if dtype not in CODECS:
        return np.zeros(len(bytes_R))
    if any((one.op, one.dtype) == ("codec", CODECS[dtype]) for one in device.prices):
        found = cost.price(device, "codec", CODECS[dtype])
        return (found.call_seconds + bytes_R * found.seconds_per_byte) / 2
    return 1.5 * bytes_R / device.tiers[0].read_bytes_per_second


def _even(problem: Problem, bytes_: float) -> Task:
    found = cost.collective(problem.cluster, "all_to_all", problem.levels, max(1, round(bytes_)))
    return _joint(problem, "all_to_all", found.seconds, found.bytes_)


def _joint(problem: Problem, op: str, seconds: float, bytes_: int) -> Task:
    if not problem.levels or problem.cluster.num_ranks == 1:
        return Task()
    taken = cost.taken(problem.cluster, op, problem.levels, max(bytes_, 1))
    return Task(seconds=seconds, joint=True, levels=problem.levels, taken=taken, bytes_=bytes_)


def _replicated_bytes(problem: Problem, placed: Placed) -> int:
    """Of the gradients of tables of which every rank has a replica."""
    return 4 * sum(problem.demands[one].table.rows * problem.demands[one].table.dim for one in placed.replicas)


def _reduced_bytes(problem: Problem, bytes_: float) -> int:
    return round(bytes_ * DTYPE_BYTES[problem.precision.reduced] / 4)


def _reduced(problem: Problem, bytes_: float) -> Task:
    if not bytes_ or problem.cluster.num_ranks == 1:
        return Task()
    found = cost.collective(problem.cluster, "all_reduce", problem.levels, max(1, _reduced_bytes(problem, bytes_)))
    return _joint(problem, "all_reduce", found.seconds, found.bytes_)


def _id_traffic(problem: Problem, placed: Placed) -> np.ndarray:
    """From every rank to each its part of what that looks up."""
    num = problem.cluster.num_ranks
    received_R = placed.by_rank((unit.lookups * ID_BYTES / num for unit in placed.units), num, looked_up=True)
    return np.tile(received_R, (num, 1))


def link_bytes(problem: Problem, placed: Placed) -> tuple[tuple[str, int], ...]:
    """Of a whole step, by level."""
    cluster, precision = problem.cluster, problem.precision
    total_RR = _id_traffic(problem, placed)
    there = _traffic(problem, placed, precision.vectors, back=False)
    total_RR = total_RR + sum(there) + sum(_traffic(problem, placed, precision.gradients, back=True))
    reduced = _reduced_bytes(problem, problem.workload.dense_bytes + _replicated_bytes(problem, placed))
    if reduced and cluster.num_ranks > 1:
        total_RR = total_RR + sum(one.traffic_RR for one in cost.rounds(cluster, "all_reduce", problem.levels, reduced))
    return tuple(cost.bytes_by_level(cluster, total_RR))


def _exchanged(problem: Problem, traffic_RR: np.ndarray) -> Task:
    np.fill_diagonal(traffic_RR, 0.0)
    if not traffic_RR.any():
        return Task()
    found = cost.all_to_all_v(problem.cluster, problem.levels, traffic_RR)
    return _joint(problem, "all_to_all", found.seconds, found.bytes_)


def _vectors(problem: Problem, placed: Placed, dtype: Dtype, *, back: bool) -> Task:
    parts = [_exchanged(problem, traffic_RR) for traffic_RR in _traffic(problem, placed, dtype, back=back)]
    parts = [part for part in parts if part.joint]
    if not parts:
        return Task()
    return _joint(problem, "all_to_all", sum(part.of(0) for part in parts), sum(part.bytes_ for part in parts))


def _traffic(problem: Problem, placed: Placed, dtype: Dtype, *, back: bool) -> list[np.ndarray]:
    """Partial sums meet level by level where rows are spread, a matrix for each; then all go to the ranks of their
    samples. And back."""
    num, levels = problem.cluster.num_ranks, problem.cluster.levels
    ranks = np.arange(num)
    met: list[np.ndarray] = [np.zeros((num, num)) for _ in levels]
    last_RR = np.zeros((num, num))
    for reach, held_R in _held_by_reach(problem, placed, dtype).items():
        inside = 1
        for number, level in enumerate(levels[:reach]):
            group = ranks // (inside * level.num)
            same = (group[:, None] == group) & (ranks[:, None] % inside == ranks % inside)
            held_R = held_R / level.num
            met[number] += np.where(same, held_R[:, None], 0.0)
            inside *= level.num
        alike = ranks[:, None] % inside == ranks % inside
        last_RR += np.where(alike, (held_R * inside / num)[:, None], 0.0)
    found = [*met, last_RR]
    return [one.T.copy() for one in reversed(found)] if back else found


def _held_by_reach(problem: Problem, placed: Placed, dtype: Dtype) -> dict[int, np.ndarray]:
    """Bytes of vectors, or of parts of them, that each rank has of the whole batch, by how far rows are spread; those
    of single ids are whole wherever they are."""
    num = problem.cluster.num_ranks
    units = [
        (unit, problem.demands[unit.demand], len(ranks)) for unit, ranks in zip(placed.units, placed.ranks, strict=True)
    ]
    each = [problem.batch_size * (unit.columns[1] - unit.columns[0]) * DTYPE_BYTES[dtype] for unit, _, _ in units]
    found: dict[int, np.ndarray] = {}
    for reach in sorted({unit.cut.reach for unit in placed.units}):
        pooled = (
            bytes_ * demand.pooled * (unit.cut.reach == reach)
            for bytes_, (unit, demand, _) in zip(each, units, strict=True)
        )
        found[reach] = placed.by_rank(pooled, num)
    if any(demand.sequences for demand in problem.demands):
        alone = (bytes_ * demand.sequences / size for bytes_, (_, demand, size) in zip(each, units, strict=True))
        found[0] = found.get(0, 0.0) + placed.by_rank(alone, num, looked_up=True)
    return found


def _order(found: Loads, behind: str) -> list[simulate.Call]:
    return simulate.calls(of(found, behind), WARM_STEPS + COUNTED_STEPS + LAST_STEPS)


def of(found: Loads, behind: str) -> tuple[Stage, ...]:
    """The stages that this placement needs."""
    return stages(bool(found.far_R.any()), behind)


def timeline(problem: Problem, placed: Placed, found: Loads, behind: str) -> Timeline:
    """All ranks."""
    blocking = problem.cluster.device.kind == "cpu"
    num = problem.cluster.num_ranks
    return simulate.play(_order(found, behind), tasks(problem, placed, found), num, blocking=blocking)


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
        behind: step_of(simulate.play(_order(found, behind), few, len(played), blocking=blocking)) for behind in orders
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

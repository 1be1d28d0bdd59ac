"""What the network between ranks does: every collective over every level, one way and both, and beside computation.

Groups of a level work at the same time, as they do in training, so that ranks that share a link share it here too.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import combinations, pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shardwright.comm import collective
from shardwright.comm.mesh import Group, Mesh
from shardwright.comm.pending import Pending
from shardwright.measure.device import matmul_call
from shardwright.measure.timing import Clock
from shardwright.spec import linear_fit
from shardwright.spec.cluster import Beside, Collective, Level, Sample

LINK_BYTES = tuple(1024 << shift for shift in (0, 8, 13))
COLLECTIVE_BYTES = (*(1024 << shift for shift in (0, 5, 7, 9, 11, 12, 14)), 31 << 20, 1 << 26)  # 1 KiB to 64 MiB
MAX_RETAINED_BYTES = (
    1 << 25
)  # in one piece, the most memory that a process keeps: the system gives more anew in every call
BANDWIDTH_BOUND_BYTES = 1 << 17  # from which on a call takes longer the more it moves
MAX_CALL_SECONDS = 0.3  # a call: what would take longer is not asked for
SHARED_LINK_RATIO = 0.85  # of what its ranks could do alone; below it a group's ranks share a link
OVERLAP_BYTES = (1 << 19, 1 << 22)

IssueCollective = Callable[[], Pending[Any]]
ProgressCallback = Callable[[str], None]


def prepare_collective(op: str, bytes_: int, group: Group, device: torch.device) -> IssueCollective:
    """The collective of so many bytes, ready to be called; sizes as `Collective` says."""
    num = group.size
    floats = max(num, bytes_ // 4 // num * num)
    x, part, even = torch.zeros(floats, device=device), torch.zeros(floats // num, device=device), [floats // num] * num
    calls: dict[str, IssueCollective] = {
        "all_reduce": lambda: collective.all_reduce(x, group),
        "all_gather": lambda: collective.all_gather(part, even, group),
        "reduce_scatter": lambda: collective.reduce_scatter(x, even, group),
        "all_to_all": lambda: collective.all_to_all(x, even, even, group),
        "broadcast": lambda: collective.broadcast(x, 0, group),
        "one_to_many": lambda: collective.one_to_many(x, even, 0, group),
        "many_to_one": lambda: collective.many_to_one(part, even, 0, group),
    }
    return calls[op]


LINK_PATTERNS = ("one_way", "both_ways", "all_at_once")
COLLECTIVE_OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "one_to_many", "many_to_one")


def measure_collectives(mesh: Mesh, clock: Clock, report_progress: ProgressCallback) -> Iterator[Collective]:
    """The links of every level, then every operation along every set of levels, inside first."""
    nums = dict(mesh.axes)
    for axis, num in reversed(mesh.axes):
        report_progress(f"links of level {axis}")
        for way in LINK_PATTERNS:
            yield fit_collective(way, (axis,), (num,), _curve(clock, partial(_send, mesh, axis, way), LINK_BYTES))
    sizes = [size for size in COLLECTIVE_BYTES if size < MAX_RETAINED_BYTES or mesh.device.type == "cuda"]
    for axes in _sets(mesh):
        for op in COLLECTIVE_OPS:
            report_progress(f"{op} over {', '.join(axes)}")
            group = mesh.group(axes)
            samples = _curve(
                clock,
                lambda bytes_, op=op, group=group: _waited(prepare_collective(op, bytes_, group, mesh.device)),
                sizes,
            )
            yield fit_collective(op, axes, tuple(nums[axis] for axis in axes), samples)


def fit_collective(op: str, axes: tuple[str, ...], nums: tuple[int, ...], samples: Sequence[Sample]) -> Collective:
    """With the line through its samples."""
    sizes = np.array([float(sample.sizes[0]) for sample in samples])
    seconds = np.array([sample.seconds for sample in samples])
    fixed, each = linear_fit.fit_line(sizes, seconds)
    each = max(each, 1e-15)
    off = linear_fit.mean_relative_error(np.stack([np.ones(len(sizes)), sizes], 1), seconds, np.array([fixed, each]))
    return Collective(
        op=op,
        levels=axes,
        nums=nums,
        latency_seconds=fixed,
        bytes_per_second=1 / each,
        error=round(off, 4),
        samples=tuple(samples),
    )


def fit_levels(nums: Sequence[tuple[str, int]], collectives: Sequence[Collective]) -> list[Level]:
    """Inside first: what a pair does one way and both, and what all pairs do at once."""
    made, inside = [], 1
    by_way = {(one.op, one.levels): one.samples for one in collectives}
    for axis, num in nums:
        one, both, every = (_rate(by_way[way, (axis,)]) for way in LINK_PATTERNS)
        group = max(inside * every, one) if inside > 1 else every  # several carry no less than one of them
        made.append(
            Level(
                axis,
                num,
                latency_seconds=by_way["both_ways", (axis,)][0].seconds,
                bytes_per_second=one,
                both_bytes_per_second=min(2 * one, 2 * both),
                group_bytes_per_second=group if group < SHARED_LINK_RATIO * inside * one else None,
            )
        )
        inside *= num
    return made


def measure_overlap(mesh: Mesh, clock: Clock, report_progress: ProgressCallback) -> Iterator[Beside]:
    """Collectives with products of about the same length at their side."""
    multiply = matmul_call(256, 256, 256, torch.float32, mesh.device)
    once = clock.sample((1,), multiply).seconds
    for axes in _sets(mesh):
        for op in ("all_to_all", "all_reduce"):
            alone = 0.0
            for before, bytes_ in pairwise((OVERLAP_BYTES[0], *OVERLAP_BYTES)):
                if alone * bytes_ / before > MAX_CALL_SECONDS:
                    break
                report_progress(f"{op} over {', '.join(axes)} beside products")
                start = prepare_collective(op, bytes_, mesh.group(axes), mesh.device)
                alone = clock.sample((bytes_,), _waited(start), slowest=True).seconds
                num = max(1, round(alone / once))
                matmul = clock.sample((bytes_,), partial(_together, None, multiply, num)).seconds
                together = clock.sample((bytes_,), partial(_together, start, multiply, num), slowest=True).seconds
                yield Beside(
                    op=op,
                    levels=axes,
                    bytes_=bytes_,
                    collective_seconds=alone,
                    matmul_seconds=matmul,
                    together_seconds=together,
                )


def _together(start: IssueCollective | None, compute: Callable[[], object], num: int) -> None:
    under_way = start() if start else None
    for _ in range(num):
        compute()
    if under_way:
        under_way.wait()


def _waited(start: IssueCollective) -> Callable[[], object]:
    return lambda: start().wait()


def _sets(mesh: Mesh) -> list[tuple[str, ...]]:
    """Every set of axes, inside first."""
    inner_first = tuple(axis for axis, _ in reversed(mesh.axes))
    return [axes for num in range(1, len(inner_first) + 1) for axes in combinations(inner_first, num)]


def _send(mesh: Mesh, axis: str, way: str, bytes_: int) -> Callable[[], object]:
    """The first member along the axis sends to the second, or both do; in the first group only unless all are to."""
    takes_part = way == "all_at_once" or all(mesh.index(other) == 0 for other, _ in mesh.axes if other != axis)
    group = mesh.group(axis)
    to_second = [bytes_ if member == 1 else 0 for member in range(group.size)]
    to_first = [bytes_ if member == 0 else 0 for member in range(group.size)]
    none = [0] * group.size
    back = to_first if way == "both_ways" else none
    ways = {0: (to_second, to_second if way == "both_ways" else none), 1: (back, to_first)}
    sent, received = ways.get(group.index, (none, none)) if takes_part else (none, none)
    x: Tensor = torch.zeros(sum(sent), dtype=torch.uint8, device=mesh.device)
    return lambda: collective.all_to_all(x, sent, received, group).wait() if takes_part else None


def _curve(clock: Clock, call: Callable[[int], Callable[[], object]], sizes: Sequence[int]) -> list[Sample]:
    found: list[Sample] = []
    for bytes_ in sizes:
        expected = (
            found[-1].seconds * bytes_ / found[-1].sizes[0]
            if found and found[-1].sizes[0] >= BANDWIDTH_BOUND_BYTES
            else 0.0
        )
        if expected > MAX_CALL_SECONDS:
            break
        found.append(clock.sample((bytes_,), call(bytes_), slowest=True, expected_seconds=expected))
    return found


def _rate(samples: Sequence[Sample]) -> float:
    """Of the largest message, what comes before the first byte left out."""
    small, large = samples[0], samples[-1]
    more = max(large.seconds - small.seconds, large.seconds / 10)
    return (large.sizes[0] - small.sizes[0]) / more

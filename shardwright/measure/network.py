"""Measure the network: collectives over every set of levels, links, overlap with computation.

Groups of a level run at the same time, as in training, so that ranks that share a link also share it here.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import combinations, pairwise
from statistics import fmean
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
MAX_RETAINED_BYTES = 1 << 25  # largest freed block that a process keeps; larger blocks are mapped again in every call
BANDWIDTH_BOUND_BYTES = 1 << 17  # from this size on, time grows with the size of the message
MAX_CALL_SECONDS = 0.3  # calls expected to take longer are skipped
SHARED_LINK_RATIO = 0.85  # of the sum of its ranks' own rates; below it a group's ranks share a link
OVERLAP_BYTES = (1 << 19, 1 << 22)

IssueCollective = Callable[[], Pending[Any]]
ProgressCallback = Callable[[str], None]


def prepare_collective(op: str, bytes_: int, group: Group, device: torch.device) -> IssueCollective:
    """A function that issues the collective with `bytes_` bytes; the size is as `Collective` defines it."""
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
    """Links of every level, then every collective over every set of levels; inner levels first."""
    nums = dict(mesh.axes)
    for axis, num in reversed(mesh.axes):
        report_progress(f"links of level {axis}")
        for pattern in LINK_PATTERNS:
            yield fit_collective(
                pattern, (axis,), (num,), _curve(clock, partial(_send, mesh, axis, pattern), LINK_BYTES)
            )
    sizes = [size for size in COLLECTIVE_BYTES if size < MAX_RETAINED_BYTES or mesh.device.type == "cuda"]
    for axes in _axis_subsets(mesh):
        for op in COLLECTIVE_OPS:
            report_progress(f"{op} over {', '.join(axes)}")
            group = mesh.group(axes)
            samples = _curve(
                clock,
                lambda bytes_, op=op, group=group: _blocking_call(prepare_collective(op, bytes_, group, mesh.device)),
                sizes,
            )
            yield fit_collective(op, axes, tuple(nums[axis] for axis in axes), samples)


def fit_collective(op: str, axes: tuple[str, ...], nums: tuple[int, ...], samples: Sequence[Sample]) -> Collective:
    """Fit latency and bandwidth of a collective to its samples."""
    sizes = np.array([float(sample.sizes[0]) for sample in samples])
    seconds = np.array([sample.seconds for sample in samples])
    latency, per_byte = linear_fit.fit_line(sizes, seconds)
    per_byte = max(per_byte, 1e-15)
    error = linear_fit.mean_relative_error(
        np.stack([np.ones(len(sizes)), sizes], 1), seconds, np.array([latency, per_byte])
    )
    return Collective(
        op=op,
        levels=axes,
        nums=nums,
        latency_seconds=latency,
        bytes_per_second=1 / per_byte,
        error=round(error, 4),
        samples=tuple(samples),
    )


def fit_levels(nums: Sequence[tuple[str, int]], collectives: Sequence[Collective]) -> list[Level]:
    """Bandwidths of each level, inner first: of a pair, one way and both ways, and of all pairs at once."""
    levels, num_inner = [], 1
    samples_of = {(link.op, link.levels): link.samples for link in collectives}
    for axis, num in nums:
        one_way, both_ways, all_pairs = (_bandwidth(samples_of[pattern, (axis,)]) for pattern in LINK_PATTERNS)
        group = max(num_inner * all_pairs, one_way) if num_inner > 1 else all_pairs  # at least the rate of one pair
        levels.append(
            Level(
                axis,
                num,
                latency_seconds=samples_of["both_ways", (axis,)][0].seconds,
                bytes_per_second=one_way,
                both_bytes_per_second=min(2 * one_way, 2 * both_ways),
                group_bytes_per_second=group if group < SHARED_LINK_RATIO * num_inner * one_way else None,
            )
        )
        num_inner *= num
    return levels


def measure_overlap(mesh: Mesh, clock: Clock, report_progress: ProgressCallback) -> Iterator[Beside]:
    """Collectives overlapped with matrix products of about the same duration."""
    multiply = matmul_call(256, 256, 256, torch.float32, mesh.device)
    matmul_call_seconds = clock.sample((1,), multiply).seconds
    for axes in _axis_subsets(mesh):
        for op in ("all_to_all", "all_reduce"):
            collective_seconds = 0.0
            for previous_bytes, bytes_ in pairwise((OVERLAP_BYTES[0], *OVERLAP_BYTES)):
                if collective_seconds * bytes_ / previous_bytes > MAX_CALL_SECONDS:
                    break
                report_progress(f"{op} over {', '.join(axes)} overlapped with products")
                issue = prepare_collective(op, bytes_, mesh.group(axes), mesh.device)
                collective_seconds = clock.sample((bytes_,), _blocking_call(issue), slowest=True).seconds
                num = max(1, round(collective_seconds / matmul_call_seconds))
                alone = partial(_overlap, None, multiply, num, [])
                matmul_seconds = clock.sample((bytes_,), alone, slowest=True).seconds
                ends: list[tuple[float, float, float]] = []
                overlap = partial(_overlap, issue, multiply, num, ends)
                together_seconds = clock.sample((bytes_,), overlap, slowest=True).seconds
                shares = _end_shares(clock, ends) if mesh.device.type == "cpu" else (0.0, 0.0)
                yield Beside(
                    op=op,
                    levels=axes,
                    bytes_=bytes_,
                    collective_seconds=collective_seconds,
                    matmul_seconds=matmul_seconds,
                    together_seconds=together_seconds,
                    collective_end_seconds=shares[0] * together_seconds,
                    matmul_end_seconds=shares[1] * together_seconds,
                )


def _overlap(
    issue: IssueCollective | None, compute: Callable[[], object], num: int, ends: list[tuple[float, float, float]]
) -> None:
    """Issue the collective, run `compute` `num` times, wait for the collective; append the seconds until each ended,
    and of the whole. What the collective still computes when all has arrived counts for both."""
    start = time.perf_counter()
    pending = issue() if issue else None
    for _ in range(num):
        compute()
    computed = time.perf_counter()
    if pending:
        pending.wait()
        done = time.perf_counter()
        arrived = pending.end or done
        finish = max(0.0, done - max(arrived, computed))
        ends.append((arrived + finish - start, computed + finish - start, done - start))


def _end_shares(clock: Clock, ends: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """When the collective and the products ended, as shares of the whole: means over calls and ranks."""
    collective, products, whole = (sum(seconds) for seconds in zip(*ends, strict=True))
    return fmean(clock.all_gather(collective / whole)), fmean(clock.all_gather(products / whole))


def _blocking_call(issue: IssueCollective) -> Callable[[], object]:
    return lambda: issue().wait()


def _axis_subsets(mesh: Mesh) -> list[tuple[str, ...]]:
    """Every non-empty set of axes, inner axes first."""
    inner_first = tuple(axis for axis, _ in reversed(mesh.axes))
    return [axes for num in range(1, len(inner_first) + 1) for axes in combinations(inner_first, num)]


def _send(mesh: Mesh, axis: str, pattern: str, bytes_: int) -> Callable[[], object]:
    """A call in which rank 0 of the axis sends to rank 1, or both send: an all-to-all over the axis.

    Only the axis's first group sends, unless the pattern is all_at_once.
    """
    takes_part = pattern == "all_at_once" or all(mesh.index(other) == 0 for other, _ in mesh.axes if other != axis)
    group = mesh.group(axis)
    to_second = [bytes_ if member == 1 else 0 for member in range(group.size)]
    to_first = [bytes_ if member == 0 else 0 for member in range(group.size)]
    nothing = [0] * group.size
    first_receives = to_first if pattern == "both_ways" else nothing
    sizes_of = {0: (to_second, to_second if pattern == "both_ways" else nothing), 1: (first_receives, to_first)}
    sent_sizes, received_sizes = sizes_of.get(group.index, (nothing, nothing)) if takes_part else (nothing, nothing)
    x: Tensor = torch.zeros(sum(sent_sizes), dtype=torch.uint8, device=mesh.device)
    return lambda: collective.all_to_all(x, sent_sizes, received_sizes, group).wait() if takes_part else None


def _curve(clock: Clock, call: Callable[[int], Callable[[], object]], sizes: Sequence[int]) -> list[Sample]:
    """Samples by message size, up to sizes that are expected to take over MAX_CALL_SECONDS."""
    samples: list[Sample] = []
    for bytes_ in sizes:
        expected = (
            samples[-1].seconds * bytes_ / samples[-1].sizes[0]
            if samples and samples[-1].sizes[0] >= BANDWIDTH_BOUND_BYTES
            else 0.0
        )
        if expected > MAX_CALL_SECONDS:
            break
        samples.append(clock.sample((bytes_,), call(bytes_), slowest=True, expected_seconds=expected))
    return samples


def _bandwidth(samples: Sequence[Sample]) -> float:
    """Bytes per second without the latency: the slope from the smallest to the largest message."""
    small, large = samples[0], samples[-1]
    seconds = max(large.seconds - small.seconds, large.seconds / 10)
    return (large.sizes[0] - small.sizes[0]) / seconds

"""What the network between ranks does: every collective over every level, one way and both, and beside computation.

Groups of a level work at the same time, as they do in training, so that ranks that share a link share it here too.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import combinations
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shardwright.comm import collective
from shardwright.comm.mesh import Group, Mesh
from shardwright.comm.pending import Pending
from shardwright.measure.device import product
from shardwright.measure.timing import Clock, steady
from shardwright.spec import fit
from shardwright.spec.cluster import Beside, Collective, Level, Sample

SIZES = tuple(1024 << shift for shift in (0, 5, 8, 11, 14, 16))  # 1 KiB to 64 MiB
FEWEST_BYTES = 1 << 16  # are asked for in any case
REPEATED_SECONDS = 0.1  # a call: what takes longer is not asked for again
LONGEST_SECONDS = 0.3  # a call: what would take longer is not asked for
SHARED = 0.85  # of what its ranks could do alone; below it a group's ranks share a link
BESIDE = (1 << 16, 1 << 19, 1 << 22)

Issue = Callable[[], Pending[Any]]
Say = Callable[[str], None]


def issue(op: str, bytes_: int, group: Group, device: torch.device) -> Issue:
    """The collective of so many bytes, ready to be called; sizes as `Collective` says."""
    num = group.size
    floats = max(num, bytes_ // 4 // num * num)
    x, part, even = torch.zeros(floats, device=device), torch.zeros(floats // num, device=device), [floats // num] * num
    calls: dict[str, Issue] = {
        "all_reduce": lambda: collective.all_reduce(x, group),
        "all_gather": lambda: collective.all_gather(part, even, group),
        "reduce_scatter": lambda: collective.reduce_scatter(x, even, group),
        "all_to_all": lambda: collective.all_to_all(x, even, even, group),
        "broadcast": lambda: collective.broadcast(x, 0, group),
        "one_to_many": lambda: collective.one_to_many(x, even, 0, group),
        "many_to_one": lambda: collective.many_to_one(part, even, 0, group),
    }
    return calls[op]


OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "one_to_many", "many_to_one")


class Work:
    """What is measured of the network in every pass, and the samples of all passes."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.samples: dict[tuple[str, tuple[str, ...]], list[Sample]] = {}

    def run(self, clock: Clock, say: Say) -> None:
        for axis, _ in reversed(self.mesh.axes):
            say(f"links of level {axis}")
            for way in ("one way", "both ways", "all at once"):
                self._curve(clock, way, (axis,), partial(_send, self.mesh, axis, way))
        for axes in _sets(self.mesh):
            for op in OPS:
                say(f"{op} over {', '.join(axes)}")
                group = self.mesh.group(axes)
                self._curve(clock, op, axes, lambda bytes_, op=op, group=group: self._waited(op, bytes_, group))

    def levels(self) -> list[Level]:
        """Inside first: what a pair does one way and both, and what all pairs do at once."""
        found, inside = [], 1
        for axis, num in reversed(self.mesh.axes):
            one, both, every = (_line(self._steady(way, (axis,))) for way in ("one way", "both ways", "all at once"))
            rate, group = 1 / one[1], inside / every[1]
            found.append(
                Level(
                    axis,
                    num,
                    latency_seconds=both[0],
                    bytes_per_second=rate,
                    both_bytes_per_second=min(2 * rate, 2 / both[1]),
                    group_bytes_per_second=group if group < SHARED * inside * rate else None,
                )
            )
            inside *= num
        return found

    def collectives(self) -> Iterator[Collective]:
        for axes in _sets(self.mesh):
            for op in OPS:
                samples = self._steady(op, axes)
                fixed, each, error = _line(samples)
                yield Collective(
                    op=op,
                    levels=axes,
                    nums=tuple(dict(self.mesh.axes)[axis] for axis in axes),
                    latency_seconds=fixed,
                    bytes_per_second=1 / each,
                    error=error,
                    samples=tuple(samples),
                )

    def _curve(
        self, clock: Clock, name: str, axes: tuple[str, ...], call: Callable[[int], Callable[[], object]]
    ) -> None:
        """Another pass over the sizes; what takes very long is asked for once."""
        before = self.samples.get((name, axes), [])
        known = {sample.sizes[0]: sample.seconds for sample in before}
        wanted = [size for size, seconds in known.items() if seconds < REPEATED_SECONDS] if before else SIZES
        found: list[Sample] = []
        for bytes_ in wanted:
            expected = known.get(bytes_, 0.0)
            if found and not known and bytes_ > FEWEST_BYTES:
                expected = found[-1].seconds * bytes_ / found[-1].sizes[0]
                if expected > LONGEST_SECONDS:
                    break
            found.append(clock.sample((bytes_,), call(bytes_), slowest=True, about=expected))
        self.samples[name, axes] = before + found

    def _steady(self, name: str, axes: tuple[str, ...]) -> list[Sample]:
        return steady(self.samples[name, axes])

    def _waited(self, op: str, bytes_: int, group: Group) -> Callable[[], object]:
        return _waited(issue(op, bytes_, group, self.mesh.device))


def beside(mesh: Mesh, clock: Clock, say: Say) -> Iterator[Beside]:
    """Collectives with products of about the same length at their side."""
    multiply = product(256, 256, 256, torch.float32, mesh.device)
    once = clock.sample((1,), multiply).seconds
    for axes in _sets(mesh):
        for op in ("all_to_all", "all_reduce"):
            for bytes_ in BESIDE:
                say(f"{op} over {', '.join(axes)} beside products")
                start = issue(op, bytes_, mesh.group(axes), mesh.device)
                alone = clock.sample((bytes_,), _waited(start), slowest=True).seconds
                if alone > LONGEST_SECONDS / 2:
                    break
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


def _together(start: Issue | None, compute: Callable[[], object], num: int) -> None:
    under_way = start() if start else None
    for _ in range(num):
        compute()
    if under_way:
        under_way.wait()


def _waited(start: Issue) -> Callable[[], object]:
    return lambda: start().wait()


def _sets(mesh: Mesh) -> list[tuple[str, ...]]:
    """Every set of axes, inside first."""
    inner_first = tuple(axis for axis, _ in reversed(mesh.axes))
    return [axes for num in range(1, len(inner_first) + 1) for axes in combinations(inner_first, num)]


def _send(mesh: Mesh, axis: str, way: str, bytes_: int) -> Callable[[], object]:
    """The first member along the axis sends to the second, or both do; in the first group only unless all are to."""
    takes_part = way == "all at once" or all(mesh.index(other) == 0 for other, _ in mesh.axes if other != axis)
    group = mesh.group(axis)
    to_second = [bytes_ if member == 1 else 0 for member in range(group.size)]
    to_first = [bytes_ if member == 0 else 0 for member in range(group.size)]
    none = [0] * group.size
    back = to_first if way == "both ways" else none
    ways = {0: (to_second, to_second if way == "both ways" else none), 1: (back, to_first)}
    sent, received = ways.get(group.index, (none, none)) if takes_part else (none, none)
    x: Tensor = torch.zeros(sum(sent), dtype=torch.uint8, device=mesh.device)
    return lambda: collective.all_to_all(x, sent, received, group).wait() if takes_part else None


def _line(samples: Sequence[Sample]) -> tuple[float, float, float]:
    """Latency, seconds per byte, and the mean deviation."""
    sizes = np.array([float(sample.sizes[0]) for sample in samples])
    seconds = np.array([sample.seconds for sample in samples])
    fixed, each = fit.line(sizes, seconds)
    each = max(each, 1e-15)
    features = np.stack([np.ones(len(sizes)), sizes], 1)
    return fixed, each, round(fit.error(features, seconds, np.array([fixed, each])), 4)

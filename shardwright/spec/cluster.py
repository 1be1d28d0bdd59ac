"""What a model is trained on: devices with memory tiers and compute curves, and the levels that join ranks.

Numbers only, whether measured, published or emulated; how they were found is not told here.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Literal

from shardwright.spec import files
from shardwright.spec.verdict import judge, not_negative, positive, repeated


@dataclass(frozen=True, slots=True)
class Tier:
    """Memory of one rank: hbm, dram, ssd."""

    name: str
    bytes_: int
    read_bytes_per_second: float
    write_bytes_per_second: float


@dataclass(frozen=True, slots=True)
class Curve:
    """The rate of an operation at growing sizes."""

    op: str
    dtype: str
    points: tuple[tuple[float, float], ...]  # (size, rate)


@dataclass(frozen=True, slots=True)
class Device:
    name: str
    kind: Literal["cpu", "cuda"]
    tiers: tuple[Tier, ...]  # fastest first
    curves: tuple[Curve, ...] = ()


@dataclass(frozen=True, slots=True)
class Level:
    """A network that joins `num` ranks, or `num` groups of the level inside it."""

    name: str
    num: int
    latency_seconds: float
    bytes_per_second: float  # of one rank, in one direction
    burst_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Cluster:
    version: Literal[1]
    name: str
    source: Literal["measured", "preset", "emulated"]
    device: Device
    levels: tuple[Level, ...] = ()  # inside first; none: one rank

    @property
    def num_ranks(self) -> int:
        return prod(level.num for level in self.levels)

    def digest(self) -> str:
        return files.digest(self)

    def verify(self) -> None:
        judge(message for check in CHECKS for message in check(self))


def _tiers(cluster: Cluster) -> Iterator[str]:
    if not cluster.device.tiers:
        yield f'device "{cluster.device.name}" has no memory tier; wanted one or more'
    yield from repeated("tier", (tier.name for tier in cluster.device.tiers))
    for tier in cluster.device.tiers:
        yield from positive(
            f'tier "{tier.name}"',
            bytes_=tier.bytes_,
            read_bytes_per_second=tier.read_bytes_per_second,
            write_bytes_per_second=tier.write_bytes_per_second,
        )


def _curves(cluster: Cluster) -> Iterator[str]:
    yield from repeated("curve", (f"{curve.op} {curve.dtype}" for curve in cluster.device.curves))
    for curve in cluster.device.curves:
        subject = f'curve "{curve.op} {curve.dtype}"'
        if not curve.points:
            yield f"{subject} has no points; wanted one or more"
        for size, rate in curve.points:
            yield from positive(subject, size=size, rate=rate)
        for (size, _), (next_size, _) in pairwise(curve.points):
            if size >= next_size:
                yield f"{subject}: size {next_size} follows {size}; sizes must grow"


def _levels(cluster: Cluster) -> Iterator[str]:
    yield from repeated("level", (level.name for level in cluster.levels))
    for level in cluster.levels:
        subject = f'level "{level.name}"'
        yield from positive(subject, num=level.num, bytes_per_second=level.bytes_per_second)
        yield from not_negative(subject, latency_seconds=level.latency_seconds, burst_bytes=level.burst_bytes)


CHECKS = (_tiers, _curves, _levels)

"""What a model is trained on: devices with memory tiers and prices of operations, and the levels that join ranks.

Numbers only, whether measured, emulated, published or scaled; how they were found is not told here.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from statistics import median
from typing import Literal

from shardwright.errors import did_you_mean
from shardwright.spec import files
from shardwright.spec.checks import check_non_negative, check_positive, check_unique, raise_if_any

ROW_OPS = ("gather", "rewrite", "lookup", "update", "lookup.near", "update.near", "columns")
PRODUCTS = ("matmul", "matmul.across")
OPERATIONS = (*PRODUCTS, *ROW_OPS, "ids", "ids.cut", "distinct", "codec", "calls", "host_to_device", "device_to_host")
COLLECTIVES = (
    *("all_reduce", "all_gather", "all_to_all", "reduce_scatter", "one_to_many", "many_to_one", "broadcast"),
    *("one_way", "both_ways", "all_at_once"),
)


@dataclass(frozen=True, slots=True)
class Tier:
    """Memory of one rank: hbm, dram, ssd."""

    name: str
    bytes_: int
    read_bytes_per_second: float
    write_bytes_per_second: float


@dataclass(frozen=True, slots=True)
class Sample:
    """The sizes of a call, and what it took in each measurement."""

    sizes: tuple[int, ...]
    times: tuple[float, ...]

    @property
    def seconds(self) -> float:
        """The median: a slow moment of the machine decides nothing."""
        return median(self.times)


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """What an operation of the device costs: seconds of a call, and of each flop, row and byte in it."""

    op: str  # sizes of samples: PRODUCTS (m, k, n); those of ROW_OPS (rows, bytes of one); calls (num,); else (bytes,)
    dtype: str = ""
    call_seconds: float = 0.0
    seconds_per_flop: float = 0.0
    seconds_per_row: float = 0.0
    seconds_per_byte: float = 0.0
    error: float = 0.0  # mean over the samples of |price / seconds - 1|
    samples: tuple[Sample, ...] = ()


@dataclass(frozen=True, slots=True)
class Device:
    name: str
    kind: Literal["cpu", "cuda"]
    tiers: tuple[Tier, ...]  # fastest first
    prices: tuple[Price, ...] = ()


@dataclass(frozen=True, slots=True)
class Level:
    """A network that joins `num` ranks, or `num` groups of the level inside it."""

    name: str
    num: int
    latency_seconds: float
    bytes_per_second: float  # of one rank, in one direction
    burst_bytes: int = 0
    both_bytes_per_second: float | None = None  # of one rank, in both directions at once; None: twice that
    group_bytes_per_second: float | None = None  # of all ranks of a group, which share it; None: nothing is shared


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """An operation as it was measured among the ranks that differ along these levels, in all such groups at once.

    Its samples say bytes: of the whole vector for all_reduce, of what a rank sends for all_to_all, of the result for
    all_gather, of what each gives for reduce_scatter, of what leaves or reaches the one for the rest. Of links:
    one_way is the first of one group that sends to the second, both_ways adds the way back, all_at_once is one_way in
    every group.
    """

    op: str
    levels: tuple[str, ...]
    nums: tuple[int, ...]
    latency_seconds: float
    bytes_per_second: float
    error: float  # of the line through all samples: mean of |line / seconds - 1|
    samples: tuple[Sample, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """A collective and a matmul of about the same length at once, against each alone."""

    op: str
    levels: tuple[str, ...]
    bytes_: int
    collective_seconds: float
    matmul_seconds: float
    together_seconds: float
    num: int = 1


@dataclass(frozen=True, slots=True)
class Cluster:
    version: Literal[1]
    name: str
    source: Literal["measured", "emulated", "preset", "scaled"]  # scaled: measured on other levels
    device: Device
    levels: tuple[Level, ...] = ()  # inside first; none: one rank
    collectives: tuple[Collective, ...] = ()
    beside: tuple[Beside, ...] = ()
    stolen_share: float = 0.0  # of the time of its last measurement, that other guests of the machine had

    @property
    def num_ranks(self) -> int:
        return prod(level.num for level in self.levels)

    def digest(self) -> str:
        return files.digest(self)

    def verify(self) -> None:
        raise_if_any(message for check in CHECKS for message in check(self))


def _tiers(cluster: Cluster) -> Iterator[str]:
    if not cluster.device.tiers:
        yield f'device "{cluster.device.name}" has no memory tier; wanted one or more'
    yield from check_unique("tier", (tier.name for tier in cluster.device.tiers))
    for tier in cluster.device.tiers:
        yield from check_positive(
            f'tier "{tier.name}"',
            bytes_=tier.bytes_,
            read_bytes_per_second=tier.read_bytes_per_second,
            write_bytes_per_second=tier.write_bytes_per_second,
        )


def _prices(cluster: Cluster) -> Iterator[str]:
    yield from check_unique("price", (f"{price.op} {price.dtype}".strip() for price in cluster.device.prices))
    for price in cluster.device.prices:
        subject = f'price "{f"{price.op} {price.dtype}".strip()}"'
        parts = (price.call_seconds, price.seconds_per_flop, price.seconds_per_row, price.seconds_per_byte)
        yield from check_non_negative(
            subject,
            call_seconds=parts[0],
            seconds_per_flop=parts[1],
            seconds_per_row=parts[2],
            seconds_per_byte=parts[3],
        )
        if price.op not in OPERATIONS:
            yield f"{subject}: unknown op{did_you_mean(price.op, OPERATIONS)}"
        yield from check_non_negative(subject, error=price.error)
        if not any(parts):
            yield f"{subject} is nothing; wanted seconds of a call, a flop, a row or a byte"
        yield from _samples(subject, price.samples, 3 if price.op in PRODUCTS else 2 if price.op in ROW_OPS else 1)


def _levels(cluster: Cluster) -> Iterator[str]:
    yield from check_unique("level", (level.name for level in cluster.levels))
    for level in cluster.levels:
        subject = f'level "{level.name}"'
        yield from check_positive(subject, num=level.num, bytes_per_second=level.bytes_per_second)
        yield from check_non_negative(subject, latency_seconds=level.latency_seconds, burst_bytes=level.burst_bytes)
        for name in ("both_bytes_per_second", "group_bytes_per_second"):
            if getattr(level, name) is not None:
                yield from check_positive(subject, **{name: getattr(level, name)})


def _collectives(cluster: Cluster) -> Iterator[str]:
    yield from check_unique("collective", (f"{one.op} over {', '.join(one.levels)}" for one in cluster.collectives))
    known = {level.name for level in cluster.levels}
    for one in (*cluster.collectives, *cluster.beside):
        if one.op not in COLLECTIVES:
            yield f'collective "{one.op}": unknown op{did_you_mean(one.op, COLLECTIVES)}'
        for name in one.levels:
            if name not in known:
                yield f'{one.op} over level "{name}", which the cluster does not have'
    for one in cluster.beside:
        times = (one.collective_seconds, one.matmul_seconds, one.together_seconds)
        names = ("collective_seconds", "matmul_seconds", "together_seconds")
        yield from check_positive(
            f"{one.op} beside products", bytes_=one.bytes_, **dict(zip(names, times, strict=True))
        )
        yield from check_positive(f"{one.op} beside products", num=one.num)
    for one in cluster.collectives:
        subject = f'collective "{one.op} over {", ".join(one.levels)}"'
        yield from check_positive(subject, bytes_per_second=one.bytes_per_second)
        yield from check_non_negative(subject, latency_seconds=one.latency_seconds, error=one.error)
        for num in one.nums:
            yield from check_positive(subject, nums=num)
        if len(one.nums) != len(one.levels):
            yield f"{subject}: {len(one.nums)} sizes for {len(one.levels)} levels"
        if not one.samples:
            yield f"{subject} has no samples; wanted one or more"
        yield from _samples(subject, one.samples, 1)


def _samples(subject: str, samples: tuple[Sample, ...], num: int) -> Iterator[str]:
    yield from check_unique(f"{subject}: sample", (sample.sizes for sample in samples))
    for sample in samples:
        if not sample.times:
            yield f"{subject}: sample {sample.sizes} has no times; wanted one or more"
        for seconds in sample.times:
            yield from check_positive(f"{subject}: sample {sample.sizes}", seconds=seconds)
        if len(sample.sizes) != num or min(sample.sizes) < 1:
            yield f"{subject}: a sample of sizes {sample.sizes}; wanted {num}, each above 0"


def _shares(cluster: Cluster) -> Iterator[str]:
    if not 0 <= cluster.stolen_share <= 1:
        yield f"stolen_share is {cluster.stolen_share}; wanted 0 to 1"


CHECKS = (_tiers, _prices, _levels, _collectives, _shares)

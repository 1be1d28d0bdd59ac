"""The cluster: devices with memory tiers and prices of operations, and the network levels that connect ranks.

Numbers only: measured (by shardwright/measure), emulated, published or scaled.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from statistics import median
from typing import Literal

from shardwright.errors import did_you_mean
from shardwright.spec import files
from shardwright.spec.axes import ONE_RANK_AXES, Axis
from shardwright.spec.checks import check_non_negative, check_positive, check_unique, raise_if_any

# Ids per bag when "lookup" and "update" are measured; ".single": one; ".near": rows are in the processor's caches.
IDS_PER_BAG = 8
ROW_OPS = (
    *("gather", "rewrite", "columns", "lookup", "lookup.near", "lookup.single"),
    *("update", "update.near", "update.single"),
)
PRODUCTS = ("matmul", "matmul.across", "attention")
# Times of "attention" are of a forward, which has 1 of these parts of the multiplications, and a backward with 2.5.
ATTENTION_PASSES = 3.5
ID_OPS = ("ids", "ids.cut", "distinct", "place")
OPERATIONS = (
    *(*PRODUCTS, *ROW_OPS, *ID_OPS),
    *("pages", "codec", "calls", "host_to_device", "device_to_host"),
)
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
    """The sizes of a call, and its time in each measurement."""

    sizes: tuple[int, ...]
    times: tuple[float, ...]

    @property
    def seconds(self) -> float:
        """The median time, which ignores single slow moments of the machine."""
        return median(self.times)


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """Cost of an operation of the device: seconds per call, flop, row and byte."""

    # Sizes of samples: PRODUCTS (m, k, n); ROW_OPS (rows, bytes per row); calls (num,); others (bytes,).
    op: str
    dtype: str = ""
    call_seconds: float = 0.0
    seconds_per_flop: float = 0.0
    seconds_per_row: float = 0.0
    seconds_per_byte: float = 0.0
    error: float = 0.0  # of the fit: mean over the samples of |predicted / measured - 1|
    samples: tuple[Sample, ...] = ()


@dataclass(frozen=True, slots=True)
class Device:
    """The processor of one rank."""

    name: str
    kind: Literal["cpu", "cuda"]
    tiers: tuple[Tier, ...]  # fastest first
    prices: tuple[Price, ...] = ()
    peak_flops_per_second: float = 0.0  # of dense bfloat16 products, as published; 0: not known


@dataclass(frozen=True, slots=True)
class Level:
    """A network level that connects `num` ranks, or `num` groups of the next inner level."""

    name: str
    num: int
    latency_seconds: float
    bytes_per_second: float  # per rank, in one direction
    burst_bytes: int = 0
    both_bytes_per_second: float | None = None  # per rank, both directions at once; None: twice bytes_per_second
    group_bytes_per_second: float | None = None  # shared by all ranks of a group; None: not shared


HOST_LEVEL = "host"  # `measure`'s name of the level between hosts


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """A collective, measured over the ranks that differ along `levels`, in all such groups at once.

    Sizes of samples are bytes: the full vector for all_reduce, the bytes that a rank sends for all_to_all, the result
    for all_gather, the input of each rank for reduce_scatter, and the bytes that leave or reach the root for the rest.
    Link tests: in one_way, the first rank of one group sends to the second; both_ways adds the opposite direction;
    all_at_once runs one_way in every group.
    """

    op: str
    levels: tuple[str, ...]
    nums: tuple[int, ...]
    latency_seconds: float
    bytes_per_second: float
    error: float  # of the line fitted to all samples: mean of |line / seconds - 1|
    samples: tuple[Sample, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """Overlap measurement: a collective and matmuls of about the same duration, alone and at the same time.

    `collective_end_seconds` and `matmul_end_seconds`: when each ended, at the same time; 0: not measured.
    """

    op: str
    levels: tuple[str, ...]
    bytes_: int
    collective_seconds: float
    matmul_seconds: float
    together_seconds: float
    collective_end_seconds: float = 0.0
    matmul_end_seconds: float = 0.0
    num: int = 1


@dataclass(frozen=True, slots=True)
class Cluster:
    """One device per rank, and the network levels between ranks."""

    version: Literal[1]
    name: str
    source: Literal["measured", "emulated", "preset", "scaled"]  # scaled: from measurements of other levels
    device: Device
    levels: tuple[Level, ...] = ()  # innermost first; empty: one rank
    collectives: tuple[Collective, ...] = ()
    beside: tuple[Beside, ...] = ()
    stolen_share: float = 0.0  # share of the time of the last measurement that other virtual machines took

    @property
    def num_ranks(self) -> int:
        return self.group_size(len(self.levels))

    @property
    def ranks_per_host(self) -> int:
        """The number of ranks that the innermost level joins."""
        return self.group_size(1)

    @property
    def level_in_host(self) -> str:
        """The name of the level inside hosts; empty: no ranks share a host."""
        return self.levels[0].name if self.levels and self.levels[0].name != HOST_LEVEL else ""

    @property
    def is_hierarchical(self) -> bool:
        """Whether there are several hosts, each with several ranks."""
        return 1 < self.ranks_per_host < self.num_ranks

    @property
    def axes(self) -> tuple[Axis, ...]:
        """The mesh axes of a data-parallel plan: one for each level, outermost first."""
        return tuple(Axis("data", level.name, level.num) for level in reversed(self.levels)) or ONE_RANK_AXES

    def group_size(self, num_levels: int) -> int:
        """The number of ranks that the innermost `num_levels` levels join."""
        return prod(level.num for level in self.levels[:num_levels])

    def digest(self) -> str:
        return files.digest(self)

    def verify(self) -> None:
        raise_if_any(message for check in CHECKS for message in check(self))


def _check_tiers(cluster: Cluster) -> Iterator[str]:
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


def _check_prices(cluster: Cluster) -> Iterator[str]:
    yield from check_unique("price", (f"{price.op} {price.dtype}".strip() for price in cluster.device.prices))
    for price in cluster.device.prices:
        subject = f'price "{f"{price.op} {price.dtype}".strip()}"'
        costs = (price.call_seconds, price.seconds_per_flop, price.seconds_per_row, price.seconds_per_byte)
        yield from check_non_negative(
            subject,
            call_seconds=costs[0],
            seconds_per_flop=costs[1],
            seconds_per_row=costs[2],
            seconds_per_byte=costs[3],
        )
        if price.op not in OPERATIONS:
            yield f"{subject}: unknown op{did_you_mean(price.op, OPERATIONS)}"
        yield from check_non_negative(subject, error=price.error)
        if not any(costs):
            yield f"{subject} is zero; wanted seconds per call, flop, row or byte"
        yield from _check_samples(
            subject, price.samples, 3 if price.op in PRODUCTS else 2 if price.op in ROW_OPS else 1
        )


def _check_levels(cluster: Cluster) -> Iterator[str]:
    yield from check_unique("level", (level.name for level in cluster.levels))
    for level in cluster.levels:
        subject = f'level "{level.name}"'
        yield from check_positive(subject, num=level.num, bytes_per_second=level.bytes_per_second)
        yield from check_non_negative(subject, latency_seconds=level.latency_seconds, burst_bytes=level.burst_bytes)
        for name in ("both_bytes_per_second", "group_bytes_per_second"):
            if getattr(level, name) is not None:
                yield from check_positive(subject, **{name: getattr(level, name)})


def _check_overlap(overlap: Beside) -> Iterator[str]:
    subject = f"{overlap.op} overlapped with matmul"
    times = ("collective_seconds", "matmul_seconds", "together_seconds")
    yield from check_positive(
        subject, bytes_=overlap.bytes_, **{name: getattr(overlap, name) for name in times}, num=overlap.num
    )
    ends = {name: getattr(overlap, name) for name in ("collective_end_seconds", "matmul_end_seconds")}
    yield from check_non_negative(subject, **ends)
    if len(set(map(bool, ends.values()))) > 1:
        yield f"{subject}: one of two ends is 0; give both, or none"


def _check_collectives(cluster: Cluster) -> Iterator[str]:
    yield from check_unique(
        "collective", (f"{collective.op} over {', '.join(collective.levels)}" for collective in cluster.collectives)
    )
    level_names = {level.name for level in cluster.levels}
    for call in (*cluster.collectives, *cluster.beside):
        if call.op not in COLLECTIVES:
            yield f'collective "{call.op}": unknown op{did_you_mean(call.op, COLLECTIVES)}'
        for name in call.levels:
            if name not in level_names:
                yield f'{call.op} over level "{name}", which the cluster does not have'
    for overlap in cluster.beside:
        yield from _check_overlap(overlap)
    for collective in cluster.collectives:
        subject = f'collective "{collective.op} over {", ".join(collective.levels)}"'
        yield from check_positive(subject, bytes_per_second=collective.bytes_per_second)
        yield from check_non_negative(subject, latency_seconds=collective.latency_seconds, error=collective.error)
        for num in collective.nums:
            yield from check_positive(subject, nums=num)
        if len(collective.nums) != len(collective.levels):
            yield f"{subject}: {len(collective.nums)} sizes for {len(collective.levels)} levels"
        if not collective.samples:
            yield f"{subject} has no samples; wanted one or more"
        yield from _check_samples(subject, collective.samples, 1)


def _check_samples(subject: str, samples: tuple[Sample, ...], num: int) -> Iterator[str]:
    yield from check_unique(f"{subject}: sample", (sample.sizes for sample in samples))
    for sample in samples:
        if not sample.times:
            yield f"{subject}: sample {sample.sizes} has no times; wanted one or more"
        for seconds in sample.times:
            yield from check_positive(f"{subject}: sample {sample.sizes}", seconds=seconds)
        if len(sample.sizes) != num or min(sample.sizes) < 1:
            yield f"{subject}: a sample of sizes {sample.sizes}; wanted {num}, each above 0"


def _check_stolen_share(cluster: Cluster) -> Iterator[str]:
    if not 0 <= cluster.stolen_share <= 1:
        yield f"stolen_share is {cluster.stolen_share}; wanted 0 to 1"


CHECKS = (_check_tiers, _check_prices, _check_levels, _check_collectives, _check_stolen_share)

"""Seconds and bytes of each primitive on a Cluster: one function per formula, and beside it what was measured.

A collective is traffic between ranks and a number of rounds. The slowest directed link decides, and each round adds a
latency: max over links of T_l / W_l as FasterMoE has it (PPoPP'22, eq. 2), its alpha as in Hockney's model (1994).
Where the cluster says what an operation took, that counts, and what lies between its samples.
Bytes of a collective are those of `Collective`. Every `Cost` says what it rests on.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import gcd, log, prod
from types import MappingProxyType
from typing import Literal

import numpy as np

from shardwright.errors import UserError, did_you_mean
from shardwright.planner.price.rounds import Round, collective_rounds, traffic_by_level
from shardwright.spec import linear_fit
from shardwright.spec.cluster import Cluster, Collective, Device, Level, Price, Sample, Tier

Basis = Literal["measured", "beyond", "scaled", "formula"]  # beyond: outside the sizes that were measured
SAMPLE_MARGIN = 1.5  # so much below the smallest sample or above the largest still counts as measured
BANDWIDTH_OCTAVES = 1.0  # so near in each size a sample of a product tells of another
SATURATED_SIZE = 1 << 15  # from here on a size no longer changes the rate of a product
SIZE_MARGIN = 2.0  # for sizes of products and rows
CACHE_LINE_BYTES = 64
RING_OPS = ("all_reduce", "all_gather", "broadcast")  # what goes in rounds, each of which waits for a neighbour


@dataclass(frozen=True, slots=True)
class Cost:
    seconds: float
    bytes_: int  # that the rank with the most of them moves
    basis: Basis


# The device


def matmul_cost(device: Device, m: int, k: int, n: int, dtype: str = "float32", op: str = "matmul") -> Cost:
    """(m, k) by (k, n): a call, its flops at their rate, its operands through memory; the roofline's two terms added,
    and bent as far as the samples of nearly these sizes are off."""
    found = find_price(device, op, dtype)
    bytes_ = _width(dtype) * (m * k + k * n + m * n)
    seconds = _product_seconds(found, (m, k, n), dtype)
    if found.samples:
        logs = np.log2(np.minimum([(m, k, n), *(one.sizes for one in found.samples)], SATURATED_SIZE))
        apart = logs[1:] - logs[0]
        off = np.log([one.seconds / _product_seconds(found, one.sizes, dtype) for one in found.samples])
        weights = np.exp(-((apart / BANDWIDTH_OCTAVES) ** 2).sum(1) / 2)
        seconds *= float(np.exp(weights @ off / (weights.sum() + 1)))
    sizes = [(2 * prod(one.sizes),) for one in found.samples]
    return Cost(seconds, bytes_, _basis(found, (2 * m * k * n,), sizes))


def flops_cost(device: Device, num_flops: float, bytes_: float, dtype: str = "float32") -> Cost:
    """A block of many products and what is between them: its flops at their rate, its bytes through memory."""
    found = find_price(device, "matmul", dtype)
    return Cost(num_flops * found.seconds_per_flop + bytes_ * found.seconds_per_byte, round(bytes_), "formula")


def _width(dtype: str) -> int:
    if dtype not in DTYPE_WIDTHS:
        raise UserError(f'no dtype "{dtype}"{did_you_mean(dtype, DTYPE_WIDTHS)}')
    return DTYPE_WIDTHS[dtype]


def _product_seconds(price: Price, sizes: Sequence[int], dtype: str) -> float:
    m, k, n = sizes
    moved = _width(dtype) * (m * k + k * n + m * n)
    return price.call_seconds + 2 * m * k * n * price.seconds_per_flop + moved * price.seconds_per_byte


def row_access_cost(device: Device, op: str, num_rows: int, row_bytes: int) -> Cost:
    """Random rows: gather, rewrite, lookup or update of `num` of them; an access each, and the lines they lie in."""
    found = find_price(device, op, "float32")
    seconds = found.call_seconds + num_rows * (
        found.seconds_per_row + cache_line_bytes(row_bytes) * found.seconds_per_byte
    )
    if found.samples:
        most = max(one.sizes[0] for one in found.samples)
        at = sorted((one for one in found.samples if one.sizes[0] == most), key=lambda one: one.sizes[1])
        each = [max(one.seconds - found.call_seconds, 0.0) / most for one in at]
        widths = [cache_line_bytes(one.sizes[1]) for one in at]
        wider = max(0, cache_line_bytes(row_bytes) - widths[-1]) * found.seconds_per_byte
        seconds = found.call_seconds + num_rows * (float(np.interp(cache_line_bytes(row_bytes), widths, each)) + wider)
    return Cost(seconds, num_rows * row_bytes, _basis(found, (row_bytes,), [(one.sizes[1],) for one in found.samples]))


def cache_line_bytes(row_bytes: int) -> int:
    """The bytes of the cache lines that rows lie in, in the mean over the places where they may begin."""
    return row_bytes + CACHE_LINE_BYTES - gcd(row_bytes, CACHE_LINE_BYTES)


def codec_cost(device: Device, name: str, bytes_: int) -> Cost:
    """Vectors of so many bytes of float32 into a codec's form and back."""
    found = find_price(device, "codec", name)
    seconds = found.call_seconds + bytes_ * found.seconds_per_byte
    return Cost(seconds, bytes_, _basis(found, (bytes_,), [one.sizes for one in found.samples]))


def copy_cost(device: Device, bytes_: int, source: str, target: str) -> Cost:
    """From one tier of memory to another: as fast as the slower of reading here and writing there; into a device's own
    memory and out of it as the way between lets it."""
    rate = min(_tier(device, source).read_bytes_per_second, _tier(device, target).write_bytes_per_second)
    way = {"hbm": "device_to_host"}.get(source) or {"hbm": "host_to_device"}.get(target)
    found = next((one for one in device.prices if one.op == way), None) if source != target else None
    if found is None:
        return Cost(bytes_ / rate, bytes_, "formula")
    seconds = max(bytes_ / rate, found.call_seconds + bytes_ * found.seconds_per_byte)
    return Cost(seconds, bytes_, _basis(found, (bytes_,), [one.sizes for one in found.samples]))


# The network


def collective_cost(cluster: Cluster, op: str, levels: Sequence[str], bytes_: int) -> Cost:
    """Among the ranks that differ along these levels, in all such groups at once."""
    known = _measured(cluster, op, levels)
    if known is None:
        return formula_cost(cluster, op, levels, bytes_)
    sizes = np.array([float(one.sizes[0]) for one in known.samples])
    inside = sizes.min() / SAMPLE_MARGIN <= bytes_ <= sizes.max() * SAMPLE_MARGIN
    basis: Basis = "scaled" if cluster.source == "scaled" else "measured" if inside else "beyond"
    return Cost(_between(known.samples, bytes_), _moved(collective_rounds(cluster, op, levels, bytes_)), basis)


def formula_cost(cluster: Cluster, op: str, levels: Sequence[str], bytes_: int) -> Cost:
    """What the links alone say. GPUs reduce along a ring or a tree, whichever is faster (NCCL)."""
    ways = [op, "all_reduce_tree"] if op == "all_reduce" and cluster.device.kind == "cuda" else [op]
    found = [collective_rounds(cluster, way, levels, bytes_) for way in ways]
    seconds = [sum(slowest_link_seconds(cluster, one.traffic_RR) + one.latency_seconds for one in way) for way in found]
    best = int(np.argmin(seconds))
    return Cost(seconds[best], _moved(found[best]), "formula")


def sustained_cost(cluster: Cluster, op: str, levels: Sequence[str], bytes_: int) -> Cost:
    """One of many, one behind the other: links have nothing left that they saved up while nobody sent. Of CPUs, whose
    messages go as the formulas have them; NCCL may know better ways."""
    found = collective_cost(cluster, op, levels, bytes_)
    if cluster.device.kind != "cpu":
        return found
    carried = sum(
        slowest_link_seconds(cluster, one.traffic_RR) for one in collective_rounds(cluster, op, levels, bytes_)
    )
    return found if found.seconds >= carried else replace(found, seconds=carried, basis="formula")


def all_to_all_v_cost(cluster: Cluster, levels: Sequence[str], traffic_RR: np.ndarray) -> Cost:
    """Uneven: it takes as long as the even one that keeps its busiest link as busy."""
    if traffic_RR.shape != (cluster.num_ranks, cluster.num_ranks):
        raise UserError(f"traffic of shape {traffic_RR.shape} among {cluster.num_ranks} ranks")
    levels = [level.name for level, _, here_RR in traffic_by_level(cluster, traffic_RR) if here_RR.any()] or levels
    each = slowest_link_seconds(cluster, collective_rounds(cluster, "all_to_all", levels, 1 << 20)[0].traffic_RR) / (
        1 << 20
    )
    if not each:
        return Cost(0.0, 0, "formula")
    even = collective_cost(
        cluster, "all_to_all", levels, max(1, round(slowest_link_seconds(cluster, traffic_RR) / each))
    )
    return replace(even, bytes_=_moved([Round(traffic_RR, 0.0)]))


def overlapped_cost(cluster: Cluster, op: str, levels: Sequence[str], bytes_: int, compute_seconds: float) -> Cost:
    """A collective with computation at its side: as long as itself, or the computation and what it takes from that.

    What it takes, as a part of its own time, is that of the nearest pair that was measured together.
    """
    alone = collective_cost(cluster, op, levels, bytes_)
    return replace(
        alone,
        seconds=max(alone.seconds, compute_seconds + compute_slowdown(cluster, op, levels, bytes_) * alone.seconds),
    )


def compute_slowdown(cluster: Cluster, op: str, levels: Sequence[str], bytes_: int) -> float:
    """The part of a collective's time that computation beside it loses; 0 where nothing was measured."""
    kind = "all_reduce" if op in RING_OPS else "all_to_all"
    found = [one for one in cluster.beside if one.op == kind and set(one.levels) == set(levels)]
    if not found:
        return 0.0
    found.sort(key=lambda one: one.bytes_)
    parts = [(one.together_seconds - one.matmul_seconds) / one.collective_seconds for one in found]
    parts = [min(1.0, max(0.0, part)) for part in parts]  # never longer than one after the other
    return float(np.interp(log(max(bytes_, 1)), [log(one.bytes_) for one in found], parts))


def slowest_link_seconds(cluster: Cluster, traffic_RR: np.ndarray) -> float:
    """Seconds of the slowest link: of a rank's own, one way and both, and of those that the ranks of a group share."""
    seconds = 0.0
    for level, inside, here_RR in traffic_by_level(cluster, traffic_RR):
        sent, received = here_RR.sum(1), here_RR.sum(0)
        seconds = max(seconds, float(max(sent.max(), received.max())) / level.bytes_per_second)
        seconds = max(seconds, float((sent + received).max()) / _both(level))
        if level.group_bytes_per_second is not None:
            shared = (way.reshape(-1, inside).sum(1).max() for way in (sent, received))
            seconds = max(seconds, float(max(shared)) / level.group_bytes_per_second)
    return seconds


DTYPE_WIDTHS = MappingProxyType({"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "float8": 1})


def scale_cluster(cluster: Cluster, levels: tuple[Level, ...]) -> Cluster:
    """What its measurements say of other levels: every sample times what the formulas say of the one over the other."""
    other = replace(cluster, levels=levels, source="scaled", collectives=(), beside=())
    names = {level.name: level.num for level in levels}
    moved = [one for one in cluster.collectives if set(one.levels) <= set(names)]
    return replace(
        other,
        collectives=tuple(_scaled(one, cluster, other) for one in moved),
        beside=tuple(one for one in cluster.beside if set(one.levels) <= set(names)),
    )


def find_price(device: Device, op: str, dtype: str) -> Price:
    for one in device.prices:
        if (one.op, one.dtype) == (op, dtype):
            return one
    known = ", ".join(f"{one.op} {one.dtype}".strip() for one in device.prices) or "none"
    raise UserError(f'no price of "{op} {dtype}" for {device.name}; known: {known}; shardwright measure finds them')


def _scaled(one: Collective, cluster: Cluster, other: Cluster) -> Collective:
    samples: list[Sample] = []
    for sample in one.samples:
        (size,) = sample.sizes
        ratio = (
            formula_cost(other, one.op, one.levels, size).seconds
            / formula_cost(cluster, one.op, one.levels, size).seconds
        )
        samples.append(Sample(sample.sizes, tuple(seconds * ratio for seconds in sample.times)))
    nums = {level.name: level.num for level in other.levels}
    sizes = np.array([float(sample.sizes[0]) for sample in samples])
    seconds = np.array([sample.seconds for sample in samples])
    fixed, each = linear_fit.fit_line(sizes, seconds)
    return replace(
        one,
        nums=tuple(nums[name] for name in one.levels),
        latency_seconds=fixed,
        bytes_per_second=1 / max(each, 1e-15),
        error=linear_fit.mean_relative_error(
            np.stack([np.ones(len(sizes)), sizes], 1), seconds, np.array([fixed, each])
        ),
        samples=tuple(samples),
    )


def _between(samples: Sequence[Sample], bytes_: int) -> float:
    """From samples to other sizes, where time is about the larger of a latency and bytes over a rate.

    Between two samples of such a curve it lies below the straight line from one to the other, and above those that the
    samples on either side go on along: half-way is taken. Past the last sample it goes on with the last slope.
    """
    at = sorted(samples, key=lambda one: one.sizes[0])
    sizes = np.array([float(one.sizes[0]) for one in at])
    seconds = _rising([one.seconds for one in at])
    if bytes_ <= sizes[0] or len(at) == 1:
        return float(seconds[0])
    slopes = np.diff(seconds) / np.diff(sizes)
    if bytes_ >= sizes[-1]:
        return float(seconds[-1] + slopes[-1] * (bytes_ - sizes[-1]))
    left = int(np.searchsorted(sizes, bytes_, side="right")) - 1
    above = seconds[left] + slopes[left] * (bytes_ - sizes[left])
    onward = seconds[left] + (slopes[left - 1] if left else 0.0) * (bytes_ - sizes[left])
    back = seconds[left + 1] - slopes[min(left + 1, len(slopes) - 1)] * (sizes[left + 1] - bytes_)
    return float((above + min(above, max(onward, back, seconds[left]))) / 2)


def _rising(values: Sequence[float]) -> np.ndarray:
    """Neighbours that fall are one noisy value measured twice: each gets their mean."""
    pools: list[list[float]] = []
    for value in values:
        pools.append([value])
        while len(pools) > 1 and np.mean(pools[-2]) > np.mean(pools[-1]):
            last = pools.pop()
            pools[-1] += last
    return np.array([np.mean(pool) for pool in pools for _ in pool])


def _measured(cluster: Cluster, op: str, levels: Sequence[str]) -> Collective | None:
    nums = {level.name: level.num for level in cluster.levels}
    for one in cluster.collectives:
        if one.op == op and set(one.levels) == set(levels) and tuple(nums[name] for name in one.levels) == one.nums:
            return one
    return None


def _both(level: Level) -> float:
    return level.both_bytes_per_second or 2 * level.bytes_per_second


def _moved(found: Sequence[Round]) -> int:
    """Bytes of the rank that sends or receives most, over all rounds."""
    traffic_RR = sum(one.traffic_RR for one in found)
    return int(max(np.sum(traffic_RR, 0).max(), np.sum(traffic_RR, 1).max())) if found else 0


def _tier(device: Device, name: str) -> Tier:
    for tier in device.tiers:
        if tier.name == name:
            return tier
    raise UserError(f'no memory tier "{name}"; {device.name} has {", ".join(tier.name for tier in device.tiers)}')


def _basis(price: Price, sizes: Sequence[float], measured: Sequence[Sequence[float]]) -> Basis:
    if not measured:
        return "formula"
    ends = [(min(column) / SIZE_MARGIN, max(column) * SIZE_MARGIN) for column in zip(*measured, strict=True)]
    return "measured" if all(low <= size <= high for size, (low, high) in zip(sizes, ends, strict=True)) else "beyond"

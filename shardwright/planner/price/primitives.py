"""Seconds and bytes of each primitive on a Cluster: one function per formula, corrected by samples.

A collective is traffic between ranks in a number of rounds. It takes as long as its slowest directed link, plus a
latency per round: max over links of T_l / W_l as in FasterMoE (PPoPP'22, eq. 2), with alpha as in Hockney's model
(1994). If the cluster has samples of an operation, its seconds are interpolated between them instead. Bytes of a
collective are defined as in `Collective`. Every `Cost` has its basis.

Shape legend: R ranks (RR: from, to).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import gcd, log, prod
from types import MappingProxyType
from typing import Literal

import numpy as np

from shardwright.errors import UserError, did_you_mean
from shardwright.planner.price.rounds import Round, collective_rounds, traffic_by_level
from shardwright.spec import linear_fit
from shardwright.spec.cluster import Beside, Cluster, Collective, Device, Level, Price, Sample, Tier
from shardwright.spec.workload import DTYPE_BYTES

Basis = Literal["measured", "beyond", "scaled", "formula"]  # beyond: outside the sizes that were measured
MIN_OVERLAPPED_RATE = 0.1  # of a collective, while products run
SAMPLE_MARGIN = 1.5  # a size within this factor of the samples still counts as measured
BANDWIDTH_OCTAVES = 1.0  # width of the kernel over sizes, in octaves, that weights the samples of a product
SATURATED_SIZE = 1 << 15  # from here on, a size no longer changes the rate of a product
SIZE_MARGIN = 2.0  # the same as SAMPLE_MARGIN, for sizes of products and rows
CACHE_LINE_BYTES = 64
DTYPE_WIDTHS = MappingProxyType({**DTYPE_BYTES, "float8": 1})
RING_OPS = ("all_reduce", "all_gather", "broadcast")  # collectives in rounds that each wait for a neighbour


@dataclass(frozen=True, slots=True)
class Cost:
    """What an operation costs one rank."""

    seconds: float
    bytes_: int  # moved by the rank that moves most
    basis: Basis
    wire_seconds: float = 0.0  # of a collective: what its bytes take on the links that are the slowest in each round

    @property
    def link_share(self) -> float:
        """The share of its busiest link that a collective uses while nothing else does.

        Only measured ones leave a part: if latencies in formulas left one, HSDP would gain nothing over FSDP where
        DHEN's paper reports up to a fifth (benchmarks/dhen_published.py).
        """
        is_known = self.seconds and self.basis != "formula"
        return min(1.0, self.wire_seconds / self.seconds) if is_known else 1.0


# The device


def matmul_cost(device: Device, m: int, k: int, n: int, dtype: str = "float32", op: str = "matmul") -> Cost:
    """A product of (m, k) by (k, n): a call, its flops, and its operands through memory.

    The two terms of the roofline are added, and scaled by the error of the formula at samples of similar sizes.
    """
    price = find_price(device, op, dtype)
    bytes_ = _width(dtype) * (m * k + k * n + m * n)
    seconds = _product_seconds(price, (m, k, n), dtype)
    if price.samples:
        logs = np.log2(np.minimum([(m, k, n), *(sample.sizes for sample in price.samples)], SATURATED_SIZE))
        distances = logs[1:] - logs[0]
        errors = np.log([sample.seconds / _product_seconds(price, sample.sizes, dtype) for sample in price.samples])
        weights = np.exp(-((distances / BANDWIDTH_OCTAVES) ** 2).sum(1) / 2)
        seconds *= float(np.exp(weights @ errors / (weights.sum() + 1)))
    sizes = [(2 * prod(sample.sizes),) for sample in price.samples]
    return Cost(seconds, bytes_, _basis(price, (2 * m * k * n,), sizes))


def flops_cost(device: Device, num_flops: float, bytes_: float, dtype: str = "float32") -> Cost:
    """A block of many products and the operations between them: its flops, and its bytes through memory."""
    price = find_price(device, "matmul", dtype)
    return Cost(num_flops * price.seconds_per_flop + bytes_ * price.seconds_per_byte, round(bytes_), "formula")


def _width(dtype: str) -> int:
    if dtype not in DTYPE_WIDTHS:
        raise UserError(f'no dtype "{dtype}"{did_you_mean(dtype, DTYPE_WIDTHS)}')
    return DTYPE_WIDTHS[dtype]


def _product_seconds(price: Price, sizes: Sequence[int], dtype: str) -> float:
    """Seconds of a product by the price's formula."""
    m, k, n = sizes
    bytes_ = _width(dtype) * (m * k + k * n + m * n)
    return price.call_seconds + 2 * m * k * n * price.seconds_per_flop + bytes_ * price.seconds_per_byte


def row_access_cost(device: Device, op: str, num_rows: int, row_bytes: int) -> Cost:
    """Random accesses (gather, rewrite, lookup, update) to `num_rows` rows: seconds per row and cache line."""
    price = find_price(device, op, "float32")
    seconds = price.call_seconds + num_rows * (
        price.seconds_per_row + cache_line_bytes(row_bytes) * price.seconds_per_byte
    )
    if price.samples:
        max_rows = max(s.sizes[0] for s in price.samples)
        samples = sorted((s for s in price.samples if s.sizes[0] == max_rows), key=lambda s: s.sizes[1])
        times = [max(s.seconds - price.call_seconds, 0.0) / max_rows for s in samples]
        widths = [cache_line_bytes(s.sizes[1]) for s in samples]
        extra = max(0, cache_line_bytes(row_bytes) - widths[-1]) * price.seconds_per_byte
        seconds = price.call_seconds + num_rows * (float(np.interp(cache_line_bytes(row_bytes), widths, times)) + extra)
    return Cost(seconds, num_rows * row_bytes, _basis(price, (row_bytes,), [(s.sizes[1],) for s in price.samples]))


def cache_line_bytes(row_bytes: int) -> int:
    """Bytes of the cache lines that a row touches, averaged over the offsets at which it may begin."""
    return row_bytes + CACHE_LINE_BYTES - gcd(row_bytes, CACHE_LINE_BYTES)


def copy_cost(device: Device, bytes_: int, source: str, target: str) -> Cost:
    """Copy from one memory tier to another, at the slower of the read and the write rate.

    To or from GPU memory, the measured rate of the host link is used if it is slower.
    """
    rate = min(_tier(device, source).read_bytes_per_second, _tier(device, target).write_bytes_per_second)
    op = {"hbm": "device_to_host"}.get(source) or {"hbm": "host_to_device"}.get(target)
    price = next((link for link in device.prices if link.op == op), None) if source != target else None
    if price is None:
        return Cost(bytes_ / rate, bytes_, "formula")
    seconds = max(bytes_ / rate, price.call_seconds + bytes_ * price.seconds_per_byte)
    return Cost(seconds, bytes_, _basis(price, (bytes_,), [sample.sizes for sample in price.samples]))


# The network


def collective_cost(cluster: Cluster, op: str, levels: Sequence[str], bytes_: int) -> Cost:
    """A collective of `bytes_` in every group of ranks that differ only along these levels, in all groups at once."""
    fit = _find_collective(cluster, op, levels)
    if fit is None:
        return formula_cost(cluster, op, levels, bytes_)
    sizes = np.array([float(sample.sizes[0]) for sample in fit.samples])
    is_inside = sizes.min() / SAMPLE_MARGIN <= bytes_ <= sizes.max() * SAMPLE_MARGIN
    basis: Basis = "scaled" if cluster.source == "scaled" else "measured" if is_inside else "beyond"
    rounds = collective_rounds(cluster, op, levels, bytes_)
    return Cost(_interpolate(fit.samples, bytes_), _peak_bytes(rounds), basis, wire_seconds(cluster, rounds))


def formula_cost(cluster: Cluster, op: str, levels: Sequence[str], bytes_: int) -> Cost:
    """A collective's cost from link rates alone."""
    return fastest_algorithm_cost(cluster, op, lambda name: collective_rounds(cluster, name, levels, bytes_))


def fastest_algorithm_cost(cluster: Cluster, op: str, make_rounds: Callable[[str], list[Round]]) -> Cost:
    """The cost from link rates of the fastest algorithm for a collective: GPUs all-reduce by ring or tree (NCCL)."""
    ops = [op, "all_reduce_tree"] if op == "all_reduce" and cluster.device.kind == "cuda" else [op]
    algos = list(map(make_rounds, ops))
    on_wire = [wire_seconds(cluster, rounds) for rounds in algos]
    latencies = [sum(round_.latency_seconds for round_ in rounds) for rounds in algos]
    best = int(np.argmin(np.add(on_wire, latencies)))
    return Cost(on_wire[best] + latencies[best], _peak_bytes(algos[best]), "formula", on_wire[best])


def wire_seconds(cluster: Cluster, rounds: Sequence[Round]) -> float:
    """What the bytes of these rounds take, each on its slowest link."""
    return sum(slowest_link_seconds(cluster, round_.traffic_RR) for round_ in rounds)


def sustained_cost(cluster: Cluster, op: str, levels: Sequence[str], bytes_: int) -> Cost:
    """A collective in a long series of them: links cannot use burst credit saved up while idle.

    Differs on CPUs only, whose messages follow the formulas; NCCL may use better algorithms.
    """
    return in_series(cluster, collective_cost(cluster, op, levels, bytes_))


def in_series(cluster: Cluster, cost: Cost) -> Cost:
    """The cost of a collective in a long series of them: on CPUs at least what its bytes take on the links."""
    is_below = cluster.device.kind == "cpu" and cost.seconds < cost.wire_seconds
    return replace(cost, seconds=cost.wire_seconds, basis="formula") if is_below else cost


def all_to_all_v_cost(cluster: Cluster, levels: Sequence[str], traffic_RR: np.ndarray) -> Cost:
    """An uneven all-to-all: it takes as long as an even one whose links are as busy as its busiest link."""
    if traffic_RR.shape != (cluster.num_ranks, cluster.num_ranks):
        raise UserError(f"traffic of shape {traffic_RR.shape} among {cluster.num_ranks} ranks")
    levels = [level.name for level, _, level_RR in traffic_by_level(cluster, traffic_RR) if level_RR.any()] or levels
    even_RR = collective_rounds(cluster, "all_to_all", levels, 1 << 20)[0].traffic_RR
    per_byte = slowest_link_seconds(cluster, even_RR) / (1 << 20)
    if not per_byte:
        return Cost(0.0, 0, "formula")
    bytes_ = max(1, round(slowest_link_seconds(cluster, traffic_RR) / per_byte))
    even = collective_cost(cluster, "all_to_all", levels, bytes_)
    return replace(even, bytes_=_peak_bytes([Round(traffic_RR, 0.0)]))


def overlapped_cost(cluster: Cluster, op: str, levels: Sequence[str], bytes_: int, compute_seconds: float) -> Cost:
    """A collective overlapped with computation: the longer of the collective and of the slowed computation.

    The slowdown is interpolated over the sizes at which collectives and matmuls were measured together.
    """
    cost = collective_cost(cluster, op, levels, bytes_)
    slowed_seconds = compute_seconds + compute_slowdown(cluster, op, levels, bytes_) * cost.seconds
    return replace(cost, seconds=max(cost.seconds, slowed_seconds))


def compute_slowdown(cluster: Cluster, op: str, levels: Sequence[str], bytes_: int) -> float:
    """Computation lost while a collective runs, as a share of the collective's time alone; 0 if never measured."""
    return _overlap_share(cluster, op, levels, bytes_, _lost_computation)


def collective_slowdown(cluster: Cluster, op: str, levels: Sequence[str], bytes_: int) -> float:
    """The share of its speed that a collective loses while its ranks compute; 0 if never measured."""
    return _overlap_share(cluster, op, levels, bytes_, lambda pair: 1 - _collective_rate(pair))


def _overlap_share(
    cluster: Cluster, op: str, levels: Sequence[str], bytes_: int, share: Callable[[Beside], float]
) -> float:
    """A share between 0 and 1, interpolated over the sizes that were measured together with products."""
    kind = "all_reduce" if op in RING_OPS else "all_to_all"
    pairs = [pair for pair in cluster.beside if pair.op == kind and set(pair.levels) == set(levels)]
    if not pairs:
        return 0.0
    pairs.sort(key=lambda pair: pair.bytes_)
    shares = [min(1.0, max(0.0, share(pair))) for pair in pairs]  # never slower than without overlap
    return float(np.interp(log(max(bytes_, 1)), [log(pair.bytes_) for pair in pairs], shares))


def _collective_rate(pair: Beside) -> float:
    """The speed of a collective while products run, relative to its speed alone."""
    if not pair.matmul_end_seconds:
        return 1.0
    if pair.collective_end_seconds <= pair.matmul_end_seconds:
        rate = pair.collective_seconds / pair.collective_end_seconds
    else:
        rate = 1 - (pair.collective_end_seconds - pair.collective_seconds) / pair.matmul_end_seconds
    return min(1.0, max(MIN_OVERLAPPED_RATE, rate))


def _lost_computation(pair: Beside) -> float:
    """Seconds of computation lost by a collective, over the seconds that the collective takes alone."""
    if not pair.matmul_end_seconds:
        return (pair.together_seconds - pair.matmul_seconds) / pair.collective_seconds
    both = min(pair.collective_end_seconds, pair.matmul_end_seconds)  # how long both ran
    return (pair.matmul_end_seconds - pair.matmul_seconds) / (both * _collective_rate(pair))


def slowest_link_seconds(cluster: Cluster, traffic_RR: np.ndarray) -> float:
    """Seconds of the slowest link: of a rank (sent, received, and both together), or shared by several ranks."""
    seconds = 0.0
    for level, group_size, level_RR in traffic_by_level(cluster, traffic_RR):
        sent_R, received_R = level_RR.sum(1), level_RR.sum(0)
        duplex_rate = level.both_bytes_per_second or 2 * level.bytes_per_second
        seconds = max(seconds, float(max(sent_R.max(), received_R.max())) / level.bytes_per_second)
        seconds = max(seconds, float((sent_R + received_R).max()) / duplex_rate)
        if level.group_bytes_per_second is not None:
            group_bytes = (bytes_R.reshape(-1, group_size).sum(1).max() for bytes_R in (sent_R, received_R))
            seconds = max(seconds, float(max(group_bytes)) / level.group_bytes_per_second)
    return seconds


def scale_cluster(cluster: Cluster, levels: tuple[Level, ...]) -> Cluster:
    """The cluster with other levels: every sample is scaled by the ratio of the formulas for the two clusters."""
    scaled_cluster = replace(cluster, levels=levels, source="scaled", collectives=(), beside=())
    names = {level.name: level.num for level in levels}
    collectives = [entry for entry in cluster.collectives if set(entry.levels) <= set(names)]
    return replace(
        scaled_cluster,
        collectives=tuple(_scale_collective(entry, cluster, scaled_cluster) for entry in collectives),
        beside=tuple(entry for entry in cluster.beside if set(entry.levels) <= set(names)),
    )


def find_price(device: Device, op: str, dtype: str) -> Price:
    """The device's price of an operation; an error that lists all prices if there is none."""
    for price in device.prices:
        if (price.op, price.dtype) == (op, dtype):
            return price
    prices = ", ".join(f"{price.op} {price.dtype}".strip() for price in device.prices) or "none"
    raise UserError(f'no price of "{op} {dtype}" for {device.name}; known: {prices}; run shardwright measure')


def _scale_collective(collective: Collective, cluster: Cluster, other: Cluster) -> Collective:
    """A collective with its samples scaled from one cluster to the other, and a line fitted to them."""
    samples: list[Sample] = []
    for sample in collective.samples:
        (size,) = sample.sizes
        new, old = (formula_cost(c, collective.op, collective.levels, size).seconds for c in (other, cluster))
        ratio = new / old
        samples.append(Sample(sample.sizes, tuple(seconds * ratio for seconds in sample.times)))
    nums = {level.name: level.num for level in other.levels}
    sizes = np.array([float(sample.sizes[0]) for sample in samples])
    seconds = np.array([sample.seconds for sample in samples])
    latency, seconds_per_byte = linear_fit.fit_line(sizes, seconds)
    return replace(
        collective,
        nums=tuple(nums[name] for name in collective.levels),
        latency_seconds=latency,
        bytes_per_second=1 / max(seconds_per_byte, 1e-15),
        error=linear_fit.mean_relative_error(
            np.stack([np.ones(len(sizes)), sizes], 1), seconds, np.array([latency, seconds_per_byte])
        ),
        samples=tuple(samples),
    )


def _interpolate(samples: Sequence[Sample], bytes_: int) -> float:
    """Interpolate between samples, where time is about the larger of a latency and bytes over a rate.

    Between two samples of such a curve the time is below the straight line between them, and above the lines through
    the samples on either side: the middle of these bounds is used. Beyond the last sample the last slope continues.
    """
    sorted_samples = sorted(samples, key=lambda sample: sample.sizes[0])
    sizes = np.array([float(sample.sizes[0]) for sample in sorted_samples])
    seconds = _make_monotone([sample.seconds for sample in sorted_samples])
    if bytes_ <= sizes[0] or len(sorted_samples) == 1:
        return float(seconds[0])
    slopes = np.diff(seconds) / np.diff(sizes)
    if bytes_ >= sizes[-1]:
        return float(seconds[-1] + slopes[-1] * (bytes_ - sizes[-1]))
    left = int(np.searchsorted(sizes, bytes_, side="right")) - 1
    chord = seconds[left] + slopes[left] * (bytes_ - sizes[left])
    from_left = seconds[left] + (slopes[left - 1] if left else 0.0) * (bytes_ - sizes[left])
    from_right = seconds[left + 1] - slopes[min(left + 1, len(slopes) - 1)] * (sizes[left + 1] - bytes_)
    return float((chord + min(chord, max(from_left, from_right, seconds[left]))) / 2)


def _make_monotone(values: Sequence[float]) -> np.ndarray:
    """Isotonic fit (pool adjacent violators): neighbours that fall are noise and are replaced by their mean."""
    pools: list[list[float]] = []
    for value in values:
        pools.append([value])
        while len(pools) > 1 and np.mean(pools[-2]) > np.mean(pools[-1]):
            last = pools.pop()
            pools[-1] += last
    return np.array([np.mean(pool) for pool in pools for _ in pool])


def _find_collective(cluster: Cluster, op: str, levels: Sequence[str]) -> Collective | None:
    nums = {level.name: level.num for level in cluster.levels}
    for fit in cluster.collectives:
        if fit.op == op and set(fit.levels) == set(levels) and tuple(nums[name] for name in fit.levels) == fit.nums:
            return fit
    return None


def _peak_bytes(rounds: Sequence[Round]) -> int:
    """Bytes of the rank that sends or receives most, over all rounds."""
    traffic_RR = sum(r.traffic_RR for r in rounds)
    return int(max(np.sum(traffic_RR, 0).max(), np.sum(traffic_RR, 1).max())) if rounds else 0


def _tier(device: Device, name: str) -> Tier:
    for tier in device.tiers:
        if tier.name == name:
            return tier
    raise UserError(f'no memory tier "{name}"; {device.name} has {", ".join(tier.name for tier in device.tiers)}')


def _basis(price: Price, sizes: Sequence[float], samples: Sequence[Sequence[float]]) -> Basis:
    if not samples:
        return "formula"
    ranges = [(min(column) / SIZE_MARGIN, max(column) * SIZE_MARGIN) for column in zip(*samples, strict=True)]
    return "measured" if all(low <= size <= high for size, (low, high) in zip(sizes, ranges, strict=True)) else "beyond"

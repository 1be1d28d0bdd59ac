"""What bounds a step: the slowest of memory, products, each link and the host copy; and the DDL-Roofline.

The DDL-Roofline (FasterMoE, PPoPP'22, eq. 3 to 6) sets average throughput of a rank against the ratio of computation to
communication. Both are of whole iterations here: the paper takes its ratio of one phase each and its throughput of
three of computation and four of communication.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardwright.errors import UserError
from shardwright.planner.price import primitives
from shardwright.planner.price.rounds import traffic_by_level
from shardwright.spec.cluster import Cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceUsage:
    """What one step asks of the rank that has the most of each."""

    flops: int = 0
    dtype: str = "float32"
    memory_bytes: int = 0  # of random rows and of whatever else passes the fastest tier
    link_bytes: tuple[tuple[str, int], ...] = ()  # level, bytes in the direction that has more
    shared_link_bytes: tuple[tuple[str, int], ...] = ()  # the same of all ranks that share a link of that level
    host_copy_bytes: int = 0  # between host and device


@dataclass(frozen=True, slots=True)
class StepBound:
    seconds_by_resource: tuple[tuple[str, float], ...]  # name, seconds

    @property
    def serial_seconds(self) -> float:
        """One after the other."""
        return sum(seconds for _, seconds in self.seconds_by_resource)

    @property
    def overlapped_seconds(self) -> float:
        """All at once: no step is shorter."""
        return max(seconds for _, seconds in self.seconds_by_resource)

    @property
    def bottleneck(self) -> str:
        return max(self.seconds_by_resource, key=lambda part: part[1])[0]


def bytes_by_level(cluster: Cluster, traffic_RR: np.ndarray, *, shared: bool = False) -> tuple[tuple[str, int], ...]:
    """Of the rank that sends or receives most on a level, in that direction; or of the ranks that share its link."""

    def most(here_RR: np.ndarray, ranks: int) -> float:
        return max(way.reshape(-1, ranks).sum(1).max() for way in (here_RR.sum(1), here_RR.sum(0)))

    return tuple(
        (level.name, round(most(here_RR, inside if shared else 1)))
        for level, inside, here_RR in traffic_by_level(cluster, traffic_RR)
        if not shared or level.group_bytes_per_second is not None
    )


def step_bound(cluster: Cluster, usage: ResourceUsage) -> StepBound:
    """Each resource at its full rate, latencies and calls left out."""
    tier = cluster.device.tiers[0]
    parts = [("memory", usage.memory_bytes / tier.read_bytes_per_second)]
    if usage.flops:
        parts.append(("products", usage.flops / peak_flops_per_second(cluster, usage.dtype)))
    rates = {level.name: level.bytes_per_second for level in cluster.levels}
    for name, bytes_ in usage.link_bytes:
        if name not in rates:
            raise UserError(f'no level "{name}"; {cluster.name} has {", ".join(rates) or "one rank"}')
        parts.append((f"link {name}", bytes_ / rates[name]))
    together = {level.name: level.group_bytes_per_second for level in cluster.levels}
    for name, bytes_ in usage.shared_link_bytes:
        if rate := together.get(name):
            parts.append((f"link {name}, shared", bytes_ / rate))
    if usage.host_copy_bytes:
        copies = primitives.find_price(cluster.device, "host_to_device", "")
        parts.append(("host copy", usage.host_copy_bytes * copies.seconds_per_byte))
    return StepBound(tuple(parts))


def peak_flops_per_second(cluster: Cluster, dtype: str = "float32") -> float:
    """Flops in a second of one rank's products."""
    seconds = primitives.find_price(cluster.device, "matmul", dtype).seconds_per_flop
    if not seconds:
        raise UserError(f"the price of products in {dtype} of {cluster.device.name} has no seconds of a flop")
    return 1 / seconds


def ideal_throughput(peak: float, ratio: float) -> float:
    """Throughput where all communication runs beside computation (eq. 5)."""
    return peak * min(1.0, ratio)


def semi_ideal_throughput(peak: float, ratio: float) -> float:
    """Throughput where nothing overlaps and the load is even (eq. 6)."""
    return peak * ratio / (ratio + 1)


def average_flops_per_second(flops_by_rank: Sequence[float], step_seconds: float) -> float:
    """Average flops in a second of a rank (eq. 4): what lies below the semi-ideal line is imbalance."""
    return sum(flops_by_rank) / len(flops_by_rank) / step_seconds

"""Lower bounds of a step (the slowest of memory, products, links and host copy) and the DDL-Roofline.

The DDL-Roofline (FasterMoE, PPoPP'22, eq. 3 to 6) plots the average throughput of a rank against the ratio of
computation to communication. Both are of whole iterations here; the paper takes its ratio from one phase of each, and
its throughput from three phases of computation and four of communication.

Shape legend: R ranks (RR: from, to).
"""

from dataclasses import dataclass

import numpy as np

from shardwright.errors import UserError
from shardwright.planner.price import primitives
from shardwright.planner.price.rounds import traffic_by_level
from shardwright.spec.cluster import Cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceUsage:
    """A step's use of each resource, on the rank that uses most of it."""

    flops: int = 0
    dtype: str = "float32"
    memory_bytes: int = 0  # of random rows and everything else that passes the fastest tier
    link_bytes: tuple[tuple[str, int], ...] = ()  # level, bytes in the busier direction
    shared_link_bytes: tuple[tuple[str, int], ...] = ()  # the same, summed over ranks that share a link of that level
    host_copy_bytes: int = 0  # between host and device


@dataclass(frozen=True, slots=True)
class StepBound:
    """Seconds that each resource is busy in a step; the largest is a lower bound of the step."""

    seconds_by_resource: tuple[tuple[str, float], ...]  # name, seconds

    @property
    def overlapped_seconds(self) -> float:
        """Seconds of a step in which everything overlaps: no step is shorter."""
        return max(seconds for _, seconds in self.seconds_by_resource)

    @property
    def bottleneck(self) -> str:
        return max(self.seconds_by_resource, key=lambda part: part[1])[0]


def bytes_by_level(cluster: Cluster, traffic_RR: np.ndarray, *, shared: bool = False) -> tuple[tuple[str, int], ...]:
    """By network level, the bytes of its busiest rank in the busier direction.

    `shared`: of the busiest group of ranks that share a link, only for levels with such links.
    """

    def busiest(level_RR: np.ndarray, group_size: int) -> float:
        return max(bytes_R.reshape(-1, group_size).sum(1).max() for bytes_R in (level_RR.sum(1), level_RR.sum(0)))

    return tuple(
        (level.name, round(busiest(level_RR, inside if shared else 1)))
        for level, inside, level_RR in traffic_by_level(cluster, traffic_RR)
        if not shared or level.group_bytes_per_second is not None
    )


def step_bound(cluster: Cluster, usage: ResourceUsage) -> StepBound:
    """The bound with every resource at its full rate, without latencies and the overhead of calls."""
    tier = cluster.device.tiers[0]
    bounds = [("memory", usage.memory_bytes / tier.read_bytes_per_second)]
    if usage.flops:
        bounds.append(("products", usage.flops / peak_flops_per_second(cluster, usage.dtype)))
    rates = {level.name: level.bytes_per_second for level in cluster.levels}
    for name, bytes_ in usage.link_bytes:
        if name not in rates:
            raise UserError(f'no level "{name}"; {cluster.name} has {", ".join(rates) or "one rank"}')
        bounds.append((f"link {name}", bytes_ / rates[name]))
    shared_rates = {level.name: level.group_bytes_per_second for level in cluster.levels}
    for name, bytes_ in usage.shared_link_bytes:
        if rate := shared_rates.get(name):
            bounds.append((f"link {name}, shared", bytes_ / rate))
    if usage.host_copy_bytes:
        copy_price = primitives.find_price(cluster.device, "host_to_device", "")
        bounds.append(("host copy", usage.host_copy_bytes * copy_price.seconds_per_byte))
    return StepBound(tuple(bounds))


def peak_flops_per_second(cluster: Cluster, dtype: str = "float32") -> float:
    """Flops per second of matrix products on one rank."""
    seconds = primitives.find_price(cluster.device, "matmul", dtype).seconds_per_flop
    if not seconds:
        raise UserError(f"the {dtype} matmul price of {cluster.device.name} has 0 seconds per flop; measure it again")
    return 1 / seconds


def ideal_throughput(peak: float, ratio: float) -> float:
    """Throughput if all communication overlaps with computation (eq. 5)."""
    return peak * min(1.0, ratio)


def semi_ideal_throughput(peak: float, ratio: float) -> float:
    """Throughput if nothing overlaps and the load is even (eq. 6)."""
    return peak * ratio / (ratio + 1)

"""What each collective sends: from rank to rank in bytes, round by round."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from shardwright.errors import UserError, did_you_mean
from shardwright.spec.cluster import COLLECTIVES, Cluster, Level

OPS = (*COLLECTIVES, "all_reduce_tree")


@dataclass(frozen=True, slots=True)
class Round:
    """Traffic that is under way at once: bytes from rank to rank."""

    traffic_RR: np.ndarray
    latency_seconds: float


def collective_rounds(cluster: Cluster, op: str, levels: Sequence[str], bytes_: int) -> list[Round]:
    """What an operation sends. Ring and tree: Thakur, Rabenseifner, Gropp, 2005; a reduce-scatter is this engine's own,
    an all-to-all and a sum, as is its sum over hosts with several ranks; the tree of all_reduce_tree is a reduction and
    a broadcast."""
    groups_GN = rank_groups(cluster, levels)
    num = groups_GN.shape[1]
    chosen = [level for level in cluster.levels if level.name in levels]
    latency = max((level.latency_seconds for level in chosen), default=0.0)
    match op:
        case "all_reduce" if _by_host(cluster, chosen):
            return _over_hosts(cluster, chosen, groups_GN, bytes_)
        case "all_reduce" | "all_gather":
            laps = (2 if op == "all_reduce" else 1) * (num - 1) / num
            return [Round(_rings(cluster, chosen, groups_GN, laps * bytes_), laps * _lap_seconds(chosen))]
        case "all_to_all" | "reduce_scatter":
            return [Round(_pairs(cluster, groups_GN, range(num), range(num), bytes_ / num), latency)]
        case "one_to_many":
            return [Round(_pairs(cluster, groups_GN, (0,), range(num), bytes_ / num), latency)]
        case "many_to_one":
            return [Round(_pairs(cluster, groups_GN, range(num), (0,), bytes_ / num), latency)]
        case "one_way" | "both_ways" | "all_at_once":
            pairs = groups_GN if op == "all_at_once" else groups_GN[:1]
            there = _pairs(cluster, pairs, (0,), (1,), bytes_)
            return [Round(there + there.T if op == "both_ways" else there, latency)]
        case "broadcast":
            return list(_tree(cluster, groups_GN, bytes_))
        case "all_reduce_tree":
            return [*_tree(cluster, groups_GN, bytes_)] * 2
        case _:
            raise UserError(f'no collective "{op}"{did_you_mean(op, OPS)}')


def rank_groups(cluster: Cluster, levels: Sequence[str]) -> np.ndarray:
    """The ranks of each group that differs along these levels only; the innermost level counts first."""
    names = [level.name for level in cluster.levels]
    for name in levels:
        if name not in names:
            raise UserError(f'no level "{name}"; {cluster.name} has {", ".join(names) or "one rank"}')
    nums = [level.num for level in cluster.levels]
    ranks = np.arange(prod(nums)).reshape(nums[::-1])
    chosen = [len(nums) - 1 - at for at, name in enumerate(names) if name in levels]
    return np.moveaxis(ranks, sorted(chosen), range(-len(chosen), 0)).reshape(
        -1, prod(nums[len(nums) - 1 - at] for at in chosen)
    )


def traffic_by_level(cluster: Cluster, traffic_RR: np.ndarray) -> Iterator[tuple[Level, int, np.ndarray]]:
    """Each level, how many ranks a member of it is, and what of the traffic passes it."""
    ranks, inside = np.arange(len(traffic_RR)), 1
    for level in cluster.levels:
        member, group = ranks // inside, ranks // (inside * level.num)
        apart = (group[:, None] == group) & (member[:, None] != member)
        yield level, inside, np.where(apart, traffic_RR, 0.0)
        inside *= level.num


def _rings(cluster: Cluster, levels: Sequence[Level], groups_GN: np.ndarray, bytes_: float) -> np.ndarray:
    """Each rank to the next of its group. GPUs have a ring for every rank of the innermost level, each of which leaves
    the host by another rank's link (NCCL); Gloo has one."""
    num = levels[0].num if cluster.device.kind == "cuda" and len(levels) > 1 else 1
    traffic_RR = np.zeros((cluster.num_ranks, cluster.num_ranks))
    hosts_GHN = groups_GN.reshape(len(groups_GN), -1, num)
    for turn in range(num):
        ring_GN = np.roll(hosts_GHN, turn, 2).reshape(groups_GN.shape)
        traffic_RR[ring_GN, np.roll(ring_GN, -1, 1)] += bytes_ / num
    return traffic_RR


def _by_host(cluster: Cluster, levels: Sequence[Level]) -> bool:
    """Whether ranks sum inside their hosts first: on CPUs, where hosts have several."""
    return cluster.device.kind == "cpu" and len(levels) > 1 and levels[0] is cluster.levels[0] and levels[0].num > 1


def _over_hosts(cluster: Cluster, levels: Sequence[Level], groups_GN: np.ndarray, bytes_: float) -> list[Round]:
    """A piece for each rank of a host: summed there, then over the hosts, and gathered.

    Two hosts exchange whole pieces, more of them parts, there and back.
    """
    local, outer = levels[0].num, max(level.latency_seconds for level in levels[1:])
    hosts = groups_GN.shape[1] // local
    likes_GN = groups_GN.reshape(len(groups_GN), hosts, local).swapaxes(1, 2).reshape(-1, hosts)
    piece, turns = bytes_ / local, 1 if hosts == 2 else 2
    part = piece if hosts == 2 else piece / hosts
    inside = _pairs(cluster, groups_GN.reshape(-1, local), range(local), range(local), piece)
    across = _pairs(cluster, likes_GN, range(hosts), range(hosts), part)
    met = Round(inside, levels[0].latency_seconds)
    return [met, *[Round(across, outer)] * turns, met]


def _lap_seconds(levels: Sequence[Level]) -> float:
    """Latencies once around a ring: a hop into every group of each level, and one back to the first."""
    left, seconds = prod(level.num for level in levels), 0.0
    for level in levels:
        seconds += (left - left // level.num) * level.latency_seconds
        left //= level.num
    return seconds + (levels[-1].latency_seconds if levels else 0.0)


def _pairs(
    cluster: Cluster, groups_GN: np.ndarray, sources: Sequence[int], targets: Sequence[int], bytes_: float
) -> np.ndarray:
    """Every source of a group to every target but itself."""
    traffic_RR = np.zeros((cluster.num_ranks, cluster.num_ranks))
    traffic_RR[groups_GN[:, list(sources), None], groups_GN[:, None, list(targets)]] = bytes_
    np.fill_diagonal(traffic_RR, 0.0)
    return traffic_RR


def _tree(cluster: Cluster, groups_GN: np.ndarray, bytes_: float) -> Iterator[Round]:
    """Those who have it send it on: 1, 2, 4 ranks."""
    have, num = 1, groups_GN.shape[1]
    while have < num:
        traffic_RR = np.zeros((cluster.num_ranks, cluster.num_ranks))
        more = min(have, num - have)
        traffic_RR[groups_GN[:, :more], groups_GN[:, have : have + more]] = bytes_
        passed = [level for level, _, here_RR in traffic_by_level(cluster, traffic_RR) if here_RR.any()]
        yield Round(traffic_RR, max((level.latency_seconds for level in passed), default=0.0))
        have += more

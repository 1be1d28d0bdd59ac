"""What each collective sends: bytes from rank to rank, round by round.

Shape legend: R ranks (RR: from, to), G groups, H hosts of a group, N ranks of a group or of a host.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from shardwright.errors import UserError, did_you_mean
from shardwright.spec.cluster import COLLECTIVES, Cluster, Level

OPS = (*COLLECTIVES, "all_reduce_tree")


@dataclass(frozen=True, slots=True)
class Round:
    """Messages that are in flight at the same time: bytes from rank to rank, and the latency of the round."""

    traffic_RR: np.ndarray
    latency_seconds: float


def collective_rounds(cluster: Cluster, op: str, levels: Sequence[str], bytes_: int) -> list[Round]:
    """The rounds of a collective of `bytes_` among the ranks that differ along `levels`."""
    chosen = [level for level in cluster.levels if level.name in levels]
    return group_rounds(cluster, op, chosen, rank_groups(cluster, levels), bytes_)


def group_rounds(cluster: Cluster, op: str, chosen: Sequence[Level], groups_GN: np.ndarray, bytes_: int) -> list[Round]:
    """The rounds of a collective of `bytes_` in every group at once. `chosen`: the levels that a group spans, innermost
    first, each with the number of its members in the group.

    Ring and tree follow Thakur, Rabenseifner, Gropp, 2005. Shardwright implements reduce-scatter as an all-to-all and a
    sum, and all-reduce over hosts with several ranks as in `_host_sum_rounds`. The tree of all_reduce_tree is a
    reduction and a broadcast.
    """
    num = groups_GN.shape[1]
    latency = max((level.latency_seconds for level in chosen), default=0.0)
    match op:
        case "all_reduce" if _uses_hierarchy(cluster, chosen):
            return _host_sum_rounds(cluster, chosen, groups_GN, bytes_)
        case "all_reduce" | "all_gather":
            laps = (2 if op == "all_reduce" else 1) * (num - 1) / num
            return [Round(_ring_traffic(cluster, chosen, groups_GN, laps * bytes_), laps * _lap_seconds(chosen))]
        case "all_to_all" | "reduce_scatter":
            return [Round(_pair_traffic(cluster, groups_GN, range(num), range(num), bytes_ / num), latency)]
        case "one_to_many":
            return [Round(_pair_traffic(cluster, groups_GN, (0,), range(num), bytes_ / num), latency)]
        case "many_to_one":
            return [Round(_pair_traffic(cluster, groups_GN, range(num), (0,), bytes_ / num), latency)]
        case "one_way" | "both_ways" | "all_at_once":
            pairs = groups_GN if op == "all_at_once" else groups_GN[:1]
            traffic_RR = _pair_traffic(cluster, pairs, (0,), (1,), bytes_)
            return [Round(traffic_RR + traffic_RR.T if op == "both_ways" else traffic_RR, latency)]
        case "broadcast":
            return list(_tree_rounds(cluster, groups_GN, bytes_))
        case "all_reduce_tree":
            return [*_tree_rounds(cluster, groups_GN, bytes_)] * 2
        case _:
            raise UserError(f'no collective "{op}"{did_you_mean(op, OPS)}')


def rank_groups(cluster: Cluster, levels: Sequence[str]) -> np.ndarray:
    """The groups of ranks that differ only along `levels`, (G, N); the innermost level varies fastest."""
    names = [level.name for level in cluster.levels]
    for name in levels:
        if name not in names:
            raise UserError(f'no level "{name}"; {cluster.name} has {", ".join(names) or "one rank"}')
    nums = [level.num for level in cluster.levels]
    ranks = np.arange(prod(nums)).reshape(nums[::-1])
    axes = [len(nums) - 1 - index for index, name in enumerate(names) if name in levels]
    return np.moveaxis(ranks, sorted(axes), range(-len(axes), 0)).reshape(
        -1, prod(nums[len(nums) - 1 - index] for index in axes)
    )


def traffic_by_level(cluster: Cluster, traffic_RR: np.ndarray) -> Iterator[tuple[Level, int, np.ndarray]]:
    """Each level, the number of ranks per member of its groups, and the traffic that crosses it."""
    ranks, member_size = np.arange(len(traffic_RR)), 1
    for level in cluster.levels:
        member, group = ranks // member_size, ranks // (member_size * level.num)
        crosses = (group[:, None] == group) & (member[:, None] != member)
        yield level, member_size, np.where(crosses, traffic_RR, 0.0)
        member_size *= level.num


def _ring_traffic(cluster: Cluster, levels: Sequence[Level], groups_GN: np.ndarray, bytes_: float) -> np.ndarray:
    """Traffic of a ring in which each rank sends `bytes_` to the next of its group.

    GPUs have as many rings as the innermost level has ranks, each of which leaves the host by another rank's link
    (NCCL); Gloo has a single ring.
    """
    num = levels[0].num if cluster.device.kind == "cuda" and len(levels) > 1 else 1
    traffic_RR = np.zeros((cluster.num_ranks, cluster.num_ranks))
    hosts_GHN = groups_GN.reshape(len(groups_GN), -1, num)
    for shift in range(num):
        ring_GN = np.roll(hosts_GHN, shift, 2).reshape(groups_GN.shape)
        traffic_RR[ring_GN, np.roll(ring_GN, -1, 1)] += bytes_ / num
    return traffic_RR


def _uses_hierarchy(cluster: Cluster, levels: Sequence[Level]) -> bool:
    """Whether an all-reduce sums inside hosts first: on CPUs, if hosts have several ranks."""
    innermost = cluster.levels[0].name
    return cluster.device.kind == "cpu" and len(levels) > 1 and levels[0].name == innermost and levels[0].num > 1


def _host_sum_rounds(cluster: Cluster, levels: Sequence[Level], groups_GN: np.ndarray, bytes_: float) -> list[Round]:
    """All-reduce: reduce-scatter inside each host, all-reduce over the hosts, all-gather inside each host.

    Two hosts exchange whole shards in one round; more hosts reduce-scatter and all-gather the shards, in two rounds.
    """
    local, outer = levels[0].num, max(level.latency_seconds for level in levels[1:])
    hosts = groups_GN.shape[1] // local
    peers_GN = groups_GN.reshape(len(groups_GN), hosts, local).swapaxes(1, 2).reshape(-1, hosts)
    shard_bytes, num_rounds = bytes_ / local, 1 if hosts == 2 else 2
    message_bytes = shard_bytes if hosts == 2 else shard_bytes / hosts
    inside = _pair_traffic(cluster, groups_GN.reshape(-1, local), range(local), range(local), shard_bytes)
    across = _pair_traffic(cluster, peers_GN, range(hosts), range(hosts), message_bytes)
    local_round = Round(inside, levels[0].latency_seconds)
    return [local_round, *[Round(across, outer)] * num_rounds, local_round]


def _lap_seconds(levels: Sequence[Level]) -> float:
    """Latency once around a ring: a hop into every group of each level, and a hop back to the first."""
    num_ranks, seconds = prod(level.num for level in levels), 0.0
    for level in levels:
        seconds += (num_ranks - num_ranks // level.num) * level.latency_seconds
        num_ranks //= level.num
    return seconds + (levels[-1].latency_seconds if levels else 0.0)


def _pair_traffic(
    cluster: Cluster, groups_GN: np.ndarray, sources: Sequence[int], targets: Sequence[int], bytes_: float
) -> np.ndarray:
    """Traffic in which every source of a group sends `bytes_` to every target but itself."""
    traffic_RR = np.zeros((cluster.num_ranks, cluster.num_ranks))
    traffic_RR[groups_GN[:, list(sources), None], groups_GN[:, None, list(targets)]] = bytes_
    np.fill_diagonal(traffic_RR, 0.0)
    return traffic_RR


def _tree_rounds(cluster: Cluster, groups_GN: np.ndarray, bytes_: float) -> Iterator[Round]:
    """A binomial-tree broadcast: in each round every rank that has the data sends it on (1, 2, 4 ranks)."""
    num_senders, num = 1, groups_GN.shape[1]
    while num_senders < num:
        traffic_RR = np.zeros((cluster.num_ranks, cluster.num_ranks))
        num_new = min(num_senders, num - num_senders)
        traffic_RR[groups_GN[:, :num_new], groups_GN[:, num_senders : num_senders + num_new]] = bytes_
        levels = [level for level, _, level_RR in traffic_by_level(cluster, traffic_RR) if level_RR.any()]
        yield Round(traffic_RR, max((level.latency_seconds for level in levels), default=0.0))
        num_senders += num_new

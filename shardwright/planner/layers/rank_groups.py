"""Groups of ranks along a kind of parallelism, and the links that their collectives pass.

Ranks are numbered as Megatron-LM does: tensor ranks are neighbors, then context, then data, and pipeline ranks are
farthest apart. A collective of a group that spans hosts passes the network on as many cards as the group has ranks in
the host where it has fewest: a ring enters and leaves each host once for each card. So a group whose size does not
divide evenly into hosts is slow.
"""

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from math import inf

from shardwright.spec.cluster import Cluster


@dataclass(frozen=True, slots=True)
class GroupLinks:
    """Of the slowest group. `cards`: on which it passes the network, 0: it is inside a host."""

    size: int
    cards: int
    bytes_per_second: float  # of one rank's link, or of one card
    latency_seconds: float = 0.0


def group_links(cluster: Cluster, size: int, stride: int, num_groups_apart: int) -> GroupLinks:
    """Groups of `size` ranks that are `stride` apart; `num_groups_apart`: one after another along the ranks."""
    if size == 1:
        return GroupLinks(1, 0, inf)
    cards = _num_cards(cluster.ranks_per_host, size, stride, num_groups_apart)
    level = cluster.levels[0 if cards == 0 else 1]
    rate = level.bytes_per_second
    if level.group_bytes_per_second is not None:  # all ranks of a host share a link
        rate = min(rate, level.group_bytes_per_second / cluster.ranks_per_host)
    return GroupLinks(size, cards, rate, level.latency_seconds)


@lru_cache(maxsize=4096)
def _num_cards(per_host: int, size: int, stride: int, num_groups_apart: int) -> int:
    """Of the group that has fewest; 0 if all groups are inside hosts."""
    cards = 0
    for group in range(num_groups_apart):
        first = group * size * stride
        counts = Counter((first + member * stride) // per_host for member in range(size))
        if len(counts) > 1:
            cards = min(cards or size, *counts.values())
    return cards


def exchange_seconds(links: GroupLinks, bytes_: float, per_host: int) -> float:
    """An all-to-all in which each rank sends `bytes_`, evenly; each has a network card."""
    near = links.size if links.cards == 0 else max(1, min(links.cards, per_host))
    sent = links.size - (1 if links.cards == 0 else near)
    return links.latency_seconds + bytes_ * sent / links.size / links.bytes_per_second


def ring_seconds(links: GroupLinks, bytes_: float) -> float:
    """An all-gather or reduce-scatter of `bytes_` in all."""
    if links.size == 1:
        return 0.0
    steps = links.size - 1
    return steps * (links.latency_seconds + bytes_ / links.size / (links.bytes_per_second * max(1, links.cards)))

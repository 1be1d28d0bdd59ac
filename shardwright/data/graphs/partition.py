"""Balanced partitions of a graph with few edges between them: label propagation on several levels.

As Meyerhenke, Sanders and Schulz, "Partitioning Complex Networks via Size-constrained Clustering" (2014): nodes join
the cluster of most of their neighbors, clusters become the nodes of a smaller graph until few are left, those are
placed one after another, and on the way back nodes of each level move to the partition of most of their neighbors. No
cluster or partition may exceed its limit of nodes.

Worker processes import this file; it must not import torch.

Shape legend: N nodes, E edges (each in both directions), K pairs of a node and a label, L labels, P partitions.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from shardwright.data.graphs.graph import Lists

SLACK = 0.03  # a partition may have this share more nodes than the mean
CLUSTERS = 32  # at least as many for each partition, so that whole clusters fill partitions evenly
MIN_SHRINKAGE = 0.9  # a level with more nodes than this share of those before it is the last
ROUNDS = 4  # over all nodes, of each level
CHUNKS = 4  # of a round; nodes of a chunk move at once
TRIES = 8  # orders in which clusters are placed; the best result counts


@dataclass(frozen=True, eq=False)
class _Level:
    """A graph whose nodes stand for `sizes_N` nodes; edges are sorted by `near_E`."""

    near_E: np.ndarray
    far_E: np.ndarray
    weights_E: np.ndarray
    sizes_N: np.ndarray

    @cached_property
    def starts(self) -> np.ndarray:
        return np.searchsorted(self.near_E, np.arange(len(self.sizes_N) + 1))

    def cut(self, label_N: np.ndarray) -> float:
        return float(self.weights_E[label_N[self.near_E] != label_N[self.far_E]].sum())


def partition_nodes(neighbors: Lists, partitions: int, seed: int) -> np.ndarray:
    """The partition (N,) of each node; every partition has at most 1 + SLACK times the mean number of nodes."""
    num_nodes = len(neighbors.starts) - 1
    near_E = np.repeat(np.arange(num_nodes), np.diff(neighbors.starts))
    ones_E, ones_N = np.ones(len(near_E)), np.ones(num_nodes, np.int64)
    limit = max(int(num_nodes / partitions * (1 + SLACK)), -(-num_nodes // partitions))
    level = _Level(near_E, neighbors.values, ones_E, ones_N)
    return _empty_overfull(_partition(level, partitions, limit, np.random.default_rng(seed)), partitions, limit)


def edge_cut(neighbors: Lists, partition_N: np.ndarray) -> float:
    """The share of the edges whose ends are in different partitions."""
    near_E = np.repeat(partition_N, np.diff(neighbors.starts))
    return float((near_E != partition_N[neighbors.values]).mean()) if len(near_E) else 0.0


def even_out(partition_N: np.ndarray, partitions: int) -> np.ndarray:
    """Move the last nodes of partitions with more than an even share to those with less, which may differ by one."""
    return _empty_overfull(partition_N, partitions, np.diff(np.arange(partitions + 1) * len(partition_N) // partitions))


def _empty_overfull(partition_N: np.ndarray, partitions: int, limits: int | np.ndarray) -> np.ndarray:
    order = np.argsort(partition_N, kind="stable")
    counts = np.bincount(partition_N, minlength=partitions)
    place_N = np.arange(len(order)) - np.repeat(counts.cumsum() - counts, counts)  # in its partition
    limit_N = np.broadcast_to(limits, partitions)[partition_N[order]]
    moved = order[place_N >= limit_N]
    room = np.maximum(limits - counts, 0)
    result = partition_N.copy()
    result[moved] = np.repeat(np.arange(partitions), room)[: len(moved)]
    return result


def _partition(level: _Level, partitions: int, limit: int, rng: np.random.Generator) -> np.ndarray:
    """The partition of each node of this level, by way of those below it."""
    num_nodes = len(level.sizes_N)
    largest = max(int(level.sizes_N.sum()) // (partitions * CLUSTERS), 1)
    label_N, num = _number(_propagate(level, np.arange(num_nodes), largest, rng))
    if num > MIN_SHRINKAGE * num_nodes:
        label_N, num = _number(_join_single_nodes(level, label_N, largest))
    if num > MIN_SHRINKAGE * num_nodes or num <= partitions:
        tries = [_propagate(level, _place(level, partitions, limit, rng), limit, rng) for _ in range(TRIES)]
        return min(tries, key=level.cut)
    return _propagate(level, _partition(_merge(level, label_N, num), partitions, limit, rng)[label_N], limit, rng)


def _join_single_nodes(level: _Level, label_N: np.ndarray, largest: int) -> np.ndarray:
    """Join single nodes whose first neighbors have the same label, as leaves of a star, and nodes without neighbors."""
    single = np.flatnonzero(np.bincount(label_N)[label_N] == 1)
    hub = np.append(label_N[level.far_E], -1)[level.starts[single]]
    hub = np.where(level.starts[single] < level.starts[single + 1], hub, -1)
    order = np.argsort(hub, kind="stable")
    single, hub = single[order], hub[order]
    group = level.sizes_N[single].cumsum() // largest
    _, first, names = np.unique((hub + 1) * (group.max(initial=0) + 1) + group, return_index=True, return_inverse=True)
    label_N[single] = label_N[single[first]][names]
    return label_N


def _number(label_N: np.ndarray) -> tuple[np.ndarray, int]:
    """Labels from 0 without gaps, and their number."""
    names, label_N = np.unique(label_N, return_inverse=True)
    return label_N, len(names)


def _merge(level: _Level, label_N: np.ndarray, num: int) -> _Level:
    """The graph whose nodes are the labels."""
    near_E, far_E = label_N[level.near_E], label_N[level.far_E]
    is_between = near_E != far_E
    pairs, weights = _sum_by_key(near_E[is_between] * num + far_E[is_between], level.weights_E[is_between])
    sizes = np.bincount(label_N, level.sizes_N, num).astype(np.int64)
    return _Level(pairs // num, pairs % num, weights, sizes)


def _sum_by_key(keys: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Distinct keys in ascending order, and the sum of the weights of each."""
    order = np.argsort(keys, kind="stable")
    keys = keys[order]
    first = np.flatnonzero(np.diff(keys, prepend=-1))
    return keys[first], np.add.reduceat(weights[order], first) if len(first) else weights[:0]


def _propagate(level: _Level, label_N: np.ndarray, limit: int, rng: np.random.Generator) -> np.ndarray:
    """Let nodes move, a chunk of them at a time, to the label of most of their neighbors that has room."""
    num_nodes, label_N = len(level.sizes_N), label_N.copy()
    loads_L = np.bincount(label_N, level.sizes_N, num_nodes)
    for _ in range(ROUNDS):
        chunk_E = rng.integers(0, CHUNKS, num_nodes)[level.near_E]
        for chunk in range(CHUNKS):
            own = np.flatnonzero(chunk_E == chunk)
            keys = level.near_E[own] * num_nodes + label_N[level.far_E[own]]
            pair_K, weight_K = _sum_by_key(keys, level.weights_E[own])
            node_K, target_K = np.divmod(pair_K, num_nodes)
            is_own_K, own_N = target_K == label_N[node_K], np.zeros(num_nodes)
            own_N[node_K[is_own_K]] = weight_K[is_own_K]
            gain_K = weight_K - own_N[node_K]
            fits_K = (gain_K > 0) & (loads_L[target_K] + level.sizes_N[node_K] <= limit)
            chosen = np.flatnonzero(fits_K)
            moves = chosen[_best(node_K[chosen], gain_K[chosen] + 0.5 * rng.random(len(chosen)))]
            moves = moves[_fitting(target_K[moves], gain_K[moves], level.sizes_N[node_K[moves]], limit - loads_L)]
            nodes, targets = node_K[moves], target_K[moves]
            sizes = level.sizes_N[nodes]
            loads_L += np.bincount(targets, sizes, num_nodes) - np.bincount(label_N[nodes], sizes, num_nodes)
            label_N[nodes] = targets
    return label_N


def _best(node_K: np.ndarray, score_K: np.ndarray) -> np.ndarray:
    """The position of each node's best score."""
    order = np.lexsort((score_K, node_K))
    return order[np.flatnonzero(np.diff(node_K[order], append=-1))]


def _fitting(target_K: np.ndarray, gain_K: np.ndarray, size_K: np.ndarray, room_L: np.ndarray) -> np.ndarray:
    """The positions of the moves, those of most gain first, that fit into the room of their targets."""
    order = np.lexsort((-gain_K, target_K))
    total_K, target_K = size_K[order].cumsum(), target_K[order]
    first_K = np.searchsorted(target_K, target_K)
    before_K = total_K[first_K] - size_K[order][first_K]
    return order[total_K - before_K <= room_L[target_K]]


def _place(level: _Level, partitions: int, limit: int, rng: np.random.Generator) -> np.ndarray:
    """Place nodes, large ones first, where most of their neighbors are, less where little room is left.

    Linear deterministic greedy (Stanton and Kliot, 2012).
    """
    placed_N, loads_P = np.full(len(level.sizes_N), -1), np.zeros(partitions)
    order = np.lexsort((rng.random(len(placed_N)), -np.floor(np.log2(level.sizes_N)))) if len(placed_N) else placed_N
    for node in order:
        own = slice(level.starts[node], level.starts[node + 1])
        near = placed_N[level.far_E[own]]
        is_placed = near >= 0
        links_P = np.bincount(near[is_placed], level.weights_E[own][is_placed], partitions)
        fits_P = loads_P + level.sizes_N[node] <= limit
        score_P = np.where(fits_P, links_P * (1 - loads_P / limit), -1) - 1e-9 * loads_P / limit
        placed_N[node] = score_P.argmax()
        loads_P[placed_N[node]] += level.sizes_N[node]
    return placed_N

"""Assign items to bins so that the fullest bin is as empty as possible, within the bins' free bytes.

Every item has several kinds of load. The objective is the sum over kinds of weight times the load of the fullest bin.
Local search starts from three assignments: greedy (items by falling load, each to the least loaded bin), largest
differencing (Karmarkar and Karp, 1982, for k bins: two sets of bins are merged, the fuller bins of one with the emptier
of the other), and greedy by the sum of squares (each item to the bin that has least of the loads that the item has most
of), which is best where items differ in their kinds of load.

Shape legend: N items, K kinds of load, B bins, S mergers, M items of a source bin, O items of other bins.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

import numpy as np

MAX_STEPS = 400  # of local search; an eighth of it with more than FEW_ITEMS
FEW_ITEMS, VERY_FEW_ITEMS = 200, 24
KICK_TARGETS = 8  # bins to which iterated local search moves an item
SWAP_TARGETS = 16  # the least loaded bins, with which items are swapped
MIN_GAIN = 1e-9  # a smaller relative gain is a rounding error


@dataclass(frozen=True, slots=True)
class Items:
    """Loads and bytes of the items; weights of the kinds of load; initial loads and free bytes of the bins."""

    loads_NK: np.ndarray
    bytes_N: np.ndarray
    weights_K: np.ndarray
    initial_loads_BK: np.ndarray
    free_B: np.ndarray  # bytes

    @property
    def num_bins(self) -> int:
        return len(self.free_B)

    def weighted_loads(self) -> np.ndarray:
        return self.loads_NK @ self.weights_K

    def fill_bins(self, bins_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Loads and bytes by bin."""
        loads_BK, bytes_B = self.initial_loads_BK.copy(), np.zeros(self.num_bins)
        np.add.at(loads_BK, bins_N, self.loads_NK)
        np.add.at(bytes_B, bins_N, self.bytes_N)
        return loads_BK, bytes_B

    def max_load(self, bins_N: np.ndarray) -> float:
        """The objective: the weighted sum of the largest loads."""
        return float(self.fill_bins(bins_N)[0].max(0) @ self.weights_K)

    def fits(self, bins_N: np.ndarray) -> bool:
        return bool((self.fill_bins(bins_N)[1] <= self.free_B).all())


def greedy(items: Items) -> np.ndarray | None:
    """Items by falling load, each to the least loaded bin with room; None if an item fits in no bin."""
    load_N = items.weighted_loads()
    return _greedy(items, np.lexsort((-items.bytes_N, -load_N)), items.initial_loads_BK @ items.weights_K)


def greedy_by_size(items: Items) -> np.ndarray | None:
    """Items by falling bytes, each to the least loaded bin with room: may fit where `greedy` does not."""
    return _greedy(
        items, np.lexsort((-items.weighted_loads(), -items.bytes_N)), items.initial_loads_BK @ items.weights_K
    )


def greedy_sum_of_squares(items: Items) -> np.ndarray | None:
    """Items by falling load, each to the bin with room where the sum of squared loads grows least; None as `greedy`."""
    free_B, loads_BK = items.free_B.copy(), items.initial_loads_BK.copy()
    bins_N = np.zeros(len(items.loads_NK), int)
    for item in np.lexsort((-items.bytes_N, -items.weighted_loads())):
        load_K = items.loads_NK[item]
        growth_B = np.where(free_B >= items.bytes_N[item], loads_BK @ (items.weights_K * load_K), np.inf)
        target = int(growth_B.argmin())
        if not np.isfinite(growth_B[target]):
            return None
        bins_N[item] = target
        loads_BK[target] += load_K
        free_B[target] -= items.bytes_N[item]
    return bins_N


def _greedy(items: Items, order_N: np.ndarray, initial_load_B: np.ndarray) -> np.ndarray | None:
    """Items in this order, each to the least loaded bin with room; None if an item fits in no bin."""
    load_N, free_B, bins_N = items.weighted_loads(), items.free_B.copy(), np.zeros(len(order_N), int)
    load_B = initial_load_B.copy()
    for item in order_N:
        fitting_B = np.where(free_B >= items.bytes_N[item], load_B, np.inf)
        target = int(fitting_B.argmin())
        if not np.isfinite(fitting_B[target]):
            return None
        bins_N[item] = target
        load_B[target] += load_N[item]
        free_B[target] -= items.bytes_N[item]
    return bins_N


def differencing(items: Items) -> np.ndarray | None:
    """Merge the two sets of bins with the largest differences of load until one set is left; then move what does not
    fit, or return None if no bin has room. The real bins, with their initial loads, are one of the first sets; every
    item is another, with all bins but one empty."""
    num, load_N = items.num_bins, items.weighted_loads()
    first_B = items.initial_loads_BK @ items.weights_K
    heap: list[tuple[float, int, np.ndarray, np.ndarray]] = [(-float(np.ptp(first_B)), 0, first_B, np.arange(num))]
    merged_SB: list[tuple[np.ndarray, np.ndarray]] = []  # by merger, the two nodes of each bin (see `_trace_bins`)
    for number, load in enumerate(load_N):
        load_B, nodes_B = np.zeros(num), np.full(num, -1)
        load_B[0], nodes_B[0] = load, num + number
        heap.append((-float(load) if num > 1 else 0.0, number + 1, load_B, nodes_B))
    heapify(heap)
    next_node = num + len(load_N)
    while len(heap) > 1:
        _, tie, load_B, nodes_B = heappop(heap)
        _, _, other_load_B, other_nodes_B = heappop(heap)
        falling, rising = np.argsort(-load_B, kind="stable"), np.argsort(other_load_B, kind="stable")
        sum_B, sum_nodes_B = load_B[falling] + other_load_B[rising], np.arange(next_node, next_node + num)
        merged_SB.append((nodes_B[falling], other_nodes_B[rising]))
        next_node += num
        heappush(heap, (-float(np.ptp(sum_B)), tie, sum_B, sum_nodes_B))
    bins_N = _trace_bins(num, len(load_N), heap[0][3], merged_SB)
    return _move_overflow(items, bins_N)


def _move_overflow(items: Items, bins_N: np.ndarray) -> np.ndarray | None:
    """Move items out of bins with too many bytes, each to the least loaded bin with room; None if that fails."""
    bins = _Bins(items, bins_N)
    for source in np.flatnonzero(bins.bytes_B > items.free_B):
        source_M = np.flatnonzero(bins.bins_N == source)
        for item in source_M[np.argsort(items.weighted_loads()[source_M], kind="stable")]:
            if bins.bytes_B[source] <= items.free_B[source]:
                break
            has_room_B = bins.bytes_B + items.bytes_N[item] <= items.free_B
            if has_room_B.any():
                bins.move(item, int(np.where(has_room_B, bins.loads_BK @ items.weights_K, np.inf).argmin()))
    return bins.bins_N if (bins.bytes_B <= items.free_B).all() else None


def _trace_bins(
    num: int, num_items: int, last_B: np.ndarray, merged_SB: list[tuple[np.ndarray, np.ndarray]]
) -> np.ndarray:
    """The bin of each item. Nodes 0 to `num` are the real bins, then come the items, then `num` for each merger."""
    root = np.full(num + num_items + num * len(merged_SB), -1)  # by node, its bin in the last set
    root[last_B] = np.arange(num)
    for merger in range(len(merged_SB) - 1, -1, -1):
        start = num + num_items + num * merger
        for nodes_B in merged_SB[merger]:
            is_used_B = nodes_B >= 0
            root[nodes_B[is_used_B]] = root[start : start + num][is_used_B]
    bin_of_root = np.empty(num, int)
    bin_of_root[root[:num]] = np.arange(num)
    return bin_of_root[root[num : num + num_items]]


Move = tuple[float, int, int, int | None]  # the objective after it, the item, its new bin, the item swapped with it
NO_MOVE: Move = (np.inf, 0, 0, None)


class _Bins:
    """An assignment of items to bins, with the loads and bytes of the bins."""

    def __init__(self, items: Items, bins_N: np.ndarray) -> None:
        self.items, self.bins_N = items, bins_N.copy()
        self.loads_BK, self.bytes_B = items.fill_bins(bins_N)

    def move(self, item: int, target: int) -> None:
        source, load_K, bytes_ = self.bins_N[item], self.items.loads_NK[item], self.items.bytes_N[item]
        self.loads_BK[source] -= load_K
        self.loads_BK[target] += load_K
        self.bytes_B[source] -= bytes_
        self.bytes_B[target] += bytes_
        self.bins_N[item] = target

    def step(self) -> bool:
        """Make the best move or swap out of a bin that is fullest in some load; returns whether one helps."""
        weights_K = self.items.weights_K
        objective = float(self.loads_BK.max(0) @ weights_K)
        fullest = self.loads_BK.argmax(0)[np.argsort(-weights_K, kind="stable")]
        for source in dict.fromkeys(fullest.tolist()):
            if not (self.bins_N == source).any():
                continue
            rest_BK = self._max_other_loads(source)
            new_objective, item, target, swapped = min(
                self._best_move(source, rest_BK), self._best_swap(source, rest_BK), key=lambda move: move[0]
            )
            if objective - new_objective <= MIN_GAIN * objective:
                continue
            self.move(item, target)
            if swapped is not None:
                self.move(swapped, source)
            return True
        return False

    def _max_other_loads(self, source: int) -> np.ndarray:
        """By bin, the largest loads of all bins but that one and `source`."""
        loads_BK = self.loads_BK.copy()
        loads_BK[source] = -np.inf
        order_2K = np.argsort(-loads_BK, 0, kind="stable")[:2]
        top_2K = np.take_along_axis(loads_BK, order_2K, 0)
        if len(top_2K) == 1:
            return np.full_like(loads_BK, -np.inf)
        bins_B1 = np.arange(len(loads_BK))[:, None]
        return np.where(order_2K[0] == bins_B1, top_2K[1], top_2K[0])

    def _best_move(self, source: int, rest_BK: np.ndarray) -> Move:
        items, source_M = self.items, np.flatnonzero(self.bins_N == source)
        has_room_MB = self.bytes_B + items.bytes_N[source_M][:, None] <= items.free_B
        has_room_MB[:, source] = False
        source_MBK = (self.loads_BK[source] - items.loads_NK[source_M])[:, None]
        target_MBK = self.loads_BK + items.loads_NK[source_M][:, None]
        objective_MB = np.maximum(np.maximum(source_MBK, target_MBK), rest_BK) @ items.weights_K
        objective_MB = np.where(has_room_MB, objective_MB, np.inf)
        index, target = np.unravel_index(int(objective_MB.argmin()), objective_MB.shape)
        return float(objective_MB[index, target]), int(source_M[index]), int(target), None

    def _best_swap(self, source: int, rest_BK: np.ndarray) -> Move:
        items, source_M = self.items, np.flatnonzero(self.bins_N == source)
        is_target_B = np.zeros(items.num_bins, bool)
        is_target_B[np.argsort(self.loads_BK @ items.weights_K, kind="stable")[:SWAP_TARGETS]] = True
        is_target_B[source] = False
        other_O = np.flatnonzero(is_target_B[self.bins_N])
        if not len(other_O):
            return NO_MOVE
        bins_O = self.bins_N[other_O]
        added_MO = items.bytes_N[source_M][:, None] - items.bytes_N[other_O]  # bytes, to the target
        has_room_MO = (self.bytes_B[bins_O] + added_MO <= items.free_B[bins_O]) & (
            self.bytes_B[source] - added_MO <= items.free_B[source]
        )
        objective_MO = np.zeros(added_MO.shape)
        for kind, weight in enumerate(items.weights_K):
            change_MO = items.loads_NK[source_M, kind][:, None] - items.loads_NK[other_O, kind]
            target_MO = np.maximum(self.loads_BK[bins_O, kind] + change_MO, rest_BK[bins_O, kind])
            objective_MO += weight * np.maximum(self.loads_BK[source, kind] - change_MO, target_MO)
        objective_MO = np.where(has_room_MO, objective_MO, np.inf)
        index, other = np.unravel_index(int(objective_MO.argmin()), objective_MO.shape)
        return float(objective_MO[index, other]), int(source_M[index]), int(bins_O[other]), int(other_O[other])


def local_search(items: Items, bins_N: np.ndarray, max_steps: int = MAX_STEPS) -> np.ndarray:
    """Move an item, or swap two, out of a fullest bin, as long as that helps and `max_steps` allow."""
    bins = _Bins(items, bins_N)
    for _ in range(max_steps):
        if not bins.step():
            break
    return bins.bins_N


def assign_bins(items: Items, total_items: int = 0) -> np.ndarray | None:
    """The bin of each item after local search; None if no start fits. With few items the search goes from every start,
    else from the best. `total_items`: items of all calls together, which limit the search of each."""
    starts = [
        bins_N for bins_N in (greedy_sum_of_squares(items), greedy(items), differencing(items)) if bins_N is not None
    ]
    if not starts and (bins_N := greedy_by_size(items)) is not None:
        starts = [bins_N]
    starts.sort(key=items.max_load)
    num = max(len(items.bytes_N), total_items)
    searched, steps = (starts, MAX_STEPS) if num <= FEW_ITEMS else (starts[:1], MAX_STEPS // 8)
    ends = [local_search(items, start, steps) for start in searched]
    return min(
        (iterated_local_search(items, end) if num <= VERY_FEW_ITEMS else end for end in ends),
        key=items.max_load,
        default=None,
    )


def iterated_local_search(items: Items, bins_N: np.ndarray) -> np.ndarray:
    """Leave a local optimum: move an item although that is worse, search on from there, and keep what is better."""
    best, best_objective = bins_N, items.max_load(bins_N)
    for item in np.argsort(-items.weighted_loads(), kind="stable"):
        for target in range(min(items.num_bins, KICK_TARGETS)):
            trial = best.copy()
            trial[item] = target
            if items.fits(trial):
                trial = local_search(items, trial)
                if (objective := items.max_load(trial)) < best_objective * (1 - MIN_GAIN):
                    best, best_objective = trial, objective
    return best


def imbalance(loads: Sequence[float] | np.ndarray) -> float:
    """The largest load over the mean; 1 without load."""
    return float(max(loads) * len(loads) / sum(loads)) if sum(loads) else 1.0

"""Which bin each of many things goes to, so that the fullest bin is as empty as may be, within capacities.

Things have several loads at once; what counts is the sum over loads of weight times the fullest bin's. Three starts, of
which local search goes on: greedy (the largest first, each to the least loaded), largest differencing (Karmarkar and
Karp, 1982, for k bins: two sets of bins become one, the fuller of the one with the emptier of the other), and greedy by
the bin that has least of what a thing has most of, which is best where loads are unlike.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

import numpy as np

MAX_STEPS = 400  # of local search; an eighth where things are many
FEW_ITEMS, VERY_FEW_ITEMS = 200, 24
KICK_TARGETS = 8  # bins
SWAP_TARGETS = 16  # the emptiest bins
MIN_GAIN = 1e-9  # a gain that is rounding


@dataclass(frozen=True, slots=True)
class Items:
    """Loads by thing and kind of load, and bytes; and what lies in the bins before."""

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
        return float(self.fill_bins(bins_N)[0].max(0) @ self.weights_K)

    def fits(self, bins_N: np.ndarray) -> bool:
        return bool((self.fill_bins(bins_N)[1] <= self.free_B).all())


def greedy(items: Items) -> np.ndarray | None:
    """Largest first; None where one finds no bin with room."""
    load_N = items.weighted_loads()
    return _greedy(items, np.lexsort((-items.bytes_N, -load_N)), items.initial_loads_BK @ items.weights_K)


def greedy_by_size(items: Items) -> np.ndarray | None:
    """Largest bytes first, each to the bin with the least load: what fits when greedy does not."""
    return _greedy(
        items, np.lexsort((-items.weighted_loads(), -items.bytes_N)), items.initial_loads_BK @ items.weights_K
    )


def greedy_sum_of_squares(items: Items) -> np.ndarray | None:
    """Largest first, each to the bin that has least of what this one has most of: the sum of squares grows least."""
    free_B, loads_BK = items.free_B.copy(), items.initial_loads_BK.copy()
    bins_N = np.zeros(len(items.loads_NK), int)
    for thing in np.lexsort((-items.bytes_N, -items.weighted_loads())):
        load_K = items.loads_NK[thing]
        alike_B = np.where(free_B >= items.bytes_N[thing], loads_BK @ (items.weights_K * load_K), np.inf)
        at = int(alike_B.argmin())
        if not np.isfinite(alike_B[at]):
            return None
        bins_N[thing] = at
        loads_BK[at] += load_K
        free_B[at] -= items.bytes_N[thing]
    return bins_N


def _greedy(things: Items, order_N: np.ndarray, full_B: np.ndarray) -> np.ndarray | None:
    load_N, free_B, bins_N = things.weighted_loads(), things.free_B.copy(), np.zeros(len(order_N), int)
    full_B = full_B.copy()
    for thing in order_N:
        room_B = np.where(free_B >= things.bytes_N[thing], full_B, np.inf)
        at = int(room_B.argmin())
        if not np.isfinite(room_B[at]):
            return None
        bins_N[thing] = at
        full_B[at] += load_N[thing]
        free_B[at] -= things.bytes_N[thing]
    return bins_N


def differencing(items: Items) -> np.ndarray | None:
    """The two sets of bins with the largest differences become one, until one is left; what has no room then moves on,
    None where there is none. What lies in the bins before is a set too: its places are the bins themselves."""
    num, load_N = items.num_bins, items.weighted_loads()
    first_B = items.initial_loads_BK @ items.weights_K
    heap: list[tuple[float, int, np.ndarray, np.ndarray]] = [(-float(np.ptp(first_B)), 0, first_B, np.arange(num))]
    parts_SB: list[tuple[np.ndarray, np.ndarray]] = []  # by merger, what met in each bin
    for number, load in enumerate(load_N):
        load_B, name_B = np.zeros(num), np.full(num, -1)
        load_B[0], name_B[0] = load, num + number
        heap.append((-float(load) if num > 1 else 0.0, number + 1, load_B, name_B))
    heapify(heap)
    next_name = num + len(load_N)
    while len(heap) > 1:
        _, tie, one_B, one_names = heappop(heap)
        _, _, other_B, other_names = heappop(heap)
        full, empty = np.argsort(-one_B, kind="stable"), np.argsort(other_B, kind="stable")
        sum_B, name_B = one_B[full] + other_B[empty], np.arange(next_name, next_name + num)
        parts_SB.append((one_names[full], other_names[empty]))
        next_name += num
        heappush(heap, (-float(np.ptp(sum_B)), tie, sum_B, name_B))
    bins_N = _unfolded(num, len(load_N), heap[0][3], parts_SB)
    return _repaired(items, bins_N)


def _repaired(things: Items, bins_N: np.ndarray) -> np.ndarray | None:
    """What is too much for a bin goes elsewhere, where it fills least; None where there is no room."""
    bins = _Bins(things, bins_N)
    for source in np.flatnonzero(bins.bytes_B > things.free_B):
        mine = np.flatnonzero(bins.of_N == source)
        for thing in mine[np.argsort(things.weighted_loads()[mine], kind="stable")]:
            if bins.bytes_B[source] <= things.free_B[source]:
                break
            room_B = bins.bytes_B + things.bytes_N[thing] <= things.free_B
            if room_B.any():
                bins.move(thing, int(np.where(room_B, bins.loads_BK @ things.weights_K, np.inf).argmin()))
    return bins.of_N if (bins.bytes_B <= things.free_B).all() else None


def _unfolded(num: int, things: int, last_B: np.ndarray, parts_SB: list[tuple[np.ndarray, np.ndarray]]) -> np.ndarray:
    """The bin of each thing: names 0 to `num` are the bins, then come things, then `num` for each merger."""
    root = np.full(num + things + num * len(parts_SB), -1)
    root[last_B] = np.arange(num)
    for merger in range(len(parts_SB) - 1, -1, -1):
        start = num + things + num * merger
        for part_B in parts_SB[merger]:
            there = part_B >= 0
            root[part_B[there]] = root[start : start + num][there]
    bin_of_place = np.empty(num, int)
    bin_of_place[root[:num]] = np.arange(num)
    return bin_of_place[root[num : num + things]]


Move = tuple[float, int, int, int | None]  # the fullest then, the thing, its bin, what comes back
NO_MOVE: Move = (np.inf, 0, 0, None)


class _Bins:
    """Where things lie, and what that makes of the bins."""

    def __init__(self, things: Items, bins_N: np.ndarray) -> None:
        self.things, self.of_N = things, bins_N.copy()
        self.loads_BK, self.bytes_B = things.fill_bins(bins_N)

    def move(self, thing: int, target: int) -> None:
        source, load_K, bytes_ = self.of_N[thing], self.things.loads_NK[thing], self.things.bytes_N[thing]
        self.loads_BK[source] -= load_K
        self.loads_BK[target] += load_K
        self.bytes_B[source] -= bytes_
        self.bytes_B[target] += bytes_
        self.of_N[thing] = target

    def step(self) -> bool:
        """The best move or swap from the bin that is fullest of any load."""
        weights_K = self.things.weights_K
        now = float(self.loads_BK.max(0) @ weights_K)
        fullest = self.loads_BK.argmax(0)[np.argsort(-weights_K, kind="stable")]
        for source in dict.fromkeys(fullest.tolist()):
            if not (self.of_N == source).any():
                continue
            rest_BK = self._without(source)
            gain, thing, target, other = min(
                self._best_move(source, rest_BK), self._best_swap(source, rest_BK), key=lambda found: found[0]
            )
            if now - gain <= MIN_GAIN * now:
                continue
            self.move(thing, target)
            if other is not None:
                self.move(other, source)
            return True
        return False

    def _without(self, source: int) -> np.ndarray:
        """By bin, the fullest of all others but `source`."""
        left_BK = self.loads_BK.copy()
        left_BK[source] = -np.inf
        order_2K = np.argsort(-left_BK, 0, kind="stable")[:2]
        top_2K = np.take_along_axis(left_BK, order_2K, 0)
        if len(top_2K) == 1:
            return np.full_like(left_BK, -np.inf)
        bins_B1 = np.arange(len(left_BK))[:, None]
        return np.where(order_2K[0] == bins_B1, top_2K[1], top_2K[0])

    def _best_move(self, source: int, rest_BK: np.ndarray) -> Move:
        things, mine = self.things, np.flatnonzero(self.of_N == source)
        room_MB = self.bytes_B + things.bytes_N[mine][:, None] <= things.free_B
        room_MB[:, source] = False
        here_MBK = (self.loads_BK[source] - things.loads_NK[mine])[:, None]
        there_MBK = self.loads_BK + things.loads_NK[mine][:, None]
        then_MB = np.maximum(np.maximum(here_MBK, there_MBK), rest_BK) @ things.weights_K
        then_MB = np.where(room_MB, then_MB, np.inf)
        at, target = np.unravel_index(int(then_MB.argmin()), then_MB.shape)
        return float(then_MB[at, target]), int(mine[at]), int(target), None

    def _best_swap(self, source: int, rest_BK: np.ndarray) -> Move:
        things, mine = self.things, np.flatnonzero(self.of_N == source)
        wanted_B = np.zeros(things.num_bins, bool)
        wanted_B[np.argsort(self.loads_BK @ things.weights_K, kind="stable")[:SWAP_TARGETS]] = True
        wanted_B[source] = False
        others = np.flatnonzero(wanted_B[self.of_N])
        if not len(others):
            return NO_MOVE
        bins_O = self.of_N[others]
        more_MO = things.bytes_N[mine][:, None] - things.bytes_N[others]
        room_MO = (self.bytes_B[bins_O] + more_MO <= things.free_B[bins_O]) & (
            self.bytes_B[source] - more_MO <= things.free_B[source]
        )
        then_MO = np.zeros(more_MO.shape)
        for kind, weight in enumerate(things.weights_K):
            change_MO = things.loads_NK[mine, kind][:, None] - things.loads_NK[others, kind]
            there_MO = np.maximum(self.loads_BK[bins_O, kind] + change_MO, rest_BK[bins_O, kind])
            then_MO += weight * np.maximum(self.loads_BK[source, kind] - change_MO, there_MO)
        then_MO = np.where(room_MO, then_MO, np.inf)
        at, other = np.unravel_index(int(then_MO.argmin()), then_MO.shape)
        return float(then_MO[at, other]), int(mine[at]), int(bins_O[other]), int(others[other])


def local_search(items: Items, bins_N: np.ndarray, max_steps: int = MAX_STEPS) -> np.ndarray:
    """One thing moved, or two swapped, out of a fullest bin, as long as that helps."""
    bins = _Bins(items, bins_N)
    for _ in range(max_steps):
        if not bins.step():
            break
    return bins.of_N


def assign_bins(items: Items, total_items: int = 0) -> np.ndarray | None:
    """The best of local search, from every start where things are few, else from the best; None where no start finds
    room for all. `among` so many things, most of which come later, these few need no more than a good place."""
    starts = [
        found for found in (greedy_sum_of_squares(items), greedy(items), differencing(items)) if found is not None
    ]
    if not starts and (found := greedy_by_size(items)) is not None:
        starts = [found]
    starts.sort(key=items.max_load)
    num = max(len(items.bytes_N), total_items)
    searched, steps = (starts, MAX_STEPS) if num <= FEW_ITEMS else (starts[:1], MAX_STEPS // 8)
    ends = [local_search(items, start, steps) for start in searched]
    return min(
        (iterated_local_search(items, one) if num <= VERY_FEW_ITEMS else one for one in ends),
        key=items.max_load,
        default=None,
    )


def iterated_local_search(items: Items, bins_N: np.ndarray) -> np.ndarray:
    """Out of a local optimum: one thing goes where it makes things worse, and the search goes on from there."""
    best, least = bins_N, items.max_load(bins_N)
    for thing in np.argsort(-items.weighted_loads(), kind="stable"):
        for target in range(min(items.num_bins, KICK_TARGETS)):
            other = best.copy()
            other[thing] = target
            if items.fits(other):
                other = local_search(items, other)
                if (then := items.max_load(other)) < least * (1 - MIN_GAIN):
                    best, least = other, then
    return best


def imbalance(loads: Sequence[float] | np.ndarray) -> float:
    """The fullest over the mean."""
    return float(max(loads) * len(loads) / sum(loads)) if sum(loads) else 1.0

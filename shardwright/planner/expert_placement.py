"""A permanent placement of experts by their recorded loads: replicas, packing, exchanges between ranks.

Replicas go to the experts with the highest load per replica, as in EPLB. All are packed in descending order of load
onto the least loaded rank with a free slot. Then pairs of experts change ranks as long as that lowers the mean, over
the recorded passes, of the highest load of a rank: a placement that is even on average may be uneven in every pass.

Shape legend: P passes, E experts, R ranks, X slots (experts and their replicas).
"""

import numpy as np
from numpy.typing import NDArray

from shardwright.errors import UserError
from shardwright.spec.expert_placement import PlacedMixture
from shardwright.spec.expert_rows import IntArray, split_experts

FloatArray = NDArray[np.float64]
MAX_EXCHANGES = 500


def place_experts(module: str, loads_PE: IntArray, num_ranks: int, num_redundant: int = 0) -> PlacedMixture:
    """Experts of equal number on every rank, as nearly as possible; `num_redundant` replicas in all."""
    num_experts = loads_PE.shape[1]
    if num_redundant > num_experts * (num_ranks - 1):
        raise UserError(
            f"experts.redundant={num_redundant}: {num_experts} experts on {num_ranks} ranks have at most "
            f"{num_experts * (num_ranks - 1)} replicas"
        )
    shares_PE = loads_PE / loads_PE.sum(1, keepdims=True)
    num_replicas_E = count_replicas(shares_PE.mean(0), num_ranks, num_redundant)
    experts_X = np.array([e for e, num in enumerate(num_replicas_E.tolist()) for _ in range(num)], np.int64)
    shares_PX = (shares_PE / num_replicas_E)[:, experts_X]
    ranks_X = pack(experts_X, shares_PX.mean(0), num_ranks)
    exchange_slots(experts_X, shares_PX, ranks_X, num_ranks)
    by_rank = (sorted(experts_X[ranks_X == rank].tolist()) for rank in range(num_ranks))
    return PlacedMixture(module, num_experts, tuple(map(tuple, by_rank)))


def count_replicas(shares_E: FloatArray, num_ranks: int, num_redundant: int) -> IntArray:
    """The number of ranks of each expert."""
    num_replicas_E = np.ones(len(shares_E), np.int64)
    for _ in range(num_redundant):
        load_E = np.where(num_replicas_E < num_ranks, shares_E / num_replicas_E, -1.0)
        num_replicas_E[np.argmax(load_E)] += 1
    return num_replicas_E


def pack(experts_X: IntArray, shares_X: FloatArray, num_ranks: int) -> IntArray:
    """The rank of each slot: longest processing time first, onto the least loaded rank with a free slot.

    Replicas of an expert are on different ranks. They come first, those of the most replicated expert before others,
    onto ranks with the most free slots, so that there are always enough ranks.
    """
    free_R = np.array([end - start for start, end in split_experts(len(experts_X), num_ranks)])
    load_R, ranks_X = np.zeros(num_ranks), np.full(len(experts_X), -1)
    num_replicas_X = np.bincount(experts_X)[experts_X]
    for slot in np.lexsort((-shares_X, np.where(num_replicas_X > 1, -num_replicas_X, 0))).tolist():
        is_taken_R = np.isin(np.arange(num_ranks), ranks_X[experts_X == experts_X[slot]])
        order_R = load_R - 2.0 * free_R if num_replicas_X[slot] > 1 else load_R  # all loads add up to 1
        rank = int(np.argmin(np.where((free_R > 0) & ~is_taken_R, order_R, np.inf)))
        ranks_X[slot] = rank
        free_R[rank] -= 1
        load_R[rank] += shares_X[slot]
    return ranks_X


def exchange_slots(experts_X: IntArray, shares_PX: FloatArray, ranks_X: IntArray, num_ranks: int) -> None:
    """Exchange pairs of slots in place, one of them on the rank that most often has the highest load."""
    for _ in range(MAX_EXCHANGES if num_ranks > 1 else 0):
        is_on_RX = ranks_X == np.arange(num_ranks)[:, None]
        loads_PR = shares_PX @ is_on_RX.T
        worst = int(np.bincount(loads_PR.argmax(1), minlength=num_ranks).argmax())
        best, pair = loads_PR.max(1).mean() * (1 - 1e-9), None
        others_X = np.flatnonzero(ranks_X != worst)
        rest_PX = _highest_without(loads_PR, worst)[:, ranks_X[others_X]]
        for slot in np.flatnonzero(ranks_X == worst).tolist():
            change_PX = shares_PX[:, others_X] - shares_PX[:, [slot]]
            highest_PX = np.maximum(loads_PR[:, [worst]] + change_PX, loads_PR[:, ranks_X[others_X]] - change_PX)
            mean_X = np.maximum(highest_PX, rest_PX).mean(0)
            mean_X[_would_repeat(experts_X, ranks_X, slot, others_X)] = np.inf
            if mean_X.min(initial=np.inf) < best:
                best, pair = mean_X.min(), (slot, int(others_X[mean_X.argmin()]))
        if pair is None:
            return
        ranks_X[list(pair)] = ranks_X[list(pair[::-1])]


def _highest_without(loads_PR: FloatArray, worst: int) -> FloatArray:
    """(P, R) The highest load of the ranks other than `worst` and this one."""
    others_PR = loads_PR.copy()
    others_PR[:, worst] = 0
    if others_PR.shape[1] == 2:
        return np.zeros_like(others_PR)
    second_P, first_P = np.sort(others_PR, axis=1)[:, -2:].T
    highest_PR = np.repeat(first_P[:, None], others_PR.shape[1], axis=1)
    np.put_along_axis(highest_PR, others_PR.argmax(1)[:, None], second_P[:, None], 1)
    return highest_PR


def _would_repeat(experts_X: IntArray, ranks_X: IntArray, slot: int, others_X: IntArray) -> NDArray[np.bool_]:
    """Whether an exchange of `slot` with each other slot puts two replicas of an expert on one rank."""
    here = experts_X[ranks_X == ranks_X[slot]]
    ranks_of_slot = ranks_X[experts_X == experts_X[slot]]
    return np.isin(experts_X[others_X], here) | np.isin(ranks_X[others_X], ranks_of_slot)

"""Deal the samples of a global batch to ranks, by the cost of their histories. Must not import torch.

Shape legend: B samples of a global batch.
"""

import heapq

import numpy as np

DealCost = tuple[float, float, float]  # cost of a sample whose history has n ids: a + b * n + c * n**2


def deal_by_cost(costs_B: np.ndarray, num_ranks: int) -> list[np.ndarray]:
    """For each rank the positions of its samples, in the order of the batch; ranks have about equal costs.

    A rank has as many samples as when dealt by count, so that all have equal numbers of them up to one. The longest
    processing time first: the samples in order of falling cost, each to the rank with the least cost so far of those
    that still take samples. All ranks compute the same result.
    """
    num = len(costs_B)
    room = [num * (rank + 1) // num_ranks - num * rank // num_ranks for rank in range(num_ranks)]
    loads = [(0.0, rank) for rank in range(num_ranks) if room[rank]]
    rank_B = np.empty(num, np.int64)
    for position in np.argsort(-costs_B, kind="stable").tolist():
        load, rank = loads[0]
        rank_B[position] = rank
        room[rank] -= 1
        if room[rank]:
            heapq.heapreplace(loads, (load + float(costs_B[position]), rank))
        else:
            heapq.heappop(loads)
    return [np.flatnonzero(rank_B == rank) for rank in range(num_ranks)]


def sample_costs(lengths_B: np.ndarray, cost: DealCost) -> np.ndarray:
    """The cost of each sample, from the number of ids of its history."""
    constant, linear, quadratic = cost
    return constant + lengths_B * (linear + quadratic * lengths_B.astype(np.float64))

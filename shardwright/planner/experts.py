"""Which experts to copy to other ranks for one iteration: the performance model and shadows of FasterMoE; balancing.

A rank holds its own experts. A copy of another rank's expert costs two transfers of its size, of weights and of their
gradients; rows that are computed where they are need none. Equation numbers are those of FasterMoE (PPoPP'22).

Shape legend: R ranks, E experts.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]
COMPUTE_PASSES = 3  # forward, gradients of inputs, gradients of weights
EXCHANGES = 4  # of rows: there and back, forward and backward
TRANSFERS = 2  # of an expert: its weights, their gradients
BOUNDS = (1.0, 1.05, 1.2, 1.5)  # of a rank's rows over the mean, that copies are tried for


@dataclass(frozen=True, slots=True)
class ExpertLayer:
    """Sizes of a mixture of experts, and the rates of every rank. `owners`: the rank of each expert."""

    owners: tuple[int, ...]
    row_flops: float  # of a forward pass
    row_bytes: float
    expert_bytes: float
    flops_per_second: float
    bytes_per_second: float  # of a rank's link, in each direction


@dataclass(frozen=True, eq=False)
class Assignment:
    """How many rows of each expert every rank computes. `chosen_RE`: rows by the rank that has them."""

    layer: ExpertLayer
    chosen_RE: IntArray
    computed_RE: IntArray

    @cached_property
    def loads_R(self) -> IntArray:
        return self.computed_RE.sum(1)

    @cached_property
    def imbalance(self) -> float:
        """The most rows of a rank over the mean."""
        total = int(self.loads_R.sum())
        return float(self.loads_R.max() * len(self.loads_R) / total) if total else 1.0

    @cached_property
    def copies(self) -> list[tuple[int, int]]:
        """Pairs of an expert and a rank that computes rows of it and is not its owner."""
        owned_RE = np.zeros(self.computed_RE.shape, bool)
        owned_RE[list(self.layer.owners), range(len(self.layer.owners))] = True
        ranks, experts = np.nonzero((self.computed_RE > 0) & ~owned_RE)
        return sorted(zip(experts.tolist(), ranks.tolist(), strict=True))

    @cached_property
    def moved_rows(self) -> int:
        """The most rows that a rank sends or receives in one exchange: rows are computed where they are if possible."""
        local_RE = np.minimum(self.chosen_RE, self.computed_RE)
        sent_R, received_R = (self.chosen_RE - local_RE).sum(1), (self.computed_RE - local_RE).sum(1)
        return int(max(sent_R.max(initial=0), received_R.max(initial=0)))

    @cached_property
    def moved_experts(self) -> int:
        """The most experts that a rank sends or receives: a chain of ranks hands each copied expert on."""
        sent_R, received_R = np.zeros(len(self.loads_R), int), np.zeros(len(self.loads_R), int)
        for expert, ranks in self.chains():
            sent_R[[self.layer.owners[expert], *ranks[:-1]]] += 1
            received_R[ranks] += 1
        return int(max(sent_R.max(initial=0), received_R.max(initial=0)))

    def chains(self) -> Iterator[tuple[int, list[int]]]:
        """By copied expert, the ranks that hold a copy, in the order of the chain from its owner on."""
        num = len(self.loads_R)
        for expert in dict.fromkeys(expert for expert, _ in self.copies):
            owner = self.layer.owners[expert]
            holders = [rank for other, rank in self.copies if other == expert]
            yield expert, sorted(holders, key=lambda rank, owner=owner: (rank - owner) % num)

    @cached_property
    def compute_seconds(self) -> float:
        """Equation 1 for all passes."""
        return COMPUTE_PASSES * float(self.loads_R.max(initial=0)) * self.layer.row_flops / self.layer.flops_per_second

    @cached_property
    def exchange_seconds(self) -> float:
        """Equation 2 for all exchanges of rows."""
        return EXCHANGES * self.moved_rows * self.layer.row_bytes / self.layer.bytes_per_second

    @cached_property
    def copy_seconds(self) -> float:
        return TRANSFERS * self.moved_experts * self.layer.expert_bytes / self.layer.bytes_per_second

    @cached_property
    def seconds(self) -> float:
        """The complete model: unlike Equation 8 with the rows that still travel."""
        return self.compute_seconds + self.exchange_seconds + self.copy_seconds


def without_copies(layer: ExpertLayer, chosen_RE: IntArray) -> Assignment:
    """Every row is computed by the owner of its expert."""
    computed_RE = np.zeros_like(chosen_RE)
    computed_RE[list(layer.owners), range(len(layer.owners))] = chosen_RE.sum(0)
    return Assignment(layer, chosen_RE, computed_RE)


def with_shadows(layer: ExpertLayer, chosen_RE: IntArray, experts: Sequence[int]) -> Assignment:
    """Every rank computes its own rows of these experts."""
    assignment = without_copies(layer, chosen_RE)
    assignment.computed_RE[:, list(experts)] = chosen_RE[:, list(experts)]
    return assignment


def select_shadows(layer: ExpertLayer, chosen_RE: IntArray) -> list[int]:
    """Algorithm 1: experts in descending order of rows, until one does not reduce the time of Equations 7 and 8.

    As published it counts a rank's rows, and neither the rows that still travel nor a rank that has them already.
    """
    loads_R = without_copies(layer, chosen_RE).loads_R.astype(float)
    best, shadows = imbalance_seconds(layer, loads_R.max(initial=0)), list[int]()
    for expert in np.argsort(-chosen_RE.sum(0), kind="stable").tolist():
        loads_R[layer.owners[expert]] -= chosen_RE[:, expert].sum()
        loads_R += chosen_RE[:, expert]
        seconds = shadow_seconds(layer, len(shadows) + 1, loads_R.max(initial=0))
        if seconds >= best:
            return shadows
        best = seconds
        shadows.append(expert)
    return shadows


def imbalance_seconds(layer: ExpertLayer, most_rows: float) -> float:
    """Equation 7."""
    computing = COMPUTE_PASSES * most_rows * layer.row_flops / layer.flops_per_second
    return computing + EXCHANGES * most_rows * layer.row_bytes / layer.bytes_per_second


def shadow_seconds(layer: ExpertLayer, num_shadows: int, most_rows: float) -> float:
    """Equation 8."""
    computing = COMPUTE_PASSES * most_rows * layer.row_flops / layer.flops_per_second
    return computing + TRANSFERS * num_shadows * layer.expert_bytes / layer.bytes_per_second


def balance(layer: ExpertLayer, chosen_RE: IntArray, bound: float = 1.0) -> Assignment:
    """Copies with which no rank computes more than `bound` times the mean number of rows, rounded up.

    The rank with most room is filled by the rank with most rows, until none has too many: the alias method of Walker
    and Vose. Each rank is filled once, by one other, so that it gets at most as many copies as a rank has experts. A
    rank that gave too many is filled itself later.
    """
    assignment = without_copies(layer, chosen_RE)
    computed_RE, loads_R = assignment.computed_RE, assignment.computed_RE.sum(1)
    limit = math.ceil(bound * loads_R.sum() / max(1, len(loads_R)) - 1e-9)
    while loads_R.max(initial=0) > limit:
        giver, taker = int(loads_R.argmax()), int(loads_R.argmin())
        room = limit - int(loads_R[taker])
        own = [expert for expert, owner in enumerate(layer.owners) if owner == giver]
        for expert in sorted(own, key=lambda e: (-min(room, computed_RE[giver, e]), -chosen_RE[taker, e])):
            rows = min(room, int(computed_RE[giver, expert]))
            room -= rows
            computed_RE[[giver, taker], expert] += (-rows, rows)
            loads_R[[giver, taker]] += (-rows, rows)
    return Assignment(layer, chosen_RE, computed_RE)


def choose_copies(layer: ExpertLayer, chosen_RE: IntArray) -> Assignment:
    """The fastest by the complete model of: no copies, Algorithm 1's shadows, and balancing within `BOUNDS`."""
    candidates = [without_copies(layer, chosen_RE), with_shadows(layer, chosen_RE, select_shadows(layer, chosen_RE))]
    candidates += [balance(layer, chosen_RE, bound) for bound in BOUNDS]
    return min(candidates, key=lambda assignment: assignment.seconds)

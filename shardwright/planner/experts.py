"""Which experts to copy to other ranks for one iteration: the performance model and shadows of FasterMoE; balancing.

A rank holds its own experts. A copy of another rank's expert costs two transfers of its size, of weights and of their
gradients; rows that are computed where they are need none. Equation numbers are those of FasterMoE (PPoPP'22).

Shape legend: R ranks, E experts, G groups of ranks that share a link.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from shardwright.errors import UserError
from shardwright.spec.expert_rows import IntArray, RowRanges, owners_of
from shardwright.spec.plan import ExpertCosts, ExpertPlan

COMPUTE_PASSES = 3  # forward, gradients of inputs, gradients of weights
EXCHANGES = 4  # of rows: there and back, forward and backward
TRANSFERS = 2  # of an expert: its weights, their gradients
NO_COSTS = ExpertCosts(0.0, 0.0, 0.0)
BOUNDS = (1.0, 1.05, 1.2, 1.5)  # of a rank's rows over the mean, that copies are tried for


@dataclass(frozen=True, slots=True)
class ExpertLayer:
    """A mixture of experts. `owners`: the rank of each expert; `costs`: equal on all ranks."""

    owners: tuple[int, ...]
    costs: ExpertCosts


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
    def copies(self) -> tuple[IntArray, IntArray]:
        """Pairs of a rank and an expert that it computes rows of and does not own: the ranks, and the experts."""
        is_copied_RE = self.computed_RE > 0
        is_copied_RE[self.layer.owners, np.arange(len(self.layer.owners))] = False
        ranks, experts = np.nonzero(is_copied_RE)
        return ranks, experts

    @cached_property
    def _ranges(self) -> RowRanges:
        return RowRanges(self.chosen_RE, self.computed_RE, np.array(self.layer.owners))

    def moved_rows(self, size: int = 1) -> int:
        """The most rows that a group of `size` consecutive ranks sends to others, or receives, in one exchange."""
        local_G = self._ranges.local_rows(size).sum(1)
        sent_G, received_G = (
            _by_group(rows_RE.sum(1), size) - local_G for rows_RE in (self.chosen_RE, self.computed_RE)
        )
        return int(max(sent_G.max(initial=0), received_G.max(initial=0)))

    def moved_experts(self, size: int = 1) -> int:
        """The most experts that a group of `size` consecutive ranks sends to others, or receives: a chain of ranks
        hands each copied expert on."""
        (ranks, experts), owners = self.copies, np.array(self.layer.owners)
        order = np.lexsort(((ranks - owners[experts]) % len(self.loads_R), experts))
        to, experts = ranks[order], experts[order]
        is_first = np.diff(experts, prepend=-1) != 0  # in its chain
        source = np.where(is_first, owners[experts], np.roll(to, 1))
        leaves = source // size != to // size
        sent, received = (np.bincount(each[leaves] // size) for each in (source, to))
        return int(max(sent.max(initial=0), received.max(initial=0)))

    def chains(self) -> dict[int, list[int]]:
        """By copied expert, the ranks that hold a copy, in the order of the chain from its owner on."""
        (ranks, experts), chains = self.copies, dict[int, list[int]]()
        positions = (ranks - np.array(self.layer.owners)[experts]) % len(self.loads_R)
        for number in np.lexsort((positions, experts)).tolist():
            chains.setdefault(int(experts[number]), []).append(int(ranks[number]))
        return chains

    @cached_property
    def compute_seconds(self) -> float:
        """Equation 1 for all passes."""
        return COMPUTE_PASSES * float(self.loads_R.max(initial=0)) * self.layer.costs.compute_row

    @cached_property
    def exchange_seconds(self) -> float:
        """Equation 2 for all exchanges of rows: the busiest link counts."""
        costs = self.layer.costs
        shared = (self.moved_rows(link.ranks) * link.send_row for link in costs.shared)
        return EXCHANGES * max(self.moved_rows() * costs.send_row, *shared, 0.0)

    @cached_property
    def copy_seconds(self) -> float:
        """Weights and their gradients on the busiest link, and the longest chain's last part."""
        costs, longest = self.layer.costs, max(np.bincount(self.copies[1]).tolist(), default=0)
        shared = (self.moved_experts(link.ranks) * link.send_expert for link in costs.shared)
        transfers = TRANSFERS * max(self.moved_experts() * costs.send_expert, *shared, 0.0)
        return transfers + max(0, longest - 1) * costs.hand_on

    @cached_property
    def seconds(self) -> float:
        """The complete model: unlike Equation 8 with the rows that are still exchanged."""
        return self.compute_seconds + self.exchange_seconds + self.copy_seconds

    @cached_property
    def overlapped_seconds(self) -> float:
        """The least time if messages overlap with computation: in forward, a third of it, and in backward."""
        messages, forward = (self.exchange_seconds + self.copy_seconds) / 2, self.compute_seconds / COMPUTE_PASSES
        return max(messages, forward) + max(messages, self.compute_seconds - forward)


def _by_group(values_R: IntArray, size: int) -> IntArray:
    return values_R.reshape(-1, size).sum(1)


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

    As published it counts a rank's rows, not those that are still exchanged, nor those that a rank has already.
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
    return COMPUTE_PASSES * most_rows * layer.costs.compute_row + EXCHANGES * most_rows * layer.costs.send_row


def shadow_seconds(layer: ExpertLayer, num_shadows: int, most_rows: float) -> float:
    """Equation 8."""
    computing = COMPUTE_PASSES * most_rows * layer.costs.compute_row
    return computing + TRANSFERS * num_shadows * layer.costs.send_expert


def balance(layer: ExpertLayer, chosen_RE: IntArray, bound: float = 1.0) -> Assignment:
    """Copies with which no rank computes more than `bound` times the mean number of rows, rounded up.

    The most loaded rank gives rows to the least loaded one, up to the limit, until no rank is above it: the alias
    method of Walker and Vose. Each rank is filled once, by one other, so that it gets at most as many copies as a rank
    has experts. A rank that gave too many is filled itself later.
    """
    if bound < 1:
        raise UserError(f"balancing within {bound:g} times the mean; wanted 1 or more")
    start = without_copies(layer, chosen_RE)
    # Lists, since single numbers of arrays are ten times slower to access.
    loads: list[int] = start.loads_R.tolist()
    kept: list[int] = chosen_RE.sum(0).tolist()  # of each expert's rows, by its owner
    own: list[list[int]] = [[] for _ in loads]
    for expert, owner in enumerate(layer.owners):
        own[owner].append(expert)
    limit = math.ceil(bound * sum(loads) / max(1, len(loads)) - 1e-9)
    while (most := max(loads, default=0)) > limit:
        giver, taker = loads.index(most), loads.index(min(loads))
        room = limit - loads[taker]
        # Experts that suffice alone first, of them those of which the taker has most rows itself.
        order = [(min(room, kept[expert]), chosen_RE[taker, expert], expert) for expert in own[giver]]
        for _, _, expert in sorted(order, reverse=True):
            rows = min(room, kept[expert])
            room -= rows
            kept[expert] -= rows
            start.computed_RE[taker, expert] += rows
        loads[giver] -= limit - room - loads[taker]
        loads[taker] = limit - room
    computed_RE = start.computed_RE
    computed_RE[list(layer.owners), range(len(kept))] = kept
    return Assignment(layer, chosen_RE, computed_RE)


def copy_candidates(layer: ExpertLayer, chosen_RE: IntArray) -> list[Assignment]:
    """No copies, Algorithm 1's shadows, and balancing within each of `BOUNDS`."""
    candidates = [without_copies(layer, chosen_RE), with_shadows(layer, chosen_RE, select_shadows(layer, chosen_RE))]
    return candidates + [balance(layer, chosen_RE, bound) for bound in BOUNDS]


def choose_copies(layer: ExpertLayer, chosen_RE: IntArray, *, overlap: bool = False) -> Assignment:
    """The fastest candidate by the complete model.

    With `overlap`, by the bound of overlap, and of equal bounds the fastest without.
    """
    candidates = copy_candidates(layer, chosen_RE)
    return min(candidates, key=lambda each: (each.overlapped_seconds if overlap else each.seconds, each.seconds))


def decide(plan: ExpertPlan, chosen_RE: IntArray) -> IntArray | None:
    """How many rows of each expert every rank computes, by the plan's `copies`; None: no copies."""
    if plan.copies == "none":
        return None
    num_ranks, num_experts = chosen_RE.shape
    layer = ExpertLayer(tuple(owners_of(num_experts, num_ranks).tolist()), plan.costs or NO_COSTS)
    if plan.copies == "even":
        return balance(layer, chosen_RE).computed_RE
    if plan.copies == "shadows":
        return with_shadows(layer, chosen_RE, select_shadows(layer, chosen_RE)).computed_RE
    return choose_copies(layer, chosen_RE, overlap=plan.groups > 1).computed_RE

"""Which rows a rank sends where, and in which order it computes those that it receives. Numbers only, no messages.

The rows of each expert are computed in the order of spec/expert_rows.py.

Shape legend: R ranks; E experts; P pieces: the rows of one expert that one rank sends another.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np

from shardwright.spec.expert_rows import ExpertRowOrder, ExpertRowRanges, IntArray, split_experts

Chain = tuple[int, int, tuple[int, ...]]  # a copied expert, its owner, the ranks with copies in the order of its rows


def ring_steps(num_ranks: int, num_groups: int, rank: int) -> Iterator[tuple[list[int], list[int]]]:
    """The ranks that this rank sends to, and receives from, in each step of a pairwise exchange between groups.

    Groups of consecutive ranks form a ring. In step j the ranks of group i send to group i - j and receive from group
    i + j; step 0 stays inside the group.
    """
    bounds = [num_ranks * group // num_groups for group in range(num_groups + 1)]
    groups = [list(range(start, end)) for start, end in pairwise(bounds)]
    own = next(number for number, group in enumerate(groups) if rank in group)
    for step in range(num_groups):
        yield groups[(own - step) % num_groups], groups[(own + step) % num_groups]


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """Rows that are exchanged together, then computed together, and returned.

    `sends`: by rank, a range of the rows in the order in which they are sent; `receives`: by rank, a range of the rows
    received. `by_expert`: the received rows in the order of experts, and of the rows of each expert; None: they are.
    `positions`: of the rows, so ordered, among the rows of all steps that are computed with the same weights, in the
    same order; None: these are all.
    """

    sends: tuple[tuple[int, slice], ...]
    receives: tuple[tuple[int, slice], ...]
    sizes: IntArray  # rows of each expert that this rank owns, or has a copy of
    by_expert: IntArray | None
    positions: IntArray | None
    is_copy: bool = False  # computed with copies of other ranks' experts

    @property
    def num_received(self) -> int:
        return int(self.sizes.sum())


@dataclass(frozen=True, slots=True, eq=False)
class Dispatch:
    """The exchange of one call of a mixture, as a rank sees it.

    `order`: its rows in the order in which they are sent, as positions in the order of experts. `own`, `copied`: the
    experts whose rows it computes with its own weights and with copies. `chains`: of all copied experts: the expert,
    its owner, and the ranks with copies, in the order of its rows.
    """

    order: IntArray
    own: range
    copied: tuple[int, ...]
    steps: tuple[Step, ...]
    chains: tuple[Chain, ...]

    def sizes(self, *, is_copy: bool) -> IntArray:
        """The rows of each of its experts, or of each copy, over all steps."""
        steps = [step.sizes for step in self.steps if step.is_copy == is_copy]
        num = len(self.copied) if is_copy else len(self.own)
        return np.array(steps, np.int64).reshape(len(steps), num).sum(0)

    def computed(self, num_experts: int) -> IntArray:
        """(E,) The rows of each expert that the rank computes."""
        computed_E = np.zeros(num_experts, np.int64)
        computed_E[list(self.own)] = self.sizes(is_copy=False)
        computed_E[list(self.copied)] = self.sizes(is_copy=True)
        return computed_E


def make_dispatch(
    order: ExpertRowOrder, rank: int, num_groups: int = 1, computed_RE: IntArray | None = None
) -> Dispatch:
    """The exchange in which each rank computes `computed_RE` rows of each expert; None: its owner computes all.

    Rows for owners are exchanged in `num_groups` steps, then rows for copies in as many.
    """
    num_ranks, num_experts = order.chosen_RE.shape
    own = range(*split_experts(num_experts, num_ranks)[rank])
    ranges = ExpertRowRanges(order, computed_RE)
    outgoing, incoming = _Outgoing(ranges, rank), _Incoming(ranges, rank)
    kinds = [(targets, sources, False) for targets, sources in ring_steps(num_ranks, num_groups, rank)]
    has_copies = outgoing.has_copies or incoming.has_copies
    kinds += [(targets, sources, True) for targets, sources, _ in kinds if has_copies]
    copied = tuple(expert for expert in incoming.experts if expert not in own)
    orders, builders, sent = [], list[_StepBuilder](), 0
    for targets, sources, is_copy in kinds:
        rows, sends = outgoing.rows_for(targets, sent, is_copy=is_copy)
        sent += len(rows)
        orders.append(rows)
        builders.append(_StepBuilder(sends, incoming, copied if is_copy else own, sources, is_copy))
    return Dispatch(np.concatenate(orders), own, copied, tuple(_finish(builders)), tuple(ranges.chains()))


class _Outgoing:
    """The rows of a rank, by segment and the rank that computes them."""

    def __init__(self, ranges: ExpertRowRanges, rank: int) -> None:
        order, own_E = ranges.order, ranges.order.chosen_RE[rank]
        segments, start_RP, self._size_RP = ranges.sent_by(rank)
        experts_P, num_ranks = order.expert_P[segments], len(order.chosen_RE)
        first_P = (np.cumsum(own_E) - own_E)[experts_P] + order.begin_P[segments] - order.start_P[segments]
        self._begin_RP = first_P + start_RP
        self._is_owner_RP = np.arange(num_ranks)[:, None] == order.owners_E[experts_P]
        self.has_copies = bool((self._size_RP * ~self._is_owner_RP).any())

    def rows_for(
        self, targets: Sequence[int], sent: int, *, is_copy: bool
    ) -> tuple[IntArray, tuple[tuple[int, slice], ...]]:
        """Rows for owners or copies on these ranks, by rank and segment; and the range of each rank, after `sent`."""
        size_RP = (self._size_RP * (self._is_owner_RP != is_copy))[targets]
        ends = [*accumulate(size_RP.sum(1).tolist(), initial=sent)]
        sends = tuple((target, slice(*ends)) for target, ends in zip(targets, pairwise(ends), strict=True))
        return _concatenate_ranges(self._begin_RP[targets].ravel(), size_RP.ravel()), sends


class _Incoming:
    """The rows that a rank computes, by segment. Each rank sends its own in the order of segments."""

    def __init__(self, ranges: ExpertRowRanges, rank: int) -> None:
        order = ranges.order
        start_P, size_P = ranges.computed_by(rank)
        exists_P = size_P > 0
        self.chosen_shape = order.chosen_RE.shape
        self.expert_P, self.source_P = order.expert_P[exists_P], order.source_P[exists_P]
        self.start_P, self.size_P = start_P[exists_P], size_P[exists_P]
        self.experts: list[int] = np.unique(self.expert_P).tolist()
        self.has_copies = bool((order.owners_E[self.experts] != rank).any())


class _StepBuilder:
    """The pieces that a rank receives in a step, and their order."""

    def __init__(
        self,
        sends: tuple[tuple[int, slice], ...],
        incoming: _Incoming,
        experts: Sequence[int],
        sources: Sequence[int],
        is_copy: bool,
    ) -> None:
        self.sends, self.is_copy = sends, is_copy
        position_E, place_R = (np.full(num, -1) for num in incoming.chosen_shape[::-1])
        position_E[list(experts)], place_R[list(sources)] = np.arange(len(experts)), np.arange(len(sources))
        expert_P, place_P = position_E[incoming.expert_P], place_R[incoming.source_P]
        pieces = np.flatnonzero((expert_P >= 0) & (place_P >= 0))
        pieces = pieces[np.argsort(place_P[pieces], kind="stable")]  # as they arrive
        expert_P, start_P, size_P = expert_P[pieces], incoming.start_P[pieces], incoming.size_P[pieces]
        received = np.bincount(place_P[pieces], size_P, len(sources)).astype(np.int64)
        ends = [*accumulate(received.tolist(), initial=0)]
        self.receives = tuple((source, slice(*ends)) for source, ends in zip(sources, pairwise(ends), strict=True))
        self.sizes = np.bincount(expert_P, size_P, len(experts)).astype(np.int64)
        by_expert_P = np.lexsort((start_P, expert_P))
        starts_P = np.cumsum(size_P) - size_P
        self.by_expert = _concatenate_ranges(starts_P[by_expert_P], size_P[by_expert_P])
        self.is_sorted = bool((np.diff(self.by_expert) == 1).all())
        self.keys = np.stack((expert_P, start_P, size_P))[:, by_expert_P]


def _finish(builders: Sequence[_StepBuilder]) -> Iterator[Step]:
    for builder in builders:
        alike = [other for other in builders if other.is_copy == builder.is_copy]
        positions = None
        if len(alike) > 1:
            expert_P, start_P, sizes_P = np.concatenate([other.keys for other in alike], 1)
            by_expert_P = np.lexsort((start_P, expert_P))
            starts_P = np.empty_like(sizes_P)
            starts_P[by_expert_P] = np.cumsum(sizes_P[by_expert_P]) - sizes_P[by_expert_P]
            first = sum(other.keys.shape[1] for other in alike[: alike.index(builder)])
            own_P = slice(first, first + builder.keys.shape[1])
            positions = _concatenate_ranges(starts_P[own_P], sizes_P[own_P])
        by_expert = None if builder.is_sorted else builder.by_expert
        yield Step(builder.sends, builder.receives, builder.sizes, by_expert, positions, builder.is_copy)


def _concatenate_ranges(starts_P: IntArray, sizes_P: IntArray) -> IntArray:
    """start, start + 1, ... of each piece, one piece after the other."""
    ends_P = np.cumsum(sizes_P)
    return np.repeat(starts_P - ends_P + sizes_P, sizes_P) + np.arange(ends_P[-1] if len(ends_P) else 0)

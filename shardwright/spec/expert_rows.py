"""Which rows of experts ranks have and compute: the order that planner and runtime share.

The rows of an expert have one order, whoever computes them. Ranks that compute rows of an expert, its owner and those
with a copy, take consecutive ranges of it, the owner the last. A sum over these rows, as a weight's gradient is, can
thus be continued from rank to rank, ends at the owner, and does not depend on the copies.

Shape legend: R ranks; E experts; P segments: consecutive rows of an expert that one rank has; G groups of as many
consecutive ranks; X experts that are copied, T ranks that have a copy.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from heapq import heapify, heappop, heappush
from itertools import pairwise
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from shardwright.spec.plan import ExpertRowOrderName

IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]
ORDER_BOUND = 1.05  # of a rank's rows over the mean, with the copies that `balanced_order` is made for


def split_experts(num_experts: int, num_ranks: int) -> list[tuple[int, int]]:
    """The first and the last expert (end excluded) that each rank owns, as even as possible."""
    bounds = [num_experts * rank // num_ranks for rank in range(num_ranks + 1)]
    return list(pairwise(bounds))


def owners_of(num_experts: int, num_ranks: int) -> IntArray:
    """(E,) The rank that owns each expert."""
    sizes = [end - start for start, end in split_experts(num_experts, num_ranks)]
    return np.repeat(np.arange(num_ranks), sizes)


@dataclass(frozen=True, eq=False)
class ExpertRowOrder:
    """The order of each expert's rows, as segments by expert and in order.

    `source_P`: the rank that has a segment; `start_P`, `end_P`: its range of the expert's rows; `begin_P`: its first
    row among those of the expert that the rank has. `place_RE`: of each rank, among those that may compute an expert's
    rows: 0 takes the first range.
    """

    chosen_RE: IntArray
    owners_E: IntArray
    place_RE: IntArray
    expert_P: IntArray
    source_P: IntArray
    start_P: IntArray
    end_P: IntArray
    begin_P: IntArray

    def pairs(self, size: int) -> IntArray:
        """(P,) The group of `size` consecutive ranks that has a segment, and its expert, as one number."""
        if size not in self._pairs:
            self._pairs[size] = self.source_P // size * self.chosen_RE.shape[1] + self.expert_P
        return self._pairs[size]

    @cached_property
    def _pairs(self) -> dict[int, IntArray]:
        return {}


def rank_order(chosen_RE: IntArray, owners_E: IntArray) -> ExpertRowOrder:
    """By the rank that has a row, from the rank after the owner on, cyclically; then as on that rank."""
    num_ranks, num_experts = len(chosen_RE), len(owners_E)
    numbers_R1 = np.arange(num_ranks).reshape(-1, 1)
    ranks_RE: IntArray = (numbers_R1 + owners_E + 1) % num_ranks  # by place
    sizes_RE = np.take_along_axis(chosen_RE, ranks_RE, 0)
    ends_RE = sizes_RE.cumsum(0)
    experts_RE = np.broadcast_to(np.arange(num_experts), ranks_RE.shape)
    segments = (experts_RE, ranks_RE, ends_RE - sizes_RE, ends_RE, np.zeros_like(ends_RE))
    exists_ER = sizes_RE.T > 0
    place_RE: IntArray = (numbers_R1 - owners_E - 1) % num_ranks
    return ExpertRowOrder(chosen_RE, owners_E, place_RE, *(each.T[exists_ER] for each in segments))


def balanced_order(chosen_RE: IntArray, owners_E: IntArray) -> ExpertRowOrder:
    """The order in which copies find most of their own rows in their range, if they balance ranks (`balance_rows`)
    within ORDER_BOUND. It is the same without copies, or with others.

    Ranks with a copy come first, in `rank_order`: of each as many of its own rows as it computes; then, if it computes
    more, of the other ranks' rows that are left. At the end are all rows that are left, in `rank_order`.
    """
    order, num_ranks = rank_order(chosen_RE, owners_E), len(chosen_RE)
    copied_RE = balance_rows(chosen_RE, owners_E, ORDER_BOUND)
    copied_RE[owners_E, np.arange(len(owners_E))] = 0
    experts_X = np.flatnonzero(copied_RE.any(0))
    if not len(experts_X):
        return order
    ranks_RX = np.argsort(order.place_RE[:, experts_X], 0)
    has_RX, computes_RX = chosen_RE[ranks_RX, experts_X], copied_RE[ranks_RX, experts_X]
    own_RX = np.minimum(has_RX, computes_RX)
    left_RX = has_RX - own_RX
    until_RX = left_RX.cumsum(0)  # among all rows left
    # Ranks with a copy first; those beyond the last of an expert compute nothing.
    first_RX = np.argsort(computes_RX == 0, 0, kind="stable")
    take_TX = first_RX[: int((computes_RX > 0).sum(0).max())]
    computes_TX, own_TX = (np.take_along_axis(each, take_TX, 0) for each in (computes_RX, own_RX))
    end_TX, taken_TX = computes_TX.cumsum(0), (computes_TX - own_TX).cumsum(0)
    start_TX = end_TX - computes_TX
    from_TX = taken_TX - (computes_TX - own_TX)
    # The rows left, in one part after the own rows of each copy, and one at the end: (T + 1, R, X).
    starts = np.concatenate((from_TX, taken_TX[-1:]))[:, None]
    ends = np.concatenate((taken_TX, until_RX[-1:]))[:, None]
    shifts = np.concatenate((start_TX + own_TX - from_TX, end_TX[-1:] - taken_TX[-1:]))[:, None]
    starts, ends = np.maximum(starts, until_RX - left_RX), np.minimum(ends, until_RX)
    own = (experts_X, np.take_along_axis(ranks_RX, take_TX, 0), start_TX, start_TX + own_TX, 0)
    left = (experts_X, ranks_RX, starts + shifts, ends + shifts, own_RX + starts - (until_RX - left_RX))
    others = ~np.isin(order.expert_P, experts_X)
    unchanged = (order.expert_P, order.source_P, order.start_P, order.end_P, order.begin_P)
    parts = [[each[others] for each in unchanged]]
    for segments in (own, left):
        arrays = np.broadcast_arrays(*segments)
        parts.append([each[arrays[3] > arrays[2]] for each in arrays])
    columns = [np.concatenate(each) for each in zip(*parts, strict=True)]
    by_expert = np.lexsort((columns[2], columns[0]))
    place_RE = order.place_RE.copy()
    place_RE[np.take_along_axis(ranks_RX, first_RX, 0), experts_X] = np.arange(num_ranks)[:, None]
    return ExpertRowOrder(chosen_RE, owners_E, place_RE, *(each[by_expert] for each in columns))


def rows_of_owners(chosen_RE: IntArray, owners_E: IntArray) -> IntArray:
    """(R, E) Rows that each rank computes without copies."""
    computed_RE = np.zeros_like(chosen_RE)
    computed_RE[owners_E, np.arange(len(owners_E))] = chosen_RE.sum(0)
    return computed_RE


def balance_rows(
    chosen_RE: IntArray,
    owners_E: IntArray,
    bound: float,
    prefetched_RE: BoolArray | None = None,
    *,
    fewest_rows: bool = False,
) -> IntArray:
    """(R, E) Rows that each rank computes if copies are made so that no rank computes more than `bound` times the mean,
    rounded up. Copies that ranks have already, `prefetched_RE`, are used first, of a rank as many as it has experts.

    The most loaded rank gives rows to the least loaded one, up to the limit, until no rank is above it: the alias
    method of Walker and Vose. Each rank is filled once, by one other, so that it gets at most as many copies as a rank
    has experts, besides those that it has already. A rank that gave too many is filled itself later. With
    `fewest_rows` ranks give only what they have above the limit: fewer rows move, and loads stay less even.
    """
    num_ranks, experts_E = len(chosen_RE), np.arange(len(owners_E))
    kept_E, computed_RE = chosen_RE.sum(0), np.zeros_like(chosen_RE)
    loads_R = np.bincount(owners_E, kept_E, num_ranks).astype(np.int64)
    limit = math.ceil(bound * int(loads_R.sum()) / max(1, num_ranks) - 1e-9)
    if prefetched_RE is not None:
        _use_prefetched(prefetched_RE, owners_E, limit, loads_R, kept_E, computed_RE)
    # Lists, since single numbers of arrays are ten times slower to access.
    givers = [(-load, rank) for rank, load in enumerate(loads_R.tolist()) if load > limit]
    takers = [(load, rank) for rank, load in enumerate(loads_R.tolist()) if load < limit]
    heapify(givers)
    heapify(takers)
    kept: list[int] = kept_E.tolist()  # of each expert's rows, by its owner
    own: list[list[int]] = [[] for _ in range(num_ranks)]
    owners: list[int] = owners_E.tolist()
    for expert, owner in enumerate(owners):
        own[owner].append(expert)
    while givers:
        (most, giver), (least, taker) = heappop(givers), heappop(takers)
        room = min(limit - least, -most - limit) if fewest_rows else limit - least
        given = room
        experts = own[giver]
        if len(experts) > 1:  # those that suffice alone first, of them those of which the taker has most rows itself
            has = chosen_RE[taker, experts].tolist()
            order = sorted(((min(room, kept[e]), num, e) for num, e in zip(has, experts, strict=True)), reverse=True)
            experts = [expert for _, _, expert in order]
        for expert in experts:
            rows = min(room, kept[expert])
            room -= rows
            kept[expert] -= rows
            computed_RE[taker, expert] += rows
        if least + given < limit:
            heappush(takers, (least + given, taker))
        left = -most - given
        if left > limit:
            heappush(givers, (-left, giver))
        elif left < limit:
            heappush(takers, (left, giver))
    computed_RE[owners_E, experts_E] = kept
    return computed_RE


def _use_prefetched(
    prefetched_RE: BoolArray,
    owners_E: IntArray,
    limit: int,
    loads_R: IntArray,
    kept_E: IntArray,
    computed_RE: IntArray,
) -> None:
    """Move rows from owners above the limit to ranks below it that have a copy; changes the last three."""
    ranks, experts = np.nonzero(prefetched_RE)
    room_R = np.full(len(loads_R), np.bincount(owners_E).max())  # for copies
    by_load = np.argsort(-loads_R[owners_E[experts]], kind="stable")
    for rank, expert in zip(ranks[by_load].tolist(), experts[by_load].tolist(), strict=True):
        owner = owners_E[expert]
        rows = min(loads_R[owner] - limit, limit - loads_R[rank], kept_E[expert])
        if rows > 0 < room_R[rank]:
            room_R[rank] -= 1
            computed_RE[rank, expert] = rows
            kept_E[expert] -= rows
            loads_R[owner] -= rows
            loads_R[rank] += rows


ROW_ORDERS: Mapping[ExpertRowOrderName, Callable[[IntArray, IntArray], ExpertRowOrder]] = MappingProxyType(
    {"ranks": rank_order, "balanced": balanced_order}
)


class ExpertRowRanges:
    """The ranges of each expert's rows that every rank computes, from `start_RE` to `end_RE`.

    `computed_RE`: rows by the rank that computes them; None: the owner. `computes_RE`: whether there are any.
    """

    def __init__(self, order: ExpertRowOrder, computed_RE: IntArray | None) -> None:
        self.order = order
        if computed_RE is None:
            computed_RE = rows_of_owners(order.chosen_RE, order.owners_E)
        self.start_RE, self.computes_RE = np.zeros_like(computed_RE), computed_RE > 0
        copied_X = np.flatnonzero(self.computes_RE.sum(0) > 1)
        if len(copied_X):
            place_RX, computed_RX = order.place_RE[:, copied_X], computed_RE[:, copied_X]
            by_place_RX, columns_X = np.zeros_like(computed_RX), np.arange(len(copied_X))
            by_place_RX[place_RX, columns_X] = computed_RX
            self.start_RE[:, copied_X] = by_place_RX.cumsum(0)[place_RX, columns_X] - computed_RX
        self.end_RE = self.start_RE + computed_RE

    def computed_by(self, rank: int) -> tuple[IntArray, IntArray]:
        """(P,) The first row of each segment that a rank computes, and how many."""
        order = self.order
        start_P, end_P = self.start_RE[rank, order.expert_P], self.end_RE[rank, order.expert_P]
        start_P = np.maximum(start_P, order.start_P)
        return start_P, np.maximum(np.minimum(end_P, order.end_P) - start_P, 0)

    def sent_by(self, rank: int) -> tuple[IntArray, IntArray, IntArray]:
        """The segments of a rank, (R, P) the first of their rows that each rank computes, and how many."""
        order = self.order
        segments = np.flatnonzero(order.source_P == rank)
        experts_P = order.expert_P[segments]
        start_RP = np.maximum(self.start_RE[:, experts_P], order.start_P[segments])
        size_RP = np.minimum(self.end_RE[:, experts_P], order.end_P[segments]) - start_RP
        return segments, start_RP, np.maximum(size_RP, 0)

    def local_rows(self, size: int = 1) -> IntArray:
        """(G,) Rows that the ranks of each group have and compute, in groups of `size` ranks."""
        order, num_groups = self.order, len(self.order.chosen_RE) // size
        computes_GE = self.computes_RE if size == 1 else self.computes_RE.reshape(num_groups, size, -1).any(1)
        near = np.flatnonzero(computes_GE.ravel()[order.pairs(size)])  # few: most experts are on one rank
        groups_P, experts_P = order.source_P[near] // size, order.expert_P[near]
        starts_P, ends_P = order.start_P[near], order.end_P[near]
        local_P = np.zeros_like(starts_P)
        for member in range(size):
            ranks_P = groups_P * size + member
            start_P = np.maximum(self.start_RE[ranks_P, experts_P], starts_P)
            local_P += np.maximum(np.minimum(self.end_RE[ranks_P, experts_P], ends_P) - start_P, 0)
        return np.bincount(groups_P, local_P, num_groups).astype(np.int64)

    def rows_between(self, *, is_copy: bool | None = None) -> IntArray:
        """(R, R) Rows that a rank has and another computes; `is_copy`: only with copies, or only by owners."""
        order, num_ranks = self.order, len(self.order.chosen_RE)
        rows_RR = np.zeros((num_ranks, num_ranks), np.int64)
        for rank in range(num_ranks):
            _, size_P = self.computed_by(rank)
            if is_copy is not None:
                size_P = size_P * ((order.owners_E[order.expert_P] != rank) == is_copy)
            rows_RR[:, rank] = np.bincount(order.source_P, size_P, num_ranks)
        return rows_RR

    def chains(self) -> Iterator[tuple[int, int, tuple[int, ...]]]:
        """The copied experts, each with its owner and the ranks that have a copy, in the order of its rows."""
        order = self.order
        is_copy_RE = self.computes_RE.copy()
        is_copy_RE[order.owners_E, np.arange(len(order.owners_E))] = False
        for expert in np.flatnonzero(is_copy_RE.any(0)).tolist():
            ranks = np.flatnonzero(is_copy_RE[:, expert])
            in_order = ranks[np.argsort(order.place_RE[ranks, expert])]
            yield expert, int(order.owners_E[expert]), tuple(in_order.tolist())

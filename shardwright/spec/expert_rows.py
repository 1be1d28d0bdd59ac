"""Which rows of experts ranks have and compute: the order that planner and runtime share.

The rows of an expert have one order, whoever computes them: by the rank that has them, from the rank after the owner
on, cyclically, so that the owner's are last; then as on that rank. Ranks that compute rows of an expert, its owner and
those with a copy, take consecutive ranges of this order, in the same order of ranks. A sum over these rows, as a
weight's gradient is, can thus be continued from rank to rank, and ends at the owner.

Shape legend: R ranks; E experts; G groups of as many consecutive ranks, S ranks of a group.
"""

from collections.abc import Iterator
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]


def split_experts(num_experts: int, num_ranks: int) -> list[tuple[int, int]]:
    """The first and the last expert (end excluded) that each rank owns, as even as possible."""
    bounds = [num_experts * rank // num_ranks for rank in range(num_ranks + 1)]
    return list(pairwise(bounds))


def owners_of(num_experts: int, num_ranks: int) -> IntArray:
    """(E,) The rank that owns each expert."""
    sizes = [end - start for start, end in split_experts(num_experts, num_ranks)]
    return np.repeat(np.arange(num_ranks), sizes)


class RowRanges:
    """The ranges of each expert's rows that every rank has and computes, from `before` and `start` on.

    `chosen_RE`: rows by the rank that has them; `computed_RE`: by the rank that computes them, None: the owner.
    `order_RE`: the position of each rank in the order of an expert's rows.
    """

    def __init__(self, chosen_RE: IntArray, computed_RE: IntArray | None, owners_E: IntArray) -> None:
        ranks_R1 = np.arange(len(chosen_RE))[:, None]
        self.owners_E = owners_E
        self.order_RE = (ranks_R1 - owners_E - 1) % max(1, len(chosen_RE))
        if computed_RE is None:
            computed_RE = np.where(ranks_R1 == owners_E, chosen_RE.sum(0), 0)
        self.before_RE, self.until_RE = self._ranges(chosen_RE)
        self.start_RE, self.end_RE = self._ranges(computed_RE)

    def sent_by(self, rank: int) -> IntArray:
        """(R, E) Rows of this rank that each rank computes."""
        return _overlap(self.start_RE, self.end_RE, self.before_RE[rank], self.until_RE[rank])

    def sent_to(self, rank: int) -> IntArray:
        """(R, E) Rows of each rank that this rank computes."""
        return _overlap(self.before_RE, self.until_RE, self.start_RE[rank], self.end_RE[rank])

    @cached_property
    def local_RE(self) -> IntArray:
        """Rows that each rank computes of its own."""
        return _overlap(self.before_RE, self.until_RE, self.start_RE, self.end_RE)

    def local_rows(self, size: int) -> IntArray:
        """(G, E) Rows that the ranks of each group have and compute, in groups of `size` ranks."""
        if size == 1:
            return self.local_RE
        ranks_R = np.arange(len(self.order_RE))
        # In the order of an expert's rows, its owner's group is in two parts: ranks after the owner, and up to it.
        in_owners_group_RE = ranks_R[:, None] // size == self.owners_E // size
        is_last_RE = in_owners_group_RE & (ranks_R[:, None] <= self.owners_E)
        has = [_bounds(self.before_RE, self.until_RE, part_RE, size) for part_RE in (is_last_RE, ~is_last_RE)]
        computes = [_bounds(self.start_RE, self.end_RE, part_RE, size) for part_RE in (is_last_RE, ~is_last_RE)]
        parts = [_overlap(*mine, *others) for mine in has for others in computes]
        return np.sum(parts, axis=0)

    def chains(self) -> Iterator[tuple[int, int, tuple[int, ...]]]:
        """The copied experts, each with its owner and the ranks that have a copy, in the order of its rows."""
        is_copy_RE = self.end_RE > self.start_RE
        is_copy_RE[self.owners_E, np.arange(len(self.owners_E))] = False
        for expert in np.flatnonzero(is_copy_RE.any(0)).tolist():
            ranks = np.flatnonzero(is_copy_RE[:, expert])
            in_order = ranks[np.argsort(self.order_RE[ranks, expert])]
            yield expert, int(self.owners_E[expert]), tuple(in_order.tolist())

    def _ranges(self, rows_RE: IntArray) -> tuple[IntArray, IntArray]:
        by_order_RE = np.empty_like(rows_RE)
        np.put_along_axis(by_order_RE, self.order_RE, rows_RE, 0)
        ends_RE = np.take_along_axis(by_order_RE.cumsum(0), self.order_RE, 0)
        return ends_RE - rows_RE, ends_RE


def _overlap(starts: IntArray, ends: IntArray, other_starts: IntArray, other_ends: IntArray) -> IntArray:
    return np.maximum(np.minimum(ends, other_ends) - np.maximum(starts, other_starts), 0)


def _bounds(starts_RE: IntArray, ends_RE: IntArray, part_RE: NDArray[np.bool_], size: int) -> tuple[IntArray, IntArray]:
    """(G, E) The first start and the last end of the ranks of each group in a part of the order; an empty range if the
    group has none there."""
    starts_GSE = np.where(part_RE, starts_RE, np.iinfo(np.int64).max).reshape(-1, size, starts_RE.shape[1])
    ends_GSE = np.where(part_RE, ends_RE, 0).reshape(-1, size, ends_RE.shape[1])
    return starts_GSE.min(1), ends_GSE.max(1)

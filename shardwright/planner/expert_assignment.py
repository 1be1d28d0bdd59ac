"""The performance model of a mixture whose experts are split over ranks: seconds of a call, by what each rank computes.

A rank holds its own experts. A copy of another rank's expert costs two transfers of its size, of weights and of their
gradients; rows that are computed where they are need none. Equation numbers are those of FasterMoE (PPoPP'22).

Shape legend: R ranks, E experts, G groups of ranks that share a link.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardwright.spec.expert_rows import BoolArray, ExpertRowOrder, ExpertRowRanges, IntArray
from shardwright.spec.plan import ExpertCosts, SharedLink

FloatArray = NDArray[np.floating[Any]]
Directions = tuple[FloatArray, FloatArray]  # seconds of messages that leave a rank, and that arrive
COMPUTE_PASSES = 3  # forward, gradients of inputs, gradients of weights
EXCHANGES = 4  # of rows: there and back, forward and backward
TRANSFERS = 2  # of an expert: its weights, their gradients


@dataclass(frozen=True)
class ExpertLayer:
    """A mixture of experts. `owners`: the rank of each expert; `costs`: equal on all ranks."""

    owners: tuple[int, ...]
    costs: ExpertCosts

    @cached_property
    def owners_E(self) -> IntArray:
        return np.array(self.owners)


class _LinkTraffic(NamedTuple):
    """Rows and experts that pass a link, by group of ranks: pairs of those that leave and those that arrive. Experts
    pass it as weights in forward, and as gradients in backward."""

    link: SharedLink
    rows: tuple[IntArray, IntArray]
    weights: tuple[IntArray, IntArray]
    gradients: tuple[IntArray, IntArray]


@dataclass(frozen=True, eq=False)
class Assignment:
    """How many rows of each expert every rank computes: a range of the rows in their order.

    `prefetched_RE`: the copies that ranks have before the call.
    """

    layer: ExpertLayer
    order: ExpertRowOrder
    computed_RE: IntArray
    prefetched_RE: BoolArray | None = None

    @property
    def chosen_RE(self) -> IntArray:
        """Rows by the rank that has them."""
        return self.order.chosen_RE

    @cached_property
    def loads_R(self) -> IntArray:
        return self.computed_RE.sum(1)

    @cached_property
    def copies(self) -> tuple[IntArray, IntArray]:
        """Pairs of a rank and an expert that it computes rows of and does not own: the ranks, and the experts."""
        is_copied_RE = self.ranges.computes_RE.copy()
        is_copied_RE[self.order.owners_E, np.arange(len(self.order.owners_E))] = False
        ranks, experts = np.nonzero(is_copied_RE)
        return ranks, experts

    @cached_property
    def ranges(self) -> ExpertRowRanges:
        return ExpertRowRanges(self.order, self.computed_RE)

    def rows_by_link(self, size: int = 1) -> tuple[IntArray, IntArray]:
        """(G,) The rows that each group of `size` consecutive ranks sends to others, and receives, in one exchange."""
        local_G = self.ranges.local_rows(size)
        sent_G, received_G = (_by_group(rows_RE.sum(1), size) for rows_RE in (self.chosen_RE, self.computed_RE))
        return sent_G - local_G, received_G - local_G

    def experts_by_link(self, size: int = 1, *, only_missing: bool = False) -> tuple[IntArray, IntArray]:
        """(G,) The experts that each group of `size` consecutive ranks sends to others, and receives: a chain of ranks
        hands each copied expert on. `only_missing`: those that were not prefetched."""
        ranks, experts = self.copies
        if only_missing and self.prefetched_RE is not None:
            is_missing = ~self.prefetched_RE[ranks, experts]
            ranks, experts = ranks[is_missing], experts[is_missing]
        by_chain = np.argsort(experts * len(self.loads_R) + self.order.place_RE[ranks, experts])
        to, experts = ranks[by_chain], experts[by_chain]
        source = self.order.owners_E[experts]
        follows = experts[1:] == experts[:-1]  # another rank of the same chain
        source[1:][follows] = to[:-1][follows]
        leaves, num = source // size != to // size, len(self.loads_R) // size
        sent_G, received_G = (np.bincount(each[leaves] // size, minlength=num) for each in (source, to))
        return sent_G, received_G

    def chains(self) -> dict[int, list[int]]:
        """By copied expert, the ranks that hold a copy, in the order of the chain from its owner on."""
        return {expert: [*ranks] for expert, _, ranks in self.ranges.chains()}

    @cached_property
    def compute_seconds(self) -> float:
        """Equation 1 for all passes."""
        return COMPUTE_PASSES * float(self.loads_R.max(initial=0)) * self.layer.costs.compute_row

    @cached_property
    def _traffic(self) -> list[_LinkTraffic]:
        costs = self.layer.costs
        traffic = list[_LinkTraffic]()
        for link in (SharedLink(1, costs.send_row, costs.send_expert), *costs.shared):
            gradients = weights = self.experts_by_link(link.ranks)
            if self.prefetched_RE is not None:
                weights = self.experts_by_link(link.ranks, only_missing=True)
            traffic.append(_LinkTraffic(link, self.rows_by_link(link.ranks), weights, gradients))
        return traffic

    @cached_property
    def exchange_seconds(self) -> float:
        """Equation 2 for all exchanges of rows: in each the busiest link counts."""
        return EXCHANGES * max(_most(each.rows) * each.link.send_row for each in self._traffic)

    @cached_property
    def copy_seconds(self) -> float:
        """Weights and their gradients on the busiest link, and the longest chain's last part."""
        return self._weight_seconds + self._gradient_seconds + self._chain_seconds

    @property
    def _weight_seconds(self) -> float:
        return max(_most(each.weights) * each.link.send_expert for each in self._traffic)

    @property
    def _gradient_seconds(self) -> float:
        return max(_most(each.gradients) * each.link.send_expert for each in self._traffic)

    @cached_property
    def _chain_seconds(self) -> float:
        longest = max(np.bincount(self.copies[1]).tolist(), default=0)
        return max(0, longest - 1) * self.layer.costs.hand_on

    @cached_property
    def _computing(self) -> tuple[FloatArray, FloatArray]:
        """(R,) Seconds of a pass over all rows of a rank, and over those of its copies."""
        ranks, experts = self.copies
        copied_R = np.bincount(ranks, self.computed_RE[ranks, experts], len(self.loads_R))
        return self.loads_R * self.layer.costs.compute_row, copied_R * self.layer.costs.compute_row

    @cached_property
    def seconds(self) -> float:
        """The complete model of a call in one step: Equation 8 with the rows that are still exchanged.

        Forward: an exchange; computation, while weights of copies arrive; an exchange. Backward: an exchange, while
        gradients of the inputs of copies are computed; those of other inputs; those of weights, while results return.
        Gradients of copied weights travel after those of their inputs are computed.
        """
        (load_R, copied_R), exchange = self._computing, self.exchange_seconds / EXCHANGES
        waits_R = self._traffic[0].weights[1] > 0
        forward = float((np.maximum(load_R - copied_R, self._weight_seconds * waits_R) + copied_R).max())
        copies_R = np.maximum(copied_R, exchange)
        backward = float((copies_R + load_R - copied_R + np.maximum(load_R, exchange)).max())
        backward = max(backward, float(copies_R.max()) + self._gradient_seconds)
        return 2 * exchange + forward + backward + self._chain_seconds

    @cached_property
    def stepped_seconds(self) -> float:
        """The complete model of a call in steps: computation and messages overlap, those of a link share it.

        In both passes a rank sends the results of its last step once they are computed (`_computed`); weight gradients
        follow then. Weights of copies arrive with the last rows and results, and copies are computed after that; in
        backward weight gradients of copies, and of their owners, follow the last messages.
        """
        load_R, copied_R = self._computing
        (leaving_R, arriving_R), backward = self._messages
        computed_R, last_R = self._computed
        link_R = np.maximum(*backward)
        forward_R = np.maximum(np.maximum(leaving_R, arriving_R), computed_R + last_R)
        backward_R = np.maximum(np.maximum(link_R, computed_R + last_R), computed_R + load_R)
        ranks, experts = self.copies
        if len(ranks):
            waits_R = self._traffic[0].weights[1] > 0
            arriving_R = np.maximum(arriving_R, leaving_R.max())  # an owner may send several experts
            forward_R = np.maximum(forward_R, (arriving_R + copied_R + last_R) * waits_R)
            owners_E, is_shared_E = self.order.owners_E, np.bincount(experts, minlength=self.computed_RE.shape[1]) > 0
            rows_E = self.computed_RE[owners_E, np.arange(len(owners_E))] * is_shared_E
            shared_R = copied_R + np.bincount(owners_E, rows_E, len(load_R)) * self.layer.costs.compute_row
            backward_R = np.maximum(backward_R, (link_R + shared_R) * (shared_R > 0))
        return float(forward_R.max() + backward_R.max()) + self._chain_seconds

    @cached_property
    def _computed(self) -> tuple[FloatArray, FloatArray]:
        """(R,) When a rank has computed all rows of a pass in steps, and seconds of the last step's message.

        Each other rank sends it one message, after those for ranks before it. Where these are short, messages arrive
        together, since they share the receiver's link, and nothing of them is computed meanwhile.
        """
        sent_R, received_R = self._traffic[0].rows
        others, row = max(1, len(sent_R) - 1), self._traffic[0].link.send_row
        arriving_R = _most_by_rank([_by_rank(each.link, each.rows[1] * each.link.send_row) for each in self._traffic])
        last_R = arriving_R / others
        elsewhere_R = sent_R.sum() - sent_R - received_R  # rows between other ranks
        between_R = np.minimum(elsewhere_R * row / (others * max(1, others - 1)), last_R)  # messages that arrive
        compute_R = received_R * self.layer.costs.compute_row
        load_R, _ = self._computing
        slowed_R = load_R + self.layer.costs.slowdown * row * (sent_R + received_R)
        ends = (slowed_R, arriving_R + compute_R / others, arriving_R - (others - 1) * between_R + compute_R)
        return np.maximum(np.maximum(ends[0], ends[1]), ends[2]), last_R

    @cached_property
    def overlapped_seconds(self) -> float:
        """The least time if all messages overlap with all computation: in forward, a third of it, and in backward."""
        load, (forward, backward) = float(self._computing[0].max()), map(_busiest, self._messages)
        return max(forward, load) + max(backward, 2 * load)

    @property
    def message_seconds(self) -> float:
        """All messages of forward and backward on the busiest link, in its busier direction."""
        return sum(map(_busiest, self._messages))

    @cached_property
    def _messages(self) -> tuple[Directions, Directions]:
        """(R,) Seconds of all messages that leave a rank, and that arrive.

        In forward rows, results and weights of copies, in backward gradients in their place.
        """
        rows = [(sent + received) * each.link.send_row for each in self._traffic for sent, received in [each.rows]]

        def messages(experts: Sequence[tuple[IntArray, IntArray]]) -> Directions:
            """Rows go one way, results the other."""
            leaving, arriving = list[FloatArray](), list[FloatArray]()
            for each, rows_G, (out_G, in_G) in zip(self._traffic, rows, experts, strict=True):
                leaving.append(_by_rank(each.link, rows_G + out_G * each.link.send_expert))
                arriving.append(_by_rank(each.link, rows_G + in_G * each.link.send_expert))
            return _most_by_rank(leaving), _most_by_rank(arriving)

        backward = messages([each.gradients for each in self._traffic])
        return (
            backward if self.prefetched_RE is None else messages([each.weights for each in self._traffic])
        ), backward


def _busiest(directions: Directions) -> float:
    return max(float(each.max()) for each in directions)


def _most_by_rank(by_link: Sequence[FloatArray]) -> FloatArray:
    return by_link[0] if len(by_link) == 1 else np.max(by_link, 0)


def _by_rank(link: SharedLink, values_G: FloatArray) -> FloatArray:
    return np.repeat(values_G, link.ranks) if link.ranks > 1 else values_G


def _most(counts: Sequence[IntArray]) -> int:
    return max(int(each.max()) for each in counts)


def _by_group(values_R: IntArray, size: int) -> IntArray:
    return values_R.reshape(-1, size).sum(1)

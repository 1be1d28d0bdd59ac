"""Weights of copies that are sent before the gate has chosen: the copies of the last call.

Popularity changes slowly, so that most copies of a call were made in the call before. Their weights leave at the start
of the module around the mixture, and travel while its attention is computed. Once the gate has chosen, missing weights
are sent as without prefetching; those that are not needed are not used.

Shape legend: R ranks; E experts.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np
from torch import Tensor

from shardwright.comm.mesh import Group
from shardwright.comm.pending import Pending
from shardwright.comm.point_to_point import relay_in_turn
from shardwright.experts.dispatch import Chain, Dispatch
from shardwright.spec.expert_rows import BoolArray

RELAY_BYTES = 1 << 18  # of weights that are handed on at once
STEADY_SHARE = 0.25  # of a call's copies that were made in the call before, from which on they are prefetched


class CopyHistory:
    """The copies of the last call. `is_steady`: whether enough of them were made in the call before."""

    def __init__(self) -> None:
        self._chains: Sequence[Chain] = ()
        self._own = range(0)
        self.is_steady = False

    def add(self, dispatch: Dispatch) -> None:
        last, pairs = _pairs(self._chains), _pairs(dispatch.chains)
        self.is_steady = bool(pairs) and len(pairs & last) >= STEADY_SHARE * len(pairs)
        self._chains, self._own = dispatch.chains, dispatch.own

    def prefetch(self, own: Mapping[str, Tensor], group: Group) -> "PrefetchedCopies":
        """Relay the copies of the last call over the group; `own`: weights of this rank's experts."""
        return PrefetchedCopies(self._chains, own, self._own.start, group)


class PrefetchedCopies:
    """Copies relayed over the group, on lane `copies`, along `chains` that all ranks know.

    `own`: the weights of this rank's experts, of which `first` is the first.
    """

    def __init__(self, chains: Sequence[Chain], own: Mapping[str, Tensor], first: int, group: Group) -> None:
        self._pairs = _pairs(chains)
        self._received = {
            expert: [weight.new_empty(weight.shape[1:]) for weight in own.values()]
            for rank, expert in self._pairs
            if rank == group.index
        }

        def weights_of(expert: int) -> Iterable[Tensor]:
            if expert in self._received:
                return self._received[expert]
            return (weight[expert - first] for weight in own.values())

        self._pending = relay_weights(chains, weights_of, group)

    def mark_pairs(self, num_ranks: int, num_experts: int) -> BoolArray:
        """(R, E) Which rank has a copy of which expert."""
        pairs_RE = np.zeros((num_ranks, num_experts), np.bool_)
        for rank, expert in self._pairs:
            pairs_RE[rank, expert] = True
        return pairs_RE

    def select_missing(self, chains: Iterable[Chain]) -> Iterator[Chain]:
        """Of these chains, the ranks that have no copy yet."""
        for expert, owner, ranks in chains:
            if others := tuple(rank for rank in ranks if (rank, expert) not in self._pairs):
                yield expert, owner, others

    def take(self, expert: int) -> Sequence[Tensor] | None:
        """Wait for the weights of a copy, if this rank has it; once."""
        self._pending.wait()
        return self._received.pop(expert, None)

    def finish(self) -> None:
        """Wait for all copies, and free those that are not needed. All ranks do before they send gradients."""
        self._pending.wait()
        self._received.clear()


def relay_weights(
    chains: Iterable[Chain], weights_of: Callable[[int], Iterable[Tensor]], group: Group
) -> Pending[None]:
    """Issue the relay of experts along these chains, point to point over the group; `wait()` returns once this rank has
    received them and handed them on.

    `weights_of`: an expert's weights on its owner; on other ranks the tensors that receive them.
    """
    pending: list[Pending[None]] = []
    for expert, owner, ranks in chains:
        if group.index in (owner, *ranks):
            weights = [weight.view(-1) for weight in weights_of(expert)]
            parts = [part for weight in weights for part in weight.split(RELAY_BYTES // weight.itemsize)]
            pending.append(relay_in_turn(parts, (owner, *ranks), group))

    def wait() -> None:
        for work in pending:
            work.wait()

    return Pending(wait)


def _pairs(chains: Iterable[Chain]) -> frozenset[tuple[int, int]]:
    """Pairs of a rank and an expert that it has a copy of."""
    return frozenset((rank, expert) for expert, _, ranks in chains for rank in ranks)

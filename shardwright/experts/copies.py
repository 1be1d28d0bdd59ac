"""Copies of popular experts on other ranks, for one call: weights go out along a chain of ranks, gradients come back.

Phases: forward   each expert's owner sends its weights to the first rank of the chain, which hands them on; not to
                  ranks that have them already (experts/prefetch.py)
        backward  the first rank of the chain sends the gradient over its rows to the second, which continues it over
                  its own rows, and so on to the owner, whose rows are the last

The chain has the order of the rows (experts/dispatch.py), so that a gradient is the sum, in the same order and to the
bit, that the owner would compute alone. The optimizer's state stays with the owner. Ranks continue the gradients of
which they are first in the chain first, then those of which they are second, and so on, so that no two ranks wait for
each other.
"""

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product

from torch import Tensor

from shardwright.comm.mesh import Group
from shardwright.comm.pending import Pending
from shardwright.comm.point_to_point import TensorSpec, receive, send
from shardwright.experts.dispatch import Dispatch
from shardwright.experts.prefetch import PrefetchedCopies, relay_weights
from shardwright.experts.weights import CallWeights
from shardwright.spec.wire import EXPERT_PART_BYTES


@dataclass(frozen=True, slots=True)
class _Link:
    """This rank's part in an expert's chain: its position, and the ranks before and after it, if there are any."""

    expert: int
    position: int
    before: int | None
    after: int | None


class Copies:
    """The copies of one call on this rank, and those of its own experts on other ranks. All ranks make it."""

    def __init__(
        self, dispatch: Dispatch, own: Mapping[str, Tensor], group: Group, prefetched: PrefetchedCopies | None = None
    ) -> None:
        self._dispatch, self._own, self._group, self._prefetched = dispatch, own, group, prefetched
        num = len(dispatch.copied)
        self._buffers = {name: weight.new_empty(num, *weight.shape[1:]) for name, weight in own.items()}
        self.weights = CallWeights(self._buffers, dispatch.sizes(is_copy=True))
        self._links = sorted(self._make_links(), key=lambda link: (link.position, link.expert))
        self._parts = [*_parts_of(own)]
        self._received: dict[tuple[int, str, int], Pending[list[Tensor]]] = {}
        links = (link for link in self._links if link.after is not None)
        self._unsent = deque((link, *part) for link, part in product(links, self._parts))
        self._sent: list[Pending[None]] = []

    @property
    def copied_out(self) -> list[int]:
        """This rank's experts of which other ranks have copies."""
        return sorted(link.expert for link in self._links if link.after is None)

    def send_weights(self) -> Pending[None]:
        """Issue the copying of weights; `wait()` returns once this rank's copies have them."""
        prefetched, chains = self._prefetched, self._dispatch.chains
        missing = relay_weights(
            prefetched.select_missing(chains) if prefetched else chains, self._weights_of, self._group
        )

        def take(_: None) -> None:
            if prefetched is not None:
                for expert in self._dispatch.copied:
                    for weight, received in zip(self._weights_of(expert), prefetched.take(expert) or (), strict=False):
                        weight.copy_(received)

        return missing.then(take)

    def receive_gradients(self) -> None:
        """Issue the receiving of gradients over the rows of the ranks before this one."""
        for link in self._links:  # in the order in which the rank before sends them
            if link.before is not None:
                for name, outputs in self._parts:
                    rows = self._own[name][:0, outputs]
                    spec = TensorSpec(rows.shape[1:], rows.dtype)
                    self._received[link.expert, name, outputs.start] = receive([spec], link.before, self._group)

    def continue_gradients(self, *, only_ready: bool = False) -> None:
        """Continue the gradients of this rank's copies, and send them on; `only_ready`: as far as they have arrived."""
        while self._unsent:
            link, name, outputs = self._unsent[0]
            received = self._received.get((link.expert, name, outputs.start))
            if only_ready and received is not None and not received.is_settled:
                return
            self._unsent.popleft()
            rows = self._own[name][:0, outputs]
            partial = rows.new_zeros(rows.shape[1:])
            if received is not None:
                partial = self._received.pop((link.expert, name, outputs.start)).wait()[0]
            self.weights.add_gradient(name, self._dispatch.copied.index(link.expert), partial, outputs)
            assert link.after is not None
            self._sent.append(send([partial], link.after, self._group))

    def received_gradients(self, expert: int) -> Iterator[tuple[str, slice, Tensor]]:
        """The gradients of an expert over the rows of the ranks before this one: by parameter, and rows of it."""
        for name, outputs in self._parts:
            yield name, outputs, self._received.pop((expert, name, outputs.start)).wait()[0]

    def wait_until_sent(self) -> None:
        for pending in self._sent:
            pending.wait()

    def _weights_of(self, expert: int) -> list[Tensor]:
        """The weights of one of this rank's experts or copies."""
        if expert in self._dispatch.own:
            return [weight[self._dispatch.own.index(expert)] for weight in self._own.values()]
        return [weight[self._dispatch.copied.index(expert)] for weight in self._buffers.values()]

    def _make_links(self) -> Iterator[_Link]:
        for expert, owner, ranks in self._dispatch.chains:
            chain = [*ranks, owner]
            if self._group.index in chain:
                position = chain.index(self._group.index)
                before = chain[position - 1] if position else None
                after = chain[position + 1] if position + 1 < len(chain) else None
                yield _Link(expert, position, before, after)


def _parts_of(weights: Mapping[str, Tensor]) -> Iterator[tuple[str, slice]]:
    """The parts in which an expert's gradients are handed on: of each parameter, ranges of rows."""
    for name, weight in weights.items():
        num_rows, row_bytes = weight.shape[1], weight.itemsize * weight.shape[2:].numel()
        step = max(1, EXPERT_PART_BYTES // max(1, row_bytes))
        yield from ((name, slice(start, min(start + step, num_rows))) for start in range(0, num_rows, step))

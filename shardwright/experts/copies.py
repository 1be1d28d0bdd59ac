"""Copies of popular experts on other ranks, for one call: weights go out along a chain of ranks, gradients come back.

Phases: forward   each expert's owner sends its weights to the first rank of the chain, which hands them on
        backward  the first rank of the chain sends the gradient over its rows to the second, which continues it over
                  its own rows, and so on to the owner, whose rows are the last

The chain has the order of the rows (experts/dispatch.py), so that a gradient is the sum, in the same order and to the
bit, that the owner would compute alone. The optimizer's state stays with the owner. Ranks continue the gradients of
which they are first in the chain first, so that no two ranks wait for each other.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from shardwright.comm.mesh import Group
from shardwright.comm.pending import Pending
from shardwright.comm.point_to_point import TensorSpec, receive, relay_in_turn, send
from shardwright.experts.dispatch import Dispatch
from shardwright.experts.weights import CallWeights


@dataclass(frozen=True, slots=True)
class _Link:
    """This rank's part in an expert's chain: its position, and the ranks before and after it, if there are any."""

    expert: int
    position: int
    before: int | None
    after: int | None


class Copies:
    """The copies of one call on this rank, and those of its own experts on other ranks. All ranks make it."""

    def __init__(self, dispatch: Dispatch, own: Mapping[str, Tensor], group: Group) -> None:
        self._dispatch, self._own, self._group = dispatch, own, group
        num = len(dispatch.copied)
        self._buffers = {name: weight.new_empty(num, *weight.shape[1:]) for name, weight in own.items()}
        self.weights = CallWeights(self._buffers, dispatch.sizes(is_copy=True))
        self._links = sorted(self._make_links(), key=lambda link: (link.position, link.expert))
        self._received: dict[tuple[int, str], Pending[list[Tensor]]] = {}

    @property
    def copied_out(self) -> list[int]:
        """This rank's experts of which other ranks have copies."""
        return sorted(link.expert for link in self._links if link.after is None)

    def send_weights(self) -> Pending[None]:
        """Issue the copying of weights; `wait()` returns once this rank's copies have them."""
        pending = [
            relay_in_turn([rows[self._index(expert)] for rows in self._rows(expert).values()], chain, self._group)
            for expert, chain in ((expert, (owner, *ranks)) for expert, owner, ranks in self._dispatch.chains)
            if self._group.index in chain
        ]

        def wait() -> None:
            for work in pending:
                work.wait()

        return Pending(wait)

    def receive_gradients(self) -> None:
        """Issue the receiving of gradients over the rows of the ranks before this one."""
        specs = {name: TensorSpec((1, *rows.shape[1:]), rows.dtype) for name, rows in self._own.items()}
        for link in self._links:  # in the order in which the rank before sends them
            if link.before is not None:
                for name, spec in specs.items():
                    self._received[link.expert, name] = receive([spec], link.before, self._group)

    def continue_gradients(self) -> None:
        """Continue the gradients of this rank's copies, and send them on."""
        sent: list[Pending[None]] = []
        for link in self._links:
            if link.after is None:
                continue
            index = self._dispatch.copied.index(link.expert)
            for name, rows in self._own.items():
                partial = rows.new_zeros(1, *rows.shape[1:])
                if link.before is not None:
                    partial = self.received_gradient(link.expert, name)
                self.weights.add_gradient(name, range(index, index + 1), partial)
                sent.append(send([partial], link.after, self._group))
        for pending in sent:
            pending.wait()

    def received_gradient(self, expert: int, name: str) -> Tensor:
        """The gradient of an expert over the rows of the ranks before this one."""
        return self._received.pop((expert, name)).wait()[0]

    def _rows(self, expert: int) -> Mapping[str, Tensor]:
        return self._own if expert in self._dispatch.own else self._buffers

    def _index(self, expert: int) -> int:
        """The position of an expert among those of this rank, or among its copies."""
        own = self._dispatch.own
        return own.index(expert) if expert in own else self._dispatch.copied.index(expert)

    def _make_links(self) -> Iterator[_Link]:
        for expert, owner, ranks in self._dispatch.chains:
            chain = [*ranks, owner]
            if self._group.index in chain:
                position = chain.index(self._group.index)
                before = chain[position - 1] if position else None
                after = chain[position + 1] if position + 1 < len(chain) else None
                yield _Link(expert, position, before, after)

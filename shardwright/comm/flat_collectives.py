"""A flat tensor of which each rank of a group holds a piece: made whole on all, or added up to each rank's piece.

Pieces lie in the order of `order`: where the ranks are on several hosts, as many on each, those of the ranks with one
place in their hosts lie side by side, so that both go in two levels and each byte crosses between two hosts once.

Phases of gathering: ranks of one place exchange pieces over the hosts, then each hands those of its place, in one run,
to the ranks of its host. Of adding up: every rank adds what its host has for its place, in the order of ranks; ranks of
one place exchange that over the hosts, and add it in the order of these.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

from torch import Tensor

from shardwright.comm import collective
from shardwright.comm.hierarchical import HierarchicalCollectives
from shardwright.comm.mesh import Group
from shardwright.comm.pending import Pending
from shardwright.errors import UserError


def shard_order(group: Group) -> tuple[int, ...]:
    """The members of the group in the order in which their pieces lie."""
    if not group.hierarchical_groups:
        return tuple(range(group.size))
    return tuple(member for members in zip(*group.hierarchical_groups[0].hosts, strict=True) for member in members)


def all_gather_flat(flat: Tensor, sizes: Sequence[int], group: Group) -> Pending[Tensor]:
    """In place: the pieces of the others arrive beside this rank's own; `sizes` are of the pieces as they lie."""
    _check(flat, sizes, group, "gather")
    if group.size == 1:
        return Pending(lambda: flat)
    if group.hierarchical_groups:
        steps = group.next_hierarchical_group()
        work = _Levels(flat.detach(), sizes, steps)
        return _in_turn(work, work.gather, lambda: flat, steps)
    return collective.all_gather_into(_cut(flat.detach(), sizes), group).then(lambda _: flat)


def reduce_scatter_flat(flat: Tensor, sizes: Sequence[int], group: Group) -> Pending[Tensor]:
    """This rank's piece of the sum over ranks, in memory of its own; what is in `flat` is lost."""
    _check(flat, sizes, group, "add_up")
    mine = _cut(flat.detach(), sizes)[shard_order(group).index(group.index)]
    if group.size == 1:
        return Pending(lambda: mine)
    if group.hierarchical_groups:
        steps = group.next_hierarchical_group()
        work = _Levels(flat.detach(), sizes, steps)
        return _in_turn(work, work.add_up, mine.clone, steps)
    return collective.reduce_scatter(flat, sizes, group)


class _Levels:
    """A flat tensor in pieces over hosts; `group` is some other's `sums`."""

    def __init__(self, flat: Tensor, sizes: Sequence[int], group: Group) -> None:
        self._flat, self._steps = flat, HierarchicalCollectives(group)
        num = len(self._steps.inter_host)
        self._places = _cut(flat, [sum(sizes[at : at + num]) for at in range(0, len(sizes), num)])
        self._mine = self._places[self._steps.local_index]
        self._hosts = _cut(self._mine, sizes[self._steps.local_index * num : (self._steps.local_index + 1) * num])

    def gather(self) -> None:
        self._steps.all_gather(self._hosts, self._steps.inter_host)
        self._steps.all_gather(self._places, self._steps.intra_host)
        self._steps.retain_works(self._flat.nbytes)

    def add_up(self) -> None:
        most = max(len(self._mine) * (len(self._steps.intra_host) - 1), len(self._mine) * len(self._hosts))
        room = self._flat.new_empty(most)
        self._steps.reduce_scatter(self._places, self._steps.intra_host, room)
        self._steps.reduce_scatter(self._hosts, self._steps.inter_host, room)
        self._steps.retain_works(self._flat.nbytes)


def _in_turn(work: _Levels, run: Callable[[], None], finish: Callable[[], Tensor], group: Group) -> Pending[Tensor]:
    assert group.waiter is not None
    return Pending(finish, [group.waiter.chain(run)], group.heartbeat, buffers=work, waiter=group.waiter)


def _cut(flat: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    return [flat[start:end] for start, end in pairwise(accumulate(sizes, initial=0))]


def _check(flat: Tensor, sizes: Sequence[int], group: Group, name: str) -> None:
    if flat.dim() != 1 or len(sizes) != group.size or sum(sizes) != len(flat):
        raise UserError(f"{name} of {tuple(flat.shape)} in pieces of {list(sizes)} for {group.size} ranks")
    collective.check_collective(group, f"{name} of pieces of {list(sizes)}", flat)

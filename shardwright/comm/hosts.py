"""A sum over ranks of several hosts, as many on each: only what is summed inside a host crosses to the others.

Phases, a piece for each rank of a host: the pieces of its index meet at each rank, which adds them in the order of
ranks; ranks of one index add theirs over the hosts, in the order of these; the sums are gathered inside the host. What
crosses may be rounded to bf16, and is added in full. Each sum runs on one thread, after the one before it, over
channels and a tag that nothing else of its group uses.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwright.comm.mesh import Group
from shardwright.comm.pending import KEPT_BYTES, Pending


def sum_over_hosts(x: Tensor, group: Group, *, rounded: bool = False, kept: Tensor | None = None) -> Pending[Tensor]:
    """In place, the same to the bit on all ranks; `group` is some other's `sums`. `rounded`: numbers cross in bf16;
    what that takes from them is put into `kept`, if given, at the rank that rounded."""
    assert group.waiter is not None
    whole = _Sum(x.detach().view(-1), group, rounded, None if kept is None else kept.view(-1))
    return Pending(lambda: x, [group.waiter.turn(whole.run)], group.watch, held=whole, waiter=group.waiter)


class _Sum:
    """What one sum reads and writes, and its messages."""

    def __init__(self, flat: Tensor, group: Group, rounded: bool, kept: Tensor | None) -> None:
        self._flat, self._group, self._rounded, self._kept = flat, group, rounded, kept
        self._room = flat.new_empty(len(flat) + group.size)  # pieces may differ in length by one
        self._works: list[Any] = []

    def run(self) -> None:
        group = self._group
        inside = next(host for host in group.hosts if group.index in host)
        place = inside.index(group.index)
        across = [host[place] for host in group.hosts]
        pieces = self._flat.tensor_split(len(inside))
        self._reduce_scatter(pieces, inside)
        if self._rounded:
            kept = None if self._kept is None else self._kept.tensor_split(len(inside))[place]
            self._sum_rounded(pieces[place], across, kept)
        elif len(across) == 2:  # each sends all it has: as many bytes as in parts there and back, in one go
            self._reduce_scatter([pieces[place]] * 2, across)
        else:
            parts = pieces[place].tensor_split(len(across))
            self._reduce_scatter(parts, across)
            self._all_gather(parts, across)
        self._all_gather(pieces, inside)
        if group.waiter is not None:
            group.waiter.recent = self._works if self._flat.nbytes <= KEPT_BYTES else []

    def _sum_rounded(self, mine: Tensor, members: Sequence[int], kept: Tensor | None) -> None:
        """Parts in bf16 to each of the members, their sums in bf16 back; of two each sends all, rounded once."""
        at, wire = members.index(self._group.index), mine.bfloat16()
        if kept is not None:
            torch.sub(mine, wire, out=kept).nan_to_num_(0.0, 0.0, 0.0)
        whole = len(members) == 2
        parts = [wire, wire] if whole else wire.tensor_split(len(members))
        arrived = {member: torch.empty_like(parts[at]) for member in members if member != members[at]}
        sent = {member: part for member, part in zip(members, parts, strict=True) if member in arrived}
        self._exchange(_bytes(sent), _bytes(arrived))
        total = torch.zeros_like(parts[at], dtype=mine.dtype)
        for member in members:
            total += arrived.get(member, parts[at])
        if whole:
            mine.copy_(total)
            return
        rounded = total.bfloat16()
        if kept is not None:
            kept.tensor_split(len(members))[at].add_((total - rounded).nan_to_num_(0.0, 0.0, 0.0))
        gathered = [rounded if part is parts[at] else torch.empty_like(part) for part in parts]
        wanted = {member: part for member, part in zip(members, gathered, strict=True) if member in arrived}
        self._exchange(_bytes(dict.fromkeys(wanted, rounded)), _bytes(wanted))
        mine.copy_(torch.cat(gathered))

    def _reduce_scatter(self, pieces: Sequence[Tensor], members: Sequence[int]) -> None:
        """A piece to each of the members; that of this one becomes the sum of what all have of it, in their order."""
        at = members.index(self._group.index)
        others, mine = [member for member in members if member != members[at]], pieces[at]
        arrived = list(self._room[: len(others) * len(mine)].view(len(others), len(mine)))
        sent = {member: piece for member, piece in zip(members, pieces, strict=True) if member in others}
        self._exchange(sent, dict(zip(others, arrived, strict=True)))
        total, *more = [*arrived[:at], mine, *arrived[at:]]
        for part in more:
            total += part
        if total is not mine:
            mine.copy_(total)

    def _all_gather(self, pieces: Sequence[Tensor], members: Sequence[int]) -> None:
        """The piece of this one to each of the members, and theirs into their places."""
        wanted = dict(zip(members, pieces, strict=True))
        mine = wanted.pop(self._group.index)
        self._exchange(dict.fromkeys(wanted, mine), wanted)

    def _exchange(self, sent: Mapping[int, Tensor], wanted: Mapping[int, Tensor]) -> None:
        """By members. Receives come first, as in an all-to-all."""
        works = [self._group.receive(at, into) for at, into in wanted.items() if into.numel()]
        works += [self._group.send(at, x) for at, x in sent.items() if x.numel()]
        self._works += works
        for work in works:
            work.wait()


def _bytes(parts: Mapping[int, Tensor]) -> dict[int, Tensor]:
    """The same memory, in a type that every transport has."""
    return {member: part.view(torch.uint8) for member, part in parts.items()}

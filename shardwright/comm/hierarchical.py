"""A sum over ranks of several hosts, as many on each: only what is summed inside a host crosses to the others.

Phases, a piece for each rank of a host: the pieces of its index meet at each rank, which adds them in the order of
ranks; ranks of one index add theirs over the hosts, in the order of these; the sums are gathered inside the host. What
crosses may be rounded to bf16, and is added in full. Each sum runs on one thread, after the one before it, over
channels and a tag that nothing else of its group uses.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwright.comm.mesh import Group
from shardwright.comm.pending import RETAINED_WORK_BYTES, Pending


def hierarchical_all_reduce(
    x: Tensor, group: Group, *, bf16_across_hosts: bool = False, residual: Tensor | None = None
) -> Pending[Tensor]:
    """In place, the same to the bit on all ranks; `group` is of some other's `sums`. `rounded`: numbers cross in bf16;
    what that takes from them is put into `kept`, if given, at the rank that rounded."""
    assert group.waiter is not None
    whole = _Sum(x.detach().view(-1), group, bf16_across_hosts, None if residual is None else residual.view(-1))
    return Pending(lambda: x, [group.waiter.chain(whole.run)], group.heartbeat, buffers=whole, waiter=group.waiter)


class HierarchicalCollectives:
    """The messages of one work of several steps; `inside` are the members of this host, `across` those of this
    rank's place on every host."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self.intra_host = next(host for host in group.hosts if group.index in host)
        self.local_index = self.intra_host.index(group.index)
        self.inter_host = tuple(host[self.local_index] for host in group.hosts)
        self._works: list[Any] = []

    def reduce_scatter(self, pieces: Sequence[Tensor], members: Sequence[int], buffer: Tensor) -> None:
        """A piece to each of the members; that of this one becomes the sum of what all have of it, in their order."""
        at = members.index(self._group.index)
        mine = pieces[at]
        others = [(member, piece) for member, piece in zip(members, pieces, strict=True) if member != members[at]]
        arrived = list(buffer[: len(others) * len(mine)].view(len(others), len(mine)))
        self._exchange(others, [(member, into) for (member, _), into in zip(others, arrived, strict=True)])
        total, *more = [*arrived[:at], mine, *arrived[at:]]
        for part in more:
            total += part
        if total is not mine:
            mine.copy_(total)

    def all_reduce_bf16(self, mine: Tensor, members: Sequence[int], residual: Tensor | None) -> None:
        """Parts in bf16 to each of the members, their sums in bf16 back; of two each sends all, rounded once."""
        at, wire = members.index(self._group.index), mine.bfloat16()
        if residual is not None:
            torch.sub(mine, wire, out=residual).nan_to_num_(0.0, 0.0, 0.0)
        whole = len(members) == 2
        parts = [wire, wire] if whole else wire.tensor_split(len(members))
        arrived = {member: torch.empty_like(parts[at]) for member in members if member != members[at]}
        sent = [(member, part) for member, part in zip(members, parts, strict=True) if member in arrived]
        self._exchange(_bytes(sent), _bytes(arrived.items()))
        total = torch.zeros_like(parts[at], dtype=mine.dtype)
        for member in members:
            total += arrived.get(member, parts[at])
        if whole:
            mine.copy_(total)
            return
        rounded = total.bfloat16()
        if residual is not None:
            residual.tensor_split(len(members))[at].add_((total - rounded).nan_to_num_(0.0, 0.0, 0.0))
        gathered = [rounded if part is parts[at] else torch.empty_like(part) for part in parts]
        wanted = [(member, part) for member, part in zip(members, gathered, strict=True) if member in arrived]
        self._exchange(_bytes((member, rounded) for member, _ in wanted), _bytes(wanted))
        mine.copy_(torch.cat(gathered))

    def all_gather(self, pieces: Sequence[Tensor], members: Sequence[int]) -> None:
        """The piece of this one to each of the members, and theirs into their places."""
        mine = pieces[members.index(self._group.index)]
        wanted = [pair for pair in zip(members, pieces, strict=True) if pair[0] != self._group.index]
        self._exchange([(member, mine) for member, _ in wanted], wanted)

    def retain_works(self, bytes_: int) -> None:
        """The works of what was small stay until the next."""
        if self._group.waiter is not None:
            self._group.waiter.retained_works = self._works if bytes_ <= RETAINED_WORK_BYTES else []

    def _exchange(self, sent: Sequence[tuple[int, Tensor]], wanted: Sequence[tuple[int, Tensor]]) -> None:
        """By members. Receives come first, as in an all-to-all."""
        works = [self._group.receive(at, into) for at, into in wanted if into.numel()]
        works += [self._group.send(at, x) for at, x in sent if x.numel()]
        self._works += works
        for work in works:
            work.wait()


class _Sum:
    """What one sum reads and writes."""

    def __init__(self, flat: Tensor, group: Group, rounded: bool, kept: Tensor | None) -> None:
        self._flat, self._steps, self._rounded, self._kept = flat, HierarchicalCollectives(group), rounded, kept

    def run(self) -> None:
        steps, across = self._steps, self._steps.inter_host
        num = len(steps.intra_host) * len(across)
        room = self._flat.new_empty(len(self._flat) + num)  # pieces may differ in length by one
        pieces = self._flat.tensor_split(len(steps.intra_host))
        steps.reduce_scatter(pieces, steps.intra_host, room)
        if self._rounded:
            kept = None if self._kept is None else self._kept.tensor_split(len(steps.intra_host))[steps.local_index]
            steps.all_reduce_bf16(pieces[steps.local_index], across, kept)
        elif len(across) == 2:  # each sends all it has: as many bytes as in parts there and back, in one go
            steps.reduce_scatter([pieces[steps.local_index]] * 2, across, room)
        else:
            parts = pieces[steps.local_index].tensor_split(len(across))
            steps.reduce_scatter(parts, across, room)
            steps.all_gather(parts, across)
        steps.all_gather(pieces, steps.intra_host)
        steps.retain_works(self._flat.nbytes)


def _bytes(parts: Iterable[tuple[int, Tensor]]) -> list[tuple[int, Tensor]]:
    """The same memory, in a type that every transport has."""
    return [(member, part.view(torch.uint8)) for member, part in parts]

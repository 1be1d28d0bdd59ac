"""Hierarchical collectives over hosts with equally many ranks: only sums of a host cross hosts.

Phases of an all-reduce: reduce-scatter inside each host, in rank order; all-reduce of each chunk between the ranks of
one local index, in host order; all-gather inside each host. What crosses hosts may be rounded to bf16; it is summed in
the dtype of the tensor. All phases of one call run on one thread, after those of the previous call on the same
subgroup, over channels and a tag that no other message of the group uses.
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
    """All-reduce (sum) over the group, in place, bitwise equal on all ranks: `wait()` returns `x`.

    `group` is one of `Group.hierarchical_groups`: its own waiter and tag instead of the lane's. `bf16_across_hosts`:
    numbers cross hosts in bf16, and the rounding errors of this rank go into `residual`, if given.
    """
    assert group.waiter is not None
    work = _AllReduceWork(
        x.detach().view(-1), group, bf16_across_hosts, None if residual is None else residual.view(-1)
    )
    return Pending(lambda: x, [group.waiter.chain(work.run)], group.heartbeat, buffers=work, waiter=group.waiter)


class HierarchicalCollectives:
    """Blocking collectives, the phases of one work, over some members of a hierarchical group.

    Members are indices in the group. `intra_host`: those on this host; `inter_host`: one per host, those with this
    rank's local index.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self.intra_host = next(host for host in group.hosts if group.index in host)
        self.local_index = self.intra_host.index(group.index)
        self.inter_host = tuple(host[self.local_index] for host in group.hosts)
        self._works: list[Any] = []

    def reduce_scatter(self, chunks: Sequence[Tensor], members: Sequence[int], buffer: Tensor) -> None:
        """Reduce-scatter over `members`, in place: this rank's chunk becomes the sum over the members.

        Adds in the order of `members`. `buffer` has room for this rank's chunk from every other member.
        """
        index = members.index(self._group.index)
        shard = chunks[index]
        inputs = [(member, chunk) for member, chunk in zip(members, chunks, strict=True) if member != members[index]]
        buffers = list(buffer[: len(inputs) * len(shard)].view(len(inputs), len(shard)))
        self._exchange(inputs, [(member, into) for (member, _), into in zip(inputs, buffers, strict=True)])
        total, *more = [*buffers[:index], shard, *buffers[index:]]
        for part in more:
            total += part
        if total is not shard:
            shard.copy_(total)

    def all_reduce_bf16(self, x: Tensor, members: Sequence[int], residual: Tensor | None) -> None:
        """All-reduce over `members`, in place, sent in bf16: a reduce-scatter, then an all-gather.

        Two members exchange the whole tensor instead, so that each number is rounded once.
        """
        index, wire = members.index(self._group.index), x.bfloat16()
        if residual is not None:
            torch.sub(x, wire, out=residual).nan_to_num_(0.0, 0.0, 0.0)
        send_all = len(members) == 2
        parts = [wire, wire] if send_all else wire.tensor_split(len(members))
        buffers = {member: torch.empty_like(parts[index]) for member in members if member != members[index]}
        inputs = [(member, part) for member, part in zip(members, parts, strict=True) if member in buffers]
        self._exchange(_as_bytes(inputs), _as_bytes(buffers.items()))
        total = torch.zeros_like(parts[index], dtype=x.dtype)
        for member in members:
            total += buffers.get(member, parts[index])
        if send_all:
            x.copy_(total)
            return
        total_bf16 = total.bfloat16()
        if residual is not None:
            residual.tensor_split(len(members))[index].add_((total - total_bf16).nan_to_num_(0.0, 0.0, 0.0))
        sums = [total_bf16 if part is parts[index] else torch.empty_like(part) for part in parts]
        outputs = [(member, part) for member, part in zip(members, sums, strict=True) if member in buffers]
        self._exchange(_as_bytes((member, total_bf16) for member, _ in outputs), _as_bytes(outputs))
        x.copy_(torch.cat(sums))

    def all_gather(self, chunks: Sequence[Tensor], members: Sequence[int]) -> None:
        """All-gather over `members`, in place: each sends its own chunk and receives the others."""
        own_chunk = chunks[members.index(self._group.index)]
        outputs = [pair for pair in zip(members, chunks, strict=True) if pair[0] != self._group.index]
        self._exchange([(member, own_chunk) for member, _ in outputs], outputs)

    def retain_works(self, bytes_: int) -> None:
        """Keep the works until the next call if the tensor is small: see `Waiter.retained_works`."""
        if self._group.waiter is not None:
            self._group.waiter.retained_works = self._works if bytes_ <= RETAINED_WORK_BYTES else []

    def _exchange(self, inputs: Sequence[tuple[int, Tensor]], outputs: Sequence[tuple[int, Tensor]]) -> None:
        """Send and receive (member, tensor) pairs and wait; receives are posted first, as in an all-to-all."""
        works = [self._group.receive(member, buffer) for member, buffer in outputs if buffer.numel()]
        works += [self._group.send(member, x) for member, x in inputs if x.numel()]
        self._works += works
        for work in works:
            work.wait()


class _AllReduceWork:
    """One hierarchical all-reduce, with the buffers that it reads and writes."""

    def __init__(self, flat: Tensor, group: Group, bf16_across_hosts: bool, residual: Tensor | None) -> None:
        self._flat, self._comm = flat, HierarchicalCollectives(group)
        self._bf16_across_hosts, self._residual = bf16_across_hosts, residual

    def run(self) -> None:
        comm, inter_host = self._comm, self._comm.inter_host
        num_local = len(comm.intra_host)
        buffer = self._flat.new_empty(len(self._flat) + num_local * len(inter_host))  # chunks differ in length by one
        chunks = self._flat.tensor_split(num_local)
        comm.reduce_scatter(chunks, comm.intra_host, buffer)
        if self._bf16_across_hosts:
            residual = None if self._residual is None else self._residual.tensor_split(num_local)[comm.local_index]
            comm.all_reduce_bf16(chunks[comm.local_index], inter_host, residual)
        elif len(inter_host) == 2:  # each sends its whole chunk: as many bytes as in two phases, in one exchange
            comm.reduce_scatter([chunks[comm.local_index]] * 2, inter_host, buffer)
        else:
            parts = chunks[comm.local_index].tensor_split(len(inter_host))
            comm.reduce_scatter(parts, inter_host, buffer)
            comm.all_gather(parts, inter_host)
        comm.all_gather(chunks, comm.intra_host)
        comm.retain_works(self._flat.nbytes)


def _as_bytes(parts: Iterable[tuple[int, Tensor]]) -> list[tuple[int, Tensor]]:
    """View tensors as bytes, a dtype that every transport supports."""
    return [(member, part.view(torch.uint8)) for member, part in parts]

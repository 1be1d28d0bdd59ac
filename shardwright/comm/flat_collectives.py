"""All-gather and reduce-scatter of a flat tensor of which each rank of a group holds a shard.

Shards are in `shard_order`: over hosts with equally many ranks the shards of one local index are adjacent, so that both
collectives are hierarchical and each byte crosses between two hosts once.

Phases of the all-gather: between the ranks of one local index over the hosts, then inside each host, where each rank
sends the shards of its local index as one message. Phases of the reduce-scatter: inside each host, in rank order, then
between the ranks of one local index, in host order.
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
    """The members of the group in the order of their shards in a flat tensor."""
    if not group.hierarchical_groups:
        return tuple(range(group.size))
    return tuple(member for members in zip(*group.hierarchical_groups[0].hosts, strict=True) for member in members)


def all_gather_flat(flat: Tensor, sizes: Sequence[int], group: Group) -> Pending[Tensor]:
    """All-gather the shards of `flat` over the group, in place: `wait()` returns `flat`.

    On the group's lane, or over hosts on its hierarchical groups. `sizes`: lengths of the shards, in `shard_order`.
    """
    _check(flat, sizes, group, "all_gather_flat")
    if group.size == 1:
        return Pending(lambda: flat)
    if group.hierarchical_groups:
        subgroup = group.next_hierarchical_group()
        work = _FlatWork(flat.detach(), sizes, subgroup)
        return _chain(work, work.all_gather, lambda: flat, subgroup)
    return collective.all_gather_into(_split(flat.detach(), sizes), group).then(lambda _: flat)


def reduce_scatter_flat(flat: Tensor, sizes: Sequence[int], group: Group) -> Pending[Tensor]:
    """Reduce-scatter (sum) `flat` over the group: `wait()` returns this rank's shard of the sum.

    On the group's lane, or over hosts on its hierarchical groups. May overwrite `flat`; the shard is a new tensor
    unless the group has one rank. `sizes`: lengths of the shards, in `shard_order`.
    """
    _check(flat, sizes, group, "reduce_scatter_flat")
    shard = _split(flat.detach(), sizes)[shard_order(group).index(group.index)]
    if group.size == 1:
        return Pending(lambda: shard)
    if group.hierarchical_groups:
        subgroup = group.next_hierarchical_group()
        work = _FlatWork(flat.detach(), sizes, subgroup)
        return _chain(work, work.reduce_scatter, shard.clone, subgroup)
    return collective.reduce_scatter(flat, sizes, group)


class _FlatWork:
    """A flat tensor split by local index and host; `group` is one of `Group.hierarchical_groups`."""

    def __init__(self, flat: Tensor, sizes: Sequence[int], group: Group) -> None:
        self._flat, self._comm = flat, HierarchicalCollectives(group)
        index, num_hosts = self._comm.local_index, len(self._comm.inter_host)
        self._by_index = _split(flat, [sum(sizes[i : i + num_hosts]) for i in range(0, len(sizes), num_hosts)])
        self._own = self._by_index[index]
        self._by_host = _split(self._own, sizes[index * num_hosts : (index + 1) * num_hosts])

    def all_gather(self) -> None:
        self._comm.all_gather(self._by_host, self._comm.inter_host)
        self._comm.all_gather(self._by_index, self._comm.intra_host)
        self._comm.retain_works(self._flat.nbytes)

    def reduce_scatter(self) -> None:
        max_numbers = max(len(self._own) * (len(self._comm.intra_host) - 1), len(self._own) * len(self._by_host))
        buffer = self._flat.new_empty(max_numbers)
        self._comm.reduce_scatter(self._by_index, self._comm.intra_host, buffer)
        self._comm.reduce_scatter(self._by_host, self._comm.inter_host, buffer)
        self._comm.retain_works(self._flat.nbytes)


def _chain(work: _FlatWork, run: Callable[[], None], finish: Callable[[], Tensor], group: Group) -> Pending[Tensor]:
    assert group.waiter is not None
    return Pending(finish, [group.waiter.chain(run)], group.heartbeat, buffers=work, waiter=group.waiter)


def _split(flat: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    return [flat[start:end] for start, end in pairwise(accumulate(sizes, initial=0))]


def _check(flat: Tensor, sizes: Sequence[int], group: Group, name: str) -> None:
    if flat.dim() != 1 or len(sizes) != group.size or sum(sizes) != len(flat):
        raise UserError(
            f"{name} of shape {tuple(flat.shape)} over {group.size} ranks has shards of {list(sizes)}; wanted a flat "
            "tensor and one shard per rank, which together have its length"
        )
    collective.check_collective(group, f"{name} of shards of {list(sizes)}", flat)

"""Group: ranks that communicate on one lane; what collectives and messages between two ranks are made of."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.comm.heartbeat import Heartbeat
from shardwright.comm.pending import Waiter
from shardwright.comm.sent_bytes import SentBytes
from shardwright.comm.shared_memory import Channel, HostMembers
from shardwright.comm.staging import Staging
from shardwright.errors import UserError

CLOSED = "closed"  # instead of a process group; None would mean torch's group of all ranks


@dataclass(frozen=True, slots=True)
class Group:
    """Ranks that communicate on one lane, including this rank."""

    ranks: tuple[int, ...]
    index: int  # of this rank in `ranks`
    lane: str
    process_group: Any  # torch's process group; None for a group of one
    heartbeat: Heartbeat | None
    waiter: Waiter | None  # of its lane; None with NCCL
    check: bool = False  # whether ranks compare every collective before they issue it
    call_counter: Iterator[int] = field(default_factory=count, compare=False)
    # Shared-memory channels to the members on this host, by index in `ranks`.
    local_channels: Mapping[int, Channel] = field(default_factory=dict, compare=False)
    hosts: HostMembers = ()  # members by host
    tag: int = 0  # of point-to-point messages
    # Groups of the same ranks with their own channels, tag and waiter, for hierarchical collectives.
    hierarchical_groups: tuple["Group", ...] = ()
    hierarchical_calls: Iterator[int] = field(default_factory=count, compare=False)
    sent: SentBytes = field(default_factory=SentBytes, compare=False)  # of the mesh
    device: torch.device = torch.device("cpu")  # of this rank
    staging: Staging = field(default_factory=Staging, compare=False)  # of tensors on the device

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def shares_memory(self) -> bool:
        """Whether all members are on this host and reach each other through shared memory."""
        return len(self.hosts) == 1 and len(self.local_channels) == self.size - 1

    @property
    def has_even_hosts(self) -> bool:
        """Whether the group has several hosts with the same number of ranks, more than one, on each."""
        return len(self.hosts) > 1 and {len(host) for host in self.hosts} == {self.size // len(self.hosts)} != {1}

    def next_hierarchical_group(self) -> "Group":
        """The next of `hierarchical_groups`: while one collective crosses hosts, another runs inside."""
        return self.hierarchical_groups[next(self.hierarchical_calls) % len(self.hierarchical_groups)]

    def sends_from_device(self, x: Tensor) -> bool:
        """Whether NCCL moves this tensor, from GPU to GPU."""
        return x.is_cuda and not self.staging.applies_to(x)

    def receive(self, member: int, into: Tensor) -> Any:
        """Post the receive of the next message from a member; returns the work. Not over NCCL."""
        channel, host = self.local_channels.get(member), self.staging.allocate(into)
        work = channel.receive(host) if channel else self.process_group.recv([host], member, self.tag)
        return self.staging.receive(work, [(host, into)])

    def send(self, member: int, x: Tensor) -> Any:
        """Send a message to a member; returns the work, which keeps a staged copy. Not over NCCL."""
        self.sent.add(self.lane, self.ranks[member], x.nbytes)
        channel, host = self.local_channels.get(member), self.staging.copy_to_host(x)
        return channel.send(host) if channel else self.process_group.send([host], member, self.tag)

    def all_reduce(self, x: Tensor) -> Any:
        """All-reduce (sum) by torch, in place; returns the work."""
        host = self.staging.copy_to_host(x)
        work = dist.all_reduce(host, group=self.process_group, async_op=True)
        return self.staging.receive(work, [(host, x)])

    def broadcast(self, x: Tensor, source: int) -> Any:
        """Broadcast member `source`'s tensor by torch, in place; returns the work."""
        host = self.staging.copy_to_host(x)
        work = dist.broadcast(host, self.ranks[source], group=self.process_group, async_op=True)
        return self.staging.receive(work, [(host, x)])

    def all_gather(self, parts: Sequence[Tensor], x: Tensor) -> Any:
        """All-gather tensors of one shape into `parts` by torch, in rank order; returns the work."""
        hosts = [self.staging.allocate(part) for part in parts]
        work = dist.all_gather(hosts, self.staging.copy_to_host(x), group=self.process_group, async_op=True)
        return self.staging.receive(work, [*zip(hosts, parts, strict=True)])

    def check_open(self) -> None:
        if self.process_group is CLOSED:
            raise UserError("the mesh of this job has been closed: build a new job")

    def close(self) -> None:
        """Release the process group, as torch ends its threads only with the last reference to it."""
        object.__setattr__(self, "process_group", CLOSED)
        for channel in self.local_channels.values():
            channel.close()

"""Messages between ranks of a `Group`, on its lane; each call returns a Pending.

A rank receives the messages of another rank in the order in which that rank sent them on this lane. No call waits for
another rank, so that two ranks may send to each other. Empty tensors are not sent. To train through a message,
`receive` makes leaves that require gradients; the receiver sends their `.grad` back.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.comm.codec import Codec
from shardwright.comm.collective import PLAIN, issue_works
from shardwright.comm.mesh import Group
from shardwright.comm.pending import Pending, ready
from shardwright.errors import UserError


class TensorSpec(NamedTuple):
    """What the receiver of a tensor must know beforehand."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool = False


def send(tensors: Sequence[Tensor], member: int, group: Group, codec: Codec = PLAIN) -> Pending[None]:
    """Send tensors to a member of the group; `wait()` returns once they may be overwritten."""
    _check_member(member, group, "send")
    encoded = [codec.encode(x.detach()).contiguous() for x in tensors if x.numel()]
    return issue_works(group, lambda: None, lambda: [_send(x, member, group) for x in encoded])


def receive(specs: Sequence[TensorSpec], member: int, group: Group, codec: Codec = PLAIN) -> Pending[list[Tensor]]:
    """Receive tensors that a member of the group sends; the codec is the sender's."""
    _check_member(member, group, "receive")
    messages = [
        codec.encode(torch.empty(spec.shape, dtype=spec.dtype, device=group.device)).contiguous() for spec in specs
    ]

    def decode() -> list[Tensor]:
        tensors = [codec.decode(message, spec.dtype) for message, spec in zip(messages, specs, strict=True)]
        return [x.requires_grad_(spec.requires_grad) for x, spec in zip(tensors, specs, strict=True)]

    return issue_works(
        group, decode, lambda: [_receive(message, member, group) for message in messages if message.numel()]
    )


def receive_into(pairs: Sequence[tuple[int, Tensor]], group: Group) -> Pending[None]:
    """Receive a message from each member into a contiguous tensor; pairs are (member, tensor)."""
    pairs = [(member, x.detach()) for member, x in pairs if x.numel()]
    for member, _ in pairs:
        _check_member(member, group, "receive_into")
    if not pairs:
        return ready(None)
    return issue_works(group, lambda: None, lambda: [_receive(x, member, group) for member, x in pairs])


def send_in_turn(pairs: Sequence[tuple[int, Tensor]], group: Group) -> Pending[None]:
    """Send a contiguous tensor to each member once what was sent in turn before, on this lane, has left.

    Messages issued together thus do not share this rank's link: the first arrives first.
    """
    pairs = [(member, x.detach()) for member, x in pairs if x.numel()]
    for member, _ in pairs:
        _check_member(member, group, "send_in_turn")
    if not pairs:
        return ready(None)
    sender = group.waiter.sender if group.waiter is not None else None

    def start() -> list[Any]:
        return [_send(x, member, group) for member, x in pairs]

    def run() -> None:
        for work in start():
            work.wait()

    if sender is None:  # over NCCL, where a stream keeps the order
        return issue_works(group, lambda: None, start)
    return Pending(lambda: None, [sender.chain(run)], group.heartbeat, buffers=run, waiter=sender)


def relay_in_turn(pieces: Sequence[Tensor], chain: Sequence[int], group: Group) -> Pending[None]:
    """Copy tensors of the chain's first member into those of the others, each handing every piece on to the next.

    One relay after the other on this lane. Members of the chain call it, and nobody else.
    """
    position = chain.index(group.index)
    before = chain[position - 1] if position else None
    after = chain[position + 1] if position + 1 < len(chain) else None
    pieces = [piece.detach() for piece in pieces]

    def run() -> None:
        receives = [_receive(piece, before, group) for piece in pieces] if before is not None else []
        sends = []
        for number, piece in enumerate(pieces):
            if receives:
                receives[number].wait()
            if after is not None:
                sends.append(_send(piece, after, group))
        for work in sends:
            work.wait()

    waiter = group.waiter
    if waiter is None:
        raise UserError("copies of experts over NCCL: this version sends them over Gloo only; set run.device=cpu")
    return issue_works(group, lambda: None, lambda: [waiter.chain(run)])


def _send(x: Tensor, member: int, group: Group) -> Any:
    if group.sends_from_device(x):
        group.sent.add(group.lane, group.ranks[member], x.nbytes)
        return dist.isend(x, group.ranks[member], group=group.process_group)
    return group.send(member, x)


def _receive(into: Tensor, member: int, group: Group) -> Any:
    if group.sends_from_device(into):
        return dist.irecv(into, group.ranks[member], group=group.process_group)
    return group.receive(member, into)


def _check_member(member: int, group: Group, name: str) -> None:
    group.check_open()
    if member == group.index or not 0 <= member < group.size:
        raise UserError(f"{name}: member {member} of a group of {group.size}, from its member {group.index}")

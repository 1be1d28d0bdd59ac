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
from shardwright.comm.pending import Pending
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
    device = "cuda" if dist.get_backend(group.process_group) == "nccl" else "cpu"
    messages = [codec.encode(torch.empty(spec.shape, dtype=spec.dtype, device=device)).contiguous() for spec in specs]

    def decode() -> list[Tensor]:
        tensors = [codec.decode(message, spec.dtype) for message, spec in zip(messages, specs, strict=True)]
        return [x.requires_grad_(spec.requires_grad) for x, spec in zip(tensors, specs, strict=True)]

    return issue_works(
        group, decode, lambda: [_receive(message, member, group) for message in messages if message.numel()]
    )


def exchange_in_turn(
    inputs: Sequence[tuple[int, Tensor]], outputs: Sequence[tuple[int, Tensor]], group: Group
) -> Pending[None]:
    """Send tensors to members, and receive into tensors from members, once this rank's last such exchange has ended.

    Exchanges issued together thus do not share this rank's link: the first ends first. Pairs are (member, contiguous
    tensor); on a lane all messages must be exchanged in turn, or all at once, by any number of calls.
    """
    sends, receives = ([(member, x.detach()) for member, x in pairs if x.numel()] for pairs in (inputs, outputs))
    for member, _ in (*sends, *receives):
        _check_member(member, group, "exchange_in_turn")

    waiter = group.waiter

    def start() -> list[Any]:
        return [_receive(into, member, group) for member, into in receives] + [
            _send(x, member, group) for member, x in sends
        ]

    def run() -> None:
        for work in start():
            work.wait()

    # On a GPU, without a waiter, the stream keeps the order.
    return issue_works(group, lambda: None, start if waiter is None else lambda: [waiter.chain(run)])


def relay_in_turn(pieces: Sequence[Tensor], chain: Sequence[int], group: Group) -> Pending[None]:
    """Copy tensors of the chain's first member into those of the others, each handing every piece on to the next.

    In turn, like `exchange_in_turn`. Members of the chain call it, and nobody else.
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
        raise UserError("copies of experts on GPUs: this version sends them on CPUs only")
    return issue_works(group, lambda: None, lambda: [waiter.chain(run)])


def _send(x: Tensor, member: int, group: Group) -> Any:
    if x.is_cuda:
        return dist.isend(x, group.ranks[member], group=group.process_group)
    return group.send(member, x)


def _receive(into: Tensor, member: int, group: Group) -> Any:
    if into.is_cuda:
        return dist.irecv(into, group.ranks[member], group=group.process_group)
    return group.receive(member, into)


def _check_member(member: int, group: Group, name: str) -> None:
    group.check_open()
    if member == group.index or not 0 <= member < group.size:
        raise UserError(f"{name}: member {member} of a group of {group.size}, from its member {group.index}")

"""Messages between two ranks: several tensors, both directions at once, codecs, leaves of autograd."""

import pytest
import torch

from shardwright.comm.codec import Bf16
from shardwright.comm.mesh import Mesh
from shardwright.comm.point_to_point import (
    TensorSpec,
    receive,
    receive_into,
    relay_in_turn,
    send,
    send_in_turn,
)
from shardwright.errors import UserError

SHAPES = ((3, 1000, 40), (0, 7), (), (5,))


def tensors(rank: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(rank)
    return [torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype) for shape in SHAPES]


def exchange_on_rank(memory: bool) -> None:
    mesh = Mesh((("all", 2),), memory=memory)
    group, other = mesh.group(), 1 - mesh.rank
    specs = [TensorSpec(shape, torch.float64, len(shape) == 3) for shape in SHAPES]
    first, second = receive(specs, other, group), receive(specs, other, group)
    sent = [send(tensors(10 * mesh.rank + turn, torch.float64), other, group) for turn in range(2)]
    for turn, pending in enumerate((first, second)):
        received = pending.wait()
        for value, expected in zip(received, tensors(10 * other + turn, torch.float64), strict=True):
            assert torch.equal(value, expected) and value.is_leaf
        assert [value.requires_grad for value in received] == [True, False, False, False]
    codec, specs = Bf16(), [TensorSpec(shape, torch.float32) for shape in SHAPES]
    pending = receive(specs, other, group, codec)
    sent.append(send(tensors(mesh.rank), other, group, codec))
    for value, expected in zip(pending.wait(), tensors(other), strict=True):
        assert value.dtype == torch.float32
        assert ((value - expected).abs() <= codec.error_bound(expected)).all()
        assert value.numel() < 100 or not torch.equal(value, expected)
    for work in sent:
        work.wait()
    for member in (mesh.rank, 2):
        with pytest.raises(UserError, match=rf"send: member {member} of a group of 2, from its member {mesh.rank}"):
            send(tensors(0), member, group)
    mesh.close()


@pytest.mark.parametrize("memory", [True, False], ids=["shared memory", "Gloo"])
def test_two_ranks_send_to_each_other(ranks, memory):
    ranks.run(2, exchange_on_rank, memory)


def number(rank: int, size: int = 200_000) -> torch.Tensor:
    return torch.full((size,), float(rank))


def send_in_turn_on_rank(memory: bool) -> None:
    """Each rank sends to all others in turn, twice, large and small; receives are posted before and after."""
    mesh = Mesh((("all", 3),), memory=memory)
    group, others = mesh.group(), [(mesh.rank + step) % 3 for step in (1, 2)]
    sizes = (200_000, 3, 0)
    early = {(member, size): torch.empty(size) for size in sizes for member in others}
    received = [receive_into([(member, early[member, size]) for member in others], group) for size in sizes]
    sent = [send_in_turn([(member, number(mesh.rank, size))], group) for size in sizes for member in others]
    for pending in (*received, *sent):
        pending.wait()
    assert all(torch.equal(x, number(member, size)) for (member, size), x in early.items())
    with pytest.raises(UserError, match=f"send_in_turn: member {mesh.rank} of a group of 3"):
        send_in_turn([(mesh.rank, number(0))], group)
    mesh.close()


@pytest.mark.parametrize("memory", [True, False], ids=["shared memory", "Gloo"])
def test_messages_in_turn_arrive_whatever_the_order_of_receives(ranks, memory):
    ranks.run(3, send_in_turn_on_rank, memory)


def relay_on_rank(memory: bool) -> None:
    """Two relays along other chains; a rank is in one of them only."""
    mesh = Mesh((("all", 4),), memory=memory)
    group = mesh.group()
    for chains in (((2, 0, 3), (1, 2)), ((0, 1), (3, 2, 1, 0))):
        pieces = {chain: [number(10 * mesh.rank + i, 50_000) for i in range(3)] for chain in chains}
        pending = [relay_in_turn(pieces[chain], chain, group) for chain in chains if mesh.rank in chain]
        for work in pending:
            work.wait()
        for chain in chains:
            if mesh.rank in chain:
                expected = [number(10 * chain[0] + i, 50_000) for i in range(3)]
                assert all(torch.equal(a, b) for a, b in zip(pieces[chain], expected, strict=True))
    mesh.close()


@pytest.mark.parametrize("memory", [True, False], ids=["shared memory", "Gloo"])
def test_relays_hand_on_what_the_first_member_has(ranks, memory):
    ranks.run(4, relay_on_rank, memory)

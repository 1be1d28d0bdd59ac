"""Messages between two ranks: several tensors, both directions at once, codecs, leaves of autograd."""

import pytest
import torch

from shardwright.comm.codec import Bf16
from shardwright.comm.mesh import Mesh
from shardwright.comm.point_to_point import TensorSpec, receive, send
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

"""Blocks that run again backwards: the same numbers, names and modes as without, and how often what runs."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from shardwright.dense.activation_checkpoint import SAVED_OPS, CheckpointedBlock, checkpoint_activations
from shardwright.dense.offload import offload_optimizer_state, offload_tensor
from shardwright.errors import UserError
from shardwright.layers.mixing import Convolution
from shardwright.spec.plan import Recompute


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(6, 9), nn.Linear(9, 6)
        self.norm, self.drop = nn.LayerNorm(6), nn.Dropout(0.3)
        self.register_buffer("seen", torch.zeros(1), persistent=False)
        self.width = 6

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        return self.norm(x + scale * self.drop(self.narrow(torch.relu(self.wide(x)))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, scale=0.5)
        return x.square().sum()


class Counted(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.products = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.products += func.overloadpacket in SAVED_OPS
        return func(*args, **(kwargs or {}))


def gradients(net: Net) -> tuple[list[Tensor], int]:
    torch.manual_seed(5)
    net.zero_grad()
    with Counted() as counted:
        net(torch.randn(4, 6, generator=torch.Generator().manual_seed(2))).backward()
    return [parameter.grad.clone() for parameter in net.parameters()], counted.products


@pytest.mark.parametrize(("kept", "more"), [("nothing", 6), ("products", 0)])
def test_gradients_are_the_same_to_the_bit_with_dropout(kept, more):
    """The norm at the end needs what both products of a block gave."""
    plain, products = gradients(Net())
    net = Net()
    checkpoint_activations(net, [Recompute(f"blocks.{at}", kept) for at in range(3)])
    found, again = gradients(net)
    assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))
    assert again == products + more


def test_a_convolution_on_a_cpu_does_not_run_again_where_products_stay():
    def made(kept: str = "") -> tuple[list[Tensor | None], int]:
        torch.manual_seed(1)
        net = nn.Sequential(nn.Sequential(Convolution(2, 3), nn.LayerNorm(6)))
        checkpoint_activations(net, [Recompute("0", kept)] if kept else [])
        with Counted() as counted:
            net(torch.randn(4, 5, 6, generator=torch.Generator().manual_seed(2))).square().sum().backward()
        return [parameter.grad for parameter in net.parameters()], counted.products

    plain, once = made()
    for kept, more in (("products", 0), ("nothing", 1)):
        found, products = made(kept)
        assert all(map(torch.equal, found, plain)) and products == once + more


def test_running_statistics_move_once_and_modes_are_those_of_the_frame():
    nets = [nn.Sequential(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))) for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    checkpoint_activations(nets[1], [Recompute("0")])
    for net in nets:
        x = torch.randn(8, 3, generator=torch.Generator().manual_seed(3))
        net(x).square().sum().backward()
    assert (
        all(map(torch.equal, nets[0].buffers(), nets[1].buffers()))
        and int(nets[1][0].block[1].num_batches_tracked) == 1
    )
    frame = nets[1][0]
    nets[1].eval()
    for module in nets[1].modules():
        module.training = True
    nets[1](torch.ones(2, 3))
    assert frame.block.training


def test_names_modes_and_attributes_are_those_of_the_block():
    net, like = Net(), Net()
    checkpoint_activations(net, [Recompute("blocks.1")])
    frame = net.blocks[1]
    assert isinstance(frame, CheckpointedBlock) and frame.width == 6 and not hasattr(frame, "height")
    assert list(net.state_dict()) == list(like.state_dict())
    assert [name for name, _ in net.named_buffers()] == [name for name, _ in like.named_buffers()]
    net.eval()
    assert not frame.block.training and not frame.block.drop.training
    x = torch.randn(2, 6)
    with torch.no_grad():
        assert torch.equal(net(x), like.eval()(x))
    net.load_state_dict(like.state_dict())
    frame.wide.weight.data.zero_()
    assert not frame.block.wide.weight.any()


def test_what_lies_away_is_the_same_and_writes_to_a_file():
    x = torch.randn(3, 5)
    found = offload_tensor(x)
    assert torch.equal(found, x) and found.data_ptr() != x.data_ptr()
    found += 1
    assert torch.equal(found, x + 1) and offload_tensor(torch.empty(0)).numel() == 0


def test_no_room_for_what_lies_away_names_the_remedy(monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(UserError, match="no room for 60 bytes .No space left on device.; set TMPDIR"):
        offload_tensor(torch.randn(3, 5))


def test_an_optimizers_state_moves_after_the_step_that_makes_it_and_when_it_is_loaded():
    parameter = nn.Parameter(torch.randn(4))
    other = nn.Parameter(torch.randn(4))
    optimizer = torch.optim.Adam([parameter, other])
    offload_optimizer_state(optimizer, [parameter])
    places = []
    for _ in range(3):
        for one in (parameter, other):
            one.grad = torch.ones(4)
        optimizer.step()
        places.append(optimizer.state[parameter]["exp_avg"].data_ptr())
    assert len(set(places)) == 1
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    before = optimizer.state[parameter]["exp_avg"]
    parameter.grad = torch.ones(4)
    optimizer.step()
    assert optimizer.state[parameter]["exp_avg"] is not before
    torch.testing.assert_close(optimizer.state[parameter]["exp_avg"][0], torch.tensor(1 - 0.9**4))

"""Activation checkpointing and offload: same gradients and names as without, and rerun matmuls."""

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


class CountMatmuls(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.num_matmuls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.num_matmuls += func.overloadpacket in SAVED_OPS
        return func(*args, **(kwargs or {}))


def gradients(net: Net) -> tuple[list[Tensor], int]:
    torch.manual_seed(5)
    net.zero_grad()
    with CountMatmuls() as counter:
        net(torch.randn(4, 6, generator=torch.Generator().manual_seed(2))).backward()
    return [parameter.grad.clone() for parameter in net.parameters()], counter.num_matmuls


@pytest.mark.parametrize(("saved", "num_recomputed"), [("nothing", 6), ("products", 0)])
def test_gradients_with_dropout_are_the_same_to_the_bit(saved, num_recomputed):
    """The norm at the end of a block needs the outputs of both matmuls."""
    plain, plain_matmuls = gradients(Net())
    net = Net()
    checkpoint_activations(net, [Recompute(f"blocks.{number}", saved) for number in range(3)])
    checkpointed, num_matmuls = gradients(net)
    assert all(torch.equal(a, b) for a, b in zip(checkpointed, plain, strict=True))
    assert num_matmuls == plain_matmuls + num_recomputed


def test_selective_checkpointing_does_not_rerun_a_convolution_on_a_cpu():
    def run(saved: str = "") -> tuple[list[Tensor | None], int]:
        torch.manual_seed(1)
        net = nn.Sequential(nn.Sequential(Convolution(2, 3), nn.LayerNorm(6)))
        checkpoint_activations(net, [Recompute("0", saved)] if saved else [])
        with CountMatmuls() as counter:
            net(torch.randn(4, 5, 6, generator=torch.Generator().manual_seed(2))).square().sum().backward()
        return [parameter.grad for parameter in net.parameters()], counter.num_matmuls

    plain, plain_matmuls = run()
    for saved, num_recomputed in (("products", 0), ("nothing", 1)):
        gradients, num_matmuls = run(saved)
        assert all(map(torch.equal, gradients, plain)) and num_matmuls == plain_matmuls + num_recomputed


def test_running_statistics_are_updated_once_and_the_wrappers_mode_applies():
    nets = [nn.Sequential(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))) for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    checkpoint_activations(nets[1], [Recompute("0")])
    for net in nets:
        x = torch.randn(8, 3, generator=torch.Generator().manual_seed(3))
        net(x).square().sum().backward()
    assert all(map(torch.equal, nets[0].buffers(), nets[1].buffers()))
    assert int(nets[1][0].block[1].num_batches_tracked) == 1
    wrapper = nets[1][0]
    nets[1].eval()
    for module in nets[1].modules():
        module.training = True
    nets[1](torch.ones(2, 3))
    assert wrapper.block.training


def test_the_wrapper_has_the_blocks_names_modes_and_attributes():
    net, plain = Net(), Net()
    checkpoint_activations(net, [Recompute("blocks.1")])
    wrapper = net.blocks[1]
    assert isinstance(wrapper, CheckpointedBlock) and wrapper.width == 6 and not hasattr(wrapper, "height")
    assert list(net.state_dict()) == list(plain.state_dict())
    assert [name for name, _ in net.named_buffers()] == [name for name, _ in plain.named_buffers()]
    net.eval()
    assert not wrapper.block.training and not wrapper.block.drop.training
    x = torch.randn(2, 6)
    with torch.no_grad():
        assert torch.equal(net(x), plain.eval()(x))
    net.load_state_dict(plain.state_dict())
    wrapper.wide.weight.data.zero_()
    assert not wrapper.block.wide.weight.any()


def test_offloaded_tensors_have_the_same_values_in_a_file():
    x = torch.randn(3, 5)
    offloaded = offload_tensor(x)
    assert torch.equal(offloaded, x) and offloaded.data_ptr() != x.data_ptr()
    offloaded += 1
    assert torch.equal(offloaded, x + 1) and offload_tensor(torch.empty(0)).numel() == 0


def test_errors_of_a_full_disk_name_the_remedy(monkeypatch):
    def raise_no_space(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", raise_no_space)
    with pytest.raises(UserError, match="no room for 60 bytes .No space left on device.; set TMPDIR"):
        offload_tensor(torch.randn(3, 5))


def test_optimizer_state_is_offloaded_after_the_first_step_and_after_a_load():
    parameter = nn.Parameter(torch.randn(4))
    other = nn.Parameter(torch.randn(4))
    optimizer = torch.optim.Adam([parameter, other])
    offload_optimizer_state(optimizer, [parameter])
    addresses = []
    for _ in range(3):
        for p in (parameter, other):
            p.grad = torch.ones(4)
        optimizer.step()
        addresses.append(optimizer.state[parameter]["exp_avg"].data_ptr())
    assert len(set(addresses)) == 1
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    before = optimizer.state[parameter]["exp_avg"]
    parameter.grad = torch.ones(4)
    optimizer.step()
    assert optimizer.state[parameter]["exp_avg"] is not before
    torch.testing.assert_close(optimizer.state[parameter]["exp_avg"][0], torch.tensor(1 - 0.9**4))

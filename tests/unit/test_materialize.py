"""Models on the meta device get the same initial values, with or without a callback after each block."""

import pytest
import torch
from torch import Tensor, nn

from shardwright.runtime.materialize import materialize


class Head(nn.Module):
    """Initialized with another module's weight."""

    def __init__(self, like: nn.Embedding) -> None:
        super().__init__()
        self.like, self.out = like, nn.Linear(4, 6)

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.out.weight.copy_(self.like.weight)


class Net(nn.Module):
    """Has a repeated block, a recurrent block, tied parameters, and a head initialized from the table."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(6, 4)
        layer = nn.Linear(4, 4)
        self.blocks = nn.ModuleList([layer, nn.LSTM(4, 4), nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)), layer])
        self.blocks[2][0].weight = self.blocks[0].weight
        self.head = Head(self.table)
        self.register_buffer("count", torch.zeros(2))

    def reset_parameters(self) -> None:
        self.count.zero_()

    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            x = block(x)[0] if number == 1 else block(x)
        return self.head.out(x)


def materialize_blocks(model: nn.Module, blocks: list[str]) -> tuple[list[str], list[Tensor]]:
    torch.manual_seed(7)
    names: list[str] = []

    def on_block(name: str) -> None:
        assert not any(parameter.is_meta for parameter in model.get_submodule(name).parameters())
        names.append(name)

    materialize(model, torch.device("cpu"), blocks, on_block)
    return names, list(model.parameters())


def make_meta_net() -> Net:
    with torch.device("meta"):
        return Net()


@pytest.mark.parametrize("has_reset", [True, False])
def test_initial_values_are_the_same_with_block_callbacks(has_reset, monkeypatch):
    if not has_reset:  # Net.reset_parameters() would initialize all blocks, without callbacks
        monkeypatch.delattr(Net, "reset_parameters")
    names = [f"blocks.{number}" for number in range(4)]
    models = [make_meta_net(), make_meta_net()]
    for model in models:
        if not has_reset:
            del model.count
    (_, plain), (called, values) = materialize_blocks(models[0], []), materialize_blocks(models[1], names)
    assert called == ([] if has_reset else ["blocks.2", "blocks.1", "blocks.0"])
    assert all(torch.equal(a, b) for a, b in zip(plain, values, strict=True))
    for model in models:
        assert model.blocks[2][0].weight is model.blocks[0].weight and model.blocks[3] is model.blocks[0]
        assert torch.equal(model.head.out.weight, model.table.weight)
    x = torch.randn(3, 2, 4)
    assert torch.equal(models[0](x), models[1](x))


def test_parameters_with_values_stay_without_callbacks():
    model = Net()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    called, after = materialize_blocks(model, ["blocks.0", "blocks.1"])
    assert called == [] and all(torch.equal(a, b) for a, b in zip(before, after, strict=True))

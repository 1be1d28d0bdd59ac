"""Models made on the meta device get their first values in one order, whoever is told of blocks in between."""

import pytest
import torch
from torch import Tensor, nn

from shardwright.runtime.materialize import materialize


class Head(nn.Module):
    """Begins as what it was given."""

    def __init__(self, like: nn.Embedding) -> None:
        super().__init__()
        self.like, self.out = like, nn.Linear(4, 6)

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.out.weight.copy_(self.like.weight)


class Net(nn.Module):
    """Blocks, two of which are one; a recurrent one; tied parameters; what reads its neighbour at the start."""

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


def made(model: nn.Module, blocks: list[str]) -> tuple[list[str], list[Tensor]]:
    torch.manual_seed(7)
    heard: list[str] = []

    def told(name: str) -> None:
        assert not any(one.is_meta for one in model.get_submodule(name).parameters())
        heard.append(name)

    materialize(model, torch.device("cpu"), blocks, told)
    return heard, list(model.parameters())


def on_meta() -> Net:
    with torch.device("meta"):
        return Net()


@pytest.mark.parametrize("around", [True, False])
def test_first_values_are_the_same_whoever_is_told(around, monkeypatch):
    if not around:  # what fills all of it makes all of it first
        monkeypatch.delattr(Net, "reset_parameters")
    names = [f"blocks.{at}" for at in range(4)]
    models = [on_meta(), on_meta()]
    for model in models:
        if not around:
            del model.count
    (_, plain), (heard, values) = made(models[0], []), made(models[1], names)
    assert heard == ([] if around else ["blocks.2", "blocks.1", "blocks.0"])
    assert all(torch.equal(one, other) for one, other in zip(plain, values, strict=True))
    for model in models:
        assert model.blocks[2][0].weight is model.blocks[0].weight and model.blocks[3] is model.blocks[0]
        assert torch.equal(model.head.out.weight, model.table.weight)
    x = torch.randn(3, 2, 4)
    assert torch.equal(models[0](x), models[1](x))


def test_what_is_real_stays_and_is_not_told():
    model = Net()
    before = [one.detach().clone() for one in model.parameters()]
    heard, after = made(model, ["blocks.0", "blocks.1"])
    assert heard == [] and all(torch.equal(one, other) for one, other in zip(before, after, strict=True))

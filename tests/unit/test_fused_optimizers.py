"""Recipes use torch's fused kernels where these compute the same, wherever parameters are cut into shards."""

import pytest
import torch
from torch import nn

from shardwright import config
from shardwright.runtime.run.recipe import FUSED_KINDS, make_dense_optimizer


def optimizer(parameters, **keys) -> torch.optim.Optimizer:
    settings = config.load("synthetic-logistic", [f"dense.{key}={value}" for key, value in keys.items()])
    return make_dense_optimizer(settings)(parameters)


@pytest.mark.parametrize("kind", FUSED_KINDS)
@pytest.mark.parametrize("cut", (1, 5, 16, 203))
def test_shards_have_the_bits_of_the_whole_parameter(kind, cut):
    draw = torch.Generator().manual_seed(1)
    start, gradients = torch.randn(237, generator=draw), torch.randn(4, 237, generator=draw)

    def train(sizes):
        parts = [nn.Parameter(part.clone()) for part in start.split(sizes)]
        own = optimizer(parts, kind=kind, lr=0.01, weight_decay=0.1)
        assert own.defaults["fused"] is True
        for gradient in gradients:
            for part, of_part in zip(parts, gradient.split(sizes), strict=True):
                part.grad = of_part.clone()
            own.step()
        return torch.cat([part.detach() for part in parts])

    assert torch.equal(train([237]), train([cut, 237 - cut]))


@pytest.mark.parametrize(
    ("parameter", "keys"),
    (
        (nn.Parameter(torch.randn(3, 4).t()), {}),  # its gradient may be in another order of memory
        (nn.Parameter(torch.randn(3, dtype=torch.complex64)), {}),
        (nn.Parameter(torch.randn(3)), {"foreach": "true"}),
        (nn.Parameter(torch.randn(3)), {"fused": "false"}),
        (nn.Parameter(torch.randn(3)), {"kind": "SGD", "lr": 0.1}),
    ),
)
def test_other_parameters_and_choices_are_not_fused(parameter, keys):
    assert not optimizer([parameter], **keys).defaults.get("fused")

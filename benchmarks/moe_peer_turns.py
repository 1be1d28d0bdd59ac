"""Both ends' common part of benchmarks/moe_peers.py: weights, tokens, routing, and turns of a layer on each rank.

Runs in the peers' environment too, without Shardwright's compiled kernels.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from benchmarks.moe_sides import ALPHA, CHANNELS, EXPERTS_PER_RANK, NUM_CHOSEN, ROWS, counts_of
from benchmarks.turns import TurnServer
from shardwright.layers.gates import Routing
from shardwright.spec.expert_rows import IntArray

HIDDEN = ALPHA * CHANNELS


class Layer(Protocol):
    """A mixture of experts split over the ranks, after its gate has chosen."""

    def forward(self, tokens_NC: Tensor, routing: Routing) -> Tensor: ...

    def take_gradients(self) -> dict[str, Tensor]:
        """Move out the gradients of this rank's experts, by names of `weights_of`."""
        ...

    def describe(self) -> dict[str, Any]:
        """What replies to turns say about the layer."""
        ...


def weights_of(rank: int, num_ranks: int) -> dict[str, Tensor]:
    """SwiGLU's weights (E, outputs, inputs) of a rank's experts; the same in both environments."""
    generator, first = torch.Generator().manual_seed(3), rank * EXPERTS_PER_RANK
    shapes = {"gate": (HIDDEN, CHANNELS), "up": (HIDDEN, CHANNELS), "down": (CHANNELS, HIDDEN)}
    return {
        name: torch.randn(num_ranks * EXPERTS_PER_RANK, *shape, generator=generator)[first:][:EXPERTS_PER_RANK]
        * shape[1] ** -0.5
        for name, shape in shapes.items()
    }


def take_gradients(weights: Mapping[str, tuple[nn.Parameter, slice]]) -> dict[str, Tensor]:
    """Move out gradients; `weights`: by name, a parameter and its outputs that have this name."""
    gradients = {}
    for name, (parameter, outputs) in weights.items():
        assert parameter.grad is not None
        gradients[name] = parameter.grad[:, outputs]
    for parameter, _ in weights.values():
        parameter.grad = None
    return gradients


def recorded_routing(counts_E: IntArray) -> Routing:
    """Choices of experts with these counts; those of a token differ unless an expert has more rows than tokens."""
    chosen = torch.arange(len(counts_E)).repeat_interleave(torch.from_numpy(counts_E))
    experts_NK = chosen.view(NUM_CHOSEN, -1).t()
    order = torch.randperm(len(experts_NK), generator=torch.Generator().manual_seed(1))
    weights_NK = torch.full(experts_NK.shape, 1 / NUM_CHOSEN)
    return Routing(experts_NK[order].contiguous(), weights_NK, torch.zeros(1))


def values_file(folder: str | Path, side: str, rank: int) -> Path:
    return Path(folder) / f"{side}.{rank}.safetensors"


def serve(
    server: TurnServer, folder: str, ranks: tuple[int, int], barrier: Callable[[], object], layers: Mapping[str, Layer]
) -> None:
    """Serve turns, SIDE:WORKLOAD:NUMBER, on a rank; `ranks`: its number, and how many there are.

    A turn is forward and backward of the layer. One without timed steps writes results to `values_file`.
    """
    rank, num_ranks = ranks
    generator = torch.Generator().manual_seed(rank)
    tokens, gradient = (torch.randn(ROWS // NUM_CHOSEN, CHANNELS, generator=generator) for _ in range(2))

    def run(layer: Layer, routing: Routing) -> dict[str, Tensor]:
        x = tokens.clone().requires_grad_()
        out = layer.forward(x, routing)
        out.backward(gradient)
        assert x.grad is not None
        return {"output": out.detach(), "input": x.grad} | layer.take_gradients()

    server.reply({})
    for name, warm, steps in server.turns():
        side, workload, number = name.split(":")
        layer, routing = layers[side], recorded_routing(counts_of(workload, int(number), num_ranks)[rank])
        for _ in range(warm):
            run(layer, routing)
        if not steps:
            values = {key: value.float().contiguous() for key, value in run(layer, routing).items()}
            save_file(values, values_file(folder, side, rank))
        barrier()
        start = perf_counter()
        for _ in range(steps):
            run(layer, routing)
        barrier()
        server.reply({"seconds": (perf_counter() - start) / max(1, steps)} | layer.describe())

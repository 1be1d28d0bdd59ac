"""Mixtures of experts of torchtitan and transformers for benchmarks/moe_peers.py: a job whose sides take turns.

    PYTHON -m benchmarks.moe_torchtitan FOLDER JOB

Runs in the environment that `make moe-rivals` creates; benchmarks/moe_peers.py starts a process for each rank.

All sides are torchtitan's `RoutedExperts` with its `AllToAllTokenDispatcher`: an all-to-all of counts, one of rows with
uneven splits, the local experts, one of outputs, each backward too. Sides differ in the local experts:

- "torchtitan": its `GroupedExperts` as published, torch._grouped_mm in bf16 with float32 weights.
- "torchtitan, float32": the same without the conversion, a product for each expert: torch._grouped_mm is slower in
  float32 on the CPU.
- "transformers, grouped_mm" and "transformers, eager": `MixtralExperts` in float32 with these implementations.
"""

# pyright: reportMissingImports=false
# (torchtitan and transformers are in the environment that `make moe-rivals` creates)

import ctypes
import os
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional
from torchtitan.distributed.utils import set_spmd_backend
from torchtitan.models.common.moe import GroupedExperts, RoutedExperts
from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from benchmarks.moe_peer_turns import HIDDEN, serve, take_gradients, weights_of
from benchmarks.moe_sides import CHANNELS, EXPERTS_PER_RANK, NUM_CHOSEN
from benchmarks.turns import TurnServer
from shardwright.layers.gates import Routing

PORT_OFFSET = 1  # from the launcher's port, which our job uses
TIMEOUT = timedelta(hours=6)  # of a collective: ranks wait for their turn in one


class Float32Experts(GroupedExperts):
    """torchtitan's experts without the conversion to bf16, a product for each expert."""

    def forward(self, x_RD: Tensor, num_tokens_per_expert_E: Tensor) -> Tensor:
        parts = x_RD.split(num_tokens_per_expert_E.tolist())
        outputs = []
        for x, w1, w2, w3 in zip(parts, self.w1_EFD, self.w2_EDF, self.w3_EFD, strict=True):
            hidden = functional.silu(functional.linear(x, w1)) * functional.linear(x, w3)
            outputs.append(functional.linear(hidden, w2))
        return torch.cat(outputs)


class TransformersExperts(nn.Module):
    """The experts of transformers' Mixtral, called like torchtitan's: each row has one expert."""

    def __init__(self, implementation: str) -> None:
        super().__init__()
        config = MixtralConfig(hidden_size=CHANNELS, intermediate_size=HIDDEN, num_local_experts=EXPERTS_PER_RANK)
        config._experts_implementation = implementation
        self.experts = MixtralExperts(config)

    def forward(self, x_RD: Tensor, num_tokens_per_expert_E: Tensor) -> Tensor:
        experts_R = torch.arange(EXPERTS_PER_RANK).repeat_interleave(num_tokens_per_expert_E)
        return self.experts(x_RD, experts_R.unsqueeze(1), x_RD.new_ones(len(x_RD), 1))


class TitanLayer:
    """torchtitan's mixture without its router, over `mesh`."""

    def __init__(self, mesh: Any, experts: nn.Module, weights: dict[str, tuple[nn.Parameter, slice]]) -> None:
        num_experts = EXPERTS_PER_RANK * mesh.size()
        self.routed = RoutedExperts.Config(
            inner_experts=GroupedExperts.Config(dim=CHANNELS, hidden_dim=HIDDEN, num_experts=EXPERTS_PER_RANK),
            token_dispatcher=AllToAllTokenDispatcher.Config(num_experts=num_experts, top_k=NUM_CHOSEN),
        ).build()
        self.routed.inner_experts = experts
        self.routed.token_dispatcher.wire_meshes(ep_mesh=mesh)
        self.weights, self.num_experts = weights, num_experts
        with torch.no_grad():
            for name, value in weights_of(mesh.get_rank(), mesh.size()).items():
                parameter, outputs = weights[name]
                parameter[:, outputs] = value

    def forward(self, tokens_NC: Tensor, routing: Routing) -> Tensor:
        counts_E = torch.bincount(routing.experts_NK.flatten(), minlength=self.num_experts)
        arguments = (tokens_NC, routing.weights_NK, routing.experts_NK)
        return self.routed(*(tensor.unsqueeze(0) for tensor in arguments), counts_E).squeeze(0)

    def take_gradients(self) -> dict[str, Tensor]:
        return take_gradients(self.weights)

    def describe(self) -> dict[str, Any]:
        return {}


def make_layers(mesh: Any) -> dict[str, TitanLayer]:
    everything, layers = slice(None), dict[str, TitanLayer]()
    titan = GroupedExperts.Config(dim=CHANNELS, hidden_dim=HIDDEN, num_experts=EXPERTS_PER_RANK)
    for side, experts in {"torchtitan": GroupedExperts(titan), "torchtitan, float32": Float32Experts(titan)}.items():
        named = {"gate": experts.w1_EFD, "up": experts.w3_EFD, "down": experts.w2_EDF}
        layers[side] = TitanLayer(mesh, experts, {name: (weight, everything) for name, weight in named.items()})
    for implementation in ("grouped_mm", "eager"):
        experts = TransformersExperts(implementation)
        both, down = experts.experts.gate_up_proj, experts.experts.down_proj
        weights = {"gate": (both, slice(HIDDEN)), "up": (both, slice(HIDDEN, None)), "down": (down, everything)}
        layers[f"transformers, {implementation}"] = TitanLayer(mesh, experts, weights)
    return layers | {f"{side}, again": layers[side] for side in ("torchtitan", "torchtitan, float32")}


def retain_freed_memory() -> None:
    """Make the allocator keep freed memory, as Shardwright does."""
    allocator = ctypes.CDLL(None)
    if not allocator.mallopt(-3, 1 << 30):  # M_MMAP_THRESHOLD
        allocator.mallopt(-3, 1 << 25)
    allocator.mallopt(-1, -1)  # M_TRIM_THRESHOLD
    allocator.mallopt(-2, 1 << 26)  # M_TOP_PAD


def broadcast_line(line: bytes) -> bytes:
    """Broadcast the first rank's line; the other ranks sleep in the broadcast until it has one."""
    size = torch.tensor([len(line)])
    dist.broadcast(size, 0)
    text = torch.tensor(list(line) or [0] * int(size), dtype=torch.uint8)
    dist.broadcast(text, 0)
    return bytes(text.tolist())


def worker(folder: str, job: str) -> None:
    torch.set_num_threads(1)
    retain_freed_memory()
    os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + PORT_OFFSET)
    dist.init_process_group("gloo", timeout=TIMEOUT)
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    set_spmd_backend("partial_dtensor")  # all-to-alls by torch's functional collectives, over a plain mesh
    layers = make_layers(init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("ep",)))
    server = TurnServer(folder, job, rank, broadcast_line)
    serve(server, folder, (rank, num_ranks), lambda: dist.all_reduce(torch.zeros(1)), layers)
    dist.destroy_process_group()


if __name__ == "__main__":
    worker(*sys.argv[1:])

"""The device of a run, by `run.device`."""

from collections.abc import Iterator

import torch
from torch import nn

from shardwright.comm.backend import GLOO
from shardwright.comm.mesh import Mesh, select_device
from shardwright.measure.describe import sparse_of
from shardwright.measure.device import device_name
from shardwright.runtime.supported import gpu_obstacle
from shardwright.spec.plan import Plan


def run_device(setting: str, plan: Plan, model: nn.Module) -> torch.device:
    """The device of this rank; with "auto", the CPU for plans that this version computes only there."""
    device = select_device(setting)
    return torch.device("cpu") if setting == "auto" and _obstacle(plan, model) else device


def device_notes(setting: str, plan: Plan, model: nn.Module, mesh: Mesh) -> Iterator[str]:
    """Notes for the user: where the run computes, if there is a GPU, and how its messages travel."""
    if mesh.device.type == "cuda":
        way = ""
        if mesh.size > 1:
            way = "; ranks share GPUs: messages are copied through host memory" if mesh.backend == GLOO else "; NCCL"
        yield f"computes on {device_name(mesh.device)}{way}; this has been tested on an emulated device, not on a GPU"
    elif torch.cuda.is_available():
        obstacle = _obstacle(plan, model) if setting == "auto" else ""
        reason = f"{obstacle}, which this version computes on CPUs only" if obstacle else f"run.device={setting}"
        yield f"computes on the CPU, although there is a GPU: {reason}"


def _obstacle(plan: Plan, model: nn.Module) -> str:
    sparse = sparse_of(model)
    return gpu_obstacle(plan, sparse.tables if sparse is not None else ())

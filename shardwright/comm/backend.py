"""Choose the device of each rank, and the backend of all groups of a mesh.

NCCL sends between GPUs, and refuses two ranks that share one. Gloo sends only what is in host memory, so tensors on a
GPU are then copied through it (staging.py). With NCCL, tensors on the CPU still travel over Gloo.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist

from shardwright.errors import UserError

GLOO = "gloo"
NCCL = "cpu:gloo,cuda:nccl"  # in torch's form: a backend for each type of device
CPU_REMEDY = "set run.device=cpu"


@dataclass(frozen=True, slots=True)
class RankDevice:
    """The device of a rank; `gpu` identifies the GPU among those of all hosts, and is empty on a CPU."""

    type: str
    gpu: str = ""


def choose_device(setting: str, num_gpus: int, local_rank: int) -> torch.device:
    """The device of a rank by the setting `run.device`; ranks of a host take its GPUs in turn, and may share one."""
    if setting == "cuda" and not num_gpus:
        raise UserError(
            f"run.device=cuda, but torch sees no GPU; install torch with CUDA on a machine with a GPU, or {CPU_REMEDY}"
        )
    if setting == "cpu" or not num_gpus:
        return torch.device("cpu")
    return torch.device("cuda", local_rank % num_gpus)


def choose_backend(devices: Sequence[RankDevice], *, has_nccl: bool) -> str:
    """The backend for ranks on these devices: NCCL if each has a GPU of its own, else Gloo."""
    types = [device.type for device in devices]
    if len(set(types)) > 1:
        ranks = {type_: [rank for rank, other in enumerate(types) if other == type_] for type_ in sorted(set(types))}
        listing = ", ".join(f"ranks {numbers} on {type_}" for type_, numbers in ranks.items())
        raise UserError(f"the ranks have different devices ({listing}); {CPU_REMEDY}, or give every host a GPU")
    gpus = {device.gpu for device in devices}
    return NCCL if has_nccl and "" not in gpus and len(gpus) == len(devices) else GLOO


def agree_on_backend(store: Any, rank: int, size: int, device: torch.device) -> str:
    """The backend of a mesh, equal on all ranks: each writes its device to the mesh's store and reads those of all."""
    gpu = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""
    store.set(f"device/{rank}", json.dumps(asdict(RankDevice(device.type, gpu))))
    values = store.multi_get([f"device/{other}" for other in range(size)])
    return choose_backend([RankDevice(**json.loads(value)) for value in values], has_nccl=dist.is_nccl_available())

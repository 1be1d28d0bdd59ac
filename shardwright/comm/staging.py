"""Copies of device tensors in host memory, for messages over backends that send host memory only.

Phases of a message: the sender copies the tensor to pinned memory and waits for the copy, which comes after what the
GPU computes it from; Gloo or shared memory moves the bytes between hosts; once they have arrived, the receiver copies
them to its device. `wait()` of a staged work returns after that copy. The numbers are those of the tensor, bit by bit.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

PINNING_DEVICES = ("cuda",)  # that copy faster from and to pinned memory


class StagedWork:
    """A work on host memory; `wait()` also copies what has arrived to the device."""

    def __init__(self, work: Any, copies: Sequence[tuple[Tensor, Tensor]]) -> None:
        """`copies`: (host memory, tensor on the device) of what the work receives."""
        self._work, self._copies = work, tuple(copies)

    def wait(self) -> None:
        self._work.wait()
        copies, self._copies = self._copies, ()
        for host, target in copies:
            target.copy_(host)

    def get_future(self) -> Any:
        """The future of the work on host memory."""
        return self._work.get_future()


class Staging:
    """Makes the host copies of tensors on one device; other tensors are sent as they are."""

    def __init__(self, device: torch.device | None = None) -> None:
        """`device`: None: no tensor is copied."""
        self._type = device.type if device is not None else ""
        self._pins = self._type in PINNING_DEVICES

    def applies_to(self, x: Tensor) -> bool:
        """Whether a message of this tensor goes through host memory."""
        return x.device.type == self._type

    def allocate(self, x: Tensor) -> Tensor:
        """Host memory for what arrives in `x`; `x` itself if it is not staged."""
        if not self.applies_to(x):
            return x
        return torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=self._pins)

    def copy_to_host(self, x: Tensor) -> Tensor:
        """A copy in host memory, complete on return; `x` itself if it is not staged."""
        return self.allocate(x).copy_(x) if self.applies_to(x) else x

    def receive(self, work: Any, pairs: Sequence[tuple[Tensor, Tensor]]) -> Any:
        """The work with the copies to the device after it; `pairs`: (host memory, tensor) of what it receives."""
        copies = [(host, target) for host, target in pairs if host is not target]
        return StagedWork(work, copies) if copies else work


def staging_for(device: torch.device, *, over_gloo: bool) -> Staging:
    """The staging of a mesh: of tensors on a GPU over Gloo; NCCL and CPUs need none."""
    return Staging(device) if over_gloo and device.type != "cpu" else Staging()

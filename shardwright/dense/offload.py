"""Offload: this rank's weights, gradients and optimizer state of a block in the next memory tier.

For a GPU that is pinned host memory; for a CPU it is a memory-mapped file, whose pages the system may write out and
evict. Weights are read from there before the block runs, reduced gradients are written there, and the optimizer steps
there.
"""

import os
from collections.abc import Sequence
from tempfile import TemporaryFile

import torch
from torch import Tensor, nn

from shardwright.errors import UserError


def offload_tensor(x: Tensor) -> Tensor:
    """Copy a tensor to the next memory tier."""
    if x.is_cuda:
        return x.cpu().pin_memory()
    if not x.numel():
        return x.clone()
    with TemporaryFile(prefix="shardwright-") as file:
        try:
            os.posix_fallocate(file.fileno(), 0, x.nbytes)
        except OSError as error:
            raise UserError(
                f"offload: no room for {x.nbytes} bytes ({error.strerror}); set TMPDIR to a folder on a larger disk"
            ) from None
        memory = torch.from_file(f"/proc/self/fd/{file.fileno()}", shared=True, size=x.numel(), dtype=x.dtype)
    return memory.view(x.shape).copy_(x)


def offload_optimizer_state(optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter]) -> None:
    """After each optimizer step, offload the state tensors that it created for these parameters."""
    offloaded: dict[tuple[int, str], Tensor] = {}

    def offload_new_state(*_: object) -> None:
        for index, parameter in enumerate(parameters):
            state = optimizer.state.get(parameter, {})
            for name, value in state.items():
                if isinstance(value, Tensor) and value.dim() and offloaded.get((index, name)) is not value:
                    offloaded[index, name] = state[name] = offload_tensor(value)

    optimizer.register_step_post_hook(offload_new_state)

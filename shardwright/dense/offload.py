"""What the optimizer has of a block, out of the device's way: weights, gradients and its own state, one tier further.

Beside a GPU that is the host's memory; beside a CPU a file that is mapped into memory, which the system may write out
and drop. Weights are read from there when the block's turn comes, sums of gradients are written there, and the
optimizer works there.
"""

import os
from collections.abc import Sequence
from tempfile import TemporaryFile

import torch
from torch import Tensor, nn

from shardwright.errors import UserError


def offload_tensor(x: Tensor) -> Tensor:
    """The same numbers one tier further, in memory of their own."""
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
        found = torch.from_file(f"/proc/self/fd/{file.fileno()}", shared=True, size=x.numel(), dtype=x.dtype)
    return found.view(x.shape).copy_(x)


def offload_optimizer_state(optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter]) -> None:
    """After each step what the optimizer has made for these parameters in that step moves there, too."""
    moved: dict[tuple[int, str], Tensor] = {}

    def move(*_: object) -> None:
        for number, parameter in enumerate(parameters):
            state = optimizer.state.get(parameter, {})
            for name, value in state.items():
                if isinstance(value, Tensor) and value.dim() and moved.get((number, name)) is not value:
                    moved[number, name] = state[name] = offload_tensor(value)

    optimizer.register_step_post_hook(move)

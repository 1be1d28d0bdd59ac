"""The error for a loss that is NaN or infinite, raised before the update."""

import math

from torch import Tensor, nn

from shardwright.checkpoint.manifest import MODEL_PREFIX
from shardwright.errors import UserError
from shardwright.kernels.finite import first_nonfinite_row
from shardwright.rectangle import loaded_chunks
from shardwright.runtime.state import LocalState


def check_loss(model: nn.Module, loss: Tensor, step: int) -> None:
    """Raise for a loss that is not finite; the error names the first tensor of this rank that is not finite, either."""
    if math.isfinite(number := float(loss.detach())):
        return
    parts = LocalState(model, None).rectangles()
    chunks = (chunk for rect in parts for chunk in loaded_chunks(rect))
    names = (chunk.name.removeprefix(MODEL_PREFIX) for chunk in chunks if first_nonfinite_row(chunk.values) is not None)
    name = next(names, "")
    where = f'"{name}" is not finite' if name else "all weights of this process are finite: inspect its batch"
    raise UserError(f"step {step}: the loss is {number}; {where}; lower tables.lr or dense.lr, or set clip")

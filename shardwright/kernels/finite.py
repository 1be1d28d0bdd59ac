"""Whether the numbers of a tensor are finite, part by part, so that a table is read without a copy of its size."""

import torch
from torch import Tensor

from shardwright.errors import UserError

PART = 1 << 16  # rows
REMEDY = "lower the learning rate, set clip, or look for what the batch before held"


@torch.no_grad()
def first_nonfinite(values: Tensor) -> int | None:
    """The first row with a NaN or an infinity; 0 for a number."""
    if not values.is_floating_point() or values.is_meta:
        return None
    start = 0
    rows = values.detach().flatten(1) if values.dim() > 1 else values.detach().reshape(-1, 1)
    for part in rows.split(PART):
        if not bool(part.sum(dtype=torch.float64).isfinite()):  # a sum is finite only if all it adds are
            for row in (~part.isfinite()).any(1).nonzero()[:1].flatten().tolist():
                return start + row
        start += len(part)
    return None


def check_finite(name: str, values: Tensor) -> None:
    row = first_nonfinite(values)
    if row is not None:
        raise UserError(f"{name}: row {row} is not finite; {REMEDY}")


@torch.no_grad()
def num_saturated(values: Tensor) -> int:
    """How many numbers of a float16 tensor are its largest: what would have overflowed, and was clamped."""
    if values.dtype != torch.float16 or values.is_meta:
        return 0
    largest = torch.finfo(torch.float16).max
    return sum(int((part.abs() == largest).sum()) for part in values.detach().split(PART))

"""Find NaN and infinite numbers in a tensor; in chunks, so that a large table is not copied."""

import torch
from torch import Tensor

from shardwright.errors import UserError

CHUNK_ROWS = 1 << 16
NONFINITE_REMEDY = "lower the learning rate, set clip, or inspect the previous batch"


@torch.no_grad()
def first_nonfinite_row(values: Tensor) -> int | None:
    """Index of the first row with a NaN or infinity, None if there is none; 0 for a scalar."""
    if not values.is_floating_point() or values.is_meta:
        return None
    start = 0
    rows = values.detach().flatten(1) if values.dim() > 1 else values.detach().reshape(-1, 1)
    for chunk in rows.split(CHUNK_ROWS):
        if not bool(chunk.sum(dtype=torch.float64).isfinite()):  # a sum is finite only if all its terms are
            for row in (~chunk.isfinite()).any(1).nonzero()[:1].flatten().tolist():
                return start + row
        start += len(chunk)
    return None


def check_finite(name: str, values: Tensor) -> None:
    """Raise an error that names the first row with a NaN or infinity."""
    row = first_nonfinite_row(values)
    if row is not None:
        raise UserError(f"{name}: row {row} is not finite; {NONFINITE_REMEDY}")


@torch.no_grad()
def num_saturated(values: Tensor) -> int:
    """Count numbers of a float16 tensor that were clamped to the largest instead of overflowing."""
    if values.dtype != torch.float16 or values.is_meta:
        return 0
    largest = torch.finfo(torch.float16).max
    return sum(int((chunk.abs() == largest).sum()) for chunk in values.detach().split(CHUNK_ROWS))

"""Rectangles: rows and columns of named tensors, as ranks hold them and checkpoints store them.

Shape legend: R rows, C columns.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

IndexRange = tuple[int, int]  # start, end (excluded)


@dataclass(frozen=True, slots=True, eq=False)
class Rectangle:
    """Some rows and columns of a tensor, with their values."""

    name: str
    shape: tuple[int, ...]  # shape of the full tensor
    values: Tensor
    rows: IndexRange | Tensor  # a range, or the index of each row
    cols: tuple[IndexRange, ...] = ()  # ranges, concatenated in `values`; empty: all columns
    changed_rows: Tensor | None = None  # rows that differ from the last checkpoint; None: unknown

    @property
    def width(self) -> int:
        """Number of values in a row of the full tensor."""
        return torch.Size(self.shape[1:]).numel()

    @property
    def columns(self) -> tuple[IndexRange, ...]:
        return self.cols or ((0, self.width),)

    @property
    def values_RC(self) -> Tensor:
        """View of the values as a matrix."""
        return self.values.view(self.num_rows, sum(end - start for start, end in self.columns))

    @property
    def num_rows(self) -> int:
        return self.rows[1] - self.rows[0] if isinstance(self.rows, tuple) else len(self.rows)


def full_rectangle(name: str, tensor: Tensor) -> Rectangle:
    """A rectangle that covers all of a tensor."""
    return Rectangle(name, tuple(tensor.shape), tensor, (0, tensor.shape[0] if tensor.dim() else 1))


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

"""Rectangles: rows and columns of named tensors, as ranks hold them and checkpoints store them.

Shape legend: R rows, C columns.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

IndexRange = tuple[int, int]  # start, end (excluded)


CHUNK_BYTES = 16 << 20  # of stored rows that are in memory at a time


class StoredRows(Protocol):
    """The values of a rectangle that are not in memory as a whole; rows count from the rectangle's first."""

    def read(self, first: int, num: int) -> Tensor:
        """(num, C) Rows from `first` on."""
        ...

    def select(self, indices: Tensor) -> Tensor:
        """(R, C) Some rows."""
        ...

    def write(self, indices: Tensor, columns: IndexRange, values_RC: Tensor) -> None:
        """Replace some columns of some rows."""
        ...

    def nonfinite_row(self) -> int | None:
        """A row with a NaN or infinity, None if there is none."""
        ...

    def snapshot(self) -> "StoredRows":
        """The rows as they are now, which another thread may read while they change, until `close`."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True, eq=False)
class Rectangle:
    """Some rows and columns of a tensor, with their values; if these are `stored`, `values` is a meta tensor."""

    name: str
    shape: tuple[int, ...]  # shape of the full tensor
    values: Tensor
    rows: IndexRange | Tensor  # a range, or the index of each row
    cols: tuple[IndexRange, ...] = ()  # ranges, concatenated in `values`; empty: all columns
    changed_rows: Tensor | None = None  # rows that differ from the last checkpoint; None: unknown
    stored: StoredRows | None = None

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


def loaded_chunks(rectangle: Rectangle) -> Iterator[Rectangle]:
    """A stored rectangle as several with their values in memory; others as they are."""
    if rectangle.stored is None:
        yield rectangle
        return
    values, rows = rectangle.values, rectangle.rows
    step = max(1, CHUNK_BYTES // max(1, values[:1].nbytes))
    for first in range(0, rectangle.num_rows, step):
        end = min(first + step, rectangle.num_rows)
        part = (rows[0] + first, rows[0] + end) if isinstance(rows, tuple) else rows[first:end]
        memory = rectangle.stored.read(first, end - first).view(end - first, *values.shape[1:])
        yield replace(rectangle, values=memory, rows=part, changed_rows=None, stored=None)


def full_rectangle(name: str, tensor: Tensor) -> Rectangle:
    """A rectangle that covers all of a tensor."""
    return Rectangle(name, tuple(tensor.shape), tensor, (0, tensor.shape[0] if tensor.dim() else 1))


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

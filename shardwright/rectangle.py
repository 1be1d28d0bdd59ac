"""Parts of tensors by the tensor's own name: what is told of who holds what, and what checkpoints are made of."""

from dataclasses import dataclass

import torch
from torch import Tensor

IndexRange = tuple[int, int]  # from, to


@dataclass(frozen=True, slots=True, eq=False)
class Rectangle:
    """Some rows of a tensor, in some of its columns."""

    name: str
    shape: tuple[int, ...]  # of the whole tensor
    values: Tensor
    rows: IndexRange | Tensor  # a run of them, or the number of each
    cols: tuple[IndexRange, ...] = ()  # runs side by side; none: all there are
    changed_rows: Tensor | None = None  # which rows differ from those of the last checkpoint, where that is known

    @property
    def width(self) -> int:
        """Numbers in a row of the whole tensor."""
        return torch.Size(self.shape[1:]).numel()

    @property
    def columns(self) -> tuple[IndexRange, ...]:
        return self.cols or ((0, self.width),)

    @property
    def values_RC(self) -> Tensor:
        """The values as rows; a view."""
        return self.values.view(self.num_rows, sum(end - start for start, end in self.columns))

    @property
    def num_rows(self) -> int:
        return self.rows[1] - self.rows[0] if isinstance(self.rows, tuple) else len(self.rows)


def full_rectangle(name: str, tensor: Tensor) -> Rectangle:
    return Rectangle(name, tuple(tensor.shape), tensor, (0, tensor.shape[0] if tensor.dim() else 1))


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

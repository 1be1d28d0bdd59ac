"""One table of EmbeddingBags: its weight, its optimizer state, and the initialization of its rows.

Shape legend: U row indices.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.errors import UserError
from shardwright.kernels.initial import CHUNK_ELEMENTS, uniform_rows
from shardwright.kernels.native import use_huge_pages
from shardwright.kernels.rounding import copy_finite, derive_seed
from shardwright.spec.optimizer import SparseOptimizer, state_shapes
from shardwright.spec.workload import Dtype, Table, state_dtype


class TableWeights(nn.Module):
    """One table: its weight, which is in the state dict, and its optimizer state, which is not."""

    def __init__(self, table: Table, optimizer: SparseOptimizer | None) -> None:
        super().__init__()
        self.table = table
        self._seed_name = table.name
        self.rounding_key = derive_seed(f"{table.name}/rounding")  # of stochastic rounding
        self.changed_rows: Tensor | None = None  # (rows,) bool: changed since the last checkpoint; None: not tracked
        self.initial_state = getattr(optimizer, "initial", 0.0)
        dtype, device = getattr(torch, table.dtype), "meta" if table.growth is not None else None  # rows come later
        self.weight = nn.Parameter(torch.empty(table.rows, table.dim, dtype=dtype, device=device))
        for name, shape in state_shapes(optimizer, table.rows, table.dim).items() if optimizer else ():
            state = torch.empty(shape, dtype=torch_state_dtype(table), device=device)
            self.register_buffer(name, state, persistent=False)
        self._dtypes = dtype, torch_state_dtype(table)  # of the weight, and of the optimizer's state
        self._trained: bool | None = None  # requires_grad of a released weight; None: not released
        self._stays_on_cpu = False
        self.reset()

    def set_path(self, path: str) -> None:
        """Include the module path in the seed, so that tables of equal name in two modules differ."""
        is_fresh = self.rounding_key == derive_seed(f"{self._seed_name}/rounding")  # not loaded from a saved state
        self._seed_name = f"{path}.{self.table.name}"
        self.rounding_key = derive_seed(f"{self._seed_name}/rounding") if is_fresh else self.rounding_key

    def join(self, member: str, *, is_fresh: bool) -> None:
        """Name the table MEMBER.NAME, also in its seed: it belongs to a member of an EmbeddingBagsDict.

        With `is_fresh`, a table that still has its initial values is initialized again.
        """
        is_fresh = is_fresh and self._has_initial_values()
        self.set_path(member)
        self.table = replace(self.table, name=f"{member}.{self.table.name}")
        if is_fresh:
            self.reset()

    def _has_initial_values(self) -> bool:
        return self.weight.is_meta or all(torch.equal(part, self.initial_rows(rows)) for rows, part in self._chunks())

    @property
    def is_released(self) -> bool:
        return self._trained is not None

    @property
    def is_trained(self) -> bool:
        return self.weight.requires_grad if self._trained is None else self._trained

    def release(self) -> None:
        """Free the weight and the optimizer state; keep the table's settings."""
        self._trained = self.is_trained
        self.register_parameter("weight", None)
        for name in [name for name, _ in self.named_buffers()]:
            delattr(self, name)

    @property
    def states(self) -> list[Tensor]:
        """The optimizer state; `buffers()` walks over submodules, several times a step for each table."""
        return [state for state in self._buffers.values() if state is not None]

    def keep_on_cpu(self) -> None:
        """Keep the weight and the optimizer state in host memory when the model moves to a GPU."""
        if self.weight.is_meta:
            self.to_empty(device="cpu")
            self.reset()
        self.to("cpu")
        self._stays_on_cpu = True

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> "TableWeights":
        """Called by nn.Module to move or cast its tensors."""
        return self if self._stays_on_cpu else super()._apply(fn, recurse)

    @torch.no_grad()
    def cast(self, dtype: Dtype) -> None:
        """Convert the weight to `dtype`, rounding to nearest; later updates round stochastically."""
        if dtype != self.table.dtype:
            self.table = replace(self.table, dtype=dtype)
            self._dtypes = getattr(torch, dtype), torch_state_dtype(self.table)
            converted = torch.empty_like(self.weight, dtype=getattr(torch, dtype))
            use_huge_pages(converted)
            copy_finite(converted, self.weight)
            self.weight.data = converted

    def check_dtype(self) -> None:
        """Raise an error if the model was cast: `model.half()` also casts tables and their optimizer state."""
        weight, (dtype, state_dtype) = self._parameters["weight"], self._dtypes
        if weight is not None and (weight.dtype != dtype or any(state.dtype != state_dtype for state in self.states)):
            dtypes = ", ".join(str(x.dtype).removeprefix("torch.") for x in (self.weight, *self.states))
            raise UserError(
                f'table "{self.table.name}" was declared {self.table.dtype} and is now {dtypes}; '
                "set Table(dtype=...) and cast only the dense model"
            )

    @torch.no_grad()
    def reset(self) -> None:
        for tensor in (self.weight, *self.buffers()):
            use_huge_pages(tensor)
        for state in self.buffers():
            state.fill_(self.initial_state)
        if self.weight.device.type == "meta":
            return
        for rows, part in self._chunks():
            part.copy_(self.initial_rows(rows))

    def _chunks(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Row numbers and weights of each chunk of rows."""
        size = max(1, CHUNK_ELEMENTS // self.table.dim)
        for number, part in enumerate(self.weight.detach().split(size)):
            yield torch.arange(number * size, number * size + len(part), device=part.device), part

    def initial_rows(self, rows_U: Tensor) -> Tensor:
        """Initial values of rows `rows_U`, which depend only on torch's seed, the table and the row."""
        return self.row_initializer()(rows_U)

    def row_initializer(self) -> Callable[[Tensor], Tensor]:
        """`initial_rows` with the seed that torch has now."""
        (seed, bound), dim, dtype = self.initial_numbers(), self.table.dim, getattr(torch, self.table.dtype)
        return lambda rows_U: uniform_rows(seed, rows_U, dim, bound, dtype)

    def initial_numbers(self) -> tuple[int, float]:
        """The seed of the initial values of rows, with the seed that torch has now, and their largest value."""
        return derive_seed(self._seed_name), self.table.init if self.table.init is not None else self.table.rows**-0.5


def torch_state_dtype(table: Table) -> torch.dtype:
    return getattr(torch, state_dtype(table.dtype))

"""One table of EmbeddingBags: its weight, its optimizer's state, and what its rows begin with."""

from dataclasses import replace

import torch
from torch import Tensor, nn

from shardwright.errors import UserError
from shardwright.kernels.initial import CHUNK_ELEMENTS, uniform_rows
from shardwright.kernels.native import use_huge_pages
from shardwright.kernels.rounding import copy_finite, derive_seed
from shardwright.spec.optimizer import SparseOptimizer, state_shapes
from shardwright.spec.workload import Dtype, Table, state_dtype


class TableWeights(nn.Module):
    """One table: its weight in the state dict, its optimizer's state beside it."""

    def __init__(self, table: Table, optimizer: SparseOptimizer | None) -> None:
        super().__init__()
        self.table = table
        self._seed_name = table.name
        self.rounding_key = derive_seed(f"{table.name}/rounding")  # of stochastic rounding
        self.changed_rows: Tensor | None = None  # rows that differ from the last checkpoint's, where that is asked for
        self.initial_state = getattr(optimizer, "initial", 0.0)
        dtype = getattr(torch, table.dtype)
        self.weight = nn.Parameter(torch.empty(table.rows, table.dim, dtype=dtype))
        for name, shape in state_shapes(optimizer, table.rows, table.dim).items() if optimizer else ():
            self.register_buffer(name, torch.empty(shape, dtype=torch_state_dtype(table)), persistent=False)
        self._trained: bool | None = None  # while the weight is here, it says so itself
        self.reset()

    def set_path(self, path: str) -> None:
        """Include the module path in the seed, so that tables of equal name in two modules differ."""
        is_fresh = self.rounding_key == derive_seed(f"{self._seed_name}/rounding")  # not loaded from a saved state
        self._seed_name = f"{path}.{self.table.name}"
        self.rounding_key = derive_seed(f"{self._seed_name}/rounding") if is_fresh else self.rounding_key

    @property
    def is_released(self) -> bool:
        return self._trained is not None

    @property
    def is_trained(self) -> bool:
        return self.weight.requires_grad if self._trained is None else self._trained

    def release(self) -> None:
        """Keep only what the table is, not what it holds."""
        self._trained = self.is_trained
        self.register_parameter("weight", None)
        for name in [name for name, _ in self.named_buffers()]:
            delattr(self, name)

    @torch.no_grad()
    def cast(self, dtype: Dtype) -> None:
        """In this dtype from now on: what is there is rounded to the nearest, updates are stochastically."""
        if dtype != self.table.dtype:
            self.table = replace(self.table, dtype=dtype)
            held = torch.empty_like(self.weight, dtype=getattr(torch, dtype))
            use_huge_pages(held)
            copy_finite(held, self.weight)
            self.weight.data = held

    def check_dtype(self) -> None:
        """Casting a model casts its tables and their state too, which would train them in another precision unasked."""
        found = (self.weight.dtype, *(state.dtype for state in self.buffers()))
        wanted = (getattr(torch, self.table.dtype), *[torch_state_dtype(self.table)] * (len(found) - 1))
        if found != wanted:
            dtypes = ", ".join(str(dtype).removeprefix("torch.") for dtype in found)
            raise UserError(
                f'table "{self.table.name}" was declared {self.table.dtype} and is now {dtypes}; '
                "give Table(dtype=...) and cast only the dense part"
            )

    @torch.no_grad()
    def reset(self) -> None:
        for tensor in (self.weight, *self.buffers()):
            use_huge_pages(tensor)
        for state in self.buffers():
            state.fill_(self.initial_state)
        if self.weight.device.type == "meta":
            return
        step = max(1, CHUNK_ELEMENTS // self.table.dim)
        for start in range(0, self.table.rows, step):
            rows = torch.arange(start, min(start + step, self.table.rows), device=self.weight.device)
            self.weight[start : start + step] = self.initial_rows(rows)

    def initial_rows(self, rows_U: Tensor) -> Tensor:
        """What these rows begin with, wherever they are made."""
        bound = self.table.init if self.table.init is not None else self.table.rows**-0.5
        return uniform_rows(
            derive_seed(self._seed_name), rows_U, self.table.dim, bound, getattr(torch, self.table.dtype)
        )


def torch_state_dtype(table: Table) -> torch.dtype:
    return getattr(torch, state_dtype(table.dtype))

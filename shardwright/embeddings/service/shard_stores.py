"""Rows on a table server of shards that ranks own: of each shard the rows that its rank has no room for.

A rank reads and writes the rows of its own shards only, and only it does: there are no clocks and no rounds. A row is
a weight and its optimizer state, in one row of a matrix.

Shape legend: E rows of a store, W rows that are written, R rows that are read, X values of a row and its state.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from shardwright.errors import UserError
from shardwright.spec.workload import Dtype


@dataclass(frozen=True, slots=True)
class StoreSpec:
    """The part of a table shard that is on one server. `width`: values of a row and its optimizer state."""

    table: str
    rows: int
    width: int
    dtype: Dtype


@dataclass(frozen=True, slots=True, eq=False)
class Swap:
    """Rows of a store to write, and then rows to read."""

    store: int
    written_W: Tensor
    values_WX: Tensor
    read_R: Tensor


class ShardStores:
    """The stores of all ranks on one server."""

    def __init__(self, specs: Sequence[StoreSpec]) -> None:
        self.specs = specs
        # Memory is taken when rows are written.
        self.rows_EX = [torch.from_numpy(np.zeros((spec.rows, spec.width), np.dtype(spec.dtype))) for spec in specs]
        self.snapshots: dict[str, tuple[int, Tensor]] = {}  # by name: a store, and its rows as they were

    def write(self, swaps: Sequence[Swap]) -> None:
        for swap in swaps:
            self._check(swap)
        for swap in swaps:
            self.rows_EX[swap.store].index_copy_(0, swap.written_W, swap.values_WX)

    def read(self, swaps: Sequence[Swap]) -> list[Tensor]:
        for swap in swaps:
            self._check(swap)
        return [self.rows_EX[swap.store].index_select(0, swap.read_R) for swap in swaps]

    def _check(self, swap: Swap) -> None:
        spec = self._spec(swap.store)
        for rows in (swap.written_W, swap.read_R):
            low, high = (int(end) for end in torch.aminmax(rows)) if len(rows) else (0, -1)
            if low < 0 or high >= spec.rows:
                raise UserError(f"row {high if high >= spec.rows else low} of {spec.table}, with {spec.rows} rows here")
        if swap.values_WX.shape != (len(swap.written_W), spec.width):
            raise UserError(f"{len(swap.written_W)} rows of {spec.table} with values {tuple(swap.values_WX.shape)}")
        if swap.values_WX.dtype != self.rows_EX[swap.store].dtype:
            raise UserError(f"values of {spec.table} are {swap.values_WX.dtype}; wanted {spec.dtype}")

    def _spec(self, store: int) -> StoreSpec:
        if not 0 <= store < len(self.specs):
            raise UserError(f"store {store} of rows; this server has {len(self.specs)}")
        return self.specs[store]

    def keep(self, store: int, snapshot: str) -> None:
        """Keep the rows of a store as they are now, until they are dropped."""
        self._spec(store)
        if snapshot not in self.snapshots:
            self.snapshots[snapshot] = store, self.rows_EX[store].clone()

    def read_kept(self, store: int, snapshot: str, first: int, num: int) -> Tensor:
        """(num, X) Rows of a snapshot from `first` on."""
        kept, rows_EX = self.snapshots.get(snapshot, (None, torch.empty(0, 0)))
        if kept != store:
            raise UserError("the snapshot of the rows is gone: the table server was restarted; save again")
        if not 0 <= first <= first + num <= len(rows_EX):
            raise UserError(f"rows {first}..{first + num} of a store with {len(rows_EX)} rows")
        return rows_EX[first : first + num]

    def drop(self, snapshot: str) -> None:
        self.snapshots.pop(snapshot, None)

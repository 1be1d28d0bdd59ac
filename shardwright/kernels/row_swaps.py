"""Copy rows between tables in host memory and lines of a cache in GPU memory: kernels read and write both directly.

Host memory is page-locked, so that a GPU can address it. Without Triton, and on a CPU, the copies are plain torch.

Shape legend: M moves, E rows of a table, L lines, T tables.
"""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardwright.errors import UserError
from shardwright.kernels.cuda_copies import to_device
from shardwright.kernels.triton_modules import triton_module

WORD_BYTES = 4


@dataclass(frozen=True, slots=True)
class SwappedTable:
    """A table: the same tensors of its rows in host memory and on lines; `row_of_L`: the row of each line."""

    parts_E: Sequence[Tensor]
    parts_L: Sequence[Tensor]
    row_of_L: Tensor


class RowSwaps:
    """Moves rows of these tables, which have equal numbers of parts. All tensors stay where they are."""

    def __init__(self, tables: Sequence[SwappedTable]) -> None:
        self._tables = tables
        self._device = tables[0].row_of_L.device
        parts = [pair for table in tables for pair in zip(table.parts_E, table.parts_L, strict=True)]
        for rows_E, lines_L in parts:
            if rows_E.shape[1:] != lines_L.shape[1:] or rows_E.dtype != lines_L.dtype:
                raise UserError(f"rows {rows_E.dtype} {tuple(rows_E.shape)}, lines {lines_L.dtype} {lines_L.shape}")
            if not rows_E.is_contiguous() or not lines_L.is_contiguous():
                raise UserError("rows and lines must be contiguous")
        sizes = [_row_bytes(rows_E) for rows_E, _ in parts]
        self._word_bytes = WORD_BYTES if all(size % WORD_BYTES == 0 for size in sizes) else 2
        self._max_words = max(size // self._word_bytes for size in sizes)
        structs = [
            (rows_E.data_ptr(), lines_L.data_ptr(), size // self._word_bytes)
            for (rows_E, lines_L), size in zip(parts, sizes, strict=True)
        ]
        self._structs = to_device(torch.tensor(structs), self._device)
        self._numbers = to_device(torch.tensor([table.row_of_L.data_ptr() for table in tables]), self._device)
        if self._device.type == "cuda":
            for rows_E, _ in parts:
                lock_pages(rows_E)

    def run(self, moves: Tensor) -> None:
        """Issue these moves (`MOVE_FIELDS` of kernels/cache_index.py) on the current stream.

        No row may be both new and old."""
        if not len(moves):
            return
        triton = triton_module("row_swaps_triton", self._numbers)
        if triton is None:
            self.run_in_torch(moves)
        else:
            self.launch(triton, moves)

    def launch(self, triton: Any, moves: Tensor) -> None:
        num_parts = len(self._tables[0].parts_E)
        shape = (self._word_bytes, num_parts, self._max_words)
        triton.launch(self._structs, self._numbers, to_device(moves, self._device), *shape)

    def run_in_torch(self, moves: Tensor) -> None:
        for number, table in enumerate(self._tables):
            _, lines_M, new_M, old_M = moves[moves[:, 0] == number].T
            has_new, has_old = new_M >= 0, old_M >= 0
            for rows_E, lines_L in zip(table.parts_E, table.parts_L, strict=True):
                new = rows_E[new_M[has_new]].to(self._device)
                rows_E[old_M[has_old]] = lines_L[lines_M[has_old].to(self._device)].to(rows_E.device)
                lines_L[lines_M[has_new].to(self._device)] = new
            table.row_of_L[lines_M[has_new].to(self._device)] = new_M[has_new].to(self._device)


def lock_pages(x: Tensor) -> None:
    """Lock a tensor's memory, so that a GPU can read and write it, until this tensor object ends."""
    cudart: Any = torch.cuda.cudart()
    storage = x.untyped_storage()
    if not storage.nbytes() or x.is_pinned():
        return
    failed = cudart.cudaHostRegister(storage.data_ptr(), storage.nbytes(), 0)
    if int(failed):
        raise UserError(
            f"{storage.nbytes():,} bytes of host memory cannot be locked for the GPU (CUDA error {int(failed)}): the "
            "system may limit locked memory (ulimit -l)"
        )
    weakref.finalize(x, cudart.cudaHostUnregister, storage.data_ptr()).atexit = False


def _row_bytes(part: Tensor) -> int:
    return part[:1].numel() * part.element_size()

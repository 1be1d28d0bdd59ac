"""The rows of a table shard on lines of a cache, in front of a slower store.

A line is a row and its optimizer state: one row of each of several tensors. `place` finds lines for the rows of a
batch and copies what is missing in a thread of its own; until `release`, these lines stay theirs. So copies for the
next batch may run beside the update of this one: they read only lines that no batch in flight uses, and write only
lines of rows that were not there.

Shape legend: U distinct rows of a batch, L lines, E rows of the shard, R rows of a chunk, C columns.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from functools import partial
from math import prod
from typing import TypeVar

import torch
from torch import Tensor

from shardwright.comm.pending import Pending, ready
from shardwright.embeddings.store import DiskSnapshot, DiskStore
from shardwright.kernels import cache_index
from shardwright.kernels.cache_index import CacheIndex, PlacedRows
from shardwright.spec.row_cache import HALF_LIFE_BATCHES

T = TypeVar("T")
CHUNK_BYTES = 16 << 20  # of rows that are copied at a time when all are


class CachedRows:
    """`parts_L`: the lines, of each tensor of a row. `row_of_L`: the row of each line."""

    def __init__(self, parts_L: Sequence[Tensor], store: DiskStore, copier: ThreadPoolExecutor) -> None:
        self.parts_L, self.store, self._copier = parts_L, store, copier
        self.index = CacheIndex(len(parts_L[0]), HALF_LIFE_BATCHES)
        self.row_of_L = torch.full((len(parts_L[0]),), -1)
        self._last: Future[None] | None = None
        self._failure: Exception | None = None

    def place(self, rows_U: Tensor) -> tuple[Tensor, Pending[None]]:
        """The lines of these rows, and their copies. After an error all calls raise it: lines may lack their rows."""
        ((lines_U, copies),) = place_many([self], rows_U, [len(rows_U)])
        return lines_U, copies

    def start_copies(self, placed: PlacedRows, rows_U: Tensor) -> Pending[None]:
        """Copy lines that were written to the store, and missing rows to their lines."""
        missing_U = placed.missing_U
        if not len(missing_U) and not len(placed.written_lines):
            return ready(None) if self._last is None else Pending(self._last.result)
        self.row_of_L[placed.lines_U[missing_U]] = rows_U[missing_U]
        copies = self._last = self._copier.submit(self._copy, placed, rows_U)
        return Pending(copies.result)

    def release(self, lines_U: Tensor, *, written: bool) -> None:
        self.index.release(lines_U, written=written)

    def find(self, rows_U: Tensor) -> Tensor:
        return self.index.find(rows_U)

    def rows_on(self, lines_U: Tensor) -> Tensor:
        return self.row_of_L[lines_U]

    def write_back(self) -> None:
        """Copy all lines that were written to the store."""
        self._wait()
        lines, rows = self.index.written_lines()
        self.keep_failure(lambda: self._copier.submit(self.store.write, rows, lines, self.parts_L).result())
        self.index.written_lines(clear=True)

    def read_all(self, part: int) -> Tensor:
        """(E, ...) One tensor of all rows."""
        like = self.store.empty_parts(0)[part]
        found = like.new_empty(self.store.num_rows, *like.shape[1:])
        rows_of_chunk = max(1, CHUNK_BYTES // max(1, found[:1].nbytes))
        with closing(self.stored_parts()[part].snapshot()) as stored:
            for first in range(0, len(found), rows_of_chunk):
                chunk = found[first : first + rows_of_chunk]
                chunk.copy_(stored.read(first, len(chunk)).view(chunk.shape))
        return found

    def read_rows(self, rows_U: Tensor) -> list[Tensor]:
        """Rows as they are now, of each tensor."""
        self.write_back()
        parts = self.store.empty_parts(len(rows_U))
        self.store.read(rows_U, torch.arange(len(rows_U)), parts)
        return parts

    def write_rows(self, part: int, rows_U: Tensor, values_U: Tensor) -> None:
        """Replace one tensor of some rows, in the store and in the cache."""
        parts = self.read_rows(rows_U)
        parts[part].copy_(values_U)
        self.store.write(rows_U, torch.arange(len(rows_U)), parts)
        lines_U = self.find(rows_U)
        here = lines_U >= 0
        self.parts_L[part][lines_U[here]] = parts[part][here].to(self.parts_L[part].dtype)

    def stored_parts(self) -> list["StoredPart"]:
        """Each tensor of all rows."""
        shared = SharedSnapshot(self)
        return [StoredPart(self, number, shared) for number in range(len(self.parts_L))]

    def _wait(self) -> None:
        if self._last is not None:
            self.keep_failure(self._last.result)

    def keep_failure(self, run: Callable[[], T]) -> T:
        if self._failure is not None:
            raise self._failure
        try:
            return run()
        except Exception as error:
            self._failure = error
            raise

    def _copy(self, placed: PlacedRows, rows_U: Tensor) -> None:
        self.keep_failure(lambda: self._copy_rows(placed, rows_U))

    def _copy_rows(self, placed: PlacedRows, rows_U: Tensor) -> None:
        with torch.no_grad():
            if len(placed.written_lines):
                self.store.write(placed.written_rows, placed.written_lines, self.parts_L)
            if len(placed.missing_U):
                self.store.read(rows_U[placed.missing_U], placed.lines_U[placed.missing_U], self.parts_L)


def place_many(
    caches: Sequence[CachedRows], rows_U: Tensor, counts: Sequence[int]
) -> list[tuple[Tensor, Pending[None]]]:
    """`place` in several caches; `rows_U` has `counts` rows of each, one after the other."""

    def place() -> list[PlacedRows]:
        return cache_index.place_many([cached.index for cached in caches], rows_U, counts)

    for cached in caches:  # an error is kept by all: those before it have placed their rows
        place = partial(cached.keep_failure, place)
    placed = place()
    parts = zip(caches, placed, rows_U.split(list(counts)), strict=True)
    return [(own.lines_U, cached.start_copies(own, rows)) for cached, own, rows in parts]


class SharedSnapshot:
    """One snapshot of a store for all tensors of its rows; ends when each user has closed it."""

    def __init__(self, cached: CachedRows) -> None:
        self._cached, self._stack, self._num_users = cached, ExitStack(), 0
        self._snapshot: DiskSnapshot | None = None

    def open(self) -> None:
        if self._snapshot is None:
            self._cached.write_back()
            self._snapshot = self._stack.enter_context(self._cached.store.snapshot())
        self._num_users += 1

    def close(self) -> None:
        self._num_users -= 1
        if not self._num_users:
            self._snapshot = None
            self._stack.close()

    def read(self, first: int, num: int) -> list[Tensor]:
        assert self._snapshot is not None
        parts = self._cached.store.empty_parts(num)
        self._snapshot.read(first, parts)
        return parts


class StoredPart:
    """One tensor of the rows of a shard, as a rectangle's `StoredRows`."""

    def __init__(self, cached: CachedRows, part: int, shared: SharedSnapshot, *, is_open: bool = False) -> None:
        self._cached, self._part, self._shared, self._is_open = cached, part, shared, is_open

    @property
    def dtype(self) -> torch.dtype:
        return self._cached.store.empty_parts(0)[self._part].dtype

    def read(self, first: int, num: int) -> Tensor:
        if self._is_open:
            parts = self._shared.read(first, num)
        else:
            parts = self._cached.read_rows(torch.arange(first, first + num))
        return self._as_matrix(parts)

    def select(self, indices: Tensor) -> Tensor:
        return self._as_matrix(self._cached.read_rows(indices))

    def write(self, first: int, values_RC: Tensor) -> None:
        shape = (len(values_RC), *self._cached.parts_L[self._part].shape[1:])
        self._cached.write_rows(self._part, torch.arange(first, first + len(values_RC)), values_RC.view(shape))

    def _as_matrix(self, parts: Sequence[Tensor]) -> Tensor:
        part = parts[self._part]
        return part.view(len(part), prod(part.shape[1:]))

    def snapshot(self) -> "StoredPart":
        self._shared.open()
        return StoredPart(self._cached, self._part, self._shared, is_open=True)

    def close(self) -> None:
        self._shared.close()

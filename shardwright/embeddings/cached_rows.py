"""The rows of a table shard on lines of a cache, in front of a slower store.

A line is a row and its optimizer state: one row of each of several tensors. `place` finds lines for the rows of a
batch and copies what is missing in a thread of its own; until `release`, these lines stay theirs. So copies for the
next batch may run beside the update of this one: they read only lines that no batch in flight uses, and write only
lines of rows that were not there.

Shape legend: U distinct rows of a batch, L lines, E rows of the shard, R rows of a chunk, C columns.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from functools import partial
from math import prod
from typing import TypeVar

import torch
from torch import Tensor

from shardwright.comm.pending import Pending, ready
from shardwright.embeddings.store import DiskSnapshot, DiskStore, row_bytes_of
from shardwright.kernels import cache_index
from shardwright.kernels.cache_index import CacheIndex, PlacedRows
from shardwright.rectangle import IndexRange
from shardwright.spec.row_cache import HALF_LIFE_BATCHES

T = TypeVar("T")
CHUNK_BYTES = 16 << 20  # of whole rows that are copied at a time when many are


class CachedRows:
    """`parts_L`: the lines, of each tensor of a row. `row_of_L`: the row of each line."""

    def __init__(self, parts_L: Sequence[Tensor], store: DiskStore, copier: ThreadPoolExecutor, table: str) -> None:
        self.parts_L, self.store, self._copier = parts_L, store, copier
        self.index = CacheIndex(len(parts_L[0]), HALF_LIFE_BATCHES, table)
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
        if not self.index.may_be_written:
            return
        lines, rows = self.index.written_lines()
        self.keep_failure(lambda: self._copier.submit(self.store.write, rows, lines, self.parts_L).result())
        self.index.written_lines(clear=True)

    def read_all(self, part: int) -> Tensor:
        """(E, ...) One tensor of all rows."""
        with closing(self.stored_parts()[part].snapshot()) as stored:
            return stored.read(0, self.store.num_rows).view(-1, *self.parts_L[part].shape[1:])

    def read_rows(self, part: int, rows_U: Tensor) -> Tensor:
        """One tensor of rows as they are now."""
        self.write_back()
        values_U = self._empty(part, len(rows_U))
        for values, rows in zip(values_U.split(self.chunk_rows), rows_U.split(self.chunk_rows), strict=True):
            values.copy_(self._read(rows)[part])
        return values_U

    def write_rows(self, part: int, rows_U: Tensor, columns: IndexRange, values_UC: Tensor) -> None:
        """Replace some columns of one tensor of some rows, in the store and in the cache."""
        self.write_back()
        for values_RC, rows in zip(values_UC.split(self.chunk_rows), rows_U.split(self.chunk_rows), strict=True):
            parts, lines = self._read(rows), self.find(rows)
            _columns_of(parts[part], columns).copy_(values_RC)
            self.store.write(rows, torch.arange(len(rows)), parts)
            here = lines >= 0
            self.parts_L[part][lines[here]] = parts[part][here].to(self.parts_L[part].dtype)

    def nonfinite_row(self) -> int | None:
        """A row whose weight is not finite, None if there is none."""
        self.write_back()
        return min(self.store.nonfinite_rows, default=None)

    @property
    def chunk_rows(self) -> int:
        """How many whole rows are copied at a time when many are."""
        return max(1, CHUNK_BYTES // sum(map(row_bytes_of, self.store.empty_parts(0))))

    def _read(self, rows_U: Tensor) -> list[Tensor]:
        parts = self.store.empty_parts(len(rows_U))
        self.store.read(rows_U, torch.arange(len(rows_U)), parts)
        return parts

    def _empty(self, part: int, num: int) -> Tensor:
        like = self.store.empty_parts(0)[part]
        return like.new_empty(num, *like.shape[1:])

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

    def read(self, first: int, num: int) -> Iterator[list[Tensor]]:
        """Rows from `first` on, some at a time."""
        assert self._snapshot is not None
        step = self._cached.chunk_rows
        for start in range(first, first + num, step):
            parts = self._cached.store.empty_parts(min(step, first + num - start))
            self._snapshot.read(start, parts)
            yield parts


class StoredPart:
    """One tensor of the rows of a shard, as a rectangle's `StoredRows`."""

    def __init__(self, cached: CachedRows, part: int, shared: SharedSnapshot, *, is_open: bool = False) -> None:
        self._cached, self._part, self._shared, self._is_open = cached, part, shared, is_open

    @property
    def dtype(self) -> torch.dtype:
        return self._cached.store.empty_parts(0)[self._part].dtype

    def read(self, first: int, num: int) -> Tensor:
        if not self._is_open:
            return self.select(torch.arange(first, first + num))
        chunks = [parts[self._part] for parts in self._shared.read(first, num)]
        return _as_matrix(torch.cat(chunks)) if chunks else self.select(torch.arange(0))

    def select(self, indices: Tensor) -> Tensor:
        return _as_matrix(self._cached.read_rows(self._part, indices))

    def write(self, indices: Tensor, columns: IndexRange, values_RC: Tensor) -> None:
        self._cached.write_rows(self._part, indices, columns, values_RC)

    def nonfinite_row(self) -> int | None:
        return self._cached.nonfinite_row()

    def snapshot(self) -> "StoredPart":
        self._shared.open()
        return StoredPart(self._cached, self._part, self._shared, is_open=True)

    def close(self) -> None:
        self._shared.close()


def _as_matrix(part_R: Tensor) -> Tensor:
    return part_R.view(len(part_R), prod(part_R.shape[1:]))


def _columns_of(part_R: Tensor, columns: IndexRange) -> Tensor:
    return _as_matrix(part_R)[:, slice(*columns)]

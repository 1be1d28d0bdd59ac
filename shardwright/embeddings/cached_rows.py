"""The rows of a table shard on lines of a cache, in front of a slower store.

A line is a row and its optimizer state: one row of each of several tensors. A thread places the rows of a batch on
lines and copies what is missing (row_placer.py); until they are released, these lines stay theirs. So copies for the
next batch may run beside the update of this one: they read only lines that no batch in flight uses, and write only
lines of rows that were not there.

Shape legend: U distinct rows of a batch, M moves, L lines, E rows of the shard, R rows of a chunk, C columns.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from math import prod

import torch
from torch import Tensor

from shardwright.embeddings.row_threads import RowThreads
from shardwright.embeddings.store import RowStore, StoreSnapshot, row_bytes_of
from shardwright.kernels.cache_index import CacheIndex
from shardwright.rectangle import IndexRange
from shardwright.spec.row_cache import HALF_LIFE_BATCHES

CHUNK_BYTES = 16 << 20  # of whole rows that are copied at a time when many are


class CachedRows:
    """`parts_L`: the lines, of each tensor of a row. `row_of_L`: the row of each line."""

    def __init__(self, parts_L: Sequence[Tensor], store: RowStore, threads: RowThreads, table: str) -> None:
        self.parts_L, self.store, self._threads = parts_L, store, threads
        self.index = CacheIndex(len(parts_L[0]), HALF_LIFE_BATCHES, table, adapts=True)
        self.row_of_L = torch.full((len(parts_L[0]),), -1)

    def find(self, rows_U: Tensor) -> Tensor:
        return self.index.find(rows_U)

    def rows_on(self, lines_U: Tensor) -> Tensor:
        return self.row_of_L[lines_U]

    def write_back(self) -> None:
        """Copy all lines that were written to the store."""
        self._threads.run_alone(self._write_back)

    def _write_back(self) -> None:
        if not self.index.may_be_written:
            return
        lines, rows = self.index.written_lines()
        self.store.write(rows, lines, self.parts_L)
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


@torch.no_grad()
def copy_moves(caches: Mapping[int, CachedRows], moves: Tensor) -> None:
    """Copy lines that were written to their stores, then missing rows to their lines; `moves` as in `BatchLines`."""
    table_M, line_M, new_M, old_M = moves[moves[:, 0].argsort(stable=True)].T.contiguous()
    written, missing = old_M >= 0, new_M >= 0
    for number, lines, rows in _by_table(table_M[written], line_M[written], old_M[written]):
        caches[number].store.write(rows, lines, caches[number].parts_L)
    line_M, new_M = line_M[missing], new_M[missing]
    parts = _by_table(table_M[missing], line_M, new_M)
    for number, lines, rows in parts:
        caches[number].row_of_L[lines] = rows
    stores = [caches[number].store for number, _, _ in parts]
    counts = [len(rows) for _, _, rows in parts]
    if stores:
        stores[0].readers.read_many(stores, new_M, line_M, counts, [caches[number].parts_L for number, _, _ in parts])


def _by_table(table_M: Tensor, line_M: Tensor, row_M: Tensor) -> list[tuple[int, Tensor, Tensor]]:
    """The lines and rows of each table of which there are any; tables are in order."""
    tables, counts = table_M.unique_consecutive(return_counts=True)
    sizes = counts.tolist()
    return [*zip(tables.tolist(), line_M.split(sizes), row_M.split(sizes), strict=True)]


class SharedSnapshot:
    """One snapshot of a store for all tensors of its rows; ends when each user has closed it."""

    def __init__(self, cached: CachedRows) -> None:
        self._cached, self._stack, self._num_users = cached, ExitStack(), 0
        self._snapshot: StoreSnapshot | None = None

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

"""Rows of a table with a cache that have no line, and older values of those that have one: here, on disk.

A row is a weight and its optimizer state: a row of each of several tensors, the lines of the cache. A store copies rows
from and to lines.

Shape legend: U distinct rows, L lines, E rows of a table, D columns.
"""

import ctypes
import os
import resource
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from shardwright.errors import UserError
from shardwright.kernels.rounding import row_keys, stochastic_round
from shardwright.library import native_library
from shardwright.spec.row_cache import IO_THREADS, READS_IN_FLIGHT, RECORD_HEADER_BYTES

SEGMENT_BYTES = 16 << 20
DEAD_SHARE = 0.5  # of the records of a segment that is compacted
COMPACTED_SEGMENTS = 2  # at most, for each segment that is written
MAX_SEGMENTS = 256  # of live rows; each is an open file
MAX_ROWS = 1 << 30  # of a store: its index has 32 bits for records, some of them out of date
FillRows = Callable[[Tensor, Sequence[Tensor]], None]  # writes the initial values of rows to these tensors


@dataclass(frozen=True, slots=True)
class DiskNumbers:
    """Bytes since the store began; records that are in use, and that later ones replaced. `by_ring`: 1 if pages are
    read through io_uring, 0 if by threads."""

    bytes_read: int
    bytes_written: int
    live_records: int
    dead_records: int
    by_ring: int


class StoreNumbers(Protocol):
    """Bytes since the store began."""

    @property
    def bytes_read(self) -> int: ...
    @property
    def bytes_written(self) -> int: ...


class StoreSnapshot(Protocol):
    def read(self, first: int, parts_U: Sequence[Tensor]) -> None:
        """Rows from `first` on, as many as the tensors have."""
        ...


class RowStore(Protocol):
    """`num_rows` rows. `read` and `write` must not overlap each other; a snapshot may be read beside them.
    `nonfinite_rows`: those whose weight was not finite when it was written."""

    num_rows: int
    nonfinite_rows: set[int]

    @property
    def readers(self) -> "StoreReaders": ...
    @property
    def numbers(self) -> StoreNumbers: ...

    def empty_parts(self, num: int) -> list[Tensor]:
        """Tensors for so many rows as they are stored."""
        ...

    def read(self, rows_U: Tensor, lines_U: Tensor, parts_L: Sequence[Tensor]) -> None:
        """Copy rows to lines; rows that were never written get their initial values."""
        ...

    def write(self, rows_U: Tensor, lines_U: Tensor, parts_L: Sequence[Tensor]) -> None:
        """Copy lines to rows."""
        ...

    def snapshot(self) -> AbstractContextManager[StoreSnapshot]:
        """The rows as they are now, for as long as the context lasts."""
        ...


class StoreReaders(Protocol):
    """Reads rows of several stores of a rank at once."""

    def read_many(
        self,
        stores: Sequence[Any],
        rows_U: Tensor,
        lines_U: Tensor,
        counts: Sequence[int],
        parts_L: Sequence[Sequence[Tensor]],
    ) -> None:
        """Copy rows to lines, as `read` of several stores, so many rows of each."""
        ...


class PageReaders:
    """Reads of pages from disk, many in flight: of all stores of a rank, since a disk has one queue."""

    def __init__(self) -> None:
        native = native_library()
        if native is None:
            raise UserError("tables on disk need the compiled kernels, which this installation does not have")
        self.native, self.handle = native, native.shardwright_page_readers_new(READS_IN_FLIGHT, IO_THREADS)
        weakref.finalize(self, native.shardwright_page_readers_free, self.handle).atexit = False

    def read_many(
        self,
        stores: Sequence["DiskStore"],
        rows_U: Tensor,
        lines_U: Tensor,
        counts: Sequence[int],
        parts_L: Sequence[Sequence[Tensor]],
    ) -> None:
        """Copy rows to lines, as `read` of several stores, so many rows of each; the disk gets all reads at once."""
        rows, lines = rows_U.split(list(counts)), lines_U.split(list(counts))
        is_rounded = [store.is_rounded(own) for store, own in zip(stores, parts_L, strict=True)]
        targets = [
            store.empty_parts(count) if rounded else own
            for store, own, count, rounded in zip(stores, parts_L, counts, is_rounded, strict=True)
        ]
        at = [torch.arange(len(own)) if rounded else own for own, rounded in zip(lines, is_rounded, strict=True)]
        all_rows, all_lines, never_U = rows_U.contiguous(), torch.cat(at), torch.empty_like(rows_U)
        logs, sizes, num_never = torch.tensor([[s.handle for s in stores], counts, [0] * len(stores)])
        parts = np.concatenate([_part_table(own) for own in targets])
        pointers = (sizes.data_ptr(), all_rows.data_ptr(), all_lines.data_ptr(), parts.ctypes.data)
        results = never_U.data_ptr(), num_never.data_ptr()
        failed = self.native.shardwright_row_logs_read(
            logs.data_ptr(), len(stores), *pointers, len(parts) // len(stores), *results
        )
        if failed >= 0:
            stores[failed].raise_error()
        never = never_U.split(list(counts))
        for number, (store, target) in enumerate(zip(stores, targets, strict=True)):
            unwritten = never[number][: int(num_never[number])]
            fill_lines(store.fill, rows[number][unwritten], at[number][unwritten], target)
            for part_L, part_U in zip(parts_L[number], target, strict=True) if is_rounded[number] else ():
                part_L[lines[number]] = part_U.to(part_L.dtype)


class DiskStore:
    """A `RowStore` in files of a folder of their own (csrc/row_files.h).

    The files are this process's: a store begins empty, and removes them at its end.
    """

    def __init__(
        self,
        folder: Path,
        num_rows: int,
        parts: Sequence[Tensor],
        fill: FillRows,
        readers: PageReaders,
        *,
        direct: bool = True,
        rounding_key: int = 0,
    ) -> None:
        """`parts`: tensors with the dtypes and row shapes of a stored row. `direct`: bypass the page cache.
        `rounding_key`: of the stochastic rounding of weights that are wider on lines, whenever a line is written."""
        native = readers.native
        folder.mkdir(parents=True, exist_ok=True)
        if next(folder.iterdir(), None) is not None:
            raise UserError(f"{folder} is not empty: tables on disk need a folder of their own")
        if direct and not supports_direct(folder):
            raise UserError(
                f"the file system of {folder} does not read past the page cache (direct input and output), or is in "
                "memory: set TMPDIR to a folder on a disk"
            )
        if num_rows > MAX_ROWS:
            raise UserError(f"a shard of {num_rows:,} rows on disk; at most {MAX_ROWS:,}: shard the table by rows")
        self.folder, self.num_rows, self._native, self.fill = folder, num_rows, native, fill
        self.readers = readers
        self._parts = [part[:0] for part in parts]
        self._rounding_key, self._num_rounded = rounding_key, 0
        self.nonfinite_rows: set[int] = set()  # rows whose weight was not finite when it was written
        row_bytes = sum(row_bytes_of(part) for part in parts)
        self._segment_bytes = max(SEGMENT_BYTES, num_rows * row_bytes // MAX_SEGMENTS)
        self._record_bytes = row_bytes + RECORD_HEADER_BYTES
        _raise_file_limit()
        self._log = native.shardwright_row_log_new(
            os.fsencode(folder), num_rows, row_bytes, self._segment_bytes, readers.handle, direct
        )
        self._close = weakref.finalize(self, _close, native, self._log, folder)
        self._close.atexit = False  # a generator that is closed later may still use it

    def empty_parts(self, num: int) -> list[Tensor]:
        """Tensors for so many rows as they are stored."""
        return [part.new_empty(num, *part.shape[1:]) for part in self._parts]

    def read(self, rows_U: Tensor, lines_U: Tensor, parts_L: Sequence[Tensor]) -> None:
        """Copy rows to lines; rows that were never written get their initial values."""
        self.readers.read_many([self], rows_U, lines_U, [len(rows_U)], [parts_L])

    def write(self, rows_U: Tensor, lines_U: Tensor, parts_L: Sequence[Tensor]) -> None:
        """Copy lines to rows."""
        if self.is_rounded(parts_L):
            self._num_rounded += 1
            keys_U = row_keys(self._rounding_key, self._num_rounded, rows_U)
            parts_L = [part_L[lines_U] for part_L in parts_L]
            parts_L[0], lines_U = stochastic_round(parts_L[0], self._parts[0].dtype, keys_U), torch.arange(len(rows_U))
        note_nonfinite(self.nonfinite_rows, rows_U, parts_L[0][lines_U])
        rows, lines, parts, native = rows_U.contiguous(), lines_U.contiguous(), _part_table(parts_L), self._native
        pointers = rows.data_ptr(), lines.data_ptr(), len(rows)
        self._raise_if_failed(native.shardwright_row_log_write(self._log, *pointers, parts.ctypes.data, len(parts)) - 1)
        num_segments = COMPACTED_SEGMENTS * (1 + len(rows) * self._record_bytes // self._segment_bytes)
        self._raise_if_failed(native.shardwright_row_log_compact(self._log, DEAD_SHARE, num_segments) - 1)

    @contextmanager
    def snapshot(self) -> Iterator["DiskSnapshot"]:
        """The rows as they are now, for as long as the context lasts."""
        number = self._raise_if_failed(self._native.shardwright_row_log_snapshot(self._log))
        try:
            yield DiskSnapshot(self, number)
        finally:
            self._native.shardwright_row_log_release(self._log, number)

    def read_snapshot(self, number: int, first: int, parts_U: Sequence[Tensor]) -> None:
        """Rows from `first` on, as many as the tensors have."""
        never, parts = torch.empty(len(parts_U[0]), dtype=torch.int64), _part_table(parts_U)
        call = self._native.shardwright_row_log_read_snapshot
        arguments = (number, first, len(never), parts.ctypes.data, len(parts), never.data_ptr())
        num = self._raise_if_failed(call(self._log, *arguments))
        fill_lines(self.fill, first + never[:num], never[:num], parts_U)

    @property
    def numbers(self) -> DiskNumbers:
        numbers = np.zeros(5, np.int64)
        self._native.shardwright_row_log_numbers(self._log, numbers.ctypes.data)
        return DiskNumbers(*numbers.tolist())

    def close(self) -> None:
        """Remove the files."""
        self._close()

    @property
    def handle(self) -> int:
        return self._log

    def is_rounded(self, parts_L: Sequence[Tensor]) -> bool:
        """Whether weights are rounded when these lines are written."""
        return parts_L[0].dtype != self._parts[0].dtype

    def raise_error(self) -> None:
        """Raise the first error."""
        self._raise_if_failed(-1)

    def _raise_if_failed(self, result: int) -> int:
        if result < 0:
            text = ctypes.create_string_buffer(1024)
            self._native.shardwright_row_log_error(self._log, text, len(text))
            raise UserError(f"tables on disk: {text.value.decode()}; the last checkpoint is not affected")
        return result


def fill_lines(fill: FillRows, rows_U: Tensor, lines_U: Tensor, parts_L: Sequence[Tensor]) -> None:
    """Write the initial values of rows to lines."""
    if not len(rows_U):
        return
    parts_U = [part_L.new_empty(len(rows_U), *part_L.shape[1:]) for part_L in parts_L]
    fill(rows_U, parts_U)
    for part_L, part_U in zip(parts_L, parts_U, strict=True):
        part_L[lines_U] = part_U


def note_nonfinite(nonfinite_rows: set[int], rows_U: Tensor, weight_UD: Tensor) -> None:
    """Update the set of rows whose weight is not finite with what is written."""
    is_finite_U = weight_UD.sum(1, dtype=torch.float64).isfinite()
    if nonfinite_rows:
        nonfinite_rows.difference_update(rows_U.tolist())
    if not is_finite_U.all():
        nonfinite_rows.update(rows_U[~is_finite_U].tolist())


@dataclass(frozen=True, slots=True)
class DiskSnapshot:
    store: DiskStore
    number: int

    def read(self, first: int, parts_U: Sequence[Tensor]) -> None:
        """Rows from `first` on, as many as the tensors have."""
        self.store.read_snapshot(self.number, first, parts_U)


def row_bytes_of(part: Tensor) -> int:
    return part[:1].numel() * part.element_size() if len(part) else part.new_empty(1, *part.shape[1:]).nbytes


def _raise_file_limit() -> None:
    """Allow as many open files as the system does."""
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit != most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def supports_direct(folder: Path) -> bool:
    """Whether files of a folder are on a disk, and can be read past the page cache."""
    if _file_system(folder) in ("tmpfs", "ramfs"):
        return False
    path = folder / "direct"
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT))
    except OSError:
        return False
    finally:
        path.unlink(missing_ok=True)
    return True


def _file_system(folder: Path) -> str:
    """The type of the file system that a folder is on."""
    resolved, found = folder.resolve(), ("", "")
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        mount, kind = line.split()[4], line.partition(" - ")[2].split()[0]
        if resolved.is_relative_to(mount) and len(mount) >= len(found[0]):
            found = mount, kind
    return found[1]


def _part_table(parts: Sequence[Tensor]) -> np.ndarray:
    """(parts, 2) The address of each tensor, and the bytes of a row of it."""
    for part in parts:
        if not part.is_contiguous():
            raise UserError(f"lines of shape {tuple(part.shape)} are not contiguous")
    return np.array([(part.data_ptr(), row_bytes_of(part)) for part in parts], np.int64)


def _close(native: Any, log: int, folder: Path) -> None:
    native.shardwright_row_log_free(log)
    for path in folder.glob("segment-*"):
        path.unlink(missing_ok=True)

"""Journal of a growing directory: its files in order of their names, and the caches of their rows.

One line of JSON per file. The first process of the host that sees a new file converts it to a cache and then appends
its line under a lock, so that sample numbers stay valid after the file is deleted. Other processes only read the
journal. An incomplete last line, as after kill -9, is ignored and overwritten. Must not import torch.
"""

import fcntl
import json
import math
import os
import shutil
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from hashlib import sha256
from itertools import takewhile
from pathlib import Path
from typing import IO

import numpy as np

from shardwright.data.logs.convert import ROWS_FILE, ConvertedLog, convert
from shardwright.data.logs.parquet import ParquetLog
from shardwright.data.logs.schema import Schema
from shardwright.data.logs.text import EmptyFile, TextFile
from shardwright.data.sources.source import Pause
from shardwright.errors import UserError
from shardwright.spec import files

JOURNAL_FILE, LOCK_FILE, CACHES_DIRECTORY = "journal.jsonl", "lock", "files"
POLL_SECONDS = 0.5  # time between two scans of the directory
WAIT_NOTICE_SECONDS = 5.0  # waiting time before a notice is printed
PINNED_ROWS = 1 << 20  # the caches of the first rows are never dropped: a resumed run reads its first batches again
NUM_RECENT_FILES = 8  # each scan checks this many files for changes; all others are checked every FULL_CHECK_SECONDS
FULL_CHECK_SECONDS = 60.0
LISTING_MAX_AGE_SECONDS = 10.0  # a directory listing is reused for at most this long
SETTLE_SECONDS = 2.0  # age of a directory's mtime from which the next change is sure to alter it, however coarse


@dataclass(frozen=True, slots=True)
class FileEntry:
    """Journal entry of a file that was read."""

    name: str
    size: int
    mtime_ns: int
    rows: int
    cache: str  # name of its folder in `Journal.caches`; empty if the file has no rows
    malformed: int = 0  # number of rows skipped


class Journal:
    """The files of a directory that were read, as known to this process."""

    def __init__(self, directory: Path, folder: Path, *, strict: bool) -> None:
        self.entries: list[FileEntry] = []
        self.offsets = np.zeros(1, np.int64)  # the first sample of each file, followed by the number of samples
        self.digests = [""]  # digests[n]: of the names and row counts of the first n files
        self.caches = folder / CACHES_DIRECTORY
        self._directory, self._folder, self._strict = directory, folder, strict
        self._names: set[str] = set()
        self._read_bytes, self._inode = 0, 0
        self._listing = _Listing(directory)
        self._last_full_check = -math.inf  # when all read files that still exist were last checked for changes
        self._pending: deque[str] = deque()  # files confirmed by two scans, but not read yet
        self._pending_since = 0.0
        self._waiting_since: float | None = None  # start of the wait for a new file
        self._has_notified = False

    @property
    def num_samples(self) -> int:
        return int(self.offsets[-1])

    @property
    def last_file(self) -> str:
        return self.entries[-1].name if self.entries else ""

    def wait(self, num: int, schema: Schema, pause: Pause) -> None:
        """Wait until samples 0 to num - 1 exist, calling pause(seconds) between scans."""
        while self.num_samples < num:
            if not self._read_next_file(schema, pause):
                self._print_wait_notice(num)
                pause(POLL_SECONDS)

    def catch_up(self, schema: Schema) -> bool:
        """Add new files to the journal, waiting if another process is reading a file; False if there are none."""
        while not (has_grown := self._read_next_file(schema, lambda _: None)) and self.scan_directory():
            time.sleep(POLL_SECONDS)  # another process is reading a file
        return has_grown

    def refresh(self) -> bool:
        """Read the lines appended to the journal since the last call; returns whether there were any."""
        path = self._folder / JOURNAL_FILE
        try:
            with path.open("rb") as file:
                self._check_not_replaced(file)
                file.seek(self._read_bytes)
                data = file.read()
        except FileNotFoundError:
            self._check_not_replaced(None)
            return False
        complete_lines = data[: data.rfind(b"\n") + 1]
        if not complete_lines:
            return False
        new_entries = [_parse_entry(line, path) for line in complete_lines.splitlines()]
        self._read_bytes += len(complete_lines)
        self.entries += new_entries
        self._names.update(entry.name for entry in new_entries)
        for entry in new_entries:
            self.digests.append(sha256(f"{self.digests[-1]}{entry.name}/{entry.rows}".encode()).hexdigest()[:16])
        ends = np.cumsum([entry.rows for entry in new_entries], dtype=np.int64)
        self.offsets = np.concatenate([self.offsets, self.offsets[-1] + ends])
        self._waiting_since, self._has_notified = None, False
        return True

    def scan_directory(self, *, force: bool = False) -> set[str]:
        """List unread files; raises UserError if a read file changed or sorts after an unread file."""
        names = self._listing.names(force=force)
        self._check_unchanged(names)
        new = names - self._names
        if (first := min(new, default=self.last_file)) < self.last_file:
            raise UserError(
                f"{self._directory / first}: appeared after {self.last_file} had been read, but its name sorts before "
                "it, and files are read in order of their names; rename it so that it sorts after it"
            )
        return new

    @contextmanager
    def try_lock(self) -> Iterator[bool]:
        """Try to lock the journal for writing within the block; yields False if another process holds it."""
        try:
            file = (self._folder / LOCK_FILE).open("a")
        except OSError as error:
            raise UserError(f"{self._folder}: cannot be written ({error.strerror}); was it removed?") from None
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                is_locked = True
            except BlockingIOError:
                is_locked = False
            except OSError as error:
                raise UserError(
                    f"{file.name}: cannot be locked ({error.strerror}); set data.cache to a disk of this host"
                ) from None
            yield is_locked

    def restore_cache(self, entry: FileEntry, schema: Schema) -> bool:
        """Convert a file again if its cache is missing; False if the file was deleted or changed."""
        rows = self.caches / entry.cache / ROWS_FILE
        while not rows.exists():
            with self.try_lock() as is_locked:
                if is_locked and not rows.exists():
                    if not self._is_unchanged(entry):
                        return False
                    shutil.rmtree(rows.parent, ignore_errors=True)
                    self._convert(self._directory / entry.name, schema, lambda _: None)
                    return rows.exists()
            time.sleep(POLL_SECONDS)
        return True

    def _read_next_file(self, schema: Schema, pause: Pause) -> bool:
        """Add at least one new file to the journal, reading it unless another process does; False if none.

        A file is read only after two scans: a single scan may miss a file that is created while it runs, and still
        list a file created later, which would then be read out of order.
        """
        if self.refresh():
            return True
        new = set(self._drop_read_files()) or self.scan_directory()
        if not new:
            return False
        with self.try_lock() as is_locked:
            if not is_locked or self.refresh():
                return is_locked
            if not self._drop_read_files():
                self._pending = deque(takewhile(new.__contains__, sorted(self.scan_directory(force=True))))
                self._pending_since = time.monotonic()
                self._drop_unused_caches()
            entry = self._convert_file(self._pending[0], schema, pause) if self._pending else None
            if entry is None:
                self._pending.clear()
                return False
            self._append(entry)
            return self.refresh()

    def _drop_read_files(self) -> deque[str]:
        """Drop pending files that have been read, and all if the scans are too old; returns the others."""
        if time.monotonic() - self._pending_since > LISTING_MAX_AGE_SECONDS:
            self._pending.clear()
        while self._pending and self._pending[0] <= self.last_file:
            self._pending.popleft()
        return self._pending

    def _print_wait_notice(self, num: int) -> None:
        now = time.monotonic()
        self._waiting_since = self._waiting_since or now
        if not self._has_notified and now - self._waiting_since > WAIT_NOTICE_SECONDS:
            self._has_notified = True
            last = f"; last file: {self.last_file}" if self.last_file else ""
            available = f"there are {self.num_samples:,} in {len(self.entries):,} files{last}"
            print(f"{self._directory}: waiting for {num:,} samples; {available}", file=sys.stderr, flush=True)

    def _check_unchanged(self, names: set[str]) -> None:
        """Raise UserError if a file changed after it was read; all files are checked every FULL_CHECK_SECONDS."""
        now = time.monotonic()
        entries = self.entries[-NUM_RECENT_FILES:]
        if now - self._last_full_check > FULL_CHECK_SECONDS:
            entries, self._last_full_check = self.entries, now
        for entry in entries:
            if entry.name in names and self._is_unchanged(entry) is False:
                raise UserError(
                    f"{self._directory / entry.name}: changed after its {entry.rows:,} rows were read; files must "
                    "not change: restore its content or delete it, and write new rows to another file, "
                    f"with a name that sorts after {self.last_file}"
                )

    def _is_unchanged(self, entry: FileEntry) -> bool | None:
        """Whether a file has the size and mtime it had when it was read; None if it does not exist."""
        state = _size_and_mtime(self._directory / entry.name)
        return None if state is None else state == (entry.size, entry.mtime_ns)

    def _convert_file(self, name: str, schema: Schema, pause: Pause) -> FileEntry | None:
        """Convert a file to a cache; None if it was deleted or renamed meanwhile: it was incomplete then."""
        path = self._directory / name
        before = _size_and_mtime(path)
        if before is None:
            return None
        rows, cache, malformed = 0, "", 0
        try:
            if before[0]:
                rows, cache, malformed = self._convert(path, schema, pause)
        except (UserError, FileNotFoundError):
            if _exists_unchanged(path, before):
                raise
            return None  # deleted meanwhile: the error came from an incomplete file
        return FileEntry(name, *before, rows, cache, malformed) if _exists_unchanged(path, before) else None

    def _convert(self, path: Path, schema: Schema, pause: Pause) -> tuple[int, str, int]:
        """Convert a file; returns its number of rows, the name of its cache, and the number of malformed rows."""
        try:
            log = ParquetLog(path) if path.suffix == ".parquet" else TextFile(path, schema)
            cache = convert(path, log, schema, self.caches, strict=self._strict, progress=lambda *_: pause(0))
        except EmptyFile:
            return 0, "", 0
        converted = files.read(ConvertedLog, cache / "log.json")
        if converted.malformed:
            line, fault = converted.faults[0]
            total = converted.rows + converted.malformed
            notice = (
                f"{converted.malformed:,} of {total:,} rows are malformed and skipped; the first, line {line}: {fault}"
            )
            print(f"{path}: {notice}", file=sys.stderr, flush=True)
        return converted.rows, cache.name, converted.malformed

    def _append(self, entry: FileEntry) -> None:
        """Force the cached rows to disk, then append a line, overwriting an incomplete last line."""
        path = self._folder / JOURNAL_FILE
        try:
            if entry.cache:
                _force_to_disk(*(self.caches / entry.cache).iterdir(), self.caches / entry.cache, self.caches)
            with path.open("r+b" if self._read_bytes else "wb") as file:
                self._check_not_replaced(file)
                file.truncate(self._read_bytes)
                file.seek(self._read_bytes)
                file.write(json.dumps(asdict(entry)).encode() + b"\n")
                file.flush()
                os.fsync(file.fileno())
            if not self._read_bytes:
                _force_to_disk(self._folder)
        except OSError as error:
            if not path.exists():
                self._check_not_replaced(None)
            raise UserError(f"{path}: cannot be written ({error.strerror}); free disk space") from None

    def _check_not_replaced(self, file: IO[bytes] | None) -> None:
        """Raise UserError if `file` is not the journal that was read so far; None: it does not exist."""
        stat = os.fstat(file.fileno()) if file else None
        if self._read_bytes and (not stat or stat.st_ino != self._inode or stat.st_size < self._read_bytes):
            raise UserError(
                f"{self._folder / JOURNAL_FILE}: was removed or replaced while it was in use; remove {self._folder} "
                "only while no run reads it, and start again"
            )
        self._inode = stat.st_ino if stat else 0

    def _drop_unused_caches(self) -> None:
        """Delete caches that are incomplete, without entry, or of a deleted file after PINNED_ROWS."""
        names, starts = self._listing.names(), self.offsets.tolist()
        used = {
            entry.cache
            for entry, start in zip(self.entries, starts, strict=False)
            if start < PINNED_ROWS or entry.name in names
        }
        for name in set(os.listdir(self.caches) if self.caches.is_dir() else ()) - used:
            shutil.rmtree(self.caches / name, ignore_errors=True)


class _Listing:
    """Names of the complete files of a directory; scanned again only if it may have changed."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._names: set[str] = set()
        self._mtime_ns, self._mtime_since = -1, 0.0  # mtime of the directory, and when it was first seen
        self._valid_until = -math.inf

    def names(self, *, force: bool = False) -> set[str]:
        """Current names; without `force` up to LISTING_MAX_AGE_SECONDS old if the directory's mtime is unchanged."""
        now = time.monotonic()
        try:
            mtime_ns = self._directory.stat().st_mtime_ns
            if mtime_ns != self._mtime_ns:
                self._mtime_ns, self._mtime_since, self._valid_until = mtime_ns, now, -math.inf
            if force or now > self._valid_until:
                self._names = _list_files(self._directory)
                if now - self._mtime_since > SETTLE_SECONDS:
                    self._valid_until = now + LISTING_MAX_AGE_SECONDS
        except OSError as error:
            raise UserError(f"data.path={self._directory}: cannot be read ({error.strerror})") from None
        return self._names


def _parse_entry(line: bytes, path: Path) -> FileEntry:
    try:
        return FileEntry(**json.loads(line))
    except (ValueError, TypeError):
        raise UserError(
            f"{path}: damaged: {line[:60]!r} is not a journal line; remove {path.parent}: files that still exist are "
            "then read again"
        ) from None


def _list_files(directory: Path) -> set[str]:
    """Names of a directory's files, except those whose names mark them as hidden or incomplete."""
    names: set[str] = set()
    with os.scandir(directory) as entries:
        for entry in entries:
            is_incomplete = entry.name.startswith((".", "_")) or entry.name.endswith((".tmp", ".part"))
            if not is_incomplete and entry.is_file():
                names.add(entry.name)
    return names


def _size_and_mtime(path: Path) -> tuple[int, int] | None:
    """Size and mtime (ns) of a file; None if it does not exist."""
    try:
        stat = path.stat()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    return stat.st_size, stat.st_mtime_ns


def _exists_unchanged(path: Path, before: tuple[int, int]) -> bool:
    """Whether a file still exists; raises UserError if it has changed since it had size and mtime `before`."""
    if (state := _size_and_mtime(path)) not in (before, None):
        raise UserError(
            f"{path}: changed while it was read; write it elsewhere, or under a name that ends in .tmp, and rename "
            "it when it is complete"
        )
    return state is not None


def _force_to_disk(*paths: Path) -> None:
    """fsync files or directories, so that they are on disk before anything that is written later."""
    for path in paths:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

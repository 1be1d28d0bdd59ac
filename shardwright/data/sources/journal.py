"""The files of a directory that grows, in the order of their names, and where their rows are.

A line of JSON for each file, appended under a lock by whichever process of the host sees it first, once the file's rows
lie in a cache beside the journal: so a file keeps its place in the count when it is deleted. Other processes only read.
What kill -9 leaves of a line counts for nothing. No torch here.
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
POLL_SECONDS = 0.5  # between two looks at the directory
WAIT_NOTICE_SECONDS = 5.0  # of waiting, before a line says so
PINNED_ROWS = 1 << 20  # a run looks at its first batches again whenever it is resumed: their caches stay
NUM_RECENT_FILES = 8  # files read, which each look looks at again; at the others only one in SECONDS_UNCHECKED does
FULL_CHECK_SECONDS = 60.0
LISTING_MAX_AGE_SECONDS = 10.0  # at most, for which what a look found is taken to be there still
SETTLE_SECONDS = 2.0  # unchanged for so long, a directory's time tells the next change, however coarse it is


@dataclass(frozen=True, slots=True)
class FileEntry:
    """A file that was read."""

    name: str
    size: int
    mtime_ns: int
    rows: int
    cache: str  # a folder among the caches; empty where there are no rows
    malformed: int = 0  # rows left out


class Journal:
    """The files of a directory that were read, as far as this process knows."""

    def __init__(self, directory: Path, folder: Path, *, strict: bool) -> None:
        self.entries: list[FileEntry] = []
        self.offsets = np.zeros(1, np.int64)  # the first sample of each file, and behind them the number of samples
        self.digests = [""]  # of the names and rows of so many files
        self.caches = folder / CACHES_DIRECTORY
        self._directory, self._folder, self._strict = directory, folder, strict
        self._names: set[str] = set()
        self._read_bytes, self._inode = 0, 0
        self._listing = _Listing(directory)
        self._checked = -math.inf  # when all files were, that are there still
        self._found: deque[str] = deque()  # of two looks, and not read yet
        self._found_at = 0.0
        self._waiting: float | None = None  # since when nothing came
        self._told = False

    @property
    def num_samples(self) -> int:
        return int(self.offsets[-1])

    @property
    def last_file(self) -> str:
        return self.entries[-1].name if self.entries else ""

    def wait(self, num: int, schema: Schema, pause: Pause) -> None:
        """Until samples 0 to num - 1 are there."""
        while self.num_samples < num:
            if not self._grow(schema, pause):
                self._tell(num)
                pause(POLL_SECONDS)

    def catch_up(self, schema: Schema) -> bool:
        """Whether this process knows more than before, as it will where there are files that nobody has read."""
        while not (grown := self._grow(schema, lambda _: None)) and self.scan_directory():
            time.sleep(POLL_SECONDS)  # another process reads one
        return grown

    def refresh(self) -> bool:
        """Know what was written since the last time; whether it was anything."""
        path = self._folder / JOURNAL_FILE
        try:
            with path.open("rb") as file:
                self._check_same(file)
                file.seek(self._read_bytes)
                data = file.read()
        except FileNotFoundError:
            self._check_same(None)
            return False
        whole = data[: data.rfind(b"\n") + 1]
        if not whole:
            return False
        found = [_entry(line, path) for line in whole.splitlines()]
        self._read_bytes += len(whole)
        self.entries += found
        self._names.update(entry.name for entry in found)
        for entry in found:
            self.digests.append(sha256(f"{self.digests[-1]}{entry.name}/{entry.rows}".encode()).hexdigest()[:16])
        behind = np.cumsum([entry.rows for entry in found], dtype=np.int64)
        self.offsets = np.concatenate([self.offsets, self.offsets[-1] + behind])
        self._waiting, self._told = None, False
        return True

    def scan_directory(self, *, force: bool = False) -> set[str]:
        """The files that were not read yet; none that was may have changed, and none may have come late."""
        present = self._listing.names(anew=force)
        self._check_read(present)
        new = present - self._names
        if (first := min(new, default=self.last_file)) < self.last_file:
            raise UserError(
                f"{self._directory / first}: came late: {self.last_file} was read before, and files are "
                "read in the order "
                "of their names; rename it to a name behind that"
            )
        return new

    @contextmanager
    def try_lock(self) -> Iterator[bool]:
        """Whether this process may write, until the end of the block; not where another does."""
        try:
            file = (self._folder / LOCK_FILE).open("a")
        except OSError as error:
            raise UserError(f"{self._folder}: cannot be written ({error.strerror}); was it removed?") from None
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                mine = True
            except BlockingIOError:
                mine = False
            except OSError as error:
                raise UserError(
                    f"{file.name}: cannot be locked ({error.strerror}); set data.cache to a disk of this host"
                ) from None
            yield mine

    def restore_cache(self, entry: FileEntry, schema: Schema) -> bool:
        """Whether the missing cache of a file is there again: it can be made while the file is as it was."""
        rows = self.caches / entry.cache / ROWS_FILE
        while not rows.exists():
            with self.try_lock() as mine:
                if mine and not rows.exists():
                    if not self._as_read(entry):
                        return False
                    shutil.rmtree(rows.parent, ignore_errors=True)
                    self._rows(self._directory / entry.name, schema, lambda _: None)
                    return rows.exists()
            time.sleep(POLL_SECONDS)
        return True

    def _grow(self, schema: Schema, pause: Pause) -> bool:
        """Know more files, if there are more and no other process is just reading one.

        Two looks: the first may have missed a file that came while it went on, and found one that came after that.
        """
        if self.refresh():
            return True
        new = set(self._left()) or self.scan_directory()
        if not new:
            return False
        with self.try_lock() as mine:
            if not mine or self.refresh():
                return mine
            if not self._left():
                self._found = deque(takewhile(new.__contains__, sorted(self.scan_directory(force=True))))
                self._found_at = time.monotonic()
                self._clear()
            entry = self._converted(self._found[0], schema, pause) if self._found else None
            if entry is None:
                self._found.clear()
                return False
            self._append(entry)
            return self.refresh()

    def _left(self) -> deque[str]:
        """What two looks found and nobody has read since, if that was not long ago."""
        if time.monotonic() - self._found_at > LISTING_MAX_AGE_SECONDS:
            self._found.clear()
        while self._found and self._found[0] <= self.last_file:
            self._found.popleft()
        return self._found

    def _tell(self, num: int) -> None:
        now = time.monotonic()
        self._waiting = self._waiting or now
        if not self._told and now - self._waiting > WAIT_NOTICE_SECONDS:
            self._told = True
            last = f", the last {self.last_file}" if self.last_file else ""
            have = f"there are {self.num_samples:,} in {len(self.entries):,} files{last}"
            print(f"{self._directory}: waiting for {num:,} samples; {have}", file=sys.stderr, flush=True)

    def _check_read(self, present: set[str]) -> None:
        now = time.monotonic()
        entries = self.entries[-NUM_RECENT_FILES:]
        if now - self._checked > FULL_CHECK_SECONDS:
            entries, self._checked = self.entries, now
        for entry in entries:
            if entry.name in present and self._as_read(entry) is False:
                raise UserError(
                    f"{self._directory / entry.name}: changed after it was read, as {entry.rows:,} rows; a file that "
                    "is there stays as it is: bring back what it was or delete it, and give new rows a file of their "
                    f"own, with a name behind {self.last_file}"
                )

    def _as_read(self, entry: FileEntry) -> bool | None:
        """Whether a file is as it was when it was read; None: it is not there."""
        state = _state(self._directory / entry.name)
        return None if state is None else state == (entry.size, entry.mtime_ns)

    def _converted(self, name: str, schema: Schema, pause: Pause) -> FileEntry | None:
        """A file, its rows in a cache; None where it was deleted or renamed meanwhile: then it was no complete one."""
        path = self._directory / name
        before = _state(path)
        if before is None:
            return None
        rows, cache, malformed = 0, "", 0
        try:
            if before[0]:
                rows, cache, malformed = self._rows(path, schema, pause)
        except (UserError, FileNotFoundError):
            if _unchanged(path, before):  # half a file looks malformed, and is another mistake
                raise
            return None
        return FileEntry(name, *before, rows, cache, malformed) if _unchanged(path, before) else None

    def _rows(self, path: Path, schema: Schema, pause: Pause) -> tuple[int, str, int]:
        """How many a file has, their cache, and how many were left out."""
        try:
            log = ParquetLog(path) if path.suffix == ".parquet" else TextFile(path, schema)
            made = convert(path, log, schema, self.caches, strict=self._strict, progress=lambda *_: pause(0))
        except EmptyFile:
            return 0, "", 0
        found = files.read(ConvertedLog, made / "log.json")
        if found.malformed:
            line, what = found.faults[0]
            total = found.rows + found.malformed
            told = f"{found.malformed:,} of {total:,} rows are malformed and left out; the first, line {line}: {what}"
            print(f"{path}: {told}", file=sys.stderr, flush=True)
        return found.rows, made.name, found.malformed

    def _append(self, entry: FileEntry) -> None:
        """Behind the last whole line, and behind the rows on the disk; where a torn line follows, in its place."""
        path = self._folder / JOURNAL_FILE
        try:
            if entry.cache:
                _to_disk(*(self.caches / entry.cache).iterdir(), self.caches / entry.cache, self.caches)
            with path.open("r+b" if self._read_bytes else "wb") as file:
                self._check_same(file)
                file.truncate(self._read_bytes)
                file.seek(self._read_bytes)
                file.write(json.dumps(asdict(entry)).encode() + b"\n")
                file.flush()
                os.fsync(file.fileno())
            if not self._read_bytes:
                _to_disk(self._folder)
        except OSError as error:
            if not path.exists():
                self._check_same(None)
            raise UserError(f"{path}: cannot be written ({error.strerror}); make room there") from None

    def _check_same(self, file: IO[bytes] | None) -> None:
        """That the journal, None where there is none, is the one that was read so far."""
        stat = os.fstat(file.fileno()) if file else None
        if self._read_bytes and (not stat or stat.st_ino != self._inode or stat.st_size < self._read_bytes):
            raise UserError(
                f"{self._folder / JOURNAL_FILE}: was removed or replaced while it was in use; remove "
                f"{self._folder} only "
                "while no run reads it, and start again"
            )
        self._inode = stat.st_ino if stat else 0

    def _clear(self) -> None:
        """Drop what is half made or of no entry, and the caches of files that were deleted, but for the head."""
        present, starts = self._listing.names(), self.offsets.tolist()
        keep = {
            entry.cache
            for entry, start in zip(self.entries, starts, strict=False)
            if start < PINNED_ROWS or entry.name in present
        }
        for name in set(os.listdir(self.caches) if self.caches.is_dir() else ()) - keep:
            shutil.rmtree(self.caches / name, ignore_errors=True)


class _Listing:
    """The complete files of a directory, listed again where it may have changed."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._names: set[str] = set()
        self._mtime_ns, self._since = -1, 0.0  # the directory's own, and when it was first seen
        self._until = -math.inf

    def names(self, *, anew: bool = False) -> set[str]:
        """As a scan that begins now would find them, or a few seconds ago where nothing tells of a change."""
        now = time.monotonic()
        try:
            mtime_ns = self._directory.stat().st_mtime_ns
            if mtime_ns != self._mtime_ns:
                self._mtime_ns, self._since, self._until = mtime_ns, now, -math.inf
            if anew or now > self._until:
                self._names = _present(self._directory)
                if now - self._since > SETTLE_SECONDS:
                    self._until = now + LISTING_MAX_AGE_SECONDS
        except OSError as error:
            raise UserError(f"data.path={self._directory}: cannot be read ({error.strerror})") from None
        return self._names


def _entry(line: bytes, path: Path) -> FileEntry:
    try:
        return FileEntry(**json.loads(line))
    except (ValueError, TypeError):
        raise UserError(
            f"{path}: damaged: {line[:60]!r} is no line of a journal; remove {path.parent}, and read anew what is there"
        ) from None


def _present(directory: Path) -> set[str]:
    """The files of a directory, those aside that are not complete by their names."""
    found: set[str] = set()
    with os.scandir(directory) as all_:
        for one in all_:
            aside = one.name.startswith((".", "_")) or one.name.endswith((".tmp", ".part"))
            if not aside and one.is_file():
                found.add(one.name)
    return found


def _state(path: Path) -> tuple[int, int] | None:
    """Size and time of a file; None where it is not there."""
    try:
        stat = path.stat()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    return stat.st_size, stat.st_mtime_ns


def _unchanged(path: Path, before: tuple[int, int]) -> bool:
    """Whether a file is there as it was; one that changes while it is read is a mistake."""
    if (now := _state(path)) not in (before, None):
        raise UserError(
            f"{path}: changed while it was read; write it elsewhere, or under a name that ends in .tmp, and rename "
            "it when it is complete"
        )
    return now is not None


def _to_disk(*paths: Path) -> None:
    """What was written must not come to be there later than what is written next."""
    for path in paths:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

"""The files of a directory that grows, in the order of their names, and where their rows are.

A line of JSON for each file, appended under a lock by whichever process of the host sees it first, once the file's rows
lie in a cache beside the journal: so a file keeps its place in the count when it is deleted. Other processes only read.
What kill -9 leaves of a line counts for nothing. No torch here.
"""

import fcntl
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from shardwright.data.convert import Converted, convert
from shardwright.data.parquet import ParquetLog
from shardwright.data.schema import Schema
from shardwright.data.source import Pause
from shardwright.data.text import Empty, TextFile
from shardwright.errors import UserError
from shardwright.spec import files

JOURNAL, LOCK, CACHES = "journal.jsonl", "lock", "files"
LOOK_SECONDS = 0.5  # between two looks at the directory
SECONDS_UNTOLD = 5.0  # of waiting, before a line says so
HEAD_ROWS = 1 << 20  # a run looks at its first batches again whenever it is resumed: their caches stay


@dataclass(frozen=True, slots=True)
class Entry:
    """A file that was read."""

    name: str
    size: int
    mtime_ns: int
    rows: int
    cache: str  # a folder among the caches; empty where there are no rows


class Journal:
    """The files of a directory that were read, as far as this process knows."""

    def __init__(self, directory: Path, folder: Path, *, strict: bool) -> None:
        self.entries: list[Entry] = []
        self.starts = np.zeros(1, np.int64)  # the first sample of each file, and behind them the number of samples
        self.caches = folder / CACHES
        self._directory, self._folder, self._strict = directory, folder, strict
        self._names: set[str] = set()
        self._read_bytes = 0

    @property
    def rows(self) -> int:
        return int(self.starts[-1])

    def wait(self, num: int, schema: Schema, pause: Pause) -> None:
        """Until samples 0 to num - 1 are there."""
        since, told = time.monotonic(), False
        while self.rows < num:
            if self._grow(schema, pause):
                continue
            pause(LOOK_SECONDS)
            if not told and time.monotonic() - since > SECONDS_UNTOLD:
                told = True
                last = f", the last {self.entries[-1].name}" if self.entries else ""
                have = f"there are {self.rows:,} in {len(self.entries):,} files{last}"
                print(f"{self._directory}: waiting for {num:,} samples; {have}", file=sys.stderr, flush=True)

    def read(self) -> bool:
        """Know what was written since the last time; whether it was anything."""
        path = self._folder / JOURNAL
        try:
            with path.open("rb") as file:
                file.seek(self._read_bytes)
                data = file.read()
        except FileNotFoundError:
            return False
        whole = data[: data.rfind(b"\n") + 1]
        if not whole:
            return False
        found = [_entry(line, path) for line in whole.splitlines()]
        self._read_bytes += len(whole)
        self.entries += found
        self._names.update(entry.name for entry in found)
        behind = np.cumsum([entry.rows for entry in found], dtype=np.int64)
        self.starts = np.concatenate([self.starts, self.starts[-1] + behind])
        return True

    def look(self) -> dict[str, os.stat_result]:
        """The files that are there, none of which may have changed or come late."""
        present = _present(self._directory)
        for entry in self.entries:
            if entry.name in present and _state(present[entry.name]) != (entry.size, entry.mtime_ns):
                raise UserError(
                    f"{self._directory / entry.name}: changed after it was read; a file that is there stays as it is: "
                    "give new rows a file of their own"
                )
        last = self.entries[-1].name if self.entries else ""
        if late := sorted(name for name in present if name < last and name not in self._names):
            raise UserError(
                f"{self._directory / late[0]}: came late: {last} was read before, and files are read in the order of "
                "their names; rename it to a name behind that"
            )
        return present

    @contextmanager
    def alone(self) -> Iterator[bool]:
        """Whether this process may write, until the end of the block; not where another does."""
        try:
            file = (self._folder / LOCK).open("a")
        except OSError as error:
            raise UserError(f"{self._folder}: cannot be written ({error.strerror}); was it removed?") from None
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                mine = True
            except BlockingIOError:
                mine = False
            yield mine

    def _grow(self, schema: Schema, pause: Pause) -> bool:
        """Know more files, if there are more and no other process is just reading one.

        Two looks: the first may have missed a file that came while it went on, and found one that came after that.
        """
        if self.read():
            return True
        new = self.look().keys() - self._names
        if not new:
            return False
        with self.alone() as mine:
            if mine and not self.read():
                present = self.look()
                first = min(present.keys() - self._names, default="")
                if first in new:
                    self._clear(present)
                    self._append(self._converted(first, schema, pause))
                    self.read()
            return mine

    def _converted(self, name: str, schema: Schema, pause: Pause) -> Entry:
        """A file, its rows in a cache."""
        path = self._directory / name
        size, mtime_ns = _state(_stat(path))
        try:
            rows, cache = self._rows(path, schema, pause) if size else (0, "")
        except UserError:
            _check_unchanged(path, size, mtime_ns)  # half a file looks malformed, and is another mistake
            raise
        _check_unchanged(path, size, mtime_ns)
        return Entry(name, size, mtime_ns, rows, cache)

    def _rows(self, path: Path, schema: Schema, pause: Pause) -> tuple[int, str]:
        """How many a file has, and their cache."""
        try:
            log = ParquetLog(path) if path.suffix == ".parquet" else TextFile(path, schema)
            made = convert(path, log, schema, self.caches, strict=self._strict, progress=lambda *_: pause(0))
        except Empty:
            return 0, ""
        found = files.read(Converted, made / "log.json")
        if found.malformed:
            line, what = found.faults[0]
            total = found.rows + found.malformed
            told = f"{found.malformed:,} of {total:,} rows are malformed and left out; the first, line {line}: {what}"
            print(f"{path}: {told}", file=sys.stderr, flush=True)
        return found.rows, made.name

    def _append(self, entry: Entry) -> None:
        """Behind the last whole line; where a torn one follows, in its place."""
        path = self._folder / JOURNAL
        try:
            with path.open("ab") as file:
                file.truncate(self._read_bytes)
                file.write(json.dumps(asdict(entry)).encode() + b"\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise UserError(f"{path}: cannot be written ({error.strerror}); make room there") from None

    def _clear(self, present: Mapping[str, object]) -> None:
        """Drop what a killed process left half made, and the caches of files that were deleted, but for the head."""
        there = set(os.listdir(self.caches)) if self.caches.is_dir() else set()
        drop = [name for name in there if name.startswith(".")]
        for entry, start in zip(self.entries, self.starts.tolist(), strict=False):
            if start >= HEAD_ROWS and entry.cache in there and entry.name not in present:
                drop.append(entry.cache)
        for name in drop:
            shutil.rmtree(self.caches / name, ignore_errors=True)


def _entry(line: bytes, path: Path) -> Entry:
    try:
        return Entry(**json.loads(line))
    except (ValueError, TypeError):
        raise UserError(
            f"{path}: damaged: {line[:60]!r} is no line of a journal; remove {path.parent}, and read anew what is there"
        ) from None


def _present(directory: Path) -> dict[str, os.stat_result]:
    """The files of a directory, those aside that are not complete by their names."""
    found: dict[str, os.stat_result] = {}
    try:
        with os.scandir(directory) as all_:
            for one in all_:
                with suppress(FileNotFoundError):  # deleted, or renamed, in this moment
                    if (
                        not one.name.startswith((".", "_"))
                        and not one.name.endswith((".tmp", ".part"))
                        and one.is_file()
                    ):
                        found[one.name] = one.stat()
    except OSError as error:
        raise UserError(f"data.path={directory}: cannot be read ({error.strerror})") from None
    return found


def _stat(path: Path) -> os.stat_result:
    try:
        return path.stat()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); delete files only when they were read") from None


def _state(stat: os.stat_result) -> tuple[int, int]:
    return stat.st_size, stat.st_mtime_ns


def _check_unchanged(path: Path, size: int, mtime_ns: int) -> None:
    with suppress(FileNotFoundError):
        if _state(path.stat()) != (size, mtime_ns):
            raise UserError(
                f"{path}: changed while it was read; write it elsewhere, or under a name that ends in .tmp, and rename "
                "it when it is complete"
            )

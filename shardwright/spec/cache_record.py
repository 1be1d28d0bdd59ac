"""What a run records of tables with rows on disk, of those that grow, and of those with bounded staleness: a JSON line
for each window and table."""

from collections.abc import Iterator
from dataclasses import dataclass
from json import JSONDecodeError, dumps, loads
from pathlib import Path
from typing import TypeVar

from shardwright.errors import UserError, check_regular_file
from shardwright.spec import files

CACHES_FILE, GROWTH_FILE, COPIES_FILE = "caches.jsonl", "growth.jsonl", "copies.jsonl"  # of a run
Window = TypeVar("Window")


@dataclass(frozen=True, slots=True)
class CacheWindow:
    """What the caches of a table did in the steps up to `step`, since the window before; over all ranks.

    `rows`: distinct rows of batches, of which `missing` were copied in; `conflicts`: for which all lines of a set were
    in use. `written_back`: evicted rows that had to be written. Bytes: of the disk, or of table servers. `lookups`: ids
    of one batch of 16, of which those of `missing_lookups` read missing rows; 0: not recorded.
    """

    step: int
    steps: int
    table: str
    rows: int
    missing: int
    conflicts: int
    written_back: int
    bytes_read: int
    bytes_written: int
    lookups: int = 0
    missing_lookups: int = 0

    def to_line(self) -> str:
        return dumps(files.to_plain(self), separators=(",", ":")) + "\n"


@dataclass(frozen=True, slots=True)
class GrowthWindow:
    """A table that grows at the end of a step, over all ranks. `rows`: of `room`; `entries`: of the map of ids, also
    those without a row; rows that have expired so far, and that were evicted."""

    step: int
    table: str
    room: int
    rows: int
    entries: int
    expired: int
    evicted: int

    def to_line(self) -> str:
        return dumps(files.to_plain(self), separators=(",", ":")) + "\n"


@dataclass(frozen=True, slots=True)
class CopyWindow:
    """What ranks did with copies of rows in the steps up to `step`, since the window before; over all ranks.

    `tables`: names of tables that share their copies. `read`: distinct rows of other ranks in batches; of these,
    `validated` had an expired lease, `sent` were sent by their owners, and `pushed` had updates pushed. `missed`: of
    the copies that were validated, how many missed 0, 1, 2 to 3, 4 to 7, ... updates. `lookups`: ids of these rows, of
    which `sent_lookups` had their row sent; 0: not recorded.
    """

    step: int
    steps: int
    tables: str
    read: int
    validated: int
    sent: int
    pushed: int
    missed: tuple[int, ...]
    lookups: int = 0
    sent_lookups: int = 0

    def to_line(self) -> str:
        return dumps(files.to_plain(self), separators=(",", ":")) + "\n"


def read_windows(path: Path, form: type[Window]) -> Iterator[Window]:
    """The windows of a file, if it exists. A last line that was cut off, as by kill -9, is left out."""
    if not path.exists():
        return
    check_regular_file(path)
    with path.open() as lines:
        for number, line in enumerate(lines, 1):
            try:
                data = loads(line)
            except JSONDecodeError as error:
                if not line.endswith("\n"):
                    return
                raise UserError(f"{path}, line {number}: bad JSON: {error.msg}") from error
            yield files.from_plain(form, data, f"{path}, line {number}")

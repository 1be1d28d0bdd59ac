"""Recorded routing: rows of each rank for each expert, in a file with a JSON line for each step and mixture."""

from collections.abc import Iterator
from dataclasses import dataclass
from json import JSONDecodeError, dumps, loads
from pathlib import Path

from shardwright.errors import UserError, check_regular_file
from shardwright.spec import files

ROUTING_FILE = "routing.jsonl"  # of a run


@dataclass(frozen=True, slots=True)
class RoutedRows:
    """The rows of one mixture in one step, by rank and expert.

    `rows`: those that a rank's own tokens were routed to. `computed`: those that the rank computed; empty: each expert
    was where it always is, on the rank that owns it, or on every rank. `dropped`: choices over an expert's capacity.
    Ranks: those that have the mixture, in order. Micro-batches of the step are summed.
    """

    step: int
    module: str  # the path of the mixture in its model
    rows: tuple[tuple[int, ...], ...]
    computed: tuple[tuple[int, ...], ...] = ()
    dropped: int = 0

    @property
    def expert_rows(self) -> tuple[int, ...]:
        """Rows of each expert, of all ranks."""
        return tuple(map(sum, zip(*self.rows, strict=True)))

    def to_line(self) -> str:
        return dumps(files.to_plain(self), separators=(",", ":")) + "\n"


def read_routing(path: str | Path) -> Iterator[RoutedRows]:
    """The records of a file, one by one. A last line that was cut off, as by kill -9, is left out."""
    path = Path(path)
    check_regular_file(path)
    try:
        with path.open() as lines:
            for number, line in enumerate(lines, 1):
                try:
                    yield parse_line(line, f"{path}, line {number}")
                except UserError as error:
                    if line.endswith("\n") or not isinstance(error.__cause__, JSONDecodeError):
                        raise
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read as recorded routing ({error})") from error


def parse_line(line: str, origin: str) -> RoutedRows:
    """The record in a line; `origin` names it in errors."""
    try:
        data = loads(line)
    except JSONDecodeError as error:
        raise UserError(f"{origin}: bad JSON: {error.msg}") from error
    record = files.from_plain(RoutedRows, data, origin)
    for name, counts in (("rows", record.rows), ("computed", record.computed)):
        if len({len(row) for row in counts}) > 1 or any(count < 0 for row in counts for count in row):
            raise UserError(f"{origin}: {name}: wanted as many numbers of 0 or more for every rank")
    if not record.rows or not record.rows[0]:
        raise UserError(f"{origin}: rows: wanted one list of numbers by expert for every rank")
    if record.computed and (len(record.computed), len(record.computed[0])) != (len(record.rows), len(record.rows[0])):
        raise UserError(f"{origin}: computed: wanted as many ranks and experts as rows has")
    return record

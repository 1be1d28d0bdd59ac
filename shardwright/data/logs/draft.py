"""Draft the schema of a click log from its first rows: what each column probably is, and why, as a TOML file."""

import csv
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.dataset as ds

from shardwright.data.logs.text import read_blocks
from shardwright.errors import UserError, check_regular_file

SAMPLE_ROWS = 20_000
SAMPLE_BYTES = 8 << 20
DELIMITERS = ",\t;|"
SEPARATORS = "|;,"
LABEL_NAMES = ("label", "click", "clicked", "is_click", "liked", "target", "y", "buy", "conversion", "purchase")
POSITIVE_TEXTS = ("yes", "true", "y", "t", "click", "clicked")
TIME_NAMES = ("time", "timestamp", "ts", "date", "datetime", "unix_time", "event_time")
TIME = re.compile(r"\d{4}[-/]\d\d[-/]\d\d([T ]\d\d:\d\d(:\d\d([.,]\d+)?)?(Z|[+-]\d\d:?\d\d)?)?")
FEW_VALUES, MANY_VALUES = 20, 1000  # whole numbers with fewer, or more, distinct values are taken for categories
UNIQUE_SHARE = 0.95  # of a column that numbers the rows


@dataclass(frozen=True)
class Column:
    """The values of a column in the first rows."""

    name: str
    values: Sequence[str]  # without missing ones
    distinct: frozenset[str]
    is_complete: bool = True  # none is missing
    is_list: bool = False  # of a Parquet file

    @property
    def is_numeric(self) -> bool:
        return bool(self.values) and all(_is_number(value) for value in self.distinct)

    @property
    def is_whole(self) -> bool:
        return self.is_numeric and all(value.lstrip("+-").isdigit() for value in self.distinct)

    @property
    def is_time(self) -> bool:
        return bool(self.values) and all(TIME.fullmatch(value) for value in self.distinct)


@dataclass(frozen=True)
class Draft:
    """The lines of a schema."""

    lines: list[str] = field(default_factory=list)

    def add(self, key: str, value: object, comment: str) -> None:
        setting = f"{key} = {_toml(value)}"
        self.lines.append(f"{setting:<34} # {comment}" if comment else setting)


def draft_schema(path: Path) -> str:
    """The text of a schema for a text file with a header, or for Parquet; a line per key, with the reason."""
    columns, delimiter = _read_columns(path)
    draft, rest = Draft(), dict(columns)
    if delimiter != ",":
        draft.add("delimiter", delimiter, "")
    _draft_label(draft, rest)
    _draft_time(draft, rest)
    _draft_features(draft, rest)
    return "\n".join([f"# Drafted from the first rows of {path.name}: check every line.", *draft.lines, ""])


def _draft_label(draft: Draft, rest: dict[str, Column]) -> None:
    binary = [column for column in rest.values() if len(column.distinct) == 2 and column.is_complete]
    if not binary:
        draft.lines.append('label = ""  # no column has two values: name the label; for ratings add positive = 4.0')
        return
    binary.sort(key=_label_rank)
    column, others = rest.pop(binary[0].name), [column.name for column in binary[1:]]
    draft.add("label", column.name, f"has two values{'; so have ' if others else ''}{', '.join(others)}")
    if column.distinct != {"0", "1"}:
        draft.add("positive", _positive(column), f"the other value: {_toml(_other(column))}")


def _label_rank(column: Column) -> int:
    """How much a column with two values looks like a label; 0: most."""
    if column.name.lower() in LABEL_NAMES:
        return 0
    if column.distinct == {"0", "1"}:
        return 1
    return 2 if any(value.lower() in POSITIVE_TEXTS for value in column.distinct) else 3


def _positive(column: Column) -> str | float:
    """The value of a click: the larger number, a text that means yes, or the rarer text."""
    if column.is_numeric:
        return max(map(float, column.distinct))
    texts = [value for value in column.distinct if value.lower() in POSITIVE_TEXTS]
    return texts[0] if texts else min(sorted(column.distinct), key=list(column.values).count)


def _other(column: Column) -> str:
    positive = _positive(column)
    return next(value for value in sorted(column.distinct) if value != positive and _number(value) != positive)


def _draft_time(draft: Draft, rest: dict[str, Column]) -> None:
    times = [name for name, column in rest.items() if column.is_time]
    times += [name for name, column in rest.items() if name.lower() in TIME_NAMES and column.is_numeric]
    if times:
        rest.pop(times[0])
        draft.add("time", times[0], "the last rows in its order are held out")


def _draft_features(draft: Draft, rest: dict[str, Column]) -> None:
    empty = _take(rest, lambda column: len(column.distinct) < 2 and not column.is_list)
    unique = _take(rest, _numbers_rows)
    separator = _separator(rest)
    lists = _take(rest, lambda column: column.is_list or _is_list(column, separator))
    numbers = _take(rest, lambda column: column.is_numeric and not _is_id(column))
    for key, names, comment in (
        ("numbers", numbers, ""),
        ("categories", list(rest), "texts, and whole numbers that look like ids"),
        ("lists", lists, "several values in one field"),
    ):
        if names:
            draft.add(key, names, comment)
    if separator != "|" and lists:
        draft.add("separator", separator, "")
    for names, reason in ((unique, "a value of its own in nearly every row"), (empty, "a single value, or none")):
        if names:
            draft.lines.append(f"# not read: {', '.join(names)} ({reason})")


def _take(rest: dict[str, Column], is_taken: Callable[[Column], bool]) -> list[str]:
    """Remove the columns that are taken, and return their names."""
    names = [name for name, column in rest.items() if is_taken(column)]
    for name in names:
        rest.pop(name)
    return names


def _numbers_rows(column: Column) -> bool:
    is_fraction = column.is_numeric and not column.is_whole
    return not is_fraction and not column.is_list and len(column.distinct) > UNIQUE_SHARE * len(column.values) > 20


def _separator(rest: dict[str, Column]) -> str:
    return next((mark for mark in SEPARATORS if any(_is_list(column, mark) for column in rest.values())), "|")


def _is_list(column: Column, separator: str) -> bool:
    """Whether the values are combinations of fewer items, each in several of them."""
    combined = [value for value in column.distinct if separator in value and ", " not in value]
    items = {item for value in column.distinct for item in value.split(separator)}
    return len(combined) > len(column.distinct) / 4 and len(items) < len(column.distinct)


def _is_id(column: Column) -> bool:
    is_named = column.name.lower().endswith(("id", "code", "zip", "type"))
    return column.is_whole and (is_named or not FEW_VALUES <= len(column.distinct) <= MANY_VALUES)


def _read_columns(path: Path) -> tuple[dict[str, Column], str]:
    """The columns of the first rows, and the delimiter of a text file."""
    if not path.exists():
        raise UserError(f"{path}: no such file")
    if path.is_dir() or path.suffix == ".parquet":
        return _read_parquet(path), ","
    check_regular_file(path)
    text, blocks = b"", read_blocks(path)
    while len(text) < SAMPLE_BYTES and (block := next(blocks, b"")):
        text += block
    lines = text.decode("utf-8", "replace").splitlines()[: SAMPLE_ROWS + 1]
    if len(lines) < 3:
        raise UserError(f"{path}: {len(lines)} lines; wanted a header and at least two rows")
    delimiter = max(DELIMITERS, key=lines[0].count)
    header, *rows = csv.reader(lines if len(text) < SAMPLE_BYTES else lines[:-1], delimiter=delimiter)
    if len(header) < 2:
        raise UserError(f"{path}: the first line has one column; wanted a header of names between commas or tabs")
    if any(_is_number(name) for name in header):
        raise UserError(f"{path}: the first line is no header: it has numbers; write the names in columns = [...]")
    complete = [row for row in rows if len(row) == len(header)]
    return {name: _column(name, [row[at] for row in complete]) for at, name in enumerate(header)}, delimiter


def _read_parquet(path: Path) -> dict[str, Column]:
    try:
        table = ds.dataset(path, format="parquet").head(SAMPLE_ROWS)
    except (OSError, pa.ArrowInvalid) as error:
        raise UserError(f"{path}: not readable as Parquet ({str(error).splitlines()[0]})") from None
    columns = {}
    for name in table.column_names:
        is_list = pa.types.is_list(table[name].type) or pa.types.is_large_list(table[name].type)
        columns[name] = _column(name, [] if is_list else [_text(value) for value in table[name].to_pylist()], is_list)
    return columns


def _text(value: object) -> str:
    return "" if value is None else str(int(value)) if isinstance(value, bool) else str(value)


def _column(name: str, values: Sequence[str], is_list: bool = False) -> Column:
    present = [value for value in values if value]
    return Column(name, present, frozenset(present), len(present) == len(values), is_list)


def _is_number(value: str) -> bool:
    return _number(value) is not None


def _number(value: str) -> float | None:
    try:
        number = float(value)
    except ValueError:
        return None
    return number if abs(number) < float("inf") else None


def _toml(value: object) -> str:
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"').replace("\t", "\\t") + '"'
    return f"[{', '.join(map(_toml, value))}]" if isinstance(value, list) else str(value)

"""Parse blocks of delimited text to numpy columns, and report malformed rows: csrc/rows.cpp. No torch."""

import ctypes
from collections.abc import Sequence
from ctypes import c_char, c_double, c_int32, c_int64, c_uint64, c_void_p
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from shardwright.errors import UserError
from shardwright.kernels.hashing import hash_text
from shardwright.library import native_library

ColumnKind = Literal["skip", "number", "category", "hexadecimal", "list", "label", "weight", "time"]
COLUMN_KINDS: tuple[ColumnKind, ...] = ("skip", "number", "category", "hexadecimal", "list", "label", "weight", "time")
FAULT_MESSAGES = (
    "",
    "the row has {column} columns, wanted {wanted}",
    "column {name}: a quote is opened and never closed",
    "column {name}: text after the closing quote: {text}",
    "column {name}: {text} is not a number",
    "column {name}: {text} is not eight hexadecimal digits",
    "column {name}: {text} is not a label; wanted {label}",
    "column {name}: {text} is not a weight; wanted a number of 0 or more",
    "column {name}: {text} is not a time; wanted a number, or as 2026-11-30 21:05:00",
)
MAX_FAULTS = 1024  # per call; a block with more takes several calls
PADDING = 8  # bytes after the text that the parser may read
CODES_PER_ROW = 64  # capacity of a list column; with more codes per row, fewer rows fit


class RowFault(NamedTuple):
    """A malformed row and what is wrong with it."""

    line: int
    reason: str


class _Column(ctypes.Structure):
    _fields_ = (("kind", c_int32), ("tail", c_int32), ("values", c_void_p), ("ends", c_void_p), ("room", c_int64))


class _Fault(ctypes.Structure):
    _fields_ = (("line", c_int64), ("begin", c_int64), ("end", c_int64), ("reason", c_int32), ("column", c_int32))


class _Table(ctypes.Structure):
    _fields_ = (
        ("columns", c_void_p),
        ("faults", c_void_p),
        ("scratch", c_void_p),
        ("capacity", c_int64),
        ("fault_capacity", c_int64),
        ("num_rows", c_int64),
        ("num_faults", c_int64),
        ("line", c_int64),
        ("positive", c_double),
        ("positive_code", c_uint64),
        ("num_columns", c_int32),
        ("quoted", c_int32),
        ("full", c_int32),
        ("delimiter", c_char),
        ("separator", c_char),
    )


class ColumnSpec(NamedTuple):
    name: str
    kind: ColumnKind = "skip"
    tail: int = 0  # of a category: hash only its last `tail` bytes; 0 means all


@dataclass(frozen=True, slots=True)
class TextFormat:
    """The dialect of a delimited text file."""

    delimiter: str
    quoted: bool = True
    separator: str = "|"  # inside a list
    positive: float | str | None = None  # a label of at least this, or equal to this text, is 1; None: 0 or 1


class Parser:
    """Parses text with `columns`, in the file's order, into reused buffers for `capacity` rows."""

    def __init__(self, columns: Sequence[ColumnSpec], text_format: TextFormat, capacity: int) -> None:
        self._names = [column.name for column in columns]
        positive = text_format.positive
        self._label = "0 or 1" if positive is None else "a text" if isinstance(positive, str) else "a number"
        self._arrays = {column.name: _allocate(column.kind, capacity) for column in columns if column.kind != "skip"}
        self._columns = (_Column * len(columns))(*(self._column_struct(column) for column in columns))
        self._faults = (_Fault * MAX_FAULTS)()
        self._quoted, self._scratch = text_format.quoted, np.empty(0, np.uint8)
        self._table = _Table(
            columns=ctypes.addressof(self._columns),
            faults=ctypes.addressof(self._faults),
            capacity=capacity,
            fault_capacity=MAX_FAULTS,
            line=1,
            positive=positive if isinstance(positive, int | float) else float("nan"),
            positive_code=hash_text(positive) if isinstance(positive, str) else 0,
            num_columns=len(columns),
            quoted=text_format.quoted,
            delimiter=text_format.delimiter.encode(),
            separator=text_format.separator.encode(),
        )
        native = native_library()
        if native is None:
            raise UserError("reading text needs the compiled kernels; reinstall shardwright with a C++ compiler")
        self._parse = native.shardwright_parse_rows

    @property
    def num_rows(self) -> int:
        """Number of parsed rows that `take` will return."""
        return self._table.num_rows

    @property
    def is_full(self) -> bool:
        """Whether the last call stopped because the buffers are full."""
        return bool(self._table.full)

    @property
    def next_line(self) -> int:
        """Line number of the next row in the text, from 1."""
        return self._table.line

    def skip_line(self) -> None:
        self._table.line += 1

    def parse(self, data: bytes, *, is_last: bool) -> tuple[int, list[RowFault]]:
        """Parse rows of `data` while there is room; returns the bytes consumed and the malformed rows.

        The last `PADDING` bytes are not text. An unfinished last row is not consumed unless `is_last`.
        """
        if self._quoted and len(self._scratch) < len(data):
            self._scratch = np.empty(len(data), np.uint8)
            self._table.scratch = self._scratch.ctypes.data
        consumed = self._parse(data, len(data) - PADDING, is_last, ctypes.addressof(self._table))
        return consumed, [self._describe_fault(fault, data) for fault in self._faults[: self._table.num_faults]]

    def take(self) -> dict[str, Any]:
        """Return the parsed rows and clear the buffers.

        Each column has its values (R,), or for a list its codes and the rows' ends (R,). The arrays are views of
        buffers that the next `parse` overwrites.
        """
        num, self._table.num_rows = self._table.num_rows, 0
        return {name: _slice_rows(values, ends, num) for name, (values, ends) in self._arrays.items()}

    def _column_struct(self, column: ColumnSpec) -> tuple[int, int, int | None, int | None, int]:
        values, ends = self._arrays.get(column.name, (None, None))
        return (
            COLUMN_KINDS.index(column.kind),
            column.tail,
            _ptr(values),
            _ptr(ends),
            0 if values is None else len(values),
        )

    def _describe_fault(self, fault: Any, data: bytes) -> RowFault:
        text = data[fault.begin : min(fault.end, fault.begin + 40)].decode("utf-8", "replace")
        reason = FAULT_MESSAGES[fault.reason].format(
            column=fault.column,
            wanted=len(self._names),
            name=f'"{self._names[fault.column]}"' if fault.column < len(self._names) else "",
            text=repr(text) if text else "nothing",
            label=self._label,
        )
        return RowFault(fault.line, reason)


def _allocate(kind: ColumnKind, capacity: int) -> tuple[np.ndarray, np.ndarray | None]:
    match kind:
        case "list":
            return np.empty(CODES_PER_ROW * capacity, np.uint64), np.empty(capacity, np.int32)
        case "category" | "hexadecimal":
            return np.empty(capacity, np.uint64), None
        case "time":
            return np.empty(capacity, np.float64), None
    return np.empty(capacity, np.float32), None


def _slice_rows(values: np.ndarray, ends: np.ndarray | None, num_rows: int) -> Any:
    if ends is None:
        return values[:num_rows]
    return values[: ends[num_rows - 1] if num_rows else 0], ends[:num_rows]


def _ptr(array: np.ndarray | None) -> int | None:
    return None if array is None else array.ctypes.data

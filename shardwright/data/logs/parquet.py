"""Read a Parquet file or directory in the same parts as a text file; report malformed rows by number."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds

from shardwright.data.logs.schema import Schema
from shardwright.data.logs.text import TextPart
from shardwright.errors import UserError, check_file_name, check_regular_file
from shardwright.kernels.hashing import hash_strings, hash_text
from shardwright.kernels.text_rows import RowFault


class ParquetLog:
    """A Parquet file or directory as a LogFile. Categories may have any type that casts to string."""

    def __init__(self, path: Path) -> None:
        self._path = path
        for file in _list_files(path):
            check_file_name(file)
            check_regular_file(file)
        with _raise_unreadable(path):
            self._data = ds.dataset(path, format="parquet")
            self.columns = tuple(self._data.schema.names)
            self.num_bytes = self._data.count_rows()  # rows, not bytes: the unit that read_parts reports as progress
        self.files = [Path(name) for name in self._data.files]

    def read_parts(
        self, schema: Schema, max_rows: int, progress: Callable[[int], None] = lambda _: None
    ) -> Iterator[TextPart]:
        """Read parts of at most `max_rows` rows; calls progress(rows read so far)."""
        num_read = 0
        self.check_columns(schema.used_columns)
        for batch in self.read_batches(schema.used_columns, max_rows):
            yield self.to_part(batch, schema, num_read)
            num_read += batch.num_rows
            progress(num_read)

    def read_batches(self, columns: Sequence[str], max_rows: int) -> Iterator[pa.RecordBatch]:
        """Read some columns of all rows, in batches of at most `max_rows`."""
        batches = self._data.to_batches(list(columns), batch_size=max_rows, batch_readahead=1, fragment_readahead=1)
        while True:
            with _raise_unreadable(self._path):
                batch = next(batches, None)
            if batch is None:
                return
            if batch.num_rows:
                yield batch

    def check_columns(self, columns: Sequence[str]) -> None:
        """Raise UserError unless every file has the columns to read, with the types of the first file."""
        for fragment in self._data.get_fragments():
            with _raise_unreadable(fragment.path):
                fragment_schema = fragment.physical_schema
            for name in columns:
                expected = self._data.schema.field(name).type
                actual = fragment_schema.field(name).type if name in fragment_schema.names else "missing"
                if actual != expected:
                    raise UserError(f'{fragment.path}: column "{name}" is {actual}; in the first file it is {expected}')

    def to_part(self, batch: pa.RecordBatch, schema: Schema, first: int) -> TextPart:
        """Convert a batch, whose first row is row `first` of the file, and find its malformed rows."""
        columns: dict[str, Any] = {}
        invalid: dict[int, str] = {}
        tails = dict(schema.tail)
        for history, name in schema.history_times.items():
            self._check_order(history, name, batch, schema, first)
        for kind, names in schema.columns_by_kind.items():
            for name in names:
                array = batch.column(name)
                if kind == "list":
                    columns[name] = self._to_lists(name, array)
                elif kind in ("category", "hexadecimal"):
                    columns[name] = self._to_codes(name, array, tails.get(name, 0))
                else:
                    columns[name] = self._to_values(kind, name, array, schema)
                    for row in np.flatnonzero(_find_invalid(kind, columns[name], schema)).tolist():
                        invalid.setdefault(row, f'column "{name}": {columns[name][row]} is not a valid {kind}')
        if isinstance(schema.positive, int | float):
            columns[schema.label] = (columns[schema.label] >= schema.positive).astype(np.float32)
        if not invalid:
            return TextPart(columns, [])
        is_valid = np.ones(batch.num_rows, bool)
        is_valid[list(invalid)] = False
        faults = [RowFault(first + row + 1, reason) for row, reason in sorted(invalid.items())]
        return TextPart({name: _select_rows(values, is_valid) for name, values in columns.items()}, faults)

    def _check_order(self, history: str, name: str, batch: pa.RecordBatch, schema: Schema, first: int) -> None:
        """Raise UserError if the times of a history are not in order, or not before the time of their row."""
        array = batch.column(name)
        offsets = self._list_offsets(name, array)
        times = self._to_seconds(name, array.flatten())
        rows = np.repeat(np.arange(len(array)), np.diff(offsets))
        is_late = np.zeros(len(times), bool)
        is_late[1:] = (times[1:] < times[:-1]) & (rows[1:] == rows[:-1])
        if schema.time is not None:
            is_late |= times >= self._to_seconds(schema.time, batch.column(schema.time))[rows]
        history_offsets = self._list_offsets(history, batch.column(history))
        if (is_other := np.diff(offsets) != np.diff(history_offsets)).any():
            row = int(is_other.argmax())
            raise UserError(
                f'{self._path}: row {first + row + 1}: "{name}" has not one time for each id of "{history}"'
            )
        if is_late.any():
            row = int(rows[is_late.argmax()])
            before = "" if schema.time is None else f' and before "{schema.time}"'
            raise UserError(
                f'{self._path}: row {first + row + 1}: history "{history}" is out of order by "{name}"; wanted the '
                f"oldest first{before}"
            )

    def _to_values(self, kind: str, name: str, array: pa.Array, schema: Schema) -> np.ndarray:
        """A label, a weight, a time or a number of each row."""
        if kind == "time":
            return self._to_seconds(name, array)
        if kind == "label" and isinstance(schema.positive, str):
            codes = self._to_codes(name, array)
            return np.where(codes == 0, np.nan, codes == hash_text(schema.positive)).astype(np.float32)
        return self._to_numbers(name, array, np.float32)

    def _to_seconds(self, name: str, array: pa.Array) -> np.ndarray:
        """Numbers as they are; dates and times, also as text, in seconds from 1970."""
        if pa.types.is_string(array.type) or pa.types.is_large_string(array.type):
            with suppress(pa.ArrowInvalid):
                array = pc.cast(array, pa.timestamp("us", "UTC") if _has_offsets(array) else pa.timestamp("us"))
        if pa.types.is_date(array.type) or pa.types.is_timestamp(array.type):
            microseconds = pc.cast(pc.cast(array, pa.timestamp("us"), safe=False), pa.int64())
            return self._to_numbers(name, microseconds, np.float64) / 1e6
        return self._to_numbers(name, array, np.float64)

    def _to_numbers(self, name: str, array: pa.Array, dtype: Any) -> np.ndarray:
        try:
            plain = pc.cast(array, pa.float64() if dtype is np.float64 else pa.float32(), safe=False)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
            raise UserError(f'{self._path}: column "{name}" is {array.type}; wanted numbers') from None
        return pc.fill_null(plain, float("nan")).to_numpy(zero_copy_only=False)

    def _to_codes(self, name: str, array: pa.Array, tail: int = 0) -> np.ndarray:
        try:
            text = pc.fill_null(pc.cast(array, pa.string()), "")
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
            raise UserError(f'{self._path}: column "{name}" is {array.type}; wanted text or whole numbers') from None
        text = pa.concat_arrays([text])  # removes the offset of a sliced array into its buffers
        _, offsets, data = text.buffers()
        text_offsets = np.frombuffer(offsets, np.int32, len(text) + 1)
        return hash_strings(text_offsets, np.frombuffer(data, np.uint8) if data else np.empty(0, np.uint8), tail=tail)

    def _to_lists(self, name: str, array: pa.Array) -> tuple[np.ndarray, np.ndarray]:
        offsets = self._list_offsets(name, array)
        return self._to_codes(name, array.flatten()), (offsets[1:] - offsets[0]).astype(np.int32)

    def _list_offsets(self, name: str, array: pa.Array) -> np.ndarray:
        if not pa.types.is_list(array.type) and not pa.types.is_large_list(array.type):
            raise UserError(f'{self._path}: column "{name}" is {array.type}; wanted a list')
        return array.offsets.to_numpy(zero_copy_only=False)


def _list_files(path: Path) -> list[Path]:
    """All files of a Parquet directory, or the given file."""
    if not path.is_dir():
        return [path]
    paths = [file for file in path.rglob("*") if not file.is_dir()]
    if not any(file.suffix == ".parquet" for file in paths):
        raise UserError(
            f"{path}: a directory without .parquet files; give a text file, or set data.kind=stream for a growing "
            "directory"
        )
    return paths


@contextmanager
def _raise_unreadable(path: Path | str) -> Iterator[None]:
    try:
        yield
    except (OSError, pa.ArrowInvalid) as error:
        raise UserError(f"{path}: not readable as Parquet ({str(error).splitlines()[0]})") from None


def _has_offsets(array: pa.Array) -> bool:
    """Whether the first text ends with the offset of a time zone."""
    first = next((value.as_py() for value in array if value.is_valid), "")
    return first.endswith("Z") or "+" in first[10:] or "-" in first[10:]


def _find_invalid(kind: str, values: np.ndarray, schema: Schema) -> np.ndarray:
    match kind:
        case "label":
            has_threshold = isinstance(schema.positive, int | float)
            return np.isnan(values) if has_threshold else (values != 0) & (values != 1)
        case "weight":
            return ~(values >= 0) | np.isinf(values)
        case "time":
            return ~np.isfinite(values)
    return np.isinf(values)


def _select_rows(values: Any, mask: np.ndarray) -> Any:
    """Select the rows in `mask` of a column; of a list column (codes, row ends)."""
    if not isinstance(values, tuple):
        return values[mask]
    codes, ends = values
    lengths = np.diff(ends, prepend=0)
    return codes[np.repeat(mask, lengths)], np.cumsum(lengths[mask]).astype(np.int32)

"""A Parquet file or directory as a log: the same parts that a text file gives, malformed rows told by their number."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds

from shardwright.data.logs.schema import Schema
from shardwright.data.logs.text import TextPart
from shardwright.errors import UserError, check_file_name, check_regular_file
from shardwright.kernels.hashing import hash_strings
from shardwright.kernels.text_rows import RowFault


class ParquetLog:
    """Its columns, and its rows part by part. Categories may be of any plain type; lists are lists of such."""

    def __init__(self, path: Path) -> None:
        self._path = path
        for file in _files_under(path):
            check_file_name(file)
            check_regular_file(file)
        with _readable(path):
            self._data = ds.dataset(path, format="parquet")
            self.columns = tuple(self._data.schema.names)
            self.num_bytes = self._data.count_rows()
        self.files = [Path(name) for name in self._data.files]

    def read_parts(
        self, schema: Schema, max_rows: int, progress: Callable[[int], None] = lambda _: None
    ) -> Iterator[TextPart]:
        """At most so many rows at a time; `progress` is told how many rows have been read."""
        done = 0
        self._check_alike(schema)
        options = {"batch_size": max_rows, "batch_readahead": 1, "fragment_readahead": 1}
        batches = self._data.to_batches(columns=list(schema.used_columns), **options)
        while True:
            with _readable(self._path):
                batch = next(batches, None)
            if batch is None:
                return
            if batch.num_rows:
                yield self._part(batch, schema, done)
                done += batch.num_rows
                progress(done)

    def _check_alike(self, schema: Schema) -> None:
        """Every file of a directory must have the columns that are read, in the first one's types."""
        for fragment in self._data.get_fragments():
            with _readable(fragment.path):
                mine = fragment.physical_schema
            for name in schema.used_columns:
                wanted = self._data.schema.field(name).type
                found = mine.field(name).type if name in mine.names else "missing"
                if found != wanted:
                    raise UserError(f'{fragment.path}: column "{name}" is {found}; in the first file it is {wanted}')

    def _part(self, batch: pa.RecordBatch, schema: Schema, first: int) -> TextPart:
        columns: dict[str, Any] = {}
        bad: dict[int, str] = {}
        tails = dict(schema.tail)
        for kind, names in schema.columns_by_kind.items():
            for name in names:
                array = batch.column(name)
                if kind == "list":
                    columns[name] = self._lists(name, array)
                elif kind in ("category", "hexadecimal"):
                    columns[name] = self._codes(name, array, tails.get(name, 0))
                else:
                    columns[name] = self._numbers(name, array, np.float64 if kind == "time" else np.float32)
                    for row in np.flatnonzero(_wrong(kind, columns[name], schema)).tolist():
                        bad.setdefault(row, f'column "{name}": {columns[name][row]} is no {kind}')
        if schema.positive is not None:
            columns[schema.label] = (columns[schema.label] >= schema.positive).astype(np.float32)
        if not bad:
            return TextPart(columns, [])
        good = np.ones(batch.num_rows, bool)
        good[list(bad)] = False
        faults = [RowFault(first + row + 1, what) for row, what in sorted(bad.items())]
        return TextPart({name: _of(values, good) for name, values in columns.items()}, faults)

    def _numbers(self, name: str, array: pa.Array, dtype: Any) -> np.ndarray:
        try:
            plain = pc.cast(array, pa.float64() if dtype is np.float64 else pa.float32(), safe=False)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
            raise UserError(f'{self._path}: column "{name}" is {array.type}; wanted numbers') from None
        return pc.fill_null(plain, float("nan")).to_numpy(zero_copy_only=False)

    def _codes(self, name: str, array: pa.Array, tail: int = 0) -> np.ndarray:
        try:
            text = pc.fill_null(pc.cast(array, pa.string()), "")
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
            raise UserError(f'{self._path}: column "{name}" is {array.type}; wanted text or whole numbers') from None
        text = pa.concat_arrays([text])  # without an offset into its buffers
        _, offsets, data = text.buffers()
        places = np.frombuffer(offsets, np.int32, len(text) + 1)
        return hash_strings(places, np.frombuffer(data, np.uint8) if data else np.empty(0, np.uint8), tail=tail)

    def _lists(self, name: str, array: pa.Array) -> tuple[np.ndarray, np.ndarray]:
        if not pa.types.is_list(array.type) and not pa.types.is_large_list(array.type):
            raise UserError(f'{self._path}: column "{name}" is {array.type}; wanted a list')
        offsets = array.offsets.to_numpy(zero_copy_only=False)
        return self._codes(name, array.flatten()), (offsets[1:] - offsets[0]).astype(np.int32)


def _files_under(path: Path) -> list[Path]:
    """All files of a directory of Parquet files, or the one file."""
    if not path.is_dir():
        return [path]
    found = [file for file in path.rglob("*") if not file.is_dir()]
    if not any(file.suffix == ".parquet" for file in found):
        raise UserError(
            f"{path}: a directory without .parquet files; name one text file, or set data.kind=stream for a "
            "directory that grows"
        )
    return found


@contextmanager
def _readable(path: Path | str) -> Iterator[None]:
    try:
        yield
    except (OSError, pa.ArrowInvalid) as error:
        raise UserError(f"{path}: not readable as Parquet ({str(error).splitlines()[0]})") from None


def _wrong(kind: str, values: np.ndarray, schema: Schema) -> np.ndarray:
    match kind:
        case "label":
            return np.isnan(values) if schema.positive is not None else (values != 0) & (values != 1)
        case "weight":
            return ~(values >= 0) | np.isinf(values)
        case "time":
            return ~np.isfinite(values)
    return np.isinf(values)


def _of(values: Any, good: np.ndarray) -> Any:
    if not isinstance(values, tuple):
        return values[good]
    found, ends = values
    lengths = np.diff(ends, prepend=0)
    return found[np.repeat(good, lengths)], np.cumsum(lengths[good]).astype(np.int32)

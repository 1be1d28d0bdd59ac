"""Read the rows of a file to score, in blocks, in the file's order: the columns of features, and key columns unchanged.

Labels, sample weights and times are not read. Which rows form a block depends only on the file and on `max_rows`.

Shape legend: R rows of a block.
"""

import csv
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pcsv

from shardwright.data.logs.click_log import open_file
from shardwright.data.logs.parquet import ParquetLog
from shardwright.data.logs.schema import Schema
from shardwright.data.logs.text import COMPRESSION, TextPart, read_first_line
from shardwright.errors import UserError, did_you_mean
from shardwright.kernels.text_rows import RowFault

Progress = Callable[[int], None]  # receives how much of the file has been read, in the unit of `FeatureFile.size`
Wanted = Callable[[int], bool]  # whether the block of this number is needed


@dataclass(frozen=True)
class RowBlock:
    """R rows. A block that was not wanted has neither columns nor keys."""

    num_rows: int
    columns: dict[str, Any] | None  # by name: values (R,); of a list column (codes, offsets (R + 1,))
    keys: pa.Table | None


class FeatureFile:
    """A text or Parquet file, or a directory of Parquet files, with the columns of a schema's features."""

    def __init__(self, path: Path, schema: Schema, keys: Sequence[str] = ()) -> None:
        """`keys`: columns that blocks have unchanged; those of a text file are texts."""
        if not path.exists():
            raise UserError(f"data={path}: no such file")
        features = schema.features_only()
        if not path.is_dir() and path.suffix != ".parquet":
            features = _drop_columns(path, schema, features)
        self._path, self._keys = path, tuple(keys)
        self._file, features = open_file(path, "", features)
        self._schema = features.resolve(self._file.columns, str(path))
        for key in self._keys:
            if key not in self._file.columns:
                raise UserError(
                    f'keys={",".join(keys)}: {path} has no column "{key}"{did_you_mean(key, self._file.columns)}'
                )

    @property
    def files(self) -> list[Path]:
        return self._file.files

    @property
    def size(self) -> int:
        """Size for progress: bytes of a text file, rows of Parquet."""
        return self._file.num_bytes

    def read_blocks(self, max_rows: int, wanted: Wanted, progress: Progress = lambda _: None) -> Iterator[RowBlock]:
        """Yield all rows in blocks of at most `max_rows`; a malformed row is an error."""
        if isinstance(self._file, ParquetLog):
            return self._read_parquet(self._file, max_rows, wanted, progress)
        return self._read_text(max_rows, wanted, progress)

    def _read_parquet(self, file: ParquetLog, max_rows: int, wanted: Wanted, progress: Progress) -> Iterator[RowBlock]:
        first = 0
        columns = list(dict.fromkeys((*self._schema.used_columns, *self._keys)))
        file.check_columns(columns)
        for number, batch in enumerate(file.read_batches(columns, max_rows)):
            if wanted(number):
                part = file.to_part(batch, self._schema, first)
                self._check(part.faults)
                keys = pa.Table.from_batches([batch]).select(self._keys) if self._keys else None
                yield RowBlock(batch.num_rows, self._to_columns(part), keys)
            else:
                yield RowBlock(batch.num_rows, None, None)
            first += batch.num_rows
            progress(first)

    def _read_text(self, max_rows: int, wanted: Wanted, progress: Progress) -> Iterator[RowBlock]:
        parts = self._file.read_parts(self._schema, max_rows, progress)
        keys = KeyColumns(self._path, self._schema, self._file.columns, self._keys) if self._keys else None
        number = 0
        for part in parts:
            self._check(part.faults)
            num_rows = _num_rows(part)
            if not num_rows:
                continue
            own_keys = keys.take(num_rows) if keys is not None else None
            is_wanted = wanted(number)
            yield RowBlock(num_rows, self._to_columns(part) if is_wanted else None, own_keys if is_wanted else None)
            number += 1

    def _to_columns(self, part: TextPart) -> dict[str, Any]:
        columns = dict(part.columns)
        for name in self._schema.lists:
            codes, ends = columns[name]
            columns[name] = codes, np.concatenate([np.zeros(1, ends.dtype), ends])
        return columns

    def _check(self, faults: Sequence[RowFault]) -> None:
        if faults:
            raise UserError(f"{self._path}: line {faults[0].line}: {faults[0].reason}; fix the row: each gets a score")


class KeyColumns:
    """Columns of a text file as texts, read beside the parser."""

    def __init__(self, path: Path, schema: Schema, columns: Sequence[str], keys: Sequence[str]) -> None:
        self._path, self._schema, self._columns, self._keys = path, schema, columns, list(keys)
        self._batches = self.read_batches()
        self._pending: list[pa.Table] = []

    def take(self, num_rows: int) -> pa.Table:
        """The next rows; text is never read far ahead."""
        while sum(map(len, self._pending)) < num_rows:
            if (batch := next(self._batches, None)) is None:
                raise UserError(
                    f"{self._path}: its key columns have fewer rows than its features; are quotes balanced?"
                )
            self._pending.append(pa.Table.from_batches([batch]))
        table = pa.concat_tables(self._pending)
        self._pending = [table[num_rows:]] if len(table) > num_rows else []
        return table[:num_rows]

    def read_batches(self) -> Iterator[pa.RecordBatch]:
        """Read the columns of all rows."""
        schema, compression = self._schema, COMPRESSION.get(self._path.suffix)
        quotes = '"' if schema.quoted else False
        read = pcsv.ReadOptions(use_threads=False, column_names=list(self._columns) if schema.columns else None)
        parse = pcsv.ParseOptions(delimiter=schema.delimiter, quote_char=quotes, newlines_in_values=schema.quoted)
        types = dict.fromkeys(self._keys, pa.string())
        convert = pcsv.ConvertOptions(include_columns=self._keys, column_types=types, strings_can_be_null=False)
        try:
            with pa.OSFile(str(self._path)) as file:
                stream = pa.CompressedInputStream(file, compression) if compression else file
                yield from pcsv.open_csv(stream, read, parse, convert)
        except (pa.ArrowInvalid, OSError) as error:
            raise UserError(f"{self._path}: its key columns cannot be read ({str(error).splitlines()[0]})") from None


def _num_rows(part: TextPart) -> int:
    values = next(iter(part.columns.values()))
    return len(values[1] if isinstance(values, tuple) else values)


def _drop_columns(path: Path, schema: Schema, features: Schema) -> Schema:
    """The schema for a text file without header that may lack the label, or label, weight and time."""
    if not schema.columns:
        return features
    quoting = csv.QUOTE_MINIMAL if schema.quoted else csv.QUOTE_NONE
    fields = next(csv.reader([read_first_line(path)], delimiter=schema.delimiter, quoting=quoting), [])
    labels = tuple(schema.label_columns.values())
    for dropped in ((), labels, (*labels, schema.weight, schema.time)):
        columns = tuple(name for name in schema.columns if name not in dropped)
        if len(columns) == len(fields):
            return replace(features, columns=columns)
    return features

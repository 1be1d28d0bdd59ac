"""Convert a click log of any format to a Parquet cache: once, atomically, and in bounded memory.

The cache holds values, not table rows: categories as 64-bit hash codes, numbers unchanged. Vocabulary, hashing to rows
and split are applied when the cache is read, so that changes to them need no conversion.
"""

import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from shardwright.data.features.histories import check_sides
from shardwright.data.logs.schema import Schema
from shardwright.data.logs.text import EmptyFile, TextPart
from shardwright.errors import UserError
from shardwright.kernels.text_rows import RowFault
from shardwright.spec import files

VERSION = 1
CACHE_DIRECTORY = ".shardwright/data"
ROWS_FILE = "rows.parquet"  # in the directory of a cache
ROW_GROUP_SIZE = 65_536  # rows per Parquet row group
MAX_FAULTS = 100  # malformed rows recorded with line and reason; all are counted
MAX_MALFORMED_ROWS = 10_000  # conversion stops if malformed rows exceed both this and the valid rows
SAMPLE_BYTES = 1 << 16  # bytes read at each of 16 positions of a file for its fingerprint


class LogFile(Protocol):
    """A log file of any format that can be read in parts."""

    @property
    def columns(self) -> tuple[str, ...]: ...

    @property
    def num_bytes(self) -> int: ...

    @property
    def files(self) -> list[Path]: ...  # all files that are read

    def read_parts(self, schema: Schema, max_rows: int, progress: Callable[[int], None]) -> Iterator[TextPart]: ...


@dataclass(frozen=True, slots=True)
class ConvertedLog:
    """Contents of a cache's log.json."""

    version: int
    origin: str
    schema: Schema  # without "*": all categories by name
    rows: int
    in_time_order: bool  # False: order.npy holds the row numbers sorted by time
    malformed: int
    faults: tuple[tuple[int, str], ...]  # line and reason of the first MAX_FAULTS malformed rows
    known: dict[str, int] = dataclass_field(default_factory=dict)  # by label in `schema.labels`, the rows that have it

    def check_labels(self) -> None:
        """Raise an error if a label is missing in every row."""
        for name, num in self.known.items():
            if not num:
                raise UserError(
                    f'{self.origin}: label "{name}": column "{self.schema.labels[name]}" is empty in all '
                    f"{self.rows:,} rows; drop it from `labels` in the schema, or add its values to the log"
                )


def convert(
    path: Path, log: LogFile, schema: Schema, cache: Path, *, strict: bool, progress: Callable[[int, int], None]
) -> Path:
    """Convert a log unless it is cached; returns its directory under `cache`. Calls progress(bytes, total)."""
    schema = schema.resolve(log.columns, str(path))
    digest = hashlib.sha256(json.dumps([VERSION, schema.plain(), fingerprint(log.files)]).encode()).hexdigest()[:16]
    final = cache / f"{path.name.partition('.')[0]}-{digest}"
    if not (final / "log.json").exists():
        _convert(path, log, schema, final, strict, progress)
    converted = files.read(ConvertedLog, final / "log.json")
    if strict and converted.faults:
        raise _malformed_error(path, RowFault(*converted.faults[0]))
    return final


def fingerprint(paths: Sequence[Path]) -> list[Any]:
    """Identify the contents of files by names, sizes, mtimes and a digest of 16 samples of each."""
    entries = []
    for path in sorted(paths):
        stat, digest = path.stat(), hashlib.sha256()
        with path.open("rb") as stream:
            for position in np.linspace(0, max(0, stat.st_size - SAMPLE_BYTES), 16, dtype=np.int64):
                stream.seek(int(position))
                digest.update(stream.read(SAMPLE_BYTES))
        entries.append([path.name, stat.st_size, stat.st_mtime_ns, digest.hexdigest()])
    return entries


def _convert(
    path: Path, log: LogFile, schema: Schema, final: Path, strict: bool, progress: Callable[[int, int], None]
) -> None:
    """Convert into a temporary directory and rename it. Safe in concurrent processes: the first rename wins."""
    draft = None
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=f".{final.name}-", dir=final.parent))
        _write_cache(path, log, schema, draft, strict, progress)
        with suppress(OSError):
            draft.rename(final)
        if not (final / "log.json").exists():
            raise OSError(f"{draft} could not be renamed")
    except OSError as error:
        raise UserError(
            f"{final.parent}: the cache cannot be written ({error}); set data.cache to another directory"
        ) from None
    finally:
        if draft is not None:
            shutil.rmtree(draft, ignore_errors=True)


def _write_cache(
    path: Path, log: LogFile, schema: Schema, draft: Path, strict: bool, progress: Callable[[int, int], None]
) -> None:
    malformed, faults, times = 0, [], []
    known = dict.fromkeys(schema.labels, 0)
    first_label = next(iter(schema.label_columns.values()))
    with RowGroupWriter(draft / ROWS_FILE, _arrow_schema(schema)) as groups:
        for part in log.read_parts(schema, ROW_GROUP_SIZE, lambda done: progress(done, log.num_bytes)):
            if strict and part.faults:
                raise _malformed_error(path, part.faults[0])
            malformed += len(part.faults)
            faults += part.faults[: MAX_FAULTS - len(faults)]
            if len(part.columns[first_label]):
                check_sides(schema, part.columns, str(path), groups.rows)
                for name, column in schema.labels.items():
                    part.columns[column] = _to_label(path, schema, name, part.columns[column])
                    known[name] += int(np.count_nonzero(~np.isnan(part.columns[column])))
                groups.add(part)
                if schema.time is not None:
                    times.append(part.columns[schema.time].copy())
            if malformed > max(MAX_MALFORMED_ROWS, groups.rows):
                break
        groups.flush()
    rows = groups.rows
    if malformed > rows:
        raise UserError(
            f"{path}: {malformed:,} of {rows + malformed:,} rows are malformed, so its format probably differs; "
            f"the first: line {faults[0].line}: {faults[0].reason}"
        )
    if not rows:
        raise EmptyFile(f"{path}: the file has no rows")
    time = np.concatenate(times) if times else np.empty(0)
    times.clear()
    is_in_order = bool((time[1:] >= time[:-1]).all())
    if not is_in_order:
        np.save(draft / "order.npy", np.argsort(time, kind="stable"), allow_pickle=False)
    reasons = tuple((fault.line, fault.reason) for fault in faults)
    converted = ConvertedLog(VERSION, str(path), schema, rows, is_in_order, malformed, reasons, known)
    files.write(converted, draft / "log.json")


def _to_label(path: Path, schema: Schema, name: str, values: np.ndarray) -> np.ndarray:
    """The values of a column as a label: 0 or 1, or NaN where it is missing."""
    if name in schema.positives:
        return np.where(np.isnan(values), values, values >= schema.positives[name]).astype(np.float32)
    invalid = values[~(np.isnan(values) | (values == 0) | (values == 1))]
    if len(invalid):
        raise UserError(
            f'{path}: label "{name}": column "{schema.labels[name]}" has {invalid[0]:g}; wanted 0, 1 or nothing; or '
            f"set positives.{name} in the schema to the value from which on it is 1"
        )
    return values


def read_chunk_columns(file: pq.ParquetFile, number: int, schema: Schema) -> dict[str, Any]:
    """Read the columns of row group `number` of a cache: an array each, for a list (codes, offsets)."""
    table = file.read_row_group(number, use_threads=False)
    columns: dict[str, Any] = {}
    for name in table.column_names:
        array = table[name].combine_chunks()
        if name in schema.lists:
            columns[name] = array.values.to_numpy(zero_copy_only=True), array.offsets.to_numpy(zero_copy_only=True)
        else:
            columns[name] = array.to_numpy(zero_copy_only=True)
    return columns


class RowGroupWriter:
    """Writes a Parquet file with row groups of ROW_GROUP_SIZE rows, from parts of any size."""

    def __init__(self, path: Path, arrow_schema: pa.Schema) -> None:
        self.rows = 0
        self._arrow_schema = arrow_schema
        self._pending: list[pa.Table] = []
        self._writer = pq.ParquetWriter(
            path, arrow_schema, compression="NONE", use_dictionary=False, write_statistics=False
        )

    def add(self, part: TextPart) -> None:
        """Append a part; its arrays are copied or written, so the caller may reuse them."""
        table = pa.table(_to_arrow(part, self._arrow_schema), schema=self._arrow_schema)
        self.rows += len(table)
        if len(table) == ROW_GROUP_SIZE and not self._pending:
            self._writer.write_table(table, row_group_size=ROW_GROUP_SIZE)
            return
        self._pending.append(pa.table(_to_arrow(part, self._arrow_schema, copy=True), schema=self._arrow_schema))
        if sum(map(len, self._pending)) >= ROW_GROUP_SIZE:
            pending = pa.concat_tables(self._pending).combine_chunks()
            num_full = len(pending) - len(pending) % ROW_GROUP_SIZE
            self._writer.write_table(pending[:num_full], row_group_size=ROW_GROUP_SIZE)
            self._pending = [pending[num_full:]] if num_full < len(pending) else []

    def flush(self) -> None:
        """Write the remaining rows as a last, smaller row group."""
        if self._pending:
            self._writer.write_table(pa.concat_tables(self._pending).combine_chunks(), row_group_size=ROW_GROUP_SIZE)
            self._pending = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._writer.close()


def _malformed_error(path: Path, fault: RowFault) -> UserError:
    return UserError(
        f"{path}: line {fault.line}: {fault.reason}; fix it, or skip and count such rows with "
        "strict=false (in a recipe data.strict=false)"
    )


def _arrow_schema(schema: Schema) -> pa.Schema:
    types: dict[str, pa.DataType] = {
        "label": pa.float32(),
        "weight": pa.float32(),
        "number": pa.float32(),
        "time": pa.float64(),
        "category": pa.uint64(),
        "hexadecimal": pa.uint64(),
        "list": pa.list_(pa.uint64()),
    }
    return pa.schema(
        [
            pa.field(name, types[kind], nullable=False)
            for kind, names in schema.columns_by_kind.items()
            for name in names
        ]
    )


def _to_arrow(part: TextPart, arrow_schema: pa.Schema, *, copy: bool = False) -> list[pa.Array]:
    arrays = []
    for field in arrow_schema:
        values = part.columns[field.name]
        if copy:
            values = tuple(map(np.copy, values)) if isinstance(values, tuple) else values.copy()
        if isinstance(values, tuple):
            codes, ends = values
            offsets = pa.array(np.concatenate([np.zeros(1, np.int32), ends]))
            arrays.append(pa.ListArray.from_arrays(offsets, pa.array(codes)).cast(field.type))
        else:
            arrays.append(pa.array(values))
    return arrays

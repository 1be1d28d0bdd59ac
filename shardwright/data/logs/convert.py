"""A click log of any form to a Parquet cache: streamed in bounded memory, made once, complete or absent.

The cache holds values, not rows of tables: categories as 64-bit codes, numbers as they are. What depends on a choice of
vocabulary, hashing or split is computed when the cache is read, so that trying another costs no conversion.
"""

import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from shardwright.data.logs.schema import Schema
from shardwright.data.logs.text import EmptyFile, TextPart
from shardwright.errors import UserError
from shardwright.kernels.text_rows import RowFault
from shardwright.spec import files

VERSION = 1
CACHE_DIRECTORY = ".shardwright/data"
ROWS_FILE = "rows.parquet"  # in a cache
ROW_GROUP_SIZE = 65_536  # rows of a row group
MAX_FAULTS = 100  # told by line; all are counted
MAX_MALFORMED_ROWS = 10_000  # malformed rows, if they are more than the good ones, that end the reading
SAMPLE_BYTES = 1 << 16  # bytes read at each of some places of a file, to tell it from another


class LogFile(Protocol):
    """A file of some form."""

    @property
    def columns(self) -> tuple[str, ...]: ...

    @property
    def num_bytes(self) -> int: ...

    @property
    def files(self) -> list[Path]: ...  # all that is read

    def read_parts(self, schema: Schema, max_rows: int, progress: Callable[[int], None]) -> Iterator[TextPart]: ...


@dataclass(frozen=True, slots=True)
class ConvertedLog:
    """What a cache holds."""

    version: int
    origin: str
    schema: Schema  # categories spelled out
    rows: int
    in_time_order: bool  # else order.npy says which row comes when
    malformed: int
    faults: tuple[tuple[int, str], ...]  # line and what is wrong, the first of them


def convert(
    path: Path, log: LogFile, schema: Schema, cache: Path, *, strict: bool, progress: Callable[[int, int], None]
) -> Path:
    """The directory under `cache` of this log, made unless it is there; `progress` is told bytes done and in all."""
    schema = schema.resolve(log.columns, str(path))
    key = hashlib.sha256(json.dumps([VERSION, asdict(schema), fingerprint(log.files)]).encode()).hexdigest()[:16]
    final = cache / f"{path.name.partition('.')[0]}-{key}"
    if not (final / "log.json").exists():
        _convert(path, log, schema, final, strict, progress)
    found = files.read(ConvertedLog, final / "log.json")
    if strict and found.faults:
        raise _malformed(path, RowFault(*found.faults[0]))
    return final


def fingerprint(paths: Sequence[Path]) -> list[Any]:
    """Tells one state of some files from another without reading all of them: sizes, times, some places."""
    found = []
    for path in sorted(paths):
        stat, digest = path.stat(), hashlib.sha256()
        with path.open("rb") as stream:
            for place in np.linspace(0, max(0, stat.st_size - SAMPLE_BYTES), 16, dtype=np.int64):
                stream.seek(int(place))
                digest.update(stream.read(SAMPLE_BYTES))
        found.append([path.name, stat.st_size, stat.st_mtime_ns, digest.hexdigest()])
    return found


def _convert(
    path: Path, log: LogFile, schema: Schema, final: Path, strict: bool, progress: Callable[[int, int], None]
) -> None:
    """Beside others that may be at the same: each writes a draft of its own, the first to be done gives it the name."""
    draft = None
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=f".{final.name}-", dir=final.parent))
        _write(path, log, schema, draft, strict, progress)
        with suppress(OSError):
            draft.rename(final)
        if not (final / "log.json").exists():
            raise OSError(f"{draft} could not be renamed")
    except OSError as error:
        raise UserError(
            f"{final.parent}: the cache cannot be written ({error}); set data.cache to another place"
        ) from None
    finally:
        if draft is not None:
            shutil.rmtree(draft, ignore_errors=True)


def _write(
    path: Path, log: LogFile, schema: Schema, draft: Path, strict: bool, progress: Callable[[int, int], None]
) -> None:
    malformed, faults, times = 0, [], []
    with RowGroupWriter(draft / ROWS_FILE, _arrow_schema(schema)) as groups:
        for part in log.read_parts(schema, ROW_GROUP_SIZE, lambda done: progress(done, log.num_bytes)):
            if strict and part.faults:
                raise _malformed(path, part.faults[0])
            malformed += len(part.faults)
            faults += part.faults[: MAX_FAULTS - len(faults)]
            if len(part.columns[schema.label]):
                groups.add(part)
                if schema.time is not None:
                    times.append(part.columns[schema.time].copy())
            if malformed > max(MAX_MALFORMED_ROWS, groups.rows):
                break
        groups.flush()
    rows = groups.rows
    if malformed > rows:
        raise UserError(
            f"{path}: {malformed:,} of {rows + malformed:,} rows are malformed, so the format is probably another; "
            f"the first: line {faults[0].line}: {faults[0].reason}"
        )
    if not rows:
        raise EmptyFile(f"{path}: the file has no rows")
    time = np.concatenate(times) if times else np.empty(0)
    times.clear()
    in_order = bool((time[1:] >= time[:-1]).all())
    if not in_order:
        np.save(draft / "order.npy", np.argsort(time, kind="stable"), allow_pickle=False)
    told = tuple((fault.line, fault.reason) for fault in faults)
    files.write(ConvertedLog(VERSION, str(path), schema, rows, in_order, malformed, told), draft / "log.json")


class RowGroupWriter:
    """A Parquet file of row groups of CHUNK rows, from parts of any size."""

    def __init__(self, path: Path, arrow_schema: pa.Schema) -> None:
        options: dict[str, Any] = {"compression": "NONE", "use_dictionary": False, "write_statistics": False}
        self.rows = 0
        self._form = arrow_schema
        self._held: list[pa.Table] = []
        self._writer = pq.ParquetWriter(path, arrow_schema, **options)

    def add(self, part: TextPart) -> None:
        """Take a part; its arrays may change afterwards."""
        table = pa.table(_arrays(part, self._form), schema=self._form)
        self.rows += len(table)
        if len(table) == ROW_GROUP_SIZE and not self._held:
            self._writer.write_table(table, row_group_size=ROW_GROUP_SIZE)
            return
        self._held.append(pa.table(_arrays(part, self._form, copied=True), schema=self._form))
        if sum(map(len, self._held)) >= ROW_GROUP_SIZE:
            joined = pa.concat_tables(self._held).combine_chunks()
            whole = len(joined) - len(joined) % ROW_GROUP_SIZE
            self._writer.write_table(joined[:whole], row_group_size=ROW_GROUP_SIZE)
            self._held = [joined[whole:]] if whole < len(joined) else []

    def flush(self) -> None:
        if self._held:
            self._writer.write_table(pa.concat_tables(self._held).combine_chunks(), row_group_size=ROW_GROUP_SIZE)
            self._held = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._writer.close()


def _malformed(path: Path, fault: RowFault) -> UserError:
    return UserError(
        f"{path}: line {fault.line}: {fault.reason}; mend it, or leave such rows out and counted with data.strict=false"
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


def _arrays(part: TextPart, form: pa.Schema, *, copied: bool = False) -> list[pa.Array]:
    arrays = []
    for field in form:
        values = part.columns[field.name]
        if copied:
            values = tuple(map(np.copy, values)) if isinstance(values, tuple) else values.copy()
        if isinstance(values, tuple):
            codes, ends = values
            offsets = pa.array(np.concatenate([np.zeros(1, np.int32), ends]))
            arrays.append(pa.ListArray.from_arrays(offsets, pa.array(codes)).cast(field.type))
        else:
            arrays.append(pa.array(values))
    return arrays

"""A click log of any form to a Parquet cache: streamed in bounded memory, made once, complete or absent.

The cache holds values, not rows of tables: categories as 64-bit codes, numbers as they are. What depends on a choice of
vocabulary, hashing or split is computed when the cache is read, so that trying another costs no conversion.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from shardwright.data.schema import Schema
from shardwright.data.text import Part
from shardwright.errors import UserError
from shardwright.kernels.rows import Fault
from shardwright.spec import files

VERSION = 1
CHUNK = 65_536  # rows of a row group
MOST_FAULTS = 100  # told by line; all are counted
SAMPLED = 1 << 16  # bytes read at each of some places of a file, to tell it from another


class Log(Protocol):
    """A file of some form."""

    @property
    def columns(self) -> tuple[str, ...]: ...

    @property
    def num_bytes(self) -> int: ...

    def parts(self, schema: Schema, rows: int, progress: Callable[[int], None]) -> Iterator[Part]: ...


@dataclass(frozen=True, slots=True)
class Converted:
    """What a cache holds."""

    version: int
    origin: str
    schema: Schema  # categories spelled out
    rows: int
    in_time_order: bool  # else order.npy says which row comes when
    malformed: int
    faults: tuple[tuple[int, str], ...]  # line and what is wrong, the first of them


def convert(
    path: Path, log: Log, schema: Schema, cache: Path, *, strict: bool, progress: Callable[[int, int], None]
) -> Path:
    """The directory under `cache` of this log, made unless it is there; `progress` is told bytes done and in all."""
    schema = schema.over(log.columns, str(path))
    key = hashlib.sha256(json.dumps([VERSION, asdict(schema), fingerprint(path)]).encode()).hexdigest()[:16]
    final = cache / f"{path.name.partition('.')[0]}-{key}"
    if not (final / "log.json").exists():
        draft = cache / f".{final.name}.{os.getpid()}"
        try:
            shutil.rmtree(draft, ignore_errors=True)
            draft.mkdir(parents=True)
            _write(path, log, schema, draft, strict, progress)
            if not final.exists():
                draft.rename(final)
        except OSError as error:
            raise UserError(
                f"{cache}: the cache cannot be written ({error}); set data.cache to another place"
            ) from None
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    found = files.read(Converted, final / "log.json")
    if strict and found.faults:
        raise _malformed(path, Fault(*found.faults[0]))
    return final


def fingerprint(path: Path) -> list[Any]:
    """Tells one state of a file or directory from another without reading all of it: sizes, times, some places."""
    found = []
    for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
        if file.is_file():
            stat, digest = file.stat(), hashlib.sha256()
            with file.open("rb") as stream:
                for place in np.linspace(0, max(0, stat.st_size - SAMPLED), 16, dtype=np.int64):
                    stream.seek(int(place))
                    digest.update(stream.read(SAMPLED))
            found.append([file.name, stat.st_size, stat.st_mtime_ns, digest.hexdigest()])
    return found


def _write(
    path: Path, log: Log, schema: Schema, draft: Path, strict: bool, progress: Callable[[int, int], None]
) -> None:
    rows, malformed, faults, times = 0, 0, [], []
    form = _arrow_schema(schema)
    options: dict[str, Any] = {"compression": "NONE", "use_dictionary": False, "write_statistics": False}
    with pq.ParquetWriter(draft / "rows.parquet", form, **options) as writer:
        for part in log.parts(schema, CHUNK, lambda done: progress(done, log.num_bytes)):
            if strict and part.faults:
                raise _malformed(path, part.faults[0])
            malformed += len(part.faults)
            faults += part.faults[: MOST_FAULTS - len(faults)]
            if size := len(part.columns[schema.label]):
                writer.write_table(pa.table(_arrays(part, form), schema=form), row_group_size=CHUNK)
                rows += size
                if schema.time is not None:
                    times.append(part.columns[schema.time].copy())
    if malformed > rows:
        raise UserError(
            f"{path}: {malformed:,} of {rows + malformed:,} rows are malformed, so the format is probably another; "
            f"the first: line {faults[0].line}: {faults[0].what}"
        )
    if not rows:
        raise UserError(f"{path}: the file has no rows")
    time = np.concatenate(times) if times else np.empty(0)
    in_order = bool((time[1:] >= time[:-1]).all())
    if not in_order:
        np.save(draft / "order.npy", np.argsort(time, kind="stable"), allow_pickle=False)
    told = tuple((fault.line, fault.what) for fault in faults)
    files.write(Converted(VERSION, str(path), schema, rows, in_order, malformed, told), draft / "log.json")


def _malformed(path: Path, fault: Fault) -> UserError:
    return UserError(
        f"{path}: line {fault.line}: {fault.what}; mend it, or leave such rows out and counted with data.strict=false"
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
        [pa.field(name, types[kind], nullable=False) for kind, names in schema.kinds.items() for name in names]
    )


def _arrays(part: Part, form: pa.Schema) -> list[pa.Array]:
    arrays = []
    for field in form:
        values = part.columns[field.name]
        if isinstance(values, tuple):
            codes, ends = values
            offsets = pa.array(np.concatenate([np.zeros(1, np.int32), ends]))
            arrays.append(pa.ListArray.from_arrays(offsets, pa.array(codes)).cast(field.type))
        else:
            arrays.append(pa.array(values))
    return arrays

"""A click log by what it is called: from a path and a few settings to samples."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from shardwright.data.features.transforms import Encoding
from shardwright.data.logs.convert import CACHE_DIRECTORY, ConvertedLog, LogFile, convert
from shardwright.data.logs.movielens import MovieLens
from shardwright.data.logs.parquet import ParquetLog
from shardwright.data.logs.schema import SCHEMAS, Schema, read_schema
from shardwright.data.logs.text import TextFile, read_first_line
from shardwright.data.sources.clicks import ClickLog, Split
from shardwright.errors import UserError
from shardwright.spec import files


def open_log(
    kind: str,
    path: str = "",
    *,
    schema: str = "",
    split: Mapping[str, Any] | None = None,
    encoding: Mapping[str, Any] | None = None,
    strict: bool = True,
    memory: float = 1.0,
    cache: str = CACHE_DIRECTORY,
) -> ClickLog:
    """The training part of a log: criteo, avazu or movielens, or kind "log" with a schema in a TOML file.

    `memory` is how many GiB each process may keep of it.
    """
    if not path:
        raise UserError('key "data.path" is missing; name the log, as in data=FILE')
    log, form = _found(kind, Path(path), schema)
    with _progress(path) as progress:
        made = convert(Path(path), log, form, Path(cache), strict=strict, progress=progress)
    _tell_malformed(path, files.read(ConvertedLog, made / "log.json"))
    return ClickLog(
        str(made),
        files.from_plain(Split, dict(split or {}), "data.split"),
        files.from_plain(Encoding, dict(encoding or {}), "data.encoding"),
        memory=int(memory * 2**30),
    )


def guess_kind(path: str) -> str:
    """The kind of a log, by its columns."""
    if Path(path).is_dir() and any(Path(path, name).exists() for name in ("u.data", "u.data.zst", "ratings.csv")):
        return "movielens"
    if not os.path.exists(path):  # Path.exists raises for a name that is too long
        raise UserError(f"{path}: no such file")
    if not Path(path).is_dir() and Path(path).suffix != ".parquet":
        line = read_first_line(Path(path))
        for kind, schema in SCHEMAS.items():
            fields = line.split(schema.delimiter)
            if len(fields) == len(schema.columns) or not schema.columns and schema.label in fields:
                return kind
    raise UserError(f"{path}: not a log known by name; say what its columns are with schema=FILE.toml")


def _found(kind: str, path: Path, schema: str) -> tuple[LogFile, Schema]:
    if not os.path.exists(path):  # Path.exists raises for a name that is too long
        raise UserError(f"data.path={path}: no such file")
    if schema and kind != "log":
        raise UserError(
            f"data.schema={schema} with data.kind={kind}, which knows its columns; remove it, or set data.kind=log"
        )
    if kind == "movielens":
        log = MovieLens(path)
        return log, log.schema
    form = SCHEMAS.get(kind)
    if form is None:
        if not schema:
            raise UserError('key "data.schema" is missing: a TOML file that says what the columns of the log are')
        form = read_schema(schema)
    if path.suffix == ".parquet" or path.is_dir():
        return ParquetLog(path), replace(form, columns=())
    return TextFile(path, form), form


def _tell_malformed(path: str, found: ConvertedLog) -> None:
    if found.malformed:
        line, what = found.faults[0]
        console = Console(stderr=True)
        total = found.rows + found.malformed
        told = (
            f"{path}: {found.malformed:,} of {total:,} rows are malformed and left out; the first, line {line}: {what}"
        )
        console.print(told, style="yellow", highlight=False, soft_wrap=True)


@contextmanager
def _progress(path: str) -> Iterator[Any]:
    """A bar on a terminal while a log is converted; nothing if its cache is there."""
    columns = (TextColumn(f"reading {Path(path).name}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=None, visible=False)
        yield lambda done, total: progress.update(task, completed=done, total=total, visible=True)

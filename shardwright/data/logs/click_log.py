"""Open a click log as a source, from its path and data settings."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from glob import glob
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
    schema: str | Mapping[str, Any] = "",
    split: Mapping[str, Any] | None = None,
    encoding: Mapping[str, Any] | None = None,
    strict: bool = True,
    memory: float = 1.0,
    cache: str = CACHE_DIRECTORY,
) -> ClickLog:
    """Open the training split of a click log, converting the log to a cache first if necessary.

    `kind` is criteo, avazu or movielens, or "log" with a schema: a TOML file, or its keys. `memory` is in GiB per
    process.
    """
    _check_path(path)
    log, parsed_schema = _resolve_log(kind, Path(path), schema)
    return _make_source(_convert_log(path, log, parsed_schema, cache, strict), split, encoding, memory)


def open_movielens(
    path: str = "",
    *,
    history: int = 0,
    split: Mapping[str, Any] | None = None,
    encoding: Mapping[str, Any] | None = None,
    strict: bool = True,
    memory: float = 1.0,
    cache: str = CACHE_DIRECTORY,
) -> ClickLog:
    """Open the training split of a MovieLens directory, as `open_log`.

    `history`: number of earlier ratings of its user that a rating has as the list feature "history", the last ones
    strictly earlier in time, with side columns "history_genre" and "history_liked"; 0: none.
    """
    if history < 0:
        raise UserError(f"data.history={history}; wanted the number of earlier ratings of a history, 0 for none")
    if not history:
        return open_log("movielens", path, split=split, encoding=encoding, strict=strict, memory=memory, cache=cache)
    _check_path(path)
    log = MovieLens(Path(path), history)
    source = _make_source(_convert_log(path, log, log.schema, cache, strict), split, encoding, memory)
    if source.split.by != "time":
        raise UserError(
            f"data.history={history} with data.split.by={source.split.by}: ratings that are held out would be in "
            "training rows' histories; use split by time"
        )
    return source


def convert_files(
    key: str, patterns: str | Sequence[str], kind: str, schema: Schema, *, strict: bool = True, cache: str
) -> tuple[str, ...]:
    """Convert files that are evaluated on, each to its own cache; returns the caches.

    `patterns`: files, directories and globs, the value of `key`. `schema`: of the training log. Rows keep their order.
    """
    caches, schema = [], replace(schema, time=None)
    for path in list_files(key, patterns):
        log, file_schema = open_file(path, kind, schema)
        with show_progress(str(path)) as progress:
            directory = convert(path, log, file_schema, Path(cache), strict=strict, progress=progress)
        _warn_malformed(str(path), files.read(ConvertedLog, directory / "log.json"))
        caches.append(str(directory))
    return tuple(caches)


def list_files(key: str, patterns: str | Sequence[str]) -> list[Path]:
    """The files that paths and globs name, the value of `key`; a directory of Parquet files is one of them."""
    paths = []
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        matches = [pattern] if os.path.exists(pattern) else sorted(glob(pattern))
        if not matches:
            raise UserError(f"{key}={pattern}: no such file")
        for path in map(Path, matches):
            is_text_directory = path.is_dir() and not any(path.rglob("*.parquet"))
            if not is_text_directory:
                paths.append(path)
                continue
            texts = [each for each in path.iterdir() if each.is_file() and not each.name.startswith((".", "_"))]
            if not texts:
                raise UserError(f"{key}={path}: the directory has no files")
            paths += sorted(texts)
    return paths


def open_file(path: Path, kind: str, schema: Schema) -> tuple[LogFile, Schema]:
    """Open a file with the columns of a log of this kind; returns it and the schema to read it with."""
    if path.suffix == ".parquet" or path.is_dir():
        return ParquetLog(path), replace(schema, columns=())
    known = SCHEMAS.get(kind)
    if known is not None and not schema.columns:  # the schema of a Parquet log has none
        schema = replace(schema, columns=known.columns)
    return TextFile(path, schema), schema


def guess_kind(path: str) -> str:
    """Guess the kind of a log from its columns or file names; empty: none of the known ones."""
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
    return ""


def _check_path(path: str) -> None:
    if not path:
        raise UserError('key "data.path" is missing; set the path of the log, as in data=FILE')
    if not os.path.exists(path):  # Path.exists raises for a name that is too long
        raise UserError(f"data.path={path}: no such file")


def _convert_log(path: str, log: LogFile, schema: Schema, cache: str, strict: bool) -> Path:
    """The directory of the converted log; converts it if it is not cached."""
    with show_progress(path) as progress:
        directory = convert(Path(path), log, schema, Path(cache), strict=strict, progress=progress)
    converted = files.read(ConvertedLog, directory / "log.json")
    _warn_malformed(path, converted)
    converted.check_labels()
    return directory


def _make_source(
    directory: Path, split: Mapping[str, Any] | None, encoding: Mapping[str, Any] | None, memory: float
) -> ClickLog:
    return ClickLog(
        str(directory),
        files.from_plain(Split, dict(split or {}), "data.split"),
        files.from_plain(Encoding, dict(encoding or {}), "data.encoding"),
        memory=int(memory * 2**30),
    )


def _resolve_log(kind: str, path: Path, schema: str | Mapping[str, Any]) -> tuple[LogFile, Schema]:
    if schema and kind != "log":
        raise UserError(
            f"data.schema={schema} with data.kind={kind}, which has its own schema; remove it, or set data.kind=log"
        )
    if kind == "movielens":
        log = MovieLens(path)
        return log, log.schema
    parsed_schema = SCHEMAS.get(kind)
    if parsed_schema is None:
        if not schema:
            raise UserError(
                'key "data.schema" is missing: a TOML file, or a section, that describes the columns of the log'
            )
        parsed_schema = read_schema(schema)
    return open_file(path, kind, parsed_schema)


def _warn_malformed(path: str, log: ConvertedLog) -> None:
    if log.malformed:
        line, fault = log.faults[0]
        console = Console(stderr=True)
        total = log.rows + log.malformed
        warning = (
            f"{path}: {log.malformed:,} of {total:,} rows are malformed and skipped; the first, line {line}: {fault}"
        )
        console.print(warning, style="yellow", highlight=False, soft_wrap=True)


@contextmanager
def show_progress(path: str) -> Iterator[Any]:
    """Show a progress bar on a terminal while a log is converted; nothing if it is already cached."""
    columns = (TextColumn(f"reading {Path(path).name}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=None, visible=False)
        yield lambda done, total: progress.update(task, completed=done, total=total, visible=True)

"""Read documents from text files (one each), JSON lines (one a line) and Parquet (one a row)."""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from shardwright.data.logs.text import COMPRESSION, read_blocks
from shardwright.errors import UserError, check_file_name, check_regular_file, did_you_mean

TEXT_SUFFIXES = (".txt", ".md", ".text")
LINE_SUFFIXES = (".jsonl", ".ndjson")
PARQUET_SUFFIX = ".parquet"
SUFFIXES = (*TEXT_SUFFIXES, *LINE_SUFFIXES, PARQUET_SUFFIX)
ROWS_PER_READ = 1024


def list_documents(path: Path) -> list[Path]:
    """The files of a folder and its subfolders that have documents, in the order of their names; or the file itself."""
    if not os.path.exists(path):  # Path.exists raises for a name that is too long
        raise UserError(f"{path}: no such file")
    if not path.is_dir():
        return [path]
    files = sorted(
        file
        for file in path.rglob("*")
        if file.is_file()
        and document_suffix(file) in SUFFIXES
        and not any(part.startswith(".") for part in file.relative_to(path).parts)
    )
    if not files:
        raise UserError(f"{path}: no text in this folder; its files need one of the suffixes {', '.join(SUFFIXES)}")
    return files


def document_suffix(file: Path) -> str:
    """The suffix that tells the format, before the one of a compression."""
    return Path(file.stem).suffix if file.suffix in COMPRESSION else file.suffix


def read_documents(
    files: list[Path], field: str, progress: Callable[[int, int], None] = lambda done, total: None
) -> Iterator[bytes]:
    """Yield the documents that have text; `field` is theirs in JSON lines and Parquet. Calls progress(bytes, total)."""
    total, done = sum(file.stat().st_size for file in files), 0
    for file in files:
        check_file_name(file)
        check_regular_file(file)
        suffix = document_suffix(file)
        if suffix == PARQUET_SUFFIX:
            documents = _read_parquet(file, field)
        elif suffix in LINE_SUFFIXES:
            documents = _read_lines(file, field)
        else:
            documents = iter([b"".join(read_blocks(file))])
        yield from filter(None, documents)
        done += file.stat().st_size
        progress(done, total)


def _read_lines(file: Path, field: str) -> Iterator[bytes]:
    for number, line in enumerate(_split_lines(file), start=1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except ValueError as error:
            raise UserError(f"{file}: line {number}: bad JSON: {error}") from None
        text = value.get(field) if isinstance(value, dict) else None
        if not isinstance(text, str):
            fields = sorted(name for name, item in value.items() if isinstance(item, str)) if text is None else []
            hint = did_you_mean(field, fields) if fields else ""
            raise UserError(f'{file}: line {number}: no text in field "{field}"{hint}; set field=NAME')
        yield text.encode(errors="surrogatepass")


def _split_lines(file: Path) -> Iterator[bytes]:
    rest = b""
    for block in read_blocks(file):
        *lines, rest = (rest + block).split(b"\n")
        yield from lines
    yield rest


def _read_parquet(file: Path, field: str) -> Iterator[bytes]:
    try:
        with pq.ParquetFile(file) as table:
            names = table.schema_arrow.names
            if field not in names:
                raise UserError(f'{file}: no column "{field}"{did_you_mean(field, names)}; set field=NAME')
            for batch in table.iter_batches(ROWS_PER_READ, columns=[field]):
                for text in batch.column(0).cast(pa.large_binary()):
                    yield text.as_py() or b""
    except (pa.ArrowException, OSError) as error:
        raise UserError(f'{file}: column "{field}" cannot be read as text ({error})') from None

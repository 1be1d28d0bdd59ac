"""A delimited text file, plain or compressed, in parts: bounded memory, every malformed row told by its line."""

import csv
from collections.abc import Callable, Iterator
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pyarrow as pa

from shardwright.data.logs.schema import Schema
from shardwright.errors import UserError, check_file_name, check_regular_file
from shardwright.kernels.text_rows import PADDING, ColumnKind, ColumnSpec, Parser, RowFault, TextFormat

BLOCK_BYTES = 4 << 20
MAX_ROW_BYTES = 16 << 20
BOM = b"\xef\xbb\xbf"
COMPRESSION = MappingProxyType({".gz": "gzip", ".zst": "zstd", ".bz2": "bz2", ".lz4": "lz4"})


class EmptyFile(UserError):
    """A file without rows."""


class TextPart(NamedTuple):
    """Some rows: per column its values (R,), or for a list its codes and where each row ends (R,)."""

    columns: dict[str, Any]
    faults: list[RowFault]


class TextFile:
    """Its columns, and its rows block by block."""

    def __init__(self, path: Path, schema: Schema) -> None:
        self._path, self._schema = path, schema
        self.files = [path]
        head = next(_blocks(path))
        if not head.strip():
            raise EmptyFile(f"{path}: the file is empty")
        self.columns = schema.columns or self._header(head)

    @property
    def num_bytes(self) -> int:
        """Of the file as it lies on disk."""
        return self._path.stat().st_size

    def read_parts(
        self, schema: Schema, max_rows: int, progress: Callable[[int], None] = lambda _: None
    ) -> Iterator[TextPart]:
        """The text in parts of at most so many rows; `progress` is told how many bytes of the file have been read."""
        kinds: dict[str, ColumnKind] = {name: kind for kind, names in schema.columns_by_kind.items() for name in names}
        tails = dict(schema.tail)
        columns = [ColumnSpec(name, kinds.get(name, "skip"), tails.get(name, 0)) for name in self.columns]
        parser = Parser(
            columns, TextFormat(schema.delimiter, schema.quoted, schema.separator, schema.positive), max_rows
        )
        rest, headed = b"", bool(schema.columns)
        for data in _blocks(self._path, progress):
            if not headed:
                headed, (_, _, data) = True, data.partition(b"\n")
                parser.skip_line()
            text = b"".join((rest, data, bytes(PADDING)))
            begin, consumed = 0, -1
            while begin < len(text) - PADDING and (consumed or parser.is_full):
                consumed, faults = parser.parse(text[begin:] if begin else text, is_last=not data)
                begin += consumed
                if parser.is_full and not parser.num_rows:
                    raise UserError(
                        f"{self._path}: line {parser.next_line}: a list longer than the reader has room for"
                    )
                if parser.is_full or faults:
                    yield TextPart(parser.take(), faults)
            rest = text[begin:-PADDING]
            if len(rest) > MAX_ROW_BYTES:
                hint = "is a quote open, or the delimiter another?"
                raise UserError(
                    f"{self._path}: line {parser.next_line}: a row of over {MAX_ROW_BYTES >> 20} MB; {hint}"
                )
        yield TextPart(parser.take(), [])

    def _header(self, head: bytes) -> tuple[str, ...]:
        line = head.splitlines()[0]
        try:
            first = line.decode()
        except UnicodeDecodeError as error:
            raise UserError(f"{self._path}: the header is not UTF-8 at byte {error.start}; save it as UTF-8") from None
        quoting = csv.QUOTE_MINIMAL if self._schema.quoted else csv.QUOTE_NONE
        (names,) = csv.reader([first], delimiter=self._schema.delimiter, quoting=quoting)
        for name in names:
            if names.count(name) > 1:
                raise UserError(f'{self._path}: the header names column "{name}" twice')
        return tuple(names)


def read_first_line(path: Path) -> str:
    return next(_blocks(path)).partition(b"\n")[0].decode("utf-8", "replace").rstrip("\r")


def _blocks(path: Path, progress: Callable[[int], None] = lambda _: None) -> Iterator[bytes]:
    """The text in pieces, the last one empty; a byte order mark is dropped."""
    done, kind = 0, COMPRESSION.get(path.suffix)
    check_file_name(path)
    check_regular_file(path)
    try:
        with pa.OSFile(str(path)) as file:
            stream = pa.CompressedInputStream(file, kind) if kind else file
            data = stream.read(BLOCK_BYTES).removeprefix(BOM)
            while data:
                yield data
                done += len(data)
                progress(file.tell())
                data = stream.read(BLOCK_BYTES)
    except OSError as error:
        where = f"damaged after {done:,} bytes of text" if done else "cannot be read"
        raise UserError(f"{path}: {where} ({error}); fetch the file again") from None
    yield b""

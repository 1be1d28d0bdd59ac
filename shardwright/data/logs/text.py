"""Read a delimited text file, plain or compressed, in bounded memory; report malformed rows by line."""

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
    """R rows: by column the values (R,); of a list column all codes, and the end of each row's codes (R,)."""

    columns: dict[str, Any]
    faults: list[RowFault]


class TextFile:
    """A delimited text file as a LogFile; compression is detected by its suffix."""

    def __init__(self, path: Path, schema: Schema) -> None:
        self._path, self._schema = path, schema
        self.files = [path]
        first_block = next(read_blocks(path))
        if not first_block.strip():
            raise EmptyFile(f"{path}: the file is empty")
        self.columns = schema.columns or self._parse_header(first_block)

    @property
    def num_bytes(self) -> int:
        """Size of the file on disk, compressed if it is."""
        return self._path.stat().st_size

    def read_parts(
        self, schema: Schema, max_rows: int, progress: Callable[[int], None] = lambda _: None
    ) -> Iterator[TextPart]:
        """Parse the text in parts of at most `max_rows` rows; calls progress(bytes of the file read so far)."""
        if schema.history_times:
            history = next(iter(schema.history_times))
            raise UserError(
                f'{self._path}: history_times of "{history}": lists of times are read from Parquet files only; convert '
                "the log to Parquet, or drop history_times"
            )
        kinds: dict[str, ColumnKind] = {name: kind for kind, names in schema.columns_by_kind.items() for name in names}
        tails = dict(schema.tail)
        columns = [ColumnSpec(name, kinds.get(name, "skip"), tails.get(name, 0)) for name in self.columns]
        parser = Parser(
            columns, TextFormat(schema.delimiter, schema.quoted, schema.separator, schema.positive), max_rows
        )
        rest, is_header_read = b"", bool(schema.columns)
        for data in read_blocks(self._path, progress):
            if not is_header_read:
                is_header_read, (_, _, data) = True, data.partition(b"\n")
                parser.skip_line()
            text = b"".join((rest, data, bytes(PADDING)))
            begin, consumed = 0, -1
            while begin < len(text) - PADDING and (consumed or parser.is_full):
                consumed, faults = parser.parse(text[begin:] if begin else text, is_last=not data)
                begin += consumed
                if parser.is_full and not parser.num_rows:
                    raise UserError(
                        f"{self._path}: line {parser.next_line}: the list has more items than the parser's buffer"
                    )
                if parser.is_full or faults:
                    yield TextPart(parser.take(), faults)
            rest = text[begin:-PADDING]
            if len(rest) > MAX_ROW_BYTES:
                hint = "is a quote not closed, or the delimiter wrong?"
                raise UserError(
                    f"{self._path}: line {parser.next_line}: a row of over {MAX_ROW_BYTES >> 20} MB; {hint}"
                )
        yield TextPart(parser.take(), [])

    def _parse_header(self, first_block: bytes) -> tuple[str, ...]:
        line = first_block.splitlines()[0]
        try:
            header = line.decode()
        except UnicodeDecodeError as error:
            raise UserError(f"{self._path}: the header is not UTF-8 at byte {error.start}; save it as UTF-8") from None
        quoting = csv.QUOTE_MINIMAL if self._schema.quoted else csv.QUOTE_NONE
        (names,) = csv.reader([header], delimiter=self._schema.delimiter, quoting=quoting)
        for name in names:
            if names.count(name) > 1:
                raise UserError(f'{self._path}: the header names column "{name}" twice')
        return tuple(names)


def read_first_line(path: Path) -> str:
    return next(read_blocks(path)).partition(b"\n")[0].decode("utf-8", "replace").rstrip("\r")


def read_blocks(path: Path, progress: Callable[[int], None] = lambda _: None) -> Iterator[bytes]:
    """Yield the decompressed text in blocks of BLOCK_BYTES, then an empty block; drop a byte order mark."""
    num_read, compression = 0, COMPRESSION.get(path.suffix)
    check_file_name(path)
    check_regular_file(path)
    try:
        with pa.OSFile(str(path)) as file:
            stream = pa.CompressedInputStream(file, compression) if compression else file
            data = stream.read(BLOCK_BYTES).removeprefix(BOM)
            while data:
                yield data
                num_read += len(data)
                progress(file.tell())
                data = stream.read(BLOCK_BYTES)
    except OSError as error:
        problem = f"damaged after {num_read:,} bytes of text" if num_read else "cannot be read"
        raise UserError(f"{path}: {problem} ({error}); fetch the file again") from None
    yield b""

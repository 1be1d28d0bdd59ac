"""The texts of a category column's values, found again by their hash codes in the files that they were read from."""

from collections.abc import Collection, Iterator, Sequence
from itertools import accumulate
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from shardwright.data.logs.click_log import open_file
from shardwright.data.logs.parquet import ParquetLog
from shardwright.data.logs.row_blocks import KeyColumns
from shardwright.data.logs.schema import Schema
from shardwright.kernels.hashing import hash_strings

BLOCK_ROWS = 65_536


def name_values(origins: Sequence[str], schema: Schema, column: str, codes: Collection[int]) -> dict[int, str]:
    """A text for each code; for a code that is not in the files any more, the code itself."""
    missing, names = set(codes) - {0}, {0: "(missing)"}
    tail = dict(schema.tail).get(column, 0)
    for origin in origins:
        for texts in _read_texts(Path(origin), schema, column) if missing else ():
            encoded = [text.encode() for text in texts]
            offsets = np.fromiter(accumulate(map(len, encoded), initial=0), np.int32, len(encoded) + 1)
            hashes = hash_strings(offsets, np.frombuffer(b"".join(encoded), np.uint8), tail=tail)
            for code, text in zip(hashes.tolist(), texts, strict=True):
                if code in missing:
                    names[code] = text[-tail:] if tail else text
                    missing.remove(code)
            if not missing:
                break
    return {code: names.get(code, f"#{code:016x}") for code in codes}


def _read_texts(path: Path, schema: Schema, column: str) -> Iterator[list[str]]:
    """The distinct texts of each block of a column; nothing for a file that is gone, or no longer has it."""
    if not path.exists() or path.is_dir() and not any(path.rglob("*.parquet")):
        return
    file, schema = open_file(path, "", schema)
    if column not in file.columns:
        return
    if isinstance(file, ParquetLog):
        for batch in file.read_batches([column], BLOCK_ROWS):
            yield pc.fill_null(pc.cast(batch.column(column), pa.string()), "").unique().to_pylist()
    else:
        for batch in KeyColumns(path, schema, file.columns, [column]).read_batches():
            yield batch.column(0).unique().to_pylist()

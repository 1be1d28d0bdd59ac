"""Columns of numbers in text files of a folder."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
from pyarrow import csv

from shardwright.data.graphs.graph import no_pairs
from shardwright.errors import UserError

SEPARATORS = (",", "\t", " ")


def files_named(folder: Path, name: str) -> list[Path]:
    """The files NAME.* of a folder."""
    return sorted(path for path in folder.iterdir() if path.is_file() and path.name.split(".")[0] == name)


def read_columns(folder: Path, name: str, widths: Sequence[int] = (2,), *, optional: bool = False) -> np.ndarray:
    """The whole numbers of the file NAME.* of a folder, (lines, columns)."""
    if optional and not files_named(folder, name):
        return no_pairs()
    path = find_file(folder, name)
    columns = _read(path, np.int64, "whole numbers")
    if columns.shape[1] not in widths:
        wanted = " or ".join(map(str, widths))
        raise UserError(f"{path}: {columns.shape[1]} columns a line; wanted {wanted}")
    return columns


def read_numbers(folder: Path, name: str) -> np.ndarray:
    """The numbers of the file NAME.* of a folder, a text file or a NumPy array, (lines, columns) float32."""
    path = find_file(folder, name)
    if path.suffix != ".npy":
        return _read(path, np.float32, "numbers")
    try:
        return np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise UserError(f"{path}: not a plain NumPy array: {error}") from error


def find_file(folder: Path, name: str) -> Path:
    paths = files_named(folder, name)
    if len(paths) != 1:
        contents = ", ".join(path.name for path in sorted(folder.iterdir())) or "nothing"
        raise UserError(f"{folder}: {len(paths)} files named {name}.*, wanted one; the folder has {contents}")
    return paths[0]


def _read(path: Path, dtype: type, wanted: str) -> np.ndarray:
    with pa.input_stream(str(path), compression="detect") as stream:
        lines = stream.read().lstrip().split(b"\n", 1)
        while lines[0].startswith(b"#") and len(lines) > 1:
            lines = lines[1].split(b"\n", 1)
    separator = next((each for each in SEPARATORS if each.encode() in lines[0].strip()), ",")
    options = csv.ReadOptions(autogenerate_column_names=True)
    try:
        table = csv.read_csv(pa.BufferReader(b"\n".join(lines)), options, csv.ParseOptions(delimiter=separator))
        columns = [column.to_numpy().astype(dtype, casting="same_kind") for column in table.columns]
    except (pa.ArrowInvalid, TypeError) as error:
        raise UserError(f"{path}: not lines of {wanted} (a header begins with #): {error}") from error
    return np.stack(columns, 1)

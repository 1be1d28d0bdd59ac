"""Score every row of a file, in order, in bounded memory.

A thread reads and transforms the rows while this process scores them. Several processes share the parts: each reads
the file, and scores every part whose number is its rank, modulo their number.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from shardwright.checkpoint import step_directories
from shardwright.comm.mesh import select_device
from shardwright.data.features.row_batches import encode_rows
from shardwright.data.features.transforms import Transforms
from shardwright.data.loading.loader import to_batch
from shardwright.data.loading.read_ahead import read_ahead
from shardwright.data.logs.convert import fingerprint
from shardwright.data.logs.row_blocks import FeatureFile
from shardwright.data.sources.source import NumpyBatch
from shardwright.errors import UserError
from shardwright.kernels.matmul import library_in_use, preferred_library, use_library
from shardwright.serving.export import export_run
from shardwright.serving.manifest import MANIFEST_FILE, TRANSFORMS_DIRECTORY
from shardwright.serving.predictor import Predictor
from shardwright.serving.scoring.parts import ScoreParts
from shardwright.serving.scoring.score_columns import column_names, score_columns

VERSION = 1  # of parts: the parts of another version are written again
BATCH_SIZE = 4096  # samples that are scored at once
BLOCKS_AHEAD = 2  # transformed blocks that wait to be scored
EXPORT_FOLDER = "export"  # of a run, in the directory of the parts
Show = Callable[[int, int], None]  # receives how much of the input has been read, in its unit, and its rows


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """What to score, and where to."""

    model: Path  # a run, one of its checkpoints, or an export
    data: Path
    output: Path
    keys: tuple[str, ...] = ()
    block_rows: int = 65_536  # rows that are read at once
    part_blocks: int = 4  # blocks of a part
    device: str = "cpu"  # of the dense model: "auto", "cpu" or "cuda"


@dataclass(frozen=True, slots=True)
class _Rows:
    """Transformed rows of a block; `batches` is None if they need no scores."""

    num_rows: int
    read: int  # how much of the input has been read
    batches: list[NumpyBatch] | None
    keys: pa.Table | None


def prepare(request: ScoreRequest) -> ScoreParts:
    """Open the parts of the output, and export a run for scoring. Call it once, before any `score_parts`."""
    parts = ScoreParts(request.output)
    is_export = (request.model / MANIFEST_FILE).is_file()
    source = request.model if is_export else step_directories.resolve_best(request.model)
    manifest = source / (MANIFEST_FILE if is_export else step_directories.MANIFEST)
    parts.open(
        {
            "version": VERSION,
            "model": [str(source.resolve()), hashlib.sha256(manifest.read_bytes()).hexdigest()],
            "data": fingerprint(_open_paths(request.data)),
            "keys": list(request.keys),
            "rows": [BATCH_SIZE, request.block_rows, request.part_blocks],
            **({} if request.device == "cpu" else {"device": request.device}),
        }
    )
    try:
        if not is_export and not (parts.directory / EXPORT_FOLDER).is_dir():
            export_run(source, parts.directory / EXPORT_FOLDER)
        _open(request, parts)  # an error of columns or keys, before other processes are started
    except BaseException:
        parts.close()
        raise
    return parts


def score_parts(request: ScoreRequest, rank: int = 0, size: int = 1, show: Show = lambda *_: None) -> int:
    """Score and write the parts of a rank that are missing; returns the number of rows that it scored."""
    use_library(library_in_use() or preferred_library())
    parts = ScoreParts(request.output)
    if parts.are_all_complete:
        return 0
    predictor, file, transforms = _open(request, parts)

    def is_wanted(block: int) -> bool:
        part = block // request.part_blocks
        return part % size == rank and not parts.is_complete(part)

    num_rows = num_blocks = num_scored = 0
    tables: list[pa.Table] = []
    rows_ahead = read_ahead(_transformed_rows(file, transforms, request.block_rows, is_wanted), BLOCKS_AHEAD)
    with closing(predictor), closing(rows_ahead):
        for rows in rows_ahead:
            part, is_last_of_part = num_blocks // request.part_blocks, (num_blocks + 1) % request.part_blocks == 0
            if rows.batches is not None:
                tables.append(_score(predictor, rows.batches, rows.keys))
                num_scored += rows.num_rows
            if tables and is_last_of_part:
                parts.write(part, pa.concat_tables(tables))
                tables = []
            num_blocks += 1
            num_rows += rows.num_rows
            show(rows.read, num_rows)
    if not num_rows:
        raise UserError(f"data={request.data}: the file has no rows")
    if tables:
        parts.write((num_blocks - 1) // request.part_blocks, pa.concat_tables(tables))
    parts.write_total(-(-num_blocks // request.part_blocks), num_rows)
    return num_scored


def input_size(request: ScoreRequest) -> int:
    """Size of the input, in the unit that `Show` receives."""
    return FeatureFile(request.data, _read_transforms(request, ScoreParts(request.output)).schema).size


def _open(request: ScoreRequest, parts: ScoreParts) -> tuple[Predictor, FeatureFile, Transforms]:
    transforms = _read_transforms(request, parts)
    file = FeatureFile(request.data, transforms.schema, request.keys)
    predictor = Predictor(_export_folder(request, parts), device=select_device(request.device))
    names = (*request.keys, *column_names(predictor))
    if len(set(names)) < len(names):
        raise UserError(
            f"keys={','.join(request.keys)}: a name is given twice, or is that of the scores; the output "
            f"has the columns {', '.join(names)}"
        )
    return predictor, file, transforms


def _export_folder(request: ScoreRequest, parts: ScoreParts) -> Path:
    exported = parts.directory / EXPORT_FOLDER
    return exported if exported.is_dir() else request.model


def _read_transforms(request: ScoreRequest, parts: ScoreParts) -> Transforms:
    folder = _export_folder(request, parts) / TRANSFORMS_DIRECTORY
    if not folder.is_dir():
        raise UserError(f"{request.model}: its data are no click log, so it has no columns to read from a file")
    return Transforms.read(folder)


def _open_paths(path: Path) -> list[Path]:
    """The files of the input, for its fingerprint."""
    if not path.exists():
        raise UserError(f"data={path}: no such file")
    return [file for file in path.rglob("*") if file.is_file()] if path.is_dir() else [path]


def _transformed_rows(
    file: FeatureFile, transforms: Transforms, block_rows: int, is_wanted: Callable[[int], bool]
) -> Iterator[_Rows]:
    """Read and transform all rows, block by block. Runs in a thread."""
    read = [0]
    for block in file.read_blocks(block_rows, is_wanted, lambda done: read.__setitem__(0, done)):
        batches = None
        if block.columns is not None:
            batches = list(encode_rows(transforms, block.columns, block.num_rows, BATCH_SIZE))
        yield _Rows(block.num_rows, read[0], batches, block.keys)


def _score(predictor: Predictor, batches: Sequence[NumpyBatch], keys: pa.Table | None) -> pa.Table:
    """Score the rows of a block: a table of their keys and scores."""
    columns: dict[str, Any] = {} if keys is None else {name: keys[name] for name in keys.column_names}
    outputs = [dict(score_columns(predictor, to_batch(batch))) for batch in batches]
    for name in outputs[0]:
        columns[name] = np.concatenate([output[name].numpy() for output in outputs])
    return pa.table(columns)

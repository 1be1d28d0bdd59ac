"""Publications: model updates for predictors that follow a run, as rows changed since the previous.

A publication has new values of rows, not differences: a model of any step since the publication's base can apply it.
The first publication of a run, and the first after its ranks restart, is full.
"""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from shardwright.checkpoint import step_directories
from shardwright.checkpoint.arrays import ArrayReader
from shardwright.checkpoint.manifest import Manifest, StoredRectangle
from shardwright.errors import UserError
from shardwright.rectangle import Rectangle


@dataclass(frozen=True, slots=True)
class ModelVersion:
    """Version of the weights of a predictor or a publication."""

    step: int
    line: str  # lineage id: new at every start of the ranks and at every load of a state
    time: float  # when training reached these weights, in seconds since the epoch
    digest: str = ""  # of the publication's manifest; empty: the weights are of a checkpoint


def pending_publications(root: Path, current: ModelVersion) -> list[tuple[Path, Manifest]]:
    """The publications to apply to the `current` version, in order; empty if it is the newest.

    Versions are compared by time, because a restarted run may publish earlier steps again.
    """
    pending: list[tuple[Path, Manifest]] = []
    path = next(reversed(step_directories.list_checkpoints(root)), None)
    while path is not None:
        manifest = step_directories.read_manifest(path)
        if _is_included(manifest, current) or not pending and manifest.numbers["course"]["time"] <= current.time:
            return pending
        pending.insert(0, (path, manifest))
        if not manifest.base or _can_apply(manifest, current):
            return pending
        path = root / manifest.base
        if not (path / step_directories.MANIFEST).is_file():
            raise UserError(
                f"{root}: publications between step {current.step} and step {manifest.step} are gone; start from a "
                "newer export, or raise train.keep_publications"
            )
    return pending


def _is_included(manifest: Manifest, current: ModelVersion) -> bool:
    """Whether the `current` version already includes a publication."""
    if current.digest:
        return manifest.digest == current.digest
    return manifest.numbers["course"]["line"] == current.line and manifest.step <= current.step


def _can_apply(manifest: Manifest, current: ModelVersion) -> bool:
    """Whether the `current` version is at or after a publication's base, and before the publication."""
    base_step = int(manifest.base.rpartition("-")[2])
    return base_step <= current.step < manifest.step and manifest.numbers["course"]["line"] == current.line


def read_rectangles(path: Path, manifest: Manifest) -> Iterator[Rectangle]:
    """Read a publication block by block; each block's digest is verified."""
    with closing(ArrayReader(path)) as reader:
        for name, entry in manifest.tensors.items():
            for piece in entry.pieces:
                yield from _read_blocks(reader, name, entry.shape, piece)


def _read_blocks(reader: ArrayReader, name: str, shape: tuple[int, ...], piece: StoredRectangle) -> Iterator[Rectangle]:
    numbers = None if piece.numbers is None else reader.read_array(piece.numbers).flatten().long()
    scales = None if piece.scales is None else reader.read_array(piece.scales)
    for start, end in reader.block_ranges(piece.values):
        values = reader.read_block(piece.values, start)
        if scales is not None:
            values = values.to(scales.dtype) * scales[start:end]
        if numbers is not None:
            yield Rectangle(name, shape, values, numbers[start:end], piece.cols)
        elif piece.rows is not None:
            yield Rectangle(name, shape, values, (piece.rows[0] + start, piece.rows[0] + end), piece.cols)

"""Publications: what a run tells those who follow it, each the rows that changed since the one before.

A row is told as it is, not how it moved: whoever has any state since a publication's own beginning may take it. The
first of a run, and the first after its ranks were started again, is whole.
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
    """How far somebody has come."""

    step: int
    line: str  # of a run, from one start of its ranks, or load of a state, to the next
    time: float  # when that state was
    digest: str = ""  # of the publication it was; empty: a checkpoint


def pending_publications(root: Path, current: ModelVersion) -> list[tuple[Path, Manifest]]:
    """The publications to take from here, in their order; none where this is the newest.

    The steps of a run may begin anew at an earlier one: what was said last is told by its time.
    """
    found: list[tuple[Path, Manifest]] = []
    at = next(reversed(step_directories.list_checkpoints(root)), None)
    while at is not None:
        manifest = step_directories.read_manifest(at)
        if _stands_at(manifest, current) or not found and manifest.numbers["course"]["time"] <= current.time:
            return found
        found.insert(0, (at, manifest))
        if not manifest.base or _may_take(manifest, current):
            return found
        at = root / manifest.base
        if not (at / step_directories.MANIFEST).is_file():
            raise UserError(
                f"{root}: publications between step {current.step} and step {manifest.step} are gone; "
                "start from a newer "
                "export, or raise train.keep_publications"
            )
    return found


def _stands_at(manifest: Manifest, now: ModelVersion) -> bool:
    """Whether all that this says is known."""
    if now.digest:
        return manifest.digest == now.digest
    return manifest.numbers["course"]["line"] == now.line and manifest.step <= now.step


def _may_take(manifest: Manifest, now: ModelVersion) -> bool:
    """Whether it may follow on what is known, although that was not the publication before it."""
    since = int(manifest.base.rpartition("-")[2])
    return since <= now.step < manifest.step and manifest.numbers["course"]["line"] == now.line


def read_rectangles(path: Path, manifest: Manifest) -> Iterator[Rectangle]:
    """What a publication says, block by block, each digest compared."""
    with closing(ArrayReader(path)) as reader:
        for name, entry in manifest.tensors.items():
            for piece in entry.pieces:
                yield from _blocks(reader, name, entry.shape, piece)


def _blocks(reader: ArrayReader, name: str, shape: tuple[int, ...], piece: StoredRectangle) -> Iterator[Rectangle]:
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

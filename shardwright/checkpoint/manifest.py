"""What a checkpoint holds: of every tensor the pieces that cover it, and of every block of a file its digest."""

from dataclasses import dataclass, field, replace
from typing import Any

from shardwright.spec import files

VERSION = 2
MODEL_PREFIX = "model."  # what names of the model's state dict begin with
BLOCK_BYTES = 16 << 20  # read, and verified, at a time


@dataclass(frozen=True, slots=True)
class StoredArray:
    """An array in a file: some rows of so many bytes, and a digest of each block of rows."""

    file: str
    offset: int
    dtype: str
    shape: tuple[int, int]
    block: int  # rows of a block
    digests: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StoredRectangle:
    """Rows of a tensor, a run or each by its number, in these columns; `scales`: each row is multiplied by its own."""

    values: StoredArray
    rows: tuple[int, int] | None
    numbers: StoredArray | None = None
    cols: tuple[tuple[int, int], ...] = ()
    scales: StoredArray | None = None


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """`full`: the pieces are all of it; else the rows that differ from the checkpoint before."""

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[StoredRectangle, ...]
    full: bool = True
    error: float = 0.0  # largest, that rounding made to a value


@dataclass(frozen=True, slots=True)
class RankPart:
    """What one rank wrote."""

    tensors: dict[str, TensorEntry]
    numbers: dict[str, Any]
    bytes_: int
    pause_seconds: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Manifest:
    version: int
    step: int
    ranks: int  # that wrote it
    base: str  # the checkpoint it goes on from, and the digest of that one's manifest; empty: it is whole
    base_digest: str
    tensors: dict[str, TensorEntry]
    bytes_: int
    pause_seconds: float  # of the rank that had the longest
    seconds: float
    numbers: dict[str, Any] = field(default_factory=dict)  # step counts, optimizer settings, data position
    digest: str = ""  # of all the rest

    def with_digest(self) -> "Manifest":
        return replace(self, digest=files.digest(replace(self, digest="")))

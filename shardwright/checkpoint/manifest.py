"""The manifest of a checkpoint: where every tensor is stored, and a digest of every block of a file."""

from dataclasses import dataclass, field, replace
from typing import Any

from shardwright.spec import files

VERSION = 2
MODEL_PREFIX = "model."  # of the names of the model's state dict
BLOCK_BYTES = 16 << 20  # size of a block, which is read and verified as a unit


@dataclass(frozen=True, slots=True)
class StoredArray:
    """A matrix in a file, with a SHA-256 digest of each block of rows."""

    file: str
    offset: int  # bytes from the start of the file
    dtype: str
    shape: tuple[int, int]
    block: int  # rows per block
    digests: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StoredRectangle:
    """Some rows of a tensor, in some of its columns, as stored in a file."""

    values: StoredArray
    rows: tuple[int, int] | None  # range; None: `numbers` has the row numbers
    numbers: StoredArray | None = None
    cols: tuple[tuple[int, int], ...] = ()  # ranges, concatenated in `values`; empty: all columns
    scales: StoredArray | None = None  # factor of each row, if values are int8


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor in a checkpoint."""

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[StoredRectangle, ...]
    full: bool = True  # whether `pieces` cover the tensor; else they have the rows that differ from the base
    error: float = 0.0  # largest absolute rounding error of a value


@dataclass(frozen=True, slots=True)
class RankPart:
    """Description of the file that one rank wrote."""

    tensors: dict[str, TensorEntry]
    numbers: dict[str, Any]
    bytes_: int
    pause_seconds: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Manifest:
    """Contents of a checkpoint's manifest.json."""

    version: int
    step: int
    ranks: int  # number of ranks that wrote the checkpoint
    base: str  # name of the checkpoint that this is an increment of; empty: this is a full checkpoint
    base_digest: str  # of the base's manifest
    tensors: dict[str, TensorEntry]
    bytes_: int
    pause_seconds: float  # how long training waited, on the slowest rank
    seconds: float  # how long writing took, on the slowest rank
    numbers: dict[str, Any] = field(default_factory=dict)  # step counts, optimizer settings, data position
    digest: str = ""  # of all other fields

    def with_digest(self) -> "Manifest":
        return replace(self, digest=files.digest(replace(self, digest="")))

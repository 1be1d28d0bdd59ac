"""What a checkpoint holds: of every logical tensor the shape and the pieces that cover it, of every file the digest."""

from dataclasses import dataclass, field
from typing import Any

VERSION = 1


@dataclass(frozen=True, slots=True)
class Piece:
    """One rectangle of a tensor: entry `key` of `file`, covering these rows (all columns)."""

    file: str
    key: str
    rows: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Entry:
    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class Manifest:
    version: int
    step: int
    tensors: dict[str, Entry]
    files: dict[str, str]  # name -> sha256
    numbers: dict[str, Any] = field(default_factory=dict)  # step counts, optimizer settings, data position

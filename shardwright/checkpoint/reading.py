"""A checkpoint as a source of any rectangles, whoever wrote which, in any order or precision.

A tensor's newest whole version comes first, then the rows that later checkpoints of the chain have changed. Of a piece
only the blocks that hold wanted rows are read, and straight into their place where they are stored as they are wanted.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwright.checkpoint import step_directories
from shardwright.checkpoint.arrays import ArrayReader, damaged_header_error, read_header
from shardwright.checkpoint.manifest import Manifest, StoredRectangle, TensorEntry
from shardwright.errors import UserError
from shardwright.kernels.rounding import copy_finite
from shardwright.rectangle import IndexRange, Rectangle, full_rectangle

THREADS = 4  # also on fewer cores: some wait for the disk while others compare digests


class Checkpoint:
    """A complete checkpoint; what is read of it is verified."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        chain = step_directories.read_chain(self.path)
        self._paths = [path for path, _ in chain]
        self._chain = [(manifest, ArrayReader(path)) for path, manifest in chain]

    @property
    def manifest(self) -> Manifest:
        return self._chain[-1][0]

    @property
    def numbers(self) -> Mapping[str, Any]:
        return self.manifest.numbers

    @property
    def tensor_specs(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """The dtype and shape of each tensor."""
        return {name: (entry.dtype, entry.shape) for name, entry in self.manifest.tensors.items()}

    def read_tensor(self, name: str) -> Tensor:
        """All of one tensor."""
        dtype, shape = self.tensor_specs[name]
        found = torch.empty(shape, dtype=getattr(torch, dtype))
        self.fill([full_rectangle(name, found)])
        return found

    @torch.no_grad()
    def fill(self, rectangles: Sequence[Rectangle]) -> None:
        """Put their values where they are wanted; what is of another dtype is rounded to that one's nearest."""
        places = [one if _in_place(one) else replace(one, values=_blank(one)) for one in rectangles]
        layers = [list(self._layers(one.name)) for one in places]
        with ThreadPoolExecutor(THREADS) as pool:
            for turn in range(max(map(len, layers), default=0)):
                blocks = [
                    [block for piece in entry.pieces for block in _blocks(reader, piece, one)]
                    for one, found in zip(places, layers, strict=True)
                    for entry, reader in found[turn : turn + 1]
                ]
                done = iter(pool.map(_Block.__call__, chain.from_iterable(blocks)))
                filled = [sum(islice(done, len(each))) for each in blocks]
                if turn == 0:
                    self._check_covered(places, filled)
        for one, place in zip(rectangles, places, strict=True):
            if one is not place:
                copy_finite(one.values, place.values)

    def verify(self, progress: Callable[[int], None] = lambda _: None) -> int:
        """Check the headers and read every block of this checkpoint and of those it is based on; returns their bytes.
        Calls `told` with the bytes read so far."""
        total = 0
        for path, (manifest, reader) in zip(self._paths, self._chain, strict=True):
            _check_headers(path, manifest)
            for entry in manifest.tensors.values():
                for piece in entry.pieces:
                    for stored in filter(None, (piece.values, piece.numbers, piece.scales)):
                        for start, _ in reader.block_ranges(stored):
                            found = reader.read_block(stored, start)
                            total += found.numel() * found.element_size()
                            progress(total)
        return total

    def close(self) -> None:
        for _, reader in self._chain:
            reader.close()

    def _layers(self, name: str) -> Iterator[tuple[TensorEntry, ArrayReader]]:
        """The newest whole version of a tensor, and what has changed since."""
        last = max(
            at
            for at, (manifest, _) in enumerate(self._chain)
            if name in manifest.tensors and manifest.tensors[name].full
        )
        for manifest, reader in self._chain[last:]:
            yield manifest.tensors[name], reader

    def _check_covered(self, wanted: Sequence[Rectangle], filled: Sequence[int]) -> None:
        for one, numbers in zip(wanted, filled, strict=True):
            if numbers != one.values.numel():
                raise UserError(
                    f'{self.path}: of {one.values.numel()} numbers of "{one.name}" its files have {numbers}; '
                    "use an earlier checkpoint"
                )


@dataclass(frozen=True, slots=True, eq=False)
class _Block:
    """A block of a piece that has wanted rows: where they are there, and where here."""

    reader: ArrayReader
    piece: StoredRectangle
    wanted: Rectangle
    start: int
    there: slice | Tensor
    here: slice | Tensor
    columns: Sequence[tuple[IndexRange, IndexRange]]
    scales: Tensor | None  # of each row of the piece

    def __call__(self) -> int:
        """Put them in place; how many numbers that were."""
        stored, values_RC = self.piece.values, self.wanted.values_RC
        if self._as_stored(values_RC):
            return self.reader.read_block(stored, self.start, out=values_RC[self.here]).numel()
        found = self.reader.read_block(stored, self.start)
        if self.scales is not None:
            found = found.to(self.scales.dtype) * self.scales[self.start : self.start + len(found)]
        done = 0
        for (a, b), (c, d) in self.columns:
            taken = found[self.there, a:b]
            values_RC[self.here, c:d] = taken.to(values_RC.dtype)
            done += taken.numel()
        return done

    def _as_stored(self, values_RC: Tensor) -> bool:
        """Whether the block can be read to where it is wanted."""
        stored = self.piece.values
        rows = min(stored.block, stored.shape[0] - self.start)
        return (
            isinstance(self.there, slice)
            and (self.there.start, self.there.stop) == (0, rows)
            and values_RC.dtype == getattr(torch, stored.dtype)
            and self.scales is None
            and [*self.columns] == [((0, stored.shape[1]), (0, values_RC.shape[1]))]
        )


def _check_headers(path: Path, manifest: Manifest) -> None:
    """Compare the header of every file, which other libraries read, with the arrays in the manifest."""
    expected: dict[str, set[tuple[Any, ...]]] = {}
    for name, entry in manifest.tensors.items():
        for piece in entry.pieces:
            for suffix, stored in (("", piece.values), (".rows", piece.numbers), (".scales", piece.scales)):
                if stored is not None:  # several tensors may share the numbers of their rows
                    array = (suffix, "" if suffix == ".rows" else name, stored.dtype, stored.shape, stored.offset)
                    expected.setdefault(stored.file, set()).add(array)
    for file, arrays_ in expected.items():
        header, actual, numbers = read_header(path / file), set[tuple[Any, ...]](), list[int]()
        for key, (dtype, shape, offset) in header.items():
            match = re.fullmatch(r"((.*)#(\d+))(\.rows|\.scales|)", key, re.DOTALL)
            if match is None or match[1] not in header:
                raise damaged_header_error(path / file)
            numbers += [] if match[4] else [int(match[3])]
            actual.add((match[4], "" if match[4] == ".rows" else match[2], dtype, shape, offset))
        if actual != arrays_ or sorted(numbers) != list(range(len(numbers))):
            raise damaged_header_error(path / file)


def _blocks(reader: ArrayReader, piece: StoredRectangle, wanted: Rectangle) -> Iterator[_Block]:
    columns = list(_shared_columns(piece, wanted))
    if not columns or not wanted.num_rows:
        return
    scales = None if piece.scales is None else reader.read_array(piece.scales)
    if piece.rows is not None and isinstance(wanted.rows, tuple):
        first, here = piece.rows[0], wanted.rows[0]
        for start, end in reader.block_ranges(piece.values):
            low, high = max(first + start, here), min(first + end, wanted.rows[1])
            if low < high:
                there = slice(low - first - start, high - first - start)
                yield _Block(reader, piece, wanted, start, there, slice(low - here, high - here), columns, scales)
        return
    there, here = _shared_rows(reader, piece, wanted)
    for start, end in reader.block_ranges(piece.values):
        low, high = torch.searchsorted(there, torch.tensor([start, end])).tolist()
        if low < high:
            yield _Block(reader, piece, wanted, start, there[low:high] - start, here[low:high], columns, scales)


def _shared_columns(piece: StoredRectangle, wanted: Rectangle) -> Iterator[tuple[IndexRange, IndexRange]]:
    """Columns that both have: runs there and here."""
    there = 0
    for a, b in piece.cols or ((0, wanted.width),):
        here = 0
        for c, d in wanted.columns:
            low, high = max(a, c), min(b, d)
            if low < high:
                yield (low - a + there, high - a + there), (low - c + here, high - c + here)
            here += d - c
        there += b - a


def _shared_rows(reader: ArrayReader, piece: StoredRectangle, wanted: Rectangle) -> tuple[Tensor, Tensor]:
    """Rows that both have: where in the piece, ascending, and where here."""
    if piece.rows is not None:
        assert isinstance(wanted.rows, Tensor)
        (there,) = torch.where((wanted.rows >= piece.rows[0]) & (wanted.rows < piece.rows[1]))
        at, order = (wanted.rows[there] - piece.rows[0]).long().sort()
        return at, there[order]
    assert piece.numbers is not None
    numbers = reader.read_array(piece.numbers).flatten().long()
    if isinstance(wanted.rows, tuple):
        (there,) = torch.where((numbers >= wanted.rows[0]) & (numbers < wanted.rows[1]))
        return there, numbers[there] - wanted.rows[0]
    rows, order = wanted.rows.long().sort()
    at = torch.searchsorted(rows, numbers).clamp(max=len(rows) - 1)
    (there,) = torch.where(rows[at] == numbers)
    return there, order[at[there]]


def _in_place(one: Rectangle) -> bool:
    return one.values.is_contiguous() and one.values.device.type == "cpu"


def _blank(one: Rectangle) -> Tensor:
    return torch.empty(one.values.shape, dtype=one.values.dtype)

"""Read any rectangles of a checkpoint in any dtype, independent of how the tensors were sharded.

A tensor is read from the newest checkpoint of the chain that has it in full, then overwritten with the changed rows of
later checkpoints. Only blocks with requested rows are read, directly into the destination where layout and dtype match.

Shape legend: R rows, C columns.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import chain
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
from shardwright.spec.workload import MAX_GROWING_ROWS

THREADS = 4  # even with fewer cores: some wait for the disk while others verify digests


class Checkpoint:
    """A complete checkpoint; every block that is read is verified against its digest."""

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
        """Dtype and shape by tensor name."""
        return {name: (entry.dtype, entry.shape) for name, entry in self.manifest.tensors.items()}

    def read_tensor(self, name: str) -> Tensor:
        """Read a full tensor."""
        dtype, shape = self.tensor_specs[name]
        tensor = torch.empty(shape, dtype=getattr(torch, dtype))
        self.fill([full_rectangle(name, tensor)])
        return tensor

    @torch.no_grad()
    def fill(self, rectangles: Sequence[Rectangle]) -> None:
        """Read values into the rectangles' tensors, or into the rows that they store.

        Values are rounded to nearest where the dtype is not the stored one."""
        targets = [rect if _is_writable(rect) else replace(rect, values=_empty_like(rect)) for rect in rectangles]
        layers = [list(self._layers(target.name)) for target in targets]
        coverage = [_Coverage(target) for target in targets]
        with ThreadPoolExecutor(THREADS) as pool:
            for depth in range(max(map(len, layers), default=0)):
                blocks = [
                    [
                        block
                        for entry, reader in target_layers[depth : depth + 1]
                        for piece in entry.pieces
                        for block in _blocks(reader, piece, target)
                    ]
                    for target, target_layers in zip(targets, layers, strict=True)
                ]
                for _ in pool.map(_Block.__call__, _blocks_of(blocks, targets, is_stored=False)):
                    pass
                for block in _blocks_of(blocks, targets, is_stored=True):
                    block.store()
                for covered, target_blocks in zip(coverage, blocks, strict=True):
                    covered.add(depth, target_blocks)
        self._check_complete(coverage)
        for rect, target in zip(rectangles, targets, strict=True):
            if rect is not target:
                copy_finite(rect.values, target.values)

    def row_ids(self, name: str, removed: str) -> Tensor:
        """The ids of the rows of a tensor that grows, in ascending order; `removed`: the tensor of rows that ended."""
        ids = torch.empty(0, dtype=torch.int64)
        for depth, (manifest, reader) in enumerate(self._chain[self._first_layer(name) :]):
            if depth and removed in manifest.tensors:
                gone = _all_numbers(reader, manifest.tensors[removed])
                ids = ids[~torch.isin(ids, gone)]
            ids = torch.unique(torch.cat([ids, _all_numbers(reader, manifest.tensors[name])]))
        return ids

    def verify(self, progress: Callable[[int], None] = lambda _: None) -> int:
        """Verify all headers and blocks of this checkpoint and its bases; returns the number of bytes read.

        Calls `progress` with the number of bytes read so far.
        """
        total = 0
        for path, (manifest, reader) in zip(self._paths, self._chain, strict=True):
            _check_headers(path, manifest)
            for entry in manifest.tensors.values():
                for piece in entry.pieces:
                    for stored in filter(None, (piece.values, piece.numbers, piece.scales)):
                        for start, _ in reader.block_ranges(stored):
                            block = reader.read_block(stored, start)
                            total += block.numel() * block.element_size()
                            progress(total)
        return total

    def close(self) -> None:
        for _, reader in self._chain:
            reader.close()

    def _layers(self, name: str) -> Iterator[tuple[TensorEntry, ArrayReader]]:
        """The newest full version of a tensor, then the changed rows of each later checkpoint."""
        for manifest, reader in self._chain[self._first_layer(name) :]:
            yield manifest.tensors[name], reader

    def _first_layer(self, name: str) -> int:
        return max(
            index
            for index, (manifest, _) in enumerate(self._chain)
            if name in manifest.tensors and manifest.tensors[name].full
        )

    def _check_complete(self, coverage: Sequence["_Coverage"]) -> None:
        for covered in coverage:
            num, target = covered.num_values, covered.target
            if num != target.values.numel():
                raise UserError(
                    f'{self.path}: of the {target.values.numel()} requested values of "{target.name}" its files have '
                    f"{num}; use an earlier checkpoint"
                )


class _Coverage:
    """Which requested values have been read: all from the full version, or, if the rows have ids, from any layer."""

    def __init__(self, target: Rectangle) -> None:
        self.target, self.num_values = target, 0
        has_ids = target.shape[:1] == (MAX_GROWING_ROWS,)
        self._num_R = torch.zeros(target.num_rows, dtype=torch.int64) if has_ids else None

    def add(self, depth: int, blocks: Sequence["_Block"]) -> None:
        if self._num_R is not None:
            num_R = torch.zeros_like(self._num_R)
            for block in blocks:
                num_R[block.target_rows] += block.width
            self._num_R = torch.maximum(self._num_R, num_R)
            self.num_values = int(self._num_R.sum())
        elif depth == 0:
            self.num_values = sum(block.width * block.num_rows for block in blocks)


@dataclass(frozen=True, slots=True, eq=False)
class _Block:
    """A block of a stored rectangle that has requested rows."""

    reader: ArrayReader
    piece: StoredRectangle
    target: Rectangle  # the requested rectangle
    start: int  # first row of the block in `piece`
    source_rows: slice | Tensor  # relative to the block
    target_rows: slice | Tensor  # relative to `target`
    columns: Sequence[tuple[IndexRange, IndexRange]]  # ranges in `piece` and in `target`
    scales: Tensor | None  # of each row of `piece`

    @property
    def width(self) -> int:
        """Number of values that are requested of a row."""
        return sum(end - start for (start, end), _ in self.columns)

    @property
    def num_rows(self) -> int:
        rows = self.target_rows
        return rows.stop - rows.start if isinstance(rows, slice) else len(rows)

    def __call__(self) -> None:
        """Read the block and copy the requested values."""
        stored, values_RC = self.piece.values, self.target.values_RC
        if self._is_direct(values_RC):
            self.reader.read_block(stored, self.start, out=values_RC[self.target_rows])
            return
        block_RC = self._read()
        for (a, b), (c, d) in self.columns:
            values_RC[self.target_rows, c:d] = block_RC[self.source_rows, a:b].to(values_RC.dtype)

    def store(self) -> None:
        """Read the block and write the requested values to the rows that the target stores."""
        block_RC, stored = self._read(), self.target.stored
        assert stored is not None
        if isinstance(rows := self.target_rows, slice):
            rows = torch.arange(rows.start, rows.stop)
        for (a, b), columns in self.columns:
            stored.write(rows, columns, block_RC[self.source_rows, a:b].to(self.target.values.dtype))

    def _read(self) -> Tensor:
        block_RC = self.reader.read_block(self.piece.values, self.start)
        if self.scales is None:
            return block_RC
        return block_RC.to(self.scales.dtype) * self.scales[self.start : self.start + len(block_RC)]

    def _is_direct(self, values_RC: Tensor) -> bool:
        """Whether the block can be read directly into the destination, without selection or conversion."""
        stored = self.piece.values
        rows = min(stored.block, stored.shape[0] - self.start)
        return (
            isinstance(self.source_rows, slice)
            and (self.source_rows.start, self.source_rows.stop) == (0, rows)
            and values_RC.dtype == getattr(torch, stored.dtype)
            and self.scales is None
            and [*self.columns] == [((0, stored.shape[1]), (0, values_RC.shape[1]))]
        )


def _blocks_of(
    blocks: Sequence[Sequence[_Block]], targets: Sequence[Rectangle], *, is_stored: bool
) -> Iterator[_Block]:
    """The blocks of targets that store their rows, or of the others."""
    return chain.from_iterable(
        own for own, target in zip(blocks, targets, strict=True) if (target.stored is not None) == is_stored
    )


def _all_numbers(reader: ArrayReader, entry: TensorEntry) -> Tensor:
    """The row numbers of all rectangles of a tensor."""
    arrays = [reader.read_array(piece.numbers).flatten().long() for piece in entry.pieces if piece.numbers is not None]
    return torch.cat([torch.empty(0, dtype=torch.int64), *arrays])


def _check_headers(path: Path, manifest: Manifest) -> None:
    """Compare the header of every file, which other libraries read, with the manifest."""
    expected: dict[str, set[tuple[Any, ...]]] = {}
    for name, entry in manifest.tensors.items():
        for piece in entry.pieces:
            for suffix, stored in (("", piece.values), (".rows", piece.numbers), (".scales", piece.scales)):
                if stored is not None:  # several tensors may share one array of row numbers
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


def _blocks(reader: ArrayReader, piece: StoredRectangle, target: Rectangle) -> Iterator[_Block]:
    """The blocks of a stored rectangle that have rows of `target`."""
    columns = list(_shared_columns(piece, target))
    if not columns or not target.num_rows:
        return
    scales = None if piece.scales is None else reader.read_array(piece.scales)
    if piece.rows is not None and isinstance(target.rows, tuple):
        first, origin = piece.rows[0], target.rows[0]
        for start, end in reader.block_ranges(piece.values):
            lo, hi = max(first + start, origin), min(first + end, target.rows[1])
            if lo < hi:
                source = slice(lo - first - start, hi - first - start)
                yield _Block(reader, piece, target, start, source, slice(lo - origin, hi - origin), columns, scales)
        return
    sources, destinations = _shared_rows(reader, piece, target)
    for start, end in reader.block_ranges(piece.values):
        lo, hi = torch.searchsorted(sources, torch.tensor([start, end])).tolist()
        if lo < hi:
            yield _Block(reader, piece, target, start, sources[lo:hi] - start, destinations[lo:hi], columns, scales)


def _shared_columns(piece: StoredRectangle, target: Rectangle) -> Iterator[tuple[IndexRange, IndexRange]]:
    """Columns that are in both: ranges in the values of `piece` and in the values of `target`."""
    source = 0
    for a, b in piece.cols or ((0, target.width),):
        destination = 0
        for c, d in target.columns:
            lo, hi = max(a, c), min(b, d)
            if lo < hi:
                yield (lo - a + source, hi - a + source), (lo - c + destination, hi - c + destination)
            destination += d - c
        source += b - a


def _shared_rows(reader: ArrayReader, piece: StoredRectangle, target: Rectangle) -> tuple[Tensor, Tensor]:
    """Rows that are in both: positions in `piece`, ascending, and positions in `target`."""
    if piece.rows is not None:
        assert isinstance(target.rows, Tensor)
        (positions,) = torch.where((target.rows >= piece.rows[0]) & (target.rows < piece.rows[1]))
        sources, order = (target.rows[positions] - piece.rows[0]).long().sort()
        return sources, positions[order]
    assert piece.numbers is not None
    numbers = reader.read_array(piece.numbers).flatten().long()
    if isinstance(target.rows, tuple):
        (positions,) = torch.where((numbers >= target.rows[0]) & (numbers < target.rows[1]))
        return positions, numbers[positions] - target.rows[0]
    rows, order = target.rows.long().sort()
    candidates = torch.searchsorted(rows, numbers).clamp(max=len(rows) - 1)
    (positions,) = torch.where(rows[candidates] == numbers)
    return positions, order[candidates[positions]]


def _is_writable(rect: Rectangle) -> bool:
    """Whether blocks can be read into the rectangle's own tensor or stored rows."""
    return rect.stored is not None or (rect.values.is_contiguous() and rect.values.device.type == "cpu")


def _empty_like(rect: Rectangle) -> Tensor:
    return torch.empty(rect.values.shape, dtype=rect.values.dtype)

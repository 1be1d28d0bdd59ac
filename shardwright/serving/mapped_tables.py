"""Exported tables under lookups: mapped into memory, and rows of them replaced.

Shape legend: R rows that change, C columns.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from shardwright.checkpoint import arrays
from shardwright.checkpoint.manifest import StoredArray
from shardwright.checkpoint.writing import quantize_rows
from shardwright.jagged import Jagged, Vectors
from shardwright.kernels import embedding
from shardwright.kernels.arguments import POOLINGS, Ids
from shardwright.kernels.buffers import BufferPool
from shardwright.kernels.native import lengths_to_offsets
from shardwright.layers.embedding import EmbeddingBags
from shardwright.rectangle import Rectangle
from shardwright.serving.manifest import SCALES_SUFFIX, TABLES_FILE, ExportManifest

ARRAY_SUFFIXES = ("", SCALES_SUFFIX)


@dataclass(frozen=True, slots=True, eq=False)
class RowUpdate:
    """Rows of a table as they are to be stored; several rows by number, or a run."""

    table: str
    rows: Tensor | slice
    cols: slice
    values: Tensor
    scales: Tensor | None


class _Bank:
    """Tables of so many columns one behind the other, so that rows of all of them are fetched at once."""

    def __init__(self, values: Tensor, scales: Tensor) -> None:
        self.values, self.scales = values, scales

    def cut(self, names: Sequence[str], rows: Sequence[int]) -> dict[str, Tensor]:
        """Each table's own rows, and their scales."""
        found = dict(zip(names, self.values.split(list(rows)), strict=True))
        return found | {
            name + SCALES_SUFFIX: part for name, part in zip(names, self.scales.split(list(rows)), strict=True)
        }

    def first(self, table: Tensor) -> int:
        """The row that a table begins with."""
        return table.storage_offset() // table.shape[1]


class MappedTables:
    """All tables of an exported model. Pages are read from its file as they are needed; rows that change stay here."""

    def __init__(self, served: ExportManifest, folder: Path) -> None:
        found = {name: arrays.memory_map(folder / TABLES_FILE, stored) for name, stored in served.arrays.items()}
        self._banks: dict[int, _Bank] = {}  # of tables in int8, by their columns
        if served.stored == "int8":
            for dim in {table.dim: None for table in served.tables}:
                names = [table.name for table in served.tables if table.dim == dim]
                self._banks[dim] = _Bank(
                    *(arrays.memory_map(folder / TABLES_FILE, _run(served, names, end)) for end in ARRAY_SUFFIXES)
                )
                found |= self._banks[dim].cut(names, [served.arrays[name].shape[0] for name in names])
        self._values = {table.name: found[table.name] for table in served.tables}
        self._scales = {table.name: found[table.name + SCALES_SUFFIX] for table in served.tables if self._banks}
        dtypes = {name: str(values.dtype).removeprefix("torch.") for name, values in self._values.items()}
        if self._scales:
            dtypes = dict.fromkeys(dtypes, "float32")
        with torch.device("meta"):
            tables = [replace(table, dtype=dtypes[table.name]) for table in served.tables]
            self.bags = EmbeddingBags(tables, served.bags, weighted=served.weighted)
        order = [table.name for table in served.tables]
        self._weights = [self._values[name] for name in order]
        self._read = [order.index(feature.table) for feature in served.bags]
        self._pooling = [POOLINGS.index(feature.pooling) for feature in served.bags]
        self._memory = BufferPool()
        dims = list(self._banks)
        self._bank = torch.tensor([dims.index(self._weights[table].shape[1]) for table in self._read if dims])
        self._limits = torch.tensor([len(self._weights[table]) for table in self._read])
        self._firsts = torch.tensor(
            [self._banks[w.shape[1]].first(w) for w in map(self._weights.__getitem__, self._read) if dims]
        )

    @torch.no_grad()
    def lookup(self, features: Jagged) -> Vectors:
        mine = self.bags.read(features)
        ids = Ids(mine.values, lengths_to_offsets(mine.lengths), mine.weights, self._read, self._pooling)
        with self.bags.naming_errors():
            weights, ids = self._exact(ids) if self._scales else (self._weights, ids)
            pooled, *sequences = embedding.lookup_into(self._memory, weights, ids)
        return self.bags.vectors(pooled, sequences)

    def prepare_update(self, table: str, rectangle: Rectangle) -> list[RowUpdate]:
        """What is to be put, rounded as the table is stored; nothing is changed yet. Rows in int8 are given whole."""
        stored = self._values[table].dtype
        if stored == torch.int8:
            found, scales, _ = quantize_rows(rectangle.values_RC.float(), "int8")
            return [RowUpdate(table, _rows(rectangle), slice(0, rectangle.width), found, scales)]
        half = stored == torch.float16 != rectangle.values.dtype
        values_RC = quantize_rows(rectangle.values_RC, "float16")[0] if half else rectangle.values_RC.to(stored)
        parts = values_RC.split([b - a for a, b in rectangle.columns], 1)
        return [
            RowUpdate(table, _rows(rectangle), slice(a, b), part, None)
            for (a, b), part in zip(rectangle.columns, parts, strict=True)
        ]

    def prepare_int8_update(self, table: str, rectangles: Sequence[Rectangle]) -> list[RowUpdate]:
        """The same of columns of rows in int8, whose scales are those of whole rows."""
        values, scales = self._values[table], self._scales[table]
        rows = torch.cat([_numbers(one) for one in rectangles]).unique()
        exact_RC = values[rows].to(scales.dtype) * scales[rows]
        for one in rectangles:
            at = torch.searchsorted(rows, _numbers(one))
            parts = one.values_RC.split([b - a for a, b in one.columns], 1)
            for (a, b), part in zip(one.columns, parts, strict=True):
                exact_RC[at, a:b] = part.to(exact_RC.dtype)
        found, row_scales, _ = quantize_rows(exact_RC, "int8")
        return [RowUpdate(table, rows, slice(0, values.shape[1]), found, row_scales)]

    def apply_updates(self, updates: Iterable[RowUpdate]) -> None:
        for one in updates:
            _put(self._values[one.table], one.rows, one.cols, one.values)
            if one.scales is not None:
                _put(self._scales[one.table], one.rows, slice(0, 1), one.scales)

    def full_table(self, name: str) -> Tensor:
        """All of a table, as it is looked up."""
        scales = self._scales.get(name)
        return self._values[name] if scales is None else self._values[name].to(scales.dtype) * scales

    def _exact(self, ids: Ids) -> tuple[list[Tensor], Ids]:
        """Rows in int8 as numbers, those that are asked for: of each bank a small table, in the order of the ids."""
        ends = ids.offsets[:: ids.batch_size] if ids.batch_size else ids.offsets.new_zeros(len(self._read) + 1)
        of = torch.arange(len(self._read)).repeat_interleave(ends.diff())
        outside = ((ids.values < 0) | (ids.values >= self._limits[of])).nonzero()
        ids.raise_if_invalid(int(outside[0]) if len(outside) else -1)
        rows, bank, places = ids.values + self._firsts[of], self._bank[of], torch.empty_like(ids.values)
        small = []
        for number, one in enumerate(self._banks.values()):
            mine = (bank == number).nonzero().flatten() if len(self._banks) > 1 else slice(None)
            small.append(one.values[rows[mine]].float() * one.scales[rows[mine]])
            places[mine] = torch.arange(len(small[-1]))
        return small, replace(ids, values=places, tables=self._bank.tolist())


def _run(served: ExportManifest, names: Sequence[str], end: str) -> StoredArray:
    """Arrays that lie one behind the other as one."""
    parts = [served.arrays[name + end] for name in names]
    rows = sum(part.shape[0] for part in parts)
    return replace(parts[0], shape=(rows, parts[0].shape[1]))


def _put(table: Tensor, rows: Tensor | slice, cols: slice, values: Tensor) -> None:
    if isinstance(rows, slice):
        table[rows, cols] = values
    else:
        table[:, cols].index_copy_(0, rows, values)


def _rows(one: Rectangle) -> Tensor | slice:
    return slice(*one.rows) if isinstance(one.rows, tuple) else one.rows


def _numbers(one: Rectangle) -> Tensor:
    return torch.arange(*one.rows) if isinstance(one.rows, tuple) else one.rows

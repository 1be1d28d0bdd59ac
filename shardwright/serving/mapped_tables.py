"""The tables of an exported model: mapped into memory for lookups, with rows that updates replace.

Shape legend: R rows, C columns, S spare lines.
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
from shardwright.layers.embedding import EmbeddingBags, EmbeddingTables
from shardwright.layers.embedding_dict import EmbeddingBagsDict
from shardwright.rectangle import Rectangle
from shardwright.serving.growing_table import GrowingTable
from shardwright.serving.manifest import IDS_SUFFIX, SCALES_SUFFIX, TABLES_FILE, ExportManifest
from shardwright.spec.workload import Table

ARRAY_SUFFIXES = ("", SCALES_SUFFIX)


@dataclass(frozen=True, slots=True, eq=False)
class RowUpdate:
    """New values of some rows of a table, in the table's stored dtype."""

    table: str
    rows: Tensor | slice  # row numbers, or a range
    cols: slice
    values: Tensor
    scales: Tensor | None  # of each row, for int8


class _Int8TableGroup:
    """Int8 tables of equal width as one concatenated tensor, to read rows of all in one operation."""

    def __init__(self, values: Tensor, scales: Tensor) -> None:
        self.values, self.scales = values, scales

    def split(self, names: Sequence[str], rows: Sequence[int]) -> dict[str, Tensor]:
        """Views of the tables and of their scales, by array name. `rows`: number of rows of each table."""
        views = dict(zip(names, self.values.split(list(rows)), strict=True))
        return views | {
            name + SCALES_SUFFIX: scales for name, scales in zip(names, self.scales.split(list(rows)), strict=True)
        }

    def first(self, table: Tensor) -> int:
        """The first row of a table in the concatenated tensor."""
        return table.storage_offset() // table.shape[1]


class MappedTables:
    """All tables of an exported model, mapped copy-on-write: read on demand, updated in this process."""

    def __init__(self, served: ExportManifest, folder: Path) -> None:
        tensors = {name: arrays.memory_map(folder / TABLES_FILE, stored) for name, stored in served.arrays.items()}
        self._groups: dict[int, _Int8TableGroup] = {}  # by number of columns; empty unless tables are int8
        if served.stored == "int8":
            for dim in {table.dim: None for table in served.tables}:
                names = [table.name for table in served.tables if table.dim == dim]
                pair = [_concat(served, names, suffix) for suffix in ARRAY_SUFFIXES]  # values and scales
                self._groups[dim] = _Int8TableGroup(*(arrays.memory_map(folder / TABLES_FILE, array) for array in pair))
                tensors |= self._groups[dim].split(names, [served.arrays[name].shape[0] for name in names])
        self._values = {table.name: tensors[table.name] for table in served.tables}
        self.growing = {
            table.name: GrowingTable(
                table, tensors[table.name + IDS_SUFFIX].flatten(), tensors[table.name], served.initial[table.name]
            )
            for table in served.tables
            if table.growth is not None
        }
        self._values |= {name: table.values for name, table in self.growing.items()}
        self._scales = {table.name: tensors[table.name + SCALES_SUFFIX] for table in served.tables if self._groups}
        dtypes = {name: str(values.dtype).removeprefix("torch.") for name, values in self._values.items()}
        if self._scales:
            dtypes = dict.fromkeys(dtypes, "float32")
        with torch.device("meta"):
            tables = [replace(table, dtype=dtypes[table.name]) for table in served.tables]
            self.bags = _make_bags(tables, served)
        self._order = [table.name for table in served.tables]
        self._weights = [self._values[name] for name in self._order]
        self._table_index = [self._order.index(feature.table) for feature in served.bags]
        self._pooling = [POOLINGS.index(feature.pooling) for feature in served.bags]
        self._buffers = BufferPool()
        dims = list(self._groups)  # each of the following tensors has an entry per feature
        self._group = torch.tensor([dims.index(self._weights[i].shape[1]) for i in self._table_index if dims])
        self._num_rows = torch.tensor([len(self._weights[i]) for i in self._table_index])
        self._first_row = torch.tensor(
            [self._groups[w.shape[1]].first(w) for w in map(self._weights.__getitem__, self._table_index) if dims]
        )

    @torch.no_grad()
    def lookup(self, features: Jagged) -> Vectors:
        """Look up the rows of a batch and pool them; raises an error if an id is out of range."""
        jagged = self.bags.read(features)
        ids = Ids(jagged.values, lengths_to_offsets(jagged.lengths), jagged.weights, self._table_index, self._pooling)
        with self.bags.naming_errors():
            weights, ids = self._dequantize_rows(ids) if self._scales else (self._weights, ids)
            spares: dict[str, Tensor] = {}
            try:
                ids = self._place(ids, spares) if self.growing else ids
                pooled, *sequences = embedding.lookup_into(self._buffers, weights, ids)
            finally:
                for name, spares_S in spares.items():
                    self.growing[name].release(spares_S)
        return self.bags.vectors(pooled, sequences)

    def _place(self, ids: Ids, spares: dict[str, Tensor]) -> Ids:
        """The ids with lines in place of those of tables that grow; `spares` gets the lines to release, by table."""
        values, ranges = ids.values.long().clone(), ids.feature_ranges()
        for index, name in enumerate(self._order):
            if name not in self.growing:
                continue
            own = [span for span, table in zip(ranges, ids.tables, strict=True) if table == index]
            placed = self.growing[name].place(torch.cat([values[a:b] for a, b in own] or [values[:0]]))
            for (a, b), lines in zip(own, placed.lines_N.split([b - a for a, b in own]), strict=True):
                values[a:b] = lines
            spares[name] = placed.spares_S
        return replace(ids, values=values)

    def prepare_update(self, table: str, rectangle: Rectangle) -> list[RowUpdate]:
        """Round new rows to the table's stored dtype; the table is unchanged. Int8 rows need all columns."""
        stored = self._values[table].dtype
        if stored == torch.int8:
            quantized_RC, scales, _ = quantize_rows(rectangle.values_RC.float(), "int8")
            return [RowUpdate(table, _row_index(rectangle), slice(0, rectangle.width), quantized_RC, scales)]
        is_rounded = stored == torch.float16 != rectangle.values.dtype
        values_RC = quantize_rows(rectangle.values_RC, "float16")[0] if is_rounded else rectangle.values_RC.to(stored)
        column_values = values_RC.split([b - a for a, b in rectangle.columns], 1)
        return [
            RowUpdate(table, _row_index(rectangle), slice(a, b), values, None)
            for (a, b), values in zip(rectangle.columns, column_values, strict=True)
        ]

    def prepare_int8_update(self, table: str, rectangles: Sequence[Rectangle]) -> list[RowUpdate]:
        """`prepare_update` for some columns of int8 rows; scales are of full rows with their other columns."""
        values, scales = self._values[table], self._scales[table]
        rows = torch.cat([_row_numbers(rect) for rect in rectangles]).unique()
        exact_RC = values[rows].to(scales.dtype) * scales[rows]
        for rect in rectangles:
            positions = torch.searchsorted(rows, _row_numbers(rect))
            column_values = rect.values_RC.split([b - a for a, b in rect.columns], 1)
            for (a, b), new_values in zip(rect.columns, column_values, strict=True):
                exact_RC[positions, a:b] = new_values.to(exact_RC.dtype)
        quantized_RC, row_scales, _ = quantize_rows(exact_RC, "int8")
        return [RowUpdate(table, rows, slice(0, values.shape[1]), quantized_RC, row_scales)]

    def apply_updates(self, updates: Iterable[RowUpdate]) -> None:
        """Write new rows into the tables."""
        for update in updates:
            rows = update.rows
            if update.table in self.growing and isinstance(rows, Tensor):
                rows = self.growing[update.table].lines(rows)
            _write_rows(self._values[update.table], rows, update.cols, update.values)
            if update.scales is not None:
                _write_rows(self._scales[update.table], update.rows, slice(0, 1), update.scales)

    def full_table(self, name: str) -> Tensor:
        """All rows of a table, dequantized if they are int8; of one that grows, all lines."""
        scales = self._scales.get(name)
        return self._values[name] if scales is None else self._values[name].to(scales.dtype) * scales

    def _dequantize_rows(self, ids: Ids) -> tuple[list[Tensor], Ids]:
        """Dequantize the requested int8 rows: a small table per group, in id order, and ids into these tables."""
        ends = ids.offsets[:: ids.batch_size] if ids.batch_size else ids.offsets.new_zeros(len(self._table_index) + 1)
        bag = torch.arange(len(self._table_index)).repeat_interleave(ends.diff())
        invalid = ((ids.values < 0) | (ids.values >= self._num_rows[bag])).nonzero()
        ids.raise_if_invalid(int(invalid[0]) if len(invalid) else -1)
        rows, groups, new_ids = ids.values + self._first_row[bag], self._group[bag], torch.empty_like(ids.values)
        tables = []
        for index, group in enumerate(self._groups.values()):
            positions = (groups == index).nonzero().flatten() if len(self._groups) > 1 else slice(None)
            tables.append(group.values[rows[positions]].float() * group.scales[rows[positions]])
            new_ids[positions] = torch.arange(len(tables[-1]))
        return tables, replace(ids, values=new_ids, tables=self._group.tolist())


def _make_bags(tables: Sequence[Table], served: ExportManifest) -> EmbeddingTables:
    """EmbeddingBags with these tables; an EmbeddingBagsDict if their names are MEMBER.NAME."""
    if not any("." in table.name for table in tables):
        return EmbeddingBags(tables, served.bags, weighted=served.weighted)
    members = {}
    for name in dict.fromkeys(table.name.partition(".")[0] for table in tables):
        prefix = f"{name}."
        member_tables = [replace(t, name=t.name.removeprefix(prefix)) for t in tables if t.name.startswith(prefix)]
        member_features = [
            replace(feature, name=feature.name.removeprefix(prefix), table=feature.table.removeprefix(prefix))
            for feature in served.bags
            if feature.table.startswith(prefix)
        ]
        members[name] = EmbeddingBags(member_tables, member_features, weighted=served.weighted)
    return EmbeddingBagsDict(members)


def _concat(served: ExportManifest, names: Sequence[str], suffix: str) -> StoredArray:
    """Describe arrays that are adjacent in the file as one array. `suffix`: of their names."""
    stored = [served.arrays[name + suffix] for name in names]
    rows = sum(array.shape[0] for array in stored)
    return replace(stored[0], shape=(rows, stored[0].shape[1]))


def _write_rows(table: Tensor, rows: Tensor | slice, cols: slice, values: Tensor) -> None:
    if isinstance(rows, slice):
        table[rows, cols] = values
    else:
        table[:, cols].index_copy_(0, rows, values)


def _row_index(rect: Rectangle) -> Tensor | slice:
    return slice(*rect.rows) if isinstance(rect.rows, tuple) else rect.rows


def _row_numbers(rect: Rectangle) -> Tensor:
    return torch.arange(*rect.rows) if isinstance(rect.rows, tuple) else rect.rows

"""Exported tables under lookups: mapped into memory, and rows of them replaced.

Shape legend: R rows that change, C columns.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from shardwright.checkpoint import arrays
from shardwright.checkpoint.writing import rounded
from shardwright.jagged import Jagged, Vectors
from shardwright.kernels import embedding, reference
from shardwright.kernels.calls import POOLINGS, Ids
from shardwright.kernels.native import lengths_to_offsets
from shardwright.layers.embedding import EmbeddingBags
from shardwright.rectangle import Rectangle
from shardwright.serving.manifest import SCALES, TABLES, Served


@dataclass(frozen=True, slots=True, eq=False)
class Change:
    """Rows of a table as they are to be stored; several rows by number, or a run."""

    table: str
    rows: Tensor | slice
    cols: slice
    values: Tensor
    scales: Tensor | None


class MappedTables:
    """All tables of an exported model. Pages are read from its file as they are needed; rows that change stay here."""

    def __init__(self, served: Served, folder: Path) -> None:
        found = {name: arrays.mapped(folder / TABLES, stored) for name, stored in served.arrays.items()}
        self._values = {table.name: found[table.name] for table in served.tables}
        self._scales = {table.name: found[table.name + SCALES] for table in served.tables if served.stored == "int8"}
        dtypes = {name: str(values.dtype).removeprefix("torch.") for name, values in self._values.items()}
        if self._scales:
            dtypes = dict.fromkeys(dtypes, "float32")
        with torch.device("meta"):
            tables = [replace(table, dtype=dtypes[table.name]) for table in served.tables]
            self.bags = EmbeddingBags(tables, served.bags, weighted=served.weighted)
        self.bags.requires_grad_(False)
        for name, values in self._values.items() if not self._scales else ():
            self.bags.holder(name).weight = nn.Parameter(values, requires_grad=False)

    @torch.no_grad()
    def lookup(self, features: Jagged) -> Vectors:
        mine = self.bags.read(features)
        return self._lookup_scaled(mine) if self._scales else self.bags.lookup(mine)

    def changes(self, table: str, rectangles: Sequence[Rectangle]) -> list[Change]:
        """What is to be put, rounded as the table is stored; nothing is changed yet."""
        values, scales = self._values[table], self._scales.get(table)
        if scales is None:
            return [
                Change(table, _rows(one), slice(a, b), part.to(values.dtype), None)
                for one in rectangles
                for (a, b), part in _by_columns(one)
            ]
        rows = torch.cat([_numbers(one) for one in rectangles]).unique()
        exact_RC = values[rows].to(scales.dtype) * scales[rows]
        for one in rectangles:
            at = torch.searchsorted(rows, _numbers(one))
            for (a, b), part in _by_columns(one):
                exact_RC[at, a:b] = part.to(exact_RC.dtype)
        found, row_scales, _ = rounded(exact_RC, "int8")
        return [Change(table, rows, slice(0, values.shape[1]), found, row_scales)]

    def put(self, changes: Iterable[Change]) -> None:
        for one in changes:
            self._values[one.table][one.rows, one.cols] = one.values
            if one.scales is not None:
                self._scales[one.table][one.rows] = one.scales

    def table(self, name: str) -> Tensor:
        """All of a table, as it is looked up."""
        scales = self._scales.get(name)
        return self._values[name] if scales is None else self._values[name].to(scales.dtype) * scales

    def _lookup_scaled(self, features: Jagged) -> Vectors:
        """Rows in int8 become numbers one by one: of each feature a small table, in the order of its ids."""
        bags = self.bags
        order = [table.name for table in bags.tables]
        tables = [order.index(feature.table) for feature in bags.features]
        pooling = [POOLINGS.index(feature.pooling) for feature in bags.features]
        ids = Ids(features.values, lengths_to_offsets(features.lengths), features.weights, tables, pooling)
        with bags.named():
            reference.check([self._values[name] for name in order], ids)
        small, places = [], []
        for feature, (a, b) in zip(bags.features, ids.spans(), strict=True):
            rows = features.values[a:b]
            small.append(self._values[feature.table][rows].float() * self._scales[feature.table][rows])
            places.append(torch.arange(b - a))
        by_place = replace(ids, values=torch.cat(places), tables=range(len(small)))
        pooled, *sequences = embedding.lookup(small, by_place)
        return bags.vectors(pooled, sequences)


def by_table(names: Mapping[str, str], rectangles: Iterable[Rectangle]) -> tuple[dict[str, list[Rectangle]], list]:
    """Rectangles of tables, and those of the rest; `names`: what each table is called in them."""
    tables, others = {logical: name for name, logical in names.items()}, []
    found: dict[str, list[Rectangle]] = {}
    for one in rectangles:
        if one.name in tables:
            found.setdefault(tables[one.name], []).append(one)
        else:
            others.append(one)
    return found, others


def _rows(one: Rectangle) -> Tensor | slice:
    return slice(*one.rows) if isinstance(one.rows, tuple) else one.rows


def _numbers(one: Rectangle) -> Tensor:
    return torch.arange(*one.rows) if isinstance(one.rows, tuple) else one.rows


def _by_columns(one: Rectangle) -> Iterable[tuple[tuple[int, int], Tensor]]:
    """Columns of the table and their values."""
    parts = one.values_RC.split([b - a for a, b in one.columns], 1)
    return zip(one.columns, parts, strict=True)

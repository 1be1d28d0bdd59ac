"""A table of an exported model that grows: rows of ids, which publications add and end.

An id without a row has its initial values, as in training. Rows are copied from the export to memory that is reserved
for as many as the table may have.

Shape legend: N ids of a request, S spare lines, E ids with a row, C columns.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from shardwright.checkpoint.manifest import Manifest
from shardwright.kernels.id_map import IdMap, PlacedBatch
from shardwright.kernels.initial import uniform_rows
from shardwright.rectangle import Rectangle
from shardwright.serving.manifest import ExportManifest, removed_name
from shardwright.spec.workload import Growth, Table

MIN_SPARES = 1 << 20  # lines for ids of a request that have no row


class GrowingTable:
    """`values`: the rows by line, in the table's stored dtype."""

    def __init__(self, table: Table, ids_E: Tensor, values_EC: Tensor, initial: tuple[int, float]) -> None:
        self._ids = IdMap(table.name, table.rows, max(table.rows, MIN_SPARES), Growth(), 1)
        self._initial, self._dtype = initial, getattr(torch, table.dtype)
        self.values = torch.empty(self._ids.num_lines, values_EC.shape[1], dtype=values_EC.dtype)
        self._ids.add(ids_E)
        self.values[: len(ids_E)] = values_EC

    @property
    def num_rows(self) -> int:
        return self._ids.numbers.rows

    def place(self, ids_N: Tensor) -> PlacedBatch:
        """The lines of ids, until `release`."""
        placed = self._ids.place(ids_N, training=False)
        if len(placed.fresh_F):
            (seed, bound), dim = self._initial, self.values.shape[1]
            rows = uniform_rows(seed, placed.fresh_keys_F, dim, bound, self._dtype)
            self.values[placed.fresh_F] = rows.to(self.values.dtype)
        return placed

    def release(self, spares_S: Tensor) -> None:
        self._ids.release(spares_S)

    def lines(self, ids_E: Tensor) -> Tensor:
        """The lines of ids, which get one if they have none."""
        return self._ids.add(ids_E)

    def remove(self, ids_E: Tensor) -> None:
        self._ids.remove(ids_E)

    def known_ids(self) -> Tensor:
        return self._ids.known_ids().ids_E


class EndedRows:
    """The rows of tables that grow which a publication ends: those it names; if it has all rows, those it has not."""

    def __init__(self, served: ExportManifest, publication: Manifest) -> None:
        names = {table.name: served.names[table.name] for table in served.tables if table.growth is not None}
        self._tables = {removed_name(name): table for table, name in names.items()}
        self._ended: dict[str, list[Tensor]] = {table: [] for table in names}
        is_full = {table: publication.tensors[name].full for table, name in names.items()}
        self._kept: dict[str, list[Tensor]] = {name: [] for table, name in names.items() if is_full[table]}
        self._names = names

    def add(self, rectangle: Rectangle) -> None:
        if isinstance(rectangle.rows, Tensor):
            if rectangle.name in self._tables:
                self._ended[self._tables[rectangle.name]].append(rectangle.rows)
            elif rectangle.name in self._kept:
                self._kept[rectangle.name].append(rectangle.rows)

    def remove_from(self, tables: Mapping[str, GrowingTable]) -> None:
        for table, name in self._names.items():
            growing, none = tables[table], torch.empty(0, dtype=torch.int64)
            if name in self._kept:
                known = growing.known_ids()
                growing.remove(known[~torch.isin(known, torch.cat([none, *self._kept[name]]))])
            else:
                growing.remove(torch.cat([none, *self._ended[table]]))

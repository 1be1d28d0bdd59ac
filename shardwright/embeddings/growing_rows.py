"""The rows of a shard of a table that grows: a line for each id that has a row (kernels/id_map.py).

`place` finds or makes lines for the ids of a batch, and gives new ones their initial values, a function of the id. Ids
that have no row of their own yet get spare lines until `release`; updates of these go to a line that nobody reads.
Memory is reserved for all rows, and used as they come.

Shape legend: N ids of a batch, F fresh and S spare lines, L lines, E ids with a row, R rows, D or C columns.
"""

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from shardwright.embeddings.layout import TableShard
from shardwright.kernels import embedding
from shardwright.kernels.finite import first_nonfinite_row
from shardwright.kernels.id_map import IdMap, KnownIds, PlacedBatch
from shardwright.kernels.initial import uniform_rows
from shardwright.kernels.native import use_huge_pages
from shardwright.layers.embedding import EmbeddingTables
from shardwright.rectangle import IndexRange
from shardwright.spec.optimizer import state_shapes

MIN_SPARES = 1 << 20  # lines for ids of the batches in flight that have no row of their own


@dataclass(slots=True)
class GrowthNumbers:
    """What is equal on all ranks: training batches so far, and by table that grows, the seed of the initial values of
    its rows and the largest of these."""

    batches: int
    initial: dict[str, tuple[int, float]]


def initial_growth(bags: EmbeddingTables) -> GrowthNumbers:
    growing = [table.name for table in bags.tables if table.growth is not None]
    return GrowthNumbers(0, {name: bags.holder(name).initial_numbers() for name in growing})


class GrowingRows:
    """`parts_L`: the lines, of each tensor of a row: its weight, then its optimizer states by name."""

    @torch.no_grad()
    def __init__(self, bags: EmbeddingTables, shard: TableShard, in_flight: int) -> None:
        table = bags.tables[shard.table]
        assert table.growth is not None
        module, rows = bags.holder(table.name), shard.rows[1] - shard.rows[0]
        self._table, self._growth, self._in_flight = table.name, table.growth, in_flight
        self.ids = IdMap(table.name, rows, max(rows, MIN_SPARES), table.growth, in_flight)
        num_lines = self.ids.num_lines
        shapes = state_shapes(bags.optimizer, num_lines, shard.dim) if bags.optimizer else {}
        dtype = embedding.vector_dtype(module.weight.dtype)
        self.parts_L = {"weight": torch.empty(num_lines, shard.dim, dtype=module.weight.dtype)}
        self.parts_L |= {name: torch.empty(shape, dtype=dtype) for name, shape in shapes.items()}
        for part in self.parts_L.values():
            use_huge_pages(part)
            part[rows].zero_()
        self._dim, self._dtype, self._columns = table.dim, module.weight.dtype, shard.cols
        self.initial_numbers, self._initial_state = module.initial_numbers(), module.initial_state
        self.removed = torch.empty(0, dtype=torch.int64)  # ids whose rows have ended since the base of an increment

    @torch.no_grad()
    def place(self, ids_N: Tensor, *, training: bool) -> PlacedBatch:
        placed = self.ids.place(ids_N, training=training)
        if len(placed.fresh_F):
            seed, bound = self.initial_numbers
            initial_FD = uniform_rows(seed, placed.fresh_keys_F, self._dim, bound, self._dtype)
            for name, part in self.parts_L.items():
                if name == "weight":
                    part[placed.fresh_F] = torch.cat([initial_FD[:, a:b] for a, b in self._columns], 1)
                else:
                    part[placed.fresh_F] = self._initial_state
        return placed

    def release(self, spares_S: Tensor) -> None:
        self.ids.release(spares_S)

    def rows(self) -> KnownIds:
        """The ids that have a row, in ascending order, and their lines."""
        return self.ids.known_ids()

    def part(self, name: str, lines_E: Tensor) -> "GrowingPart":
        return GrowingPart(self.parts_L[name], lines_E)

    def load(self, batches: int, rows: KnownIds, candidates: KnownIds) -> None:
        """Begin anew with these ids; the values of `rows`, on lines from 0 in their order, are then to be filled in.

        A shard may get more ids than it has rows, if other ranks saved them: the rest are as if evicted."""
        if len(rows.ids_E) > self.ids.rows:
            kept = _most_used(rows, batches, self._growth.half_life, self.ids.rows)
            rows = KnownIds(*(part[kept] for part in rows))
        num_spares = self.ids.num_lines - self.ids.rows - 1
        fresh = IdMap(self._table, self.ids.rows, num_spares, self._growth, self._in_flight)
        fresh.load(batches, rows, candidates)
        self.ids = fresh


def _most_used(rows: KnownIds, batches: int, half_life: int, num: int) -> Tensor:
    """Ascending indices of the rows that are evicted last (csrc/id_map.cpp: make_room)."""
    halvings_E = (batches - rows.last_E).div(half_life, rounding_mode="floor").clamp(0, 32)
    order = torch.arange(len(rows.ids_E) - 1, -1, -1)  # of equals the lowest id is evicted first
    for score_E in (rows.last_E, rows.uses_E >> halvings_E):
        order = order[score_E[order].argsort(descending=True, stable=True)]
    return order[:num].sort().values


class GrowingPart:
    """One tensor of the rows on some lines, as a rectangle's `StoredRows`."""

    def __init__(self, part_L: Tensor, lines_E: Tensor, copy: Tensor | None = None) -> None:
        self._part_L, self._lines_E, self._copy = part_L, lines_E, copy

    def read(self, first: int, num: int) -> Tensor:
        if self._copy is not None:
            return self._copy[first : first + num]
        return self._as_matrix(self._part_L[self._lines_E[first : first + num]])

    def select(self, indices: Tensor) -> Tensor:
        return self._as_matrix(self._part_L[self._lines_E[indices]])

    def write(self, indices: Tensor, columns: IndexRange, values_RC: Tensor) -> None:
        self._part_L.view(len(self._part_L), -1)[self._lines_E[indices], slice(*columns)] = values_RC

    def nonfinite_row(self) -> int | None:
        return first_nonfinite_row(self._part_L[self._lines_E])

    def snapshot(self) -> "GrowingPart":
        """Copies the rows."""
        return GrowingPart(self._part_L, self._lines_E, self.read(0, len(self._lines_E)))

    def close(self) -> None:
        self._copy = None

    def _as_matrix(self, values: Tensor) -> Tensor:
        return values.view(len(values), prod(values.shape[1:]))

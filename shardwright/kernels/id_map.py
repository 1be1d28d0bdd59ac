"""Which ids have a row in a table that grows, and on which line (csrc/id_map.cpp).

Shape legend: N ids of a batch, F fresh lines, S spare lines, E ids, L lines.
"""

import weakref
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from shardwright.errors import UserError
from shardwright.library import native_library
from shardwright.spec.workload import Growth


@dataclass(frozen=True, slots=True)
class PlacedBatch:
    """The lines of a batch's ids: to look up, and to update, where ids that are not trained have line `rows`.
    `fresh_F`: lines that must get the initial values of ids `fresh_keys_F`; `spares_S`: lines to release."""

    lines_N: Tensor
    update_lines_N: Tensor
    fresh_F: Tensor
    fresh_keys_F: Tensor
    spares_S: Tensor


class KnownIds(NamedTuple):
    """Ids in ascending order, their lines (-1 for candidates), uses, and the last batch that used them."""

    ids_E: Tensor
    lines_E: Tensor
    uses_E: Tensor
    last_E: Tensor


class IdMapNumbers(NamedTuple):
    """Rows now, entries of the map, training batches placed; rows that expired, and that were evicted, so far."""

    rows: int
    entries: int
    batches: int
    expired: int
    evicted: int


class IdMap:
    """Places ids of any 64 bits on `rows` lines; line `rows` collects what is not kept, `spares` lines follow.

    `in_flight`: training batches that may be in flight, the placed one included; their rows are never evicted.
    `key_of_L`: the id of each line.
    """

    def __init__(self, table: str, rows: int, spares: int, growth: Growth, in_flight: int) -> None:
        native = native_library()
        if native is None:
            raise UserError("a table that grows needs the compiled kernels, which this installation does not have")
        if growth.expire_after and growth.expire_after < in_flight:
            raise UserError(
                f'table "{table}": rows expire after {growth.expire_after} batches, and {in_flight} may be in flight: '
                f"expire_after must be {in_flight} or more, or 0"
            )
        self.rows, self.num_lines, self._table = rows, rows + 1 + spares, table
        self.key_of_L = torch.zeros(self.num_lines, dtype=torch.int64)
        self._native = native
        options = torch.tensor([rows, spares, growth.admit_after, growth.expire_after, growth.half_life, in_flight])
        self._map = native.shardwright_id_map_new(options.data_ptr(), self.key_of_L.data_ptr())
        freed = weakref.finalize(self, native.shardwright_id_map_free, self._map)
        freed.atexit = False  # a generator that is closed later may still use it

    def place(self, ids_N: Tensor, *, training: bool) -> PlacedBatch:
        """Find or make lines for ids, which may repeat. Only training batches count as uses."""
        ids, num = ids_N.long().contiguous(), len(ids_N)
        lines, counts = torch.empty(5, num, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
        pointers = [row.data_ptr() for row in (*lines, counts)]
        found = self._native.shardwright_id_map_place(self._map, ids.data_ptr(), num, training, *pointers)
        if found <= 0:
            what = "ids without a row of their own" if found else "rows of the batches in flight"
            raise UserError(
                f'table "{self._table}": {what} do not fit in its {self.rows:,} rows: give it more rows, or use '
                "smaller batches"
            )
        num_fresh, num_spares = counts.tolist()
        return PlacedBatch(lines[0], lines[1], lines[2, :num_fresh], lines[3, :num_fresh], lines[4, :num_spares])

    def release(self, spares_S: Tensor) -> None:
        """End a batch's use of its spare lines."""
        spares = spares_S.contiguous()
        self._native.shardwright_id_map_release(self._map, spares.data_ptr(), len(spares))

    def find(self, ids_N: Tensor) -> Tensor:
        """The lines of ids that have a row; -1 for others."""
        ids = ids_N.long().contiguous()
        lines = torch.empty_like(ids)
        self._native.shardwright_id_map_find(self._map, ids.data_ptr(), len(ids), lines.data_ptr())
        return lines

    def known_ids(self, *, admitted: bool = True) -> KnownIds:
        """Ids with a row; or those that are counted and have none yet."""
        num = self._native.shardwright_id_map_list(self._map, admitted, None, None, None, None)
        found = torch.empty(4, num, dtype=torch.int64)
        self._native.shardwright_id_map_list(self._map, admitted, *[row.data_ptr() for row in found])
        return KnownIds(*found)

    def load(self, batches: int, rows: KnownIds, candidates: KnownIds) -> None:
        """Fill an empty map; lines of `rows` count from 0, in their order."""
        self._native.shardwright_id_map_set_batch(self._map, batches)
        self._add(rows, admitted=True)
        self._add(candidates, admitted=False)

    def add(self, ids_E: Tensor) -> Tensor:
        """The lines of ids, which get one if they have none."""
        ones = torch.ones_like(ids_E)
        self._add(KnownIds(ids_E, ones, ones, ones), admitted=True)
        return self.find(ids_E)

    def remove(self, ids_E: Tensor) -> None:
        """End the rows of ids; others are ignored."""
        ids = ids_E.contiguous()
        self._native.shardwright_id_map_remove(self._map, ids.data_ptr(), len(ids))

    def _add(self, known: KnownIds, *, admitted: bool) -> None:
        parts = [part.long().contiguous() for part in (known.ids_E, known.uses_E, known.last_E)]
        pointers = [part.data_ptr() for part in parts]
        if not self._native.shardwright_id_map_load(self._map, admitted, *pointers, len(parts[0])):
            raise UserError(
                f'table "{self._table}": {len(parts[0]):,} rows do not fit in its {self.rows:,}: give it more'
            )

    def take_removed(self) -> Tensor:
        """(E,) The ids whose rows have ended since the last call, ascending; they may have a new row. The first call
        begins to record them."""
        removed = torch.empty(self._native.shardwright_id_map_take_removed(self._map, None), dtype=torch.int64)
        if len(removed):
            self._native.shardwright_id_map_take_removed(self._map, removed.data_ptr())
        return removed

    def has_lost_removed(self) -> bool:
        """Whether more rows have ended than are recorded, since the last call; then `take_removed` lacks some."""
        return bool(self._native.shardwright_id_map_has_lost_removed(self._map))

    @property
    def numbers(self) -> IdMapNumbers:
        numbers = torch.zeros(5, dtype=torch.int64)
        self._native.shardwright_id_map_numbers(self._map, numbers.data_ptr())
        return IdMapNumbers(*numbers.tolist())

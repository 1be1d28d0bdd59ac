"""Row orders of a plan: bijections between the ids of a table and the positions of their rows.

"id" keeps rows in the order of their ids. "hash" multiplies ids, modulo the number of rows, by a number coprime to it,
about 0.618 times as large: any run of ids, such as the hottest, is spread evenly over the positions, so that every row
range gets its share. "load" puts the hottest rows first, in the order given.
"""

import math
from typing import Protocol

import torch
from torch import Tensor

from shardwright.errors import UserError
from shardwright.kernels.rounding import splitmix64
from shardwright.rectangle import IndexRange

GOLDEN = (math.sqrt(5) - 1) / 2
SQUARE_FITS = 1 << 31  # products of two numbers below it fit in int64
LIMB = 8  # bits at a time of longer products


class RowOrder(Protocol):
    """Maps ids to positions, and positions to ids; any shape, int32 or int64."""

    def positions(self, ids: Tensor) -> Tensor: ...

    def ids(self, positions: Tensor) -> Tensor: ...


class IdOrder:
    """A row's position is its id."""

    def positions(self, ids: Tensor) -> Tensor:
        return ids

    def ids(self, positions: Tensor) -> Tensor:
        return positions


class HashOrder:
    """position = (id * step + start) % rows, with a step that is coprime to the number of rows."""

    def __init__(self, seed: int, rows: int) -> None:
        if rows >= 1 << 63 - LIMB:
            raise UserError(f"order hash:{seed} for a table of {rows} rows; fewer than {1 << 63 - LIMB} are allowed")
        self.rows = rows
        self.step = next(step for step in range(max(1, int(GOLDEN * rows)), rows + 1) if math.gcd(step, rows) == 1)
        self.start = seed % rows
        self._inverse_step = pow(self.step, -1, rows)

    def positions(self, ids: Tensor) -> Tensor:
        return (_multiply(ids.long(), self.step, self.rows) + self.start) % self.rows

    def ids(self, positions: Tensor) -> Tensor:
        return _multiply((positions.long() - self.start) % self.rows, self._inverse_step, self.rows)


class LoadOrder:
    """Puts the k hottest ids at positions 0 to k - 1; other ids below k take the positions that become free."""

    def __init__(self, hottest: Tensor, rows: int) -> None:
        hottest = hottest.long()
        if len(hottest.unique()) < len(hottest) or len(hottest) and not 0 <= hottest.min() <= hottest.max() < rows:
            raise UserError(f"the {len(hottest)} hottest ids of a table of {rows} rows must be distinct rows of it")
        k = len(hottest)
        displaced = torch.ones(k, dtype=torch.bool)
        displaced[hottest[hottest < k]] = False
        ids = torch.cat([hottest, displaced.nonzero().flatten()])
        positions = torch.cat([torch.arange(k), hottest[hottest >= k].sort().values])
        self._to_position, self._to_id = _SparseMap(ids, positions), _SparseMap(positions, ids)

    def positions(self, ids: Tensor) -> Tensor:
        return self._to_position(ids)

    def ids(self, positions: Tensor) -> Tensor:
        return self._to_id(positions)


class _SparseMap:
    """A map of integers that changes only the given keys."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self._keys, order = keys.sort()
        self._values = values[order]

    def __call__(self, numbers: Tensor) -> Tensor:
        numbers = numbers.long()
        if not len(self._keys):
            return numbers
        index = torch.searchsorted(self._keys, numbers).clamp(max=len(self._keys) - 1)
        return torch.where(self._keys[index] == numbers, self._values[index], numbers)


class GrowthOrder:
    """Positions of the ids of a table that grows: a hash of 64 bits, scaled to its rows. Many ids have one position."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def positions(self, ids: Tensor) -> Tensor:
        return ((splitmix64(ids.long()) >> 32 & 0xFFFFFFFF) * self.rows) >> 32

    def ids(self, positions: Tensor) -> Tensor:
        raise NotImplementedError("the ids of a table that grows are known to its shards only")


def make_row_order(name: str, rows: int, hottest: Tensor | None = None) -> RowOrder:
    """The row order with this name in a plan: "id", "hash:SEED", or "load", which needs the hottest ids."""
    if name == "id":
        return IdOrder()
    if name.startswith("hash:"):
        return HashOrder(int(name.removeprefix("hash:")), rows)
    if hottest is None:
        raise UserError("order load: the hottest ids are unknown; pass `hottest`, or plan with order hash or id")
    return LoadOrder(hottest, rows)


def _multiply(x: Tensor, factor: int, modulus: int) -> Tensor:
    """x * factor % modulus without overflow of int64."""
    if modulus <= SQUARE_FITS:
        return x * factor % modulus
    product = torch.zeros_like(x)
    for shift in reversed(range(0, factor.bit_length(), LIMB)):
        product = ((product << LIMB) % modulus + x * (factor >> shift & (1 << LIMB) - 1) % modulus) % modulus
    return product


def rows_in_order(order: RowOrder, rows: IndexRange) -> IndexRange | Tensor:
    """The ids at these positions: a range, or one by one."""
    if isinstance(order, IdOrder):
        return rows
    ids = order.ids(torch.arange(*rows))
    return ids.int() if not len(ids) or int(ids.max()) <= torch.iinfo(torch.int32).max else ids

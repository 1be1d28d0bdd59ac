"""Where the rows of a table stand: a plan's orders, each a bijection between ids and positions.

"hash" steps through the table by nearly the golden ratio of its rows: any run of ids, the hottest for one, is spread so
evenly that every stretch of positions gets its share. "load" has the hottest rows first, in the order it is told.
"""

import math
from typing import Protocol

import torch
from torch import Tensor

from shardwright.errors import UserError

GOLDEN = (math.sqrt(5) - 1) / 2
SQUARE_FITS = 1 << 31  # products of two numbers below it fit in int64
LIMB = 8  # bits at a time of longer products


class RowOrder(Protocol):
    def positions(self, ids: Tensor) -> Tensor: ...

    def ids(self, positions: Tensor) -> Tensor: ...


class IdOrder:
    """Rows stand where their ids say."""

    def positions(self, ids: Tensor) -> Tensor:
        return ids

    def ids(self, positions: Tensor) -> Tensor:
        return positions


class HashOrder:
    def __init__(self, seed: int, rows: int) -> None:
        if rows >= 1 << 63 - LIMB:
            raise UserError(f"order hash:{seed} of {rows} rows; it goes up to {1 << 63 - LIMB}")
        self.rows = rows
        self.step = next(step for step in range(max(1, int(GOLDEN * rows)), rows + 1) if math.gcd(step, rows) == 1)
        self.start = seed % rows
        self._back = pow(self.step, -1, rows)

    def positions(self, ids: Tensor) -> Tensor:
        return (_times(ids.long(), self.step, self.rows) + self.start) % self.rows

    def ids(self, positions: Tensor) -> Tensor:
        return _times((positions.long() - self.start) % self.rows, self._back, self.rows)


class LoadOrder:
    """The k hottest ids stand first; ids below k that are none of them stand where those were."""

    def __init__(self, hottest: Tensor, rows: int) -> None:
        hottest = hottest.long()
        if len(hottest.unique()) < len(hottest) or len(hottest) and not 0 <= hottest.min() <= hottest.max() < rows:
            raise UserError(f"the {len(hottest)} hottest ids of a table of {rows} rows: each comes once, and is a row")
        k = len(hottest)
        displaced = torch.ones(k, dtype=torch.bool)
        displaced[hottest[hottest < k]] = False
        ids = torch.cat([hottest, displaced.nonzero().flatten()])
        positions = torch.cat([torch.arange(k), hottest[hottest >= k].sort().values])
        self._there, self._back = _Exceptions(ids, positions), _Exceptions(positions, ids)

    def positions(self, ids: Tensor) -> Tensor:
        return self._there(ids)

    def ids(self, positions: Tensor) -> Tensor:
        return self._back(positions)


class _Exceptions:
    """A map that leaves all but a few numbers as they are."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self._keys, order = keys.sort()
        self._values = values[order]

    def __call__(self, numbers: Tensor) -> Tensor:
        numbers = numbers.long()
        if not len(self._keys):
            return numbers
        at = torch.searchsorted(self._keys, numbers).clamp(max=len(self._keys) - 1)
        return torch.where(self._keys[at] == numbers, self._values[at], numbers)


def make_row_order(name: str, rows: int, hottest: Tensor | None = None) -> RowOrder:
    """The order of that name in a plan; "load" needs to be told which ids are hottest."""
    if name == "id":
        return IdOrder()
    if name.startswith("hash:"):
        return HashOrder(int(name.removeprefix("hash:")), rows)
    if hottest is None:
        raise UserError("order load: which ids are hottest is not known; give `hottest`, or plan with order hash or id")
    return LoadOrder(hottest, rows)


def _times(x: Tensor, factor: int, modulus: int) -> Tensor:
    if modulus <= SQUARE_FITS:
        return x * factor % modulus
    found = torch.zeros_like(x)
    for shift in reversed(range(0, factor.bit_length(), LIMB)):
        found = ((found << LIMB) % modulus + x * (factor >> shift & (1 << LIMB) - 1) % modulus) % modulus
    return found

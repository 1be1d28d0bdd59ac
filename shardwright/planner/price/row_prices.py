"""Seconds of looking up and updating table rows: by id, and by vector.

`lookup` and `update` are measured with bags of IDS_PER_BAG ids, so the price of an id includes that share of a vector.
A vector more takes the time by which bags of one id are slower.
"""

from functools import cache
from typing import Literal

from shardwright.planner.price import overheads, primitives
from shardwright.spec.cluster import IDS_PER_BAG, Device

Op = Literal["lookup", "update"]
MANY_ROWS = 1 << 16


class RowPrices:
    """The prices of a device, each computed once."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.id_seconds, self._vector_seconds = cache(self._compute_id_seconds), cache(self._compute_vector_seconds)

    def vector_seconds(self, op: Op, columns: int, vectors: float, ids: float) -> float:
        """Seconds of writing the vectors of a lookup, or of reading their gradients, beyond those that `ids` include.

        A lookup writes a vector for a bag without ids; an update does not read its gradient.
        """
        unpriced = (vectors if op == "lookup" else min(vectors, ids)) - ids / IDS_PER_BAG
        return max(0.0, unpriced) * self._vector_seconds(op, columns)

    def sum_seconds(self, rows: float, columns: int, *, row_bytes: int, distinct: float = 1.0) -> float:
        """Seconds of an update of `rows` rows, each from a gradient of its own."""
        return rows * self.id_seconds("update", row_bytes, distinct) + self.vector_seconds(
            "update", columns, rows, rows
        )

    def _compute_id_seconds(self, op: Op, row_bytes: int, distinct: float) -> float:
        """Seconds per id in a call with many of them; `distinct`: the share of ids whose row is not yet in the
        processor's caches."""
        first = self._amortized(op, row_bytes)
        if not overheads.has_price(self._device, f"{op}.near", "float32"):
            return first
        return distinct * first + (1 - distinct) * min(first, self._amortized(f"{op}.near", row_bytes))

    def _compute_vector_seconds(self, op: Op, columns: int) -> float:
        if not overheads.has_price(self._device, f"{op}.single", "float32"):
            return 0.0
        single, long = (self._amortized(name, 4 * columns) for name in (f"{op}.single", op))
        return max(0.0, single - long) / (1 - 1 / IDS_PER_BAG)

    def _amortized(self, op: str, row_bytes: int) -> float:
        """Seconds per row in a call with many rows, without the fixed cost of the call."""
        seconds = primitives.row_access_cost(self._device, op, MANY_ROWS, row_bytes).seconds
        return (seconds - primitives.find_price(self._device, op, "float32").call_seconds) / MANY_ROWS

"""What handling ids and vectors takes of a rank's own time, beside lookups and updates: requests made and read, columns
put where they belong and taken apart again.

Where a cluster has no price of it, memory is passed over so many times.
"""

from types import MappingProxyType

import numpy as np

from shardwright.planner import cost
from shardwright.spec.cluster import Device

ID_PASSES, ID_BYTES = MappingProxyType({"ids": 8, "ids.cut": 8, "distinct": 24}), 8
COLUMN_PASSES = 2


def ids_seconds(device: Device, num_R: np.ndarray, op: str = "ids") -> np.ndarray:
    """Of ids on their way into messages, and out of them; by "ids.cut" of those told apart by row besides, by
    "distinct" of those of which each row is found once."""
    if known(device, op, ""):
        found = cost.price(device, op, "")
        return num_R * (found.seconds_per_byte * ID_BYTES) + np.where(num_R > 0, found.call_seconds, 0.0)
    return num_R * (ID_PASSES[op] * ID_BYTES / device.tiers[0].read_bytes_per_second)


def columns_seconds(device: Device, vectors: float, columns: float) -> float:
    """Of so many vectors, with so many columns of float32 in all, each put into its place."""
    if not vectors:
        return 0.0
    if known(device, "columns", "float32"):
        return cost.rows(device, "columns", max(1, round(vectors)), max(4, round(4 * columns / vectors))).seconds
    return COLUMN_PASSES * 4 * columns / device.tiers[0].read_bytes_per_second


def known(device: Device, op: str, dtype: str) -> bool:
    return any((one.op, one.dtype) == (op, dtype) for one in device.prices)

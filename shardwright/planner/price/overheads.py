"""What handling ids and vectors takes of a rank's own time, beside lookups and updates: requests made and read, columns
put where they belong and taken apart again.

Where a cluster has no price of it, memory is passed over so many times.

What a stage takes however few samples there are is told in small calls of torch, with the Python around them: from
traces of steps with eight samples in all, 16 and 32 features, on 2 and 4 ranks, less what prices of ids, rows and
columns hold of it. It fits such steps on 2 ranks; on 4 ranks that share two cores they take longer.
"""

from types import MappingProxyType

import numpy as np

from shardwright.planner.price import primitives
from shardwright.spec.cluster import Device

ID_PASSES, INT64_BYTES = MappingProxyType({"ids": 8, "ids.cut": 8, "distinct": 24}), 8
COLUMN_PASSES = 2
# Of each step, of a feature, of every further rank, of a table whose rows travel or that every rank has.
STAGE_CALLS = MappingProxyType(
    {
        "request": (105, 0, 30, 3),
        "lookup": (0, 0, 0, 2),
        "top": (30, 0, 0, 4),
        "top.backward": (140, 18, 32, 2),
        "update": (85, 2, 15, 13),
        "step": (175, 0, 0, 0),
        "emit": (100, 0, 0, 0),  # and what drives the stages
    }
)
# With full batches: 9 ms of processor time for 4.2 such pieces a rank, less what their rows are priced at.
COLUMN_SHARD_CALLS = 1000


def ids_seconds(device: Device, num_ids_R: np.ndarray, op: str = "ids") -> np.ndarray:
    """Of ids on their way into messages, and out of them; by "ids.cut" of those told apart by row besides, by
    "distinct" of those of which each row is found once."""
    if has_price(device, op, ""):
        found = primitives.find_price(device, op, "")
        return num_ids_R * (found.seconds_per_byte * INT64_BYTES) + np.where(num_ids_R > 0, found.call_seconds, 0.0)
    return num_ids_R * (ID_PASSES[op] * INT64_BYTES / device.tiers[0].read_bytes_per_second)


def columns_seconds(device: Device, vectors: float, columns: float) -> float:
    """Of so many vectors, with so many columns of float32 in all, each put into its place."""
    if not vectors:
        return 0.0
    if has_price(device, "columns", "float32"):
        return primitives.row_access_cost(
            device, "columns", max(1, round(vectors)), max(4, round(4 * columns / vectors))
        ).seconds
    return COLUMN_PASSES * 4 * columns / device.tiers[0].read_bytes_per_second


def stage_overhead_seconds(
    device: Device, num_features: int, num_other_ranks: int, num_tables: int
) -> dict[str, float]:
    """By stage, where there are `others`, of what does not grow with the batch."""
    each = op_overhead_seconds(device)
    if not num_other_ranks or not each:
        return {}
    return {
        stage: each * (fixed + by_feature * num_features + by_rank * num_other_ranks + by_table * num_tables)
        for stage, (fixed, by_feature, by_rank, by_table) in STAGE_CALLS.items()
    }


def column_shard_seconds(device: Device) -> float:
    """Of a piece with some of a row's columns, where steps look at whole rows; 0 where calls have no price."""
    return COLUMN_SHARD_CALLS * op_overhead_seconds(device)


def op_overhead_seconds(device: Device) -> float:
    """Of a small call of torch, with the Python around it; 0 where it has no price."""
    return primitives.find_price(device, "calls", "").seconds_per_byte if has_price(device, "calls", "") else 0.0


def has_price(device: Device, op: str, dtype: str) -> bool:
    return any((one.op, one.dtype) == (op, dtype) for one in device.prices)

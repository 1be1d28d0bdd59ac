"""Seconds of a rank's work around lookups and updates: requests, copies, small torch calls.

Where a cluster has no measured price, a number of passes over memory is assumed.

Fixed overheads of stages, collectives and activation checkpointing are counted in small torch calls with the Python
around them. The counts of stages come from traces of steps with eight samples in all, 16 and 32 features, on 2 and 4
ranks, less what the prices of ids, rows and columns explain. They match these steps on 2 ranks; on 4 ranks that share
two cores the steps take longer.

Shape legend: R ranks.
"""

from collections.abc import Iterable
from types import MappingProxyType

import numpy as np

from shardwright.planner.price import primitives
from shardwright.spec.cluster import Device, Tier
from shardwright.spec.plan import RecomputePolicy

ID_PASSES, INT64_BYTES = MappingProxyType({"ids": 8, "ids.cut": 8, "distinct": 24, "place": 100}), 8
COLUMN_PASSES = 2
# Calls per step, per feature, per other rank, per table with row exchange or with a replica on every rank.
STAGE_CALLS = MappingProxyType(
    {
        "request": (105, 0, 30, 3),
        "lookup": (0, 0, 0, 2),
        "top": (30, 0, 0, 4),
        "top.backward": (140, 18, 32, 2),
        "update": (85, 2, 15, 13),
        "step": (175, 0, 0, 0),
        "emit": (100, 0, 0, 0),  # includes the executor of the stages
    }
)
# Per column shard. Measured with full batches: 9 ms of processor time for 4.2 of them per rank, less their rows' price.
COLUMN_SHARD_CALLS = 1000
# Per collective of a sharded block, with waits for other ranks of a host. Measured on forward and backward of a block
# in the lab, 2 hosts x 2 ranks.
COLLECTIVE_CALLS = MappingProxyType({"gather": 300, "scatter": 500, "reduce": 200})
# Per recomputed block, and per operation in it. From the processor time of forward and backward of blocks with 7 and 22
# operations on 4 samples.
RECOMPUTE_CALLS = MappingProxyType[RecomputePolicy, tuple[int, int]]({"nothing": (76, 8), "products": (160, 17)})


def ids_seconds(device: Device, num_ids_R: np.ndarray, op: str = "ids") -> np.ndarray:
    """Seconds by rank of handling ids in outgoing or incoming requests.

    `op`: "ids" for handling alone, "ids.cut" for splitting by row range, "distinct" for deduplication, "place" for
    deduplication and finding lines of a cache.
    """
    if has_price(device, op, ""):
        price = primitives.find_price(device, op, "")
        return num_ids_R * (price.seconds_per_byte * INT64_BYTES) + np.where(num_ids_R > 0, price.call_seconds, 0.0)
    return num_ids_R * (ID_PASSES[op] * INT64_BYTES / device.tiers[0].read_bytes_per_second)


def page_byte_seconds(device: Device, disk: Tier) -> float:
    """Seconds of reading a byte of random pages; at the rate of long reads where these have no price."""
    if has_price(device, "pages", ""):
        return primitives.find_price(device, "pages", "").seconds_per_byte
    return 1 / disk.read_bytes_per_second


def columns_seconds(device: Device, vectors: float, columns: float) -> float:
    """Seconds of copying vectors into place; `columns`: the number of their values in all."""
    if not vectors:
        return 0.0
    if has_price(device, "columns", "float32"):
        row_bytes = max(4, round(4 * columns / vectors))
        return primitives.row_access_cost(device, "columns", max(1, round(vectors)), row_bytes).seconds
    return COLUMN_PASSES * 4 * columns / device.tiers[0].read_bytes_per_second


def stage_overhead_seconds(
    device: Device, num_features: int, num_other_ranks: int, num_tables: int
) -> dict[str, float]:
    """Seconds by stage of work that does not grow with the batch; empty on a single rank."""
    call = op_overhead_seconds(device)
    if not num_other_ranks or not call:
        return {}
    return {
        stage: call * (fixed + features * num_features + ranks * num_other_ranks + tables * num_tables)
        for stage, (fixed, features, ranks, tables) in STAGE_CALLS.items()
    }


def column_shard_seconds(device: Device) -> float:
    """Seconds of updating a column shard with row-wise optimizer state; 0 where calls have no price."""
    return COLUMN_SHARD_CALLS * op_overhead_seconds(device)


def collectives_overhead_seconds(device: Device, collectives: Iterable[str]) -> float:
    """Seconds of issuing collectives of a sharded block; each is "gather", "scatter" or "reduce"."""
    return sum(COLLECTIVE_CALLS[name] for name in collectives) * op_overhead_seconds(device)


def recompute_overhead_seconds(device: Device, blocks: Iterable[tuple[RecomputePolicy, int]]) -> float:
    """Seconds of activation checkpointing; `blocks`: policy and number of operations of each recomputed block."""
    calls = sum(RECOMPUTE_CALLS[policy][0] + RECOMPUTE_CALLS[policy][1] * num for policy, num in blocks)
    return calls * op_overhead_seconds(device)


def op_overhead_seconds(device: Device) -> float:
    """Seconds of a small torch call with the Python around it; 0 where it has no price."""
    return primitives.find_price(device, "calls", "").seconds_per_byte if has_price(device, "calls", "") else 0.0


def has_price(device: Device, op: str, dtype: str) -> bool:
    """Whether the device has a price of this operation."""
    return any((price.op, price.dtype) == (op, dtype) for price in device.prices)

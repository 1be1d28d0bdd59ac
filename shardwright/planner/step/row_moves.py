"""Rows copied between memory tiers in a step, for tables with a cache in the fastest one.

The rows that a batch needs and the cache lacks are copied from the tier that has them, and as many rows that trained
are written back. A row on disk is one page read; a row written to disk is appended to a file. Rows on table servers
take one call a step to each server.

Shape legend: R ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardwright.planner.price import overheads, primitives
from shardwright.planner.problem import PlacedTables, Problem
from shardwright.planner.step import server_calls
from shardwright.spec.cluster import Device, Tier
from shardwright.spec.row_cache import DISK, PAGE_BYTES, RECORD_HEADER_BYTES, SERVERS
from shardwright.spec.wire import ID_BYTES


@dataclass(frozen=True, slots=True)
class RowMoves:
    """Of a step, by rank. `place_R`: seconds of finding lines for ids, and `copy_R` of the copies, both beside other
    work; `bytes_R`: of the rows copied to the fastest tier."""

    place_R: np.ndarray
    copy_R: np.ndarray
    bytes_R: np.ndarray


def moves_by_rank(problem: Problem, placed: PlacedTables, found: Sequence[Sequence[float]]) -> RowMoves:
    """`found`: by table and tier, the share of a batch's distinct rows found there."""
    num, device = problem.cluster.num_ranks, problem.cluster.device
    ids_R, copy_R, bytes_R, served_R, sent_R = np.zeros((5, num))
    cached = [(unit, ranks) for unit, ranks in placed.pairs if found[unit.table_number][0] < 1]
    for unit, ranks in cached:
        load, own = problem.unit_load(unit), list(ranks)
        ratios = np.array(unit.lookup_ratios or (1.0,))
        ids = unit.lookups * ratios
        rows = ids * problem.distinct_share(load, unit.sharding)
        ids_R[own] += ids
        for tier, share in zip(device.tiers[1:], found[unit.table_number][1:], strict=True):
            row_bytes = load.row_bytes(unit.width)
            bytes_R[own] += rows * share * row_bytes
            if tier.name == SERVERS:
                served_R[own] += rows * share * row_bytes
                sent_R[own] += rows * share * (row_bytes + 2 * ID_BYTES)  # with the ids of both
            else:
                copy_R[own] += rows * share * _row_seconds(device, tier, row_bytes)
    if served_R.any():
        copy_R += server_calls.call_seconds(problem, sent_R, served_R)
    return RowMoves(overheads.ids_seconds(device, ids_R, "place"), copy_R, bytes_R)


def _row_seconds(device: Device, tier: Tier, row_bytes: float) -> float:
    """Seconds of copying a row from this tier to the fastest, and another one back."""
    fast = device.tiers[0].name
    if tier.name == DISK:
        written_bytes = row_bytes + RECORD_HEADER_BYTES
        return PAGE_BYTES * overheads.page_byte_seconds(device, tier) + written_bytes / tier.write_bytes_per_second
    pairs = ((tier.name, fast), (fast, tier.name))  # both at once
    return row_bytes * max(primitives.copy_cost(device, 1 << 30, *pair).seconds for pair in pairs) / (1 << 30)

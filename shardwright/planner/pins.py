"""Pins: what a user fixes about a table, as text such as "row" or "column:4@0,1"."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from shardwright.errors import UserError, did_you_mean
from shardwright.planner.problem import Problem
from shardwright.planner.tables.sharding import Sharding
from shardwright.spec.cluster import Cluster

REPLICA_SCHEMES = ("copy-table", "copy-column", "copy-row")
SCHEMES = ("table", "row", "column", "data", "table-row", "table-column", "column-row", *REPLICA_SCHEMES)


@dataclass(frozen=True, slots=True)
class Pin:
    """What the user wants of a table: NAME, NAME:PIECES, and @RANK,... where it is to be."""

    scheme: str
    column_shards: int = 0  # 0: any
    ranks: tuple[int, ...] = ()


def parse_pin(text: str) -> Pin:
    """As `column:4`, `table@3`, `row`."""
    scheme, _, ranks = text.partition("@")
    name, _, pieces = scheme.partition(":")
    if name not in SCHEMES:
        raise UserError(f'pin "{text}": no scheme "{name}"{did_you_mean(name, SCHEMES)}')
    try:
        found = Pin(name, int(pieces or 0), tuple(int(rank) for rank in ranks.split(",") if ranks))
    except ValueError:
        raise UserError(f'pin "{text}": wanted SCHEME[:PIECES][@RANK,...], as column:4@0,1,2,3') from None
    if found.scheme in ("data", "row", *REPLICA_SCHEMES) and found.ranks:
        where = "in every group" if found.scheme in REPLICA_SCHEMES else "on every rank"
        raise UserError(f'pin "{text}": "{found.scheme}" lies {where}; drop @')
    return found


def pinned_ranks(posed: Problem, pins: Mapping[str, Pin]) -> dict[int, tuple[int, ...]]:
    """By table's number."""
    found = {at: pins.get(demand.table.name) for at, demand in enumerate(posed.table_loads)}
    return {at: wanted.ranks for at, wanted in found.items() if wanted and wanted.ranks}


def matches_pin(cut: Sharding, wanted: Pin, cluster: Cluster) -> bool:
    """Ranks say how many pieces, where nothing else does."""
    group = prod(level.num for level in cluster.levels[: cut.row_levels])
    pieces = wanted.column_shards or len(wanted.ranks) // group
    return cut.scheme == wanted.scheme and pieces in (0, cut.column_shards)


def pin_text(wanted: Pin) -> str:
    return f"{wanted.scheme}:{wanted.column_shards}" if wanted.column_shards else wanted.scheme

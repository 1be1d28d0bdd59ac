"""Hits of caches of table rows on a recipe's batches: what `shardwright cache-sim --write` records for the planner."""

from dataclasses import dataclass, replace
from typing import Literal

from shardwright.errors import UserError
from shardwright.spec import files
from shardwright.spec.workload import CacheHits, Workload


@dataclass(frozen=True, slots=True)
class RecordedHits:
    """`recipe`: whose batches they are."""

    version: Literal[1]
    recipe: str
    tables: tuple[CacheHits, ...]


def with_recorded_hits(workload: Workload, path: str) -> Workload:
    """The workload with the hits of a file."""
    recorded = files.read(RecordedHits, path)
    names = {table.name for table in workload.tables}
    if unknown := [entry.table for entry in recorded.tables if entry.table not in names]:
        raise UserError(
            f'{path}: hits of table "{unknown[0]}" of {recorded.recipe}; this model\'s tables are '
            f"{', '.join(sorted(names))}: record them again with its recipe"
        )
    return replace(workload, cache_hits=recorded.tables)

"""Hit rates and costs of caches of a recipe's tables, by size: what `shardwright cache-sim` reports.

Shape legend: U distinct rows of a batch.
"""

import itertools
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from math import prod

import numpy as np
import torch
from torch import Tensor

from shardwright.config import Settings
from shardwright.embeddings.cache_simulation import TRAINING, Hits, Policy, TableAccesses, num_lines, policies, simulate
from shardwright.errors import UserError
from shardwright.jagged import Batch, ids_per_feature
from shardwright.layers.embedding import EmbeddingTables
from shardwright.measure.describe import sparse_of
from shardwright.runtime.run import recipe
from shardwright.spec.cache_hits import RecordedHits
from shardwright.spec.cluster import Tier
from shardwright.spec.optimizer import state_shapes
from shardwright.spec.row_cache import HALF_LIFE_BATCHES, KNOWN_BATCHES, PAGE_BYTES, RECORD_HEADER_BYTES, WAYS
from shardwright.spec.workload import CacheHits, Table


@dataclass(frozen=True, slots=True)
class CacheSize:
    """A cache with lines for a share of the rows of each table; hits by policy and table."""

    share: float
    bytes_: int
    hits: dict[str, dict[str, Hits]]

    def total(self, policy: str) -> Hits:
        """Of all tables."""
        return sum(self.hits[policy].values(), Hits())


@dataclass(frozen=True, slots=True)
class CacheSizes:
    """`small`: names of tables of which the smallest cache does not hold the rows of a batch; they stay in memory.
    Sizes that do not hold a batch of any table are left out."""

    tables: tuple[TableAccesses, ...]
    small: tuple[str, ...]
    num_batches: int
    policies: tuple[Policy, ...]
    sizes: tuple[CacheSize, ...]

    @property
    def num_counted(self) -> int:
        """Batches that are counted: the second half."""
        return self.num_batches - self.num_batches // 2

    @property
    def table_bytes(self) -> int:
        return sum(table.num_rows * table.row_bytes for table in self.tables)

    def disk_seconds(self, size: CacheSize, policy: str, disk: Tier) -> float:
        """Seconds of a batch's reads and writes at the disk's rates: a page for each row that is missing, unless it was
        never used before, and the bytes of each row that is written back."""
        hits, row_bytes = size.total(policy), self._mean_row_bytes()
        read = (hits.missing - hits.new) * PAGE_BYTES / disk.read_bytes_per_second
        write = hits.written_back * (row_bytes + RECORD_HEADER_BYTES) / disk.write_bytes_per_second
        return (read + write) / self.num_counted

    def recorded_hits(self, recipe: str) -> RecordedHits:
        """Hits of the policy that training has, for the planner."""
        policy = self.policies[TRAINING].name
        entries: list[CacheHits] = []
        for table in self.tables:
            points = {num_lines(table, size.share): size.hits[policy][table.name].rate for size in self.sizes}
            rates = np.maximum.accumulate([*points.values()])  # hits of a larger cache may be fewer by chance
            entries.append(CacheHits(table.name, tuple(zip(points, map(float, rates), strict=True))))
        return RecordedHits(1, recipe, tuple(entries))

    def _mean_row_bytes(self) -> float:
        return self.table_bytes / max(1, sum(table.num_rows for table in self.tables))


def compare_sizes(
    settings: Settings,
    shares: Sequence[float],
    num_batches: int,
    report: Callable[[str], None],
) -> CacheSizes:
    """Record the accesses of a recipe's first batches, and simulate caches of these shares of the rows."""
    report("reading batches")
    tables = record_accesses(settings, num_batches)
    useful = [share for share in shares if any(_holds_batches(table, share) for table in tables)]
    if not useful:
        raise UserError(
            f"{100 * max(shares):g} % of the rows of no table hold the rows of a batch: give larger --sizes, or "
            "a smaller train.batch_size"
        )
    cached = tuple(table for table in tables if _holds_batches(table, min(useful)))
    compared, sizes = policies(HALF_LIFE_BATCHES, KNOWN_BATCHES), list[CacheSize]()
    for share in useful:
        hits: dict[str, dict[str, Hits]] = {policy.name: {} for policy in compared}
        lines = [num_lines(table, share) for table in cached]
        for policy in compared:
            report(f"{100 * share:g} % of the rows, {policy.name}")
            for table, num in zip(cached, lines, strict=True):
                hits[policy.name][table.name] = simulate(table, num, policy)
        bytes_ = sum(num * table.row_bytes for table, num in zip(cached, lines, strict=True))
        sizes.append(CacheSize(share, bytes_, hits))
    small = tuple(table.name for table in tables if table not in cached)
    return CacheSizes(cached, small, len(cached[0].batches), compared, tuple(sizes))


def record_accesses(settings: Settings, num_batches: int) -> list[TableAccesses]:
    """The distinct rows that each of the first batches uses, by table."""
    source = recipe.make_source(settings)
    sparse = sparse_of(recipe.make_model(settings, source))
    if sparse is None:
        raise UserError("this recipe's model has no tables, so there is nothing to cache")
    batches: dict[str, list[Tensor]] = {table.name: [] for table in sparse.tables}
    with closing(recipe.make_loader(settings, source)) as loader:
        for batch in itertools.islice(loader, num_batches):
            for name, rows_U in _distinct_rows(sparse, batch).items():
                batches[name].append(rows_U)
    return [
        TableAccesses(table.name, table.rows, _row_bytes(table, sparse), tuple(batches[table.name]))
        for table in sparse.tables
    ]


def _distinct_rows(sparse: EmbeddingTables, batch: Batch) -> dict[str, Tensor]:
    ids = sparse.read(batch.features)
    sparse.check(ids)
    by_table: dict[str, list[Tensor]] = {table.name: [] for table in sparse.tables}
    for feature, values in zip(sparse.features, ids.values.split(ids_per_feature(ids)), strict=True):
        by_table[feature.table].append(values.long())
    return {name: torch.unique(torch.cat(values)) for name, values in by_table.items()}


def _row_bytes(table: Table, sparse: EmbeddingTables) -> int:
    shapes = state_shapes(sparse.optimizer, 1, table.dim) if sparse.optimizer else {}
    state_bytes = 8 if table.dtype == "float64" else 4
    weight: torch.dtype = getattr(torch, table.dtype)
    return table.dim * weight.itemsize + sum(prod(shape) for shape in shapes.values()) * state_bytes


def _holds_batches(table: TableAccesses, share: float) -> bool:
    """Whether a cache with this share of the rows has lines for the rows of any batch."""
    return share * table.num_rows >= max([WAYS, *map(len, table.batches)])

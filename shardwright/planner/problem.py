"""The input of the search (`Problem`), and its output: the units on their ranks (`PlacedTables`)."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from math import prod

import numpy as np

from shardwright.planner.tables.sharding import Sharding, ShardUnit, TableLoad
from shardwright.spec.cluster import Cluster, Level
from shardwright.spec.plan import Dense, widest_dtype
from shardwright.spec.workload import DTYPE_BYTES, Block, Dtype, Workload

REST_BLOCK = "rest"  # the parameters of a described model that are in no block: always replicated, never recomputed


@dataclass(frozen=True, slots=True)
class Precision:
    """The dtypes of a plan: weights of tables, vectors and gradients on the wire, dense gradients, matrix products, and
    moments of the dense optimizer."""

    tables: Dtype | None = None  # None: the model's own
    vectors: Dtype = "float32"
    gradients: Dtype = "float32"
    dense_gradients: Dtype = "float32"
    matmuls: Dtype = "float32"
    moments: Dtype = "float32"


@dataclass(frozen=True, slots=True)
class Problem:
    """A workload at a global batch size on a cluster, in a precision.

    `table_loads` are the loads of tables with vector exchange, `row_exchange_loads` with row exchange; tables with
    unpooled features have row exchange in both. `dense` is the layout of the dense model, `dense_strategy` the only
    parallelism strategy to consider, if one is set. `expand_blocks`: simulate the blocks one by one, not as one before
    and one after the vectors are needed. `torchrec`: within TorchRec's limits, which exchanges vectors (never
    deduplicated rows), splits rows evenly by id, and has no replicas per host. A pace is the time of blocks over their
    price, forward and backward: of the bottom, which needs no vectors, and of the top.
    """

    workload: Workload
    cluster: Cluster
    batch_size: int
    precision: Precision
    table_loads: tuple[TableLoad, ...]
    row_exchange_loads: tuple[TableLoad, ...]
    dense: Dense = Dense()
    expand_blocks: bool = False
    dense_strategy: str = ""
    torchrec: bool = False
    bottom_pace: tuple[float, float] = (1.0, 1.0)
    top_pace: tuple[float, float] = (1.0, 1.0)

    def table_load(self, table_number: int, sharding: Sharding) -> TableLoad:
        return (self.row_exchange_loads if sharding.row_exchange else self.table_loads)[table_number]

    def placed_loads(self, placed: "PlacedTables") -> list[TableLoad]:
        """The load of every table, with the exchange that was chosen."""
        return [
            (self.row_exchange_loads if number in placed.row_exchange_tables else self.table_loads)[number]
            for number in range(len(self.table_loads))
        ]

    def bytes_on_every_rank(self, placed: "PlacedTables") -> float:
        """Bytes that every rank needs besides its units: data-parallel tables, and buffers of row exchange."""
        replicated = [self.table_loads[number] for number in placed.data_parallel_tables]
        exchanged = [self.row_exchange_loads[number] for number in placed.row_exchange_tables]
        return sum(load.table.rows * load.row_bytes(load.table.dim) for load in replicated) + sum(
            map(self.row_buffer_bytes, exchanged)
        )

    def row_buffer_bytes(self, table_load: TableLoad) -> float:
        """Bytes of a rank's received rows of a table and of their gradients; 0 with vector exchange."""
        if table_load.local_pooling is None:
            return 0.0
        return 2 * 4 * self.local_batch_size * table_load.ids_per_sample * table_load.table.dim

    def distinct_share(self, table_load: TableLoad, sharding: Sharding) -> float:
        """Distinct rows over ids, in the ids of a batch that one replica receives."""
        if sharding.num_replicas == 1:
            return table_load.distinct_share
        return min(
            1.0,
            table_load.distinct_rows_per_group(sharding.num_replicas)
            * sharding.num_replicas
            / max(self.batch_size * table_load.ids_per_sample, 1e-300),
        )

    @property
    def moment_share(self) -> float:
        """Bytes of a moment of the dense optimizer, per byte of its parameter."""
        return DTYPE_BYTES[self.precision.moments] / DTYPE_BYTES[widest_dtype(self.workload.tables)]

    @property
    def local_batch_size(self) -> float:
        return self.batch_size / self.cluster.num_ranks

    @property
    def local_batch_share(self) -> float:
        """A rank's local batch, over the batch that the workload was described with."""
        return self.local_batch_size / self.workload.batch_size

    @property
    def shard_levels(self) -> tuple[Level, ...]:
        """The levels whose ranks share the dense weights, innermost first."""
        return tuple(level for level in self.cluster.levels if level.name in self.dense.shard)

    def num_shards(self, block: Block) -> int:
        """The number of shards of a block's weights."""
        return 1 if block.name == REST_BLOCK else prod(level.num for level in self.shard_levels)

    @property
    def level_names(self) -> tuple[str, ...]:
        return tuple(level.name for level in self.cluster.levels)

    @property
    def ranks_per_host(self) -> int:
        """The number of ranks that the innermost level joins."""
        return self.cluster.levels[0].num if self.cluster.levels else 1

    @property
    def is_hierarchical(self) -> bool:
        return 1 < self.ranks_per_host < self.cluster.num_ranks


@dataclass(frozen=True)
class PlacedTables:
    """Units, the ranks of each (replica by replica), and the numbers of data-parallel tables."""

    units: tuple[ShardUnit, ...]
    ranks: tuple[tuple[int, ...], ...]
    data_parallel_tables: tuple[int, ...] = ()

    @cached_property
    def row_exchange_tables(self) -> frozenset[int]:
        """Numbers of the tables with row exchange that could have vector exchange."""
        return frozenset(unit.table_number for unit in self.units if unit.sharding.row_exchange)

    @cached_property
    def units_by_table(self) -> dict[int, list[tuple[ShardUnit, tuple[int, ...]]]]:
        """The units of each table with their ranks; data-parallel tables have none."""
        by_table: dict[int, list[tuple[ShardUnit, tuple[int, ...]]]] = {}
        for unit, ranks in zip(self.units, self.ranks, strict=True):
            by_table.setdefault(unit.table_number, []).append((unit, ranks))
        return by_table

    @cached_property
    def by_num_replicas(self) -> "dict[int, PlacedTables]":
        """The units by their number of replicas."""
        groups: dict[int, list[tuple[ShardUnit, tuple[int, ...]]]] = {}
        for unit, ranks in zip(self.units, self.ranks, strict=True):
            groups.setdefault(unit.sharding.num_replicas, []).append((unit, ranks))
        return {num_replicas: PlacedTables(*zip(*pairs, strict=True)) for num_replicas, pairs in groups.items()}

    def num_row_shards(self, table_number: int) -> int:
        """The number of ranks that share the rows of a column shard, in one replica."""
        return max(
            (len(ranks) // unit.sharding.num_replicas for unit, ranks in self.units_by_table.get(table_number, [])),
            default=1,
        )

    def sum_by_rank(self, values: Iterable[float], num_ranks: int, *, weight_by_lookups: bool = False) -> np.ndarray:
        """Values given per unit and rank, summed by rank; `weight_by_lookups`: in proportion to the lookups there."""
        counts = np.fromiter(map(len, self.ranks), int, len(self.ranks))
        flat = np.fromiter(chain.from_iterable(self.ranks), int, int(counts.sum()))
        weights = np.repeat(np.fromiter(values, float, len(counts)), counts)
        if weight_by_lookups:
            for unit, start in zip(self.units, np.cumsum(counts) - counts, strict=True):
                if unit.lookup_ratios:
                    weights[start : start + len(unit.lookup_ratios)] *= unit.lookup_ratios
        return np.bincount(flat, weights, num_ranks).astype(float)

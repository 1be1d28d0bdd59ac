"""What is planned, and where its pieces are placed."""

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

REST_BLOCK = "rest"  # of a described model: what no block has; always whole on every rank, and never recomputed


@dataclass(frozen=True, slots=True)
class Precision:
    """What the plan rounds: table weights, vectors and gradients on the wire, dense gradients, dense products, what the
    dense optimizer keeps."""

    tables: Dtype | None = None  # None: as the model has them
    vectors: Dtype = "float32"
    gradients: Dtype = "float32"
    dense_gradients: Dtype = "float32"
    matmuls: Dtype = "float32"
    moments: Dtype = "float32"


@dataclass(frozen=True, slots=True)
class Problem:
    """What is planned: a workload at a global batch size on a cluster, in a precision.

    `demands` has what is asked of each table, `by_row` the same where its distinct rows travel; of tables with features
    that are not pooled both are that. `dense` says how the dense part is held, `way` names the only way to hold it that
    may be looked at, if not all may; `by_block`: whether its blocks are played one by one, or all below the vectors as
    one, and all above. `torchrec`: within TorchRec's limits: it exchanges vectors (never deduplicated rows),
    splits rows evenly by id, and has no replicas per host. A `pace` is the time
    of blocks over their price, forward and backward: of the bottom, which needs no vectors, and of the top.
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
        """Of every table, as it is placed."""
        return [
            (self.row_exchange_loads if at in placed.row_exchange_tables else self.table_loads)[at]
            for at in range(len(self.table_loads))
        ]

    def bytes_on_every_rank(self, placed: "PlacedTables") -> float:
        """Of what every rank has beside the pieces that are placed: replicas, distinct rows and their gradients."""
        copies = [self.table_loads[one] for one in placed.data_parallel_tables]
        rows = [self.row_exchange_loads[one] for one in placed.row_exchange_tables]
        return sum(one.table.rows * one.row_bytes(one.table.dim) for one in copies) + sum(
            map(self.row_buffer_bytes, rows)
        )

    def row_buffer_bytes(self, table_load: TableLoad) -> float:
        """Of a rank's distinct rows of a table and of their gradients, if they travel."""
        return (
            2 * 4 * self.local_batch_size * table_load.ids_per_sample * table_load.table.dim
            if table_load.local_pooling is not None
            else 0.0
        )

    def distinct_share(self, table_load: TableLoad, sharding: Sharding) -> float:
        """The share of the ids that one copy is asked in a batch which it is asked for the first time."""
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
        """Bytes of what the dense optimizer keeps of a parameter, for each moment and byte of it."""
        return DTYPE_BYTES[self.precision.moments] / DTYPE_BYTES[widest_dtype(self.workload.tables)]

    @property
    def local_batch_size(self) -> float:
        return self.batch_size / self.cluster.num_ranks

    @property
    def local_batch_share(self) -> float:
        """Of the batch that the workload was described with, a rank's own."""
        return self.local_batch_size / self.workload.batch_size

    @property
    def shard_levels(self) -> tuple[Level, ...]:
        """The levels among whose ranks weights are cut, inside first."""
        return tuple(level for level in self.cluster.levels if level.name in self.dense.shard)

    def num_shards(self, block: Block) -> int:
        """In how many parts the weights of a block are."""
        return 1 if block.name == REST_BLOCK else prod(level.num for level in self.shard_levels)

    @property
    def level_names(self) -> tuple[str, ...]:
        return tuple(level.name for level in self.cluster.levels)

    @property
    def ranks_per_host(self) -> int:
        """Ranks that the innermost level joins."""
        return self.cluster.levels[0].num if self.cluster.levels else 1

    @property
    def is_hierarchical(self) -> bool:
        return 1 < self.ranks_per_host < self.cluster.num_ranks


@dataclass(frozen=True)
class PlacedTables:
    """Units, the ranks of each, copy by copy, and the tables of which every rank has a replica."""

    units: tuple[ShardUnit, ...]
    ranks: tuple[tuple[int, ...], ...]
    data_parallel_tables: tuple[int, ...] = ()

    @cached_property
    def row_exchange_tables(self) -> frozenset[int]:
        """Tables of which distinct rows travel that could let vectors travel."""
        return frozenset(unit.table_number for unit in self.units if unit.sharding.row_exchange)

    @cached_property
    def units_by_table(self) -> dict[int, list[tuple[ShardUnit, tuple[int, ...]]]]:
        """The pieces of each, and the ranks of these; none of replicas."""
        found: dict[int, list[tuple[ShardUnit, tuple[int, ...]]]] = {}
        for unit, ranks in zip(self.units, self.ranks, strict=True):
            found.setdefault(unit.table_number, []).append((unit, ranks))
        return found

    @cached_property
    def by_num_replicas(self) -> "dict[int, PlacedTables]":
        """The units, by how many copies there are of each."""
        found: dict[int, list[tuple[ShardUnit, tuple[int, ...]]]] = {}
        for unit, ranks in zip(self.units, self.ranks, strict=True):
            found.setdefault(unit.sharding.num_replicas, []).append((unit, ranks))
        return {copies: PlacedTables(*zip(*pairs, strict=True)) for copies, pairs in found.items()}

    def num_row_shards(self, table_number: int) -> int:
        """The number of ranks that rows of a piece of it are on, of one copy."""
        return max(
            (len(ranks) // unit.sharding.num_replicas for unit, ranks in self.units_by_table.get(table_number, [])),
            default=1,
        )

    def sum_by_rank(self, values: Iterable[float], num_ranks: int, *, weight_by_lookups: bool = False) -> np.ndarray:
        """The sums at each rank of what each unit brings to each of its own; of lookups as these are spread."""
        counts = np.fromiter(map(len, self.ranks), int, len(self.ranks))
        flat = np.fromiter(chain.from_iterable(self.ranks), int, int(counts.sum()))
        weights = np.repeat(np.fromiter(values, float, len(counts)), counts)
        if weight_by_lookups:
            for unit, start in zip(self.units, np.cumsum(counts) - counts, strict=True):
                if unit.lookup_ratios:
                    weights[start : start + len(unit.lookup_ratios)] *= unit.lookup_ratios
        return np.bincount(flat, weights, num_ranks).astype(float)

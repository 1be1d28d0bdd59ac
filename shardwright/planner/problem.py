"""The input of the search (`Problem`), and its output: the shard units and their ranks (`PlacedTables`)."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain

import numpy as np

from shardwright.planner.price.axis_groups import AxisGroups
from shardwright.planner.tables.sharding import Sharding, ShardUnit, TableLoad
from shardwright.spec.axes import SAMPLE_ROLES, Axis
from shardwright.spec.cluster import Cluster, Level, Tier
from shardwright.spec.plan import Dense, ExpertPlan, Pipeline, widest_dtype
from shardwright.spec.workload import DTYPE_BYTES, Block, Dtype, Mixture, Workload

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

    @property
    def exchange_bytes(self) -> int:
        """Bytes on the wire of a value of a vector and of its gradient."""
        return DTYPE_BYTES[self.vectors] + DTYPE_BYTES[self.gradients]


@dataclass(frozen=True, slots=True)
class SplitExperts:
    """A mixture whose experts are split over ranks.

    `own_bytes`: weights of a rank's own experts; `copied_bytes`: of the copies that it may hold from forward to
    backward. Seconds of the busiest rank: `compute_seconds` of all its rows in forward, `even_seconds` if routing is
    even, `message_seconds` of an exchange of rows, `copy_seconds` of moving copied weights, of which
    `late_copy_seconds` after the gate has chosen, `latency` of a message, `host_seconds` of an exchange of tokens
    between hosts.
    """

    plan: ExpertPlan
    mixture: Mixture
    own_bytes: float
    copied_bytes: float
    compute_seconds: float
    even_seconds: float
    message_seconds: float
    copy_seconds: float
    latency: float
    host_seconds: float = 0.0
    late_copy_seconds: float = 0.0

    @property
    def is_prefetched(self) -> bool:
        """Whether copies leave at the start of the block."""
        return self.late_copy_seconds < self.copy_seconds

    @property
    def step_seconds(self) -> tuple[float, float]:
        """Seconds of computing the rows of one step, and of its messages."""
        num = self.plan.groups
        return self.compute_seconds / num, self.message_seconds / num + self.latency * (num > 1)


@dataclass(frozen=True, slots=True)
class ServerRequest:
    """Table servers that rows may be on. `own`: they own all rows, and ranks have copies; otherwise they have the rows
    that ranks have no room for. `bytes_`: of each server; 0: enough for all rows. `encrypted`: messages are."""

    num: int
    own: bool = False
    bytes_: int = 0
    encrypted: bool = False


@dataclass(frozen=True)
class Problem:
    """A workload at a global batch size on a cluster, in a precision.

    `table_loads` are the loads of tables with vector exchange, `row_exchange_loads` with row exchange; tables with
    unpooled features have row exchange in both. `dense` is the layout of the dense model, `dense_strategy` the only
    parallelism strategy to consider, if one is set. `expand_blocks`: simulate each block, not only all blocks that need
    no vectors (bottom) and all others (top). `torchrec`: plan within TorchRec's limits, which exchanges vectors (never
    deduplicated rows), splits rows evenly by id, and has no replicas per host. `bottom_pace`, `top_pace`: measured over
    predicted seconds of these blocks, forward and backward. `axes`: of the mesh; empty: those of the cluster.
    `micro_batches`: equal parts of a local batch, one of which the prices are for. `chunk_ranks`: if this is a chunk of
    a pipeline, the ranks that have it. `experts`: the mixtures whose experts are split over ranks. `balance`,
    `accumulate`, `servers`: as in TableRequest; `replaced`: tiers of the cluster in
    whose place the servers are. `wide_lines`: weights of 16 bits are float32 on lines of a cache.
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
    axes: tuple[Axis, ...] = ()
    pipeline: Pipeline | None = None
    micro_batches: int = 1
    chunk_ranks: tuple[int, ...] = ()
    experts: tuple[SplitExperts, ...] = ()
    wide_lines: bool = False
    balance: tuple[float, float] | None = None
    accumulate: int = 1
    servers: ServerRequest | None = None
    replaced: tuple[Tier, ...] = ()

    @cached_property
    def blocks(self) -> tuple[Block, ...]:
        """The dense model's blocks without the weights of experts that are split over ranks."""
        return tuple(map(self._without_experts, self.workload.blocks)) if self.experts else self.workload.blocks

    def _without_experts(self, block: Block) -> Block:
        experts = [part.mixture.experts for part in self.experts_of(block)]
        return replace(
            block,
            parameters=block.parameters - sum(each.parameters for each in experts),
            parameter_bytes=block.parameter_bytes - sum(each.parameter_bytes for each in experts),
        )

    def experts_of(self, block: Block) -> list[SplitExperts]:
        """The mixtures of a block whose experts are split over ranks."""
        return [part for part in self.experts if part.mixture.block == block.name]

    def own_expert_bytes(self, blocks: Sequence[Block]) -> float:
        """Bytes of the weights of a rank's own experts in these blocks."""
        return sum(part.own_bytes for block in blocks for part in self.experts_of(block))

    @cached_property
    def expert_replicas(self) -> AxisGroups | None:
        """The groups of ranks with replicas of the same experts; None if there are none."""
        if not self.experts:
            return None
        groups = self._groups(name for name in self.sample_groups.names if name not in self.experts[0].plan.axes)
        return groups if groups.size > 1 else None

    def table_load(self, table_number: int, sharding: Sharding) -> TableLoad:
        return (self.row_exchange_loads if sharding.row_exchange else self.table_loads)[table_number]

    @cached_property
    def served_tables(self) -> tuple[int, ...]:
        """Numbers of the tables whose rows table servers own."""
        loads = enumerate(self.row_exchange_loads)
        return tuple(number for number, load in loads if load.copied is not None and load.copied.is_served)

    def unit_load(self, unit: ShardUnit) -> TableLoad:
        """The load of the unit's table, with the unit's exchange."""
        return self.table_load(unit.table_number, unit.sharding)

    def placed_loads(self, placed: "PlacedTables") -> list[TableLoad]:
        """The load of every table, with the exchange that was chosen."""
        exchanged, pairs = placed.row_exchange_tables, zip(self.table_loads, self.row_exchange_loads, strict=True)
        return [rows if number in exchanged else vectors for number, (vectors, rows) in enumerate(pairs)]

    def bytes_on_every_rank(self, placed: "PlacedTables") -> float:
        """Bytes that every rank needs besides its units: data-parallel tables, buffers of row exchange, and copies."""
        replicated = sum(self.table_loads[number].table_bytes for number in placed.data_parallel_tables)
        exchanged = [self.row_exchange_loads[number] for number in placed.row_exchange_tables]
        return replicated + sum(
            self.row_buffer_bytes(load) + (load.copied.bytes_ if load.copied else 0) for load in exchanged
        )

    def row_buffer_bytes(self, table_load: TableLoad) -> float:
        """Bytes of a rank's received rows of a table and of their gradients; 0 with vector exchange."""
        if table_load.local_pooling is None:
            return 0.0
        rows = table_load.copied.rows_per_sample if table_load.copied is not None else table_load.ids_per_sample
        return 2 * 4 * self.local_batch_size * rows * table_load.table.dim

    def distinct_share(self, table_load: TableLoad, sharding: Sharding) -> float:
        """Distinct rows per id, among the ids of a batch that one replica receives."""
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
    def mesh_axes(self) -> tuple[Axis, ...]:
        return self.axes or self.cluster.axes

    @cached_property
    def all_ranks(self) -> AxisGroups:
        """All ranks as one group."""
        return AxisGroups(self.cluster, self.mesh_axes, tuple(axis.name for axis in self.mesh_axes))

    @cached_property
    def sample_groups(self) -> AxisGroups:
        """The groups of ranks with different samples, which hold replicas or shards of the same dense parameters."""
        return self._groups(axis.name for axis in self.mesh_axes if axis.role in SAMPLE_ROLES)

    @cached_property
    def shard_groups(self) -> AxisGroups:
        """The groups of ranks that share the dense weights."""
        return self._groups(self.dense.shard)

    @cached_property
    def replica_groups(self) -> AxisGroups:
        """The groups of ranks with replicas of sharded weights (HSDP)."""
        return self._groups(name for name in self.sample_groups.names if name not in self.dense.shard)

    def _groups(self, names: Iterable[str]) -> AxisGroups:
        return AxisGroups(self.cluster, self.mesh_axes, tuple(names), self.chunk_ranks)

    @cached_property
    def local_batch_size(self) -> float:
        """Samples of a rank in one micro-batch."""
        return self.batch_size / self.sample_groups.size / self.micro_batches

    @property
    def local_batch_share(self) -> float:
        """A rank's local batch size, over the batch size that the workload was described with."""
        return self.local_batch_size / self.workload.batch_size

    @property
    def shard_levels(self) -> tuple[Level, ...]:
        """The levels whose ranks share the dense weights, innermost first."""
        return self.shard_groups.levels

    def num_shards(self, block: Block) -> int:
        """The number of shards of a block's weights."""
        return 1 if block.name == REST_BLOCK else self.shard_groups.size

    @property
    def level_names(self) -> tuple[str, ...]:
        return tuple(level.name for level in self.cluster.levels)


PlacedUnit = tuple[ShardUnit, tuple[int, ...]]  # a unit and its ranks


@dataclass(frozen=True)
class PlacedTables:
    """Units, the ranks of each (replica by replica), and the numbers of data-parallel tables, and of those whose rows
    table servers own."""

    units: tuple[ShardUnit, ...]
    ranks: tuple[tuple[int, ...], ...]
    data_parallel_tables: tuple[int, ...] = ()
    served_tables: tuple[int, ...] = ()

    @staticmethod
    def from_pairs(
        pairs: Sequence[PlacedUnit],
        data_parallel_tables: tuple[int, ...] = (),
        served_tables: tuple[int, ...] = (),
    ) -> "PlacedTables":
        units, ranks = zip(*pairs, strict=True) if pairs else ((), ())
        return PlacedTables(units, ranks, data_parallel_tables, served_tables)

    @property
    def pairs(self) -> list[PlacedUnit]:
        return list(zip(self.units, self.ranks, strict=True))

    @cached_property
    def row_exchange_tables(self) -> frozenset[int]:
        """Numbers of the tables with row exchange that could have vector exchange."""
        return frozenset(unit.table_number for unit in self.units if unit.sharding.row_exchange) | {*self.served_tables}

    @cached_property
    def units_by_table(self) -> dict[int, list[PlacedUnit]]:
        """The units of each table with their ranks; data-parallel tables have none."""
        return self._group_pairs(lambda unit: unit.table_number)

    @cached_property
    def by_num_replicas(self) -> "dict[int, PlacedTables]":
        """The units by their number of replicas."""
        groups = self._group_pairs(lambda unit: unit.sharding.num_replicas)
        return {num_replicas: PlacedTables.from_pairs(pairs) for num_replicas, pairs in groups.items()}

    def _group_pairs(self, key: Callable[[ShardUnit], int]) -> dict[int, list[PlacedUnit]]:
        groups: dict[int, list[PlacedUnit]] = {}
        for unit, ranks in self.pairs:
            groups.setdefault(key(unit), []).append((unit, ranks))
        return groups

    def num_row_shards(self, table_number: int) -> int:
        """The number of ranks that share the rows of a column shard, in one replica."""
        return max(
            (len(ranks) // unit.sharding.num_replicas for unit, ranks in self.units_by_table.get(table_number, [])),
            default=1,
        )

    def sum_by_rank(self, values: Iterable[float], num_ranks: int, *, weight_by_lookups: bool = False) -> np.ndarray:
        """Sum values of units by rank; `weight_by_lookups`: scale each by the rank's share of the unit's lookups."""
        counts = np.fromiter(map(len, self.ranks), int, len(self.ranks))
        flat = np.fromiter(chain.from_iterable(self.ranks), int, int(counts.sum()))
        weights = np.repeat(np.fromiter(values, float, len(counts)), counts)
        if weight_by_lookups:
            for unit, start in zip(self.units, np.cumsum(counts) - counts, strict=True):
                if unit.lookup_ratios:
                    weights[start : start + len(unit.lookup_ratios)] *= unit.lookup_ratios
        return np.bincount(flat, weights, num_ranks).astype(float)

"""What is planned, and where its pieces are placed."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from math import prod

import numpy as np

from shardwright.planner.tables.sharding import Cut, Demand, Unit
from shardwright.spec.cluster import Cluster, Level
from shardwright.spec.plan import Dense, widest
from shardwright.spec.workload import DTYPE_BYTES, Block, Dtype, Workload

REST = "rest"  # of a described model: what no block has; always whole on every rank, and never recomputed


@dataclass(frozen=True, slots=True)
class Precision:
    """What the plan rounds: table weights, vectors and gradients on the wire, dense gradients, dense products, what the
    dense optimizer keeps."""

    tables: Dtype | None = None  # None: as the model has them
    vectors: Dtype = "float32"
    gradients: Dtype = "float32"
    reduced: Dtype = "float32"
    products: Dtype = "float32"
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
    demands: tuple[Demand, ...]
    by_row: tuple[Demand, ...]
    dense: Dense = Dense()
    by_block: bool = False
    way: str = ""
    torchrec: bool = False
    bottom_pace: tuple[float, float] = (1.0, 1.0)
    top_pace: tuple[float, float] = (1.0, 1.0)

    def demand(self, number: int, cut: Cut) -> Demand:
        return (self.by_row if cut.rows else self.demands)[number]

    def asked(self, placed: "Placed") -> list[Demand]:
        """Of every table, as it is placed."""
        return [(self.by_row if at in placed.by_row else self.demands)[at] for at in range(len(self.demands))]

    def everywhere_bytes(self, placed: "Placed") -> float:
        """Of what every rank has beside the pieces that are placed: replicas, distinct rows and their gradients."""
        copies = [self.demands[one] for one in placed.replicas]
        rows = [self.by_row[one] for one in placed.by_row]
        return sum(one.table.rows * one.row_bytes(one.table.dim) for one in copies) + sum(
            map(self.arriving_bytes, rows)
        )

    def arriving_bytes(self, demand: Demand) -> float:
        """Of a rank's distinct rows of a table and of their gradients, if they travel."""
        return 2 * 4 * self.own_batch * demand.ids * demand.table.dim if demand.home is not None else 0.0

    def new(self, demand: Demand, cut: Cut) -> float:
        """The share of the ids that one copy is asked in a batch which it is asked for the first time."""
        if cut.copies == 1:
            return demand.distinct
        return min(1.0, demand.touches(cut.copies) * cut.copies / max(self.batch_size * demand.ids, 1e-300))

    @property
    def moment_share(self) -> float:
        """Bytes of what the dense optimizer keeps of a parameter, for each moment and byte of it."""
        return DTYPE_BYTES[self.precision.moments] / DTYPE_BYTES[widest(self.workload.tables)]

    @property
    def own_batch(self) -> float:
        return self.batch_size / self.cluster.num_ranks

    @property
    def part(self) -> float:
        """Of the batch that the workload was described with, a rank's own."""
        return self.own_batch / self.workload.batch_size

    @property
    def sharding(self) -> tuple[Level, ...]:
        """The levels among whose ranks weights are cut, inside first."""
        return tuple(level for level in self.cluster.levels if level.name in self.dense.shard)

    def cut(self, block: Block) -> int:
        """In how many parts the weights of a block are."""
        return 1 if block.name == REST else prod(level.num for level in self.sharding)

    @property
    def levels(self) -> tuple[str, ...]:
        return tuple(level.name for level in self.cluster.levels)

    @property
    def host(self) -> int:
        """Ranks that the innermost level joins."""
        return self.cluster.levels[0].num if self.cluster.levels else 1

    @property
    def several_hosts(self) -> bool:
        return 1 < self.host < self.cluster.num_ranks


@dataclass(frozen=True)
class Placed:
    """Units, the ranks of each, copy by copy, and the tables of which every rank has a replica."""

    units: tuple[Unit, ...]
    ranks: tuple[tuple[int, ...], ...]
    replicas: tuple[int, ...] = ()

    @cached_property
    def by_row(self) -> frozenset[int]:
        """Tables of which distinct rows travel that could let vectors travel."""
        return frozenset(unit.demand for unit in self.units if unit.cut.rows)

    @cached_property
    def by_table(self) -> dict[int, list[tuple[Unit, tuple[int, ...]]]]:
        """The pieces of each, and the ranks of these; none of replicas."""
        found: dict[int, list[tuple[Unit, tuple[int, ...]]]] = {}
        for unit, ranks in zip(self.units, self.ranks, strict=True):
            found.setdefault(unit.demand, []).append((unit, ranks))
        return found

    @cached_property
    def by_copies(self) -> "dict[int, Placed]":
        """The units, by how many copies there are of each."""
        found: dict[int, list[tuple[Unit, tuple[int, ...]]]] = {}
        for unit, ranks in zip(self.units, self.ranks, strict=True):
            found.setdefault(unit.cut.copies, []).append((unit, ranks))
        return {copies: Placed(*zip(*pairs, strict=True)) for copies, pairs in found.items()}

    def spread(self, table: int) -> int:
        """The number of ranks that rows of a piece of it are on, of one copy."""
        return max((len(ranks) // unit.cut.copies for unit, ranks in self.by_table.get(table, [])), default=1)

    def by_rank(self, values: Iterable[float], num_ranks: int, *, looked_up: bool = False) -> np.ndarray:
        """The sums at each rank of what each unit brings to each of its own; of lookups as these are spread."""
        counts = np.fromiter(map(len, self.ranks), int, len(self.ranks))
        flat = np.fromiter(chain.from_iterable(self.ranks), int, int(counts.sum()))
        weights = np.repeat(np.fromiter(values, float, len(counts)), counts)
        if looked_up:
            for unit, start in zip(self.units, np.cumsum(counts) - counts, strict=True):
                if unit.places:
                    weights[start : start + len(unit.places)] *= unit.places
        return np.bincount(flat, weights, num_ranks).astype(float)

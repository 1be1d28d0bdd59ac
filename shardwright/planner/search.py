"""From a workload and a cluster to a plan: what could be done, each priced by playing its step, the shortest taken.

The proposals come from the workload and the number of ranks alone: how large a part of an even share of the work one
piece may be, whether small tables are replicated, whether columns are cut before rows are spread over a group, what is
balanced first, work or what is sent, whether distinct rows travel where they are fewer bytes than vectors, and whether
every host has a copy of tables of which then fewer bytes cross between hosts. Rates of the machines only choose among
them, so that faster machines never make a plan slower.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import product

import numpy as np

from shardwright.errors import UserError
from shardwright.planner.memory import budget
from shardwright.planner.pins import REPLICA_SCHEMES, SCHEMES, Pin, matches_pin, pin_text, pinned_ranks
from shardwright.planner.problem import PlacedTables, Precision, Problem
from shardwright.planner.step import tasks
from shardwright.planner.step.tasks import RankLoads
from shardwright.planner.tables import placement, sharding
from shardwright.planner.tables.row_exchange import exchange_loads, row_to_vector_bytes
from shardwright.planner.tables.sharding import (
    DATA_PARALLEL,
    Sharding,
    ShardUnit,
    TableLoad,
    enumerate_shardings,
    make_shard_units,
    make_table_loads,
)
from shardwright.spec.cluster import Cluster
from shardwright.spec.plan import Dense, Share
from shardwright.spec.workload import DTYPE_BYTES, Workload

WORK_SHARES = (np.inf, 1.0, 0.5, 0.25)  # of an even share of the work, the most of one piece
BALANCE_WEIGHTS = ((1.0, 0.3, 0.1), (0.3, 1.0, 0.1))  # weights of work, of vectors sent and of ids received
SIZE_LIMITS = (1.0, 0.5, 0.25, 0.1)  # of a rank's room, the most of one piece, tried until all find room
MAX_BYTES_SHARE = 0.75  # of the bytes of vectors, the most at which rows travel: they take more of the processor
SMALL_TABLE_SHARE = 0.01  # of a rank's room, the most of a replicated table


@dataclass(frozen=True, slots=True)
class Proposal:
    """How tables are cut and placed."""

    max_work_share: float = np.inf
    replicate: bool = True
    columns_first: bool = True
    balance_weights: tuple[float, float, float] = BALANCE_WEIGHTS[0]
    row_exchange_below: float = (
        0.0  # distinct rows of a table travel where that takes at most so much of the bytes of its vectors
    )
    replicas_below: float = 0.0  # every host has a copy where at most so much of the bytes then crosses between hosts
    replicate_all_small: bool = False  # replicate every small table, not only those whose all-reduces move fewer bytes
    hosts_first: bool = False  # shard rows within a host first, so that ranks send less to other hosts


@dataclass(frozen=True, slots=True)
class Candidate:
    """A placement that fits, and the step it makes."""

    problem: Problem
    proposal: Proposal
    placed: PlacedTables
    loads: RankLoads
    fast_id_shares: tuple[float, ...]
    tier_shares: tuple[tuple[Share, ...], ...]
    seconds: float
    ids_after: str  # what ids are issued behind

    def sharding(self, table_number: int) -> Sharding:
        """How a table is cut."""
        pieces = self.placed.units_by_table.get(table_number, [])
        return pieces[0][0].sharding if pieces else DATA_PARALLEL


def define_problem(
    workload: Workload, cluster: Cluster, batch_size: int, precision: Precision, *, torchrec: bool = False
) -> Problem:
    found = make_table_loads(workload, precision.tables)
    given, rows = zip(*exchange_loads(workload, found, batch_size, cluster), strict=True) if found else ((), ())
    if torchrec:
        given = tuple(demand.local_pooling or demand for demand in given)
    axes = tuple(level.name for level in reversed(cluster.levels)) or ("data",)
    return Problem(workload, cluster, batch_size, precision, given, rows, Dense(axes), torchrec=torchrec)


def find_best(problem: Problem, pins: Mapping[str, Pin] | None = None) -> Candidate:
    """The proposal with the shortest step, the first of equal ones; slower tiers where the fastest is too small."""
    free = budget.memory_budget(problem).free_bytes
    for room in dict.fromkeys((free[0], sum(free))) if free[0] > 0 else ():
        found = _best_within(problem, pins or {}, room)
        if found is not None:
            return found
    raise UserError(budget.describe_shortage(problem))


def _best_within(posed: Problem, pins: Mapping[str, Pin], room: float) -> Candidate | None:
    found: Candidate | None = None
    seen: set[int] = set()
    pieces = _Pieces(posed, room)
    place = cache(partial(_place, pieces, pinned_ranks(posed, pins)))
    for proposal in proposals(posed.cluster, torchrec=posed.torchrec):
        placed = _first_placed(pieces, proposal, pins, place)
        if placed is None or id(placed) in seen:
            continue
        seen.add(id(placed))
        one = evaluate(posed, proposal, placed)
        if one is not None and (found is None or one.seconds < found.seconds * (1 - 1e-9)):
            found = one
    return found


def proposals(cluster: Cluster, *, torchrec: bool = False) -> Iterator[Proposal]:
    orders = (True, False) if len(cluster.levels) > 1 else (True,)
    replicated = (True, False) if cluster.num_ranks > 1 else (False,)
    for part, replicate, first, weights in product(WORK_SHARES, replicated, orders, BALANCE_WEIGHTS):
        yield Proposal(part, replicate, first, weights)
    if cluster.num_ranks > 1:
        yield Proposal(replicate_all_small=True)
    if len(orders) > 1:
        yield from (Proposal(replicate=replicate, hosts_first=True) for replicate in replicated)
    if torchrec:
        return
    for part, replicate in product(WORK_SHARES, replicated) if cluster.num_ranks > 1 else ():
        yield Proposal(part, replicate, row_exchange_below=MAX_BYTES_SHARE)
    for part, replicate in product(WORK_SHARES[2:], replicated) if len(orders) > 1 else ():
        yield Proposal(part, replicate, row_exchange_below=MAX_BYTES_SHARE, replicas_below=MAX_BYTES_SHARE)


def evaluate(problem: Problem, proposal: Proposal, placed: PlacedTables) -> Candidate | None:
    """With its step; None where a tier has no room."""
    lying = budget.split_rows_by_tier(problem, placed, budget.memory_budget(problem).free_bytes)
    if lying is None:
        return None
    near, shares = lying
    loads = tasks.rank_loads(problem, placed, near)
    return Candidate(
        problem, proposal, placed, loads, tuple(near), tuple(shares), *tasks.predict_step(problem, placed, loads)
    )


def with_replicas(candidate: Candidate, pins: Mapping[str, Pin]) -> Candidate | None:
    """The same placement with every small table replicated on all ranks, to compare; None if that changes nothing or
    does not fit."""
    problem, placed = candidate.problem, candidate.placed
    room = budget.memory_budget(problem).free_bytes[0]
    small = [
        number
        for number, demand in enumerate(problem.table_loads)
        if number not in placed.data_parallel_tables and demand.table.name not in pins and can_replicate(demand, room)
    ]
    if not small or problem.cluster.num_ranks == 1:
        return None
    kept = [
        (unit, ranks) for unit, ranks in zip(placed.units, placed.ranks, strict=True) if unit.table_number not in small
    ]
    units, ranks = zip(*kept, strict=True) if kept else ((), ())
    return evaluate(
        problem, candidate.proposal, PlacedTables(units, ranks, tuple(sorted((*placed.data_parallel_tables, *small))))
    )


class _Pieces:
    """What proposals ask again and again: the ways to cut a table, in order, and a piece of each."""

    def __init__(self, posed: Problem, room: float) -> None:
        self.posed, self.room = posed, room
        self.whole = [unsharded_unit(posed, number) for number in range(len(posed.table_loads))]
        self._even = [sum(column) / posed.cluster.num_ranks for column in zip(*map(_loads, self.whole), strict=True)]
        self._made: dict[tuple[int, Sharding, float], list[ShardUnit]] = {}
        self._ordered: dict[tuple[int, bool, bool, float, bool], list[Sharding]] = {}
        self._fewer: dict[tuple[int, Sharding], float] = {}

    def made(self, number: int, cut: Sharding, room: float) -> list[ShardUnit]:
        key = number, cut, room
        if key not in self._made:
            self._made[key] = table_units(self.posed, *key)
        return self._made[key]

    def share(self, unit: ShardUnit) -> float:
        """Of what an even rank looks up and sends, the larger."""
        return max((load / even for load, even in zip(_loads(unit), self._even, strict=True) if even), default=0.0)

    def ordered(self, number: int, proposal: Proposal) -> list[Sharding]:
        copies = bool(proposal.replicas_below) and self.copied(number, proposal.replicas_below)
        key = number, proposal.columns_first, proposal.hosts_first, proposal.row_exchange_below, copies
        if key not in self._ordered:
            found = _ordered(self.posed, number, proposal, copies)
            self._ordered[key] = self.travelling(number, found, proposal.row_exchange_below)
        return self._ordered[key]

    def copied(self, number: int, most: float) -> bool:
        """Whether copies of a table are little of the room, and make at most so much of the bytes between hosts."""
        copies = self.posed.cluster.num_ranks // self.posed.ranks_per_host
        little = self.whole[number].bytes_ <= sharding.SMALL_MEMORY_SHARE * self.room
        return little and replica_exchange_share(self.posed, number, copies) <= most

    def travelling(self, number: int, known: Sequence[Sharding], rows: float) -> list[Sharding]:
        """These cuts, with distinct rows on their way where that takes at most so much of the bytes of vectors."""
        if not rows or self.posed.table_loads[number].local_pooling is not None:
            return list(known)
        return [replace(cut, row_exchange=cut != DATA_PARALLEL and self.fewer(number, cut) <= rows) for cut in known]

    def fewer(self, number: int, cut: Sharding) -> float:
        if (number, cut) not in self._fewer:
            self._fewer[number, cut] = row_exchange_share(self.posed, number, cut)
        return self._fewer[number, cut]


def _loads(unit: ShardUnit) -> tuple[float, float]:
    return unit.read_bytes * unit.max_lookup_ratio, unit.sent_bytes


def _first_placed(pieces: _Pieces, proposal: Proposal, pins: Mapping[str, Pin], place: "Placer") -> PlacedTables | None:
    """Cut ever smaller until all find room; None where that does not help."""
    for packed in SIZE_LIMITS:
        chosen = _chosen(pieces, proposal, pins, packed * pieces.room)
        if chosen is None:
            return None
        placed = place(tuple(chosen), proposal.balance_weights)
        if placed is not None:
            return placed
    return None


Placer = Callable[[tuple[Sharding, ...], tuple[float, float, float]], PlacedTables | None]


def _place(
    pieces: _Pieces,
    pinned: Mapping[int, tuple[int, ...]],
    chosen: tuple[Sharding, ...],
    weights: tuple[float, float, float],
) -> PlacedTables | None:
    """Rows by load where they may be; by hash where not all find room so, or some lie in a slower tier."""
    spills = pieces.room > budget.memory_budget(pieces.posed).free_bytes[0]
    for room in (0.0,) if spills else (pieces.room, 0.0):
        made = [pieces.made(at, cut, room) for at, cut in enumerate(chosen)]
        placed = placement.place_units(pieces.posed, made, weights, pinned, pieces.room)
        if placed is not None:
            return placed
    return None


def unsharded_unit(problem: Problem, table_number: int) -> ShardUnit:
    """A table as one piece."""
    return table_units(problem, table_number, Sharding("table"))[0]


# How tables are cut


def _chosen(pieces: _Pieces, proposal: Proposal, pins: Mapping[str, Pin], most_bytes: float) -> list[Sharding] | None:
    """A cut for each table; None where one does not fit however it is cut."""
    posed = pieces.posed
    found: list[Sharding] = []
    for number, demand in enumerate(posed.table_loads):
        wanted = pins.get(demand.table.name)
        known: Sequence[Sharding] = pieces.ordered(number, proposal)
        if wanted is not None:
            known = [
                cut for cut in enumerate_shardings(demand, posed.cluster) if matches_pin(cut, wanted, posed.cluster)
            ]
            if posed.torchrec and wanted.scheme in REPLICA_SCHEMES:
                raise UserError(
                    f'table "{demand.table.name}" is pinned to {wanted.scheme}, which TorchRec does not '
                    "have: pin it to "
                    f"one of {', '.join(name for name in SCHEMES if name not in REPLICA_SCHEMES)}, or to none"
                )
            if not known:
                raise UserError(f'table "{demand.table.name}" cannot be cut as its pin says: {pin_text(wanted)}')
            known = pieces.travelling(number, known, proposal.row_exchange_below)
        elif _is_replicated(posed, demand, proposal, pieces.room):
            known = [DATA_PARALLEL]
        cut = _first_fitting(pieces, number, known, most_bytes, proposal.max_work_share)
        if cut is None:
            return None
        found.append(cut)
    return found


def _is_replicated(posed: Problem, demand: TableLoad, proposal: Proposal, room: float) -> bool:
    if proposal.replicate_all_small:
        return can_replicate(demand, room)
    return proposal.replicate and is_cheaper_data_parallel(posed, demand, room)


def table_units(problem: Problem, table_number: int, sharding: Sharding, free_bytes: float = np.inf) -> list[ShardUnit]:
    even = None if problem.torchrec else free_bytes
    return make_shard_units(
        table_number, problem.table_load(table_number, sharding), sharding, problem.cluster, problem.batch_size, even
    )


def row_exchange_share(problem: Problem, table_number: int, sharding: Sharding) -> float:
    """Of the bytes of a table's vectors, what its distinct rows take."""
    wire = DTYPE_BYTES[problem.precision.vectors] + DTYPE_BYTES[problem.precision.gradients]
    return row_to_vector_bytes(
        problem.table_loads[table_number], problem.row_exchange_loads[table_number], sharding, problem.cluster, wire
    )


def replica_exchange_share(problem: Problem, table_number: int, num_replicas: int) -> float:
    """Of the bytes between groups of a table that lies once, what copies in all of them exchange."""
    vectors, rows, width = (
        problem.table_loads[table_number],
        problem.row_exchange_loads[table_number],
        problem.table_loads[table_number].table.dim,
    )
    wire = width * (DTYPE_BYTES[problem.precision.vectors] + DTYPE_BYTES[problem.precision.gradients])
    pooled = (
        vectors.ids_per_sample * sharding.ID_BYTES
        + vectors.pooled_vectors * sharding.LENGTH_BYTES
        + vectors.vectors * wire
    )
    once = min(pooled, rows.ids_per_sample * (sharding.ID_BYTES + wire)) * problem.batch_size / num_replicas
    return (
        num_replicas * vectors.distinct_rows_per_group(num_replicas) * (sharding.ROW_ID_BYTES + 4 * width) / once
        if once
        else 1.0
    )


def _ordered(posed: Problem, number: int, proposal: Proposal, copies: bool) -> list[Sharding]:
    """From what moves least to what balances best."""
    order = ["table", "column", "table-column", "table-row", "column-row", "row"]
    if not proposal.columns_first:
        order = ["table", "table-row", "table-column", "column-row", "column", "row"]
    if proposal.hosts_first:
        order = ["table-row", "table", "table-column", "column-row", "column", "row"]
    order = [*(REPLICA_SCHEMES if copies else ()), *order]
    known = [cut for cut in enumerate_shardings(posed.table_loads[number], posed.cluster) if cut.scheme in order]
    return sorted(known, key=lambda cut: (order.index(cut.scheme), cut.column_shards))


def is_cheaper_data_parallel(problem: Problem, table_load: TableLoad, free_bytes: float) -> bool:
    """Whether all-reducing the table's gradient moves fewer bytes of a rank than its vectors and their gradients do."""
    size = table_load.table.rows * table_load.table.dim
    if not can_replicate(table_load, free_bytes):
        return False
    wire = DTYPE_BYTES[problem.precision.vectors] + DTYPE_BYTES[problem.precision.gradients]
    return 2 * size * 4 < problem.local_batch_size * table_load.vectors * table_load.table.dim * wire


def can_replicate(table_load: TableLoad, free_bytes: float) -> bool:
    return table_load.table.rows * table_load.table.dim * table_load.weight_bytes <= SMALL_TABLE_SHARE * free_bytes


def _first_fitting(
    pieces: _Pieces, number: int, known: Sequence[Sharding], most_bytes: float, part: float
) -> Sharding | None:
    """The first whose pieces are small enough; else, of those that fit, the one whose pieces have the least share; else
    the one with the smallest pieces, if a rank has room for one."""
    fitting: list[tuple[float, int, Sharding]] = []
    smallest: list[tuple[float, int, Sharding]] = []
    for at, cut in enumerate(known):
        if cut == DATA_PARALLEL:
            return cut
        unit = pieces.made(number, cut, pieces.room)[0]
        size, share = unit.bytes_ + unit.buffer_bytes, pieces.share(unit)
        if size <= most_bytes and share <= part:
            return cut
        if size <= most_bytes:
            fitting.append((share, at, cut))
        if size <= pieces.room:
            smallest.append((size, at, cut))
    return min(fitting or smallest)[2] if fitting or smallest else None

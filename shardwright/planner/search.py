"""Search for the plan with the shortest step: proposals, the placement of each, and its price by simulating the step.

Proposals depend only on the workload and the number of ranks: how much of an average rank's work one shard may take,
whether small tables are data-parallel, whether columns are split before rows, what is balanced first (work or bytes
sent), whether deduplicated rows are exchanged where they are fewer bytes than vectors, and whether hosts have replicas
of tables where fewer bytes then cross hosts. The machines' rates only choose among proposals, so that faster machines
never make a plan slower.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import product

import numpy as np

from shardwright.errors import UserError
from shardwright.planner.memory import budget
from shardwright.planner.memory.row_tiers import RowTiers, split_rows
from shardwright.planner.memory.shortage import describe_shortage
from shardwright.planner.pins import Pin, matches_pin, pin_text, pinned_ranks
from shardwright.planner.problem import PlacedTables, Precision, Problem
from shardwright.planner.step import prediction, tasks
from shardwright.planner.step.tasks import RankLoads
from shardwright.planner.tables import placement
from shardwright.planner.tables.row_exchange import exchange_loads, row_to_vector_bytes
from shardwright.planner.tables.schemes import Scheme, SearchPosition, all_schemes, enumerate_shardings, find_scheme
from shardwright.planner.tables.sharding import (
    DATA_PARALLEL,
    SERVED,
    SMALL_MEMORY_SHARE,
    Sharding,
    ShardUnit,
    TableLoad,
    make_shard_units,
    make_table_loads,
)
from shardwright.spec.cluster import Cluster
from shardwright.spec.plan import Dense
from shardwright.spec.wire import ID_BYTES, LENGTH_BYTES, ROW_ID_BYTES
from shardwright.spec.workload import Workload

WORK_SHARES = (np.inf, 1.0, 0.5, 0.25)  # largest work of one shard, relative to an average rank's
BALANCE_WEIGHTS = ((1.0, 0.3, 0.1), (0.3, 1.0, 0.1))  # weights of work, of bytes sent and of ids received
SIZE_LIMITS = (1.0, 0.5, 0.25, 0.1)  # largest shard, as a share of a rank's free bytes; tried until all shards fit
MAX_BYTES_SHARE = 0.75  # use row exchange below this share of the bytes of vectors: rows take more processor time
MORE_REPLICAS = 4.0  # times the bytes: replicas also spread lookups evenly
SMALL_TABLE_SHARE = 0.01  # largest data-parallel table, as a share of a rank's free bytes


@dataclass(frozen=True, slots=True)
class Proposal:
    """Rules by which tables are sharded and placed."""

    max_work_share: float = np.inf
    replicate: bool = True
    columns_first: bool = True
    balance_weights: tuple[float, float, float] = BALANCE_WEIGHTS[0]
    row_exchange_below: float = 0.0  # use row exchange for tables where it takes at most this share of the vector bytes
    replicas_below: float = 0.0  # replicas in every host, if at most this share of the bytes then crosses hosts
    replicate_below: float = 1.0  # replicate small tables whose all-reduces move less than this many times the bytes
    hosts_first: bool = False  # shard rows within a host first, so that ranks send less to other hosts


@dataclass(frozen=True, slots=True)
class Candidate:
    """A placement that fits, and its predicted step."""

    problem: Problem
    proposal: Proposal
    placed: PlacedTables
    loads: RankLoads
    tiers: tuple[RowTiers, ...]  # of each table
    seconds: float
    ids_after: str  # the stage after which the next batch's ids are sent

    def sharding(self, table_number: int) -> Sharding:
        """How a table is sharded."""
        units = self.placed.units_by_table.get(table_number, [])
        served = table_number in self.placed.served_tables
        return units[0][0].sharding if units else SERVED if served else DATA_PARALLEL


def define_problem(
    workload: Workload, cluster: Cluster, batch_size: int, precision: Precision, *, torchrec: bool = False
) -> Problem:
    table_loads = make_table_loads(workload, precision.tables)
    pairs = list(exchange_loads(workload, table_loads, batch_size, cluster))
    vector_loads, row_loads = zip(*pairs, strict=True) if pairs else ((), ())
    if torchrec:
        vector_loads = tuple(load.local_pooling or load for load in vector_loads)
    dense = Dense(tuple(axis.name for axis in cluster.axes))
    return Problem(workload, cluster, batch_size, precision, vector_loads, row_loads, dense, torchrec=torchrec)


def find_best(problem: Problem, pins: Mapping[str, Pin] | None = None) -> Candidate:
    """The candidate with the shortest step, the first of ties; slower tiers only if the fastest is too small."""
    free = budget.memory_budget(problem).free_bytes
    for free_bytes in dict.fromkeys((free[0], sum(free))) if free[0] > 0 else ():
        if (best := _best_within(problem, pins or {}, free_bytes)) is not None:
            return best
    raise UserError(describe_shortage(problem))


def _best_within(problem: Problem, pins: Mapping[str, Pin], free_bytes: float) -> Candidate | None:
    best: Candidate | None = None
    evaluated: dict[int, Candidate | None] = {}
    options = _ShardingOptions(problem, free_bytes)
    place = cache(partial(_place, options, pinned_ranks(problem, pins)))
    for proposal in proposals(problem.cluster, torchrec=problem.torchrec, balance=problem.balance):
        for placed in _placements(options, proposal, pins, place):
            if id(placed) not in evaluated:
                evaluated[id(placed)] = evaluate(problem, proposal, placed)
            candidate = evaluated[id(placed)]
            if candidate is None:  # a tier is too small; smaller shards may fit
                continue
            if best is None or candidate.seconds < best.seconds * (1 - 1e-9):
                best = candidate
            break
    return best


def proposals(
    cluster: Cluster, *, torchrec: bool = False, balance: tuple[float, float] | None = None
) -> Iterator[Proposal]:
    """`balance`: the only weights of work and of bytes sent to place tables by."""
    all_weights = ((*balance, BALANCE_WEIGHTS[0][-1]),) if balance else BALANCE_WEIGHTS
    make = partial(Proposal, balance_weights=all_weights[0])
    columns_first = (True, False) if len(cluster.levels) > 1 else (True,)
    replicated = (True, False) if cluster.num_ranks > 1 else (False,)
    for work_share, replicate, first, weights in product(WORK_SHARES, replicated, columns_first, all_weights):
        yield Proposal(work_share, replicate, first, weights)
    if cluster.num_ranks > 1:
        yield make(replicate_below=np.inf)
    if len(columns_first) > 1:
        yield from (make(replicate=replicate, hosts_first=True) for replicate in replicated)
        yield make(replicate_below=MORE_REPLICAS, hosts_first=True)
    if torchrec:
        return
    for work_share, replicate in product(WORK_SHARES, replicated) if cluster.num_ranks > 1 else ():
        yield make(work_share, replicate, row_exchange_below=MAX_BYTES_SHARE)
    for work_share, replicate in product(WORK_SHARES[2:], replicated) if len(columns_first) > 1 else ():
        yield make(work_share, replicate, row_exchange_below=MAX_BYTES_SHARE, replicas_below=MAX_BYTES_SHARE)


def evaluate(problem: Problem, proposal: Proposal, placed: PlacedTables) -> Candidate | None:
    """The candidate of this placement, with its predicted step; None if a memory tier is too small."""
    tiers = split_rows(problem, placed)
    if tiers is None:
        return None
    has_copies = any(load.copied is not None for load in problem.placed_loads(placed))
    if has_copies and any(len(table.shares) > 1 for table in tiers):
        return None  # a step either copies rows from slower tiers, or validates copies of rows
    loads = tasks.rank_loads(problem, placed, [table.found for table in tiers])
    step = prediction.predict_step(problem, placed, loads)
    return Candidate(problem, proposal, placed, loads, tuple(tiers), *step)


def with_replicas(candidate: Candidate, pins: Mapping[str, Pin]) -> Candidate | None:
    """The same placement with every small table replicated on all ranks, to compare; None if that changes nothing or
    does not fit."""
    problem, placed = candidate.problem, candidate.placed
    free_bytes = budget.memory_budget(problem).free_bytes[0]
    fixed = {*placed.data_parallel_tables, *placed.served_tables}
    small = [
        number
        for number, load in enumerate(problem.table_loads)
        if number not in fixed and load.table.name not in pins and can_replicate(load, free_bytes)
    ]
    if not small or problem.cluster.num_ranks == 1:
        return None
    sharded = [(unit, ranks) for unit, ranks in placed.pairs if unit.table_number not in small]
    data_parallel = tuple(sorted((*placed.data_parallel_tables, *small)))
    return evaluate(problem, candidate.proposal, PlacedTables.from_pairs(sharded, data_parallel, placed.served_tables))


class _ShardingOptions:
    """The shardings of each table in the order in which a proposal tries them, and their units, cached."""

    def __init__(self, problem: Problem, free_bytes: float) -> None:
        self.problem, self.free_bytes = problem, free_bytes
        self.fast_bytes = budget.memory_budget(problem).free_bytes[0]  # which hold replicas
        self.unsharded = [unsharded_unit(problem, number) for number in range(len(problem.table_loads))]
        totals = map(sum, zip(*map(_unit_loads, self.unsharded), strict=True))
        self._average_loads = [total / problem.cluster.num_ranks for total in totals]
        self.units = cache(partial(table_units, problem))
        self._shardings: dict[tuple[int, bool, bool, float, bool], list[Sharding]] = {}
        self._row_exchange_share = cache(partial(row_exchange_share, problem))

    def work_share(self, unit: ShardUnit) -> float:
        """The unit's bytes read or bytes sent, relative to an average rank's; the larger of both."""
        pairs = zip(_unit_loads(unit), self._average_loads, strict=True)
        return max((load / average for load, average in pairs if average), default=0.0)

    def shardings(self, table_number: int, proposal: Proposal) -> list[Sharding]:
        """The shardings to try, in order: from the fewest bytes sent to the best balance."""
        replicas = bool(proposal.replicas_below) and self._has_cheap_replicas(table_number, proposal.replicas_below)
        key = table_number, proposal.columns_first, proposal.hosts_first, proposal.row_exchange_below, replicas
        if key not in self._shardings:
            shardings = _shardings_in_order(self.problem, table_number, proposal, replicas)
            self._shardings[key] = self.choose_exchange(table_number, shardings, proposal.row_exchange_below)
        return self._shardings[key]

    def _has_cheap_replicas(self, table_number: int, max_share: float) -> bool:
        """Whether replicas of a table take little memory and at most this share of the bytes between hosts."""
        num_replicas = self.problem.cluster.num_ranks // self.problem.cluster.ranks_per_host
        if self.problem.table_loads[table_number].table.growth is not None:
            return False
        is_small = self.unsharded[table_number].bytes_ <= SMALL_MEMORY_SHARE * self.free_bytes
        return is_small and replica_exchange_share(self.problem, table_number, num_replicas) <= max_share

    def choose_exchange(self, table_number: int, shardings: Sequence[Sharding], max_share: float) -> list[Sharding]:
        """The shardings, with row exchange where it takes at most this share of the bytes of vectors."""
        load = self.problem.table_loads[table_number]
        if not max_share or load.local_pooling is not None or load.table.growth is not None:
            return list(shardings)
        return [
            replace(
                sharding,
                row_exchange=self._may_exchange_rows(table_number, sharding)
                and self._row_exchange_share(table_number, sharding) <= max_share,
            )
            for sharding in shardings
        ]

    def _may_exchange_rows(self, table_number: int, sharding: Sharding) -> bool:
        """Rows with copies have one owner each."""
        if self.problem.row_exchange_loads[table_number].copied is not None:
            return sharding != DATA_PARALLEL and (sharding.column_shards, sharding.num_replicas) == (1, 1)
        return sharding != DATA_PARALLEL


def _unit_loads(unit: ShardUnit) -> tuple[float, float]:
    return unit.read_bytes * unit.max_lookup_ratio, unit.sent_bytes


Placer = Callable[[tuple[Sharding, ...], tuple[float, float, float]], PlacedTables | None]


def _placements(
    options: _ShardingOptions, proposal: Proposal, pins: Mapping[str, Pin], place: Placer
) -> Iterator[PlacedTables]:
    """Placements of all tables with ever smaller shards."""
    for size_limit in SIZE_LIMITS:
        shardings = _choose_shardings(options, proposal, pins, size_limit * options.free_bytes)
        if shardings is None:
            return
        if (placed := place(tuple(shardings), proposal.balance_weights)) is not None:
            yield placed


def _place(
    options: _ShardingOptions,
    pinned: Mapping[int, tuple[int, ...]],
    shardings: tuple[Sharding, ...],
    weights: tuple[float, float, float],
) -> PlacedTables | None:
    """Place units with rows split by load; with hashed rows if they do not fit, or if some are in a slower tier."""
    spills = options.free_bytes > options.fast_bytes
    for free_bytes in (0.0,) if spills else (options.free_bytes, 0.0):
        units_by_table = [options.units(number, sharding, free_bytes) for number, sharding in enumerate(shardings)]
        placed = placement.place_units(options.problem, units_by_table, weights, pinned, options.free_bytes)
        if placed is not None:
            return placed
    return None


def unsharded_unit(problem: Problem, table_number: int) -> ShardUnit:
    """The whole table as one unit."""
    return table_units(problem, table_number, Sharding("table"))[0]


# The choice of a sharding for each table


def _choose_shardings(
    options: _ShardingOptions, proposal: Proposal, pins: Mapping[str, Pin], max_bytes: float
) -> list[Sharding] | None:
    """A sharding for each table; None if a table fits under no sharding."""
    problem = options.problem
    chosen: list[Sharding] = []
    for number, load in enumerate(problem.table_loads):
        pin = pins.get(load.table.name)
        shardings: Sequence[Sharding] = options.shardings(number, proposal)
        if number in problem.served_tables:
            chosen.append(SERVED)
            continue
        if pin is not None:
            shardings = _pinned_shardings(problem, load, pin)
            shardings = options.choose_exchange(number, shardings, proposal.row_exchange_below)
        elif _is_replicated(problem, load, proposal, options.fast_bytes):
            shardings = [DATA_PARALLEL]
        sharding = _first_fitting(options, number, shardings, max_bytes, proposal.max_work_share)
        if sharding is None:
            return None
        chosen.append(sharding)
    return chosen


def _pinned_shardings(problem: Problem, table_load: TableLoad, pin: Pin) -> list[Sharding]:
    name, cluster = table_load.table.name, problem.cluster
    if problem.torchrec and not find_scheme(pin.scheme).torchrec:
        schemes = ", ".join(scheme.name for scheme in all_schemes().values() if scheme.torchrec)
        raise UserError(
            f'table "{name}" is pinned to {pin.scheme}, which TorchRec does not have: pin it to one of {schemes}, or '
            "remove the pin"
        )
    shardings = list(enumerate_shardings(table_load, cluster))
    matches = [sharding for sharding in shardings if matches_pin(sharding, pin, cluster)]
    if not matches:
        texts = (s.scheme if s.column_shards == 1 else f"{s.scheme}:{s.column_shards}" for s in shardings)
        raise UserError(
            f'table "{name}" cannot be sharded as pinned: {pin_text(pin)}; {table_load.table.rows} rows of '
            f"{table_load.table.dim} columns on {cluster.num_ranks} ranks allow: {', '.join(dict.fromkeys(texts))}"
        )
    return matches


def _is_replicated(problem: Problem, table_load: TableLoad, proposal: Proposal, free_bytes: float) -> bool:
    return proposal.replicate and is_cheaper_data_parallel(problem, table_load, free_bytes, proposal.replicate_below)


def table_units(problem: Problem, table_number: int, sharding: Sharding, free_bytes: float = np.inf) -> list[ShardUnit]:
    load, room = problem.table_load(table_number, sharding), None if problem.torchrec else free_bytes
    return make_shard_units(table_number, load, sharding, problem.cluster, problem.batch_size, room)


def row_exchange_share(problem: Problem, table_number: int, sharding: Sharding) -> float:
    """The bytes of a table's row exchange relative to its vector exchange."""
    loads = problem.table_loads[table_number], problem.row_exchange_loads[table_number]
    return row_to_vector_bytes(*loads, sharding, problem.cluster, problem.precision.exchange_bytes)


def replica_exchange_share(problem: Problem, table_number: int, num_replicas: int) -> float:
    """The bytes that a table's replicas exchange, relative to the bytes that cross groups without replicas."""
    vector_load, row_load = problem.table_loads[table_number], problem.row_exchange_loads[table_number]
    dim = vector_load.table.dim
    wire = dim * problem.precision.exchange_bytes
    vector_bytes = (
        vector_load.ids_per_sample * ID_BYTES + vector_load.pooled_vectors * LENGTH_BYTES + vector_load.vectors * wire
    )
    row_bytes = row_load.ids_per_sample * (ID_BYTES + wire)
    crossing = min(vector_bytes, row_bytes) * problem.batch_size / num_replicas
    if not crossing:
        return 1.0
    return num_replicas * vector_load.distinct_rows_per_group(num_replicas) * (ROW_ID_BYTES + 4 * dim) / crossing


def _shardings_in_order(problem: Problem, table_number: int, proposal: Proposal, has_replicas: bool) -> list[Sharding]:
    def position(scheme: Scheme) -> float:
        positions = scheme.search or SearchPosition(0, 0, 0)
        if proposal.hosts_first:
            return positions.hosts_first
        return positions.columns_first if proposal.columns_first else positions.rows_first

    schemes = [scheme for scheme in all_schemes().values() if scheme.search]
    if problem.torchrec:
        schemes = [scheme for scheme in schemes if scheme.torchrec]
    pairs = (
        (position(scheme), sharding)
        for scheme in schemes
        for sharding in scheme.shardings(problem.table_loads[table_number], problem.cluster)
        if has_replicas or sharding.num_replicas == 1
    )
    return [sharding for _, sharding in sorted(pairs, key=lambda pair: (pair[0], pair[1].column_shards))]


def is_cheaper_data_parallel(problem: Problem, table_load: TableLoad, free_bytes: float, below: float = 1.0) -> bool:
    """Whether a rank sends fewer bytes by all-reducing the table's gradient than `below` times those of exchanging
    vectors and their gradients."""
    values = problem.local_batch_size * table_load.vectors * table_load.table.dim
    is_cheaper = 2 * table_load.num_values * 4 < below * values * problem.precision.exchange_bytes
    return is_cheaper and can_replicate(table_load, free_bytes)


def can_replicate(table_load: TableLoad, free_bytes: float) -> bool:
    is_small = table_load.num_values * table_load.weight_bytes <= SMALL_TABLE_SHARE * free_bytes
    return is_small and table_load.table.growth is None


def _first_fitting(
    options: _ShardingOptions, table_number: int, shardings: Sequence[Sharding], max_bytes: float, max_share: float
) -> Sharding | None:
    """The first sharding whose units are within both limits; else, within `max_bytes`, the one with the least work per
    unit; else the one with the smallest units, if they fit a rank."""
    by_work: list[tuple[float, int, Sharding]] = []
    by_size: list[tuple[float, int, Sharding]] = []
    for i, sharding in enumerate(shardings):
        if sharding == DATA_PARALLEL:
            return sharding
        unit = options.units(table_number, sharding, options.free_bytes)[0]
        size, share = unit.total_bytes, options.work_share(unit)
        if size <= max_bytes and share <= max_share:
            return sharding
        if size <= max_bytes:
            by_work.append((share, i, sharding))
        if size <= options.free_bytes:
            by_size.append((size, i, sharding))
    return min(by_work or by_size)[2] if by_work or by_size else None

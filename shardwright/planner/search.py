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
from math import prod

import numpy as np

from shardwright.errors import UserError, nearest
from shardwright.planner.memory import budget
from shardwright.planner.problem import Placed, Precision, Problem
from shardwright.planner.step import tasks
from shardwright.planner.step.tasks import Loads
from shardwright.planner.tables import placement, sharding
from shardwright.planner.tables.row_exchange import asked, fewer_bytes
from shardwright.planner.tables.sharding import DATA, Cut, Demand, Unit, cuts, demands, units
from shardwright.spec.cluster import Cluster
from shardwright.spec.plan import Dense, Share
from shardwright.spec.workload import DTYPE_BYTES, Workload

PARTS = (np.inf, 1.0, 0.5, 0.25)  # of an even share of the work, the most of one piece
BALANCES = ((1.0, 0.3, 0.1), (0.3, 1.0, 0.1))  # weights of work, of vectors sent and of ids received
PACKED = (1.0, 0.5, 0.25, 0.1)  # of a rank's room, the most of one piece, tried until all find room
FEWER = 0.75  # of the bytes of vectors, the most at which rows travel: they take more of the processor
SMALL = 0.01  # of a rank's room, the most of a replicated table


@dataclass(frozen=True, slots=True)
class Proposal:
    """How tables are cut and placed."""

    part: float = np.inf
    replicate: bool = True
    columns_first: bool = True
    balance: tuple[float, float, float] = BALANCES[0]
    rows: float = 0.0  # distinct rows of a table travel where that takes at most so much of the bytes of its vectors
    copies: float = 0.0  # every host has a copy where at most so much of the bytes then crosses between hosts
    small: bool = False  # replicate every small table, not only those whose all-reduces move fewer bytes
    hosts_first: bool = False  # shard rows within a host first, so that ranks send less to other hosts


@dataclass(frozen=True, slots=True)
class Found:
    """A placement that fits, and the step it makes."""

    problem: Problem
    proposal: Proposal
    placed: Placed
    loads: Loads
    near: tuple[float, ...]
    shares: tuple[tuple[Share, ...], ...]
    seconds: float
    behind: str  # what ids are issued behind

    def cut(self, number: int) -> Cut:
        """How a table is cut."""
        pieces = self.placed.by_table.get(number, [])
        return pieces[0][0].cut if pieces else DATA


@dataclass(frozen=True, slots=True)
class Pin:
    """What the user wants of a table: NAME, NAME:PIECES, and @RANK,... where it is to be."""

    name: str
    columns: int = 0  # 0: any
    ranks: tuple[int, ...] = ()


def pin(text: str) -> Pin:
    """As `column:4`, `table@3`, `row`."""
    scheme, _, ranks = text.partition("@")
    name, _, pieces = scheme.partition(":")
    if name not in NAMES:
        raise UserError(f'pin "{text}": no scheme "{name}"{nearest(name, NAMES)}')
    try:
        found = Pin(name, int(pieces or 0), tuple(int(rank) for rank in ranks.split(",") if ranks))
    except ValueError:
        raise UserError(f'pin "{text}": wanted SCHEME[:PIECES][@RANK,...], as column:4@0,1,2,3') from None
    if found.name in ("data", "row", *COPIES) and found.ranks:
        where = "in every group" if found.name in COPIES else "on every rank"
        raise UserError(f'pin "{text}": "{found.name}" lies {where}; drop @')
    return found


COPIES = ("copy-table", "copy-column", "copy-row")
NAMES = ("table", "row", "column", "data", "table-row", "table-column", "column-row", *COPIES)


def pose(
    workload: Workload, cluster: Cluster, batch_size: int, precision: Precision, *, torchrec: bool = False
) -> Problem:
    found = demands(workload, precision.tables)
    given, rows = zip(*asked(workload, found, batch_size, cluster), strict=True) if found else ((), ())
    if torchrec:
        given = tuple(demand.home or demand for demand in given)
    axes = tuple(level.name for level in reversed(cluster.levels)) or ("data",)
    return Problem(workload, cluster, batch_size, precision, given, rows, Dense(axes), torchrec=torchrec)


def best(posed: Problem, pins: Mapping[str, Pin] | None = None) -> Found:
    """The proposal with the shortest step, the first of equal ones; slower tiers where the fastest is too small."""
    free = budget.budget(posed).free
    for room in dict.fromkeys((free[0], sum(free))) if free[0] > 0 else ():
        found = _best_within(posed, pins or {}, room)
        if found is not None:
            return found
    raise UserError(budget.short_of(posed))


def _best_within(posed: Problem, pins: Mapping[str, Pin], room: float) -> Found | None:
    found: Found | None = None
    seen: set[int] = set()
    pieces = _Pieces(posed, room)
    place = cache(partial(_place, pieces, _pinned_ranks(posed, pins)))
    for proposal in proposals(posed.cluster, torchrec=posed.torchrec):
        placed = _first_placed(pieces, proposal, pins, place)
        if placed is None or id(placed) in seen:
            continue
        seen.add(id(placed))
        one = scored(posed, proposal, placed)
        if one is not None and (found is None or one.seconds < found.seconds * (1 - 1e-9)):
            found = one
    return found


def proposals(cluster: Cluster, *, torchrec: bool = False) -> Iterator[Proposal]:
    orders = (True, False) if len(cluster.levels) > 1 else (True,)
    replicated = (True, False) if cluster.num_ranks > 1 else (False,)
    for part, replicate, first, weights in product(PARTS, replicated, orders, BALANCES):
        yield Proposal(part, replicate, first, weights)
    if cluster.num_ranks > 1:
        yield Proposal(small=True)
    if len(orders) > 1:
        yield from (Proposal(replicate=replicate, hosts_first=True) for replicate in replicated)
    if torchrec:
        return
    for part, replicate in product(PARTS, replicated) if cluster.num_ranks > 1 else ():
        yield Proposal(part, replicate, rows=FEWER)
    for part, replicate in product(PARTS[2:], replicated) if len(orders) > 1 else ():
        yield Proposal(part, replicate, rows=FEWER, copies=FEWER)


def scored(posed: Problem, proposal: Proposal, placed: Placed) -> Found | None:
    """With its step; None where a tier has no room."""
    lying = budget.near_shares(posed, placed, budget.budget(posed).free)
    if lying is None:
        return None
    near, shares = lying
    loads = tasks.loads(posed, placed, near)
    return Found(posed, proposal, placed, loads, tuple(near), tuple(shares), *tasks.seconds(posed, placed, loads))


def with_replicas(found: Found, pins: Mapping[str, Pin]) -> Found | None:
    """The same placement with every small table replicated on all ranks, to compare; None if that changes nothing or
    does not fit."""
    problem, placed = found.problem, found.placed
    room = budget.budget(problem).free[0]
    small = [
        number
        for number, demand in enumerate(problem.demands)
        if number not in placed.replicas and demand.table.name not in pins and replicable(demand, room)
    ]
    if not small or problem.cluster.num_ranks == 1:
        return None
    kept = [(unit, ranks) for unit, ranks in zip(placed.units, placed.ranks, strict=True) if unit.demand not in small]
    units, ranks = zip(*kept, strict=True) if kept else ((), ())
    return scored(problem, found.proposal, Placed(units, ranks, tuple(sorted((*placed.replicas, *small)))))


class _Pieces:
    """What proposals ask again and again: the ways to cut a table, in order, and a piece of each."""

    def __init__(self, posed: Problem, room: float) -> None:
        self.posed, self.room = posed, room
        self.whole = [unit_whole(posed, number) for number in range(len(posed.demands))]
        self._even = [sum(column) / posed.cluster.num_ranks for column in zip(*map(_loads, self.whole), strict=True)]
        self._made: dict[tuple[int, Cut, float], list[Unit]] = {}
        self._ordered: dict[tuple[int, bool, bool, float, bool], list[Cut]] = {}
        self._fewer: dict[tuple[int, Cut], float] = {}

    def made(self, number: int, cut: Cut, room: float) -> list[Unit]:
        key = number, cut, room
        if key not in self._made:
            self._made[key] = made_units(self.posed, *key)
        return self._made[key]

    def share(self, unit: Unit) -> float:
        """Of what an even rank looks up and sends, the larger."""
        return max((load / even for load, even in zip(_loads(unit), self._even, strict=True) if even), default=0.0)

    def ordered(self, number: int, proposal: Proposal) -> list[Cut]:
        copies = bool(proposal.copies) and self.copied(number, proposal.copies)
        key = number, proposal.columns_first, proposal.hosts_first, proposal.rows, copies
        if key not in self._ordered:
            found = _ordered(self.posed, number, proposal, copies)
            self._ordered[key] = self.travelling(number, found, proposal.rows)
        return self._ordered[key]

    def copied(self, number: int, most: float) -> bool:
        """Whether copies of a table are little of the room, and make at most so much of the bytes between hosts."""
        copies = self.posed.cluster.num_ranks // self.posed.host
        little = self.whole[number].bytes_ <= sharding.LITTLE * self.room
        return little and copied_bytes_share(self.posed, number, copies) <= most

    def travelling(self, number: int, known: Sequence[Cut], rows: float) -> list[Cut]:
        """These cuts, with distinct rows on their way where that takes at most so much of the bytes of vectors."""
        if not rows or self.posed.demands[number].home is not None:
            return list(known)
        return [replace(cut, rows=cut != DATA and self.fewer(number, cut) <= rows) for cut in known]

    def fewer(self, number: int, cut: Cut) -> float:
        if (number, cut) not in self._fewer:
            self._fewer[number, cut] = row_bytes_share(self.posed, number, cut)
        return self._fewer[number, cut]


def _loads(unit: Unit) -> tuple[float, float]:
    return unit.work * unit.peak, unit.sent


def _first_placed(pieces: _Pieces, proposal: Proposal, pins: Mapping[str, Pin], place: "Placer") -> Placed | None:
    """Cut ever smaller until all find room; None where that does not help."""
    for packed in PACKED:
        chosen = _chosen(pieces, proposal, pins, packed * pieces.room)
        if chosen is None:
            return None
        placed = place(tuple(chosen), proposal.balance)
        if placed is not None:
            return placed
    return None


Placer = Callable[[tuple[Cut, ...], tuple[float, float, float]], Placed | None]


def _place(
    pieces: _Pieces,
    pinned: Mapping[int, tuple[int, ...]],
    chosen: tuple[Cut, ...],
    weights: tuple[float, float, float],
) -> Placed | None:
    """Rows by load where they may be; by hash where not all find room so, or some lie in a slower tier."""
    spills = pieces.room > budget.budget(pieces.posed).free[0]
    for room in (0.0,) if spills else (pieces.room, 0.0):
        made = [pieces.made(at, cut, room) for at, cut in enumerate(chosen)]
        placed = placement.place(pieces.posed, made, weights, pinned, pieces.room)
        if placed is not None:
            return placed
    return None


def unit_whole(posed: Problem, number: int) -> Unit:
    """A table as one piece."""
    return made_units(posed, number, Cut("table"))[0]


def _pinned_ranks(posed: Problem, pins: Mapping[str, Pin]) -> dict[int, tuple[int, ...]]:
    """By table's number."""
    found = {at: pins.get(demand.table.name) for at, demand in enumerate(posed.demands)}
    return {at: wanted.ranks for at, wanted in found.items() if wanted and wanted.ranks}


# How tables are cut


def _chosen(pieces: _Pieces, proposal: Proposal, pins: Mapping[str, Pin], most_bytes: float) -> list[Cut] | None:
    """A cut for each table; None where one does not fit however it is cut."""
    posed = pieces.posed
    found: list[Cut] = []
    for number, demand in enumerate(posed.demands):
        wanted = pins.get(demand.table.name)
        known: Sequence[Cut] = pieces.ordered(number, proposal)
        if wanted is not None:
            known = [cut for cut in cuts(demand, posed.cluster) if _as_pinned(cut, wanted, posed.cluster)]
            if posed.torchrec and wanted.name in COPIES:
                raise UserError(
                    f'table "{demand.table.name}" is pinned to {wanted.name}, which TorchRec does not have: pin it to '
                    f"one of {', '.join(name for name in NAMES if name not in COPIES)}, or to none"
                )
            if not known:
                raise UserError(f'table "{demand.table.name}" cannot be cut as its pin says: {_pinned(wanted)}')
            known = pieces.travelling(number, known, proposal.rows)
        elif _is_replicated(posed, demand, proposal, pieces.room):
            known = [DATA]
        cut = _first_fitting(pieces, number, known, most_bytes, proposal.part)
        if cut is None:
            return None
        found.append(cut)
    return found


def _is_replicated(posed: Problem, demand: Demand, proposal: Proposal, room: float) -> bool:
    if proposal.small:
        return replicable(demand, room)
    return proposal.replicate and cheaper_as_replicas(posed, demand, room)


def made_units(posed: Problem, number: int, cut: Cut, room: float = np.inf) -> list[Unit]:
    even = None if posed.torchrec else room
    return units(number, posed.demand(number, cut), cut, posed.cluster, posed.batch_size, even)


def row_bytes_share(posed: Problem, number: int, cut: Cut) -> float:
    """Of the bytes of a table's vectors, what its distinct rows take."""
    wire = DTYPE_BYTES[posed.precision.vectors] + DTYPE_BYTES[posed.precision.gradients]
    return fewer_bytes(posed.demands[number], posed.by_row[number], cut, posed.cluster, wire)


def copied_bytes_share(posed: Problem, number: int, copies: int) -> float:
    """Of the bytes between groups of a table that lies once, what copies in all of them exchange."""
    vectors, rows, width = posed.demands[number], posed.by_row[number], posed.demands[number].table.dim
    wire = width * (DTYPE_BYTES[posed.precision.vectors] + DTYPE_BYTES[posed.precision.gradients])
    pooled = vectors.ids * sharding.ID_BYTES + vectors.pooled * sharding.LENGTH_BYTES + vectors.vectors * wire
    once = min(pooled, rows.ids * (sharding.ID_BYTES + wire)) * posed.batch_size / copies
    return copies * vectors.touches(copies) * (sharding.ROW_BYTES + 4 * width) / once if once else 1.0


def _ordered(posed: Problem, number: int, proposal: Proposal, copies: bool) -> list[Cut]:
    """From what moves least to what balances best."""
    order = ["table", "column", "table-column", "table-row", "column-row", "row"]
    if not proposal.columns_first:
        order = ["table", "table-row", "table-column", "column-row", "column", "row"]
    if proposal.hosts_first:
        order = ["table-row", "table", "table-column", "column-row", "column", "row"]
    order = [*(COPIES if copies else ()), *order]
    known = [cut for cut in cuts(posed.demands[number], posed.cluster) if cut.name in order]
    return sorted(known, key=lambda cut: (order.index(cut.name), cut.columns))


def _as_pinned(cut: Cut, wanted: Pin, cluster: Cluster) -> bool:
    """Ranks say how many pieces, where nothing else does."""
    group = prod(level.num for level in cluster.levels[: cut.reach])
    pieces = wanted.columns or len(wanted.ranks) // group
    return cut.name == wanted.name and pieces in (0, cut.columns)


def _pinned(wanted: Pin) -> str:
    return f"{wanted.name}:{wanted.columns}" if wanted.columns else wanted.name


def cheaper_as_replicas(posed: Problem, demand: Demand, room: float) -> bool:
    """Whether all-reducing the table's gradient moves fewer bytes of a rank than its vectors and their gradients do."""
    size = demand.table.rows * demand.table.dim
    if not replicable(demand, room):
        return False
    wire = DTYPE_BYTES[posed.precision.vectors] + DTYPE_BYTES[posed.precision.gradients]
    return 2 * size * 4 < posed.own_batch * demand.vectors * demand.table.dim * wire


def replicable(demand: Demand, room: float) -> bool:
    return demand.table.rows * demand.table.dim * demand.weight_bytes <= SMALL * room


def _first_fitting(pieces: _Pieces, number: int, known: Sequence[Cut], most_bytes: float, part: float) -> Cut | None:
    """The first whose pieces are small enough; else, of those that fit, the one whose pieces have the least share; else
    the one with the smallest pieces, if a rank has room for one."""
    fitting: list[tuple[float, int, Cut]] = []
    smallest: list[tuple[float, int, Cut]] = []
    for at, cut in enumerate(known):
        if cut == DATA:
            return cut
        unit = pieces.made(number, cut, pieces.room)[0]
        size, share = unit.bytes_ + unit.buffers, pieces.share(unit)
        if size <= most_bytes and share <= part:
            return cut
        if size <= most_bytes:
            fitting.append((share, at, cut))
        if size <= pieces.room:
            smallest.append((size, at, cut))
    return min(fitting or smallest)[2] if fitting or smallest else None

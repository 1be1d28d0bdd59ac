"""Place units on ranks: those over all ranks first, then replicas, then those over groups, then those of one rank.

Shape legend: R ranks, N units, B bins (groups of ranks, or positions in a group), S ranks of a unit, K=3 loads (bytes
read, bytes of vectors sent, ids received).
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from shardwright.errors import UserError
from shardwright.planner.problem import PlacedTables, Problem
from shardwright.planner.tables import balance
from shardwright.planner.tables.sharding import ShardUnit

SUMMED_FIELDS = ("bytes_", "buffer_bytes", "lookups", "read_bytes", "sent_bytes")


def place_units(
    problem: Problem,
    units_by_table: Sequence[Sequence[ShardUnit]],
    weights: tuple[float, float, float],
    pinned_ranks: Mapping[int, tuple[int, ...]],
    free_bytes: float,
) -> PlacedTables | None:
    """Place the units of each table (none: data-parallel, or on servers) on ranks with `free_bytes`; None if they do
    not fit.

    `weights`: of work, of vectors sent and of ids received.
    """
    state = _RankState(problem, units_by_table, weights, free_bytes)
    for number, ranks in pinned_ranks.items():
        state.pin(units_by_table[number], ranks)
    num_levels = len(problem.cluster.levels)
    for unit in state.unplaced():
        if ranks := unit.sharding.row_ranks:
            state.put(unit, state.least_loaded_first(unit, ranks))
        elif unit.sharding.row_levels == num_levels > 0:
            state.put(unit, state.least_loaded_first(unit, range(problem.cluster.num_ranks)))
    if not state.place_replicas([unit for unit in state.unplaced() if unit.sharding.num_replicas > 1]):
        return None
    for level in range(max(num_levels, 1) - 1, -1, -1):
        unplaced = (units for units in units_by_table if units and not state.is_placed(units[0]))
        within_level = [units for units in unplaced if units[0].sharding.within_levels == level]
        if not (state.place_within_groups(level, within_level) and state.place_on_groups(level, state.unplaced(level))):
            return None
    if (state.free_R < 0).any():
        return None
    units = tuple(unit for table_units in units_by_table for unit in table_units)
    served = problem.served_tables
    unplaced = (number for number, table_units in enumerate(units_by_table) if not table_units)
    data_parallel = tuple(number for number in unplaced if number not in served)
    return PlacedTables(units, tuple(state.ranks_of[_key(unit)] for unit in units), data_parallel, served)


def _loads(unit: ShardUnit) -> np.ndarray:
    return np.array([unit.read_bytes, unit.sent_bytes, unit.lookups])


def _key(unit: ShardUnit) -> tuple[int, int]:
    return unit.table_number, unit.shard_index


class _RankState:
    """Loads and free bytes of the ranks, and the ranks of the units placed so far."""

    def __init__(
        self,
        problem: Problem,
        units_by_table: Sequence[Sequence[ShardUnit]],
        weights: tuple[float, float, float],
        free_bytes: float,
    ) -> None:
        num = problem.cluster.num_ranks
        self.cluster = problem.cluster
        self.names = [load.table.name for load in problem.table_loads]
        self.units_by_table = units_by_table
        self.weights = np.array(weights)
        self.loads_RK = np.zeros((num, 3))
        self.ranks_of: dict[tuple[int, int], tuple[int, ...]] = {}  # by table number and shard index
        loads, served = enumerate(problem.table_loads), problem.served_tables
        free_bytes -= sum(
            load.table_bytes for number, load in loads if not units_by_table[number] and number not in served
        )
        exchanged = {units[0].table_number for units in units_by_table if units and units[0].sharding.row_exchange}
        free_bytes -= sum(problem.row_buffer_bytes(problem.row_exchange_loads[number]) for number in exchanged)
        self.free_R = np.full(num, free_bytes)
        total_K = np.zeros(3)
        for unit in (unit for units in units_by_table for unit in units):
            num_ranks = unit.sharding.num_row_shards(problem.cluster) * unit.sharding.num_replicas
            total_K = total_K + _loads(unit) * num_ranks
        self.scale_K = num / np.maximum(total_K, 1e-300)  # 1 is an average rank's load

    def is_placed(self, unit: ShardUnit) -> bool:
        return _key(unit) in self.ranks_of

    def unplaced(self, row_levels: int | None = None) -> list[ShardUnit]:
        """The units without ranks; only those with rows over this many levels, if given."""
        return [
            unit
            for units in self.units_by_table
            for unit in units
            if not self.is_placed(unit) and row_levels in (None, unit.sharding.row_levels)
        ]

    def put(self, unit: ShardUnit, ranks: Sequence[int]) -> None:
        ranks = list(ranks)
        self.loads_RK[ranks] += _loads(unit) * self.scale_K
        self._add_uneven_loads(unit, ranks)
        self.free_R[ranks] -= unit.total_bytes
        self.ranks_of[_key(unit)] = tuple(ranks)

    def pin(self, units: Sequence[ShardUnit], ranks: tuple[int, ...]) -> None:
        """Put the units of a table on these ranks, in order; each takes one rank per row shard."""
        num = len(self.free_R)
        name = self.names[units[0].table_number] if units else ""
        if unknown := [rank for rank in ranks if not 0 <= rank < num]:
            raise UserError(f'table "{name}" is pinned to rank {unknown[0]}; ranks are 0 to {num - 1}')
        size = units[0].sharding.num_row_shards(self.cluster) if units else num
        if len(ranks) != len(units) * size:
            raise UserError(f'table "{name}" is pinned to {len(ranks)} ranks; its sharding takes {len(units) * size}')
        for i, unit in enumerate(units):
            unit_ranks = ranks[i * size : (i + 1) * size]
            first = min(unit_ranks) // size * size
            if sorted(unit_ranks) != sorted(unit.sharding.row_ranks or range(first, first + size)):
                where = f"ranks {unit.sharding.row_ranks}" if unit.sharding.row_ranks else "all ranks of a group"
                raise UserError(f'table "{name}" is pinned to {unit_ranks}; its rows are split over {where}')
            self.put(unit, unit_ranks)

    def place_replicas(self, units: Sequence[ShardUnit]) -> bool:
        """Place each unit at the same position of every host; returns whether all fit."""
        num, size = len(self.free_R), self.cluster.group_size(1)
        for unit in units:
            if unit.sharding.row_levels:
                positions = np.array(self.least_loaded_first(unit, range(size)))
                self.put(unit, (np.arange(0, num, size)[:, None] + positions).flatten().tolist())
        unsplit = [unit for unit in units if not unit.sharding.row_levels]
        bins = self._assign(unsplit, self.loads_RK.reshape(-1, size, 3).max(0), self.free_R.reshape(-1, size).min(0))
        for unit, position in zip(unsplit, () if bins is None else bins.tolist(), strict=bins is not None):
            self.put(unit, range(position, num, size))
        return bins is not None

    def place_on_groups(self, level: int, units: Sequence[ShardUnit]) -> bool:
        """Place each unit on all ranks of a group that the innermost `level` levels join; returns whether all fit."""
        size = self.cluster.group_size(level)
        bins = self._assign(units, self.loads_RK.reshape(-1, size, 3).max(1), self.free_R.reshape(-1, size).min(1))
        if bins is None:
            return False
        ranks_NS = bins[:, None] * size + np.arange(size)
        loads_NK = np.array([_loads(unit) for unit in units]).reshape(-1, 3) * self.scale_K
        np.add.at(self.loads_RK, ranks_NS, loads_NK[:, None])
        np.subtract.at(self.free_R, ranks_NS, np.array([unit.total_bytes for unit in units])[:, None])
        for unit, ranks in zip(units, ranks_NS.tolist(), strict=True):
            self.ranks_of[_key(unit)] = self.least_loaded_first(unit, ranks)
            self._add_uneven_loads(unit, list(self.ranks_of[_key(unit)]))
        return True

    def _add_uneven_loads(self, unit: ShardUnit, ranks: list[int]) -> None:
        """Add the difference of each rank's load from the unit's mean load."""
        if unit.lookup_ratios:
            difference_S1 = np.array(unit.lookup_ratios)[:, None] - 1
            self.loads_RK[ranks[: len(unit.lookup_ratios)]] += (
                difference_S1 * [unit.read_bytes, 0.0, unit.lookups] * self.scale_K
            )

    def least_loaded_first(self, unit: ShardUnit, ranks: Sequence[int]) -> tuple[int, ...]:
        """Rotate the ranks so that the least loaded one has the row range with most lookups."""
        if not unit.lookup_ratios:
            return tuple(ranks)
        least_loaded = int((self.loads_RK[list(ranks)] @ self.weights).argmin())
        start = (least_loaded - unit.lookup_ratios.index(unit.max_lookup_ratio)) % len(ranks)
        return (*ranks[start:], *ranks[:start])

    def place_within_groups(self, level: int, units_by_table: Sequence[Sequence[ShardUnit]]) -> bool:
        """Place all units of a table in one group of ranks, each on its least loaded rank; returns whether all fit."""
        size = self.cluster.group_size(level)
        totals = [
            replace(units[0], **{name: sum(getattr(unit, name) for unit in units) / size for name in SUMMED_FIELDS})
            for units in units_by_table
        ]
        bins = self._assign(totals, self.loads_RK.reshape(-1, size, 3).mean(1), self.free_R.reshape(-1, size).mean(1))
        if bins is None:
            return False
        for units, group in zip(units_by_table, bins, strict=True):
            ranks = np.arange(int(group) * size, (int(group) + 1) * size)
            for unit in sorted(units, key=lambda unit: -unit.read_bytes):
                fits_R = self.free_R[ranks] >= unit.total_bytes
                loads_R = np.where(fits_R, self.loads_RK[ranks] @ self.weights, np.inf)
                if not fits_R.any():
                    return False
                self.put(unit, [int(ranks[loads_R.argmin()])])
        return True

    def _assign(self, units: Sequence[ShardUnit], loads_BK: np.ndarray, free_B: np.ndarray) -> np.ndarray | None:
        """A bin for each unit, given the loads and free bytes of the bins; None if they do not fit."""
        if not units:
            return np.zeros(0, int)
        items = balance.Items(
            np.array([_loads(unit) for unit in units]) * self.scale_K,
            np.array([unit.total_bytes for unit in units]),
            self.weights,
            loads_BK,
            free_B,
        )
        return balance.assign_bins(items, sum(map(len, self.units_by_table)))

"""Pieces of tables onto ranks: those over all ranks first, then those with a copy in every group, then those over
groups, then those of one rank."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod

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
    """`made` are the pieces of each table, none where every rank has a replica; `weights` say how much work counts,
    vectors sent and ids received; `room` is bytes of a rank. None where not all find room."""
    placing = _Placing(problem, units_by_table, weights, free_bytes)
    for number, ranks in pinned_ranks.items():
        placing.pin(units_by_table[number], ranks)
    for unit in placing.left():
        if unit.sharding.row_ranks:
            placing.put(unit, placing.coolest_first(unit, unit.sharding.row_ranks))
    num_levels = len(problem.cluster.levels)
    for unit in placing.left():
        if unit.sharding.row_levels == num_levels > 0:
            placing.put(unit, placing.coolest_first(unit, range(problem.cluster.num_ranks)))
    if not placing.copies([unit for unit in placing.left() if unit.sharding.num_replicas > 1]):
        return None
    for level in range(max(num_levels, 1) - 1, -1, -1):
        together = [
            pieces
            for pieces in units_by_table
            if pieces and pieces[0].sharding.within_levels == level and not placing.has(pieces[0])
        ]
        if not (placing.homes(level, together) and placing.groups(level, placing.left(level))):
            return None
    if (placing.free_R < 0).any():
        return None
    order = tuple(unit for pieces in units_by_table for unit in pieces)
    replicas = tuple(number for number, pieces in enumerate(units_by_table) if not pieces)
    return PlacedTables(order, tuple(placing.where[_name(unit)] for unit in order), replicas)


def _loads(unit: ShardUnit) -> np.ndarray:
    return np.array([unit.read_bytes, unit.sent_bytes, unit.lookups])


def _name(unit: ShardUnit) -> tuple[int, int]:
    return unit.table_number, unit.shard_index


class _Placing:
    """Loads and room of the ranks while pieces come to them."""

    def __init__(
        self, problem: Problem, made: Sequence[Sequence[ShardUnit]], weights: tuple[float, float, float], room: float
    ) -> None:
        num = problem.cluster.num_ranks
        self.levels = problem.cluster.levels
        self.names = [demand.table.name for demand in problem.table_loads]
        self.made = made
        self.weights = np.array(weights)
        self.loads_RK = np.zeros((num, 3))
        self.where: dict[tuple[int, int], tuple[int, ...]] = {}  # by table's number and piece
        replicas = [demand for demand, pieces in zip(problem.table_loads, made, strict=True) if not pieces]
        room -= sum(demand.table.rows * demand.row_bytes(demand.table.dim) for demand in replicas)
        by_row = {pieces[0].table_number for pieces in made if pieces and pieces[0].sharding.row_exchange}
        room -= sum(problem.row_buffer_bytes(problem.row_exchange_loads[number]) for number in by_row)
        self.free_R = np.full(num, room)
        every = [
            (unit, unit.sharding.num_row_shards(problem.cluster) * unit.sharding.num_replicas)
            for pieces in made
            for unit in pieces
        ]
        total_K = sum((_loads(unit) * size for unit, size in every), np.zeros(3))
        self.scale_K = num / np.maximum(total_K, 1e-300)  # to an even share

    def has(self, unit: ShardUnit) -> bool:
        return _name(unit) in self.where

    def left(self, reach: int | None = None) -> list[ShardUnit]:
        """What has no place yet."""
        return [
            unit
            for pieces in self.made
            for unit in pieces
            if not self.has(unit) and reach in (None, unit.sharding.row_levels)
        ]

    def put(self, unit: ShardUnit, ranks: Sequence[int]) -> None:
        at = list(ranks)
        self.loads_RK[at] += _loads(unit) * self.scale_K
        self._uneven(unit, at)
        self.free_R[at] -= unit.bytes_ + unit.buffer_bytes
        self.where[_name(unit)] = tuple(at)

    def pin(self, pieces: Sequence[ShardUnit], ranks: tuple[int, ...]) -> None:
        """Pieces one after the other on these ranks; the rows of one over a whole group where they are spread."""
        num = len(self.free_R)
        name = self.names[pieces[0].table_number] if pieces else ""
        if unknown := [rank for rank in ranks if not 0 <= rank < num]:
            raise UserError(f'table "{name}" is pinned to rank {unknown[0]}; ranks are 0 to {num - 1}')
        size = self._size(pieces[0].sharding.row_levels) if pieces else num
        if len(ranks) != len(pieces) * size:
            raise UserError(f'table "{name}" is pinned to {len(ranks)} ranks; cut so it lies on {len(pieces) * size}')
        for at, unit in enumerate(pieces):
            mine = ranks[at * size : (at + 1) * size]
            if sorted(mine) != [min(mine) // size * size + place for place in range(size)]:
                raise UserError(f'table "{name}" is pinned to {mine}; its rows go over a whole group')
            self.put(unit, mine)

    def copies(self, found: Sequence[ShardUnit]) -> bool:
        """Each piece to the same place in every group; false where one has no room."""
        num, size = len(self.free_R), self._size(1)
        for unit in found:
            if unit.sharding.row_levels:
                places = np.array(self.coolest_first(unit, range(size)))
                self.put(unit, (np.arange(0, num, size)[:, None] + places).flatten().tolist())
        whole = [unit for unit in found if not unit.sharding.row_levels]
        bins = self._balanced(whole, self.loads_RK.reshape(-1, size, 3).max(0), self.free_R.reshape(-1, size).min(0))
        for unit, place in zip(whole, () if bins is None else bins.tolist(), strict=bins is not None):
            self.put(unit, range(place, num, size))
        return bins is not None

    def groups(self, level: int, found: Sequence[ShardUnit]) -> bool:
        """Each piece to a group of the ranks that the innermost `level` levels join; false where one has no room."""
        size = self._size(level)
        bins = self._balanced(found, self.loads_RK.reshape(-1, size, 3).max(1), self.free_R.reshape(-1, size).min(1))
        if bins is None:
            return False
        inside = np.arange(size)
        ranks_NS = bins[:, None] * size + inside
        loads_NK = np.array([_loads(unit) for unit in found]).reshape(-1, 3) * self.scale_K
        np.add.at(self.loads_RK, ranks_NS, loads_NK[:, None])
        np.subtract.at(self.free_R, ranks_NS, np.array([unit.bytes_ + unit.buffer_bytes for unit in found])[:, None])
        for unit, ranks in zip(found, ranks_NS.tolist(), strict=True):
            self.where[_name(unit)] = self.coolest_first(unit, ranks)
            self._uneven(unit, list(self.where[_name(unit)]))
        return True

    def _uneven(self, unit: ShardUnit, ranks: list[int]) -> None:
        """What each of its ranks has more than their mean, or less."""
        if unit.lookup_ratios:
            more_S1 = np.array(unit.lookup_ratios)[:, None] - 1
            self.loads_RK[ranks[: len(unit.lookup_ratios)]] += (
                more_S1 * [unit.read_bytes, 0.0, unit.lookups] * self.scale_K
            )

    def coolest_first(self, unit: ShardUnit, ranks: Sequence[int]) -> tuple[int, ...]:
        """In a ring, so that the one with least to do gets the place with most lookups."""
        if not unit.lookup_ratios:
            return tuple(ranks)
        coolest = int((self.loads_RK[list(ranks)] @ self.weights).argmin())
        at = (coolest - unit.lookup_ratios.index(unit.max_lookup_ratio)) % len(ranks)
        return (*ranks[at:], *ranks[:at])

    def homes(self, level: int, found: Sequence[Sequence[ShardUnit]]) -> bool:
        """All pieces of a table to one group, there to the least loaded ranks."""
        size = self._size(level)
        together = [
            replace(pieces[0], **{name: sum(getattr(unit, name) for unit in pieces) / size for name in SUMMED_FIELDS})
            for pieces in found
        ]
        bins = self._balanced(
            together, self.loads_RK.reshape(-1, size, 3).mean(1), self.free_R.reshape(-1, size).mean(1)
        )
        if bins is None:
            return False
        for pieces, group in zip(found, bins, strict=True):
            ranks = np.arange(int(group) * size, (int(group) + 1) * size)
            for unit in sorted(pieces, key=lambda unit: -unit.read_bytes):
                full = np.where(
                    self.free_R[ranks] >= unit.bytes_ + unit.buffer_bytes, self.loads_RK[ranks] @ self.weights, np.inf
                )
                if not np.isfinite(full.min()):
                    return False
                self.put(unit, [int(ranks[full.argmin()])])
        return True

    def _size(self, level: int) -> int:
        return prod(one.num for one in self.levels[:level])

    def _balanced(self, found: Sequence[ShardUnit], full_BK: np.ndarray, free_B: np.ndarray) -> np.ndarray | None:
        """Groups, or places in them, for these, by what the ranks of each have already and have room for."""
        if not found:
            return np.zeros(0, int)
        things = balance.Items(
            np.array([_loads(unit) for unit in found]) * self.scale_K,
            np.array([unit.bytes_ + unit.buffer_bytes for unit in found]),
            self.weights,
            full_BK,
            free_B,
        )
        return balance.assign_bins(things, sum(map(len, self.made)))

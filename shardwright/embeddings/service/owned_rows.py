"""The rows that a table server owns: it answers reads of ranks, and applies the updates that they push.

A round is one exchange of updates: of a training step, or of a flush. A rank pushes its updates in each round, perhaps
none, in one message or in several parts. Once those of all ranks are here they are applied, added in the order of
ranks, so that the result does not depend on which came first. A read names the round before which it is: it is answered
when all earlier rounds have been applied. So a read with a bound of 0 is exact, and a message that comes twice has no
effect the second time.

Shape legend: A rows to validate, F rows that are sent, V rows with updates, D columns, S columns of squares,
X values of a row and its state; E rows of a group, R some of them, C columns of a part.
"""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from shardwright.embeddings.copies.row_clocks import RowClocks
from shardwright.embeddings.copies.row_copies import NO_VERSION, Lease, row_values
from shardwright.embeddings.copies.updates import RowUpdates
from shardwright.embeddings.service.shard_stores import ShardStores, StoreSpec
from shardwright.errors import UserError
from shardwright.kernels.initial import uniform_rows
from shardwright.rectangle import IndexRange
from shardwright.spec.optimizer import SparseOptimizer, num_squares, state_shapes
from shardwright.spec.workload import Dtype

SNAPSHOT_BITS = 60
MAX_ROWS = 1 << 31  # of a group
MAX_ROUNDS_AHEAD = 2  # of pushes, before the rounds that have been applied
WEIGHT = "weight"


class RoundFailed(Exception):
    """Some updates of a round may have been applied, or lost: the server ends before it acknowledges anything."""


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """Rows of tables that a server owns, one after another. `pull`: most updates that a copy may miss.
    `initial_state`: value of the optimizer state of rows without updates."""

    names: str
    rows: int
    dim: int
    dtype: Dtype
    pull: int
    initial_state: float = 0.0


@dataclass(frozen=True, slots=True)
class OwnedSpec:
    """All rows that a server, with this number in the plan, has for a run, and how many ranks train them."""

    server: int
    num_ranks: int
    optimizer: SparseOptimizer
    groups: tuple[GroupSpec, ...]
    stores: tuple[StoreSpec, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class GroupRead:
    """Rows of a group to validate, and versions of their copies."""

    rows_A: Tensor
    versions_A: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class GroupAnswer:
    """`leases_A`, `versions_A`: of the rows to validate; the rows with `is_new_A` are in `values_FX`."""

    is_new_A: Tensor
    leases_A: Tensor
    versions_A: Tensor
    values_FX: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Push:
    """The updates of a rank in a round, by group, or one of `num_parts` parts of them. `steps`: the number of the
    optimizer step, by group. `is_last`: the rank has dropped its copies."""

    optimizer: SparseOptimizer
    steps: tuple[int, ...]
    updates: tuple[RowUpdates, ...]
    is_last: bool = False
    part: int = 0
    num_parts: int = 1


@dataclass(frozen=True, slots=True)
class Place:
    """A part (weights, or an optimizer state) of a group, now or in a snapshot."""

    group: int
    part: str
    snapshot: int | None = None


@dataclass(slots=True)
class _Snapshot:
    """The parts of all groups as they were, for those that have not yet released it."""

    num_changes: int
    parts: list[dict[str, Tensor]]
    holders: set[str] = field(default_factory=set)


class OwnedRows:
    """The rows of all groups, their clocks, and the pushes of rounds that are not complete."""

    def __init__(self, spec: OwnedSpec) -> None:
        for group in spec.groups:
            if group.rows > MAX_ROWS:
                raise UserError(
                    f"tables {group.names} have {group.rows:,} rows on this server, at most {MAX_ROWS:,} are possible: "
                    "use more servers"
                )
        self.spec, self.round = spec, 0
        self._num_changes = 0  # of all rows, since the start
        self.clocks = [self._make_clocks(group) for group in spec.groups]
        self.stores = ShardStores(spec.stores)
        self._pushes: dict[int, dict[int, Push]] = {}  # by round and rank
        self._parts: dict[tuple[int, int], dict[int, Push]] = {}  # by round and rank, and number of the part
        self._snapshots: dict[int, _Snapshot] = {}

    def _make_clocks(self, group: GroupSpec) -> RowClocks:
        dtype = getattr(torch, group.dtype)
        shapes = state_shapes(self.spec.optimizer, group.rows, group.dim)
        state = {name: torch.full(shape, group.initial_state, dtype=dtype) for name, shape in shapes.items()}
        lease = Lease(group.pull, self.spec.num_ranks - 1)
        return RowClocks(torch.zeros(group.rows, group.dim, dtype=dtype), state, lease)

    @property
    def bytes_(self) -> int:
        parts = [part for index, _ in enumerate(self.clocks) for part in self.parts(index).values()]
        return sum(part.nbytes for part in [*parts, *self.stores.rows_EX])

    def parts(self, index: int) -> dict[str, Tensor]:
        """The weights and the optimizer state of a group."""
        clocks = self.clocks[index]
        return {WEIGHT: clocks.weight_ED, **clocks.state}

    def all_parts(self) -> list[Tensor]:
        """All that a restarted server needs: of each group its parts, and how often each row was updated and used."""
        parts = [
            [*self.parts(index).values(), clocks.version_E, clocks.uses_E] for index, clocks in enumerate(self.clocks)
        ]
        return [*(part for of_group in parts for part in of_group), *self.stores.rows_EX]

    @property
    def has_incomplete_round(self) -> bool:
        return bool(self._pushes or self._parts)

    def can_read(self, round_: int) -> bool:
        """Whether all earlier rounds have been applied."""
        if not 0 <= round_ <= self.round + MAX_ROUNDS_AHEAD:
            raise UserError(f"a read before round {round_}, while round {self.round} is not complete")
        return round_ <= self.round

    def read(self, reads: Sequence[GroupRead]) -> list[GroupAnswer]:
        self._check_groups(len(reads))
        answers = []
        for group, clocks, read in zip(self.spec.groups, self.clocks, reads, strict=True):
            _check_rows(group, read.rows_A)
            _check_same_length(group, read.rows_A, read.versions_A)
            if (read.versions_A > clocks.version_E[read.rows_A]).any() or (read.versions_A < NO_VERSION).any():
                raise UserError(f"copies of {group.names} have versions that this server has not given them")
            is_new, leases, versions = clocks.renew(read.rows_A, read.versions_A)
            values = row_values(clocks.weight_ED, clocks.state, read.rows_A[is_new])
            answers.append(GroupAnswer(is_new, leases, versions, values))
        return answers

    def push(self, rank: int, round_: int, push: Push) -> bool:
        """Take the updates of a rank, or a part of them; returns whether they are new."""
        self._check_push(push)
        if round_ < self.round or rank in self._pushes.get(round_, ()):
            return False
        if push.part in (parts := self._parts.get((round_, rank), {})):
            return False
        if any(part.num_parts != push.num_parts for part in parts.values()):
            raise UserError(
                f"updates of rank {rank} for round {round_} are in {push.num_parts} parts, and were in others"
            )
        if round_ >= self.round + MAX_ROUNDS_AHEAD or not 0 <= rank < self.spec.num_ranks:
            raise UserError(f"updates of rank {rank} for round {round_}, while round {self.round} is not complete")
        parts = self._parts.setdefault((round_, rank), {})
        parts[push.part] = push
        if len(parts) < push.num_parts:
            return True
        try:
            self._pushes.setdefault(round_, {})[rank] = _join_parts(parts)
        except Exception as error:
            raise RoundFailed(f"updates of rank {rank} cannot be joined: {error}") from error
        del self._parts[round_, rank]
        while len(self._pushes.get(self.round, ())) == self.spec.num_ranks:
            by_rank = self._pushes[self.round]
            try:
                self._apply([by_rank[rank] for rank in range(self.spec.num_ranks)])
            except Exception as error:
                raise RoundFailed(f"updates of round {self.round} cannot be applied: {error}") from error
            del self._pushes[self.round]
            self.round += 1
        return True

    def _check_push(self, push: Push) -> None:
        self._check_groups(len(push.updates))
        self._check_groups(len(push.steps))
        for group, updates in zip(self.spec.groups, push.updates, strict=True):
            _check_rows(group, updates.rows_V)
            width = group.dim + num_squares(self.spec.optimizer, group.dim)
            if updates.sums_VD.shape[1] + updates.squares_VS.shape[1] != width:
                raise UserError(f"updates of {group.names} have another width than {width}")
            _check_same_length(group, *updates.columns)

    def _check_groups(self, num: int) -> None:
        if num != len(self.spec.groups):
            raise UserError(f"a message for {num} groups of tables; this server has {len(self.spec.groups)}")

    def _apply(self, pushes: Sequence[Push]) -> None:
        optimizer = pushes[0].optimizer
        for index, clocks in enumerate(self.clocks):
            clocks.apply(optimizer, [push.updates[index] for push in pushes], pushes[0].steps[index])
            if all(push.is_last for push in pushes):
                clocks.forget()
        self._num_changes += 1

    def draw(self, group: int, rows_R: Tensor, ids_R: Tensor, seed: int, bound: float) -> None:
        """Give rows of a group the initial values of these ids, between rounds."""
        weight_ED = self._part(Place(group, WEIGHT), rows_R)
        _check_same_length(self.spec.groups[group], rows_R, ids_R)
        weight_ED[rows_R] = uniform_rows(seed, ids_R, weight_ED.shape[1], bound, weight_ED.dtype)
        self._num_changes += 1

    def put(self, place: Place, rows_R: Tensor, columns: IndexRange, values_RC: Tensor) -> None:
        """Replace some columns of some rows, between rounds."""
        target_EC = self._part(place, rows_R)
        start, end = columns
        if values_RC.shape != (len(rows_R), end - start) or not 0 <= start <= end <= target_EC.shape[1]:
            raise UserError(f"{place}: values of shape {tuple(values_RC.shape)} for columns {start}..{end}")
        if values_RC.dtype != target_EC.dtype:
            raise UserError(f"{place}: values are {values_RC.dtype}; wanted {target_EC.dtype}")
        target_EC[:, start:end].index_copy_(0, rows_R, values_RC)
        self._num_changes += 1

    def get(self, place: Place, rows_R: Tensor) -> Tensor:
        """(R, C) Some rows."""
        return self._part(place, rows_R).index_select(0, rows_R)

    def _part(self, place: Place, rows_R: Tensor) -> Tensor:
        """(E, C) A part of a group, now or in a snapshot."""
        if not 0 <= place.group < len(self.spec.groups):
            raise UserError(f"group {place.group} of tables; this server has {len(self.spec.groups)}")
        if place.snapshot is not None and place.snapshot not in self._snapshots:
            raise UserError("the snapshot of the rows is gone: the table server was restarted; save again")
        of_groups = None if place.snapshot is None else self._snapshots[place.snapshot].parts
        parts = self.parts(place.group) if of_groups is None else of_groups[place.group]
        if place.part not in parts:
            raise UserError(f'part "{place.part}" of tables; this server has {", ".join(parts)}')
        _check_rows(self.spec.groups[place.group], rows_R)
        part = parts[place.part]
        return part if part.dim() == 2 else part.unsqueeze(1)

    def snapshot(self, holder: str) -> int:
        """Keep the rows as they are until all holders have released them; those between the same changes share them."""
        number = next((n for n, each in self._snapshots.items() if each.num_changes == self._num_changes), None)
        if number is None:
            copies = [{name: part.clone() for name, part in self.parts(i).items()} for i, _ in enumerate(self.clocks)]
            number = secrets.randbits(SNAPSHOT_BITS)  # no other one after a restart
            self._snapshots[number] = _Snapshot(self._num_changes, copies)
        self._snapshots[number].holders.add(holder)
        return number

    def release(self, holder: str, snapshot: int) -> None:
        if snapshot in self._snapshots:
            self._snapshots[snapshot].holders.discard(holder)
            if not self._snapshots[snapshot].holders:
                del self._snapshots[snapshot]


def _join_parts(parts: Mapping[int, Push]) -> Push:
    if len(parts) == 1:
        return parts[0]
    by_group = zip(*(parts[number].updates for number in range(len(parts))), strict=True)
    return replace(parts[0], updates=tuple(map(RowUpdates.concat, by_group)))


def _check_rows(group: GroupSpec, rows: Tensor) -> None:
    low, high = (int(end) for end in torch.aminmax(rows)) if len(rows) else (0, -1)
    if low < 0 or high >= group.rows:
        raise UserError(f"row {high if high >= group.rows else low} of {group.names}, which has {group.rows} rows here")


def _check_same_length(group: GroupSpec, *columns: Tensor) -> None:
    if len({len(column) for column in columns}) > 1:
        raise UserError(f"columns of unequal length for {group.names}")

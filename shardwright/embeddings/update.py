"""The update of banks: at once where nobody else has the same rows, after a meeting where others do.

Replicas sum what each was sent, in one order, so that they stay alike to the bit: rows with their sums travel, or whole
tables where those are fewer bytes. Pieces with some of a row's columns add up what an optimizer asks of whole rows.

Shape legend: U distinct rows of a piece, D its columns.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shardwright.comm import collective
from shardwright.comm.mesh import Group
from shardwright.comm.pending import Pending
from shardwright.embeddings.layout import Bank, Layout, Piece, asked
from shardwright.embeddings.local_shards import Holding
from shardwright.jagged import Jagged
from shardwright.kernels import embedding, reference
from shardwright.kernels.arguments import POOLINGS, Ids, TableState
from shardwright.kernels.gradient_sums import Sums, absolute, add_places, sum_places
from shardwright.spec.optimizer import SGD, RowWiseAdaGrad, SparseOptimizer

ROW_NUMBERS = 2  # that go with a row's own: its place, in 64 bits
Place = tuple[int, int, tuple[tuple[int, int], ...]]  # table, band, columns
Running = Mapping[Place, reference.Rowwise[None]]  # steps that ask for sums over whole rows
Whole = Pending[dict[Place, Tensor]]


@dataclass(frozen=True, slots=True)
class Rule:
    """What is done to the rows: the optimizer, and the number of each table's step, from 1."""

    optimizer: SparseOptimizer
    steps: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Arrived:
    """Gradients of each bank's vectors, by bank number; for replicas their sums over all replicas, possibly in flight;
    and for each feature whether the loss of some rank used it."""

    gradients: Mapping[int, Sequence[Tensor]]
    summed: Mapping[int, Pending[Sums]]
    used: tuple[bool, ...]
    met: Tensor | None = None  # gradients of sums of parts


class Updates:
    """The updates of all banks of a rank; `dtype` is that of gradients."""

    def __init__(self, layout: Layout, holdings: Sequence[Holding], group: Group, dtype: torch.dtype) -> None:
        self._holdings, self._group, self._dtype = holdings, group, dtype
        self._rank, num = group.index, group.size
        self._everywhere = [at for at, one in enumerate(holdings) if len(one.bank.replicas) == num > 1]
        self._columns = any(bank.columns for banks in layout.banks for bank in banks)
        mine = {_place(piece): piece for piece in _in_part(layout.banks[self._rank])}
        self._sent: list[list[Place]] = [[] for _ in range(num)]
        self._received: list[list[Place]] = [[] for _ in range(num)]
        for rank, banks in enumerate(layout.banks if self._columns else ()):
            theirs = {_place(piece): piece for piece in _in_part(banks)}
            if rank != self._rank:
                self._sent[rank] = _told(mine, theirs, self._rank, rank, num)
                self._received[rank] = _told(theirs, mine, rank, self._rank, num)

    def most_numbers(self, features: Jagged) -> int:
        """Of the rows with gradients, at most, in replicas that serve one rank each: what they would send."""
        ids = dict(enumerate(features.lengths.sum(1).tolist()))
        found = 0
        for at in self._everywhere:
            streams, pieces = self._holdings[at].bank.streams, self._holdings[at].bank.pieces
            for number, piece in enumerate(pieces):
                rows = piece.rows[1] - piece.rows[0]
                mine = (one.feature for one in streams if one.piece == number)
                read = sum(rows if feature is None else ids[feature] for feature in mine)
                found += min(read, rows) * (piece.dim + ROW_NUMBERS)
        return found

    def begun(self, own: Mapping[int, tuple[Ids, Sequence[Tensor]]], numbers: float) -> dict[int, Pending[Sums]]:
        """Whole tables on their way to all replicas, where no rank's rows are `numbers` that would be fewer."""
        found = {}
        for at in self._everywhere:
            whole = sum(weight.numel() + len(weight) for weight in self._holdings[at].weights)
            if 2 * whole <= numbers:
                found[at] = self._reduced(self._holdings[at], *own[at])
        return found

    def _reduced(self, holding: Holding, wanted: Ids, gradients: Sequence[Tensor]) -> Pending[Sums]:
        """Every row of the tables: its sum, and on how many ranks it has one."""
        sizes = [weight.numel() for weight in holding.weights]
        rows = [len(weight) for weight in holding.weights]
        flat = torch.zeros(sum(sizes) + sum(rows), dtype=gradients[0].dtype)
        *tables, touched = flat.split([*sizes, sum(rows)])
        marks = touched.split(rows)
        sums = [table.view(len(mark), -1) for table, mark in zip(tables, marks, strict=True)]
        add_places(wanted, gradients, sums)
        touched[absolute(wanted, rows).values] = 1

        def found(_: Tensor) -> Sums:
            there = [mark.nonzero().flatten() for mark in marks]
            picked = [table[at] for table, at in zip(sums, there, strict=True)]
            return Sums(torch.cat(there), [len(one) for one in there], picked)

        return collective.all_reduce(flat, self._group).then(found)

    def run(self, wanted: Sequence[Ids], arrived: Arrived, rule: Rule) -> None:
        """Pieces of columns first: what they ask of whole rows is under way while the others are updated."""
        by_row = self._begun_by_row(wanted, arrived, rule) if self._columns else None
        for at, (holding, ids) in enumerate(zip(self._holdings, wanted, strict=True)):
            bank = holding.bank
            if bank.columns:
                continue
            if len(bank.replicas) == 1:
                holding.update(ids, arrived.gradients[at], rule.optimizer, rule.steps)
            else:
                holding.apply(self._sums(at, ids, arrived), rule.optimizer, rule.steps)
        if by_row is not None:
            self._end_by_row(*by_row, reference.num_sums(rule.optimizer))

    def _sums(self, at: int, ids: Ids, arrived: Arrived) -> Sums:
        """Of one bank's rows, over all its replicas."""
        if at in arrived.summed:
            return arrived.summed[at].wait()
        sums = self._holdings[at].summed(ids, arrived.gradients[at])
        return self._with_replicas(self._holdings[at], sums) if len(self._holdings[at].bank.replicas) > 1 else sums

    def _with_replicas(self, holding: Holding, sums: Sums) -> Sums:
        """What all replicas were sent, each row once."""
        replicas = holding.bank.replicas
        ranks = [rank in replicas for rank in range(self._group.size)]
        pieces = len(sums.counts)
        counts = torch.tensor(sums.counts)
        told = self._to_all(counts, ranks, [pieces if one else 0 for one in ranks])
        counts_RP = torch.stack(told)
        rows = self._to_all(sums.rows_U, ranks, _by_rank(ranks, counts_RP.sum(1).tolist()))
        dims = torch.tensor([piece.dim for piece in holding.bank.pieces])
        flat = torch.cat([one.flatten() for one in sums.sums])
        numbers = self._to_all(flat, ranks, _by_rank(ranks, (counts_RP * dims).sum(1).tolist()))
        rows_by = [one.split(each.tolist()) for one, each in zip(rows, counts_RP, strict=True)]
        sums_by = [one.split((each * dims).tolist()) for one, each in zip(numbers, counts_RP, strict=True)]
        found_rows, found_sums = [], []
        for at, dim in enumerate(dims.tolist()):
            rows_U, place_N = torch.unique(torch.cat([one[at] for one in rows_by]), return_inverse=True)
            given_ND = torch.cat([one[at].view(-1, dim) for one in sums_by])
            found_rows.append(rows_U)
            found_sums.append(_summed(place_N, given_ND, len(rows_U)))
        return Sums(torch.cat(found_rows), [len(one) for one in found_rows], found_sums)

    def _to_all(self, x: Tensor, ranks: Sequence[bool], received: Sequence[int]) -> list[Tensor]:
        """This rank's numbers to each of these ranks, and theirs, in the order of ranks. No other ranks take part, so
        that not all can compare what they do."""
        group = replace(self._group, check=False)
        sent = [len(x) if one else 0 for one in ranks]
        copies = torch.cat([x] * sum(ranks))
        arrived = collective.all_to_all(copies, sent, received, group).wait().split(list(received))
        return [one for one, taken in zip(arrived, ranks, strict=True) if taken]

    def _begun_by_row(self, wanted: Sequence[Ids], arrived: Arrived, rule: Rule) -> tuple[Running, Whole]:
        """The optimizer's steps on pieces of columns, and what they ask of whole rows, on its way."""
        running: dict[Place, reference.Rowwise[None]] = {}
        for at, holding in enumerate(self._holdings):
            if not holding.bank.columns:
                continue
            sums = self._sums(at, wanted[at], arrived)
            rows = sums.rows_U.split(sums.counts)
            for piece, table, state, names, rows_U, sums_UD in zip(
                holding.bank.pieces,
                holding.tables,
                holding.states(rule.steps),
                holding.state,
                rows,
                sums.sums,
                strict=True,
            ):
                named = dict(zip(names, state.state, strict=True))
                if state.trained:
                    if state.changed is not None:
                        state.changed[rows_U] = True
                    running[_place(piece)] = _updating(rule.optimizer, state, named, (rows_U, sums_UD), table.dim)
        return running, self._over_columns({place: next(one) for place, one in running.items()})

    def _end_by_row(self, running: Running, whole: Whole, num_sums: int) -> None:
        for number in range(num_sums):
            found, partial = whole.wait(), dict[Place, Tensor]()
            for place, one in running.items():
                with suppress(StopIteration):
                    partial[place] = one.send(found[place])
            if number + 1 < num_sums:
                whole = self._over_columns(partial)

    def _over_columns(self, partial: Mapping[Place, Tensor]) -> Whole:
        """Sums over whole rows, added in the order of their columns."""
        sizes = {(table, band): len(one) for (table, band, _), one in partial.items()}
        parts = [partial[place] for places in self._sent for place in places if place in partial]
        sent = [sum(len(partial[place]) for place in places if place in partial) for places in self._sent]
        expected = [[place for place in places if place[:2] in sizes] for places in self._received]
        received = [sum(sizes[place[:2]] for place in places) for places in expected]
        flat = torch.cat([torch.empty(0, dtype=self._dtype), *parts])

        def added(arrived: Tensor) -> dict[Place, Tensor]:
            places = [place for one in expected for place in one]
            found = dict(zip(places, arrived.split([sizes[place[:2]] for place in places]), strict=True))
            of_rows: dict[tuple[int, int], list[Tensor]] = {}
            for place, one in sorted({**found, **partial}.items()):
                of_rows.setdefault(place[:2], []).append(one)
            return {place: torch.stack(of_rows[place[:2]]).sum(0) for place in partial}

        return collective.all_to_all(flat, sent, received, self._group).then(added)


def _updating(
    optimizer: SparseOptimizer,
    table: TableState,
    state: Mapping[str, Tensor],
    gradient: tuple[Tensor, Tensor],
    dim: int,
) -> reference.Rowwise[None]:
    """`reference.updating`; of the optimizer that most tables have, with the compiled kernels."""
    if not isinstance(optimizer, RowWiseAdaGrad) or optimizer.clip or optimizer.weight_decay:
        yield from reference.updating(optimizer, table.weight, state, gradient, (table.step, table.key, dim))
        return
    rows_U, grad_UD = gradient
    squares_U = yield torch.linalg.vecdot(grad_UD, grad_UD)
    sum_U = state["sum"][rows_U] + squares_U / dim
    state["sum"][rows_U] = sum_U
    rates_U = optimizer.lr / (sum_U.sqrt() + optimizer.eps)
    ids = Ids(rows_U, torch.tensor([0, len(rows_U)]), rates_U, [0], [POOLINGS.index("none")])
    plain = TableState(table.weight, (), table.step, table.key)
    embedding.update([plain], ids, [grad_UD.new_empty(1, 0), grad_UD], SGD(lr=1.0))


def _told(mine: Mapping[Place, Piece], theirs: Mapping[Place, Piece], rank: int, other: int, num: int) -> list[Place]:
    """The places of `rank` that `other` has other columns of, and asks this rank for."""
    bands = {place[:2] for place in theirs}
    return sorted(
        place
        for place, piece in mine.items()
        if place[:2] in bands and place not in theirs and asked(piece.ranks, other, num) == rank
    )


def _place(piece: Piece) -> Place:
    return piece.table, piece.band, piece.cols


def _in_part(banks: Sequence[Bank]) -> list[Piece]:
    return [piece for bank in banks if bank.columns for piece in bank.pieces]


def _by_rank(ranks: Sequence[bool], each: Sequence[int]) -> list[int]:
    """The numbers of those ranks that take part, 0 of the others."""
    numbers = iter(each)
    return [next(numbers) if one else 0 for one in ranks]


def _summed(place_N: Tensor, given_ND: Tensor, rows: int) -> Tensor:
    offsets = torch.tensor([0, len(place_N)])
    ids = Ids(place_N, offsets, None, [0], [POOLINGS.index("none")])
    return sum_places(ids, [given_ND.new_empty(1, 0), given_ND], [rows], [given_ND.shape[1]])[0]

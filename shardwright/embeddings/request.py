"""What a rank asks of the others: its ids as positions, each distinct row once where rows travel, cut by bands.

Shape legend: N ids, F features, B samples, S stretches, U distinct rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from shardwright.embeddings.lookup import relative
from shardwright.embeddings.order import ById, Order
from shardwright.embeddings.shard import Layout
from shardwright.jagged import Jagged, counts, offsets, select
from shardwright.kernels.calls import POOLINGS, IdOutside, Ids
from shardwright.kernels.ids import bucketized, distinct, gathered
from shardwright.layers.embedding import EmbeddingBags
from shardwright.layers.table import state_dtype_of

NARROW = 1 << 31  # rows that 32 bits can number


@dataclass(frozen=True, slots=True)
class Distinct:
    """The rows of tables whose rows travel: how each feature's ids are found among those that come back."""

    ids: Ids  # values are places among the distinct rows of the feature's table, by its number among such tables
    cuts: tuple[tuple[int, ...], ...]  # by such a table: the places where bands begin, and the number of rows

    @property
    def counts(self) -> list[int]:
        return [cuts[-1] for cuts in self.cuts]


@dataclass(frozen=True, slots=True)
class Asked:
    batch: int
    words: tuple[Tensor, ...]  # for each rank: of every bank how many rows of streams of rows, lengths, ids
    weights: tuple[Tensor, ...] | None  # for each rank, of the ids of features
    lengths_FB: Tensor
    distinct: Distinct


class Requests:
    """How the features of a batch become messages; all that does not depend on the batch is found once."""

    def __init__(self, bags: EmbeddingBags, layout: Layout, orders: Sequence[Order], rank: int) -> None:
        self._bags, self._orders, self._num_ranks = bags, orders, len(layout.banks)
        number_of = {table.name: number for number, table in enumerate(bags.tables)}
        self._table_of = [number_of[feature.table] for feature in bags.features]
        self.alone_tables = sorted(layout.by_row)
        self._alone = [at for at, table in enumerate(self._table_of) if table in layout.by_row]
        self._pooled = [at for at, table in enumerate(self._table_of) if table not in layout.by_row]
        self._bands = layout.bands
        most = max((len(layout.bands[self._table_of[at]]) for at in self._pooled), default=2)
        self._starts = [
            [*cuts, *[cuts[-1]] * (most - len(cuts))]
            for cuts in (layout.bands[self._table_of[at]] for at in self._pooled)
        ]
        narrow = all(b - a < NARROW for cuts in layout.bands for a, b in zip(cuts, cuts[1:], strict=False))
        self._word = torch.int32 if narrow else torch.int64
        place = {feature: at for at, feature in enumerate(self._pooled)}
        self._asks: list[tuple[int, Tensor, list[tuple[int, int]]]] = []
        for server, bank in layout.serving(rank):
            stretches = [
                bank.pieces[stream.piece].band * len(place) + place[stream.feature]
                for stream in bank.pooled
                if stream.feature is not None
            ]
            rows = [(bank.pieces[stream.piece].table, bank.pieces[stream.piece].band) for stream in bank.alone]
            alone = [(self.alone_tables.index(table), band) for table, band in rows]
            self._asks.append((server, torch.tensor(stretches, dtype=torch.int64), alone))

    def of(self, features: Jagged) -> Asked:
        features = self._positions(features)
        values, lengths_SB, positions = self._cut(features)
        found, rows_U = self._distinct(features)
        sizes_S = lengths_SB.sum(1)
        begins_S = sizes_S.cumsum(0) - sizes_S
        firsts = list(accumulate(found.counts, initial=len(values)))
        source = torch.cat([values.to(self._word), rows_U.to(self._word)])
        words: list[list[Tensor]] = [[] for _ in range(self._num_ranks)]
        weights: list[list[Tensor]] = [[] for _ in range(self._num_ranks)]
        weighed = None if features.weights is None else self._weights(features)[positions]
        for server, stretches, alone in self._asks:
            begins = [firsts[table] + found.cuts[table][band] for table, band in alone]
            sizes = torch.tensor(
                [found.cuts[table][band + 1] - found.cuts[table][band] for table, band in alone], dtype=torch.int64
            )
            where = torch.cat([begins_S[stretches], torch.tensor(begins, dtype=torch.int64)])
            ids = gathered(source, where, torch.cat([sizes_S[stretches], sizes]))
            lengths = lengths_SB[stretches].flatten()
            words[server] += [sizes.to(self._word), lengths.to(self._word), ids]
            if weighed is not None:
                weights[server].append(gathered(weighed, begins_S[stretches], sizes_S[stretches]))
        empty = torch.empty(0, dtype=self._word)
        return Asked(
            features.batch_size,
            tuple(torch.cat(one) if one else empty for one in words),
            None if weighed is None else tuple(torch.cat(one) if one else weighed[:0] for one in weights),
            features.lengths,
            found,
        )

    def _positions(self, features: Jagged) -> Jagged:
        """Every id checked, and told as a position of its table's order."""
        if all(isinstance(order, ById) for order in self._orders):
            return features
        parts = list(features.values.split(counts(features)))
        for feature, table in enumerate(self._table_of):
            ids, rows = parts[feature], self._bags.tables[table].rows
            outside = ((ids < 0) | (ids >= rows)).nonzero()
            if outside.numel():
                raise IdOutside(feature, int(ids[outside[0, 0]]))
            parts[feature] = self._orders[table].positions(ids).long()
        return Jagged(features.features, torch.cat(parts), features.lengths, features.weights)

    def _cut(self, features: Jagged) -> tuple[Tensor, Tensor, Tensor]:
        """(values, lengths, positions before) of the features that are pooled where their rows are, by band."""
        if not self._pooled:
            none = features.values[:0]
            return none, features.lengths.new_zeros(0, features.batch_size), none
        mine = self._part(features, self._pooled)
        ids = Ids(mine.values, offsets(mine), None, range(len(self._pooled)), [0] * len(self._pooled))
        try:
            values, lengths, positions = bucketized(ids, self._starts)
        except IdOutside as error:
            raise IdOutside(self._pooled[error.feature], error.id) from None
        return values, lengths.flatten(0, 1), positions

    def _weights(self, features: Jagged) -> Tensor:
        found = self._part(features, self._pooled).weights
        assert found is not None
        return found.to(state_dtype_of(self._bags.tables[0]))

    def _part(self, features: Jagged, numbers: Sequence[int]) -> Jagged:
        names = [features.features[at] for at in numbers]
        return features if len(names) == len(features.features) else select(features, names)

    def _distinct(self, features: Jagged) -> tuple[Distinct, Tensor]:
        """How rows come back, and the rows themselves, counted from the beginning of their band."""
        mine = self._part(features, self._alone) if self._alone else select(features, [])
        place = {table: at for at, table in enumerate(self.alone_tables)}
        ids = Ids(
            mine.values,
            offsets(mine) if self._alone else features.lengths.new_zeros(1, dtype=torch.int64),
            mine.weights,
            [place[self._table_of[at]] for at in self._alone],
            [POOLINGS.index(self._bags.features[at].pooling) for at in self._alone],
        )
        if not self._alone:
            return Distinct(ids, ()), mine.values
        try:
            rows_U, each, inverse = distinct(ids, [self._bands[table][-1] for table in self.alone_tables])
        except IdOutside as error:
            raise IdOutside(self._alone[error.feature], error.id) from None
        cuts, shifts = [], []
        for table, rows in zip(self.alone_tables, rows_U.split(each), strict=True):
            bands = torch.tensor(self._bands[table])
            places = torch.searchsorted(rows, bands)
            cuts.append(tuple(places.tolist()))
            shifts.append(bands[:-1].repeat_interleave(places.diff()))
        ids = relative(Ids(inverse, ids.offsets, ids.weights, ids.tables, ids.pooling), each)
        return Distinct(ids, tuple(cuts)), rows_U - torch.cat(shifts)

"""What a rank asks of the others: its ids as positions, each distinct row once where rows travel, cut by bands.

Shape legend: N ids, F features, B samples, S stretches, U distinct rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from shardwright.embeddings.layout import Layout
from shardwright.embeddings.row_order import IdOrder, RowOrder
from shardwright.jagged import Jagged, ids_per_feature, offsets, select
from shardwright.kernels.arguments import POOLINGS, IdOutOfRange, Ids
from shardwright.kernels.dedup import bucketize_ids, gather_segments, unique_rows
from shardwright.kernels.gradient_sums import to_table_positions
from shardwright.layers.embedding import EmbeddingBags
from shardwright.layers.table_weights import torch_state_dtype

MAX_INT32_ROWS = 1 << 31  # rows that 32 bits can number


@dataclass(frozen=True, slots=True)
class DistinctRows:
    """The rows of tables whose rows travel: how each feature's ids are found among those that come back."""

    ids: Ids  # values are places among the distinct rows of the feature's table, by its number among such tables
    boundaries: tuple[tuple[int, ...], ...]  # by such a table: the places where bands begin, and the number of rows

    @property
    def counts(self) -> list[int]:
        return [cuts[-1] for cuts in self.boundaries]


@dataclass(frozen=True, slots=True)
class OutgoingRequest:
    batch_size: int
    message: Tensor  # for every rank and each of its banks: how many rows of streams of rows, lengths, ids
    splits: tuple[int, ...]  # words of each rank
    id_weights: tuple[Tensor, ...] | None  # for each rank, of the ids of features
    lengths_FB: Tensor
    distinct_rows: DistinctRows


class RequestBuilder:
    """How the features of a batch become messages; all that does not depend on the batch is found once."""

    def __init__(self, bags: EmbeddingBags, layout: Layout, orders: Sequence[RowOrder], rank: int) -> None:
        self._bags, self._orders, self._num_ranks = bags, orders, len(layout.table_groups)
        number_of = {table.name: number for number, table in enumerate(bags.tables)}
        self._table_of = [number_of[feature.table] for feature in bags.features]
        self.row_exchange_tables = sorted(layout.row_exchange_tables)
        self._alone = [at for at, table in enumerate(self._table_of) if table in layout.row_exchange_tables]
        self._bands = layout.row_boundaries
        pooled = [at for at, table in enumerate(self._table_of) if table not in layout.row_exchange_tables]
        self._cut_up = [at for at in pooled if len(layout.row_boundaries[self._table_of[at]]) > 2]
        self._whole = [at for at in pooled if at not in self._cut_up]
        most = max((len(layout.row_boundaries[self._table_of[at]]) for at in self._cut_up), default=2)
        self._starts = [
            [*cuts, *[cuts[-1]] * (most - len(cuts))]
            for cuts in (layout.row_boundaries[self._table_of[at]] for at in self._cut_up)
        ]
        narrow = all(
            b - a < MAX_INT32_ROWS for cuts in layout.row_boundaries for a, b in zip(cuts, cuts[1:], strict=False)
        )
        self._word = torch.int32 if narrow else torch.int64
        whole = {feature: at for at, feature in enumerate(self._whole)}
        cut = {feature: at for at, feature in enumerate(self._cut_up)}

        def stretch(feature: int, band: int) -> int:
            """Its place among the features as they are, and behind these the bands of those that are cut."""
            return len(whole) + band * len(cut) + cut[feature] if feature in cut else whole[feature]

        self._asks: list[tuple[int, Tensor, list[tuple[int, int]]]] = []
        for server, bank in layout.request_targets(rank):
            stretches = [
                stretch(stream.feature, bank.shards[stream.shard_index].range_index)
                for stream in bank.pooled
                if stream.feature is not None
            ]
            rows = [
                (bank.shards[stream.shard_index].table, bank.shards[stream.shard_index].range_index)
                for stream in bank.unpooled
            ]
            alone = [(self.row_exchange_tables.index(table), band) for table, band in rows]
            self._asks.append((server, torch.tensor(stretches, dtype=torch.int64), alone))

    def build(self, features: Jagged) -> OutgoingRequest:
        features = self._positions(features)
        values, lengths_SB, weighed = self._cut(features)
        found, rows_U = self._distinct(features)
        sizes_S, batch = lengths_SB.sum(1), features.batch_size
        begins_S = sizes_S.cumsum(0) - sizes_S
        counts = [high - low for cuts in found.boundaries for low, high in pairwise(cuts)]
        source = [values, rows_U, lengths_SB.flatten(), torch.tensor(counts, dtype=torch.int64)]
        _, first_row, first_length, first_count, _ = accumulate(map(len, source), initial=0)
        firsts = list(accumulate(found.counts, initial=first_row))
        places = list(accumulate((len(cuts) - 1 for cuts in found.boundaries), initial=first_count))
        begins, sizes, weights = [], [], [list[Tensor]() for _ in range(self._num_ranks)]
        words = [0] * self._num_ranks
        for server, stretches, alone in self._asks:
            counted = [places[table] + band for table, band in alone]
            begin = [firsts[table] + found.boundaries[table][band] for table, band in alone]
            size = [counts[place - first_count] for place in counted]
            begins += [_whole(counted), first_length + stretches * batch, begins_S[stretches], _whole(begin)]
            sizes += [_whole([1] * len(alone)), torch.full_like(stretches, batch), sizes_S[stretches], _whole(size)]
            words[server] += sum(int(one.sum()) for one in sizes[-4:])
            if weighed is not None:
                weights[server].append(gather_segments(weighed, begins_S[stretches], sizes_S[stretches]))
        flat = torch.cat([part.to(self._word) for part in source])
        return OutgoingRequest(
            batch,
            gather_segments(flat, torch.cat(begins), torch.cat(sizes)) if begins else flat[:0],
            tuple(words),
            None if weighed is None else tuple(torch.cat(one) if one else weighed[:0] for one in weights),
            features.lengths,
            found,
        )

    def _positions(self, features: Jagged) -> Jagged:
        """Every id checked, and told as a position of its table's order."""
        parts = list(features.values.split(ids_per_feature(features)))
        for feature, table in enumerate(self._table_of):
            ids, rows = parts[feature], self._bags.tables[table].rows
            low, high = (int(end) for end in torch.aminmax(ids)) if len(ids) else (0, 0)
            if low < 0 or high >= rows:
                raise IdOutOfRange(feature, int(ids[((ids < 0) | (ids.long() >= rows)).nonzero()[0, 0]]))
            if not isinstance(self._orders[table], IdOrder):
                parts[feature] = self._orders[table].positions(ids).long()
        if all(isinstance(order, IdOrder) for order in self._orders):
            return features
        return Jagged(features.features, torch.cat(parts), features.lengths, features.weights)

    def _cut(self, features: Jagged) -> tuple[Tensor, Tensor, Tensor | None]:
        """(values, lengths, id weights) of the features that are pooled where their rows are: first those whose tables
        are not cut, as they are, then the others, by band."""
        whole = self._part(features, self._whole)
        part = self._part(features, self._cut_up)
        weights = [] if features.weights is None else [whole.weights, part.weights]
        values, lengths = [whole.values], [whole.lengths]
        if self._cut_up:
            ids = Ids(part.values, offsets(part), None, range(len(self._cut_up)), [0] * len(self._cut_up))
            cut, lengths_PFB, positions = bucketize_ids(ids, self._starts)
            values.append(cut)
            lengths.append(lengths_PFB.flatten(0, 1).to(whole.lengths.dtype))
            weights = [whole.weights, part.weights[positions]] if part.weights is not None else []
        found = [one for one in weights if one is not None]
        weighed = torch.cat(found).to(torch_state_dtype(self._bags.tables[0])) if found else None
        return torch.cat(values), torch.cat(lengths), weighed

    def _part(self, features: Jagged, numbers: Sequence[int]) -> Jagged:
        names = [features.features[at] for at in numbers]
        if len(names) == len(features.features):
            return features
        if names:
            return select(features, names)
        weights = None if features.weights is None else features.weights[:0]
        return Jagged((), features.values[:0], features.lengths[:0], weights)

    def _distinct(self, features: Jagged) -> tuple[DistinctRows, Tensor]:
        """How rows come back, and the rows themselves, counted from the beginning of their band."""
        mine = self._part(features, self._alone)
        place = {table: at for at, table in enumerate(self.row_exchange_tables)}
        ids = Ids(
            mine.values,
            offsets(mine),
            mine.weights,
            [place[self._table_of[at]] for at in self._alone],
            [POOLINGS.index(self._bags.features[at].pooling) for at in self._alone],
        )
        if not self._alone:
            return DistinctRows(ids, ()), mine.values
        rows_U, each, inverse = unique_rows(ids, [self._bands[table][-1] for table in self.row_exchange_tables])
        cuts, shifts = [], []
        for table, rows in zip(self.row_exchange_tables, rows_U.split(each), strict=True):
            bands = torch.tensor(self._bands[table])
            places = torch.searchsorted(rows, bands)
            cuts.append(tuple(places.tolist()))
            shifts.append(bands[:-1].repeat_interleave(places.diff()))
        ids = to_table_positions(Ids(inverse, ids.offsets, ids.weights, ids.tables, ids.pooling), each)
        return DistinctRows(ids, tuple(cuts)), rows_U - torch.cat(shifts)


def _whole(numbers: Sequence[int]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64)

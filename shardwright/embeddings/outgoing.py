"""Build the messages with which a rank requests pooled vectors and deduplicated rows.

Phases, without communication: map ids to positions in the table's row order, deduplicate rows of row-exchange tables,
split pooled features by row range, gather the segments of every table group into one message per rank.

A segment is the ids of one feature in one row range. Positions are relative to the first row of their range.

Shape legend: N ids, F features, B samples, S segments, U distinct rows, P row ranges.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from shardwright.embeddings.layout import Layout
from shardwright.embeddings.row_order import IdOrder, RowOrder
from shardwright.jagged import Jagged, ids_per_feature, offsets, select
from shardwright.kernels.arguments import POOLINGS, IdOutOfRange, Ids
from shardwright.kernels.dedup import bucketize_ids, gather_segments, unique_rows
from shardwright.kernels.gradient_sums import to_global_positions, to_table_positions
from shardwright.layers.embedding import EmbeddingTables
from shardwright.layers.table_weights import torch_state_dtype

MAX_INT32_ROWS = 1 << 31  # rows that 32 bits can number


@dataclass(frozen=True, slots=True)
class DistinctRows:
    """The distinct rows that a batch reads of each row-exchange table, and which of them each id reads."""

    ids: Ids  # values index the distinct rows of the feature's table; tables: the row-exchange tables, in order
    boundaries: tuple[
        tuple[int, ...], ...
    ]  # by row-exchange table: where each row range begins among its distinct rows, then their number
    rows_U: Tensor  # of all row-exchange tables, in order: positions in the table

    @property
    def counts(self) -> list[int]:
        return [bounds[-1] for bounds in self.boundaries]

    def by_table(self) -> tuple[Tensor, ...]:
        return self.rows_U.split(self.counts)

    def uses_by_table(self) -> tuple[Tensor, ...]:
        """How often the batch has each row."""
        positions = to_global_positions(self.ids, self.counts).values
        return torch.bincount(positions, minlength=len(self.rows_U)).split(self.counts)


@dataclass(frozen=True, slots=True)
class OutgoingRequest:
    """The requests of one batch to all ranks, and what is needed to assemble their responses."""

    batch_size: int
    message: Tensor  # for every rank and each of its groups: row counts of unpooled streams, lengths, row positions
    splits: tuple[int, ...]  # words of `message` for each rank
    id_weights: tuple[Tensor, ...] | None  # for each rank: weights of the ids of pooled streams
    lengths_FB: Tensor
    distinct_rows: DistinctRows


class RequestBuilder:
    """Builds the requests of every batch; values that do not depend on the batch are computed once."""

    def __init__(self, bags: EmbeddingTables, layout: Layout, orders: Sequence[RowOrder], rank: int) -> None:
        self._bags, self._orders, self._num_ranks = bags, orders, len(layout.table_groups)
        table_index = {table.name: index for index, table in enumerate(bags.tables)}
        self._table_of = [table_index[feature.table] for feature in bags.features]
        self.row_exchange_tables = sorted(layout.row_exchange_tables)
        self._row_exchange = [i for i, table in enumerate(self._table_of) if table in layout.row_exchange_tables]
        self._bounds = layout.row_boundaries
        pooled = [i for i, table in enumerate(self._table_of) if table not in layout.row_exchange_tables]
        self._split = [i for i in pooled if len(layout.row_boundaries[self._table_of[i]]) > 2]
        self._unsplit = [i for i in pooled if i not in self._split]
        longest = max((len(layout.row_boundaries[self._table_of[i]]) for i in self._split), default=2)
        self._padded_bounds = [
            [*bounds, *[bounds[-1]] * (longest - len(bounds))]
            for bounds in (layout.row_boundaries[self._table_of[i]] for i in self._split)
        ]
        fits_int32 = all(
            b - a < MAX_INT32_ROWS for bounds in layout.row_boundaries for a, b in zip(bounds, bounds[1:], strict=False)
        )
        self._grows = [bags.tables[table].growth is not None for table in self._table_of]  # by feature
        self._split_grows = torch.tensor([self._grows[feature] for feature in self._split])
        self._word_dtype = torch.int32 if fits_int32 and not any(self._grows) else torch.int64
        unsplit = {feature: i for i, feature in enumerate(self._unsplit)}
        split = {feature: i for i, feature in enumerate(self._split)}

        def segment(feature: int, range_index: int) -> int:
            """Index of a segment: first the features that are not split, then all split features of each range."""
            return len(unsplit) + range_index * len(split) + split[feature] if feature in split else unsplit[feature]

        # For each table group: its rank, the segments (S,) of its pooled streams, (table, range) of its unpooled ones.
        self._targets: list[tuple[int, Tensor, list[tuple[int, int]]]] = []
        for server, group in layout.request_targets(rank):
            segments = [
                segment(stream.feature, group.shards[stream.shard_index].range_index)
                for stream in group.pooled
                if stream.feature is not None
            ]
            ranges = [
                (group.shards[stream.shard_index].table, group.shards[stream.shard_index].range_index)
                for stream in group.unpooled
            ]
            unpooled = [(self.row_exchange_tables.index(table), index) for table, index in ranges]
            self._targets.append((server, torch.tensor(segments, dtype=torch.int64), unpooled))

    def build(self, features: Jagged) -> OutgoingRequest:
        """The messages of one batch; raises IdOutOfRange for an id outside its table."""
        sent, features = features, self._to_positions(features)
        values, lengths_SB, id_weights = self._split_by_range(features, sent)
        distinct, rows_U = self._deduplicate(features)
        sizes_S, batch = lengths_SB.sum(1), features.batch_size
        begins_S = sizes_S.cumsum(0) - sizes_S
        counts = [high - low for bounds in distinct.boundaries for low, high in pairwise(bounds)]
        source = [values, rows_U, lengths_SB.flatten(), torch.tensor(counts, dtype=torch.int64)]
        _, first_row, first_length, first_count, _ = accumulate(map(len, source), initial=0)
        first_rows = list(accumulate(distinct.counts, initial=first_row))
        first_counts = list(accumulate((len(bounds) - 1 for bounds in distinct.boundaries), initial=first_count))
        begins, sizes, weights = [], [], [list[Tensor]() for _ in range(self._num_ranks)]
        words = [0] * self._num_ranks
        for server, segments, unpooled in self._targets:
            count_begin = [first_counts[table] + index for table, index in unpooled]
            row_begin = [first_rows[table] + distinct.boundaries[table][index] for table, index in unpooled]
            rows = [counts[begin - first_count] for begin in count_begin]
            begins += [_int64(count_begin), first_length + segments * batch, begins_S[segments], _int64(row_begin)]
            sizes += [_int64([1] * len(unpooled)), torch.full_like(segments, batch), sizes_S[segments], _int64(rows)]
            words[server] += sum(int(size.sum()) for size in sizes[-4:])
            if id_weights is not None:
                weights[server].append(gather_segments(id_weights, begins_S[segments], sizes_S[segments]))
        flat = torch.cat([part.to(self._word_dtype) for part in source])
        return OutgoingRequest(
            batch,
            gather_segments(flat, torch.cat(begins), torch.cat(sizes)) if begins else flat[:0],
            tuple(words),
            None if id_weights is None else tuple(torch.cat(parts) if parts else id_weights[:0] for parts in weights),
            features.lengths,
            distinct,
        )

    def _to_positions(self, features: Jagged) -> Jagged:
        """Check every id and map it to its position in the row order of its table."""
        parts = list(features.values.split(ids_per_feature(features)))
        for feature, table in enumerate(self._table_of):
            ids, rows = parts[feature], self._bags.tables[table].rows
            if self._grows[feature]:
                parts[feature] = self._orders[table].positions(ids)
                continue
            low, high = (int(end) for end in torch.aminmax(ids)) if len(ids) else (0, 0)
            if low < 0 or high >= rows:
                raise IdOutOfRange(feature, int(ids[((ids < 0) | (ids.long() >= rows)).nonzero()[0, 0]]))
            if not isinstance(self._orders[table], IdOrder):
                parts[feature] = self._orders[table].positions(ids).long()
        if all(isinstance(order, IdOrder) for order in self._orders):
            return features
        return Jagged(features.features, torch.cat(parts), features.lengths, features.weights)

    def _split_by_range(self, features: Jagged, sent: Jagged) -> tuple[Tensor, Tensor, Tensor | None]:
        """(values, lengths (S, B), id weights) of the segments of all pooled features without row exchange.
        First the features of tables with one row range, unchanged, then the others, by row range. Of tables that grow,
        the ids are sent (`sent`), else their positions in a row range."""
        unsplit = self._select(features, self._unsplit)
        if any(self._grows[feature] for feature in self._unsplit):
            parts = [
                self._select(each, self._unsplit).values.split(ids_per_feature(unsplit)) for each in (features, sent)
            ]
            chosen = [(parts[1] if self._grows[f] else parts[0])[i].long() for i, f in enumerate(self._unsplit)]
            unsplit = replace(unsplit, values=torch.cat(chosen))
        split = self._select(features, self._split)
        weights = [] if features.weights is None else [unsplit.weights, split.weights]
        values, lengths = [unsplit.values], [unsplit.lengths]
        if self._split:
            ids = Ids(split.values, offsets(split), None, range(len(self._split)), [0] * len(self._split))
            split_values, lengths_PFB, positions = bucketize_ids(ids, self._padded_bounds)
            if self._split_grows.any():
                counts_PF = lengths_PFB.sum(2)
                grows = self._split_grows.repeat(len(counts_PF)).repeat_interleave(counts_PF.flatten())
                split_ids = self._select(sent, self._split).values.long()[positions]
                split_values = torch.where(grows, split_ids, split_values.long())
            values.append(split_values)
            lengths.append(lengths_PFB.flatten(0, 1).to(unsplit.lengths.dtype))
            weights = [unsplit.weights, split.weights[positions]] if split.weights is not None else []
        parts = [part for part in weights if part is not None]
        id_weights = torch.cat(parts).to(torch_state_dtype(self._bags.tables[0])) if parts else None
        return torch.cat(values), torch.cat(lengths), id_weights

    def _select(self, features: Jagged, indices: Sequence[int]) -> Jagged:
        names = [features.features[index] for index in indices]
        if len(names) == len(features.features):
            return features
        if names:
            return select(features, names)
        weights = None if features.weights is None else features.weights[:0]
        return Jagged((), features.values[:0], features.lengths[:0], weights)

    def _deduplicate(self, features: Jagged) -> tuple[DistinctRows, Tensor]:
        """The distinct rows of row-exchange tables, and their positions (U,) in their row ranges."""
        selected = self._select(features, self._row_exchange)
        exchange_index = {table: index for index, table in enumerate(self.row_exchange_tables)}
        ids = Ids(
            selected.values,
            offsets(selected),
            selected.weights,
            [exchange_index[self._table_of[i]] for i in self._row_exchange],
            [POOLINGS.index(self._bags.features[i].pooling) for i in self._row_exchange],
        )
        if not self._row_exchange:
            return DistinctRows(ids, (), selected.values), selected.values
        rows_U, counts, inverse = unique_rows(ids, [self._bounds[table][-1] for table in self.row_exchange_tables])
        boundaries, shifts = [], []
        for table, rows in zip(self.row_exchange_tables, rows_U.split(counts), strict=True):
            bounds = torch.tensor(self._bounds[table])
            indices = torch.searchsorted(rows, bounds)
            boundaries.append(tuple(indices.tolist()))
            shifts.append(bounds[:-1].repeat_interleave(indices.diff()))
        ids = to_table_positions(Ids(inverse, ids.offsets, ids.weights, ids.tables, ids.pooling), counts)
        return DistinctRows(ids, tuple(boundaries), rows_U), rows_U - torch.cat(shifts)


def _int64(numbers: Sequence[int]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64)

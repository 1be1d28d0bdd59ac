"""Find the features that a step used on any rank, and remove the ids of unused features from the update.

A feature is used if its gradient is nonzero anywhere on some rank. Every rank sends its flags with its gradients, so no
extra message is needed. Only if some feature is unused, ranks also exchange masks of the rows that used features read:
for tables with deduplicated row exchange that several features read, and for tables summed over replicas.

Shape legend: R ranks, W words of flags, N ids of a stream.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from shardwright.comm import collective
from shardwright.comm.mesh import Group
from shardwright.comm.pending import Pending
from shardwright.embeddings.layout import Layout
from shardwright.embeddings.local_shards import LocalShards
from shardwright.embeddings.outgoing import OutgoingRequest
from shardwright.embeddings.update import ReceivedGradients
from shardwright.jagged import Vectors, features_with_gradient
from shardwright.kernels.arguments import Ids
from shardwright.kernels.dedup import restrict_ids
from shardwright.kernels.gradient_sums import GradientSums, to_global_positions
from shardwright.layers.embedding import EmbeddingBags

FLAGS_OF_WORD = 8
Lookup = tuple[
    OutgoingRequest, Sequence[Sequence[Sequence[int]]]
]  # a request, and `Wanted.alone` of each bank of this rank


class UsedFeatures:
    """Finds the used features of a step and restricts its update to them."""

    def __init__(self, bags: EmbeddingBags, layout: Layout, local_shards: Sequence[LocalShards], group: Group) -> None:
        number_of = {table.name: number for number, table in enumerate(bags.tables)}
        self._features = bags.features
        self._frozen = [not bags.holder(feature.table).is_trained for feature in bags.features]
        self._table_of = [number_of[feature.table] for feature in bags.features]
        self._exchanged = sorted(layout.row_exchange_tables)  # tables whose distinct rows are exchanged
        self._layout, self._holdings, self._group = layout, local_shards, group

    @property
    def num_words(self) -> int:
        """Length of the flags of all features in a message: eight per number, which every codec keeps exactly."""
        return -(-len(self._features) // FLAGS_OF_WORD)

    def flags(self, gradients: Vectors) -> Tensor:
        """(W,) numbers with a bit set for each feature that this rank's loss used, and for features of frozen tables,
        which have no update."""
        used = features_with_gradient(gradients)
        words = [0] * self.num_words
        for at, (feature, frozen) in enumerate(zip(self._features, self._frozen, strict=True)):
            words[at // FLAGS_OF_WORD] |= (feature.name in used or frozen) << at % FLAGS_OF_WORD
        return torch.tensor(words, dtype=gradients.pooled_BD.dtype)

    def used_by_any(self, words_RW: Tensor) -> tuple[bool, ...]:
        """Whether some rank used each feature, from the words of all ranks."""
        words = [0] * self.num_words
        for row in words_RW.long().tolist():
            words = [word | more for word, more in zip(words, row, strict=True)]
        bits = (word >> at & 1 for word in words for at in range(FLAGS_OF_WORD))
        return tuple(bool(bit) for bit, _ in zip(bits, self._features, strict=False))

    def restrict(
        self, lookups: Sequence[Lookup], ids_by_group: Sequence[Ids], received: ReceivedGradients
    ) -> tuple[list[Ids], ReceivedGradients]:
        """Remove the ids and gradients of unused features from each bank. All ranks call it in the same order.

        Phases: masks of the rows that used features read, one all-to-all per micro-batch; masks of the rows of tables
        that are summed over replicas, one all-reduce per bank.
        """
        used = received.used_features
        tables = {table for table, flag in zip(self._table_of, used, strict=True) if flag}
        partly = {table for table, flag in zip(self._table_of, used, strict=True) if not flag} & tables
        partly = partly.intersection(self._exchanged)
        masks: dict[tuple[int, int], list[Tensor]] = {}
        for asked, counts in lookups if partly else ():
            for place, mask in self._named_rows(asked, counts, used, partly):
                masks.setdefault(place, []).append(mask)
        restricted, gradients = [], {}
        for at, (holding, ids) in enumerate(zip(self._holdings, ids_by_group, strict=True)):
            keep: list[bool | Tensor] = []
            for number, stream in enumerate(holding.table_group.streams):
                table = holding.table_group.shards[stream.shard_index].table
                if stream.feature is not None:
                    keep.append(used[stream.feature])
                else:
                    keep.append(torch.cat(masks[at, number]) if table in partly else table in tables)
            ids, gradients[at] = restrict_ids(ids, received.gradients[at], keep)
            restricted.append(ids)
        summed = {at: self._still_named(at, sums.wait(), restricted[at]) for at, sums in received.replica_sums.items()}
        return restricted, replace(received, gradients=gradients, replica_sums=summed)

    def _named_rows(
        self, asked: OutgoingRequest, counts: Sequence[Sequence[Sequence[int]]], used: Sequence[bool], partly: set[int]
    ) -> Iterator[tuple[tuple[int, int], Tensor]]:
        """((bank, stream), (N,) mask) of the rows that used features of all clients read."""
        readers = [used[at] for at, table in enumerate(self._table_of) if table in self._exchanged]
        ids = asked.distinct_rows.ids
        named = [torch.zeros(count, dtype=torch.uint8) for count in asked.distinct_rows.counts]
        for (values, _, _), table, flag in zip(ids.split_by_feature(), ids.tables, readers, strict=True):
            if flag:
                named[table][values.long()] = 1
        sent: list[list[Tensor]] = [[] for _ in self._layout.table_groups]
        for server, bank in self._layout.request_targets(self._group.index):
            for stream in bank.unpooled:
                piece = bank.shards[stream.shard_index]
                if piece.table in partly:
                    table = self._exchanged.index(piece.table)
                    start, end = list(pairwise(asked.distinct_rows.boundaries[table]))[piece.range_index]
                    sent[server].append(named[table][start:end])
        streams = [
            (at, number, client, count)
            for at, (holding, each) in enumerate(zip(self._holdings, counts, strict=True))
            for number, (stream, by_client) in enumerate(
                zip(holding.table_group.unpooled, each, strict=True), start=len(holding.table_group.pooled)
            )
            if holding.table_group.shards[stream.shard_index].table in partly
            for client, count in zip(holding.table_group.clients, by_client, strict=True)
        ]
        received = [sum(count for _, _, client, count in streams if client == rank) for rank in range(len(sent))]
        flat = torch.cat([torch.empty(0, dtype=torch.uint8), *(mask for one in sent for mask in one)])
        sizes = [sum(map(len, one)) for one in sent]
        rest = list(collective.all_to_all(flat, sizes, received, self._group).wait().split(received))
        masks: dict[tuple[int, int], list[Tensor]] = {}
        for at, number, client, count in streams:
            mask, rest[client] = rest[client].tensor_split([count])
            masks.setdefault((at, number), []).append(mask.bool())
        for place, parts in masks.items():
            yield place, torch.cat(parts)

    def _still_named(self, at: int, sums: GradientSums, ids: Ids) -> Pending[GradientSums]:
        """Keep the sums of rows that a used feature read on some rank."""
        rows = [len(weight) for weight in self._holdings[at].weights]
        marks = torch.zeros(sum(rows))
        marks[to_global_positions(ids, rows).values] = 1

        def restricted(marks: Tensor) -> GradientSums:
            by_table = zip(marks.split(rows), sums.rows_U.split(sums.counts), strict=True)
            keep = [part[rows_U] > 0 for part, rows_U in by_table]
            return GradientSums(
                sums.rows_U[torch.cat(keep)],
                [int(mask.sum()) for mask in keep],
                [part[mask] for part, mask in zip(sums.sums, keep, strict=True)],
            )

        return collective.all_reduce(marks, self._group).then(restricted)

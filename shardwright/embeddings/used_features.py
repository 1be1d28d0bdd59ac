"""Find the features that a step used on any rank, and remove the ids of the others from its update.

A feature is used if its gradient is nonzero anywhere on some rank. Every rank sends its flags with its gradients, so no
extra message is needed. Only if some feature is unused, ranks also exchange masks of the rows that used features read:
for row-exchange tables that several features read, and for tables whose gradients are summed over replicas.

Shape legend: R ranks, W words of flags, N ids of a stream, U distinct rows.
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
from shardwright.layers.embedding import EmbeddingTables

FLAGS_OF_WORD = 8
# A request, and `IncomingRequest.unpooled_counts` of each table group of this rank.
Lookup = tuple[OutgoingRequest, Sequence[Sequence[Sequence[int]]]]


class UsedFeatures:
    """Finds the used features of a step and restricts its update to them."""

    def __init__(
        self, bags: EmbeddingTables, layout: Layout, local_shards: Sequence[LocalShards], group: Group
    ) -> None:
        table_index = {table.name: index for index, table in enumerate(bags.tables)}
        self._features = bags.features
        self._frozen = [not bags.holder(feature.table).is_trained for feature in bags.features]
        self._table_of = [table_index[feature.table] for feature in bags.features]
        self._exchanged = sorted(layout.row_exchange_tables)
        self._layout, self._shards, self._group = layout, local_shards, group

    @property
    def num_words(self) -> int:
        """Numbers in a message for the flags of all features: eight each, exact in Plain, Fp16 and Bf16."""
        return -(-len(self._features) // FLAGS_OF_WORD)

    def flags(self, gradients: Vectors) -> Tensor:
        """(W,) numbers with a bit set for each feature that this rank's loss used.
        The bits of features of frozen tables, which have no update, are always set."""
        used = features_with_gradient(gradients)
        words = [0] * self.num_words
        for index, (feature, frozen) in enumerate(zip(self._features, self._frozen, strict=True)):
            words[index // FLAGS_OF_WORD] |= (feature.name in used or frozen) << index % FLAGS_OF_WORD
        return gradients.pooled_BD.new_tensor(words)

    def used_by_any(self, words_RW: Tensor) -> tuple[bool, ...]:
        """Whether some rank used each feature, from the words of all ranks."""
        words = [0] * self.num_words
        for row in words_RW.long().tolist():
            words = [word | rank_word for word, rank_word in zip(words, row, strict=True)]
        bits = (word >> bit & 1 for word in words for bit in range(FLAGS_OF_WORD))
        return tuple(bool(flag) for flag, _ in zip(bits, self._features, strict=False))

    def restrict(
        self, lookups: Sequence[Lookup], ids_by_group: Sequence[Ids], received: ReceivedGradients
    ) -> tuple[list[Ids], ReceivedGradients]:
        """Remove the ids and gradients of unused features from each table group.

        All ranks must call it in the same order. Phases, over all ranks: masks of the rows that used features read, one
        all-to-all per micro-batch; masks of the rows of tables that are summed over replicas, one all-reduce each.
        """
        used = received.used_features
        tables = {table for table, flag in zip(self._table_of, used, strict=True) if flag}
        partly_used = {table for table, flag in zip(self._table_of, used, strict=True) if not flag} & tables
        partly_used = partly_used.intersection(self._exchanged)
        masks: dict[tuple[int, int], list[Tensor]] = {}
        for outgoing, counts in lookups if partly_used else ():
            for key, mask in self._exchange_masks(outgoing, counts, used, partly_used):
                masks.setdefault(key, []).append(mask)
        restricted, gradients = [], {}
        for index, (shards, ids) in enumerate(zip(self._shards, ids_by_group, strict=True)):
            if shards.table_group.bounded:  # all rows of a batch are updated
                restricted.append(ids)
                gradients[index] = received.gradients[index]
                continue
            keep: list[bool | Tensor] = []
            for number, stream in enumerate(shards.table_group.streams):
                table = shards.table_group.shards[stream.shard_index].table
                if stream.feature is not None:
                    keep.append(used[stream.feature])
                else:
                    keep.append(torch.cat(masks[index, number]) if table in partly_used else table in tables)
            ids, gradients[index] = restrict_ids(ids, received.gradients[index], keep)
            restricted.append(ids)
        sums = {i: self._restrict_sums(i, sums.wait(), restricted[i]) for i, sums in received.replica_sums.items()}
        return restricted, replace(received, gradients=gradients, replica_sums=sums)

    def used_rows(self, outgoing: OutgoingRequest, used: Sequence[bool]) -> list[Tensor]:
        """By table whose rows are exchanged, (U,) mask of the distinct rows that used features of this rank read."""
        reader_is_used = [used[i] for i, table in enumerate(self._table_of) if table in self._exchanged]
        ids = outgoing.distinct_rows.ids
        is_read = [torch.zeros(count, dtype=torch.uint8) for count in outgoing.distinct_rows.counts]
        for (values, _, _), table, flag in zip(ids.split_by_feature(), ids.tables, reader_is_used, strict=True):
            if flag:
                is_read[table][values.long()] = 1
        return is_read

    def _exchange_masks(
        self,
        outgoing: OutgoingRequest,
        counts: Sequence[Sequence[Sequence[int]]],
        used: Sequence[bool],
        partly_used: set[int],
    ) -> Iterator[tuple[tuple[int, int], Tensor]]:
        """((index of table group, stream), (N,) mask) of the rows that used features of all clients read."""
        is_read = self.used_rows(outgoing, used)
        messages: list[list[Tensor]] = [[] for _ in self._layout.table_groups]
        for server, group in self._layout.request_targets(self._group.index):
            for stream in group.unpooled:
                shard = group.shards[stream.shard_index]
                if shard.table in partly_used:
                    table = self._exchanged.index(shard.table)
                    start, end = list(pairwise(outgoing.distinct_rows.boundaries[table]))[shard.range_index]
                    messages[server].append(is_read[table][start:end])
        streams = [
            (index, number, client, count)
            for index, (shards, group_counts) in enumerate(zip(self._shards, counts, strict=True))
            for number, (stream, by_client) in enumerate(
                zip(shards.table_group.unpooled, group_counts, strict=True), start=len(shards.table_group.pooled)
            )
            if shards.table_group.shards[stream.shard_index].table in partly_used
            for client, count in zip(shards.table_group.clients, by_client, strict=True)
        ]
        expected = [sum(count for _, _, client, count in streams if client == rank) for rank in range(len(messages))]
        flat = torch.cat([torch.empty(0, dtype=torch.uint8), *(mask for message in messages for mask in message)])
        sent_sizes = [sum(map(len, message)) for message in messages]
        rest = list(collective.all_to_all(flat, sent_sizes, expected, self._group).wait().split(expected))
        masks: dict[tuple[int, int], list[Tensor]] = {}
        for index, number, client, count in streams:
            mask, rest[client] = rest[client].tensor_split([count])
            masks.setdefault((index, number), []).append(mask.bool())
        for key, parts in masks.items():
            yield key, torch.cat(parts)

    def _restrict_sums(self, index: int, sums: GradientSums, ids: Ids) -> Pending[GradientSums]:
        """Keep the sums of the rows of a table group that a used feature read on some rank; one all-reduce."""
        rows = [len(weight) for weight in self._shards[index].weights]
        marks = torch.zeros(sum(rows), device=self._group.device)
        marks[to_global_positions(ids, rows).values] = 1

        def select_rows(marks: Tensor) -> GradientSums:
            by_table = zip(marks.split(rows), sums.rows_U.split(sums.counts), strict=True)
            keep = [part[rows_U] > 0 for part, rows_U in by_table]
            return GradientSums(
                sums.rows_U[torch.cat(keep)],
                [int(mask.sum()) for mask in keep],
                [part[mask] for part, mask in zip(sums.sums, keep, strict=True)],
            )

        return collective.all_reduce(marks, self._group).then(select_rows)

"""How ids reach the rows they name and vectors come back: the seam of EmbeddingBags, filled.

Phases, each a stage of the step:
    request     ids as positions; distinct rows where rows travel; cut by bands
    lengths     to every rank how much it will get
    ids         to every rank the lengths and ids of its banks, in one message
    lookup      each bank in one call, over the samples of all its clients
    meet        parts of vectors inside each host, where rows of a table are over its ranks
    vectors     pooled vectors, or parts of them, and distinct rows, to the ranks of their samples; there put together
    gradients   the same way back
    spread      gradients of vectors whose parts have met, to all that had a part
    update      each bank in one call (update.py: after replicas and column pieces have met)

Shape legend: N ids, F features, B samples of this rank, R ranks.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shardwright.comm import collective
from shardwright.comm.codec import Codec, Plain
from shardwright.comm.mesh import Group
from shardwright.comm.pending import Pending
from shardwright.embeddings.host_reduce import HostReducer
from shardwright.embeddings.incoming import IncomingRequest, incoming_requests
from shardwright.embeddings.layout import Layout, TableGroup, TableShard
from shardwright.embeddings.local_shards import LocalShards
from shardwright.embeddings.outgoing import OutgoingRequest, RequestBuilder
from shardwright.embeddings.responses import ResponseAssembly
from shardwright.embeddings.row_order import IdOrder, RowOrder
from shardwright.embeddings.update import OptimizerStep, ReceivedGradients, TableUpdater
from shardwright.embeddings.used_features import UsedFeatures
from shardwright.embeddings.vector_transport import VectorTransport
from shardwright.errors import UserError
from shardwright.jagged import Jagged, Vectors
from shardwright.kernels.arguments import concat_with_decay
from shardwright.kernels.dedup import concat_ids
from shardwright.kernels.gradient_sums import GradientSums
from shardwright.layers.embedding import EmbeddingBags
from shardwright.rectangle import IndexRange
from shardwright.spec.optimizer import SparseOptimizer

# Samples, words of the message, weight of the samples, most numbers of rows with gradients in replicas, ids with and
# without weights, the stop signal of this rank (0: none).
HEADER_SIZE = 7
NO_BATCH = -1.0  # in the place of the samples


@dataclass(frozen=True, slots=True)
class AnnouncedRequest:
    """What this rank is about to ask, and what it tells every rank of it, or every rank told it."""

    outgoing: OutgoingRequest
    headers_R: Tensor  # (R, HEADER)

    @property
    def stop_signal(self) -> int:
        """The stop signal that some rank received, the same on all ranks: they stop after this batch; 0: none."""
        return int(self.headers_R[:, 6].max())


@dataclass(frozen=True, slots=True)
class RoutedBatch:
    outgoing: OutgoingRequest
    batch_sizes: tuple[int, ...]  # samples of each rank
    incoming: tuple[IncomingRequest, ...]  # by bank of this rank
    share: float  # of this rank's samples in all, by weight
    total_weight: float  # of all samples
    max_replica_values: (
        float  # at most so many make up the rows with gradients of all replicas that serve one rank each
    )
    micro_batches: tuple["RoutedBatch", ...] = ()  # with gradient accumulation: one per micro-batch

    @property
    def lookups(self) -> tuple["RoutedBatch", ...]:
        return self.micro_batches or (self,)


@dataclass(frozen=True, slots=True)
class LookupResult:
    routed: RoutedBatch
    vectors: tuple[list[Tensor], ...]  # by bank
    host_sums: Tensor | None = None  # sums of parts, where they meet


@dataclass(frozen=True, slots=True)
class Lanes:
    """The groups that messages go by, and how vectors and gradients are rounded on their way."""

    ids: Group
    wire: Group
    vector_codec: Codec = Plain()
    gradient_codec: Codec = Plain()


class ShardedTables:
    """The tables of one EmbeddingBags over the ranks of a mesh."""

    def __init__(
        self, bags: EmbeddingBags, layout: Layout, orders: Sequence[RowOrder], lanes: Lanes, device: torch.device
    ) -> None:
        self.bags, self.layout, self.lanes, self.orders = bags, layout, lanes, orders
        self.rank = lanes.wire.index
        self.table_groups = layout.table_groups[self.rank]
        self.local_shards = [LocalShards(bank, bags, orders, device) for bank in self.table_groups]
        self._requests = RequestBuilder(bags, layout, orders, self.rank)
        self._answers = ResponseAssembly(bags, layout, self.rank)
        self._there = VectorTransport(lanes.wire, lanes.vector_codec, self._answers.dtype)
        self._back = VectorTransport(lanes.wire, lanes.gradient_codec, self._answers.dtype)
        self._meetings = HostReducer(layout, self._there, self._back)
        self._updates = TableUpdater(layout, self.local_shards, lanes.wire, self._answers.dtype)
        self._used = UsedFeatures(bags, layout, self.local_shards, lanes.wire)
        self._rows: dict[TableShard, Tensor] = {}
        self._own = [at for at, bank in enumerate(self.table_groups) if bank.clients == (self.rank,)]

    def rows_of(self, shard: TableShard) -> IndexRange | Tensor:
        """Which rows of its table a piece of this rank has, a run of them or each by its number."""
        if isinstance(self.orders[shard.table], IdOrder):
            return shard.rows
        if shard not in self._rows:
            small = self.bags.tables[shard.table].rows <= torch.iinfo(torch.int32).max
            rows = self.orders[shard.table].ids(torch.arange(*shard.rows))
            self._rows[shard] = rows.to(torch.int32 if small else torch.int64)
        return self._rows[shard]

    def request(self, features: Jagged, weight: float, stop: int = 0) -> AnnouncedRequest:
        """`share` is the weight of this rank's samples; any unit, the same on every rank."""
        with self.bags.naming_errors():
            asked = self._requests.build(features)
        num, weighted = len(features.values), asked.id_weights is not None
        more = (self._updates.max_replica_values(features), num * weighted, num * (not weighted), stop)
        header_R = torch.tensor(
            [[features.batch_size, size, weight, *more] for size in asked.splits], dtype=torch.float64
        )
        return AnnouncedRequest(asked, header_R)

    def announce(self, request: AnnouncedRequest) -> Pending[AnnouncedRequest]:
        """The same, with the headers of all ranks."""
        told = collective.all_to_all_rows(request.headers_R, self.lanes.ids)
        return told.then(lambda headers_R: AnnouncedRequest(request.outgoing, _alike(headers_R)))

    def announce_end(self) -> Pending[Tensor]:
        """Tell all ranks that this one has no further batch, and hear that they have none."""
        header_R = torch.full((self.lanes.ids.size, HEADER_SIZE), NO_BATCH, dtype=torch.float64)
        return collective.all_to_all_rows(header_R, self.lanes.ids).then(_alike)

    def exchange_ids(self, request: AnnouncedRequest) -> Pending[RoutedBatch]:
        asked, headers_R = request.outgoing, request.headers_R
        sent, received = asked.splits, headers_R[:, 1].long().tolist()
        words = collective.all_to_all(asked.message, sent, received, self.lanes.ids)
        weights, (num_weighted, num_others) = None, headers_R[:, 4:6].sum(0).tolist()
        if num_weighted and num_others:
            raise UserError("ids have weights on some ranks and none on others; give them to all, or to none")
        if num_weighted:
            none = [torch.empty(0, dtype=self._answers.dtype)] * len(sent)
            weights = self._weights_under_way(asked.id_weights or none)
        batches = headers_R[:, 0].long().tolist()
        weight = float(headers_R[:, 2].sum())
        share = float(headers_R[self.rank, 2] / weight) if weight > 0 else 0.0

        def arrived(found: Tensor) -> RoutedBatch:
            weighed = None if weights is None else weights.wait()
            wanted = tuple(incoming_requests(self.table_groups, found.split(received), weighed, batches))
            return RoutedBatch(asked, tuple(batches), wanted, share, weight, float(headers_R[:, 3].sum()))

        return words.then(arrived)

    def route(self, features: Jagged, weight: float) -> RoutedBatch:
        """All that comes before the lookup, waited for."""
        return self.exchange_ids(self.announce(self.request(features, weight)).wait()).wait()

    def _weights_under_way(self, weights: Sequence[Tensor]) -> Pending[tuple[Tensor, ...]]:
        """Id weights in the order of their ids; the lengths of the message say nothing of them."""
        group = self.lanes.ids
        sent = [len(one) for one in weights]
        told = collective.all_to_all_rows(torch.tensor(sent).unsqueeze(1), group).wait().flatten().tolist()
        on_way = collective.all_to_all(torch.cat(list(weights)), sent, told, group)
        return on_way.then(lambda flat: flat.split(told))

    def lookup(self, routed: RoutedBatch) -> LookupResult:
        found = [holding.lookup(wanted.ids) for holding, wanted in zip(self.local_shards, routed.incoming, strict=True)]
        return LookupResult(routed, tuple(found))

    def reduce_in_host(self, result: LookupResult) -> Pending[LookupResult]:
        pooled = {number: one[0] for number, one in enumerate(result.vectors) if one}
        on_way = self._meetings.reduce(pooled, result.routed.batch_sizes)
        return on_way.then(lambda met: replace(result, host_sums=met))

    def exchange_vectors(self, result: LookupResult) -> Pending[Vectors]:
        routed, mine = result.routed, self._meetings.local_reduce
        parts: list[list[Tensor]] = [[] for _ in self.layout.table_groups]
        own = {at: result.vectors[at] for at in self._own}
        for at, bank in enumerate(self.table_groups):
            if at in own or bank.needs_host_reduce:
                continue
            wanted, (pooled, *alone) = routed.incoming[at], result.vectors[at]
            rows = pooled.split(wanted.batch_sizes)
            each = [one.split(counts) for one, counts in zip(alone, wanted.unpooled_counts, strict=True)]
            for place, client in enumerate(bank.clients):
                parts[client] += [rows[place], *(one[place] for one in each)]
        if mine is not None and result.host_sums is not None:
            for client, sums in zip(mine.clients, result.host_sums.split(self._met_by(routed)), strict=True):
                if client == self.rank:
                    own[len(self.table_groups)] = [sums]
                else:
                    parts[client].append(sums)
        on_way = self._there.all_to_all(parts, self._answers.received_sizes(routed.outgoing))
        return on_way.then(lambda flat: self._answers.assemble(routed.outgoing, flat, own))

    def _met_by(self, routed: RoutedBatch) -> list[int]:
        """Samples of each client of this rank's meeting."""
        mine = self._meetings.local_reduce
        return [routed.batch_sizes[client] for client in mine.clients] if mine else []

    def exchange_gradients(self, routed: RoutedBatch, gradients: Vectors) -> Pending[ReceivedGradients]:
        """The gradients of each bank's vectors, from all its clients, and of intra-host sums; for replicas that
        serve only this rank, their sums over all replicas. Each message begins with flags: the features that this
        rank's loss used."""
        parts, own = self._answers.split_gradients(routed.outgoing, gradients, self._used.flags(gradients))
        of_banks = {at: one for at, one in own.items() if at < len(self.table_groups)}
        summed = self._updates.start_replica_sums(
            {at: (routed.incoming[at].ids, one) for at, one in of_banks.items()}, routed.max_replica_values
        )
        received = [self._used.num_words] * len(parts)
        for at, (bank, wanted) in enumerate(zip(self.table_groups, routed.incoming, strict=True)):
            for place, client in enumerate(bank.clients if at not in own and not bank.needs_host_reduce else ()):
                received[client] += wanted.batch_sizes[place] * bank.width
                counts = (one[place] for one in wanted.unpooled_counts)
                received[client] += sum(count * dim for count, dim in zip(counts, _dims(bank), strict=True))
        mine = self._meetings.local_reduce
        for client, samples in zip(mine.clients if mine else (), self._met_by(routed), strict=True):
            received[client] += samples * mine.width if mine and client != self.rank else 0
        on_way = self._back.all_to_all(parts, received)
        return on_way.then(lambda flat: self._arrived(routed, flat.split(received), own, summed))

    def broadcast_in_host(self, routed: RoutedBatch, gradients: ReceivedGradients) -> Pending[ReceivedGradients]:
        """`arrived` with the gradients of banks whose vectors are parts."""
        on_way = self._meetings.broadcast(gradients.host_sum_gradients, routed.batch_sizes)
        return on_way.then(
            lambda found: replace(
                gradients, gradients={**gradients.gradients, **{at: [one] for at, one in found.items()}}
            )
        )

    def _arrived(
        self,
        routed: RoutedBatch,
        by_rank: Sequence[Tensor],
        own: Mapping[int, list[Tensor]],
        summed: Mapping[int, Pending[GradientSums]],
    ) -> ReceivedGradients:
        read = [self._used.num_words] * len(by_rank)
        used = self._used.used_by_any(torch.stack([numbers[: self._used.num_words] for numbers in by_rank]))

        def taken(client: int, rows: int, dim: int) -> Tensor:
            read[client] += rows * dim
            return by_rank[client][read[client] - rows * dim : read[client]].view(rows, dim)

        found: dict[int, list[Tensor]] = {}
        for number, (bank, wanted) in enumerate(zip(self.table_groups, routed.incoming, strict=True)):
            if number in self._own or bank.needs_host_reduce:
                continue
            pooled, alone = [], [[] for _ in bank.unpooled]
            for at, client in enumerate(bank.clients):
                pooled.append(taken(client, wanted.batch_sizes[at], bank.width))
                for parts, counts, dim in zip(alone, wanted.unpooled_counts, _dims(bank), strict=True):
                    parts.append(taken(client, counts[at], dim))
            found[number] = [torch.cat(pooled), *(torch.cat(parts) for parts in alone)]
        mine, met = self._meetings.local_reduce, None
        if mine is not None:
            samples = zip(mine.clients, self._met_by(routed), strict=True)
            met = torch.cat(
                [
                    own[len(self.table_groups)][0] if client == self.rank else taken(client, num, mine.width)
                    for client, num in samples
                ]
            )
        found |= {at: one for at, one in own.items() if at < len(self.table_groups)}
        return ReceivedGradients(found, summed, used, met)

    def concat_micro_batches(
        self, micro_batches: Sequence[tuple[RoutedBatch, ReceivedGradients]], decay: float
    ) -> tuple[RoutedBatch, ReceivedGradients]:
        """What several batches asked of each bank as one batch; gradients of all but the last times `fade`."""
        numbers = [at for at, _ in enumerate(self.table_groups)]
        ids = [concat_ids([routed.incoming[at].ids for routed, _ in micro_batches]) for at in numbers]
        each = [zip(*(arrived.gradients[at] for _, arrived in micro_batches), strict=True) for at in numbers]
        gradients = {at: [concat_with_decay(tensors, decay) for tensors in each[at]] for at in numbers}
        most = sum(routed.max_replica_values for routed, _ in micro_batches)
        summed = self._updates.start_replica_sums({at: (ids[at], gradients[at]) for at in self._own}, most)
        routed = micro_batches[-1][0]
        wanted = tuple(replace(one, ids=ids[at]) for at, one in enumerate(routed.incoming))
        used = tuple(map(any, zip(*(arrived.used_features for _, arrived in micro_batches), strict=True)))
        micro = tuple(routed for routed, _ in micro_batches)
        return replace(routed, incoming=wanted, micro_batches=micro), ReceivedGradients(gradients, summed, used)

    def update(
        self, routed: RoutedBatch, gradients: ReceivedGradients, optimizer: SparseOptimizer, steps: Mapping[str, int]
    ) -> Collection[str]:
        wanted = [wanted.ids for wanted in routed.incoming]
        if not all(gradients.used_features):
            lookups = [(one.outgoing, [wanted.unpooled_counts for wanted in one.incoming]) for one in routed.lookups]
            wanted, gradients = self._used.restrict(lookups, wanted, gradients)
        self._updates.run(wanted, gradients, OptimizerStep(optimizer, steps))
        return {feature.name for feature, used in zip(self.bags.features, gradients.used_features, strict=True) if used}


def _alike(headers_R: Tensor) -> Tensor:
    """The headers, if all ranks have a batch, or none has."""
    ended = headers_R[:, 0] == NO_BATCH
    if ended.any() and not ended.all():
        lists = [", ".join(map(str, one.nonzero().flatten().tolist())) for one in (ended, ~ended)]
        raise UserError(
            f"the batches of ranks [{lists[0]}] have ended, and those of ranks [{lists[1]}] have not: "
            "give every rank as many batches; one without samples is a batch, too"
        )
    return headers_R


def _dims(bank: TableGroup) -> list[int]:
    return [bank.shards[stream.shard_index].dim for stream in bank.unpooled]

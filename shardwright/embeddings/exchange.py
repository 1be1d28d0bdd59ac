"""Exchange ids, vectors and gradients between ranks: the `Exchange` of a sharded EmbeddingBags.

Phases, each a stage of the step; collectives run over all ranks, on the ids lane or the wire lane:
    request     map ids to row positions, deduplicate rows of row-exchange tables, split by row range
    lengths     all-to-all of headers: how much each rank will receive (ids lane)
    ids         all-to-all of lengths and ids, one message per rank for all its table groups (ids lane)
    expect, prefetch    for tables with rows on disk (row_placer.py)
    copies, counts, validate, renew     for tables with bounded staleness (copies/bounded_tables.py)
    copies, fetch   for tables on servers (service/served_tables.py)
    lookup      one call per table group, over the samples of all its clients
    meet        host reduce: add partial sums inside each host where several of its ranks hold rows of a table (wire)
    vectors     all-to-all of pooled vectors, or partial sums of them, and distinct rows; then assemble them (wire)
    gradients   all-to-all of gradients in the opposite direction; all-reduce of some replicas (wire)
    spread      intra-host broadcast: gradients of host sums to every rank that contributed to them (wire)
    update      one call per table group (update.py: after replicas have summed gradients, column shards row sums)

Shape legend: R ranks.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shardwright.comm import collective
from shardwright.comm.codec import Codec, Plain
from shardwright.comm.mesh import Group
from shardwright.comm.pending import Pending, ready
from shardwright.comm.transport.servers import Connector
from shardwright.embeddings.announcement import Announcement, exchange_end_headers, exchange_headers, make_headers
from shardwright.embeddings.cached_shard import Caches
from shardwright.embeddings.copies.bounded_tables import BoundedTables
from shardwright.embeddings.growing_rows import initial_growth
from shardwright.embeddings.host_reduce import HostReducer
from shardwright.embeddings.incoming import incoming_requests
from shardwright.embeddings.layout import Layout, TableShard
from shardwright.embeddings.local_shards import LocalShards, PlacedIds
from shardwright.embeddings.not_copied import NotCopied
from shardwright.embeddings.outgoing import OutgoingRequest, RequestBuilder
from shardwright.embeddings.responses import ResponseAssembly
from shardwright.embeddings.routed_batch import LookupResult, RoutedBatch
from shardwright.embeddings.row_order import RowOrder, rows_in_order
from shardwright.embeddings.row_placer import RowPlacer
from shardwright.embeddings.service.served_tables import ServedTables
from shardwright.embeddings.update import OptimizerStep, ReceivedGradients, TableUpdater
from shardwright.embeddings.used_features import UsedFeatures
from shardwright.embeddings.vector_transport import VectorTransport, exchange_id_weights, split_ends
from shardwright.errors import UserError
from shardwright.jagged import Jagged, Vectors
from shardwright.kernels.arguments import concat_with_decay
from shardwright.kernels.cache_index import CacheCounts
from shardwright.kernels.dedup import concat_ids
from shardwright.kernels.gradient_sums import GradientSums
from shardwright.layers.embedding import EmbeddingTables
from shardwright.rectangle import IndexRange
from shardwright.spec.optimizer import SparseOptimizer


@dataclass(frozen=True, slots=True)
class AnnouncedRequest(Announcement):
    outgoing: OutgoingRequest


@dataclass(frozen=True, slots=True)
class Lanes:
    """Groups for the exchange of ids and of vectors; codecs that compress vectors and gradients."""

    ids: Group
    wire: Group
    vector_codec: Codec = Plain()
    gradient_codec: Codec = Plain()


class ShardedTables(NotCopied):
    """The tables of one EmbeddingBags, sharded over the ranks of a mesh."""

    def __init__(
        self,
        bags: EmbeddingTables,
        layout: Layout,
        orders: Sequence[RowOrder],
        lanes: Lanes,
        device: torch.device,
        caches: Caches | None = None,
        in_flight: int = 1,
        servers: Connector | None = None,
    ) -> None:
        self.bags, self.layout, self.lanes, self.orders = bags, layout, lanes, orders
        self._caches = caches  # whose folder lives as long as the tables
        self.growth, self.rank = initial_growth(bags), lanes.wire.index
        self.table_groups = layout.table_groups[self.rank]
        self.local_shards = [
            LocalShards(table_group, bags, orders, device, caches, in_flight) for table_group in self.table_groups
        ]
        self.placer = RowPlacer(self.local_shards, caches.threads if caches else None)
        self._requests = RequestBuilder(bags, layout, orders, self.rank)
        self._responses = ResponseAssembly(bags, layout, self.rank, device)
        self._vector_transport = VectorTransport(lanes.wire, lanes.vector_codec, self._responses.dtype)
        self._gradient_transport = VectorTransport(lanes.wire, lanes.gradient_codec, self._responses.dtype)
        self._host_reducer = HostReducer(layout, self._vector_transport, self._gradient_transport)
        self._updater = TableUpdater(layout, self.local_shards, lanes.wire, self._responses.dtype)
        self.bounded = BoundedTables(bags, layout, self.local_shards, lanes.ids)
        self.served = ServedTables(bags, layout, servers)
        self.copied_tables = self.bounded, self.served
        self._used = UsedFeatures(bags, layout, self.local_shards, lanes.wire)
        self._rows: dict[TableShard, IndexRange | Tensor] = {}
        self.train: Callable[[Jagged], Vectors] | None = None  # the lookup of a user training loop, while there is one
        # Table groups whose only client is this rank: their vectors and gradients are not sent.
        self._unsent = [index for index, group in enumerate(self.table_groups) if group.clients == (self.rank,)]

    def write_back(self) -> None:
        """Modules hold no rows of sharded tables."""

    def reload(self) -> None:
        """Modules hold no rows of sharded tables."""

    def cache_counts(self) -> dict[str, CacheCounts]:
        """By table with rows on disk, what the caches of this rank's shards have counted so far."""
        self.placer.wait_until_placed()
        counts: dict[str, CacheCounts] = {}
        for local in self.local_shards:
            for index, cached in local.caches.items():
                name = local.tables[index].name
                counts[name] = counts.get(name, CacheCounts()) + cached.index.counts
        return counts

    def rows_of(self, shard: TableShard) -> IndexRange | Tensor:
        """The rows that a shard of this rank holds: a range, or ids if the table is not in id order."""
        if shard not in self._rows:
            self._rows[shard] = rows_in_order(self.orders[shard.table], shard.rows)
        return self._rows[shard]

    def forward(self, features: Jagged) -> Vectors:
        """Look up features; in a user training loop, `train` does so."""
        if torch.is_grad_enabled() and self.train is not None:
            return self.train(features)
        if torch.is_grad_enabled() and self.bags.optimizer is not None:
            raise UserError(
                "sharded tables train only in job.run or in a loop over job.loader(...); "
                "to look up without training, use torch.no_grad()"
            )
        return self.pool(self.route(self.bags.read(features)))

    def request(self, features: Jagged, weight: float, stop: int = 0) -> AnnouncedRequest:
        """Build the messages to all ranks and their headers, on the CPU."""
        features = features.on_cpu()
        with self.bags.naming_errors():
            outgoing = self._requests.build(features)
        num_ids, has_weights = len(features.values), outgoing.id_weights is not None
        rest = (self._updater.max_replica_values(features), num_ids * has_weights, num_ids * (not has_weights), stop)
        headers_R = make_headers([(features.batch_size, size, weight, *rest) for size in outgoing.splits])
        return AnnouncedRequest(headers_R, self.rank, outgoing)

    def announce(self, request: AnnouncedRequest) -> Pending[AnnouncedRequest]:
        """Exchange headers: one all-to-all on the ids lane."""
        return exchange_headers(request, self.lanes.ids)

    def announce_end(self) -> Pending[Tensor]:
        """Exchange headers without a batch: one all-to-all on the ids lane."""
        return exchange_end_headers(self.lanes.ids)

    def exchange_ids(self, request: AnnouncedRequest) -> Pending[RoutedBatch]:
        """Send ids to the ranks that hold their rows: one all-to-all on the ids lane, with id weights three."""
        outgoing, headers_R = request.outgoing, request.headers_R
        sent_sizes, received_sizes = outgoing.splits, headers_R[:, 1].long().tolist()
        message, lane, has_shards = outgoing.message, self.lanes.ids, self.layout.has_shards
        words = collective.all_to_all(message, sent_sizes, received_sizes, lane) if has_shards else ready(message)
        pending_weights, (num_weighted, num_others) = None, headers_R[:, 4:6].sum(0).tolist()
        if num_weighted and num_others:
            raise UserError("ids have weights on some ranks and none on others; give weights on all ranks or on none")
        if num_weighted:
            no_weights = [torch.empty(0, dtype=self._responses.dtype)] * len(sent_sizes)
            pending_weights = exchange_id_weights(outgoing.id_weights or no_weights, self.lanes.ids)
        batch_sizes = headers_R[:, 0].long().tolist()

        def to_routed(flat: Tensor) -> RoutedBatch:
            weights = None if pending_weights is None else pending_weights.wait()
            incoming = tuple(incoming_requests(self.table_groups, flat.split(received_sizes), weights, batch_sizes))
            return RoutedBatch(outgoing, tuple(batch_sizes), incoming, float(headers_R[:, 3].sum()))

        return words.then(to_routed)

    def route(self, ids: Jagged) -> RoutedBatch:
        """Run all phases before the lookup and wait for them."""
        return self.exchange_ids(self.announce(self.request(ids, ids.batch_size)).wait()).wait()

    def pool(self, routed: RoutedBatch) -> Vectors:
        """Run all phases from the lookup to the vectors and wait for them."""
        for tables in self.copied_tables:
            tables.flush()
        routed.copied[:] = self.bounded.find_rows(routed.outgoing.distinct_rows)
        routed.served[:] = self.served.find_rows(routed.outgoing.distinct_rows)
        result = self.lookup(routed)
        return self.exchange_vectors(self.reduce_in_host(result).wait()).wait()

    def lookup(self, routed: RoutedBatch, *, training: bool = False) -> LookupResult:
        """Look up the incoming requests, without communication: one call per table group.

        Places rows on lines, unless `prefetch` has done so; then also releases them, if no update follows (`training`).
        Rows of tables that grow are always placed here: which rows there are then does not depend on later batches.
        """
        is_placed = bool(routed.placed)
        if not is_placed:
            self.prefetch(routed).wait()
        self.growth.batches += training
        for index, local in enumerate(self.local_shards):
            if local.growing:
                routed.placed[index] = local.place_growing(routed.incoming[index].ids, training=training)
        pairs = zip(self.local_shards, routed.placed, strict=True)
        result = LookupResult(routed, tuple(local.lookup(placed.ids) for local, placed in pairs))
        if not is_placed and not training:
            self.release(routed, written=False)
        return result

    def expect(self, routed: RoutedBatch) -> None:
        """Announce the rows of a batch to this rank's caches."""
        self.placer.expect(routed)

    def forget(self) -> None:
        """Forget announced batches that will not be prefetched."""
        self.placer.forget()

    def prefetch(self, routed: RoutedBatch) -> Pending[RoutedBatch]:
        """Find lines for the rows of a batch, and copy those that are missing in the cache."""
        return self.placer.prefetch(routed)

    def release(self, routed: RoutedBatch, *, written: bool) -> None:
        """End a batch's use of its lines; `written`: an update has changed them."""
        self.placer.release(routed, written=written)

    def reduce_in_host(self, result: LookupResult) -> Pending[LookupResult]:
        """Add partial sums inside each host (HostReducer): one all-to-all on the wire lane."""
        pooled = {index: vectors[0] for index, vectors in enumerate(result.vectors) if vectors}
        pending = self._host_reducer.reduce(pooled, result.routed.batch_sizes)
        return pending.then(lambda host_sums: replace(result, host_sums=host_sums))

    def exchange_vectors(self, result: LookupResult) -> Pending[Vectors]:
        """Send vectors to the ranks of their samples and assemble them: one all-to-all on the wire lane."""
        routed, local = result.routed, self._host_reducer.local_reduce
        messages: list[list[Tensor]] = [[] for _ in self.layout.table_groups]
        unsent = {index: result.vectors[index] for index in self._unsent}
        for index, table_group in enumerate(self.table_groups):
            if index in unsent or table_group.needs_host_reduce or table_group.bounded:
                continue
            incoming, (pooled, *unpooled) = routed.incoming[index], result.vectors[index]
            pooled_by_client = pooled.split(incoming.batch_sizes)
            streams = [rows.split(counts) for rows, counts in zip(unpooled, incoming.unpooled_counts, strict=True)]
            for position, client in enumerate(table_group.clients):
                messages[client] += [pooled_by_client[position], *(stream[position] for stream in streams)]
        if local is not None and result.host_sums is not None:
            for client, sums in zip(local.clients, result.host_sums.split(self._host_sum_sizes(routed)), strict=True):
                if client == self.rank:
                    unsent[len(self.table_groups)] = [sums]
                else:
                    messages[client].append(sums)
        for client, rows in enumerate(self.bounded.rows_to_send(routed.copied)):
            messages[client] += rows
        num_rows = self.bounded.num_row_values(routed.copied)
        sizes = list(map(sum, zip(self._responses.received_sizes(routed.outgoing), num_rows, strict=True)))
        transport = self._vector_transport
        pending = transport.all_to_all(messages, sizes) if self.layout.has_shards else ready(torch.empty(0))

        def assemble(flat: Tensor) -> Vectors:
            vectors, rows = split_ends(flat.split(sizes), num_rows)
            read = self.bounded.read(routed.copied, rows) | self.served.read(routed.served)
            return self._responses.assemble(routed.outgoing, vectors, unsent, read)

        return pending.then(assemble)

    def _host_sum_sizes(self, routed: RoutedBatch) -> list[int]:
        """Samples of each client of this rank's host reduce."""
        local_reduce = self._host_reducer.local_reduce
        return [routed.batch_sizes[client] for client in local_reduce.clients] if local_reduce else []

    def exchange_gradients(
        self, routed: RoutedBatch, gradients: Vectors, *, sum_replicas: bool = True
    ) -> Pending[ReceivedGradients]:
        """Send the gradients of vectors and of host sums to the ranks that computed the vectors and sums.

        One all-to-all over all ranks on the wire lane; each message begins with flags of the features that the sender's
        loss used. Before it, the gradients of table groups that are replicated on all ranks are summed, where an
        all-reduce of whole tables over all ranks costs fewer bytes than an exchange of rows.
        """
        flags = self._used.flags(gradients)
        messages, unsent, sums = self._responses.split_gradients(routed.outgoing, gradients, flags)
        for owner, updates in enumerate(self.bounded.updates_to_push(routed.copied, sums)):
            messages[owner] += updates
        self.served.keep_gradients(routed.served, sums)
        of_groups = {index: parts for index, parts in unsent.items() if index < len(self.table_groups)}
        replica_sums = self._updater.start_replica_sums(
            {i: (routed.incoming[i].ids, parts) for i, parts in of_groups.items()},
            routed.max_replica_values if sum_replicas else 0.0,
        )
        sizes = [self._used.num_words] * len(messages)
        for index, (group, incoming) in enumerate(zip(self.table_groups, routed.incoming, strict=True)):
            for i, client in enumerate(group.clients if index not in unsent and not group.needs_host_reduce else ()):
                sizes[client] += incoming.batch_sizes[i] * group.width
                counts = (stream[i] for stream in incoming.unpooled_counts)
                sizes[client] += sum(count * dim for count, dim in zip(counts, group.unpooled_dims, strict=True))
        local = self._host_reducer.local_reduce
        for client, samples in zip(local.clients if local else (), self._host_sum_sizes(routed), strict=True):
            sizes[client] += samples * local.width if local and client != self.rank else 0
        num_updates = self.bounded.num_update_values(routed.copied)
        sizes = list(map(sum, zip(sizes, num_updates, strict=True)))
        pending = self._gradient_transport.all_to_all(messages, sizes)

        def unpack(flat: Tensor) -> ReceivedGradients:
            by_rank, updates = split_ends(flat.split(sizes), num_updates)
            self.bounded.receive_updates(routed.copied, updates)
            return self._unpack_gradients(routed, by_rank, unsent, replica_sums)

        return pending.then(unpack)

    def broadcast_in_host(self, routed: RoutedBatch, gradients: ReceivedGradients) -> Pending[ReceivedGradients]:
        """Add the gradients of table groups with a host reduce: one all-to-all on the wire lane."""
        pending = self._host_reducer.broadcast(gradients.host_sum_gradients, routed.batch_sizes)
        return pending.then(
            lambda pooled: replace(
                gradients, gradients={**gradients.gradients, **{index: [grads] for index, grads in pooled.items()}}
            )
        )

    def _unpack_gradients(
        self,
        routed: RoutedBatch,
        by_rank: Sequence[Tensor],
        unsent: Mapping[int, list[Tensor]],
        replica_sums: Mapping[int, Pending[GradientSums]],
    ) -> ReceivedGradients:
        """Split the received messages into the gradients of each table group and of this rank's host sums."""
        read = [self._used.num_words] * len(by_rank)
        used = self._used.used_by_any(torch.stack([flat[: self._used.num_words] for flat in by_rank]))

        def take_rows(client: int, rows: int, dim: int) -> Tensor:
            read[client] += rows * dim
            return by_rank[client][read[client] - rows * dim : read[client]].view(rows, dim)

        gradients: dict[int, list[Tensor]] = {i: [] for i, group in enumerate(self.table_groups) if group.bounded}
        for index, (group, incoming) in enumerate(zip(self.table_groups, routed.incoming, strict=True)):
            if index in self._unsent or index in gradients or group.needs_host_reduce:
                continue
            pooled, unpooled = [], [[] for _ in group.unpooled]
            for position, client in enumerate(group.clients):
                pooled.append(take_rows(client, incoming.batch_sizes[position], group.width))
                for stream, counts, dim in zip(unpooled, incoming.unpooled_counts, group.unpooled_dims, strict=True):
                    stream.append(take_rows(client, counts[position], dim))
            gradients[index] = [torch.cat(pooled), *(torch.cat(stream) for stream in unpooled)]
        local, host_sum_gradients = self._host_reducer.local_reduce, None
        if local is not None:
            samples = zip(local.clients, self._host_sum_sizes(routed), strict=True)
            host_sum_gradients = torch.cat(
                [
                    unsent[len(self.table_groups)][0] if client == self.rank else take_rows(client, num, local.width)
                    for client, num in samples
                ]
            )
        gradients |= {index: parts for index, parts in unsent.items() if index < len(self.table_groups)}
        return ReceivedGradients(gradients, replica_sums, used, host_sum_gradients)

    def concat_micro_batches(
        self, micro_batches: Sequence[tuple[RoutedBatch, ReceivedGradients]], decay: float
    ) -> tuple[RoutedBatch, ReceivedGradients]:
        """Concatenate micro-batches as one batch for the update, and start its sums of replicas."""
        indices = [index for index, _ in enumerate(self.table_groups)]
        ids = [concat_ids([routed.incoming[index].ids for routed, _ in micro_batches]) for index in indices]
        lines = [concat_ids([routed.placed[index].update_ids for routed, _ in micro_batches]) for index in indices]
        pairs = [zip(*(grads.gradients[index] for _, grads in micro_batches), strict=True) for index in indices]
        gradients = {index: [concat_with_decay(tensors, decay) for tensors in pairs[index]] for index in indices}
        max_values = sum(routed.max_replica_values for routed, _ in micro_batches)
        replica_sums = self._updater.start_replica_sums(
            {index: (ids[index], gradients[index]) for index in self._unsent}, max_values
        )
        routed = micro_batches[-1][0]
        incoming = tuple(replace(request, ids=ids[index]) for index, request in enumerate(routed.incoming))
        used = tuple(map(any, zip(*(grads.used_features for _, grads in micro_batches), strict=True)))
        micro = tuple(routed for routed, _ in micro_batches)
        placed = [PlacedIds(each, each, {}) for each in lines]
        joined = replace(routed, incoming=incoming, micro_batches=micro, placed=placed)
        return joined, ReceivedGradients(gradients, replica_sums, used)

    def update(
        self, routed: RoutedBatch, gradients: ReceivedGradients, optimizer: SparseOptimizer, steps: Mapping[str, int]
    ) -> Collection[str]:
        """One optimizer step of this rank's shards. Communicates as TableUpdater and UsedFeatures do."""
        ids = [placed.update_ids for placed in routed.placed]
        used_rows: list[Tensor] = []
        if not all(gradients.used_features):
            used_rows = self._used.used_rows(routed.outgoing, gradients.used_features)
            lookups = [
                (batch.outgoing, [request.unpooled_counts for request in batch.incoming]) for batch in routed.lookups
            ]
            ids, gradients = self._used.restrict(lookups, ids, gradients)
        self._updater.run(ids, gradients, OptimizerStep(optimizer, steps))
        self.bounded.update(routed.copied, optimizer, steps)
        self.served.update(routed.served, optimizer, steps, used_rows)
        self.release(routed, written=True)
        used = zip(self.bags.features, gradients.used_features, strict=True)
        return {feature.name for feature, is_used in used if is_used or feature.table in self.bounded.table_names}

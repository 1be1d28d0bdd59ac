"""Assemble the responses that a rank receives into vectors, and split gradients into messages.

Assembly: columns of responses are copied into vectors, partial sums are added in the order of ranks and row ranges,
and features of row-exchange tables are looked up in the received distinct rows as in a small table.

Shape legend: B samples, D columns, U distinct rows.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwright.embeddings import vector_transport
from shardwright.embeddings.layout import ColumnRanges, HostReduce, Layout, Span, TableGroup
from shardwright.embeddings.outgoing import OutgoingRequest
from shardwright.embeddings.vector_transport import ColumnCopy
from shardwright.jagged import Vectors
from shardwright.kernels import embedding
from shardwright.kernels.arguments import ids_on
from shardwright.kernels.buffers import BufferPool
from shardwright.kernels.gradient_sums import sum_at_positions
from shardwright.layers.embedding import EmbeddingTables
from shardwright.layers.table_weights import torch_state_dtype


@dataclass(frozen=True, slots=True)
class Response:
    """Format of one response, of a table group or host reduce: pooled vectors, then unpooled rows."""

    server: int
    # If only this rank uses the group, or for this rank's host reduce: the index that `response_sources` yields with
    # it; the response is not sent. Else -1.
    local_index: int
    width: int  # columns of the pooled vectors
    column_copies: tuple[ColumnCopy, ...]
    unpooled: tuple[tuple[int, int, ColumnRanges], ...]  # (row-exchange table, row range, columns) of each stream

    def is_whole(self, width: int) -> bool:
        """Whether it is not sent, and its pooled vectors have all `width` columns of this rank's vectors."""
        return self.local_index >= 0 and not self.unpooled and self.column_copies == (ColumnCopy(0, 0, width, False),)

    def numel(self, request: OutgoingRequest) -> int:
        """Number of values in the response."""
        rows = (self.row_range(request, index) for index in range(len(self.unpooled)))
        dims = (sum(map(_length, cols)) for _, _, cols in self.unpooled)
        return request.batch_size * self.width + sum(
            count * dim for count, dim in zip(map(_length, rows), dims, strict=True)
        )

    def split(self, request: OutgoingRequest, flat: Tensor) -> Iterator[Tensor]:
        """Views of its pooled vectors and of the rows of each unpooled stream, in the order sent."""
        end = request.batch_size * self.width
        yield flat[:end].view(request.batch_size, self.width)
        for index, (_, _, cols) in enumerate(self.unpooled):
            count, dim = _length(self.row_range(request, index)), sum(map(_length, cols))
            yield flat[end : end + count * dim].view(count, dim)
            end += count * dim

    def row_range(self, request: OutgoingRequest, stream: int) -> Span:
        """The rows of an unpooled stream among the distinct rows of its table: (first, end)."""
        table, range_index, _ = self.unpooled[stream]
        bounds = request.distinct_rows.boundaries[table]
        return bounds[range_index], bounds[range_index + 1]


class ResponseAssembly:
    """Assembles this rank's vectors from responses, and splits gradients in the same format."""

    def __init__(self, bags: EmbeddingTables, layout: Layout, rank: int, device: torch.device) -> None:
        """`device`: of the vectors."""
        self._bags, self._device = bags, device
        self._memory = BufferPool(device)
        self.dtype = torch_state_dtype(bags.tables[0])
        self._num_ranks = len(layout.table_groups)
        pooled = [i for i, feature in enumerate(bags.features) if feature.pooling != "none"]
        self._column: dict[int, int] = {}  # by feature: first column of its pooled vectors
        self.width = 0
        for feature in pooled:
            self._column[feature] = self.width
            self.width += bags.dims[feature]
        table_index = {table.name: index for index, table in enumerate(bags.tables)}
        table_of = [table_index[feature.table] for feature in bags.features]
        self._tables = sorted(layout.row_exchange_tables)
        self._row_exchange = [feature for feature in pooled if table_of[feature] in layout.row_exchange_tables]
        self._means = [
            i
            for i in pooled
            if bags.features[i].pooling == "mean"
            and table_of[i] not in layout.row_exchange_tables
            and len(layout.row_boundaries[table_of[i]]) > 2
        ]
        written_columns: set[int] = set()
        self._responses = [
            self._response(server, index if server == rank and _is_local(source, rank) else -1, source, written_columns)
            for server, index, source in layout.response_sources(rank)
        ]
        with_vectors = [response for response in self._responses if response.column_copies]
        is_only = len(with_vectors) == 1 and with_vectors[0].is_whole(self.width)
        self._whole = with_vectors[0] if is_only else None

    def received_sizes(self, request: OutgoingRequest) -> list[int]:
        """Number of values to receive from each rank."""
        sizes = [0] * self._num_ranks
        for response in self._responses:
            sizes[response.server] += response.numel(request) if response.local_index < 0 else 0
        return sizes

    def assemble(
        self,
        request: OutgoingRequest,
        received: Sequence[Tensor],
        local: Mapping[int, Sequence[Tensor]],
        rows_by_table: Mapping[int, Tensor],
    ) -> Vectors:
        """The vectors of a batch, from the values of each rank, the responses that are not sent (`local`, by index),
        and the rows of row-exchange tables that are here already."""
        whole_BD = local[self._whole.local_index][0] if self._whole else None
        if whole_BD is not None and whole_BD.dtype == self.dtype:
            pooled_BD = whole_BD
        else:
            whole_BD, pooled_BD = None, self._memory.allocate(request.batch_size, self.width, dtype=self.dtype)
        dims = [self._bags.tables[table].dim for table in self._tables]
        rows = [
            rows_by_table[table] if table in rows_by_table else self._memory.allocate(count, dim, dtype=self.dtype)
            for table, (count, dim) in enumerate(zip(request.distinct_rows.counts, dims, strict=True))
        ]
        read = [0] * self._num_ranks
        for response in self._responses:
            if response.local_index >= 0:
                part_BD, *unpooled = local[response.local_index]
            else:
                begin = read[response.server]
                part_BD, *unpooled = response.split(request, received[response.server][begin:])
                read[response.server] += response.numel(request)
            if whole_BD is None:
                vector_transport.scatter_columns(pooled_BD, part_BD, response.column_copies)
            for stream, ((table, _, cols), part_UD) in enumerate(zip(response.unpooled, unpooled, strict=True)):
                low, high = response.row_range(request, stream)
                for (a, b), columns in zip(cols, part_UD.split([b - a for a, b in cols], 1), strict=True):
                    rows[table][low:high, a:b] = columns
        for feature, lengths_B in self._mean_lengths(request):
            pooled_BD[:, self._column[feature] : self._column[feature] + self._bags.dims[feature]] /= lengths_B
        sequences: Sequence[Tensor] = ()
        if self._tables:
            lookup_BD, *sequences = embedding.lookup_into(
                self._memory, rows, ids_on(request.distinct_rows.ids, self._device)
            )
            begin = 0
            for feature in self._row_exchange:
                dim = self._bags.dims[feature]
                pooled_BD[:, self._column[feature] : self._column[feature] + dim] = lookup_BD[:, begin : begin + dim]
                begin += dim
        return self._bags.vectors(pooled_BD, sequences)

    def split_gradients(
        self, request: OutgoingRequest, gradients: Vectors, prefix: Tensor
    ) -> tuple[list[list[Tensor]], dict[int, list[Tensor]], list[Tensor]]:
        """Split gradients into (message to each rank, gradients that are not sent, by index, sums of distinct rows).
        A message is `prefix`, then the gradients in the order in which their vectors arrived."""
        pooled_BD = gradients.pooled_BD.to(self.dtype)
        if self._means:
            pooled_BD = pooled_BD.clone()
        for feature, lengths_B in self._mean_lengths(request):
            pooled_BD[:, self._column[feature] : self._column[feature] + self._bags.dims[feature]] /= lengths_B
        sums: list[Tensor] = []
        if self._tables:
            columns = [pooled_BD[:, self._column[i] : self._column[i] + self._bags.dims[i]] for i in self._row_exchange]
            lookup_BD = torch.cat(columns, 1) if columns else pooled_BD[:, :0]
            dims = [self._bags.tables[table].dim for table in self._tables]
            sequences = [sequence.to(self.dtype) for sequence in gradients.sequences.values()]
            sums = sum_at_positions(
                request.distinct_rows.ids, [lookup_BD, *sequences], request.distinct_rows.counts, dims
            )
        sizes = [response.numel(request) if response.local_index < 0 else 0 for response in self._responses]
        sizes_by_rank = [0] * self._num_ranks
        for response, size in zip(self._responses, sizes, strict=True):
            sizes_by_rank[response.server] += size
        buffer = self._memory.allocate(sum(sizes) + len(prefix) * self._num_ranks, dtype=self.dtype)
        by_rank = list(buffer.split([len(prefix) + size for size in sizes_by_rank]))
        messages = [[flat[: len(prefix)].copy_(prefix)] for flat in by_rank]
        local: dict[int, list[Tensor]] = {}
        rests = [flat[len(prefix) :] for flat in by_rank]
        for response, size in zip(self._responses, sizes, strict=True):
            if response is self._whole:
                local[response.local_index] = [pooled_BD if pooled_BD.stride(1) == 1 else pooled_BD.contiguous()]
                continue
            if response.local_index >= 0:
                flat = self._memory.allocate(response.numel(request), dtype=self.dtype)
            else:
                flat, rests[response.server] = rests[response.server].tensor_split([size])
                messages[response.server].append(flat)
            parts = list(response.split(request, flat))
            vector_transport.gather_columns(parts[0], pooled_BD, response.column_copies)
            for stream, (table, _, cols) in enumerate(response.unpooled):
                low, high = response.row_range(request, stream)
                torch.cat([sums[table][low:high, a:b] for a, b in cols], 1, out=parts[stream + 1])
            if response.local_index >= 0:
                local[response.local_index] = parts
        return messages, local, sums

    def _mean_lengths(self, request: OutgoingRequest) -> Iterator[tuple[int, Tensor]]:
        """(feature, number of ids (B, 1)) of the mean-pooled features that were looked up as sums."""
        for feature in self._means:
            yield feature, request.lengths_FB[feature].clamp(min=1).unsqueeze(1).to(self._device)

    def _response(self, server: int, local_index: int, source: TableGroup | HostReduce, written: set[int]) -> Response:
        begins = ((self._column[feature], cols) for feature, cols in source.feature_columns)
        copies = vector_transport.plan_column_copies(
            ((begin + low, begin + high) for begin, cols in begins for low, high in cols), written
        )
        shards = [source.shards[ids.shard_index] for ids in source.unpooled] if isinstance(source, TableGroup) else []
        unpooled = tuple((self._tables.index(shard.table), shard.range_index, shard.cols) for shard in shards)
        return Response(server, local_index, sum(run.width for run in copies), copies, unpooled)


def _is_local(source: TableGroup | HostReduce, rank: int) -> bool:
    return isinstance(source, HostReduce) or source.clients == (rank,)


def _length(span: Span) -> int:
    return span[1] - span[0]

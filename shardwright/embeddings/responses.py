"""What comes back to a rank, put together: columns side by side, parts of sums added in the order of ranks and bands,
distinct rows looked up again as a table of their own. And gradients taken apart for the way back.

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
from shardwright.kernels.buffers import BufferPool
from shardwright.kernels.gradient_sums import sum_at_positions
from shardwright.layers.embedding import EmbeddingBags
from shardwright.layers.table_weights import torch_state_dtype


@dataclass(frozen=True, slots=True)
class Response:
    """Of one bank or meeting: the runs of its pooled vectors, and (table of rows, band, columns) of each stream of
    rows."""

    server: int
    local_index: (
        int  # which of this rank's banks, where only this rank asks it, or its meeting; else -1: nothing travels then
    )
    width: int
    column_copies: tuple[ColumnCopy, ...]
    unpooled: tuple[tuple[int, int, ColumnRanges], ...]

    def numel(self, request: OutgoingRequest) -> int:
        rows = (self.row_range(request, at) for at in range(len(self.unpooled)))
        dims = (sum(map(_length, cols)) for _, _, cols in self.unpooled)
        return request.batch_size * self.width + sum(
            count * dim for count, dim in zip(map(_length, rows), dims, strict=True)
        )

    def split(self, request: OutgoingRequest, flat: Tensor) -> Iterator[Tensor]:
        """Its pooled vectors, then the rows of each stream of rows, as they follow each other."""
        end = request.batch_size * self.width
        yield flat[:end].view(request.batch_size, self.width)
        for at, (_, _, cols) in enumerate(self.unpooled):
            count, dim = _length(self.row_range(request, at)), sum(map(_length, cols))
            yield flat[end : end + count * dim].view(count, dim)
            end += count * dim

    def row_range(self, request: OutgoingRequest, stream: int) -> Span:
        """Where the rows of a stream are among the distinct rows of its table."""
        table, band, _ = self.unpooled[stream]
        cuts = request.distinct_rows.boundaries[table]
        return cuts[band], cuts[band + 1]


class ResponseAssembly:
    def __init__(self, bags: EmbeddingBags, layout: Layout, rank: int) -> None:
        self._bags = bags
        self._memory = BufferPool()
        self.dtype = torch_state_dtype(bags.tables[0])
        self._num_ranks = len(layout.table_groups)
        pooled = [at for at, feature in enumerate(bags.features) if feature.pooling != "none"]
        self._begin: dict[int, int] = {}
        self.width = 0
        for at in pooled:
            self._begin[at] = self.width
            self.width += bags.dims[at]
        number_of = {table.name: number for number, table in enumerate(bags.tables)}
        table_of = [number_of[feature.table] for feature in bags.features]
        self._tables = sorted(layout.row_exchange_tables)
        self._again = [at for at in pooled if table_of[at] in layout.row_exchange_tables]
        self._means = [
            at
            for at in pooled
            if bags.features[at].pooling == "mean"
            and table_of[at] not in layout.row_exchange_tables
            and len(layout.row_boundaries[table_of[at]]) > 2
        ]
        written: set[int] = set()
        self._answers = [
            self._answer(server, number if server == rank and _own(one, rank) else -1, one, written)
            for server, number, one in layout.response_sources(rank)
        ]

    def received_sizes(self, request: OutgoingRequest) -> list[int]:
        """Numbers that come from each rank."""
        found = [0] * self._num_ranks
        for answer in self._answers:
            found[answer.server] += answer.numel(request) if answer.local_index < 0 else 0
        return found

    def assemble(self, request: OutgoingRequest, received: Tensor, local: Mapping[int, Sequence[Tensor]]) -> Vectors:
        """`own`: what came from banks that only this rank asks, and from its meeting."""
        pooled_BD = self._memory.allocate(request.batch_size, self.width, dtype=self.dtype)
        dims = [self._bags.tables[table].dim for table in self._tables]
        rows = [
            self._memory.allocate(count, dim, dtype=self.dtype)
            for count, dim in zip(request.distinct_rows.counts, dims, strict=True)
        ]
        read = 0
        for answer in self._answers:
            if answer.local_index >= 0:
                part_BD, *alone = local[answer.local_index]
            else:
                part_BD, *alone = answer.split(request, received[read:])
                read += answer.numel(request)
            vector_transport.scatter_columns(pooled_BD, part_BD, answer.column_copies)
            for at, ((table, _, cols), part_UD) in enumerate(zip(answer.unpooled, alone, strict=True)):
                low, high = answer.row_range(request, at)
                for (a, b), piece in zip(cols, part_UD.split([b - a for a, b in cols], 1), strict=True):
                    rows[table][low:high, a:b] = piece
        for at, lengths_B in self._mean_lengths(request):
            pooled_BD[:, self._begin[at] : self._begin[at] + self._bags.dims[at]] /= lengths_B
        sequences: Sequence[Tensor] = ()
        if self._tables:
            again_BD, *sequences = embedding.lookup_into(self._memory, rows, request.distinct_rows.ids)
            begin = 0
            for at in self._again:
                dim = self._bags.dims[at]
                pooled_BD[:, self._begin[at] : self._begin[at] + dim] = again_BD[:, begin : begin + dim]
                begin += dim
        return self._bags.vectors(pooled_BD, sequences)

    def split_gradients(
        self, request: OutgoingRequest, gradients: Vectors, prefix: Tensor
    ) -> tuple[list[list[Tensor]], dict[int, list[Tensor]]]:
        """The parts of the message to each rank: `first`, then the gradients in the order in which their vectors
        arrived. And the gradients of this rank's own banks, by bank."""
        pooled_BD = gradients.pooled_BD.to(self.dtype)
        if self._means:
            pooled_BD = pooled_BD.clone()
        for at, lengths_B in self._mean_lengths(request):
            pooled_BD[:, self._begin[at] : self._begin[at] + self._bags.dims[at]] /= lengths_B
        sums: list[Tensor] = []
        if self._tables:
            again = [pooled_BD[:, self._begin[at] : self._begin[at] + self._bags.dims[at]] for at in self._again]
            again_BD = torch.cat(again, 1) if again else pooled_BD[:, :0]
            dims = [self._bags.tables[table].dim for table in self._tables]
            sequences = [sequence.to(self.dtype) for sequence in gradients.sequences.values()]
            sums = sum_at_positions(
                request.distinct_rows.ids, [again_BD, *sequences], request.distinct_rows.counts, dims
            )
        sizes = [answer.numel(request) if answer.local_index < 0 else 0 for answer in self._answers]
        to_each = [0] * self._num_ranks
        for answer, size in zip(self._answers, sizes, strict=True):
            to_each[answer.server] += size
        whole = self._memory.allocate(sum(sizes) + len(prefix) * self._num_ranks, dtype=self.dtype)
        by_rank = list(whole.split([len(prefix) + size for size in to_each]))
        found = [[flat[: len(prefix)].copy_(prefix)] for flat in by_rank]
        own: dict[int, list[Tensor]] = {}
        rests = [flat[len(prefix) :] for flat in by_rank]
        for answer, size in zip(self._answers, sizes, strict=True):
            if answer.local_index >= 0:
                flat = self._memory.allocate(answer.numel(request), dtype=self.dtype)
            else:
                flat, rests[answer.server] = rests[answer.server].tensor_split([size])
                found[answer.server].append(flat)
            parts = list(answer.split(request, flat))
            vector_transport.gather_columns(parts[0], pooled_BD, answer.column_copies)
            for at, (table, _, cols) in enumerate(answer.unpooled):
                low, high = answer.row_range(request, at)
                torch.cat([sums[table][low:high, a:b] for a, b in cols], 1, out=parts[at + 1])
            if answer.local_index >= 0:
                own[answer.local_index] = parts
        return found, own

    def _mean_lengths(self, asked: OutgoingRequest) -> Iterator[tuple[int, Tensor]]:
        """The features whose parts are sums of what is to be a mean, and how many ids that is of."""
        for at in self._means:
            yield at, asked.lengths_FB[at].clamp(min=1).unsqueeze(1)

    def _answer(self, server: int, own: int, one: TableGroup | HostReduce, written: set[int]) -> Response:
        begins = ((self._begin[feature], cols) for feature, cols in one.feature_columns)
        moved = vector_transport.plan_column_copies(
            ((at + low, at + high) for at, cols in begins for low, high in cols), written
        )
        pieces = [one.shards[stream.shard_index] for stream in one.unpooled] if isinstance(one, TableGroup) else []
        alone = tuple((self._tables.index(piece.table), piece.range_index, piece.cols) for piece in pieces)
        return Response(server, own, sum(run.width for run in moved), moved, alone)


def _own(one: TableGroup | HostReduce, rank: int) -> bool:
    return isinstance(one, HostReduce) or one.clients == (rank,)


def _length(span: Span) -> int:
    return span[1] - span[0]

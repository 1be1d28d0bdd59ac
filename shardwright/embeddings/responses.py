"""What comes back to a rank, put together: columns side by side, parts of sums added in the order of ranks and bands,
distinct rows looked up again as a table of their own. And gradients taken apart for the way back.

Shape legend: B samples, D columns, U distinct rows.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwright.embeddings import vector_transport
from shardwright.embeddings.layout import Bank, Columns, Layout, Meeting, Span
from shardwright.embeddings.outgoing import Asked
from shardwright.embeddings.vector_transport import Run
from shardwright.jagged import Vectors
from shardwright.kernels import embedding
from shardwright.kernels.buffers import Buffers
from shardwright.kernels.gradient_sums import sum_places
from shardwright.layers.embedding import EmbeddingBags
from shardwright.layers.table_weights import state_dtype_of


@dataclass(frozen=True, slots=True)
class Answer:
    """Of one bank or meeting: the runs of its pooled vectors, and (table of rows, band, columns) of each stream of
    rows."""

    server: int
    own: int  # which of this rank's banks, where only this rank asks it, or its meeting; else -1: nothing travels then
    width: int
    runs: tuple[Run, ...]
    alone: tuple[tuple[int, int, Columns], ...]

    def size(self, asked: Asked) -> int:
        rows = (self.rows(asked, at) for at in range(len(self.alone)))
        dims = (sum(map(_length, cols)) for _, _, cols in self.alone)
        return asked.batch * self.width + sum(count * dim for count, dim in zip(map(_length, rows), dims, strict=True))

    def parts(self, asked: Asked, flat: Tensor) -> Iterator[Tensor]:
        """Its pooled vectors, then the rows of each stream of rows, as they follow each other."""
        end = asked.batch * self.width
        yield flat[:end].view(asked.batch, self.width)
        for at, (_, _, cols) in enumerate(self.alone):
            count, dim = _length(self.rows(asked, at)), sum(map(_length, cols))
            yield flat[end : end + count * dim].view(count, dim)
            end += count * dim

    def rows(self, asked: Asked, at: int) -> Span:
        """Where the rows of a stream are among the distinct rows of its table."""
        table, band, _ = self.alone[at]
        cuts = asked.distinct.cuts[table]
        return cuts[band], cuts[band + 1]


class Answers:
    def __init__(self, bags: EmbeddingBags, layout: Layout, rank: int) -> None:
        self._bags = bags
        self._memory = Buffers()
        self.dtype = state_dtype_of(bags.tables[0])
        self._num_ranks = len(layout.banks)
        pooled = [at for at, feature in enumerate(bags.features) if feature.pooling != "none"]
        self._begin: dict[int, int] = {}
        self.width = 0
        for at in pooled:
            self._begin[at] = self.width
            self.width += bags.dims[at]
        number_of = {table.name: number for number, table in enumerate(bags.tables)}
        table_of = [number_of[feature.table] for feature in bags.features]
        self._tables = sorted(layout.by_row)
        self._again = [at for at in pooled if table_of[at] in layout.by_row]
        self._means = [
            at
            for at in pooled
            if bags.features[at].pooling == "mean"
            and table_of[at] not in layout.by_row
            and len(layout.bands[table_of[at]]) > 2
        ]
        written: set[int] = set()
        self._answers = [
            self._answer(server, number if server == rank and _own(one, rank) else -1, one, written)
            for server, number, one in layout.answering(rank)
        ]

    def sizes(self, asked: Asked) -> list[int]:
        """Numbers that come from each rank."""
        found = [0] * self._num_ranks
        for answer in self._answers:
            found[answer.server] += answer.size(asked) if answer.own < 0 else 0
        return found

    def vectors(self, asked: Asked, arrived: Tensor, own: Mapping[int, Sequence[Tensor]]) -> Vectors:
        """`own`: what came from banks that only this rank asks, and from its meeting."""
        pooled_BD = self._memory.take(asked.batch, self.width, dtype=self.dtype)
        dims = [self._bags.tables[table].dim for table in self._tables]
        rows = [
            self._memory.take(count, dim, dtype=self.dtype)
            for count, dim in zip(asked.distinct.counts, dims, strict=True)
        ]
        read = 0
        for answer in self._answers:
            if answer.own >= 0:
                part_BD, *alone = own[answer.own]
            else:
                part_BD, *alone = answer.parts(asked, arrived[read:])
                read += answer.size(asked)
            vector_transport.put(pooled_BD, part_BD, answer.runs)
            for at, ((table, _, cols), part_UD) in enumerate(zip(answer.alone, alone, strict=True)):
                low, high = answer.rows(asked, at)
                for (a, b), piece in zip(cols, part_UD.split([b - a for a, b in cols], 1), strict=True):
                    rows[table][low:high, a:b] = piece
        for at, lengths_B in self._mean_lengths(asked):
            pooled_BD[:, self._begin[at] : self._begin[at] + self._bags.dims[at]] /= lengths_B
        sequences: Sequence[Tensor] = ()
        if self._tables:
            again_BD, *sequences = embedding.lookup_into(self._memory, rows, asked.distinct.ids)
            begin = 0
            for at in self._again:
                dim = self._bags.dims[at]
                pooled_BD[:, self._begin[at] : self._begin[at] + dim] = again_BD[:, begin : begin + dim]
                begin += dim
        return self._bags.vectors(pooled_BD, sequences)

    def gradients(
        self, asked: Asked, gradients: Vectors, first: Tensor
    ) -> tuple[list[list[Tensor]], dict[int, list[Tensor]]]:
        """The parts of the message to each rank: `first`, then the gradients in the order in which their vectors
        arrived. And the gradients of this rank's own banks, by bank."""
        pooled_BD = gradients.pooled_BD.to(self.dtype)
        if self._means:
            pooled_BD = pooled_BD.clone()
        for at, lengths_B in self._mean_lengths(asked):
            pooled_BD[:, self._begin[at] : self._begin[at] + self._bags.dims[at]] /= lengths_B
        sums: list[Tensor] = []
        if self._tables:
            again = [pooled_BD[:, self._begin[at] : self._begin[at] + self._bags.dims[at]] for at in self._again]
            again_BD = torch.cat(again, 1) if again else pooled_BD[:, :0]
            dims = [self._bags.tables[table].dim for table in self._tables]
            sequences = [sequence.to(self.dtype) for sequence in gradients.sequences.values()]
            sums = sum_places(asked.distinct.ids, [again_BD, *sequences], asked.distinct.counts, dims)
        sizes = [answer.size(asked) if answer.own < 0 else 0 for answer in self._answers]
        to_each = [0] * self._num_ranks
        for answer, size in zip(self._answers, sizes, strict=True):
            to_each[answer.server] += size
        whole = self._memory.take(sum(sizes) + len(first) * self._num_ranks, dtype=self.dtype)
        by_rank = list(whole.split([len(first) + size for size in to_each]))
        found = [[flat[: len(first)].copy_(first)] for flat in by_rank]
        own: dict[int, list[Tensor]] = {}
        rests = [flat[len(first) :] for flat in by_rank]
        for answer, size in zip(self._answers, sizes, strict=True):
            if answer.own >= 0:
                flat = self._memory.take(answer.size(asked), dtype=self.dtype)
            else:
                flat, rests[answer.server] = rests[answer.server].tensor_split([size])
                found[answer.server].append(flat)
            parts = list(answer.parts(asked, flat))
            vector_transport.take(parts[0], pooled_BD, answer.runs)
            for at, (table, _, cols) in enumerate(answer.alone):
                low, high = answer.rows(asked, at)
                torch.cat([sums[table][low:high, a:b] for a, b in cols], 1, out=parts[at + 1])
            if answer.own >= 0:
                own[answer.own] = parts
        return found, own

    def _mean_lengths(self, asked: Asked) -> Iterator[tuple[int, Tensor]]:
        """The features whose parts are sums of what is to be a mean, and how many ids that is of."""
        for at in self._means:
            yield at, asked.lengths_FB[at].clamp(min=1).unsqueeze(1)

    def _answer(self, server: int, own: int, one: Bank | Meeting, written: set[int]) -> Answer:
        begins = ((self._begin[feature], cols) for feature, cols in one.brought)
        moved = vector_transport.runs(((at + low, at + high) for at, cols in begins for low, high in cols), written)
        pieces = [one.pieces[stream.piece] for stream in one.alone] if isinstance(one, Bank) else []
        alone = tuple((self._tables.index(piece.table), piece.band, piece.cols) for piece in pieces)
        return Answer(server, own, sum(run.width for run in moved), moved, alone)


def _own(one: Bank | Meeting, rank: int) -> bool:
    return isinstance(one, Meeting) or one.clients == (rank,)


def _length(span: Span) -> int:
    return span[1] - span[0]

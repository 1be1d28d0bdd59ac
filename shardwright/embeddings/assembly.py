"""What comes back to a rank, put together: columns side by side, parts of sums added in the order of ranks and bands,
distinct rows looked up again as a table of their own. And gradients taken apart for the way back.

Shape legend: B samples, D columns, U distinct rows.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shardwright.embeddings.lookup import sum_places
from shardwright.embeddings.request import Asked
from shardwright.embeddings.shard import Bank, Layout, Span
from shardwright.jagged import Vectors
from shardwright.kernels import embedding
from shardwright.kernels.buffers import Buffers
from shardwright.layers.embedding import EmbeddingBags
from shardwright.layers.table import state_dtype_of


@dataclass(frozen=True, slots=True)
class Run:
    """Columns of an answer, and where they belong in the vectors of a batch."""

    source: int
    target: int
    width: int
    added: bool  # to what an earlier answer brought


@dataclass(frozen=True, slots=True)
class Answer:
    """Of one bank: the runs of its pooled vectors, and (table of rows, band, columns) of each stream of rows."""

    server: int
    own: int  # which of this rank's banks, where only this rank asks it; else -1: nothing travels then
    width: int
    runs: tuple[Run, ...]
    alone: tuple[tuple[int, int, tuple[Span, ...]], ...]

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
            self._answer(server, _own(layout, rank, server, bank), bank, written)
            for server, bank in layout.serving(rank)
        ]

    def sizes(self, asked: Asked) -> list[int]:
        """Numbers that come from each rank."""
        found = [0] * self._num_ranks
        for answer in self._answers:
            found[answer.server] += answer.size(asked) if answer.own < 0 else 0
        return found

    def vectors(self, asked: Asked, arrived: Tensor, own: Mapping[int, Sequence[Tensor]]) -> Vectors:
        """`own`: what banks gave that only this rank asks."""
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
            for run in answer.runs:
                target = pooled_BD[:, run.target : run.target + run.width]
                source = part_BD[:, run.source : run.source + run.width]
                target.add_(source) if run.added else target.copy_(source)
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

    def gradients(self, asked: Asked, gradients: Vectors) -> tuple[list[list[Tensor]], dict[int, list[Tensor]]]:
        """The parts that go to each rank, in the order in which their vectors came; and those of its own banks."""
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
        found: list[list[Tensor]] = [[] for _ in range(self._num_ranks)]
        own: dict[int, list[Tensor]] = {}
        for answer in self._answers:
            columns = [pooled_BD[:, run.target : run.target + run.width] for run in answer.runs]
            parts = [torch.cat(columns, 1) if columns else pooled_BD[:, :0]]
            for at, (table, _, cols) in enumerate(answer.alone):
                low, high = answer.rows(asked, at)
                parts.append(torch.cat([sums[table][low:high, a:b] for a, b in cols], 1))
            if answer.own >= 0:
                own[answer.own] = parts
            else:
                found[answer.server] += [part.flatten() for part in parts]
        return found, own

    def _mean_lengths(self, asked: Asked) -> Iterator[tuple[int, Tensor]]:
        """The features whose parts are sums of what is to be a mean, and how many ids that is of."""
        for at in self._means:
            yield at, asked.lengths_FB[at].clamp(min=1).unsqueeze(1)

    def _answer(self, server: int, own: int, bank: Bank, written: set[int]) -> Answer:
        runs: list[Run] = []
        source = 0
        for stream in bank.pooled:
            assert stream.feature is not None
            for low, high in bank.pieces[stream.piece].cols:
                begin = self._begin[stream.feature]
                for target, added in ((begin + column, begin + column in written) for column in range(low, high)):
                    before = runs[-1] if runs else None
                    if before and before.target + before.width == target and before.added == added:
                        runs[-1] = replace(before, width=before.width + 1)
                    else:
                        runs.append(Run(source, target, 1, added))
                    source += 1
                written.update(range(begin + low, begin + high))
        pieces = [bank.pieces[stream.piece] for stream in bank.alone]
        alone = tuple((self._tables.index(piece.table), piece.band, piece.cols) for piece in pieces)
        return Answer(server, own, source, tuple(runs), alone)


def _own(layout: Layout, rank: int, server: int, bank: Bank) -> int:
    return layout.banks[rank].index(bank) if server == rank and bank.clients == (rank,) else -1


def _length(span: Span) -> int:
    return span[1] - span[0]

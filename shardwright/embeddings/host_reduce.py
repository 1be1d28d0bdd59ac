"""Parts of vectors that meet inside a host, so that what crosses to another host is their sum; gradients on the way
back.

Phases there: every rank of a host sends each other one the parts for the ranks of that one's place in their hosts; they
are added in the order of ranks. Back: the gradients of a sum go to all that had a part in it.

Shape legend: M samples of a meeting's clients, G those of all ranks, X columns of its sums, D of one bank's vectors.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwright.comm.pending import Pending
from shardwright.embeddings.layout import HostReduce, Layout
from shardwright.embeddings.vector_transport import (
    ColumnCopy,
    VectorTransport,
    gather_columns,
    plan_column_copies,
    scatter_columns,
)
from shardwright.kernels.buffers import BufferPool


@dataclass(frozen=True, slots=True)
class HostReducePart:
    """What one bank brings to the meeting at this rank."""

    rank: int
    group_index: int
    width: int
    column_copies: tuple[ColumnCopy, ...]


class HostReducer:
    """This rank's part in the meetings of its host."""

    def __init__(self, layout: Layout, vector_transport: VectorTransport, gradient_transport: VectorTransport) -> None:
        self._there, self._back, self._memory = vector_transport, gradient_transport, BufferPool()
        self._rank = rank = vector_transport.group.index
        self._num_ranks = len(layout.table_groups)
        self.local_reduce = mine = layout.host_reduces[rank]
        self._widths = {
            number: bank.width for number, bank in enumerate(layout.table_groups[rank]) if bank.needs_host_reduce
        }
        self._others: list[tuple[int, HostReduce]] = []  # that this rank brings something to
        for at, meeting in enumerate(layout.host_reduces):
            if at != rank and meeting is not None and any(one == rank for one, _ in meeting.contributors):
                self._others.append((at, meeting))
        spans, width = {}, 0
        for brought in mine.feature_columns if mine else ():
            wide = sum(end - start for start, end in brought[1])
            spans[brought] = (width, width + wide)
            width += wide
        written: set[int] = set()
        self._parts: list[HostReducePart] = []
        for at, number in mine.contributors if mine else ():
            bank = layout.table_groups[at][number]
            moved = plan_column_copies((spans[one] for one in bank.feature_columns), written)
            self._parts.append(HostReducePart(at, number, bank.width, moved))

    def reduce(self, pooled: Mapping[int, Tensor], batch_sizes: Sequence[int]) -> Pending[Tensor | None]:
        """The sums (M, X) of all parts for the clients of this rank's meeting; `pooled` has the (G, D) of each bank."""
        rows = {number: pooled[number].split(list(batch_sizes)) for number in self._widths}
        parts: list[list[Tensor]] = [[] for _ in range(self._num_ranks)]
        for rank, meeting in self._others:
            parts[rank] = [rows[number][client] for number in self._widths for client in meeting.clients]
        received, samples = [0] * self._num_ranks, self._samples(self.local_reduce, batch_sizes)
        for part in self._parts:
            received[part.rank] += samples * part.width if part.rank != self._rank else 0

        def met(flat: Tensor) -> Tensor | None:
            if self.local_reduce is None:
                return None
            found_MX = self._memory.allocate(samples, self.local_reduce.width, dtype=self._there.dtype)
            for part in self._parts:
                if part.rank == self._rank:
                    source = torch.cat([rows[part.group_index][client] for client in self.local_reduce.clients])
                else:
                    source, flat = flat[: samples * part.width].view(samples, part.width), flat[samples * part.width :]
                scatter_columns(found_MX, source, part.column_copies)
            return found_MX

        return self._there.all_to_all(parts, received).then(met)

    def broadcast(self, gradients_MX: Tensor | None, batch_sizes: Sequence[int]) -> Pending[dict[int, Tensor]]:
        """The (G, D) gradients of each bank's vectors, from those of the sums."""
        parts: list[list[Tensor]] = [[] for _ in range(self._num_ranks)]
        own: dict[int, Tensor] = {}
        for part in self._parts:
            assert gradients_MX is not None
            mine_MD = gather_columns(
                gradients_MX.new_empty(len(gradients_MX), part.width), gradients_MX, part.column_copies
            )
            if part.rank == self._rank:
                own[part.group_index] = mine_MD
            else:
                parts[part.rank].append(mine_MD)
        received = [0] * self._num_ranks
        for rank, meeting in self._others:
            received[rank] = self._samples(meeting, batch_sizes) * sum(self._widths.values())

        def spread(flat: Tensor) -> dict[int, Tensor]:
            blocks: dict[int, list[Tensor]] = {number: [flat] * self._num_ranks for number in self._widths}
            by_rank = flat.split(received)
            for rank, meeting in self._others:
                sizes, read = [batch_sizes[client] for client in meeting.clients], 0
                for number, width in self._widths.items():
                    given = by_rank[rank][read : read + sum(sizes) * width].view(sum(sizes), width)
                    read += given.numel()
                    _lay(blocks[number], meeting, given.split(sizes))
            for number, mine_MD in own.items():
                assert self.local_reduce is not None
                _lay(
                    blocks[number],
                    self.local_reduce,
                    mine_MD.split([batch_sizes[client] for client in self.local_reduce.clients]),
                )
            return {number: torch.cat(found) for number, found in blocks.items()}

        return self._back.all_to_all(parts, received).then(spread)

    def _samples(self, meeting: HostReduce | None, batches: Sequence[int]) -> int:
        return sum(batches[client] for client in meeting.clients) if meeting else 0


def _lay(blocks: list[Tensor], meeting: HostReduce, given: Sequence[Tensor]) -> None:
    for client, rows in zip(meeting.clients, given, strict=True):
        blocks[client] = rows

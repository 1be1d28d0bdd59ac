"""Add partial vectors inside a host, so that only their sum crosses to other hosts.

Reduce: every rank sends every other rank of its host the partial vectors for the samples of all ranks that have the
receiver's index in their hosts. The receiver adds them in the order of ranks. Broadcast: the gradients of a sum are
sent to all ranks that contributed to it. Each is one all-to-all on the wire lane, in which ranks of different hosts
exchange nothing.

Shape legend: M samples of a host reduce's clients, G samples of all ranks, X columns of its sums, D columns of one
table group's vectors.
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
    """The contribution of one table group to the host reduce at this rank."""

    rank: int
    group_index: int
    width: int
    column_copies: tuple[ColumnCopy, ...]


class HostReducer:
    """Runs the host reduce at this rank and contributes to the host reduces at other ranks of its host."""

    def __init__(self, layout: Layout, vector_transport: VectorTransport, gradient_transport: VectorTransport) -> None:
        self._vectors, self._gradients = vector_transport, gradient_transport
        self._memory = BufferPool(vector_transport.group.device)
        self._rank = rank = vector_transport.group.index
        self._num_ranks = len(layout.table_groups)
        self.local_reduce = local = layout.host_reduces[rank]
        self._widths = {
            index: group.width for index, group in enumerate(layout.table_groups[rank]) if group.needs_host_reduce
        }
        self._remote: list[tuple[int, HostReduce]] = []  # host reduces at other ranks to which this rank contributes
        for server, reduce in enumerate(layout.host_reduces):
            if server != rank and reduce is not None and any(source == rank for source, _ in reduce.contributors):
                self._remote.append((server, reduce))
        spans, width = {}, 0
        for feature_columns in local.feature_columns if local else ():
            size = sum(end - start for start, end in feature_columns[1])
            spans[feature_columns] = (width, width + size)
            width += size
        written_columns: set[int] = set()
        self._parts: list[HostReducePart] = []
        for source, index in local.contributors if local else ():
            group = layout.table_groups[source][index]
            copies = plan_column_copies((spans[pair] for pair in group.feature_columns), written_columns)
            self._parts.append(HostReducePart(source, index, group.width, copies))

    def reduce(self, pooled: Mapping[int, Tensor], batch_sizes: Sequence[int]) -> Pending[Tensor | None]:
        """The sums (M, X) for the clients of this rank's host reduce, or None if it has no host reduce.
        `pooled` has the vectors (G, D) of each table group of this rank, by index; `batch_sizes` are by rank."""
        rows = {index: pooled[index].split(list(batch_sizes)) for index in self._widths}
        messages: list[list[Tensor]] = [[] for _ in range(self._num_ranks)]
        for rank, reduce in self._remote:
            messages[rank] = [rows[index][client] for index in self._widths for client in reduce.clients]
        received_sizes, samples = [0] * self._num_ranks, self._num_samples(self.local_reduce, batch_sizes)
        for part in self._parts:
            received_sizes[part.rank] += samples * part.width if part.rank != self._rank else 0

        def add_parts(flat: Tensor) -> Tensor | None:
            if self.local_reduce is None:
                return None
            sums_MX = self._memory.allocate(samples, self.local_reduce.width, dtype=self._vectors.dtype)
            for part in self._parts:
                if part.rank == self._rank:
                    source = torch.cat([rows[part.group_index][client] for client in self.local_reduce.clients])
                else:
                    source, flat = flat[: samples * part.width].view(samples, part.width), flat[samples * part.width :]
                scatter_columns(sums_MX, source, part.column_copies)
            return sums_MX

        return self._vectors.all_to_all(messages, received_sizes).then(add_parts)

    def broadcast(self, gradients_MX: Tensor | None, batch_sizes: Sequence[int]) -> Pending[dict[int, Tensor]]:
        """The gradients (G, D) of each table group's vectors, by index, from the gradients of the sums."""
        messages: list[list[Tensor]] = [[] for _ in range(self._num_ranks)]
        local: dict[int, Tensor] = {}
        for part in self._parts:
            assert gradients_MX is not None
            part_MD = gather_columns(
                gradients_MX.new_empty(len(gradients_MX), part.width), gradients_MX, part.column_copies
            )
            if part.rank == self._rank:
                local[part.group_index] = part_MD
            else:
                messages[part.rank].append(part_MD)
        received_sizes = [0] * self._num_ranks
        for rank, reduce in self._remote:
            received_sizes[rank] = self._num_samples(reduce, batch_sizes) * sum(self._widths.values())

        def unpack(flat: Tensor) -> dict[int, Tensor]:
            blocks: dict[int, list[Tensor]] = {index: [flat] * self._num_ranks for index in self._widths}
            by_rank = flat.split(received_sizes)
            for rank, reduce in self._remote:
                sizes, read = [batch_sizes[client] for client in reduce.clients], 0
                for index, width in self._widths.items():
                    part_MD = by_rank[rank][read : read + sum(sizes) * width].view(sum(sizes), width)
                    read += part_MD.numel()
                    _set_blocks(blocks[index], reduce, part_MD.split(sizes))
            for index, part_MD in local.items():
                assert self.local_reduce is not None
                _set_blocks(
                    blocks[index],
                    self.local_reduce,
                    part_MD.split([batch_sizes[client] for client in self.local_reduce.clients]),
                )
            return {index: torch.cat(by_client) for index, by_client in blocks.items()}

        return self._gradients.all_to_all(messages, received_sizes).then(unpack)

    def _num_samples(self, reduce: HostReduce | None, batch_sizes: Sequence[int]) -> int:
        return sum(batch_sizes[client] for client in reduce.clients) if reduce else 0


def _set_blocks(blocks: list[Tensor], reduce: HostReduce, by_client: Sequence[Tensor]) -> None:
    for client, rows in zip(reduce.clients, by_client, strict=True):
        blocks[client] = rows

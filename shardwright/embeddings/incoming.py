"""Group the requests that a rank receives by fused table group.

Shape legend: B samples of one client, G samples of all clients of a table group, S streams, C clients.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from shardwright.embeddings.layout import TableGroup
from shardwright.kernels.arguments import POOLINGS, Ids
from shardwright.kernels.dedup import gather_segments
from shardwright.kernels.native import lengths_to_offsets


@dataclass(frozen=True, slots=True)
class IncomingRequest:
    """The requests to one table group, from all its clients."""

    ids: Ids
    batch_sizes: tuple[int, ...]  # samples of each client
    unpooled_counts: tuple[tuple[int, ...], ...]  # distinct rows of each unpooled stream, by client


def incoming_requests(
    table_groups: Sequence[TableGroup],
    messages: Sequence[Tensor],
    weights: Sequence[Tensor] | None,
    batch_sizes: Sequence[int],
) -> list[IncomingRequest]:
    """Group received messages into each table group's ids: by stream, then by client and sample.
    `messages`, `weights` (of ids) and `batch_sizes` have one entry per rank."""
    read = [0] * len(messages)
    weights_read = [0] * len(messages)
    incoming = []
    for group in table_groups:
        requests = []
        for client in group.clients:
            request = _ClientRequest.parse(messages[client], read[client], group, batch_sizes[client])
            read[client] = request.end
            requests.append(request)
        incoming.append(_concat(group, requests, messages, weights, weights_read))
    return incoming


@dataclass(frozen=True, slots=True)
class _ClientRequest:
    """One client's request to a table group: where its ids are in the client's message."""

    lengths_SB: Tensor  # of pooled streams
    counts: list[int]  # of unpooled streams
    begin: int
    sizes: list[int]  # of all streams

    @classmethod
    def parse(cls, words: Tensor, position: int, group: TableGroup, batch: int) -> "_ClientRequest":
        unpooled, pooled = len(group.unpooled), len(group.pooled)
        counts = words[position : position + unpooled].tolist()
        position += unpooled
        lengths_SB = words[position : position + pooled * batch].view(pooled, batch)
        return cls(lengths_SB, counts, position + pooled * batch, [*lengths_SB.sum(1).tolist(), *counts])

    @property
    def end(self) -> int:
        return self.begin + sum(self.sizes)

    @property
    def batch(self) -> int:
        return self.lengths_SB.shape[1]


def _concat(
    group: TableGroup,
    requests: Sequence[_ClientRequest],
    messages: Sequence[Tensor],
    weights: Sequence[Tensor] | None,
    weights_read: list[int],
) -> IncomingRequest:
    """The ids of all clients' requests to a group, by stream; advances `weights_read` of its clients."""
    pooled, streams = len(group.pooled), len(group.streams)
    batches = tuple(request.batch for request in requests)
    ends = list(accumulate(batches, initial=0))
    lengths_SG = torch.zeros(streams, ends[-1], dtype=torch.int64)
    for request, (start, end) in zip(requests, pairwise(ends), strict=True):
        lengths_SG[:pooled, start:end] = request.lengths_SB
        if end > start:
            lengths_SG[pooled:, start] = torch.tensor(request.counts, dtype=torch.int64)
    parts = [
        messages[client][request.begin : request.end] for client, request in zip(group.clients, requests, strict=True)
    ]
    values = torch.cat(parts) if parts else messages[0][:0]
    sizes_CS = torch.tensor([request.sizes for request in requests], dtype=torch.int64).view(len(requests), streams)
    begins_CS = (sizes_CS.flatten().cumsum(0) - sizes_CS.flatten()).view_as(sizes_CS)
    by_stream = (begins_CS.T.flatten(), sizes_CS.T.flatten())
    id_weights = None
    if weights is not None:  # unpooled streams are sent without weights: theirs are 1
        weight_parts = [weights[0][:0]]
        for client, request in zip(group.clients, requests, strict=True):
            size = sum(request.sizes[:pooled])
            weight_parts += [
                weights[client][weights_read[client] : weights_read[client] + size],
                weights[client].new_ones(sum(request.counts)),
            ]
            weights_read[client] += size
        id_weights = gather_segments(torch.cat(weight_parts), *by_stream)
    return IncomingRequest(
        Ids(
            gather_segments(values, *by_stream),
            lengths_to_offsets(lengths_SG),
            id_weights,
            [stream.shard_index for stream in group.streams],
            [POOLINGS.index(stream.pooling) for stream in group.streams],
        ),
        batches,
        tuple(tuple(request.counts[index] for request in requests) for index in range(streams - pooled)),
    )

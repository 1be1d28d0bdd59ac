"""Incoming requests of a rank, grouped by bank (fused table group).

Shape legend: B samples of one client, G samples of a bank's clients, S streams, C clients.
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
    """Incoming requests of one bank, from all its clients."""

    ids: Ids
    batch_sizes: tuple[int, ...]  # samples of each client
    unpooled_counts: tuple[tuple[int, ...], ...]  # distinct rows of each stream of rows, by client


def incoming_requests(
    table_groups: Sequence[TableGroup],
    messages: Sequence[Tensor],
    weights: Sequence[Tensor] | None,
    batch_sizes: Sequence[int],
) -> list[IncomingRequest]:
    """Group received messages into each bank's ids: by stream, then in the order of the clients' samples."""
    read = [0] * len(messages)
    weighed = [0] * len(messages)
    found = []
    for bank in table_groups:
        parts = []
        for client in bank.clients:
            part = _Part.of(messages[client], read[client], bank, batch_sizes[client])
            read[client] = part.end
            parts.append(part)
        found.append(_joined(bank, parts, messages, weights, weighed))
    return found


@dataclass(frozen=True, slots=True)
class _Part:
    """One client's request to a bank: where its ids are in the client's message."""

    lengths_SB: Tensor
    counts: list[int]  # of streams of rows
    begin: int
    sizes: list[int]  # of all streams

    @classmethod
    def of(cls, words: Tensor, at: int, bank: TableGroup, batch: int) -> "_Part":
        alone, pooled = len(bank.unpooled), len(bank.pooled)
        counts = words[at : at + alone].tolist()
        at += alone
        lengths_SB = words[at : at + pooled * batch].view(pooled, batch)
        return cls(lengths_SB, counts, at + pooled * batch, [*lengths_SB.sum(1).tolist(), *counts])

    @property
    def end(self) -> int:
        return self.begin + sum(self.sizes)

    @property
    def batch(self) -> int:
        return self.lengths_SB.shape[1]


def _joined(
    bank: TableGroup,
    parts: Sequence[_Part],
    by_rank: Sequence[Tensor],
    weights: Sequence[Tensor] | None,
    weighed: list[int],
) -> IncomingRequest:
    pooled, streams = len(bank.pooled), len(bank.streams)
    batches = tuple(part.batch for part in parts)
    ends = list(accumulate(batches, initial=0))
    lengths_SG = torch.zeros(streams, ends[-1], dtype=torch.int64)
    for part, (start, end) in zip(parts, pairwise(ends), strict=True):
        lengths_SG[:pooled, start:end] = part.lengths_SB
        if end > start:
            lengths_SG[pooled:, start] = torch.tensor(part.counts, dtype=torch.int64)
    values = torch.cat(
        [by_rank[client][part.begin : part.end] for client, part in zip(bank.clients, parts, strict=True)]
    )
    sizes_CS = torch.tensor([part.sizes for part in parts], dtype=torch.int64).view(len(parts), streams)
    begins_CS = (sizes_CS.flatten().cumsum(0) - sizes_CS.flatten()).view_as(sizes_CS)
    by_stream = (begins_CS.T.flatten(), sizes_CS.T.flatten())
    found = None
    if weights is not None:  # streams of rows have none: theirs are 1
        pieces = []
        for client, part in zip(bank.clients, parts, strict=True):
            size = sum(part.sizes[:pooled])
            pieces += [
                weights[client][weighed[client] : weighed[client] + size],
                weights[client].new_ones(sum(part.counts)),
            ]
            weighed[client] += size
        found = gather_segments(torch.cat(pieces), *by_stream)
    return IncomingRequest(
        Ids(
            gather_segments(values, *by_stream),
            lengths_to_offsets(lengths_SG),
            found,
            [stream.shard_index for stream in bank.streams],
            [POOLINGS.index(stream.pooling) for stream in bank.streams],
        ),
        batches,
        tuple(tuple(part.counts[at] for part in parts) for at in range(streams - pooled)),
    )

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
from shardwright.embeddings.layout import Layout, Meeting
from shardwright.embeddings.vector_transport import Run, Way, put, runs, take
from shardwright.kernels.buffers import Buffers


@dataclass(frozen=True, slots=True)
class Part:
    """What one bank brings to the meeting at this rank."""

    rank: int
    number: int
    width: int
    runs: tuple[Run, ...]


class Meetings:
    """This rank's part in the meetings of its host."""

    def __init__(self, layout: Layout, there: Way, back: Way) -> None:
        self._there, self._back, self._memory = there, back, Buffers()
        self._rank = rank = there.group.index
        self._num_ranks = len(layout.banks)
        self.mine = mine = layout.meetings[rank]
        self._widths = {number: bank.width for number, bank in enumerate(layout.banks[rank]) if bank.meets}
        self._others: list[tuple[int, Meeting]] = []  # that this rank brings something to
        for at, meeting in enumerate(layout.meetings):
            if at != rank and meeting is not None and any(one == rank for one, _ in meeting.parts):
                self._others.append((at, meeting))
        spans, width = {}, 0
        for brought in mine.brought if mine else ():
            wide = sum(end - start for start, end in brought[1])
            spans[brought] = (width, width + wide)
            width += wide
        written: set[int] = set()
        self._parts: list[Part] = []
        for at, number in mine.parts if mine else ():
            bank = layout.banks[at][number]
            moved = runs((spans[one] for one in bank.brought), written)
            self._parts.append(Part(at, number, bank.width, moved))

    def there(self, pooled: Mapping[int, Tensor], batches: Sequence[int]) -> Pending[Tensor | None]:
        """The sums (M, X) of all parts for the clients of this rank's meeting; `pooled` has the (G, D) of each bank."""
        rows = {number: pooled[number].split(list(batches)) for number in self._widths}
        parts: list[list[Tensor]] = [[] for _ in range(self._num_ranks)]
        for rank, meeting in self._others:
            parts[rank] = [rows[number][client] for number in self._widths for client in meeting.clients]
        received, samples = [0] * self._num_ranks, self._samples(self.mine, batches)
        for part in self._parts:
            received[part.rank] += samples * part.width if part.rank != self._rank else 0

        def met(flat: Tensor) -> Tensor | None:
            if self.mine is None:
                return None
            found_MX = self._memory.take(samples, self.mine.width, dtype=self._there.dtype)
            for part in self._parts:
                if part.rank == self._rank:
                    source = torch.cat([rows[part.number][client] for client in self.mine.clients])
                else:
                    source, flat = flat[: samples * part.width].view(samples, part.width), flat[samples * part.width :]
                put(found_MX, source, part.runs)
            return found_MX

        return self._there.sent(parts, received).then(met)

    def back(self, gradients_MX: Tensor | None, batches: Sequence[int]) -> Pending[dict[int, Tensor]]:
        """The (G, D) gradients of each bank's vectors, from those of the sums."""
        parts: list[list[Tensor]] = [[] for _ in range(self._num_ranks)]
        own: dict[int, Tensor] = {}
        for part in self._parts:
            assert gradients_MX is not None
            mine_MD = take(gradients_MX.new_empty(len(gradients_MX), part.width), gradients_MX, part.runs)
            if part.rank == self._rank:
                own[part.number] = mine_MD
            else:
                parts[part.rank].append(mine_MD)
        received = [0] * self._num_ranks
        for rank, meeting in self._others:
            received[rank] = self._samples(meeting, batches) * sum(self._widths.values())

        def spread(flat: Tensor) -> dict[int, Tensor]:
            blocks: dict[int, list[Tensor]] = {number: [flat] * self._num_ranks for number in self._widths}
            by_rank = flat.split(received)
            for rank, meeting in self._others:
                sizes, read = [batches[client] for client in meeting.clients], 0
                for number, width in self._widths.items():
                    given = by_rank[rank][read : read + sum(sizes) * width].view(sum(sizes), width)
                    read += given.numel()
                    _lay(blocks[number], meeting, given.split(sizes))
            for number, mine_MD in own.items():
                assert self.mine is not None
                _lay(blocks[number], self.mine, mine_MD.split([batches[client] for client in self.mine.clients]))
            return {number: torch.cat(found) for number, found in blocks.items()}

        return self._back.sent(parts, received).then(spread)

    def _samples(self, meeting: Meeting | None, batches: Sequence[int]) -> int:
        return sum(batches[client] for client in meeting.clients) if meeting else 0


def _lay(blocks: list[Tensor], meeting: Meeting, given: Sequence[Tensor]) -> None:
    for client, rows in zip(meeting.clients, given, strict=True):
        blocks[client] = rows

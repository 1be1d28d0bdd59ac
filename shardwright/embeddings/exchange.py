"""How ids reach the rows they name and vectors come back: the seam of EmbeddingBags, filled.

Phases, each a stage of the step:
    request     ids as positions; distinct rows where rows travel; cut by bands
    lengths     to every rank how much it will get
    ids         to every rank the lengths and ids of its banks, in one message
    lookup      each bank in one call, over the samples of all its clients
    meet        parts of vectors inside each host, where rows of a table are over its ranks
    vectors     pooled vectors, or parts of them, and distinct rows, to the ranks of their samples; there put together
    gradients   the same way back
    spread      gradients of vectors whose parts have met, to all that had a part
    update      each bank in one call (update.py: after replicas and column pieces have met)

Shape legend: N ids, F features, B samples of this rank, R ranks.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shardwright.comm import collective
from shardwright.comm.codec import Codec, Plain
from shardwright.comm.mesh import Group
from shardwright.comm.pending import Pending
from shardwright.embeddings.host_reduce import Meetings
from shardwright.embeddings.incoming import Wanted, incoming_requests
from shardwright.embeddings.layout import Bank, Layout, Piece
from shardwright.embeddings.local_shards import Holding
from shardwright.embeddings.outgoing import Asked, Requests
from shardwright.embeddings.responses import Answers
from shardwright.embeddings.row_order import ById, Order
from shardwright.embeddings.update import Arrived, Rule, Updates
from shardwright.embeddings.used_features import UsedFeatures
from shardwright.embeddings.vector_transport import Way
from shardwright.errors import UserError
from shardwright.jagged import Jagged, Vectors
from shardwright.kernels.arguments import faded
from shardwright.kernels.dedup import joined
from shardwright.kernels.gradient_sums import Sums
from shardwright.layers.embedding import EmbeddingBags
from shardwright.rectangle import Run
from shardwright.spec.optimizer import SparseOptimizer

# Samples, words of the message, weight of the samples, most numbers of rows with gradients in replicas, ids with and
# without weights, the stop signal of this rank (0: none).
HEADER = 7
NO_BATCH = -1.0  # in the place of the samples


@dataclass(frozen=True, slots=True)
class Request:
    """What this rank is about to ask, and what it tells every rank of it, or every rank told it."""

    asked: Asked
    headers_R: Tensor  # (R, HEADER)

    @property
    def stop(self) -> int:
        """The stop signal that some rank received, the same on all ranks: they stop after this batch; 0: none."""
        return int(self.headers_R[:, 6].max())


@dataclass(frozen=True, slots=True)
class Routed:
    asked: Asked
    batches: tuple[int, ...]  # samples of each rank
    wanted: tuple[Wanted, ...]  # by bank of this rank
    share: float  # of this rank's samples in all, by weight
    weight: float  # of all samples
    numbers: float  # at most so many make up the rows with gradients of all replicas that serve one rank each
    micro: tuple["Routed", ...] = ()  # with gradient accumulation: one per micro-batch

    @property
    def lookups(self) -> tuple["Routed", ...]:
        return self.micro or (self,)


@dataclass(frozen=True, slots=True)
class Looked:
    routed: Routed
    vectors: tuple[list[Tensor], ...]  # by bank
    met: Tensor | None = None  # sums of parts, where they meet


@dataclass(frozen=True, slots=True)
class Lanes:
    """The groups that messages go by, and how vectors and gradients are rounded on their way."""

    ids: Group
    wire: Group
    vectors: Codec = Plain()
    gradients: Codec = Plain()


class Sharded:
    """The tables of one EmbeddingBags over the ranks of a mesh."""

    def __init__(
        self, bags: EmbeddingBags, layout: Layout, orders: Sequence[Order], lanes: Lanes, device: torch.device
    ) -> None:
        self.bags, self.layout, self.lanes, self.orders = bags, layout, lanes, orders
        self.rank = lanes.wire.index
        self.banks = layout.banks[self.rank]
        self.holdings = [Holding(bank, bags, orders, device) for bank in self.banks]
        self._requests = Requests(bags, layout, orders, self.rank)
        self._answers = Answers(bags, layout, self.rank)
        self._there = Way(lanes.wire, lanes.vectors, self._answers.dtype)
        self._back = Way(lanes.wire, lanes.gradients, self._answers.dtype)
        self._meetings = Meetings(layout, self._there, self._back)
        self._updates = Updates(layout, self.holdings, lanes.wire, self._answers.dtype)
        self._used = UsedFeatures(bags, layout, self.holdings, lanes.wire)
        self._rows: dict[Piece, Tensor] = {}
        self._own = [at for at, bank in enumerate(self.banks) if bank.clients == (self.rank,)]

    def rows_of(self, piece: Piece) -> Run | Tensor:
        """Which rows of its table a piece of this rank has, a run of them or each by its number."""
        if isinstance(self.orders[piece.table], ById):
            return piece.rows
        if piece not in self._rows:
            small = self.bags.tables[piece.table].rows <= torch.iinfo(torch.int32).max
            rows = self.orders[piece.table].ids(torch.arange(*piece.rows))
            self._rows[piece] = rows.to(torch.int32 if small else torch.int64)
        return self._rows[piece]

    def request(self, features: Jagged, share: float, stop: int = 0) -> Request:
        """`share` is the weight of this rank's samples; any unit, the same on every rank."""
        with self.bags.named():
            asked = self._requests.of(features)
        num, weighted = len(features.values), asked.weights is not None
        more = (self._updates.most_numbers(features), num * weighted, num * (not weighted), stop)
        header_R = torch.tensor(
            [[features.batch_size, size, share, *more] for size in asked.sizes], dtype=torch.float64
        )
        return Request(asked, header_R)

    def lengths(self, request: Request) -> Pending[Request]:
        """The same, with the headers of all ranks."""
        told = collective.lengths(request.headers_R, self.lanes.ids)
        return told.then(lambda headers_R: Request(request.asked, _alike(headers_R)))

    def ended(self) -> Pending[Tensor]:
        """Tell all ranks that this one has no further batch, and hear that they have none."""
        header_R = torch.full((self.lanes.ids.size, HEADER), NO_BATCH, dtype=torch.float64)
        return collective.lengths(header_R, self.lanes.ids).then(_alike)

    def ids(self, request: Request) -> Pending[Routed]:
        asked, headers_R = request.asked, request.headers_R
        sent, received = asked.sizes, headers_R[:, 1].long().tolist()
        words = collective.all_to_all(asked.words, sent, received, self.lanes.ids)
        weights, (num_weighted, num_others) = None, headers_R[:, 4:6].sum(0).tolist()
        if num_weighted and num_others:
            raise UserError("ids have weights on some ranks and none on others; give them to all, or to none")
        if num_weighted:
            none = [torch.empty(0, dtype=self._answers.dtype)] * len(sent)
            weights = self._weights_under_way(asked.weights or none)
        batches = headers_R[:, 0].long().tolist()
        weight = float(headers_R[:, 2].sum())
        share = float(headers_R[self.rank, 2] / weight) if weight > 0 else 0.0

        def arrived(found: Tensor) -> Routed:
            weighed = None if weights is None else weights.wait()
            wanted = tuple(incoming_requests(self.banks, found.split(received), weighed, batches))
            return Routed(asked, tuple(batches), wanted, share, weight, float(headers_R[:, 3].sum()))

        return words.then(arrived)

    def asked(self, features: Jagged, share: float) -> Routed:
        """All that comes before the lookup, waited for."""
        return self.ids(self.lengths(self.request(features, share)).wait()).wait()

    def _weights_under_way(self, weights: Sequence[Tensor]) -> Pending[tuple[Tensor, ...]]:
        """Id weights in the order of their ids; the lengths of the message say nothing of them."""
        group = self.lanes.ids
        sent = [len(one) for one in weights]
        told = collective.lengths(torch.tensor(sent).unsqueeze(1), group).wait().flatten().tolist()
        on_way = collective.all_to_all(torch.cat(list(weights)), sent, told, group)
        return on_way.then(lambda flat: flat.split(told))

    def lookup(self, ids: Routed) -> Looked:
        found = [holding.lookup(wanted.ids) for holding, wanted in zip(self.holdings, ids.wanted, strict=True)]
        return Looked(ids, tuple(found))

    def meet(self, looked: Looked) -> Pending[Looked]:
        pooled = {number: one[0] for number, one in enumerate(looked.vectors) if one}
        on_way = self._meetings.there(pooled, looked.routed.batches)
        return on_way.then(lambda met: replace(looked, met=met))

    def vectors(self, looked: Looked) -> Pending[Vectors]:
        routed, mine = looked.routed, self._meetings.mine
        parts: list[list[Tensor]] = [[] for _ in self.layout.banks]
        own = {at: looked.vectors[at] for at in self._own}
        for at, bank in enumerate(self.banks):
            if at in own or bank.meets:
                continue
            wanted, (pooled, *alone) = routed.wanted[at], looked.vectors[at]
            rows = pooled.split(wanted.batches)
            each = [one.split(counts) for one, counts in zip(alone, wanted.alone, strict=True)]
            for place, client in enumerate(bank.clients):
                parts[client] += [rows[place], *(one[place] for one in each)]
        if mine is not None and looked.met is not None:
            for client, sums in zip(mine.clients, looked.met.split(self._met_by(routed)), strict=True):
                if client == self.rank:
                    own[len(self.banks)] = [sums]
                else:
                    parts[client].append(sums)
        on_way = self._there.sent(parts, self._answers.sizes(routed.asked))
        return on_way.then(lambda flat: self._answers.vectors(routed.asked, flat, own))

    def _met_by(self, routed: Routed) -> list[int]:
        """Samples of each client of this rank's meeting."""
        mine = self._meetings.mine
        return [routed.batches[client] for client in mine.clients] if mine else []

    def gradients(self, ids: Routed, gradients: Vectors) -> Pending[Arrived]:
        """The gradients of each bank's vectors, from all its clients, and of intra-host sums; for replicas that
        serve only this rank, their sums over all replicas. Each message begins with flags: the features that this
        rank's loss used."""
        parts, own = self._answers.gradients(ids.asked, gradients, self._used.flags(gradients))
        of_banks = {at: one for at, one in own.items() if at < len(self.banks)}
        summed = self._updates.begun({at: (ids.wanted[at].ids, one) for at, one in of_banks.items()}, ids.numbers)
        received = [self._used.num_words] * len(parts)
        for at, (bank, wanted) in enumerate(zip(self.banks, ids.wanted, strict=True)):
            for place, client in enumerate(bank.clients if at not in own and not bank.meets else ()):
                received[client] += wanted.batches[place] * bank.width
                counts = (one[place] for one in wanted.alone)
                received[client] += sum(count * dim for count, dim in zip(counts, _dims(bank), strict=True))
        mine = self._meetings.mine
        for client, samples in zip(mine.clients if mine else (), self._met_by(ids), strict=True):
            received[client] += samples * mine.width if mine and client != self.rank else 0
        on_way = self._back.sent(parts, received)
        return on_way.then(lambda flat: self._arrived(ids, flat.split(received), own, summed))

    def spread(self, ids: Routed, arrived: Arrived) -> Pending[Arrived]:
        """`arrived` with the gradients of banks whose vectors are parts."""
        on_way = self._meetings.back(arrived.met, ids.batches)
        return on_way.then(
            lambda found: replace(arrived, gradients={**arrived.gradients, **{at: [one] for at, one in found.items()}})
        )

    def _arrived(
        self,
        routed: Routed,
        by_rank: Sequence[Tensor],
        own: Mapping[int, list[Tensor]],
        summed: Mapping[int, Pending[Sums]],
    ) -> Arrived:
        read = [self._used.num_words] * len(by_rank)
        used = self._used.used_by_any(torch.stack([numbers[: self._used.num_words] for numbers in by_rank]))

        def taken(client: int, rows: int, dim: int) -> Tensor:
            read[client] += rows * dim
            return by_rank[client][read[client] - rows * dim : read[client]].view(rows, dim)

        found: dict[int, list[Tensor]] = {}
        for number, (bank, wanted) in enumerate(zip(self.banks, routed.wanted, strict=True)):
            if number in self._own or bank.meets:
                continue
            pooled, alone = [], [[] for _ in bank.alone]
            for at, client in enumerate(bank.clients):
                pooled.append(taken(client, wanted.batches[at], bank.width))
                for parts, counts, dim in zip(alone, wanted.alone, _dims(bank), strict=True):
                    parts.append(taken(client, counts[at], dim))
            found[number] = [torch.cat(pooled), *(torch.cat(parts) for parts in alone)]
        mine, met = self._meetings.mine, None
        if mine is not None:
            samples = zip(mine.clients, self._met_by(routed), strict=True)
            met = torch.cat(
                [
                    own[len(self.banks)][0] if client == self.rank else taken(client, num, mine.width)
                    for client, num in samples
                ]
            )
        found |= {at: one for at, one in own.items() if at < len(self.banks)}
        return Arrived(found, summed, used, met)

    def joined(self, parts: Sequence[tuple[Routed, Arrived]], fade: float) -> tuple[Routed, Arrived]:
        """What several batches asked of each bank as one batch; gradients of all but the last times `fade`."""
        numbers = [at for at, _ in enumerate(self.banks)]
        ids = [joined([routed.wanted[at].ids for routed, _ in parts]) for at in numbers]
        each = [zip(*(arrived.gradients[at] for _, arrived in parts), strict=True) for at in numbers]
        gradients = {at: [faded(tensors, fade) for tensors in each[at]] for at in numbers}
        most = sum(routed.numbers for routed, _ in parts)
        summed = self._updates.begun({at: (ids[at], gradients[at]) for at in self._own}, most)
        routed = parts[-1][0]
        wanted = tuple(replace(one, ids=ids[at]) for at, one in enumerate(routed.wanted))
        used = tuple(map(any, zip(*(arrived.used for _, arrived in parts), strict=True)))
        micro = tuple(routed for routed, _ in parts)
        return replace(routed, wanted=wanted, micro=micro), Arrived(gradients, summed, used)

    def update(
        self, ids: Routed, arrived: Arrived, optimizer: SparseOptimizer, steps: Mapping[str, int]
    ) -> Collection[str]:
        wanted = [wanted.ids for wanted in ids.wanted]
        if not all(arrived.used):
            lookups = [(one.asked, [wanted.alone for wanted in one.wanted]) for one in ids.lookups]
            wanted, arrived = self._used.restrict(lookups, wanted, arrived)
        self._updates.run(wanted, arrived, Rule(optimizer, steps))
        return {feature.name for feature, used in zip(self.bags.features, arrived.used, strict=True) if used}


def _alike(headers_R: Tensor) -> Tensor:
    """The headers, if all ranks have a batch, or none has."""
    ended = headers_R[:, 0] == NO_BATCH
    if ended.any() and not ended.all():
        lists = [", ".join(map(str, one.nonzero().flatten().tolist())) for one in (ended, ~ended)]
        raise UserError(
            f"the batches of ranks [{lists[0]}] have ended, and those of ranks [{lists[1]}] have not: "
            "give every rank as many batches; one without samples is a batch, too"
        )
    return headers_R


def _dims(bank: Bank) -> list[int]:
    return [bank.pieces[stream.piece].dim for stream in bank.alone]

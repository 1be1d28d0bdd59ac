"""What the stages of a step do where tables and samples lie on several ranks.

Each rank's loss is a mean over its own samples; times the rank's share of all samples, gradients add up to those of
the mean over the global batch.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from shardwright.comm.pending import Pending
from shardwright.dense.replicated import Replicated
from shardwright.dense.sharded import Shards
from shardwright.jagged import Vectors
from shardwright.layers.embedding import Exchange
from shardwright.runtime.accumulation import Parts, weight_of
from shardwright.step.slots import Slots, Under


class Ranks:
    """The parts of a step that know of other ranks; `beside`: what backward makes travels while it goes on."""

    def __init__(
        self,
        model: Any,
        dense: Replicated | Shards | None = None,
        parts: Parts | None = None,
        *,
        beside: bool = False,
        training: bool = True,
    ) -> None:
        self.model, self.dense, self.beside, self.training = model, dense, beside, training
        self.parts = parts or Parts()
        self._no_more: Pending[Any] | None = None

    @property
    def exchange(self) -> Exchange:
        return self.model.sparse.exchange

    def request(self, slots: Slots) -> None:
        slots["request"] = self.exchange.request(
            self.model.sparse.read(slots["batch"].features), weight_of(slots["batch"]), self.parts.poll_stop()
        )

    def lengths(self, slots: Slots) -> None:
        slots["lengths"] = Under("lengths", "ids", self.exchange.lengths(slots["request"]))

    def no_lengths(self) -> None:
        """Where the next batch's lengths would have gone out."""
        self._no_more = self.exchange.ended()

    def no_ids(self) -> None:
        """Where its ids would have: here all ranks learn who goes on, none while others wait for it to end its step."""
        if self._no_more is not None:
            self._no_more.wait()

    def ids(self, slots: Slots) -> None:
        self.parts.stop_agreed = self.parts.stop_agreed or slots["lengths"].stop
        slots["ids"] = Under("ids", "ids", self.exchange.ids(slots["lengths"]))

    def lookup(self, slots: Slots) -> None:
        with torch.no_grad():
            slots["looked"] = self.exchange.lookup(slots["ids"])

    def meet(self, slots: Slots) -> None:
        slots["met"] = Under("meet", "wire", self.exchange.meet(slots["looked"]))

    def vectors(self, slots: Slots) -> None:
        looked = slots["met" if "met" in slots else "looked"]
        slots["vectors"] = Under("vectors", "wire", self.exchange.vectors(looked).then(self._leaves))

    def _leaves(self, vectors: Vectors) -> Vectors:
        for tensor in vectors.tensors():
            tensor.requires_grad_(self.training)
        return vectors

    def backward(self, slots: Slots) -> Sequence[Under]:
        """Phases: gradients of vectors go out when the last of them is there, buckets of dense ones as they fill."""
        routed, vectors = slots["ids"], slots["vectors"]
        share = routed.share * self.parts.share(routed.weight)
        if self.parts.num > 1:
            routed = replace(routed, numbers=0.0)  # replicas meet when the step ends, not with each batch
        sent: list[Pending[Any]] = []

        def ready() -> None:
            sent.append(self.exchange.gradients(routed, vectors.gradients()))

        trained = self.model.sparse.trained
        if trained:
            vectors.receive(ready if self.beside else None)
        if self.dense is not None:
            self.dense.begin(beside=self.beside, last=self.parts.last)
        (slots["loss"] * share).backward()
        if not sent and trained:
            ready()
        arriving = "gradients.met" if "gradients.met" in slots else "gradients.tables"
        slots[arriving] = Under("gradients", "wire", sent[0]) if sent else None
        slots["reduced.top"] = slots["reduced.bottom"] = True
        if self.dense is None:
            return ()
        slots["reduced.bottom"] = Under("reduce", "dense", self.dense.end(), one=False)
        return [Under(*one) for one in self.dense.issued()]

    def spread(self, slots: Slots) -> None:
        arrived = slots["gradients.met"]
        spread = None if arrived is None else Under("spread", "wire", self.exchange.spread(slots["ids"], arrived))
        slots["gradients.tables"] = spread

    def update(self, slots: Slots) -> None:
        arrived = slots["gradients.tables"]
        if self.dense is not None:
            self.dense.go_on()
        if arrived is not None:
            self.parts.update(self.model.sparse, slots["ids"], arrived)

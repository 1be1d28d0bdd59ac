"""What the stages of a step do where tables and samples lie on several ranks.

Each rank's loss is a mean over its own samples; times the rank's share of all samples, gradients add up to those of
the mean over the global batch.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from shardwright.comm.pending import Pending
from shardwright.dense.replicated import ReplicatedModel
from shardwright.dense.sharded import ShardedModel
from shardwright.jagged import Vectors
from shardwright.layers.exchange import Exchange
from shardwright.runtime.accumulation import GradientAccumulation, batch_weight
from shardwright.step.slots import InFlight, Slots


class ShardedBindings:
    """The parts of a step that know of other ranks; `beside`: what backward makes travels while it goes on."""

    def __init__(
        self,
        model: Any,
        reducer: ReplicatedModel | ShardedModel | None = None,
        accumulation: GradientAccumulation | None = None,
        *,
        overlap: bool = False,
        training: bool = True,
    ) -> None:
        self.model, self.reducer, self.overlap, self.training = model, reducer, overlap, training
        self.accumulation = accumulation or GradientAccumulation()
        self._no_more: Pending[Any] | None = None

    @property
    def exchange(self) -> Exchange:
        return self.model.sparse.exchange

    def request(self, slots: Slots) -> None:
        slots["request"] = self.exchange.request(
            self.model.sparse.read(slots["batch"].features), batch_weight(slots["batch"]), self.accumulation.poll_stop()
        )

    def lengths(self, slots: Slots) -> None:
        slots["lengths"] = InFlight("lengths", "ids", self.exchange.announce(slots["request"]))

    def end_lengths(self) -> None:
        """Where the next batch's lengths would have gone out."""
        self._no_more = self.exchange.announce_end()

    def end_ids(self) -> None:
        """Where its ids would have: here all ranks learn who goes on, none while others wait for it to end its step."""
        if self._no_more is not None:
            self._no_more.wait()

    def ids(self, slots: Slots) -> None:
        self.accumulation.agreed_stop_signal = self.accumulation.agreed_stop_signal or slots["lengths"].stop_signal
        slots["ids"] = InFlight("ids", "ids", self.exchange.exchange_ids(slots["lengths"]))

    def lookup(self, slots: Slots) -> None:
        with torch.no_grad():
            slots["looked"] = self.exchange.lookup(slots["ids"])

    def meet(self, slots: Slots) -> None:
        slots["met"] = InFlight("meet", "wire", self.exchange.reduce_in_host(slots["looked"]))

    def vectors(self, slots: Slots) -> None:
        looked = slots["met" if "met" in slots else "looked"]
        slots["vectors"] = InFlight("vectors", "wire", self.exchange.exchange_vectors(looked).then(self._leaves))

    def _leaves(self, vectors: Vectors) -> Vectors:
        for tensor in vectors.tensors():
            tensor.requires_grad_(self.training)
        return vectors

    def backward(self, slots: Slots) -> Sequence[InFlight]:
        """Phases: gradients of vectors go out when the last of them is there, buckets of dense ones as they fill."""
        routed, vectors = slots["ids"], slots["vectors"]
        share = routed.share * self.accumulation.loss_factor(routed.total_weight)
        if self.accumulation.num_micro_batches > 1:
            routed = replace(routed, max_replica_values=0.0)  # replicas meet when the step ends, not with each batch
        sent: list[Pending[Any]] = []

        def ready() -> None:
            sent.append(self.exchange.exchange_gradients(routed, vectors.gradients()))

        trained = self.model.sparse.trained
        if trained:
            vectors.receive(ready if self.overlap else None)
        if self.reducer is not None:
            self.reducer.begin_backward(overlap=self.overlap, is_last_micro_batch=self.accumulation.is_last)
        (slots["loss"] * share).backward()
        if not sent and trained:
            ready()
        arriving = "gradients.met" if "gradients.met" in slots else "gradients.tables"
        slots[arriving] = InFlight("gradients", "wire", sent[0]) if sent else None
        slots["reduced.top"] = slots["reduced.bottom"] = True
        if self.reducer is None:
            return ()
        slots["reduced.bottom"] = InFlight("reduce", "dense", self.reducer.end_backward(), is_single_event=False)
        return [InFlight(*one) for one in self.reducer.pop_issued()]

    def spread(self, slots: Slots) -> None:
        arrived = slots["gradients.met"]
        spread = (
            None
            if arrived is None
            else InFlight("spread", "wire", self.exchange.broadcast_in_host(slots["ids"], arrived))
        )
        slots["gradients.tables"] = spread

    def update(self, slots: Slots) -> None:
        arrived = slots["gradients.tables"]
        if self.reducer is not None:
            self.reducer.continue_reduction()
        if arrived is not None:
            self.accumulation.update_tables(self.model.sparse, slots["ids"], arrived)

"""The stage functions of a step over several ranks, where tables are sharded and each rank has its local batch.

Each rank's loss is the mean over its local batch, multiplied by the rank's share of the global batch's weight. The
gradients of all ranks then add up to the gradients of the mean over the global batch.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from shardwright.comm.pending import Pending
from shardwright.dense.replicated import ReplicatedModel
from shardwright.dense.sharded import ShardedModel
from shardwright.jagged import Vectors
from shardwright.layers.exchange import Exchange
from shardwright.planner.step.stages import IDS_AFTER, has_host_reduce, recommendation_stages
from shardwright.runtime.accumulation import GradientAccumulation, batch_weight
from shardwright.spec.plan import Stage
from shardwright.step.slots import InFlight, Slots, StageFunction


def sharded_stages(plan_stages: Sequence[Stage], *, training: bool = True) -> tuple[Stage, ...]:
    """The stages of a step over several ranks, as the planner lists them.

    The plan's stages determine after which stage the next batch's ids are issued, and whether there is a host reduce.
    """
    predecessor = next((stage.name for stage in plan_stages if "state.wire" in stage.writes), "")
    after = next((key for key, stage in IDS_AFTER.items() if stage == predecessor), "read")
    stages = recommendation_stages(prefetch=False, ids_after=after, host_reduce=has_host_reduce(plan_stages))
    if training:
        return stages
    evaluation = ("read", "to_device", "request", "lengths", "ids", "lookup", "meet", "vectors", "forward", "emit")
    return tuple(stage for stage in stages if stage.name in evaluation)


class ShardedBindings:
    """The stage functions of a step over several ranks; `StepBindings` has those that one process needs, too.

    `stages`: the plan's stages. `overlap`: gradients are sent while the backward pass continues.
    """

    def __init__(
        self,
        model: Any,
        stages: Sequence[Stage],
        reducer: ReplicatedModel | ShardedModel | None = None,
        accumulation: GradientAccumulation | None = None,
        *,
        overlap: bool = False,
        training: bool = True,
    ) -> None:
        self.model, self.stages, self.reducer = model, sharded_stages(stages, training=training), reducer
        self.overlap, self.training = overlap, training
        self.accumulation = accumulation or GradientAccumulation()
        self._end_announcement: Pending[Any] | None = None

    @property
    def exchange(self) -> Exchange:
        return self.model.sparse.exchange

    @property
    def functions(self) -> dict[str, StageFunction]:
        """The function of each stage that differs from, or does not exist in, one process."""
        return {
            "request": self.build_request,
            "lengths": self.announce_request,
            "ids": self.exchange_ids,
            "lookup": self.lookup,
            "meet": self.reduce_in_host,
            "vectors": self.exchange_vectors,
            "backward": self.backward,
            "spread": self.broadcast_in_host,
            "update": self.update_tables,
        }

    @property
    def end_functions(self) -> dict[str, Callable[[], None]]:
        """By stage, the function that runs in its place when there are no more batches."""
        return {"lengths": self.announce_end, "ids": self.wait_for_end}

    def build_request(self, slots: Slots) -> None:
        slots["request"] = self.exchange.request(
            self.model.sparse.read(slots["batch"].features), batch_weight(slots["batch"]), self.accumulation.poll_stop()
        )

    def announce_request(self, slots: Slots) -> None:
        slots["lengths"] = InFlight("lengths", "ids", self.exchange.announce(slots["request"]))

    def announce_end(self) -> None:
        """At the end of the data, in place of the next lengths: announce on lane `ids` that no batch follows."""
        self._end_announcement = self.exchange.announce_end()

    def wait_for_end(self) -> None:
        """At the end of the data, in place of the next batch's ids: check that the data has ended on all ranks.

        Waiting earlier could deadlock: other ranks may still need this rank for the current step.
        """
        if self._end_announcement is not None:
            self._end_announcement.wait()

    def exchange_ids(self, slots: Slots) -> None:
        self.accumulation.agreed_stop_signal = self.accumulation.agreed_stop_signal or slots["lengths"].stop_signal
        slots["ids"] = InFlight("ids", "ids", self.exchange.exchange_ids(slots["lengths"]))

    def lookup(self, slots: Slots) -> None:
        with torch.no_grad():
            slots["looked"] = self.exchange.lookup(slots["ids"])

    def reduce_in_host(self, slots: Slots) -> None:
        slots["met"] = InFlight("meet", "wire", self.exchange.reduce_in_host(slots["looked"]))

    def exchange_vectors(self, slots: Slots) -> None:
        result = slots["met" if "met" in slots else "looked"]
        slots["vectors"] = InFlight("vectors", "wire", self.exchange.exchange_vectors(result).then(self._set_grad))

    def _set_grad(self, vectors: Vectors) -> Vectors:
        """Make the vectors autograd leaves that require gradients, if training."""
        for tensor in vectors.tensors():
            tensor.requires_grad_(self.training)
        return vectors

    def backward(self, slots: Slots) -> Sequence[InFlight]:
        """Run the backward pass, overlapped with its communication.

        Gradients of vectors are sent on lane `wire` once all exist; buckets or blocks of dense gradients are reduced as
        they fill.
        """
        routed, vectors = slots["ids"], slots["vectors"]
        share = routed.share * self.accumulation.loss_factor(routed.total_weight)
        if self.accumulation.num_micro_batches > 1:
            routed = replace(routed, max_replica_values=0.0)  # replicas are summed once per step, not per micro-batch
        exchanges: list[Pending[Any]] = []

        def send_gradients() -> None:
            exchanges.append(self.exchange.exchange_gradients(routed, vectors.gradients()))

        trains_tables = self.model.sparse.trained
        if trains_tables:
            vectors.receive(send_gradients if self.overlap else None)
        if self.reducer is not None:
            self.reducer.begin_backward(overlap=self.overlap, is_last_micro_batch=self.accumulation.is_last)
        (slots["loss"] * share).backward()
        if not exchanges and trains_tables:
            send_gradients()
        slot = "gradients.met" if "gradients.met" in slots else "gradients.tables"
        slots[slot] = InFlight("gradients", "wire", exchanges[0]) if exchanges else None
        slots["reduced.top"] = slots["reduced.bottom"] = True
        if self.reducer is None:
            return ()
        slots["reduced.bottom"] = InFlight("reduce", "dense", self.reducer.end_backward(), is_single_event=False)
        return [InFlight(*work) for work in self.reducer.pop_issued()]

    def broadcast_in_host(self, slots: Slots) -> None:
        gradients = slots["gradients.met"]
        broadcast = (
            None
            if gradients is None
            else InFlight("spread", "wire", self.exchange.broadcast_in_host(slots["ids"], gradients))
        )
        slots["gradients.tables"] = broadcast

    def update_tables(self, slots: Slots) -> None:
        gradients = slots["gradients.tables"]
        if self.reducer is not None:
            self.reducer.continue_reduction()
        if gradients is not None:
            self.accumulation.update_tables(self.model.sparse, slots["ids"], gradients)

"""The functions of a training step's stages, for one rank or many, with or without tables.

A stage is data (`spec/plan.py: Stage`); `StepBindings` binds it to the function of the same name, which works on the
slots of one batch. Each function declares the slots that it accesses.

Each rank's loss is the mean over its local batch, multiplied by the rank's share of the global batch's weight. The
gradients of all ranks then add up to the gradients of the mean over the global batch.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from shardwright.comm.mesh import Mesh
from shardwright.comm.pending import Pending, ready
from shardwright.comm.transfer import Transfer
from shardwright.dense.sharded import ShardedModel
from shardwright.jagged import Batch, Vectors, check_batch
from shardwright.layers.exchange import Announced, Announcer
from shardwright.layers.loss import checked_labels
from shardwright.measure.describe import sparse_of
from shardwright.planner.step.stages import (
    REDUCED_SLOTS,
    has_copies,
    has_host_reduce,
    has_prefetch,
    requests_from_host,
)
from shardwright.runtime.accumulation import GradientAccumulation, loss_weight
from shardwright.runtime.chunk_stages import pipeline_functions
from shardwright.runtime.dense_layout import DenseLayout
from shardwright.runtime.finite_loss import check_loss
from shardwright.runtime.host_batches import HostBatches
from shardwright.runtime.optimizer_state import trainable_names
from shardwright.runtime.outputs import BatchParts, Output, Scores
from shardwright.runtime.table_stages import (
    PrefetchedRows,
    copy_functions,
    disk_functions,
    host_batch_functions,
    host_functions,
)
from shardwright.spec.calls import Call
from shardwright.spec.lanes import DENSE, WIRE
from shardwright.spec.pipeline import Chunk
from shardwright.spec.plan import Contract, Stage
from shardwright.step.slots import Binding, EndOfData, InFlight, Slots, accesses, contract_of, in_flight


class StepBindings:
    """Binds each stage of a model's step to its function; `step/executor.py` runs them."""

    def __init__(
        self,
        model: Any,
        stages: Sequence[Stage],
        mesh: Mesh,
        announcer: Announcer,
        layout: DenseLayout,
        accumulation: GradientAccumulation | None = None,
        *,
        autocast_dtype: torch.dtype = torch.float32,
        overlap: bool = False,
    ) -> None:
        """`announcer`: the exchange of the model's tables, if it has any; `layout`: of the dense model; `accumulation`:
        micro-batches of a step. With `overlap`, gradients are sent while the backward pass continues."""
        self.model = model
        self.stages = tuple(stages)
        self.mesh = mesh
        self.announcer = announcer
        self.layout, self.reducers, self.pipeline = layout, layout.reducers, layout.pipeline
        self.accumulation = accumulation or GradientAccumulation()
        self.autocast_dtype = autocast_dtype
        self.overlap = overlap
        self.training = any(stage.name == "step" for stage in stages)
        self.optimizer: torch.optim.Optimizer | None = None
        self.transfer = Transfer(mesh.device) if mesh.device.type == "cuda" else None
        self.batches = BatchParts(())
        self._parts: Iterator[Batch] = iter(())
        self.outputs: deque[Output] = deque()
        self.keyed_draws: Callable[..., AbstractContextManager[None]] = lambda *_: nullcontext()
        self.num_steps = 0
        self.prefetched = PrefetchedRows(model)
        self.inside_step = False  # whether micro-batches of an unfinished step have run
        self.is_watched = False  # whether the heartbeat reports this rank's stage and step to other ranks
        self.trainable_names = trainable_names(model)
        # Whether a step's global batch has samples beyond this batch: of other ranks, or of other micro-batches.
        self._is_partial_batch = partial_batch = mesh.size > 1 or self.accumulation.num_micro_batches > 1
        self.host_batches = HostBatches(model, allow_zero_weights=partial_batch) if self.transfer else None
        self._end_announcement: Pending[Any] = ready(None)
        waits_for_lengths = next(name for name in ("ids", "weigh", "forward") if name in {s.name for s in stages})
        end_functions: Mapping[str, Callable[[], None]] = {
            "lengths": self.announce_end,
            waits_for_lengths: self.wait_for_end,
        }
        functions = self.functions(model, stages, self.pipeline.chunks.values() if self.pipeline is not None else ())
        self.bindings = {
            stage.name: Binding(
                partial(self._run, stage.name, functions[stage.name]), end_functions.get(stage.name, lambda: None)
            )
            for stage in self.stages
        }

    @property
    def sharded_models(self) -> list[ShardedModel]:
        return [reducer for reducer in self.reducers if isinstance(reducer, ShardedModel)]

    @staticmethod
    def functions(
        model: nn.Module, stages: Sequence[Stage], chunks: Iterable[Chunk] = ()
    ) -> Mapping[str, Callable[["StepBindings", Slots], Any]]:
        """The function of each stage of this model's step; `chunks`: of a pipeline, on this rank."""
        functions: dict[str, Callable[..., Any]] = {
            "read": StepBindings.read_batch,
            "to_device": StepBindings.copy_to_device,
            "request": StepBindings.build_request,
            "lengths": StepBindings.announce_request,
            "step": StepBindings.step_optimizer,
            "emit": StepBindings.emit,
        }
        if chunks := tuple(chunks):
            return {**functions, **pipeline_functions(chunks)}
        if sparse_of(model) is None:
            return functions | {"forward": StepBindings.forward_batch, "backward": StepBindings.backward_dense}
        functions |= {
            "ids": StepBindings.exchange_ids,
            "lookup": StepBindings.lookup,
            "vectors": StepBindings.exchange_vectors,
            "forward": StepBindings.forward,
            "backward": StepBindings.backward,
            "update": StepBindings.update_tables,
        }
        functions |= disk_functions() if has_prefetch(stages) else {}
        functions |= copy_functions(stages) if has_copies(stages) else {}
        functions |= host_batch_functions() if requests_from_host(stages) else {}
        functions |= host_functions() if has_host_reduce(stages) else {}
        return functions

    @staticmethod
    def contracts(model: nn.Module, stages: Sequence[Stage], chunks: Iterable[Chunk] = ()) -> dict[str, Contract]:
        """By stage, the slots that its function accesses."""
        functions = StepBindings.functions(model, stages, chunks)
        return {name: contract_of(function) for name, function in functions.items()}

    def read_from(self, loader: Iterable[Batch]) -> BatchParts:
        """Read the batches of this loader from now on."""
        self.clear()
        self.batches = BatchParts(loader, self.accumulation.parts)
        self._parts = iter(self.batches)
        return self.batches

    def clear(self) -> None:
        """Discard what was read ahead, an unfinished step, and outputs that nobody has taken."""
        self.accumulation.clear()
        self.outputs.clear()
        self.inside_step = False
        self.prefetched.clear()
        for tables in self.model.sparse.exchange.copied_tables if has_copies(self.stages) and self.training else ():
            tables.cancel()

    def _run(
        self, stage: str, function: Callable[["StepBindings", Slots], Sequence[InFlight] | None], slots: Slots
    ) -> Sequence[InFlight] | None:
        if self.is_watched and self.mesh.heartbeat is not None:
            self.mesh.heartbeat.stage, self.mesh.heartbeat.step = stage, self.num_steps + 1
        for reducer in self.reducers:
            reducer.stages.tracer = slots.tracer
        for exchange in self.layout.experts.exchanges:
            exchange.tracer = slots.tracer
        return function(self, slots)

    # Batches

    @accesses(writes=("host_batch", "weight"))
    def read_batch(self, slots: Slots) -> None:
        if self.mesh.size == 1:  # several ranks announce the signal to each other
            self.accumulation.agreed_stop_signal = self.accumulation.agreed_stop_signal or self.accumulation.poll_stop()
        if self.host_batches is not None:
            self.host_batches.end_last()
        batch, slots.ends_data = self.accumulation.next_batch(self._parts)
        if batch is None:
            raise EndOfData
        if self.host_batches is None or self._is_partial_batch:
            check_batch(batch, allow_zero_weights=self._is_partial_batch)
        if self.host_batches is None:
            slots["host_batch"] = batch
        else:
            slots.issue("host_batch", self.host_batches.prepare(batch))
        slots["weight"] = loss_weight(self.model.loss, batch) if self._is_partial_batch else 1.0  # else without effect

    @accesses(reads=("host_batch",), writes=("batch",))
    def copy_to_device(self, slots: Slots) -> None:
        batch = slots["host_batch"]
        slots.issue("batch", self.transfer.copy(batch) if self.transfer else ready(batch))

    @accesses(reads=("batch", "weight"), writes=("request",))
    def build_request(self, slots: Slots) -> None:
        self.request(slots, slots["batch"])

    def request(self, slots: Slots, batch: Batch) -> None:
        sparse = sparse_of(self.model)
        ids = sparse.read(batch.features) if sparse is not None else None
        stop = self.accumulation.poll_stop() if self.mesh.size > 1 else 0
        slots["request"] = self.announcer.request(ids, slots["weight"], stop)

    @accesses(reads=("request",), writes=("lengths",))
    def announce_request(self, slots: Slots) -> None:
        slots.issue("lengths", self.announcer.announce(slots["request"]))

    def announce_end(self) -> None:
        """At the end of the data, in place of the next lengths: announce on lane `ids` that no batch follows."""
        self._end_announcement = self.announcer.announce_end()

    def wait_for_end(self) -> None:
        """At the end of the data, where the next lengths would be needed: check that it has ended on all ranks.

        Waiting earlier could deadlock: other ranks may still need this rank for the current step.
        """
        self._end_announcement.wait()

    def agree_to_stop(self, announced: Announced) -> None:
        """Begin no further step if some rank has received a stop signal."""
        self.accumulation.agreed_stop_signal = self.accumulation.agreed_stop_signal or announced.stop_signal

    @accesses(reads=("batch", "logits", "loss"))
    def emit(self, slots: Slots) -> None:
        weight = loss_weight(self.model.loss, slots["batch"]) if self.batches.num > 1 else 1.0
        self.add_output(slots.call, slots["batch"], Scores(slots["loss"].detach(), slots["logits"], weight))

    def add_output(self, call: Call, batch: Batch, scores: Scores | None) -> None:
        """Yield the output of a batch once those of all its parts are here."""
        self.num_steps += call.is_last
        self.inside_step = not call.is_last
        joined = self.batches.join(batch, scores)
        if joined is not None:
            self.outputs.append(Output(self.num_steps, *joined))

    # Tables

    @accesses(reads=("lengths",), writes=("ids",))
    def exchange_ids(self, slots: Slots) -> None:
        announced = slots["lengths"]
        self.agree_to_stop(announced)
        slots.issue("ids", self.model.sparse.exchange.exchange_ids(announced))

    @accesses(reads=("ids", "state.tables"), writes=("looked",))
    def lookup(self, slots: Slots) -> None:
        self.lookup_rows(slots)

    def lookup_rows(self, slots: Slots) -> None:
        with torch.no_grad():
            is_trained = self.training and self.model.sparse.trained
            slots["looked"] = self.model.sparse.exchange.lookup(slots["ids"], training=is_trained)
            if is_trained:
                self.prefetched.add(slots["ids"])

    @accesses(reads=("looked",), writes=("vectors",))
    def exchange_vectors(self, slots: Slots) -> None:
        self.issue_vectors(slots, slots["looked"])

    def issue_vectors(self, slots: Slots, looked_up: Any) -> None:
        pending = self.model.sparse.exchange.exchange_vectors(looked_up).then(self._set_grad)
        slots.issue("vectors", pending)

    def _set_grad(self, vectors: Vectors) -> Vectors:
        """Make the vectors autograd leaves that require gradients, if training."""
        for tensor in vectors.tensors():
            tensor.requires_grad_(self.training)
        return vectors

    @accesses(reads=("ids", "gradients.tables"), writes=("state.tables",))
    def update_tables(self, slots: Slots) -> None:
        gradients = slots["gradients.tables"]
        for reducer in self.reducers:
            reducer.continue_reduction()
        is_used = any(gradient is not None for gradient in gradients)
        if is_used:
            self.accumulation.update_tables(self.model.sparse, slots["ids"], gradients)
        self.prefetched.release(slots["ids"], written=is_used)

    # Dense model

    @accesses(reads=("batch", "vectors", "state.dense"), writes=("logits", "loss"))
    def forward(self, slots: Slots) -> None:
        vectors = self.model.sparse.outputs(slots.get_lazy("vectors"))
        self._forward(slots, lambda: self.model.dense(slots["batch"], vectors))

    @accesses(reads=("batch", "lengths", "state.dense"), writes=("logits", "loss"))
    def forward_batch(self, slots: Slots) -> None:
        self.agree_to_stop(slots["lengths"])
        self._forward(slots, lambda: self.model(slots["batch"]))

    def _forward(self, slots: Slots, run_model: Callable[[], Any]) -> None:
        slots["logits"], slots["loss"] = self.run_with_loss(slots.call, run_model, slots["batch"])

    def run_with_loss(self, call: Call, run: Callable[[], Any], batch: Batch, chunk: int = 0) -> tuple[Any, Tensor]:
        """The model's output and the loss."""
        logits = self.run_dense(call, run, chunk, batch if self.pipeline is None else None)
        with torch.set_grad_enabled(self.training):
            if self.autocast_dtype == torch.bfloat16:  # losses and metrics are computed in float32
                logits = tree_map_only(Tensor, lambda x: x.float() if x.dtype == torch.bfloat16 else x, logits)
            loss = self._loss(logits, batch).clone()  # no view: `detach_` may free its graph
        return tree_map_only(Tensor, Tensor.detach, logits), loss

    def run_dense(self, call: Call, run: Callable[[], Any], chunk: int = 0, batch: Batch | None = None) -> Any:
        """Run the dense model, or a chunk of it; `batch`: if all of it sees these samples."""
        if call.micro == 0 and chunk == 0 and self.optimizer is not None:
            self.optimizer.zero_grad(set_to_none=True)
        autocast = torch.autocast(
            self.mesh.device.type,
            self.autocast_dtype,
            enabled=self.autocast_dtype == torch.bfloat16,
            cache_enabled=not self.sharded_models,
        )
        with torch.set_grad_enabled(self.training), autocast, self.keyed_draws(call, batch):
            return run()

    def _loss(self, logits: Any, batch: Batch) -> Tensor:
        """The loss of a batch; 0, not NaN, for a local batch or micro-batch without samples or with zero weights."""
        if self._is_partial_batch and batch.weights is not None and not bool(batch.weights.any()):
            batch = replace(batch, weights=None)
        with checked_labels(() if self.host_batches is None else self.host_batches.checked_losses):
            loss = self.model.loss(logits, batch)
        if not batch.batch_size:
            return loss.nan_to_num(0.0)
        # On a GPU this would synchronize every step; there `runtime/run` checks the metrics it logs instead.
        if self.training and loss.device.type == "cpu":
            check_loss(self.model, loss, self.num_steps + 1)
        return loss

    @accesses(reads=("ids", "lengths", "loss", "vectors"), writes=("gradients.tables", *REDUCED_SLOTS))
    def backward(self, slots: Slots) -> None:
        slots["gradients.tables"] = self.backward_with(slots, slots["ids"], slots["vectors"])

    @accesses(reads=("lengths", "loss"), writes=REDUCED_SLOTS)
    def backward_dense(self, slots: Slots) -> None:
        self.backward_with(slots)

    def backward_with(self, slots: Slots, ids: Any = None, vectors: Vectors | None = None) -> Any:
        """Run the backward pass, overlapped with its communication; returns the exchange of the vectors' gradients.

        Gradients of vectors are sent on lane `wire` once all exist; buckets or blocks of dense gradients are reduced as
        they fill.
        """
        announced = slots["lengths"]
        for sharded in self.sharded_models:
            sharded.finish_reductions()
        share = announced.share * self.accumulation.loss_factor(
            announced.total_weight, is_first=slots.call.micro == 0, is_last=slots.call.is_last
        )
        trains_tables = vectors is not None and self.model.sparse.trained
        is_whole_step = self.accumulation.num_micro_batches == 1
        exchanges: list[Pending[Any]] = []

        def send_gradients() -> None:
            assert vectors is not None
            exchange = self.model.sparse.exchange
            exchanges.append(exchange.exchange_gradients(ids, vectors.gradients(), sum_replicas=is_whole_step))

        if vectors is not None and trains_tables:
            vectors.receive(send_gradients if self.overlap else None)
        reduction = self.run_backward(slots.call, (slots["loss"] * share).backward)
        slots["loss"].detach_()
        if not exchanges and trains_tables:
            send_gradients()
        gradients = in_flight("gradients", WIRE, exchanges[0]) if exchanges else None
        slots["reduced.top"] = slots["reduced.bottom"] = True  # the gradients are in each parameter's .grad
        if reduction is not None:
            slots["reduced.bottom"] = reduction
        return gradients

    def run_backward(self, call: Call, run: Callable[[], None], chunk: int = 0) -> InFlight | None:
        """Run a backward pass of a chunk of the dense model, or of all of it; returns the reductions of its gradients.

        They are stages of their own inside this one (`InnerStages`), and so are the waits for them.
        """
        reducer = self.reducers[chunk] if self.reducers else None
        if reducer is not None:
            reducer.begin_backward(overlap=self.overlap, is_last_micro_batch=call.is_last)
        with self.keyed_draws(call):
            run()
        if reducer is None:
            return None
        reducer.end_backward()
        return InFlight(call.stage.name, DENSE, Pending(reducer.finish_reductions), is_single_event=False)

    @accesses(reads=REDUCED_SLOTS, writes=("state.dense",))
    def step_optimizer(self, slots: Slots) -> None:
        for slot in slots.reads:
            _ = slots[slot]  # waits until each parameter's .grad is reduced over all ranks
        if self.optimizer is not None:
            self.optimizer.step()

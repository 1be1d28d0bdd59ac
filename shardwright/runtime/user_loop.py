"""User training loops over several ranks: the stages of a step run inside `model(batch)` and `loss.backward()`.

Phases: forward          stages "request" and "lengths" announce the batch (a model without tables: in the loader); then
                         "ids" to "vectors"; the vectors are autograd leaves
        backward         dense gradients are reduced as buckets fill; stage "gradients" runs once all of them exist
        end of backward  "spread", "update", then wait for the dense gradients; the user's loop steps their optimizer
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from shardwright.comm.heartbeat import PeerLost
from shardwright.dense.sharded import ShardedModel
from shardwright.errors import UserError
from shardwright.jagged import Batch, Jagged, Vectors, check_batch
from shardwright.kernels.compile_exempt import disable_compile
from shardwright.measure.describe import sparse_of
from shardwright.planner.step.stages import has_copies, has_host_reduce
from shardwright.runtime.accumulation import loss_weight
from shardwright.runtime.bindings import StepBindings
from shardwright.runtime.supported import EXACT_REMEDY
from shardwright.spec.calls import Call, last_readers
from shardwright.spec.lanes import WIRE
from shardwright.spec.plan import Stage
from shardwright.step.slots import Binding, Slots, StepValues, run_stage
from shardwright.step.tracer import Tracer


class UserLoop:
    """Trains sharded tables and reduces dense gradients inside the forward and backward of a user training loop."""

    def __init__(self, step: StepBindings) -> None:
        self._step, self._overlap = step, step.overlap
        self._sparse: Any = sparse_of(step.model)
        self._mesh = step.mesh
        self._reducer, self._dense_parameters = next(iter(step.reducers), None), step.layout.parameters
        gradients = "gradients.met" if has_host_reduce(step.stages) else "gradients.tables"
        reads = ("ids", "lengths", "vectors")
        self._stages = {stage.name: stage for stage in (*step.stages, Stage("gradients", WIRE, reads, (gradients,)))}
        self._bindings = {**step.bindings, "gradients": Binding(self._send_vector_grads)}
        self._released_after = {**last_readers(step.stages), "gradients": ()}
        self._tracer: Tracer | None = None
        self._hooks: list[Any] = []
        self._batch: Batch | None = None  # the last batch that the loop received
        self._is_looked_up = False  # whether the tables were looked up for `_batch`
        self._values: StepValues | None = None  # of the last batch that ranks announced, until its backward pass ends
        self._grad_nodes: Any = None  # autograd nodes of the vectors, kept alive until a graph holds them
        self._is_sent = False  # whether the gradients of the vectors were sent
        self._earlier_grads: list[tuple[nn.Parameter, Tensor]] = []  # gradients from before this backward pass
        self._in_backward = False  # from the first gradient until `_end_backward`
        self._num_batches = 0

    def batches(self, loader: Iterable[Batch], tracer: Tracer) -> Iterator[Batch]:
        """This rank's local batches, checked and on its device; all ranks must have the same number."""
        if has_copies(self._step.stages):
            raise UserError(
                "job.loader does not support tables with bounded staleness or on servers: train in job.run, or "
                f"{EXACT_REMEDY}"
            )
        self.stop()
        self._tracer, self._step.is_watched = tracer, False  # the heartbeat is that of `_run`
        self._step.accumulation.poll_stop = lambda: 0
        leaves = self._dense_parameters if self._reducer is None else self._reducer.leaves
        hooks = self._hooks = [leaf.register_hook(self._on_dense_grad) for leaf in leaves]
        try:
            for batch in loader:
                if self._hooks is not hooks:
                    raise UserError("another job.loader or job.run has begun since: use that, or call job.loader again")
                check_batch(batch, allow_zero_weights=True)
                self._batch, self._is_looked_up = batch.to(self._mesh.device), False
                tracer.begin_tick(self._num_batches)
                self._num_batches += 1
                if self._sparse is None:
                    self._announce(self._batch, self._batch.features)
                else:
                    self._set_lookup(self.lookup)
                yield self._batch
            if self._hooks is hooks:
                self._step.announce_end()
                self._step.wait_for_end()
        finally:
            if self._hooks is hooks:
                self._detach()

    def stop(self) -> None:
        """End this loop, because `Job.run` or another loop starts. Raises if a backward pass has failed."""
        self._detach()
        if self._in_backward:
            raise UserError("a backward pass of this job has failed, and its ranks differ: restart from a checkpoint")

    def _detach(self) -> None:
        """Remove the hooks from the model and drop the current batch."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._set_lookup(None)
        self._batch = None
        self._release()

    def _set_lookup(self, lookup: Callable[[Jagged], Vectors] | None) -> None:
        """Set the function that looks up the tables while gradients are enabled."""
        if self._sparse is not None:
            self._sparse.exchange.train = lookup

    def _announce(self, batch: Batch, features: Jagged) -> StepValues:
        """Announce a batch to all ranks; `features`: to look up."""
        weight = loss_weight(self._step.model.loss, batch)
        self._release()
        values = self._values = StepValues({0: {"batch": replace(batch, features=features), "weight": weight}})
        self._run("request", "lengths")
        with self._watch("lengths"):
            _ = self._slots("backward")["lengths"]  # waits for it
        return values

    def _release(self) -> None:
        """Drop the values of a batch: the hook of its vectors refers to them, a cycle that Python does not collect."""
        self._step.prefetched.clear()
        if self._values is not None:
            self._values.micro_batches.clear()
        self._values = self._grad_nodes = None

    def _slots(self, stage: str) -> Slots:
        assert self._values is not None
        return Slots(Call(self._stages[stage], self._num_batches - 1), self._values, self._tracer)

    def _run(self, *names: str) -> None:
        """Run stages of the plan, except those that it does not have."""
        for name in (name for name in names if name in self._stages):
            with self._watch(name):
                run_stage(self._bindings[name], slots := self._slots(name), self._tracer)
                slots.release(self._released_after[name])

    @contextmanager
    def _watch(self, stage: str) -> Iterator[None]:
        """Set this rank's stage and step in its heartbeat, and report a failure to other ranks."""
        watch = self._mesh.heartbeat
        if watch is None:
            yield
            return
        watch.stage, watch.step = stage, self._num_batches
        try:
            yield
        except Exception as error:
            if not isinstance(error, PeerLost):
                watch.report_failure(error)
            raise

    @disable_compile
    def lookup(self, features: Jagged) -> Vectors:
        """Look up the last batch of the loop; the backward pass from these vectors updates the tables."""
        sparse, batch = self._sparse, self._batch
        if batch is None or self._is_looked_up or not _is_from(features, batch):
            cause = "second lookup of the same batch" if self._is_looked_up else "lookup of samples of another batch"
            raise UserError(
                f"{cause}: every rank looks up each batch of job.loader once, in full, before it takes the next; "
                "wrap evaluation in torch.no_grad()"
            )
        if features.weights is not None and features.weights.requires_grad:
            raise UserError("id weights get no gradient from tables on several ranks: detach them")
        self._is_looked_up = True
        values = self._announce(batch, features)
        self._run("ids", "expect", "prefetch", "lookup", "meet", "vectors")
        with self._watch("vectors"):
            vectors = self._slots("forward")["vectors"]
        if sparse.trained:
            self._grad_nodes = vectors.receive(lambda: self._on_vector_grads(values))
        else:
            for tensor in vectors.tensors():
                tensor.requires_grad_(False)
        return vectors

    def _on_vector_grads(self, values: StepValues) -> None:
        """Called when every vector of a lookup has its gradient."""
        if values is not self._values or self._is_sent:
            raise UserError(
                "this backward pass is of an older lookup than the last, or the second one of the last: over several "
                "ranks tables update in every backward pass, so run one per lookup, before the next lookup"
            )
        self._begin_backward()
        self._run("gradients")

    def _send_vector_grads(self, slots: Slots) -> None:
        """Scale the vectors' gradients to the mean over the global batch, and send them on lane `wire`."""
        self._is_sent = True
        share, sparse = slots["lengths"].share, self._sparse
        gradients = slots["vectors"].gradients().tensors()
        grads = [gradient.mul(share) if share else gradient.new_zeros(gradient.shape) for gradient in gradients]
        vectors = sparse.vectors(grads[0], grads[1:])
        slots.issue(slots.call.stage.writes[0], sparse.exchange.exchange_gradients(slots["ids"], vectors))
        if not self._overlap:
            slots.wait_for_writes()

    def _on_dense_grad(self, _: Tensor) -> None:
        """Called when a dense parameter's gradient has been computed."""
        if self._values is None:
            if self._sparse is None:
                raise UserError(
                    "a second backward pass of one batch: over several ranks each batch of job.loader has one backward "
                    "pass; add up all losses of a batch"
                )
            raise UserError(
                "a backward pass without its own lookup: over several ranks each loss.backward() needs its own "
                "model(batch); add up all losses of a batch, and use use_reentrant=False in torch.utils.checkpoint"
            )
        self._begin_backward()

    def _begin_backward(self) -> None:
        """At the first gradient of a backward pass: set aside the earlier .grad, whose memory the buckets reuse."""
        if self._in_backward:
            return
        self._in_backward = True
        Variable._execution_engine.queue_callback(self._end_backward)
        if self._reducer is not None:
            self._earlier_grads = [(p, p.grad.clone()) for p in self._dense_parameters if p.grad is not None]
            for parameter, _ in self._earlier_grads:
                parameter.grad = None
            self._reducer.begin_backward(overlap=self._overlap, grad_scale=self._slots("backward")["lengths"].share)

    def _end_backward(self) -> None:
        """Wait for all gradients, update the tables, and add the dense gradients from before this backward pass."""
        if self._reducer is not None:
            with self._watch("backward"):
                self._reducer.end_backward()
        if self._sparse is not None and self._sparse.trained:
            if not self._is_sent:  # this rank's loss does not depend on some vectors
                self._run("gradients")
            self._run("spread", "update")
        if self._reducer is not None:
            with self._watch("backward"):
                self._reducer.finish_reductions()
        for parameter, gradient in self._earlier_grads:
            parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
        self._release()
        self._earlier_grads, self._in_backward, self._is_sent = [], False, False


def single_process_batches(shards: ShardedModel, loader: Iterable[Batch], device: torch.device) -> Iterator[Batch]:
    """The batches of a user training loop in one process, whose dense model is sharded or offloaded."""

    def begin_backward(_: Tensor) -> None:
        if not shards.in_backward:
            shards.begin_backward(overlap=False)
            Variable._execution_engine.queue_callback(end_backward)

    def end_backward() -> None:
        shards.end_backward()
        shards.finish_reductions()

    hooks = [leaf.register_hook(begin_backward) for leaf in shards.leaves]
    try:
        for batch in loader:
            check_batch(batch)
            yield batch.to(device)
            if shards.in_backward:
                raise UserError("a backward pass of this job has failed: restart from a checkpoint")
    finally:
        for hook in hooks:
            hook.remove()


def _is_from(features: Jagged, batch: Batch) -> bool:
    """Whether `features` may belong to the batch; changed features may if the batch has no sample weights."""
    return features is batch.features or batch.weights is None and features.batch_size == batch.batch_size

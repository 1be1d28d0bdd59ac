"""User training loops over several ranks: the stages of a step run inside `model(batch)` and `loss.backward()`.

Phases: forward          the batch is announced (a model without tables: by the loader); ids are sent to the ranks of
                         their rows and looked up, vectors are sent back as autograd leaves
        backward         dense gradients are reduced as buckets fill; vector gradients are sent once all exist
        end of backward  wait for both, update the tables; the user's loop then steps the dense optimizer
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from shardwright.comm.heartbeat import PeerLost
from shardwright.comm.mesh import Mesh
from shardwright.comm.pending import Pending
from shardwright.dense.replicated import ReplicatedModel
from shardwright.dense.sharded import ShardedModel
from shardwright.embeddings.exchange import ShardedTables
from shardwright.errors import UserError
from shardwright.jagged import Batch, Jagged, Vectors, check_batch
from shardwright.kernels.compile_exempt import disable_compile
from shardwright.layers.embedding import EmbeddingBags
from shardwright.layers.exchange import Announced, Announcer
from shardwright.measure.describe import sparse_of
from shardwright.runtime.accumulation import loss_weight


class UserLoop:
    """Trains sharded tables and reduces dense gradients inside the forward and backward of a user training loop."""

    def __init__(
        self,
        model: Any,
        mesh: Mesh,
        announcer: Announcer,
        dense_parameters: Sequence[nn.Parameter],
        reducer: ReplicatedModel | ShardedModel | None,
        *,
        overlap: bool,
    ) -> None:
        """`announcer`: the exchange of the model's tables, if it has any. `dense_parameters`: the user's optimizer has
        them; `reducer`: reduces their gradients over the ranks."""
        self._sparse, self._loss = sparse_of(model), model.loss
        self._mesh, self._reducer, self._overlap = mesh, reducer, overlap
        self._announcer, self._dense_parameters = announcer, list(dense_parameters)
        self._hooks: list[Any] = []
        self._batch: Batch | None = None  # the last batch that the loop received
        self._is_looked_up = False  # whether the tables were looked up for `_batch`
        self._announced: Announced | None = None  # the last batch that ranks announced, until its backward pass ends
        self._routed: Any = None  # its ids
        self._vectors: Vectors | None = None
        self._grad_nodes: Any = None  # autograd nodes of `_vectors`, kept alive until a graph holds them
        self._pending: Pending[Any] | None = None  # the exchange of the vectors' gradients
        self._earlier_grads: list[tuple[nn.Parameter, Tensor]] = []  # gradients from before this backward pass
        self._in_backward = False  # from the first gradient until `_end_backward`
        self._num_batches = 0

    def batches(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        """This rank's local batches, checked and on its device; all ranks must have the same number."""
        self.stop()
        leaves = self._dense_parameters if self._reducer is None else self._reducer.leaves
        hooks = self._hooks = [leaf.register_hook(self._on_dense_grad) for leaf in leaves]
        try:
            for batch in loader:
                if self._hooks is not hooks:
                    raise UserError("another job.loader or job.run has begun since: use that, or call job.loader again")
                check_batch(batch, allow_zero_weights=True)
                self._batch, self._is_looked_up = batch.to(self._mesh.device), False
                self._num_batches += 1
                if self._sparse is None:
                    with self._watch("forward"):
                        self._announce(None)
                else:
                    self._set_lookup(self.lookup)
                yield self._batch
            if self._hooks is hooks:
                self._announcer.announce_end().wait()
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
        self._batch = self._announced = self._routed = self._vectors = self._grad_nodes = None

    def _set_lookup(self, lookup: Callable[[Jagged], Vectors] | None) -> None:
        """Set the function that looks up the tables while gradients are enabled."""
        if self._sparse is not None:
            assert isinstance(self._sparse.exchange, ShardedTables)
            self._sparse.exchange.train = lookup

    def _announce(self, ids: Jagged | None) -> Any:
        """Announce the last batch of the loop to all ranks."""
        assert self._batch is not None
        request = self._announcer.request(ids, loss_weight(self._loss, self._batch))
        announced = self._announced = self._announcer.announce(request).wait()
        return announced

    @disable_compile
    def lookup(self, features: Jagged) -> Vectors:
        """Look up the last batch of the loop; the backward pass from these vectors updates the tables."""
        sparse, batch = self._trained_tables, self._batch
        if batch is None or self._is_looked_up or not _is_from(features, batch):
            cause = "second lookup of the same batch" if self._is_looked_up else "lookup of samples of another batch"
            raise UserError(
                f"{cause}: every rank looks up each batch of job.loader once, in full, before it takes the next; "
                "wrap evaluation in torch.no_grad()"
            )
        if features.weights is not None and features.weights.requires_grad:
            raise UserError("id weights get no gradient from tables on several ranks: detach them")
        self._is_looked_up = True
        exchange = sparse.exchange
        assert isinstance(exchange, ShardedTables)
        with self._watch("forward"):
            routed = self._routed = exchange.exchange_ids(self._announce(sparse.read(features))).wait()
            vectors = exchange.pool(routed)
        if sparse.trained:
            for tensor in vectors.tensors():
                tensor.requires_grad_()
            self._vectors, self._grad_nodes = vectors, vectors.receive(lambda: self._on_vector_grads(routed))
        return vectors

    def _on_vector_grads(self, routed: Any) -> None:
        """Called when every vector of a lookup has its gradient."""
        if routed is not self._routed or self._pending is not None:
            raise UserError(
                "this backward pass is of an older lookup than the last, or the second one of the last: over several "
                "ranks tables update in every backward pass, so run one per lookup, before the next lookup"
            )
        self._begin_backward()
        self._send_vector_grads()

    def _send_vector_grads(self) -> None:
        """Scale the vectors' gradients to the mean over the global batch, and send them on lane `wire`."""
        assert self._vectors is not None and self._announced is not None
        share, sparse = self._announced.share, self._trained_tables
        gradients = self._vectors.gradients().tensors()
        grads = [gradient.mul(share) if share else gradient.new_zeros(gradient.shape) for gradient in gradients]
        with self._watch("backward"):
            pending = self._pending = sparse.exchange.exchange_gradients(
                self._routed, sparse.vectors(grads[0], grads[1:])
            )
            if not self._overlap:
                pending.wait()

    def _on_dense_grad(self, _: Tensor) -> None:
        """Called when a dense parameter's gradient has been computed."""
        if self._announced is None:
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
            assert self._announced is not None
            self._reducer.begin_backward(overlap=self._overlap, grad_scale=self._announced.share)

    def _end_backward(self) -> None:
        """Wait for all gradients, update the tables, and add the dense gradients from before this backward pass."""
        sparse = self._sparse
        with self._watch("update"):
            if self._reducer is not None:
                self._reducer.end_backward()
            if sparse is not None and sparse.trained:
                if self._pending is None:  # this rank's loss does not depend on some vectors
                    self._send_vector_grads()
                assert self._pending is not None
                sparse.update(
                    self._routed, sparse.exchange.broadcast_in_host(self._routed, self._pending.wait()).wait()
                )
            if self._reducer is not None:
                self._reducer.finish_reductions()
        for parameter, gradient in self._earlier_grads:
            parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
        self._announced = self._routed = self._vectors = self._grad_nodes = self._pending = None
        self._earlier_grads, self._in_backward = [], False

    @property
    def _trained_tables(self) -> EmbeddingBags:
        assert self._sparse is not None
        return self._sparse

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

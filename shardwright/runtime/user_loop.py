"""A user's own loop over ranks: what the stages of a step do, inside `model(batch)` and `loss.backward()`.

Phases: forward   ids to the ranks of their rows, lookup, vectors back: leaves, as in the steps of a job
        backward  buckets of dense gradients go out as they fill, gradients of vectors when each of these has its own
        its end   both are waited for, and the tables take their step; the dense optimizer's is the user's own
"""

from collections.abc import Iterable, Iterator, Sequence
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
from shardwright.errors import UserError
from shardwright.jagged import Batch, Jagged, Vectors, check_batch
from shardwright.kernels.compile_exempt import disable_compile
from shardwright.runtime.accumulation import batch_weight


class UserLoop:
    """Trains tables on several ranks where the loop is the user's; `dense` are the parameters of their optimizer."""

    def __init__(
        self,
        model: Any,
        mesh: Mesh,
        dense_parameters: Sequence[nn.Parameter],
        reducer: ReplicatedModel | ShardedModel | None,
        *,
        overlap: bool,
    ) -> None:
        """`summing`: what sums the gradients of the dense parameters over the ranks."""
        self._model, self._mesh, self._summing, self._beside = model, mesh, reducer, overlap
        self._dense = list(dense_parameters)
        self._hooks: list[Any] = []
        self._batch: Batch | None = None  # that the loop was given last
        self._asked = False  # whether its vectors were looked up
        self._routed: Any = None  # of the lookup whose backward pass is to come
        self._vectors: Vectors | None = None
        self._held: Any = None  # what passes on the gradients of these
        self._under_way: Pending[Any] | None = None  # gradients of vectors
        self._before: list[tuple[nn.Parameter, Tensor]] = []
        self._running = False  # a backward pass, which is over with `_end`
        self._count = 0  # lookups

    def batches(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        """This rank's batches, checked and on its device; all ranks must have as many."""
        self.stop()
        sparse = self._model.sparse
        leaves = self._dense if self._summing is None else self._summing.leaves
        hooks = self._hooks = [leaf.register_hook(self._first) for leaf in leaves]
        try:
            for one in loader:
                if self._hooks is not hooks:
                    raise UserError("another job.loader or job.run has begun since: go on with that, or make a new one")
                check_batch(one, allow_zero_weights=True)
                self._batch, self._asked = one.to(self._mesh.device), False
                sparse.trains = self.lookup
                yield self._batch
            if self._hooks is hooks:
                sparse.exchange.announce_end().wait()
        finally:
            if self._hooks is hooks:
                self._leave()

    def stop(self) -> None:
        """Somebody else drives the job now."""
        self._leave()
        if self._running:
            raise UserError("a backward pass of this job has failed, and its ranks differ: restart from a checkpoint")

    def _leave(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._model.sparse.trains = self._batch = self._routed = self._vectors = self._held = None

    @disable_compile
    def lookup(self, features: Jagged) -> Vectors:
        """Vectors of the batch that the loop was given last; their gradients will train their rows."""
        sparse, batch = self._model.sparse, self._batch
        if batch is None or self._asked or not _of(features, batch):
            what = "again" if self._asked else "for other samples than job.loader gave last"
            raise UserError(
                f"the tables are asked {what}: every rank looks up its own batch, whole and once, before it takes the "
                "next; what only evaluates belongs under torch.no_grad()"
            )
        if features.weights is not None and features.weights.requires_grad:
            raise UserError("id weights get no gradient from tables on several ranks: detach them")
        self._count += 1
        self._asked = True
        with self._told("forward"):
            routed = self._routed = sparse.exchange.route(sparse.read(features), batch_weight(batch))
            vectors = sparse.lookup(routed)
        if sparse.trained:
            for tensor in vectors.tensors():
                tensor.requires_grad_()
            self._vectors, self._held = vectors, vectors.receive(lambda: self._arrived(routed))
        return vectors

    def _arrived(self, routed: Any) -> None:
        """Every vector has its gradient."""
        if routed is not self._routed or self._under_way is not None:
            raise UserError(
                "this backward pass is of an older lookup than the last, or the second through it: over several ranks "
                "tables update in every backward pass, so go through each lookup once, before the next"
            )
        self._begin()
        self._send()

    def _send(self) -> None:
        """From the gradients of this rank's loss those of the mean over all samples."""
        assert self._vectors is not None
        share, sparse = self._routed.share, self._model.sparse
        own = self._vectors.gradients().tensors()
        shares = [one.mul(share) if share else one.new_zeros(one.shape) for one in own]
        with self._told("backward"):
            sent = self._under_way = sparse.exchange.exchange_gradients(
                self._routed, sparse.vectors(shares[0], shares[1:])
            )
            if not self._beside:
                sent.wait()

    def _first(self, _: Tensor) -> None:
        if self._routed is None:
            raise UserError(
                "a backward pass without a lookup of its own: over several ranks each loss.backward() follows one "
                "model(batch); add up what the batch is to learn from, and checkpoint with use_reentrant=False"
            )
        self._begin()

    def _begin(self) -> None:
        """With the first gradient of a backward pass: what was in .grad waits, since its memory is that of buckets."""
        if self._running:
            return
        self._running = True
        Variable._execution_engine.queue_callback(self._end)
        if self._summing is not None:
            self._before = [(one, one.grad.clone()) for one in self._dense if one.grad is not None]
            for parameter, _ in self._before:
                parameter.grad = None
            self._summing.begin_backward(overlap=self._beside, grad_scale=self._routed.share)

    def _end(self) -> None:
        sparse = self._model.sparse
        with self._told("update"):
            summed = self._summing.end_backward() if self._summing is not None else None
            if sparse.trained:
                if self._under_way is None:  # this rank's loss left some vectors out
                    self._send()
                assert self._under_way is not None
                sparse.update(
                    self._routed, sparse.exchange.broadcast_in_host(self._routed, self._under_way.wait()).wait()
                )
            if summed is not None:
                summed.wait()
        for parameter, gradient in self._before:
            parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
        self._routed = self._vectors = self._held = self._under_way = None
        self._before, self._running = [], False

    @contextmanager
    def _told(self, stage: str) -> Iterator[None]:
        """Others are told where this rank is, and why it goes no further."""
        watch = self._mesh.heartbeat
        if watch is None:
            yield
            return
        watch.stage, watch.step = stage, self._count
        try:
            yield
        except Exception as error:
            if not isinstance(error, PeerLost):
                watch.report_failure(error)
            raise


def single_process_batches(shards: ShardedModel, loader: Iterable[Batch], device: torch.device) -> Iterator[Batch]:
    """The batches of a loop in one process, whose weights are brought together in their block's turn."""

    def first(_: Tensor) -> None:
        if not shards.in_backward:
            shards.begin_backward(overlap=False)
            Variable._execution_engine.queue_callback(lambda: shards.end_backward().wait())

    hooks = [leaf.register_hook(first) for leaf in shards.leaves]
    try:
        for batch in loader:
            check_batch(batch)
            yield batch.to(device)
            if shards.in_backward:
                raise UserError("a backward pass of this job has failed: restart from a checkpoint")
    finally:
        for hook in hooks:
            hook.remove()


def _of(features: Jagged, batch: Batch) -> bool:
    """Whether they may be this batch's own; to change them is allowed where all samples weigh the same."""
    return features is batch.features or batch.weights is None and features.batch_size == batch.batch_size

"""A user's own loop over ranks: what the stages of a step do, inside `model(batch)` and `loss.backward()`.

Phases: forward   ids to the ranks of their rows, lookup, vectors back
        backward  buckets of dense gradients go out as they fill, gradients of vectors as soon as there are any
        its end   both are waited for, and the tables take their step; the dense optimizer's is the user's own
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from shardwright.comm.mesh import Mesh
from shardwright.comm.pending import Pending
from shardwright.dense.data import Replicated
from shardwright.errors import UserError
from shardwright.jagged import Batch, Jagged, Vectors, check
from shardwright.runtime.parts import weight_of


class OwnLoop:
    """Trains tables on several ranks where the loop is the user's; `dense` are the parameters of their optimizer."""

    def __init__(
        self, model: Any, mesh: Mesh, dense: Sequence[nn.Parameter], replicated: Replicated | None, *, beside: bool
    ) -> None:
        self._model, self._mesh, self._replicated, self._beside = model, mesh, replicated, beside
        self._dense = list(dense)
        self._batch: Batch | None = None  # that the loop was given last
        self._asked = False  # whether its vectors were looked up
        self._routed: Any = None  # of the lookup whose backward pass is to come
        self._like: list[tuple[torch.Size, torch.dtype]] = []  # vectors
        self._under_way: Pending[Any] | None = None  # gradients of vectors
        self._before: list[tuple[nn.Parameter, Tensor]] = []
        self._running = False

    def batches(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        """This rank's batches, checked and on its device; all ranks must have as many."""
        sparse, batch = self._model.sparse, None
        hooks = [parameter.register_hook(self._first) for parameter in self._dense]
        try:
            for one in loader:
                check(one, share=True)
                batch = self._batch = one.to(self._mesh.device)
                self._asked = False
                sparse.trains = self.lookup
                yield batch
            sparse.exchange.ended()
        finally:
            for hook in hooks:
                hook.remove()
            if self._batch is batch:  # no other loop has begun
                sparse.trains = self._batch = self._routed = None

    def lookup(self, features: Jagged) -> Vectors:
        """Vectors of the batch that the loop was given last, by a function whose backward pass trains their rows."""
        sparse, batch = self._model.sparse, self._batch
        if batch is None or self._asked or features.batch_size != batch.batch_size:
            given = "none" if batch is None else f"one of {batch.batch_size}"
            raise UserError(
                f"the tables are asked for {features.batch_size} samples{' again' * self._asked}, and "
                f"job.loader gave {given} last: every rank looks up its own batch, whole and once; what only evaluates "
                "belongs under torch.no_grad()"
            )
        if features.weights is not None and features.weights.requires_grad:
            raise UserError("id weights get no gradient from tables on several ranks: detach them")
        self._told("forward")
        self._asked = True
        self._routed = sparse.exchange.asked(features, weight_of(batch))
        if not sparse.trained:
            return sparse.lookup(self._routed)
        found = _LookupElsewhere.apply(self, self._routed, torch.empty(0, requires_grad=True))
        self._like = [(one.shape, one.dtype) for one in found]
        return sparse.vectors(found[0], found[1:])

    def gradients(self, routed: Any, gradients: Sequence[Tensor]) -> None:
        """Of the vectors, from their share of the batch that all ranks' are together."""
        if routed is not self._routed:
            raise UserError(
                "this backward pass is of an older lookup than the last, or the second through it: over several ranks "
                "tables update in every backward pass, so go through each lookup once, before the next"
            )
        self._begin()
        shares = [one.mul(routed.share) if routed.share else torch.zeros_like(one) for one in gradients]
        sparse = self._model.sparse
        self._under_way = sparse.exchange.gradients(routed, sparse.vectors(shares[0], shares[1:]))

    def _first(self, _: Tensor) -> None:
        if self._routed is not None:
            self._begin()

    def _begin(self) -> None:
        """With the first gradient of a backward pass: what was in .grad waits, since its memory is that of buckets."""
        if self._running:
            return
        self._running = True
        self._told("backward")
        Variable._execution_engine.queue_callback(self._end)
        if self._replicated is not None:
            self._before = [(one, one.grad.clone()) for one in self._dense if one.grad is not None]
            for parameter, _ in self._before:
                parameter.grad = None
            self._replicated.begin(beside=self._beside, share=self._routed.share)

    def _end(self) -> None:
        sparse, routed, arriving = self._model.sparse, self._routed, self._under_way
        self._running, self._routed, self._under_way = False, None, None
        summed = self._replicated.end() if self._replicated is not None else None
        if sparse.trained:
            if arriving is None:  # the loss of this rank did not depend on its vectors
                zeros = [torch.zeros(shape, dtype=dtype) for shape, dtype in self._like]
                arriving = sparse.exchange.gradients(routed, sparse.vectors(zeros[0], zeros[1:]))
            sparse.update(routed, sparse.exchange.spread(routed, arriving.wait()).wait())
        if summed is not None:
            summed.wait()
        for parameter, gradient in self._before:
            parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
        self._before = []

    def _told(self, stage: str) -> None:
        if self._mesh.watch is not None:
            self._mesh.watch.stage = stage


class _LookupElsewhere(torch.autograd.Function):
    """Forward looks up; backward sends the gradients to where the rows are."""

    @staticmethod
    def forward(ctx, loop: OwnLoop, routed: Any, _: Tensor):
        ctx.loop, ctx.routed = loop, routed
        return loop._model.sparse.lookup(routed).tensors()

    @staticmethod
    def backward(ctx, *gradients: Tensor):
        ctx.loop.gradients(ctx.routed, gradients)
        return None, None, None

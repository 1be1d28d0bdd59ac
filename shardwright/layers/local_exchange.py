"""The exchange of tables that are all in this process: nothing is communicated.

In a user training loop the update runs inside `loss.backward()`, by `_LookupThenUpdate`.

Shape legend: B samples, D columns of all pooled vectors.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shardwright.comm.mesh import world_size
from shardwright.comm.pending import Pending, ready
from shardwright.errors import UserError
from shardwright.jagged import Jagged, Vectors, concat, features_with_gradient
from shardwright.kernels import embedding
from shardwright.kernels.arguments import TableState, concat_with_decay
from shardwright.kernels.cache_index import CacheCounts
from shardwright.kernels.compile_exempt import disable_compile
from shardwright.kernels.dedup import restrict_ids
from shardwright.layers.exchange import Exchange
from shardwright.spec.optimizer import SparseOptimizer

if TYPE_CHECKING:
    from shardwright.layers.embedding import EmbeddingTables


@dataclass(frozen=True, slots=True)
class LocalBatch:
    """The ids of a batch of which this process has all samples, and what it announces."""

    ids: Jagged
    total_weight: float
    stop_signal: int
    share: float = 1.0


class LocalExchange:
    """Looks up and updates tables in this process; see `Exchange`.

    `member`: the name of these tables in an EmbeddingBagsDict, which then trains them; empty if they are in none.
    """

    def __init__(self, bags: "EmbeddingTables", member: str = "") -> None:
        self._bags, self.member = bags, member
        self.owner: Exchange | None = None  # of the dict's tables, if it trains them elsewhere
        self.num_updates = 0  # by backward passes of a user training loop

    def write_back(self) -> None:
        if self.owner is not None:
            self.owner.write_back()

    def reload(self) -> None:
        if self.owner is not None:
            self.owner.reload()

    def cache_counts(self) -> dict[str, CacheCounts]:
        return {}

    def forward(self, features: Jagged) -> Vectors:
        ids = self._bags.read(features)
        if self._bags.optimizer is None or not torch.is_grad_enabled():
            return self._bags.lookup(ids)
        if self.member:
            raise UserError(
                f'"{self.member}" is a member of an EmbeddingBagsDict: to train, call that, which looks up all '
                "members at once; to look up one member, use torch.no_grad()"
            )
        if world_size() > 1:
            raise UserError(
                f"{world_size()} processes would each train separate tables: build a job with a plan that shards them, "
                "or pass no optimizer to let DDP average their gradients"
            )
        return self._lookup_then_update(ids)

    @disable_compile
    def _lookup_then_update(self, ids: Jagged) -> Vectors:
        pooled, *sequences = _LookupThenUpdate.apply(self, self._bags, ids, ids.weights, *self._bags.weights())
        return self._bags.vectors(pooled, sequences)

    def request(self, ids: Jagged, weight: float, stop: int = 0) -> LocalBatch:
        return LocalBatch(ids, weight, stop)

    def announce(self, request: LocalBatch) -> Pending[LocalBatch]:
        return ready(request)

    def announce_end(self) -> Pending[None]:
        return ready(None)

    def exchange_ids(self, announced: LocalBatch) -> Pending[Jagged]:
        return ready(announced.ids)

    def expect(self, ids: Jagged) -> None:
        pass

    def forget(self) -> None:
        pass

    def prefetch(self, ids: Jagged) -> Pending[Jagged]:
        return ready(ids)

    def release(self, ids: Jagged, *, written: bool) -> None:
        pass

    def lookup(self, ids: Jagged, *, training: bool = False) -> Vectors:
        return self._bags.lookup(ids)

    def reduce_in_host(self, looked_up: Vectors) -> Pending[Vectors]:
        return ready(looked_up)

    def exchange_vectors(self, looked_up: Vectors) -> Pending[Vectors]:
        return ready(looked_up)

    def exchange_gradients(self, ids: Jagged, gradients: Vectors, *, sum_replicas: bool = True) -> Pending[Vectors]:
        return ready(gradients)

    def broadcast_in_host(self, ids: Jagged, gradients: Vectors) -> Pending[Vectors]:
        return ready(gradients)

    def concat_micro_batches(
        self, micro_batches: Sequence[tuple[Jagged, Vectors]], decay: float
    ) -> tuple[Jagged, Vectors]:
        by_tensor = zip(*(gradients.tensors() for _, gradients in micro_batches), strict=True)
        pooled_BD, *sequences = (concat_with_decay(tensors, decay) for tensors in by_tensor)
        return concat([ids for ids, _ in micro_batches]), self._bags.vectors(pooled_BD, sequences)

    def update(
        self, ids: Jagged, gradients: Vectors, optimizer: SparseOptimizer, steps: Mapping[str, int]
    ) -> Collection[str]:
        tables = [table_state(self._bags, table.name, steps[table.name]) for table in self._bags.tables]
        return update_used(self._bags, ids, gradients, optimizer, tables)


def table_state(bags: "EmbeddingTables", table: str, step: int) -> TableState:
    """A table of this process as the kernels update it; `step`: the number of its step, from 1."""
    module = bags.holder(table)
    state, is_trained = module.states, module.weight.requires_grad
    return TableState(module.weight, state, step, module.rounding_key, is_trained, module.changed_rows)


def update_used(
    bags: "EmbeddingTables",
    ids: Jagged,
    gradients: Vectors,
    optimizer: SparseOptimizer,
    tables: Sequence[TableState],
) -> Collection[str]:
    """One optimizer step of the rows of features with a gradient; returns these features."""
    used = features_with_gradient(gradients)
    kernel_ids, tensors = bags.kernel_ids(ids), gradients.tensors()
    if len(used) < len(bags.features):
        kernel_ids, tensors = restrict_ids(kernel_ids, tensors, [feature.name in used for feature in bags.features])
    with bags.naming_errors():
        embedding.update(tables, kernel_ids, tensors, optimizer)
    return used


class _LookupThenUpdate(torch.autograd.Function):
    """Looks up in forward; updates the tables in backward, and returns no gradients for them."""

    @staticmethod
    def forward(
        ctx: Any, exchange: LocalExchange, bags: "EmbeddingTables", ids: Jagged, id_weights: Tensor | None, *_: Tensor
    ):
        ctx.exchange, ctx.bags, ctx.ids, ctx.num_updates = exchange, bags, ids, exchange.num_updates
        return bags.lookup(ids).tensors()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor):
        bags, ids = ctx.bags, ctx.ids
        if ctx.num_updates != ctx.exchange.num_updates:
            raise UserError(
                "the tables were updated by another backward since this lookup, so its gradients are of old weights: "
                "look up all features in one call, and run one backward per lookup"
            )
        ctx.exchange.num_updates += 1
        gradients = bags.vectors(grads[0], grads[1:])
        id_weight_gradients = bags.weight_gradients(ids, gradients) if ctx.needs_input_grad[3] else None
        bags.update(ids, gradients)
        return None, None, None, id_weight_gradients, *[None] * len(bags.tables)

"""Embedding bags over many tables, with the optimizer fused into the backward pass.

Two ways to train it, one update: in a user's own loop the update runs inside `loss.backward()`; in the runtime the
vectors are leaves, and `update(ids, gradients)` is called as a step of its own. Either way no gradient of a table's
size ever exists, and an optimizer over `parameters()` leaves the tables alone because their `.grad` stays None.
Without an optimizer the tables are ordinary parameters with ordinary gradients; with requires_grad off they are frozen.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.comm.mesh import world_size
from shardwright.errors import UserError
from shardwright.jagged import Batch, Jagged, Vectors, concat, features_with_gradient, select
from shardwright.kernels import embedding, reference
from shardwright.kernels.arguments import POOLINGS, IdOutOfRange, Ids, TableState, concat_with_decay
from shardwright.kernels.buffers import BufferPool
from shardwright.kernels.compile_exempt import disable_compile
from shardwright.kernels.dedup import restrict_ids
from shardwright.kernels.finite import check_finite
from shardwright.kernels.native import lengths_to_offsets, use_huge_pages
from shardwright.layers.exchange import Exchange
from shardwright.layers.table_weights import TableWeights, torch_state_dtype
from shardwright.spec.checks import raise_if_any
from shardwright.spec.optimizer import SparseOptimizer
from shardwright.spec.optimizer import optimizer_faults as optimizer_faults
from shardwright.spec.workload import Dtype, Feature, Table, feature_faults, table_faults

ROUNDING_KEY = "rounding_key"  # in an optimizer's state, next to "step"


class EmbeddingBags(nn.Module):
    """Tables, the features that read them, and the optimizer that updates them.

    `prefix` is where the tables sit in the state dict: "embedding_bags.site.weight" as in torchrec by default, or
    "site.weight" with prefix "". `weighted` says whether ids have weights; None: they do if the batch has some.
    """

    def __init__(
        self,
        tables: Sequence[Table],
        features: Sequence[Feature],
        optimizer: SparseOptimizer | None = None,
        *,
        prefix: str = "embedding_bags",
        weighted: bool | None = None,
    ) -> None:
        super().__init__()
        raise_if_any(_faults(tables, features, optimizer))
        self.tables = tuple(tables)
        self.features = tuple(features)
        self.optimizer = optimizer
        self.weighted = weighted
        self.exchange: Exchange | None = None  # every table is here
        self.trains: Callable[[Jagged], Vectors] | None = None  # in a user's own loop, where tables are elsewhere
        self.steps = {table.name: 0 for table in tables}
        dims = {table.name: table.dim for table in tables}
        self.dims = tuple(dims[feature.table] for feature in features)  # columns of each feature's vectors
        self._updates = 0  # made inside backward
        self._memory = BufferPool()
        holder = nn.Module() if prefix else self
        if prefix:
            self.add_module(prefix, holder)
        for table in self.tables:
            if hasattr(holder, table.name):
                raise UserError(f'table "{table.name}": torch modules reserve this name; choose another')
            holder.add_module(table.name, TableWeights(table, optimizer))
        self._holder = (holder,)  # in a tuple, so that it is not registered a second time

    def weight(self, table: str) -> nn.Parameter:
        if self.holder(table).is_released:
            raise UserError(f'table "{table}" lies on several ranks: job.state() has it whole')
        return self.holder(table).weight

    def adopt(self, table: str, weight: nn.Parameter) -> None:
        """Use this parameter as the table's weight, shared with whoever holds it."""
        module = self.holder(table)
        if weight.shape != module.weight.shape:
            raise UserError(f'table "{table}" is {tuple(module.weight.shape)}, the weight {tuple(weight.shape)}')
        for other in self.tables if self.optimizer is not None else ():
            if other.name != table and self.weight(other.name) is weight:
                raise UserError(
                    f'tables "{other.name}" and "{table}" share one weight, which each would update alone: '
                    "make it one table that several Features read"
                )
        module.weight = weight
        use_huge_pages(weight, collapse=True)
        for name, state in module.named_buffers():
            fresh = torch.full(state.shape, module.initial_state, device=weight.device, dtype=state.dtype)
            setattr(module, name, fresh)

    def state(self, table: str) -> dict[str, Tensor]:
        """The optimizer's state of a table, by name; empty for an optimizer without any."""
        return dict(self.holder(table).named_buffers())

    def forward(self, batch: Batch | Jagged) -> Vectors:
        features = batch.features if isinstance(batch, Batch) else batch
        if features.values.device.type == "meta":
            return self.blank(features)
        mine = self.read(features)
        if self.exchange is not None:
            if self.trains is not None and torch.is_grad_enabled():
                return self.trains(features)
            if self.optimizer is not None and torch.is_grad_enabled():
                raise UserError(
                    "tables on several ranks train in job.run, or in a loop of your own over job.loader(...); "
                    "to look up only, use torch.no_grad()"
                )
            mine = self.exchange.route(mine, mine.batch_size)
        if self.optimizer is None or not torch.is_grad_enabled():
            return self.lookup(mine)
        if world_size() > 1:
            raise UserError(
                f"{world_size()} processes would each train tables of their own: build a job with a plan that says who "
                "holds what, or pass no optimizer to let DDP average their gradients"
            )
        return self._lookup_then_update(mine)

    @disable_compile
    def _lookup_then_update(self, ids: Jagged) -> Vectors:
        pooled, *sequences = _LookupThenUpdate.apply(self, ids, ids.weights, *self._weights())
        return self.vectors(pooled, sequences)

    def read(self, features: Jagged) -> Jagged:
        """The features of these tables, in order and by their names."""
        wanted = tuple(feature.ids or feature.name for feature in self.features)
        mine = features if features.features == wanted else select(features, wanted)
        names = tuple(feature.name for feature in self.features)
        mine = mine if names == wanted else replace(mine, features=names)
        if self.weighted and mine.weights is None:
            raise UserError("these tables pool by id weights and the batch has none; pass Jagged(..., weights)")
        if self.weighted is False and mine.weights is not None:
            mine = replace(mine, weights=None)
        return mine

    def blank(self, features: Jagged, device: torch.device | str = "meta") -> Vectors:
        """Vectors of the right shapes without values, for tracing."""
        sequences, width, dtype = [], 0, torch_state_dtype(self.tables[0])
        for feature, dim in zip(self.features, self.dims, strict=True):
            if feature.pooling != "none":
                width += dim
            elif features.lengths.device.type == "meta":
                raise UserError(
                    f'feature "{feature.name}" is not pooled, so its shape depends on the data: '
                    "make these tables the child `sparse` of the model to describe it"
                )
            else:
                num_ids = int(features.lengths[features.features.index(feature.ids or feature.name)].sum())
                sequences.append(torch.empty(num_ids, dim, device=device, dtype=dtype))
        return self.vectors(torch.empty(features.batch_size, width, device=device, dtype=dtype), sequences)

    def check(self, ids: Jagged) -> None:
        """Whether every id is a row of its table, for tables that may not be real yet."""
        with self.naming_errors():
            reference.check_ids(self._weights(), self._ids(ids))

    def lookup(self, ids: Any) -> Vectors:
        """The vectors of ids that `read` has put in order; an id that is no row of its table is an error."""
        if self.exchange is not None:
            return self.exchange.exchange_vectors(self.exchange.reduce_in_host(self.exchange.lookup(ids)).wait()).wait()
        with self.naming_errors():
            if torch.is_grad_enabled():
                pooled, *sequences = embedding.lookup(self._weights(), self._ids(ids))
            else:
                pooled, *sequences = embedding.lookup_into(self._memory, self._weights(), self._ids(ids))
        return self.vectors(pooled, sequences)

    def check_finite(self) -> None:
        """Raise an error if a weight of this process is NaN or infinite; `Job.check_weights` checks all ranks."""
        for table in self.tables:
            check_finite(f'table "{table.name}"', self.weight(table.name))

    @torch.no_grad()
    def update(self, ids: Any, gradients: Any) -> None:
        """One optimizer step from the gradients of `lookup(ids)`; each distinct row is written once.

        A feature whose gradient is zero for every sample of the global batch is unused in this step: its rows do not
        step, and a table that no used feature reads keeps its state and step count, as one without .grad does in
        torch.optim. With an `exchange`, `gradients` are what `exchange.gradients` returned.
        """
        if self.optimizer is None:
            raise UserError("these tables have no optimizer: pass EmbeddingBags(..., optimizer)")
        if self.exchange is not None:
            steps = {name: step + 1 for name, step in self.steps.items()}
            used = self.exchange.update(ids, gradients, self.optimizer, steps)
        else:
            used = self._update(self._ids(ids), gradients, self.optimizer)
        stepped = {feature.table for feature in self.features if feature.name in used} & self._trained
        self.steps = {name: step + (name in stepped) for name, step in self.steps.items()}

    def _update(self, ids: Ids, gradients: Vectors, optimizer: SparseOptimizer) -> Collection[str]:
        """Update the tables of this process; returns the features that the step used."""
        used = features_with_gradient(gradients)
        tensors = gradients.tensors()
        if len(used) < len(self.features):
            ids, tensors = restrict_ids(ids, tensors, [feature.name in used for feature in self.features])
        tables = []
        for table in self.tables:
            module = self.holder(table.name)
            state, step = tuple(module.buffers()), self.steps[table.name] + 1
            trained = module.weight.requires_grad
            tables.append(TableState(module.weight, state, step, module.rounding_key, trained, module.changed_rows))
        with self.naming_errors():
            embedding.update(tables, ids, tensors, optimizer)
        return used

    def concat_micro_batches(self, micro_batches: Sequence[tuple[Any, Any]], decay: float) -> tuple[Any, Any]:
        """The ids and gradients of several batches as those of one; gradients of all but the last times `fade`."""
        if self.exchange is not None:
            return self.exchange.concat_micro_batches(micro_batches, decay)
        each = zip(*(gradients.tensors() for _, gradients in micro_batches), strict=True)
        pooled_BD, *sequences = (concat_with_decay(tensors, decay) for tensors in each)
        return concat([ids for ids, _ in micro_batches]), self.vectors(pooled_BD, sequences)

    def weight_gradients(self, ids: Jagged, gradients: Vectors) -> Tensor:
        """The gradient of each id's weight."""
        return embedding.id_weight_gradients(self._weights(), self._ids(ids), gradients.tensors())

    @property
    def trained(self) -> bool:
        """Whether `update` has anything to do."""
        return self.optimizer is not None and bool(self._trained)

    @property
    def _trained(self) -> frozenset[str]:
        """The tables that are not frozen."""
        return frozenset(table.name for table in self.tables if self.holder(table.name).is_trained)

    def hold(self, dtypes: Mapping[str, Dtype]) -> None:
        """The weights of each table in this dtype from now on, its optimizer's state as it is."""
        for table in self.tables:
            self.holder(table.name).cast(dtypes[table.name])
        self.tables = tuple(replace(table, dtype=dtypes[table.name]) for table in self.tables)

    def give_up(self, exchange: Exchange) -> None:
        """From now on the tables are where this says; those here are dropped."""
        for table in self.tables:
            self.holder(table.name).release()
        self.exchange = exchange

    def optimizer_state(self) -> dict[str, Tensor]:
        """Optimizer state by "table.name", with step counts and keys of stochastic rounding: the counterpart of
        `state_dict()`."""
        found = {f"{table.name}.step": torch.tensor(self.steps[table.name]) for table in self.tables}
        found |= {
            f"{table.name}.{ROUNDING_KEY}": torch.tensor(self.holder(table.name).rounding_key) for table in self.tables
        }
        for table in self.tables:
            found |= {f"{table.name}.{name}": state for name, state in self.state(table.name).items()}
        return found

    @torch.no_grad()
    def load_optimizer_state(self, saved: Mapping[str, Tensor]) -> None:
        """Load an `optimizer_state()`; a name that is missing, unexpected or of another shape is an error.

        Only keys of stochastic rounding may be missing: earlier versions did not save them. Current keys then stay.
        """
        mine = self.optimizer_state()
        saved = {name: value for name, value in mine.items() if name.endswith(f".{ROUNDING_KEY}")} | dict(saved)
        for name in sorted(set(mine) ^ set(saved)):
            raise UserError(f'optimizer state "{name}" is {"missing" if name in mine else "not of these tables"}')
        for name, state in mine.items():
            found, wanted = ((str(t.dtype).removeprefix("torch."), tuple(t.shape)) for t in (saved[name], state))
            if found != wanted:
                raise UserError(f'optimizer state "{name}" is {found[0]} {found[1]}; wanted {wanted[0]} {wanted[1]}')
        for name, state in mine.items():
            state.copy_(saved[name])
        self.steps = {table.name: int(saved[f"{table.name}.step"]) for table in self.tables}
        for table in self.tables:
            self.holder(table.name).rounding_key = int(saved[f"{table.name}.{ROUNDING_KEY}"])

    def set_path(self, path: str) -> None:
        """Set the module path, which seeds the tables: tables of equal name in two modules then differ."""
        for table in self.tables:
            self.holder(table.name).set_path(path)

    def reset_parameters(self) -> None:
        """Fresh weights; a table's depend on torch's seed and the table's name, not on the other tables."""
        for table in self.tables:
            self.holder(table.name).reset()
            self.steps[table.name] = 0

    def extra_repr(self) -> str:
        rows = sum(table.rows for table in self.tables)
        return f"{len(self.tables)} tables, {rows:,} rows, {len(self.features)} features, {self.optimizer}"

    def holder(self, table: str) -> TableWeights:
        """Where a table's weight and state are."""
        module = getattr(self._holder[0], table)
        assert isinstance(module, TableWeights)
        if not module.is_released:
            module.check_dtype()
        return module

    def vectors(self, pooled_BD: Tensor, sequences: Sequence[Tensor]) -> Vectors:
        pooled = [at for at, feature in enumerate(self.features) if feature.pooling != "none"]
        unpooled = [feature.name for feature in self.features if feature.pooling == "none"]
        return Vectors(
            tuple(self.features[at].name for at in pooled),
            tuple(self.dims[at] for at in pooled),
            pooled_BD,
            dict(zip(unpooled, sequences, strict=True)),
        )

    def _weights(self) -> list[Tensor]:
        return [self.weight(table.name) for table in self.tables]

    def _ids(self, ids: Jagged) -> Ids:
        order = {table.name: at for at, table in enumerate(self.tables)}
        return Ids(
            ids.values,
            lengths_to_offsets(ids.lengths),
            ids.weights,
            [order[feature.table] for feature in self.features],
            [POOLINGS.index(feature.pooling) for feature in self.features],
        )

    @contextmanager
    def naming_errors(self) -> Iterator[None]:
        """An id outside its table is told with the names of feature and table."""
        try:
            yield
        except IdOutOfRange as error:
            feature = self.features[error.feature]
            rows = next(table.rows for table in self.tables if table.name == feature.table)
            raise UserError(
                f'table "{feature.table}", feature "{feature.name}": id {error.id} is outside its {rows} rows '
                f"(0 to {rows - 1}); give the table more rows or hash the ids"
            ) from None


class _LookupThenUpdate(torch.autograd.Function):
    """Forward looks up; backward hands the gradient straight to the update and returns none for the tables."""

    @staticmethod
    def forward(ctx, bags: EmbeddingBags, ids: Jagged, id_weights: Tensor | None, *weights: Tensor):
        ctx.bags, ctx.ids, ctx.updates = bags, ids, bags._updates
        return bags.lookup(ids).tensors()

    @staticmethod
    def backward(ctx, *grads: Tensor):
        bags, ids = ctx.bags, ctx.ids
        if ctx.updates != bags._updates:
            raise UserError(
                "the tables were updated by another backward since this lookup, which would make two updates of one: "
                "look up all features in one call, and go through each lookup once"
            )
        bags._updates += 1
        gradients = bags.vectors(grads[0], grads[1:])
        for_weights = bags.weight_gradients(ids, gradients) if ctx.needs_input_grad[2] else None
        bags.update(ids, gradients)
        return None, None, for_weights, *[None] * len(bags.tables)


def _faults(tables: Sequence[Table], features: Sequence[Feature], optimizer: SparseOptimizer | None) -> Iterator[str]:
    if not tables:
        yield "EmbeddingBags without a table; pass at least one"
    yield from table_faults(tables)
    yield from feature_faults(features, tables)
    if optimizer is not None:
        yield from optimizer_faults(optimizer)
    read = {feature.table for feature in features}
    for table in tables:
        if "." in table.name:
            yield f'table "{table.name}": a dot in a name would split its state_dict key; use "_"'
        if table.name not in read:
            yield f'table "{table.name}" is read by no feature; add a Feature or drop the table'

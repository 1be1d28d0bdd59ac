"""Embedding bags over many tables, with the optimizer fused into the backward pass.

In a user training loop on one process, the update runs inside `loss.backward()`. In the runtime, where vectors are
autograd leaves, the same update is a separate call, `update(ids, gradients)`. Either way, gradients of a table's size
never exist, and an optimizer over `parameters()` skips the tables because their `.grad` stays None. Without an
optimizer, tables are ordinary parameters with ordinary gradients; with requires_grad off they are frozen.

Shape legend: B samples of the local batch, D columns of all pooled vectors.
"""

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.comm.pending import LazyValue
from shardwright.errors import UserError
from shardwright.jagged import Batch, Jagged, Vectors, offsets, select, with_id_bounds
from shardwright.kernels import embedding, reference
from shardwright.kernels.arguments import POOLINGS, IdOutOfRange, Ids, with_bounds
from shardwright.kernels.buffers import BufferPool
from shardwright.kernels.finite import check_finite
from shardwright.kernels.native import lengths_to_offsets, use_huge_pages
from shardwright.layers.exchange import Exchange
from shardwright.layers.local_exchange import LocalExchange
from shardwright.layers.table_weights import TableWeights, torch_state_dtype
from shardwright.spec.checks import raise_if_any
from shardwright.spec.optimizer import SparseOptimizer
from shardwright.spec.optimizer import optimizer_faults as optimizer_faults
from shardwright.spec.workload import Dtype, Feature, Table, feature_faults, table_faults

ROUNDING_KEY = "rounding_key"  # in an optimizer's state, next to "step"


class EmbeddingTables(nn.Module):
    """The tables of a model, as its step and their exchange use them.

    Implementations: EmbeddingBags, and EmbeddingBagsDict (layers/embedding_dict.py), which has several of them.
    """

    tables: tuple[Table, ...]
    features: tuple[Feature, ...]
    dims: tuple[int, ...]  # by feature: columns of its vectors
    optimizer: SparseOptimizer | None
    weighted: bool | None  # whether ids have weights; None: they do if the batch has weights
    exchange: Exchange
    steps: dict[str, int]  # by table

    def _declare(self, tables: Sequence[Table], features: Sequence[Feature], weighted: bool | None) -> None:
        """Set what implementations have in common; they call it in their __init__."""
        self.tables = tuple(tables)
        self.features = tuple(features)
        self.weighted = weighted
        self.exchange = LocalExchange(self)
        dims = {table.name: table.dim for table in tables}
        self.dims = tuple(dims[feature.table] for feature in features)
        self._buffer_pool = BufferPool()

    @abstractmethod
    def outputs(self, vectors: Vectors | LazyValue) -> Any:
        """What the model's `dense` gets, from the vectors of all features."""

    @abstractmethod
    def id_weights(self, ids: Jagged) -> Tensor | None:
        """The weights by which these tables pool ids of `features`."""

    @abstractmethod
    def holder(self, table: str) -> TableWeights:
        """The module that holds a table's weight and optimizer state."""

    def weight(self, table: str) -> nn.Parameter:
        self.exchange.write_back()
        return self._own_weight(table)

    def _own_weight(self, table: str) -> nn.Parameter:
        module = self.holder(table)
        if module.is_released:
            raise UserError(f'table "{table}" is sharded over ranks: job.state() returns its full weight')
        return module.weight

    def adopt(self, table: str, weight: nn.Parameter) -> None:
        """Use this parameter, which may have other owners, as the table's weight; reset its optimizer state."""
        module = self.holder(table)
        if weight.shape != module.weight.shape:
            raise UserError(f'table "{table}" is {tuple(module.weight.shape)}, the weight {tuple(weight.shape)}')
        for other in self.tables if self.optimizer is not None else ():
            if other.name != table and self.weight(other.name) is weight:
                raise UserError(
                    f'tables "{other.name}" and "{table}" share one weight, and each would update it separately: '
                    "make it one table that several Features read"
                )
        module.weight = weight
        use_huge_pages(weight, collapse=True)
        for name, state in module.named_buffers():
            fresh = torch.full(state.shape, module.initial_state, device=weight.device, dtype=state.dtype)
            setattr(module, name, fresh)
        self.exchange.reload()

    def state(self, table: str) -> dict[str, Tensor]:
        """Optimizer state tensors of a table by name; empty if its optimizer has none."""
        self.exchange.write_back()
        return dict(self.holder(table).named_buffers())

    def forward(self, batch: Batch | Jagged) -> Any:
        features = batch.features if isinstance(batch, Batch) else batch
        is_meta = features.values.device.type == "meta"
        return self.outputs(self.blank(features) if is_meta else self.exchange.forward(features))

    def read(self, features: Jagged) -> Jagged:
        """Select the features of these tables from a batch, ordered and named as in `self.features`."""
        sources = tuple(feature.ids or feature.name for feature in self.features)
        ids = features if features.features == sources else select(features, sources)
        bounds, names = ids.id_bounds, tuple(feature.name for feature in self.features)
        ids = ids if names == sources else replace(ids, features=names)
        weights = self.id_weights(ids)
        ids = ids if weights is ids.weights else replace(ids, weights=weights)
        return ids if bounds is None else with_id_bounds(ids, bounds)

    def blank(self, features: Jagged, device: torch.device | str = "meta") -> Vectors:
        """Vectors of the right shapes with uninitialized values, for tracing."""
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
        """Raise an error if an id is not a row of its table; works for tables on the meta device."""
        with self.naming_errors():
            reference.check_ids(self.weights(), self.kernel_ids(ids), [table.growth is None for table in self.tables])

    def lookup(self, ids: Jagged) -> Vectors:
        """Look up ids from `read` in the tables of this process; an id outside its table is an error."""
        if growing := [table.name for table in self.tables if table.growth is not None]:
            raise UserError(f'table "{growing[0]}" grows: look it up and train it in a job, build(model, plan)')
        with self.naming_errors():
            if torch.is_grad_enabled():
                pooled, *sequences = embedding.lookup(self.weights(), self.kernel_ids(ids))
            else:
                pooled, *sequences = embedding.lookup_into(self._buffer_pool, self.weights(), self.kernel_ids(ids))
        return self.vectors(pooled, sequences)

    def check_finite(self) -> None:
        """Raise an error if a weight of this process is NaN or inf; `Job.check_weights` checks all ranks."""
        for table in self.tables:
            check_finite(f'table "{table.name}"', self.weight(table.name))

    @torch.no_grad()
    def update(self, ids: Any, gradients: Any) -> None:
        """One optimizer step from the gradients of `lookup(ids)`; each distinct row is written once.

        A feature whose gradient is zero for every sample of the global batch is unused in this step: its rows do not
        step, and a table that no used feature reads keeps its state and step count, like a parameter without .grad in
        torch.optim. Over several ranks, both arguments are results of `exchange`.
        """
        if self.optimizer is None:
            raise UserError("these tables have no optimizer: pass EmbeddingBags(..., optimizer)")
        steps = {name: step + 1 for name, step in self.steps.items()}
        used = self.exchange.update(ids, gradients, self.optimizer, steps)
        used_tables = {feature.table for feature in self.features if feature.name in used}
        stepped_tables = {name for name in used_tables if self.holder(name).is_trained}
        self.steps = {name: step + (name in stepped_tables) for name, step in self.steps.items()}

    def weight_gradients(self, ids: Jagged, gradients: Vectors) -> Tensor:
        """Gradients of the id weights."""
        return embedding.id_weight_gradients(self.weights(), self.kernel_ids(ids), gradients.tensors())

    @property
    def trained(self) -> bool:
        """Whether `update` changes any table: there is an optimizer, and not all tables are frozen."""
        return self.optimizer is not None and any(self.holder(table.name).is_trained for table in self.tables)

    def hold(self, dtypes: Mapping[str, Dtype]) -> None:
        """Convert each table's weights to its dtype; optimizer states keep theirs."""
        for table in self.tables:
            self.holder(table.name).cast(dtypes[table.name])
        self.tables = tuple(replace(table, dtype=dtypes[table.name]) for table in self.tables)
        for name, member in self.named_children():
            if isinstance(member, EmbeddingTables):
                member.hold({table.name: dtypes[f"{name}.{table.name}"] for table in member.tables})

    def give_up(self, exchange: Exchange) -> None:
        """Free the local tables; from now on `exchange` looks up and updates their shards."""
        for table in self.tables:
            self.holder(table.name).release()
        self.exchange = exchange

    def optimizer_state(self) -> dict[str, Tensor]:
        """Optimizer state by "table.name", with step counts and stochastic rounding keys."""
        state = {f"{table.name}.step": torch.tensor(self.steps[table.name]) for table in self.tables}
        state |= {
            f"{table.name}.{ROUNDING_KEY}": torch.tensor(self.holder(table.name).rounding_key) for table in self.tables
        }
        for table in self.tables:
            state |= {f"{table.name}.{name}": tensor for name, tensor in self.state(table.name).items()}
        return state

    @torch.no_grad()
    def load_optimizer_state(self, saved: Mapping[str, Tensor]) -> None:
        """Load an `optimizer_state()`; a name that is missing, unexpected or of another shape is an error.

        Only stochastic rounding keys may be missing, which earlier versions did not save: current keys then stay.
        """
        current = self.optimizer_state()
        saved = {name: value for name, value in current.items() if name.endswith(f".{ROUNDING_KEY}")} | dict(saved)
        for name in sorted(set(current) ^ set(saved)):
            raise UserError(f'optimizer state "{name}" is {"missing" if name in current else "not of these tables"}')
        for name, state in current.items():
            actual, expected = (f"{t.dtype} {tuple(t.shape)}".removeprefix("torch.") for t in (saved[name], state))
            if actual != expected:
                raise UserError(f'optimizer state "{name}" is {actual}; wanted {expected}')
        for name, state in current.items():
            state.copy_(saved[name])
        self.steps = {table.name: int(saved[f"{table.name}.step"]) for table in self.tables}
        for table in self.tables:
            self.holder(table.name).rounding_key = int(saved[f"{table.name}.{ROUNDING_KEY}"])
        self.exchange.reload()

    def set_path(self, path: str) -> None:
        """Include the module path in the tables' seeds, so that tables of equal name in two modules differ."""
        for table in self.tables:
            self.holder(table.name).set_path(path)

    def reset_parameters(self) -> None:
        """Initialize weights, from torch's seed and the table's name, and states; set step counts to 0."""
        self.exchange.write_back()  # no copy of a row may arrive later
        for table in self.tables:
            self.holder(table.name).reset()
        self.steps = dict.fromkeys(self.steps, 0)
        self.exchange.reload()

    def extra_repr(self) -> str:
        rows = sum(table.rows for table in self.tables)
        return f"{len(self.tables)} tables, {rows:,} rows, {len(self.features)} features, {self.optimizer}"

    def vectors(self, pooled_BD: Tensor, sequences: Sequence[Tensor]) -> Vectors:
        pooled = [i for i, feature in enumerate(self.features) if feature.pooling != "none"]
        unpooled = [feature.name for feature in self.features if feature.pooling == "none"]
        return Vectors(
            tuple(self.features[i].name for i in pooled),
            tuple(self.dims[i] for i in pooled),
            pooled_BD,
            dict(zip(unpooled, sequences, strict=True)),
        )

    def weights(self) -> list[Tensor]:
        """The weight of each table, in the order of `tables`."""
        self.exchange.write_back()
        return [self._own_weight(table.name) for table in self.tables]

    def kernel_ids(self, ids: Jagged) -> Ids:
        """Ids from `read`, as arguments of the kernels."""
        indices = {table.name: index for index, table in enumerate(self.tables)}
        kernel_ids = Ids(
            ids.values,
            lengths_to_offsets(ids.lengths) if ids.id_bounds is None else offsets(ids),
            ids.weights,
            [indices[feature.table] for feature in self.features],
            [POOLINGS.index(feature.pooling) for feature in self.features],
        )
        return with_bounds(kernel_ids, ids.id_bounds)

    @contextmanager
    def naming_errors(self) -> Iterator[None]:
        """Add table and feature names to errors about ids outside their tables."""
        try:
            yield
        except IdOutOfRange as error:
            feature = self.features[error.feature]
            rows = next(table.rows for table in self.tables if table.name == feature.table)
            raise UserError(
                f'table "{feature.table}", feature "{feature.name}": id {error.id} is outside its {rows} rows '
                f"(0 to {rows - 1}); give the table more rows or hash the ids"
            ) from None


class EmbeddingBags(EmbeddingTables):
    """Tables, the features that read them, and the optimizer that updates them.

    `prefix` starts the tables' state dict keys: "embedding_bags.site.weight" as in TorchRec by default, or
    "site.weight" with prefix "". `weighted`: whether ids have weights; None: they do if the batch has weights.
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
        self._declare(tables, features, weighted)
        self.optimizer = optimizer
        self.steps = {table.name: 0 for table in tables}
        holder = nn.Module() if prefix else self
        if prefix:
            self.add_module(prefix, holder)
        for table in self.tables:
            if hasattr(holder, table.name):
                raise UserError(f'table "{table.name}": torch modules reserve this name; choose another')
            holder.add_module(table.name, TableWeights(table, optimizer))
        self._holder = (holder,)  # in a tuple, so that it is not registered a second time

    def outputs(self, vectors: Vectors | LazyValue) -> Any:
        return vectors

    def id_weights(self, ids: Jagged) -> Tensor | None:
        if self.weighted and ids.weights is None:
            raise UserError("these tables pool by id weights and the batch has none; pass Jagged(..., weights)")
        return None if self.weighted is False else ids.weights

    def holder(self, table: str) -> TableWeights:
        """The module that holds a table's weight and optimizer state."""
        module = self._holder[0]._modules[table]  # getattr of a module looks in three places, for each table and step
        assert isinstance(module, TableWeights)
        module.check_dtype()
        return module


def find_tables(model: nn.Module) -> Iterator[tuple[str, EmbeddingTables]]:
    """The EmbeddingTables of a model with their paths, without members of an EmbeddingBagsDict."""
    members: set[nn.Module] = set()
    for path, module in model.named_modules():
        if isinstance(module, EmbeddingTables) and module not in members:
            members.update(module.modules())
            yield path, module


def _faults(tables: Sequence[Table], features: Sequence[Feature], optimizer: SparseOptimizer | None) -> Iterator[str]:
    if not tables:
        yield "EmbeddingBags without a table; pass at least one"
    yield from table_faults(tables)
    yield from feature_faults(features, tables)
    if optimizer is not None:
        yield from optimizer_faults(optimizer)
    read_tables = {feature.table for feature in features}
    for table in tables:
        if "." in table.name:
            yield f'table "{table.name}": a dot in a name would split its state_dict key; use "_"'
        if table.name not in read_tables:
            yield f'table "{table.name}" is read by no feature; add a Feature or drop the table'

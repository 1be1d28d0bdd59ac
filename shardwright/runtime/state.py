"""A job's state by logical name: weights, optimizer state of tables and dense model, step count, random generators.

The names are independent of sharding and row order, so a state can be restored under another plan. Restoring is
strict: a name that is missing or unexpected, or a tensor of another shape, is an error, never a silent fresh start.

Shape legend: R rows, C columns of a rectangle.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from shardwright.checkpoint.manifest import MODEL_PREFIX
from shardwright.dense.full_state import local_shape, parameter_rectangle, parameter_shards, unshard_state
from shardwright.embeddings import full_tables, growing_tables
from shardwright.embeddings.exchange import ShardedTables
from shardwright.errors import UserError
from shardwright.kernels.matmul import library_in_use
from shardwright.kernels.rounding import copy_finite
from shardwright.layers.embedding import ROUNDING_KEY, EmbeddingTables, find_tables
from shardwright.layers.table_weights import TableWeights
from shardwright.parameter_shard import ParameterShard
from shardwright.rectangle import Rectangle, dtype_name, full_rectangle
from shardwright.runtime.changed_rows import changed_row_masks
from shardwright.runtime.optimizer_state import (
    OPTIMIZER,
    check_groups,
    check_optimizer_numbers,
    load_optimizer,
    merge_optimizer_numbers,
    optimizer_numbers,
    optimizer_tensors,
    parameter_names,
    split_name,
)
from shardwright.runtime.randomness import (
    RANDOM,
    RANDOM_CUDA,
    python_random_states,
    restore_random_states,
    torch_random_states,
)
from shardwright.runtime.rank_group import ONE_RANK, RankGroup
from shardwright.spec.workload import MAX_GROWING_ROWS

RANDOMS = (RANDOM, RANDOM_CUDA)
RESIDUALS = "wire"  # error feedback residuals
PER_RANK_NAMES = (*RANDOMS, RESIDUALS)  # state of a rank, not of the model: left out when names are compared
TensorSpec = tuple[str, tuple[int, ...]]
T = TypeVar("T")


class SavedState(Protocol):
    """A state to restore from: in memory, or a checkpoint."""

    @property
    def numbers(self) -> Mapping[str, Any]: ...

    @property
    def tensor_specs(self) -> dict[str, TensorSpec]:
        """The dtype and shape of each tensor."""
        ...

    def fill(self, rectangles: Sequence[Rectangle]) -> None:
        """Copy the saved values into the tensors of these rectangles."""
        ...

    def row_ids(self, name: str, removed: str) -> Tensor:
        """The ids of the rows of a tensor that grows; `removed`: the name of the tensor of rows that have ended."""
        ...


@dataclass(frozen=True, slots=True)
class State:
    """A state in memory, with full tensors. `ids`: of tensors that grow, the ids of their rows in ascending order."""

    tensors: dict[str, Tensor]
    numbers: dict[str, Any]  # JSON values
    ids: dict[str, Tensor] = field(default_factory=dict)

    @property
    def tensor_specs(self) -> dict[str, TensorSpec]:
        specs = _tensor_specs(self.tensors)
        return specs | {name: (specs[name][0], (MAX_GROWING_ROWS, *specs[name][1][1:])) for name in self.ids}

    def row_ids(self, name: str, removed: str) -> Tensor:
        return self.ids[name]

    @torch.no_grad()
    def fill(self, rectangles: Sequence[Rectangle]) -> None:
        for rect in rectangles:
            values = self._values(rect)
            if rect.stored is None:
                copy_finite(rect.values, values)
            else:
                values_RC = values.reshape(rect.values_RC.shape).to(rect.values.dtype)
                rect.stored.write(torch.arange(rect.num_rows), (0, values_RC.shape[1]), values_RC)

    def _values(self, rect: Rectangle) -> Tensor:
        saved = self.tensors[rect.name]
        if rect.values.shape == saved.shape and isinstance(rect.rows, tuple):
            return saved
        saved = saved.view(1) if not saved.dim() else saved
        rows = torch.arange(*rect.rows) if isinstance(rect.rows, tuple) else rect.rows
        values = saved[torch.searchsorted(self.ids[rect.name], rows) if rect.name in self.ids else rows]
        return torch.cat([values[:, a:b] for a, b in rect.cols], 1) if rect.cols else values


@dataclass(frozen=True, slots=True)
class LocalState:
    """A rank's part of a job's state, which it holds, writes and restores.

    A rank of a pipeline has tensors that others do not have: names are complete, and checked, over all `ranks`. Of the
    ranks that hold the same tensors, the one with `is_writer` writes those that are not sharded.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer | None
    residuals: Sequence[Tensor] = ()  # of error feedback
    rank: int = 0
    is_writer: bool = True
    ranks: RankGroup = ONE_RANK  # those that have different tensors

    def capture(self, step: int) -> State:
        """Capture the full state in memory. All ranks call it.

        Sharded tables are gathered to rank 0 (on lane `wire`) and are meta tensors on other ranks; sharded dense
        parameters, other ranks' parts of a pipeline and their optimizer state are gathered to all.
        """
        model, optimizer = self.model, self.optimizer
        tensors = _unshard_dense(model, _model_tensors(model) | optimizer_tensors(model, optimizer))
        tensors = self.ranks.broadcast_missing(tensors) | _sharded_tensors(model, full_tables.gather_state)
        growing = _sharded_tensors(model, full_tables.gather_growing)
        tensors |= {name: values for name, (_, values) in growing.items()}
        ids = {name: own for name, (own, _) in growing.items()}
        return State(tensors | torch_random_states(), self.numbers(step), ids)

    def numbers(self, step: int) -> dict[str, Any]:
        """The part of the state that is not tensors, as JSON values. All ranks call it."""
        numbers: dict[str, Any] = {"step": step, "random": python_random_states()}
        numbers |= {"tables": _table_optimizers(self.model), "products": library_in_use()}
        numbers |= {"growth": growth} if (growth := _growth_numbers(self.model)) else {}
        optimizers = self.ranks.all_gather_json(optimizer_numbers(self.model, self.optimizer))
        optimizer = merge_optimizer_numbers(optimizers)
        return numbers | ({"optimizer": optimizer} if optimizer is not None else {})

    def rectangles(self) -> list[Rectangle]:
        """What this rank writes: each value is written by exactly one rank."""
        random_states = {_rank_name(name, self.rank): tensor for name, tensor in torch_random_states().items()}
        parts = [full_rectangle(name, tensor) for name, tensor in random_states.items()]
        tensors = _model_tensors(self.model) | optimizer_tensors(self.model, self.optimizer)
        return [*parts, *self._rectangles_to_write(tensors), *residual_rectangles(self.residuals, self.rank)]

    def weights(self) -> list[Rectangle]:
        """The weights and buffers that this rank writes, without optimizer state and random generators."""
        return [
            rect for rect in self._rectangles_to_write(_model_tensors(self.model)) if rect.name.startswith(MODEL_PREFIX)
        ]

    def _rectangles_to_write(self, tensors: Mapping[str, Tensor]) -> list[Rectangle]:
        """The parts of these tensors and of the sharded tables that this rank writes."""
        rectangles: list[Rectangle] = []
        changes, shards = _changed_rows(self.model), parameter_shards(self.model)
        for name, tensor in tensors.items():
            shard = shards.get(_parameter_name(name))
            writes = self.is_writer
            if shard is not None and shard.matches_shape(tensor):
                writes = shard.is_writer and tensor.numel() > 0
            if writes:
                rectangles.append(replace(parameter_rectangle(name, tensor, shard), changed_rows=changes.get(name)))
        for prefix, bags in _embedding_bags(self.model):
            if isinstance(bags.exchange, ShardedTables):
                names = _logical_names(prefix, bags)
                tables = full_tables.table_rectangles(bags.exchange, deduplicate=True)
                rectangles += [replace(rectangle, name=names[rectangle.name]) for rectangle in tables]
        return rectangles

    @torch.no_grad()
    def restore(self, saved: SavedState) -> list[str]:
        """Restore a state, or raise and change nothing. All ranks call it.

        Returns the names of tensors converted to another dtype.
        """
        model, optimizer, saved_optimizer = self.model, self.optimizer, saved.numbers.get("optimizer")
        tensors, specs, shards = _model_tensors(model), saved.tensor_specs, parameter_shards(model)
        targets = [
            parameter_rectangle(name, value, shards.get(_parameter_name(name))) for name, value in tensors.items()
        ]
        local = _tensor_specs(tensors | _sharded_tensors(model, full_tables.meta_state))
        local |= {target.name: (local[target.name][0], target.shape) for target in targets}
        _check_table_optimizers(saved, model)
        parts = self.ranks.all_gather_json((local, optimizer_numbers(model, optimizer)))
        expected = {name: (dtype, tuple(shape)) for part, _ in parts for name, (dtype, shape) in part.items()}
        for name in [name for name in expected if name.endswith(ROUNDING_KEY) and name not in specs]:
            del expected[name]  # older checkpoints do not have the keys: the current ones stay
        targets = [target for target in targets if target.name in expected]
        state_names = (saved_optimizer or {}).get("tensors", ())
        _check_names({*expected, *state_names}, {name for name in specs if not name.startswith(PER_RANK_NAMES)})
        converted = _check_specs(expected, specs)
        check_optimizer_numbers(saved_optimizer, merge_optimizer_numbers([numbers for _, numbers in parts]))
        check_groups(saved_optimizer, optimizer)
        own_parameters = {*parameter_names(model, optimizer)} if optimizer is not None else set()
        state_names = [name for name in state_names if _parameter_name(name) in own_parameters]
        random_names = [name if (name := _rank_name(key, self.rank)) in specs else key for key in RANDOMS]
        names = [name for name in (*state_names, *random_names) if name in specs]
        buffers = {name: _empty_tensor(specs[name], shards.get(_parameter_name(name))) for name in names}
        targets += [
            parameter_rectangle(name, buffer, shards.get(_parameter_name(name))) for name, buffer in buffers.items()
        ]
        for prefix, bags in _embedding_bags(model):
            if isinstance(bags.exchange, ShardedTables):
                logical = _logical_names(prefix, bags)
                growing_tables.load_ids(bags.exchange, logical, saved, saved.numbers.get("growth", {}).get(prefix))
                tables = full_tables.table_rectangles(bags.exchange)
                shards = [replace(shard, name=logical[shard.name]) for shard in tables]
                targets += [shard for shard in shards if not growing_tables.is_extra(shard)]
        saved.fill(targets)
        for prefix, bags in _embedding_bags(model):
            bags.load_optimizer_state({name: tensors[prefix + name] for name in bags.optimizer_state()})
        if optimizer is not None and saved_optimizer is not None:
            load_optimizer(saved_optimizer, model, optimizer, {name: buffers[name] for name in state_names})
            loaded = _tensor_specs(optimizer_tensors(model, optimizer))
            converted += [name for name in state_names if name in loaded and loaded[name][0] != specs[name][0]]
        for mask in changed_row_masks(model):
            mask.fill_(True)
        restore_random_states(saved.numbers, [buffers.get(name) for name in random_names], self.rank)
        return converted


def residual_rectangles(residuals: Sequence[Tensor], rank: int) -> list[Rectangle]:
    """This rank's error feedback residuals as rectangles."""
    return [full_rectangle(_rank_name(f"{RESIDUALS}.{i}", rank), residual) for i, residual in enumerate(residuals)]


@torch.no_grad()
def restore_residuals(saved: SavedState, residuals: Sequence[Tensor], rank: int, size: int) -> None:
    """Restore the error feedback residuals if the number of ranks and all shapes match; otherwise zero them."""
    targets, specs = residual_rectangles(residuals, rank), saved.tensor_specs
    same_size = len(saved.numbers.get("ranks", ())) == size
    if same_size and all(specs.get(target.name, ("", ()))[1] == target.shape for target in targets):
        saved.fill(targets)
        return
    for residual in residuals:
        residual.zero_()


def _model_tensors(model: nn.Module) -> dict[str, Tensor]:
    tensors = {f"{MODEL_PREFIX}{name}": value for name, value in model.state_dict().items()}
    for prefix, bags in _embedding_bags(model):
        tensors |= {prefix + name: value for name, value in bags.optimizer_state().items()}
    return tensors


def _parameter_name(name: str) -> str:
    """The parameter of a tensor in a state: of its weight or of its optimizer state."""
    return split_name(name)[0] if name.startswith(OPTIMIZER) else name.removeprefix(MODEL_PREFIX)


def _unshard_dense(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """All-gather sharded dense parameters, then their optimizer state, one key after the other."""
    shards_by_key: dict[str, dict[str, ParameterShard]] = {}
    shards, unsharded = parameter_shards(model), dict(tensors)
    for name in tensors:
        path = _parameter_name(name)
        key = split_name(name)[1] if name.startswith(OPTIMIZER) else ""
        if path in shards:
            shards_by_key.setdefault(key, {})[name] = shards[path]
    for key_shards in shards_by_key.values():
        unsharded = unshard_state(unsharded, key_shards)
    return unsharded


def _sharded_tensors(model: nn.Module, get: Callable[[ShardedTables], dict[str, T]]) -> dict[str, T]:
    """What `get` returns for the tensors of sharded tables, by their names in a state."""
    tensors: dict[str, T] = {}
    for prefix, bags in _embedding_bags(model):
        if isinstance(bags.exchange, ShardedTables):
            names = _logical_names(prefix, bags)
            tensors |= {names[name]: value for name, value in get(bags.exchange).items()}
    return tensors


def _logical_names(prefix: str, bags: EmbeddingTables) -> dict[str, str]:
    """The name in a state of each "table.weight" and "table.KEY" (KEY: of the table's optimizer state)."""
    path = f"{MODEL_PREFIX}{prefix.removeprefix('tables.')}"
    assert isinstance(bags.exchange, ShardedTables)
    modules = {module.table.name: name for name, module in bags.named_modules() if isinstance(module, TableWeights)}
    names = {}
    for name in full_tables.meta_state(bags.exchange):
        table, _, key = name.rpartition(".")
        is_published = key in ("weight", growing_tables.REMOVED)
        names[name] = f"{path}{modules[table]}.{key}" if is_published else prefix + name
    return names


def _embedding_bags(model: nn.Module) -> Iterator[tuple[str, EmbeddingTables]]:
    """The embedding tables of the model, with the prefix of their optimizer state's names."""
    for path, tables in find_tables(model):
        yield f"tables.{path}.", tables


def _growth_numbers(model: nn.Module) -> dict[str, Any]:
    """What tables that grow have in common on all ranks, by the prefix of the tables."""
    numbers = {
        prefix: growing_tables.growth_numbers(bags.exchange)
        for prefix, bags in _embedding_bags(model)
        if isinstance(bags.exchange, ShardedTables)
    }
    return {prefix: own for prefix, own in numbers.items() if own}


def _table_optimizers(model: nn.Module) -> dict[str, str]:
    """The optimizer kind of embedding tables, by path: names and shapes of the state do not distinguish all kinds."""
    return {
        prefix.split(".", 1)[1].removesuffix("."): bags.optimizer.kind
        for prefix, bags in _embedding_bags(model)
        if bags.optimizer
    }


def _check_table_optimizers(saved: SavedState, model: nn.Module) -> None:
    saved_kinds = saved.numbers.get("tables", {})
    for path, kind in _table_optimizers(model).items():
        if path in saved_kinds and saved_kinds[path] != kind:
            raise UserError(
                f'checkpoint: the tables of "{path}" were trained with {saved_kinds[path]}, this job has {kind}: '
                f"continue with {saved_kinds[path]}"
            )


def _rank_name(name: str, rank: int) -> str:
    """The name of a rank's own tensor; rank 0 has the plain name."""
    return f"{name}.rank{rank}" if rank else name


def _changed_rows(model: nn.Module) -> dict[str, Tensor | None]:
    """Masks of the changed rows of unsharded tables, by the names of their weights and optimizer states."""
    masks: dict[str, Tensor | None] = {}
    for prefix, bags in _embedding_bags(model):
        modules = {module: name for name, module in bags.named_modules() if isinstance(module, TableWeights)}
        for module, path in modules.items():
            masks[f"{MODEL_PREFIX}{prefix.removeprefix('tables.')}{path}.weight"] = module.changed_rows
            masks |= {f"{prefix}{module.table.name}.{name}": module.changed_rows for name, _ in module.named_buffers()}
    return masks


def _tensor_specs(tensors: Mapping[str, Tensor]) -> dict[str, TensorSpec]:
    return {name: (dtype_name(tensor.dtype), tuple(tensor.shape)) for name, tensor in tensors.items()}


def _is_float(spec: TensorSpec) -> bool:
    return getattr(torch, spec[0]).is_floating_point


def _empty_tensor(spec: TensorSpec, shard: ParameterShard | None) -> Tensor:
    return torch.empty(local_shape(spec[1], shard), dtype=getattr(torch, spec[0]))


def _check_specs(expected: Mapping[str, TensorSpec], saved: Mapping[str, TensorSpec]) -> list[str]:
    """Raise an error for another shape, or a dtype that cannot be converted; returns the names of those that can."""
    converted = []
    for name, spec in expected.items():
        if saved[name][1] != spec[1] or saved[name][0] != spec[0] and not (_is_float(saved[name]) and _is_float(spec)):
            texts = [f"{dtype} {shape}" for dtype, shape in (saved[name], spec)]
            raise UserError(
                f'checkpoint: "{name}" is {texts[0]}, the model has {texts[1]}; it was saved by another model'
            )
        converted += [name] * (saved[name][0] != spec[0])
    return converted


def _check_names(expected: set[str], saved: set[str]) -> None:
    missing, unexpected = sorted(expected - saved), sorted(saved - expected)
    if missing:
        raise UserError(f'checkpoint: "{missing[0]}" is missing ({len(missing)} in all); it was saved by another model')
    if unexpected:
        raise UserError(f'checkpoint: "{unexpected[0]}" is not in this model ({len(unexpected)} in all)')

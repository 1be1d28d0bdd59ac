"""A job's state by logical name: weights, optimizer state of tables and dense model, step count, random generators.

The names are independent of sharding and row order, so a state can be restored under another plan. Restoring is
strict: a name that is missing or unexpected, or a tensor of another shape, is an error, never a silent fresh start.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from shardwright.checkpoint.manifest import MODEL_PREFIX
from shardwright.dense.flat_parameter import ParameterShard
from shardwright.dense.full_state import local_shape, parameter_rectangle, parameter_shards, unshard_state
from shardwright.embeddings import full_tables
from shardwright.embeddings.exchange import ShardedTables
from shardwright.errors import UserError
from shardwright.kernels.matmul import library_in_use
from shardwright.kernels.rounding import copy_finite
from shardwright.layers.embedding import ROUNDING_KEY, EmbeddingBags
from shardwright.layers.table_weights import TableWeights
from shardwright.rectangle import Rectangle, dtype_name, full_rectangle
from shardwright.runtime.randomness import (
    RANDOM,
    RANDOM_CUDA,
    python_random_states,
    restore_random_states,
    torch_random_states,
)

OPTIMIZER = "optimizer."
RESIDUALS = "wire"  # error feedback residuals
PER_RANK_NAMES = (RANDOM, RANDOM_CUDA, RESIDUALS)  # state of a rank, not of the model: left out when names are compared
TensorSpec = tuple[str, tuple[int, ...]]


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


@dataclass(frozen=True, slots=True)
class State:
    """A state in memory, with full tensors."""

    tensors: dict[str, Tensor]
    numbers: dict[str, Any]  # JSON values

    @property
    def tensor_specs(self) -> dict[str, TensorSpec]:
        return _tensor_specs(self.tensors)

    @torch.no_grad()
    def fill(self, rectangles: Sequence[Rectangle]) -> None:
        for rect in rectangles:
            saved = self.tensors[rect.name]
            if rect.values.shape == saved.shape and isinstance(rect.rows, tuple):
                copy_finite(rect.values, saved)
                continue
            saved = saved.view(1) if not saved.dim() else saved
            rows = torch.arange(*rect.rows) if isinstance(rect.rows, tuple) else rect.rows
            values = saved[rows]
            copy_finite(rect.values, torch.cat([values[:, a:b] for a, b in rect.cols], 1) if rect.cols else values)


def capture(model: nn.Module, optimizer: torch.optim.Optimizer | None, step: int) -> State:
    """Capture the full state in memory. All ranks call it.

    Sharded tables are gathered to rank 0 (on lane `wire`) and are meta tensors on other ranks; sharded dense
    parameters and their optimizer state are all-gathered.
    """
    tensors = _unshard_dense(model, _model_tensors(model) | _optimizer_tensors(model, optimizer))
    tensors |= _sharded_tensors(model, full_tables.gather_state) | torch_random_states()
    return State(tensors, collect_numbers(model, optimizer, step))


def collect_numbers(model: nn.Module, optimizer: torch.optim.Optimizer | None, step: int) -> dict[str, Any]:
    """The part of a state that is not tensors, as JSON values."""
    numbers: dict[str, Any] = {"step": step, "random": python_random_states(), "tables": _table_optimizers(model)}
    numbers["products"] = library_in_use()
    if optimizer is not None:
        numbers["optimizer"] = {
            "kind": _optimizer_kind(optimizer),
            "parameters": _parameter_names(model, optimizer),
            "tensors": sorted(_optimizer_tensors(model, optimizer)),
            "rounding_key": getattr(optimizer, "rounding_key", None),
            "groups": [
                {key: value for key, value in group.items() if key != "params"}
                for group in optimizer.state_dict()["param_groups"]
            ],
        }
    return numbers


def local_rectangles(model: nn.Module, optimizer: torch.optim.Optimizer | None, rank: int) -> list[Rectangle]:
    """The part of the state that this rank writes: each value is written by exactly one rank."""
    rectangles = [full_rectangle(_rank_name(name, rank), tensor) for name, tensor in torch_random_states().items()]
    changes, shards = _changed_rows(model), parameter_shards(model)
    for name, tensor in (_model_tensors(model) | _optimizer_tensors(model, optimizer)).items():
        shard = shards.get(_split_name(name)[0])
        owns = rank == 0 if shard is None or not shard.matches_shape(tensor) else shard.is_writer and tensor.numel() > 0
        if owns:
            rectangles.append(replace(parameter_rectangle(name, tensor, shard), changed_rows=changes.get(name)))
    for prefix, bags in _embedding_bags(model):
        if isinstance(bags.exchange, ShardedTables):
            names = _logical_names(prefix, bags)
            rectangles += [
                replace(rectangle, name=names[rectangle.name])
                for rectangle in full_tables.table_rectangles(bags.exchange, deduplicate=True)
            ]
    return rectangles


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


def local_weights(model: nn.Module, rank: int) -> list[Rectangle]:
    """The part of the model's `state_dict` that this rank writes, without optimizer state and random generators."""
    return [rectangle for rectangle in local_rectangles(model, None, rank) if rectangle.name.startswith(MODEL_PREFIX)]


def track_changes(model: nn.Module) -> None:
    """Record which table rows are updated from now on; clears earlier records."""
    for _, bags in _embedding_bags(model):
        if bags.optimizer is None:  # only the fused update records rows
            continue
        if isinstance(bags.exchange, ShardedTables):
            full_tables.track_changes(bags.exchange)
            continue
        for table in bags.tables:
            bags.holder(table.name).changed_rows = torch.zeros(table.rows, dtype=torch.bool)


def changed_row_masks(model: nn.Module) -> Iterator[Tensor]:
    """The masks of changed rows of all tables and table shards on this rank; writable."""
    for _, bags in _embedding_bags(model):
        table_masks = [bags.holder(table.name).changed_rows for table in bags.tables]
        shard_masks = (
            [mask for shards in bags.exchange.local_shards for mask in shards.changed_rows]
            if isinstance(bags.exchange, ShardedTables)
            else []
        )
        yield from (mask for mask in (*table_masks, *shard_masks) if mask is not None)


@torch.no_grad()
def restore(saved: SavedState, model: nn.Module, optimizer: torch.optim.Optimizer | None, rank: int = 0) -> list[str]:
    """Restore a state, or raise and change nothing. Returns the names of tensors converted to another dtype."""
    tensors, specs, shards = _model_tensors(model), saved.tensor_specs, parameter_shards(model)
    targets = [parameter_rectangle(name, value, shards.get(_split_name(name)[0])) for name, value in tensors.items()]
    expected = _tensor_specs(tensors | _sharded_tensors(model, full_tables.meta_state))
    expected |= {target.name: (expected[target.name][0], target.shape) for target in targets}
    state_names = (saved.numbers.get("optimizer") or {}).get("tensors", ())
    _check_table_optimizers(saved, model)
    for name in [name for name in expected if name.endswith(ROUNDING_KEY) and name not in specs]:
        del expected[name]  # older checkpoints do not have the keys: the current ones stay
    targets = [target for target in targets if target.name in expected]
    _check_names({*expected, *state_names}, {name for name in specs if not name.startswith(PER_RANK_NAMES)})
    converted = []
    for name, spec in expected.items():
        if specs[name][1] != spec[1] or specs[name][0] != spec[0] and not (_is_float(specs[name]) and _is_float(spec)):
            texts = [f"{dtype} {shape}" for dtype, shape in (specs[name], spec)]
            raise UserError(
                f'checkpoint: "{name}" is {texts[0]}, the model has {texts[1]}; it was saved by another model'
            )
        converted += [name] * (specs[name][0] != spec[0])
    groups = _optimizer_groups(saved, model, optimizer)
    random_names = [_rank_name(key, rank) if _rank_name(key, rank) in specs else key for key in (RANDOM, RANDOM_CUDA)]
    buffer_names = [name for name in (*state_names, *random_names) if name in specs]
    buffers = {name: _empty_tensor(specs[name], shards.get(_split_name(name)[0])) for name in buffer_names}
    targets = targets + [
        parameter_rectangle(name, buffer, shards.get(_split_name(name)[0])) for name, buffer in buffers.items()
    ]
    for prefix, bags in _embedding_bags(model):
        if isinstance(bags.exchange, ShardedTables):
            names = _logical_names(prefix, bags)
            targets += [replace(shard, name=names[shard.name]) for shard in full_tables.table_rectangles(bags.exchange)]
    saved.fill(targets)
    for prefix, bags in _embedding_bags(model):
        bags.load_optimizer_state({name: tensors[prefix + name] for name in bags.optimizer_state()})
    if optimizer is not None:
        names = _parameter_names(model, optimizer)
        optimizer.load_state_dict({"state": _group_states(names, {key: buffers[key] for key in state_names}), **groups})
        rounding_key = saved.numbers["optimizer"].get("rounding_key")
        if rounding_key is not None and hasattr(optimizer, "rounding_key"):
            optimizer.rounding_key = rounding_key  # pyright: ignore[reportAttributeAccessIssue]
        loaded_specs = _tensor_specs(_optimizer_tensors(model, optimizer))
        converted += [name for name in state_names if name in loaded_specs and loaded_specs[name][0] != specs[name][0]]
    for mask in changed_row_masks(model):
        mask.fill_(True)
    restore_random_states(saved.numbers, [buffers.get(name) for name in random_names], rank)
    return converted


def _model_tensors(model: nn.Module) -> dict[str, Tensor]:
    tensors = {f"{MODEL_PREFIX}{name}": value for name, value in model.state_dict().items()}
    for prefix, bags in _embedding_bags(model):
        tensors |= {prefix + name: value for name, value in bags.optimizer_state().items()}
    return tensors


def _split_name(name: str) -> tuple[str, str]:
    """The parameter's name and the key of its optimizer state, from a name in a state; key "": the parameter itself."""
    if name.startswith(OPTIMIZER):
        path, _, key = name.removeprefix(OPTIMIZER).rpartition(".")
        return path, key
    return name.removeprefix(MODEL_PREFIX), ""


def _unshard_dense(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """All-gather sharded dense parameters, then their optimizer state, one key after the other."""
    shards_by_key: dict[str, dict[str, ParameterShard]] = {}
    shards, unsharded = parameter_shards(model), dict(tensors)
    for name in tensors:
        path, key = _split_name(name)
        if path in shards:
            shards_by_key.setdefault(key, {})[name] = shards[path]
    for key_shards in shards_by_key.values():
        unsharded = unshard_state(unsharded, key_shards)
    return unsharded


def _sharded_tensors(model: nn.Module, get: Callable[[ShardedTables], dict[str, Tensor]]) -> dict[str, Tensor]:
    """The full tensors that `get` returns for sharded tables, by their names in a state."""
    tensors: dict[str, Tensor] = {}
    for prefix, bags in _embedding_bags(model):
        if isinstance(bags.exchange, ShardedTables):
            names = _logical_names(prefix, bags)
            tensors |= {names[name]: value for name, value in get(bags.exchange).items()}
    return tensors


def _logical_names(prefix: str, bags: EmbeddingBags) -> dict[str, str]:
    """The name in a state of each "table.weight" and "table.KEY" (KEY: of the table's optimizer state)."""
    path = f"{MODEL_PREFIX}{prefix.removeprefix('tables.')}"
    assert isinstance(bags.exchange, ShardedTables)
    modules = {module.table.name: name for name, module in bags.named_modules() if isinstance(module, TableWeights)}
    names = {}
    for name in full_tables.meta_state(bags.exchange):
        table, _, key = name.rpartition(".")
        names[name] = f"{path}{modules[table]}.weight" if key == "weight" else prefix + name
    return names


def _embedding_bags(model: nn.Module) -> Iterator[tuple[str, EmbeddingBags]]:
    """Every EmbeddingBags of the model, with the prefix of its optimizer state's names."""
    for path, module in model.named_modules():
        if isinstance(module, EmbeddingBags):
            yield f"tables.{path}.", module


def _optimizer_kind(optimizer: torch.optim.Optimizer) -> str:
    """The class whose state the optimizer has; a 16-bit replacement (`AdamBf16`) names the original in `kind`."""
    return getattr(optimizer, "kind", type(optimizer).__name__)


def _parameter_names(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """The names of the dense optimizer's parameters, in its order."""
    name_of = {id(parameter): name for name, parameter in model.named_parameters()}
    return [name_of[id(p)] for group in optimizer.param_groups for p in group["params"]]


def _optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Tensor]:
    if optimizer is None:
        return {}
    names, state = _parameter_names(model, optimizer), optimizer.state_dict()["state"]
    return {
        f"{OPTIMIZER}{names[index]}.{key}": torch.as_tensor(value)
        for index, values in state.items()
        for key, value in values.items()
    }


def _group_states(names: Sequence[str], values: Mapping[str, Tensor]) -> dict[int, dict[str, Tensor]]:
    """Saved optimizer state in the form of `torch.optim.Optimizer.load_state_dict`: by index of the parameter."""
    states: dict[int, dict[str, Tensor]] = {}
    for name, value in values.items():
        parameter, _, key = name.removeprefix(OPTIMIZER).rpartition(".")
        states.setdefault(names.index(parameter), {})[key] = value
    return states


def _optimizer_groups(state: SavedState, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    """The saved parameter groups in the form that the optimizer loads, checked against it; empty without optimizer."""
    saved_optimizer = state.numbers.get("optimizer")
    if saved_optimizer is None or optimizer is None:
        if (saved_optimizer is None) != (optimizer is None):
            sides = ("has no", "has one") if saved_optimizer is None else ("has", "has none")
            raise UserError(f"checkpoint: it {sides[0]} state of a dense optimizer, this job {sides[1]}")
        return {}
    current, names = optimizer.state_dict(), _parameter_names(model, optimizer)
    expected = {"kind": _optimizer_kind(optimizer), "parameters": names}
    for key, value in expected.items():
        if saved_optimizer[key] != value:
            raise UserError(f"checkpoint: the dense optimizer's {key} is {saved_optimizer[key]}, this job has {value}")
    counts = [len(groups) for groups in (saved_optimizer["groups"], current["param_groups"])]
    if counts[0] != counts[1]:
        raise UserError(
            f"checkpoint: the dense optimizer has {counts[0]} parameter groups, this job's has {counts[1]}; "
            "create it with the same groups, otherwise their learning rates would be lost"
        )
    groups = [
        (_with_tuples(group), current_group)
        for group, current_group in zip(saved_optimizer["groups"], current["param_groups"], strict=True)
    ]
    for number, (group, current_group) in enumerate(groups):
        for key in sorted(set(group) ^ (set(current_group) - {"params"})):
            where = "the checkpoint" if key in group else "this job"
            raise UserError(f'checkpoint: setting "{key}" of the dense optimizer\'s group {number} is only in {where}')
    merged = [group | {"params": current_group["params"]} for group, current_group in groups]
    return {"param_groups": merged}


def _table_optimizers(model: nn.Module) -> dict[str, str]:
    """The optimizer kind of each EmbeddingBags, by path: names and shapes of the state do not distinguish all kinds."""
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


def _check_names(expected: set[str], saved: set[str]) -> None:
    missing, unexpected = sorted(expected - saved), sorted(saved - expected)
    if missing:
        raise UserError(f'checkpoint: "{missing[0]}" is missing ({len(missing)} in all); it was saved by another model')
    if unexpected:
        raise UserError(f'checkpoint: "{unexpected[0]}" is not in this model ({len(unexpected)} in all)')


def _with_tuples(group: Mapping[str, Any]) -> dict[str, Any]:
    """Lists to tuples: JSON has no tuples, and torch's optimizers expect `betas` as a tuple."""
    return {key: tuple(value) if isinstance(value, list) else value for key, value in group.items()}

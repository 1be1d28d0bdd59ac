"""The state of a job by logical name: weights, optimizer state of tables and dense parts, step counts, randomness.

Names do not say how anything is cut or ordered, so that a state can be read back under another plan. Restoring is
strict: a name that is missing, unexpected or of another shape is an error, never a silent fresh start.
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
from shardwright.rectangle import Rectangle, dtype_name
from shardwright.rectangle import full_rectangle as all_of
from shardwright.runtime.randomness import (
    RANDOM,
    RANDOM_CUDA,
    python_random_states,
    restore_random_states,
    torch_random_states,
)

OPTIMIZER = "optimizer."
RESIDUALS = "wire"  # what rounding on the wire is still to add
PER_RANK_NAMES = (RANDOM, RANDOM_CUDA, RESIDUALS)  # what each rank has of its own: such names do not tell models apart
TensorSpec = tuple[str, tuple[int, ...]]


class SavedState(Protocol):
    """A state to be read back: in memory, or a checkpoint."""

    @property
    def numbers(self) -> Mapping[str, Any]: ...

    @property
    def tensor_specs(self) -> dict[str, TensorSpec]:
        """The dtype and shape of each tensor."""
        ...

    def fill(self, rectangles: Sequence[Rectangle]) -> None:
        """Put the values of these in their places."""
        ...


@dataclass(frozen=True, slots=True)
class State:
    tensors: dict[str, Tensor]
    numbers: dict[str, Any]  # JSON values

    @property
    def tensor_specs(self) -> dict[str, TensorSpec]:
        return _kinds(self.tensors)

    @torch.no_grad()
    def fill(self, rectangles: Sequence[Rectangle]) -> None:
        for one in rectangles:
            saved = self.tensors[one.name]
            if one.values.shape == saved.shape and isinstance(one.rows, tuple):
                copy_finite(one.values, saved)
                continue
            saved = saved.view(1) if not saved.dim() else saved
            rows = torch.arange(*one.rows) if isinstance(one.rows, tuple) else one.rows
            values = saved[rows]
            copy_finite(one.values, torch.cat([values[:, a:b] for a, b in one.cols], 1) if one.cols else values)


def capture(model: nn.Module, optimizer: torch.optim.Optimizer | None, step: int) -> State:
    """Tables that lie on several ranks are put together at the first, and have no values elsewhere."""
    tensors = _whole_dense(model, _model_tensors(model) | _optimizer_tensors(model, optimizer))
    tensors |= _sharded_tensors(model, full_tables.gather_state) | torch_random_states()
    return State(tensors, collect_numbers(model, optimizer, step))


def collect_numbers(model: nn.Module, optimizer: torch.optim.Optimizer | None, step: int) -> dict[str, Any]:
    """What a state has beside its tensors."""
    numbers: dict[str, Any] = {"step": step, "random": python_random_states(), "tables": _table_optimizers(model)}
    numbers["products"] = library_in_use()
    if optimizer is not None:
        numbers["optimizer"] = {
            "kind": _kind(optimizer),
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
    """What of the state this rank is to write: all ranks together write each number once."""
    found = [all_of(_of_rank(name, rank), tensor) for name, tensor in torch_random_states().items()]
    changes, shards = _changes(model), parameter_shards(model)
    for name, tensor in (_model_tensors(model) | _optimizer_tensors(model, optimizer)).items():
        shard = shards.get(_parameter_of(name)[0])
        mine = rank == 0 if shard is None or not shard.matches_shape(tensor) else shard.is_writer and tensor.numel() > 0
        if mine:
            found.append(replace(parameter_rectangle(name, tensor, shard), changed_rows=changes.get(name)))
    for prefix, bags in _bags(model):
        if isinstance(bags.exchange, ShardedTables):
            names = _logical(prefix, bags)
            found += [
                replace(one, name=names[one.name])
                for one in full_tables.table_rectangles(bags.exchange, deduplicate=True)
            ]
    return found


def residual_rectangles(residuals: Sequence[Tensor], rank: int) -> list[Rectangle]:
    """What rounding on the wire is still to add to this rank's gradients."""
    return [all_of(_of_rank(f"{RESIDUALS}.{at}", rank), one) for at, one in enumerate(residuals)]


@torch.no_grad()
def restore_residuals(saved: SavedState, residuals: Sequence[Tensor], rank: int, size: int) -> None:
    """As it was, if as many ranks have the same; else there is nothing to add yet."""
    wanted, kinds = residual_rectangles(residuals, rank), saved.tensor_specs
    same = len(saved.numbers.get("ranks", ())) == size
    if same and all(kinds.get(one.name, ("", ()))[1] == one.shape for one in wanted):
        saved.fill(wanted)
        return
    for one in residuals:
        one.zero_()


def local_weights(model: nn.Module, rank: int) -> list[Rectangle]:
    """Of those the ones of the model's own state."""
    return [one for one in local_rectangles(model, None, rank) if one.name.startswith(MODEL_PREFIX)]


def track_changes(model: nn.Module) -> None:
    """Note from now on which rows of tables are updated, and forget those before."""
    for _, bags in _bags(model):
        if bags.optimizer is None:  # what else may train them does not tell
            continue
        if isinstance(bags.exchange, ShardedTables):
            full_tables.track_changes(bags.exchange)
            continue
        for table in bags.tables:
            bags.holder(table.name).changed_rows = torch.zeros(table.rows, dtype=torch.bool)


def changed_row_masks(model: nn.Module) -> Iterator[Tensor]:
    """Where it is noted which rows of tables have changed."""
    for _, bags in _bags(model):
        here = [bags.holder(table.name).changed_rows for table in bags.tables]
        there = (
            [one for holding in bags.exchange.local_shards for one in holding.changed_rows]
            if isinstance(bags.exchange, ShardedTables)
            else []
        )
        yield from (one for one in (*here, *there) if one is not None)


@torch.no_grad()
def restore(saved: SavedState, model: nn.Module, optimizer: torch.optim.Optimizer | None, rank: int = 0) -> list[str]:
    """Nothing is changed unless all of it fits. Returns the names of tensors that are of another dtype here."""
    here, kinds, shards = _model_tensors(model), saved.tensor_specs, parameter_shards(model)
    parts = [parameter_rectangle(name, tensor, shards.get(_parameter_of(name)[0])) for name, tensor in here.items()]
    mine = _kinds(here | _sharded_tensors(model, full_tables.meta_state))
    mine |= {part.name: (mine[part.name][0], part.shape) for part in parts}
    kept = (saved.numbers.get("optimizer") or {}).get("tensors", ())
    _check_table_optimizers(saved, model)
    for name in [name for name in mine if name.endswith(ROUNDING_KEY) and name not in kinds]:
        del mine[name]  # older checkpoints do not have them: the current keys stay
    parts = [part for part in parts if part.name in mine]
    _same_names({*mine, *kept}, {name for name in kinds if not name.startswith(PER_RANK_NAMES)})
    rounded = []
    for name, kind in mine.items():
        if kinds[name][1] != kind[1] or kinds[name][0] != kind[0] and not (_floats(kinds[name]) and _floats(kind)):
            told = [f"{dtype} {shape}" for dtype, shape in (kinds[name], kind)]
            raise UserError(
                f'checkpoint: "{name}" is {told[0]}, the model has {told[1]}; it was saved by another model'
            )
        rounded += [name] * (kinds[name][0] != kind[0])
    groups = _optimizer_groups(saved, model, optimizer)
    random_of = [_of_rank(name, rank) if _of_rank(name, rank) in kinds else name for name in (RANDOM, RANDOM_CUDA)]
    blanks = [name for name in (*kept, *random_of) if name in kinds]
    others = {name: _blank(kinds[name], shards.get(_parameter_of(name)[0])) for name in blanks}
    wanted = parts + [
        parameter_rectangle(name, one, shards.get(_parameter_of(name)[0])) for name, one in others.items()
    ]
    for prefix, bags in _bags(model):
        if isinstance(bags.exchange, ShardedTables):
            names = _logical(prefix, bags)
            wanted += [replace(one, name=names[one.name]) for one in full_tables.table_rectangles(bags.exchange)]
    saved.fill(wanted)
    for prefix, bags in _bags(model):
        bags.load_optimizer_state({name: here[prefix + name] for name in bags.optimizer_state()})
    if optimizer is not None:
        names = _parameter_names(model, optimizer)
        optimizer.load_state_dict({"state": _by_parameter(names, {name: others[name] for name in kept}), **groups})
        rounding_key = saved.numbers["optimizer"].get("rounding_key")
        if rounding_key is not None and hasattr(optimizer, "rounding_key"):
            optimizer.rounding_key = rounding_key  # pyright: ignore[reportAttributeAccessIssue]
        now = _kinds(_optimizer_tensors(model, optimizer))
        rounded += [name for name in kept if name in now and now[name][0] != kinds[name][0]]
    for changed in changed_row_masks(model):
        changed.fill_(True)
    restore_random_states(saved.numbers, [others.get(name) for name in random_of], rank)
    return rounded


def _model_tensors(model: nn.Module) -> dict[str, Tensor]:
    tensors = {f"{MODEL_PREFIX}{name}": value for name, value in model.state_dict().items()}
    for prefix, bags in _bags(model):
        tensors |= {prefix + name: value for name, value in bags.optimizer_state().items()}
    return tensors


def _parameter_of(name: str) -> tuple[str, str]:
    """The parameter that a tensor of a state is, or is part of the optimizer's state of, and which part."""
    if name.startswith(OPTIMIZER):
        path, _, key = name.removeprefix(OPTIMIZER).rpartition(".")
        return path, key
    return name.removeprefix(MODEL_PREFIX), ""


def _whole_dense(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """With what is cut among ranks put together, kind by kind."""
    kinds: dict[str, dict[str, ParameterShard]] = {}
    shards, found = parameter_shards(model), dict(tensors)
    for name in tensors:
        path, key = _parameter_of(name)
        if path in shards:
            kinds.setdefault(key, {})[name] = shards[path]
    for some in kinds.values():
        found = unshard_state(found, some)
    return found


def _sharded_tensors(model: nn.Module, get: Callable[[ShardedTables], dict[str, Tensor]]) -> dict[str, Tensor]:
    """What tables over ranks hold, by the names that whole tables have."""
    found: dict[str, Tensor] = {}
    for prefix, bags in _bags(model):
        if isinstance(bags.exchange, ShardedTables):
            names = _logical(prefix, bags)
            found |= {names[name]: value for name, value in get(bags.exchange).items()}
    return found


def _logical(prefix: str, bags: EmbeddingBags) -> dict[str, str]:
    """ "table.weight" and "table.state" to the names in a state."""
    path = f"{MODEL_PREFIX}{prefix.removeprefix('tables.')}"
    assert isinstance(bags.exchange, ShardedTables)
    modules = {module.table.name: name for name, module in bags.named_modules() if isinstance(module, TableWeights)}
    found = {}
    for name in full_tables.meta_state(bags.exchange):
        table, _, part = name.rpartition(".")
        found[name] = f"{path}{modules[table]}.weight" if part == "weight" else prefix + name
    return found


def _bags(model: nn.Module) -> Iterator[tuple[str, EmbeddingBags]]:
    """Every EmbeddingBags of the model, and what its optimizer's state is called by."""
    for path, module in model.named_modules():
        if isinstance(module, EmbeddingBags):
            yield f"tables.{path}.", module


def _kind(optimizer: torch.optim.Optimizer) -> str:
    """Whose state it has: one that rounds it says whose that is."""
    return getattr(optimizer, "kind", type(optimizer).__name__)


def _parameter_names(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """The dense optimizer's parameters by name, in its order."""
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


def _by_parameter(names: Sequence[str], kept: Mapping[str, Tensor]) -> dict[int, dict[str, Tensor]]:
    """In the form that an optimizer loads."""
    found: dict[int, dict[str, Tensor]] = {}
    for name, value in kept.items():
        parameter, _, key = name.removeprefix(OPTIMIZER).rpartition(".")
        found.setdefault(names.index(parameter), {})[key] = value
    return found


def _optimizer_groups(saved_: SavedState, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    """The saved groups in the form that this optimizer loads, checked against it; nothing without an optimizer."""
    saved = saved_.numbers.get("optimizer")
    if saved is None or optimizer is None:
        if (saved is None) != (optimizer is None):
            sides = ("has none", "has one") if saved is None else ("has one", "has none")
            raise UserError(f"checkpoint: {sides[0]} for the state of a dense optimizer, this job {sides[1]}")
        return {}
    known, names = optimizer.state_dict(), _parameter_names(model, optimizer)
    mine = {"kind": _kind(optimizer), "parameters": names}
    for what, value in mine.items():
        if saved[what] != value:
            raise UserError(f"checkpoint: the dense optimizer's {what} is {saved[what]}, this job has {value}")
    counts = [len(groups) for groups in (saved["groups"], known["param_groups"])]
    if counts[0] != counts[1]:
        raise UserError(
            f"checkpoint: the dense optimizer has {counts[0]} parameter groups, this job's has {counts[1]}: "
            "make it with the same groups, whose learning rates would otherwise be lost"
        )
    groups = [
        (_with_tuples(group), group_now)
        for group, group_now in zip(saved["groups"], known["param_groups"], strict=True)
    ]
    for number, (group, group_now) in enumerate(groups):
        for key in sorted(set(group) ^ (set(group_now) - {"params"})):
            where = "the checkpoint" if key in group else "this job"
            raise UserError(f'checkpoint: setting "{key}" of the dense optimizer\'s group {number} is only in {where}')
    merged = [group | {"params": group_now["params"]} for group, group_now in groups]
    return {"param_groups": merged}


def _table_optimizers(model: nn.Module) -> dict[str, str]:
    """The optimizer kind of each EmbeddingBags, by path: names and shapes of the state do not distinguish all kinds."""
    return {
        prefix.split(".", 1)[1].removesuffix("."): bags.optimizer.kind
        for prefix, bags in _bags(model)
        if bags.optimizer
    }


def _check_table_optimizers(saved: SavedState, model: nn.Module) -> None:
    before = saved.numbers.get("tables", {})
    for path, kind in _table_optimizers(model).items():
        if path in before and before[path] != kind:
            raise UserError(
                f'checkpoint: the tables of "{path}" were trained with {before[path]}, this job has {kind}: '
                f"continue with {before[path]}"
            )


def _of_rank(name: str, rank: int) -> str:
    return f"{name}.rank{rank}" if rank else name


def _changes(model: nn.Module) -> dict[str, Tensor | None]:
    """Which rows of the tables that are here have changed, by the names of their weights and states."""
    found: dict[str, Tensor | None] = {}
    for prefix, bags in _bags(model):
        modules = {module: name for name, module in bags.named_modules() if isinstance(module, TableWeights)}
        for module, path in modules.items():
            found[f"{MODEL_PREFIX}{prefix.removeprefix('tables.')}{path}.weight"] = module.changed_rows
            found |= {f"{prefix}{module.table.name}.{name}": module.changed_rows for name, _ in module.named_buffers()}
    return found


def _kinds(tensors: Mapping[str, Tensor]) -> dict[str, TensorSpec]:
    return {name: (dtype_name(tensor.dtype), tuple(tensor.shape)) for name, tensor in tensors.items()}


def _floats(kind: TensorSpec) -> bool:
    return getattr(torch, kind[0]).is_floating_point


def _blank(kind: TensorSpec, shard: ParameterShard | None) -> Tensor:
    return torch.empty(local_shape(kind[1], shard), dtype=getattr(torch, kind[0]))


def _same_names(expected: set[str], found: set[str]) -> None:
    missing, unexpected = sorted(expected - found), sorted(found - expected)
    if missing:
        raise UserError(f'checkpoint: "{missing[0]}" is missing ({len(missing)} in all); it was saved by another model')
    if unexpected:
        raise UserError(f'checkpoint: "{unexpected[0]}" is not in this model ({len(unexpected)} in all)')


def _with_tuples(group: Mapping[str, Any]) -> dict[str, Any]:
    """JSON has no tuples; torch's optimizers want their betas as one."""
    return {key: tuple(value) if isinstance(value, list) else value for key, value in group.items()}

"""The state of a job by logical name: weights, optimizer state of tables and dense parts, step counts, randomness.

Names do not say how anything is cut or ordered, so that a state can be read back under another plan. Restoring is
strict: a name that is missing, unexpected or of another shape is an error, never a silent fresh start.
"""

import json
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shardwright.embeddings import whole
from shardwright.embeddings.exchange import Sharded
from shardwright.errors import UserError
from shardwright.layers.embedding import EmbeddingBags
from shardwright.layers.table import TableWeights

RANDOM = "random.torch"
RANDOM_CUDA = "random.cuda"


@dataclass(frozen=True, slots=True)
class State:
    tensors: dict[str, Tensor]
    numbers: dict[str, Any]  # JSON values


def capture(model: nn.Module, optimizer: torch.optim.Optimizer | None, step: int) -> State:
    """Tables that lie on several ranks are put together at the first, and have no values elsewhere."""
    tensors = _model_tensors(model) | _sharded_tensors(model, whole.collected) | _random_tensors()
    numbers: dict[str, Any] = {"step": step, "random": _random_numbers()}
    if optimizer is not None:
        names = _parameter_names(model, optimizer)
        kept = _optimizer_tensors(optimizer, names)
        tensors |= kept
        numbers["optimizer"] = {
            "kind": type(optimizer).__name__,
            "parameters": names,
            "tensors": sorted(kept),
            "groups": [
                {key: value for key, value in group.items() if key != "params"}
                for group in optimizer.state_dict()["param_groups"]
            ],
        }
    return State(tensors, numbers)


@torch.no_grad()
def restore(state: State, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    """Nothing is changed unless all of it fits."""
    mine, saved = _model_tensors(model) | _sharded_tensors(model, whole.shapes), state.tensors
    kept = (state.numbers.get("optimizer") or {}).get("tensors", ())
    _same_names({*mine, *_random_tensors(), *kept}, set(saved))
    for name, tensor in mine.items():
        told = [f"{str(t.dtype).removeprefix('torch.')} {tuple(t.shape)}" for t in (saved[name], tensor)]
        if told[0] != told[1]:
            raise UserError(
                f'checkpoint: "{name}" is {told[0]}, the model has {told[1]}; it was saved by another model'
            )
    loaded = _optimizer_state(state, model, optimizer)
    for name, tensor in mine.items():
        if not tensor.is_meta:
            tensor.copy_(saved[name])
    for prefix, bags in _bags(model):
        bags.load_optimizer_state({name: saved[prefix + name] for name in bags.optimizer_state()})
        if isinstance(bags.exchange, Sharded):
            names = _logical(prefix, bags)
            whole.taken(bags.exchange, {name: saved[names[name]] for name in names})
    if optimizer is not None:
        optimizer.load_state_dict(loaded)
    _set_random(state)


def _model_tensors(model: nn.Module) -> dict[str, Tensor]:
    tensors = {f"model.{name}": value for name, value in model.state_dict().items()}
    for prefix, bags in _bags(model):
        tensors |= {prefix + name: value for name, value in bags.optimizer_state().items()}
    return tensors


def _sharded_tensors(model: nn.Module, get: Callable[[Sharded], dict[str, Tensor]]) -> dict[str, Tensor]:
    """What tables over ranks hold, by the names that whole tables have."""
    found: dict[str, Tensor] = {}
    for prefix, bags in _bags(model):
        if isinstance(bags.exchange, Sharded):
            names = _logical(prefix, bags)
            found |= {names[name]: value for name, value in get(bags.exchange).items()}
    return found


def _logical(prefix: str, bags: EmbeddingBags) -> dict[str, str]:
    """ "table.weight" and "table.state" to the names in a state."""
    path = f"model.{prefix.removeprefix('tables.')}"
    assert isinstance(bags.exchange, Sharded)
    modules = {module.table.name: name for name, module in bags.named_modules() if isinstance(module, TableWeights)}
    found = {}
    for name in whole.shapes(bags.exchange):
        table, _, part = name.rpartition(".")
        found[name] = f"{path}{modules[table]}.weight" if part == "weight" else prefix + name
    return found


def _bags(model: nn.Module) -> Iterator[tuple[str, EmbeddingBags]]:
    """Every EmbeddingBags of the model, and what its optimizer's state is called by."""
    for path, module in model.named_modules():
        if isinstance(module, EmbeddingBags):
            yield f"tables.{path}.", module


def _parameter_names(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """The dense optimizer's parameters by name, in its order."""
    name_of = {id(parameter): name for name, parameter in model.named_parameters()}
    return [name_of[id(p)] for group in optimizer.param_groups for p in group["params"]]


def _optimizer_tensors(optimizer: torch.optim.Optimizer, names: list[str]) -> dict[str, Tensor]:
    state = optimizer.state_dict()["state"]
    return {
        f"optimizer.{names[index]}.{key}": torch.as_tensor(value)
        for index, values in state.items()
        for key, value in values.items()
    }


def _optimizer_state(state: State, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    """The saved state in the form that this optimizer loads, checked against it; empty without an optimizer."""
    saved = state.numbers.get("optimizer")
    if saved is None or optimizer is None:
        if (saved is None) != (optimizer is None):
            sides = ("has none", "has one") if saved is None else ("has one", "has none")
            raise UserError(f"checkpoint: {sides[0]} for the state of a dense optimizer, this job {sides[1]}")
        return {}
    known, names = optimizer.state_dict(), _parameter_names(model, optimizer)
    mine = {"kind": type(optimizer).__name__, "parameters": names}
    for what, value in mine.items():
        if saved[what] != value:
            raise UserError(f"checkpoint: the dense optimizer's {what} is {saved[what]}, this job has {value}")
    groups = [
        (_with_tuples(group), group_now)
        for group, group_now in zip(saved["groups"], known["param_groups"], strict=False)
    ]
    for number, (group, group_now) in enumerate(groups):
        for key in sorted(set(group) ^ (set(group_now) - {"params"})):
            where = "the checkpoint" if key in group else "this job"
            raise UserError(f'checkpoint: setting "{key}" of the dense optimizer\'s group {number} is only in {where}')
    tensors: dict[int, dict[str, Tensor]] = {}
    for name, value in state.tensors.items():
        if name.startswith("optimizer."):
            parameter, _, key = name.removeprefix("optimizer.").rpartition(".")
            tensors.setdefault(names.index(parameter), {})[key] = value
    merged = [group | {"params": group_now["params"]} for group, group_now in groups]
    return {"state": tensors, "param_groups": merged}


def _random_tensors() -> dict[str, Tensor]:
    cuda = {RANDOM_CUDA: torch.cuda.get_rng_state()} if torch.cuda.is_available() else {}
    return {RANDOM: torch.get_rng_state()} | cuda


def _random_numbers() -> dict[str, Any]:
    """The generators of Python and NumPy, which a user's own code may draw from."""
    states = {"python": random.getstate(), "numpy": np.random.get_state()}
    return json.loads(json.dumps(states, default=np.ndarray.tolist))


def _set_random(state: State) -> None:
    torch.set_rng_state(state.tensors[RANDOM])
    if RANDOM_CUDA in state.tensors:
        torch.cuda.set_rng_state(state.tensors[RANDOM_CUDA])
    version, words, gauss = state.numbers["random"]["python"]
    random.setstate((version, tuple(words), gauss))
    np.random.set_state(tuple(state.numbers["random"]["numpy"]))


def _same_names(expected: set[str], found: set[str]) -> None:
    missing, unexpected = sorted(expected - found), sorted(found - expected)
    if missing:
        raise UserError(f'checkpoint: "{missing[0]}" is missing ({len(missing)} in all); it was saved by another model')
    if unexpected:
        raise UserError(f'checkpoint: "{unexpected[0]}" is not in this model ({len(unexpected)} in all)')


def _with_tuples(group: Mapping[str, Any]) -> dict[str, Any]:
    """JSON has no tuples; torch's optimizers want their betas as one."""
    return {key: tuple(value) if isinstance(value, list) else value for key, value in group.items()}

"""The state of a job by logical name: weights, optimizer state of tables and dense parts, step counts, randomness.

Names do not say how anything is cut or ordered, so that a state can be read back under another plan. Restoring is
strict: a name that is missing, unexpected or of another shape is an error, never a silent fresh start.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.errors import UserError
from shardwright.layers.embedding import EmbeddingBags

RANDOM = "random.torch"


@dataclass(frozen=True, slots=True)
class State:
    tensors: dict[str, Tensor]
    numbers: dict[str, Any]  # JSON values


def capture(model: nn.Module, optimizer: torch.optim.Optimizer | None, step: int) -> State:
    tensors = _model_tensors(model) | {RANDOM: torch.get_rng_state()}
    numbers: dict[str, Any] = {"step": step}
    if optimizer is not None:
        kept = _optimizer_tensors(optimizer, _parameter_names(model, optimizer))
        tensors |= kept
        numbers["optimizer_tensors"] = sorted(kept)
        numbers["optimizer"] = [
            {key: value for key, value in group.items() if key != "params"}
            for group in optimizer.state_dict()["param_groups"]
        ]
    return State(tensors, numbers)


@torch.no_grad()
def restore(state: State, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    mine = _model_tensors(model)
    saved = state.tensors
    _same_names({*mine, RANDOM, *state.numbers.get("optimizer_tensors", ())}, set(saved))
    for name, tensor in mine.items():
        if tensor.shape != saved[name].shape:
            shapes = f"{tuple(saved[name].shape)}, the model has {tuple(tensor.shape)}"
            raise UserError(f'checkpoint: "{name}" is {shapes}; it was saved by another model')
        tensor.copy_(saved[name])
    for prefix, bags in _bags(model):
        names = bags.optimizer_state()
        bags.load_optimizer_state({name: saved[prefix + name] for name in names})
    if optimizer is not None:
        _load_optimizer(optimizer, _parameter_names(model, optimizer), state)
    torch.set_rng_state(saved[RANDOM])


def _model_tensors(model: nn.Module) -> dict[str, Tensor]:
    tensors = {f"model.{name}": value for name, value in model.state_dict().items()}
    for prefix, bags in _bags(model):
        tensors |= {prefix + name: value for name, value in bags.optimizer_state().items()}
    return tensors


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


def _load_optimizer(optimizer: torch.optim.Optimizer, names: list[str], saved: State) -> None:
    known = optimizer.state_dict()
    state: dict[int, dict[str, Tensor]] = {}
    for name, value in saved.tensors.items():
        if name.startswith("optimizer."):
            parameter, _, key = name.removeprefix("optimizer.").rpartition(".")
            if parameter not in names:
                raise UserError(f'checkpoint: optimizer state for "{parameter}", which this model does not train')
            state.setdefault(names.index(parameter), {})[key] = value
    groups = zip(saved.numbers["optimizer"], known["param_groups"], strict=True)
    merged = [_with_tuples(group) | {"params": mine["params"]} for group, mine in groups]
    optimizer.load_state_dict({"state": state, "param_groups": merged})


def _same_names(expected: set[str], found: set[str]) -> None:
    missing, unexpected = sorted(expected - found), sorted(found - expected)
    if missing:
        raise UserError(f'checkpoint: "{missing[0]}" is missing ({len(missing)} in all); it was saved by another model')
    if unexpected:
        raise UserError(f'checkpoint: "{unexpected[0]}" is not in this model ({len(unexpected)} in all)')


def _with_tuples(group: Mapping[str, Any]) -> dict[str, Any]:
    """JSON has no tuples; torch's optimizers want their betas as one."""
    return {key: tuple(value) if isinstance(value, list) else value for key, value in group.items()}

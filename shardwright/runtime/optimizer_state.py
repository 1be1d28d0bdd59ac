"""State of the dense optimizer by the names of its parameters: of one rank, the union over ranks, and its checks.

The ranks of a pipeline have different parameters, but the same parameter groups; a group may be empty on a rank.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.errors import UserError

OPTIMIZER = "optimizer."


def trainable_names(model: nn.Module) -> frozenset[str]:
    """The names of the parameters that a step updates: fixed by `build`, since stages and optimizers depend on them."""
    return frozenset(name for name, parameter in model.named_parameters() if parameter.requires_grad)


def parameter_names(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """The names of the optimizer's parameters, in its order."""
    name_of = {id(parameter): name for name, parameter in model.named_parameters()}
    return [name_of[id(p)] for group in optimizer.param_groups for p in group["params"]]


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Tensor]:
    """The tensors of the optimizer's state by their names in a job's state."""
    if optimizer is None:
        return {}
    names, state = parameter_names(model, optimizer), optimizer.state_dict()["state"]
    return {
        f"{OPTIMIZER}{names[index]}.{key}": torch.as_tensor(value)
        for index, values in state.items()
        for key, value in values.items()
    }


def split_name(name: str) -> tuple[str, str]:
    """The parameter's name and the key of the state, from the name of an optimizer's tensor."""
    path, _, key = name.removeprefix(OPTIMIZER).rpartition(".")
    return path, key


def optimizer_numbers(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Any] | None:
    """What this rank's optimizer is: JSON values; None without optimizer."""
    if optimizer is None:
        return None
    groups = optimizer.state_dict()["param_groups"]
    return {
        "kind": _kind(optimizer),
        "parameters": parameter_names(model, optimizer),
        "group_sizes": [len(group["params"]) for group in groups],
        "tensors": sorted(optimizer_tensors(model, optimizer)),
        "rounding_key": getattr(optimizer, "rounding_key", None),
        "groups": [{key: value for key, value in group.items() if key != "params"} for group in groups],
    }


def merge_optimizer_numbers(ranks: Sequence[dict[str, Any] | None]) -> dict[str, Any] | None:
    """The union of what the ranks' optimizers are; an error if their groups differ."""
    present = [(rank, numbers) for rank, numbers in enumerate(ranks) if numbers is not None]
    if not present:
        return None
    first_rank, first = present[0]
    for rank, numbers in present[1:]:
        if any(numbers[key] != first[key] for key in ("kind", "groups")):
            raise UserError(
                f"the dense optimizers of ranks {first_rank} and {rank} have different parameter groups or settings: "
                "create the same groups on every rank, also those that are empty there"
            )
    members: list[dict[str, None]] = [{} for _ in first["groups"]]
    for _, numbers in present:
        for name, group in _group_numbers(numbers).items():
            members[group][name] = None
    tensors = {name for _, numbers in present for name in numbers["tensors"]}
    return first | {
        "parameters": [name for group in members for name in group],
        "group_sizes": [len(group) for group in members],
        "tensors": sorted(tensors),
    }


def check_optimizer_numbers(saved: Mapping[str, Any] | None, current: Mapping[str, Any] | None) -> None:
    """Raise an error unless the saved optimizer and this job's are of one kind, with the same parameters by group."""
    if saved is None or current is None:
        if (saved is None) != (current is None):
            sides = ("has no", "has one") if saved is None else ("has", "has none")
            raise UserError(f"checkpoint: it {sides[0]} state of a dense optimizer, this job {sides[1]}")
        return
    if saved["kind"] != current["kind"]:
        raise UserError(f"checkpoint: the dense optimizer's kind is {saved['kind']}, this job has {current['kind']}")
    counts = [len(numbers["groups"]) for numbers in (saved, current)]
    if counts[0] != counts[1]:
        raise UserError(
            f"checkpoint: the dense optimizer has {counts[0]} parameter groups, this job's has {counts[1]}; "
            "create it with the same groups, otherwise their learning rates would be lost"
        )
    has_same_order = saved["parameters"] == current["parameters"]
    if has_same_order and saved.get("group_sizes") in (None, current["group_sizes"]):
        return
    for name in sorted({*saved["parameters"]} ^ {*current["parameters"]}):
        where = "the checkpoint" if name in saved["parameters"] else "this job"
        raise UserError(f'checkpoint: parameter "{name}" is trained by the dense optimizer only in {where}')
    groups = [_group_numbers(numbers) for numbers in (saved, current)]
    for name in current["parameters"]:
        if groups[0][name] != groups[1][name]:
            raise UserError(
                f'checkpoint: parameter "{name}" is in group {groups[0][name]} of the dense optimizer, in this job in '
                f"group {groups[1][name]}; create it with the same groups"
            )


def load_optimizer(
    saved: Mapping[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]
) -> None:
    """Load this rank's part of the saved state: settings from `saved`, and `tensors` by their names."""
    names = parameter_names(model, optimizer)
    states: dict[int, dict[str, Tensor]] = {}
    for name, value in tensors.items():
        parameter, key = split_name(name)
        states.setdefault(names.index(parameter), {})[key] = value
    optimizer.load_state_dict({"state": states, "param_groups": _merge_groups(saved, optimizer)})
    if saved.get("rounding_key") is not None and hasattr(optimizer, "rounding_key"):
        optimizer.rounding_key = saved["rounding_key"]  # pyright: ignore[reportAttributeAccessIssue]


def check_groups(saved: Mapping[str, Any] | None, optimizer: torch.optim.Optimizer | None) -> None:
    """Raise an error unless the groups of both have the same settings."""
    if saved is not None and optimizer is not None:
        _merge_groups(saved, optimizer)


def _merge_groups(saved: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The saved settings of each group, with this rank's parameters."""
    current_groups = optimizer.state_dict()["param_groups"]
    groups = list(zip(map(_with_tuples, saved["groups"]), current_groups, strict=True))
    for number, (group, current) in enumerate(groups):
        for key in sorted(set(group) ^ (set(current) - {"params"})):
            where = "the checkpoint" if key in group else "this job"
            raise UserError(f'checkpoint: setting "{key}" of the dense optimizer\'s group {number} is only in {where}')
    return [group | {"params": current["params"]} for group, current in groups]


def _group_numbers(numbers: Mapping[str, Any]) -> dict[str, int]:
    """The group of each parameter."""
    names, num_groups = numbers["parameters"], len(numbers["groups"])
    sizes = numbers.get("group_sizes", [len(names)] if num_groups == 1 else None)
    if sizes is None:
        raise UserError(
            f"checkpoint: an older version wrote it, and does not say which of the optimizer's {num_groups} groups has "
            "which parameters: load it where their order is the same, such as in one process, and save it again"
        )
    group_of_each = [group for group, size in enumerate(sizes) for _ in range(size)]
    return dict(zip(names, group_of_each, strict=True))


def _kind(optimizer: torch.optim.Optimizer) -> str:
    """The class whose state the optimizer has; a 16-bit replacement (`AdamBf16`) names the original in `kind`."""
    return getattr(optimizer, "kind", type(optimizer).__name__)


def _with_tuples(group: Mapping[str, Any]) -> dict[str, Any]:
    """Lists to tuples: JSON has no tuples, and torch's optimizers expect `betas` as a tuple."""
    return {key: tuple(value) if isinstance(value, list) else value for key, value in group.items()}

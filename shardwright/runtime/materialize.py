"""Real tensors for what was built under torch.device("meta"); what is real already only moves.

Each module made on the meta device is filled by its own reset_parameters(), or by that of a module around it.
"""

from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import Tensor, nn

from shardwright.errors import UserError


def materialize(
    model: nn.Module,
    device: torch.device,
    blocks: Collection[str] = (),
    on_materialized: Callable[[str], None] = lambda _: None,
) -> None:
    """Give every meta tensor of the model memory and its first value, keeping ties, and move the rest.

    `made` hears of each of these blocks once its tensors have their first values, before others are given memory; not
    of blocks that were real before, or that a module around them fills.
    """
    modules = dict(model.named_modules())
    empty = {name for name, module in modules.items() if any(t.is_meta for t in _own(module))}
    resets = {name for name, module in modules.items() if hasattr(module, "reset_parameters") and _all_meta(module)}
    for name in modules:
        if name in empty:
            _check(name, modules[name], resets)
    told = {name for name in blocks if name in modules and _all_meta(modules[name])}
    told = {name for name in told if not resets.intersection(_around(name)[:-1])}
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for name in modules:
        for key, parameter in modules[name].named_parameters(recurse=False) if name in empty else ():
            places.setdefault(id(parameter), []).append((modules[name], key))
    filled, resetting = set[nn.Module](), {modules[name] for name in resets}
    for name, module in reversed(modules.items()):
        inside = [*module.modules()] if name in resets else [module]  # what is in others, too, may have its turn later
        for each in reversed([one for one in inside if one not in filled]):
            filled.add(each)
            if any(tensor.is_meta for tensor in _own(each)):
                _fill(each, device, places)
            if each in resetting:
                each.reset_parameters()  # pyright: ignore[reportCallIssue]
        if name in told and not any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers())):
            on_materialized(name)
    model.to(device)


def _fill(module: nn.Module, device: torch.device, places: Mapping[int, Sequence[tuple[nn.Module, str]]]) -> None:
    """Memory for a module's own tensors, which those that are tied to them have at once."""
    before = {key: id(parameter) for key, parameter in module.named_parameters(recurse=False) if parameter.is_meta}
    tied = {key: parameter for key, parameter in module.named_parameters(recurse=False) if not parameter.is_meta}
    for key in tied:
        setattr(module, key, nn.Parameter(torch.empty(0, device="meta")))
    module.to_empty(device=device, recurse=False)
    for key, parameter in tied.items():
        setattr(module, key, parameter)
    for key, number in before.items():
        for other, name in places[number]:
            setattr(other, name, getattr(module, key))


def _check(name: str, module: nn.Module, resets: set[str]) -> None:
    shown = f'module "{name}" ({type(module).__name__})'
    if not all(tensor.is_meta for tensor in _own(module)):
        raise UserError(f"{shown} is partly on the meta device; build it whole inside torch.device('meta') or outside")
    if not resets.intersection(_around(name)):
        raise UserError(
            f"{shown} is on the meta device without reset_parameters(); "
            "add it, or build the model outside torch.device('meta')"
        )


def _around(name: str) -> list[str]:
    """The names of all modules that have this one, and its own."""
    parts = name.split(".") if name else []
    return [".".join(parts[:depth]) for depth in range(len(parts) + 1)]


def _own(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(recurse=False), *module.buffers(recurse=False)]


def _all_meta(module: nn.Module) -> bool:
    tensors = [*module.parameters(), *module.buffers()]
    return bool(tensors) and all(tensor.is_meta for tensor in tensors)

"""Real tensors for what was built under torch.device("meta"); what is real already only moves.

Each module made on the meta device is filled by its own reset_parameters(), or by that of a module around it.
"""

import torch
from torch import Tensor, nn

from shardwright.errors import UserError


def materialise(model: nn.Module, device: torch.device) -> None:
    """Give every meta tensor of the model memory and its first value, keeping ties, and move the rest."""
    empty = {name: module for name, module in model.named_modules() if any(t.is_meta for t in _own(module))}
    resets = {
        name: module
        for name, module in model.named_modules()
        if hasattr(module, "reset_parameters") and _all_meta(module)
    }
    for name, module in empty.items():
        _check(name, module, resets)
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in empty.values():
        for name, parameter in module.named_parameters(recurse=False):
            places.setdefault(id(parameter), []).append((module, name))
    for module in empty.values():
        module.to_empty(device=device, recurse=False)
    for (first, first_name), *others in places.values():
        for module, name in others:
            setattr(module, name, getattr(first, first_name))
    for module in reversed(resets.values()):
        module.reset_parameters()  # pyright: ignore[reportCallIssue]
    model.to(device)


def _check(name: str, module: nn.Module, resets: dict[str, nn.Module]) -> None:
    shown = f'module "{name}" ({type(module).__name__})'
    if not all(tensor.is_meta for tensor in _own(module)):
        raise UserError(f"{shown} is partly on the meta device; build it whole inside torch.device('meta') or outside")
    parts = name.split(".") if name else []
    around = (".".join(parts[:depth]) for depth in range(len(parts) + 1))
    if not any(path in resets for path in around):
        raise UserError(
            f"{shown} is on the meta device without reset_parameters(); "
            "add it, or build the model outside torch.device('meta')"
        )


def _own(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(recurse=False), *module.buffers(recurse=False)]


def _all_meta(module: nn.Module) -> bool:
    tensors = [*module.parameters(), *module.buffers()]
    return bool(tensors) and all(tensor.is_meta for tensor in tensors)

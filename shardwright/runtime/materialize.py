"""Materialize a model that was built under torch.device("meta"); real tensors are only moved to the device.

Each module on the meta device is initialized by its reset_parameters(), or by the one of a module that contains it.
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
    """Allocate and initialize every meta tensor of the model, keep tied parameters, and move other tensors to `device`.

    `on_materialized` is called with the name of each of `blocks` once its tensors are initialized, before memory for
    other modules is allocated. Not called for blocks that were real before or that a containing module initializes.
    """
    modules = dict(model.named_modules())
    meta_names = {name for name, module in modules.items() if any(t.is_meta for t in _direct_tensors(module))}
    resets = {name for name, module in modules.items() if hasattr(module, "reset_parameters") and _all_meta(module)}
    for name in modules:
        if name in meta_names:
            _check_module(name, modules[name], resets)
    reported = {name for name in blocks if name in modules and _all_meta(modules[name])}
    reported = {name for name in reported if not resets.intersection(_path_names(name)[:-1])}
    owners: dict[int, list[tuple[nn.Module, str]]] = {}
    for name in modules:
        for key, parameter in modules[name].named_parameters(recurse=False) if name in meta_names else ():
            owners.setdefault(id(parameter), []).append((modules[name], key))
    initialized, reset_modules = set[nn.Module](), {modules[name] for name in resets}
    for name, module in reversed(modules.items()):
        group = [*module.modules()] if name in resets else [module]  # a shared child may come later in this order
        for member in reversed([member for member in group if member not in initialized]):
            initialized.add(member)
            if any(tensor.is_meta for tensor in _direct_tensors(member)):
                _allocate(member, device, owners)
            if member in reset_modules:
                member.reset_parameters()  # pyright: ignore[reportCallIssue]
        if name in reported and not any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers())):
            on_materialized(name)
    model.to(device)


def _allocate(module: nn.Module, device: torch.device, owners: Mapping[int, Sequence[tuple[nn.Module, str]]]) -> None:
    """Allocate a module's direct meta tensors, and assign them to all modules that share them (tied parameters)."""
    meta_ids = {key: id(parameter) for key, parameter in module.named_parameters(recurse=False) if parameter.is_meta}
    tied = {key: parameter for key, parameter in module.named_parameters(recurse=False) if not parameter.is_meta}
    for key in tied:
        setattr(module, key, nn.Parameter(torch.empty(0, device="meta")))
    module.to_empty(device=device, recurse=False)
    for key, parameter in tied.items():
        setattr(module, key, parameter)
    for key, parameter_id in meta_ids.items():
        for owner, name in owners[parameter_id]:
            setattr(owner, name, getattr(module, key))


def _check_module(name: str, module: nn.Module, resets: set[str]) -> None:
    label = f'module "{name}" ({type(module).__name__})'
    if not all(tensor.is_meta for tensor in _direct_tensors(module)):
        raise UserError(f"{label} is partly on the meta device; build all of it inside torch.device('meta') or outside")
    if not resets.intersection(_path_names(name)):
        raise UserError(
            f"{label} is on the meta device without reset_parameters(); "
            "add it, or build the model outside torch.device('meta')"
        )


def _path_names(name: str) -> list[str]:
    """The names of all modules that contain this one, outermost first, then its own."""
    parts = name.split(".") if name else []
    return [".".join(parts[:depth]) for depth in range(len(parts) + 1)]


def _direct_tensors(module: nn.Module) -> list[Tensor]:
    """A module's parameters and buffers, without those of its children."""
    return [*module.parameters(recurse=False), *module.buffers(recurse=False)]


def _all_meta(module: nn.Module) -> bool:
    """Whether a module has tensors and all, with those of its children, are on the meta device."""
    tensors = [*module.parameters(), *module.buffers()]
    return bool(tensors) and all(tensor.is_meta for tensor in tensors)

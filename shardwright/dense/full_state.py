"""Sharded parameters by name: this rank's shards for state dicts, and the full tensors."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from shardwright.parameter_shard import ParameterShard, ShardedParameters, shard_of
from shardwright.rectangle import Rectangle, full_rectangle


def parameter_shards(model: nn.Module) -> dict[str, ParameterShard]:
    """This rank's shards by parameter name; unsharded parameters are left out."""
    named_parameters = model.named_parameters(remove_duplicate=False)
    return {name: shard for name, parameter in named_parameters if (shard := shard_of(parameter)) is not None}


def parameter_rectangle(name: str, values: Tensor, shard: ParameterShard | None) -> Rectangle:
    """This rank's rectangle of a parameter or of its optimizer state: its shard, or the full tensor."""
    if shard is None or not shard.matches_shape(values):
        return full_rectangle(name, values)
    return Rectangle(name, shard.full_shape, values, shard.rows)


def local_shape(full_shape: tuple[int, ...], shard: ParameterShard | None) -> tuple[int, ...]:
    """The shard's shape for a tensor of its parameter's shape, such as optimizer state; else `full_shape`."""
    return shard.local_shape if shard is not None and full_shape == shard.full_shape else full_shape


@torch.no_grad()
def unshard_state(values: Mapping[str, Tensor], shards: Mapping[str, ParameterShard]) -> dict[str, Tensor]:
    """All-gather the full tensors of sharded values. All ranks must call it, and need the memory.

    `shards` has the shard of each sharded name; several names may refer to one parameter.
    """
    full_values = dict(values)
    names_by_shard: dict[ShardedParameters, dict[int, list[str]]] = {}
    for name, shard in shards.items():
        if shard.matches_shape(values[name]):
            names_by_shard.setdefault(shard.parameters, {}).setdefault(shard.index, []).append(name)
    for parameters, names in names_by_shard.items():
        first_values = values[next(iter(names.values()))[0]]
        parts = (
            values[names[i][0]] if i in names else torch.zeros_like(shard) for i, shard in enumerate(parameters.shards)
        )
        for i, full in enumerate(parameters.all_gather_tensors([part.to(first_values.dtype) for part in parts])):
            for name in names.get(i, ()):
                full_values[name] = full
    return full_values

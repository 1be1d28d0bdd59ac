"""Parameters that are cut among ranks by their logical names: what a state is read from and back into."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from shardwright.dense.flat_parameter import FlatParameter, ParameterShard, shard_of
from shardwright.rectangle import Rectangle
from shardwright.rectangle import full_rectangle as all_of


def parameter_shards(model: nn.Module) -> dict[str, ParameterShard]:
    """By parameter: which rows this rank has; none of parameters that are whole."""
    named = model.named_parameters(remove_duplicate=False)
    return {name: shard for name, parameter in named if (shard := shard_of(parameter)) is not None}


def parameter_rectangle(name: str, values: Tensor, shard: ParameterShard | None) -> Rectangle:
    """What this rank has under a name: rows of a parameter, or of what goes with each of its numbers; or all of it."""
    if shard is None or not shard.matches_shape(values):
        return all_of(name, values)
    return Rectangle(name, shard.full_shape, values, shard.rows)


def local_shape(full_shape: tuple[int, ...], shard: ParameterShard | None) -> tuple[int, ...]:
    """Of this rank's rows of something of this shape, if that goes with each of a parameter's numbers."""
    return shard.local_shape if shard is not None and full_shape == shard.full_shape else full_shape


@torch.no_grad()
def unshard_state(values: Mapping[str, Tensor], shards: Mapping[str, ParameterShard]) -> dict[str, Tensor]:
    """The same made whole. All ranks take part, and need the memory.

    `shards` has some of the names, each of another parameter or of the same under another name.
    """
    found = dict(values)
    units: dict[FlatParameter, dict[int, list[str]]] = {}
    for name, shard in shards.items():
        if shard.matches_shape(values[name]):
            units.setdefault(shard.flat_parameter, {}).setdefault(shard.index, []).append(name)
    for unit, names in units.items():
        like = values[next(iter(names.values()))[0]]
        given = (values[names[at][0]] if at in names else torch.zeros_like(one) for at, one in enumerate(unit.shards))
        for at, whole in enumerate(unit.all_gather_tensors([one.to(like.dtype) for one in given])):
            for name in names.get(at, ()):
                found[name] = whole
    return found

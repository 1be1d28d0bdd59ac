"""Parameters that are cut among ranks by their logical names: what a state is read from and back into."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from shardwright.dense.flat_parameter import Shard, Unit, shard_of
from shardwright.rectangle import Rectangle
from shardwright.rectangle import whole as all_of


def shards_of(model: nn.Module) -> dict[str, Shard]:
    """By parameter: which rows this rank has; none of parameters that are whole."""
    named = model.named_parameters(remove_duplicate=False)
    return {name: shard for name, parameter in named if (shard := shard_of(parameter)) is not None}


def rectangle(name: str, values: Tensor, shard: Shard | None) -> Rectangle:
    """What this rank has under a name: rows of a parameter, or of what goes with each of its numbers; or all of it."""
    if shard is None or not shard.like(values):
        return all_of(name, values)
    return Rectangle(name, shard.shape, values, shard.rows)


def own_shape(whole: tuple[int, ...], shard: Shard | None) -> tuple[int, ...]:
    """Of this rank's rows of something of this shape, if that goes with each of a parameter's numbers."""
    return shard.own_shape if shard is not None and whole == shard.shape else whole


@torch.no_grad()
def collected(values: Mapping[str, Tensor], shards: Mapping[str, Shard]) -> dict[str, Tensor]:
    """The same made whole. All ranks take part, and need the memory.

    `shards` has some of the names, each of another parameter or of the same under another name.
    """
    found = dict(values)
    units: dict[Unit, dict[int, list[str]]] = {}
    for name, shard in shards.items():
        if shard.like(values[name]):
            units.setdefault(shard.unit, {}).setdefault(shard.at, []).append(name)
    for unit, names in units.items():
        like = values[next(iter(names.values()))[0]]
        given = (values[names[at][0]] if at in names else torch.zeros_like(one) for at, one in enumerate(unit.shards))
        for at, whole in enumerate(unit.together([one.to(like.dtype) for one in given])):
            for name in names.get(at, ()):
                found[name] = whole
    return found

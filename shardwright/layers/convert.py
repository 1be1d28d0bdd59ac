"""Convert EmbeddingBags from and to nn.EmbeddingBag and TorchRec's EmbeddingBagCollection.

Weights are shared, not copied, and state_dict names stay the same, so checkpoints load before and after a conversion.
TorchRec classes are duck-typed: this module does not import torchrec.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, cast, get_args

import torch
from torch import nn

from shardwright.errors import UserError
from shardwright.layers.embedding import EmbeddingBags
from shardwright.spec.optimizer import SparseOptimizer
from shardwright.spec.workload import Dtype, Feature, Pooling, Table


def from_torch(
    bags: Sequence[nn.EmbeddingBag],
    optimizer: SparseOptimizer | None = None,
    *,
    names: Sequence[str] | None = None,
) -> EmbeddingBags:
    """Convert bags, each to a table and a feature; default names 0, 1, ... as in nn.ModuleList(bags)."""
    names = tuple(names) if names is not None else tuple(str(i) for i in range(len(bags)))
    if len(names) != len(bags):
        raise UserError(f"{len(names)} names for {len(bags)} embedding bags")
    for name, bag in zip(names, bags, strict=True):
        _refuse_unsupported(name, bag)
    weights = [_parameter(bag) for bag in bags]
    tables = [_table(name, weight) for name, weight in zip(names, weights, strict=True)]
    features = [Feature(name, name, _pooling(name, bag.mode)) for name, bag in zip(names, bags, strict=True)]
    return _share_weights(tables, features, optimizer, "", weights)


def to_torch(layer: EmbeddingBags) -> list[nn.EmbeddingBag]:
    """Convert to one nn.EmbeddingBag per feature; features of a table share its weight."""
    bags = []
    for feature in layer.features:
        if feature.pooling == "none":
            raise UserError(f'feature "{feature.name}" is not pooled, and nn.EmbeddingBag always pools')
        weight = layer.weight(feature.table)
        rows, dim = weight.shape
        bag = nn.EmbeddingBag(rows, dim, mode=feature.pooling, _weight=weight.detach())
        bag.register_parameter("weight", weight)
        bags.append(bag)
    return bags


def from_torchrec(collection: Any, optimizer: SparseOptimizer | None = None) -> EmbeddingBags:
    """Convert an unsharded EmbeddingBagCollection."""
    configs = collection.embedding_bag_configs()
    weights = [_parameter(collection.embedding_bags[config.name]) for config in configs]
    tables = [_table(config.name, weight) for config, weight in zip(configs, weights, strict=True)]
    num_tables = Counter(name for config in configs for name in config.feature_names)
    features = [
        Feature(
            f"{name}@{config.name}" if num_tables[name] > 1 else name,
            config.name,
            _pooling(config.name, config.pooling.value),
            ids=name,
        )
        for config in configs
        for name in config.feature_names
    ]
    return _share_weights(tables, features, optimizer, "embedding_bags", weights, collection.is_weighted())


def to_torchrec(layer: EmbeddingBags, collection: Callable[..., Any], config: Callable[..., Any], pooling: Any) -> Any:
    """Convert to a TorchRec EmbeddingBagCollection; the caller passes TorchRec's classes.

    Call it as to_torchrec(layer, EmbeddingBagCollection, EmbeddingBagConfig, PoolingType). The collection pools by id
    weights if `layer.weighted` is True; None counts as False.
    """
    configs = []
    for table in layer.tables:
        if "." in table.name:
            raise UserError(f'table "{table.name}" is of an EmbeddingBagsDict: convert each member, layer["member"]')
        features = [feature for feature in layer.features if feature.table == table.name]
        poolings = {feature.pooling for feature in features}
        if len(poolings) != 1 or "none" in poolings:
            raise UserError(f'table "{table.name}" is pooled as {sorted(poolings)}; TorchRec takes one of sum, mean')
        configs.append(
            config(
                name=table.name,
                num_embeddings=table.rows,
                embedding_dim=table.dim,
                feature_names=[feature.ids or feature.name for feature in features],
                pooling=pooling(poolings.pop().upper()),
            )
        )
    converted = collection(tables=configs, is_weighted=bool(layer.weighted), device=torch.device("meta"))
    for table in layer.tables:
        converted.embedding_bags[table.name].weight = layer.weight(table.name)
    return converted


def _share_weights(
    tables: Sequence[Table],
    features: Sequence[Feature],
    optimizer: SparseOptimizer | None,
    prefix: str,
    weights: Sequence[nn.Parameter],
    weighted: bool | None = None,
) -> EmbeddingBags:
    with torch.device("meta"):
        layer = EmbeddingBags(tables, features, optimizer, prefix=prefix, weighted=weighted)
    for table, weight in zip(layer.tables, weights, strict=True):
        layer.adopt(table.name, weight)
    return layer


def _refuse_unsupported(name: str, bag: nn.EmbeddingBag) -> None:
    options = {
        "padding_idx": bag.padding_idx is not None,
        "max_norm": bag.max_norm is not None,
        "scale_grad_by_freq": bool(bag.scale_grad_by_freq),
    }
    for option, is_set in options.items():
        if is_set:
            raise UserError(f'embedding bag "{name}" uses {option}, which EmbeddingBags does not support')


def _table(name: str, weight: nn.Parameter) -> Table:
    dtype = str(weight.dtype).removeprefix("torch.")
    if dtype not in get_args(Dtype):
        raise UserError(f'table "{name}" is {dtype}; wanted one of {", ".join(get_args(Dtype))}')
    return Table(name, *weight.shape, dtype=cast(Dtype, dtype))


def _pooling(name: str, mode: str) -> Pooling:
    match mode.lower():
        case "sum":
            return "sum"
        case "mean":
            return "mean"
    raise UserError(f'embedding bag "{name}" uses mode {mode}; EmbeddingBags supports sum and mean')


def _parameter(bag: nn.Module) -> nn.Parameter:
    return bag.get_parameter("weight")

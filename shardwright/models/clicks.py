"""Click models by the names that recipes use, made to fit the features of a source.

A source says (name, rows, multi-hot) of each feature, and how many numbers it has.
"""

from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Protocol

from torch import nn

from shardwright.layers.embedding import EmbeddingBags
from shardwright.models.autoint import AutoInt
from shardwright.models.dcn import DCN
from shardwright.models.deepfm import DeepFM
from shardwright.models.dlrm import DLRM
from shardwright.models.logistic import LogisticRegression
from shardwright.models.wide_deep import WideDeep
from shardwright.spec.optimizer import SparseOptimizer
from shardwright.spec.workload import Feature, Table


class Clicks(Protocol):
    """What a model must know of a source."""

    @property
    def features(self) -> Sequence[tuple[str, int, bool]]: ...

    @property
    def num_dense(self) -> int: ...


def bags(source: Clicks, optimizer: SparseOptimizer, *dims: int, init: float | None = None) -> EmbeddingBags:
    """For each of `dims` a table of its own for every feature; all read the same ids. Lists are averaged."""
    tables, features = [], []
    for number, dim in enumerate(dims):
        for name, rows, multi_hot in source.features:
            own = name if number == 0 else f"{name}_{number}"
            tables.append(Table(own, rows, dim, init=init))
            features.append(Feature(own, own, "mean" if multi_hot else "sum", ids=name))
    return EmbeddingBags(tables, features, optimizer)


def logistic(source: Clicks, optimizer: SparseOptimizer, *, init: float | None = None) -> nn.Module:
    return LogisticRegression(bags(source, optimizer, 1, init=init), source.num_dense)


def dlrm(
    source: Clicks,
    optimizer: SparseOptimizer,
    *,
    dim: int,
    bottom: list[int],
    top: list[int],
    init: float | None = None,
) -> nn.Module:
    return DLRM(bags(source, optimizer, dim, init=init), source.num_dense, bottom=bottom, top=top)


def wide_deep(
    source: Clicks, optimizer: SparseOptimizer, *, dim: int, hidden: list[int], init: float | None = None
) -> nn.Module:
    return WideDeep(bags(source, optimizer, dim, 1, init=init), source.num_dense, hidden=hidden)


def deepfm(
    source: Clicks, optimizer: SparseOptimizer, *, dim: int, hidden: list[int], init: float | None = None
) -> nn.Module:
    return DeepFM(bags(source, optimizer, dim, 1, init=init), source.num_dense, hidden=hidden)


def dcn(
    source: Clicks,
    optimizer: SparseOptimizer,
    *,
    dim: int,
    num_cross: int,
    hidden: list[int],
    init: float | None = None,
) -> nn.Module:
    sparse = bags(source, optimizer, dim, init=init)
    return DCN(sparse, source.num_dense, num_cross=num_cross, hidden=hidden)


def dcn_v2(
    source: Clicks,
    optimizer: SparseOptimizer,
    *,
    dim: int,
    num_cross: int,
    hidden: list[int],
    rank: int = 0,
    stacked: bool = False,
    init: float | None = None,
) -> nn.Module:
    form = {"num_cross": num_cross, "v2": True, "rank": rank, "stacked": stacked}
    return DCN(bags(source, optimizer, dim, init=init), source.num_dense, hidden=hidden, **form)


def autoint(
    source: Clicks,
    optimizer: SparseOptimizer,
    *,
    dim: int,
    num_layers: int,
    num_heads: int,
    head_dim: int,
    hidden: list[int] | None = None,
    init: float | None = None,
) -> nn.Module:
    attention = {"num_layers": num_layers, "num_heads": num_heads, "head_dim": head_dim}
    return AutoInt(bags(source, optimizer, dim, init=init), source.num_dense, hidden=hidden or (), **attention)


MODELS: MappingProxyType[str, Callable[..., nn.Module]] = MappingProxyType(
    {
        "logistic": logistic,
        "dlrm": dlrm,
        "wide_deep": wide_deep,
        "deepfm": deepfm,
        "dcn": dcn,
        "dcn_v2": dcn_v2,
        "autoint": autoint,
    }
)

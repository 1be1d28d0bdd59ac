"""Click models by the names that recipes use, made to fit the features of a source.

A source says (name, rows, multi-hot) of each feature, and how many numbers it has.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import partial
from inspect import signature
from types import MappingProxyType
from typing import Any, Protocol

from torch import nn

from shardwright.config import resolve_name
from shardwright.errors import UserError, did_you_mean
from shardwright.layers.embedding import EmbeddingBags
from shardwright.layers.ensemble import EnsembleSpec
from shardwright.layers.mixing import INTERACTIONS, InteractionBuilder
from shardwright.layers.moe import MoESpec
from shardwright.models.autoint import AutoInt
from shardwright.models.dcn import DCN
from shardwright.models.deepfm import DeepFM
from shardwright.models.dhen import DHEN
from shardwright.models.dlrm import DLRM
from shardwright.models.logistic import LogisticRegression
from shardwright.models.wide_deep import WideDeep
from shardwright.spec.optimizer import SparseOptimizer
from shardwright.spec.workload import Feature, Table


class ClickSource(Protocol):
    """What a model must know of a source."""

    @property
    def features(self) -> Sequence[tuple[str, int, bool]]: ...

    @property
    def num_dense(self) -> int: ...


def embedding_bags(
    source: ClickSource, optimizer: SparseOptimizer, *dims: int, init: float | None = None
) -> EmbeddingBags:
    """For each of `dims` a table of its own for every feature; all read the same ids. Lists are averaged."""
    tables, features = [], []
    for number, dim in enumerate(dims):
        for name, rows, multi_hot in source.features:
            own = name if number == 0 else f"{name}_{number}"
            tables.append(Table(own, rows, dim, init=init))
            features.append(Feature(own, own, "mean" if multi_hot else "sum", ids=name))
    return EmbeddingBags(tables, features, optimizer)


def logistic(source: ClickSource, optimizer: SparseOptimizer, *, init: float | None = None) -> nn.Module:
    return LogisticRegression(embedding_bags(source, optimizer, 1, init=init), source.num_dense)


def dlrm(
    source: ClickSource,
    optimizer: SparseOptimizer,
    *,
    dim: int,
    bottom: list[int],
    top: list[int],
    init: float | None = None,
) -> nn.Module:
    return DLRM(embedding_bags(source, optimizer, dim, init=init), source.num_dense, bottom=bottom, top=top)


def dlrm_moe(
    source: ClickSource,
    optimizer: SparseOptimizer,
    *,
    dim: int,
    bottom: list[int],
    top: list[int],
    num_experts: int,
    num_chosen: int,
    init: float | None = None,
) -> nn.Module:
    """DLRM whose top MLP's layers are mixtures of experts."""
    mixture = MoESpec(num_experts, num_chosen)
    return DLRM(
        embedding_bags(source, optimizer, dim, init=init), source.num_dense, bottom=bottom, top=top, mixture=mixture
    )


def dhen(
    source: ClickSource,
    optimizer: SparseOptimizer,
    *,
    dim: int,
    bottom: list[int],
    top: list[int],
    modules: list,
    stack: Mapping[str, Any] = MappingProxyType({}),
    init: float | None = None,
) -> nn.Module:
    """`modules` of every layer, or a list of them for each; `stack` says how many layers, and their further form."""
    layers = ensemble_specs(modules, **stack)
    return DHEN(
        embedding_bags(source, optimizer, dim, init=init), source.num_dense, bottom=bottom, top=top, layers=layers
    )


def ensemble_specs(
    modules: Sequence[Any], *, layers: int = 0, embeddings: int = 0, **form: Any
) -> tuple[EnsembleSpec, ...]:
    """The forms of `layers` layers alike, or of one for each list of modules."""
    known = {field.name for field in fields(EnsembleSpec)} - {"modules", "num_out"}
    for key in form:
        if key not in known:
            raise UserError(f'unknown key "model.stack.{key}"{did_you_mean(key, known | {"layers", "embeddings"})}')
    lists = {isinstance(one, list | tuple) for one in modules}
    if isinstance(modules, str) or len(lists) > 1:
        raise UserError(f"model.modules is {modules!r}; wanted a list of modules, or of a list for each layer")
    each = [list(one) for one in modules] if True in lists else None
    if each is not None and layers not in (0, len(each)):
        raise UserError(f"model.stack.layers={layers}, and model.modules has {len(each)} lists; drop one of the two")
    stacked = [modules] * (layers or 1) if each is None else each
    return tuple(
        EnsembleSpec(tuple(resolve_interaction(one) for one in chosen), embeddings, **form) for chosen in stacked
    )


def resolve_interaction(choice: Any) -> InteractionBuilder:
    """A module by its name, by {kind = its name, ...} with options of its own, or as a function."""
    if isinstance(choice, str | Mapping):
        return _named_interaction(dict(choice) if isinstance(choice, Mapping) else {"kind": choice})
    if not callable(choice):
        raise UserError(
            f'model.modules: {choice!r} is no module; wanted a name, {{kind = "name"}} or "module:attribute"'
        )
    made: Any = choice
    return made


def _named_interaction(options: dict[str, Any]) -> InteractionBuilder:
    name = str(options.pop("kind", ""))
    make: Any = resolve_name("model.modules", name, INTERACTIONS)
    known = list(signature(make).parameters)[3:]  # behind num_in, dim, num_out
    for key in options:
        if key not in known:
            raise UserError(f'model.modules: unknown key "{key}" of "{name}"{did_you_mean(key, known)}')
    return partial(make, **options) if options else make


def wide_deep(
    source: ClickSource, optimizer: SparseOptimizer, *, dim: int, hidden: list[int], init: float | None = None
) -> nn.Module:
    return WideDeep(embedding_bags(source, optimizer, dim, 1, init=init), source.num_dense, hidden=hidden)


def deepfm(
    source: ClickSource, optimizer: SparseOptimizer, *, dim: int, hidden: list[int], init: float | None = None
) -> nn.Module:
    return DeepFM(embedding_bags(source, optimizer, dim, 1, init=init), source.num_dense, hidden=hidden)


def dcn(
    source: ClickSource,
    optimizer: SparseOptimizer,
    *,
    dim: int,
    num_cross: int,
    hidden: list[int],
    init: float | None = None,
) -> nn.Module:
    sparse = embedding_bags(source, optimizer, dim, init=init)
    return DCN(sparse, source.num_dense, num_cross=num_cross, hidden=hidden)


def dcn_v2(
    source: ClickSource,
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
    return DCN(embedding_bags(source, optimizer, dim, init=init), source.num_dense, hidden=hidden, **form)


def autoint(
    source: ClickSource,
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
    return AutoInt(
        embedding_bags(source, optimizer, dim, init=init), source.num_dense, hidden=hidden or (), **attention
    )


MODELS: MappingProxyType[str, Callable[..., nn.Module]] = MappingProxyType(
    {
        "logistic": logistic,
        "dlrm": dlrm,
        "dlrm_moe": dlrm_moe,
        "wide_deep": wide_deep,
        "deepfm": deepfm,
        "dcn": dcn,
        "dcn_v2": dcn_v2,
        "autoint": autoint,
        "dhen": dhen,
    }
)

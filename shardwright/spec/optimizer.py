"""Sparse optimizers of embedding tables, as values, and the shapes of their state.

These values select an optimizer and its settings; shardwright/kernels implements the updates. For all optimizers:
`weight_decay` is added to the gradient, or with `decoupled` lr * weight_decay * weight is subtracted from the weight;
`clip` limits the norm of each row's gradient, summed over the batch (0: no clipping).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal, cast, get_args

from shardwright.spec import files
from shardwright.spec.checks import check_non_negative, raise_if_any


@dataclass(frozen=True, slots=True)
class SGD:
    lr: float
    momentum: float = 0.0
    weight_decay: float = 0.0
    decoupled: bool = False
    clip: float = 0.0
    kind: Literal["sgd"] = "sgd"


@dataclass(frozen=True, slots=True)
class AdaGrad:
    lr: float
    eps: float = 1e-10
    initial: float = 0.0
    weight_decay: float = 0.0
    decoupled: bool = False
    clip: float = 0.0
    kind: Literal["adagrad"] = "adagrad"


@dataclass(frozen=True, slots=True)
class RowWiseAdaGrad:
    """AdaGrad with one sum per row: of the squared gradient, averaged over the row's columns."""

    lr: float
    eps: float = 1e-8
    initial: float = 0.0
    weight_decay: float = 0.0
    decoupled: bool = False
    clip: float = 0.0
    kind: Literal["rowwise_adagrad"] = "rowwise_adagrad"


@dataclass(frozen=True, slots=True)
class Adam:
    lr: float
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    decoupled: bool = False
    clip: float = 0.0
    kind: Literal["adam"] = "adam"


@dataclass(frozen=True, slots=True)
class PartialRowWiseAdam:
    """Adam with one second moment per row: of the squared gradient, averaged over the row's columns."""

    lr: float
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    decoupled: bool = False
    clip: float = 0.0
    kind: Literal["partial_rowwise_adam"] = "partial_rowwise_adam"


@dataclass(frozen=True, slots=True)
class LAMB:
    """Adam with each row's step scaled to the norm of the row, times lr; weight decay is decoupled, as in its paper."""

    lr: float
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip: float = 0.0
    kind: Literal["lamb"] = "lamb"


HYPERPARAMETERS = ("lr", "eps", "beta1", "beta2", "momentum", "weight_decay", "clip", "decoupled")

SparseOptimizer = Annotated[SGD | AdaGrad | RowWiseAdaGrad | Adam | PartialRowWiseAdam | LAMB, files.BY_KIND]


def sparse_optimizer(kind: str, **settings: float) -> SparseOptimizer:
    """Make the optimizer of a kind; an unknown kind or setting, or a value out of range, is a UserError."""
    plain = {"kind": kind, **settings}
    optimizer = files.from_plain(cast(type[Any], SparseOptimizer), plain, f"sparse optimizer {kind}")
    raise_if_any(optimizer_faults(optimizer))
    return optimizer


def state_shapes(optimizer: SparseOptimizer, rows: int, dim: int) -> dict[str, tuple[int, ...]]:
    """Shape of each optimizer state tensor of a table, by name."""
    match optimizer:
        case SGD(momentum=0):
            return {}
        case SGD():
            return {"momentum": (rows, dim)}
        case AdaGrad():
            return {"sum": (rows, dim)}
        case RowWiseAdaGrad():
            return {"sum": (rows,)}
        case Adam() | LAMB():
            return {"mean": (rows, dim), "square": (rows, dim)}
        case PartialRowWiseAdam():
            return {"mean": (rows, dim), "square": (rows,)}


def num_squares(optimizer: SparseOptimizer, dim: int) -> int:
    """Values of a row by which AdaGrad's sum grows: of its squared gradient; 0 for other optimizers."""
    match optimizer:
        case AdaGrad():
            return dim
        case RowWiseAdaGrad():
            return 1
        case _:
            return 0


def hyperparameters(optimizer: SparseOptimizer) -> dict[str, float]:
    """All settings that an update needs, by name; 0 for settings that this optimizer does not have."""
    return {name: float(getattr(optimizer, name, 0.0)) for name in HYPERPARAMETERS}


def from_hyperparameters(kind: str, values: Sequence[float]) -> SparseOptimizer:
    """The optimizer of a kind from the values of HYPERPARAMETERS, in that order."""
    kinds = {class_(lr=0.0).kind: class_ for class_ in get_args(get_args(SparseOptimizer)[0])}
    names = {field.name for field in fields(kinds[kind])}
    settings: dict[str, Any] = {
        name: value for name, value in zip(HYPERPARAMETERS, values, strict=True) if name in names
    }
    if "decoupled" in settings:
        settings["decoupled"] = bool(settings["decoupled"])
    return kinds[kind](**settings)


def optimizer_faults(optimizer: SparseOptimizer) -> Iterator[str]:
    subject = f"sparse optimizer {optimizer.kind}"
    settings = {
        field.name: getattr(optimizer, field.name)
        for field in fields(optimizer)
        if field.name not in ("kind", "decoupled")
    }
    yield from check_non_negative(subject, **settings)
    decay_fraction = settings["lr"] * settings.get("weight_decay", 0)
    if decay_fraction > 1:
        yield (
            f"{subject}: weight_decay is {settings['weight_decay']}; wanted at most 1 / lr = {1 / settings['lr']:.3g}: "
            "a step would subtract more than the weight itself"
        )
    for name in ("momentum", "beta1", "beta2"):
        if settings.get(name, 0) >= 1:
            yield f"{subject}: {name} is {settings[name]}; wanted less than 1"

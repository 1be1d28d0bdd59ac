"""The optimizers of embedding tables, as values, and the state each keeps per row.

What an update does is the kernels' question; this file only says which one, with which settings. Of all of them:
`weight_decay` is added to the gradient, or with `decoupled` taken from the weight directly, lr times it; `clip` is the
longest gradient a row may have (0: any), its sum over the batch being shortened to that.
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
    """AdaGrad with one sum per row: the mean over the row's columns of the squared gradient."""

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
    """Adam with one second moment per row: of the mean over the row's columns of the squared gradient."""

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
    """Adam whose step is as long as its row, times lr; its weight decay is decoupled, as its paper has it."""

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
    """The optimizer of that kind; an unknown kind or setting, or a value out of range, is a UserError."""
    plain = {"kind": kind, **settings}
    optimizer = files.from_plain(cast(type[Any], SparseOptimizer), plain, f"sparse optimizer {kind}")
    raise_if_any(optimizer_faults(optimizer))
    return optimizer


def state_shapes(optimizer: SparseOptimizer, rows: int, dim: int) -> dict[str, tuple[int, ...]]:
    """The shape of each state tensor of a table, by name."""
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


def hyperparameters(optimizer: SparseOptimizer) -> dict[str, float]:
    """Every number an update needs beside the step; what this optimizer has not is 0."""
    return {name: float(getattr(optimizer, name, 0.0)) for name in HYPERPARAMETERS}


def from_hyperparameters(kind: str, values: Sequence[float]) -> SparseOptimizer:
    """The optimizer whose `numbers` these are."""
    kinds = {one(lr=0.0).kind: one for one in get_args(get_args(SparseOptimizer)[0])}
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
    taken = settings["lr"] * settings.get("weight_decay", 0)
    if taken > 1:
        yield (
            f"{subject}: weight_decay is {settings['weight_decay']}; wanted at most 1 / lr = {1 / settings['lr']:.3g}: "
            "a step would subtract more than the weight itself"
        )
    for name in ("momentum", "beta1", "beta2"):
        if settings.get(name, 0) >= 1:
            yield f"{subject}: {name} is {settings[name]}; wanted less than 1"

"""The optimizers of embedding tables, as values, and the state each keeps per row.

What an update does is the kernels' question; this file only says which one, with which settings.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal, cast

from shardwright.spec import files
from shardwright.spec.verdict import judge, not_negative


@dataclass(frozen=True, slots=True)
class SGD:
    lr: float
    momentum: float = 0.0
    weight_decay: float = 0.0
    kind: Literal["sgd"] = "sgd"


@dataclass(frozen=True, slots=True)
class AdaGrad:
    lr: float
    eps: float = 1e-10
    initial: float = 0.0
    weight_decay: float = 0.0
    kind: Literal["adagrad"] = "adagrad"


@dataclass(frozen=True, slots=True)
class RowWiseAdaGrad:
    """AdaGrad with one sum per row: the mean over the row's columns of the squared gradient."""

    lr: float
    eps: float = 1e-8
    initial: float = 0.0
    weight_decay: float = 0.0
    kind: Literal["rowwise_adagrad"] = "rowwise_adagrad"


@dataclass(frozen=True, slots=True)
class Adam:
    lr: float
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    kind: Literal["adam"] = "adam"


@dataclass(frozen=True, slots=True)
class LAMB:
    lr: float
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    kind: Literal["lamb"] = "lamb"


SparseOptimizer = Annotated[SGD | AdaGrad | RowWiseAdaGrad | Adam | LAMB, files.BY_KIND]


def sparse_optimizer(kind: str, **settings: float) -> SparseOptimizer:
    """The optimizer of that kind; an unknown kind or setting, or a value out of range, is a UserError."""
    plain = {"kind": kind, **settings}
    optimizer = files.load(cast(type[Any], SparseOptimizer), plain, f"sparse optimizer {kind}")
    judge(faults(optimizer))
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


def faults(optimizer: SparseOptimizer) -> Iterator[str]:
    subject = f"sparse optimizer {optimizer.kind}"
    settings = {field.name: getattr(optimizer, field.name) for field in fields(optimizer) if field.name != "kind"}
    yield from not_negative(subject, **settings)
    for name in ("momentum", "beta1", "beta2"):
        if settings.get(name, 0) >= 1:
            yield f"{subject}: {name} is {settings[name]}; wanted less than 1"

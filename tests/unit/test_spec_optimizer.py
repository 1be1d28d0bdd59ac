"""Sparse optimizers by kind, their state shapes, and errors in their settings."""

import pytest

from shardwright.errors import UserError
from shardwright.spec.optimizer import (
    LAMB,
    SGD,
    AdaGrad,
    Adam,
    RowWiseAdaGrad,
    sparse_optimizer,
    state_shapes,
)


@pytest.mark.parametrize(
    ("optimizer", "shapes"),
    [
        (SGD(0.1), {}),
        (SGD(0.1, momentum=0.9), {"momentum": (7, 3)}),
        (AdaGrad(0.1), {"sum": (7, 3)}),
        (RowWiseAdaGrad(0.1), {"sum": (7,)}),
        (Adam(0.1), {"mean": (7, 3), "square": (7, 3)}),
        (LAMB(0.1), {"mean": (7, 3), "square": (7, 3)}),
    ],
)
def test_state_shapes(optimizer, shapes):
    assert state_shapes(optimizer, 7, 3) == shapes


def test_sparse_optimizers_by_kind():
    assert sparse_optimizer("rowwise_adagrad", lr=1, eps=1e-6) == RowWiseAdaGrad(1.0, eps=1e-6)
    assert sparse_optimizer("sgd", lr=0.5) == SGD(0.5)


@pytest.mark.parametrize(
    ("kind", "values", "message"),
    [
        ("adamm", {"lr": 0.1}, 'kind: "adamm" is not allowed; did you mean "adam"?'),
        ("adam", {"lr": 0.1, "beta_1": 0.9}, 'beta_1: unknown key; did you mean "beta1"?'),
        ("adam", {}, "lr: missing key"),
        ("adam", {"lr": "fast"}, 'lr: wanted a valid number, got "fast"'),
        ("adam", {"lr": -0.1}, "lr is -0.1; wanted 0 or more"),
        ("adam", {"lr": 0.1, "beta2": 1.0}, "beta2 is 1.0; wanted less than 1"),
        ("sgd", {"lr": 0.1, "momentum": 1.5}, "momentum is 1.5; wanted less than 1"),
        ("adagrad", {"lr": float("nan")}, "lr: wanted a finite number, got NaN"),
    ],
)
def test_errors_name_the_setting(kind, values, message):
    with pytest.raises(UserError) as caught:
        sparse_optimizer(kind, **values)
    assert str(caught.value) == f"sparse optimizer {kind}: {message}"

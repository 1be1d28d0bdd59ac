"""float32 results compared with float64 within computed rounding-error bounds, instead of chosen tolerances.

u is half of float32's eps: the result of one operation is off by at most u times its size. A term that passes k
operations, additions included, is off by at most k u times its size; a sum is off by at most the errors of its terms.
"""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_embedding_kernels import cases, copy_tables, make_ids
from torch import Tensor

from shardwright.kernels import embedding, reference
from shardwright.kernels.arguments import POOLINGS, Ids, TableState, empty_vectors
from shardwright.spec.optimizer import SGD, AdaGrad, Adam, RowWiseAdaGrad, state_shapes

U = torch.finfo(torch.float32).eps / 2 * 1.001  # with room for second-order terms and float64's own rounding
BATCHES = st.sampled_from([{"batch": 7}, {"batch": 400, "hot": True}])  # hot rows are summed in more than one chunk


def random_values(generator: torch.Generator, *shape: int) -> Tensor:
    """Values of both signs and nine orders of magnitude: sums cancel, and small terms vanish next to large ones."""
    sizes = 10 ** (torch.rand(*shape, generator=generator, dtype=torch.float64) * 9 - 6)
    return (torch.randn(*shape, generator=generator, dtype=torch.float64) * sizes).float()


def make_case(case, size) -> tuple[list[Tensor], Ids, torch.Generator]:
    shapes, features, wide, weighted, seed = case
    generator = torch.Generator().manual_seed(seed)
    ids = make_ids(generator, features, [rows for rows, _ in shapes], wide=wide, **size)
    id_weights = random_values(generator, ids.values.numel()) if weighted else None
    return [random_values(generator, *shape) for shape in shapes], with_weights(ids, id_weights), generator


def with_weights(ids: Ids, weights: Tensor | None) -> Ids:
    return Ids(ids.values, ids.offsets, weights, ids.tables, ids.pooling)


def with_weight_sizes(ids: Ids) -> Ids:
    """The same ids with the absolute values of their weights."""
    return with_weights(ids, None if ids.weights is None else ids.weights.double().abs())


def lookup_reference(weights: list[Tensor], ids: Ids) -> list[Tensor]:
    vectors = empty_vectors(weights, ids)
    reference.lookup_all(weights, ids, vectors)
    return vectors


def row_gradients(weights: list[Tensor], ids: Ids, gradients: list[Tensor]) -> list[Tensor]:
    """The gradient of every row in float64, computed as an SGD step with lr=-1 from zero."""
    tables = [TableState(torch.zeros_like(weight, dtype=torch.float64), (), 1, 0) for weight in weights]
    reference.update_all(tables, ids, [gradient.double() for gradient in gradients], SGD(lr=-1.0))
    return [table.weight for table in tables]


def count_lookups(table: int, rows: int, ids: Ids) -> Tensor:
    """(rows, 1): how many lookups of a batch read each row."""
    ids_of = [values for (values, _, _), t in zip(ids.split_by_feature(), ids.tables, strict=True) if t == table]
    return torch.cat([torch.zeros(0, dtype=torch.int64), *ids_of]).bincount(minlength=rows).unsqueeze(1)


def assert_within(actual: Tensor, exact: Tensor, bound: Tensor) -> None:
    excess = ((actual.double() - exact).abs() - bound).max() if actual.numel() else torch.zeros(1)
    assert excess <= 0, f"{excess.item():.3g} beyond the bound"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@given(case=cases(), size=BATCHES)
def test_vectors_are_within_the_rounding_bound(dtype, case, size):
    """Operations per vector: an addition per id after the first, a product with id weights, a quotient for a mean."""
    weights, ids, _ = make_case(case, size)
    weights = [weight.clamp(-6e4, 6e4).to(dtype) for weight in weights]
    weights64 = [weight.double() for weight in weights]
    dims = [weight.shape[1] for weight in weights]
    views = (
        reference.vectors_by_feature(vectors, ids, dims)
        for vectors in (
            embedding.lookup(weights, ids),
            lookup_reference(weights64, with_weights(ids, None if ids.weights is None else ids.weights.double())),
            lookup_reference([weight.abs() for weight in weights64], with_weight_sizes(ids)),
        )
    )
    for actual, exact, sizes, (_, lengths, _), pooling in zip(*views, ids.split_by_feature(), ids.pooling, strict=True):
        kind = POOLINGS[pooling]
        additions = torch.zeros(1, 1) if kind == "none" else (lengths - 1).clamp(min=0).unsqueeze(1)
        assert_within(actual, exact, (additions + (ids.weights is not None) + (kind == "mean")) * U * sizes)


@given(case=cases(), size=BATCHES)
def test_gradients_of_rows_and_id_weights_are_within_the_rounding_bound(case, size):
    """Operations for a row: an addition per lookup after the first, and three more for its share of a weighted mean.
    For an id weight: an addition per column after the first, a product, and a quotient for a mean."""
    weights, ids, generator = make_case(case, size)
    weights = [weight.requires_grad_() for weight in weights]
    if ids.weights is not None:
        ids.weights.requires_grad_()
    vectors = embedding.lookup(weights, ids)
    gradients = [random_values(generator, *vector.shape) for vector in vectors]
    leaves = weights if ids.weights is None else [*weights, ids.weights]
    grads = torch.autograd.grad(vectors, leaves, gradients, allow_unused=True)
    with torch.no_grad():
        ids64 = with_weights(ids, None if ids.weights is None else ids.weights.double())
        sizes = row_gradients(weights, with_weight_sizes(ids), [gradient.abs() for gradient in gradients])
        for table, (grad, exact, size_) in enumerate(
            zip(grads[: len(weights)], row_gradients(weights, ids64, gradients), sizes, strict=True)
        ):
            assert_within(grad, exact, (count_lookups(table, len(exact), ids) + 2) * U * size_)
        if ids.weights is None:
            return
        exact, sizes = torch.empty(2, ids.values.numel(), dtype=torch.float64)
        weights64, gradients64 = ([x.double() for x in tensors] for tensors in (weights, gradients))
        reference.id_weight_gradients_all(weights64, ids, gradients64, exact)
        reference.id_weight_gradients_all([x.abs() for x in weights64], ids, [x.abs() for x in gradients64], sizes)
        dims = [weights[t].shape[1] for (v, _, _), t in zip(ids.split_by_feature(), ids.tables, strict=True) for _ in v]
        assert_within(grads[-1], exact, (torch.tensor(dims) + 1) * U * sizes)


@dataclass(frozen=True, eq=False)
class Bounded:
    """Values that float32 represents to within `error`; every operation adds its own rounding error."""

    value: Tensor
    error: Tensor

    @staticmethod
    def round(value, error=0.0) -> "Bounded":
        value = torch.as_tensor(value, dtype=torch.float64)
        return Bounded(value, error + U * (value.abs() + error))

    def __add__(self, other: "Bounded") -> "Bounded":
        return Bounded.round(self.value + other.value, self.error + other.error)

    def __sub__(self, other: "Bounded") -> "Bounded":
        return Bounded.round(self.value - other.value, self.error + other.error)

    def __mul__(self, other: "Bounded") -> "Bounded":
        error = self.value.abs() * other.error + other.value.abs() * self.error + self.error * other.error
        return Bounded.round(self.value * other.value, error)

    def __truediv__(self, other: "Bounded") -> "Bounded":
        quotient = self.value / other.value
        error = (self.error + quotient.abs() * other.error) / (other.value.abs() - other.error).clamp(min=0)
        return Bounded.round(quotient, error)

    def root(self) -> "Bounded":
        value = self.value.sqrt()
        return Bounded.round(value, torch.minimum(self.error.sqrt(), self.error / value.clamp(min=1e-300)))

    def sum_of_columns(self) -> "Bounded":
        """Each column passes one addition per other column."""
        sizes, error = (x.sum(1, keepdim=True) for x in (self.value.abs(), self.error))
        return Bounded(self.value.sum(1, keepdim=True), error + (self.value.shape[1] - 1) * U * (sizes + error))

    def at_most_1(self) -> "Bounded":
        return Bounded(self.value.clamp(max=1), self.error.clamp(max=1))


def step_bounds(optimizer, weight: Bounded, state: list[Bounded], grad: Bounded, step: int) -> list[Bounded]:
    """New weight and state of rows, with the same operations as csrc/optimizers.h, in the same order."""

    def constant(x: float) -> Bounded:
        return Bounded.round(x)

    lr, decay = constant(optimizer.lr), constant(optimizer.weight_decay)
    if optimizer.clip:
        norm = (grad * grad).sum_of_columns().root()
        grad = grad * (constant(optimizer.clip) / norm).at_most_1()
    decayed = weight
    if optimizer.weight_decay and optimizer.decoupled:
        decayed = weight - lr * decay * weight
    elif optimizer.weight_decay:
        grad = grad + decay * weight
    match optimizer:
        case SGD():
            new_state = [constant(optimizer.momentum) * state[0] + grad] if optimizer.momentum else []
            change = lr * (new_state[0] if new_state else grad)
        case AdaGrad():
            new_state = [state[0] + grad * grad]
            change = lr * grad / (new_state[0].root() + constant(optimizer.eps))
        case RowWiseAdaGrad():
            columns = constant(weight.value.shape[1])
            new_state = [state[0] + (grad * grad).sum_of_columns() / columns]
            change = lr / (new_state[0].root() + constant(optimizer.eps)) * grad
        case Adam():
            rates = optimizer.beta1, optimizer.beta2
            new_state = [
                constant(rate) * old + constant(1 - rate) * new
                for rate, old, new in zip(rates, state, (grad, grad * grad), strict=True)
            ]
            mean, square = (old / constant(1 - rate**step) for rate, old in zip(rates, new_state, strict=True))
            change = lr * (mean / (square.root() + constant(optimizer.eps)))
    return [decayed - change, *new_state]


@pytest.mark.parametrize(
    "optimizer",
    [
        SGD(0.1),
        SGD(0.03, momentum=0.9, weight_decay=0.01, decoupled=True),
        SGD(0.3, clip=0.5, weight_decay=0.01),
        RowWiseAdaGrad(0.1),
        RowWiseAdaGrad(0.1, clip=0.5, weight_decay=0.01),
        AdaGrad(0.1),
        AdaGrad(0.1, weight_decay=0.02, decoupled=True),
        Adam(0.1),
        Adam(0.1, clip=0.7, weight_decay=0.1),
    ],
    ids=str,
)
@settings(max_examples=40)
@given(case=cases(), size=BATCHES)
def test_steps_are_within_the_rounding_bound(optimizer, case, size):
    weights, ids, generator = make_case(case, size)
    gradients = [random_values(generator, *vector.shape) for vector in empty_vectors(weights, ids)]
    tables = []
    for index, weight in enumerate(weights):
        state = [random_values(generator, *shape).abs() for shape in state_shapes(optimizer, *weight.shape).values()]
        tables.append(TableState(weight, state, 1 + index * 50, 0))
    exact = [TableState(t.weight.double(), [s.double() for s in t.state], t.step, 0) for t in tables]
    before = copy_tables(exact)
    ids64 = with_weights(ids, None if ids.weights is None else ids.weights.double())
    embedding.update(tables, ids, gradients, optimizer)
    reference.update_all(exact, ids64, [gradient.double() for gradient in gradients], optimizer)
    sums = row_gradients(weights, ids64, gradients)
    sizes = row_gradients(weights, with_weight_sizes(ids), [gradient.abs() for gradient in gradients])
    for i, (table, exact_table, initial) in enumerate(zip(tables, exact, before, strict=True)):
        lookups = count_lookups(i, len(table.weight), ids)
        touched_rows = lookups.squeeze(1) > 0
        grad = Bounded(sums[i], (lookups + 2) * U * sizes[i])
        bounded = [Bounded(x.view(len(x), x[0].numel()), torch.zeros(1)) for x in (initial.weight, *initial.state)]
        bounds = step_bounds(optimizer, bounded[0], bounded[1:], grad, table.step)
        values, exact_values = (table.weight, *table.state), (exact_table.weight, *exact_table.state)
        for actual, exact_, bound in zip(values, exact_values, bounds, strict=True):
            actual, exact_ = (x.view(bound.value.shape)[touched_rows] for x in (actual, exact_))
            torch.testing.assert_close(bound.value[touched_rows], exact_, rtol=1e-9, atol=1e-9)
            assert_within(actual, exact_, bound.error[touched_rows])

"""float32 against float64 by what its roundings can amount to: no tolerance is chosen.

u is half of float32's eps: one operation's result is off by at most u times itself. A term that goes through k
operations, additions among them, is off by at most k u times its size, and a sum by no more than its terms together.
"""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_embedding_kernels import cases, copied, some_ids
from torch import Tensor

from shardwright.kernels import embedding, reference
from shardwright.kernels.arguments import POOLINGS, Ids, TableState, empty_vectors
from shardwright.spec.optimizer import SGD, AdaGrad, Adam, RowWiseAdaGrad, state_shapes

U = torch.finfo(torch.float32).eps / 2 * 1.001  # and what is of second order, and float64's own roundings
SIZES = st.sampled_from([{"batch": 7}, {"batch": 400, "hot": True}])  # hot rows are summed in more than one chunk


def numbers(generator: torch.Generator, *shape: int) -> Tensor:
    """Of both signs and nine orders of magnitude, so that sums cancel and small terms are lost beside large ones."""
    sizes = 10 ** (torch.rand(*shape, generator=generator, dtype=torch.float64) * 9 - 6)
    return (torch.randn(*shape, generator=generator, dtype=torch.float64) * sizes).float()


def made(case, size) -> tuple[list[Tensor], Ids, torch.Generator]:
    shapes, features, wide, weighted, seed = case
    generator = torch.Generator().manual_seed(seed)
    ids = some_ids(generator, features, [rows for rows, _ in shapes], wide=wide, **size)
    by = numbers(generator, ids.values.numel()) if weighted else None
    return [numbers(generator, *shape) for shape in shapes], with_weights(ids, by), generator


def with_weights(ids: Ids, weights: Tensor | None) -> Ids:
    return Ids(ids.values, ids.offsets, weights, ids.tables, ids.pooling)


def sizes_of(ids: Ids) -> Ids:
    """The same with the sizes of the weights."""
    return with_weights(ids, None if ids.weights is None else ids.weights.double().abs())


def looked_up(weights: list[Tensor], ids: Ids) -> list[Tensor]:
    vectors = empty_vectors(weights, ids)
    reference.lookup_all(weights, ids, vectors)
    return vectors


def summed(weights: list[Tensor], ids: Ids, gradients: list[Tensor]) -> list[Tensor]:
    """The gradient of every row, by SGD's step of -1 from zero, in float64."""
    tables = [TableState(torch.zeros_like(weight, dtype=torch.float64), (), 1, 0) for weight in weights]
    reference.update_all(tables, ids, [gradient.double() for gradient in gradients], SGD(lr=-1.0))
    return [table.weight for table in tables]


def lookups_of(table: int, rows: int, ids: Ids) -> Tensor:
    """(rows, 1) how often a batch names each row."""
    named = [values for (values, _, _), read in zip(ids.split_by_feature(), ids.tables, strict=True) if read == table]
    return torch.cat([torch.zeros(0, dtype=torch.int64), *named]).bincount(minlength=rows).unsqueeze(1)


def within(found: Tensor, exact: Tensor, bound: Tensor) -> None:
    excess = ((found.double() - exact).abs() - bound).max() if found.numel() else torch.zeros(1)
    assert excess <= 0, f"{excess.item():.3g} beyond the bound"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@given(case=cases(), size=SIZES)
def test_vectors(dtype, case, size):
    """An addition per id but the first, a product where ids have weights, a quotient for a mean."""
    weights, ids, _ = made(case, size)
    weights = [weight.clamp(-6e4, 6e4).to(dtype) for weight in weights]
    wide = [weight.double() for weight in weights]
    dims = [weight.shape[1] for weight in weights]
    views = (
        reference.vectors_by_feature(vectors, ids, dims)
        for vectors in (
            embedding.lookup(weights, ids),
            looked_up(wide, with_weights(ids, None if ids.weights is None else ids.weights.double())),
            looked_up([weight.abs() for weight in wide], sizes_of(ids)),
        )
    )
    for found, exact, sizes, (_, lengths, _), pooling in zip(*views, ids.split_by_feature(), ids.pooling, strict=True):
        kind = POOLINGS[pooling]
        additions = torch.zeros(1, 1) if kind == "none" else (lengths - 1).clamp(min=0).unsqueeze(1)
        within(found, exact, (additions + (ids.weights is not None) + (kind == "mean")) * U * sizes)


@given(case=cases(), size=SIZES)
def test_gradients_of_rows_and_of_id_weights(case, size):
    """A row's: an addition per lookup but the first, and for its share of a weighted mean three more. An id weight's:
    an addition per column but the first, a product, and for a mean a quotient."""
    weights, ids, generator = made(case, size)
    weights = [weight.requires_grad_() for weight in weights]
    if ids.weights is not None:
        ids.weights.requires_grad_()
    vectors = embedding.lookup(weights, ids)
    gradients = [numbers(generator, *vector.shape) for vector in vectors]
    leaves = weights if ids.weights is None else [*weights, ids.weights]
    found = torch.autograd.grad(vectors, leaves, gradients, allow_unused=True)
    with torch.no_grad():
        wide = with_weights(ids, None if ids.weights is None else ids.weights.double())
        sizes = summed(weights, sizes_of(ids), [gradient.abs() for gradient in gradients])
        for table, (mine, exact, size_) in enumerate(
            zip(found[: len(weights)], summed(weights, wide, gradients), sizes, strict=True)
        ):
            within(mine, exact, (lookups_of(table, len(exact), ids) + 2) * U * size_)
        if ids.weights is None:
            return
        exact, sizes = torch.empty(2, ids.values.numel(), dtype=torch.float64)
        wide_weights, wide_gradients = ([x.double() for x in each] for each in (weights, gradients))
        reference.id_weight_gradients_all(wide_weights, ids, wide_gradients, exact)
        reference.id_weight_gradients_all(
            [x.abs() for x in wide_weights], ids, [x.abs() for x in wide_gradients], sizes
        )
        dims = [weights[t].shape[1] for (v, _, _), t in zip(ids.split_by_feature(), ids.tables, strict=True) for _ in v]
        within(found[-1], exact, (torch.tensor(dims) + 1) * U * sizes)


@dataclass(frozen=True, eq=False)
class Near:
    """A number that float32 holds to within `error`; every operation adds its own rounding."""

    value: Tensor
    error: Tensor

    @staticmethod
    def rounded(value, error=0.0) -> "Near":
        value = torch.as_tensor(value, dtype=torch.float64)
        return Near(value, error + U * (value.abs() + error))

    def __add__(self, other: "Near") -> "Near":
        return Near.rounded(self.value + other.value, self.error + other.error)

    def __sub__(self, other: "Near") -> "Near":
        return Near.rounded(self.value - other.value, self.error + other.error)

    def __mul__(self, other: "Near") -> "Near":
        error = self.value.abs() * other.error + other.value.abs() * self.error + self.error * other.error
        return Near.rounded(self.value * other.value, error)

    def __truediv__(self, other: "Near") -> "Near":
        found = self.value / other.value
        error = (self.error + found.abs() * other.error) / (other.value.abs() - other.error).clamp(min=0)
        return Near.rounded(found, error)

    def root(self) -> "Near":
        value = self.value.sqrt()
        return Near.rounded(value, torch.minimum(self.error.sqrt(), self.error / value.clamp(min=1e-300)))

    def sum_of_columns(self) -> "Near":
        """Each column goes through an addition per other column."""
        sizes, error = (x.sum(1, keepdim=True) for x in (self.value.abs(), self.error))
        return Near(self.value.sum(1, keepdim=True), error + (self.value.shape[1] - 1) * U * (sizes + error))

    def at_most_1(self) -> "Near":
        return Near(self.value.clamp(max=1), self.error.clamp(max=1))


def stepped(optimizer, weight: Near, state: list[Near], grad: Near, step: int) -> list[Near]:
    """New weight and state of rows, operation by operation as csrc/optimizers.h has them."""

    def number(x: float) -> Near:
        return Near.rounded(x)

    lr, decay = number(optimizer.lr), number(optimizer.weight_decay)
    if optimizer.clip:
        norm = (grad * grad).sum_of_columns().root()
        grad = grad * (number(optimizer.clip) / norm).at_most_1()
    taken = weight
    if optimizer.weight_decay and optimizer.decoupled:
        taken = weight - lr * decay * weight
    elif optimizer.weight_decay:
        grad = grad + decay * weight
    match optimizer:
        case SGD():
            kept = [number(optimizer.momentum) * state[0] + grad] if optimizer.momentum else []
            change = lr * (kept[0] if kept else grad)
        case AdaGrad():
            kept = [state[0] + grad * grad]
            change = lr * grad / (kept[0].root() + number(optimizer.eps))
        case RowWiseAdaGrad():
            columns = number(weight.value.shape[1])
            kept = [state[0] + (grad * grad).sum_of_columns() / columns]
            change = lr / (kept[0].root() + number(optimizer.eps)) * grad
        case Adam():
            rates = optimizer.beta1, optimizer.beta2
            kept = [
                number(rate) * held + number(1 - rate) * new
                for rate, held, new in zip(rates, state, (grad, grad * grad), strict=True)
            ]
            mean, square = (held / number(1 - rate**step) for rate, held in zip(rates, kept, strict=True))
            change = lr * (mean / (square.root() + number(optimizer.eps)))
    return [taken - change, *kept]


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
@given(case=cases(), size=SIZES)
def test_steps(optimizer, case, size):
    weights, ids, generator = made(case, size)
    gradients = [numbers(generator, *vector.shape) for vector in empty_vectors(weights, ids)]
    mine = []
    for at, weight in enumerate(weights):
        state = [numbers(generator, *shape).abs() for shape in state_shapes(optimizer, *weight.shape).values()]
        mine.append(TableState(weight, state, 1 + at * 50, 0))
    exact = [TableState(t.weight.double(), [s.double() for s in t.state], t.step, 0) for t in mine]
    before = copied(exact)
    wide = with_weights(ids, None if ids.weights is None else ids.weights.double())
    embedding.update(mine, ids, gradients, optimizer)
    reference.update_all(exact, wide, [gradient.double() for gradient in gradients], optimizer)
    sums = summed(weights, wide, gradients)
    sizes = summed(weights, sizes_of(ids), [gradient.abs() for gradient in gradients])
    for table, (one, other, start) in enumerate(zip(mine, exact, before, strict=True)):
        lookups = lookups_of(table, len(one.weight), ids)
        touched = lookups.squeeze(1) > 0
        grad = Near(sums[table], (lookups + 2) * U * sizes[table])
        held = [Near(x.view(len(x), x[0].numel()), torch.zeros(1)) for x in (start.weight, *start.state)]
        bounds = stepped(optimizer, held[0], held[1:], grad, one.step)
        for found, true, bound in zip((one.weight, *one.state), (other.weight, *other.state), bounds, strict=True):
            found, true = (x.view(bound.value.shape)[touched] for x in (found, true))
            torch.testing.assert_close(bound.value[touched], true, rtol=1e-9, atol=1e-9)
            within(found, true, bound.error[touched])

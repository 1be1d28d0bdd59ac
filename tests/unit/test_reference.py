"""Reference kernels compared with PyTorch's layers and optimizers, in float64."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwright.kernels import reference
from shardwright.spec.optimizer import LAMB, SGD, AdaGrad, Adam, RowWiseAdaGrad, state_shapes

ROWS, DIM, BAGS = 12, 5, 9


def draw_inputs(seed: int, weighted: bool):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 4, (BAGS,), generator=generator)
    ids = torch.randint(0, ROWS, (int(lengths.sum()),), generator=generator)
    weights = torch.rand(ids.numel(), generator=generator, dtype=torch.float64) if weighted else None
    weight = torch.randn(ROWS, DIM, generator=generator, dtype=torch.float64)
    return weight, ids, lengths, weights


@pytest.mark.parametrize("pooling, weighted", [("sum", False), ("sum", True), ("mean", False)])
@given(seed=st.integers(0, 1000))
def test_lookup_and_gradients_equal_torch(pooling, weighted, seed):
    weight, ids, lengths, weights = draw_inputs(seed, weighted)
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))[:-1]
    table = weight.clone().requires_grad_()
    id_weights = None if weights is None else weights.clone().requires_grad_()
    expected = torch.nn.functional.embedding_bag(ids, table, offsets, mode=pooling, per_sample_weights=id_weights)
    torch.testing.assert_close(reference.lookup(weight, ids, lengths, weights, pooling), expected, rtol=0, atol=1e-12)
    grad = torch.randn(expected.shape, dtype=torch.float64)
    expected.backward(grad)
    rows, sums = reference.sum_by_row(ids, reference.id_gradients(grad, ids.numel(), lengths, weights, pooling))
    dense = torch.zeros_like(weight)
    dense[rows] = sums
    torch.testing.assert_close(dense, table.grad, rtol=0, atol=1e-12)
    if weights is not None:
        actual = reference.id_weight_gradients(weight, ids, grad, lengths, pooling)
        torch.testing.assert_close(actual, id_weights.grad, rtol=0, atol=1e-12)


def test_weighted_mean_and_no_pooling_follow_their_formulas():
    weight, ids, lengths, weights = draw_inputs(3, weighted=True)
    rows = weight[ids] * weights[:, None]
    assert torch.equal(reference.lookup(weight, ids, lengths, weights, "none"), rows)
    mean = reference.lookup(weight, ids, lengths, weights, "mean")
    for bag, part in enumerate(rows.split(lengths.tolist())):
        expected = part.sum(0) / len(part) if len(part) else torch.zeros(DIM, dtype=torch.float64)
        torch.testing.assert_close(mean[bag], expected, rtol=0, atol=1e-12)


def apply_updates(optimizer, steps: int):
    """Apply `steps` updates to some rows; return the weight before and after, and dense gradients."""
    weight = torch.randn(ROWS, DIM, dtype=torch.float64)
    start = weight.clone()
    state = {
        name: torch.full(shape, getattr(optimizer, "initial", 0.0), dtype=torch.float64)
        for name, shape in state_shapes(optimizer, ROWS, DIM).items()
    }
    gradients = []
    for step in range(1, steps + 1):
        rows = torch.arange(ROWS) if step > 1 else torch.tensor([0, 3, 4])
        grad = torch.randn(len(rows), DIM, dtype=torch.float64)
        reference.update(optimizer, weight, state, (rows, grad), step=step)
        dense = torch.zeros_like(weight)
        dense[rows] = grad
        gradients.append((rows, dense))
    return start, weight, gradients


@pytest.mark.parametrize(
    "sparse_optimizer, torch_optimizer",
    [
        (SGD(lr=0.1), lambda p: torch.optim.SGD(p, lr=0.1)),
        (SGD(lr=0.1, momentum=0.9), lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
        (AdaGrad(lr=0.1), lambda p: torch.optim.Adagrad(p, lr=0.1, eps=1e-10)),
        (
            AdaGrad(lr=0.1, initial=0.5),
            lambda p: torch.optim.Adagrad(p, lr=0.1, eps=1e-10, initial_accumulator_value=0.5),
        ),
    ],
    ids=["sgd", "momentum", "adagrad", "adagrad-initial"],
)
def test_optimizer_equals_torch(sparse_optimizer, torch_optimizer):
    start, weight, gradients = apply_updates(sparse_optimizer, steps=5)
    parameter = torch.nn.Parameter(start)
    optimizer = torch_optimizer([parameter])
    for _, grad in gradients:
        parameter.grad = grad
        optimizer.step()
    torch.testing.assert_close(weight, parameter.data, rtol=0, atol=1e-12)


@pytest.mark.parametrize("decay", [0.0, 0.05])
@pytest.mark.parametrize(
    "kind, torch_optimizer",
    [(SGD, torch.optim.SGD), (AdaGrad, torch.optim.Adagrad), (Adam, torch.optim.Adam)],
    ids=["sgd", "adagrad", "adam"],
)
def test_weight_decay_equals_torch_if_every_row_is_read(kind, torch_optimizer, decay):
    weight = torch.randn(ROWS, DIM, dtype=torch.float64)
    parameter = torch.nn.Parameter(weight.clone())
    optimizer = torch_optimizer([parameter], lr=0.1, weight_decay=decay)
    sparse = kind(lr=0.1, weight_decay=decay)
    state = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in state_shapes(sparse, ROWS, DIM).items()}
    for step in range(1, 6):
        grad = torch.randn(ROWS, DIM, dtype=torch.float64)
        reference.update(sparse, weight, state, (torch.arange(ROWS), grad), step=step)
        parameter.grad = grad
        optimizer.step()
    torch.testing.assert_close(weight, parameter.data, rtol=0, atol=1e-12)


def test_adam_does_not_change_rows_without_gradient():
    start, weight, gradients = apply_updates(Adam(lr=0.1), steps=1)
    rows, _ = gradients[0]
    untouched = torch.ones(ROWS, dtype=torch.bool).index_fill(0, rows, False)
    assert torch.equal(weight[untouched], start[untouched])
    assert not torch.equal(weight[rows], start[rows])


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_rowwise_adagrad_equals_its_formula(decay):
    start, weight, gradients = apply_updates(RowWiseAdaGrad(lr=0.1, weight_decay=decay), steps=4)
    total = [0.0] * ROWS
    for rows, grad in gradients:
        for row in rows.tolist():
            g = grad[row] + decay * start[row]
            total[row] += float((g * g).sum()) / DIM
            start[row] = start[row] - 0.1 * g / (total[row] ** 0.5 + 1e-8)
    torch.testing.assert_close(weight, start, rtol=0, atol=1e-12)


def test_lamb_equals_its_formula():
    opt = LAMB(lr=0.1, weight_decay=0.02)
    start, weight, gradients = apply_updates(opt, steps=4)
    mean, square = torch.zeros(ROWS, DIM, dtype=torch.float64), torch.zeros(ROWS, DIM, dtype=torch.float64)
    for step, (rows, grad) in enumerate(gradients, 1):
        for row in rows.tolist():
            mean[row] = opt.beta1 * mean[row] + (1 - opt.beta1) * grad[row]
            square[row] = opt.beta2 * square[row] + (1 - opt.beta2) * grad[row] ** 2
            m, v = mean[row] / (1 - opt.beta1**step), square[row] / (1 - opt.beta2**step)
            direction = m / (v.sqrt() + opt.eps) + opt.weight_decay * start[row]
            start[row] = start[row] - opt.lr * start[row].norm() / direction.norm() * direction
    torch.testing.assert_close(weight, start, rtol=0, atol=1e-12)


def test_lamb_updates_a_row_of_zeros():
    weight = torch.zeros(1, 2, dtype=torch.float64)
    state = {name: torch.zeros(1, 2, dtype=torch.float64) for name in ("mean", "square")}
    reference.update(LAMB(lr=0.1), weight, state, (torch.tensor([0]), torch.ones(1, 2, dtype=torch.float64)), step=1)
    torch.testing.assert_close(weight, torch.full((1, 2), -0.1, dtype=torch.float64), rtol=0, atol=1e-6)

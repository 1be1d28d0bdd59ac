"""Linear layers of groups of rows compared with a loop over nn.functional.linear; a row's bits."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from shardwright.errors import UserError
from shardwright.kernels.grouped_products import grouped_linear
from shardwright.library import native_library

LEVELS = ("baseline", "avx2", "avx512", "best")


def draw(*shape: int, seed: int = 0, dtype=torch.float64) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def plain_linear(rows, weight, sizes):
    return torch.cat(
        [functional.linear(part, own) for part, own in zip(rows.split(sizes.tolist()), weight, strict=True)]
    )


def with_gradients(function, rows, weight, sizes, upstream):
    rows, weight = rows.clone().requires_grad_(), weight.clone().requires_grad_()
    out = function(rows, weight, sizes)
    return out.detach(), *torch.autograd.grad((out * upstream).sum(), (rows, weight))


@pytest.fixture(params=LEVELS)
def level(request):
    native = native_library()
    before = native.shardwright_level()
    if request.param != "best" and not native.shardwright_set_level(request.param.encode()):
        pytest.skip(f"this processor has no {request.param}")
    yield request.param
    native.shardwright_set_level(before)


sizes_of_groups = st.lists(st.one_of(st.just(0), st.integers(0, 40)), min_size=1, max_size=6)


@settings(max_examples=60)
@given(sizes=sizes_of_groups, channels=st.integers(1, 300), hidden=st.integers(1, 70), name=st.sampled_from(LEVELS))
def test_results_and_gradients_equal_a_loop_over_the_groups(sizes, channels, hidden, name):
    native = native_library()
    before = native.shardwright_level()
    if name != "best" and not native.shardwright_set_level(name.encode()):
        return
    try:
        sizes = torch.tensor(sizes)
        num = int(sizes.sum())
        inputs = draw(num, channels), draw(len(sizes), hidden, channels, seed=1), sizes, draw(num, hidden, seed=2)
        expected = with_gradients(plain_linear, *inputs)
        for actual, wanted in zip(with_gradients(grouped_linear, *inputs), expected, strict=True):
            torch.testing.assert_close(actual, wanted, rtol=0, atol=1e-10)
        singles = [x.float() if x.is_floating_point() else x for x in inputs]
        terms = with_gradients(plain_linear, *(x.abs() for x in inputs))
        bound = torch.finfo(torch.float32).eps * (max(channels, hidden, num) + 2)
        for actual, wanted, term in zip(with_gradients(grouped_linear, *singles), expected, terms, strict=True):
            assert ((actual - wanted).abs() <= bound * term + 1e-30).all()
    finally:
        native.shardwright_set_level(before)


def test_a_row_has_the_same_bits_whatever_rows_stand_beside_it(level):
    weight, rows, upstream = (draw(*shape, dtype=torch.float32) for shape in ((2, 50, 301), (61, 301), (61, 50)))
    out, grad, _ = with_gradients(grouped_linear, rows, weight, torch.tensor([40, 21]), upstream)
    for first in range(0, 61, 7):
        for last in (first + 1, min(first + 13, 61)):
            sizes = torch.tensor([max(0, min(last, 40) - first), last - max(first, 40) if last > 40 else 0])
            part = with_gradients(grouped_linear, rows[first:last], weight, sizes, upstream[first:last])
            assert torch.equal(part[0], out[first:last]) and torch.equal(part[1], grad[first:last])


def test_gradients_of_gradients():
    rows, weight = draw(9, 5).requires_grad_(), draw(3, 4, 5, seed=1).requires_grad_()
    sizes = torch.tensor([4, 0, 5])
    assert torch.autograd.gradgradcheck(lambda x, w: grouped_linear(x, w, sizes), (rows, weight))


def test_threads_do_not_change_the_bits():
    before = torch.get_num_threads()
    inputs = [draw(300, 64), draw(4, 96, 64, seed=1), torch.tensor([100, 0, 150, 50]), draw(300, 96, seed=2)]
    inputs = [x.float() if x.is_floating_point() else x for x in inputs]
    results = []
    try:
        for number in (1, 2, 3):
            torch.set_num_threads(number)
            results.append(with_gradients(grouped_linear, *inputs))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))


def test_bfloat16_multiplies_group_by_group_under_autocast():
    rows, weight, sizes = draw(8, 6).float(), draw(2, 4, 6, seed=1).float(), torch.tensor([3, 5])
    with torch.autocast("cpu", torch.bfloat16):
        out = grouped_linear(rows, weight, sizes)
        assert out.dtype is torch.bfloat16
        assert torch.equal(out, plain_linear(rows, weight, sizes))
    weight.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        grouped_linear(rows, weight, sizes).float().sum().backward()
    assert weight.grad is not None and weight.grad.dtype is torch.float32
    torch.testing.assert_close(weight.grad[0], rows[:3].sum(0).expand(4, 6), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64, torch.bfloat16))
def test_no_groups_have_no_rows(dtype):
    """A rank without copies still runs the step of copies."""
    empty = torch.empty(0, 5, dtype=dtype), torch.empty(0, 7, 5, dtype=dtype), torch.empty(0, dtype=torch.int64)
    out, *gradients = with_gradients(grouped_linear, *empty, torch.empty(0, 7, dtype=dtype))
    assert out.shape == (0, 7) and [tuple(each.shape) for each in gradients] == [(0, 5), (0, 7, 5)]


def test_products_are_counted():
    with FlopCounterMode(display=False) as counter:
        rows, weight = draw(10, 6).requires_grad_(), draw(2, 4, 6, seed=1).requires_grad_()
        grouped_linear(rows, weight, torch.tensor([3, 7])).sum().backward()
    assert counter.get_total_flops() == 3 * 2 * 10 * 6 * 4


@pytest.mark.parametrize(
    ("rows", "sizes", "message"),
    [
        ((5, 7), [2, 3], r"rows have shape \(5, 7\); wanted \(rows, 6\)"),
        ((5, 6), [2, 2], "sum 4; wanted int64, 2 numbers, sum 5"),
        ((5, 6), [5], r"shape \(1,\) and sum 5; wanted int64, 2 numbers"),
        ((5, 6), [-1, 6], "is -1"),
    ],
)
def test_wrong_shapes_are_named(rows, sizes, message):
    with pytest.raises(UserError, match=message):
        grouped_linear(draw(*rows), draw(2, 4, 6), torch.tensor(sizes))

"""Dot products of vector pairs compared with plain loops."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from shardwright.errors import UserError
from shardwright.kernels import pair_dots as pairs
from shardwright.kernels.pair_dots import pair_dots
from shardwright.layers.interaction import DotInteraction
from shardwright.library import native_library


def plain_dots(x):
    pairs = [(i, j) for i in range(x.shape[1]) for j in range(i + 1, x.shape[1])]
    return torch.stack([(x[:, i] * x[:, j]).sum(1) for i, j in pairs], 1)


def draw_normal(*shape, seed=1, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def values_and_gradient(x, upstream, function):
    x = x.clone().requires_grad_()
    out = function(x)
    (gradient,) = torch.autograd.grad((out * upstream).sum(), x, allow_unused=True, materialize_grads=True)
    return out, gradient


@settings(max_examples=60)
@given(
    samples=st.integers(0, 5),
    vectors=st.integers(2, 40),
    dim=st.integers(1, 40),
    level=st.sampled_from(["baseline", "avx2", "avx512", "best"]),
    seed=st.integers(0, 9),
)
def test_dots_and_gradients_equal_plain_loops(samples, vectors, dim, level, seed):
    native = native_library()
    level_before = native.shardwright_level()
    if level != "best" and not native.shardwright_set_level(level.encode()):
        return
    try:
        x = draw_normal(samples, vectors, dim, seed=seed)
        upstream = draw_normal(samples, vectors * (vectors - 1) // 2, seed=seed + 100)
        expected, expected_gradient = values_and_gradient(x, upstream, plain_dots)
        actual, gradient = values_and_gradient(x, upstream, pair_dots)
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(gradient, expected_gradient, rtol=1e-12, atol=1e-12)

        bound = 2 * torch.finfo(torch.float32).eps
        actual, gradient = values_and_gradient(x.float(), upstream.float(), pair_dots)
        terms, gradient_terms = values_and_gradient(x.abs(), upstream.abs(), plain_dots)
        assert (actual - expected <= bound * (dim + 2) * terms).all()
        assert (gradient - expected_gradient <= bound * (vectors + 2) * gradient_terms).all()
    finally:
        native.shardwright_set_level(level_before)


def test_threads_and_other_samples_change_no_bit():
    x, upstream = draw_normal(600, 27, 33, dtype=torch.float32), draw_normal(600, 351, dtype=torch.float32)
    expected = values_and_gradient(x, upstream, pair_dots)
    threads = torch.get_num_threads()
    try:
        for number in (1, 2, 3):
            torch.set_num_threads(number)
            for first, second in zip(expected, values_and_gradient(x, upstream, pair_dots), strict=True):
                assert torch.equal(first, second)
    finally:
        torch.set_num_threads(threads)
    for whole, part in zip(expected, values_and_gradient(x[100:107], upstream[100:107], pair_dots), strict=True):
        assert torch.equal(whole[100:107], part)


def test_the_operator_passes_torchs_checks():
    x = draw_normal(3, 5, 4).requires_grad_()
    assert torch.autograd.gradcheck(pair_dots, x) and torch.autograd.gradgradcheck(pair_dots, x)
    pair_dots(x)
    torch.library.opcheck(torch.ops.shardwright.pair_dots.default, (x,))
    torch.library.opcheck(torch.ops.shardwright.pair_gradients.default, (x, draw_normal(3, 10)))
    compiled = torch.compile(DotInteraction(5), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), pair_dots(x))


def test_layouts_and_other_dtypes():
    x = draw_normal(4, 6, 8, dtype=torch.float32)
    transposed = x.transpose(1, 2).contiguous().transpose(1, 2)
    expected = pair_dots(x)
    assert torch.equal(pair_dots(transposed), expected)
    torch.testing.assert_close(pair_dots(x.bfloat16()).float(), plain_dots(x), rtol=0.05, atol=0.1)
    halves = values_and_gradient(x.bfloat16(), plain_dots(x).bfloat16(), pair_dots)[1]
    torch.testing.assert_close(halves.float(), values_and_gradient(x, plain_dots(x), plain_dots)[1], rtol=0.1, atol=2.0)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(pair_dots(x), expected)
    assert pair_dots(x[:, :1]).shape == (4, 0)
    with pytest.raises(UserError, match=r"wanted \(4, 15\)"):
        torch.ops.shardwright.pair_gradients(x, expected[:, 1:])


def test_plain_torch_gives_the_same_values(monkeypatch):
    x, upstream = draw_normal(3, 5, 4), draw_normal(3, 10)
    expected = values_and_gradient(x, upstream, pair_dots)
    monkeypatch.setattr(pairs, "native_library", lambda: None)
    for compiled, plain_torch in zip(expected, values_and_gradient(x, upstream, pair_dots), strict=True):
        torch.testing.assert_close(plain_torch, compiled)


def test_flops_are_counted_once_per_pair():
    with FlopCounterMode(display=False) as counter:
        values_and_gradient(draw_normal(3, 5, 4), draw_normal(3, 10), pair_dots)
    assert counter.get_total_flops() == 3 * (3 * 10 * 4 * 2)

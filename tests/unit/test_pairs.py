"""Dot products of pairs against plain loops."""

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


def plain(x):
    pairs = [(i, j) for i in range(x.shape[1]) for j in range(i + 1, x.shape[1])]
    return torch.stack([(x[:, i] * x[:, j]).sum(1) for i, j in pairs], 1)


def drawn(*shape, seed=1, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def both(x, upstream, of):
    x = x.clone().requires_grad_()
    out = of(x)
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
def test_dots_and_gradients_are_those_of_plain_loops(samples, vectors, dim, level, seed):
    native = native_library()
    here = native.shardwright_level()
    if level != "best" and not native.shardwright_set_level(level.encode()):
        return
    try:
        x = drawn(samples, vectors, dim, seed=seed)
        upstream = drawn(samples, vectors * (vectors - 1) // 2, seed=seed + 100)
        expected, for_x = both(x, upstream, plain)
        found, found_for_x = both(x, upstream, pair_dots)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(found_for_x, for_x, rtol=1e-12, atol=1e-12)

        bound = 2 * torch.finfo(torch.float32).eps
        found, found_for_x = both(x.float(), upstream.float(), pair_dots)
        terms, for_terms = both(x.abs(), upstream.abs(), plain)
        assert (found - expected <= bound * (dim + 2) * terms).all()
        assert (found_for_x - for_x <= bound * (vectors + 2) * for_terms).all()
    finally:
        native.shardwright_set_level(here)


def test_threads_and_neighbours_change_no_bit():
    x, upstream = drawn(600, 27, 33, dtype=torch.float32), drawn(600, 351, dtype=torch.float32)
    whole = both(x, upstream, pair_dots)
    threads = torch.get_num_threads()
    try:
        for number in (1, 2, 3):
            torch.set_num_threads(number)
            for one, other in zip(whole, both(x, upstream, pair_dots), strict=True):
                assert torch.equal(one, other)
    finally:
        torch.set_num_threads(threads)
    for one, other in zip(whole, both(x[100:107], upstream[100:107], pair_dots), strict=True):
        assert torch.equal(one[100:107], other)


def test_the_operator_is_sound():
    x = drawn(3, 5, 4).requires_grad_()
    assert torch.autograd.gradcheck(pair_dots, x) and torch.autograd.gradgradcheck(pair_dots, x)
    pair_dots(x)
    torch.library.opcheck(torch.ops.shardwright.pair_dots.default, (x,))
    torch.library.opcheck(torch.ops.shardwright.pair_gradients.default, (x, drawn(3, 10)))
    compiled = torch.compile(DotInteraction(5), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), pair_dots(x))


def test_layouts_and_other_dtypes():
    x = drawn(4, 6, 8, dtype=torch.float32)
    turned = x.transpose(1, 2).contiguous().transpose(1, 2)
    whole = pair_dots(x)
    assert torch.equal(pair_dots(turned), whole)
    torch.testing.assert_close(pair_dots(x.bfloat16()).float(), plain(x), rtol=0.05, atol=0.1)
    halves = both(x.bfloat16(), plain(x).bfloat16(), pair_dots)[1]
    torch.testing.assert_close(halves.float(), both(x, plain(x), plain)[1], rtol=0.1, atol=2.0)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(pair_dots(x), whole)
    assert pair_dots(x[:, :1]).shape == (4, 0)
    with pytest.raises(UserError, match=r"wanted \(4, 15\)"):
        torch.ops.shardwright.pair_gradients(x, whole[:, 1:])


def test_without_the_library_the_same(monkeypatch):
    x, upstream = drawn(3, 5, 4), drawn(3, 10)
    expected = both(x, upstream, pair_dots)
    monkeypatch.setattr(pairs, "native_library", lambda: None)
    for one, other in zip(expected, both(x, upstream, pair_dots), strict=True):
        torch.testing.assert_close(one, other)


def test_operations_are_counted_once_per_pair():
    with FlopCounterMode(display=False) as counter:
        both(drawn(3, 5, 4), drawn(3, 10), pair_dots)
    assert counter.get_total_flops() == 3 * (3 * 10 * 4 * 2)

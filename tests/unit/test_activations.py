"""GELU and SwiGLU inside experts: torch's values, and the same bits wherever a number stands."""

import pytest
import torch
from torch.nn import functional

from shardwright.kernels.activations import gelu, swiglu
from shardwright.library import native_library

CASES = {"gelu": (gelu, functional.gelu, 1), "swiglu": (swiglu, lambda gate, up: functional.silu(gate) * up, 2)}
EDGES = (0.0, -0.0, 1e-30, -1e-30, 5.0, -5.0, 14.0, -14.0, 40.0, -40.0, 100.0, -100.0)


def run(function, inputs, gradient):
    leaves = [x.clone().requires_grad_() for x in inputs]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, gradient)]


def draw(number: int, num: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """`number` inputs and a gradient; the first inputs are edge cases."""
    draws = torch.randn(number + 1, num, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * 3
    draws[:number, : len(EDGES)] = torch.tensor(EDGES, dtype=torch.float64)
    return list(draws.to(dtype))


@pytest.mark.parametrize("level", ["baseline", "avx2", "avx512"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-14)])
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_equal_torchs(name, dtype, tolerance, level):
    function, reference, number = CASES[name]
    best = native_library().shardwright_level()
    if not native_library().shardwright_set_level(level.encode()):
        pytest.skip(f"this processor has no {level}")
    try:
        *inputs, gradient = draw(number, 5003, dtype)
        results = run(function, inputs, gradient)
    finally:
        native_library().shardwright_set_level(best)
    exact = run(reference, [x.double() for x in inputs], gradient.double())
    for mine, expected in zip(results, exact, strict=True):
        assert mine.dtype is dtype
        torch.testing.assert_close(mine.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", CASES)
def test_bits_do_not_depend_on_the_numbers_beside_or_threads(name, dtype):
    function, _, number = CASES[name]
    *inputs, gradient = draw(number, 40_001, dtype)
    whole = run(function, inputs, gradient)
    for parts in ([1, 15, 17, 33, 39_935], [9000, 31_001]):
        splits = zip(*(x.split(parts) for x in (*inputs, gradient)), strict=True)
        pieces = [run(function, piece[:-1], piece[-1]) for piece in splits]
        assert all(torch.equal(a, torch.cat(b)) for a, b in zip(whole, zip(*pieces, strict=True), strict=True))
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert all(torch.equal(a, b) for a, b in zip(whole, run(function, inputs, gradient), strict=True))
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("name", CASES)
def test_nan_and_infinities_stay_visible(name):
    function, _, number = CASES[name]
    special = torch.tensor([float("nan"), float("inf"), 1.0])
    out = function(*[special] * number)
    assert out[0].isnan() and out[1] == float("inf") and out[2].isfinite()


@pytest.mark.parametrize("name", CASES)
def test_other_dtypes_and_views(name):
    function, reference, number = CASES[name]
    halves = [torch.randn(4, 6).bfloat16() for _ in range(number)]
    torch.testing.assert_close(function(*halves), reference(*halves))
    views = [torch.randn(6, 4).t() for _ in range(number)]
    torch.testing.assert_close(function(*views), reference(*views))
    assert function(*[torch.empty(0, 3)] * number).shape == (0, 3)

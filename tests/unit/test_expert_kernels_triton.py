"""The Triton kernels of experts compared with torch: on a GPU if there is one, else in Triton's interpreter."""

from importlib import import_module

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

pytest.importorskip("triton", reason="needs triton: pip install shardwright[gpu]")
products, routing, activations = (
    import_module(f"shardwright.kernels.{name}_triton") for name in ("grouped_products", "routing", "activations")
)
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")  # the interpreter's
HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float64: 1e-12}
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
PRODUCTS = DTYPES if HAS_GPU else DTYPES[1:]  # the interpreter's products of bf16 are wrong


def random(*shape, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).to(DEVICE)


def assert_close(actual, expected, dtype):
    scale = expected.abs().max().item() if expected.numel() else 0.0
    assert actual.shape == expected.shape
    assert not actual.isnan().any()
    assert (actual.double() - expected).abs().max().item() <= BOUNDS[dtype] * scale if actual.numel() else True


sizes_of_groups = st.lists(st.sampled_from([0, 1, 5, 64, 65, 130]), min_size=1, max_size=4)


@pytest.mark.parametrize("dtype", PRODUCTS, ids=str)
@settings(max_examples=6)
@given(sizes=sizes_of_groups, channels=st.sampled_from([8, 72, 136]), hidden=st.sampled_from([16, 264]))
def test_products_equal_those_of_each_group(dtype, sizes, channels, hidden):
    sizes_G, num_rows = torch.tensor(sizes), sum(sizes)
    if not num_rows:
        return
    rows, gradient = random(num_rows, channels, dtype=dtype), random(num_rows, hidden, dtype=dtype)
    weight = random(len(sizes), hidden, channels, dtype=dtype)
    parts = list(zip(rows.double().split(sizes), gradient.double().split(sizes), weight.double(), strict=True))
    out = products.rows_times_weights(rows, weight, sizes_G, transposed=True)
    assert_close(out, torch.cat([own @ matrix.t() for own, _, matrix in parts]), dtype)
    of_rows = products.rows_times_weights(gradient, weight, sizes_G, transposed=False)
    assert_close(of_rows, torch.cat([own @ matrix for _, own, matrix in parts]), dtype)
    of_weight = products.rows_times_rows(gradient, rows, sizes_G)
    assert_close(of_weight, torch.stack([grad.t() @ own for own, grad, _ in parts]), dtype)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # the interpreter's
def test_infinite_rows_of_a_group_do_not_reach_other_groups():
    sizes, dtype = [70, 3, 70], torch.float16
    rows, gradient = random(143, 64, dtype=dtype), random(143, 128, dtype=dtype)
    rows[70:73], gradient[70:73] = torch.inf, torch.nan
    of_weight = products.rows_times_rows(gradient, rows, torch.tensor(sizes))
    assert of_weight[0].isfinite().all() and of_weight[2].isfinite().all()
    out = products.rows_times_weights(rows, random(3, 128, 64, dtype=dtype), torch.tensor(sizes), transposed=True)
    assert out[:70].isfinite().all() and out[73:].isfinite().all()


@pytest.mark.parametrize("dtype", PRODUCTS, ids=str)
def test_a_row_has_the_same_bits_whatever_is_beside_it(dtype):
    if not HAS_GPU and dtype == torch.float32:
        pytest.skip(
            "the interpreter's products of float32 are those of numpy's BLAS, which may sum a row in an order "
            "that depends on its position"
        )
    rows, weight = random(700, 136, dtype=dtype), random(3, 264, 136, dtype=dtype)
    whole = products.rows_times_weights(rows, weight, torch.tensor([400, 100, 200]), transposed=True)
    few = products.rows_times_weights(rows[395:405], weight, torch.tensor([5, 5, 0]), transposed=True)
    assert torch.equal(whole[395:405], few)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
@pytest.mark.parametrize("channels", [24, 1300])
def test_sums_of_choices_and_their_gradients_equal_torch(dtype, channels):
    num, chosen, generator = 9, 3, torch.Generator().manual_seed(0)
    positions = torch.randperm(num * chosen, generator=generator).view(num, chosen)
    kept = torch.rand(num, chosen, generator=generator) > 0.2
    order = positions[kept].argsort().argsort()
    positions = torch.full_like(positions, -1).masked_scatter(kept, order).to(DEVICE)
    rows, gradient = random(int(kept.sum()), channels, dtype=dtype), random(num, channels, dtype=dtype)
    weights = random(num, chosen, dtype=torch.promote_types(dtype, torch.float32))
    exact_rows, exact_weights = rows.double().requires_grad_(), weights.double().requires_grad_()
    picked = exact_rows[positions.clamp(min=0)] * (positions >= 0).unsqueeze(2)
    expected = (picked * exact_weights.unsqueeze(2)).sum(1)
    expected.backward(gradient.double())
    assert_close(routing.sum_choices(rows, positions, weights), expected.detach(), dtype)
    assert_close(routing.sum_choices(rows, positions, None), picked.detach().sum(1), dtype)
    of_rows, of_weights = routing.sum_choices_gradient(gradient, rows, positions, weights)
    assert_close(of_rows, exact_rows.grad, dtype)
    assert_close(of_weights, exact_weights.grad, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_swiglu_and_its_gradients_equal_torch(dtype):
    gate, up, gradient = (random(37, 100, dtype=dtype, seed=seed) for seed in (1, 2, 3))
    exact_gate, exact_up = gate.double().requires_grad_(), up.double().requires_grad_()
    expected = functional.silu(exact_gate) * exact_up
    expected.backward(gradient.double())
    assert_close(activations.swiglu(gate, up), expected.detach(), dtype)
    for actual, exact in zip(activations.swiglu_gradient(gradient, gate, up), (exact_gate, exact_up), strict=True):
        assert_close(actual, exact.grad, dtype)

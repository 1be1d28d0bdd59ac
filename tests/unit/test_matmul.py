"""float32 matmuls by oneDNN equal PyTorch's; other matmuls are left to PyTorch."""

from time import thread_time

import pytest
import torch
from torch import nn

from shardwright.errors import UserError
from shardwright.kernels import matmul

SHAPES = (
    (4096, 64, 512),
    (4096, 512, 64),
    (100, 1152, 64),
    (64, 4096, 1152),
    (17, 16_000, 16),
    (1, 4096, 4096),
    (3, 4, 5),
    (0, 64, 64),
)
TOLERANCE = 1e-5  # relative to the largest value, for sums of up to 16,000 products


@pytest.fixture(autouse=True, scope="module")
def use_onednn():
    before = matmul.library_in_use()
    matmul.use_library("onednn")
    yield
    matmul.use_library(before or matmul.preferred_library())


@pytest.mark.parametrize(("rows", "inner", "columns"), SHAPES)
def test_values_and_gradients(rows: int, inner: int, columns: int) -> None:
    torch.manual_seed(rows)
    layer, x = nn.Linear(inner, columns), torch.randn(rows, inner, requires_grad=True)
    exact, y = nn.Linear(inner, columns).double(), x.detach().double().requires_grad_()
    exact.load_state_dict(layer.state_dict())
    for module, inputs in ((layer, x), (exact, y)):
        module(inputs).square().sum().backward()
    assert x.grad is not None
    for actual, expected in (
        (layer(x), exact(y)),
        (x.grad, y.grad),
        (layer.weight.grad, exact.weight.grad),
        (layer.bias.grad, exact.bias.grad),
    ):
        assert actual.dtype is torch.float32
        error = (actual.double() - expected).abs()
        assert bool((error <= TOLERANCE * expected.abs().amax() if rows else expected == 0).all())


def test_any_strides() -> None:
    wide, weight = torch.randn(512, 300), torch.randn(256, 128)
    for left in (wide[:, 50:178], torch.randn(128, 512).t(), wide[::2, 100:228], torch.randn(1, 128).expand(512, 128)):
        for right in (weight.t(), weight.t().contiguous(), torch.randn(128, 512)[:, ::2]):
            actual, exact = left @ right, left.double() @ right.double()
            assert torch.allclose(actual.double(), exact, atol=1e-3)


def test_addmm_adds_its_bias() -> None:
    left, right = torch.randn(512, 128), torch.randn(128, 256)
    for bias, scales in ((torch.randn(512, 256), {}), (torch.randn(1), {}), (torch.randn(256), {"beta": 0.5})):
        actual = torch.addmm(bias, left, right, **scales)
        exact = torch.addmm(bias.double(), left.double(), right.double(), **scales)
        assert torch.allclose(actual.double(), exact, atol=1e-3)


def test_other_dtypes_are_left_to_pytorch() -> None:
    left, right = torch.randn(512, 128), torch.randn(128, 256)
    expected = (left.double().unsqueeze(2) * right.double()).sum(1)
    assert torch.allclose(left.double() @ right.double(), expected, rtol=1e-13, atol=1e-12)
    with torch.autocast("cpu", torch.bfloat16):
        assert (left @ right).dtype is torch.bfloat16
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        torch.matmul(left, torch.randn(129, 256))
    with pytest.raises(RuntimeError, match="same dtype"):
        torch.matmul(left, right.double())


def test_the_library_is_chosen_by_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    for vendor, capability, library in (
        ("AuthenticAMD", "AVX512", "onednn"),
        ("AuthenticAMD", "AVX512_BF16", "onednn"),
        ("AuthenticAMD", "AVX2", "blas"),
        ("GenuineIntel", "AVX512", "blas"),
        ("", "DEFAULT", "blas"),
    ):
        monkeypatch.setattr(matmul, "_vendor", lambda vendor=vendor: vendor)
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda capability=capability: capability)
        assert matmul.preferred_library() == library


def test_use_library_switches_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    left, right = torch.randn(512, 128), torch.randn(128, 256)
    multiply = matmul._multiply_onednn
    monkeypatch.setattr(matmul, "_multiply_onednn", lambda *arguments: calls.append(1) or multiply(*arguments))
    for library, num_calls in (("blas", 0), ("onednn", 1), ("blas", 0)):
        matmul.use_library(library)
        calls.clear()
        _ = left @ right
        assert len(calls) == num_calls and matmul.library_in_use() == library
    with pytest.raises(UserError, match='unknown library "fast" for matrix products; allowed: blas, onednn'):
        matmul.use_library("fast")


def seconds(call) -> float:
    start = thread_time()
    call()
    return thread_time() - start


def test_a_slice_of_a_wider_matrix_takes_no_longer() -> None:
    """As in the gradient of a concatenation: on such strided rows oneDNN took a thousand times as long."""
    wide, weight = torch.randn(2048, 272), torch.randn(144, 64)
    part = wide[:, :144]
    contiguous, strided = (
        min(seconds(lambda left=left: torch.mm(left, weight)) for _ in range(5)) for left in (part.contiguous(), part)
    )
    assert strided < 20 * contiguous

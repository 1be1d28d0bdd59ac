"""float32 products by oneDNN: the values and gradients of torch's own, and all else left to those."""

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
TOLERANCE = 1e-5  # of the largest, where up to 16,000 products are summed


@pytest.fixture(autouse=True, scope="module")
def taken_over():
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
    for module, given in ((layer, x), (exact, y)):
        module(given).square().sum().backward()
    assert x.grad is not None
    for found, wanted in (
        (layer(x), exact(y)),
        (x.grad, y.grad),
        (layer.weight.grad, exact.weight.grad),
        (layer.bias.grad, exact.bias.grad),
    ):
        assert found.dtype is torch.float32
        assert bool(((found.double() - wanted).abs() <= TOLERANCE * wanted.abs().amax() if rows else wanted == 0).all())


def test_whatever_strides() -> None:
    wide, weight = torch.randn(512, 300), torch.randn(256, 128)
    for left in (wide[:, 50:178], torch.randn(128, 512).t(), wide[::2, 100:228], torch.randn(1, 128).expand(512, 128)):
        for right in (weight.t(), weight.t().contiguous(), torch.randn(128, 512)[:, ::2]):
            found, exact = left @ right, left.double() @ right.double()
            assert torch.allclose(found.double(), exact, atol=1e-3)


def test_adds_what_addmm_adds() -> None:
    left, right = torch.randn(512, 128), torch.randn(128, 256)
    for bias, scales in ((torch.randn(512, 256), {}), (torch.randn(1), {}), (torch.randn(256), {"beta": 0.5})):
        found = torch.addmm(bias, left, right, **scales)
        exact = torch.addmm(bias.double(), left.double(), right.double(), **scales)
        assert torch.allclose(found.double(), exact, atol=1e-3)


def test_other_types_stay() -> None:
    left, right = torch.randn(512, 128), torch.randn(128, 256)
    one_by_one = (left.double().unsqueeze(2) * right.double()).sum(1)
    assert torch.allclose(left.double() @ right.double(), one_by_one, rtol=1e-13, atol=1e-12)
    with torch.autocast("cpu", torch.bfloat16):
        assert (left @ right).dtype is torch.bfloat16
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        torch.matmul(left, torch.randn(129, 256))
    with pytest.raises(RuntimeError, match="same dtype"):
        torch.matmul(left, right.double())


def test_the_library_is_a_function_of_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_each_library_multiplies_where_it_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[int] = []
    left, right = torch.randn(512, 128), torch.randn(128, 256)
    plain = matmul._multiply_onednn
    monkeypatch.setattr(matmul, "_multiply_onednn", lambda *given: called.append(1) or plain(*given))
    for library, times in (("blas", 0), ("onednn", 1), ("blas", 0)):
        matmul.use_library(library)
        called.clear()
        _ = left @ right
        assert len(called) == times and matmul.library_in_use() == library
    with pytest.raises(UserError, match='unknown library "fast" for matrix products; allowed: blas, onednn'):
        matmul.use_library("fast")


def seconds(call) -> float:
    start = thread_time()
    call()
    return thread_time() - start


def test_a_part_of_a_wider_matrix_takes_no_longer() -> None:
    """A gradient of a concatenation is one: given such rows as they are, oneDNN took a thousand times as long."""
    wide, weight = torch.randn(2048, 272), torch.randn(144, 64)
    part = wide[:, :144]
    whole, strided = (
        min(seconds(lambda left=left: torch.mm(left, weight)) for _ in range(5)) for left in (part.contiguous(), part)
    )
    assert strided < 20 * whole

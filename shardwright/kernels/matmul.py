"""Float32 matrix products on the CPU with the faster of torch's two libraries, MKL or oneDNN.

torch multiplies float32 matrices with its BLAS, by default MKL, whose 512-bit kernels run only on Intel's processors.
oneDNN, which every torch build has too, uses what the processor has: on a Zen 5 core 210 GFLOP/s to MKL's 97. Both
compute in float32 throughout; they differ in the order of sums. Small or thin products and other dtypes are unaffected.
"""

import warnings
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from shardwright.errors import UserError

MIN_MULTIPLY_ADDS = 1 << 22  # of a product; below it a call of oneDNN costs more than it saves
MIN_DIM = 16  # rows, columns or inner dimension
BLAS, ONEDNN = "blas", "onednn"
LIBRARIES = (BLAS, ONEDNN)


def preferred_library() -> str:
    """The library that is faster on this processor, determined only by its vendor and instruction set.

    A measurement could choose differently in two runs on one machine, and their losses would differ in the last bits.
    MKL has 512-bit kernels only for Intel's processors.
    """
    has_avx512 = torch.backends.cpu.get_cpu_capability().startswith("AVX512")
    return ONEDNN if has_avx512 and _vendor() != "GenuineIntel" and torch.backends.mkldnn.is_available() else BLAS


def use_library(name: str) -> None:
    """Use this library for float32 matrix products in this process from now on."""
    if name not in LIBRARIES:
        raise UserError(f'unknown library "{name}" for matrix products; allowed: {", ".join(LIBRARIES)}')
    if name == ONEDNN and not torch.backends.mkldnn.is_available():
        raise UserError("this job uses oneDNN for matrix products, and this torch has none: set train.products=blas")
    _selection().use(name)


def library_in_use() -> str:
    """The library in use in this process; "" before one is chosen."""
    return _selection().name


class _Selection:
    """The library in use; one per process, because the overrides of torch's kernels are."""

    def __init__(self) -> None:
        self.name = ""

    def use(self, name: str) -> None:
        self.name = name
        if name == ONEDNN:
            _override_kernels()


@cache
def _selection() -> _Selection:
    return _Selection()


@cache
def _vendor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("vendor_id")), "")


def _multiply_onednn(left: Tensor, right: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply with oneDNN. The left matrix is copied unless it is row-major.

    The weight gradient of a wide layer is computed transposed where that copies less. Matrices with gaps between rows,
    such as slices of a wider matrix, are copied first: oneDNN is a thousand times slower on them.
    """
    linear = torch.ops.mkldnn._linear_pointwise.default
    left, right = _remove_gaps(left), _remove_gaps(right)
    if bias is None and _num_copied(right.t()) + len(left) * right.shape[1] < _num_copied(left):
        return linear(right.t(), left, None, "none", [], "").t().contiguous()
    return linear(left, right.t(), bias, "none", [], "")


def _remove_gaps(x: Tensor) -> Tensor:
    """The matrix, copied if neither its rows nor its columns are contiguous."""
    return x if x.is_contiguous() or x.t().is_contiguous() else x.contiguous()


def _num_copied(x: Tensor) -> int:
    return 0 if x.is_contiguous() else x.numel()


@cache
def _override_kernels() -> torch.library.Library:
    """Override aten::mm and aten::addmm on the CPU, below autograd and autocast.

    Models, their backward passes and their compiled graphs need no change.
    """
    mm = torch.library.get_kernel("aten::mm", "CPU")
    addmm = torch.library.get_kernel("aten::addmm", "CPU")

    selection = _selection()

    def mm_override(keys: torch._C.DispatchKeySet, left: Tensor, right: Tensor) -> Tensor:
        if selection.name == ONEDNN and _should_use_onednn(left, right):
            return _multiply_onednn(left, right, None)
        return mm.call_boxed(keys, left, right)

    def addmm_override(
        keys: torch._C.DispatchKeySet, bias: Tensor, left: Tensor, right: Tensor, *, beta: float = 1, alpha: float = 1
    ) -> Tensor:
        supported = (
            selection.name == ONEDNN and beta == 1 and alpha == 1 and bias.dtype is torch.float32 and bias.dim() == 1
        )
        if supported and _should_use_onednn(left, right) and len(bias) == right.shape[1]:
            return _multiply_onednn(left, right, bias)
        return addmm.call_boxed(keys, bias, left, right, beta=beta, alpha=alpha)

    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(?s).*Overriding a previously registered kernel")
        library.impl("mm", mm_override, "CPU", with_keyset=True)
        library.impl("addmm", addmm_override, "CPU", with_keyset=True)
    return library


def _should_use_onednn(left: Tensor, right: Tensor) -> bool:
    """Whether both are float32 matrices, large enough for oneDNN to be faster."""
    if left.dtype is not torch.float32 or right.dtype is not torch.float32 or left.dim() != 2 or right.dim() != 2:
        return False
    (rows, inner), (right_inner, columns) = left.shape, right.shape
    return inner == right_inner and min(rows, inner, columns) >= MIN_DIM and rows * inner * columns >= MIN_MULTIPLY_ADDS

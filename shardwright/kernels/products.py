"""Products of float32 matrices on the CPU, by whichever of torch's two libraries is faster on this processor.

torch multiplies float32 matrices with its BLAS, by default MKL, whose 512-bit kernels run on Intel's processors alone.
oneDNN, which every torch has as well, uses what the processor has: on a Zen 5 core 210 GFLOP/s to MKL's 97. Both are
float32 throughout; they differ in the order of sums. What is small, thin or of another type is left where it was.
"""

import warnings
from collections.abc import Callable
from functools import cache
from time import thread_time

import torch
from torch import Tensor

MULTIPLIED = 1 << 22  # numbers, from which on a call of oneDNN pays
THINNEST = 16  # rows or columns
GAIN = 1.3  # from which on it is taken: ranks of one machine, and its next run, are to choose alike
TRIED = (512, 256, 128)
TURNS = 9


@cache
def fast_products() -> bool:
    """Have this process multiply float32 matrices with oneDNN, where it is measured to be faster. Asked again, it
    tells what was found."""
    if not torch.backends.mkldnn.is_available() or _gain() < GAIN:
        return False
    _take_over()
    return True


def _gain() -> float:
    """How many times faster oneDNN is, by processor time: others may have the processor in between."""
    rows, inner, columns = TRIED
    left, right = torch.ones(rows, inner), torch.ones(inner, columns)
    calls = (lambda: torch.mm(left, right), lambda: _multiplied(left, right, None))
    least = [min(times) for times in zip(*([_seconds(call) for call in calls] for _ in range(TURNS)), strict=True)]
    return least[0] / least[1]


def _seconds(call: Callable[[], object]) -> float:
    start = thread_time()
    call()
    return thread_time() - start


def _multiplied(left: Tensor, right: Tensor, bias: Tensor | None) -> Tensor:
    """The left matrix is copied where its numbers do not lie row by row; the gradient of a wide layer's weight is
    found transposed, where that copies less. With gaps between rows, as in a part of a wider matrix, oneDNN is a
    thousand times slower."""
    linear = torch.ops.mkldnn._linear_pointwise.default
    left, right = _without_gaps(left), _without_gaps(right)
    if bias is None and _copied(right.t()) + len(left) * right.shape[1] < _copied(left):
        return linear(right.t(), left, None, "none", [], "").t().contiguous()
    return linear(left, right.t(), bias, "none", [], "")


def _without_gaps(x: Tensor) -> Tensor:
    return x if x.is_contiguous() or x.t().is_contiguous() else x.contiguous()


def _copied(x: Tensor) -> int:
    return 0 if x.is_contiguous() else x.numel()


@cache
def _take_over() -> torch.library.Library:
    """In front of torch's kernels, below autograd and autocast: models, their backward passes and their compiled
    graphs stay as they are."""
    mm = torch.library.get_kernel("aten::mm", "CPU")
    addmm = torch.library.get_kernel("aten::addmm", "CPU")

    def times(keys: torch._C.DispatchKeySet, left: Tensor, right: Tensor) -> Tensor:
        if _worth(left, right):
            return _multiplied(left, right, None)
        return mm.call_boxed(keys, left, right)

    def times_plus(
        keys: torch._C.DispatchKeySet, bias: Tensor, left: Tensor, right: Tensor, *, beta: float = 1, alpha: float = 1
    ) -> Tensor:
        plain = beta == 1 and alpha == 1 and bias.dtype is torch.float32 and bias.dim() == 1
        if plain and _worth(left, right) and len(bias) == right.shape[1]:
            return _multiplied(left, right, bias)
        return addmm.call_boxed(keys, bias, left, right, beta=beta, alpha=alpha)

    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(?s).*Overriding a previously registered kernel")
        library.impl("mm", times, "CPU", with_keyset=True)
        library.impl("addmm", times_plus, "CPU", with_keyset=True)
    return library


def _worth(left: Tensor, right: Tensor) -> bool:
    if left.dtype is not torch.float32 or right.dtype is not torch.float32 or left.dim() != 2 or right.dim() != 2:
        return False
    (rows, inner), (again, columns) = left.shape, right.shape
    return inner == again and min(rows, inner, columns) >= THINNEST and rows * inner * columns >= MULTIPLIED

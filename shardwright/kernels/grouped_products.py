"""Linear layers of groups of rows, each group with a weight of its own, such as the experts of a mixture.

Native on the CPU for float32 and float64, Triton on GPUs for bf16, fp16 and float32 (Hopper or later; rows of whole 16
bytes): each number of a result is a sum in a fixed order, so that a row's result, to the bit, does not depend on the
rows beside it. Other dtypes and devices multiply group by group.

Shape legend: R rows, ordered by group; G groups; C input channels; H output channels; K, N: of a product, C or H.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from shardwright.errors import UserError
from shardwright.kernels.native import lengths_to_offsets
from shardwright.kernels.triton_modules import triton_module
from shardwright.library import native_library

FACTORS = "deferred_factors"  # attribute of a weight whose gradient is computed later: a list


def grouped_linear(rows_RC: Tensor, weight_GHC: Tensor, sizes_G: Tensor) -> Tensor:
    """(R, H): each row times the transposed weight of its group; `sizes_G`: the rows of each group.

    Sizes on the CPU must add up to R; those on a GPU are not looked at, so that nothing waits for them.
    """
    factors = getattr(weight_GHC, FACTORS, None)
    if factors is None:
        return torch.ops.shardwright.grouped_linear(rows_RC, weight_GHC, sizes_G)
    device = rows_RC.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        rows_RC, weight_GHC = rows_RC.to(dtype), weight_GHC.to(dtype)
    return _DeferredLinear.apply(rows_RC, weight_GHC, sizes_G, factors)  # pyright: ignore[reportReturnType]


def repeat_by_group(bias_GH: Tensor, sizes_G: Tensor, num_rows: int) -> Tensor:
    """(R, H): for each row, the numbers of its group."""
    factors = getattr(bias_GH, FACTORS, None)
    if factors is not None:
        return _DeferredRepeat.apply(bias_GH, sizes_G, factors)  # pyright: ignore[reportReturnType]
    return bias_GH.repeat_interleave(sizes_G.to(bias_GH.device), dim=0, output_size=num_rows)


class Factors(NamedTuple):
    """The gradient of a weight, not yet computed: gradients of outputs, rows, and the rows of each group."""

    gradient_RH: Tensor
    rows_RC: Tensor
    sizes_G: Tensor


def defer_gradient(weight_GHC: Tensor) -> tuple[Tensor, list[Factors]]:
    """The same weight, and a list: a backward pass adds `Factors` to it instead of computing the weight's gradient."""
    alias, factors = weight_GHC.detach().requires_grad_(), list[Factors]()
    setattr(alias, FACTORS, factors)
    return alias, factors


def weight_gradient(factors: Factors, groups: range, total_GHC: Tensor, outputs: slice) -> None:
    """Add the gradient of some rows of the weights of consecutive groups to `total_GHC`, in place; `outputs`: the rows.

    Each number is continued in the order of the factors' rows: to the bit as if the call that computed `total_GHC` had
    also had these rows.
    """
    ends = [0, *factors.sizes_G.cumsum(0).tolist()]
    rows = slice(ends[groups.start], ends[groups.stop])
    gradient_RH, rows_RC = factors.gradient_RH[rows, outputs], factors.rows_RC[rows]
    sizes_G = factors.sizes_G[groups.start : groups.stop]
    total_GHC = total_GHC.view(len(groups), gradient_RH.shape[1], rows_RC.shape[1])
    if _native_for(gradient_RH, total_GHC) is not None:
        _rows_times_rows(gradient_RH, rows_RC, sizes_G, total_GHC, add=True)
    else:
        total_GHC += torch.ops.shardwright.grouped_linear_weight_gradient(gradient_RH, rows_RC, sizes_G)


class _DeferredLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows_RC, weight_GHC, sizes_G, factors):
        ctx.save_for_backward(rows_RC, weight_GHC, sizes_G)
        ctx.factors = factors
        return torch.ops.shardwright.grouped_linear(rows_RC, weight_GHC, sizes_G)

    @staticmethod
    def backward(ctx, grad_RH):
        rows_RC, weight_GHC, sizes_G = ctx.saved_tensors
        ctx.factors.append(Factors(grad_RH, rows_RC, sizes_G))
        is_needed = ctx.needs_input_grad[0]
        gradient = torch.ops.shardwright.grouped_linear_input_gradient
        return gradient(grad_RH, weight_GHC, sizes_G) if is_needed else None, None, None, None


class _DeferredRepeat(torch.autograd.Function):
    """The gradient is a product with rows of ones, so that it has the order of summation of other weights."""

    @staticmethod
    def forward(ctx, bias_GH, sizes_G, factors):
        ctx.sizes_G, ctx.factors = sizes_G, factors
        return bias_GH.repeat_interleave(sizes_G, dim=0)

    @staticmethod
    def backward(ctx, grad_RH):
        ctx.factors.append(Factors(grad_RH, grad_RH.new_ones(len(grad_RH), 1), ctx.sizes_G))
        return None, None, None


def _linear_op(rows_RC: Tensor, weight_GHC: Tensor, sizes_G: Tensor) -> Tensor:
    return _times_weights(rows_RC, weight_GHC, sizes_G, transposed=True)


def _input_gradient_op(gradient_RH: Tensor, weight_GHC: Tensor, sizes_G: Tensor) -> Tensor:
    return _times_weights(gradient_RH, weight_GHC, sizes_G, transposed=False)


def _times_weights(rows_RK: Tensor, weight_GHC: Tensor, sizes_G: Tensor, *, transposed: bool) -> Tensor:
    """(R, C), or (R, H) with transposed weights: each row times the weight of its group."""
    weight_GKN = weight_GHC.mT if transposed else weight_GHC
    _check(rows_RK, weight_GKN.shape[1], len(weight_GHC), sizes_G)
    native = _native_for(rows_RK, weight_GHC)
    kernels = _triton_for(rows_RK, weight_GHC)
    if kernels is not None:
        return kernels.rows_times_weights(rows_RK, weight_GHC, sizes_G, transposed=transposed)
    if native is None:
        pairs = zip(rows_RK.split(sizes_G.tolist()), weight_GKN, strict=True)
        parts = [rows @ weight for rows, weight in pairs]
        return torch.cat(parts) if parts else rows_RK.new_empty(0, weight_GKN.shape[2])
    rows_RK, weight_GHC, starts = rows_RK.contiguous(), weight_GHC.contiguous(), lengths_to_offsets(sizes_G)
    out = rows_RK.new_empty(len(rows_RK), weight_GKN.shape[2])
    shape = (len(weight_GHC), *weight_GKN.shape[1:])
    pointers = rows_RK.data_ptr(), weight_GHC.data_ptr(), starts.data_ptr()
    native.shardwright_rows_times_matrices(*pointers, *shape, transposed, out.dtype is torch.float64, out.data_ptr())
    return out


def _weight_gradient_op(gradient_RH: Tensor, rows_RC: Tensor, sizes_G: Tensor) -> Tensor:
    """(G, H, C): the gradient of each group's weight."""
    num, height, columns = len(sizes_G), gradient_RH.shape[1], rows_RC.shape[1]
    _check(gradient_RH, height, num, sizes_G)
    _check(rows_RC, columns, num, sizes_G)
    kernels = _triton_for(gradient_RH, rows_RC)
    if kernels is not None:
        return kernels.rows_times_rows(gradient_RH, rows_RC, sizes_G)
    if _native_for(gradient_RH, rows_RC) is None:
        sizes = sizes_G.tolist()
        pairs = zip(gradient_RH.split(sizes), rows_RC.split(sizes), strict=True)
        parts = [gradient.t() @ rows for gradient, rows in pairs]
        return torch.stack(parts) if parts else rows_RC.new_empty(0, height, columns)
    return _rows_times_rows(gradient_RH, rows_RC, sizes_G, rows_RC.new_empty(num, height, columns), add=False)


def _rows_times_rows(gradient_RH: Tensor, rows_RC: Tensor, sizes_G: Tensor, out_GHC: Tensor, *, add: bool) -> Tensor:
    """Set or continue `out_GHC`: for each group the sum over its rows of gradient x row."""
    native = native_library()
    assert native is not None
    gradient_RH = gradient_RH if gradient_RH.stride(1) == 1 else gradient_RH.contiguous()
    rows_RC, starts = rows_RC.contiguous(), lengths_to_offsets(sizes_G)
    pointers = gradient_RH.data_ptr(), rows_RC.data_ptr(), starts.data_ptr()
    stride, is_double = gradient_RH.stride(0), out_GHC.dtype is torch.float64
    native.shardwright_rows_times_rows(*pointers, *out_GHC.shape, stride, add, is_double, out_GHC.data_ptr())
    return out_GHC


def _check(rows: Tensor, channels: int, num_groups: int, sizes_G: Tensor) -> None:
    if rows.dim() != 2 or rows.shape[1] != channels:
        raise UserError(f"rows have shape {tuple(rows.shape)}; wanted (rows, {channels})")
    if sizes_G.device.type not in ("cpu", rows.device.type):
        raise UserError(f"sizes of groups are on {sizes_G.device}; wanted on the CPU or {rows.device}")
    is_wrong = sizes_G.shape != (num_groups,) or sizes_G.dtype is not torch.int64
    if is_wrong or (sizes_G.device.type == "cpu" and int(sizes_G.sum()) != len(rows)):
        sizes = f"{sizes_G.dtype} of shape {tuple(sizes_G.shape)} and sum {int(sizes_G.sum())}"
        raise UserError(f"sizes of groups are {sizes}; wanted int64, {num_groups} numbers, sum {len(rows)}")


def _native_for(first: Tensor, second: Tensor):
    if first.device != second.device:
        raise UserError(f"rows are on {first.device}, the other factor on {second.device}")
    is_native = first.dtype in (torch.float32, torch.float64) and first.dtype is second.dtype
    return native_library() if is_native and first.device.type == "cpu" else None


def _triton_for(first: Tensor, second: Tensor) -> Any | None:
    kernels = triton_module("grouped_products_triton", first)
    return kernels if kernels is not None and kernels.is_supported(first, second) else None


def _linear_fake(rows_RC: Tensor, weight_GHC: Tensor, sizes_G: Tensor) -> Tensor:
    return rows_RC.new_empty(rows_RC.shape[0], weight_GHC.shape[1])


def _input_gradient_fake(gradient_RH: Tensor, weight_GHC: Tensor, sizes_G: Tensor) -> Tensor:
    return gradient_RH.new_empty(gradient_RH.shape[0], weight_GHC.shape[2])


def _weight_gradient_fake(gradient_RH: Tensor, rows_RC: Tensor, sizes_G: Tensor) -> Tensor:
    return rows_RC.new_empty(sizes_G.shape[0], gradient_RH.shape[1], rows_RC.shape[1])


def _save(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs)


def _linear_backward(ctx, grad_RH: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    rows_RC, weight_GHC, sizes_G = ctx.saved_tensors
    for_rows, for_weight, _ = ctx.needs_input_grad
    operators = torch.ops.shardwright
    return (
        operators.grouped_linear_input_gradient(grad_RH, weight_GHC, sizes_G) if for_rows else None,
        operators.grouped_linear_weight_gradient(grad_RH, rows_RC, sizes_G) if for_weight else None,
        None,
    )


def _input_gradient_backward(ctx, grad_RC: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    gradient_RH, weight_GHC, sizes_G = ctx.saved_tensors
    for_gradient, for_weight, _ = ctx.needs_input_grad
    operators = torch.ops.shardwright
    return (
        operators.grouped_linear(grad_RC, weight_GHC, sizes_G) if for_gradient else None,
        operators.grouped_linear_weight_gradient(gradient_RH, grad_RC, sizes_G) if for_weight else None,
        None,
    )


def _weight_gradient_backward(ctx, grad_GHC: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    gradient_RH, rows_RC, sizes_G = ctx.saved_tensors
    for_gradient, for_rows, _ = ctx.needs_input_grad
    operators = torch.ops.shardwright
    return (
        operators.grouped_linear(rows_RC, grad_GHC, sizes_G) if for_gradient else None,
        operators.grouped_linear_input_gradient(gradient_RH, grad_GHC, sizes_G) if for_rows else None,
        None,
    )


def _flops(left_shape: Sequence[int], right_shape: Sequence[int], *_, **__) -> int:
    """Of rows x weights (G, H, C), or of rows x rows."""
    return (
        2
        * left_shape[0]
        * (left_shape[1] * right_shape[1] if len(right_shape) == 2 else right_shape[1] * right_shape[2])
    )


def _operators() -> torch.library.Library:
    operators = torch.library.Library("shardwright", "FRAGMENT")
    for name, arguments, compute, fake, backward in (
        ("grouped_linear", "rows, Tensor weight", _linear_op, _linear_fake, _linear_backward),
        (
            *("grouped_linear_input_gradient", "gradient, Tensor weight"),
            *(_input_gradient_op, _input_gradient_fake, _input_gradient_backward),
        ),
        (
            *("grouped_linear_weight_gradient", "gradient, Tensor rows"),
            *(_weight_gradient_op, _weight_gradient_fake, _weight_gradient_backward),
        ),
    ):
        operators.define(f"{name}(Tensor {arguments}, Tensor sizes) -> Tensor")
        operators.impl(name, compute, "CPU")
        operators.impl(name, compute, "CUDA")
        operators._register_fake(name, fake)
        torch.library.register_autograd(f"shardwright::{name}", backward, setup_context=_save, lib=operators)
        register_flop_formula(getattr(torch.ops.shardwright, name))(_flops)
    for device in ("cpu", "cuda"):
        torch.library.register_autocast("shardwright::grouped_linear", device, torch.bfloat16, lib=operators)
    return operators


OPERATORS = _operators()

"""Linear layers of groups of rows, each group with a weight of its own, such as the experts of a mixture.

Native on the CPU for float32 and float64: each number of a result is a sum in a fixed order, so that a row's result, to
the bit, does not depend on the rows beside it. Other dtypes and devices multiply group by group.

Shape legend: R rows, ordered by group; G groups; C input channels; H output channels; K, N: of a product, C or H.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from shardwright.errors import UserError
from shardwright.kernels.native import lengths_to_offsets
from shardwright.library import native_library


def grouped_linear(rows_RC: Tensor, weight_GHC: Tensor, sizes_G: Tensor) -> Tensor:
    """(R, H): each row times the transposed weight of its group; `sizes_G`: the rows of each group, on the CPU."""
    return torch.ops.shardwright.grouped_linear(rows_RC, weight_GHC, sizes_G)


def _linear_op(rows_RC: Tensor, weight_GHC: Tensor, sizes_G: Tensor) -> Tensor:
    return _times_weights(rows_RC, weight_GHC, sizes_G, transposed=True)


def _input_gradient_op(gradient_RH: Tensor, weight_GHC: Tensor, sizes_G: Tensor) -> Tensor:
    return _times_weights(gradient_RH, weight_GHC, sizes_G, transposed=False)


def _times_weights(rows_RK: Tensor, weight_GHC: Tensor, sizes_G: Tensor, *, transposed: bool) -> Tensor:
    """(R, C), or (R, H) with transposed weights: each row times the weight of its group."""
    weight_GKN = weight_GHC.mT if transposed else weight_GHC
    _check(rows_RK, weight_GKN.shape[1], len(weight_GHC), sizes_G)
    native = _native_for(rows_RK, weight_GHC)
    if native is None:
        pairs = zip(rows_RK.split(sizes_G.tolist()), weight_GKN, strict=True)
        return torch.cat([rows @ weight for rows, weight in pairs])
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
    native = _native_for(gradient_RH, rows_RC)
    if native is None:
        sizes = sizes_G.tolist()
        pairs = zip(gradient_RH.split(sizes), rows_RC.split(sizes), strict=True)
        return torch.stack([gradient.t() @ rows for gradient, rows in pairs])
    gradient_RH, rows_RC, starts = gradient_RH.contiguous(), rows_RC.contiguous(), lengths_to_offsets(sizes_G)
    out = rows_RC.new_empty(num, height, columns)
    pointers, is_double = (gradient_RH.data_ptr(), rows_RC.data_ptr(), starts.data_ptr()), out.dtype is torch.float64
    native.shardwright_rows_times_rows(*pointers, num, height, columns, False, is_double, out.data_ptr())
    return out


def _check(rows: Tensor, channels: int, num_groups: int, sizes_G: Tensor) -> None:
    if rows.dim() != 2 or rows.shape[1] != channels:
        raise UserError(f"rows have shape {tuple(rows.shape)}; wanted (rows, {channels})")
    if sizes_G.device.type != "cpu":
        raise UserError(f"sizes of groups are on {sizes_G.device}; wanted on the CPU")
    if sizes_G.shape != (num_groups,) or sizes_G.dtype is not torch.int64 or int(sizes_G.sum()) != len(rows):
        sizes = f"{sizes_G.dtype} of shape {tuple(sizes_G.shape)} and sum {int(sizes_G.sum())}"
        raise UserError(f"sizes of groups are {sizes}; wanted int64, {num_groups} numbers, sum {len(rows)}")


def _native_for(first: Tensor, second: Tensor):
    if first.device != second.device:
        raise UserError(f"rows are on {first.device}, the other factor on {second.device}")
    is_native = first.dtype in (torch.float32, torch.float64) and first.dtype is second.dtype
    return native_library() if is_native and first.device.type == "cpu" else None


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

"""Dot products of all pairs of a sample's vectors, and their gradient, without the square matrix.

Shape legend: B samples, F vectors, D columns, P = F * (F - 1) / 2 pairs: (0, 1), (0, 2), ... (1, 2), ...
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from shardwright.errors import UserError
from shardwright.library import native_library


def pair_dots(x_BFD: Tensor) -> Tensor:
    """(B, P): a native pass for float32 and float64 on the CPU, else a batched matrix product."""
    return torch.ops.shardwright.pair_dots(x_BFD) if x_BFD.device.type in ("cpu", "meta") else _select(x_BFD @ x_BFD.mT)


def _pair_indices(num_vectors: int, device: torch.device) -> Tensor:
    first, second = torch.triu_indices(num_vectors, num_vectors, offset=1, device=device)
    return first * num_vectors + second


def _select(square_BFF: Tensor) -> Tensor:
    return square_BFF.flatten(1).index_select(1, _pair_indices(square_BFF.shape[1], square_BFF.device))


def _dots_op(x_BFD: Tensor) -> Tensor:
    native = _native_for(x_BFD)
    if native is None:
        with torch.autocast(x_BFD.device.type, enabled=False):
            return _select(x_BFD @ x_BFD.mT)
    x_BFD = x_BFD.contiguous()
    out_BP = _dots_fake(x_BFD)
    native.shardwright_pair_dots(x_BFD.data_ptr(), x_BFD.dtype == torch.float64, *x_BFD.shape, out_BP.data_ptr())
    return out_BP


def _gradients_op(x_BFD: Tensor, grad_BP: Tensor) -> Tensor:
    if grad_BP.shape != (expected := _dots_fake(x_BFD.to("meta")).shape):
        raise UserError(f"gradients of pairs are {tuple(grad_BP.shape)}; wanted {tuple(expected)}")
    x_BFD, grad_BP = x_BFD.contiguous(), grad_BP.to(x_BFD.dtype).contiguous()
    out_BFD = _gradients_fake(x_BFD, grad_BP)
    native = _native_for(x_BFD)
    if native is None:
        square_BFF = x_BFD.new_zeros(len(x_BFD), x_BFD.shape[1] ** 2)
        square_BFF[:, _pair_indices(x_BFD.shape[1], x_BFD.device)] = grad_BP
        square_BFF = square_BFF.unflatten(1, (x_BFD.shape[1], -1))
        with torch.autocast(x_BFD.device.type, enabled=False):
            return torch.matmul(square_BFF + square_BFF.mT, x_BFD, out=out_BFD)
    pointers = x_BFD.data_ptr(), grad_BP.data_ptr()
    native.shardwright_pair_gradients(*pointers, x_BFD.dtype == torch.float64, *x_BFD.shape, out_BFD.data_ptr())
    return out_BFD


def _native_for(x: Tensor):
    return native_library() if x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64) else None


def _dots_fake(x_BFD: Tensor) -> Tensor:
    samples, vectors, _ = x_BFD.shape
    return x_BFD.new_empty(samples, vectors * (vectors - 1) // 2)


def _gradients_fake(x_BFD: Tensor, grad_BP: Tensor) -> Tensor:
    return torch.empty_like(x_BFD, memory_format=torch.contiguous_format)


def _setup_context(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs)


def _dots_backward(ctx, grad_BP: Tensor) -> Tensor:
    (x_BFD,) = ctx.saved_tensors
    return torch.ops.shardwright.pair_gradients(x_BFD, grad_BP)


def _gradients_backward(ctx, grad_BFD: Tensor) -> tuple[Tensor, Tensor]:
    x_BFD, dots_grad_BP = ctx.saved_tensors
    crossed_BFF = grad_BFD @ x_BFD.mT
    return torch.ops.shardwright.pair_gradients(grad_BFD, dots_grad_BP), _select(crossed_BFF + crossed_BFF.mT)


def _operators() -> torch.library.Library:
    operators = torch.library.Library("shardwright", "FRAGMENT")
    operators.define("pair_dots(Tensor x) -> Tensor")
    operators.define("pair_gradients(Tensor x, Tensor for_dots) -> Tensor")
    for device in ("CPU", "CUDA"):  # of GPUs: for programs that were exported on a CPU
        operators.impl("pair_dots", _dots_op, device)
        operators.impl("pair_gradients", _gradients_op, device)
    operators._register_fake("pair_dots", _dots_fake)
    operators._register_fake("pair_gradients", _gradients_fake)
    autograd = torch.library.register_autograd
    autograd("shardwright::pair_dots", _dots_backward, setup_context=_setup_context, lib=operators)
    autograd("shardwright::pair_gradients", _gradients_backward, setup_context=_setup_context, lib=operators)
    register_flop_formula(torch.ops.shardwright.pair_dots)(_flops)
    register_flop_formula(torch.ops.shardwright.pair_gradients)(lambda x, for_dots, **_: 2 * _flops(x))
    return operators


def _flops(x_shape: Sequence[int], *_, **__) -> int:
    samples, vectors, dim = x_shape
    return samples * vectors * (vectors - 1) * dim


OPERATORS = _operators()

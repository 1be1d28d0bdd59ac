"""Activations inside experts: a number's bits do not depend on the numbers beside it, nor on threads.

Torch's own have other bits in the last numbers of a vector register. Native on the CPU for float32 and float64; other
dtypes and devices use torch's. Not differentiable twice.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from shardwright.kernels.triton_modules import triton_module
from shardwright.library import native_library


def gelu(x: Tensor) -> Tensor:
    return _Gelu.apply(x) if _is_native(x) else functional.gelu(x)  # pyright: ignore[reportReturnType]


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up."""
    kernels = triton_module("activations_triton", gate)
    is_fused = kernels is not None and gate.dtype is up.dtype and gate.dtype is not torch.float64
    if not (is_fused or (_is_native(gate) and _is_native(up) and gate.dtype is up.dtype)):
        return functional.silu(gate) * up
    return _SwiGlu.apply(gate, up)  # pyright: ignore[reportReturnType]


class _Gelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        x, out = x.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)
        _library().shardwright_gelu(x.data_ptr(), *_size(x), out.data_ptr())
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient):
        gradient, x = gradient.contiguous(), ctx.saved_tensors[0].contiguous()
        out = torch.empty_like(x)
        _library().shardwright_gelu_gradient(gradient.data_ptr(), x.data_ptr(), *_size(x), out.data_ptr())
        return out


class _SwiGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate, up):
        ctx.save_for_backward(gate, up)
        gate, up = gate.contiguous(), up.contiguous()
        if gate.is_cuda:
            return triton_module("activations_triton", gate).swiglu(gate, up)  # pyright: ignore[reportOptionalMemberAccess]
        out = torch.empty_like(gate)
        _library().shardwright_swiglu(gate.data_ptr(), up.data_ptr(), *_size(gate), out.data_ptr())
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient):
        gradient, (gate, up) = gradient.contiguous(), (saved.contiguous() for saved in ctx.saved_tensors)
        if gate.is_cuda:
            return triton_module("activations_triton", gate).swiglu_gradient(gradient, gate, up)  # pyright: ignore[reportOptionalMemberAccess]
        of_gate, of_up = torch.empty_like(gate), torch.empty_like(up)
        pointers = gradient.data_ptr(), gate.data_ptr(), up.data_ptr()
        results = of_gate.data_ptr(), of_up.data_ptr()
        _library().shardwright_swiglu_gradient(*pointers, *_size(gate), *results)
        return of_gate, of_up


def _library() -> Any:
    library = native_library()
    assert library is not None
    return library


def _is_native(x: Tensor) -> bool:
    is_supported = x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64)
    return is_supported and native_library() is not None


def _size(x: Tensor) -> tuple[int, bool]:
    """The number of elements, and whether they are doubles."""
    return x.numel(), x.dtype is torch.float64

"""SwiGLU and its gradients on GPUs: each number is read and written once."""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048  # numbers of a program


@triton.jit
def swiglu_kernel(gate, up, out, num, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    g = tl.load(gate + at, mask=at < num, other=0.0).to(tl.float32)
    u = tl.load(up + at, mask=at < num, other=0.0).to(tl.float32)
    tl.store(out + at, (g * tl.sigmoid(g) * u).to(out.dtype.element_ty), mask=at < num)


@triton.jit
def swiglu_gradient_kernel(gradient, gate, up, of_gate, of_up, num, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    grad = tl.load(gradient + at, mask=at < num, other=0.0).to(tl.float32)
    g = tl.load(gate + at, mask=at < num, other=0.0).to(tl.float32)
    u = tl.load(up + at, mask=at < num, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(g)
    silu = g * sigmoid
    slope = sigmoid + silu * (1.0 - sigmoid)
    tl.store(of_gate + at, (grad * u * slope).to(of_gate.dtype.element_ty), mask=at < num)
    tl.store(of_up + at, (grad * silu).to(of_up.dtype.element_ty), mask=at < num)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    out = torch.empty_like(gate)
    swiglu_kernel[(triton.cdiv(gate.numel(), BLOCK),)](gate, up, out, gate.numel(), BLOCK=BLOCK, num_warps=8)
    return out


def swiglu_gradient(gradient: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    of_gate, of_up = torch.empty_like(gate), torch.empty_like(up)
    grid = (triton.cdiv(gate.numel(), BLOCK),)
    swiglu_gradient_kernel[grid](gradient, gate, up, of_gate, of_up, gate.numel(), BLOCK=BLOCK, num_warps=8)
    return of_gate, of_up

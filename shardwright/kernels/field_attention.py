"""Softmax attention between all vectors of a sample, and its gradients.

The scores of a sample stay in the caches: `scaled_dot_product_attention` is made for long sequences.

Shape legend: B samples, F vectors, N = B * F vectors of all, H heads, K columns of a head, C = H * K columns of a
result, P = 3 * C columns of queries, keys and values.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.flop_counter import register_flop_formula

from shardwright.errors import UserError
from shardwright.kernels import native_attention


def field_attention(packed_BFP: Tensor, num_heads: int) -> Tensor:
    """(B, F, H * K): for each vector the sum of values by softmax(q . k / sqrt(K)) over the sample's vectors.

    `packed_BFP`: the queries of all heads, then keys, then values. A native pass for float32 on the CPU if K is a
    multiple of 16, else scaled_dot_product_attention.
    """
    if packed_BFP.shape[-1] % (3 * num_heads):
        raise UserError(f"{packed_BFP.shape[-1]} columns of queries, keys and values; wanted a multiple of 3 x heads")
    if native_attention.fits(*_split(packed_BFP, num_heads)):
        return torch.ops.shardwright.field_attention(packed_BFP, num_heads)
    return _attend(packed_BFP, num_heads)


def _split(packed_BFP: Tensor, num_heads: int) -> list[Tensor]:
    """Queries, keys and values (B, F, H, K)."""
    return [part.unflatten(2, (num_heads, -1)) for part in packed_BFP.chunk(3, dim=2)]


def _attend(packed_BFP: Tensor, num_heads: int) -> Tensor:
    query, key, value = (part.transpose(1, 2) for part in _split(packed_BFP, num_heads))
    return functional.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)


def _attend_op(packed_BFP: Tensor, num_heads: int) -> Tensor:
    heads = _split(packed_BFP.contiguous(), num_heads)
    if not native_attention.supports(*heads):  # a program that was exported where there are kernels
        return _attend(packed_BFP, num_heads).contiguous()
    out_BFC = _attend_fake(packed_BFP, num_heads)
    width, rows = heads[0].shape[-1], [part.flatten(0, 1) for part in heads]
    native_attention.softmax(rows, packed_BFP.shape[1], width**-0.5, out_BFC.view(-1, num_heads, width))
    return out_BFC


def _gradients_op(packed_BFP: Tensor, grad_BFC: Tensor, num_heads: int) -> Tensor:
    if grad_BFC.shape != (expected := _attend_fake(packed_BFP.to("meta"), num_heads)).shape:
        raise UserError(f"gradients of attention are {tuple(grad_BFC.shape)}; wanted {tuple(expected.shape)}")
    heads = _split(packed_BFP.contiguous(), num_heads)
    if not native_attention.supports(*heads):
        with torch.enable_grad():
            packed_BFP = packed_BFP.detach().requires_grad_()
            return torch.autograd.grad(_attend(packed_BFP, num_heads), packed_BFP, grad_BFC)[0].contiguous()
    out_BFP = _gradients_fake(packed_BFP)
    width, rows = heads[0].shape[-1], [part.flatten(0, 1) for part in heads]
    grad_NHK = grad_BFC.to(packed_BFP.dtype).contiguous().view(-1, num_heads, width)
    to = [part.flatten(0, 1) for part in _split(out_BFP, num_heads)]
    native_attention.softmax_gradients(rows, packed_BFP.shape[1], width**-0.5, grad_NHK, to)
    return out_BFP


def _attend_fake(packed_BFP: Tensor, num_heads: int) -> Tensor:
    samples, vectors, columns = packed_BFP.shape
    return packed_BFP.new_empty(samples, vectors, columns // 3)


def _gradients_fake(packed_BFP: Tensor, *_) -> Tensor:
    return torch.empty_like(packed_BFP, memory_format=torch.contiguous_format)


def _setup_context(ctx, inputs, output) -> None:
    packed_BFP, ctx.num_heads = inputs
    ctx.save_for_backward(packed_BFP)


def _backward(ctx, grad_BFC: Tensor):
    return torch.ops.shardwright.field_attention_gradients(*ctx.saved_tensors, grad_BFC, ctx.num_heads), None


def _operators() -> torch.library.Library:
    operators = torch.library.Library("shardwright", "FRAGMENT")
    operators.define("field_attention(Tensor packed, int num_heads) -> Tensor")
    operators.define("field_attention_gradients(Tensor packed, Tensor grad, int num_heads) -> Tensor")
    for device in ("CPU", "CUDA"):  # of GPUs: for programs that were exported on a CPU
        operators.impl("field_attention", _attend_op, device)
        operators.impl("field_attention_gradients", _gradients_op, device)
    operators._register_fake("field_attention", _attend_fake)
    operators._register_fake("field_attention_gradients", _gradients_fake)
    torch.library.register_autograd(
        "shardwright::field_attention", _backward, setup_context=_setup_context, lib=operators
    )
    register_flop_formula(torch.ops.shardwright.field_attention)(lambda packed, *_, **__: 2 * _product_flops(packed))
    register_flop_formula(torch.ops.shardwright.field_attention_gradients)(
        lambda packed, *_, **__: 5 * _product_flops(packed)
    )
    return operators


def _product_flops(packed_shape: Sequence[int]) -> int:
    """Of one product of all heads: scores, or their sums of values."""
    samples, vectors, columns = packed_shape
    return 2 * samples * vectors * vectors * (columns // 3)


OPERATORS = _operators()

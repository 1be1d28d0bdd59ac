"""Causal attention with pointwise weights over jagged sequences, and its gradients.

The weight of position j for position i >= j of a sequence of n positions is SiLU(q_i . k_j + bias[i - j]) / n.
On a CPU a native kernel takes float32. Elsewhere sequences are padded, inside the operator only, to a multiple of BLOCK
positions, in groups of equal padded length.

Shape legend: N positions of all sequences, H heads, K columns of queries and keys, V columns of values, B sequences,
D distances, G sequences of a group, L positions of a padded sequence.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.flop_counter import register_flop_formula

from shardwright.errors import UserError
from shardwright.kernels import native_attention

BLOCK = 8  # positions
MAX_SCORES = 1 << 22  # scores that are held at a time


def jagged_attention(q_NHK: Tensor, k_NHK: Tensor, v_NHV: Tensor, bias_DH: Tensor, lengths_B: Tensor) -> Tensor:
    """(N, H, V): the sum of values by weight; distances of D - 1 and more share a bias."""
    return torch.ops.shardwright.jagged_attention(q_NHK, k_NHK, v_NHV, bias_DH, lengths_B)


class _Group(NamedTuple):
    """Sequences of equal padded length."""

    rows_GL: Tensor  # their positions among all; padded ones are some valid row
    is_valid_GL: Tensor
    lengths_G: Tensor


def _groups(lengths_B: Tensor, num_heads: int) -> Iterator[_Group]:
    lengths = lengths_B.to(torch.int64)
    starts, padded = lengths.cumsum(0) - lengths, (lengths + BLOCK - 1) // BLOCK * BLOCK
    for size in padded.unique().tolist():
        members = (padded == size).nonzero().squeeze(1)
        step = max(1, MAX_SCORES // max(1, num_heads * size * size))
        for part in members.split(step) if size else ():
            place_L = torch.arange(size, device=lengths.device)
            is_valid_GL = place_L < lengths[part, None]
            rows_GL = starts[part, None] + torch.where(is_valid_GL, place_L, 0)
            yield _Group(rows_GL, is_valid_GL, lengths[part])


def _gather(x_NHK: Tensor, group: _Group) -> Tensor:
    """(G, H, L, K), with zeros at padded positions."""
    return (x_NHK[group.rows_GL] * group.is_valid_GL[..., None, None]).transpose(1, 2)


def _scatter(out_NHK: Tensor, values_GHLK: Tensor, group: _Group) -> None:
    out_NHK[group.rows_GL[group.is_valid_GL]] = values_GHLK.transpose(1, 2)[group.is_valid_GL]


def _distances(size: int, num: int, device: torch.device) -> Tensor:
    """(L, L): the distance of key j from query i, at most num - 1; 0 for later keys."""
    place_L = torch.arange(size, device=device)
    return (place_L[:, None] - place_L).clamp(0, num - 1)


def _scores(q_GHLK: Tensor, k_GHLK: Tensor, bias_DH: Tensor, group: _Group) -> tuple[Tensor, Tensor]:
    """(G, H, L, L) scores, and (G, 1, L, L): 1 / n where the key is not later than the query, else 0."""
    size = q_GHLK.shape[2]
    bias_HLL = bias_DH[_distances(size, len(bias_DH), q_GHLK.device)].permute(2, 0, 1)
    share_GLL = torch.ones(size, size, dtype=q_GHLK.dtype, device=q_GHLK.device).tril() / group.lengths_G[:, None, None]
    return q_GHLK @ k_GHLK.mT + bias_HLL, share_GLL[:, None].to(q_GHLK.dtype)


def _forward_op(q_NHK: Tensor, k_NHK: Tensor, v_NHV: Tensor, bias_DH: Tensor, lengths_B: Tensor) -> Tensor:
    _check(q_NHK, k_NHK, v_NHV, bias_DH, lengths_B)
    out_NHV = _forward_fake(q_NHK, k_NHK, v_NHV, bias_DH, lengths_B)
    if native_attention.supports(q_NHK, k_NHK, v_NHV):
        native_attention.silu(q_NHK, k_NHK, v_NHV, bias_DH, lengths_B, out_NHV)
        return out_NHV
    for group in _groups(lengths_B, q_NHK.shape[1]):
        scores, share = _scores(_gather(q_NHK, group), _gather(k_NHK, group), bias_DH, group)
        _scatter(out_NHV, (functional.silu(scores) * share) @ _gather(v_NHV, group), group)
    return out_NHV


def _backward_op(
    q_NHK: Tensor, k_NHK: Tensor, v_NHV: Tensor, bias_DH: Tensor, lengths_B: Tensor, grad_NHV: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _check(q_NHK, k_NHK, v_NHV, bias_DH, lengths_B)
    if native_attention.supports(q_NHK, k_NHK, v_NHV):
        return native_attention.silu_gradients(q_NHK, k_NHK, v_NHV, bias_DH, lengths_B, grad_NHV)
    grads = _backward_fake(q_NHK, k_NHK, v_NHV, bias_DH, lengths_B, grad_NHV)
    grads[3].zero_()
    for group in _groups(lengths_B, q_NHK.shape[1]):
        q_GHLK, k_GHLK, v_GHLV, grad_GHLV = (_gather(x, group) for x in (q_NHK, k_NHK, v_NHV, grad_NHV))
        scores, share = _scores(q_GHLK, k_GHLK, bias_DH, group)
        gate = scores.sigmoid()
        _scatter(grads[2], (scores * gate * share).mT @ grad_GHLV, group)
        score_grads = (grad_GHLV @ v_GHLV.mT) * share * gate * (1 + scores * (1 - gate))
        _scatter(grads[0], score_grads @ k_GHLK, group)
        _scatter(grads[1], score_grads.mT @ q_GHLK, group)
        distances = _distances(scores.shape[2], len(bias_DH), scores.device)
        grads[3].index_add_(0, distances.flatten(), score_grads.sum(0).flatten(1).T)
    return grads


def _check(q_NHK: Tensor, k_NHK: Tensor, v_NHV: Tensor, bias_DH: Tensor, lengths_B: Tensor) -> None:
    if q_NHK.dim() != 3 or k_NHK.shape != q_NHK.shape or v_NHV.dim() != 3 or v_NHV.shape[:2] != q_NHK.shape[:2]:
        shapes = ", ".join(str(tuple(x.shape)) for x in (q_NHK, k_NHK, v_NHV))
        raise UserError(f"queries, keys and values are {shapes}; wanted (N, H, K), (N, H, K) and (N, H, V)")
    if bias_DH.dim() != 2 or not len(bias_DH) or bias_DH.shape[1] != q_NHK.shape[1]:
        raise UserError(f"biases are {tuple(bias_DH.shape)}; wanted (distances, {q_NHK.shape[1]} heads)")
    total = int(lengths_B.sum())
    if lengths_B.dim() != 1 or total != len(q_NHK) or (len(lengths_B) and int(lengths_B.min()) < 0):
        raise UserError(f"lengths of sequences add up to {total}, with {len(q_NHK)} queries; both must agree")


def _forward_fake(q_NHK: Tensor, k_NHK: Tensor, v_NHV: Tensor, bias_DH: Tensor, lengths_B: Tensor) -> Tensor:
    return torch.empty_like(v_NHV, memory_format=torch.contiguous_format)


def _backward_fake(
    q_NHK: Tensor, k_NHK: Tensor, v_NHV: Tensor, bias_DH: Tensor, *_: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    q, k, v, bias = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q_NHK, k_NHK, v_NHV, bias_DH))
    return q, k, v, bias


def _setup_context(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx, grad_NHV: Tensor):
    return *torch.ops.shardwright.jagged_attention_gradients(*ctx.saved_tensors, grad_NHV), None


def _operators() -> torch.library.Library:
    operators = torch.library.Library("shardwright", "FRAGMENT")
    inputs = "Tensor q, Tensor k, Tensor v, Tensor bias, Tensor lengths"
    operators.define(f"jagged_attention({inputs}) -> Tensor")
    operators.define(f"jagged_attention_gradients({inputs}, Tensor grad) -> (Tensor, Tensor, Tensor, Tensor)")
    for device in ("CPU", "CUDA"):
        operators.impl("jagged_attention", _forward_op, device)
        operators.impl("jagged_attention_gradients", _backward_op, device)
    operators._register_fake("jagged_attention", _forward_fake)
    operators._register_fake("jagged_attention_gradients", _backward_fake)
    torch.library.register_autograd(
        "shardwright::jagged_attention", _backward, setup_context=_setup_context, lib=operators
    )
    register_flop_formula(torch.ops.shardwright.jagged_attention)(
        lambda q, k, v, bias, lengths, **_: _num_pairs(q, lengths) * 2 * (q[2] + v[2])
    )
    register_flop_formula(torch.ops.shardwright.jagged_attention_gradients)(
        lambda q, k, v, bias, lengths, grad, **_: _num_pairs(q, lengths) * 2 * (3 * q[2] + 2 * v[2])
    )
    return operators


def _num_pairs(q_shape: Sequence[int], lengths_shape: Sequence[int]) -> int:
    """Scores over all heads if all sequences were equally long; a trace has no lengths."""
    return q_shape[0] * q_shape[1] * q_shape[0] // max(1, lengths_shape[0])


OPERATORS = _operators()

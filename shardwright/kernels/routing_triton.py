"""Sums of each token's rows, and their gradients, on GPUs; each number is read and written once.

Shape legend: N tokens, K choices of a token, R rows, H channels.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_COLUMNS = 1024  # channels that a program holds at a time


@triton.jit
def sum_choices_kernel(
    rows, positions, weights, out, H, K: tl.constexpr, WEIGHTED: tl.constexpr, A: tl.constexpr, COLUMNS: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([COLUMNS], A)
    for k in tl.static_range(K):
        position = tl.load(positions + token * K + k)
        row = tl.load(rows + position * H + columns, mask=(columns < H) & (position >= 0), other=0.0).to(A)
        if WEIGHTED:
            row = row * tl.load(weights + token * K + k).to(A)
        total += row
    tl.store(out + token * H + columns, total.to(out.dtype.element_ty), mask=columns < H)


@triton.jit
def sum_choices_gradient_kernel(
    gradient,
    rows,
    positions,
    weights,
    of_rows,
    of_weights,
    H,
    K: tl.constexpr,
    A: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    for k in tl.static_range(K):
        position = tl.load(positions + token * K + k)
        weight = tl.load(weights + token * K + k).to(A)
        products = tl.zeros([COLUMNS], A)
        for start in range(0, H, COLUMNS):
            columns = start + tl.arange(0, COLUMNS)
            has = (columns < H) & (position >= 0)
            grad = tl.load(gradient + token * H + columns, mask=has, other=0.0).to(A)
            products += grad * tl.load(rows + position * H + columns, mask=has, other=0.0).to(A)
            tl.store(of_rows + position * H + columns, (weight * grad).to(of_rows.dtype.element_ty), mask=has)
        tl.store(of_weights + token * K + k, tl.sum(products, 0).to(of_weights.dtype.element_ty))


def sum_choices(rows_RH: Tensor, positions_NK: Tensor, weights_NK: Tensor | None) -> Tensor:
    """(N, H): the sum of each token's rows, times their weights; a position below 0 is no row."""
    rows_RH, (num, chosen), channels = rows_RH.contiguous(), positions_NK.shape, rows_RH.shape[1]
    out_NH = rows_RH.new_empty(num, channels)
    columns = min(MAX_COLUMNS, triton.next_power_of_2(channels))
    if num and channels:
        sum_choices_kernel[(num, triton.cdiv(channels, columns))](
            rows_RH,
            positions_NK.contiguous(),
            rows_RH if weights_NK is None else weights_NK.contiguous(),
            out_NH,
            channels,
            K=chosen,
            WEIGHTED=weights_NK is not None,
            A=_sum_dtype(rows_RH),
            COLUMNS=columns,
        )
    return out_NH


def sum_choices_gradient(
    gradient_NH: Tensor, rows_RH: Tensor, positions_NK: Tensor, weights_NK: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradients of the rows, each of which is one token's, and of the weights."""
    (num, chosen), channels = positions_NK.shape, rows_RH.shape[1]
    of_rows, of_weights = torch.empty_like(rows_RH), torch.empty_like(weights_NK)
    sum_choices_gradient_kernel[(num,)](
        gradient_NH.contiguous(),
        rows_RH,
        positions_NK,
        weights_NK,
        of_rows,
        of_weights,
        channels,
        K=chosen,
        A=_sum_dtype(rows_RH),
        COLUMNS=min(MAX_COLUMNS, triton.next_power_of_2(channels)),
    )
    return of_rows, of_weights


def _sum_dtype(x: Tensor) -> tl.dtype:
    return tl.float64 if x.dtype is torch.float64 else tl.float32

"""One step of Adam on all dense parameters of an optimizer in one pass: weights, and moments as they are kept."""

from collections.abc import Sequence
from functools import cache, partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from shardwright.errors import UserError
from shardwright.kernels import reference
from shardwright.kernels.reference import AdamCoefficients
from shardwright.kernels.rounding import step_key
from shardwright.library import native_library

DTYPE_PAIRS = ((torch.float64, torch.float64), (torch.float32, torch.float32), (torch.float32, torch.bfloat16))


class AdamParameter(NamedTuple):
    """A parameter that takes a step, or a piece of one; `place` is that of its first number among all there are."""

    weight: Tensor
    gradient: Tensor
    mean: Tensor
    square: Tensor
    step: int  # from 1
    offset: int
    coefficients: AdamCoefficients


def fused_adam(parameters: Sequence[AdamParameter], key: int) -> None:
    """Their weights and moments; `key` is that of stochastic rounding."""
    for one in parameters:
        _check(one)
    native = native_library() if all(one.weight.device.type == "cpu" for one in parameters) else None
    if native is None:
        for one in parameters:
            weight, gradient, *moments = (x.view(-1) for x in (one.weight, one.gradient, one.mean, one.square))
            reference.adam_update(weight, gradient, moments, one.coefficients, (step_key(key, one.step), one.offset))
        return
    start = cache(partial(step_key, key))
    pieces = np.array([_piece(one, start(one.step)) for one in parameters], dtype=np.int64)
    numbers = np.array([one.coefficients for one in parameters], dtype=np.float64)
    native.shardwright_adam(pieces.ctypes.data, numbers.ctypes.data, len(parameters))


def _piece(one: AdamParameter, start: int) -> tuple[int, ...]:
    """The struct of csrc/adam.h."""
    weight, mean = one.weight, one.mean
    pointers = weight.data_ptr(), one.gradient.data_ptr(), mean.data_ptr(), one.square.data_ptr()
    kind = DTYPE_PAIRS.index((weight.dtype, mean.dtype))
    return (*pointers, weight.numel(), one.offset, kind, start)


def _check(one: AdamParameter) -> None:
    weight, gradient, mean, square = one.weight, one.gradient, one.mean, one.square
    dtypes, shape = (weight.dtype, mean.dtype), weight.shape
    if dtypes not in DTYPE_PAIRS or (gradient.dtype, square.dtype) != dtypes:
        raise UserError(
            f"a parameter {tuple(shape)} is of {dtypes[0]} with moments of {dtypes[1]}; no kernel steps that"
        )
    whole = weight.is_contiguous() and gradient.is_contiguous() and mean.is_contiguous() and square.is_contiguous()
    if not whole or not gradient.shape == mean.shape == square.shape == shape:
        raise UserError(f"a parameter {tuple(shape)} with strides {weight.stride()}: its numbers must lie in one piece")

"""Fused Adam: one step of all dense parameters of an optimizer, in one native call on the CPU.

DTYPE_PAIRS: the dtypes of a weight and of its moments that the kernels support.
"""

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
    """A dense parameter, or a shard of one, that takes an Adam step.

    `offset` is the position of its first number among all numbers of the optimizer: stochastic rounding depends on it.
    """

    weight: Tensor
    gradient: Tensor
    mean: Tensor
    square: Tensor
    step: int  # from 1
    offset: int
    coefficients: AdamCoefficients


def fused_adam(parameters: Sequence[AdamParameter], key: int) -> None:
    """Update weights and moments in place; `key` seeds the stochastic rounding of bfloat16 moments.

    Without the compiled library, or for tensors on a GPU, kernels/reference.py updates one parameter at a time.
    """
    for p in parameters:
        _check_parameter(p)
    native = native_library() if all(p.weight.device.type == "cpu" for p in parameters) else None
    if native is None:
        for p in parameters:
            weight, gradient, *moments = (x.view(-1) for x in (p.weight, p.gradient, p.mean, p.square))
            reference.adam_update(weight, gradient, moments, p.coefficients, (step_key(key, p.step), p.offset))
        return
    cached_step_key = cache(partial(step_key, key))
    structs = np.array([_parameter_struct(p, cached_step_key(p.step)) for p in parameters], dtype=np.int64)
    coefficients = np.array([p.coefficients for p in parameters], dtype=np.float64)
    native.shardwright_adam(structs.ctypes.data, coefficients.ctypes.data, len(parameters))


def _parameter_struct(p: AdamParameter, random_key: int) -> tuple[int, ...]:
    """The parameter as the struct of csrc/adam.h."""
    weight, mean = p.weight, p.mean
    pointers = weight.data_ptr(), p.gradient.data_ptr(), mean.data_ptr(), p.square.data_ptr()
    kind = DTYPE_PAIRS.index((weight.dtype, mean.dtype))
    return (*pointers, weight.numel(), p.offset, kind, random_key)


def _check_parameter(p: AdamParameter) -> None:
    weight, gradient, mean, square = p.weight, p.gradient, p.mean, p.square
    dtypes, shape = (weight.dtype, mean.dtype), weight.shape
    if dtypes not in DTYPE_PAIRS or (gradient.dtype, square.dtype) != dtypes:
        raise UserError(
            f"a parameter of shape {tuple(shape)} is {dtypes[0]} with moments in {dtypes[1]}; allowed: {DTYPE_PAIRS}"
        )
    contiguous = weight.is_contiguous() and gradient.is_contiguous() and mean.is_contiguous() and square.is_contiguous()
    if not contiguous or not gradient.shape == mean.shape == square.shape == shape:
        raise UserError(
            f"a parameter of shape {tuple(shape)} with strides {weight.stride()}; wanted contiguous tensors, of one "
            "shape with gradient and moments"
        )

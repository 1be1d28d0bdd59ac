"""One step of Adam on all dense parameters of an optimizer in one pass: weights, and moments as they are kept."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from shardwright.errors import UserError
from shardwright.kernels import reference
from shardwright.kernels.library import library
from shardwright.kernels.reference import AdamNumbers
from shardwright.kernels.rounding import start_of_keys

KINDS = ((torch.float64, torch.float64), (torch.float32, torch.float32), (torch.float32, torch.bfloat16))


@dataclass(frozen=True, slots=True)
class Stepped:
    """A parameter that takes a step, or a piece of one; `place` is that of its first number among all there are."""

    weight: Tensor
    gradient: Tensor
    mean: Tensor
    square: Tensor
    step: int  # from 1
    place: int
    numbers: AdamNumbers


def step(parameters: Sequence[Stepped], key: int) -> None:
    """Their weights and moments; `key` is that of stochastic rounding."""
    for one in parameters:
        _check(one)
    native = library() if all(one.weight.device.type == "cpu" for one in parameters) else None
    if native is None:
        for one in parameters:
            flat = [tensor.view(-1) for tensor in (one.weight, one.gradient, one.mean, one.square)]
            reference.adam(*flat[:2], flat[2:], one.numbers, (start_of_keys(key, one.step), one.place))
        return
    pieces = np.array([_piece(one, key) for one in parameters], dtype=np.int64)
    numbers = np.array([one.numbers for one in parameters], dtype=np.float64)
    native.shardwright_adam(pieces.ctypes.data, numbers.ctypes.data, len(parameters))


def _piece(one: Stepped, key: int) -> tuple[int, ...]:
    """The struct of csrc/adam.h."""
    pointers = (tensor.data_ptr() for tensor in (one.weight, one.gradient, one.mean, one.square))
    kind = KINDS.index((one.weight.dtype, one.mean.dtype))
    return (*pointers, one.weight.numel(), one.place, kind, start_of_keys(key, one.step))


def _check(one: Stepped) -> None:
    tensors = (one.weight, one.gradient, one.mean, one.square)
    shape, dtypes = tuple(one.weight.shape), (one.weight.dtype, one.mean.dtype)
    if dtypes not in KINDS or one.gradient.dtype != dtypes[0] or one.square.dtype != dtypes[1]:
        raise UserError(f"a parameter {shape} is of {dtypes[0]} with moments of {dtypes[1]}; no kernel steps that")
    if any(tensor.shape != one.weight.shape or not tensor.is_contiguous() for tensor in tensors):
        raise UserError(f"a parameter {shape} with strides {one.weight.stride()}: its numbers must lie in one piece")

"""Codecs that compress vectors and gradients for an exchange, with a known error bound.

A codec encodes rows before they are sent and decodes the received ones. `error_bound` gives the largest error of each
number.

Shape legend: N rows, D columns; the encoded `wire` has N rows, too.
"""

from typing import Protocol

import torch
from torch import Tensor


class Codec(Protocol):
    def encode(self, x_ND: Tensor) -> Tensor: ...

    def decode(self, wire: Tensor, dtype: torch.dtype) -> Tensor: ...

    def error_bound(self, x_ND: Tensor) -> Tensor: ...


class Plain:
    """Send rows unchanged."""

    def encode(self, x_ND: Tensor) -> Tensor:
        return x_ND

    def decode(self, wire: Tensor, dtype: torch.dtype) -> Tensor:
        return wire

    def error_bound(self, x_ND: Tensor) -> Tensor:
        return torch.zeros_like(x_ND)


class Fp16:
    """Half the bytes of float32; larger magnitudes than the largest half are clamped to it."""

    LARGEST = 65_504.0

    def encode(self, x_ND: Tensor) -> Tensor:
        return x_ND.half().clamp_(-self.LARGEST, self.LARGEST)

    def decode(self, wire: Tensor, dtype: torch.dtype) -> Tensor:
        return wire.to(dtype)

    def error_bound(self, x_ND: Tensor) -> Tensor:
        return (x_ND.abs() * 2**-11).clamp(min=2**-25) + (x_ND.abs() - self.LARGEST).clamp(min=0)


class Bf16:
    """Half the bytes of float32, with its range; two to three significant digits."""

    def encode(self, x_ND: Tensor) -> Tensor:
        return x_ND.bfloat16()

    def decode(self, wire: Tensor, dtype: torch.dtype) -> Tensor:
        return wire.to(dtype)

    def error_bound(self, x_ND: Tensor) -> Tensor:
        return (x_ND.abs() * 2**-8).clamp(min=2**-134)


class Int8:
    """One byte per number and a float32 scale per row: the row's largest magnitude becomes 127."""

    def encode(self, x_ND: Tensor) -> Tensor:
        x_ND = x_ND.float()
        scale_N = x_ND.abs().amax(1) / 127 if x_ND.shape[1] else x_ND.new_zeros(len(x_ND))
        steps_ND = x_ND / torch.where(scale_N > 0, scale_N, 1).unsqueeze(1)
        bytes_ND = steps_ND.round().clamp(-127, 127).to(torch.int8)
        return torch.cat([bytes_ND, scale_N.unsqueeze(1).contiguous().view(torch.int8)], 1)

    def decode(self, wire: Tensor, dtype: torch.dtype) -> Tensor:
        scale_N1 = wire.new_empty(len(wire), 4).copy_(wire[:, -4:]).view(torch.float32)
        return (wire[:, :-4].float() * scale_N1).to(dtype)

    def error_bound(self, x_ND: Tensor) -> Tensor:
        return (x_ND.abs().amax(1, keepdim=True) / 127 * 0.5001 + 2**-141).expand_as(x_ND)

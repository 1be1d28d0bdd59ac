"""How vectors travel: as they are, or in fewer bytes with an error that is known.

A codec turns rows into the rows that are sent and back. Its error is bounded per number: `bound` of the row it is in.
"""

from typing import Protocol

import torch
from torch import Tensor


class Codec(Protocol):
    def encode(self, x_ND: Tensor) -> Tensor: ...

    def decode(self, wire: Tensor, dtype: torch.dtype) -> Tensor: ...

    def error_bound(self, x_ND: Tensor) -> Tensor: ...


class Plain:
    """Bit for bit."""

    def encode(self, x_ND: Tensor) -> Tensor:
        return x_ND

    def decode(self, wire: Tensor, dtype: torch.dtype) -> Tensor:
        return wire

    def error_bound(self, x_ND: Tensor) -> Tensor:
        return torch.zeros_like(x_ND)


class Fp16:
    """Half the bytes of float32; what is beyond the largest half becomes it."""

    LARGEST = 65_504.0

    def encode(self, x_ND: Tensor) -> Tensor:
        return x_ND.half().clamp_(-self.LARGEST, self.LARGEST)

    def decode(self, wire: Tensor, dtype: torch.dtype) -> Tensor:
        return wire.to(dtype)

    def error_bound(self, x_ND: Tensor) -> Tensor:
        return (x_ND.abs() * 2**-11).clamp(min=2**-25) + (x_ND.abs() - self.LARGEST).clamp(min=0)


class Bf16:
    """Half the bytes of float32, with its range; two to three digits."""

    def encode(self, x_ND: Tensor) -> Tensor:
        return x_ND.bfloat16()

    def decode(self, wire: Tensor, dtype: torch.dtype) -> Tensor:
        return wire.to(dtype)

    def error_bound(self, x_ND: Tensor) -> Tensor:
        return (x_ND.abs() * 2**-8).clamp(min=2**-134)


class Int8:
    """A byte each and a float32 scale per row: the row's largest number becomes 127."""

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

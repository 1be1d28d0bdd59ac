"""Stochastic rounding to 16 bits: up with the probability of the fraction cut off: the mean is exact.

The random bits are a function of (key, step, row, column) alone; for a dense optimizer's moments, of (key, step,
position among all its numbers). They do not depend on order, device or number of threads. The compiled kernels do the
same arithmetic (csrc/vectors.h, csrc/adam_kernels.cpp). Unsigned integers of 32 and 64 bits are stored as int64.

Shape legend: U distinct rows, D columns, N numbers.
"""

import hashlib

import torch
from torch import Tensor

_GAMMA = 0x9E3779B97F4A7C15
_LOW = 0xFFFFFFFF  # mask of the low 32 bits
_TILE = 1 << 14  # positions that share a key
_CHUNK_ROWS = 1 << 16


def derive_seed(name: str) -> int:
    """A 63-bit seed that depends only on torch's seed and `name`."""
    digest = hashlib.sha256(f"{torch.initial_seed()}/{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def step_key(key: int, step: int) -> int:
    """The key from which the random bits of a step are derived, as a signed 64-bit integer."""
    return _to_signed64(key + step * _GAMMA)


def row_keys(key: int, step: int, rows_U: Tensor) -> Tensor:
    """(U,) 32 random bits for each of the rows that this step changes."""
    start = torch.tensor(step_key(key, step), device=rows_U.device)
    return splitmix64(splitmix64(start) + rows_U) & _LOW


def stochastic_round(values_UD: Tensor, dtype: torch.dtype, keys_U: Tensor) -> Tensor:
    """Convert to `dtype`: stochastic rounding for 16 bits, a cast otherwise; `keys_U` from `row_keys`.

    Finite values stay finite: they are clamped to the largest number of the 16-bit dtype.
    """
    if dtype not in (torch.float16, torch.bfloat16):
        return values_UD.to(dtype)
    random_UD = _random16(keys_U, values_UD.shape[1])
    x = values_UD.float().contiguous().view(torch.int32).long() & _LOW
    bits = _bf16_bits(x, random_UD) if dtype == torch.bfloat16 else _fp16_bits(x, random_UD & 0x1FFF)
    return _to_signed16(bits).to(torch.int16).view(dtype)


def copy_finite(into: Tensor, values: Tensor) -> None:
    """Copy to another dtype, round to nearest and clamp finite values to its range; in chunks of rows."""
    floats = values.is_floating_point() and into.is_floating_point() and not values.is_meta
    if not floats or torch.finfo(values.dtype).max <= torch.finfo(into.dtype).max:
        into.copy_(values)
        return
    largest = torch.finfo(into.dtype).max
    into, values = torch.atleast_1d(into), torch.atleast_1d(values)
    for target, source in zip(into.split(_CHUNK_ROWS), values.split(_CHUNK_ROWS), strict=True):
        target.copy_(torch.where(source.isfinite(), source.clamp(-largest, largest), source))


def random_bits(step_key: int, positions_N: Tensor) -> Tensor:
    """(N,) 32 random bits for the numbers at `positions_N`; `step_key` is the result of `step_key()`."""
    keys_N = splitmix64(splitmix64(torch.tensor(step_key, device=positions_N.device)) + positions_N // _TILE) & _LOW
    return _hash32((positions_N % _TILE * 0x9E3779B9 & _LOW) ^ keys_N)


def stochastic_round_bf16(values: Tensor, bits: Tensor) -> Tensor:
    """Round values to bfloat16 with 16 random bits for each."""
    x = values.float().contiguous().view(torch.int32).long() & _LOW
    return _to_signed16(_bf16_bits(x, bits)).to(torch.int16).view(torch.bfloat16)


def _bf16_bits(x: Tensor, random: Tensor) -> Tensor:
    magnitude = x & 0x7FFFFFFF
    special = (x >> 16) | torch.where(magnitude > 0x7F800000, 0x40, 0)
    carried = (magnitude + random).clamp(max=0x7F7FFFFF) | x & 0x80000000
    return torch.where(magnitude < 0x7F800000, carried >> 16, special)


def _fp16_bits(x: Tensor, random: Tensor) -> Tensor:
    magnitude = x & 0x7FFFFFFF
    carried = magnitude + random
    normal = torch.where(carried < 0x47800000, (carried - 0x38000000) >> 13, 0x7BFF)
    small = torch.where(magnitude < 0x38800000, magnitude, 0).to(torch.int32).view(torch.float32)
    subnormal = (small * 2.0**24 + random * 2.0**-13).long()  # below 2^-14, neighboring values differ by 2^-24
    bits = torch.where(magnitude < 0x38800000, subnormal, normal)
    bits = torch.where(magnitude < 0x7F800000, bits, torch.where(magnitude > 0x7F800000, 0x7E00, 0x7C00))
    return bits | (x >> 16 & 0x8000)


def _random16(keys_U: Tensor, columns: int) -> Tensor:
    """(U, columns) 16 random bits each: of 16 columns, c and c + 8 share a hash (low and high half)."""
    column = torch.arange(columns, device=keys_U.device)
    counter = column // 16 * 8 + column % 8
    x = _hash32((counter * 0x9E3779B9 & _LOW) ^ keys_U.unsqueeze(1))
    return torch.where(column % 16 < 8, x & 0xFFFF, x >> 16)


def _hash32(x: Tensor) -> Tensor:
    x = (x ^ x >> 16) * 0x7FEB352D & _LOW
    x = (x ^ x >> 15) * 0x846CA68B & _LOW
    return x ^ x >> 16


def splitmix64(x: Tensor) -> Tensor:
    """The output function of splitmix64."""
    x = (x ^ _shift_right(x, 30)) * _to_signed64(0xBF58476D1CE4E5B9)
    x = (x ^ _shift_right(x, 27)) * _to_signed64(0x94D049BB133111EB)
    return x ^ _shift_right(x, 31)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical shift to the right: brings in zeros."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _to_signed64(x: int) -> int:
    return (x + 2**63) % 2**64 - 2**63


def _to_signed16(bits: Tensor) -> Tensor:
    return bits - ((bits & 0x8000) << 1)

"""The optimizers of embedding tables as Triton functions, with the formulas of csrc/optimizers.h.

Each takes the summed gradients of some rows, a mask `has` of the rows and `keep` of the cells that exist, and pointers
to their state.
"""

import triton
import triton.language as tl

# Indices of the settings, which are in the vectors' dtype.
LR, EPS, BETA1, BETA2, ONE_MINUS_BETA1, ONE_MINUS_BETA2, MOMENTUM, DECAY, CLIP = map(tl.constexpr, range(9))


@triton.jit
def divide(a, b, A: tl.constexpr):
    if A == tl.float32:
        return tl.div_rn(a, b)
    else:
        return a / b


@triton.jit
def sqrt(a, A: tl.constexpr):
    if A == tl.float32:
        return tl.sqrt_rn(a)
    else:
        return tl.sqrt(a)


@triton.jit
def clip_gradient(grad, settings, CLIPPED: tl.constexpr, A: tl.constexpr):
    if CLIPPED:
        norm = sqrt(tl.sum(grad * grad, 1), A)
        clip = tl.zeros_like(norm) + tl.load(settings + CLIP)
        grad = grad * divide(clip, tl.maximum(norm, clip), A)[:, None]
    return grad


@triton.jit
def apply_momentum(grad, cells, keep, settings, HAS_MOMENTUM: tl.constexpr):
    if HAS_MOMENTUM:
        grad += tl.load(settings + MOMENTUM) * tl.load(cells, mask=keep, other=0.0)
        tl.store(cells, grad, mask=keep)
    return grad


@triton.jit
def adagrad(grad, state, row, cell, has, keep, dim, settings, ROWWISE: tl.constexpr, A: tl.constexpr):
    if ROWWISE:
        square = tl.load(state + row, mask=has, other=1.0) + divide(tl.sum(grad * grad, 1), dim.to(A), A)
        tl.store(state + row, square, mask=has)
        square = square[:, None]
    else:
        square = tl.load(state[:, None] + cell, mask=keep, other=1.0) + grad * grad
        tl.store(state[:, None] + cell, square, mask=keep)
    return divide(grad, tl.broadcast_to(sqrt(square, A) + tl.load(settings + EPS), grad.shape), A)


@triton.jit
def apply_trust_ratio(weight, change, keep, A: tl.constexpr):
    """LAMB: scale each row of the change to the norm of the row of weights."""
    weight_norm = sqrt(tl.sum(weight * weight, 1), A)
    change_norm = sqrt(tl.sum(tl.where(keep, change * change, 0.0), 1), A)
    is_nonzero = (weight_norm > 0) & (change_norm > 0)
    return change * tl.where(is_nonzero, divide(weight_norm, tl.where(is_nonzero, change_norm, 1.0), A), 1.0)[:, None]


@triton.jit
def adam(
    grad, state, state_2, row, cell, has, keep, dim, settings, corrections, ROWWISE: tl.constexpr, A: tl.constexpr
):
    """Adam's bias-corrected mean over root of bias-corrected square; ROWWISE has one square per row."""
    correct = tl.load(corrections, mask=has, other=1.0)[:, None]
    correct_2 = tl.load(corrections + 1, mask=has, other=1.0)
    mean = tl.load(settings + BETA1) * tl.load(state[:, None] + cell, mask=keep, other=0.0)
    mean += tl.load(settings + ONE_MINUS_BETA1) * grad
    tl.store(state[:, None] + cell, mean, mask=keep)
    if ROWWISE:
        square = tl.load(settings + BETA2) * tl.load(state_2 + row, mask=has, other=0.0)
        square += tl.load(settings + ONE_MINUS_BETA2) * divide(tl.sum(grad * grad, 1), dim.to(A), A)
        tl.store(state_2 + row, square, mask=has)
        scale = sqrt(divide(square, correct_2, A), A)[:, None]
    else:
        square = tl.load(settings + BETA2) * tl.load(state_2[:, None] + cell, mask=keep, other=0.0)
        square += tl.load(settings + ONE_MINUS_BETA2) * (grad * grad)
        tl.store(state_2[:, None] + cell, square, mask=keep)
        scale = sqrt(divide(square, tl.broadcast_to(correct_2[:, None], grad.shape), A), A)
    mean = divide(mean, tl.broadcast_to(correct, grad.shape), A)
    return divide(mean, tl.broadcast_to(scale + tl.load(settings + EPS), grad.shape), A)


@triton.jit
def _splitmix64(x):
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def row_key(start, row):
    return _splitmix64(_splitmix64(start.to(tl.uint64, bitcast=True)) + row.to(tl.uint64)).to(tl.uint32)


@triton.jit
def _random16(key, column):
    counter = (column // 16 * 8 + column % 8).to(tl.uint32)
    x = (counter * 0x9E3779B9)[None, :] ^ key[:, None]
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    x = x ^ (x >> 16)
    return tl.where((column % 16 < 8)[None, :], x & 0xFFFF, x >> 16)


@triton.jit
def stochastic_round(value, key, column, W: tl.constexpr):
    """Stochastic rounding with the same arithmetic as kernels/rounding.py."""
    if W == tl.bfloat16:
        x = value.to(tl.uint32, bitcast=True)
        magnitude = x & 0x7FFFFFFF
        special = (x >> 16) | tl.where(magnitude > 0x7F800000, 0x40, 0).to(tl.uint32)
        carried = tl.minimum(magnitude + _random16(key, column), 0x7F7FFFFF) | (x & 0x80000000)
        bits = tl.where(magnitude < 0x7F800000, carried >> 16, special)
        return bits.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    elif W == tl.float16:
        x = value.to(tl.uint32, bitcast=True)
        magnitude = x & 0x7FFFFFFF
        random = _random16(key, column) & 0x1FFF
        carried = magnitude + random
        normal = tl.where(carried < 0x47800000, (carried - 0x38000000) >> 13, 0x7BFF)
        small = tl.where(magnitude < 0x38800000, magnitude, 0).to(tl.float32, bitcast=True)
        steps = small * 16777216.0 + random.to(tl.float32) * 0.0001220703125
        bits = tl.where(magnitude < 0x38800000, steps.to(tl.uint32), normal)
        bits = tl.where(magnitude < 0x7F800000, bits, tl.where(magnitude > 0x7F800000, 0x7E00, 0x7C00).to(tl.uint32))
        return (bits | ((x >> 16) & 0x8000)).to(tl.uint16).to(tl.float16, bitcast=True)
    else:
        return value

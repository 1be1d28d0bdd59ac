"""Measure what a transformer's layers need: matrix products of their shapes, and fused attention, in bfloat16."""

from collections.abc import Callable, Iterator
from itertools import product as product_of

import torch
from torch.nn import functional

from shardwright.errors import UserError
from shardwright.measure.device import fit_price, has_fast_bf16_matmul, matmul_call
from shardwright.measure.timing import Clock
from shardwright.spec.cluster import Price

DTYPE = torch.bfloat16
WIDTHS = {"cuda": (1024, 4096, 8192, 16_384), "cpu": (256, 1024, 4096)}  # channels of a layer, or of a rank's part
TOKENS = {"cuda": (2048, 8192, 32_768), "cpu": (256, 1024)}  # of a micro-batch on a rank
LENGTHS = {"cuda": (2048, 8192, 32_768), "cpu": (256, 1024)}
HEADS, HEAD_CHANNELS = {"cuda": 16, "cpu": 4}, 128


def measure_layer_prices(clock: Clock, device: torch.device) -> list[Price]:
    """Prices "matmul" and "attention"; a product of attention is (heads x length, channels, length), under the causal
    mask as many multiplications as the two products of a forward need."""
    if not has_fast_bf16_matmul():
        raise UserError("this machine multiplies bfloat16 slowly, and plans of layers are for bfloat16: measure a GPU")
    products = [clock.sample(sizes, matmul_call(*sizes, DTYPE, device)) for sizes in product_shapes(device.type)]
    attention = [clock.sample(sizes, call) for sizes, call in _attention_calls(device)]
    return [fit_price("matmul", "bfloat16", products), fit_price("attention", "bfloat16", attention)]


def product_shapes(kind: str) -> list[tuple[int, int, int]]:
    """Of layers' forward, and of the gradients of their weights, which sum over tokens."""
    sizes = [(tokens, k, n) for tokens, k, n in product_of(TOKENS[kind], WIDTHS[kind], WIDTHS[kind])]
    return [*sizes, *((k, tokens, n) for tokens, k, n in sizes if tokens == TOKENS[kind][-1])]


def _attention_calls(device: torch.device) -> Iterator[tuple[tuple[int, int, int], Callable[[], object]]]:
    heads = HEADS[device.type]
    for length in LENGTHS[device.type]:
        queries, keys, values = (
            torch.randn(1, heads, length, HEAD_CHANNELS, dtype=DTYPE, device=device).requires_grad_() for _ in range(3)
        )
        yield (heads * length, HEAD_CHANNELS, length), _forward_and_backward(queries, keys, values)


def _forward_and_backward(*inputs: torch.Tensor) -> Callable[[], object]:
    def call() -> None:
        outputs = functional.scaled_dot_product_attention(*inputs, is_causal=True)
        torch.autograd.grad(outputs, inputs, outputs)

    return call

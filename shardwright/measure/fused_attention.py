"""Attention on meta tensors as the fused kernel that devices run.

The meta device computes `scaled_dot_product_attention` in parts, whose scores would count as saved for backward. The
fused kernel saves its inputs, its output and a number per query, and computes the scores again in backward. CPUs run
it for inputs of four dimensions without dropout; elsewhere, and in what a model writes itself, scores are kept.

Shape legend: B batch, H heads, L queries, S keys, E channels of a head.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.flop_counter import sdpa_backward_flop_count, sdpa_flop_count

aten = torch.ops.aten
FORWARD = "_scaled_dot_product_flash_attention_for_cpu"
BACKWARD = "_scaled_dot_product_flash_attention_for_cpu_backward"
# By the operands' shapes, as PyTorch counts its other fused kernels.
FLOP_FORMULAS = MappingProxyType[Any, Callable[..., int]](
    {
        getattr(aten, FORWARD): lambda query, key, value, *_, **__: sdpa_flop_count(query, key, value),
        getattr(aten, BACKWARD): lambda *shapes, **_: sdpa_backward_flop_count(*shapes[:4]),
    }
)


@contextmanager
def traced_as_fused() -> Iterator[None]:
    """Attention on meta tensors calls the fused kernel where it takes the inputs.

    A TorchFunctionMode would not see the call inside of `nn.MultiheadAttention`.
    """
    chosen = functional.scaled_dot_product_attention
    functional.scaled_dot_product_attention = partial(_attend, chosen)
    try:
        yield
    finally:
        functional.scaled_dot_product_attention = chosen


def products_of(name: str, args: tuple[Any, ...]) -> Iterator[tuple[int, int, int, int]]:
    """The products of a call of the kernel, as (m, k, n, how many): two forward, five backward."""
    query_BHLE, key_BHSE = args[:2] if name == FORWARD else args[1:3]
    num, (queries, channels), keys = query_BHLE.shape[:2].numel(), query_BHLE.shape[2:], key_BHSE.shape[2]
    scores, mixed = (queries, channels, keys, num), (queries, keys, channels, num)
    yield from (scores, mixed)
    if name == BACKWARD:  # gradients of scores, of queries, and of keys and values
        yield scores
        yield from ((keys, queries, channels, num),) * 2


def _attend(
    chosen: Callable[..., Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> Tensor:
    """Attention by the fused kernel, if it takes these inputs; otherwise by `chosen`, PyTorch's own function."""
    inputs = (query, key, value)
    is_fused = (
        all(x.is_meta and x.dim() == 4 and x.shape[3] == query.shape[3] for x in inputs)
        and all(x.shape[:2] == query.shape[:2] for x in inputs)
        and not dropout_p
        and (attn_mask is None or not attn_mask.requires_grad)
    )
    if not is_fused:
        return chosen(*inputs, attn_mask, dropout_p, is_causal, **options)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.empty_like(attn_mask, dtype=query.dtype).masked_fill_(~attn_mask, -torch.inf)
    kernel = getattr(aten, FORWARD)
    return kernel(*inputs, dropout_p, is_causal, attn_mask=attn_mask, scale=options.get("scale"))[0]

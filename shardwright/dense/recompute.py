"""Blocks that run again in their backward pass, in place of keeping what they computed.

Of a recomputed block only what it was called with is kept; with `kept="products"` also what its matrix products gave,
so that none of them runs twice. It stops as soon as all that is needed is there again. Random numbers and autocast are
as they were the first time.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from shardwright.spec.plan import KEPT_PRODUCTS, Kept, Recompute

PRODUCTS = frozenset(getattr(torch.ops.aten, name) for name in KEPT_PRODUCTS)


class Recomputed(nn.Module):
    """In the place of a block: called like it, with its parameters, buffers and children under their own names."""

    def __init__(self, block: nn.Module, kept: Kept = "nothing") -> None:
        super().__init__()
        object.__setattr__(self, "block", block)
        self._parameters, self._buffers, self._modules = block._parameters, block._buffers, block._modules
        self._non_persistent_buffers_set = block._non_persistent_buffers_set
        self.training = block.training
        self._how: dict[str, Any] = {"use_reentrant": False}
        if kept == "products":
            self._how["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.block(*args, **kwargs)
        return checkpoint(self.block, *args, **self._how, **kwargs)

    def train(self, mode: bool = True) -> "Recomputed":
        self.block.train(mode)
        return super().train(mode)

    def __getattr__(self, name: str) -> Any:
        if name == "block":
            raise AttributeError(name)
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.block, name)

    def extra_repr(self) -> str:
        return f"of {type(self.block).__name__}"


def recompute(model: nn.Module, which: Sequence[Recompute]) -> None:
    """Put each of these blocks into such a frame."""
    for name, kept in which:
        above, _, own = name.rpartition(".")
        parent = model.get_submodule(above)
        parent._modules[own] = Recomputed(model.get_submodule(name), kept)


def _policy(_: Any, op: Any, *__: Any, **___: Any) -> CheckpointPolicy:
    keep = getattr(op, "overloadpacket", None) in PRODUCTS
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

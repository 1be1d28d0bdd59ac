"""Blocks that run again in their backward pass, in place of keeping what they computed.

Of a recomputed block only what it was called with is kept; with `kept="products"` also what its matrix products gave,
so that none of them runs twice. It stops as soon as all that is needed is there again. Random numbers and autocast are
as they were the first time, and buffers are changed by the first time alone.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from shardwright.spec.plan import SAVED_PRODUCT_OPS, Recompute, RecomputePolicy

# The last is what layers/mixing calls for a convolution on a CPU.
SAVED_OPS = frozenset(getattr(torch.ops.aten, name) for name in (*SAVED_PRODUCT_OPS, "_slow_conv2d_forward"))


class CheckpointedBlock(nn.Module):
    """In the place of a block: called like it, with its parameters, buffers and children under their own names."""

    def __init__(self, block: nn.Module, kept: RecomputePolicy = "nothing") -> None:
        super().__init__()
        object.__setattr__(self, "block", block)
        self._parameters, self._buffers, self._modules = block._parameters, block._buffers, block._modules
        self._non_persistent_buffers_set = block._non_persistent_buffers_set
        self.training = block.training
        self._how: dict[str, Any] = {"use_reentrant": False, "context_fn": partial(_contexts, block, kept)}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.block.training = self.training
        if not torch.is_grad_enabled():
            return self.block(*args, **kwargs)
        return checkpoint(self.block, *args, **self._how, **kwargs)

    def train(self, mode: bool = True) -> "CheckpointedBlock":
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


def checkpoint_activations(model: nn.Module, blocks: Sequence[Recompute]) -> None:
    """Put each of these blocks into such a frame."""
    for name, kept in blocks:
        above, _, own = name.rpartition(".")
        parent = model.get_submodule(above)
        parent._modules[own] = CheckpointedBlock(model.get_submodule(name), kept)


def _contexts(
    block: nn.Module, kept: RecomputePolicy
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Around a block's run, and around that in its backward pass."""
    first, again = nullcontext(), nullcontext()
    if kept == "products":
        first, again = create_selective_checkpoint_contexts(_policy)
    return first, _both(_buffers_apart(block), again)


@contextmanager
def _both(*contexts: AbstractContextManager[Any]) -> Iterator[None]:
    with ExitStack() as stack:
        for one in contexts:
            stack.enter_context(one)
        yield


@contextmanager
def _buffers_apart(block: nn.Module) -> Iterator[None]:
    """What is done to buffers is done to copies."""
    kept = [(module._buffers, {**module._buffers}) for module in block.modules() if module._buffers]
    for own, values in kept:
        own.update({name: value.clone() for name, value in values.items() if value is not None})
    try:
        yield
    finally:
        for own, values in kept:
            own.update(values)


def _policy(_: Any, op: Any, *__: Any, **___: Any) -> CheckpointPolicy:
    keep = getattr(op, "overloadpacket", None) in SAVED_OPS
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

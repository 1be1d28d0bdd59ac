"""Activation checkpointing: blocks that save only their inputs and run again in the backward pass.

With the policy "products", outputs of matrix products are saved too, so that no product runs twice. Recomputation
stops as soon as all saved tensors are available. It restores the RNG state and autocast, and leaves buffers unchanged.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from shardwright.kernels import grouped_products as grouped_products  # registers an operator of SAVED_PRODUCT_OPS
from shardwright.spec.plan import SAVED_PRODUCT_OPS, Recompute, RecomputePolicy

# _slow_conv2d_forward is the convolution that layers/mixing.py runs on a CPU.
SAVED_OPS = frozenset(
    getattr(namespace, name)
    for namespace in (torch.ops.aten, torch.ops.shardwright)
    for name in (*SAVED_PRODUCT_OPS, "_slow_conv2d_forward")
    if hasattr(namespace, name)
)


class CheckpointedBlock(nn.Module):
    """Wraps a block; has its call signature, and its parameters, buffers and children by the same names."""

    def __init__(self, block: nn.Module, policy: RecomputePolicy = "nothing") -> None:
        super().__init__()
        object.__setattr__(self, "block", block)
        self._parameters, self._buffers, self._modules = block._parameters, block._buffers, block._modules
        self._non_persistent_buffers_set = block._non_persistent_buffers_set
        self.training = block.training
        self._options: dict[str, Any] = {"use_reentrant": False, "context_fn": partial(_contexts, block, policy)}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.block.training = self.training
        if not torch.is_grad_enabled():
            return self.block(*args, **kwargs)
        return checkpoint(self.block, *args, **self._options, **kwargs)

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
    """Replace each of the model's `blocks` by a `CheckpointedBlock`."""
    for name, policy in blocks:
        parent_name, _, child_name = name.rpartition(".")
        parent = model.get_submodule(parent_name)
        parent._modules[child_name] = CheckpointedBlock(model.get_submodule(name), policy)


def _contexts(
    block: nn.Module, policy: RecomputePolicy
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """The contexts of a block's forward and of its recomputation."""
    forward, recomputation = nullcontext(), nullcontext()
    if policy == "products":
        forward, recomputation = create_selective_checkpoint_contexts(_select_saved)
    return forward, _combine_contexts(_preserve_buffers(block), recomputation)


@contextmanager
def _combine_contexts(*contexts: AbstractContextManager[Any]) -> Iterator[None]:
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


@contextmanager
def _preserve_buffers(block: nn.Module) -> Iterator[None]:
    """Within this context, the block has clones of its buffers."""
    originals = [(module._buffers, {**module._buffers}) for module in block.modules() if module._buffers]
    for buffers, values in originals:
        buffers.update({name: value.clone() for name, value in values.items() if value is not None})
    try:
        yield
    finally:
        for buffers, values in originals:
            buffers.update(values)


def _select_saved(_: Any, op: Any, *__: Any, **___: Any) -> CheckpointPolicy:
    is_saved = getattr(op, "overloadpacket", None) in SAVED_OPS
    return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE

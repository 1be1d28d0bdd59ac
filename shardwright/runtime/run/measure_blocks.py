"""Measure forward and backward of a model of embed, blocks and head, for the planner.

Blocks with the same layers and shapes are measured once, on a few copies in sequence: with only one, its weights would
stay in the processor's caches, and a rank needs no memory for the whole model.
"""

import copy
import time
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import cycle
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map_only

from shardwright.dense.activation_checkpoint import CheckpointedBlock
from shardwright.jagged import Batch
from shardwright.runtime.materialize import materialize
from shardwright.spec.plan import RecomputePolicy
from shardwright.spec.workload import Dtype

MIN_CALLS, MAX_CALLS = 3, 50  # of the copies of a part
SECONDS, MAX_SECONDS = 1.0, 8.0  # of each part, since some machines' speed drifts; in all, of parts that are equal
MAX_COPIES_BYTES = 1 << 26  # of the weights of all copies: more than the caches of a core hold
Seconds = tuple[float, float]  # forward, backward
NO_RECOMPUTATION = MappingProxyType[str, RecomputePolicy]({})


def has_parts(model: nn.Module) -> bool:
    """Whether the model is embed(batch), blocks, head(x)."""
    return isinstance(getattr(model, "blocks", None), nn.ModuleList) and all(
        isinstance(getattr(model, name, None), nn.Module) for name in ("embed", "head")
    )


def block_seconds(
    model: Any,
    batches: Sequence[Batch],
    num_blocks: int,
    dtype: Dtype,
    *,
    num_in_flight: int = 1,
    recompute: Mapping[str, RecomputePolicy] = NO_RECOMPUTATION,
) -> Seconds:
    """Seconds of the forward passes of all parts of the model for one of these batches, and of all backward passes.

    `num_blocks`: of the model, in the memory of a rank. `num_in_flight`: batches whose activations it holds.
    `recompute`: policies of activation checkpointing, by block, whose backward then includes what it repeats. Both
    results are in the ratio of their processor times; their sum is real time, since ranks share cores, and may have
    quotas of them.
    """
    measured: dict[tuple[str, str], Seconds] = {}
    inputs: list[Any] = [*batches]
    seconds: list[Seconds] = []
    with torch.random.fork_rng(devices=[]):
        parts = {"embed": model.embed, **{f"blocks.{i}": block for i, block in enumerate(model.blocks)}}
        parts["head"] = model.head
        keys = [(_describe(part), recompute.get(name, "")) for name, part in parts.items()]
        for (name, part), key in zip(parts.items(), keys, strict=True):
            if key not in measured:
                loss = model.loss if part is model.head else None
                num_copies = max(1, min(keys.count(key), num_blocks, MAX_COPIES_BYTES // (1 + _parameter_bytes(part))))
                copies = [copy.deepcopy(part) for _ in range(num_copies)]
                modules, limit = _to_timed(copies, recompute.get(name)), min(MAX_SECONDS, SECONDS * keys.count(key))
                measured[key], inputs = _time_copies(modules, loss, batches, inputs, dtype, num_in_flight, limit)
            seconds.append(measured[key])
    forward, backward = zip(*seconds, strict=True)
    return sum(forward), sum(backward)


def _describe(part: nn.Module) -> str:
    """Equal for parts with the same layers, settings and shapes."""
    shapes = [f"{name} {tuple(parameter.shape)}" for name, parameter in part.named_parameters()]
    return "\n".join([repr(part), *shapes])


def _parameter_bytes(part: nn.Module) -> int:
    return sum(parameter.numel() * parameter.itemsize for parameter in part.parameters())


def _to_timed(copies: Sequence[nn.Module], policy: RecomputePolicy | None) -> Sequence[nn.Module]:
    for module in copies:
        materialize(module, torch.device("cpu"))
    return copies if policy is None else [CheckpointedBlock(module, policy) for module in copies]


def _time_copies(
    copies: Sequence[nn.Module],
    loss: nn.Module | None,
    batches: Sequence[Batch],
    inputs: Sequence[Any],
    dtype: Dtype,
    num_in_flight: int,
    limit: float,
) -> tuple[Seconds, list[Any]]:
    """The mean seconds of both passes of a copy, and the last copy's output for each batch.

    Each call has the next batch, and adds its gradients to those of the call before, as micro-batches do. Calls before
    the first backward pass, and the first with one, allocate memory and do not count.
    """
    outputs: list[Any] = [None] * len(batches)
    in_flight: deque[Any] = deque()
    calls: list[Seconds] = []
    ends: list[float] = []
    for number in cycle(range(len(batches))):
        x = tree_map_only(Tensor, _as_leaf, inputs[number])
        start = time.process_time()
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16"):
            for module in copies:
                x = module(x)
        if loss is not None:
            x = loss(tree_map_only(Tensor, Tensor.float, x), batches[number])
        middle = time.process_time()
        outputs[number] = tree_map_only(Tensor, Tensor.detach, x)
        in_flight.append([tensor for tensor in tree_flatten(x)[0] if tensor.requires_grad])
        if len(in_flight) < num_in_flight:
            continue
        results = in_flight.popleft()
        if results:
            torch.autograd.backward(results, [torch.ones_like(tensor) for tensor in results])
        calls.append((middle - start, time.process_time() - middle))
        ends.append(time.perf_counter())
        if len(calls) > MAX_CALLS or len(calls) > MIN_CALLS and ends[-1] > ends[0] + limit:
            break
    forward, backward = (sum(seconds) for seconds in zip(*calls[1:], strict=True))
    rate = (ends[-1] - ends[0]) / (len(ends) - 1) / len(copies) / (forward + backward)
    return (forward * rate, backward * rate), outputs


def _as_leaf(x: Tensor) -> Tensor:
    return x.detach().requires_grad_(x.is_floating_point())

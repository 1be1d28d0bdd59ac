"""A model as a Workload: what the planner needs to know, found by tracing on the meta device.

Nothing is computed and nothing of the model's size is allocated: parameters and the batch are replaced by their shapes.
The model itself is not changed. Tables cost what their rows and ids cost; dense parts are counted block by block.
"""

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils._pytree import tree_map
from torch.utils.flop_counter import FlopCounterMode

from shardwright.errors import UserError
from shardwright.jagged import Batch, Jagged, Vectors, ids_per_feature
from shardwright.layers.embedding import EmbeddingBags
from shardwright.measure.op_counts import OpCounterMode, PeakMemoryMode, SavedTensorsMode, tensors_of, untraceable_error
from shardwright.spec.workload import Block, FeatureStatistics, Product, Workload

EXTRA_FLOP_FORMULAS = MappingProxyType[Any, Callable[..., int]](  # beside what torch counts, by the shapes of operands
    {
        torch.ops.aten.mv: lambda left, _, **__: 2 * left[0] * left[1],
        torch.ops.aten.dot: lambda left, _, **__: 2 * left[0],
    }
)
NUM_HALVINGS = 8  # of a batch, in whose parts distinct ids are counted


def describe(model: nn.Module, batch: Batch, statistics: Sequence[FeatureStatistics] | None = None) -> Workload:
    """The Workload of one training step on this batch; id statistics not given, by ids' names, come from the batch."""
    override = getattr(model, "describe", None)
    if override is not None:
        return override(batch, statistics)
    check_contract(model)
    sparse = sparse_of(model)
    return Workload(
        version=1,
        batch_size=batch.batch_size,
        tables=sparse.tables if sparse else (),
        features=sparse.features if sparse else (),
        statistics=_statistics(sparse, batch.features, statistics or ()),
        optimizer=sparse.optimizer if sparse else None,
        blocks=_blocks(model, sparse, batch),
    )


def check_contract(model: nn.Module) -> None:
    """Refuse a model without a loss of its own."""
    if not callable(getattr(model, "loss", None)):
        raise UserError(f"{type(model).__name__} has no `loss(logits, batch)`; give it one as a child module")


def sparse_of(model: nn.Module) -> EmbeddingBags | None:
    """The child `sparse` of the model contract, if the model has one."""
    sparse = getattr(model, "sparse", None)
    if sparse is None:
        return None
    if not isinstance(sparse, EmbeddingBags):
        raise UserError(
            f"{type(model).__name__}.sparse is a {type(sparse).__name__}; wanted EmbeddingBags "
            "(from_torch and from_torchrec make one from what you have)"
        )
    for child in ("dense", "loss"):
        if not hasattr(model, child):
            raise UserError(
                f"{type(model).__name__} has `sparse` but no `{child}`; the contract is children sparse(batch), "
                "dense(batch, vectors) and loss(logits, batch)"
            )
    return sparse


def block_names(model: nn.Module) -> tuple[str, ...]:
    """The parts a model is counted and cut by: embed, each of `blocks`, head; or the children of `dense`."""
    if isinstance(getattr(model, "blocks", None), nn.ModuleList):
        inside, root = model, ""
    else:
        root = "dense" if sparse_of(model) else ""
        inside = model.get_submodule(root)
    names = []
    for name, child in inside.named_children():
        if name == "blocks" and isinstance(child, nn.ModuleList):
            names += [f"{root}.{name}.{index}" if root else f"{name}.{index}" for index in range(len(child))]
        elif name != "loss":
            names.append(f"{root}.{name}" if root else name)
    return tuple(names)


def _statistics(
    sparse: EmbeddingBags | None, features: Jagged, given: Sequence[FeatureStatistics]
) -> tuple[FeatureStatistics, ...]:
    if sparse is None:
        return ()
    known = {entry.feature: entry for entry in given}
    read = sparse.read(features)
    found = []
    for at, (feature, part) in enumerate(zip(sparse.features, read.values.split(ids_per_feature(read)), strict=True)):
        entry = known.get(feature.ids or feature.name)
        if entry is None:
            curve = _distinct(part, read.lengths[at])
            share = curve[-1][1] if curve else 1.0
            entry = FeatureStatistics(feature.name, part.numel() / read.batch_size, share, distinct=curve)
        found.append(replace(entry, feature=feature.name))
    return tuple(found)


def _distinct(ids: Tensor, lengths: Tensor) -> tuple[tuple[int, float], ...]:
    """(samples, distinct ids over ids) in the batch and in its parts of 1/2, 1/4 and so on of the samples, as ranks get
    them: samples that follow each other."""
    sample = torch.arange(len(lengths)).repeat_interleave(lengths.cpu())
    _, value = ids.cpu().unique(return_inverse=True)
    found: dict[int, float] = {}
    for halvings in range(NUM_HALVINGS, -1, -1):
        size = len(lengths) >> halvings
        inside = sample < (size << halvings)
        if size and inside.any():
            runs = (sample[inside] // size) * (len(ids) + 1) + value[inside]
            found[size] = len(runs.unique()) / len(runs)
    return tuple(found.items())


def _blocks(model: nn.Module, sparse: EmbeddingBags | None, batch: Batch) -> tuple[Block, ...]:
    """Trace the whole step once, then each block alone on the inputs it received; "rest" is what is left."""
    twin = _meta_twin(model)
    vectors = sparse.blank(batch.features) if sparse else None
    names, far = block_names(model), batch.to("meta")
    try:
        with SavedTensorsMode(twin, names) as kept:
            total = _count("rest", twin, lambda: _loss(twin, far, vectors), sparse, batch.batch_size)
    except (RuntimeError, TypeError) as error:
        raise untraceable_error(model, error) from error
    blocks: list[Block] = []
    seen: set[int] = set()
    for name in names:
        block = twin.get_submodule(name)
        if name in kept.block_inputs:
            args, kwargs = _detached(kept.block_inputs[name])
            counted = _count(name, block, partial(block, *args, **kwargs), None, batch.batch_size, seen)
            blocks.append(replace(counted, peak_bytes=_most(block, _detached(kept.block_inputs[name]))))
    early = _without_vectors(model, batch, vectors, names) if vectors else frozenset[str]()
    blocks = [replace(block, needs_vectors=block.name not in early) for block in blocks]
    return tuple(replace(block, **kept.bytes_of(block.name)) for block in (*blocks, *_rest(total, blocks, kept)))


def _without_vectors(model: nn.Module, batch: Batch, vectors: Vectors, names: Sequence[str]) -> frozenset[str]:
    """The blocks that no vector of a table reaches: where vectors alone have gradients, their outputs have none."""
    twin = _meta_twin(model).requires_grad_(False)
    found: set[str] = set()

    def look(name: str, _: nn.Module, __: Any, output: Any) -> None:
        if not any(tensor.requires_grad for tensor in tensors_of(output)):
            found.add(name)

    for name in names:
        twin.get_submodule(name).register_forward_hook(partial(look, name))
    _loss(twin, batch.to("meta"), vectors)
    return frozenset(found)


def _count(
    name: str,
    module: nn.Module,
    run: Callable[[], Any],
    sparse: EmbeddingBags | None,
    batch_size: int,
    seen: set[int] | None = None,
) -> Block:
    """Parameters (each once, tables aside), and the operations of forward and backward."""
    tables = {id(p) for p in module.get_submodule("sparse").parameters()} if sparse else set()
    seen = set() if seen is None else seen
    mine = [p for p in module.parameters() if id(p) not in seen | tables]
    seen.update(id(p) for p in mine)
    forward, backward = (FlopCounterMode(display=False, custom_mapping={**EXTRA_FLOP_FORMULAS}) for _ in range(2))
    with forward, OpCounterMode() as there:
        outputs = tensors_of(run())
    with backward, OpCounterMode() as back:
        roots = [output for output in outputs if output.requires_grad]
        torch.autograd.backward(roots, [torch.empty_like(root) for root in roots])
    return Block(
        name=name,
        parameters=sum(p.numel() for p in mine),
        parameter_bytes=sum(p.numel() * p.element_size() for p in mine),
        forward_flops=forward.get_total_flops(),
        backward_flops=backward.get_total_flops(),
        activation_bytes=0,
        forward_bytes=there.bytes_,
        backward_bytes=back.bytes_,
        forward_calls=there.num_calls,
        forward_products=there.products(batch_size),
        backward_products=back.products(batch_size),
    )


def _most(module: nn.Module, received: tuple[tuple[Any, ...], dict[str, Any]]) -> int:
    """Bytes of what a block makes that are there at once, forward or backward, but gradients of its parameters."""
    module.zero_grad(set_to_none=True)
    args, kwargs = received
    with PeakMemoryMode([*module.parameters()]) as live:
        roots = [output for output in tensors_of(module(*args, **kwargs)) if output.requires_grad]
        edges, back = [get_gradient_edge(root) for root in roots], [torch.empty_like(root) for root in roots]
        del roots  # who is called next keeps it, if it is kept
        torch.autograd.backward(edges, back)
    return live.peak_bytes


def _rest(total: Block, blocks: Sequence[Block], kept: SavedTensorsMode) -> tuple[Block, ...]:
    """What no named block holds: the loss, and whatever happens between blocks."""
    parts = {
        field: getattr(total, field) - sum(getattr(block, field) for block in blocks)
        for field in ("parameters", "parameter_bytes", "forward_flops", "backward_flops")
    }
    parts |= {
        field: max(0, getattr(total, field) - sum(getattr(block, field) for block in blocks))
        for field in ("forward_bytes", "backward_bytes", "forward_calls")
    }
    parts |= {
        field: _left(getattr(total, field), chain(*(getattr(block, field) for block in blocks)))
        for field in ("forward_products", "backward_products")
    }
    left = kept.bytes_of("rest")["activation_bytes"]
    return (Block("rest", **parts, activation_bytes=left),) if any(parts.values()) or left else ()


def _left(total: Iterable[Product], parts: Iterable[Product]) -> tuple[Product, ...]:
    """The products that no part has."""
    nums: Counter[Product] = Counter()
    for sign, products in ((1, total), (-1, parts)):
        for one in products:
            nums[replace(one, num=1)] += sign * one.num
    return tuple(replace(one, num=num) for one, num in nums.items() if num > 0)


def _loss(model: Any, batch: Batch, vectors: Vectors | None) -> Tensor:
    if vectors is None:
        return model.loss(model(batch), batch)
    for tensor in vectors.tensors():
        tensor.requires_grad_(True)
    return model.loss(model.dense(batch, vectors), batch)


def _meta_twin(model: nn.Module) -> nn.Module:
    """A copy that shares the model's structure and ties but holds only the shapes of its tensors."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = buffer.detach().to("meta")
    return copy.deepcopy(model, memo)


def _detached(args: Any) -> Any:
    def detach(leaf: Any) -> Any:
        return leaf.detach().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf

    return tree_map(detach, args)

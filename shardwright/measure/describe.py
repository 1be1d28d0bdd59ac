"""Describe a model as a Workload, the planner's input, by tracing it on the meta device.

Nothing is computed and nothing of the model's size is allocated: parameters and the batch are replaced by their shapes.
The model itself is not changed. Tables are described by their rows and ids; the dense model is counted block by block.

Shape legend: R rows of experts, E experts, C and H channels.
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
from shardwright.layers.embedding import EmbeddingTables
from shardwright.layers.moe import LocalExperts, MoE
from shardwright.measure.fused_attention import FLOP_FORMULAS, traced_as_fused
from shardwright.measure.op_counts import OpCounterMode, PeakMemoryMode, SavedTensorsMode, tensors_of, untraceable_error
from shardwright.spec.workload import Block, FeatureStatistics, Mixture, Product, Workload

EXTRA_FLOP_FORMULAS = MappingProxyType[Any, Callable[..., int]](  # in addition to torch's, by the operands' shapes
    {
        torch.ops.aten.mv: lambda left, _, **__: 2 * left[0] * left[1],
        torch.ops.aten.dot: lambda left, _, **__: 2 * left[0],
    }
)
NUM_HALVINGS = 8  # of a batch, to count distinct ids in its parts


def describe(model: nn.Module, batch: Batch, statistics: Sequence[FeatureStatistics] | None = None) -> Workload:
    """Describe one training step on this batch as a Workload.

    Statistics of features that are not in `statistics` are measured on the batch. If the model has a method `describe`,
    its result is returned instead.
    """
    override = getattr(model, "describe", None)
    if override is not None:
        return override(batch, statistics)
    check_contract(model)
    sparse = sparse_of(model)
    with traced_as_fused():
        blocks = _trace_blocks(model, sparse, batch)
    return Workload(
        version=1,
        batch_size=batch.batch_size,
        tables=sparse.tables if sparse else (),
        features=sparse.features if sparse else (),
        statistics=_statistics(sparse, batch.features, statistics or ()),
        optimizer=sparse.optimizer if sparse else None,
        blocks=blocks,
        experts=_trace_mixtures(model, sparse, batch),
    )


def check_contract(model: nn.Module) -> None:
    """Raise if the model has no `loss`."""
    if not callable(getattr(model, "loss", None)):
        raise UserError(f"{type(model).__name__} has no `loss(logits, batch)`; give it one as a child module")


def sparse_of(model: nn.Module) -> EmbeddingTables | None:
    """The child `sparse` of the model contract, None if the model has none."""
    sparse = getattr(model, "sparse", None)
    if sparse is None:
        return None
    if not isinstance(sparse, EmbeddingTables):
        raise UserError(
            f"{type(model).__name__}.sparse is a {type(sparse).__name__}; wanted EmbeddingBags, or "
            "EmbeddingBagsDict of several (from_torch and from_torchrec convert yours)"
        )
    for child in ("dense", "loss"):
        if not hasattr(model, child):
            raise UserError(
                f"{type(model).__name__} has `sparse` but no `{child}`; the contract is children sparse(batch), "
                "dense(batch, vectors) and loss(logits, batch)"
            )
    return sparse


def block_names(model: nn.Module) -> tuple[str, ...]:
    """Names of the blocks by which a model is counted and sharded.

    They are the children of `dense`, or of the model itself if it has `blocks` or no tables. Of a ModuleList, which is
    never called, they are the members.
    """
    if isinstance(getattr(model, "blocks", None), nn.ModuleList):
        parent, prefix = model, ""
    else:
        prefix = "dense" if sparse_of(model) else ""
        parent = model.get_submodule(prefix)
    names = []
    for name, child in parent.named_children():
        if isinstance(child, nn.ModuleList):
            names += [f"{prefix}.{name}.{index}" if prefix else f"{name}.{index}" for index in range(len(child))]
        elif name != "loss":
            names.append(f"{prefix}.{name}" if prefix else name)
    return tuple(names)


def _statistics(
    sparse: EmbeddingTables | None, features: Jagged, overrides: Sequence[FeatureStatistics]
) -> tuple[FeatureStatistics, ...]:
    """Statistics of each feature: those in `overrides`, else measured on the batch."""
    if sparse is None:
        return ()
    by_name = {entry.feature: entry for entry in overrides}
    read = sparse.read(features)
    statistics = []
    for index, (feature, ids) in enumerate(zip(sparse.features, read.values.split(ids_per_feature(read)), strict=True)):
        entry = by_name.get(feature.ids or feature.name)
        if entry is None:
            curve = _distinct_curve(ids, read.lengths[index])
            share = curve[-1][1] if curve else 1.0
            entry = FeatureStatistics(feature.name, ids.numel() / read.batch_size, share, distinct=curve)
        statistics.append(replace(entry, feature=feature.name))
    return tuple(statistics)


def _distinct_curve(ids: Tensor, lengths: Tensor) -> tuple[tuple[int, float], ...]:
    """(samples, distinct ids over ids) of the batch and of its parts of 1/2, 1/4 and so on.

    Parts are consecutive samples, as ranks get them.
    """
    sample = torch.arange(len(lengths)).repeat_interleave(lengths.cpu())
    _, value = ids.cpu().unique(return_inverse=True)
    shares: dict[int, float] = {}
    for halvings in range(NUM_HALVINGS, -1, -1):
        size = len(lengths) >> halvings
        in_part = sample < (size << halvings)
        if size and in_part.any():
            keys = (sample[in_part] // size) * (len(ids) + 1) + value[in_part]
            shares[size] = len(keys.unique()) / len(keys)
    return tuple(shares.items())


def _trace_blocks(model: nn.Module, sparse: EmbeddingTables | None, batch: Batch) -> tuple[Block, ...]:
    """Trace the whole step once, then each block on the inputs it received; "rest" is the difference."""
    twin = meta_twin(model)
    vectors = sparse.blank(batch.features) if sparse else None
    names, meta = block_names(model), batch.to("meta")
    try:
        with SavedTensorsMode(twin, names) as saved:
            total = _count("rest", twin, lambda: _compute_loss(twin, meta, vectors), sparse, batch.batch_size)
    except (RuntimeError, TypeError) as error:
        raise untraceable_error(model, error) from error
    blocks: list[Block] = []
    counted: set[int] = set()
    for name in names:
        block = twin.get_submodule(name)
        if name in saved.block_inputs:
            args, kwargs = _detach_inputs(saved.block_inputs[name])
            counts = _count(name, block, partial(block, *args, **kwargs), None, batch.batch_size, counted)
            blocks.append(replace(counts, peak_bytes=_peak_bytes(block, _detach_inputs(saved.block_inputs[name]))))
    no_vectors = _blocks_without_vectors(model, batch, vectors, names) if vectors else frozenset[str]()
    blocks = [replace(block, needs_vectors=block.name not in no_vectors) for block in blocks]
    return tuple(replace(block, **saved.bytes_of(block.name)) for block in (*blocks, *_rest(total, blocks, saved)))


def _trace_mixtures(model: nn.Module, sparse: EmbeddingTables | None, batch: Batch) -> tuple[Mixture, ...]:
    """The mixtures of experts inside the model's blocks; their rows are evenly split over the experts."""
    names = [name for name, module in model.named_modules() if isinstance(module, MoE)]
    if not names:
        return ()
    twin, calls = meta_twin(model), dict[str, tuple[Tensor, Tensor, Tensor]]()
    num_chosen = dict[str, int]()

    def record_call(name: str, _: nn.Module, inputs: Any, output: Tensor) -> None:
        calls[name] = (*inputs, output)

    for name in names:
        mixture: MoE = twin.get_submodule(name)  # pyright: ignore[reportAssignmentType]
        mixture.exchange = LocalExperts()
        num_chosen[name] = mixture.gate.num_chosen
        mixture.experts.register_forward_hook(partial(record_call, name))
    _compute_loss(twin, batch.to("meta"), sparse.blank(batch.features) if sparse else None)
    blocks = block_names(twin)
    return tuple(
        replace(
            describe_experts(name, twin.get_submodule(f"{name}.experts"), *calls[name], batch.batch_size),
            block=next((block for block in blocks if f"{name}.".startswith(f"{block}.")), "rest"),
            num_chosen=num_chosen[name],
        )
        for name in names
        if name in calls
    )


def describe_experts(
    module: str, experts: nn.Module, rows_RC: Tensor, sizes_E: Tensor, out_RH: Tensor, batch_size: int
) -> Mixture:
    """The mixture of experts at a path of a model, as its own block; `out_RH`: what they returned for these rows."""
    inputs = rows_RC.detach().requires_grad_()
    return Mixture(
        module=module,
        block=module,
        num_experts=len(sizes_E),
        rows=len(rows_RC),
        row_bytes=rows_RC[0].nbytes,
        result_bytes=out_RH[0].nbytes,
        experts=_count(f"{module}.experts", experts, lambda: experts(inputs, sizes_E), None, batch_size),
    )


def _blocks_without_vectors(model: nn.Module, batch: Batch, vectors: Vectors, names: Sequence[str]) -> frozenset[str]:
    """Names of the blocks that no embedding vector reaches.

    Only the vectors require gradients in this trace, so that outputs of these blocks require none.
    """
    twin = meta_twin(model).requires_grad_(False)
    names_without: set[str] = set()

    def check_output(name: str, _: nn.Module, __: Any, output: Any) -> None:
        if not any(tensor.requires_grad for tensor in tensors_of(output)):
            names_without.add(name)

    for name in names:
        twin.get_submodule(name).register_forward_hook(partial(check_output, name))
    _compute_loss(twin, batch.to("meta"), vectors)
    return frozenset(names_without)


def _count(
    name: str,
    module: nn.Module,
    run: Callable[[], Any],
    sparse: EmbeddingTables | None,
    batch_size: int,
    counted: set[int] | None = None,
) -> Block:
    """Parameters (each counted once, tables excluded), and the operations of forward and backward."""
    tables = {id(p) for p in module.get_submodule("sparse").parameters()} if sparse else set()
    counted = set() if counted is None else counted
    parameters = [p for p in module.parameters() if id(p) not in counted | tables]
    counted.update(id(p) for p in parameters)
    forward, backward = (
        FlopCounterMode(display=False, custom_mapping={**EXTRA_FLOP_FORMULAS, **FLOP_FORMULAS}) for _ in range(2)
    )
    with forward, OpCounterMode() as forward_ops:
        outputs = tensors_of(run())
    with backward, OpCounterMode() as backward_ops:
        roots = [output for output in outputs if output.requires_grad]
        torch.autograd.backward(roots, [torch.empty_like(root) for root in roots])
    return Block(
        name=name,
        parameters=sum(p.numel() for p in parameters),
        parameter_bytes=sum(p.numel() * p.element_size() for p in parameters),
        forward_flops=forward.get_total_flops(),
        backward_flops=backward.get_total_flops(),
        activation_bytes=0,
        forward_bytes=forward_ops.bytes_,
        backward_bytes=backward_ops.bytes_,
        forward_calls=forward_ops.num_calls,
        forward_products=forward_ops.products(batch_size),
        backward_products=backward_ops.products(batch_size),
    )


def _peak_bytes(module: nn.Module, inputs: tuple[tuple[Any, ...], dict[str, Any]]) -> int:
    """Peak bytes of a block's results in forward or backward, without gradients of its parameters."""
    module.zero_grad(set_to_none=True)
    args, kwargs = inputs
    with PeakMemoryMode([*module.parameters()]) as memory:
        roots = [output for output in tensors_of(module(*args, **kwargs)) if output.requires_grad]
        edges, gradients = [get_gradient_edge(root) for root in roots], [torch.empty_like(root) for root in roots]
        del roots  # a live reference would count as memory during backward
        torch.autograd.backward(edges, gradients)
    return memory.peak_bytes


def _rest(total: Block, blocks: Sequence[Block], saved: SavedTensorsMode) -> tuple[Block, ...]:
    """Everything outside the named blocks: the loss, and operations between blocks."""
    fields = {
        field: getattr(total, field) - sum(getattr(block, field) for block in blocks)
        for field in ("parameters", "parameter_bytes", "forward_flops", "backward_flops")
    }
    fields |= {
        field: max(0, getattr(total, field) - sum(getattr(block, field) for block in blocks))
        for field in ("forward_bytes", "backward_bytes", "forward_calls")
    }
    fields |= {
        field: _subtract_products(getattr(total, field), chain(*(getattr(block, field) for block in blocks)))
        for field in ("forward_products", "backward_products")
    }
    saved_bytes = saved.bytes_of("rest")["activation_bytes"]
    return (Block("rest", **fields, activation_bytes=saved_bytes),) if any(fields.values()) or saved_bytes else ()


def _subtract_products(total: Iterable[Product], parts: Iterable[Product]) -> tuple[Product, ...]:
    """The products of `total` that are not in `parts`."""
    nums: Counter[Product] = Counter()
    for sign, products in ((1, total), (-1, parts)):
        for product in products:
            nums[replace(product, num=1)] += sign * product.num
    return tuple(replace(product, num=num) for product, num in nums.items() if num > 0)


def _compute_loss(model: Any, batch: Batch, vectors: Vectors | None) -> Tensor:
    if vectors is None:
        return model.loss(model(batch), batch)
    for tensor in vectors.tensors():
        tensor.requires_grad_(True)
    return model.loss(model.dense(batch, model.sparse.outputs(vectors)), batch)


def meta_twin(model: nn.Module) -> nn.Module:
    """A copy with the model's structure and shared parameters, whose tensors are on the meta device."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = buffer.detach().to("meta")
    return copy.deepcopy(model, memo)


def _detach_inputs(args: Any) -> Any:
    def detach(leaf: Any) -> Any:
        return leaf.detach().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf

    return tree_map(detach, args)

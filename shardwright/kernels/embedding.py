"""Lookup and update of many tables in one call, as torch operators: C++ on CPUs, Triton on GPUs.

Ids of all features are concatenated feature by feature; `offsets` has the start of each bag. Feature f reads table
`tables[f]` and is pooled by `pooling[f]`. Vectors are float32, or float64 if the tables are: the pooled vectors of all
features concatenated in one tensor, and for each unpooled feature a tensor with one row per id.
"""

from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shardwright.errors import UserError, did_you_mean
from shardwright.kernels import reference
from shardwright.kernels.arguments import (
    POOLINGS,
    Ids,
    KernelArguments,
    TableState,
    check_same_device,
    empty_vectors,
    prepare_gradients,
    table_structs,
    validate_lookup,
    validate_state,
    vector_dtype,
    with_bounds,
)
from shardwright.kernels.buffers import BufferPool
from shardwright.kernels.compile_exempt import disable_compile
from shardwright.kernels.triton_modules import triton_module
from shardwright.library import native_library
from shardwright.spec.optimizer import HYPERPARAMETERS, SGD, SparseOptimizer, from_hyperparameters, hyperparameters

# In the order of csrc/embedding.h.
OPTIMIZER_KINDS = ("sgd", "adagrad", "rowwise_adagrad", "adam", "partial_rowwise_adam", "lamb")


def lookup(weights: Sequence[Tensor], ids: Ids) -> list[Tensor]:
    """Pooled vectors concatenated, then each unpooled feature's rows; differentiable."""
    _operators()
    return torch.ops.shardwright.embedding_lookup(
        list(weights), ids.values, ids.offsets, ids.weights, list(ids.tables), list(ids.pooling)
    )


# Not compiled: it writes to pooled buffers, which torch.compile cannot trace.
@disable_compile
def lookup_into(buffers: BufferPool, weights: Sequence[Tensor], ids: Ids) -> list[Tensor]:
    """`lookup` without gradients, into memory of the buffer pool."""
    ids = validate_lookup(weights, ids)
    empty = buffers.allocate if ids.values.device.type == "cpu" else partial(torch.empty, device=ids.values.device)
    vectors = empty_vectors(weights, ids, empty)
    _run_lookup(vectors, weights, ids)
    return vectors


def sort_lookups(weights: Sequence[Tensor], ids: Ids) -> list[Tensor]:
    """Sort the lookups by row on a GPU for `update`; it needs only the ids, so it can run early."""
    triton = _triton_kernels_for(ids)
    return triton.sort_lookups(weights, validate_lookup(weights, ids)) if triton else []


def update(
    tables: Sequence[TableState],
    ids: Ids,
    gradients: Sequence[Tensor],
    optimizer: SparseOptimizer,
    sorted_lookups: Sequence[Tensor] = (),
) -> None:
    """One optimizer step on every row that `ids` names, from the gradients of `lookup`'s result.

    `sorted_lookups` is the result of `sort_lookups` for the same ids, if it was called before.
    """
    _operators()
    torch.ops.shardwright.embedding_update(
        [table.weight for table in tables],
        [state for table in tables for state in table.state],
        list(gradients),
        list(sorted_lookups),
        ids.values,
        ids.offsets,
        ids.weights,
        list(ids.tables),
        list(ids.pooling),
        list(ids.bounds or ()),
        optimizer.kind,
        list(hyperparameters(optimizer).values()),
        [number for table in tables for number in (table.step, table.rounding_key, table.is_trained)],
        [table.row_numbers for table in tables],
    )
    if any(table.changed_rows is not None for table in tables):
        for index, (start, end) in zip(ids.tables, ids.feature_ranges(), strict=True):
            changed_rows = tables[index].changed_rows
            if changed_rows is not None and tables[index].is_trained:
                changed_rows.index_fill_(0, ids.values[start:end].long(), True)


def id_weight_gradients(weights: Sequence[Tensor], ids: Ids, gradients: Sequence[Tensor]) -> Tensor:
    """(N,) the gradient of each id's weight."""
    _operators()
    return torch.ops.shardwright.embedding_weight_gradients(
        list(weights), list(gradients), ids.values, ids.offsets, list(ids.tables), list(ids.pooling)
    )


@cache
def _operators() -> torch.library.Library:
    operators = torch.library.Library("shardwright", "FRAGMENT")
    ids = "Tensor ids, Tensor offsets"
    features = "int[] tables, int[] pooling"
    operators.define(f"embedding_lookup(Tensor[] weights, {ids}, Tensor? id_weights, {features}) -> Tensor[]")
    operators.define(
        "embedding_update(Tensor(a!)[] weights, Tensor(b!)[] state, Tensor[] gradients, Tensor[] ordered, "
        f"{ids}, Tensor? id_weights, {features}, int[] bounds, str optimizer, float[] numbers, int[] steps, "
        "Tensor?[] row_numbers) -> ()"
    )
    operators.define(f"embedding_weight_gradients(Tensor[] weights, Tensor[] gradients, {ids}, {features}) -> Tensor")
    operators.impl("embedding_lookup", _lookup_op, "CompositeExplicitAutograd")
    operators.impl("embedding_update", _update_op, "CompositeExplicitAutograd")
    operators.impl("embedding_weight_gradients", _weight_gradients_op, "CompositeExplicitAutograd")
    operators._register_fake("embedding_lookup", _lookup_fake)
    operators._register_fake("embedding_update", _update_fake)
    operators._register_fake("embedding_weight_gradients", _weight_gradients_fake)
    torch.library.register_autograd(
        "shardwright::embedding_lookup", _lookup_backward, setup_context=_setup_context, lib=operators
    )
    return operators


def _triton_kernels_for(ids: Ids) -> Any | None:
    """The Triton kernels if the ids are on a GPU and triton is installed, else None."""
    return triton_module("embedding_triton", ids.values)


def _lookup_op(weights, *lookups) -> list[Tensor]:
    ids = validate_lookup(weights, Ids(*lookups))
    vectors = empty_vectors(weights, ids, partial(torch.empty, device=ids.values.device))
    _run_lookup(vectors, weights, ids)
    return vectors


def _run_lookup(vectors: Sequence[Tensor], weights: Sequence[Tensor], ids: Ids) -> None:
    """Look up into `vectors`: native on a CPU, Triton on a GPU, else the reference."""
    native = native_library() if ids.values.device.type == "cpu" else None
    if native is None:
        (_triton_kernels_for(ids) or reference).lookup_all(weights, ids, vectors)
        return
    call = KernelArguments(ids, vectors, [weight.shape[1] for weight in weights])
    rows = table_structs([TableState(weight, (), 0, 0) for weight in weights])
    ids.raise_if_invalid(
        native.shardwright_lookup(rows.ctypes.data, call.features.ctypes.data, call.lookups.ctypes.data)
    )


def _update_op(weights, state, gradients, sorted_lookups, *arguments) -> None:
    *lookups, bounds, kind, settings, steps, row_numbers = arguments
    ids = validate_lookup(weights, with_bounds(Ids(*lookups), bounds or None))
    if kind not in OPTIMIZER_KINDS or len(settings) != len(HYPERPARAMETERS):
        raise UserError(
            f'optimizer "{kind}" with {len(settings)} numbers; wanted '
            f"{len(HYPERPARAMETERS)}{did_you_mean(kind, OPTIMIZER_KINDS)}"
        )
    if len(state) % len(weights) or len(steps) != 3 * len(weights) or len(row_numbers) != len(weights):
        raise UserError(
            f"{len(state)} tensors of state, {len(steps)} numbers and {len(row_numbers)} tensors of row numbers for "
            f"{len(weights)} tables"
        )
    num_states, optimizer = len(state) // len(weights), from_hyperparameters(kind, settings)
    states = [
        TableState(weight, state[t * num_states : (t + 1) * num_states], step, key, bool(is_trained), None, numbers)
        for t, (weight, step, key, is_trained, numbers) in enumerate(
            zip(weights, steps[0::3], steps[1::3], steps[2::3], row_numbers, strict=True)
        )
    ]
    validate_state(states, optimizer)
    gradients = prepare_gradients(gradients, weights, ids)
    native = native_library() if ids.values.device.type == "cpu" else None
    if native is None:
        if triton := _triton_kernels_for(ids):
            triton.update_all(states, ids, gradients, optimizer, sorted_lookups)
        else:
            reference.update_all(states, ids, gradients, optimizer)
        return
    call = KernelArguments(ids, gradients, [weight.shape[1] for weight in weights])
    rows, settings_array = table_structs(states), np.array(settings)
    bad_position = native.shardwright_update(
        rows.ctypes.data,
        len(states),
        call.features.ctypes.data,
        call.lookups.ctypes.data,
        OPTIMIZER_KINDS.index(kind),
        settings_array.ctypes.data,
    )
    ids.raise_if_invalid(bad_position)


def _weight_gradients_op(weights, gradients, values, offsets, tables, pooling) -> Tensor:
    ids = validate_lookup(weights, Ids(values, offsets, None, tables, pooling))
    gradients = prepare_gradients(gradients, weights, ids)
    out = torch.empty(values.numel(), dtype=gradients[0].dtype, device=values.device)
    native = native_library() if values.device.type == "cpu" else None
    if native is None:
        (_triton_kernels_for(ids) or reference).id_weight_gradients_all(weights, ids, gradients, out)
        return out
    call = KernelArguments(ids, gradients, [weight.shape[1] for weight in weights])
    rows = table_structs([TableState(weight, (), 0, 0) for weight in weights])
    features, lookups = call.features.ctypes.data, call.lookups.ctypes.data
    ids.raise_if_invalid(native.shardwright_weight_gradients(rows.ctypes.data, features, lookups, out.data_ptr()))
    return out


# Fakes also run if only some arguments are on the meta device; the check raises an error then.
def _update_fake(*arguments) -> None:
    check_same_device(
        *(
            tensor
            for argument in arguments
            for tensor in (argument if isinstance(argument, list) else [argument])
            if isinstance(tensor, Tensor)
        )
    )


def _weight_gradients_fake(weights, gradients, values, offsets, tables, pooling) -> Tensor:
    check_same_device(values, offsets, *weights, *gradients)
    return values.new_empty(values.numel(), dtype=vector_dtype(weights[0].dtype))


def _lookup_fake(weights, values, offsets, id_weights, tables, pooling) -> list[Tensor]:
    check_same_device(values, offsets, id_weights, *weights)
    batch = (offsets.numel() - 1) // max(1, len(tables))
    dtype = vector_dtype(weights[0].dtype)
    width, sequences = 0, []
    for table, kind in zip(tables, pooling, strict=True):
        dim = weights[table].shape[1]
        if POOLINGS[kind] == "none":
            sequences.append(values.new_empty(torch.library.get_ctx().new_dynamic_size(), dim, dtype=dtype))
        else:
            width += dim
    return [values.new_empty(batch, width, dtype=dtype), *sequences]


def _setup_context(ctx, inputs, output) -> None:
    ctx.weights, values, offsets, id_weights, *ctx.features = inputs
    ctx.save_for_backward(values, offsets, id_weights)


def _lookup_backward(ctx, gradients):
    """Dense gradients of full tables, as nn.EmbeddingBag has: for tables that a torch optimizer updates."""
    weights = ctx.weights
    values, offsets, id_weights = ctx.saved_tensors
    ids = Ids(values, offsets, id_weights, *ctx.features)
    if any(gradient is None for gradient in gradients):
        zeros = empty_vectors(weights, ids, partial(torch.zeros, device=values.device))
        gradients = [zero if gradient is None else gradient for gradient, zero in zip(gradients, zeros, strict=True)]
    weight_gradients = None
    if id_weights is not None and ctx.needs_input_grad[3]:
        weight_gradients = id_weight_gradients(weights, ids, gradients).to(id_weights.dtype)
    sums = [
        TableState(torch.zeros_like(weight, dtype=vector_dtype(weight.dtype)), (), 1, 0)
        if weight.requires_grad
        else TableState(weight, (), 1, 0, is_trained=False)
        for weight in weights
    ]
    update(sums, ids, gradients, SGD(lr=-1.0))
    table_gradients = [
        table.weight.to(weight.dtype) if table.is_trained else None for table, weight in zip(sums, weights, strict=True)
    ]
    return table_gradients, None, None, weight_gradients, None, None

"""Lookup and update of many tables in one call, as torch operators: C++ on the CPU, Triton on the GPU.

The ids are those of all features, one feature after the other, `offsets` saying where each bag begins. Feature f reads
table `tables[f]` and is pooled as `pooling[f]`. Vectors are float32, beside float64 tables float64: the pooled ones
side by side in one tensor, the others one row per id in a tensor each.
"""

import importlib
import importlib.util
import warnings
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
)
from shardwright.kernels.buffers import BufferPool
from shardwright.kernels.compile_exempt import disable_compile
from shardwright.library import native_library
from shardwright.spec.optimizer import HYPERPARAMETERS, SGD, SparseOptimizer, from_hyperparameters, hyperparameters

OPTIMIZER_KINDS = (
    "sgd",
    "adagrad",
    "rowwise_adagrad",
    "adam",
    "partial_rowwise_adam",
    "lamb",
)  # in csrc/embedding.h's order


def lookup(weights: Sequence[Tensor], ids: Ids) -> list[Tensor]:
    """The pooled vectors side by side, then each unpooled feature's; differentiable by the tables and id weights."""
    _operators()
    return torch.ops.shardwright.embedding_lookup(
        list(weights), ids.values, ids.offsets, ids.weights, list(ids.tables), list(ids.pooling)
    )


# Its memory lies outside of any graph.
@disable_compile
def lookup_into(buffers: BufferPool, weights: Sequence[Tensor], ids: Ids) -> list[Tensor]:
    """The same without gradients, into memory that was used before."""
    ids = validate_lookup(weights, ids)
    empty = buffers.allocate if ids.values.device.type == "cpu" else partial(torch.empty, device=ids.values.device)
    vectors = empty_vectors(weights, ids, empty)
    _look_up(vectors, weights, ids)
    return vectors


def sort_lookups(weights: Sequence[Tensor], ids: Ids) -> list[Tensor]:
    """What an update can know from its ids alone; a GPU sorts them here, as early as they are there."""
    triton = _triton(ids)
    return triton.sort_lookups(weights, validate_lookup(weights, ids)) if triton else []


def update(
    tables: Sequence[TableState],
    ids: Ids,
    gradients: Sequence[Tensor],
    optimizer: SparseOptimizer,
    sorted_lookups: Sequence[Tensor] = (),
) -> None:
    """One optimizer step on every row that `ids` names, from the gradients of `lookup`'s result.

    `ordered` is `order` of the same ids, where it was made before.
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
        optimizer.kind,
        list(hyperparameters(optimizer).values()),
        [number for table in tables for number in (table.step, table.rounding_key, table.is_trained)],
    )
    if any(table.changed_rows is not None for table in tables):
        for at, (start, end) in zip(ids.tables, ids.feature_ranges(), strict=True):
            changed = tables[at].changed_rows
            if changed is not None and tables[at].is_trained:
                changed.index_fill_(0, ids.values[start:end].long(), True)


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
        f"{ids}, Tensor? id_weights, {features}, str optimizer, float[] numbers, int[] steps) -> ()"
    )
    operators.define(f"embedding_weight_gradients(Tensor[] weights, Tensor[] gradients, {ids}, {features}) -> Tensor")
    operators.impl("embedding_lookup", _lookup, "CompositeExplicitAutograd")
    operators.impl("embedding_update", _update, "CompositeExplicitAutograd")
    operators.impl("embedding_weight_gradients", _weight_gradients, "CompositeExplicitAutograd")
    operators._register_fake("embedding_lookup", _lookup_fake)
    operators._register_fake("embedding_update", _nothing_fake)
    operators._register_fake("embedding_weight_gradients", _weight_gradients_fake)
    torch.library.register_autograd(
        "shardwright::embedding_lookup", _lookup_backward, setup_context=_keep, lib=operators
    )
    return operators


@cache
def _triton_kernels() -> Any | None:
    if importlib.util.find_spec("triton") is None:
        warnings.warn("no triton in this installation; the slower reference serves on the GPU", stacklevel=2)
        return None
    return importlib.import_module("shardwright.kernels.embedding_triton")


def _triton(ids: Ids) -> Any | None:
    return _triton_kernels() if ids.values.device.type == "cuda" else None


def _lookup(weights, *lookups) -> list[Tensor]:
    ids = validate_lookup(weights, Ids(*lookups))
    vectors = empty_vectors(weights, ids, partial(torch.empty, device=ids.values.device))
    _look_up(vectors, weights, ids)
    return vectors


def _look_up(vectors: Sequence[Tensor], weights: Sequence[Tensor], ids: Ids) -> None:
    native = native_library() if ids.values.device.type == "cpu" else None
    if native is None:
        (_triton(ids) or reference).lookup_all(weights, ids, vectors)
        return
    call = KernelArguments(ids, vectors, [weight.shape[1] for weight in weights])
    rows = table_structs([TableState(weight, (), 0, 0) for weight in weights])
    ids.raise_if_invalid(
        native.shardwright_lookup(rows.ctypes.data, call.features.ctypes.data, call.lookups.ctypes.data)
    )


def _update(weights, state, gradients, ordered, *rest) -> None:
    *lookups, kind, figures, steps = rest
    ids = validate_lookup(weights, Ids(*lookups))
    if kind not in OPTIMIZER_KINDS or len(figures) != len(HYPERPARAMETERS):
        raise UserError(
            f'optimizer "{kind}" with {len(figures)} numbers; wanted '
            f"{len(HYPERPARAMETERS)}{did_you_mean(kind, OPTIMIZER_KINDS)}"
        )
    if len(state) % len(weights) or len(steps) != 3 * len(weights):
        raise UserError(f"{len(state)} tensors of state and {len(steps)} numbers for {len(weights)} tables")
    each, optimizer = len(state) // len(weights), from_hyperparameters(kind, figures)
    states = [
        TableState(weight, state[t * each : (t + 1) * each], step, key, bool(trained))
        for t, (weight, step, key, trained) in enumerate(
            zip(weights, steps[0::3], steps[1::3], steps[2::3], strict=True)
        )
    ]
    validate_state(states, optimizer)
    gradients = prepare_gradients(gradients, weights, ids)
    native = native_library() if ids.values.device.type == "cpu" else None
    if native is None:
        if triton := _triton(ids):
            triton.update_all(states, ids, gradients, optimizer, ordered)
        else:
            reference.update_all(states, ids, gradients, optimizer)
        return
    call = KernelArguments(ids, gradients, [weight.shape[1] for weight in weights])
    rows, settings = table_structs(states), np.array(figures)
    bad = native.shardwright_update(
        rows.ctypes.data,
        len(states),
        call.features.ctypes.data,
        call.lookups.ctypes.data,
        OPTIMIZER_KINDS.index(kind),
        settings.ctypes.data,
    )
    ids.raise_if_invalid(bad)


def _weight_gradients(weights, gradients, values, offsets, tables, pooling) -> Tensor:
    ids = validate_lookup(weights, Ids(values, offsets, None, tables, pooling))
    gradients = prepare_gradients(gradients, weights, ids)
    found = torch.empty(values.numel(), dtype=gradients[0].dtype, device=values.device)
    native = native_library() if values.device.type == "cpu" else None
    if native is None:
        (_triton(ids) or reference).id_weight_gradients_all(weights, ids, gradients, found)
        return found
    call = KernelArguments(ids, gradients, [weight.shape[1] for weight in weights])
    rows = table_structs([TableState(weight, (), 0, 0) for weight in weights])
    features, lookups = call.features.ctypes.data, call.lookups.ctypes.data
    ids.raise_if_invalid(native.shardwright_weight_gradients(rows.ctypes.data, features, lookups, found.data_ptr()))
    return found


# Fakes serve tensors on "meta" too, and are called where only one of them is: that would go unnoticed.
def _nothing_fake(*arguments) -> None:
    check_same_device(
        *(
            each
            for argument in arguments
            for each in (argument if isinstance(argument, list) else [argument])
            if isinstance(each, Tensor)
        )
    )


def _weight_gradients_fake(weights, gradients, values, offsets, tables, pooling) -> Tensor:
    check_same_device(values, offsets, *weights, *gradients)
    return values.new_empty(values.numel(), dtype=vector_dtype(weights[0].dtype))


def _lookup_fake(weights, values, offsets, id_weights, tables, pooling) -> list[Tensor]:
    check_same_device(values, offsets, id_weights, *weights)
    batch = (offsets.numel() - 1) // max(1, len(tables))
    options = {"dtype": vector_dtype(weights[0].dtype), "device": values.device}
    width, sequences = 0, []
    for table, kind in zip(tables, pooling, strict=True):
        dim = weights[table].shape[1]
        if POOLINGS[kind] == "none":
            sequences.append(torch.empty(torch.library.get_ctx().new_dynamic_size(), dim, **options))
        else:
            width += dim
    return [torch.empty(batch, width, **options), *sequences]


def _keep(ctx, inputs, output) -> None:
    ctx.weights, values, offsets, id_weights, *ctx.features = inputs
    ctx.save_for_backward(values, offsets, id_weights)


def _lookup_backward(ctx, gradients):
    """Gradients of whole tables: for tables without an optimizer of their own, as nn.EmbeddingBag has them."""
    weights = ctx.weights
    values, offsets, id_weights = ctx.saved_tensors
    ids = Ids(values, offsets, id_weights, *ctx.features)
    if any(gradient is None for gradient in gradients):
        zeros = empty_vectors(weights, ids, partial(torch.zeros, device=values.device))
        gradients = [none if given is None else given for given, none in zip(gradients, zeros, strict=True)]
    for_weights = None
    if id_weights is not None and ctx.needs_input_grad[3]:
        for_weights = id_weight_gradients(weights, ids, gradients).to(id_weights.dtype)
    summed = [
        TableState(torch.zeros_like(weight, dtype=vector_dtype(weight.dtype)), (), 1, 0)
        if weight.requires_grad
        else TableState(weight, (), 1, 0, is_trained=False)
        for weight in weights
    ]
    update(summed, ids, gradients, SGD(lr=-1.0))
    found = [
        one.weight.to(weight.dtype) if one.is_trained else None for one, weight in zip(summed, weights, strict=True)
    ]
    return found, None, None, for_weights, None, None

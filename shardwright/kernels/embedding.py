"""Lookup and update of many tables in one call, as torch operators: compiled where they can be, the reference elsewhere.

The ids are those of all features, one feature after the other, `offsets` saying where each bag begins. Feature f reads
table `tables[f]` and is pooled as `pooling[f]`. Vectors are float32, beside float64 tables float64: the pooled ones
side by side in one tensor, the others one row per id in a tensor each.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor

from shardwright.errors import UserError
from shardwright.kernels import reference
from shardwright.kernels.library import library
from shardwright.kernels.reference import vector_dtype
from shardwright.spec.optimizer import SGD, SparseOptimizer, from_numbers, numbers, state_shapes
from shardwright.spec.workload import Pooling

POOLINGS = get_args(Pooling)
_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
KINDS = ("sgd", "adagrad", "rowwise_adagrad", "adam", "partial_rowwise_adam", "lamb")  # in csrc/embedding.h's order


class IdOutside(UserError):
    """An id is not a row of its table; the caller knows both by name."""

    def __init__(self, feature: int, id_: int) -> None:
        super().__init__(f"feature {feature}: id {id_} is outside its table")
        self.feature, self.id = feature, id_


@dataclass(frozen=True, slots=True)
class Ids:
    """The ids of all features of a batch, and which table each feature reads."""

    values: Tensor  # (N,) int32 or int64
    offsets: Tensor  # (features * batch + 1,) int64
    weights: Tensor | None
    tables: Sequence[int]
    pooling: Sequence[int]  # indices of POOLINGS

    @property
    def batch(self) -> int:
        return (self.offsets.numel() - 1) // max(1, len(self.tables))

    def spans(self) -> list[tuple[int, int]]:
        """Where each feature's ids begin and end."""
        ends = self.offsets[:: max(1, self.batch)].tolist() if self.batch else [0] * (len(self.tables) + 1)
        return list(zip(ends, ends[1:], strict=False))

    def parts(self) -> list[tuple[Tensor, Tensor, Tensor | None]]:
        """The ids of each feature, their lengths by bag, their weights."""
        lengths = self.offsets.diff().view(len(self.tables), self.batch)
        weights = self.weights
        return [
            (self.values[a:b], lengths[feature], None if weights is None else weights[a:b])
            for feature, (a, b) in enumerate(self.spans())
        ]


def lookup(weights: Sequence[Tensor], ids: Ids) -> list[Tensor]:
    """The pooled vectors side by side, then each unpooled feature's; differentiable by the tables and id weights."""
    _operators()
    return torch.ops.shardwright.embedding_lookup(
        list(weights), ids.values, ids.offsets, ids.weights, list(ids.tables), list(ids.pooling)
    )


@dataclass(frozen=True, slots=True)
class TableState:
    """One table as an update sees it."""

    weight: Tensor
    state: Sequence[Tensor]  # in the order of `state_shapes`
    step: int  # of this update, from 1
    key: int  # of its stochastic rounding
    trained: bool = True


def update(tables: Sequence[TableState], ids: Ids, gradients: Sequence[Tensor], optimizer: SparseOptimizer) -> None:
    """One optimizer step on every row that `ids` names, from the gradients of `lookup`'s result."""
    _operators()
    torch.ops.shardwright.embedding_update(
        [table.weight for table in tables],
        [state for table in tables for state in table.state],
        list(gradients),
        ids.values,
        ids.offsets,
        ids.weights,
        list(ids.tables),
        list(ids.pooling),
        optimizer.kind,
        list(numbers(optimizer).values()),
        [number for table in tables for number in (table.step, table.key, table.trained)],
    )


def weight_gradients(weights: Sequence[Tensor], ids: Ids, gradients: Sequence[Tensor]) -> Tensor:
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
        "embedding_update(Tensor(a!)[] weights, Tensor(b!)[] state, Tensor[] gradients, "
        f"{ids}, Tensor? id_weights, {features}, str optimizer, float[] numbers, int[] steps) -> ()"
    )
    operators.define(
        f"embedding_weight_gradients(Tensor[] weights, Tensor[] gradients, {ids}, {features}) -> Tensor"
    )
    operators.impl("embedding_lookup", _lookup, "CompositeExplicitAutograd")
    operators.impl("embedding_update", _update, "CompositeExplicitAutograd")
    operators.impl("embedding_weight_gradients", _weight_gradients, "CompositeExplicitAutograd")
    operators._register_fake("embedding_lookup", _lookup_fake)
    operators._register_fake("embedding_update", lambda *arguments: None)
    operators._register_fake(
        "embedding_weight_gradients",
        lambda weights, gradients, ids, *rest: ids.new_empty(ids.numel(), dtype=vector_dtype(weights[0].dtype)),
    )
    torch.library.register_autograd(
        "shardwright::embedding_lookup", _lookup_backward, setup_context=_keep, lib=operators
    )
    return operators


def _lookup(weights, values, offsets, id_weights, tables, pooling) -> list[Tensor]:
    ids = _checked(weights, Ids(values, offsets, id_weights, tables, pooling))
    native = library() if values.device.type == "cpu" else None
    vectors = _blank(weights, ids)
    if native is None:
        _reference_lookup(weights, ids, vectors)
        return vectors
    call = _Call(ids, vectors, [weight.shape[1] for weight in weights])
    rows = _table_rows([TableState(weight, (), 0, 0) for weight in weights])
    _refuse(native.shardwright_lookup(rows.ctypes.data, call.features.ctypes.data, call.lookups.ctypes.data), ids)
    return vectors


def _update(weights, state, gradients, values, offsets, id_weights, tables, pooling, kind, figures, steps) -> None:
    ids = _checked(weights, Ids(values, offsets, id_weights, tables, pooling))
    each = len(state) // len(weights)
    states = [
        TableState(weight, state[t * each : (t + 1) * each], *steps[3 * t : 3 * t + 2], bool(steps[3 * t + 2]))
        for t, weight in enumerate(weights)
    ]
    gradients = _fitting(gradients, vector_dtype(weights[0].dtype))
    native = library() if values.device.type == "cpu" else None
    if native is None:
        _reference_update(states, ids, gradients, from_numbers(kind, figures))
        return
    call = _Call(ids, gradients, [weight.shape[1] for weight in weights])
    rows, settings = _table_rows(states), np.array(figures)
    bad = native.shardwright_update(
        rows.ctypes.data,
        len(states),
        call.features.ctypes.data,
        call.lookups.ctypes.data,
        KINDS.index(kind),
        settings.ctypes.data,
    )
    _refuse(bad, ids)


def _weight_gradients(weights, gradients, values, offsets, tables, pooling) -> Tensor:
    ids = _checked(weights, Ids(values, offsets, None, tables, pooling))
    gradients = _fitting(gradients, vector_dtype(weights[0].dtype))
    found = torch.empty(values.numel(), dtype=gradients[0].dtype, device=values.device)
    native = library() if values.device.type == "cpu" else None
    if native is None:
        _reference_weight_gradients(weights, ids, gradients, found)
        return found
    call = _Call(ids, gradients, [weight.shape[1] for weight in weights])
    rows = _table_rows([TableState(weight, (), 0, 0) for weight in weights])
    features, lookups = call.features.ctypes.data, call.lookups.ctypes.data
    _refuse(native.shardwright_weight_gradients(rows.ctypes.data, features, lookups, found.data_ptr()), ids)
    return found


class _Call:
    """The structs of csrc/embedding.h for one call; they live as long as this does."""

    def __init__(self, ids: Ids, vectors: Sequence[Tensor], dims: Sequence[int]) -> None:
        pooled, *sequences = vectors
        rows, column, unpooled = [], 0, iter(sequences)
        for table, pooling in zip(ids.tables, ids.pooling, strict=True):
            if POOLINGS[pooling] == "none":
                sequence = next(unpooled)
                rows.append((table, pooling, sequence.data_ptr(), sequence.stride(0)))
            else:
                rows.append((table, pooling, pooled.data_ptr() + column * pooled.element_size(), pooled.stride(0)))
                column += dims[table]
        self.features = np.array(rows, dtype=np.int64)
        weights = None if ids.weights is None else ids.weights.to(pooled.dtype).contiguous()
        self.kept = (ids, weights, vectors)
        self.lookups = np.array(
            (
                ids.values.data_ptr(),
                ids.values.dtype == torch.int64,
                ids.offsets.data_ptr(),
                0 if weights is None or not weights.numel() else weights.data_ptr(),
                len(rows),
                ids.batch,
            ),
            dtype=np.int64,
        )


def _table_rows(tables: Sequence[TableState]) -> Any:
    rows = []
    for table in tables:
        weight, states = table.weight, [state.data_ptr() for state in table.state]
        first, second = (*states, 0, 0)[:2]
        dtype = _DTYPES.index(weight.dtype)
        key = (table.key + 2**63) % 2**64 - 2**63
        rows.append((weight.data_ptr(), first, second, *weight.shape, dtype, table.step, key, table.trained))
    return np.array(rows, dtype=np.int64)


def _checked(weights: Sequence[Tensor], ids: Ids) -> Ids:
    """What the kernels take for granted, so that no mistake of a caller reaches memory."""
    if ids.values.dtype not in (torch.int32, torch.int64):
        raise UserError(f"ids are {ids.values.dtype}; wanted int32 or int64")
    if ids.offsets.dtype != torch.int64 or not ids.offsets.is_contiguous():
        raise UserError(f"offsets are {ids.offsets.dtype}; wanted int64, in one piece")
    if len(ids.tables) != len(ids.pooling) or (ids.offsets.numel() - 1) % max(1, len(ids.tables)):
        raise UserError(f"{ids.offsets.numel()} offsets do not divide over {len(ids.tables)} features")
    if (total := int(ids.offsets[-1])) != ids.values.numel():
        raise UserError(f"lengths add up to {total}, but there are {ids.values.numel()} ids")
    if ids.weights is not None and ids.weights.shape != ids.values.shape:
        raise UserError(f"{ids.weights.numel()} id weights for {ids.values.numel()} ids")
    for weight in weights:
        if weight.dtype not in _DTYPES or not weight.is_contiguous():
            raise UserError(f"a table is {weight.dtype} with strides {weight.stride()}; wanted floats in one piece")
        if vector_dtype(weight.dtype) != vector_dtype(weights[0].dtype):
            raise UserError("float64 tables beside others: their vectors have no common dtype; look them up apart")
        if weight.device.type == "cpu" and weight.shape[0] > 2**32:
            raise UserError(f"a table of {weight.shape[0]} rows; one device holds 2^32 rows of a table at most")
    return Ids(ids.values.contiguous(), ids.offsets, ids.weights, ids.tables, ids.pooling)


def _fitting(gradients: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Gradients of the vectors' dtype, the columns of each row side by side."""
    found = [gradient.to(dtype) for gradient in gradients]
    return [gradient if gradient.stride(-1) == 1 else gradient.contiguous() for gradient in found]


def _blank(weights: Sequence[Tensor], ids: Ids) -> list[Tensor]:
    dims = [weights[table].shape[1] for table in ids.tables]
    kinds = [POOLINGS[pooling] for pooling in ids.pooling]
    options = {"dtype": vector_dtype(weights[0].dtype), "device": ids.values.device}
    width = sum(dim for dim, kind in zip(dims, kinds, strict=True) if kind != "none")
    sequences = [
        torch.empty(b - a, dim, **options)
        for dim, kind, (a, b) in zip(dims, kinds, ids.spans() if "none" in kinds else [(0, 0)] * len(dims), strict=True)
        if kind == "none"
    ]
    return [torch.empty(ids.batch, width, **options), *sequences]


def _refuse(position: int, ids: Ids) -> None:
    if position >= 0:
        feature = next(f for f, (_, end) in enumerate(ids.spans()) if position < end)
        raise IdOutside(feature, int(ids.values[position]))


def _views(vectors: Sequence[Tensor], ids: Ids, dims: Sequence[int]) -> list[Tensor]:
    """The vectors of each feature."""
    pooled, *sequences = vectors
    widths = [0 if POOLINGS[p] == "none" else dims[table] for table, p in zip(ids.tables, ids.pooling, strict=True)]
    columns, unpooled = accumulate(widths, initial=0), iter(sequences)
    return [
        pooled[:, start : start + width] if width else next(unpooled)
        for start, width in zip(columns, widths, strict=False)
    ]


def _reference_check(weights: Sequence[Tensor], ids: Ids) -> None:
    for feature, ((values, _, _), table) in enumerate(zip(ids.parts(), ids.tables, strict=True)):
        if values.numel():
            low, high = (int(bound) for bound in torch.aminmax(values))
            if low < 0 or high >= weights[table].shape[0]:
                raise IdOutside(feature, low if low < 0 else high)


def _reference_lookup(weights: Sequence[Tensor], ids: Ids, vectors: Sequence[Tensor]) -> None:
    _reference_check(weights, ids)
    views = _views(vectors, ids, [weight.shape[1] for weight in weights])
    for view, (values, lengths, by), table, pooling in zip(views, ids.parts(), ids.tables, ids.pooling, strict=True):
        view.copy_(reference.lookup(weights[table], values, lengths, by, POOLINGS[pooling]))


def _reference_update(
    tables: Sequence[TableState], ids: Ids, gradients: Sequence[Tensor], optimizer: SparseOptimizer
) -> None:
    _reference_check([table.weight for table in tables], ids)
    views = _views(gradients, ids, [table.weight.shape[1] for table in tables])
    received: list[list[tuple[Tensor, Tensor]]] = [[] for _ in tables]
    for view, (values, lengths, by), table, pooling in zip(views, ids.parts(), ids.tables, ids.pooling, strict=True):
        gradient = reference.id_gradients(view, values.numel(), lengths, by, POOLINGS[pooling])
        received[table].append((values, gradient))
    for table, pairs in zip(tables, received, strict=True):
        if table.trained and pairs:
            rows, gradient = (torch.cat(part) for part in zip(*pairs, strict=True))
            names = state_shapes(optimizer, *table.weight.shape)
            reference.update(
                optimizer,
                table.weight,
                dict(zip(names, table.state, strict=True)),
                reference.sum_by_row(rows, gradient),
                step=table.step,
                key=table.key,
            )


def _reference_weight_gradients(
    weights: Sequence[Tensor], ids: Ids, gradients: Sequence[Tensor], found: Tensor
) -> None:
    _reference_check(weights, ids)
    views = _views(gradients, ids, [weight.shape[1] for weight in weights])
    for view, (values, lengths, _), (a, b), table, pooling in zip(
        views, ids.parts(), ids.spans(), ids.tables, ids.pooling, strict=True
    ):
        found[a:b] = reference.weight_gradients(weights[table], values, view, lengths, POOLINGS[pooling])


def _lookup_fake(weights, values, offsets, id_weights, tables, pooling) -> list[Tensor]:
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
    weights, values, offsets, id_weights, tables, pooling = inputs
    ctx.features = tables, pooling
    ctx.weighted = id_weights is not None
    ctx.save_for_backward(*weights, values, offsets, *((id_weights,) if ctx.weighted else ()))


def _lookup_backward(ctx, gradients):
    """Gradients of whole tables: for tables without an optimizer of their own, as nn.EmbeddingBag has them."""
    *weights, values, offsets = ctx.saved_tensors[: -1 if ctx.weighted else None]
    id_weights = ctx.saved_tensors[-1] if ctx.weighted else None
    tables, pooling = ctx.features
    ids = Ids(values, offsets, id_weights, tables, pooling)
    for_weights = None
    if ctx.weighted and ctx.needs_input_grad[3]:
        for_weights = weight_gradients(weights, ids, gradients).to(id_weights.dtype)
    summed = [torch.zeros(weight.shape, dtype=vector_dtype(weight.dtype), device=weight.device) for weight in weights]
    update([TableState(grad, (), 1, 0) for grad in summed], ids, gradients, SGD(lr=-1.0))
    found = [grad.to(weight.dtype) for grad, weight in zip(summed, weights, strict=True)]
    return found, None, None, for_weights, None, None

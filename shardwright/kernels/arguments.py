"""What a call of the embedding kernels takes: ids, tables, and the structs of csrc/embedding.h that point at them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor

from shardwright.errors import UserError
from shardwright.library import native_library
from shardwright.spec.optimizer import SparseOptimizer, state_shapes
from shardwright.spec.workload import Pooling

POOLINGS = get_args(Pooling)
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
MAX_TABLE_ROWS = 2**32  # of one table on one CPU: its sort has rows of 32 bits


def vector_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the vectors of a table, of their gradients and of its optimizer's state."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class IdOutOfRange(UserError):
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
    def batch_size(self) -> int:
        return (self.offsets.numel() - 1) // max(1, len(self.tables))

    def feature_ranges(self) -> list[tuple[int, int]]:
        """Where each feature's ids begin and end."""
        ends = self.offsets[:: max(1, self.batch_size)].tolist() if self.batch_size else [0] * (len(self.tables) + 1)
        return list(zip(ends, ends[1:], strict=False))

    def split_by_feature(self) -> list[tuple[Tensor, Tensor, Tensor | None]]:
        """The ids of each feature, their lengths by bag, their weights."""
        lengths = self.offsets.diff().view(len(self.tables), self.batch_size)
        weights = self.weights
        return [
            (self.values[a:b], lengths[feature], None if weights is None else weights[a:b])
            for feature, (a, b) in enumerate(self.feature_ranges())
        ]

    def raise_if_invalid(self, position: int) -> None:
        """Raise for the id at this position; -1: none is wrong."""
        if position >= 0:
            feature = next(f for f, (_, end) in enumerate(self.feature_ranges()) if position < end)
            raise IdOutOfRange(feature, int(self.values[position]))


@dataclass(frozen=True, slots=True)
class TableState:
    """One table as an update sees it."""

    weight: Tensor
    state: Sequence[Tensor]  # in the order of `state_shapes`
    step: int  # of this update, from 1
    rounding_key: int  # of its stochastic rounding
    is_trained: bool = True
    changed_rows: Tensor | None = None  # (E,) where it is told which rows were updated


class KernelArguments:
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
        self.references = (ids, weights, vectors)
        self.lookups = np.array(
            (
                ids.values.data_ptr(),
                ids.values.dtype == torch.int64,
                ids.offsets.data_ptr(),
                0 if weights is None or not weights.numel() else weights.data_ptr(),
                len(rows),
                ids.batch_size,
            ),
            dtype=np.int64,
        )


def table_structs(tables: Sequence[TableState]) -> Any:
    """The structs of tables."""
    rows = []
    for table in tables:
        weight, states = table.weight, [state.data_ptr() for state in table.state]
        first, second = (*states, 0, 0)[:2]
        dtype = DTYPES.index(weight.dtype)
        key = (table.rounding_key + 2**63) % 2**64 - 2**63
        rows.append((weight.data_ptr(), first, second, *weight.shape, dtype, table.step, key, table.is_trained))
    return np.array(rows, dtype=np.int64)


def check_same_device(*tensors: Tensor | None) -> None:
    """Whether these are dense tensors of one device."""
    found = [tensor for tensor in tensors if tensor is not None]
    if any(tensor.device != found[0].device or tensor.layout != torch.strided for tensor in found):
        where = ", ".join(sorted({f"{tensor.layout} on {tensor.device}" for tensor in found}))
        raise UserError(f"tensors are {where}; wanted dense ones on one device")


def check_materialized(*tensors: Tensor | None) -> None:
    """Whether they have values, too."""
    check_same_device(*tensors)
    if any(tensor is not None and tensor.device.type == "meta" for tensor in tensors):
        raise UserError("tensors on meta have no values")


def validate_ids(ids: Ids, num_tables: int) -> Ids:
    """What the kernels take for granted of ids, so that no mistake of a caller reaches memory."""
    values, offsets, features = ids.values, ids.offsets, len(ids.tables)
    if values.dtype not in (torch.int32, torch.int64) or values.dim() != 1:
        raise UserError(f"ids are {values.dtype} of shape {tuple(values.shape)}; wanted int32 or int64, in a row")
    check_materialized(values, offsets, ids.weights)
    if offsets.dtype != torch.int64 or offsets.dim() != 1 or not offsets.is_contiguous():
        raise UserError(f"offsets are {offsets.dtype} of shape {tuple(offsets.shape)}; wanted int64, in one piece")
    if not offsets.numel() or offsets.numel() != features * ids.batch_size + 1:
        raise UserError(f"{offsets.numel()} offsets do not divide over {features} features")
    if max(values.numel(), offsets.numel()) > MAX_TABLE_ROWS:
        raise UserError(f"{values.numel()} ids in {offsets.numel()} bags; one call takes {MAX_TABLE_ROWS} at most")
    _indices("tables", ids.tables, num_tables)
    _indices("pooling", ids.pooling, len(POOLINGS))
    if len(ids.pooling) != features:
        raise UserError(f"{features} features with {len(ids.pooling)} poolings")
    first, total, falls = _ends(offsets)
    if total != values.numel():
        raise UserError(f"lengths add up to {total}, but there are {values.numel()} ids")
    if first or falls:
        raise UserError(f"offsets begin with {first}{' and fall' * falls}; wanted them ascending from 0")
    if ids.weights is not None and (ids.weights.shape != values.shape or ids.weights.is_complex()):
        raise UserError(f"{ids.weights.numel()} id weights for {values.numel()} ids; wanted a real number for each")
    return replace(ids, values=values.contiguous())


def validate_lookup(weights: Sequence[Tensor], ids: Ids) -> Ids:
    """The same of the tables they are rows of."""
    if not weights:
        raise UserError("no tables to look ids up in")
    check_same_device(ids.values, *weights)
    dtype, cpu = vector_dtype(weights[0].dtype), ids.values.device.type == "cpu"
    for weight in weights:
        shape = weight.shape
        if weight.dtype not in DTYPES or not weight.is_contiguous():
            raise UserError(f"a table is {weight.dtype} with strides {weight.stride()}; wanted floats in one piece")
        if len(shape) != 2 or not shape[1]:
            raise UserError(f"a table is of shape {tuple(shape)}; wanted rows of one column at least")
        if vector_dtype(weight.dtype) != dtype:
            raise UserError("float64 tables beside others: their vectors have no common dtype; look them up apart")
        if cpu and shape[0] > MAX_TABLE_ROWS:
            raise UserError(f"a table of {shape[0]} rows; one holds {MAX_TABLE_ROWS} at most; cut it by rows")
    return validate_ids(ids, len(weights))


def validate_state(tables: Sequence[TableState], optimizer: SparseOptimizer) -> None:
    """Whether each table has this optimizer's state, and a weight of its own."""
    written = [table.weight.data_ptr() for table in tables if table.is_trained and table.weight.numel()]
    if len(set(written)) < len(written):
        raise UserError("two tables share one weight, which each would update: make them one that both features read")
    for table in tables:
        weight, wanted = table.weight, list(state_shapes(optimizer, *table.weight.shape).values())
        check_same_device(weight, *table.state)
        found = [tuple(state.shape) for state in table.state]
        if found != wanted or any(state.dtype != vector_dtype(weight.dtype) for state in table.state):
            raise UserError(
                f"state of shape {found}, {[state.dtype for state in table.state]}; "
                f"{optimizer.kind} wants {wanted}, {vector_dtype(weight.dtype)}"
            )
        if not all(state.is_contiguous() for state in table.state):
            raise UserError(f"state with strides {[state.stride() for state in table.state]}; wanted in one piece")
        if table.is_trained and table.step < 1:
            raise UserError(f"step {table.step} of a table; the first is 1")


def prepare_gradients(gradients: Sequence[Tensor], weights: Sequence[Tensor], ids: Ids) -> list[Tensor]:
    """Gradients of the vectors' shapes and dtype, the columns of each row side by side."""
    check_same_device(ids.values, *gradients)
    found, wanted = [tuple(gradient.shape) for gradient in gradients], vector_shapes(weights, ids)
    if found != wanted:
        raise UserError(f"gradients of shape {found}; wanted {wanted}")
    if any(gradient.is_complex() for gradient in gradients):
        raise UserError(f"gradients are {[gradient.dtype for gradient in gradients]}; wanted real numbers")
    found = [gradient.to(vector_dtype(weights[0].dtype)) for gradient in gradients]
    return [gradient if gradient.stride(-1) == 1 else gradient.contiguous() for gradient in found]


def vector_shapes(weights: Sequence[Tensor], ids: Ids) -> list[tuple[int, int]]:
    """Of the pooled vectors side by side, then of each unpooled feature's."""
    dims = [weights[table].shape[1] for table in ids.tables]
    pooled = [POOLINGS[pooling] != "none" for pooling in ids.pooling]
    width = sum(dim for dim, it in zip(dims, pooled, strict=True) if it)
    spans = ids.feature_ranges() if not all(pooled) else [(0, 0)] * len(dims)
    return [(ids.batch_size, width), *((b - a, d) for (a, b), d, it in zip(spans, dims, pooled, strict=True) if not it)]


def concat_with_decay(tensors: Sequence[Tensor], decay: float) -> Tensor:
    """The rows of several tensors, all but those of the last times `fade`."""
    found = torch.cat(list(tensors))
    found[: len(found) - len(tensors[-1])] *= decay
    return found


def empty_vectors(weights: Sequence[Tensor], ids: Ids, empty: Callable[..., Tensor] = torch.empty) -> list[Tensor]:
    """Where a lookup's vectors go."""
    dtype = vector_dtype(weights[0].dtype)
    return [empty(*shape, dtype=dtype) for shape in vector_shapes(weights, ids)]


def _indices(what: str, found: Sequence[int], end: int) -> None:
    if found and not 0 <= min(found) <= max(found) < end:
        raise UserError(f"{what} {list(found)}; wanted 0 to {end - 1}")


def _ends(offsets: Tensor) -> tuple[int, int, bool]:
    """The first, the last, and whether any is below the one before: one transfer where they lie on a GPU."""
    native = native_library() if offsets.device.type == "cpu" else None
    if native is not None:
        return int(offsets[0]), int(offsets[-1]), bool(native.shardwright_falls(offsets.data_ptr(), offsets.numel()))
    first, last, falls = torch.stack((offsets[0], offsets[-1], (offsets[1:] < offsets[:-1]).sum())).tolist()
    return first, last, falls > 0

"""What a call of the embedding kernels takes: ids, tables, and the structs of csrc/embedding.h that point at them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor

from shardwright.errors import UserError
from shardwright.spec.workload import Pooling

POOLINGS = get_args(Pooling)
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
MOST_ROWS = 2**32  # of one table on one CPU: its sort has rows of 32 bits


def vector_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the vectors of a table, of their gradients and of its optimizer's state."""
    return torch.float64 if dtype == torch.float64 else torch.float32


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

    def refuse(self, position: int) -> None:
        """Raise for the id at this position; -1: none is wrong."""
        if position >= 0:
            feature = next(f for f, (_, end) in enumerate(self.spans()) if position < end)
            raise IdOutside(feature, int(self.values[position]))


@dataclass(frozen=True, slots=True)
class TableState:
    """One table as an update sees it."""

    weight: Tensor
    state: Sequence[Tensor]  # in the order of `state_shapes`
    step: int  # of this update, from 1
    key: int  # of its stochastic rounding
    trained: bool = True


class Call:
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


def table_rows(tables: Sequence[TableState]) -> Any:
    """The structs of tables."""
    rows = []
    for table in tables:
        weight, states = table.weight, [state.data_ptr() for state in table.state]
        first, second = (*states, 0, 0)[:2]
        dtype = DTYPES.index(weight.dtype)
        key = (table.key + 2**63) % 2**64 - 2**63
        rows.append((weight.data_ptr(), first, second, *weight.shape, dtype, table.step, key, table.trained))
    return np.array(rows, dtype=np.int64)


def checked(weights: Sequence[Tensor], ids: Ids) -> Ids:
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
        if weight.dtype not in DTYPES or not weight.is_contiguous():
            raise UserError(f"a table is {weight.dtype} with strides {weight.stride()}; wanted floats in one piece")
        if vector_dtype(weight.dtype) != vector_dtype(weights[0].dtype):
            raise UserError("float64 tables beside others: their vectors have no common dtype; look them up apart")
        if weight.device.type == "cpu" and weight.shape[0] > MOST_ROWS:
            raise UserError(f"a table of {weight.shape[0]} rows; one holds {MOST_ROWS} at most; cut it by rows")
    return Ids(ids.values.contiguous(), ids.offsets, ids.weights, ids.tables, ids.pooling)


def fitting(gradients: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Gradients of the vectors' dtype, the columns of each row side by side."""
    found = [gradient.to(dtype) for gradient in gradients]
    return [gradient if gradient.stride(-1) == 1 else gradient.contiguous() for gradient in found]


def blank(weights: Sequence[Tensor], ids: Ids, empty: Callable[..., Tensor] = torch.empty) -> list[Tensor]:
    """Where a lookup's vectors go."""
    dims = [weights[table].shape[1] for table in ids.tables]
    kinds = [POOLINGS[pooling] for pooling in ids.pooling]
    dtype = vector_dtype(weights[0].dtype)
    width = sum(dim for dim, kind in zip(dims, kinds, strict=True) if kind != "none")
    sizes = [b - a for a, b in ids.spans()] if "none" in kinds else [0] * len(dims)
    sequences = [
        empty(size, dim, dtype=dtype) for dim, kind, size in zip(dims, kinds, sizes, strict=True) if kind == "none"
    ]
    return [empty(ids.batch, width, dtype=dtype), *sequences]

"""Arguments of the embedding kernels: ids, tables, and the structs of csrc/embedding.h for them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor

from shardwright.errors import UserError
from shardwright.kernels.cuda_copies import to_device
from shardwright.library import native_library
from shardwright.spec.optimizer import SparseOptimizer, state_shapes
from shardwright.spec.workload import Pooling

POOLINGS = get_args(Pooling)
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
MAX_TABLE_ROWS = 2**32  # of a table on a CPU: the native sort holds row numbers in 32 bits


def vector_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of a table's vectors, of their gradients and of its optimizer's state."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class IdOutOfRange(UserError):
    """An id is not a row of its table; callers add the names of the feature and of the table."""

    def __init__(self, feature: int, id_: int) -> None:
        super().__init__(f"feature {feature}: id {id_} is outside its table")
        self.feature, self.id = feature, id_


@dataclass(frozen=True, slots=True)
class Ids:
    """The ids of all features of a batch, and which table each feature reads."""

    values: Tensor  # (N,) int32 or int64
    offsets: Tensor  # (features * batch + 1,) int64
    weights: Tensor | None  # (N,) weights of the ids in their bags
    tables: Sequence[int]  # index of each feature's table
    pooling: Sequence[int]  # index of each feature's pooling in POOLINGS
    # By feature, its ids are known to be from 0 to below it, and offsets to be right: see `with_bounds`.
    bounds: Sequence[int] | None = field(default=None, init=False)

    @property
    def batch_size(self) -> int:
        """Bags per feature."""
        return (self.offsets.numel() - 1) // max(1, len(self.tables))

    def feature_ranges(self) -> list[tuple[int, int]]:
        """(start, end) of each feature's ids in `values`."""
        bounds = self.offsets[:: max(1, self.batch_size)].tolist() if self.batch_size else [0] * (len(self.tables) + 1)
        return list(zip(bounds, bounds[1:], strict=False))

    def split_by_feature(self) -> list[tuple[Tensor, Tensor, Tensor | None]]:
        """The ids, bag lengths and id weights of each feature."""
        lengths = self.offsets.diff().view(len(self.tables), self.batch_size)
        weights = self.weights
        return [
            (self.values[start:end], lengths[feature], None if weights is None else weights[start:end])
            for feature, (start, end) in enumerate(self.feature_ranges())
        ]

    def raise_if_invalid(self, position: int) -> None:
        """Raise IdOutOfRange for the id at this position; -1 means that all ids are valid."""
        if position >= 0:
            feature = next(i for i, (_, end) in enumerate(self.feature_ranges()) if position < end)
            raise IdOutOfRange(feature, int(self.values[position]))


@dataclass(frozen=True, slots=True)
class TableState:
    """One table as an update sees it."""

    weight: Tensor
    state: Sequence[Tensor]  # in the order of `state_shapes`
    step: int  # of this update, from 1
    rounding_key: int  # seeds its stochastic rounding
    is_trained: bool = True
    changed_rows: Tensor | None = None  # (E,) bool, set to True for the rows that an update changes
    row_numbers: Tensor | None = (
        None  # (E,) int64, by which 16-bit values are rounded, if `weight` has lines of a cache
    )


class KernelArguments:
    """The structs of csrc/embedding.h for one call; keep the object alive during the call."""

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
    """The tables as structs of csrc/embedding.h."""
    rows = []
    for table in tables:
        weight, states = table.weight, [state.data_ptr() for state in table.state]
        first, second = (*states, 0, 0)[:2]
        dtype = DTYPES.index(weight.dtype)
        key = (table.rounding_key + 2**63) % 2**64 - 2**63
        numbers = 0 if table.row_numbers is None else table.row_numbers.data_ptr()
        rows.append(
            (weight.data_ptr(), first, second, *weight.shape, dtype, table.step, key, table.is_trained, numbers)
        )
    return np.array(rows, dtype=np.int64)


def sized_structs(table_rows: Sequence[int]) -> Any:
    """As `table_structs`, of tables of which only the numbers of rows are read."""
    return np.array([(0, 0, 0, rows, 1, 1, 0, 0, 1, 0) for rows in table_rows], dtype=np.int64)


def check_same_device(*tensors: Tensor | None) -> None:
    """Raise unless all tensors are strided and on one device."""
    given = [tensor for tensor in tensors if tensor is not None]
    if any(tensor.device != given[0].device or tensor.layout != torch.strided for tensor in given):
        layouts = ", ".join(sorted({f"{tensor.layout} on {tensor.device}" for tensor in given}))
        raise UserError(f"tensors are {layouts}; wanted strided tensors on one device")


def check_materialized(*tensors: Tensor | None) -> None:
    """Raise unless all tensors are strided, on one device, and have values."""
    check_same_device(*tensors)
    if any(tensor is not None and tensor.device.type == "meta" for tensor in tensors):
        raise UserError("tensors on the meta device have no values; pass tensors on a CPU or GPU")


def validate_ids(ids: Ids, num_tables: int) -> Ids:
    """Check what the kernels assume about ids, so that a caller's mistake cannot corrupt memory."""
    values, offsets, features = ids.values, ids.offsets, len(ids.tables)
    if values.dtype not in (torch.int32, torch.int64) or values.dim() != 1:
        raise UserError(f"ids are {values.dtype} of shape {tuple(values.shape)}; wanted 1-d int32 or int64")
    check_materialized(values, offsets, ids.weights)
    if offsets.dtype != torch.int64 or offsets.dim() != 1 or not offsets.is_contiguous():
        raise UserError(f"offsets are {offsets.dtype} of shape {tuple(offsets.shape)}; wanted int64, 1-d, contiguous")
    if not offsets.numel() or offsets.numel() != features * ids.batch_size + 1:
        raise UserError(f"{offsets.numel()} offsets for {features} features; wanted features * batch size + 1")
    if max(values.numel(), offsets.numel()) > MAX_TABLE_ROWS:
        raise UserError(f"{values.numel()} ids in {offsets.numel()} bags; one call takes {MAX_TABLE_ROWS} at most")
    _check_indices("tables", ids.tables, num_tables)
    _check_indices("pooling", ids.pooling, len(POOLINGS))
    if len(ids.pooling) != features:
        raise UserError(f"{features} features with {len(ids.pooling)} poolings; wanted one for each")
    if ids.weights is not None and (ids.weights.shape != values.shape or ids.weights.is_complex()):
        raise UserError(f"{ids.weights.numel()} id weights for {values.numel()} ids; wanted a real number for each")
    if ids.bounds is not None and values.device.type != "cpu":
        return with_bounds(replace(ids, values=values.contiguous()), ids.bounds)
    first, total, decreases = _offset_bounds(offsets)
    if total != values.numel():
        raise UserError(f"lengths add up to {total}, but there are {values.numel()} ids")
    if first or decreases:
        raise UserError(f"offsets begin with {first}{' and decrease' * decreases}; wanted ascending from 0")
    return with_bounds(replace(ids, values=values.contiguous()), ids.bounds)


def validate_lookup(weights: Sequence[Tensor], ids: Ids) -> Ids:
    """Check the tables of a lookup, and its ids with `validate_ids`."""
    if not weights:
        raise UserError("no tables to look ids up in")
    check_same_device(ids.values, *weights)
    dtype, on_cpu = vector_dtype(weights[0].dtype), ids.values.device.type == "cpu"
    for weight in weights:
        shape = weight.shape
        if weight.dtype not in DTYPES or not weight.is_contiguous():
            raise UserError(f"a table is {weight.dtype} with strides {weight.stride()}; wanted contiguous floats")
        if len(shape) != 2 or not shape[1]:
            raise UserError(f"a table is of shape {tuple(shape)}; wanted (rows, columns) with at least one column")
        if vector_dtype(weight.dtype) != dtype:
            raise UserError("float64 tables and others in one call: their vectors have no common dtype; split the call")
        if on_cpu and shape[0] > MAX_TABLE_ROWS:
            raise UserError(f"a table of {shape[0]} rows; at most {MAX_TABLE_ROWS} on one CPU; shard it row-wise")
    ids = validate_ids(ids, len(weights))
    _check_bounds(ids, [weight.shape[0] for weight in weights])
    return ids


def with_bounds(ids: Ids, bounds: Sequence[int] | None) -> Ids:
    """The same ids, known to be within these bounds, or not: kernels on a GPU then check neither them nor offsets.
    `replace` forgets bounds."""
    if bounds is not None:
        ids = replace(ids)
        object.__setattr__(ids, "bounds", bounds)
    return ids


def ids_on(ids: Ids, device: torch.device) -> Ids:
    """The ids on a device. Ids that move from the CPU get bounds, so that kernels on a GPU need not check them."""
    if ids.values.device.type == device.type:
        return ids
    parts = [part for part, _, _ in ids.split_by_feature()]
    is_known = ids.values.device.type == "cpu" and all(int(part.min()) >= 0 for part in parts if len(part))
    bounds = [int(part.max()) + 1 if len(part) else 0 for part in parts] if is_known else None
    weights = None if ids.weights is None else to_device(ids.weights, device)
    moved = replace(ids, values=to_device(ids.values, device), offsets=to_device(ids.offsets, device), weights=weights)
    return with_bounds(moved, bounds)


def _check_bounds(ids: Ids, rows: Sequence[int]) -> None:
    if ids.bounds is not None and len(ids.bounds) != len(ids.tables):
        raise UserError(f"{len(ids.tables)} features with {len(ids.bounds)} bounds; wanted one for each")
    for feature, bound in enumerate(ids.bounds or ()):
        if bound > rows[ids.tables[feature]]:
            raise IdOutOfRange(feature, bound - 1)


def validate_state(tables: Sequence[TableState], optimizer: SparseOptimizer) -> None:
    """Check that each table has the state of this optimizer and that trained tables share no weight."""
    addresses = [table.weight.data_ptr() for table in tables if table.is_trained and table.weight.numel()]
    if len(set(addresses)) < len(addresses):
        raise UserError("two tables share one weight and would both update it: declare one table for both features")
    for table in tables:
        weight, expected = table.weight, list(state_shapes(optimizer, *table.weight.shape).values())
        check_same_device(weight, *table.state)
        shapes = [tuple(state.shape) for state in table.state]
        if shapes != expected or any(state.dtype != vector_dtype(weight.dtype) for state in table.state):
            raise UserError(
                f"state of shape {shapes}, {[state.dtype for state in table.state]}; "
                f"{optimizer.kind} needs {expected}, {vector_dtype(weight.dtype)}"
            )
        if not all(state.is_contiguous() for state in table.state):
            raise UserError(f"state with strides {[state.stride() for state in table.state]}; wanted contiguous")
        if table.is_trained and table.step < 1:
            raise UserError(f"a table's step is {table.step}; steps count from 1")
        numbers = table.row_numbers
        if numbers is None:
            continue
        if (numbers.dtype, *numbers.shape) != (torch.int64, len(weight)) or not numbers.is_contiguous():
            raise UserError(f"row numbers are {numbers.dtype} {tuple(numbers.shape)}; wanted int64 ({len(weight)},)")


def prepare_gradients(gradients: Sequence[Tensor], weights: Sequence[Tensor], ids: Ids) -> list[Tensor]:
    """Check the gradients' shapes, convert them to the vectors' dtype, make each row contiguous."""
    check_same_device(ids.values, *gradients)
    shapes, expected = [tuple(gradient.shape) for gradient in gradients], vector_shapes(weights, ids)
    if shapes != expected:
        raise UserError(f"gradients of shape {shapes}; wanted {expected}")
    if any(gradient.is_complex() for gradient in gradients):
        raise UserError(f"gradients are {[gradient.dtype for gradient in gradients]}; wanted real numbers")
    converted = [gradient.to(vector_dtype(weights[0].dtype)) for gradient in gradients]
    return [gradient if gradient.stride(-1) == 1 else gradient.contiguous() for gradient in converted]


def vector_shapes(weights: Sequence[Tensor], ids: Ids) -> list[tuple[int, int]]:
    """Shape of the concatenated pooled vectors, then of each unpooled feature's rows."""
    dims = [weights[table].shape[1] for table in ids.tables]
    pooled = [POOLINGS[pooling] != "none" for pooling in ids.pooling]
    width = sum(dim for dim, is_pooled in zip(dims, pooled, strict=True) if is_pooled)
    ranges = ids.feature_ranges() if not all(pooled) else [(0, 0)] * len(dims)
    return [(ids.batch_size, width), *((b - a, d) for (a, b), d, p in zip(ranges, dims, pooled, strict=True) if not p)]


def concat_with_decay(tensors: Sequence[Tensor], decay: float) -> Tensor:
    """Concatenate tensors; all but the last are multiplied by `decay`."""
    concatenated = torch.cat(list(tensors))
    concatenated[: len(concatenated) - len(tensors[-1])] *= decay
    return concatenated


def empty_vectors(weights: Sequence[Tensor], ids: Ids, empty: Callable[..., Tensor] = torch.empty) -> list[Tensor]:
    """Uninitialized tensors for the vectors of a lookup."""
    dtype = vector_dtype(weights[0].dtype)
    return [empty(*shape, dtype=dtype) for shape in vector_shapes(weights, ids)]


def _check_indices(name: str, indices: Sequence[int], end: int) -> None:
    if indices and not 0 <= min(indices) <= max(indices) < end:
        raise UserError(f"{name} {list(indices)}; wanted indices from 0 to {end - 1}")


def _offset_bounds(offsets: Tensor) -> tuple[int, int, bool]:
    """First and last offset, and whether any offset is below its predecessor; one transfer from a GPU."""
    native = native_library() if offsets.device.type == "cpu" else None
    if native is not None:
        return int(offsets[0]), int(offsets[-1]), bool(native.shardwright_falls(offsets.data_ptr(), offsets.numel()))
    first, last, num_decreases = torch.stack((offsets[0], offsets[-1], (offsets[1:] < offsets[:-1]).sum())).tolist()
    return first, last, num_decreases > 0

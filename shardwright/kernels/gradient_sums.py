"""Gradients of a batch summed by row, for updates that first sum over replicas or column shards.

Shape legend: U distinct rows of a table, D its columns.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from shardwright.kernels import embedding
from shardwright.kernels.arguments import (
    Ids,
    KernelArguments,
    TableState,
    ids_on,
    prepare_gradients,
    table_structs,
    validate_lookup,
)
from shardwright.kernels.dedup import unique_rows
from shardwright.library import native_library
from shardwright.spec.optimizer import SGD

SUM_OPTIMIZER = SGD(lr=-1.0)  # one step turns a table of zeros into the sums of its gradients


@dataclass(frozen=True, slots=True)
class GradientSums:
    """Summed gradients of the rows that a batch touched, table by table: `counts` rows each, ascending."""

    rows_U: Tensor
    counts: list[int]
    sums: list[Tensor]  # (U, D) of each table


def sum_gradients(weights: Sequence[Tensor], ids: Ids, gradients: Sequence[Tensor]) -> GradientSums:
    """Sum the gradients of each distinct row, in batch order."""
    ids = validate_lookup(weights, ids)
    gradients = prepare_gradients(gradients, weights, ids)
    native = native_library() if ids.values.device.type == "cpu" else None
    if native is None:
        rows_U, counts, inverse = unique_rows(ids, [len(weight) for weight in weights])
        positions = to_table_positions(replace(ids, values=inverse), counts)
        return GradientSums(
            rows_U, counts, sum_at_positions(positions, gradients, counts, [weight.shape[1] for weight in weights])
        )
    call = KernelArguments(ids, gradients, [weight.shape[1] for weight in weights])
    tables = table_structs([TableState(weight, (), 0, 0) for weight in weights])
    counts_array = np.zeros(len(weights), dtype=np.int64)
    bad_position = np.zeros(1, dtype=np.int64)
    handle = native.shardwright_sums_counted(
        tables.ctypes.data,
        len(weights),
        call.features.ctypes.data,
        call.lookups.ctypes.data,
        counts_array.ctypes.data,
        bad_position.ctypes.data,
    )
    ids.raise_if_invalid(int(bad_position[0]))
    counts = counts_array.tolist()
    rows_U = torch.empty(sum(counts), dtype=torch.int64)
    sums = [gradients[0].new_empty(count, weight.shape[1]) for count, weight in zip(counts, weights, strict=True)]
    by_table = (rows_U.split(counts), sums)
    pointers = np.array([[tensor.data_ptr() for tensor in tensors] for tensors in by_table], dtype=np.int64)
    native.shardwright_sums_taken(handle, pointers[0].ctypes.data, pointers[1].ctypes.data)
    return GradientSums(rows_U, counts, sums)


def sum_at_positions(ids: Ids, gradients: Sequence[Tensor], counts: Sequence[int], dims: Sequence[int]) -> list[Tensor]:
    """Summed gradients of distinct rows; ids are positions among the distinct rows of each table."""
    like = gradients[0]
    zeros = [
        torch.zeros(count, dim, dtype=like.dtype, device=like.device) for count, dim in zip(counts, dims, strict=True)
    ]
    add_at_positions(ids, gradients, zeros)
    return zeros


def add_at_positions(ids: Ids, gradients: Sequence[Tensor], zeros: Sequence[Tensor]) -> None:
    """Add the gradients of rows into tables of zeros, in place; ids are positions in these tables."""
    ids = ids_on(ids, gradients[0].device)
    embedding.update([TableState(zero, (), 1, 0) for zero in zeros], ids, gradients, SUM_OPTIMIZER)


def to_table_positions(ids: Ids, counts: Sequence[int]) -> Ids:
    """Convert positions among the distinct rows of all tables to positions within each table."""
    return replace(ids, values=ids.values - _first_positions(ids, counts))


def to_global_positions(ids: Ids, counts: Sequence[int]) -> Ids:
    """Convert positions within each table to positions among the distinct rows of all tables."""
    return replace(ids, values=ids.values + _first_positions(ids, counts))


def _first_positions(ids: Ids, counts: Sequence[int]) -> Tensor:
    """(N,) for each id, the position of its table's first row among the distinct rows of all tables."""
    begins = torch.tensor([0, *counts]).cumsum(0)[:-1]
    sizes = torch.tensor([end - start for start, end in ids.feature_ranges()])
    shift = begins[torch.tensor(list(ids.tables), dtype=torch.int64)].repeat_interleave(sizes)
    return shift.to(ids.values.device)

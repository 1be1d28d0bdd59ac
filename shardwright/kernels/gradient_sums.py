"""The gradients of a batch summed by row: where an update begins if more is to be known of a row before its step.

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
    prepare_gradients,
    table_structs,
    validate_lookup,
)
from shardwright.kernels.dedup import unique_rows
from shardwright.library import native_library
from shardwright.spec.optimizer import SGD

SUM_OPTIMIZER = SGD(lr=-1.0)  # an update of zeros by it leaves the sums of gradients


@dataclass(frozen=True, slots=True)
class GradientSums:
    """The summed gradients of the rows that a batch touched, table by table: `counts` rows of each, ascending."""

    rows_U: Tensor
    counts: list[int]
    sums: list[Tensor]  # (U, D) of each table


def sum_gradients(weights: Sequence[Tensor], ids: Ids, gradients: Sequence[Tensor]) -> GradientSums:
    """Each row that the ids name once, with the sum of its gradients in the order of the batch."""
    ids = validate_lookup(weights, ids)
    gradients = prepare_gradients(gradients, weights, ids)
    native = native_library() if ids.values.device.type == "cpu" else None
    if native is None:
        rows_U, counts, inverse = unique_rows(ids, [len(weight) for weight in weights])
        places = to_table_positions(replace(ids, values=inverse), counts)
        return GradientSums(
            rows_U, counts, sum_at_positions(places, gradients, counts, [weight.shape[1] for weight in weights])
        )
    call = KernelArguments(ids, gradients, [weight.shape[1] for weight in weights])
    tables = table_structs([TableState(weight, (), 0, 0) for weight in weights])
    found = np.zeros(len(weights), dtype=np.int64)
    outside = np.zeros(1, dtype=np.int64)
    counted = native.shardwright_sums_counted(
        tables.ctypes.data,
        len(weights),
        call.features.ctypes.data,
        call.lookups.ctypes.data,
        found.ctypes.data,
        outside.ctypes.data,
    )
    ids.raise_if_invalid(int(outside[0]))
    counts = found.tolist()
    rows_U = torch.empty(sum(counts), dtype=torch.int64)
    sums = [gradients[0].new_empty(count, weight.shape[1]) for count, weight in zip(counts, weights, strict=True)]
    into = np.array([[part.data_ptr() for part in parts] for parts in (rows_U.split(counts), sums)], dtype=np.int64)
    native.shardwright_sums_taken(counted, into[0].ctypes.data, into[1].ctypes.data)
    return GradientSums(rows_U, counts, sums)


def sum_at_positions(ids: Ids, gradients: Sequence[Tensor], counts: Sequence[int], dims: Sequence[int]) -> list[Tensor]:
    """The summed gradients of distinct rows, where ids are places among those of each table."""
    zeros = [torch.zeros(count, dim, dtype=gradients[0].dtype) for count, dim in zip(counts, dims, strict=True)]
    add_at_positions(ids, gradients, zeros)
    return zeros


def add_at_positions(ids: Ids, gradients: Sequence[Tensor], zeros: Sequence[Tensor]) -> None:
    """The summed gradients of rows into tables of zeros."""
    embedding.update([TableState(zero, (), 1, 0) for zero in zeros], ids, gradients, SUM_OPTIMIZER)


def to_table_positions(ids: Ids, counts: Sequence[int]) -> Ids:
    """Places among all distinct rows as places among those of each feature's table."""
    return replace(ids, values=ids.values - _begins(ids, counts))


def to_global_positions(ids: Ids, counts: Sequence[int]) -> Ids:
    """The other way round."""
    return replace(ids, values=ids.values + _begins(ids, counts))


def _begins(wanted: Ids, counts: Sequence[int]) -> Tensor:
    """For each id, where its table begins among all."""
    begins = torch.tensor([0, *counts]).cumsum(0)[:-1]
    sizes = torch.tensor([end - start for start, end in wanted.feature_ranges()])
    shift = begins[torch.tensor(list(wanted.tables), dtype=torch.int64)].repeat_interleave(sizes)
    return shift.to(wanted.values.device)

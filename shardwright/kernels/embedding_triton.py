"""Lookup and update of many tables on the GPU in a few launches, as kernels/reference.py defines them.

An update first sorts the lookups by row (`sort_lookups`, which needs only the ids and so can run early). The gradients
of a row with few lookups are summed in its update; those of a row with many are first summed in chunks. Every sum has a
fixed order and there are no atomics, so results are bitwise reproducible.

Shape legend: N lookups.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from types import MappingProxyType
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from shardwright.kernels import row_kernels_triton
from shardwright.kernels.arguments import DTYPES, Ids, TableState, vector_dtype
from shardwright.kernels.cuda_copies import to_device
from shardwright.kernels.reference import bag_of_id, vectors_by_feature
from shardwright.kernels.rounding import step_key
from shardwright.spec.optimizer import SparseOptimizer, hyperparameters

# Elements in a program's tile, and its warps: the fastest on an H200.
LOOKUP_TILE, LOOKUP_WARPS = 256, 1
UPDATE_TILE, UPDATE_WARPS = 512, 2
CHUNK = row_kernels_triton.CHUNK_LOOKUPS.value
MAX_INT32 = 2**31 - 1
LOCATED = 1024  # lookups of a program that locates gradients
MAX_TILE_COLUMNS = 256  # in the tile of a lookup; the tile of an update has full rows
TRITON_DTYPES = MappingProxyType(
    {torch.float64: tl.float64, torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
)


def lookup_all(weights: Sequence[Tensor], ids: Ids, vectors: Sequence[Tensor]) -> None:
    """Look up all features into `vectors`, in place; one launch per dtype of tables."""
    tables = _table_structs([TableState(weight, (), 0, 0) for weight in weights])
    features, id_weights = _feature_structs(weights, ids, vectors)
    sizes = (
        [end - start for start, end in ids.feature_ranges()]
        if row_kernels_triton.NONE.value in ids.pooling
        else [ids.batch_size]
    )
    columns = min(MAX_TILE_COLUMNS, _next_power(max(weight.shape[1] for weight in weights)))
    bags = max(1, LOOKUP_TILE // columns)
    column_tiles = triton.cdiv(max(weight.shape[1] for weight in weights), columns)
    for dtype in {weight.dtype for weight in weights}:
        chosen_features = [feature for feature, table in enumerate(ids.tables) if weights[table].dtype == dtype]
        grid = (triton.cdiv(max(ids.batch_size, *sizes), bags), len(chosen_features), column_tiles)
        if not all(grid):
            continue
        first_invalid = torch.empty(grid, dtype=torch.int64, device=ids.values.device)
        row_kernels_triton.pool_rows[grid](
            features,
            tables,
            _to_device(chosen_features, ids.values.device),
            ids.values,
            ids.offsets,
            id_weights,
            first_invalid,
            ids.batch_size,
            W=TRITON_DTYPES[dtype],
            A=TRITON_DTYPES[vector_dtype(dtype)],
            WEIGHTED=ids.weights is not None,
            BAGS=bags,
            COLUMNS=columns,
            num_warps=LOOKUP_WARPS,
            enable_fp_fusion=False,
        )
        if ids.bounds is None and (position := int(first_invalid.min())) != row_kernels_triton.NO_ID.value:
            ids.raise_if_invalid(position)


def sort_lookups(weights: Sequence[Tensor], ids: Ids) -> list[Tensor]:
    """Sort the lookups by row: what an update needs besides the gradients. Raises for invalid ids.

    A run is the lookups of one row; there are N runs, the surplus ones empty. Returns the lookups' positions ordered by
    run; each run's start; each lookup's bag; each run's first chunk; each chunk's run.
    """
    device, lookups = ids.values.device, ids.values.numel()
    bags_N = _valid_bags(weights, ids)
    table_starts = list(accumulate((weight.shape[0] for weight in weights), initial=0))
    first_rows_N = _to_device([table_starts[table] for table in ids.tables], device)[bags_N // max(1, ids.batch_size)]
    keys_N = first_rows_N + ids.values
    keys_N = keys_N.int() if table_starts[-1] < MAX_INT32 else keys_N  # sorted twice as fast
    keys_N, positions_N = torch.sort(keys_N, stable=True)
    runs_N = torch.cat([keys_N.new_zeros(min(1, lookups)), (keys_N[1:] != keys_N[:-1]).cumsum(0)])
    starts = torch.searchsorted(runs_N, torch.arange(lookups + 1, device=device))
    lengths, short = starts.diff(), row_kernels_triton.SHORT_RUN.value
    chunk_ends = torch.where(lengths > short, (lengths + CHUNK - 1) // CHUNK, 0).cumsum(0)
    most_chunks = lookups // CHUNK + lookups // (short + 1)  # at most one chunk of a run is not full
    runs_of_chunks = torch.searchsorted(chunk_ends, torch.arange(most_chunks, device=device), right=True)
    first_chunks = torch.cat([chunk_ends.new_zeros(min(1, lookups)), chunk_ends[:-1]])
    return [positions_N, starts, bags_N, first_chunks, runs_of_chunks]


def update_all(
    states: Sequence[TableState],
    ids: Ids,
    gradients: Sequence[Tensor],
    optimizer: SparseOptimizer,
    sorted_lookups: Sequence[Tensor] | None = None,
) -> None:
    """One optimizer step of all trained tables, in place; one update launch per dtype of tables."""
    weights = [state.weight for state in states]
    positions, starts, bags, first_chunks, runs_of_chunks = sorted_lookups or sort_lookups(weights, ids)
    if not ids.values.numel():
        return
    tables = _table_structs(states)
    columns = _next_power(max(weight.shape[1] for weight in weights))
    dtype = vector_dtype(weights[0].dtype)
    located = _locate_gradients(weights, ids, gradients, positions, bags)
    sums = torch.empty(max(1, runs_of_chunks.numel()), columns, dtype=dtype, device=ids.values.device)
    if runs_of_chunks.numel():
        grid, chunks = (runs_of_chunks.numel(),), (first_chunks, runs_of_chunks, starts.numel() - 1, sums)
        row_kernels_triton.sum_chunks[grid](
            tables, starts, *located, *chunks, A=TRITON_DTYPES[dtype], COLUMNS=columns, enable_fp_fusion=False
        )
        row_kernels_triton.sum_chunk_sums[grid](starts, *chunks, A=TRITON_DTYPES[dtype], COLUMNS=columns)
    settings_by_name = hyperparameters(optimizer)
    settings, corrections = _setting_tensors(settings_by_name, states, dtype, ids.values.device)
    rows = max(1, UPDATE_TILE // columns)
    for dtype_index, weight_dtype in enumerate(DTYPES):
        if not any(weight.dtype == weight_dtype for weight in weights):
            continue
        row_kernels_triton.update_rows[(triton.cdiv(starts.numel() - 1, rows),)](
            tables,
            starts,
            *located,
            positions,
            ids.values,
            first_chunks,
            starts.numel() - 1,
            sums,
            settings,
            corrections,
            W=TRITON_DTYPES[weight_dtype],
            DTYPE_INDEX=dtype_index,
            OPTIMIZER=optimizer.kind,
            HAS_MOMENTUM=settings_by_name["momentum"] != 0,
            L2=settings_by_name["weight_decay"] != 0 and not settings_by_name["decoupled"] and optimizer.kind != "lamb",
            DECOUPLED=settings_by_name["weight_decay"] != 0 and bool(settings_by_name["decoupled"]),
            CLIPPED=settings_by_name["clip"] > 0,
            BATCH_ROWS=rows,
            A=TRITON_DTYPES[dtype],
            COLUMNS=columns,
            num_warps=UPDATE_WARPS,
            enable_fp_fusion=False,  # products and sums rounded one by one, as on the CPU
        )


def id_weight_gradients_all(weights: Sequence[Tensor], ids: Ids, gradients: Sequence[Tensor], out: Tensor) -> None:
    """The gradient of each id's weight, into `out` (N,)."""
    bags, lookups = _valid_bags(weights, ids), ids.values.numel()
    tables = _table_structs([TableState(weight, (), 0, 0) for weight in weights])
    unweighted, positions = replace(ids, weights=None), torch.arange(lookups, device=bags.device)
    located = _locate_gradients(weights, unweighted, gradients, positions, bags)
    columns = _next_power(max(weight.shape[1] for weight in weights))
    rows = max(1, UPDATE_TILE // columns)
    for dtype_index, weight_dtype in enumerate(DTYPES):
        if lookups and any(weight.dtype == weight_dtype for weight in weights):
            row_kernels_triton.dot_rows_with_gradients[(triton.cdiv(lookups, rows),)](
                tables,
                ids.values,
                *located,
                lookups,
                out,
                W=TRITON_DTYPES[weight_dtype],
                DTYPE_INDEX=dtype_index,
                BATCH_ROWS=rows,
                A=TRITON_DTYPES[vector_dtype(weight_dtype)],
                COLUMNS=columns,
            )


def _locate_gradients(
    weights: Sequence[Tensor], ids: Ids, gradients: Sequence[Tensor], positions: Tensor, bags: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """For each lookup in the order of `positions`: the address of its row's gradient, its factor, its table."""
    features, id_weights = _feature_structs(weights, ids, gradients)
    lookups, dtype = positions.numel(), gradients[0].dtype
    addresses = torch.empty_like(positions)
    scales, tables = addresses.new_empty(lookups, dtype=dtype), addresses.new_empty(lookups, dtype=torch.int32)
    if lookups:
        row_kernels_triton.locate_gradients[(triton.cdiv(lookups, LOCATED),)](
            features,
            positions,
            bags,
            ids.offsets,
            id_weights,
            ids.batch_size,
            lookups,
            addresses,
            scales,
            tables,
            A=TRITON_DTYPES[dtype],
            WEIGHTED=ids.weights is not None,
            BLOCK=LOCATED,
            enable_fp_fusion=False,
        )
    return addresses, scales, tables


def _valid_bags(weights: Sequence[Tensor], ids: Ids) -> Tensor:
    """(N,) bag of each lookup; raises IdOutOfRange for an id outside its table."""
    bags_N = bag_of_id(ids.offsets.diff(), ids.values.numel())
    if ids.bounds is not None:
        return bags_N
    rows = _to_device([weights[table].shape[0] for table in ids.tables], ids.values.device)
    rows_N = rows[bags_N // max(1, ids.batch_size)]
    outside = ((ids.values < 0) | (ids.values >= rows_N)).nonzero()
    if outside.numel():
        ids.raise_if_invalid(int(outside[0]))
    return bags_N


def _feature_structs(weights: Sequence[Tensor], ids: Ids, vectors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """The features' fields, and the id weights in the vectors' dtype."""
    views = vectors_by_feature(vectors, ids, [weight.shape[1] for weight in weights])
    rows = [
        (view.data_ptr(), view.stride(0), kind, table)
        for view, kind, table in zip(views, ids.pooling, ids.tables, strict=True)
    ]
    id_weights = ids.values if ids.weights is None else ids.weights.to(vectors[0].dtype).contiguous()
    return _to_device(rows, ids.values.device), id_weights


def _table_structs(states: Sequence[TableState]) -> Tensor:
    rows = []
    for table in states:
        first, second = (*[state.data_ptr() for state in table.state], 0, 0)[:2]
        dtype, key = DTYPES.index(table.weight.dtype), step_key(table.rounding_key, table.step)
        numbers = 0 if table.row_numbers is None else table.row_numbers.data_ptr()
        fields = (first, second, *table.weight.shape, dtype, table.is_trained, key, numbers)
        rows.append((table.weight.data_ptr(), *fields))
    return _to_device(rows, states[0].weight.device)


def _setting_tensors(
    settings_by_name: dict[str, float], tables: Sequence[TableState], dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """The optimizer's settings, and each table's two bias corrections, as tensors on the device."""
    lr, eps, beta1, beta2, momentum, decay, clip, _ = settings_by_name.values()
    settings = [lr, eps, beta1, beta2, 1 - beta1, 1 - beta2, momentum, decay, clip]
    corrections = [[1 - beta1**table.step, 1 - beta2**table.step] for table in tables]
    return _to_device(settings, device, dtype), _to_device(corrections, device, dtype)


def _to_device(rows: Any, device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    return to_device(torch.tensor(rows, dtype=dtype), device)


def _next_power(size: int) -> int:
    """The next power of 2, at least 16."""
    return max(16, triton.next_power_of_2(size))

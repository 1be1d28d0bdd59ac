"""Lookup and update of many tables on the GPU: what kernels/reference.py says, in a few launches for all tables.

An update first puts the lookups of each row side by side (`order`, which needs the ids alone and so may be done early).
Rows of few lookups are summed where they are updated; longer ones in chunks, and the chunks' sums once more. Every sum
has one order and nothing is added by atomics, so that a step gives the same bits every time.
"""

from collections.abc import Sequence
from itertools import accumulate
from types import MappingProxyType
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from shardwright.kernels import row_kernels_triton
from shardwright.kernels.arguments import DTYPES, Ids, TableState, vector_dtype
from shardwright.kernels.reference import bag_of_id, vectors_by_feature
from shardwright.kernels.rounding import step_key
from shardwright.spec.optimizer import SparseOptimizer, hyperparameters

TILE_ELEMENTS = 1024  # of one program's tile
MAX_TILE_COLUMNS = 256  # of a lookup's tile; an update's has the whole row
TRITON_DTYPES = MappingProxyType(
    {torch.float64: tl.float64, torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
)


def lookup_all(weights: Sequence[Tensor], ids: Ids, vectors: Sequence[Tensor]) -> None:
    tables = _tables([TableState(weight, (), 0, 0) for weight in weights])
    features, id_weights = _features(weights, ids, vectors)
    sizes = (
        [b - a for a, b in ids.feature_ranges()] if row_kernels_triton.NONE.value in ids.pooling else [ids.batch_size]
    )
    columns = min(MAX_TILE_COLUMNS, _power(max(weight.shape[1] for weight in weights)))
    bags = max(1, TILE_ELEMENTS // columns)
    across = triton.cdiv(max(weight.shape[1] for weight in weights), columns)
    for dtype in {weight.dtype for weight in weights}:
        which = [f for f, table in enumerate(ids.tables) if weights[table].dtype == dtype]
        grid = (triton.cdiv(max(ids.batch_size, *sizes), bags), len(which), across)
        if not all(grid):
            continue
        wrong = torch.empty(grid, dtype=torch.int64, device=ids.values.device)
        row_kernels_triton.pool_rows[grid](
            features,
            tables,
            _on(which, ids.values.device),
            ids.values,
            ids.offsets,
            id_weights,
            wrong,
            ids.batch_size,
            W=TRITON_DTYPES[dtype],
            A=TRITON_DTYPES[vector_dtype(dtype)],
            WEIGHTED=ids.weights is not None,
            BAGS=bags,
            COLUMNS=columns,
        )
        if (first := int(wrong.min())) != row_kernels_triton.NO_ID.value:
            ids.raise_if_invalid(first)


def sort_lookups(weights: Sequence[Tensor], ids: Ids) -> list[Tensor]:
    """Where the lookups of each row lie: what an update needs beside the gradients. Wrong ids are refused here.

    For runs of lookups of one row, as many as there are lookups, the surplus empty: the lookups' positions by run; each
    run's beginning; each lookup's bag; each run's first chunk; each chunk's run.
    """
    device, lookups = ids.values.device, ids.values.numel()
    bags_N = _checked_bags(weights, ids)
    before = list(accumulate((weight.shape[0] for weight in weights), initial=0))
    first_rows_N = _on([before[table] for table in ids.tables], device)[bags_N // max(1, ids.batch_size)]
    keys_N, positions_N = torch.sort(first_rows_N + ids.values, stable=True)
    runs_N = torch.cat([keys_N.new_zeros(min(1, lookups)), (keys_N[1:] != keys_N[:-1]).cumsum(0)])
    starts = torch.searchsorted(runs_N, torch.arange(lookups + 1, device=device))
    lengths = starts.diff()
    chunks = torch.where(
        lengths > row_kernels_triton.CHUNK_LOOKUPS.value,
        (lengths + row_kernels_triton.CHUNK_LOOKUPS.value - 1) // row_kernels_triton.CHUNK_LOOKUPS.value,
        0,
    ).cumsum(0)
    runs_of_chunks = torch.searchsorted(
        chunks, torch.arange(2 * lookups // row_kernels_triton.CHUNK_LOOKUPS.value, device=device), right=True
    )
    firsts = torch.cat([chunks.new_zeros(min(1, lookups)), chunks[:-1]])
    return [positions_N, starts, bags_N, firsts, runs_of_chunks]


def update_all(
    states: Sequence[TableState],
    ids: Ids,
    gradients: Sequence[Tensor],
    optimizer: SparseOptimizer,
    sorted_lookups: Sequence[Tensor] | None = None,
) -> None:
    weights = [state.weight for state in states]
    positions, starts, bags, firsts, runs_of_chunks = sorted_lookups or sort_lookups(weights, ids)
    if not ids.values.numel():
        return
    tables = _tables(states)
    features, id_weights = _features(weights, ids, gradients)
    columns = _power(max(weight.shape[1] for weight in weights))
    dtype = vector_dtype(weights[0].dtype)
    sums = torch.empty(max(1, runs_of_chunks.numel()), columns, dtype=dtype, device=ids.values.device)
    lookups = (features, tables, positions, starts, bags, ids.offsets, id_weights, ids.batch_size)
    kinds = {"A": TRITON_DTYPES[dtype], "WEIGHTED": ids.weights is not None, "COLUMNS": columns}
    if runs_of_chunks.numel():
        grid, chunks = (runs_of_chunks.numel(),), (firsts, runs_of_chunks, starts.numel() - 1, sums)
        row_kernels_triton.sum_chunks[grid](*lookups, *chunks, **kinds)
        row_kernels_triton.sum_chunk_sums[grid](starts, *chunks, A=TRITON_DTYPES[dtype], COLUMNS=columns)
    figures = hyperparameters(optimizer)
    settings, corrections = _figures(figures, states, dtype, ids.values.device)
    rows = max(1, TILE_ELEMENTS // columns)
    for index, stored in enumerate(DTYPES):
        if not any(weight.dtype == stored for weight in weights):
            continue
        row_kernels_triton.update_rows[(triton.cdiv(starts.numel() - 1, rows),)](
            *lookups,
            ids.values,
            firsts,
            starts.numel() - 1,
            sums,
            settings,
            corrections,
            W=TRITON_DTYPES[stored],
            DTYPE_INDEX=index,
            OPTIMIZER=optimizer.kind,
            HAS_MOMENTUM=figures["momentum"] != 0,
            L2=figures["weight_decay"] != 0 and not figures["decoupled"] and optimizer.kind != "lamb",
            DECOUPLED=figures["weight_decay"] != 0 and bool(figures["decoupled"]),
            CLIPPED=figures["clip"] > 0,
            BATCH_ROWS=rows,
            **kinds,
        )


def id_weight_gradients_all(weights: Sequence[Tensor], ids: Ids, gradients: Sequence[Tensor], out: Tensor) -> None:
    bags, lookups = _checked_bags(weights, ids), ids.values.numel()
    features, _ = _features(weights, ids, gradients)
    tables = _tables([TableState(weight, (), 0, 0) for weight in weights])
    columns = _power(max(weight.shape[1] for weight in weights))
    rows = max(1, TILE_ELEMENTS // columns)
    for index, stored in enumerate(DTYPES):
        if lookups and any(weight.dtype == stored for weight in weights):
            row_kernels_triton.dot_rows_with_gradients[(triton.cdiv(lookups, rows),)](
                features,
                tables,
                ids.values,
                bags,
                ids.offsets,
                ids.batch_size,
                lookups,
                out,
                W=TRITON_DTYPES[stored],
                DTYPE_INDEX=index,
                BATCH_ROWS=rows,
                A=TRITON_DTYPES[vector_dtype(stored)],
                COLUMNS=columns,
            )


def _checked_bags(weights: Sequence[Tensor], ids: Ids) -> Tensor:
    """Each lookup's bag; an id outside its table is refused."""
    bags_N = bag_of_id(ids.offsets.diff(), ids.values.numel())
    rows = _on([weights[table].shape[0] for table in ids.tables], ids.values.device)
    rows_N = rows[bags_N // max(1, ids.batch_size)]
    outside = ((ids.values < 0) | (ids.values >= rows_N)).nonzero()
    if outside.numel():
        ids.raise_if_invalid(int(outside[0]))
    return bags_N


def _features(weights: Sequence[Tensor], ids: Ids, vectors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """The features' fields, and the id weights in the vectors' dtype."""
    parts = vectors_by_feature(vectors, ids, [weight.shape[1] for weight in weights])
    rows = [
        (part.data_ptr(), part.stride(0), kind, table)
        for part, kind, table in zip(parts, ids.pooling, ids.tables, strict=True)
    ]
    id_weights = ids.values if ids.weights is None else ids.weights.to(vectors[0].dtype).contiguous()
    return _on(rows, ids.values.device), id_weights


def _tables(states: Sequence[TableState]) -> Tensor:
    rows = []
    for one in states:
        first, second = (*[state.data_ptr() for state in one.state], 0, 0)[:2]
        dtype, key = DTYPES.index(one.weight.dtype), step_key(one.rounding_key, one.step)
        rows.append((one.weight.data_ptr(), first, second, *one.weight.shape, dtype, one.is_trained, key))
    return _on(rows, states[0].weight.device)


def _figures(
    figures: dict[str, float], states: Sequence[TableState], dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    lr, eps, beta1, beta2, momentum, decay, clip, _ = figures.values()
    settings = [lr, eps, beta1, beta2, 1 - beta1, 1 - beta2, momentum, decay, clip]
    corrections = [[1 - beta1**state.step, 1 - beta2**state.step] for state in states]
    return _on(settings, device, dtype), _on(corrections, device, dtype)


def _on(rows: Any, device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    made = torch.tensor(rows, dtype=dtype)
    return made.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else made


def _power(size: int) -> int:
    return max(16, triton.next_power_of_2(size))

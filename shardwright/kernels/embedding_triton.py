"""Lookup and update of many tables on the GPU: what kernels/reference.py says, in a few launches for all tables.

An update first puts the lookups of each row side by side (`order`, which needs the ids alone and so may be done early).
Rows of few lookups are summed where they are updated; longer ones in chunks, and the chunks' sums once more. Every sum
has one order and nothing is added by atomics, so that a step gives the same bits every time.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from shardwright.kernels.calls import DTYPES, POOLINGS, Ids, TableState, vector_dtype
from shardwright.kernels.reference import bag_of_id, views
from shardwright.kernels.rounding import start_of_keys
from shardwright.spec.optimizer import SparseOptimizer, numbers

ELEMENTS = 1024  # of one program's tile
MOST_COLUMNS = 256  # of a lookup's tile; an update's has the whole row
TYPES = {torch.float64: tl.float64, torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}

CHUNK = tl.constexpr(32)  # lookups of one row that one program sums
NO_ID = tl.constexpr(2**62)
MEAN, NONE = (tl.constexpr(POOLINGS.index(kind)) for kind in ("mean", "none"))
# What the kernels read of a feature and of a table: rows of int64.
VECTORS, STRIDE, KIND, TABLE, FEATURE_FIELDS = (tl.constexpr(at) for at in range(5))
WEIGHT, STATE, STATE_2, ROWS, DIM, DTYPE, TRAINED, KEY, TABLE_FIELDS = (tl.constexpr(at) for at in range(9))
# And of an optimizer, in the vectors' dtype, before each table's two corrections of bias.
LR, EPS, BETA1, BETA2, REST1, REST2, MOMENTUM, DECAY, CLIP, SETTINGS = (tl.constexpr(at) for at in range(10))


def lookup_all(weights: Sequence[Tensor], ids: Ids, vectors: Sequence[Tensor]) -> None:
    tables = _tables([TableState(weight, (), 0, 0) for weight in weights])
    features, id_weights = _features(weights, ids, vectors)
    sizes = [b - a for a, b in ids.spans()] if NONE.value in ids.pooling else [ids.batch]
    columns = min(MOST_COLUMNS, _power(max(weight.shape[1] for weight in weights)))
    bags = max(1, ELEMENTS // columns)
    across = triton.cdiv(max(weight.shape[1] for weight in weights), columns)
    for dtype in {weight.dtype for weight in weights}:
        which = [f for f, table in enumerate(ids.tables) if weights[table].dtype == dtype]
        grid = (triton.cdiv(max(ids.batch, *sizes), bags), len(which), across)
        if not all(grid):
            continue
        wrong = torch.empty(grid, dtype=torch.int64, device=ids.values.device)
        _pool[grid](
            features,
            tables,
            _on(which, ids.values.device),
            ids.values,
            ids.offsets,
            id_weights,
            wrong,
            ids.batch,
            W=TYPES[dtype],
            A=TYPES[vector_dtype(dtype)],
            WEIGHTED=ids.weights is not None,
            BAGS=bags,
            COLUMNS=columns,
        )
        if (first := int(wrong.min())) != NO_ID.value:
            ids.refuse(first)


def order(weights: Sequence[Tensor], ids: Ids) -> list[Tensor]:
    """Where the lookups of each row lie: what an update needs beside the gradients. Wrong ids are refused here.

    For runs of lookups of one row, as many as there are lookups, the surplus empty: the lookups' positions by run; each
    run's beginning; each lookup's bag; each run's first chunk; each chunk's run.
    """
    device, lookups = ids.values.device, ids.values.numel()
    bags_N = _checked_bags(weights, ids)
    before = list(accumulate((weight.shape[0] for weight in weights), initial=0))
    first_rows_N = _on([before[table] for table in ids.tables], device)[bags_N // max(1, ids.batch)]
    keys_N, positions_N = torch.sort(first_rows_N + ids.values, stable=True)
    runs_N = torch.cat([keys_N.new_zeros(min(1, lookups)), (keys_N[1:] != keys_N[:-1]).cumsum(0)])
    starts = torch.searchsorted(runs_N, torch.arange(lookups + 1, device=device))
    lengths = starts.diff()
    chunks = torch.where(lengths > CHUNK.value, (lengths + CHUNK.value - 1) // CHUNK.value, 0).cumsum(0)
    runs_of_chunks = torch.searchsorted(chunks, torch.arange(2 * lookups // CHUNK.value, device=device), right=True)
    firsts = torch.cat([chunks.new_zeros(min(1, lookups)), chunks[:-1]])
    return [positions_N, starts, bags_N, firsts, runs_of_chunks]


def update_all(
    states: Sequence[TableState],
    ids: Ids,
    gradients: Sequence[Tensor],
    optimizer: SparseOptimizer,
    ordered: Sequence[Tensor] | None = None,
) -> None:
    weights = [state.weight for state in states]
    positions, starts, bags, firsts, runs_of_chunks = ordered or order(weights, ids)
    if not ids.values.numel():
        return
    tables = _tables(states)
    features, id_weights = _features(weights, ids, gradients)
    columns = _power(max(weight.shape[1] for weight in weights))
    dtype = vector_dtype(weights[0].dtype)
    sums = torch.empty(max(1, runs_of_chunks.numel()), columns, dtype=dtype, device=ids.values.device)
    lookups = (features, tables, positions, starts, bags, ids.offsets, id_weights, ids.batch)
    kinds = {"A": TYPES[dtype], "WEIGHTED": ids.weights is not None, "COLUMNS": columns}
    if runs_of_chunks.numel():
        grid, chunks = (runs_of_chunks.numel(),), (firsts, runs_of_chunks, starts.numel() - 1, sums)
        _sum_chunks[grid](*lookups, *chunks, **kinds)
        _sum_sums[grid](starts, *chunks, A=TYPES[dtype], COLUMNS=columns)
    figures = numbers(optimizer)
    settings, corrections = _figures(figures, states, dtype, ids.values.device)
    rows = max(1, ELEMENTS // columns)
    for index, stored in enumerate(DTYPES):
        if not any(weight.dtype == stored for weight in weights):
            continue
        _update[(triton.cdiv(starts.numel() - 1, rows),)](
            *lookups,
            ids.values,
            firsts,
            starts.numel() - 1,
            sums,
            settings,
            corrections,
            W=TYPES[stored],
            DTYPE_INDEX=index,
            OPTIMIZER=optimizer.kind,
            HAS_MOMENTUM=figures["momentum"] != 0,
            L2=figures["weight_decay"] != 0 and not figures["decoupled"] and optimizer.kind != "lamb",
            DECOUPLED=figures["weight_decay"] != 0 and bool(figures["decoupled"]),
            CLIPPED=figures["clip"] > 0,
            BATCH_ROWS=rows,
            **kinds,
        )


def weight_gradients_all(weights: Sequence[Tensor], ids: Ids, gradients: Sequence[Tensor], found: Tensor) -> None:
    bags, lookups = _checked_bags(weights, ids), ids.values.numel()
    features, _ = _features(weights, ids, gradients)
    tables = _tables([TableState(weight, (), 0, 0) for weight in weights])
    columns = _power(max(weight.shape[1] for weight in weights))
    rows = max(1, ELEMENTS // columns)
    for index, stored in enumerate(DTYPES):
        if lookups and any(weight.dtype == stored for weight in weights):
            _dot[(triton.cdiv(lookups, rows),)](
                features,
                tables,
                ids.values,
                bags,
                ids.offsets,
                ids.batch,
                lookups,
                found,
                W=TYPES[stored],
                DTYPE_INDEX=index,
                BATCH_ROWS=rows,
                A=TYPES[vector_dtype(stored)],
                COLUMNS=columns,
            )


def _checked_bags(weights: Sequence[Tensor], ids: Ids) -> Tensor:
    """Each lookup's bag; an id outside its table is refused."""
    bags_N = bag_of_id(ids.offsets.diff(), ids.values.numel())
    rows = _on([weights[table].shape[0] for table in ids.tables], ids.values.device)
    rows_N = rows[bags_N // max(1, ids.batch)]
    outside = ((ids.values < 0) | (ids.values >= rows_N)).nonzero()
    if outside.numel():
        ids.refuse(int(outside[0]))
    return bags_N


def _features(weights: Sequence[Tensor], ids: Ids, vectors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """The features' fields, and the id weights in the vectors' dtype."""
    parts = views(vectors, ids, [weight.shape[1] for weight in weights])
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
        dtype, key = DTYPES.index(one.weight.dtype), start_of_keys(one.key, one.step)
        rows.append((one.weight.data_ptr(), first, second, *one.weight.shape, dtype, one.trained, key))
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


@triton.jit
def _divided(a, b, A: tl.constexpr):
    if A == tl.float32:
        return tl.div_rn(a, b)
    else:
        return a / b


@triton.jit
def _root(a, A: tl.constexpr):
    if A == tl.float32:
        return tl.sqrt_rn(a)
    else:
        return tl.sqrt(a)


@triton.jit
def _pool(
    features,
    tables,
    which,
    values,
    offsets,
    id_weights,
    wrong,
    batch,
    W: tl.constexpr,
    A: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BAGS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Some columns of some bags (ids, where they are not pooled) of one feature."""
    at = tl.load(which + tl.program_id(1))
    feature = features + at * FEATURE_FIELDS
    kind = tl.load(feature + KIND)
    table = tables + tl.load(feature + TABLE) * TABLE_FIELDS
    rows, dim = tl.load(table + ROWS), tl.load(table + DIM)
    weight = tl.load(table + WEIGHT).to(tl.pointer_type(W))
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    bag = (tl.program_id(0) * BAGS + tl.arange(0, BAGS)).to(tl.int64)
    start = tl.load(offsets + at * batch)
    here = bag < tl.where(kind == NONE, tl.load(offsets + at * batch + batch) - start, batch)
    pooled = bag < tl.where(kind == NONE, 0, batch)
    begin = tl.where(pooled, tl.load(offsets + at * batch + bag, mask=pooled, other=0), start + bag)
    length = tl.where(pooled, tl.load(offsets + at * batch + bag + 1, mask=pooled, other=0) - begin, here.to(tl.int64))
    sums = tl.zeros([BAGS, COLUMNS], A)
    first_wrong = tl.full([BAGS], NO_ID, tl.int64)
    for place in range(0, tl.max(length, 0)):
        has = place < length
        id_ = tl.load(values + begin + place, mask=has, other=0).to(tl.int64)
        right = (id_ >= 0) & (id_ < rows)
        first_wrong = tl.minimum(first_wrong, tl.where(has & (right == 0), begin + place, NO_ID))
        wanted = (has & right)[:, None] & (column < dim)[None, :]
        row = tl.load(weight + id_[:, None] * dim + column[None, :], mask=wanted, other=0.0).to(A)
        if WEIGHTED:
            row = row * tl.load(id_weights + begin + place, mask=has, other=0.0)[:, None]
        sums += row
    if kind == MEAN:
        sums = _divided(sums, tl.broadcast_to(tl.maximum(length, 1).to(A)[:, None], [BAGS, COLUMNS]), A)
    vectors = tl.load(feature + VECTORS).to(tl.pointer_type(A)) + bag[:, None] * tl.load(feature + STRIDE)
    tl.store(vectors + column[None, :], sums, mask=here[:, None] & (column < dim)[None, :])
    program = (tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)) * tl.num_programs(2) + tl.program_id(2)
    tl.store(wrong + program, tl.min(first_wrong, 0))


@triton.jit
def _table_of(position, has, features, bags, batch):
    """The number of the table that each lookup reads."""
    bag = tl.load(bags + position, mask=has, other=0)
    return tl.load(features + bag // batch * FEATURE_FIELDS + TABLE, mask=has, other=0)


@triton.jit
def _gradients(
    position,
    has,
    dim,
    features,
    bags,
    offsets,
    id_weights,
    batch,
    A: tl.constexpr,
    WEIGHTED: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """The gradient of each lookup's row."""
    bag = tl.load(bags + position, mask=has, other=0)
    at = bag // batch
    feature = features + at * FEATURE_FIELDS
    kind = tl.load(feature + KIND, mask=has, other=0)
    start = tl.load(offsets + at * batch, mask=has, other=0)
    place = tl.where(kind == NONE, position - start, bag - at * batch)
    vectors = tl.load(feature + VECTORS, mask=has, other=0).to(tl.pointer_type(A))
    vectors += place * tl.load(feature + STRIDE, mask=has, other=0)
    length = tl.load(offsets + bag + 1, mask=has, other=1) - tl.load(offsets + bag, mask=has, other=0)
    one = tl.full(length.shape, 1.0, A)
    scale = tl.where(kind == MEAN, _divided(one, tl.maximum(length, 1).to(A), A), one)
    if WEIGHTED:
        scale *= tl.load(id_weights + position, mask=has, other=0.0)
    column = tl.arange(0, COLUMNS)
    wanted = has[:, None] & (column[None, :] < dim[:, None])
    return tl.load(vectors[:, None] + column[None, :], mask=wanted, other=0.0) * scale[:, None]


@triton.jit
def _dot(
    features,
    tables,
    values,
    bags,
    offsets,
    batch,
    lookups,
    found,
    W: tl.constexpr,
    DTYPE_INDEX: tl.constexpr,
    BATCH_ROWS: tl.constexpr,
    A: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """The gradient of each id's weight: its row times the gradient that the row would have without it."""
    position = tl.program_id(0).to(tl.int64) * BATCH_ROWS + tl.arange(0, BATCH_ROWS)
    has = position < lookups
    table = tables + _table_of(position, has, features, bags, batch) * TABLE_FIELDS
    has &= tl.load(table + DTYPE, mask=has, other=-1) == DTYPE_INDEX
    dim = tl.load(table + DIM, mask=has, other=0)
    grad = _gradients(position, has, dim, features, bags, offsets, values, batch, A, False, COLUMNS)
    column = tl.arange(0, COLUMNS)
    row = tl.load(values + position, mask=has, other=0).to(tl.int64)
    weight = tl.load(table + WEIGHT, mask=has, other=0).to(tl.pointer_type(W))[:, None]
    cell = (row * dim)[:, None] + column[None, :]
    weight = tl.load(weight + cell, mask=has[:, None] & (column[None, :] < dim[:, None]), other=0.0).to(A)
    tl.store(found + position, tl.sum(weight * grad, 1), mask=has)


@triton.jit
def _sum_chunks(
    features,
    tables,
    positions,
    starts,
    bags,
    offsets,
    id_weights,
    batch,
    firsts,
    runs_of_chunks,
    runs,
    sums,
    A: tl.constexpr,
    WEIGHTED: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    chunk = tl.program_id(0)
    run = tl.load(runs_of_chunks + chunk)
    if run < runs:
        at = tl.load(starts + run) + (chunk - tl.load(firsts + run)) * CHUNK + tl.arange(0, CHUNK)
        has = at < tl.load(starts + run + 1)
        position = tl.load(positions + at, mask=has, other=0)
        table = tables + _table_of(position, has, features, bags, batch) * TABLE_FIELDS
        dim = tl.load(table + DIM, mask=has, other=0)
        found = _gradients(position, has, dim, features, bags, offsets, id_weights, batch, A, WEIGHTED, COLUMNS)
        tl.store(sums + chunk * COLUMNS + tl.arange(0, COLUMNS), tl.sum(found, 0))


@triton.jit
def _sum_sums(starts, firsts, runs_of_chunks, runs, sums, A: tl.constexpr, COLUMNS: tl.constexpr):
    """The sums of a run's chunks, into the first of them."""
    chunk = tl.program_id(0)
    run = tl.load(runs_of_chunks + chunk)
    if tl.load(firsts + run, mask=run < runs, other=-1) == chunk:
        chunks = (tl.load(starts + run + 1) - tl.load(starts + run) + CHUNK - 1) // CHUNK
        column = tl.arange(0, COLUMNS)
        total = tl.zeros([COLUMNS], A)
        for begin in range(0, chunks, CHUNK):
            at = begin + tl.arange(0, CHUNK)
            part = sums + (chunk + at)[:, None] * COLUMNS + column[None, :]
            total += tl.sum(tl.load(part, mask=(at < chunks)[:, None], other=0.0), 0)
        tl.store(sums + chunk * COLUMNS + column, total)


@triton.jit
def _update(
    features,
    tables,
    positions,
    starts,
    bags,
    offsets,
    id_weights,
    batch,
    values,
    firsts,
    runs,
    sums,
    settings,
    corrections,
    W: tl.constexpr,
    DTYPE_INDEX: tl.constexpr,
    OPTIMIZER: tl.constexpr,
    HAS_MOMENTUM: tl.constexpr,
    L2: tl.constexpr,
    DECOUPLED: tl.constexpr,
    CLIPPED: tl.constexpr,
    BATCH_ROWS: tl.constexpr,
    A: tl.constexpr,
    WEIGHTED: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """The step of some rows: their gradients summed, the optimizer's formula, weights and state written once."""
    run = tl.program_id(0).to(tl.int64) * BATCH_ROWS + tl.arange(0, BATCH_ROWS)
    begin = tl.load(starts + run, mask=run < runs, other=runs)
    if tl.min(begin, 0) >= runs:
        return
    end = tl.load(starts + run + 1, mask=run < runs, other=runs)
    has = begin < end
    position = tl.load(positions + begin, mask=has, other=0)
    number = _table_of(position, has, features, bags, batch)
    table = tables + number * TABLE_FIELDS
    has &= (tl.load(table + DTYPE, mask=has, other=-1) == DTYPE_INDEX) & (
        tl.load(table + TRAINED, mask=has, other=0) != 0
    )
    dim = tl.load(table + DIM, mask=has, other=1)
    short = has & (end - begin <= CHUNK)
    column = tl.arange(0, COLUMNS)
    longer = has & (end - begin > CHUNK)
    chunk = tl.load(firsts + run, mask=run < runs, other=0)
    grad = tl.load(sums + chunk[:, None] * COLUMNS + column[None, :], mask=longer[:, None], other=0.0)
    for place in range(0, tl.max(tl.where(short, end - begin, 0), 0)):
        here = short & (begin + place < end)
        position = tl.load(positions + begin + place, mask=here, other=0)
        grad += _gradients(position, here, dim, features, bags, offsets, id_weights, batch, A, WEIGHTED, COLUMNS)

    position = tl.load(positions + begin, mask=has, other=0)
    row = tl.load(values + position, mask=has, other=0).to(tl.int64)
    cell = (row * dim)[:, None] + column[None, :]
    keep = has[:, None] & (column[None, :] < dim[:, None])
    weights = tl.load(table + WEIGHT, mask=has, other=0).to(tl.pointer_type(W))[:, None] + cell
    weight = tl.load(weights, mask=keep, other=0.0).to(A)
    lr, decay = tl.load(settings + LR), tl.load(settings + DECAY)
    if CLIPPED:
        norm = _root(tl.sum(grad * grad, 1), A)
        clip = tl.zeros_like(norm) + tl.load(settings + CLIP)
        grad = grad * _divided(clip, tl.maximum(norm, clip), A)[:, None]
    if L2:
        grad = grad + decay * weight
    state = tl.load(table + STATE, mask=has, other=0).to(tl.pointer_type(A))
    state_2 = tl.load(table + STATE_2, mask=has, other=0).to(tl.pointer_type(A))
    correct = corrections + 2 * number
    if OPTIMIZER == "sgd":
        change = lr * _with_momentum(grad, state[:, None] + cell, keep, settings, HAS_MOMENTUM)
    elif OPTIMIZER == "adagrad" or OPTIMIZER == "rowwise_adagrad":
        change = lr * _adagrad(grad, state, row, cell, has, keep, dim, settings, OPTIMIZER == "rowwise_adagrad", A)
    else:
        rowwise: tl.constexpr = OPTIMIZER == "partial_rowwise_adam"
        change = _adam(grad, state, state_2, row, cell, has, keep, dim, settings, correct, rowwise, A)
        if OPTIMIZER == "lamb":
            change = _as_long_as(weight, change + decay * weight, keep, A)
        change = lr * change
    if DECOUPLED:
        weight -= lr * decay * weight
    key = _row_key(tl.load(table + KEY, mask=has, other=0), row)
    tl.store(weights, _rounded(weight - change, key, column, W), mask=keep)


@triton.jit
def _with_momentum(grad, cells, keep, settings, HAS_MOMENTUM: tl.constexpr):
    if HAS_MOMENTUM:
        grad += tl.load(settings + MOMENTUM) * tl.load(cells, mask=keep, other=0.0)
        tl.store(cells, grad, mask=keep)
    return grad


@triton.jit
def _adagrad(grad, state, row, cell, has, keep, dim, settings, ROWWISE: tl.constexpr, A: tl.constexpr):
    if ROWWISE:
        square = tl.load(state + row, mask=has, other=1.0) + _divided(tl.sum(grad * grad, 1), dim.to(A), A)
        tl.store(state + row, square, mask=has)
        square = square[:, None]
    else:
        square = tl.load(state[:, None] + cell, mask=keep, other=1.0) + grad * grad
        tl.store(state[:, None] + cell, square, mask=keep)
    return _divided(grad, tl.broadcast_to(_root(square, A) + tl.load(settings + EPS), grad.shape), A)


@triton.jit
def _as_long_as(weight, change, keep, A: tl.constexpr):
    """The change, each row of it as long as the row of weights."""
    length = _root(tl.sum(weight * weight, 1), A)
    found = _root(tl.sum(tl.where(keep, change * change, 0.0), 1), A)
    moving = (length > 0) & (found > 0)
    return change * tl.where(moving, _divided(length, tl.where(moving, found, 1.0), A), 1.0)[:, None]


@triton.jit
def _adam(
    grad, state, state_2, row, cell, has, keep, dim, settings, corrections, ROWWISE: tl.constexpr, A: tl.constexpr
):
    """Adam's: bias-corrected mean over root of bias-corrected square; ROWWISE has one square for a row."""
    correct = tl.load(corrections, mask=has, other=1.0)[:, None]
    correct_2 = tl.load(corrections + 1, mask=has, other=1.0)
    mean = tl.load(settings + BETA1) * tl.load(state[:, None] + cell, mask=keep, other=0.0)
    mean += tl.load(settings + REST1) * grad
    tl.store(state[:, None] + cell, mean, mask=keep)
    if ROWWISE:
        square = tl.load(settings + BETA2) * tl.load(state_2 + row, mask=has, other=0.0)
        square += tl.load(settings + REST2) * _divided(tl.sum(grad * grad, 1), dim.to(A), A)
        tl.store(state_2 + row, square, mask=has)
        scale = _root(_divided(square, correct_2, A), A)[:, None]
    else:
        square = tl.load(settings + BETA2) * tl.load(state_2[:, None] + cell, mask=keep, other=0.0)
        square += tl.load(settings + REST2) * (grad * grad)
        tl.store(state_2[:, None] + cell, square, mask=keep)
        scale = _root(_divided(square, tl.broadcast_to(correct_2[:, None], grad.shape), A), A)
    mean = _divided(mean, tl.broadcast_to(correct, grad.shape), A)
    return _divided(mean, tl.broadcast_to(scale + tl.load(settings + EPS), grad.shape), A)


@triton.jit
def _mixed(x):
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _row_key(start, row):
    return _mixed(_mixed(start.to(tl.uint64, bitcast=True)) + row.to(tl.uint64)).to(tl.uint32)


@triton.jit
def _random16(key, column):
    counter = (column // 16 * 8 + column % 8).to(tl.uint32)
    x = (counter * 0x9E3779B9)[None, :] ^ key[:, None]
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    x = x ^ (x >> 16)
    return tl.where((column % 16 < 8)[None, :], x & 0xFFFF, x >> 16)


@triton.jit
def _rounded(value, key, column, W: tl.constexpr):
    """kernels/rounding.py has the same lines."""
    if W == tl.bfloat16:
        x = value.to(tl.uint32, bitcast=True)
        magnitude = x & 0x7FFFFFFF
        special = (x >> 16) | tl.where(magnitude > 0x7F800000, 0x40, 0).to(tl.uint32)
        bits = tl.where(magnitude < 0x7F800000, (x + _random16(key, column)) >> 16, special)
        return bits.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    elif W == tl.float16:
        x = value.to(tl.uint32, bitcast=True)
        magnitude = x & 0x7FFFFFFF
        random = _random16(key, column) & 0x1FFF
        carried = magnitude + random
        normal = tl.where(carried < 0x47800000, (carried - 0x38000000) >> 13, 0x7C00)
        small = tl.where(magnitude < 0x38800000, magnitude, 0).to(tl.float32, bitcast=True)
        steps = small * 16777216.0 + random.to(tl.float32) * 0.0001220703125
        bits = tl.where(magnitude < 0x38800000, steps.to(tl.uint32), normal)
        bits = tl.where(magnitude < 0x7F800000, bits, tl.where(magnitude > 0x7F800000, 0x7E00, 0x7C00).to(tl.uint32))
        return (bits | ((x >> 16) & 0x8000)).to(tl.uint16).to(tl.float16, bitcast=True)
    else:
        return value

"""Triton kernels that kernels/embedding_triton.py launches: lookup, gradient sums by row, row update."""

import triton
import triton.language as tl

from shardwright.kernels import optimizers_triton as optimizers
from shardwright.kernels.arguments import POOLINGS
from shardwright.kernels.optimizers_triton import DECAY, LR, divide

CHUNK_LOOKUPS = tl.constexpr(32)  # lookups of one row that one program sums
SHORT_RUN = tl.constexpr(32)  # lookups of one row up to which its update sums them
NO_ID = tl.constexpr(2**62)
MEAN, NONE = tl.constexpr(POOLINGS.index("mean")), tl.constexpr(POOLINGS.index("none"))
# Fields of the features' and the tables' structs, rows of int64.
VECTORS, STRIDE, KIND, TABLE, FEATURE_FIELDS = map(tl.constexpr, range(5))
WEIGHT, STATE, STATE_2, ROWS, DIM, DTYPE, TRAINED, KEY, NUMBERS, TABLE_FIELDS = map(tl.constexpr, range(10))


@triton.jit
def pool_rows(
    features,
    tables,
    feature_indices,
    values,
    offsets,
    id_weights,
    invalid_out,
    batch,
    W: tl.constexpr,
    A: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BAGS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Pool some columns of some bags of one feature; for an unpooled feature, copy those of some ids."""
    feature_index = tl.load(feature_indices + tl.program_id(1))
    feature = features + feature_index * FEATURE_FIELDS
    kind = tl.load(feature + KIND)
    table = tables + tl.load(feature + TABLE) * TABLE_FIELDS
    rows, dim = tl.load(table + ROWS), tl.load(table + DIM)
    weight = tl.load(table + WEIGHT).to(tl.pointer_type(W))
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    bag = (tl.program_id(0) * BAGS + tl.arange(0, BAGS)).to(tl.int64)
    start = tl.load(offsets + feature_index * batch)
    exists = bag < tl.where(kind == NONE, tl.load(offsets + feature_index * batch + batch) - start, batch)
    pooled = bag < tl.where(kind == NONE, 0, batch)
    begin = tl.where(pooled, tl.load(offsets + feature_index * batch + bag, mask=pooled, other=0), start + bag)
    length = tl.where(
        pooled, tl.load(offsets + feature_index * batch + bag + 1, mask=pooled, other=0) - begin, exists.to(tl.int64)
    )
    sums = tl.zeros([BAGS, COLUMNS], A)
    first_invalid = tl.full([BAGS], NO_ID, tl.int64)
    for i in range(0, tl.max(length, 0)):
        has = i < length
        id_ = tl.load(values + begin + i, mask=has, other=0).to(tl.int64)
        valid = (id_ >= 0) & (id_ < rows)
        first_invalid = tl.minimum(first_invalid, tl.where(has & (valid == 0), begin + i, NO_ID))
        mask = (has & valid)[:, None] & (column < dim)[None, :]
        row = tl.load(weight + id_[:, None] * dim + column[None, :], mask=mask, other=0.0).to(A)
        if WEIGHTED:
            row = row * tl.load(id_weights + begin + i, mask=has, other=0.0)[:, None]
        sums += row
    if kind == MEAN:
        sums = divide(sums, tl.broadcast_to(tl.maximum(length, 1).to(A)[:, None], [BAGS, COLUMNS]), A)
    vectors = tl.load(feature + VECTORS).to(tl.pointer_type(A)) + bag[:, None] * tl.load(feature + STRIDE)
    tl.store(vectors + column[None, :], sums, mask=exists[:, None] & (column < dim)[None, :])
    program = (tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)) * tl.num_programs(2) + tl.program_id(2)
    tl.store(invalid_out + program, tl.min(first_invalid, 0))


@triton.jit
def locate_gradients(
    features,
    positions,
    bags,
    offsets,
    id_weights,
    batch,
    lookups,
    addresses_out,
    scales_out,
    tables_out,
    A: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """For each lookup in the order of `positions`: the address of its row's gradient, its factor, its table."""
    lookup = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    has = lookup < lookups
    position = tl.load(positions + lookup, mask=has, other=0)
    bag = tl.load(bags + position, mask=has, other=0)
    feature_index = bag // batch
    feature = features + feature_index * FEATURE_FIELDS
    kind = tl.load(feature + KIND, mask=has, other=0)
    start = tl.load(offsets + feature_index * batch, mask=has, other=0)
    vector_row = tl.where(kind == NONE, position - start, bag - feature_index * batch)
    vectors = tl.load(feature + VECTORS, mask=has, other=0).to(tl.pointer_type(A))
    vectors += vector_row * tl.load(feature + STRIDE, mask=has, other=0)
    length = tl.load(offsets + bag + 1, mask=has, other=1) - tl.load(offsets + bag, mask=has, other=0)
    ones = tl.full([BLOCK], 1.0, A)
    scale = tl.where(kind == MEAN, divide(ones, tl.maximum(length, 1).to(A), A), ones)
    if WEIGHTED:
        scale *= tl.load(id_weights + position, mask=has, other=0.0)
    tl.store(addresses_out + lookup, vectors.to(tl.int64), mask=has)
    tl.store(scales_out + lookup, scale, mask=has)
    tl.store(tables_out + lookup, tl.load(feature + TABLE, mask=has, other=0).to(tl.int32), mask=has)


@triton.jit
def _load_gradients(lookup, has, dim, addresses, scales, A: tl.constexpr, COLUMNS: tl.constexpr):
    """The gradient of each lookup's row; `lookup`: its place in the order of `locate_gradients`."""
    vectors = tl.load(addresses + lookup, mask=has, other=0).to(tl.pointer_type(A))
    scale = tl.load(scales + lookup, mask=has, other=0.0)
    column = tl.arange(0, COLUMNS)
    mask = column[None, :] < tl.where(has, dim, 0)[:, None]
    return tl.load(vectors[:, None] + column[None, :], mask=mask, other=0.0) * scale[:, None]


@triton.jit
def dot_rows_with_gradients(
    tables,
    values,
    addresses,
    scales,
    table_indices,
    lookups,
    out,
    W: tl.constexpr,
    DTYPE_INDEX: tl.constexpr,
    BATCH_ROWS: tl.constexpr,
    A: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """The gradient of each id's weight: the dot product of its row with the row's gradient at weight 1."""
    position = tl.program_id(0).to(tl.int64) * BATCH_ROWS + tl.arange(0, BATCH_ROWS)
    has = position < lookups
    table = tables + tl.load(table_indices + position, mask=has, other=0) * TABLE_FIELDS
    has &= tl.load(table + DTYPE, mask=has, other=-1) == DTYPE_INDEX
    dim = tl.load(table + DIM, mask=has, other=0)
    grad = _load_gradients(position, has, dim, addresses, scales, A, COLUMNS)
    column = tl.arange(0, COLUMNS)
    row = tl.load(values + position, mask=has, other=0).to(tl.int64)
    weight = tl.load(table + WEIGHT, mask=has, other=0).to(tl.pointer_type(W))[:, None]
    cell = (row * dim)[:, None] + column[None, :]
    weight = tl.load(weight + cell, mask=has[:, None] & (column[None, :] < dim[:, None]), other=0.0).to(A)
    tl.store(out + position, tl.sum(weight * grad, 1), mask=has)


@triton.jit
def sum_chunks(
    tables,
    starts,
    addresses,
    scales,
    table_indices,
    first_chunks,
    runs_of_chunks,
    runs,
    sums,
    A: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Sum the gradients of one chunk of the lookups of a row."""
    chunk = tl.program_id(0)
    run = tl.load(runs_of_chunks + chunk)
    if run < runs:
        index = (chunk - tl.load(first_chunks + run)) * CHUNK_LOOKUPS + tl.arange(0, CHUNK_LOOKUPS)
        lookup = tl.load(starts + run) + index
        has = lookup < tl.load(starts + run + 1)
        table = tables + tl.load(table_indices + lookup, mask=has, other=0) * TABLE_FIELDS
        dim = tl.load(table + DIM, mask=has, other=0)
        grad = _load_gradients(lookup, has, dim, addresses, scales, A, COLUMNS)
        tl.store(sums + chunk * COLUMNS + tl.arange(0, COLUMNS), tl.sum(grad, 0))


@triton.jit
def sum_chunk_sums(starts, first_chunks, runs_of_chunks, runs, sums, A: tl.constexpr, COLUMNS: tl.constexpr):
    """Add the sums of a run's chunks into the sum of its first chunk."""
    chunk = tl.program_id(0)
    run = tl.load(runs_of_chunks + chunk)
    if tl.load(first_chunks + run, mask=run < runs, other=-1) == chunk:
        chunks = (tl.load(starts + run + 1) - tl.load(starts + run) + CHUNK_LOOKUPS - 1) // CHUNK_LOOKUPS
        column = tl.arange(0, COLUMNS)
        total = tl.zeros([COLUMNS], A)
        for begin in range(0, chunks, CHUNK_LOOKUPS):
            chunk_index = begin + tl.arange(0, CHUNK_LOOKUPS)
            partial_sums = sums + (chunk + chunk_index)[:, None] * COLUMNS + column[None, :]
            total += tl.sum(tl.load(partial_sums, mask=(chunk_index < chunks)[:, None], other=0.0), 0)
        tl.store(sums + chunk * COLUMNS + column, total)


@triton.jit
def update_rows(
    tables,
    starts,
    addresses,
    scales,
    table_indices,
    positions,
    values,
    first_chunks,
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
    COLUMNS: tl.constexpr,
):
    """Update some rows: sum their gradients, apply the optimizer, write weights and state once."""
    run = tl.program_id(0).to(tl.int64) * BATCH_ROWS + tl.arange(0, BATCH_ROWS)
    begin = tl.load(starts + run, mask=run < runs, other=runs)
    if tl.min(begin, 0) >= runs:
        return
    end = tl.load(starts + run + 1, mask=run < runs, other=runs)
    has = begin < end
    table_index = tl.load(table_indices + begin, mask=has, other=0)
    table = tables + table_index * TABLE_FIELDS
    has &= (tl.load(table + DTYPE, mask=has, other=-1) == DTYPE_INDEX) & (
        tl.load(table + TRAINED, mask=has, other=0) != 0
    )
    dim = tl.load(table + DIM, mask=has, other=1)
    is_short = has & (end - begin <= SHORT_RUN)
    column = tl.arange(0, COLUMNS)
    is_long = has & (end - begin > SHORT_RUN)
    chunk = tl.load(first_chunks + run, mask=run < runs, other=0)
    grad = tl.load(sums + chunk[:, None] * COLUMNS + column[None, :], mask=is_long[:, None], other=0.0)
    for i in range(0, tl.max(tl.where(is_short, end - begin, 0), 0)):
        valid = is_short & (begin + i < end)
        grad += _load_gradients(begin + i, valid, dim, addresses, scales, A, COLUMNS)

    position = tl.load(positions + begin, mask=has, other=0)
    row = tl.load(values + position, mask=has, other=0).to(tl.int64)
    cell = (row * dim)[:, None] + column[None, :]
    keep = has[:, None] & (column[None, :] < dim[:, None])
    weights = tl.load(table + WEIGHT, mask=has, other=0).to(tl.pointer_type(W))[:, None] + cell
    weight = tl.load(weights, mask=keep, other=0.0).to(A)
    lr, decay = tl.load(settings + LR), tl.load(settings + DECAY)
    grad = optimizers.clip_gradient(grad, settings, CLIPPED, A)
    if L2:
        grad = grad + decay * weight
    state = tl.load(table + STATE, mask=has, other=0).to(tl.pointer_type(A))
    state_2 = tl.load(table + STATE_2, mask=has, other=0).to(tl.pointer_type(A))
    correct = corrections + 2 * table_index
    if OPTIMIZER == "sgd":
        change = lr * optimizers.apply_momentum(grad, state[:, None] + cell, keep, settings, HAS_MOMENTUM)
    elif OPTIMIZER == "adagrad" or OPTIMIZER == "rowwise_adagrad":
        change = lr * optimizers.adagrad(
            grad, state, row, cell, has, keep, dim, settings, OPTIMIZER == "rowwise_adagrad", A
        )
    else:
        rowwise: tl.constexpr = OPTIMIZER == "partial_rowwise_adam"
        change = optimizers.adam(grad, state, state_2, row, cell, has, keep, dim, settings, correct, rowwise, A)
        if OPTIMIZER == "lamb":
            change = optimizers.apply_trust_ratio(weight, change + decay * weight, keep, A)
        change = lr * change
    if DECOUPLED:
        weight -= lr * decay * weight
    if W != A:  # rounded by the number of the row, which may be on a line of a cache
        numbers = tl.load(table + NUMBERS, mask=has, other=0)
        is_line = has & (numbers != 0)
        row = tl.where(is_line, tl.load(numbers.to(tl.pointer_type(tl.int64)) + row, mask=is_line, other=0), row)
    key = optimizers.row_key(tl.load(table + KEY, mask=has, other=0), row)
    tl.store(weights, optimizers.stochastic_round(weight - change, key, column, W), mask=keep)

"""Ids on their way to the ranks that hold their rows: each row once, segments in another order, cut by row ranges.

Compiled and multi-threaded where ids lie on the CPU and the library is there; else plain torch, with equal results.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from shardwright.errors import UserError
from shardwright.kernels.arguments import (
    MAX_TABLE_ROWS,
    POOLINGS,
    IdOutOfRange,
    Ids,
    KernelArguments,
    check_materialized,
    validate_ids,
)
from shardwright.kernels.native import lengths_to_offsets
from shardwright.library import native_library


def unique_rows(ids: Ids, table_rows: Sequence[int]) -> tuple[Tensor, list[int], Tensor]:
    """The rows that a batch touches, each once: (rows of all tables, ascending in each; how many of each; inverse).

    `inverse` says for every id where its row stands; `rows` counts each table's.
    """
    ids = validate_ids(replace(ids, weights=None), len(table_rows))
    ids = replace(ids, pooling=[0] * len(ids.tables))
    if table_rows and not 0 <= min(table_rows) <= max(table_rows) <= MAX_TABLE_ROWS:
        raise UserError(f"tables of {list(table_rows)} rows; wanted 0 to {MAX_TABLE_ROWS}")
    native = native_library() if ids.values.device.type == "cpu" else None
    if native is None:
        return _plain_distinct(ids, table_rows)
    found, inverse = torch.empty_like(ids.values, dtype=torch.int64), torch.empty_like(ids.values, dtype=torch.int64)
    counts = torch.zeros(len(table_rows), dtype=torch.int64)
    call = KernelArguments(ids, [torch.empty(0)], [0] * len(table_rows))
    tables = np.array([(0, 0, 0, count, 1, 1, 0, 0, 1) for count in table_rows], dtype=np.int64)
    features, lookups = call.features.ctypes.data, call.lookups.ctypes.data
    bad = native.shardwright_distinct(
        tables.ctypes.data, len(table_rows), features, lookups, found.data_ptr(), counts.data_ptr(), inverse.data_ptr()
    )
    ids.raise_if_invalid(bad)
    each = counts.tolist()
    return found[: sum(each)], each, inverse


def permute_segments(values: Tensor, lengths: Tensor, order: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Rows of (S, B) lengths, and their values, in another order; a row named twice comes twice (column pieces).

    (W, T, B) to (T, W, B) is `order` running over w for every t.
    """
    check_materialized(values, lengths)
    if lengths.dim() != 2 or values.dim() != 1:
        raise UserError(
            f"lengths {tuple(lengths.shape)}, values {tuple(values.shape)}; wanted (segments, batch) and a row"
        )
    if order and (min(order) < 0 or max(order) >= lengths.shape[0]):
        raise UserError(f"segments {min(order)} to {max(order)} of {lengths.shape[0]}")
    where = torch.tensor(order, dtype=torch.int64, device=lengths.device)
    chosen = lengths[where]
    batch, segments = lengths.shape[1], torch.arange(lengths.shape[0] + 1, device=lengths.device)
    begins = lengths_to_offsets(lengths)[segments * batch]
    sizes = begins.diff()
    if int(begins[-1]) != values.numel():
        raise UserError(f"lengths add up to {int(begins[-1])}, but there are {values.numel()} values")
    return gather_segments(values, begins[:-1][where], sizes[where]), chosen


def gather_segments(values: Tensor, starts: Tensor, sizes: Tensor) -> Tensor:
    """Stretches of a row of numbers, one after the other; they may come again, overlap, or be empty."""
    check_materialized(values, starts, sizes)
    ends = lengths_to_offsets(sizes)
    low, high = (int(starts.min()), int((starts + sizes).max())) if len(starts) else (0, 0)
    if values.dim() != 1 or starts.shape != sizes.shape or low < 0 or high > values.numel():
        raise UserError(f"stretches from {low} to {high} of {tuple(values.shape)} values")
    native = native_library() if values.device.type == "cpu" else None
    if native is None:
        pairs = zip(starts.tolist(), sizes.tolist(), strict=True)
        return torch.cat([values[:0], *(values[begin : begin + size] for begin, size in pairs)])
    values, starts = values.contiguous(), starts.long().contiguous()
    out = values.new_empty(int(ends[-1]))
    native.shardwright_gather(
        values.data_ptr(), starts.data_ptr(), len(starts), ends.data_ptr(), values.element_size(), out.data_ptr()
    )
    return out


def concat_ids(batches: Sequence[Ids]) -> Ids:
    """The bags of several calls as those of one, feature by feature."""
    bags = [
        feature for features in zip(*(part.split_by_feature() for part in batches), strict=True) for feature in features
    ]
    values, lengths = torch.cat([one for one, _, _ in bags]), torch.cat([one for _, one, _ in bags])
    weights = [one for _, _, one in bags if one is not None]
    if weights and sum(map(len, weights)) < len(values):
        raise UserError("ids have weights in some batches and none in others; give them to all, or to none")
    return replace(
        batches[0], values=values, offsets=lengths_to_offsets(lengths), weights=torch.cat(weights) if weights else None
    )


def restrict_ids(ids: Ids, gradients: Sequence[Tensor], keep: Sequence[bool | Tensor]) -> tuple[Ids, list[Tensor]]:
    """Remove the ids of some features, and the gradients that belong to them.

    `keep` says for each feature whether its ids stay; for an unpooled feature it may be a mask over its ids.
    """
    pooled_BD, *sequences = gradients
    unpooled, rows, parts = iter(sequences), list[Tensor](), list[tuple[Tensor, Tensor, Tensor | None]]()
    for (values, lengths, weights), choice, pooling in zip(ids.split_by_feature(), keep, ids.pooling, strict=True):
        mask = torch.full_like(values, choice, dtype=torch.bool) if isinstance(choice, bool) else choice
        if POOLINGS[pooling] == "none":  # which bag an id is in does not matter
            rows.append(next(unpooled)[mask])
            lengths = torch.zeros_like(lengths)
            lengths[:1] = mask.sum()
        elif not choice:
            lengths = torch.zeros_like(lengths)
        parts.append((values[mask], lengths, None if weights is None else weights[mask]))
    restricted = replace(
        ids,
        values=torch.cat([values for values, _, _ in parts]),
        offsets=lengths_to_offsets(torch.cat([lengths for _, lengths, _ in parts])),
        weights=None if ids.weights is None else torch.cat([one for _, _, one in parts if one is not None]),
    )
    return restricted, [pooled_BD, *rows]


def bucketize_ids(ids: Ids, row_boundaries: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor, Tensor]:
    """Ids cut by row ranges: (values relative to their piece, (pieces, features, batch) lengths, positions before).

    `starts[f]` has the first row of each piece of feature f's table, and at the end its number of rows. Within a piece
    the order is that of the batch.
    """
    ids = validate_ids(replace(ids, weights=None), 1 + max(ids.tables, default=0))
    pieces = {len(cuts) - 1 for cuts in row_boundaries}
    if len(pieces) != 1 or min(pieces) < 1 or len(row_boundaries) != len(ids.tables):
        raise UserError(
            f"{len(row_boundaries)} features cut into {sorted(pieces)} pieces; wanted {len(ids.tables)}, all alike"
        )
    if any(cuts[0] != 0 or list(cuts) != sorted(cuts) for cuts in row_boundaries):
        raise UserError("the first rows of a table's pieces begin with 0 and do not fall")
    num = pieces.pop()
    native = native_library() if ids.values.device.type == "cpu" else None
    if native is None:
        return _plain_bucketized(ids, row_boundaries, num)
    values, wide = ids.values, ids.values.dtype == torch.int64
    cuts = np.array(row_boundaries, dtype=np.int64)
    lengths = torch.zeros(num, len(row_boundaries), ids.batch_size, dtype=torch.int64)
    shape = (len(row_boundaries), ids.batch_size, cuts.ctypes.data, num)
    ids.raise_if_invalid(
        native.shardwright_count_pieces(values.data_ptr(), wide, ids.offsets.data_ptr(), *shape, lengths.data_ptr())
    )
    begins, out = lengths_to_offsets(lengths), torch.empty_like(values)
    positions = torch.empty(values.numel(), dtype=torch.int64)
    native.shardwright_move_pieces(
        values.data_ptr(), wide, ids.offsets.data_ptr(), *shape, begins.data_ptr(), out.data_ptr(), positions.data_ptr()
    )
    return out, lengths, positions


def _plain_distinct(ids: Ids, rows: Sequence[int]) -> tuple[Tensor, list[int], Tensor]:
    _check(ids, [rows[table] for table in ids.tables])
    bases = list(accumulate(rows, initial=0))
    parts = [
        values.long() + bases[table] for (values, _, _), table in zip(ids.split_by_feature(), ids.tables, strict=True)
    ]
    linear = torch.cat(parts) if parts else ids.values.long()
    found, inverse = torch.unique(linear, return_inverse=True)
    cuts = torch.searchsorted(found, found.new_tensor(bases)).tolist()
    each = [b - a for a, b in zip(cuts, cuts[1:], strict=False)]
    shift = found.new_tensor(bases[:-1]).repeat_interleave(found.new_tensor(each))
    return found - shift, each, inverse


def _plain_bucketized(ids: Ids, starts: Sequence[Sequence[int]], num: int) -> tuple[Tensor, Tensor, Tensor]:
    _check(ids, [cuts[-1] for cuts in starts])
    device, bags = ids.values.device, len(starts) * ids.batch_size
    bag = torch.repeat_interleave(torch.arange(bags, device=device), ids.offsets.diff())
    feature = bag // max(1, ids.batch_size)
    cuts = torch.tensor(starts, dtype=torch.int64, device=device)
    piece = (ids.values.unsqueeze(1) >= cuts[feature, 1:num]).sum(1)
    positions = torch.argsort(piece * bags + bag, stable=True)
    lengths = torch.bincount(piece * bags + bag, minlength=num * bags).view(num, len(starts), ids.batch_size)
    out = (ids.values - cuts[feature, piece])[positions].to(ids.values.dtype)
    return out, lengths, positions


def _check(ids: Ids, rows: Sequence[int]) -> None:
    for feature, ((values, _, _), count) in enumerate(zip(ids.split_by_feature(), rows, strict=True)):
        outside = ((values < 0) | (values.long() >= count)).nonzero()  # `count` may not fit in int32
        if outside.numel():
            raise IdOutOfRange(feature, int(values[outside[0, 0]]))

"""Deduplicate, permute and bucketize ids before they are exchanged between ranks.

For ids on a CPU with the compiled library: native and multi-threaded. Otherwise plain torch, with equal results.

Shape legend: B bags of a feature, D columns of the pooled vectors.
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
    sized_structs,
    validate_ids,
)
from shardwright.kernels.native import lengths_to_offsets
from shardwright.library import native_library


def unique_rows(ids: Ids, table_rows: Sequence[int]) -> tuple[Tensor, list[int], Tensor]:
    """Distinct rows of a batch as (rows, counts, inverse), as torch.unique does for each table.

    `rows` holds the distinct rows of table 0, then of table 1 and so on, ascending within a table; `counts` has their
    number for each table; `inverse` (N,) is the index of each id's row in `rows`. `table_rows` are the tables' sizes.
    """
    ids = validate_ids(replace(ids, weights=None), len(table_rows))
    ids = replace(ids, pooling=[0] * len(ids.tables))
    if table_rows and not 0 <= min(table_rows) <= max(table_rows) <= MAX_TABLE_ROWS:
        raise UserError(f"tables of {list(table_rows)} rows; wanted 0 to {MAX_TABLE_ROWS}")
    native = native_library() if ids.values.device.type == "cpu" else None
    if native is None:
        return _unique_rows_torch(ids, table_rows)
    rows, inverse = torch.empty_like(ids.values, dtype=torch.int64), torch.empty_like(ids.values, dtype=torch.int64)
    counts = torch.zeros(len(table_rows), dtype=torch.int64)
    call = KernelArguments(ids, [torch.empty(0)], [0] * len(table_rows))
    tables = sized_structs(table_rows)
    features, lookups = call.features.ctypes.data, call.lookups.ctypes.data
    bad_position = native.shardwright_distinct(
        tables.ctypes.data, len(table_rows), features, lookups, rows.data_ptr(), counts.data_ptr(), inverse.data_ptr()
    )
    ids.raise_if_invalid(bad_position)
    counts_list = counts.tolist()
    return rows[: sum(counts_list)], counts_list, inverse


def permute_segments(values: Tensor, lengths: Tensor, order: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Reorder segments, the rows of (S, B) lengths, and their values; returns (values, lengths).

    A segment that is in `order` twice is copied twice, as for column-wise shards. To permute (W, T, B) to (T, W, B),
    let `order` run over w for every t.
    """
    check_materialized(values, lengths)
    if lengths.dim() != 2 or values.dim() != 1:
        raise UserError(
            f"lengths {tuple(lengths.shape)}, values {tuple(values.shape)}; wanted (segments, batch) and 1-d"
        )
    if order and (min(order) < 0 or max(order) >= lengths.shape[0]):
        raise UserError(f"order has segments {min(order)} to {max(order)}; wanted 0 to {lengths.shape[0] - 1}")
    order_tensor = torch.tensor(order, dtype=torch.int64, device=lengths.device)
    permuted_lengths = lengths[order_tensor]
    batch, segments = lengths.shape[1], torch.arange(lengths.shape[0] + 1, device=lengths.device)
    starts = lengths_to_offsets(lengths)[segments * batch]
    sizes = starts.diff()
    if int(starts[-1]) != values.numel():
        raise UserError(f"lengths add up to {int(starts[-1])}, but there are {values.numel()} values")
    return gather_segments(values, starts[:-1][order_tensor], sizes[order_tensor]), permuted_lengths


def gather_segments(values: Tensor, starts: Tensor, sizes: Tensor) -> Tensor:
    """Concatenate slices of 1-d `values`; slices may repeat, overlap or be empty."""
    check_materialized(values, starts, sizes)
    ends = lengths_to_offsets(sizes)
    low, high = (int(starts.min()), int((starts + sizes).max())) if len(starts) else (0, 0)
    if values.dim() != 1 or starts.shape != sizes.shape or low < 0 or high > values.numel():
        raise UserError(f"segments cover positions {low} to {high} of values of shape {tuple(values.shape)}")
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
    """Concatenate the bags of several batches feature by feature, as the ids of one batch."""
    bags = [
        feature for features in zip(*(ids.split_by_feature() for ids in batches), strict=True) for feature in features
    ]
    values, lengths = torch.cat([ids for ids, _, _ in bags]), torch.cat([lengths for _, lengths, _ in bags])
    weights = [weights for _, _, weights in bags if weights is not None]
    if weights and sum(map(len, weights)) < len(values):
        raise UserError("ids have weights in some batches and none in others; give them to all, or to none")
    return replace(
        batches[0], values=values, offsets=lengths_to_offsets(lengths), weights=torch.cat(weights) if weights else None
    )


def restrict_ids(ids: Ids, gradients: Sequence[Tensor], keep: Sequence[bool | Tensor]) -> tuple[Ids, list[Tensor]]:
    """Remove the ids of some features, and the gradients that belong to them.

    `keep` has for each feature whether its ids stay, or, for an unpooled feature, a mask of the ids that stay.
    """
    pooled_BD, *sequences = gradients
    unpooled, rows, parts = iter(sequences), list[Tensor](), list[tuple[Tensor, Tensor, Tensor | None]]()
    for (values, lengths, weights), kept_ids, pooling in zip(ids.split_by_feature(), keep, ids.pooling, strict=True):
        mask = torch.full_like(values, kept_ids, dtype=torch.bool) if isinstance(kept_ids, bool) else kept_ids
        if POOLINGS[pooling] == "none":  # which bag an id is in does not matter
            sequence = next(unpooled)
            rows.append(sequence[mask.to(sequence.device)])
            lengths = torch.zeros_like(lengths)
            lengths[:1] = mask.sum()
        elif not kept_ids:
            lengths = torch.zeros_like(lengths)
        parts.append((values[mask], lengths, None if weights is None else weights[mask]))
    restricted = replace(
        ids,
        values=torch.cat([values for values, _, _ in parts]),
        offsets=lengths_to_offsets(torch.cat([lengths for _, lengths, _ in parts])),
        weights=None if ids.weights is None else torch.cat([weights for *_, weights in parts if weights is not None]),
    )
    return restricted, [pooled_BD, *rows]


def bucketize_ids(ids: Ids, row_boundaries: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor, Tensor]:
    """Split ids by row range: ids relative to their range, (ranges, features, batch) lengths, positions.

    `row_boundaries[f]` has the first row of each range of feature f's table and, at the end, its number of rows. Ids of
    a range stay in batch order; `positions` has the index of each of them in `ids.values`.
    """
    ids = validate_ids(replace(ids, weights=None), 1 + max(ids.tables, default=0))
    range_counts = {len(starts) - 1 for starts in row_boundaries}
    if len(range_counts) != 1 or min(range_counts) < 1 or len(row_boundaries) != len(ids.tables):
        raise UserError(
            f"{len(row_boundaries)} features with {sorted(range_counts)} row ranges; wanted {len(ids.tables)} features "
            "with equal numbers of ranges"
        )
    if any(starts[0] != 0 or list(starts) != sorted(starts) for starts in row_boundaries):
        raise UserError("row boundaries of a table must begin with 0 and must not decrease")
    num_ranges = range_counts.pop()
    native = native_library() if ids.values.device.type == "cpu" else None
    if native is None:
        return _bucketize_torch(ids, row_boundaries, num_ranges)
    values, boundaries = ids.values, np.array(row_boundaries, dtype=np.int64)
    lengths = torch.zeros(num_ranges, len(row_boundaries), ids.batch_size, dtype=torch.int64)
    batch = (values.data_ptr(), values.dtype == torch.int64, ids.offsets.data_ptr())
    shape = (len(row_boundaries), ids.batch_size, boundaries.ctypes.data, num_ranges)
    ids.raise_if_invalid(native.shardwright_count_pieces(*batch, *shape, lengths.data_ptr()))
    begins, out = lengths_to_offsets(lengths), torch.empty_like(values)
    positions = torch.empty(values.numel(), dtype=torch.int64)
    native.shardwright_move_pieces(*batch, *shape, begins.data_ptr(), out.data_ptr(), positions.data_ptr())
    return out, lengths, positions


def _unique_rows_torch(ids: Ids, table_rows: Sequence[int]) -> tuple[Tensor, list[int], Tensor]:
    """`unique_rows` in plain torch."""
    _check_ids(ids, [table_rows[table] for table in ids.tables])
    bases = list(accumulate(table_rows, initial=0))
    global_ids = [
        values.long() + bases[table] for (values, _, _), table in zip(ids.split_by_feature(), ids.tables, strict=True)
    ]
    global_rows = torch.cat(global_ids) if global_ids else ids.values.long()
    unique, inverse = torch.unique(global_rows, return_inverse=True)
    bounds = torch.searchsorted(unique, unique.new_tensor(bases)).tolist()
    counts = [end - start for start, end in zip(bounds, bounds[1:], strict=False)]
    shift = unique.new_tensor(bases[:-1]).repeat_interleave(unique.new_tensor(counts))
    return unique - shift, counts, inverse


def _bucketize_torch(ids: Ids, boundaries: Sequence[Sequence[int]], num_ranges: int) -> tuple[Tensor, Tensor, Tensor]:
    """`bucketize_ids` in plain torch."""
    _check_ids(ids, [starts[-1] for starts in boundaries])
    device, bags = ids.values.device, len(boundaries) * ids.batch_size
    bag = torch.repeat_interleave(torch.arange(bags, device=device), ids.offsets.diff())
    feature = bag // max(1, ids.batch_size)
    first_rows = torch.tensor(boundaries, dtype=torch.int64, device=device)
    row_range = (ids.values.unsqueeze(1) >= first_rows[feature, 1:num_ranges]).sum(1)
    segment = row_range * bags + bag
    positions = torch.argsort(segment, stable=True)
    lengths = torch.bincount(segment, minlength=num_ranges * bags).view(num_ranges, len(boundaries), ids.batch_size)
    out = (ids.values - first_rows[feature, row_range])[positions].to(ids.values.dtype)
    return out, lengths, positions


def _check_ids(ids: Ids, rows: Sequence[int]) -> None:
    """Raise IdOutOfRange for an id that is not in [0, rows) of its feature."""
    for feature, ((values, _, _), count) in enumerate(zip(ids.split_by_feature(), rows, strict=True)):
        outside = ((values < 0) | (values.long() >= count)).nonzero()  # `count` may not fit in int32
        if outside.numel():
            raise IdOutOfRange(feature, int(values[outside[0, 0]]))

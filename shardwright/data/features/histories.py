"""Histories in a click log: lists of ids in order of time, with side columns. Must not import torch.

A list column is (codes of all items, offsets of each row's items).

Shape legend: C items of a list column.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from shardwright.data.logs.schema import Schema
from shardwright.errors import UserError

ListColumn = tuple[np.ndarray, np.ndarray]


def clean_lists(schema: Schema, columns: Mapping[str, Any]) -> dict[str, ListColumn]:
    """The list columns without missing items (code 0), and with the last `history_length` items of histories.

    A side column keeps the items at its history's positions, missing or not. Used in training, streaming and serving.
    """
    masks, cleaned = dict[str, tuple[np.ndarray, np.ndarray]](), dict[str, ListColumn]()
    for name in sorted(schema.lists, key=lambda name: name in schema.sides):  # histories before their sides
        codes_C, offsets = columns[name]
        codes_C, offsets = codes_C[offsets[0] : offsets[-1]], offsets - offsets[0]
        if name in schema.sides:
            history = schema.sides[name]
            _check_side(name, offsets, history, masks[history][1], "sample ", 0)
            mask_C = masks[history][0]
        else:
            mask_C = codes_C != 0
            if name in schema.histories:
                mask_C = _mask_last(mask_C, offsets, schema.history_length)
                masks[name] = mask_C, offsets
        cleaned[name] = _select_items(codes_C, offsets, mask_C)
    return {name: cleaned[name] for name in schema.lists}


def check_sides(schema: Schema, columns: Mapping[str, Any], origin: str, num_before: int) -> None:
    """Raise UserError unless side columns are as long as their histories; a list column is (codes, row ends).

    `num_before`: rows of the log before these.
    """
    for name, history in schema.sides.items():
        ends, history_ends = (np.concatenate([np.zeros(1, np.int32), columns[key][1]]) for key in (name, history))
        _check_side(name, ends, history, history_ends, f"{origin}: row ", num_before + 1)


def find_earlier_rows(keys: np.ndarray, times: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows by key and time, and for each row the range of them that has its key and a strictly earlier time.

    Returns the row numbers in that order, and the start and the end of each row's range, indexed by row.
    """
    order = np.lexsort((times, keys))  # stable: rows of equal time keep their order
    keys, times = keys[order], times[order]
    is_new_key = np.ones(len(order), bool)
    is_new_key[1:] = keys[1:] != keys[:-1]
    is_new_time = is_new_key.copy()
    is_new_time[1:] |= times[1:] != times[:-1]
    places = np.arange(len(order))
    start, end = np.empty_like(order), np.empty_like(order)
    start[order] = np.maximum.accumulate(np.where(is_new_key, places, 0))
    end[order] = np.maximum.accumulate(np.where(is_new_time, places, 0))
    return order, start, end


def concat_ranges(starts: np.ndarray, ends: np.ndarray) -> ListColumn:
    """All numbers of the ranges (start, end), in order, and the end of each range's numbers, int32."""
    lengths = ends - starts
    stops = np.cumsum(lengths)
    return np.arange(lengths.sum()) + np.repeat(starts - (stops - lengths), lengths), stops.astype(np.int32)


def _mask_last(mask_C: np.ndarray, offsets: np.ndarray, length: int) -> np.ndarray:
    """Of each row's items in the mask only the last `length`; 0: all."""
    if not length:
        return mask_C
    num_before = np.concatenate([np.zeros(1, np.int64), np.cumsum(mask_C)])
    num_following = np.repeat(num_before[offsets[1:]], np.diff(offsets)) - num_before[:-1]  # in its row, with itself
    return mask_C & (num_following <= length)


def _select_items(codes_C: np.ndarray, offsets: np.ndarray, mask_C: np.ndarray) -> ListColumn:
    if mask_C.all():
        return codes_C, offsets
    num_before = np.concatenate([np.zeros(1, np.int64), np.cumsum(mask_C)])
    return codes_C[mask_C], num_before[offsets]


def _check_side(
    name: str, offsets: np.ndarray, history: str, history_offsets: np.ndarray, where: str, first: int
) -> None:
    lengths, expected = np.diff(offsets), np.diff(history_offsets)
    if (lengths != expected).any():
        row = int((lengths != expected).argmax())
        raise UserError(
            f'{where}{first + row}: "{name}" has {lengths[row]} ids and "{history}" has {expected[row]}; a side column '
            "has one id for each id of its history"
        )

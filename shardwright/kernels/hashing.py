"""Texts to 64-bit codes of values, codes to rows of a table, counts of codes: csrc/columns.cpp.

numpy in, numpy out, without torch. A value's code is a hash of its bytes; 0 is a missing value.

Shape legend: R rows, C codes.
"""

from typing import Any

import numpy as np

from shardwright.errors import UserError
from shardwright.library import native_library


def hash_strings(offsets: np.ndarray, data: np.ndarray, *, tail: int = 0) -> np.ndarray:
    """(R,) uint64 of the texts data[offsets[i]:offsets[i + 1]]; only their last `tail` bytes count if it is not 0."""
    found = np.empty(len(offsets) - 1, np.uint64)
    _native().shardwright_codes(_at(offsets), _at(data), len(found), tail, _at(found))
    return found


def hash_to_rows(codes_C: np.ndarray, salt: int, num_rows: int) -> np.ndarray:
    """(C,) int32 in [0, rows): 0 for missing, else a hash under `salt`."""
    found = np.empty(len(codes_C), np.int32)
    _native().shardwright_hashed_rows(_at(codes_C), len(codes_C), salt & 0xFFFFFFFFFFFFFFFF, num_rows, _at(found))
    return found


class Vocabulary:
    """The values that have a row of their own: entry i has row 2 + i; row 0 is missing, row 1 all others."""

    def __init__(self, entries: np.ndarray) -> None:
        self.entries = np.ascontiguousarray(entries, np.uint64)
        self._slots = np.zeros(1 << max(1, (2 * len(entries)).bit_length()), np.int32)
        _native().shardwright_vocabulary_slots(_at(self.entries), len(entries), self._mask, _at(self._slots))

    @property
    def num_rows(self) -> int:
        return 2 + len(self.entries)

    def rows_of(self, codes_C: np.ndarray) -> np.ndarray:
        found = np.empty(len(codes_C), np.int32)
        _native().shardwright_vocabulary_rows(
            _at(codes_C), len(codes_C), _at(self.entries), _at(self._slots), self._mask, _at(found)
        )
        return found

    @property
    def _mask(self) -> int:
        return len(self._slots) - 1


class LossyCounter:
    """How often each code occurs, exactly while there are at most `most` distinct ones.

    Beyond that the rarest are dropped (lossy counting): counts are then too large by at most `error`.
    """

    def __init__(self, max_distinct: int) -> None:
        self._native = _native()
        self._counter = self._native.shardwright_counter_new(max_distinct)

    def add(self, codes_C: np.ndarray) -> None:
        """Count these; code 0, missing, is not counted."""
        codes_C = np.ascontiguousarray(codes_C, np.uint64)
        self._native.shardwright_counter_add(self._counter, _at(codes_C), len(codes_C))

    @property
    def max_error(self) -> int:
        return self._native.shardwright_counter_error(self._counter)

    @property
    def num_distinct(self) -> int:
        """Exact while nothing was dropped, else estimated to about 1 %."""
        size = self._native.shardwright_counter_size(self._counter)
        return (
            size if not self.max_error else max(size, round(self._native.shardwright_counter_distinct(self._counter)))
        )

    def most_common(self) -> tuple[np.ndarray, np.ndarray]:
        """Codes and counts, most frequent first; ties by code."""
        size = self._native.shardwright_counter_size(self._counter)
        found, counts = np.empty(size, np.uint64), np.empty(size, np.int64)
        self._native.shardwright_counter_dump(self._counter, _at(found), _at(counts))
        order = np.lexsort((found, -counts))
        return found[order], counts[order]

    def __del__(self) -> None:
        self._native.shardwright_counter_free(self._counter)


def _native() -> Any:
    native = native_library()
    if native is None:
        raise UserError("reading click logs needs the compiled kernels; reinstall shardwright with a C++ compiler")
    return native


def _at(array: np.ndarray) -> int:
    return array.ctypes.data

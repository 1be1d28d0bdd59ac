"""Hash texts to 64-bit codes, map codes to rows of a table, and count codes: csrc/columns.cpp.

numpy in, numpy out, without torch. A value's code is a hash of its bytes; code 0 is a missing value.

Shape legend: R texts or rows of a file, C codes.
"""

from typing import Any

import numpy as np

from shardwright.errors import UserError
from shardwright.library import native_library


def hash_strings(offsets: np.ndarray, data: np.ndarray, *, tail: int = 0) -> np.ndarray:
    """(R,) uint64 codes of data[offsets[i]:offsets[i + 1]]; with `tail`, of only their last bytes."""
    codes = np.empty(len(offsets) - 1, np.uint64)
    _native().shardwright_codes(_ptr(offsets), _ptr(data), len(codes), tail, _ptr(codes))
    return codes


def hash_text(text: str) -> int:
    """The 64-bit code of one text."""
    data = text.encode()
    return int(hash_strings(np.array([0, len(data)], np.int32), np.frombuffer(data, np.uint8))[0])


def hash_to_rows(codes_C: np.ndarray, salt: int, num_rows: int) -> np.ndarray:
    """(C,) int32 rows in [0, num_rows): 0 for a missing value, else a hash of the code under `salt`."""
    rows = np.empty(len(codes_C), np.int32)
    _native().shardwright_hashed_rows(_ptr(codes_C), len(codes_C), salt & 0xFFFFFFFFFFFFFFFF, num_rows, _ptr(rows))
    return rows


class Vocabulary:
    """Codes with their own row: entry i has row 2 + i; row 0 is for missing values, row 1 for others."""

    def __init__(self, entries: np.ndarray) -> None:
        self.entries = np.ascontiguousarray(entries, np.uint64)
        self._slots = np.zeros(1 << max(1, (2 * len(entries)).bit_length()), np.int32)
        _native().shardwright_vocabulary_slots(_ptr(self.entries), len(entries), self._mask, _ptr(self._slots))

    @property
    def num_rows(self) -> int:
        return 2 + len(self.entries)

    def rows_of(self, codes_C: np.ndarray) -> np.ndarray:
        """(C,) int32 rows of the codes."""
        rows = np.empty(len(codes_C), np.int32)
        _native().shardwright_vocabulary_rows(
            _ptr(codes_C), len(codes_C), _ptr(self.entries), _ptr(self._slots), self._mask, _ptr(rows)
        )
        return rows

    @property
    def _mask(self) -> int:
        return len(self._slots) - 1


class LossyCounter:
    """Counts codes; exact for up to `max_distinct` distinct codes.

    Beyond that it drops the rarest codes (Manku & Motwani's lossy counting), and counts are too large by at most
    `max_error`.
    """

    def __init__(self, max_distinct: int) -> None:
        self._native = _native()
        self._counter = self._native.shardwright_counter_new(max_distinct)

    def add(self, codes_C: np.ndarray) -> None:
        """Count codes; code 0 (missing) is not counted."""
        codes_C = np.ascontiguousarray(codes_C, np.uint64)
        self._native.shardwright_counter_add(self._counter, _ptr(codes_C), len(codes_C))

    @property
    def max_error(self) -> int:
        """Upper bound of how much too large a count is; 0 while counts are exact."""
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
        codes, counts = np.empty(size, np.uint64), np.empty(size, np.int64)
        self._native.shardwright_counter_dump(self._counter, _ptr(codes), _ptr(counts))
        order = np.lexsort((codes, -counts))
        return codes[order], counts[order]

    def __del__(self) -> None:
        self._native.shardwright_counter_free(self._counter)


def _native() -> Any:
    native = native_library()
    if native is None:
        raise UserError("reading click logs needs the compiled kernels; reinstall shardwright with a C++ compiler")
    return native


def _ptr(array: np.ndarray) -> int:
    return array.ctypes.data

"""Which rows are in a cache, and on which line: a set-associative index of 32 ways (csrc/cache_index.cpp).

Shape legend: U distinct rows of a batch.
"""

import weakref
from dataclasses import astuple, dataclass

import torch
from torch import Tensor

from shardwright.errors import UserError
from shardwright.library import native_library

WAYS = 32
WINDOW = 31  # batches that may be announced ahead of the one that is placed next
LFU = -1  # as half_life: uses are never forgotten
LRU = 0


@dataclass(slots=True)
class CacheCounts:
    """Of distinct rows, since the cache began. `conflicts`: rows for which all lines of their set were pinned."""

    rows: int = 0
    missing: int = 0
    evicted: int = 0
    written_back: int = 0
    conflicts: int = 0

    def __add__(self, other: "CacheCounts") -> "CacheCounts":
        return CacheCounts(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))


@dataclass(frozen=True, slots=True)
class PlacedRows:
    """The lines of a batch's rows. First the lines `written_lines` are to be copied to rows `written_rows` of the
    slower memory, then rows `missing_U`, positions in the batch, to their lines."""

    lines_U: Tensor
    missing_U: Tensor
    written_lines: Tensor
    written_rows: Tensor


class CacheIndex:
    """Places rows, numbered by any 64-bit integers, on lines.

    Lines are pinned from `place` to `release`. The line to evict is the one with the farthest next use among announced
    batches; of those without, the one with the lowest score, if rows are placed with scores; of those, with the fewest
    uses, halved for every `half_life` batches since the last (LRU: all are equal; LFU: never halved), then the one used
    longest ago.
    """

    def __init__(self, num_lines: int, half_life: int = LFU) -> None:
        native = native_library()
        if native is None:
            raise UserError("a cache needs the compiled kernels, which this installation does not have")
        if num_lines < WAYS or half_life < LFU:
            raise UserError(
                f"a cache of {num_lines} lines and half_life {half_life}; wanted {WAYS} lines or more, -1, 0 or more"
            )
        self.num_lines = num_lines // WAYS * WAYS
        self.counts = CacheCounts()
        self._native = native
        self._index = native.shardwright_cache_new(self.num_lines // WAYS, half_life)
        freed = weakref.finalize(self, native.shardwright_cache_free, self._index)
        freed.atexit = False  # a generator that is closed later may still use it

    def announce(self, rows_U: Tensor) -> None:
        """Announce the distinct rows of the batch after those announced or placed so far."""
        rows = _check_numbers(rows_U)
        if self._native.shardwright_cache_announce(self._index, rows.data_ptr(), len(rows)) < 0:
            raise UserError(
                f"more than {WINDOW} batches are announced; lower the lead of the stage that announces them"
            )

    def place(self, rows_U: Tensor, scores_U: Tensor | None = None) -> PlacedRows:
        """Find or make lines for the distinct rows of a batch, and pin them."""
        rows = _check_numbers(rows_U)
        if scores_U is not None and (scores_U.dtype != torch.float32 or scores_U.shape != rows.shape):
            raise UserError(f"scores are {scores_U.dtype} {tuple(scores_U.shape)}; wanted float32 {tuple(rows.shape)}")
        scores = None if scores_U is None else scores_U.contiguous().data_ptr()
        num, num_written = len(rows), len(rows) + self._native.shardwright_cache_away(self._index)
        lines, missing = torch.empty(num, dtype=torch.int64), torch.empty(num, dtype=torch.int64)
        written = torch.empty(2, num_written, dtype=torch.int64)
        counts = torch.empty(4, dtype=torch.int64)
        outputs = (lines, missing, written[0], written[1], counts)
        pointers = [output.data_ptr() for output in outputs]
        if not self._native.shardwright_cache_place(self._index, rows.data_ptr(), scores, num, *pointers):
            raise UserError(
                f"the rows of the batches in flight do not fit in the {self.num_lines} lines of the cache: give it "
                "more memory, or use smaller batches"
            )
        num_missing, num_written, num_evicted, num_conflicts = counts.tolist()
        self.counts.rows += num
        self.counts.missing += num_missing
        self.counts.evicted += num_evicted
        self.counts.written_back += num_written
        self.counts.conflicts += num_conflicts
        return PlacedRows(lines, missing[:num_missing], written[0, :num_written], written[1, :num_written])

    def release(self, lines_U: Tensor, *, written: bool) -> None:
        """End a batch's use of its lines; `written`: it has changed them. May run beside `place`."""
        lines = _check_numbers(lines_U)
        self._native.shardwright_cache_release(self._index, lines.data_ptr(), len(lines), written)

    def find(self, rows_U: Tensor) -> Tensor:
        """The lines of rows; -1 for those that are not in the cache."""
        rows = _check_numbers(rows_U)
        lines = torch.empty_like(rows)
        self._native.shardwright_cache_find(self._index, rows.data_ptr(), len(rows), lines.data_ptr())
        return lines

    def written_lines(self, *, clear: bool = False) -> tuple[Tensor, Tensor]:
        """The lines that were written since they were copied in, and their rows; `clear`: they now count as not
        written."""
        num = self._native.shardwright_cache_written(self._index, None, None, False)
        lines, rows = torch.empty(num, dtype=torch.int64), torch.empty(num, dtype=torch.int64)
        self._native.shardwright_cache_written(self._index, lines.data_ptr(), rows.data_ptr(), clear)
        return lines, rows


def _check_numbers(numbers: Tensor) -> Tensor:
    if numbers.dtype != torch.int64 or numbers.dim() != 1 or numbers.device.type != "cpu":
        raise UserError(f"rows or lines are {numbers.dtype} {tuple(numbers.shape)}; wanted 1-d int64 on the CPU")
    return numbers.contiguous()

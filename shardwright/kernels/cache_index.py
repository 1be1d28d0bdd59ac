"""Which rows are in a cache, and on which line: a set-associative index of 32 ways (csrc/cache_index.cpp).

Shape legend: U distinct rows of a batch.
"""

import weakref
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from itertools import accumulate

import torch
from torch import Tensor

from shardwright.errors import UserError
from shardwright.library import native_library
from shardwright.spec.row_cache import WAYS

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

    def __init__(self, num_lines: int, half_life: int = LFU, table: str = "") -> None:
        native = native_library()
        if native is None:
            raise UserError("a cache needs the compiled kernels, which this installation does not have")
        if num_lines < WAYS or half_life < LFU:
            raise UserError(
                f"a cache of {num_lines} lines and half_life {half_life}; wanted {WAYS} lines or more, -1, 0 or more"
            )
        self.num_lines, self.table = num_lines // WAYS * WAYS, table
        self.counts = CacheCounts()
        self.may_be_written = False  # whether lines may be written since `written_lines` cleared them
        self.native = native
        self.handle = native.shardwright_cache_new(self.num_lines // WAYS, half_life)
        freed = weakref.finalize(self, native.shardwright_cache_free, self.handle)
        freed.atexit = False  # a generator that is closed later may still use it

    def announce(self, rows_U: Tensor) -> None:
        """Announce the distinct rows of the batch after those announced or placed so far."""
        rows = _check_numbers(rows_U)
        if self.native.shardwright_cache_announce(self.handle, rows.data_ptr(), len(rows)) < 0:
            raise UserError(
                f"more than {WINDOW} batches are announced; lower the lead of the stage that announces them"
            )

    def place(self, rows_U: Tensor, scores_U: Tensor | None = None) -> PlacedRows:
        """Find or make lines for the distinct rows of a batch, and pin them."""
        if scores_U is not None and (scores_U.dtype != torch.float32 or scores_U.shape != rows_U.shape):
            raise UserError(
                f"scores are {scores_U.dtype} {tuple(scores_U.shape)}; wanted float32 {tuple(rows_U.shape)}"
            )
        return place_many([self], rows_U, [len(rows_U)], scores_U)[0]

    def release(self, lines_U: Tensor, *, written: bool) -> None:
        """End a batch's use of its lines; `written`: it has changed them. May run beside `place`."""
        release_many([self], lines_U, [len(lines_U)], [written])

    @property
    def num_away(self) -> int:
        """Rows that are not in their own set: so many lines more than rows may be emptied by the next `place`."""
        return self.native.shardwright_cache_away(self.handle)

    def find(self, rows_U: Tensor) -> Tensor:
        """The lines of rows; -1 for those that are not in the cache."""
        rows = _check_numbers(rows_U)
        lines = torch.empty_like(rows)
        self.native.shardwright_cache_find(self.handle, rows.data_ptr(), len(rows), lines.data_ptr())
        return lines

    def written_lines(self, *, clear: bool = False) -> tuple[Tensor, Tensor]:
        """The lines that were written since they were copied in, and their rows; `clear`: they now count as not
        written."""
        num = self.native.shardwright_cache_written(self.handle, None, None, False)
        lines, rows = torch.empty(num, dtype=torch.int64), torch.empty(num, dtype=torch.int64)
        self.native.shardwright_cache_written(self.handle, lines.data_ptr(), rows.data_ptr(), clear)
        self.may_be_written = self.may_be_written and not clear
        return lines, rows


def place_many(
    indices: Sequence[CacheIndex], rows_U: Tensor, counts: Sequence[int], scores_U: Tensor | None = None
) -> list[PlacedRows]:
    """`place` of several caches in one call; `rows_U` has `counts` rows of each, one after the other."""
    rows, scores = _check_numbers(rows_U), None if scores_U is None else scores_U.contiguous()
    num, first, first_written = len(indices), 0, 0
    sizes = [count + index.num_away for index, count in zip(indices, counts, strict=True)]
    batches = _batches_of(indices, counts, sizes)
    found, written = torch.empty(2, len(rows), dtype=torch.int64), torch.empty(2, sum(sizes), dtype=torch.int64)
    numbers = torch.empty(num, 4, dtype=torch.int64)
    pointers = [x.data_ptr() for x in (*found, *written, numbers)]
    native = indices[0].native
    failed = native.shardwright_cache_place(
        batches.data_ptr(), num, rows.data_ptr(), None if scores is None else scores.data_ptr(), *pointers
    )
    if failed >= 0:
        subject = f'table "{indices[failed].table}": ' if indices[failed].table else ""
        raise UserError(
            f"{subject}the rows of the batches in flight do not fit in the {indices[failed].num_lines} lines of the "
            "cache: give it more memory, or use smaller batches"
        )
    placed: list[PlacedRows] = []
    for index, count, size, (num_missing, num_written, num_evicted, num_conflicts) in zip(
        indices, counts, sizes, numbers.tolist(), strict=True
    ):
        index.counts.rows += count
        index.counts.missing += num_missing
        index.counts.evicted += num_evicted
        index.counts.written_back += num_written
        index.counts.conflicts += num_conflicts
        lines, missing = found[0, first : first + count], found[1, first : first + num_missing]
        lines_written, rows_written = written[:, first_written : first_written + num_written]
        placed.append(PlacedRows(lines, missing, lines_written, rows_written))
        first, first_written = first + count, first_written + size
    return placed


def release_many(
    indices: Sequence[CacheIndex], lines_U: Tensor, counts: Sequence[int], written: Sequence[bool]
) -> None:
    """`release` of several caches in one call."""
    lines, batches = _check_numbers(lines_U), _batches_of(indices, counts, counts)
    flags = torch.tensor(written, dtype=torch.int64)
    for index, flag in zip(indices, written, strict=True):
        index.may_be_written = index.may_be_written or flag
    native = indices[0].native
    native.shardwright_cache_release(batches.data_ptr(), len(indices), lines.data_ptr(), flags.data_ptr())


def _batches_of(indices: Sequence[CacheIndex], counts: Sequence[int], sizes: Sequence[int]) -> Tensor:
    """Handle, rows, first row and first written line of each cache."""
    firsts, firsts_written = accumulate(counts, initial=0), accumulate(sizes, initial=0)
    rows = zip(indices, counts, firsts, firsts_written, strict=False)
    return torch.tensor([(index.handle, count, first, written) for index, count, first, written in rows])


def _check_numbers(numbers: Tensor) -> Tensor:
    if numbers.dtype != torch.int64 or numbers.dim() != 1 or numbers.device.type != "cpu":
        raise UserError(f"rows or lines are {numbers.dtype} {tuple(numbers.shape)}; wanted 1-d int64 on the CPU")
    return numbers.contiguous()

"""Which rows are in a cache, and on which line: a set-associative index of 32 ways (csrc/cache_index.h).

Shape legend: N ids, U distinct rows of a batch, M rows to copy, T tables.
"""

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from shardwright.errors import UserError
from shardwright.library import native_library
from shardwright.spec.row_cache import WAYS

WINDOW = 31  # batches that may be announced and not yet placed
LFU = -1  # as half_life: uses are never forgotten
LRU = 0
MAX_LINES = 2**31 - 1
MAX_ROWS = 1 << 40  # of a table
COUNT_EVERY, FIRST_COUNTED = 16, 8  # batches; counting the ids of a batch takes 0.35 to 0.4 of the time of placing it
NUMBERS = 5  # that a call of `place` counts for each index
# Of rows to copy: a line of a table, the row that it gets, and the one that it had, which was written; -1: none.
MOVE_FIELDS = ("table", "line", "new row", "old row")


@dataclass(slots=True)
class CacheCounts:
    """Of distinct rows, since the cache began. `conflicts`: rows for which all lines of their set were pinned.
    `lookups`: ids of one batch of COUNT_EVERY that `place_rows` has placed; `missing_lookups`: of these, ids whose row
    was missing."""

    rows: int = 0
    missing: int = 0
    evicted: int = 0
    written_back: int = 0
    conflicts: int = 0
    lookups: int = 0
    missing_lookups: int = 0

    def __add__(self, other: "CacheCounts") -> "CacheCounts":
        return CacheCounts(
            self.rows + other.rows,
            self.missing + other.missing,
            self.evicted + other.evicted,
            self.written_back + other.written_back,
            self.conflicts + other.conflicts,
            self.lookups + other.lookups,
            self.missing_lookups + other.missing_lookups,
        )


@dataclass(frozen=True, slots=True)
class PlacedRows:
    """The lines of a batch's rows. First the lines `written_lines` are to be copied to rows `written_rows` of the
    slower memory, then rows `missing_U`, positions in the batch, to their lines."""

    lines_U: Tensor
    missing_U: Tensor
    written_lines: Tensor
    written_rows: Tensor


@dataclass(frozen=True, slots=True)
class BatchRows:
    """The distinct rows of a batch, table by table; their numbers by table; which of them each id reads."""

    rows_U: Tensor
    counts: Sequence[int]
    inverse_N: Tensor

    def by_table(self) -> tuple[Tensor, ...]:
        return self.rows_U.split(list(self.counts))


@dataclass(frozen=True, slots=True)
class BatchLines:
    """Lines of the distinct rows and of the ids. Moves, of which `num_first` are to be made before the others: (M, 4),
    with the fields of `MOVE_FIELDS`."""

    rows: BatchRows
    lines_U: Tensor
    lines_N: Tensor
    moves: Tensor
    num_first: int


class CacheIndex:
    """Places rows, numbered by any 64-bit integers, on lines.

    Lines are pinned from `place` to `release`. The line to evict is the one with the farthest next use among announced
    batches; of those without, the one with the lowest score, if rows are placed with scores; of those, with the fewest
    uses, halved for every `half_life` batches since the last (LRU: all are equal; LFU: never halved), then the one used
    longest ago. `adapts`: set dueling. One of 32 sets of lines always evicts as said, one always by LRU, and the others
    follow the one that missed less of late. Caches of less than 64 sets do not adapt.
    """

    def __init__(self, num_lines: int, half_life: int = LFU, table: str = "", *, adapts: bool = False) -> None:
        native = native_library()
        if native is None:
            raise UserError("a cache needs the compiled kernels, which this installation does not have")
        if not WAYS <= num_lines <= MAX_LINES or half_life < LFU:
            raise UserError(
                f"a cache of {num_lines} lines and half_life {half_life}; wanted {WAYS} to {MAX_LINES} lines, -1, 0 or "
                "more"
            )
        self.num_lines, self.table = num_lines // WAYS * WAYS, table
        self.counts = CacheCounts()
        self.num_placed = 0  # batches that `place_rows` has placed, with this index as the first
        self.may_be_written = False  # whether lines may be written since `written_lines` cleared them
        self.native = native
        self.handle = native.shardwright_cache_new(self.num_lines // WAYS, half_life, adapts)
        freed = weakref.finalize(self, native.shardwright_cache_free, self.handle)
        freed.atexit = False  # a generator that is closed later may still use it

    def announce(self, rows_U: Tensor) -> None:
        """Announce the distinct rows of the batch after those announced so far."""
        announce_many([self], rows_U, [len(rows_U)])

    def forget(self) -> None:
        """Forget the announced batches that were not placed."""
        self.native.shardwright_cache_forget(self.handle)

    def place(self, rows_U: Tensor, scores_U: Tensor | None = None, *, announced: bool = False) -> PlacedRows:
        """Find or make lines for the distinct rows of a batch, and pin them. `announced`: it is the first of the
        announced batches that were not placed."""
        if scores_U is not None and (scores_U.dtype != torch.float32 or scores_U.shape != rows_U.shape):
            raise UserError(
                f"scores are {scores_U.dtype} {tuple(scores_U.shape)}; wanted float32 {tuple(rows_U.shape)}"
            )
        return place_many([self], rows_U, [len(rows_U)], scores_U, announced=announced)[0]

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
        self.may_be_written = self.may_be_written and not clear
        return self._list(written=True, clear=clear)

    def full_lines(self) -> tuple[Tensor, Tensor]:
        """The lines with a row, and their rows."""
        return self._list(written=False, clear=False)

    def _list(self, *, written: bool, clear: bool) -> tuple[Tensor, Tensor]:
        num = self.native.shardwright_cache_list(self.handle, None, None, written, False)
        lines, rows = torch.empty(num, dtype=torch.int64), torch.empty(num, dtype=torch.int64)
        self.native.shardwright_cache_list(self.handle, lines.data_ptr(), rows.data_ptr(), written, clear)
        return lines, rows

    def count(self, rows: int, numbers: Sequence[int]) -> None:
        """Add what a call of `place` has counted."""
        missing, written, evicted, conflicts, _ = numbers
        self.counts += CacheCounts(rows, missing, evicted, written, conflicts)

    def too_few_lines(self) -> UserError:
        subject = f'table "{self.table}": ' if self.table else ""
        return UserError(
            f"{subject}the rows of the batches in flight do not fit in the {self.num_lines} lines of the cache: give "
            "it more memory, or use smaller batches"
        )


def place_many(
    indices: Sequence[CacheIndex],
    rows_U: Tensor,
    counts: Sequence[int],
    scores_U: Tensor | None = None,
    *,
    announced: bool = False,
) -> list[PlacedRows]:
    """`place` of several caches in one call; `rows_U` has `counts` rows of each, one after the other."""
    rows, scores = _check_numbers(rows_U), None if scores_U is None else scores_U.contiguous()
    num, first, first_written = len(indices), 0, 0
    sizes = [count + index.num_away for index, count in zip(indices, counts, strict=True)]
    batches = _batches_of(indices, counts, sizes, announced=announced)
    lines_and_missing, written = (
        torch.empty(2, len(rows), dtype=torch.int64),
        torch.empty(2, sum(sizes), dtype=torch.int64),
    )
    numbers = torch.empty(num, NUMBERS, dtype=torch.int64)
    line_pointers, (*written_pointers, numbers_pointer) = _pointers(lines_and_missing), _pointers((*written, numbers))
    native = indices[0].native
    score_pointer = None if scores is None else scores.data_ptr()
    keys = rows.data_ptr(), score_pointer, *line_pointers, None
    failed = native.shardwright_cache_place(batches.data_ptr(), num, *keys, *written_pointers, numbers_pointer)
    if failed >= 0:
        raise indices[failed].too_few_lines()
    placed: list[PlacedRows] = []
    for index, count, size, counted in zip(indices, counts, sizes, numbers.tolist(), strict=True):
        index.count(count, counted)
        num_missing, num_written = counted[:2]
        lines, missing = lines_and_missing[0, first : first + count], lines_and_missing[1, first : first + num_missing]
        lines_written, rows_written = written[:, first_written : first_written + num_written]
        placed.append(PlacedRows(lines, missing, lines_written, rows_written))
        first, first_written = first + count, first_written + size
    return placed


def place_rows(indices: Sequence[CacheIndex | None], rows: BatchRows, *, announced: bool = False) -> BatchLines:
    """Find or make lines for the rows of a batch, and pin them; there is an index for each table, or None where lines
    are rows. `announced`: as in `CacheIndex.place`."""
    cached = [index for index in indices if index is not None]
    num, num_rows, native = len(indices), len(rows.rows_U), cached[0].native
    handles = torch.tensor([0 if index is None else index.handle for index in indices])
    distinct_rows, counts, inverse_N = rows.rows_U.contiguous(), torch.tensor(rows.counts), rows.inverse_N.contiguous()
    lines_U, lines_N = torch.empty_like(distinct_rows), torch.empty_like(inverse_N)
    moves = torch.empty(num_rows + sum(index.num_away for index in cached), len(MOVE_FIELDS), dtype=torch.int64)
    sizes, numbers = torch.empty(2, dtype=torch.int64), torch.empty(num, NUMBERS, dtype=torch.int64)
    arguments = handles.data_ptr(), num, announced, *_pointers((distinct_rows, counts, inverse_N)), len(inverse_N)
    results = _pointers((lines_U, lines_N, moves, sizes[:1], sizes[1:], numbers))
    failed = native.shardwright_cache_place_rows(*arguments, *results)
    if failed >= 0:
        index = indices[failed]
        assert index is not None
        raise index.too_few_lines()
    for index, count, counted in zip(indices, rows.counts, numbers.tolist(), strict=True):
        if index is not None:
            index.count(count, counted)
    num_moves, num_first = sizes.tolist()
    if cached[0].num_placed % COUNT_EVERY == FIRST_COUNTED:
        _count_lookups(indices, rows, moves[:num_moves])
    cached[0].num_placed += 1
    return BatchLines(rows, lines_U, lines_N, moves[:num_moves], num_first)


def _count_lookups(indices: Sequence[CacheIndex | None], rows: BatchRows, moves: Tensor) -> None:
    """Add the ids of a batch, and those whose row was missing, to the counts of each table's index."""
    lookups_U = torch.bincount(rows.inverse_N, minlength=len(rows.rows_U))
    table_M, _, new_M, _ = moves[moves[:, 2] >= 0].T
    table_U = torch.arange(len(indices)).repeat_interleave(torch.tensor(rows.counts))
    missing_M = torch.searchsorted(table_U * MAX_ROWS + rows.rows_U, table_M * MAX_ROWS + new_M)
    missing_T = torch.bincount(table_M, lookups_U[missing_M].double(), minlength=len(indices))
    parts = zip(indices, lookups_U.split(list(rows.counts)), missing_T.tolist(), strict=True)
    for index, own_U, missing in parts:
        if index is not None:
            index.counts += CacheCounts(lookups=int(own_U.sum()), missing_lookups=int(missing))


def announce_many(indices: Sequence[CacheIndex], rows_U: Tensor, counts: Sequence[int]) -> None:
    """`announce` of several caches in one call: rows of the first, of the second, and so on."""
    rows, batches = _check_numbers(rows_U), _batches_of(indices, counts, counts)
    if indices and indices[0].native.shardwright_cache_announce(batches.data_ptr(), len(indices), rows.data_ptr()) >= 0:
        raise UserError(f"more than {WINDOW} batches are announced; lower the lead of the stage that announces them")


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


def _pointers(tensors: Iterable[Tensor]) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors]


def _batches_of(
    indices: Sequence[CacheIndex], counts: Sequence[int], sizes: Sequence[int], *, announced: bool = False
) -> Tensor:
    """Handle, rows, first row and first written line of each cache, and whether its batch was announced."""
    firsts, firsts_written = accumulate(counts, initial=0), accumulate(sizes, initial=0)
    rows = zip(indices, counts, firsts, firsts_written, strict=False)
    return torch.tensor([(index.handle, count, first, written, announced) for index, count, first, written in rows])


def _check_numbers(numbers: Tensor) -> Tensor:
    if numbers.dtype != torch.int64 or numbers.dim() != 1 or numbers.device.type != "cpu":
        raise UserError(f"rows or lines are {numbers.dtype} {tuple(numbers.shape)}; wanted 1-d int64 on the CPU")
    return numbers.contiguous()

"""Hit rates of a cache of rows on recorded accesses, by size and by policy of eviction.

The index of the cache itself (kernels/cache_index.py) places the rows of each batch; nothing is copied. A row counts
once per batch. The first half of the batches fills the cache and is not counted.

Shape legend: U distinct rows of a batch, A accesses: the rows of all batches.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

import torch
from torch import Tensor

from shardwright.kernels.cache_index import LFU, LRU, CacheIndex
from shardwright.spec.row_cache import WAYS

NEVER = 1 << 20  # as the number of the batch of the next use


@dataclass(frozen=True, slots=True)
class Policy:
    """`half_life` and `adapts` as in CacheIndex; `ahead`: batches whose rows are known before; `knows_all`: all later
    ones."""

    name: str
    half_life: int
    adapts: bool = False
    ahead: int = 0
    knows_all: bool = False


@dataclass(frozen=True, slots=True)
class TableAccesses:
    """A table's distinct rows in each batch; `row_bytes`: of a weight and its optimizer state; `uses`: how often each
    batch has each of these rows, to count hits of lookups too."""

    name: str
    num_rows: int
    row_bytes: int
    batches: tuple[Tensor, ...]
    uses: tuple[Tensor, ...] = ()


@dataclass(frozen=True, slots=True)
class Hits:
    """Counted rows; of them missing, and of these never used before; evicted rows that had to be written back; and
    lookups of counted rows, and of missing ones, if the accesses have uses."""

    rows: int = 0
    missing: int = 0
    new: int = 0
    written_back: int = 0
    lookups: int = 0
    missing_lookups: int = 0

    def __add__(self, other: "Hits") -> "Hits":
        return Hits(
            self.rows + other.rows,
            self.missing + other.missing,
            self.new + other.new,
            self.written_back + other.written_back,
            self.lookups + other.lookups,
            self.missing_lookups + other.missing_lookups,
        )

    @property
    def rate(self) -> float:
        return 1 - self.missing / max(1, self.rows)

    @property
    def lookup_rate(self) -> float:
        return 1 - self.missing_lookups / max(1, self.lookups)


TRAINING = 3  # the position among `policies` of the one that training has


def policies(half_life: int, ahead: int) -> tuple[Policy, ...]:
    """The policies that are compared, the optimum last."""
    return (
        Policy("LRU", LRU),
        Policy("LFU", LFU),
        Policy(f"LFU, halved every {half_life} batches", half_life),
        Policy(f"set dueling, next {ahead} known", half_life, adapts=True, ahead=ahead),
        Policy("Belady's optimum", LRU, knows_all=True),
    )


def num_lines(table: TableAccesses, share: float) -> int:
    """Lines of a cache for this share of a table's rows, rounded up to whole sets."""
    return ceil(share * table.num_rows / WAYS) * WAYS


def simulate(table: TableAccesses, lines: int, policy: Policy) -> Hits:
    """Place the rows of all batches, and count those of the second half."""
    batches, half = table.batches, len(table.batches) // 2
    index = CacheIndex(lines, policy.half_life, adapts=policy.adapts)
    next_uses = _next_uses(batches) if policy.knows_all else []
    before, lookups, missing_lookups = Hits(), 0, 0
    for rows_U in batches[: 1 + policy.ahead] if policy.ahead else ():
        index.announce(rows_U)
    for number, rows_U in enumerate(batches):
        if number == half:
            before = Hits(index.counts.rows, index.counts.missing, 0, index.counts.written_back)
        scores_U = -next_uses[number] if next_uses else None
        placed = index.place(rows_U, scores_U, announced=policy.ahead > 0)
        index.release(placed.lines_U, written=True)
        if number >= half and table.uses:
            lookups += int(table.uses[number].sum())
            missing_lookups += int(table.uses[number][placed.missing_U].sum())
        if policy.ahead and (following := number + 1 + policy.ahead) < len(batches):
            index.announce(batches[following])
    counts, num_new = index.counts, _num_new(batches, half)
    written_back = counts.written_back - before.written_back
    rows, missing = counts.rows - before.rows, counts.missing - before.missing
    return Hits(rows, missing, num_new, written_back, lookups, missing_lookups)


def _number_densely(batches: Sequence[Tensor]) -> tuple[Tensor, list[int]]:
    """(A,) the accessed rows, numbered from 0, and the sizes of the batches."""
    rows_A = torch.cat([*batches]) if batches else torch.empty(0, dtype=torch.int64)
    return torch.unique(rows_A, return_inverse=True)[1], [len(rows_U) for rows_U in batches]


def _next_uses(batches: Sequence[Tensor]) -> list[Tensor]:
    """For each row of each batch, the number of the next batch that uses it; NEVER without one."""
    numbers_A, sizes = _number_densely(batches)
    next_use = torch.full((int(numbers_A.max()) + 1 if len(numbers_A) else 0,), float(NEVER))
    found: list[Tensor] = []
    for number, rows_U in reversed([*enumerate(numbers_A.split(sizes))]):
        found.append(next_use[rows_U])
        next_use[rows_U] = float(number)
    return found[::-1]


def _num_new(batches: Sequence[Tensor], half: int) -> int:
    """Rows that no batch of the first half, and only batches from then on, use."""
    first = torch.unique(torch.cat([*batches[:half]])) if half else torch.empty(0, dtype=torch.int64)
    all_rows = torch.unique(torch.cat([*batches])) if batches else first
    return len(all_rows) - len(first)

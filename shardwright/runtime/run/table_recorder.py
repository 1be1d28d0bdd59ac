"""Record windows of training steps: of caches of rows on disk, of copies of rows, and of tables that grow."""

from collections import Counter
from dataclasses import asdict

from shardwright.measure.describe import sparse_of
from shardwright.planner.step.stages import has_copies
from shardwright.runtime.job import Job
from shardwright.runtime.rank_group import RankGroup
from shardwright.runtime.supported import cached_rows
from shardwright.spec.cache_record import CacheWindow, CopyWindow, GrowthWindow

CACHE_COUNTS = (
    *("rows", "missing", "conflicts", "written_back", "bytes_read", "bytes_written"),
    *("lookups", "missing_lookups"),
)
GROWTH_COUNTS = ("room", "rows", "entries", "expired", "evicted")


class TableRecorder:
    """Counts of all ranks. All ranks make it, and call its functions."""

    def __init__(self, job: Job, rank_group: RankGroup) -> None:
        self._job, self._rank_group = job, rank_group
        self._cached = [table.table for table in job.plan.tables if cached_rows(table) is not None]
        tables = sparse.tables if (sparse := sparse_of(job.model)) is not None else ()
        self._growing = any(table.growth is not None for table in tables)
        self._before, self._step = Counter[tuple[str, str]](), job.step
        self._has_copies = has_copies(job.plan.stages)
        self._copies_before: tuple[int, dict[str, list[int]]] = job.step, {}

    def gather(self, step: int) -> list[CacheWindow | GrowthWindow | CopyWindow]:
        """What caches and copies have done since the last call, and the tables that grow; empty if there are none."""
        return [*self._gather_copies(step), *self._gather_caches(step), *self._gather_growth(step)]

    def _gather_copies(self, step: int) -> list[CopyWindow]:
        """The window since the one before, by tables that share their copies."""
        if not self._has_copies:
            return []
        own = {tables: counts.numbers for tables, counts in self._job.copy_counts().items()}
        totals: dict[str, list[int]] = {}
        for of_rank in self._rank_group.all_gather_json(own):
            for tables, numbers in of_rank.items():
                totals[tables] = [a + b for a, b in zip(numbers, totals.get(tables, [0] * len(numbers)), strict=True)]
        before, (first_step, self._copies_before) = self._copies_before[1], (self._copies_before[0], (step, totals))
        windows: list[CopyWindow] = []
        for tables, numbers in totals.items():
            moved = [a - b for a, b in zip(numbers, before.get(tables, [0] * len(numbers)), strict=True)]
            read, validated, sent, pushed, *lookups = moved[:6]
            own = read, validated, sent, pushed, tuple(moved[6:])
            windows.append(CopyWindow(step, step - first_step, tables, *own, *lookups))
        return windows

    def _gather_caches(self, step: int) -> list[CacheWindow]:
        """The window since the one before, by table; none if all tables are in memory."""
        if not self._cached:
            return []
        counts = self._sum_over_ranks(_disk_counts(self._job), CACHE_COUNTS)
        steps, before = step - self._step, self._before
        self._step, self._before = step, counts
        return [
            CacheWindow(step, steps, table, *(counts[table, name] - before[table, name] for name in CACHE_COUNTS))
            for table in self._cached
        ]

    def _gather_growth(self, step: int) -> list[GrowthWindow]:
        """The tables that grow, if any."""
        if not self._growing:
            return []
        counts = self._sum_over_ranks(self._job.growth_counts(), GROWTH_COUNTS)
        tables = dict.fromkeys(table for table, _ in counts)
        return [GrowthWindow(step, table, *(counts[table, name] for name in GROWTH_COUNTS)) for table in tables]

    def _sum_over_ranks(self, own: dict[str, dict[str, int]], names: tuple[str, ...]) -> Counter[tuple[str, str]]:
        counts = Counter[tuple[str, str]]()
        for of_rank in self._rank_group.all_gather_json(own):
            for table, numbers in of_rank.items():
                counts.update({(table, name): numbers[name] for name in names})
        return counts


def _disk_counts(job: Job) -> dict[str, dict[str, int]]:
    """`job.cache_counts`, with the bytes that the stores of a table have read and written."""
    counts = {name: asdict(own) | {"bytes_read": 0, "bytes_written": 0} for name, own in job.cache_counts().items()}
    for local in job.model.sparse.exchange.local_shards if counts else ():
        for index, cached in local.caches.items():
            numbers, own = cached.store.numbers, counts[local.tables[index].name]
            own["bytes_read"] += numbers.bytes_read
            own["bytes_written"] += numbers.bytes_written
    return counts

"""The cache's index against a simulator in plain Python, and its guarantees."""

import math
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.errors import UserError
from shardwright.kernels.arguments import Ids
from shardwright.kernels.cache_index import LFU, LRU, BatchRows, CacheIndex, place_many, place_rows, release_many
from shardwright.kernels.dedup import unique_rows
from shardwright.spec.row_cache import WAYS


def set_of(row: int, num_sets: int) -> int:
    mask = 2**64 - 1
    h = row & mask
    h = ((h ^ (h >> 33)) * 0xFF51AFD7ED558CCD) & mask
    h = ((h ^ (h >> 33)) * 0xC4CEB9FE1A85EC53) & mask
    h ^= h >> 33
    return h * num_sets >> 64


@dataclass
class Entry:
    """A row in the simulated cache."""

    uses: int = 0
    last: int = 0
    pins: int = 0
    score: float = 0.0
    written: bool = False


@dataclass
class Simulator:
    """A cache; of each set the rows by way. `future`: the rows of the announced batches. `leader_misses`: of late, of
    the sets that evict by uses and of those that are LRU."""

    num_sets: int
    half_life: int
    adapts: bool = False
    batch: int = 0
    sets: list[dict[int, Entry]] = field(default_factory=list)  # in the order of the ways
    future: list[set[int]] = field(default_factory=list)
    leader_misses: list[float] = field(default_factory=lambda: [0.0, 0.0])

    def __post_init__(self) -> None:
        self.sets = [{} for _ in range(self.num_sets)]

    def place(self, rows: list[int], scores: list[float]) -> tuple[list[int], set[int]]:
        """The missing rows, and the rows that are evicted although they were written."""
        self.batch += 1
        if self.future:
            self.future.pop(0)
        missing, evicted = [], set[int]()
        by_row = dict(zip(rows, scores, strict=True))
        for row in rows:
            entry = self.sets[set_of(row, self.num_sets)].get(row)
            if entry is None:
                missing.append(row)
            else:
                self._use(entry, by_row[row])
        for row in missing:
            ways = self.sets[set_of(row, self.num_sets)]
            entry = Entry(last=self.batch)
            if len(ways) == WAYS:
                free = [each for each in ways if not ways[each].pins]
                count_uses = self._counts_uses(set_of(row, self.num_sets))
                # The first way of equal ones.
                victim = min(free, key=lambda each: self._order(each, ways[each], count_uses=count_uses))
                if ways[victim].written:
                    evicted.add(victim)
                rows_by_way = [row if each == victim else each for each in ways]
                entries = [entry if each == victim else ways[each] for each in ways]
                self.sets[set_of(row, self.num_sets)] = dict(zip(rows_by_way, entries, strict=True))
            else:
                ways[row] = entry
            self._use(entry, by_row[row])
        leaders = [self._leader(set_of(row, self.num_sets)) for row in missing]
        for kind in (0, 1):
            self.leader_misses[kind] += leaders.count(kind) - self.leader_misses[kind] / 64
        return missing, evicted

    def _leader(self, number: int) -> int | None:
        adapts = self.adapts and self.num_sets >= 64 and number < self.num_sets // 32 * 32
        return number % 32 if adapts and number % 32 < 2 else None

    def _counts_uses(self, number: int) -> bool:
        leader = self._leader(number)
        return self.leader_misses[0] <= self.leader_misses[1] if leader is None else leader == 0

    def release(self, rows: list[int], written: bool) -> None:
        for row in rows:
            entry = self.sets[set_of(row, self.num_sets)][row]
            entry.pins -= 1
            entry.written |= written

    def _aged(self, entry: Entry) -> int:
        if self.half_life == LFU:
            return entry.uses
        return entry.uses >> (self.batch - entry.last) // self.half_life if self.half_life else 0

    def _use(self, entry: Entry, score: float) -> None:
        entry.uses, entry.last, entry.score = self._aged(entry) + 1, self.batch, score
        entry.pins += 1

    def _order(self, row: int, entry: Entry, *, count_uses: bool) -> tuple[float, float, int, int]:
        distance = next((i for i, rows in enumerate(self.future) if row in rows), math.inf)
        return -distance, entry.score, self._aged(entry) if count_uses else 0, entry.last


SCORES = (-2.0, -0.0, 0.0, 1.0, 3.0)


@st.composite
def accesses(draw: st.DrawFn) -> tuple[int, int, int, list[list[int]], bool]:
    """Sets, half-life, look-ahead, distinct rows of each batch, and whether there are scores. At most two batches are
    in flight, of less rows than a set has lines, so that no row conflicts."""
    num_sets, half_life = draw(st.integers(1, 4)), draw(st.sampled_from((LRU, LFU, 1, 3)))
    seed, num_rows = draw(st.integers(0, 2**32 - 1)), draw(st.sampled_from((40, 100, 300)))
    rng = np.random.default_rng(seed)
    popularity = np.arange(1, num_rows + 1) ** -draw(st.sampled_from((0.0, 1.0)))
    rows = rng.integers(-(2**63), 2**63 - 1, num_rows)
    batches = [
        rng.choice(rows, rng.integers(0, WAYS // 2), replace=False, p=popularity / popularity.sum()).tolist()
        for _ in range(draw(st.integers(1, 30)))
    ]
    return num_sets, half_life, draw(st.integers(0, 6)), batches, draw(st.booleans())


@settings(max_examples=150, deadline=None)
@given(accesses(), st.booleans())
def test_misses_and_evictions_equal_those_of_a_simulator(case, overlapped):
    num_sets, half_life, ahead, batches, has_scores = case
    index, simulator = CacheIndex(num_sets * WAYS, half_life), Simulator(num_sets, half_life)
    values, store = torch.zeros(index.num_lines, dtype=torch.int64), dict[int, int]()
    expected, in_flight, announced = dict[int, int](), list[tuple[torch.Tensor, list[int]]](), 0
    for number, rows in enumerate(batches):
        announced = max(announced, number + 1)
        if number == 0 and ahead:
            index.announce(torch.tensor(rows, dtype=torch.int64))
            simulator.future.append(set(rows))
        while ahead and announced < min(len(batches), number + ahead + 1):
            index.announce(torch.tensor(batches[announced], dtype=torch.int64))
            simulator.future.append(set(batches[announced]))
            announced += 1
        scores = [SCORES[hash(row) % 5] for row in rows] if has_scores else [0.0] * len(rows)
        rows_U = torch.tensor(rows, dtype=torch.int64)
        placed = index.place(rows_U, torch.tensor(scores) if has_scores else None, announced=ahead > 0)
        missing, evicted = simulator.place(rows, scores)
        assert sorted(rows_U[placed.missing_U].tolist()) == sorted(missing)
        assert set(placed.written_rows.tolist()) == evicted
        # The lines hold the values of their rows.
        for line, row in zip(placed.written_lines.tolist(), placed.written_rows.tolist(), strict=True):
            store[row] = int(values[line])
        for at in placed.missing_U.tolist():
            values[placed.lines_U[at]] = store.get(rows[at], 0)
        assert values[placed.lines_U].tolist() == [expected.get(row, 0) for row in rows]
        in_flight.append((placed.lines_U, rows))
        while len(in_flight) > overlapped:
            lines, used = in_flight.pop(0)
            is_written = number % 3 > 0
            if is_written:
                values[lines] += 1
                expected |= {row: expected.get(row, 0) + 1 for row in used}
            index.release(lines, written=is_written)
            simulator.release(used, is_written)
    lines, rows = index.written_lines(clear=True)
    store |= dict(zip(rows.tolist(), values[lines].tolist(), strict=True))
    if not in_flight:
        assert {row: value for row, value in store.items() if value} == expected
    assert len(index.written_lines()[0]) == 0
    assert index.counts.rows == sum(map(len, batches)) and index.counts.conflicts == 0


def test_rows_of_a_full_set_are_placed_in_others_and_leave_when_released():
    index = CacheIndex(4 * WAYS)
    rows = [row for row in range(2000) if set_of(row, 4) == 2][: WAYS + 5]
    placed = index.place(torch.tensor(rows))
    assert index.counts.conflicts == 5 and len(set(placed.lines_U.tolist())) == len(rows)
    assert index.find(torch.tensor(rows)).tolist() == placed.lines_U.tolist()
    again = index.place(torch.tensor(rows))  # while the first batch is in flight
    assert again.lines_U.tolist() == placed.lines_U.tolist() and len(again.missing_U) == 0
    for each in (placed, again):
        index.release(each.lines_U, written=True)
    assert len(index.written_lines()[0]) == len(rows)
    other = next(row for row in range(2000) if set_of(row, 4) == 0)
    moved = index.place(torch.tensor([other]))
    away = set(rows[WAYS:])
    assert set(moved.written_rows.tolist()) == away
    assert [int(line) < 0 for line in index.find(torch.tensor(rows))] == [row in away for row in rows]


def test_a_batch_larger_than_the_cache_is_refused():
    index = CacheIndex(2 * WAYS)
    with pytest.raises(UserError, match="do not fit in the 64 lines of the cache"):
        index.place(torch.arange(65))


def test_too_many_announced_batches_are_refused():
    index = CacheIndex(WAYS)
    for _ in range(31):
        index.announce(torch.arange(3))
    with pytest.raises(UserError, match="more than 31 batches are announced"):
        index.announce(torch.arange(3))
    index.place(torch.arange(3))  # not announced
    with pytest.raises(UserError, match="more than 31 batches are announced"):
        index.announce(torch.arange(3))
    index.place(torch.arange(3), announced=True)
    index.announce(torch.arange(3))
    index.forget()
    for _ in range(31):
        index.announce(torch.arange(3))


def test_threads_do_not_change_what_is_missing():
    """Rows keep their lines, whichever thread placed them."""
    before, missing = torch.get_num_threads(), {}
    try:
        for num_threads in (1, 2, 5):
            torch.set_num_threads(num_threads)
            index, rng, line_of = CacheIndex(1 << 15, 2, adapts=True), np.random.default_rng(3), dict[int, int]()
            missing[num_threads] = []
            for _ in range(6):
                rows = torch.from_numpy(rng.permutation(60_000)[:12_000])
                placed = index.place(rows)
                lines, is_missing = placed.lines_U.tolist(), {*placed.missing_U.tolist()}
                assert len({*lines}) == len(lines)
                for at, (row, line) in enumerate(zip(rows.tolist(), lines, strict=True)):
                    assert at in is_missing or line_of[row] == line
                    line_of[row] = line
                missing[num_threads].append(sorted(rows[placed.missing_U].tolist()))
                index.release(placed.lines_U, written=False)
    finally:
        torch.set_num_threads(before)
    assert missing[1] == missing[2] == missing[5] and len(missing[1][-1]) > 3_000


def test_lru_lfu_and_ageing():
    """Of 32 lines, row 0 was used three times, long ago; row 1 once, in the last batch."""
    survivors = {}
    for half_life in (LRU, LFU, 2):
        index = CacheIndex(WAYS, half_life)
        batches = [[0]] * 3 + [[*range(2, WAYS)]] + [[1]] + [[*range(100, 100 + WAYS - 1)]]
        for rows in batches:
            placed = index.place(torch.tensor(rows))
            index.release(placed.lines_U, written=False)
        survivors[half_life] = [row for row in range(WAYS) if int(index.find(torch.tensor([row]))) >= 0]
    assert survivors == {LRU: [1], LFU: [0], 2: [1]}


@pytest.mark.parametrize("num_sets", (63, 64, 97))
@pytest.mark.parametrize("shift", (0, 150))
def test_a_cache_that_adapts_evicts_as_a_simulator_that_does(num_sets, shift):
    """With a shift, rows are drawn from a window that moves on with every batch."""
    rng = np.random.default_rng(num_sets)
    num_rows = num_sets * WAYS * 3
    popularity = np.arange(1, num_rows + 1) ** -0.8
    index, simulator = CacheIndex(num_sets * WAYS, 100, adapts=True), Simulator(num_sets, 100, True)
    chosen = set[bool]()
    for number in range(60):
        rows = rng.choice(num_rows, num_sets * WAYS // 4, replace=False, p=popularity / popularity.sum())
        rows_U = torch.from_numpy(rows + shift * number)
        placed = index.place(rows_U)
        missing, evicted = simulator.place(rows_U.tolist(), [0.0] * len(rows))
        assert sorted(rows_U[placed.missing_U].tolist()) == sorted(missing)
        assert set(placed.written_rows.tolist()) == evicted
        index.release(placed.lines_U, written=True)
        simulator.release(rows_U.tolist(), True)
        chosen.add(simulator._counts_uses(40))
    assert True in chosen
    if num_sets < 64 or shift:
        assert (False in chosen) == (num_sets >= 64)


@pytest.mark.parametrize(("shift", "better"), [(0, "uses"), (1_500, "LRU")])
@pytest.mark.parametrize("num_sets", (65, 256))
def test_a_cache_that_adapts_misses_about_as_little_as_the_better_policy(num_sets, shift, better):
    rng, missing = np.random.default_rng(0), {}
    scale = num_sets / 256
    popularity = np.arange(1, int(60_000 * scale) + 1) ** -1.05
    batches = [
        torch.from_numpy(
            rng.choice(int(12_000 * scale), int(3_000 * scale), replace=False) + int(shift * scale) * number
            if shift
            else np.unique(rng.choice(len(popularity), int(6_000 * scale), p=popularity / popularity.sum()))
        )
        for number in range(160)
    ]
    for name, half_life, adapts in (("uses", 100, False), ("LRU", LRU, False), ("adapts", 100, True)):
        index = CacheIndex(num_sets * WAYS, half_life, adapts=adapts)
        for number, rows_U in enumerate(batches):
            index.release(index.place(rows_U).lines_U, written=False)
            if number == 80:
                before = index.counts.missing
        missing[name] = index.counts.missing - before
    least, most = sorted((missing["uses"], missing["LRU"]))
    assert missing[better] == least < 0.98 * most
    assert missing["adapts"] < least + 0.2 * (most - least)


def test_scores_of_the_caller_come_before_uses():
    index = CacheIndex(WAYS, LFU)
    rows, scores = torch.arange(WAYS), torch.ones(WAYS)
    scores[7] = 0.0
    for _ in range(3):
        index.release(index.place(rows, scores).lines_U, written=False)
    placed = index.place(torch.tensor([99]), torch.ones(1))
    assert int(index.find(torch.tensor([7]))) == -1 and placed.missing_U.tolist() == [0]


def test_ids_of_one_batch_of_16_are_counted():
    """Of tables with a cache; an id is missing if its row was not on a line before its batch."""
    torch.manual_seed(0)
    indices = [CacheIndex(64, 100, "first"), None, CacheIndex(64, 100, "third")]
    expected, num_missing = [[0, 0] for _ in indices], 0
    for step in range(60):
        ids = Ids(torch.randint(0, 120, (90,)), torch.tensor([0, 40, 60, 90]), None, [0, 1, 2], [0] * 3)
        rows = BatchRows(*unique_rows(ids, [120] * 3))
        is_found_U = torch.cat(
            [
                own if index is None else index.find(own) >= 0
                for index, own in zip(indices, rows.by_table(), strict=True)
            ]
        )
        placed = place_rows(indices, rows)
        if step % 16 == 8:
            is_missing_N = ~is_found_U.bool()[rows.inverse_N]
            for table, part in enumerate((slice(0, 40), slice(40, 60), slice(60, 90))):
                expected[table][0] += len(is_missing_N[part])
                expected[table][1] += int(is_missing_N[part].sum())
        by_table = zip(placed.lines_U.split(rows.counts), indices, strict=True)
        own_lines = torch.cat([lines for lines, each in by_table if each])
        sizes = [count for count, each in zip(rows.counts, indices, strict=True) if each]
        release_many([each for each in indices if each], own_lines, sizes, [True, True])
    for index, (lookups, missing) in zip(indices, expected, strict=True):
        if index is not None:
            assert (index.counts.lookups, index.counts.missing_lookups) == (lookups, missing)
            num_missing += missing
    assert num_missing and index.counts.lookups == 4 * 30


def test_ids_are_placed_as_their_distinct_rows_and_moves_pair_old_and_new_rows():
    """Over many batches of two tables, with conflicts; a twin places the same distinct rows."""
    torch.manual_seed(0)
    indices, twins = ([CacheIndex(96, 100, name) for name in ("first", "second")] for _ in range(2))
    on_lines: list[dict[int, int]] = [{}, {}]  # by table, the row on each line
    in_flight = []
    for step in range(200):
        values, table_rows = torch.randint(0, 150, (68,)), [150, 150]
        ids = Ids(values, torch.tensor([0, 24, 44, 68]), None, [0, 1, 0], [0] * 3)
        rows_U, counts, inverse_N = unique_rows(ids, table_rows)
        expected = place_many(twins, rows_U, counts)
        placed = place_rows(indices, BatchRows(rows_U, counts, inverse_N))
        assert torch.equal(placed.lines_U, torch.cat([each.lines_U for each in expected]))
        assert torch.equal(placed.lines_N, placed.lines_U[inverse_N])
        moves = placed.moves.tolist()
        written = sorted((table, line, old) for table, line, _, old in moves if old >= 0)
        assert written == sorted(
            (table, line, row)
            for table, each in enumerate(expected)
            for line, row in zip(each.written_lines.tolist(), each.written_rows.tolist(), strict=True)
        )
        for number, (table, line, new, old) in enumerate(moves):
            assert old < 0 or on_lines[table][line] == old
            assert (new < 0) == (number < placed.num_first)
            if new >= 0:
                on_lines[table][line] = new
        rest = [(table, new) for table, _, new, old in moves[placed.num_first :]]
        assert not {(table, old) for table, _, _, old in moves[placed.num_first :] if old >= 0} & {*rest}
        for table, rows, lines in zip((0, 1), rows_U.split(counts), placed.lines_U.split(counts), strict=True):
            assert [on_lines[table][line] for line in lines.tolist()] == rows.tolist()
        in_flight.append((placed.lines_U, counts, expected))
        if len(in_flight) == 2:
            lines_U, counts, expected = in_flight.pop(0)
            release_many(indices, lines_U, counts, [True, step % 2 == 0])
            release_many(twins, torch.cat([each.lines_U for each in expected]), counts, [True, step % 2 == 0])
    without_ids = [replace(index.counts, lookups=0, missing_lookups=0) for index in indices]
    assert without_ids == [twin.counts for twin in twins]
    assert sum(index.counts.conflicts for index in indices) > 0


def test_too_few_lines_of_a_table_are_named_and_tables_without_cache_keep_their_rows():
    ids = Ids(torch.arange(40).repeat(2), torch.tensor([0, 40, 80]), None, [0, 1], [0, 0])
    rows = BatchRows(*unique_rows(ids, [150, 150]))
    placed = place_rows([None, CacheIndex(64, 100, "second")], rows)
    assert torch.equal(placed.lines_N[:40], torch.arange(40)) and {*placed.moves[:, 0].tolist()} == {1}
    indices = [CacheIndex(64, 100, "first"), CacheIndex(32, 100, "second")]
    with pytest.raises(UserError, match='table "second": the rows of the batches in flight do not fit in the 32 lines'):
        place_rows(indices, rows)


def test_rows_of_announced_batches_are_kept_and_forgotten_with_them():
    """Of 32 lines, rows 0 to 9 are used again in the batch after the next; other batches may be placed in between."""
    for forget in (False, True):
        index = CacheIndex(WAYS, LRU)
        batches = [torch.arange(10), torch.arange(100, 100 + WAYS - 10), torch.arange(200, 210), torch.arange(10)]
        for rows_U in batches:
            index.announce(rows_U)
        for number, rows_U in enumerate(batches[:3]):
            if number == 2 and forget:
                index.forget()
            index.release(index.place(rows_U, announced=not (forget and number == 2)).lines_U, written=False)
            index.release(index.place(rows_U).lines_U, written=False)  # an evaluation, which was not announced
        assert bool((index.find(batches[3]) >= 0).all()) != forget


def test_several_indices_are_placed_on_several_threads_as_on_one():
    torch.manual_seed(0)
    rows = [torch.randperm(40_000)[:5_000] for _ in range(4)]
    before, results = torch.get_num_threads(), []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        indices = [CacheIndex(8192, 100) for _ in rows]
        lines = []
        for _ in range(3):
            placed = place_many(indices, torch.cat(rows), [5_000] * 4)
            lines += [each.lines_U for each in placed]
            release_many(indices, torch.cat([each.lines_U for each in placed]), [5_000] * 4, [True] * 4)
        results.append((torch.cat(lines), [index.counts for index in indices]))
    torch.set_num_threads(before)
    assert torch.equal(results[0][0], results[1][0]) and results[0][1] == results[1][1]

"""Ids of growing tables against a simulator in plain Python."""

from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.errors import UserError
from shardwright.kernels.id_map import IdMap, KnownIds
from shardwright.spec.workload import Growth

IDS = st.integers(-(2**63), 2**63 - 1)
EVICTED_SHARE = 32


@dataclass
class Known:
    uses: int
    last: int
    admitted: bool = False
    value: int = 0  # how often its row was trained


@dataclass
class Simulator:
    """What is known of each id; `trained`: a row's value is the number of its updates since it began."""

    rows: int
    growth: Growth
    in_flight: int
    batch: int = 0
    known: dict[int, Known] = field(default_factory=dict)
    removed: list[int] = field(default_factory=list)

    def place(self, ids: list[int]) -> dict[int, bool]:
        """Whether each id is trained by this batch, which begins to train them."""
        self.batch += 1
        for key in dict.fromkeys(ids):
            entry = self.known.get(key)
            if entry is not None and self._is_expired(entry):
                self._end(key)
                entry = None
            if entry is None:
                entry = self.known[key] = Known(0, self.batch)
            entry.uses = self._aged(entry)
            entry.last = self.batch
        for key in ids:
            self.known[key].uses += 1
        for key in dict.fromkeys(ids):
            entry = self.known[key]
            if not entry.admitted and entry.uses >= self.growth.admit_after:
                self._make_room()
                entry.admitted = True
        return {key: self.known[key].admitted for key in ids}

    def rows_now(self) -> dict[int, Known]:
        return {key: entry for key, entry in self.known.items() if entry.admitted and not self._is_expired(entry)}

    def candidates(self) -> dict[int, Known]:
        return {
            key: entry
            for key, entry in self.known.items()
            if not entry.admitted and entry.uses and not self._is_expired(entry)
        }

    def _is_expired(self, entry: Known) -> bool:
        return bool(self.growth.expire_after) and self.batch - entry.last > self.growth.expire_after

    def _aged(self, entry: Known) -> int:
        return entry.uses >> ((self.batch - entry.last) // self.growth.half_life)

    def _end(self, key: int) -> None:
        if self.known[key].admitted:
            self.removed.append(key)
        del self.known[key]

    def _make_room(self) -> None:
        admitted = [key for key, entry in self.known.items() if entry.admitted]
        expired = [key for key in admitted if self._is_expired(self.known[key])]
        if len(admitted) - len(expired) < self.rows:
            for key in expired:
                self._end(key)
            return
        others = [key for key in admitted if self.batch - self.known[key].last >= self.in_flight]
        others.sort(key=lambda key: (self._aged(self.known[key]), self.known[key].last, key))
        if not others:
            raise UserError("full")
        for key in others[: self.rows // EVICTED_SHARE + 1]:
            self._end(key)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_places_rows_as_a_simulator_does(data):
    """Which ids are trained, which rows end, and whose line a row has, for any batches, some not of training."""
    rows, in_flight = data.draw(st.integers(4, 200)), data.draw(st.integers(1, 3))
    expire_after = data.draw(st.sampled_from([0, in_flight, 4, 9]))
    growth = Growth(data.draw(st.integers(1, 3)), max(expire_after, in_flight if expire_after else 0), 4)
    pool = data.draw(st.lists(IDS, min_size=1, max_size=60, unique=True))
    id_map, simulator = IdMap("t", rows, 300, growth, in_flight), Simulator(rows, growth, in_flight)
    assert not len(id_map.take_removed())  # from now on they are recorded
    trained_L = torch.full((id_map.num_lines,), -1)
    for _ in range(data.draw(st.integers(1, 40))):
        ids = data.draw(st.lists(st.sampled_from(pool), max_size=max(1, rows // 3)))
        training = data.draw(st.integers(0, 4)) > 0
        before = {key: entry.value for key, entry in simulator.rows_now().items()}
        try:
            is_trained = simulator.place(ids) if training else {}
        except UserError:
            with pytest.raises(UserError, match="do not fit"):
                id_map.place(torch.tensor(ids), training=True)
            return
        placed = id_map.place(torch.tensor(ids, dtype=torch.int64), training=training)
        assert len(set(placed.fresh_F.tolist())) == len(placed.fresh_F)
        trained_L[placed.fresh_F] = 0
        assert torch.equal(id_map.key_of_L[placed.lines_N], torch.tensor(ids, dtype=torch.int64))
        for key, line, update_line in zip(ids, placed.lines_N.tolist(), placed.update_lines_N.tolist(), strict=True):
            if training:
                assert (update_line == line) == is_trained[key] and (update_line == rows) == (not is_trained[key])
                assert trained_L[line] == simulator.known[key].value
            else:
                assert trained_L[line] == before.get(key, 0)
        if training:
            for key in {key for key in ids if is_trained[key]}:
                simulator.known[key].value += 1
            updated = {line for line in placed.update_lines_N.tolist() if line != rows}
            trained_L[list(updated)] += 1
        id_map.release(placed.spares_S)
        known, candidates = id_map.known_ids(), id_map.known_ids(admitted=False)
        assert known.ids_E.tolist() == sorted(simulator.rows_now())
        assert candidates.ids_E.tolist() == sorted(simulator.candidates())
        for part, expected in ((known, simulator.rows_now()), (candidates, simulator.candidates())):
            assert part.uses_E.tolist() == [expected[key].uses for key in part.ids_E.tolist()]
            assert part.last_E.tolist() == [expected[key].last for key in part.ids_E.tolist()]
        assert torch.equal(id_map.find(known.ids_E), known.lines_E)
        assert (id_map.find(candidates.ids_E) == -1).all()
    expired = {key for key, entry in simulator.known.items() if entry.admitted and simulator._is_expired(entry)}
    assert set(id_map.take_removed().tolist()) == set(simulator.removed) | expired
    assert not len(id_map.take_removed())


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_a_loaded_map_goes_on_as_the_saved_one(data):
    growth, rows = Growth(data.draw(st.integers(1, 3)), data.draw(st.sampled_from([0, 5])), 3), 24
    pool = torch.tensor(data.draw(st.lists(IDS, min_size=1, max_size=80, unique=True)))
    seed = data.draw(st.integers(0, 1000))
    generator = torch.Generator().manual_seed(seed)
    batches = [pool[torch.randint(0, len(pool), (6,), generator=generator)] for _ in range(30)]
    first = IdMap("t", rows, 100, growth, 2)
    for ids in batches[:15]:
        first.release(first.place(ids, training=True).spares_S)
    second = IdMap("t", rows, 100, growth, 2)
    second.load(first.numbers.batches, first.known_ids(), first.known_ids(admitted=False))
    num = len(first.known_ids().ids_E)
    assert torch.equal(second.find(first.known_ids().ids_E), torch.arange(num))
    for ids in batches[15:]:
        placed = [each.place(ids, training=True) for each in (first, second)]
        assert torch.equal(*(each.update_lines_N == rows for each in placed))
        for each, own in zip((first, second), placed, strict=True):
            each.release(own.spares_S)
        for admitted in (True, False):
            known = [each.known_ids(admitted=admitted) for each in (first, second)]
            assert all(torch.equal(a, b) for a, b in zip(known[0][::2], known[1][::2], strict=True))


def test_many_ids_in_a_table_with_few_rows():
    """A stream of new ids: memory is bounded, and ids that come often keep their rows."""
    id_map = IdMap("t", 1000, 1000, Growth(half_life=50), 2)
    popular = torch.arange(200) * 7919 - 2**62
    for batch in range(400):
        new = torch.arange(300) + 300 * batch
        placed = id_map.place(torch.cat([popular, new]), training=True)
        id_map.release(placed.spares_S)
    assert (id_map.find(popular) >= 0).all()
    assert id_map.numbers.rows <= 1000 and id_map.numbers.entries < 8000
    assert id_map.numbers.evicted > 100_000 and id_map.numbers.expired == 0


def test_rows_that_expire_leave_the_map():
    id_map = IdMap("t", 100_000, 10, Growth(expire_after=20), 2)
    id_map.take_removed()
    for batch in range(300):
        id_map.place(torch.arange(100) + 100 * batch, training=True)
    assert id_map.numbers.entries < 2 * 21 * 100 and id_map.numbers.expired > 25_000
    assert len(id_map.take_removed()) == id_map.numbers.expired


def test_candidates_do_not_pile_up():
    """Ids that occur once, with a few that come back: those are kept. A loaded map forgets the same ids."""
    growth = Growth(admit_after=9)
    first = IdMap("t", 100, 600, growth, 1)
    for batch in range(40):
        ids = torch.cat([torch.arange(1_000 * (batch + 1), 1_000 * (batch + 1) + 500), torch.arange(10 * (batch % 8))])
        first.release(first.place(ids, training=True).spares_S)
        if batch == 20:
            second = IdMap("t", 100, 600, growth, 1)
            second.load(first.numbers.batches, first.known_ids(), first.known_ids(admitted=False))
        elif batch > 20:
            second.release(second.place(ids, training=True).spares_S)
            for admitted in (True, False):
                assert torch.equal(first.known_ids(admitted=admitted).ids_E, second.known_ids(admitted=admitted).ids_E)
        assert len(first.known_ids(admitted=False).ids_E) <= 1024 + 600
    assert torch.equal(first.known_ids().ids_E, torch.arange(60)) and first.numbers.entries < 4096


def test_mistakes_are_named():
    with pytest.raises(UserError, match="expire_after must be 4 or more"):
        IdMap("t", 10, 10, Growth(expire_after=3), 4)
    with pytest.raises(UserError, match='table "t": rows of the batches in flight do not fit in its 10 rows'):
        id_map = IdMap("t", 10, 10, Growth(), 1)
        id_map.place(torch.arange(11), training=True)
    assert id_map.numbers.rows == 0 and (id_map.find(torch.arange(11)) < 0).all()
    assert len(id_map.place(torch.arange(10), training=True).fresh_F) == 10
    id_map = IdMap("t", 10, 10, Growth(admit_after=2), 1)
    for training in (False, False, True):  # the lines that it had got are free again
        with pytest.raises(UserError, match="ids without a row of their own do not fit"):
            id_map.place(torch.arange(11), training=training)
    assert len(id_map.place(torch.arange(100, 110), training=False).spares_S) == 10
    known = KnownIds(*[torch.arange(11)] * 4)
    with pytest.raises(UserError, match="11 rows do not fit"):
        IdMap("t", 10, 10, Growth(), 1).load(5, known, KnownIds(*[known.ids_E[:0]] * 4))

"""Copies with bounded staleness, in one process: no read misses more than the bound, and no update is lost.

Each rank's gradient of a row is -1 in the column of the rank, and the learning rate is 1: a row counts the updates of
each rank that it has seen.
"""

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.embeddings.copies import row_copies
from shardwright.embeddings.copies.row_clocks import RowClocks
from shardwright.embeddings.copies.row_copies import NO_VERSION, Lease, RowCopies, row_values
from shardwright.embeddings.copies.updates import RowUpdates
from shardwright.errors import UserError
from shardwright.kernels import reference
from shardwright.spec.optimizer import SGD, AdaGrad, Adam, PartialRowWiseAdam, RowWiseAdaGrad, state_shapes
from shardwright.spec.plan import Bounded

ROWS = 60  # of the table


class Twin:
    """An owner and the ranks that have copies, in lockstep."""

    def __init__(self, num_ranks: int, lines: int, bounds: Bounded, optimizer, dim: int, num_rows: int = ROWS) -> None:
        self.optimizer = optimizer
        self.weight = torch.zeros(num_rows, dim, dtype=torch.float64)
        self.state = states(optimizer, dim, num_rows)
        self.clocks = RowClocks(self.weight, self.state, Lease(bounds.pull, num_ranks - 1))
        self.copies = [RowCopies(lines, dim, optimizer, bounds.push, torch.float64) for _ in range(num_ranks)]
        self.num_expired = self.num_refreshed = self.num_pushed = 0

    def run(self, batches, gradient, seen, first=0, uses=torch.ones_like):
        """`batches`: rows by step and rank. `gradient(rank, step, rows)`, `seen(rank, step, rows, weights)`. `uses`: of
        rows in a batch."""
        for step, by_rank in enumerate(batches, start=first):
            planned = [copies.find_lines(rows, uses(rows)) for copies, rows in zip(self.copies, by_rank, strict=True)]
            for rank, (copies, batch) in enumerate(zip(self.copies, planned, strict=True)):
                self.validate(copies, batch)
                seen(rank, step, batch.rows_R, copies.read(batch))
            sent = []
            for rank, (copies, batch) in enumerate(zip(self.copies, planned, strict=True)):
                grad = gradient(rank, step, batch.rows_R)
                counts, pushed_uses = copies.counts_to_push(batch)
                sent.append(copies.updates_to_push(batch, grad, self.optimizer))
                assert torch.equal(sent[-1].rows_V, batch.pushed_rows_V) and torch.equal(sent[-1].counts_V, counts)
                assert torch.equal(sent[-1].uses_V, pushed_uses)
                copies.update(batch, grad, self.optimizer, step + 1)
                self.num_pushed += len(sent[-1].rows_V)
            self.clocks.apply(self.optimizer, sent, step + 1)

    def validate(self, copies, batch):
        expired = batch.rows_R[batch.is_expired_R]
        is_new, leases, versions = self.clocks.renew(expired, copies.versions(batch))
        values = row_values(self.weight, self.state, expired[is_new])
        copies.fill(batch, leases, is_new, values, versions[is_new], self.optimizer)
        self.num_expired, self.num_refreshed = self.num_expired + len(expired), self.num_refreshed + int(is_new.sum())

    def flush(self, step):
        self.clocks.apply(self.optimizer, [copies.drop() for copies in self.copies], step)


def states(optimizer, dim, num_rows=ROWS):
    shapes = state_shapes(optimizer, num_rows, dim)
    return {name: torch.zeros(shape, dtype=torch.float64) for name, shape in shapes.items()}


@st.composite
def cases(draw):
    num_ranks, num_steps = draw(st.integers(1, 4)), draw(st.integers(1, 40))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    popularity = torch.arange(1.0, ROWS + 1) ** -draw(st.sampled_from((0.0, 1.0, 2.0)))

    def rows():
        num = int(torch.randint(0, 11, (), generator=generator))
        return torch.multinomial(popularity, num, generator=generator) if num else torch.empty(0, dtype=torch.int64)

    batches = [[rows() for _ in range(num_ranks)] for _ in range(num_steps)]
    bounds = Bounded(draw(st.sampled_from((0, 1, 5, 20, 100))), draw(st.sampled_from((0, 1, 3, 100))))
    flushes = draw(st.sets(st.integers(0, num_steps - 1), max_size=2))
    return num_ranks, draw(st.sampled_from((32, 64))), bounds, batches, flushes, draw(st.sampled_from((1, 2, 40)))


@settings(max_examples=80)
@given(cases())
def test_reads_miss_no_more_than_the_bound_and_no_update_is_lost(case):
    num_ranks, lines, bounds, batches, flushes, most_uses = case
    twin = Twin(num_ranks, lines, bounds, SGD(1.0), num_ranks)
    produced, max_missed = Counter(), 0

    def gradient(rank, step, rows):
        grad = torch.zeros(len(rows), num_ranks, dtype=torch.float64)
        grad[:, rank] = -1
        produced.update((row, rank) for row in rows.tolist())
        return grad

    def seen(rank, step, rows, weights):
        nonlocal max_missed
        for row, weight in zip(rows.tolist(), weights.tolist(), strict=True):
            missed = [produced[row, other] - weight[other] for other in range(num_ranks)]
            assert missed[rank] == 0 and min(missed) >= 0
            max_missed = max(max_missed, sum(missed))

    for step, by_rank in enumerate(batches):
        twin.run([by_rank], gradient, seen, step, lambda rows, step=step: 1 + (rows + step) % most_uses)
        assert max(int(copies._uses_L.max()) for copies in twin.copies) <= bounds.push
        if step in flushes:
            twin.flush(step + 1)
            assert_owner_has(twin, produced, num_ranks)
    assert max_missed <= bounds.pull + (num_ranks - 1) * bounds.push
    twin.flush(len(batches))
    assert_owner_has(twin, produced, num_ranks)


def assert_owner_has(twin, produced, num_ranks):
    for row in range(ROWS):
        assert twin.weight[row].tolist() == [produced[row, rank] for rank in range(num_ranks)]
        assert twin.clocks.version_E[row] == sum(produced[row, rank] for rank in range(num_ranks))


def test_bounds_count_uses():
    """A batch that has an id five times is five uses of its row; the first updates show owners how many there are."""
    num_ranks, num_uses, bounds = 3, 5, Bounded(20, 10)
    twin, missed = Twin(num_ranks, 32, bounds, SGD(1.0), num_ranks), list[float]()

    def gradient(rank, step, rows):
        grad = torch.zeros(len(rows), num_ranks, dtype=torch.float64)
        grad[:, rank] = -1
        return grad

    def seen(rank, step, rows, weights):
        missed.extend((num_ranks * step - weights.sum(1)).tolist())

    batches = [[torch.arange(20)] * num_ranks] * 30
    twin.run(batches[:1], gradient, lambda *_: None, 0, lambda rows: torch.full_like(rows, num_uses))
    twin.flush(1)
    twin.run(batches, gradient, seen, 1, lambda rows: torch.full_like(rows, num_uses))
    assert 0 < max(missed) * num_uses <= bounds.max_missed(num_ranks)


def test_staleness_is_used():
    """The bound is not kept by asking for everything: of rows that all ranks use, owners send few."""
    num_ranks, batches = 4, [[torch.arange(20)] * 4] * 60
    twins = {}
    for pull in (0, 30):
        twins[pull] = twin = Twin(num_ranks, 32, Bounded(pull, 10), SGD(1.0), num_ranks)
        twin.run(batches, lambda rank, step, rows: torch.ones(len(rows), 4, dtype=torch.float64), lambda *_: None)
    assert twins[0].num_expired == 60 * 20 * 4
    assert twins[30].num_expired <= 60 * 20 * 4 / 5 and twins[30].num_refreshed <= twins[30].num_expired
    assert int(twins[30].clocks.missed.sum()) > 0


@pytest.mark.parametrize(
    "optimizer", (SGD(0.1, momentum=0.9), AdaGrad(0.1), RowWiseAdaGrad(0.1), Adam(0.1), PartialRowWiseAdam(0.1))
)
def test_updates_that_are_sent_at_once_train_like_a_table(optimizer):
    """Bounds of 0: all ranks read what one process would have."""
    generator, dim, num_ranks = torch.Generator().manual_seed(0), 3, 3
    batches = [[torch.randperm(ROWS, generator=generator)[:9] for _ in range(num_ranks)] for _ in range(20)]
    values = {}

    def gradient(rank, step, rows):
        values[rank, step] = torch.randn(len(rows), dim, dtype=torch.float64, generator=generator)
        return values[rank, step]

    def seen(rank, step, rows, weights):
        assert torch.equal(weights, twin.weight[rows])

    twin = Twin(num_ranks, 64, Bounded(0, 0), optimizer, dim)
    twin.run(batches, gradient, seen)
    weight, state = torch.zeros(ROWS, dim, dtype=torch.float64), states(optimizer, dim)
    for step, rows in enumerate(batches):
        grads = torch.cat([values[rank, step] for rank in range(num_ranks)])
        summed = reference.sum_by_row(torch.cat(rows), grads)
        reference.update(optimizer, weight, state, summed, step=step + 1)
    torch.testing.assert_close(twin.weight, weight, rtol=1e-12, atol=1e-12)
    for name, part in state.items():
        torch.testing.assert_close(twin.state[name], part, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("optimizer", (AdaGrad(0.1), RowWiseAdaGrad(0.1)))
def test_sums_of_adagrad_get_the_square_of_each_gradient(optimizer):
    """One rank that sends every fourth update: the owner's sums are those of a table that had each one."""
    dim, rows = 3, torch.tensor([4, 7])
    twin = Twin(2, 32, Bounded(100, 3), optimizer, dim)
    nothing = torch.empty(0, dtype=torch.int64)
    gradients = [torch.full((2, dim), float(step + 1), dtype=torch.float64) for step in range(8)]

    def gradient(rank, step, rows):
        return gradients[step][: len(rows)]

    twin.run([[rows, nothing]] * 8, gradient, lambda *_: None)
    squares = sum((grad**2 if isinstance(optimizer, AdaGrad) else (grad**2).mean(1)) for grad in gradients)
    torch.testing.assert_close(twin.state["sum"][rows], squares, rtol=1e-12, atol=0)


def test_a_row_that_is_used_no_more_sends_its_updates():
    twin = Twin(2, 32, Bounded(10_000, 10_000), SGD(1.0), 2)
    nothing = torch.empty(0, dtype=torch.int64)
    ones = torch.ones(1, 2, dtype=torch.float64)
    twin.run([[torch.tensor([5]), nothing]], lambda rank, step, rows: ones[: len(rows)], lambda *_: None)
    assert twin.weight[5].tolist() == [0, 0]
    twin.run([[nothing, nothing]] * 1024, lambda rank, step, rows: ones[:0], lambda *_: None)
    assert twin.weight[5].tolist() == [-1, -1]


def test_rows_in_the_set_of_another_row_keep_own_updates():
    """The 60 rows do not fill both sets of 32 lines evenly, so that in each batch some change their lines."""
    twin, produced = Twin(2, 64, Bounded(100, 100), SGD(1.0), 2), Counter()

    def gradient(rank, step, rows):
        produced[rank] += 1
        grad = torch.zeros(len(rows), 2, dtype=torch.float64)
        grad[:, rank] = -1
        return grad

    def seen(rank, step, rows, weights):
        assert (weights[:, rank] == step).all()

    twin.run([[torch.arange(60)] * 2] * 8, gradient, seen)
    assert any(copies.index.counts.conflicts for copies in twin.copies)
    twin.flush(8)
    assert (twin.weight == 8).all()


@pytest.mark.parametrize("next_rows", (torch.arange(40, 72), torch.arange(32)), ids=("the same", "those evicted"))
def test_the_updates_of_a_failed_batch_are_pushed_with_the_next_one(next_rows):
    copies, ones = RowCopies(32, 2, SGD(1.0), 10_000, torch.float64), torch.ones(32, 2, dtype=torch.float64)
    clocks, num_updates = RowClocks(torch.zeros(100, 2, dtype=torch.float64), {}, Lease(10_000, 1)), torch.zeros(100)

    def train(rows, *, fails=False):
        batch = copies.find_lines(rows, torch.ones_like(rows))
        if fails:
            return copies.cancel()
        is_new, leases, versions = clocks.renew(rows[batch.is_expired_R], copies.versions(batch))
        copies.fill(
            batch, leases, is_new, clocks.weight_ED[rows[batch.is_expired_R][is_new]], versions[is_new], SGD(1.0)
        )
        assert torch.equal(copies.read(batch), -num_updates[rows, None] * ones[: len(rows)]), "own updates are read"
        num_updates[rows] += 1
        updates = copies.updates_to_push(batch, ones[: len(rows)], SGD(1.0))
        copies.update(batch, ones[: len(rows)], SGD(1.0), 1)
        clocks.apply(SGD(1.0), [updates], 1)

    train(torch.arange(32))
    train(torch.arange(40, 72), fails=True)  # evicts all rows
    train(torch.arange(40, 72), fails=True)
    train(next_rows)
    clocks.apply(SGD(1.0), [copies.drop()], 1)
    assert torch.equal(clocks.weight_ED, -num_updates[:, None] * torch.ones(2)) and num_updates.sum() == 64


def test_a_row_that_has_not_arrived_stays_without_a_version(monkeypatch):
    """Its own updates wait in its line when the batch that needs it fails, and may then be pushed before it arrives."""
    monkeypatch.setattr(row_copies, "MAX_UNPUSHED_BATCHES", 2)
    copies, clocks = (
        RowCopies(32, 1, SGD(1.0), 10_000, torch.float64),
        RowClocks(torch.zeros(100, 1).double(), {}, Lease(9, 0)),
    )
    one = torch.ones(1, 1, dtype=torch.float64)

    def train(rows):
        batch = copies.find_lines(rows, torch.ones_like(rows))
        is_new, leases, versions = clocks.renew(rows[batch.is_expired_R], copies.versions(batch))
        new = rows[batch.is_expired_R][is_new]
        copies.fill(batch, leases, is_new, clocks.weight_ED[new], versions[is_new], SGD(1.0))
        read, gradients = copies.read(batch), one.expand(len(rows), 1)
        updates = copies.updates_to_push(batch, gradients, SGD(1.0))
        copies.update(batch, gradients, SGD(1.0), 1)
        clocks.apply(SGD(1.0), [updates], 1)
        return read

    rows = torch.arange(32)
    assert not train(rows).any()
    for failed in (torch.arange(40, 72), rows):  # evicts the rows, whose updates wait; then places them anew
        copies.find_lines(failed, torch.ones_like(failed))
        copies.cancel()
    copies.weight_LD[copies._version_L == NO_VERSION] = torch.nan  # whatever is there
    for _ in range(2):  # pushes the updates of all lines that have any
        train(torch.tensor([80]))
    copied = torch.isin(rows, copies._row_of_L)
    assert copied.any() and (train(rows[copied]) == -1).all(), "own updates are read"


def test_overdue_updates_of_a_failed_batch_return_to_their_copies(monkeypatch):
    """Else the next batch would validate a version that no owner has given."""
    monkeypatch.setattr(row_copies, "MAX_UNPUSHED_BATCHES", 2)
    copies, ones = RowCopies(32, 2, AdaGrad(1.0), 10_000, torch.float64), torch.ones(4, 2, dtype=torch.float64)
    clocks = RowClocks(torch.zeros(9, 2).double(), {"sum": torch.zeros(9, 2).double()}, Lease(10_000, 1))
    rows, uses = torch.arange(4), torch.arange(1, 5)
    batch = copies.find_lines(rows, uses)
    is_new, leases, versions = clocks.renew(rows, copies.versions(batch))
    copies.fill(batch, leases, is_new, torch.zeros(4, 4).double(), versions, AdaGrad(1.0))
    copies.update(batch, ones, AdaGrad(1.0), 1)
    lines = batch.lines_R
    before = [part[lines].clone() for part in (copies._version_L, copies._unpushed_L, copies._uses_L, copies._sum_LD)]
    num_overdue = 0
    for first in (4, 5):  # between them they push the updates of all lines
        batch = copies.find_lines(torch.arange(first, first + 1), torch.ones(1, dtype=torch.int64))
        num_overdue += len(batch.overdue.rows_V)
        copies.cancel()
    after = [part[lines] for part in (copies._version_L, copies._unpushed_L, copies._uses_L, copies._sum_LD)]
    assert num_overdue == 4 and all(map(torch.equal, after, before))
    assert copies.drop().squares_VS.sum() == 8, "once"


def test_too_few_copies_say_what_to_raise():
    copies = RowCopies(32, 2, SGD(1.0), 1, torch.float32, "item, user")
    with pytest.raises(
        UserError, match='the 33 rows of a batch do not fit in the 32 copies of tables "item, user": raise'
    ):
        copies.find_lines(torch.arange(33), torch.ones(33, dtype=torch.int64))


def test_an_owner_that_counts_past_32_bits_says_so():
    clocks = RowClocks(torch.zeros(4, 2), {}, Lease(1, 1))
    one = torch.ones(1, dtype=torch.int64)
    update = RowUpdates(one, one, one, torch.zeros(1, 2), torch.zeros(1, 0))
    clocks.apply(SGD(1.0), [update], 1)
    clocks.version_E[1] = 2**31 - 1
    with pytest.raises(UserError, match="more than 2\\^31 updates"):
        clocks.apply(SGD(1.0), [update], 1)
    assert NO_VERSION < 0

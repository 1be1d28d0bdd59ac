"""Copies with bounded staleness, in one process: no read misses more than the bound, and no update is lost.

Each rank's gradient of a row is -1 in the column of the rank, and the learning rate is 1: a row counts the updates of
each rank that it has seen.
"""

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.embeddings.copies.row_clocks import RowClocks
from shardwright.embeddings.copies.row_copies import NO_VERSION, Lease, RowCopies, row_values
from shardwright.embeddings.copies.updates import RowUpdates
from shardwright.kernels import reference
from shardwright.spec.optimizer import SGD, AdaGrad, Adam, PartialRowWiseAdam, RowWiseAdaGrad, state_shapes
from shardwright.spec.plan import Bounded

ROWS = 60  # of the table


class Twin:
    """An owner and the ranks that have copies, in lockstep."""

    def __init__(self, num_ranks: int, lines: int, bounds: Bounded, optimizer, dim: int) -> None:
        self.optimizer = optimizer
        self.weight, self.state = torch.zeros(ROWS, dim, dtype=torch.float64), states(optimizer, dim)
        self.clocks = RowClocks(self.weight, self.state, Lease(bounds.pull, num_ranks - 1))
        self.copies = [RowCopies(lines, dim, optimizer, bounds.push, torch.float64) for _ in range(num_ranks)]
        self.num_asked = self.num_sent = 0

    def run(self, batches, gradient, seen, first=0):
        """`batches`: distinct rows by step and rank. `gradient(rank, step, rows)`, `seen(rank, step, rows, weights)`."""
        for step, by_rank in enumerate(batches, start=first):
            planned = [copies.plan(rows) for copies, rows in zip(self.copies, by_rank, strict=True)]
            for rank, (copies, batch) in enumerate(zip(self.copies, planned, strict=True)):
                self.answer(copies, batch)
                seen(rank, step, batch.rows_R, copies.read(batch))
            sent = []
            for rank, (copies, batch) in enumerate(zip(self.copies, planned, strict=True)):
                grad = gradient(rank, step, batch.rows_R)
                counts = copies.counts_to_send(batch)
                sent.append(copies.sent(batch, grad, self.optimizer))
                assert torch.equal(sent[-1].rows_V, batch.sent_rows_V) and torch.equal(sent[-1].counts_V, counts)
                copies.update(batch, grad, self.optimizer, step + 1)
            self.clocks.apply(self.optimizer, sent, step + 1)

    def answer(self, copies, batch):
        asked = batch.rows_R[batch.is_asked_R]
        is_new, leases, versions = self.clocks.answer(asked, copies.versions(batch))
        values = row_values(self.weight, self.state, asked[is_new])
        copies.fill(batch, leases, is_new, values, versions[is_new], self.optimizer)
        self.num_asked, self.num_sent = self.num_asked + len(asked), self.num_sent + int(is_new.sum())

    def settle(self, step):
        self.clocks.apply(self.optimizer, [copies.forget() for copies in self.copies], step)


def states(optimizer, dim):
    return {name: torch.zeros(shape, dtype=torch.float64) for name, shape in state_shapes(optimizer, ROWS, dim).items()}


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
    settles = draw(st.sets(st.integers(0, num_steps - 1), max_size=2))
    return num_ranks, draw(st.sampled_from((32, 64))), bounds, batches, settles


@settings(max_examples=80)
@given(cases())
def test_reads_miss_no_more_than_the_bound_and_no_update_is_lost(case):
    num_ranks, lines, bounds, batches, settles = case
    twin = Twin(num_ranks, lines, bounds, SGD(1.0), num_ranks)
    produced, most_missed = Counter(), 0

    def gradient(rank, step, rows):
        grad = torch.zeros(len(rows), num_ranks, dtype=torch.float64)
        grad[:, rank] = -1
        produced.update((row, rank) for row in rows.tolist())
        return grad

    def seen(rank, step, rows, weights):
        nonlocal most_missed
        for row, weight in zip(rows.tolist(), weights.tolist(), strict=True):
            missed = [produced[row, other] - weight[other] for other in range(num_ranks)]
            assert missed[rank] == 0 and min(missed) >= 0
            most_missed = max(most_missed, sum(missed))

    for step, by_rank in enumerate(batches):
        twin.run([by_rank], gradient, seen, step)
        if step in settles:
            twin.settle(step + 1)
            assert_owner_has(twin, produced, num_ranks)
    assert most_missed <= bounds.pull + (num_ranks - 1) * bounds.push
    twin.settle(len(batches))
    assert_owner_has(twin, produced, num_ranks)


def assert_owner_has(twin, produced, num_ranks):
    for row in range(ROWS):
        assert twin.weight[row].tolist() == [produced[row, rank] for rank in range(num_ranks)]
        assert twin.clocks.version_E[row] == sum(produced[row, rank] for rank in range(num_ranks))


def test_staleness_is_used():
    """The bound is not kept by asking for everything: of rows that all ranks use, owners send few."""
    num_ranks, batches = 4, [[torch.arange(20)] * 4] * 60
    twins = {}
    for pull in (0, 30):
        twins[pull] = twin = Twin(num_ranks, 32, Bounded(pull, 10), SGD(1.0), num_ranks)
        twin.run(batches, lambda rank, step, rows: torch.ones(len(rows), 4, dtype=torch.float64), lambda *_: None)
    assert twins[0].num_asked == 60 * 20 * 4
    assert twins[30].num_asked <= 60 * 20 * 4 / 5 and twins[30].num_sent <= twins[30].num_asked
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


def test_an_owner_that_counts_past_32_bits_says_so():
    from shardwright.errors import UserError

    clocks = RowClocks(torch.zeros(4, 2), {}, Lease(1, 1))
    one = torch.ones(1, dtype=torch.int64)
    update = RowUpdates(one, one, torch.zeros(1, 2), torch.zeros(1, 0))
    clocks.apply(SGD(1.0), [update], 1)
    clocks.version_E[1] = 2**31 - 1
    with pytest.raises(UserError, match="more than 2\\^31 updates"):
        clocks.apply(SGD(1.0), [update], 1)
    assert NO_VERSION < 0

"""Copies with bounded staleness, in one process: no read misses more than the bound, and no update is lost.

Each rank's gradient of a row is -1 in the column of the rank, and the learning rate is 1: a row counts the updates of
each rank that it has seen.
"""

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.embeddings.row_clocks import RowClocks
from shardwright.embeddings.row_copies import Bounds, RowCopies
from shardwright.spec.optimizer import SGD, AdaGrad, Adam, RowWiseAdaGrad

ROWS, AHEAD = 60, 2  # rows of the table; batches that are planned ahead


class Twin:
    """An owner and the ranks that have copies, in lockstep: batch b is planned AHEAD batches before it is read."""

    def __init__(self, num_ranks: int, lines: int, bounds: Bounds, optimizer, dim: int) -> None:
        self.bounds, self.optimizer = bounds, optimizer
        self.table = {"weight": torch.zeros(ROWS, dim, dtype=torch.float64), **states(optimizer, ROWS, dim)}
        self.clocks = RowClocks(ROWS)
        self.copies = []
        for _ in range(num_ranks):
            parts = {"weight": torch.full((lines, dim), torch.nan, dtype=torch.float64), **states(optimizer, lines, dim)}
            self.copies.append(RowCopies(parts, optimizer, bounds))

    def run(self, batches, gradient, seen):
        """`batches`: by step and rank, distinct rows. `gradient(rank, step, rows)`; `seen(rank, step, rows, weights)`."""
        planned, answers = {}, {}
        for now in range(-AHEAD, len(batches)):
            if now + AHEAD < len(batches):
                pairs = zip(self.copies, batches[now + AHEAD], strict=True)
                planned[now + AHEAD] = [copies.plan(now + AHEAD, rows) for copies, rows in pairs]
            if 0 <= now + 1 < len(batches):
                answers[now + 1] = self.answer(planned[now + 1])
            if now >= 0:
                self.read(now, planned[now], answers.pop(now), seen)
                sent = []
                for rank, (copies, batch) in enumerate(zip(self.copies, planned.pop(now), strict=True)):
                    sent.append(copies.update(batch, gradient(rank, now, batch.rows_U), now + 1))
                self.apply(sent, now + 1)

    def answer(self, planned):
        answers = []
        for copies, batch in zip(self.copies, planned, strict=True):
            is_new, leases = self.clocks.answer(batch.rows_U[batch.is_asked_U], copies.ask(batch), self.bounds)
            copies.extend(batch, leases)
            answers.append(is_new)
        return answers

    def read(self, step, planned, answers, seen):
        for rank, (copies, batch, is_new) in enumerate(zip(self.copies, planned, answers, strict=True)):
            rows = batch.rows_U[batch.is_asked_U][is_new]
            parts = {name: part[rows] for name, part in self.table.items()}
            copies.fill(batch, is_new, parts, self.clocks.version_E[rows], step)
            seen(rank, step, batch.rows_U, copies.weight_LD[batch.lines_U])

    def apply(self, sent, step):
        state = {name: part for name, part in self.table.items() if name != "weight"}
        self.clocks.apply(self.optimizer, self.table["weight"], state, sent, step)

    def flush(self, step):
        self.apply([copies.flush() for copies in self.copies], step)


def states(optimizer, rows, dim):
    from shardwright.spec.optimizer import state_shapes

    return {name: torch.zeros(shape, dtype=torch.float64) for name, shape in state_shapes(optimizer, rows, dim).items()}


@st.composite
def cases(draw):
    num_ranks, num_steps = draw(st.integers(1, 4)), draw(st.integers(1, 30))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    popularity = torch.arange(1.0, ROWS + 1) ** -draw(st.sampled_from((0.0, 1.0, 2.0)))

    def rows():
        num = int(torch.randint(1, 11, (), generator=generator))
        return torch.multinomial(popularity, num, generator=generator)

    batches = [[rows() for _ in range(num_ranks)] for _ in range(num_steps)]
    pull, push = draw(st.sampled_from((0, 1, 5, 20, 100))), draw(st.sampled_from((0, 1, 3, 100)))
    bounds = Bounds(pull, push, num_ranks - 1)
    return num_ranks, draw(st.sampled_from((32, 64))), bounds, batches


@settings(max_examples=80)
@given(cases())
def test_reads_miss_no_more_than_the_bound_and_no_update_is_lost(case):
    num_ranks, lines, bounds, batches = case
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

    twin.run(batches, gradient, seen)
    assert most_missed <= bounds.pull + (num_ranks - 1) * bounds.push
    twin.flush(len(batches))
    for row in range(ROWS):
        assert twin.table["weight"][row].tolist() == [produced[row, rank] for rank in range(num_ranks)]
        assert twin.clocks.version_E[row] == sum(produced[row, rank] for rank in range(num_ranks))


@pytest.mark.parametrize("optimizer", (SGD(0.1, momentum=0.9), AdaGrad(0.1), RowWiseAdaGrad(0.1), Adam(0.1)))
def test_updates_that_are_sent_at_once_train_like_a_table(optimizer):
    """Bounds of 0: all ranks read what one process would have."""
    generator, dim, num_ranks = torch.Generator().manual_seed(0), 3, 3
    batches = [
        [torch.randperm(ROWS, generator=generator)[:9] for _ in range(num_ranks)] for _ in range(20)
    ]
    values = {}

    def gradient(rank, step, rows):
        values[rank, step] = torch.randn(len(rows), dim, dtype=torch.float64, generator=generator)
        return values[rank, step]

    def seen(rank, step, rows, weights):
        assert torch.equal(weights, twin.table["weight"][rows])

    twin = Twin(num_ranks, 64, Bounds(0, 0, num_ranks - 1), optimizer, dim)
    twin.run(batches, gradient, seen)
    plain = {"weight": torch.zeros(ROWS, dim, dtype=torch.float64), **states(optimizer, ROWS, dim)}
    state = {name: part for name, part in plain.items() if name != "weight"}
    from shardwright.kernels import reference

    for step, rows in enumerate(batches):
        grads = torch.cat([values[rank, step] for rank in range(num_ranks)])
        reference.update(
            optimizer, plain["weight"], state, reference.sum_by_row(torch.cat(rows), grads), step=step + 1
        )
    for name, part in plain.items():
        torch.testing.assert_close(twin.table[name], part, rtol=1e-12, atol=1e-12)

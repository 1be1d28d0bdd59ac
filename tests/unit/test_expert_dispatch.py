"""The dispatch of rows to experts, against plain loops over rows."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.experts.dispatch import make_dispatch, ring_steps
from shardwright.spec.expert_rows import (
    ORDER_BOUND,
    ExpertRowRanges,
    balance_rows,
    balanced_order,
    owners_of,
    rank_order,
    split_experts,
)


@st.composite
def choices(draw):
    """(rows by rank and expert, rows that each rank computes, groups)."""
    num_ranks, num_experts = draw(st.integers(1, 5)), draw(st.integers(1, 7))
    sizes = st.lists(st.integers(0, 4), min_size=num_ranks * num_experts, max_size=num_ranks * num_experts)
    chosen_RE = np.array(draw(sizes), np.int64).reshape(num_ranks, num_experts)
    computed_RE = None
    if draw(st.booleans()):  # every row goes to a drawn rank
        computed_RE = np.zeros_like(chosen_RE)
        for expert, total in enumerate(chosen_RE.sum(0).tolist()):
            for _ in range(total):
                computed_RE[draw(st.integers(0, num_ranks - 1)), expert] += 1
    return chosen_RE, computed_RE, draw(st.integers(1, num_ranks))


def rows_in_order(order, expert):
    """The rows of an expert, (rank, number), in their order, and the ranks that may compute them, in theirs."""
    segments = np.flatnonzero(order.expert_P == expert)
    rows = [
        (order.source_P[segment], order.begin_P[segment] + number)
        for segment in segments
        for number in range(order.end_P[segment] - order.start_P[segment])
    ]
    return rows, np.argsort(order.place_RE[:, expert]).tolist()


@pytest.mark.parametrize("order_rows", [rank_order, balanced_order])
@given(drawn=choices())
def test_every_row_goes_to_its_rank_and_back_in_order(order_rows, drawn):
    chosen_RE, computed_RE, num_groups = drawn
    num_ranks, num_experts = chosen_RE.shape
    owners = owners_of(num_experts, num_ranks)
    order = order_rows(chosen_RE, owners)
    dispatches = [make_dispatch(order, rank, num_groups, computed_RE) for rank in range(num_ranks)]
    rows = [  # of each rank, (expert, rank, number) in the order of experts
        [(expert, rank, number) for expert in range(num_experts) for number in range(chosen_RE[rank, expert])]
        for rank in range(num_ranks)
    ]
    sent = [[rows[rank][i] for i in dispatches[rank].order] for rank in range(num_ranks)]
    assert all(sorted(mine) == rows[rank] for rank, mine in enumerate(sent))
    for rank, dispatch in enumerate(dispatches):
        computed = {False: [], True: []}
        for number, step in enumerate(dispatch.steps):
            received = [None] * step.num_received
            for source, into in step.receives:
                received[into] = sent[source][sends_of(dispatches[source], step, number).get(rank, slice(0))]
            ordered = received if step.by_expert is None else [received[i] for i in step.by_expert]
            experts = dispatch.copied if step.is_copy else dispatch.own
            by_expert = [[row for row in ordered if row[0] == expert] for expert in experts]
            assert ordered == [row for part in by_expert for row in part]
            assert step.sizes.tolist() == [len(part) for part in by_expert]
            positions = range(len(ordered)) if step.positions is None else step.positions
            computed[step.is_copy] += zip(positions, ordered, strict=True)
        for is_copy, pairs in computed.items():
            experts, expected = dispatch.copied if is_copy else dispatch.own, []
            for expert in experts:
                ordered, holders = rows_in_order(order, expert)
                lengths = [len(ordered) if holder == owners[expert] else 0 for holder in holders]
                if computed_RE is not None:
                    lengths = computed_RE[holders, expert].tolist()
                position = holders.index(rank)
                part = ordered[sum(lengths[:position]) : sum(lengths[: position + 1])]
                expected += [(expert, *row) for row in part]
            assert [row for _, row in sorted(pairs)] == expected
            assert dispatch.sizes(is_copy=is_copy).sum() == len(expected)


@given(choices())
def test_rows_are_ordered_by_rank_after_the_owner(drawn):
    chosen_RE, _, _ = drawn
    num_ranks, num_experts = chosen_RE.shape
    owners = owners_of(num_experts, num_ranks)
    order = rank_order(chosen_RE, owners)
    for expert, owner in enumerate(owners):
        ranks = [(owner + 1 + step) % num_ranks for step in range(num_ranks)]
        rows = [(rank, number) for rank in ranks for number in range(chosen_RE[rank, expert])]
        assert rows_in_order(order, expert) == (rows, ranks)


@given(choices())
def test_balancing_copies_compute_their_own_rows_first(drawn):
    """Every row is in the order once; the copies for which the order is made compute as many own rows as they can."""
    chosen_RE, computed_RE, _ = drawn
    owners = owners_of(chosen_RE.shape[1], len(chosen_RE))
    order, balanced_RE = balanced_order(chosen_RE, owners), balance_rows(chosen_RE, owners, ORDER_BOUND)
    for expert, owner in enumerate(owners):
        rows, ranks = rows_in_order(order, expert)
        expected = [(rank, number) for rank in range(len(chosen_RE)) for number in range(chosen_RE[rank, expert])]
        assert sorted(rows) == expected and ranks[-1] == owner
        for segment in np.flatnonzero(order.expert_P == expert):
            assert order.source_P[segment] == rows[order.start_P[segment]][0]
        if balanced_RE[:, expert].sum() == balanced_RE[owner, expert]:
            assert rows == rows_in_order(rank_order(chosen_RE, owners), expert)[0]
        start = 0
        for rank in ranks[:-1]:
            computes = rows[start : start + balanced_RE[rank, expert]]
            own = [row for row in computes if row[0] == rank]
            assert len(own) == min(balanced_RE[rank, expert], chosen_RE[rank, expert])
            start += len(computes)
    ranges = ExpertRowRanges(order, computed_RE)
    between = ranges.rows_between()
    assert (between == ranges.rows_between(is_copy=False) + ranges.rows_between(is_copy=True)).all()
    assert (between.sum(1) == chosen_RE.sum(1)).all()
    for size in (size for size in range(1, len(chosen_RE) + 1) if len(chosen_RE) % size == 0):
        groups = np.arange(len(chosen_RE)) // size
        local = [between[groups == group][:, groups == group].sum() for group in range(len(chosen_RE) // size)]
        assert ranges.local_rows(size).tolist() == local


def sends_of(dispatch, step, number):
    """What another rank sends in the step in which this rank receives."""
    steps = [other for other in dispatch.steps if other.is_copy == step.is_copy]
    num_groups = sum(not other.is_copy for other in dispatch.steps)
    return dict(steps[number % num_groups].sends) if steps else {}


def test_a_rank_without_copies_takes_part_in_the_step_of_those_with_copies():
    """Rank 1 computes a row of expert 0 for rank 0; the others neither send nor receive."""
    chosen_RE = np.array([[2, 0, 0], [0, 0, 0], [0, 0, 3]])
    computed_RE = np.array([[1, 0, 0], [1, 0, 0], [0, 0, 3]])
    order = balanced_order(chosen_RE, owners_of(3, 3))
    dispatches = [make_dispatch(order, rank, 1, computed_RE) for rank in range(3)]
    assert [dispatch.copied for dispatch in dispatches] == [(), (0,), ()]
    assert [[step.num_received for step in dispatch.steps if step.is_copy] for dispatch in dispatches] == [[0], [1], []]


@pytest.mark.parametrize(("num_experts", "num_ranks"), [(8, 4), (7, 4), (2, 4), (1, 3)])
def test_experts_are_split_evenly(num_experts, num_ranks):
    ranges = split_experts(num_experts, num_ranks)
    assert ranges[0][0] == 0 and ranges[-1][1] == num_experts
    assert {end - start for start, end in ranges} <= {num_experts // num_ranks, -(-num_experts // num_ranks)}
    owners = owners_of(num_experts, num_ranks)
    assert [int(owner) for owner in owners] == [rank for rank, (a, b) in enumerate(ranges) for _ in range(a, b)]


@pytest.mark.parametrize(("num_ranks", "num_groups"), [(4, 1), (4, 2), (4, 4), (5, 2), (6, 3)])
def test_what_a_rank_sends_in_a_step_is_received_in_that_step(num_ranks, num_groups):
    steps = [list(ring_steps(num_ranks, num_groups, rank)) for rank in range(num_ranks)]
    for rank, own in enumerate(steps):
        assert sorted(target for targets, _ in own for target in targets) == list(range(num_ranks))
        assert rank in own[0][0] and rank in own[0][1]
        for number, (targets, _) in enumerate(own):
            assert all(rank in steps[target][number][1] for target in targets)

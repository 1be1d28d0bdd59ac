"""The dispatch of rows to experts, against plain loops over rows."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.experts.dispatch import make_dispatch, ring_steps
from shardwright.spec.expert_rows import owners_of, split_experts


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


def canonical_rows(chosen_RE, expert, owner):
    """The rows of an expert, (rank, number), in their order: from the rank after the owner on, the owner's last."""
    num_ranks = len(chosen_RE)
    ranks = [(owner + 1 + step) % num_ranks for step in range(num_ranks)]
    return [(rank, number) for rank in ranks for number in range(chosen_RE[rank, expert])]


@given(choices())
def test_every_row_goes_to_its_rank_and_back_in_order(drawn):
    chosen_RE, computed_RE, num_groups = drawn
    num_ranks, num_experts = chosen_RE.shape
    owners = owners_of(num_experts, num_ranks)
    dispatches = [make_dispatch(chosen_RE, rank, num_groups, computed_RE) for rank in range(num_ranks)]
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
                canonical = canonical_rows(chosen_RE, expert, owners[expert])
                holders = [(owners[expert] + 1 + step) % num_ranks for step in range(num_ranks)]
                lengths = [len(canonical) if holder == owners[expert] else 0 for holder in holders]
                if computed_RE is not None:
                    lengths = computed_RE[holders, expert].tolist()
                position = holders.index(rank)
                part = canonical[sum(lengths[:position]) : sum(lengths[: position + 1])]
                expected += [(expert, *row) for row in part]
            assert [row for _, row in sorted(pairs)] == expected
            assert dispatch.sizes(is_copy=is_copy).sum() == len(expected)


def sends_of(dispatch, step, number):
    """What another rank sends in the step in which this rank receives."""
    steps = [other for other in dispatch.steps if other.is_copy == step.is_copy]
    num_groups = sum(not other.is_copy for other in dispatch.steps)
    return dict(steps[number % num_groups].sends) if steps else {}


def test_a_rank_without_copies_takes_part_in_the_step_of_those_with_copies():
    """Rank 1 computes a row of expert 0 for rank 0; the others neither send nor receive."""
    chosen_RE = np.array([[2, 0, 0], [0, 0, 0], [0, 0, 3]])
    computed_RE = np.array([[1, 0, 0], [1, 0, 0], [0, 0, 3]])
    dispatches = [make_dispatch(chosen_RE, rank, 1, computed_RE) for rank in range(3)]
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

"""Copies of experts: Algorithm 1 of FasterMoE by hand, balancing by hypothesis, and the complete model."""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.errors import UserError
from shardwright.experts.dispatch import make_dispatch
from shardwright.experts.prefetch import CopyHistory
from shardwright.planner.expert_assignment import Assignment, ExpertLayer
from shardwright.planner.experts import (
    balance,
    choose_copies,
    decide,
    imbalance_seconds,
    select_shadows,
    shadow_seconds,
    with_shadows,
    without_copies,
)
from shardwright.spec.expert_rows import balance_rows, balanced_order, owners_of
from shardwright.spec.plan import ExpertCosts, ExpertPlan, SharedLink

LAYER = ExpertLayer((0, 1, 2), ExpertCosts(compute_row=1.0, send_row=1.0, send_expert=10.0, hand_on=5.0))


def test_algorithm_1_by_hand():
    """Expert 0 has 60 of 90 rows: 3 x 60 + 4 x 60 seconds, with a shadow 3 x 35 + 2 x 10. A second shadow, of expert 1,
    leaves rank 2 with 40 rows: 3 x 40 + 4 x 10."""
    chosen = np.array([[20, 5, 5], [20, 5, 5], [20, 5, 5]])
    assert imbalance_seconds(LAYER, 60) == 420
    assert shadow_seconds(LAYER, 1, 35) == 3 * 35 + 2 * 10
    assert select_shadows(LAYER, chosen) == [0]
    shadowed = with_shadows(LAYER, chosen, [0])
    assert shadowed.loads_R.tolist() == [20, 35, 35]
    assert shadowed.chains() == {0: [1, 2]}
    # The complete model: 10 rows are still exchanged four times, twice while gradients are computed; the copy arrives
    # while 15 own rows are computed; rank 1 hands it on to rank 2. In steps: the 20 rows of the copy wait for the
    # messages of 15 rows and the weights, and results of 5 rows leave last; the gradients of inputs and of weights of
    # 35 rows, and the hand-over.
    assert shadowed.seconds == 2 * 10 + 3 * 35 + 5
    assert shadowed.stepped_seconds == (15 + 10 + 20 + 5) + (35 + 35 + 5)
    assert shadowed.overlapped_seconds == 35 + 2 * 35


@pytest.mark.parametrize("slowdown", (0.0, 0.1))
def test_messages_slow_computation_in_steps(slowdown):
    """A tenth of 20 seconds of messages, in both passes; the last message follows in forward."""
    layer = ExpertLayer((0, 1), ExpertCosts(1.0, 1.0, 10.0, slowdown=slowdown))
    even = without_copies(layer, np.full((2, 2), 10))
    assert even.stepped_seconds == pytest.approx(20 + 10 + 20 + 20 + 2 * slowdown * 20)
    assert even.seconds == 2 * 10 + 20 + 10 + 20 + 20  # nothing overlaps but results in backward


def test_algorithm_1_counts_rows_by_expert_not_by_source():
    """The released code sums over the wrong axis, and selects nothing where all ranks have as many rows."""
    layer = replace(LAYER, owners=(0, 0, 1, 1))
    chosen = np.array([[1, 1, 1, 37], [2, 1, 0, 37]])
    assert chosen.sum(1).tolist() == [40, 40]
    assert select_shadows(layer, chosen) == [3]


def test_a_bound_below_the_mean_is_refused():
    with pytest.raises(UserError, match=r"within 0\.9 times the mean; wanted 1 or more"):
        balance(LAYER, np.ones((3, 3), np.int64), 0.9)


def test_experts_too_large_to_move_stay():
    chosen = np.array([[20, 5, 5], [20, 5, 5], [20, 5, 5]])
    huge = replace(LAYER, costs=ExpertCosts(1.0, 1.0, 1e6))
    assert select_shadows(huge, chosen) == [] and choose_copies(huge, chosen).chains() == {}


@pytest.mark.parametrize("rows", [60, 61])
def test_shadowing_pays_where_equations_9_and_10_say(rows):
    """One of two experts has all rows, half of them on each rank: Equation 9 is B > r alpha H, here 4 B > 2 S."""
    layer = ExpertLayer((0, 1), ExpertCosts(0.0, 1.0, 2.0 * 60))
    chosen = np.array([[rows // 2, 0], [rows - rows // 2, 0]])
    assert select_shadows(layer, chosen) == ([0] if rows > 60 else [])


@st.composite
def cases(draw) -> tuple[ExpertLayer, np.ndarray]:
    num_ranks, per_rank = draw(st.integers(1, 8)), draw(st.integers(1, 4))
    experts = num_ranks * per_rank
    row = st.lists(st.one_of(st.just(0), st.integers(0, 300)), min_size=experts, max_size=experts)
    chosen = np.array([draw(row) for _ in range(num_ranks)])
    owners = tuple(expert // per_rank for expert in range(experts))
    return ExpertLayer(owners, ExpertCosts(1.0, 1.0, draw(st.sampled_from([1.0, 100.0, 1e5])))), chosen


@settings(max_examples=200)
@given(cases(), st.sampled_from([1.0, 1.05, 1.5]))
def test_balancing_keeps_all_rows_within_the_bound_with_few_copies(case, bound):
    layer, chosen = case
    balanced = balance(layer, chosen, bound)
    assert (balanced.computed_RE >= 0).all()
    assert balanced.computed_RE.sum(0).tolist() == chosen.sum(0).tolist()
    num_ranks, experts = chosen.shape
    assert balanced.loads_R.max() <= np.ceil(bound * chosen.sum() / num_ranks)
    copies = Counter(balanced.copies[0].tolist())
    assert max(copies.values(), default=0) <= experts // num_ranks
    assert len(copies) <= max(0, num_ranks - 1)


@settings(max_examples=200)
@given(cases())
def test_the_choice_is_never_slower_than_no_copies(case):
    layer, chosen = case
    best = choose_copies(layer, chosen)
    assert best.seconds <= without_copies(layer, chosen).seconds
    shadows = with_shadows(layer, chosen, select_shadows(layer, chosen))
    assert best.seconds <= shadows.seconds
    in_steps = choose_copies(layer, chosen, in_steps=True)
    assert in_steps.overlapped_seconds <= in_steps.stepped_seconds <= best.stepped_seconds


@settings(max_examples=100)
@given(cases())
def test_rows_and_experts_that_travel(case):
    """Compared with loops over rows in their order."""
    layer, chosen = case
    for assignment in (without_copies(layer, chosen), balance(layer, chosen), choose_copies(layer, chosen)):
        num_ranks, experts = chosen.shape
        rows = [pair for expert in range(experts) for pair in rows_that_travel(assignment, expert)]
        hops = []
        for expert, ranks in assignment.chains().items():
            assert len({layer.owners[expert], *ranks}) == len(ranks) + 1
            hops += zip([layer.owners[expert], *ranks[:-1]], ranks, strict=True)
        for size in (size for size in range(1, num_ranks + 1) if num_ranks % size == 0):
            for moved, messages in ((assignment.rows_by_link(size), rows), (assignment.experts_by_link(size), hops)):
                assert [each.tolist() for each in moved] == by_link(messages, size, num_ranks // size)
        busiest = max(max(link) for link in by_link(rows, 1, num_ranks))
        assert assignment.exchange_seconds == pytest.approx(4 * busiest * layer.costs.send_row)


def rows_that_travel(assignment: Assignment, expert: int) -> Iterator[tuple[int, int]]:
    """The rank that has a row, and the rank that computes it."""
    order = assignment.order
    segments = np.flatnonzero(order.expert_P == expert)
    sources = [int(order.source_P[s]) for s in segments for _ in range(order.start_P[s], order.end_P[s])]
    ranks = np.argsort(order.place_RE[:, expert]).tolist()
    yield from zip(sources, [rank for rank in ranks for _ in range(assignment.computed_RE[rank, expert])], strict=True)


def by_link(messages: list[tuple[int, int]], size: int, num_groups: int) -> list[list[int]]:
    """How many messages leave each group of consecutive ranks, and how many arrive."""
    sent, received = [0] * num_groups, [0] * num_groups
    for source, target in ((source // size, target // size) for source, target in messages):
        if source != target:
            sent[source] += 1
            received[target] += 1
    return [sent, received]


def test_a_shared_card_makes_copies_on_its_own_host_cheaper():
    """Four ranks on two hosts whose card takes a row as long as both its ranks' links take two."""
    costs = ExpertCosts(0.0, 1.0, 10.0, (SharedLink(2, 2.0, 20.0),))
    chosen = np.array([[6, 0, 0, 0], [6, 0, 0, 0], [0, 0, 6, 0], [0, 0, 6, 0]])
    near = without_copies(ExpertLayer((0, 1, 2, 3), costs), chosen)
    assert near.exchange_seconds == 4 * 6.0 and not np.any(near.rows_by_link(2))
    far = without_copies(ExpertLayer((2, 1, 0, 3), costs), chosen)
    assert np.max(far.rows_by_link()) == 12 and np.max(far.rows_by_link(2)) == 12
    assert far.exchange_seconds == 4 * 12 * 2.0
    inside = with_shadows(ExpertLayer((0, 1, 2, 3), costs), chosen, [0])
    assert np.max(inside.experts_by_link()) == 1 and not np.any(inside.experts_by_link(2))
    assert inside.copy_seconds == 2 * 10.0


@given(cases(), st.integers(0, 2**32 - 1))
@settings(max_examples=60, deadline=None)
def test_prefetched_copies_are_used_first(case, seed):
    """All rows are computed, no rank is above the limit, and copies that ranks have already cost no weights."""
    layer, chosen = case
    prefetched = np.random.default_rng(seed).random(chosen.shape) < 0.3
    prefetched[layer.owners_E, np.arange(len(layer.owners))] = False
    computed = balance_rows(chosen, layer.owners_E, 1.0, prefetched)
    assert computed.sum(0).tolist() == chosen.sum(0).tolist() and computed.min(initial=0) >= 0
    assert computed.sum(1).max() <= max(1, math.ceil(chosen.sum() / len(chosen)))
    order = balanced_order(chosen, layer.owners_E)
    with_them, without = (Assignment(layer, order, computed, pairs) for pairs in (prefetched, None))
    ranks, experts = with_them.copies
    num_missing = int((~prefetched[ranks, experts]).sum())
    assert with_them.experts_by_link(only_missing=True)[1].sum() == num_missing
    assert with_them.seconds <= without.seconds and with_them.stepped_seconds <= without.stepped_seconds
    assert with_them.copy_seconds <= without.copy_seconds


@given(cases(), st.integers(0, 2**32 - 1), st.booleans())
@settings(max_examples=60, deadline=None)
def test_prefetched_copies_never_make_the_choice_slower(case, seed, in_steps):
    layer, chosen = case
    prefetched = np.random.default_rng(seed).random(chosen.shape) < 0.3
    prefetched[layer.owners_E, np.arange(len(layer.owners))] = False
    order, plan = balanced_order(chosen, layer.owners_E), ExpertPlan("", (), 1 + in_steps, "fastest", layer.costs)
    seconds = []
    for pairs in (prefetched, None):
        computed = decide(plan, order, pairs)
        assigned = Assignment(layer, order, computed, pairs)
        seconds.append(assigned.stepped_seconds if in_steps else assigned.seconds)
    assert seconds[0] <= seconds[1] * (1 + 1e-12)


def test_a_prefetched_copy_by_hand():
    """Rank 0 has 60 rows too many; rank 1 has a copy of expert 0 already, so that only gradients are sent."""
    chosen = np.array([[60, 0, 0], [30, 0, 0], [0, 0, 0]])
    prefetched = np.zeros((3, 3), np.bool_)
    prefetched[1, 0] = True
    computed = balance_rows(chosen, LAYER.owners_E, 1.0, prefetched)
    assert computed[:, 0].tolist() == [30, 30, 30]
    both = balance_rows(chosen, LAYER.owners_E, 1.0)
    assert both[:, 0].tolist() == [30, 30, 30]
    assigned = Assignment(LAYER, balanced_order(chosen, LAYER.owners_E), computed, prefetched)
    # One expert leaves rank 0 in forward, instead of two handed on in a chain of one link each; gradients as ever.
    assert [each.tolist() for each in assigned.experts_by_link(only_missing=True)] == [[1, 0, 0], [0, 0, 1]]
    assert [each.tolist() for each in assigned.experts_by_link()] == [[1, 1, 0], [0, 1, 1]]


def test_copies_are_prefetched_while_they_come_again():
    """A quarter of a call's copies, or more, were made in the call before."""
    history = CopyHistory()
    order = balanced_order(np.full((4, 8), 10), owners_of(8, 4))

    def call(*pairs: tuple[int, int]) -> bool:
        computed = np.zeros((4, 8), np.int64)
        computed[order.owners_E, np.arange(8)] = 40
        for rank, expert in pairs:
            computed[rank, expert], computed[order.owners_E[expert], expert] = 10, 30
        history.add(make_dispatch(order, 0, 1, computed))
        return history.is_steady

    assert not call((1, 0), (2, 1), (3, 2), (0, 3))  # the first call: nothing is known
    assert call((1, 0), (3, 1), (0, 2), (2, 4))  # one of four
    assert not call((2, 0), (0, 6), (1, 7))
    assert not call()
    assert not call((2, 0))
    assert call((2, 0))

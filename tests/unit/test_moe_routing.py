"""Workloads and rival policies of benchmarks/moe.py: row totals, and the shape that each is to have."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import moe_policies
from benchmarks.moe_routing import (
    BURST,
    BURST_PERIOD,
    GENERATORS,
    HOT_SHARE,
    ROTATION,
    even_routing,
    fold_trace,
)
from benchmarks.moe_sides import CAPACITY, GSHARD, ROWS, ZERO_3, counts_of, num_slots, predict, routing_of
from shardwright.planner.expert_assignment import ExpertLayer
from shardwright.planner.experts import balance
from shardwright.spec.expert_rows import owners_of

COSTS = {"compute_row": 1.0, "send_row": 1.0, "send_expert": 10.0, "gather": 2.0}
SHAPES = ((4, 8, 5760), (8, 16, 5760), (2, 6, 1000))


def rank_loads(counts_RE: np.ndarray) -> np.ndarray:
    num_ranks, num_experts = counts_RE.shape
    return np.bincount(owners_of(num_experts, num_ranks), counts_RE.sum(0), num_ranks)


def total_variation(first: np.ndarray, second: np.ndarray) -> float:
    return float(np.abs(first / first.sum() - second / second.sum()).sum() / 2)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", GENERATORS)
def test_every_workload_has_all_rows_and_repeats_itself(name, shape):
    num_ranks, num_experts, rows = shape
    for number in range(-1, 7):
        counts_RE = GENERATORS[name](number, *shape)
        assert counts_RE.shape == (num_ranks, num_experts) and counts_RE.min() >= 0
        assert counts_RE.sum() == num_ranks * rows and (counts_RE.sum(1) % 2 == 0).all()  # two rows a token
        if name != "W4":
            assert (counts_RE.sum(1) == rows).all()
        assert (counts_RE == GENERATORS[name](number, *shape)).all()


@pytest.mark.parametrize("shape", SHAPES)
def test_what_each_workload_isolates(shape):
    num_ranks, num_experts, rows = shape
    total, mean = num_ranks * rows, num_ranks * rows / num_experts
    w = {name: GENERATORS[name](0, *shape) for name in GENERATORS}
    assert np.abs(w["W0"].sum(0) - mean).max() <= num_ranks
    hot = {name: np.sort(w[name].sum(0))[-num_experts // num_ranks :].sum() / total for name in ("W1", "W2")}
    assert all(abs(share - HOT_SHARE) < 0.03 for share in hot.values())
    loads = {name: rank_loads(w[name]) / rows for name in w}
    assert loads["W2"].argmax() == 0 and loads["W2"].max() > loads["W1"].max() + 0.1
    assert loads["W1"].max() > 1.05
    assert w["W3"].sum(0).max() > 1.1 * mean and loads["W3"].max() < 1.1  # skewed experts, even ranks
    assert w["W4"].sum(1).max() > 2.5 * w["W4"].sum(1).min() and loads["W4"].max() < 1.01
    assert (w["W5"].sum(0)[(num_experts + 1) // 2 :] == 0).all() and loads["W5"].min() == 0


def test_rotation_and_burst():
    shape = SHAPES[0]
    hottest = [rank_loads(GENERATORS["W6"](number, *shape)).argmax() for number in range(4 * ROTATION)]
    assert hottest == [rank for rank in range(4) for _ in range(ROTATION)]
    most = [rank_loads(GENERATORS["W7"](number, *shape)).max() / 5760 for number in range(2 * BURST_PERIOD)]
    assert [load > 2 for load in most] == 2 * [number == BURST for number in range(BURST_PERIOD)]


def test_drift_is_slow_and_changes_the_order():
    drawn = [GENERATORS["drift"](number, *SHAPES[0]).sum(0) for number in range(21)]
    assert max(total_variation(a, b) for a, b in zip(drawn, drawn[1:], strict=False)) < 0.08
    assert total_variation(drawn[0], drawn[20]) > 0.3 and drawn[0].argmax() != drawn[20].argmax()
    far = GENERATORS["zipf"](0, *SHAPES[0]).sum(0), GENERATORS["zipf"](1, *SHAPES[0]).sum(0)
    assert total_variation(*far) > 0.15


def test_history_of_a_trace_is_the_same_layer_an_iteration_before():
    """Every iteration and layer of this trace has an expert of its own that gets all rows."""
    trace = np.zeros((20, 4, 3, 1, 16), np.int64)
    for iteration, layer in np.ndindex(20, 3):
        trace[iteration, :, layer, :, (iteration + 4 * layer) % 16] = 7
    for number in range(5):
        now = fold_trace(trace, number, 4, 16, 100).sum(0).argmax()
        assert fold_trace(trace, number, 4, 16, 100, lag=1).sum(0).argmax() == (now - 1) % 16
    assert fold_trace(trace, 0, 4, 8, 100).sum(1).tolist() == [100] * 4
    assert (counts_of("drift", 3, 4, is_previous=True) == counts_of("drift", 2, 4)).all()


@st.composite
def counts(draw) -> np.ndarray:
    num_ranks, per_rank = draw(st.integers(1, 6)), draw(st.integers(1, 3))
    row = st.lists(st.integers(0, 3000), min_size=num_ranks * per_rank, max_size=num_ranks * per_rank)
    return np.array([draw(row) for _ in range(num_ranks)], np.int64)


@settings(max_examples=200)
@given(counts(), st.integers(0, 9))
def test_rival_policies_compute_every_row_once(chosen_RE, seed):
    previous_RE = np.random.default_rng(seed).integers(0, 50, chosen_RE.shape)
    num_ranks, num_experts = chosen_RE.shape
    mean = chosen_RE.sum() / num_ranks
    for policy in (lambda c: moe_policies.eplb(c, previous_RE), moe_policies.llep, moe_policies.quota):
        computed_RE = policy(chosen_RE)
        if computed_RE is not None:
            assert (computed_RE >= 0).all() and (computed_RE.sum(0) == chosen_RE.sum(0)).all()
    assert moe_policies.quota(chosen_RE).sum(1).max() <= np.ceil(mean)
    physical_RE = moe_policies.eplb(np.full_like(chosen_RE, 100), previous_RE) > 0
    assert physical_RE.sum(1).max() <= num_experts // num_ranks + 1
    if (computed_RE := moe_policies.llep(chosen_RE)) is not None:
        assert computed_RE.sum(1).max() <= rank_loads(chosen_RE).max()
        is_copy_RE = np.arange(num_ranks)[:, None] != owners_of(num_experts, num_ranks)
        assert computed_RE[is_copy_RE & (computed_RE > 0)].min(initial=1024) >= 1024


def test_eplb_by_hand():
    """Rows 90, 30, 20, 20 before: both replicas are of expert 0, which leaves 30 rows each. The packs are experts 0, 0,
    2 and 0, 1, 3; rank 0 owns experts 0 and 1, and becomes the second. Of 91 rows now, replicas get 31, 30, 30."""
    previous = np.array([[45, 15, 10, 10]] * 2)
    now = np.array([[91, 3, 5, 7], [0, 0, 0, 0]])
    assert moe_policies.eplb(now, previous).tolist() == [[31, 3, 0, 7], [60, 0, 5, 0]]


def test_llep_by_hand():
    """A mean of 3,000 rows a rank, a limit of 3,300: rank 0, with 5,000 + 1,000 rows, gives 2,300 of its first expert
    to rank 1, which has 500 and takes up to 2,800; rank 2 is not needed. Below the threshold nothing moves."""
    chosen = np.array([[5000, 1000, 250, 250, 1000, 1500], [0] * 6, [0] * 6])
    computed = moe_policies.llep(chosen)
    assert computed is not None
    assert computed.tolist() == [[2300, 1000, 0, 0, 0, 0], [2700, 0, 250, 250, 0, 0], [0, 0, 0, 0, 1000, 1500]]
    assert moe_policies.llep(np.array([[1200, 1000, 900, 800]] * 4)) is None


def test_even_counts_need_no_copies():
    even = even_routing(4, 8, 5760)
    layer = ExpertLayer(tuple(owners_of(8, 4).tolist()), COSTS)
    assert (moe_policies.quota(even) == balance(layer, even).computed_RE).all()
    assert moe_policies.llep(even) is None


def test_predictions_of_rivals():
    """On four ranks ZeRO-3 moves six experts three times; GShard's buffers do not depend on the routing."""
    zero = predict(ZERO_3, "W2", 0, 4, COSTS)
    assert zero["predicted"] == 3 * ROWS + 3 * 6 * 10 + 2
    assert num_slots(4) == CAPACITY * ROWS / 8
    capped, even = (predict(GSHARD, workload, 0, 4, COSTS) for workload in ("W2", "W0"))
    assert capped["predicted"] == even["predicted"] == 3 * CAPACITY * ROWS + 4 * CAPACITY * ROWS * 3 / 4 + 2
    assert even["dropped"] == 0.0
    counts_RE = routing_of(GSHARD, "W2", 0, 4)
    kept = np.minimum(counts_RE, num_slots(4)).sum() / counts_RE.sum()
    assert capped["dropped"] == pytest.approx(1 - kept) and capped["dropped"] > 0.2

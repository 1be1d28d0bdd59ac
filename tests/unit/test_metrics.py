import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwright.jagged import Batch, Jagged
from shardwright.runtime import metrics
from shardwright.runtime.step import Output

scored = st.lists(st.tuples(st.integers(-5, 5), st.integers(0, 1)), min_size=2, max_size=60)


@given(scored)
def test_auc_is_the_share_of_pairs_in_order(scored):
    positive = [score for score, label in scored if label]
    negative = [score for score, label in scored if not label]
    found = metrics.auc(torch.tensor([float(s) for s, _ in scored]), torch.tensor([y for _, y in scored]))
    if not positive or not negative:
        assert found is None
        return
    pairs = [1.0 if p > n else 0.5 if p == n else 0.0 for p in positive for n in negative]
    assert found == pytest.approx(sum(pairs) / len(pairs), abs=1e-12)


@given(scored)
def test_log_loss_is_its_formula(scored):
    logits = torch.tensor([s / 2 for s, _ in scored], dtype=torch.float64)
    labels = torch.tensor([float(y) for _, y in scored])
    expected = -sum(
        math.log(1 / (1 + math.exp(-s / 2))) if y else math.log(1 - 1 / (1 + math.exp(-s / 2))) for s, y in scored
    ) / len(scored)
    assert metrics.log_loss(logits, labels) == pytest.approx(expected, abs=1e-9)


def output(logits, labels, weights=None) -> Output:
    ids = Jagged(("f",), torch.empty(0, dtype=torch.int64), torch.zeros(1, len(labels), dtype=torch.int64))
    logits = torch.tensor(logits)
    batch = Batch(ids, None, {"click": torch.tensor(labels)}, None if weights is None else torch.tensor(weights))
    return Output(1, torch.tensor(0.5), logits, batch)


def test_predicting_the_base_rate_has_ne_one_and_calibration_one():
    logit = math.log(0.25 / 0.75)
    window = metrics.Window("click")
    window.add(output([logit] * 3, [1.0, 0.0, 0.0]))
    window.add(output([logit] * 5, [1.0, 0.0, 0.0, 0.0, 0.0]))
    result = window.result()
    assert result["ne"] == pytest.approx(1.0, abs=1e-7) and result["calibration"] == pytest.approx(1.0, abs=1e-7)
    assert result["auc"] == 0.5


def test_sample_weights_count_like_repeats():
    weighted, repeated = metrics.Window("click"), metrics.Window("click")
    weighted.add(output([0.5, -1.0], [1.0, 0.0], [2.0, 3.0]))
    repeated.add(output([0.5, 0.5, -1.0, -1.0, -1.0], [1.0, 1.0, 0.0, 0.0, 0.0]))
    for name in ("log_loss", "ne", "auc", "calibration"):
        assert weighted.result()[name] == pytest.approx(repeated.result()[name], abs=1e-12)


def test_what_cannot_be_told_is_left_out():
    window = metrics.Window("click")
    assert window.result() == {}
    window.add(output([0.5, 1.0], [0.0, 0.0]))
    assert set(window.result()) == {"loss", "log_loss"}
    window = metrics.Window(None)
    window.add(output([0.0], [0.0]))
    assert window.result() == {"loss": 0.5}

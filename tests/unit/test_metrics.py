"""Metrics compared with their formulas and scikit-learn; windows, lifetimes, and merging over ranks."""

import json
import math
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import log_loss as sklearn_log_loss
from sklearn.metrics import roc_auc_score

from shardwright.errors import UserError
from shardwright.jagged import Batch, Jagged
from shardwright.runtime.outputs import Output, Scores
from shardwright.runtime.run import metrics

SCORED_LABELS = st.lists(st.tuples(st.integers(-5, 5), st.integers(0, 1)), min_size=2, max_size=60)


@given(SCORED_LABELS)
def test_auc_is_the_share_of_ordered_pairs(scored):
    positive = [score for score, label in scored if label]
    negative = [score for score, label in scored if not label]
    auc = metrics.auc(torch.tensor([float(s) for s, _ in scored]), torch.tensor([y for _, y in scored]))
    if not positive or not negative:
        assert auc is None
        return
    pairs = [1.0 if p > n else 0.5 if p == n else 0.0 for p in positive for n in negative]
    assert auc == pytest.approx(sum(pairs) / len(pairs), abs=1e-12)


@given(SCORED_LABELS)
def test_log_loss_equals_its_formula(scored):
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
    return Output(1, batch, Scores(torch.tensor(0.5), logits))


def test_predicting_the_base_rate_has_ne_one_and_calibration_one():
    logit = math.log(0.25 / 0.75)
    window = metrics.WindowMetrics("click")
    window.update(output([logit] * 3, [1.0, 0.0, 0.0]))
    window.update(output([logit] * 5, [1.0, 0.0, 0.0, 0.0, 0.0]))
    result = window.compute()
    assert result["ne"] == pytest.approx(1.0, abs=1e-7) and result["calibration"] == pytest.approx(1.0, abs=1e-7)
    assert result["auc"] == 0.5


def test_sample_weights_count_like_repeated_samples():
    weighted, repeated = metrics.WindowMetrics("click"), metrics.WindowMetrics("click")
    weighted.update(output([0.5, -1.0], [1.0, 0.0], [2.0, 3.0]))
    repeated.update(output([0.5, 0.5, -1.0, -1.0, -1.0], [1.0, 1.0, 0.0, 0.0, 0.0]))
    for name in ("log_loss", "ne", "auc", "calibration"):
        assert weighted.compute()[name] == pytest.approx(repeated.compute()[name], abs=1e-12)


def test_undefined_metrics_are_left_out():
    window = metrics.WindowMetrics("click")
    assert window.compute() == {}
    window.update(output([0.5, 1.0], [0.0, 0.0]))
    assert set(window.compute()) == {"loss", "log_loss"}
    window = metrics.WindowMetrics(None)
    window.update(output([0.0], [0.0]))
    assert window.compute() == {"loss": 0.5}


def sample(size: int = 4000, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(size, generator=generator, dtype=torch.float64).mul(2).round(decimals=2)  # with ties
    labels = (torch.rand(size, generator=generator) < logits.sigmoid()).double()
    groups = torch.randint(0, 200, (size,), generator=generator)
    weights = torch.rand(size, generator=generator, dtype=torch.float64)
    return {"logits": logits, "labels": labels, "groups": groups, "weights": weights}


@pytest.mark.parametrize("weighted", [False, True])
def test_metrics_equal_those_of_scikit_learn(weighted):
    s = sample()
    weights = s["weights"] if weighted else None
    truth, scores = s["labels"].numpy(), s["logits"].numpy()
    sample_weight = None if weights is None else weights.numpy()
    expected = roc_auc_score(truth, scores, sample_weight=sample_weight)
    assert metrics.auc(s["logits"], s["labels"], weights) == pytest.approx(expected, abs=1e-9)
    probability = s["logits"].sigmoid().numpy()
    expected = sklearn_log_loss(truth, probability, sample_weight=sample_weight)
    assert metrics.log_loss(s["logits"], s["labels"], weights) == pytest.approx(expected, abs=1e-9)
    total = weighted_sum = 0.0
    for group in range(200):
        mask = (s["groups"] == group).numpy()
        if 0 < truth[mask].sum() < mask.sum():
            group_weights = None if sample_weight is None else sample_weight[mask]
            share = mask.sum() if group_weights is None else group_weights.sum()
            weighted_sum += share * roc_auc_score(truth[mask], scores[mask], sample_weight=group_weights)
            total += share
    grouped = metrics.grouped_auc(s["logits"], s["labels"], s["groups"], weights)
    assert grouped == pytest.approx(weighted_sum / total, abs=1e-9)


def test_groups_of_one_class_are_skipped():
    labels, logits = torch.tensor([1.0, 0.0, 1.0, 1.0]), torch.tensor([0.9, 0.1, 0.5, 0.4])
    assert metrics.grouped_auc(logits, labels, torch.tensor([7, 7, 3, 3])) == 1.0
    assert metrics.grouped_auc(logits[2:], labels[2:], torch.tensor([3, 3])) is None
    empty = torch.empty(0)
    assert metrics.grouped_auc(empty, empty, empty.long()) is None


def test_lifetime_metrics_equal_exact_ones_within_their_error_bound():
    s = sample(20_000)
    lifetime = metrics.LifetimeMetrics()
    for part in torch.arange(20_000).split(777):
        lifetime.update(s["logits"][part], s["labels"][part], s["weights"][part])
    result = lifetime.compute()
    assert result["log_loss"] == pytest.approx(metrics.log_loss(s["logits"], s["labels"], s["weights"]), abs=1e-12)
    exact = metrics.auc(s["logits"], s["labels"], s["weights"])
    assert exact is not None and abs(result["auc"] - exact) <= result["auc_error"] < 1e-3
    extreme = metrics.LifetimeMetrics()
    extreme.update(torch.tensor([-1e4, 1e4, 40.0, 41.0]), torch.tensor([0.0, 1.0, 0.0, 1.0]))
    assert extreme.compute()["auc"] == 0.75 and extreme.compute()["auc_error"] == 0.25


def test_columns_of_several_windows_and_vectors_of_several_lifetimes_add_up():
    s = sample(1000)
    all_samples, parts, life, lives = metrics.WindowMetrics("click"), [], metrics.LifetimeMetrics(), []
    for part in torch.arange(1000).split(300):
        out = output(s["logits"][part].tolist(), s["labels"][part].tolist(), s["weights"][part].tolist())
        all_samples.update(out)
        parts.append(metrics.WindowMetrics("click"))
        parts[-1].update(out)
        lives.append(metrics.LifetimeMetrics())
        for lifetime in (life, lives[-1]):
            lifetime.update(s["logits"][part], s["labels"][part])
    columns = [{name: values for name, values in part.columns().items() if values is not None} for part in parts]
    merged = parts[0].from_columns({name: torch.cat([part[name] for part in columns]) for name in columns[0]})
    assert merged.compute() == all_samples.compute()
    total = life.from_vector(torch.stack([lifetime.to_vector() for lifetime in lives]).sum(0))
    assert total.compute() == pytest.approx(life.compute(), abs=1e-12)
    loaded = metrics.LifetimeMetrics()
    loaded.load_state_dict(json.loads(json.dumps(life.state_dict())))
    assert loaded.compute() == life.compute() and metrics.LifetimeMetrics().compute() == {}


def test_windows_compute_grouped_auc_by_a_feature():
    ids = Jagged(("user", "tags"), torch.tensor([3, 3, 4, 4, 9]), torch.tensor([[1, 1, 1, 1], [0, 1, 0, 0]]))
    logits, labels = torch.tensor([0.9, 0.1, 0.2, 0.8]), torch.tensor([1.0, 0.0, 1.0, 0.0])
    out = Output(1, Batch(ids, None, {"click": labels}), Scores(torch.tensor(0.5), logits))
    window = metrics.WindowMetrics("click", "user")
    window.update(out)
    assert window.compute()["grouped_auc"] == 0.5
    window = metrics.WindowMetrics("click", "user", (4, 9))
    window.update(out)
    assert window.compute()["grouped_auc"] == 1.0 and window.compute()["auc"] == 0.75
    with pytest.raises(UserError, match='train.group="tags" has samples with none or several ids'):
        metrics.WindowMetrics("click", "tags").update(out)


PROGRAM = """
from shardwright.runtime.run.metrics import peak_rss_bytes
before = peak_rss_bytes()
x = b"1" * (300 << 20)
print(peak_rss_bytes() - before)
"""


def test_peak_memory_is_of_this_process_only():
    """The parent process has more memory than its child."""
    block = b"1" * (1 << 30)
    growth = int(subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True).stdout)
    assert 290 << 20 <= growth <= 310 << 20 < len(block)

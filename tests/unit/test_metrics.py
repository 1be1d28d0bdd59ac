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
from shardwright.runtime.bindings import Output
from shardwright.runtime.run import metrics

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
    window = metrics.WindowMetrics("click")
    window.update(output([logit] * 3, [1.0, 0.0, 0.0]))
    window.update(output([logit] * 5, [1.0, 0.0, 0.0, 0.0, 0.0]))
    result = window.compute()
    assert result["ne"] == pytest.approx(1.0, abs=1e-7) and result["calibration"] == pytest.approx(1.0, abs=1e-7)
    assert result["auc"] == 0.5


def test_sample_weights_count_like_repeats():
    weighted, repeated = metrics.WindowMetrics("click"), metrics.WindowMetrics("click")
    weighted.update(output([0.5, -1.0], [1.0, 0.0], [2.0, 3.0]))
    repeated.update(output([0.5, 0.5, -1.0, -1.0, -1.0], [1.0, 1.0, 0.0, 0.0, 0.0]))
    for name in ("log_loss", "ne", "auc", "calibration"):
        assert weighted.compute()[name] == pytest.approx(repeated.compute()[name], abs=1e-12)


def test_what_cannot_be_told_is_left_out():
    window = metrics.WindowMetrics("click")
    assert window.compute() == {}
    window.update(output([0.5, 1.0], [0.0, 0.0]))
    assert set(window.compute()) == {"loss", "log_loss"}
    window = metrics.WindowMetrics(None)
    window.update(output([0.0], [0.0]))
    assert window.compute() == {"loss": 0.5}


def sample(num: int = 4000, seed: int = 0) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    logits = torch.randn(num, generator=draw, dtype=torch.float64).mul(2).round(decimals=2)  # with ties
    labels = (torch.rand(num, generator=draw) < logits.sigmoid()).double()
    groups = torch.randint(0, 200, (num,), generator=draw)
    weights = torch.rand(num, generator=draw, dtype=torch.float64)
    return {"logits": logits, "labels": labels, "groups": groups, "weights": weights}


@pytest.mark.parametrize("weighted", [False, True])
def test_against_scikit_learn(weighted):
    s = sample()
    weights = s["weights"] if weighted else None
    truth, scores = s["labels"].numpy(), s["logits"].numpy()
    theirs = None if weights is None else weights.numpy()
    expected = roc_auc_score(truth, scores, sample_weight=theirs)
    assert metrics.auc(s["logits"], s["labels"], weights) == pytest.approx(expected, abs=1e-9)
    probability = s["logits"].sigmoid().numpy()
    expected = sklearn_log_loss(truth, probability, sample_weight=theirs)
    assert metrics.log_loss(s["logits"], s["labels"], weights) == pytest.approx(expected, abs=1e-9)
    total = found = 0.0
    for group in range(200):
        mine = (s["groups"] == group).numpy()
        if 0 < truth[mine].sum() < mine.sum():
            share = mine.sum() if theirs is None else theirs[mine].sum()
            own = None if theirs is None else theirs[mine]
            found, total = found + share * roc_auc_score(truth[mine], scores[mine], sample_weight=own), total + share
    grouped = metrics.grouped_auc(s["logits"], s["labels"], s["groups"], weights)
    assert grouped == pytest.approx(found / total, abs=1e-9)


def test_groups_of_one_class_do_not_count():
    labels, logits = torch.tensor([1.0, 0.0, 1.0, 1.0]), torch.tensor([0.9, 0.1, 0.5, 0.4])
    assert metrics.grouped_auc(logits, labels, torch.tensor([7, 7, 3, 3])) == 1.0
    assert metrics.grouped_auc(logits[2:], labels[2:], torch.tensor([3, 3])) is None
    empty = torch.empty(0)
    assert metrics.grouped_auc(empty, empty, empty.long()) is None


def test_a_lifetime_is_the_window_within_its_own_bound():
    s = sample(20_000)
    life = metrics.LifetimeMetrics()
    for part in torch.arange(20_000).split(777):
        life.update(s["logits"][part], s["labels"][part], s["weights"][part])
    found = life.compute()
    assert found["log_loss"] == pytest.approx(metrics.log_loss(s["logits"], s["labels"], s["weights"]), abs=1e-12)
    exact = metrics.auc(s["logits"], s["labels"], s["weights"])
    assert exact is not None and abs(found["auc"] - exact) <= found["auc_error"] < 1e-3
    extreme = metrics.LifetimeMetrics()
    extreme.update(torch.tensor([-1e4, 1e4, 40.0, 41.0]), torch.tensor([0.0, 1.0, 0.0, 1.0]))
    assert extreme.compute()["auc"] == 0.75 and extreme.compute()["auc_error"] == 0.25


def test_what_ranks_measured_apart_merges():
    s = sample(1000)
    whole, parts, life, lives = metrics.WindowMetrics("click"), [], metrics.LifetimeMetrics(), []
    for part in torch.arange(1000).split(300):
        out = output(s["logits"][part].tolist(), s["labels"][part].tolist(), s["weights"][part].tolist())
        whole.update(out)
        parts.append(metrics.WindowMetrics("click"))
        parts[-1].update(out)
        lives.append(metrics.LifetimeMetrics())
        for one in (life, lives[-1]):
            one.update(s["logits"][part], s["labels"][part])
    for other in parts[1:]:
        parts[0].merge(other)
    assert parts[0].compute() == whole.compute()
    for other in lives[1:]:
        lives[0].merge(other)
    assert lives[0].compute() == pytest.approx(life.compute(), abs=1e-12)
    again = metrics.LifetimeMetrics()
    again.load_state_dict(json.loads(json.dumps(life.state_dict())))
    assert again.compute() == life.compute() and metrics.LifetimeMetrics().compute() == {}


def test_grouped_auc_of_a_window_takes_a_feature():
    ids = Jagged(("user", "tags"), torch.tensor([3, 3, 4, 4, 9]), torch.tensor([[1, 1, 1, 1], [0, 1, 0, 0]]))
    logits, labels = torch.tensor([0.9, 0.1, 0.2, 0.8]), torch.tensor([1.0, 0.0, 1.0, 0.0])
    out = Output(1, torch.tensor(0.5), logits, Batch(ids, None, {"click": labels}))
    window = metrics.WindowMetrics("click", "user")
    window.update(out)
    assert window.compute()["grouped_auc"] == 0.5
    window = metrics.WindowMetrics("click", "user", (4, 9))
    window.update(out)
    assert window.compute()["grouped_auc"] == 1.0 and window.compute()["auc"] == 0.75
    with pytest.raises(UserError, match='train.group="tags" has samples with none or several ids'):
        metrics.WindowMetrics("click", "tags").update(out)


GROWN = """
from shardwright.runtime.run.metrics import peak_rss_bytes
before = peak_rss_bytes()
x = b"1" * (300 << 20)
print(peak_rss_bytes() - before)
"""


def test_peak_memory_is_this_process_own():
    """The one that starts it has more."""
    kept = b"1" * (1 << 30)
    grown = int(subprocess.run([sys.executable, "-c", GROWN], capture_output=True, text=True, check=True).stdout)
    assert 290 << 20 <= grown <= 310 << 20 < len(kept)

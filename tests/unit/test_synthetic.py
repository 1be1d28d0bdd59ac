"""The synthetic click stream: fixed samples of version 1, its distributions, and its bound on NE."""

import hashlib
import logging
import subprocess
import sys
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.data.sources.source import NumpyBatch
from shardwright.data.sources.synthetic import BIAS, FEATURES, VARIANCE_SHARES, VERSION, ClickStream
from shardwright.errors import UserError

NUM = 60_000


def test_samples_of_version_1_are_fixed() -> None:
    """Never accept a new digest: published quality uses these samples; changes need another class."""
    indices = np.concatenate([start + np.arange(1000) for start in (0, 1_000_000, 10**12)])
    digest = hashlib.sha256()
    for stream in (ClickStream(), ClickStream(seed=5, world=9, num_dense=3, drift_period=1000)):
        rows = stream.take(indices)
        for array in (rows.values, rows.lengths, rows.dense, rows.labels["click"]):
            assert array is not None
            digest.update(array.tobytes())
    assert VERSION == 1
    assert digest.hexdigest() == "50f53c1373c346591a90a9e382df2fcee2c98814244290f0889eb632fcb6be39"
    assert ClickStream().probability(indices[::1000]).tolist() == pytest.approx(
        [0.0840707, 0.5874297, 0.2106730], rel=1e-5
    )


@settings(max_examples=20)
@given(st.lists(st.integers(0, 10**9), min_size=1, max_size=40), st.data())
def test_a_sample_does_not_depend_on_its_batch(indices: list[int], data: st.DataObject) -> None:
    group = data.draw(st.lists(st.sampled_from(indices), max_size=8))
    stream = ClickStream(seed=3)
    sample_of = dict(zip(indices, samples(stream.take(np.array(indices))), strict=True))
    assert samples(stream.take(np.array(group, dtype=np.int64))) == [sample_of[index] for index in group]
    p = dict(zip(indices, stream.probability(np.array(indices)).tolist(), strict=True))
    assert stream.probability(np.array(group, dtype=np.int64)).tolist() == [p[index] for index in group]


def test_seed_changes_samples_and_world_changes_labels() -> None:
    indices = np.arange(500)
    default, other_samples, other_world = (
        stream.take(indices) for stream in (ClickStream(), ClickStream(seed=1), ClickStream(world=2))
    )
    assert not np.array_equal(default.dense, other_samples.dense)
    assert np.array_equal(default.values, other_world.values) and np.array_equal(default.dense, other_world.dense)
    assert not np.array_equal(default.labels["click"], other_world.labels["click"])


def test_ids_are_in_range_and_follow_their_power_law() -> None:
    rows = ClickStream().take(np.arange(NUM))
    for (name, num_rows, multi_hot), ids, lengths, feature in zip(
        ClickStream().features, ids_by_feature(rows), rows.lengths, FEATURES, strict=True
    ):
        assert ids.min() >= 0 and ids.max() < num_rows, name
        if multi_hot:
            assert np.allclose(np.bincount(lengths, minlength=7) / NUM, 1 / 7, atol=0.01), name
        else:
            assert (lengths == 1).all(), name
        counts = np.bincount(ids, minlength=num_rows)
        share = np.sort(counts)[::-1] / counts.sum()
        slope = np.polyfit(np.log(np.arange(4, 40)), np.log(share[4:40]), 1)[0]
        assert slope == pytest.approx(-feature.exponent, abs=0.2), name
        assert share[:100].sum() > 0.4, f"{name}: too few ids are popular"
        assert np.ptp(counts.argsort()[-5:]) > num_rows / 4, f"{name}: popular ids are neighbours"


def test_numeric_features_are_standard_normal() -> None:
    dense = ClickStream(num_dense=4).take(np.arange(NUM)).dense
    assert dense is not None and dense.dtype == np.float32 and dense.shape == (NUM, 4)
    assert np.allclose(np.cov(dense.T), np.eye(4), atol=0.03)
    assert np.allclose(dense.mean(0), 0, atol=0.02)


@pytest.mark.parametrize("world", [1, 2])
def test_interaction_orders_have_their_shares_of_the_variance(world: int) -> None:
    stream = ClickStream(world=world)
    orders = stream.orders(np.arange(NUM))
    logit = BIAS + np.sum(list(orders.values()), axis=0)
    assert np.allclose(1 / (1 + np.exp(-logit)), stream.probability(np.arange(NUM)), atol=1e-6)
    assert 1.5 < logit.std() < 1.8
    for order, part in orders.items():
        assert part.var() / logit.var() == pytest.approx(VARIANCE_SHARES[order], abs=0.03), order


def test_other_predictions_are_worse_than_the_bound() -> None:
    stream, indices = ClickStream(), np.arange(NUM)
    bound, clicks = stream.bound(0, NUM), stream.take(indices).labels["click"]
    assert bound.base_rate == pytest.approx(clicks.mean()) and 0.2 < bound.base_rate < 0.3
    assert 0.70 < bound.ne < 0.78
    orders = stream.orders(indices)
    logit = BIAS + np.sum(list(orders.values()), axis=0)
    assert log_loss(logit, clicks) == pytest.approx(bound.log_loss, abs=1e-6)
    worse = {"hotter": logit * 1.15, "colder": logit * 0.85, "higher": logit + 0.15, "lower": logit - 0.15}
    worse |= {f"without {order}": logit - part for order, part in orders.items()}
    for name, other in worse.items():
        assert log_loss(other, clicks) > bound.log_loss + 5e-4, name


def test_labels_drift_and_return() -> None:
    """A stream without drift is the stale model: it has the same inputs, and other labels."""
    period = 10**7
    drifting, without_drift = ClickStream(drift_period=period), ClickStream(drift_period=10**15)

    def regret(start: int) -> float:
        indices = np.arange(start, start + NUM)
        clicks, stale = drifting.take(indices).labels["click"], without_drift.probability(indices)
        return log_loss(np.log(stale / (1 - stale)), clicks) - drifting.bound(start, start + NUM).log_loss

    assert np.array_equal(drifting.take(np.arange(9)).values, without_drift.take(np.arange(9)).values)
    assert abs(regret(0)) < 1e-3
    assert regret(period // 4) > 5e-3
    assert regret(period // 2) > 1.5 * regret(period // 4)
    assert abs(regret(period)) < 1e-3


def test_speed() -> None:
    stream = ClickStream()
    stream.take(np.arange(10))
    start = time.perf_counter()
    for batch in range(10):
        stream.take(np.arange(batch * 4096, (batch + 1) * 4096))
    rate = 40_960 / (time.perf_counter() - start)
    logging.getLogger(__name__).info("click stream: %.0f samples a second", rate)
    assert rate > 20_000


def test_errors_in_arguments() -> None:
    with pytest.raises(UserError, match="num_dense = 0; wanted at least 1"):
        ClickStream(num_dense=0)
    with pytest.raises(UserError, match="drift_period = -1"):
        ClickStream(drift_period=-1)
    with pytest.raises(UserError, match=r"samples 5\.\.6 .* longer range"):
        ClickStream().bound(5, 6)


def test_workers_need_no_torch() -> None:
    program = "import sys, shardwright.data.sources.synthetic; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0


def samples(rows: NumpyBatch) -> list[tuple]:
    """Each sample's ids by feature, numeric features and label, exactly."""
    assert rows.dense is not None
    ends = np.cumsum(rows.lengths.reshape(-1))[:-1]
    bags = [bag.tolist() for bag in np.split(rows.values, ends)]
    num = rows.lengths.shape[1]
    return [(bags[i::num], rows.dense[i].tolist(), float(rows.labels["click"][i])) for i in range(num)]


def ids_by_feature(rows: NumpyBatch) -> list[np.ndarray]:
    return np.split(rows.values, np.cumsum(rows.lengths.sum(1))[:-1])


def log_loss(logit: np.ndarray, clicks: np.ndarray) -> float:
    return float((np.logaddexp(0, logit) - clicks * logit).mean())

"""Learning-rate schedules, scaling by batch size, and early stopping."""

import json
from itertools import pairwise

import pytest
import torch
from clicks import batch, dlrm

from shardwright.config import TrainSettings
from shardwright.runtime.build import build
from shardwright.runtime.planning import plan_for
from shardwright.runtime.run.early_stopping import EarlyStopping
from shardwright.runtime.run.learning_rate import batch_size_factor, describe_scaling, factor


@pytest.mark.parametrize("decay", ["none", "linear", "cosine"])
def test_learning_rates_warm_up_and_decay(decay):
    train = TrainSettings(steps=100, warmup=10, decay=decay, final_rate=0.1)  # pyright: ignore[reportCallIssue]
    rates = [factor(step, train) for step in range(1, 101)]
    assert rates[0] == pytest.approx(1 / 11) and rates[10] == 1.0
    assert all(a < b for a, b in pairwise(rates[:11])) and all(a >= b for a, b in pairwise(rates[10:]))
    assert rates[-1] == pytest.approx(1.0 if decay == "none" else 0.1)
    assert factor(1, TrainSettings()) == 1.0  # pyright: ignore[reportCallIssue]


@pytest.mark.parametrize("scaling, scale", [("none", 1.0), ("linear", 16.0), ("sqrt", 4.0)])
def test_learning_rates_scale_with_the_batch_size(scaling, scale):
    base = {} if scaling == "none" else {"base_batch": 4096}
    large = {"batch_size": 16_384, "accumulate": 4, "warmup": 10, "decay": "linear", "steps": 100}
    train = TrainSettings(**large, scale_rates=scaling, **base)  # pyright: ignore[reportArgumentType]
    plain = TrainSettings(**large)  # pyright: ignore[reportArgumentType]
    assert batch_size_factor(train) == scale
    assert [factor(step, train) for step in range(1, 101)] == [scale * factor(step, plain) for step in range(1, 101)]
    if base:
        line = describe_scaling(train, {"tables": 0.4, "dense": 0.002})
        assert line.startswith(f"learning rates x {scale:g} ({scaling}, 65,536 samples per step, chosen for 4,096): ")
        assert line.endswith(f"tables {0.4 * scale:g}, dense {0.002 * scale:g}")


def test_early_stopping_after_patience_without_improvement():
    patience = EarlyStopping(2)
    values = enumerate([0.9, 0.8, 0.85, 0.79, 0.8, 0.8])
    updates = [(patience.update(value, step), patience.should_stop) for step, value in values]
    assert updates == [(True, False), (True, False), (False, False), (True, False), (False, False), (False, True)]
    assert patience.best_step == 3
    loaded_state = EarlyStopping(2)
    loaded_state.load_state_dict(json.loads(json.dumps(patience.state_dict())))
    assert loaded_state.should_stop and loaded_state.best == 0.79
    never_stops = EarlyStopping(0)
    never_stops.load_state_dict(json.loads(json.dumps(EarlyStopping(0).state_dict())))
    assert never_stops.update(5.0, 1) and not never_stops.should_stop


def test_scale_rates_scales_table_and_dense_learning_rates():
    def weight_changes(*factors: float) -> torch.Tensor:
        torch.manual_seed(0)
        model = dlrm()
        job = build(model, plan_for(model, batch()), optimizer=lambda p: torch.optim.SGD(p, lr=0.2))
        before = [model.sparse.weight("site").detach().clone(), model.dense.top.steps[0].weight.detach().clone()]
        for scale in factors:
            job.scale_rates(scale)
        list(job.run([batch()]))
        after = [model.sparse.weight("site"), model.dense.top.steps[0].weight]
        return torch.stack([(b - a).norm() for a, b in zip(before, after, strict=True)]).detach()

    torch.testing.assert_close(weight_changes(0.5), weight_changes() / 2)
    torch.testing.assert_close(weight_changes(0.1, 1.0), weight_changes())

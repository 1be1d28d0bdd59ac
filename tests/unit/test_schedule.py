"""Learning rates over a run, and when to stop."""

import json
from itertools import pairwise

import pytest
import torch
from clicks import batch, dlrm

from shardwright.config import TrainSettings
from shardwright.runtime.build import build
from shardwright.runtime.planning import plan_for
from shardwright.runtime.run.learning_rate import EarlyStopping, batch_size_factor, describe_scaling, factor


@pytest.mark.parametrize("decay", ["none", "linear", "cosine"])
def test_rates_rise_then_fall_to_their_end(decay):
    train = TrainSettings(steps=100, warmup=10, decay=decay, final_rate=0.1)  # pyright: ignore[reportCallIssue]
    rates = [factor(step, train) for step in range(1, 101)]
    assert rates[0] == pytest.approx(1 / 11) and rates[10] == 1.0
    assert all(a < b for a, b in pairwise(rates[:11])) and all(a >= b for a, b in pairwise(rates[10:]))
    assert rates[-1] == pytest.approx(1.0 if decay == "none" else 0.1)
    assert factor(1, TrainSettings()) == 1.0  # pyright: ignore[reportCallIssue]


@pytest.mark.parametrize("how, times", [("none", 1.0), ("linear", 16.0), ("sqrt", 4.0)])
def test_rates_grow_with_the_samples_of_a_step(how, times):
    base = {} if how == "none" else {"base_batch": 4096}
    large = {"batch_size": 16_384, "accumulate": 4, "warmup": 10, "decay": "linear", "steps": 100}
    train = TrainSettings(**large, scale_rates=how, **base)  # pyright: ignore[reportArgumentType]
    plain = TrainSettings(**large)  # pyright: ignore[reportArgumentType]
    assert batch_size_factor(train) == times
    assert [factor(step, train) for step in range(1, 101)] == [times * factor(step, plain) for step in range(1, 101)]
    if base:
        line = describe_scaling(train, {"tables": 0.4, "dense": 0.002})
        assert line.startswith(f"learning rates x {times:g} ({how}, 65,536 samples per step, chosen for 4,096): ")
        assert line.endswith(f"tables {0.4 * times:g}, dense {0.002 * times:g}")


def test_patience_ends_after_so_many_without_a_better_one():
    patience = EarlyStopping(2)
    told = [
        (patience.update(figure, step), patience.should_stop)
        for step, figure in enumerate([0.9, 0.8, 0.85, 0.79, 0.8, 0.8])
    ]
    assert told == [(True, False), (True, False), (False, False), (True, False), (False, False), (False, True)]
    assert patience.best_step == 3
    again = EarlyStopping(2)
    again.load_state_dict(json.loads(json.dumps(patience.state_dict())))
    assert again.should_stop and again.best == 0.79
    fresh = EarlyStopping(0)
    fresh.load_state_dict(json.loads(json.dumps(EarlyStopping(0).state_dict())))
    assert fresh.update(5.0, 1) and not fresh.should_stop


def test_rates_of_tables_and_dense_parts_scale_together():
    def trained(*factors: float) -> torch.Tensor:
        torch.manual_seed(0)
        model = dlrm()
        job = build(model, plan_for(model, batch()), optimizer=lambda p: torch.optim.SGD(p, lr=0.2))
        before = [model.sparse.weight("site").detach().clone(), model.dense.top.steps[0].weight.detach().clone()]
        for one in factors:
            job.scale_rates(one)
        list(job.run([batch()]))
        after = [model.sparse.weight("site"), model.dense.top.steps[0].weight]
        return torch.stack([(b - a).norm() for a, b in zip(before, after, strict=True)]).detach()

    torch.testing.assert_close(trained(0.5), trained() / 2)
    torch.testing.assert_close(trained(0.1, 1.0), trained())

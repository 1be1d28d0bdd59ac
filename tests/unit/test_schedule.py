"""Learning rates over a run, and when to stop."""

import json
from itertools import pairwise

import pytest
import torch
from clicks import batch, dlrm

from shardwright.config import TrainSettings
from shardwright.runtime.build import build, plan_for
from shardwright.runtime.schedule import Patience, factor


@pytest.mark.parametrize("decay", ["none", "linear", "cosine"])
def test_rates_rise_then_fall_to_their_end(decay):
    train = TrainSettings(steps=100, warmup=10, decay=decay, final_rate=0.1)  # pyright: ignore[reportCallIssue]
    rates = [factor(step, train) for step in range(1, 101)]
    assert rates[0] == pytest.approx(1 / 11) and rates[10] == 1.0
    assert all(a < b for a, b in pairwise(rates[:11])) and all(a >= b for a, b in pairwise(rates[10:]))
    assert rates[-1] == pytest.approx(1.0 if decay == "none" else 0.1)
    assert factor(1, TrainSettings()) == 1.0  # pyright: ignore[reportCallIssue]


def test_patience_ends_after_so_many_without_a_better_one():
    patience = Patience(2)
    told = [
        (patience.better(figure, step), patience.over) for step, figure in enumerate([0.9, 0.8, 0.85, 0.79, 0.8, 0.8])
    ]
    assert told == [(True, False), (True, False), (False, False), (True, False), (False, False), (False, True)]
    assert patience.best_step == 3
    again = Patience(2)
    again.load(json.loads(json.dumps(patience.state())))
    assert again.over and again.best == 0.79
    fresh = Patience(0)
    fresh.load(json.loads(json.dumps(Patience(0).state())))
    assert fresh.better(5.0, 1) and not fresh.over


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

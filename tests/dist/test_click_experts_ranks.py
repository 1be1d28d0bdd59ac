"""DLRM with experts and their auxiliary losses: data parallel and sharded, compared with one process.

The balance loss couples the samples of a local micro-batch; the single process computes it in as many groups.
"""

import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

import pytest
import test_steps as clicks
import torch
from test_dense_plans import DDP, FSDP, FULL, HSDP, plan_dense
from torch import nn

from shardwright.layers.moe import MoEMLP, MoESpec
from shardwright.runtime.build import build
from shardwright.spec.lanes import EXPERT_LANES
from shardwright.spec.optimizer import RowWiseAdaGrad
from shardwright.spec.plan import ExpertPlan, Plan

STEPS = 10
BOTH = ("data@host", "data@local")
MIXTURE = MoESpec(5, 2, balance=0.1, z=0.01)


def make_model(groups: int = 1) -> nn.Module:
    model = clicks.make_model(RowWiseAdaGrad(0.1))
    width, mixture = 8 + model.dense.interaction.out_features, replace(MIXTURE, groups=groups)
    model.dense.top = MoEMLP(width, [16, 8], nn.Linear(8, 1), mixture).double()
    return model


def split_experts(plan: Plan) -> Plan:
    experts = tuple(ExpertPlan(f"dense.top.layers.{layer}", BOTH, 2, "even") for layer in range(2))
    return replace(plan, experts=experts, lanes=(*plan.lanes, *EXPERT_LANES))


PLANS = {
    "DDP, 2 ranks": (partial(plan_dense, dense=DDP, world=2), 2),
    "FSDP + full, 2 ranks": (partial(plan_dense, dense=replace(FSDP, recompute=FULL), world=2), 2),
    "HSDP": (partial(plan_dense, dense=HSDP, world=4), 4),
    "DDP, experts split": (lambda model: split_experts(plan_dense(model, DDP, 4)), 4),
}


def train(name: str, groups: int, accumulate: int) -> list[Sequence[torch.Tensor]]:
    """Logits and penalties by step, and logits of an evaluation; `name`: of a plan, empty: one process."""
    with ExitStack() as stack:
        model = make_model(groups)
        plan = PLANS[name][0](model) if name else clicks.single_plan(model)
        if plan.num_ranks == 4:
            patch = stack.enter_context(pytest.MonkeyPatch.context())
            patch.setenv("LOCAL_WORLD_SIZE", "2")
            patch.setenv("LOCAL_RANK", str(int(os.environ["RANK"]) % 2))
        job = build(model, plan, optimizer=lambda p: torch.optim.Adam(p, 0.01), accumulate=accumulate)
        stack.callback(job.mesh.close)
        rank, size = job.mesh.rank, plan.num_ranks
        bounds = clicks.SIZE * rank // size, clicks.SIZE * (rank + 1) // size
        outputs = [*job.run(clicks.take(clicks.batch(step), *bounds) for step in range(STEPS))]
        evaluated = [output.logits for output in job.evaluate([clicks.take(clicks.batch(100), *bounds)])]
        return [*(output.logits for output in outputs), evaluated]


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("name", PLANS)
def test_auxiliary_losses_train_as_in_one_process(ranks, name, accumulate):
    """Batches with and without sample weights; a rank's samples have another weight than the next rank's."""
    num_ranks = PLANS[name][1]
    expected = train("", num_ranks, accumulate)
    answers = ranks.run(num_ranks, train, name, 1, accumulate)
    for step, values in enumerate(expected):
        joined = [torch.cat([answer[step][part] for answer in answers]) for part in range(len(values))]
        torch.testing.assert_close(joined, [*values], rtol=0, atol=1e-10, msg=lambda m, n=step: f"step {n}: {m}")


def test_the_penalty_changes_the_result():
    assert not torch.allclose(train("", 1, 1)[-1][0], train("", 4, 1)[-1][0], rtol=0, atol=1e-6)

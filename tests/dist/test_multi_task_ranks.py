"""Models with several tasks over 2 and 4 ranks, with labels that are missing, compared with one process."""

import os
from contextlib import ExitStack
from dataclasses import replace

import pytest
import test_steps as clicks
import torch
from test_dense_plans import DDP, FSDP, plan_dense

from shardwright.jagged import Batch
from shardwright.layers.embedding import EmbeddingBags
from shardwright.layers.task_experts import ExtractionSpec
from shardwright.layers.task_losses import LabelTask
from shardwright.models.multi_task import MMoEDense, MultiTaskModel, PLEDense
from shardwright.runtime.build import build
from shardwright.runtime.rank_group import RankGroup
from shardwright.runtime.run import metrics
from shardwright.spec.optimizer import RowWiseAdaGrad

STEPS = 8
TASKS = (LabelTask("click", "click"), LabelTask("buy", "buy", 0.5))
LABELS = {"click.": "click", "buy.": "buy"}
LAYOUTS = {"DDP": DDP, "FSDP": FSDP}


def make_model(name: str) -> MultiTaskModel:
    sparse = clicks.make_model(RowWiseAdaGrad(0.1)).sparse
    assert isinstance(sparse, EmbeddingBags)
    torch.manual_seed(4)
    width = 5 + sum(sparse.dims)
    if name == "mmoe":
        dense = MMoEDense(width, 2, num_experts=3, expert_hidden=[16, 8], tower_hidden=[8])
    else:
        dense = PLEDense(width, 2, extraction=ExtractionSpec(1, 1, [8]), tower_hidden=[8])
    return MultiTaskModel(sparse, dense.double(), TASKS)


def batch(step: int) -> Batch:
    """Rank 0 has no label "buy" in odd steps; in step 2 nobody has one; else a third of the samples have none."""
    whole = clicks.batch(step)
    buy = (torch.rand(clicks.SIZE, generator=torch.Generator().manual_seed(step)) < 0.5).double()
    buy[::3] = float("nan")
    if step % 2:
        buy[: clicks.SIZE // 2] = float("nan")
    if step == 2:
        buy.fill_(float("nan"))
    return replace(whole, labels={**whole.labels, "buy": buy})


def train(name: str, layout: str, world: int) -> tuple[list[torch.Tensor], dict[str, float], dict[str, float]]:
    """Logits by step and in an evaluation, and the window's and lifetime metrics over all ranks."""
    model = make_model(name)
    plan = plan_dense(model, LAYOUTS[layout], world, batch(0)) if world > 1 else clicks.single_plan(model, batch(0))
    with ExitStack() as stack:
        if world == 4:
            patch = stack.enter_context(pytest.MonkeyPatch.context())
            patch.setenv("LOCAL_WORLD_SIZE", "2")
            patch.setenv("LOCAL_RANK", str(int(os.environ["RANK"]) % 2))
        job = build(model, plan, optimizer=lambda p: torch.optim.Adam(p, 0.01), accumulate=2)
        stack.callback(job.mesh.close)
        rank = job.mesh.rank
        bounds = clicks.SIZE * rank // world, clicks.SIZE * (rank + 1) // world
        window, lifetime = metrics.WindowMetrics(LABELS), metrics.TaskLifetimes(LABELS)
        logits = []
        for output in job.run(clicks.take(batch(step), *bounds) for step in range(STEPS)):
            logits.append(output.logits)
        for output in job.evaluate(clicks.take(batch(step), *bounds) for step in (99, 102, 105)):
            window.update(output)
            lifetime.update(output)
            logits.append(output.logits)
        group = RankGroup(job.mesh)
        return logits, group.all_gather_window(window).compute(), group.all_reduce_lifetime(lifetime).compute()


@pytest.mark.parametrize(("name", "layout", "world"), [("mmoe", "DDP", 2), ("ple", "FSDP", 2), ("ple", "DDP", 4)])
def test_tasks_train_and_score_as_in_one_process(ranks, name, layout, world):
    expected, window, lifetime = train(name, layout, 1)
    answers = ranks.run(world, train, name, layout, world)
    for step, logits in enumerate(expected):
        joined = torch.cat([answer[0][step] for answer in answers])
        torch.testing.assert_close(joined, logits, rtol=0, atol=1e-10, msg=lambda m, n=step: f"output {n}: {m}")
    assert {"click.auc", "buy.auc", "buy.ne"} <= window.keys()
    for _, own_window, own_lifetime in answers:
        assert {k: v for k, v in own_window.items() if k != "loss"} == pytest.approx(
            {k: v for k, v in window.items() if k != "loss"}, abs=1e-9
        )
        assert own_lifetime == pytest.approx(lifetime, abs=1e-9)

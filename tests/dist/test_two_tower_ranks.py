"""Two towers over ranks, compared with one process whose in-batch softmax has as many groups."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import test_steps as steps
import torch
from rated_items import ITEMS, KINDS, USERS, RatedItems, make_model
from test_dense_plans import FSDP

from shardwright.data.loading.loader import to_batch
from shardwright.layers.mlp import PLAIN, MLPForm
from shardwright.measure.describe import describe
from shardwright.runtime.build import build
from shardwright.runtime.planning import plan_single_process
from shardwright.runtime.run.retrieval import RetrievalMeter
from shardwright.spec.axes import Axis
from shardwright.spec.lanes import LANES
from shardwright.spec.plan import Placement, Plan, Rect, Share, TablePlan

STEPS, SIZE = 8, 48
FORM = MLPForm("gelu", "batch", 0.3)


def make_plan(model, world: int, sharded: bool) -> Plan:
    """Users row-wise over all ranks, items column-wise over two, kinds replicated; `sharded`: towers by FSDP."""
    single = plan_single_process(model, describe(model, take(RatedItems(), 0, SIZE)), ())
    if world == 1:
        return single
    users, items, kinds = USERS + 2, ITEMS + 2, KINDS + 2
    rects = {
        "user": [Rect("user", (users * r // world, users * (r + 1) // world), (0, 4), (r,)) for r in range(world)],
        "item": [Rect("item", (0, items), (0, 1), (world - 1,)), Rect("item", (0, items), (1, 4), (0,))],
        "kinds": [Rect("kinds", (0, kinds), (0, 4), tuple(range(world)))],
    }
    tables = [TablePlan(name, "id", tuple(own), Placement((Share("dram"),)), "vectors") for name, own in rects.items()]
    plan = steps.shard_plan(single, world, "read", "float64", tables)
    if not sharded:
        return plan
    axes = (Axis("data", "host", 1), Axis("data", "local", world))
    return replace(plan, axes=axes, lanes=(*LANES, "gather", "scatter"), dense=replace(FSDP, dtype="float64"))


def take(source: RatedItems, start: int, stop: int):
    batch = to_batch(source.take(np.arange(start, stop)))
    return replace(
        batch,
        dense=batch.dense.double(),
        labels={"click": batch.labels["click"].double()},
        weights=None if batch.weights is None else batch.weights.double(),
    )


def train(
    world: int,
    groups: int,
    accumulate: int = 1,
    weighted: bool = False,
    sharded: bool = False,
    form: MLPForm = PLAIN,
) -> tuple:
    """The vectors by step, and the metrics of an evaluation."""
    source = RatedItems(size=1000, weighted=weighted)
    model = make_model(source=source, groups=groups, temperature=0.5, form=form)
    plan = make_plan(model, world, sharded)
    # Adam would scale up the rounding that is the gradient of a bias before a batch norm
    optimizer = partial(torch.optim.SGD, lr=0.1) if form.norm == "batch" else partial(torch.optim.Adam, lr=0.01)
    job = build(model, plan, optimizer=optimizer, accumulate=accumulate)
    rank = job.mesh.rank
    try:
        start, stop = SIZE * rank // world, SIZE * (rank + 1) // world
        batches = (replace(take(source, SIZE * step + start, SIZE * step + stop), start=start) for step in range(STEPS))
        vectors = [output.logits for output in job.run(batches)]
        metrics = RetrievalMeter(job, source, 60).scores(source.evaluation())
        return vectors, metrics
    finally:
        job.mesh.close()


@pytest.mark.parametrize(
    ("world", "groups", "accumulate", "weighted", "sharded", "form"),
    [
        (2, 1, 1, False, False, PLAIN),
        (2, 1, 2, True, False, PLAIN),
        (2, 3, 1, True, False, PLAIN),
        (2, 2, 1, False, True, PLAIN),
        (4, 1, 1, True, False, PLAIN),
        (2, 1, 2, True, False, FORM),
        (4, 1, 1, False, True, FORM),
    ],
)
def test_ranks_equal_one_process_with_their_groups(ranks, world, groups, accumulate, weighted, sharded, form):
    expected, expected_metrics = train(1, groups * world, accumulate, weighted, form=form)
    answers = ranks.run(world, train, world, groups, accumulate, weighted, sharded, form)
    for step, vectors in enumerate(expected):
        parts = torch.cat([answer[0][step] for answer in answers])
        torch.testing.assert_close(parts, vectors, rtol=0, atol=1e-10, msg=lambda m, n=step: f"step {n}: {m}")
    assert len(expected_metrics) == 4 and all(answer[1] == expected_metrics for answer in answers)


def test_the_number_of_groups_changes_the_result():
    assert not torch.allclose(train(1, 1)[0][-1], train(1, 2)[0][-1], rtol=0, atol=1e-6)

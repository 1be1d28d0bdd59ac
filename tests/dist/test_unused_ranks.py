"""Features that the loss does not use in a step, over ranks, compared with one process and with torch."""

from dataclasses import replace

import pytest
import torch
from drawn import OPTIMIZERS, Case
from test_sharded import check_float64
from test_steps import shard_plan, single_plan, take
from test_unused_features import FEATURES, ROWS, Model, concat_batches, masked_batches

from shardwright.runtime.build import build
from shardwright.spec.optimizer import Adam, RowWiseAdaGrad
from shardwright.spec.plan import Placement, Rect, Share, TablePlan
from shardwright.spec.workload import Feature, Table

WORLD = 3
TABLES = (Table("t", 20, 4, dtype="float64"), Table("u", 50, 6, dtype="float64"))


def plans(rects: list[list[Rect]], exchange: str) -> tuple[TablePlan, ...]:
    placement = Placement((Share("dram"),))
    names = ("t", "u")
    pairs = zip(names, rects, strict=True)
    return tuple(TablePlan(name, "id", tuple(table_rects), placement, exchange) for name, table_rects in pairs)


REPLICAS = [[Rect("t", (0, 20), (0, 4), (0, 1, 2))], [Rect("u", (0, 50), (0, 6), (0, 1, 2))]]
SHARDED = [
    [Rect("t", (0, 20), (0, 2), (0,)), Rect("t", (0, 20), (2, 4), (2,))],
    [Rect("u", (0, 13), (0, 6), (1,)), Rect("u", (13, 50), (0, 6), (0, 2))],
]


@pytest.mark.parametrize("rects", (REPLICAS, SHARDED), ids=("replicas", "sharded"))
@pytest.mark.parametrize("exchange", ("vectors", "rows"))
@pytest.mark.parametrize(
    "optimizer", (OPTIMIZERS[3], OPTIMIZERS[6], Adam(0.01, weight_decay=0.1)), ids=lambda opt: opt.kind
)
def test_tables_with_used_and_unused_features_equal_one_process(ranks, rects, exchange, optimizer):
    features = [Feature("a", "t"), Feature("b", "t", "mean"), Feature("c", "u"), Feature("d", "u", "none")]
    sizes = ((40, 30, 50), (2, 0, 1))  # many samples: replicas then sum whole tables
    case = Case(WORLD, TABLES, tuple(features), plans(rects, exchange), optimizer, sizes, unused=True)
    for seed in range(3):
        check_float64(ranks, replace(case, seed=seed))


def table_plans(world: int) -> list[TablePlan]:
    rows = [Rect("t", (ROWS * r // world, ROWS * (r + 1) // world), (0, 4), (r,)) for r in range(world)]
    return list(plans([rows, [Rect("u", (0, ROWS), (0, 4), tuple(range(world)))]], "vectors"))


def train_on_rank(world: int, optimizer, accumulate: int, user_loop: bool):
    model = Model(optimizer)
    micro = masked_batches(6, accumulate)
    plan = shard_plan(single_plan(model, micro[0]), world, "read", "float64", table_plans(world))
    job = build(model, plan, accumulate=accumulate)
    size = micro[0].batch_size
    start, stop = (size * rank // world for rank in (job.mesh.rank, job.mesh.rank + 1))
    batches = [take(whole, start, stop) for whole in micro]
    if user_loop:
        for local in job.loader(batches):
            job.model.loss(job.model(local), local).backward()
    else:
        for _ in job.run(batches):
            pass
    state = job.state()
    job.mesh.close()
    return {name: value for name, value in state.tensors.items() if not value.is_meta}, model.sparse.steps


@pytest.mark.parametrize("optimizer", (Adam(0.05), RowWiseAdaGrad(0.1, weight_decay=0.1)), ids=lambda opt: opt.kind)
@pytest.mark.parametrize("accumulate, user_loop", ((1, False), (2, False), (1, True)))
def test_training_over_ranks_with_unused_features_equals_one_process(ranks, optimizer, accumulate, user_loop):
    micro = masked_batches(6, accumulate)
    model = Model(optimizer)
    for first in range(0, len(micro), accumulate):
        whole = concat_batches(micro[first : first + accumulate])
        model.loss(model(whole), whole).backward()
    answers = ranks.run(WORLD, train_on_rank, WORLD, optimizer, accumulate, user_loop)
    assert all(steps == model.sparse.steps == {"t": 6, "u": 3} for _, steps in answers)
    for feature in FEATURES[:2]:
        weight = answers[0][0][f"model.sparse.embedding_bags.{feature.table}.weight"]
        torch.testing.assert_close(weight, model.sparse.weight(feature.table).detach(), rtol=0, atol=1e-10)

"""Ranks that train nodes of their own partitions of a graph equal one process on the same global batches."""

import json
from itertools import islice

import numpy as np
import pytest
import torch
from test_steps import assert_same, shard_plan
from test_train_ranks import train as train_run

import shardwright as sw
from shardwright.data.graphs.communities import open_synthetic_graph
from shardwright.data.graphs.neighborhoods import Neighborhoods, partition_samples
from shardwright.models.graphsage import GraphSAGE, Widths
from shardwright.runtime.planning import plan_single_process
from shardwright.spec.optimizer import Adam
from shardwright.spec.plan import Placement, Rect, Share, TablePlan
from shardwright.spec.workload import Feature, Table

STEPS, PARTITIONS, BATCH = 6, 4, 24


def make_source() -> Neighborhoods:
    source = open_synthetic_graph(nodes=400, degree=6, classes=4, fanouts=[3, 2], split={"train": 0.5, "validation": 0})
    return partition_samples(source, PARTITIONS)


def train(world: int) -> tuple[list, dict, set]:
    """Logits of this rank, the final state, and the partitions whose nodes it trained."""
    source = make_source()
    torch.manual_seed(5)
    features = [Feature(f"words{position}", "words", "mean") for position in range(source.num_positions)]
    sparse = sw.EmbeddingBags([Table("words", source.tables["words"], 12, "float64")], features, Adam(0.05))
    model = GraphSAGE(sparse, source.fanouts, Widths(0, 6, source.num_classes), direct=True).double()
    plan = plan_single_process(model, sw.describe(model, make_loader(source, 0, 1).peek()), ())
    if world > 1:
        ((name, rows, dim),) = [(table.name, table.rows, table.dim) for table in sparse.tables]
        bounds = [rows * rank // world for rank in range(world + 1)]
        rects = tuple(Rect(name, (bounds[rank], bounds[rank + 1]), (0, dim), (rank,)) for rank in range(world))
        plan = shard_plan(plan, world, "read", "float64", (TablePlan(name, "id", rects, Placement((Share("dram"),))),))
    job = sw.build(model, plan, optimizer=lambda parameters: torch.optim.Adam(parameters, 0.01))
    loader = make_loader(source, job.mesh.rank, world)
    indices = np.concatenate([loader._order.indices(0, number) for number in range(STEPS)])
    places = indices // source.draws * PARTITIONS // len(source.nodes)
    logits = [output.logits for output in job.run(islice(loader, STEPS))]
    tensors = {name: value for name, value in job.state().tensors.items() if not value.is_meta}
    job.mesh.close()
    return logits, tensors, set(places.tolist())


def make_loader(source: Neighborhoods, rank: int, world: int) -> sw.Loader:
    return sw.Loader(source, batch_size=BATCH, seed=1, shard=(rank, world))


@pytest.mark.parametrize("world", (2, 4))
def test_ranks_with_partitions_equal_one_process(ranks, world):
    expected, state, _ = train(1)
    answers = ranks.run(world, train, world)
    for step, logits in enumerate(expected):
        own = torch.cat([answer[0][step] for answer in answers])
        torch.testing.assert_close(own, logits, rtol=0, atol=1e-10)
    assert_same(answers[0][1], {name: value for name, value in state.items() if name != "step"})
    shares = PARTITIONS // world
    assert [answer[2] for answer in answers] == [set(range(shares * r, shares * (r + 1))) for r in range(world)]


def test_runs_with_partitions_over_ranks_equal_one_process(tmp_path):
    small = ("data.nodes=2000", "data.partitions=2", "model.hidden=8", "model.dropout=0", "train.batch_size=32")
    recipe = ("synthetic-graph", *small, "train.log_every=2", "train.eval_every=0", "train.checkpoint_every=3")
    for args in (
        ("run.name=one", "train.steps=6"),
        ("run.name=two", "ranks=2", "train.steps=3"),
        ("run.name=two", "ranks=2", "train.steps=6", "run.resume=true"),
    ):
        result = train_run(tmp_path, *args, recipe=recipe)
        assert result.returncode == 0, result.stderr
    losses = []
    for name in ("one", "two"):
        lines = map(json.loads, (tmp_path / f"runs/{name}/metrics.jsonl").read_text().splitlines())
        losses.append([line["loss"] for line in lines if line["kind"] in ("train", "test")])
    assert losses[1] == pytest.approx(losses[0], abs=1e-5) and len(losses[0]) == 5

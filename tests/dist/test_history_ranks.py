"""Models of histories over ranks, dealt by count and by length, compared with one process."""

import numpy as np
import pytest
import torch
from histories import Visits, in_float64, write_movielens
from test_steps import shard_plan
from test_train_ranks import losses
from test_train_ranks import train as start_training

import shardwright as sw
from shardwright import config
from shardwright.data.loading.loader import Loader
from shardwright.jagged import Batch
from shardwright.models.click_inputs import ClickInputs
from shardwright.models.din import din
from shardwright.models.hstu import hstu
from shardwright.runtime.planning import plan_single_process
from shardwright.runtime.run.train import train as train_run
from shardwright.spec.optimizer import RowWiseAdaGrad
from shardwright.spec.plan import Placement, Rect, Share, TablePlan

STEPS, SIZE = 10, 23
COST = (1.0, 1.0, 0.1)
TABLES = {"user": 20, "item": 30, "tags": 7, "action": 5}


MODELS = {
    "din": lambda: din(ClickInputs(Visits(), RowWiseAdaGrad(0.1)), dim=4, attention=[8], hidden=[8], normalize=True),
    "mean": lambda: din(ClickInputs(Visits(), RowWiseAdaGrad(0.1)), dim=4, attention=[8], hidden=[8], pooling="mean"),
    "hstu": lambda: hstu(
        ClickInputs(Visits(), RowWiseAdaGrad(0.1)),
        dim=4,
        hidden=[8],
        encoder={"num_layers": 2, "num_heads": 2, "head_dim": 3},
    ),
}


def in_double(batch: Batch) -> Batch:
    return batch.map(lambda x: x.double() if x.is_floating_point() else x)


def sharded_tables(world: int) -> tuple[TablePlan, ...]:
    """Row-wise with vectors, row-wise with rows, replicated, and on the last rank."""
    placement, plans = Placement((Share("dram"),)), []
    for number, (name, rows) in enumerate(TABLES.items()):
        cuts = [rows * rank // world for rank in range(world + 1)]
        rects = [Rect(name, (cuts[rank], cuts[rank + 1]), (0, 4), (rank,)) for rank in range(world)]
        if number == 2:
            rects = [Rect(name, (0, rows), (0, 4), tuple(range(world)))]
        if number == 3:
            rects = [Rect(name, (0, rows), (0, 4), (world - 1,))]
        plans.append(TablePlan(name, "hash:5", tuple(rects), placement, "rows" if number == 1 else "vectors"))
    return tuple(plans)


def train(world: int, kind: str, by_length: bool):
    """The state after the steps, and by step the numbers of this rank's samples and of ids of their histories."""
    torch.manual_seed(3)
    model = in_float64(MODELS[kind]())
    source = Visits(samples=SIZE * STEPS, longest=40)
    with Loader(source, batch_size=SIZE, seed=2) as whole:
        plan = plan_single_process(model, sw.describe(model, in_double(whole.peek())), ())
    if world > 1:
        plan = shard_plan(plan, world, "read", "float64", sharded_tables(world))
    job = sw.build(model, plan, optimizer=lambda p: torch.optim.Adam(p, 0.01))
    with Loader(source, batch_size=SIZE, seed=2, shard=(job.mesh.rank, world)) as loader:
        if by_length:
            loader.deal_by_length(COST)
        batches = [in_double(batch) for batch in loader]
    for _ in job.run(batches):
        pass
    tensors = {name: value for name, value in job.state().tensors.items() if not value.is_meta}
    job.mesh.close()
    return tensors, [(batch.batch_size, int(batch.features.lengths[3].sum())) for batch in batches]


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("kind", MODELS)
def test_histories_over_ranks_equal_one_process(ranks, kind, world):
    expected, whole = train(1, kind, False)
    work = {}
    for by_length in (False, True):
        answers = ranks.run(world, train, world, kind, by_length)
        for name, value in answers[0][0].items():
            torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}")
        by_rank = np.array([answer[1] for answer in answers])
        assert by_rank.sum(0).tolist() == [list(pair) for pair in whole]
        assert np.ptp(by_rank[:, :, 0], axis=0).max() <= 1
        work[by_length] = np.ptp(by_rank[:, :, 1], axis=0).mean()
    assert work[True] < work[False] / 2


def test_a_run_deals_by_length(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data = f"data.path={write_movielens(tmp_path / 'ml', 600)}"
    keys = (data, "data.history=9", "train.batch_size=64", "train.log_every=1", "model.dim=4")
    train_run(config.load("movielens-din", [*keys, "run.name=one"]))
    result = start_training(
        tmp_path, "ranks=2", "data.deal=length", "data.workers=1", recipe=("movielens-din", *keys, "run.name=two")
    )
    assert result.returncode == 0, result.stderr
    assert losses(tmp_path, "two") == pytest.approx(losses(tmp_path, "one"), abs=1e-5)

"""The tables of an EmbeddingBagsDict sharded over ranks, compared with one process."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest
import torch
from drawn import SCHEMES, examples, plans
from hypothesis import given, seed, settings
from hypothesis import strategies as st
from test_steps import assert_same, shard_plan
from towers import batch, make_towers

import shardwright as sw
from shardwright.checkpoint import step_directories
from shardwright.checkpoint.reading import Checkpoint
from shardwright.planner.plan import make_plan
from shardwright.runtime.job import Job
from shardwright.runtime.planning import plan_single_process
from shardwright.runtime.rank_group import RankGroup
from shardwright.runtime.saving import Saver
from shardwright.spec import presets
from shardwright.spec.optimizer import Adam, RowWiseAdaGrad, SparseOptimizer
from shardwright.spec.plan import Placement, Rect, Share, TablePlan
from shardwright.spec.workload import Table

STEPS, HALF, SIZE = 12, 5, 24
SHAPES = {"user.site": (40, 8), "user.tag": (300, 4), "user.past": (17, 6), "item.small": (5, 4), "item.site": (40, 8)}


def table_plans(world: int, shift: int = 0) -> tuple[TablePlan, ...]:
    """Row-wise over all ranks, column-wise over two, on one rank with row exchange, replicated; by turns of tables."""
    placement, sharded = Placement((Share("dram"),)), []
    for number, (name, (rows, dim)) in enumerate(SHAPES.items()):
        last = world - 1
        rects, order, travel = [Rect(name, (0, rows), (0, dim), (last,))], "id", "vectors"
        match (number + shift) % 4:
            case 0:
                bounds = [rows * rank // world for rank in range(world + 1)]
                rects = [Rect(name, (bounds[rank], bounds[rank + 1]), (0, dim), (rank,)) for rank in range(world)]
                order = "hash:5"
            case 1 if world > 1:
                rects = [Rect(name, (0, rows), (0, 3), (last,)), Rect(name, (0, rows), (3, dim), (0,))]
            case 2:
                travel = "rows"
            case 3:
                rects = [Rect(name, (0, rows), (0, dim), tuple(range(world)))]
        sharded.append(TablePlan(name, order, tuple(rects), placement, travel))
    return tuple(sharded)


def make_job(world: int, optimizer: SparseOptimizer, sharded: Sequence[TablePlan] = (), **options) -> Job:
    model = make_towers(optimizer)
    plan = plan_single_process(model, sw.describe(model, batch(0)), ())
    if world > 1:
        plan = shard_plan(plan, world, "read", "float64", sharded or table_plans(world))
    hottest = {name: torch.arange(rows - 1, rows // 2, -1) for name, (rows, _) in SHAPES.items()}
    return sw.build(model, plan, optimizer=lambda p: torch.optim.Adam(p, 0.01), hottest=hottest, **options)


def local(job: Job, step: int) -> sw.Batch:
    """This rank's samples."""
    rank, world = job.mesh.rank, job.mesh.size
    return batch(step).narrow(SIZE * rank // world, SIZE * (rank + 1) // world)


def full_state(job: Job) -> dict[str, torch.Tensor]:
    return {name: value for name, value in job.state().tensors.items() if not value.is_meta}


def train(world: int, optimizer: SparseOptimizer, sharded: Sequence[TablePlan], own_loop: bool, accumulate: int):
    """Logits in training and evaluation, and the final state."""
    job = make_job(world, optimizer, sharded, accumulate=accumulate)
    batches, logits = [local(job, step) for step in range(STEPS)], []
    if own_loop:
        for samples in job.loader(batches):
            output = job.model(samples)
            job.optimizer.zero_grad()
            job.model.loss(output, samples).backward()
            job.optimizer.step()
            logits.append(output.detach())
    else:
        logits = [out.logits for out in job.run(batches)]
    evaluated = [out.logits for out in job.evaluate([local(job, 100)])]
    tensors = full_state(job)
    job.mesh.close()
    return [*logits, *evaluated], tensors


@cache
def train_reference(optimizer: SparseOptimizer, accumulate: int = 1):
    return train(1, optimizer, (), own_loop=False, accumulate=accumulate)


def check(ranks, world: int, optimizer: SparseOptimizer, sharded=(), own_loop: bool = False, accumulate: int = 1):
    expected, state = train_reference(optimizer, accumulate)
    answers = ranks.run(world, train, world, optimizer, sharded, own_loop, accumulate)
    for step, expected_logits in enumerate(expected):
        logits = torch.cat([answer[0][step] for answer in answers])
        torch.testing.assert_close(logits, expected_logits, rtol=0, atol=1e-10)
    assert_same(answers[0][1], {name: value for name, value in state.items() if name != "step"})


@pytest.mark.parametrize("optimizer", (RowWiseAdaGrad(0.1), Adam(0.05)), ids=lambda opt: opt.kind)
@pytest.mark.parametrize("world", (2, 3))
@pytest.mark.parametrize("own_loop", (False, True))
def test_ranks_equal_one_process(ranks, world, own_loop, optimizer):
    for shift in range(4):
        check(ranks, world, optimizer, table_plans(world, shift), own_loop)


def test_accumulated_micro_batches_over_ranks(ranks):
    check(ranks, 2, Adam(0.05), accumulate=2)


@examples(4)
def test_any_plan_equals_one_process(ranks, examples):
    @seed(0)
    @settings(database=None, max_examples=examples)
    @given(data=st.data(), world=st.sampled_from((2, 4)))
    def check_example(data, world):
        sharded = [data.draw(plans(Table(name, *shape), world, SCHEMES)) for name, shape in SHAPES.items()]
        check(ranks, world, RowWiseAdaGrad(0.1), sharded)

    check_example()


def test_the_planner_shards_tables_by_their_paths(ranks):
    workload = sw.describe(make_towers(RowWiseAdaGrad(0.1), "float32"), batch(0, dtype=torch.float32))
    pins = {"user.site": "row", "item.site": "table@0", "user.tag": "table@1", "user.past": "data"}
    plan = make_plan(workload, presets.unmeasured_cluster(1, 2, 10**9), pins=pins).plan
    by_name = {table.table: table.rects for table in plan.tables}
    assert [rect.rows for rect in by_name["user.site"]] == [(0, 20), (20, 40)]
    assert [by_name[name][0].ranks for name in ("item.site", "user.tag")] == [(0,), (1,)]
    assert by_name["user.past"][0].ranks == (0, 1)
    check(ranks, 2, RowWiseAdaGrad(0.1), plan.tables)


def train_and_save(world: int, optimizer: SparseOptimizer, root: Path) -> None:
    """A full checkpoint, then increments, of the first steps."""
    job = make_job(world, optimizer)
    saver = Saver(RankGroup(job.mesh), root, increments=3, changes=job.changes)
    for step in range(HALF):
        next(iter(job.run([local(job, step)])))
        if step >= HALF - 3:
            job.save_with(saver, {})
    saver.wait()
    job.mesh.close()


def load_and_train(world: int, optimizer: SparseOptimizer, path: Path):
    job = make_job(world, optimizer, table_plans(world, shift=2))
    job.load(path)
    logits = [out.logits for out in job.run(local(job, step) for step in range(HALF, STEPS))]
    tensors = full_state(job)
    job.mesh.close()
    return logits, tensors


def test_an_incremental_checkpoint_of_two_ranks_loads_on_any_number(ranks, tmp_path):
    optimizer = Adam(0.05)
    expected, state = train_reference(optimizer)
    ranks.run(2, train_and_save, 2, optimizer, tmp_path)
    path = step_directories.checkpoint_path(tmp_path, HALF)
    assert step_directories.read_manifest(path).base
    names = {name for name in Checkpoint(path).tensor_specs if "site" in name and "weight" in name}
    assert names == {f"model.sparse.{member}.embedding_bags.site.weight" for member in ("user", "item")}
    for world in (1, 2, 3):
        answers = ranks.run(world, load_and_train, world, optimizer, path)
        for number, step in enumerate(range(HALF, STEPS)):
            logits = torch.cat([by_step[number] for by_step, _ in answers])
            torch.testing.assert_close(logits, expected[step], rtol=0, atol=1e-10)
        assert_same(answers[0][1], {name: value for name, value in state.items() if name != "step"})


def look_up_a_member() -> list[str]:
    """Errors of a lookup of one member of sharded tables, without and with gradients."""
    job, messages = make_job(2, RowWiseAdaGrad(0.1)), []
    for is_training in (False, True):
        with torch.set_grad_enabled(is_training), pytest.raises(sw.UserError) as error:
            job.model.sparse["item"](batch(0))
        messages.append(str(error.value))
    job.mesh.close()
    return messages


def test_a_member_of_sharded_tables_cannot_be_looked_up_by_itself(ranks):
    for without, training in ranks.run(2, look_up_a_member):
        assert without == 'table "small" is sharded over ranks: job.state() returns its full weight'
        assert training.startswith('"item" is a member of an EmbeddingBagsDict: to train, call')


def train_one_step(world: int) -> dict[str, int]:
    job = make_job(world, RowWiseAdaGrad(0.1))
    next(iter(job.run([local(job, 0)])))
    steps = job.model.sparse["user"].steps
    job.mesh.close()
    return steps


def test_members_count_the_steps_of_sharded_tables(ranks):
    assert ranks.run(2, train_one_step, 2) == [{"site": 1, "tag": 1, "past": 1}] * 2

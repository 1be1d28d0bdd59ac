"""Tables that grow over ranks: equal to one process, under any sharding, through checkpoints and for a predictor."""

from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_steps import SIZE, batch, shard_plan, single_plan, take

from shardwright.jagged import Batch
from shardwright.layers.embedding import EmbeddingBags
from shardwright.models.dlrm import DLRM
from shardwright.runtime.build import build
from shardwright.runtime.job import Job
from shardwright.runtime.rank_group import RankGroup
from shardwright.runtime.saving import Saver
from shardwright.serving.export import export
from shardwright.serving.predictor import Predictor
from shardwright.spec.calls import without_leads
from shardwright.spec.optimizer import Adam, RowWiseAdaGrad, SparseOptimizer
from shardwright.spec.plan import Placement, Rect, Share, TablePlan
from shardwright.spec.workload import Feature, Growth, Table

STEPS, HALF = 16, 8
ROWS = 400
GROWTH = Growth(admit_after=2, expire_after=5, half_life=3)
FEATURES = [Feature("a", "t0", "mean"), Feature("b", "t1"), Feature("c", "t2"), Feature("d", "t2", "mean")]
ALL_IDS = torch.randint(-(2**63), 2**63 - 1, (300,), generator=torch.Generator().manual_seed(5))


def growing_batch(step: int) -> Batch:
    """The batch of test_steps, with ids of 64 bits for table "t2", some of them often."""
    whole = batch(step)
    values = whole.features.values.clone()
    first = int(whole.features.lengths[:2].sum())
    values[first:] = ALL_IDS[(values[first:].double() ** 3 / 300**2).long()]
    return replace(whole, features=replace(whole.features, values=values))


def rects(scheme: str, world: int, rows: int = ROWS) -> list[Rect]:
    if scheme == "columns" and world > 1:
        return [Rect("t2", (0, rows), (0, 3), (world - 1,)), Rect("t2", (0, rows), (3, 8), (0,))]
    if scheme == "table":
        return [Rect("t2", (0, rows), (0, 8), (world - 1,))]
    return [Rect("t2", (rows * r // world, rows * (r + 1) // world), (0, 8), (r,)) for r in range(world)]


def make_model(optimizer: SparseOptimizer, rows: int = ROWS) -> DLRM:
    torch.manual_seed(3)
    growing = Table("t2", rows, 8, "float64", growth=GROWTH)
    tables = [Table("t0", 40, 8, "float64"), Table("t1", 7, 8, "float64"), growing]
    return DLRM(EmbeddingBags(tables, FEATURES, optimizer), 5, bottom=[16, 8], top=[16]).double()


def make_job(world: int, scheme: str, optimizer: SparseOptimizer, *, overlap: bool = True, rows: int = ROWS) -> Job:
    model = make_model(optimizer, rows)
    placement = Placement((Share("dram"),))
    plan = single_plan(model, growing_batch(0))
    by_rows = [Rect("t0", (40 * r // world, 40 * (r + 1) // world), (0, 8), (r,)) for r in range(world)]
    whole = Rect("t1", (0, 7), (0, 8), tuple(range(world)))
    sharded = [
        TablePlan("t0", "id", tuple(by_rows), placement),
        TablePlan("t1", "id", (whole,), placement),
        TablePlan("t2", "hash:0", tuple(rects(scheme, world, rows)), placement),
    ]
    plan = shard_plan(plan, world, "vectors", "float64", sharded) if world > 1 else plan
    plan = plan if overlap else replace(plan, stages=without_leads(plan.stages))
    return build(model, plan, optimizer=lambda p: torch.optim.Adam(p, 0.01))


def run_steps(job: Job, first: int, end: int) -> list[torch.Tensor]:
    lo, hi = SIZE * job.mesh.rank // job.mesh.size, SIZE * (job.mesh.rank + 1) // job.mesh.size
    return [out.logits for out in job.run(take(growing_batch(step), lo, hi) for step in range(first, end))]


def evaluate(job: Job, step: int) -> torch.Tensor:
    lo, hi = SIZE * job.mesh.rank // job.mesh.size, SIZE * (job.mesh.rank + 1) // job.mesh.size
    return next(iter(job.evaluate([take(growing_batch(step), lo, hi)]))).logits


def state_of(job: Job) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The tensors of a job, and of those that grow the ids; on rank 0, then the mesh is closed."""
    state = job.state()
    job.mesh.close()
    return {name: x for name, x in state.tensors.items() if not x.is_meta}, state.ids


def train(world: int, scheme: str, optimizer: SparseOptimizer, overlap: bool):
    job = make_job(world, scheme, optimizer, overlap=overlap)
    logits = run_steps(job, 0, STEPS)
    return logits, evaluate(job, 100), state_of(job)


def assert_same_state(found, expected) -> None:
    (tensors, ids), (expected_tensors, expected_ids) = found, expected
    assert ids.keys() == expected_ids.keys() and ids
    assert all(torch.equal(ids[name], expected_ids[name]) for name in ids)
    for name, value in expected_tensors.items():
        if not name.startswith("random"):
            torch.testing.assert_close(tensors[name], value, rtol=0, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}")


@pytest.fixture(scope="module", params=(RowWiseAdaGrad(0.1), Adam(0.01)), ids=lambda optimizer: optimizer.kind)
def whole(request, ranks):
    return request.param, ranks.run(1, train, 1, "table", request.param, True)[0]


@pytest.mark.parametrize("overlap", (False, True))
@pytest.mark.parametrize(("world", "scheme"), ((2, "rows"), (3, "rows"), (3, "columns"), (2, "table")))
def test_ranks_equal_one_process(ranks, whole, world, scheme, overlap):
    optimizer, (expected, expected_evaluated, state) = whole
    answers = ranks.run(world, train, world, scheme, optimizer, overlap)
    for number, logits in enumerate(expected):
        found = torch.cat([by_step[number] for by_step, _, _ in answers])
        torch.testing.assert_close(found, logits, rtol=0, atol=1e-10)
    evaluated = torch.cat([evaluated for _, evaluated, _ in answers])
    torch.testing.assert_close(evaluated, expected_evaluated, rtol=0, atol=1e-10)
    assert_same_state(answers[0][2], state)


def save(world: int, scheme: str, optimizer: SparseOptimizer, root: Path, increments: int) -> None:
    job = make_job(world, scheme, optimizer)
    saver = Saver(RankGroup(job.mesh), root, keep=9, increments=increments, changes=job.changes)
    for step in range(0, HALF, 2):
        run_steps(job, step, step + 2)
        job.save_with(saver, {})
    saver.wait()
    job.mesh.close()


def resume(world: int, scheme: str, optimizer: SparseOptimizer, path: Path):
    job = make_job(world, scheme, optimizer)
    job.load(path)
    return run_steps(job, HALF, STEPS), evaluate(job, 100), state_of(job)


@pytest.mark.parametrize("increments", (0, 9))
@pytest.mark.parametrize("scheme", ("rows", "columns"))
def test_a_checkpoint_loads_on_any_number_of_ranks(ranks, tmp_path, whole, scheme, increments):
    optimizer, (expected, _, state) = whole
    ranks.run(3, save, 3, scheme, optimizer, tmp_path, increments)
    for world, other in ((1, "table"), (2, "rows"), (3, "rows"), (2, "columns")):
        answers = ranks.run(world, resume, world, other, optimizer, tmp_path / f"step-{HALF:08}")
        for number, logits in enumerate(expected[HALF:]):
            found = torch.cat([by_step[number] for by_step, _, _ in answers])
            torch.testing.assert_close(found, logits, rtol=0, atol=1e-10)
        assert_same_state(answers[0][2], state)


FULL_ROWS = 40


def save_full(root: Path):
    job = make_job(1, "table", RowWiseAdaGrad(0.1), rows=FULL_ROWS)
    run_steps(job, 0, 3)
    job.save(root)
    return state_of(job)


def load_full(world: int, path: Path):
    job = make_job(world, "rows", RowWiseAdaGrad(0.1), rows=FULL_ROWS)
    job.load(path)
    rooms = [
        rows.ids.numbers.rows for local in job.model.sparse.exchange.local_shards for rows in local.growing.values()
    ]
    return rooms, bool(evaluate(job, 100).isfinite().all()), state_of(job)


def test_a_full_table_loads_on_more_ranks(ranks, tmp_path):
    """A shard that gets more ids than it has rows keeps those with the most uses."""
    (tensors, ids), *_ = ranks.run(1, save_full, tmp_path)
    name = next(name for name in ids if name.endswith("t2.weight"))
    assert len(ids[name]) == FULL_ROWS
    for world in (2, 3):
        answers = ranks.run(world, load_full, world, tmp_path / "step-00000003")
        counts = [sum(rooms) for rooms, _, _ in answers]
        assert max(counts) <= -(-FULL_ROWS // world) and FULL_ROWS > sum(counts) > FULL_ROWS // 2
        assert all(is_finite for _, is_finite, _ in answers)
        kept_tensors, kept_ids = answers[0][2]
        positions = torch.searchsorted(ids[name], kept_ids[name])
        assert torch.equal(ids[name][positions], kept_ids[name])
        assert torch.equal(tensors[name][positions], kept_tensors[name])


def train_in_own_loop(world: int):
    """A user training loop; every fourth batch is looked up but not trained."""
    job = make_job(world, "rows", RowWiseAdaGrad(0.1))
    lo, hi = SIZE * job.mesh.rank // world, SIZE * (job.mesh.rank + 1) // world
    for step, local in enumerate(job.loader(take(growing_batch(step), lo, hi) for step in range(STEPS))):
        loss = job.model.loss(job.model(local), local)
        if step % 4 != 3:
            job.optimizer.zero_grad()
            loss.backward()
            job.optimizer.step()
    return evaluate(job, 100), state_of(job)


def test_a_user_loop_over_ranks_equals_that_of_one(ranks):
    ((expected, state),) = ranks.run(1, train_in_own_loop, 1)
    answers = ranks.run(3, train_in_own_loop, 3)
    torch.testing.assert_close(torch.cat([logits for logits, _ in answers]), expected, rtol=0, atol=1e-10)
    assert_same_state(answers[0][1], state)


def publish(world: int, root: Path, increments: int):
    """A checkpoint at step 3, a publication every second step; so many are not full, until one is."""
    job = make_job(world, "rows", RowWiseAdaGrad(0.1))
    saver = Saver(RankGroup(job.mesh), root / "checkpoint", changes=job.changes)
    options = {"keep": 99, "increments": increments, "changes": job.changes, "is_publication": True}
    publisher = Saver(RankGroup(job.mesh), root / "published", **options)
    for step in range(STEPS):
        run_steps(job, step, step + 1)
        if step == 2:
            job.save_with(saver, {})
        if step % 2:
            job.publish_with(publisher, {})
    saver.wait()
    publisher.wait()
    return evaluate(job, 100), state_of(job)


@pytest.mark.parametrize(("world", "increments"), ((1, 99), (2, 99), (3, 99), (2, 1)))
def test_a_predictor_follows_rows_that_come_and_end(ranks, tmp_path, world, increments):
    answers = ranks.run(world, publish, world, tmp_path, increments)
    model = make_model(RowWiseAdaGrad(0.1))
    export(model, tmp_path / "checkpoint", tmp_path / "out", example=growing_batch(0))
    with closing(Predictor(tmp_path / "out", follow=tmp_path / "published")) as predictor:
        assert predictor.served.step == 3 and predictor.step == STEPS
        scores = predictor.scores(growing_batch(100))
        evaluated = torch.cat([logits for logits, _ in answers])
        torch.testing.assert_close(scores, evaluated.sigmoid(), rtol=1e-12, atol=1e-12)
        (ids,) = (ids for name, ids in answers[0][1][1].items() if name.endswith("weight"))
        assert torch.equal(predictor.tables.growing["t2"].known_ids(), ids) and len(ids) < len(ALL_IDS)

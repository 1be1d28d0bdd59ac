"""Checkpoints of ranks: written by all of them, read back by any number under any other plan."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_steps import ROWS, alone, batch, cut_plan, model, part, plan_one, same, tables

from shardwright.checkpoint import step_directories
from shardwright.checkpoint.reading import Checkpoint
from shardwright.errors import UserError
from shardwright.layers.embedding import EmbeddingBags
from shardwright.models.dlrm import DLRM
from shardwright.runtime.build import build
from shardwright.runtime.job import Job
from shardwright.runtime.saving import Saver
from shardwright.runtime.rank_group import RankGroup
from shardwright.spec.optimizer import Adam, RowWiseAdaGrad
from shardwright.spec.plan import Placement, Rect, Share, TablePlan
from shardwright.spec.workload import Feature

STEPS, HALF = 20, 8
HELD = 100  # a batch that nothing was trained on
OPTIMIZERS = {"rowwise_adagrad": RowWiseAdaGrad(0.1), "adam": Adam(0.05)}


def by_rows(world: int) -> list[TablePlan]:
    """Rows by load over all ranks, whole tables, and columns in runs that do not touch."""
    placement = Placement((Share("dram"),))
    last = world - 1
    rows = [Rect("t0", (40 * r // world, 40 * (r + 1) // world), (0, 8), (r,)) for r in range(world)]
    whole = [Rect("t1", (0, 7), (0, 8), (last,))]
    columns = [Rect("t2", (0, 300), (0, 8), (0,))]
    if world > 1:
        columns = [Rect("t2", (0, 300), span, (rank,)) for span, rank in (((0, 2), 0), ((2, 5), last), ((5, 8), 0))]
    return [
        TablePlan(name, order, tuple(rects), placement)
        for name, order, rects in (("t0", "load", rows), ("t1", "id", whole), ("t2", "hash:11", columns))
    ]


def made(world: int, optimizer: str, other: bool, wire: str = "float64", dtype: str = "float64") -> Job:
    mine = model(OPTIMIZERS[optimizer], dtype)
    plan = (
        plan_one(mine) if world == 1 else cut_plan(plan_one(mine), world, "read", wire, by_rows(world) if other else ())
    )
    hottest = {f"t{at}": torch.arange(rows - 1, rows // 2, -1) for at, rows in enumerate(ROWS)}
    return build(mine, plan, optimizer=lambda p: torch.optim.Adam(p, 0.01), hottest=hottest)


def steps(job: Job, first: int, end: int, dtype=torch.float64) -> list[torch.Tensor]:
    rank, world = job.mesh.rank, job.mesh.size
    lo, hi = 24 * rank // world, 24 * (rank + 1) // world
    return [one.logits for one in job.run(part(batch(step, dtype=dtype), lo, hi) for step in range(first, end))]


def saved(world: int, optimizer: str, root: Path) -> list[torch.Tensor]:
    job = made(world, optimizer, other=False)
    found = steps(job, 0, HALF)
    job.save(root)
    job.mesh.close()
    return found


def resumed(world: int, optimizer: str, path: Path):
    """Logits of held samples and of the steps to come, and the state at their end."""
    job = made(world, optimizer, other=True)
    job.load(path)
    assert job.step == HALF
    rank = job.mesh.rank
    lo, hi = 24 * rank // world, 24 * (rank + 1) // world
    held = [one.logits for one in job.evaluate([part(batch(HELD), lo, hi)])]
    found = steps(job, HALF, STEPS)
    state = job.state().tensors
    job.mesh.close()
    return held, found, {name: value for name, value in state.items() if not value.is_meta}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_four_ranks_are_read_back_by_any_number(ranks, tmp_path, optimizer):
    """Under other schemes and orders; the steps to come are those of one process that was never stopped."""
    ranks.run(4, saved, 4, optimizer, tmp_path)
    path = step_directories.checkpoint_path(tmp_path, HALF)
    assert sorted(one.name for one in path.iterdir()) == ["manifest.json", *(f"rank{r}.safetensors" for r in range(4))]
    found = Checkpoint(path)
    wanted_held = None
    outputs, _, wanted_state = alone(OPTIMIZERS[optimizer])
    for world in (1, 2, 3):
        answers = ranks.run(world, resumed, world, optimizer, path)
        held = torch.cat([held[0] for held, _, _ in answers])
        wanted_held = held if wanted_held is None else wanted_held
        torch.testing.assert_close(held, wanted_held, rtol=1e-12, atol=1e-12)
        for at, step in enumerate(range(HALF, STEPS)):
            logits = torch.cat([steps_[at] for _, steps_, _ in answers])
            torch.testing.assert_close(logits, outputs[step], rtol=0, atol=1e-10)
        same(answers[0][2], wanted_state)
    total = sum(tensor.numel() * tensor.element_size() for tensor in map(found.read_tensor, found.tensor_specs))
    assert found.manifest.bytes_ < 1.3 * total, "each number is written once, beside the numbers of rows"
    found.close()


def interrupted(root: Path, increments: int) -> bool:
    """Whether a rank with rounded messages and draws of its own goes on to the bit where a checkpoint was made."""
    single = torch.float32
    job = made(3, "rowwise_adagrad", other=True, wire="bfloat16", dtype="float32")
    saver = Saver(RankGroup(job.mesh), root, increments=increments, changes=job.changes)
    torch.manual_seed(job.mesh.rank)
    for step in range(HALF):
        steps(job, step, step + 1, single)
        job.save_with(saver, {})
    saver.wait()
    wanted = [torch.rand(3), *steps(job, HALF, STEPS, single)]
    job.mesh.close()
    other = made(3, "rowwise_adagrad", other=True, wire="bfloat16", dtype="float32")
    assert other.load(step_directories.checkpoint_path(root, HALF)) == []
    found = [torch.rand(3), *steps(other, HALF, STEPS, single)]
    other.mesh.close()
    return all(map(torch.equal, found, wanted))


@pytest.mark.parametrize("increments", (0, 3))
def test_as_many_ranks_go_on_to_the_bit(ranks, tmp_path, increments):
    assert ranks.run(3, interrupted, tmp_path, increments) == [True] * 3
    bases = [step_directories.read_manifest(path).base for path in step_directories.list_checkpoints(tmp_path)]
    kept = {0: ["", ""], 3: ["", "step-00000005", "step-00000006", "step-00000007"]}
    assert bases == kept[increments], "whole ones at steps 1 and 5, if increments are asked for"


def half_tables(path: Path) -> float:
    """The largest difference between tables in fp16 and what a float32 job had saved."""
    mine = model(OPTIMIZERS["rowwise_adagrad"], "float32")
    small = [replace(table, dtype="float16") for table in tables("float32")]
    mine.sparse = EmbeddingBags(small, mine.sparse.features, RowWiseAdaGrad(0.1))
    job = build(
        mine,
        cut_plan(plan_one(mine), 2, "read", "float32", by_rows(2)),
        optimizer=lambda p: torch.optim.Adam(p, 0.01),
        hottest={"t0": torch.arange(5)},
    )
    rounded = job.load(path)
    assert [name for name in rounded if "sparse" in name] == rounded and len(rounded) == 3
    state, found = job.state().tensors, Checkpoint(path)
    worst = 0.0
    for name in rounded if job.mesh.rank == 0 else ():
        wanted = found.read_tensor(name)
        assert torch.equal(state[name], wanted.half())
        worst = max(worst, float((state[name].float() - wanted).abs().max()))
    job.mesh.close()
    return worst


def single_saved(root: Path) -> None:
    job = made(1, "rowwise_adagrad", other=False, dtype="float32")
    steps(job, 0, HALF, torch.float32)
    job.save(root)


def test_tables_of_another_precision_are_rounded_to_nearest(ranks, tmp_path):
    single_saved(tmp_path)
    worst = ranks.run(2, half_tables, step_directories.checkpoint_path(tmp_path, HALF))[0]
    assert 0 < worst < 2**-11


def refused(path: Path, what: str) -> str:
    torch.manual_seed(3)
    named = [replace(table, name="u0") if what == "name" and table.name == "t0" else table for table in tables()]
    named = [replace(table, rows=41) if what == "shape" and table.name == "t0" else table for table in named]
    features = [Feature("a", named[0].name, "mean"), Feature("b", "t1"), Feature("c", "t2"), Feature("d", "t2")]
    mine = DLRM(EmbeddingBags(named, features, RowWiseAdaGrad(0.1)), 5, bottom=[16, 8], top=[16]).double()
    job = build(
        mine,
        cut_plan(plan_one(mine), 2, "read", "float64", renamed(named)),
        optimizer=lambda p: torch.optim.Adam(p, 0.01),
    )
    with pytest.raises(UserError) as told:
        job.load(path)
    job.mesh.close()
    return str(told.value)


def renamed(named) -> list[TablePlan]:
    placement = Placement((Share("dram"),))
    return [
        TablePlan(t.name, "id", (Rect(t.name, (0, t.rows), (0, 8), (at % 2,)),), placement)
        for at, t in enumerate(named)
    ]


@pytest.mark.parametrize(
    "what, said",
    (
        ("name", '"model.sparse.embedding_bags.u0.weight" is missing'),
        ("shape", '"model.sparse.embedding_bags.t0.weight" is float64 (40, 8), the model has float64 (41, 8)'),
    ),
)
def test_what_does_not_fit_is_refused_by_name(ranks, tmp_path, what, said):
    ranks.run(2, saved, 2, "rowwise_adagrad", tmp_path)
    for told in ranks.run(2, refused, step_directories.checkpoint_path(tmp_path, HALF), what):
        assert said in told


def test_a_full_disk_is_told_on_all_ranks(ranks, tmp_path):
    (tmp_path / "file").write_text("")
    for told in ranks.run(2, unwritable, tmp_path / "file"):
        assert "cannot be written (Not a directory)" in told or "File exists" in told


def unwritable(root: Path) -> str:
    job = made(2, "rowwise_adagrad", other=False)
    steps(job, 0, 1)
    with pytest.raises(UserError) as told:
        job.save(root)
    job.mesh.close()
    return str(told.value)

"""Checkpoints written by all ranks and loaded by any number of ranks under another plan."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_steps import ROWS, assert_same, batch, make_model, shard_plan, single_plan, tables, take, train_reference

from shardwright.checkpoint import step_directories
from shardwright.checkpoint.reading import Checkpoint
from shardwright.errors import UserError
from shardwright.layers.embedding import EmbeddingBags
from shardwright.models.dlrm import DLRM
from shardwright.runtime.build import build
from shardwright.runtime.job import Job
from shardwright.runtime.rank_group import RankGroup
from shardwright.runtime.saving import Saver
from shardwright.spec.optimizer import Adam, RowWiseAdaGrad
from shardwright.spec.plan import Placement, Rect, Share, TablePlan
from shardwright.spec.workload import Feature

STEPS, HALF = 20, 8
EVALUATION_STEP = 100  # number of a batch that is not trained on
OPTIMIZERS = {"rowwise_adagrad": RowWiseAdaGrad(0.1), "adam": Adam(0.05)}


def other_table_plans(world: int) -> list[TablePlan]:
    """One table row-wise by load over all ranks, one on the last rank, one column-wise with columns that are apart."""
    placement = Placement((Share("dram"),))
    last = world - 1
    row_wise = [Rect("t0", (40 * r // world, 40 * (r + 1) // world), (0, 8), (r,)) for r in range(world)]
    table_wise = [Rect("t1", (0, 7), (0, 8), (last,))]
    columns = [Rect("t2", (0, 300), (0, 8), (0,))]
    if world > 1:
        columns = [Rect("t2", (0, 300), span, (rank,)) for span, rank in (((0, 2), 0), ((2, 5), last), ((5, 8), 0))]
    return [
        TablePlan(name, order, tuple(rects), placement)
        for name, order, rects in (("t0", "load", row_wise), ("t1", "id", table_wise), ("t2", "hash:11", columns))
    ]


def make_job(world: int, optimizer: str, other: bool, wire: str = "float64", dtype: str = "float64") -> Job:
    model = make_model(OPTIMIZERS[optimizer], dtype)
    plan = single_plan(model)
    if world > 1:
        plan = shard_plan(plan, world, "read", wire, other_table_plans(world) if other else ())
    hottest = {f"t{number}": torch.arange(rows - 1, rows // 2, -1) for number, rows in enumerate(ROWS)}
    return build(model, plan, optimizer=lambda p: torch.optim.Adam(p, 0.01), hottest=hottest)


def train_steps(job: Job, first: int, end: int, dtype=torch.float64) -> list[torch.Tensor]:
    rank, world = job.mesh.rank, job.mesh.size
    lo, hi = 24 * rank // world, 24 * (rank + 1) // world
    return [out.logits for out in job.run(take(batch(step, dtype=dtype), lo, hi) for step in range(first, end))]


def train_and_save(world: int, optimizer: str, root: Path) -> None:
    job = make_job(world, optimizer, other=False)
    train_steps(job, 0, HALF)
    job.save(root)
    job.mesh.close()


def load_and_train(world: int, optimizer: str, path: Path):
    """Logits of evaluation samples and of the remaining steps, and the final state."""
    job = make_job(world, optimizer, other=True)
    job.load(path)
    assert job.step == HALF
    rank = job.mesh.rank
    lo, hi = 24 * rank // world, 24 * (rank + 1) // world
    evaluated = [out.logits for out in job.evaluate([take(batch(EVALUATION_STEP), lo, hi)])]
    logits = train_steps(job, HALF, STEPS)
    state = job.state().tensors
    job.mesh.close()
    return evaluated, logits, {name: value for name, value in state.items() if not value.is_meta}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_checkpoint_of_four_ranks_loads_on_any_number(ranks, tmp_path, optimizer):
    """Under other schemes and row orders; the remaining steps equal those of one process without interruption."""
    ranks.run(4, train_and_save, 4, optimizer, tmp_path)
    path = step_directories.checkpoint_path(tmp_path, HALF)
    names = sorted(file.name for file in path.iterdir())
    assert names == ["manifest.json", *(f"rank{rank}.safetensors" for rank in range(4))]
    checkpoint = Checkpoint(path)
    first_evaluated = None
    outputs, _, expected_state = train_reference(OPTIMIZERS[optimizer])
    for world in (1, 2, 3):
        answers = ranks.run(world, load_and_train, world, optimizer, path)
        evaluated = torch.cat([evaluated[0] for evaluated, _, _ in answers])
        first_evaluated = evaluated if first_evaluated is None else first_evaluated
        torch.testing.assert_close(evaluated, first_evaluated, rtol=1e-12, atol=1e-12)
        for number, step in enumerate(range(HALF, STEPS)):
            logits = torch.cat([by_step[number] for _, by_step, _ in answers])
            torch.testing.assert_close(logits, outputs[step], rtol=0, atol=1e-10)
        assert_same(answers[0][2], expected_state)
    tensors = map(checkpoint.read_tensor, checkpoint.tensor_specs)
    total = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    assert checkpoint.manifest.bytes_ < 1.3 * total, "each number is written once, in addition to row numbers"
    checkpoint.close()


def resumes_exactly(root: Path, increments: int) -> bool:
    """Whether a rank with rounded messages and its own random seed continues from a checkpoint with the same bits."""
    single = torch.float32
    job = make_job(3, "rowwise_adagrad", other=True, wire="bfloat16", dtype="float32")
    saver = Saver(RankGroup(job.mesh), root, increments=increments, changes=job.changes)
    torch.manual_seed(job.mesh.rank)
    for step in range(HALF):
        train_steps(job, step, step + 1, single)
        job.save_with(saver, {})
    saver.wait()
    expected = [torch.rand(3), *train_steps(job, HALF, STEPS, single)]
    job.mesh.close()
    resumed = make_job(3, "rowwise_adagrad", other=True, wire="bfloat16", dtype="float32")
    assert resumed.load(step_directories.checkpoint_path(root, HALF)) == []
    continued = [torch.rand(3), *train_steps(resumed, HALF, STEPS, single)]
    resumed.mesh.close()
    return all(map(torch.equal, continued, expected))


@pytest.mark.parametrize("increments", (0, 3))
def test_the_same_number_of_ranks_resumes_with_the_same_bits(ranks, tmp_path, increments):
    assert ranks.run(3, resumes_exactly, tmp_path, increments) == [True] * 3
    bases = [step_directories.read_manifest(path).base for path in step_directories.list_checkpoints(tmp_path)]
    expected = {0: ["", ""], 3: ["", "step-00000005", "step-00000006", "step-00000007"]}
    assert bases == expected[increments], "with increments, full checkpoints at steps 1 and 5"


def load_as_fp16(path: Path) -> float:
    """The largest difference between tables loaded in fp16 and the float32 tables of a checkpoint."""
    model = make_model(OPTIMIZERS["rowwise_adagrad"], "float32")
    fp16_tables = [replace(table, dtype="float16") for table in tables("float32")]
    model.sparse = EmbeddingBags(fp16_tables, model.sparse.features, RowWiseAdaGrad(0.1))
    job = build(
        model,
        shard_plan(single_plan(model), 2, "read", "float32", other_table_plans(2)),
        optimizer=lambda p: torch.optim.Adam(p, 0.01),
        hottest={"t0": torch.arange(5)},
    )
    rounded = job.load(path)
    assert [name for name in rounded if "sparse" in name] == rounded and len(rounded) == 3
    state, checkpoint = job.state().tensors, Checkpoint(path)
    largest = 0.0
    for name in rounded if job.mesh.rank == 0 else ():
        saved = checkpoint.read_tensor(name)
        assert torch.equal(state[name], saved.half())
        largest = max(largest, float((state[name].float() - saved).abs().max()))
    job.mesh.close()
    return largest


def train_single_and_save(root: Path) -> None:
    job = make_job(1, "rowwise_adagrad", other=False, dtype="float32")
    train_steps(job, 0, HALF, torch.float32)
    job.save(root)


def test_tables_of_another_precision_are_rounded_to_nearest(ranks, tmp_path):
    train_single_and_save(tmp_path)
    largest = ranks.run(2, load_as_fp16, step_directories.checkpoint_path(tmp_path, HALF))[0]
    assert 0 < largest < 2**-11


def load_into_other_model(path: Path, change: str) -> str:
    torch.manual_seed(3)
    changed = [replace(table, name="u0") if change == "name" and table.name == "t0" else table for table in tables()]
    changed = [replace(table, rows=41) if change == "shape" and table.name == "t0" else table for table in changed]
    features = [Feature("a", changed[0].name, "mean"), Feature("b", "t1"), Feature("c", "t2"), Feature("d", "t2")]
    model = DLRM(EmbeddingBags(changed, features, RowWiseAdaGrad(0.1)), 5, bottom=[16, 8], top=[16]).double()
    job = build(
        model,
        shard_plan(single_plan(model), 2, "read", "float64", table_wise_plans(changed)),
        optimizer=lambda p: torch.optim.Adam(p, 0.01),
    )
    with pytest.raises(UserError) as error:
        job.load(path)
    job.mesh.close()
    return str(error.value)


def table_wise_plans(tables) -> list[TablePlan]:
    placement = Placement((Share("dram"),))
    return [
        TablePlan(t.name, "id", (Rect(t.name, (0, t.rows), (0, 8), (number % 2,)),), placement)
        for number, t in enumerate(tables)
    ]


@pytest.mark.parametrize(
    "change, message",
    (
        ("name", '"model.sparse.embedding_bags.u0.weight" is missing'),
        ("shape", '"model.sparse.embedding_bags.t0.weight" is float64 (40, 8), the model has float64 (41, 8)'),
    ),
)
def test_an_error_names_the_tensor_that_does_not_fit(ranks, tmp_path, change, message):
    ranks.run(2, train_and_save, 2, "rowwise_adagrad", tmp_path)
    for error in ranks.run(2, load_into_other_model, step_directories.checkpoint_path(tmp_path, HALF), change):
        assert message in error


def test_a_directory_that_cannot_be_written_is_an_error_on_all_ranks(ranks, tmp_path):
    (tmp_path / "file").write_text("")
    for error in ranks.run(2, save_to_file, tmp_path / "file"):
        assert "cannot be written (Not a directory)" in error or "File exists" in error


def save_to_file(root: Path) -> str:
    job = make_job(2, "rowwise_adagrad", other=False)
    train_steps(job, 0, 1)
    with pytest.raises(UserError) as error:
        job.save(root)
    job.mesh.close()
    return str(error.value)

"""Checkpoints outside a job: inspected, resharded, exported, and loaded by other libraries."""

import pytest
import torch
from clicks import FEATURES, batch, dlrm, tables
from safetensors.torch import load_file
from torch import nn
from typer.testing import CliRunner

from shardwright.checkpoint import portable, step_directories
from shardwright.checkpoint.reading import Checkpoint
from shardwright.cli import app
from shardwright.errors import UserError
from shardwright.runtime.build import build
from shardwright.runtime.job import Job
from shardwright.runtime.planning import plan_for
from shardwright.runtime.rank_group import RankGroup
from shardwright.runtime.saving import Saver


def build_job() -> Job:
    model = dlrm()
    return build(model, plan_for(model, batch()), optimizer=lambda p: torch.optim.Adam(p, 0.01))


@pytest.fixture
def checkpoint(tmp_path):
    """A job that has trained 3 steps, and its checkpoint."""
    job = build_job()
    list(job.run([batch(seed=seed) for seed in range(3)]))
    return job, job.save(tmp_path / "checkpoint")


def test_a_resharded_checkpoint_has_the_same_state(checkpoint, tmp_path):
    job, path = checkpoint
    resharded = portable.reshard(path, tmp_path / "out", 3)
    files = ["manifest.json", *(f"rank{rank}.safetensors" for rank in range(3))]
    assert sorted(file.name for file in resharded.iterdir()) == files
    before, after = Checkpoint(path), Checkpoint(resharded)
    assert before.tensor_specs == after.tensor_specs and before.numbers == after.numbers
    assert all(torch.equal(before.read_tensor(name), after.read_tensor(name)) for name in before.tensor_specs)
    resumed = build_job()
    resumed.load(resharded)
    batches = [batch(seed=seed) for seed in range(3, 6)]
    assert [step.loss for step in resumed.run(batches)] == [step.loss for step in job.run(batches)]
    with pytest.raises(UserError, match="--files 0"):
        portable.reshard(path, tmp_path / "none", 0)


class PlainModel(nn.Module):
    """The same tables and dense model in plain PyTorch, as a serving team may have them."""

    def __init__(self, dense: nn.Module) -> None:
        super().__init__()
        self.sparse = nn.Module()
        self.sparse.embedding_bags = nn.ModuleDict(
            {t.name: nn.EmbeddingBag(t.rows, t.dim, mode="sum") for t in tables()}
        )
        self.dense = dense


def test_plain_torch_loads_an_export(checkpoint, tmp_path):
    job, path = checkpoint
    exported = tmp_path / "model.safetensors"
    assert portable.export_state_dict(path, exported)[0] == len(job.model.state_dict())
    model = PlainModel(dlrm().dense)
    model.load_state_dict(load_file(exported), strict=True)
    for name, value in job.model.state_dict().items():
        assert torch.equal(model.state_dict()[name], value)


def test_torchrec_loads_an_export(checkpoint, tmp_path):
    torchrec = pytest.importorskip("torchrec", reason="needs torchrec")
    job, path = checkpoint
    portable.export_state_dict(path, tmp_path / "tables.safetensors", "sparse.")
    features = {table.name: [f.name for f in FEATURES if f.table == table.name] for table in tables()}
    collection = torchrec.EmbeddingBagCollection(
        tables=[
            torchrec.EmbeddingBagConfig(
                name=t.name, embedding_dim=t.dim, num_embeddings=t.rows, feature_names=features[t.name]
            )
            for t in tables()
        ]
    )
    collection.load_state_dict(load_file(tmp_path / "tables.safetensors"), strict=True)
    for name, value in collection.state_dict().items():
        assert torch.equal(value, job.model.sparse.state_dict()[name])


def test_checkpoint_commands(checkpoint, tmp_path):
    def run(*arguments) -> str:
        result = CliRunner().invoke(app, ["checkpoint", *map(str, arguments)], catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return result.output

    job, path = checkpoint
    output = run("inspect", tmp_path)
    assert "step 3" in output and "written by 1 rank" in output and "model.sparse.embedding_bags.site.weight" in output
    assert "intact" in run("verify", path)
    run("reshard", path, tmp_path / "out", "--files", "2")
    assert "row shards: 2" in run("inspect", tmp_path / "out")
    assert "2 tensors" in run("export", tmp_path / "out", tmp_path / "tables.safetensors", "--prefix", "sparse.")
    for arguments, message in (
        (("export", path, tmp_path / "x.bin"), "name a .safetensors file"),
        (
            ("export", path, tmp_path / "x.safetensors", "--prefix", "spars."),
            'begins with "spars."; allowed: dense., sparse.',
        ),
        (("inspect", tmp_path / "nothing"), "no checkpoint; name one like"),
    ):
        with pytest.raises(UserError, match=message):
            run(*arguments)
    data = bytearray((path / "rank0.safetensors").read_bytes())
    entry = step_directories.read_manifest(path).tensors["model.sparse.embedding_bags.site.weight"]
    data[entry.pieces[0].values.offset + 9] ^= 4
    (path / "rank0.safetensors").write_bytes(data)
    with pytest.raises(UserError, match="rank0.safetensors: its digest differs"):
        run("verify", path)
    with pytest.raises(UserError, match="rank0.safetensors: its digest differs"):
        run("export", path, tmp_path / "model.safetensors")
    assert not list(tmp_path.glob("*model.safetensors*")), "no incomplete file is left"
    with pytest.raises(UserError, match=r"cannot be written \(No such file or directory\)"):
        run("export", tmp_path / "out", tmp_path / "none/model.safetensors")
    assert step_directories.resolve_checkpoint(tmp_path) == path and job.step == 3


def test_the_first_checkpoint_after_a_load_is_full(checkpoint, tmp_path):
    job, path = checkpoint
    saver = Saver(RankGroup(job.mesh), tmp_path / "mine", increments=5, changes=job.changes)
    list(job.run([batch(seed=9)]))
    job.save_with(saver, {})
    job.load(path)
    list(job.run([batch(seed=10), batch(seed=11)]))
    job.save_with(saver, {})
    saver.wait()
    saved, expected = Checkpoint(step_directories.checkpoint_path(tmp_path / "mine", 5)), job.state().tensors
    assert saved.manifest.base == "", "the previous checkpoint has another lineage"
    assert all(torch.equal(saved.read_tensor(name), value) for name, value in expected.items())

"""Checkpoints outside a job: looked at, cut anew, and loaded by other libraries."""

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


def job() -> Job:
    model = dlrm()
    return build(model, plan_for(model, batch()), optimizer=lambda p: torch.optim.Adam(p, 0.01))


@pytest.fixture
def saved(tmp_path):
    """A job that has trained, and its checkpoint."""
    mine = job()
    list(mine.run([batch(seed=seed) for seed in range(3)]))
    return mine, mine.save(tmp_path / "checkpoint")


def test_cut_anew_it_is_the_same_state(saved, tmp_path):
    mine, path = saved
    made = portable.reshard(path, tmp_path / "out", 3)
    assert sorted(one.name for one in made.iterdir()) == ["manifest.json", *(f"rank{r}.safetensors" for r in range(3))]
    first, second = Checkpoint(path), Checkpoint(made)
    assert first.tensor_specs == second.tensor_specs and first.numbers == second.numbers
    assert all(torch.equal(first.read_tensor(name), second.read_tensor(name)) for name in first.tensor_specs)
    again = job()
    again.load(made)
    batches = [batch(seed=seed) for seed in range(3, 6)]
    assert [one.loss for one in again.run(batches)] == [one.loss for one in mine.run(batches)]
    with pytest.raises(UserError, match="--files 0"):
        portable.reshard(path, tmp_path / "none", 0)


class Plain(nn.Module):
    """The same tables and dense part without Shardwright: what a serving team may have."""

    def __init__(self, dense: nn.Module) -> None:
        super().__init__()
        self.sparse = nn.Module()
        self.sparse.embedding_bags = nn.ModuleDict(
            {t.name: nn.EmbeddingBag(t.rows, t.dim, mode="sum") for t in tables()}
        )
        self.dense = dense


def test_plain_torch_loads_an_export(saved, tmp_path):
    mine, path = saved
    out = tmp_path / "model.safetensors"
    assert portable.export_state_dict(path, out)[0] == len(mine.model.state_dict())
    plain = Plain(dlrm().dense)
    plain.load_state_dict(load_file(out), strict=True)
    for name, value in mine.model.state_dict().items():
        assert torch.equal(plain.state_dict()[name], value)


def test_torchrec_loads_an_export(saved, tmp_path):
    torchrec = pytest.importorskip("torchrec", reason="needs torchrec")
    mine, path = saved
    portable.export_state_dict(path, tmp_path / "tables.safetensors", "sparse.")
    read = {table.name: [f.name for f in FEATURES if f.table == table.name] for table in tables()}
    collection = torchrec.EmbeddingBagCollection(
        tables=[
            torchrec.EmbeddingBagConfig(
                name=t.name, embedding_dim=t.dim, num_embeddings=t.rows, feature_names=read[t.name]
            )
            for t in tables()
        ]
    )
    collection.load_state_dict(load_file(tmp_path / "tables.safetensors"), strict=True)
    for name, value in collection.state_dict().items():
        assert torch.equal(value, mine.model.sparse.state_dict()[name])


def test_the_commands(saved, tmp_path):
    def told(*words) -> str:
        found = CliRunner().invoke(app, ["checkpoint", *map(str, words)], catch_exceptions=False)
        assert found.exit_code == 0, found.output
        return found.output

    mine, path = saved
    shown = told("inspect", tmp_path)
    assert "step 3" in shown and "written by 1 rank" in shown and "model.sparse.embedding_bags.site.weight" in shown
    assert "intact" in told("verify", path)
    told("reshard", path, tmp_path / "out", "--files", "2")
    assert "row shards: 2" in told("inspect", tmp_path / "out")
    assert "2 tensors" in told("export", tmp_path / "out", tmp_path / "tables.safetensors", "--prefix", "sparse.")
    for words, said in (
        (("export", path, tmp_path / "x.bin"), "name a .safetensors file"),
        (
            ("export", path, tmp_path / "x.safetensors", "--prefix", "spars."),
            'begins with "spars."; allowed: dense., sparse.',
        ),
        (("inspect", tmp_path / "nothing"), "no checkpoint; name one like"),
    ):
        with pytest.raises(UserError, match=said):
            told(*words)
    data = bytearray((path / "rank0.safetensors").read_bytes())
    entry = step_directories.read_manifest(path).tensors["model.sparse.embedding_bags.site.weight"]
    data[entry.pieces[0].values.offset + 9] ^= 4
    (path / "rank0.safetensors").write_bytes(data)
    with pytest.raises(UserError, match="rank0.safetensors: its digest differs"):
        told("verify", path)
    with pytest.raises(UserError, match="rank0.safetensors: its digest differs"):
        told("export", path, tmp_path / "model.safetensors")
    assert not list(tmp_path.glob("*model.safetensors*")), "no half of a file is left"
    with pytest.raises(UserError, match=r"cannot be written \(No such file or directory\)"):
        told("export", tmp_path / "out", tmp_path / "none/model.safetensors")
    assert step_directories.resolve_checkpoint(tmp_path) == path and mine.step == 3


def test_an_increment_after_a_load_has_all_that_was_loaded(saved, tmp_path):
    mine, path = saved
    saver = Saver(RankGroup(mine.mesh), tmp_path / "mine", increments=5, changes=mine.changes)
    list(mine.run([batch(seed=9)]))
    mine.save_with(saver, {})
    mine.load(path)
    list(mine.run([batch(seed=10), batch(seed=11)]))
    mine.save_with(saver, {})
    saver.wait()
    found, wanted = Checkpoint(step_directories.checkpoint_path(tmp_path / "mine", 5)), mine.state().tensors
    assert found.manifest.base == "", "what came before is another course"
    assert all(torch.equal(found.read_tensor(name), value) for name, value in wanted.items())

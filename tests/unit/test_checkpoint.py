import json
import os

import pytest
import torch

from shardwright.checkpoint import io
from shardwright.errors import UserError

TENSORS = {
    "a": torch.arange(6.0).view(2, 3),
    "half": torch.ones(2, dtype=torch.bfloat16),
    "step": torch.tensor(3),
}


def test_round_trip(tmp_path):
    path = io.write(tmp_path, 7, TENSORS, {"betas": (0.9, 0.5), "none": None})
    tensors, manifest = io.read(path)
    assert path.name == "step-00000007" and manifest.step == 7
    assert manifest.numbers == {"betas": [0.9, 0.5], "none": None}
    assert {name: (t.dtype, t.tolist()) for name, t in tensors.items()} == {
        name: (t.dtype, t.tolist()) for name, t in TENSORS.items()
    }


def test_ties_and_views_are_written_whole(tmp_path):
    shared = torch.arange(10.0)
    tensors, _ = io.read(io.write(tmp_path, 1, {"all": shared, "tied": shared, "part": shared[2:4]}, {}))
    assert tensors["tied"].tolist() == shared.tolist() and tensors["part"].tolist() == [2.0, 3.0]


def test_only_the_last_are_kept(tmp_path):
    for step in range(5):
        io.write(tmp_path, step, TENSORS, {}, keep=2)
    assert [path.name for path in io.steps(tmp_path)] == ["step-00000003", "step-00000004"]
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("file", ["manifest.json", "rank0.safetensors"])
def test_a_truncated_file_is_refused_by_name(tmp_path, file):
    path = io.write(tmp_path, 1, TENSORS, {})
    data = (path / file).read_bytes()
    (path / file).write_bytes(data[:-7])
    with pytest.raises(UserError, match=file):
        io.read(path)


def test_a_flipped_bit_is_refused_by_name(tmp_path):
    path = io.write(tmp_path, 1, TENSORS, {})
    data = bytearray((path / "rank0.safetensors").read_bytes())
    data[-1] ^= 1
    (path / "rank0.safetensors").write_bytes(data)
    with pytest.raises(UserError, match="rank0.safetensors: its digest differs"):
        io.read(path)


def test_a_missing_file_and_another_version_are_named(tmp_path):
    path = io.write(tmp_path, 1, TENSORS, {})
    (path / "rank0.safetensors").unlink()
    with pytest.raises(UserError, match="rank0.safetensors: missing"):
        io.read(path)
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps(manifest | {"version": 2}))
    with pytest.raises(UserError, match="version"):
        io.read(path)


def test_what_was_not_committed_is_not_a_checkpoint(tmp_path, monkeypatch):
    io.write(tmp_path, 1, TENSORS, {})

    def full_disk(path):
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(io, "_force_to_disk", full_disk)
    with pytest.raises(UserError, match="cannot be written .*No space left"):
        io.write(tmp_path, 2, TENSORS, {})
    monkeypatch.undo()
    assert [path.name for path in io.steps(tmp_path)] == ["step-00000001"]
    io.read(io.steps(tmp_path)[0])
    io.write(tmp_path, 2, TENSORS, {})
    assert sorted(os.listdir(tmp_path)) == ["step-00000001", "step-00000002"]

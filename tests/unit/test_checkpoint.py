"""Checkpoints on disk: any rectangles back out of what any rectangles were written, or an error with a name."""

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from shardwright.checkpoint import arrays, step_directories
from shardwright.checkpoint.reading import Checkpoint
from shardwright.checkpoint.writing import CheckpointWriter
from shardwright.errors import UserError
from shardwright.rectangle import Rectangle, full_rectangle

TENSORS = {
    "a": torch.arange(6.0).view(2, 3),
    "half": torch.ones(2, dtype=torch.bfloat16),
    "step": torch.tensor(3),
    "none": torch.empty(0, 4),
    "turned": torch.arange(6.0).view(2, 3).T,
}


def write(root: Path, step: int, tensors=None, numbers=None, **given) -> Path:
    writer = CheckpointWriter(root, **given)
    told = writer.prepare(step)
    if not told:
        writer.begin(
            step, [full_rectangle(name, tensor) for name, tensor in (tensors or TENSORS).items()], numbers or {}
        )
        told = writer.wait()
    if told:
        raise UserError(told)
    return step_directories.checkpoint_path(root, step)


def read(path: Path) -> dict[str, torch.Tensor]:
    found = Checkpoint(path)
    tensors = {name: found.read_tensor(name) for name in found.tensor_specs}
    found.close()
    return tensors


def test_round_trip(tmp_path):
    path = write(tmp_path, 7, numbers={"betas": (0.9, 0.5), "none": None})
    manifest = step_directories.read_manifest(path)
    assert path.name == "step-00000007" and (manifest.step, manifest.ranks) == (7, 1)
    assert manifest.numbers == {"betas": [0.9, 0.5], "none": None, "ranks": []}
    assert {name: (t.dtype, t.tolist()) for name, t in read(path).items()} == {
        name: (t.dtype, t.tolist()) for name, t in TENSORS.items()
    }


def test_other_libraries_open_its_files(tmp_path):
    path = write(tmp_path, 7)
    found = load_file(path / "rank0.safetensors")
    assert found["a#0"].tolist() == TENSORS["a"].tolist() and found["half#1"].dtype == torch.bfloat16


def test_ties_and_views_are_written_whole(tmp_path):
    shared = torch.arange(10.0)
    tensors = read(write(tmp_path, 1, {"all": shared, "tied": shared, "part": shared[2:4]}))
    assert tensors["tied"].tolist() == shared.tolist() and tensors["part"].tolist() == [2.0, 3.0]


def test_only_the_last_are_kept(tmp_path):
    for step in range(5):
        write(tmp_path, step, keep=2)
    assert [path.name for path in step_directories.list_checkpoints(tmp_path)] == ["step-00000003", "step-00000004"]
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("file", ["manifest.json", "rank0.safetensors"])
def test_a_truncated_file_is_refused_by_name(tmp_path, file):
    path = write(tmp_path, 1)
    data = (path / file).read_bytes()
    (path / file).write_bytes(data[:-7])
    with pytest.raises(UserError, match=file):
        read(path)


def test_any_flipped_bit_is_refused_by_name(tmp_path):
    path = write(tmp_path, 1)
    for file in ("rank0.safetensors", "manifest.json"):
        data = (path / file).read_bytes()
        first = 8 + int.from_bytes(data[:8], "little") if file != "manifest.json" else 0
        for at in range(first, len(data)):
            spoiled = bytearray(data)
            spoiled[at] ^= 1 << at % 8
            (path / file).write_bytes(spoiled)
            if file == "manifest.json" and _same_json(bytes(spoiled), data):
                continue
            with pytest.raises(UserError, match=str(path)):
                read(path)
        (path / file).write_bytes(data)
    read(path)


def _same_json(one: bytes, other: bytes) -> bool:
    """Spaces between words say nothing."""
    try:
        return json.loads(one) == json.loads(other)
    except ValueError:
        return False


def test_a_missing_file_and_another_version_are_named(tmp_path):
    path = write(tmp_path, 1)
    (path / "rank0.safetensors").unlink()
    with pytest.raises(UserError, match="rank0.safetensors: missing"):
        read(path)
    text = (path / "manifest.json").read_text()
    (path / "manifest.json").write_text(text.replace('"version": 2', '"version": 9'))
    with pytest.raises(UserError, match="version 9; this Shardwright reads version 2"):
        read(path)
    with pytest.raises(UserError, match="manifest.json: missing; a checkpoint is a directory like"):
        read(tmp_path)


def test_what_was_not_committed_is_not_a_checkpoint(tmp_path, monkeypatch):
    write(tmp_path, 1)

    def full_disk(path, given):
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(arrays, "write", full_disk)
    with pytest.raises(
        UserError, match=r"cannot be written \(No space left on device\); earlier checkpoints are intact"
    ):
        write(tmp_path, 2)
    monkeypatch.undo()
    assert [path.name for path in step_directories.list_checkpoints(tmp_path)] == ["step-00000001"]
    read(step_directories.list_checkpoints(tmp_path)[0])
    write(tmp_path, 2)
    assert sorted(os.listdir(tmp_path)) == ["step-00000001", "step-00000002"]


def test_a_rank_that_cannot_write_is_told_by_the_first(tmp_path, monkeypatch):
    real = arrays.write

    def broken(path, given):
        if path.name == "rank1.safetensors":
            raise OSError(5, "Input/output error", str(path))
        return real(path, given)

    monkeypatch.setattr(arrays, "write", broken)
    first, second = (CheckpointWriter(tmp_path, rank=rank, num_ranks=2) for rank in range(2))
    assert first.prepare(1) == ""
    first.begin(1, [full_rectangle("a", TENSORS["a"])], {})
    second.begin(1, [full_rectangle("b", TENSORS["a"])], {})
    assert "Input/output error" in second.wait()
    assert "rank 1 has not written its part" in first.wait()
    assert step_directories.list_checkpoints(tmp_path) == []


def test_what_no_rank_has_written_is_told_before_the_commit(tmp_path):
    writer = CheckpointWriter(tmp_path)
    writer.prepare(1)
    writer.begin(1, [Rectangle("t", (4, 2), torch.zeros(3, 2), (0, 3))], {})
    assert 'of the 8 values of "t" the ranks wrote 6' in writer.wait()


def test_a_step_waits_for_copies_only(tmp_path, monkeypatch):
    """What is trained on meanwhile is not in the checkpoint."""
    real = arrays.write

    def slow(path, given):
        time.sleep(0.3)
        return real(path, given)

    monkeypatch.setattr(arrays, "write", slow)
    writer, tensor = CheckpointWriter(tmp_path), torch.zeros(1000, 8)
    writer.prepare(1)
    pause = writer.begin(1, [full_rectangle("t", tensor)], {})
    tensor += 1
    assert pause < 0.2 and writer.wait() == ""
    path = step_directories.checkpoint_path(tmp_path, 1)
    assert read(path)["t"].sum() == 0
    manifest = step_directories.read_manifest(path)
    assert manifest.seconds >= 0.3 and manifest.pause_seconds == pytest.approx(pause)


@st.composite
def cuts(draw, rows: int, width: int) -> list[Rectangle]:
    """A tensor of distinct numbers as rectangles: bands of rows, in an order of their own or not, cut by columns."""
    values = torch.arange(rows * width, dtype=torch.float64).view(rows, width)
    order = None
    if draw(st.booleans()):
        order = torch.randperm(rows, generator=torch.Generator().manual_seed(draw(st.integers(0, 99))))
    found = []
    edges = sorted({0, rows, *draw(st.lists(st.integers(0, rows), max_size=3))})
    for lo, hi in zip(edges, edges[1:], strict=False):
        ends = sorted({0, width, *draw(st.lists(st.integers(0, width), max_size=4))})
        runs = list(zip(ends, ends[1:], strict=False))
        holders = [tuple(runs[at::2]) for at in range(2) if runs[at::2]]
        here = torch.arange(lo, hi) if order is None else order[lo:hi]
        for cols in holders:
            mine = torch.cat([values[here, a:b] for a, b in cols], 1).contiguous()
            found.append(Rectangle("t", (rows, width), mine, (lo, hi) if order is None else here, cols))
    return found


@settings(max_examples=60)
@given(data=st.data(), rows=st.integers(1, 40), width=st.integers(1, 9), block=st.sampled_from([1, 64, 1 << 24]))
def test_any_cut_is_read_back_as_any_other(tmp_path_factory, data, rows, width, block):
    root = tmp_path_factory.mktemp("cuts")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arrays, "BLOCK_BYTES", block)
        written = data.draw(cuts(rows, width))
        writers = [CheckpointWriter(root, rank=rank, num_ranks=3) for rank in range(3)]
        writers[0].prepare(1)
        for rank, writer in enumerate(writers):
            writer.begin(1, written[rank::3], {})
        assert [writer.wait() for writer in reversed(writers)] == [""] * 3
    wanted = data.draw(cuts(rows, width))
    dtype = data.draw(st.sampled_from([torch.float64, torch.float32]))
    blanks = [replace(one, values=torch.full_like(one.values, -1, dtype=dtype)) for one in wanted]
    found = Checkpoint(step_directories.checkpoint_path(root, 1))
    found.fill(blanks)
    for blank, one in zip(blanks, wanted, strict=True):
        assert torch.equal(blank.values.double(), one.values)
    assert found.verify() >= rows * width * 8
    found.close()


def test_increments_have_the_rows_that_changed(tmp_path):
    generator = torch.Generator().manual_seed(1)
    weight, dense = torch.randn(50, 4, generator=generator), torch.zeros(3)
    order = torch.randperm(50, generator=generator)
    changed = torch.zeros(50, dtype=torch.bool)
    writer, base, states = CheckpointWriter(tmp_path, keep=2), None, {}
    for step in range(6):
        rows = torch.randint(0, 50, (5,), generator=generator)
        weight[rows] += 1
        changed[rows] = True
        dense += 1
        parts = [Rectangle("t", (50, 4), weight[:20], order[:20], (), changed[:20])]
        parts += [Rectangle("t", (50, 4), weight[20:], order[20:], (), changed[20:]), full_rectangle("dense", dense)]
        writer.prepare(step)
        writer.begin(step, parts, {}, base if step % 3 else None)
        assert writer.wait() == ""
        base = step_directories.checkpoint_path(tmp_path, step)
        changed.zero_()
        stored = torch.empty(50, 4)
        stored[order] = weight
        states[base.name] = stored
    kept = step_directories.list_checkpoints(tmp_path)
    assert [path.name[-1] for path in kept] == ["3", "4", "5"], "the last two, and what they go on from"
    for path in kept:
        assert torch.equal(read(path)["t"], states[path.name])
    sizes = [step_directories.read_manifest(path).tensors["t"].pieces[0].values.shape[0] for path in kept]
    assert sizes[0] == 20 and max(sizes[1:]) <= 5
    assert len(list(_numbered(kept[1]))) <= 2, "numbers of rows are written once"
    (kept[0] / "manifest.json").unlink()
    with pytest.raises(
        UserError, match=r"step-00000005 is an increment of .*step-00000003, which is missing|step-00000004"
    ):
        read(kept[2])


def _numbered(path: Path) -> set[int]:
    return {
        piece.numbers.offset
        for entry in step_directories.read_manifest(path).tensors.values()
        for piece in entry.pieces
        if piece.numbers is not None
    }


@pytest.mark.parametrize("dtype, bound", (("float16", 2**-11), ("int8", 1 / 254)))
def test_increments_may_be_rounded_and_say_by_how_much(tmp_path, dtype, bound):
    generator = torch.Generator().manual_seed(1)
    weight, state = torch.randn(50, 8, generator=generator), torch.rand(50, generator=generator)
    weight[7] = 0
    changed = torch.arange(50) % 3 == 1
    writer = CheckpointWriter(tmp_path, increment_dtype=dtype)
    for step, base in ((1, None), (2, step_directories.checkpoint_path(tmp_path, 1))):
        parts = [Rectangle("model.t", (50, 8), weight, (0, 50), (), changed)]
        parts += [Rectangle("tables.t.sum", (50,), state, (0, 50), (), changed)]
        writer.prepare(step)
        writer.begin(step, parts, {}, base)
        assert writer.wait() == ""
    whole_, found = (read(step_directories.checkpoint_path(tmp_path, step)) for step in (1, 2))
    assert torch.equal(whole_["model.t"], weight) and torch.equal(found["tables.t.sum"], state)
    error = float((found["model.t"] - weight).abs().max())
    told = step_directories.read_manifest(step_directories.checkpoint_path(tmp_path, 2)).tensors["model.t"].error
    assert told == pytest.approx(error) and 0 < error <= bound * weight.abs().max()
    assert torch.equal(found["model.t"][~changed], weight[~changed]) and not found["model.t"][7].any()


def test_memory_for_copies_stays_where_it_is(tmp_path):
    """Also when a dense optimizer's state has come between what there was."""
    writer, tensor = CheckpointWriter(tmp_path), torch.zeros(100, 8)
    writer.allocate_staging([full_rectangle("model.t", tensor)])
    places = set()
    for step in range(3):
        writer.prepare(step)
        writer.begin(step, [full_rectangle("a", torch.zeros(step + 1)), full_rectangle("model.t", tensor)], {})
        assert writer.wait() == ""
        places.add(writer._staging["model.t", 0].data_ptr())
    assert len(places) == 1


@pytest.mark.parametrize("bound", (1e-2, 1e-3, 1e-4))
def test_rounded_rows_of_small_halves_keep_their_signs(tmp_path, bound):
    weight = (torch.rand(200, 64, generator=torch.Generator().manual_seed(2)) * 2 - 1).mul(bound).half()
    writer, changed = CheckpointWriter(tmp_path, increment_dtype="int8"), torch.ones(200, dtype=torch.bool)
    for step, base in ((1, None), (2, step_directories.checkpoint_path(tmp_path, 1))):
        writer.prepare(step)
        writer.begin(step, [Rectangle("model.t", (200, 64), weight, (0, 200), (), changed)], {}, base)
        assert writer.wait() == ""
    found = read(step_directories.checkpoint_path(tmp_path, 2))["model.t"]
    assert (found.float() - weight.float()).abs().max() <= bound / 127


def test_what_was_about_to_be_replaced_gets_its_name_back(tmp_path):
    path = write(tmp_path, 1)
    path.rename(tmp_path / f"{step_directories.REPLACED_PREFIX}{path.name}")
    assert step_directories.list_checkpoints(tmp_path) == []
    step_directories.recover_root(tmp_path)
    assert step_directories.list_checkpoints(tmp_path) == [path] and read(path)


def test_a_tensor_that_an_increment_is_the_first_to_have(tmp_path):
    writer = CheckpointWriter(tmp_path)
    for step, names in ((1, ("a",)), (2, ("a", "b"))):
        writer.prepare(step)
        writer.begin(
            step,
            [full_rectangle(name, TENSORS["a"]) for name in names],
            {},
            step_directories.checkpoint_path(tmp_path, 1) if step > 1 else None,
        )
        assert writer.wait() == ""
    assert read(step_directories.checkpoint_path(tmp_path, 2))["b"].tolist() == TENSORS["a"].tolist()


def test_a_polite_process_may_write(tmp_path):
    """No rank may raise its own priority."""
    code = "import os, sys; os.nice(19); sys.path[:0] = sys.argv[1:2]; import test_checkpoint as t; "
    code += "t.write(t.Path(sys.argv[2]), 3)"
    here = Path(__file__).parent
    words = [sys.executable, "-c", code, str(here), str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and step_directories.list_checkpoints(tmp_path), done.stderr

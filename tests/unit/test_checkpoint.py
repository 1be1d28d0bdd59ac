"""Checkpoints on disk: written in any rectangles, read back in any others; damage is an error that names the file."""

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
    "transposed": torch.arange(6.0).view(2, 3).T,
}


def write(root: Path, step: int, tensors=None, numbers=None, **options) -> Path:
    writer = CheckpointWriter(root, **options)
    error = writer.prepare(step)
    if not error:
        writer.begin(
            step, [full_rectangle(name, tensor) for name, tensor in (tensors or TENSORS).items()], numbers or {}
        )
        error = writer.wait()
    if error:
        raise UserError(error)
    return step_directories.checkpoint_path(root, step)


def read(path: Path) -> dict[str, torch.Tensor]:
    checkpoint = Checkpoint(path)
    tensors = {name: checkpoint.read_tensor(name) for name in checkpoint.tensor_specs}
    checkpoint.close()
    return tensors


def test_round_trip(tmp_path):
    path = write(tmp_path, 7, numbers={"betas": (0.9, 0.5), "none": None})
    manifest = step_directories.read_manifest(path)
    assert path.name == "step-00000007" and (manifest.step, manifest.ranks) == (7, 1)
    assert manifest.numbers == {"betas": [0.9, 0.5], "none": None, "ranks": []}
    assert {name: (t.dtype, t.tolist()) for name, t in read(path).items()} == {
        name: (t.dtype, t.tolist()) for name, t in TENSORS.items()
    }


def test_the_safetensors_library_reads_its_files(tmp_path):
    path = write(tmp_path, 7)
    tensors = load_file(path / "rank0.safetensors")
    assert tensors["a#0"].tolist() == TENSORS["a"].tolist() and tensors["half#1"].dtype == torch.bfloat16


def test_tied_tensors_and_views_are_written_as_full_tensors(tmp_path):
    storage = torch.arange(10.0)
    tensors = read(write(tmp_path, 1, {"all": storage, "tied": storage, "part": storage[2:4]}))
    assert tensors["tied"].tolist() == storage.tolist() and tensors["part"].tolist() == [2.0, 3.0]


def test_only_the_last_checkpoints_are_kept(tmp_path):
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
        start = 8 + int.from_bytes(data[:8], "little") if file != "manifest.json" else 0
        for position in range(start, len(data)):
            damaged = bytearray(data)
            damaged[position] ^= 1 << position % 8
            (path / file).write_bytes(damaged)
            if file == "manifest.json" and _same_json(bytes(damaged), data):
                continue
            with pytest.raises(UserError, match=str(path)):
                read(path)
        (path / file).write_bytes(data)
    read(path)


def _same_json(first: bytes, second: bytes) -> bool:
    """Whether both are the same JSON; a flipped bit may have changed only whitespace."""
    try:
        return json.loads(first) == json.loads(second)
    except ValueError:
        return False


def test_a_missing_file_and_an_unknown_version_are_refused_by_name(tmp_path):
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


def test_a_checkpoint_that_was_not_committed_is_not_listed(tmp_path, monkeypatch):
    write(tmp_path, 1)

    def full_disk(path, tensors, stored_rows):
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


def test_the_first_rank_reports_a_rank_that_could_not_write(tmp_path, monkeypatch):
    original_write = arrays.write

    def broken(path, tensors, stored_rows):
        if path.name == "rank1.safetensors":
            raise OSError(5, "Input/output error", str(path))
        return original_write(path, tensors, stored_rows)

    monkeypatch.setattr(arrays, "write", broken)
    first, second = (CheckpointWriter(tmp_path, rank=rank, num_ranks=2) for rank in range(2))
    assert first.prepare(1) == ""
    first.begin(1, [full_rectangle("a", TENSORS["a"])], {})
    second.begin(1, [full_rectangle("b", TENSORS["a"])], {})
    assert "Input/output error" in second.wait()
    assert "rank 1 has not written its part" in first.wait()
    assert step_directories.list_checkpoints(tmp_path) == []


def test_values_that_no_rank_wrote_prevent_the_commit(tmp_path):
    writer = CheckpointWriter(tmp_path)
    writer.prepare(1)
    writer.begin(1, [Rectangle("t", (4, 2), torch.zeros(3, 2), (0, 3))], {})
    assert 'of the 8 values of "t" the ranks wrote 6' in writer.wait()


def test_training_pauses_only_for_copies_to_memory(tmp_path, monkeypatch):
    """Updates made while the file is written are not in the checkpoint."""
    original_write = arrays.write

    def slow(path, tensors, stored_rows):
        time.sleep(0.3)
        return original_write(path, tensors, stored_rows)

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
    """A tensor of distinct numbers as rectangles: row ranges, optionally in a permuted order, split by columns."""
    values = torch.arange(rows * width, dtype=torch.float64).view(rows, width)
    order = None
    if draw(st.booleans()):
        order = torch.randperm(rows, generator=torch.Generator().manual_seed(draw(st.integers(0, 99))))
    rectangles = []
    edges = sorted({0, rows, *draw(st.lists(st.integers(0, rows), max_size=3))})
    for lo, hi in zip(edges, edges[1:], strict=False):
        ends = sorted({0, width, *draw(st.lists(st.integers(0, width), max_size=4))})
        ranges = list(zip(ends, ends[1:], strict=False))
        holders = [tuple(ranges[i::2]) for i in range(2) if ranges[i::2]]
        row_ids = torch.arange(lo, hi) if order is None else order[lo:hi]
        for cols in holders:
            shard = torch.cat([values[row_ids, a:b] for a, b in cols], 1).contiguous()
            rectangles.append(Rectangle("t", (rows, width), shard, (lo, hi) if order is None else row_ids, cols))
    return rectangles


@settings(max_examples=60)
@given(data=st.data(), rows=st.integers(1, 40), width=st.integers(1, 9), block=st.sampled_from([1, 64, 1 << 24]))
def test_rectangles_are_read_back_as_any_other_rectangles(tmp_path_factory, data, rows, width, block):
    root = tmp_path_factory.mktemp("cuts")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arrays, "BLOCK_BYTES", block)
        rectangles = data.draw(cuts(rows, width))
        writers = [CheckpointWriter(root, rank=rank, num_ranks=3) for rank in range(3)]
        writers[0].prepare(1)
        for rank, writer in enumerate(writers):
            writer.begin(1, rectangles[rank::3], {})
        assert [writer.wait() for writer in reversed(writers)] == [""] * 3
    targets = data.draw(cuts(rows, width))
    dtype = data.draw(st.sampled_from([torch.float64, torch.float32]))
    buffers = [replace(target, values=torch.full_like(target.values, -1, dtype=dtype)) for target in targets]
    checkpoint = Checkpoint(step_directories.checkpoint_path(root, 1))
    checkpoint.fill(buffers)
    on_disk = [
        replace(each, values=each.values.to("meta"), stored=Stored(torch.full_like(each.values_RC, -1)))
        for each in buffers
    ]
    checkpoint.fill(on_disk)
    for buffer, disk, target in zip(buffers, on_disk, targets, strict=True):
        assert torch.equal(buffer.values.double(), target.values)
        assert torch.equal(disk.stored.values.double(), target.values_RC)
    assert checkpoint.verify() >= rows * width * 8
    checkpoint.close()


class Stored:
    """As rows on disk: values that are written by rows and columns."""

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values

    def write(self, indices: torch.Tensor, columns: tuple[int, int], values_RC: torch.Tensor) -> None:
        self.values[indices, slice(*columns)] = values_RC


def test_rows_on_disk_are_restored_with_one_read_of_each_block(tmp_path, monkeypatch):
    rows = 1000
    values, reads = torch.arange(4.0 * rows).view(rows, 4), []
    monkeypatch.setattr(arrays, "BLOCK_BYTES", 1024)
    writer = CheckpointWriter(tmp_path)
    writer.prepare(1)
    writer.begin(1, [Rectangle("t", (rows, 4), values[part], part) for part in torch.randperm(rows).split(500)], {})
    assert writer.wait() == ""
    read_block = arrays.ArrayReader.read_block

    def note(reader, stored, start, out=None):
        reads.append((stored.offset, start))
        return read_block(reader, stored, start, out)

    monkeypatch.setattr(arrays.ArrayReader, "read_block", note)
    order, stored = torch.randperm(rows), Stored(torch.empty(rows, 4))
    checkpoint = Checkpoint(step_directories.checkpoint_path(tmp_path, 1))
    checkpoint.fill([Rectangle("t", (rows, 4), torch.empty(rows, 4, device="meta"), order, stored=stored)])
    checkpoint.close()
    assert torch.equal(stored.values, values[order]) and len(reads) == len(set(reads))


def test_increments_have_the_rows_that_changed(tmp_path):
    generator = torch.Generator().manual_seed(1)
    weight, bias = torch.randn(50, 4, generator=generator), torch.zeros(3)
    order = torch.randperm(50, generator=generator)
    mask = torch.zeros(50, dtype=torch.bool)
    writer, base, states = CheckpointWriter(tmp_path, keep=2), None, {}
    for step in range(6):
        rows = torch.randint(0, 50, (5,), generator=generator)
        weight[rows] += 1
        mask[rows] = True
        bias += 1
        parts = [Rectangle("t", (50, 4), weight[:20], order[:20], (), mask[:20])]
        parts += [Rectangle("t", (50, 4), weight[20:], order[20:], (), mask[20:]), full_rectangle("dense", bias)]
        writer.prepare(step)
        writer.begin(step, parts, {}, base if step % 3 else None)
        assert writer.wait() == ""
        base = step_directories.checkpoint_path(tmp_path, step)
        mask.zero_()
        stored = torch.empty(50, 4)
        stored[order] = weight
        states[base.name] = stored
    paths = step_directories.list_checkpoints(tmp_path)
    assert [path.name[-1] for path in paths] == ["3", "4", "5"], (
        "the last two, and the checkpoint they are increments of"
    )
    for path in paths:
        assert torch.equal(read(path)["t"], states[path.name])
    sizes = [step_directories.read_manifest(path).tensors["t"].pieces[0].values.shape[0] for path in paths]
    assert sizes[0] == 20 and max(sizes[1:]) <= 5
    assert len(list(_number_offsets(paths[1]))) <= 2, "row ids are written once"
    (paths[0] / "manifest.json").unlink()
    with pytest.raises(
        UserError, match=r"step-00000005 is an increment of .*step-00000003, which is missing|step-00000004"
    ):
        read(paths[2])


def _number_offsets(path: Path) -> set[int]:
    return {
        piece.numbers.offset
        for entry in step_directories.read_manifest(path).tensors.values()
        for piece in entry.pieces
        if piece.numbers is not None
    }


@pytest.mark.parametrize("dtype, bound", (("float16", 2**-11), ("int8", 1 / 254)))
def test_rounded_increments_record_their_error(tmp_path, dtype, bound):
    generator = torch.Generator().manual_seed(1)
    weight, state = torch.randn(50, 8, generator=generator), torch.rand(50, generator=generator)
    weight[7] = 0
    mask = torch.arange(50) % 3 == 1
    writer = CheckpointWriter(tmp_path, increment_dtype=dtype)
    for step, base in ((1, None), (2, step_directories.checkpoint_path(tmp_path, 1))):
        parts = [Rectangle("model.t", (50, 8), weight, (0, 50), (), mask)]
        parts += [Rectangle("tables.t.sum", (50,), state, (0, 50), (), mask)]
        writer.prepare(step)
        writer.begin(step, parts, {}, base)
        assert writer.wait() == ""
    full, increment = (read(step_directories.checkpoint_path(tmp_path, step)) for step in (1, 2))
    assert torch.equal(full["model.t"], weight) and torch.equal(increment["tables.t.sum"], state)
    error = float((increment["model.t"] - weight).abs().max())
    recorded = step_directories.read_manifest(step_directories.checkpoint_path(tmp_path, 2)).tensors["model.t"].error
    assert recorded == pytest.approx(error) and 0 < error <= bound * weight.abs().max()
    assert torch.equal(increment["model.t"][~mask], weight[~mask]) and not increment["model.t"][7].any()


def test_staging_buffers_are_reused_by_later_checkpoints(tmp_path):
    """Also when a dense optimizer's state is new and comes before them."""
    writer, tensor = CheckpointWriter(tmp_path), torch.zeros(100, 8)
    writer.allocate_staging([full_rectangle("model.t", tensor)])
    addresses = set()
    for step in range(3):
        writer.prepare(step)
        writer.begin(step, [full_rectangle("a", torch.zeros(step + 1)), full_rectangle("model.t", tensor)], {})
        assert writer.wait() == ""
        addresses.add(writer._staging["model.t", 0].data_ptr())
    assert len(addresses) == 1


@pytest.mark.parametrize("bound", (1e-2, 1e-3, 1e-4))
def test_rounded_rows_of_small_halves_keep_their_signs(tmp_path, bound):
    weight = (torch.rand(200, 64, generator=torch.Generator().manual_seed(2)) * 2 - 1).mul(bound).half()
    writer, mask = CheckpointWriter(tmp_path, increment_dtype="int8"), torch.ones(200, dtype=torch.bool)
    for step, base in ((1, None), (2, step_directories.checkpoint_path(tmp_path, 1))):
        writer.prepare(step)
        writer.begin(step, [Rectangle("model.t", (200, 64), weight, (0, 200), (), mask)], {}, base)
        assert writer.wait() == ""
    tensor = read(step_directories.checkpoint_path(tmp_path, 2))["model.t"]
    assert (tensor.float() - weight.float()).abs().max() <= bound / 127


def test_recovery_renames_a_checkpoint_whose_replacement_was_interrupted(tmp_path):
    path = write(tmp_path, 1)
    path.rename(tmp_path / f"{step_directories.REPLACED_PREFIX}{path.name}")
    assert step_directories.list_checkpoints(tmp_path) == []
    step_directories.recover_root(tmp_path)
    assert step_directories.list_checkpoints(tmp_path) == [path] and read(path)


def test_an_increment_may_have_a_tensor_that_its_base_lacks(tmp_path):
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


def test_a_process_of_low_priority_can_write(tmp_path):
    """Writing must not try to raise the priority of the process, which needs root."""
    code = "import os, sys; os.nice(19); sys.path[:0] = sys.argv[1:2]; import test_checkpoint as t; "
    code += "t.write(t.Path(sys.argv[2]), 3)"
    folder = Path(__file__).parent
    command = [sys.executable, "-c", code, str(folder), str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0 and step_directories.list_checkpoints(tmp_path), result.stderr

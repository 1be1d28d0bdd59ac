"""Online training on a growing directory: killed, resumed, and over ranks, with the metrics of an uninterrupted run."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from test_kill import curve, last_step, stderr_of, verify_checkpoints

FILES, ROWS, STEPS = 8, 320, 38
RECIPE = """
[data]
kind = "stream"
path = "in"
schema = "schema.toml"
shuffle = false

[data.encoding]
rows = 50

[model]
kind = "logistic"

[tables]
kind = "adagrad"
lr = 0.1

[train]
batch_size = 64
log_every = 2
checkpoint_every = 6
eval_every = 0
eval_samples = 0
progressive = true
"""


def add_files(folder: Path, *numbers: int) -> None:
    """Add files of the stream; a file's content depends only on its number."""
    for number in numbers:
        generator = random.Random(number)
        lines = ["click,site,age"]
        for _ in range(ROWS):
            site = generator.randrange(40)
            lines.append(f"{int(generator.random() < 0.1 + site / 60)},s{site},{generator.randrange(9)}")
        draft = folder / f"in/{number}.csv.tmp"
        draft.write_text("\n".join(lines) + "\n")
        draft.rename(folder / f"in/{number}.csv")


def make_stream(folder: Path) -> Path:
    (folder / "in").mkdir()
    (folder / "schema.toml").write_text('label = "click"\ncategories = ["site"]\nnumbers = ["age"]\n')
    (folder / "online.toml").write_text(RECIPE)
    return folder


def start(folder: Path, *args: str) -> subprocess.Popen:
    command = ["-m", "shardwright.cli", "train", "online.toml", f"train.steps={STEPS}", "run.name=one", *args]
    with open(folder / "stderr", "w") as errors:
        return subprocess.Popen([sys.executable, *command], cwd=folder, stdout=subprocess.DEVNULL, stderr=errors)


def wait_for_step(job: subprocess.Popen, folder: Path, step: int) -> None:
    while last_step(folder / "runs/one") < step:
        assert job.poll() is None, stderr_of(folder)
        time.sleep(0.01)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> list[dict]:
    folder = make_stream(tmp_path_factory.mktemp("uninterrupted"))
    add_files(folder, *range(FILES))
    job = start(folder)
    assert job.wait(60) == 0, stderr_of(folder)
    return curve(folder / "runs/one")


def test_a_killed_and_an_interrupted_run_resume(tmp_path, uninterrupted):
    """Killed while files arrive, interrupted while it waits for files; consumed files are deleted."""
    folder = make_stream(tmp_path)
    add_files(folder, 0, 1, 2)
    job = start(folder)
    wait_for_step(job, folder, 8)
    os.kill(job.pid, signal.SIGKILL)
    assert job.wait() == -signal.SIGKILL
    (folder / "in/0.csv").unlink()
    add_files(folder, 3)
    job = start(folder, "run.resume=true", "data.workers=2")
    wait_for_step(job, folder, 20)  # all samples of the files
    time.sleep(0.3)
    assert job.poll() is None and last_step(folder / "runs/one") == 20
    job.send_signal(signal.SIGINT)
    assert job.wait(10) != 0 and "Traceback" not in stderr_of(folder)
    verify_checkpoints(folder / "runs/one")
    for number in (1, 2):
        (folder / f"in/{number}.csv").unlink()
    add_files(folder, *range(4, FILES))
    job = start(folder, "run.resume=true", "data.workers=0")
    assert job.wait(60) == 0, stderr_of(folder)
    assert curve(folder / "runs/one") == uninterrupted
    assert [line["samples"] for line in uninterrupted if line["kind"] == "progressive"][-1] == 64 * STEPS


@pytest.mark.parametrize("progressive", [pytest.param("true", marks=pytest.mark.slow), "false"])
def test_two_ranks_equal_one_process(tmp_path, uninterrupted, progressive):
    """Without progressive scores stages run ahead, but not beyond the last step, which uses the last rows."""
    folder = make_stream(tmp_path)
    add_files(folder, 0, 1)
    job = start(folder, "ranks=2", f"train.progressive={progressive}", f"train.steps={FILES * ROWS // 64}")
    try:
        wait_for_step(job, folder, 4)
        add_files(folder, *range(2, FILES))
        assert job.wait(60) == 0, stderr_of(folder)
    finally:
        job.terminate()
        job.wait()
    kinds = ("train", "progressive") if progressive == "true" else ("train",)
    expected = {(line["kind"], line["step"]): line for line in uninterrupted if line["kind"] in kinds}
    lines = {(line["kind"], line["step"]): line for line in curve(folder / "runs/one")}
    for key, line in expected.items():
        for metric in ("loss", "ne", "samples"):
            if metric in line:
                assert lines[key][metric] == pytest.approx(line[metric], abs=1e-4)

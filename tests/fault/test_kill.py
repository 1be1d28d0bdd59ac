"""kill -9 at any batch: committed checkpoints stay valid; the resumed loss curve is exactly the uninterrupted one."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shardwright.checkpoint import step_directories
from shardwright.checkpoint.reading import Checkpoint

TIMING = ("seconds", "samples_per_second", "peak_rss_bytes")
STEPS = 60
RUN = (
    f"train.steps={STEPS}",
    "train.batch_size=256",
    "train.log_every=2",
    "train.eval_every=20",
    "train.eval_samples=1024",
    "train.checkpoint_every=10",
)


def start(folder: Path, name: str, *args: str) -> subprocess.Popen:
    command = [
        sys.executable,
        "-m",
        "shardwright.cli",
        "train",
        "synthetic-dlrm",
        *RUN,
        f"run.name={name}",
        *args,
    ]
    with open(folder / "stderr", "w") as errors:
        return subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=errors)


def stderr_of(folder: Path) -> str:
    return (folder / "stderr").read_text()


def metrics(run: Path) -> list[dict]:
    path = run / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines() if line] if path.exists() else []


def curve(run: Path) -> list[dict]:
    return [{key: value for key, value in line.items() if key not in TIMING} for line in metrics(run)]


def last_step(run: Path) -> int:
    try:
        return max((line["step"] for line in metrics(run)), default=0)
    except json.JSONDecodeError:
        return 0


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> list[dict]:
    folder = tmp_path_factory.mktemp("uninterrupted")
    job = start(folder, "whole")
    assert job.wait() == 0, stderr_of(folder)
    return curve(folder / "runs/whole")


def verify_checkpoints(run: Path) -> None:
    for checkpoint in step_directories.list_checkpoints(run / "checkpoint"):
        opened = Checkpoint(checkpoint)
        assert opened.verify() > 0
        opened.close()


def kill_and_resume(folder: Path, steps: list[int], workers: int) -> int:
    """Kill the run after each of these steps, then let it finish; returns how many kills hit a running process."""
    hits, args = 0, (f"data.workers={workers}",)
    run = folder / "runs/broken"
    for step in steps:
        job = start(folder, "broken", *args, *["run.resume=true"] * run.exists())
        while job.poll() is None and last_step(run) < step:
            time.sleep(0.002)
        if job.poll() is None:
            os.kill(job.pid, signal.SIGKILL)
            hits += job.wait() == -signal.SIGKILL
        verify_checkpoints(run)
    job = start(folder, "broken", *args, "run.resume=true")
    assert job.wait() == 0, stderr_of(folder)
    return hits


@pytest.mark.parametrize("workers", [0, 1])
def test_resumed_curve_equals_the_uninterrupted_one(tmp_path, uninterrupted, workers):
    steps = sorted(random.Random(workers).sample(range(0, STEPS - 8), 2))
    hits = kill_and_resume(tmp_path, steps, workers)
    assert hits == len(steps)
    assert curve(tmp_path / "runs/broken") == uninterrupted


@pytest.mark.slow
def test_curve_after_twenty_kills_equals_the_uninterrupted_one(tmp_path, uninterrupted):
    steps = sorted(random.Random(7).choices(range(0, STEPS - 8), k=20))
    assert kill_and_resume(tmp_path, steps, workers=1) == 20
    assert curve(tmp_path / "runs/broken") == uninterrupted


def test_a_run_killed_before_the_first_step_can_be_resumed(tmp_path, uninterrupted):
    job = start(tmp_path, "broken")
    while not (tmp_path / "runs/broken/config.toml").exists():
        time.sleep(0.001)
    os.kill(job.pid, signal.SIGKILL)
    assert job.wait() == -signal.SIGKILL
    job = start(tmp_path, "broken", "run.resume=true")
    assert job.wait() == 0, stderr_of(tmp_path)
    assert curve(tmp_path / "runs/broken") == uninterrupted


def test_a_second_job_on_the_same_run_is_refused(tmp_path):
    first = start(tmp_path, "one", "train.steps=100000")
    while last_step(tmp_path / "runs/one") < 2:
        assert first.poll() is None, stderr_of(tmp_path)
        time.sleep(0.01)
    second = start(tmp_path, "one", "run.resume=true")
    assert second.wait() == 2
    assert "another job is writing to this run" in stderr_of(tmp_path)
    assert first.poll() is None
    first.kill()
    first.wait()

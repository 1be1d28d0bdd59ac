"""kill -9 at any batch: what was committed stays; the resumed loss curve is the undisturbed one, bit for bit."""

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


def start(where: Path, name: str, *words: str) -> subprocess.Popen:
    command = [
        sys.executable,
        "-m",
        "shardwright.cli",
        "train",
        "synthetic-dlrm",
        *RUN,
        f"run.name={name}",
        *words,
    ]
    with open(where / "complaints", "w") as complaints:
        return subprocess.Popen(command, cwd=where, stdout=subprocess.DEVNULL, stderr=complaints)


def complaints(where: Path) -> str:
    return (where / "complaints").read_text()


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
def undisturbed(tmp_path_factory) -> list[dict]:
    where = tmp_path_factory.mktemp("undisturbed")
    job = start(where, "whole")
    assert job.wait() == 0, complaints(where)
    return curve(where / "runs/whole")


def verified(run: Path) -> None:
    for checkpoint in step_directories.list_checkpoints(run / "checkpoint"):
        found = Checkpoint(checkpoint)
        assert found.verify() > 0
        found.close()


def killed_and_resumed(where: Path, moments: list[int], workers: int) -> int:
    """Kill the run once it has passed each of these steps, then let it finish; returns how many kills hit."""
    hits, words = 0, (f"data.workers={workers}",)
    run = where / "runs/broken"
    for moment in moments:
        job = start(where, "broken", *words, *["run.resume=true"] * run.exists())
        while job.poll() is None and last_step(run) < moment:
            time.sleep(0.002)
        if job.poll() is None:
            os.kill(job.pid, signal.SIGKILL)
            hits += job.wait() == -signal.SIGKILL
        verified(run)
    job = start(where, "broken", *words, "run.resume=true")
    assert job.wait() == 0, complaints(where)
    return hits


@pytest.mark.parametrize("workers", [0, 1])
def test_resumed_curve_is_the_undisturbed_one(tmp_path, undisturbed, workers):
    moments = sorted(random.Random(workers).sample(range(0, STEPS - 8), 2))
    hits = killed_and_resumed(tmp_path, moments, workers)
    assert hits == len(moments)
    assert curve(tmp_path / "runs/broken") == undisturbed


@pytest.mark.slow
def test_twenty_kills(tmp_path, undisturbed):
    moments = sorted(random.Random(7).choices(range(0, STEPS - 8), k=20))
    assert killed_and_resumed(tmp_path, moments, workers=1) == 20
    assert curve(tmp_path / "runs/broken") == undisturbed


def test_killed_before_the_first_step(tmp_path, undisturbed):
    job = start(tmp_path, "broken")
    while not (tmp_path / "runs/broken/config.toml").exists():
        time.sleep(0.001)
    os.kill(job.pid, signal.SIGKILL)
    assert job.wait() == -signal.SIGKILL
    job = start(tmp_path, "broken", "run.resume=true")
    assert job.wait() == 0, complaints(tmp_path)
    assert curve(tmp_path / "runs/broken") == undisturbed


def test_two_jobs_on_one_run(tmp_path):
    first = start(tmp_path, "one", "train.steps=100000")
    while last_step(tmp_path / "runs/one") < 2:
        assert first.poll() is None, complaints(tmp_path)
        time.sleep(0.01)
    second = start(tmp_path, "one", "run.resume=true")
    assert second.wait() == 2
    assert "another job is writing to this run" in complaints(tmp_path)
    assert first.poll() is None
    first.kill()
    first.wait()

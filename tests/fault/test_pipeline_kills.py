"""kill -9 of ranks of a pipeline: restarted under the same plan, the loss curve is the uninterrupted one, bit by bit.

A run may continue under another plan: in one process, with data parallelism, or as another pipeline.
"""

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from test_kill import TIMING, metrics, verify_checkpoints
from test_ranks import NUM_KILLS, kill_rank

from shardwright.checkpoint.step_directories import list_checkpoints

WORLD, END = 2, 24
SPEEDS = (*TIMING, "tokens_per_second", "mfu", "mfu_full")
RUN = (
    f"train.steps={END}",
    "train.log_every=2",
    "train.eval_every=12",
    "train.eval_samples=16",
    "train.checkpoint_every=4",
    "train.warmup=2",
    "data.length=16",
    "model.channels=32",
    "model.hidden=64",
    "model.num_blocks=4",
)


def start(folder: Path, name: str, *args: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "shardwright.cli", "train", "gpt-pipeline", *RUN, f"run.name={name}", *args]
    with open(folder / "stderr", "w") as errors:
        return subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=errors)


def curve(run: Path) -> list[dict]:
    return [{key: value for key, value in line.items() if key not in SPEEDS} for line in metrics(run)]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> list[dict]:
    folder = tmp_path_factory.mktemp("uninterrupted")
    job = start(folder, "whole")
    assert job.wait() == 0, (folder / "stderr").read_text()
    lines = curve(folder / "runs/whole")
    assert lines[-1]["step"] == END and any("loss" in line for line in lines)
    return lines


def kill_and_restart(folder: Path, seed: int) -> None:
    generator = random.Random(seed)
    step, rank = generator.randrange(0, END - 6, 2), generator.randrange(WORLD)
    job = start(folder, "broken", "restarts=1")
    try:
        assert kill_rank(job, folder / "runs/broken", step, drafting=seed % 2 == 1, rank=rank)
        assert job.wait(120) == 0, (folder / "stderr").read_text()
    finally:
        job.kill()
    verify_checkpoints(folder / "runs/broken")


@pytest.mark.parametrize("seed", range(2))
def test_killed_ranks_of_a_pipeline_are_restarted(tmp_path, uninterrupted, seed):
    kill_and_restart(tmp_path, seed)
    assert curve(tmp_path / "runs/broken") == uninterrupted


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, NUM_KILLS))
def test_ranks_of_a_pipeline_killed_at_twenty_random_steps_are_restarted(tmp_path, uninterrupted, seed):
    kill_and_restart(tmp_path, seed)
    assert curve(tmp_path / "runs/broken") == uninterrupted


def test_a_run_goes_on_under_every_other_plan(tmp_path, uninterrupted):
    """Killed and resumed as a pipeline, in one process, with FSDP, and as a pipeline of three ranks."""
    plans = (
        (),
        ("ranks=1", "plan.pipeline=0", "plan.micro_batches=0"),
        ("ranks=2", "plan.pipeline=1", "plan.micro_batches=0", "plan.dense=FSDP"),
        ("ranks=3", "plan.pipeline=3", "plan.micro_batches=2"),
        ("ranks=2", "plan.pipeline=2", "plan.micro_batches=2"),
    )
    run = tmp_path / "runs/broken"
    for number, args in enumerate(plans):
        job = start(tmp_path, "broken", *args, *["run.resume=true"] * (number > 0))
        steps = 4 * (number + 1)
        while job.poll() is None and number < len(plans) - 1:
            saved = list_checkpoints(run / "checkpoint")
            if saved and int(saved[-1].name.removeprefix("step-")) >= steps:
                job.kill()
            time.sleep(0.005)
        expected_code = 0 if number == len(plans) - 1 else -signal.SIGKILL
        assert job.wait(120) == expected_code, (tmp_path / "stderr").read_text()
        verify_checkpoints(run)
    lines = curve(run)
    assert len(lines) == len(uninterrupted)
    for line, expected in zip(lines, uninterrupted, strict=True):
        assert (line["kind"], line["step"]) == (expected["kind"], expected["step"])
        if "loss" in line:
            assert line["loss"] == pytest.approx(expected["loss"], abs=1e-4)

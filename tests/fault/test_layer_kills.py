"""kill -9 of ranks of a pipeline, or with split experts: restarted under the same plan, the loss curve is the
uninterrupted one, bit by bit.

A run may continue under another plan: in one process, with data parallelism, as another pipeline, with other experts.
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
    "model.num_blocks=4",
)
SPLIT = ("plan.experts=2", "plan.expert_copies=even")
RECIPES = {
    "pipeline": ("gpt-pipeline", "model.hidden=64"),
    # The balancing loss of a batch depends on how many ranks share it.
    "experts": ("moe-gpt", "ranks=2", "model.experts.hidden=64", "model.experts.balance=0.0", *SPLIT),
}
OTHER_PLANS = {
    "pipeline": (
        (),
        ("ranks=1", "plan.pipeline=0", "plan.micro_batches=0"),
        ("ranks=2", "plan.pipeline=1", "plan.micro_batches=0", "plan.dense=FSDP"),
        ("ranks=3", "plan.pipeline=3", "plan.micro_batches=2"),
        ("ranks=2", "plan.pipeline=2", "plan.micro_batches=2"),
    ),
    "experts": (
        (),
        ("ranks=1", "plan.experts=0", "plan.expert_copies="),
        ("ranks=2", "plan.experts=2", "plan.dense=FSDP", "plan.expert_groups=2"),
        ("ranks=3", "plan.experts=3", "plan.expert_copies=fastest"),
        ("ranks=2", "plan.experts=1", "plan.expert_copies="),
    ),
}


def start(folder: Path, kind: str, name: str, *args: str) -> subprocess.Popen:
    recipe, *keys = RECIPES[kind]
    command = [sys.executable, "-m", "shardwright.cli", "train", recipe, *RUN, *keys, f"run.name={name}", *args]
    with open(folder / "stderr", "w") as errors:
        return subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=errors)


def curve(run: Path) -> list[dict]:
    return [{key: value for key, value in line.items() if key not in SPEEDS} for line in metrics(run)]


@pytest.fixture(scope="module", params=RECIPES)
def kind(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory, kind) -> list[dict]:
    folder = tmp_path_factory.mktemp("uninterrupted")
    job = start(folder, kind, "whole")
    assert job.wait() == 0, (folder / "stderr").read_text()
    lines = curve(folder / "runs/whole")
    assert lines[-1]["step"] == END and any("loss" in line for line in lines)
    return lines


def kill_and_restart(folder: Path, kind: str, seed: int) -> None:
    generator = random.Random(seed)
    step, rank = generator.randrange(0, END - 6, 2), generator.randrange(WORLD)
    job = start(folder, kind, "broken", "restarts=1")
    try:
        assert kill_rank(job, folder / "runs/broken", step, drafting=seed % 2 == 1, rank=rank)
        assert job.wait(120) == 0, (folder / "stderr").read_text()
    finally:
        job.kill()
    verify_checkpoints(folder / "runs/broken")


@pytest.mark.parametrize("seed", range(2))
def test_killed_ranks_are_restarted(tmp_path, kind, uninterrupted, seed):
    kill_and_restart(tmp_path, kind, seed)
    assert curve(tmp_path / "runs/broken") == uninterrupted


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, NUM_KILLS))
def test_ranks_killed_at_twenty_random_steps_are_restarted(tmp_path, kind, uninterrupted, seed):
    kill_and_restart(tmp_path, kind, seed)
    assert curve(tmp_path / "runs/broken") == uninterrupted


def test_a_run_goes_on_under_every_other_plan(tmp_path, kind, uninterrupted):
    """Killed and resumed: under the first plan, then each of the others."""
    plans = OTHER_PLANS[kind]
    run = tmp_path / "runs/broken"
    for number, args in enumerate(plans):
        job = start(tmp_path, kind, "broken", *args, *["run.resume=true"] * (number > 0))
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

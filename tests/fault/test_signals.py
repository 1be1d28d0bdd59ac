"""SIGTERM, SIGHUP, Ctrl-C: checkpoint after the same step on all ranks, resume command, exit code 128 + signal."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jobs
import pytest
from test_kill import curve, metrics, stderr_of, verify_checkpoints
from test_launcher import torchrun
from test_ranks import rank_pids

from shardwright.checkpoint.step_directories import list_checkpoints

pytestmark = pytest.mark.fault
SECONDS_TO_STOP = 40.0  # on a loaded machine; a step here takes milliseconds
KEYS = ("train.eval_samples=1024", "train.log_every=4")
# Samples of a click stream; rank 1, or a single process, hangs when it reads beyond sample `last`.
STUCK_SOURCE = """
import os, time
from dataclasses import dataclass
from shardwright.data.sources.synthetic import ClickStream

@dataclass(frozen=True)
class Stuck(ClickStream):
    last: int = 0

    def take(self, indices):
        if os.environ.get("RANK", "1") == "1" and indices.max() > self.last:
            open("stuck", "a").close()
            time.sleep(1000)
        return super().take(indices)
"""


def saved_step(run: Path) -> int:
    verify_checkpoints(run)
    checkpoints = list_checkpoints(run / "checkpoint")
    return int(checkpoints[-1].name.rpartition("-")[2]) if checkpoints else 0


def check_stopped(folder: Path, job: subprocess.Popen, number: int, min_step: int) -> int:
    """Check how the run ended; returns the step of its checkpoint."""
    assert job.wait(SECONDS_TO_STOP) == 128 + number, stderr_of(folder)
    output = stderr_of(folder)
    step = saved_step(folder / "runs/one")
    assert step >= min_step
    assert f"stopped by {signal.Signals(number).name} after step {step}" in output, output
    assert "shardwright train runs/one/config.toml run.resume=true" in output
    assert "Traceback" not in output and "died with exit code" not in output and "PeerLost" not in output, output
    assert metrics(folder / "runs/one")[-1]["step"] == step, "steps after the last logged one are logged at the stop"
    return step


def finish(folder: Path, *args: str) -> list[dict]:
    job = jobs.start(folder, *KEYS, "run.resume=true", *args)
    assert job.wait(120) == 0, stderr_of(folder)
    return curve(folder / "runs/one")


def assert_same_after(step: int, resumed: list[dict], uninterrupted: list[dict]) -> None:
    """Metrics after `step`, and of evaluations, must have the same bits."""
    late = [line for line in resumed if line["step"] > step or line["kind"] in ("eval", "end")]
    assert len(late) > 2
    assert late == [line for line in uninterrupted if line["step"] > step or line["kind"] in ("eval", "end")]


def run_uninterrupted(folder: Path, *args: str) -> list[dict]:
    folder.mkdir()
    job = jobs.start(folder, *KEYS, *args)
    assert job.wait(120) == 0, stderr_of(folder)
    return curve(folder / "runs/one")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_one_process_saves_and_prints_how_to_resume(tmp_path, number):
    job = jobs.start(tmp_path, *KEYS, "train.steps=0", "data.workers=2", ranks=1)
    jobs.wait_for_step(job, tmp_path / "runs/one", 8)
    job.send_signal(number)
    check_stopped(tmp_path, job, number, 8)


@pytest.mark.parametrize("args", [("train.steps=200",), ("train.steps=100", "train.accumulate=3")])
def test_a_resumed_run_continues_like_an_uninterrupted_one(tmp_path, args):
    job = jobs.start(tmp_path, *KEYS, *args, ranks=1)
    jobs.wait_for_step(job, tmp_path / "runs/one", 8)
    job.send_signal(signal.SIGTERM)
    step = check_stopped(tmp_path, job, signal.SIGTERM, 8)
    assert step < int(args[0].partition("=")[2])
    resumed = finish(tmp_path, *args, "ranks=1")
    assert_same_after(step + 4, resumed, run_uninterrupted(tmp_path / "whole", *args, "ranks=1"))


def send_signal(job: subprocess.Popen, target: str, number: int) -> None:
    if target == "launcher":
        job.send_signal(number)
    elif target == "all":  # like a scheduler, or a terminal for its foreground process group
        for pid in jobs.process_tree(job.pid):
            os.kill(pid, number)
    else:
        os.kill(rank_pids(job)[int(target)], number)


@pytest.mark.parametrize(
    ("target", "number", "args"),
    [
        ("launcher", signal.SIGTERM, ("data.workers=1",)),
        ("all", signal.SIGINT, ("data.workers=1",)),
        ("all", signal.SIGTERM, ("data.workers=1",)),
        ("1", signal.SIGTERM, ("data.workers=0",)),
        ("0", signal.SIGHUP, ("data.workers=0", "train.overlap=false")),
        ("1", signal.SIGTERM, ("data.workers=0", "train.accumulate=2", "restarts=1")),
    ],
)
def test_all_ranks_stop_after_the_same_step(tmp_path, target, number, args):
    job = jobs.start(tmp_path, *KEYS, "train.steps=0", *args)
    jobs.wait_for_step(job, tmp_path / "runs/one", 8)
    started = jobs.process_tree(job.pid)
    send_signal(job, target, number)
    step = check_stopped(tmp_path, job, number, 8)
    jobs.wait_until(lambda: not any(map(jobs.is_alive, started)))
    assert stderr_of(tmp_path).count("stopped by") == 1
    resumed = finish(tmp_path, *args, f"train.steps={step + 20}")
    assert [line["step"] for line in resumed if line["kind"] == "end"] == [step + 20]


def test_stopped_ranks_resume_with_the_same_bits(tmp_path):
    args = ("train.steps=200", "data.workers=0")
    job = jobs.start(tmp_path, *KEYS, *args)
    jobs.wait_for_step(job, tmp_path / "runs/one", 8)
    job.send_signal(signal.SIGTERM)
    step = check_stopped(tmp_path, job, signal.SIGTERM, 8)
    assert step < 200
    assert_same_after(step + 4, finish(tmp_path, *args), run_uninterrupted(tmp_path / "whole", *args))


def test_a_signal_during_a_wait_for_data_saves_a_checkpoint(tmp_path):
    (tmp_path / "stuck.py").write_text(STUCK_SOURCE)
    job = jobs.start(
        tmp_path,
        "data.workers=0",
        "data.kind=stuck:Stuck",
        "data.last=5000",
        "data.shuffle=false",
        "train.steps=0",
        ranks=1,
    )
    jobs.wait_until((tmp_path / "stuck").exists, lambda: stderr_of(tmp_path))
    job.send_signal(signal.SIGTERM)
    assert check_stopped(tmp_path, job, signal.SIGTERM, 1) == 5000 // 256


def test_a_second_signal_ends_the_job_immediately(tmp_path):
    (tmp_path / "stuck.py").write_text(STUCK_SOURCE)
    args = (
        "data.workers=0",
        "data.kind=stuck:Stuck",
        "data.last=5000",
        "data.shuffle=false",
        "train.steps=0",
        "train.checkpoint_every=8",
    )
    job = jobs.start(tmp_path, *args)
    jobs.wait_until((tmp_path / "stuck").exists, lambda: stderr_of(tmp_path))
    started = jobs.process_tree(job.pid)
    job.send_signal(signal.SIGTERM)
    time.sleep(3)
    assert job.poll() is None, stderr_of(tmp_path)
    job.send_signal(signal.SIGTERM)
    assert job.wait(10) == 143
    jobs.wait_until(lambda: not any(map(jobs.is_alive, started)))
    assert saved_step(tmp_path / "runs/one") in (8, 16)


def test_a_signal_before_the_first_step_ends_the_launch(tmp_path):
    job = jobs.start(tmp_path, "train.steps=0")
    jobs.wait_until(lambda: len(rank_pids(job)) == 2)
    started = jobs.process_tree(job.pid)
    job.send_signal(signal.SIGTERM)
    assert job.wait(SECONDS_TO_STOP) == 143, stderr_of(tmp_path)
    jobs.wait_until(lambda: not any(map(jobs.is_alive, started)))
    assert "Traceback" not in stderr_of(tmp_path)


def test_a_hangup_is_ignored_under_nohup(tmp_path):
    job = jobs.start(tmp_path, *KEYS, "train.steps=0", prefix=("nohup",))
    jobs.wait_for_step(job, tmp_path / "runs/one", 8)
    job.send_signal(signal.SIGHUP)
    before = metrics(tmp_path / "runs/one")[-1]["step"]
    jobs.wait_for_step(job, tmp_path / "runs/one", before + 20)
    job.send_signal(signal.SIGTERM)
    check_stopped(tmp_path, job, signal.SIGTERM, before + 20)


LATE_SCRIPT = """
import sys, time
from shardwright.runtime.launch.signals import StopRequest
with StopRequest(lambda name: print("late", name, flush=True), seconds=1.0) as stop:
    print("ready", flush=True)
    if sys.argv[1] == "saving":
        stop.disable_time_limit()
    for _ in range(40):
        time.sleep(0.2)
        if sys.argv[1] == "stepping":
            stop.restart_time_limit()
print("whole", flush=True)
"""


@pytest.mark.parametrize(
    ("mode", "code", "output"), [("late", 143, "late SIGTERM"), ("saving", 0, "whole"), ("stepping", 0, "whole")]
)
def test_the_time_limit_after_a_signal_ends_a_late_step_but_not_a_checkpoint(mode, code, output):
    process = subprocess.Popen([sys.executable, "-c", LATE_SCRIPT, mode], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    printed, _ = process.communicate(timeout=60)
    assert (process.returncode, printed.strip()) == (code, output)


def test_a_signal_to_torchrun_saves_a_checkpoint(tmp_path):
    job = torchrun(tmp_path, "train.steps=0", "data.workers=0")
    jobs.wait_for_step(job, tmp_path / "runs/one", 8)
    job.send_signal(signal.SIGTERM)
    assert job.wait(SECONDS_TO_STOP) != 0
    step = saved_step(tmp_path / "runs/one")
    assert step >= 8 and f"stopped by SIGTERM after step {step}" in stderr_of(tmp_path)

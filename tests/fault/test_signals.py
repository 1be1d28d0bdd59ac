"""SIGTERM, SIGHUP and Ctrl-C: a checkpoint after the same step on all ranks, how to continue, 128 + the signal."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jobs
import pytest
from test_kill import complaints, curve, metrics, verified
from test_launcher import torchrun
from test_ranks import ranks_of

from shardwright.checkpoint.step_directories import list_checkpoints

pytestmark = pytest.mark.fault
SECONDS_TO_STOP = 40.0  # on a loaded machine; a step here takes milliseconds
KEYS = ("train.eval_samples=1024", "train.log_every=4")
# Samples of a click stream; whoever reads beyond `last` of them waits for ever.
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
    verified(run)
    found = list_checkpoints(run / "checkpoint")
    return int(found[-1].name.rpartition("-")[2]) if found else 0


def check_stopped(where: Path, job: subprocess.Popen, number: int, least: int) -> int:
    """Check how the run ended; returns the step of its checkpoint."""
    assert job.wait(SECONDS_TO_STOP) == 128 + number, complaints(where)
    said = complaints(where)
    step = saved_step(where / "runs/one")
    assert step >= least
    assert f"stopped by {signal.Signals(number).name} after step {step}" in said, said
    assert "shardwright train runs/one/config.toml run.resume=true" in said
    assert "Traceback" not in said and "died with exit code" not in said and "PeerLost" not in said, said
    assert metrics(where / "runs/one")[-1]["step"] == step, "steps after the last line are in a line of their own"
    return step


def finish(where: Path, *words: str) -> list[dict]:
    job = jobs.start(where, *KEYS, "run.resume=true", *words)
    assert job.wait(120) == 0, complaints(where)
    return curve(where / "runs/one")


def same_from(line: int, found: list[dict], undisturbed: list[dict]) -> None:
    """Equal bit for bit, from the first line whose steps all come after the stop."""
    late = [one for one in found if one["step"] > line or one["kind"] in ("eval", "end")]
    assert len(late) > 2
    assert late == [one for one in undisturbed if one["step"] > line or one["kind"] in ("eval", "end")]


def undisturbed(where: Path, *words: str) -> list[dict]:
    where.mkdir()
    job = jobs.start(where, *KEYS, *words)
    assert job.wait(120) == 0, complaints(where)
    return curve(where / "runs/one")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_one_process_saves_and_says_how_to_continue(tmp_path, number):
    job = jobs.start(tmp_path, *KEYS, "train.steps=0", "data.workers=2", ranks=1)
    jobs.wait_for_step(job, tmp_path / "runs/one", 8)
    job.send_signal(number)
    check_stopped(tmp_path, job, number, 8)


@pytest.mark.parametrize("words", [("train.steps=200",), ("train.steps=100", "train.accumulate=3")])
def test_the_rest_is_that_of_an_undisturbed_run(tmp_path, words):
    job = jobs.start(tmp_path, *KEYS, *words, ranks=1)
    jobs.wait_for_step(job, tmp_path / "runs/one", 8)
    job.send_signal(signal.SIGTERM)
    step = check_stopped(tmp_path, job, signal.SIGTERM, 8)
    assert step < int(words[0].partition("=")[2])
    found = finish(tmp_path, *words, "ranks=1")
    same_from(step + 4, found, undisturbed(tmp_path / "whole", *words, "ranks=1"))


def signalled(job: subprocess.Popen, to: str, number: int) -> None:
    if to == "launcher":
        job.send_signal(number)
    elif to == "all":  # as a scheduler does, and a terminal to its foreground process group
        for pid in jobs.descendants(job.pid):
            os.kill(pid, number)
    else:
        os.kill(ranks_of(job)[int(to)], number)


@pytest.mark.parametrize(
    ("to", "number", "words"),
    [
        ("launcher", signal.SIGTERM, ("data.workers=1",)),
        ("all", signal.SIGINT, ("data.workers=1",)),
        ("all", signal.SIGTERM, ("data.workers=1",)),
        ("1", signal.SIGTERM, ("data.workers=0",)),
        ("0", signal.SIGHUP, ("data.workers=0", "train.overlap=false")),
        ("1", signal.SIGTERM, ("data.workers=0", "train.accumulate=2", "restarts=1")),
    ],
)
def test_all_ranks_end_with_the_same_step(tmp_path, to, number, words):
    job = jobs.start(tmp_path, *KEYS, "train.steps=0", *words)
    jobs.wait_for_step(job, tmp_path / "runs/one", 8)
    started = jobs.descendants(job.pid)
    signalled(job, to, number)
    step = check_stopped(tmp_path, job, number, 8)
    jobs.wait_until(lambda: not any(map(jobs.is_alive, started)))
    assert complaints(tmp_path).count("stopped by") == 1
    found = finish(tmp_path, *words, f"train.steps={step + 20}")
    assert [one["step"] for one in found if one["kind"] == "end"] == [step + 20]


def test_ranks_that_were_stopped_resume_to_the_bit(tmp_path):
    words = ("train.steps=200", "data.workers=0")
    job = jobs.start(tmp_path, *KEYS, *words)
    jobs.wait_for_step(job, tmp_path / "runs/one", 8)
    job.send_signal(signal.SIGTERM)
    step = check_stopped(tmp_path, job, signal.SIGTERM, 8)
    assert step < 200
    same_from(step + 4, finish(tmp_path, *words), undisturbed(tmp_path / "whole", *words))


def test_a_signal_while_the_data_are_awaited_saves_too(tmp_path):
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
    jobs.wait_until((tmp_path / "stuck").exists, lambda: complaints(tmp_path))
    job.send_signal(signal.SIGTERM)
    assert check_stopped(tmp_path, job, signal.SIGTERM, 1) == 5000 // 256


def test_a_second_signal_ends_at_once(tmp_path):
    (tmp_path / "stuck.py").write_text(STUCK_SOURCE)
    words = (
        "data.workers=0",
        "data.kind=stuck:Stuck",
        "data.last=5000",
        "data.shuffle=false",
        "train.steps=0",
        "train.checkpoint_every=8",
    )
    job = jobs.start(tmp_path, *words)
    jobs.wait_until((tmp_path / "stuck").exists, lambda: complaints(tmp_path))
    started = jobs.descendants(job.pid)
    job.send_signal(signal.SIGTERM)
    time.sleep(3)
    assert job.poll() is None, complaints(tmp_path)
    job.send_signal(signal.SIGTERM)
    assert job.wait(10) == 143
    jobs.wait_until(lambda: not any(map(jobs.is_alive, started)))
    assert saved_step(tmp_path / "runs/one") in (8, 16)


def test_a_signal_before_the_first_step_ends_the_launch(tmp_path):
    job = jobs.start(tmp_path, "train.steps=0")
    jobs.wait_until(lambda: len(ranks_of(job)) == 2)
    started = jobs.descendants(job.pid)
    job.send_signal(signal.SIGTERM)
    assert job.wait(SECONDS_TO_STOP) == 143, complaints(tmp_path)
    jobs.wait_until(lambda: not any(map(jobs.is_alive, started)))
    assert "Traceback" not in complaints(tmp_path)


def test_a_hangup_is_ignored_under_nohup(tmp_path):
    job = jobs.start(tmp_path, *KEYS, "train.steps=0", prefix=("nohup",))
    jobs.wait_for_step(job, tmp_path / "runs/one", 8)
    job.send_signal(signal.SIGHUP)
    before = metrics(tmp_path / "runs/one")[-1]["step"]
    jobs.wait_for_step(job, tmp_path / "runs/one", before + 20)
    job.send_signal(signal.SIGTERM)
    check_stopped(tmp_path, job, signal.SIGTERM, before + 20)


LATE = """
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
    ("mode", "code", "said"), [("late", 143, "late SIGTERM"), ("saving", 0, "whole"), ("stepping", 0, "whole")]
)
def test_a_step_that_does_not_end_in_time_ends_the_process_but_a_checkpoint_may_take_long(mode, code, said):
    process = subprocess.Popen([sys.executable, "-c", LATE, mode], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=60)
    assert (process.returncode, out.strip()) == (code, said)


def test_a_signal_to_torchrun_saves_too(tmp_path):
    job = torchrun(tmp_path, "train.steps=0", "data.workers=0")
    jobs.wait_for_step(job, tmp_path / "runs/one", 8)
    job.send_signal(signal.SIGTERM)
    assert job.wait(SECONDS_TO_STOP) != 0
    step = saved_step(tmp_path / "runs/one")
    assert step >= 8 and f"stopped by SIGTERM after step {step}" in complaints(tmp_path)

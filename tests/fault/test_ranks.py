"""kill -9 of a rank at any time, also while a checkpoint is written: the others report it in time, or all restart.

The loss curve then equals the uninterrupted one: exactly on the same number of ranks, within 1e-4 on fewer.
"""

import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from test_kill import RUN as SMALL
from test_kill import curve, last_step, start, stderr_of, verify_checkpoints

from shardwright.checkpoint.step_directories import list_checkpoints, read_manifest

WORLD = 2
END = 40
RUN = (f"train.steps={END}", "train.checkpoint_every=4", "data.workers=0", "train.increments=2")
MAX_SECONDS_TO_EXIT = 30.0
NUM_KILLS = 20


def rank_pids(job: subprocess.Popen) -> list[int]:
    """Process ids of the ranks that the launcher has started, in rank order."""
    pids = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            values = dict(entry.partition(b"=")[::2] for entry in path.read_bytes().split(b"\0"))
            parent = int((path.parent / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        if parent == job.pid and b"RANK" in values:
            pids.append((int(values[b"RANK"]), int(path.parent.name)))
    return [pid for _, pid in sorted(pids)]


def kill_rank(job: subprocess.Popen, run: Path, step: int, *, drafting: bool, rank: int) -> bool:
    """Kill a rank after this step, with `drafting` while a checkpoint is written; False if the job ended before."""
    while job.poll() is None:
        if last_step(run) >= step and (not drafting or any((run / "checkpoint").glob(".draft-*"))):
            pids = rank_pids(job)
            if len(pids) == WORLD:
                os.kill(pids[rank], signal.SIGKILL)
                return True
        time.sleep(0.0005 if drafting else 0.005)
    return False


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> list[dict]:
    folder = tmp_path_factory.mktemp("uninterrupted")
    job = start(folder, "whole", *RUN, f"ranks={WORLD}")
    assert job.wait() == 0, stderr_of(folder)
    return curve(folder / "runs/whole")


def kill_and_restart(folder: Path, generator: random.Random, drafting: bool) -> None:
    step, rank = generator.randrange(0, END - 8, 2), generator.randrange(WORLD)
    job = start(folder, "broken", *RUN, f"ranks={WORLD}", "restarts=1")
    try:
        assert kill_rank(job, folder / "runs/broken", step, drafting=drafting, rank=rank)
        assert job.wait(120) == 0, stderr_of(folder)
    finally:
        job.kill()
    verify_checkpoints(folder / "runs/broken")


@pytest.mark.parametrize("drafting", (False, True))
def test_killed_ranks_are_restarted(tmp_path, uninterrupted, drafting):
    kill_and_restart(tmp_path, random.Random(drafting), drafting)
    assert curve(tmp_path / "runs/broken") == uninterrupted


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(NUM_KILLS))
def test_ranks_killed_at_twenty_random_steps_are_restarted(tmp_path, uninterrupted, seed):
    kill_and_restart(tmp_path, random.Random(100 + seed), drafting=seed % 2 == 1)
    assert curve(tmp_path / "runs/broken") == uninterrupted


def test_the_job_ends_in_time_after_a_kill_and_resumes_on_fewer_ranks(tmp_path, uninterrupted):
    job = start(tmp_path, "broken", *RUN, f"ranks={WORLD}")
    assert kill_rank(job, tmp_path / "runs/broken", 12, drafting=False, rank=1)
    killed_at = time.monotonic()
    assert job.wait(MAX_SECONDS_TO_EXIT) != 0
    assert time.monotonic() - killed_at < MAX_SECONDS_TO_EXIT
    checkpoint = list_checkpoints(tmp_path / "runs/broken/checkpoint")[-1].name
    assert 4 <= int(checkpoint.rpartition("-")[2]) < END  # that of step 8 may have been in writing when the rank died
    job = start(tmp_path, "broken", *RUN, "ranks=1", "run.resume=true")
    assert job.wait(120) == 0, stderr_of(tmp_path)
    assert_close_curves(curve(tmp_path / "runs/broken"), uninterrupted)


def assert_close_curves(lines: list[dict], expected: list[dict]) -> None:
    for line, other in zip(lines, expected, strict=True):
        assert (line["kind"], line["step"]) == (other["kind"], other["step"])
        if "loss" in line:
            assert line["loss"] == pytest.approx(other["loss"], abs=1e-4)


@pytest.mark.slow
def test_torchrun_continues_with_the_remaining_hosts(tmp_path):
    """Two launchers of one rank each, as on two hosts; the second is killed with its rank. `--nnodes 1:2` restarts
    the first one alone, and its curve equals that of two ranks."""
    args = ("train.steps=400", "train.checkpoint_every=20", "data.workers=0")
    whole = start(tmp_path, "whole", *args, f"ranks={WORLD}")
    assert whole.wait(120) == 0, stderr_of(tmp_path)
    conf = "last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=3"
    options = ("--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "2", "--rdzv-backend", "c10d")
    rendezvous = ("--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--rdzv-id", "elastic", "--rdzv-conf", conf)
    job = ("-m", "shardwright.cli", "train", "synthetic-dlrm", *SMALL, *args, "run.name=broken")
    hosts = []
    run = tmp_path / "runs/broken"
    try:
        for _ in range(2):
            command = [sys.executable, "-m", "torch.distributed.run", *options, *rendezvous, *job]
            with open(tmp_path / f"host{len(hosts)}", "w") as out:
                hosts.append(subprocess.Popen(command, cwd=tmp_path, stdout=out, stderr=out))
            time.sleep(3)  # the first one serves the rendezvous
        deadline = time.monotonic() + 60
        while last_step(run) < 60:
            assert time.monotonic() < deadline, (tmp_path / "host0").read_text()
            time.sleep(0.01)
        for pid in (hosts[1].pid, *rank_pids(hosts[1])):
            os.kill(pid, signal.SIGKILL)
        assert hosts[0].wait(120) == 0, (tmp_path / "host0").read_text()
    finally:
        for host in hosts:
            host.kill()
    manifests = [read_manifest(path) for path in list_checkpoints(run / "checkpoint")]
    assert [manifest.ranks for manifest in manifests] == [1, 1]
    assert_close_curves(curve(run), curve(tmp_path / "runs/whole"))


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def test_a_full_disk_leaves_the_last_checkpoint_intact(tmp_path):
    """On a separate file system that is too small for the checkpoints of two steps."""
    disk = tmp_path / "runs/full/checkpoint"
    disk.mkdir(parents=True)
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", disk], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("mounting a small disk needs root")
    try:
        args = ("train.checkpoint_every=10", "train.keep_checkpoints=3", f"ranks={WORLD}", "run.resume=true")
        job = start(tmp_path, "full", *args)
        assert job.wait(120) == 2
        assert "the checkpoint cannot be written" in stderr_of(tmp_path)
        assert "No space left on device" in stderr_of(tmp_path)
        assert "earlier checkpoints are intact" in stderr_of(tmp_path)
        assert [path.name for path in disk.iterdir()] == ["step-00000010"]
        verify_checkpoints(disk.parent)
    finally:
        subprocess.run(["umount", disk], check=True)

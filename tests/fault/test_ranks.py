"""kill -9 of a rank at any moment, also while a checkpoint is written: the others say so in time, or all start again.

The loss curve is then the undisturbed one: to the bit on as many ranks, within 1e-4 on fewer.
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
from test_kill import complaints, curve, last_step, start, verified

from shardwright.checkpoint.step_directories import list_checkpoints, read_manifest

WORLD = 2
END = 40
RUN = (f"train.steps={END}", "train.checkpoint_every=4", "data.workers=0", "train.increments=2")
SECONDS_TO_TELL = 30.0
TRIES = 20


def ranks_of(job: subprocess.Popen) -> list[int]:
    """The processes that the launcher has started, in the order of ranks."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            values = dict(one.partition(b"=")[::2] for one in path.read_bytes().split(b"\0"))
            parent = int((path.parent / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        if parent == job.pid and b"RANK" in values:
            found.append((int(values[b"RANK"]), int(path.parent.name)))
    return [pid for _, pid in sorted(found)]


def killed(job: subprocess.Popen, run: Path, moment: int, *, drafting: bool, rank: int) -> bool:
    """Whether the rank was killed once the run had passed this step; `drafting`: while a checkpoint is written."""
    while job.poll() is None:
        if last_step(run) >= moment and (not drafting or any((run / "checkpoint").glob(".draft-*"))):
            pids = ranks_of(job)
            if len(pids) == WORLD:
                os.kill(pids[rank], signal.SIGKILL)
                return True
        time.sleep(0.0005 if drafting else 0.005)
    return False


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> list[dict]:
    where = tmp_path_factory.mktemp("undisturbed")
    job = start(where, "whole", *RUN, f"ranks={WORLD}")
    assert job.wait() == 0, complaints(where)
    return curve(where / "runs/whole")


def restarted(where: Path, draw: random.Random, drafting: bool) -> None:
    moment, rank = draw.randrange(0, END - 8, 2), draw.randrange(WORLD)
    job = start(where, "broken", *RUN, f"ranks={WORLD}", "restarts=1")
    try:
        assert killed(job, where / "runs/broken", moment, drafting=drafting, rank=rank)
        assert job.wait(120) == 0, complaints(where)
    finally:
        job.kill()
    verified(where / "runs/broken")


@pytest.mark.parametrize("drafting", (False, True))
def test_killed_ranks_start_again(tmp_path, undisturbed, drafting):
    restarted(tmp_path, random.Random(drafting), drafting)
    assert curve(tmp_path / "runs/broken") == undisturbed


@pytest.mark.slow
@pytest.mark.parametrize("draw", range(TRIES))
def test_twenty_moments(tmp_path, undisturbed, draw):
    restarted(tmp_path, random.Random(100 + draw), drafting=draw % 2 == 1)
    assert curve(tmp_path / "runs/broken") == undisturbed


def test_the_others_say_so_in_time_and_fewer_go_on(tmp_path, undisturbed):
    job = start(tmp_path, "broken", *RUN, f"ranks={WORLD}")
    assert killed(job, tmp_path / "runs/broken", 12, drafting=False, rank=1)
    since = time.monotonic()
    assert job.wait(SECONDS_TO_TELL) != 0
    assert time.monotonic() - since < SECONDS_TO_TELL
    done = list_checkpoints(tmp_path / "runs/broken/checkpoint")[-1].name
    assert 8 <= int(done.rpartition("-")[2]) < END
    job = start(tmp_path, "broken", *RUN, "ranks=1", "run.resume=true")
    assert job.wait(120) == 0, complaints(tmp_path)
    for one, other in zip(curve(tmp_path / "runs/broken"), undisturbed, strict=True):
        assert (one["kind"], one["step"]) == (other["kind"], other["step"])
        if "loss" in one:
            assert one["loss"] == pytest.approx(other["loss"], abs=1e-4)


@pytest.mark.slow
def test_torchrun_goes_on_with_the_hosts_that_are_left(tmp_path):
    """Two launchers of a rank each, as on two hosts; the second goes with its rank. `--nnodes 1:2` starts the other
    again, alone, and the curve is that of two."""
    words = ("train.steps=400", "train.checkpoint_every=20", "data.workers=0")
    whole = start(tmp_path, "whole", *words, f"ranks={WORLD}")
    assert whole.wait(120) == 0, complaints(tmp_path)
    conf = "last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=3"
    told = ("--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "2", "--rdzv-backend", "c10d")
    place = ("--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--rdzv-id", "elastic", "--rdzv-conf", conf)
    job = ("-m", "shardwright.cli", "train", "synthetic-dlrm", *SMALL, *words, "run.name=broken")
    hosts = []
    run = tmp_path / "runs/broken"
    try:
        for _ in range(2):
            command = [sys.executable, "-m", "torch.distributed.run", *told, *place, *job]
            with open(tmp_path / f"host{len(hosts)}", "w") as out:
                hosts.append(subprocess.Popen(command, cwd=tmp_path, stdout=out, stderr=out))
            time.sleep(3)  # the first one keeps the place where they meet
        until = time.monotonic() + 60
        while last_step(run) < 60:
            assert time.monotonic() < until, (tmp_path / "host0").read_text()
            time.sleep(0.01)
        for pid in (hosts[1].pid, *ranks_of(hosts[1])):
            os.kill(pid, signal.SIGKILL)
        assert hosts[0].wait(120) == 0, (tmp_path / "host0").read_text()
    finally:
        for host in hosts:
            host.kill()
    manifests = [read_manifest(path) for path in list_checkpoints(run / "checkpoint")]
    assert [one.ranks for one in manifests] == [1, 1]
    for one, other in zip(curve(run), curve(tmp_path / "runs/whole"), strict=True):
        assert (one["kind"], one["step"]) == (other["kind"], other["step"])
        if "loss" in one:
            assert one["loss"] == pytest.approx(other["loss"], abs=1e-4)


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def test_a_full_disk_leaves_the_last_checkpoint_good(tmp_path):
    """A disk of its own, so small that checkpoints of two steps do not fit."""
    disk = tmp_path / "runs/full/checkpoint"
    disk.mkdir(parents=True)
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", disk], capture_output=True, check=False)
    if made.returncode:
        pytest.skip("mounting a small disk needs root")
    try:
        words = ("train.checkpoint_every=10", "train.keep_checkpoints=3", f"ranks={WORLD}", "run.resume=true")
        job = start(tmp_path, "full", *words)
        assert job.wait(120) == 2
        assert "the checkpoint cannot be written" in complaints(tmp_path)
        assert "No space left on device" in complaints(tmp_path)
        assert "earlier checkpoints are intact" in complaints(tmp_path)
        assert [path.name for path in disk.iterdir()] == ["step-00000010"]
        verified(disk.parent)
    finally:
        subprocess.run(["umount", disk], check=True)

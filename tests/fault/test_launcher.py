"""The launcher of `ranks=N`: its ports, the processes that die with it, and its report of a rank that dies."""

import os
import platform
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import jobs
import pytest
from test_ranks import ranks_of

pytestmark = pytest.mark.fault
OUTSIDE = "10.99.0.1"
# Connects to each port at an address that is not loopback, and to one of its own that is open to all.
PROBE = """
import socket, sys
with socket.create_server(("0.0.0.0", 0)) as control:
    for port in (control.getsockname()[1], *map(int, sys.argv[2:])):
        try:
            socket.create_connection((sys.argv[1], port), 5).close()
            print("open")
        except ConnectionRefusedError:
            print("refused")
"""


@pytest.fixture
def namespace() -> Iterator[str]:
    """A network of its own with loopback and an address that is not loopback."""
    name = f"sw-launch-{os.getpid()}"
    commands = (
        ["ip", "netns", "add", name],
        ["ip", "-n", name, "link", "set", "lo", "up"],
        ["ip", "-n", name, "link", "add", "far0", "type", "veth", "peer", "name", "far1"],
        ["ip", "-n", name, "addr", "add", f"{OUTSIDE}/24", "dev", "far0"],
        ["ip", "-n", name, "link", "set", "far0", "up"],
        ["ip", "-n", name, "link", "set", "far1", "up"],
    )
    try:
        for command in commands:
            try:
                done = subprocess.run(command, capture_output=True, text=True, check=False)
            except FileNotFoundError:
                pytest.skip("needs iproute2")
            if done.returncode:
                pytest.skip(f"a network namespace cannot be made here: {done.stderr.strip()}")
        yield name
    finally:
        subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def test_no_port_of_a_single_host_launch_is_open_beyond_loopback(tmp_path, namespace):
    inside = ("ip", "netns", "exec", namespace)
    job = jobs.start(tmp_path, "train.steps=0", prefix=inside)
    try:
        jobs.wait_for_step(job, tmp_path / "runs/one", 4)
        found = {place for pid in jobs.descendants(job.pid) for place in jobs.listening(pid)}
        assert len(found) >= 3, "the store and a Gloo socket of each rank"
        ports = [str(port) for _, port in found]
        probe = subprocess.run(
            [*inside, sys.executable, "-c", PROBE, OUTSIDE, *ports], capture_output=True, text=True, check=True
        )
        first, *others = probe.stdout.split()
        assert first == "open", "the address is reachable"
        assert set(others) == {"refused"}, dict(zip(ports, others, strict=True))
        assert {address[-8:] for address, _ in found} == {"0100007F"}
    finally:
        for pid in jobs.descendants(job.pid):
            os.kill(pid, signal.SIGKILL)
        job.wait()


def test_ranks_and_loader_workers_die_with_a_killed_launcher(tmp_path):
    job = jobs.start(tmp_path, "train.steps=0", "data.workers=1")
    jobs.wait_for_step(job, tmp_path / "runs/one", 4)
    started = [pid for pid in jobs.descendants(job.pid) if pid != job.pid]
    assert len(ranks_of(job)) == 2 and len(started) >= 4, "two ranks and a loader worker of each"
    try:
        job.kill()
        assert job.wait() == -signal.SIGKILL
        jobs.wait_until(lambda: not any(map(jobs.is_alive, started)), lambda: list(filter(jobs.is_alive, started)))
    finally:
        for pid in filter(jobs.is_alive, started):
            os.kill(pid, signal.SIGKILL)


def test_ranks_of_a_launcher_killed_before_they_could_ask_for_its_death_do_not_start(tmp_path):
    """Ranks are stopped while Python starts; when they continue, the launcher has long been dead."""
    job = jobs.start(tmp_path, "train.steps=0")
    jobs.wait_until(lambda: len(ranks_of(job)) == 2)
    ranks = ranks_of(job)
    try:
        for pid in ranks:
            os.kill(pid, signal.SIGSTOP)
        job.kill()
        assert job.wait() == -signal.SIGKILL
        for pid in ranks:
            os.kill(pid, signal.SIGCONT)
        jobs.wait_until(lambda: not any(map(jobs.is_alive, ranks)))
        assert not (tmp_path / "runs").exists()
    finally:
        for pid in filter(jobs.is_alive, ranks):
            os.kill(pid, signal.SIGKILL)


def torchrun(where: Path, *words: str) -> subprocess.Popen:
    place = ("--nnodes", "1", "--nproc-per-node", "2", "--master-addr", "127.0.0.1")
    command = [sys.executable, "-m", "torch.distributed.run", *place, "--master-port", str(jobs.free_port())]
    job = ["-m", "shardwright.cli", "train", "synthetic-dlrm", *jobs.KEYS, "run.name=one", *words]
    with open(where / "complaints", "w") as errors:
        return subprocess.Popen([*command, *job], cwd=where, stdout=subprocess.DEVNULL, stderr=errors)


def test_ranks_die_with_a_killed_torchrun(tmp_path):
    job = torchrun(tmp_path, "train.steps=0", "data.workers=0")
    jobs.wait_for_step(job, tmp_path / "runs/one", 4)
    ranks = ranks_of(job)
    assert len(ranks) == 2
    try:
        job.kill()
        assert job.wait() == -signal.SIGKILL
        jobs.wait_until(lambda: not any(map(jobs.is_alive, ranks)))
    finally:
        for pid in filter(jobs.is_alive, ranks):
            os.kill(pid, signal.SIGKILL)


def line_of(where: Path) -> str:
    """The launcher's message about the rank that died."""
    found = [line for line in (where / "complaints").read_text().splitlines() if line.startswith("shardwright: rank 1")]
    assert len(found) == 1, (where / "complaints").read_text()
    return found[0]


def log_of(line: str) -> Path:
    match = re.search(r"its log: (\S+)", line)
    assert match, line
    return Path(match[1].rstrip(";"))


def test_a_killed_rank_is_named_with_its_host_signal_step_and_log(tmp_path):
    job = jobs.start(tmp_path, "train.steps=0", "data.workers=0")
    jobs.wait_for_step(job, tmp_path / "runs/one", 4)
    time.sleep(1.0)  # two heartbeats, which say the step
    killed = ranks_of(job)[1]
    os.kill(killed, signal.SIGKILL)
    assert job.wait(jobs.SECONDS) == 137
    line = line_of(tmp_path)
    assert line.startswith(f"shardwright: rank 1 on host {platform.node()} (process {killed}) was killed by SIGKILL")
    assert int(re.search(r"of step (\d+)", line)[1]) >= 4
    assert log_of(line).exists() and log_of(line).name == "rank-1.log"
    assert "run.name=one run.resume=true" in line


def test_a_rank_that_exits_without_a_word_is_named_with_its_exit_code(tmp_path):
    job = jobs.start(
        tmp_path, "train.steps=0", "data.workers=0", "data.kind=dying:Dying", "data.last=5000", "data.shuffle=false"
    )
    assert job.wait(jobs.SECONDS) == 7
    line = line_of(tmp_path)
    assert f"rank 1 on host {platform.node()}" in line and "ended with exit code 7" in line


def test_the_log_of_a_rank_that_crashes_has_its_traceback(tmp_path):
    job = jobs.start(tmp_path, "train.steps=0", "data.workers=0")
    jobs.wait_for_step(job, tmp_path / "runs/one", 4)
    os.kill(ranks_of(job)[1], signal.SIGSEGV)
    assert job.wait(jobs.SECONDS) == 128 + signal.SIGSEGV
    line = line_of(tmp_path)
    assert "was killed by SIGSEGV" in line
    assert "Fatal Python error: Segmentation fault" in log_of(line).read_text()


def test_a_users_mistake_is_still_one_line(tmp_path):
    job = jobs.start(tmp_path, "train.steps=4", "tables.lr=-1")
    assert job.wait(jobs.SECONDS) == 2
    lines = (tmp_path / "complaints").read_text().splitlines()
    assert lines and not [line for line in lines if "shardwright: rank" in line], lines

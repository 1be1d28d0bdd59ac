"""The launcher of `ranks=N`: its ports, processes that end with it, and its message about a rank that dies."""

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
from test_ranks import rank_pids

pytestmark = pytest.mark.fault
OUTSIDE = "10.99.0.1"
# Connects to each port at an address that is not loopback, first to one that this script opens on all addresses.
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
    """A network namespace with loopback and an address that is not loopback."""
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
                result = subprocess.run(command, capture_output=True, text=True, check=False)
            except FileNotFoundError:
                pytest.skip("needs iproute2")
            if result.returncode:
                pytest.skip(f"a network namespace cannot be made here: {result.stderr.strip()}")
        yield name
    finally:
        subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def test_no_port_of_a_single_host_launch_is_open_beyond_loopback(tmp_path, namespace):
    inside = ("ip", "netns", "exec", namespace)
    job = jobs.start(tmp_path, "train.steps=0", prefix=inside)
    try:
        jobs.wait_for_step(job, tmp_path / "runs/one", 4)
        addresses = {address for pid in jobs.process_tree(job.pid) for address in jobs.listening_addresses(pid)}
        assert len(addresses) >= 3, "the store and a Gloo socket of each rank"
        ports = [str(port) for _, port in addresses]
        probe = subprocess.run(
            [*inside, sys.executable, "-c", PROBE, OUTSIDE, *ports], capture_output=True, text=True, check=True
        )
        control, *results = probe.stdout.split()
        assert control == "open", "the address is reachable"
        assert set(results) == {"refused"}, dict(zip(ports, results, strict=True))
        assert {address[-8:] for address, _ in addresses} == {"0100007F"}
    finally:
        for pid in jobs.process_tree(job.pid):
            os.kill(pid, signal.SIGKILL)
        job.wait()


def test_ranks_and_loader_workers_die_with_a_killed_launcher(tmp_path):
    job = jobs.start(tmp_path, "train.steps=0", "data.workers=1")
    jobs.wait_for_step(job, tmp_path / "runs/one", 4)
    children = [pid for pid in jobs.process_tree(job.pid) if pid != job.pid]
    assert len(rank_pids(job)) == 2 and len(children) >= 4, "two ranks and a loader worker of each"
    try:
        job.kill()
        assert job.wait() == -signal.SIGKILL
        jobs.wait_until(lambda: not any(map(jobs.is_alive, children)), lambda: list(filter(jobs.is_alive, children)))
    finally:
        for pid in filter(jobs.is_alive, children):
            os.kill(pid, signal.SIGKILL)


def test_ranks_do_not_start_if_the_launcher_died_before_they_could_watch_it(tmp_path):
    """Ranks are stopped while Python starts; when they continue, the launcher is already dead."""
    job = jobs.start(tmp_path, "train.steps=0")
    jobs.wait_until(lambda: len(rank_pids(job)) == 2)
    ranks = rank_pids(job)
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


def torchrun(folder: Path, *args: str) -> subprocess.Popen:
    options = ("--nnodes", "1", "--nproc-per-node", "2", "--master-addr", "127.0.0.1")
    command = [sys.executable, "-m", "torch.distributed.run", *options, "--master-port", str(jobs.free_port())]
    job = ["-m", "shardwright.cli", "train", "synthetic-dlrm", *jobs.KEYS, "run.name=one", *args]
    with open(folder / "stderr", "w") as errors:
        return subprocess.Popen([*command, *job], cwd=folder, stdout=subprocess.DEVNULL, stderr=errors)


def test_ranks_die_with_a_killed_torchrun(tmp_path):
    job = torchrun(tmp_path, "train.steps=0", "data.workers=0")
    jobs.wait_for_step(job, tmp_path / "runs/one", 4)
    ranks = rank_pids(job)
    assert len(ranks) == 2
    try:
        job.kill()
        assert job.wait() == -signal.SIGKILL
        jobs.wait_until(lambda: not any(map(jobs.is_alive, ranks)))
    finally:
        for pid in filter(jobs.is_alive, ranks):
            os.kill(pid, signal.SIGKILL)


def line_of(folder: Path) -> str:
    """The launcher's message about rank 1."""
    lines = [line for line in (folder / "stderr").read_text().splitlines() if line.startswith("shardwright: rank 1")]
    assert len(lines) == 1, (folder / "stderr").read_text()
    return lines[0]


def log_path(line: str) -> Path:
    match = re.search(r"its log: (\S+)", line)
    assert match, line
    return Path(match[1].rstrip(";"))


def test_the_message_about_a_killed_rank_has_its_host_signal_step_and_log(tmp_path):
    job = jobs.start(tmp_path, "train.steps=0", "data.workers=0")
    jobs.wait_for_step(job, tmp_path / "runs/one", 4)
    time.sleep(1.0)  # two heartbeats, which contain the step
    pid = rank_pids(job)[1]
    os.kill(pid, signal.SIGKILL)
    assert job.wait(jobs.SECONDS) == 137
    line = line_of(tmp_path)
    assert line.startswith(f"shardwright: rank 1 on host {platform.node()} (process {pid}) was killed by SIGKILL")
    assert int(re.search(r"of step (\d+)", line)[1]) >= 4
    assert log_path(line).exists() and log_path(line).name == "rank-1.log"
    assert "run.name=one run.resume=true" in line


def test_the_message_about_a_rank_that_exits_has_its_exit_code(tmp_path):
    job = jobs.start(
        tmp_path, "train.steps=0", "data.workers=0", "data.kind=dying:Dying", "data.last=5000", "data.shuffle=false"
    )
    assert job.wait(jobs.SECONDS) == 7
    line = line_of(tmp_path)
    assert f"rank 1 on host {platform.node()}" in line and "ended with exit code 7" in line


def test_the_log_of_a_rank_that_crashes_has_its_traceback(tmp_path):
    job = jobs.start(tmp_path, "train.steps=0", "data.workers=0")
    jobs.wait_for_step(job, tmp_path / "runs/one", 4)
    os.kill(rank_pids(job)[1], signal.SIGSEGV)
    assert job.wait(jobs.SECONDS) == 128 + signal.SIGSEGV
    line = line_of(tmp_path)
    assert "was killed by SIGSEGV" in line
    assert "Fatal Python error: Segmentation fault" in log_path(line).read_text()


@pytest.mark.parametrize("setting", ["tables.lr=-1", "plan.pins.nobody=row"])
def test_an_invalid_setting_is_one_line_without_messages_about_ranks(tmp_path, setting):
    job = jobs.start(tmp_path, "train.steps=4", setting)
    assert job.wait(jobs.SECONDS) == 2
    lines = (tmp_path / "stderr").read_text().splitlines()
    assert len({*lines}) == len(lines) and not [line for line in lines if "shardwright: rank" in line], lines

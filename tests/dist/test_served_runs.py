"""Runs of recipes with table servers: metrics equal those without servers, to the bit; a killed server is started
again, and a killed run leaves no server behind."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from table_servers import ServerProcess

RUN = (
    *("synthetic-dlrm", "train.batch_size=256", "train.steps=20", "train.log_every=5", "train.eval_every=10"),
    *("train.eval_samples=1000", "train.checkpoint_every=10"),
)
IN_MEMORY = ("plan.memory=12 MB",)  # of which 8.7 are for tables, which take 10
OVER_RANKS = ("ranks=2", "plan.memory=6 MB", "plan.pins.user=row")
START_SECONDS, END_SECONDS = 120.0, 60.0


def command(*args: str) -> list[str]:
    return [sys.executable, "-m", "shardwright.cli", "train", *RUN, *args]


def train(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    result = subprocess.run(command(*args), cwd=folder, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result


def metrics(folder: Path, name: str) -> list[dict[str, float]]:
    """The lines of a run, without times."""
    lines = map(json.loads, (folder / "runs" / name / "metrics.jsonl").read_text().splitlines())
    return [{key: line[key] for key in ("kind", "step", "loss", "ne", "auc") if key in line} for line in lines]


def plan(folder: Path, name: str) -> dict:
    return json.loads((folder / "runs" / name / "plan.json").read_text())


def server_processes(folder: Path, name: str) -> list[int]:
    """Processes of the table servers that a run has started."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            arguments, directory = path.read_bytes().decode().split("\0"), (path.parent / "cwd").readlink()
        except OSError:
            continue
        is_own = any(argument.startswith(f"runs/{name}/servers/journal-") for argument in arguments)
        if "serve-tables" in arguments and is_own and directory == folder:
            found.append(int(path.parent.name))
    return found


class Run:
    """A run that goes on while the test does something."""

    def __init__(self, folder: Path, name: str, *args: str) -> None:
        self.folder, self.name, self.output = folder, name, folder / f"{name}.out"
        with self.output.open("w") as output:
            self.process = subprocess.Popen(
                command(f"run.name={name}", *args), cwd=folder, stdout=output, stderr=subprocess.STDOUT
            )

    def wait_until(self, condition, seconds: float = START_SECONDS) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert self.process.poll() is None and time.monotonic() < deadline, self.output.read_text()
            time.sleep(0.05)

    def num_lines(self) -> int:
        path = self.folder / "runs" / self.name / "metrics.jsonl"
        return path.read_text().count("\n") if path.exists() else 0

    def servers(self) -> list[int]:
        return server_processes(self.folder, self.name)


def assert_served(folder: Path, name: str, num: int) -> None:
    """The run has had rows on servers, and has ended those that it has started."""
    made = plan(folder, name)
    assert made["servers"] == num and any(table["placement"]["tiers"][-1][0] == "servers" for table in made["tables"])
    moved = [json.loads(line)["missing"] for line in (folder / "runs" / name / "caches.jsonl").read_text().splitlines()]
    assert sum(moved) > 0
    assert not server_processes(folder, name) and not [*folder.glob(f"runs/{name}/servers/journal-*")]


def test_metrics_with_servers_are_those_without(tmp_path):
    """Also of a run that is resumed with servers that run already."""
    train(tmp_path, "run.name=memory")
    expected = metrics(tmp_path, "memory")
    train(tmp_path, *IN_MEMORY, "run.name=served", "servers.start=2", "train.steps=10")
    assert_served(tmp_path, "served", 2)
    process = ServerProcess()
    try:
        address = f'servers.addresses=["{process.address}"]'
        train(tmp_path, *IN_MEMORY, "run.name=served", address, "run.resume=true")
    finally:
        process.stop()
    assert_served(tmp_path, "served", 1)
    by_step = {(line["kind"], line["step"]): line for line in metrics(tmp_path, "served")}
    assert expected == [by_step[line["kind"], line["step"]] for line in expected]


def test_metrics_of_ranks_with_servers_are_those_with_rows_on_disk(tmp_path):
    train(tmp_path, "run.name=disk", *OVER_RANKS)
    train(tmp_path, "run.name=served", *OVER_RANKS, "servers.start=2")
    assert_served(tmp_path, "served", 2)
    assert metrics(tmp_path, "served") == metrics(tmp_path, "disk")


def test_a_killed_server_is_started_again(tmp_path):
    """With rows of ranks on servers, and with servers that own them."""
    often = ("train.steps=60", "train.checkpoint_every=0")  # a kill while a checkpoint is written makes it fail
    train(tmp_path, "run.name=memory", *often)
    for name, args in (("stored", IN_MEMORY), ("owned", ("servers.own=true",))):
        run = Run(tmp_path, name, *args, *often, "servers.start=1")
        for number in range(2):
            run.wait_until(lambda run=run, number=number: run.num_lines() > 2 * number)
            (server,) = run.servers()
            os.kill(server, signal.SIGKILL)
            run.wait_until(lambda run=run, server=server: run.servers() not in ([], [server]))
        assert run.process.wait(START_SECONDS) == 0, run.output.read_text()
        output = run.output.read_text()
        assert output.count("table server 0 was killed by SIGKILL (signal 9); started again with its journal") == 2
        assert metrics(tmp_path, name) == metrics(tmp_path, "memory")


def test_a_run_that_is_stopped_saves_and_one_that_is_killed_leaves_no_server(tmp_path):
    args = (*IN_MEMORY, "servers.start=2", "train.steps=100000", "train.checkpoint_every=0")
    stopped, killed = Run(tmp_path, "stopped", *args), Run(tmp_path, "killed", *args)
    stopped.wait_until(lambda: stopped.num_lines() > 0)
    for pid in (stopped.process.pid, *stopped.servers()):  # a scheduler signals all processes
        os.kill(pid, signal.SIGTERM)
    assert stopped.process.wait(START_SECONDS) == 128 + signal.SIGTERM, stopped.output.read_text()
    assert len([*tmp_path.glob("runs/stopped/checkpoint/step-*/manifest.json")]) == 1
    assert not stopped.servers()
    killed.wait_until(lambda: killed.num_lines() > 0)
    assert len(killed.servers()) == 2
    killed.process.kill()
    killed.process.wait()
    deadline = time.monotonic() + END_SECONDS
    while killed.servers():
        assert time.monotonic() < deadline
        time.sleep(0.05)

"""Helpers for launcher tests: start runs over ranks on this host, inspect their processes and ports, a dying rank."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from test_kill import last_step

KEYS = (
    "train.batch_size=256",
    "train.log_every=2",
    "train.eval_every=0",
    "train.eval_samples=0",
    "train.checkpoint_every=0",
)
SECONDS = 60.0  # time limit of every wait, on a loaded machine
# Samples of a click stream; rank 1 exits without a message when it reads beyond sample `last`.
DYING_SOURCE = """
import os
from dataclasses import dataclass
from shardwright.data.sources.synthetic import ClickStream

@dataclass(frozen=True)
class Dying(ClickStream):
    last: int = 0

    def take(self, indices):
        if os.environ.get("RANK") == "1" and indices.max() > self.last > 0:
            os._exit(7)
        return super().take(indices)
"""


def start(folder: Path, *args: str, prefix: Sequence[str] = (), ranks: int = 2) -> subprocess.Popen:
    """Start `shardwright train` as a process; its output goes to files in `folder`."""
    command = [*prefix, sys.executable, "-m", "shardwright.cli", "train", "synthetic-dlrm", *KEYS, f"ranks={ranks}"]
    (folder / "dying.py").write_text(DYING_SOURCE)
    with open(folder / "output", "a") as output, open(folder / "stderr", "w") as errors:
        return subprocess.Popen(
            [*command, "run.name=one", *args], cwd=folder, stdin=subprocess.DEVNULL, stdout=output, stderr=errors
        )


def wait_until(condition: Callable[[], object], explain: Callable[[], object] = lambda: "") -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, explain()
        time.sleep(0.02)


def wait_for_step(job: subprocess.Popen, run: Path, step: int) -> None:
    def has_passed() -> bool:
        assert job.poll() is None, (run.parents[1] / "stderr").read_text()
        return last_step(run) >= step

    wait_until(has_passed, lambda: f"step {last_step(run)} of {step}")


def process_tree(pid: int) -> list[int]:
    """Process ids of a process and all its descendants."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    pids = [pid]
    for parent_pid in pids:
        pids += [child for child, parent in parents.items() if parent == parent_pid]
    return pids


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


def listening_addresses(pid: int) -> list[tuple[str, int]]:
    """(address in the kernel's notation, port) of every TCP socket on which a process listens."""
    try:
        inodes = {os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir()}
        lines = [
            line.split()
            for name in ("tcp", "tcp6")
            for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]
        ]
    except OSError:
        return []
    addresses = [line[1].rpartition(":") for line in lines if line[3] == "0A" and f"socket:[{line[9]}]" in inodes]
    return [(address, int(port, 16)) for address, _, port in addresses]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]

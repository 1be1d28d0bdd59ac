"""Helpers for tests of the launcher: runs with ranks on this host, their processes and ports, a rank that dies."""

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
SECONDS = 60.0  # within which anything awaited must happen on a loaded machine
# Samples of a click stream; rank 1 ends without a word when it has read so many of them.
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


def start(where: Path, *words: str, prefix: Sequence[str] = (), ranks: int = 2) -> subprocess.Popen:
    """`shardwright train` as a process of its own; its output goes to files in `where`."""
    command = [*prefix, sys.executable, "-m", "shardwright.cli", "train", "synthetic-dlrm", *KEYS, f"ranks={ranks}"]
    (where / "dying.py").write_text(DYING_SOURCE)
    with open(where / "output", "a") as output, open(where / "complaints", "w") as errors:
        return subprocess.Popen(
            [*command, "run.name=one", *words], cwd=where, stdin=subprocess.DEVNULL, stdout=output, stderr=errors
        )


def wait_until(true: Callable[[], object], what: Callable[[], object] = lambda: "") -> None:
    end = time.monotonic() + SECONDS
    while not true():
        assert time.monotonic() < end, what()
        time.sleep(0.02)


def wait_for_step(job: subprocess.Popen, run: Path, step: int) -> None:
    def passed() -> bool:
        assert job.poll() is None, (run.parents[1] / "complaints").read_text()
        return last_step(run) >= step

    wait_until(passed, lambda: f"step {last_step(run)} of {step}")


def descendants(pid: int) -> list[int]:
    """A process and all its descendants."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    found = [pid]
    for one in found:
        found += [child for child, parent in parents.items() if parent == one]
    return found


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


def listening(pid: int) -> list[tuple[str, int]]:
    """The address (in the kernel's notation) and the port of every TCP socket on which a process listens."""
    try:
        inodes = {os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir()}
        lines = [
            line.split()
            for name in ("tcp", "tcp6")
            for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]
        ]
    except OSError:
        return []
    places = [line[1].rpartition(":") for line in lines if line[3] == "0A" and f"socket:[{line[9]}]" in inodes]
    return [(address, int(port, 16)) for address, _, port in places]


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]

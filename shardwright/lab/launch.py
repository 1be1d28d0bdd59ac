"""Every rank of a command in its host: torchrun's variables, output by rank, an end for all when one fails."""

import ctypes
import math
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from shardwright.errors import UserError
from shardwright.lab import cpu_quota, network
from shardwright.lab.shape import Shape

MASTER_PORT = 29_500
TERMINATION_GRACE_SECONDS = 5.0
SINGLE_THREAD_SCRIPT = (
    ': "${OMP_NUM_THREADS:=1}"; export OMP_NUM_THREADS; exec "$0" "$@"'  # unless the caller chose another
)
PR_SET_PDEATHSIG = 1

LineCallback = Callable[[int, str], None]


@dataclass(frozen=True, slots=True)
class RankExit:
    """How a run ended: the first rank that failed, or None, and its exit status; `late`: it ran too long."""

    rank: int | None = None
    status: int = 0
    timed_out: bool = False


def print_line(rank: int, line: str) -> None:
    print(f"[{rank}] {line}", flush=True)


def run(
    lab: str, shape: Shape, command: Sequence[str], on_line: LineCallback = print_line, timeout_seconds: float = 0.0
) -> RankExit:
    """Start the command as every rank, pass on what they print, and wait; past a time-out the status is 124."""
    processes: list[subprocess.Popen] = []
    try:
        for rank in range(shape.num_ranks):
            processes.append(_start(lab, shape, rank, command))
    except BaseException:
        _end(processes, [])
        raise
    return _follow(processes, on_line, timeout_seconds)


def rank_environment(shape: Shape, rank: int) -> dict[str, str]:
    """What torchrun tells a rank, the interface that Gloo is to use, and to leave links that have a rate to Gloo."""
    host = shape.host_of(rank)
    before = sum(one.ranks for one in shape.hosts[:host])
    shaped = {"SHARDWRIGHT_MEMORY": "0"} if shape.hosts[host].local else {}
    return shaped | {
        "RANK": str(rank),
        "WORLD_SIZE": str(shape.num_ranks),
        "LOCAL_RANK": str(rank - before),
        "LOCAL_WORLD_SIZE": str(shape.hosts[host].ranks),
        "GROUP_RANK": str(host),
        "GROUP_WORLD_SIZE": str(len(shape.hosts)),
        "MASTER_ADDR": network.rank_address(0),
        "MASTER_PORT": str(MASTER_PORT),
        "GLOO_SOCKET_IFNAME": "eth0",
    }


def assign_cores(shape: Shape, available_cores: Sequence[int]) -> list[int]:
    """For each rank the core that has the least to do so far; the first of those."""
    busy, chosen = dict.fromkeys(available_cores, 0.0), []
    for rank in range(shape.num_ranks):
        chosen.append(min(busy, key=lambda core: round(busy[core], 6)))
        busy[chosen[-1]] += shape.hosts[shape.host_of(rank)].cpu
    return chosen


def check_quotas(shape: Shape, available_cores: Sequence[int]) -> None:
    """Refuse quotas that the cores cannot give: ranks keep to their core, and two with 0.6 have half of it each."""
    pinned: dict[int, list[int]] = {}
    for rank, core in enumerate(assign_cores(shape, available_cores)):
        if 0 < shape.hosts[shape.host_of(rank)].cpu <= 1:
            pinned.setdefault(core, []).append(rank)
    for core, ranks in pinned.items():
        total = sum(shape.hosts[shape.host_of(rank)].cpu for rank in ranks)
        if total > 1 + 1e-6:
            raise UserError(
                f"the quotas of ranks {', '.join(map(str, ranks))} sum to {total:g} of core {core}, which they share; "
                f"give each at most {math.floor(100 / len(ranks)) / 100:g}, or start fewer ranks"
            )


def _start(lab: str, shape: Shape, rank: int, command: Sequence[str]) -> subprocess.Popen:
    group = cpu_quota.group_path(lab, rank)
    host = shape.hosts[shape.host_of(rank)]
    of_lab = {"SHARDWRIGHT_LAB": lab, **({"SHARDWRIGHT_LAB_CPU": str(host.cpu)} if host.cpu else {})}
    told = [f"{name}={value}" for name, value in (rank_environment(shape, rank) | of_lab).items()]
    core = assign_cores(shape, sorted(os.sched_getaffinity(0)))[rank]
    libc, launcher = ctypes.CDLL(None), os.getpid()

    def enter() -> None:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != launcher:  # it died before the line above, and would never send that signal
            os._exit(128 + signal.SIGKILL)
        if host.cpu:
            Path(group, "cgroup.procs").write_text(str(os.getpid()))
        if 0 < host.cpu <= 1:  # the times of ranks that move between cores differ twofold from run to run
            os.sched_setaffinity(0, {core})

    return subprocess.Popen(
        [
            "ip",
            "netns",
            "exec",
            network.namespace(lab, f"r{rank}"),
            "env",
            *told,
            "sh",
            "-c",
            SINGLE_THREAD_SCRIPT,
            *command,
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=enter,
    )


def _follow(processes: Sequence[subprocess.Popen], say: LineCallback, timeout_seconds: float) -> RankExit:
    last = time.monotonic() + timeout_seconds if timeout_seconds else float("inf")
    streams = [process.stdout for process in processes if process.stdout is not None]
    with selectors.DefaultSelector() as selector:
        for rank, stream in enumerate(streams):
            os.set_blocking(stream.fileno(), False)
            selector.register(stream, selectors.EVENT_READ, _Lines(rank, stream, say))
        lines = [selector.get_key(stream).data for stream in streams]
        try:
            while time.monotonic() < last:
                for key, _ in selector.select(0.05):
                    if not key.data.passed_on():
                        selector.unregister(key.fileobj)
                ends = [process.poll() for process in processes]
                failed = [rank for rank, status in enumerate(ends) if status]
                if failed:
                    return RankExit(failed[0], ends[failed[0]] or 0)
                if all(status == 0 for status in ends):
                    return RankExit()
            late = next((rank for rank, process in enumerate(processes) if process.poll() is None), 0)
            return RankExit(late, 124, timed_out=True)
        finally:
            _end(processes, lines)


class _Lines:
    """What one rank has printed and nobody has seen yet."""

    def __init__(self, rank: int, stream: IO[bytes], say: LineCallback) -> None:
        self.rank, self.stream, self.say, self.begun = rank, stream, say, b""

    def passed_on(self) -> bool:
        """What is there now; whether there may be more to come."""
        found = self.stream.read(1 << 16)
        if found is None:
            return True
        *whole, self.begun = (self.begun + found).split(b"\n")
        for line in whole:
            self.say(self.rank, line.decode(errors="replace"))
        return bool(found)

    def last(self) -> None:
        """The rest, when nobody writes any more."""
        for _ in range(64):
            if not self.passed_on():
                break
        if self.begun:
            self.say(self.rank, self.begun.decode(errors="replace"))
            self.begun = b""


def _end(processes: Sequence[subprocess.Popen], lines: Sequence["_Lines"]) -> None:
    """End what still runs, politely, then for good; pass on its last words."""
    for kind, seconds in ((signal.SIGTERM, TERMINATION_GRACE_SECONDS), (signal.SIGKILL, TERMINATION_GRACE_SECONDS)):
        running = [process for process in processes if process.poll() is None]
        for process in running:
            os.killpg(process.pid, kind)
        last = time.monotonic() + seconds
        while any(process.poll() is None for process in running) and time.monotonic() < last:
            for line in lines:
                line.passed_on()
            time.sleep(0.02)
    for process in processes:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # what a rank has left behind
    for line in lines:
        line.last()
        line.stream.close()

"""Run a command as every rank of a lab: torchrun's variables, output by rank, all end if one fails."""

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
from shardwright.lab.shape import Host, Shape

MASTER_PORT = 29_500
TERMINATION_GRACE_SECONDS = 5.0
SINGLE_THREAD_SCRIPT = ': "${OMP_NUM_THREADS:=1}"; export OMP_NUM_THREADS; exec "$0" "$@"'  # unless the caller set it
PR_SET_PDEATHSIG = 1

LineCallback = Callable[[int, str], None]


@dataclass(frozen=True, slots=True)
class RankExit:
    """The first rank that failed, or None, and its exit status; `timed_out`: the run took too long."""

    rank: int | None = None
    status: int = 0
    timed_out: bool = False


def print_line(rank: int, line: str) -> None:
    print(f"[{rank}] {line}", flush=True)


def run(
    lab: str, shape: Shape, command: Sequence[str], on_line: LineCallback = print_line, timeout_seconds: float = 0.0
) -> RankExit:
    """Start the command as every rank, pass lines of output to `on_line` and wait; 124: time-out."""
    processes: list[subprocess.Popen] = []
    try:
        for rank in range(shape.num_ranks):
            processes.append(_start(lab, shape, rank, command))
    except BaseException:
        _terminate(processes, [])
        raise
    return _follow(processes, on_line, timeout_seconds)


def rank_environment(shape: Shape, rank: int) -> dict[str, str]:
    """torchrun's variables and Gloo's interface."""
    host = shape.host_of(rank)
    first_rank = sum(other.ranks for other in shape.hosts[:host])
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(shape.num_ranks),
        "LOCAL_RANK": str(rank - first_rank),
        "LOCAL_WORLD_SIZE": str(shape.hosts[host].ranks),
        "GROUP_RANK": str(host),
        "GROUP_WORLD_SIZE": str(len(shape.hosts)),
        "MASTER_ADDR": network.rank_address(0),
        "MASTER_PORT": str(MASTER_PORT),
        "GLOO_SOCKET_IFNAME": "eth0",
    }


def lab_environment(lab: str, host: Host) -> dict[str, str]:
    """The name of the lab, and the CPU quota and the link rate of a rank on this host where the shape has them."""
    variables = {"SHARDWRIGHT_LAB": lab, "SHARDWRIGHT_LAB_CPU": host.cpu, "SHARDWRIGHT_LAB_LINK": host.local}
    return {name: str(value) for name, value in variables.items() if value}


def assign_cores(shape: Shape, available_cores: Sequence[int]) -> list[int]:
    """A core for each rank: the one with the smallest sum of quotas so far, the first of equals."""
    load, cores = dict.fromkeys(available_cores, 0.0), []
    for rank in range(shape.num_ranks):
        cores.append(min(load, key=lambda core: round(load[core], 6)))
        load[cores[-1]] += shape.hosts[shape.host_of(rank)].cpu
    return cores


def check_quotas(shape: Shape, available_cores: Sequence[int]) -> None:
    """Fail if the quotas on a core exceed it: ranks are pinned, so two with 0.6 would get half each."""
    ranks_by_core: dict[int, list[int]] = {}
    for rank, core in enumerate(assign_cores(shape, available_cores)):
        if 0 < shape.hosts[shape.host_of(rank)].cpu <= 1:
            ranks_by_core.setdefault(core, []).append(rank)
    for core, ranks in ranks_by_core.items():
        total = sum(shape.hosts[shape.host_of(rank)].cpu for rank in ranks)
        if total > 1 + 1e-6:
            raise UserError(
                f"the quotas of ranks {', '.join(map(str, ranks))} sum to {total:g} of core {core}, which they share; "
                f"give each at most {math.floor(100 / len(ranks)) / 100:g}, or start fewer ranks"
            )


def _start(lab: str, shape: Shape, rank: int, command: Sequence[str]) -> subprocess.Popen:
    group = cpu_quota.group_path(lab, rank)
    host = shape.hosts[shape.host_of(rank)]
    environment = rank_environment(shape, rank) | lab_environment(lab, host)
    variables = [f"{name}={value}" for name, value in environment.items()]
    core = assign_cores(shape, sorted(os.sched_getaffinity(0)))[rank]
    libc, launcher = ctypes.CDLL(None), os.getpid()

    def enter() -> None:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != launcher:  # the launcher died before the line above, so the signal will not come
            os._exit(128 + signal.SIGKILL)
        if host.cpu:
            Path(group, "cgroup.procs").write_text(str(os.getpid()))
        if 0 < host.cpu <= 1:  # times of ranks that migrate between cores differ twofold from run to run
            os.sched_setaffinity(0, {core})

    return subprocess.Popen(
        [
            "ip",
            "netns",
            "exec",
            network.namespace(lab, f"r{rank}"),
            "env",
            *variables,
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


def _follow(processes: Sequence[subprocess.Popen], on_line: LineCallback, timeout_seconds: float) -> RankExit:
    deadline = time.monotonic() + timeout_seconds if timeout_seconds else float("inf")
    streams = [process.stdout for process in processes if process.stdout is not None]
    with selectors.DefaultSelector() as selector:
        for rank, stream in enumerate(streams):
            os.set_blocking(stream.fileno(), False)
            selector.register(stream, selectors.EVENT_READ, _RankOutput(rank, stream, on_line))
        outputs = [selector.get_key(stream).data for stream in streams]
        try:
            while time.monotonic() < deadline:
                for key, _ in selector.select(0.05):
                    if not key.data.pass_on():
                        selector.unregister(key.fileobj)
                statuses = [process.poll() for process in processes]
                failed_ranks = [rank for rank, status in enumerate(statuses) if status]
                if failed_ranks:
                    return RankExit(failed_ranks[0], statuses[failed_ranks[0]] or 0)
                if all(status == 0 for status in statuses):
                    return RankExit()
            running_rank = next((rank for rank, process in enumerate(processes) if process.poll() is None), 0)
            return RankExit(running_rank, 124, timed_out=True)
        finally:
            _terminate(processes, outputs)


class _RankOutput:
    """The output of one rank, passed on line by line."""

    def __init__(self, rank: int, stream: IO[bytes], on_line: LineCallback) -> None:
        self.rank, self.stream, self.on_line, self.partial_line = rank, stream, on_line, b""

    def pass_on(self) -> bool:
        """Pass on the complete lines that are available; returns whether more may come."""
        data = self.stream.read(1 << 16)
        if data is None:
            return True
        *complete, self.partial_line = (self.partial_line + data).split(b"\n")
        for line in complete:
            self.on_line(self.rank, line.decode(errors="replace"))
        return bool(data)

    def flush(self) -> None:
        """Pass on the rest of the output, after the processes have ended."""
        for _ in range(64):
            if not self.pass_on():
                break
        if self.partial_line:
            self.on_line(self.rank, self.partial_line.decode(errors="replace"))
            self.partial_line = b""


def _terminate(processes: Sequence[subprocess.Popen], outputs: Sequence["_RankOutput"]) -> None:
    """Terminate running ranks, by SIGTERM, then by SIGKILL, and pass on their last output."""
    for signal_, seconds in ((signal.SIGTERM, TERMINATION_GRACE_SECONDS), (signal.SIGKILL, TERMINATION_GRACE_SECONDS)):
        alive = [process for process in processes if process.poll() is None]
        for process in alive:
            os.killpg(process.pid, signal_)
        deadline = time.monotonic() + seconds
        while any(process.poll() is None for process in alive) and time.monotonic() < deadline:
            for output in outputs:
                output.pass_on()
            time.sleep(0.02)
    for process in processes:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # processes that a rank started
    for output in outputs:
        output.flush()
        output.stream.close()

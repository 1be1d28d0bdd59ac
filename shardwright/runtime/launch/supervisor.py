"""Supervise the ranks that a launcher has started on this host: output, signals, and which rank failed first.

Each rank has its own session, so that a signal to the launcher's process group, such as Ctrl-C, reaches it only once,
through the launcher. Its stderr is passed on and also written to its log.
"""

import os
import platform
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO

from shardwright.runtime.launch.signals import SECONDS_BETWEEN_SIGNALS, STOP_SIGNALS, install_handler

POLL_SECONDS = 0.2
SECONDS_TO_FOLLOW = 15.0  # granted to the other ranks to end after one has stopped on request
SECONDS_TO_DRAIN = 2.0  # to read the output of a dead rank while other processes hold its pipe open
STOP_CODES = tuple(128 + number for number in STOP_SIGNALS)
OUT_OF_MEMORY_KILLS = "oom_kill "  # the line of /proc/vmstat


@dataclass(frozen=True, slots=True)
class ExitReport:
    """How an attempt to run all ranks ended; `rank` is the one that failed first, None if none failed."""

    code: int = 0
    failed_rank: int | None = None
    description: str = ""  # the rank and what ended it
    is_silent: bool = True  # whether the rank has not printed the reason itself


class Supervisor:
    """Starts ranks, passes signals on to them, and ends all when one fails. Used as a context, in the main thread."""

    def __init__(self, log_directory: Path) -> None:
        self.log_directory = log_directory
        self.signal = 0  # the first that asked all ranks to stop
        self._since = 0.0
        self._killed = False
        self._processes: list[subprocess.Popen[bytes]] = []
        self._handlers = install_handler(self._receive)

    def __enter__(self) -> "Supervisor":
        self._handlers.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._handlers.__exit__(None, None, None)
        self._kill()
        self._reap()

    def run(self, command: Sequence[str], environments: Sequence[Mapping[str, str]]) -> ExitReport:
        """Run the command once with each environment, by rank, until all have ended."""
        kills = _out_of_memory_kills()
        self._processes = []
        with selectors.DefaultSelector() as pipes:
            for rank, environment in enumerate(environments):
                process = subprocess.Popen(
                    command,
                    env=dict(environment),
                    stdin=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    start_new_session=True,
                )
                self._processes.append(process)
                assert process.stderr is not None
                pipes.register(process.stderr, selectors.EVENT_READ, self.log_path(rank).open("ab", buffering=0))
            if self.signal:
                self._forward()
            try:
                self._follow(pipes)
                codes = [process.returncode for process in self._processes]
                return self._judge(codes, _out_of_memory_kills() > kills)
            finally:
                self._kill()
                self._reap()
                _drain(pipes)

    def log_path(self, rank: int) -> Path:
        return self.log_directory / f"rank-{rank}.log"

    def _follow(self, pipes: selectors.BaseSelector) -> None:
        """Until all ranks have ended, or one has failed."""
        last = float("inf")
        while any(process.poll() is None for process in self._processes) and time.monotonic() < last:
            _pass_on(pipes, POLL_SECONDS)
            codes = [process.poll() for process in self._processes]
            if any(code and code not in STOP_CODES for code in codes):
                return
            if last == float("inf") and any(code in STOP_CODES for code in codes):
                last = time.monotonic() + SECONDS_TO_FOLLOW

    def _judge(self, codes: Sequence[int | None], out_of_memory: bool) -> ExitReport:
        """Find the rank that failed first. The code None: it was still running when another failed or stopped."""
        failed = [rank for rank, code in enumerate(codes) if code and code not in STOP_CODES]
        if self._killed or self.signal and all(codes[rank] == -self.signal for rank in failed):
            return ExitReport(128 + self.signal if any(code != 0 for code in codes) else 0)
        if not failed:
            return ExitReport(max((code or 0 for code in codes), default=0))
        # If several failed at once, those that exit with 2 may only have reported the failure of another.
        rank = min(failed, key=lambda rank: (codes[rank] == 2, rank))
        code = codes[rank] or 0
        who = f"rank {rank} on host {platform.node()} (process {self._processes[rank].pid})"
        silent = code != 2 or not self.log_path(rank).stat().st_size
        return ExitReport(code if code > 0 else 128 - code, rank, f"{who} {describe_exit(code, out_of_memory)}", silent)

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        if not self.signal:
            self.signal, self._since = number, time.monotonic()
            self._forward()
        elif time.monotonic() - self._since >= SECONDS_BETWEEN_SIGNALS:
            self._killed = True
            self._kill()

    def _forward(self) -> None:
        for process in self._processes:
            process.send_signal(self.signal)

    def _kill(self) -> None:
        """End ranks that still run, with their loader workers: a checkpoint is complete or absent at any moment.

        The signal handler calls it too, and must not wait for a process that the main thread is waiting for.
        """
        for process in self._processes:
            if process.returncode is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)

    def _reap(self) -> None:
        for process in self._processes:
            process.wait()


def describe_exit(code: int, out_of_memory: bool = False) -> str:
    """What ended a process, by its subprocess exit code. `out_of_memory`: the kernel has killed some process."""
    if code > 0:
        return f"ended with exit code {code}"
    name = signal.Signals(-code).name if -code in signal.Signals.__members__.values() else f"signal {-code}"
    by_kernel = "; while it ran, the kernel killed processes of this host because memory ran out"
    return f"was killed by {name} (signal {-code}{by_kernel * (code == -signal.SIGKILL and out_of_memory)})"


def _out_of_memory_kills() -> int:
    """Number of processes that the kernel has killed since boot because memory ran out; 0 if unknown."""
    with suppress(OSError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith(OUT_OF_MEMORY_KILLS):
                return int(line.split()[1])
    return 0


def _pass_on(pipes: selectors.BaseSelector, seconds: float) -> bool:
    """Copy the ranks' output to their logs and to stderr; returns whether there was any."""
    if not pipes.get_map():
        time.sleep(seconds)
        return False
    ready = pipes.select(seconds)
    for key, _ in ready:
        pipe: IO[bytes] = key.fileobj  # pyright: ignore[reportAssignmentType]
        if words := os.read(pipe.fileno(), 1 << 16):
            key.data.write(words)
            with suppress(OSError):  # nobody reads it any longer
                sys.stderr.flush()
                os.write(2, words)
        else:
            pipes.unregister(pipe)
            pipe.close()
            key.data.close()
    return bool(ready)


def _drain(pipes: selectors.BaseSelector) -> None:
    last = time.monotonic() + SECONDS_TO_DRAIN
    while pipes.get_map() and time.monotonic() < last:
        _pass_on(pipes, 0.05)
    for key in list(pipes.get_map().values()):
        pipes.unregister(key.fileobj)
        key.fileobj.close()  # pyright: ignore[reportAttributeAccessIssue]
        key.data.close()

"""Supervise the ranks started on this host: output, signals, and which rank failed first.

Each rank has its own session, so that a signal to the launcher's process group, such as Ctrl-C, reaches it only once,
through the launcher. Its stderr is copied to the launcher's stderr and to its log.
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
SECONDS_TO_FOLLOW = 15.0  # time in which the other ranks must exit after one has stopped on a signal
ERROR_PREFIX = b"shardwright: "  # of an error of one line
SECONDS_TO_DRAIN = 2.0  # time limit for reading the output of a dead rank while other processes hold its pipe open
STOP_CODES = tuple(128 + number for number in STOP_SIGNALS)
OUT_OF_MEMORY_KILLS = "oom_kill "  # line prefix in /proc/vmstat


@dataclass(frozen=True, slots=True)
class ExitReport:
    """How an attempt to run all ranks ended; `failed_rank` failed first, None if none failed."""

    code: int = 0
    failed_rank: int | None = None
    description: str = ""  # the rank, its host, its process id, and what ended it
    is_silent: bool = True  # whether the rank has not printed the reason


class Supervisor:
    """Starts ranks, forwards signals, and kills all when one fails. A context, in the main thread."""

    def __init__(self, log_directory: Path) -> None:
        self.log_directory = log_directory
        self.signal = 0  # the first stop signal received
        self._signal_time = 0.0
        self._was_killed = False  # all ranks, by a second signal
        self._processes: list[subprocess.Popen[bytes]] = []
        self._errors: set[bytes] = set()  # that ranks have reported
        self._handlers = install_handler(self._handle_signal)

    def __enter__(self) -> "Supervisor":
        self._handlers.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._handlers.__exit__(None, None, None)
        self._kill()
        self._reap()

    def run(self, command: Sequence[str], environments: Sequence[Mapping[str, str]]) -> ExitReport:
        """Run the command once with each environment, by rank, until all have ended."""
        kills_before = _count_out_of_memory_kills()
        self._processes = []
        self._errors = set[bytes]()
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
                self._forward_signal()
            try:
                self._wait(pipes)
                codes = [process.returncode for process in self._processes]
                return self._make_report(codes, _count_out_of_memory_kills() > kills_before)
            finally:
                self._kill()
                self._reap()
                _drain(pipes, self._errors)

    def log_path(self, rank: int) -> Path:
        return self.log_directory / f"rank-{rank}.log"

    def _wait(self, pipes: selectors.BaseSelector) -> None:
        """Copy output until all ranks have ended, or one has failed.

        Also returns SECONDS_TO_FOLLOW after the first rank stopped on a signal.
        """
        deadline = float("inf")
        while any(process.poll() is None for process in self._processes) and time.monotonic() < deadline:
            _copy_output(pipes, POLL_SECONDS, self._errors)
            codes = [process.poll() for process in self._processes]
            if any(code and code not in STOP_CODES for code in codes):
                return
            if deadline == float("inf") and any(code in STOP_CODES for code in codes):
                deadline = time.monotonic() + SECONDS_TO_FOLLOW

    def _make_report(self, codes: Sequence[int | None], oom: bool) -> ExitReport:
        """Find the rank that failed first; the code of a rank that was still running is None."""
        failed_ranks = [rank for rank, code in enumerate(codes) if code and code not in STOP_CODES]
        if self._was_killed or self.signal and all(codes[rank] == -self.signal for rank in failed_ranks):
            return ExitReport(128 + self.signal if any(code != 0 for code in codes) else 0)
        if not failed_ranks:
            return ExitReport(max((code or 0 for code in codes), default=0))
        # If several failed at once, ranks with exit code 2 may only have reported the failure of another rank.
        rank = min(failed_ranks, key=lambda rank: (codes[rank] == 2, rank))
        code = codes[rank] or 0
        name = f"rank {rank} on host {platform.node()} (process {self._processes[rank].pid})"
        is_silent = code != 2 or not self.log_path(rank).stat().st_size
        return ExitReport(code if code > 0 else 128 - code, rank, f"{name} {describe_exit(code, oom)}", is_silent)

    def _handle_signal(self, number: int, _frame: FrameType | None) -> None:
        if not self.signal:
            self.signal, self._signal_time = number, time.monotonic()
            self._forward_signal()
        elif time.monotonic() - self._signal_time >= SECONDS_BETWEEN_SIGNALS:
            self._was_killed = True
            self._kill()

    def _forward_signal(self) -> None:
        for process in self._processes:
            process.send_signal(self.signal)

    def _kill(self) -> None:
        """Kill running ranks with their loader workers; a checkpoint is complete or absent at any time.

        The signal handler calls this, too, and must not wait for a process that the main thread is waiting for.
        """
        for process in self._processes:
            if process.returncode is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)

    def _reap(self) -> None:
        for process in self._processes:
            process.wait()


def describe_exit(code: int, out_of_memory: bool = False) -> str:
    """Describe what ended a process with subprocess exit code `code`.

    `out_of_memory`: while it ran, the kernel killed some process of this host because memory ran out.
    """
    if code > 0:
        return f"ended with exit code {code}"
    name = signal.Signals(-code).name if -code in signal.Signals.__members__.values() else f"signal {-code}"
    kernel_note = "; while it ran, the kernel killed processes of this host because memory ran out"
    return f"was killed by {name} (signal {-code}{kernel_note * (code == -signal.SIGKILL and out_of_memory)})"


def _count_out_of_memory_kills() -> int:
    """Number of processes that the kernel has killed since boot because memory ran out; 0 if unknown."""
    with suppress(OSError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith(OUT_OF_MEMORY_KILLS):
                return int(line.split()[1])
    return 0


def _copy_output(pipes: selectors.BaseSelector, seconds: float, errors: set[bytes]) -> bool:
    """Copy the ranks' output to their logs and to stderr; return whether there was any.

    `errors`: the errors printed so far; all ranks may report the same one, which is printed once.
    """
    if not pipes.get_map():
        time.sleep(seconds)
        return False
    ready = pipes.select(seconds)
    for key, _ in ready:
        pipe: IO[bytes] = key.fileobj  # pyright: ignore[reportAssignmentType]
        if output := os.read(pipe.fileno(), 1 << 16):
            key.data.write(output)
            if output in errors:
                continue
            errors |= {output} if output.startswith(ERROR_PREFIX) else set()
            with suppress(OSError):  # stderr has no reader any more
                sys.stderr.flush()
                os.write(2, output)
        else:
            pipes.unregister(pipe)
            pipe.close()
            key.data.close()
    return bool(ready)


def _drain(pipes: selectors.BaseSelector, errors: set[bytes]) -> None:
    """Copy the remaining output of dead ranks, then close their pipes and logs."""
    deadline = time.monotonic() + SECONDS_TO_DRAIN
    while pipes.get_map() and time.monotonic() < deadline:
        _copy_output(pipes, 0.05, errors)
    for key in list(pipes.get_map().values()):
        pipes.unregister(key.fileobj)
        key.fileobj.close()  # pyright: ignore[reportAttributeAccessIssue]
        key.data.close()

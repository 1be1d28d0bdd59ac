"""Turns of two jobs: one trains while the other sleeps. Requests and replies go through named pipes.

A shared folder has two pipes per job. A `TurnClient(folder, job)` requests a number of steps of one of the job's sides
and sleeps until the reply. In between, the job's first rank sleeps in `TurnServer.turns`, and its other ranks sleep in
`broadcast`. Nothing polls. This module imports neither torch nor Shardwright at the top, so that both ends can run in
environments of their own.
"""

import json
import os
import select
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

Broadcast = Callable[[bytes], bytes]  # returns the first rank's argument on every rank


def make_broadcast(group: Any) -> Broadcast:
    """A broadcast over a Shardwright group; the other ranks sleep in it until the first rank has a line."""
    import torch

    from shardwright.comm import collective

    def broadcast(line: bytes) -> bytes:
        size = collective.broadcast(torch.tensor([len(line)]), 0, group).wait()
        text = torch.tensor(list(line) or [0] * int(size), dtype=torch.uint8)
        return bytes(collective.broadcast(text, 0, group).wait().tolist())

    return broadcast


class _Pipe:
    """A named pipe of JSON lines; open both ways, so that opening never blocks and reads see no end of file."""

    def __init__(self, path: Path) -> None:
        with suppress(FileExistsError):
            os.mkfifo(path)
        self.path, self._buffer = path, b""
        self._handle = os.open(path, os.O_RDWR)

    def write(self, message: dict[str, Any]) -> None:
        text = json.dumps(message).encode() + b"\n"
        while text:
            text = text[os.write(self._handle, text) :]

    def read(self, seconds: float | None = None) -> dict[str, Any]:
        while b"\n" not in self._buffer:
            if not select.select([self._handle], [], [], seconds)[0]:
                raise TimeoutError(f"{self.path}: nothing to read within {seconds:g} s")
            self._buffer += os.read(self._handle, 1 << 16)
        line, _, self._buffer = self._buffer.partition(b"\n")
        return json.loads(line)


class JobFailed(RuntimeError):
    """A job ended too early."""


class TurnClient:
    """The benchmark's end: requests turns of a job."""

    def __init__(self, folder: str | Path, job: str) -> None:
        self._requests, self._replies = (_Pipe(Path(folder) / f"{job}.{pipe}") for pipe in ("requests", "replies"))

    def wait_ready(self, seconds: float = 600.0) -> dict[str, Any]:
        """Wait until the job is built; returns its first reply. Call it before the first turn."""
        return self._read_reply(seconds)

    def run_turn(self, side: str, warm: int, steps: int, seconds: float = 600.0) -> dict[str, Any]:
        """Run a turn and return the job's reply; raises TimeoutError if it takes longer than `seconds`."""
        self._requests.write({"side": side, "warm": warm, "steps": steps})
        return self._read_reply(seconds)

    def fail(self, reason: str) -> None:
        """Raise JobFailed in this and every later wait for a reply; may be called from any thread."""
        self._replies.write({"failed": reason})

    def _read_reply(self, seconds: float) -> dict[str, Any]:
        reply = self._replies.read(seconds)
        if "failed" in reply:
            raise JobFailed(reply["failed"])
        return reply

    def end(self) -> None:
        """End the job."""
        self._requests.write({"end": True})


class TurnServer:
    """The job's end, on each of its ranks."""

    def __init__(self, folder: str | Path, job: str, rank: int, broadcast: Broadcast) -> None:
        self._broadcast = broadcast
        pipes = ("requests", "replies") if rank == 0 else ()
        self._pipes = [_Pipe(Path(folder) / f"{job}.{pipe}") for pipe in pipes]

    def reply(self, message: dict[str, Any]) -> None:
        """Send the first rank's reply; a no-op on other ranks."""
        if self._pipes:
            self._pipes[1].write(message)

    def turns(self) -> Iterator[tuple[str, int, int]]:
        """Side, warm-up steps and timed steps of each requested turn, until the client ends the job."""
        while True:
            line = json.dumps(self._pipes[0].read()).encode() if self._pipes else b""
            request = json.loads(self._broadcast(line))
            if "end" in request:
                return
            yield request["side"], request["warm"], request["steps"]

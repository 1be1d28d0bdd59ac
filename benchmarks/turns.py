"""Two jobs alive at once, of which one trains while the other sleeps: who asks, and who is asked, through named pipes.

A folder that all share has two pipes for a job. Whoever holds `Asker(folder, job)` says which of the job's sides is to
do how many steps, and sleeps until the answer is there; the job's first rank sleeps in `Asked.turns` in between, its
other ranks in whatever `share` waits in: a broadcast. Nobody polls. Nothing of torch or of Shardwright is imported
with this: each end may run in an environment of its own.
"""

import json
import os
import select
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

Share = Callable[[bytes], bytes]  # what the first rank gives it, on every rank


def shared(group: Any) -> Share:
    """Over a group of ours: the others sleep in the broadcast until the first rank's line is there."""
    import torch

    from shardwright.comm import collective

    def share(line: bytes) -> bytes:
        size = collective.broadcast(torch.tensor([len(line)]), 0, group).wait()
        text = torch.tensor(list(line) or [0] * int(size), dtype=torch.uint8)
        return bytes(collective.broadcast(text, 0, group).wait().tolist())

    return share


class _Pipe:
    """Lines of JSON one way. Open for both, so that opening never waits and a missing end is not an end of file."""

    def __init__(self, path: Path) -> None:
        with suppress(FileExistsError):
            os.mkfifo(path)
        self.path, self._begun = path, b""
        self._end = os.open(path, os.O_RDWR)

    def put(self, line: dict[str, Any]) -> None:
        text = json.dumps(line).encode() + b"\n"
        while text:
            text = text[os.write(self._end, text) :]

    def get(self, seconds: float | None = None) -> dict[str, Any]:
        while b"\n" not in self._begun:
            if not select.select([self._end], [], [], seconds)[0]:
                raise TimeoutError(f"{self.path}: nothing came in {seconds:g} s")
            self._begun += os.read(self._end, 1 << 16)
        line, _, self._begun = self._begun.partition(b"\n")
        return json.loads(line)


class JobFailed(RuntimeError):
    """A job has ended too early."""


class Asker:
    """Asks a job for its turns."""

    def __init__(self, folder: str | Path, job: str) -> None:
        self._asked, self._told = (_Pipe(Path(folder) / f"{job}.{way}") for way in ("asked", "told"))

    def ready(self, seconds: float = 600.0) -> dict[str, Any]:
        """What the job says once it is built; before the first turn."""
        return self._answer(seconds)

    def turn(self, side: str, warm: int, steps: int, seconds: float = 600.0) -> dict[str, Any]:
        """The job's answer; TimeoutError where it takes longer than `seconds`."""
        self._asked.put({"side": side, "warm": warm, "steps": steps})
        return self._answer(seconds)

    def fail(self, reason: str) -> None:
        """Raise JobFailed in this and every later wait for an answer; may be called from any thread."""
        self._told.put({"failed": reason})

    def _answer(self, seconds: float) -> dict[str, Any]:
        line = self._told.get(seconds)
        if "failed" in line:
            raise JobFailed(line["failed"])
        return line

    def end(self) -> None:
        self._asked.put({"end": True})


class Asked:
    """A job that is asked, on each of its ranks."""

    def __init__(self, folder: str | Path, job: str, rank: int, share: Share) -> None:
        self._share = share
        self._pipes = [_Pipe(Path(folder) / f"{job}.{way}") for way in ("asked", "told")] if rank == 0 else []

    def tell(self, line: dict[str, Any]) -> None:
        """The first rank's answer; the others' is not sent."""
        if self._pipes:
            self._pipes[1].put(line)

    def turns(self) -> Iterator[tuple[str, int, int]]:
        """Side, warm steps and counted steps of each turn, until the asker has ended."""
        while True:
            line = json.dumps(self._pipes[0].get()).encode() if self._pipes else b""
            asked = json.loads(self._share(line))
            if "end" in asked:
                return
            yield asked["side"], asked["warm"], asked["steps"]

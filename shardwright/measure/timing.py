"""Times calls on all ranks alike: they start together and agree how often.

A machine's speed wanders by some percent from one tenth of a second to the next, and a rank under a cpu quota runs and
waits by turns of 20 ms. So a time is that of many calls in a row, never the best of short ones, and the median of three
such rows: another process that runs for a moment spoils one of them. Where a virtual machine
says how long its cores ran for others meanwhile, calls of which they took much are timed again.
"""

import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from statistics import median

import torch

from shardwright.comm import collective
from shardwright.comm.mesh import Group
from shardwright.spec.cluster import Sample

MOST_CALLS = 4000
PRIMING_SECONDS = 0.025  # a little more than the period of a quota in the lab
STOLEN = 0.05  # share of the cores' time from which on calls are timed again
FAULTS = 64  # pages a call is given anew, from which on it is timed again: a job keeps the memory it frees
ROWS = 3
TRIES = 4
SPARE_SECONDS = 4.0  # of a clock, for tries beyond the first


class Clock:
    def __init__(
        self, everyone: Group, device: torch.device, window_seconds: float, spare_seconds: float = SPARE_SECONDS
    ) -> None:
        self._everyone, self._device, self.window_seconds = everyone, device, window_seconds
        self._spare_seconds = spare_seconds
        self._timed = self._lost = 0.0  # seconds

    @property
    def stolen_share(self) -> float:
        """Of the time of all samples that were kept, at the rank that lost most."""
        return self._lost / self._timed if self._timed else 0.0

    def sample(
        self, sizes: tuple[int, ...], call: Callable[[], object], *, slowest: bool = False, about: float = 0.0
    ) -> Sample:
        """Of one call, as the mean over ranks, or of the slowest rank; `about` is what it will take, if that is known.

        Others come before those that are timed: links lend a first message their burst, and a rank that has waited has
        the whole quota of its period left.
        """
        expected = about or self._once(call)
        num = max(1, min(MOST_CALLS, round(self.window_seconds / expected)))
        self.together()
        for _ in range(math.ceil(PRIMING_SECONDS / expected) if expected < self.window_seconds else 0):
            call()
        seconds, lost = self._least_disturbed(call, num, slowest)
        self._timed, self._lost = self._timed + seconds * num, self._lost + lost * seconds * num
        return Sample(sizes, (seconds,))

    def _least_disturbed(self, call: Callable[[], object], num: int, slowest: bool) -> tuple[float, float]:
        """Seconds of a call, and the share of them that the cores ran for others, of the try in which it was least,
        among those in which memory was there."""
        found: list[tuple[bool, float, float]] = []
        for _ in range(TRIES):
            before, faults = stolen_seconds(), given_pages()
            times = self.told(self._row(call, num))
            cores = num * max(times) * (os.cpu_count() or 1)
            faulty = max(self.told((given_pages() - faults) / num)) > FAULTS
            lost = max(self.told((stolen_seconds() - before) / cores))
            found.append((faulty, lost, max(times) if slowest else sum(times) / len(times)))
            if lost < STOLEN and not faulty or self._spare_seconds < num * max(times):
                break
            self._spare_seconds -= num * max(times)
        _, lost, seconds = min(found)
        return seconds, lost

    def _once(self, call: Callable[[], object]) -> float:
        """Of the slowest rank; what first calls prepare, and memory they are the first to touch, is left out where they
        are short."""
        seconds = max(self.told(self._run(call, 1)))
        for _ in range(TRIES):
            if seconds >= self.window_seconds:
                break
            faults = given_pages()
            seconds = max(self.told(self._run(call, 1)))
            if max(self.told(given_pages() - faults)) <= FAULTS:
                break
        return seconds

    def together(self) -> None:
        self.told(0.0)

    def _row(self, call: Callable[[], object], num: int) -> float:
        """Seconds of a call: the median of the rows that so many calls make."""
        rows = min(ROWS, num)
        return median(self._run(call, num // rows) / (num // rows) for _ in range(rows))

    def _run(self, call: Callable[[], object], num: int) -> float:
        self._synchronize()
        start = time.perf_counter()
        for _ in range(num):
            call()
        self._synchronize()
        return time.perf_counter() - start

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def told(self, value: float) -> list[float]:
        """Every rank's value."""
        mine = torch.tensor([value], dtype=torch.float64, device=self._device)
        return collective.all_gather(mine, [1] * self._everyone.size, self._everyone).wait().tolist()


def given_pages() -> int:
    """Pages that the system has given this process."""
    return getrusage(RUSAGE_SELF).ru_minflt


def stolen_seconds() -> float:
    """For how long the cores of this virtual machine ran for others since it started; 0 where nobody knows."""
    try:
        fields = Path("/proc/stat").read_text().split(maxsplit=10)
    except OSError:
        return 0.0
    return int(fields[8]) / os.sysconf("SC_CLK_TCK")

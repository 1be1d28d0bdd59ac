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

MAX_CALLS = 4000
PRIMING_SECONDS = 0.025  # a little more than the period of a quota in the lab
MAX_STOLEN_SHARE = 0.05  # share of the cores' time from which on calls are timed again
MAX_PAGE_FAULTS = 64  # pages a call is given anew, from which on it is timed again: a job keeps the memory it frees
NUM_RUNS = 3
MAX_TRIES = 4
RETRY_SECONDS = 4.0  # of a clock, for tries beyond the first


class Clock:
    def __init__(
        self, group: Group, device: torch.device, window_seconds: float, retry_seconds: float = RETRY_SECONDS
    ) -> None:
        self._everyone, self._device, self.window_seconds = group, device, window_seconds
        self._spare_seconds = retry_seconds
        self._timed = self._lost = 0.0  # seconds

    @property
    def stolen_share(self) -> float:
        """Of the time of all samples that were kept, at the rank that lost most."""
        return self._lost / self._timed if self._timed else 0.0

    def sample(
        self,
        sizes: tuple[int, ...],
        call: Callable[[], object],
        *,
        slowest: bool = False,
        expected_seconds: float = 0.0,
    ) -> Sample:
        """Of one call, as the mean over ranks, or of the slowest rank; `about` is what it will take, if that is known.

        Others come before those that are timed: links lend a first message their burst, and a rank that has waited has
        the whole quota of its period left.
        """
        expected = expected_seconds or self._once(call)
        num = max(1, min(MAX_CALLS, round(self.window_seconds / expected)))
        self.barrier()
        for _ in range(math.ceil(PRIMING_SECONDS / expected) if expected < self.window_seconds else 0):
            call()
        seconds, lost = self._least_disturbed(call, num, slowest)
        self._timed, self._lost = self._timed + seconds * num, self._lost + lost * seconds * num
        return Sample(sizes, (seconds,))

    def _least_disturbed(self, call: Callable[[], object], num: int, slowest: bool) -> tuple[float, float]:
        """Seconds of a call, and the share of them that the cores ran for others, of the try in which it was least,
        among those in which memory was there."""
        found: list[tuple[bool, float, float]] = []
        for _ in range(MAX_TRIES):
            before, faults = stolen_seconds(), minor_page_faults()
            times = self.all_gather(self._row(call, num))
            cores = num * max(times) * (os.cpu_count() or 1)
            faulty = max(self.all_gather((minor_page_faults() - faults) / num)) > MAX_PAGE_FAULTS
            lost = max(self.all_gather((stolen_seconds() - before) / cores))
            found.append((faulty, lost, max(times) if slowest else sum(times) / len(times)))
            if lost < MAX_STOLEN_SHARE and not faulty or self._spare_seconds < num * max(times):
                break
            self._spare_seconds -= num * max(times)
        _, lost, seconds = min(found)
        return seconds, lost

    def _once(self, call: Callable[[], object]) -> float:
        """Of the slowest rank; what first calls prepare, and memory they are the first to touch, is left out where they
        are short."""
        seconds = max(self.all_gather(self._run(call, 1)))
        for _ in range(MAX_TRIES):
            if seconds >= self.window_seconds:
                break
            faults = minor_page_faults()
            seconds = max(self.all_gather(self._run(call, 1)))
            if max(self.all_gather(minor_page_faults() - faults)) <= MAX_PAGE_FAULTS:
                break
        return seconds

    def barrier(self) -> None:
        self.all_gather(0.0)

    def _row(self, call: Callable[[], object], num: int) -> float:
        """Seconds of a call: the median of the rows that so many calls make."""
        rows = min(NUM_RUNS, num)
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

    def all_gather(self, value: float) -> list[float]:
        """Every rank's value."""
        mine = torch.tensor([value], dtype=torch.float64, device=self._device)
        return collective.all_gather(mine, [1] * self._everyone.size, self._everyone).wait().tolist()


def minor_page_faults() -> int:
    """Pages that the system has given this process."""
    return getrusage(RUSAGE_SELF).ru_minflt


def stolen_seconds() -> float:
    """For how long the cores of this virtual machine ran for others since it started; 0 where nobody knows."""
    try:
        fields = Path("/proc/stat").read_text().split(maxsplit=10)
    except OSError:
        return 0.0
    return int(fields[8]) / os.sysconf("SC_CLK_TCK")

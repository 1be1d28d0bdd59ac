"""Time calls on all ranks at once: ranks start together and agree on the number of calls.

A machine's speed varies by some percent from one tenth of a second to the next, and a rank under a cpu quota runs and
waits in turns of 20 ms. So a sample is the time of many calls in a row, never the best of short ones, and the median of
three such runs: another process that runs for a moment spoils only one of them. Where a virtual machine reports its
steal time, a sample with much of it is taken again.
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
PRIMING_SECONDS = 0.025  # a little more than the period of a cpu quota in the lab
MAX_STOLEN_SHARE = 0.05  # of the cores' time; from this share on a sample is taken again
MAX_PAGE_FAULTS = 64  # of a call; above it a sample is taken again, since a job keeps the memory it frees
NUM_RUNS = 3
MAX_TRIES = 4
RETRY_SECONDS = 4.0  # that a clock may spend on repeated tries


class Clock:
    """Times calls on all ranks of a group; `sample`, `barrier` and `all_gather` are collective."""

    def __init__(
        self, group: Group, device: torch.device, window_seconds: float, retry_seconds: float = RETRY_SECONDS
    ) -> None:
        self._group, self._device, self.window_seconds = group, device, window_seconds
        self._spare_seconds = retry_seconds
        self._timed = self._stolen = 0.0  # seconds

    @property
    def stolen_share(self) -> float:
        """Steal time over the time of all samples kept, at the rank with the most steal time."""
        return self._stolen / self._timed if self._timed else 0.0

    def sample(
        self,
        sizes: tuple[int, ...],
        call: Callable[[], object],
        *,
        slowest: bool = False,
        expected_seconds: float = 0.0,
    ) -> Sample:
        """Seconds of one call: the mean over ranks, or of the slowest rank; `expected_seconds` if known.

        Untimed calls come first: a link lets a first message burst, and a rank that has waited has its full cpu quota.
        """
        expected = expected_seconds or self._estimate_seconds(call)
        num = max(1, min(MAX_CALLS, round(self.window_seconds / expected)))
        self.barrier()
        for _ in range(math.ceil(PRIMING_SECONDS / expected) if expected < self.window_seconds else 0):
            call()
        seconds, stolen = self._sample_least_disturbed(call, num, slowest)
        self._timed, self._stolen = self._timed + seconds * num, self._stolen + stolen * seconds * num
        return Sample(sizes, (seconds,))

    def _sample_least_disturbed(self, call: Callable[[], object], num: int, slowest: bool) -> tuple[float, float]:
        """(seconds of a call, share of steal time) of the best try: without page faults, least steal time."""
        attempts: list[tuple[bool, float, float]] = []
        for _ in range(MAX_TRIES):
            stolen_before, faults_before = stolen_seconds(), minor_page_faults()
            times = self.all_gather(self._median_seconds(call, num))
            core_seconds = num * max(times) * (os.cpu_count() or 1)
            has_faults = max(self.all_gather((minor_page_faults() - faults_before) / num)) > MAX_PAGE_FAULTS
            stolen = max(self.all_gather((stolen_seconds() - stolen_before) / core_seconds))
            attempts.append((has_faults, stolen, max(times) if slowest else sum(times) / len(times)))
            if stolen < MAX_STOLEN_SHARE and not has_faults or self._spare_seconds < num * max(times):
                break
            self._spare_seconds -= num * max(times)
        _, stolen, seconds = min(attempts)
        return seconds, stolen

    def _estimate_seconds(self, call: Callable[[], object]) -> float:
        """Seconds of one call on the slowest rank.

        For short calls, a first call's initialization and page faults are left out.
        """
        seconds = max(self.all_gather(self._run(call, 1)))
        for _ in range(MAX_TRIES):
            if seconds >= self.window_seconds:
                break
            faults_before = minor_page_faults()
            seconds = max(self.all_gather(self._run(call, 1)))
            if max(self.all_gather(minor_page_faults() - faults_before)) <= MAX_PAGE_FAULTS:
                break
        return seconds

    def barrier(self) -> None:
        """Wait until every rank of the group has called this: an all-gather."""
        self.all_gather(0.0)

    def _median_seconds(self, call: Callable[[], object], num: int) -> float:
        """Seconds of a call: the median over runs that make `num` calls in all."""
        runs = min(NUM_RUNS, num)
        return median(self._run(call, num // runs) / (num // runs) for _ in range(runs))

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
        """All-gather one number per rank over the clock's group."""
        local = torch.tensor([value], dtype=torch.float64, device=self._device)
        return collective.all_gather(local, [1] * self._group.size, self._group).wait().tolist()


def minor_page_faults() -> int:
    """Minor page faults of this process since it started."""
    return getrusage(RUSAGE_SELF).ru_minflt


def stolen_seconds() -> float:
    """Steal time of all cores of this virtual machine since it started; 0 where unknown."""
    try:
        fields = Path("/proc/stat").read_text().split(maxsplit=10)
    except OSError:
        return 0.0
    return int(fields[8]) / os.sysconf("SC_CLK_TCK")

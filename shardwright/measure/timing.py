"""Times calls on all ranks alike: they start together and agree how often.

A machine's speed wanders by some percent from one tenth of a second to the next, and a rank under a cpu quota runs and
waits by turns of 20 ms. So a time is that of many calls in a row, never the best of short ones.
"""

import math
import time
from collections.abc import Callable

import torch

from shardwright.comm import collective
from shardwright.comm.mesh import Group
from shardwright.spec.cluster import Sample

MOST_CALLS = 4000
PRIMING_SECONDS = 0.025  # a little more than the period of a quota in the lab


class Clock:
    def __init__(self, everyone: Group, device: torch.device, window_seconds: float) -> None:
        self._everyone, self._device, self.window_seconds = everyone, device, window_seconds

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
        times = self.told(self._run(call, num) / num)
        return Sample(sizes, (max(times) if slowest else sum(times) / len(times),))

    def _once(self, call: Callable[[], object]) -> float:
        """Of the slowest rank; what a first call prepares is left out where it is short."""
        first = max(self.told(self._run(call, 1)))
        return max(self.told(self._run(call, 1))) if first < self.window_seconds else first

    def together(self) -> None:
        self.told(0.0)

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

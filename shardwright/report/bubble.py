"""The bubble of a pipeline: how long a rank waits between its passes of a step, over the time of its passes.

With chunks of equal time and messages that take none it is (p - 1) / (v m): p ranks of v chunks, m micro-batches.
"""

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from itertools import islice
from statistics import fmean
from typing import NamedTuple

from shardwright.report.step_times import FLIGHT, ISSUE, WAIT, complete_steps
from shardwright.spec.lanes import MAIN
from shardwright.spec.pipeline import BACKWARD, FORWARD
from shardwright.spec.timeline import Event, Timeline

MIN_WORK_SECONDS = 1e-4  # a shorter part of a pass is what precedes its wait for a message
Interval = tuple[float, float]


class Passes(NamedTuple):
    """A rank's forward and backward passes of a step."""

    busy: float  # seconds in them, without waits
    window: float  # seconds from the start of the first to the end of the last

    @property
    def bubble(self) -> float:
        return self.window / self.busy - 1


def bubble_ratio(timeline: Timeline, rank: int = 0) -> float:
    """The mean over complete steps, NaN if there is none. On the first rank, a step begins and ends with a pass."""
    passes = passes_by_step(timeline, rank)
    bubbles = [passes[step].bubble for step in complete_steps(timeline) if step in passes]
    return fmean(bubbles) if bubbles else math.nan


def passes_by_step(timeline: Timeline, rank: int) -> dict[int, Passes]:
    waits = sorted((event.start, event.end) for event in timeline.events if event.kind == WAIT and event.rank == rank)
    intervals: dict[int, list[Interval]] = defaultdict(list)
    for event in timeline.events:
        if event.rank == rank and _is_pass(event):
            intervals[event.step] += _without_waits((event.start, event.end), waits)
    return {step: summarize_passes(intervals[step]) for step in sorted(intervals)}


def summarize_passes(intervals: Sequence[Interval]) -> Passes:
    """The passes of a step in these intervals; the window starts with the first work, not with a wait before it."""
    work = [(start, end) for start, end in intervals if end - start > MIN_WORK_SECONDS] or intervals
    busy = sum(end - start for start, end in intervals)
    return Passes(busy, max(end for _, end in work) - min(start for start, _ in work))


def _is_pass(event: Event) -> bool:
    """Stages such as "forward" and "backward.1", or in a prediction their parts, such as "forward blocks.0"."""
    stage = event.name.partition(" ")[0].partition(".")[0]
    return event.lane == MAIN and event.kind not in (ISSUE, FLIGHT, WAIT) and stage in (FORWARD, BACKWARD)


def _without_waits(interval: Interval, waits: Sequence[Interval]) -> list[Interval]:
    """The parts of an interval outside of waits, which are sorted."""
    start, end = interval
    parts: list[Interval] = []
    for wait_start, wait_end in islice(waits, bisect_left(waits, (start,)), None):
        if wait_start > end:
            break
        if start <= wait_start and wait_end <= end:
            parts.append((start, wait_start))
            start = wait_end
    return [*parts, (start, end)]

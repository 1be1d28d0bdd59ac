"""What a timeline says of its steps: how long they took, and of each part what it took and what of that was waited for.

A measured event is what the thread did (stage), what it did to issue something (issue), what was then under way beside
it (flight), or that it waited for that (wait). A stage's waits lie inside it and are told of what was waited for.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean

from shardwright.spec.timeline import Event, Timeline

ISSUE, FLIGHT, WAIT = "issue", "flight", "wait"


@dataclass(frozen=True, slots=True)
class StepPart:
    """Seconds of a step: what a part of it takes, and what of that nothing else hides."""

    seconds: float
    exposed_seconds: float


def complete_steps(timeline: Timeline) -> list[int]:
    """The steps of which everything was recorded: where some run ahead, not the first and the last."""
    names: dict[int, set[str]] = defaultdict(set)
    for event in timeline.events:
        names[event.step].add(event.name if event.kind != WAIT else "")
    usual = Counter(len(found - {""}) for found in names.values()).most_common(1)[0][0]
    return sorted(step for step, found in names.items() if len(found - {""}) >= usual)


def time_window(timeline: Timeline, steps: Sequence[int]) -> tuple[float, float]:
    """From where the step before these ended, or the first of them began, to the end of the last."""
    ends = [event.end for event in timeline.events if event.step == steps[0] - 1]
    starts = [event.start for event in timeline.events if event.step == steps[0]]
    end = max(event.end for event in timeline.events if event.step == steps[-1])
    return max([min(starts), *ends]) if steps_overlap(timeline) else min(starts), end


def steps_overlap(timeline: Timeline) -> bool:
    """Whether a step begins before the one before it has ended."""
    spans = _spans(timeline)
    return any(spans[step + 1, rank][0] < end for (step, rank), (_, end) in spans.items() if (step + 1, rank) in spans)


def stage_seconds(timeline: Timeline) -> dict[str, list[float]]:
    """Seconds of each stage, one entry per step and rank."""
    outer = [event for event in timeline.events if event.kind in ("stage", FLIGHT)]
    total: dict[str, dict[tuple[int, int], float]] = {}
    for event in outer or timeline.events:
        per_step = total.setdefault(event.name, {})
        key = (event.step, event.rank)
        per_step[key] = per_step.get(key, 0.0) + event.end - event.start
    return {name: list(per_step.values()) for name, per_step in total.items()}


def step_seconds(timeline: Timeline) -> list[float]:
    """Seconds of each whole step on each rank: from its first start to its last end; where steps overlap, from the end
    of one whole step to the end of the next. With gradient accumulation the micro-batches between them belong to it."""
    spans, whole = _spans(timeline), complete_steps(timeline)
    if not steps_overlap(timeline) or len(whole) == 1:
        return [end - start for (step, _), (start, end) in spans.items() if step in whole]
    return [
        spans[step, rank][1] - spans[before, rank][1]
        for before, step in pairwise(whole)
        for rank in sorted({rank for _, rank in spans})
        if all((between, rank) in spans for between in range(before, step + 1))
    ]


def mean_step_seconds(timeline: Timeline) -> float:
    """Mean time of whole steps; where they overlap, from the end of one to the end of the next. All figures of a step
    use the mean, because means of parts add up to the mean of the whole, and medians do not."""
    steps = complete_steps(timeline)
    if not steps_overlap(timeline):
        return fmean(step_seconds(timeline))
    begin, end = time_window(timeline, steps)
    return (end - begin) / len(steps)


def parts_by_name(timeline: Timeline) -> dict[str, StepPart]:
    """By name, of a step in the mean over whole steps and ranks."""
    steps = complete_steps(timeline)
    begin, end = time_window(timeline, steps)
    ranks = {event.rank for event in timeline.events}
    inside = [event for event in timeline.events if event.start >= begin and event.end <= end]
    waits = [event for event in inside if event.kind == WAIT]
    alone: dict[str, float] = defaultdict(float)
    exposed: dict[str, float] = defaultdict(float)
    for event in sorted(inside, key=lambda event: event.start):
        seconds = event.end - event.start
        if event.kind == WAIT:
            exposed[event.name] += seconds
        elif event.kind == FLIGHT:
            alone[event.name] += seconds
        else:
            own = seconds - sum(wait.end - wait.start for wait in waits if _within(wait, event))
            alone[event.name] += own
            exposed[event.name] += own
    num = len(steps) * len(ranks)
    return {name: StepPart(alone[name] / num, exposed[name] / num) for name in (*alone, *(set(exposed) - set(alone)))}


def serial_and_exposed_seconds(timeline: Timeline) -> tuple[float, float]:
    """Of a step: its parts one after the other, and what of them is exposed."""
    found = parts_by_name(timeline)
    return sum(part.seconds for part in found.values()), sum(part.exposed_seconds for part in found.values())


def _within(inner: Event, outer: Event) -> bool:
    return inner.rank == outer.rank and outer.start <= inner.start and inner.end <= outer.end


def _spans(timeline: Timeline) -> dict[tuple[int, int], tuple[float, float]]:
    """The first start and the last end of each step and rank."""
    found: dict[tuple[int, int], tuple[float, float]] = {}
    for event in timeline.events:
        if event.kind == WAIT:
            continue
        key = (event.step, event.rank)
        start, end = found.get(key, (event.start, event.end))
        found[key] = (min(start, event.start), max(end, event.end))
    return found

"""Step times from a timeline: seconds of each step, total and exposed seconds of each part of a step.

Kinds of measured events: the thread ran a stage (stage), issued an asynchronous operation (issue), the operation was in
flight (flight), or the thread waited for it (wait). Waits are inside a stage and have the name of the operation.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean

from shardwright.spec.timeline import Event, Timeline

ISSUE, FLIGHT, WAIT = "issue", "flight", "wait"
COLLECTIVES = frozenset(("gather", "scatter", "reduce"))  # of a part of the model: "gather NAME", "reduce.bottom"


@dataclass(frozen=True, slots=True)
class StepPart:
    """Seconds of a part of a step; exposed seconds are those not hidden by overlap."""

    seconds: float
    exposed_seconds: float


def part_name(event_name: str) -> str:
    """The part of a step that an event belongs to; the collectives of all parts of the model are one part each."""
    collective = event_name.partition(" ")[0].partition(".")[0]
    return collective if collective in COLLECTIVES else event_name


def complete_steps(timeline: Timeline) -> list[int]:
    """Steps of which all events were recorded; with prefetched stages, the first and last are incomplete."""
    names: dict[int, set[tuple[str, int]]] = defaultdict(set)
    for event in timeline.events:
        names[event.step].update([(event.name, event.micro)] if event.kind != WAIT else [])
    usual_num_names = Counter(len(event_names) for event_names in names.values()).most_common(1)[0][0]
    return sorted(step for step, event_names in names.items() if len(event_names) >= usual_num_names)


def time_window(timeline: Timeline, steps: Sequence[int]) -> tuple[float, float]:
    """Begin and end of `steps`. If steps overlap, the begin is the end of the previous step."""
    ends = [event.end for event in timeline.events if event.step == steps[0] - 1]
    starts = [event.start for event in timeline.events if event.step == steps[0]]
    end = max(event.end for event in timeline.events if event.step == steps[-1])
    return max([min(starts), *ends]) if steps_overlap(timeline) else min(starts), end


def steps_overlap(timeline: Timeline) -> bool:
    """Whether a step begins before the previous step ends."""
    spans = _step_spans(timeline)
    return any(spans[step + 1, rank][0] < end for (step, rank), (_, end) in spans.items() if (step + 1, rank) in spans)


def stage_seconds(timeline: Timeline) -> dict[str, list[float]]:
    """Seconds of each stage, one entry per step and rank."""
    outer = [event for event in timeline.events if event.kind in ("stage", FLIGHT)]
    total: dict[str, dict[tuple[int, int], float]] = {}
    for event in outer or timeline.events:
        per_step = total.setdefault(part_name(event.name), {})
        key = (event.step, event.rank)
        per_step[key] = per_step.get(key, 0.0) + event.end - event.start
    return {name: list(per_step.values()) for name, per_step in total.items()}


def step_seconds(timeline: Timeline) -> list[float]:
    """Seconds of each complete step on each rank, from its first start to its last end.

    If steps overlap, from the end of one complete step to the end of the next. (In traces of earlier versions each
    micro-batch counted as a step, and only the last of an accumulated step is complete.)
    """
    spans, complete = _step_spans(timeline), complete_steps(timeline)
    if not steps_overlap(timeline) or len(complete) == 1:
        return [end - start for (step, _), (start, end) in spans.items() if step in complete]
    return [
        spans[step, rank][1] - spans[previous, rank][1]
        for previous, step in pairwise(complete)
        for rank in sorted({rank for _, rank in spans})
        if all((step_between, rank) in spans for step_between in range(previous, step + 1))
    ]


def mean_step_seconds(timeline: Timeline) -> float:
    """Mean seconds of complete steps; if steps overlap, from the end of one step to the end of the next.

    Reports use the mean because means of parts add up to the mean of the step, and medians do not.
    """
    steps = complete_steps(timeline)
    if not steps_overlap(timeline):
        return fmean(step_seconds(timeline))
    begin, end = time_window(timeline, steps)
    return (end - begin) / len(steps)


def parts_by_name(timeline: Timeline) -> dict[str, StepPart]:
    """Parts of a step by name; seconds are means over complete steps and ranks."""
    steps = complete_steps(timeline)
    begin, end = time_window(timeline, steps)
    ranks = {event.rank for event in timeline.events}
    inside = [event for event in timeline.events if event.start >= begin and event.end <= end]
    waits = [event for event in inside if event.kind == WAIT]
    total_seconds: dict[str, float] = defaultdict(float)
    exposed_seconds: dict[str, float] = defaultdict(float)
    for event in sorted(inside, key=lambda event: event.start):
        seconds, name = event.end - event.start, part_name(event.name)
        if event.kind == WAIT:
            exposed_seconds[name] += seconds
        elif event.kind == FLIGHT:
            total_seconds[name] += seconds
        else:
            work_seconds = seconds - sum(wait.end - wait.start for wait in waits if _is_within(wait, event))
            total_seconds[name] += work_seconds
            exposed_seconds[name] += work_seconds
    num = len(steps) * len(ranks)
    return {
        name: StepPart(total_seconds[name] / num, exposed_seconds[name] / num)
        for name in (*total_seconds, *(set(exposed_seconds) - set(total_seconds)))
    }


def serial_and_exposed_seconds(timeline: Timeline) -> tuple[float, float]:
    """Seconds of a step if its parts ran without overlap, and its exposed seconds."""
    parts = parts_by_name(timeline)
    return sum(part.seconds for part in parts.values()), sum(part.exposed_seconds for part in parts.values())


def _is_within(inner: Event, outer: Event) -> bool:
    return inner.rank == outer.rank and outer.start <= inner.start and inner.end <= outer.end


def _step_spans(timeline: Timeline) -> dict[tuple[int, int], tuple[float, float]]:
    """First start and last end by (step, rank)."""
    spans: dict[tuple[int, int], tuple[float, float]] = {}
    for event in timeline.events:
        if event.kind == WAIT:
            continue
        key = (event.step, event.rank)
        start, end = spans.get(key, (event.start, event.end))
        spans[key] = (min(start, event.start), max(end, event.end))
    return spans

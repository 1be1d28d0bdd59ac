"""When ranks of a predicted timeline wait for messages, or for rows from slower memory."""

from collections.abc import Iterable, Sequence

from shardwright.spec.lanes import HOST, MAIN, READ
from shardwright.spec.timeline import Event

COLLECTIVE = "collective"  # kind of a predicted event
SLOW_MEMORY_STAGE = "prefetch"  # copies rows to the lines of caches
NO_MESSAGES = frozenset((MAIN, HOST, READ))  # lanes without communication
Interval = tuple[float, float]


def exposed_seconds(events: Iterable[Event], begin: float, end: float) -> tuple[float, float]:
    """Seconds between two times, summed over ranks, in which the rank's thread does nothing and collectives run; or
    only rows are copied."""
    by_rank: dict[int, list[Event]] = {}
    for event in events:
        by_rank.setdefault(event.rank, []).append(event)
    messages = rows = 0.0
    for own in by_rank.values():
        busy = _intervals(event for event in own if event.lane == MAIN)
        sending = _intervals(event for event in own if _is_message(event))
        copying = _intervals(event for event in own if event.name == SLOW_MEMORY_STAGE)
        messages += _seconds_without(_clip(sending, begin, end), busy)
        rows += _seconds_without(_clip(copying, begin, end), _merge([*busy, *sending]))
    return messages, rows


def _is_message(event: Event) -> bool:
    """Messages on a lane that also computes, as sums of gradients do, count as messages."""
    return event.kind == COLLECTIVE or event.kind == "compute" and event.lane not in NO_MESSAGES


def _intervals(events: Iterable[Event]) -> list[Interval]:
    return _merge([(event.start, event.end) for event in events])


def _merge(intervals: Sequence[Interval]) -> list[Interval]:
    """The same times, as intervals that do not overlap."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return merged


def _clip(intervals: Sequence[Interval], begin: float, end: float) -> list[Interval]:
    return [(max(a, begin), min(b, end)) for a, b in intervals if b > begin and a < end]


def _seconds_without(intervals: Sequence[Interval], others: Sequence[Interval]) -> float:
    """Seconds of the intervals outside of the others; both are merged."""
    shared = sum(max(0.0, min(b, d) - max(a, c)) for a, b in intervals for c, d in others)
    return sum(b - a for a, b in intervals) - shared

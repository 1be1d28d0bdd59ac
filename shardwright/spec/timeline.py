"""The timeline: events of a run, predicted by the simulator or measured by the tracer.

Converts to and from Chrome trace JSON, which ui.perfetto.dev opens. Times there are microseconds; the args of each
slice keep the exact seconds.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

from shardwright.errors import UserError
from shardwright.spec import files
from shardwright.spec.checks import check_non_negative, check_unique, raise_if_any


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One span of time on a lane of a rank: a stage, a message in flight, or a wait."""

    id: int
    name: str
    kind: str
    rank: int
    lane: str
    step: int
    micro: int = 0
    start: float  # seconds
    end: float
    bytes_: int = 0
    flops: int = 0
    after: tuple[int, ...] = ()  # ids of events that had to end first


@dataclass(frozen=True, slots=True)
class Timeline:
    """The events of a run."""

    source: Literal["predicted", "measured", "emulated"]
    events: tuple[Event, ...]

    def digest(self) -> str:
        return files.digest(self)

    def verify(self) -> None:
        raise_if_any(message for check in CHECKS for message in check(self))

    def to_chrome(self) -> str:
        """Trace Event JSON: a process per rank, a thread per lane, an arrow per `after`."""
        lanes = {lane: index for index, lane in enumerate(dict.fromkeys(event.lane for event in self.events))}
        entries = [
            *_name_entries(self, lanes),
            *(_slice_entry(event, lanes) for event in self.events),
            *_arrow_entries(self, lanes),
        ]
        lines = ",\n".join(json.dumps(entry, allow_nan=False) for entry in entries)
        other = json.dumps({"source": self.source})
        return f'{{"displayTimeUnit": "ms", "otherData": {other}, "traceEvents": [\n{lines}\n]}}\n'

    @classmethod
    def from_chrome(cls, text: str, *, origin: str = "trace") -> "Timeline":
        """Read a trace that `to_chrome` wrote; `origin` names it in errors."""
        try:
            trace: Any = json.loads(text)
        except json.JSONDecodeError as error:
            raise UserError(f"{origin}: bad JSON: {error.msg} at line {error.lineno} column {error.colno}") from None
        try:
            slices = [entry for entry in trace["traceEvents"] if entry["ph"] == "X"]
            events = [{"name": entry["name"], "rank": entry["pid"], **entry["args"]} for entry in slices]
            source = trace["otherData"]["source"]
        except (KeyError, TypeError) as error:
            raise UserError(f"{origin}: not a trace of a shardwright Timeline ({error!r})") from None
        return files.from_plain(cls, {"source": source, "events": events}, origin)


def _name_entries(timeline: Timeline, lanes: dict[str, int]) -> Iterator[dict[str, Any]]:
    threads = sorted({(event.rank, lanes[event.lane], event.lane) for event in timeline.events})
    for rank in dict.fromkeys(rank for rank, _, _ in threads):
        yield {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}}
    for rank, index, lane in threads:
        yield {"ph": "M", "name": "thread_name", "pid": rank, "tid": index, "args": {"name": lane}}


def _slice_entry(event: Event, lanes: dict[str, int]) -> dict[str, Any]:
    args = asdict(event)
    location = {"pid": args.pop("rank"), "tid": lanes[event.lane]}
    times = {"ts": event.start * 1e6, "dur": (event.end - event.start) * 1e6}
    return {"ph": "X", "name": args.pop("name"), "cat": event.kind, **location, **times, "args": args}


def _arrow_entries(timeline: Timeline, lanes: dict[str, int]) -> Iterator[dict[str, Any]]:
    """One arrow per dependency. Viewers attach each end to the enclosing slice, so arrows start at a slice's middle."""
    events = {event.id: event for event in timeline.events}
    pairs = [(events[id_], event) for event in timeline.events for id_ in event.after if id_ in events]
    for index, (source, target) in enumerate(pairs):
        arrow = {"name": "after", "cat": "after", "id": index}
        middle = (source.start + source.end) / 2
        yield {"ph": "s", **arrow, "pid": source.rank, "tid": lanes[source.lane], "ts": middle * 1e6}
        yield {
            "ph": "f",
            "bp": "e",
            **arrow,
            "pid": target.rank,
            "tid": lanes[target.lane],
            "ts": target.start * 1e6,
        }


def _check_ids(timeline: Timeline) -> Iterator[str]:
    yield from check_unique("event id", (event.id for event in timeline.events))
    ids = {event.id for event in timeline.events}
    for event in timeline.events:
        for id_ in event.after:
            if id_ not in ids:
                yield f'event {event.id} "{event.name}" comes after event {id_}, which does not exist'


def _check_numbers(timeline: Timeline) -> Iterator[str]:
    for event in timeline.events:
        subject = f'event {event.id} "{event.name}"'
        if not event.end >= event.start:
            yield f"{subject} ends at {event.end}, before its start at {event.start}"
        yield from check_non_negative(subject, rank=event.rank, bytes_=event.bytes_, flops=event.flops)


def _check_order(timeline: Timeline) -> Iterator[str]:
    """No event starts before its dependencies end. Predicted timelines only: clocks of measured ranks may differ."""
    ends = {event.id: event.end for event in timeline.events}
    for event in timeline.events if timeline.source == "predicted" else ():
        for id_ in event.after:
            if event.start < ends.get(id_, event.start):
                subject = f'event {event.id} "{event.name}"'
                yield f"{subject} starts at {event.start}, before the end of event {id_} at {ends[id_]}"


CHECKS = (_check_ids, _check_numbers, _check_order)

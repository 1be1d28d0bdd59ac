"""Step times from timelines: complete steps, their seconds, and the exposed seconds of each part."""

import pytest

from shardwright.report import step_times
from shardwright.spec.timeline import Event, Timeline


def overlapped_steps(num: int) -> Timeline:
    """The next batch's ids are in flight for 2 s during 3 s of work; forward waits 0.5 s for vectors."""
    events: list[Event] = []

    def add(name: str, kind: str, lane: str, step: int, start: float, end: float) -> None:
        events.append(Event(id=len(events), name=name, kind=kind, rank=0, lane=lane, step=step, start=start, end=end))

    for tick in range(num):
        start = 6.0 * tick
        if tick + 1 < num:
            add("ids", "issue", "main", tick + 1, start, start + 0.25)
            add("ids", "flight", "ids", tick + 1, start + 0.25, start + 2.25)
        add("vectors", "issue", "main", tick, start + 1, start + 1.5)
        add("vectors", "flight", "wire", tick, start + 1.5, start + 3.5)
        add("vectors", "wait", "main", tick, start + 3, start + 3.5)
        add("forward", "stage", "main", tick, start + 2, start + 5)
    return Timeline("measured", tuple(events))


def test_overlapped_steps_are_timed_from_end_to_end():
    timeline = overlapped_steps(6)
    assert step_times.steps_overlap(timeline)
    assert step_times.complete_steps(timeline) == [1, 2, 3, 4, 5]  # the ids of step 0 are missing
    assert step_times.step_seconds(timeline) == pytest.approx([6.0] * 4)


def test_micro_batches_belong_to_the_step_that_ends_with_them():
    """A report of a run with gradient accumulation once failed for lack of complete steps."""
    events = list(overlapped_steps(8).events)
    for step in range(1, 8, 2):
        start = 6.0 * step + 5
        lane_step = {"rank": 0, "lane": "reduce", "step": step}
        events.append(Event(id=len(events), name="reduce", kind="flight", **lane_step, start=start, end=start + 0.5))
    timeline = Timeline("measured", tuple(events))
    assert step_times.complete_steps(timeline) == [1, 3, 5, 7]
    assert step_times.step_seconds(timeline) == pytest.approx([12.0] * 3)


def test_a_wait_counts_for_the_awaited_part():
    parts = step_times.parts_by_name(overlapped_steps(6))
    assert parts["forward"] == step_times.StepPart(pytest.approx(2.5), pytest.approx(2.5))
    assert parts["vectors"] == step_times.StepPart(pytest.approx(2.5), pytest.approx(1.0))
    serial, exposed = step_times.serial_and_exposed_seconds(overlapped_steps(6))
    assert serial > exposed


def test_serial_steps_are_timed_from_start_to_end():
    events = [
        Event(id=i, name=name, kind="stage", rank=0, lane="main", step=i // 2, start=i, end=i + 0.75)
        for i, name in enumerate(("a", "b", "a", "b"))
    ]
    timeline = Timeline("measured", tuple(events))
    assert not step_times.steps_overlap(timeline)
    assert step_times.step_seconds(timeline) == [1.75, 1.75]
    assert step_times.serial_and_exposed_seconds(timeline) == (1.5, 1.5)


def test_the_mean_step_is_the_sum_of_its_exposed_parts_for_uneven_steps():
    """Every fifth step takes ten times as long, which the median hides and the means of the parts show."""
    events, start = [], 0.0
    for step in range(10):
        for name in ("a", "b"):
            seconds = 10.0 if step % 5 == 4 else 1.0
            lane_step = {"rank": 0, "lane": "main", "step": step}
            events.append(Event(id=len(events), name=name, kind="stage", **lane_step, start=start, end=start + seconds))
            start += seconds
    timeline = Timeline("measured", tuple(events))
    assert step_times.mean_step_seconds(timeline) == pytest.approx(5.6)
    assert step_times.serial_and_exposed_seconds(timeline)[1] == pytest.approx(5.6)
    assert step_times.mean_step_seconds(overlapped_steps(6)) == pytest.approx(6.0)

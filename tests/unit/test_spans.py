"""What a timeline says of overlapped steps: whole steps, from end to end, and what of each part is exposed."""

import pytest

from shardwright.report import step_times
from shardwright.spec.timeline import Event, Timeline


def ticks(num: int) -> Timeline:
    """Ids of the next batch under way for 2 s beside 3 s of work, then 0.5 s of waiting for vectors inside forward."""
    found: list[Event] = []

    def add(name: str, kind: str, lane: str, step: int, start: float, end: float) -> None:
        found.append(Event(id=len(found), name=name, kind=kind, rank=0, lane=lane, step=step, start=start, end=end))

    for tick in range(num):
        at = 6.0 * tick
        if tick + 1 < num:
            add("ids", "issue", "main", tick + 1, at, at + 0.25)
            add("ids", "flight", "ids", tick + 1, at + 0.25, at + 2.25)
        add("vectors", "issue", "main", tick, at + 1, at + 1.5)
        add("vectors", "flight", "wire", tick, at + 1.5, at + 3.5)
        add("vectors", "wait", "main", tick, at + 3, at + 3.5)
        add("forward", "stage", "main", tick, at + 2, at + 5)
    return Timeline("measured", tuple(found))


def test_overlapped_steps_are_told_from_end_to_end():
    timeline = ticks(6)
    assert step_times.steps_overlap(timeline)
    assert step_times.complete_steps(timeline) == [1, 2, 3, 4, 5]  # nobody issued ids of the first
    assert step_times.step_seconds(timeline) == pytest.approx([6.0] * 4)


def test_micro_batches_belong_to_the_step_that_ends_with_them():
    """Gradients are reduced with every second batch: a report of such a run once failed for lack of whole steps."""
    events = list(ticks(8).events)
    for step in range(1, 8, 2):
        at = 6.0 * step + 5
        end = Event(
            id=len(events), name="reduce", kind="flight", rank=0, lane="reduce", step=step, start=at, end=at + 0.5
        )
        events.append(end)
    timeline = Timeline("measured", tuple(events))
    assert step_times.complete_steps(timeline) == [1, 3, 5, 7]
    assert step_times.step_seconds(timeline) == pytest.approx([12.0] * 3)


def test_a_wait_is_told_of_what_was_waited_for():
    found = step_times.parts_by_name(ticks(6))
    assert found["forward"] == step_times.StepPart(pytest.approx(2.5), pytest.approx(2.5))
    assert found["vectors"] == step_times.StepPart(pytest.approx(2.5), pytest.approx(1.0))
    alone, exposed = step_times.serial_and_exposed_seconds(ticks(6))
    assert alone > exposed


def test_steps_that_follow_each_other_are_told_from_start_to_end():
    events = [
        Event(id=at, name=name, kind="stage", rank=0, lane="main", step=at // 2, start=at, end=at + 0.75)
        for at, name in enumerate(("a", "b", "a", "b"))
    ]
    timeline = Timeline("measured", tuple(events))
    assert not step_times.steps_overlap(timeline)
    assert step_times.step_seconds(timeline) == [1.75, 1.75]
    assert step_times.serial_and_exposed_seconds(timeline) == (1.5, 1.5)


def test_the_mean_step_is_the_sum_of_its_exposed_parts_also_where_steps_are_uneven():
    """Every fifth step takes ten times as long, which the median hides and the means of the parts show."""
    events, at = [], 0.0
    for step in range(10):
        for name in ("a", "b"):
            seconds = 10.0 if step % 5 == 4 else 1.0
            found = Event(
                id=len(events), name=name, kind="stage", rank=0, lane="main", step=step, start=at, end=at + seconds
            )
            events.append(found)
            at += seconds
    timeline = Timeline("measured", tuple(events))
    assert step_times.mean_step_seconds(timeline) == pytest.approx(5.6)
    assert step_times.serial_and_exposed_seconds(timeline)[1] == pytest.approx(5.6)
    assert step_times.mean_step_seconds(ticks(6)) == pytest.approx(6.0)

"""Stages inside a stage: they run once per value, wait for what they read, and are traced with their names."""

import time
import weakref

import pytest
import torch

from shardwright.comm.pending import Pending, ready
from shardwright.errors import UserError
from shardwright.spec.calls import Call
from shardwright.spec.plan import Stage
from shardwright.step.executor import run_calls
from shardwright.step.inner import InnerStages
from shardwright.step.slots import Binding, EndOfData, InFlight, accesses, issues
from shardwright.step.tracer import Tracer


class Mechanism:
    """Gathers a value, then reduces it, inside the stage of a plan."""

    def __init__(self) -> None:
        self.stages, self.log = InnerStages(), []
        self.gather = self.stages.bind("gather a", "gather", issues("a.whole", lambda: self.issue("gather", 2)))
        self.reduce = self.stages.bind("reduce a", "dense", issues("a.sum", self.add_one, ("a.whole",)))

    def issue(self, name: str, value: int) -> Pending[int]:
        self.log.append(f"issue {name}")
        return Pending(lambda: self.log.append(f"end {name}") or value)

    def add_one(self, value: int) -> Pending[int]:
        return self.issue("reduce", value + 1)


def test_a_stage_runs_once_until_its_value_is_released():
    mechanism = Mechanism()
    mechanism.stages.run(mechanism.gather, mechanism.gather)
    assert mechanism.log == ["issue gather"]
    mechanism.stages.run(mechanism.gather, mechanism.reduce)
    assert mechanism.log == ["issue gather", "end gather", "issue reduce"]
    assert mechanism.reduce.wait_for_value() == mechanism.reduce.wait_for_value() == 3
    mechanism.gather.release()
    assert mechanism.gather.wait_for_value() is None
    mechanism.stages.run(mechanism.gather)
    assert mechanism.log == ["issue gather", "end gather", "issue reduce", "end reduce", "issue gather"]


def test_a_value_that_exists_already_is_not_in_flight():
    stages = InnerStages()
    stage = stages.bind("gather", "gather", issues("whole", lambda: ready(5)))
    stages.run(stage)
    assert stage.slots.in_flight() == [] and stage.wait_for_value() == 5


def test_access_to_a_slot_without_declaring_it_is_an_error():
    @accesses(writes=("b",))
    def copy(slots):
        slots["b"] = slots["a"]

    stages = InnerStages()
    with pytest.raises(UserError, match='stage "copy" reads slot "a" without declaring it'):
        stages.run(stages.bind("copy", "main", copy))


def trace(mechanism: Mechanism, tracer: Tracer | None) -> list[tuple[str, str, str]]:
    """(name, kind, lane) of the events of a step whose only stage runs those of the mechanism."""

    def forward(slots):
        if slots.call.step:
            raise EndOfData
        mechanism.stages.tracer = slots.tracer
        mechanism.stages.run(mechanism.gather, mechanism.reduce)
        finish = Pending(mechanism.reduce.wait_for_value)
        slots["done"] = InFlight("forward", "main", finish, is_single_event=False)

    stages = (Stage("forward", "main", (), ("done",)),)
    list(run_calls(stages, {"forward": Binding(forward)}, tracer, overlap=False))
    events = tracer.timeline().events if tracer is not None else ()
    return [(event.name, event.kind, event.lane) for event in events]


def test_flights_and_waits_are_traced_inside_the_stage_of_the_plan():
    assert trace(Mechanism(), Tracer()) == [
        ("gather a", "wait", "main"),
        ("forward", "stage", "main"),
        ("gather a", "flight", "gather"),
        ("reduce a", "flight", "dense"),
        ("reduce a", "wait", "main"),
        ("forward", "wait", "main"),
    ]
    assert trace(Mechanism(), None) == []


def test_a_wait_does_not_count_the_waits_inside_it():
    tracer = Tracer()
    start = time.perf_counter()
    tracer.add_wait("part", time.perf_counter())
    tracer.add_wait("all", start)
    part, outer = tracer.timeline().events
    assert (part.name, outer.name) == ("part", "all") and part.end == outer.start


def test_work_issued_outside_of_calls_is_traced_in_the_current_tick():
    mechanism, tracer = Mechanism(), Tracer()
    mechanism.stages.tracer = tracer
    tracer.begin_tick(7)
    mechanism.stages.run(mechanism.gather)
    mechanism.gather.wait_for_value()
    events = tracer.timeline().events
    assert [(event.name, event.kind, event.step) for event in events] == [
        ("gather a", "flight", 7),
        ("gather a", "wait", 7),
    ]


def test_stages_on_a_gpu_last_until_their_kernels_have_completed():
    """The thread issues three stages; the GPU reaches the ends of the first two later, and is not waited for."""

    class Mark:
        def __init__(self, number: int) -> None:
            self.number, self.event = number, self

        def query(self) -> bool:
            return self.number < num_reached

        def time(self) -> float:
            return begin + (10.0, 12.0, 12.0)[self.number]

    class Clock:
        num_marks = 0

        def mark(self) -> Mark:
            self.num_marks += 1
            return Mark(self.num_marks - 1)

    tracer, begin, num_reached = Tracer(), time.perf_counter(), 0
    tracer._gpu = Clock()
    for name in ("forward", "backward", "read"):
        with tracer.trace_call(Call(Stage(name, "main"), 0)):
            pass
    records = tracer._ticks[-1]
    tracer.release_finished()
    assert all(record.end < begin + 5 for record in records)
    num_reached = 1
    tracer.release_finished()
    assert records[0].end == begin + 10 and records[1].end < begin + 5
    forward, backward, read = tracer.timeline().events
    assert (backward.start, backward.end - backward.start) == (forward.end, pytest.approx(2.0))
    assert read.start == read.end == backward.end  # without kernels of its own


def test_ended_work_is_released_before_its_tick_ends():
    """A tick of a pipeline has all micro-batches: what they received would stay in memory until the step's end."""
    tracer, received = Tracer(), torch.zeros(2)
    result = weakref.ref(received)
    pending = Pending(lambda values=[received]: values.pop())
    del received
    tracer.begin_tick(0)
    with tracer.trace_call(Call(Stage("receive", "pipe"), 0)):
        tracer.add_flight("receive", "pipe", pending)
    pending.wait()
    del pending
    assert result() is not None
    tracer.release_finished()
    assert result() is None
    assert [event.name for event in tracer.timeline().events] == ["receive", "receive"]

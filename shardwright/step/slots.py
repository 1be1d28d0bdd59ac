"""Slots: the values that the stages of a micro-batch pass to each other, possibly still in flight."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from shardwright.comm.pending import LazyValue, Pending
from shardwright.errors import UserError
from shardwright.spec.calls import Call
from shardwright.spec.plan import Contract
from shardwright.step.tracer import Tracer

CONTRACT = "contract"  # attribute of a stage's function


class EndOfData(Exception):
    """The loader has no further batch."""


@dataclass(slots=True)  # frozen, each would take 1 us more
class InFlight:
    """Asynchronous work that will produce a slot's value."""

    name: str
    lane: str
    pending: Pending[Any]
    is_single_event: bool = True  # traced as a single event


def in_flight(name: str, lane: str, pending: Pending[Any]) -> Any:
    """The value of a slot: work of stage `name` on a lane, or its result if that exists already."""
    return pending.wait() if pending.is_ready else InFlight(name, lane, pending)


@dataclass(slots=True)
class StepValues:
    """The values of a step's slots: of each micro-batch, and those that belong to the whole step."""

    micro_batches: dict[int, dict[str, Any]] = field(default_factory=dict[int, dict[str, Any]])
    whole: dict[str, Any] = field(default_factory=dict[str, Any])

    def micro(self, number: int) -> dict[str, Any]:
        return self.micro_batches.setdefault(number, {})


class Slots:
    """The slots of one call. Access to a slot that its stage does not declare is an error.

    A stage that runs once a step reads a list, with the value of each micro-batch, of slots that belong to them.
    """

    def __init__(self, call: Call, values: StepValues, tracer: Tracer | None = None) -> None:
        self.call = call
        self.ends_data = False  # set by the stage that reads: no micro-batch follows this one
        self.tracer = tracer
        self._values = values
        is_whole = call.stage.per == "step"
        self._own = values.whole if is_whole else values.micro(call.micro)

    def __getitem__(self, slot: str) -> Any:
        """The slot's value; waits for it if it is in flight."""
        stage = self.call.stage
        if slot not in stage.reads:
            raise UserError(f'stage "{stage.name}" reads slot "{slot}" without declaring it')
        if slot in self._own:
            return wait_for_slot(self._own, slot, self.tracer)
        if stage.per == "micro":
            return self._values.whole[slot]
        micro_batches = sorted(self._values.micro_batches.items())
        return [wait_for_slot(values, slot, self.tracer) for _, values in micro_batches]

    @property
    def reads(self) -> tuple[str, ...]:
        """The slots that this stage reads."""
        return self.call.stage.reads

    def get_lazy(self, slot: str) -> Any:
        """The slot's value, or a LazyValue if it is in flight."""
        return LazyValue(lambda: self[slot]) if isinstance(self._own[slot], InFlight) else self[slot]

    def __setitem__(self, slot: str, value: Any) -> None:
        if slot not in self.call.stage.writes:
            raise UserError(f'stage "{self.call.stage.name}" writes slot "{slot}" without declaring it')
        self._own[slot] = value

    def issue(self, slot: str, pending: Pending[Any]) -> None:
        """Set a slot to asynchronous work on the stage's lane, or to its result if that exists already."""
        self[slot] = in_flight(self.call.stage.name, self.call.stage.lane, pending)

    def wait_for_writes(self) -> None:
        """Wait for the work in flight that this stage has written."""
        for slot in self.call.stage.writes:
            if slot in self._own:
                wait_for_slot(self._own, slot, self.tracer)

    def in_flight(self) -> list[InFlight]:
        """The work in flight that this stage has written."""
        return [value for slot in self.call.stage.writes if isinstance(value := self._own.get(slot), InFlight)]

    def release(self, slots: Iterable[str]) -> None:
        """Drop the values of these slots, which no later stage of the micro-batch, or of the step, reads."""
        is_whole = self.call.stage.per == "step"
        for values in self._values.micro_batches.values() if is_whole else (self._own,):
            for slot in slots:
                values.pop(slot, None)


StageFunction = Callable[[Slots], Sequence[InFlight] | None]
F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Binding:
    """A stage's function.

    `run` may set a slot to InFlight work; it returns other work that it issued, for the tracer. `on_end_of_data` is
    called instead of `run` once there are no more batches.
    """

    run: StageFunction
    on_end_of_data: Callable[[], None] = lambda: None


def accesses(*, reads: tuple[str, ...] = (), writes: tuple[str, ...] = ()) -> Callable[[F], F]:
    """Declare the slots that the function of a stage reads and writes."""

    def declare(function: F) -> F:
        setattr(function, CONTRACT, Contract(reads, writes))
        return function

    return declare


def issues(slot: str, issue: Callable[..., Pending[Any]], reads: tuple[str, ...] = ()) -> StageFunction:
    """The function of a stage that sets `slot` to the work which `issue` starts; `reads`: its arguments."""

    @accesses(reads=reads, writes=(slot,))
    def run(slots: Slots) -> None:
        slots.issue(slot, issue(*(slots[name] for name in reads)))

    return run


def contract_of(function: Callable[..., Any]) -> Contract:
    """The slots that a function with `accesses` declares."""
    return getattr(function, CONTRACT)


def wait_for_slot(values: dict[str, Any], slot: str, tracer: Tracer | None) -> Any:
    """A slot's value; if it is in flight, waits for it and records the wait as an event."""
    value = values[slot]
    if not isinstance(value, InFlight):
        return value
    if tracer is None:
        values[slot] = value.pending.wait()
    else:
        start = time.perf_counter()
        values[slot] = value.pending.wait()
        tracer.add_wait(value.name, start)
    return values[slot]


def run_stage(binding: Binding, slots: Slots, tracer: Tracer | None) -> None:
    """Run the stage of a call, and record it with the work that it issued."""
    if tracer is None:
        binding.run(slots)
        return
    with tracer.trace_call(slots.call):
        other_work = binding.run(slots) or ()
        add_flights(tracer, (*slots.in_flight(), *other_work))


def add_flights(tracer: Tracer, works: Iterable[InFlight]) -> None:
    """Record work that a stage has issued."""
    for work in works:
        if work.is_single_event:
            tracer.add_flight(work.name, work.lane, work.pending)

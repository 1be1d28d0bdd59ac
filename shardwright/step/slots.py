"""Slots: the values that the stages of one batch pass to each other, possibly still in flight."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from shardwright.comm.pending import Pending
from shardwright.errors import UserError
from shardwright.spec.plan import Contract, Stage
from shardwright.step.tracer import Tracer

CONTRACT = "contract"  # attribute of a stage's function


class EndOfData(Exception):
    """The loader has no further batch."""


@dataclass(frozen=True, slots=True)
class InFlight:
    """Asynchronous work that will produce a slot's value."""

    name: str
    lane: str
    pending: Pending[Any]
    is_single_event: bool = True  # traced as a single event


class LazyValue:
    """Stands for a value in flight; waits for it at the first access to an attribute or item."""

    def __init__(self, get: Callable[[], Any]) -> None:
        self._get = get

    def __getattr__(self, name: str) -> Any:
        return getattr(self._get(), name)

    def __getitem__(self, key: Any) -> Any:
        return self._get()[key]


class Slots:
    """The slots of one batch for one stage. Access to a slot that the stage does not declare is an error."""

    def __init__(self, stage: Stage, values: dict[str, Any], tracer: Tracer | None = None) -> None:
        self._stage = stage
        self._values = values
        self._tracer = tracer

    def __getitem__(self, slot: str) -> Any:
        """The slot's value; waits for it if it is in flight."""
        if slot not in self._stage.reads:
            raise UserError(f'stage "{self._stage.name}" reads slot "{slot}" without declaring it')
        return wait_for_slot(self._values, slot, self._tracer)

    @property
    def reads(self) -> tuple[str, ...]:
        """The slots that this stage reads."""
        return self._stage.reads

    def get_lazy(self, slot: str) -> Any:
        """The slot's value, or a LazyValue if it is in flight."""
        return LazyValue(lambda: self[slot]) if isinstance(self._values[slot], InFlight) else self[slot]

    def __setitem__(self, slot: str, value: Any) -> None:
        if slot not in self._stage.writes:
            raise UserError(f'stage "{self._stage.name}" writes slot "{slot}" without declaring it')
        self._values[slot] = value


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
        with tracer.trace_wait(value.name):
            values[slot] = value.pending.wait()
    return values[slot]


def run_stage(stage: Stage, binding: Binding, values: dict[str, Any], tracer: Tracer | None, ahead: int = 0) -> None:
    """Run a stage on the batch that is `ahead` of the tick's, and record it with the work that it issued."""
    if tracer is None:
        binding.run(Slots(stage, values))
        return
    with tracer.trace_stage(stage, ahead) as issued:
        issued_work = binding.run(Slots(stage, values, tracer)) or ()
        in_flight = [values[slot] for slot in stage.writes if isinstance(values.get(slot), InFlight)]
        issued += [(work.name, work.lane, work.pending) for work in (*in_flight, *issued_work) if work.is_single_event]

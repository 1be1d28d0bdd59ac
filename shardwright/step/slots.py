"""What stages hand each other: the slots of one batch, whose values may still be under way."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from shardwright.comm.pending import Pending
from shardwright.errors import UserError
from shardwright.spec.plan import Contract, Stage
from shardwright.step.tracer import Tracer


class EndOfData(Exception):
    """The loader has no further batch."""


@dataclass(frozen=True, slots=True)
class InFlight:
    """Work under way that gives a slot its value."""

    name: str
    lane: str
    pending: Pending[Any]
    is_single_event: bool = True  # a work of its own, not several that are told apart


class LazyValue:
    """What is under way, in the place of what it will be: waited for by whoever first needs it."""

    def __init__(self, get: Callable[[], Any]) -> None:
        self._get = get

    def __getattr__(self, name: str) -> Any:
        return getattr(self._get(), name)

    def __getitem__(self, key: Any) -> Any:
        return self._get()[key]


class Slots:
    """The slots of one batch as one stage may see them: reading or writing any other is refused by name."""

    def __init__(self, stage: Stage, values: dict[str, Any], tracer: Tracer | None = None) -> None:
        self._stage = stage
        self._values = values
        self._tracer = tracer

    def __getitem__(self, slot: str) -> Any:
        """The value; where it is under way, once it is there."""
        if slot not in self._stage.reads:
            raise UserError(f'stage "{self._stage.name}" reads slot "{slot}" without declaring it')
        return wait_for_slot(self._values, slot, self._tracer)

    @property
    def reads(self) -> tuple[str, ...]:
        """The slots that this stage reads."""
        return self._stage.reads

    def get_lazy(self, slot: str) -> Any:
        """The value; where it is under way, something that becomes it when it is first looked at."""
        return LazyValue(lambda: self[slot]) if isinstance(self._values[slot], InFlight) else self[slot]

    def __setitem__(self, slot: str, value: Any) -> None:
        if slot not in self._stage.writes:
            raise UserError(f'stage "{self._stage.name}" writes slot "{slot}" without declaring it')
        self._values[slot] = value

    def __contains__(self, slot: str) -> bool:
        return slot in self._stage.reads or slot in self._stage.writes


@dataclass(frozen=True, slots=True)
class Binding:
    """A stage's function and the slots that function touches. A slot may be given work under way; what else was issued
    is returned, for the tracer. `ended` is called in its place once there are no more batches."""

    contract: Contract
    run: Callable[[Slots], Sequence[InFlight] | None]
    on_end_of_data: Callable[[], None] = lambda: None


def wait_for_slot(values: dict[str, Any], slot: str, tracer: Tracer | None) -> Any:
    """A slot's value; one that is under way is waited for, and the tracer told for how long."""
    found = values[slot]
    if not isinstance(found, InFlight):
        return found
    if tracer is None:
        values[slot] = found.pending.wait()
    else:
        with tracer.trace_wait(found.name):
            values[slot] = found.pending.wait()
    return values[slot]


def run_stage(stage: Stage, binding: Binding, values: dict[str, Any], tracer: Tracer | None, ahead: int = 0) -> None:
    if tracer is None:
        binding.run(Slots(stage, values))
        return
    with tracer.trace_stage(stage, ahead) as issued:
        others = binding.run(Slots(stage, values, tracer)) or ()
        under = [values[slot] for slot in stage.writes if isinstance(values.get(slot), InFlight)]
        issued += [(one.name, one.lane, one.pending) for one in (*under, *others) if one.is_single_event]

"""Stages inside a stage, run where other control flow reaches them: hooks of autograd, or a user training loop.

Like the stages of a plan they are functions with declared slots, which issue communication and wait for what they
read. Only their order is not that of a list: a mechanism runs each stage when it is due, in the same order on all
ranks. Their events have the names that the planner predicts, those in the bodies of the plan's stages.
"""

from dataclasses import dataclass
from typing import Any

from shardwright.spec.calls import Call
from shardwright.spec.plan import Stage
from shardwright.step.slots import InFlight, Slots, StageFunction, StepValues, add_flights, contract_of, wait_for_slot
from shardwright.step.tracer import Tracer


@dataclass(frozen=True, slots=True, eq=False)
class InnerStage:
    """A stage that writes one slot, bound to its function; `values`: of all slots of its mechanism."""

    function: StageFunction
    slots: Slots
    output: str  # the slot
    values: dict[str, Any]

    @property
    def has_value(self) -> bool:
        """Whether its value exists or is in flight."""
        return self.output in self.values

    @property
    def in_flight(self) -> bool:
        return isinstance(self.values.get(self.output), InFlight)

    def wait_for_value(self) -> Any:
        """The value that it has written; None if there is none."""
        value = self.values.get(self.output)
        return wait_for_slot(self.values, self.output, self.slots.tracer) if isinstance(value, InFlight) else value

    def take_if_ended(self) -> None:
        """Take the value that it has written if its work has ended, so that buffers of the work are freed."""
        value = self.values.get(self.output)
        if isinstance(value, InFlight) and value.pending.end is not None:
            wait_for_slot(self.values, self.output, None)

    def release(self) -> None:
        """Drop the value that it has written."""
        self.values.pop(self.output, None)


class InnerStages:
    """The stages of a mechanism. Values of their slots exist until they are released.

    `tracer`: of the plan's stage inside which they run; None: not traced.
    """

    def __init__(self) -> None:
        self.tracer: Tracer | None = None
        self._values = StepValues()

    def bind(self, name: str, lane: str, function: StageFunction) -> InnerStage:
        """Make a stage from a function with `accesses`. Several stages may have the same name."""
        contract = contract_of(function)
        (output,) = contract.writes
        call = Call(Stage(name, lane, contract.reads, contract.writes), step=0)
        return InnerStage(function, Slots(call, self._values), output, self._values.micro(0))

    def run(self, *stages: InnerStage) -> None:
        """Run these stages, except those whose value exists already or is in flight."""
        for stage in stages:
            if stage.output not in stage.values:
                stage.slots.tracer = self.tracer
                stage.function(stage.slots)
                work = stage.values.get(stage.output)
                if self.tracer is not None and isinstance(work, InFlight):
                    add_flights(self.tracer, (work,))

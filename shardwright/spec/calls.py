"""The calls of a rank: which stage runs for which micro-batch, in which order.

`CallOrder` is the only expansion of a list of stages. The executor (step/executor.py) runs its calls, the simulator
(planner/step/simulate.py) predicts them.

Time is divided into ticks. Each tick adds a micro-batch, or, under the schedule of a pipeline, all micro-batches of a
step. In each tick, every stage runs for the micro-batches that its lead is ahead of the tick. Data may have no end;
where it ends, each stage has one more call, with `is_end`.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from shardwright.spec.lanes import DENSE
from shardwright.spec.plan import Stage
from shardwright.spec.stage_checks import sort_by_lead

BACKWARD_OF = "backward "  # before a block's name: the stage in the body of backward that runs the block's
Schedule = Sequence[tuple[str, int]]  # stages by name, each with a micro-batch of the step


@dataclass(frozen=True, slots=True)
class Call:
    """A stage for one micro-batch, or for a whole step, whose last micro-batch is `micro`."""

    stage: Stage
    step: int
    micro: int = 0
    tick: int = 0  # when it is issued
    is_last: bool = True  # whether the micro-batch is the last of its step
    is_end: bool = False  # there is no such micro-batch: the data ended with the one before


class CallOrder:
    """The calls of a list of stages, from step `first` on.

    A step has `micro_batches` micro-batches, fewer where the data ends. `schedule`: the calls of a step, in order; by
    default each micro-batch runs the stages in the order of the list. `end`: the number of micro-batches of all steps,
    from step 0; None while it is unknown. It may be set while the calls are taken, and then counts at once.
    """

    def __init__(
        self,
        stages: Iterable[Stage],
        *,
        micro_batches: int = 1,
        schedule: Schedule = (),
        first: int = 0,
        end: int | None = None,
    ) -> None:
        self.stages, self.micro_batches = tuple(stages), micro_batches
        self.batches_per_tick = micro_batches if schedule else 1
        self.first, self.end = first * micro_batches, end
        by_name = {stage.name: stage for stage in self.stages}
        named = [(by_name[name], micro) for name, micro in schedule]
        self._entries = named or [(stage, 0) for stage in self.stages]

    def ticks(self) -> Iterator[tuple[int, Iterator[Call]]]:
        """The number and the calls of each tick."""
        tick = self.first // self.batches_per_tick - max((stage.lead for stage in self.stages), default=0)
        while self.end is None or tick * self.batches_per_tick <= self.end:
            yield tick, self._calls(tick)
            tick += 1

    def last_batch(self, tick: int) -> int:
        """The last micro-batch of a tick, counted from step 0; less than `first` if the tick has none."""
        last = (tick + 1) * self.batches_per_tick - 1
        return last if self.end is None else min(last, self.end - 1)

    def _calls(self, tick: int) -> Iterator[Call]:
        for stage, micro in self._entries:
            start = (tick + stage.lead) * self.batches_per_tick
            batch = start + micro
            if stage.per == "step":
                batch = max(start, self.last_batch(tick + stage.lead))
            if batch < self.first or (self.end is not None and batch > self.end):
                continue
            is_last = (batch + 1) % self.micro_batches == 0 or batch + 1 == self.end
            if batch == self.end or is_last or stage.per == "micro":
                yield Call(stage, *divmod(batch, self.micro_batches), tick, is_last, batch == self.end)


def without_leads(stages: Sequence[Stage]) -> tuple[Stage, ...]:
    """The stages for serial execution, where every stage of a micro-batch runs before the next micro-batch."""
    return tuple(replace(stage, lead=0) for stage in sort_by_lead(stages))


def flatten_bodies(stages: Iterable[Stage], lead: int = 0) -> Iterator[Stage]:
    """The stages, or instead of a stage with a body the stages of its body, each with its total lead."""
    for stage in stages:
        if stage.body:
            yield from flatten_bodies(stage.body, lead + stage.lead)
        else:
            yield replace(stage, lead=lead + stage.lead)


def reducing_stages(stages: Iterable[Stage]) -> dict[str, str]:
    """By block, the stage in the body of backward that reduces its gradients once they and those before it exist."""
    body = next((stage.body for stage in stages if stage.name == "backward"), ())
    names: dict[str, str] = {}
    waiting: list[str] = []
    for stage in body:
        if stage.lane == DENSE:
            names |= dict.fromkeys(waiting, stage.name)
            waiting = []
        elif stage.name.startswith(BACKWARD_OF):
            waiting.append(stage.name.removeprefix(BACKWARD_OF))
    last = next((stage.name for stage in reversed(body) if stage.lane == DENSE), "")
    return names | dict.fromkeys(waiting, last) if last else {}


def last_readers(stages: Sequence[Stage]) -> dict[str, list[str]]:
    """By stage, the slots of a micro-batch that no later stage reads."""
    reader_of = {slot: stage.name for stage in sort_by_lead(stages) for slot in stage.reads}
    slots: dict[str, list[str]] = {stage.name: [] for stage in stages}
    for slot, name in reader_of.items():
        slots[name].append(slot)
    return slots

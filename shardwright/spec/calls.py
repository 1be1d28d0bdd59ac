"""The calls of a rank: which stage runs for which batch, in which order.

`CallOrder` is the only expansion of a list of stages. The executor (step/executor.py) runs its calls, the simulator
(planner/step/simulate.py) predicts them.

In each tick, every stage of the list runs once, in list order, for the batch that is its lead ahead of the tick: batch
`tick + lead`. Data may have no end; where it ends, each stage has one more call, with `is_end`.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from shardwright.spec.plan import Stage
from shardwright.spec.stage_checks import sort_by_lead


@dataclass(frozen=True, slots=True)
class Call:
    """A stage for one batch, or for one of its micro-batches."""

    stage: Stage
    step: int
    micro: int = 0
    tick: int = 0  # when it is issued
    is_end: bool = False  # there is no such batch: the data ended with the one before


class CallOrder:
    """The calls for the batches from `first` to `end` (excluded); None: the end is not known yet."""

    def __init__(self, stages: Iterable[Stage], *, first: int = 0, end: int | None = None) -> None:
        self.stages, self.first, self.end = tuple(stages), first, end

    def ticks(self) -> Iterator[tuple[int, Iterator[Call]]]:
        """The number and the calls of each tick; `end` may be set during a tick, and then counts at once."""
        tick = self.first - max((stage.lead for stage in self.stages), default=0)
        while self.end is None or tick <= self.end:
            yield tick, self._calls(tick)
            tick += 1

    def _calls(self, tick: int) -> Iterator[Call]:
        for stage in self.stages:
            batch = tick + stage.lead
            if batch >= self.first and (self.end is None or batch <= self.end):
                yield Call(stage, batch, tick=tick, is_end=batch == self.end)


def without_leads(stages: Sequence[Stage]) -> tuple[Stage, ...]:
    """The stages for serial execution, where every stage of a batch runs before the next batch."""
    return tuple(replace(stage, lead=0) for stage in sort_by_lead(stages))


def flatten_bodies(stages: Iterable[Stage], lead: int = 0) -> Iterator[Stage]:
    """The stages, or instead of a stage with a body the stages of its body, each with its total lead."""
    for stage in stages:
        if stage.body:
            yield from flatten_bodies(stage.body, lead + stage.lead)
        else:
            yield replace(stage, lead=lead + stage.lead)

"""The overlapped executor: the plan's list tick by tick, each stage for the batch that is its lead ahead.

Phases of a tick: one thread goes through the list in its order, the same on every rank. What communicates is issued
and goes on by itself; who reads a slot that is under way waits for it then. So a stage with a lead runs beside all
that follows it in the list, and one without beside all that does not need it.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from shardwright.spec.plan import Stage
from shardwright.step.slots import Binding, EndOfData, run_stage
from shardwright.step.tracer import Tracer


def run_overlapped(
    stages: Sequence[Stage], bindings: Mapping[str, Binding], tracer: Tracer | None = None, *, num_done: int = 0
) -> Iterator[int]:
    """Run the list for batch after batch after the first `done`, yielding how many are done, until reading ends."""
    batches: dict[int, dict[str, Any]] = {}
    end: int | None = None  # of the batches there are
    tick = num_done - max((stage.lead for stage in stages), default=0)
    first = num_done
    while end is None or tick < end:
        if tracer is not None:
            tracer.begin_tick(tick)
        for stage in stages:
            number = tick + stage.lead
            if number == end:
                bindings[stage.name].on_end_of_data()
            if number < first or end is not None and number >= end:
                continue
            try:
                run_stage(stage, bindings[stage.name], batches.setdefault(number, {}), tracer, stage.lead)
            except EndOfData:
                end = number
                del batches[number]
        if first <= tick and (end is None or tick < end):
            del batches[tick]
            num_done += 1
            yield num_done
        tick += 1
    for stage in stages:
        if tick + stage.lead == end:
            bindings[stage.name].on_end_of_data()

"""The overlapped executor: in a tick, each stage runs for the batch `lead` ahead of the tick.

One thread runs the stages of a tick in the order of the plan's list, the same on every rank. Communication is issued
and runs asynchronously; a stage that reads a slot in flight waits for it. A stage with a lead is thus overlapped with
all stages that follow it in the list, and a stage without a lead with the following stages that do not need its result.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from shardwright.spec.plan import Stage
from shardwright.step.slots import Binding, EndOfData, run_stage
from shardwright.step.tracer import Tracer


def run_overlapped(
    stages: Sequence[Stage], bindings: Mapping[str, Binding], tracer: Tracer | None = None, *, num_done: int = 0
) -> Iterator[int]:
    """Run the stages for every batch after the first `num_done`; yields the number of finished batches after each."""
    batches: dict[int, dict[str, Any]] = {}
    end: int | None = None  # number of batches, once known
    tick = num_done - max((stage.lead for stage in stages), default=0)
    first = num_done
    while end is None or tick < end:
        if tracer is not None:
            tracer.begin_tick(tick)
        for stage in stages:
            batch = tick + stage.lead
            if batch == end:
                bindings[stage.name].on_end_of_data()
            if batch < first or end is not None and batch >= end:
                continue
            try:
                run_stage(stage, bindings[stage.name], batches.setdefault(batch, {}), tracer, stage.lead)
            except EndOfData:
                end = batch
                del batches[batch]
        if first <= tick and (end is None or tick < end):
            del batches[tick]
            num_done += 1
            yield num_done
        tick += 1
    for stage in stages:
        if tick + stage.lead == end:
            bindings[stage.name].on_end_of_data()

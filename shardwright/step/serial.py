"""The serial executor: the plan's stages in the order one batch meets them, every result awaited at once.

It is the measure of what overlap gains, and the semantics that overlap must keep.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from shardwright.spec.plan import Stage
from shardwright.spec.stage_checks import sort_by_lead
from shardwright.step.slots import Binding, EndOfData, run_stage, wait_for_slot
from shardwright.step.tracer import Tracer


def run_serial(
    stages: Sequence[Stage], bindings: Mapping[str, Binding], tracer: Tracer | None = None, *, num_done: int = 0
) -> Iterator[int]:
    """Run the list for batch after batch after the first `done`, yielding how many are done, until reading ends."""
    stages = sort_by_lead(stages)
    while True:
        values: dict[str, Any] = {}
        if tracer is not None:
            tracer.begin_tick(num_done)
        for stage in stages:
            try:
                run_stage(stage, bindings[stage.name], values, tracer)
            except EndOfData:
                for one in stages:
                    bindings[one.name].on_end_of_data()
                return
            for slot in stage.writes:
                if slot in values:
                    wait_for_slot(values, slot, tracer)
        num_done += 1
        yield num_done

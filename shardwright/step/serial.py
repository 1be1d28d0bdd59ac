"""The serial executor: the plan's stages in the order one batch meets them, every result awaited at once.

It is the measure of what overlap gains, and the semantics that overlap must keep.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from shardwright.spec.plan import Stage
from shardwright.spec.stage_checks import met_in_order
from shardwright.step.slots import Binding, EndOfData, run_stage, waited
from shardwright.step.tracer import Tracer


def run_serial(
    stages: Sequence[Stage], bindings: Mapping[str, Binding], tracer: Tracer | None = None, *, done: int = 0
) -> Iterator[int]:
    """Run the list for batch after batch after the first `done`, yielding how many are done, until reading ends."""
    stages = met_in_order(stages)
    while True:
        values: dict[str, Any] = {}
        if tracer is not None:
            tracer.begin(done)
        for stage in stages:
            try:
                run_stage(stage, bindings[stage.name], values, tracer)
            except EndOfData:
                for one in stages:
                    bindings[one.name].ended()
                return
            for slot in stage.writes:
                if slot in values:
                    waited(values, slot, tracer)
        done += 1
        yield done

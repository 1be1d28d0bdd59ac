"""The serial executor: the plan's stages in the order one batch meets them, every result awaited at once.

It is the measure of what overlap gains, and the semantics that overlap must keep.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from shardwright.runtime.step import Binding, EndOfData, Slots
from shardwright.runtime.tracer import Tracer
from shardwright.spec.hazards import met_in_order
from shardwright.spec.plan import Stage


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
                return
        done += 1
        yield done


def run_stage(stage: Stage, binding: Binding, values: dict[str, Any], tracer: Tracer | None) -> None:
    if tracer is None:
        pending = binding.run(Slots(stage, values))
        if pending is not None:
            pending.wait()
        return
    with tracer.stage(stage):
        run_stage(stage, binding, values, None)

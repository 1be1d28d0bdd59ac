"""The serial executor: runs all stages of a batch before the next batch, and waits for the result of each stage.

It is the baseline for the gain of overlap, and defines the results that overlapped execution must reproduce.
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
    """Run the stages for every batch after the first `num_done`; yields the number of finished batches after each."""
    stages = sort_by_lead(stages)
    while True:
        values: dict[str, Any] = {}
        if tracer is not None:
            tracer.begin_tick(num_done)
        for stage in stages:
            try:
                run_stage(stage, bindings[stage.name], values, tracer)
            except EndOfData:
                for other in stages:
                    bindings[other.name].on_end_of_data()
                return
            for slot in stage.writes:
                if slot in values:
                    wait_for_slot(values, slot, tracer)
        num_done += 1
        yield num_done

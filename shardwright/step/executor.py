"""Run a list of stages over batches, in the order of spec/calls.py: overlapped, or serially.

Overlapped: one thread runs the calls, the same on every rank. Communication is issued and runs asynchronously; a stage
that reads a slot in flight waits for it. A stage with a lead is thus overlapped with all stages that follow it in the
list, and a stage without a lead with the following stages that do not need its result.

Serial: all stages of a batch run before the next batch, and each waits for its result. It is the baseline for the gain
of overlap, and defines the results that overlapped execution must reproduce.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from shardwright.spec.calls import CallOrder, without_leads
from shardwright.spec.plan import Stage
from shardwright.step.slots import Binding, EndOfData, run_stage, wait_for_slot
from shardwright.step.tracer import Tracer


def run_overlapped(
    stages: Sequence[Stage], bindings: Mapping[str, Binding], tracer: Tracer | None = None, *, num_done: int = 0
) -> Iterator[int]:
    """Run the stages for every batch after the first `num_done`; yields the number of finished batches after each."""
    return _run(CallOrder(stages, first=num_done), bindings, tracer, waits=False)


def run_serial(
    stages: Sequence[Stage], bindings: Mapping[str, Binding], tracer: Tracer | None = None, *, num_done: int = 0
) -> Iterator[int]:
    """Run the stages for every batch after the first `num_done`; yields the number of finished batches after each."""
    return _run(CallOrder(without_leads(stages), first=num_done), bindings, tracer, waits=True)


def _run(order: CallOrder, bindings: Mapping[str, Binding], tracer: Tracer | None, *, waits: bool) -> Iterator[int]:
    """Run the calls. `waits`: wait for the slots that a stage has written before the next call."""
    batches: dict[int, dict[str, Any]] = {}
    for tick, calls in order.ticks():
        if tracer is not None:
            tracer.begin_tick(tick)
        for call in calls:
            binding = bindings[call.stage.name]
            if call.is_end:
                binding.on_end_of_data()
                continue
            try:
                run_stage(call.stage, binding, batches.setdefault(call.step, {}), tracer, call.stage.lead)
            except EndOfData:
                order.end = call.step
                del batches[call.step]
                continue
            for slot in call.stage.writes if waits else ():
                if slot in batches[call.step]:
                    wait_for_slot(batches[call.step], slot, tracer)
        if batches.pop(tick, None) is not None:
            yield tick + 1

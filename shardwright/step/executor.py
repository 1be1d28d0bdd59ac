"""Run a list of stages over micro-batches, in the order of spec/calls.py: overlapped, or serially.

Overlapped: one thread runs the calls. Communication is issued and runs asynchronously; a stage that reads a slot in
flight waits for it. A stage with a lead is thus overlapped with all stages that follow it in the list, and a stage
without a lead with the following stages that do not need its result.

Serial: all stages of a micro-batch run before the next, and each waits for its result. It is the baseline for the gain
of overlap, and defines the results that overlapped execution must reproduce.

Each slot is dropped once its last reader has run.
"""

from collections.abc import Iterator, Mapping, Sequence

from shardwright.spec.calls import CallOrder, Schedule, last_readers, without_leads
from shardwright.spec.plan import Stage
from shardwright.step.slots import Binding, EndOfData, Slots, StepValues, run_stage
from shardwright.step.tracer import Tracer


def run_calls(
    stages: Sequence[Stage],
    bindings: Mapping[str, Binding],
    tracer: Tracer | None = None,
    *,
    overlap: bool,
    micro_batches: int = 1,
    schedule: Schedule = (),
    num_done: int = 0,
) -> Iterator[int]:
    """Run the calls of every step after the first `num_done`; yields the number of finished micro-batches after each
    tick. `micro_batches` and `schedule` are those of `CallOrder`."""
    stages = stages if overlap else without_leads(stages)
    order = CallOrder(stages, micro_batches=micro_batches, schedule=schedule, first=num_done)
    steps: dict[int, StepValues] = {}
    released_after = last_readers(order.stages)
    for tick, calls in order.ticks():
        if tracer is not None:
            tracer.begin_tick(tick * order.batches_per_tick // order.micro_batches)
        for call in calls:
            binding = bindings[call.stage.name]
            if call.is_end:
                binding.on_end_of_data()
                continue
            slots = Slots(call, steps.setdefault(call.step, StepValues()), tracer)
            batch = call.step * order.micro_batches + call.micro
            try:
                run_stage(binding, slots, tracer)
            except EndOfData:
                order.end = batch
                continue
            if slots.ends_data:
                order.end = batch + 1
            if not overlap:
                slots.wait_for_writes()
            slots.release(released_after[call.stage.name])
            del slots  # a caller may stop after this tick, and would keep the batch in memory
        last = order.last_batch(tick)
        if last >= max(order.first, tick * order.batches_per_tick):
            if (last + 1) % order.micro_batches == 0 or last + 1 == order.end:
                steps.pop(last // order.micro_batches, None)
            yield last + 1

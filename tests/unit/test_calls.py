"""The order of calls with micro-batches, stages that run once a step, and data that ends; how long slots live."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.spec.calls import CallOrder, reducing_stages
from shardwright.spec.plan import Stage
from shardwright.step.executor import run_calls
from shardwright.step.slots import Binding, EndOfData

READ = Stage("read", "read", (), ("batch",), lead=2)
WORK = Stage("work", "main", ("batch", "state.weights"), ("gradient",))
STEP = Stage("step", "main", ("gradient",), ("state.weights",), per="step")
EMIT = Stage("emit", "main", ("batch",))
STAGES = (READ, WORK, STEP, EMIT)


def calls(stages=STAGES, **settings):
    return [call for _, calls in CallOrder(stages, **settings).ticks() for call in calls if not call.is_end]


def names(listed):
    return [f"{call.stage.name} {call.step}.{call.micro}" for call in listed]


def test_a_stage_per_step_runs_after_the_last_micro_batch():
    serial = tuple(Stage(s.name, s.lane, s.reads, s.writes, per=s.per) for s in STAGES)
    assert names(calls(serial, micro_batches=2, end=3)) == [
        *["read 0.0", "work 0.0", "emit 0.0", "read 0.1", "work 0.1", "step 0.1", "emit 0.1"],
        *["read 1.0", "work 1.0", "step 1.0", "emit 1.0"],  # the data ends inside step 1
    ]


def test_leads_count_micro_batches():
    assert names(calls(micro_batches=2, end=4)) == [
        *["read 0.0", "read 0.1", "read 1.0", "work 0.0", "emit 0.0"],
        *["read 1.1", "work 0.1", "step 0.1", "emit 0.1", "work 1.0", "emit 1.0", "work 1.1", "step 1.1", "emit 1.1"],
    ]


def test_a_schedule_orders_the_micro_batches_of_a_step():
    schedule = [("read", 0), ("read", 1), ("read", 2), ("work", 1), ("work", 0), ("work", 2), ("step", 0), ("emit", 0)]
    stages = (Stage("read", "read", (), ("batch",), lead=1), *STAGES[1:])
    assert names(calls(stages, micro_batches=3, schedule=schedule, end=5)) == [
        *["read 0.0", "read 0.1", "read 0.2"],
        *["read 1.0", "read 1.1", "work 0.1", "work 0.0", "work 0.2", "step 0.2", "emit 0.0"],
        *["work 1.1", "work 1.0", "step 1.1", "emit 1.0"],  # the data ends before micro-batch 2 of step 1
    ]


@given(st.integers(1, 4), st.integers(0, 9), st.integers(0, 2), st.lists(st.integers(0, 3), min_size=4, max_size=4))
def test_every_stage_runs_once_for_every_micro_batch_or_step(micro_batches, num_batches, first, leads):
    stages = [
        Stage("a", "main", lead=leads[0]),
        Stage("b", "main", lead=leads[1]),
        Stage("c", "main", per="step"),
        Stage("d", "main", lead=leads[3]),
    ]
    listed = calls(stages, micro_batches=micro_batches, first=first, end=first * micro_batches + num_batches)
    batches = [divmod(first * micro_batches + i, micro_batches) for i in range(num_batches)]
    last_of_step = list({step: (step, micro) for step, micro in batches}.values())
    for stage in stages:
        ran = [(call.step, call.micro) for call in listed if call.stage.name == stage.name]
        assert ran == (last_of_step if stage.per == "step" else batches)
        assert [call.is_last for call in listed if call.stage.name == stage.name] == [
            key in last_of_step for key in ran
        ]
    for ahead in stages:  # a larger lead runs first, equal leads in list order
        for later in stages:
            if ahead.per == later.per == "micro" and (-ahead.lead, stages.index(ahead)) < (
                -later.lead,
                stages.index(later),
            ):
                keys = [(call.step, call.micro, call.stage.name) for call in listed]
                assert all(keys.index((*key, ahead.name)) < keys.index((*key, later.name)) for key in batches)


def run_steps(overlap, num_batches, micro_batches):
    """Run batches 0, 1, ...; returns what the stages saw."""
    log, batches = [], iter(range(num_batches + 1))
    live = []

    class Value:
        def __init__(self, number):
            self.number = number
            live.append(number)

        def __del__(self):
            live.remove(self.number)

    def read(slots):
        batch = next(batches)
        if batch == num_batches:
            raise EndOfData
        slots["batch"] = Value(batch)
        slots.ends_data = batch + 1 == num_batches and (batch + 1) % micro_batches != 0

    def work(slots):
        slots["gradient"] = slots["batch"].number

    def step(slots):
        log.append(slots["gradient"])

    def emit(slots):
        log.append(f"emit {slots['batch'].number}")

    bindings = {function.__name__: Binding(function) for function in (read, work, step, emit)}
    num_live = []
    for _ in run_calls(STAGES, bindings, overlap=overlap, micro_batches=micro_batches):
        num_live.append(len(live))
    return log, num_live


@pytest.mark.parametrize("overlap", [True, False])
def test_a_stage_per_step_reads_the_slots_of_all_micro_batches(overlap):
    log, num_live = run_steps(overlap, 5, 3)
    expected = ["emit 0", "emit 1", [0, 1, 2], "emit 2", "emit 3", [3, 4], "emit 4"]
    assert log == expected
    assert max(num_live) == (READ.lead if overlap else 0)  # emit is the last reader of a batch


def test_a_stage_per_step_may_not_have_a_lead():
    from shardwright.spec.stage_checks import misplaced_step_stage

    class Plan:
        pipeline = None
        stages = (STAGES[0], WORK, Stage("step", "main", ("gradient",), ("norm",), lead=1, per="step"))

    assert [*misplaced_step_stage(Plan())] == [
        'stage "step" runs once a step, with lead 1; leads are for micro-batches'
    ]
    Plan.stages = (
        *STAGES[:2],
        Stage("step", "main", ("gradient",), ("norm",), per="step"),
        Stage("late", "main", ("norm",)),
    )
    assert [*misplaced_step_stage(Plan())] == [
        'stage "late" runs for each micro-batch and reads slot "norm", which stage "step" writes once a step'
    ]


def test_a_bucket_is_reduced_by_the_stage_after_the_block_that_fills_it():
    body = tuple(
        Stage(name, "dense" if name.startswith("reduce") else "main")
        for name in ("backward d", "backward c", "reduce c", "backward b", "backward a", "reduce a")
    )
    expected = {"d": "reduce c", "c": "reduce c", "b": "reduce a", "a": "reduce a"}
    assert reducing_stages([Stage("forward", "main"), Stage("backward", "main", body=body)]) == expected
    assert reducing_stages([Stage("backward", "main")]) == {}

"""Hazards of stage lists: an error for each, and for each edge that is missing from a legal list."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.errors import UserError
from shardwright.planner.step.rank_calls import expand_calls
from shardwright.spec.plan import Contract, Stage, single_rank_plan
from shardwright.spec.stage_checks import sort_by_lead
from shardwright.spec.workload import Feature, Table, Workload

WORKLOAD = Workload(1, 8, (Table("user", 100, 4),), (Feature("viewer", "user"),), ())
READ = Stage("read", "host", (), ("batch",), lead=2)
EXCHANGE = Stage("exchange", "ids", ("batch",), ("ids",), lead=1)
LOOKUP = Stage("lookup", "main", ("ids", "state.tables"), ("vectors",))
DENSE = Stage("dense", "main", ("batch", "vectors", "state.dense"), ("gradients", "state.dense"))
UPDATE = Stage("update", "main", ("ids", "gradients", "state.tables"), ("state.tables",))
SAVE = Stage("save", "host", ("state.reader",))
STAGES = (READ, EXCHANGE, LOOKUP, DENSE, UPDATE)
CONTRACTS = {stage.name: Contract(stage.reads, stage.writes) for stage in STAGES}
PLAN = single_rank_plan(WORKLOAD, stages=STAGES, lanes=("main", "ids", "host"))


def refusal(plan, contracts=None):
    with pytest.raises(UserError) as caught:
        plan.verify(WORKLOAD, contracts)
    return str(caught.value)


def change_stage(stage, **changes):
    """The plan with one of its stages changed."""
    return replace(PLAN, stages=tuple(replace(s, **changes) if s is stage else s for s in STAGES))


def test_the_plan_is_legal():
    PLAN.verify()
    PLAN.verify(WORKLOAD, CONTRACTS)
    change_stage(READ, lead=1).verify(WORKLOAD, CONTRACTS)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (replace(PLAN, stages=(*STAGES, READ)), 'stage "read" appears 2 times; names must differ'),
        (replace(PLAN, lanes=(*PLAN.lanes, "ids")), 'lane "ids" appears 2 times; names must differ'),
        (change_stage(LOOKUP, lane="mian"), 'stage "lookup" runs on unknown lane "mian"; did you mean "main"?'),
        (
            change_stage(DENSE, body=(Stage("matmul", "tensor"),)),
            'stage "matmul" runs on unknown lane "tensor"; allowed: host, ids, main',
        ),
        (change_stage(LOOKUP, lead=-1), 'stage "lookup" has lead -1; wanted 0 or more'),
        (change_stage(LOOKUP, writes=()), 'stage "dense" reads slot "vectors" before any stage has written it'),
        (
            replace(PLAN, stages=(READ, EXCHANGE, DENSE, LOOKUP, UPDATE)),
            'stage "dense" reads slot "vectors" before any stage has written it',
        ),
        (
            change_stage(DENSE, writes=("gradients", "ids", "state.dense")),
            'stage "dense" writes slot "ids", which stage "exchange" has already written',
        ),
        (
            change_stage(DENSE, reads=("batch", "state.dense")),
            'stage "lookup" writes slot "vectors" that no stage reads',
        ),
        (
            change_stage(LOOKUP, lead=2),
            'stage "lookup" with lead 2 reads slot "ids", which does not exist yet: '
            'stage "exchange" writes it with lead 1',
        ),
        (
            change_stage(LOOKUP, lead=1),
            'stage "lookup" with lead 1 reads slot "state.tables" before stage "update" with lead 0 '
            'has written it: lower the lead, or allow "staleness<=1"',
        ),
        (
            replace(PLAN, stages=(replace(READ, writes=("batch", "state.reader")), *STAGES[1:], SAVE)),
            'stage "read" with lead 2 writes slot "state.reader" while stage "save" with lead 0 '
            "still needs its value of an earlier batch",
        ),
    ],
)
def test_hazards(plan, message):
    assert message in refusal(plan)


MOVE = Stage("move", "host", ("ids", "state.lines"), ("near", "state.lines", "state.tables.idle"), lead=1)
HELD_LOOKUP = replace(LOOKUP, reads=("ids", "near", "state.tables"))
HELD_UPDATE = replace(UPDATE, reads=("ids", "near", "gradients", "state.tables"))
HELD = (READ, EXCHANGE, MOVE, HELD_LOOKUP, DENSE, HELD_UPDATE)


def test_rows_that_no_batch_in_flight_has_are_moved_beside_an_update():
    """Legal only if every stage that uses the table holds its rows; with rows of batches in flight it is a race."""
    replace(PLAN, stages=HELD).verify(WORKLOAD)
    for number, stage in ((3, LOOKUP), (5, UPDATE)):
        stages = (*HELD[:number], stage, *HELD[number + 1 :])
        message = f'stage "{stage.name}" uses without reading "near"'
        assert message in refusal(replace(PLAN, stages=stages))
    all_rows = replace(MOVE, reads=("ids", "state.lines"), writes=("near", "state.lines", "state.tables"))
    message = refusal(replace(PLAN, stages=(*HELD[:2], all_rows, *HELD[3:])))
    assert 'stage "move" with lead 1 writes slot "state.tables" while stage "update"' in message
    nothing_held = replace(MOVE, writes=("state.lines", "state.tables.idle"))
    message = refusal(replace(PLAN, stages=(*HELD[:2], nothing_held, LOOKUP, DENSE, UPDATE)))
    assert "without reading a slot that holds its part" in message
    late = replace(MOVE, reads=("ids",), writes=("near", "state.tables.idle"))
    index_by_update = replace(HELD_UPDATE, writes=("state.tables", "state.lines"))
    replace(PLAN, stages=(*HELD[:2], late, *HELD[3:5], index_by_update)).verify(WORKLOAD)
    assert '"state.lines"' in refusal(replace(PLAN, stages=(*HELD[:5], index_by_update)))


def test_stages_after_a_write_are_not_ahead_of_it():
    write, ahead = Stage("write", "main", ("state.x",), ("state.x",)), Stage("ahead", "host", ("state.x",), (), lead=1)
    replace(PLAN, stages=(write, ahead)).verify()
    assert 'stage "ahead" with lead 1 reads slot "state.x" before' in refusal(replace(PLAN, stages=(ahead, write)))
    clear = Stage("clear", "host", (), ("state.x",), lead=1)
    read = Stage("read", "main", ("state.x",), ())
    replace(PLAN, stages=(read, clear)).verify()
    assert 'stage "clear" with lead 1 writes slot "state.x" while' in refusal(replace(PLAN, stages=(clear, read)))


STATE_SLOTS = st.sets(st.sampled_from(["state.x", "state.y"])).map(sorted).map(tuple)
STAGES_WITH_LEAD = st.lists(st.tuples(STATE_SLOTS, STATE_SLOTS, st.integers(0, 2)), min_size=1, max_size=4)


@settings(max_examples=300)
@given(STAGES_WITH_LEAD)
def test_a_legal_list_reads_the_values_of_serial_batches(drawn):
    stages = [Stage(f"stage{i}", "main", reads, writes, lead) for i, (reads, writes, lead) in enumerate(drawn)]
    try:
        replace(PLAN, stages=tuple(stages)).verify()
    except UserError:
        return
    overlapped = [(call.stage, call.step) for call in expand_calls(stages, 6)]
    serial = [(stage, step) for step in range(6) for stage in sort_by_lead(stages)]
    assert last_writers(overlapped) == last_writers(serial)


def last_writers(calls):
    """For each call and slot that it reads, the last call before it that wrote the slot."""
    last, writers = {}, {}
    for stage, step in calls:
        for slot in stage.reads:
            writers[stage.name, step, slot] = last.get(slot)
        for slot in stage.writes:
            last[slot] = stage.name, step
    return writers


def test_staleness_up_to_the_lead_must_be_allowed():
    stages = tuple(replace(s, lead=2) if s in (EXCHANGE, LOOKUP) else s for s in STAGES)
    plan = replace(PLAN, stages=stages)
    assert '"staleness<=2"' in refusal(plan)
    assert '"staleness<=2"' in refusal(replace(plan, allow=("staleness<=1",)))
    replace(plan, allow=("staleness<=2",)).verify(WORKLOAD, CONTRACTS)
    replace(plan, allow=("staleness<=0", "staleness<=inf")).verify(WORKLOAD, CONTRACTS)


@st.composite
def legal_stages(draw):
    """Stages that each read some of the slots written so far; the last one reads all unread slots."""
    stages, slots, unread = [], [], set()
    for index in range(draw(st.integers(1, 6))):
        state_slots = draw(st.sets(st.sampled_from(["state.tables", "state.dense"])))
        reads = draw(st.sets(st.sampled_from(slots))) if slots else set()
        writes = {f"slot{index}.{i}" for i in range(draw(st.integers(0, 2)))}
        slots += sorted(writes)
        unread = (unread | writes) - reads
        stages.append(Stage(f"stage{index}", "main", (*sorted(reads), *state_slots), (*sorted(writes), *state_slots)))
    return (*stages, Stage("last", "main", (*sorted(unread), "state.dense"), ("state.dense",)))


@given(st.just(STAGES) | legal_stages())
def test_errors_name_every_missing_edge(stages):
    contracts = {stage.name: Contract(stage.reads, stage.writes) for stage in stages}
    plan = replace(PLAN, stages=stages)
    plan.verify(WORKLOAD, contracts)
    for index, stage in enumerate(stages):
        for side, direction, verb in (("reads", "from", "reads"), ("writes", "to", "writes")):
            for slot in getattr(stage, side):
                incomplete = replace(stage, **{side: tuple(s for s in getattr(stage, side) if s != slot)})
                message = refusal(replace(plan, stages=(*stages[:index], incomplete, *stages[index + 1 :])), contracts)
                edge = f'lacks the edge {direction} slot "{slot}": its function {verb} it'
                assert f'stage "{stage.name}" {edge}' in message


def test_errors_name_extra_edges_and_stages_without_functions():
    extra = change_stage(LOOKUP, reads=("ids", "batch", "state.tables"), writes=("vectors", "state.tables"))
    message = refusal(extra, CONTRACTS)
    assert 'stage "lookup" has an edge from slot "batch" that its function never reads' in message
    assert 'stage "lookup" has an edge to slot "state.tables" that its function never writes' in message
    misspelled = change_stage(UPDATE, name="updte")
    assert 'stage "updte" has no function; did you mean "update"?' in refusal(misspelled, CONTRACTS)
    assert 'stage "read" has no function' in refusal(PLAN, {})

"""Every hazard of a stage list by name, and: no single edge of a legal list can be removed unnoticed."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.errors import UserError
from shardwright.planner.step.simulate import expand_calls
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


def changed(stage, **changes):
    """The plan with one of its stages changed."""
    return replace(PLAN, stages=tuple(replace(s, **changes) if s is stage else s for s in STAGES))


def test_the_plan_is_legal():
    PLAN.verify()
    PLAN.verify(WORKLOAD, CONTRACTS)
    changed(READ, lead=1).verify(WORKLOAD, CONTRACTS)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (replace(PLAN, stages=(*STAGES, READ)), 'stage "read" appears 2 times; names must differ'),
        (replace(PLAN, lanes=(*PLAN.lanes, "ids")), 'lane "ids" appears 2 times; names must differ'),
        (changed(LOOKUP, lane="mian"), 'stage "lookup" runs on unknown lane "mian"; did you mean "main"?'),
        (
            changed(DENSE, body=(Stage("matmul", "tensor"),)),
            'stage "matmul" runs on unknown lane "tensor"; allowed: host, ids, main',
        ),
        (changed(LOOKUP, lead=-1), 'stage "lookup" has lead -1; wanted 0 or more'),
        (changed(LOOKUP, writes=()), 'stage "dense" reads slot "vectors" before any stage has written it'),
        (
            replace(PLAN, stages=(READ, EXCHANGE, DENSE, LOOKUP, UPDATE)),
            'stage "dense" reads slot "vectors" before any stage has written it',
        ),
        (
            changed(DENSE, writes=("gradients", "ids", "state.dense")),
            'stage "dense" writes slot "ids", which stage "exchange" has already written',
        ),
        (
            changed(DENSE, reads=("batch", "state.dense")),
            'stage "lookup" writes slot "vectors" that no stage reads',
        ),
        (
            changed(LOOKUP, lead=2),
            'stage "lookup" with lead 2 reads slot "ids", which does not exist yet: '
            'stage "exchange" writes it with lead 1',
        ),
        (
            changed(LOOKUP, lead=1),
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


def test_what_stands_behind_a_write_is_not_ahead_of_it():
    write, ahead = Stage("write", "main", ("state.x",), ("state.x",)), Stage("ahead", "host", ("state.x",), (), lead=1)
    replace(PLAN, stages=(write, ahead)).verify()
    assert 'stage "ahead" with lead 1 reads slot "state.x" before' in refusal(replace(PLAN, stages=(ahead, write)))
    clear = Stage("clear", "host", (), ("state.x",), lead=1)
    read = Stage("read", "main", ("state.x",), ())
    replace(PLAN, stages=(read, clear)).verify()
    assert 'stage "clear" with lead 1 writes slot "state.x" while' in refusal(replace(PLAN, stages=(clear, read)))


LASTING = st.sets(st.sampled_from(["state.x", "state.y"])).map(sorted).map(tuple)
AHEAD = st.lists(st.tuples(LASTING, LASTING, st.integers(0, 2)), min_size=1, max_size=4)


@settings(max_examples=300)
@given(AHEAD)
def test_a_legal_list_reads_what_one_batch_after_the_other_reads(drawn):
    stages = [Stage(f"stage{at}", "main", reads, writes, lead) for at, (reads, writes, lead) in enumerate(drawn)]
    try:
        replace(PLAN, stages=tuple(stages)).verify()
    except UserError:
        return
    played = [(call.stage, call.step) for call in expand_calls(stages, 6)]
    serial = [(stage, step) for step in range(6) for stage in sort_by_lead(stages)]
    assert seen(played) == seen(serial)


def seen(order):
    """By call and slot, the call that wrote last before."""
    last, found = {}, {}
    for stage, step in order:
        for slot in stage.reads:
            found[stage.name, step, slot] = last.get(slot)
        for slot in stage.writes:
            last[slot] = stage.name, step
    return found


def test_staleness_must_be_allowed_as_far_as_the_lead():
    stages = tuple(replace(s, lead=2) if s in (EXCHANGE, LOOKUP) else s for s in STAGES)
    plan = replace(PLAN, stages=stages)
    assert '"staleness<=2"' in refusal(plan)
    assert '"staleness<=2"' in refusal(replace(plan, allow=("staleness<=1",)))
    replace(plan, allow=("staleness<=2",)).verify(WORKLOAD, CONTRACTS)
    replace(plan, allow=("staleness<=0", "staleness<=inf")).verify(WORKLOAD, CONTRACTS)


@st.composite
def legal_stages(draw):
    """Stages that each read some of the slots written so far; the last reads what nobody did."""
    stages, slots, unread = [], [], set()
    for index in range(draw(st.integers(1, 6))):
        lasting = draw(st.sets(st.sampled_from(["state.tables", "state.dense"])))
        reads = draw(st.sets(st.sampled_from(slots))) if slots else set()
        writes = {f"slot{index}.{i}" for i in range(draw(st.integers(0, 2)))}
        slots += sorted(writes)
        unread = (unread | writes) - reads
        stages.append(Stage(f"stage{index}", "main", (*sorted(reads), *lasting), (*sorted(writes), *lasting)))
    return (*stages, Stage("last", "main", (*sorted(unread), "state.dense"), ("state.dense",)))


@given(st.just(STAGES) | legal_stages())
def test_every_removed_edge_is_refused_by_name(stages):
    contracts = {stage.name: Contract(stage.reads, stage.writes) for stage in stages}
    plan = replace(PLAN, stages=stages)
    plan.verify(WORKLOAD, contracts)
    for index, stage in enumerate(stages):
        for side, way, verb in (("reads", "from", "reads"), ("writes", "to", "writes")):
            for slot in getattr(stage, side):
                cut = replace(stage, **{side: tuple(s for s in getattr(stage, side) if s != slot)})
                message = refusal(replace(plan, stages=(*stages[:index], cut, *stages[index + 1 :])), contracts)
                edge = f'lacks the edge {way} slot "{slot}": its function {verb} it'
                assert f'stage "{stage.name}" {edge}' in message


def test_contracts_also_refuse_extras_and_strangers():
    extra = changed(LOOKUP, reads=("ids", "batch", "state.tables"), writes=("vectors", "state.tables"))
    message = refusal(extra, CONTRACTS)
    assert 'stage "lookup" has an edge from slot "batch" that its function never reads' in message
    assert 'stage "lookup" has an edge to slot "state.tables" that its function never writes' in message
    stranger = changed(UPDATE, name="updte")
    assert 'stage "updte" has no function; did you mean "update"?' in refusal(stranger, CONTRACTS)
    assert 'stage "read" has no function' in refusal(PLAN, {})

"""Layouts in plans: partitions pass, changed ones do not; messages of checks; time limits."""

import time
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.errors import UserError
from shardwright.spec import files
from shardwright.spec.axes import Axis
from shardwright.spec.plan import (
    Async,
    Bounded,
    Dense,
    ExpertPlan,
    Placement,
    Plan,
    Recompute,
    Rect,
    Share,
    TablePlan,
    Wire,
    single_rank_plan,
)
from shardwright.spec.workload import Block, Feature, Table, Workload

WORKLOAD = Workload(
    version=1,
    batch_size=8,
    tables=(Table("user", 100, 4), Table("item", 10, 2, "float16")),
    features=(Feature("viewer", "user"), Feature("seen", "item")),
    statistics=(),
    blocks=(Block("top", 5, 20, 80, 160, 16),),
)
PLAN = single_rank_plan(WORKLOAD, stages=())
USER, ITEM = PLAN.tables
RECT = USER.rects[0]

SECONDS = 5  # ten times the time on an idle machine; a pass over all pairs of 128,000 rects would take hours


def refusal(plan, workload=WORKLOAD):
    with pytest.raises(UserError) as caught:
        plan.verify(workload)
    return str(caught.value)


def change_user(**changes):
    return replace(PLAN, tables=(replace(USER, **changes), ITEM))


def change_placement(**changes):
    return change_user(placement=replace(USER.placement, **changes))


def test_the_single_rank_plan_is_legal_and_has_reasons():
    PLAN.verify()
    PLAN.verify(WORKLOAD)
    assert [subject for subject, _ in PLAN.why] == ["table user", "table item", "stages"]
    assert ITEM.placement == Placement((("dram", None),), "float16", "float32")
    double = replace(WORKLOAD, tables=(Table("user", 9, 2, "float64"),), features=())
    single_rank_plan(double, stages=()).verify(double)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (replace(PLAN, workload_digest="0" * 16), "the plan is for workload 0000000000000000, not for this workload "),
        (replace(PLAN, allow=("wire.bf61",)), 'allow holds unknown "wire.bf61"; did you mean "wire.bf16"?'),
        (replace(PLAN, allow=("staleness<=-1",)), 'unknown "staleness<=-1"; did you mean "staleness<=N"?'),
        (replace(PLAN, axes=(Axis("data", "local", 1), Axis("data", "local", 2))), 'axis "data@local" appears 2 times'),
        (replace(PLAN, axes=(Axis("data", "local", 0),)), 'axis "data@local": size is 0; wanted more than 0'),
        (replace(PLAN, tables=(USER,)), 'table "item" is not planned'),
        (replace(PLAN, tables=(USER, ITEM, USER)), 'plan of table "user" appears 2 times'),
        (
            replace(PLAN, tables=(USER, ITEM, TablePlan("itm", "id", (), ITEM.placement))),
            'plan of unknown table "itm"; did you mean "item"?',
        ),
        (change_user(order="hash"), 'table "user" has order "hash"; allowed: id, load, hash:SEED'),
        (change_user(travel="row"), 'table "user" has travel "row"; allowed: vectors, rows'),
        (
            change_user(rects=(replace(RECT, table="item"),)),
            'rect (rows 0..100, columns 0..4) of table "item" is in the plan of table "user"',
        ),
        (
            change_user(rects=(replace(RECT, rows=(3, 3)),)),
            'rect (rows 3..3, columns 0..4) of table "user" is empty or not',
        ),
        (
            change_user(rects=(replace(RECT, cols=(0, 5)),)),
            'columns 0..5) of table "user" is empty or not inside rows 0..100',
        ),
        (change_user(rects=(replace(RECT, rows=(-1, 100)),)), "rows -1..100"),
        (change_user(rects=(RECT, RECT)), 'overlaps rect (rows 0..100, columns 0..4) of table "user"'),
        (change_user(rects=()), 'table "user": no rect holds rows 0..100, columns 0..4'),
        (
            change_user(rects=(replace(RECT, rows=(0, 60)),)),
            'table "user": no rect holds rows 60..100, columns 0..4',
        ),
        (change_user(rects=(replace(RECT, ranks=()),)), 'of table "user" has no rank'),
        (change_user(rects=(replace(RECT, ranks=(0, 0)),)), 'of table "user" names a rank twice in (0, 0)'),
        (
            change_user(rects=(replace(RECT, ranks=(0, 1)),)),
            'of table "user" names ranks (0, 1); the axes have ranks 0..0',
        ),
        (change_placement(tiers=()), 'table "user": the last tier, and no other, must hold all remaining rows'),
        (change_placement(tiers=(Share("hbm", 3), Share("dram", 5))), "the last tier, and no other"),
        (change_placement(tiers=(Share("hbm"), Share("dram"))), "the last tier, and no other"),
        (
            change_placement(tiers=(Share("hbm", -3), Share("dram"))),
            'table "user": tier "hbm": rows is -3; wanted 0 or more',
        ),
        (change_placement(tiers=(Share("dram", 3), Share("dram"))), 'table "user": tier "dram" appears 2 times'),
        (change_placement(sync=Bounded(3, 5)), 'table "user" has sync "bounded"; it needs allow "staleness<=3"'),
        (change_placement(sync=Bounded(-3, 0)), 'table "user": sync: pull is -3; wanted 0 or more'),
        (
            replace(PLAN, dense=replace(PLAN.dense, state="bfloat16")),
            'dense: state is bfloat16, the model\'s is float32: use that or allow "optimizer.bf16"',
        ),
        (change_placement(sync=Async()), 'table "user" has sync "async"; it needs allow "staleness<=inf"'),
        (
            change_placement(weight_dtype="bfloat16"),
            'weight_dtype is bfloat16, the model\'s is float32: use that or allow "tables.bf16"',
        ),
        (change_placement(weight_dtype="float64"), "weight_dtype is float64, the model's is float32: use that"),
        (
            change_placement(state_dtype="float16"),
            "state_dtype is float16; use float32",
        ),
        (
            replace(PLAN, wire=Wire(gradients="bfloat16")),
            'wire: gradients is bfloat16, the model\'s is float32: use that or allow "wire.bf16"',
        ),
        (
            replace(PLAN, dense=Dense(("data@local",), ("data@local",))),
            'dense.replicate and dense.shard "data@local" appears 2 times',
        ),
        (
            replace(PLAN, dense=Dense(shard=("data@locl",))),
            'dense names unknown axis "data@locl"; did you mean "data@local"?',
        ),
        (
            replace(PLAN, dense=Dense(recompute=(Recompute("tpo"),))),
            'the plan names unknown block "tpo"; did you mean "top"?',
        ),
        (
            replace(PLAN, experts=(ExpertPlan("top.moe", ("data@host",)),)),
            'experts of "top.moe" name axis "data@host"; wanted some of data@local, whose ranks have different tokens',
        ),
        (
            replace(PLAN, allow=("state.bf16",)),
            'allow holds "state.bf16", but the optimizer state of tables is never rounded; remove it',
        ),
        (
            replace(PLAN, experts=(ExpertPlan("top.moe", ("data@local",), groups=2),)),
            'experts of "top.moe" are exchanged between 2 groups of 1 ranks; wanted 1 to 1',
        ),
        (
            replace(PLAN, experts=(ExpertPlan("top.moe", ("data@local",), copies="fastest"),)),
            'experts of "top.moe" are copied as "fastest", which needs costs',
        ),
    ],
)
def test_errors_in_plans(plan, message):
    assert message in refusal(plan)


@pytest.mark.parametrize(
    "plan",
    [
        replace(change_placement(sync=Bounded(3, 5)), allow=("staleness<=5",)),
        replace(change_placement(sync=Async()), allow=("staleness<=inf",)),
        replace(change_placement(weight_dtype="bfloat16"), allow=("tables.bf16",)),
        replace(PLAN, dense=replace(PLAN.dense, state="bfloat16"), allow=("optimizer.bf16",)),
        replace(PLAN, wire=Wire("float16", "bfloat16"), allow=("wire.fp16", "wire.bf16")),
        replace(
            PLAN,
            axes=(Axis("data", "host", 2), Axis("data", "core", 3)),
            dense=Dense(("data@host",), ("data@core",), (Recompute("top"),), ("top",)),
        ),
        change_user(order="hash:7"),
        change_user(travel="rows"),
    ],
)
def test_permitted_changes_pass(plan):
    plan.verify(WORKLOAD)


def boundaries(size):
    return st.lists(st.integers(1, size - 1), max_size=5, unique=True).map(lambda inner: [0, *sorted(inner), size])


@st.composite
def partitions(draw):
    """A table split into row ranges, each row range into different columns; rects in any order."""
    rows, dim = draw(st.integers(2, 40)), draw(st.integers(2, 40))
    row_bounds = draw(boundaries(rows))
    rects = []
    for top, bottom in zip(row_bounds, row_bounds[1:], strict=False):
        columns = draw(boundaries(dim))
        rects += [Rect("t", (top, bottom), pair, (0,)) for pair in zip(columns, columns[1:], strict=False)]
    if draw(st.booleans()):  # transpose
        rows, dim = dim, rows
        rects = [replace(rect, rows=rect.cols, cols=rect.rows) for rect in rects]
    return rows, dim, draw(st.permutations(rects))


def one_table(rows, dim, rects):
    workload = Workload(1, 1, (Table("t", rows, dim),), (), ())
    plan = single_rank_plan(workload, stages=())
    return replace(plan, tables=(replace(plan.tables[0], rects=tuple(rects)),)), workload


@given(partitions())
def test_any_partition_passes(partition):
    plan, workload = one_table(*partition)
    plan.verify(workload)
    plan.verify()


@given(partitions(), st.data())
def test_any_perturbed_partition_is_refused(partition, data):
    rows, dim, rects = partition
    index = data.draw(st.integers(0, len(rects) - 1))
    rect = rects[index]
    side = data.draw(st.sampled_from(["rows", "cols"]))
    start, end = getattr(rect, side)
    other_ranges = [(start, end - 1), (start + 1, end), (start, end + 1), (start - 1, end), (start + 1, end + 1)]
    new_rects = data.draw(st.sampled_from([[], [rect, rect], *([replace(rect, **{side: to})] for to in other_ranges)]))
    plan, workload = one_table(rows, dim, [*rects[:index], *new_rects, *rects[index + 1 :]])
    assert 'table "t"' in refusal(plan, workload)


def test_128_000_rects_load_and_verify_in_time(tmp_path):
    tables = tuple(Table(f"table_{i}", 12_800, 64) for i in range(1000))
    workload = Workload(1, 1024, tables, tuple(Feature(t.name, t.name) for t in tables), ())
    plan = replace(single_rank_plan(workload, stages=()), axes=(Axis("data", "local", 128),))
    rects = {
        t.name: [((r * 200, r * 200 + 200), (c * 32, c * 32 + 32)) for r in range(64) for c in range(2)] for t in tables
    }
    table_plans = tuple(
        replace(t, rects=tuple(Rect(t.table, *sides, (rank,)) for rank, sides in enumerate(rects[t.table])))
        for t in plan.tables
    )
    files.write(replace(plan, tables=table_plans), tmp_path / "plan.json")
    start = time.process_time()
    loaded = files.read(Plan, tmp_path / "plan.json")
    read_seconds = time.process_time() - start
    loaded.verify(workload)
    verify_seconds = time.process_time() - start - read_seconds
    print(f"128,000 rects: read {read_seconds:.2f} s, verify {verify_seconds:.2f} s")
    assert loaded.tables == table_plans
    assert read_seconds < SECONDS
    assert verify_seconds < SECONDS


def test_one_table_of_128_000_rects_verifies_in_time():
    rects = [Rect("t", (r, r + 1), (c, c + 1), (0,)) for c in range(320) for r in range(400)]
    plan, workload = one_table(400, 320, rects)
    start = time.process_time()
    plan.verify(workload)
    seconds = time.process_time() - start
    print(f"one table of 128,000 rects: verify {seconds:.2f} s")
    assert seconds < SECONDS
    assert "no rect holds rows 211..212, columns 7..8" in refusal(
        replace(
            plan,
            tables=(replace(plan.tables[0], rects=tuple(r for r in rects if (r.rows[0], r.cols[0]) != (211, 7))),),
        ),
        workload,
    )

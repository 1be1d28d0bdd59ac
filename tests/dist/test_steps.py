"""Whole training steps over ranks against one process: losses, dense weights, tables and their optimizer's state."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest
import torch
from drawn import OPTIMIZERS, examples, plans
from hypothesis import given, seed, settings
from hypothesis import strategies as st

from shardwright.errors import UserError
from shardwright.jagged import Batch, Jagged, narrow
from shardwright.layers.embedding import EmbeddingBags
from shardwright.measure.describe import describe
from shardwright.models.dlrm import DLRM
from shardwright.planner.plan import make_plan
from shardwright.planner.step.stages import LANES, recommendation_stages
from shardwright.runtime.build import build
from shardwright.runtime.planning import plan_single_process
from shardwright.spec import presets
from shardwright.spec.optimizer import Adam, RowWiseAdaGrad
from shardwright.spec.plan import Placement, Plan, Rect, Share, TablePlan, Wire
from shardwright.spec.workload import Feature, Table

STEPS = 20
ROWS = (40, 7, 300)
SIZE = 24  # samples of a global batch


def tables(dtype="float64") -> list[Table]:
    return [Table(f"t{at}", rows, 8, dtype) for at, rows in enumerate(ROWS)]


def model(optimizer, dtype="float64") -> DLRM:
    torch.manual_seed(3)
    features = [Feature("a", "t0", "mean"), Feature("b", "t1"), Feature("c", "t2"), Feature("d", "t2")]
    found = DLRM(EmbeddingBags(tables(dtype), features, optimizer), 5, bottom=[16, 8], top=[16])
    return found.to(torch.float64) if dtype == "float64" else found


def batch(step: int, size: int = SIZE, dtype=torch.float64) -> Batch:
    draw = torch.Generator().manual_seed(step)
    lengths = torch.randint(0, 4, (4, size), generator=draw)
    counts = lengths.sum(1).tolist()
    rows = (40, 7, 300, 300)
    values = torch.cat([torch.randint(0, row, (n,), generator=draw) for row, n in zip(rows, counts, strict=True)])
    labels = (torch.rand(size, generator=draw) < 0.4).to(dtype)
    weights = torch.rand(size, generator=draw, dtype=dtype) + 0.1 if step % 3 == 0 else None
    return Batch(
        Jagged(("a", "b", "c", "d"), values, lengths),
        torch.randn(size, 5, generator=draw, dtype=dtype),
        {"click": labels},
        weights,
    )


def part(whole: Batch, start: int, stop: int) -> Batch:
    assert whole.dense is not None
    weights = None if whole.weights is None else whole.weights[start:stop]
    labels = {name: label[start:stop] for name, label in whole.labels.items()}
    return Batch(narrow(whole.features, start, stop), whole.dense[start:stop], labels, weights)


def plan_one(mine: DLRM, first: Batch | None = None) -> Plan:
    """Of one process, also where there are several."""
    return plan_single_process(mine, describe(mine, first or batch(0)), ())


def by_hand(world: int) -> list[TablePlan]:
    """Rows, a replica, and columns over two ranks or on one."""
    last = world - 1
    half = [Rect("t2", (0, 300), (0, 3), (last,)), Rect("t2", (0, 300), (3, 8), (0,))]
    rects = {
        "t0": [Rect("t0", (40 * r // world, 40 * (r + 1) // world), (0, 8), (r,)) for r in range(world)],
        "t1": [Rect("t1", (0, 7), (0, 8), tuple(range(world)))],
        "t2": half if world > 1 else [Rect("t2", (0, 300), (0, 8), (0,))],
    }
    placement = Placement((Share("dram"),))
    return [
        TablePlan(name, "hash:5", tuple(each), placement, "rows" if name == "t2" else "vectors")
        for name, each in rects.items()
    ]


def cut_plan(one: Plan, world: int, behind: str, wire: str, cuts: Sequence[TablePlan] = ()) -> Plan:
    cuts = cuts or by_hand(world)
    tables = tuple(
        replace(table, rects=cut.rects, order=cut.order, travel=cut.travel) for table, cut in zip(one.tables, cuts, strict=True)
    )
    return replace(
        one,
        axes=(("rank", world),),
        lanes=LANES,
        tables=tables,
        stages=recommendation_stages(False, behind),
        dense=replace(one.dense, replicate=("rank",)),
        wire=Wire(wire, wire, wire),
        allow=("wire.bf16",),
    )


def trained(world: int, optimizer, overlap: bool, behind: str, splits: tuple[int, ...], cuts: Sequence[TablePlan] = ()):
    """(losses, logits) of this rank and the whole state at the first."""
    mine = model(optimizer)
    plan = cut_plan(plan_one(mine), world, behind, "float64", cuts)
    hottest = {f"t{at}": torch.arange(rows - 1, rows // 2, -1) for at, rows in enumerate(ROWS)}
    job = build(mine, plan, optimizer=lambda p: torch.optim.Adam(p, 0.01), overlap=overlap, hottest=hottest)
    rank = job.mesh.rank
    ends = [sum(splits[:at]) for at in range(world + 1)]
    outputs = list(job.run(part(batch(step), ends[rank], ends[rank + 1]) for step in range(STEPS)))
    held = [part(batch(100 + step), ends[rank], ends[rank + 1]) for step in range(2)]
    evaluated = [one.logits for one in job.evaluate(held)]
    state = job.state()
    job.mesh.close()
    tensors = {name: value for name, value in state.tensors.items() if not value.is_meta}
    return [one.logits for one in outputs], evaluated, tensors, len(job.tracer.timeline().events)


@cache
def alone(optimizer):
    mine = model(optimizer)
    job = build(mine, plan_one(mine), optimizer=lambda p: torch.optim.Adam(p, 0.01))
    outputs = [one.logits for one in job.run(batch(step) for step in range(STEPS))]
    evaluated = [one.logits for one in job.evaluate([batch(100), batch(101)])]
    return outputs, evaluated, job.state().tensors


def same(found, wanted, names=None):
    for name in names or wanted:
        if not name.startswith("random"):
            torch.testing.assert_close(found[name], wanted[name], rtol=0, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}")


def check(ranks, world: int, optimizer, splits: tuple[int, ...], behind: Sequence[str], cuts=()) -> None:
    """Serial and overlapped steps equal those of one process, and each other to the bit."""
    outputs, evaluated, state = alone(optimizer)
    found = []
    for overlap, what in ((False, "read"), *((True, each) for each in behind)):
        answers = ranks.run(world, trained, world, optimizer, overlap, what, splits, cuts)
        for step, wanted in enumerate(outputs):
            logits = torch.cat([answer[0][step] for answer in answers])
            torch.testing.assert_close(logits, wanted, rtol=0, atol=1e-10)
        for step, wanted in enumerate(evaluated):
            logits = torch.cat([answer[1][step] for answer in answers])
            torch.testing.assert_close(logits, wanted, rtol=0, atol=1e-10)
        same(answers[0][2], state)
        found.append(answers)
    serial, *others = found
    for answers in others:
        for one, other in zip(serial, answers, strict=True):
            assert all(map(torch.equal, one[0], other[0]))
            assert all(torch.equal(one[2][name], other[2][name]) for name in one[2] if not name.startswith("random"))


@pytest.mark.parametrize("optimizer", (RowWiseAdaGrad(0.1), Adam(0.01)), ids=lambda one: one.kind)
@pytest.mark.parametrize(
    "world, splits", ((1, (24,)), (2, (13, 11)), (3, (10, 0, 14)), (4, (6, 6, 6, 6)), (4, (0, 0, 24, 0)))
)
def test_steps_over_ranks_equal_one_process(ranks, world, splits, optimizer):
    check(ranks, world, optimizer, splits, ("read", "vectors", "gradients"))


@pytest.mark.parametrize("optimizer", (RowWiseAdaGrad(0.1), Adam(0.01)), ids=lambda one: one.kind)
def test_copies_in_both_hosts_equal_one_process(ranks, optimizer):
    """Two as the planner writes them where they are pinned, the third in columns that lie crosswise."""
    work = describe(model(optimizer, "float32"), batch(0, dtype=torch.float32))
    made = make_plan(work, presets.unmeasured_cluster(2, 2, 10**9), pins={"t0": "copy-row", "t1": "copy-table"}).plan
    columns = [Rect("t2", (0, 300), (0, 3), (0, 3)), Rect("t2", (0, 300), (3, 8), (1, 2))]
    rows, whole, other = made.tables
    assert [rect.ranks for rect in rows.rects] == [(0, 2), (1, 3)] and len(whole.rects[0].ranks) == 2
    cuts = (rows, replace(whole, travel="rows"), replace(other, order="load", rects=tuple(columns)))
    check(ranks, 4, optimizer, (6, 0, 13, 5), ("read", "gradients"), cuts)


def uneven(overlap: bool, behind: str, nums: tuple[int, ...]) -> str:
    """What a rank with so many batches is told."""
    world = len(nums)
    mine = model(RowWiseAdaGrad(0.1))
    plan = cut_plan(plan_one(mine), world, behind, "float64")
    hottest = {f"t{at}": torch.arange(rows) for at, rows in enumerate(ROWS)}
    job = build(mine, plan, optimizer=lambda p: torch.optim.Adam(p, 0.01), overlap=overlap, hottest=hottest)
    rank, told = job.mesh.rank, ""
    try:
        for _ in job.run(part(batch(step), rank * SIZE // world, (rank + 1) * SIZE // world) for step in range(nums[rank])):
            pass
    except UserError as error:
        told = str(error)
    job.mesh.close()
    return told


@pytest.mark.parametrize(
    "overlap, behind, nums",
    (
        (False, "read", (3, 4, 3)),
        (True, "read", (3, 4, 3)),
        (True, "vectors", (3, 4, 3)),
        (True, "gradients", (3, 4, 3)),
        (True, "read", (5, 0, 5)),
    ),
)
def test_batches_that_end_at_some_ranks_only(ranks, overlap, behind, nums):
    ended = ["0, 2", "1"] if nums[1] > nums[0] else ["1", "0, 2"]
    for told in ranks.run(3, uneven, overlap, behind, nums):
        assert f"the batches of ranks [{ended[0]}] have ended, and those of ranks [{ended[1]}] have not" in told


@st.composite
def shares(draw, world: int) -> tuple[int, ...]:
    """How many of a batch's samples each rank has."""
    ends = [0, *sorted(draw(st.integers(0, SIZE)) for _ in range(world - 1)), SIZE]
    return tuple(end - start for start, end in pairwise(ends))


@examples(8)
def test_steps_of_any_plan_equal_one_process(ranks, examples):
    @seed(0)
    @settings(database=None, max_examples=examples)
    @given(data=st.data(), world=st.sampled_from((2, 3, 4)), optimizer=st.sampled_from(OPTIMIZERS))
    def each(data, world, optimizer):
        cuts = tuple(data.draw(plans(one, world)) for one in tables())
        behind = data.draw(st.sampled_from(("read", "vectors", "gradients")))
        check(ranks, world, optimizer, data.draw(shares(world)), (behind,), cuts)

    each()

"""Training steps over ranks compared with one process: logits, dense weights, tables and their optimizer state."""

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
from shardwright.planner.step.stages import step_stages
from shardwright.runtime.build import build
from shardwright.runtime.planning import plan_single_process
from shardwright.spec import presets
from shardwright.spec.axes import Axis
from shardwright.spec.lanes import LANES
from shardwright.spec.optimizer import Adam, RowWiseAdaGrad
from shardwright.spec.plan import Placement, Plan, Rect, Share, TablePlan, Wire
from shardwright.spec.workload import Feature, Table

STEPS = 20
ROWS = (40, 7, 300)
SIZE = 24  # global batch size


def tables(dtype="float64") -> list[Table]:
    return [Table(f"t{number}", rows, 8, dtype) for number, rows in enumerate(ROWS)]


def make_model(optimizer, dtype="float64") -> DLRM:
    torch.manual_seed(3)
    features = [Feature("a", "t0", "mean"), Feature("b", "t1"), Feature("c", "t2"), Feature("d", "t2")]
    model = DLRM(EmbeddingBags(tables(dtype), features, optimizer), 5, bottom=[16, 8], top=[16])
    return model.to(torch.float64) if dtype == "float64" else model


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


def take(whole: Batch, start: int, stop: int) -> Batch:
    """The samples `start` to `stop` of a batch."""
    assert whole.dense is not None
    weights = None if whole.weights is None else whole.weights[start:stop]
    labels = {name: label[start:stop] for name, label in whole.labels.items()}
    return Batch(narrow(whole.features, start, stop), whole.dense[start:stop], labels, weights)


def single_plan(model: DLRM, example: Batch | None = None) -> Plan:
    """The plan of one process, also in a rank of several."""
    return plan_single_process(model, describe(model, example or batch(0)), ())


def table_plans(world: int) -> list[TablePlan]:
    """One table row-wise over all ranks, one replicated on all, one column-wise over two ranks or on the only one."""
    last = world - 1
    half = [Rect("t2", (0, 300), (0, 3), (last,)), Rect("t2", (0, 300), (3, 8), (0,))]
    rects = {
        "t0": [Rect("t0", (40 * r // world, 40 * (r + 1) // world), (0, 8), (r,)) for r in range(world)],
        "t1": [Rect("t1", (0, 7), (0, 8), tuple(range(world)))],
        "t2": half if world > 1 else [Rect("t2", (0, 300), (0, 8), (0,))],
    }
    placement = Placement((Share("dram"),))
    return [
        TablePlan(name, "hash:5", tuple(table_rects), placement, "rows" if name == "t2" else "vectors")
        for name, table_rects in rects.items()
    ]


def shard_plan(single: Plan, world: int, ids_after: str, wire: str, sharded: Sequence[TablePlan] = ()) -> Plan:
    """The plan of one process for `world` ranks, its tables sharded as in `sharded` (default: `table_plans`)."""
    pairs = zip(single.tables, sharded or table_plans(world), strict=True)
    tables = tuple(replace(old, rects=new.rects, order=new.order, travel=new.travel) for old, new in pairs)
    return replace(
        single,
        axes=(Axis("data", "rank", world),),
        lanes=LANES,
        tables=tables,
        stages=step_stages(ids_after=ids_after),
        dense=replace(single.dense, replicate=("data@rank",)),
        wire=Wire(wire, wire, wire),
        allow=("wire.bf16",),
    )


def train(world: int, optimizer, overlap: bool, ids_after: str, sizes: tuple[int, ...], sharded: Sequence[TablePlan]):
    """Run on a rank: logits of this rank in training and evaluation, state tensors, and the number of events."""
    model = make_model(optimizer)
    plan = shard_plan(single_plan(model), world, ids_after, "float64", sharded)
    hottest = {f"t{number}": torch.arange(rows - 1, rows // 2, -1) for number, rows in enumerate(ROWS)}
    job = build(model, plan, optimizer=lambda p: torch.optim.Adam(p, 0.01), overlap=overlap, hottest=hottest)
    rank = job.mesh.rank
    bounds = [sum(sizes[:number]) for number in range(world + 1)]
    outputs = list(job.run(take(batch(step), bounds[rank], bounds[rank + 1]) for step in range(STEPS)))
    evaluation = [take(batch(100 + step), bounds[rank], bounds[rank + 1]) for step in range(2)]
    evaluated = [out.logits for out in job.evaluate(evaluation)]
    state = job.state()
    job.mesh.close()
    tensors = {name: value for name, value in state.tensors.items() if not value.is_meta}
    return [out.logits for out in outputs], evaluated, tensors, len(job.tracer.timeline().events)


@cache
def train_reference(optimizer):
    model = make_model(optimizer)
    job = build(model, single_plan(model), optimizer=lambda p: torch.optim.Adam(p, 0.01))
    outputs = [out.logits for out in job.run(batch(step) for step in range(STEPS))]
    evaluated = [out.logits for out in job.evaluate([batch(100), batch(101)])]
    return outputs, evaluated, job.state().tensors


def assert_same(tensors, expected):
    for name, value in expected.items():
        if not name.startswith("random"):
            torch.testing.assert_close(tensors[name], value, rtol=0, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}")


def check(ranks, world: int, optimizer, sizes: tuple[int, ...], ids_after: Sequence[str], sharded=()) -> None:
    """Serial and overlapped steps must equal those of one process, and each other to the bit."""
    outputs, evaluated, state = train_reference(optimizer)
    runs = []
    for overlap, stage in ((False, "read"), *((True, stage) for stage in ids_after)):
        answers = ranks.run(world, train, world, optimizer, overlap, stage, sizes, sharded)
        for step, expected in enumerate(outputs):
            logits = torch.cat([answer[0][step] for answer in answers])
            torch.testing.assert_close(logits, expected, rtol=0, atol=1e-10)
        for step, expected in enumerate(evaluated):
            logits = torch.cat([answer[1][step] for answer in answers])
            torch.testing.assert_close(logits, expected, rtol=0, atol=1e-10)
        assert_same(answers[0][2], state)
        runs.append(answers)
    serial, *overlapped_runs = runs
    for answers in overlapped_runs:
        for (logits, _, state, _), other in zip(serial, answers, strict=True):
            assert all(map(torch.equal, logits, other[0]))
            assert all(torch.equal(state[name], other[2][name]) for name in state if not name.startswith("random"))


@pytest.mark.parametrize("optimizer", (RowWiseAdaGrad(0.1), Adam(0.01)), ids=lambda opt: opt.kind)
@pytest.mark.parametrize(
    "world, sizes", ((1, (24,)), (2, (13, 11)), (3, (10, 0, 14)), (4, (6, 6, 6, 6)), (4, (0, 0, 24, 0)))
)
def test_steps_over_ranks_equal_one_process(ranks, world, sizes, optimizer):
    check(ranks, world, optimizer, sizes, ("read", "vectors", "gradients"))


@pytest.mark.parametrize("optimizer", (RowWiseAdaGrad(0.1), Adam(0.01)), ids=lambda opt: opt.kind)
def test_replicas_in_both_hosts_equal_one_process(ranks, optimizer):
    """Two tables are sharded as the planner does when they are pinned, columns of the third cross the hosts."""
    workload = describe(make_model(optimizer, "float32"), batch(0, dtype=torch.float32))
    pins = {"t0": "copy-row", "t1": "copy-table"}
    plan = make_plan(workload, presets.unmeasured_cluster(2, 2, 10**9), pins=pins).plan
    columns = [Rect("t2", (0, 300), (0, 3), (0, 3)), Rect("t2", (0, 300), (3, 8), (1, 2))]
    row_wise, table_wise, last = plan.tables
    assert [rect.ranks for rect in row_wise.rects] == [(0, 2), (1, 3)] and len(table_wise.rects[0].ranks) == 2
    sharded = (row_wise, replace(table_wise, travel="rows"), replace(last, order="load", rects=tuple(columns)))
    check(ranks, 4, optimizer, (6, 0, 13, 5), ("read", "gradients"), sharded)


def run_uneven(overlap: bool, ids_after: str, nums: tuple[int, ...]) -> str:
    """The error on a rank where rank r has nums[r] batches."""
    world = len(nums)
    model = make_model(RowWiseAdaGrad(0.1))
    plan = shard_plan(single_plan(model), world, ids_after, "float64")
    hottest = {f"t{number}": torch.arange(rows) for number, rows in enumerate(ROWS)}
    job = build(model, plan, optimizer=lambda p: torch.optim.Adam(p, 0.01), overlap=overlap, hottest=hottest)
    rank, message = job.mesh.rank, ""
    try:
        start, stop = rank * SIZE // world, (rank + 1) * SIZE // world
        for _ in job.run(take(batch(step), start, stop) for step in range(nums[rank])):
            pass
    except UserError as error:
        message = str(error)
    job.mesh.close()
    return message


@pytest.mark.parametrize(
    "overlap, ids_after, nums",
    (
        (False, "read", (3, 4, 3)),
        (True, "read", (3, 4, 3)),
        (True, "vectors", (3, 4, 3)),
        (True, "gradients", (3, 4, 3)),
        (True, "read", (5, 0, 5)),
    ),
)
def test_an_error_names_the_ranks_whose_batches_ended_first(ranks, overlap, ids_after, nums):
    first, last = ("0, 2", "1") if nums[1] > nums[0] else ("1", "0, 2")
    for message in ranks.run(3, run_uneven, overlap, ids_after, nums):
        assert f"the batches of ranks [{first}] have ended, and those of ranks [{last}] have not" in message


@st.composite
def local_batch_sizes(draw, world: int) -> tuple[int, ...]:
    bounds = [0, *sorted(draw(st.integers(0, SIZE)) for _ in range(world - 1)), SIZE]
    return tuple(end - start for start, end in pairwise(bounds))


@examples(8)
def test_steps_of_any_plan_equal_one_process(ranks, examples):
    @seed(0)
    @settings(database=None, max_examples=examples)
    @given(data=st.data(), world=st.sampled_from((2, 3, 4)), optimizer=st.sampled_from(OPTIMIZERS))
    def check_example(data, world, optimizer):
        sharded = tuple(data.draw(plans(table, world)) for table in tables())
        ids_after = data.draw(st.sampled_from(("read", "vectors", "gradients")))
        check(ranks, world, optimizer, data.draw(local_batch_sizes(world)), (ids_after,), sharded)

    check_example()

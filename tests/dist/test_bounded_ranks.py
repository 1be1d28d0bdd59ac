"""Tables with bounded staleness over ranks: what the bound leaves exact is exact. The bound: `test_bounded_reads`."""

from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from test_steps import STEPS, assert_same, batch, make_model, shard_plan, single_plan, take, train_reference
from test_unused_features import Model, masked_batches
from test_unused_ranks import table_plans

from shardwright.errors import UserError
from shardwright.planner.step.stages import step_stages, with_copies
from shardwright.runtime.build import build
from shardwright.runtime.placements import allow_staleness
from shardwright.spec.axes import Axis
from shardwright.spec.lanes import LANES
from shardwright.spec.optimizer import SGD, AdaGrad, Adam, RowWiseAdaGrad
from shardwright.spec.plan import Bounded, Plan, Rect


def bounded_plan(single: Plan, world: int, sync: Bounded, ids_after: str = "read", names=None) -> Plan:
    """The plan of one process for `world` ranks; the tables `names`, or all, are row-wise with this bound."""
    tables = []
    for table in single.tables:
        (rect,) = table.rects
        ends = [rect.rows[1] * rank // world for rank in range(world + 1)]
        rects = tuple(Rect(table.table, span, rect.cols, (rank,)) for rank, span in enumerate(pairwise(ends)))
        rects = tuple(each for each in rects if each.rows[0] < each.rows[1])
        is_bounded = names is None or table.table in names
        placement = replace(table.placement, sync=sync) if is_bounded else table.placement
        travel = "rows" if is_bounded else "vectors"
        tables.append(replace(table, rects=rects, order="hash:5", placement=placement, travel=travel))
    return replace(
        single,
        axes=(Axis("data", "rank", world),),
        lanes=LANES,
        tables=tuple(tables),
        stages=with_copies(step_stages(ids_after=ids_after)),
        dense=replace(single.dense, replicate=("data@rank",)),
        allow=("staleness<=inf",),
    )


@contextmanager
def copies_without_staleness():
    """Inside, bounds of 0 have copies, which `build` would not make."""
    Bounded.has_copies = property(lambda self: True)
    try:
        yield
    finally:
        Bounded.has_copies = property(lambda self: self.pull > 0 or self.push > 0)


def train_exactly(world: int, optimizer, overlap: bool, on_one_rank: bool):
    """Run on a rank, with bounds of 0. `on_one_rank`: the last rank has the copied tables as a whole."""
    with copies_without_staleness():
        model = make_model(optimizer)
        plan = bounded_plan(single_plan(model), world, Bounded(0, 0, 320), names=("t0", "t2"))
        if on_one_rank:
            tables = [
                replace(table, rects=(Rect(table.table, (0, table.rects[-1].rows[1]), (0, 8), (world - 1,)),))
                for table in plan.tables
            ]
            plan = replace(plan, tables=tuple(tables))
        job = build(model, plan, optimizer=lambda p: torch.optim.Adam(p, 0.01), overlap=overlap)
    rank = job.mesh.rank
    begin, end = 24 * rank // world, 24 * (rank + 1) // world
    outputs = [out.logits for out in job.run(take(batch(step), begin, end) for step in range(STEPS))]
    evaluated = [out.logits for out in job.evaluate([take(batch(100 + step), begin, end) for step in range(2)])]
    state = job.state()
    job.mesh.close()
    return outputs, evaluated, {name: value for name, value in state.tensors.items() if not value.is_meta}


@pytest.mark.parametrize("optimizer", (SGD(0.1, momentum=0.9), AdaGrad(0.1), RowWiseAdaGrad(0.1), Adam(0.01)))
def test_copies_with_bounds_of_0_train_like_one_process(ranks, optimizer):
    outputs, evaluated, state = train_reference(optimizer)
    for overlap, on_one_rank in ((False, False), (True, False), (True, True)):
        answers = ranks.run(3, train_exactly, 3, optimizer, overlap, on_one_rank)
        for number, expected in enumerate(outputs):
            logits = torch.cat([answer[0][number] for answer in answers])
            torch.testing.assert_close(logits, expected, rtol=0, atol=1e-10)
        for number, expected in enumerate(evaluated):
            logits = torch.cat([answer[1][number] for answer in answers])
            torch.testing.assert_close(logits, expected, rtol=0, atol=1e-10)
        assert_same(answers[0][2], state)


SYNC = Bounded(6, 2, 320)


def train_and_resume(optimizer, overlap: bool, folder: str):
    """Run on a rank: logits of 6 steps, a checkpoint and 6 more; and of the last 6 from the checkpoint."""
    runs, path = [], ""
    for resumes in (False, True):
        model = make_model(optimizer)
        job = build(
            model,
            bounded_plan(single_plan(model), 3, SYNC),
            optimizer=lambda p: torch.optim.Adam(p, 0.01),
            overlap=overlap,
        )
        begin, end = 8 * job.mesh.rank, 8 * job.mesh.rank + 8
        batches = [take(batch(step), begin, end) for step in range(12)]
        logits = []
        if resumes:
            job.load(path)
        for out in job.run(batches[6:] if resumes else batches):
            logits.append(out.logits)
            if job.step == 6:
                path = job.save(folder)
        evaluated = [out.logits for out in job.evaluate([take(batch(100), begin, end)])]
        runs.append((logits, evaluated, job.state().tensors))
        job.mesh.close()
    return runs


@pytest.mark.parametrize("overlap", (False, True))
def test_a_resumed_run_repeats_every_bit(ranks, tmp_path, overlap):
    for (logits, evaluated, state), (again, evaluated_again, state_again) in ranks.run(
        3, train_and_resume, RowWiseAdaGrad(0.1), overlap, str(tmp_path)
    ):
        assert len(logits) == 12 and all(map(torch.equal, logits[6:], again))
        assert all(map(torch.equal, evaluated, evaluated_again))
        for name, value in state.items():
            assert value.is_meta or name.startswith("random") or torch.equal(value, state_again[name])


def train_bounded(optimizer, overlap: bool, ids_after: str, names):
    model = make_model(optimizer)
    plan = bounded_plan(single_plan(model), 3, SYNC, ids_after, names)
    job = build(model, plan, optimizer=lambda p: torch.optim.Adam(p, 0.01), overlap=overlap)
    begin, end = 8 * job.mesh.rank, 8 * job.mesh.rank + 8
    logits = [out.logits for out in job.run(take(batch(step), begin, end) for step in range(STEPS))]
    state = job.state().tensors
    job.mesh.close()
    return logits, {name: value for name, value in state.items() if not value.is_meta and "random" not in name}


@pytest.mark.parametrize("names", (None, ("t1",)))
def test_overlapped_steps_equal_serial_ones_and_differ_from_exact_ones(ranks, names):
    optimizer = Adam(0.01)
    serial = ranks.run(3, train_bounded, optimizer, False, "read", names)
    for ids_after in ("read", "gradients"):
        overlapped = ranks.run(3, train_bounded, optimizer, True, ids_after, names)
        for (logits, state), (others, other_state) in zip(serial, overlapped, strict=True):
            assert all(map(torch.equal, logits, others))
            assert all(torch.equal(value, other_state[name]) for name, value in state.items())
    exact, _, _ = train_reference(optimizer)
    first, last = (torch.cat([logits[step] for logits, _ in serial]) for step in (0, STEPS - 1))
    torch.testing.assert_close(first, exact[0], rtol=0, atol=1e-10)
    assert (last - exact[-1]).abs().max() > 1e-10
    torch.testing.assert_close(last, exact[-1], rtol=0, atol=0.1)


def train_with_unused_features(optimizer):
    """Run on a rank: some features have no gradient in some steps; copies have bounds of 0."""
    with copies_without_staleness():
        model = Model(optimizer)
        micro = masked_batches(6, 1)
        plan = shard_plan(single_plan(model, micro[0]), 3, "read", "float64", table_plans(3))
        names = [table.table for table in plan.tables if all(len(rect.ranks) == 1 for rect in table.rects)]
        plan = replace(allow_staleness(plan, {names[0]: Bounded(1, 0, 64)}), allow=("staleness<=inf", "wire.bf16"))
        bounds = {table.table: replace(table.placement, sync=Bounded(0, 0, 64)) for table in plan.tables}
        tables = tuple(
            replace(table, placement=bounds[table.table]) if table.table == names[0] else table for table in plan.tables
        )
        job = build(model, replace(plan, tables=tables))
    size = micro[0].batch_size
    begin, end = (size * rank // 3 for rank in (job.mesh.rank, job.mesh.rank + 1))
    for _ in job.run([take(whole, begin, end) for whole in micro]):
        pass
    state = job.state()
    job.mesh.close()
    return {name: value for name, value in state.tensors.items() if not value.is_meta}


def test_features_without_gradients_do_not_change_rows(ranks):
    """Row-wise AdaGrad does not move a row whose gradient is zero."""
    optimizer = RowWiseAdaGrad(0.1)
    model = Model(optimizer)
    for whole in masked_batches(6, 1):
        model.loss(model(whole), whole).backward()
    (state, *_) = ranks.run(3, train_with_unused_features, optimizer)
    weights = {name: value for name, value in state.items() if name.endswith(".weight") and "sparse" in name}
    assert weights
    for name, value in weights.items():
        expected = model.get_parameter(name.removeprefix("model/").removeprefix("model."))
        torch.testing.assert_close(value, expected.detach(), rtol=0, atol=1e-10)


def refused(what: str) -> str:
    optimizer = RowWiseAdaGrad(0.1, clip=1.0) if what == "clip" else RowWiseAdaGrad(0.1)
    model = make_model(optimizer)
    plan = bounded_plan(single_plan(model), 2, SYNC if what != "lines" else Bounded(6, 2, 32))
    if what == "frozen":
        model.sparse.weight("t0").requires_grad_(False)
    job = None
    try:
        job = build(
            model, plan, optimizer=lambda p: torch.optim.Adam(p, 0.01), accumulate=2 if what == "accumulate" else 1
        )
        batches = [take(batch(step, 400), 200 * job.mesh.rank, 200 * job.mesh.rank + 200) for step in range(2)]
        if what == "loop":
            next(iter(job.loader(batches)))
        list(job.run(batches))
    except UserError as error:
        return str(error)
    finally:
        if job is not None:
            job.mesh.close()
    return ""


@pytest.mark.parametrize(
    "what, message",
    (
        ("clip", "clip=1, weight_decay=0"),
        ("accumulate", "set accumulate=1"),
        ("loop", "train in job.run"),
        ("frozen", "some of these are frozen"),
        ("lines", "do not fit"),
    ),
)
def test_what_is_not_supported_says_so(ranks, what, message):
    for answer in ranks.run(2, refused, what):
        assert message in answer


def test_the_real_bound_needs_to_be_allowed():
    model = make_model(Adam(0.01))
    plan = replace(bounded_plan(single_plan(model), 3, Bounded(6, 2, 320)), allow=("staleness<=9",))
    with pytest.raises(UserError, match=r'needs allow "staleness<=10"'):
        plan.verify()
    replace(plan, allow=("staleness<=10",)).verify()

"""A loop of the user's own over ranks, `loss.backward()` in it, against the steps of one process."""

from collections.abc import Callable

import pytest
import torch
from test_steps import ROWS, STEPS, alone, batch, cut_plan, model, part, plan_one, same

from shardwright.errors import UserError
from shardwright.jagged import Batch
from shardwright.runtime.build import build
from shardwright.runtime.job import Job
from shardwright.spec.optimizer import Adam, RowWiseAdaGrad, SparseOptimizer


def ends(splits: tuple[int, ...]) -> list[int]:
    return [sum(splits[:at]) for at in range(len(splits) + 1)]


def made(world: int, optimizer: SparseOptimizer, overlap: bool = True, dense=None, wire: str = "float64") -> Job:
    mine = model(optimizer, "float64" if wire == "float64" else "float32")
    plan = cut_plan(plan_one(mine), world, "read", wire)
    hottest = {f"t{at}": torch.arange(rows - 1, rows // 2, -1) for at, rows in enumerate(ROWS)}
    optimizer_of = dense or (lambda parameters: torch.optim.Adam(parameters, 0.01))
    return build(mine, plan, optimizer=optimizer_of, overlap=overlap, hottest=hottest)


def trained(optimizer: SparseOptimizer, splits: tuple[int, ...], overlap: bool, to_none: bool):
    job = made(len(splits), optimizer, overlap=overlap)
    start, stop = ends(splits)[job.mesh.rank :][:2]
    logits = []
    for step, mine in enumerate(job.loader(part(batch(step), start, stop) for step in range(STEPS))):
        found = job.model(mine)
        loss = job.model.loss(found, mine)
        job.optimizer.zero_grad(set_to_none=to_none)
        if step % 5 == 0:  # between forward and backward, without a trace
            with torch.no_grad():
                job.model(part(batch(step + 50), start, stop))
        loss.backward()
        job.optimizer.step()
        logits.append(found.detach())
    held = [part(batch(100 + step), start, stop) for step in range(2)]
    evaluated = [one.logits for one in job.evaluate(held)]
    tensors = {name: value for name, value in job.state().tensors.items() if not value.is_meta}
    job.mesh.close()
    return logits, evaluated, tensors


@pytest.mark.parametrize("optimizer", (RowWiseAdaGrad(0.1), Adam(0.01)), ids=lambda one: one.kind)
@pytest.mark.parametrize("splits", ((24,), (13, 11), (10, 0, 14), (6, 6, 6, 6)))
@pytest.mark.parametrize("overlap, to_none", ((True, True), (False, False)))
def test_it_equals_one_process(ranks, optimizer, splits, overlap, to_none):
    outputs, evaluated, state = alone(optimizer)
    found = ranks.run(len(splits), trained, optimizer, splits, overlap, to_none)
    for at, wanted in enumerate((outputs, evaluated)):
        for step, one in enumerate(wanted):
            logits = torch.cat([answer[at][step] for answer in found])
            torch.testing.assert_close(logits, one, rtol=0, atol=1e-10)
    same(found[0][2], {name: one for name, one in state.items() if name != "step"})


def summed(world: int, kept: bool) -> list[torch.Tensor]:
    """Gradients after two passes without `zero_grad` between them, or the sum of those of each alone."""
    job = made(world, RowWiseAdaGrad(0.0), dense=lambda parameters: torch.optim.SGD(parameters, 0.0))
    rank, each = job.mesh.rank, []
    for mine in job.loader(part(batch(step), 12 * rank, 12 * rank + 12) for step in range(2)):
        if not kept:
            job.optimizer.zero_grad()
        job.model.loss(job.model(mine), mine).backward()
        each.append([one.grad.clone() for one in job.model.dense.parameters()])
    job.mesh.close()
    return each[1] if kept else [one + other for one, other in zip(*each, strict=True)]


def test_gradients_of_two_passes_add_up(ranks):
    wanted = ranks.run(2, summed, 2, False)[0]
    for found in ranks.run(2, summed, 2, True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


def apart(world: int, all_ranks: bool) -> float:
    """What the first batch did to the last layer's bias, where the loss of one rank leaves its vectors out."""
    job = made(world, RowWiseAdaGrad(0.1))
    rank = job.mesh.rank
    for mine in job.loader([part(batch(0), 12 * rank, 12 * rank + 12)]):
        logits = job.model(mine)
        if rank or all_ranks:
            logits = logits.detach() * 0 + list(job.model.dense.parameters())[-1]
        job.model.loss(logits, mine).backward()
    job.mesh.close()
    return float(list(job.model.dense.parameters())[-1].grad)


@pytest.mark.parametrize("all_ranks", (True, False))
def test_a_loss_that_leaves_vectors_out(ranks, all_ranks):
    one, other = ranks.run(2, apart, 2, all_ranks)
    assert one == other != 0.0


def passed(job: Job, one: Batch) -> torch.Tensor:
    return job.model.loss(job.model(one), one)


def another_batch(job: Job, mine: Batch) -> None:
    for _ in job.loader([mine]):
        passed(job, part(mine, 0, 5))


def another_weighed(job: Job, mine: Batch) -> None:
    for one in job.loader([mine]):
        passed(job, part(one, 0, 12))


def two_lookups(job: Job, mine: Batch) -> None:
    for one in job.loader([mine]):
        (passed(job, one) + passed(job, one)).backward()


def older(job: Job, mine: Batch) -> None:
    losses = [passed(job, one) for one in job.loader([mine, mine])]
    losses[0].backward()


def older_while_it_goes_on(job: Job, mine: Batch) -> None:
    losses = []
    with pytest.raises(UserError, match="of an older lookup than the last"):
        for one in job.loader([mine, mine]):
            losses.append(passed(job, one))
            if len(losses) == 2:
                losses[0].backward()
    next(job.run([mine]))


def twice(job: Job, mine: Batch) -> None:
    for one in job.loader([mine]):
        loss = passed(job, one)
        loss.backward(retain_graph=True)
        loss.backward()


def two_loops(job: Job, mine: Batch) -> None:
    first = job.loader([mine, mine])
    next(first)
    for one in job.loader([mine]):
        passed(job, one).backward()
    next(first)


def frozen(job: Job, mine: Batch) -> None:
    next(job.model.dense.parameters()).requires_grad_(False)
    next(job.loader([mine]))


def ended(job: Job, mine: Batch) -> None:
    for one in job.loader([mine] * (2 + job.mesh.rank)):
        passed(job, one).backward()


def mistaken(world: int, mistake: Callable[[Job, Batch], None]) -> tuple[str, int]:
    """What a rank is told, and the tables' steps."""
    job, told = made(world, RowWiseAdaGrad(0.1)), ""
    try:
        mistake(job, part(batch(0), 12 * job.mesh.rank, 12 * job.mesh.rank + 12))
    except UserError as error:
        told = str(error)
    job.mesh.close()
    return told, job.model.sparse.steps["t0"]


@pytest.mark.parametrize(
    "mistake, words, steps",
    (
        (passed, "in a loop over job.loader", 0),
        (another_batch, "lookup of samples of another batch", 0),
        (another_weighed, "lookup of samples of another batch", 0),
        (two_lookups, "second lookup of the same batch", 0),
        (older, "of an older lookup than the last", 0),
        (older_while_it_goes_on, "a backward pass of this job has failed", 0),
        (twice, "a backward pass without a lookup of its own", 1),
        (two_loops, "another job.loader or job.run has begun since", 1),
        (frozen, "was frozen after build", 0),
        (ended, "the batches of ranks [0] have ended, and those of ranks [1] have not", 2),
    ),
)
def test_mistakes_are_named(ranks, mistake, words, steps):
    for told, done in ranks.run(2, mistaken, 2, mistake):
        assert words in told and done == steps


def mixed(world: int, loops: bool) -> list[torch.Tensor]:
    """A batch looked at in a loop, then steps by `run`; with or without the look."""
    job = made(world, Adam(0.01))
    rank = job.mesh.rank
    mine = [part(batch(step), 12 * rank, 12 * rank + 12) for step in range(4)]
    if loops:
        looked = job.loader(mine)
        passed(job, next(looked))
    found = [one.logits for one in job.run(mine)]
    job.mesh.close()
    return found


def test_a_look_at_a_batch_leaves_no_trace_in_run(ranks):
    for found, wanted in zip(ranks.run(2, mixed, 2, True), ranks.run(2, mixed, 2, False), strict=True):
        assert all(map(torch.equal, found, wanted))


def rounded(world: int, own: bool) -> list[torch.Tensor]:
    """Losses with gradients that travel in bf16, and what rounding took added later: by `run`, or in a loop."""
    job = made(world, RowWiseAdaGrad(0.1), dense=lambda parameters: torch.optim.SGD(parameters, 0.1), wire="bfloat16")
    rank = job.mesh.rank
    mine = [part(batch(step, dtype=torch.float32), 12 * rank, 12 * rank + 12) for step in range(10)]
    found = []
    for one in job.loader(mine) if own else ():
        job.optimizer.zero_grad()
        logits = job.model(one)
        job.model.loss(logits, one).backward()
        job.optimizer.step()
        found.append(logits.detach())
    found = found or [one.logits for one in job.run(mine)]
    job.mesh.close()
    return found


def test_rounded_gradients_as_in_run(ranks):
    for found, wanted in zip(ranks.run(2, rounded, 2, True), ranks.run(2, rounded, 2, False), strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=2e-3)


def compiled(world: int) -> tuple[float, float]:
    found = []
    job = made(world, RowWiseAdaGrad(0.1))
    model = torch.compile(job.model, backend="aot_eager")
    rank = job.mesh.rank
    for one in job.loader(part(batch(0), 12 * rank, 12 * rank + 12) for _ in range(2)):
        job.optimizer.zero_grad()
        loss = job.model.loss(model(one), one)
        loss.backward()
        job.optimizer.step()
        found.append(float(loss.detach()))
    job.mesh.close()
    return found[0], found[1]


def test_a_compiled_model_trains(ranks):
    for first, second in ranks.run(2, compiled, 2, seconds=120.0):
        assert second < first


def still(world: int, own: bool) -> list[torch.Tensor]:
    """Logits with tables that are frozen."""
    mine = model(RowWiseAdaGrad(0.1))
    mine.sparse.requires_grad_(False)
    job = build(mine, cut_plan(plan_one(mine), world, "read", "float64"), optimizer=lambda p: torch.optim.SGD(p, 0.5))
    rank = job.mesh.rank
    batches = [part(batch(step), 12 * rank, 12 * rank + 12) for step in range(4)]
    found = []
    for one in job.loader(batches) if own else ():
        job.optimizer.zero_grad()
        found.append(job.model(one))
        job.model.loss(found[-1], one).backward()
        job.optimizer.step()
    found = [one.detach() for one in found] or [one.logits for one in job.run(batches)]
    job.mesh.close()
    return found


def test_frozen_tables(ranks):
    for found, wanted in zip(ranks.run(2, still, 2, True), ranks.run(2, still, 2, False), strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)

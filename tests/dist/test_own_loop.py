"""A loop of the user's own over ranks, `loss.backward()` in it, against the steps of one process."""

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


def made(world: int, optimizer: SparseOptimizer, wire: str = "float64", overlap: bool = True, dense=None) -> Job:
    mine = model(optimizer)
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
                job.model(mine)
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


def apart(world: int, frozen: bool) -> float:
    """What the first batch did to the last layer's bias, where the loss of one rank leaves its vectors out."""
    job = made(world, RowWiseAdaGrad(0.1))
    rank = job.mesh.rank
    for mine in job.loader([part(batch(0), 12 * rank, 12 * rank + 12)]):
        logits = job.model(mine)
        if rank or frozen:
            logits = logits.detach() * 0 + list(job.model.dense.parameters())[-1]
        job.model.loss(logits, mine).backward()
    job.mesh.close()
    return float(list(job.model.dense.parameters())[-1].grad)


@pytest.mark.parametrize("frozen", (True, False))
def test_a_loss_that_leaves_vectors_out(ranks, frozen):
    one, other = ranks.run(2, apart, 2, frozen)
    assert one == other != 0.0


def mistaken(world: int, kind: str) -> str:
    job = made(world, RowWiseAdaGrad(0.1))
    rank = job.mesh.rank
    mine = part(batch(0), 12 * rank, 12 * rank + 12)

    def pass_through(batch: Batch) -> torch.Tensor:
        return job.model.loss(job.model(batch), batch)

    told, older = "", []
    try:
        if kind == "no loader":
            pass_through(mine)
        for one in job.loader([mine] * (2 + (kind == "ended" and rank))):
            if kind == "another batch":
                pass_through(part(batch(0), 0, 5))
            elif kind == "two lookups":
                (pass_through(one) + pass_through(one)).backward()
            elif kind == "older":
                older.append(pass_through(one))
                if len(older) == 2:
                    older[0].backward()
            elif kind == "twice":
                loss = pass_through(one)
                loss.backward(retain_graph=True)
                loss.backward()
            elif kind == "ended":
                pass_through(one).backward()
    except UserError as error:
        told = str(error)
    job.mesh.close()
    return told


@pytest.mark.parametrize(
    "kind, words",
    (
        ("no loader", "in a loop of your own over job.loader"),
        ("another batch", "asked for 5 samples, and job.loader gave one of 12 last"),
        ("two lookups", "asked for 12 samples again"),
        ("older", "of an older lookup than the last"),
        ("twice", "the second through it"),
        ("ended", "the batches of ranks [0] have ended, and those of ranks [1] have not"),
    ),
)
def test_mistakes_are_named(ranks, kind, words):
    for told in ranks.run(2, mistaken, 2, kind):
        assert words in told

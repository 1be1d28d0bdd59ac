"""User training loops over ranks, with `loss.backward()`, compared with the steps of one process."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from test_steps import ROWS, STEPS, assert_same, batch, make_model, shard_plan, single_plan, take, train_reference

from shardwright.errors import UserError
from shardwright.jagged import Batch
from shardwright.runtime.build import build
from shardwright.runtime.job import Job
from shardwright.spec.optimizer import Adam, RowWiseAdaGrad, SparseOptimizer


def make_job(world: int, optimizer: SparseOptimizer, overlap: bool = True, dense=None, wire: str = "float64") -> Job:
    model = make_model(optimizer, "float64" if wire == "float64" else "float32")
    plan = shard_plan(single_plan(model), world, "read", wire)
    hottest = {f"t{number}": torch.arange(rows - 1, rows // 2, -1) for number, rows in enumerate(ROWS)}
    make_optimizer = dense or (lambda parameters: torch.optim.Adam(parameters, 0.01))
    return build(model, plan, optimizer=make_optimizer, overlap=overlap, hottest=hottest)


def train_on_rank(optimizer: SparseOptimizer, sizes: tuple[int, ...], overlap: bool, to_none: bool):
    job = make_job(len(sizes), optimizer, overlap=overlap)
    start, stop = [sum(sizes[:rank]) for rank in range(len(sizes) + 1)][job.mesh.rank :][:2]
    logits_of_steps = []
    for step, local in enumerate(job.loader(take(batch(step), start, stop) for step in range(STEPS))):
        logits = job.model(local)
        loss = job.model.loss(logits, local)
        job.optimizer.zero_grad(set_to_none=to_none)
        if step % 5 == 0:  # an evaluation between forward and backward changes nothing
            with torch.no_grad():
                job.model(take(batch(step + 50), start, stop))
        loss.backward()
        job.optimizer.step()
        logits_of_steps.append(logits.detach())
    evaluation = [take(batch(100 + step), start, stop) for step in range(2)]
    evaluated = [out.logits for out in job.evaluate(evaluation)]
    tensors = {name: value for name, value in job.state().tensors.items() if not value.is_meta}
    job.mesh.close()
    return logits_of_steps, evaluated, tensors


@pytest.mark.parametrize("optimizer", (RowWiseAdaGrad(0.1), Adam(0.01)), ids=lambda opt: opt.kind)
@pytest.mark.parametrize("sizes", ((24,), (13, 11), (10, 0, 14), (6, 6, 6, 6)))
@pytest.mark.parametrize("overlap, to_none", ((True, True), (False, False)))
def test_a_user_loop_over_ranks_equals_one_process(ranks, optimizer, sizes, overlap, to_none):
    outputs, evaluated, state = train_reference(optimizer)
    answers = ranks.run(len(sizes), train_on_rank, optimizer, sizes, overlap, to_none)
    for number, expected_logits in enumerate((outputs, evaluated)):
        for step, expected in enumerate(expected_logits):
            logits = torch.cat([answer[number][step] for answer in answers])
            torch.testing.assert_close(logits, expected, rtol=0, atol=1e-10)
    assert_same(answers[0][2], {name: value for name, value in state.items() if name != "step"})


def sum_gradients(world: int, accumulate: bool) -> list[torch.Tensor]:
    """Gradients after two passes without `zero_grad` between them, or the sum of the gradients of each pass."""
    job = make_job(world, RowWiseAdaGrad(0.0), dense=lambda parameters: torch.optim.SGD(parameters, 0.0))
    rank, gradients = job.mesh.rank, []
    for local in job.loader(take(batch(step), 12 * rank, 12 * rank + 12) for step in range(2)):
        if not accumulate:
            job.optimizer.zero_grad()
        job.model.loss(job.model(local), local).backward()
        gradients.append([parameter.grad.clone() for parameter in job.model.dense.parameters()])
    job.mesh.close()
    return gradients[1] if accumulate else [first + second for first, second in zip(*gradients, strict=True)]


def test_gradients_of_two_passes_add_up(ranks):
    expected = ranks.run(2, sum_gradients, 2, False)[0]
    for gradients in ranks.run(2, sum_gradients, 2, True):
        torch.testing.assert_close(gradients, expected, rtol=0, atol=1e-12)


def bias_gradient(world: int, all_ranks: bool) -> float:
    """Gradient of the last layer's bias if the loss of rank 1, or of all ranks, does not use the vectors."""
    job = make_job(world, RowWiseAdaGrad(0.1))
    rank = job.mesh.rank
    for local in job.loader([take(batch(0), 12 * rank, 12 * rank + 12)]):
        logits = job.model(local)
        if rank or all_ranks:
            logits = logits.detach() * 0 + list(job.model.dense.parameters())[-1]
        job.model.loss(logits, local).backward()
    job.mesh.close()
    return float(list(job.model.dense.parameters())[-1].grad)


@pytest.mark.parametrize("all_ranks", (True, False))
def test_a_loss_that_does_not_use_the_vectors(ranks, all_ranks):
    first, second = ranks.run(2, bias_gradient, 2, all_ranks)
    assert first == second != 0.0


def loss_of(job: Job, local: Batch) -> torch.Tensor:
    return job.model.loss(job.model(local), local)


def look_up_part_of_the_batch(job: Job, local: Batch) -> None:
    for _ in job.loader([local]):
        loss_of(job, take(local, 0, 5))


def look_up_a_copy_of_the_batch(job: Job, local: Batch) -> None:
    for samples in job.loader([local]):
        loss_of(job, take(samples, 0, 12))


def look_up_twice(job: Job, local: Batch) -> None:
    for samples in job.loader([local]):
        (loss_of(job, samples) + loss_of(job, samples)).backward()


def go_back_through_older_lookup(job: Job, local: Batch) -> None:
    losses = [loss_of(job, samples) for samples in job.loader([local, local])]
    losses[0].backward()


def continue_after_failed_backward(job: Job, local: Batch) -> None:
    losses = []
    with pytest.raises(UserError, match="of an older lookup than the last"):
        for samples in job.loader([local, local]):
            losses.append(loss_of(job, samples))
            if len(losses) == 2:
                losses[0].backward()
    next(job.run([local]))


def go_back_twice(job: Job, local: Batch) -> None:
    for samples in job.loader([local]):
        loss = loss_of(job, samples)
        loss.backward(retain_graph=True)
        loss.backward()


def run_two_loops(job: Job, local: Batch) -> None:
    first = job.loader([local, local])
    next(first)
    for samples in job.loader([local]):
        loss_of(job, samples).backward()
    next(first)


def freeze_after_build(job: Job, local: Batch) -> None:
    next(job.model.dense.parameters()).requires_grad_(False)
    next(job.loader([local]))


def end_first_on_rank_0(job: Job, local: Batch) -> None:
    for samples in job.loader([local] * (2 + job.mesh.rank)):
        loss_of(job, samples).backward()


def run_mistake(world: int, mistake: Callable[[Job, Batch], None]) -> tuple[str, int]:
    """The error of a rank, and the number of steps of its tables."""
    job, message = make_job(world, RowWiseAdaGrad(0.1)), ""
    try:
        mistake(job, take(batch(0), 12 * job.mesh.rank, 12 * job.mesh.rank + 12))
    except UserError as error:
        message = str(error)
    job.mesh.close()
    return message, job.model.sparse.steps["t0"]


@pytest.mark.parametrize(
    "mistake, expected, steps",
    (
        (loss_of, "in a loop over job.loader", 0),
        (look_up_part_of_the_batch, "lookup of samples of another batch", 0),
        (look_up_a_copy_of_the_batch, "lookup of samples of another batch", 0),
        (look_up_twice, "second lookup of the same batch", 0),
        (go_back_through_older_lookup, "of an older lookup than the last", 0),
        (continue_after_failed_backward, "a backward pass of this job has failed", 0),
        (go_back_twice, "a backward pass without its own lookup", 1),
        (run_two_loops, "another job.loader or job.run has begun since", 1),
        (freeze_after_build, "was frozen after build", 0),
        (end_first_on_rank_0, "the batches of ranks [0] have ended, and those of ranks [1] have not", 2),
    ),
)
def test_errors_name_mistakes_in_user_loops(ranks, mistake, expected, steps):
    for message, num_steps in ranks.run(2, run_mistake, 2, mistake):
        assert expected in message and num_steps == steps


def run_after_forward(world: int, with_forward: bool) -> list[torch.Tensor]:
    """Logits of steps by `run`; with or without a forward pass in a user loop before."""
    job = make_job(world, Adam(0.01))
    rank = job.mesh.rank
    batches = [take(batch(step), 12 * rank, 12 * rank + 12) for step in range(4)]
    if with_forward:
        loader = job.loader(batches)
        loss_of(job, next(loader))
    logits = [out.logits for out in job.run(batches)]
    job.mesh.close()
    return logits


def test_a_forward_pass_in_a_loop_does_not_change_a_later_run(ranks):
    with_forward, without = (ranks.run(2, run_after_forward, 2, flag) for flag in (True, False))
    for logits, expected in zip(with_forward, without, strict=True):
        assert all(map(torch.equal, logits, expected))


def train_rounded(world: int, user_loop: bool) -> list[torch.Tensor]:
    """Logits of training with gradients reduced in bf16 with error feedback, by `run` or in a user loop."""
    make_optimizer = partial(torch.optim.SGD, lr=0.1)
    job = make_job(world, RowWiseAdaGrad(0.1), dense=make_optimizer, wire="bfloat16")
    rank = job.mesh.rank
    batches = [take(batch(step, dtype=torch.float32), 12 * rank, 12 * rank + 12) for step in range(10)]
    logits_of_steps = []
    for local in job.loader(batches) if user_loop else ():
        job.optimizer.zero_grad()
        logits = job.model(local)
        job.model.loss(logits, local).backward()
        job.optimizer.step()
        logits_of_steps.append(logits.detach())
    logits_of_steps = logits_of_steps or [out.logits for out in job.run(batches)]
    job.mesh.close()
    return logits_of_steps


def test_gradients_are_rounded_in_a_user_loop_as_in_run(ranks):
    in_loop, in_run = (ranks.run(2, train_rounded, 2, user_loop) for user_loop in (True, False))
    for logits, expected in zip(in_loop, in_run, strict=True):
        torch.testing.assert_close(logits, expected, rtol=0, atol=2e-3)


def train_compiled(world: int) -> tuple[float, float]:
    losses = []
    job = make_job(world, RowWiseAdaGrad(0.1))
    model = torch.compile(job.model, backend="aot_eager")
    rank = job.mesh.rank
    for local in job.loader(take(batch(0), 12 * rank, 12 * rank + 12) for _ in range(2)):
        job.optimizer.zero_grad()
        loss = job.model.loss(model(local), local)
        loss.backward()
        job.optimizer.step()
        losses.append(float(loss.detach()))
    job.mesh.close()
    return losses[0], losses[1]


def test_a_compiled_model_trains(ranks):
    for first, second in ranks.run(2, train_compiled, 2, seconds=120.0):
        assert second < first


def train_with_frozen_tables(world: int, user_loop: bool) -> list[torch.Tensor]:
    model = make_model(RowWiseAdaGrad(0.1))
    model.sparse.requires_grad_(False)
    plan = shard_plan(single_plan(model), world, "read", "float64")
    job = build(model, plan, optimizer=lambda p: torch.optim.SGD(p, 0.5))
    rank = job.mesh.rank
    batches = [take(batch(step), 12 * rank, 12 * rank + 12) for step in range(4)]
    logits_of_steps = []
    for local in job.loader(batches) if user_loop else ():
        job.optimizer.zero_grad()
        logits_of_steps.append(job.model(local))
        job.model.loss(logits_of_steps[-1], local).backward()
        job.optimizer.step()
    logits_of_steps = [logits.detach() for logits in logits_of_steps] or [out.logits for out in job.run(batches)]
    job.mesh.close()
    return logits_of_steps


def test_frozen_tables_in_a_user_loop_as_in_run(ranks):
    in_loop, in_run = (ranks.run(2, train_with_frozen_tables, 2, user_loop) for user_loop in (True, False))
    for logits, expected in zip(in_loop, in_run, strict=True):
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-12)


def traced_stages(world: int) -> tuple[list[str], set[str]]:
    """The stages that a step of a user loop runs, in order, and the names of all its events."""
    job = make_job(world, RowWiseAdaGrad(0.1))
    rank = job.mesh.rank
    for local in job.loader(take(batch(step), 12 * rank, 12 * rank + 12) for step in range(3)):
        job.optimizer.zero_grad()
        loss_of(job, local).backward()
        job.optimizer.step()
    job.mesh.close()
    events = sorted((event for event in job.tracer.timeline().events if event.step == 1), key=lambda event: event.id)
    return [event.name for event in events if event.kind in ("stage", "issue")], {event.name for event in events}


def test_a_user_loop_runs_and_traces_the_stages_of_the_plan(ranks):
    for stages, names in ranks.run(2, traced_stages, 2):
        assert stages == ["request", "lengths", "ids", "lookup", "vectors", "gradients", "update"]
        assert names == {*stages, "reduce"}

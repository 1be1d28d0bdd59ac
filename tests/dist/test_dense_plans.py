"""Training steps with every parallelism strategy of the dense model over ranks and hosts, compared with one process."""

import os
from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from test_steps import SIZE, STEPS, batch, make_model, shard_plan, single_plan, take
from torch import nn

from shardwright.dense.flat_parameter import FlatParameter
from shardwright.errors import UserError
from shardwright.jagged import Batch
from shardwright.measure.describe import block_names, describe
from shardwright.parameter_shard import shard_of
from shardwright.planner.pins import LayerRequest
from shardwright.planner.plan import make_plan
from shardwright.runtime.build import build
from shardwright.runtime.job import Job
from shardwright.spec import presets
from shardwright.spec.axes import Axis
from shardwright.spec.lanes import LANES
from shardwright.spec.optimizer import RowWiseAdaGrad
from shardwright.spec.plan import Dense, Plan, Recompute

AXES = (Axis("data", "host", 2), Axis("data", "local", 2))
BLOCKS = ("dense.bottom", "dense.interaction", "dense.top")
DDP = Dense(replicate=("data@host", "data@local"))
FSDP = Dense(shard=("data@host", "data@local"))
HSDP = Dense(replicate=("data@host",), shard=("data@local",))
FULL = tuple(Recompute(name) for name in BLOCKS)
PRODUCTS = tuple(Recompute(name, "products") for name in BLOCKS)
PLANS = {
    "ddp-full": replace(DDP, recompute=FULL),
    "ddp-offload": replace(DDP, offload=BLOCKS),
    "fsdp": FSDP,
    "fsdp-products-offload": replace(FSDP, recompute=PRODUCTS, offload=("dense.top",)),
    "hsdp": replace(HSDP, ahead=2),
    "hsdp-full-offload": replace(HSDP, recompute=FULL, offload=BLOCKS, ahead=0),
}
ACCUMULATED = [("hsdp", False, 2), ("hsdp-full-offload", True, 2)]  # strategy, overlap, micro-batches


def plan_dense(model, dense: Dense, world: int, example: Batch | None = None) -> Plan:
    """A plan with this dense strategy, its tables sharded by `shard_plan`."""
    plan = shard_plan(single_plan(model, example), world, "read", "float64")
    axes = AXES if world == 4 else (Axis("data", "host", 1), Axis("data", "local", world))
    return replace(plan, axes=axes, lanes=(*LANES, "gather", "scatter"), dense=replace(dense, dtype="float64"))


def plan_offload(model) -> Plan:
    """A plan for one process that offloads all blocks."""
    plan = single_plan(model)
    return replace(plan, dense=replace(plan.dense, offload=BLOCKS))


def make_job(stack: ExitStack, dense: Dense, world: int, **options) -> Job:
    """A job over four ranks on two hosts, or over two ranks on one host."""
    if world == 4:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setenv("LOCAL_WORLD_SIZE", "2")
        patch.setenv("LOCAL_RANK", str(int(os.environ["RANK"]) % 2))
    model = make_model(RowWiseAdaGrad(0.1))
    options.setdefault("optimizer", lambda p: torch.optim.Adam(p, 0.01))
    job = build(model, plan_dense(model, dense, world), **options)
    stack.callback(job.mesh.close)
    return job


def local_batch(whole: Batch, job: Job) -> Batch:
    bounds = [SIZE * rank // job.mesh.size for rank in range(job.mesh.size + 1)]
    return take(whole, *[*pairwise(bounds)][job.mesh.rank])


def train_on_rank(dense: Dense, world: int, overlap: bool, accumulate: int, folder: Path):
    with ExitStack() as stack:
        job = make_job(stack, dense, world, overlap=overlap, accumulate=accumulate)
        outputs = list(job.run(local_batch(batch(step), job) for step in range(STEPS)))
        evaluated = [out.logits for out in job.evaluate([local_batch(batch(100), job)])]
        job.save(folder)
        tensors = job.state().tensors
        return [out.logits for out in outputs], evaluated, tensors if job.mesh.rank == 0 else {}


@cache
def train_single(accumulate: int):
    model = make_model(RowWiseAdaGrad(0.1))
    job = build(model, single_plan(model), optimizer=lambda p: torch.optim.Adam(p, 0.01), accumulate=accumulate)
    logits = [out.logits for out in job.run(batch(step) for step in range(STEPS))]
    return logits, [out.logits for out in job.evaluate([batch(100)])], dict(job.state().tensors)


def is_close(value: torch.Tensor, expected: torch.Tensor) -> bool:
    return value.shape == expected.shape and float((value - expected).abs().max()) <= 1e-10


@pytest.mark.parametrize(("name", "overlap", "accumulate"), [(name, True, 1) for name in PLANS] + ACCUMULATED)
def test_every_dense_strategy_trains_as_one_process(ranks, tmp_path, name, overlap, accumulate):
    logits, evaluated, state = train_single(accumulate)
    answers = ranks.run(4, train_on_rank, PLANS[name], 4, overlap, accumulate, tmp_path)
    for step, expected in enumerate(logits):
        assert is_close(torch.cat([answer[0][step] for answer in answers]), expected), step
    assert is_close(torch.cat([answer[1][0] for answer in answers]), evaluated[0])
    tensors = {name: value for name, value in answers[0][2].items() if not name.startswith("random")}
    assert set(tensors) == {name for name in state if not name.startswith("random")}
    for name, value in tensors.items():
        assert is_close(value.double(), state[name].double()), name


def test_block_names_of_the_model():
    assert block_names(make_model(RowWiseAdaGrad(0.1))) == BLOCKS


def load_and_train(dense: Dense, world: int, folder: Path) -> list[torch.Tensor]:
    with ExitStack() as stack:
        job = make_job(stack, dense, world)
        job.load(folder)
        return [out.logits for out in job.run(local_batch(batch(STEPS + step), job) for step in range(3))]


@pytest.mark.parametrize(("first", "second", "world"), [("fsdp", "hsdp", 4), ("hsdp-full-offload", "fsdp", 2)])
def test_a_checkpoint_resumes_with_another_dense_strategy_and_in_one_process(ranks, tmp_path, first, second, world):
    ranks.run(4, train_on_rank, PLANS[first], 4, True, 1, tmp_path)
    path = max(tmp_path.iterdir())
    model = make_model(RowWiseAdaGrad(0.1))
    job = build(model, single_plan(model), optimizer=lambda p: torch.optim.Adam(p, 0.01))
    job.load(path)
    logits = [out.logits for out in job.run(batch(STEPS + step) for step in range(3))]
    answers = ranks.run(world, load_and_train, PLANS[second], world, path)
    for step, expected in enumerate(logits):
        assert is_close(torch.cat([answer[step] for answer in answers]), expected), step


def run_user_loop(dense: Dense) -> list[torch.Tensor]:
    with ExitStack() as stack:
        job = make_job(stack, dense, 4)
        logits_of_steps = []
        for local in job.loader(local_batch(batch(step), job) for step in range(STEPS)):
            job.optimizer.zero_grad()
            logits = job.model(local)
            job.model.loss(logits, local).backward()
            job.optimizer.step()
            logits_of_steps.append(logits.detach())
        return logits_of_steps


@pytest.mark.parametrize("name", ["fsdp", "hsdp-full-offload"])
def test_a_user_loop_over_sharded_blocks(ranks, name):
    answers = ranks.run(4, run_user_loop, PLANS[name])
    for step, expected in enumerate(train_single(1)[0]):
        assert is_close(torch.cat([answer[step] for answer in answers]), expected), step


def test_a_user_loop_in_one_process_with_offloaded_weights():
    model = make_model(RowWiseAdaGrad(0.1))
    job = build(model, plan_offload(model), optimizer=lambda p: torch.optim.Adam(p, 0.01))
    expected = train_single(1)[0]
    for step, samples in enumerate(job.loader(batch(step) for step in range(STEPS))):
        job.optimizer.zero_grad()
        logits = job.model(samples)
        job.model.loss(logits, samples).backward()
        job.optimizer.step()
        assert is_close(logits.detach(), expected[step]), step


def test_a_user_loop_ends_after_a_failed_backward_pass(monkeypatch):
    model = make_model(RowWiseAdaGrad(0.1))
    job = build(model, plan_offload(model), optimizer=lambda p: torch.optim.Adam(p))
    batches = job.loader(batch(step) for step in range(STEPS))
    samples = next(batches)
    with monkeypatch.context() as patch:
        patch.setattr(FlatParameter, "copy_grad", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            job.model.loss(job.model(samples), samples).backward()
    with pytest.raises(UserError, match="a backward pass of this job has failed"):
        next(batches)


class NoTensor(nn.Module):
    def forward(self, *_: torch.Tensor) -> SimpleNamespace:
        return SimpleNamespace()


def test_an_error_names_a_block_whose_output_is_no_tensor():
    model = make_model(RowWiseAdaGrad(0.1))
    plan = plan_offload(model)
    model.dense.top = nn.Sequential(model.dense.top, NoTensor())
    job = build(model, plan, optimizer=lambda p: torch.optim.Adam(p))
    with pytest.raises(UserError, match=r'block "dense\.top" returned a SimpleNamespace'):
        list(job.run([batch(0)]))


def train_with_weights_of_rank_0() -> list[torch.Tensor]:
    """Only rank 0 has the initial weights; the others have ones."""
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setenv("LOCAL_WORLD_SIZE", "2")
        rank = int(os.environ["RANK"])
        patch.setenv("LOCAL_RANK", str(rank % 2))
        model = make_model(RowWiseAdaGrad(0.1))
        for parameter in model.dense.parameters() if rank else ():
            nn.init.ones_(parameter)
        job = build(model, plan_dense(model, HSDP, 4), optimizer=lambda p: torch.optim.Adam(p, 0.01))
        stack.callback(job.mesh.close)
        return [out.logits for out in job.run(local_batch(batch(step), job) for step in range(STEPS))]


def test_all_ranks_start_with_the_weights_of_rank_0(ranks):
    answers = ranks.run(4, train_with_weights_of_rank_0)
    for step, expected in enumerate(train_single(1)[0]):
        assert is_close(torch.cat([answer[step] for answer in answers]), expected), step


def count_all_reduces() -> int:
    with ExitStack() as stack:
        job = make_job(stack, HSDP, 4, accumulate=3)
        list(job.run(local_batch(batch(step), job) for step in range(6)))
        flights = [event for event in job.tracer.timeline().events if event.kind == "flight"]
        return sum(event.name.startswith("reduce ") for event in flights)


def test_accumulated_gradients_are_all_reduced_over_hosts_once_per_step(ranks):
    """Two steps of two blocks that have weights."""
    assert ranks.run(4, count_all_reduces) == [2 * 2] * 4


def all_sharded_after_forward() -> bool:
    """A forward pass without a backward pass, then a checkpoint state."""
    with ExitStack() as stack:
        job = make_job(stack, FSDP, 2)
        for local in job.loader([local_batch(batch(0), job)]):
            job.model.loss(job.model(local), local)
        job.state()
        return all(shard_of(parameter) is not None for parameter in job.model.dense.parameters())


def test_blocks_are_resharded_after_a_forward_pass_without_backward(ranks):
    assert ranks.run(2, all_sharded_after_forward) == [True, True]


def build_with_optimizer(kind: str) -> str:
    with ExitStack() as stack:
        try:
            make_job(stack, FSDP, 2, optimizer=lambda p: getattr(torch.optim, kind)([x for x in p if x.dim() == 2]))
        except UserError as error:
            return str(error)
    return ""


@pytest.mark.parametrize("kind", ["Adafactor", "Muon"])
def test_optimizers_that_need_full_parameters_are_refused(ranks, kind):
    errors = ranks.run(2, build_with_optimizer, kind)
    assert all(error.startswith(f"{kind} needs full parameters") for error in errors)


def wait_events() -> list[set[str]]:
    """Names of the wait events of each step."""
    with ExitStack() as stack:
        job = make_job(stack, FSDP, 4)
        list(job.run(local_batch(batch(step), job) for step in range(3)))
        waits = [event for event in job.tracer.timeline().events if event.kind == "wait"]
        return [{event.name for event in waits if event.step == step} for step in range(3)]


def test_the_timeline_has_waits_for_gathers_scatters_and_reduces(ranks):
    for steps in ranks.run(4, wait_events):
        assert all({"gather", "scatter"} <= {name.split(" ")[0] for name in names} for names in steps)


def local_parameters() -> list[tuple[str, bool, int]]:
    """(name, is sharded, number of values) of this rank's parameters."""
    with ExitStack() as stack:
        job = make_job(stack, PLANS["hsdp"], 4)
        list(job.run(local_batch(batch(step), job) for step in range(2)))
        return [(name, shard_of(x) is not None, x.numel()) for name, x in job.model.dense.named_parameters()]


def test_ranks_keep_only_their_rows(ranks):
    answers = ranks.run(4, local_parameters)
    full = {name: x.numel() for name, x in make_model(RowWiseAdaGrad(0.1)).dense.named_parameters()}
    for parameters in answers:
        assert all(is_sharded for _, is_sharded, _ in parameters) and {name for name, *_ in parameters} == set(full)
        assert sum(num for *_, num in parameters) <= sum(full.values()) / 2 + 32
    assert answers[0] == answers[2] and answers[1] == answers[3]


def groups_on_rank(dense: Dense) -> tuple[set, int]:
    """The groups of a plan's mesh, by lane, axes and size, and how many process groups it made."""
    with ExitStack() as stack:
        job = make_job(stack, dense, 4)
        sizes = {(lane, axes, group.size) for (lane, axes), group in job.mesh._groups.items()}
        return sizes, len(job.mesh._handles)


def test_a_mesh_has_exactly_the_groups_that_its_plan_uses(ranks):
    every = ("data@host", "data@local")
    shared = {(lane, every, 4) for lane in ("main", "ids", "wire", "dense")}
    for dense, more in (
        (DDP, set()),
        (FSDP, {("gather", every, 4), ("scatter", every, 4)}),
        (HSDP, {("gather", ("data@local",), 2), ("scatter", ("data@local",), 2), ("dense", ("data@host",), 2)}),
    ):
        for groups, num_handles in ranks.run(4, groups_on_rank, dense):
            assert groups == shared | more and num_handles == len(groups)


def names_outside_the_plan(strategy: str, accumulate: int) -> set[str]:
    """Names of measured events of a planned job that its plan does not have."""
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setenv("LOCAL_WORLD_SIZE", "2")
        patch.setenv("LOCAL_RANK", str(int(os.environ["RANK"]) % 2))
        model = make_model(RowWiseAdaGrad(0.1), "float32")
        batches = [batch(step, dtype=torch.float32) for step in range(4)]
        cluster = presets.unmeasured_cluster(2, 2, 1 << 33)
        plan = make_plan(describe(model, batches[0]), cluster, layers=LayerRequest(dense=strategy)).plan
        job = build(model, plan, optimizer=lambda p: torch.optim.Adam(p, 0.01), accumulate=accumulate)
        stack.callback(job.mesh.close)
        list(job.run(local_batch(whole, job) for whole in batches))
        names = {event.name for event in job.tracer.timeline().events}
        return names - {stage.name for outer in plan.stages for stage in (outer, *outer.body)}


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("strategy", ["DDP", "FSDP", "HSDP", "HSDP + full"])
def test_measured_events_have_names_of_the_plan(ranks, strategy, accumulate):
    assert ranks.run(4, names_outside_the_plan, strategy, accumulate) == [set()] * 4

"""GPT, a model without tables, over ranks: every parallelism strategy of its blocks compared with one process."""

import gc
import os
import weakref
from contextlib import ExitStack
from dataclasses import replace
from functools import cache

import pytest
import torch
from hypothesis import Phase, given, seed, settings
from hypothesis import strategies as st
from test_dense_plans import AXES, DDP, FSDP, HSDP

from shardwright.errors import UserError
from shardwright.jagged import Batch, Jagged
from shardwright.layers.decoder import GPT2, QWEN3, DecoderForm
from shardwright.layers.loss import IGNORED
from shardwright.measure.describe import block_names, describe
from shardwright.models.gpt import GPT
from shardwright.planner.pins import LayerRequest
from shardwright.planner.plan import make_plan
from shardwright.runtime.build import build
from shardwright.runtime.job import Job
from shardwright.runtime.planning import plan_single_process
from shardwright.spec import presets
from shardwright.spec.axes import Axis
from shardwright.spec.lanes import IDS, MAIN
from shardwright.spec.plan import Dense, Plan, Recompute

STEPS, SIZE, TOKENS, VOCABULARY = 20, 12, 8, 32
BLOCKS = ("embed", "blocks.0", "blocks.1", "blocks.2", "head")
FULL = tuple(Recompute(name) for name in BLOCKS[1:4])
STRATEGIES = {
    "DDP": DDP,
    "DDP, recomputed": replace(DDP, recompute=FULL),
    "FSDP": FSDP,
    "HSDP": HSDP,
    "HSDP, recomputed, offloaded": replace(HSDP, recompute=FULL, offload=BLOCKS[1:3]),
}


def make_model(device: str = "cpu", form: DecoderForm = GPT2) -> GPT:
    torch.manual_seed(4)
    shape = {"vocabulary": VOCABULARY, "context": TOKENS, "channels": 16, "num_blocks": 3, "num_heads": 2}
    with torch.device(device):
        return GPT(**shape, num_kv_heads=1 if form.rotary_base else 0, form=form).to(torch.float64)


def tokens(step: int, start: int = 0, stop: int = SIZE, sample_weights: bool = False) -> Batch:
    """Samples `start` to `stop` of the global batch of a step."""
    draw = torch.Generator().manual_seed(step)
    ids = torch.randint(0, VOCABULARY, (SIZE, TOKENS + 1), generator=draw)[start:stop]
    labels = ids[:, 1:].clone()
    labels[:, -1][labels[:, -1] % 3 == 0] = IGNORED  # ranks have different numbers of tokens that count
    weights = torch.rand(SIZE, generator=draw, dtype=torch.float64)[start:stop] + 0.1 if sample_weights else None
    lengths = torch.full((1, stop - start), TOKENS)
    return Batch(Jagged(("tokens",), ids[:, :-1].flatten(), lengths), None, {"next": labels}, weights)


def adam(parameters):
    """With larger steps or the default eps, rounding errors of this model grow to 1e-10 and more in 20 steps."""
    return torch.optim.Adam(parameters, 0.002, eps=1e-6)


def single_plan(form: DecoderForm = GPT2) -> Plan:
    plan = plan_single_process(make_model(form=form), describe(make_model(form=form), tokens(0)), ())
    return replace(plan, dense=replace(plan.dense, dtype="float64", state="float64"))


def make_job(
    stack: ExitStack, dense: Dense, world: int, device: str = "cpu", form: DecoderForm = GPT2, **options
) -> Job:
    """A job over four ranks on two hosts, or over two ranks on one host."""
    if world == 4:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setenv("LOCAL_WORLD_SIZE", "2")
        patch.setenv("LOCAL_RANK", str(int(os.environ["RANK"]) % 2))
    model = make_model(device, form)
    axes = AXES if world == 4 else (Axis("data", "host", 1), Axis("data", "local", world))
    single = single_plan(form)
    plan = make_plan(describe(model, tokens(0)), presets.unmeasured_cluster(axes[0].size, axes[1].size, 1 << 33)).plan
    plan = replace(plan, axes=axes, dense=replace(dense, dtype="float64", state="float64"), wire=single.wire)
    job = build(model, plan, optimizer=adam, **options)
    stack.callback(job.mesh.close)
    return job


def train_on_rank(dense: Dense, bounds: tuple[int, ...], weighted: bool, device: str, options: dict):
    world = len(bounds) - 1
    with ExitStack() as stack:
        job = make_job(stack, dense, world, device, **options)
        start, stop = bounds[job.mesh.rank : job.mesh.rank + 2]
        outputs = list(job.run(tokens(step, start, stop, weighted) for step in range(STEPS)))
        evaluated = [output.logits for output in job.evaluate([tokens(100, start, stop)])]
        tensors = {name: value.clone() for name, value in job.state().tensors.items() if not value.is_meta}
        return [output.logits for output in outputs], evaluated, tensors if job.mesh.rank == 0 else {}


@cache
def train_single(weighted: bool, accumulate: int, device: str = "cpu", form: DecoderForm = GPT2):
    job = build(make_model(device, form), single_plan(form), optimizer=adam, accumulate=accumulate)
    logits = [output.logits for output in job.run(tokens(step, sample_weights=weighted) for step in range(STEPS))]
    return logits, [output.logits for output in job.evaluate([tokens(100)])], dict(job.state().tensors)


def check(
    ranks,
    dense: Dense,
    bounds: tuple[int, ...],
    *,
    weighted=False,
    accumulate=1,
    overlap=True,
    device="cpu",
    form: DecoderForm = GPT2,
):
    logits, evaluated, state = train_single(weighted, accumulate, device, form)
    options = {"overlap": overlap, "accumulate": accumulate, "form": form}
    answers = ranks.run(len(bounds) - 1, train_on_rank, dense, bounds, weighted, device, options)
    for step, expected in enumerate((*logits, *evaluated)):
        parts = [logits for answer in answers if len(logits := (*answer[0], *answer[1])[step])]
        torch.testing.assert_close(torch.cat(parts), expected, rtol=0, atol=1e-10, msg=lambda m, n=step: f"{n}: {m}")
    tensors = answers[0][2]
    for name in (name for name in state if not name.startswith("random")):
        torch.testing.assert_close(tensors[name], state[name], rtol=0, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize(
    ("name", "form"), [*((name, GPT2) for name in STRATEGIES), ("FSDP", QWEN3), ("HSDP, recomputed, offloaded", QWEN3)]
)
def test_every_strategy_trains_gpt_as_one_process(ranks, name, form):
    check(ranks, STRATEGIES[name], (0, 3, 6, 9, 12), form=form)


@pytest.mark.parametrize("name", ["FSDP", "HSDP"])
def test_a_model_on_the_meta_device_starts_with_the_values_of_one_process(ranks, name):
    check(ranks, STRATEGIES[name], (0, 3, 6, 9, 12), device="meta")


@seed(0)
@settings(max_examples=8, deadline=None, phases=[Phase.generate])  # to shrink a deadlock takes minutes
@given(
    strategy=st.sampled_from([DDP, FSDP]),
    cut=st.integers(0, SIZE),
    weighted=st.booleans(),
    accumulate=st.integers(1, 3),
    overlap=st.booleans(),
)
def test_uneven_and_empty_shares_weights_and_accumulation(ranks, strategy, cut, weighted, accumulate, overlap):
    check(ranks, strategy, (0, cut, SIZE), weighted=weighted, accumulate=accumulate, overlap=overlap)


def loop_on_rank(dense: Dense, bounds: tuple[int, ...]):
    with ExitStack() as stack:
        job = make_job(stack, dense, len(bounds) - 1)
        start, stop = bounds[job.mesh.rank : job.mesh.rank + 2]
        for batch in job.loader(tokens(step, start, stop) for step in range(STEPS)):
            job.optimizer.zero_grad()
            job.model.loss(job.model(batch), batch).backward()
            job.optimizer.step()
        return {name: value.clone() for name, value in job.state().tensors.items() if not value.is_meta}


@pytest.mark.parametrize("dense", [DDP, FSDP], ids=["DDP", "FSDP"])
def test_a_user_loop_trains_gpt_as_one_process(ranks, dense):
    state = train_single(False, 1)[2]
    tensors = ranks.run(2, loop_on_rank, dense, (0, 5, SIZE))[0]
    for name in (name for name in state if name.startswith("model.")):
        torch.testing.assert_close(tensors[name], state[name], rtol=0, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}")


def end_early_on_rank(dense: Dense, evaluates: bool) -> str:
    with ExitStack() as stack:
        job = make_job(stack, dense, 2)
        batches = [tokens(step, 0, 6) for step in range(2 + job.mesh.rank)]
        with pytest.raises(UserError) as error:
            list(job.evaluate(batches) if evaluates else job.run(batches))
        return str(error.value)


@pytest.mark.parametrize("evaluates", [False, True])
@pytest.mark.parametrize("dense", [DDP, FSDP], ids=["DDP", "FSDP"])
def test_ranks_with_different_numbers_of_batches_fail_alike(ranks, dense, evaluates):
    errors = ranks.run(2, end_early_on_rank, dense, evaluates)
    assert errors[0] == errors[1]
    assert errors[0].startswith("the batches of ranks [0] have ended, and those of ranks [1] have not")


def stop_on_rank() -> tuple[int, int]:
    with ExitStack() as stack:
        job = make_job(stack, DDP, 2)
        asked = job.mesh.rank == 1
        list(job.run((tokens(step, 0, 6) for step in range(40)), stop=lambda: 15 if asked and job.step >= 3 else 0))
        return job.step, job.stop_signal


def test_a_stop_signal_of_one_rank_ends_all_after_the_same_step(ranks):
    answers = ranks.run(2, stop_on_rank)
    assert answers[0] == answers[1] and answers[0][1] == 15 and 3 < answers[0][0] <= 9


def issued_on_rank(strategy: str) -> tuple[list[str], list[str]]:
    """The collectives inside forward and backward of step 1, in the order of issue, and those of the plan's bodies."""
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setenv("LOCAL_WORLD_SIZE", "2")
        patch.setenv("LOCAL_RANK", str(int(os.environ["RANK"]) % 2))
        model, cluster = make_model(form=replace(GPT2, tied=False)).float(), presets.unmeasured_cluster(2, 2, 1 << 33)
        plan = make_plan(describe(model, tokens(0)), cluster, layers=LayerRequest(dense=strategy)).plan
        job = build(model, plan, optimizer=adam)
        stack.callback(job.mesh.close)
        list(job.run(tokens(step, 3 * job.mesh.rank, 3 * job.mesh.rank + 3) for step in range(3)))
        events = sorted(job.tracer.timeline().events, key=lambda event: event.id)
        issued = [event.name for event in events if (event.kind, event.step) == ("flight", 1) and event.lane != IDS]
        bodies = [inner for stage in plan.stages for inner in stage.body if inner.lane != MAIN]
        return issued, [inner.name for inner in bodies]


@pytest.mark.parametrize("strategy", ["FSDP", "HSDP"])
def test_collectives_of_blocks_are_issued_in_the_order_of_the_plan(ranks, strategy):
    for issued, planned in ranks.run(4, issued_on_rank, strategy):
        assert issued == planned and len(planned) > 12


def is_freed_on_rank(dense: Dense) -> bool:
    """Whether nothing holds a job after its last reference: Python does not collect cycles through hooks of tensors."""
    with ExitStack() as stack:
        job = make_job(stack, dense, 2)
        list(job.run(tokens(step, 0, 6) for step in range(2)))
    reducer = weakref.ref(job._step.reducers[0])
    del job
    gc.collect()
    return reducer() is None


@pytest.mark.parametrize("dense", [DDP, FSDP], ids=["DDP", "FSDP"])
def test_a_closed_job_is_freed(ranks, dense):
    assert ranks.run(2, is_freed_on_rank, dense) == [True, True]


def test_the_planner_makes_a_list_without_tables():
    workload = describe(make_model(), tokens(0))
    plan = make_plan(workload, presets.unmeasured_cluster(2, 2, 1 << 33)).plan
    plan.verify(workload)
    names = [stage.name for stage in plan.stages]
    assert names == ["read", "to_device", "request", "lengths", "forward", "backward", "step", "emit"]
    assert block_names(make_model()) == BLOCKS
    slots = {slot for stage in plan.stages for inner in (stage, *stage.body) for slot in (*inner.reads, *inner.writes)}
    assert not slots & {"vectors", "gradients.vectors", "ids", "gradients.tables"}

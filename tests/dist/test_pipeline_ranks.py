"""Pipeline parallelism of GPT, alone and with data parallelism, compared with one process."""

import weakref
from contextlib import ExitStack
from dataclasses import replace
from unittest import mock

import pytest
import torch
from test_gpt_ranks import SIZE, STEPS, TOKENS, VOCABULARY, adam, tokens
from torch import Tensor

from shardwright.comm.pending import Pending
from shardwright.dense.flat_parameter import FlatParameter
from shardwright.errors import UserError
from shardwright.layers.decoder import GPT2, LLAMA, QWEN3, DecoderForm
from shardwright.measure.describe import describe
from shardwright.models.gpt import GPT
from shardwright.planner.pins import LayerRequest
from shardwright.planner.plan import make_plan
from shardwright.planner.problem import Precision
from shardwright.planner.search import define_problem
from shardwright.planner.step.pipeline_step import pipeline_calls
from shardwright.planner.step.simulate import simulate_ranks
from shardwright.planner.step.stages import pipeline_stages
from shardwright.runtime.build import build
from shardwright.runtime.job import Job
from shardwright.runtime.planning import plan_single_process
from shardwright.spec import presets
from shardwright.spec.axes import Axis
from shardwright.spec.lanes import LANES, MAIN, PIPELINE_LANES, SHARD_LANES
from shardwright.spec.pipeline import rank_stages
from shardwright.spec.plan import Dense, Pipeline, Plan, Recompute
from shardwright.spec.timeline import Timeline

DATA = Dense(replicate=("data@local",))
SHARDED = Dense(shard=("data@local",))


def make_model(form: DecoderForm = LLAMA, channels: int = 16) -> GPT:
    torch.manual_seed(4)
    shape = {"vocabulary": VOCABULARY, "context": TOKENS, "channels": channels, "num_blocks": 4, "num_heads": 2}
    return GPT(**shape, form=form).to(torch.float64)


def single_plan(form: DecoderForm = LLAMA) -> Plan:
    plan = plan_single_process(make_model(form), describe(make_model(form), tokens(0)), ())
    return replace(plan, dense=replace(plan.dense, dtype="float64", state="float64"))


def pipeline_plan(pipeline: Pipeline, num_pipe: int, num_data: int, dense: Dense, form: DecoderForm) -> Plan:
    single = single_plan(form)
    return replace(
        single,
        axes=(Axis("pipe", "host", num_pipe), Axis("data", "local", num_data)),
        lanes=(*LANES, *PIPELINE_LANES, *SHARD_LANES),
        stages=pipeline_stages(),
        pipeline=pipeline,
        dense=replace(single.dense, replicate=dense.replicate, shard=dense.shard, recompute=dense.recompute),
    )


def make_job(stack: ExitStack, plan: Plan, form: DecoderForm, **options) -> Job:
    job = build(make_model(form), plan, optimizer=adam, **options)
    stack.callback(job.mesh.close)
    return job


def train_on_rank(plan: Plan, bounds: tuple[int, ...], weighted: bool, form: DecoderForm, options: dict):
    """Scores of each step and of an evaluation, and this rank's weights."""
    with ExitStack() as stack:
        job = make_job(stack, plan, form, **options)
        index = job.mesh.position(plan.sample_axes)[0]
        start, stop = bounds[index : index + 2]
        outputs = list(job.run(tokens(step, start, stop, weighted) for step in range(STEPS)))
        outputs += list(job.evaluate([tokens(100, start, stop)]))
        weights = {name: value.detach().clone() for name, value in job.model.named_parameters()}
        return [(output.loss, output.logits) if output.has_scores else None for output in outputs], weights


def train_single(weighted: bool, form: DecoderForm, accumulate: int = 1, clip: float = 0.0):
    job = build(make_model(form), single_plan(form), optimizer=adam, accumulate=accumulate, clip=clip)
    outputs = list(job.run(tokens(step, sample_weights=weighted) for step in range(STEPS)))
    outputs += list(job.evaluate([tokens(100)]))
    return [output.logits for output in outputs], dict(job.model.named_parameters())


def check(ranks, plan: Plan, bounds, *, weighted=False, form=LLAMA, accumulate=1, clip=0.0, overlap=True):
    logits, weights = train_single(weighted, form, accumulate, clip)
    options = {"accumulate": accumulate, "clip": clip, "overlap": overlap}
    answers = ranks.run(plan.num_ranks, train_on_rank, plan, bounds, weighted, form, options)
    last = [answer[0] for answer in answers if answer[0][0] is not None]
    for step, expected in enumerate(logits):
        parts = [part for scores in last if len(part := scores[step][1])]
        torch.testing.assert_close(torch.cat(parts), expected, rtol=0, atol=1e-10, msg=lambda m, n=step: f"{n}: {m}")
    if not plan.dense.shard:
        found = {name: value for answer in answers for name, value in answer[1].items()}
        assert found.keys() == weights.keys()
        for name, value in found.items():
            torch.testing.assert_close(value, weights[name], rtol=0, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}")


def most_received_on_rank(plan: Plan) -> int:
    """The most received activations that are alive when a micro-batch enters the last chunk."""
    received, alive = list[weakref.ref[Tensor]](), [0]
    with ExitStack() as stack:
        job = make_job(stack, plan, LLAMA)

        def count(_: torch.nn.Module, arguments: tuple[Tensor]) -> None:
            alive.append(sum(reference() is not None for reference in received))
            received.append(weakref.ref(arguments[0]))

        if job.mesh.rank == 1:
            job.model.blocks[2].register_forward_pre_hook(count)
        for _ in job.run(tokens(step, 0, SIZE) for step in range(2)):
            pass
    return max(alive)


def test_what_the_last_rank_has_received_is_freed_after_each_backward_pass(ranks):
    """The graph of a loss would hold it until the end of the step."""
    plan = pipeline_plan(Pipeline((2, 2), 6), 2, 1, DATA, LLAMA)
    assert ranks.run(2, most_received_on_rank, plan)[1] <= 2


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize(
    "pipeline",
    [Pipeline((1, 3), 4), Pipeline((3, 1), 3), Pipeline((2, 2), 1), Pipeline((1, 1, 1, 1), 3, "interleaved")],
    ids=str,
)
def test_two_ranks_train_as_one_process(ranks, pipeline, overlap):
    check(ranks, pipeline_plan(pipeline, 2, 1, DATA, LLAMA), (0, SIZE), overlap=overlap)


@pytest.mark.parametrize("dense", [DATA, SHARDED], ids=["DDP", "FSDP"])
@pytest.mark.parametrize("pipeline", [Pipeline((3, 1), 2), Pipeline((1, 1, 1, 1), 4, "interleaved")], ids=str)
def test_a_pipeline_with_data_parallelism_trains_as_one_process(ranks, pipeline, dense):
    check(ranks, pipeline_plan(pipeline, 2, 2, dense, QWEN3), (0, 5, SIZE), form=QWEN3, weighted=True, accumulate=2)


def test_a_pipeline_with_hsdp_trains_as_one_process(ranks):
    """Eight ranks: two of the pipeline, each with two replicas of two shards."""
    plan = pipeline_plan(Pipeline((1, 1, 1, 1), 2, "interleaved"), 2, 2, SHARDED, LLAMA)
    axes = (Axis("pipe", "host", 2), Axis("data", "host", 2), Axis("data", "local", 2))
    plan = replace(
        plan, axes=axes, dense=replace(plan.dense, replicate=("data@host",), recompute=(Recompute("blocks.1"),))
    )
    check(ranks, plan, (0, 3, 5, 8, SIZE), weighted=True, accumulate=2, clip=0.5)


def test_gradients_are_clipped_by_the_norm_over_all_chunks(ranks):
    check(ranks, pipeline_plan(Pipeline((2, 1, 1), 3), 3, 1, DATA, LLAMA), (0, SIZE), clip=0.5)


def most_scatters_in_flight(plan: Plan) -> int:
    """The most blocks whose gradients are reduce-scattered on this rank at a time."""
    now = most = 0
    reduce_scatter = FlatParameter.reduce_scatter_grad

    def counted(flat: FlatParameter) -> Pending[Tensor]:
        nonlocal now, most
        now += 1
        most = max(most, now)
        return reduce_scatter(flat).then(ended)

    def ended(total: Tensor) -> Tensor:
        nonlocal now
        now -= 1
        return total

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(FlatParameter, "reduce_scatter_grad", counted))
        job = make_job(stack, plan, LLAMA)
        list(job.run(tokens(step, 0, 4) for step in range(2)))
    return most


def test_one_block_is_reduce_scattered_at_a_time_over_all_chunks(ranks):
    """Else a rank of a pipeline would hold the whole gradients of a block of each chunk."""
    plan = pipeline_plan(Pipeline((1, 1, 1, 1), 4, "interleaved"), 2, 2, SHARDED, LLAMA)
    assert ranks.run(4, most_scatters_in_flight, plan) == [1, 1, 1, 1]


def error_on_rank(plan: Plan) -> str:
    with ExitStack() as stack:
        job = make_job(stack, plan, LLAMA)
        with pytest.raises(UserError) as error:
            next(iter(job.loader([])))
        for output in job.run([tokens(0)]):
            if not output.has_scores:
                with pytest.raises(UserError, match=r"look at output\.has_scores first"):
                    output.loss.item()
        return str(error.value)


def test_what_a_pipeline_cannot_do_is_refused(ranks):
    plan = pipeline_plan(Pipeline((2, 2), 2), 2, 1, DATA, LLAMA)
    for error in ranks.run(2, error_on_rank, plan):
        assert "trains in job.run" in error
    with pytest.raises(UserError, match=r"chunks of \[4, 0\] blocks"):
        replace(plan, pipeline=Pipeline((4, 0), 2)).verify()
    with pytest.raises(UserError, match="3 chunks over 2 ranks"):
        replace(plan, pipeline=Pipeline((2, 1, 1), 2)).verify()
    with pytest.raises(UserError, match='use "interleaved"'):
        replace(plan, pipeline=Pipeline((1, 1, 1, 1), 2)).verify()
    with pytest.raises(UserError, match=r"chunks \[2, 3\] have 5 blocks, and the model has 4"):
        build(make_model(), replace(plan, pipeline=Pipeline((2, 3), 2)), optimizer=adam)
    frozen = make_model()
    frozen.head.requires_grad_(False)
    frozen.blocks[3].requires_grad_(False)
    with pytest.raises(UserError, match="chunk 1 of the pipeline has no trained parameter"):
        build(frozen, replace(plan, pipeline=Pipeline((3, 1), 2)), optimizer=adam)
    with pytest.raises(UserError, match='cannot cut tied weights: "head.linear.weight" is "embed.token.weight"'):
        build(make_model(GPT2), plan, optimizer=adam)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_pipeline_of_the_planner_trains_as_one_process(ranks, num_ranks):
    single = single_plan()
    cluster = presets.unmeasured_cluster(num_ranks // 2, 2, 10**10)
    planned = make_plan(describe(make_model(), tokens(0)), cluster, layers=LayerRequest(2, 2)).plan
    assert planned.pipeline is not None and sum(planned.pipeline.blocks) == 4
    dense = replace(planned.dense, dtype="float64", state="float64")
    bounds = (0, SIZE) if num_ranks == 2 else (0, 5, SIZE)
    check(ranks, replace(planned, dense=dense, wire=single.wire), bounds)


def errors_at_different_ends(plan: Plan) -> str:
    with ExitStack() as stack:
        job = make_job(stack, plan, LLAMA, accumulate=2)
        try:
            for _ in job.run(tokens(step) for step in range(4 if job.mesh.rank else 3)):
                pass
        except UserError as error:
            return str(error)
    return ""


def test_ranks_whose_data_ends_inside_a_step_of_others_fail(ranks):
    plan = pipeline_plan(Pipeline((2, 2), 2), 2, 1, Dense(), LLAMA)
    errors = ranks.run(2, errors_at_different_ends, plan)
    assert len(set(errors)) == 1 and errors[0].startswith("micro-batches of a step by rank: [2, 4]; give every rank")


def calls_on_main(timeline: Timeline, rank: int) -> list[tuple[str, int, int]]:
    """The stages that the rank's thread ran in steps 1 and 2, in order."""
    events = [event for event in timeline.events if event.rank == rank and event.lane == "main"]
    ran = [event for event in events if event.kind not in ("wait", "issue") and event.step in (1, 2)]
    return [(event.name, event.step, event.micro) for event in sorted(ran, key=lambda e: (e.start, e.id))]


def traced_calls(plan: Plan) -> list[tuple[str, int, int]]:
    with ExitStack() as stack:
        job = make_job(stack, plan, LLAMA)
        list(job.run(tokens(step) for step in range(5)))
        return calls_on_main(job.tracer.timeline(), job.mesh.rank)


@pytest.mark.parametrize(
    "pipeline",
    [
        Pipeline((2, 2), 3),
        Pipeline((1, 1, 1, 1), 4, "interleaved"),
        Pipeline((2, 1, 1), 5),
        Pipeline((1, 1, 1, 1), 6),
    ],
    ids=str,
)
def test_ranks_run_the_calls_that_the_simulator_predicts(ranks, pipeline):
    num_pipe = 2 if pipeline.schedule == "interleaved" else len(pipeline.blocks)
    plan = pipeline_plan(pipeline, num_pipe, 1, DATA, LLAMA)
    workload, cluster = describe(make_model().float(), tokens(0)), presets.unmeasured_cluster(num_pipe, 1, 1 << 33)
    problem = replace(define_problem(workload, cluster, SIZE, Precision()), axes=plan.axes, pipeline=pipeline)
    predicted = simulate_ranks(pipeline_calls(replace(problem, dense=DATA), 5), blocking=True)
    for rank, traced in enumerate(ranks.run(num_pipe, traced_calls, plan)):
        assert traced == calls_on_main(predicted, rank), f"rank {rank}"
        assert len(traced) > 4 * pipeline.micro_batches


def event_names_on_rank(plan: Plan, channels: int) -> set[str]:
    """The names of all traced events but waits inside them."""
    with ExitStack() as stack:
        job = build(make_model(channels=channels).float(), plan, optimizer=adam)
        stack.callback(job.mesh.close)
        index = job.mesh.position(plan.sample_axes)[0]
        list(job.run(tokens(step, 6 * index, 6 * index + 6) for step in range(3)))
        return {event.name for event in job.tracer.timeline().events if event.kind != "wait"}


@pytest.mark.parametrize("dense", [DATA, SHARDED], ids=["DDP", "FSDP"])
@pytest.mark.parametrize("channels", [16, 192])
def test_measured_events_have_names_of_the_predicted_calls(ranks, dense, channels):
    """With 192 channels, the gradients of a chunk fill more than two buckets."""
    pipeline = Pipeline((1, 1, 1, 1), 2, "interleaved")
    if channels > 16:
        pipeline = Pipeline((2, 2), 2)
    plan = pipeline_plan(pipeline, 2, 2, dense, LLAMA)
    plan = replace(plan, dense=replace(plan.dense, dtype="float32", state="float32"))
    workload = describe(make_model(channels=channels).float(), tokens(0))
    problem = define_problem(workload, presets.unmeasured_cluster(2, 2, 1 << 33), SIZE, Precision())
    problem = replace(problem, axes=plan.axes, pipeline=pipeline, dense=dense, expand_blocks=True)
    calls = pipeline_calls(problem, 3)
    answers = ranks.run(4, event_names_on_rank, plan, channels)
    for rank, measured in enumerate(answers):
        predicted = {call.stage.name for call in calls[rank].calls}
        predicted |= {stage.name for stage in rank_stages(plan, rank) if stage.lane == MAIN}  # passes, not their parts
        assert measured <= predicted, f"rank {rank}: {measured - predicted}"
    names = {name for measured in answers for name in measured if name.startswith(("reduce", "scatter"))}
    assert len(names) >= 2, names

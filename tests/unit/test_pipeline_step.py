"""The predicted step of a pipeline: the runtime's order of calls, the bubble, messages, and the critical path."""

from dataclasses import replace

import pytest

from shardwright.errors import UserError
from shardwright.planner import search
from shardwright.planner.chunks import ranks_by_stage, skeleton_plan
from shardwright.planner.memory.pipeline_memory import memory_by_stage
from shardwright.planner.plan import make_plan, resource_usage, slowest_stage_seconds
from shardwright.planner.problem import Precision, Problem
from shardwright.planner.reprice import reprice_plan
from shardwright.planner.step import critical_path
from shardwright.planner.step.pipeline_step import pipeline_calls
from shardwright.planner.step.simulate import simulate_ranks, steady_step_seconds
from shardwright.report.bubble import bubble_ratio, passes_by_step
from shardwright.spec import presets
from shardwright.spec.axes import Axis
from shardwright.spec.calls import CallOrder, without_leads
from shardwright.spec.cluster import Cluster, Level
from shardwright.spec.pipeline import rank_schedule, rank_stages
from shardwright.spec.plan import Dense, Pipeline, Plan
from shardwright.spec.workload import Block, Workload

FLOPS = 10**12
SHAPES = [(p, v, m) for p in (2, 3, 4) for v in (1, 2, 3) for m in (1, 2, 3, 4, 5, 8)]


def blocks(num: int, input_bytes: int = 0, parameters: int = 0, activations: int = 1) -> tuple[Block, ...]:
    """Equal blocks between an embedding and a head that take no time."""
    names = ["embed", *(f"blocks.{number}" for number in range(num)), "head"]
    sizes, passes = [0, *[FLOPS] * num, 0], {"forward_bytes": 1, "backward_bytes": 1}
    return tuple(
        Block(name, parameters, 4 * parameters, size, 2 * size, activations, input_bytes=input_bytes, **passes)
        for name, size in zip(names, sizes, strict=True)
    )


def cluster_of(num_pipe: int, num_data: int = 1, latency: float = 0.0) -> Cluster:
    levels = (Level("local", num_data, latency, 1e9), Level("host", num_pipe, latency, 1e9))
    return replace(presets.load_cluster("h200-64"), name="test", levels=levels, collectives=(), beside=())


def pipeline_problem(pipeline: Pipeline, num_pipe: int, num_data: int = 1, **settings) -> Problem:
    parts = blocks(sum(pipeline.blocks), **settings)
    workload = Workload(version=1, batch_size=64, tables=(), features=(), statistics=(), blocks=parts)
    cluster = cluster_of(num_pipe, num_data)
    problem = search.define_problem(workload, cluster, 64, Precision())
    axes = (Axis("pipe", "host", num_pipe), Axis("data", "local", num_data))
    return replace(problem, axes=axes, pipeline=pipeline, dense=Dense(replicate=("data@local",)))


def even(num_pipe: int, num_chunks: int, micro_batches: int, blocks_each: int = 1) -> Pipeline:
    return Pipeline(
        (blocks_each,) * (num_pipe * num_chunks), micro_batches, "interleaved" if num_chunks > 1 else "1f1b"
    )


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("overlap", [True, False])
def test_each_rank_runs_the_calls_of_the_runtime(shape, overlap):
    """Executors run `CallOrder` over the same stages and schedule (runtime/job.py)."""
    num_pipe, num_chunks, micro_batches = shape
    problem = pipeline_problem(even(num_pipe, num_chunks, micro_batches), num_pipe)
    plan = skeleton_plan(problem)
    calls = pipeline_calls(problem, 3, overlap=overlap)
    timeline = simulate_ranks(calls, blocking=True, serial=not overlap)
    timeline.verify()
    for rank, own in enumerate(calls):
        stages = rank_stages(plan, rank)
        schedule = rank_schedule(plan, rank, micro_batches, overlap=overlap)
        order = CallOrder(
            stages if overlap else without_leads(stages),
            micro_batches=micro_batches,
            schedule=schedule,
            end=3 * micro_batches,
        )
        expected = [(c.stage.name, c.step, c.micro) for _, tick in order.ticks() for c in tick if not c.is_end]
        assert [(call.stage.name, call.step, call.micro) for call in own.calls] == expected
        on_main = {stage.name for stage in stages if stage.lane in ("read", "main")}
        events = [event for event in timeline.events if event.rank == rank and event.name in on_main]
        events.sort(key=lambda event: (event.start, event.id))
        ran = [(event.name, event.step, event.micro) for event in events]
        assert ran == [entry for entry in expected if entry[0] in on_main]


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape[2] % shape[0] == 0 or shape[1] == 1], ids=str)
@pytest.mark.parametrize("blocking", [True, False])
def test_the_bubble_of_even_chunks_is_that_of_the_closed_form(shape, blocking):
    num_pipe, num_chunks, micro_batches = shape
    problem = pipeline_problem(even(*shape), num_pipe)
    timeline = simulate_ranks(pipeline_calls(problem, 3), blocking=blocking)
    assert bubble_ratio(timeline) == pytest.approx((num_pipe - 1) / (num_chunks * micro_batches), rel=1e-6)
    busy = [passes_by_step(timeline, rank)[1].busy for rank in range(num_pipe)]
    assert busy == pytest.approx([busy[0]] * num_pipe)


def step_seconds(problem, blocking=True, **settings):
    return steady_step_seconds(simulate_ranks(pipeline_calls(problem, 6, **settings), blocking=blocking))


def test_the_step_is_as_long_as_its_slowest_chunk_and_its_bubble():
    problem = pipeline_problem(even(4, 1, 8, blocks_each=2), 4)
    one_pass = step_seconds(pipeline_problem(even(4, 1, 1, blocks_each=2), 4)) / 4  # a whole batch through one chunk
    assert step_seconds(problem) == pytest.approx(one_pass * (8 + 3) / 8, rel=1e-3)
    uneven = replace(problem, pipeline=replace(problem.pipeline, blocks=(1, 3, 2, 2)))
    assert step_seconds(uneven) > 1.2 * step_seconds(problem)


def test_messages_take_time_and_are_hidden_while_a_rank_has_other_passes():
    free = pipeline_problem(even(2, 1, 8), 2)
    seconds = step_seconds(free)
    sizes = [10**6, 10**8, 10**9, 10**10]
    steps = [step_seconds(pipeline_problem(even(2, 1, 8), 2, input_bytes=size)) for size in sizes]
    assert [seconds, *steps] == sorted([seconds, *steps])
    assert steps[0] < 1.05 * seconds and steps[-1] > 10 * seconds


@pytest.mark.parametrize("shard", [False, True])
@pytest.mark.parametrize("num_chunks", [1, 2])
def test_one_replica_stands_for_all(shard, num_chunks):
    problem = pipeline_problem(even(2, num_chunks, 4), 2, 4, input_bytes=10**6, parameters=10**7)
    if shard:
        problem = replace(problem, dense=Dense(shard=("data@local",)))
    assert ranks_by_stage(problem) == [(0, 1, 2, 3), (4, 5, 6, 7)]
    all_ranks, one = pipeline_calls(problem, 6), pipeline_calls(problem, 6, one_replica=True)
    assert (len(all_ranks), len(one)) == (8, 2)
    timelines = [simulate_ranks(calls, blocking=True) for calls in (all_ranks, one)]
    for timeline in timelines:
        timeline.verify()
    assert steady_step_seconds(timelines[0]) == pytest.approx(steady_step_seconds(timelines[1]), rel=1e-9)
    names = {event.name for event in timelines[0].events}
    assert ("reduce" if num_chunks == 1 else "reduce.1") in names or shard
    assert any(name.startswith("scatter") for name in names) == shard
    reductions = [event for event in timelines[0].events if event.name.startswith(("reduce", "scatter"))]
    assert {event.micro for event in reductions if event.name.startswith("reduce")} <= {3}
    step = next(event for event in timelines[0].events if event.name == "step" and event.step == 2)
    own = [event for event in reductions if (event.rank, event.step) == (step.rank, 2)]
    assert max(event.end for event in own) <= step.start


def test_replicas_on_one_uplink_share_it():
    problem = pipeline_problem(even(2, 1, 4), 2, 4, input_bytes=10**9)
    local, host = problem.cluster.levels
    shared = replace(problem.cluster, levels=(local, replace(host, group_bytes_per_second=1e9)))
    seconds = {one: step_seconds(replace(problem, cluster=shared), one_replica=one) for one in (False, True)}
    assert seconds[False] > 2 * step_seconds(problem)
    assert seconds[True] == pytest.approx(seconds[False], rel=0.02)


def test_gradient_accumulation_has_more_micro_batches():
    problem = pipeline_problem(even(2, 1, 2), 2)
    calls = pipeline_calls(problem, 2, accumulate=3)
    assert sum(call.stage.name == "forward" for call in calls[0].calls) == 12
    assert sum(call.stage.name == "step" for call in calls[0].calls) == 2


def test_earlier_ranks_hold_the_activations_of_more_micro_batches():
    problem = pipeline_problem(even(4, 1, 8), 4, activations=8 * 10**6, parameters=1000)
    by_stage = [dict(parts) for parts in memory_by_stage(problem)]
    saved = [round(parts["activations"] / 1e6) for parts in by_stage]
    assert saved[:3] == [7, 2, 1]  # besides the block that runs; the first rank has the embedding, too
    weights = [parts["dense weights"] for parts in by_stage]
    assert weights == [8000, 4000, 4000, 8000]
    assert all(parts["dense gradients"] == parts["dense weights"] for parts in by_stage)
    interleaved = [dict(parts) for parts in memory_by_stage(pipeline_problem(even(4, 2, 8), 4, activations=8 * 10**6))]
    assert interleaved[0]["activations"] > interleaved[3]["activations"]


@pytest.mark.parametrize(("micro_batches", "share"), [(4, 0.5), (8, 1.0)])
def test_gradients_exist_from_the_first_backward_pass_of_a_step(micro_batches, share):
    """With 4 micro-batches the first rank's peak is in its first backward pass, when one of its two blocks has a
    gradient; with 8, as many are in flight in the second, when both have."""
    problem = pipeline_problem(even(4, 1, micro_batches, 2), 4, activations=8 * 10**6, parameters=1000)
    first = dict(memory_by_stage(problem)[0])
    embed, block = (part.parameter_bytes for part in problem.blocks[:2])
    whole = embed + 2 * block
    assert first["dense weights"] == whole
    assert first["dense gradients"] == (whole if share == 1 else block)


@pytest.mark.parametrize("accumulate", (1, 3))
def test_the_last_rank_holds_the_logits_of_a_step_and_of_the_one_before(accumulate):
    problem = replace(pipeline_problem(even(2, 1, 4), 2), accumulate=accumulate)
    head = replace(problem.blocks[-1], product_bytes=64 * 10**9)  # 16 GB a micro-batch
    workload = replace(problem.workload, blocks=(*problem.workload.blocks[:-1], head))
    first, last = (dict(parts) for parts in memory_by_stage(replace(problem, workload=workload)))
    assert first["outputs"] == 0
    assert last["outputs"] == (2 * accumulate + 1) * 64 * 10**9  # when those of the last batch are joined


def plan_of(problem: Problem) -> Plan:
    return replace(skeleton_plan(problem), workload_digest=problem.workload.digest(), dense=problem.dense)


@pytest.mark.parametrize("num_chunks", [1, 2])
def test_a_plan_with_a_pipeline_is_priced_and_its_critical_path_goes_through_messages(num_chunks):
    problem = pipeline_problem(even(2, num_chunks, 4), 2, 2, input_bytes=10**9, parameters=10**6)
    base = replace(problem, axes=(), pipeline=None)
    candidate = reprice_plan(base, plan_of(problem))
    assert candidate.problem.pipeline == problem.pipeline
    assert candidate.seconds == pytest.approx(step_seconds(problem, blocking=False), rel=1e-6)
    parts = critical_path.seconds_by_resource(candidate)
    assert sum(parts.values()) == pytest.approx(candidate.seconds, rel=1e-6)
    assert parts[critical_path.LINKS] > 0.05 * candidate.seconds
    assert 0 <= critical_path.latency_seconds(candidate) < candidate.seconds
    usage = resource_usage(candidate)
    assert usage.flops == pytest.approx(3 * FLOPS * num_chunks / 2)
    assert dict(usage.link_bytes)["host"] >= 10**9 / 2
    assert slowest_stage_seconds(candidate)["send" if num_chunks == 1 else "send.0"] > 0


def test_plans_that_are_not_of_the_model_or_the_cluster():
    problem = pipeline_problem(even(2, 1, 4), 2)
    base, plan = replace(problem, axes=(), pipeline=None), plan_of(problem)
    with pytest.raises(UserError, match="chunks have 3 blocks, and the model has 2"):
        reprice_plan(base, replace(plan, pipeline=Pipeline((1, 2), 4)))
    with pytest.raises(UserError, match='no axis on level "host"|on level "local", which has'):
        reprice_plan(base, replace(plan, axes=(Axis("pipe", "local", 2),)))
    with pytest.raises(UserError, match="the plan is for pipe@host 4; test has 2 ranks"):
        reprice_plan(base, replace(plan, axes=(Axis("pipe", "host", 4),)))


def test_a_plan_without_tables_and_without_a_pipeline_is_priced_as_planned():
    parts = blocks(2, parameters=10**6)
    workload = Workload(version=1, batch_size=64, tables=(), features=(), statistics=(), blocks=parts)
    cluster = cluster_of(2, 1)
    planned = make_plan(workload, cluster)
    candidate = reprice_plan(search.define_problem(workload, cluster, 64, Precision()), planned.plan)
    assert candidate.seconds == pytest.approx(planned.candidate.seconds, rel=1e-6)

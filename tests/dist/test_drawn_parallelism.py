"""GPT under drawn combinations of pipelines, DDP, FSDP and HSDP, shares and micro-batches, compared with one process.

In float64 all differences are below 1e-10. In float32 no rigorous bound of 20 Adam steps is useful, since they amplify
the rounding errors of small gradients; the bound is what such errors change in one process: the differences between
runs whose first weights differ by one unit in the last place.
"""

from dataclasses import replace

import pytest
import torch
from hypothesis import Phase, given, seed, settings
from hypothesis import strategies as st
from test_dense_plans import AXES, HSDP
from test_gpt_ranks import SIZE, STEPS, adam, tokens
from test_pipeline_ranks import DATA, SHARDED, check, make_model, pipeline_plan, single_plan

from shardwright.layers.decoder import GPT2, LLAMA, QWEN3
from shardwright.measure.describe import describe
from shardwright.planner.plan import make_plan
from shardwright.runtime.build import build
from shardwright.spec import presets
from shardwright.spec.plan import Pipeline, Plan, Recompute

NUM_BLOCKS, NUM_PERTURBED, MARGIN = 4, 4, 4.0
RECOMPUTED = (Recompute("blocks.1"), Recompute("blocks.2", "products"))


@st.composite
def pipelines(draw, num_ranks: int) -> Pipeline:
    num_chunks = num_ranks * draw(st.integers(1, NUM_BLOCKS // num_ranks))
    cuts = draw(st.sets(st.integers(1, NUM_BLOCKS - 1), min_size=num_chunks - 1, max_size=num_chunks - 1))
    edges = [0, *sorted(cuts), NUM_BLOCKS]
    blocks = tuple(end - start for start, end in zip(edges, edges[1:], strict=False))
    return Pipeline(blocks, draw(st.integers(1, 5)), "1f1b" if num_chunks == num_ranks else "interleaved")


@st.composite
def plans(draw) -> Plan:
    num_pipe, num_data = draw(st.sampled_from([(1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (3, 1), (4, 1)]))
    dense = draw(st.sampled_from([DATA, SHARDED]))
    if num_pipe > 1:
        plan = pipeline_plan(draw(pipelines(num_pipe)), num_pipe, num_data, dense, LLAMA)
    else:
        cluster = presets.unmeasured_cluster(1, num_data, 1 << 33)
        plan = make_plan(describe(make_model(), tokens(0)), cluster).plan if num_data > 1 else single_plan()
        plan = replace(plan, wire=single_plan().wire)
        if num_data == 4 and draw(st.booleans()):
            plan, dense = replace(plan, axes=AXES), HSDP
        dense = dense if num_data > 1 else plan.dense
    recompute = RECOMPUTED if draw(st.booleans()) else ()
    return replace(plan, dense=replace(dense, dtype="float64", state="float64", recompute=recompute))


@seed(0)
@settings(max_examples=16, deadline=None, phases=[Phase.generate])  # to shrink a deadlock takes minutes
@given(data=st.data())
def test_drawn_plans_train_as_one_process(ranks, data):
    plan = data.draw(plans())
    num_data = plan.position(0, plan.sample_axes)[1]
    cuts = data.draw(st.lists(st.integers(0, SIZE), min_size=num_data - 1, max_size=num_data - 1))
    check(
        ranks,
        plan,
        (0, *sorted(cuts), SIZE),
        weighted=data.draw(st.booleans()),
        form=data.draw(st.sampled_from([LLAMA, QWEN3] if plan.pipeline else [LLAMA, QWEN3, GPT2])),
        accumulate=data.draw(st.integers(1, 3)),
        clip=data.draw(st.sampled_from([0.0, 0.5])),
        overlap=data.draw(st.booleans()),
    )


def train_float32(plan: Plan, ulps: float = 0.0) -> list[torch.Tensor]:
    """Logits by step. `ulps`: how far each weight is moved at the start, up or down, in units in its last place."""
    model = make_model().float()
    draw = torch.Generator().manual_seed(int(ulps * 100))
    with torch.no_grad():
        for parameter in model.parameters():
            signs = torch.randint(0, 2, parameter.shape, generator=draw) * 2 - 1
            parameter += ulps * torch.finfo(torch.float32).eps * parameter.abs() * signs
    job = build(model, plan, optimizer=adam)
    try:
        index, size = plan.position(job.mesh.rank, plan.sample_axes)
        bounds = SIZE * index // size, SIZE * (index + 1) // size
        outputs = [*job.run(tokens(step, *bounds) for step in range(STEPS))]
    finally:
        job.mesh.close()
    return [output.logits for output in outputs if output.has_scores]


@pytest.mark.parametrize(
    "plan",
    [
        pipeline_plan(Pipeline((3, 1), 3), 2, 1, DATA, LLAMA),
        pipeline_plan(Pipeline((1, 1, 1, 1), 4, "interleaved"), 2, 2, SHARDED, LLAMA),
    ],
    ids=["PP", "interleaved PP x FSDP"],
)
def test_float32_differs_only_as_much_as_rounding_errors_make_it(ranks, plan):
    single = replace(single_plan(), dense=replace(single_plan().dense, dtype="float32", state="float32"))
    plan = replace(plan, dense=replace(plan.dense, dtype="float32", state="float32"))
    expected = train_float32(single)
    perturbed = [train_float32(single, (number + 1) / NUM_PERTURBED) for number in range(NUM_PERTURBED)]
    answers = [answer for answer in ranks.run(plan.num_ranks, train_float32, plan) if answer]
    for step, logits in enumerate(expected):
        bound = max(float((other[step] - logits).abs().max()) for other in perturbed)
        difference = float((torch.cat([answer[step] for answer in answers]) - logits).abs().max())
        assert difference <= MARGIN * bound, f"step {step}: {difference:.3g}, rounding errors make {bound:.3g}"

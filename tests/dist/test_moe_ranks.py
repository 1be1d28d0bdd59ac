"""GPT with experts, all of them on every rank: data parallel, sharded and in pipelines, compared with one process.

Capacity and balance loss couple the tokens of a local micro-batch; the single process computes them in as many groups.
"""

from contextlib import ExitStack
from dataclasses import replace

import pytest
import torch
from test_gpt_ranks import SIZE, STEPS, STRATEGIES, TOKENS, VOCABULARY, adam, tokens
from test_pipeline_ranks import DATA, SHARDED, pipeline_plan, single_plan

from shardwright.layers.decoder import LLAMA, ExpertForm
from shardwright.measure.describe import describe
from shardwright.models.gpt import GPT
from shardwright.planner.plan import make_plan
from shardwright.runtime.build import build
from shardwright.spec import presets
from shardwright.spec.plan import Pipeline, Plan

EXPERTS = ExpertForm(4, 2, 12, shared=8, capacity=1.1, balance=0.1, z=0.01)


def make_model(groups: int = 1) -> GPT:
    torch.manual_seed(4)
    shape = {"vocabulary": VOCABULARY, "context": TOKENS, "channels": 16, "num_blocks": 4, "num_heads": 2}
    return GPT(**shape, form=replace(LLAMA, experts=replace(EXPERTS, groups=groups))).double()


def data_plan(name: str) -> Plan:
    plan = make_plan(describe(make_model(), tokens(0)), presets.unmeasured_cluster(2, 2, 1 << 33)).plan
    dense = replace(STRATEGIES[name], dtype="float64", state="float64")
    return replace(plan, dense=dense, wire=single_plan().wire)


PLANS = {  # with the number of groups: local micro-batches of a global batch
    **{name: (data_plan(name), 4) for name in STRATEGIES},
    "PP 2": (pipeline_plan(Pipeline((1, 1, 1, 1), 3, "interleaved"), 2, 1, DATA, LLAMA), 3),
    "PP 2 x FSDP 2": (pipeline_plan(Pipeline((3, 1), 3), 2, 2, SHARDED, LLAMA), 6),
}


def train(plan: Plan, accumulate: int, groups: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Logits and penalties by step, if this rank has them."""
    with ExitStack() as stack:
        if plan.num_ranks == 4 and not plan.pipeline:
            patch = stack.enter_context(pytest.MonkeyPatch.context())
            patch.setenv("LOCAL_WORLD_SIZE", "2")
        job = build(make_model(groups), plan, optimizer=adam, accumulate=accumulate)
        stack.callback(job.mesh.close)
        index, size = plan.position(job.mesh.rank, plan.sample_axes)
        bounds = SIZE * index // size, SIZE * (index + 1) // size
        outputs = [*job.run(tokens(step, *bounds, sample_weights=True) for step in range(STEPS))]
        return [output.logits for output in outputs if output.has_scores]


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("name", PLANS)
def test_experts_train_as_in_one_process(ranks, name, accumulate):
    plan, groups = PLANS[name]
    expected = train(single_plan(), accumulate, groups)
    answers = [answer for answer in ranks.run(plan.num_ranks, train, plan, accumulate, 1) if answer]
    for step, pair in enumerate(expected):
        joined = tuple(torch.cat([answer[step][part] for answer in answers]) for part in range(2))
        torch.testing.assert_close(joined, pair, rtol=0, atol=1e-10, msg=lambda m, n=step: f"step {n}: {m}")

"""Blocks that hand on (x, extra): auxiliary losses reach `loss`, with the same share as the loss of the tokens."""

from contextlib import ExitStack
from dataclasses import replace

import pytest
import torch
from test_gpt_ranks import SIZE, STEPS, STRATEGIES, TOKENS, VOCABULARY, adam, tokens
from test_pipeline_ranks import DATA, SHARDED, pipeline_plan, single_plan
from torch import Tensor, nn

from shardwright.jagged import Batch
from shardwright.layers.decoder import LLAMA, DecoderBlock
from shardwright.layers.loss import NextTokenLoss
from shardwright.measure.describe import describe
from shardwright.models.gpt import GPT
from shardwright.planner.plan import make_plan
from shardwright.runtime.build import build
from shardwright.runtime.outputs import BatchParts, Scores
from shardwright.spec import presets
from shardwright.spec.plan import Pipeline, Plan

Pair = tuple[Tensor, Tensor]


class BlockWithPenalty(nn.Module):
    """A block with a penalty for each sample, as a gate has."""

    def __init__(self, block: DecoderBlock) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor | Pair) -> Pair:
        values, extra = x if isinstance(x, tuple) else (x, x.new_zeros(len(x)))
        values = self.block(values)
        return values, extra + values.square().mean((1, 2))


class HeadWithPenalty(nn.Module):
    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.head = head

    def forward(self, x: Pair) -> Pair:
        return self.head(x[0]), x[1]


class LossWithPenalty(NextTokenLoss):
    """The penalties of samples have the weight of their tokens."""

    def forward(self, logits: Pair, batch: Batch) -> Tensor:
        weights = self._token_weights(batch).sum(1)
        total = weights.sum()
        penalty = (logits[1] * weights).sum() / torch.where(total > 0, total, 1.0)
        return super().forward(logits[0], batch) + 0.1 * penalty


def make_model() -> GPT:
    torch.manual_seed(4)
    shape = {"vocabulary": VOCABULARY, "context": TOKENS, "channels": 16, "num_blocks": 4, "num_heads": 2}
    model = GPT(**shape, form=LLAMA)
    model.blocks = nn.ModuleList(BlockWithPenalty(block) for block in model.blocks)
    model.head = HeadWithPenalty(model.head)
    model.loss = LossWithPenalty()
    return model.double()


def data_plan(name: str) -> Plan:
    plan = make_plan(describe(make_model(), tokens(0)), presets.unmeasured_cluster(2, 2, 1 << 33)).plan
    dense = replace(STRATEGIES[name], dtype="float64", state="float64")
    if dense.recompute:
        dense = replace(dense, offload=("blocks.1",))
    return replace(plan, dense=dense, wire=single_plan().wire)


PLANS = {
    **{name: data_plan(name) for name in STRATEGIES},
    "PP 2": pipeline_plan(Pipeline((1, 1, 1, 1), 3, "interleaved"), 2, 1, DATA, LLAMA),
    "PP 2 x FSDP 2": pipeline_plan(Pipeline((3, 1), 2), 2, 2, SHARDED, LLAMA),
}


def train(plan: Plan, accumulate: int) -> list[Pair]:
    """The model's outputs by step, if this rank has them."""
    with ExitStack() as stack:
        if plan.num_ranks == 4 and not plan.pipeline:
            patch = stack.enter_context(pytest.MonkeyPatch.context())
            patch.setenv("LOCAL_WORLD_SIZE", "2")
        job = build(make_model(), plan, optimizer=adam, accumulate=accumulate)
        stack.callback(job.mesh.close)
        index, size = plan.position(job.mesh.rank, plan.sample_axes)
        bounds = SIZE * index // size, SIZE * (index + 1) // size
        outputs = [*job.run(tokens(step, *bounds, sample_weights=True) for step in range(STEPS))]
        return [output.logits for output in outputs if output.has_scores]


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("name", PLANS)
def test_penalties_have_the_share_of_their_samples(ranks, name, accumulate):
    expected = train(single_plan(), accumulate)
    answers = [answer for answer in ranks.run(PLANS[name].num_ranks, train, PLANS[name], accumulate) if answer]
    for step, pair in enumerate(expected):
        joined = tuple(torch.cat([answer[step][part] for answer in answers]) for part in range(2))
        torch.testing.assert_close(joined, pair, rtol=0, atol=1e-10, msg=lambda m, n=step: f"step {n}: {m}")


def test_an_extra_without_samples_is_averaged_over_the_parts_of_a_batch():
    parts = BatchParts([tokens(0)], 2)
    halves = [*parts]
    assert parts.join(halves[0], Scores(torch.tensor(1.0), (torch.ones(2, 3), torch.tensor(4.0)), 1.0)) is None
    joined = parts.join(halves[1], Scores(torch.tensor(3.0), (torch.zeros(2, 3), torch.tensor(8.0)), 3.0))
    assert joined is not None and joined[1] is not None
    assert joined[1].loss == 2.5 and joined[1].logits[1] == 7.0 and joined[1].logits[0].shape == (4, 3)

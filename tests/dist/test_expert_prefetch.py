"""Copies that are sent before the gate has chosen: equal to the bit to a run without, whatever the next call needs."""

from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import pytest
import torch
from test_expert_parallel import BOTH, HOST, start_job, with_experts
from test_gpt_ranks import SIZE, tokens
from test_moe_ranks import PLANS

from shardwright.experts.exchange import ParallelExperts
from shardwright.spec.expert_rows import ExpertRowOrder
from shardwright.spec.plan import Recompute

STEPS, PRODUCTS = 8, "DDP, products are saved"
MODEL = {"dtype": torch.float32, "num_experts": 6}


class ChangingCopies:
    """Choices of copies by the number of the call, so that some pairs of rank and expert come again, and some do not.

    `prefetched`: how many of them ranks had already, and how many of those were not needed.
    """

    def __init__(self) -> None:
        self.calls = 0
        self.prefetched = np.zeros(2, np.int64)

    def __call__(self, order: ExpertRowOrder, prefetched_RE: np.ndarray | None) -> np.ndarray:
        self.calls += 1
        chosen_RE, num_ranks = order.chosen_RE, len(order.chosen_RE)
        computed_RE = np.zeros_like(chosen_RE)
        for expert, total in enumerate(chosen_RE.sum(0).tolist()):
            owner, shift = int(order.owners_E[expert]), (expert + self.calls) % 5
            others = [(owner + step) % num_ranks for step in range(1, num_ranks)]
            ranks = [owner, *others[: min(shift, 2)]] if shift < 4 else [owner, others[-1]]
            computed_RE[ranks, expert] = total // len(ranks)
            computed_RE[owner, expert] += total % len(ranks)
        if prefetched_RE is not None:
            is_copy_RE = computed_RE > 0
            is_copy_RE[order.owners_E, np.arange(len(order.owners_E))] = False
            self.prefetched += (prefetched_RE & is_copy_RE).sum(), (prefetched_RE & ~is_copy_RE).sum()
        return computed_RE


def train(plan, accumulate: int, prefetches: bool):
    with ExitStack() as stack:
        if not prefetches:
            stack.enter_context(pytest.MonkeyPatch.context()).setattr(ParallelExperts, "prefetch", lambda *_: None)
        decide = ChangingCopies()
        job = start_job(stack, plan, accumulate, MODEL, decide)
        index, size = plan.position(job.mesh.rank, plan.sample_axes)
        bounds = SIZE * index // size, SIZE * (index + 1) // size
        outputs = [*job.run(tokens(step, *bounds) for step in range(STEPS))]
        outputs += job.evaluate([tokens(100, *bounds)])
        state = {name: tensor.clone() for name, tensor in job.state().tensors.items()}
        return [output.logits for output in outputs], state, decide.prefetched.tolist()


@pytest.mark.parametrize(
    ("strategy", "axes", "groups", "accumulate", "exchange"),
    [
        ("DDP", BOTH, 2, 2, "flat"),
        ("DDP, recomputed", BOTH, 1, 1, "flat"),
        ("DDP, recomputed", (HOST,), 2, 2, "flat"),
        ("HSDP, recomputed, offloaded", BOTH, 4, 1, "flat"),
        (PRODUCTS, BOTH, 2, 2, "flat"),
        ("DDP", BOTH, 2, 1, "hosts"),
    ],
)
def test_prefetched_copies_are_exact_to_the_bit(ranks, strategy, axes, groups, accumulate, exchange):
    base = PLANS["DDP" if strategy == PRODUCTS else strategy][0]
    if strategy == PRODUCTS:
        blocks = tuple(Recompute(f"blocks.{block}", "products") for block in range(4))
        base = replace(base, dense=replace(base.dense, recompute=blocks))
    base = replace(
        base, dense=replace(base.dense, dtype="float32", state="float32"), wire=replace(base.wire, dense="float32")
    )
    plan = with_experts(base, axes, groups, "even", exchange=exchange)
    plain = ranks.run(4, train, plan, accumulate, False)
    prefetched = ranks.run(4, train, plan, accumulate, True)
    for (logits, state, counts), (other_logits, other_state, other_counts) in zip(prefetched, plain, strict=True):
        assert other_counts == [0, 0]
        assert counts[0] > 0  # some came in time
        assert exchange == "hosts" or counts[1] > 0  # and some were not needed; two ranks of a host need all
        assert all(
            torch.equal(*pair) for step in zip(logits, other_logits, strict=True) for pair in zip(*step, strict=True)
        )
        assert [name for name, tensor in other_state.items() if not torch.equal(tensor, state[name])] == []

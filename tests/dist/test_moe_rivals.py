"""Rival executions of benchmarks/moe.py on two ranks: ZeRO and GShard without drops equal one process."""

import pytest
import torch
from torch import Tensor

from benchmarks.moe_rivals import CapacityExperts, GatheredExperts, choose_slots
from shardwright.comm.mesh import Mesh
from shardwright.experts.parameters import OwnedExperts
from shardwright.layers.gates import DROPPED, Routing, TopKGate
from shardwright.layers.moe import GeluExperts, LocalExperts, MoE

TOKENS, CHANNELS, NUM_EXPERTS, CHOSEN = 12, 8, 4, 2


def make_moe() -> MoE:
    torch.manual_seed(7)
    gate = TopKGate(CHANNELS, NUM_EXPERTS, CHOSEN)
    return MoE(gate, GeluExperts(NUM_EXPERTS, CHANNELS, 16)).double()


def draw(rank: int) -> tuple[Tensor, Routing, Tensor]:
    """Tokens, skewed choices, and the gradient of the output."""
    generator = torch.Generator().manual_seed(rank)
    tokens, gradient = (torch.randn(TOKENS, CHANNELS, generator=generator, dtype=torch.float64) for _ in range(2))
    second = torch.randint(1, NUM_EXPERTS, (TOKENS,), generator=generator)
    weights = torch.rand(TOKENS, CHOSEN, generator=generator, dtype=torch.float64)
    return tokens, Routing(torch.stack([torch.zeros_like(second), second], 1), weights, torch.zeros(1)), gradient


def run_on_rank(execution: str) -> tuple[Tensor, Tensor, list[Tensor]]:
    """The output, the gradient of the tokens, and those of this rank's experts."""
    mesh, moe = Mesh((("all", 2),)), make_moe()
    OwnedExperts("moe", moe, mesh.group())
    full = make_moe().experts
    for parameter in full.parameters():
        parameter.data.zero_()
    tokens, routing, gradient = draw(mesh.rank)
    tokens.requires_grad_()
    if execution == "GShard":
        out = CapacityExperts(mesh.group(), TOKENS).forward(moe.experts, tokens, routing, NUM_EXPERTS)
        out.backward(gradient)
        gradients = [parameter.grad for parameter in moe.experts.parameters() if parameter.grad is not None]
    else:
        zero = GatheredExperts(full, [*moe.experts.parameters()], mesh.group(), int(execution[-1]))
        out = zero.forward(moe.experts, tokens, routing, NUM_EXPERTS)
        out.backward(gradient)
        gradients = zero.finish()
    mesh.close()
    assert tokens.grad is not None
    return out.detach(), tokens.grad, gradients


@pytest.mark.parametrize("execution", ["GShard", "ZeRO-2", "ZeRO-3"])
def test_rivals_equal_one_process(ranks, execution):
    experts, expected = make_moe().experts, []
    for rank in range(2):
        tokens, routing, gradient = draw(rank)
        tokens.requires_grad_()
        out = LocalExperts().forward(experts, tokens, routing, NUM_EXPERTS)
        out.backward(gradient)
        expected.append((out.detach(), tokens.grad))
    answers = ranks.run(2, run_on_rank, execution)
    for (out, of_tokens, gradients), (expected_out, expected_grad), half in zip(
        answers, expected, (slice(0, 2), slice(2, 4)), strict=True
    ):
        torch.testing.assert_close(out, expected_out, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(of_tokens, expected_grad, rtol=1e-10, atol=1e-10)
        for gradient, parameter in zip(gradients, experts.parameters(), strict=True):
            assert parameter.grad is not None
            torch.testing.assert_close(gradient, parameter.grad[half], rtol=1e-10, atol=1e-10)


def test_the_choices_that_gshard_drops_are_those_of_the_gate():
    """100 choices of 4 experts: a capacity of 0.6 is 15 slots for each."""
    gate = TopKGate(CHANNELS, NUM_EXPERTS, CHOSEN, capacity=0.6)
    x = torch.randn(50, CHANNELS, generator=torch.Generator().manual_seed(3))
    kept_NK = gate(x).experts_NK != DROPPED
    gate.capacity = 0.0
    choices, slots = choose_slots(gate(x).experts_NK, NUM_EXPERTS, 15)
    assert 0 < kept_NK.sum() < 100
    assert sorted(choices.tolist()) == kept_NK.flatten().nonzero().flatten().tolist()
    assert len({*slots.tolist()}) == len(slots)
    assert (slots // 15).tolist() == gate(x).experts_NK.flatten()[choices].tolist()

"""Imposed routing over four ranks, exchanged flat and by hosts, in steps and with copies, against one process.

All tokens to one expert or to one host, ranks without tokens, one token in all, dropped choices.
"""

from functools import partial

import pytest
import torch
from torch import Tensor

from shardwright.comm.mesh import Mesh
from shardwright.experts.exchange import ParallelExperts
from shardwright.experts.hosts import HostExperts
from shardwright.experts.parameters import OwnedExperts
from shardwright.layers.gates import DROPPED, Routing, TopKGate
from shardwright.layers.moe import GeluExperts, LocalExperts, MoE
from shardwright.planner.experts import decide
from shardwright.spec.expert_rows import balanced_order
from shardwright.spec.lanes import COPIES, EXPERTS
from shardwright.spec.plan import ExpertPlan

RANKS, CHANNELS, EXPERTS_IN_ALL, CHOSEN = 4, 6, 8, 2
HOST, LOCAL = ("data@host",), ("data@local",)
CASES = {  # by rank: the experts of each token
    "one expert": [[(0, DROPPED)] * 5] * RANKS,
    "the first host": [[(0, 1), (3, 2), (0, 3)]] * RANKS,
    "from one rank to the other host": [[(6, 7)] * 4, [], [], []],
    "no tokens on some ranks": [[(0, 5), (4, 1)], [], [(7, 0)], []],
    "one token": [[], [(2, 6)], [], []],
    "no tokens": [[]] * RANKS,
    "all dropped on a rank": [[(0, 1)] * 3, [(DROPPED, DROPPED)] * 2, [(5, DROPPED)], [(4, 2)]],
}


def make_experts() -> MoE:
    torch.manual_seed(7)
    return MoE(TopKGate(CHANNELS, EXPERTS_IN_ALL, CHOSEN), GeluExperts(EXPERTS_IN_ALL, CHANNELS, 16)).double()


def draw(rank: int, case: str) -> tuple[Tensor, Routing, Tensor]:
    """Tokens, their routing, and the gradient of the output."""
    chosen_NK = torch.tensor(CASES[case][rank], dtype=torch.int64).view(-1, CHOSEN)
    generator = torch.Generator().manual_seed(rank)
    tokens, weights, gradient = (
        torch.randn(len(chosen_NK), num, generator=generator, dtype=torch.float64)
        for num in (CHANNELS, CHOSEN, CHANNELS)
    )
    return tokens.requires_grad_(), Routing(chosen_NK, weights.requires_grad_(), torch.zeros(1)), gradient


def run_on_rank(exchange: str, groups: int, copies: str, case: str) -> tuple[Tensor, ...]:
    """The output, gradients of tokens and weights, and those of this rank's experts."""
    axes = (EXPERTS, HOST + LOCAL), (EXPERTS, HOST), (EXPERTS, LOCAL), (COPIES, HOST + LOCAL), (COPIES, LOCAL)
    mesh = Mesh((("data@host", 2), ("data@local", 2)), groups=axes, timeout_seconds=20)
    moe, row_axes = make_experts(), LOCAL if exchange == "hosts" else HOST + LOCAL
    OwnedExperts("moe", moe, mesh.group(HOST + LOCAL, EXPERTS))
    inside = ParallelExperts("moe", mesh.group(row_axes, EXPERTS), groups)
    inside.order_rows, inside.copies = balanced_order, mesh.group(row_axes, COPIES)
    if copies != "none":
        inside.decide = partial(decide, ExpertPlan("moe", row_axes, groups, copies))
    runs = HostExperts(mesh.group(HOST, EXPERTS), inside) if exchange == "hosts" else inside
    tokens, routing, gradient = draw(mesh.rank, case)
    out = runs.forward(moe.experts, tokens, routing, EXPERTS_IN_ALL)
    out.backward(gradient)
    mesh.close()
    return out.detach(), *map(gradient_of, (tokens, routing.weights_NK, *moe.experts.parameters()))


def gradient_of(tensor: Tensor) -> Tensor:
    """Zeros if nothing depends on it, as on the weights of no rows."""
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    ("exchange", "groups", "copies"),
    [("flat", 1, "none"), ("flat", 4, "even"), ("hosts", 1, "none"), ("hosts", 2, "even")],
)
def test_extreme_routing_equals_one_process(ranks, exchange, groups, copies, case):
    moe = make_experts()
    expected = []
    for rank in range(RANKS):
        tokens, routing, gradient = draw(rank, case)
        out = LocalExperts().forward(moe.experts, tokens, routing, EXPERTS_IN_ALL)
        out.backward(gradient)
        expected.append((out.detach(), gradient_of(tokens), gradient_of(routing.weights_NK)))
    for rank, (answer, wanted) in enumerate(
        zip(ranks.run(RANKS, run_on_rank, exchange, groups, copies, case), expected, strict=True)
    ):
        for mine, other in zip(answer, wanted, strict=False):
            torch.testing.assert_close(mine, other, rtol=0, atol=1e-12)
        own = slice(rank * EXPERTS_IN_ALL // RANKS, (rank + 1) * EXPERTS_IN_ALL // RANKS)
        for mine, parameter in zip(answer[3:], moe.experts.parameters(), strict=True):
            torch.testing.assert_close(mine, gradient_of(parameter)[own], rtol=0, atol=1e-12)

"""Gates and mixtures of experts compared with loops over tokens, and with the layers of Hugging Face's transformers."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from shardwright.errors import UserError
from shardwright.layers.decoder import LLAMA, DecoderBlock, ExpertForm
from shardwright.layers.draws import LayerDraws, StepDraws
from shardwright.layers.gates import DROPPED, TopKGate
from shardwright.layers.moe import GeluExperts, LinearExperts, MoE, SwiGluExperts
from shardwright.spec.calls import Call
from shardwright.spec.plan import Stage

EXACT = {"rtol": 0, "atol": 1e-10}


def randomize(module: nn.Module, seed: int = 0) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    module.double()
    for parameter in module.parameters():
        with torch.no_grad():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return module


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_gate_chooses_the_highest_scores_and_the_first_of_equal_scores():
    gate = TopKGate(3, 4, 2)
    with torch.no_grad():
        gate.scores.weight.copy_(torch.tensor([[1.0, 0, 0], [0, 1, 0], [0, 1, 0], [1, 0, 0]]))
    experts, weights, _ = gate(torch.tensor([[1.0, 0, 0], [0, 2, 0], [1, 1, 0], [2, 1, 5]]))
    assert experts.tolist() == [[0, 3], [1, 2], [0, 1], [0, 3]]
    torch.testing.assert_close(weights, torch.full((4, 2), 0.5))
    gate.scores.weight.data[3, 0] = 3
    experts, weights, _ = gate(torch.tensor([[1.0, 0, 0]]))
    assert experts.tolist() == [[3, 0]]
    torch.testing.assert_close(
        weights, torch.tensor([[3.0, 1.0]]).exp() / (torch.tensor(3.0).exp() + torch.tensor(1.0).exp())
    )


@settings(max_examples=40)
@given(tokens=st.integers(0, 9), experts=st.integers(1, 5), data=st.data())
def test_a_mixture_of_experts_equals_a_loop_over_samples(tokens, experts, data):
    top_k = data.draw(st.integers(1, experts))
    torch.manual_seed(tokens * 25 + experts * 5 + top_k)
    layer = randomize(MoE(TopKGate(4, experts, top_k), LinearExperts(experts, 4, 3)))
    x = torch.randn(tokens, 4, dtype=torch.float64)
    expected = torch.zeros(tokens, 3, dtype=torch.float64)
    for sample in range(tokens):
        scores = layer.gate.scores.weight @ x[sample]
        best = sorted(range(experts), key=lambda expert: -scores[expert].item())[:top_k]
        total = sum(scores[expert].exp() for expert in best)
        for expert in best:
            out = layer.experts.weight[expert] @ x[sample] + layer.experts.bias[expert]
            expected[sample] += scores[expert].exp() / total * out
    torch.testing.assert_close(layer(x)[0], expected, **EXACT)


def test_gradients_of_experts_and_gate_are_correct():
    layer, x = randomize(MoE(TopKGate(3, 4, 2), LinearExperts(4, 3, 2))), torch.randn(5, 3, dtype=torch.float64)
    names = [name for name, _ in layer.named_parameters()]
    tensors = [tensor.detach().requires_grad_() for tensor in (x, *layer.parameters())]

    def call(x, *parameters):
        return torch.func.functional_call(layer, dict(zip(names, parameters, strict=True)), x)[0]

    assert torch.autograd.gradcheck(call, tensors)


def test_weights_over_all_experts_are_their_probabilities():
    gate = randomize(TopKGate(3, 4, 2, over_chosen=False))
    x = draw(7, 3, seed=1)
    experts, weights, _ = gate(x)
    probabilities = (x @ gate.scores.weight.t()).softmax(1)
    torch.testing.assert_close(weights, probabilities.topk(2, dim=1).values, **EXACT)
    assert torch.equal(experts, probabilities.topk(2, dim=1).indices)


def plain_penalty(scores: torch.Tensor, num_chosen: int, balance: float, z: float) -> torch.Tensor:
    num_tokens, num_experts = scores.shape
    chosen = scores.topk(num_chosen, dim=1).indices
    total = scores.new_zeros(())
    for expert in range(num_experts):
        share = sum(expert in row for row in chosen.tolist()) / (num_tokens * num_chosen)
        total = total + num_experts * share * scores.softmax(1)[:, expert].mean()
    return balance * total + z * scores.exp().sum(1).log().square().mean()


@pytest.mark.parametrize("groups", [1, 2, 3])
def test_penalties_are_those_of_each_group(groups):
    gate = randomize(TopKGate(3, 4, 2, balance=0.3, z=0.7, groups=groups))
    x = draw(8, 5, 3, seed=1)
    penalty = gate(x).penalty_B
    assert penalty.shape == (8,)
    scores = x @ gate.scores.weight.t()
    for group in range(groups):
        start, end = 8 * group // groups, 8 * (group + 1) // groups
        expected = plain_penalty(scores[start:end].flatten(0, 1), 2, 0.3, 0.7)
        torch.testing.assert_close(penalty[start:end], expected.expand(end - start), **EXACT)
    (gradient,) = torch.autograd.grad(penalty.sum(), gate.scores.weight)
    assert gradient.abs().max() > 1e-3


def test_an_even_choice_has_the_smallest_balance_loss():
    gate = randomize(TopKGate(4, 4, 1, balance=1.0))
    with torch.no_grad():
        gate.scores.weight.copy_(10 * torch.eye(4))
    torch.testing.assert_close(gate(torch.eye(4).double()).penalty_B, torch.ones(4).double(), **EXACT)
    assert gate(torch.eye(4).double()[:1].repeat(4, 1)).penalty_B[0] > 3.9


@settings(max_examples=40)
@given(
    samples=st.integers(0, 7),
    length=st.integers(1, 3),
    groups=st.integers(1, 3),
    num_chosen=st.integers(1, 3),
    capacity=st.sampled_from([0.3, 1.0, 1.25, 9.0]),
)
def test_capacity_takes_first_choices_first_then_tokens_in_order(samples, length, groups, num_chosen, capacity):
    gate = randomize(TopKGate(3, 4, num_chosen, capacity=capacity, groups=groups))
    unlimited = randomize(TopKGate(3, 4, num_chosen))
    x = draw(samples, length, 3, seed=samples)
    (experts, weights, _), (wanted, all_weights, _) = gate(x), unlimited(x)
    for group in range(groups):
        tokens = range(samples * group // groups * length, samples * (group + 1) // groups * length)
        limit, taken = math.ceil(capacity * len(tokens) * num_chosen / 4), [0] * 4
        for choice in range(num_chosen):
            for token in tokens:
                expert = int(wanted[token, choice])
                is_kept = taken[expert] < limit
                taken[expert] += is_kept
                assert experts[token, choice] == (expert if is_kept else DROPPED)
                assert weights[token, choice] == (all_weights[token, choice] if is_kept else 0)


@pytest.mark.parametrize("capacity", [0.0, 0.8])
@pytest.mark.parametrize("groups", [1, 2])
def test_gshard_keeps_the_second_choice_with_twice_its_weight(capacity, groups):
    """With a key, the draws of group g of G are those of rank g of G; a dropped choice takes no capacity."""
    gate = randomize(TopKGate(3, 4, 2, capacity=capacity, groups=groups)).with_random_second()
    x, call = draw(200, 2, 3, seed=2), Call(Stage("forward", "main", (), ()), step=7, micro=1)
    step = StepDraws(0)
    gate.draws = LayerDraws(step, "blocks.1.mlp.gate")
    with step.keyed(call):
        experts, weights, _ = gate(x)
    wanted, all_weights, _ = randomize(TopKGate(3, 4, 2))(x)
    num_second = 0
    for group in range(groups):
        tokens = range(400 * group // groups, 400 * (group + 1) // groups)
        step = StepDraws(group)
        with step.keyed(call):
            draws = LayerDraws(step, "blocks.1.mlp.gate").uniform(len(tokens))
        limit, taken = math.ceil(capacity * len(tokens) * 2 / 4) if capacity else len(tokens), [0] * 4
        for choice in range(2):
            for token, number in zip(tokens, draws, strict=True):
                expert = int(wanted[token, choice])
                is_kept = bool(choice == 0 or number < 2 * all_weights[token, 1].detach()) and taken[expert] < limit
                taken[expert] += is_kept
                num_second += is_kept and choice == 1
                assert experts[token, choice] == (expert if is_kept else DROPPED)
                assert weights[token, choice] == (all_weights[token, choice] if is_kept else 0)
    expected = float(2 * all_weights[:, 1].detach().sum())
    assert capacity or abs(num_second - expected) < 4 * (0.25 * 400) ** 0.5  # four standard deviations at most


def test_random_second_choices_depend_on_the_step_and_the_layer_not_on_evaluation():
    gate, x = randomize(TopKGate(3, 4, 2)).with_random_second(), draw(50, 1, 3, seed=2)

    def second(number: int, path: str = "a") -> list[int]:
        step = StepDraws(0)
        gate.draws = LayerDraws(step, path)
        with step.keyed(Call(Stage("forward", "main", (), ()), number)):
            return gate(x).experts_NK[:, 1].tolist()

    assert second(0) == second(0) != second(1)
    assert second(0) != second(0, "b")
    gate.eval()
    assert DROPPED not in second(0)


@pytest.mark.parametrize("kind", [GeluExperts, SwiGluExperts])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("capacity", [0.0, 1.0])
def test_experts_with_hidden_layers_equal_a_loop_over_tokens(kind, bias, capacity):
    layer = randomize(
        MoE(TopKGate(4, 3, 2, capacity=capacity), kind(3, 4, 6, bias=bias), shared=nn.Linear(4, 4)), seed=3
    )
    x = draw(5, 2, 4, seed=2).requires_grad_()
    out, penalty = layer(x)
    assert penalty.shape == (5,) and not penalty.any()
    routing = layer.gate(x)
    tokens = x.flatten(0, 1)

    def linear(part, expert, row):
        result = part.weight[expert] @ row
        return result if part.bias is None else result + part.bias[expert]

    rows = [layer.shared(token) for token in tokens]
    for token, (chosen, weights) in enumerate(zip(routing.experts_NK.tolist(), routing.weights_NK, strict=True)):
        for expert, weight in zip(chosen, weights, strict=True):
            if expert == DROPPED:
                continue
            hidden = linear(layer.experts.up, expert, tokens[token])
            if kind is GeluExperts:
                hidden = functional.gelu(hidden)
            else:
                hidden = hidden * functional.silu(linear(layer.experts.gate, expert, tokens[token]))
            rows[token] = rows[token] + weight * linear(layer.experts.down, expert, hidden)
    expected = torch.stack(rows).unflatten(0, (5, 2))
    torch.testing.assert_close(out, expected, **EXACT)
    inputs = (x, *layer.parameters())
    upstream = draw(5, 2, 4, seed=9)
    for actual, wanted in zip(
        torch.autograd.grad((out * upstream).sum(), inputs, retain_graph=True),
        torch.autograd.grad((expected * upstream).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(actual, wanted, **EXACT)


def test_a_dropped_choice_takes_nothing_from_a_row_that_is_not_finite():
    layer = randomize(MoE(TopKGate(2, 2, 1, capacity=0.5), LinearExperts(2, 2, 2)))
    with torch.no_grad():
        layer.gate.scores.weight.copy_(torch.tensor([[1.0, 0.0], [0.0, 0.0]]))
    x = torch.ones(4, 2, dtype=torch.float64)
    x[0, 1] = torch.inf
    out, _ = layer(x)
    assert not out[0].isfinite().all() and not out[1:].any()  # capacity 1: the other tokens are dropped


def test_layers_in_bfloat16_score_in_float32():
    layer = MoE(TopKGate(4, 3, 2, z=0.1), GeluExperts(3, 4, 8)).bfloat16()
    out, penalty = layer(torch.randn(5, 4, dtype=torch.bfloat16))
    assert out.dtype is torch.bfloat16 and penalty.dtype is torch.float32


def test_a_block_without_experts_hands_on_the_penalties_of_those_before():
    form = replace(LLAMA, experts=ExpertForm(3, 2, 8, z=0.5))
    first, second = DecoderBlock(16, 2, form=form), DecoderBlock(16, 2)
    x, penalty = first(torch.randn(2, 3, 16))
    assert torch.equal(second((x, penalty))[1], penalty) and torch.equal(second((x, penalty))[0], second(x))


@pytest.mark.parametrize(("num_tokens", "all_to_one"), [(0, False), (1, False), (6, True)])
def test_empty_experts_and_one_for_all_tokens(num_tokens, all_to_one):
    layer = randomize(MoE(TopKGate(4, 5, 1), LinearExperts(5, 4, 3)))
    if all_to_one:
        layer.gate.scores.weight.data.zero_()
    x = draw(num_tokens, 4).requires_grad_()
    out, _ = layer(x)
    out.sum().backward()
    assert out.shape == (num_tokens, 3) and x.grad is not None
    used = layer.experts.weight.grad.abs().amax((1, 2)) > 0
    assert used.sum() == min(num_tokens, 1)


@pytest.mark.parametrize("shape", ["mixtral", "qwen3"])
def test_layers_of_transformers_give_the_same_outputs(shape):
    transformers = pytest.importorskip("transformers", reason="transformers is a development dependency")
    if shape == "mixtral":
        from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock as Block

        config = transformers.MixtralConfig(
            hidden_size=16, intermediate_size=24, num_local_experts=6, num_experts_per_tok=2, router_jitter_noise=0.0
        )
    else:
        from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock as Block

        config = transformers.Qwen3MoeConfig(
            hidden_size=16, moe_intermediate_size=24, num_experts=6, num_experts_per_tok=2, norm_topk_prob=False
        )
    config._experts_implementation = "eager"
    torch.manual_seed(0)
    theirs = Block(config)
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.2)
    ours = MoE(TopKGate(16, 6, 2, over_chosen=shape == "mixtral"), SwiGluExperts(6, 16, 24))
    state = theirs.state_dict()
    gate, up = state["experts.gate_up_proj"].chunk(2, dim=1)
    with torch.no_grad():
        ours.gate.scores.weight.copy_(state["gate.weight"])
        ours.experts.gate.weight.copy_(gate)
        ours.experts.up.weight.copy_(up)
        ours.experts.down.weight.copy_(state["experts.down_proj"])
    x = torch.randn(3, 5, 16)
    result = theirs(x)
    torch.testing.assert_close(ours(x)[0], result[0] if isinstance(result, tuple) else result, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TopKGate(4, 3, 4), "a gate that chooses 4 of 3 experts; wanted 1 to 3"),
        (lambda: TopKGate(4, 3, 1, capacity=-1), "a gate with capacity=-1; wanted 0 or more"),
        (lambda: TopKGate(4, 3, 1, balance=-0.5), "a gate with balance=-0.5; wanted 0 or more"),
        (
            lambda: TopKGate(4, 3, 1).with_random_second(),
            "a random second choice with num_chosen=1 and over_chosen=True; wanted 2 and True",
        ),
        (lambda: TopKGate(4, 3, 1, groups=0), "a gate with groups=0; wanted 1 or more"),
    ],
)
def test_impossible_gates_are_refused(make, message):
    with pytest.raises(UserError, match=message):
        make()

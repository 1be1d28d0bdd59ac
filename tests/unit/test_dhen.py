"""DHEN's modules, ensembles and layers, and its rival of experts, against formulas written out.

Shapes: B samples, M embeddings in, L out, D columns.
"""

import copy
import sys
from typing import Any

import pytest
import torch
from clicks import FEATURES, batch, tables
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from shardwright.errors import UserError
from shardwright.jagged import Batch
from shardwright.layers import mixing
from shardwright.layers.embedding import EmbeddingBags
from shardwright.layers.ensemble import ENSEMBLES, EnsembleLayer, EnsembleSpec
from shardwright.layers.gates import TopKGate
from shardwright.layers.mixing import INTERACTIONS, build_interaction
from shardwright.layers.moe import LinearExperts, MoE, MoEMLP, MoESpec
from shardwright.measure.describe import describe
from shardwright.models.ctr import ensemble_specs
from shardwright.models.dhen import DHEN
from shardwright.models.dlrm import DLRM

B, M, D, L = 3, 5, 4, 2
EXACT = {"rtol": 0, "atol": 1e-10}


def doubled(module: nn.Module) -> Any:
    """In float64, every parameter drawn anew, biases and norms too."""
    for parameter in module.double().parameters():
        nn.init.normal_(parameter, std=0.5)
    return module


def picture(num: int = M, samples: int = B) -> torch.Tensor:
    return torch.randn(samples, num, D, dtype=torch.float64)


def mlp(weights: list[nn.Linear], x: torch.Tensor) -> torch.Tensor:
    for linear in weights:
        x = (x @ linear.weight.T + linear.bias).clamp(min=0)
    return x


def linears(module: nn.Module) -> list[nn.Linear]:
    return [one for one in module.modules() if isinstance(one, nn.Linear)]


def normed(x: torch.Tensor, norm: nn.LayerNorm) -> torch.Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / ((centred**2).mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight + norm.bias


def test_linear_is_w_x():
    module, x = doubled(build_interaction(mixing.linear, M, D, L)), picture()
    (weights,) = linears(module)
    torch.testing.assert_close(module(x), torch.einsum("lm,bmd->bld", weights.weight, x), **EXACT)


def test_dlrm_is_dots_mlp_and_a_projection():
    module, x = doubled(build_interaction(INTERACTIONS["dlrm"], M, D, L)), picture()
    *deep, project = linears(module)
    dots = torch.stack([(x[:, i] * x[:, j]).sum(1) for i in range(M) for j in range(i + 1, M)], 1)
    expected = (mlp(deep, dots) @ project.weight.T).reshape(B, L, D)
    torch.testing.assert_close(module(x), expected, **EXACT)


def test_attention_is_torchs_encoder_layer_then_w():
    module, x = doubled(build_interaction(INTERACTIONS["attention"], M, D, L)), picture()
    block, mix = module
    encoder = nn.TransformerEncoderLayer(D, 2, 4 * D, 0.0, "gelu", batch_first=True, norm_first=True).double()
    names = {
        "self_attn.in_proj_weight": block.attention.qkv.weight,
        "self_attn.in_proj_bias": block.attention.qkv.bias,
        "self_attn.out_proj.weight": block.attention.out.weight,
        "self_attn.out_proj.bias": block.attention.out.bias,
        "linear1.weight": block.widen.weight,
        "linear1.bias": block.widen.bias,
        "linear2.weight": block.narrow.weight,
        "linear2.bias": block.narrow.bias,
    }
    names |= {
        f"norm{at}.{part}": getattr(getattr(block, f"norm{at}"), part) for at in (1, 2) for part in ("weight", "bias")
    }
    encoder.load_state_dict(names)
    expected = torch.einsum("lm,bmd->bld", mix.weights.weight, encoder(x))
    torch.testing.assert_close(module(x), expected, **EXACT)


def test_convolution_slides_over_embeddings_and_columns():
    module, x = doubled(build_interaction(lambda *shape: mixing.convolution(*shape, channels=2), M, D, L)), picture()
    kernels, bias = module[0].conv.weight, module[0].conv.bias
    padded = torch.zeros(B, M + 2, D + 2, dtype=torch.float64)
    padded[:, 1:-1, 1:-1] = x
    found = torch.zeros(B, 2, M, D, dtype=torch.float64)
    for row in range(M):
        for column in range(D):
            patch = padded[:, row : row + 3, column : column + 3]
            found[:, :, row, column] = torch.einsum("bij,cij->bc", patch, kernels[:, 0]) + bias
    expected = torch.einsum("lm,bmd->bld", module[1].weights.weight, found.reshape(B, 2 * M, D))
    torch.testing.assert_close(module(x), expected, **EXACT)
    with pytest.raises(UserError, match="a convolution of size 2 would shift the embeddings; wanted an odd size"):
        mixing.convolution(M, D, L, size=2)


def test_dcn_multiplies_by_the_first_without_a_skip():
    module, x = doubled(build_interaction(INTERACTIONS["dcn"], M, D, L)), picture()
    (project,) = linears(module)
    first = now = x.reshape(B, M * D)
    for cross in module[0].crosses:
        now = torch.stack([first[s] * (now[s] * cross.weight).sum() + cross.bias for s in range(B)])
    torch.testing.assert_close(module(x), (now @ project.weight.T).reshape(B, L, D), **EXACT)


def test_dcn_v2_multiplies_number_by_number():
    make = INTERACTIONS["dcn_v2"]
    module, x = doubled(build_interaction(lambda *shape: make(*shape, num_cross=2, rank=3), M, D, L)), picture()
    first = now = x.reshape(B, M * D)
    for cross in module[0].crosses:
        now = first * (now @ cross.down.weight.T @ cross.up.weight.T + cross.up.bias)
    expected = torch.einsum("lm,bmd->bld", module[2].weights.weight, now.reshape(B, M, D))
    torch.testing.assert_close(module(x), expected, **EXACT)


def test_fm_dots_every_embedding_with_mixtures_of_all():
    module, x = doubled(build_interaction(INTERACTIONS["fm"], M, D, L)), picture()
    dots = module[0]
    *_, deep, project = linears(module)
    y = torch.einsum("km,bmd->bkd", dots.mix.weights.weight, x)
    flat = torch.einsum("bmd,bkd->bmk", x, y).reshape(B, -1)
    expected = (mlp([deep], normed(flat, dots.norm)) @ project.weight.T).reshape(B, L, D)
    torch.testing.assert_close(module(x), expected, **EXACT)


@pytest.mark.parametrize("name", INTERACTIONS)
def test_gradients_of_every_module(name):
    module, x = doubled(build_interaction(INTERACTIONS[name], 3, 2, 2)), torch.randn(2, 3, 2, dtype=torch.float64)
    names = [name for name, _ in module.named_parameters()]

    def call(x, *parameters):
        return torch.func.functional_call(module, dict(zip(names, parameters, strict=True)), x)

    given = [tensor.detach().requires_grad_() for tensor in (x, *module.parameters())]
    assert torch.autograd.gradcheck(call, given)


@pytest.mark.parametrize("ensemble", ENSEMBLES)
@pytest.mark.parametrize(("num_out", "raw"), [(0, False), (3, False), (3, True)])
def test_a_layer_is_its_formula(ensemble, num_out, raw):
    form = EnsembleSpec((mixing.linear, INTERACTIONS["dlrm"]), num_out, ensemble, raw=raw)
    layer, x, numbers = doubled(EnsembleLayer(M, D, form, 6)), picture(), torch.randn(B, 6, dtype=torch.float64)
    seen = x
    if raw:
        seen = torch.cat([x, (numbers @ layer.numbers.weight.T + layer.numbers.bias).reshape(B, 1, D)], 1)
    parts = [module(seen) for module in layer.interactions.children()]
    sizes = {"concat": [3, 2] if num_out == 0 else [2, 1]}.get(ensemble, [num_out or M] * 2)
    assert [part.shape for part in parts] == [(B, size, D) for size in sizes]
    w = None if ensemble in ("concat", "sum") else layer.ensemble.weight
    if ensemble == "concat":
        together = torch.cat(parts, 1)
    elif w is None:
        together = parts[0] + parts[1]
    else:
        w = w.exp() / w.exp().sum() if ensemble == "softmax_sum" else w
        together = w[0] * parts[0] + w[1] * parts[1]
    shortcut = x if num_out == 0 else torch.einsum("lm,bmd->bld", layer.shortcut.weights.weight, x)
    torch.testing.assert_close(layer(x, numbers), normed(together + shortcut, layer.norm), **EXACT)


def test_weights_begin_as_a_sum_and_as_a_mean():
    modules = (mixing.linear, mixing.linear)
    layers = {kind: EnsembleLayer(M, D, EnsembleSpec(modules, L, kind, norm="none")).double() for kind in ENSEMBLES[1:]}
    for layer in layers.values():
        layer.load_state_dict({**layers["sum"].state_dict()}, strict=False)
    x = picture()
    shortcut = layers["sum"].shortcut(x)
    torch.testing.assert_close(layers["weighted_sum"](x), layers["sum"](x), **EXACT)
    torch.testing.assert_close(2 * (layers["softmax_sum"](x) - shortcut), layers["sum"](x) - shortcut, **EXACT)


def test_norms():
    x = picture()
    for norm in ("rms", "none"):
        layer = EnsembleLayer(M, D, EnsembleSpec((mixing.linear,), norm=norm)).double()
        plain = x + layer.interactions[0](x)
        eps = torch.finfo(torch.float64).eps
        expected = plain if norm == "none" else plain / ((plain**2).mean(-1, keepdim=True) + eps).sqrt()
        torch.testing.assert_close(layer(x), expected, **EXACT)


def dhen(layers: tuple[EnsembleSpec, ...], num_dense: int = 4) -> DHEN:
    return DHEN(EmbeddingBags(tables(), FEATURES), num_dense, bottom=(6, 8), top=(7,), layers=layers)


PAIR = (
    EnsembleSpec((INTERACTIONS["dlrm"], mixing.linear), raw=True),
    EnsembleSpec((mixing.linear, INTERACTIONS["dcn"]), 3, "sum"),
)


def test_dhen_is_two_layers_written_out():
    torch.manual_seed(0)
    model, one = dhen(PAIR), batch()
    vectors = model.sparse(one)
    dense = model.dense.bottom(one.dense)
    x = torch.stack([dense, *(vectors[feature.name] for feature in FEATURES)], 1).double()
    first, second = copy.deepcopy(model.dense.blocks).double()
    seen = torch.cat([x, first.numbers(one.dense.double())[:, None]], 1)
    dots = torch.stack([(seen[:, i] * seen[:, j]).sum(1) for i in range(5) for j in range(i + 1, 5)], 1)
    deep, project, mix = linears(first.interactions)
    parts = [(mlp([deep], dots) @ project.weight.T).view(16, 2, 8), torch.einsum("lm,bmd->bld", mix.weight, seen)]
    x = normed(torch.cat(parts, 1) + x, first.norm)
    mix, project = linears(second.interactions)
    flat = x.reshape(16, 32)
    crossed = flat
    for cross in second.interactions[1][0].crosses:
        crossed = flat * (crossed @ cross.weight)[:, None] + cross.bias
    total = torch.einsum("lm,bmd->bld", mix.weight, x) + (crossed @ project.weight.T).view(16, 3, 8)
    x = normed(total + torch.einsum("lm,bmd->bld", second.shortcut.weights.weight, x), second.norm)
    deep, last = linears(copy.deepcopy(model.dense.head).double())
    expected = mlp([deep], x.reshape(16, 24)) @ last.weight.T + last.bias
    torch.testing.assert_close(model(one).double(), expected.squeeze(1), rtol=0, atol=1e-5)


def test_dhen_without_numbers_has_no_bottom():
    model = dhen(PAIR, num_dense=0)
    one = batch()
    assert model.dense.bottom is None and model.dense.blocks[0].numbers is None
    assert model(Batch(one.features, None, one.labels)).shape == (16,)


def test_describe_counts_every_block():
    """Operations of a forward pass and parameters, by hand: 16 samples, 4 numbers, 4 embeddings of 8 columns."""
    model, one = dhen(PAIR), batch()
    blocks = {block.name: block for block in describe(model, one).blocks}
    assert list(blocks)[:4] == ["dense.bottom", "dense.blocks.0", "dense.blocks.1", "dense.head"]
    # of a sample: raw numbers 4 x 8; dots of 5 x 4 / 2 pairs of 8; 10 x 64; 64 x (2 x 8); 2 x 5 weights for 8 columns
    first = 2 * (4 * 8 + 10 * 8 + 10 * 64 + 64 * 16 + 2 * 5 * 8)
    # 3 x 4 weights for 8 columns; two crosses of 32; 32 x (3 x 8); the shortcut's 3 x 4 for 8 columns
    second = 2 * (3 * 4 * 8 + 2 * 32 + 32 * 24 + 3 * 4 * 8)
    counted = {"dense.bottom": 2 * (4 * 6 + 6 * 8), "dense.blocks.0": first, "dense.blocks.1": second}
    counted["dense.head"] = 2 * (24 * 7 + 7)
    parameters = {
        "dense.bottom": 4 * 6 + 6 + 6 * 8 + 8,
        "dense.blocks.0": 4 * 8 + 8 + 10 * 64 + 64 + 64 * 16 + 2 * 5 + 2 * 8,
        "dense.blocks.1": 3 * 4 + 2 * (32 + 32) + 32 * 24 + 3 * 4 + 2 * 8,
        "dense.head": 24 * 7 + 7 + 7 + 1,
    }
    assert {name: blocks[name].parameters for name in parameters} == parameters
    assert {name: blocks[name].forward_flops for name in counted} == {name: 16 * n for name, n in counted.items()}


def test_forms_come_from_names_options_and_functions():
    alike = ensemble_specs(["dlrm", "linear"], layers=3, embeddings=6, ensemble="sum")
    assert alike == (EnsembleSpec((INTERACTIONS["dlrm"], mixing.linear), 6, "sum"),) * 3
    apart = ensemble_specs([["dlrm"], [mixing.linear, {"kind": "dlrm", "hidden": [5, 7]}]])
    assert [len(form.modules) for form in apart] == [1, 2]
    assert [one.out_features for one in linears(apart[1].modules[1](M, D, L))] == [5, 7]


class Odd(nn.Module):
    """A user's module that forgets how many embeddings were asked for."""

    def forward(self, x_BMD):
        return x_BMD[:, :1]


def odd(num_in: int, dim: int, num_out: int) -> nn.Module:
    return Odd()


def flat(num_in: int, dim: int, num_out: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(num_in * dim, 9), nn.Tanh())


def test_a_users_own_module_is_one_more(monkeypatch):
    monkeypatch.setitem(sys.modules, "mine", sys.modules[__name__])
    layers = ensemble_specs(["linear", "mine:flat"], layers=2)
    model, one = dhen(layers), batch()
    module = model.dense.blocks[1].interactions[1]
    x = torch.randn(16, 4, 8)
    hidden = torch.tanh(x.reshape(16, 32) @ module[0][1].weight.T + module[0][1].bias)
    torch.testing.assert_close(module(x), (hidden @ module[1].weights.weight.T).view(16, 2, 8))
    model(one).sum().backward()
    assert all(parameter.grad is not None for parameter in model.dense.parameters())


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: ensemble_specs(["dlmr"]), 'model.modules="dlmr" is unknown; did you mean "dlrm"?'),
        (
            lambda: ensemble_specs(["linear"], ensamble="sum"),
            'unknown key "model.stack.ensamble"; did you mean "ensemble"?',
        ),
        (
            lambda: ensemble_specs([{"kind": "dlrm", "hiden": [3]}]),
            'unknown key "hiden" of "dlrm"; did you mean "hidden"?',
        ),
        (lambda: ensemble_specs([3]), "model.modules: 3 is not a module; wanted a name"),
        (
            lambda: ensemble_specs([["linear"], ["dlrm"]], layers=3),
            "model.stack.layers=3, and model.modules has 2 lists",
        ),
        (lambda: ensemble_specs(["linear"], ensemble="mean"), 'ensemble="mean" is unknown'),
        (lambda: ensemble_specs(["linear"], norm="layers"), 'norm="layers" is unknown; did you mean "layer"?'),
        (lambda: ensemble_specs([]), "a layer without modules; pass at least one"),
        (
            lambda: dhen(ensemble_specs(["linear", "dlrm"], embeddings=1)),
            "layer 1 of 1: 2 modules cannot share 1 embeddings",
        ),
        (
            lambda: dhen(ensemble_specs([["linear"], ["linear", odd]], ensemble="sum")),
            r'layer 2 of 2: module "odd" outputs \(B, 1, 8\) for \(B, 4, 8\); wanted \(B, 4, 8\), or \(B, any\)',
        ),
        (lambda: dhen(ensemble_specs([lambda *shape: nn.Linear(5, 5)])), 'layer 1 of 1: module "<lambda>" fails on'),
        (lambda: dhen(ensemble_specs([lambda *shape: None])), "its builder returned a NoneType; wanted a torch module"),
        (lambda: TopKGate(4, 3, 4), "a gate that chooses 4 of 3 experts; wanted 1 to 3"),
    ],
)
def test_mistakes_are_told(make, told):
    with pytest.raises(UserError, match=told):
        make()


def test_gate_takes_the_highest_and_of_equals_the_first():
    gate = TopKGate(3, 4, 2)
    with torch.no_grad():
        gate.scores.weight.copy_(torch.tensor([[1.0, 0, 0], [0, 1, 0], [0, 1, 0], [1, 0, 0]]))
    chosen, weights = gate(torch.tensor([[1.0, 0, 0], [0, 2, 0], [1, 1, 0], [2, 1, 5]]))
    assert chosen.tolist() == [[0, 3], [1, 2], [0, 1], [0, 3]]
    torch.testing.assert_close(weights, torch.full((4, 2), 0.5))
    gate.scores.weight.data[3, 0] = 3
    chosen, weights = gate(torch.tensor([[1.0, 0, 0]]))
    assert chosen.tolist() == [[3, 0]]
    torch.testing.assert_close(
        weights, torch.tensor([[3.0, 1.0]]).exp() / (torch.tensor(3.0).exp() + torch.tensor(1.0).exp())
    )


@settings(max_examples=40)
@given(tokens=st.integers(0, 9), experts=st.integers(1, 5), data=st.data())
def test_moe_is_a_loop_over_samples(tokens, experts, data):
    chosen = data.draw(st.integers(1, experts))
    torch.manual_seed(tokens * 25 + experts * 5 + chosen)
    layer = doubled(MoE(TopKGate(4, experts, chosen), LinearExperts(experts, 4, 3)))
    x = torch.randn(tokens, 4, dtype=torch.float64)
    expected = torch.zeros(tokens, 3, dtype=torch.float64)
    for sample in range(tokens):
        scores = layer.gate.scores.weight @ x[sample]
        best = sorted(range(experts), key=lambda expert: -scores[expert].item())[:chosen]
        total = sum(scores[expert].exp() for expert in best)
        for expert in best:
            out = layer.experts.weight[expert] @ x[sample] + layer.experts.bias[expert]
            expected[sample] += scores[expert].exp() / total * out
    torch.testing.assert_close(layer(x), expected, **EXACT)


def test_gradients_of_a_mixture_reach_experts_and_gate():
    layer, x = doubled(MoE(TopKGate(3, 4, 2), LinearExperts(4, 3, 2))), torch.randn(5, 3, dtype=torch.float64)
    names = [name for name, _ in layer.named_parameters()]
    given_ = [tensor.detach().requires_grad_() for tensor in (x, *layer.parameters())]

    def call(x, *parameters):
        return torch.func.functional_call(layer, dict(zip(names, parameters, strict=True)), x)

    assert torch.autograd.gradcheck(call, given_)


def test_dlrm_of_experts_is_counted_as_if_routed_evenly():
    bags = EmbeddingBags(tables(), FEATURES)
    model, one = DLRM(bags, 4, bottom=(8,), top=(6, 5), mixture=MoESpec(3, 2)), batch()
    assert isinstance(model.dense.top, MoEMLP)
    (top,) = [block for block in describe(model, one).blocks if block.name == "dense.top"]
    # 8 + 6 dots in; a gate of 3 scores, two experts of three for each sample
    assert top.forward_flops == 16 * 2 * (14 * 3 + 2 * 14 * 6 + 6 * 3 + 2 * 6 * 5 + 5)
    assert top.parameters == 3 * 14 + 3 * (14 * 6 + 6) + 3 * 6 + 3 * (6 * 5 + 5) + 5 + 1
    model(one).sum().backward()
    assert all(parameter.grad is not None for parameter in model.dense.parameters())

"""DHEN's interaction modules, ensembles and layers, and the mixture of experts, compared with explicit formulas.

Shapes: B samples, M input embeddings, L output embeddings, D columns.
"""

import copy
import sys
from typing import Any

import pytest
import torch
from clicks import FEATURES, batch, tables
from torch import nn

from shardwright.errors import UserError
from shardwright.jagged import Batch
from shardwright.layers import mixing
from shardwright.layers.embedding import EmbeddingBags
from shardwright.layers.ensemble import ENSEMBLES, EnsembleLayer, EnsembleSpec
from shardwright.layers.mixing import INTERACTIONS, build_interaction
from shardwright.layers.moe import MoEMLP, MoESpec
from shardwright.measure.describe import describe
from shardwright.models.ctr import ensemble_specs
from shardwright.models.dhen import DHEN
from shardwright.models.dlrm import DLRM

B, M, D, L = 3, 5, 4, 2
EXACT = {"rtol": 0, "atol": 1e-10}


def randomize(module: nn.Module) -> Any:
    """Convert to float64 and draw every parameter from a normal distribution, biases and norms included."""
    for parameter in module.double().parameters():
        nn.init.normal_(parameter, std=0.5)
    return module


def embeddings(num: int = M, samples: int = B) -> torch.Tensor:
    return torch.randn(samples, num, D, dtype=torch.float64)


def mlp(weights: list[nn.Linear], x: torch.Tensor) -> torch.Tensor:
    for linear in weights:
        x = (x @ linear.weight.T + linear.bias).clamp(min=0)
    return x


def linears(module: nn.Module) -> list[nn.Linear]:
    return [layer for layer in module.modules() if isinstance(layer, nn.Linear)]


def layer_norm(x: torch.Tensor, norm: nn.LayerNorm) -> torch.Tensor:
    centered = x - x.mean(-1, keepdim=True)
    return centered / ((centered**2).mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight + norm.bias


def test_linear_equals_its_formula():
    module, x = randomize(build_interaction(mixing.linear, M, D, L)), embeddings()
    (weights,) = linears(module)
    torch.testing.assert_close(module(x), torch.einsum("lm,bmd->bld", weights.weight, x), **EXACT)


def test_dlrm_equals_dot_products_an_mlp_and_a_projection():
    module, x = randomize(build_interaction(INTERACTIONS["dlrm"], M, D, L)), embeddings()
    *deep, project = linears(module)
    dots = torch.stack([(x[:, i] * x[:, j]).sum(1) for i in range(M) for j in range(i + 1, M)], 1)
    expected = (mlp(deep, dots) @ project.weight.T).reshape(B, L, D)
    torch.testing.assert_close(module(x), expected, **EXACT)


def test_attention_equals_torchs_encoder_layer_and_a_projection():
    module, x = randomize(build_interaction(INTERACTIONS["attention"], M, D, L)), embeddings()
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
        f"norm{i}.{part}": getattr(getattr(block, f"norm{i}"), part) for i in (1, 2) for part in ("weight", "bias")
    }
    encoder.load_state_dict(names)
    expected = torch.einsum("lm,bmd->bld", mix.weights.weight, encoder(x))
    torch.testing.assert_close(module(x), expected, **EXACT)


def test_convolution_equals_a_loop_over_embeddings_and_columns():
    module = randomize(build_interaction(lambda *shape: mixing.convolution(*shape, channels=2), M, D, L))
    x = embeddings()
    kernels, bias = module[0].conv.weight, module[0].conv.bias
    padded = torch.zeros(B, M + 2, D + 2, dtype=torch.float64)
    padded[:, 1:-1, 1:-1] = x
    convolved = torch.zeros(B, 2, M, D, dtype=torch.float64)
    for row in range(M):
        for column in range(D):
            patch = padded[:, row : row + 3, column : column + 3]
            convolved[:, :, row, column] = torch.einsum("bij,cij->bc", patch, kernels[:, 0]) + bias
    expected = torch.einsum("lm,bmd->bld", module[1].weights.weight, convolved.reshape(B, 2 * M, D))
    torch.testing.assert_close(module(x), expected, **EXACT)
    with pytest.raises(UserError, match="a convolution of size 2 would shift the embeddings; wanted an odd size"):
        mixing.convolution(M, D, L, size=2)


def test_dcn_equals_its_formula_without_a_skip_connection():
    module, x = randomize(build_interaction(INTERACTIONS["dcn"], M, D, L)), embeddings()
    (project,) = linears(module)
    flat = crossed = x.reshape(B, M * D)
    for cross in module[0].crosses:
        crossed = torch.stack([flat[s] * (crossed[s] * cross.weight).sum() + cross.bias for s in range(B)])
    torch.testing.assert_close(module(x), (crossed @ project.weight.T).reshape(B, L, D), **EXACT)


def test_dcn_v2_equals_its_elementwise_formula():
    make = INTERACTIONS["dcn_v2"]
    module, x = randomize(build_interaction(lambda *shape: make(*shape, num_cross=2, rank=3), M, D, L)), embeddings()
    flat = crossed = x.reshape(B, M * D)
    for cross in module[0].crosses:
        crossed = flat * (crossed @ cross.down.weight.T @ cross.up.weight.T + cross.up.bias)
    expected = torch.einsum("lm,bmd->bld", module[2].weights.weight, crossed.reshape(B, M, D))
    torch.testing.assert_close(module(x), expected, **EXACT)


def test_fm_equals_dot_products_with_mixtures_of_all_embeddings():
    module, x = randomize(build_interaction(INTERACTIONS["fm"], M, D, L)), embeddings()
    dots = module[0]
    *_, deep, project = linears(module)
    y = torch.einsum("km,bmd->bkd", dots.mix.weights.weight, x)
    flat = torch.einsum("bmd,bkd->bmk", x, y).reshape(B, -1)
    expected = (mlp([deep], layer_norm(flat, dots.norm)) @ project.weight.T).reshape(B, L, D)
    torch.testing.assert_close(module(x), expected, **EXACT)


@pytest.mark.parametrize("name", INTERACTIONS)
def test_gradients_of_every_interaction_module_are_correct(name):
    module, x = randomize(build_interaction(INTERACTIONS[name], 3, 2, 2)), torch.randn(2, 3, 2, dtype=torch.float64)
    names = [name for name, _ in module.named_parameters()]

    def call(x, *parameters):
        return torch.func.functional_call(module, dict(zip(names, parameters, strict=True)), x)

    tensors = [tensor.detach().requires_grad_() for tensor in (x, *module.parameters())]
    assert torch.autograd.gradcheck(call, tensors)


@pytest.mark.parametrize("ensemble", ENSEMBLES)
@pytest.mark.parametrize(("num_out", "raw"), [(0, False), (3, False), (3, True)])
def test_an_ensemble_layer_equals_its_formula(ensemble, num_out, raw):
    spec = EnsembleSpec((mixing.linear, INTERACTIONS["dlrm"]), num_out, ensemble, raw=raw)
    layer, x, numbers = randomize(EnsembleLayer(M, D, spec, 6)), embeddings(), torch.randn(B, 6, dtype=torch.float64)
    inputs = x
    if raw:
        inputs = torch.cat([x, (numbers @ layer.numbers.weight.T + layer.numbers.bias).reshape(B, 1, D)], 1)
    outputs = [module(inputs) for module in layer.interactions.children()]
    sizes = {"concat": [3, 2] if num_out == 0 else [2, 1]}.get(ensemble, [num_out or M] * 2)
    assert [part.shape for part in outputs] == [(B, size, D) for size in sizes]
    weights = None if ensemble in ("concat", "sum") else layer.ensemble.weight
    if ensemble == "concat":
        combined = torch.cat(outputs, 1)
    elif weights is None:
        combined = outputs[0] + outputs[1]
    else:
        weights = weights.exp() / weights.exp().sum() if ensemble == "softmax_sum" else weights
        combined = weights[0] * outputs[0] + weights[1] * outputs[1]
    shortcut = x if num_out == 0 else torch.einsum("lm,bmd->bld", layer.shortcut.weights.weight, x)
    torch.testing.assert_close(layer(x, numbers), layer_norm(combined + shortcut, layer.norm), **EXACT)


def test_ensemble_weights_start_as_a_sum_or_a_mean():
    modules = (mixing.linear, mixing.linear)
    layers = {kind: EnsembleLayer(M, D, EnsembleSpec(modules, L, kind, norm="none")).double() for kind in ENSEMBLES[1:]}
    for layer in layers.values():
        layer.load_state_dict({**layers["sum"].state_dict()}, strict=False)
    x = embeddings()
    shortcut = layers["sum"].shortcut(x)
    torch.testing.assert_close(layers["weighted_sum"](x), layers["sum"](x), **EXACT)
    torch.testing.assert_close(2 * (layers["softmax_sum"](x) - shortcut), layers["sum"](x) - shortcut, **EXACT)


def test_rms_norm_and_no_norm_equal_their_formulas():
    x = embeddings()
    for norm in ("rms", "none"):
        layer = EnsembleLayer(M, D, EnsembleSpec((mixing.linear,), norm=norm)).double()
        total = x + layer.interactions[0](x)
        eps = torch.finfo(torch.float64).eps
        expected = total if norm == "none" else total / ((total**2).mean(-1, keepdim=True) + eps).sqrt()
        torch.testing.assert_close(layer(x), expected, **EXACT)


def dhen(layers: tuple[EnsembleSpec, ...], num_dense: int = 4) -> DHEN:
    return DHEN(EmbeddingBags(tables(), FEATURES), num_dense, bottom=(6, 8), top=(7,), layers=layers)


TWO_LAYERS = (
    EnsembleSpec((INTERACTIONS["dlrm"], mixing.linear), raw=True),
    EnsembleSpec((mixing.linear, INTERACTIONS["dcn"]), 3, "sum"),
)


def test_dhen_equals_two_layers_written_out():
    torch.manual_seed(0)
    model, batch_ = dhen(TWO_LAYERS), batch()
    vectors = model.sparse(batch_)
    dense = model.dense.bottom(batch_.dense)
    x = torch.stack([dense, *(vectors[feature.name] for feature in FEATURES)], 1).double()
    first, second = copy.deepcopy(model.dense.blocks).double()
    inputs = torch.cat([x, first.numbers(batch_.dense.double())[:, None]], 1)
    dots = torch.stack([(inputs[:, i] * inputs[:, j]).sum(1) for i in range(5) for j in range(i + 1, 5)], 1)
    deep, project, mix = linears(first.interactions)
    parts = [(mlp([deep], dots) @ project.weight.T).view(16, 2, 8), torch.einsum("lm,bmd->bld", mix.weight, inputs)]
    x = layer_norm(torch.cat(parts, 1) + x, first.norm)
    mix, project = linears(second.interactions)
    flat = x.reshape(16, 32)
    crossed = flat
    for cross in second.interactions[1][0].crosses:
        crossed = flat * (crossed @ cross.weight)[:, None] + cross.bias
    total = torch.einsum("lm,bmd->bld", mix.weight, x) + (crossed @ project.weight.T).view(16, 3, 8)
    x = layer_norm(total + torch.einsum("lm,bmd->bld", second.shortcut.weights.weight, x), second.norm)
    deep, last = linears(copy.deepcopy(model.dense.head).double())
    expected = mlp([deep], x.reshape(16, 24)) @ last.weight.T + last.bias
    torch.testing.assert_close(model(batch_).double(), expected.squeeze(1), rtol=0, atol=1e-5)


def test_dhen_without_numeric_features_has_no_bottom_mlp():
    model = dhen(TWO_LAYERS, num_dense=0)
    batch_ = batch()
    assert model.dense.bottom is None and model.dense.blocks[0].numbers is None
    assert model(Batch(batch_.features, None, batch_.labels)).shape == (16,)


def test_describe_counts_every_block():
    """Operations of a forward pass, and parameters, by hand: 16 samples, 4 numbers, 4 embeddings of 8 columns."""
    model, batch_ = dhen(TWO_LAYERS), batch()
    blocks = {block.name: block for block in describe(model, batch_).blocks}
    assert list(blocks)[:4] == ["dense.bottom", "dense.blocks.0", "dense.blocks.1", "dense.head"]
    # per sample: raw features 4 x 8; dots of 5 x 4 / 2 pairs of 8; 10 x 64; 64 x (2 x 8); 2 x 5 weights for 8 columns
    first = 2 * (4 * 8 + 10 * 8 + 10 * 64 + 64 * 16 + 2 * 5 * 8)
    # 3 x 4 weights for 8 columns; two crosses of 32; 32 x (3 x 8); the shortcut's 3 x 4 for 8 columns
    second = 2 * (3 * 4 * 8 + 2 * 32 + 32 * 24 + 3 * 4 * 8)
    flops = {"dense.bottom": 2 * (4 * 6 + 6 * 8), "dense.blocks.0": first, "dense.blocks.1": second}
    flops["dense.head"] = 2 * (24 * 7 + 7)
    parameters = {
        "dense.bottom": 4 * 6 + 6 + 6 * 8 + 8,
        "dense.blocks.0": 4 * 8 + 8 + 10 * 64 + 64 + 64 * 16 + 2 * 5 + 2 * 8,
        "dense.blocks.1": 3 * 4 + 2 * (32 + 32) + 32 * 24 + 3 * 4 + 2 * 8,
        "dense.head": 24 * 7 + 7 + 7 + 1,
    }
    assert {name: blocks[name].parameters for name in parameters} == parameters
    assert {name: blocks[name].forward_flops for name in flops} == {name: 16 * n for name, n in flops.items()}


def test_ensemble_specs_come_from_names_options_and_functions():
    same_modules = ensemble_specs(["dlrm", "linear"], layers=3, embeddings=6, ensemble="sum")
    assert same_modules == (EnsembleSpec((INTERACTIONS["dlrm"], mixing.linear), 6, "sum"),) * 3
    own_modules = ensemble_specs([["dlrm"], [mixing.linear, {"kind": "dlrm", "hidden": [5, 7]}]])
    assert [len(spec.modules) for spec in own_modules] == [1, 2]
    assert [layer.out_features for layer in linears(own_modules[1].modules[1](M, D, L))] == [5, 7]


class OneOutput(nn.Module):
    """A user's module that ignores the requested number of embeddings and returns one."""

    def forward(self, x_BMD):
        return x_BMD[:, :1]


def one_output(num_in: int, dim: int, num_out: int) -> nn.Module:
    return OneOutput()


def flat_mlp(num_in: int, dim: int, num_out: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(num_in * dim, 9), nn.Tanh())


def test_a_users_own_module_works_like_the_built_in_ones(monkeypatch):
    monkeypatch.setitem(sys.modules, "mine", sys.modules[__name__])
    layers = ensemble_specs(["linear", "mine:flat_mlp"], layers=2)
    model, batch_ = dhen(layers), batch()
    module = model.dense.blocks[1].interactions[1]
    x = torch.randn(16, 4, 8)
    hidden = torch.tanh(x.reshape(16, 32) @ module[0][1].weight.T + module[0][1].bias)
    torch.testing.assert_close(module(x), (hidden @ module[1].weights.weight.T).view(16, 2, 8))
    model(batch_).sum().backward()
    assert all(parameter.grad is not None for parameter in model.dense.parameters())


@pytest.mark.parametrize(
    ("make", "message"),
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
            lambda: dhen(ensemble_specs([["linear"], ["linear", one_output]], ensemble="sum")),
            r'layer 2 of 2: module "one_output" outputs \(B, 1, 8\) for \(B, 4, 8\); wanted \(B, 4, 8\), or \(B, any\)',
        ),
        (lambda: dhen(ensemble_specs([lambda *shape: nn.Linear(5, 5)])), 'layer 1 of 1: module "<lambda>" fails on'),
        (lambda: dhen(ensemble_specs([lambda *shape: None])), "its builder returned a NoneType; wanted a torch module"),
    ],
)
def test_invalid_specs_are_refused(make, message):
    with pytest.raises(UserError, match=message):
        make()


def test_describe_counts_a_mixture_of_experts_as_evenly_routed():
    bags = EmbeddingBags(tables(), FEATURES)
    model, batch_ = DLRM(bags, 4, bottom=(8,), top=(6, 5), mixture=MoESpec(3, 2)), batch()
    assert isinstance(model.dense.top, MoEMLP)
    (top,) = [block for block in describe(model, batch_).blocks if block.name == "dense.top"]
    # 8 + 6 dots in; a gate of 3 scores, two experts of three for each sample
    assert top.forward_flops == 16 * 2 * (14 * 3 + 2 * 14 * 6 + 6 * 3 + 2 * 6 * 5 + 5)
    assert top.parameters == 3 * 14 + 3 * (14 * 6 + 6) + 3 * 6 + 3 * (6 * 5 + 5) + 5 + 1
    model(batch_).sum().backward()
    assert all(parameter.grad is not None for parameter in model.dense.parameters())

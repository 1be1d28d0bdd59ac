"""Models against plain formulas."""

from dataclasses import dataclass, replace

import pytest
import torch
from clicks import FEATURES, batch, dlrm, tables
from torch import nn
from torch.nn import functional

from shardwright import config
from shardwright.data.sources.synthetic import ClickStream
from shardwright.errors import UserError
from shardwright.jagged import Batch, Jagged
from shardwright.layers.attention import Attention
from shardwright.layers.embedding import EmbeddingBags
from shardwright.layers.interaction import Cross, CrossV2, DotInteraction, FactorizationMachine, FieldAttention
from shardwright.layers.loss import BinaryLoss
from shardwright.models.autoint import AutoInt
from shardwright.models.ctr import MODELS
from shardwright.models.dcn import DCN
from shardwright.models.deepfm import DeepFM
from shardwright.models.dlrm import DLRM
from shardwright.models.gpt import GPT
from shardwright.models.logistic import LogisticRegression
from shardwright.models.wide_deep import WideDeep
from shardwright.runtime.build import build
from shardwright.runtime.planning import plan_for
from shardwright.runtime.run.recipe import make_dense_optimizer, make_model
from shardwright.spec.optimizer import SGD
from shardwright.spec.workload import Feature, Table


def tokens(batch_size: int = 3, length: int = 8) -> Batch:
    ids = torch.randint(0, 20, (batch_size, length + 1))
    jagged = Jagged(("tokens",), ids[:, :-1].flatten(), torch.full((1, batch_size), length))
    return Batch(jagged, None, {"next": ids[:, 1:]})


def test_dot_interaction_is_every_pair_once():
    x = torch.randn(3, 4, 5)
    expected = [(x[:, i] * x[:, j]).sum(1) for i in range(4) for j in range(i + 1, 4)]
    torch.testing.assert_close(DotInteraction(4)(x), torch.stack(expected, 1))


def test_dlrm_is_bottom_dots_top():
    model, one = dlrm(), batch()
    vectors = model.sparse(one)
    dense = model.dense.bottom(one.dense)
    four = [dense, *(vectors[feature.name] for feature in FEATURES)]
    dots = [(four[i] * four[j]).sum(1, keepdim=True) for i in range(4) for j in range(i + 1, 4)]
    expected = model.dense.top(torch.cat([dense, *dots], 1)).squeeze(1)
    torch.testing.assert_close(model(one), expected)


def test_logistic_regression_adds_weights():
    model, one = LogisticRegression(EmbeddingBags(tables(dim=1), FEATURES), 4), batch()
    vectors = model.sparse(one)
    with torch.no_grad():
        model.dense.numbers.weight.normal_()
        model.dense.numbers.bias.fill_(0.5)
    expected = one.dense @ model.dense.numbers.weight + 0.5
    expected = expected + sum(vectors[feature.name][:, 0] for feature in FEATURES)
    torch.testing.assert_close(model(one), expected)


def test_attention_equals_its_formula():
    attention, x = Attention(12, 3).double(), torch.randn(2, 5, 12, dtype=torch.float64)
    query, key, value = attention.qkv(x).chunk(3, dim=2)
    heads = []
    for head in range(3):
        q, k, v = (part[:, :, 4 * head : 4 * head + 4] for part in (query, key, value))
        scores = q @ k.transpose(1, 2) / 2.0
        scores = scores.masked_fill(torch.ones(5, 5, dtype=torch.bool).triu(1), float("-inf"))
        heads.append(scores.softmax(2) @ v)
    torch.testing.assert_close(attention(x), attention.out(torch.cat(heads, 2)), rtol=0, atol=1e-12)


@dataclass(frozen=True)
class NoNumbers:
    """A source without numeric features."""

    features = (("site", 40, False), ("seen", 30, True), ("shown", 30, True))
    num_dense = 0


FORMS = {
    "logistic": {},
    "dlrm": {"dim": 8, "bottom": [], "top": [16]},
    "dlrm_moe": {"dim": 8, "bottom": [], "top": [16], "num_experts": 4, "num_chosen": 2},
    "dhen": {"dim": 8, "bottom": [], "top": [16], "modules": ["dlrm", "linear"], "stack": {"layers": 2}},
    "wide_deep": {"dim": 8, "hidden": [16]},
    "deepfm": {"dim": 8, "hidden": [16]},
    "dcn": {"dim": 8, "hidden": [16], "num_cross": 2},
    "dcn_v2": {"dim": 8, "hidden": [16], "num_cross": 2},
    "autoint": {"dim": 8, "num_layers": 1, "num_heads": 2, "head_dim": 4},
}


@pytest.mark.parametrize("kind", MODELS)
def test_every_model_trains_without_numeric_features(kind):
    model = MODELS[kind](NoNumbers(), SGD(lr=0.1), **FORMS[kind])
    one = replace(batch(), dense=torch.zeros(16, 0))
    job = build(model, plan_for(model, one), optimizer=lambda p: torch.optim.SGD(p, 0.1))
    first, second = (output.loss for output in job.run([one, one]))
    assert 0 < float(second) != float(first) > 0


@pytest.mark.parametrize("kind", ["dlrm", "dlrm_moe", "dhen"])
def test_numeric_features_need_a_bottom_that_ends_at_the_tables_dim(kind):
    with pytest.raises(UserError, match=r"bottom=\[\] with 8 numeric features; give widths of its layers"):
        MODELS[kind](ClickStream(), SGD(lr=0.1), **FORMS[kind])
    with pytest.raises(UserError, match=r"bottom MLP ends at 4 and the tables have dims \[8\]; all must be equal"):
        MODELS[kind](NoNumbers(), SGD(lr=0.1), **FORMS[kind] | {"bottom": [4]})


def test_gpt_is_causal_and_ties_its_head():
    model = GPT(vocabulary=20, context=8, channels=16, num_blocks=2, num_heads=2)
    assert model.head.linear.weight is model.embed.token.weight
    one = tokens()
    changed = one.features.values.view(3, 8).clone()
    changed[:, 5] = (changed[:, 5] + 1) % 20
    other = Batch(Jagged(("tokens",), changed.flatten(), one.features.lengths), None, one.labels)
    before, after = model(one), model(other)
    assert torch.equal(before[:, :5], after[:, :5]) and not torch.equal(before[:, 5:], after[:, 5:])


def test_binary_loss_weighs_samples():
    one = batch()
    logits = torch.randn(16)
    weighted = Batch(one.features, one.dense, one.labels, torch.rand(16))
    each = functional.binary_cross_entropy_with_logits(logits, one.labels["click"], reduction="none")
    torch.testing.assert_close(BinaryLoss()(logits, weighted), (each * weighted.weights).sum() / weighted.weights.sum())


def test_label_of_two_is_named():
    one = batch()
    one.labels["click"][5] = 2
    with pytest.raises(UserError, match='label "click": sample 5 is 2; a label is 0 or 1'):
        BinaryLoss()(torch.zeros(16), one)


def test_shapes_that_do_not_meet_are_named():
    bags = EmbeddingBags(tables(), FEATURES)
    with pytest.raises(UserError, match=r"bottom MLP ends at 4 and the tables have dims \[8\]"):
        DLRM(bags, 4, bottom=(4,), top=(4,))
    with pytest.raises(UserError, match="tables of dim 1"):
        LogisticRegression(bags, 4)
    with pytest.raises(UserError, match="sequences of 8 tokens; this model reads 4"):
        GPT(vocabulary=20, context=4, channels=4, num_blocks=1, num_heads=1)(tokens())


def wide(dim: int) -> EmbeddingBags:
    """Vectors of `dim` and a weight for each of two features."""
    names = ("site", "seen")
    tables_ = [Table(name, 40, dim) for name in names] + [Table(f"{name}_wide", 40, 1) for name in names]
    features = [Feature(name, name) for name in names] + [Feature(f"{n}_wide", f"{n}_wide", ids=n) for n in names]
    return EmbeddingBags(tables_, features)


def flat(model: torch.nn.Module, one: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """The deep vectors side by side, and the sum of the wide weights."""
    vectors = model.sparse(one)
    return torch.cat([vectors["site"], vectors["seen"]], 1), (vectors["site_wide"] + vectors["seen_wide"])[:, 0]


def test_factorization_machine_is_the_sum_over_pairs():
    x = torch.randn(3, 4, 5, dtype=torch.float64)
    expected = sum((x[:, i] * x[:, j]).sum(1) for i in range(4) for j in range(i + 1, 4))
    torch.testing.assert_close(FactorizationMachine()(x), expected, rtol=0, atol=1e-12)


def test_crosses_equal_their_formulas():
    first, x = torch.randn(2, 3, 6, dtype=torch.float64)
    cross = Cross(6).double()
    torch.nn.init.normal_(cross.bias)
    outer = torch.einsum("bi,bj->bij", first, x) @ cross.weight + cross.bias
    torch.testing.assert_close(cross(first, x), outer + x, rtol=0, atol=1e-12)
    bare = Cross(6, skip=False).double()
    bare.load_state_dict(cross.state_dict())
    torch.testing.assert_close(bare(first, x), outer, rtol=0, atol=1e-12)
    full, low = CrossV2(6).double(), CrossV2(6, rank=2).double()
    torch.testing.assert_close(full(first, x), first * (x @ full.up.weight.T + full.up.bias) + x)
    expected = first * (x @ low.down.weight.T @ low.up.weight.T + low.up.bias) + x
    torch.testing.assert_close(low(first, x), expected)


def test_field_attention_equals_its_formula():
    layer, x = FieldAttention(6, num_heads=2, head_dim=4).double(), torch.randn(3, 5, 6, dtype=torch.float64)
    query, key, value = layer.qkv(x).chunk(3, dim=2)
    heads = [
        (query[:, :, h] @ key[:, :, h].transpose(1, 2) / 2).softmax(2) @ value[:, :, h]
        for h in (slice(0, 4), slice(4, 8))
    ]
    expected = (torch.cat(heads, 2) + x @ layer.shortcut.weight.T).relu()
    torch.testing.assert_close(layer(x), expected, rtol=0, atol=1e-12)


def test_wide_and_deep_adds_both():
    model, one = WideDeep(wide(8), 4, hidden=[5]), batch()
    deep, weights = flat(model, one)
    expected = model.dense.wide(one.dense) + weights + model.dense.deep(torch.cat([one.dense, deep], 1)).squeeze(1)
    torch.testing.assert_close(model(one), expected)


def test_deepfm_shares_vectors_between_fm_and_mlp():
    model, one = DeepFM(wide(8), 4, hidden=[5]), batch()
    deep, weights = flat(model, one)
    x = torch.cat([(one.dense.unsqueeze(2) * model.dense.numbers.weight).flatten(1), deep], 1)
    fields = x.view(16, 6, 8)
    pairs = sum((fields[:, i] * fields[:, j]).sum(1) for i in range(6) for j in range(i + 1, 6))
    expected = model.dense.first_order(one.dense) + weights + pairs + model.dense.deep(x).squeeze(1)
    torch.testing.assert_close(model(one), expected)


def test_dcn_crosses_beside_or_before_its_mlp():
    for options in ({}, {"v2": True, "stacked": True}, {"v2": True, "rank": 2}):
        model, one = DCN(EmbeddingBags(tables(), FEATURES), 4, num_cross=2, hidden=[5], **options), batch()
        first = x = torch.cat([one.dense, model.sparse(one).pooled_BD], 1)
        for cross in model.dense.crosses:
            x = cross(first, x)
        out = model.dense.deep(x) if options.get("stacked") else torch.cat([x, model.dense.deep(first)], 1)
        torch.testing.assert_close(model(one), model.dense.head(out).squeeze(1))


def test_autoint_attends_over_all_fields():
    shape = {"num_layers": 2, "num_heads": 2, "head_dim": 3}
    model, one = AutoInt(EmbeddingBags(tables(), FEATURES), 4, hidden=[5], **shape), batch()
    first = x = torch.cat([model.dense.numbers(one.dense), model.sparse(one).stacked()], 1)
    assert first.shape == (16, 7, 8)
    for layer in model.dense.layers:
        x = layer(x)
    expected = model.dense.head(x.flatten(1)) + model.dense.deep(first.flatten(1))
    torch.testing.assert_close(model(one), expected.squeeze(1))


def test_wide_features_stand_last():
    with pytest.raises(UserError, match=r"wanted the deep features first, then the wide ones \(dim 1\)"):
        WideDeep(EmbeddingBags(tables(), FEATURES), 4, hidden=[5])


@dataclass(frozen=True)
class Shape:
    """What a model must know of a source."""

    num_dense: int
    features: tuple = (("site", 40, False), ("seen", 30, True))


ARGUMENTS = {
    "logistic": {},
    "dlrm": {"dim": 8, "bottom": [8], "top": [5]},
    "dlrm_moe": {"dim": 8, "bottom": [8], "top": [5], "num_experts": 3, "num_chosen": 2},
    "dhen": {"dim": 8, "bottom": [8], "top": [5], "modules": ["dlrm", "linear"], "stack": {"layers": 2, "raw": True}},
    "wide_deep": {"dim": 8, "hidden": [5]},
    "deepfm": {"dim": 8, "hidden": [5]},
    "dcn": {"dim": 8, "num_cross": 2, "hidden": [5]},
    "dcn_v2": {"dim": 8, "num_cross": 2, "hidden": [5], "rank": 2, "stacked": True},
    "autoint": {"dim": 8, "num_layers": 1, "num_heads": 2, "head_dim": 4},
}


@pytest.mark.parametrize("num_dense", [4, 0])
@pytest.mark.parametrize("name", MODELS)
def test_every_named_model_trains_with_and_without_numbers(name, num_dense):
    """From the meta device, as recipes build it; every parameter has a gradient."""
    with torch.device("meta"):
        model = MODELS[name](Shape(num_dense), SGD(lr=0.1), **ARGUMENTS[name])
    one = batch()
    one = one if num_dense else replace(one, dense=None)
    job = build(model, plan_for(model, one), optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01))
    losses = [float(output.loss) for output in job.run([one] * 5)]
    assert losses[-1] < losses[0]
    assert all(p.grad is not None for n, p in model.named_parameters() if not n.startswith("sparse.") and p.numel())


@pytest.mark.parametrize("recipe", config.recipes())
def test_every_recipe_makes_its_model(recipe):
    settings = config.load(recipe)
    source = ClickStream() if settings.data.kind == "synthetic" else Shape(13)
    model = make_model(settings, source)  # pyright: ignore[reportArgumentType]
    assert model.sparse.optimizer is not None and not [p for p in model.parameters() if not p.is_meta]
    make_dense_optimizer(settings)([nn.Parameter(torch.zeros(1))])

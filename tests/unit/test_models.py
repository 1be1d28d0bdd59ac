"""Models compared with plain formulas."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from clicks import FEATURES, batch, dlrm, tables
from histories import Visits
from torch import nn
from torch.nn import functional

from shardwright import config
from shardwright.data.sources.synthetic import ClickStream, TaskStream
from shardwright.data.tokens.grammar import Grammar
from shardwright.errors import UserError
from shardwright.jagged import Batch, Jagged
from shardwright.layers.attention import Attention
from shardwright.layers.embedding import EmbeddingBags
from shardwright.layers.interaction import Cross, CrossV2, DotInteraction, FactorizationMachine, FieldAttention
from shardwright.layers.loss import BinaryLoss
from shardwright.measure.describe import sparse_of
from shardwright.models.autoint import AutoInt
from shardwright.models.click_inputs import ClickInputs
from shardwright.models.ctr import CTR_MODELS
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


def test_dot_interaction_has_every_pair_once():
    x = torch.randn(3, 4, 5)
    expected = [(x[:, i] * x[:, j]).sum(1) for i in range(4) for j in range(i + 1, 4)]
    torch.testing.assert_close(DotInteraction(4)(x), torch.stack(expected, 1))


def test_dlrm_equals_its_formula():
    model, samples = dlrm(), batch()
    vectors = model.sparse(samples)
    dense = model.dense.bottom(samples.dense)
    fields = [dense, *(vectors[feature.name] for feature in FEATURES)]
    dots = [(fields[i] * fields[j]).sum(1, keepdim=True) for i in range(4) for j in range(i + 1, 4)]
    expected = model.dense.top(torch.cat([dense, *dots], 1)).squeeze(1)
    torch.testing.assert_close(model(samples), expected)


def test_logistic_regression_equals_its_formula():
    model, samples = LogisticRegression(EmbeddingBags(tables(dim=1), FEATURES), 4), batch()
    vectors = model.sparse(samples)
    with torch.no_grad():
        model.dense.numbers.weight.normal_()
        model.dense.numbers.bias.fill_(0.5)
    expected = samples.dense @ model.dense.numbers.weight + 0.5
    expected = expected + sum(vectors[feature.name][:, 0] for feature in FEATURES)
    torch.testing.assert_close(model(samples), expected)


def test_attention_equals_its_formula():
    attention, x = Attention(12, 3).double(), torch.randn(2, 5, 12, dtype=torch.float64)
    query, key, value = attention.qkv(x).chunk(3, dim=2)
    heads = []
    for head in range(3):
        q, k, v = (x[:, :, 4 * head : 4 * head + 4] for x in (query, key, value))
        scores = q @ k.transpose(1, 2) / 2.0
        scores = scores.masked_fill(torch.ones(5, 5, dtype=torch.bool).triu(1), float("-inf"))
        heads.append(scores.softmax(2) @ v)
    torch.testing.assert_close(attention(x), attention.out(torch.cat(heads, 2)), rtol=0, atol=1e-12)


@dataclass(frozen=True)
class NoNumbers:
    """A source without numeric features."""

    features = (("site", 40, False), ("seen", 30, True), ("shown", 30, True))
    num_dense = 0


SMALL_ARGUMENTS = {
    "logistic": {},
    "dlrm": {"dim": 8, "bottom": [], "top": [16]},
    "dlrm_moe": {"dim": 8, "bottom": [], "top": [16], "num_experts": 4, "num_chosen": 2},
    "dhen": {"dim": 8, "bottom": [], "top": [16], "modules": ["dlrm", "linear"], "stack": {"layers": 2}},
    "wide_deep": {"dim": 8, "hidden": [16]},
    "deepfm": {"dim": 8, "hidden": [16]},
    "dcn": {"dim": 8, "hidden": [16], "num_cross": 2},
    "dcn_v2": {"dim": 8, "hidden": [16], "num_cross": 2},
    "autoint": {"dim": 8, "num_layers": 1, "num_heads": 2, "head_dim": 4},
    "het_wide_deep": {"dim": 8, "hidden": [5, 6]},
    "het_deepfm": {"dim": 8, "hidden": [5]},
    "het_dcn": {"dim": 8, "hidden": [5]},
    "shared_bottom": {"tasks": {"click": {}}, "dim": 8, "bottom": [16], "tower_hidden": [5]},
    "mmoe": {"tasks": {"click": {}}, "dim": 8, "num_experts": 3, "expert_hidden": [16], "tower_hidden": [5]},
    "ple": {
        "tasks": {"click": {}},
        "dim": 8,
        "extraction": {"experts": 2, "shared": 1, "hidden": [16]},
        "tower_hidden": [],
    },
}


# Two towers have labels and features of their own (test_two_tower.py).
RANKING_MODELS = [kind for kind in CTR_MODELS if kind != "two_tower"]


@pytest.mark.parametrize("kind", RANKING_MODELS)
def test_every_model_trains_without_numeric_features(kind):
    model = CTR_MODELS[kind](ClickInputs(NoNumbers(), SGD(lr=0.1)), **SMALL_ARGUMENTS[kind])
    samples = replace(batch(), dense=torch.zeros(16, 0))
    job = build(model, plan_for(model, samples), optimizer=lambda p: torch.optim.SGD(p, 0.1))
    first, second = (output.loss for output in job.run([samples, samples]))
    assert 0 < float(second) != float(first) > 0


@pytest.mark.parametrize("kind", ["dlrm", "dlrm_moe", "dhen"])
def test_numeric_features_need_a_bottom_mlp_of_the_tables_dim(kind):
    with pytest.raises(UserError, match=r"bottom=\[\] with 8 numeric features; give widths of its layers"):
        CTR_MODELS[kind](ClickInputs(ClickStream(), SGD(lr=0.1)), **SMALL_ARGUMENTS[kind])
    with pytest.raises(UserError, match=r"bottom MLP ends at 4 and the tables have dims \[8\]; all must be equal"):
        CTR_MODELS[kind](ClickInputs(NoNumbers(), SGD(lr=0.1)), **SMALL_ARGUMENTS[kind] | {"bottom": [4]})


def test_gpt_is_causal_and_ties_its_head():
    model = GPT(vocabulary=20, context=8, channels=16, num_blocks=2, num_heads=2)
    assert model.head.linear.weight is model.embed.token.weight
    samples = tokens()
    ids = samples.features.values.view(3, 8).clone()
    ids[:, 5] = (ids[:, 5] + 1) % 20
    edited = Batch(Jagged(("tokens",), ids.flatten(), samples.features.lengths), None, samples.labels)
    before, after = model(samples), model(edited)
    assert torch.equal(before[:, :5], after[:, :5]) and not torch.equal(before[:, 5:], after[:, 5:])


def test_binary_loss_weighs_samples():
    samples = batch()
    logits = torch.randn(16)
    weighted = Batch(samples.features, samples.dense, samples.labels, torch.rand(16))
    losses = functional.binary_cross_entropy_with_logits(logits, samples.labels["click"], reduction="none")
    expected = (losses * weighted.weights).sum() / weighted.weights.sum()
    torch.testing.assert_close(BinaryLoss()(logits, weighted), expected)


def test_errors_name_samples_with_other_labels():
    samples = batch()
    samples.labels["click"][5] = 2
    with pytest.raises(UserError, match='label "click": sample 5 is 2; a label is 0 or 1'):
        BinaryLoss()(torch.zeros(16), samples)


def test_errors_name_mismatched_dims():
    bags = EmbeddingBags(tables(), FEATURES)
    with pytest.raises(UserError, match=r"bottom MLP ends at 4 and the tables have dims \[8\]"):
        DLRM(bags, 4, bottom=(4,), top=(4,))
    with pytest.raises(UserError, match="tables of dim 1"):
        LogisticRegression(bags, 4)
    with pytest.raises(UserError, match="sequences of 8 tokens; this model takes at most 4"):
        GPT(vocabulary=20, context=4, channels=4, num_blocks=1, num_heads=1)(tokens())


def wide_bags(dim: int) -> EmbeddingBags:
    """Vectors of `dim` and a weight for each of two features."""
    names = ("site", "seen")
    tables_ = [Table(name, 40, dim) for name in names] + [Table(f"{name}_wide", 40, 1) for name in names]
    features = [Feature(name, name) for name in names] + [Feature(f"{n}_wide", f"{n}_wide", ids=n) for n in names]
    return EmbeddingBags(tables_, features)


def deep_and_wide(model: torch.nn.Module, samples: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """The deep vectors concatenated, and the sum of the wide weights."""
    vectors = model.sparse(samples)
    return torch.cat([vectors["site"], vectors["seen"]], 1), (vectors["site_wide"] + vectors["seen_wide"])[:, 0]


def test_factorization_machine_is_the_sum_over_pairs():
    x = torch.randn(3, 4, 5, dtype=torch.float64)
    expected = sum((x[:, i] * x[:, j]).sum(1) for i in range(4) for j in range(i + 1, 4))
    torch.testing.assert_close(FactorizationMachine()(x), expected, rtol=0, atol=1e-12)


def test_cross_layers_equal_their_formulas():
    first, x = torch.randn(2, 3, 6, dtype=torch.float64)
    cross = Cross(6).double()
    torch.nn.init.normal_(cross.bias)
    outer = torch.einsum("bi,bj->bij", first, x) @ cross.weight + cross.bias
    torch.testing.assert_close(cross(first, x), outer + x, rtol=0, atol=1e-12)
    without_skip = Cross(6, skip=False).double()
    without_skip.load_state_dict(cross.state_dict())
    torch.testing.assert_close(without_skip(first, x), outer, rtol=0, atol=1e-12)
    full, low_rank = CrossV2(6).double(), CrossV2(6, rank=2).double()
    torch.testing.assert_close(full(first, x), first * (x @ full.up.weight.T + full.up.bias) + x)
    expected = first * (x @ low_rank.down.weight.T @ low_rank.up.weight.T + low_rank.up.bias) + x
    torch.testing.assert_close(low_rank(first, x), expected)


def test_field_attention_equals_its_formula():
    layer, x = FieldAttention(6, num_heads=2, head_dim=4).double(), torch.randn(3, 5, 6, dtype=torch.float64)
    query, key, value = layer.qkv(x).chunk(3, dim=2)
    heads = [
        (query[:, :, h] @ key[:, :, h].transpose(1, 2) / 2).softmax(2) @ value[:, :, h]
        for h in (slice(0, 4), slice(4, 8))
    ]
    expected = (torch.cat(heads, 2) + x @ layer.shortcut.weight.T).relu()
    torch.testing.assert_close(layer(x), expected, rtol=0, atol=1e-12)


def test_wide_and_deep_equals_its_formula():
    model, samples = WideDeep(wide_bags(8), 4, hidden=[5]), batch()
    deep, weights = deep_and_wide(model, samples)
    logits = model.dense.deep(torch.cat([samples.dense, deep], 1)).squeeze(1)
    expected = model.dense.wide(samples.dense) + weights + logits
    torch.testing.assert_close(model(samples), expected)


def test_deepfm_shares_vectors_between_fm_and_mlp():
    model, samples = DeepFM(wide_bags(8), 4, hidden=[5]), batch()
    deep, weights = deep_and_wide(model, samples)
    x = torch.cat([(samples.dense.unsqueeze(2) * model.dense.numbers.weight).flatten(1), deep], 1)
    fields = x.view(16, 6, 8)
    pairs = sum((fields[:, i] * fields[:, j]).sum(1) for i in range(6) for j in range(i + 1, 6))
    expected = model.dense.first_order(samples.dense) + weights + pairs + model.dense.deep(x).squeeze(1)
    torch.testing.assert_close(model(samples), expected)


def test_dcn_crosses_in_parallel_with_or_before_its_mlp():
    for options in ({}, {"v2": True, "stacked": True}, {"v2": True, "rank": 2}):
        model, samples = DCN(EmbeddingBags(tables(), FEATURES), 4, num_cross=2, hidden=[5], **options), batch()
        first = x = torch.cat([samples.dense, model.sparse(samples).pooled_BD], 1)
        for cross in model.dense.crosses:
            x = cross(first, x)
        out = model.dense.deep(x) if options.get("stacked") else torch.cat([x, model.dense.deep(first)], 1)
        torch.testing.assert_close(model(samples), model.dense.head(out).squeeze(1))


def test_het_wide_deep_reads_only_numbers_in_its_mlp():
    model, samples = (
        CTR_MODELS["het_wide_deep"](ClickInputs(FeatureSource(4), SGD(lr=0.1)), dim=8, hidden=[5, 6]),
        batch(),
    )
    vectors, deep = model.sparse(samples).pooled_BD, samples.dense
    for layer in (model.dense.deep.steps[0], model.dense.deep.steps[2]):
        deep = (deep @ layer.weight.T).relu()
    expected = torch.cat([vectors, deep], 1) @ model.dense.head.weight[0]
    torch.testing.assert_close(model(samples), expected)


def test_het_deepfm_reads_only_vectors_in_products_and_mlp():
    model, samples = CTR_MODELS["het_deepfm"](ClickInputs(FeatureSource(4), SGD(lr=0.1)), dim=8, hidden=[5]), batch()
    nn.init.normal_(model.dense.numbers.weight)
    dense: Any = model.dense
    site, seen, wide_site, wide_seen = model.sparse(samples).pooled_BD.split([8, 8, 1, 1], 1)
    first, _, last = dense.deep.steps
    deep = (torch.cat([site, seen], 1) @ first.weight.T).relu() @ last.weight[0]
    expected = samples.dense @ model.dense.numbers.weight + (wide_site + wide_seen)[:, 0] + (site * seen).sum(1) + deep
    torch.testing.assert_close(model(samples), expected)


def test_het_dcn_has_three_cross_layers_beside_its_mlp():
    model, samples = CTR_MODELS["het_dcn"](ClickInputs(FeatureSource(4), SGD(lr=0.1)), dim=8, hidden=[5]), batch()
    first = x = torch.cat([samples.dense, model.sparse(samples).pooled_BD], 1)
    dense: Any = model.dense
    assert len(dense.crosses) == 3
    for cross in dense.crosses:
        x = first * (x @ cross.weight)[:, None] + cross.bias + x
    deep = (first @ model.dense.deep.steps[0].weight.T).relu()
    torch.testing.assert_close(model(samples), torch.cat([x, deep], 1) @ model.dense.head.weight[0])


@pytest.mark.parametrize(
    ("kind", "hidden", "parameters"),
    [
        ("het_wide_deep", [256, 256, 256], 137_984),
        ("het_deepfm", [256, 256], 917_774),  # with the bias of the numeric features
        ("het_dcn", [256, 256, 256], 1_010_011),
    ],
)
def test_dense_models_of_het_have_the_parameters_of_the_paper(kind, hidden, parameters):
    """137.98 K, 917.77 K and 1.01 M for Criteo, with tables of 128 columns."""
    source = FeatureSource(13, tuple((f"f{i}", 10, False) for i in range(26)))
    with torch.device("meta"):
        model = CTR_MODELS[kind](ClickInputs(source, SGD(lr=0.1)), dim=128, hidden=hidden)
    assert sum(parameter.numel() for parameter in model.dense.parameters()) == parameters


def test_autoint_attends_over_all_fields():
    options = {"num_layers": 2, "num_heads": 2, "head_dim": 3}
    model, samples = AutoInt(EmbeddingBags(tables(), FEATURES), 4, hidden=[5], **options), batch()
    first = x = torch.cat([model.dense.numbers(samples.dense), model.sparse(samples).stacked()], 1)
    assert first.shape == (16, 7, 8)
    for layer in model.dense.layers:
        x = layer(x)
    expected = model.dense.head(x.flatten(1)) + model.dense.deep(first.flatten(1))
    torch.testing.assert_close(model(samples), expected.squeeze(1))


def test_wide_features_must_be_last():
    with pytest.raises(UserError, match=r"wanted the deep features first, then the wide ones \(dim 1\)"):
        WideDeep(EmbeddingBags(tables(), FEATURES), 4, hidden=[5])


@dataclass(frozen=True)
class FeatureSource:
    """A source's numeric and categorical features."""

    num_dense: int
    features: tuple = (("site", 40, False), ("seen", 30, True))


@dataclass(frozen=True)
class RatedMovies:
    """The features of MovieLens, with the history of a user."""

    kind: str
    num_dense: int = 0

    @property
    def features(self) -> tuple:
        single = [(name, 9, False) for name in ("user", "item", "age", "gender", "occupation")]
        lists = ("genres",) if self.kind == "two_tower" else ("genres", "history")
        return (*single, *((name, 9, True) for name in lists))

    @property
    def histories(self) -> dict[str, str]:
        return {"history": "item"}


@dataclass(frozen=True)
class Neighborhoods:
    """A source of nodes with two sampled neighbors each."""

    fanouts: tuple[int, ...] = (2,)
    num_positions: int = 3
    num_classes: int = 4
    num_numbers: int = 0

    @property
    def tables(self) -> dict[str, int]:
        return {"words": 30}


@dataclass(frozen=True)
class NumericNeighborhoods(Neighborhoods):
    """The same nodes with numeric features in place of words."""

    num_numbers: int = 5

    @property
    def tables(self) -> dict[str, int]:
        return {}


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
    "het_wide_deep": {"dim": 8, "hidden": [5, 6]},
    "het_deepfm": {"dim": 8, "hidden": [5]},
    "het_dcn": {"dim": 8, "hidden": [5]},
    "shared_bottom": {"tasks": {"click": {}}, "dim": 8, "bottom": [], "tower_hidden": [5]},
    "mmoe": {"tasks": {"click": {}}, "dim": 8, "num_experts": 2, "expert_hidden": [6], "tower_hidden": []},
    "ple": {
        "tasks": {"click": {}},
        "dim": 8,
        "extraction": {"experts": 1, "shared": 2, "hidden": [6, 5], "layers": 3},
        "tower_hidden": [5],
    },
}


@pytest.mark.parametrize("num_dense", [4, 0])
@pytest.mark.parametrize("name", RANKING_MODELS)
def test_every_model_trains_with_and_without_numeric_features(name, num_dense):
    """Built on the meta device, as recipes do; every parameter gets a gradient."""
    with torch.device("meta"):
        model = CTR_MODELS[name](ClickInputs(FeatureSource(num_dense), SGD(lr=0.1)), **ARGUMENTS[name])
    samples = batch()
    samples = samples if num_dense else replace(samples, dense=None)
    job = build(model, plan_for(model, samples), optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01))
    losses = [float(output.loss) for output in job.run([samples] * 5)]
    assert losses[-1] < losses[0]
    assert all(p.grad is not None for n, p in model.named_parameters() if not n.startswith("sparse.") and p.numel())


@pytest.mark.parametrize("recipe", config.recipes())
def test_every_recipe_builds_its_model(recipe):
    settings = config.load(recipe)
    graph = NumericNeighborhoods() if settings.tables is None else Neighborhoods()
    sources = {
        "synthetic": ClickStream(),
        "synthetic_tasks": TaskStream(),
        "tokens": Grammar(),
        "graph": graph,
        "synthetic_graph": graph,
    }
    source = sources.get(settings.data.kind, FeatureSource(13))
    source = Visits() if "history" in settings.data.arguments else source
    source = RatedMovies(settings.model.kind) if settings.data.kind == "movielens" else source
    model = make_model(settings, source)  # pyright: ignore[reportArgumentType]
    assert (sparse_of(model) is None) == (settings.tables is None) and all(p.is_meta for p in model.parameters())
    assert settings.tables is None or model.sparse.optimizer is not None
    make_dense_optimizer(settings)([nn.Parameter(torch.zeros(1))])

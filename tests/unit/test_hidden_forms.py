"""Forms of MLPs: batch norm and dropout against torch's, the output's bias at the base rate, errors."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from clicks import FEATURES, tables
from torch import nn

from shardwright import config
from shardwright.checkpoint import step_directories
from shardwright.data.loading.loader import Loader
from shardwright.data.sources.synthetic import ClickStream
from shardwright.errors import UserError
from shardwright.jagged import Batch, Jagged
from shardwright.layers.batch_norm import BatchNorm
from shardwright.layers.draws import LayerDraws, StepDraws
from shardwright.layers.dropout import Dropout
from shardwright.layers.embedding import EmbeddingBags
from shardwright.layers.mlp import ACTIVATIONS, MLP, NORMS, MLPForm, logit_mlp
from shardwright.models.click_inputs import ClickInputs
from shardwright.models.deepfm import DeepFM
from shardwright.models.names import MODELS
from shardwright.runtime.build import build
from shardwright.runtime.planning import plan_for
from shardwright.runtime.run import recipe
from shardwright.runtime.run.train import train
from shardwright.serving.export import export_run
from shardwright.serving.predictor import Predictor
from shardwright.spec.calls import Call
from shardwright.spec.optimizer import SGD
from shardwright.spec.plan import Stage

FORWARD = Stage("forward", "main", (), ())


def test_batch_norm_equals_torchs():
    torch.manual_seed(1)
    own, rival = BatchNorm(5).double(), nn.BatchNorm1d(5).double()
    with torch.no_grad():
        own.weight.copy_(rival.weight.uniform_(0.5, 2))
        own.bias.copy_(rival.bias.normal_())
    for _ in range(3):
        x = torch.randn(7, 5, dtype=torch.float64) * 3 + 100
        x_own, x_rival, upstream = x.clone().requires_grad_(), x.clone().requires_grad_(), torch.randn(7, 5).double()
        outputs = own(x_own), rival(x_rival)
        for output in outputs:
            output.backward(upstream)
        torch.testing.assert_close(*outputs, rtol=0, atol=1e-10)
        torch.testing.assert_close(x_own.grad, x_rival.grad, rtol=0, atol=1e-10)
    for name, value in own.state_dict().items():
        torch.testing.assert_close(value, rival.state_dict()[name], rtol=0, atol=1e-10)
    torch.testing.assert_close(own.weight.grad, rival.weight.grad, rtol=0, atol=1e-10)
    torch.testing.assert_close(own.eval()(x), rival.eval()(x), rtol=0, atol=1e-10)


def test_batch_norm_of_counted_samples_equals_torchs_of_them_alone():
    torch.manual_seed(1)
    own, rival = BatchNorm(5).double(), nn.BatchNorm1d(5).double()
    is_counted = torch.tensor([True, False, True, True, False, True, False])
    x = (torch.randn(7, 5, dtype=torch.float64) * 3 + 100).masked_fill(~is_counted.unsqueeze(1), 1e6)
    x_own, x_rival = x.clone().requires_grad_(), x[is_counted].requires_grad_()
    upstream = torch.randn(7, 5, dtype=torch.float64).masked_fill(~is_counted.unsqueeze(1), 0)
    outputs = own(x_own, is_counted), rival(x_rival)
    outputs[0].backward(upstream)
    outputs[1].backward(upstream[is_counted])
    torch.testing.assert_close(outputs[0][is_counted], outputs[1], rtol=0, atol=1e-10)
    torch.testing.assert_close(x_own.grad[is_counted], x_rival.grad, rtol=0, atol=1e-10)
    assert not x_own.grad[~is_counted].any()
    for name, value in own.state_dict().items():
        torch.testing.assert_close(value, rival.state_dict()[name], rtol=0, atol=1e-10)


def test_gradients_through_batch_norm_of_counted_samples_equal_finite_differences():
    torch.manual_seed(1)
    norm, is_counted = BatchNorm(3).double(), torch.tensor([True, False, True, True, False])
    x = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: norm(x, is_counted), x)


def test_a_batch_without_a_counted_sample_keeps_the_running_statistics():
    norm = BatchNorm(3)
    before = {name: value.clone() for name, value in norm.state_dict().items()}
    assert norm(torch.randn(4, 3), torch.zeros(4, dtype=torch.bool)).isfinite().all()
    assert all(torch.equal(value, before[name]) for name, value in norm.state_dict().items())


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_an_mlp_equals_torchs_modules_in_order(activation, norm):
    torch.manual_seed(1)
    own = logit_mlp(4, [6, 3], MLPForm(activation, norm)).double()
    norms = {"none": nn.Identity, "batch": nn.BatchNorm1d, "layer": nn.LayerNorm}
    makers = {"prelu": nn.PReLU, "none": lambda _: nn.Identity()}
    layers: list[nn.Module] = []
    for wide, narrow in ((4, 6), (6, 3)):
        plain = makers.get(activation, lambda _: ACTIVATIONS[activation]())
        layers += [nn.Linear(wide, narrow), norms[norm](narrow), plain(narrow)]
    rival = nn.Sequential(*layers, nn.Linear(3, 1)).double()
    with torch.no_grad():
        for left, right in zip(rival.parameters(), own.parameters(), strict=True):
            left.copy_(right)
    x = torch.randn(9, 4, dtype=torch.float64)
    torch.testing.assert_close(own(x), rival(x), rtol=0, atol=1e-12)
    torch.testing.assert_close(own.eval()(x), rival.eval()(x), rtol=0, atol=1e-12)


def samples(num: int, start: int | None) -> Batch:
    return Batch(
        Jagged(("a",), torch.zeros(0, dtype=torch.int64), torch.zeros(1, num, dtype=torch.int64)), None, {}, None, start
    )


@pytest.mark.parametrize("columns", [1, 8, 13])
def test_dropout_of_a_sample_depends_on_its_place_not_on_the_ranks(columns):
    dropout, whole = Dropout(0.4), torch.ones(20, columns)

    def drop(step: int, path: str, start: int | None, stop: int, part: int = 0) -> torch.Tensor:
        draws = StepDraws(part)
        dropout.draws = LayerDraws(draws, path)
        with draws.keyed(Call(FORWARD, step), samples(stop - (start or 0), start)):
            first = dropout(whole[(start or 0) : stop])
        with draws.keyed(Call(FORWARD, step)):  # the backward pass
            assert torch.equal(first, dropout(whole[(start or 0) : stop]))
        return first

    alone = drop(3, "deep", 0, 20)
    assert torch.equal(torch.cat([drop(3, "deep", 0, 7), drop(3, "deep", 7, 7, 1), drop(3, "deep", 7, 20, 2)]), alone)
    assert not torch.equal(drop(4, "deep", 0, 20), alone) and not torch.equal(drop(3, "top", 0, 20), alone)
    assert not torch.equal(drop(3, "deep", None, 20, part=0), drop(3, "deep", None, 20, part=1))
    assert alone.unique().tolist() == pytest.approx([0.0, 1 / 0.6])
    kept = sum(float((drop(step, "deep", 0, 20) > 0).sum()) for step in range(200)) / (200 * 20 * columns)
    assert abs(kept - 0.6) < 4 * (0.24 / (200 * 20 * columns)) ** 0.5  # four standard deviations
    assert torch.equal(dropout.eval()(whole), whole)


def test_the_output_begins_at_the_base_rate():
    inputs = ClickInputs(SourceWithRate(), SGD(lr=0.1))
    assert inputs.form({}).output_bias == pytest.approx(math.log(0.2 / 0.8))
    assert inputs.form({"output_bias": 0.5}).output_bias == 0.5
    assert ClickInputs(ClickStream(), SGD(lr=0.1)).form({}).output_bias is None
    model = DeepFM(
        EmbeddingBags([*tables(dim=8), *wide_tables()], wide_features()), 4, hidden=[3], form=inputs.form({})
    )
    assert float(model.dense.deep.steps[-1].bias.detach()) == pytest.approx(math.log(0.2 / 0.8))


class SourceWithRate:
    features, num_dense, base_rates = (("a", 10, False),), 2, {"buy": 0.5, "click": 0.2, "never": 0.0}


MULTI_TASK = {
    "shared_bottom": {"bottom": [6]},
    "mmoe": {"num_experts": 2, "expert_hidden": [6]},
    "ple": {"extraction": {"experts": 1, "shared": 1, "hidden": [6]}},
}


@pytest.mark.parametrize("kind", MULTI_TASK)
def test_each_task_begins_at_its_own_base_rate_and_all_mlps_have_the_form(kind):
    def make(**mlp: object) -> nn.Module:
        tasks = {"view": {"label": "click"}, "buy": {}, "never": {}, "other": {}}
        keys = {"tasks": tasks, "dim": 4, "tower_hidden": [3], "mlp": mlp, **MULTI_TASK[kind]}
        return MODELS[kind](ClickInputs(SourceWithRate(), SGD(lr=0.1)), **keys)

    outputs = [tower.steps[-1] for tower in make().get_submodule("dense.towers.mlps").children()]
    assert [getattr(output, "start", None) for output in outputs] == pytest.approx([math.log(0.2 / 0.8), 0, None, None])
    assert float(outputs[0].bias.detach()) == pytest.approx(math.log(0.2 / 0.8))
    model = make(activation="gelu", norm="batch", dropout=0.2, output_bias=0.5)
    towers = [*model.get_submodule("dense.towers.mlps").children()]
    assert [float(tower.steps[-1].bias.detach()) for tower in towers] == [0.5] * 4
    hidden = ["Linear", "BatchNorm", "GELU", "Dropout"]
    for mlp in (module for module in model.modules() if isinstance(module, MLP)):
        assert [type(step).__name__ for step in mlp.steps] == hidden + (["OutputLinear"] if mlp in towers else [])


def wide_tables():
    return [replace(table, name=f"{table.name}_1", dim=1) for table in tables(dim=1)]


def wide_features():
    wide = [
        replace(feature, name=f"{feature.name}_1", table=f"{feature.table}_1", ids=feature.name) for feature in FEATURES
    ]
    return [*FEATURES, *wide]


def test_unknown_forms_name_the_nearest_or_the_allowed_ones():
    with pytest.raises(UserError, match=r'activation="gelo" is unknown.*gelu'):
        MLPForm("gelo")
    with pytest.raises(UserError, match=r'norm="instance" is unknown; allowed: batch, layer, none'):
        MLPForm(norm="instance")
    with pytest.raises(UserError, match=r"dropout=1\.0; wanted at least 0, less than 1"):
        MLPForm(dropout=1.0)
    with pytest.raises(UserError, match=r"model\.mlp\.drop is unknown.*dropout"):
        recipe.make_model(config.load("synthetic-dcn", ["model.mlp.drop=0.1"]), ClickStream())
    with pytest.raises(UserError, match=r"layers of experts are linear and ReLU: drop activation, norm and dropout"):
        recipe.make_model(config.load("synthetic-dlrm-moe", ["model.mlp.norm=batch"]), ClickStream())


def test_without_an_activation_after_the_last_layer_nothing_follows_its_product():
    mlp = MLP(4, [3, 2], activate_last=False, form=MLPForm("gelu", "batch", 0.5))
    assert [type(step).__name__ for step in mlp.steps] == ["Linear", "BatchNorm", "GELU", "Dropout", "Linear"]


SMALL = ("train.batch_size=64", "train.log_every=5", "train.eval_samples=512", "data.workers=0", "train.eval_every=0")


@pytest.mark.parametrize("model", ["dlrm", "dcn", "deepfm", "autoint", "wide-deep", "dhen", "mmoe", "ple"])
def test_a_trained_model_resumes_and_its_export_scores_the_same_bits(model, tmp_path):
    form = ("model.mlp.norm=batch", "model.mlp.dropout=0.2", "model.mlp.activation=silu")
    options = [*SMALL, *form, f"run.directory={tmp_path}", "train.checkpoint_every=5"]
    whole = train(config.load(f"synthetic-{model}", [*options, "run.name=whole", "train.steps=10"]))
    train(config.load(f"synthetic-{model}", [*options, "run.name=cut", "train.steps=5"]))
    cut = train(config.load(f"synthetic-{model}", [*options, "run.name=cut", "train.steps=10", "run.resume=true"]))
    curves = [losses(run.path) for run in (whole, cut)]
    auc = "buy.auc" if model in ("mmoe", "ple") else "auc"
    assert curves[0] == curves[1] and whole.evaluation[auc] == cut.evaluation[auc]
    settings = config.load(str(whole.path / "config.toml"))
    source = recipe.make_source(settings)
    own_model, example = recipe.make_model(settings, source), Loader(source, batch_size=64).peek()
    job = build(own_model, plan_for(own_model, example), optimizer=torch.optim.Adam)
    job.load(step_directories.resolve_checkpoint(whole.path))
    (output,) = job.evaluate([example])
    export_run(whole.path, tmp_path / "out")
    assert torch.equal(Predictor(tmp_path / "out").scores(example), output.logits.sigmoid())


def losses(run: Path) -> list[float]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if line["kind"] == "train"]

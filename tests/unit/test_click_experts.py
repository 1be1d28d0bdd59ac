"""DLRM whose top MLP has experts with auxiliary losses: the training loss by its formula; logs, recipes, errors."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_steps import batch, make_model
from torch import Tensor, nn
from torch.nn import functional

from shardwright import config
from shardwright.errors import UserError
from shardwright.layers.moe import MoEMLP, MoESpec
from shardwright.measure.describe import describe
from shardwright.runtime.build import build
from shardwright.runtime.outputs import Output, Scores
from shardwright.runtime.planning import plan_single_process
from shardwright.runtime.run import train as training
from shardwright.runtime.run.metrics import WindowMetrics, mean_penalty
from shardwright.spec.optimizer import SGD

EXACT = {"rtol": 0, "atol": 1e-12}
SMALL = (
    *("model.dim=4", "model.bottom=[8,4]", "model.top=[8,6]", "model.experts.num_experts=4"),
    *("model.experts.num_chosen=2", "train.batch_size=64", "train.steps=6", "train.log_every=1", "train.eval_every=3"),
    *("train.eval_samples=128", "train.checkpoint_every=3"),
)


def model_with_experts(**losses: float) -> nn.Module:
    model = make_model(SGD(0.1))
    model.dense.top = MoEMLP(
        8 + model.dense.interaction.out_features, [16, 8], nn.Linear(8, 1), MoESpec(5, 2, **losses)
    ).double()
    return model


def plain_top(top: MoEMLP, x: Tensor, balance: float, z: float) -> tuple[Tensor, Tensor]:
    """The top MLP sample by sample, and the sum of its layers' auxiliary losses, by their formulas."""
    penalty = x.new_zeros(())
    for layer in top.layers:
        scores = x @ layer.gate.scores.weight.t()
        rows, choices = [], []
        for sample, score in zip(x, scores, strict=True):
            values, chosen = score.topk(2)
            choices += chosen.tolist()
            outputs = torch.stack([layer.experts.weight[e] @ sample + layer.experts.bias[e] for e in chosen])
            rows.append(values.softmax(0) @ outputs)
        for expert in range(5):
            share = choices.count(expert) / len(choices)
            penalty = penalty + balance * 5 * share * scores.softmax(1)[:, expert].mean()
        penalty = penalty + z * scores.exp().sum(1).log().square().mean()
        x = torch.stack(rows).relu()
    return top.last(x).squeeze(1), penalty


@pytest.mark.parametrize("weighted", [False, True])
def test_the_training_loss_has_the_auxiliary_losses_of_all_layers(weighted):
    model, samples = model_with_experts(balance=0.3, z=0.2), batch(0)
    samples = samples if weighted else replace(samples, weights=None)
    inputs = []
    model.dense.top.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    loss = model.loss(model(samples), samples)
    gradients = torch.autograd.grad(loss, list(model.dense.top.parameters()))

    logits, penalty = plain_top(model.dense.top, inputs[0].detach(), 0.3, 0.2)
    losses = functional.binary_cross_entropy_with_logits(logits, samples.labels["click"], reduction="none")
    weights = samples.weights if weighted else torch.ones_like(losses)
    expected = (losses * weights).sum() / weights.sum() + penalty
    torch.testing.assert_close(loss, expected, **EXACT)
    expected_gradients = torch.autograd.grad(expected, list(model.dense.top.parameters()))
    torch.testing.assert_close(gradients, expected_gradients, **EXACT)
    assert penalty > 0.5


def test_evaluation_has_logits_only():
    model, samples = model_with_experts(balance=0.3, z=0.2), batch(0)
    with torch.no_grad():
        logits, _ = model(samples)
        evaluated = model.eval()(samples)
    assert torch.equal(evaluated, logits)
    plain = model_with_experts()
    assert isinstance(plain(samples), Tensor)  # nothing changes without auxiliary losses


def test_the_share_of_samples_without_weight_is_zero():
    """A rank may have no samples, or samples that do not count."""
    model, samples = model_with_experts(balance=0.3), batch(0)
    logits, penalty_B = model(samples)
    for part in (samples.narrow(0, 0), replace(samples, weights=torch.zeros(24).double())):
        size = part.batch_size
        assert model.loss.mean_penalty(penalty_B[:size], part) == 0
        output = Output(1, part, Scores(torch.tensor(0.5), (logits[:size].detach(), penalty_B[:size])))
        assert mean_penalty(model.loss, output) == 0


def test_the_metrics_of_a_window_are_without_the_penalty():
    model, samples = model_with_experts(balance=3.0), replace(batch(0), weights=None)
    job = build(model, plan_single_process(model, describe(model, samples), ()), optimizer=torch.optim.SGD)
    (output,) = job.run([samples])
    window = WindowMetrics("click")
    window.update(output, mean_penalty(model.loss, output))
    values = window.compute()
    assert values["loss"] == pytest.approx(values["log_loss"], abs=1e-12) and float(output.loss) > values["loss"] + 3


def train(name: str, *overrides: str) -> Path:
    return training.train(config.load("synthetic-dlrm", (*SMALL, f"run.name={name}", *overrides))).path


def test_a_recipe_trains_with_balance_losses_and_resumes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    runs = [train("plain"), train("balanced", "model.experts.balance=5.0", "model.experts.z=0.1")]
    logs = [[json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()] for run in runs]
    plain, balanced = ([line for line in log if line["kind"] in ("train", "eval")] for log in logs)
    assert all(line["loss"] == pytest.approx(line["log_loss"], abs=1e-5) for line in balanced)
    assert (
        plain[0]["loss"] == pytest.approx(balanced[0]["loss"], abs=1e-6) and plain[-1]["loss"] != balanced[-1]["loss"]
    )
    settings = config.load(str(runs[1] / "config.toml"), ["run.resume=true", "train.steps=8"])
    assert json.loads((training.train(settings).path / "metrics.jsonl").read_text().splitlines()[-1])["step"] == 8


def test_the_recipe_of_plain_experts_has_no_auxiliary_losses():
    """Its keys and defaults are those of runs of earlier versions."""
    settings = config.load("synthetic-dlrm-moe")
    assert settings.model.arguments.keys() == {"dim", "bottom", "top", "num_experts", "num_chosen"}
    model = training.recipe.make_model(settings, training.recipe.make_source(settings))
    assert not model.dense.top.has_penalty


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.experts.balanse=1"], r'model.experts.balanse is unknown; did you mean "balance"'),
        (["model.experts.balance=-1.0"], "a gate with balance=-1; wanted 0 or more"),
        (["model.experts.num_chosen=5"], "a gate that chooses 5 of 4 experts"),
    ],
)
def test_wrong_keys_are_one_line(overrides, message):
    with pytest.raises(UserError, match=message):
        settings = config.load("synthetic-dlrm", (*SMALL, *overrides))
        training.recipe.make_model(settings, training.recipe.make_source(settings))


def test_a_missing_key_is_named():
    with pytest.raises(UserError, match="model.experts.num_chosen is missing"):
        settings = config.load("synthetic-dlrm", ["model.experts.num_experts=4"])
        training.recipe.make_model(settings, training.recipe.make_source(settings))


def test_gates_learn_to_balance():
    """With the load-balancing loss alone, the busiest expert's share falls to almost that of even routing."""
    torch.manual_seed(0)
    top = MoEMLP(8, [8], nn.Linear(8, 1), MoESpec(4, 1, balance=1.0))
    x = torch.randn(256, 8) + 1.0  # the mean of samples is in favour of some experts
    optimizer = torch.optim.Adam(top.parameters(), lr=0.02)

    def busiest() -> float:
        experts = top.layers[0].gate(x).experts_NK.flatten()
        return float(torch.bincount(experts, minlength=4).max() / len(experts))

    before = busiest()
    for _ in range(100):
        optimizer.zero_grad()
        top(x)[1].mean().backward()
        optimizer.step()
    assert before > 0.4 and busiest() < 0.3

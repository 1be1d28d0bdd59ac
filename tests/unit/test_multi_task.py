"""Models with several tasks: compared with plain PyTorch in float64; losses, metrics, exports, runs, wrong input."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from clicks import FEATURES, batch, tables
from torch import Tensor, nn
from torch.nn import functional

from shardwright import config
from shardwright.data.sources.synthetic import TaskStream
from shardwright.errors import UserError
from shardwright.jagged import Batch
from shardwright.layers.embedding import EmbeddingBags
from shardwright.layers.task_experts import ExtractionSpec
from shardwright.layers.task_losses import LabelTask, TaskLosses
from shardwright.models.ctr import label_tasks
from shardwright.models.multi_task import MMoEDense, MultiTaskModel, PLEDense, SharedBottomDense, concat_inputs
from shardwright.report.plots import curves
from shardwright.report.run_page import run_html
from shardwright.report.run_record import read_record
from shardwright.report.terminal import summary
from shardwright.runtime.build import build
from shardwright.runtime.outputs import Output, Scores
from shardwright.runtime.planning import plan_for
from shardwright.runtime.run import metrics
from shardwright.runtime.run.train import train
from shardwright.serving.export import export
from shardwright.serving.predictor import Predictor
from shardwright.spec.optimizer import RowWiseAdaGrad

TASKS = (LabelTask("click", "click"), LabelTask("buy", "bought", 0.5))
EXTRACTION = ExtractionSpec(experts=2, shared=1, hidden=[6, 5])
NAN = float("nan")
DENSE: dict[str, Callable[[int], nn.Module]] = {
    "shared_bottom": lambda width: SharedBottomDense(width, 2, bottom=[7, 6], tower_hidden=[4]),
    "no bottom": lambda width: SharedBottomDense(width, 2, bottom=[], tower_hidden=[]),
    "mmoe": lambda width: MMoEDense(width, 2, num_experts=3, expert_hidden=[7, 6], tower_hidden=[4]),
    "ple": lambda width: PLEDense(width, 2, extraction=EXTRACTION, tower_hidden=[4]),
}


def make_model(name: str, dtype: str = "float32") -> MultiTaskModel:
    torch.manual_seed(7)
    sparse = EmbeddingBags(tables(dtype=dtype), FEATURES, RowWiseAdaGrad(0.1))
    dense = DENSE[name](batch().numbers.shape[1] + sum(sparse.dims))
    return MultiTaskModel(sparse, dense.to(getattr(torch, dtype)), TASKS)


def task_batch(size: int = 16, seed: int = 0, weights: bool = False) -> Batch:
    """A batch in which every third label "bought" is missing."""
    clicks, draw = batch(size, seed=seed), torch.Generator().manual_seed(seed)
    bought = (torch.rand(size, generator=draw) < 0.4).float()
    bought[::3] = NAN
    own = torch.rand(size, generator=draw) + 0.1 if weights else None
    return replace(clicks, labels={**clicks.labels, "bought": bought}, weights=own)


def mlp(values: dict[str, Tensor], prefix: str, x: Tensor, activate_last: bool = True) -> Tensor:
    """Linear layers with ReLU, from the weights whose names begin with `prefix`."""
    names = [name.removesuffix("weight") for name in values if name.startswith(prefix) and name.endswith("weight")]
    for index, name in enumerate(names):
        x = functional.linear(x, values[f"{name}weight"], values[f"{name}bias"])
        x = x.relu() if activate_last or index < len(names) - 1 else x
    return x


def gated(gate: Tensor, x: Tensor, experts: Sequence[Tensor]) -> Tensor:
    weights = (x @ gate.T).exp()
    return sum(e * w.unsqueeze(1) for e, w in zip(experts, weights.unbind(1), strict=True)) / weights.sum(1, True)


def plain_logits(name: str, values: dict[str, Tensor], x: Tensor) -> Tensor:
    """The logits (B, 2) as the papers define them."""
    if name in ("shared_bottom", "no bottom"):
        inputs = [mlp(values, "bottom.", x)] * 2
    elif name == "mmoe":
        experts = [mlp(values, f"experts.experts.mlps.{e}.", x) for e in range(3)]
        inputs = [gated(values[f"experts.gates.{t}.scores.weight"], x, experts) for t in range(2)]
    else:
        inputs = [x] * 3
        for layer in range(2):
            own = [
                [mlp(values, f"blocks.{layer}.experts.{s}.mlps.{e}.", inputs[s]) for e in range(2 if s < 2 else 1)]
                for s in range(3)
            ]
            choices = [own[0] + own[2], own[1] + own[2], own[0] + own[1] + own[2]]
            gates = [values.get(f"blocks.{layer}.gates.{s}.scores.weight") for s in range(3)]
            inputs = [gated(g, inputs[s], choices[s]) for s, g in enumerate(gates) if g is not None]
    return torch.cat([mlp(values, f"towers.mlps.{t}.", inputs[t], activate_last=False) for t in range(2)], dim=1)


def plain_loss(logits: Tensor, rows: Batch) -> Tensor:
    """The weighted sum of log losses over known labels, over the weight of all samples."""
    total, weights = logits.new_zeros(()), torch.ones(len(logits)) if rows.weights is None else rows.weights
    for task, name in enumerate(("click", "bought")):
        for sample, label in enumerate(rows.labels[name].tolist()):
            if not math.isnan(label):
                p = logits[sample, task].sigmoid()
                share = (1.0, 0.5)[task] * float(weights[sample])
                total = total - share * (p.log() if label else (1 - p).log())
    return total / float(weights.double().sum())


@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("name", DENSE)
def test_models_and_their_gradients_equal_plain_pytorch(name, weights):
    model, rows = make_model(name, "float64"), task_batch(weights=weights)
    rows = replace(rows, dense=rows.numbers.double())
    rows = replace(rows, weights=None if rows.weights is None else rows.weights.double())
    vectors = model.sparse(rows)
    logits = model.dense(rows, vectors)
    parameters = dict(model.dense.named_parameters())
    expected = plain_logits(name, parameters, concat_inputs(rows, vectors))
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-10)
    loss, plain = model.loss(logits, rows), plain_loss(expected, rows)
    torch.testing.assert_close(loss, plain, rtol=0, atol=1e-10)
    gradients = torch.autograd.grad(loss, [*parameters.values()], retain_graph=True)
    torch.testing.assert_close(gradients, torch.autograd.grad(plain, [*parameters.values()]), rtol=0, atol=1e-10)
    assert all(gradient.abs().max() > 0 for gradient in gradients), "every parameter takes part"


def test_label_smoothing_is_of_known_labels_in_training():
    loss = TaskLosses(TASKS, smoothing=0.2)
    rows, logits = task_batch(4), torch.tensor([[0.5, -1.0]] * 4)
    smoothed = replace(rows, labels={name: label * 0.8 + 0.1 for name, label in rows.labels.items()})
    targets = torch.stack([smoothed.labels["click"], smoothed.labels["bought"]], 1)
    each = functional.binary_cross_entropy_with_logits(logits, targets.nan_to_num(), reduction="none")
    expected = (each.masked_fill(targets.isnan(), 0) * torch.tensor([1.0, 0.5])).sum(1).mean()
    torch.testing.assert_close(loss(logits, rows), expected)
    torch.testing.assert_close(loss.eval()(logits, rows), plain_loss(logits, rows))


def test_a_label_missing_in_all_samples_of_a_batch_has_no_loss_and_no_metrics():
    rows = task_batch(8)
    rows.labels["bought"].fill_(NAN)
    logits = torch.linspace(-1, 1, 16).view(8, 2).requires_grad_()
    loss = TaskLosses(TASKS)(logits, rows)
    loss.backward()
    assert logits.grad is not None and not logits.grad[:, 1].any() and logits.grad[:, 0].all()
    window = metrics.WindowMetrics({"click.": "click", "buy.": "bought"})
    window.update(scored(logits.detach(), rows))
    names = window.compute().keys()
    assert "click.ne" in names and not any(name.startswith("buy.") for name in names)


def scored(logits: Tensor, rows: Batch) -> Output:
    return Output(0, rows, Scores(loss=torch.tensor(1.0), logits=logits))


def outputs(num: int) -> list[Output]:
    results = []
    for seed in range(num):
        rows = task_batch(64, seed=seed, weights=True)
        logits = torch.randn(64, 2, generator=torch.Generator().manual_seed(seed))
        results.append(scored(logits, rows))
    return results


LABELS = {"click.": "click", "buy.": "bought"}


def test_each_task_has_the_metrics_of_its_known_samples():
    window, lifetime = metrics.WindowMetrics(LABELS), metrics.TaskLifetimes(LABELS)
    alone = {prefix: (metrics.WindowMetrics("label"), metrics.LifetimeMetrics()) for prefix in LABELS}
    for output in outputs(3):
        window.update(output)
        lifetime.update(output)
        for task, (prefix, label) in enumerate(LABELS.items()):
            labels, weights = output.batch.labels[label], output.batch.weights
            known = ~labels.isnan()
            rows = replace(output.batch, labels={"label": labels[known]}, weights=weights[known])
            scores = output.logits[known, task]
            alone[prefix][0].update(scored(scores, rows))
            alone[prefix][1].update(scores, labels[known], weights[known])
    expected = {f"{p}{n}": v for p, (own, _) in alone.items() for n, v in own.compute().items() if n != "loss"}
    assert {name: value for name, value in window.compute().items() if name != "loss"} == expected
    assert {"click.ne", "click.auc", "click.calibration", "buy.ne", "buy.auc", "buy.calibration"} <= expected.keys()
    assert lifetime.compute() == {f"{p}{n}": v for p, (_, own) in alone.items() for n, v in own.compute().items()}


def test_lifetimes_of_tasks_are_merged_and_restored():
    whole, parts = metrics.TaskLifetimes(LABELS), [metrics.TaskLifetimes(LABELS) for _ in range(2)]
    for number, output in enumerate(outputs(4)):
        whole.update(output)
        parts[number % 2].update(output)
    merged = parts[0].from_vector(parts[0].to_vector() + parts[1].to_vector())
    assert merged.compute() == pytest.approx(whole.compute(), abs=1e-12)
    restored = metrics.TaskLifetimes(LABELS)
    restored.load_state_dict(json.loads(json.dumps(whole.state_dict())))
    assert restored.compute() == whole.compute()


def test_the_state_of_one_label_is_as_before_tasks_existed():
    single, lifetime = metrics.TaskLifetimes({"": "click"}), metrics.LifetimeMetrics()
    for output in outputs(2):
        one = scored(output.logits[:, 0], output.batch)
        single.update(one)
        lifetime.update(one.logits, output.batch.labels["click"], output.batch.weights)
    assert single.state_dict() == lifetime.state_dict() and single.compute() == lifetime.compute()


@pytest.mark.parametrize("name", DENSE)
def test_an_export_answers_all_tasks_as_training_does(tmp_path, name):
    model, rows = make_model(name), task_batch()
    job = build(model, plan_for(model, rows), optimizer=lambda p: torch.optim.Adam(p, 0.01))
    for _ in job.run([task_batch(seed=seed) for seed in range(3)]):
        pass
    export(make_model(name), job.save(tmp_path / "saved"), tmp_path / "out", example=rows)
    predictor = Predictor(tmp_path / "out")
    expected = next(iter(job.evaluate([rows]))).logits.sigmoid()
    assert torch.equal(predictor.scores(rows), expected) and expected.shape == (16, 2)
    step, scores = predictor.answer([{"ids": {}, "numbers": [0.0] * rows.numbers.shape[1]}] * 2)
    assert step == 3 and [[*score] for score in scores] == [["click", "buy"]] * 2
    assert all(0 < value < 1 for score in scores for value in score.values())


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ({"click": [0, 1], "buyed": [0, 1]}, 'task "buy": the data have no label "bought"; allowed: buyed, click'),
        ({"click": [0, 1], "bought": [0, 2]}, 'label "bought": sample 1 is 2; a label is 0, 1, or NaN'),
        ({"click": [0, 1], "bought": [0]}, r'label "bought" has shape \(1,\); wanted one number per sample, \(2,\)'),
    ],
)
def test_wrong_labels_are_named(labels, message):
    rows = replace(task_batch(2), labels={name: torch.tensor(values).float() for name, values in labels.items()})
    with pytest.raises(UserError, match=message):
        TaskLosses(TASKS)(torch.zeros(2, 2), rows)


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        ({}, "model.tasks is empty"),
        (["click"], "wanted a section such as"),
        ({"click": 1.0}, "wanted a section such as"),
        ({"a.b": {}}, '"a.b" is not a name of letters, digits and underscores'),
        ({"click": {"weight": 0.0}}, "model.tasks.click: weight is 0.0; wanted a number above 0"),
        ({"click": {"wieght": 1.0}}, "model.tasks.click.*wieght"),
    ],
)
def test_wrong_tasks_are_named(tasks, message):
    with pytest.raises(UserError, match=message):
        TaskLosses(label_tasks(tasks))


def test_experts_without_layers_are_refused():
    with pytest.raises(UserError, match=r"expert_hidden=\[\]; give the widths"):
        MMoEDense(4, 2, num_experts=2, expert_hidden=[], tower_hidden=[])
    with pytest.raises(UserError, match="extraction.shared=0; wanted 1 or more"):
        ExtractionSpec(experts=1, shared=0, hidden=[4])


def test_the_task_stream_has_the_probabilities_and_missing_labels_that_it_says():
    stream = TaskStream(missing=0.25)
    indices = np.arange(20_000)
    labels, truth = stream.take(indices).labels, stream.probabilities(indices)
    known = ~np.isnan(labels["buy"])
    assert known.mean() == pytest.approx(0.75, abs=0.02) and not np.isnan(labels["click"]).any()
    assert labels["buy"][known].mean() == pytest.approx(truth["buy"][known].mean(), abs=0.01)
    logits = [np.log(truth[name] / (1 - truth[name])) for name in ("click", "buy")]
    assert np.corrcoef(*logits)[0, 1] == pytest.approx(0.5, abs=0.05)
    assert 0 < stream.bound(0, 20_000, "buy").ne < 1
    with pytest.raises(UserError, match="correlation = 2; wanted -1 to 1"):
        TaskStream(correlation=2)


def test_a_run_measures_and_shows_every_task(tmp_path):
    keys = ("data.missing=0.3", "data.workers=0", "model.dim=4", "train.batch_size=256", "train.steps=8")
    steps = ("train.log_every=4", "train.eval_samples=2000", "train.eval_every=4", "train.checkpoint_every=0")
    settings = config.load("synthetic-mmoe", [*keys, *steps, f"run.directory={tmp_path}", "run.name=tasks"])
    train(settings)
    record = read_record(tmp_path / "tasks")
    lines = [json.loads(text) for text in (tmp_path / "tasks/metrics.jsonl").read_text().splitlines()]
    evaluation = next(line for line in reversed(lines) if line["kind"] == "eval")
    assert {"loss", "click.ne", "click.bound_ne", "buy.auc", "buy.bound_ne", "buy.calibration"} <= evaluation.keys()
    assert record.metrics.tasks == ("click", "buy")
    titles = [figure.title for figure in curves(record.metrics)]
    assert {"click: AUC", "buy: AUC", "buy: Calibration", "buy: Normalized entropy", "Loss"} <= {*titles}
    page = run_html(record)
    assert "buy: normalized entropy" in page and "Not measured in this run" not in page
    assert f"buy AUC {evaluation['buy.auc']:.4f}" in summary(evaluation, 1.0)

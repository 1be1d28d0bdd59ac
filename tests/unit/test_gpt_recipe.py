"""The recipe gpt: equal to a plain PyTorch loop; its metrics, files and page; resumed; mistakes are one line."""

import json
import math
import re
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from shardwright import config
from shardwright.data.sources.source import SampleOrder
from shardwright.data.sources.synthetic import ClickStream
from shardwright.errors import UserError
from shardwright.jagged import Batch, Jagged
from shardwright.layers.decoder import GPT2, LLAMA
from shardwright.layers.loss import IGNORED, NextTokenLoss
from shardwright.measure.describe import describe
from shardwright.measure.model_flops import count_products
from shardwright.models.gpt import GPT
from shardwright.report.run_page import render
from shardwright.report.run_record import read_record
from shardwright.runtime import planning
from shardwright.runtime.accumulation import loss_weight
from shardwright.runtime.build import build
from shardwright.runtime.dense_layout import mesh_for
from shardwright.runtime.materialize import materialize
from shardwright.runtime.outputs import Output, Scores
from shardwright.runtime.planning import plan_for, plan_single_process
from shardwright.runtime.run import recipe, setup
from shardwright.runtime.run import train as training
from shardwright.runtime.run.machine import Threads
from shardwright.runtime.run.metrics import WindowMetrics
from shardwright.runtime.run.token_meter import TokenMeter, describe_model_flops
from shardwright.spec import files, presets
from shardwright.spec.cluster import Price, Sample
from shardwright.spec.generated_text import GeneratedText
from shardwright.spec.model_flops import ModelFlops

SMALL = (
    *("data.length=32", "model.channels=16", "model.num_blocks=2", "model.num_heads=2", "model.hidden=32"),
    *("train.batch_size=4", "train.steps=8", "train.log_every=1", "train.eval_every=4", "train.eval_samples=8"),
    *("train.checkpoint_every=4", "train.decay=none", "train.warmup=2"),
)
TEXT = "".join(f"{n} times {n} is {n * n}.\n" for n in range(400))
TIMES = ("seconds", "samples_per_second", "peak_rss_bytes", "tokens_per_second", "mfu", "mfu_full")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text(TEXT)
    return tmp_path


def train(name: str, *overrides: str) -> Path:
    return training.train(config.load("gpt", (*SMALL, f"run.name={name}", *overrides))).path


def lines(run: Path, *kinds: str) -> list[dict]:
    parsed = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in parsed if line["kind"] in kinds]


def test_a_run_logs_perplexity_speed_and_mfu_and_shows_text():
    run = train("mine")
    (end,) = lines(run, "end")
    for line in lines(run, "train", "eval"):
        assert line["perplexity"] == pytest.approx(math.exp(line["loss"]))
    for line in lines(run, "train"):
        assert line["tokens_per_second"] == pytest.approx(32 * line["samples_per_second"])
    flops = json.loads((run / "model_flops.json").read_text())
    rate = end["tokens_per_second"] / flops["peak_flops_per_second"]
    num, width = flops["matrix_parameters"], flops["attention_width"]
    assert num == 2 * (4 * 16 * 16 + 3 * 16 * 32) + 16 * 257 and width == 2 * 16
    assert end["mfu"] == pytest.approx(rate * (6 * num + 6 * width * 32))
    assert end["mfu_full"] == pytest.approx(rate * (6 * num + 12 * width * 32))
    assert all(0.1 < line["bound_loss"] < 1 < line["loss"] for line in lines(run, "eval"))
    page = render(run).read_text()
    for text in (
        "Text from the model",
        "MFU = tokens/s x (6 N + 6 A s) / (ranks x peak)",
        "Perplexity",
        "best reachable",
    ):
        assert text in page
    assert "AUC" not in page.partition("<section>")[2].partition("<script")[0]
    generated = json.loads((run / "generated.json").read_text())
    assert len(generated["prompts"]) == len(generated["continuations"]) == 3
    assert len(re.findall(r'<pre><span class="prompt">', page)) == 3
    events = b"".join(path.read_bytes() for path in (run / "tensorboard").iterdir())
    for tag in (b"train/perplexity", b"train/tokens_per_second", b"train/mfu", b"eval/bound_loss"):
        assert tag in events


def test_a_plan_is_made_with_the_threads_of_the_run(monkeypatch):
    """Measurements of a plan by two ranks with all cores each were 40 times too slow."""
    threads: list[int] = []

    def plan_run(*arguments):
        threads.append(torch.get_num_threads())
        return planning.plan_run(*arguments)

    monkeypatch.setattr(training, "plan_run", plan_run)
    monkeypatch.setattr(setup, "choose_threads", lambda *_: Threads(3, 3.0, "threads: 3", is_set=False))
    before = torch.get_num_threads()
    train("mine", "train.steps=1")
    assert threads == [3] and torch.get_num_threads() == before != 3


def test_the_log_has_losses_without_the_penalties_of_gates():
    keys = [key for key in SMALL if not key.startswith("model.hidden")]
    losses = []
    for balance in ("0.0", "5.0"):
        run = training.train(
            config.load("moe-gpt", (*keys, f"run.name=b{balance}", f"model.experts.balance={balance}"))
        )
        losses.append([line["loss"] for line in lines(run.path, "train")])
        assert all(
            line["perplexity"] == pytest.approx(math.exp(line["loss"])) for line in lines(run.path, "train", "eval")
        )
        assert json.loads((run.path / "generated.json").read_text())["continuations"]
    assert losses[0][0] == pytest.approx(losses[1][0], abs=1e-5) and losses[0][-1] != losses[1][-1]


def test_the_first_steps_equal_a_plain_loop():
    """PyTorch only, from the same initial weights: windows of the text, AdamW with warm-up, clipping."""
    run = train("mine", "data=text.txt")
    settings = config.load("gpt", (*SMALL, "data=text.txt"))
    tokens = torch.tensor([*TEXT.encode(), 256])
    num_sequences = (len(tokens) - 1) // 32
    order = SampleOrder(num_sequences - round(num_sequences * 0.1), 4, settings.seed, True, (0, 1))
    torch.manual_seed(settings.seed)
    model = recipe.make_model(settings, recipe.make_source(settings))
    materialize(model, torch.device("cpu"))
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
    for step, line in enumerate(lines(run, "train"), start=1):
        positions = torch.from_numpy(order.indices(0, step - 1))[:, None] * 32 + torch.arange(33)
        optimizer.param_groups[0]["lr"] = 3e-3 * min(1, step / 3)
        logits = model(token_batch(tokens[positions[:, :-1]]))
        loss = functional.cross_entropy(logits.flatten(0, 1), tokens[positions[:, 1:]].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        assert loss.item() == pytest.approx(line["loss"], abs=1e-5), step
    assert step == 8


def test_steps_without_clipping_equal_a_plain_loop_to_the_bit():
    """Both with the same products of matrices; clipping sums the squares in another precision than torch's."""
    tokens = torch.tensor([*TEXT.encode()])[: 12 * 4 * 33].view(12, 4, 33)
    batches = [token_batch(ids[:, :-1], ids[:, 1:]) for ids in tokens]

    def make_model() -> GPT:
        torch.manual_seed(1)
        return GPT(vocabulary=257, context=32, channels=32, num_blocks=2, num_heads=2, form=LLAMA)

    model = make_model()
    job = build(model, plan_for(model, batches[0]), optimizer=partial(torch.optim.AdamW, lr=3e-3))
    ours = [output.loss.item() for output in job.run(batches)]
    model, plain = make_model(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for batch in batches:
        loss = model.loss(model(batch), batch)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        plain.append(loss.item())
    assert ours == plain


def token_batch(ids: torch.Tensor, labels: torch.Tensor | None = None) -> Batch:
    lengths = torch.full((1, len(ids)), ids.shape[1])
    return Batch(Jagged(("tokens",), ids.flatten(), lengths), None, {"next": ids if labels is None else labels})


def test_a_resumed_run_continues_exactly():
    whole = train("whole", "data=text.txt")
    train("cut", "data=text.txt", "train.steps=4")
    cut = train("cut", "data=text.txt", "run.resume=true")
    for name in ("train", "end"):
        expected, actual = ([strip_times(line) for line in lines(run, name)] for run in (whole, cut))
        assert actual == expected
    assert (cut / "generated.json").read_text() == (whole / "generated.json").read_text()


def strip_times(line: dict) -> dict:
    return {name: value for name, value in line.items() if name not in TIMES}


def test_masked_tokens_weigh_nothing_in_the_loss_of_a_window():
    labels = torch.tensor([[1, 2, 3], [IGNORED, IGNORED, 3]])
    batch, loss = token_batch(torch.tensor([[0, 1, 2], [2, 1, 2]]), labels), NextTokenLoss()
    logits = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    window = WindowMetrics(None, weigh=partial(loss_weight, loss))
    for index in range(2):
        part = batch.narrow(index, index + 1)
        window.update(Output(1, part, Scores(loss(logits[index : index + 1], part), None)))
    assert window.compute()["loss"] == pytest.approx(loss(logits, batch).item())


def test_model_flops_count_grouped_heads_and_a_tied_head_once():
    model = GPT(vocabulary=50, context=8, channels=16, num_blocks=3, num_heads=4, num_kv_heads=2, form=GPT2)
    products = 3 * (2 * 16 * 16 + 2 * 16 * 8 + 2 * 16 * 64) + 50 * 16
    assert count_products(model) == (products, 3 * 16)
    flops = ModelFlops(1, products, 48, 8, 2, 1e9, "made up")
    assert flops.per_token == 6 * products + 6 * 48 * 8 and flops.per_token_full == 6 * products + 12 * 48 * 8
    expected = {"mfu": flops.per_token / 2e6, "mfu_full": flops.per_token_full / 2e6}
    assert flops.utilization(1e3) == pytest.approx(expected)


def test_the_published_mfu_of_a_7b_model():
    """Llama 7B on A800, s 12288, 3803 tokens/s for each GPU: 60.1 % as published, 71.9 % with the full matrix."""
    weights = 32 * (4 * 4096**2 + 3 * 4096 * 11008) + 32_004 * 4096
    values = ModelFlops(1, weights, 32 * 4096, 12_288, 1, 312e12, "published").utilization(3803)
    assert values["mfu"] == pytest.approx(0.6010, abs=5e-4) and values["mfu_full"] == pytest.approx(0.719, abs=5e-4)


def test_models_of_other_data_have_no_token_metrics():
    assert TokenMeter(torch.nn.MSELoss(), 8, None).derive({"loss": 1.0, "samples_per_second": 2.0}) == {}


def test_a_page_gives_the_reason_why_there_is_no_text():
    run = train("mine", "train.steps=1")
    text = GeneratedText(1, 1, 1, reason="in a pipeline <b>")
    files.write(text, run / "generated.json")
    assert read_record(run).generated_text == text
    assert "No text was generated: in a pipeline &lt;b&gt;." in render(run).read_text()


def test_a_page_says_why_an_mfu_is_above_all_that_is_possible():
    run = train("mine", "train.steps=1")
    assert "An MFU above 100 %" not in render(run).read_text()
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"kind": "train", "step": 2, "samples": 8, "loss": 1.0, "mfu": 1.2}) + "\n")
    assert "An MFU above 100 %" in render(run).read_text()


def test_a_measured_cluster_gives_the_peak_of_the_mfu():
    """Also over ranks; a preset is no measurement of this machine."""
    settings = config.load("gpt", (*SMALL, "plan.cluster=measured.toml"))
    source = recipe.make_source(settings)
    model = recipe.make_model(settings, source)
    samples = (Sample((100, 50, 10), (1e-4,)), Sample((100, 100, 10), (1e-4, 2e-4, 3e-4)))
    price = Price(op="matmul", dtype="float32", seconds_per_flop=1e-9, samples=samples)
    cluster = presets.load_cluster("two-cores")
    cluster = replace(cluster, source="measured", name="ours", device=replace(cluster.device, prices=(price,)))
    files.write(cluster, "measured.toml")
    plan = plan_single_process(model, describe(model, recipe.make_loader(settings, source).peek()), ())
    with closing(mesh_for(plan)) as mesh:
        flops = describe_model_flops(settings, source, model, plan, mesh)
        files.write(replace(cluster, source="preset"), "measured.toml")
        other = describe_model_flops(settings, source, model, plan, mesh)
    assert flops is not None and flops.peak_source == "fastest float32 product of the cluster ours"
    assert flops.peak_flops_per_second == 1e9
    assert other is not None and other.peak_source == "fastest float32 product, measured at the start of the run"
    assert other.peak_flops_per_second > 1e9


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("model.context=16",), "data.length=32: the model's context is 16; lower data.length or raise model.context"),
        (("model.form=llama3",), 'model.form="llama3"; did you mean "llama"?'),
        (("data.kind=synthetic", "data.length=1"), 'unknown key "data.length"'),
        (("data=text.txt", "data.validation=0"), "no samples are held out to evaluate on: raise data.validation"),
        (("data=empty.txt",), "empty.txt: no text: all of its documents are empty; give a file with text"),
        (("data=gone.txt",), "data.path=gone.txt: no such file"),
        (("data=text.txt", "data.text.field=7"), "data.text"),
    ],
)
def test_mistakes_are_one_line_and_leave_no_run(overrides, message):
    Path("empty.txt").touch()
    with pytest.raises(UserError) as error:
        train("mine", *overrides)
    assert message in str(error.value) and "\n" not in str(error.value)
    assert not Path("runs").exists()


def test_a_model_refuses_tokens_of_a_larger_vocabulary():
    model = GPT(vocabulary=50, context=8, channels=16, num_blocks=1, num_heads=2)
    with pytest.raises(UserError, match="token 50, but this model has 50 ids; train it on tokens of its own tokenizer"):
        model(token_batch(torch.tensor([[1, 50]])))


def test_a_click_source_has_no_tokens():
    with pytest.raises(
        UserError, match="model.kind=gpt trains on tokens, and this data has none; set data.kind=tokens"
    ):
        recipe.make_model(config.load("gpt", SMALL), ClickStream())

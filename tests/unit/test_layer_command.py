"""`shardwright plan` of a transformer: plan, page, reasons, errors; `shardwright measure --layers`."""

import json

import pytest
import torch
from typer.testing import CliRunner

from shardwright.cli import app
from shardwright.errors import UserError
from shardwright.measure import device, layer_probes, machine
from shardwright.measure.layer_probes import product_shapes
from shardwright.planner.price import primitives
from shardwright.spec import files
from shardwright.spec.cluster import ATTENTION_PASSES, Cluster, Sample
from shardwright.spec.plan import Plan


def run(folder, *arguments: str) -> str:
    path = folder / "plan.json"
    result = CliRunner().invoke(app, ["plan", *arguments, "-o", str(path)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return " ".join(result.output.split())


def test_a_transformer_is_planned(tmp_path):
    output = run(
        tmp_path, "llama-7b", "--cluster", "h800-256", "--batch", "64", "ranks=16", "pins.tensor=4", "--explain"
    )
    plan = files.read(Plan, tmp_path / "plan.json")
    assert plan.num_ranks == 16 and ("tensor", "local", 4) in plan.axes
    assert "1: TP4" in output and "tensor 4: its best is number" in output
    assert "cannot train with them yet" in output
    page = (tmp_path / "plan.html").read_text()
    assert "llama-7b" in page and "Tensor 4: its best is number" in page


def test_a_config_file_is_planned(tmp_path):
    config = {"num_hidden_layers": 8, "hidden_size": 1024, "num_attention_heads": 16, "vocab_size": 32_000}
    (tmp_path / "config.json").write_text(json.dumps(config | {"intermediate_size": 4096, "model_type": "llama"}))
    output = run(tmp_path, str(tmp_path / "config.json"), "--cluster", "h800-256", "ranks=8", "length=1024")
    assert "4096 sequences of 1024 tokens a step" in output and files.read(Plan, tmp_path / "plan.json").num_ranks == 8


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("lama-7b",), 'no recipe or transformer "lama-7b"; did you mean "llama-7b"'),
        (("llama-7b", "pins.tensor=3"), "no way to split llama-7b over 16 ranks .* and pins.tensor=3"),
        (("llama-7b", 'memory="4 GB"'), "none of .* configurations fit"),
        (("llama-7b", 'memory="4 GB"', "pins.tensor=8", "--explain"), "tensor 8: none of"),
        (
            ("llama-7b", "--compare", "other.json"),
            "llama-7b is a model of layers: --compare is for",
        ),
        (("llama-7b", "--export", "torchrec"), "--export torchrec is for a model with tables"),
        (("synthetic-dlrm", "--export", "megatron"), "synthetic-dlrm is no transformer: --export megatron is for"),
        (("llama-7b", "--export", "deepspeed"), 'export="deepspeed"; allowed: torchrec, megatron, torchtitan'),
    ],
)
def test_errors_are_one_line(arguments, message, tmp_path):
    name, *rest = arguments
    command = ["plan", name, "--cluster", "h800-256", "--batch", "64", *rest, "-o", str(tmp_path / "plan.json")]
    with pytest.raises(UserError, match=message) as error:
        CliRunner().invoke(app, [*command, *(["ranks=16"] if name == "llama-7b" else [])], catch_exceptions=False)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "plan.json").exists()


def small_probes(monkeypatch) -> None:
    monkeypatch.setattr(layer_probes, "SIZES", {"cpu": layer_probes.LayerSizes((32, 64), (32, 64), (32, 64), 2)})
    monkeypatch.setattr(device, "TABLE_BYTES", 1 << 20)
    monkeypatch.setattr(device, "COPY_BYTES", 1 << 20)
    monkeypatch.setattr(device, "MATMUL_SHAPES", ((16, 16, 16), (64, 16, 32), (32, 64, 64), (64, 64, 64)))
    monkeypatch.setattr(machine, "WINDOW_SECONDS", 1e-4)
    for module in (device, layer_probes):
        monkeypatch.setattr(module, "has_fast_bf16_matmul", lambda: True)


def test_measured_layers_price_products_and_attention(monkeypatch, tmp_path):
    small_probes(monkeypatch)
    path = tmp_path / "mine.toml"
    for _ in range(2):  # the second extends the file
        result = CliRunner().invoke(app, ["measure", "--layers", "-o", str(path)], catch_exceptions=False)
        assert result.exit_code == 0, result.output
    prices = {(price.op, price.dtype): price for price in files.read(Cluster, path).device.prices}
    matmul, attention = prices["matmul", "bfloat16"], prices["attention", "bfloat16"]
    assert {sample.sizes for sample in matmul.samples} >= {*product_shapes("cpu"), (16, 16, 16)}
    assert [len(sample.times) for sample in attention.samples] == [2, 2]
    assert primitives.matmul_cost(files.read(Cluster, path).device, 48, 48, 48, "bfloat16").basis == "measured"


def test_attention_is_priced_by_its_multiplications():
    """A forward and a backward of `heads` sequences of `length`: 3.5 times the causal half of two products."""
    heads, channels, rate = 4, 128, 1e-12
    flops = {length: heads * 2 * 2 * length**2 * channels / 2 for length in (256, 1024)}
    samples = [
        Sample((heads * length, channels, length), (ATTENTION_PASSES * flops[length] * rate,)) for length in flops
    ]
    price = device.fit_price("attention", "bfloat16", samples)
    assert price.seconds_per_flop == pytest.approx(rate) and price.seconds_per_byte == 0.0
    assert price.error == pytest.approx(0.0, abs=1e-6)


def test_machines_with_slow_bfloat16_are_refused(monkeypatch):
    monkeypatch.setattr(layer_probes, "has_fast_bf16_matmul", lambda: False)
    with pytest.raises(UserError, match="multiplies bfloat16 slowly"):
        layer_probes.measure_layer_prices(None, torch.device("cpu"))  # type: ignore[arg-type]


@pytest.mark.parametrize("engine", ["megatron", "torchtitan"])
def test_flags_for_other_engines_are_written(engine, tmp_path):
    output = run(tmp_path, "llama3-8b", "--cluster", "h100", "--batch", "64", "ranks=16", "--export", engine)
    text = (tmp_path / f"plan.{engine}.sh").read_text()
    assert f"plan.{engine}.sh (" in output and f"{engine.upper()}_ARGS=(" in text and text.rstrip().endswith(")")
    assert "offloads" not in text and "offloads" not in output


def test_a_script_of_megatron_is_compared_with_the_best(tmp_path):
    run(tmp_path, "llama3-8b", "--cluster", "h100", "--batch", "64", "ranks=16", "--export", "megatron")
    script = tmp_path / "plan.megatron.sh"
    text = script.read_text()
    assert "your job: " in (own := run(tmp_path, str(script), "--cluster", "h100", "ranks=16"))
    assert "as fast as the best" in own
    slower = tmp_path / "slower.sh"
    slower.write_text(text.replace(")", "  --recompute-granularity full --recompute-method uniform )"))
    assert "% slower: " in run(tmp_path, str(slower), "--cluster", "h100", "ranks=16")
    large = tmp_path / "large.sh"
    large.write_text(text.replace("--micro-batch-size", "--recompute-granularity none --micro-batch-size"))
    assert "does not fit" in run(tmp_path, str(large), "--cluster", "h100", "ranks=16", 'memory="20 GB"')
    with pytest.raises(UserError, match="your job: .*does not fit.*none of .* configurations fit"):
        run(tmp_path, str(large), "--cluster", "h100", "ranks=16", 'memory="2 GB"')
    with pytest.raises(UserError, match="key length is for a model"):
        run(tmp_path, str(large), "--cluster", "h100", "ranks=16", "length=8192")
    large.write_text("--num-layers 4")
    with pytest.raises(UserError, match="large.sh: no --"):
        run(tmp_path, str(large), "--cluster", "h100", "ranks=16")

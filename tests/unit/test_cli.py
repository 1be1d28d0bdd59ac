"""The command line: runs, resumes; every mistake gives exit code 2 and a one-line message."""

import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest

from shardwright import cli, config
from shardwright.report import terminal
from shardwright.spec import files, presets
from shardwright.spec.statistics import LogStatistics

SMALL = (
    "train.steps=8",
    "train.batch_size=64",
    "train.log_every=2",
    "train.eval_every=4",
    "train.eval_samples=128",
    "train.checkpoint_every=4",
    "data.workers=0",
)


@pytest.fixture
def shardwright(tmp_path, monkeypatch, capsys):
    """shardwright(*args) -> (exit code, stdout, stderr), run in an empty directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")

    def run(*args: str) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["shardwright", *args])
        with pytest.raises(SystemExit) as exit_info:
            cli.main()
        output = capsys.readouterr()
        return int(exit_info.value.code or 0), output.out, output.err

    return run


def lines(run: str) -> list[dict]:
    return [json.loads(line) for line in Path("runs", run, "metrics.jsonl").read_text().splitlines()]


def test_a_run_writes_all_its_files(shardwright):
    code, out, err = shardwright("train", "synthetic-dlrm", *SMALL)
    assert code == 0, err
    for word in ("NE ", "best reachable", "AUC", "samples/s", "runs/synthetic-dlrm-001/report.html"):
        assert word in out
    run = Path("runs/synthetic-dlrm-001")
    assert {path.name for path in run.iterdir()} >= {
        "config.toml", "environment.json", "machine.jsonl", "metrics.jsonl", "workload.json", "plan.json",
        "trace.json", "checkpoint", "report.html",
    }  # fmt: skip
    assert [path.name for path in sorted((run / "checkpoint").iterdir())] == [
        "step-00000004",
        "step-00000008",
    ]
    assert [(line["kind"], line["step"]) for line in lines("synthetic-dlrm-001")] == [
        ("train", 2), ("train", 4), ("eval", 4), ("train", 6), ("train", 8), ("eval", 8), ("end", 8),
    ]  # fmt: skip
    assert tomllib.loads((run / "config.toml").read_text())["run"]["name"] == "synthetic-dlrm-001"
    assert shardwright("train", "synthetic-dlrm", *SMALL)[0] == 0
    assert Path("runs/synthetic-dlrm-002/report.html").exists()


def test_a_finished_run_is_resumed_from_its_config_file(shardwright):
    assert shardwright("train", "synthetic-dlrm", *SMALL, "run.name=mine")[0] == 0
    assert shardwright("train", "synthetic-dlrm", *SMALL, "run.name=whole", "train.steps=16")[0] == 0
    assert shardwright("train", "runs/mine/config.toml", "run.resume=true", "train.steps=4")[0] == 0, "no steps left"
    assert shardwright("train", "runs/mine/config.toml", "run.resume=true", "train.steps=16")[0] == 0
    timing = ("seconds", "samples_per_second", "peak_rss_bytes")
    resumed, uninterrupted = (
        [{key: value for key, value in line.items() if key not in timing} for line in lines(run)]
        for run in ("mine", "whole")
    )
    assert resumed == uninterrupted


TIMING = ("seconds", "samples_per_second", "peak_rss_bytes")


def test_a_run_with_gradient_accumulation_is_resumed(shardwright):
    accumulation = ("train.accumulate=3", "train.scale_rates=sqrt", "train.base_batch=48", "train.warmup=2")
    code, out, err = shardwright("train", "synthetic-dlrm", *SMALL, *accumulation, "run.name=whole", "train.steps=16")
    assert code == 0, err
    assert "learning rates x 2 (sqrt, 192 samples per step, chosen for 48): tables 0.8, dense 0.004" in out
    assert shardwright("train", "synthetic-dlrm", *SMALL, *accumulation, "run.name=mine")[0] == 0
    assert shardwright("train", "runs/mine/config.toml", "run.resume=true", "train.steps=16")[0] == 0
    resumed, uninterrupted = ([_drop(line, TIMING) for line in lines(run)] for run in ("mine", "whole"))
    assert resumed == uninterrupted
    train = [line for line in uninterrupted if line["kind"] == "train"]
    assert [line["samples"] for line in train] == [3 * 64 * line["step"] for line in train]
    assert train[0]["rate"] == pytest.approx(2 * 2 / 3) and train[1]["rate"] == 2.0
    page = Path("runs/mine/report.html").read_text()
    assert "A step accumulates the gradients of 3 micro-batches" in page
    code, _, err = shardwright("train", "runs/mine/config.toml", "run.resume=true", "train.accumulate=2")
    assert code == 2 and "this run has train.accumulate=3, the new settings have 2" in err


def test_recipes_are_listed_and_help_shows_examples(shardwright):
    code, out, _ = shardwright("train")
    assert code == 0 and "synthetic-dlrm" in out and "synthetic-logistic" in out
    code, out, _ = shardwright("train", "--help")
    assert code == 0 and "run.resume=true" in out and "my_models:make" in out


def test_evaluation_and_checkpoint_intervals_need_not_match_log_every(shardwright):
    uneven = ("train.log_every=4", "train.eval_every=3", "train.checkpoint_every=5", "train.steps=14")
    code, _, err = shardwright("train", "synthetic-dlrm", *SMALL, *uneven, "run.name=whole")
    assert code == 0, err
    assert [(line["kind"], line["step"]) for line in lines("whole")] == [
        ("eval", 3), ("train", 4), ("train", 5), ("eval", 6), ("train", 8), ("eval", 9), ("train", 10),
        ("train", 12), ("eval", 12), ("train", 14), ("eval", 14), ("end", 14),
    ]  # fmt: skip
    assert shardwright("train", "synthetic-dlrm", *SMALL, *uneven, "run.name=cut")[0] == 0
    shutil.rmtree("runs/cut/checkpoint/step-00000014")
    code, _, err = shardwright("train", "runs/cut/config.toml", "run.resume=true")
    assert code == 0, err
    uninterrupted, resumed = ([_drop(line, TIMING) for line in lines(run)] for run in ("whole", "cut"))
    assert uninterrupted == resumed, "resumed at step 10, between metrics lines"


def test_the_recipe_command_lists_and_prints_recipes(shardwright):
    code, out, _ = shardwright("recipe")
    assert code == 0 and "synthetic-dlrm" in out and "criteo-dlrm" in out
    code, out, _ = shardwright("recipe", "criteo-dlrm")
    assert code == 0 and out.startswith("# DLRM, on a Criteo click log")
    Path("mine.toml").write_text(out)
    settings = config.load("criteo-dlrm")
    assert config.load("mine.toml") == settings.model_copy(update={"recipe": "mine"})
    code, _, err = shardwright("recipe", "criteo-dlmr")
    assert code == 2 and 'no recipe "criteo-dlmr"; did you mean "criteo-dlrm"?' in err


def test_keys_of_a_kind_of_model_are_printed(shardwright):
    code, out, err = shardwright("recipe", "dcn_v2")
    assert code == 0, err
    header, columns, *rows = out.splitlines()
    assert header.startswith('keys of model.kind = "dcn_v2"; recipes: ') and "criteo-dcn-v2" in header
    assert columns.split() == ["key", "type", "default", "what"]
    assert {row.split()[0] for row in rows} >= {"model.dim", "model.num_cross", "model.rank", "model.stacked"}
    assert any(row.split()[:3] == ["model.rank", "integer", "0"] for row in rows)
    code, out, err = shardwright("recipe", "gpt")  # a recipe and a kind: the keys are comments of the recipe
    assert code == 0 and '# keys of model.kind = "gpt"' in out and "# model.channels" in out
    Path("mine.toml").write_text(out)
    assert config.load("mine.toml").model == config.load("gpt").model
    code, _, err = shardwright("recipe", "dcn_v3")
    assert code == 2 and 'no recipe "dcn_v3"' in err and err.count("\n") == 1


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_dry_run_prints_settings_and_plan_and_writes_nothing(shardwright, ranks):
    args = ("train", "synthetic-dlrm", *SMALL, "tables.lr=0.123", f"ranks={ranks}", "--dry-run")
    code, out, err = shardwright(*args)
    assert code == 0, err
    recipe = tomllib.loads(out)
    assert recipe["tables"]["lr"] == 0.123 and recipe["train"]["batch_size"] == 64 and recipe["ranks"] == ranks
    assert f"# plan for {ranks} rank(s)\n" in out and "# table user: " in out and "# stages: read" in out
    assert not list(Path().iterdir())
    Path("mine.toml").write_text(out)
    assert config.load("mine.toml") == config.load("synthetic-dlrm", args[2:-1])
    code, _, err = shardwright("train", "synthetic-dlrm", "model.dims=3", "--dry-run")
    assert code == 2 and 'unknown key "model.dims"; did you mean "dim"' in err and err.count("\n") == 1


def test_a_dry_run_checks_the_cluster_against_the_ranks(shardwright):
    args = ("train", "synthetic-dlrm", *SMALL, "ranks=3", "plan.cluster=two-cores", "--dry-run")
    code, _, err = shardwright(*args)
    assert code == 2 and "plan.cluster=two-cores has 2 ranks, this job 3" in err


def test_a_run_directory_in_place_of_a_recipe_is_refused(shardwright):
    assert shardwright("train", "synthetic-logistic", *SMALL, "run.name=mine")[0] == 0
    for args in (("train", "runs/mine"), ("plan", "runs/mine", "--cluster", "two-cores"), ("train", "runs/mine/")):
        code, _, err = shardwright(*args)
        assert code == 2 and err.count("\n") == 1
        assert "a run directory; to resume from its last checkpoint: shardwright train runs/mine/config.toml" in err


def test_version_and_running_as_a_module(shardwright):
    code, out, _ = shardwright("--version")
    assert code == 0 and out == f"shardwright {version('shardwright')}\n"
    command = [sys.executable, "-m", "shardwright", "--version"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == out


def test_help_of_plan_lists_the_published_clusters(shardwright):
    code, out, _ = shardwright("plan", "--help")
    help_text = " ".join(out.replace("│", " ").split())
    assert code == 0 and all(name in help_text for name in presets.cluster_names())


def test_inspect_takes_the_names_of_known_schemas(shardwright, criteo):
    code, with_schema, err = shardwright("data", "inspect", "train.tsv", "schema=criteo")
    assert code == 0, err
    assert shardwright("data", "inspect", "train.tsv")[1] == with_schema
    code, _, err = shardwright("data", "inspect", "train.tsv", "schema=crieto")
    assert code == 2 and 'data.schema="crieto" is unknown; did you mean "criteo"?; or give a .toml file' in err
    keys = ("data.kind=log", "data.schema=criteo", "data=train.tsv")
    code, _, err = shardwright("train", "criteo-logistic", *FAST, *keys)
    assert code == 0, err


def test_a_deleted_report_is_written_again(shardwright):
    shardwright("train", "synthetic-logistic", *SMALL, "run.name=mine")
    page = Path("runs/mine/report.html")
    page.unlink()
    code, out, _ = shardwright("report", "runs/mine")
    assert code == 0 and str(page) in out and page.exists()


MISTAKES = {
    "typo in a key": (("train.batch_sise=3",), 'unknown key "train.batch_sise"; did you mean "batch_size"'),
    "typo in a model key": (("model.dims=3",), 'unknown key "model.dims"; did you mean "dim"'),
    "typo in a section": (("trian.steps=3",), 'unknown key "trian"; did you mean "train"'),
    "typo in an optimizer": (("tables.kind=rowwise_adgrad",), 'did you mean "rowwise_adagrad"'),
    "typo in a torch optimizer": (
        ("dense.kind=Adm",),
        'dense.kind=Adm: torch.optim has no such optimizer; did you mean "Adam"',
    ),
    "unknown model": (("model.kind=dlrn",), 'model.kind="dlrn" is unknown; did you mean "dlrm"'),
    "no such module": (("model.kind=nowhere:make",), "No module named 'nowhere'"),
    "wrong type": (("train.steps=many",), "key \"train.steps\" is 'many'"),
    "out of range": (("train.steps=-1",), 'key "train.steps" is -1'),
    "negative rate": (("tables.lr=-1",), "lr"),
    "rate that is no number": (("tables.lr=fast",), "lr"),
    "dense rate that is no number": (("dense.lr=fast",), "section [dense], lr='fast': "),
    "negative dense rate": (("dense.lr=-1",), "section [dense], lr=-1: Invalid learning rate"),
    "dim that is no number": (("model.dim=wide",), "section [model], dim='wide'"),
    "no layers": (("model.bottom=[]",), "DLRM: bottom=[] with 8 numeric features; give widths of its layers"),
    "negative stream": (("data.num_dense=0",), "num_dense"),
    "no equals sign": (("train.steps",), 'override "train.steps" is not of the form key=value'),
    "shapes": (("model.dim=4",), "bottom MLP ends at 16 and the tables have dims [4]"),
    "resume of a missing run": (("run.resume=true", "run.name=gone"), "runs/gone: no such run to resume"),
    "resume without a name": (("run.resume=true",), "run.resume=true needs run.name=NAME"),
    "a huge seed": (("seed=99999999999999999999",), 'key "seed" is 99999999999999999999'),
    "a seed that is no number": (("data.seed=abc",), "click stream: seed = 'abc'; wanted a whole number"),
    "a number that is a boolean": (("train.steps=true",), 'key "train.steps" is True'),
    "a name with a parent directory": (("run.name=../mine",), "key \"run.name\" is '../mine'"),
    "a module without a name": (("model.kind=:make",), 'model.kind=":make"'),
    "a model without a loss": (("model.kind=torch.nn:Identity",), "Identity has no `loss(logits, batch)`"),
    "an optimizer that needs a closure": (("dense.kind=LBFGS",), "torch.optim has no such optimizer"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_is_a_one_line_error_and_writes_nothing(shardwright, case):
    args, message = MISTAKES[case]
    code, _, err = shardwright("train", "synthetic-dlrm", *SMALL, *args)
    assert code == 2
    assert message in err and err.count("\n") == 1
    assert not Path("runs").exists()


def test_unknown_recipe_and_missing_file(shardwright):
    code, _, err = shardwright("train", "synthetic-dlmr")
    assert code == 2 and 'no recipe "synthetic-dlmr"; did you mean "synthetic-dlrm"?' in err
    code, _, err = shardwright("train", "mine.toml")
    assert code == 2 and "mine.toml: no such recipe file" in err
    Path("mine.toml").write_text("seed = \n")
    code, _, err = shardwright("train", "mine.toml")
    assert code == 2 and "mine.toml: " in err and "line 1" in err


WRONG_DATA = {
    "id": 'table "site", feature "site": id 40 is outside its 40 rows',
    "negative length": 'feature "item", sample 0: negative length -1',
    "lengths": "lengths add up to",
    "dense": "numeric features: sample 0, column 1 is nan",
    "label": 'label "click": sample 0 is 2; a label is 0 or 1',
}
CLICK_LOG = ("data.kind=clicklog:ClickLog", "data.samples=4096")


@pytest.mark.parametrize("wrong", WRONG_DATA)
def test_bad_data_in_the_first_batch_is_refused_before_the_run_is_created(shardwright, wrong):
    code, _, err = shardwright("train", "synthetic-dlrm", *SMALL, *CLICK_LOG, f"data.wrong={wrong}")
    assert code == 2
    assert WRONG_DATA[wrong] in err and err.count("\n") == 1
    assert not Path("runs").exists()


@pytest.mark.parametrize("wrong", WRONG_DATA)
def test_bad_data_in_a_later_batch_keeps_committed_checkpoints(shardwright, wrong):
    overrides = ("data.at=4095", f"data.wrong={wrong}", "train.steps=64", "run.name=mine")
    code, _, err = shardwright("train", "synthetic-dlrm", *SMALL, *CLICK_LOG, *overrides)
    assert code == 2
    assert WRONG_DATA[wrong].partition("sample 0")[0] in err and err.count("\n") == 1
    run = Path("runs/mine")
    assert [line["step"] for line in lines("mine")][-1] >= 2
    for checkpoint in (run / "checkpoint").iterdir():
        assert (checkpoint / "manifest.json").exists()


def test_a_users_own_data_source_trains(shardwright):
    code, out, err = shardwright("train", "synthetic-dlrm", *SMALL, *CLICK_LOG, "train.steps=100")
    assert code == 0, err
    assert "best reachable" not in out


def test_a_model_without_tables_trains_by_its_own_loss(shardwright):
    Path("plain.py").write_text(PLAIN)
    Path("plain.toml").write_text('[data]\nkind = "synthetic"\n[model]\nkind = "plain:Plain"\n')
    code, out, err = shardwright("train", "plain.toml", *SMALL)
    assert code == 0, err
    assert "NE" not in out
    assert all(0 < line["loss"] < 0.5 and "ne" not in line for line in lines("plain-001") if line["kind"] == "train")
    assert shardwright("train", "runs/plain-001/config.toml", "run.resume=true", "train.steps=16")[0] == 0


PLAIN = """
import torch
from torch import nn


class Squares(nn.Module):
    label = "click"  # has BinaryLoss's attribute but is not one

    def forward(self, outputs, batch):
        return ((outputs["score"] - batch.labels["click"]) ** 2).mean()


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 1)
        self.loss = Squares()

    def forward(self, batch):
        return {"score": self.linear(batch.dense).squeeze(1).sigmoid()}
"""


def test_a_source_without_an_evaluation_is_refused_at_once(shardwright):
    Path("bare.py").write_text("from clicklog import ClickLog\n\n\nclass Bare(ClickLog):\n    evaluation = None\n")
    code, _, err = shardwright("train", "synthetic-dlrm", *SMALL, "data.kind=bare:Bare", "data.samples=4096")
    assert code == 2 and "data.kind=bare:Bare has no evaluation()" in err and not Path("runs").exists()
    code, _, err = shardwright(
        "train", "synthetic-dlrm", *SMALL, "data.kind=bare:Bare", "data.samples=4096", "train.eval_samples=0"
    )
    assert code == 0, err


@pytest.mark.parametrize("size", [1, 2])
def test_evaluations_of_one_or_two_samples(shardwright, size):
    code, _, err = shardwright("train", "synthetic-dlrm", *SMALL, f"train.eval_samples={size}")
    assert code == 0, err


def test_a_killed_loader_worker_is_a_one_line_error(shardwright, monkeypatch):
    def kill(self, step: int, samples: int) -> None:
        for worker in multiprocessing.active_children():
            worker.kill()

    monkeypatch.setattr(terminal.ProgressDisplay, "step", kill)
    code, _, err = shardwright("train", "synthetic-dlrm", *SMALL, "data.workers=1", "train.steps=64")
    assert code == 2 and "loader worker 0" in err and "exit code -9" in err and err.count("\n") == 1


def test_a_run_with_readers_gives_the_same_metrics(shardwright):
    args = (*SMALL[:-1], "data.workers=1")
    command = [sys.executable, "-m", "shardwright.cli", "reader", "serve", "synthetic-dlrm", *args]
    with subprocess.Popen([*command, "--bind", "tcp://127.0.0.1:0"], stdout=subprocess.PIPE, text=True) as reader:
        assert reader.stdout is not None
        status, address = reader.stdout.readline().split()
        assert status == "serving"
        readers = f'data.readers=["{address}"]'
        code, _, err = shardwright("train", "synthetic-dlrm", *args, "run.name=remote", readers)
        assert code == 0, err
        code, _, err = shardwright("train", "synthetic-dlrm", *args, "run.name=other", readers, "seed=7")
        assert code == 2 and err.count("\n") == 1
        assert f"reader {address} serves other batches: seed is 1 there and 7 here" in err
        assert not Path("runs/other").exists()
        reader.send_signal(signal.SIGINT)
        assert reader.wait(30) == 0 and reader.stdout.read().endswith("ended\n")
    assert shardwright("train", "synthetic-dlrm", *args, "run.name=local")[0] == 0
    remote, local = ([_drop(line, TIMING) for line in lines(run)] for run in ("remote", "local"))
    assert remote == local
    resumed = ("runs/remote/config.toml", "run.resume=true", "train.steps=12", "data.readers=[]")
    assert shardwright("train", *resumed)[0] == 0, "the readers may change on resume"


def test_reader_mistakes_are_one_line_errors(shardwright):
    serve = ("reader", "serve", "synthetic-dlrm")
    for args, message in (
        (
            (*serve, "--bind", "tcp://*:5700"),
            "reader tcp://*:5700: not on this host, and no keys are set; create keys with",
        ),
        ((*serve, "--keys", "gone"), "gone: not a key file"),
        ((*serve, "data.workers=0"), "set data.workers=1 or more"),
        ((*serve, "data.wrokers=1"), 'unknown key "data.wrokers"; did you mean "workers"'),
        (("train", "synthetic-dlrm", *SMALL, 'data.readers=["host:1"]'), 'reader "host:1"; wanted tcp://HOST:PORT'),
        (("train", "synthetic-dlrm", *SMALL, "data.reader_keys=k"), "data.reader_keys=k without data.readers"),
    ):
        code, _, err = shardwright(*args)
        assert code == 2 and message in err and err.count("\n") == 1, err
    assert not Path("runs").exists()
    code, out, _ = shardwright("reader", "keys", "mine")
    assert code == 0 and out.split() == ["keys", "mine/reader.keys", "keys", "mine/trainer.keys"]
    code, _, err = shardwright("reader", "keys", "mine")
    assert code == 2 and "mine/reader.keys: already exists" in err
    code, _, err = shardwright(*serve, "--bind", "tcp://*:0", "--keys", "mine/trainer.keys")
    assert code == 2 and "holds keys of a trainer; give the file reader.keys" in err


def test_an_interrupt_prints_the_command_to_resume(shardwright, monkeypatch):
    def interrupt(self, step: int, samples: int) -> None:
        if step == 5:
            raise KeyboardInterrupt

    monkeypatch.setattr(terminal.ProgressDisplay, "step", interrupt)
    code, _, err = shardwright("train", "synthetic-dlrm", *SMALL)
    assert code == 130
    assert "shardwright train runs/synthetic-dlrm-001/config.toml run.resume=true" in err
    assert Path("runs/synthetic-dlrm-001/checkpoint/step-00000004/manifest.json").exists()


def test_an_unwritable_run_directory_is_refused(shardwright, tmp_path):
    Path("file").write_text("")
    code, _, err = shardwright("train", "synthetic-dlrm", *SMALL, "run.directory=file/runs")
    assert code == 2 and "run.directory=file/runs: Not a directory" in err and err.count("\n") == 1
    if os.geteuid() != 0:
        tmp_path.chmod(0o500)
        code, _, err = shardwright("train", "synthetic-dlrm", *SMALL)
        assert code == 2 and "run.directory=runs: Permission denied" in err


def test_an_existing_run_is_not_overwritten(shardwright):
    assert shardwright("train", "synthetic-dlrm", *SMALL, "run.name=mine")[0] == 0
    before = Path("runs/mine/metrics.jsonl").read_bytes()
    code, _, err = shardwright("train", "synthetic-dlrm", *SMALL, "run.name=mine")
    assert code == 2 and "runs/mine: this run exists; continue it with run.resume=true" in err
    code, _, err = shardwright("train", "synthetic-dlrm", *SMALL, "run.name=mine", "run.resume=true", "tables.lr=0.5")
    assert code == 2 and "this run has tables.lr=0.4, the new settings have 0.5" in err
    assert Path("runs/mine/metrics.jsonl").read_bytes() == before


CRITEO_ROW = "\t".join(["{label}", *("{n}" for _ in range(13)), *("{n:08x}" for _ in range(26))])


@pytest.fixture
def criteo(tmp_path):
    """A small click log in Criteo's format, with clicks on odd ids."""
    path = tmp_path / "train.tsv"
    path.write_text("".join(CRITEO_ROW.format(label=n % 2, n=n % 11) + "\n" for n in range(700)))
    return path


FAST = ("train.batch_size=100", "train.log_every=2", "data.workers=0")


def test_a_click_log_trains_by_name(shardwright, criteo):
    code, out, err = shardwright("train", "criteo-dlrm", "data=train.tsv", *FAST)
    assert code == 0, err
    assert "NE" in out and [line["step"] for line in lines("criteo-dlrm-001") if line["kind"] == "train"] == [2, 4, 6]
    assert [line["samples"] for line in lines("criteo-dlrm-001") if line["kind"] == "eval"] == [600]
    assert "ids in 100 hottest rows" in Path("runs/criteo-dlrm-001/report.html").read_text()
    assert list(Path("runs/criteo-dlrm-001/tensorboard").glob("events.out.tfevents.*"))


def test_early_stopping_restores_and_tests_the_best_checkpoint(shardwright, criteo):
    early_stopping = ("data.split.validation=0.2", "train.patience=2", "train.eval_every=2", "train.epochs=40")
    code, _, err = shardwright("train", "criteo-dlrm", "data=train.tsv", *FAST, *early_stopping, "dense.lr=0.3")
    assert code == 0, err
    metrics = lines("criteo-dlrm-001")
    evals = [line for line in metrics if line["kind"] == "eval"]
    best = min(evals, key=lambda line: line["ne"])
    assert len(evals) < 40 * 6 / 2 and evals.index(best) == len(evals) - 3
    (test,) = [line for line in metrics if line["kind"] == "test"]
    assert test["step"] == best["step"] == metrics[-1]["step"]
    assert list(Path("runs/criteo-dlrm-001/checkpoint").iterdir())
    code, _, err = shardwright("train", "runs/criteo-dlrm-001/config.toml", "run.resume=true")
    assert code == 0, err
    timing = ("seconds", "samples_per_second", "peak_rss_bytes")
    assert [_drop(line, timing) for line in lines("criteo-dlrm-001")] == [_drop(line, timing) for line in metrics]


def _drop(line: dict, keys: tuple[str, ...]) -> dict:
    return {key: value for key, value in line.items() if key not in keys}


def test_progressive_validation_scores_before_training(shardwright, criteo):
    settings = ("train.progressive=true", "data.shuffle=false", "train.epochs=1")
    code, _, err = shardwright("train", "criteo-logistic", "data=train.tsv", *FAST, *settings)
    assert code == 0, err
    progressive = [line for line in lines("criteo-logistic-001") if line["kind"] == "progressive"]
    train = [line for line in lines("criteo-logistic-001") if line["kind"] == "train"]
    assert len(progressive) == len(train) == 3
    assert progressive[0]["log_loss"] == pytest.approx(train[0]["log_loss"], abs=1e-6)
    mean = sum(line["log_loss"] for line in train) / 3
    assert progressive[-1]["log_loss"] == pytest.approx(mean, abs=1e-6)
    code, _, err = shardwright("train", "criteo-logistic", "data=train.tsv", *FAST, *settings[:2], "train.epochs=2")
    assert code == 2 and "train.progressive=true scores samples that were never trained on" in err


def test_an_epoch_ends_with_a_step_of_the_remaining_micro_batches(shardwright, criteo):
    """Every sample is trained on once in each epoch, and scored before."""
    settings = ("data=train.tsv", *FAST, "train.epochs=1", "train.progressive=true", "data.shuffle=false")
    assert shardwright("train", "criteo-logistic", *settings, "run.name=one")[0] == 0
    code, _, err = shardwright("train", "criteo-logistic", *settings, "run.name=four", "train.accumulate=4")
    assert code == 0, err
    single, accum = (next(line for line in lines(run) if line["kind"] == "end") for run in ("one", "four"))
    assert single["samples"] == accum["samples"] and single["step"] % 4 and accum["step"] == single["step"] // 4 + 1


def test_a_run_with_progressive_validation_and_decay_is_resumed(shardwright, criteo):
    settings = (*FAST, "train.progressive=true", "data.shuffle=false", "train.checkpoint_every=2", "train.warmup=3")
    settings += ("train.decay=cosine", "train.epochs=1", "data=train.tsv", "train.eval_every=2")
    assert shardwright("train", "criteo-logistic", *settings, "run.name=whole")[0] == 0
    assert shardwright("train", "criteo-logistic", *settings, "run.name=cut")[0] == 0
    shutil.rmtree("runs/cut/checkpoint/step-00000006")
    code, _, err = shardwright("train", "runs/cut/config.toml", "run.resume=true")
    assert code == 0, err
    timing = ("seconds", "samples_per_second", "peak_rss_bytes")
    uninterrupted, resumed = (
        [{key: value for key, value in line.items() if key not in timing} for line in lines(run)]
        for run in ("whole", "cut")
    )
    assert uninterrupted == resumed


def test_a_run_with_learning_rate_decay_cannot_be_extended(shardwright, criteo):
    settings = ("data=train.tsv", *FAST, "train.epochs=0", "train.steps=4", "train.decay=linear", "run.name=mine")
    assert shardwright("train", "criteo-logistic", *settings)[0] == 0
    code, _, err = shardwright("train", "runs/mine/config.toml", "run.resume=true", "train.steps=8")
    assert code == 2 and "this run has train.steps=4, the new settings have 8" in err


def test_labels_may_be_smoothed(shardwright, criteo):
    assert shardwright("train", "criteo-logistic", "data=train.tsv", *FAST, "train.label_smoothing=0.2")[0] == 0
    first = lines("criteo-logistic-001")[0]
    assert first["loss"] == pytest.approx(first["log_loss"], abs=0.02) and first["loss"] != first["log_loss"]


LOG_MISTAKES = {
    "no log": ((), 'key "data.path" is missing; set the path of the log, as in data=FILE'),
    "no such log": (("data=gone.tsv",), "data.path=gone.tsv: no such file"),
    "a typo in the encoding": (("data=train.tsv", "data.encoding.row=4"), "data.encoding: row: unknown key; did you"),
    "a typo in the split": (("data=train.tsv", "data.split.by=day"), 'split is "day"; allowed: time, random'),
    "patience without evaluations": (
        ("data=train.tsv", "train.patience=1", "train.eval_samples=0"),
        "train.patience=1 needs evaluations",
    ),
    "nothing to train on": (
        ("data=train.tsv", "data.split.test=0.5", "data.split.validation=0.4999"),
        "the training part has no samples",
    ),
    "nothing held out": (("data=train.tsv", "data.split.test=0.0"), "no samples are held out to evaluate on"),
    "epochs of an unbounded source": (("data.kind=synthetic", "train.epochs=1"), 'unknown key "data.encoding"'),
}


@pytest.mark.parametrize("case", LOG_MISTAKES)
def test_a_mistake_with_a_click_log_is_a_one_line_error(shardwright, criteo, case):
    args, message = LOG_MISTAKES[case]
    code, _, err = shardwright("train", "criteo-dlrm", *FAST, *args)
    assert code == 2 and message in err and err.count("\n") == 1
    assert not Path("runs").exists()


def test_malformed_rows_are_refused_or_counted(shardwright, criteo):
    criteo.write_text(criteo.read_text() + "0\t1\t2\n")
    code, _, err = shardwright("train", "criteo-dlrm", "data=train.tsv", *FAST)
    assert code == 2 and "train.tsv: line 701: the row has 3 columns, wanted 40; fix it" in err
    code, _, err = shardwright("train", "criteo-dlrm", "data=train.tsv", "data.strict=false", *FAST)
    assert code == 0 and "1 of 701 rows are malformed and skipped; the first, line 701" in err


def test_data_inspect_prints_and_writes_statistics(shardwright, criteo):
    code, out, err = shardwright("data", "inspect", "train.tsv", "output=s.json")
    assert code == 0, err
    for word in ("train.tsv", "rows", "700", "base rate", "0.5000", "C26", "dup@2048", "I13", "s.json"):
        assert word in out
    statistics = files.read(LogStatistics, "s.json")
    statistics.verify()
    assert (statistics.rows, statistics.base_rate) == (700, 0.5)
    assert statistics.features[0].ids_per_sample == 1.0 and statistics.features[0].popularity[-1] == (11, 1.0)
    for word in ("split.by=random", "strct=false"):
        code, _, err = shardwright("data", "inspect", "train.tsv", word)
        assert code == 2 and f'unknown key "{word.partition("=")[0].partition(".")[0]}"' in err
    code, _, err = shardwright("data", "inspect", "s.json")
    assert code == 2 and "s.json: not a known log format; describe its columns with schema=FILE.toml" in err


def test_report_compares_runs(shardwright, criteo):
    for number, rate in enumerate(("0.1", "0.2")):
        shardwright("train", "criteo-logistic", "data=train.tsv", *FAST, f"tables.lr={rate}", f"run.name=run{number}")
    code, out, err = shardwright("report", "runs/run0", "runs/run1")
    assert code == 0, err
    page = Path("runs/compare.html")
    assert "compare.html" in out and page.exists()
    text = page.read_text()
    assert "tables.lr" in text and "run0" in text and "run1" in text and "data.path" not in text.partition("<script")[0]
    code, _, err = shardwright("report", "runs/run0", "runs/run0")
    assert code == 2 and 'two runs have the name "run0"' in err

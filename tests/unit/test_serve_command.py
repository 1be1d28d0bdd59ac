"""The commands `export` and `serve`: a run is exported, served, resumed and followed."""

import http.client
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from shardwright.serving.export import export_run
from shardwright.serving.predictor import Predictor

INTERVALS = ("train.log_every=10", "train.checkpoint_every=10", "train.publish_every=10", "data.workers=0")
NO_EVALUATION = ("train.eval_every=0", "train.eval_samples=0", "train.progressive=true")
SECONDS = 60.0


def shardwright(folder: Path, *arguments: str, is_error: bool = False) -> str:
    """Run a command; its output, or its stderr if an error is expected."""
    command = [sys.executable, "-m", "shardwright.cli", *arguments]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, env=environment())
    assert result.returncode == (2 if is_error else 0), result.stderr
    return result.stderr if is_error else result.stdout


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}


@contextmanager
def serve(folder: Path, *arguments: str) -> Iterator[int]:
    """Start a server, which ends cleanly at SIGTERM; its port."""
    command = [sys.executable, "-m", "shardwright.cli", "serve", *arguments, "--port", "0"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, cwd=folder, text=True, env=environment(), **pipes) as process:
        try:
            assert process.stdout is not None and process.stderr is not None
            assert process.stderr.readline() == f"loading {arguments[0]}\n", "printed before loading"
            assert process.stderr.readline().startswith("loaded: 16 tables, ")
            line = process.stdout.readline()
            match = re.fullmatch(r"serving http://127.0.0.1:(\d+), step \d+\n", line)
            assert match, line
            yield int(match[1])
            process.send_signal(signal.SIGTERM)
            assert process.wait(20) == 0 and process.stdout.read() == "ended\n"
        finally:
            process.kill()


def request(port: int, path: str, body: object = None) -> tuple[int, dict]:
    """Send a request; its status and decoded body."""
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=20)) as connection:
        connection.request("GET" if body is None else "POST", path, None if body is None else json.dumps(body))
        response = connection.getresponse()
        return response.status, json.loads(response.read())


SAMPLES = [{"ids": {"user": i, "history": [i, 2]}, "numbers": [0.5] * 8} for i in range(5)]


def test_a_run_is_exported_served_and_followed(tmp_path):
    recipe = ("train", "synthetic-dlrm", "run.name=mine", *INTERVALS, *NO_EVALUATION)
    shardwright(tmp_path, *recipe, "train.steps=20")
    output = shardwright(tmp_path, "export", "runs/mine/checkpoint/step-00000010", "out")
    assert "step 10: 16 tables as trained" in output and (tmp_path / "out/dense.pt2").is_file()
    with serve(tmp_path, "out", "--follow", "runs/mine") as port:
        assert request(port, "/health")[1]["step"] == 20
        shardwright(tmp_path, "train", "runs/mine/config.toml", "run.resume=true", "train.steps=40")
        deadline = time.monotonic() + SECONDS
        while request(port, "/health")[1]["step"] < 40:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        export_run(tmp_path / "runs/mine", tmp_path / "last")
        predictor = Predictor(tmp_path / "last")
        step, scores = predictor.answer(SAMPLES)
        assert request(port, "/predict", {"samples": SAMPLES}) == (200, {"step": step, "scores": scores})
        status, reply = request(port, "/predict", {"samples": [*SAMPLES, {"ids": {"users": 1}}]})
        assert status == 400 and reply == {"error": 'sample 5: unknown feature "users"; did you mean "user"?'}
        rows = next(table.rows for table in predictor.served.tables if table.name == "user")
        status, reply = request(port, "/predict", {"samples": [{"ids": {"user": rows}}]})
        assert status == 400 and f"id {rows} is outside its {rows} rows" in reply["error"]
    with serve(tmp_path, "out") as port:
        status, state = request(port, "/health")
        assert (status, state.pop("age_seconds") > 0, state) == (200, True, {"status": "ok", "step": 10})


def test_a_run_on_a_log_is_served_by_column_names(tmp_path):
    """The click log no longer exists when the run is exported."""
    rows = [f"{i % 2},{i % 50},{i},site{i % 7}" for i in range(2000)]
    (tmp_path / "log.csv").write_text("\n".join(("click,age,price,site", *rows)) + "\n")
    (tmp_path / "schema.toml").write_text('label = "click"\nnumbers = ["age", "price"]\ncategories = ["site"]\n')
    keys = ("data.kind=log", "data.path=log.csv", "data.schema=schema.toml", "data.split.test=0.0", "data.cache=cache")
    settings = ("train.batch_size=200", "train.epochs=1", "data.workers=0", "train.log_every=5")
    (tmp_path / "mine.toml").write_text(RECIPE_FILE)
    train = ("train", "mine.toml", "run.name=mine", *keys, *settings, "train.eval_samples=0", *NO_CHECKPOINTS)
    shardwright(tmp_path, *train)
    other_rows = [row.replace(",", ",9", 2) for row in rows]
    (tmp_path / "log.csv").write_text("\n".join(("click,age,price,site", *other_rows)) + "\n")
    assert "loader: " in shardwright(tmp_path, *train, "run.resume=true", is_error=True), "another log"
    (tmp_path / "log.csv").unlink()
    shardwright(tmp_path, "export", "runs/mine", "out", "--tables", "float16")
    predictor = Predictor(tmp_path / "out")
    step, scores = predictor.answer([{"age": 3, "price": 7.5, "site": "site2"}, {}, {"site": "unheard"}])
    assert step == 10 and len(scores) == 3 and all(0 < score < 1 for score in scores)
    moments = json.loads((tmp_path / "out/transforms/transforms.json").read_text())["moments"]
    assert moments["price"]["mean"] == pytest.approx(sum(math.log1p(i) for i in range(2000)) / 2000, rel=1e-5)


def test_tables_that_grow_are_trained_resumed_served_and_followed(tmp_path):
    """Rows for the sites of a log; sites that no batch had lately have none, and unknown ones have initial values."""
    rows = [f"{i % 2},{i % 50},{i},site{i % 7 + i // 1000 * 20}" for i in range(3000)]
    (tmp_path / "log.csv").write_text("\n".join(("click,age,price,site", *rows)) + "\n")
    (tmp_path / "schema.toml").write_text('label = "click"\nnumbers = ["age", "price"]\ncategories = ["site"]\n')
    keys = ("data.kind=log", "data.path=log.csv", "data.schema=schema.toml", "data.split.test=0.0", "data.cache=cache")
    growth = ("data.encoding.rows=20", "data.encoding.growth.admit_after=2", "data.encoding.growth.expire_after=3")
    settings = ("train.batch_size=100", "data.shuffle=false", "data.workers=0", "train.log_every=5")
    (tmp_path / "mine.toml").write_text(RECIPE_FILE)
    train = ("train", "mine.toml", *keys, *growth, *settings, "train.eval_every=0", "train.eval_samples=0")
    publishing = ("run.name=mine", "train.publish_every=4", "train.checkpoint_every=10")
    shardwright(tmp_path, *train, *publishing, "train.steps=20")
    shardwright(tmp_path, *train, *publishing, "train.steps=30", "run.resume=true")
    shardwright(tmp_path, *train, "run.name=whole", "train.steps=30", "train.checkpoint_every=0")
    losses = [
        [line["loss"] for line in map(json.loads, path.read_text().splitlines()) if line["kind"] == "train"]
        for path in (tmp_path / "runs/mine/metrics.jsonl", tmp_path / "runs/whole/metrics.jsonl")
    ]
    assert losses[0] == losses[1] and len(losses[0]) == 6
    windows = [json.loads(line) for line in (tmp_path / "runs/mine/growth.jsonl").read_text().splitlines()]
    tables = ("site", "site_1")  # of DeepFM's vectors, and of its weights of first order
    assert [(w["step"], w["table"]) for w in windows] == [(step, name) for step in range(5, 31, 5) for name in tables]
    assert windows[-1]["rows"] <= windows[-1]["room"] == 20 and windows[-1]["expired"] > 0 == windows[-1]["evicted"]
    page = (tmp_path / "runs/mine/report.html").read_text()
    assert "2 tables grow: an id gets a row" in page and "expired so far" in page
    shardwright(tmp_path, "export", "runs/mine", "out")
    shardwright(tmp_path, "export", "runs/whole", "other")
    samples = [{"age": 3, "price": 7.5, "site": site} for site in ("site0", "site41", "unheard", "site0")]
    with closing(Predictor(tmp_path / "out", follow=tmp_path / "runs/mine/published")) as predictor:
        followed = predictor.answer(samples)
    assert followed == Predictor(tmp_path / "other").answer(samples)
    assert followed[1][0] == followed[1][3] and len({*followed[1]}) == 3


NO_CHECKPOINTS = ("train.eval_every=0", "train.checkpoint_every=0")
RECIPE_FILE = """
[data]
kind = "log"
[model]
kind = "deepfm"
dim = 4
hidden = [8]
[tables]
kind = "rowwise_adagrad"
lr = 0.1
"""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("export", "runs/none", "out"), "no checkpoint; name one like runs/NAME/checkpoint"),
        (("serve", "out"), "no exported model; create it with `shardwright export RUN out`"),
    ],
)
def test_missing_checkpoints_and_exports_are_errors(tmp_path, arguments, message):
    assert message in shardwright(tmp_path, *arguments, is_error=True)

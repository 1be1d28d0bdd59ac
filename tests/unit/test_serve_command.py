"""`shardwright export` and `serve` as they are typed: a run is exported, served, trained on and followed."""

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

RECIPE = ("train.log_every=10", "train.checkpoint_every=10", "train.publish_every=10", "data.workers=0")
NO_EVALUATION = ("train.eval_every=0", "train.eval_samples=0", "train.progressive=true")
SECONDS = 60.0


def shardwright(where: Path, *words: str, wrong: bool = False) -> str:
    given = [sys.executable, "-m", "shardwright.cli", *words]
    found = subprocess.run(given, cwd=where, capture_output=True, text=True, timeout=120, env=environment())
    assert found.returncode == (2 if wrong else 0), found.stderr
    return found.stderr if wrong else found.stdout


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}


@contextmanager
def served(where: Path, *words: str) -> Iterator[int]:
    """The port of a server, which ends in peace."""
    given = [sys.executable, "-m", "shardwright.cli", "serve", *words, "--port", "0"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(given, cwd=where, text=True, env=environment(), **pipes) as process:
        try:
            assert process.stdout is not None and process.stderr is not None
            assert process.stderr.readline() == f"loading {words[0]}\n", "said before anything is loaded"
            assert process.stderr.readline().startswith("loaded: 16 tables, ")
            line = process.stdout.readline()
            found = re.fullmatch(r"serving http://127.0.0.1:(\d+), step \d+\n", line)
            assert found, line
            yield int(found[1])
            process.send_signal(signal.SIGTERM)
            assert process.wait(20) == 0 and process.stdout.read() == "ended\n"
        finally:
            process.kill()


def asked(port: int, path: str, body: object = None) -> tuple[int, dict]:
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=20)) as connection:
        connection.request("GET" if body is None else "POST", path, None if body is None else json.dumps(body))
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())


SAMPLES = [{"ids": {"user": at, "history": [at, 2]}, "numbers": [0.5] * 8} for at in range(5)]


def test_a_run_is_exported_served_and_followed(tmp_path):
    recipe = ("train", "synthetic-dlrm", "run.name=mine", *RECIPE, *NO_EVALUATION)
    shardwright(tmp_path, *recipe, "train.steps=20")
    told = shardwright(tmp_path, "export", "runs/mine/checkpoint/step-00000010", "out")
    assert "step 10: 16 tables as trained" in told and (tmp_path / "out/dense.pt2").is_file()
    with served(tmp_path, "out", "--follow", "runs/mine") as port:
        assert asked(port, "/health")[1]["step"] == 20
        shardwright(tmp_path, "train", "runs/mine/config.toml", "run.resume=true", "train.steps=40")
        end = time.monotonic() + SECONDS
        while asked(port, "/health")[1]["step"] < 40:
            assert time.monotonic() < end
            time.sleep(0.05)
        export_run(tmp_path / "runs/mine", tmp_path / "last")
        last = Predictor(tmp_path / "last")
        step, scores = last.answer(SAMPLES)
        assert asked(port, "/predict", {"samples": SAMPLES}) == (200, {"step": step, "scores": scores})
        status, told = asked(port, "/predict", {"samples": [*SAMPLES, {"ids": {"users": 1}}]})
        assert status == 400 and told == {"error": 'sample 5: unknown feature "users"; did you mean "user"?'}
        rows = next(table.rows for table in last.served.tables if table.name == "user")
        status, told = asked(port, "/predict", {"samples": [{"ids": {"user": rows}}]})
        assert status == 400 and f"id {rows} is outside its {rows} rows" in told["error"]
    with served(tmp_path, "out") as port:
        status, state = asked(port, "/health")
        assert (status, state.pop("age_seconds") > 0, state) == (200, True, {"status": "ok", "step": 10})


def test_a_log_is_asked_about_by_its_columns(tmp_path):
    """Neither the log nor its cache is there any longer when the run is exported."""
    rows = [f"{at % 2},{at % 50},{at},site{at % 7}" for at in range(2000)]
    (tmp_path / "log.csv").write_text("\n".join(("click,age,price,site", *rows)) + "\n")
    (tmp_path / "schema.toml").write_text('label = "click"\nnumbers = ["age", "price"]\ncategories = ["site"]\n')
    keys = ("data.kind=log", "data.path=log.csv", "data.schema=schema.toml", "data.split.test=0.0", "data.cache=cache")
    words = ("train.batch_size=200", "train.epochs=1", "data.workers=0", "train.log_every=5")
    (tmp_path / "mine.toml").write_text(MINE)
    shardwright(tmp_path, "train", "mine.toml", "run.name=mine", *keys, *words, "train.eval_samples=0", *EVERY)
    (tmp_path / "log.csv").write_text(
        "\n".join(("click,age,price,site", *(row.replace(",", ",9", 2) for row in rows))) + "\n"
    )
    again = ("run.resume=true", "train.eval_samples=0")
    told = shardwright(tmp_path, "train", "mine.toml", "run.name=mine", *keys, *words, *again, *EVERY, wrong=True)
    assert "loader: " in told, "another log"
    (tmp_path / "log.csv").unlink()
    shardwright(tmp_path, "export", "runs/mine", "out", "--tables", "float16")
    found = Predictor(tmp_path / "out")
    step, scores = found.answer([{"age": 3, "price": 7.5, "site": "site2"}, {}, {"site": "unheard"}])
    assert step == 10 and len(scores) == 3 and all(0 < score < 1 for score in scores)
    moments = json.loads((tmp_path / "out/transforms/transforms.json").read_text())["moments"]
    assert moments["price"]["mean"] == pytest.approx(sum(math.log1p(at) for at in range(2000)) / 2000, rel=1e-5)


EVERY = ("train.eval_every=0", "train.checkpoint_every=0")
MINE = """
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
    ("words", "told"),
    [
        (("export", "runs/none", "out"), "no checkpoint; name one like runs/NAME/checkpoint"),
        (("serve", "out"), "no exported model; make one with `shardwright export RUN out`"),
    ],
)
def test_what_is_not_there_is_told(tmp_path, words, told):
    assert told in shardwright(tmp_path, *words, wrong=True)

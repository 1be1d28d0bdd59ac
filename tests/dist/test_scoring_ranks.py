"""Evaluation and scores over ranks that the command line starts equal those of one process."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

NAMES = ("click", "age", "site", "device")
SCHEMA = 'label = "click"\nnumbers = ["age"]\ncategories = ["site", "device"]\n'
RUN = (
    *("criteo-dlrm", "data=train.csv", "data.kind=log", "data.schema=schema.toml", "data.test=test.csv"),
    *("data.workers=0", "model.dim=4", "model.bottom=[4]", "model.top=[8]", "train.batch_size=64", "train.epochs=0"),
    *("train.steps=6", "train.log_every=3", "train.eval_every=3", "train.patience=9", "run.name=mine"),
)


def write_log(path: Path, num: int, seed: int) -> None:
    generator = np.random.default_rng(seed)
    columns = (
        *(generator.integers(0, 2, num), generator.integers(1, 90, num)),
        *(np.char.add("s", generator.integers(0, 30, num).astype(str)), generator.integers(0, 4, num).astype(str)),
    )
    rows = (",".join(map(str, row)) for row in zip(*columns, strict=True))
    path.write_text("\n".join((",".join(NAMES), *rows)) + "\n")


def shardwright(folder: Path, *args: str) -> str:
    command = [sys.executable, "-m", "shardwright.cli", *args]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("scoring")
    (folder / "schema.toml").write_text(SCHEMA)
    write_log(folder / "train.csv", 600, 0)
    write_log(folder / "test.csv", 301, 1)
    shardwright(folder, "train", *RUN)
    return folder


def test_an_evaluation_over_ranks_equals_one_process(folder):
    results = []
    for ranks in (1, 2):
        out = shardwright(folder, "evaluate", "runs/mine", "--by", "site", f"ranks={ranks}")
        assert "auc" in out and "rows        301" in out
        (path,) = (folder / "runs/mine/evaluations").iterdir()
        results.append(json.loads(path.read_text()))
        path.unlink()
    one, two = results
    assert two["metrics"] == pytest.approx(one["metrics"], abs=1e-6)
    assert [(each["value"], each["rows"]) for each in two["by"]["site"]] == [
        (each["value"], each["rows"]) for each in one["by"]["site"]
    ]
    for a, b in zip(one["by"]["site"], two["by"]["site"], strict=True):
        assert {**b, "value": 0} == pytest.approx({**a, "value": 0}, abs=1e-5)


def test_processes_that_the_command_starts_write_the_bytes_of_one(folder):
    write_log(folder / "score.csv", 300_000, 2)  # two parts
    for ranks in (1, 2):
        args = ("predict", "runs/mine", "data=score.csv", f"out=scores-{ranks}.parquet", "keys=site", f"ranks={ranks}")
        assert "300,000 rows" in shardwright(folder, *args)
    assert (folder / "scores-1.parquet").read_bytes() == (folder / "scores-2.parquet").read_bytes()
    assert not list(folder.glob(".*.parts"))

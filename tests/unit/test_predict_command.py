"""`shardwright predict` and `evaluate`: scores of every row of a file, equal to the exported model's to the bit."""

from pathlib import Path

import numpy as np
import pyarrow.csv as pcsv
import pyarrow.parquet as pq
import pytest
from test_cli import shardwright  # noqa: F401
from test_click_logs import SCHEMA, make_rows

from shardwright.data.features.transforms import Transforms
from shardwright.data.loading.loader import to_batch
from shardwright.errors import UserError
from shardwright.serving.predictor import Predictor
from shardwright.serving.scoring.predict import ScoreRequest, prepare, score_parts

ROWS = make_rows(300, 2)
FEATURES = ("site", "device", "tags", "age", "time")  # neither label nor weight


def write_csv(path: str, rows: list, columns: tuple = ()) -> None:
    columns = columns or tuple(rows[0])
    Path(path).write_text("\n".join([",".join(columns), *(",".join(str(r[c]) for c in columns) for r in rows)]) + "\n")


@pytest.fixture
def run(shardwright) -> Path:  # noqa: F811
    """A short run on a CSV file, in the current folder, with rows to score in `score.csv`."""
    write_csv("train.csv", make_rows())
    write_csv("score.csv", ROWS, FEATURES)
    Path("s.toml").write_text(SCHEMA)
    keys = ("data=train.csv", "data.kind=log", "data.schema=s.toml", "train.batch_size=64", "train.steps=6")
    code, _, err = shardwright("train", "criteo-logistic", *keys, "train.epochs=0", "run.name=mine")
    assert code == 0, err
    return Path("runs/mine")


def expected_scores(export: Path) -> np.ndarray:
    """Scores of single requests with the values of `score.csv`."""
    transforms = Transforms.read(export / "transforms")
    samples = []
    for row in ROWS:
        sample = {name: row[name] for name in ("site", "device") if row[name]}
        sample |= {"age": float(row["age"])} if row["age"] else {}
        samples.append(sample | {"tags": row["tags"].split("|") if row["tags"] else []})
    predictor = Predictor(export)
    try:
        return predictor.scores(to_batch(transforms.encode_samples(samples))).numpy()
    finally:
        predictor.close()


def test_a_run_and_its_export_give_the_same_scores_in_any_format(shardwright, run):  # noqa: F811
    for args in (("export", str(run), "served"), ("predict", str(run), "data=score.csv", "out=run.parquet")):
        code, _, err = shardwright(*args)
        assert code == 0, err
    code, _, err = shardwright("predict", "served", "data=score.csv", "out=export.csv", "keys=time,site")
    assert code == 0, err
    scores = pq.read_table("run.parquet")["score"].to_numpy()
    assert np.array_equal(scores, expected_scores(Path("served")))
    table = pcsv.read_csv("export.csv")
    assert table.column_names == ["time", "site", "score"]
    assert table["site"].to_pylist() == [row["site"] for row in ROWS]
    assert np.array_equal(table["score"].to_numpy().astype(np.float32), scores)
    assert not list(Path().glob(".*.parts"))


def test_a_killed_call_continues_with_the_missing_parts(shardwright, run):  # noqa: F811
    whole, cut = (ScoreRequest(run, Path("score.csv"), Path(name), (), 16, 2) for name in ("a.parquet", "b.parquet"))
    parts = prepare(whole)
    assert score_parts(whole) == len(ROWS)
    assert parts.assemble() == len(ROWS)
    parts = prepare(cut)
    assert 0 < score_parts(cut, rank=1, size=2) < len(ROWS)  # a process that ended early left its parts
    kept = {path: path.stat().st_mtime_ns for path in parts.directory.glob("part-*")}
    parts.close()
    assert not cut.output.exists() and kept
    parts = prepare(cut)
    assert 0 < score_parts(cut) < len(ROWS)
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    parts.assemble()
    assert pq.read_table("a.parquet").equals(pq.read_table("b.parquet"))


def test_evaluate_writes_metrics_of_each_value(shardwright, run):  # noqa: F811
    write_csv("later.csv", make_rows(200, 3))
    code, out, err = shardwright("evaluate", str(run), "data=later.csv", "--by", "device")
    assert code == 0, err
    assert "log_loss" in out and "device" in out
    assert list((run / "evaluations").glob("*.json"))


MISTAKES = {
    "no such file": (("data=gone.csv", "out=o.csv"), "data=gone.csv: no such file"),
    "another format": (("data=score.csv", "out=o.txt"), "the suffix says the format; allowed: .parquet, .csv"),
    "an unknown key column": (("data=score.csv", "out=o.csv", "keys=sit"), 'has no column "sit"; did you mean "site"'),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_is_a_one_line_error(shardwright, run, case):  # noqa: F811
    args, message = MISTAKES[case]
    code, _, err = shardwright("predict", str(run), *args)
    assert code == 2 and message in err and err.count("\n") == 1
    assert not Path("o.csv").exists()


def test_a_malformed_row_is_named(run):
    Path("bad.csv").write_text(Path("score.csv").read_text() + "a,b\n")
    request = ScoreRequest(run, Path("bad.csv"), Path("o.csv"))
    parts = prepare(request)
    with pytest.raises(UserError, match=r"bad.csv: line 302: .*each gets a score"):
        score_parts(request)
    parts.close()

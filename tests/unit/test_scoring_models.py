"""Files scored and evaluated with models of several tasks, of histories, and of two towers."""

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from shardwright import config
from shardwright.data.features.transforms import Transforms
from shardwright.data.loading.loader import to_batch
from shardwright.errors import UserError
from shardwright.runtime.run.evaluate import evaluate
from shardwright.runtime.run.train import train
from shardwright.serving.export import export_run
from shardwright.serving.predictor import Predictor
from shardwright.serving.scoring.predict import ScoreRequest, prepare, score_parts

SCHEMA = """
label = "clicked"
categories = ["user", "item"]
lists = ["seen", "action"]
histories = {seen = "item"}
sides = {action = "seen"}
history_length = 3
"""
LOG = ("data.kind=log", "data=train.csv", "data.schema=schema.toml", "data.workers=0", "data.encoding.min_count=1")
RUN = (*LOG, "train.batch_size=64", "train.epochs=2", "train.eval_samples=0", "data.split.test=0.0", "run.name=mine")
MODELS = {
    "tasks": {
        "kind": "mmoe",
        "tasks": {"click": {}, "buy": {}},
        "num_experts": 2,
        "expert_hidden": [8],
        "tower_hidden": [4],
    },
    "din": {"kind": "din", "attention": [8], "hidden": [8]},
    "towers": {"kind": "two_tower", "user": ["user"], "item": ["item"], "hidden": [4]},
}


def make_rows(num: int, seed: int) -> list[dict[str, str]]:
    draw, rows = np.random.default_rng(seed), []
    for _ in range(num):
        user, item, length = int(draw.integers(20)), int(draw.integers(30)), int(draw.integers(6))
        seen = "|".join(f"i{value}" for value in draw.integers(0, 30, length))
        action = "|".join(f"a{value}" for value in draw.integers(0, 3, length))
        bought = ("", "0", "1")[draw.integers(3)]
        clicked = str(int((user + item) % 3 == 0))
        rows.append(
            {"user": f"u{user}", "item": f"i{item}", "seen": seen, "action": action, "clicked": clicked, "buy": bought}
        )
    return rows


def write_csv(name: str, rows: list[dict[str, str]], columns: tuple[str, ...]) -> None:
    lines = [",".join(columns), *(",".join(row[column] for column in columns) for row in rows)]
    Path(name).write_text("\n".join(lines) + "\n")


def train_model(kind: str, folder: Path, patch: pytest.MonkeyPatch) -> Path:
    patch.chdir(folder)
    write_csv("train.csv", rows := make_rows(800, 1), tuple(rows[0]))
    extra = 'labels = {buy = "buy"}\n' if kind == "tasks" else ""
    lists = SCHEMA if kind == "din" else "\n".join(SCHEMA.splitlines()[:3])
    Path("schema.toml").write_text(f"{lists}\n{extra}")
    values = config.load("criteo-logistic", RUN).model_dump(exclude_none=True)
    train(config.parse(values | {"model": {"dim": 4, **MODELS[kind]}}, where="test"))
    return Path("runs/mine")


@pytest.mark.parametrize("kind", ["tasks", "din"])
def test_scores_are_the_exports_and_metrics_are_of_each_label(kind, tmp_path, monkeypatch):
    run, rows = train_model(kind, tmp_path, monkeypatch), make_rows(200, 2)
    write_csv("score.csv", rows, ("user", "item", "seen", "action"))
    request = ScoreRequest(run, Path("score.csv"), Path("scores.parquet"), ("user",), 64, 2)
    parts = prepare(request)
    assert score_parts(request) == parts.assemble() == len(rows)
    table = pq.read_table("scores.parquet")
    names = ["score_click", "score_buy"] if kind == "tasks" else ["score"]
    assert table.column_names == ["user", *names]
    export_run(run, Path("export"))
    predictor, transforms = Predictor("export"), Transforms.read(Path("export/transforms"))
    samples = [
        {
            name: row[name].split("|") * bool(row[name]) if name in transforms.schema.lists else row[name]
            for name in ("user", "item", *transforms.schema.lists)
        }
        for row in rows
    ]
    expected = predictor.scores(to_batch(transforms.encode_samples(samples))).numpy().reshape(len(rows), -1)
    assert np.array_equal(np.stack([table[name].to_numpy() for name in names], 1), expected)
    write_csv("later.csv", rows, tuple(rows[0]))
    result, _ = evaluate(run, (), "later.csv", "user")
    assert len(result.by["user"]) == 20
    for name in names:
        task = name.removeprefix("score").removeprefix("_")
        labels = np.array([row["buy" if task == "buy" else "clicked"] or "nan" for row in rows], np.float64)
        scores, is_known = table[name].to_numpy().astype(np.float64), ~np.isnan(labels)
        loss = -(labels * np.log(scores) + (1 - labels) * np.log1p(-scores))[is_known].mean()
        metric = f"{task}.log_loss" if task else "log_loss"
        assert result.metrics[metric] == pytest.approx(loss, abs=1e-6)
        first = result.by["user"][0]
        own = labels[np.array([row["user"] == first["value"] for row in rows])]
        assert first["rows"] == len(own)
        assert first[f"{task}.base_rate" if task else "base_rate"] == pytest.approx(np.nanmean(own))


def test_two_towers_are_evaluated_on_another_file_without_training_positives(tmp_path, monkeypatch):
    run = train_model("towers", tmp_path, monkeypatch)
    write_csv("later.csv", rows := make_rows(200, 2), tuple(rows[0]))
    result, _ = evaluate(run, (), "later.csv")
    assert 0 < result.metrics["recall@10"] <= result.metrics["recall@100"] == 1, "there are 30 items"
    write_csv("known.csv", make_rows(800, 1), tuple(rows[0]))
    seen, _ = evaluate(run, (), "known.csv")
    assert "recall@10" not in seen.metrics, "all positives of the file are positives of training"


def test_a_history_and_its_side_of_other_lengths_are_one_line(tmp_path, monkeypatch):
    run = train_model("din", tmp_path, monkeypatch)
    rows = make_rows(10, 2)
    rows[6] |= {"seen": "i1|i2", "action": "a1"}
    write_csv("score.csv", rows, ("user", "item", "seen", "action"))
    request = ScoreRequest(run, Path("score.csv"), Path("scores.csv"))
    parts = prepare(request)
    with pytest.raises(UserError, match='"action" has 1 ids and "seen" has 2') as error:
        score_parts(request)
    parts.close()
    assert "\n" not in str(error.value)

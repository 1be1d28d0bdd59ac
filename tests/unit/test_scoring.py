"""Files beside the training log, the metric that says which state is best, evaluation of a run, scores of a file."""

import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv as pcsv
import pyarrow.parquet as pq
import pytest
import torch
from fake_gpu import fake_gpu
from rich.console import Console
from test_click_logs import SCHEMA, make_rows

from shardwright import config
from shardwright.checkpoint.step_directories import resolve_best
from shardwright.data.features.row_batches import encode_rows
from shardwright.data.features.transforms import Transforms
from shardwright.data.loading.loader import Loader, to_batch
from shardwright.data.loading.read_ahead import read_ahead
from shardwright.errors import UserError
from shardwright.report.run_record import read_record
from shardwright.runtime.build import build
from shardwright.runtime.planning import plan_for
from shardwright.runtime.run import evaluate_command, recipe
from shardwright.runtime.run.early_stopping import EarlyStopping, check_monitor, is_evaluation_due
from shardwright.runtime.run.evaluate import evaluate
from shardwright.runtime.run.train import train
from shardwright.serving.export import export_run
from shardwright.serving.scoring import predict
from shardwright.serving.scoring.predict import ScoreRequest

LOG = ("data.kind=log", "data=train.csv", "data.schema=schema.toml", "data.workers=0", "train.batch_size=64")
RUN = (
    "train.epochs=0",
    "train.steps=12",
    "train.log_every=4",
    "train.eval_every=4",
    "train.checkpoint_every=0",
    "run.name=mine",
)
FEATURES = ("site", "device", "tags", "age")


def write_csv(name: str, rows: list[dict], columns: tuple[str, ...] = ()) -> Path:
    names = columns or tuple(rows[0])
    lines = [",".join(names), *(",".join(str(row[column]) for column in names) for row in rows)]
    Path(name).write_text("\n".join(lines) + "\n")
    return Path(name)


def to_table(rows: list[dict], columns: tuple[str, ...]) -> pa.Table:
    """The rows as Parquet has them: numbers, lists of tags."""
    return pa.table(
        {
            name: [
                row[name].split("|") * bool(row[name])
                if name == "tags"
                else (None if row[name] == "" else float(row[name]))
                if name == "age"
                else row[name]
                for row in rows
            ]
            for name in columns
        }
    )


def load(*overrides: str, model: str = "dlrm") -> config.Settings:
    return config.load(f"criteo-{model}", (*LOG, "model.dim=4", "model.bottom=[4]", "model.top=[8]", *overrides))


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_csv("train.csv", make_rows(300))
    Path("schema.toml").write_text(SCHEMA)
    return tmp_path


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A run whose best state is not the last."""
    path, before = tmp_path_factory.mktemp("run"), Path.cwd()
    os.chdir(path)
    try:
        write_csv("train.csv", make_rows(300))
        write_csv("test.csv", make_rows(150, 1))
        Path("schema.toml").write_text(SCHEMA)
        train(load("data.test=test.csv", "train.monitor=auc", "train.group=device", *RUN))
    finally:
        os.chdir(before)
    return path / "runs/mine"


# Files beside the log


def test_files_are_held_out_and_nothing_is_learned_from_them(folder):
    alone = recipe.make_source(load("data.split.test=0.0"))
    rows = make_rows(80, 1)
    rows[3]["site"] = "never seen"
    write_csv("a.csv", rows[:50])
    write_csv("b.csv", rows[50:])
    write_csv("valid.csv", make_rows(30, 2))
    source = recipe.make_source(load('data.test=["a.csv","b.csv"]', "data.valid=valid.csv"))
    assert source.size == 300 and repr(source) == repr(alone)
    assert source.transforms.digest == alone.transforms.digest
    assert source.evaluation().size == 30 and source.test().size == 80
    test = source.test().take(np.arange(80)[::-1])
    assert test.labels["click"][::-1].tolist() == [row["click"] for row in rows], "any order, over files"
    sites = test.values[: len(rows)][::-1]
    assert sites[3] == 1, "the row of unknown values"
    assert (source.take(np.arange(300)).values[:300] == alone.take(np.arange(300)).values[:300]).all()


def test_a_share_may_hold_out_what_has_no_file(folder):
    write_csv("test.csv", make_rows(40, 1))
    source = recipe.make_source(load("data.test=test.csv", "data.split.validation=0.1"))
    assert (source.size, source.evaluation().size, source.test().size) == (270, 30, 40)
    source = recipe.make_source(load("data.valid=test.csv", "data.split.test=0.2"))
    assert (source.size, source.evaluation().size, source.test().size) == (240, 40, 60)
    source = recipe.make_source(load("data.test=test.csv"))
    assert (source.size, source.evaluation().size, source.test()) == (300, 40, None)


def test_globs_directories_and_parquet_are_held_out(folder):
    Path("days").mkdir()
    write_csv("days/1.csv", make_rows(10, 1))
    write_csv("days/2.csv", make_rows(20, 2))
    for files in ("days", "days/*.csv"):
        assert recipe.make_source(load(f"data.test={files}")).evaluation().size == 30
    Path("parts").mkdir()
    table = to_table(make_rows(20, 2), (*FEATURES, "click", "w"))
    table = table.set_column(5, "w", pa.array([float(row["w"]) for row in make_rows(20, 2)]))
    pq.write_table(table, "parts/1.parquet")
    text, parquet = (
        recipe.make_source(load(f"data.test={files}")).evaluation().take(np.arange(20))
        for files in ("days/2.csv", "parts")
    )
    for name, array in text.arrays().items():
        np.testing.assert_array_equal(array, parquet.arrays()[name])


@pytest.mark.parametrize(
    "overrides, message",
    [
        (("data.test=other.csv",), 'other.csv: no column "device"'),
        (("data.test=gone.csv",), "data.test=gone.csv: no such file"),
        (("data.valid=*.gone",), r"data.valid=\*.gone: no such file"),
        (("data.test=empty",), "data.test=empty: the directory has no files"),
        (("data.test=train.csv", "data.split.test=0.1"), "data.test and data.split.test=0.1: drop one"),
        (
            ("data.kind=movielens", "data.test=train.csv"),
            "data.test is for data.kind=criteo, avazu, log, not movielens",
        ),
        (("data.kind=synthetic", "data.valid=train.csv"), "data.valid is for .*, not synthetic; drop it"),
    ],
)
def test_wrong_files_are_named(folder, overrides, message):
    write_csv("other.csv", make_rows(5), ("click", "age", "site", "tags", "w"))
    Path("empty").mkdir()
    with pytest.raises(UserError, match=message):
        recipe.make_source(load(*overrides))


# The best state


def test_the_metric_of_the_monitor_says_what_is_better():
    stopping = EarlyStopping(2, "auc")
    assert [stopping.update(value, step) for step, value in enumerate((0.5, 0.7, 0.6, 0.7))] == [
        True,
        True,
        False,
        False,
    ]
    assert stopping.should_stop and stopping.best_step == 1
    assert EarlyStopping(1).metric_of({"loss": 1.0, "ne": 2.0}) == ("ne", 2.0)
    assert EarlyStopping(1).metric_of({"loss": 1.0}) == ("loss", 1.0)
    with pytest.raises(UserError, match="step 3: the evaluation has no auc"):
        stopping.metric_of({"loss": 1.0, "step": 3})


@pytest.mark.parametrize(
    "overrides, message",
    [
        (("train.monitor=acu",), 'train.monitor=acu is not a metric of evaluations; did you mean "auc"'),
        (("train.monitor=grouped_auc",), "needs groups; set train.group"),
        (("train.monitor=auc", "train.eval_samples=0"), "train.monitor=auc needs evaluations"),
        (("train.monitor=auc", "train.publish_every=5"), "train.monitor=auc restores the best state"),
        (("train.eval_epochs=1", "train.eval_every=5"), "to evaluate in epochs, set train.eval_every=0"),
    ],
)
def test_wrong_keys_of_evaluations_are_named(overrides, message):
    with pytest.raises(UserError, match=message):
        load(*overrides)


def test_a_metric_that_the_model_lacks_is_refused(folder):
    with pytest.raises(UserError, match="train.monitor=accuracy: a model with BinaryLoss has no such metric"):
        recipe.make_model(settings := load("train.monitor=accuracy"), recipe.make_source(settings))
    check_monitor("loss", torch.nn.Module())
    with pytest.raises(UserError, match="train.eval_epochs=1: this source has no end"):
        settings = config.load("synthetic-dlrm", ("train.eval_epochs=1", "train.eval_every=0"))
        recipe.epochs_to_steps(settings, recipe.make_source(settings))


def test_evaluations_are_due_at_the_ends_of_epochs():
    train_settings = load("train.eval_epochs=2", "train.accumulate=3").train
    due = [step for step in range(1, 20) if is_evaluation_due(step, train_settings, 5)]
    assert due == [4, 7, 10, 14, 17], "the steps in which batches 10, 20, 30, 40 and 50 are"
    every = train_settings.model_copy(update={"eval_every": 4})
    assert [step for step in range(1, 13) if is_evaluation_due(step, every, 5)] == [4, 8, 12]


def test_the_best_and_the_last_checkpoint_are_named(run):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    evaluations = {line["step"]: line["auc"] for line in lines if line["kind"] == "eval"}
    named = json.loads((run / "checkpoints.json").read_text())
    best = max(evaluations, key=evaluations.__getitem__)
    assert named["best"] == {"path": f"best/step-{best:08d}", "auc": evaluations[best]}
    assert named["last"] == {"path": "checkpoint/step-00000012"} and sorted(evaluations) == [4, 8, 12]
    assert resolve_best(run) == run / named["best"]["path"]
    assert resolve_best(run / "checkpoint") == run / named["last"]["path"]


def test_a_run_without_a_test_part_ends_with_the_metrics_of_its_best_state(folder):
    result = train(load(*RUN, "train.monitor=loss", "tables.lr=3.0", "dense.lr=0.3", "data.split.test=0.2"))
    lines = [json.loads(line) for line in (result.path / "metrics.jsonl").read_text().splitlines()]
    evals = [line for line in lines if line["kind"] == "eval"]
    best = min(evals, key=lambda line: line["loss"])
    assert best["step"] < 12, "the last state is not the best"
    assert result.evaluation == best and result.step == best["step"]
    metrics = read_record(result.path).metrics
    assert metrics.final is not None and (metrics.final.step, metrics.final.loss) == (best["step"], best["loss"])
    resumed = EarlyStopping(1, "loss")
    resumed.load_state_dict({"best": 1.0, "best_step": 4, "waited": 0})  # of an older checkpoint
    assert not resumed.best_evaluation


def test_a_group_that_the_data_lack_is_refused(folder):
    with pytest.raises(UserError, match='train.group="sit": the data have no such feature; did you mean "site"'):
        recipe.make_model(settings := load("train.group=sit"), recipe.make_source(settings))


# Evaluation of a run


def test_an_evaluation_repeats_the_metrics_of_training(run, monkeypatch):
    monkeypatch.chdir(run.parents[1])
    result, path = evaluate(run, (), by="site")
    assert path.name == f"step-{result.step:08d}-by-site.json"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    (trained,) = (line for line in lines if line["kind"] == "eval" and line["step"] == result.step)
    for name in ("loss", "log_loss", "ne", "auc", "grouped_auc"):
        assert result.metrics[name] == trained[name], name
    assert result.rows == 150 and json.loads(path.read_text())["metrics"] == result.metrics
    rows = make_rows(150, 1)
    for column in ("site", "device"):
        values = {each["value"]: each for each in result.by[column]}
        assert {value: each["rows"] for value, each in values.items()} == {
            name or "(missing)": sum(row[column] == name for row in rows) for name in {row[column] for row in rows}
        }
        for name, each in values.items():
            labels = [row["click"] for row in rows if (row[column] or "(missing)") == name]
            assert each["base_rate"] == pytest.approx(np.mean(labels))
    last, _ = evaluate(run / "checkpoint", ())
    assert last.step == 12


def test_labels_of_one_class_are_named(run, monkeypatch):
    monkeypatch.chdir(run.parents[1])
    write_csv("ones.csv", [row | {"click": 1} for row in make_rows(20)])
    result, path = evaluate(run, (), data="ones.csv")
    console = Console(record=True, width=120)
    evaluate_command._print(console, result, path)
    assert "the label has the same value in all rows: no NE, no AUC" in console.export_text()
    evaluate_command._print(console, evaluate(run)[0], path)
    assert "no AUC" not in console.export_text()


def test_a_run_is_evaluated_on_another_file(run, monkeypatch):
    monkeypatch.chdir(run.parents[1])
    same, path = evaluate(run, (), data="test.csv")
    assert same.metrics == evaluate(run)[0].metrics and path.name.endswith("-test.csv.json")
    write_csv("other.csv", make_rows(5), ("click", "age", "site", "tags", "w"))
    with pytest.raises(UserError, match='other.csv: no column "device"'):
        evaluate(run, (), data="other.csv")
    with pytest.raises(UserError, match='by="sit" is no category column; did you mean "site"'):
        evaluate(run, (), by="sit")


# Scores of a file


def score(request: ScoreRequest, size: int = 1) -> Path:
    parts = predict.prepare(request)
    for rank in range(size):
        predict.score_parts(request, rank, size)
    parts.assemble()
    return request.output


def make_request(run: Path, rows: list[dict], output: str, **changes) -> ScoreRequest:
    data = write_csv("score.csv", rows, (*FEATURES, "time"))
    return ScoreRequest(
        run, data, Path(output), **{"keys": ("time", "site"), "block_rows": 64, "part_blocks": 2, **changes}
    )


def trainer_scores(run: Path, rows: list[dict]) -> np.ndarray:
    """Scores of the job that trains, with the best state, in batches of the blocks."""
    settings = config.load(str(run / "config.toml"))
    transforms = Transforms.read(run / "transforms")
    model = recipe.make_model(settings, transforms)
    source = recipe.make_source(settings)
    job = build(
        model, plan_for(model, Loader(source, batch_size=64).peek()), optimizer=recipe.make_dense_optimizer(settings)
    )
    job.load(resolve_best(run))
    samples = [
        {
            "age": None if row["age"] == "" else float(row["age"]),
            **{name: row[name] for name in ("site", "device")},
            "tags": row["tags"].split("|") * bool(row["tags"]),
        }
        for row in rows
    ]
    scores = []
    for start in range(0, len(samples), 64):
        batch = to_batch(transforms.encode_samples(samples[start : start + 64]))
        (output,) = job.evaluate([batch])
        scores.append(output.logits.sigmoid().numpy())
    return np.concatenate(scores)


def test_scores_are_those_of_training_and_of_the_export_to_the_bit(run, tmp_path, monkeypatch):
    monkeypatch.chdir(run.parents[1])
    rows = make_rows(300, 5)
    rows[7]["site"] = "never seen"
    parquet = score(make_request(run, rows, str(tmp_path / "o.parquet")))
    table = pq.read_table(parquet)
    assert table.column_names == ["time", "site", "score"]
    assert table["time"].to_pylist() == [row["time"] for row in rows]
    np.testing.assert_array_equal(table["score"].to_numpy(), trainer_scores(run, rows))
    export_run(run, tmp_path / "served")
    exported = score(make_request(tmp_path / "served", rows, str(tmp_path / "e.parquet")))
    assert exported.read_bytes() == parquet.read_bytes()
    csv = pcsv.read_csv(score(make_request(run, rows, str(tmp_path / "o.csv"))))
    assert csv.column_names == table.column_names and len(csv) == 300
    np.testing.assert_array_equal(csv["score"].to_numpy().astype(np.float32), table["score"].to_numpy())
    assert not list(tmp_path.glob(".*.parts"))


def test_parquet_and_quoted_text_score_alike(run, tmp_path, monkeypatch):
    monkeypatch.chdir(run.parents[1])
    rows = make_rows(200, 5)
    plain = pq.read_table(score(make_request(run, rows, str(tmp_path / "o.parquet"))))
    table = to_table(rows, FEATURES).append_column("time", pa.array([int(row["time"]) for row in rows]))
    Path("in").mkdir()
    pq.write_table(table[:150], "in/1.parquet")
    pq.write_table(table[150:], "in/2.parquet")
    other = replace(make_request(run, rows, str(tmp_path / "p.parquet")), data=Path("in"), keys=("time",))
    scored = pq.read_table(score(other))
    assert scored["time"].to_pylist() == [int(row["time"]) for row in rows], "keys keep their type"
    np.testing.assert_allclose(scored["score"].to_numpy(), plain["score"].to_numpy(), rtol=1e-6)  # other batches
    quoted = [{**row, "time": '"a ""b"",\nc"'} for row in rows]
    keys = pq.read_table(score(make_request(run, quoted, str(tmp_path / "q.parquet"))))
    assert set(keys["time"].to_pylist()) == {'a "b",\nc'}
    np.testing.assert_array_equal(keys["score"].to_numpy(), plain["score"].to_numpy())


@pytest.mark.parametrize("suffix", [".parquet", ".csv"])
def test_several_processes_write_the_bytes_of_one(run, tmp_path, monkeypatch, suffix):
    monkeypatch.chdir(run.parents[1])
    rows = make_rows(500, 5)
    one = score(make_request(run, rows, str(tmp_path / f"1{suffix}")))
    for size in (2, 3):
        assert score(make_request(run, rows, str(tmp_path / f"{size}{suffix}")), size).read_bytes() == one.read_bytes()


def test_a_killed_job_continues_with_its_complete_parts(run, tmp_path, monkeypatch):
    monkeypatch.chdir(run.parents[1])
    rows = make_rows(500, 5)
    whole = score(make_request(run, rows, str(tmp_path / "whole.csv")))
    request = replace(make_request(run, rows, str(tmp_path / "cut.csv")), data=Path("score.csv"))
    parts = predict.prepare(request)

    def die(read: int, num_rows: int) -> None:
        if num_rows >= 300:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        predict.score_parts(request, show=die)
    parts.close()
    assert not request.output.exists() and parts.num_complete == 2
    half_written = parts.path(2).with_name(f".{parts.path(2).name}.draft")
    half_written.write_text("half a li")
    kept = {path: path.stat().st_mtime_ns for path in parts.directory.glob("part-*")}
    resumed = predict.prepare(request)
    assert predict.score_parts(request) == 500 - 2 * 128
    assert all(path.stat().st_mtime_ns == time for path, time in kept.items()) and resumed.num_complete == 4
    assert predict.score_parts(request) == 0, "all parts are complete"
    resumed.assemble()
    assert request.output.read_bytes() == whole.read_bytes()


def test_scores_of_a_dense_model_on_a_gpu_equal_those_on_the_cpu(run, tmp_path, monkeypatch):
    """On a fake GPU: the program is moved, and gets the rows of tables from host memory."""
    monkeypatch.chdir(run.parents[1])
    rows = make_rows(100, 5)
    expected = pq.read_table(score(make_request(run, rows, str(tmp_path / "cpu.parquet"))))
    with fake_gpu():
        actual = pq.read_table(score(make_request(run, rows, str(tmp_path / "gpu.parquet"), device="cuda")))
    assert actual.column_names == expected.column_names
    assert np.allclose(actual["score"].to_numpy(), expected["score"].to_numpy(), rtol=1e-5)
    with pytest.raises(UserError, match="torch sees no GPU"):
        score(make_request(run, rows, str(tmp_path / "none.parquet"), device="cuda"))


def test_parts_of_another_job_are_not_used(run, tmp_path, monkeypatch):
    monkeypatch.chdir(run.parents[1])
    request = make_request(run, make_rows(500, 5), str(tmp_path / "o.csv"))
    parts = predict.prepare(request)
    with pytest.raises(UserError, match="another process writes it"):
        predict.prepare(request)
    predict.score_parts(request)
    parts.close()
    changed = predict.prepare(replace(request, keys=("site",)))
    assert changed.num_complete == 0 and changed.read_total() is None
    changed.close()
    output = score(make_request(run, make_rows(10, 6), str(tmp_path / "o.csv")))
    with pytest.raises(UserError, match="exists; remove it"):
        predict.prepare(replace(request, output=output))


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"keys": ("tim",)}, 'keys=tim: .*score.csv has no column "tim"; did you mean "time"'),
        ({"keys": ("time", "time")}, "a name is given twice"),
        ({"data": Path("gone.csv")}, "data=gone.csv: no such file"),
        ({"data": Path("few.csv")}, 'few.csv: no column "device"'),
        ({"data": Path("bad.csv")}, 'bad.csv: line 3: column "age": .x. is not a number; fix the row'),
        ({"data": Path("none.csv"), "keys": ()}, "data=none.csv: the file has no rows"),
        ({"output": Path("o.txt")}, "out=o.txt: the suffix says the format; allowed: .parquet, .csv"),
    ],
)
def test_wrong_requests_are_named(run, tmp_path, monkeypatch, changes, message):
    monkeypatch.chdir(run.parents[1])
    rows = make_rows(4)
    write_csv("few.csv", rows, ("age", "site", "tags", "time"))
    write_csv("bad.csv", [rows[0], {**rows[1], "age": "x"}])
    Path("none.csv").write_text(",".join(rows[0]) + "\n")
    request = replace(make_request(run, rows, str(tmp_path / "o.parquet")), **changes)
    with pytest.raises(UserError, match=message):
        score(request)
    assert not request.output.exists()


def test_a_run_without_a_log_has_no_file_to_score(folder):
    small = ("train.steps=1", "train.eval_samples=0", "train.batch_size=8", "data.workers=0", "run.name=s")
    train(config.load("synthetic-logistic", small))
    with pytest.raises(UserError, match="its data are no click log"):
        score(ScoreRequest(Path("runs/s"), Path("train.csv"), Path("o.csv")))


def test_a_file_without_header_may_lack_its_label(folder, monkeypatch):
    rows = ["\t".join((str(i % 2), *["3"] * 13, *["0a1b2c3d"] * 26)) for i in range(40)]
    Path("train.tsv").write_text("\n".join(rows) + "\n")
    settings = ("data=train.tsv", "data.workers=0", "train.batch_size=8", "train.epochs=1", "run.name=c")
    train(config.load("criteo-logistic", settings))
    Path("score.tsv").write_text("\n".join(row.partition("\t")[2] for row in rows) + "\n")
    scores = [
        pq.read_table(score(ScoreRequest(Path("runs/c"), Path(name), Path(f"{name}.parquet"), keys=("I1",))))
        for name in ("train.tsv", "score.tsv")
    ]
    assert scores[0].equals(scores[1]) and scores[0]["I1"].to_pylist() == ["3"] * 40


def test_rows_are_transformed_as_requests_are(run):
    transforms = Transforms.read(run / "transforms")
    predictor_batch = transforms.encode_samples([{"site": "s1", "tags": ["t1", "t2"], "age": 3}, {}])
    codes = {name: np.zeros(2, np.uint64) for name in transforms.schema.categories}
    lists = {"tags": (np.empty(0, np.uint64), np.zeros(3, np.int32))}
    (batch,) = encode_rows(transforms, {**codes, **lists, "age": np.full(2, np.nan, np.float32)}, 2, 8)
    assert batch.features == predictor_batch.features and batch.lengths.dtype == predictor_batch.lengths.dtype
    np.testing.assert_array_equal(batch.lengths[:, 1], predictor_batch.lengths[:, 1])


def test_reading_ahead_keeps_order_and_raises_the_readers_error():
    def items():
        yield from range(10)
        raise UserError("damaged")

    seen = []
    with pytest.raises(UserError, match="damaged"):
        seen.extend(iter(read_ahead(items(), 2)))
    assert list(read_ahead(iter(range(5)), 1)) == list(range(5))
    endless = read_ahead(iter(int, 1), 1)
    assert next(endless) == 0
    endless.close()

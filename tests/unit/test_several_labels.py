"""Click logs with several labels: schema, conversion of text and Parquet, missing values, a run, and its export."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from shardwright import config
from shardwright.data.features.transforms import Encoding, Transforms
from shardwright.data.loading.loader import to_batch
from shardwright.data.logs.click_log import open_log
from shardwright.data.logs.schema import SCHEMAS, Schema, read_schema
from shardwright.data.logs.summary import format_inspection, inspect_log
from shardwright.data.sources.clicks import ClickLog
from shardwright.errors import UserError
from shardwright.layers.loss import BinaryLoss
from shardwright.runtime.run import recipe
from shardwright.runtime.run.train import train
from shardwright.serving.export import export_run
from shardwright.serving.predictor import Predictor

NAN = float("nan")
SCHEMA = """
label = "clicked"
numbers = ["price"]
categories = ["site"]
labels = {buy = "bought", watched = "seconds"}
positives = {watched = 30.0}
"""
# clicked, bought, seconds, price, site
ROWS = [("1", "1", "29.5", "2.5", "a"), ("0", "", "30", "1.0", "b"), ("1", "0", "", "", "a"), ("0", "1", "-4", "3", "")]
EXPECTED = {"click": [1, 0, 1, 0], "buy": [1, NAN, 0, 1], "watched": [0, 1, NAN, 0]}
NAMES = ("clicked", "bought", "seconds", "price", "site")


def write_text(path: Path, rows) -> Path:
    path.write_text("\n".join([",".join(NAMES), *(",".join(row) for row in rows)]) + "\n")
    return path


def write_parquet(path: Path, rows) -> Path:
    columns = {name: list(values) for name, values in zip(NAMES, zip(*rows, strict=True), strict=True)}
    for name in NAMES[:4]:
        columns[name] = [float(value) if value else None for value in columns[name]]
    pq.write_table(pa.table(columns), path)
    return path


def open_rows(folder: Path, rows=ROWS, schema: str = SCHEMA, write=write_text, **options) -> ClickLog:
    (folder / "schema.toml").write_text(schema)
    path = write(folder / ("log.parquet" if write is write_parquet else "log.csv"), rows)
    options = {"split": {"test": 0.0}, "encoding": {"min_count": 1}, "cache": str(folder / "cache"), **options}
    return open_log("log", str(path), schema=str(folder / "schema.toml"), **options)


@pytest.mark.parametrize("write", [write_text, write_parquet])
def test_labels_reach_the_batch_and_a_missing_one_is_nan(tmp_path, write):
    log = open_rows(tmp_path, write=write)
    labels = log.take(np.arange(4)).labels
    assert labels.keys() == EXPECTED.keys()
    for name, expected in EXPECTED.items():
        np.testing.assert_array_equal(labels[name], np.array(expected, np.float32), name)
    assert log.features == (("site", 4, False),) and log.num_dense == 1, "labels are no features"
    assert log.training_statistics.labels == {"click": (4, 0.5), "buy": (3, 2 / 3), "watched": (3, 1 / 3)}
    assert log.base_rates == {"click": 0.5, "buy": 2 / 3, "watched": 1 / 3}


def test_every_label_may_be_missing_where_all_are_named(tmp_path):
    schema = 'labels = {click = "clicked", buy = "bought"}\ncategories = ["site"]\n'
    log = open_rows(tmp_path, [("", "1", "1", "1", "a"), ("1", "", "1", "1", "b"), ("", "", "1", "1", "b")], schema)
    labels = log.take(np.arange(3)).labels
    np.testing.assert_array_equal(labels["click"], np.array([NAN, 1, NAN], np.float32))
    np.testing.assert_array_equal(labels["buy"], np.array([1, NAN, NAN], np.float32))


def test_the_categories_of_a_star_exclude_labels(tmp_path):
    log = open_rows(tmp_path, schema='label = "clicked"\nlabels = {buy = "bought"}\ncategories = ["*"]\n')
    assert [name for name, *_ in log.features] == ["seconds", "price", "site"]


def test_inspect_shows_the_rate_of_each_label(tmp_path):
    _, _, facts = next(format_inspection(inspect_log(open_rows(tmp_path))))
    assert ("base rate of buy", "0.6667, of 75.0% of the rows") in facts and "base rate" not in dict(facts)


def test_a_label_with_one_value_is_a_warning(tmp_path):
    rows = [("1", "0", "1", "1", "a"), ("0", "", "31", "1", "b"), ("0", "0", "1", "1", "b")]
    warning = open_rows(tmp_path, rows).training_statistics.warning
    assert warning.startswith('label "buy": all 2 that the 3 training rows have are 0: nothing can be learned')


@pytest.mark.parametrize("write", [write_text, write_parquet])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({1: ""}, 'label "buy": column "bought" is empty in all 4 rows; drop it from `labels` in the schema'),
        ({1: "0.5"}, r'label "buy": column "bought" has 0.5; wanted 0, 1 or nothing; or set positives.buy'),
    ],
)
def test_wrong_labels_of_a_log_are_one_line(tmp_path, write, change, message):
    rows = [tuple(change.get(column, value) for column, value in enumerate(row)) for row in ROWS]
    for _ in range(2):  # also from the cache
        with pytest.raises(UserError, match=message) as error:
            open_rows(tmp_path, rows, write=write)
        assert "\n" not in str(error.value)


def test_a_label_that_is_no_number_is_a_malformed_row(tmp_path):
    with pytest.raises(UserError, match=r'line 2: column "bought": \'yes\' is not a number'):
        open_rows(tmp_path, [("1", "yes", "1", "1", "a"), *ROWS])


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ('categories = ["site"]', "no label: give `label`, the column of clicks, or `labels`"),
        ('label = "a"\nlabels = {click = "b"}\nnumbers = ["c"]', 'both name the column of the label "click"'),
        ('label = "a"\nlabels = {"b.c" = "b"}\nnumbers = ["c"]', '"b.c" is not a name of letters'),
        ('label = "a"\nlabels = {buy = "a"}\nnumbers = ["c"]', '"a"'),
        ('label = "a"\nlabels = {buy = "b"}\npositives = {buyed = 1.0}\nnumbers = ["c"]', '"buyed" is not in labels'),
        ('labels = {buy = "b"}\npositive = 1.0\nnumbers = ["c"]', "positive is of `label`, which is not given"),
    ],
)
def test_wrong_schemas_are_named(tmp_path, schema, message):
    (tmp_path / "wrong.toml").write_text(schema)
    with pytest.raises(UserError, match=message):
        read_schema(str(tmp_path / "wrong.toml"))


def test_caches_and_digests_of_single_labels_are_as_before():
    """Converted logs are found again, and publications of earlier exports are accepted."""
    assert Transforms(SCHEMAS["criteo"], Encoding(), {}, {}).digest == "16a8d7e888d0a950"
    assert not {"labels", "positives"} & SCHEMAS["avazu"].plain().keys()
    several = Schema(label="a", numbers=("c",), labels={"buy": "b"})
    other = Schema(label="a", numbers=("c",), labels={"buy": "d"})
    assert Transforms(several, Encoding(), {}, {}).digest != Transforms(other, Encoding(), {}, {}).digest


RECIPE = """
[data]
kind = "log"
path = "{folder}/log.csv"
schema = "{folder}/schema.toml"
cache = "{folder}/cache"
workers = 0

[model]
kind = "mmoe"
dim = 4
num_experts = 2
expert_hidden = [8]
tower_hidden = [4]

[model.tasks]
ctr = {{label = "click"}}
buy = {{weight = 0.5}}

[tables]
kind = "adagrad"
lr = 0.05

[train]
batch_size = 64
epochs = 1
eval_every = 0

[run]
directory = "{folder}"
name = "run"
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder, draw = tmp_path_factory.mktemp("labels"), np.random.default_rng(1)
    rows = [
        (str(draw.integers(2)), ("", "0", "1")[draw.integers(3)], "1", f"{draw.random():.3f}", f"s{draw.integers(5)}")
        for _ in range(700)
    ]
    write_text(folder / "log.csv", rows)
    (folder / "schema.toml").write_text(
        'label = "clicked"\nlabels = {buy = "bought"}\nnumbers = ["price"]\ncategories = ["site"]\n'
    )
    (folder / "recipe.toml").write_text(RECIPE.format(folder=folder))
    return folder


def test_a_run_on_a_log_trains_all_tasks_and_its_export_answers_them(folder):
    settings = config.load(str(folder / "recipe.toml"))
    train(settings)
    lines = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    evaluation = next(line for line in lines if line["kind"] in ("eval", "test"))
    assert {"loss", "ctr.ne", "ctr.auc", "buy.ne", "buy.calibration"} <= evaluation.keys() and "ne" not in evaluation
    export_run(folder / "run", folder / "export")
    predictor = Predictor(folder / "export")
    held_out = recipe.make_source(settings).evaluation()  # pyright: ignore[reportAttributeAccessIssue]
    rows = to_batch(held_out.take(np.arange(held_out.size)))
    scores = predictor.scores(rows)
    for task, (prefix, label) in enumerate((("ctr.", "click"), ("buy.", "buy"))):
        labels = rows.labels[label]
        known = ~labels.isnan()
        p, y = scores[known, task].double(), labels[known].double()
        log_loss = -(y * p.log() + (1 - y) * (1 - p).log()).mean()
        assert evaluation[f"{prefix}log_loss"] == pytest.approx(float(log_loss), abs=1e-6)
    _, answers = predictor.answer([{"site": "s1", "price": 0.5}, {}])
    assert [[*answer] for answer in answers] == [["ctr", "buy"]] * 2
    assert all(isinstance(score, float) for answer in answers for score in answer.values())


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.tasks.buy.label=bougth", 'task "buy": the data have no label "bougth"'),
        (
            "model.tasks.shared_it.weight=1.0",
            'task "shared_it": the data have no label "shared_it"; allowed: buy, click',
        ),
        ("model.tasks.buy.lable=buy", "model.tasks.buy.lable is unknown"),
    ],
)
def test_wrong_tasks_of_a_recipe_are_one_line(folder, override, message):
    settings = config.load(str(folder / "recipe.toml"), [override, "run.name=wrong"])
    with pytest.raises(UserError, match=message) as error:
        train(settings)
    assert "\n" not in str(error.value)


def test_a_model_of_one_label_trains_on_a_log_with_missing_others(folder):
    values = config.load(str(folder / "recipe.toml")).model_dump(exclude_none=True)
    values["model"], values["run"]["name"] = {"kind": "logistic"}, "single"
    train(config.parse(values, where="test"))
    lines = [json.loads(line) for line in (folder / "single/metrics.jsonl").read_text().splitlines()]
    assert "ne" in next(line for line in lines if line["kind"] in ("eval", "test"))


def test_a_missing_label_is_an_error_for_a_loss_that_needs_it(tmp_path):
    schema = 'labels = {click = "clicked"}\nnumbers = ["price"]\ncategories = ["site"]\n'
    rows = to_batch(open_rows(tmp_path, [("1", "", "", "1", "a"), ("", "", "", "2", "b")], schema).take(np.arange(2)))
    with pytest.raises(UserError, match='label "click": sample 1 is nan; a label is 0 or 1'):
        BinaryLoss()(torch.zeros(2), rows)

"""Feature transforms: a click log in training and samples of requests become the same rows."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.data.features.transforms import Encoding, Transforms
from shardwright.data.logs.click_log import open_log
from shardwright.data.logs.schema import Schema
from shardwright.data.sources.source import NumpyBatch
from shardwright.errors import UserError

SCHEMA = """label = "click"
numbers = ["age", "price"]
categories = ["site", "device"]
lists = ["tags"]
tail = [["device", 2]]
"""
SITES = ("news", "", "sport, and more", "é", "x" * 50)


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict]]:
    folder, rng = tmp_path_factory.mktemp("log"), np.random.default_rng(0)
    rows = [
        {
            "click": int(rng.integers(2)),
            "age": None if rng.random() < 0.2 else int(rng.integers(-3, 90)),
            "price": round(float(rng.normal()), 3),
            "site": str(rng.choice(SITES)),
            "device": int(rng.integers(100, 130)),
            "tags": [str(tag) for tag in rng.integers(0, 9, rng.integers(4))],
        }
        for _ in range(400)
    ]
    lines = ["click,age,price,site,device,tags"]
    for row in rows:
        age = "" if row["age"] is None else row["age"]
        lines.append(f'{row["click"]},{age},{row["price"]},"{row["site"]}",{row["device"]},{"|".join(row["tags"])}')
    (folder / "log.csv").write_text("\n".join(lines) + "\n")
    (folder / "schema.toml").write_text(SCHEMA)
    return folder, rows


def open_click_log(folder: Path, **encoding: object):
    options = {"cache": str(folder / "cache"), "split": {"test": 0.0}, "encoding": {"min_count": 2, **encoding}}
    return open_log("log", str(folder / "log.csv"), schema=str(folder / "schema.toml"), **options)


def assert_same(actual: NumpyBatch, expected: NumpyBatch) -> None:
    assert actual.features == expected.features
    for name in ("values", "lengths", "dense"):
        np.testing.assert_array_equal(getattr(actual, name), getattr(expected, name))


@pytest.mark.parametrize("encoding", [{}, {"rows": 50}, {"buckets": True, "log": False}])
def test_samples_of_requests_are_encoded_as_the_log(log, encoding) -> None:
    folder, rows = log
    source = open_click_log(folder, **encoding)
    samples = [{name: value for name, value in row.items() if name != "click"} for row in rows]
    assert_same(source.transforms.encode_samples(samples), source.take(np.arange(400)))
    without_missing = [{name: value for name, value in row.items() if value not in (None, "", [])} for row in samples]
    assert_same(source.transforms.encode_samples(without_missing), source.take(np.arange(400)))
    assert source.transforms.encode_samples([]).values.size == 0


BLANK_ITEMS = [["a", "", "b"], [""], [], ["", ""], ["b", ""], ["a"], None]


@pytest.mark.parametrize("encoding", [{"min_count": 1}, {"rows": 50}])
def test_blank_items_of_a_list_are_dropped_by_every_reader_and_by_requests(tmp_path: Path, encoding) -> None:
    (tmp_path / "schema.toml").write_text('label = "click"\nlists = ["tags"]\n')
    tags = [",".join(f'"{tag}"' for tag in row or ()) for row in BLANK_ITEMS]
    lines = [f"{i % 2},{'|'.join(row or ())}" for i, row in enumerate(BLANK_ITEMS)]
    (tmp_path / "log.csv").write_text("click,tags\n" + "\n".join(lines) + "\n")
    clicks = pa.array([i % 2 for i in range(len(tags))])
    lists = pa.array([None if row is None else [tag or None for tag in row] for row in BLANK_ITEMS])
    texts = pa.array(BLANK_ITEMS)
    for name, column in (("nulls", lists), ("empty", texts)):
        pq.write_table(pa.table({"click": clicks, "tags": column}), tmp_path / f"{name}.parquet")
    samples = [{"tags": row} for row in BLANK_ITEMS]
    expected = [2, 0, 0, 0, 1, 1, 0]
    batches = []
    for name in ("log.csv", "nulls.parquet", "empty.parquet"):
        options = {"schema": str(tmp_path / "schema.toml"), "cache": str(tmp_path / "cache"), "split": {"test": 0.0}}
        source = open_log("log", str(tmp_path / name), encoding=encoding, **options)
        batches += [source.take(np.arange(len(BLANK_ITEMS))), source.transforms.encode_samples(samples)]
        null_samples = [{"tags": row and [tag or None for tag in row]} for row in BLANK_ITEMS]
        batches.append(source.transforms.encode_samples(null_samples))
    for rows in batches:
        assert rows.lengths.tolist() == [expected] and 0 not in rows.values
        assert_same(rows, batches[0])


def test_transforms_are_written_and_read_back(log, tmp_path: Path) -> None:
    transforms = open_click_log(log[0]).transforms
    transforms.write(tmp_path)
    read_back = Transforms.read(tmp_path)
    samples = [{name: value for name, value in row.items() if name != "click"} for row in log[1][:50]]
    assert_same(read_back.encode_samples(samples), transforms.encode_samples(samples))
    assert read_back.features == transforms.features
    text = (tmp_path / "transforms.json").read_text()
    (tmp_path / "transforms.json").write_text(json.dumps({**json.loads(text), "version": 7}))
    with pytest.raises(UserError, match=r"version 7; this Shardwright reads version 1"):
        Transforms.read(tmp_path)
    (tmp_path / "transforms.json").write_text(text)
    (tmp_path / "vocabularies.npz").write_bytes(b"PK")
    with pytest.raises(UserError, match=r"vocabularies.npz: cannot be read"):
        Transforms.read(tmp_path)


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        ({"sites": "news"}, 'sample 1: unknown key "sites"; did you mean "site"'),
        ({"click": 1}, 'sample 1: unknown key "click"'),
        ({"age": "old"}, "sample 1: \"age\" is 'old'; wanted a number, or null"),
        ({"age": True}, 'sample 1: "age" is True; wanted a number'),
        ({"age": 1e300}, 'sample 1: "age" is 1e+300, which does not fit a float32'),
        ({"age": 10**400}, "which does not fit a float32"),
        ({"age": float("inf")}, 'sample 1: "age" is inf, which does not fit a float32'),
        ({"site": 1.5}, 'sample 1: "site" is 1.5; wanted text or a whole number, or null'),
        ({"site": ["news"]}, "wanted text or a whole number, or null"),
        ({"tags": "news"}, "sample 1: \"tags\" is 'news'; wanted a list of texts, or null"),
        ({"tags": ["a", {}]}, 'sample 1: "tags" is {}; wanted text or a whole number'),
    ],
)
def test_errors_in_samples_name_the_wrong_value(log, sample, message) -> None:
    with pytest.raises(UserError) as error:
        open_click_log(log[0]).transforms.encode_samples([{}, sample])
    assert message in str(error.value)


VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=9), st.lists(st.text(max_size=3), max_size=3)
)


@settings(max_examples=200)
@given(st.lists(st.dictionaries(st.sampled_from(["a", "b", "c", "d"]), VALUES, max_size=4), max_size=4))
def test_any_sample_becomes_rows_or_a_one_line_error(samples) -> None:
    schema = Schema(label="y", categories=("a", "b"), lists=("c",))
    transforms = Transforms(schema, Encoding(rows=10), {}, {})
    try:
        rows = transforms.encode_samples(samples)
    except UserError as error:
        assert str(error).startswith("sample ") and "\n" not in str(error)
        return
    assert rows.lengths.shape == (3, len(samples)) and rows.lengths.sum() == len(rows.values)
    assert ((rows.values >= 0) & (rows.values < 10)).all()

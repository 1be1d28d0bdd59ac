"""What a log's values become: alike for a log that is trained on and for samples that are asked about."""

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
    folder, draw = tmp_path_factory.mktemp("log"), np.random.default_rng(0)
    rows = [
        {
            "click": int(draw.integers(2)),
            "age": None if draw.random() < 0.2 else int(draw.integers(-3, 90)),
            "price": round(float(draw.normal()), 3),
            "site": str(draw.choice(SITES)),
            "device": int(draw.integers(100, 130)),
            "tags": [str(tag) for tag in draw.integers(0, 9, draw.integers(4))],
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


def opened(folder: Path, **encoding: object):
    how = {"cache": str(folder / "cache"), "split": {"test": 0.0}, "encoding": {"min_count": 2, **encoding}}
    return open_log("log", str(folder / "log.csv"), schema=str(folder / "schema.toml"), **how)


def same(one: NumpyBatch, other: NumpyBatch) -> None:
    assert one.features == other.features
    for name in ("values", "lengths", "dense"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name))


@pytest.mark.parametrize("encoding", [{}, {"rows": 50}, {"buckets": True, "log": False}])
def test_samples_that_are_asked_about_become_what_the_log_became(log, encoding) -> None:
    folder, rows = log
    source = opened(folder, **encoding)
    asked = [{name: value for name, value in row.items() if name != "click"} for row in rows]
    same(source.transforms.encode_samples(asked), source.take(np.arange(400)))
    left_out = [{name: value for name, value in row.items() if value not in (None, "", [])} for row in asked]
    same(source.transforms.encode_samples(left_out), source.take(np.arange(400)))
    assert source.transforms.encode_samples([]).values.size == 0


BLANK_ITEMS = [["a", "", "b"], [""], [], ["", ""], ["b", ""], ["a"], None]


@pytest.mark.parametrize("encoding", [{"min_count": 1}, {"rows": 50}])
def test_blank_items_of_a_list_are_dropped_by_every_reader_and_by_requests(tmp_path: Path, encoding) -> None:
    (tmp_path / "schema.toml").write_text('label = "click"\nlists = ["tags"]\n')
    tags = [",".join(f'"{tag}"' for tag in row or ()) for row in BLANK_ITEMS]
    lines = [f"{at % 2},{'|'.join(row or ())}" for at, row in enumerate(BLANK_ITEMS)]
    (tmp_path / "log.csv").write_text("click,tags\n" + "\n".join(lines) + "\n")
    clicks = pa.array([at % 2 for at in range(len(tags))])
    lists = pa.array([None if row is None else [tag or None for tag in row] for row in BLANK_ITEMS])
    texts = pa.array(BLANK_ITEMS)
    for name, column in (("nulls", lists), ("empty", texts)):
        pq.write_table(pa.table({"click": clicks, "tags": column}), tmp_path / f"{name}.parquet")
    asked = [{"tags": row} for row in BLANK_ITEMS]
    expected = [2, 0, 0, 0, 1, 1, 0]
    found = []
    for name in ("log.csv", "nulls.parquet", "empty.parquet"):
        how = {"schema": str(tmp_path / "schema.toml"), "cache": str(tmp_path / "cache"), "split": {"test": 0.0}}
        source = open_log("log", str(tmp_path / name), encoding=encoding, **how)
        found += [source.take(np.arange(len(BLANK_ITEMS))), source.transforms.encode_samples(asked)]
        asked_none = [{"tags": row and [tag or None for tag in row]} for row in BLANK_ITEMS]
        found.append(source.transforms.encode_samples(asked_none))
    for rows in found:
        assert rows.lengths.tolist() == [expected] and 0 not in rows.values
        same(rows, found[0])


def test_kept_and_read_back(log, tmp_path: Path) -> None:
    transforms = opened(log[0]).transforms
    transforms.write(tmp_path)
    found = Transforms.read(tmp_path)
    asked = [{name: value for name, value in row.items() if name != "click"} for row in log[1][:50]]
    same(found.encode_samples(asked), transforms.encode_samples(asked))
    assert found.features == transforms.features
    text = (tmp_path / "transforms.json").read_text()
    (tmp_path / "transforms.json").write_text(json.dumps({**json.loads(text), "version": 7}))
    with pytest.raises(UserError, match=r"version 7; this Shardwright reads version 1"):
        Transforms.read(tmp_path)
    (tmp_path / "transforms.json").write_text(text)
    (tmp_path / "vocabularies.npz").write_bytes(b"PK")
    with pytest.raises(UserError, match=r"vocabularies.npz: cannot be read"):
        Transforms.read(tmp_path)


@pytest.mark.parametrize(
    ("sample", "told"),
    [
        ({"sites": "news"}, 'sample 1: unknown key "sites"; did you mean "site"'),
        ({"click": 1}, 'sample 1: unknown key "click"'),
        ({"age": "old"}, "sample 1: \"age\" is 'old'; wanted a number, or null"),
        ({"age": True}, 'sample 1: "age" is True; wanted a number'),
        ({"age": 1e300}, 'sample 1: "age" is 1e+300, which no float32 holds'),
        ({"age": 10**400}, "which no float32 holds"),
        ({"age": float("inf")}, 'sample 1: "age" is inf, which no float32 holds'),
        ({"site": 1.5}, 'sample 1: "site" is 1.5; wanted text or a whole number, or null'),
        ({"site": ["news"]}, "wanted text or a whole number, or null"),
        ({"tags": "news"}, "sample 1: \"tags\" is 'news'; wanted a list of texts, or null"),
        ({"tags": ["a", {}]}, 'sample 1: "tags" is {}; wanted text or a whole number'),
    ],
)
def test_what_is_wrong_with_a_sample_is_told(log, sample, told) -> None:
    with pytest.raises(UserError) as error:
        opened(log[0]).transforms.encode_samples([{}, sample])
    assert told in str(error.value)


VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=9), st.lists(st.text(max_size=3), max_size=3)
)


@settings(max_examples=200)
@given(st.lists(st.dictionaries(st.sampled_from(["a", "b", "c", "d"]), VALUES, max_size=4), max_size=4))
def test_any_sample_becomes_rows_of_tables_or_a_mistake_in_one_line(samples) -> None:
    schema = Schema(label="y", categories=("a", "b"), lists=("c",))
    transforms = Transforms(schema, Encoding(rows=10), {}, {})
    try:
        rows = transforms.encode_samples(samples)
    except UserError as error:
        assert str(error).startswith("sample ") and "\n" not in str(error)
        return
    assert rows.lengths.shape == (3, len(samples)) and rows.lengths.sum() == len(rows.values)
    assert ((rows.values >= 0) & (rows.values < 10)).all()

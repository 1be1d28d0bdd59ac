"""Histories: earlier ratings of a user without leakage, and list columns that a schema declares as histories."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from test_text_parser import hash_value

from shardwright.data.features.histories import clean_lists, find_earlier_rows
from shardwright.data.features.transforms import Encoding, Transforms
from shardwright.data.logs.click_log import open_log, open_movielens
from shardwright.data.logs.schema import Schema
from shardwright.data.sources.source import NumpyBatch
from shardwright.errors import UserError
from shardwright.models.click_inputs import ClickInputs
from shardwright.spec.optimizer import SGD
from shardwright.spec.workload import Feature

GENRES = {item: "|".join(("Drama", "Crime", "War")[: item % 3 + 1]) for item in range(9)}


def draw_ratings(num: int = 150) -> list[tuple[int, int, float, int]]:
    """User, item, rating, time: not in order of time, many at equal times."""
    rng = np.random.default_rng(3)
    return [
        (int(rng.integers(4)), int(rng.integers(12)), float(rng.integers(1, 11)) / 2, int(rng.integers(40)))
        for _ in range(num)
    ]


@pytest.fixture(scope="module")
def ratings(tmp_path_factory) -> tuple[str, list[tuple[int, int, float, int]]]:
    folder, rows = tmp_path_factory.mktemp("ml"), draw_ratings()
    (folder / "movies.csv").write_text(
        "movieId,title,genres\n" + "".join(f"{item},T,{genres}\n" for item, genres in GENRES.items())
    )
    lines = [f"{user},{item},{rating},{time}" for user, item, rating, time in rows]
    (folder / "ratings.csv").write_text("\n".join(["userId,movieId,rating,timestamp", *lines]) + "\n")
    return str(folder), rows


def open_ratings(path: str, **options):
    return open_movielens(path, **{"cache": f"{path}/cache", "encoding": {"min_count": 1}, **options})


def bags(batch: NumpyBatch) -> dict[str, list[list[int]]]:
    parts = np.split(batch.values, np.cumsum(batch.lengths.reshape(-1)))[:-1]
    size = batch.lengths.shape[1]
    return {
        name: [part.tolist() for part in parts[row * size : (row + 1) * size]]
        for row, name in enumerate(batch.features)
    }


@pytest.mark.parametrize("length", [1, 5, 1000])
def test_a_history_is_the_last_ratings_strictly_before(ratings, length, monkeypatch):
    monkeypatch.setattr("shardwright.data.logs.convert.ROW_GROUP_SIZE", 64)  # several parts
    path, rows = ratings
    source = open_ratings(path, history=length, split={"test": 0.3})
    held_out = source.evaluation()
    samples = [bags(part.take(np.arange(part.size))) for part in (source, held_out)]
    codes = {name: source.transforms.vocabulary_codes[name].tolist() for name in ("movieId", "genres", "history_liked")}

    def id_of(name: str, text: str) -> int:
        code = hash_value(text.encode())
        return 2 + codes[name].index(code) if code in codes[name] else 1

    in_order = sorted(rows, key=lambda row: row[3])
    actual = {name: samples[0][name] + samples[1][name] for name in samples[0]}
    for index, (user, _, _, time) in enumerate(in_order):
        past = [row for row in in_order if row[0] == user and row[3] < time][-length:]
        assert actual["history"][index] == [id_of("movieId", str(item)) for _, item, _, _ in past]
        genres = [0 if item not in GENRES else id_of("genres", "Drama") for _, item, _, _ in past]
        assert actual["history_genre"][index] == genres
        liked = [id_of("history_liked", str(int(rating >= 4))) for _, _, rating, _ in past]
        assert actual["history_liked"][index] == liked
    longest = max(map(len, actual["history"]))
    assert longest == length if length < 1000 else longest > 20


def test_a_history_has_the_ids_and_the_rows_of_the_item(ratings):
    source = open_ratings(ratings[0], history=3)
    sizes = {name: rows for name, rows, _ in source.features}
    assert sizes["history"] == sizes["movieId"] and sizes["history_genre"] == sizes["genres"]
    assert source.histories == source.transforms.histories == {"history": "movieId", "history_genre": "genres"}
    assert source.sides == {"history_genre": "history", "history_liked": "history"}
    assert "history" not in source.transforms.vocabulary_codes
    hashed = open_ratings(ratings[0], history=3, encoding={"rows": 50})
    batch = bags(hashed.take(np.arange(hashed.size)))
    assert {i for ids in batch["history"] for i in ids} <= {i for ids in batch["movieId"] for i in ids}


def test_models_read_the_table_of_the_item(ratings):
    source = open_ratings(ratings[0], history=3)
    sparse = ClickInputs(source, SGD(lr=0.1)).embedding_bags(4, 1, sequences=("history",))
    assert [table.name for table in sparse.tables if "history" in table.name] == ["history_liked", "history_liked_1"]
    features = {feature.name: feature for feature in sparse.features}
    assert features["history"] == Feature("history", "movieId", "none", "history")
    assert features["history_genre_1"] == Feature("history_genre_1", "genres_1", "mean", "history_genre")


def test_a_change_of_the_length_is_another_log(ratings):
    first, second, none = (open_ratings(ratings[0], history=length) for length in (3, 4, 0))
    assert len({repr(first), repr(second), repr(none)}) == 3 and none.histories == {}


def test_requests_are_encoded_as_the_log(ratings):
    path, rows = ratings
    source = open_ratings(path, history=4, split={"test": 0})
    samples = []
    for user, item, _, time in sorted(rows, key=lambda row: row[3]):
        past = sorted((row for row in rows if row[0] == user and row[3] < time), key=lambda row: row[3])
        samples.append(
            {
                "userId": user,
                "movieId": item,
                "genres": GENRES[item].split("|") if item in GENRES else None,
                "history": [row[1] for row in past],  # all of them: the transforms take the last four
                "history_genre": ["Drama" if row[1] in GENRES else None for row in past],
                "history_liked": [int(row[2] >= 4) for row in past],
            }
        )
    actual, expected = source.transforms.encode_samples(samples), source.take(np.arange(len(rows)))
    assert bags(actual) == bags(expected)
    samples[7]["history_liked"] = ["1"] * 9
    with pytest.raises(UserError, match='sample 7: "history_liked" has 9 ids and "history" has'):
        source.transforms.encode_samples(samples)


def test_errors_of_options(ratings):
    with pytest.raises(UserError, match=r"data.history=3 with data.split.by=random: .*; use split by time"):
        open_ratings(ratings[0], history=3, split={"by": "random"})
    with pytest.raises(UserError, match="data.history=-1; wanted the number of earlier ratings"):
        open_ratings(ratings[0], history=-1)
    with pytest.raises(UserError, match="data.path=nowhere: no such file"):
        open_movielens("nowhere", history=3)


def test_earlier_rows_of_a_key():
    order, start, end = find_earlier_rows(np.array([7, 5, 7, 7, 5]), np.array([3.0, 1.0, 1.0, 3.0, 1.0]))
    earlier = [order[a:b].tolist() for a, b in zip(start, end, strict=True)]
    assert earlier == [[2], [], [], [2], []]
    assert [len(part) for part in find_earlier_rows(np.empty(0, np.uint64), np.empty(0))] == [0, 0, 0]


SCHEMA = """label = "click"
time = "at"
categories = ["item", "category"]
lists = ["clicked", "clicked_category", "tags"]
history_length = 3
[histories]
clicked = "item"
clicked_category = "category"
[sides]
clicked_category = "clicked"
"""


def write_log(folder: Path, *rows: str, schema: str = SCHEMA) -> dict[str, str]:
    (folder / "schema.toml").write_text(schema)
    (folder / "log.csv").write_text("\n".join(["click,at,item,category,clicked,clicked_category,tags", *rows]) + "\n")
    return {"path": str(folder / "log.csv"), "schema": str(folder / "schema.toml"), "cache": str(folder / "cache")}


def test_a_list_column_as_history_keeps_its_order_and_its_sides(tmp_path):
    """Missing ids of a history are dropped with their sides; a missing side stays, as a missing value."""
    columns = {
        "click": [1, 0, 1],
        "at": [1.0, 2.0, 3.0],
        "item": ["a", "b", "c"],
        "category": ["x", "y", "x"],
        "clicked": [["b", "c", None, "a", "b", "a"], ["a", None, "c"], None],
        "clicked_category": [["y", "x", "x", None, None, "y"], ["x", "x", None], []],
        "tags": [["t"], [], ["t", "t"]],
    }
    options = write_log(tmp_path)
    pq.write_table(pa.table(columns), tmp_path / "log.parquet")
    options["path"] = str(tmp_path / "log.parquet")
    source = open_log("log", **options, split={"test": 0}, encoding={"min_count": 1})
    batch = bags(source.take(np.arange(3)))
    a, b, c = (ids[0] for ids in batch["item"])
    x, y = batch["category"][0][0], batch["category"][1][0]
    assert batch["clicked"] == [[a, b, a], [a, c], []] and len({a, b, c}) == 3
    assert batch["clicked_category"] == [[0, 0, y], [x, 0], []]
    assert source.transforms.schema.histories == {"clicked": "item", "clicked_category": "category"}


def test_transforms_with_histories_are_read_back(tmp_path):
    options = write_log(tmp_path, "1,1,a,x,b|a,y|x,t", "0,2,b,y,a,x,")
    transforms = open_log("log", **options, split={"test": 0}, encoding={"min_count": 1}).transforms
    transforms.write(tmp_path)
    assert Transforms.read(tmp_path).digest == transforms.digest
    assert replace(transforms, schema=replace(transforms.schema, history_length=9)).digest != transforms.digest


def test_digests_without_histories_are_those_of_earlier_versions():
    schema = Schema(label="y", categories=("a", "b"), lists=("c",))
    assert "histories" not in schema.plain() and "histories" in replace(schema, histories={"c": "a"}).plain()
    transforms = Transforms(schema, Encoding(rows=50), {}, {})
    assert transforms.digest == "dd1667959f864482"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (('clicked = "item"', 'clicked = "itm"'), 'history "clicked" has the ids of "itm".*did you mean "item"'),
        (('clicked = "item"', 'click = "item"'), '"click" has ids in order and is not in lists'),
        (('= "clicked"\n', '= "tags"\n'), 'side "clicked_category" of "tags", which is no history'),
        (("history_length = 3", "history_length = -3"), "history_length is -3; wanted 0 for all ids"),
        (("[histories]", '[history_times]\ntags = "at"\n[histories]'), 'history_times of "tags", which is no history'),
    ],
)
def test_errors_in_a_schema(tmp_path, change, message):
    options = write_log(tmp_path, "1,1,a,x,b,y,t", schema=SCHEMA.replace(*change))
    with pytest.raises(UserError, match=message):
        open_log("log", **options)


def test_a_side_of_another_length_is_an_error(tmp_path):
    options = write_log(tmp_path, "1,1,a,x,b|a,y|x,t", "1,2,a,x,b|a,y,t")
    with pytest.raises(
        UserError, match='log.csv: row 2: "clicked_category" has 1 ids and "clicked" has 2; a side column has'
    ):
        open_log("log", **options, split={"test": 0}).take(np.arange(2))


def write_parquet(folder: Path, times: list[list[float]]) -> dict[str, str]:
    columns = {"click": [1, 0], "at": [10.0, 20.0], "item": ["a", "b"], "clicked": [["a", "b"], ["c"]], "times": times}
    pq.write_table(pa.table(columns), folder / "log.parquet")
    schema = 'label = "click"\ntime = "at"\ncategories = ["item"]\nlists = ["clicked"]\n[histories]\nclicked = "item"\n'
    (folder / "schema.toml").write_text(schema + '[history_times]\nclicked = "times"\n')
    return {"schema": str(folder / "schema.toml"), "cache": str(folder / "cache")}


def test_a_history_out_of_order_is_an_error_if_the_log_has_its_times(tmp_path):
    options, path = write_parquet(tmp_path, [[1, 2], [3]]), str(tmp_path / "log.parquet")
    assert open_log("log", path, **options, split={"test": 0}).size == 2
    for times, row in (([[2, 1], [3]], 1), ([[1, 2], [20]], 2), ([[1, 10], [3]], 1)):
        write_parquet(tmp_path, times)
        message = f'row {row}: history "clicked" is out of order by "times"; wanted the oldest first and before "at"'
        with pytest.raises(UserError, match=message):
            open_log("log", path, **options)
    write_parquet(tmp_path, [[1], [3]])
    with pytest.raises(UserError, match='row 1: "times" has not one time for each id of "clicked"'):
        open_log("log", path, **options)
    (tmp_path / "log.csv").write_text("click,at,item,clicked,times\n1,10,a,b,1\n")
    with pytest.raises(UserError, match="lists of times are read from Parquet files only"):
        open_log("log", str(tmp_path / "log.csv"), **options)


def test_plain_lists_are_not_shortened():
    schema = Schema(label="y", lists=("a", "b"), histories={"b": "a"}, history_length=1)
    column = np.array([5, 6, 0, 7], np.uint64), np.array([0, 2, 4])
    cleaned = clean_lists(schema, {"a": column, "b": column})
    assert cleaned["a"][0].tolist() == [5, 6, 7] and cleaned["a"][1].tolist() == [0, 2, 3]
    assert cleaned["b"][0].tolist() == [6, 7] and cleaned["b"][1].tolist() == [0, 1, 2]
    assert json.dumps(schema.plain()["histories"]) == '{"b": "a"}'


def test_lengths_of_histories_are_those_of_the_samples(ratings):
    source = open_ratings(ratings[0], history=5)
    indices = np.array([90, 3, 3, 50])
    assert source.history_lengths(indices).tolist() == [len(ids) for ids in bags(source.take(indices))["history"]]
    assert len(source.history_lengths(np.empty(0, np.int64))) == 0

"""MovieLens in both of its formats: ratings joined with users, items and genres."""

from pathlib import Path

import numpy as np
import pytest
from test_text_parser import hash_value

from shardwright.data.logs.click_log import open_log
from shardwright.errors import UserError

USERS = "1|24|M|technician|85711\n2|53|F|other|94043\n"
ITEMS = (
    "10|Toy Story (1995)|01-Jan-1995||http://x|0|0|0|1|1|1|0|0|0|0|0|0|0|0|0|0|0|0|0\n"
    "11|Señorita (1997)|24-Jan-1997||http://y|1|0|0|0|0|0|0|0|0|0|0|0|0|0|0|0|0|0|0\n"
)
RATINGS = "1\t10\t5\t30\n2\t11\t3\t10\n2\t10\t4\t20\n1\t99\t1\t40\n"


def open_movielens(path: str):
    return open_log("movielens", path, split={"test": 0}, encoding={"min_count": 1})


def ids(source) -> dict[str, list[list[int]]]:
    batch = source.take(np.arange(source.size))
    bags = np.split(batch.values, np.cumsum(batch.lengths.reshape(-1)))[:-1]
    return {
        name: [bag.tolist() for bag in bags[row * source.size : (row + 1) * source.size]]
        for row, name in enumerate(batch.features)
    }


def test_the_100k_format_is_joined_and_ordered_by_time(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("ml").mkdir()
    Path("ml/u.user").write_text(USERS)
    Path("ml/u.item").write_bytes(ITEMS.encode("latin-1"))
    Path("ml/u.data").write_text(RATINGS)
    source = open_movielens("ml")
    assert source.take(np.arange(4)).labels["click"].tolist() == [0.0, 1.0, 1.0, 0.0]
    id_lists = ids(source)
    vocabulary = {name: entries.tolist() for name, entries in source.transforms.vocabulary_codes.items()}

    def rows(name: str, *values: str) -> list[int]:
        return [2 + vocabulary[name].index(hash_value(value.encode())) for value in values]

    assert id_lists["user"] == [rows("user", "2"), rows("user", "2"), rows("user", "1"), rows("user", "1")]
    assert id_lists["age"][0] == rows("age", "50s") and id_lists["occupation"][2] == rows("occupation", "technician")
    assert id_lists["genres"] == [
        rows("genres", "unknown"),
        rows("genres", "Animation", "Children", "Comedy"),
        rows("genres", "Animation", "Children", "Comedy"),
        [],
    ]


def test_the_format_with_ratings_csv(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("ml").mkdir()
    Path("ml/ratings.csv").write_text("userId,movieId,rating,timestamp\n1,10,4.5,2\n2,11,0.5,1\n")
    Path("ml/movies.csv").write_text('movieId,title,genres\n10,"Crime, and so on",Crime|Drama\n11,Other,Drama\n')
    source = open_movielens("ml")
    assert source.take(np.arange(2)).labels["click"].tolist() == [0.0, 1.0]
    assert [len(bag) for bag in ids(source)["genres"]] == [1, 2]
    assert ids(source)["genres"][0][0] in ids(source)["genres"][1]


def test_row_groups_without_rows_and_malformed_movies(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("shardwright.data.logs.convert.ROW_GROUP_SIZE", 2)
    Path("ml").mkdir()
    Path("ml/ratings.csv").write_text("userId,movieId,rating,timestamp\n1,10,4.5,2\n2,11,0.5,1\n")
    Path("ml/movies.csv").write_text("movieId,title,genres\n10,One,Drama\n11,Two,Drama\n")
    assert open_movielens("ml").size == 2
    Path("ml/movies.csv").write_text("movieId,title,genres\n10,One\n")
    with pytest.raises(UserError, match="movies.csv: row 2 has 2 columns, wanted 3"):
        open_movielens("ml")


def test_errors_name_missing_files(tmp_path):
    with pytest.raises(UserError, match="neither u.data nor ratings.csv"):
        open_log("movielens", str(tmp_path))
    (tmp_path / "u.data").write_text(RATINGS)
    with pytest.raises(UserError, match="no u.user; name a MovieLens directory with all its files"):
        open_log("movielens", str(tmp_path))

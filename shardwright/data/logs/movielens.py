"""MovieLens as a click log: a row per rating with user, item, user attributes and the item's genres.

With a history, a row also has the items that its user rated before, strictly earlier in time, and for each of them its
first genre and whether the user liked it.

Two formats are read: MovieLens 100K (u.data, u.item, u.user) and the later releases (ratings.csv, movies.csv). Users
and items are few and are kept in memory; ratings are streamed.
"""

import csv
import io
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from shardwright.data.features.histories import ListColumn, concat_ranges, find_earlier_rows
from shardwright.data.logs.schema import Schema
from shardwright.data.logs.text import COMPRESSION, TextFile, TextPart
from shardwright.errors import UserError
from shardwright.kernels.hashing import hash_strings

HISTORY, HISTORY_GENRE, HISTORY_LIKED = "history", "history_genre", "history_liked"
POSITIVE_RATING = 4.0  # a rating of at least this value is labelled as a click
PART_ROWS = 65_536  # ratings read at a time
GENRES = (
    "unknown", "Action", "Adventure", "Animation", "Children", "Comedy", "Crime", "Documentary", "Drama", "Fantasy",
    "Film-Noir", "Horror", "Musical", "Mystery", "Romance", "Sci-Fi", "Thriller", "War", "Western",
)  # fmt: skip
SCHEMA_100K = Schema(
    label="rating",
    positive=POSITIVE_RATING,
    categories=("user", "item", "age", "gender", "occupation"),
    lists=("genres",),
    time="timestamp",
    columns=("user", "item", "rating", "timestamp"),
    delimiter="\t",
    quoted=False,
)
SCHEMA_CSV = Schema(
    label="rating", positive=POSITIVE_RATING, categories=("userId", "movieId"), lists=("genres",), time="timestamp"
)


class SideTable(NamedTuple):
    """Attributes of users or items, sorted by the hash code of their id."""

    ids: np.ndarray  # (K,) uint64
    columns: dict[str, np.ndarray]  # each (K,) uint64
    lists: dict[str, list[np.ndarray]]  # each K arrays of codes


class RatingHistory:
    """For each rating, in the order of the file, the last `length` ratings of its user before it."""

    def __init__(self, ratings: dict[str, np.ndarray], length: int) -> None:
        self._ratings = ratings  # user, item, liked, by rating
        self._order, start, self._end = find_earlier_rows(ratings["user"], ratings["time"])
        self._start = np.maximum(start, self._end - length)

    def columns(self, rows: slice, items: SideTable) -> dict[str, ListColumn]:
        """The list columns of these ratings."""
        places, ends = concat_ranges(self._start[rows], self._end[rows])
        earlier = self._order[places]
        codes = self._ratings["item"][earlier]
        genres, genre_ends = _join(codes, items)["genres"]
        starts = np.concatenate([np.zeros(1, np.int64), genre_ends])[:-1]
        has_genre, first = starts < genre_ends, np.zeros(len(codes), np.uint64)
        first[has_genre] = genres[starts[has_genre]]
        liked = _hash_texts(["0", "1"])[self._ratings["liked"][earlier].astype(np.int64)]
        return {HISTORY: (codes, ends), HISTORY_GENRE: (first, ends), HISTORY_LIKED: (liked, ends)}


class MovieLens:
    """A MovieLens directory as a LogFile; with `history`, rows have that many earlier ratings of their user."""

    def __init__(self, directory: Path, history: int = 0) -> None:
        self._directory = directory
        is_100k = self._find("u.data") is not None
        self.schema = SCHEMA_100K if is_100k else SCHEMA_CSV
        self._user, self._item = ("user", "item") if is_100k else ("userId", "movieId")
        ratings = self._find("u.data" if is_100k else "ratings.csv")
        if ratings is None:
            raise UserError(f"{directory}: neither u.data nor ratings.csv; name a MovieLens directory")
        self._ratings = TextFile(ratings, self.schema)
        if history:
            self.schema = replace(
                self.schema,
                lists=(*self.schema.lists, HISTORY, HISTORY_GENRE, HISTORY_LIKED),
                histories={HISTORY: self._item, HISTORY_GENRE: "genres"},
                sides={HISTORY_GENRE: HISTORY, HISTORY_LIKED: HISTORY},
                history_length=history,
            )
        names = ("u.data", "u.user", "u.item") if is_100k else ("ratings.csv", "movies.csv")
        self.files = [path for path in map(self._find, names) if path is not None]
        self._side_tables = (self._read_users(), self._read_items()) if is_100k else (None, self._read_movies())
        self.columns = self.schema.used_columns
        self.num_bytes = self._ratings.num_bytes

    def read_parts(
        self, schema: Schema, max_rows: int, progress: Callable[[int], None] = lambda _: None
    ) -> Iterator[TextPart]:
        """Yield ratings in parts of at most `max_rows` rows, joined with the side tables and their users' histories."""
        history = RatingHistory(self._read_ratings(schema), schema.history_length) if schema.histories else None
        num_read = 0
        for part in self._ratings.read_parts(self._ratings_schema(schema), max_rows, progress):
            columns: dict[str, Any] = dict(part.columns)
            if not len(columns[schema.label]):
                yield TextPart({name: [] for name in schema.used_columns}, part.faults)
                continue
            for name, side_table in zip((self._user, self._item), self._side_tables, strict=True):
                if side_table is not None:
                    columns |= _join(columns[name], side_table)
            rows = slice(num_read, num_read := num_read + len(columns[schema.label]))
            if history is not None:
                columns |= history.columns(rows, self._items)
            yield TextPart(columns, part.faults)

    @cached_property
    def _items(self) -> SideTable:
        table = self._side_tables[1]
        assert table is not None
        return table

    def _ratings_schema(self, schema: Schema) -> Schema:
        """Schema of the file of ratings."""
        return Schema(
            label=schema.label,
            positive=schema.positive,
            categories=(self._user, self._item),
            time=schema.time,
            columns=self._ratings.columns if schema.columns else (),
            delimiter=schema.delimiter,
            quoted=schema.quoted,
        )

    def _read_ratings(self, schema: Schema) -> dict[str, np.ndarray]:
        """All ratings by column, about 32 bytes each, in the order of the file."""
        names = {"user": self._user, "item": self._item, "liked": schema.label, "time": schema.time}
        parts = [
            {key: part.columns[name].copy() for key, name in names.items()}
            for part in self._ratings.read_parts(self._ratings_schema(schema), PART_ROWS)
        ]
        return {key: np.concatenate([part[key] for part in parts]) for key in names}

    def _read_users(self) -> SideTable:
        rows = [(row[0], f"{row[1][:-1] or 0}0s", row[2], row[3]) for row in self._read_table("u.user", "|", 5)]
        ids, *columns = (_hash_texts([row[column] for row in rows]) for column in range(4))
        return _sort_by_id(ids, dict(zip(("age", "gender", "occupation"), columns, strict=True)), {})

    def _read_items(self) -> SideTable:
        rows = self._read_table("u.item", "|", 5 + len(GENRES))
        genre_codes = _hash_texts(list(GENRES))
        genres = [genre_codes[[flag == "1" for flag in row[-len(GENRES) :]]] for row in rows]
        return _sort_by_id(_hash_texts([row[0] for row in rows]), {}, {"genres": genres})

    def _read_movies(self) -> SideTable:
        rows = self._read_table("movies.csv", ",", 3)[1:]
        return _sort_by_id(
            _hash_texts([row[0] for row in rows]), {}, {"genres": [_hash_texts(row[2].split("|")) for row in rows]}
        )

    def _read_table(self, name: str, delimiter: str, num_columns: int) -> list[list[str]]:
        path = self._find(name)
        if path is None:
            raise UserError(f"{self._directory}: no {name}; name a MovieLens directory with all its files")
        kind = COMPRESSION.get(path.suffix)
        try:
            with pa.OSFile(str(path)) as file:
                data = (pa.CompressedInputStream(file, kind) if kind else file).read()
        except OSError as error:
            raise UserError(f"{path}: cannot be read ({error}); fetch the file again") from None
        text = data.decode("utf-8" if name.endswith(".csv") else "latin-1", "replace")
        rows = [row for row in csv.reader(io.StringIO(text), delimiter=delimiter) if row]
        for number, row in enumerate(rows, start=1):
            if len(row) != num_columns:
                raise UserError(f"{path}: row {number} has {len(row)} columns, wanted {num_columns}")
        return rows

    def _find(self, name: str) -> Path | None:
        candidates = (self._directory / f"{name}{suffix}" for suffix in ("", *COMPRESSION))
        return next((path for path in candidates if path.is_file()), None)


def _hash_texts(texts: list[str]) -> np.ndarray:
    data = [text.encode() for text in texts]
    offsets = np.cumsum([0, *map(len, data)]).astype(np.int32)
    return hash_strings(offsets, np.frombuffer(b"".join(data), np.uint8))


def _sort_by_id(ids: np.ndarray, columns: dict[str, np.ndarray], lists: dict[str, list[np.ndarray]]) -> SideTable:
    order = np.argsort(ids)
    columns = {name: values[order] for name, values in columns.items()}
    return SideTable(ids[order], columns, {name: [values[row] for row in order] for name, values in lists.items()})


def _join(ids: np.ndarray, side: SideTable) -> dict[str, Any]:
    """Look up the side table's columns for `ids`; unknown ids get missing values and empty lists."""
    rows = np.minimum(np.searchsorted(side.ids, ids), len(side.ids) - 1)
    is_known = side.ids[rows] == ids
    columns: dict[str, Any] = {name: np.where(is_known, values[rows], 0) for name, values in side.columns.items()}
    for name, values in side.lists.items():
        lists = [values[row] if row_known else values[row][:0] for row, row_known in zip(rows, is_known, strict=True)]
        columns[name] = np.concatenate(lists), np.cumsum([len(codes) for codes in lists]).astype(np.int32)
    return columns

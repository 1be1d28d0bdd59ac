"""MovieLens as a log: every rating with its user, its item, what is known of both, and the item's genres as a list.

Both forms are read: the 100K files (u.data, u.item, u.user) and the later ones (ratings.csv, movies.csv). Users and
items are few and held in memory; ratings are streamed.
"""

import csv
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from shardwright.data.logs.schema import Schema
from shardwright.data.logs.text import COMPRESSION, TextFile, TextPart
from shardwright.errors import UserError
from shardwright.kernels.hashing import hash_strings

POSITIVE_RATING = 4.0  # a rating of at least this is a click
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
    """What is known of users or items, by the code of their id in ascending order."""

    ids: np.ndarray  # (K,) uint64
    columns: dict[str, np.ndarray]  # each (K,) uint64
    lists: dict[str, list[np.ndarray]]  # each K arrays of codes


class MovieLens:
    def __init__(self, directory: Path) -> None:
        self._directory = directory
        plain = self._find("u.data") is not None
        self.schema = SCHEMA_100K if plain else SCHEMA_CSV
        self._user, self._item = ("user", "item") if plain else ("userId", "movieId")
        ratings = self._find("u.data" if plain else "ratings.csv")
        if ratings is None:
            raise UserError(f"{directory}: neither u.data nor ratings.csv; name a MovieLens directory")
        self._ratings = TextFile(ratings, self.schema)
        names = ("u.data", "u.user", "u.item") if plain else ("ratings.csv", "movies.csv")
        self.files = [path for path in map(self._find, names) if path is not None]
        self._sides = (self._users(), self._items()) if plain else (None, self._movies())
        self.columns = self.schema.used_columns
        self.num_bytes = self._ratings.num_bytes

    def read_parts(
        self, schema: Schema, max_rows: int, progress: Callable[[int], None] = lambda _: None
    ) -> Iterator[TextPart]:
        written = Schema(
            label=schema.label,
            positive=schema.positive,
            categories=(self._user, self._item),
            time=schema.time,
            columns=self._ratings.columns if schema.columns else (),
            delimiter=schema.delimiter,
            quoted=schema.quoted,
        )
        for part in self._ratings.read_parts(written, max_rows, progress):
            columns: dict[str, Any] = dict(part.columns)
            if not len(columns[schema.label]):
                yield TextPart({name: [] for name in schema.used_columns}, part.faults)
                continue
            for name, side in zip((self._user, self._item), self._sides, strict=True):
                if side is not None:
                    columns |= _joined(columns[name], side)
            yield TextPart(columns, part.faults)

    def _users(self) -> SideTable:
        rows = [(row[0], f"{row[1][:-1] or 0}0s", row[2], row[3]) for row in self._table("u.user", "|", 5)]
        ids, *columns = (_codes([row[place] for row in rows]) for place in range(4))
        return _sorted(ids, dict(zip(("age", "gender", "occupation"), columns, strict=True)), {})

    def _items(self) -> SideTable:
        rows = self._table("u.item", "|", 5 + len(GENRES))
        of_genre = _codes(list(GENRES))
        genres = [of_genre[[flag == "1" for flag in row[-len(GENRES) :]]] for row in rows]
        return _sorted(_codes([row[0] for row in rows]), {}, {"genres": genres})

    def _movies(self) -> SideTable:
        rows = self._table("movies.csv", ",", 3)[1:]
        return _sorted(_codes([row[0] for row in rows]), {}, {"genres": [_codes(row[2].split("|")) for row in rows]})

    def _table(self, name: str, delimiter: str, num_columns: int) -> list[list[str]]:
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
        found = (self._directory / f"{name}{suffix}" for suffix in ("", *COMPRESSION))
        return next((path for path in found if path.is_file()), None)


def _codes(texts: list[str]) -> np.ndarray:
    data = [text.encode() for text in texts]
    offsets = np.cumsum([0, *map(len, data)]).astype(np.int32)
    return hash_strings(offsets, np.frombuffer(b"".join(data), np.uint8))


def _sorted(ids: np.ndarray, columns: dict[str, np.ndarray], lists: dict[str, list[np.ndarray]]) -> SideTable:
    order = np.argsort(ids)
    ordered = {name: values[order] for name, values in columns.items()}
    return SideTable(ids[order], ordered, {name: [values[row] for row in order] for name, values in lists.items()})


def _joined(ids: np.ndarray, side: SideTable) -> dict[str, Any]:
    """The side's columns for these ids; an id it does not know has none (missing, and an empty list)."""
    place = np.minimum(np.searchsorted(side.ids, ids), len(side.ids) - 1)
    known = side.ids[place] == ids
    found: dict[str, Any] = {name: np.where(known, values[place], 0) for name, values in side.columns.items()}
    for name, values in side.lists.items():
        taken = [values[row] if here else values[row][:0] for row, here in zip(place, known, strict=True)]
        found[name] = np.concatenate(taken), np.cumsum([len(one) for one in taken]).astype(np.int32)
    return found

"""A small source with histories for tests, and a MovieLens directory to train on."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shardwright.data.loading.loader import to_batch
from shardwright.data.sources.source import NumpyBatch
from shardwright.jagged import Batch


@dataclass(frozen=True)
class Visits:
    """A user, an item with tags, a history of up to `longest` items with an action each, and one number.

    A sample is a function of its index; every fifth has no history.
    """

    samples: int = 4096
    longest: int = 6
    seed: int = 0

    num_dense = 1
    features = (("user", 20, False), ("item", 30, False), ("tags", 7, True), ("seen", 30, True), ("action", 5, True))
    histories = {"seen": "item"}  # noqa: RUF012
    sides = {"action": "seen"}  # noqa: RUF012

    @property
    def size(self) -> int:
        return self.samples

    def evaluation(self) -> "Visits":
        return replace(self, seed=self.seed + 1, samples=256)

    def draw(self, indices: np.ndarray, salt: int, below: int) -> np.ndarray:
        keys = indices.astype(np.uint64) * np.uint64(977) + np.uint64(salt + 31 * self.seed)
        return ((keys * np.uint64(0x9E3779B97F4A7C15) >> np.uint64(33)) % np.uint64(below)).astype(np.int64)

    def history_lengths(self, indices: np.ndarray) -> np.ndarray:
        return np.where(indices % 5 == 0, 0, self.draw(indices, 5, self.longest) + 1)

    def take(self, indices: np.ndarray) -> NumpyBatch:
        num, num_tags = self.history_lengths(indices), self.draw(indices, 7, 3)
        place = 1000 * np.repeat(indices, num) + np.arange(num.sum())
        place -= np.repeat(np.cumsum(num) - num, num)  # within the sample
        item, seen = self.draw(indices, 2, 30), self.draw(place, 3, 30)
        like = np.zeros(len(indices), np.int64)
        np.add.at(like, np.repeat(np.arange(len(indices)), num), np.repeat(item, num) % 3 == seen % 3)
        columns = [self.draw(indices, 1, 20), item, np.repeat(item % 7, num_tags), seen, self.draw(place, 4, 5)]
        lengths = np.stack([np.ones_like(num), np.ones_like(num), num_tags, num, num])
        click = (2 * like > num).astype(np.float32)
        names = tuple(name for name, _, _ in self.features)
        dense = (self.draw(indices, 9, 100)[:, None] / 50 - 1).astype(np.float32)
        return NumpyBatch(names, np.concatenate(columns), lengths, dense, {"click": click})


def visits(start: int, stop: int, longest: int = 6, dtype: torch.dtype = torch.float64) -> Batch:
    batch = to_batch(Visits(longest=longest).take(np.arange(start, stop)))
    return batch.map(lambda x: x.to(dtype) if x.is_floating_point() else x)


def in_float64(model: Any) -> Any:
    """The model with tables and dense part in float64."""
    model.sparse.hold({table.name: "float64" for table in model.sparse.tables})
    return model.double()


def write_movielens(folder: Path, num: int = 1500) -> str:
    """Ratings of 20 users and 30 items in order of time: liked are items of the genre that a user liked last."""
    folder.mkdir()
    rng, genres = np.random.default_rng(0), ("Drama", "Crime", "War")
    lines = ["userId,movieId,rating,timestamp"]
    for time in range(num):
        user, item = int(rng.integers(20)), int(rng.integers(30))
        lines.append(f"{user},{item},{5 if (item + user + time // 500) % 3 == 0 else 2},{time}")
    (folder / "ratings.csv").write_text("\n".join(lines) + "\n")
    movies = [f"{item},T,{genres[item % 3]}" for item in range(30)]
    (folder / "movies.csv").write_text("\n".join(["movieId,title,genres", *movies]) + "\n")
    return str(folder)

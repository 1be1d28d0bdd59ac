"""The samples of benchmarks/dhen_quality.py: the synthetic click stream, generated once into files, or a Criteo log."""

import hashlib
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from shardwright import config
from shardwright.data.loading.loader import Loader, to_batch
from shardwright.data.sources.source import NumpyBatch
from shardwright.data.sources.synthetic import VERSION, ClickStream
from shardwright.jagged import Batch
from shardwright.runtime.run import recipe


@dataclass(frozen=True, slots=True)
class Planted:
    """The synthetic click stream; samples are generated once into files of `directory`, which all runs map."""

    directory: Path
    points: tuple[int, ...] = (1 << 19, 1 << 20, 1 << 21, 1 << 22, 1 << 23)  # samples after which a run is scored
    batch_size: int = 2048  # divides the points and the held-out samples
    num_held_out: int = 204_800
    name: str = "planted"
    tables: str = "rowwise_adagrad"
    seeds: tuple[int, ...] = (1, 2, 3)
    more_seeds: tuple[int, ...] = (4, 5)  # for the claim

    @property
    def description(self) -> str:
        return f"stream {VERSION}, batches of {self.batch_size}, {self.num_held_out} held out"

    def source(self, seed: int) -> ClickStream:
        return ClickStream(seed=seed)

    def first(self, seed: int) -> Batch:
        return to_batch(ClickStream(seed=seed).take(np.arange(8)))

    def training(self, seed: int, lo: int, hi: int) -> Iterator[Batch]:
        return self._batches(ClickStream(seed=seed), (0, self.points[-1]), range(lo, hi, self.batch_size))

    def held_out(self, seed: int, at: int) -> Iterator[Batch]:
        """Samples that no run trains on, from the time right after sample `at`."""
        return self._batches(
            ClickStream(seed=~seed), (at, at + self.num_held_out), range(0, self.num_held_out, self.batch_size)
        )

    def bounds(self, seed: int) -> list[float]:
        """The best reachable NE at each point."""
        return [ClickStream(seed=~seed).bound(point, point + self.num_held_out).ne for point in self.points]

    def prepare(self, seed: int) -> None:
        self._folder(ClickStream(seed=seed), 0, self.points[-1])
        for point in self.points:
            self._folder(ClickStream(seed=~seed), point, point + self.num_held_out)

    def _batches(self, stream: ClickStream, span: tuple[int, int], starts: range) -> Iterator[Batch]:
        folder = self._folder(stream, *span)
        arrays = {path.stem: np.load(path, mmap_mode="r") for path in folder.iterdir()}
        features = tuple(name for name, _, _ in stream.features)
        for start in starts:
            batch, samples = start // self.batch_size, slice(start, start + self.batch_size)
            ids = arrays["ids"][arrays["ends"][batch] : arrays["ends"][batch + 1]].astype(np.int64)
            lengths = np.ascontiguousarray(arrays["lengths"][samples].T).astype(np.int64)
            click = {"click": np.array(arrays["click"][samples])}
            yield to_batch(NumpyBatch(features, ids, lengths, np.array(arrays["dense"][samples]), click))

    def _folder(self, stream: ClickStream, lo: int, hi: int) -> Path:
        """The folder with a span of samples, batch by batch; it has its final name once it is complete."""
        description = f"{VERSION} {stream} {lo} {hi} {self.batch_size}"
        folder = self.directory / hashlib.sha256(description.encode()).hexdigest()[:12]
        if not folder.exists():
            draft = folder.with_suffix(".new")
            draft.mkdir(parents=True, exist_ok=True)
            for name, array in _draw_samples(stream, range(lo, hi, self.batch_size)).items():
                np.save(draft / f"{name}.npy", array)
            draft.rename(folder)
        return folder


def _draw_samples(stream: ClickStream, starts: range) -> dict[str, np.ndarray]:
    parts: dict[str, list[np.ndarray]] = {name: [] for name in ("ids", "lengths", "dense", "click")}
    for start in starts:
        rows = stream.take(np.arange(start, start + starts.step))
        for name, array in (("ids", rows.values.astype(np.int32)), ("lengths", rows.lengths.T.astype(np.uint8))):
            parts[name].append(array)
        parts["dense"].append(rows.arrays()["dense"])
        parts["click"].append(rows.labels["click"])
    ends = np.cumsum([0, *(len(ids) for ids in parts["ids"])])
    return {name: np.concatenate(arrays) for name, arrays in parts.items()} | {"ends": ends}


@dataclass(frozen=True, slots=True)
class Log:
    """One epoch of a Criteo log in the order of time, its last seventh held out; seeds change only initial weights."""

    path: str
    batch_size: int = 1024
    name: str = "criteo"
    tables: str = "adagrad"
    seeds: tuple[int, ...] = (1, 2, 3, 4, 5)
    more_seeds: tuple[int, ...] = ()

    @property
    def description(self) -> str:
        return f"{Path(self.path).name}, points {self.points}, batches of {self.batch_size}"

    @property
    def points(self) -> tuple[int, ...]:
        batches = _open_log(self.path).size // self.batch_size
        return batches // 2 * self.batch_size, batches * self.batch_size

    def source(self, seed: int) -> Any:
        return _open_log(self.path)

    def first(self, seed: int) -> Batch:
        return to_batch(_open_log(self.path).take(np.arange(8)))

    def training(self, seed: int, lo: int, hi: int) -> Iterator[Batch]:
        with closing(Loader(_open_log(self.path), batch_size=self.batch_size, shuffle=False)) as loader:
            yield from islice(loader, lo // self.batch_size, hi // self.batch_size)

    def held_out(self, seed: int, at: int) -> Iterator[Batch]:
        with closing(Loader(_open_log(self.path).evaluation(), batch_size=self.batch_size, shuffle=False)) as loader:
            yield from loader

    def bounds(self, seed: int) -> list[float]:
        return []

    def prepare(self, seed: int) -> None:
        _open_log(self.path)


@cache
def _open_log(path: str) -> Any:
    return recipe.make_source(config.load("criteo-dlrm", [f"data={path}"]))

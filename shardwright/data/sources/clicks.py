"""A click log as a source: its cache, and which part of it.

Samples are read by chunks of the cache, the last few of which stay decoded. Where a part is larger than `memory` bytes
the loader shuffles inside windows (`span`), so that any file is read in bounded memory.

Shape legend: B samples.
"""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow.parquet as pq

from shardwright.data.features import statistics
from shardwright.data.features.statistics import Moments, SplitStatistics
from shardwright.data.features.transforms import DecodedChunk, Encoding, Transforms
from shardwright.data.logs.convert import ROW_GROUP_SIZE, ConvertedLog
from shardwright.data.logs.schema import Schema
from shardwright.data.sources.source import NumpyBatch, permute_positions
from shardwright.errors import UserError
from shardwright.spec import files
from shardwright.spec.checks import raise_if_any
from shardwright.spec.workload import FeatureStatistics

SplitName = Literal["train", "validation", "test"]


@dataclass(frozen=True)
class Split:
    """The last `test` share of the rows, before it the `validation` share, before it what is trained on.

    By "time" rows are in the log's order, by "random" in a seeded one.
    """

    by: str = "time"
    test: float = 1 / 7
    validation: float = 0.0
    seed: int = 0

    def bounds(self, rows: int, part: SplitName) -> tuple[int, int]:
        test = rows - round(rows * self.test)
        validation = test - round(rows * self.validation)
        return {"train": (0, validation), "validation": (validation, test), "test": (test, rows)}[part]


@dataclass(frozen=True)
class ClickLog:
    """Samples of one part of a converted log."""

    cache: str
    split: Split = Split()
    encoding: Encoding = Encoding()
    part: SplitName = "train"
    memory: int = 1 << 30  # bytes that one process may keep: half for decoded samples, or, before, for counts

    def __post_init__(self) -> None:
        raise_if_any(_faults(self))

    @property
    def size(self) -> int:
        return self._bounds[1] - self._bounds[0]

    @property
    def span(self) -> int | None:
        """How many neighbours to shuffle among; None: all samples fit in memory."""
        if self._info.rows * self._row_bytes <= self.memory // 2:
            return None
        if self.split.by == "random" or self._order is not None:
            needed = 2 * self._info.rows * self._row_bytes / 2**30
            raise UserError(
                f"{self._info.origin}: its rows lie in another order than they are read in (split by {self.split.by}), "
                f"which needs all of them in memory: set data.memory={needed:.1f} (GiB), "
                "or split by time a file that is in the order of time"
            )
        return 2 * ROW_GROUP_SIZE

    @property
    def unknown_ids(self) -> tuple[int, ...]:
        """Rows of a table that several values share: missing ones, and those without a row of their own."""
        return (0,) if self.encoding.rows else (0, 1)

    @property
    def num_dense(self) -> int:
        return len(self._info.schema.numbers)

    @property
    def features(self) -> tuple[tuple[str, int, bool], ...]:
        """(name, rows, multi_hot) of every category and list."""
        return self.transforms.features

    @cached_property
    def transforms(self) -> Transforms:
        """As the training part has them."""
        schema, encoding = self._info.schema, self.encoding
        entries: dict[str, np.ndarray] = {}
        moments: dict[str, Moments] = {}
        if not encoding.rows:
            for name, counts in self.training_statistics.counts.items():
                entries[name] = counts.codes[counts.counts - counts.max_error >= encoding.min_count]
        if schema.numbers:
            found = self.training_statistics
            moments = dict(found.logarithmic if encoding.log else found.plain)
        return Transforms(schema, encoding, entries, moments)

    @property
    def statistics(self) -> tuple[FeatureStatistics, ...]:
        """Of the training part, for the planner."""
        return tuple(counts.feature_statistics(name) for name, counts in self.training_statistics.counts.items())

    @cached_property
    def training_statistics(self) -> SplitStatistics:
        split = self.split
        name = (
            f"{self.memory}-{split.by}-{split.test!r}-{split.validation!r}-{split.seed if split.by == 'random' else 0}"
        )
        training = replace(self, part="train")
        schema = self._info.schema
        categories = (*schema.categories, *schema.lists)
        return statistics.load_or_compute(
            Path(self.cache) / f"statistics-{name}.npz",
            lambda: statistics.collect_statistics(
                training._columns(), schema.label, categories, schema.numbers, training.memory // 2
            ),
        )

    def evaluation(self) -> "ClickLog":
        """What a run is watched on: the validation part, or without one the test part."""
        return self._watched

    @cached_property
    def _watched(self) -> "ClickLog":
        return replace(self, part="validation" if self.split.validation else "test")

    def test(self) -> "ClickLog | None":
        """What a run is judged by at its end, where that is not what it was watched on."""
        return replace(self, part="test") if self.split.validation and self.split.test else None

    def take(self, indices: np.ndarray) -> NumpyBatch:
        rows = self._rows_of(indices)
        chunk_B = np.searchsorted(self._starts, rows, side="right") - 1
        place_B = rows - self._starts[chunk_B]
        return self.transforms.gather_samples(len(rows), self._parts(chunk_B, place_B))

    def _parts(self, chunk_B: np.ndarray, place_B: np.ndarray) -> Iterator[tuple[np.ndarray, DecodedChunk, np.ndarray]]:
        for number in sorted(set(chunk_B.tolist())):
            here = np.flatnonzero(chunk_B == number)
            yield here, self._chunk(int(number)), place_B[here]

    @cached_property
    def _info(self) -> ConvertedLog:
        return files.read(ConvertedLog, Path(self.cache) / "log.json")

    @cached_property
    def _bounds(self) -> tuple[int, int]:
        return self.split.bounds(self._info.rows, self.part)

    @cached_property
    def _file(self) -> pq.ParquetFile:
        return pq.ParquetFile(Path(self.cache) / "rows.parquet")

    @cached_property
    def _starts(self) -> np.ndarray:
        """The first row of each chunk, and behind them the number of rows."""
        about = self._file.metadata
        return np.cumsum([0, *(about.row_group(number).num_rows for number in range(about.num_row_groups))])

    @cached_property
    def _order(self) -> np.ndarray | None:
        return None if self._info.in_time_order else np.load(Path(self.cache) / "order.npy", mmap_mode="r")

    @cached_property
    def _chunks(self) -> OrderedDict[int, DecodedChunk]:
        return OrderedDict()

    @property
    def _row_bytes(self) -> int:
        schema = self._info.schema
        num_single = len(schema.categories) + self.encoding.buckets * len(schema.numbers)
        return 4 * (2 + num_single + len(schema.numbers) + 8 * len(schema.lists))

    def _rows_of(self, indices: np.ndarray) -> np.ndarray:
        """The rows of the cache behind these samples."""
        places = indices + self._bounds[0]
        if self.split.by == "random":
            places = permute_positions(places, self._info.rows, self.split.seed)
        return places if self._order is None else self._order[places]

    def _chunk(self, number: int) -> DecodedChunk:
        chunks = self._chunks
        if number not in chunks:
            while len(chunks) >= max(2, self.memory // 2 // (ROW_GROUP_SIZE * self._row_bytes)):
                chunks.popitem(last=False)
            chunks[number] = self.transforms.decode(read_chunk_columns(self._file, number, self._info.schema))
        chunks.move_to_end(number)
        return chunks[number]

    def _columns(self) -> Iterator[dict[str, np.ndarray]]:
        """This part of the log chunk by chunk, for statistics: in the cache's order, of a list only the codes."""
        lo, hi = self._bounds
        mine = np.zeros(self._info.rows, bool)
        for start in range(lo, hi, ROW_GROUP_SIZE):
            mine[self._rows_of(np.arange(min(ROW_GROUP_SIZE, hi - start)) + (start - lo))] = True
        for number in range(len(self._starts) - 1):
            here = mine[self._starts[number] : self._starts[number + 1]]
            if here.any():
                columns = read_chunk_columns(self._file, number, self._info.schema)
                yield {name: _of_rows(values, here) for name, values in columns.items()}

    def __getstate__(self) -> dict[str, Any]:
        """Its fields alone: what was read travels to no other process."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


def read_chunk_columns(file: pq.ParquetFile, number: int, schema: Schema) -> dict[str, Any]:
    """The columns of a chunk as they lie in a cache; of a list its codes and offsets."""
    table = file.read_row_group(number, use_threads=False)
    found: dict[str, Any] = {}
    for name in table.column_names:
        array = table[name].combine_chunks()
        if name in schema.lists:
            found[name] = array.values.to_numpy(zero_copy_only=True), array.offsets.to_numpy(zero_copy_only=True)
        else:
            found[name] = array.to_numpy(zero_copy_only=True)
    return found


def _of_rows(values: Any, mine: np.ndarray) -> np.ndarray:
    if not isinstance(values, tuple):
        return values[mine]
    codes, offsets = values
    return codes[offsets[0] : offsets[-1]][np.repeat(mine, np.diff(offsets))]


def _faults(log: ClickLog) -> Iterator[str]:
    split = log.split
    if split.by not in ("time", "random"):
        yield f'split is "{split.by}"; allowed: time, random'
    for name in ("test", "validation"):
        if not 0 <= getattr(split, name) < 1:
            yield f"{name} share of the split is {getattr(split, name)}; wanted at least 0, less than 1"
    if split.test + split.validation >= 1:
        yield f"test {split.test} and validation {split.validation} leave nothing to train on"
    if log.memory < 1:
        yield f"memory is {log.memory} bytes; wanted 1 or more"
    yield from log.encoding.faults()

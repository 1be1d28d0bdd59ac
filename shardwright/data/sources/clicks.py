"""Source of one split (train, validation or test) of a click log, read from its Parquet cache.

Samples are read in chunks, the row groups of the cache; the most recently used chunks stay decoded. If the decoded log
exceeds half of `memory` bytes, the loader shuffles within windows (`span`), so that any file is read in bounded memory.

Shape legend: B samples.
"""

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow.parquet as pq

from shardwright.data.features import statistics
from shardwright.data.features.statistics import Moments, SplitStatistics
from shardwright.data.features.transforms import DecodedChunk, Encoding, Transforms
from shardwright.data.logs.convert import ROW_GROUP_SIZE, ConvertedLog, read_chunk_columns
from shardwright.data.logs.schema import CLICK, Schema
from shardwright.data.sources.held_out import HeldOutCaches, HeldOutFiles, chunk_starts, read_codes
from shardwright.data.sources.source import NumpyBatch, permute_positions
from shardwright.errors import UserError
from shardwright.spec import files
from shardwright.spec.checks import raise_if_any
from shardwright.spec.workload import FeatureStatistics, Growth

SplitName = Literal["train", "validation", "test"]


@dataclass(frozen=True)
class Split:
    """Splits the rows into train, validation and test, in this order.

    `test` and `validation` are shares of all rows. "time" keeps the log's order; "random" first permutes the rows by
    `seed`.
    """

    by: str = "time"
    test: float = 1 / 7
    validation: float = 0.0
    seed: int = 0

    def bounds(self, rows: int, part: SplitName) -> tuple[int, int]:
        """First row and end row of a split."""
        test_start = rows - round(rows * self.test)
        validation_start = test_start - round(rows * self.validation)
        return {
            "train": (0, validation_start),
            "validation": (validation_start, test_start),
            "test": (test_start, rows),
        }[part]


@dataclass(frozen=True)
class ClickLog:
    """Samples of one split of a converted click log."""

    cache: str
    split: Split = Split()
    encoding: Encoding = Encoding()
    part: SplitName = "train"
    memory: int = 1 << 30  # bytes per process; half of it is for value counts, later for decoded chunks
    held_out: HeldOutCaches = field(default=HeldOutCaches(), repr=False)  # files in place of shares of this log

    def __post_init__(self) -> None:
        raise_if_any(_validation_errors(self))

    @property
    def size(self) -> int:
        return self._bounds[1] - self._bounds[0]

    @property
    def span(self) -> int | None:
        """Samples per shuffle window; None if all samples fit in memory."""
        if self._info.rows * self._row_bytes <= self.memory // 2:
            return None
        if self.split.by == "random" or self._order is not None:
            needed_gib = 2 * self._info.rows * self._row_bytes / 2**30
            raise UserError(
                f"{self._info.origin}: rows are read in another order than they are stored in (split by "
                f"{self.split.by}), so all must fit in memory: set data.memory={needed_gib:.1f} (GiB), "
                "or use split by time with a file sorted by time"
            )
        return 2 * ROW_GROUP_SIZE

    @property
    def unknown_ids(self) -> tuple[int, ...]:
        """Table rows shared by several values: 0 for missing values, 1 for values outside the vocabulary."""
        return (0,) if self.encoding.rows else (0, 1)

    @property
    def schema(self) -> Schema:
        """The columns that are read, all by name."""
        return self._info.schema

    @property
    def num_dense(self) -> int:
        return len(self._info.schema.numbers)

    @property
    def features(self) -> tuple[tuple[str, int, bool], ...]:
        """(name, rows, is_multi_hot) of every categorical feature."""
        return self.transforms.features

    @property
    def number_names(self) -> tuple[str, ...]:
        """Names of the numeric columns."""
        return self._info.schema.numbers

    def id_shares(self, feature: str) -> np.ndarray:
        """By id of a category, its share of the training samples; of an id that was not counted, that of one sample."""
        if self.encoding.growth is not None:
            raise UserError(f'the table of "{feature}" grows, so its ids have no fixed shares; set correction=false')
        num_rows = next(rows for name, rows, _ in self.features if name == feature)
        counts = self.training_statistics.counts[feature]
        ids = self.transforms.ids_of_codes(feature, counts.codes)
        return np.maximum(np.bincount(ids, counts.counts, num_rows), 1.0) / max(1, self.training_statistics.rows)

    @property
    def base_rates(self) -> dict[str, float]:
        """The mean of each label in the training split, over the rows that have it."""
        statistics = self.training_statistics
        rates = {name: rate for name, (_, rate) in statistics.labels.items()}
        return rates or {CLICK: statistics.base_rate}  # files of statistics written before logs had several labels

    @property
    def growth(self) -> dict[str, Growth]:
        """How tables grow, by feature."""
        return self.transforms.growth

    @property
    def histories(self) -> Mapping[str, str]:
        """By history: the feature whose ids, and table, it has."""
        return self._info.schema.histories

    @property
    def sides(self) -> Mapping[str, str]:
        """By side feature of a history: the history."""
        return self._info.schema.sides

    @cached_property
    def transforms(self) -> Transforms:
        """Vocabularies and normalization fitted on the training split."""
        schema, encoding = self._info.schema, self.encoding
        entries: dict[str, np.ndarray] = {}
        moments: dict[str, Moments] = {}
        if not encoding.rows:
            for name, counts in self.training_statistics.counts.items():
                if name in schema.histories:
                    continue
                entries[name] = counts.codes[counts.counts - counts.max_error >= encoding.min_count]
        if schema.numbers:
            training = self.training_statistics
            moments = dict(training.logarithmic if encoding.log else training.plain)
        return Transforms(schema, encoding, entries, moments)

    @property
    def statistics(self) -> tuple[FeatureStatistics, ...]:
        """Feature statistics of the training split, for the planner."""
        return tuple(counts.feature_statistics(name) for name, counts in self.training_statistics.counts.items())

    @cached_property
    def training_statistics(self) -> SplitStatistics:
        """Statistics of the training split, computed once and stored in the cache."""
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
                training._columns(), schema.label_columns, categories, schema.numbers, training.memory // 2
            ),
        )

    def evaluation(self) -> "ClickLog | HeldOutFiles":
        """Source for evaluation during training: the validation rows, or the test rows if there are none."""
        return self._evaluation_log

    @cached_property
    def _evaluation_log(self) -> "ClickLog | HeldOutFiles":
        return self._held_out_rows("validation" if self._has_validation else "test")

    def test(self) -> "ClickLog | HeldOutFiles | None":
        """Source for the final evaluation; None if `evaluation` already has the test rows."""
        has_test = bool(self.split.test or self.held_out.test)
        return self._held_out_rows("test") if self._has_validation and has_test else None

    @property
    def _has_validation(self) -> bool:
        return bool(self.split.validation or self.held_out.validation)

    def _held_out_rows(self, part: Literal["validation", "test"]) -> "ClickLog | HeldOutFiles":
        caches = self.held_out.validation if part == "validation" else self.held_out.test
        return HeldOutFiles(caches, self.transforms) if caches else replace(self, part=part)

    def codes(self, column: str, indices: np.ndarray) -> np.ndarray:
        """The hash codes of a category column's values in the samples at `indices`; 0: missing."""
        return read_codes([self._file], column, self._cache_rows(indices))

    @property
    def origins(self) -> tuple[str, ...]:
        """The files that the samples are from."""
        return (self._info.origin,)

    def history_lengths(self, indices: np.ndarray) -> np.ndarray:
        """Number of ids of each sample's histories."""
        return self.transforms.count_history_ids(len(indices), self._select_rows(*self._locate(indices)))

    def take(self, indices: np.ndarray) -> NumpyBatch:
        return self.transforms.gather_samples(len(indices), self._select_rows(*self._locate(indices)))

    def _locate(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The chunk of each sample, and its row there."""
        rows = self._cache_rows(indices)
        chunk_B = np.searchsorted(self._starts, rows, side="right") - 1
        return chunk_B, rows - self._starts[chunk_B]

    def _select_rows(
        self, chunk_B: np.ndarray, row_B: np.ndarray
    ) -> Iterator[tuple[np.ndarray, DecodedChunk, np.ndarray]]:
        """For each chunk: the samples it holds, the decoded chunk, and the samples' rows in it."""
        for index in sorted(set(chunk_B.tolist())):
            samples = np.flatnonzero(chunk_B == index)
            yield samples, self._decoded_chunk(int(index)), row_B[samples]

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
        """The first row of each chunk, followed by the total number of rows."""
        return chunk_starts([self._file])

    @cached_property
    def _order(self) -> np.ndarray | None:
        return None if self._info.in_time_order else np.load(Path(self.cache) / "order.npy", mmap_mode="r")

    @cached_property
    def _chunks(self) -> OrderedDict[int, DecodedChunk]:
        return OrderedDict()

    @property
    def _row_bytes(self) -> int:
        """Approximate bytes of a decoded row, with 8 ids per list, or as many as a history may have."""
        schema = self._info.schema
        num_histories = len(schema.histories.keys() | schema.sides.keys())
        num_ids = len(schema.categories) + self.encoding.buckets * len(schema.numbers)
        num_ids += 8 * (len(schema.lists) - num_histories) + (schema.history_length or 8) * num_histories
        return 4 * (2 + len(schema.labels) + len(schema.numbers) + num_ids * (1 if self.encoding.growth is None else 2))

    def _cache_rows(self, indices: np.ndarray) -> np.ndarray:
        """Map sample indices to row numbers of the cache."""
        positions = indices + self._bounds[0]
        if self.split.by == "random":
            positions = permute_positions(positions, self._info.rows, self.split.seed)
        return positions if self._order is None else self._order[positions]

    def _decoded_chunk(self, index: int) -> DecodedChunk:
        """Return a decoded chunk from the LRU cache, or read it."""
        chunks = self._chunks
        if index not in chunks:
            while len(chunks) >= max(2, self.memory // 2 // (ROW_GROUP_SIZE * self._row_bytes)):
                chunks.popitem(last=False)
            chunks[index] = self.transforms.decode(read_chunk_columns(self._file, index, self._info.schema))
        chunks.move_to_end(index)
        return chunks[index]

    def _columns(self) -> Iterator[dict[str, np.ndarray]]:
        """Yield this split's columns chunk by chunk in cache order, for statistics; of lists only the codes."""
        lo, hi = self._bounds
        in_split = np.zeros(self._info.rows, bool)
        for start in range(lo, hi, ROW_GROUP_SIZE):
            in_split[self._cache_rows(np.arange(min(ROW_GROUP_SIZE, hi - start)) + (start - lo))] = True
        for index in range(len(self._starts) - 1):
            mask = in_split[self._starts[index] : self._starts[index + 1]]
            if mask.any():
                columns = read_chunk_columns(self._file, index, self._info.schema)
                yield {name: _select_values(values, mask) for name, values in columns.items()}

    def __getstate__(self) -> dict[str, Any]:
        """Pickle only the dataclass fields, not cached data."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


def _select_values(values: Any, mask: np.ndarray) -> np.ndarray:
    """Select the values of the rows in `mask`; of a list column all codes of these rows."""
    if not isinstance(values, tuple):
        return values[mask]
    codes, offsets = values
    return codes[offsets[0] : offsets[-1]][np.repeat(mask, np.diff(offsets))]


def _validation_errors(log: ClickLog) -> Iterator[str]:
    split = log.split
    if split.by not in ("time", "random"):
        yield f'split is "{split.by}"; allowed: time, random'
    for name in ("test", "validation"):
        if not 0 <= getattr(split, name) < 1:
            yield f"{name} share of the split is {getattr(split, name)}; wanted at least 0, less than 1"
    if split.test + split.validation >= 1:
        yield f"test {split.test} and validation {split.validation} leave no training rows; make them smaller"
    if log.memory < 1:
        yield f"memory is {log.memory} bytes; wanted 1 or more"
    yield from log.encoding.faults()

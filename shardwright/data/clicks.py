"""A click log as a source: its cache, which part of it, and how values become rows of tables.

Samples are read by chunks of the cache, the last few of which stay decoded. Where a part is larger than `memory` bytes
the loader shuffles inside windows (`span`), so that any file is read in bounded memory.

Shape legend: C categories, N numbers, R rows of a chunk, B samples.
"""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow.parquet as pq

from shardwright.data import statistics
from shardwright.data.convert import CHUNK, Converted
from shardwright.data.source import Rows, keys, permuted
from shardwright.data.statistics import Statistics
from shardwright.errors import UserError
from shardwright.kernels.columns import Vocabulary, hashed_rows
from shardwright.spec import files
from shardwright.spec.verdict import judge
from shardwright.spec.workload import FeatureStatistics

BUCKETS = 512  # rows of a number's buckets
Part = Literal["train", "validation", "test"]


@dataclass(frozen=True)
class Split:
    """The last `test` share of the rows, before it the `validation` share, before it what is trained on.

    By "time" rows are in the log's order, by "random" in a seeded one.
    """

    by: str = "time"
    test: float = 1 / 7
    validation: float = 0.0
    seed: int = 0

    def bounds(self, rows: int, part: Part) -> tuple[int, int]:
        test = rows - round(rows * self.test)
        validation = test - round(rows * self.validation)
        return {"train": (0, validation), "validation": (validation, test), "test": (test, rows)}[part]


@dataclass(frozen=True)
class Encoding:
    """Values to rows: hashed to `rows` of each table, or, with rows 0, a row for each value seen `min_count` times."""

    rows: int = 0
    min_count: int = 4
    log: bool = True  # numbers become log1p(|x|) with their sign before they are normalised
    buckets: bool = False  # each number is a category too: x itself below 3, from there floor(ln(x)^2)
    seed: int = 0


class _Chunk(NamedTuple):
    ids_RC: np.ndarray  # int32; a sample's ids side by side, since samples are drawn in any order
    numbers_RN: np.ndarray  # float32
    label_R: np.ndarray
    weight_R: np.ndarray | None
    lists: dict[str, tuple[np.ndarray, np.ndarray]]  # ids, and where each row's begin (R + 1)


@dataclass(frozen=True)
class ClickLog:
    """Samples of one part of a converted log."""

    cache: str
    split: Split = Split()
    encoding: Encoding = Encoding()
    part: Part = "train"
    memory: int = 1 << 30  # bytes that one process may keep: half for decoded samples, or, before, for counts

    def __post_init__(self) -> None:
        judge(_faults(self))

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
        return 2 * CHUNK

    @property
    def strangers(self) -> tuple[int, ...]:
        """Rows of a table that several values share: missing ones, and those without a row of their own."""
        return (0,) if self.encoding.rows else (0, 1)

    @property
    def num_dense(self) -> int:
        return len(self._info.schema.numbers)

    @cached_property
    def features(self) -> tuple[tuple[str, int, bool], ...]:
        """(name, rows, multi_hot) of every category and list."""
        schema = self._info.schema
        rows = {name: self.encoding.rows or vocabulary.rows for name, vocabulary in self._vocabularies.items()}
        rows |= dict.fromkeys(self._buckets, BUCKETS)
        return tuple((name, rows[name], name in schema.lists) for name in (*self._single, *schema.lists))

    @property
    def _buckets(self) -> tuple[str, ...]:
        return tuple(f"{name}_bucket" for name in self._info.schema.numbers) if self.encoding.buckets else ()

    @property
    def _single(self) -> tuple[str, ...]:
        """The features of one id each."""
        return (*self._info.schema.categories, *self._buckets)

    @property
    def statistics(self) -> tuple[FeatureStatistics, ...]:
        """Of the training part, for the planner."""
        return tuple(counts.statistics(name) for name, counts in self.training_statistics.counts.items())

    @cached_property
    def training_statistics(self) -> Statistics:
        split = self.split
        name = (
            f"{self.memory}-{split.by}-{split.test!r}-{split.validation!r}-{split.seed if split.by == 'random' else 0}"
        )
        training = replace(self, part="train")
        schema = self._info.schema
        categories = (*schema.categories, *schema.lists)
        return statistics.kept(
            Path(self.cache) / f"statistics-{name}.npz",
            lambda: statistics.gather(
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

    def take(self, indices: np.ndarray) -> Rows:
        rows = self._rows_of(indices)
        schema = self._info.schema
        num = len(rows)
        ids_BC = np.empty((num, len(self._single)), np.int32)
        dense_BN = np.empty((num, self.num_dense), np.float32)
        label_B = np.empty(num, np.float32)
        weight_B = None if schema.weight is None else np.empty(num, np.float32)
        bags: dict[str, list[Any]] = {name: [None] * num for name in schema.lists}
        chunk_B = np.searchsorted(self._starts, rows, side="right") - 1
        place_B = rows - self._starts[chunk_B]
        for number in sorted(set(chunk_B.tolist())):
            here = np.flatnonzero(chunk_B == number)
            chunk, place = self._chunk(int(number)), place_B[here]
            ids_BC[here] = chunk.ids_RC[place]
            dense_BN[here] = chunk.numbers_RN[place]
            label_B[here] = chunk.label_R[place]
            if weight_B is not None and chunk.weight_R is not None:
                weight_B[here] = chunk.weight_R[place]
            for name, (ids, starts) in chunk.lists.items():
                for sample, row in zip(here.tolist(), place.tolist(), strict=True):
                    bags[name][sample] = ids[starts[row] : starts[row + 1]]
        values, lengths = ids_BC.T.astype(np.int64, order="C").reshape(-1), self._ones(num)
        if bags:
            listed = [np.concatenate(bags[name]) if num else np.empty(0, np.int64) for name in schema.lists]
            values = np.concatenate([values, *listed], dtype=np.int64)
            lengths = np.stack([*lengths, *(np.fromiter(map(len, bags[name]), np.int64, num) for name in schema.lists)])
        return Rows(
            features=(*self._single, *schema.lists),
            values=values,
            lengths=lengths,
            dense=dense_BN,
            labels={"click": label_B},
            weights=weight_B,
        )

    def _ones(self, num: int) -> np.ndarray:
        """The lengths of features with one id each: the same memory for every batch of this size."""
        if self._lengths.shape[1] != num:
            self.__dict__["_lengths"] = np.ones((len(self._single), num), np.int64)
        return self._lengths

    @cached_property
    def _lengths(self) -> np.ndarray:
        return np.ones((len(self._single), 0), np.int64)

    @cached_property
    def _info(self) -> Converted:
        return files.read(Converted, Path(self.cache) / "log.json")

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
    def _vocabularies(self) -> dict[str, Vocabulary]:
        if self.encoding.rows:
            schema = self._info.schema
            return dict.fromkeys((*schema.categories, *schema.lists), Vocabulary(np.empty(0, np.uint64)))
        least = self.encoding.min_count
        return {
            name: Vocabulary(counts.codes[counts.counts - counts.error >= least])
            for name, counts in self.training_statistics.counts.items()
        }

    @cached_property
    def _chunks(self) -> OrderedDict[int, _Chunk]:
        return OrderedDict()

    @property
    def _row_bytes(self) -> int:
        schema = self._info.schema
        return 4 * (2 + len(self._single) + len(schema.numbers) + 8 * len(schema.lists))

    def _rows_of(self, indices: np.ndarray) -> np.ndarray:
        """The rows of the cache behind these samples."""
        places = indices + self._bounds[0]
        if self.split.by == "random":
            places = permuted(places, self._info.rows, self.split.seed)
        return places if self._order is None else self._order[places]

    def _chunk(self, number: int) -> _Chunk:
        chunks = self._chunks
        if number not in chunks:
            while len(chunks) >= max(2, self.memory // 2 // (CHUNK * self._row_bytes)):
                chunks.popitem(last=False)
            chunks[number] = self._decoded(number)
        chunks.move_to_end(number)
        return chunks[number]

    def _decoded(self, number: int) -> _Chunk:
        schema = self._info.schema
        columns = self._read(number)
        ids = [self._ids(name, columns[name]) for name in schema.categories]
        ids += [_bucket(columns[name]) for name in schema.numbers] if self.encoding.buckets else []
        num_rows = len(columns[schema.label])
        numbers = [self._normal(name, columns[name]) for name in schema.numbers]
        return _Chunk(
            np.stack(ids, axis=1) if ids else np.empty((num_rows, 0), np.int32),
            np.stack(numbers, axis=1) if numbers else np.empty((num_rows, 0), np.float32),
            columns[schema.label],
            None if schema.weight is None else columns[schema.weight],
            {name: (self._ids(name, columns[name][0]), columns[name][1]) for name in schema.lists},
        )

    def _read(self, number: int) -> dict[str, Any]:
        """The columns of a chunk as they lie in the cache; of a list its codes and offsets."""
        table = self._file.read_row_group(number, use_threads=False)
        found: dict[str, Any] = {}
        for name in table.column_names:
            array = table[name].combine_chunks()
            if name in self._info.schema.lists:
                found[name] = array.values.to_numpy(zero_copy_only=True), array.offsets.to_numpy(zero_copy_only=True)
            else:
                found[name] = array.to_numpy(zero_copy_only=True)
        return found

    def _ids(self, name: str, codes: np.ndarray) -> np.ndarray:
        codes = np.ascontiguousarray(codes, np.uint64)
        if self.encoding.rows:
            salt = int(keys(self.encoding.seed, *name.encode(), num=1)[0])
            return hashed_rows(codes, salt, self.encoding.rows)
        return self._vocabularies[name].rows_of(codes)

    def _normal(self, name: str, numbers: np.ndarray) -> np.ndarray:
        """Of mean 0 and deviation 1 over the training part; missing ones become 0."""
        found = self.training_statistics
        moments = (found.logarithmic if self.encoding.log else found.plain)[name]
        numbers = statistics.logarithm(numbers) if self.encoding.log else numbers
        return np.nan_to_num((numbers - moments.mean) / moments.deviation, nan=0.0).astype(np.float32)

    def _columns(self) -> Iterator[dict[str, np.ndarray]]:
        """This part of the log chunk by chunk, for statistics: in the cache's order, of a list only the codes."""
        lo, hi = self._bounds
        mine = np.zeros(self._info.rows, bool)
        for start in range(lo, hi, CHUNK):
            mine[self._rows_of(np.arange(min(CHUNK, hi - start)) + (start - lo))] = True
        for number in range(len(self._starts) - 1):
            here = mine[self._starts[number] : self._starts[number + 1]]
            if here.any():
                columns = self._read(number)
                yield {name: _of_rows(values, here) for name, values in columns.items()}

    def __getstate__(self) -> dict[str, Any]:
        """Its fields alone: what was read travels to no other process."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


def _bucket(numbers: np.ndarray) -> np.ndarray:
    """Row 0 is missing, row 1 negative, rows 2 to 4 are 0 to 2, then floor(ln(x)^2)."""
    with np.errstate(invalid="ignore", divide="ignore"):
        large = 4 + np.floor(np.log(np.maximum(numbers, 3)) ** 2)
        found = np.where(numbers < 0, 1, np.where(numbers < 3, 2 + np.floor(numbers), large))
    return np.nan_to_num(np.minimum(found, BUCKETS - 1), nan=0).astype(np.int32)


def _of_rows(values: Any, mine: np.ndarray) -> np.ndarray:
    if not isinstance(values, tuple):
        return values[mine]
    codes, offsets = values
    return codes[offsets[0] : offsets[-1]][np.repeat(mine, np.diff(offsets))]


def _faults(log: ClickLog) -> Iterator[str]:
    split, encoding = log.split, log.encoding
    if split.by not in ("time", "random"):
        yield f'split is "{split.by}"; allowed: time, random'
    for name in ("test", "validation"):
        if not 0 <= getattr(split, name) < 1:
            yield f"{name} share of the split is {getattr(split, name)}; wanted at least 0, less than 1"
    if split.test + split.validation >= 1:
        yield f"test {split.test} and validation {split.validation} leave nothing to train on"
    if encoding.rows and not 2 <= encoding.rows < 2**31:
        yield f"rows is {encoding.rows}; wanted 0 for a vocabulary, or 2 to 2**31 - 1 rows to hash to"
    if log.memory < 1:
        yield f"memory is {log.memory} bytes; wanted 1 or more"
    if encoding.min_count < 1:
        yield f"min_count is {encoding.min_count}; wanted 1 or more"

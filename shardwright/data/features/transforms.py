"""Transform a click log's columns to table rows and normalized numbers.

Training, streaming and serving use the same transforms. A folder stores them as transforms.json and vocabularies.npz
(the codes of each vocabulary). Must not import torch.

Shape legend: R rows of a chunk, C single-id features or the codes of a list column, N numbers, B samples.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from shardwright.data.features import statistics
from shardwright.data.features.histories import clean_lists
from shardwright.data.features.statistics import Moments
from shardwright.data.logs.schema import Schema
from shardwright.data.sources.source import NumpyBatch, stream_keys
from shardwright.errors import UserError, check_regular_file, did_you_mean
from shardwright.kernels.hashing import Vocabulary, hash_strings, hash_to_rows
from shardwright.spec import files
from shardwright.spec.workload import Growth

VERSION = 1
NUM_BUCKETS = 512  # table rows of a bucketed number
TRANSFORMS_FILE, VOCABULARIES_FILE = "transforms.json", "vocabularies.npz"


@dataclass(frozen=True)
class Encoding:
    """How values become table rows: hashed to `rows`; 0: a vocabulary of values seen >= `min_count` times.
    `growth`: every value has an id of its own, and a table rows for up to `rows` of them."""

    rows: int = 0
    min_count: int = 4
    log: bool = True  # numbers become sign(x) * log1p(|x|) before they are normalized
    buckets: bool = False  # add each number as a category: x itself below 3, else floor(ln(x)^2)
    seed: int = 0
    growth: Growth | None = None
    normalize: bool = True  # numbers get mean 0 and deviation 1 over the training split

    def faults(self) -> Iterator[str]:
        if self.rows and not 2 <= self.rows < 2**31:
            yield f"rows is {self.rows}; wanted 0 for a vocabulary, or 2 to 2**31 - 1 rows to hash to"
        if self.growth is not None and not self.rows:
            yield "growth is given without rows; set rows to the most rows that a table may have"
        if self.min_count < 1:
            yield f"min_count is {self.min_count}; wanted 1 or more"


class DecodedChunk(NamedTuple):
    """Rows of a click log as table rows and normalized numbers."""

    ids_RC: (
        np.ndarray
    )  # int32, int64 if tables grow; the ids of a sample are contiguous, since samples are drawn in random order
    numbers_RN: np.ndarray  # float32
    labels: dict[str, np.ndarray]  # by name (R,); NaN where it is missing
    weight_R: np.ndarray | None
    lists: dict[str, tuple[np.ndarray, np.ndarray]]  # ids, and the offsets (R + 1,) of each row's ids


@dataclass(frozen=True)
class _TransformsFile:
    version: int
    schema: Schema
    encoding: Encoding
    moments: dict[str, Moments]
    entries: dict[str, int]  # size of each vocabulary


@dataclass(frozen=True)
class Transforms:
    """Transforms of columns, fitted on a log's training split or on the first file of a stream."""

    schema: Schema  # without "*": all categories by name
    encoding: Encoding
    vocabulary_codes: Mapping[str, np.ndarray]  # codes in the vocabulary of each column; none if values are hashed
    moments: Mapping[str, Moments]  # of each numeric column; with `encoding.log`, of its logarithms

    @cached_property
    def features(self) -> tuple[tuple[str, int, bool], ...]:
        """(name, rows, is_multi_hot) of every category and list."""
        rows = {name: self.encoding.rows or vocabulary.num_rows for name, vocabulary in self._vocabularies.items()}
        rows |= {name: rows[column] for name, column in self.histories.items()}
        rows |= dict.fromkeys(self._bucket_features, NUM_BUCKETS)
        return tuple(
            (name, rows[name], name in self.schema.lists) for name in (*self.single_id_features, *self.schema.lists)
        )

    @property
    def growth(self) -> dict[str, Growth]:
        """How tables grow, by feature; empty if ids are rows."""
        growth = self.encoding.growth
        return {} if growth is None else dict.fromkeys(self._own_columns, growth)

    @property
    def histories(self) -> Mapping[str, str]:
        """By history: the feature whose ids, and table, it has."""
        return self.schema.histories

    @property
    def sides(self) -> Mapping[str, str]:
        """By side feature of a history: the history."""
        return self.schema.sides

    @cached_property
    def digest(self) -> str:
        """16 hex digits of a SHA-256 over the fields; equal digests transform equally."""
        encoding = repr(self.encoding)
        for default in (", growth=None", ", normalize=True"):  # of fields that came after the first version
            encoding = encoding.replace(default, "")
        sha = sha256(f"({self.schema.identity_text()}, {encoding}, {sorted(self.moments.items())!r})".encode())
        for name in sorted(self.vocabulary_codes):
            sha.update(name.encode() + np.ascontiguousarray(self.vocabulary_codes[name]).tobytes())
        return sha.hexdigest()[:16]

    @property
    def num_dense(self) -> int:
        return len(self.schema.numbers)

    @property
    def number_names(self) -> tuple[str, ...]:
        """Names of the numeric columns."""
        return self.schema.numbers

    def ids_of_codes(self, name: str, codes: np.ndarray) -> np.ndarray:
        """Table rows of values of a category or list, given by their hash codes."""
        return self._ids(name, codes)

    @property
    def unknown_ids(self) -> tuple[int, ...]:
        """Table rows that stand for missing values (0) and for values outside the vocabulary (1)."""
        return (0,) if self.encoding.rows else (0, 1)

    @cached_property
    def single_id_features(self) -> tuple[str, ...]:
        """Names of the features with exactly one id per sample."""
        return (*self.schema.categories, *self._bucket_features)

    def decode(self, columns: Mapping[str, Any]) -> DecodedChunk:
        """Transform a chunk of the cache: an array per column, for a list column (codes, offsets)."""
        schema = self.schema
        labels = {name: columns[column] for name, column in schema.label_columns.items()}
        num_rows = len(next(iter(labels.values())))
        numbers_NR = np.empty((self.num_dense, num_rows), np.float32)
        for row, name in zip(numbers_NR, schema.numbers, strict=True):
            row[:] = columns[name]
        ids = [self._ids(name, columns[name]) for name in schema.categories]
        ids += list(_to_buckets(numbers_NR)) if self.encoding.buckets else []
        return DecodedChunk(
            np.stack(ids, axis=1) if ids else np.empty((num_rows, 0), self._id_dtype),
            np.ascontiguousarray(self._normalize(numbers_NR).T),
            labels,
            None if schema.weight is None else columns[schema.weight],
            {name: (self._ids(name, codes), ends) for name, (codes, ends) in clean_lists(schema, columns).items()},
        )

    def gather_samples(self, num: int, selections: Iterable[tuple[np.ndarray, DecodedChunk, np.ndarray]]) -> NumpyBatch:
        """Gather `num` samples; each selection is (sample indices, chunk, the chunk's rows that they are)."""
        schema = self.schema
        ids_BC = np.empty((num, len(self.single_id_features)), self._id_dtype)
        dense_BN = np.empty((num, self.num_dense), np.float32)
        labels = {name: np.empty(num, np.float32) for name in schema.label_columns}
        weight_B = None if schema.weight is None else np.empty(num, np.float32)
        selections = list(selections)
        for samples, chunk, rows in selections:
            ids_BC[samples] = chunk.ids_RC[rows]
            dense_BN[samples] = chunk.numbers_RN[rows]
            for name, label_B in labels.items():
                label_B[samples] = chunk.labels[name][rows]
            if weight_B is not None and chunk.weight_R is not None:
                weight_B[samples] = chunk.weight_R[rows]
        values, lengths = ids_BC.T.astype(np.int64, order="C").reshape(-1), self._single_id_lengths(num)
        if schema.lists:
            lists = [
                _gather_lists(num, [(samples, *chunk.lists[name], rows) for samples, chunk, rows in selections])
                for name in schema.lists
            ]
            values = np.concatenate([values, *(ids for ids, _ in lists)], dtype=np.int64)
            lengths = np.stack([*lengths, *(length_B for _, length_B in lists)])
        return NumpyBatch(
            features=(*self.single_id_features, *schema.lists),
            values=values,
            lengths=lengths,
            dense=dense_BN,
            labels=labels,
            weights=weight_B,
        )

    def count_history_ids(
        self, num: int, selections: Iterable[tuple[np.ndarray, DecodedChunk, np.ndarray]]
    ) -> np.ndarray:
        """(B,) number of ids of the histories of `num` samples, selected as in `gather_samples`."""
        total_B, names = np.zeros(num, np.int64), self.histories.keys() - self.sides.keys()
        for samples, chunk, rows in selections:
            for name in names:
                _, offsets = chunk.lists[name]
                total_B[samples] += offsets[rows + 1] - offsets[rows]
        return total_B

    def encode_samples(self, samples: Sequence[Mapping[str, Any]]) -> NumpyBatch:
        """Transform samples of a prediction request, by column name; absent columns are missing values."""
        allowed, schema = self._input_columns, self.schema
        for number, sample in enumerate(samples):
            if not allowed.issuperset(sample):
                unknown = str(next(name for name in sample if name not in allowed))[:60]  # from an untrusted client
                raise UserError(f'sample {number}: unknown key "{unknown}"{did_you_mean(unknown, allowed)}')
        num = len(samples)
        columns: dict[str, Any] = {name: np.zeros(num, np.float32) for name in schema.label_columns.values()}
        if schema.weight is not None:
            columns[schema.weight] = np.ones(num, np.float32)
        for name in schema.numbers:
            columns[name] = _to_numbers(name, [sample.get(name) for sample in samples])
        tails = dict(schema.tail)
        for tail in {tails.get(name, 0) for name in schema.categories}:
            names = [name for name in schema.categories if tails.get(name, 0) == tail]
            texts = [_to_text(name, i, sample.get(name)) for name in names for i, sample in enumerate(samples)]
            columns |= zip(names, _hash_codes(texts, tail).reshape(len(names), num), strict=True)
        for name in schema.lists:
            columns[name] = _hash_lists(name, [sample.get(name) for sample in samples])
        return self.gather_samples(num, [(np.arange(num), self.decode(columns), np.arange(num))])

    def write(self, folder: Path) -> None:
        names = list(self.vocabulary_codes)
        with (folder / VOCABULARIES_FILE).open("wb") as file:
            np.savez(file, *(self.vocabulary_codes[name] for name in names))
        sizes = {name: len(self.vocabulary_codes[name]) for name in names}
        header = _TransformsFile(VERSION, self.schema, self.encoding, dict(self.moments), sizes)
        files.write(header, folder / TRANSFORMS_FILE)

    @classmethod
    def read(cls, folder: Path) -> "Transforms":
        path = folder / TRANSFORMS_FILE
        header = files.read(_TransformsFile, path)
        if header.version != VERSION:
            raise UserError(f"{path}: version {header.version}; this Shardwright reads version {VERSION}")
        path = folder / VOCABULARIES_FILE
        check_regular_file(path)
        try:
            with np.load(path, allow_pickle=False) as arrays:
                codes = {name: arrays[f"arr_{index}"] for index, name in enumerate(header.entries)}
        except (OSError, ValueError, KeyError) as error:
            raise UserError(f"{path}: cannot be read ({error}); the folder is damaged, create it again") from None
        for name, size in header.entries.items():
            if len(codes[name]) != size:
                raise UserError(f'{path}: "{name}" has {len(codes[name])} values, wanted {size}; create it again')
        return cls(header.schema, header.encoding, codes, header.moments)

    @property
    def _bucket_features(self) -> tuple[str, ...]:
        return tuple(f"{name}_bucket" for name in self.schema.numbers) if self.encoding.buckets else ()

    @cached_property
    def _input_columns(self) -> frozenset[str]:
        return frozenset((*self.schema.numbers, *self.schema.categories, *self.schema.lists))

    @cached_property
    def _vocabularies(self) -> dict[str, Vocabulary]:
        none = np.empty(0, np.uint64)
        return {name: Vocabulary(self.vocabulary_codes.get(name, none)) for name in self._own_columns}

    @property
    def _own_columns(self) -> tuple[str, ...]:
        """Categories and lists with ids of their own; histories have those of another column."""
        return tuple(name for name in (*self.schema.categories, *self.schema.lists) if name not in self.histories)

    def _ids(self, name: str, values: np.ndarray) -> np.ndarray:
        values, name = np.ascontiguousarray(values, np.uint64), self.histories.get(name, name)
        if self.encoding.growth is not None:
            return values.view(np.int64)
        if self.encoding.rows:
            return hash_to_rows(values, self._salts[name], self.encoding.rows)
        return self._vocabularies[name].rows_of(values)

    @property
    def _id_dtype(self) -> type[np.signedinteger[Any]]:
        return np.int32 if self.encoding.growth is None else np.int64

    @cached_property
    def _salts(self) -> dict[str, int]:
        return {name: int(stream_keys(self.encoding.seed, *name.encode(), num=1)[0]) for name in self._own_columns}

    def _normalize(self, numbers_NR: np.ndarray) -> np.ndarray:
        """Normalize to mean 0 and standard deviation 1, where the encoding says so; missing numbers become 0."""
        mean_N, deviation_N = self._moments
        numbers_NR = statistics.signed_log1p(numbers_NR) if self.encoding.log else numbers_NR
        if not self.encoding.normalize:
            return np.nan_to_num(numbers_NR, nan=0.0)
        return np.nan_to_num((numbers_NR - mean_N[:, None]) / deviation_N[:, None], nan=0.0)

    @cached_property
    def _moments(self) -> np.ndarray:
        moments = [self.moments[name] for name in self.schema.numbers]
        return np.array([[column.mean for column in moments], [column.deviation for column in moments]], np.float32)

    def _single_id_lengths(self, num: int) -> np.ndarray:
        """Lengths of the single-id features, all 1; batches of equal size share one array."""
        if self._lengths.shape[1] != num:
            self.__dict__["_lengths"] = np.ones((len(self.single_id_features), num), np.int64)
        return self._lengths

    @cached_property
    def _lengths(self) -> np.ndarray:
        return np.ones((len(self.single_id_features), 0), np.int64)


def _to_numbers(name: str, values: Sequence[Any]) -> np.ndarray:
    for number, value in enumerate(values):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise UserError(f'sample {number}: "{name}" is {_short_repr(value)}; wanted a number, or null')
    with np.errstate(over="ignore"):
        numbers_B = np.array([np.nan if value is None else _to_float(value) for value in values]).astype(np.float32)
    if np.isinf(numbers_B).any():
        number = int(np.isinf(numbers_B).argmax())
        raise UserError(f'sample {number}: "{name}" is {_short_repr(values[number])}, which does not fit a float32')
    return numbers_B


def _to_float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _hash_codes(texts: Sequence[bytes], tail: int = 0) -> np.ndarray:
    offsets = np.zeros(len(texts) + 1, np.int32)
    np.cumsum(np.fromiter(map(len, texts), np.int32, len(texts)), out=offsets[1:])
    return hash_strings(offsets, np.frombuffer(b"".join(texts), np.uint8), tail=tail)


def _hash_lists(name: str, values: Sequence[Any]) -> tuple[np.ndarray, np.ndarray]:
    """Codes of all items of a list column, and offsets of each sample's items."""
    for number, value in enumerate(values):
        if value is not None and not isinstance(value, list | tuple):
            raise UserError(f'sample {number}: "{name}" is {_short_repr(value)}; wanted a list of texts, or null')
    offsets = np.cumsum([0, *(len(value or ()) for value in values)])
    numbers = np.repeat(np.arange(len(values)), np.diff(offsets)).tolist()  # the sample of each item
    items = [item for value in values for item in value or ()]
    return _hash_codes([_to_text(name, number, item) for number, item in zip(numbers, items, strict=True)]), offsets


def _gather_lists(num: int, selections: Sequence[tuple[np.ndarray, ...]]) -> tuple[np.ndarray, np.ndarray]:
    """The ids of a list column in the order of `num` samples, and how many each has.

    A selection is (sample indices, ids of a chunk, offsets of its rows, rows of the samples).
    """
    length_B = np.zeros(num, np.int64)
    for samples, _, offsets, rows in selections:
        length_B[samples] = offsets[rows + 1] - offsets[rows]
    start_B, values = length_B.cumsum() - length_B, np.empty(length_B.sum(), np.int64)
    for samples, ids, offsets, rows in selections:
        lengths = length_B[samples]
        place = np.arange(lengths.sum()) - np.repeat(lengths.cumsum() - lengths, lengths)  # in its list
        values[np.repeat(start_B[samples], lengths) + place] = ids[np.repeat(offsets[rows], lengths) + place]
    return values, length_B


def _to_text(name: str, number: int, value: Any) -> bytes:
    """Convert a category of a sample to the bytes that it has in a click log."""
    match value:
        case str():
            return value.encode("utf-8", "surrogatepass")
        case None:
            return b""
        case bool():
            pass
        case int():
            return b"%d" % value
    raise UserError(f'sample {number}: "{name}" is {_short_repr(value)}; wanted text or a whole number, or null')


def _short_repr(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}..."


def _to_buckets(numbers: np.ndarray) -> np.ndarray:
    """Numbers to table rows: 0 for missing, 1 for negative, 2 to 4 for [0, 3), else 4 + floor(ln(x)^2)."""
    with np.errstate(invalid="ignore", divide="ignore"):
        large = 4 + np.floor(np.log(np.maximum(numbers, 3)) ** 2)
        rows = np.where(numbers < 0, 1, np.where(numbers < 3, 2 + np.floor(numbers), large))
    return np.nan_to_num(np.minimum(rows, NUM_BUCKETS - 1), nan=0).astype(np.int32)

"""From a log's values to rows of tables and numbers of mean 0: one way for what is trained, streamed and served.

Kept in a folder: transforms.json, and vocabularies.npz with the codes that have rows of their own. No torch here.

Shape legend: R rows of a chunk, C features of one id, N numbers, B samples.
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
from shardwright.data.features.statistics import Moments
from shardwright.data.logs.schema import Schema
from shardwright.data.sources.source import NumpyBatch, stream_keys
from shardwright.errors import UserError, check_regular_file, did_you_mean
from shardwright.kernels.hashing import Vocabulary, hash_strings, hash_to_rows
from shardwright.spec import files

VERSION = 1
NUM_BUCKETS = 512  # rows of a number's buckets
TRANSFORMS_FILE, VOCABULARIES_FILE = "transforms.json", "vocabularies.npz"


@dataclass(frozen=True)
class Encoding:
    """Values to rows: hashed to `rows` of each table, or, with rows 0, a row for each value seen `min_count` times."""

    rows: int = 0
    min_count: int = 4
    log: bool = True  # numbers become log1p(|x|) with their sign before they are normalised
    buckets: bool = False  # each number is a category too: x itself below 3, from there floor(ln(x)^2)
    seed: int = 0

    def faults(self) -> Iterator[str]:
        if self.rows and not 2 <= self.rows < 2**31:
            yield f"rows is {self.rows}; wanted 0 for a vocabulary, or 2 to 2**31 - 1 rows to hash to"
        if self.min_count < 1:
            yield f"min_count is {self.min_count}; wanted 1 or more"


class DecodedChunk(NamedTuple):
    """Rows of a log as they are trained on."""

    ids_RC: np.ndarray  # int32; a sample's ids side by side, since samples are drawn in any order
    numbers_RN: np.ndarray  # float32
    label_R: np.ndarray
    weight_R: np.ndarray | None
    lists: dict[str, tuple[np.ndarray, np.ndarray]]  # ids, and where each row's begin (R + 1)


@dataclass(frozen=True)
class _Kept:
    version: int
    schema: Schema
    encoding: Encoding
    moments: dict[str, Moments]
    entries: dict[str, int]  # of each vocabulary


@dataclass(frozen=True)
class Transforms:
    """What became of a log's columns when it was first read."""

    schema: Schema  # categories spelled out
    encoding: Encoding
    vocabulary_codes: Mapping[str, np.ndarray]  # codes with a row of their own, by column; none where values are hashed
    moments: Mapping[str, Moments]  # of each column of numbers, logarithms already taken where they are

    @cached_property
    def features(self) -> tuple[tuple[str, int, bool], ...]:
        """(name, rows, multi_hot) of every category and list."""
        rows = {name: self.encoding.rows or vocabulary.num_rows for name, vocabulary in self._vocabularies.items()}
        rows |= dict.fromkeys(self._bucketed, NUM_BUCKETS)
        return tuple(
            (name, rows[name], name in self.schema.lists) for name in (*self.single_id_features, *self.schema.lists)
        )

    @cached_property
    def digest(self) -> str:
        """16 hex digits of all that it does."""
        found = sha256(repr((self.schema, self.encoding, sorted(self.moments.items()))).encode())
        for name in sorted(self.vocabulary_codes):
            found.update(name.encode() + np.ascontiguousarray(self.vocabulary_codes[name]).tobytes())
        return found.hexdigest()[:16]

    @property
    def num_dense(self) -> int:
        return len(self.schema.numbers)

    @property
    def unknown_ids(self) -> tuple[int, ...]:
        """Rows of a table that several values share: missing ones, and those without a row of their own."""
        return (0,) if self.encoding.rows else (0, 1)

    @cached_property
    def single_id_features(self) -> tuple[str, ...]:
        """The features of one id each."""
        return (*self.schema.categories, *self._bucketed)

    def decode(self, columns: Mapping[str, Any]) -> DecodedChunk:
        """Columns as a cache has them, of a list its codes and offsets."""
        schema = self.schema
        num_rows = len(columns[schema.label])
        numbers_NR = np.empty((self.num_dense, num_rows), np.float32)
        for row, name in zip(numbers_NR, schema.numbers, strict=True):
            row[:] = columns[name]
        ids = [self._ids(name, columns[name]) for name in schema.categories]
        ids += list(_buckets(numbers_NR)) if self.encoding.buckets else []
        return DecodedChunk(
            np.stack(ids, axis=1) if ids else np.empty((num_rows, 0), np.int32),
            np.ascontiguousarray(self._normal(numbers_NR).T),
            columns[schema.label],
            None if schema.weight is None else columns[schema.weight],
            {name: self._bags(name, *_drop_blank_items(*columns[name])) for name in schema.lists},
        )

    def gather_samples(self, num: int, selections: Iterable[tuple[np.ndarray, DecodedChunk, np.ndarray]]) -> NumpyBatch:
        """`num` samples from decoded chunks: which of the samples, and which rows of the chunk they are."""
        schema = self.schema
        ids_BC = np.empty((num, len(self.single_id_features)), np.int32)
        dense_BN = np.empty((num, self.num_dense), np.float32)
        label_B = np.empty(num, np.float32)
        weight_B = None if schema.weight is None else np.empty(num, np.float32)
        bags: dict[str, list[Any]] = {name: [None] * num for name in schema.lists}
        for here, chunk, place in selections:
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
        return NumpyBatch(
            features=(*self.single_id_features, *schema.lists),
            values=values,
            lengths=lengths,
            dense=dense_BN,
            labels={"click": label_B},
            weights=weight_B,
        )

    def encode_samples(self, samples: Sequence[Mapping[str, Any]]) -> NumpyBatch:
        """Samples as they are asked about, by the names of the log's columns; what is not given is missing."""
        known, schema = self._known, self.schema
        for number, sample in enumerate(samples):
            if not known.issuperset(sample):
                strange = str(next(name for name in sample if name not in known))[:60]  # a stranger's may be long
                raise UserError(f'sample {number}: unknown key "{strange}"{did_you_mean(strange, known)}')
        num = len(samples)
        columns: dict[str, Any] = {schema.label: np.zeros(num, np.float32)}
        if schema.weight is not None:
            columns[schema.weight] = np.ones(num, np.float32)
        for name in schema.numbers:
            columns[name] = _numbers(name, [sample.get(name) for sample in samples])
        tails = dict(schema.tail)
        for tail in {tails.get(name, 0) for name in schema.categories}:
            names = [name for name in schema.categories if tails.get(name, 0) == tail]
            texts = [_text(name, at, sample.get(name)) for name in names for at, sample in enumerate(samples)]
            columns |= zip(names, _codes(texts, tail).reshape(len(names), num), strict=True)
        for name in schema.lists:
            columns[name] = _lists(name, [sample.get(name) for sample in samples])
        return self.gather_samples(num, [(np.arange(num), self.decode(columns), np.arange(num))])

    def write(self, folder: Path) -> None:
        names = list(self.vocabulary_codes)
        with (folder / VOCABULARIES_FILE).open("wb") as file:
            np.savez(file, *(self.vocabulary_codes[name] for name in names))
        sizes = {name: len(self.vocabulary_codes[name]) for name in names}
        files.write(_Kept(VERSION, self.schema, self.encoding, dict(self.moments), sizes), folder / TRANSFORMS_FILE)

    @classmethod
    def read(cls, folder: Path) -> "Transforms":
        kept = files.read(_Kept, folder / TRANSFORMS_FILE)
        if kept.version != VERSION:
            raise UserError(
                f"{folder / TRANSFORMS_FILE}: version {kept.version}; this Shardwright reads version {VERSION}"
            )
        path = folder / VOCABULARIES_FILE
        check_regular_file(path)
        try:
            with np.load(path, allow_pickle=False) as arrays:
                entries = {name: arrays[f"arr_{at}"] for at, name in enumerate(kept.entries)}
        except (OSError, ValueError, KeyError) as error:
            raise UserError(f"{path}: cannot be read ({error}); the folder is damaged, make it anew") from None
        for name, size in kept.entries.items():
            if len(entries[name]) != size:
                raise UserError(f'{path}: "{name}" has {len(entries[name])} values, wanted {size}; make it anew')
        return cls(kept.schema, kept.encoding, entries, kept.moments)

    @property
    def _bucketed(self) -> tuple[str, ...]:
        return tuple(f"{name}_bucket" for name in self.schema.numbers) if self.encoding.buckets else ()

    @cached_property
    def _known(self) -> frozenset[str]:
        return frozenset((*self.schema.numbers, *self.schema.categories, *self.schema.lists))

    @cached_property
    def _vocabularies(self) -> dict[str, Vocabulary]:
        none = np.empty(0, np.uint64)
        return {
            name: Vocabulary(self.vocabulary_codes.get(name, none))
            for name in (*self.schema.categories, *self.schema.lists)
        }

    def _ids(self, name: str, values: np.ndarray) -> np.ndarray:
        values = np.ascontiguousarray(values, np.uint64)
        if self.encoding.rows:
            return hash_to_rows(values, self._salts[name], self.encoding.rows)
        return self._vocabularies[name].rows_of(values)

    def _bags(self, name: str, codes_C: np.ndarray, offsets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return self._ids(name, codes_C), offsets

    @cached_property
    def _salts(self) -> dict[str, int]:
        names = (*self.schema.categories, *self.schema.lists)
        return {name: int(stream_keys(self.encoding.seed, *name.encode(), num=1)[0]) for name in names}

    def _normal(self, numbers_NR: np.ndarray) -> np.ndarray:
        """Of mean 0 and deviation 1; missing ones become 0."""
        mean_N, deviation_N = self._moments
        numbers_NR = statistics.signed_log1p(numbers_NR) if self.encoding.log else numbers_NR
        return np.nan_to_num((numbers_NR - mean_N[:, None]) / deviation_N[:, None], nan=0.0)

    @cached_property
    def _moments(self) -> np.ndarray:
        moments = [self.moments[name] for name in self.schema.numbers]
        return np.array([[one.mean for one in moments], [one.deviation for one in moments]], np.float32)

    def _ones(self, num: int) -> np.ndarray:
        """The lengths of features with one id each: the same memory for every batch of this size."""
        if self._lengths.shape[1] != num:
            self.__dict__["_lengths"] = np.ones((len(self.single_id_features), num), np.int64)
        return self._lengths

    @cached_property
    def _lengths(self) -> np.ndarray:
        return np.ones((len(self.single_id_features), 0), np.int64)


def _drop_blank_items(codes_C: np.ndarray, offsets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Remove the missing items (code 0) of a list column. Every reader and every request passes through here."""
    present = codes_C != 0
    if present.all():
        return codes_C, offsets
    num_before = np.concatenate([np.zeros(1, np.int64), np.cumsum(present)])
    return codes_C[present], num_before[offsets]


def _numbers(name: str, values: Sequence[Any]) -> np.ndarray:
    for number, value in enumerate(values):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise UserError(f'sample {number}: "{name}" is {_shown(value)}; wanted a number, or null')
    with np.errstate(over="ignore"):
        found = np.array([np.nan if value is None else _float(value) for value in values]).astype(np.float32)
    if np.isinf(found).any():
        number = int(np.isinf(found).argmax())
        raise UserError(f'sample {number}: "{name}" is {_shown(values[number])}, which no float32 holds')
    return found


def _float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _codes(texts: Sequence[bytes], tail: int = 0) -> np.ndarray:
    offsets = np.zeros(len(texts) + 1, np.int32)
    np.cumsum(np.fromiter(map(len, texts), np.int32, len(texts)), out=offsets[1:])
    return hash_strings(offsets, np.frombuffer(b"".join(texts), np.uint8), tail=tail)


def _lists(name: str, values: Sequence[Any]) -> tuple[np.ndarray, np.ndarray]:
    for number, value in enumerate(values):
        if value is not None and not isinstance(value, list | tuple):
            raise UserError(f'sample {number}: "{name}" is {_shown(value)}; wanted a list of texts, or null')
    offsets = np.cumsum([0, *(len(value or ()) for value in values)])
    of = np.repeat(np.arange(len(values)), np.diff(offsets)).tolist()
    texts = [one for value in values for one in value or ()]
    return _codes([_text(name, number, one) for number, one in zip(of, texts, strict=True)]), offsets


def _text(name: str, number: int, value: Any) -> bytes:
    """A category as a log would have it."""
    match value:
        case str():
            return value.encode("utf-8", "surrogatepass")
        case None:
            return b""
        case bool():
            pass
        case int():
            return b"%d" % value
    raise UserError(f'sample {number}: "{name}" is {_shown(value)}; wanted text or a whole number, or null')


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}..."


def _buckets(numbers: np.ndarray) -> np.ndarray:
    """Row 0 is missing, row 1 negative, rows 2 to 4 are 0 to 2, then floor(ln(x)^2)."""
    with np.errstate(invalid="ignore", divide="ignore"):
        large = 4 + np.floor(np.log(np.maximum(numbers, 3)) ** 2)
        found = np.where(numbers < 0, 1, np.where(numbers < 3, 2 + np.floor(numbers), large))
    return np.nan_to_num(np.minimum(found, NUM_BUCKETS - 1), nan=0).astype(np.int32)

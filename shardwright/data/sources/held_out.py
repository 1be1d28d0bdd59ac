"""Rows of files that are evaluated on, with the transforms that were fitted on a training log.

Each file has its own cache, as the training log has. Rows keep the order of their files.

Shape legend: B samples.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from shardwright.data.features.transforms import DecodedChunk, Transforms
from shardwright.data.logs.convert import ROWS_FILE, ConvertedLog, read_chunk_columns
from shardwright.data.sources.source import NumpyBatch
from shardwright.spec import files

MAX_CHUNKS = 2  # decoded chunks in memory; an evaluation reads the rows in their order


@dataclass(frozen=True)
class HeldOutCaches:
    """The caches of the files `data.test` and `data.valid`."""

    test: tuple[str, ...] = ()
    validation: tuple[str, ...] = ()


@dataclass(frozen=True)
class HeldOutFiles:
    """The rows of one or more converted files, as a finite source."""

    caches: tuple[str, ...]
    transforms: Transforms = field(repr=False, compare=False)

    @property
    def size(self) -> int:
        return int(self._starts[-1])

    @property
    def origins(self) -> tuple[str, ...]:
        """The files that the samples are from."""
        return tuple(files.read(ConvertedLog, Path(cache) / "log.json").origin for cache in self.caches)

    def take(self, indices: np.ndarray) -> NumpyBatch:
        return self.transforms.gather_samples(len(indices), self._select_rows(indices))

    def codes(self, column: str, indices: np.ndarray) -> np.ndarray:
        """The hash codes of a category column's values in the samples at `indices`; 0: missing."""
        return read_codes(self._files, column, indices)

    def _select_rows(self, rows: np.ndarray) -> Iterator[tuple[np.ndarray, DecodedChunk, np.ndarray]]:
        """For each chunk: the samples it holds, the decoded chunk, and the samples' rows in it."""
        chunk_B = np.searchsorted(self._starts, rows, side="right") - 1
        for index in np.unique(chunk_B).tolist():
            samples = np.flatnonzero(chunk_B == index)
            yield samples, self._decoded_chunk(index), rows[samples] - self._starts[index]

    def _decoded_chunk(self, index: int) -> DecodedChunk:
        chunks = self._chunks
        if index not in chunks:
            if len(chunks) >= MAX_CHUNKS:
                chunks.popitem(last=False)
            file, number = locate_chunk(self._files, index)
            chunks[index] = self.transforms.decode(read_chunk_columns(file, number, self.transforms.schema))
        chunks.move_to_end(index)
        return chunks[index]

    @cached_property
    def _files(self) -> list[pq.ParquetFile]:
        return [pq.ParquetFile(Path(cache) / ROWS_FILE) for cache in self.caches]

    @cached_property
    def _starts(self) -> np.ndarray:
        return chunk_starts(self._files)

    @cached_property
    def _chunks(self) -> OrderedDict[int, DecodedChunk]:
        return OrderedDict()

    def __getstate__(self) -> dict[str, Any]:
        """Pickle only the dataclass fields, not cached data."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


def chunk_starts(caches: Sequence[pq.ParquetFile]) -> np.ndarray:
    """The first row of each chunk, the row groups of all files, followed by the total number of rows."""
    metadata = [file.metadata for file in caches]
    return np.cumsum([0, *(each.row_group(i).num_rows for each in metadata for i in range(each.num_row_groups))])


def locate_chunk(caches: Sequence[pq.ParquetFile], index: int) -> tuple[pq.ParquetFile, int]:
    """The file and the row group that chunk `index` of all files is."""
    for file in caches:
        if index < file.num_row_groups:
            return file, index
        index -= file.num_row_groups
    raise IndexError(index)


def read_codes(caches: Sequence[pq.ParquetFile], column: str, rows: np.ndarray) -> np.ndarray:
    """The hash codes of a category column at rows of the caches; reads each chunk once."""
    starts = chunk_starts(caches)
    chunk_B, code_B = np.searchsorted(starts, rows, side="right") - 1, np.empty(len(rows), np.uint64)
    for index in np.unique(chunk_B).tolist():
        samples = np.flatnonzero(chunk_B == index)
        file, number = locate_chunk(caches, index)
        values = file.read_row_group(number, columns=[column], use_threads=False)[column].to_numpy()
        code_B[samples] = values[rows[samples] - starts[index]]
    return code_B

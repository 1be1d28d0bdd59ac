"""Endless source over a growing directory: sample i is row i of its files in order of their names.

Transforms (vocabularies and normalization) are fitted once, on the first file, or taken from an earlier run (`like`),
and applied to all rows. Reading rows that do not exist yet waits for them. Must not import torch.

Shape legend: B samples.
"""

import json
import shutil
import sys
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow.parquet as pq

from shardwright.data.features.statistics import REFERENCE_BATCH_SIZE
from shardwright.data.features.transforms import TRANSFORMS_FILE, DecodedChunk, Encoding, Transforms
from shardwright.data.logs.convert import CACHE_DIRECTORY, ROW_GROUP_SIZE, ROWS_FILE, read_chunk_columns
from shardwright.data.logs.schema import SCHEMAS, Schema, read_schema
from shardwright.data.sources.clicks import ClickLog, Split
from shardwright.data.sources.journal import JOURNAL_FILE, POLL_SECONDS, Journal
from shardwright.data.sources.source import NumpyBatch, Pause
from shardwright.errors import UserError
from shardwright.spec import files
from shardwright.spec.checks import raise_if_any
from shardwright.spec.statistics import LogStatistics
from shardwright.spec.workload import FeatureStatistics, Growth

VERSION = 1
STATISTICS_FILE = "statistics.json"
MAX_CACHED = 16  # open files; also decoded chunks. Few suffice, since a stream is read sequentially


class _OpenCache(NamedTuple):
    """The open cache of a file."""

    file: pq.ParquetFile
    starts: np.ndarray  # the first row of each chunk, followed by the total number of rows
    order: np.ndarray | None  # row numbers sorted by time; None if the rows are stored in this order


@dataclass(frozen=True)
class GrowingLog:
    """Samples of a growing directory; created by `open_stream`."""

    directory: str
    folder: str  # cache of this stream: journal, converted files, transforms, statistics
    first: str  # name of the file that holds sample 0
    learned: str  # subdirectory of `folder` that holds the transforms
    digest: str  # digest of the transforms
    strict: bool = True
    memory: int = field(default=1 << 30, repr=False)  # bytes per process; half of it for decoded chunks

    in_order = True

    @property
    def size(self) -> None:
        return None

    @property
    def unknown_ids(self) -> tuple[int, ...]:
        """Table rows shared by several values: 0 for missing values, 1 for values outside the vocabulary."""
        return self.transforms.unknown_ids

    @property
    def num_dense(self) -> int:
        return self.transforms.num_dense

    @property
    def features(self) -> tuple[tuple[str, int, bool], ...]:
        """(name, rows, is_multi_hot) of every categorical feature."""
        return self.transforms.features

    @property
    def histories(self) -> Mapping[str, str]:
        """By history: the feature whose ids, and table, it has."""
        return self.transforms.histories

    @property
    def sides(self) -> Mapping[str, str]:
        """By side feature of a history: the history."""
        return self.transforms.sides

    @property
    def growth(self) -> dict[str, Growth]:
        """How tables grow, by feature."""
        return self.transforms.growth

    @cached_property
    def transforms(self) -> Transforms:
        """Transforms that were fitted when the stream was first opened; later files do not change them."""
        return Transforms.read(Path(self.folder) / self.learned)

    @cached_property
    def statistics(self) -> tuple[FeatureStatistics, ...]:
        """Feature statistics of the first file, for the planner."""
        return files.read(LogStatistics, Path(self.folder) / STATISTICS_FILE).features

    def wait(self, num: int, pause: Pause = time.sleep) -> None:
        """Wait until samples 0 to num - 1 exist, calling pause(seconds) between polls."""
        self._journal.wait(num, self.transforms.schema, pause)

    def history_digest(self, num: int) -> list[Any]:
        """Number of files with samples 0 to num - 1, as known to this process, and a digest of the files."""
        journal = self._journal
        if journal.num_samples < num:
            journal.refresh()
        num_files = int(np.searchsorted(journal.offsets, min(num, journal.num_samples)))
        return [num_files, journal.digests[num_files]]

    def verify(self, history: Sequence[Any]) -> None:
        """Raise UserError unless the journal begins with the files of `history`: otherwise samples would differ."""
        num_files, digest = history
        journal, schema = self._journal, self.transforms.schema
        while len(journal.entries) < num_files and journal.catch_up(schema):
            pass
        if journal.digests[num_files : num_files + 1] != [digest]:
            raise UserError(
                f"{self.folder}: the first {num_files:,} files of its journal are not the files that the run was "
                "trained on: the journal was lost or is from another host, and files were deleted before they were "
                f"recorded again; restore the journal, or the files (then remove {self.folder}), or start a new run"
            )

    def history_lengths(self, indices: np.ndarray) -> np.ndarray:
        """Number of ids of each sample's histories."""
        return self.transforms.count_history_ids(len(indices), self._select_rows(indices))

    def take(self, indices: np.ndarray) -> NumpyBatch:
        if len(indices):
            self.wait(int(indices.max()) + 1)
        return self.transforms.gather_samples(len(indices), self._select_rows(indices))

    def _select_rows(self, indices: np.ndarray) -> Iterator[tuple[np.ndarray, DecodedChunk, np.ndarray]]:
        """For each chunk: the samples it holds, the decoded chunk, and the samples' rows in it."""
        starts = self._journal.offsets
        file_B = np.searchsorted(starts, indices, side="right") - 1
        for file_index in np.unique(file_B).tolist():
            samples = np.flatnonzero(file_B == file_index)
            cache = self._open_cache(file_index)
            rows = indices[samples] - starts[file_index]
            rows = rows if cache.order is None else cache.order[rows]
            chunks = np.searchsorted(cache.starts, rows, side="right") - 1
            for chunk in np.unique(chunks).tolist():
                in_chunk = chunks == chunk
                yield samples[in_chunk], self._decoded_chunk(file_index, chunk), rows[in_chunk] - cache.starts[chunk]

    @cached_property
    def _journal(self) -> Journal:
        journal = Journal(Path(self.directory), Path(self.folder), strict=self.strict)
        journal.refresh()
        if not journal.entries or journal.entries[0].name != self.first:
            raise UserError(f"{self.folder}: its journal does not begin with {self.first}; was it removed meanwhile?")
        return journal

    def _open_cache(self, file_index: int) -> _OpenCache:
        """Return the open cache of a file from the LRU cache, or open it."""
        open_caches = self._open_caches
        if file_index not in open_caches:
            while len(open_caches) >= MAX_CACHED:
                open_caches.popitem(last=False)[1].file.close()
            open_caches[file_index] = self._open_or_restore(file_index)
        open_caches.move_to_end(file_index)
        return open_caches[file_index]

    def _open_or_restore(self, file_index: int) -> _OpenCache:
        """Open the cache of a file; convert the file again if its cache was dropped."""
        entry = self._journal.entries[file_index]
        cache = self._journal.caches / entry.cache
        if not self._journal.restore_cache(entry, self.transforms.schema):
            lo = int(self._journal.offsets[file_index])
            needed = f"samples {lo:,} to {lo + entry.rows - 1:,} are needed"
            raise UserError(
                f"{Path(self.directory) / entry.name}: was deleted or changed, and its cache dropped, but {needed}; "
                "continue from a later checkpoint, or start a new run with another data.cache, or remove "
                f"{self.folder} once no run needs it: a new run then starts with the first file that still exists"
            )
        order_path = cache / "order.npy"
        try:
            file = pq.ParquetFile(cache / ROWS_FILE)
            order = np.load(order_path, mmap_mode="r", allow_pickle=False) if order_path.exists() else None
        except (ValueError, EOFError) as error:
            raise UserError(
                f"{cache}: damaged ({error}); remove it: it is created again if {entry.name} still exists"
            ) from None
        metadata = file.metadata
        starts = np.cumsum([0, *(metadata.row_group(group).num_rows for group in range(metadata.num_row_groups))])
        return _OpenCache(file, starts, order)

    def _decoded_chunk(self, file_index: int, chunk: int) -> DecodedChunk:
        """Return a decoded chunk from the LRU cache, or read it."""
        chunks, transforms = self._chunks, self.transforms
        if (file_index, chunk) not in chunks:
            while len(chunks) >= max(2, min(MAX_CACHED, self.memory // 2 // (ROW_GROUP_SIZE * self._row_bytes))):
                chunks.popitem(last=False)
            columns = read_chunk_columns(self._open_cache(file_index).file, chunk, transforms.schema)
            chunks[file_index, chunk] = transforms.decode(columns)
        chunks.move_to_end((file_index, chunk))
        return chunks[file_index, chunk]

    @property
    def _row_bytes(self) -> int:
        """Approximate bytes of a decoded row, with 8 ids per list."""
        transforms = self.transforms
        return 4 * (2 + len(transforms.single_id_features) + transforms.num_dense + 8 * len(transforms.schema.lists))

    @cached_property
    def _open_caches(self) -> OrderedDict[int, _OpenCache]:
        return OrderedDict()

    @cached_property
    def _chunks(self) -> OrderedDict[tuple[int, int], DecodedChunk]:
        return OrderedDict()

    def __getstate__(self) -> dict[str, Any]:
        """Pickle only the dataclass fields, not cached data."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


def open_stream(
    path: str = "",
    *,
    schema: str | Mapping[str, Any] = "",
    like: str = "",
    encoding: Mapping[str, Any] | None = None,
    strict: bool = True,
    memory: float = 1.0,
    cache: str = CACHE_DIRECTORY,
) -> GrowingLog:
    """Open a growing directory as a source; waits for the first row.

    Give either `schema`, the name of a known schema, a TOML file or its keys, or `like`, a run or a folder with
    transforms, whose schema, vocabularies and moments are then used. `memory` is in GiB per process.
    """
    if not path:
        raise UserError('key "data.path" is missing; name the directory, as in data=DIRECTORY')
    if not Path(path).is_dir():
        raise UserError(f"data.path={path}: no such directory; a stream is a directory to which files are added")
    if memory * 2**30 < 1:
        raise UserError(f"data.memory={memory}; wanted more than 0 GiB")
    transforms, parsed_schema, parsed_encoding = _resolve_format(like, schema, encoding)
    key = _digest(VERSION, str(Path(path).resolve()), parsed_schema.plain(), strict)
    folder = Path(cache) / f"{Path(path).resolve().name}-{key}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{folder}: cannot be written ({error.strerror}); set data.cache to another path") from None
    journal = Journal(Path(path), folder, strict=strict)
    journal.refresh()
    journal.scan_directory()
    journal.wait(1, parsed_schema, time.sleep)
    if malformed := sum(entry.malformed for entry in journal.entries):
        print(
            f"{folder / JOURNAL_FILE}: {malformed:,} malformed rows were skipped in the files so far",
            file=sys.stderr,
        )
    memory_bytes = int(memory * 2**30)
    subdirectory = _ensure_transforms(journal, folder, transforms, parsed_encoding, memory_bytes)
    digest = Transforms.read(folder / subdirectory).digest
    return GrowingLog(path, str(folder), journal.entries[0].name, subdirectory, digest, strict, memory_bytes)


def _resolve_format(
    like: str, schema: str | Mapping[str, Any], encoding: Mapping[str, Any] | None
) -> tuple[Transforms | None, Schema, Encoding]:
    """Transforms of `like` (None: fit them on the first file), schema of the files, and encoding."""
    if like:
        for key, value in (("schema", schema), ("encoding", encoding)):
            if value:
                raise UserError(
                    f"data.{key} and data.like={like} are both set, but data.like determines {key}; remove one of them"
                )
        transforms = _read_transforms(Path(like))
        return transforms, transforms.schema, transforms.encoding
    if not schema:
        raise UserError(
            f'key "data.schema" is missing: {", ".join(SCHEMAS)}, a TOML file, or a section, that describes the columns'
        )
    parsed_schema = read_schema(schema)
    parsed_encoding = files.from_plain(Encoding, dict(encoding or {}), "data.encoding")
    raise_if_any(parsed_encoding.faults())
    return None, parsed_schema, parsed_encoding


def _read_transforms(path: Path) -> Transforms:
    for folder in (path, path / "transforms"):
        if (folder / TRANSFORMS_FILE).is_file():
            return Transforms.read(folder)
    raise UserError(
        f"data.like={path}: neither it nor {path / 'transforms'} holds {TRANSFORMS_FILE}; give a run that has it"
    )


def _ensure_transforms(
    journal: Journal, folder: Path, transforms: Transforms | None, encoding: Encoding, memory: int
) -> str:
    """Name of the transforms' subdirectory; the first process that gets the lock creates it."""
    name = f"first-{_digest(asdict(encoding))}" if transforms is None else f"like-{transforms.digest}"
    while not ((folder / name).exists() and (folder / STATISTICS_FILE).exists()):
        with journal.try_lock() as is_locked:
            if is_locked:
                _write_transforms(journal, folder / name, transforms, encoding, memory)
                return name
        time.sleep(POLL_SECONDS)
    return name


def _write_transforms(
    journal: Journal, directory: Path, transforms: Transforms | None, encoding: Encoding, memory: int
) -> None:
    """Write transforms (None: fit them on the first file) and statistics, each atomically."""
    entry = next(entry for entry in journal.entries if entry.rows)
    log = ClickLog(str(journal.caches / entry.cache), Split(test=0.0), encoding, memory=memory)
    if not (directory.parent / STATISTICS_FILE).exists():
        totals = log.training_statistics
        statistics = LogStatistics(1, entry.name, totals.rows, totals.base_rate, REFERENCE_BATCH_SIZE, log.statistics)
        files.write(statistics, directory.parent / STATISTICS_FILE)
    if not directory.exists():
        draft = directory.parent / ".draft"
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir()
        (transforms or log.transforms).write(draft)
        draft.rename(directory)


def _digest(*words: Any) -> str:
    return sha256(json.dumps(words).encode()).hexdigest()[:16]

"""A directory that grows, as a source without end: sample i is the i-th row of its files in the order of their names.

What became of a log's columns is learned once, of the first file or of an earlier log (`like`), and kept: all rows
that follow are read by it. Whoever asks for rows that are not there yet waits. No torch here.

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
from shardwright.data.logs.convert import CACHE_DIRECTORY, ROW_GROUP_SIZE, ROWS_FILE
from shardwright.data.logs.schema import SCHEMAS, Schema, read_schema
from shardwright.data.sources.clicks import ClickLog, Split, read_chunk_columns
from shardwright.data.sources.journal import JOURNAL_FILE, POLL_SECONDS, Journal
from shardwright.data.sources.source import NumpyBatch, Pause
from shardwright.errors import UserError
from shardwright.spec import files
from shardwright.spec.checks import raise_if_any
from shardwright.spec.statistics import LogStatistics
from shardwright.spec.workload import FeatureStatistics

VERSION = 1
STATISTICS_FILE = "statistics.json"
MAX_CACHED = 16  # chunks and files: a stream is read forwards, so what lies behind is not asked for again


class _Opened(NamedTuple):
    """The cache of a file."""

    file: pq.ParquetFile
    starts: np.ndarray  # the first row of each chunk, and behind them the number of rows
    order: np.ndarray | None  # which row comes when, where the schema has a time and the file another order


@dataclass(frozen=True)
class GrowingLog:
    """Samples of a directory, as `open_stream` finds it."""

    directory: str
    folder: str  # of the cache: journal, rows, and what was learned
    first: str  # the file that the count begins with
    learned: str  # a folder in it: what became of the columns
    digest: str  # of that
    strict: bool = True
    memory: int = field(default=1 << 30, repr=False)  # bytes, half of which may hold decoded samples

    in_order = True

    @property
    def size(self) -> None:
        return None

    @property
    def unknown_ids(self) -> tuple[int, ...]:
        """Rows of a table that several values share: missing ones, and those without a row of their own."""
        return self.transforms.unknown_ids

    @property
    def num_dense(self) -> int:
        return self.transforms.num_dense

    @property
    def features(self) -> tuple[tuple[str, int, bool], ...]:
        """(name, rows, multi_hot) of every category and list."""
        return self.transforms.features

    @cached_property
    def transforms(self) -> Transforms:
        """As they were learned, whatever came since."""
        return Transforms.read(Path(self.folder) / self.learned)

    @cached_property
    def statistics(self) -> tuple[FeatureStatistics, ...]:
        """Of the first file, for the planner."""
        return files.read(LogStatistics, Path(self.folder) / STATISTICS_FILE).features

    def wait(self, num: int, pause: Pause = time.sleep) -> None:
        """Until samples 0 to num - 1 are there."""
        self._journal.wait(num, self.transforms.schema, pause)

    def history_digest(self, num: int) -> list[Any]:
        """The number of files, as far as this process knows them, that samples 0 to num - 1 are of, and a digest."""
        journal = self._journal
        if journal.num_samples < num:
            journal.refresh()
        files_ = int(np.searchsorted(journal.offsets, min(num, journal.num_samples)))
        return [files_, journal.digests[files_]]

    def verify(self, history: Sequence[Any]) -> None:
        """Refuse to go on from `counted` where other files were counted since, or fewer: sample i is another there."""
        files_, digest = history
        journal, schema = self._journal, self.transforms.schema
        while len(journal.entries) < files_ and journal.catch_up(schema):
            pass
        if journal.digests[files_ : files_ + 1] != [digest]:
            raise UserError(
                f"{self.folder}: the first {files_:,} files of its journal are not those that the run was trained on: "
                "the journal was lost, or is another host's, and files were deleted before they were counted again; "
                f"bring back journal or files (then remove {self.folder}), or start a new run"
            )

    def take(self, indices: np.ndarray) -> NumpyBatch:
        if len(indices):
            self.wait(int(indices.max()) + 1)
        return self.transforms.gather_samples(len(indices), self._parts(indices))

    def _parts(self, indices: np.ndarray) -> Iterator[tuple[np.ndarray, DecodedChunk, np.ndarray]]:
        starts = self._journal.offsets
        file_B = np.searchsorted(starts, indices, side="right") - 1
        for number in np.unique(file_B).tolist():
            here = np.flatnonzero(file_B == number)
            opened = self._opened(number)
            rows = indices[here] - starts[number]
            rows = rows if opened.order is None else opened.order[rows]
            chunks = np.searchsorted(opened.starts, rows, side="right") - 1
            for chunk in np.unique(chunks).tolist():
                inside = chunks == chunk
                yield here[inside], self._chunk(number, chunk), rows[inside] - opened.starts[chunk]

    @cached_property
    def _journal(self) -> Journal:
        found = Journal(Path(self.directory), Path(self.folder), strict=self.strict)
        found.refresh()
        if not found.entries or found.entries[0].name != self.first:
            raise UserError(f"{self.folder}: its journal does not begin with {self.first}; was it removed meanwhile?")
        return found

    def _opened(self, number: int) -> _Opened:
        held = self._files
        if number not in held:
            while len(held) >= MAX_CACHED:
                held.popitem(last=False)[1].file.close()
            held[number] = self._open(number)
        held.move_to_end(number)
        return held[number]

    def _open(self, number: int) -> _Opened:
        entry = self._journal.entries[number]
        cache = self._journal.caches / entry.cache
        if not self._journal.restore_cache(entry, self.transforms.schema):
            lo = int(self._journal.offsets[number])
            asked = f"samples of it ({lo:,} to {lo + entry.rows - 1:,}) are asked for"
            raise UserError(
                f"{Path(self.directory) / entry.name}: was deleted or changed, and its cache dropped, but {asked}; go "
                "on from a later checkpoint, or start a new run with another data.cache, or once no run needs "
                f"{self.folder} and it is removed: that counts from the first file which is there"
            )
        order = cache / "order.npy"
        try:
            file = pq.ParquetFile(cache / ROWS_FILE)
            place = np.load(order, mmap_mode="r", allow_pickle=False) if order.exists() else None
        except (ValueError, EOFError) as error:
            raise UserError(
                f"{cache}: damaged ({error}); remove it: it is made again while {entry.name} is there"
            ) from None
        about = file.metadata
        starts = np.cumsum([0, *(about.row_group(group).num_rows for group in range(about.num_row_groups))])
        return _Opened(file, starts, place)

    def _chunk(self, number: int, chunk: int) -> DecodedChunk:
        held, transforms = self._chunks, self.transforms
        if (number, chunk) not in held:
            while len(held) >= max(2, min(MAX_CACHED, self.memory // 2 // (ROW_GROUP_SIZE * self._row_bytes))):
                held.popitem(last=False)
            columns = read_chunk_columns(self._opened(number).file, chunk, transforms.schema)
            held[number, chunk] = transforms.decode(columns)
        held.move_to_end((number, chunk))
        return held[number, chunk]

    @property
    def _row_bytes(self) -> int:
        transforms = self.transforms
        return 4 * (2 + len(transforms.single_id_features) + transforms.num_dense + 8 * len(transforms.schema.lists))

    @cached_property
    def _files(self) -> OrderedDict[int, _Opened]:
        return OrderedDict()

    @cached_property
    def _chunks(self) -> OrderedDict[tuple[int, int], DecodedChunk]:
        return OrderedDict()

    def __getstate__(self) -> dict[str, Any]:
        """Its fields alone: what was read travels to no other process."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


def open_stream(
    path: str = "",
    *,
    schema: str = "",
    like: str = "",
    encoding: Mapping[str, Any] | None = None,
    strict: bool = True,
    memory: float = 1.0,
    cache: str = CACHE_DIRECTORY,
) -> GrowingLog:
    """The rows of a directory as they come; waits for the first.

    `schema` is a known one's name or a TOML file; or `like` a run, or a folder with transforms, whose schema,
    vocabularies and moments these rows are read with. `memory` is how many GiB each process may keep of them.
    """
    if not path:
        raise UserError('key "data.path" is missing; name the directory, as in data=DIRECTORY')
    if not Path(path).is_dir():
        raise UserError(f"data.path={path}: no such directory; a stream is a directory that files are put into")
    if memory * 2**30 < 1:
        raise UserError(f"data.memory={memory}; wanted more than 0 GiB")
    given, form, how = _form(like, schema, encoding)
    key = _key(VERSION, str(Path(path).resolve()), asdict(form), strict)
    folder = Path(cache) / f"{Path(path).resolve().name}-{key}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{folder}: cannot be written ({error.strerror}); set data.cache to another place") from None
    journal = Journal(Path(path), folder, strict=strict)
    journal.refresh()
    journal.scan_directory()
    journal.wait(1, form, time.sleep)
    if malformed := sum(entry.malformed for entry in journal.entries):
        print(
            f"{folder / JOURNAL_FILE}: {malformed:,} rows of the files so far are malformed and left out",
            file=sys.stderr,
        )
    bytes_ = int(memory * 2**30)
    learned = _learned(journal, folder, given, how, bytes_)
    digest = Transforms.read(folder / learned).digest
    return GrowingLog(path, str(folder), journal.entries[0].name, learned, digest, strict, bytes_)


def _form(like: str, schema: str, encoding: Mapping[str, Any] | None) -> tuple[Transforms | None, Schema, Encoding]:
    """What these rows are to be read with, the schema of the files, and the encoding where that is to be learned."""
    if like:
        for key, value in (("schema", schema), ("encoding", encoding)):
            if value:
                raise UserError(f"data.{key} beside data.like={like}, which says it already; drop one of the two")
        given = _like(Path(like))
        return given, given.schema, given.encoding
    if not schema:
        raise UserError(
            f'key "data.schema" is missing: {", ".join(SCHEMAS)}, or a TOML file that says what the columns are'
        )
    form = read_schema(schema)
    how = files.from_plain(Encoding, dict(encoding or {}), "data.encoding")
    raise_if_any(how.faults())
    return None, form, how


def _like(place: Path) -> Transforms:
    for folder in (place, place / "transforms"):
        if (folder / TRANSFORMS_FILE).is_file():
            return Transforms.read(folder)
    raise UserError(
        f"data.like={place}: neither it nor {place / 'transforms'} holds {TRANSFORMS_FILE}; name a run that has it"
    )


def _learned(journal: Journal, folder: Path, given: Transforms | None, encoding: Encoding, memory: int) -> str:
    """The folder of what these rows are read with, made by the first process that comes, of the first rows."""
    name = f"first-{_key(asdict(encoding))}" if given is None else f"like-{given.digest}"
    while not ((folder / name).exists() and (folder / STATISTICS_FILE).exists()):
        with journal.try_lock() as mine:
            if mine:
                _learn(journal, folder / name, given, encoding, memory)
                return name
        time.sleep(POLL_SECONDS)
    return name


def _learn(journal: Journal, place: Path, given: Transforms | None, encoding: Encoding, memory: int) -> None:
    """Transforms and statistics, each complete or absent."""
    entry = next(entry for entry in journal.entries if entry.rows)
    log = ClickLog(str(journal.caches / entry.cache), Split(test=0.0), encoding, memory=memory)
    if not (place.parent / STATISTICS_FILE).exists():
        found = log.training_statistics
        about = LogStatistics(1, entry.name, found.rows, found.base_rate, REFERENCE_BATCH_SIZE, log.statistics)
        files.write(about, place.parent / STATISTICS_FILE)
    if not place.exists():
        draft = place.parent / ".draft"
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir()
        (given or log.transforms).write(draft)
        draft.rename(place)


def _key(*words: Any) -> str:
    return sha256(json.dumps(words).encode()).hexdigest()[:16]

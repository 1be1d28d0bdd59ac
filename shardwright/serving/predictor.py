"""A predictor: an exported model that scores samples, and applies a run's publications meanwhile.

An update has two phases. First a publication is read, verified and rounded to the tables' stored dtype, while requests
are answered. Then all its rows are written under a lock between two calls of the model, so that every answer is of one
training step.
"""

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Event, Lock, Thread
from typing import Any

import torch
from torch import Tensor

from shardwright.checkpoint import publications, step_directories
from shardwright.checkpoint.arrays import ArrayReader, read_header
from shardwright.checkpoint.manifest import MODEL_PREFIX, Manifest
from shardwright.checkpoint.publications import ModelVersion
from shardwright.data.features.transforms import Transforms
from shardwright.data.loading.loader import to_batch
from shardwright.errors import UserError
from shardwright.jagged import Batch, check_batch, select
from shardwright.kernels.native import trim_freed_memory
from shardwright.rectangle import Rectangle
from shardwright.serving import manifest, program
from shardwright.serving.growing_table import EndedRows
from shardwright.serving.manifest import (
    PROBABILITY,
    PROGRAM_FILE,
    TABLES_FILE,
    TRANSFORMS_DIRECTORY,
    logical_rows,
)
from shardwright.serving.mapped_tables import MappedTables, RowUpdate
from shardwright.serving.request_ids import parse_id_samples

POLL_SECONDS = 0.05  # between checks for new publications
ERROR_RETRY_SECONDS = 2.0  # between checks after an error
MAX_STARTUP_ATTEMPTS = 3


@dataclass(slots=True)
class FollowStatus:
    """Counts and times of the publications that a predictor has applied."""

    num_applied: int = 0
    rows_replaced: int = 0
    lag_seconds: float = 0.0  # of the last publication: from the end of its training step until it was applied
    pause_seconds: float = 0.0  # of the last publication: how long requests waited
    has_found_directory: bool = False  # whether the publications' folder has existed
    error: str = ""  # of the last check


class Predictor:
    """An exported model that scores samples and can follow a run. Thread-safe; call `close` at the end."""

    def __init__(
        self,
        path: str | Path,
        follow: str | Path | None = None,
        *,
        verify: bool = False,
        device: torch.device | str = "cpu",
    ) -> None:
        """`follow`: a run, or a folder of publications, that a thread checks for updates every `POLL_SECONDS`.

        `verify`: read all tables first, and compare every block with its digest. `device`: of the dense model; rows of
        tables are looked up in host memory.
        """
        self.path, self._device = Path(path), torch.device(device)
        self.served = manifest.read(self.path)
        if verify:
            self._verify()
        self.tables = MappedTables(self.served, self.path)
        self._program = program.load(self.path / PROGRAM_FILE, self._device)
        self._weights = {f"{MODEL_PREFIX}{name}": tensor for name, tensor in self._program.state_dict().items()}
        transforms = self.path / TRANSFORMS_DIRECTORY
        self._transforms = Transforms.read(transforms) if transforms.is_dir() else None
        self._lock, self._update_lock = Lock(), Lock()  # of the weights; of `update`
        self._version = ModelVersion(self.served.step, self.served.line, self.served.time)
        self._table_names = {weight_name: name for name, weight_name in self.served.names.items()}
        self._last_publication = ""  # path and modification time at the last check
        self.followed = FollowStatus()
        self._stopped, self._thread = Event(), None
        self._root = None if follow is None else _publications_folder(Path(follow))
        if self._root is not None:
            self._catch_up()
            self._thread = Thread(target=self._follow, name="follower", daemon=True)
            self._thread.start()

    @property
    def step(self) -> int:
        """The training step of the current weights."""
        return self._version.step

    def read(self, samples: Sequence[Mapping[str, Any]]) -> Batch:
        """Convert samples to a batch.

        A sample is {column: value} for a model of a click log, else {"ids": {feature: ids}, "numbers": [...]}.
        """
        if self._transforms is not None:
            return to_batch(self._transforms.encode_samples(samples))
        dtype = getattr(torch, self.served.numbers)
        return parse_id_samples(self.served.features, self.served.num_dense, samples, dtype)

    def answer(self, samples: Sequence[Mapping[str, Any]]) -> tuple[int, list[Any]]:
        """Score samples as `read` takes them; returns the weights' training step and a score per sample.

        The score of a model with several tasks is a dict of each task's score by name.
        """
        batch = self.read(samples)
        step, scores = self._score(batch)
        if tasks := self.served.tasks:
            return step, [dict(zip(tasks, values, strict=True)) for values in scores.tolist()]
        return step, scores.tolist()

    def scores(self, batch: Batch) -> Tensor:
        """Score a batch in the combined format; one column per task for a model with several."""
        check_batch(batch)
        return self._score(replace(batch, features=select(batch.features, self.served.features)))[1]

    @torch.no_grad()
    def _score(self, batch: Batch) -> tuple[int, Tensor]:
        with self._lock:
            logits = program.call(self._program, batch, self.tables.lookup(batch.features), self._device)
            step = self.step
        return step, logits.sigmoid() if self.served.scores == PROBABILITY else logits

    def update(self) -> bool:
        """Apply all pending publications; returns whether there were any."""
        if self._root is None:
            raise UserError(f"{self.path}: no run is followed; pass one as Predictor(path, follow=RUN)")
        with self._update_lock:
            try:
                return self._update(self._root)
            except OSError as error:
                reason = error.strerror or error
                raise UserError(
                    f"{self._root}: publications cannot be read ({reason}); answers stay at step {self.step}, restore "
                    "the folder or follow another run"
                ) from None

    def _update(self, root: Path) -> bool:
        newest = self._newest_publication(root)
        publication = "" if newest is None else f"{newest} {(newest / step_directories.MANIFEST).stat().st_mtime_ns}"
        if publication == self._last_publication:
            return False
        pending = publications.pending_publications(root, self._version)
        for path, publication_manifest in pending:
            self._apply(path, publication_manifest)
            trim_freed_memory()
        self._last_publication = publication
        return bool(pending)

    def _newest_publication(self, root: Path) -> Path | None:
        """The newest publication; None before the first. Raises OSError if the folder cannot be listed."""
        if root.is_dir() or self.followed.has_found_directory:
            os.listdir(root)
            self.followed.has_found_directory = True
        else:  # a run creates the folder with its first publication
            os.listdir(root.parent)
        return next(reversed(step_directories.list_checkpoints(root)), None)

    def state(self) -> dict[str, float | int | str]:
        """Status, training step and age of the weights, and counts of applied publications: for monitoring."""
        state: dict[str, float | int | str] = {"status": self.followed.error or "ok", "step": self.step}
        if self._version.time:  # unknown for exports of old checkpoints
            state["age_seconds"] = max(0.0, time.time() - self._version.time)
        if self._root is not None:
            state |= {
                "publications": self.followed.num_applied,
                "rows_replaced": self.followed.rows_replaced,
                "publication_lag_seconds": self.followed.lag_seconds,
                "publication_pause_seconds": self.followed.pause_seconds,
            }
        return state

    def close(self) -> None:
        """Stop following."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()

    @torch.no_grad()
    def _apply(self, path: Path, publication: Manifest) -> None:
        self._check_compatible(path, publication)
        updates: list[RowUpdate] = []
        column_shards: dict[str, list[Rectangle]] = {}  # an int8 row needs all its columns for its scale
        dense: list[Rectangle] = []
        ended = EndedRows(self.served, publication)
        for rect in publications.read_rectangles(path, publication):
            table = self._table_names.get(rect.name, "")
            ended.add(rect)
            if table and rect.cols and self.served.stored == "int8":
                column_shards.setdefault(table, []).append(rect)
            elif table:
                updates += self.tables.prepare_update(table, rect)
            elif rect.name in self._weights:
                dense.append(rect)
        for table, rects in column_shards.items():
            updates += self.tables.prepare_int8_update(table, rects)
        course = publication.numbers["course"]
        start = time.perf_counter()
        with self._lock:
            ended.remove_from(self.tables.growing)
            self.tables.apply_updates(updates)
            for rect in dense:
                _write_rows(self._weights[rect.name], rect)
            self._version = ModelVersion(publication.step, course["line"], course["time"], publication.digest)
        followed = self.followed
        followed.pause_seconds = time.perf_counter() - start
        followed.lag_seconds = time.time() - course["time"]
        followed.num_applied += 1
        followed.rows_replaced += sum(_num_rows(update) for update in updates)

    def _check_compatible(self, path: Path, publication: Manifest) -> None:
        """Raise an error if a publication is of a model with other shapes or transforms."""
        shapes = {name: tuple(tensor.shape) for name, tensor in self._weights.items()}
        shapes |= {self.served.names[table.name]: (logical_rows(table), table.dim) for table in self.served.tables}
        for name, shape in shapes.items():
            entry = publication.tensors.get(name)
            if entry is None or entry.shape != shape:
                issue = "is missing" if entry is None else f"has shape {entry.shape}"
                raise UserError(f'{path}: "{name}" {issue}; wanted {shape}: another model is published; export it')
        if publication.numbers.get("transforms", self.served.transforms) != self.served.transforms:
            raise UserError(f"{path}: published with other transforms; export that run and serve the new export")

    def _catch_up(self) -> None:
        """Apply pending publications before the first answer; retry if some are removed meanwhile."""
        for attempt in range(MAX_STARTUP_ATTEMPTS):
            try:
                self.update()
                return
            except UserError:
                if attempt == MAX_STARTUP_ATTEMPTS - 1:
                    raise
                time.sleep(POLL_SECONDS)

    def _verify(self) -> None:
        """Compare the header of the tables' file with the manifest, and all blocks with their digests."""
        expected = {name: (array.dtype, array.shape, array.offset) for name, array in self.served.arrays.items()}
        if read_header(self.path / TABLES_FILE) != expected:
            raise UserError(
                f"{self.path / TABLES_FILE}: its header differs from what was written; export the model again"
            )
        with closing(ArrayReader(self.path)) as reader:
            for stored in self.served.arrays.values():
                for start, _ in reader.block_ranges(stored):
                    reader.read_block(stored, start)

    def _follow(self) -> None:
        """Body of the follower thread."""
        while not self._stopped.wait(ERROR_RETRY_SECONDS if self.followed.error else POLL_SECONDS):
            try:
                self.update()
                self.followed.error = ""
            except Exception as error:  # of any type: requests are still answered, and `state` reports it
                self.followed.error = str(error) or type(error).__name__


def _publications_folder(path: Path) -> Path:
    if (path / "config.toml").is_file():
        return path / "published"
    if not path.is_dir():
        raise UserError(f"{path}: no such folder; name a run, or the folder of its publications")
    return path


def _write_rows(weight: Tensor, rect: Rectangle) -> None:
    rows = slice(*rect.rows) if isinstance(rect.rows, tuple) else rect.rows
    weight.view(weight.shape[0] if weight.dim() else 1, -1)[rows] = rect.values_RC.to(weight.dtype)


def _num_rows(update: RowUpdate) -> int:
    return update.rows.stop - update.rows.start if isinstance(update.rows, slice) else len(update.rows)

"""A predictor over an exported model: answers samples, and follows what a run publishes without a stop.

Phases of an update: what has come is read, verified and rounded as the tables are stored, beside the answers; then rows
are put in place between two answers, all of them, so that each answer is of one step of the run.
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
from shardwright.rectangle import Rectangle
from shardwright.serving import manifest, program
from shardwright.serving.manifest import PROBABILITY, PROGRAM_FILE, TABLES_FILE, TRANSFORMS_DIRECTORY
from shardwright.serving.mapped_tables import MappedTables, RowUpdate
from shardwright.serving.request_ids import parse_id_samples

POLL_SECONDS = 0.05  # between two looks for publications
ERROR_RETRY_SECONDS = 2.0
MAX_STARTUP_ATTEMPTS = 3


@dataclass(slots=True)
class FollowStatus:
    """What became of the publications."""

    num_applied: int = 0
    rows_replaced: int = 0
    lag_seconds: float = 0.0  # of the last: from its step's end in the run to the first answer with it
    pause_seconds: float = 0.0  # of the last: that answers had to wait
    has_found_directory: bool = False  # whether the folder of publications has been found before
    error: str = ""


class Predictor:
    """An exported model in memory. `follow`: a run, or a folder of its publications, to keep up with."""

    def __init__(self, path: str | Path, follow: str | Path | None = None, *, verify: bool = False) -> None:
        """`verify`: read all tables first, and compare every block with its digest."""
        self.path = Path(path)
        self.served = manifest.read(self.path)
        if verify:
            self._verify()
        self.tables = MappedTables(self.served, self.path)
        self._program = program.load(self.path / PROGRAM_FILE)
        self._weights = {f"{MODEL_PREFIX}{name}": tensor for name, tensor in self._program.state_dict().items()}
        kept = self.path / TRANSFORMS_DIRECTORY
        self._transforms = Transforms.read(kept) if kept.is_dir() else None
        self._lock, self._updating = Lock(), Lock()
        self._standing = ModelVersion(self.served.step, self.served.line, self.served.time)
        self._names = {logical: name for name, logical in self.served.names.items()}
        self._seen = ""
        self.followed = FollowStatus()
        self._stopped, self._thread = Event(), None
        self._root = None if follow is None else _publications(Path(follow))
        if self._root is not None:
            self._catch_up()
            self._thread = Thread(target=self._follow, name="follower", daemon=True)
            self._thread.start()

    @property
    def step(self) -> int:
        """Of the run, whose weights answer."""
        return self._standing.step

    def read(self, samples: Sequence[Mapping[str, Any]]) -> Batch:
        """Samples by the names of the log's columns; for a model of plain ids {"ids": {...}, "numbers": [...]}."""
        if self._transforms is not None:
            return to_batch(self._transforms.encode_samples(samples))
        dtype = getattr(torch, self.served.numbers)
        return parse_id_samples(self.served.features, self.served.num_dense, samples, dtype)

    def answer(self, samples: Sequence[Mapping[str, Any]]) -> tuple[int, list[float]]:
        """The step of the run that answers, and a score for each sample."""
        batch = self.read(samples)
        step, scores = self._scored(batch)
        return step, scores.tolist()

    def scores(self, batch: Batch) -> Tensor:
        """Of a batch in the combined format."""
        check_batch(batch)
        return self._scored(replace(batch, features=select(batch.features, self.served.features)))[1]

    @torch.no_grad()
    def _scored(self, batch: Batch) -> tuple[int, Tensor]:
        with self._lock:
            logits = program.call(self._program, batch, self.tables.lookup(batch.features))
            step = self.step
        return step, logits.sigmoid() if self.served.scores == PROBABILITY else logits

    def update(self) -> bool:
        """Take what has been published since; whether there was anything."""
        with self._updating:
            return self._update()

    def _update(self) -> bool:
        if self._root is None:
            raise UserError(f"{self.path}: nothing is followed; Predictor(path, follow=RUN) keeps up with a run")
        newest = self._newest_publication(self._root)
        sign = "" if newest is None else f"{newest} {(newest / step_directories.MANIFEST).stat().st_mtime_ns}"
        if sign == self._seen:
            return False
        coming = publications.pending_publications(self._root, self._standing)
        for path, said in coming:
            self._take(path, said)
        self._seen = sign
        return bool(coming)

    def _newest_publication(self, root: Path) -> Path | None:
        """The newest publication; None before the first. A folder that cannot be listed is an error."""
        try:
            if root.is_dir() or self.followed.has_found_directory:
                os.listdir(root)
                self.followed.has_found_directory = True
            else:  # a run makes the folder with its first publication
                os.listdir(root.parent)
        except OSError as error:
            raise UserError(
                f"{root}: publications cannot be read ({error.strerror}); answers stay at step {self.step}, restore "
                "the folder or follow another run"
            ) from None
        return next(reversed(step_directories.list_checkpoints(root)), None)

    def state(self) -> dict[str, float | int | str]:
        """Status, step and age of what is served, and the publications taken: for monitoring."""
        found: dict[str, float | int | str] = {"status": self.followed.error or "ok", "step": self.step}
        if self._standing.time:  # unknown for exports of old checkpoints
            found["age_seconds"] = max(0.0, time.time() - self._standing.time)
        if self._root is not None:
            found |= {
                "publications": self.followed.num_applied,
                "rows_replaced": self.followed.rows_replaced,
                "publication_lag_seconds": self.followed.lag_seconds,
                "publication_pause_seconds": self.followed.pause_seconds,
            }
        return found

    def close(self) -> None:
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()

    @torch.no_grad()
    def _take(self, path: Path, said: Manifest) -> None:
        self._refuse_others(path, said)
        changes: list[RowUpdate] = []
        cut: dict[str, list[Rectangle]] = {}
        dense: list[Rectangle] = []
        for one in publications.read_rectangles(path, said):
            table = self._names.get(one.name, "")
            if table and one.cols and self.served.stored == "int8":
                cut.setdefault(table, []).append(one)
            elif table:
                changes += self.tables.prepare_update(table, one)
            elif one.name in self._weights:
                dense.append(one)
        for table, found in cut.items():
            changes += self.tables.prepare_int8_update(table, found)
        course = said.numbers["course"]
        start = time.perf_counter()
        with self._lock:
            self.tables.apply_updates(changes)
            for one in dense:
                _put(self._weights[one.name], one)
            self._standing = ModelVersion(said.step, course["line"], course["time"], said.digest)
        followed = self.followed
        followed.pause_seconds = time.perf_counter() - start
        followed.lag_seconds = time.time() - course["time"]
        followed.num_applied += 1
        followed.rows_replaced += sum(_num_rows(change) for change in changes)

    def _refuse_others(self, path: Path, said: Manifest) -> None:
        """Nothing is taken of another model, nor of one whose rows mean other values."""
        shapes = {name: tuple(tensor.shape) for name, tensor in self._weights.items()}
        shapes |= {self.served.names[table.name]: (table.rows, table.dim) for table in self.served.tables}
        for name, shape in shapes.items():
            found = said.tensors.get(name)
            if found is None or found.shape != shape:
                had = "is not in it" if found is None else f"is {found.shape}"
                raise UserError(f'{path}: "{name}" {had}, here {shape}: another model is published; export that one')
        if said.numbers.get("transforms", self.served.transforms) != self.served.transforms:
            raise UserError(
                f"{path}: values become rows in another way there; export that run, and follow it with that"
            )

    def _catch_up(self) -> None:
        """Before the first answer; what is dropped while it is read is looked for again."""
        for attempt in range(MAX_STARTUP_ATTEMPTS):
            try:
                self.update()
                return
            except (UserError, OSError) as error:
                if attempt == MAX_STARTUP_ATTEMPTS - 1:
                    raise error if isinstance(error, UserError) else UserError(f"{self._root}: {error}") from None
                time.sleep(POLL_SECONDS)

    def _verify(self) -> None:
        expected = {name: (one.dtype, one.shape, one.offset) for name, one in self.served.arrays.items()}
        if read_header(self.path / TABLES_FILE) != expected:
            raise UserError(
                f"{self.path / TABLES_FILE}: its header differs from what was written; export the model anew"
            )
        with closing(ArrayReader(self.path)) as reader:
            for stored in self.served.arrays.values():
                for start, _ in reader.block_ranges(stored):
                    reader.read_block(stored, start)

    def _follow(self) -> None:
        while not self._stopped.wait(ERROR_RETRY_SECONDS if self.followed.error else POLL_SECONDS):
            try:
                self.update()
                self.followed.error = ""
            except Exception as error:  # whatever it is: answers go on, and whoever watches is told
                self.followed.error = str(error) or type(error).__name__


def _publications(path: Path) -> Path:
    if (path / "config.toml").is_file():
        return path / "published"
    if not path.is_dir():
        raise UserError(f"{path}: no such folder; name a run, or the folder of its publications")
    return path


def _put(weight: Tensor, one: Rectangle) -> None:
    rows = slice(*one.rows) if isinstance(one.rows, tuple) else one.rows
    weight.view(weight.shape[0] if weight.dim() else 1, -1)[rows] = one.values_RC.to(weight.dtype)


def _num_rows(change: RowUpdate) -> int:
    return change.rows.stop - change.rows.start if isinstance(change.rows, slice) else len(change.rows)

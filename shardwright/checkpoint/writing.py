"""A checkpoint is written by all ranks beside the steps that follow, and is complete or absent.

Phases: the first rank makes a draft directory, and all ranks come here; each copies what it has to write, which is all
that a step waits for; a thread of each writes a file of it and says what is in it; the first rank's waits for what all
say, writes the manifest and gives the directory its name.
"""

import json
import math
import os
import shutil
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from threading import Event, Thread, get_native_id
from typing import Any

import torch
from torch import Tensor

from shardwright.checkpoint import arrays, step_directories
from shardwright.checkpoint.manifest import MODEL_PREFIX, VERSION, Manifest, RankPart, StoredRectangle, TensorEntry
from shardwright.errors import UserError
from shardwright.kernels.native import use_huge_pages
from shardwright.rectangle import Rectangle, dtype_name
from shardwright.spec import files

PEER_FAILED = "has not written its part"  # told by the first rank; why is told by the other
IN_PROGRESS = "is being written"
POLL_SECONDS = 0.02
REMOVE_ATTEMPTS = 50  # at dropping a draft
NICENESS = 10  # of the thread that writes: where ranks keep all cores busy, steps come first
TIMEOUT_SECONDS = 1800.0  # for what other ranks write


class CheckpointWriter:
    """One rank's part in writing the checkpoints of one root."""

    def __init__(
        self,
        root: Path,
        *,
        rank: int = 0,
        num_ranks: int = 1,
        keep: int = 2,
        increment_dtype: str = "",
        for_publication: bool = False,
    ) -> None:
        """`rounded`: the dtype of weights where only what has changed is written; empty: their own. `alone`: nothing is
        kept because others go on from it."""
        self.root, self.rank, self.num_ranks, self.keep, self.increment_dtype = (
            root,
            rank,
            num_ranks,
            keep,
            increment_dtype,
        )
        self._alone = for_publication
        self._staged: dict[tuple[str, int], Tensor] = {}  # by name, and the place among rectangles of that name
        self._thread: Thread | None = None
        self._stopped = Event()
        self._told = ""  # what went wrong

    def prepare(self, step: int) -> str:
        """At the first rank, before all begin: an empty draft; what went wrong, if anything did."""
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            step_directories.recover_root(self.root)
            self._draft(step).mkdir()
        except OSError as error:
            return self._failed(step, error)
        return ""

    def begin(
        self,
        step: int,
        rectangles: Sequence[Rectangle],
        numbers: Mapping[str, Any],
        base: Path | None = None,
        *,
        start_time: float = 0.0,
    ) -> float:
        """Write these beside whatever comes next; returns the seconds that steps have waited, `since` then if given.

        With a `base`, of rectangles that know what has changed since that checkpoint only this is written.
        """
        start = start_time or time.perf_counter()
        known: dict[int, tuple[Tensor, Tensor]] = {}
        copied = [
            self._changed(key, one, known)
            if base is not None and one.changed_rows is not None
            else self._copied(key, one)
            for key, one in _numbered(rectangles)
        ]
        full = {one.name for one in rectangles if base is None or one.changed_rows is None}
        pause = time.perf_counter() - start
        self._told = "the thread that writes it has ended"
        work = _Work(step, copied, full, self.increment_dtype, json.loads(json.dumps(numbers)), base, pause)
        self._thread = Thread(target=self._run, args=(work,), name="checkpoint")
        self._thread.start()
        return pause

    def wait(self, timeout_seconds: float | None = None) -> str:
        """Until what was begun is done; what went wrong, if anything did. `UNDER_WAY`: not done in so many seconds."""
        if self._thread is None:
            return ""
        self._thread.join(timeout_seconds)
        if self._thread.is_alive():
            return IN_PROGRESS
        self._thread = None
        return self._told

    def stop(self) -> None:
        """Wait for nobody else any longer."""
        self._stopped.set()
        self.wait()

    def allocate_staging(self, rectangles: Sequence[Rectangle]) -> None:
        """Have the memory for copies of these before the first step waits for one."""
        for key, one in _numbered(rectangles):
            self._room(key, one).zero_()

    def _room(self, key: tuple[str, int], one: Rectangle) -> Tensor:
        """Where these values are copied to, time and again."""
        values, room = one.values, self._staged.get(key)
        if room is None or (room.shape, room.dtype) != (values.shape, values.dtype):
            room = self._staged[key] = torch.empty(values.shape, dtype=values.dtype)
            use_huge_pages(room)
        return room

    def _copied(self, key: tuple[str, int], one: Rectangle) -> Rectangle:
        return replace(one, values=self._room(key, one).copy_(one.values.detach()), changed_rows=None)

    def _changed(self, key: tuple[str, int], one: Rectangle, known: dict[int, tuple[Tensor, Tensor]]) -> Rectangle:
        """The rows that have changed; `known`: which those are, of rectangles with the same rows."""
        assert one.changed_rows is not None
        if id(one.changed_rows) not in known:
            found = one.changed_rows.nonzero().flatten()
            known[id(one.changed_rows)] = found, found + one.rows[0] if isinstance(one.rows, tuple) else one.rows[found]
        picked, rows = known[id(one.changed_rows)]
        room_RC = self._room(key, one).view(one.num_rows, -1)[: len(picked)]
        values = torch.index_select(one.values_RC.detach(), 0, picked, out=room_RC)
        return replace(one, values=values, rows=rows, changed_rows=None)

    def _run(self, work: "_Work") -> None:
        start, step, draft = time.perf_counter(), work.step, self._draft(work.step)
        try:
            if not self._alone:  # of these somebody waits for each
                _be_polite()
            entries, bytes_ = _write_arrays(draft / f"rank{self.rank}.safetensors", work)
            part = RankPart(entries, work.numbers, bytes_, work.pause, time.perf_counter() - start)
            files.write(part, draft / f"rank{self.rank}.json")
            if self.rank == 0:
                parts = [self._part(draft, rank) for rank in range(self.num_ranks)]
                files.write(_manifest(step, parts, work.base), draft / step_directories.MANIFEST)
                for rank in range(self.num_ranks):
                    (draft / f"rank{rank}.json").unlink()
                step_directories.commit(draft, final := step_directories.checkpoint_path(self.root, step))
                step_directories.keep_last(self.root, self.keep, final, drop_bases=self._alone)
            self._told = ""
        except Exception as error:  # whatever it is: others wait to hear of it
            self._told = self._failed(step, error)
            if self.rank == 0:
                _drop(draft)  # it may be what has filled the disk
            else:
                with suppress(OSError):
                    (draft / f"rank{self.rank}.safetensors").unlink(missing_ok=True)
                    (draft / f"rank{self.rank}.failed").touch()

    def _part(self, draft: Path, rank: int) -> RankPart:
        """What another rank has written, once it has."""
        given_up = time.perf_counter() + TIMEOUT_SECONDS
        while not (draft / f"rank{rank}.json").exists():
            if (draft / f"rank{rank}.failed").exists():
                raise UserError(f"rank {rank} {PEER_FAILED}")
            if self._stopped.wait(POLL_SECONDS) or time.perf_counter() > given_up:
                raise UserError(f"rank {rank} {PEER_FAILED}")
        return files.read(RankPart, draft / f"rank{rank}.json")

    def _failed(self, step: int, error: Exception) -> str:
        why = error.strerror if isinstance(error, OSError) else str(error) or type(error).__name__
        where = step_directories.checkpoint_path(self.root, step)
        return f"{where}: the checkpoint cannot be written ({why}); earlier ones are whole"

    def _draft(self, step: int) -> Path:
        return self.root / f".draft-{step_directories.checkpoint_path(self.root, step).name}"


def _drop(draft: Path) -> None:
    """Also of what others are just about to put into it."""
    for _ in range(REMOVE_ATTEMPTS):
        shutil.rmtree(draft, ignore_errors=True)
        if not draft.exists():
            return
        time.sleep(POLL_SECONDS)


def _be_polite() -> None:
    """Of this thread alone, unless its process is so already, or the system does not let it."""
    thread = get_native_id()
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, thread, max(NICENESS, os.getpriority(os.PRIO_PROCESS, thread)))


def _numbered(rectangles: Sequence[Rectangle]) -> Iterator[tuple[tuple[str, int], Rectangle]]:
    seen: Counter[str] = Counter()
    for one in rectangles:
        yield (one.name, seen[one.name]), one
        seen[one.name] += 1


@dataclass(frozen=True, slots=True, eq=False)
class _Work:
    """What a thread writes."""

    step: int
    rectangles: Sequence[Rectangle]
    full: set[str]  # the names of tensors of which all is written
    rounded: str  # the dtype of weights of which only what changed is
    numbers: dict[str, Any]
    base: Path | None
    pause: float


def _write_arrays(path: Path, work: _Work) -> tuple[dict[str, TensorEntry], int]:
    """One rank's file, and what is in it by the names of tensors."""
    named = {f"{one.name}#{at}": one for at, one in enumerate(work.rectangles)}
    found: dict[str, Tensor] = {}
    numbered: dict[int, str] = {}  # a weight and its state share the numbers of their rows
    errors = dict.fromkeys(named, 0.0)
    for key, one in named.items():
        found[key] = one.values_RC
        if work.rounded and one.name not in work.full and one.name.startswith(MODEL_PREFIX):
            found[key], scales, errors[key] = quantize_rows(one.values_RC, work.rounded)
            found |= {f"{key}.scales": scales} if scales is not None else {}
        if not isinstance(one.rows, tuple) and id(one.rows) not in numbered:
            numbered[id(one.rows)] = f"{key}.rows"
            small = one.shape[0] <= torch.iinfo(torch.int32).max
            found[f"{key}.rows"] = one.rows.to(torch.int32 if small else torch.int64).unsqueeze(1)
    stored = arrays.write(path, found)
    entries: dict[str, TensorEntry] = {}
    for key, one in named.items():
        run = one.rows if isinstance(one.rows, tuple) else None
        numbers = None if run is not None else stored[numbered[id(one.rows)]]
        piece = StoredRectangle(stored[key], run, numbers, one.cols, stored.get(f"{key}.scales"))
        full = one.name in work.full
        entry = TensorEntry(dtype_name(one.values.dtype), one.shape, (piece,), full, errors[key])
        entries[one.name] = _joined(entries[one.name], entry) if one.name in entries else entry
    return entries, path.stat().st_size


def quantize_rows(values_RC: Tensor, dtype: str) -> tuple[Tensor, Tensor | None, float]:
    """In fewer bytes, in int8 with a scale for each row; and the largest error."""
    exact_RC = values_RC.to(torch.promote_types(values_RC.dtype, torch.float32))
    scales = None
    if dtype == "int8":
        scales = exact_RC.abs().amax(1, keepdim=True) / 127
        scales = scales.masked_fill(scales == 0, 1)
        found = (exact_RC / scales).round().clamp(-127, 127).to(torch.int8)
        back = found.to(scales.dtype) * scales
    else:
        found = values_RC.to(getattr(torch, dtype))
        back = found.to(exact_RC.dtype)
    error = float((back - exact_RC).abs().max()) if values_RC.numel() else 0.0
    if not math.isfinite(error):
        remedy = "keep tables as they are trained, and increments.* out of allow"
        raise UserError(f"a weight is no number, or too large for {dtype}: {remedy}")
    return found, scales, error


def _joined(one: TensorEntry, other: TensorEntry) -> TensorEntry:
    return replace(one, pieces=(*one.pieces, *other.pieces), error=max(one.error, other.error))


def _manifest(step: int, parts: Sequence[RankPart], base: Path | None) -> Manifest:
    tensors: dict[str, TensorEntry] = {}
    for part in parts:
        for name, entry in part.tensors.items():
            tensors[name] = _joined(tensors[name], entry) if name in tensors else entry
    for name, entry in tensors.items():
        numbers, there = prod(entry.shape), sum(prod(piece.values.shape) for piece in entry.pieces)
        if entry.full and numbers != there:
            raise UserError(f'of the {numbers} numbers of "{name}" the ranks have {there}')
    made = Manifest(
        VERSION,
        step,
        len(parts),
        base.name if base else "",
        step_directories.read_manifest(base).digest if base else "",
        tensors,
        sum(part.bytes_ for part in parts),
        max(part.pause_seconds for part in parts),
        max(part.seconds for part in parts),
        {"ranks": [part.numbers["rank"] for part in parts if "rank" in part.numbers], **parts[0].numbers},
    )
    return made.with_digest()

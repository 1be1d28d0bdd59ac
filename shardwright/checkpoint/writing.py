"""Write checkpoints asynchronously: all ranks write while training continues; complete or absent.

Rank 0 creates a draft directory. Each rank then copies its rectangles to staging memory, which is all that a training
step waits for, and a thread writes them to a file with a description. The thread of rank 0 waits for the descriptions
of all ranks, writes the manifest and renames the draft to its final name. Ranks communicate through files only.

Shape legend: R rows, C columns.
"""

import json
import math
import os
import shutil
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
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
from shardwright.spec.workload import MAX_GROWING_ROWS

PEER_FAILED = "has not written its part"  # rank 0's message; the rank that failed reports the reason
IN_PROGRESS = "is being written"
POLL_SECONDS = 0.02
REMOVE_ATTEMPTS = 50  # to remove a draft directory
NICENESS = 10  # of the writer thread: training steps have priority where ranks keep all cores busy
TIMEOUT_SECONDS = 1800.0  # how long rank 0 waits for what another rank writes


class CheckpointWriter:
    """Writes one rank's part of the checkpoints under one root."""

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
        """`keep`: number of checkpoints to retain. `increment_dtype`: dtype of weights where only changed rows are
        written; empty: unchanged. `for_publication`: write at normal priority, and do not retain the bases of
        retained checkpoints."""
        self.root, self.rank, self.num_ranks, self.keep, self.increment_dtype = (
            root,
            rank,
            num_ranks,
            keep,
            increment_dtype,
        )
        self._for_publication = for_publication
        self._staging: dict[tuple[str, int], Tensor] = {}  # by name and index among rectangles of that name
        self._thread: Thread | None = None
        self._stopped = Event()
        self._failure = ""  # message of the last write; empty: it succeeded

    def prepare(self, step: int) -> str:
        """Create an empty draft directory: on rank 0 before any rank's `begin`; returns an error message or ""."""
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            step_directories.recover_root(self.root)
            self._draft_path(step).mkdir()
        except OSError as error:
            return self._failure_message(step, error)
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
        """Copy the rectangles and write them in a thread; returns the seconds that training waited.

        With a `base` checkpoint, rectangles with `changed_rows` are written as those rows only. `start_time`: the
        `time.perf_counter()` from which waiting is counted; 0: now.
        """
        start = start_time or time.perf_counter()
        cache: dict[int, tuple[Tensor, Tensor]] = {}
        copies: list[Rectangle] = []
        try:
            for key, rect in _enumerate_by_name(rectangles):
                is_increment = base is not None and rect.changed_rows is not None
                copies.append(self._copy_changed(key, rect, cache) if is_increment else self._copy(key, rect))
        except BaseException:
            _close_stored(copies)
            raise
        full = {rect.name for rect in rectangles if base is None or rect.changed_rows is None}
        pause = time.perf_counter() - start
        self._failure = "the thread that writes the checkpoint ended without a result"
        task = _WriteTask(step, copies, full, self.increment_dtype, json.loads(json.dumps(numbers)), base, pause)
        self._thread = Thread(target=self._run, args=(task,), name="checkpoint")
        self._thread.start()
        return pause

    def wait(self, timeout_seconds: float | None = None) -> str:
        """Wait for the write in flight; returns an error message, "" on success, `IN_PROGRESS` on timeout."""
        if self._thread is None:
            return ""
        self._thread.join(timeout_seconds)
        if self._thread.is_alive():
            return IN_PROGRESS
        self._thread = None
        return self._failure

    def stop(self) -> None:
        """Stop waiting for other ranks, and wait for the thread to end."""
        self._stopped.set()
        self.wait()

    def allocate_staging(self, rectangles: Sequence[Rectangle]) -> None:
        """Allocate staging memory and touch its pages, so that the first checkpoint does not wait for them."""
        for key, rect in _enumerate_by_name(rectangles):
            if rect.stored is None:
                self._buffer(key, rect).zero_()

    def _buffer(self, key: tuple[str, int], rect: Rectangle) -> Tensor:
        """The staging buffer for the rectangle's values, reused by every checkpoint."""
        values, buffer = rect.values, self._staging.get(key)
        if buffer is None or (buffer.shape, buffer.dtype) != (values.shape, values.dtype):
            buffer = self._staging[key] = torch.empty(values.shape, dtype=values.dtype)
            use_huge_pages(buffer)
        return buffer

    def _copy(self, key: tuple[str, int], rect: Rectangle) -> Rectangle:
        if rect.stored is not None:
            return replace(rect, stored=rect.stored.snapshot(), changed_rows=None)
        return replace(rect, values=self._buffer(key, rect).copy_(rect.values.detach()), changed_rows=None)

    def _copy_changed(
        self, key: tuple[str, int], rect: Rectangle, cache: dict[int, tuple[Tensor, Tensor]]
    ) -> Rectangle:
        """Copy the changed rows. `cache`: their indices and row numbers, by id of the `changed_rows` tensor."""
        assert rect.changed_rows is not None
        if id(rect.changed_rows) not in cache:
            idx = rect.changed_rows.nonzero().flatten()
            rows = idx + rect.rows[0] if isinstance(rect.rows, tuple) else rect.rows[idx]
            cache[id(rect.changed_rows)] = idx, rows.cpu()
        indices, rows = cache[id(rect.changed_rows)]
        if rect.stored is not None:
            return replace(rect, values=rect.stored.select(indices), rows=rows, changed_rows=None, stored=None)
        buffer_RC = self._buffer(key, rect).view(rect.values_RC.shape)[: len(indices)]
        values_RC = rect.values_RC.detach()
        if values_RC.device == buffer_RC.device:
            torch.index_select(values_RC, 0, indices, out=buffer_RC)
        else:
            buffer_RC.copy_(values_RC.index_select(0, indices))
        return replace(rect, values=buffer_RC, rows=rows, changed_rows=None)

    def _run(self, task: "_WriteTask") -> None:
        """Body of the writer thread."""
        start, step, draft = time.perf_counter(), task.step, self._draft_path(task.step)
        try:
            if not self._for_publication:  # predictors wait for each publication
                _lower_priority()
            try:
                entries, bytes_ = _write_arrays(draft / f"rank{self.rank}.safetensors", task)
            finally:
                _close_stored(task.rectangles)
            part = RankPart(entries, task.numbers, bytes_, task.pause, time.perf_counter() - start)
            files.write(part, draft / f"rank{self.rank}.json")
            if self.rank == 0:
                parts = [self._wait_for_part(draft, rank) for rank in range(self.num_ranks)]
                files.write(_build_manifest(step, parts, task.base), draft / step_directories.MANIFEST)
                for rank in range(self.num_ranks):
                    (draft / f"rank{rank}.json").unlink()
                step_directories.commit(draft, final := step_directories.checkpoint_path(self.root, step))
                step_directories.keep_last(self.root, self.keep, final, drop_bases=self._for_publication)
            self._failure = ""
        except Exception as error:  # of any type: it must be reported to the other ranks
            self._failure = self._failure_message(step, error)
            if self.rank == 0:
                _remove_draft(draft)  # it may be what filled the disk
            else:
                with suppress(OSError):
                    (draft / f"rank{self.rank}.safetensors").unlink(missing_ok=True)
                    (draft / f"rank{self.rank}.failed").touch()

    def _wait_for_part(self, draft: Path, rank: int) -> RankPart:
        """Wait for the description of what a rank has written."""
        deadline = time.perf_counter() + TIMEOUT_SECONDS
        while not (draft / f"rank{rank}.json").exists():
            if (draft / f"rank{rank}.failed").exists():
                raise UserError(f"rank {rank} {PEER_FAILED}")
            if self._stopped.wait(POLL_SECONDS) or time.perf_counter() > deadline:
                raise UserError(f"rank {rank} {PEER_FAILED}")
        return files.read(RankPart, draft / f"rank{rank}.json")

    def _failure_message(self, step: int, error: Exception) -> str:
        reason = error.strerror if isinstance(error, OSError) else str(error) or type(error).__name__
        path = step_directories.checkpoint_path(self.root, step)
        return f"{path}: the checkpoint cannot be written ({reason}); earlier checkpoints are intact"

    def _draft_path(self, step: int) -> Path:
        return self.root / f".draft-{step_directories.checkpoint_path(self.root, step).name}"


def _remove_draft(draft: Path) -> None:
    """Remove a draft directory; repeated because other ranks may still create files in it."""
    for _ in range(REMOVE_ATTEMPTS):
        shutil.rmtree(draft, ignore_errors=True)
        if not draft.exists():
            return
        time.sleep(POLL_SECONDS)


def _lower_priority() -> None:
    """Set the niceness of this thread (not the process) to at least `NICENESS`, if the system allows it."""
    thread = get_native_id()
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, thread, max(NICENESS, os.getpriority(os.PRIO_PROCESS, thread)))


def _close_stored(rectangles: Sequence[Rectangle]) -> None:
    """End the snapshots of rows that are not in memory, also if some cannot be ended; raises the first error."""
    with ExitStack() as stack:
        for rect in rectangles:
            if rect.stored is not None:
                stack.callback(rect.stored.close)


def _enumerate_by_name(rectangles: Sequence[Rectangle]) -> Iterator[tuple[tuple[str, int], Rectangle]]:
    """Each rectangle with its name and its index among rectangles of that name."""
    counts: Counter[str] = Counter()
    for rect in rectangles:
        yield (rect.name, counts[rect.name]), rect
        counts[rect.name] += 1


@dataclass(frozen=True, slots=True, eq=False)
class _WriteTask:
    """What the writer thread writes: copied rectangles of one step."""

    step: int
    rectangles: Sequence[Rectangle]
    full: set[str]  # names of tensors that are written in full
    increment_dtype: str  # dtype of weights that are written as changed rows only; empty: unchanged
    numbers: dict[str, Any]
    base: Path | None
    pause: float  # seconds


def _write_arrays(path: Path, task: _WriteTask) -> tuple[dict[str, TensorEntry], int]:
    """Write one rank's file; returns its manifest entries by tensor name, and its size in bytes."""
    rects = {f"{rect.name}#{index}": rect for index, rect in enumerate(task.rectangles)}
    tensors: dict[str, Tensor] = {}
    numbers_key: dict[int, str] = {}  # a weight and its optimizer state share one tensor of row numbers
    errors = dict.fromkeys(rects, 0.0)
    for key, rect in rects.items():
        tensors[key] = rect.values_RC
        if task.increment_dtype and rect.name not in task.full and rect.name.startswith(MODEL_PREFIX):
            tensors[key], scales, errors[key] = quantize_rows(rect.values_RC, task.increment_dtype)
            tensors |= {f"{key}.scales": scales} if scales is not None else {}
        if not isinstance(rect.rows, tuple) and id(rect.rows) not in numbers_key:
            numbers_key[id(rect.rows)] = f"{key}.rows"
            tensors[f"{key}.rows"] = rect.rows.to(torch.int32 if _fit_int32(rect.rows) else torch.int64).unsqueeze(1)
    stored = arrays.write(path, tensors, {key: rect.stored for key, rect in rects.items() if rect.stored is not None})
    entries: dict[str, TensorEntry] = {}
    for key, rect in rects.items():
        row_range = rect.rows if isinstance(rect.rows, tuple) else None
        numbers = None if row_range is not None else stored[numbers_key[id(rect.rows)]]
        piece = StoredRectangle(stored[key], row_range, numbers, rect.cols, stored.get(f"{key}.scales"))
        full = rect.name in task.full
        entry = TensorEntry(dtype_name(rect.values.dtype), rect.shape, (piece,), full, errors[key])
        entries[rect.name] = _merge_entries(entries[rect.name], entry) if rect.name in entries else entry
    return entries, path.stat().st_size


def _fit_int32(rows: Tensor) -> bool:
    low, high = (int(bound) for bound in torch.aminmax(rows)) if len(rows) else (0, 0)
    return low >= -(2**31) and high < 2**31


def quantize_rows(values_RC: Tensor, dtype: str) -> tuple[Tensor, Tensor | None, float]:
    """Round values to `dtype`; returns them, each row's scale (int8 only), and the largest absolute error."""
    exact_RC = values_RC.to(torch.promote_types(values_RC.dtype, torch.float32))
    scales = None
    if dtype == "int8":
        scales = exact_RC.abs().amax(1, keepdim=True) / 127
        scales = scales.masked_fill(scales == 0, 1)
        quantized_RC = (exact_RC / scales).round().clamp(-127, 127).to(torch.int8)
        decoded_RC = quantized_RC.to(scales.dtype) * scales
    else:
        quantized_RC = values_RC.to(getattr(torch, dtype))
        decoded_RC = quantized_RC.to(exact_RC.dtype)
    error = float((decoded_RC - exact_RC).abs().max()) if values_RC.numel() else 0.0
    if not math.isfinite(error):
        remedy = "keep the tables in their training dtype and remove increments.* from allow"
        raise UserError(f"a weight is not finite, or too large for {dtype}: {remedy}")
    return quantized_RC, scales, error


def _merge_entries(first: TensorEntry, second: TensorEntry) -> TensorEntry:
    return replace(first, pieces=(*first.pieces, *second.pieces), error=max(first.error, second.error))


def _build_manifest(step: int, parts: Sequence[RankPart], base: Path | None) -> Manifest:
    tensors: dict[str, TensorEntry] = {}
    for part in parts:
        for name, entry in part.tensors.items():
            tensors[name] = _merge_entries(tensors[name], entry) if name in tensors else entry
    for name, entry in tensors.items():
        expected, actual = prod(entry.shape), sum(prod(piece.values.shape) for piece in entry.pieces)
        if entry.full and expected != actual and entry.shape[:1] != (MAX_GROWING_ROWS,):
            raise UserError(f'of the {expected} values of "{name}" the ranks wrote {actual}')
    manifest = Manifest(
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
    return manifest.with_digest()

"""Write a job's checkpoints, one at a time: copied between two steps, written to disk while training continues.

Phases, in the same order on all ranks: wait until the previous checkpoint is complete on all ranks (an all-gather of
errors); of tables that grow, whether all ranks know which rows have ended (an all-gather); rank 0 creates the draft
directory and broadcasts any error; all ranks begin to write.
"""

import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from shardwright.checkpoint import step_directories
from shardwright.checkpoint.reading import Checkpoint
from shardwright.checkpoint.writing import IN_PROGRESS, PEER_FAILED, CheckpointWriter
from shardwright.errors import UserError
from shardwright.kernels.native import trim_freed_memory
from shardwright.layers.embedding import find_tables
from shardwright.rectangle import Rectangle
from shardwright.runtime.changed_rows import ChangedRows
from shardwright.runtime.randomness import python_random_states
from shardwright.runtime.rank_group import RankGroup
from shardwright.runtime.state import LocalState

POLL_SECONDS = 10.0  # how long a rank waits for its own part between all-gathers of the ranks' results


class CheckpointState:
    """A job's state in a checkpoint; a `SavedState`."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.tensor_specs, self.fill, self.row_ids = checkpoint.tensor_specs, checkpoint.fill, checkpoint.row_ids
        self.numbers = {**checkpoint.numbers["job"], "ranks": checkpoint.numbers["ranks"]}


class Saver:
    """Writes checkpoints or publications under one root.

    After each full checkpoint, `increments` checkpoints have only the table rows that changed.
    """

    def __init__(
        self,
        rank_group: RankGroup,
        root: Path,
        *,
        keep: int = 2,
        increments: int = 0,
        increment_dtype: str = "",
        changes: ChangedRows | None = None,
        is_publication: bool = False,
    ) -> None:
        """`increment_dtype`: dtype of weights in increments; empty: the tables' dtype. `changes`: the job's, required
        for increments. `is_publication`: write only what predictors need, and do not keep the base of an increment.
        """
        self.root = root
        self.pause_seconds: list[float] = []  # of each checkpoint: seconds that training waited
        if increments and changes is None:
            raise UserError("increments need the job's record of changed rows: Saver(..., changes=job.changes)")
        self._rank_group, self._increments, self._changes = rank_group, increments, changes or ChangedRows()
        self._writer = CheckpointWriter(
            root,
            rank=rank_group.rank,
            num_ranks=rank_group.size,
            keep=keep,
            increment_dtype=increment_dtype,
            for_publication=is_publication,
        )
        self._is_publication = is_publication
        self._previous: Path | None = None  # the last checkpoint begun
        self._lineage = ""  # of the last checkpoint
        self._num_increments = 0  # since the last full checkpoint

    def preallocate(self, state: LocalState) -> None:
        """Allocate the memory that the state is copied to, before the first checkpoint pauses training."""
        self._writer.allocate_staging(self._rectangles(replace(state, residuals=())))

    def begin(self, state: LocalState, numbers: Mapping[str, Any]) -> None:
        """Copy the current state and begin to write it. All ranks call it; waits for the previous checkpoint first.

        `numbers`: JSON values; rank 0's are stored.
        """
        start = time.perf_counter()
        self.wait()
        step = numbers["job"]["step"]
        if error := self._rank_group.broadcast_text(self._writer.prepare(step) if self._rank_group.is_first else ""):
            raise UserError(error)
        previous = self._previous.name if self._previous else ""
        is_increment = (
            previous != ""
            and self._num_increments < self._increments
            and previous < step_directories.checkpoint_path(self.root, step).name
        )
        is_increment = is_increment and self._lineage == self._changes.lineage
        if is_increment and any(table.growth for _, bags in find_tables(state.model) for table in bags.tables):
            has_all = self._changes.has_all_removals(self, state.model)
            is_increment = not any(self._rank_group.all_gather_text("" if has_all else "a full checkpoint"))
        numbers = dict(numbers) if self._rank_group.is_first else {}
        numbers["course"] = {"line": self._changes.lineage, "time": time.time()}
        if not self._is_publication:
            numbers["rank"] = python_random_states()
        with self._changes.select_rows_for(self, state.model) if self._increments else nullcontext():
            rectangles = self._rectangles(state)
            self._writer.begin(step, rectangles, numbers, self._previous if is_increment else None, start_time=start)
        self._num_increments = self._num_increments + 1 if is_increment else 0
        self._previous, self._lineage = step_directories.checkpoint_path(self.root, step), self._changes.lineage
        self.pause_seconds.append(time.perf_counter() - start)

    def _rectangles(self, state: LocalState) -> list[Rectangle]:
        """What this rank writes."""
        return state.weights() if self._is_publication else state.rectangles()

    def force_full(self) -> None:
        """Make the next checkpoint a full one."""
        self._num_increments = self._increments

    def wait(self) -> None:
        """Wait until all ranks have written the last checkpoint; raises the same error on every rank if one failed."""
        if self._previous is None:
            return
        local_result, results = IN_PROGRESS, [IN_PROGRESS]
        while IN_PROGRESS in results:
            local_result = self._writer.wait(POLL_SECONDS) if local_result == IN_PROGRESS else local_result
            results = self._rank_group.all_gather_text(local_result)
        errors = [error for error in results if error]
        if errors:
            raise UserError(next((error for error in errors if PEER_FAILED not in error), errors[0]))
        trim_freed_memory()

    def close(self) -> None:
        """Wait for this rank's writer, but not for other ranks' parts."""
        self._writer.stop()

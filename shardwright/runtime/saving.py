"""The checkpoints of a job: begun between two steps, written beside those that follow, one at a time.

Phases, alike on all ranks: what was begun before has ended, and all hear whether it went well; the first rank makes the
draft; all begin.
"""

import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.checkpoint import step_directories
from shardwright.checkpoint.reading import Checkpoint
from shardwright.checkpoint.writing import IN_PROGRESS, PEER_FAILED, CheckpointWriter
from shardwright.errors import UserError
from shardwright.rectangle import Rectangle
from shardwright.runtime import state
from shardwright.runtime.rank_group import RankGroup

POLL_SECONDS = 10.0  # that a rank waits for its own part before it tells the others


class CheckpointState:
    """What a checkpoint has of a job, as a state to be read back."""

    def __init__(self, found: Checkpoint) -> None:
        self.tensor_specs, self.fill = found.tensor_specs, found.fill
        self.numbers = {**found.numbers["job"], "ranks": found.numbers["ranks"]}


class ChangedRows:
    """Which rows of tables have changed, for savers who each ask since their own last time."""

    def __init__(self) -> None:
        self.lineage = ""  # of states that follow each other; another one after a load
        self._missed: dict[Saver, list[Tensor]] = {}  # what others were told in the meantime
        self.begin_lineage()

    def begin_lineage(self) -> None:
        """What is written next has another state before it than what was written last."""
        self.lineage = secrets.token_hex(8)

    @contextmanager
    def select_rows_for(self, saver: "Saver", model: nn.Module) -> Iterator[None]:
        """Inside, the model's marks are this saver's; afterwards they begin anew, and other savers miss nothing."""
        marks = list(state.changed_row_masks(model))
        for missed in (kept for other, kept in self._missed.items() if other is not saver):
            for here, mark in zip(missed, marks, strict=True):
                here |= mark
        for mark, missed in zip(marks, self._missed.get(saver, ()), strict=False):
            mark |= missed
        yield
        state.track_changes(model)
        self._missed[saver] = [torch.zeros_like(one) for one in state.changed_row_masks(model)]


class Saver:
    """One place of checkpoints. `increments` of them after each whole one have only rows of tables that changed."""

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
        """`rounded`: the dtype of weights in increments; empty: their own. `changes`: the job's, if there are any.
        `published`: only what a predictor has use for; one that came before is not kept because others go on from it.
        """
        self.root = root
        self.pause_seconds: list[float] = []  # seconds that steps waited, of each
        if increments and changes is None:
            raise UserError("increments are told apart by what a job says has changed: Saver(..., changes=job.changes)")
        self._team, self._increments, self._changes = rank_group, increments, changes or ChangedRows()
        self._writer = CheckpointWriter(
            root,
            rank=rank_group.rank,
            num_ranks=rank_group.size,
            keep=keep,
            increment_dtype=increment_dtype,
            for_publication=is_publication,
        )
        self._published = is_publication
        self._before: Path | None = None
        self._line = ""  # of that
        self._since = 0  # increments since the last whole one

    def preallocate(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        """Have the memory that a checkpoint takes before the first step waits for one."""
        self._writer.allocate_staging(self._given(model, optimizer, ()))

    def begin(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        residuals: Sequence[Tensor],
        numbers: Mapping[str, Any],
    ) -> None:
        """Write the state of now; `own` is what this rank has beside it."""
        start = time.perf_counter()
        self.wait()
        step = numbers["job"]["step"]
        if told := self._team.broadcast_text(self._writer.prepare(step) if self._team.is_first else ""):
            raise UserError(told)
        before = self._before.name if self._before else ""
        goes_on = (
            before != ""
            and self._since < self._increments
            and before < step_directories.checkpoint_path(self.root, step).name
        )
        goes_on = goes_on and self._line == self._changes.lineage
        numbers = dict(numbers) if self._team.is_first else {}
        numbers["course"] = {"line": self._changes.lineage, "time": time.time()}
        if not self._published:
            numbers["rank"] = state.python_random_states()
        with self._changes.select_rows_for(self, model) if self._increments else nullcontext():
            given = self._given(model, optimizer, residuals)
            self._writer.begin(step, given, numbers, self._before if goes_on else None, start_time=start)
        self._since = self._since + 1 if goes_on else 0
        self._before, self._line = step_directories.checkpoint_path(self.root, step), self._changes.lineage
        self.pause_seconds.append(time.perf_counter() - start)

    def _given(
        self, model: nn.Module, optimizer: torch.optim.Optimizer | None, own: Sequence[Tensor]
    ) -> list[Rectangle]:
        """What this rank writes."""
        rank = self._team.rank
        if self._published:
            return state.local_weights(model, rank)
        return [*state.local_rectangles(model, optimizer, rank), *state.residual_rectangles(own, rank)]

    def force_full(self) -> None:
        """Have the next checkpoint whole."""
        self._since = self._increments

    def wait(self) -> None:
        """Until what was begun is complete."""
        if self._before is None:
            return
        mine, said = IN_PROGRESS, [IN_PROGRESS]
        while IN_PROGRESS in said:
            mine = self._writer.wait(POLL_SECONDS) if mine == IN_PROGRESS else mine
            said = self._team.all_gather_text(mine)
        told = [words for words in said if words]
        if told:
            raise UserError(next((words for words in told if PEER_FAILED not in words), told[0]))

    def close(self) -> None:
        """Wait for no other rank any longer."""
        self._writer.stop()

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
from shardwright.checkpoint.writing import ANOTHER, UNDER_WAY, Writer
from shardwright.errors import UserError
from shardwright.rectangle import Rectangle
from shardwright.runtime import state
from shardwright.runtime.rank_group import Team

SECONDS_AT_ONCE = 10.0  # that a rank waits for its own part before it tells the others


class OfJob:
    """What a checkpoint has of a job, as a state to be read back."""

    def __init__(self, found: Checkpoint) -> None:
        self.kinds, self.fill = found.kinds, found.fill
        self.numbers = {**found.numbers["job"], "ranks": found.numbers["ranks"]}


class Changes:
    """Which rows of tables have changed, for savers who each ask since their own last time."""

    def __init__(self) -> None:
        self.line = ""  # of states that follow each other; another one after a load
        self._missed: dict[Saver, list[Tensor]] = {}  # what others were told in the meantime
        self.renew()

    def renew(self) -> None:
        """What is written next has another state before it than what was written last."""
        self.line = secrets.token_hex(8)

    @contextmanager
    def told(self, saver: "Saver", model: nn.Module) -> Iterator[None]:
        """Inside, the model's marks are this saver's; afterwards they begin anew, and other savers miss nothing."""
        marks = list(state.tracked(model))
        for missed in (kept for other, kept in self._missed.items() if other is not saver):
            for here, mark in zip(missed, marks, strict=True):
                here |= mark
        for mark, missed in zip(marks, self._missed.get(saver, ()), strict=False):
            mark |= missed
        yield
        state.track_changes(model)
        self._missed[saver] = [torch.zeros_like(one) for one in state.tracked(model)]


class Saver:
    """One place of checkpoints. `increments` of them after each whole one have only rows of tables that changed."""

    def __init__(
        self,
        team: Team,
        root: Path,
        *,
        keep: int = 2,
        increments: int = 0,
        rounded: str = "",
        changes: Changes | None = None,
        published: bool = False,
    ) -> None:
        """`rounded`: the dtype of weights in increments; empty: their own. `changes`: the job's, if there are any.
        `published`: only what a predictor has use for; one that came before is not kept because others go on from it.
        """
        self.root = root
        self.pauses: list[float] = []  # seconds that steps waited, of each
        if increments and changes is None:
            raise UserError("increments are told apart by what a job says has changed: Saver(..., changes=job.changes)")
        self._team, self._increments, self._changes = team, increments, changes or Changes()
        self._writer = Writer(root, rank=team.rank, ranks=team.size, keep=keep, rounded=rounded, alone=published)
        self._published = published
        self._before: Path | None = None
        self._line = ""  # of that
        self._since = 0  # increments since the last whole one

    def ready(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        """Have the memory that a checkpoint takes before the first step waits for one."""
        self._writer.ready(self._given(model, optimizer, ()))

    def begin(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        own: Sequence[Tensor],
        numbers: Mapping[str, Any],
    ) -> None:
        """Write the state of now; `own` is what this rank has beside it."""
        start = time.perf_counter()
        self.end()
        step = numbers["job"]["step"]
        if told := self._team.told(self._writer.prepare(step) if self._team.first else ""):
            raise UserError(told)
        before = self._before.name if self._before else ""
        goes_on = (
            before != "" and self._since < self._increments and before < step_directories.place(self.root, step).name
        )
        goes_on = goes_on and self._line == self._changes.line
        numbers = dict(numbers) if self._team.first else {}
        numbers["course"] = {"line": self._changes.line, "time": time.time()}
        if not self._published:
            numbers["rank"] = state.random_numbers()
        with self._changes.told(self, model) if self._increments else nullcontext():
            given = self._given(model, optimizer, own)
            self._writer.begin(step, given, numbers, self._before if goes_on else None, since=start)
        self._since = self._since + 1 if goes_on else 0
        self._before, self._line = step_directories.place(self.root, step), self._changes.line
        self.pauses.append(time.perf_counter() - start)

    def _given(
        self, model: nn.Module, optimizer: torch.optim.Optimizer | None, own: Sequence[Tensor]
    ) -> list[Rectangle]:
        """What this rank writes."""
        rank = self._team.rank
        if self._published:
            return state.weights(model, rank)
        return [*state.rectangles(model, optimizer, rank), *state.of_rank(own, rank)]

    def forget(self) -> None:
        """Have the next checkpoint whole."""
        self._since = self._increments

    def end(self) -> None:
        """Until what was begun is complete."""
        if self._before is None:
            return
        mine, said = UNDER_WAY, [UNDER_WAY]
        while UNDER_WAY in said:
            mine = self._writer.wait(SECONDS_AT_ONCE) if mine == UNDER_WAY else mine
            said = self._team.said(mine)
        told = [words for words in said if words]
        if told:
            raise UserError(next((words for words in told if ANOTHER not in words), told[0]))

    def close(self) -> None:
        """Wait for no other rank any longer."""
        self._writer.stop()

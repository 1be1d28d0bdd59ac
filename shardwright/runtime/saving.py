"""The checkpoints of a job: begun between two steps, written beside those that follow, one at a time.

Phases, alike on all ranks: what was begun before has ended, and all hear whether it went well; the first rank makes the
draft; all begin.
"""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.checkpoint import folder
from shardwright.checkpoint.reading import Checkpoint
from shardwright.checkpoint.writing import ANOTHER, UNDER_WAY, Writer
from shardwright.errors import UserError
from shardwright.runtime import state
from shardwright.runtime.team import Team

SECONDS_AT_ONCE = 10.0  # that a rank waits for its own part before it tells the others


class OfJob:
    """What a checkpoint has of a job, as a state to be read back."""

    def __init__(self, found: Checkpoint) -> None:
        self.kinds, self.fill = found.kinds, found.fill
        self.numbers = {**found.numbers["job"], "ranks": found.numbers["ranks"]}


class Saver:
    """One place of checkpoints. `increments` of them after each whole one have only rows of tables that changed."""

    def __init__(self, team: Team, root: Path, *, keep: int = 2, increments: int = 0, rounded: str = "") -> None:
        """`rounded`: the dtype of weights in increments; empty: their own."""
        self.root = root
        self.pauses: list[float] = []  # seconds that steps waited, of each
        self._team, self._increments = team, increments
        self._writer = Writer(root, rank=team.rank, ranks=team.size, keep=keep, rounded=rounded)
        self._before: Path | None = None
        self._since = 0  # increments since the last whole one

    def ready(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        """Have the memory that a checkpoint takes before the first step waits for one."""
        self._writer.ready(state.rectangles(model, optimizer, self._team.rank))

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
        goes_on = before != "" and self._since < self._increments and before < folder.place(self.root, step).name
        rank = self._team.rank
        given = [*state.rectangles(model, optimizer, rank), *state.of_rank(own, rank)]
        numbers = dict(numbers) if self._team.first else {}
        numbers["rank"] = state.random_numbers()
        self._writer.begin(step, given, numbers, self._before if goes_on else None, since=start)
        if self._increments:
            state.track_changes(model)
        self._since = self._since + 1 if goes_on else 0
        self._before = folder.place(self.root, step)
        self.pauses.append(time.perf_counter() - start)

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

"""The interface for showing the progress of a run, and the result of a run."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol


class Watcher(Protocol):
    """Receives the run directory, notes for the user, then every step and every line of metrics."""

    def begin(self, path: Path) -> None: ...

    def note(self, text: str) -> None: ...

    def step(self, step: int, samples: int) -> None: ...

    def line(self, line: Mapping[str, Any]) -> None: ...


@dataclass(frozen=True, slots=True)
class RunResult:
    """The result of a run."""

    path: Path
    evaluation: dict[str, Any]
    samples_per_second: float
    pause_seconds: tuple[float, ...] = ()  # how long each checkpoint paused training
    stop_signal: int = 0  # the signal that stopped the run before its last step; 0: none
    step: int = 0  # the last step
    rates: dict[str, float] = field(default_factory=dict)  # of a model of tokens: tokens_per_second, mfu, mfu_full


class SilentWatcher:
    """A watcher that shows nothing."""

    def begin(self, path: Path) -> None: ...

    def note(self, text: str) -> None: ...

    def step(self, step: int, samples: int) -> None: ...

    def line(self, line: Mapping[str, Any]) -> None: ...

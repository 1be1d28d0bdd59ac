"""The interface for following a run, and the result of a run."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol


class Watcher(Protocol):
    """Follows a run: receives its directory, notes for the user, then every step and every line of metrics."""

    def begin(self, path: Path) -> None: ...

    def note(self, words: str) -> None: ...

    def step(self, step: int, samples: int) -> None: ...

    def line(self, line: Mapping[str, Any]) -> None: ...


@dataclass(frozen=True, slots=True)
class RunResult:
    """The result of a run."""

    path: Path
    evaluation: dict[str, Any]
    samples_per_second: float
    pause_seconds: tuple[float, ...] = ()  # seconds that steps waited, of each checkpoint
    stop_signal: int = 0  # that stopped it before its last step
    step: int = 0  # the last one


class SilentWatcher:
    """Shows nothing."""

    def begin(self, path: Path) -> None: ...

    def note(self, words: str) -> None: ...

    def step(self, step: int, samples: int) -> None: ...

    def line(self, line: Mapping[str, Any]) -> None: ...

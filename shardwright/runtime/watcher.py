"""Who follows a run while it goes on, and what a run ends with."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol


class Watcher(Protocol):
    """Who follows a run: told where it is written, what else is to be known, then every step and line of metrics."""

    def begin(self, path: Path) -> None: ...

    def note(self, words: str) -> None: ...

    def step(self, step: int, samples: int) -> None: ...

    def line(self, line: Mapping[str, Any]) -> None: ...


@dataclass(frozen=True, slots=True)
class Finished:
    """What a run ends with."""

    path: Path
    evaluation: dict[str, Any]
    samples_per_second: float
    pauses: tuple[float, ...] = ()  # seconds that steps waited, of each checkpoint
    signal: int = 0  # that stopped it before its last step
    step: int = 0  # the last one


class Silent:
    """Shows nothing."""

    def begin(self, path: Path) -> None: ...

    def note(self, words: str) -> None: ...

    def step(self, step: int, samples: int) -> None: ...

    def line(self, line: Mapping[str, Any]) -> None: ...

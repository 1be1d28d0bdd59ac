"""Callbacks: what users and loggers receive of a run; and the result of a run."""

import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardwright.config import Settings
from shardwright.errors import UserError
from shardwright.runtime.run.directory import resume_hint


@dataclass(frozen=True, slots=True)
class RunStart:
    """What is known before the first step of a run."""

    path: Path  # the run directory
    settings: Settings  # with all defaults
    step: int = 0  # steps already trained, of a resumed run
    samples_per_epoch: int | None = None  # None: the data source has no end

    @property
    def steps(self) -> int:
        """The last step; 0: the run trains until it is stopped."""
        return self.settings.train.steps


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


class Callback:
    """Receives the events of a run. Subclass it and define the methods that you need; the others do nothing.

    Only the first rank calls it, between steps, and training waits for it. An exception ends the run.
    """

    def begin(self, run: RunStart) -> None:
        """Before the first step. The run directory exists and has the run's description."""

    def note(self, text: str) -> None:
        """A note for the user, such as the number of threads and its reason."""

    def step(self, step: int, samples: int) -> None:
        """After each step; `samples` counts those trained on since the start of the run."""

    def line(self, line: Mapping[str, Any]) -> None:
        """A line of metrics.jsonl, once it is written. `line["kind"]` is train, progressive, eval, test or end."""

    def end(self, result: RunResult | None) -> None:
        """After the last step or a stop signal. None: the run has failed with an exception."""


class CallbackList:
    """Calls the callbacks of a run, in order. As a context, it ends them if the run fails.

    An exception of a callback ends the run as an error that names the callback.
    """

    def __init__(self, callbacks: Sequence[Callback] = ()) -> None:
        for callback in callbacks:
            if not isinstance(callback, Callback):
                what = f"the class {callback.__name__}" if isinstance(callback, type) else f"{callback!r}"
                raise UserError(f"callbacks: {what} is no callback; give an instance of a subclass of Callback")
        self._callbacks = tuple(callbacks)
        self._open: list[Callback] = []  # begun and not ended
        self._run: RunStart | None = None
        self._step = 0

    def __enter__(self) -> "CallbackList":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        while self._open:
            callback = self._open.pop(0)
            try:
                callback.end(None)
            except Exception as failure:  # the run has failed before, for a reason that must stay visible
                if error is not None:
                    error.add_note(self._describe(callback, "end", failure))

    def begin(self, run: RunStart) -> None:
        self._run, self._step = run, run.step
        for callback in self._callbacks:
            self._call(callback, "begin", run)
            self._open.append(callback)

    def note(self, text: str) -> None:
        for callback in self._callbacks:
            self._call(callback, "note", text)

    def step(self, step: int, samples: int) -> None:
        self._step = step
        for callback in self._callbacks:
            self._call(callback, "step", step, samples)

    def line(self, line: Mapping[str, Any]) -> None:
        for callback in self._callbacks:
            self._call(callback, "line", line)

    def end(self, result: RunResult) -> None:
        while self._open:
            self._call(self._open.pop(0), "end", result)

    def _call(self, callback: Callback, method: str, *arguments: Any) -> None:
        try:
            getattr(callback, method)(*arguments)
        except UserError:
            raise
        except Exception as error:
            raise UserError(self._describe(callback, method, error)) from error

    def _describe(self, callback: Callback, method: str, error: Exception) -> str:
        """An error line: callback, step, exception, place in the code, and how to continue."""
        place = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(place.filename).name}, line {place.lineno}"
        hint = f"; without it or with it repaired, {resume_hint(self._run.path)}" if self._run else ""
        return (
            f"callback {type(callback).__name__}: {method}() after step {self._step} raised "
            f"{type(error).__name__}: {' '.join(str(error).split())} ({where}){hint}"
        )


def scalars(line: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a line of metrics by "kind/name", as TensorBoard and W&B group them."""
    numbers = {name: value for name, value in line.items() if isinstance(value, int | float) and name != "step"}
    return {f"{line['kind']}/{name}": value for name, value in numbers.items()}

"""A result on its way."""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Generic, TypeVar

from shardwright.comm.watch import Watch, explained

T = TypeVar("T")


class Pending(Generic[T]):
    """What an issuing stage returns: `wait()` gives the value; buffers stay alive until then.

    `works` are torch's handles of what is under way, `held` what they read and write; `finish` makes the value when all
    have ended, and runs once. The end is stamped for the tracer when the work ends, not when somebody waits for it
    (sends and receives between pairs do not tell when they end: theirs is stamped by the wait).
    """

    def __init__(
        self, finish: Callable[[], T], works: Sequence[Any] = (), watch: Watch | None = None, held: Any = None
    ) -> None:
        self._finish: Callable[[], T] | None = finish
        self._works, self._watch, self._held = tuple(works), watch, held
        self.start = time.perf_counter()
        # A list of its own: torch's thread must not be the last to hold this, or it would take down its own group.
        self._ends = ends = list[float]()
        for work in self._works:
            with suppress(RuntimeError):
                work.get_future().then(lambda _: ends.append(time.perf_counter()))

    @property
    def end(self) -> float | None:
        """When the work had ended; None: not yet, or nobody knows."""
        return max(self._ends) if self._ends and len(self._ends) >= len(self._works) else None

    def wait(self) -> T:
        if self._finish is not None:
            try:
                for work in self._works:
                    work.wait()
            except RuntimeError as error:
                raise explained(error, self._watch) from error
            self._value = self._finish()
            if not self._ends:
                self._ends.append(time.perf_counter())
            self._finish, self._works, self._held = None, (), None
        return self._value

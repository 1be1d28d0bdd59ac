"""A result on its way."""

import time
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Pending(Generic[T]):
    """What an issuing stage returns: `wait()` gives the value; buffers stay alive until then.

    `finish` blocks until the work is done and returns its value; it runs once. The end is stamped for the tracer.
    """

    def __init__(self, finish: Callable[[], T]) -> None:
        self._finish: Callable[[], T] | None = finish
        self.start = time.perf_counter()
        self.end: float | None = None

    def wait(self) -> T:
        if self._finish is not None:
            self._value = self._finish()
            self._finish = None
            self.end = time.perf_counter()
        return self._value

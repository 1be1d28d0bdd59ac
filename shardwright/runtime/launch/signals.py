"""SIGTERM, SIGHUP and Ctrl-C during training: finish the step, save a checkpoint, then exit.

Phases: the signal is recorded; each rank sends it in the header of its next batch, part of the sizes all-to-all
(embeddings/exchange.py), so that all ranks stop after the same step; they save, and exit with 128 plus the signal.
"""

import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import TypeVar

T = TypeVar("T")
STOP_SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)
SECONDS_BETWEEN_SIGNALS = 2.0  # signals to a launcher and its ranks within this time are one request
SECONDS_TO_END_STEP = 60.0  # time limit after a signal, for each step until the checkpoint begins
SHOW_CURSOR = "\x1b[?25h"  # which a progress bar hides


class StopRequested(BaseException):
    """A signal came while the run waited for data. Not an Exception, so that a source's code cannot swallow it."""


@contextmanager
def install_handler(handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """Install a handler for the stop signals, in the main thread; signals that this process ignores stay ignored."""
    before = {}
    if threading.current_thread() is threading.main_thread():
        before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    before = {number: old for number, old in before.items() if old is not signal.SIG_IGN}
    for number in before:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


class StopRequest:
    """Records the signal by which training is to stop. A context around the training loop.

    Python runs handlers only after the main thread returns to the interpreter, which a collective may delay. Therefore
    a thread also watches for signals: it ends the process at the second signal, or if no step ends in time after the
    first.
    """

    def __init__(self, report_timeout: Callable[[str], None], seconds: float = SECONDS_TO_END_STEP) -> None:
        """`say_late` is called with the signal's name if no step has ended in time, just before the process exits."""
        self.signal = 0
        self._say_late, self._seconds = report_timeout, seconds
        self._since = self._last_step = 0.0
        self._waiting = False  # for data; a signal may interrupt this
        self._saving = threading.Event()
        self._stack = ExitStack()

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is not threading.main_thread():
            return self
        self._stack.enter_context(install_handler(self._receive))
        ours, theirs = os.pipe()
        os.set_blocking(theirs, False)
        before = signal.set_wakeup_fd(theirs, warn_on_full_buffer=False)
        thread = threading.Thread(target=self._notice, args=(ours,), daemon=True, name="shardwright-signals")
        thread.start()

        def end() -> None:
            signal.set_wakeup_fd(before)
            os.close(theirs)
            thread.join()

        self._stack.callback(end)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def interruptible_batches(self, batches: Iterable[T], between_steps: Callable[[], bool]) -> Iterator[T]:
        """Yield the same batches; a signal that arrives while waiting for the next one raises StopRequested.

        Not inside a step of several micro-batches: a resumed run would repeat those before, with random numbers drawn
        and running statistics moved twice.
        """
        iterator = iter(batches)
        while True:
            self._waiting = between_steps()
            try:
                if self.signal and self._waiting:
                    raise StopRequested
                batch = next(iterator, None)
            finally:
                self._waiting = False
            if batch is None:
                return
            yield batch

    def restart_time_limit(self) -> None:
        """Restart the time limit: with several ranks, steps of batches that were read ahead still follow."""
        if self._since:
            self._last_step = time.monotonic()

    def disable_time_limit(self) -> None:
        """End the time limit: a checkpoint has begun, and writing it may take any time."""
        self._saving.set()

    @contextmanager
    def suspend_time_limit(self) -> Iterator[None]:
        """Suspend the time limit while the training loop waits for a checkpoint to be written."""
        saving = self._saving.is_set()
        self._saving.set()
        try:
            yield
        finally:
            self.restart_time_limit()
            if not saving:
                self._saving.clear()

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        self.signal = self.signal or number
        if self._waiting:
            self._waiting = False
            raise StopRequested

    def _notice(self, pipe: int) -> None:
        with os.fdopen(pipe, "rb", buffering=0) as signals:
            while True:
                began = max(self._since, self._last_step)
                left = began + self._seconds - time.monotonic() if self._since else None
                if self._saving.is_set():
                    left = None
                elif left is not None and left <= 0:
                    try:
                        self._say_late(signal.Signals(self.signal).name)
                    finally:  # whoever read the output may be gone
                        self._end_now(self.signal)
                if not select.select([signals], [], [], left)[0]:
                    continue
                numbers = signals.read(64)
                if not numbers:
                    return
                for number in filter(self._handles, numbers):
                    self._count(number)

    def _handles(self, number: int) -> bool:
        return number in STOP_SIGNALS and signal.getsignal(number) == self._receive

    def _count(self, number: int) -> None:
        now = time.monotonic()
        if not self._since:
            self.signal, self._since = self.signal or number, now
        elif now - self._since >= SECONDS_BETWEEN_SIGNALS:
            self._end_now(number)

    def _end_now(self, number: int) -> None:
        """Exit without waiting for the main thread; a checkpoint is complete or absent at any moment."""
        if sys.stdout.isatty():
            os.write(sys.stdout.fileno(), SHOW_CURSOR.encode())
        os._exit(128 + number)

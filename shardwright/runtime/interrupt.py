"""SIGTERM, SIGHUP and Ctrl-C during training: end the step, save a checkpoint, and only then the process.

Phases: the signal is noted; every rank tells the others of it with the header of its next batch, part of the sizes
all-to-all (embeddings/exchange.py), so that all end after the same step; they save, and exit with 128 plus the signal.
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
SECONDS_BETWEEN_SIGNALS = 2.0  # a scheduler may signal a launcher and its ranks at once: that is one request
SECONDS_TO_END_STEP = 60.0  # after a signal, for each step until the checkpoint is begun
SHOW_CURSOR = "\x1b[?25h"  # which a progress bar hides


class StopRequested(BaseException):
    """A signal came while the run waited for data. No Exception: code of a source must not swallow it."""


@contextmanager
def handled(handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """Have the stop signals handled so, in the main thread, but for those that this process ignores, as under nohup."""
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
    """The signal that has asked this process to stop training, if any. A context around the training loop.

    Python runs handlers only when the main thread is back from whatever it calls, which a collective may delay. So a
    thread notices signals too: it ends the process at the second one, or where no step ends in time after the first.
    """

    def __init__(self, say_late: Callable[[str], None], seconds: float = SECONDS_TO_END_STEP) -> None:
        """`say_late` is told the name of the signal where no step has ended in time, right before the process ends."""
        self.signal = 0
        self._say_late, self._seconds = say_late, seconds
        self._since = self._last_step = 0.0
        self._waiting = False  # for data, in a way that may be given up
        self._saving = threading.Event()
        self._kept = ExitStack()

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is not threading.main_thread():
            return self
        self._kept.enter_context(handled(self._receive))
        ours, theirs = os.pipe()
        os.set_blocking(theirs, False)
        before = signal.set_wakeup_fd(theirs, warn_on_full_buffer=False)
        thread = threading.Thread(target=self._notice, args=(ours,), daemon=True, name="shardwright-signals")
        thread.start()

        def end() -> None:
            signal.set_wakeup_fd(before)
            os.close(theirs)
            thread.join()

        self._kept.callback(end)
        return self

    def __exit__(self, *_: object) -> None:
        self._kept.close()

    def interruptible(self, batches: Iterable[T], between_steps: Callable[[], bool]) -> Iterator[T]:
        """The same; a signal that comes while the next is awaited raises StopRequested there, but never inside a step
        of several micro-batches: what those before have drawn and counted would be drawn and counted again."""
        found = iter(batches)
        while True:
            self._waiting = between_steps()
            try:
                if self.signal and self._waiting:
                    raise StopRequested
                batch = next(found, None)
            finally:
                self._waiting = False
            if batch is None:
                return
            yield batch

    def step_ended(self) -> None:
        """Over ranks the steps of batches that were read ahead are still made: each may take as long as the first."""
        if self._since:
            self._last_step = time.monotonic()

    def saving(self) -> None:
        """A checkpoint is begun: writing it takes as long as it takes."""
        self._saving.set()

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Inside, a step does not go on because a disk is waited for: that has no deadline."""
        saving = self._saving.is_set()
        self._saving.set()
        try:
            yield
        finally:
            self.step_ended()
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
        """Without waiting for the main thread. A checkpoint is complete or absent at any moment."""
        if sys.stdout.isatty():
            os.write(sys.stdout.fileno(), SHOW_CURSOR.encode())
        os._exit(128 + number)

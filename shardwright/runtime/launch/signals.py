"""SIGTERM, SIGHUP and Ctrl-C during training: finish the step, save a checkpoint, then exit.

The signal is recorded; each rank sends it in the header of its next batch, part of the sizes all-to-all
(embeddings/exchange.py), so that all ranks stop after the same step. They save and exit with 128 plus the signal.
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
SECONDS_BETWEEN_SIGNALS = 2.0  # signals within this time count as one stop request
SECONDS_TO_END_STEP = 60.0  # after a signal, time limit of each step until the checkpoint begins
SHOW_CURSOR = "\x1b[?25h"  # terminal escape sequence; a progress bar hides the cursor


class StopRequested(BaseException):
    """A signal arrived while the run waited for data. Not an Exception, which a data source may catch."""


@contextmanager
def install_handler(handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """Install a handler for the stop signals, in the main thread; ignored signals stay ignored."""
    previous = {}
    if threading.current_thread() is threading.main_thread():
        previous = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    previous = {number: old for number, old in previous.items() if old is not signal.SIG_IGN}
    for number in previous:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number, old in previous.items():
            signal.signal(number, old)


class StopRequest:
    """Records the signal that stops training. A context around the training loop.

    Python runs handlers only after the main thread returns to the interpreter, which a collective may delay. Therefore
    a thread also watches for signals. It ends the process at the second signal, or if no step ends in time after the
    first.
    """

    def __init__(self, report_timeout: Callable[[str], None], seconds: float = SECONDS_TO_END_STEP) -> None:
        """`report_timeout` is called with the signal's name before an exit because no step ended in time.

        `seconds` is the time limit of a step after the signal.
        """
        self.signal = 0
        self._report_timeout, self._seconds = report_timeout, seconds
        self._signal_time = self._last_step = 0.0
        self._is_waiting = False  # for data; a signal may interrupt the wait
        self._saving = threading.Event()
        self._stack = ExitStack()

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is not threading.main_thread():
            return self
        self._stack.enter_context(install_handler(self._handle_signal))
        read_fd, write_fd = os.pipe()
        os.set_blocking(write_fd, False)
        previous_fd = signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
        thread = threading.Thread(target=self._watch_signals, args=(read_fd,), daemon=True, name="shardwright-signals")
        thread.start()

        def stop_thread() -> None:
            signal.set_wakeup_fd(previous_fd)
            os.close(write_fd)
            thread.join()

        self._stack.callback(stop_thread)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def interruptible_batches(self, batches: Iterable[T], between_steps: Callable[[], bool]) -> Iterator[T]:
        """Yield the same batches; a signal that arrives while waiting for the next one raises StopRequested.

        Raised only where `between_steps()` is true, not between the micro-batches of a step: a resumed run would repeat
        the earlier micro-batches, drawing random numbers and updating running statistics twice.
        """
        iterator = iter(batches)
        while True:
            self._is_waiting = between_steps()
            try:
                if self.signal and self._is_waiting:
                    raise StopRequested
                batch = next(iterator, None)
            finally:
                self._is_waiting = False
            if batch is None:
                return
            yield batch

    def restart_time_limit(self) -> None:
        """Restart the time limit after a step; with several ranks, steps on prefetched batches may follow."""
        if self._signal_time:
            self._last_step = time.monotonic()

    def disable_time_limit(self) -> None:
        """Disable the time limit: a checkpoint has begun, and writing it may take any time."""
        self._saving.set()

    @contextmanager
    def suspend_time_limit(self) -> Iterator[None]:
        """Suspend the time limit while the training loop waits for a checkpoint to be written."""
        was_saving = self._saving.is_set()
        self._saving.set()
        try:
            yield
        finally:
            self.restart_time_limit()
            if not was_saving:
                self._saving.clear()

    def _handle_signal(self, number: int, _frame: FrameType | None) -> None:
        self.signal = self.signal or number
        if self._is_waiting:
            self._is_waiting = False
            raise StopRequested

    def _watch_signals(self, wakeup_fd: int) -> None:
        """Read signal numbers from the wakeup pipe until it is closed; enforce the time limit."""
        with os.fdopen(wakeup_fd, "rb", buffering=0) as pipe:
            while True:
                start = max(self._signal_time, self._last_step)
                seconds_left = start + self._seconds - time.monotonic() if self._signal_time else None
                if self._saving.is_set():
                    seconds_left = None
                elif seconds_left is not None and seconds_left <= 0:
                    try:
                        self._report_timeout(signal.Signals(self.signal).name)
                    finally:  # printing fails if the reader of the output has exited
                        self._exit_now(self.signal)
                if not select.select([pipe], [], [], seconds_left)[0]:
                    continue
                numbers = pipe.read(64)
                if not numbers:
                    return
                for number in filter(self._is_handled, numbers):
                    self._count_signal(number)

    def _is_handled(self, number: int) -> bool:
        return number in STOP_SIGNALS and signal.getsignal(number) == self._handle_signal

    def _count_signal(self, number: int) -> None:
        """Record the first signal; exit at a second one that is not part of the same request."""
        now = time.monotonic()
        if not self._signal_time:
            self.signal, self._signal_time = self.signal or number, now
        elif now - self._signal_time >= SECONDS_BETWEEN_SIGNALS:
            self._exit_now(number)

    def _exit_now(self, number: int) -> None:
        """Exit without waiting for the main thread; a checkpoint is complete or absent at any time."""
        if sys.stdout.isatty():
            os.write(sys.stdout.fileno(), SHOW_CURSOR.encode())
        os._exit(128 + number)

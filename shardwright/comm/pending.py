"""A result on its way."""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import SimpleQueue
from threading import Event, Lock, Thread
from typing import Any, Generic, TypeVar, cast

from shardwright.comm.heartbeat import Heartbeat, explain_comm_error

T = TypeVar("T")
U = TypeVar("U")
RETAINED_WORK_BYTES = 1 << 26  # of an exchange whose works stay until the next: see `Waiter.recent`


class ChainedWork:
    """A work of several steps, which runs on the thread that waits for it, once the one before it is over.

    Where that failed this does, too: its messages could be taken for those of the other.
    """

    def __init__(self, run: Callable[[], None], predecessor: "ChainedWork | None") -> None:
        self._run: Callable[[], None] | None = run
        self._before = predecessor
        self._over = Event()
        self._error: BaseException | None = None

    def wait(self) -> None:
        try:
            if self._before is not None:
                self._before.wait_completed()
            assert self._run is not None
            self._run()
        except BaseException as error:
            self._error = error
            raise
        finally:
            self._run = self._before = None
            self._over.set()

    def wait_completed(self) -> None:
        """Wait until it is over."""
        self._over.wait()
        if self._error is not None:
            raise RuntimeError(str(self._error)) from self._error


class Waiter:
    """A thread that waits for what cannot tell that it has ended, in the order of issue, so that its end is known.

    It comes a moment later: who waits at once waits by himself, without a thread between him and the work.
    """

    GRACE_SECONDS = 1e-3
    JOIN_TIMEOUT_SECONDS = 2.0

    def __init__(self) -> None:
        # The last works of the lane: where they are gone before the next are made, those take two milliseconds longer.
        self.retained_works: list[Any] = []
        self._last: ChainedWork | None = None
        self._queue: SimpleQueue[Pending[Any] | None] = SimpleQueue()
        self._thread: Thread | None = None

    def chain(self, run: Callable[[], None]) -> ChainedWork:
        """Of all that are had from here, in the order in which they are asked for."""
        self._last = ChainedWork(run, self._last)
        return self._last

    def add(self, pending: "Pending[Any]") -> None:
        if self._thread is None:
            self._thread = Thread(target=self._run, name="waiter", daemon=True)
            self._thread.start()
        self._queue.put(pending)

    def stop(self) -> None:
        """When nothing is under way, or what is will fail: it ends by itself."""
        self.retained_works = []
        self._queue.put(None)

    def join(self) -> None:
        """After `stop`: a thread inside torch when Python ends would take the process down."""
        if self._thread is not None:
            self._thread.join(self.JOIN_TIMEOUT_SECONDS)

    def _run(self) -> None:
        while (pending := self._queue.get()) is not None:
            early = pending.start + self.GRACE_SECONDS - time.perf_counter()
            if early > 0 and not pending.is_settled:
                time.sleep(early)
            pending.settle()
            del pending


class Pending(Generic[T]):
    """What an issuing stage returns: `wait()` gives the value; buffers stay alive until then.

    `works` are torch's handles of what is under way, `held` what they read and write; `finish` makes the value when all
    have ended, and runs once. The end is stamped for the tracer when the work ends, not when somebody waits for it.
    Sends and receives between pairs do not tell when they end; where there is a `waiter`, it waits for them.
    """

    def __init__(
        self,
        finish: Callable[[], T],
        works: Sequence[Any] = (),
        heartbeat: Heartbeat | None = None,
        buffers: Any = None,
        waiter: Waiter | None = None,
    ) -> None:
        self._finish: Callable[[], T] | None = finish
        self._works, self._watch, self._held = tuple(works), heartbeat, buffers
        self._error: RuntimeError | None = None
        self._settling = Lock()
        self.start = time.perf_counter()
        # A list of its own: torch's thread must not be the last to hold this, or it would take down its own group.
        self._ends = ends = list[float]()
        if waiter is not None and self._works:
            waiter.add(self)
            return
        for work in self._works:
            with suppress(RuntimeError):
                work.get_future().then(lambda _: ends.append(time.perf_counter()))

    @property
    def end(self) -> float | None:
        """When the work had ended; None: not yet, or nobody knows."""
        return max(self._ends) if self._ends and (not self._works or len(self._ends) >= len(self._works)) else None

    @property
    def is_settled(self) -> bool:
        return self._error is not None or not self._works

    def settle(self) -> None:
        """Wait for the works, unless that was done; a failure is for `wait` to tell.

        After one the buffers stay: another work may still write to them.
        """
        with self._settling:
            if self.is_settled:
                return
            try:
                for work in self._works:
                    work.wait()
            except RuntimeError as error:
                self._error = error
                return
            if not self._ends:
                self._ends.append(time.perf_counter())
            self._works, self._held = (), None

    def then(self, change: Callable[[T], U]) -> "Pending[U]":
        """The same work, with another value made of its value."""
        before = self._finish
        if before is None:
            raise RuntimeError("this value was waited for already")
        changed = cast("Pending[U]", self)
        changed._finish = lambda: change(before())
        return changed

    def wait(self) -> T:
        if self._finish is not None:
            self.settle()
            if self._error is not None:
                raise explain_comm_error(self._error, self._watch) from self._error
            self._value = self._finish()
            if not self._ends:
                self._ends.append(time.perf_counter())
            self._finish = None
        return self._value

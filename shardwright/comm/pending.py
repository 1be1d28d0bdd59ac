"""Results of asynchronous work, and a thread that waits for works without a completion callback."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from queue import SimpleQueue
from threading import Event, Lock, Thread
from typing import Any, Generic, TypeVar, cast

from shardwright.comm.heartbeat import Heartbeat, explain_comm_error

T_co = TypeVar("T_co", covariant=True)
U = TypeVar("U")
RETAINED_WORK_BYTES = 1 << 26  # largest exchange whose works are kept until the next: see `Waiter.retained_works`


class ChainedWork:
    """Work of several phases that runs on the thread that waits for it, after its predecessor.

    Fails if its predecessor failed, because their messages could be confused.
    """

    def __init__(self, run: Callable[[], None], predecessor: "ChainedWork | None") -> None:
        self._run: Callable[[], None] | None = run
        self._predecessor = predecessor
        self._completed = Event()
        self._error: BaseException | None = None

    def wait(self) -> None:
        try:
            if self._predecessor is not None:
                self._predecessor.wait_completed()
            assert self._run is not None
            self._run()
        except BaseException as error:
            self._error = error
            raise
        finally:
            self._run = self._predecessor = None
            self._completed.set()

    def wait_completed(self) -> None:
        """Wait until another thread has run it; raises its error."""
        self._completed.wait()
        if self._error is not None:
            raise RuntimeError(str(self._error)) from self._error


class Waiter:
    """A thread that waits for works without a completion callback, to record when they end.

    It waits in order of issue and starts GRACE_SECONDS after the issue: a caller that waits at once waits for the work
    itself, without a hand-over between threads.
    """

    GRACE_SECONDS = 1e-3
    JOIN_TIMEOUT_SECONDS = 2.0

    def __init__(self) -> None:
        # The lane's last works. Freed before the next are issued, those take 2 ms longer (measured).
        self.retained_works: list[Any] = []
        self._last: ChainedWork | None = None
        self._queue: SimpleQueue[Pending[Any] | None] = SimpleQueue()
        self._thread: Thread | None = None
        self._sender: Waiter | None = None

    @property
    def sender(self) -> "Waiter":
        """Another waiter, for sends in turn: here each would wait for the receives issued before it."""
        self._sender = self._sender or Waiter()
        return self._sender

    def chain(self, run: Callable[[], None]) -> ChainedWork:
        """Create a work that runs after all that were chained before it."""
        self._last = ChainedWork(run, self._last)
        return self._last

    def add(self, pending: "Pending[Any]") -> None:
        if self._thread is None:
            self._thread = Thread(target=self._run, name="waiter", daemon=True)
            self._thread.start()
        self._queue.put(pending)

    def stop(self) -> None:
        """End the thread once all its works have ended or failed; does not block."""
        self.retained_works = []
        self._queue.put(None)
        if self._sender is not None:
            self._sender.stop()

    def join(self) -> None:
        """Wait for the thread after `stop`: inside torch at the exit of Python it would crash the process."""
        if self._thread is not None:
            self._thread.join(self.JOIN_TIMEOUT_SECONDS)
        if self._sender is not None:
            self._sender.join()

    def _run(self) -> None:
        while (pending := self._queue.get()) is not None:
            grace = pending.start + self.GRACE_SECONDS - time.perf_counter()
            if grace > 0 and not pending.is_settled:
                time.sleep(grace)
            pending.settle()
            del pending


class Pending(Generic[T_co]):
    """Asynchronous work with its result: `wait()` returns it; buffers stay alive until the work ends.

    `works`: torch's handles; `buffers`: what they read and write; `finish` makes the result from completed works, and
    runs once. `end` is recorded for the tracer when the work ends, not when `wait` is called. Point-to-point sends and
    receives have no completion callback: with a `waiter`, its thread waits for them.
    """

    def __init__(
        self,
        finish: Callable[[], T_co],
        works: Sequence[Any] = (),
        heartbeat: Heartbeat | None = None,
        buffers: Any = None,
        waiter: Waiter | None = None,
    ) -> None:
        self._finish: Callable[[], T_co] | None = finish
        self._works, self._heartbeat, self._buffers = tuple(works), heartbeat, buffers
        self.is_ready = False  # whether the result existed before this object
        self._error: RuntimeError | None = None
        self._settling = Lock()
        self.start = time.perf_counter()
        # Callbacks refer to this list, not to self: torch's thread could drop the last reference and destroy its group.
        self._ends = ends = list[float]()
        if waiter is not None and self._works:
            waiter.add(self)
            return
        for work in self._works:
            with suppress(RuntimeError):
                work.get_future().then(lambda _: ends.append(time.perf_counter()))

    @classmethod
    def of_future(cls, future: Future[T_co]) -> "Pending[T_co]":
        """The work of a thread."""
        pending = cls(future.result)
        ends = pending._ends
        future.add_done_callback(lambda _: ends.append(time.perf_counter()))
        return pending

    @property
    def end(self) -> float | None:
        """When the work ended, by time.perf_counter; None: not yet, or unknown."""
        return max(self._ends) if self._ends and (not self._works or len(self._ends) >= len(self._works)) else None

    @property
    def is_settled(self) -> bool:
        return self._error is not None or not self._works

    def settle(self) -> None:
        """Wait for the works, once; an error is raised only by `wait`.

        After an error the buffers stay alive: another work may still write to them.
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
            self._works, self._buffers = (), None

    def then(self, transform: Callable[[T_co], U]) -> "Pending[U]":
        """Transform the result when it is waited for; returns this object, whose result has the new type."""
        finish = self._finish
        if finish is None:
            raise RuntimeError("cannot transform a result after wait(); call then() before wait()")
        result = cast("Pending[U]", self)
        result._finish = lambda: transform(finish())
        return result

    def wait(self) -> T_co:
        """Wait for the work and return its result; raises `PeerLost` if another rank made it fail."""
        if self._finish is not None:
            self.settle()
            if self._error is not None:
                raise explain_comm_error(self._error, self._heartbeat) from self._error
            self._value = self._finish()
            if not self._ends:
                self._ends.append(time.perf_counter())
            self._finish = None
        return self._value


def ready(value: T_co) -> Pending[T_co]:
    """A result that needs no waiting."""
    pending = Pending(lambda: value)
    pending.is_ready = True
    return pending


class LazyValue:
    """Stands for a value in flight; waits for it at the first access to an attribute or item."""

    def __init__(self, get: Callable[[], Any]) -> None:
        self._get = get

    def __getattr__(self, name: str) -> Any:
        return getattr(self._get(), name)

    def __getitem__(self, key: Any) -> Any:
        return self._get()[key]

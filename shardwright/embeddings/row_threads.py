"""Threads that find the distinct rows of a batch, place them on lines of caches, and copy rows."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from shardwright.comm.pending import Pending
from shardwright.kernels.arguments import IdOutOfRange
from shardwright.kernels.native import use_threads

T = TypeVar("T")
NUM_THREADS = 4  # of the kernels that find lines for a batch, beside the thread that runs the step


class RowThreads:
    """Runs one function after the other. What these hand to `copy` runs in a second thread, in the same order: the next
    batch is placed while rows of this one are copied. Work that needs none of it can be started with `before`.

    What steps defer, such as the release of lines, runs before the next function that is submitted after it: so which
    rows are evicted does not depend on which thread is faster.
    """

    def __init__(self, num_threads: int = NUM_THREADS) -> None:
        self._executor = ThreadPoolExecutor(1, "rows", use_threads, (num_threads,))
        self._copier = ThreadPoolExecutor(1, "row copies", use_threads, (num_threads,))
        self._first = ThreadPoolExecutor(1, "distinct rows", use_threads, (num_threads,))
        self._deferred: list[Callable[[], None]] = []
        self._failure: Exception | None = None

    def before(self, run: Callable[[], T]) -> Callable[[], T]:
        """Run this in a thread of its own; the result is for functions that are submitted later."""
        return self._first.submit(run).result

    def submit(self, run: Callable[[], T]) -> Pending[T]:
        deferred, self._deferred = self._deferred, []

        def run_after() -> T:
            for each in deferred:
                self._keep_failure(each)
            return self._keep_failure(run)

        return Pending(self._executor.submit(run_after).result)

    def wait(self) -> None:
        """Wait for what was submitted, not for copies."""
        self._executor.submit(lambda: None).result()

    def defer(self, run: Callable[[], None]) -> None:
        """Run this before the next function that is submitted."""
        self._deferred.append(run)

    def copy(self, run: Callable[[], T]) -> Pending[T]:
        """Run this in the second thread; called by functions that were submitted."""
        return Pending(self._copier.submit(self._keep_failure, run).result)

    def run_alone(self, run: Callable[[], T]) -> T:
        """Run this after all that was submitted, deferred or copied, and wait for it."""
        return self.submit(lambda: self.copy(run)).wait().wait()

    def _keep_failure(self, run: Callable[[], Any]) -> Any:
        """After an error all functions raise it: lines may lack their rows. Not after an id outside its table: nothing
        is placed then."""
        if self._failure is not None:
            raise self._failure
        try:
            return run()
        except IdOutOfRange:
            raise
        except Exception as error:
            self._failure = error
            raise

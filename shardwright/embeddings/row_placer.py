"""Places the batches of a rank on lines of caches in front of rows on disk, in threads of their own.

Phases: expect      find the distinct rows of a batch, and announce them to the caches
        prefetch    find lines for them, copy what is missing
        release     end the use of the lines
"""

from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter

from shardwright.comm.pending import Pending, ready
from shardwright.embeddings.local_shards import LocalShards, PlacedIds
from shardwright.embeddings.routed_batch import RoutedBatch
from shardwright.embeddings.row_threads import RowThreads


class RowPlacer:
    """`threads`: None without caches."""

    def __init__(self, local_shards: Sequence[LocalShards], threads: RowThreads | None) -> None:
        self._local_shards = local_shards
        self._threads = threads if any(local.caches for local in local_shards) else None
        self.waited_seconds = 0.0  # that steps have waited for rows to be copied

    def expect(self, routed: RoutedBatch) -> None:
        """Announce a batch: it is placed after those announced before."""
        if self._threads is None:
            return

        def announce() -> None:
            parts = zip(self._local_shards, routed.incoming, strict=True)
            rows = [local.distinct_rows(request.ids) if local.caches else None for local, request in parts]
            for local, own in zip(self._local_shards, rows, strict=True):
                if own is not None:
                    local.announce(own)
            routed.announced[:] = rows

        self._threads.submit(announce)

    def wait_until_placed(self) -> None:
        """Wait for the batches that are being placed, not for copies; then every run has counted the same."""
        if self._threads is not None:
            self._threads.wait()

    def forget(self) -> None:
        """Forget announced batches that will not be placed."""
        if self._threads is not None:
            for cached in (cached for local in self._local_shards for cached in local.caches.values()):
                self._threads.defer(cached.index.forget)

    def prefetch(self, routed: RoutedBatch) -> Pending[RoutedBatch]:
        """Find lines for the rows of a batch, and copy those that are missing."""
        routed.placed[:] = [PlacedIds(request.ids, request.ids, {}) for request in routed.incoming]
        if self._threads is None:
            return ready(routed)
        placed = self._threads.submit(partial(self._place, routed, self._threads))

        def wait() -> RoutedBatch:
            start = perf_counter()
            placed.wait().wait()
            self.waited_seconds += perf_counter() - start
            return routed

        return Pending(wait)

    def _place(self, routed: RoutedBatch, threads: RowThreads) -> Pending[None]:
        """Place a batch; returns its copies."""
        copies: list[Callable[[], None]] = []
        all_rows = routed.announced or [None] * len(self._local_shards)
        for index, (local, request, rows) in enumerate(zip(self._local_shards, routed.incoming, all_rows, strict=True)):
            if local.caches:
                rows_now = local.distinct_rows(request.ids) if rows is None else rows
                routed.placed[index], copy = local.place(request.ids, rows_now, announced=rows is not None)
                copies += [copy] if copy is not None else []
        return threads.copy(partial(_run_all, copies))

    def release(self, routed: RoutedBatch, *, written: bool) -> None:
        """End a batch's use of its lines; `written`: an update has changed them."""
        for batch in routed.lookups:
            for local, placed in zip(self._local_shards, batch.placed, strict=bool(batch.placed)):
                if local.growing:
                    local.release_spares(placed)
                elif written and placed.lines:
                    local.mark_changed(placed)
            if self._threads is not None and batch.placed:
                self._threads.defer(partial(self._release, batch, written=written))
            else:
                batch.placed.clear()

    def _release(self, batch: RoutedBatch, *, written: bool) -> None:
        for local, placed in zip(self._local_shards, batch.placed, strict=True):
            local.release(placed, written=written)
        batch.placed.clear()


def _run_all(functions: Sequence[Callable[[], None]]) -> None:
    for run in functions:
        run()

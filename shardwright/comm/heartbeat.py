"""Heartbeats of all ranks in the job's store, and from them the rank that made a collective fail.

If a collective fails, torch reports only a closed connection or a time-out.
"""

import atexit
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

from shardwright.errors import UserError

T = TypeVar("T")
HEARTBEAT_INTERVAL_SECONDS = 0.5
HEARTBEAT_TIMEOUT_SECONDS = 2.0


class PeerLost(UserError):
    """A rank that others wait for has failed or issued another collective; `stage` is this rank's."""

    def __init__(self, rank: int | None, stage: str, step: int, why: str) -> None:
        who = f"rank {rank}" if rank is not None else "a rank"
        position = f"{stage} of step {step}"
        super().__init__(f"{who} {why}, while this rank is in {position}; restart the job from its last checkpoint")
        self.rank, self.stage, self.step = rank, stage, step


class Heartbeat:
    """A thread that writes this rank's heartbeats to the store; reads those of all ranks after a failure."""

    def __init__(self, rank: int, size: int, store: Any) -> None:
        """`store`: a connection of its own to the job's store; torch's blocks while a collective waits on it."""
        self.rank, self.size = rank, size
        self.stage, self.step = "no stage", 0
        self._store = store
        self._store.set_timeout(timedelta(seconds=HEARTBEAT_TIMEOUT_SECONDS))
        self._stopped = threading.Event()
        self._send(0)
        self._thread = threading.Thread(target=self._run, daemon=True, name="shardwright-heartbeat")
        self._thread.start()
        atexit.register(self.stop)  # a thread still inside torch when Python exits crashes the process

    def find_lost_peer(self) -> PeerLost:
        """Find the rank that made a collective of this rank fail; takes a few seconds.

        The first rank with a result records it in the store, and the others report the same: otherwise they would name
        ranks that ended because of the first failure.
        """
        before = self._read_heartbeats()
        time.sleep(HEARTBEAT_TIMEOUT_SECONDS)
        after = self._read_heartbeats()
        if after is None:
            return PeerLost(0, self.stage, self.step, "serves the job's store, which does not answer")
        rank, why = self._diagnose(before, after)
        if rank is None:
            return PeerLost(None, self.stage, self.step, why)
        recorded = self._query_store(lambda: self._store.compare_set("lost", "", f"{rank}|{why}").decode())
        number, _, why = (recorded or f"{rank}|{why}").partition("|")
        if self.rank == 0:
            time.sleep(2 * HEARTBEAT_TIMEOUT_SECONDS)  # the store ends with this rank, and others still query it
        return PeerLost(int(number), self.stage, self.step, why)

    def report_failure(self, error: Exception) -> None:
        """Record this rank's error in the store, unless another rank's is there, for the others to report."""
        self._query_store(lambda: self._store.compare_set("lost", "", f"{self.rank}|failed ({error})"))
        if self.rank == 0:
            time.sleep(2 * HEARTBEAT_TIMEOUT_SECONDS)

    def _diagnose(self, before: list[tuple[str, str]] | None, after: list[tuple[str, str]]) -> tuple[int | None, str]:
        peers = [peer for peer in range(self.size) if peer != self.rank]
        for peer in peers:
            if before is None or before[peer][0] == after[peer][0]:
                return peer, f"has sent no heartbeat for {HEARTBEAT_TIMEOUT_SECONDS:g} s"
        for peer in peers:
            if after[peer][1] != f"{self.stage} of step {self.step}":
                return peer, f"is in {after[peer][1]}"
        return None, "has lost its connection, though all ranks send heartbeats"

    def stop(self) -> None:
        """Stop the heartbeats; a thread that hangs because it cannot reach the store ends with the process."""
        atexit.unregister(self.stop)
        self._stopped.set()
        self._thread.join(2 * HEARTBEAT_INTERVAL_SECONDS)

    def _run(self) -> None:
        number = 1
        while not self._stopped.wait(HEARTBEAT_INTERVAL_SECONDS):
            try:
                self._send(number)
            except RuntimeError:  # the store does not answer: `find_lost_peer` reports it if a collective fails
                return
            number += 1

    def _send(self, number: int) -> None:
        self._store.set(f"beat/{self.rank}", f"{number}|{self.stage} of step {self.step}")

    def _read_heartbeats(self) -> list[tuple[str, str]] | None:
        """Number and stage of each rank's last heartbeat; None if the store does not answer."""
        values = self._query_store(lambda: [self._store.get(f"beat/{rank}").decode() for rank in range(self.size)])
        if values is None:
            return None
        return [(number, stage) for number, _, stage in (value.partition("|") for value in values)]

    def _query_store(self, query: Callable[[], T]) -> T | None:
        """The result of the query; None if there is none in time: over a cut link a call hangs."""
        answers: list[T] = []

        def run_query() -> None:
            with suppress(RuntimeError):
                answers.append(query())

        thread = threading.Thread(target=run_query, daemon=True)
        thread.start()
        thread.join(2 * HEARTBEAT_TIMEOUT_SECONDS)
        return answers[0] if answers else None


def explain_comm_error(error: RuntimeError, heartbeat: Heartbeat | None) -> Exception:
    """`PeerLost` if a connection failed or a collective timed out; any other error unchanged."""
    words = ("connection", "timed out", "timeout", "gloo/transport", "socket", "peer")
    if heartbeat is None or not any(word in str(error).lower() for word in words):
        return error
    return heartbeat.find_lost_peer()

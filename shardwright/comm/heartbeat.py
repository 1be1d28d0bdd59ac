"""Who is still there: every rank tells a store now and then that it lives and what it waits for.

When a collective fails, torch says that a connection closed or that time ran out; this says whose fault it was.
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
    """A rank that others wait for has gone, or waits for something else."""

    def __init__(self, rank: int | None, stage: str, step: int, why: str) -> None:
        who = f"rank {rank}" if rank is not None else "a rank"
        super().__init__(f"{who} {why}, in {stage} of step {step}; restart the job from its last checkpoint")
        self.rank, self.stage, self.step = rank, stage, step


class Heartbeat:
    """The beats of this rank, and a look at those of the others."""

    def __init__(self, rank: int, size: int, store: Any) -> None:
        """`store` is the job's, by a connection of its own: the other is busy while a collective waits on it."""
        self.rank, self.size = rank, size
        self.stage, self.step = "no stage", 0
        self._store = store
        self._store.set_timeout(timedelta(seconds=HEARTBEAT_TIMEOUT_SECONDS))
        self._stopped = threading.Event()
        self._beat(0)
        self._thread = threading.Thread(target=self._beats, daemon=True, name="shardwright-watch")
        self._thread.start()
        atexit.register(self.stop)  # inside torch when Python ends, the thread would take the process down

    def find_lost_peer(self) -> PeerLost:
        """Who is to blame for a collective of this rank that failed; takes a few seconds.

        The first rank that knows tells the others: those that end because of it are not to blame.
        """
        before = self._seen()
        time.sleep(HEARTBEAT_TIMEOUT_SECONDS)
        after = self._seen()
        if after is None:
            return PeerLost(0, self.stage, self.step, "keeps the job's store, which does not answer")
        rank, why = self._blamed(before, after)
        if rank is None:
            return PeerLost(None, self.stage, self.step, why)
        first = self._asked(lambda: self._store.compare_set("lost", "", f"{rank}|{why}").decode())
        number, _, why = (first or f"{rank}|{why}").partition("|")
        if self.rank == 0:
            time.sleep(2 * HEARTBEAT_TIMEOUT_SECONDS)  # the store ends with this rank, and others have still to ask it
        return PeerLost(int(number), self.stage, self.step, why)

    def report_failure(self, error: Exception) -> None:
        """Have the others told why this rank goes no further, where no other has failed before."""
        self._asked(lambda: self._store.compare_set("lost", "", f"{self.rank}|failed ({error})"))
        if self.rank == 0:
            time.sleep(2 * HEARTBEAT_TIMEOUT_SECONDS)

    def _blamed(self, before: list[tuple[str, str]] | None, after: list[tuple[str, str]]) -> tuple[int | None, str]:
        others = [rank for rank in range(self.size) if rank != self.rank]
        for rank in others:
            if before is None or before[rank][0] == after[rank][0]:
                return rank, f"has not been heard of for {HEARTBEAT_TIMEOUT_SECONDS:g} s"
        for rank in others:
            if after[rank][1] != f"{self.stage} of step {self.step}":
                return rank, f"is elsewhere, in {after[rank][1]}"
        return None, "has lost its connection, though all are heard of"

    def stop(self) -> None:
        """End the beats; a beat that hangs on a store out of reach is left to end with the process."""
        atexit.unregister(self.stop)
        self._stopped.set()
        self._thread.join(2 * HEARTBEAT_INTERVAL_SECONDS)

    def _beats(self) -> None:
        number = 1
        while not self._stopped.wait(HEARTBEAT_INTERVAL_SECONDS):
            try:
                self._beat(number)
            except RuntimeError:  # the store has gone: `lost` will say so, if it matters
                return
            number += 1

    def _beat(self, number: int) -> None:
        self._store.set(f"beat/{self.rank}", f"{number}|{self.stage} of step {self.step}")

    def _seen(self) -> list[tuple[str, str]] | None:
        """The number of each rank's last beat and where it was; None where the store does not answer."""
        found = self._asked(lambda: [self._store.get(f"beat/{rank}").decode() for rank in range(self.size)])
        if found is None:
            return None
        return [(number, where) for number, _, where in (one.partition("|") for one in found)]

    def _asked(self, question: Callable[[], T]) -> T | None:
        """The store's answer; None where there is none in time: a cut link does not say that it is cut."""
        answers: list[T] = []

        def ask() -> None:
            with suppress(RuntimeError):
                answers.append(question())

        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        asking.join(2 * HEARTBEAT_TIMEOUT_SECONDS)
        return answers[0] if answers else None


def explain_comm_error(error: RuntimeError, heartbeat: Heartbeat | None) -> Exception:
    """Who is to blame, where a connection failed or time ran out; any other error as it is."""
    lost = ("connection", "timed out", "timeout", "gloo/transport", "socket", "peer")
    if heartbeat is None or not any(word in str(error).lower() for word in lost):
        return error
    return heartbeat.find_lost_peer()

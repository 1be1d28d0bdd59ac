"""Counts of the bytes that a rank sends, by lane, by the stage that the step is in, and by link.

Bytes of torch's own collectives are those of rings in the order of ranks; all others are those of messages.
"""

from collections import Counter
from collections.abc import Sequence
from threading import Lock

from shardwright.spec.traffic import BETWEEN_HOSTS, IN_HOST, TO_SERVERS

SERVER_LANE = "servers"  # of calls, in place of a lane; their stages are the names of calls and REPLY + name
REPLY = "reply to "
SentKey = tuple[str, str, str]  # lane, stage, link


class SentBytes:
    """The counts of one rank. Threads that send may share it."""

    def __init__(self) -> None:
        self.stage = ""  # the last that the step began; set by its tracer
        self._near: frozenset[int] = frozenset()  # the ranks of this host
        self._counts, self._lock = Counter[SentKey](), Lock()

    def set_host(self, rank: int, hosts: Sequence[Sequence[int]], ranks_per_host: int) -> None:
        """`hosts`: the ranks of each; empty: numbered host by host."""
        first = rank // ranks_per_host * ranks_per_host
        self._near = frozenset(next((host for host in hosts if rank in host), range(first, first + ranks_per_host)))

    def add(self, lane: str, rank: int, bytes_: int) -> None:
        """Count a message to a rank."""
        self._add((lane, self.stage, IN_HOST if rank in self._near else BETWEEN_HOSTS), bytes_)

    def add_to_next(self, lane: str, ranks: Sequence[int], index: int, bytes_: int) -> None:
        """Count what the rank at `index` sends to the next one in a ring."""
        if bytes_:
            self.add(lane, ranks[(index + 1) % len(ranks)], bytes_)

    def add_call(self, name: str, bytes_: int) -> None:
        """Count a message to a table server, or from it."""
        self._add((SERVER_LANE, name, TO_SERVERS), bytes_)

    def _add(self, key: SentKey, bytes_: int) -> None:
        with self._lock:
            self._counts[key] += bytes_

    def totals(self) -> dict[SentKey, int]:
        """Bytes since the start."""
        with self._lock:
            return dict(self._counts)

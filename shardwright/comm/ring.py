"""Memory that one rank of a host writes and another reads, message by message, with a counter between them."""

import ctypes
import platform
from collections import deque

import torch

from shardwright.library import native_library

LINE_BYTES = 64  # places start at lines of the cache; the first holds how many messages were taken
X86 = ("x86_64", "amd64", "i386", "i686")


class SharedCounter:
    """A number in shared memory, which one process stores and another loads.

    Loads acquire and stores release: a process that loads a number also sees all writes that the other process made
    before it stored the number. Plain accesses guarantee this only on x86.
    """

    def __init__(self, address: int) -> None:
        self._native = native_library()
        self._address = address
        self._plain = ctypes.c_int64.from_address(address)

    def load(self) -> int:
        return self._plain.value if self._native is None else self._native.shardwright_load_acquire(self._address)

    def store(self, number: int) -> None:
        if self._native is None:
            self._plain.value = number
        else:
            self._native.shardwright_store_release(self._address, number)


def orders_memory() -> bool:
    """Whether a `SharedCounter` orders the memory accesses around it: with the compiled library, or on x86."""
    return native_library() is not None or platform.machine().lower() in X86


class Ring:
    """Memory that one rank writes and another reads, message by message."""

    def __init__(self, file: int, bytes_: int) -> None:
        self.bytes_ = bytes_
        self.memory = torch.from_file(f"/proc/self/fd/{file}", shared=True, size=bytes_, dtype=torch.uint8)
        self._taken = SharedCounter(self.memory.data_ptr())
        self._seen = 0
        self._under_way: deque[tuple[int, int]] = deque()

    def reserve(self, size: int) -> int | None:
        """Where a message of this size may lie; None: nowhere yet."""
        for _ in range(self._taken.load() - self._seen):
            self._under_way.popleft()
            self._seen += 1
        start, limit = LINE_BYTES, self.bytes_
        if self._under_way:
            first, start = self._under_way[0][0], self._under_way[-1][1]
            if start <= first:
                limit = first
            elif start + size > limit:
                start, limit = LINE_BYTES, first
        if start + size > limit:
            return None
        self._under_way.append((start, -(-(start + size) // LINE_BYTES) * LINE_BYTES))
        return start

    def mark_consumed(self) -> None:
        """The receiver has copied the oldest message, whose space the sender may reuse."""
        self._taken.store(self._taken.load() + 1)

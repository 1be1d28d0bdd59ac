"""A ring buffer in shared memory, written by one rank of a host and read by another."""

import ctypes
import platform
from collections import deque

import torch

from shardwright.library import native_library

LINE_BYTES = 64  # messages start at cache lines; the first line holds the number of consumed messages
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
    """Whether a `SharedCounter` orders the accesses around it: with the compiled library, or on x86."""
    return native_library() is not None or platform.machine().lower() in X86


class Ring:
    """Shared memory for messages of one rank to another; only the sender calls `reserve`."""

    def __init__(self, file: int, bytes_: int) -> None:
        self.bytes_ = bytes_
        self.memory = torch.from_file(f"/proc/self/fd/{file}", shared=True, size=bytes_, dtype=torch.uint8)
        self._consumed = SharedCounter(self.memory.data_ptr())
        self._num_freed = 0
        self._in_flight: deque[tuple[int, int]] = deque()

    def reserve(self, size: int) -> int | None:
        """Reserve space for a message; returns its offset in bytes, or None if there is no space now."""
        for _ in range(self._consumed.load() - self._num_freed):
            self._in_flight.popleft()
            self._num_freed += 1
        start, limit = LINE_BYTES, self.bytes_
        if self._in_flight:
            first, start = self._in_flight[0][0], self._in_flight[-1][1]
            if start <= first:
                limit = first
            elif start + size > limit:
                start, limit = LINE_BYTES, first
        if start + size > limit:
            return None
        self._in_flight.append((start, -(-(start + size) // LINE_BYTES) * LINE_BYTES))
        return start

    def mark_consumed(self) -> None:
        """Count the oldest message as copied by the receiver, so that the sender may reuse its space."""
        self._consumed.store(self._consumed.load() + 1)

"""Bytes that a process has allocated, now and at peak, counted in the allocation functions.

`compile_counter(folder)` compiles the counter; a process with it in LD_PRELOAD is counted. Memory mapped from files
(offloaded shards) and shared memory of messages are not allocations and are not counted.
"""

import ctypes
import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_name("live_memory.cpp")


def compile_counter(folder: str | Path) -> Path:
    output = Path(folder) / "live_memory.so"
    command = ["g++", "-std=c++17", "-O2", "-shared", "-fPIC", str(SOURCE), "-o", str(output)]
    subprocess.run(command, check=True)
    return output


class Counter:
    """Allocated bytes of this process, which must have been started with the compiled counter in LD_PRELOAD."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(None)
        for name in ("live_bytes", "most_bytes"):
            getattr(self._library, name).restype = ctypes.c_int64

    @property
    def live(self) -> int:
        return self._library.live_bytes()

    @property
    def most(self) -> int:
        """Peak since `begin`."""
        return self._library.most_bytes()

    def begin(self) -> None:
        self._library.forget_most()

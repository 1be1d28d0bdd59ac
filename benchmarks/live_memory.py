"""How many bytes a process has allocated, now and at most: counted where memory is asked for, whatever for.

`library(folder)` compiles the counter; a process that is to be counted is started with it in LD_PRELOAD. What is mapped
from files (offloaded parts) and shared memory of messages are not counted: they are no allocations.
"""

import ctypes
import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_name("live_memory.cpp")


def library(folder: str | Path) -> Path:
    found = Path(folder) / "live_memory.so"
    command = ["g++", "-std=c++17", "-O2", "-shared", "-fPIC", str(SOURCE), "-o", str(found)]
    subprocess.run(command, check=True)
    return found


class Counter:
    """Of this process, which must have been started with the library."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(None)
        for name in ("live_bytes", "most_bytes"):
            getattr(self._library, name).restype = ctypes.c_int64

    @property
    def live(self) -> int:
        return self._library.live_bytes()

    @property
    def most(self) -> int:
        """Since `begin`."""
        return self._library.most_bytes()

    def begin(self) -> None:
        self._library.forget_most()

"""Measure the disk of a folder: long reads and writes, and pages in random order."""

import os
import shutil
import tempfile
from functools import partial
from pathlib import Path
from typing import IO

import torch

from shardwright.errors import UserError
from shardwright.library import native_library
from shardwright.measure.device import COPY_BYTES, fit_price
from shardwright.measure.timing import Clock
from shardwright.spec.cluster import Price, Tier
from shardwright.spec.row_cache import DISK, IO_THREADS, PAGE_BYTES, READS_IN_FLIGHT

PAGE_COUNTS = (256, 4096)  # of a read


def measure_disk(clock: Clock, folder: Path, num_ranks: int) -> tuple[Tier, list[Price]]:
    """Disk of a folder that the ranks of a host share, and the price of its random pages; bypasses the page cache where
    the system permits."""
    try:
        with tempfile.TemporaryFile(dir=folder, prefix=".measure-") as file:
            write, read = _disk_seconds(clock, file)
            tier = Tier(DISK, shutil.disk_usage(folder).free // num_ranks, COPY_BYTES / read, COPY_BYTES / write)
            return tier, _measure_pages(clock, file)
    except OSError as error:
        raise UserError(f"{folder}: its disk cannot be measured: {error.strerror}") from error


def _disk_seconds(clock: Clock, file: IO[bytes]) -> tuple[float, float]:
    block = os.urandom(1 << 20) * (COPY_BYTES >> 20)

    def write() -> None:
        file.seek(0)
        file.write(block)
        file.flush()
        os.fsync(file.fileno())

    def read() -> None:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        file.read()

    return clock.sample((COPY_BYTES,), write).seconds, clock.sample((COPY_BYTES,), read).seconds


def _measure_pages(clock: Clock, file: IO[bytes]) -> list[Price]:
    """Pages of the file in random order, read as a store of rows does; none without the compiled kernels, which stores
    need."""
    native = native_library()
    if native is None:
        return []
    path = f"/proc/self/fd/{file.fileno()}"
    try:
        opened = os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError:  # a file system without direct input
        opened = os.open(path, os.O_RDONLY)
    order = torch.randperm(COPY_BYTES // PAGE_BYTES, generator=torch.Generator().manual_seed(0))

    def read(num: int) -> None:
        first = starts[num] = (starts[num] + num) % (len(order) - num)
        pages = order[first : first + num].data_ptr()
        if error := native.shardwright_read_pages(opened, pages, num, READS_IN_FLIGHT, IO_THREADS):
            raise OSError(error, os.strerror(error))

    samples, starts = [], {int(num): 0 for num in PAGE_COUNTS}
    for num in PAGE_COUNTS:
        os.posix_fadvise(opened, 0, 0, os.POSIX_FADV_DONTNEED)
        samples.append(clock.sample((num * PAGE_BYTES,), partial(read, num)))
    os.close(opened)
    return [fit_price("pages", "", samples)]

"""Rows in memory and on disk behind a cache, against a plain table; damage to files is named."""

import ctypes
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.embeddings import store as stores
from shardwright.embeddings.store import DiskStore, PageReaders
from shardwright.errors import UserError
from shardwright.kernels.cache_index import CacheIndex

ROWS, DIM = 500, 24


class MemoryStore:
    """Rows in tensors of this process."""

    def __init__(self, parts_E) -> None:
        self.parts_E = parts_E

    def read(self, rows_U, lines_U, parts_L) -> None:
        for part_E, part_L in zip(self.parts_E, parts_L, strict=True):
            part_L[lines_U] = part_E[rows_U]

    def write(self, rows_U, lines_U, parts_L) -> None:
        for part_E, part_L in zip(self.parts_E, parts_L, strict=True):
            part_E[rows_U] = part_L[lines_U]


def lines_of(num: int) -> list[torch.Tensor]:
    """Weights, and a row-wise optimizer state."""
    return [torch.full((num, DIM), float("nan")), torch.full((num,), float("nan"))]


def initial(rows: torch.Tensor, parts) -> None:
    weight, state = parts
    weight.copy_(rows[:, None] + torch.arange(DIM) / 100)
    state.fill_(0.5)


def plain_table() -> list[torch.Tensor]:
    parts = lines_of(ROWS)
    initial(torch.arange(ROWS), parts)
    return parts


@pytest.fixture(params=("io_uring", "threads"))
def disk(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DiskStore:
    """A store with small segments, so that they are compacted."""
    monkeypatch.setattr(stores, "SEGMENT_BYTES", 1 << 20)
    if request.param == "threads":
        monkeypatch.setattr(stores, "READS_IN_FLIGHT", 0)
    return DiskStore(tmp_path / "rows", ROWS, lines_of(1), initial, PageReaders(), direct=False)


def has_io_uring() -> bool:
    """Whether the kernel gives a ring to this process."""
    libc = ctypes.CDLL(None)
    ring = libc.syscall(425, 1, ctypes.create_string_buffer(120))
    if ring >= 0:
        os.close(ring)
    return ring >= 0


def train(store, batches: list[list[int]], num_lines: int, table: list[torch.Tensor]) -> None:
    """Change rows through the cache and in a plain table, and compare at each step."""
    index, lines = CacheIndex(num_lines), lines_of(num_lines)
    for number, rows in enumerate(batches, 1):
        rows_U = torch.tensor(rows, dtype=torch.int64)
        placed = index.place(rows_U)
        store.write(placed.written_rows, placed.written_lines, lines)
        store.read(rows_U[placed.missing_U], placed.lines_U[placed.missing_U], lines)
        for line, row in zip(lines, table, strict=True):
            assert torch.equal(line[placed.lines_U], row[rows_U])
            line[placed.lines_U] += number
            row[rows_U] += number
        index.release(placed.lines_U, written=True)
    written, rows = index.written_lines(clear=True)
    store.write(rows, written, lines)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 3), st.booleans())
def test_rows_behind_a_cache_equal_a_plain_table(tmp_path_factory, seed, num_sets, on_disk):
    rng = np.random.default_rng(seed)
    batches = [rng.permutation(ROWS)[: rng.integers(0, 20)].tolist() for _ in range(60)]
    table = plain_table()
    if on_disk:
        store = DiskStore(tmp_path_factory.mktemp("rows"), ROWS, lines_of(1), initial, PageReaders(), direct=False)
    else:
        store = MemoryStore(plain_table())
    train(store, batches, 32 * num_sets, table)
    found = lines_of(ROWS)
    store.read(torch.arange(ROWS), torch.arange(ROWS), found)
    assert all(torch.equal(a, b) for a, b in zip(found, table, strict=True))
    if on_disk:
        store.close()


def test_segments_are_compacted_and_a_snapshot_keeps_its_rows(disk: DiskStore):
    lines, table, all_rows = lines_of(ROWS), plain_table(), torch.arange(ROWS)
    for part, row in zip(lines, table, strict=True):
        part.copy_(row)
    disk.write(all_rows, all_rows, lines)
    with disk.snapshot() as snapshot:
        for step in range(120):
            rows = torch.randperm(ROWS, generator=torch.Generator().manual_seed(step))[:300]
            for part in lines:
                part[rows] += 1
            disk.write(rows, rows, lines)
        old = lines_of(200)
        snapshot.read(150, old)
        assert all(torch.equal(part, row[150:350]) for part, row in zip(old, table, strict=True))
        before = len([*disk.folder.iterdir()])
    found = lines_of(ROWS)
    disk.read(all_rows, all_rows, found)
    assert all(torch.equal(a, b) for a, b in zip(found, lines, strict=True))
    numbers = disk.numbers
    assert numbers.by_ring == has_io_uring() * (stores.READS_IN_FLIGHT > 0)
    assert numbers.live_records == ROWS and numbers.bytes_written > 3_000_000  # the last part is still in memory
    assert numbers.bytes_read > 0 and len([*disk.folder.iterdir()]) < before
    disk.close()
    assert [*disk.folder.iterdir()] == []


@pytest.mark.parametrize("damage", ("flipped", "torn"))
def test_damage_is_named(disk: DiskStore, damage: str):
    lines, rows = plain_table(), torch.arange(ROWS)
    disk.write(rows, rows, lines)
    with disk.snapshot():
        (path,) = disk.folder.iterdir()
        if damage == "flipped":
            data = bytearray(path.read_bytes())
            data[4096 + 700] ^= 16
            path.write_bytes(data)
        else:
            with path.open("r+b") as file:
                file.truncate(4096 + 100)
        message = "its checksum is wrong" if damage == "flipped" else "it ends early"
        with pytest.raises(UserError, match=rf"{path}, page \d+ is damaged: {message}; the last checkpoint is not"):
            disk.read(rows, rows, lines)


def test_a_full_disk_is_named(tmp_path: Path):
    """/dev/full does not take files; a limit of this process's file size fails the same write."""
    import resource
    import signal

    disk = DiskStore(tmp_path / "rows", 100_000, lines_of(1), initial, PageReaders(), direct=False)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        rows = torch.arange(100_000)
        with pytest.raises(UserError, match="cannot write .*segment-1: File too large"):
            disk.write(rows, torch.zeros_like(rows), lines_of(1))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)


def test_a_folder_in_use_is_refused(tmp_path: Path):
    (tmp_path / "mine").write_text("")
    with pytest.raises(UserError, match="is not empty"):
        DiskStore(tmp_path, 10, lines_of(1), initial, PageReaders())

"""The counter that two ranks of a host share: release, acquire, and no ring on unordered machines."""

import ctypes
import os
import platform
import re
from pathlib import Path

import pytest

from shardwright.comm import ring, shared_memory
from shardwright.comm.ring import Ring, SharedCounter
from shardwright.library import native_library

SOURCE = Path(__file__).parents[2] / "csrc/memory.cpp"


@pytest.mark.parametrize("native", (True, False))
def test_stores_and_loads(monkeypatch, native):
    if not native:
        monkeypatch.setattr(ring, "native_library", lambda: None)
    number = ctypes.c_int64(3)
    counter = SharedCounter(ctypes.addressof(number))
    counter.store(counter.load() + 2**40)
    assert counter.load() == number.value == 3 + 2**40


def test_a_ring_reuses_consumed_memory():
    file = os.memfd_create("ring")
    os.truncate(file, 1 << 13)
    shared = Ring(file, 1 << 13)
    first = shared.reserve(6000)
    assert first is not None and shared.reserve(6000) is None
    shared.mark_consumed()
    assert shared.reserve(6000) == first
    os.close(file)


def test_the_store_releases_and_the_load_acquires():
    """x86 also orders plain accesses, so no run on it can detect a mistake: the test checks the source."""
    text = SOURCE.read_text()
    assert re.search(r"load_acquire.*?__atomic_load_n\(counter, __ATOMIC_ACQUIRE\)", text, re.S)
    assert re.search(r"store_release.*?__atomic_store_n\(counter, value, __ATOMIC_RELEASE\)", text, re.S)
    native = native_library()
    assert native is not None and native.shardwright_load_acquire and native.shardwright_store_release


@pytest.mark.parametrize(
    "machine, compiled, has_ring", (("aarch64", True, True), ("aarch64", False, False), ("x86_64", False, True))
)
def test_no_ring_without_ordered_accesses(monkeypatch, machine, compiled, has_ring):
    monkeypatch.setattr(platform, "machine", lambda: machine)
    if not compiled:
        monkeypatch.setattr(ring, "native_library", lambda: None)
    created_ring = shared_memory._create_ring(1 << 13)
    assert (created_ring is not None) == has_ring
    if created_ring is not None:
        os.close(created_ring[1])

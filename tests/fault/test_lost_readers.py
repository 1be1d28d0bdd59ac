"""Readers that are killed, stopped and lost while an epoch is read: no sample is lost or doubled, and nothing hangs."""

import hashlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from reading import Watched, end, lines, start

from shardwright.data.loading.loader import Loader
from shardwright.data.readers import client
from shardwright.data.readers.client import Readers
from shardwright.errors import UserError
from shardwright.jagged import Batch

ORDER = {"batch_size": 8, "seed": 2, "shuffle": True}
KILLS = 10


class Digest:
    """Of every tensor of every batch, in order, and how often each sample came."""

    def __init__(self) -> None:
        self.sum, self.samples = hashlib.sha256(), []

    def add(self, batch: Batch) -> None:
        assert batch.dense is not None and batch.weights is not None
        for tensor in (
            batch.features.values,
            batch.features.lengths,
            batch.dense,
            batch.weights,
            *batch.labels.values(),
        ):
            self.sum.update(str(tensor.dtype).encode() + tensor.numpy().tobytes())
        self.samples += batch.labels["y"].tolist()


def test_a_reader_killed_ten_times_in_an_epoch(tmp_path: Path) -> None:
    source = Watched(8 * 60, str(tmp_path / "log"), seconds=0.005)
    undisturbed = Digest()
    for batch in Loader(source, **ORDER):
        undisturbed.add(batch)
    process, address = start(source, **ORDER)
    found, statuses, crew = Digest(), [], set()
    with Loader(source, **ORDER, readers=Readers((address,)), prefetch=4) as loader:
        for number, batch in enumerate(loader):
            found.add(batch)
            if number % 5 == 4 and len(statuses) < KILLS:
                before = len(lines(tmp_path / "log"))
                crew.add(lines(tmp_path / "log")[-1])
                statuses.append(end(process, signal.SIGKILL))
                process, _ = start(source, address, **ORDER)
                assert before >= 5
    assert end(process) == 0
    assert statuses == [-signal.SIGKILL] * KILLS
    assert len(crew) == KILLS, "each was killed after it had read"
    assert len(lines(tmp_path / "log")) > 2 * 60, "and what had been asked of it was read again"
    assert found.samples == undisturbed.samples and sorted(found.samples) == list(range(source.size or 0))
    assert found.sum.digest() == undisturbed.sum.digest()


def test_of_two_readers_one_is_killed_for_good(tmp_path: Path) -> None:
    source = Watched(8 * 20, str(tmp_path / "log"), seconds=0.005)
    plain, found = Digest(), Digest()
    for batch in Loader(source, **ORDER):
        plain.add(batch)
    (one, first), (other, second) = (start(source, **ORDER) for _ in range(2))
    with Loader(source, **ORDER, readers=Readers((first, second)), prefetch=6) as loader:
        for number, batch in enumerate(loader):
            found.add(batch)
            if number == 5:
                began = time.monotonic()
                assert end(one, signal.SIGKILL) == -signal.SIGKILL
        assert time.monotonic() - began < client.REPLY_TIMEOUT_SECONDS
    assert end(other) == 0
    assert len(set(lines(tmp_path / "log"))) == 3, "both read, and this process"
    assert found.sum.digest() == plain.sum.digest()


def test_a_reader_that_stops_is_given_up_on() -> None:
    """It holds its connection and says nothing; and when it goes on, it is asked again."""
    source = Watched(8 * 40)
    plain, found = Digest(), Digest()
    for batch in Loader(source, **ORDER):
        plain.add(batch)
    (one, first), (other, second) = (start(source, **ORDER) for _ in range(2))
    with Loader(source, **ORDER, readers=Readers((first, second)), prefetch=6) as loader:
        for number, batch in enumerate(loader):
            found.add(batch)
            if number == 9:
                began = time.monotonic()
                one.send_signal(signal.SIGSTOP)
            if number == 25:
                waited = time.monotonic() - began
                one.send_signal(signal.SIGCONT)
                assert end(other, signal.SIGKILL) == -signal.SIGKILL
    assert 1 < waited < client.REPLY_TIMEOUT_SECONDS + 2
    assert end(one) == 0
    assert found.sum.digest() == plain.sum.digest()


def test_the_last_reader_gone_is_one_line_and_the_run_goes_on() -> None:
    source = Watched(8 * 20)
    plain = [batch.labels["y"].tolist() for batch in Loader(source, **ORDER)]
    process, address = start(source, **ORDER)
    with Loader(source, **ORDER, readers=Readers((address,), timeout_seconds=1.0), prefetch=2) as loader:
        found = [next(iter(loader)).labels["y"].tolist()]
        assert end(process, signal.SIGKILL) == -signal.SIGKILL
        with pytest.raises(UserError, match=f"no reader has replied for 1 s at {address}"):
            for batch in loader:
                found.append(batch.labels["y"].tolist())
        process, _ = start(source, address, **ORDER)
        found += [batch.labels["y"].tolist() for batch in loader]
    assert end(process) == 0
    assert found == plain


def test_a_reader_outlives_its_trainers() -> None:
    """Killed with questions open, in the middle of an answer or between two."""
    source = Watched(None, seconds=0.002)
    process, address = start(source, workers=2, **ORDER)
    trainer = f"""
from itertools import islice
from test_lost_readers import *
with Loader({source!r}, **ORDER, readers=Readers(({address!r},)), prefetch=64) as loader:
    for batch in loader:
        print(1, flush=True)
"""
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    for num in (1, 30):
        with subprocess.Popen(
            [sys.executable, "-c", trainer], cwd=Path(__file__).parent, env=environment, stdout=subprocess.PIPE
        ) as one:
            assert one.stdout is not None
            for _ in range(num):
                assert one.stdout.readline() == b"1\n"
            one.kill()
    with Loader(source, **ORDER, readers=Readers((address,))) as loader:
        assert next(iter(loader)).batch_size == 8
    assert end(process) == 0


def test_a_killed_worker_ends_its_reader(tmp_path: Path) -> None:
    """With a line that says so: who starts readers starts it again, and trainers have asked another meanwhile."""
    source = Watched(8 * 20, str(tmp_path / "log"))
    process, address = start(source, **ORDER)
    with Loader(source, **ORDER, readers=Readers((address,), timeout_seconds=0.5)) as loader:
        next(iter(loader))
        os.kill(int(lines(tmp_path / "log")[-1]), signal.SIGKILL)
        assert process.wait(10) == 2
        assert process.stdout is not None and "reader worker 0" in process.stdout.read()
    end(process)

"""Readers that are killed, stopped and lost while an epoch is read: no sample is lost or doubled, and nothing hangs."""

import hashlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from reading import Samples, end, lines, start

from shardwright.data.loading.loader import Loader
from shardwright.data.readers import client
from shardwright.data.readers.client import Readers
from shardwright.errors import UserError
from shardwright.jagged import Batch

ORDER = {"batch_size": 8, "seed": 2, "shuffle": True}
KILLS = 10


class Digest:
    """Hash of every tensor of every batch, in order, and the samples read."""

    def __init__(self) -> None:
        self.hash, self.samples = hashlib.sha256(), []

    def add(self, batch: Batch) -> None:
        assert batch.dense is not None and batch.weights is not None
        for tensor in (
            batch.features.values,
            batch.features.lengths,
            batch.dense,
            batch.weights,
            *batch.labels.values(),
        ):
            self.hash.update(str(tensor.dtype).encode() + tensor.numpy().tobytes())
        self.samples += batch.labels["y"].tolist()


def test_an_epoch_is_read_completely_although_its_reader_is_killed_ten_times(tmp_path: Path) -> None:
    source = Samples(8 * 60, str(tmp_path / "log"), seconds=0.005)
    uninterrupted = Digest()
    for batch in Loader(source, **ORDER):
        uninterrupted.add(batch)
    process, address = start(source, **ORDER)
    digest, statuses, pids = Digest(), [], set()
    with Loader(source, **ORDER, readers=Readers((address,)), prefetch=4) as loader:
        for number, batch in enumerate(loader):
            digest.add(batch)
            if number % 5 == 4 and len(statuses) < KILLS:
                before = len(lines(tmp_path / "log"))
                pids.add(lines(tmp_path / "log")[-1])
                statuses.append(end(process, signal.SIGKILL))
                process, _ = start(source, address, **ORDER)
                assert before >= 5
    assert end(process) == 0
    assert statuses == [-signal.SIGKILL] * KILLS
    assert len(pids) == KILLS, "each reader was killed after it had read"
    assert len(lines(tmp_path / "log")) > 2 * 60, "batches requested from killed readers were read again"
    assert digest.samples == uninterrupted.samples and sorted(digest.samples) == list(range(source.size or 0))
    assert digest.hash.digest() == uninterrupted.hash.digest()


def test_an_epoch_is_read_completely_although_one_of_two_readers_is_killed(tmp_path: Path) -> None:
    source = Samples(8 * 20, str(tmp_path / "log"), seconds=0.005)
    local, digest = Digest(), Digest()
    for batch in Loader(source, **ORDER):
        local.add(batch)
    (first, first_address), (second, second_address) = (start(source, **ORDER) for _ in range(2))
    with Loader(source, **ORDER, readers=Readers((first_address, second_address)), prefetch=6) as loader:
        for number, batch in enumerate(loader):
            digest.add(batch)
            if number == 5:
                killed_at = time.monotonic()
                assert end(first, signal.SIGKILL) == -signal.SIGKILL
        assert time.monotonic() - killed_at < client.REPLY_TIMEOUT_SECONDS
    assert end(second) == 0
    assert len(set(lines(tmp_path / "log"))) == 3, "both readers and this process have read"
    assert digest.hash.digest() == local.hash.digest()


def test_a_suspended_reader_is_skipped_until_it_continues() -> None:
    """While suspended it keeps its connection open and does not reply."""
    source = Samples(8 * 40)
    local, digest = Digest(), Digest()
    for batch in Loader(source, **ORDER):
        local.add(batch)
    (first, first_address), (second, second_address) = (start(source, **ORDER) for _ in range(2))
    with Loader(source, **ORDER, readers=Readers((first_address, second_address)), prefetch=6) as loader:
        for number, batch in enumerate(loader):
            digest.add(batch)
            if number == 9:
                suspended_at = time.monotonic()
                first.send_signal(signal.SIGSTOP)
            if number == 25:
                waited = time.monotonic() - suspended_at
                first.send_signal(signal.SIGCONT)
                assert end(second, signal.SIGKILL) == -signal.SIGKILL
    assert 1 < waited < client.REPLY_TIMEOUT_SECONDS + 2
    assert end(first) == 0
    assert digest.hash.digest() == local.hash.digest()


def test_losing_the_last_reader_is_an_error_after_which_reading_can_continue() -> None:
    source = Samples(8 * 20)
    expected = [batch.labels["y"].tolist() for batch in Loader(source, **ORDER)]
    process, address = start(source, **ORDER)
    with Loader(source, **ORDER, readers=Readers((address,), timeout_seconds=1.0), prefetch=2) as loader:
        samples = [next(iter(loader)).labels["y"].tolist()]
        assert end(process, signal.SIGKILL) == -signal.SIGKILL
        with pytest.raises(UserError, match=f"no reader has replied for 1 s at {address}"):
            for batch in loader:
                samples.append(batch.labels["y"].tolist())
        process, _ = start(source, address, **ORDER)
        samples += [batch.labels["y"].tolist() for batch in loader]
    assert end(process) == 0
    assert samples == expected


def test_a_reader_outlives_its_trainers() -> None:
    """Trainers are killed with open requests, during a reply or between two."""
    source = Samples(None, seconds=0.002)
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
        ) as trainer_process:
            assert trainer_process.stdout is not None
            for _ in range(num):
                assert trainer_process.stdout.readline() == b"1\n"
            trainer_process.kill()
    with Loader(source, **ORDER, readers=Readers((address,))) as loader:
        assert next(iter(loader)).batch_size == 8
    assert end(process) == 0


def test_a_killed_worker_ends_its_reader(tmp_path: Path) -> None:
    """With an error message; whatever starts readers can restart it, and trainers meanwhile use other readers."""
    source = Samples(8 * 20, str(tmp_path / "log"))
    process, address = start(source, **ORDER)
    with Loader(source, **ORDER, readers=Readers((address,), timeout_seconds=0.5)) as loader:
        next(iter(loader))
        os.kill(int(lines(tmp_path / "log")[-1]), signal.SIGKILL)
        assert process.wait(10) == 2
        assert process.stdout is not None and "reader worker 0" in process.stdout.read()
    end(process)

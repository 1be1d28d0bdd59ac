"""The loader: orders, ranks' parts of global batches, exact resume, workers, and errors."""

import gc
import math
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.data.loading.loader import Loader, to_batch
from shardwright.data.sources.source import SHUFFLE_WINDOW, NumpyBatch, Subset
from shardwright.data.sources.synthetic import ClickStream
from shardwright.errors import UserError
from shardwright.jagged import Batch, check_batch

STREAM = ClickStream(num_dense=2)
CLICKS = Subset(STREAM, 1000, 1045)  # 45 samples: six batches of 8, the last of 5


@dataclass(frozen=True)
class IdSource:
    """Sample i has the one id i."""

    size: int | None

    def take(self, indices: np.ndarray) -> NumpyBatch:
        lengths = np.ones((1, len(indices)), np.int64)
        return NumpyBatch(("id",), indices, lengths, None, {"y": indices.astype(np.float32)})


def ids(batches: Any) -> list[list[int]]:
    return [batch.features.values.tolist() for batch in batches]


def contents(batch: Batch) -> tuple:
    assert batch.dense is not None
    return (
        batch.features.values.tolist(),
        batch.features.lengths.tolist(),
        batch.dense.tolist(),
        batch.labels["click"].tolist(),
    )


def test_batch_shares_memory_with_rows() -> None:
    rows = STREAM.take(np.arange(5))
    batch = to_batch(rows)
    check_batch(batch)
    assert batch.features.features == rows.features and batch.weights is None
    for tensor, array in (
        (batch.features.values, rows.values),
        (batch.features.lengths, rows.lengths),
        (batch.dense, rows.dense),
        (batch.labels["click"], rows.labels["click"]),
    ):
        assert tensor is not None and array is not None
        assert tensor.data_ptr() == array.ctypes.data and tensor.numpy().dtype == array.dtype


@settings(max_examples=60)
@given(st.integers(1, 60), st.integers(1, 20), st.integers(1, 5), st.booleans(), st.integers(0, 99))
def test_ranks_split_the_global_batches(size: int, batch_size: int, num_ranks: int, shuffle: bool, seed: int) -> None:
    load = partial(Loader, IdSource(size), batch_size=batch_size, seed=seed, shuffle=shuffle)
    loader, shards = load(), [load(shard=(rank, num_ranks)) for rank in range(num_ranks)]
    for _ in range(2):
        epoch = ids(loader)
        assert len(epoch) == loader.num_batches == math.ceil(size / batch_size)
        assert sorted(sum(epoch, [])) == list(range(size))
        assert {len(batch) for batch in epoch[:-1]} <= {batch_size}
        assert shuffle or sum(epoch, []) == list(range(size))
        for batch, *slices in zip(epoch, *map(ids, shards), strict=True):
            assert sum(slices, []) == batch
            lengths = [len(part) for part in slices]
            assert max(lengths) - min(lengths) <= 1


@settings(max_examples=40)
@given(st.integers(1, 40), st.integers(1, 12), st.booleans(), st.data())
def test_resume_continues_at_the_exact_batch(size: int, batch_size: int, shuffle: bool, data: st.DataObject) -> None:
    load = partial(Loader, IdSource(size), batch_size=batch_size, seed=4, shuffle=shuffle)
    expected = ids(islice(epochs(load()), 20))
    stop = data.draw(st.integers(0, 19))
    first, second = load(), load(shard=(0, 1))
    assert ids(islice(epochs(first), stop)) == expected[:stop]
    second.load_state_dict(first.state_dict())
    assert ids(islice(epochs(second), 20 - stop)) == expected[stop:]


def test_iter_continues_where_the_last_one_stopped() -> None:
    loader = Loader(IdSource(10), batch_size=4, shuffle=False)
    assert ids(islice(loader, 1)) == [[0, 1, 2, 3]]
    assert ids(loader) == [[4, 5, 6, 7], [8, 9]]
    assert ids(loader) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert loader.state_dict()["epoch"] == 2 and loader.state_dict()["batch"] == 0


def test_epochs_and_seeds_differ() -> None:
    def orders(seed: int) -> list[list[int]]:
        loader = Loader(IdSource(1000), batch_size=1000, seed=seed)
        return ids(islice(epochs(loader), 3))

    all_orders = [order for seed in (0, 1) for order in orders(seed)] + [list(range(1000))]
    agreement = [np.mean(np.equal(a, b)) for i, a in enumerate(all_orders) for b in all_orders[:i]]
    assert max(agreement) < 0.02


def test_shuffle_gives_every_order_equally_often() -> None:
    loader = Loader(IdSource(4), batch_size=4)
    orders = [tuple(order) for order in ids(islice(epochs(loader), 2400))]
    counts = [orders.count(order) for order in set(orders)]
    assert len(counts) == math.factorial(4)
    assert min(counts) > 60 and max(counts) < 150


def test_an_endless_source_is_shuffled_in_windows() -> None:
    loader = Loader(IdSource(None), batch_size=3)
    assert loader.num_batches is None
    batches = ids(islice(loader, 2 * SHUFFLE_WINDOW))
    for window in (0, 1):
        expected_ids = range(window * SHUFFLE_WINDOW * 3, (window + 1) * SHUFFLE_WINDOW * 3)
        window_ids = sum(batches[window * SHUFFLE_WINDOW : (window + 1) * SHUFFLE_WINDOW], [])
        assert sorted(window_ids) == list(expected_ids) and window_ids != list(expected_ids)
    assert ids(islice(Loader(IdSource(None), batch_size=3, shuffle=False), 2)) == [[0, 1, 2], [3, 4, 5]]


def test_a_subset_is_a_finite_part_of_a_stream() -> None:
    batches = ids(Loader(Subset(IdSource(None), 100, 105), batch_size=2, shuffle=False))
    assert batches == [[100, 101], [102, 103], [104]]
    with pytest.raises(UserError, match=r"window 3\.\.9 .* 0 <= lo < hi <= 8"):
        Subset(IdSource(8), 3, 9)
    with pytest.raises(UserError, match=r"window 5\.\.5"):
        Subset(IdSource(None), 5, 5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch_size": 0}, "batch_size = 0; wanted 1 to"),
        ({"workers": -1}, "workers = -1; wanted 0 to"),
        ({"prefetch": 0}, "prefetch = 0; wanted 1 to 64"),
        ({"prefetch": 65}, "prefetch = 65; wanted 1 to 64"),
        ({"shard": (2, 2)}, r"shard = \(2, 2\)"),
        ({"source": IdSource(0)}, r"IdSource\(size=0\) has no samples"),
    ],
)
def test_errors_name_invalid_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Loader(**{"source": IdSource(8), "batch_size": 4} | settings)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 1}, "seed is 0, but the saved state has 1"),
        ({"batch_size": 8}, "batch_size is 4, but the saved state has 8"),
        ({"shuffle": False}, "shuffle is True, but the saved state has False"),
        (
            {"source": IdSource(9)},
            r"source is 'IdSource\(size=8\)', but the saved state has 'IdSource\(size=9\)'",
        ),
    ],
)
def test_state_of_another_order_is_refused(change: dict[str, Any], message: str) -> None:
    settings = {"source": IdSource(8), "batch_size": 4, "seed": 0}
    state = Loader(**settings | change).state_dict() | ({"size": 8} if "source" in change else {})
    with pytest.raises(UserError, match=message):
        Loader(**settings).load_state_dict(state)
    with pytest.raises(UserError, match="not recorded"):
        Loader(**settings).load_state_dict({"epoch": 0, "batch": 0})


def test_workers_give_the_same_batches() -> None:
    load = partial(Loader, CLICKS, batch_size=8, seed=2, shard=(1, 2))
    plain = [contents(batch) for batch in islice(epochs(load()), 15)]
    loader = load(workers=2, prefetch=3)
    assert [contents(batch) for batch in islice(loader, 2)] == plain[:2]
    workers = multiprocessing.active_children()
    assert len(workers) == 2
    state = loader.state_dict()
    assert (state["epoch"], state["batch"]) == (0, 2), "prefetched batches do not count"
    resumed = load()
    resumed.load_state_dict(state)
    assert [contents(batch) for batch in islice(epochs(resumed), 13)] == plain[2:]
    assert [contents(batch) for batch in islice(epochs(loader), 13)] == plain[2:]
    assert multiprocessing.active_children() == workers, "the same workers serve every epoch"
    del loader
    gc.collect()
    assert not multiprocessing.active_children()


def test_a_killed_worker_is_an_error_and_is_replaced() -> None:
    plain = [contents(batch) for batch in Loader(CLICKS, batch_size=8)]
    with Loader(CLICKS, batch_size=8, workers=1, prefetch=1) as loader:
        batches = iter(loader)
        next(batches)
        (worker,) = multiprocessing.active_children()
        assert worker.pid is not None
        os.kill(worker.pid, signal.SIGKILL)
        start = time.monotonic()
        with pytest.raises(UserError, match=rf"loader worker 0 \(process {worker.pid}\) .* exit code -9"):
            for _ in batches:
                pass
        assert time.monotonic() - start < 2
        next_batch = loader.state_dict()["batch"]
        assert [contents(batch) for batch in loader] == plain[next_batch:]
    assert not multiprocessing.active_children()


# Ids that are objects instead of numbers cannot be sent to another process.
OBJECTS = partial(NumpyBatch, ("id",), np.array([None]), np.ones((1, 1), np.int64), None, {})


def test_errors_in_a_worker_reach_the_loader_unchanged() -> None:
    """The calls fail on any indices; workers can unpickle them without torch or this file."""
    for call, kind, message in (
        (partial(Subset, lo=5, hi=2), UserError, r"^window 5\.\.2 of "),
        (math.factorial, RuntimeError, r"(?s)^loader worker 0: Traceback .*TypeError: only integer"),
        (OBJECTS, RuntimeError, r"(?s)^loader worker 0: Traceback .*TypeError: Cannot change data-type"),
    ):
        loader = Loader(SimpleNamespace(size=8, take=call), batch_size=4, workers=1)
        with pytest.raises(kind, match=message):
            next(iter(loader))
        assert not multiprocessing.active_children()
        assert loader.state_dict()["batch"] == 0


def test_a_source_that_cannot_be_pickled_is_refused() -> None:
    @dataclass(frozen=True)
    class Local:
        size: int = 8

    loader = Loader(Local(), batch_size=4, workers=1)  # pyright: ignore[reportArgumentType]
    with pytest.raises(UserError, match="cannot be pickled for a worker process .* or set workers = 0"):
        next(iter(loader))


def test_a_source_whose_repr_differs_between_processes_is_refused() -> None:
    class Anonymous:
        size = 8

    with pytest.raises(UserError, match="no run on it could be resumed; make it a frozen dataclass"):
        Loader(Anonymous(), batch_size=4)  # pyright: ignore[reportArgumentType]


def test_peek_consumes_nothing_and_len_is_that_of_an_epoch() -> None:
    loader = Loader(CLICKS, batch_size=8)
    assert contents(loader.peek()) == contents(next(iter(loader))) != contents(loader.peek())
    assert len(loader) == 6 == loader.num_batches
    endless = Loader(STREAM, batch_size=8)
    assert endless and pytest.raises(TypeError, len, endless)


@pytest.mark.parametrize("epoch, batch", [(0, 6), (-1, 0), (0, -1), ("0", 0), (0, None)])
def test_a_position_that_does_not_exist_is_refused(epoch, batch) -> None:
    loader = Loader(CLICKS, batch_size=8)
    with pytest.raises(UserError, match="no position"):
        loader.load_state_dict(loader.state_dict() | {"epoch": epoch, "batch": batch})


def test_unguarded_and_killed_scripts(tmp_path: Path) -> None:
    """A script without a main guard gets an error that says so; a killed script leaves no worker."""
    body = """
        from shardwright import ClickStream, Loader
        batches = iter(Loader(ClickStream(), batch_size=4, workers=1))
        next(batches)
        import os, signal
        os.kill(os.getpid(), signal.SIGKILL)
    """
    script = tmp_path / "script.py"
    script.write_text(body.replace("\n        ", "\n"))
    unguarded = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60)
    assert unguarded.returncode == 1
    assert "needs its code under `if __name__" in unguarded.stderr.splitlines()[-1]
    script.write_text("if __name__ == '__main__':" + body)
    # the worker has the script's output open, so this returns only when both have ended
    killed = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60)
    assert killed.returncode == -signal.SIGKILL, killed.stderr


def epochs(loader: Loader) -> Iterator[Batch]:
    while True:
        yield from loader

"""Data loader: batches from a source, in an order that is a pure function of (seed, epoch, batch).

Global batch k holds the same samples for any number of workers or ranks, so (epoch, batch) resumes a run exactly.
Batches are prefetched by spawned workers or by remote readers. This file never inspects a sample.
"""

from collections import deque
from collections.abc import Generator, Iterator, Mapping
from typing import Any, Self

import torch

from shardwright.data.loading.worker import Worker
from shardwright.data.readers.client import Readers, read_remote, wait_for_reader
from shardwright.data.sources.dealing import DealCost
from shardwright.data.sources.source import (
    MAX_PREFETCH,
    NumpyBatch,
    Position,
    SampleOrder,
    Source,
    make_order,
    order_identity,
    read_batch,
    with_deal,
)
from shardwright.errors import UserError
from shardwright.jagged import Batch, Jagged


def to_batch(batch: NumpyBatch, start: int | None = None) -> Batch:
    """Convert a numpy batch to tensors that share its memory; `start`: its first sample's place in the global batch."""
    return Batch(
        Jagged(batch.features, torch.from_numpy(batch.values), torch.from_numpy(batch.lengths)),
        None if batch.dense is None else torch.from_numpy(batch.dense),
        {name: torch.from_numpy(label) for name, label in batch.labels.items()},
        None if batch.weights is None else torch.from_numpy(batch.weights),
        start,
    )


class Loader:
    """Iterable over the batches of one epoch, continuing where the last iterator stopped.

    An endless source has one epoch. `batch_size` is the global batch size; `shard` is (rank, number of ranks), and each
    rank gets a contiguous slice (its local batch) of every global batch, or what `deal_by_length` gives it. With
    workers = 0 this process reads. Otherwise `workers` processes, or the remote `readers`, prefetch `prefetch` batches.
    They start with the first batch and run until `close()`, the end of a `with` block, or destruction of the loader.
    """

    def __init__(
        self,
        source: Source,
        *,
        batch_size: int,
        seed: int = 0,
        shuffle: bool = True,
        workers: int = 0,
        prefetch: int = 4,
        shard: tuple[int, int] = (0, 1),
        readers: Readers | None = None,
    ) -> None:
        for name, value, minimum, maximum in (("workers", workers, 0, 1024), ("prefetch", prefetch, 1, MAX_PREFETCH)):
            if not minimum <= value <= maximum:
                raise UserError(f"loader: {name} = {value}; wanted {minimum} to {maximum}")
        if workers and readers:
            raise UserError(f"loader: workers = {workers} and readers; drop one: readers start their own workers")
        self._source = source
        self._order = make_order(source, batch_size, seed, shuffle, shard)
        self._workers, self._prefetch, self._readers = workers, prefetch, readers
        self._position = (0, 0)  # epoch and batch of the next batch to return
        self._batches: Generator[NumpyBatch, None, None] | None = None

    @property
    def num_batches(self) -> int | None:
        """Batches per epoch; None for an endless source."""
        return self._order.num_batches

    def __len__(self) -> int:
        """Batches per epoch; raises TypeError for an endless source, as any endless iterable does."""
        if self.num_batches is None:
            raise TypeError("the loader of an endless source has no len()")
        return self.num_batches

    def __bool__(self) -> bool:
        return True

    def peek(self) -> Batch:
        """Return the next batch without advancing the loader."""
        start = self._order.start(self._position[1])
        return to_batch(read_batch(self._source, self._order, self._position), start)

    def __iter__(self) -> Iterator[Batch]:
        epoch = self._position[0]
        while self._position[0] == epoch:
            batch = self._read_next()
            self._position = self._order.next_position(*self._position)
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """Position of the next batch, prefetched or not, and the values that the sample order depends on."""
        state = {"epoch": self._position[0], "batch": self._position[1], **self._identity()}
        if history_digest := getattr(self._source, "history_digest", None):
            state["counted"] = history_digest(self._position[1] * self._order.batch_size)
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state; the number of ranks and workers may differ from when it was saved."""
        for name, value in self._identity().items():
            if name == "deal":
                continue  # batches are the same, whichever rank has a sample
            if state.get(name) != value:
                saved = repr(state[name]) if name in state else "not recorded"
                remedy = "set it back, or start a new run"
                raise UserError(f"loader: {name} is {value!r}, but the saved state has {saved}; {remedy}")
        epoch, batch = state.get("epoch"), state.get("batch")
        if not (
            isinstance(epoch, int) and isinstance(batch, int) and epoch >= 0 <= batch < (self.num_batches or batch + 1)
        ):
            raise UserError(f"loader: no position {epoch!r}, {batch!r} (epoch, batch) in {self._source!r}")
        if "counted" in state and (verify := getattr(self._source, "verify", None)):
            verify(state["counted"])
        self.close()
        self._position = (epoch, batch)

    def deal_by_length(self, cost: DealCost) -> None:
        """From the next batch on, deal the samples of a global batch to ranks by the cost of their histories."""
        self.close()
        self._order = with_deal(self._source, self._order, cost)

    @property
    def coming(self) -> int:
        """Number of samples of the next global batch."""
        return self._order.num_samples(self._position[1])

    def meet(self) -> None:
        """Before training starts: wait until one of the remote readers, if any, serves these batches."""
        if self._readers is not None:
            wait_for_reader(self._source, self._order, self._readers)

    def close(self) -> None:
        """Stop the workers; iterating again starts new ones."""
        if self._batches is not None:
            self._batches.close()
        self._batches = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _identity(self) -> dict[str, Any]:
        return order_identity(self._source, self._order)

    def _read_next(self) -> Batch:
        if self._batches is None:
            self._batches = self._start_reading()
        try:
            return to_batch(next(self._batches), self._order.start(self._position[1]))
        except BaseException:
            self.close()  # prefetched batches are dropped; a retry starts at the first batch not returned
            raise

    def _start_reading(self) -> Generator[NumpyBatch, None, None]:
        """Start to read from the next batch on: by remote readers, worker processes, or in this process."""
        start = (self._source, self._order, self._position)
        if self._readers is not None:
            return read_remote(*start, readers=self._readers, prefetch=self._prefetch)
        if self._workers:
            return _read_with_workers(*start, workers=self._workers, prefetch=self._prefetch)
        return _read_in_process(*start)


def _read_in_process(source: Source, order: SampleOrder, position: Position) -> Generator[NumpyBatch, None, None]:
    while True:
        yield read_batch(source, order, position)
        position = order.next_position(*position)


def _read_with_workers(
    source: Source, order: SampleOrder, position: Position, *, workers: int, prefetch: int
) -> Generator[NumpyBatch, None, None]:
    """Endless batches in order: keep the next batch and `prefetch` more in flight, and yield the oldest.

    Batch k is read by worker k % workers, and a worker answers its requests in order.
    """
    pool: list[Worker] = []
    in_flight: deque[Worker] = deque()
    try:
        for index in range(workers):
            pool.append(Worker(source, order, f"loader worker {index}"))
        while True:
            while len(in_flight) <= prefetch:
                in_flight.append(pool[position[1] % workers])
                in_flight[-1].request(order.shard, position)
                position = order.next_position(*position)
            yield in_flight.popleft().receive()
    finally:
        for worker in pool:
            worker.close_pipe()
        for worker in pool:
            worker.stop()

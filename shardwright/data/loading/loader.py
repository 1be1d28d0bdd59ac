"""Batches from a source, in an order that is a pure function of (seed, epoch, batch).

Whatever the number of workers or ranks, global batch k holds the same samples, so two numbers resume a run
exactly to the batch. Reading ahead happens in spawned processes, or in readers elsewhere; this file never looks into
a sample.
"""

from collections import deque
from collections.abc import Generator, Iterator, Mapping
from typing import Any, Self

import torch

from shardwright.data.loading.worker import Worker
from shardwright.data.readers.client import Readers, read_remote, wait_for_reader
from shardwright.data.sources.source import (
    MAX_PREFETCH,
    NumpyBatch,
    Position,
    SampleOrder,
    Source,
    make_order,
    order_identity,
    read_batch,
)
from shardwright.errors import UserError
from shardwright.jagged import Batch, Jagged


def to_batch(batch: NumpyBatch) -> Batch:
    """The same memory, as tensors."""
    return Batch(
        Jagged(batch.features, torch.from_numpy(batch.values), torch.from_numpy(batch.lengths)),
        None if batch.dense is None else torch.from_numpy(batch.dense),
        {name: torch.from_numpy(label) for name, label in batch.labels.items()},
        None if batch.weights is None else torch.from_numpy(batch.weights),
    )


class Loader:
    """The batches of one epoch per `iter()`, from where the last stopped; an endless source has one epoch.

    `shard` is (rank, number of ranks): each gets its contiguous share of every global batch of `batch_size`.
    With workers = 0 this process reads; otherwise `workers` processes, or `readers` elsewhere in their place, keep
    `prefetch` batches ahead, from the first batch until `close()`, the end of a `with` block, or the loader's own end.
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
        for name, value, least, most in (("workers", workers, 0, 1024), ("prefetch", prefetch, 1, MAX_PREFETCH)):
            if not least <= value <= most:
                raise UserError(f"loader: {name} = {value}; wanted {least} to {most}")
        if workers and readers:
            raise UserError(f"loader: workers = {workers} and readers; drop one: readers have workers of their own")
        self._source = source
        self._order = make_order(source, batch_size, seed, shuffle, shard)
        self._workers, self._prefetch, self._readers = workers, prefetch, readers
        self._position = (0, 0)  # epoch and batch that are handed out next
        self._reading: Generator[NumpyBatch, None, None] | None = None

    @property
    def num_batches(self) -> int | None:
        """Batches of an epoch; None: endless."""
        return self._order.num_batches

    def __len__(self) -> int:
        """Batches of an epoch; as for any endless iterable a TypeError if there is no end."""
        if self.num_batches is None:
            raise TypeError("the loader of an endless source has no len()")
        return self.num_batches

    def __bool__(self) -> bool:
        return True

    def peek(self) -> Batch:
        """The batch that comes next, without taking it."""
        return to_batch(read_batch(self._source, self._order, self._position))

    def __iter__(self) -> Iterator[Batch]:
        epoch = self._position[0]
        while self._position[0] == epoch:
            batch = self._read()
            self._position = self._order.next_position(*self._position)
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """Which batch comes next, whatever was read ahead, and what the order depends on."""
        state = {"epoch": self._position[0], "batch": self._position[1], **self._identity()}
        if counted := getattr(self._source, "history_digest", None):
            state["counted"] = counted(self._position[1] * self._order.batch_size)
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` was taken; another number of ranks or workers may do so."""
        for name, mine in self._identity().items():
            if state.get(name) != mine:
                saved = repr(state[name]) if name in state else "not recorded"
                remedy = "set it back, or start a new run"
                raise UserError(f"loader: {name} is {mine!r}, but the saved state has {saved}; {remedy}")
        epoch, batch = state.get("epoch"), state.get("batch")
        if not (
            isinstance(epoch, int) and isinstance(batch, int) and epoch >= 0 <= batch < (self.num_batches or batch + 1)
        ):
            raise UserError(f"loader: no position {epoch!r}, {batch!r} (epoch, batch) in {self._source!r}")
        if "counted" in state and (verify := getattr(self._source, "verify", None)):
            verify(state["counted"])
        self.close()
        self._position = (epoch, batch)

    @property
    def coming(self) -> int:
        """Samples of the batch that comes next, over all ranks."""
        return self._order.num_samples(self._position[1])

    def meet(self) -> None:
        """With readers: know that one of these batches is there, before anything rests on it."""
        if self._readers is not None:
            wait_for_reader(self._source, self._order, self._readers)

    def close(self) -> None:
        """End the workers; iterating again starts new ones."""
        if self._reading is not None:
            self._reading.close()
        self._reading = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _identity(self) -> dict[str, Any]:
        return order_identity(self._source, self._order)

    def _read(self) -> Batch:
        if self._reading is None:
            self._reading = self._begun()
        try:
            return to_batch(next(self._reading))
        except BaseException:
            self.close()  # what was read ahead is lost; another attempt begins at the batch not handed out
            raise

    def _begun(self) -> Generator[NumpyBatch, None, None]:
        """Rows from the next batch on."""
        given = (self._source, self._order, self._position)
        if self._readers is not None:
            return read_remote(*given, readers=self._readers, prefetch=self._prefetch)
        if self._workers:
            return _read_ahead(*given, workers=self._workers, prefetch=self._prefetch)
        return _read_here(*given)


def _read_here(source: Source, order: SampleOrder, position: Position) -> Generator[NumpyBatch, None, None]:
    while True:
        yield read_batch(source, order, position)
        position = order.next_position(*position)


def _read_ahead(
    source: Source, order: SampleOrder, position: Position, *, workers: int, prefetch: int
) -> Generator[NumpyBatch, None, None]:
    """Rows in order, for ever: ask until the next batch and `prefetch` more are under way, take the oldest.

    Batch k goes to worker k % workers, and a worker answers in the order it was asked.
    """
    crew: list[Worker] = []
    asked: deque[Worker] = deque()
    try:
        for index in range(workers):
            crew.append(Worker(source, order, f"loader worker {index}"))
        while True:
            while len(asked) <= prefetch:
                asked.append(crew[position[1] % workers])
                asked[-1].request(order.shard, position)
                position = order.next_position(*position)
            yield asked.popleft().receive()
    finally:
        for worker in crew:
            worker.close_pipe()
        for worker in crew:
            worker.stop()

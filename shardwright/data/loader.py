"""Batches from a source, in an order that is a pure function of (seed, epoch, batch).

Whatever the number of workers or ranks, global batch k holds the same samples, so two numbers resume a run
exactly to the batch. Reading ahead happens in spawned processes; this file never looks into a sample.
"""

import multiprocessing
import re
from collections import deque
from collections.abc import Generator, Iterator, Mapping
from functools import partial
from typing import Any, Self

import torch

from shardwright.data.source import Order, Rows, Source, serve
from shardwright.errors import UserError
from shardwright.jagged import Batch, Jagged

Position = tuple[int, int]  # epoch, batch
MOST_PREFETCH = 64  # questions must fit a pipe: a worker that waits to answer reads none
SECONDS_TO_END = 1.0  # granted to a worker that should end by itself


def to_batch(rows: Rows) -> Batch:
    """The same memory, as tensors."""
    return Batch(
        Jagged(rows.features, torch.from_numpy(rows.values), torch.from_numpy(rows.lengths)),
        None if rows.dense is None else torch.from_numpy(rows.dense),
        {name: torch.from_numpy(label) for name, label in rows.labels.items()},
        None if rows.weights is None else torch.from_numpy(rows.weights),
    )


class Loader:
    """The batches of one epoch per `iter()`, from where the last stopped; an endless source has one epoch.

    `shard` is (rank, number of ranks): each gets its contiguous share of every global batch of `batch_size`.
    With workers = 0 this process reads; otherwise `workers` processes keep `prefetch` batches ahead, from the
    first batch until `close()`, the end of a `with` block, or the loader's own end.
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
    ) -> None:
        for name, value, least, most in (
            ("batch_size", batch_size, 1, 2**31 - 1),
            ("workers", workers, 0, 1024),
            ("prefetch", prefetch, 1, MOST_PREFETCH),
        ):
            if not least <= value <= most:
                raise UserError(f"loader: {name} = {value}; wanted {least} to {most}")
        if not 0 <= shard[0] < shard[1]:
            raise UserError(f"loader: shard = {shard}; wanted (rank, number of ranks), 0 <= rank < number")
        if source.size == 0:
            raise UserError(f"loader: {source!r} has no samples")
        if re.search(r" at 0x[0-9a-f]+>", repr(source)):
            remedy = "make it a frozen dataclass, or give it a __repr__ that says which samples it holds"
            raise UserError(
                f"loader: the source shows itself as {source!r}, so no run on it could be resumed; {remedy}"
            )
        self._source = source
        self._order = Order(source.size, batch_size, seed, shuffle, shard, getattr(source, "span", None))
        self._workers, self._prefetch = workers, prefetch
        self._position = (0, 0)  # epoch and batch that are handed out next
        self._reading: Generator[Rows, None, None] | None = None

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
        return to_batch(self._source.take(self._order.indices(*self._position)))

    def __iter__(self) -> Iterator[Batch]:
        epoch = self._position[0]
        while self._position[0] == epoch:
            batch = self._read()
            self._position = self._order.following(*self._position)
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """Which batch comes next, whatever was read ahead, and what the order depends on."""
        return {"epoch": self._position[0], "batch": self._position[1], **self._identity()}

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
        self.close()
        self._position = (epoch, batch)

    @property
    def coming(self) -> int:
        """Samples of the batch that comes next, over all ranks."""
        return self._order.num_samples(self._position[1])

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
        order = self._order
        return {
            "seed": order.seed,
            "batch_size": order.batch_size,
            "shuffle": order.shuffle,
            "span": order.span,
            "size": order.size,
            "source": repr(self._source),
        }

    def _read(self) -> Batch:
        if self._reading is None:
            ahead = partial(_read_ahead, workers=self._workers, prefetch=self._prefetch)
            read = ahead if self._workers else _read_here
            self._reading = read(self._source, self._order, self._position)
        try:
            return to_batch(next(self._reading))
        except BaseException:
            self.close()  # what was read ahead is lost; another attempt begins at the batch not handed out
            raise


def _read_here(source: Source, order: Order, position: Position) -> Generator[Rows, None, None]:
    while True:
        yield source.take(order.indices(*position))
        position = order.following(*position)


def _read_ahead(
    source: Source, order: Order, position: Position, *, workers: int, prefetch: int
) -> Generator[Rows, None, None]:
    """Rows in order, for ever: ask until the next batch and `prefetch` more are under way, take the oldest.

    Batch k goes to worker k % workers, and a worker answers in the order it was asked.
    """
    crew: list[_Worker] = []
    asked: deque[_Worker] = deque()
    try:
        for index in range(workers):
            crew.append(_Worker(source, order, index))
        while True:
            while len(asked) <= prefetch:
                asked.append(crew[position[1] % workers])
                asked[-1].ask(position)
                position = order.following(*position)
            yield asked.popleft().answer()
    finally:
        for worker in crew:
            worker.hang_up()
        for worker in crew:
            worker.end()


class _Worker:
    """A spawned process that serves `source`; a question is too small to wait for an answer not yet taken."""

    def __init__(self, source: Source, order: Order, index: int) -> None:
        self._name = f"loader worker {index}"
        spawn = multiprocessing.get_context("spawn")
        self._pipe, theirs = spawn.Pipe()
        self._process = spawn.Process(target=serve, args=(source, order, theirs), daemon=True)
        try:
            self._process.start()
        except (OSError, RuntimeError):
            raise
        except Exception as error:
            what = f"{source!r} does not travel to a worker process ({error})"
            remedy = "make it a plain value of a class at the top of a module, or set workers = 0"
            raise UserError(f"loader: {what}; {remedy}") from error
        finally:
            theirs.close()  # so that the death of either process closes the pipe of the other

    def ask(self, position: Position) -> None:
        try:
            self._pipe.send(position)
        except OSError:
            raise self._death() from None

    def answer(self) -> Rows:
        try:
            answer = self._pipe.recv()
        except (EOFError, OSError):
            raise self._death() from None
        if isinstance(answer, UserError):
            raise answer
        if isinstance(answer, Exception):
            raise RuntimeError(f"{self._name}: {answer}")
        return answer

    def hang_up(self) -> None:
        self._pipe.close()

    def end(self) -> None:
        self._process.join(SECONDS_TO_END)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._process.close()

    def _death(self) -> UserError:
        self._process.join(SECONDS_TO_END)
        code = self._process.exitcode
        guard = 'a script that starts workers needs its code under `if __name__ == "__main__":`'
        hint = f"; {guard}" if code == 1 else "; out of memory? try fewer workers or a smaller prefetch"
        return UserError(f"{self._name} (process {self._process.pid}) died with exit code {code}{hint}")

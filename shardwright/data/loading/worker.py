"""A spawned process that serves a source, for a loader beside it or for trainers elsewhere.

Arrays go through the pipe as they lie in memory, into the memory that they stay in. No torch here: see source.py.
"""

import multiprocessing
import os
import select
import signal
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.util import Finalize
from threading import Thread
from typing import Any

import numpy as np

from shardwright.data.sources.source import NumpyBatch, Position, SampleOrder, Source, read_batch
from shardwright.errors import UserError

# Signals that a terminal or a scheduler sends to the whole process group; the parent handles them.
GROUP_SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)
SHUTDOWN_SECONDS = 1.0  # granted to a worker that should end by itself


class RowsNotReady(UserError):
    """What was asked for is not there, and may come."""


class _HungUp(Exception):
    """Nobody waits for an answer any more."""


def serve(source: Source, order: SampleOrder, pipe: Connection, blocking: bool = True) -> None:
    """A worker's life: answer each share (rank, of how many) of a position with its rows, or the error they cost.

    One that does not wait for rows says that they are not there yet: others may ask it for rows that are.
    """
    for number in GROUP_SIGNALS:  # the parent handles them, and closes the pipe
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, GROUP_SIGNALS)
    pause = partial(_pause, pipe, blocking)
    while True:
        try:
            shard, position = pipe.recv()
        except (EOFError, ConnectionError):
            return
        arrays: list[np.ndarray] = []
        try:
            said, arrays = _packed(read_batch(source, replace(order, shard=shard), position, pause))
        except _HungUp:
            return
        except RowsNotReady as error:
            said = error
        except UserError as error:
            said = UserError(str(error))
        except Exception:
            said = RuntimeError(traceback.format_exc())
        try:
            _send(pipe, said, arrays)
        except ConnectionError:
            return


def send_through_pipe(batch: NumpyBatch) -> None:
    """Send rows through a pipe as a worker does, and receive them as its loader does, both in this process."""
    here, there = multiprocessing.Pipe()
    with here, there:
        sender = Thread(target=_send, args=(there, *_packed(batch)))
        sender.start()
        _received(here)
        sender.join()


def _packed(rows: NumpyBatch) -> tuple[Any, list[np.ndarray]]:
    """What says how the rows' arrays look, and their bytes."""
    named = rows.arrays()
    about = rows.features, [(name, array.dtype, array.shape) for name, array in named.items()]
    return about, [array.reshape(-1).view(np.uint8) for array in named.values()]


def _send(pipe: Connection, said: Any, arrays: Sequence[np.ndarray]) -> None:
    pipe.send(said)
    for array in arrays:
        _write(pipe.fileno(), array.data)


def _pause(pipe: Connection, waits: bool, seconds: float) -> None:
    """Sleep, but not beyond the parent's end, which questions that still lie in the pipe do not hide from poll."""
    ended = select.poll()
    ended.register(pipe.fileno(), 0)
    if ended.poll(1000 * seconds if waits else 0):
        raise _HungUp
    if seconds and not waits:
        raise RowsNotReady("not there yet")


def _write(end: int, memory: memoryview) -> None:
    while memory:
        memory = memory[os.write(end, memory) :]


def _read(end: int, memory: memoryview) -> None:
    while memory:
        if not (num := os.readv(end, [memory])):
            raise EOFError
        memory = memory[num:]


def _received(pipe: Connection) -> NumpyBatch | UserError | RuntimeError:
    said = pipe.recv()
    if isinstance(said, UserError | RuntimeError):
        return said
    features, told = said
    arrays = {name: np.empty(shape, dtype) for name, dtype, shape in told}
    for array in arrays.values():
        _read(pipe.fileno(), array.reshape(-1).view(np.uint8).data)
    return NumpyBatch.from_arrays(features, arrays)


class Worker:
    """A spawned process that serves `source`; a question is too small to wait for an answer not yet taken."""

    def __init__(self, source: Source, order: SampleOrder, name: str, *, blocking: bool = True) -> None:
        self._name = name
        spawn = multiprocessing.get_context("spawn")
        self._pipe, theirs = spawn.Pipe()
        self._process = spawn.Process(target=serve, args=(source, order, theirs, blocking), daemon=True)
        try:
            with _blocked_signals():
                self._process.start()
            # At exit multiprocessing sends SIGTERM to remaining children, which workers ignore.
            self._at_exit = Finalize(self, self._process.kill, exitpriority=1)
        except (OSError, RuntimeError):
            raise
        except Exception as error:
            what = f"{source!r} does not travel to a worker process ({error})"
            remedy = "make it a plain value of a class at the top of a module, or set workers = 0"
            raise UserError(f"loader: {what}; {remedy}") from error
        finally:
            theirs.close()  # so that the death of either process closes the pipe of the other

    def fileno(self) -> int:
        """What becomes readable with an answer, and with the worker's death."""
        return self._pipe.fileno()

    def request(self, shard: tuple[int, int], position: Position) -> None:
        try:
            self._pipe.send((shard, position))
        except OSError:
            raise self._death() from None

    def receive(self) -> NumpyBatch:
        """The rows of the oldest question, or raised what they cost."""
        answer = self.receive_or_error()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def receive_or_error(self) -> NumpyBatch | UserError | RuntimeError:
        """The same with the cost as a value: what is raised here is the end of the worker."""
        try:
            answer = _received(self._pipe)
        except (EOFError, OSError):
            raise self._death() from None
        return RuntimeError(f"{self._name}: {answer}") if isinstance(answer, RuntimeError) else answer

    def close_pipe(self) -> None:
        self._pipe.close()

    def stop(self) -> None:
        self._at_exit.cancel()
        self._process.join(SHUTDOWN_SECONDS)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._process.close()

    def _death(self) -> UserError:
        self._process.join(SHUTDOWN_SECONDS)
        code = self._process.exitcode
        guard = 'a script that starts workers needs its code under `if __name__ == "__main__":`'
        hint = f"; {guard}" if code == 1 else "; out of memory? try fewer workers or a smaller prefetch"
        return UserError(f"{self._name} (process {self._process.pid}) died with exit code {code}{hint}")


@contextmanager
def _blocked_signals() -> Iterator[None]:
    """Block these signals: a process started inside inherits the mask, so none kills it before it ignores them."""
    resource_tracker.ensure_running()  # its start unblocks signals of this thread
    before = signal.pthread_sigmask(signal.SIG_BLOCK, GROUP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

"""Spawned worker process that reads batches from a source, for a local loader or for a reader service.

Arrays are written to the pipe as raw bytes and received into their final memory: no serialization copy.
This module must not import torch: see source.py.
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
SHUTDOWN_SECONDS = 1.0  # grace period for a worker to exit before it is killed


class RowsNotReady(UserError):
    """The requested rows do not exist yet, but may appear later."""


class _ParentGone(Exception):
    """The parent has closed the pipe and will not receive the answer."""


def serve(source: Source, order: SampleOrder, pipe: Connection, blocking: bool = True) -> None:
    """Main loop of a worker: answer each request (shard, position) with a batch or an error.

    With blocking=False the worker answers RowsNotReady instead of waiting for rows that do not exist yet, so that it
    stays available for other requests.
    """
    for signal_number in GROUP_SIGNALS:  # the parent handles them and closes the pipe
        signal.signal(signal_number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, GROUP_SIGNALS)
    pause = partial(_pause_or_raise, pipe, blocking)
    while True:
        try:
            shard, position = pipe.recv()
        except (EOFError, ConnectionError):
            return
        arrays: list[np.ndarray] = []
        try:
            answer, arrays = _pack(read_batch(source, replace(order, shard=shard), position, pause))
        except _ParentGone:
            return
        except RowsNotReady as error:
            answer = error
        except UserError as error:
            answer = UserError(str(error))
        except Exception:
            answer = RuntimeError(traceback.format_exc())
        try:
            _send(pipe, answer, arrays)
        except ConnectionError:
            return


def send_through_pipe(batch: NumpyBatch) -> None:
    """Send a batch through a pipe and receive it in this process, to measure a worker's transfer."""
    receiving, sending = multiprocessing.Pipe()
    with receiving, sending:
        sender = Thread(target=_send, args=(sending, *_pack(batch)))
        sender.start()
        _receive(receiving)
        sender.join()


def _pack(batch: NumpyBatch) -> tuple[Any, list[np.ndarray]]:
    """Header of a batch (feature names; name, dtype, shape of each array) and its arrays as bytes."""
    arrays = batch.arrays()
    header = batch.features, [(name, array.dtype, array.shape) for name, array in arrays.items()]
    return header, [array.reshape(-1).view(np.uint8) for array in arrays.values()]


def _send(pipe: Connection, answer: Any, arrays: Sequence[np.ndarray]) -> None:
    pipe.send(answer)
    for array in arrays:
        _write(pipe.fileno(), array.data)


def _pause_or_raise(pipe: Connection, blocking: bool, seconds: float) -> None:
    """Sleep, or raise if the parent has exited; with blocking=False raise RowsNotReady instead of sleeping.

    Polling with an empty event mask reports only a hangup, even while unread requests are in the pipe.
    """
    hangup = select.poll()
    hangup.register(pipe.fileno(), 0)
    if hangup.poll(1000 * seconds if blocking else 0):
        raise _ParentGone
    if seconds and not blocking:
        raise RowsNotReady("the rows do not exist yet")


def _write(fd: int, memory: memoryview) -> None:
    while memory:
        memory = memory[os.write(fd, memory) :]


def _read_into(fd: int, memory: memoryview) -> None:
    while memory:
        if not (num := os.readv(fd, [memory])):
            raise EOFError
        memory = memory[num:]


def _receive(pipe: Connection) -> NumpyBatch | UserError | RuntimeError:
    answer = pipe.recv()
    if isinstance(answer, UserError | RuntimeError):
        return answer
    features, array_specs = answer
    arrays = {name: np.empty(shape, dtype) for name, dtype, shape in array_specs}
    for array in arrays.values():
        _read_into(pipe.fileno(), array.reshape(-1).view(np.uint8).data)
    return NumpyBatch.from_arrays(features, arrays)


class Worker:
    """Parent-side handle of a spawned process that reads `source`.

    MAX_PREFETCH requests fit the pipe's buffer, so sending a request never blocks on an unread answer.
    """

    def __init__(self, source: Source, order: SampleOrder, name: str, *, blocking: bool = True) -> None:
        self._name = name
        spawn = multiprocessing.get_context("spawn")
        self._pipe, worker_end = spawn.Pipe()
        self._process = spawn.Process(target=serve, args=(source, order, worker_end, blocking), daemon=True)
        try:
            with _block_signals():
                self._process.start()
            # At exit multiprocessing sends SIGTERM to remaining children, which workers ignore.
            self._at_exit = Finalize(self, self._process.kill, exitpriority=1)
        except (OSError, RuntimeError):
            raise
        except Exception as error:
            problem = f"{source!r} cannot be pickled for a worker process ({error})"
            remedy = "make it a plain value of a class at the top level of a module, or set workers = 0"
            raise UserError(f"loader: {problem}; {remedy}") from error
        finally:
            worker_end.close()  # so that the death of either process closes the pipe of the other

    def fileno(self) -> int:
        """File descriptor for poll: readable when an answer has arrived or the worker has died."""
        return self._pipe.fileno()

    def request(self, shard: tuple[int, int], position: Position) -> None:
        try:
            self._pipe.send((shard, position))
        except OSError:
            raise self._death_error() from None

    def receive(self) -> NumpyBatch:
        """Receive the batch of the oldest unanswered request; raises the error of reading it."""
        answer = self.receive_or_error()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def receive_or_error(self) -> NumpyBatch | UserError | RuntimeError:
        """Like `receive`, but return the error of reading; raises only if the worker has died."""
        try:
            answer = _receive(self._pipe)
        except (EOFError, OSError):
            raise self._death_error() from None
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

    def _death_error(self) -> UserError:
        self._process.join(SHUTDOWN_SECONDS)
        code = self._process.exitcode
        main_guard = 'a script that starts workers needs its code under `if __name__ == "__main__":`'
        hint = f"; {main_guard}" if code == 1 else "; out of memory? try fewer workers or a smaller prefetch"
        return UserError(f"{self._name} (process {self._process.pid}) died with exit code {code}{hint}")


@contextmanager
def _block_signals() -> Iterator[None]:
    """Block GROUP_SIGNALS: a process started inside inherits the mask until it ignores the signals."""
    resource_tracker.ensure_running()  # its start unblocks signals of this thread
    previous_mask = signal.pthread_sigmask(signal.SIG_BLOCK, GROUP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous_mask)

"""A reader: a process, perhaps on a host of its own, whose workers read the batches that trainers ask for.

It reads nothing unasked, so what waits in it is bounded by what its trainers have under way. Nothing of a trainer is
kept but its open questions: a reader that was killed and started again is as good as before, and whoever asked it asks
again. Trainers take turns. No torch here.

Phases: what trainers ask is queued, and each is told at once what is held for it; idle workers are given the next
questions; what a worker has read is sent as it lies in memory. No worker waits for rows that are to come: only the
questions of who asked for them do.
"""

import errno
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import zmq

from shardwright.data.loading.worker import RowsNotReady, Worker
from shardwright.data.readers import messages
from shardwright.data.readers.keys import CurveKeys, check_address, secure_socket, start_authenticator
from shardwright.data.readers.messages import BatchRequest
from shardwright.data.sources.source import MAX_PREFETCH, NumpyBatch, Position, SampleOrder, Source, order_identity
from shardwright.errors import UserError

MAX_IN_FLIGHT = MAX_PREFETCH + 1  # of a trainer's questions
MAX_REQUEST_BYTES = 1 << 16  # of a trainer's message
MAX_MESSAGES_PER_POLL = 1000  # messages
HEARTBEAT_MILLISECONDS = 10_000  # between two looks whether a trainer's host is there
HEARTBEAT_TIMEOUT_MILLISECONDS = (
    60_000  # without an answer to one: long, for it may stand behind batches on a slow link
)
LOG_INTERVAL_SECONDS = 10.0
POLL_MILLISECONDS = 200  # a signal may come right before a wait, and not end it
RETRY_SECONDS = 0.5  # before rows that were not there yet are looked for again
WORKER_NAME = "reader worker"

RankShard = tuple[int, int]  # rank, number of ranks


class _Task(NamedTuple):
    """What a worker is about."""

    trainer: bytes
    position: Position


@dataclass(slots=True)
class _Open:
    """The questions of one trainer that are not answered."""

    waiting: dict[Position, RankShard] = field(default_factory=dict)
    read: dict[Position, RankShard] = field(default_factory=dict)  # being read
    rests: float = 0.0  # until then, by the monotonic clock

    def __len__(self) -> int:
        return len(self.waiting) + len(self.read)


@dataclass(slots=True)
class _Sent:
    """Since the last line."""

    since: float
    batches: int = 0
    samples: int = 0
    bytes_: int = 0
    trainers: set[bytes] = field(default_factory=set)


class ReaderService:
    """Serves from when it is made; `run` until an exception, as KeyboardInterrupt, ends it; then `close`."""

    def __init__(
        self,
        source: Source,
        order: SampleOrder,
        *,
        bind: str = "tcp://127.0.0.1:0",
        workers: int = 1,
        keys: CurveKeys | None = None,
    ) -> None:
        check_address(bind, keys, "serve with --keys DIR/reader.keys")
        if workers < 1:
            raise UserError("a reader reads in processes of its own: set data.workers=1 or more")
        self._identity = order_identity(source, order)
        self._digest = messages.order_digest(self._identity)
        self._open: dict[bytes, _Open] = {}  # by trainer; who was served last comes last
        self._busy: dict[Worker, _Task] = {}
        self._crew: list[Worker] = []
        self._context = zmq.Context()
        self._doorkeeper = start_authenticator(self._context, keys)
        try:
            self._socket = self._bound(bind, keys)
            for index in range(workers):
                self._crew.append(Worker(source, order, f"{WORKER_NAME} {index}", blocking=False))
        except BaseException:
            self.close()
            raise
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")
        self._poller = zmq.Poller()
        for waited in (self._socket, *self._crew):
            self._poller.register(waited, zmq.POLLIN)
        self._sent = _Sent(time.monotonic())

    def run(self, write_line: Callable[[str], None]) -> None:
        while True:
            ready = dict(self._poller.poll(POLL_MILLISECONDS))
            if self._socket in ready:
                self._hear()
            for worker in [worker for worker in self._crew if worker.fileno() in ready]:
                told = worker.receive_or_error()  # raises where the worker has died
                self._answer(self._busy.pop(worker), told)
            self._give_out()
            self._tell(write_line)

    def close(self) -> None:
        for worker in self._crew:
            worker.close_pipe()
        for worker in self._crew:
            worker.stop()
        if self._doorkeeper is not None:
            self._doorkeeper.stop()
        self._context.destroy(linger=0)

    def _bound(self, bind: str, keys: CurveKeys | None) -> zmq.Socket:
        socket = self._context.socket(zmq.ROUTER)
        socket.router_mandatory = True  # what cannot be delivered is an error, not lost in silence
        socket.maxmsgsize = MAX_REQUEST_BYTES
        socket.linger = 0
        socket.heartbeat_ivl, socket.heartbeat_timeout = HEARTBEAT_MILLISECONDS, HEARTBEAT_TIMEOUT_MILLISECONDS
        secure_socket(socket, keys)
        try:
            socket.bind(bind)
        except zmq.ZMQError as error:
            raise UserError(
                f"reader {bind}: {zmq.strerror(error.errno or 0)}; choose an address of this host and a free port"
            ) from None
        return socket

    def _hear(self) -> None:
        """What has come, in parts, for workers may wait; what is no question of a trainer's is left out."""
        for _ in range(MAX_MESSAGES_PER_POLL):
            try:
                trainer, *said = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            asked = messages.decode_request(said)
            if asked is None:
                continue
            if asked.order_digest != self._digest:
                self._send(trainer, [messages.encode_message(differs=self._identity)])
                continue
            self._queue(trainer, asked)

    def _queue(self, trainer: bytes, asked: BatchRequest) -> None:
        of = self._open.setdefault(trainer, _Open())
        for position in asked.positions:
            if position not in of.read and len(of) < MAX_IN_FLIGHT:
                of.waiting.setdefault(position, asked.shard)
        held = [*of.waiting, *of.read]
        if not held:
            del self._open[trainer]
        self._send(trainer, [messages.encode_message(number=asked.number, holds=held)])

    def _give_out(self) -> None:
        for worker in self._crew:
            if worker in self._busy:
                continue
            now = time.monotonic()
            trainer = next((trainer for trainer, of in self._open.items() if of.waiting and of.rests <= now), None)
            if trainer is None:
                return
            of = self._open[trainer] = self._open.pop(trainer)
            position = min(of.waiting)
            of.read[position] = of.waiting.pop(position)
            worker.request(of.read[position], position)
            self._busy[worker] = _Task(trainer, position)

    def _answer(self, task: _Task, told: NumpyBatch | UserError | RuntimeError) -> None:
        of = self._open.get(task.trainer)
        if of is None or task.position not in of.read:
            return  # gone in the meantime
        share = of.read.pop(task.position)
        if isinstance(told, RowsNotReady):
            of.waiting[task.position] = share
            of.rests = time.monotonic() + RETRY_SECONDS
            self._send(
                task.trainer, [messages.encode_message(number=-1, holds=[*of.waiting, *of.read])]
            )  # is it still there?
            return
        if not of:
            del self._open[task.trainer]
        if isinstance(told, Exception):
            mistake = isinstance(told, UserError)
            self._send(task.trainer, [messages.encode_message(answer=task.position, error=str(told), mistake=mistake)])
            return
        message = messages.encode_batch(task.position, told)
        self._send(task.trainer, message)
        self._sent.batches += 1
        self._sent.samples += told.lengths.shape[1]
        self._sent.bytes_ += sum(len(frame) for frame in message)
        self._sent.trainers.add(task.trainer)

    def _send(self, trainer: bytes, message: list[Any]) -> None:
        """To a trainer that is there; of one that is gone the questions are forgotten."""
        try:
            self._socket.send_multipart([trainer, *message], zmq.NOBLOCK, copy=False)
        except zmq.Again:
            pass  # it takes nothing in; when it does, it hears that this is not held, and asks again
        except zmq.ZMQError as error:
            if error.errno != errno.EHOSTUNREACH:
                raise
            self._open.pop(trainer, None)

    def _tell(self, say: Callable[[str], None]) -> None:
        sent, now = self._sent, time.monotonic()
        if (seconds := now - sent.since) < LOG_INTERVAL_SECONDS:
            return
        self._sent = _Sent(now)
        if sent.batches:
            rates = f"{sent.samples / seconds:,.0f} samples/s, {sent.bytes_ / seconds / 1e6:,.1f} MB/s"
            say(f"{rates}, {sent.batches:,} batches to {len(sent.trainers)} trainers")

"""Reader service: a process, possibly on another host, whose workers read batches for trainers.

It reads only requested batches, so its queue is bounded by the requests that its trainers have in flight. Its only
state per trainer is the open requests: a reader that was killed can simply be restarted, since trainers repeat their
requests. Trainers are served round-robin. Must not import torch.

Phases: queue incoming requests and acknowledge each with the positions held for its trainer; assign the next requests
to idle workers; send the batches that workers have read, without copying them. Workers never block on rows that do not
exist yet: the request is queued again, and only the requests of its trainer wait.
"""

import errno
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import zmq

from shardwright.comm.transport.contexts import KeptContext
from shardwright.comm.transport.keys import CurveKeys, bind_router, check_address, start_authenticator
from shardwright.data.loading.worker import RowsNotReady, Worker
from shardwright.data.readers import messages
from shardwright.data.readers.messages import BatchRequest
from shardwright.data.sources.source import MAX_PREFETCH, NumpyBatch, Position, SampleOrder, Source, order_identity
from shardwright.errors import UserError

MAX_IN_FLIGHT = MAX_PREFETCH + 1  # requests per trainer
MAX_REQUEST_BYTES = 1 << 16  # size limit of a message from a trainer
MAX_MESSAGES_PER_POLL = 1000
LOG_INTERVAL_SECONDS = 10.0
POLL_MILLISECONDS = 200  # bounded, since a signal that arrives right before a poll does not interrupt it
RETRY_SECONDS = 0.5  # time until a request for rows that do not exist yet is retried
WORKER_NAME = "reader worker"

RankShard = tuple[int, int]  # rank, number of ranks


class _Task(NamedTuple):
    """The request that a worker is reading."""

    trainer: bytes
    position: Position


@dataclass(slots=True)
class _OpenRequests:
    """The unanswered requests of a trainer."""

    queued: dict[Position, RankShard] = field(default_factory=dict)
    reading: dict[Position, RankShard] = field(default_factory=dict)
    retry_at: float = 0.0  # monotonic time before which no request is assigned to a worker

    def __len__(self) -> int:
        return len(self.queued) + len(self.reading)


@dataclass(slots=True)
class _Traffic:
    """Traffic since the last log line."""

    since: float  # monotonic time
    batches: int = 0
    samples: int = 0
    num_bytes: int = 0
    trainers: set[bytes] = field(default_factory=set)


class ReaderService:
    """Reads batches for trainers over a zmq ROUTER socket.

    The constructor binds the socket and starts the workers. Call `run`, which ends only by an exception such as
    KeyboardInterrupt, then `close`.
    """

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
            raise UserError(f"workers is {workers}; a reader needs worker processes: set data.workers=1 or more")
        self._identity = order_identity(source, order)
        self._digest = messages.order_digest(self._identity)
        self._open: dict[bytes, _OpenRequests] = {}  # by trainer; the most recently served trainer is last
        self._busy: dict[Worker, _Task] = {}
        self._workers: list[Worker] = []
        self._context = KeptContext()
        self._authenticator = start_authenticator(self._context.context, keys)
        try:
            self._socket = bind_router(self._context.context, bind, keys, "reader", MAX_REQUEST_BYTES)
            for index in range(workers):
                self._workers.append(Worker(source, order, f"{WORKER_NAME} {index}", blocking=False))
        except BaseException:
            self.close()
            raise
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")
        self._poller = zmq.Poller()
        for pollable in (self._socket, *self._workers):
            self._poller.register(pollable, zmq.POLLIN)
        self._traffic = _Traffic(time.monotonic())

    def run(self, write_line: Callable[[str], None]) -> None:
        """Serve trainers for ever; `write_line` receives a log line of the traffic every LOG_INTERVAL_SECONDS."""
        while True:
            ready = dict(self._poller.poll(POLL_MILLISECONDS))
            if self._socket in ready:
                self._receive_requests()
            for worker in [worker for worker in self._workers if worker.fileno() in ready]:
                answer = worker.receive_or_error()  # raises if the worker has died
                self._send_answer(self._busy.pop(worker), answer)
            self._assign_requests()
            self._log_traffic(write_line)

    def close(self) -> None:
        for worker in self._workers:
            worker.close_pipe()
        for worker in self._workers:
            worker.stop()
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.close()

    def _receive_requests(self) -> None:
        """Receive at most MAX_MESSAGES_PER_POLL messages, so that workers do not starve; skip if malformed."""
        for _ in range(MAX_MESSAGES_PER_POLL):
            try:
                trainer, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            request = messages.decode_request(frames)
            if request is None:
                continue
            if request.order_digest != self._digest:
                self._send(trainer, [messages.encode_message(differs=self._identity)])
                continue
            self._queue_request(trainer, request)

    def _queue_request(self, trainer: bytes, request: BatchRequest) -> None:
        """Queue the positions of a request, and acknowledge all positions held for this trainer."""
        open_requests = self._open.setdefault(trainer, _OpenRequests())
        for position in request.positions:
            if position not in open_requests.reading and len(open_requests) < MAX_IN_FLIGHT:
                open_requests.queued.setdefault(position, request.shard)
        positions = [*open_requests.queued, *open_requests.reading]
        if not positions:
            del self._open[trainer]
        self._send(trainer, [messages.encode_message(number=request.number, holds=positions)])

    def _assign_requests(self) -> None:
        """Assign to each idle worker the earliest request of the trainer that was served longest ago."""
        for worker in self._workers:
            if worker in self._busy:
                continue
            now = time.monotonic()
            trainer = next(
                (trainer for trainer, requests in self._open.items() if requests.queued and requests.retry_at <= now),
                None,
            )
            if trainer is None:
                return
            open_requests = self._open[trainer] = self._open.pop(trainer)
            position = min(open_requests.queued)
            open_requests.reading[position] = open_requests.queued.pop(position)
            worker.request(open_requests.reading[position], position)
            self._busy[worker] = _Task(trainer, position)

    def _send_answer(self, task: _Task, answer: NumpyBatch | UserError | RuntimeError) -> None:
        open_requests = self._open.get(task.trainer)
        if open_requests is None or task.position not in open_requests.reading:
            return  # the trainer disconnected in the meantime
        shard = open_requests.reading.pop(task.position)
        if isinstance(answer, RowsNotReady):
            open_requests.queued[task.position] = shard
            open_requests.retry_at = time.monotonic() + RETRY_SECONDS
            # Detects a trainer that has disconnected, and keeps a connected one from timing out.
            self._send(
                task.trainer,
                [messages.encode_message(number=-1, holds=[*open_requests.queued, *open_requests.reading])],
            )
            return
        if not open_requests:
            del self._open[task.trainer]
        if isinstance(answer, Exception):
            is_mistake = isinstance(answer, UserError)
            self._send(
                task.trainer, [messages.encode_message(answer=task.position, error=str(answer), mistake=is_mistake)]
            )
            return
        message = messages.encode_batch(task.position, answer)
        self._send(task.trainer, message)
        self._traffic.batches += 1
        self._traffic.samples += answer.lengths.shape[1]
        self._traffic.num_bytes += sum(len(frame) for frame in message)
        self._traffic.trainers.add(task.trainer)

    def _send(self, trainer: bytes, message: list[Any]) -> None:
        """Send a message to a trainer; if the trainer has disconnected, drop its requests."""
        try:
            self._socket.send_multipart([trainer, *message], zmq.NOBLOCK, copy=False)
        except zmq.Again:
            pass  # its queue is full: a later acknowledgement does not list this position, so it repeats the request
        except zmq.ZMQError as error:
            if error.errno != errno.EHOSTUNREACH:
                raise
            self._open.pop(trainer, None)

    def _log_traffic(self, write_line: Callable[[str], None]) -> None:
        traffic, now = self._traffic, time.monotonic()
        if (seconds := now - traffic.since) < LOG_INTERVAL_SECONDS:
            return
        self._traffic = _Traffic(now)
        if traffic.batches:
            rates = f"{traffic.samples / seconds:,.0f} samples/s, {traffic.num_bytes / seconds / 1e6:,.1f} MB/s"
            write_line(f"{rates}, {traffic.batches:,} batches to {len(traffic.trainers)} trainers")

"""Trainer side of remote readers: batches in the loader's order, even if readers are slow or die.

A batch is a pure function of its position, so a request can be repeated to any reader: no batch is lost, and the second
of two answers is dropped. Readers read only requested batches. At most `prefetch` + 1 requests are in flight over all
readers, each sent to the reader with the fewest: a slow trainer does not fill the memory of readers.

Phases: send requests until the next batch and `prefetch` more are in flight; receive the answers that have arrived;
until the next batch has arrived, ping the readers, which report the requests they hold. Requests are sent again if
their reader is disconnected, does not reply, or does not hold them. Must not import torch.
"""

import time
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import zmq

from shardwright.comm.transport.contexts import KeptContext
from shardwright.comm.transport.keys import CurveKeys, check_addresses, connect_dealer, load_keys
from shardwright.data.readers import messages
from shardwright.data.readers.messages import BatchRequest
from shardwright.data.sources.source import NumpyBatch, Position, SampleOrder, Source, order_identity
from shardwright.errors import UserError

TIMEOUT_SECONDS = 60.0
PING_SECONDS = 0.25  # time between two messages to a reader while waiting for it
REPLY_TIMEOUT_SECONDS = 5.0  # for any reply: a reader acknowledges requests before it reads batches
POLL_SECONDS = 0.02  # poll interval while a request cannot be sent because no reader is connected


@dataclass(frozen=True, slots=True)
class Readers:
    """Remote readers of a loader: their addresses, the trainer's key file, and the timeout.

    The key file is required if an address is not on this host. A run fails after `timeout_seconds` without any reply.
    """

    addresses: tuple[str, ...]
    key_file: str = ""
    timeout_seconds: float = TIMEOUT_SECONDS

    def __post_init__(self) -> None:
        check_addresses(self.addresses, self.key_file, "set data.reader_keys=DIR/trainer.keys", "reader")


def read_remote(
    source: Source, order: SampleOrder, position: Position, *, readers: Readers, prefetch: int
) -> Generator[NumpyBatch, None, None]:
    """Yield batches endlessly in order, starting at `position`, with `prefetch` more in flight."""
    client = _ReaderClient(readers, order_identity(source, order), order.shard)
    in_flight: deque[Position] = deque()
    try:
        while True:
            while len(in_flight) <= prefetch:
                client.request(position)
                in_flight.append(position)
                position = order.next_position(*position)
            yield client.receive(in_flight.popleft())
    finally:
        client.close()


def wait_for_reader(source: Source, order: SampleOrder, readers: Readers) -> None:
    """Wait until a reader that serves these batches has replied; raises UserError after the timeout."""
    client = _ReaderClient(readers, order_identity(source, order), order.shard)
    try:
        client.wait_for_any()
    finally:
        client.close()


class _Connection:
    """The connection to one reader, and its requests in flight."""

    def __init__(
        self, context: zmq.Context, address: str, keys: CurveKeys | None, digest: str, shard: tuple[int, int]
    ) -> None:
        self.address = address
        self.in_flight: dict[Position, int] = {}  # requested positions, each with the number of its message
        self.is_responsive = False  # whether the reader has replied since it was connected, and is not lost
        self._context, self._keys = context, keys
        self._digest, self._shard = digest, shard
        self.socket = self._connect()
        self._number = 0
        self._last_sent = 0.0  # time of the last message to the reader
        self._awaiting_since: float | None = None  # time of the oldest message without a reply
        self._reply_timeout = REPLY_TIMEOUT_SECONDS

    def _connect(self) -> zmq.Socket:
        return connect_dealer(self._context, self.address, self._keys, "reader", queues=False)

    def send_request(self, *positions: Position) -> bool:
        """Request batches, or without positions ping the reader; False if it is not connected."""
        try:
            self.socket.send(BatchRequest(self._digest, self._shard, self._number, positions).encode(), zmq.NOBLOCK)
        except zmq.Again:
            return False
        self.in_flight |= dict.fromkeys(positions, self._number)
        self._number += 1
        self._last_sent = time.monotonic()
        self._awaiting_since = self._awaiting_since or self._last_sent
        return True

    def record_reply(self) -> None:
        self.is_responsive, self._awaiting_since = True, None

    @property
    def ping_due(self) -> bool:
        return time.monotonic() - self._last_sent > PING_SECONDS

    @property
    def has_timed_out(self) -> bool:
        return self._awaiting_since is not None and time.monotonic() - self._awaiting_since > self._reply_timeout

    def mark_lost(self) -> list[Position]:
        """Mark the reader as lost and return its requests in flight; it may reconnect later."""
        lost = list(self.in_flight)
        self.in_flight, self.is_responsive, self._awaiting_since = {}, False, None
        return lost

    def reconnect(self) -> zmq.Socket:
        """Replace the socket and double the reply timeout, since the link may be slow; returns the old socket."""
        self._reply_timeout *= 2
        old_socket, self.socket = self.socket, self._connect()
        return old_socket

    def drop_missing(self, number: int, held: Sequence[Position]) -> list[Position]:
        """Drop and return requests sent up to message `number` that the reader neither answered nor holds."""
        lost = [
            position
            for position, message_number in self.in_flight.items()
            if message_number <= number and position not in held
        ]
        for position in lost:
            del self.in_flight[position]
        return lost


class _ReaderClient:
    """Connections to all readers, unsent requests, and received answers."""

    def __init__(self, readers: Readers, identity: Mapping[str, Any], shard: tuple[int, int]) -> None:
        self._readers, self._identity = readers, identity
        self._context = KeptContext()
        self._poller = zmq.Poller()
        keys, digest = load_keys(readers.key_file, "trainer"), messages.order_digest(identity)
        first = shard[0] % len(readers.addresses)  # ranks start with different readers
        self._connections: list[_Connection] = []
        for address in (*readers.addresses[first:], *readers.addresses[:first]):
            self._connections.append(_Connection(self._context.context, address, keys, digest, shard))
            self._poller.register(self._connections[-1].socket, zmq.POLLIN)
        self._unsent: list[Position] = []
        self._answers: dict[Position, NumpyBatch | UserError | RuntimeError] = {}

    def request(self, position: Position) -> None:
        self._unsent.append(position)
        self._send_requests()

    def receive(self, position: Position) -> NumpyBatch:
        """Wait for the batch of a requested position; raises the error of reading it."""
        self._receive_replies(0.0)  # replies that have already arrived count before any reply timeout is checked
        self._wait(lambda: position in self._answers)
        answer = self._answers.pop(position)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def wait_for_any(self) -> None:
        """Wait until any reader has replied."""
        self._wait(lambda: any(connection.is_responsive for connection in self._connections))

    def close(self) -> None:
        self._context.close()

    def _wait(self, is_done: Callable[[], bool]) -> None:
        last_reply = time.monotonic()
        while True:
            self._check_connections()
            if is_done():
                return
            all_sent = not self._unsent and any(connection.is_responsive for connection in self._connections)
            if self._receive_replies(PING_SECONDS if all_sent else POLL_SECONDS):
                last_reply = time.monotonic()
            elif time.monotonic() - last_reply > self._readers.timeout_seconds:
                raise self._timeout_error()

    def _receive_replies(self, seconds: float) -> bool:
        """Wait up to `seconds` for a message and receive all that have arrived; True if there were any."""
        ready = dict(self._poller.poll(round(1000 * seconds)))
        for connection in self._connections:
            if connection.socket in ready:
                self._drain(connection)
        return bool(ready)

    def _drain(self, connection: _Connection) -> None:
        while True:
            try:
                message = connection.socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            connection.record_reply()
            self._handle(connection, messages.decode_header(message), message[1:])

    def _handle(self, connection: _Connection, header: dict[str, Any] | None, arrays: Sequence[zmq.Frame]) -> None:
        match header:
            case {"differs": dict(reader_identity)}:
                raise self._mismatch_error(connection, reader_identity)
            case {"number": int(number), "holds": list(held)}:
                self._unsent += connection.drop_missing(number, [(epoch, batch) for epoch, batch in held])
            case {"answer": [int(epoch), int(batch)], "error": str(error), "mistake": mistake}:
                answer = UserError(error) if mistake else RuntimeError(f"reader {connection.address}: {error}")
                self._store((epoch, batch), answer)
            case {"answer": [int(epoch), int(batch)]} if (rows := messages.decode_batch(header, arrays)) is not None:
                self._store((epoch, batch), rows)
            case _:
                raise UserError(
                    f"reader {connection.address}: unknown message format; run the same version on both sides"
                )

    def _store(self, position: Position, answer: NumpyBatch | UserError | RuntimeError) -> None:
        """Store an answer if it is the first to its request."""
        in_flight_at = [reader for reader in self._connections if reader.in_flight.pop(position, None) is not None]
        if in_flight_at:
            self._answers[position] = answer
        elif position in self._unsent:
            self._unsent.remove(position)
            self._answers[position] = answer

    def _check_connections(self) -> None:
        """Ping the readers, reconnect readers that timed out, and send unsent requests."""
        for connection in self._connections:
            if connection.has_timed_out:
                self._unsent += connection.mark_lost()
                self._poller.unregister(old_socket := connection.reconnect())
                old_socket.close()
                self._poller.register(connection.socket, zmq.POLLIN)
            if connection.ping_due and not connection.send_request():
                self._unsent += connection.mark_lost()
        self._send_requests()

    def _send_requests(self) -> None:
        """Send unsent requests in order of positions, each to the reader with the fewest in flight."""
        for position in sorted(self._unsent):
            for connection in sorted(
                (connection for connection in self._connections if connection.is_responsive),
                key=lambda connection: len(connection.in_flight),
            ):
                if connection.send_request(position):
                    self._unsent.remove(position)
                    break
                self._unsent += connection.mark_lost()

    def _mismatch_error(self, connection: _Connection, reader_identity: Mapping[str, Any]) -> UserError:
        differences = [
            f"{name} is {reader_identity.get(name)!r} there and {value!r} here"
            for name, value in self._identity.items()
            if reader_identity.get(name) != value
        ] or ["another version of Shardwright"]
        remedy = "start the reader with this run's recipe and overrides"
        return UserError(f"reader {connection.address} serves other batches: {'; '.join(differences)}; {remedy}")

    def _timeout_error(self) -> UserError:
        addresses = ", ".join(sorted(connection.address for connection in self._connections))
        keys = f", with the keys created together with {self._readers.key_file}" if self._readers.key_file else ""
        remedy = f"is a reader running there (`shardwright reader serve`){keys}?"
        return UserError(f"no reader has replied for {self._readers.timeout_seconds:g} s at {addresses}; {remedy}")

"""A rank's connections to servers: calls are sent at once, replies are waited for when they are needed.

A call without a reply is repeated when its server says that it does not have it, as after a restart; the server drops
the second of two. So a connection may break, and a server may be killed and restarted with its journal.
"""

import time
from dataclasses import dataclass
from typing import Any, Protocol

import zmq

from shardwright.comm.pending import Pending
from shardwright.comm.transport.arrays import Message, decode_message
from shardwright.comm.transport.keys import check_address, load_keys, secure_socket
from shardwright.errors import UserError

TIMEOUT_SECONDS = 60.0
PING_NUMBER = 0  # other calls count from 1
PING_SECONDS = 0.5  # without a message of a server, until it is asked which calls it has
CONNECT_TIMEOUT_MILLISECONDS = 3000
LINGER_MILLISECONDS = 1000  # for the last messages to a server


@dataclass(frozen=True, slots=True)
class TableServers:
    """Addresses of table servers, in the order of the plan's servers, and the trainer's key file, required beyond this
    host. A run fails after `timeout_seconds` without any message from a server that it waits for."""

    addresses: tuple[str, ...]
    key_file: str = ""
    timeout_seconds: float = TIMEOUT_SECONDS

    def __post_init__(self) -> None:
        if not self.addresses or isinstance(self.addresses, str):
            raise UserError(
                f"table servers: addresses are {self.addresses!r}; wanted a tuple, such as ('tcp://127.0.0.1:5800',)"
            )
        if len(set(self.addresses)) < len(self.addresses):
            raise UserError(f"table servers: {', '.join(self.addresses)}: an address is listed twice")
        keys = load_keys(self.key_file, "trainer")
        for address in self.addresses:
            check_address(address, keys, "set key_file to DIR/trainer.keys", "table server")


class Connection(Protocol):
    """Calls to one server."""

    def call(self, message: Message) -> Pending[Message]:
        """Send a call; its reply."""
        ...

    def close(self) -> None: ...


class ServerConnection:
    """Calls of a rank to one server over a zmq DEALER socket."""

    def __init__(self, context: zmq.Context, servers: TableServers, address: str, run: str, rank: int) -> None:
        self.address = address
        self._timeout, self._identity = servers.timeout_seconds, {"run": run, "rank": rank}
        self._socket = context.socket(zmq.DEALER)
        self._socket.connect_timeout = CONNECT_TIMEOUT_MILLISECONDS
        secure_socket(self._socket, load_keys(servers.key_file, "trainer"))
        self._socket.connect(address)
        self._number = 0
        self._unanswered: dict[int, Message] = {}
        self._replies: dict[int, Message] = {}

    def call(self, message: Message) -> Pending[Message]:
        number = self._number = self._number + 1
        self._unanswered[number] = numbered = self._numbered(message, number)
        self._send(numbered)
        return Pending(lambda: self._wait(number))

    def close(self) -> None:
        self._socket.close()

    def _numbered(self, message: Message, number: int) -> Message:
        return Message({**message.header, **self._identity, "number": number}, message.arrays)

    def _send(self, message: Message) -> None:
        self._socket.send_multipart(message.encode(), copy=False)

    def _wait(self, number: int) -> Message:
        heard = asked = time.monotonic()
        while number not in self._replies:
            if self._socket.poll(round(1000 * PING_SECONDS)):
                self._receive()
                heard = time.monotonic()
            now = time.monotonic()
            if now - heard > self._timeout:
                raise UserError(
                    f"table server {self.address}: no reply for {self._timeout:g} s; is it running there "
                    "(`shardwright serve-tables`), with the keys created together with this run's?"
                )
            if now - asked > PING_SECONDS:
                self._send(self._numbered(Message({"call": "ping", "without_reply": [*self._unanswered]}), PING_NUMBER))
                asked = now
        return self._replies.pop(number)

    def _receive(self) -> None:
        """Take the messages that have arrived; raises the error of a call."""
        while True:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            message = decode_message(frames)
            if message is None:
                continue  # damaged: the call is repeated
            self._take(message.header, message)

    def _take(self, header: Any, message: Message) -> None:
        if missing := header.get("missing"):
            for number in missing:
                if number in self._unanswered:
                    self._send(self._unanswered[number])
        number = header.get("number")
        if "error" in header and (number in self._unanswered or number == PING_NUMBER):
            raise UserError(f"table server {self.address}: {header['error']}")
        if number not in self._unanswered:
            return  # a second reply, or of a ping
        del self._unanswered[number]
        self._replies[number] = message


class Connector(Protocol):
    """Opens connections of a rank to the servers of its plan."""

    def connect(self, server: int) -> Connection:
        """A new connection; one thread at a time may use it."""
        ...


class ServerConnector:
    """Opens zmq connections."""

    def __init__(self, servers: TableServers, run: str, rank: int) -> None:
        self._context, self._servers, self._run, self._rank = zmq.Context(), servers, run, rank
        self._first: dict[int, ServerConnection] = {}  # by server

    def connect(self, server: int) -> ServerConnection:
        address = self._servers.addresses[server]
        connection = ServerConnection(self._context, self._servers, address, self._run, self._rank)
        self._first.setdefault(server, connection)
        return connection

    def close(self) -> None:
        """Tell the servers that this rank has ended; a server that is gone is not waited for."""
        for connection in self._first.values():
            connection.call(Message({"call": "close"}))
        self._context.destroy(linger=LINGER_MILLISECONDS)


class NoServers:
    """Of a plan without table servers."""

    def connect(self, server: int) -> Connection:
        raise UserError(
            f"the plan has tables on server {server}, and no servers are given: pass "
            "build(model, plan, mesh_for(plan, servers=TableServers(addresses)))"
        )

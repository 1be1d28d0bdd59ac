"""A rank's connections to servers: calls are sent at once, replies are waited for when they are needed.

Every call names the run, the rank and the number of the server in the plan. One without a reply is repeated when its
server says that it does not have it, as after a restart; the server drops the second of two. So a connection may break,
and a server may be killed and restarted with its journal.
"""

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, Protocol

import zmq

from shardwright.comm.pending import Pending
from shardwright.comm.sent_bytes import REPLY, SentBytes
from shardwright.comm.transport.arrays import Message, decode_message
from shardwright.comm.transport.contexts import KeptContext
from shardwright.comm.transport.keys import check_addresses, connect_dealer, load_keys
from shardwright.errors import UserError

TIMEOUT_SECONDS = 60.0
ROUND_CALL = "read"  # the one that waits at the server for the updates of all ranks
PING_NUMBER = 0  # other calls count from 1
RECONNECT_SHARE = 0.5  # of the timeout without a message, until the server is connected to anew
PING_SECONDS = 0.5  # without a message of a server, until it is asked which calls it has
STATE_CONNECTION = "state"
CONNECTIONS = "step", STATE_CONNECTION
LINGER_MILLISECONDS = 1000  # for the last messages to a server


@dataclass(frozen=True, slots=True)
class TableServers:
    """Addresses of table servers, in the order of the plan's servers, and the trainer's key file, required beyond this
    host. A run fails after `timeout_seconds` without any message from a server that it waits for."""

    addresses: tuple[str, ...]
    key_file: str = ""
    timeout_seconds: float = TIMEOUT_SECONDS

    def __post_init__(self) -> None:
        check_addresses(self.addresses, self.key_file, "set key_file to DIR/trainer.keys", "table server")


class Connection(Protocol):
    """Calls of a step to one server."""

    def call(self, message: Message) -> Pending[Message]:
        """Send a call; its reply."""
        ...


class Connector(Protocol):
    """A rank's connections to the servers of its plan."""

    def connect(self, server: int) -> Connection:
        """The connection of this rank's step."""
        ...

    def request(self, server: int, message: Message) -> Message:
        """Send a call and wait for its reply, on a connection of its own; from any thread."""
        ...


@dataclass(frozen=True, slots=True)
class Caller:
    """Who calls a server; `sent`: counts bytes of calls and replies; `explain_wait`: why the updates of other ranks,
    without which a server does not reply to ROUND_CALL, did not arrive in time."""

    run: str
    rank: int
    sent: SentBytes = field(default_factory=SentBytes)
    explain_wait: Callable[[], Exception] = lambda: UserError("the updates of other ranks did not arrive in time")


class ServerConnection:
    """Calls of a rank to one server over a zmq DEALER socket; one thread at a time may use it. `name`: of this
    connection among those of the rank to the server, which counts its calls."""

    def __init__(self, context: zmq.Context, servers: TableServers, server: int, caller: Caller, name: str) -> None:
        self.address = servers.addresses[server]
        self._context, self._keys = context, load_keys(servers.key_file, "trainer")
        self._timeout, self._caller = servers.timeout_seconds, caller
        self._identity = {"run": caller.run, "rank": caller.rank, "server": server, "connection": name}
        self._socket = self._connect()
        self._number = PING_NUMBER
        self._unanswered: dict[int, Message] = {}
        self._replies: dict[int, Message] = {}
        self._errors: dict[int, Exception] = {}  # of calls that were refused, or waited for too long
        self._num_calls = 0  # that the server has had, of all ranks
        self._advanced_at = 0.0  # when the server last said that it had more of them, or reads its journal
        self._lock = Lock()  # of the thread that uses the socket
        self._is_closing = False

    def _connect(self) -> zmq.Socket:
        return connect_dealer(self._context, self.address, self._keys, "table server")

    def call(self, message: Message) -> Pending[Message]:
        with self._lock:
            number = self._number = self._number + 1
            self._unanswered[number] = with_identity = self._with_identity(message, number)
            self._send(with_identity)
        return Pending(lambda: self._wait(number))

    def stop_waiting(self) -> None:
        """Let the thread that waits for a reply, if any, raise an error."""
        self._is_closing = True

    def _with_identity(self, message: Message, number: int) -> Message:
        return Message({**message.header, **self._identity, "number": number}, message.arrays)

    def _send(self, message: Message) -> None:
        if self._socket.closed:
            raise _ended_error()
        frames = message.encode()
        with suppress(zmq.Again):  # no connection, as without the right keys: the call is repeated
            self._socket.send_multipart(frames, zmq.NOBLOCK, copy=False)
            self._caller.sent.add_call(message.header["call"], sum(map(len, frames)))

    def _wait(self, number: int) -> Message:
        with self._lock:
            return self._receive_reply(number)

    def _give_up(self, number: int, error: Exception) -> Exception:
        """Do not repeat a call; the error."""
        self._unanswered.pop(number, None)
        self._errors[number] = error
        return error

    def _receive_reply(self, number: int) -> Message:
        start = last_message_at = last_ping_at = connected_at = time.monotonic()
        while number not in self._replies:
            if self._is_closing:
                raise _ended_error()
            if number in self._errors:
                raise self._errors[number]
            if self._socket.poll(round(1000 * PING_SECONDS)):
                self._receive()
                last_message_at = time.monotonic()
            now = time.monotonic()
            if now - last_message_at > self._timeout:
                error = UserError(
                    f"table server {self.address}: no reply for {self._timeout:g} s; is it running there "
                    "(`shardwright serve-tables`), with the keys created together with this run's?"
                )
                raise self._give_up(number, error)
            if now - max(start, self._advanced_at) > self._timeout and number not in self._replies:
                raise self._give_up(number, self._explain_wait(number))
            if now - max(last_message_at, connected_at) > RECONNECT_SHARE * self._timeout:
                self._socket.close(linger=0)  # zmq does not connect again after damaged bytes
                self._socket, connected_at = self._connect(), now
            if now - last_ping_at > PING_SECONDS:
                ping = Message({"call": "ping", "without_reply": [*self._unanswered]})
                self._send(self._with_identity(ping, PING_NUMBER))
                last_ping_at = now
        return self._replies.pop(number)

    def _explain_wait(self, number: int) -> Exception:
        """Why a call has no reply while the server answers other messages."""
        name = self._unanswered[number].header["call"]
        if name == ROUND_CALL:
            return self._caller.explain_wait()
        return UserError(
            f'table server {self.address}: no reply to "{name}" for {self._timeout:g} s, though it answers other '
            "messages: its host or disk is too slow or overloaded; look at its log, or raise timeout_seconds"
        )

    @property
    def _opens(self) -> bool:
        """Whether this rank's call to open the run has no reply."""
        return any(message.header["call"] == "open" for message in self._unanswered.values())

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
            if call := self._unanswered.get(message.header.get("number", PING_NUMBER)):
                self._caller.sent.add_call(REPLY + call.header["call"], sum(map(len, frames)))
            self._take(message.header, message)

    def _take(self, header: Any, message: Message) -> None:
        num_calls = header.get("num_calls", self._num_calls)
        if header.get("busy") or num_calls != self._num_calls:  # it reads its journal: calls are repeated after that
            self._num_calls, self._advanced_at = num_calls, time.monotonic()
        for number in header.get("missing", ()):
            if number in self._unanswered:
                self._send(self._unanswered[number])
        number = header.get("number")
        if "error" in header and number == PING_NUMBER and self._opens:
            for unanswered in self._unanswered.values():  # the server was killed before it opened the run
                self._send(unanswered)
            return
        if "error" in header and (number in self._unanswered or number == PING_NUMBER):
            raise self._give_up(number, UserError(f"table server {self.address}: {header['error']}"))
        if number not in self._unanswered:
            return  # a second reply, or of a ping
        del self._unanswered[number]
        self._replies[number] = message


class ServerConnector:
    """The zmq connections of a rank: for each server one of the step, and one for state, which other threads use."""

    def __init__(self, servers: TableServers, caller: Caller) -> None:
        self._servers, self._caller = servers, caller
        self._contexts = KeptContext(), KeptContext()  # of the step, and of state
        self._connections: dict[int, ServerConnection] = {}
        self._of_state: dict[int, ServerConnection] = {}
        self._lock = Lock()
        self._is_closed = False

    def connect(self, server: int) -> ServerConnection:
        if server not in self._connections:
            self._connections[server] = self._open(0, server)
        return self._connections[server]

    def request(self, server: int, message: Message) -> Message:
        with self._lock:
            if self._is_closed:
                raise _ended_error()
            if server not in self._of_state:
                self._of_state[server] = self._open(1, server)
            return self._of_state[server].call(message).wait()

    def _open(self, kind: int, server: int) -> ServerConnection:
        return ServerConnection(self._contexts[kind].context, self._servers, server, self._caller, CONNECTIONS[kind])

    def close(self) -> None:
        """Tell the servers that this rank has ended; a server that is gone is not waited for."""
        for connection in (*self._connections.values(), *self._of_state.values()):
            connection.stop_waiting()
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            for connection in self._connections.values():
                connection.call(Message({"call": "close"}))
            for context in self._contexts:
                context.close(linger=LINGER_MILLISECONDS)


def _ended_error() -> UserError:
    return UserError("this job has ended: its mesh was closed, or another job was built on it")


class NoServers:
    """Of a plan without table servers."""

    def connect(self, server: int) -> Connection:
        raise self._error(server)

    def request(self, server: int, message: Message) -> Message:
        raise self._error(server)

    def _error(self, server: int) -> UserError:
        return UserError(
            f"the plan has tables on server {server}, and no servers are given: pass "
            "build(model, plan, mesh_for(plan, servers=TableServers(addresses)))"
        )

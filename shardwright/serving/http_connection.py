"""A client's HTTP/1.1 connection: submits requests to the endpoint and writes responses in order.

Bytes are received into a buffer that all connections share. A parser turns them into requests, or into an error, whose
response is the last one on the connection; later bytes are read and discarded, because closing the socket with unread
input would reset it before the client has read the error. Every phase of a connection is limited in bytes and seconds.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from http import HTTPStatus
from types import MappingProxyType
from typing import Any

from httptools import HttpParserCallbackError, HttpParserError, HttpParserUpgrade, HttpRequestParser

READ_BYTES = 1 << 15  # per read; also bounds the pipelined requests that are parsed before a response is written
STATUS_LINES = MappingProxyType(
    {code.value: f"HTTP/1.1 {code.value} {code.phrase}\r\n".encode() for code in HTTPStatus}
)
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
RETRY_AFTER_HEADER = b"Retry-After: 1\r\n"
FRAMING_HEADERS = (b"content-length", b"transfer-encoding", b"expect")  # headers that affect how a body is read


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits on what clients may send to an endpoint."""

    max_header_bytes: int = 1 << 16
    max_body_bytes: int = 4 << 20  # per request, and per batch: decoded it takes about 25 times as much memory
    max_pending_body_bytes: int = 256 << 20  # sum over all requests that are not answered
    max_samples: int = 4096  # per request, and per batch
    max_connections: int = 400
    request_seconds: float = 10.0  # to send a request, and to receive its response
    idle_seconds: float = 75.0  # between requests


@dataclass(slots=True)
class HttpResponse:
    """A response that is not yet encoded."""

    code: int
    body: bytes
    content_type: bytes = b"application/json"
    extra_headers: bytes = b""  # complete lines, each with its CRLF

    def encode(self, keep_alive: bool, omit_body: bool) -> bytes:
        """The bytes to send. `omit_body`: for a HEAD request."""
        return b"%bContent-Type: %b\r\nContent-Length: %d\r\n%bConnection: %b\r\n\r\n%b" % (
            STATUS_LINES[self.code],
            self.content_type,
            len(self.body),
            self.extra_headers,
            b"keep-alive" if keep_alive else b"close",
            b"" if omit_body else self.body,
        )


class HttpError(Exception):
    """An error response: a status code and a reason in one line."""

    def __init__(self, code: int, reason: str, extra_headers: bytes = b"") -> None:
        super().__init__(reason)
        self.code, self.extra_headers = code, extra_headers


@dataclass(slots=True, eq=False)
class HttpRequest:
    """A request, or the error that ended its parsing (`error`); later its samples or response."""

    connection: "HttpConnection"
    arrival_time: float
    keep_alive: bool = False
    method: bytes = b""
    target: bytes = b""
    body: bytearray = field(default_factory=bytearray)
    error: HttpError | None = None
    samples: list[dict[str, Any]] = field(default_factory=list)
    response: HttpResponse | None = None


@dataclass(slots=True)
class ServerState:
    """State that all connections of an endpoint share."""

    limits: Limits
    submit: Callable[[HttpRequest], None]
    clock: Callable[[], float]
    connections: set["HttpConnection"] = field(default_factory=set)
    admitted_connections: set["HttpConnection"] = field(default_factory=set)  # without errors; at most max_connections
    pending_body_bytes: int = 0  # of requests that are not answered
    read_buffer: memoryview = field(default_factory=lambda: memoryview(bytearray(READ_BYTES)))
    is_closing: bool = False


class HttpConnection(asyncio.BufferedProtocol):
    """One connection. httptools calls the on_... methods; an exception that they raise ends parsing."""

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._limits = state.limits
        self._parser = HttpRequestParser(self)
        self._transport: asyncio.Transport
        self._deadline = state.clock() + state.limits.idle_seconds
        self._num_pending = 0  # requests that are not answered
        self._in_request = False  # a request has begun and is incomplete
        self._is_input_ignored = False  # received bytes are discarded
        self._is_rejected = False  # input is discarded because of an error
        self._is_eof_received = False
        self._num_unparsed = 0  # bytes since the last callback of the parser
        self._error: HttpError | None = None  # set before a callback raises
        self._reset_request()

    def _reset_request(self) -> None:
        self._target = b""
        self._num_header_bytes = 0
        self._framing = b""  # the lines of `FRAMING_HEADERS`
        self._content_length = 0
        self._expects_continue = self._owes_continue = False  # owed: to be sent after the responses to earlier requests
        self._keep_alive = self._upgrade = False
        self._body = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._state.connections.add(self)
        if self._state.is_closing or len(self._state.connections) > 2 * self._limits.max_connections:
            transport.abort()
        elif not self._admit():  # 503 follows the first request: some clients fail on a response without a request
            self._deadline = self._state.clock() + self._limits.request_seconds

    def _admit(self) -> bool:
        """Admit this connection if fewer than `max_connections` are; returns whether it is admitted."""
        if len(self._state.admitted_connections) < self._limits.max_connections:
            self._state.admitted_connections.add(self)
        return self in self._state.admitted_connections

    def connection_lost(self, exc: Exception | None) -> None:
        self._state.connections.discard(self)
        self._state.admitted_connections.discard(self)
        self._is_input_ignored = True
        self._discard_body()
        del self._parser  # breaks a reference cycle

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._state.read_buffer

    def buffer_updated(self, nbytes: int) -> None:
        if not self._is_input_ignored:
            self._feed(self._state.read_buffer[:nbytes])

    def eof_received(self) -> bool:
        """Return whether the connection stays open, which it does until all requests are answered."""
        self._is_eof_received = True
        return self._num_pending > 0

    def pause_writing(self) -> None:
        self._transport.pause_reading()
        self._deadline = self._state.clock() + self._limits.request_seconds

    def resume_writing(self) -> None:
        self._transport.resume_reading()
        is_busy = self._in_request or self._is_input_ignored
        self._deadline = self._state.clock() + (self._limits.request_seconds if is_busy else self._limits.idle_seconds)

    def send_response(self, message: bytes, keep_alive: bool) -> None:
        """Write the response to the oldest pending request."""
        self._num_pending -= 1
        if self._transport.is_closing():
            return
        self._transport.write(message)
        if not keep_alive or (self._is_eof_received and not self._num_pending):
            self._close()
        elif self._owes_continue and not self._num_pending:
            self._owes_continue = False
            self._transport.write(CONTINUE)

    def check_deadline(self, now: float) -> None:
        """Close the connection, or reject its incomplete request with 408, if its deadline has passed."""
        if now < self._deadline:
            return
        if self._is_input_ignored or self._transport.is_closing() or self._transport.get_write_buffer_size():
            self._transport.abort()
        elif self._in_request:
            seconds = self._limits.request_seconds
            self._reject(HttpError(408, f"no complete request within {seconds:g} s; send it faster"))
        else:
            self._transport.close()

    def close_if_idle(self) -> None:
        """Close the connection unless a request or a response is in flight, for shutdown."""
        if not (self._in_request or self._num_pending or self._is_input_ignored):
            self._transport.close()

    def abort(self) -> None:
        self._transport.abort()

    def on_message_begin(self) -> None:
        self._reset_request()
        self._num_unparsed = 0
        self._in_request = True
        self._deadline = self._state.clock() + self._limits.request_seconds

    def on_url(self, url: bytes) -> None:
        self._target += url
        self._count_header_bytes(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count_header_bytes(len(name) + len(value))
        if (name := name.lower()) not in FRAMING_HEADERS:
            return
        self._framing += b"%b: %b\r\n" % (name, value)
        if name == b"content-length":
            self._content_length = int(value)
        elif name == b"expect":
            if value.lower() != b"100-continue":
                raise self._parser_error(417, 'unsupported "Expect" header; allowed: 100-continue')
            self._expects_continue = True

    def on_headers_complete(self) -> None:
        self._num_unparsed = 0
        self._keep_alive = self._parser.should_keep_alive()
        self._upgrade = self._parser.should_upgrade()
        if not self._admit():
            raise self._parser_error(
                503, f"{self._limits.max_connections} connections are open; try again later", RETRY_AFTER_HEADER
            )
        if self._content_length > self._limits.max_body_bytes:
            raise self._body_error()
        if (version := self._parser.get_http_version()) not in ("1.1", "1.0"):
            raise self._parser_error(505, f"HTTP/{version} is not supported; use HTTP/1.1")
        if self._expects_continue and not self._upgrade and version == "1.1":
            self._owes_continue = self._num_pending > 0
            if not self._owes_continue:
                self._transport.write(CONTINUE)

    def on_body(self, body: bytes) -> None:
        self._num_unparsed = 0
        if len(self._body) + len(body) > self._limits.max_body_bytes:
            raise self._body_error()
        if self._state.pending_body_bytes + len(body) > self._limits.max_pending_body_bytes:
            raise self._parser_error(503, "too many bytes of pending requests; try again later", RETRY_AFTER_HEADER)
        self._state.pending_body_bytes += len(body)
        self._body += body

    def on_message_complete(self) -> None:
        if self._upgrade:
            return  # see _decline_upgrade
        now = self._state.clock()
        self._in_request = self._owes_continue = False
        self._deadline = now + self._limits.idle_seconds
        self._is_input_ignored = not self._keep_alive
        self._num_pending += 1
        body, self._body = self._body, bytearray()  # the connection must not keep the body while idle
        self._state.submit(HttpRequest(self, now, self._keep_alive, self._parser.get_method(), self._target, body))

    def _feed(self, data: memoryview) -> None:
        try:
            self._parser.feed_data(data)
            self._num_unparsed += len(data)
            if self._num_unparsed > self._limits.max_header_bytes + READ_BYTES:  # the parser buffers partial headers
                raise self._header_error()
        except HttpParserUpgrade as upgrade:
            self._decline_upgrade(data[upgrade.args[0] :])
        except HttpParserError as error:
            if isinstance(error, HttpParserCallbackError) and self._error is None:
                raise (error.__context__ or error) from None  # a bug or an interrupt, not the client's error
            if not self._is_input_ignored:  # the parser also fails on bytes after a "Connection: close" request
                self._reject(self._error or HttpError(400, f"not an HTTP/1.1 request: {error}"))

    def _decline_upgrade(self, rest: memoryview) -> None:
        """Ignore an offer of another protocol: parse the request again without it, then its body."""
        if (method := self._parser.get_method()) == b"CONNECT":
            self._reject(HttpError(405, "CONNECT is not supported by this server", b"Allow: GET, HEAD, POST\r\n"))
            return
        version, keep = self._parser.get_http_version().encode(), b"keep-alive" if self._keep_alive else b"close"
        head = b"%b %b HTTP/%b\r\nConnection: %b\r\n%b\r\n" % (method, self._target, version, keep, self._framing)
        self._parser = HttpRequestParser(self)
        deadline = self._deadline
        self._feed(memoryview(head))
        if self._in_request:
            self._deadline = deadline
        if rest and not self._is_input_ignored:
            self._feed(rest)

    def _reject(self, error: HttpError) -> None:
        """Submit an error as the last response of this connection, and discard further input."""
        now = self._state.clock()
        self._is_input_ignored = self._is_rejected = True
        self._state.admitted_connections.discard(self)
        self._discard_body()
        self._deadline = now + self._limits.request_seconds
        self._num_pending += 1
        self._state.submit(HttpRequest(self, now, error=error))

    def _discard_body(self) -> None:
        self._state.pending_body_bytes -= len(self._body)
        self._body = bytearray()

    def _close(self) -> None:
        """Close after the last response; after an error only the write side, as the client may still send."""
        if not self._is_rejected or self._is_eof_received:
            self._transport.close()
            return
        try:
            self._transport.write_eof()  # closing with unread input would reset the connection and lose the response
        except OSError:  # the client has disconnected
            self._transport.abort()

    def _count_header_bytes(self, num: int) -> None:
        self._num_unparsed = 0
        self._num_header_bytes += num
        if self._num_header_bytes > self._limits.max_header_bytes:
            raise self._header_error()

    def _header_error(self) -> HttpParserError:
        return self._parser_error(
            431, f"headers of more than {self._limits.max_header_bytes:,} bytes; send fewer or shorter ones"
        )

    def _body_error(self) -> HttpParserError:
        return self._parser_error(
            413, f"a body of more than {self._limits.max_body_bytes:,} bytes; send fewer samples at once"
        )

    def _parser_error(self, code: int, reason: str, extra_headers: bytes = b"") -> HttpParserError:
        """Record the response of an error and return the exception that makes the parser stop."""
        self._error = HttpError(code, reason, extra_headers)
        return HttpParserError(reason)

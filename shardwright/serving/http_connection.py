"""One client's connection: whole HTTP/1.1 requests are handed on, their answers written in the same order.

Phases: bytes come into memory that all connections share; a parser makes requests of them, or a refusal, which is the
last thing answered; what still comes after that is thrown away, so that the client is not cut off before it reads why.
A client has limits in bytes and in seconds for whatever it does, so that none can stay for nothing.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from http import HTTPStatus
from types import MappingProxyType
from typing import Any

from httptools import HttpParserCallbackError, HttpParserError, HttpParserUpgrade, HttpRequestParser

READ_BYTES = 1 << 15  # at once from a client: what it may ask before it takes in the first answer
STATUS_LINES = MappingProxyType(
    {code.value: f"HTTP/1.1 {code.value} {code.phrase}\r\n".encode() for code in HTTPStatus}
)
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
RETRY_AFTER_HEADER = b"Retry-After: 1\r\n"
FRAMING_HEADERS = (b"content-length", b"transfer-encoding", b"expect")  # the headers that say where a body ends


@dataclass(frozen=True, slots=True)
class Limits:
    """What a client may ask of an endpoint."""

    max_header_bytes: int = 1 << 16
    max_body_bytes: int = 4 << 20  # of a request, and decoded at once: about 25 times as many in memory
    max_pending_body_bytes: int = 256 << 20  # of the bodies of all clients, until they are answered
    max_samples: int = 4096  # of a request, and scored at once
    max_connections: int = 400
    request_seconds: float = 10.0  # to send a request, and to take in its answer
    idle_seconds: float = 75.0  # between requests


@dataclass(slots=True)
class HttpResponse:
    """An answer before it is written."""

    code: int
    body: bytes
    content_type: bytes = b"application/json"
    extra_headers: bytes = b""  # headers, each with its end of line

    def encode(self, keep_alive: bool, omit_body: bool) -> bytes:
        """As it is sent; bare, as to HEAD, without its body."""
        return b"%bContent-Type: %b\r\nContent-Length: %d\r\n%bConnection: %b\r\n\r\n%b" % (
            STATUS_LINES[self.code],
            self.content_type,
            len(self.body),
            self.extra_headers,
            b"keep-alive" if keep_alive else b"close",
            b"" if omit_body else self.body,
        )


class HttpError(Exception):
    """Why a request is not answered as asked: a code and one line."""

    def __init__(self, code: int, reason: str, extra_headers: bytes = b"") -> None:
        super().__init__(reason)
        self.code, self.extra_headers = code, extra_headers


@dataclass(slots=True, eq=False)
class HttpRequest:
    """What a client asked, or why it is refused; in time, the reply."""

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
    """What all connections of an endpoint share."""

    limits: Limits
    submit: Callable[[HttpRequest], None]
    clock: Callable[[], float]
    connections: set["HttpConnection"] = field(default_factory=set)
    admitted_connections: set["HttpConnection"] = field(
        default_factory=set
    )  # those that may ask: neither refused nor too many
    pending_body_bytes: int = 0  # bytes of bodies that are not answered
    read_buffer: memoryview = field(default_factory=lambda: memoryview(bytearray(READ_BYTES)))
    is_closing: bool = False


class HttpConnection(asyncio.BufferedProtocol):
    """One of them. The methods on_... are the parser's to call; what they raise ends the parsing."""

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._limits = state.limits
        self._parser = HttpRequestParser(self)
        self._transport: asyncio.Transport
        self._deadline = state.clock() + state.limits.idle_seconds
        self._waiting = 0  # requests that are not answered
        self._in_request = False  # amid a request
        self._refused = False  # nothing is read any more,
        self._cut = False  # and that amid something
        self._ended = False  # nothing comes any more
        self._unheard = 0  # bytes since the parser said anything
        self._why: HttpError | None = None
        self._begin()

    def _begin(self) -> None:
        self._target = b""
        self._head = 0  # its bytes
        self._framing = b""
        self._length = 0
        self._expects = self._owes = False  # a word that the body may come
        self._keep = self._upgrade = False
        self._body = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._state.connections.add(self)
        if self._state.is_closing or len(self._state.connections) > 2 * self._limits.max_connections:
            transport.abort()
        elif not self._seat():  # told to its first request: some take what comes before it for a fault
            self._deadline = self._state.clock() + self._limits.request_seconds

    def _seat(self) -> bool:
        if len(self._state.admitted_connections) < self._limits.max_connections:
            self._state.admitted_connections.add(self)
        return self in self._state.admitted_connections

    def connection_lost(self, exc: Exception | None) -> None:
        self._state.connections.discard(self)
        self._state.admitted_connections.discard(self)
        self._refused = True
        self._drop()
        del self._parser  # it holds this client, and this client it

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._state.read_buffer

    def buffer_updated(self, nbytes: int) -> None:
        if not self._refused:
            self._feed(self._state.read_buffer[:nbytes])

    def eof_received(self) -> bool:
        """Whether the connection stays open: until what was asked is answered."""
        self._ended = True
        return self._waiting > 0

    def pause_writing(self) -> None:
        self._transport.pause_reading()
        self._deadline = self._state.clock() + self._limits.request_seconds

    def resume_writing(self) -> None:
        self._transport.resume_reading()
        busy = self._in_request or self._refused
        self._deadline = self._state.clock() + (self._limits.request_seconds if busy else self._limits.idle_seconds)

    def send_response(self, message: bytes, keep_alive: bool) -> None:
        """To the first of its requests that has none."""
        self._waiting -= 1
        if self._transport.is_closing():
            return
        self._transport.write(message)
        if not keep_alive or (self._ended and not self._waiting):
            self._leave()
        elif self._owes and not self._waiting:
            self._owes = False
            self._transport.write(CONTINUE)

    def check_deadline(self, now: float) -> None:
        """Whether it has had its time."""
        if now < self._deadline:
            return
        if self._refused or self._transport.is_closing() or self._transport.get_write_buffer_size():
            self._transport.abort()
        elif self._in_request:
            seconds = self._limits.request_seconds
            self._refuse(HttpError(408, f"no whole request within {seconds:g} s; send it sooner"))
        else:
            self._transport.close()

    def close_if_idle(self) -> None:
        """The endpoint closes: only what is under way is finished."""
        if not (self._in_request or self._waiting or self._refused):
            self._transport.close()

    def abort(self) -> None:
        self._transport.abort()

    def on_message_begin(self) -> None:
        self._begin()
        self._unheard = 0
        self._in_request = True
        self._deadline = self._state.clock() + self._limits.request_seconds

    def on_url(self, url: bytes) -> None:
        self._target += url
        self._count_head(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count_head(len(name) + len(value))
        if (name := name.lower()) not in FRAMING_HEADERS:
            return
        self._framing += b"%b: %b\r\n" % (name, value)
        if name == b"content-length":
            self._length = int(value)
        elif name == b"expect":
            if value.lower() != b"100-continue":
                raise self._because(417, 'the only "Expect" known here is 100-continue')
            self._expects = True

    def on_headers_complete(self) -> None:
        self._unheard = 0
        self._keep = self._parser.should_keep_alive()
        self._upgrade = self._parser.should_upgrade()
        if not self._seat():
            raise self._because(
                503, f"{self._limits.max_connections} connections are open; try again later", RETRY_AFTER_HEADER
            )
        if self._length > self._limits.max_body_bytes:
            raise self._too_large()
        if (version := self._parser.get_http_version()) not in ("1.1", "1.0"):
            raise self._because(505, f"HTTP/{version} is not spoken here; speak HTTP/1.1")
        if self._expects and not self._upgrade and version == "1.1":
            self._owes = self._waiting > 0
            if not self._owes:
                self._transport.write(CONTINUE)

    def on_body(self, body: bytes) -> None:
        self._unheard = 0
        if len(self._body) + len(body) > self._limits.max_body_bytes:
            raise self._too_large()
        if self._state.pending_body_bytes + len(body) > self._limits.max_pending_body_bytes:
            raise self._because(503, "too much is asked at once; try again later", RETRY_AFTER_HEADER)
        self._state.pending_body_bytes += len(body)
        self._body += body

    def on_message_complete(self) -> None:
        if self._upgrade:
            return  # see _stay
        now = self._state.clock()
        self._in_request = self._owes = False
        self._deadline = now + self._limits.idle_seconds
        self._refused = not self._keep  # what comes after the last request is none
        self._waiting += 1
        body, self._body = self._body, bytearray()  # nor kept while it idles
        self._state.submit(HttpRequest(self, now, self._keep, self._parser.get_method(), self._target, body))

    def _feed(self, data: memoryview) -> None:
        try:
            self._parser.feed_data(data)
            self._unheard += len(data)
            if self._unheard > self._limits.max_header_bytes + READ_BYTES:  # the parser keeps an unfinished header
                raise self._large_head()
        except HttpParserUpgrade as upgrade:
            self._stay(data[upgrade.args[0] :])
        except HttpParserError as error:
            if isinstance(error, HttpParserCallbackError) and self._why is None:
                raise (error.__context__ or error) from None  # not the client's: a bug, or an interrupt
            if not self._refused:  # by its own "Connection: close", which the parser minds too
                self._refuse(self._why or HttpError(400, f"no HTTP/1.1 request: {error}"))

    def _stay(self, rest: memoryview) -> None:
        """With HTTP/1.1, where a client offered another protocol: as if it had not, with the body it may send."""
        if (method := self._parser.get_method()) == b"CONNECT":
            self._refuse(HttpError(405, "no CONNECT here: this is no proxy", b"Allow: GET, HEAD, POST\r\n"))
            return
        version, keep = self._parser.get_http_version().encode(), b"keep-alive" if self._keep else b"close"
        head = b"%b %b HTTP/%b\r\nConnection: %b\r\n%b\r\n" % (method, self._target, version, keep, self._framing)
        self._parser = HttpRequestParser(self)
        deadline = self._deadline
        self._feed(memoryview(head))
        if self._in_request:
            self._deadline = deadline
        if rest and not self._refused:
            self._feed(rest)

    def _refuse(self, why: HttpError) -> None:
        """The last thing this client is told."""
        now = self._state.clock()
        self._refused = self._cut = True
        self._state.admitted_connections.discard(self)
        self._drop()
        self._deadline = now + self._limits.request_seconds
        self._waiting += 1
        self._state.submit(HttpRequest(self, now, error=why))

    def _drop(self) -> None:
        self._state.pending_body_bytes -= len(self._body)
        self._body = bytearray()

    def _leave(self) -> None:
        if not self._cut or self._ended:
            self._transport.close()
            return
        try:
            self._transport.write_eof()  # to close while bytes come would reset, and the client not read its answer
        except OSError:  # it is gone
            self._transport.abort()

    def _count_head(self, num: int) -> None:
        self._unheard = 0
        self._head += num
        if self._head > self._limits.max_header_bytes:
            raise self._large_head()

    def _large_head(self) -> HttpParserError:
        return self._because(
            431, f"headers of more than {self._limits.max_header_bytes:,} bytes; send fewer or shorter ones"
        )

    def _too_large(self) -> HttpParserError:
        return self._because(
            413, f"a body of more than {self._limits.max_body_bytes:,} bytes; send fewer samples at once"
        )

    def _because(self, code: int, why: str, more: bytes = b"") -> HttpParserError:
        self._why = HttpError(code, why, more)
        return HttpParserError(why)

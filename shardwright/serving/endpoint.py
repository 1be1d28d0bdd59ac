"""The HTTP endpoint of a predictor: POST /predict, GET /health, GET /metrics.

One thread, one event loop. Phases of a turn of the loop: connections hand in what has come, as requests; group by group
these are decoded, put together, scored at once and answered, in the order they came. So many clients share the cost of
a call, a lone one waits for nobody, and no more than a group is in memory decoded, many times larger than as it came.
"""

import asyncio
import json
import math
import os
import re
import socket
import sys
import traceback
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import Any, NoReturn, Protocol

from shardwright.errors import UserError, did_you_mean
from shardwright.serving.http_connection import (
    HttpConnection,
    HttpError,
    HttpRequest,
    HttpResponse,
    Limits,
    ServerState,
)
from shardwright.serving.prometheus import EndpointMetrics

DEFAULT_LIMITS = Limits()
BACKLOG = 512  # connections that the system keeps until they are accepted
DEADLINE_CHECKS_PER_TIMEOUT = 8  # at each client, in the time it has
MAX_SECONDS_BETWEEN_CHECKS = 1.0  # at most
SECONDS_BETWEEN_DRAIN_CHECKS = 0.01  # of whether all have left
MAX_ERROR_CHARACTERS = 1000  # characters of an error; 60 of a name
MAX_INTERNAL_ERROR_CHARACTERS = 300  # of one that is not ours
GET_METHODS = (b"GET", b"HEAD")
ROUTES = MappingProxyType({b"/predict": (b"POST",), b"/health": GET_METHODS, b"/metrics": GET_METHODS})
EXPECTED_BODY = 'wanted {"samples": [{...}, ...]}'
PROMETHEUS_CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"

ScorerState = Mapping[str, float | int | str]


class Scorer(Protocol):
    """What answers behind an endpoint."""

    def answer(self, samples: Sequence[Mapping[str, Any]]) -> tuple[int, list[float]]:
        """The step of the model that answered, and a score per sample; UserError says what is wrong with one."""
        ...

    def state(self) -> ScorerState:
        """JSON values; "status" is "ok" or what is wrong."""
        ...


class Endpoint:
    """Bound from when it is made; `run` serves until `stop` or KeyboardInterrupt; then `close`."""

    def __init__(self, scorer: Scorer, host: str = "127.0.0.1", port: int = 0, limits: Limits = DEFAULT_LIMITS) -> None:
        self._scorer = scorer
        self._limits = limits
        self._metrics = EndpointMetrics()
        self._queue: deque[HttpRequest] = deque()  # until they are answered
        self._told = False  # the traceback of this turn
        self._server: asyncio.Server | None = None
        self._socket = _bound(host, port)
        at, number = self._socket.getsockname()[:2]
        self.address = f"http://[{at}]:{number}" if ":" in at else f"http://{at}:{number}"
        self._loop = asyncio.new_event_loop()
        self._state = ServerState(limits, self._enqueue, self._loop.time)

    def run(self) -> None:
        serving = self._loop.create_server(lambda: HttpConnection(self._state), sock=self._socket, backlog=BACKLOG)
        self._server = self._loop.run_until_complete(serving)
        self._look()
        try:
            if self._state.is_closing:
                self._drain()
            self._loop.run_forever()
        except KeyboardInterrupt:
            self._loop.call_soon(self._process_queue)  # what it broke off
            self._end()
            self._loop.run_forever()

    def stop(self) -> None:
        """From any thread: finish what is under way, then end."""
        with suppress(RuntimeError):  # closed already
            self._loop.call_soon_threadsafe(self._end)

    def close(self) -> None:
        """When `run` has ended, or was never called."""
        if self._loop.is_closed():
            return
        self._socket.close()
        for client in tuple(self._state.connections):
            client.abort()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_until_complete(asyncio.sleep(0))
        self._loop.close()

    def _enqueue(self, request: HttpRequest) -> None:
        if not self._queue:
            self._loop.call_soon(self._process_queue)
        self._queue.append(request)

    def _process_queue(self) -> None:
        begun, self._told = self._loop.time(), False
        known: dict[bytes, HttpResponse] = {}
        while self._queue:
            self._answer_some(known)
        self._metrics.observe_turn(self._loop.time() - begun)

    def _answer_some(self, known: dict[bytes, HttpResponse]) -> None:
        group = self._group(known)
        self._score([request for request in group if request.response is None])
        now = self._loop.time()
        for _ in group:
            self._answer(self._queue.popleft(), now)

    def _group(self, known: dict[bytes, HttpResponse]) -> list[HttpRequest]:
        """The next in the queue, as many as may be decoded and scored at once."""
        group: list[HttpRequest] = []
        size = num = 0
        for request in self._queue:
            size += len(request.body)
            if group and size > self._limits.max_body_bytes:
                break
            self._read(request, known)
            num += len(request.samples)
            if group and num > self._limits.max_samples:
                break
            group.append(request)
        return group

    def _answer(self, request: HttpRequest, now: float) -> None:
        keep = request.keep_alive and not self._state.is_closing
        assert request.response is not None
        self._state.pending_body_bytes -= len(request.body)
        self._metrics.count_request(request.response.code, None if request.error else now - request.arrival_time)
        try:
            request.connection.send_response(request.response.encode(keep, request.method == b"HEAD"), keep)
        except BaseException as error:  # half an answer, or one at another's place, is worse than none
            request.connection.abort()
            if not isinstance(error, Exception):
                raise
            self._tell(error)

    def _read(self, request: HttpRequest, known: dict[bytes, HttpResponse]) -> None:
        """The reply to a request, or what it wants scored, unless it was read before."""
        if request.response is None and not request.samples:
            try:
                self._decode(request, known)
            except Exception as error:
                request.response = self._wrong(error)

    def _decode(self, request: HttpRequest, known: dict[bytes, HttpResponse]) -> None:
        if request.error is not None:
            raise request.error
        path = _path(request)
        if path == b"/predict":
            request.samples = _samples(request.body, self._limits.max_samples)
            return
        if path not in known:
            known[path] = self._health() if path == b"/health" else self._counts()
        request.response = known[path]

    def _health(self) -> HttpResponse:
        state = self._scorer.state()
        return HttpResponse(200 if state.get("status") == "ok" else 503, _encoded(dict(state)))

    def _counts(self) -> HttpResponse:
        return HttpResponse(200, self._metrics.exposition_text(self._scorer.state()).encode(), PROMETHEUS_CONTENT_TYPE)

    def _score(self, group: list[HttpRequest]) -> None:
        try:
            if group:
                self._score_at_once(group)
            return
        except Exception as error:
            if len(group) == 1:
                group[0].response = self._wrong(error)
                return
        middle = len(group) // 2  # nobody has the error of another
        self._score(group[:middle])
        self._score(group[middle:])

    def _score_at_once(self, group: list[HttpRequest]) -> None:
        samples = [sample for request in group for sample in request.samples]
        step, scores = self._scorer.answer(samples)
        if len(scores) != len(samples):
            raise RuntimeError(f"{len(scores)} scores for {len(samples)} samples")
        start = 0
        replies = []
        for request in group:
            end = start + len(request.samples)
            replies.append(HttpResponse(200, _encoded({"step": step, "scores": scores[start:end]})))
            start = end
        for request, reply in zip(group, replies, strict=True):
            request.response = reply
        self._metrics.observe_batch(len(samples))

    def _wrong(self, error: Exception) -> HttpResponse:
        if isinstance(error, HttpError):
            return HttpResponse(error.code, _encoded({"error": str(error)}), extra_headers=error.extra_headers)
        if isinstance(error, UserError):
            return HttpResponse(400, _encoded({"error": str(error)[:MAX_ERROR_CHARACTERS]}))
        self._tell(error)
        line = " ".join(f"{type(error).__name__}: {error}".split())
        return HttpResponse(500, _encoded({"error": line[:MAX_INTERNAL_ERROR_CHARACTERS]}))

    def _tell(self, error: Exception) -> None:
        if not self._told:
            self._told = True
            traceback.print_exception(error, file=sys.stderr)

    def _look(self) -> None:
        now = self._loop.time()
        for client in tuple(self._state.connections):
            client.check_deadline(now)
        least = min(self._limits.request_seconds, self._limits.idle_seconds)
        self._loop.call_later(min(least / DEADLINE_CHECKS_PER_TIMEOUT, MAX_SECONDS_BETWEEN_CHECKS), self._look)

    def _end(self) -> None:
        if not self._state.is_closing:
            self._state.is_closing = True
            if self._server is not None:
                self._drain()

    def _drain(self) -> None:
        assert self._server is not None
        self._server.close()
        for client in tuple(self._state.connections):
            client.close_if_idle()
        self._await_all(self._loop.time() + self._limits.request_seconds)

    def _await_all(self, until: float) -> None:
        if not self._state.connections or self._loop.time() > until:
            self._loop.stop()
        else:
            self._loop.call_later(SECONDS_BETWEEN_DRAIN_CHECKS, self._await_all, until)


def _bound(host: str, port: int) -> socket.socket:
    if not 0 <= port < 1 << 16:  # the resolver would cut it short
        raise UserError(f"endpoint {host}:{port}: no such port; choose one from 0, for any, to 65535")
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address, family=family)
    except (OSError, UnicodeError) as error:
        number = getattr(error, "errno", None) or 0
        why = os.strerror(number) if number > 0 else getattr(error, "strerror", None) or error
        raise UserError(f"endpoint {host}:{port}: {why}; choose an address of this host and a free port") from None


def _path(request: HttpRequest) -> bytes:
    path = re.sub(rb"^https?://[^/?]*", b"", request.target).partition(b"?")[0]
    if (methods := ROUTES.get(path)) is None:
        shown = path[:60].decode("ascii", "backslashreplace")
        raise HttpError(404, f"no {shown} here; there are {', '.join(known.decode() for known in ROUTES)}")
    if request.method not in methods:
        allowed = b", ".join(methods).decode()
        why = f"{path.decode()} does not take {request.method.decode()}; it takes {allowed}"
        raise HttpError(405, why, f"Allow: {allowed}\r\n".encode())
    return path


def _samples(body: bytearray, most: int) -> list[dict[str, Any]]:
    try:
        said = JSON_DECODER.decode(body.decode())
    except (ValueError, RecursionError) as error:
        raise HttpError(400, f"the body is no JSON: {error}") from None
    if not isinstance(said, dict):
        raise HttpError(400, f"the body is no JSON object; {EXPECTED_BODY}")
    for key in said:
        if key != "samples":
            raise HttpError(400, f"unknown key {json.dumps(key[:60])}{did_you_mean(key[:60], ['samples'])}")
    if "samples" not in said:
        raise HttpError(400, f'the body lacks "samples"; {EXPECTED_BODY}')
    if not (samples := said["samples"]) or not isinstance(samples, list):
        raise HttpError(400, f'"samples" is no list of one sample or more; {EXPECTED_BODY}')
    for at, sample in enumerate(samples):
        if not isinstance(sample, dict):
            raise HttpError(400, f"sample {at} is no JSON object; {EXPECTED_BODY}")
    if len(samples) > most:
        raise HttpError(413, f"{len(samples):,} samples; send {most:,} at once at most")
    return samples


def _encoded(value: Mapping[str, Any]) -> bytes:
    return JSON_ENCODER.encode(value).encode()


def _finite(text: str) -> float:
    if math.isinf(number := float(text)):
        raise ValueError(f"{text[:60]} is beyond what a number can be")
    return number


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")


JSON_DECODER = json.JSONDecoder(parse_float=_finite, parse_constant=_no_constant)
JSON_ENCODER = json.JSONEncoder(allow_nan=False, separators=(",", ":"))

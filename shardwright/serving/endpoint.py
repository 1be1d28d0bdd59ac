"""The HTTP endpoint of a predictor: POST /predict, GET /health, GET /metrics.

One thread runs one event loop. In each iteration of the loop, connections queue the requests that have arrived; then
the queue is processed in groups, in order of arrival: a group is decoded, scored as one batch, and answered. Concurrent
clients thus share the cost of a model call, a single client never waits for a batch to fill, and memory holds at most
one group of decoded requests, which are many times larger than their bytes.
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
BACKLOG = 512  # connections that the kernel queues before they are accepted
DEADLINE_CHECKS_PER_TIMEOUT = 8
MAX_SECONDS_BETWEEN_CHECKS = 1.0
SECONDS_BETWEEN_DRAIN_CHECKS = 0.01  # during shutdown: whether all connections are closed
MAX_ERROR_CHARACTERS = 1000  # of a UserError in a response; names in it are cut to 60
MAX_INTERNAL_ERROR_CHARACTERS = 300  # of any other exception in a response
GET_METHODS = (b"GET", b"HEAD")
ROUTES = MappingProxyType({b"/predict": (b"POST",), b"/health": GET_METHODS, b"/metrics": GET_METHODS})
EXPECTED_BODY = 'wanted {"samples": [{...}, ...]}'
PROMETHEUS_CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"

ScorerState = Mapping[str, float | int | str]


class Scorer(Protocol):
    """Interface of the model behind an endpoint, such as `Predictor`."""

    def answer(self, samples: Sequence[Mapping[str, Any]]) -> tuple[int, list[Any]]:
        """Return the model's training step and a score per sample, or a dict of scores by task.

        Raises UserError if a sample is invalid.
        """
        ...

    def state(self) -> ScorerState:
        """The state that /health and /metrics report; "status" is "ok" or describes a problem."""
        ...


class Endpoint:
    """HTTP server, bound by its constructor. `run` serves until `stop` or an interrupt; then call `close`."""

    def __init__(self, scorer: Scorer, host: str = "127.0.0.1", port: int = 0, limits: Limits = DEFAULT_LIMITS) -> None:
        self._scorer = scorer
        self._limits = limits
        self._metrics = EndpointMetrics()
        self._queue: deque[HttpRequest] = deque()  # not yet answered
        self._is_traceback_printed = False  # in this iteration of the loop
        self._server: asyncio.Server | None = None
        self._socket = _bind_socket(host, port)
        ip, bound_port = self._socket.getsockname()[:2]
        self.address = f"http://[{ip}]:{bound_port}" if ":" in ip else f"http://{ip}:{bound_port}"
        self._loop = asyncio.new_event_loop()
        self._state = ServerState(limits, self._enqueue, self._loop.time)

    def run(self) -> None:
        """Serve until `stop` or KeyboardInterrupt, then finish the requests in flight."""
        serving = self._loop.create_server(lambda: HttpConnection(self._state), sock=self._socket, backlog=BACKLOG)
        self._server = self._loop.run_until_complete(serving)
        self._check_clients()
        try:
            if self._state.is_closing:
                self._drain()
            self._loop.run_forever()
        except KeyboardInterrupt:
            self._loop.call_soon(self._process_queue)  # continues after the interrupt
            self._begin_shutdown()
            self._loop.run_forever()

    def stop(self) -> None:
        """Finish the requests in flight, then let `run` return. May be called from any thread."""
        with suppress(RuntimeError):  # already closed
            self._loop.call_soon_threadsafe(self._begin_shutdown)

    def close(self) -> None:
        """Release the socket and all connections, after `run` has returned or if it was never called."""
        if self._loop.is_closed():
            return
        self._socket.close()
        for connection in tuple(self._state.connections):
            connection.abort()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_until_complete(asyncio.sleep(0))
        self._loop.close()

    def _enqueue(self, request: HttpRequest) -> None:
        if not self._queue:
            self._loop.call_soon(self._process_queue)
        self._queue.append(request)

    def _process_queue(self) -> None:
        """Answer all queued requests. GET responses are computed once per call."""
        start, self._is_traceback_printed = self._loop.time(), False
        get_responses: dict[bytes, HttpResponse] = {}
        while self._queue:
            self._process_group(get_responses)
        self._metrics.observe_turn(self._loop.time() - start)

    def _process_group(self, get_responses: dict[bytes, HttpResponse]) -> None:
        group = self._next_group(get_responses)
        self._score([request for request in group if request.response is None])
        now = self._loop.time()
        for _ in group:
            self._send_response(self._queue.popleft(), now)

    def _next_group(self, get_responses: dict[bytes, HttpResponse]) -> list[HttpRequest]:
        """Decode requests from the head of the queue, up to the limits of a batch; they stay in the queue."""
        group: list[HttpRequest] = []
        size = num = 0
        for request in self._queue:
            size += len(request.body)
            if group and size > self._limits.max_body_bytes:
                break
            self._decode(request, get_responses)
            num += len(request.samples)
            if group and num > self._limits.max_samples:
                break
            group.append(request)
        return group

    def _send_response(self, request: HttpRequest, now: float) -> None:
        keep_alive = request.keep_alive and not self._state.is_closing
        assert request.response is not None
        self._state.pending_body_bytes -= len(request.body)
        self._metrics.count_request(request.response.code, None if request.error else now - request.arrival_time)
        try:
            request.connection.send_response(request.response.encode(keep_alive, request.method == b"HEAD"), keep_alive)
        except BaseException as error:  # closing is safer: the client may have half a response, or miss one in order
            request.connection.abort()
            if not isinstance(error, Exception):
                raise
            self._print_traceback(error)

    def _decode(self, request: HttpRequest, get_responses: dict[bytes, HttpResponse]) -> None:
        """Set the samples of a request, or its response if it has none to score; no-op if already decoded."""
        if request.response is None and not request.samples:
            try:
                self._route(request, get_responses)
            except Exception as error:
                request.response = self._error_response(error)

    def _route(self, request: HttpRequest, get_responses: dict[bytes, HttpResponse]) -> None:
        if request.error is not None:
            raise request.error
        path = _parse_path(request)
        if path == b"/predict":
            request.samples = _parse_samples(request.body, self._limits.max_samples)
            return
        if path not in get_responses:
            get_responses[path] = self._health_response() if path == b"/health" else self._metrics_response()
        request.response = get_responses[path]

    def _health_response(self) -> HttpResponse:
        state = self._scorer.state()
        return HttpResponse(200 if state.get("status") == "ok" else 503, _encode_json(dict(state)))

    def _metrics_response(self) -> HttpResponse:
        return HttpResponse(200, self._metrics.exposition_text(self._scorer.state()).encode(), PROMETHEUS_CONTENT_TYPE)

    def _score(self, group: list[HttpRequest]) -> None:
        """Score requests as one batch; on an error, bisect it, so that only the invalid request fails."""
        try:
            if group:
                self._score_batch(group)
            return
        except Exception as error:
            if len(group) == 1:
                group[0].response = self._error_response(error)
                return
        middle = len(group) // 2
        self._score(group[:middle])
        self._score(group[middle:])

    def _score_batch(self, group: list[HttpRequest]) -> None:
        samples = [sample for request in group for sample in request.samples]
        step, scores = self._scorer.answer(samples)
        if len(scores) != len(samples):
            raise RuntimeError(f"{len(scores)} scores for {len(samples)} samples")
        start = 0
        responses = []
        for request in group:
            end = start + len(request.samples)
            responses.append(HttpResponse(200, _encode_json({"step": step, "scores": scores[start:end]})))
            start = end
        for request, response in zip(group, responses, strict=True):
            request.response = response
        self._metrics.observe_batch(len(samples))

    def _error_response(self, error: Exception) -> HttpResponse:
        if isinstance(error, HttpError):
            return HttpResponse(error.code, _encode_json({"error": str(error)}), extra_headers=error.extra_headers)
        if isinstance(error, UserError):
            return HttpResponse(400, _encode_json({"error": str(error)[:MAX_ERROR_CHARACTERS]}))
        self._print_traceback(error)
        line = " ".join(f"{type(error).__name__}: {error}".split())
        return HttpResponse(500, _encode_json({"error": line[:MAX_INTERNAL_ERROR_CHARACTERS]}))

    def _print_traceback(self, error: Exception) -> None:
        """Print the first error of this iteration of the loop: an invalid batch may cause many."""
        if not self._is_traceback_printed:
            self._is_traceback_printed = True
            traceback.print_exception(error, file=sys.stderr)

    def _check_clients(self) -> None:
        """Check the deadlines of all connections; schedules itself again."""
        now = self._loop.time()
        for connection in tuple(self._state.connections):
            connection.check_deadline(now)
        limit = min(self._limits.request_seconds, self._limits.idle_seconds)
        self._loop.call_later(min(limit / DEADLINE_CHECKS_PER_TIMEOUT, MAX_SECONDS_BETWEEN_CHECKS), self._check_clients)

    def _begin_shutdown(self) -> None:
        if not self._state.is_closing:
            self._state.is_closing = True
            if self._server is not None:
                self._drain()

    def _drain(self) -> None:
        assert self._server is not None
        self._server.close()
        for connection in tuple(self._state.connections):
            connection.close_if_idle()
        self._stop_when_drained(self._loop.time() + self._limits.request_seconds)

    def _stop_when_drained(self, deadline: float) -> None:
        """Stop the loop when all connections are closed or at the deadline; until then schedule itself again."""
        if not self._state.connections or self._loop.time() > deadline:
            self._loop.stop()
        else:
            self._loop.call_later(SECONDS_BETWEEN_DRAIN_CHECKS, self._stop_when_drained, deadline)


def _bind_socket(host: str, port: int) -> socket.socket:
    if not 0 <= port < 1 << 16:  # the resolver would truncate it
        raise UserError(f"endpoint {host}:{port}: no such port; choose one from 0 (any free port) to 65535")
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address, family=family)
    except (OSError, UnicodeError) as error:
        errno = getattr(error, "errno", None) or 0
        reason = os.strerror(errno) if errno > 0 else getattr(error, "strerror", None) or error
        raise UserError(f"endpoint {host}:{port}: {reason}; choose an address of this host and a free port") from None


def _parse_path(request: HttpRequest) -> bytes:
    """The path of a request; raises HttpError if path or method is not in `ROUTES`."""
    path = re.sub(rb"^https?://[^/?]*", b"", request.target).partition(b"?")[0]
    if (methods := ROUTES.get(path)) is None:
        name = path[:60].decode("ascii", "backslashreplace")
        raise HttpError(404, f"no path {name}; allowed: {', '.join(route.decode() for route in ROUTES)}")
    if request.method not in methods:
        allowed = b", ".join(methods).decode()
        reason = f"{path.decode()} does not support {request.method.decode()}; allowed: {allowed}"
        raise HttpError(405, reason, f"Allow: {allowed}\r\n".encode())
    return path


def _parse_samples(body: bytearray, max_samples: int) -> list[dict[str, Any]]:
    try:
        content = JSON_DECODER.decode(body.decode())
    except (ValueError, RecursionError) as error:
        raise HttpError(400, f"the body is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise HttpError(400, f"the body is not a JSON object; {EXPECTED_BODY}")
    for key in content:
        if key != "samples":
            raise HttpError(400, f"unknown key {json.dumps(key[:60])}{did_you_mean(key[:60], ['samples'])}")
    if "samples" not in content:
        raise HttpError(400, f'the body lacks "samples"; {EXPECTED_BODY}')
    if not (samples := content["samples"]) or not isinstance(samples, list):
        raise HttpError(400, f'"samples" is not a list of one or more samples; {EXPECTED_BODY}')
    for index, sample in enumerate(samples):
        if not isinstance(sample, dict):
            raise HttpError(400, f"sample {index} is not a JSON object; {EXPECTED_BODY}")
    if len(samples) > max_samples:
        raise HttpError(413, f"{len(samples):,} samples; send at most {max_samples:,} per request")
    return samples


def _encode_json(value: Mapping[str, Any]) -> bytes:
    return JSON_ENCODER.encode(value).encode()


def _parse_finite(text: str) -> float:
    if math.isinf(number := float(text)):
        raise ValueError(f"{text[:60]} is too large for a 64-bit float")
    return number


def _reject_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


JSON_DECODER = json.JSONDecoder(parse_float=_parse_finite, parse_constant=_reject_constant)
JSON_ENCODER = json.JSONEncoder(allow_nan=False, separators=(",", ":"))

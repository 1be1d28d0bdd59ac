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

from shardwright.errors import UserError, nearest
from shardwright.serving.http_connection import Client, Limits, Refusal, Reply, Request, Room
from shardwright.serving.prometheus import Meters

LIMITS = Limits()
BACKLOG = 512  # connections that the system keeps until they are accepted
LOOKS = 8  # at each client, in the time it has
SECONDS_BETWEEN_LOOKS = 1.0  # at most
SECONDS_BETWEEN_CHECKS = 0.01  # of whether all have left
MOST_TOLD = 1000  # characters of an error; 60 of a name
MOST_SHOWN = 300  # of one that is not ours
GET = (b"GET", b"HEAD")
METHODS = MappingProxyType({b"/predict": (b"POST",), b"/health": GET, b"/metrics": GET})
WANTED = 'wanted {"samples": [{...}, ...]}'
PROMETHEUS = b"text/plain; version=0.0.4; charset=utf-8"

State = Mapping[str, float | int | str]


class Scorer(Protocol):
    """What answers behind an endpoint."""

    def answer(self, samples: Sequence[Mapping[str, Any]]) -> tuple[int, list[float]]:
        """The step of the model that answered, and a score per sample; UserError says what is wrong with one."""
        ...

    def state(self) -> State:
        """JSON values; "status" is "ok" or what is wrong."""
        ...


class Endpoint:
    """Bound from when it is made; `run` serves until `stop` or KeyboardInterrupt; then `close`."""

    def __init__(self, scorer: Scorer, host: str = "127.0.0.1", port: int = 0, limits: Limits = LIMITS) -> None:
        self._scorer = scorer
        self._limits = limits
        self._meters = Meters()
        self._queue: deque[Request] = deque()  # until they are answered
        self._told = False  # the traceback of this turn
        self._server: asyncio.Server | None = None
        self._socket = _bound(host, port)
        at, number = self._socket.getsockname()[:2]
        self.address = f"http://[{at}]:{number}" if ":" in at else f"http://{at}:{number}"
        self._loop = asyncio.new_event_loop()
        self._room = Room(limits, self._take, self._loop.time)

    def run(self) -> None:
        serving = self._loop.create_server(lambda: Client(self._room), sock=self._socket, backlog=BACKLOG)
        self._server = self._loop.run_until_complete(serving)
        self._look()
        try:
            if self._room.closing:
                self._drain()
            self._loop.run_forever()
        except KeyboardInterrupt:
            self._loop.call_soon(self._answer_all)  # what it broke off
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
        for client in tuple(self._room.present):
            client.abort()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_until_complete(asyncio.sleep(0))
        self._loop.close()

    def _take(self, request: Request) -> None:
        if not self._queue:
            self._loop.call_soon(self._answer_all)
        self._queue.append(request)

    def _answer_all(self) -> None:
        begun, self._told = self._loop.time(), False
        known: dict[bytes, Reply] = {}
        while self._queue:
            self._answer_some(known)
        self._meters.turn(self._loop.time() - begun)

    def _answer_some(self, known: dict[bytes, Reply]) -> None:
        group = self._group(known)
        self._score([request for request in group if request.reply is None])
        now = self._loop.time()
        for _ in group:
            self._answer(self._queue.popleft(), now)

    def _group(self, known: dict[bytes, Reply]) -> list[Request]:
        """The next in the queue, as many as may be decoded and scored at once."""
        group: list[Request] = []
        size = num = 0
        for request in self._queue:
            size += len(request.body)
            if group and size > self._limits.body_bytes:
                break
            self._read(request, known)
            num += len(request.samples)
            if group and num > self._limits.samples:
                break
            group.append(request)
        return group

    def _answer(self, request: Request, now: float) -> None:
        keep = request.keep and not self._room.closing
        assert request.reply is not None
        self._room.held -= len(request.body)
        self._meters.request(request.reply.code, None if request.refusal else now - request.arrived)
        try:
            request.client.answer(request.reply.message(keep, request.method == b"HEAD"), keep)
        except BaseException as error:  # half an answer, or one at another's place, is worse than none
            request.client.abort()
            if not isinstance(error, Exception):
                raise
            self._tell(error)

    def _read(self, request: Request, known: dict[bytes, Reply]) -> None:
        """The reply to a request, or what it wants scored, unless it was read before."""
        if request.reply is None and not request.samples:
            try:
                self._decode(request, known)
            except Exception as error:
                request.reply = self._wrong(error)

    def _decode(self, request: Request, known: dict[bytes, Reply]) -> None:
        if request.refusal is not None:
            raise request.refusal
        path = _path(request)
        if path == b"/predict":
            request.samples = _samples(request.body, self._limits.samples)
            return
        if path not in known:
            known[path] = self._health() if path == b"/health" else self._counts()
        request.reply = known[path]

    def _health(self) -> Reply:
        state = self._scorer.state()
        return Reply(200 if state.get("status") == "ok" else 503, _encoded(dict(state)))

    def _counts(self) -> Reply:
        return Reply(200, self._meters.text(self._scorer.state()).encode(), PROMETHEUS)

    def _score(self, group: list[Request]) -> None:
        try:
            if group:
                self._score_at_once(group)
            return
        except Exception as error:
            if len(group) == 1:
                group[0].reply = self._wrong(error)
                return
        middle = len(group) // 2  # nobody has the error of another
        self._score(group[:middle])
        self._score(group[middle:])

    def _score_at_once(self, group: list[Request]) -> None:
        samples = [sample for request in group for sample in request.samples]
        step, scores = self._scorer.answer(samples)
        if len(scores) != len(samples):
            raise RuntimeError(f"{len(scores)} scores for {len(samples)} samples")
        start = 0
        replies = []
        for request in group:
            end = start + len(request.samples)
            replies.append(Reply(200, _encoded({"step": step, "scores": scores[start:end]})))
            start = end
        for request, reply in zip(group, replies, strict=True):
            request.reply = reply
        self._meters.batch(len(samples))

    def _wrong(self, error: Exception) -> Reply:
        if isinstance(error, Refusal):
            return Reply(error.code, _encoded({"error": str(error)}), more=error.more)
        if isinstance(error, UserError):
            return Reply(400, _encoded({"error": str(error)[:MOST_TOLD]}))
        self._tell(error)
        line = " ".join(f"{type(error).__name__}: {error}".split())
        return Reply(500, _encoded({"error": line[:MOST_SHOWN]}))

    def _tell(self, error: Exception) -> None:
        if not self._told:
            self._told = True
            traceback.print_exception(error, file=sys.stderr)

    def _look(self) -> None:
        now = self._loop.time()
        for client in tuple(self._room.present):
            client.look(now)
        least = min(self._limits.request_seconds, self._limits.idle_seconds)
        self._loop.call_later(min(least / LOOKS, SECONDS_BETWEEN_LOOKS), self._look)

    def _end(self) -> None:
        if not self._room.closing:
            self._room.closing = True
            if self._server is not None:
                self._drain()

    def _drain(self) -> None:
        assert self._server is not None
        self._server.close()
        for client in tuple(self._room.present):
            client.send_home()
        self._await_all(self._loop.time() + self._limits.request_seconds)

    def _await_all(self, until: float) -> None:
        if not self._room.present or self._loop.time() > until:
            self._loop.stop()
        else:
            self._loop.call_later(SECONDS_BETWEEN_CHECKS, self._await_all, until)


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


def _path(request: Request) -> bytes:
    path = re.sub(rb"^https?://[^/?]*", b"", request.target).partition(b"?")[0]
    if (methods := METHODS.get(path)) is None:
        shown = path[:60].decode("ascii", "backslashreplace")
        raise Refusal(404, f"no {shown} here; there are {', '.join(known.decode() for known in METHODS)}")
    if request.method not in methods:
        allowed = b", ".join(methods).decode()
        why = f"{path.decode()} does not take {request.method.decode()}; it takes {allowed}"
        raise Refusal(405, why, f"Allow: {allowed}\r\n".encode())
    return path


def _samples(body: bytearray, most: int) -> list[dict[str, Any]]:
    try:
        said = JSON.decode(body.decode())
    except (ValueError, RecursionError) as error:
        raise Refusal(400, f"the body is no JSON: {error}") from None
    if not isinstance(said, dict):
        raise Refusal(400, f"the body is no JSON object; {WANTED}")
    for key in said:
        if key != "samples":
            raise Refusal(400, f"unknown key {json.dumps(key[:60])}{nearest(key[:60], ['samples'])}")
    if "samples" not in said:
        raise Refusal(400, f'the body lacks "samples"; {WANTED}')
    if not (samples := said["samples"]) or not isinstance(samples, list):
        raise Refusal(400, f'"samples" is no list of one sample or more; {WANTED}')
    for at, sample in enumerate(samples):
        if not isinstance(sample, dict):
            raise Refusal(400, f"sample {at} is no JSON object; {WANTED}")
    if len(samples) > most:
        raise Refusal(413, f"{len(samples):,} samples; send {most:,} at once at most")
    return samples


def _encoded(value: Mapping[str, Any]) -> bytes:
    return PLAIN.encode(value).encode()


def _finite(text: str) -> float:
    if math.isinf(number := float(text)):
        raise ValueError(f"{text[:60]} is beyond what a number can be")
    return number


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")


JSON = json.JSONDecoder(parse_float=_finite, parse_constant=_no_constant)
PLAIN = json.JSONEncoder(allow_nan=False, separators=(",", ":"))

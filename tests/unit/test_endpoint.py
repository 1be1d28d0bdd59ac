"""The endpoint: each request has its own answer, what is wrong is told in one line, and nothing ends or stalls it."""

import contextlib
import http.client
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.data.features.transforms import Encoding, Transforms
from shardwright.data.logs.schema import Schema
from shardwright.errors import UserError
from shardwright.serving.endpoint import DEFAULT_LIMITS, Endpoint, Limits
from shardwright.serving.http_connection import READ_BYTES, HttpConnection, HttpRequest
from shardwright.serving.prometheus import Histogram
from shardwright.serving.request_ids import parse_id_samples

SOON = 10.0  # seconds in which anything must have happened
QUICK = replace(DEFAULT_LIMITS, request_seconds=0.4, idle_seconds=0.8)


@dataclass
class Doubling:
    """The score of a sample is twice its x; waits for `gate` before it answers, where that is closed."""

    gate: threading.Event = field(default_factory=threading.Event)
    entered: threading.Event = field(default_factory=threading.Event)
    calls: list[int] = field(default_factory=list)
    told: dict[str, float | int | str] = field(default_factory=lambda: {"status": "ok", "step": 7, "age seconds": 0.5})

    def __post_init__(self) -> None:
        self.gate.set()

    def answer(self, samples: Sequence[Mapping[str, Any]]) -> tuple[int, list[float]]:
        self.entered.set()
        assert self.gate.wait(SOON)
        self.calls.append(len(samples))
        for sample in samples:
            if "x" not in sample:
                raise UserError(f'a sample lacks "x"; it has {", ".join(sample)}')
            if sample["x"] == "bug":
                raise KeyError("two\nlines")
            if sample["x"] == "short":
                return 7, []
        return 7, [float("nan") if sample["x"] == "nan" else 2.0 * sample["x"] for sample in samples]

    def state(self) -> Mapping[str, float | int | str]:
        if "bug" in self.told:
            raise OSError("no state")
        return self.told


@dataclass
class Served:
    endpoint: Endpoint
    scorer: Doubling
    thread: threading.Thread

    @property
    def place(self) -> tuple[str, int]:
        host, port = self.endpoint.address.removeprefix("http://").rsplit(":", 1)
        return host.strip("[]"), int(port)

    def connect(self) -> socket.socket:
        return socket.create_connection(self.place, timeout=SOON)

    def ask(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        connection = http.client.HTTPConnection(*self.place, timeout=SOON)
        with contextlib.closing(connection):
            connection.request(method, path, body if body is None or isinstance(body, bytes) else json.dumps(body))
            answer = connection.getresponse()
            said = answer.read()
            return answer.status, json.loads(said) if answer.headers["content-type"] == "application/json" else said

    def scores(self, *xs: Any) -> tuple[int, Any]:
        return self.ask("POST", "/predict", {"samples": [{"x": x} for x in xs]})

    def end(self) -> None:
        self.endpoint.stop()
        self.thread.join(SOON)
        assert not self.thread.is_alive()


@contextmanager
def serving(limits: Limits = DEFAULT_LIMITS, host: str = "127.0.0.1") -> Iterator[Served]:
    scorer = Doubling()
    endpoint = Endpoint(scorer, host, limits=limits)
    thread = threading.Thread(target=endpoint.run)
    thread.start()
    served = Served(endpoint, scorer, thread)
    try:
        yield served
    finally:
        scorer.gate.set()
        served.end()
        endpoint.close()
        endpoint.close()
        endpoint.stop()


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving() as made:
        yield made


def post(body: Any, *headers: str, version: str = "1.1") -> bytes:
    said = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = [f"POST /predict HTTP/{version}", "Host: here", f"Content-Length: {len(said)}", *headers, "", ""]
    return "\r\n".join(head).encode() + said


def samples(*xs: Any) -> dict[str, Any]:
    return {"samples": [{"x": x} for x in xs]}


@dataclass
class Answer:
    code: int
    head: str
    body: bytes

    @property
    def said(self) -> Any:
        return json.loads(self.body)


def answers(raw: bytes) -> list[Answer]:
    """Those in what came from a server; whatever is none fails."""
    found = []
    while raw:
        head, end, rest = raw.partition(b"\r\n\r\n")
        match = re.fullmatch(r"HTTP/1\.1 (\d{3}) [A-Z][\w ,'-]+(\r\n.*)?", head.decode(), re.DOTALL)
        assert end and match, raw
        length = re.search(r"Content-Length: (\d+)", match[2] or "")
        num = int(length[1]) if length else 0
        assert len(rest) >= num
        found.append(Answer(int(match[1]), match[2] or "", rest[:num]))
        raw = rest[num:]
    return found


class Aside(HttpConnection):
    """What an endpoint says to it, without a connection; `fault` is raised in its place."""

    def __init__(self, endpoint: Endpoint, fault: BaseException | None = None) -> None:
        super().__init__(endpoint._state)
        self.fault = fault
        self.told: list[Answer] = []
        self.aborted = False

    def asked(self, body: bytes) -> HttpRequest:
        self._state.pending_body_bytes += len(body)
        return HttpRequest(self, 0.0, True, b"POST", b"/predict", bytearray(body))

    def send_response(self, message: bytes, keep: bool) -> None:
        if self.fault is not None:
            raise self.fault
        self.told += answers(message)

    def abort(self) -> None:
        self.aborted = True


def all_of(connection: socket.socket) -> bytes:
    """Until the other side ends."""
    parts = []
    with contextlib.suppress(ConnectionResetError):
        while part := connection.recv(1 << 16):
            parts.append(part)
    return b"".join(parts)


def read(connection: socket.socket, num: int) -> list[Answer]:
    """The next answers; none is begun beyond them."""
    raw = b""
    while True:
        part = connection.recv(1 << 16)
        assert part, raw
        raw += part
        with contextlib.suppress(AssertionError):
            if len(found := answers(raw)) >= num:
                assert len(found) == num
                return found


def exchange(served: Served, raw: bytes, end: bool = True) -> list[Answer]:
    """Everything a server says to this, until it closes."""
    with served.connect() as connection:
        connection.sendall(raw)
        if end:
            connection.shutdown(socket.SHUT_WR)
        return answers(all_of(connection))


def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + SOON
    while not true():
        assert time.monotonic() < end
        time.sleep(0.005)


# What is asked rightly


def test_scores_in_order(served: Served) -> None:
    assert served.scores(1, 2.5, -3) == (200, {"step": 7, "scores": [2.0, 5.0, -6.0]})
    assert served.ask("GET", "/health?a=b") == (200, {"status": "ok", "step": 7, "age seconds": 0.5})
    absolute = b"GET http://here:1/health HTTP/1.1\r\nHost: here\r\n\r\n"
    assert [answer.code for answer in exchange(served, absolute)] == [200]


def test_what_comes_in_one_turn_is_scored_at_once() -> None:
    """Held in a first call, 40 clients gather; each has the answer to what it asked, and the wrong ones theirs."""
    with serving(replace(DEFAULT_LIMITS, max_samples=64)) as served, ThreadPoolExecutor(41) as clients:
        served.scorer.gate.clear()
        first = clients.submit(served.scores, 1)
        assert served.scorer.entered.wait(SOON)
        asked = [[at, at + 0.5, -at] for at in range(40)]
        rest = [clients.submit(served.scores, *xs) for xs in asked]
        time.sleep(0.5)  # until all lie before the server
        served.scorer.gate.set()
        assert first.result() == (200, {"step": 7, "scores": [2.0]})
        for xs, answer in zip(asked, rest, strict=True):
            assert answer.result() == (200, {"step": 7, "scores": [2.0 * x for x in xs]})
        assert served.scorer.calls[0] == 1 and sum(served.scorer.calls) == 121
        assert len(served.scorer.calls) < 10 and max(served.scorer.calls) == 63, served.scorer.calls


def test_only_the_wrong_one_is_refused(capfd: pytest.CaptureFixture[str]) -> None:
    with serving() as served:
        bodies = [samples(1), {"samples": [{"y": 1}]}, samples(2), samples(3, "bug"), samples("nan"), samples(4)]
        with served.connect() as connection:
            connection.sendall(b"".join(map(post, bodies)))
            found = read(connection, 6)
        assert [answer.code for answer in found] == [200, 400, 200, 500, 500, 200]
        assert [answer.said["scores"] for answer in found if answer.code == 200] == [[2.0], [4.0], [8.0]]
        assert found[1].said == {"error": 'a sample lacks "x"; it has y'}
        assert found[3].said == {"error": "KeyError: 'two\\nlines'"}
        assert "not JSON compliant" in found[4].said["error"]
        code, said = served.ask("POST", "/predict", {"samples": [{"y" * 100_000: 1}]})
        assert code == 400 and said["error"].startswith("a sample lacks") and len(said["error"]) <= 1000
        assert served.scores("short") == (500, {"error": "RuntimeError: 0 scores for 1 samples"})
        assert served.scores(5) == (200, {"step": 7, "scores": [10.0]})
    told = capfd.readouterr().err
    assert told.count("Traceback") == 2, told
    assert "KeyError" in told and "RuntimeError" in told


def test_one_wrong_request_does_not_undo_the_batch() -> None:
    """Its group is split in halves; what is counted is what was answered, once."""
    endpoint = Endpoint(scorer := Doubling())
    with contextlib.closing(endpoint):
        for wrong, code in (("a", 500), ("nan", 500)):
            clients = [Aside(endpoint) for _ in range(101)]
            for at, client in enumerate(clients):
                endpoint._enqueue(client.asked(json.dumps(samples(wrong if at == 60 else at)).encode()))
            scorer.calls.clear()
            endpoint._process_queue()
            assert [client.told[0].code for client in clients] == [200] * 60 + [code] + [200] * 40
            assert len(scorer.calls) <= 15, scorer.calls
        found = endpoint._metrics.exposition_text({})
        assert "shardwright_samples_total 200\n" in found and "shardwright_batch_samples_sum 200.0\n" in found
        assert endpoint._state.pending_body_bytes == 0


@pytest.mark.parametrize("fault", [KeyboardInterrupt(), RuntimeError("a bug")])
def test_an_answer_that_fails_is_the_only_one(fault: BaseException, capfd: pytest.CaptureFixture[str]) -> None:
    endpoint = Endpoint(scorer := Doubling())
    with contextlib.closing(endpoint):
        clients = [Aside(endpoint), Aside(endpoint, fault), Aside(endpoint)]
        for client in clients:
            endpoint._enqueue(client.asked(json.dumps(samples(1)).encode()))
        interrupt = isinstance(fault, KeyboardInterrupt)
        with pytest.raises(KeyboardInterrupt) if interrupt else contextlib.nullcontext():
            endpoint._process_queue()
        endpoint._process_queue()
        assert [len(client.told) for client in clients] == [1, 0, 1] and scorer.calls == [3]
        assert [client.aborted for client in clients] == [False, True, False]
    assert capfd.readouterr().err.count("Traceback") == (not interrupt)


def test_health_and_its_lack(capfd: pytest.CaptureFixture[str]) -> None:
    with serving() as served:
        served.scorer.told["status"] = "no publication for 60 s"
        assert served.ask("GET", "/health") == (503, served.scorer.told)
        served.scorer.told["bug"] = 1
        for path in ("/health", "/metrics"):
            assert served.ask("GET", path) == (500, {"error": "OSError: no state"})
        assert served.scores(1)[0] == 200
    assert capfd.readouterr().err.count("Traceback") == 2


def test_metrics() -> None:
    with serving() as served:
        served.scorer.told |= {"late": float("inf"), "applied": True}
        served.scores(1, 2, 3)
        served.scores(*range(100))
        served.ask("GET", "/none")
        assert exchange(served, b"\0", end=False)[0].code == 400
        code, text = served.ask("GET", "/metrics")
        assert code == 200 and text.endswith(b"\n")
        found: dict[str, float] = {}
        kinds: dict[str, str] = {}
        for line in text.decode().splitlines():
            if line.startswith("# TYPE"):
                _, _, name, kind = line.split()
                assert kinds.setdefault(name, kind) == kind
            elif not line.startswith("# HELP"):
                match = re.fullmatch(r'([a-z_]+(?:\{(?:code|le)="[\d.e+-]+(?:Inf)?"\}|\{le="\+Inf"\})?) (\S+)', line)
                assert match and match[1] not in found, line
                found[match[1]] = float(match[2])
                assert any(match[1].startswith(name) for name in kinds)
    assert found['shardwright_requests_total{code="200"}'] == 2
    assert found['shardwright_requests_total{code="404"}'] == 1
    assert found["shardwright_samples_total"] == 103
    assert found['shardwright_batch_samples_bucket{le="2"}'] == 0
    assert found['shardwright_batch_samples_bucket{le="4"}'] == 1
    assert found['shardwright_batch_samples_bucket{le="+Inf"}'] == 2
    assert found["shardwright_batch_samples_sum"] == 103
    assert found["shardwright_request_seconds_count"] == 3 and 0 < found["shardwright_request_seconds_sum"] < SOON
    assert found['shardwright_requests_total{code="400"}'] == 1, "and not among the seconds, which it did not take"
    assert found["shardwright_turn_seconds_count"] == 4 and 0 < found["shardwright_turn_seconds_sum"] < SOON
    assert (found["shardwright_step"], found["shardwright_age_seconds"]) == (7, 0.5)
    assert (found["shardwright_late"], found["shardwright_applied"]) == (float("inf"), 1)
    assert kinds["shardwright_request_seconds"] == "histogram" and kinds["shardwright_step"] == "gauge"


@given(st.lists(st.floats(0, 10)))
def test_a_histogram_counts(values: list[float]) -> None:
    histogram = Histogram((1, 2.5, 9))
    for value in values:
        histogram.observe(value)
    counts = [float(line.split()[-1]) for line in histogram.exposition_lines("a")]
    expected = [sum(value <= edge for value in values) for edge in (1, 2.5, 9, 10)]
    assert counts == pytest.approx([*expected, sum(values), len(values)])


# Connections


def test_pipelined_requests_are_answered_in_order(served: Served) -> None:
    health = b"GET /health HTTP/1.1\r\nHost: here\r\n\r\n"
    head = b"HEAD /health HTTP/1.1\r\nHost: here\r\n\r\n"
    wrong = b"GET /none HTTP/1.1\r\nHost: here\r\n\r\n"
    raw = b"".join(post(samples(at)) + (health, wrong)[at % 2] for at in range(300))
    for size in (len(raw), 1000, 7):
        with served.connect() as connection, ThreadPoolExecutor(1) as aside:
            coming = aside.submit(read, connection, 600)
            for start in range(0, len(raw), size):
                connection.sendall(raw[start : start + size])
            found = coming.result()
        assert [answer.code for answer in found] == [200, 200, 200, 404] * 150
        assert [answer.said["scores"] for answer in found[::2]] == [[2.0 * at] for at in range(300)]
    with served.connect() as connection:
        connection.sendall(head)
        said = connection.recv(1 << 16)
        assert said.startswith(b"HTTP/1.1 200 OK") and said.endswith(b"\r\n\r\n") and b"Content-Length: 42" in said
        connection.sendall(post(samples(1)))
        assert read(connection, 1)[0].said["scores"] == [2.0]


def test_a_connection_lasts_as_long_as_it_should(served: Served) -> None:
    with served.connect() as connection:
        for at in range(5):
            connection.sendall(post(samples(at)))
            [answer] = read(connection, 1)
            assert answer.said["scores"] == [2.0 * at] and "Connection: keep-alive" in answer.head
    for raw in (
        post(samples(1), "Connection: close") + post(samples(2)),
        post(samples(1), version="1.0") + post(samples(2), version="1.0"),
    ):
        [answer] = exchange(served, raw, end=False)
        assert answer.said["scores"] == [2.0] and "Connection: close" in answer.head
    old = post(samples(1), "Connection: keep-alive", version="1.0")
    assert [answer.code for answer in exchange(served, old * 2)] == [200, 200]
    half = exchange(served, post(samples(1)) + post(samples(2))[:-3])
    assert [answer.code for answer in half] == [200]


def chunked(*parts: bytes) -> bytes:
    head = b"POST /predict HTTP/1.1\r\nHost: here\r\nTransfer-Encoding: chunked\r\n\r\n"
    return head + b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (*parts, b""))


def test_chunked_bodies(served: Served) -> None:
    body = json.dumps(samples(1, 2)).encode()
    for parts in ([body], [body[:7], body[7:]], [body[at : at + 1] for at in range(len(body))]):
        found = exchange(served, chunked(*parts) + post(samples(3)))
        assert [answer.said["scores"] for answer in found] == [[2.0, 4.0], [6.0]]
    with_trailer = chunked(body).removesuffix(b"\r\n") + b"A-Trailer: 1\r\n\r\n"
    assert [answer.code for answer in exchange(served, with_trailer * 2)] == [200, 200]


def test_a_body_that_waits_to_be_asked_for(served: Served) -> None:
    raw = post(samples(1), "Expect: 100-continue")
    head, _, body = raw.partition(b"\r\n\r\n")
    with served.connect() as connection:
        for before in (b"", post(samples(2))):
            connection.sendall(before + head + b"\r\n\r\n")
            assert [answer.code for answer in read(connection, 1 + bool(before))][-1] == 100
            connection.sendall(body)
            assert read(connection, 1)[0].said["scores"] == [2.0]
    [answer] = exchange(served, post(samples(1), "Expect: tea"), end=False)
    assert answer.code == 417


def test_an_offer_of_another_protocol_is_passed_over(served: Served) -> None:
    """As Java's and curl's clients make with their first request."""
    offer = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAAQAAP__")
    raw = post(samples(1), *offer) + post(samples(2), *offer) + post(samples(3))
    raw += b"GET /health HTTP/1.1\r\nHost: here\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n" + post(samples(4))
    for size in (len(raw), 1):
        with served.connect() as connection:
            for start in range(0, len(raw), size):
                connection.sendall(raw[start : start + size])
            found = read(connection, 5)
        assert [answer.said.get("scores") for answer in found] == [[2.0], [4.0], [6.0], None, [8.0]]
    [answer] = exchange(served, b"CONNECT here:80 HTTP/1.1\r\nHost: here\r\n\r\nmore", end=False)
    assert answer.code == 405


def test_who_goes_away_harms_nobody(served: Served) -> None:
    for raw in (b"", b"P", post(samples(1))[:-1], post(samples(1)), post(samples(1)) * 50, b"\0"):
        for linger in (b"\0" * 8, b"\1\0\0\0\0\0\0\0"):  # closed, or reset
            connection = served.connect()
            connection.sendall(raw)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            connection.close()
    assert served.scores(1)[0] == 200


def test_answers_that_nobody_takes_are_not_piled_up() -> None:
    """The server stops reading, ends the connection in time, and serves others meanwhile."""
    with serving(QUICK) as served, served.connect() as stuck:
        stuck.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 12)
        stuck.settimeout(0.1)
        sent = 0
        with contextlib.suppress(TimeoutError, ConnectionError):
            while sent < 1 << 26:
                sent += stuck.send(b"GET /metrics HTTP/1.1\r\nHost: here\r\n\r\n" * 100)
        assert sent < 1 << 26
        assert served.scores(1)[0] == 200
        until(lambda: not served.endpoint._state.connections)


def test_a_connection_idles_after_a_large_answer() -> None:
    """As long as after a small one."""
    with serving(replace(DEFAULT_LIMITS, request_seconds=0.5, idle_seconds=SOON)) as served, socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 12)
        slow.settimeout(SOON)
        slow.connect(served.place)
        slow.sendall(b"GET /metrics HTTP/1.1\r\nHost: here\r\n\r\n" * 3000)
        lines = 5 * 3000  # of their heads
        while lines:
            assert (part := slow.recv(1 << 20))
            lines -= part.count(b"\r")
        time.sleep(0.8)
        slow.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while slow.recv(1 << 20):
                pass
        slow.settimeout(SOON)
        slow.sendall(post(samples(1)))
        assert read(slow, 1)[0].code == 200


def test_connections_are_capped() -> None:
    with serving(replace(DEFAULT_LIMITS, max_connections=2)) as served:
        with served.connect() as one, served.connect() as two:
            for connection in (one, two):
                connection.sendall(post(samples(1)))
                assert read(connection, 1)[0].code == 200
            [answer] = exchange(served, post(samples(1)), end=False)
            assert answer.code == 503 and "Retry-After" in answer.head and "2 connections" in answer.said["error"]
            with served.connect() as third:
                third.settimeout(0.1)
                with pytest.raises(TimeoutError):  # what nobody asked for would be a fault
                    third.recv(1)
                third.sendall(b"\0")
                until(lambda: third.recv(1 << 16) == b"")
                two.sendall(b"\0")
                assert read(two, 1)[0].code == 400
                with served.connect() as fourth:  # two lie refused, and do not count
                    fourth.sendall(post(samples(1)))
                    assert read(fourth, 1)[0].code == 200
            one.sendall(post(samples(1)))
            assert read(one, 1)[0].code == 200
        until(lambda: not served.endpoint._state.connections)
        assert served.scores(1)[0] == 200


# What is asked wrongly


@pytest.mark.parametrize(
    ("body", "code", "message"),
    [
        (b"", 400, "not JSON: Expecting value"),
        (b"{", 400, "not JSON"),
        (b"\xff\xfe", 400, "not JSON: 'utf-8' codec"),
        (b"[" * 100_000, 400, "not JSON: .*recursion"),
        (b'{"samples": [{"x": NaN}]}', 400, "NaN is not a JSON number"),
        (b'{"samples": [{"x": -Infinity}]}', 400, "-Infinity is not a JSON number"),
        (b'{"samples": [{"x": 1e999}]}', 400, "1e999 is too large for a 64-bit float"),
        (b'{"samples": [{"x": ' + b"1" * 5000 + b"}]}", 400, "not JSON"),
        (b"[]", 400, "not a JSON object; wanted"),
        (b"{}", 400, 'lacks "samples"; wanted'),
        (b'{"samples": {"x": 1}}', 400, '"samples" is not a list'),
        (b'{"samples": []}', 400, '"samples" is not a list of one or more'),
        (b'{"samples": [{"x": 1}, 2]}', 400, "sample 1 is not a JSON object"),
        (b'{"samples": [{"x": 1}], "sample": 1}', 400, 'unknown key "sample"; did you mean "samples"'),
        (b'{"samples": [{"x": 1}], "a\\nb\\ud800": 1}', 400, r'unknown key "a\\nb\\ud800"; allowed: samples'),
        (json.dumps(samples(*range(4097))).encode(), 413, "4,097 samples; send at most 4,096 per request"),
    ],
)
def test_a_wrong_body(served: Served, body: bytes, code: int, message: str) -> None:
    with served.connect() as connection:
        connection.sendall(post(body) + post(samples(1)))
        wrong, right = read(connection, 2)
        assert wrong.code == code and list(wrong.said) == ["error"]
        assert re.search(message, wrong.said["error"]) and "\n" not in wrong.said["error"], wrong.said
        assert right.said["scores"] == [2.0], "the connection goes on"


def test_a_long_key_is_cut() -> None:
    """Before it is looked up, which would take longer than the length, and before it is told."""
    transforms = Transforms(Schema(label="click", categories=("site",)), Encoding(rows=9), {}, {})
    wrong: list[Callable[[str], object]] = [
        lambda name: transforms.encode_samples([{name: 1}]),
        lambda name: parse_id_samples(("site",), 0, [{name: 1}]),
        lambda name: parse_id_samples(("site",), 0, [{"ids": {name: 1}}]),
    ]
    for ask in wrong:
        with pytest.raises(UserError, match='unknown (key|feature) "a{60}"; allowed: ') as error:
            ask("a" * 1_000_000)
        assert len(str(error.value)) < 200


def test_a_wrong_place(served: Served) -> None:
    assert served.ask("GET", "/") == (404, {"error": "no path /; allowed: /predict, /health, /metrics"})
    assert served.ask("POST", "/predict/", b"x")[0] == 404
    for method, path, allow in (("GET", "/predict", "POST"), ("POST", "/health", "GET, HEAD")):
        raw = f"{method} {path} HTTP/1.1\r\nHost: here\r\nContent-Length: 0\r\n\r\n".encode()
        [answer] = exchange(served, raw)
        assert answer.code == 405 and f"\r\nAllow: {allow}\r\n" in answer.head
        assert answer.said["error"] == f"{path} does not support {method}; allowed: {allow}"


@pytest.mark.parametrize(
    ("raw", "code", "message"),
    [
        (b"\0", 400, "not an HTTP/1.1 request: "),
        (b"hello\r\n\r\n", 400, "not an HTTP/1.1 request: "),
        (b"GET /health\r\n\r\n", 505, "HTTP/0.9 is not supported"),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400, "not an HTTP/1.1 request: "),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400, "not an HTTP/1.1 request: "),
        (post(b"{}", "Content-Length: 3"), 400, "Content-Length"),
        (post(b"{}", "Transfer-Encoding: chunked"), 400, "Transfer-Encoding"),
        (chunked()[:-5] + b"zz\r\n", 400, "chunk size"),
        (b"GET / HTTP/1.1\r\nA: " + b"a" * 70_000 + b"\r\n\r\n", 431, "headers of more than 65,536"),
        (b"GET / HTTP/1.1\r\nA: " + b"a" * (READ_BYTES * 4), 431, "headers of more than 65,536"),
        (b"GET /" + b"a" * 70_000, 431, "headers of more than 65,536"),
        (b"GET / HTTP/1.1\r\n" + b"A: a\r\n" * 40_000, 431, "headers of more than 65,536"),
        (chunked()[:-2] + b"A: " + b"a" * (READ_BYTES * 4), 431, "headers of more than 65,536"),
        (b"\r\n" * READ_BYTES * 2, 431, "headers of more than 65,536"),
        (post(b"").replace(b": 0", b": 4194305"), 413, "body of more than 4,194,304"),
        (post(b"", "Expect: 100-continue").replace(b": 0", b": 99999999"), 413, "body of more than"),
        (chunked(*[b"a" * (1 << 20)] * 5), 413, "body of more than 4,194,304"),
    ],
)
def test_what_is_no_request(served: Served, raw: bytes, code: int, message: str) -> None:
    before, answer = exchange(served, post(samples(1)) + raw, end=False)
    assert before.said["scores"] == [2.0]
    assert answer.code == code and "Connection: close" in answer.head
    assert re.search(message, answer.said["error"]) and "\n" not in answer.said["error"], answer.said
    assert served.scores(1)[0] == 200


def test_a_body_at_the_limit(served: Served) -> None:
    body = json.dumps(samples(1)).encode()
    assert served.ask("POST", "/predict", body + b" " * ((4 << 20) - len(body)))[0] == 200


def test_what_all_hold_has_a_limit() -> None:
    """Of bodies as they come, given back whatever becomes of them, and of what is decoded at once."""
    body = json.dumps(samples(1)).encode().ljust(40_000)
    with serving(replace(DEFAULT_LIMITS, max_body_bytes=100_000, max_pending_body_bytes=150_000)) as served:
        room = served.endpoint._state
        with served.connect() as one, served.connect() as two:
            for connection in (one, two):
                connection.sendall(post(body + b" " * 30_000)[:-1])
            until(lambda: room.pending_body_bytes > 130_000)
            refused = served.ask("POST", "/predict", body)
            assert refused == (503, {"error": "too many bytes of pending requests; try again later"})
            one.sendall(b" ")
            assert read(one, 1)[0].code == 200
            assert served.ask("POST", "/predict", body)[0] == 200
            assert not any(client._body for client in room.connections if not client._in_request), "kept while it idles"
        until(lambda: not room.connections)
        assert room.pending_body_bytes == 0
        served.scorer.calls.clear()
        clients = [Aside(served.endpoint) for _ in range(5)]
        requests = [client.asked(body) for client in clients]
        served.endpoint._loop.call_soon_threadsafe(lambda: [served.endpoint._enqueue(request) for request in requests])
        until(lambda: all(client.told for client in clients))
        assert served.scorer.calls == [2, 2, 1] and room.pending_body_bytes == 0


def test_a_slow_client_and_a_silent_one() -> None:
    with serving(QUICK) as served:
        for raw in (b"P", post(samples(1))[:30], post(samples(1))[:-1], chunked(b"{}")[:-3]):
            start = time.monotonic()
            [answer] = exchange(served, raw, end=False)
            assert answer.code == 408 and "no complete request within 0.4 s" in answer.said["error"]
            assert 0.3 < time.monotonic() - start < 2
        for raw, num in ((b"", 0), (post(samples(1)), 1)):
            start = time.monotonic()
            assert len(exchange(served, raw, end=False)) == num
            assert 0.7 < time.monotonic() - start < 2
        with served.connect() as trickling:
            start = time.monotonic()
            with contextlib.suppress(ConnectionError):
                for at in range(200):
                    trickling.sendall(post(samples(1))[at : at + 1])
                    time.sleep(0.02)
            assert time.monotonic() - start < 3, "it was cut off"
        assert served.scores(1)[0] == 200


# From its beginning to its end


def test_what_is_under_way_is_finished() -> None:
    with serving() as served, served.connect() as idle, served.connect() as halfway, served.connect() as asking:
        for connection in (idle, halfway):
            connection.sendall(post(samples(1)))
            assert read(connection, 1)[0].code == 200
        raw = post(samples(2))
        halfway.sendall(raw[:-5])
        served.scorer.entered.clear()
        served.scorer.gate.clear()
        asking.sendall(post(samples(3)))
        assert served.scorer.entered.wait(SOON)
        served.endpoint.stop()
        served.endpoint.stop()
        served.scorer.gate.set()
        assert [answer.said["scores"] for answer in answers(all_of(asking))] == [[6.0]]
        assert all_of(idle) == b""
        with pytest.raises(ConnectionRefusedError):
            served.connect()
        halfway.sendall(raw[-5:])
        [answer] = answers(all_of(halfway))
        assert answer.said["scores"] == [4.0] and "Connection: close" in answer.head
        served.end()


def test_an_end_does_not_wait_for_ever() -> None:
    with serving(QUICK) as served, served.connect() as stuck:
        stuck.sendall(b"P")
        until(lambda: bool(served.endpoint._state.connections))
        served.end()


def test_stopped_before_it_runs_and_never_run() -> None:
    endpoint = Endpoint(Doubling())
    endpoint.stop()
    endpoint.run()
    endpoint.close()
    Endpoint(Doubling()).close()


INTERRUPTED = """
import signal, sys, time
from test_endpoint import Doubling, Endpoint
class Slow(Doubling):
    def answer(self, samples):
        print("asked", flush=True)
        time.sleep(0.3)
        return super().answer(samples)
endpoint = Endpoint(Slow())
print(endpoint.address, flush=True)
endpoint.run()
endpoint.close()
print("done")
"""


def test_an_interrupt_ends_it_in_peace() -> None:
    """In the midst of a call too, whose clients are still answered."""
    place = {"cwd": Path(__file__).parent, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen([sys.executable, "-c", INTERRUPTED], **place)
    assert process.stdout is not None
    host, port = process.stdout.readline().strip().removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=SOON) as connection:
        connection.sendall(post(samples(3)))
        assert process.stdout.readline() == "asked\n"
        process.send_signal(signal.SIGINT)
        [answer] = answers(all_of(connection))
        assert answer.said["scores"] == [6.0]
    said, told = process.communicate(timeout=SOON)
    assert (process.returncode, said, told) == (0, "asked\ndone\n", "")


def test_addresses() -> None:
    if socket.has_ipv6:
        with serving(host="::1") as served:
            assert served.endpoint.address.startswith("http://[::1]:")
            assert served.scores(1)[0] == 200
    with serving(host="localhost") as served:
        assert served.scores(1)[0] == 200
        with pytest.raises(UserError, match="in use; choose an address of this host and a free port"):
            Endpoint(served.scorer, *served.place)
    for host, port in (
        ("256.1.1.1", 0),
        ("a..b", 0),
        ("", 0),
        ("192.0.2.1", 0),
        ("127.0.0.1", 99999),
        ("127.0.0.1", -1),
    ):
        with pytest.raises(UserError, match=rf"^endpoint {host}:{port}: [^)]*\)?; choose (an address of|one from 0)"):
            Endpoint(Doubling(), host, port)


PIECES = (
    post(samples(1)),
    chunked(b"{}", b"abc"),
    b"GET /health HTTP/1.1\r\nHost: here\r\n\r\n",
    b"GET /metrics HTTP/1.0\r\n\r\n",
    b"HTTP/1.1",
    b"Content-Length: 5\r\n",
    b"Connection: upgrade\r\nUpgrade: a\r\n",
    b"Expect: 100-continue\r\n",
    b"\r\n",
)


@settings(max_examples=200)
@given(st.lists(st.one_of(st.binary(max_size=40), st.sampled_from(PIECES)), max_size=8), st.integers(0, 300))
def test_any_bytes(served: Served, pieces: list[bytes], cut: int) -> None:
    """Each connection ends with whole answers, and the next one is served."""
    raw = b"".join(pieces)
    with served.connect() as connection:
        with contextlib.suppress(ConnectionError):
            connection.sendall(raw[:cut])
            connection.sendall(raw[cut:])
        with contextlib.suppress(OSError):  # where it is closed already
            connection.shutdown(socket.SHUT_WR)
        answers(all_of(connection))
    assert exchange(served, post(samples(4)))[0].said["scores"] == [8.0]
    room = served.endpoint._state
    until(lambda: room.pending_body_bytes == 0 and room.admitted_connections <= room.connections)


@settings(max_examples=300)
@given(
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(("samples", "x", "a")) | st.text(), inner),
    )
)
def test_any_json(served: Served, value: Any) -> None:
    [answer] = exchange(served, post(value))
    right = isinstance(value, dict) and isinstance(value.get("samples"), list) and "x" in str(value)
    assert answer.code in ((400, 500, 200) if right else (400,)), answer
    assert list(answer.said) in (["error"], ["step", "scores"])

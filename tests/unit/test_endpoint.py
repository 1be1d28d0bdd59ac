"""The endpoint: every request gets its answer, errors are one line, and no client can stop or stall the server."""

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

TIMEOUT = 10.0  # seconds, for anything that a test waits for
SHORT_LIMITS = replace(DEFAULT_LIMITS, request_seconds=0.4, idle_seconds=0.8)


@dataclass
class DoublingScorer:
    """The score of a sample is twice its x. If `gate` is closed, waits for it before answering."""

    gate: threading.Event = field(default_factory=threading.Event)
    entered: threading.Event = field(default_factory=threading.Event)
    calls: list[int] = field(default_factory=list)
    info: dict[str, float | int | str] = field(default_factory=lambda: {"status": "ok", "step": 7, "age seconds": 0.5})

    def __post_init__(self) -> None:
        self.gate.set()

    def answer(self, samples: Sequence[Mapping[str, Any]]) -> tuple[int, list[float]]:
        self.entered.set()
        assert self.gate.wait(TIMEOUT)
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
        if "bug" in self.info:
            raise OSError("no state")
        return self.info


@dataclass
class RunningEndpoint:
    endpoint: Endpoint
    scorer: DoublingScorer
    thread: threading.Thread

    @property
    def address(self) -> tuple[str, int]:
        host, port = self.endpoint.address.removeprefix("http://").rsplit(":", 1)
        return host.strip("[]"), int(port)

    def connect(self) -> socket.socket:
        return socket.create_connection(self.address, timeout=TIMEOUT)

    def request(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        connection = http.client.HTTPConnection(*self.address, timeout=TIMEOUT)
        with contextlib.closing(connection):
            connection.request(method, path, body if body is None or isinstance(body, bytes) else json.dumps(body))
            response = connection.getresponse()
            content = response.read()
            is_json = response.headers["content-type"] == "application/json"
            return response.status, json.loads(content) if is_json else content

    def scores(self, *xs: Any) -> tuple[int, Any]:
        return self.request("POST", "/predict", {"samples": [{"x": x} for x in xs]})

    def stop(self) -> None:
        self.endpoint.stop()
        self.thread.join(TIMEOUT)
        assert not self.thread.is_alive()


@contextmanager
def serving(limits: Limits = DEFAULT_LIMITS, host: str = "127.0.0.1") -> Iterator[RunningEndpoint]:
    scorer = DoublingScorer()
    endpoint = Endpoint(scorer, host, limits=limits)
    thread = threading.Thread(target=endpoint.run)
    thread.start()
    served = RunningEndpoint(endpoint, scorer, thread)
    try:
        yield served
    finally:
        scorer.gate.set()
        served.stop()
        endpoint.close()
        endpoint.close()
        endpoint.stop()


@pytest.fixture(scope="module")
def served() -> Iterator[RunningEndpoint]:
    with serving() as endpoint:
        yield endpoint


def post(body: Any, *headers: str, version: str = "1.1") -> bytes:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = [f"POST /predict HTTP/{version}", "Host: here", f"Content-Length: {len(content)}", *headers, "", ""]
    return "\r\n".join(head).encode() + content


def samples(*xs: Any) -> dict[str, Any]:
    return {"samples": [{"x": x} for x in xs]}


@dataclass
class Answer:
    code: int
    head: str
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


def parse_answers(raw: bytes) -> list[Answer]:
    """The answers in a server's bytes; fails if any bytes are not an answer."""
    answers = []
    while raw:
        head, separator, rest = raw.partition(b"\r\n\r\n")
        match = re.fullmatch(r"HTTP/1\.1 (\d{3}) [A-Z][\w ,'-]+(\r\n.*)?", head.decode(), re.DOTALL)
        assert separator and match, raw
        length = re.search(r"Content-Length: (\d+)", match[2] or "")
        length_ = int(length[1]) if length else 0
        assert len(rest) >= length_
        answers.append(Answer(int(match[1]), match[2] or "", rest[:length_]))
        raw = rest[length_:]
    return answers


class FakeConnection(HttpConnection):
    """Records the endpoint's answers without a socket; if there is a `fault`, sending raises it."""

    def __init__(self, endpoint: Endpoint, fault: BaseException | None = None) -> None:
        super().__init__(endpoint._state)
        self.fault = fault
        self.received: list[Answer] = []
        self.aborted = False

    def make_request(self, body: bytes) -> HttpRequest:
        self._state.pending_body_bytes += len(body)
        return HttpRequest(self, 0.0, True, b"POST", b"/predict", bytearray(body))

    def send_response(self, message: bytes, keep: bool) -> None:
        if self.fault is not None:
            raise self.fault
        self.received += parse_answers(message)

    def abort(self) -> None:
        self.aborted = True


def receive_all(connection: socket.socket) -> bytes:
    """Receive until the other side closes the connection."""
    parts = []
    with contextlib.suppress(ConnectionResetError):
        while part := connection.recv(1 << 16):
            parts.append(part)
    return b"".join(parts)


def receive(connection: socket.socket, num: int) -> list[Answer]:
    """Receive exactly the next `num` answers; fails if the server sends more."""
    raw = b""
    while True:
        part = connection.recv(1 << 16)
        assert part, raw
        raw += part
        with contextlib.suppress(AssertionError):
            if len(answers := parse_answers(raw)) >= num:
                assert len(answers) == num
                return answers


def exchange(served: RunningEndpoint, raw: bytes, half_close: bool = True) -> list[Answer]:
    """Send raw bytes and return all answers until the server closes the connection."""
    with served.connect() as connection:
        connection.sendall(raw)
        if half_close:
            connection.shutdown(socket.SHUT_WR)
        return parse_answers(receive_all(connection))


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


# Valid requests


def test_scores_are_in_the_order_of_the_samples(served: RunningEndpoint) -> None:
    assert served.scores(1, 2.5, -3) == (200, {"step": 7, "scores": [2.0, 5.0, -6.0]})
    assert served.request("GET", "/health?a=b") == (200, {"status": "ok", "step": 7, "age seconds": 0.5})
    absolute = b"GET http://here:1/health HTTP/1.1\r\nHost: here\r\n\r\n"
    assert [answer.code for answer in exchange(served, absolute)] == [200]


def test_requests_that_arrive_together_are_scored_in_one_batch() -> None:
    """While the first call is blocked, 40 clients send requests; then each gets the answer to its own request."""
    with serving(replace(DEFAULT_LIMITS, max_samples=64)) as served, ThreadPoolExecutor(41) as clients:
        served.scorer.gate.clear()
        first = clients.submit(served.scores, 1)
        assert served.scorer.entered.wait(TIMEOUT)
        requests = [[i, i + 0.5, -i] for i in range(40)]
        pending = [clients.submit(served.scores, *xs) for xs in requests]
        time.sleep(0.5)  # until all requests have arrived
        served.scorer.gate.set()
        assert first.result() == (200, {"step": 7, "scores": [2.0]})
        for xs, answer in zip(requests, pending, strict=True):
            assert answer.result() == (200, {"step": 7, "scores": [2.0 * x for x in xs]})
        assert served.scorer.calls[0] == 1 and sum(served.scorer.calls) == 121
        assert len(served.scorer.calls) < 10 and max(served.scorer.calls) == 63, served.scorer.calls


def test_only_the_invalid_request_of_a_batch_is_refused(capfd: pytest.CaptureFixture[str]) -> None:
    with serving() as served:
        bodies = [samples(1), {"samples": [{"y": 1}]}, samples(2), samples(3, "bug"), samples("nan"), samples(4)]
        with served.connect() as connection:
            connection.sendall(b"".join(map(post, bodies)))
            answers = receive(connection, 6)
        assert [answer.code for answer in answers] == [200, 400, 200, 500, 500, 200]
        assert [answer.json["scores"] for answer in answers if answer.code == 200] == [[2.0], [4.0], [8.0]]
        assert answers[1].json == {"error": 'a sample lacks "x"; it has y'}
        assert answers[3].json == {"error": "KeyError: 'two\\nlines'"}
        assert "not JSON compliant" in answers[4].json["error"]
        code, error = served.request("POST", "/predict", {"samples": [{"y" * 100_000: 1}]})
        assert code == 400 and error["error"].startswith("a sample lacks") and len(error["error"]) <= 1000
        assert served.scores("short") == (500, {"error": "RuntimeError: 0 scores for 1 samples"})
        assert served.scores(5) == (200, {"step": 7, "scores": [10.0]})
    stderr = capfd.readouterr().err
    assert stderr.count("Traceback") == 2, stderr
    assert "KeyError" in stderr and "RuntimeError" in stderr


def test_a_failing_request_does_not_fail_its_batch() -> None:
    """The batch is split in halves until the request is isolated; metrics count each answered sample once."""
    endpoint = Endpoint(scorer := DoublingScorer())
    with contextlib.closing(endpoint):
        for bad_x, code in (("a", 500), ("nan", 500)):
            clients = [FakeConnection(endpoint) for _ in range(101)]
            for i, client in enumerate(clients):
                endpoint._enqueue(client.make_request(json.dumps(samples(bad_x if i == 60 else i)).encode()))
            scorer.calls.clear()
            endpoint._process_queue()
            assert [client.received[0].code for client in clients] == [200] * 60 + [code] + [200] * 40
            assert len(scorer.calls) <= 15, scorer.calls
        metrics = endpoint._metrics.exposition_text({})
        assert "shardwright_samples_total 200\n" in metrics and "shardwright_batch_samples_sum 200.0\n" in metrics
        assert endpoint._state.pending_body_bytes == 0


@pytest.mark.parametrize("fault", [KeyboardInterrupt(), RuntimeError("a bug")])
def test_a_failing_answer_ends_only_its_connection(fault: BaseException, capfd: pytest.CaptureFixture[str]) -> None:
    endpoint = Endpoint(scorer := DoublingScorer())
    with contextlib.closing(endpoint):
        clients = [FakeConnection(endpoint), FakeConnection(endpoint, fault), FakeConnection(endpoint)]
        for client in clients:
            endpoint._enqueue(client.make_request(json.dumps(samples(1)).encode()))
        interrupt = isinstance(fault, KeyboardInterrupt)
        with pytest.raises(KeyboardInterrupt) if interrupt else contextlib.nullcontext():
            endpoint._process_queue()
        endpoint._process_queue()
        assert [len(client.received) for client in clients] == [1, 0, 1] and scorer.calls == [3]
        assert [client.aborted for client in clients] == [False, True, False]
    assert capfd.readouterr().err.count("Traceback") == (not interrupt)


def test_health_reports_the_state_and_its_failure(capfd: pytest.CaptureFixture[str]) -> None:
    with serving() as served:
        served.scorer.info["status"] = "no publication for 60 s"
        assert served.request("GET", "/health") == (503, served.scorer.info)
        served.scorer.info["bug"] = 1
        for path in ("/health", "/metrics"):
            assert served.request("GET", path) == (500, {"error": "OSError: no state"})
        assert served.scores(1)[0] == 200
    assert capfd.readouterr().err.count("Traceback") == 2


def test_metrics_are_in_prometheus_format() -> None:
    with serving() as served:
        served.scorer.info |= {"late": float("inf"), "applied": True}
        served.scores(1, 2, 3)
        served.scores(*range(100))
        served.request("GET", "/none")
        assert exchange(served, b"\0", half_close=False)[0].code == 400
        code, text = served.request("GET", "/metrics")
        assert code == 200 and text.endswith(b"\n")
        values: dict[str, float] = {}
        kinds: dict[str, str] = {}
        for line in text.decode().splitlines():
            if line.startswith("# TYPE"):
                _, _, name, kind = line.split()
                assert kinds.setdefault(name, kind) == kind
            elif not line.startswith("# HELP"):
                match = re.fullmatch(r'([a-z_]+(?:\{(?:code|le)="[\d.e+-]+(?:Inf)?"\}|\{le="\+Inf"\})?) (\S+)', line)
                assert match and match[1] not in values, line
                values[match[1]] = float(match[2])
                assert any(match[1].startswith(name) for name in kinds)
    assert values['shardwright_requests_total{code="200"}'] == 2
    assert values['shardwright_requests_total{code="404"}'] == 1
    assert values["shardwright_samples_total"] == 103
    assert values['shardwright_batch_samples_bucket{le="2"}'] == 0
    assert values['shardwright_batch_samples_bucket{le="4"}'] == 1
    assert values['shardwright_batch_samples_bucket{le="+Inf"}'] == 2
    assert values["shardwright_batch_samples_sum"] == 103
    assert values["shardwright_request_seconds_count"] == 3 and 0 < values["shardwright_request_seconds_sum"] < TIMEOUT
    assert values['shardwright_requests_total{code="400"}'] == 1, "counted, but without a duration"
    assert values["shardwright_turn_seconds_count"] == 4 and 0 < values["shardwright_turn_seconds_sum"] < TIMEOUT
    assert (values["shardwright_step"], values["shardwright_age_seconds"]) == (7, 0.5)
    assert (values["shardwright_late"], values["shardwright_applied"]) == (float("inf"), 1)
    assert kinds["shardwright_request_seconds"] == "histogram" and kinds["shardwright_step"] == "gauge"


@given(st.lists(st.floats(0, 10)))
def test_a_histogram_counts_values_up_to_each_edge(values: list[float]) -> None:
    histogram = Histogram((1, 2.5, 9))
    for value in values:
        histogram.observe(value)
    counts = [float(line.split()[-1]) for line in histogram.exposition_lines("a")]
    expected = [sum(value <= edge for value in values) for edge in (1, 2.5, 9, 10)]
    assert counts == pytest.approx([*expected, sum(values), len(values)])


# Connections


def test_pipelined_requests_are_answered_in_order(served: RunningEndpoint) -> None:
    health = b"GET /health HTTP/1.1\r\nHost: here\r\n\r\n"
    head = b"HEAD /health HTTP/1.1\r\nHost: here\r\n\r\n"
    not_found = b"GET /none HTTP/1.1\r\nHost: here\r\n\r\n"
    raw = b"".join(post(samples(i)) + (health, not_found)[i % 2] for i in range(300))
    for size in (len(raw), 1000, 7):
        with served.connect() as connection, ThreadPoolExecutor(1) as pool:
            pending = pool.submit(receive, connection, 600)
            for start in range(0, len(raw), size):
                connection.sendall(raw[start : start + size])
            answers = pending.result()
        assert [answer.code for answer in answers] == [200, 200, 200, 404] * 150
        assert [answer.json["scores"] for answer in answers[::2]] == [[2.0 * i] for i in range(300)]
    with served.connect() as connection:
        connection.sendall(head)
        raw = connection.recv(1 << 16)
        assert raw.startswith(b"HTTP/1.1 200 OK") and raw.endswith(b"\r\n\r\n") and b"Content-Length: 42" in raw
        connection.sendall(post(samples(1)))
        assert receive(connection, 1)[0].json["scores"] == [2.0]


def test_connections_stay_open_as_http_requires(served: RunningEndpoint) -> None:
    with served.connect() as connection:
        for i in range(5):
            connection.sendall(post(samples(i)))
            [answer] = receive(connection, 1)
            assert answer.json["scores"] == [2.0 * i] and "Connection: keep-alive" in answer.head
    for raw in (
        post(samples(1), "Connection: close") + post(samples(2)),
        post(samples(1), version="1.0") + post(samples(2), version="1.0"),
    ):
        [answer] = exchange(served, raw, half_close=False)
        assert answer.json["scores"] == [2.0] and "Connection: close" in answer.head
    http10 = post(samples(1), "Connection: keep-alive", version="1.0")
    assert [answer.code for answer in exchange(served, http10 * 2)] == [200, 200]
    answers = exchange(served, post(samples(1)) + post(samples(2))[:-3])
    assert [answer.code for answer in answers] == [200]


def chunked(*parts: bytes) -> bytes:
    head = b"POST /predict HTTP/1.1\r\nHost: here\r\nTransfer-Encoding: chunked\r\n\r\n"
    return head + b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (*parts, b""))


def test_chunked_bodies(served: RunningEndpoint) -> None:
    body = json.dumps(samples(1, 2)).encode()
    for parts in ([body], [body[:7], body[7:]], [body[i : i + 1] for i in range(len(body))]):
        answers = exchange(served, chunked(*parts) + post(samples(3)))
        assert [answer.json["scores"] for answer in answers] == [[2.0, 4.0], [6.0]]
    with_trailer = chunked(body).removesuffix(b"\r\n") + b"A-Trailer: 1\r\n\r\n"
    assert [answer.code for answer in exchange(served, with_trailer * 2)] == [200, 200]


def test_expect_100_continue(served: RunningEndpoint) -> None:
    raw = post(samples(1), "Expect: 100-continue")
    head, _, body = raw.partition(b"\r\n\r\n")
    with served.connect() as connection:
        for earlier in (b"", post(samples(2))):
            connection.sendall(earlier + head + b"\r\n\r\n")
            assert [answer.code for answer in receive(connection, 1 + bool(earlier))][-1] == 100
            connection.sendall(body)
            assert receive(connection, 1)[0].json["scores"] == [2.0]
    [answer] = exchange(served, post(samples(1), "Expect: tea"), half_close=False)
    assert answer.code == 417


def test_an_upgrade_offer_is_ignored(served: RunningEndpoint) -> None:
    """Java's and curl's clients send one with their first request."""
    offer = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAAQAAP__")
    raw = post(samples(1), *offer) + post(samples(2), *offer) + post(samples(3))
    raw += b"GET /health HTTP/1.1\r\nHost: here\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n" + post(samples(4))
    for size in (len(raw), 1):
        with served.connect() as connection:
            for start in range(0, len(raw), size):
                connection.sendall(raw[start : start + size])
            answers = receive(connection, 5)
        assert [answer.json.get("scores") for answer in answers] == [[2.0], [4.0], [6.0], None, [8.0]]
    [answer] = exchange(served, b"CONNECT here:80 HTTP/1.1\r\nHost: here\r\n\r\nmore", half_close=False)
    assert answer.code == 405


def test_a_client_that_disconnects_does_not_affect_others(served: RunningEndpoint) -> None:
    for raw in (b"", b"P", post(samples(1))[:-1], post(samples(1)), post(samples(1)) * 50, b"\0"):
        for linger in (b"\0" * 8, b"\1\0\0\0\0\0\0\0"):  # closed, or reset
            connection = served.connect()
            connection.sendall(raw)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            connection.close()
    assert served.scores(1)[0] == 200


def test_answers_to_a_client_that_does_not_read_are_limited() -> None:
    """The server stops reading from it, closes the connection after a timeout, and serves others meanwhile."""
    with serving(SHORT_LIMITS) as served, served.connect() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 12)
        client.settimeout(0.1)
        num_bytes = 0
        with contextlib.suppress(TimeoutError, ConnectionError):
            while num_bytes < 1 << 26:
                num_bytes += client.send(b"GET /metrics HTTP/1.1\r\nHost: here\r\n\r\n" * 100)
        assert num_bytes < 1 << 26
        assert served.scores(1)[0] == 200
        wait_until(lambda: not served.endpoint._state.connections)


def test_a_connection_may_idle_after_a_large_answer() -> None:
    """It may idle as long as after a small answer."""
    limits = replace(DEFAULT_LIMITS, request_seconds=0.5, idle_seconds=TIMEOUT)
    with serving(limits) as served, socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 12)
        slow.settimeout(TIMEOUT)
        slow.connect(served.address)
        slow.sendall(b"GET /metrics HTTP/1.1\r\nHost: here\r\n\r\n" * 3000)
        lines = 5 * 3000  # lines in the heads of all answers
        while lines:
            assert (part := slow.recv(1 << 20))
            lines -= part.count(b"\r")
        time.sleep(0.8)
        slow.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while slow.recv(1 << 20):
                pass
        slow.settimeout(TIMEOUT)
        slow.sendall(post(samples(1)))
        assert receive(slow, 1)[0].code == 200


def test_connections_are_capped() -> None:
    with serving(replace(DEFAULT_LIMITS, max_connections=2)) as served:
        with served.connect() as first, served.connect() as second:
            for connection in (first, second):
                connection.sendall(post(samples(1)))
                assert receive(connection, 1)[0].code == 200
            [answer] = exchange(served, post(samples(1)), half_close=False)
            assert answer.code == 503 and "Retry-After" in answer.head and "2 connections" in answer.json["error"]
            with served.connect() as third:
                third.settimeout(0.1)
                with pytest.raises(TimeoutError):  # the server sends nothing before a request
                    third.recv(1)
                third.sendall(b"\0")
                wait_until(lambda: third.recv(1 << 16) == b"")
                second.sendall(b"\0")
                assert receive(second, 1)[0].code == 400
                with served.connect() as fourth:  # the two refused connections do not count
                    fourth.sendall(post(samples(1)))
                    assert receive(fourth, 1)[0].code == 200
            first.sendall(post(samples(1)))
            assert receive(first, 1)[0].code == 200
        wait_until(lambda: not served.endpoint._state.connections)
        assert served.scores(1)[0] == 200


# Invalid requests


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
def test_an_invalid_body_is_refused(served: RunningEndpoint, body: bytes, code: int, message: str) -> None:
    with served.connect() as connection:
        connection.sendall(post(body) + post(samples(1)))
        refused, accepted = receive(connection, 2)
        assert refused.code == code and list(refused.json) == ["error"]
        assert re.search(message, refused.json["error"]) and "\n" not in refused.json["error"], refused.json
        assert accepted.json["scores"] == [2.0], "the connection stays open"


def test_a_long_key_is_truncated() -> None:
    """Truncated before the search for similar names, whose time grows faster than the length, and in the message."""
    transforms = Transforms(Schema(label="click", categories=("site",)), Encoding(rows=9), {}, {})
    calls: list[Callable[[str], object]] = [
        lambda name: transforms.encode_samples([{name: 1}]),
        lambda name: parse_id_samples(("site",), 0, [{name: 1}]),
        lambda name: parse_id_samples(("site",), 0, [{"ids": {name: 1}}]),
    ]
    for call in calls:
        with pytest.raises(UserError, match='unknown (key|feature) "a{60}"; allowed: ') as error:
            call("a" * 1_000_000)
        assert len(str(error.value)) < 200


def test_an_unknown_path_and_a_wrong_method_are_refused(served: RunningEndpoint) -> None:
    assert served.request("GET", "/") == (404, {"error": "no path /; allowed: /predict, /health, /metrics"})
    assert served.request("POST", "/predict/", b"x")[0] == 404
    for method, path, allow in (("GET", "/predict", "POST"), ("POST", "/health", "GET, HEAD")):
        raw = f"{method} {path} HTTP/1.1\r\nHost: here\r\nContent-Length: 0\r\n\r\n".encode()
        [answer] = exchange(served, raw)
        assert answer.code == 405 and f"\r\nAllow: {allow}\r\n" in answer.head
        assert answer.json["error"] == f"{path} does not support {method}; allowed: {allow}"


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
def test_malformed_requests_close_the_connection(served: RunningEndpoint, raw: bytes, code: int, message: str) -> None:
    before, answer = exchange(served, post(samples(1)) + raw, half_close=False)
    assert before.json["scores"] == [2.0]
    assert answer.code == code and "Connection: close" in answer.head
    assert re.search(message, answer.json["error"]) and "\n" not in answer.json["error"], answer.json
    assert served.scores(1)[0] == 200


def test_a_body_at_the_size_limit_is_accepted(served: RunningEndpoint) -> None:
    body = json.dumps(samples(1)).encode()
    assert served.request("POST", "/predict", body + b" " * ((4 << 20) - len(body)))[0] == 200


def test_pending_bytes_of_all_connections_are_limited() -> None:
    """The limit covers bodies while they arrive, is released in every case, and bounds the bytes decoded together."""
    body = json.dumps(samples(1)).encode().ljust(40_000)
    with serving(replace(DEFAULT_LIMITS, max_body_bytes=100_000, max_pending_body_bytes=150_000)) as served:
        state = served.endpoint._state
        with served.connect() as first, served.connect() as second:
            for connection in (first, second):
                connection.sendall(post(body + b" " * 30_000)[:-1])
            wait_until(lambda: state.pending_body_bytes > 130_000)
            refused = served.request("POST", "/predict", body)
            assert refused == (503, {"error": "too many bytes of pending requests; try again later"})
            first.sendall(b" ")
            assert receive(first, 1)[0].code == 200
            assert served.request("POST", "/predict", body)[0] == 200
            assert not any(client._body for client in state.connections if not client._in_request), "idle: no body"
        wait_until(lambda: not state.connections)
        assert state.pending_body_bytes == 0
        served.scorer.calls.clear()
        clients = [FakeConnection(served.endpoint) for _ in range(5)]
        requests = [client.make_request(body) for client in clients]
        served.endpoint._loop.call_soon_threadsafe(lambda: [served.endpoint._enqueue(request) for request in requests])
        wait_until(lambda: all(client.received for client in clients))
        assert served.scorer.calls == [2, 2, 1] and state.pending_body_bytes == 0


def test_slow_and_silent_clients_are_disconnected() -> None:
    with serving(SHORT_LIMITS) as served:
        for raw in (b"P", post(samples(1))[:30], post(samples(1))[:-1], chunked(b"{}")[:-3]):
            start = time.monotonic()
            [answer] = exchange(served, raw, half_close=False)
            assert answer.code == 408 and "no complete request within 0.4 s" in answer.json["error"]
            assert 0.3 < time.monotonic() - start < 2
        for raw, num in ((b"", 0), (post(samples(1)), 1)):
            start = time.monotonic()
            assert len(exchange(served, raw, half_close=False)) == num
            assert 0.7 < time.monotonic() - start < 2
        with served.connect() as client:
            start = time.monotonic()
            with contextlib.suppress(ConnectionError):
                for i in range(200):
                    client.sendall(post(samples(1))[i : i + 1])
                    time.sleep(0.02)
            assert time.monotonic() - start < 3, "it was disconnected"
        assert served.scores(1)[0] == 200


# Start and stop


def test_requests_in_flight_are_answered_after_stop() -> None:
    with serving() as served, served.connect() as idle, served.connect() as halfway, served.connect() as waiting:
        for connection in (idle, halfway):
            connection.sendall(post(samples(1)))
            assert receive(connection, 1)[0].code == 200
        raw = post(samples(2))
        halfway.sendall(raw[:-5])
        served.scorer.entered.clear()
        served.scorer.gate.clear()
        waiting.sendall(post(samples(3)))
        assert served.scorer.entered.wait(TIMEOUT)
        served.endpoint.stop()
        served.endpoint.stop()
        served.scorer.gate.set()
        assert [answer.json["scores"] for answer in parse_answers(receive_all(waiting))] == [[6.0]]
        assert receive_all(idle) == b""
        with pytest.raises(ConnectionRefusedError):
            served.connect()
        halfway.sendall(raw[-5:])
        [answer] = parse_answers(receive_all(halfway))
        assert answer.json["scores"] == [4.0] and "Connection: close" in answer.head
        served.stop()


def test_stop_does_not_wait_for_a_stuck_client() -> None:
    with serving(SHORT_LIMITS) as served, served.connect() as stuck:
        stuck.sendall(b"P")
        wait_until(lambda: bool(served.endpoint._state.connections))
        served.stop()


def test_an_endpoint_may_be_stopped_before_it_runs_or_never_run() -> None:
    endpoint = Endpoint(DoublingScorer())
    endpoint.stop()
    endpoint.run()
    endpoint.close()
    Endpoint(DoublingScorer()).close()


INTERRUPTED = """
import signal, sys, time
from test_endpoint import DoublingScorer, Endpoint
class SlowScorer(DoublingScorer):
    def answer(self, samples):
        print("scoring", flush=True)
        time.sleep(0.3)
        return super().answer(samples)
endpoint = Endpoint(SlowScorer())
print(endpoint.address, flush=True)
endpoint.run()
endpoint.close()
print("done")
"""


def test_an_interrupt_stops_it_without_an_error() -> None:
    """Clients of the call that was interrupted are still answered."""
    options = {"cwd": Path(__file__).parent, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen([sys.executable, "-c", INTERRUPTED], **options)
    assert process.stdout is not None
    host, port = process.stdout.readline().strip().removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=TIMEOUT) as connection:
        connection.sendall(post(samples(3)))
        assert process.stdout.readline() == "scoring\n"
        process.send_signal(signal.SIGINT)
        [answer] = parse_answers(receive_all(connection))
        assert answer.json["scores"] == [6.0]
    stdout, stderr = process.communicate(timeout=TIMEOUT)
    assert (process.returncode, stdout, stderr) == (0, "scoring\ndone\n", "")


def test_ipv6_localhost_and_invalid_addresses() -> None:
    if socket.has_ipv6:
        with serving(host="::1") as served:
            assert served.endpoint.address.startswith("http://[::1]:")
            assert served.scores(1)[0] == 200
    with serving(host="localhost") as served:
        assert served.scores(1)[0] == 200
        with pytest.raises(UserError, match="in use; choose an address of this host and a free port"):
            Endpoint(served.scorer, *served.address)
    for host, port in (
        ("256.1.1.1", 0),
        ("a..b", 0),
        ("", 0),
        ("192.0.2.1", 0),
        ("127.0.0.1", 99999),
        ("127.0.0.1", -1),
    ):
        with pytest.raises(UserError, match=rf"^endpoint {host}:{port}: [^)]*\)?; choose (an address of|one from 0)"):
            Endpoint(DoublingScorer(), host, port)


FRAGMENTS = (
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
@given(st.lists(st.one_of(st.binary(max_size=40), st.sampled_from(FRAGMENTS)), max_size=8), st.integers(0, 300))
def test_arbitrary_bytes_do_not_break_the_endpoint(served: RunningEndpoint, fragments: list[bytes], cut: int) -> None:
    """Each connection ends with complete answers, and the next connection is served."""
    raw = b"".join(fragments)
    with served.connect() as connection:
        with contextlib.suppress(ConnectionError):
            connection.sendall(raw[:cut])
            connection.sendall(raw[cut:])
        with contextlib.suppress(OSError):  # if it is closed already
            connection.shutdown(socket.SHUT_WR)
        parse_answers(receive_all(connection))
    assert exchange(served, post(samples(4)))[0].json["scores"] == [8.0]
    state = served.endpoint._state
    wait_until(lambda: state.pending_body_bytes == 0 and state.admitted_connections <= state.connections)


@settings(max_examples=300)
@given(
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(("samples", "x", "a")) | st.text(), inner),
    )
)
def test_arbitrary_json_is_answered(served: RunningEndpoint, value: Any) -> None:
    [answer] = exchange(served, post(value))
    may_be_valid = isinstance(value, dict) and isinstance(value.get("samples"), list) and "x" in str(value)
    assert answer.code in ((400, 500, 200) if may_be_valid else (400,)), answer
    assert list(answer.json) in (["error"], ["step", "scores"])

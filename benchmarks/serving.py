"""Online training and serving at once: a directory that grows, a run that trains on it and publishes, a predictor that
follows and answers over HTTP.

    python -m benchmarks.serving [--steps N] [--rounds N] [--seconds S] [--tables float16|int8] [--write NAME]

Needs wrk. As root. The trainer is kept to one core, the two servers to the other; wrk takes its time first. Rows
are made up in Criteo's format (13 numbers, 26 ids), tables are hashed to 200,000 rows each. A JSON line per case:

lag        Milliseconds from the end of a step to the first answer with its weights, half and 95 % of them; what answers
           waited.
requests   wrk over 32 connections: on a server that follows, on one that does not while the other goes on following
           (still), and on that one while the run is halted (alone), in turn: requests/s, milliseconds of half and of
           99 % of them, errors. A request asks about one sample.
malformed  Requests that are wrong in known ways, sent beside those: how many got a 4xx with one line.
agreement  At the end: the tables of a predictor that followed against those of the last checkpoint.
answer     A predictor in this process, without HTTP: microseconds for 1, 32 and 256 samples.
"""

import argparse
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from shutil import which
from statistics import median, quantiles
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from benchmarks import criteo_like, results_file
from shardwright.checkpoint.step_directories import list_checkpoints, read_manifest
from shardwright.serving.export import export_run
from shardwright.serving.predictor import Predictor

ROWS = 200_000  # of each table
EVERY = 10  # steps between publications
SECONDS_BETWEEN_FILES = 1.5
CONNECTIONS = 32
BODIES = 256
WRONG = (
    (b"{", "no JSON"),
    (b'{"samples": {}}', "samples are no list"),
    (b'{"samples": [{"C99": "a"}]}', "an unknown key"),
    (b'{"samples": [{"I1": "many"}]}', "a number that is none"),
    (b'{"sample": []}', "an unknown word"),
)
LUA = """
local bodies = {}
for line in io.lines("%s") do bodies[#bodies + 1] = line end
local at = 0
request = function()
  at = at %% #bodies + 1
  return wrk.format("POST", "/predict", {["Content-Type"] = "application/json"}, bodies[at])
end
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=900)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=int, default=8)
    parser.add_argument("--tables", default="", choices=("", "float16", "int8"))
    parser.add_argument("--write", default="")
    parser.add_argument("--smoke", action="store_true", help="the smallest case, to see that it runs")
    given = parser.parse_args()
    if given.smoke:
        given.steps, given.rounds, given.seconds = 60, 1, 1
    if not which("wrk"):
        parser.error("wrk is missing: install it")
    lines = []
    with TemporaryDirectory() as folder:
        for line in cases(Path(folder), given):
            lines.append(line | {"benchmark": "serving", "tables": given.tables or "float32"})
            print(json.dumps(lines[-1]), flush=True)
    if given.write:
        results_file.write(given.write, "serving", lines)


def cases(folder: Path, given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    bodies = folder / "bodies.txt"
    (folder / "wrk.lua").write_text(LUA % bodies)
    run, out = folder / "runs/online", folder / "served"
    with ExitStack() as stack:
        stack.enter_context(growing(folder / "incoming", bodies))
        trainer = stack.enter_context(started(trained(folder, given.steps), folder / "train.log", core=0))
        until(lambda: bool(list_checkpoints(run / "checkpoint")), trainer, folder / "train.log")
        export_run(run, out, given.tables)
        ports = {}
        for side, words in (("following", ["--follow", str(run)]), ("still", [])):
            log = folder / f"{side}.log"
            words = [*SHARDWRIGHT, "serve", str(out), "--port", "0", *words]
            server = stack.enter_context(started(words, log, core=1))
            until(lambda log=log: "serving http" in log.read_text(), server, log)
            found = re.search(r"serving http://127.0.0.1:(\d+)", log.read_text())
            assert found is not None
            ports[side] = int(found[1])
        watch = stack.enter_context(Watch(ports["following"]))
        stack.enter_context(wrong := Malformed(ports["following"]))
        yield from requests(ports, folder / "wrk.lua", given, trainer, watch)
        wrong.stop()
        trainer.wait()
        until(lambda: health(ports["following"])["step"] == given.steps, None, folder / "following.log")
        watch.stop()
        published = [read_manifest(path) for path in list_checkpoints(run / "published")[1:]]
        yield {
            "case": "lag",
            "publications": len(watch.lags),
            "lag_ms": [round(1e3 * value, 1) for value in (median(watch.lags), quantiles(watch.lags, n=20)[-1])],
            "pause_ms": [round(1e3 * value, 2) for value in (median(watch.pauses), max(watch.pauses))],
            "mb": round(median(one.bytes_ for one in published) / 1e6, 2),
            "steps_waited_ms": round(1e3 * median(one.pause_seconds for one in published), 2),
            "written_ms": round(1e3 * median(one.seconds for one in published), 1),
        }
        yield {"case": "malformed", "asked": wrong.asked, "refused": wrong.refused, "errors": sorted(wrong.errors)}
        yield agreement(run, out, folder, ports["following"], bodies, given.tables)
        yield from answers(out, bodies)


SHARDWRIGHT = (sys.executable, "-m", "shardwright.cli")


def trained(folder: Path, num: int) -> list[str]:
    keys = {
        "data.kind": "stream",
        "data.path": folder / "incoming",
        "data.schema": "criteo",
        "data.encoding.rows": ROWS,
        "data.cache": folder / "cache",
        "data.shuffle": "false",
        "data.workers": 0,
        "train.epochs": 0,
        "train.steps": num,
        "train.progressive": "true",
        "train.log_every": 50,
        "train.eval_every": 0,
        "train.eval_samples": 0,
        "train.checkpoint_every": 50,
        "train.publish_every": EVERY,
        "train.keep_publications": 10_000,  # for who comes at the end
        "run.directory": folder / "runs",
        "run.name": "online",
    }
    return [*SHARDWRIGHT, "train", "criteo-dlrm", *(f"{key}={value}" for key, value in keys.items())]


@contextmanager
def growing(folder: Path, bodies: Path) -> Iterator[None]:
    """A file more every now and then; and, before the first, what is asked about."""
    folder.mkdir()
    draw = np.random.default_rng(0)
    known = draw.integers(0, 16, (26, 200_000, 8), dtype=np.uint8)
    bodies.write_text("\n".join(asked(criteo_like.block(draw, known)[:BODIES])) + "\n")
    stopped = threading.Event()

    def grow() -> None:
        number = 0
        while True:
            hidden = folder / f".{number:06d}.tsv"
            hidden.write_bytes(criteo_like.block(draw, known).tobytes())
            hidden.rename(folder / f"{number:06d}.tsv")
            number += 1
            if stopped.wait(SECONDS_BETWEEN_FILES):
                return

    thread = threading.Thread(target=grow)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join()


def asked(text: np.ndarray) -> Iterator[str]:
    """Rows of a log as requests."""
    for row in text:
        fields = row.tobytes().decode().rstrip("\n").split("\t")[1:]
        sample: dict[str, Any] = {f"I{at}": int(value) for at, value in enumerate(fields[:13], 1)}
        sample |= {f"C{at}": value for at, value in enumerate(fields[13:], 1)}
        yield json.dumps({"samples": [sample]})


@contextmanager
def started(words: list[str], log: Path, core: int) -> Iterator[subprocess.Popen]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with log.open("w") as out:
        process = subprocess.Popen(["taskset", "-c", str(core), *words], stdout=out, stderr=out, env=environment)
    try:
        yield process
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(20)
        process.kill()


def until(true: Any, process: subprocess.Popen | None, log: Path, seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        if time.monotonic() > end or process is not None and process.poll() not in (None, 0):
            raise SystemExit(f"{log.name}: {log.read_text()[-2000:]}")
        time.sleep(0.05)


def health(port: int) -> dict[str, Any]:
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=10)) as connection:
        connection.request("GET", "/health")
        return json.loads(connection.getresponse().read())


class Watch(threading.Thread):
    """Notes the lag of every publication that a server takes."""

    def __init__(self, port: int) -> None:
        super().__init__()
        self._port, self._stopped = port, threading.Event()
        self.since = time.time()  # the run goes on without a halt
        self.lags: list[float] = []
        self.pauses: list[float] = []

    def run(self) -> None:
        before = health(self._port)["publications"]
        while not self._stopped.wait(0.02):
            found = health(self._port)
            if found["publications"] != before:
                before = found["publications"]
                if time.time() - found["publication_lag_seconds"] < self.since:
                    continue
                self.lags.append(found["publication_lag_seconds"])
                self.pauses.append(found["publication_pause_seconds"])

    def stop(self) -> None:
        self._stopped.set()
        self.join()

    def __enter__(self) -> "Watch":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


class Malformed(Watch):
    """Asks what is wrong, ten times a second."""

    asked = refused = 0

    def __init__(self, port: int) -> None:
        super().__init__(port)
        self.errors: set[str] = set()

    def run(self) -> None:
        while not self._stopped.wait(0.1):
            body, _ = WRONG[self.asked % len(WRONG)]
            with closing(http.client.HTTPConnection("127.0.0.1", self._port, timeout=10)) as connection:
                connection.request("POST", "/predict", body)
                answer = connection.getresponse()
                told = json.loads(answer.read())["error"]
            self.asked += 1
            self.refused += 400 <= answer.status < 500 and bool(told) and "\n" not in told
            self.errors.add(f"{answer.status} {told}")


def requests(
    ports: dict[str, int], script: Path, given: argparse.Namespace, trainer: subprocess.Popen, watch: "Watch"
) -> Iterator[dict[str, Any]]:
    sides = {"following": "following", "still": "still", "alone": "still"}
    found: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
    for turn in range(given.rounds):
        for side in sorted(sides, reverse=bool(turn % 2)):
            if trainer.poll() is not None:
                raise SystemExit("the run ended before the rounds did: more --steps")
            if side == "alone":
                trainer.send_signal(signal.SIGSTOP)
                time.sleep(0.5)  # what it had published is taken
            found[side].append(wrk(ports[sides[side]], script, given.seconds))
            if side == "alone":
                watch.since = time.time()
                trainer.send_signal(signal.SIGCONT)
    for side, rounds in found.items():
        line: dict[str, Any] = {"case": "requests", "side": side}
        for name in ("requests_s", "p50_ms", "p99_ms"):
            values = [one[name] for one in rounds]
            line[name] = [round(value, 2) for value in (median(values), min(values), max(values))]
        yield line | {
            "requests": sum(int(one["requests"]) for one in rounds),
            "errors": sum(o["errors"] for o in rounds),
        }


def wrk(port: int, script: Path, seconds: int) -> dict[str, float]:
    words = ["nice", "-n", "-5", "wrk", "-t1", f"-c{CONNECTIONS}", f"-d{seconds}s", "--latency", "-s", str(script)]
    told = subprocess.run([*words, f"http://127.0.0.1:{port}"], capture_output=True, text=True, check=True).stdout
    units = {"us": 1e-3, "ms": 1.0, "s": 1e3}

    def latency(share: str) -> float:
        found = re.search(rf"{share}%\s+([\d.]+)(us|ms|s)", told)
        assert found is not None, told
        return float(found[1]) * units[found[2]]

    total = re.search(r"(\d+) requests in", told)
    rate = re.search(r"Requests/sec:\s+([\d.]+)", told)
    assert total is not None and rate is not None, told
    wrong = re.search(r"Non-2xx or 3xx responses: (\d+)", told)
    broken = re.search(r"Socket errors: connect (\d+), read (\d+), write (\d+), timeout (\d+)", told)
    errors = (int(wrong[1]) if wrong else 0) + (sum(map(int, broken.groups())) if broken else 0)
    found = {"requests": float(total[1]), "requests_s": float(rate[1]), "errors": errors}
    return found | {"p50_ms": latency("50"), "p99_ms": latency("99")}


def agreement(run: Path, out: Path, folder: Path, port: int, bodies: Path, stored: str) -> dict[str, Any]:
    """The same tables and answers as an export of the last checkpoint has."""
    export_run(run, folder / "last", stored)
    last = Predictor(folder / "last")
    samples = [json.loads(line)["samples"][0] for line in bodies.read_text().splitlines()]
    with closing(Predictor(out, follow=run)) as followed:
        tables = [(followed.tables.full_table(t.name), last.tables.full_table(t.name)) for t in last.served.tables]
        with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=30)) as connection:
            connection.request("POST", "/predict", json.dumps({"samples": samples}))
            told = json.loads(connection.getresponse().read())
        step, scores = last.answer(samples)
        return {
            "case": "agreement",
            "step": [followed.step, told["step"], step],
            "tables_compared": len(tables),
            "tables_equal": sum(torch.equal(*pair) for pair in tables),
            "rows_replaced": followed.followed.rows_replaced,
            "largest_difference_of_a_score": max(abs(a - b) for a, b in zip(told["scores"], scores, strict=True)),
            "quantization": max(last.served.errors.values(), default=0.0),
        }


def answers(out: Path, bodies: Path) -> Iterator[dict[str, Any]]:
    torch.set_num_threads(1)
    found = Predictor(out)
    samples = [json.loads(line)["samples"][0] for line in bodies.read_text().splitlines()]
    for num in (1, 32, 256):
        times = []
        for _ in range(200):
            start = time.perf_counter()
            found.answer(samples[:num])
            times.append(1e6 * (time.perf_counter() - start))
        yield {"case": "answer", "samples": num, "us": [round(t) for t in (median(times), min(times), max(times))]}


if __name__ == "__main__":
    main()

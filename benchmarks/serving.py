"""Online training and serving: a run trains on a growing folder, a predictor follows it over HTTP.

    python -m benchmarks.serving [--steps N] [--rounds N] [--seconds S] [--tables float16|int8] [--write NAME]

Needs root and wrk. The trainer is pinned to one core, the two servers to the other; wrk has priority. Rows are
generated in Criteo's format (13 numbers, 26 ids); tables are hashed to 200,000 rows each. A JSON line per case:

lag        Milliseconds from the end of a step to the first answer with its weights: median and 95th percentile; how
           long answers waited for updates.
requests   wrk over 32 connections, alternating: on a server that follows ("following"), on a server that does not while
           the other follows ("still"), and on that server while the run is paused ("alone"). Requests/s, milliseconds
           at the median and the 99th percentile, errors. A request has one sample.
malformed  Known kinds of malformed requests, sent at the same time: how many got a 4xx with an error of one line.
agreement  At the end: the tables of a predictor that followed, compared with those of the last checkpoint.
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

ROWS_PER_TABLE = 200_000  # of each table
PUBLISH_EVERY = 10  # steps between publications
SECONDS_BETWEEN_FILES = 1.5
CONNECTIONS = 32
NUM_BODIES = 256
MALFORMED_BODIES = (
    (b"{", "not JSON"),
    (b'{"samples": {}}', "samples are not a list"),
    (b'{"samples": [{"C99": "a"}]}', "an unknown column"),
    (b'{"samples": [{"I1": "many"}]}', "not a number"),
    (b'{"sample": []}', "an unknown key"),
)
WRK_SCRIPT = """
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
    args = parser.parse_args()
    if args.smoke:
        args.steps, args.rounds, args.seconds = 60, 1, 1
    if not which("wrk"):
        parser.error("wrk is missing: install it")
    lines = []
    with TemporaryDirectory() as folder:
        for line in run_cases(Path(folder), args):
            lines.append(line | {"benchmark": "serving", "tables": args.tables or "float32"})
            print(json.dumps(lines[-1]), flush=True)
    if args.write:
        results_file.write(args.write, "serving", lines)


def run_cases(folder: Path, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    bodies = folder / "bodies.txt"
    (folder / "wrk.lua").write_text(WRK_SCRIPT % bodies)
    run, export = folder / "runs/online", folder / "served"
    with ExitStack() as stack:
        stack.enter_context(grow_folder(folder / "incoming", bodies))
        trainer = stack.enter_context(start_process(train_command(folder, args.steps), folder / "train.log", core=0))
        wait_until(lambda: bool(list_checkpoints(run / "checkpoint")), trainer, folder / "train.log")
        export_run(run, export, args.tables)
        ports = {}
        for side, arguments in (("following", ["--follow", str(run)]), ("still", [])):
            log = folder / f"{side}.log"
            arguments = [*SHARDWRIGHT, "serve", str(export), "--port", "0", *arguments]
            server = stack.enter_context(start_process(arguments, log, core=1))
            wait_until(lambda log=log: "serving http" in log.read_text(), server, log)
            match = re.search(r"serving http://127.0.0.1:(\d+)", log.read_text())
            assert match is not None
            ports[side] = int(match[1])
        watch = stack.enter_context(Watch(ports["following"]))
        stack.enter_context(malformed := Malformed(ports["following"]))
        yield from measure_requests(ports, folder / "wrk.lua", args, trainer, watch)
        malformed.stop()
        trainer.wait()
        wait_until(lambda: get_health(ports["following"])["step"] == args.steps, None, folder / "following.log")
        watch.stop()
        published = [read_manifest(path) for path in list_checkpoints(run / "published")[1:]]
        yield {
            "case": "lag",
            "publications": len(watch.lags),
            "lag_ms": [round(1e3 * value, 1) for value in (median(watch.lags), quantiles(watch.lags, n=20)[-1])],
            "pause_ms": [round(1e3 * value, 2) for value in (median(watch.pauses), max(watch.pauses))],
            "mb": round(median(entry.bytes_ for entry in published) / 1e6, 2),
            "steps_waited_ms": round(1e3 * median(entry.pause_seconds for entry in published), 2),
            "written_ms": round(1e3 * median(entry.seconds for entry in published), 1),
        }
        yield {
            "case": "malformed",
            "asked": malformed.num_sent,
            "refused": malformed.num_refused,
            "errors": sorted(malformed.errors),
        }
        yield compare_with_checkpoint(run, export, folder, ports["following"], bodies, args.tables)
        yield from time_answers(export, bodies)


SHARDWRIGHT = (sys.executable, "-m", "shardwright.cli")


def train_command(folder: Path, num: int) -> list[str]:
    settings = {
        "data.kind": "stream",
        "data.path": folder / "incoming",
        "data.schema": "criteo",
        "data.encoding.rows": ROWS_PER_TABLE,
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
        "train.publish_every": PUBLISH_EVERY,
        "train.keep_publications": 10_000,  # the predictor of `compare_with_checkpoint` applies all of them
        "run.directory": folder / "runs",
        "run.name": "online",
    }
    return [*SHARDWRIGHT, "train", "criteo-dlrm", *(f"{key}={value}" for key, value in settings.items())]


@contextmanager
def grow_folder(folder: Path, bodies: Path) -> Iterator[None]:
    """Write request bodies to `bodies`, then add a file to the folder every `SECONDS_BETWEEN_FILES`."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    vocabulary = rng.integers(0, 16, (26, 200_000, 8), dtype=np.uint8)
    bodies.write_text("\n".join(request_bodies(criteo_like.block(rng, vocabulary)[:NUM_BODIES])) + "\n")
    stopped = threading.Event()

    def grow() -> None:
        number = 0
        while True:
            partial = folder / f".{number:06d}.tsv"
            partial.write_bytes(criteo_like.block(rng, vocabulary).tobytes())
            partial.rename(folder / f"{number:06d}.tsv")
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


def request_bodies(text: np.ndarray) -> Iterator[str]:
    """Convert rows of a log to request bodies."""
    for row in text:
        fields = row.tobytes().decode().rstrip("\n").split("\t")[1:]
        sample: dict[str, Any] = {f"I{i}": int(value) for i, value in enumerate(fields[:13], 1)}
        sample |= {f"C{i}": value for i, value in enumerate(fields[13:], 1)}
        yield json.dumps({"samples": [sample]})


@contextmanager
def start_process(command: list[str], log: Path, core: int) -> Iterator[subprocess.Popen]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with log.open("w") as output:
        process = subprocess.Popen(
            ["taskset", "-c", str(core), *command], stdout=output, stderr=output, env=environment
        )
    try:
        yield process
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(20)
        process.kill()


def wait_until(condition: Any, process: subprocess.Popen | None, log: Path, seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline or process is not None and process.poll() not in (None, 0):
            raise SystemExit(f"{log.name}: {log.read_text()[-2000:]}")
        time.sleep(0.05)


def get_health(port: int) -> dict[str, Any]:
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=10)) as connection:
        connection.request("GET", "/health")
        return json.loads(connection.getresponse().read())


class Watch(threading.Thread):
    """Records lag and pause of every publication that a server applies."""

    def __init__(self, port: int) -> None:
        super().__init__()
        self._port, self._stopped = port, threading.Event()
        self.since = time.time()  # when the run was last resumed; earlier publications do not count
        self.lags: list[float] = []
        self.pauses: list[float] = []

    def run(self) -> None:
        num_before = get_health(self._port)["publications"]
        while not self._stopped.wait(0.02):
            state = get_health(self._port)
            if state["publications"] != num_before:
                num_before = state["publications"]
                if time.time() - state["publication_lag_seconds"] < self.since:
                    continue
                self.lags.append(state["publication_lag_seconds"])
                self.pauses.append(state["publication_pause_seconds"])

    def stop(self) -> None:
        self._stopped.set()
        self.join()

    def __enter__(self) -> "Watch":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


class Malformed(Watch):
    """Sends a malformed request ten times a second."""

    num_sent = num_refused = 0

    def __init__(self, port: int) -> None:
        super().__init__(port)
        self.errors: set[str] = set()

    def run(self) -> None:
        while not self._stopped.wait(0.1):
            body, _ = MALFORMED_BODIES[self.num_sent % len(MALFORMED_BODIES)]
            with closing(http.client.HTTPConnection("127.0.0.1", self._port, timeout=10)) as connection:
                connection.request("POST", "/predict", body)
                answer = connection.getresponse()
                error = json.loads(answer.read())["error"]
            self.num_sent += 1
            self.num_refused += 400 <= answer.status < 500 and bool(error) and "\n" not in error
            self.errors.add(f"{answer.status} {error}")


def measure_requests(
    ports: dict[str, int], script: Path, args: argparse.Namespace, trainer: subprocess.Popen, watch: "Watch"
) -> Iterator[dict[str, Any]]:
    sides = {"following": "following", "still": "still", "alone": "still"}
    results_by_side: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
    for round_ in range(args.rounds):
        for side in sorted(sides, reverse=bool(round_ % 2)):
            if trainer.poll() is not None:
                raise SystemExit("the run ended before the rounds did: raise --steps")
            if side == "alone":
                trainer.send_signal(signal.SIGSTOP)
                time.sleep(0.5)  # until its last publication is applied
            results_by_side[side].append(run_wrk(ports[sides[side]], script, args.seconds))
            if side == "alone":
                watch.since = time.time()
                trainer.send_signal(signal.SIGCONT)
    for side, rounds in results_by_side.items():
        line: dict[str, Any] = {"case": "requests", "side": side}
        for name in ("requests_s", "p50_ms", "p99_ms"):
            values = [result[name] for result in rounds]
            line[name] = [round(value, 2) for value in (median(values), min(values), max(values))]
        yield line | {
            "requests": sum(int(result["requests"]) for result in rounds),
            "errors": sum(result["errors"] for result in rounds),
        }


def run_wrk(port: int, script: Path, seconds: int) -> dict[str, float]:
    command = ["nice", "-n", "-5", "wrk", "-t1", f"-c{CONNECTIONS}", f"-d{seconds}s", "--latency", "-s", str(script)]
    output = subprocess.run([*command, f"http://127.0.0.1:{port}"], capture_output=True, text=True, check=True).stdout
    units = {"us": 1e-3, "ms": 1.0, "s": 1e3}

    def latency(share: str) -> float:
        match = re.search(rf"{share}%\s+([\d.]+)(us|ms|s)", output)
        assert match is not None, output
        return float(match[1]) * units[match[2]]

    total = re.search(r"(\d+) requests in", output)
    rate = re.search(r"Requests/sec:\s+([\d.]+)", output)
    assert total is not None and rate is not None, output
    refused = re.search(r"Non-2xx or 3xx responses: (\d+)", output)
    socket_errors = re.search(r"Socket errors: connect (\d+), read (\d+), write (\d+), timeout (\d+)", output)
    errors = (int(refused[1]) if refused else 0) + (sum(map(int, socket_errors.groups())) if socket_errors else 0)
    result = {"requests": float(total[1]), "requests_s": float(rate[1]), "errors": errors}
    return result | {"p50_ms": latency("50"), "p99_ms": latency("99")}


def compare_with_checkpoint(
    run: Path, export: Path, work_folder: Path, port: int, bodies: Path, stored: str
) -> dict[str, Any]:
    """Compare tables and answers of a predictor that followed with an export of the last checkpoint."""
    export_run(run, work_folder / "last", stored)
    last = Predictor(work_folder / "last")
    samples = [json.loads(line)["samples"][0] for line in bodies.read_text().splitlines()]
    with closing(Predictor(export, follow=run)) as followed:
        tables = [(followed.tables.full_table(t.name), last.tables.full_table(t.name)) for t in last.served.tables]
        with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=30)) as connection:
            connection.request("POST", "/predict", json.dumps({"samples": samples}))
            reply = json.loads(connection.getresponse().read())
        step, scores = last.answer(samples)
        return {
            "case": "agreement",
            "step": [followed.step, reply["step"], step],
            "tables_compared": len(tables),
            "tables_equal": sum(torch.equal(*pair) for pair in tables),
            "rows_replaced": followed.followed.rows_replaced,
            "largest_difference_of_a_score": max(abs(a - b) for a, b in zip(reply["scores"], scores, strict=True)),
            "quantization": max(last.served.errors.values(), default=0.0),
        }


def time_answers(export: Path, bodies: Path) -> Iterator[dict[str, Any]]:
    torch.set_num_threads(1)
    predictor = Predictor(export)
    samples = [json.loads(line)["samples"][0] for line in bodies.read_text().splitlines()]
    for num in (1, 32, 256):
        times = []
        for _ in range(200):
            start = time.perf_counter()
            predictor.answer(samples[:num])
            times.append(1e6 * (time.perf_counter() - start))
        yield {"case": "answer", "samples": num, "us": [round(t) for t in (median(times), min(times), max(times))]}


if __name__ == "__main__":
    main()

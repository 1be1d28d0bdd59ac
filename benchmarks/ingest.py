"""Ingestion: the combined format against a pair of tensors for each table, and readers apart from trainers.

    python -m benchmarks.ingest [--on CASE ...] [--rounds N] [--seconds S] [--write NAME]

A JSON line per side of a case: median, least and most over rounds, in which the sides take turns.

format   A batch of 500 tables in the combined format, and as ids and offsets of each table: milliseconds to make it of
         columns, to send it over a TCP connection of this host and have tensors again, to copy each tensor (to the GPU
         through pinned memory where there is one, else in memory), and the bytes and pieces of a message.
bound    As root. A job bound by ingestion, parsing text: samples/s with a worker on the trainer's host, with 1 reader
         and with 2. Emulated: hosts of 0.4 of a core each, a front-end network of 1 Gbit/s, encrypted. Target: 2
         readers give 1.8 times the samples of one.
compute  A job bound by computation, on this host: milliseconds of a step with a worker and with a reader. Target:
         within 3 %.
killed   An epoch on this host from two readers that are killed with SIGKILL ten times and started again: the digest
         over all batches against that of an undisturbed epoch, and the seconds of both.
"""

import argparse
import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import cache, partial
from itertools import islice
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from benchmarks import results_file
from shardwright.data.sources.source import NumpyBatch, splitmix64

TABLES, SAMPLES, IDS = 500, 256, 8  # of the format's batch; ids of a bag are 0 to IDS
BATCH = 1024
LINES, FIELDS = 4096, 26
CPU, FRONT = 0.4, "1gbit"
PORT = 5700
WIDTH, DEPTH = 512, 3  # of the network that computes
KILLS, BATCHES = 10, 120


@dataclass(frozen=True)
class Parsed:
    """Samples parsed of lines of text, field by field: real processor time, and the same for every batch."""

    size: int | None = None

    def take(self, indices: np.ndarray) -> NumpyBatch:
        text = lines_of_text()
        rows = [[int(field, 16) for field in text[at].split("\t")] for at in (indices % LINES).tolist()]
        table = np.array(rows, np.int64).reshape(len(indices), 1 + FIELDS)
        lengths = np.ones((FIELDS, len(indices)), np.int64)
        dense = (indices[:, None] % 97).astype(np.float32)
        values = np.ascontiguousarray(table[:, 1:].T).reshape(-1)
        return NumpyBatch(tuple(f"f{at}" for at in range(FIELDS)), values, lengths, dense, {"click": table[:, 0] % 2})


@cache
def lines_of_text() -> tuple[str, ...]:
    drawn = splitmix64(np.arange(LINES * (1 + FIELDS), dtype=np.uint64)).reshape(LINES, -1) >> 40
    return tuple("\t".join(f"{value:x}" for value in row) for row in drawn.tolist())


@dataclass(frozen=True)
class Plain:
    """Samples that cost next to nothing."""

    size: int | None = None

    def take(self, indices: np.ndarray) -> NumpyBatch:
        values = np.tile(indices, FIELDS)
        lengths = np.ones((FIELDS, len(indices)), np.int64)
        dense = np.repeat(indices[:, None] % 97, WIDTH // 4, axis=1).astype(np.float32)
        return NumpyBatch(tuple(f"f{at}" for at in range(FIELDS)), values, lengths, dense, {"click": indices % 2})


def three(values: Sequence[float], digits: int = 2) -> list[float]:
    return [round(one, digits) for one in (median(values), min(values), max(values))]


def line(case: str, side: str, **figures: Any) -> dict[str, Any]:
    return {"benchmark": "ingest", "case": case, "side": side, **figures}


# format


def of_format(rounds: int, seconds: float) -> Iterator[dict[str, Any]]:
    import torch
    import zmq

    drawn = np.random.default_rng(0)
    lengths = [drawn.integers(0, IDS + 1, SAMPLES) for _ in range(TABLES)]
    columns = [(drawn.integers(0, 1 << 20, int(of.sum())), of) for of in lengths]
    sides = {"combined": combined, "pairs": pairs}
    found: dict[str, dict[str, list[float]]] = {side: {"make": [], "send": [], "copy": []} for side in sides}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with zmq.Context() as context, context.socket(zmq.PAIR) as one, context.socket(zmq.PAIR) as other:
        one.linger = other.linger = 0
        one.bind("tcp://127.0.0.1:0")
        other.connect(one.getsockopt_string(zmq.LAST_ENDPOINT))
        told = {side: line("format", side, tables=TABLES, device=device) for side in sides}
        for turn in range(rounds + 1):  # the first warms up
            for side, make in sides.items():
                arrays, made = timed(partial(make, columns), seconds)
                tensors, sent = timed(partial(send, one, other, arrays), seconds)
                _, copied = timed(partial(copy, tensors, device), seconds)
                told[side] |= {"pieces": len(arrays), "bytes": sum(map(len, message(arrays)))}
                if turn:
                    for name, value in (("make", made), ("send", sent), ("copy", copied)):
                        found[side][name].append(1e3 * value)
    whole = {side: [sum(parts) for parts in zip(*times.values(), strict=True)] for side, times in found.items()}
    for side, times in found.items():
        ratios = [one / ours for one, ours in zip(whole[side], whole["combined"], strict=True)]
        told[side] |= {f"{name}_ms": three(values) for name, values in times.items()}
        yield told[side] | {"ms": three(whole[side]), "over_combined": three(ratios)}


def timed(call: Callable[[], Any], seconds: float) -> tuple[Any, float]:
    """What it gives, and the seconds of a call, over a total of so many or more."""
    start, calls = time.perf_counter(), 0
    while (spent := time.perf_counter() - start) < seconds / 10 or not calls:
        found = call()
        calls += 1
    return found, spent / calls


def combined(columns: list[tuple[np.ndarray, np.ndarray]]) -> list[np.ndarray]:
    return [np.concatenate([ids for ids, _ in columns]), np.stack([lengths for _, lengths in columns])]


def pairs(columns: list[tuple[np.ndarray, np.ndarray]]) -> list[np.ndarray]:
    """Ids and offsets of each table, as layers take them one by one."""
    return [array for ids, lengths in columns for array in (ids.copy(), np.concatenate([[0], lengths.cumsum()]))]


def message(arrays: list[np.ndarray]) -> list[Any]:
    head = json.dumps([(array.dtype.str, array.shape) for array in arrays]).encode()
    return [head, *(array.reshape(-1).view(np.uint8).data for array in arrays)]


def send(one: Any, other: Any, arrays: list[np.ndarray]) -> list[Any]:
    import torch

    one.send_multipart(message(arrays), copy=False)
    head, *frames = other.recv_multipart(copy=False)
    described = zip(json.loads(head.bytes), frames, strict=True)
    return [torch.from_numpy(np.ndarray(shape, dtype, frame.buffer)) for (dtype, shape), frame in described]


def copy(tensors: list[Any], device: str) -> None:
    import torch

    if device == "cpu":
        _ = [tensor.clone() for tensor in tensors]
        return
    _ = [tensor.pin_memory().to(device, non_blocking=True) for tensor in tensors]
    torch.cuda.synchronize()


# bound


def of_bound(rounds: int, seconds: float) -> Iterator[dict[str, Any]]:
    from shardwright.data.readers import keys
    from shardwright.lab.emulated_cluster import Lab
    from shardwright.lab.shape import Host, Shape

    said: list[str] = []
    with TemporaryDirectory() as folder, Lab(Shape((Host(front=FRONT, cpu=CPU),) * 3), "ingest") as lab:
        keys.create_key_files(Path(folder))
        call = f"from benchmarks.ingest import host; host({folder!r}, {rounds}, {seconds})"
        ended = lab.run([sys.executable, "-c", call], lambda rank, text: said.append(f"{rank} {text}"))
        if ended.rank is not None:
            raise SystemExit("\n".join(said))
    found = json.loads(next(text for text in said if text.startswith("0 {"))[2:])
    for side, rates in found.items():
        ratios = [rate / one for rate, one in zip(rates, found["1 reader"], strict=True)]
        yield line("bound", side, cpu=CPU, front=FRONT, samples_s=three(rates, 0), over_one_reader=three(ratios, 3))


def host(folder: str, rounds: int, seconds: float) -> None:
    """Rank 0 trains, each other one reads until it has ended."""
    from shardwright.lab.network import rank_address

    rank, ended = int(os.environ["RANK"]), Path(folder) / "ended"
    places = [f"tcp://{rank_address(at, front=True)}:{PORT}" for at in (1, 2)]
    if rank == 0:
        try:
            print(json.dumps(trained(places, f"{folder}/trainer.keys", rounds, seconds)), flush=True)
        finally:
            ended.touch()
        return

    def watch() -> None:
        while not ended.exists():
            time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=watch, daemon=True).start()
    serve("Parsed()", places[rank - 1], f"{folder}/reader.keys")


def trained(places: list[str], keys: str, rounds: int, seconds: float) -> dict[str, list[float]]:
    """Samples/s of each side and round: it only looks at what it gets."""
    from shardwright.data.loading.loader import Loader
    from shardwright.data.readers.client import Readers

    found: dict[str, list[float]] = {"worker here": [], "1 reader": [], "2 readers": []}
    for turn in range(rounds):
        sides: tuple[dict[str, Any], ...] = (
            {"workers": 1},
            {"readers": Readers((places[turn % 2],), keys)},
            {"readers": Readers(tuple(places), keys)},
        )
        for name, how in list(zip(found, sides, strict=True))[:: -1 if turn % 2 else 1]:
            with Loader(Parsed(), batch_size=BATCH, prefetch=6, **how) as loader:
                for batch in islice(loader, 8):
                    batch.features.values.sum()
                start = time.perf_counter()
                for taken, batch in enumerate(loader, start=1):  # noqa: B007
                    batch.features.values.sum()
                    if (spent := time.perf_counter() - start) > seconds:
                        break
                found[name].append(taken * BATCH / spent)
    return found


def serve(source: str, bind: str, keys: str = "") -> None:
    """A reader of this file's samples, until it is interrupted."""
    from shardwright.data.readers import keys as files
    from shardwright.data.readers.service import ReaderService
    from shardwright.data.sources.source import make_order

    made = eval(source, {"Parsed": Parsed, "Plain": Plain})
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    service = ReaderService(made, make_order(made, BATCH, 0, True), bind=bind, keys=files.load_keys(keys, "reader"))
    with closing(service):
        print(service.address, flush=True)
        try:
            service.run(lambda said: print(said, file=sys.stderr))
        except KeyboardInterrupt:
            return


# compute and killed: readers of this host


def start(source: str, bind: str = "tcp://127.0.0.1:0") -> tuple[subprocess.Popen, str]:
    call = f"from benchmarks.ingest import serve; serve({source!r}, {bind!r})"
    process = subprocess.Popen([sys.executable, "-c", call], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


def end(process: subprocess.Popen, how: int = signal.SIGTERM) -> int:
    process.send_signal(how)
    status = process.wait()
    if process.stdout is not None:
        process.stdout.close()
    return status


@contextmanager
def reader(source: str) -> Iterator[str]:
    process, address = start(source)
    try:
        yield address
    finally:
        end(process)


def of_compute(rounds: int, seconds: float) -> Iterator[dict[str, Any]]:
    import torch

    from shardwright.data.loading.loader import Loader
    from shardwright.data.readers.client import Readers

    torch.set_num_threads(1)
    layers = [torch.nn.Linear(WIDTH // 4, WIDTH)]
    layers += [torch.nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)]
    network = torch.nn.Sequential(*layers)
    found: dict[str, list[float]] = {"worker": [], "reader": []}
    with ExitStack() as stack:
        readers = Readers((stack.enter_context(reader("Plain()")),))
        load = partial(Loader, Plain(), batch_size=BATCH, seed=0)
        sides = {"worker": load(workers=1), "reader": load(readers=readers)}
        for loader in sides.values():
            stack.enter_context(loader)
        for turn in range(rounds + 1):  # the first warms up
            for name in list(sides)[:: -1 if turn % 2 else 1]:
                begun, steps = time.perf_counter(), 0
                for batch in sides[name]:
                    network(batch.dense).square().mean().backward()
                    steps += 1
                    if (spent := time.perf_counter() - begun) > seconds:
                        break
                if turn:
                    found[name].append(1e3 * spent / steps)
    for name, times in found.items():
        ratios = [one / worker for one, worker in zip(times, found["worker"], strict=True)]
        yield line("compute", name, step_ms=three(times), over_worker=three(ratios, 3))


def of_killed(rounds: int, seconds: float) -> Iterator[dict[str, Any]]:
    from shardwright.data.loading.loader import Loader
    from shardwright.data.readers.client import Readers

    source = Parsed(BATCHES * BATCH)
    crew = [start(repr(source)) for _ in range(2)]
    places = [address for _, address in crew]
    statuses: list[int] = []

    def kill(number: int) -> None:
        if number % (BATCHES // (KILLS + 1)) == 0 and len(statuses) < KILLS and number:
            at = len(statuses) % 2
            statuses.append(end(crew[at][0], signal.SIGKILL))
            crew[at] = start(repr(source), places[at])

    try:
        for name, happens in (("undisturbed", lambda number: None), ("killed", kill)):
            digest, samples, begun = hashlib.sha256(), 0, time.perf_counter()
            with Loader(source, batch_size=BATCH, readers=Readers(tuple(places))) as loader:
                for number, batch in enumerate(loader):
                    happens(number)
                    for tensor in (batch.features.values, batch.features.lengths, batch.numbers, batch.labels["click"]):
                        digest.update(tensor.numpy().tobytes())
                    samples += batch.batch_size
            figures = {"kills": statuses.count(-signal.SIGKILL), "samples": samples, "digest": digest.hexdigest()}
            yield line("killed", name, seconds=round(time.perf_counter() - begun, 2), **figures)
    finally:
        for process, _ in crew:
            end(process)


CASES = {"format": of_format, "bound": of_bound, "compute": of_compute, "killed": of_killed}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--on", nargs="*", default=list(CASES), choices=CASES, metavar="CASE")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=4.0, help="of each side in each round")
    parser.add_argument("--write", default="", help="name of a file in benchmarks/results")
    parser.add_argument("--smoke", action="store_true", help="the smallest case, to see that it runs")
    asked = parser.parse_args()
    if asked.smoke:
        asked.rounds, asked.seconds = 1, 0.2
    lines: list[dict[str, Any]] = []
    for case in asked.on:
        for found in CASES[case](asked.rounds, asked.seconds):
            lines.append(found)
            print(json.dumps(found), flush=True)
    if asked.write:
        results_file.write(asked.write, "ingest", lines)
    return 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())

"""Ingestion: the combined format against a pair of tensors for each table, and readers on other hosts than trainers.

    python -m benchmarks.ingest [--on CASE ...] [--rounds N] [--seconds S] [--write NAME]

A JSON line per side of a case: median, minimum and maximum over rounds, in which the sides alternate.

format   A batch of 500 tables in the combined format, and as ids and offsets of each table: milliseconds to make it
         from columns, to send it over a TCP connection of this host and convert it to tensors, to copy each tensor (to
         the GPU through pinned memory if there is one, else in memory), and the bytes and pieces of a message.
bound    Run as root. A job bound by ingestion, parsing text: samples/s with a worker on the trainer's host, with 1
         reader and with 2. Emulated: hosts of 0.4 of a core each, a front-end network of 1 Gbit/s, encrypted. Target: 2
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

TABLES, SAMPLES, IDS = 500, 256, 8  # of the batch of case format; a bag has 0 to IDS ids
BATCH = 1024
LINES, FIELDS = 4096, 26
CPU, FRONT = 0.4, "1gbit"
PORT = 5700
WIDTH, DEPTH = 512, 3  # of the network of case compute
KILLS, BATCHES = 10, 120


@dataclass(frozen=True)
class Parsed:
    """Samples parsed from lines of text, field by field: real processor time, equal for every batch."""

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
    numbers = splitmix64(np.arange(LINES * (1 + FIELDS), dtype=np.uint64)).reshape(LINES, -1) >> 40
    return tuple("\t".join(f"{value:x}" for value in row) for row in numbers.tolist())


@dataclass(frozen=True)
class Plain:
    """Samples that take almost no time to make."""

    size: int | None = None

    def take(self, indices: np.ndarray) -> NumpyBatch:
        values = np.tile(indices, FIELDS)
        lengths = np.ones((FIELDS, len(indices)), np.int64)
        dense = np.repeat(indices[:, None] % 97, WIDTH // 4, axis=1).astype(np.float32)
        return NumpyBatch(tuple(f"f{at}" for at in range(FIELDS)), values, lengths, dense, {"click": indices % 2})


def stats(values: Sequence[float], digits: int = 2) -> list[float]:
    return [round(value, digits) for value in (median(values), min(values), max(values))]


def case_line(case: str, side: str, **figures: Any) -> dict[str, Any]:
    return {"benchmark": "ingest", "case": case, "side": side, **figures}


# format


def format_lines(rounds: int, seconds: float) -> Iterator[dict[str, Any]]:
    import torch
    import zmq

    generator = np.random.default_rng(0)
    lengths = [generator.integers(0, IDS + 1, SAMPLES) for _ in range(TABLES)]
    columns = [(generator.integers(0, 1 << 20, int(bag_lengths.sum())), bag_lengths) for bag_lengths in lengths]
    sides = {"combined": combined, "pairs": pairs}
    by_side: dict[str, dict[str, list[float]]] = {side: {"make": [], "send": [], "copy": []} for side in sides}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with zmq.Context() as context, context.socket(zmq.PAIR) as sender, context.socket(zmq.PAIR) as receiver:
        sender.linger = receiver.linger = 0
        sender.bind("tcp://127.0.0.1:0")
        receiver.connect(sender.getsockopt_string(zmq.LAST_ENDPOINT))
        lines = {side: case_line("format", side, tables=TABLES, device=device) for side in sides}
        for round_ in range(rounds + 1):  # the first warms up
            for side, make in sides.items():
                arrays, make_seconds = time_call(partial(make, columns), seconds)
                tensors, send_seconds = time_call(partial(send, sender, receiver, arrays), seconds)
                _, copy_seconds = time_call(partial(copy, tensors, device), seconds)
                lines[side] |= {"pieces": len(arrays), "bytes": sum(map(len, message(arrays)))}
                if round_:
                    for name, value in (("make", make_seconds), ("send", send_seconds), ("copy", copy_seconds)):
                        by_side[side][name].append(1e3 * value)
    totals = {side: [sum(parts) for parts in zip(*times.values(), strict=True)] for side, times in by_side.items()}
    for side, times in by_side.items():
        ratios = [total / ours for total, ours in zip(totals[side], totals["combined"], strict=True)]
        lines[side] |= {f"{name}_ms": stats(values) for name, values in times.items()}
        yield lines[side] | {"ms": stats(totals[side]), "over_combined": stats(ratios)}


def time_call(call: Callable[[], Any], seconds: float) -> tuple[Any, float]:
    """Call repeatedly for a tenth of `seconds`; returns the last result and the seconds per call."""
    start, calls = time.perf_counter(), 0
    while (spent := time.perf_counter() - start) < seconds / 10 or not calls:
        result = call()
        calls += 1
    return result, spent / calls


def combined(columns: list[tuple[np.ndarray, np.ndarray]]) -> list[np.ndarray]:
    return [np.concatenate([ids for ids, _ in columns]), np.stack([lengths for _, lengths in columns])]


def pairs(columns: list[tuple[np.ndarray, np.ndarray]]) -> list[np.ndarray]:
    """Ids and offsets of each table, the inputs of separate layers."""
    return [array for ids, lengths in columns for array in (ids.copy(), np.concatenate([[0], lengths.cumsum()]))]


def message(arrays: list[np.ndarray]) -> list[Any]:
    header = json.dumps([(array.dtype.str, array.shape) for array in arrays]).encode()
    return [header, *(array.reshape(-1).view(np.uint8).data for array in arrays)]


def send(sender: Any, receiver: Any, arrays: list[np.ndarray]) -> list[Any]:
    import torch

    sender.send_multipart(message(arrays), copy=False)
    header, *frames = receiver.recv_multipart(copy=False)
    descriptions = zip(json.loads(header.bytes), frames, strict=True)
    return [torch.from_numpy(np.ndarray(shape, dtype, frame.buffer)) for (dtype, shape), frame in descriptions]


def copy(tensors: list[Any], device: str) -> None:
    import torch

    if device == "cpu":
        _ = [tensor.clone() for tensor in tensors]
        return
    _ = [tensor.pin_memory().to(device, non_blocking=True) for tensor in tensors]
    torch.cuda.synchronize()


# bound


def bound_lines(rounds: int, seconds: float) -> Iterator[dict[str, Any]]:
    from shardwright.comm.transport import keys
    from shardwright.lab.emulated_cluster import Lab
    from shardwright.lab.shape import Host, Shape

    output_lines: list[str] = []
    with TemporaryDirectory() as folder, Lab(Shape((Host(front=FRONT, cpu=CPU),) * 3), "ingest") as lab:
        keys.create_key_files(Path(folder))
        call = f"from benchmarks.ingest import run_host; run_host({folder!r}, {rounds}, {seconds})"
        result = lab.run([sys.executable, "-c", call], lambda rank, text: output_lines.append(f"{rank} {text}"))
        if result.rank is not None:
            raise SystemExit("\n".join(output_lines))
    rates_by_side = json.loads(next(text for text in output_lines if text.startswith("0 {"))[2:])
    for side, rates in rates_by_side.items():
        ratios = [rate / base for rate, base in zip(rates, rates_by_side["1 reader"], strict=True)]
        yield case_line(
            "bound", side, cpu=CPU, front=FRONT, samples_s=stats(rates, 0), over_one_reader=stats(ratios, 3)
        )


def run_host(folder: str, rounds: int, seconds: float) -> None:
    """Rank 0 trains; the other ranks serve as readers until it has ended."""
    from shardwright.lab.network import rank_address

    rank, end_file = int(os.environ["RANK"]), Path(folder) / "ended"
    addresses = [f"tcp://{rank_address(at, front=True)}:{PORT}" for at in (1, 2)]
    if rank == 0:
        try:
            print(json.dumps(train(addresses, f"{folder}/trainer.keys", rounds, seconds)), flush=True)
        finally:
            end_file.touch()
        return

    def watch() -> None:
        while not end_file.exists():
            time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=watch, daemon=True).start()
    serve("Parsed()", addresses[rank - 1], f"{folder}/reader.keys")


def train(addresses: list[str], keys: str, rounds: int, seconds: float) -> dict[str, list[float]]:
    """Samples/s of each side and round; the trainer only reads its batches."""
    from shardwright.data.loading.loader import Loader
    from shardwright.data.readers.client import Readers

    rates_by_side: dict[str, list[float]] = {"worker here": [], "1 reader": [], "2 readers": []}
    for round_ in range(rounds):
        sides: tuple[dict[str, Any], ...] = (
            {"workers": 1},
            {"readers": Readers((addresses[round_ % 2],), keys)},
            {"readers": Readers(tuple(addresses), keys)},
        )
        for name, reader_options in list(zip(rates_by_side, sides, strict=True))[:: -1 if round_ % 2 else 1]:
            with Loader(Parsed(), batch_size=BATCH, prefetch=6, **reader_options) as loader:
                for batch in islice(loader, 8):
                    batch.features.values.sum()
                start = time.perf_counter()
                for num_batches, batch in enumerate(loader, start=1):  # noqa: B007
                    batch.features.values.sum()
                    if (spent := time.perf_counter() - start) > seconds:
                        break
                rates_by_side[name].append(num_batches * BATCH / spent)
    return rates_by_side


def serve(source: str, bind: str, keys: str = "") -> None:
    """Serve samples of this module's sources until interrupted."""
    from shardwright.comm.transport import keys as files
    from shardwright.data.readers.service import ReaderService
    from shardwright.data.sources.source import make_order

    data = eval(source, {"Parsed": Parsed, "Plain": Plain})
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    service = ReaderService(data, make_order(data, BATCH, 0, True), bind=bind, keys=files.load_keys(keys, "reader"))
    with closing(service):
        print(service.address, flush=True)
        try:
            service.run(lambda said: print(said, file=sys.stderr))
        except KeyboardInterrupt:
            return


# compute and killed: readers of this host


def start_reader(source: str, bind: str = "tcp://127.0.0.1:0") -> tuple[subprocess.Popen, str]:
    call = f"from benchmarks.ingest import serve; serve({source!r}, {bind!r})"
    process = subprocess.Popen([sys.executable, "-c", call], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


def stop_reader(process: subprocess.Popen, signal_number: int = signal.SIGTERM) -> int:
    process.send_signal(signal_number)
    status = process.wait()
    if process.stdout is not None:
        process.stdout.close()
    return status


@contextmanager
def running_reader(source: str) -> Iterator[str]:
    process, address = start_reader(source)
    try:
        yield address
    finally:
        stop_reader(process)


def compute_lines(rounds: int, seconds: float) -> Iterator[dict[str, Any]]:
    import torch

    from shardwright.data.loading.loader import Loader
    from shardwright.data.readers.client import Readers

    torch.set_num_threads(1)
    layers = [torch.nn.Linear(WIDTH // 4, WIDTH)]
    layers += [torch.nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)]
    network = torch.nn.Sequential(*layers)
    by_side: dict[str, list[float]] = {"worker": [], "reader": []}
    with ExitStack() as stack:
        readers = Readers((stack.enter_context(running_reader("Plain()")),))
        load = partial(Loader, Plain(), batch_size=BATCH, seed=0)
        sides = {"worker": load(workers=1), "reader": load(readers=readers)}
        for loader in sides.values():
            stack.enter_context(loader)
        for round_ in range(rounds + 1):  # the first warms up
            for name in list(sides)[:: -1 if round_ % 2 else 1]:
                begin, steps = time.perf_counter(), 0
                for batch in sides[name]:
                    network(batch.dense).square().mean().backward()
                    steps += 1
                    if (spent := time.perf_counter() - begin) > seconds:
                        break
                if round_:
                    by_side[name].append(1e3 * spent / steps)
    for name, times in by_side.items():
        ratios = [time_ / worker for time_, worker in zip(times, by_side["worker"], strict=True)]
        yield case_line("compute", name, step_ms=stats(times), over_worker=stats(ratios, 3))


def killed_lines(rounds: int, seconds: float) -> Iterator[dict[str, Any]]:
    from shardwright.data.loading.loader import Loader
    from shardwright.data.readers.client import Readers

    source = Parsed(BATCHES * BATCH)
    readers = [start_reader(repr(source)) for _ in range(2)]
    addresses = [address for _, address in readers]
    statuses: list[int] = []

    def kill(number: int) -> None:
        if number % (BATCHES // (KILLS + 1)) == 0 and len(statuses) < KILLS and number:
            index = len(statuses) % 2
            statuses.append(stop_reader(readers[index][0], signal.SIGKILL))
            readers[index] = start_reader(repr(source), addresses[index])

    try:
        for name, on_batch in (("undisturbed", lambda number: None), ("killed", kill)):
            digest, samples, begin = hashlib.sha256(), 0, time.perf_counter()
            with Loader(source, batch_size=BATCH, readers=Readers(tuple(addresses))) as loader:
                for number, batch in enumerate(loader):
                    on_batch(number)
                    for tensor in (batch.features.values, batch.features.lengths, batch.numbers, batch.labels["click"]):
                        digest.update(tensor.numpy().tobytes())
                    samples += batch.batch_size
            counts = {"kills": statuses.count(-signal.SIGKILL), "samples": samples, "digest": digest.hexdigest()}
            yield case_line("killed", name, seconds=round(time.perf_counter() - begin, 2), **counts)
    finally:
        for process, _ in readers:
            stop_reader(process)


CASES = {"format": format_lines, "bound": bound_lines, "compute": compute_lines, "killed": killed_lines}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--on", nargs="*", default=list(CASES), choices=CASES, metavar="CASE")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=4.0, help="of each side in each round")
    parser.add_argument("--write", default="", help="name of a file in benchmarks/results")
    parser.add_argument("--smoke", action="store_true", help="the smallest case, to see that it runs")
    args = parser.parse_args()
    if args.smoke:
        args.rounds, args.seconds = 1, 0.2
    lines: list[dict[str, Any]] = []
    for case in args.on:
        for result in CASES[case](args.rounds, args.seconds):
            lines.append(result)
            print(json.dumps(result), flush=True)
    if args.write:
        results_file.write(args.write, "ingest", lines)
    return 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())

"""Tables with rows on disk against tables in memory, and against tables in files that are mapped to memory.

    python -m benchmarks.tiers [--criteo FILE] [--cluster FILE] [--rounds N] [--write NAME]

Each side is a process with one thread that trains the DLRM of benchmarks/dlrm_step.py (26 tables of 64 columns, batch
2,048, row-wise AdaGrad), whose tables were trained before: all rows are on disk. Streams: "zipf", 26 tables of 200,000
rows, a new batch each step, ids with popularity rank**-1.05; "cycle", 12 of those batches again and again; "criteo",
the rows of FILE (Criteo's format) again and again, each time with other ids, in no order, until after COPIES times they
repeat, in tables of as many rows as a column has ids.

Sides: "memory"; "memory, again", the A/A floor; "disk, N %", a cache with lines for so many of the rows, and the other
rows on the disk of the folder for temporary files (TMPDIR), past the page cache. "disk, a quarter" runs in a control
group whose limit is the memory of the process without tables and a quarter of tables and optimizer state, and so does
"mapped": tables in shared memory-mapped files (MADV_RANDOM), which take turns in every MAPPED_EVERY-th round. Lines are
in proportion to the rows of a table; of "criteo" every table has equally many, but at most its rows. All sides of a
stream have the same losses to the bit, else it is an error.

WARM steps fill the caches. A round is a turn of each side, in an order that rotates: a step that warms up, then STEPS
that are timed; of "criteo" as many rounds as a pass over its rows needs, since hits are fewest where it begins. A JSON
line per stream and side: milliseconds of a step (median, least, most over rounds), speed
relative to "memory" in the same round, hits of distinct rows and those that the planner expects, rows written back,
kilobytes read and written per step by the process (/proc/self/io), the part of a step that it waited for rows, the
limit and the peak of memory; with a measured cluster of one rank, the planner's step too: "planned" by the cluster's
prices alone, "predicted" with the dense model and reading measured before the run, as `shardwright train` predicts it.
The planner expects hits from the popularity of rows; for "criteo" it interpolates hits that were recorded in the first
RECORDED batches.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from benchmarks import results_file
from benchmarks.dlrm_step import DIM, TABLES
from benchmarks.tiers_side import STEPS, Setup, Stream, num_lines
from shardwright.embeddings.cache_simulation import TRAINING, TableAccesses, policies, simulate
from shardwright.spec.row_cache import HALF_LIFE_BATCHES, KNOWN_BATCHES, LINE_BYTES, ROW_INDEX_BYTES, WAYS

QUARTER, MAPPED = "disk, a quarter", "mapped"
SIDES = ("memory", "memory, again", "disk, 100 %", QUARTER, "disk, 10 %", "disk, 5 %", MAPPED)
SIDES_OF = {
    "zipf": SIDES,
    "cycle": ("memory", "memory, again", "disk, 100 %"),
    "criteo": ("memory", "memory, again", QUARTER, MAPPED),
}
MAPPED_EVERY = 5  # rounds
WARM, MAPPED_WARM, RECORDED = 400, 20, 800
ROW_BYTES = 4 * DIM + 4  # with optimizer state
CGROUPS = Path("/sys/fs/cgroup")
Line = dict[str, Any]


class Worker:
    """The process of a side; `limit`: bytes of its control group, 0: none."""

    def __init__(self, setup: Setup, limit: int, stack: ExitStack) -> None:
        command = [sys.executable, "-m", "benchmarks.tiers_side", json.dumps(asdict(setup))]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        stack.callback(self.process.wait)
        stack.callback(self.process.kill)
        if limit:
            stack.enter_context(_Group(self.process.pid, limit))
        self.turns: list[Line | None] = []
        self.losses: list[float] = []

    def wait_until_ready(self) -> None:
        assert self.process.stdout is not None
        if self.process.stdout.readline() != "ready\n":
            raise SystemExit(f"a side ended with {self.process.wait()}")

    def turn(self, steps: int = STEPS) -> Line:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(f"{steps}\n")
        self.process.stdin.flush()
        text = self.process.stdout.readline()
        if not text:
            raise SystemExit(f"a side ended with {self.process.wait()}")
        found = json.loads(text)
        self.losses += found.pop("losses")
        return found


class _Group:
    """A control group of a process with a limit of memory (cgroups v1 or v2)."""

    def __init__(self, pid: int, limit: int) -> None:
        is_v1 = (CGROUPS / "memory").is_dir()
        self._path = (CGROUPS / "memory" if is_v1 else CGROUPS) / f"shardwright-tiers-{os.getpid()}-{pid}"
        self._path.mkdir()
        (self._path / ("memory.limit_in_bytes" if is_v1 else "memory.max")).write_text(str(limit))
        (self._path / "cgroup.procs").write_text(str(pid))

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        for pid in (self._path / "cgroup.procs").read_text().split():
            (self._path.parent / "cgroup.procs").write_text(pid)
        self._path.rmdir()


def base_bytes(stream: str, folder: Path) -> int:
    """Peak memory of the process without tables."""
    with ExitStack() as stack:
        worker = Worker(Setup("none", stream, 0.0, str(folder)), 0, stack)
        worker.wait_until_ready()
        return worker.turn()["peak_bytes"]


def recorded_hits(stream: str, folder: Path, share: float) -> list[tuple[str, int, float]]:
    """Of each table with rows on disk: its lines, and the share of a batch's distinct rows found there."""
    source, policy = Stream(stream, folder), policies(HALF_LIFE_BATCHES, KNOWN_BATCHES)[TRAINING]
    batches = [source.batch(number).features.values.view(TABLES, -1) for number in range(RECORDED)]
    found: list[tuple[str, int, float]] = []
    for table, (rows, lines) in enumerate(zip(source.rows, num_lines(stream, source.rows, share), strict=True)):
        if lines < rows:
            accesses = TableAccesses("", rows, ROW_BYTES, tuple(torch.unique(ids[table]) for ids in batches))
            found.append((f"f{table}", lines, simulate(accesses, lines // WAYS * WAYS, policy).rate))
    return found


def measure(stream: str, folder: Path, num_rounds: int, warm: int, cluster: str) -> Iterator[Line]:
    table_rows = sum(Stream(stream, folder).rows)
    base, tables = base_bytes(stream, folder), ROW_BYTES * table_rows
    limit = base + tables // 4
    shares = {QUARTER: (ROW_BYTES / 4 - ROW_INDEX_BYTES) / (ROW_BYTES + LINE_BYTES)}
    shares |= {f"disk, {percent} %": percent / 100 for percent in (100, 10, 5)}
    names = SIDES_OF[stream]
    num_rounds = max(num_rounds, math.ceil(Stream(stream, folder).pass_batches / (1 + STEPS)))
    with ExitStack() as stack:
        workers: dict[str, Worker] = {}
        for name in names:
            kind, share = "mmap" if name == MAPPED else name.partition(",")[0], shares.get(name, 0.0)
            own = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            if stream == "criteo":
                (own / "criteo.npy").symlink_to(folder / "criteo.npy")
            recorded = recorded_hits(stream, folder, share) if stream == "criteo" and kind == "disk" else []
            setup = Setup(kind, stream, share, str(own), cluster, recorded)
            workers[name] = Worker(setup, limit if name in (QUARTER, MAPPED) else 0, stack)
            workers[name].wait_until_ready()
            workers[name].turn(min(warm, MAPPED_WARM) if name == MAPPED else warm)
            print(f'{stream}: "{name}" is warm', file=sys.stderr, flush=True)
        for number in range(num_rounds):
            turn = number % len(names)
            for name in names[turn:] + names[:turn]:
                skips = name == MAPPED and number % MAPPED_EVERY
                workers[name].turns.append(None if skips else workers[name].turn())
            print(f"{stream}: round {number + 1} of {num_rounds}", file=sys.stderr, flush=True)
    wanted = workers["memory"].losses
    for name, worker in workers.items():
        if worker.losses != wanted[: len(worker.losses)]:
            raise SystemExit(f'{stream}: "{name}" has other losses than "memory"')
        line = {"benchmark": "tiers", "stream": stream, "side": name, "table_megabytes": round(tables / 1e6)}
        line |= _summary(worker.turns, workers["memory"].turns)
        if name in (QUARTER, MAPPED):
            line |= {"limit_megabytes": round(limit / 1e6), "base_megabytes": round(base / 1e6)}
        yield line


def _summary(turns: list[Line | None], memory: list[Line | None]) -> Line:
    pairs = [(turn, other) for turn, other in zip(turns, memory, strict=True) if turn is not None and other is not None]
    own = [turn for turn, _ in pairs]
    speeds = [other["seconds"] / turn["seconds"] for turn, other in pairs]
    counters = {key: sum(turn["counters"][key] for turn in own) for key in own[0]["counters"]}
    per_step = len(own) * (1 + STEPS)
    line: Line = {"rounds": len(own)}
    line["milliseconds"] = [round(1e3 * f(turn["seconds"] for turn in own), 1) for f in (median, min, max)]
    line["of_memory"] = [round(f(speeds), 3) for f in (median, min, max)]
    if "rows" in counters:
        line["hits"] = round(1 - counters["missing"] / counters["rows"], 4)
        line["predicted_hits"] = own[0]["predicted_hits"]
        line["written_back"] = round(counters["written_back"] / per_step)
        line["waited_percent"] = round(100 * median(turn["waited"] / turn["seconds"] for turn in own), 1)
    for key in ("planned", "predicted"):
        if f"{key}_seconds" in own[0]:
            line[f"{key}_milliseconds"] = round(1e3 * own[0][f"{key}_seconds"], 1)
    line["kilobytes"] = [round(counters[key] / per_step / 1e3) for key in ("read_bytes", "write_bytes")]
    line["peak_megabytes"] = round(max(turn["peak_bytes"] for turn in own) / 1e6)
    return line


def write_columns(path: str, folder: Path) -> None:
    """The ids of a file in Criteo's format, numbered from 0 in each column."""
    compression = "zstd" if path.endswith(".zst") else "gzip" if path.endswith(".gz") else None
    with pa.input_stream(path, compression=compression) as stream:
        rows = [line.split(b"\t")[-TABLES:] for line in stream.read().splitlines()]
    columns = [np.unique(np.array(column), return_inverse=True)[1] for column in zip(*rows, strict=True)]
    np.save(folder / "criteo.npy", np.stack(columns).astype(np.int64))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--criteo", default="", metavar="FILE", help="rows in Criteo's format; empty: without them")
    parser.add_argument("--cluster", default="", metavar="FILE", help="from `shardwright measure` on one rank")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--write", default="", help="name of a file in benchmarks/results")
    parser.add_argument("--smoke", action="store_true", help="the smallest case, to see that it runs")
    args = parser.parse_args()
    streams = ["cycle"] if args.smoke else ["zipf", "cycle", *(["criteo"] if args.criteo else [])]
    rounds, warm = (1, 12) if args.smoke else (args.rounds, WARM)
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        if args.criteo:
            write_columns(args.criteo, Path(folder))
        for stream in streams:
            for line in measure(stream, Path(folder), rounds, warm, args.cluster):
                lines.append(line)
                print(json.dumps(line), flush=True)
    if args.write:
        results_file.write(args.write, "tiers", lines)
    return 0


if __name__ == "__main__":
    sys.exit(main())

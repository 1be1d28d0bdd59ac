"""Tables with rows on disk against tables in memory: the step time, hits, and bytes read and written.

    python -m benchmarks.tiers [--rounds N] [--write NAME]

One process and thread, the DLRM of benchmarks/dlrm_step.py: 26 tables of 200,000 x 64, batch 2,048, row-wise AdaGrad,
a new batch each step, ids with popularity rank**-1.05. Sides: "memory"; "memory, again", the A/A floor; caches with
lines for 100, 25, 10 and 5 % of the rows, the rest on the disk of the folder for temporary files (TMPDIR), past the
page cache.
All sides train on the same batches and have the same losses to the bit, else it is an error. A round is a turn of each
side, in an order that rotates: a step that warms up, then STEPS that are timed; the first WARMUP_ROUNDS do not count.

A JSON line per side: milliseconds of a step (median, least, most over rounds), speed relative to "memory" in the same
round, hits of distinct rows, rows written back, and kilobytes read and written per step by the store. The machine has
memory for all of it: what memory pressure does to tables in memory is not measured here.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from statistics import median
from time import perf_counter
from typing import Any

import torch

from benchmarks import results_file
from benchmarks.dlrm_step import BATCH, BOTTOM, DENSE, DIM, ROWS, TABLES, TOP, make_batch
from shardwright.embeddings.exchange import ShardedTables
from shardwright.jagged import Batch, Jagged
from shardwright.kernels.cache_index import CacheCounts
from shardwright.layers.embedding import EmbeddingBags
from shardwright.models.dlrm import DLRM
from shardwright.runtime.build import build
from shardwright.runtime.job import Job
from shardwright.runtime.planning import keep_on_disk, plan_for
from shardwright.spec.optimizer import RowWiseAdaGrad
from shardwright.spec.workload import Feature, Table

SHARES = {"memory": 0.0, "memory, again": 0.0, "100 %": 1.0, "25 %": 0.25, "10 %": 0.1, "5 %": 0.05}
STEPS, WARMUP_ROUNDS = 5, 10
Line = dict[str, Any]


def batches(num: int) -> Iterator[Batch]:
    names, lengths = tuple(f"f{i}" for i in range(TABLES)), torch.ones(TABLES, BATCH, dtype=torch.int64)
    for number in range(num):
        ids, numbers, labels = make_batch(number)
        yield Batch(Jagged(names, ids, lengths), numbers, {"click": labels})


class Side:
    """A job that trains in turns."""

    def __init__(self, share: float, num_steps: int) -> None:
        torch.manual_seed(0)
        names = [f"f{i}" for i in range(TABLES)]
        with torch.device("meta"):
            tables, features = [Table(name, ROWS, DIM) for name in names], [Feature(name, name) for name in names]
            bags = EmbeddingBags(tables, features, RowWiseAdaGrad(lr=0.01))
            model = DLRM(bags, DENSE, bottom=BOTTOM, top=TOP)
        plan = plan_for(model, next(batches(1)))
        plan = keep_on_disk(plan, dict.fromkeys(names, round(share * ROWS))) if share else plan
        self.job: Job = build(model, plan, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01))
        self.steps, self.losses, self.seconds = self.job.run(batches(num_steps)), list[float](), list[float]()

    def turn(self) -> None:
        """A step that warms up, then those that are timed."""
        for number in range(1 + STEPS):
            if number == 1:
                start = perf_counter()
            self.losses.append(float(next(self.steps).loss))
        self.seconds.append((perf_counter() - start) / STEPS)

    def counters(self) -> dict[str, int]:
        exchange = self.job.model.sparse.exchange
        if not isinstance(exchange, ShardedTables):
            return {}
        counts = sum(self.job.cache_counts().values(), CacheCounts())
        numbers = [cached.store.numbers for local in exchange.local_shards for cached in local.caches.values()]
        bytes_ = {name: sum(getattr(each, name) for each in numbers) for name in ("bytes_read", "bytes_written")}
        return asdict(counts) | bytes_


def measure(shares: dict[str, float], num_rounds: int) -> Iterator[Line]:
    num_warm = min(WARMUP_ROUNDS, num_rounds)
    num_steps = (num_rounds + num_warm) * (1 + STEPS) + 1
    sides = {name: Side(share, num_steps) for name, share in shares.items()}
    names, before = [*sides], dict[str, dict[str, int]]()
    for number in range(num_rounds + num_warm):
        if number == num_warm:
            before = {name: side.counters() for name, side in sides.items()}
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            sides[name].turn()
        print(f"round {number + 1} of {num_rounds + num_warm}", file=sys.stderr, flush=True)
    for name, side in sides.items():
        if side.losses != sides["memory"].losses:
            raise SystemExit(f'"{name}" has other losses than "memory"')
        seconds = side.seconds[num_warm:]
        speeds = [a / b for a, b in zip(sides["memory"].seconds[num_warm:], seconds, strict=True)]
        line: Line = {"benchmark": "tiers", "side": name, "lines_percent": 100 * shares[name]}
        line["milliseconds"] = [round(1e3 * f(seconds), 1) for f in (median, min, max)]
        line["of_memory"] = [round(f(speeds), 3) for f in (median, min, max)]
        if counters := side.counters():
            counted = {key: value - before[name][key] for key, value in counters.items()}
            line["hits"] = round(1 - counted["missing"] / counted["rows"], 4)
            per_step = num_rounds * (1 + STEPS)
            line["written_back"] = round(counted["written_back"] / per_step)
            line["kilobytes"] = [round(counted[key] / per_step / 1e3) for key in ("bytes_read", "bytes_written")]
        yield line


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--write", default="", help="name of a file in benchmarks/results")
    parser.add_argument("--smoke", action="store_true", help="the smallest case, to see that it runs")
    args = parser.parse_args()
    torch.set_num_threads(1)
    shares = {name: SHARES[name] for name in ("memory", "5 %")} if args.smoke else SHARES
    lines = []
    for line in measure(shares, 1 if args.smoke else args.rounds):
        lines.append(line)
        print(json.dumps(line), flush=True)
    if args.write:
        results_file.write(args.write, "tiers", lines)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Long-tailed histories over ranks: samples dealt by count and by length, in turns in one job.

    python -m benchmarks.long_histories [--write NAME]

Run as root: a lab of 4 hosts with one rank of 0.4 of a core each. Models train on generated histories, most of them
short and some very long. In each round every side runs the same global batches: by count, by length, and by count
again, whose ratio is the A/A floor. A JSON line per model: median milliseconds of a step of each side, median and
range of the ratio over rounds, and the ratio of the most work of a rank that the lengths alone predict.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from benchmarks import results_file
from shardwright.lab.emulated_cluster import Lab
from shardwright.lab.shape import Host, Shape

MODELS = ("hstu", "din")
COST = (8.0, 1.0, 0.005)
SIDES = ("count", "length", "count again")
WORLD, BATCH, LONGEST, STEPS, ROUNDS = 4, 256, 1000, 4, 7


@dataclass(frozen=True)
class LongTailed:
    """An item, and a history with Pareto lengths of at most `longest`; whether most of it is of the item's kind."""

    samples: int
    longest: int

    num_dense = 0
    features = (("item", 10_000, False), ("seen", 10_000, True))
    histories = {"seen": "item"}  # noqa: RUF012

    @property
    def size(self) -> int:
        return self.samples

    def history_lengths(self, indices: np.ndarray) -> np.ndarray:
        share = (_hash(indices, 1) + 1) / 2**31
        return np.minimum(10 * share**-0.9, self.longest).astype(np.int64)

    def take(self, indices: np.ndarray) -> Any:
        from shardwright.data.sources.source import NumpyBatch

        lengths = self.history_lengths(indices)
        item, seen = _hash(indices, 2) % 10_000, _hash(np.repeat(indices, lengths) * 7 + np.arange(lengths.sum()), 3)
        labels = {"click": (_hash(indices, 4) % 2).astype(np.float32)}
        bags = np.stack([np.ones_like(lengths), lengths])
        return NumpyBatch(("item", "seen"), np.concatenate([item, seen % 10_000]), bags, None, labels)


def _hash(numbers: np.ndarray, salt: int) -> np.ndarray:
    keys = (numbers.astype(np.uint64) + np.uint64(salt << 40)) * np.uint64(0x9E3779B97F4A7C15)
    return ((keys ^ (keys >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9) >> np.uint64(33)).astype(np.int64)


def make_model(kind: str, source: LongTailed):
    from shardwright.models.click_inputs import ClickInputs
    from shardwright.models.din import din
    from shardwright.models.hstu import hstu
    from shardwright.spec.optimizer import RowWiseAdaGrad

    inputs = ClickInputs(source, RowWiseAdaGrad(0.01))
    if kind == "din":
        return din(inputs, dim=32, attention=[64, 32], hidden=[64])
    encoder = {"num_layers": 2, "num_heads": 2, "head_dim": 32}
    return hstu(inputs, dim=32, encoder=encoder, hidden=[64])


def worker(kind: str, batch: int, longest: int, rounds: int) -> None:
    import torch

    import shardwright as sw
    from shardwright.comm import collective
    from shardwright.data.sources.dealing import deal_by_cost, sample_costs

    torch.manual_seed(0)
    source = LongTailed(batch * STEPS, longest)
    model = make_model(kind, source)
    with sw.Loader(source, batch_size=batch) as loader:
        plan = sw.plan_for(model, loader.peek())
    job = sw.build(model, plan, optimizer=lambda parameters: torch.optim.Adam(parameters, 0.001))
    rank, world = job.mesh.rank, job.mesh.size
    batches: dict[str, list[Any]] = {}
    for side in SIDES:
        with sw.Loader(source, batch_size=batch, shard=(rank, world)) as loader:
            if side == "length":
                loader.deal_by_length(COST)
            batches[side] = list(loader)
    times: dict[str, list[float]] = {side: [] for side in SIDES}
    for number in range(rounds + 1):
        for side in SIDES:
            start = time.perf_counter()
            for _ in job.run(batches[side]):
                pass
            seconds = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
            slowest = (
                collective.all_gather(seconds, [1] * world, job.mesh.group()).wait().max() if world > 1 else seconds
            )
            if number:  # the first round warms up
                times[side].append(1e3 * float(slowest) / STEPS)
    costs = sample_costs(source.history_lengths(np.arange(batch)), COST)
    by_count = max(costs[len(costs) * r // world : len(costs) * (r + 1) // world].sum() for r in range(world))
    by_length = max(costs[part].sum() for part in deal_by_cost(costs, world))
    if rank == 0:
        print(json.dumps(result_line(kind, world, times) | {"predicted": round(by_count / by_length, 2)}), flush=True)
    job.mesh.close()


def result_line(kind: str, world: int, times: dict[str, list[float]]) -> dict[str, Any]:
    def spread(side: str) -> list[float]:
        ratios = [first / second for first, second in zip(times["count"], times[side], strict=True)]
        return [round(ratio, 3) for ratio in (median(ratios), min(ratios), max(ratios))]

    line = {"benchmark": "long_histories", "model": kind, "ranks": world}
    line |= {f"{side.replace(' ', '_')}_ms": round(median(values), 1) for side, values in times.items()}
    return line | {"count_over_length": spread("length"), "a_a": spread("count again")}


def run_locally(arguments: str) -> Iterator[dict[str, Any]]:
    """Two ranks on this host, without a lab: that it runs, not how fast."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    shared = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", f"from benchmarks.long_histories import worker; worker({arguments})"],
            env=os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [rank.communicate()[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        raise SystemExit(1)
    yield from (json.loads(line) for line in outputs[0].splitlines() if line.startswith("{"))


def run_in_lab(arguments: str) -> Iterator[dict[str, Any]]:
    lines: list[str] = []
    command = [sys.executable, "-c", f"from benchmarks.long_histories import worker; worker({arguments})"]
    with Lab(Shape((Host(ranks=1, uplink="500mbit", cpu=0.4),) * WORLD), "histories"[:8]) as lab:
        if lab.run(command, on_line=lambda _, line: lines.append(line)).rank is not None:
            raise SystemExit("\n".join(lines))
    yield from (json.loads(line) for line in lines if line.startswith("{"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", default="", help="name of a file in benchmarks/results")
    parser.add_argument("--smoke", action="store_true", help="the smallest case, to see that it runs")
    args = parser.parse_args()
    cases = []
    for kind in MODELS:
        run, sizes = (run_locally, (16, 40, 1)) if args.smoke else (run_in_lab, (BATCH, LONGEST, ROUNDS))
        for case in run(", ".join(map(repr, (kind, *sizes)))):
            cases.append(case)
            print(json.dumps(case), flush=True)
    if args.write:
        results_file.write(args.write, "long_histories", cases)
    return 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())

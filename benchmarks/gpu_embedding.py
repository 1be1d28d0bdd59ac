"""Embedding tables on one GPU: lookup, and lookup, backward and update, against torch and the memory roofline.

    python -m benchmarks.gpu_embedding [--rounds N] [--write NAME]

Cases: 26 tables of 1,000,000 rows, batch 8,192, ids with popularity rank**-1.05: one id a bag and 128 columns; 20 ids
and 64 columns. Sides: "ours", EmbeddingBags with row-wise AdaGrad; "torch", nn.EmbeddingBag with sparse gradients and
torch.optim.Adagrad (torch has no row-wise AdaGrad; AdaGrad on our side too in "ours, adagrad"). A JSON line per case:
milliseconds of a step (median, least, most over rounds), as a training loop sees them; `kernels`: milliseconds of the
GPU's work in one step of "ours", in all and of the largest kernels; `roofline`: the necessary bytes (rows read, vectors
written, gradients of vectors read, distinct rows and their state read and written) at the speed of a copy.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks import results_file
from benchmarks.embedding_peers import ids_of
from benchmarks.gpu_timing import describe_machine, stats, time_sides
from shardwright.jagged import Jagged
from shardwright.layers.embedding import EmbeddingBags
from shardwright.spec.optimizer import sparse_optimizer
from shardwright.spec.workload import Feature, Table

CASES = {  # tables, rows, columns, batch, ids of a bag
    "26x1M-d128-b8192-l1": (26, 1_000_000, 128, 8192, 1),
    "26x1M-d64-b8192-l20": (26, 1_000_000, 64, 8192, 20),
}
SMALLEST = {"2x1k-d16-b64-l2": (2, 1000, 16, 64, 2)}
PROFILED_STEPS, LARGEST = 3, 6
Line = dict[str, Any]


class Case:
    def __init__(self, num: int, rows: int, dim: int, batch: int, length: int) -> None:
        parts = [ids_of(table, rows, batch * length, 0) for table in range(num)]
        self.ids = torch.from_numpy(np.concatenate(parts)).cuda()
        self.gradient = torch.randn(batch, num * dim, device="cuda") * 0.01
        self.tables = [Table(f"t{i}", rows, dim) for i in range(num)]
        self.features = [Feature(f"f{i}", f"t{i}") for i in range(num)]
        lengths = torch.full((num, batch), length, dtype=torch.int64, device="cuda")
        self.batch = Jagged(tuple(feature.name for feature in self.features), self.ids, lengths)
        self.offsets, self.parts = torch.arange(batch, device="cuda") * length, self.ids.split(batch * length)
        distinct, vectors = sum(len(np.unique(part)) for part in parts), batch * num * dim * 4
        self.forward_bytes = len(self.ids) * dim * 4 + vectors
        self.bytes = self.forward_bytes + vectors + distinct * (2 * dim * 4 + 8)
        self.about = {"lookups": len(self.ids), "distinct": distinct}

    def ours(self, optimizer: str) -> EmbeddingBags:
        with torch.device("cuda"):
            return EmbeddingBags(self.tables, self.features, sparse_optimizer(optimizer, lr=0.01))

    def torch(self) -> tuple[list[torch.nn.EmbeddingBag], torch.optim.Optimizer]:
        bags = [
            torch.nn.EmbeddingBag(table.rows, table.dim, mode="sum", sparse=True, device="cuda")
            for table in self.tables
        ]
        return bags, torch.optim.Adagrad([bag.weight for bag in bags], lr=0.01)


def measure(name: str, case: Case, num_rounds: int, copy_tb_per_s: float) -> Line:
    by_row, by_number = case.ours("rowwise_adagrad"), case.ours("adagrad")
    bags, optimizer = case.torch()

    def forward() -> torch.Tensor:
        with torch.no_grad():
            return by_row(case.batch).pooled_BD

    def step(layer: EmbeddingBags) -> None:
        layer(case.batch).pooled_BD.backward(case.gradient)

    def torch_forward() -> torch.Tensor:
        return torch.cat([bag(part, case.offsets) for bag, part in zip(bags, case.parts, strict=True)], 1)

    def torch_step() -> None:
        optimizer.zero_grad()
        torch_forward().backward(case.gradient)
        optimizer.step()

    with torch.no_grad():
        forwards = time_sides({"ours": forward, "ours, again": forward, "torch": torch_forward}, num_rounds)
    sides = {"ours": lambda: step(by_row), "ours, adagrad": lambda: step(by_number), "torch": torch_step}
    steps = time_sides(sides | {"ours, again": sides["ours"]}, num_rounds)
    line: Line = {"benchmark": "gpu_embedding", "case": name} | case.about
    line["forward"] = {side: stats(values) for side, values in forwards.items()}
    line["step"] = {side: stats(values) for side, values in steps.items()}
    pairs = zip(steps["torch"], steps["ours, adagrad"], strict=True)
    line["over_torch"] = stats([theirs / own for theirs, own in pairs])
    line["kernels"] = kernels(lambda: step(by_row))
    seconds_per_byte = 1e-9 / copy_tb_per_s  # milliseconds
    line["roofline"] = {"forward": round(case.forward_bytes * seconds_per_byte, 3)}
    line["roofline"]["step"] = round(case.bytes * seconds_per_byte, 3)
    return line


def kernels(step: Any) -> dict[str, float]:
    """Milliseconds of the GPU's work in one step."""
    step()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(PROFILED_STEPS):
            step()
        torch.cuda.synchronize()
    times: dict[str, float] = {
        event.key: event.self_device_time_total / 1e3 / PROFILED_STEPS
        for event in profiler.key_averages()
        if event.self_device_time_total
    }
    largest = sorted(times, key=lambda name: -times[name])[:LARGEST]
    return {"all": round(sum(times.values()), 3)} | {name[:40]: round(times[name], 3) for name in largest}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--write", default="", help="name of a file in benchmarks/results")
    parser.add_argument("--smoke", action="store_true", help="the smallest case, to see that it runs")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print(json.dumps({"benchmark": "gpu_embedding", "skipped": "needs a GPU"}))
        return 0
    lines: list[Line] = []
    for line in _lines(SMALLEST if args.smoke else CASES, 1 if args.smoke else args.rounds):
        lines.append(line)
        print(json.dumps(line), flush=True)
    if args.write:
        results_file.write(args.write, "gpu_embedding", lines)
    return 0


def _lines(cases: dict[str, tuple[int, int, int, int, int]], num_rounds: int) -> Iterator[Line]:
    machine = describe_machine()
    yield {"benchmark": "gpu_embedding", "machine": machine}
    for name, sizes in cases.items():
        yield measure(name, Case(*sizes), num_rounds, machine["copy_tb_per_s"])


if __name__ == "__main__":
    sys.exit(main())

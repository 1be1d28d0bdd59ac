"""Tables in host memory with a cache in GPU memory, compared with unified memory and with tables in GPU memory.

    python -m benchmarks.gpu_tiers [--rounds N] [--write NAME]

A DLRM with 26 tables of 1,000,000 rows of 128 columns (13.3 GB), row-wise AdaGrad, one id a feature with popularity
rank**-1.05, a new batch each step, of 8,192 or 32,768 samples. One process trains all sides in turns of 20 steps:
"GPU": all tables in GPU memory; twice, as the A/A floor. "cache, N %": tables in host memory, N % of the rows on lines
in GPU memory; the caches are warm before the first turn. "unified": tables in unified memory (cuMemAllocManaged) that
stays in host memory and that the GPU's kernels access, as FBGEMM places tables that it manages; same kernels, no cache.
Unified memory that migrates to the GPU is not measured: with more of it than the GPU has, the GPU can hang.

A JSON line per side: milliseconds of a step (median, least, most over rounds), `of_gpu` and `over_unified`: speed over
that of these sides in the same round; hits of distinct rows, and megabytes copied between host and GPU in a step. All
sides have equal losses, to the bit.
"""

import argparse
import ctypes
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from benchmarks import results_file
from benchmarks.embedding_peers import ids_of
from benchmarks.gpu_timing import describe_machine, stats
from shardwright.comm.mesh import Mesh
from shardwright.jagged import Batch, Jagged
from shardwright.layers.embedding import EmbeddingBags
from shardwright.models.dlrm import DLRM
from shardwright.runtime.build import build
from shardwright.runtime.job import Job
from shardwright.runtime.placements import keep_in_host_memory
from shardwright.runtime.planning import plan_for
from shardwright.spec.optimizer import RowWiseAdaGrad
from shardwright.spec.workload import Feature, Table

NUM_DENSE, BOTTOM, TOP = 13, (512, 256), (1024, 1024, 512, 256)
MANAGED_GLOBAL, PREFERRED_LOCATION, ACCESSED_BY, CPU_DEVICE = 1, 3, 5, -1  # of the CUDA driver's interface
STEPS, WARM_STEPS = 20, 60  # of a turn; before the first turn
Line = dict[str, Any]


@dataclass(frozen=True)
class Case:
    tables: int
    rows: int
    dim: int
    batches: tuple[int, ...]  # samples
    shares: tuple[float, ...]  # of rows on lines

    def make_batch(self, size: int, number: int) -> Batch:
        number += size << 20  # other ids for each size
        generator = torch.Generator().manual_seed(number)
        ids = np.concatenate([ids_of(table, self.rows, size, number) for table in range(self.tables)])
        names = tuple(f"f{i}" for i in range(self.tables))
        lengths = torch.ones(self.tables, size, dtype=torch.int64)
        dense = torch.randn(size, NUM_DENSE, generator=generator)
        click = torch.randint(0, 2, (size,), generator=generator).float()
        return Batch(Jagged(names, torch.from_numpy(ids), lengths), dense, {"click": click})

    def make_model(self) -> DLRM:
        torch.manual_seed(0)
        tables = [Table(f"t{i}", self.rows, self.dim) for i in range(self.tables)]
        features = [Feature(f"f{i}", f"t{i}") for i in range(self.tables)]
        with torch.device("meta"):  # so that `build` initializes tables where they are to be
            bags = EmbeddingBags(tables, features, RowWiseAdaGrad(lr=0.01))
            return DLRM(bags, NUM_DENSE, bottom=(*BOTTOM, self.dim), top=TOP)


FULL = Case(26, 1_000_000, 128, (8192, 32_768), (0.25, 0.1))
SMALLEST = Case(2, 5000, 16, (64,), (0.5,))


class ManagedMemory:
    """Unified memory that stays on the host, as an array that torch takes over without a copy."""

    def __init__(self, like: torch.Tensor) -> None:
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._address = ctypes.c_uint64()
        self._call("cuMemAllocManaged", ctypes.byref(self._address), ctypes.c_size_t(like.nbytes), MANAGED_GLOBAL)
        for advice, device in ((PREFERRED_LOCATION, CPU_DEVICE), (ACCESSED_BY, torch.cuda.current_device())):
            self._call("cuMemAdvise", self._address, ctypes.c_size_t(like.nbytes), advice, device)
        self.__cuda_array_interface__ = {
            "shape": tuple(like.shape),
            "typestr": "<f4",
            "data": (self._address.value, False),
            "version": 3,
        }

    def _call(self, name: str, *arguments: Any) -> None:
        if failed := getattr(self._driver, name)(*arguments):
            sys.exit(f"{name}: CUDA error {failed}")

    def tensor(self) -> torch.Tensor:
        return torch.as_tensor(self, device="cuda")


class Side:
    def __init__(self, case: Case, kind: str, share: float = 0.0) -> None:
        model = case.make_model()
        plan = plan_for(model, case.make_batch(64, 0))
        if kind == "cache":
            rows = int(case.rows * share)
            plan = keep_in_host_memory(plan, {table.table: rows for table in plan.tables})
        self._memory: list[ManagedMemory] = []
        self.job: Job = build(
            model, plan, Mesh(device=torch.device("cuda")), optimizer=lambda p: torch.optim.SGD(p, lr=0.01)
        )
        if kind == "unified":
            self._unify(model)
        self.milliseconds: list[float] = []
        self.losses: list[torch.Tensor] = []

    def _unify(self, model: DLRM) -> None:
        for table in model.sparse.tables:
            module = model.sparse.holder(table.name)
            for name in ("weight", *[name for name, _ in module.named_buffers()]):
                tensor = getattr(module, name)
                self._memory.append(ManagedMemory(tensor.data))
                unified = self._memory[-1].tensor()
                unified.copy_(tensor.data)
                tensor.data = unified

    def run(self, batches: Sequence[Batch]) -> None:
        torch.cuda.synchronize()
        begin = time.perf_counter()
        losses = [output.loss for output in self.job.run(batches)]
        torch.cuda.synchronize()
        self.milliseconds.append(1000 * (time.perf_counter() - begin) / len(batches))
        self.losses += losses

    def counts(self) -> np.ndarray:
        counts = self.job.cache_counts().values()
        return np.array([(own.rows, own.missing, own.written_back) for own in counts]).sum(0)


def measure(case: Case, num_rounds: int) -> Iterator[Line]:
    sides = {"GPU": Side(case, "gpu"), "GPU, again": Side(case, "gpu"), "unified": Side(case, "unified")}
    sides |= {f"cache, {100 * share:g} %": Side(case, "cache", share) for share in case.shares}
    for size in case.batches:
        yield from _measure_batches(case, size, sides, num_rounds)


def _measure_batches(case: Case, size: int, sides: dict[str, Side], num_rounds: int) -> Iterator[Line]:
    batches = [case.make_batch(size, number) for number in range(WARM_STEPS + STEPS * num_rounds)]
    for side in sides.values():
        side.run(batches[:WARM_STEPS])
        side.milliseconds.clear()
        side.losses.clear()
    before = {name: side.counts() for name, side in sides.items() if name.startswith("cache")}
    names = [*sides]
    for number in range(num_rounds):
        turn, first = number % len(names), WARM_STEPS + number * STEPS
        for name in names[turn:] + names[:turn]:
            sides[name].run(batches[first : first + STEPS])
    steps = num_rounds * STEPS
    yield from ({"batch": size} | _line(case, name, sides, before.get(name), steps) for name in sides)


def _line(case: Case, name: str, sides: dict[str, Side], before: np.ndarray | None, steps: int) -> Line:
    side, gpu, unified = sides[name], sides["GPU"], sides["unified"]
    equal = all(torch.equal(a, b) for a, b in zip(side.losses, gpu.losses, strict=True))
    line: Line = {"benchmark": "gpu_tiers", "side": name, "milliseconds": stats(side.milliseconds)}
    line["of_gpu"] = stats([a / b for a, b in zip(gpu.milliseconds, side.milliseconds, strict=True)])
    line["over_unified"] = stats([a / b for a, b in zip(unified.milliseconds, side.milliseconds, strict=True)])
    line["equal_losses"] = equal
    if before is not None:
        rows, missing, written = (side.counts() - before) / steps
        row_bytes = 4 * (case.dim + 1)
        line["hits"] = round(1 - missing / rows, 4)
        line["megabytes"] = {
            "read": round(missing * row_bytes / 1e6, 2),
            "written": round(written * row_bytes / 1e6, 2),
        }
    return line


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--write", default="", help="name of a file in benchmarks/results")
    parser.add_argument("--smoke", action="store_true", help="the smallest case, to see that it runs")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print(json.dumps({"benchmark": "gpu_tiers", "skipped": "needs a GPU"}))
        return 0
    lines: list[Line] = [{"benchmark": "gpu_tiers", "machine": describe_machine()}]
    print(json.dumps(lines[0]), flush=True)
    for line in measure(SMALLEST if args.smoke else FULL, 1 if args.smoke else args.rounds):
        lines.append(line)
        print(json.dumps(line), flush=True)
    if args.write:
        results_file.write(args.write, "gpu_tiers", lines)
    return 0


if __name__ == "__main__":
    sys.exit(main())

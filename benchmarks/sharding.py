"""Sharded tables and overlapped steps on an emulated cluster: what overlap, placement and rounding gain, and what was
predicted.

    python -m benchmarks.sharding [--uplink RATE] [--cpu SHARE] [--rounds N] [--cluster FILE] [--traces FOLDER]

As root. A lab of 2 hosts x 2 ranks with a cpu quota each is made and measured, then one job runs all sides interleaved:
the planner's plan executed serially and overlapped, tables round robin and all rows over all ranks (both overlapped,
with the planner's own list of stages), and the planner's plan with vectors in fp16, gradients in bf16. 26 tables of
skewed sizes and bags, popular ids. Every side trains the same model on the same batches. A JSON line per side:
milliseconds of a step (median and range over rounds) and the step that was predicted from the measured cluster.
Emulated: hosts and links.
"""

import argparse
import json
import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

from benchmarks.sharding_tables import BATCH, BATCHES, DENSE_RATE, batch, model, part
from shardwright.lab.cluster import Lab
from shardwright.lab.shape import Host, Shape

STEPS, WARM = 4, 3


@dataclass(frozen=True, slots=True)
class Side:
    plan: Any
    overlap: bool = True


def sides(workload: Any, cluster: Any) -> dict[str, Side]:
    from shardwright.planner.answer import answer
    from shardwright.spec.plan import Rect

    ours = answer(workload, cluster).plan
    rounded = answer(workload, cluster, allow=("wire.fp16", "wire.bf16")).plan
    num = cluster.num_ranks

    def placed(rects: Any, order: str = "id") -> Any:
        return replace(
            ours,
            tables=tuple(
                replace(table, order=order, rects=tuple(rects(at, known)))
                for at, (table, known) in enumerate(zip(ours.tables, workload.tables, strict=True))
            ),
        )

    def robin(at: int, table: Any) -> Any:
        return [Rect(table.name, (0, table.rows), (0, table.dim), (at % num,))]

    def rows(_: int, table: Any) -> Any:
        ends = [table.rows * rank // num for rank in range(num + 1)]
        return [Rect(table.name, (ends[rank], ends[rank + 1]), (0, table.dim), (rank,)) for rank in range(num)]

    return {
        "serial": Side(ours, overlap=False),
        "overlapped": Side(ours),
        "round robin": Side(placed(robin)),
        "all rows": Side(placed(rows)),
        "rounded": Side(rounded),
    }


def worker(cluster: str, rounds: int, traces: str = "") -> None:
    import itertools

    import torch

    from shardwright.comm import collective
    from shardwright.comm.mesh import Mesh
    from shardwright.measure.describe import describe
    from shardwright.planner import search
    from shardwright.planner.answer import exact, priced
    from shardwright.runtime.build import build
    from shardwright.spec import presets

    measured = presets.cluster(cluster)
    whole = [batch(number) for number in range(BATCHES)]
    workload = describe(model(), whole[0])
    chosen = sides(workload, measured)
    plan = next(iter(chosen.values())).plan
    mesh = Mesh(plan.axes, lanes=("main", "ids", "wire", "dense"))
    everyone = mesh.group(lane="main")
    mine = [part(one, mesh.rank, mesh.size) for one in whole]
    jobs, running = {}, {}
    for name, side in chosen.items():
        hottest = {
            table.name: torch.arange(table.rows) for table in workload.tables
        }  # ids are drawn in order of popularity
        jobs[name] = build(
            model(),
            side.plan,
            mesh,
            optimizer=lambda p: torch.optim.SGD(p, DENSE_RATE),
            hottest=hottest,
            overlap=side.overlap,
        )
        running[name] = jobs[name].run(itertools.cycle(mine))

    def together() -> float:
        collective.all_reduce(torch.zeros(1), everyone).wait()
        return perf_counter()

    found: dict[str, list[float]] = {name: [] for name in jobs}
    for _ in range(rounds):
        for name, outputs in running.items():
            for _ in range(WARM):
                next(outputs)
            start = together()
            for _ in range(STEPS):
                next(outputs)
            found[name].append(1e3 * (together() - start) / STEPS)
    if mesh.rank == 0:
        for name, side in chosen.items():
            problem = search.pose(workload, measured, BATCH, exact(workload))
            predicted = 1e3 * priced(problem, side.plan).seconds if side.overlap else None
            times = found[name]
            line = {"side": name, "ms": [round(one, 2) for one in (median(times), min(times), max(times))]}
            line |= {"predicted_ms": predicted and round(predicted, 2), "rounds": [round(one, 2) for one in times]}
            print(json.dumps(line), flush=True)
            if traces:
                path = Path(traces) / f"{name.replace(' ', '-')}.json"
                path.write_text(jobs[name].tracer.timeline().to_chrome())
    mesh.close()


def say(rank: int, line: str) -> None:
    if rank == 0:
        print(line, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--uplink", default="1gbit")
    parser.add_argument("--cpu", type=float, default=0.45)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--cluster", default="", help="a file that was measured in such a lab before")
    parser.add_argument("--traces", default="", help="a folder for the first rank's traces of all sides")
    asked = parser.parse_args()
    shape = Shape((Host(ranks=2, uplink=asked.uplink, cpu=asked.cpu),) * 2)
    with TemporaryDirectory() as folder, Lab(shape, "sharding") as lab:
        cluster = asked.cluster or f"{folder}/lab.toml"
        if not asked.cluster:
            lab.run([sys.executable, "-m", "shardwright.cli", "measure", "-o", cluster])
        call = f"worker({cluster!r}, {asked.rounds}, {asked.traces!r})"
        ended = lab.run([sys.executable, "-c", f"from benchmarks.sharding import worker; {call}"], say=say)
    return 0 if ended.rank is None else 1


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())

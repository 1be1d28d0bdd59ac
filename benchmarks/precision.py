"""What rounding gives a DHEN of eight layers, data parallel, rung by rung, and what it costs in quality.

    python -m benchmarks.precision [--part speed|quality] [--rounds N] [--steps N] [--cluster FILE] [--write NAME]

As root. Speed: a lab of 2 hosts x 2 ranks, each rank with 0.45 of a core, uplinks of 1 Gbit/s, emulated; on all rungs
one placement, the planner's for float32, and one list of stages. Each rung rounds one thing more: tables in fp16,
products in bf16, the state of Adam in bf16, dense gradients on the wire in bf16, vectors on the wire in fp16 and their
gradients in bf16. All rungs train in turns, overlapped, the order turned by one each round. Float32 runs torch's fused
Adam, the fastest that torch has. A JSON line per rung: milliseconds of a step (median, least, most), how many times as
fast as the rung before and as the first in the same round, bytes that a host's uplink carried in a step, what the
planner predicts, and the predicted parts of a step one after the other; a last one says whether this processor
multiplies bf16.

Quality: NE on 100,000 held-out samples of the planted click stream after N steps of 2,048, both ends of the ladder,
five seeds of data and weights, over two ranks of one host. A JSON line per run, a last one with the differences, their
mean and its 95 % interval (Student's t). Exit status 1 if all rungs together give less than 1.08, or NE is worse by
more than two standard errors.
"""

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import cycle, islice, pairwise
from pathlib import Path
from statistics import mean, median, stdev
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks import results_file
from benchmarks.sharding import QUOTA, STEPS, job, measure, quietly, three, turns
from benchmarks.turns import Asked, JobFailed, shared
from shardwright.lab.emulated_cluster import Lab
from shardwright.lab.shape import Host, Shape

LADDER = ("fp32", "tables fp16", "products bf16", "optimizer bf16", "all-reduce bf16", "all-to-all 16 bits")
ALLOW = ("tables.fp16", "dense.bf16", "optimizer.bf16", "wire.fp16", "wire.bf16")
MESSAGES = ("ids", "lengths", "meet", "vectors", "gradients", "spread", "reduce", "reduce.bottom", "gather", "scatter")
LAYERS, HOSTS = 8, 2
SEEDS = (1, 2, 3, 4, 5)
T95 = 2.776  # of Student's distribution for the mean of five
HELD_OUT = 100_000
WANTED = 1.08
PATIENCE_SECONDS = 3600.0
BATCHES = 4  # that come again and again where only time is asked


@dataclass(frozen=True, slots=True)
class Size:
    """Of a model and its batches."""

    dim: int
    bottom: tuple[int, ...]
    top: tuple[int, ...]
    modules: tuple[Any, ...]
    batch: int  # samples of a rank


SPEED = Size(64, (256, 64), (64,), ({"kind": "dlrm", "hidden": [256]}, "linear"), 1024)
QUALITY = Size(16, (64, 16), (64,), ("dlrm", "linear"), 1024)


def model(size: Size, seed: int = 1) -> Any:
    """On the meta device."""
    import torch

    from shardwright.data.sources.synthetic import ClickStream
    from shardwright.models import ctr
    from shardwright.spec.optimizer import RowWiseAdaGrad

    torch.manual_seed(seed)
    form: dict[str, Any] = {"dim": size.dim, "bottom": [*size.bottom], "top": [*size.top], "modules": [*size.modules]}
    with torch.device("meta"):
        return ctr.dhen(ClickStream(), RowWiseAdaGrad(lr=0.4), **form, stack={"layers": LAYERS})


def workload(size: Size, ranks: int) -> Any:
    from shardwright.data.loading.loader import Loader
    from shardwright.data.sources.synthetic import ClickStream
    from shardwright.measure.describe import describe

    return describe(model(size), Loader(ClickStream(), batch_size=size.batch * ranks).peek())


def plans(size: Size, cluster: Any) -> dict[str, Any]:
    """The planner's for float32, and on each rung one thing more that is rounded."""
    from shardwright.planner.plan import make_plan

    plan = replace(make_plan(workload(size, cluster.num_ranks), cluster).plan, allow=ALLOW)
    shorter = tuple(replace(one, placement=replace(one.placement, weight_dtype="float16")) for one in plan.tables)
    found = [plan, replace(plan, tables=shorter)]
    found.append(replace(found[-1], dense=replace(plan.dense, dtype="bfloat16")))
    found.append(replace(found[-1], dense=replace(found[-1].dense, state="bfloat16")))
    found.append(replace(found[-1], wire=replace(plan.wire, dense="bfloat16")))
    found.append(replace(found[-1], wire=replace(found[-1].wire, vectors="float16", gradients="bfloat16")))
    return dict(zip(LADDER, found, strict=True))


def made(size: Size, plan: Any, mesh: Any, seed: int, rate: float, hottest: Any = None) -> Any:
    import torch

    from shardwright.runtime.build import build

    mine = model(size, seed)
    hottest = hottest or {table.name: torch.arange(table.rows) for table in mine.sparse.tables}
    return build(mine, plan, mesh, optimizer=lambda p: torch.optim.Adam(p, rate, fused=True), hottest=hottest)


def mesh_of(plan: Any) -> Any:
    from shardwright.comm.mesh import Mesh

    lanes = ("main", "ids", "wire", "dense")
    return Mesh(plan.axes, lanes=lanes, timeout_seconds=PATIENCE_SECONDS, along=[()])


def speed_worker(folder: str, cluster: str) -> None:
    """Every rank of all rungs."""
    from time import perf_counter

    import torch

    from shardwright.comm import collective
    from shardwright.data.loading.loader import Loader
    from shardwright.data.sources.synthetic import ClickStream
    from shardwright.spec import presets

    known = plans(SPEED, presets.load_cluster(cluster))
    mesh = mesh_of(known[LADDER[0]])
    everyone = mesh.group(lane="main")
    batches = Loader(ClickStream(), batch_size=SPEED.batch * mesh.size, shard=(mesh.rank, mesh.size))
    mine = list(islice(batches, BATCHES))
    running = {name: made(SPEED, plan, mesh, 1, 0.002).run(cycle(mine)) for name, plan in known.items()}

    def together() -> float:
        collective.all_reduce(torch.zeros(1), everyone).wait()
        return perf_counter()

    asked = Asked(folder, "ours", mesh.rank, shared(everyone))
    asked.tell({})
    for name, warm, steps in asked.turns():
        losses = [float(next(running[name]).loss) for _ in range(warm)]
        start = together()
        for _ in range(steps):
            next(running[name])
        asked.tell({"seconds": together() - start, "losses": losses})
    mesh.close()


def quality_worker(steps: int, path: str) -> None:
    """Every rank, seed by seed, both ends of the ladder; the first writes a line of each run to `path`."""
    import torch

    from shardwright.data.loading.loader import Loader
    from shardwright.data.sources.source import Subset as Part
    from shardwright.data.sources.synthetic import ClickStream
    from shardwright.runtime.rank_group import RankGroup
    from shardwright.runtime.run.metrics import WindowMetrics
    from shardwright.spec import presets

    known = plans(QUALITY, presets.unmeasured_cluster(1, 2, 10**10))
    mesh = mesh_of(known[LADDER[0]])
    team, shard = RankGroup(mesh), (mesh.rank, mesh.size)
    size = QUALITY.batch * mesh.size
    for seed in SEEDS:
        for name in (LADDER[0], LADDER[-1]):
            ours, stream = made(QUALITY, known[name], mesh, seed, 0.002), ClickStream(seed=seed)
            with closing(Loader(stream, batch_size=size, seed=seed, shard=shard)) as loader:
                for _ in ours.run(islice(loader, steps)):
                    pass
            window = WindowMetrics("click")
            held = Part(replace(stream, seed=~seed), steps * size, steps * size + HELD_OUT)
            with closing(Loader(held, batch_size=size, shuffle=False, shard=shard)) as loader:
                for output in ours.evaluate(loader):
                    window.update(output)
            found = team.all_gather_window(window).compute()
            if mesh.rank == 0:
                line = {"benchmark": "precision", "part": "quality", "rung": name, "seed": seed, "steps": steps}
                line |= {key: found[key] for key in ("ne", "auc", "loss")}
                with Path(path).open("a") as file:
                    file.write(json.dumps(line) + "\n")
                print(json.dumps(line), flush=True)
    torch.manual_seed(0)
    mesh.close()


def speed(rounds: int, given: str) -> Iterator[dict[str, Any]]:
    with TemporaryDirectory() as folder, Lab(Shape((QUOTA,) * HOSTS), "precision") as lab:
        cluster = given or f"{folder}/cluster.toml"
        if not Path(cluster).exists():
            measure(lab, Path(cluster))
        call = f"from benchmarks.precision import speed_worker; speed_worker({folder!r}, {cluster!r})"
        with job(lab, folder, "ours", [sys.executable, "-c", call]) as asker:
            found = turns(lab, dict.fromkeys(LADDER, asker), rounds)
        yield from told(cluster, found)


def sent(stage: str) -> bool:
    """Whether a stage is a message; of a block's the name comes behind it."""
    return stage.split(" ")[0] in MESSAGES


def told(cluster: str, found: dict[str, list[dict[str, Any]]]) -> Iterator[dict[str, Any]]:
    from shardwright.measure.device import has_fast_bf16_matmul
    from shardwright.planner import search
    from shardwright.planner.plan import exact_precision, slowest_stage_seconds
    from shardwright.planner.reprice import reprice_plan
    from shardwright.spec import presets

    measured = presets.load_cluster(cluster)
    work = workload(SPEED, measured.num_ranks)
    posed = search.define_problem(work, measured, work.batch_size, exact_precision(work))
    known = plans(SPEED, measured)
    multiplied = {price.dtype for price in measured.device.prices if price.op == "matmul"}
    times = {name: [1e3 * one["seconds"] / STEPS for one in found[name]] for name in LADDER}
    for before, name in pairwise((LADDER[0], *LADDER)):
        line: dict[str, Any] = {"benchmark": "precision", "part": "speed", "rung": name, "ms": three(times[name])}
        for what, others in (("over_before", times[before]), ("over_fp32", times[LADDER[0]])):
            line[what] = three([other / one for other, one in zip(others, times[name], strict=True)], 3)
        line |= {"uplink_mb": round(1e-6 * median(one["bytes"] for one in found[name]), 2)}
        if known[name].dense.dtype in multiplied:
            predicted = reprice_plan(posed, known[name])
            parts = slowest_stage_seconds(predicted)
            line |= {"predicted_ms": round(1e3 * predicted.seconds, 1)}
            line |= {"messages_ms": round(1e3 * sum(s for one, s in parts.items() if sent(one)), 1)}
            line |= {"compute_ms": round(1e3 * sum(s for one, s in parts.items() if not sent(one)), 1)}
        yield line | {"losses": [round(loss, 5) for loss in found[name][0]["losses"]]}
    yield {
        "benchmark": "precision",
        "part": "speed",
        "dense_parameters": work.dense_parameters,
        "forward_mflops_of_a_sample": round(1e-6 * sum(one.forward_flops for one in work.blocks) / work.batch_size, 2),
        "multiplies_bf16": has_fast_bf16_matmul(),
        "together": median(a / b for a, b in zip(times[LADDER[0]], times[LADDER[-1]], strict=True)),
    }


def quality(steps: int) -> Iterator[dict[str, Any]]:
    with TemporaryDirectory() as folder, Lab(Shape((Host(ranks=2),)), "precision") as lab:
        path = f"{folder}/quality.jsonl"
        call = f"from benchmarks.precision import quality_worker; quality_worker({steps}, {path!r})"
        ended = lab.run([sys.executable, "-c", call], on_line=quietly)
        if ended.rank is not None:
            raise JobFailed(f"rank {ended.rank} ended with status {ended.status}")
        lines = [json.loads(line) for line in Path(path).read_text().splitlines()]
    yield from lines
    ne = {(line["rung"], line["seed"]): line["ne"] for line in lines}
    worse = [ne[LADDER[-1], seed] - ne[LADDER[0], seed] for seed in SEEDS]
    error = stdev(worse) / len(worse) ** 0.5
    yield {
        "benchmark": "precision",
        "part": "quality",
        "ne_fp32": [ne[LADDER[0], seed] for seed in SEEDS],
        "ne_worse_by": worse,
        "mean": mean(worse),
        "interval": [mean(worse) - T95 * error, mean(worse) + T95 * error],
        "standard_error": error,
        "ne_fp32_stdev": stdev(ne[LADDER[0], seed] for seed in SEEDS),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=("speed", "quality"), default="")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--cluster", default="", metavar="FILE", help="as measured in such a lab; made where missing")
    parser.add_argument("--write", default="", help="name of a file in benchmarks/results")
    parser.add_argument("--smoke", action="store_true", help="the smallest case, to see that it runs")
    asked = parser.parse_args(arguments)
    if asked.smoke:
        asked.rounds, asked.steps = 1, 2
    lines: list[dict[str, Any]] = []
    for name, found in (("speed", speed(asked.rounds, asked.cluster)), ("quality", quality(asked.steps))):
        for line in found if asked.part in ("", name) else ():
            lines.append(line)
            print(json.dumps(line), flush=True)
    if asked.write:
        results_file.write(asked.write, "precision", lines)
    slow = any(line.get("together", WANTED) < WANTED for line in lines)
    worse = any(line["mean"] > 2 * line["standard_error"] for line in lines if "mean" in line)
    return int((slow or worse) and not asked.smoke)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())

"""Speedup of an eight-layer data-parallel DHEN by lower precision, rung by rung, and cost in quality.

    python -m benchmarks.precision [--part speed|quality] [--rounds N] [--steps N] [--cluster FILE] [--write NAME]

As root. Speed: an emulated lab of 2 hosts x 2 ranks, each rank with 0.45 of a core, uplinks of 1 Gbit/s. All rungs have
the placement and the stages of the planner's plan for float32. Each rung lowers one more precision: tables in fp16,
matrix products in bf16, Adam's state in bf16, all-reduces of dense gradients in bf16, exchanged vectors in fp16 and
their gradients in bf16. All rungs train overlapped, in turns, in an order that rotates each round. Float32 uses torch's
fused Adam, torch's fastest. A JSON line per rung: milliseconds of a step (median, least, most), the speedup over the
previous rung and over the first in the same round, bytes per step on a host's uplink, the predicted step, and the
predicted parts of a step, summed without overlap. A last line has whether this processor multiplies bf16 natively.

Quality: NE on 100,000 held-out samples of the planted click stream after N steps of 2,048 samples, for the first and
the last rung, five seeds of data and weights, over two ranks of one host. A JSON line per run; a last line with the
differences, their mean and its 95 % confidence interval (Student's t). Exit status 1 if the last rung's speedup is
below 1.08, or its NE is worse by more than two standard errors.
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
from benchmarks.sharding import HOST, STEPS, measure, median_min_max, print_first_rank, run_turns, start_job
from benchmarks.turns import JobFailed, TurnServer, make_broadcast
from shardwright.lab.emulated_cluster import Lab
from shardwright.lab.shape import Host, Shape

LADDER = ("fp32", "tables fp16", "products bf16", "optimizer bf16", "all-reduce bf16", "all-to-all 16 bits")
ALLOW = ("tables.fp16", "dense.bf16", "optimizer.bf16", "wire.fp16", "wire.bf16")
MESSAGES = ("ids", "lengths", "meet", "vectors", "gradients", "spread", "reduce", "reduce.bottom", "gather", "scatter")
LAYERS, HOSTS = 8, 2
SEEDS = (1, 2, 3, 4, 5)
T95 = 2.776  # 97.5th percentile of Student's t with 4 degrees of freedom
HELD_OUT = 100_000
MIN_SPEEDUP = 1.08
TIMEOUT_SECONDS = 3600.0  # of a collective: ranks sleep in one between turns
NUM_BATCHES = 4  # used in a cycle where only speed is measured


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Sizes of a model and its batches."""

    dim: int
    bottom: tuple[int, ...]
    top: tuple[int, ...]
    modules: tuple[Any, ...]
    batch: int  # local batch size


SPEED = ModelSize(64, (256, 64), (64,), ({"kind": "dlrm", "hidden": [256]}, "linear"), 1024)
QUALITY = ModelSize(16, (64, 16), (64,), ("dlrm", "linear"), 1024)


def make_model(size: ModelSize, seed: int = 1) -> Any:
    """The model on the meta device."""
    import torch

    from shardwright.data.sources.synthetic import ClickStream
    from shardwright.models import ctr
    from shardwright.models.click_inputs import ClickInputs
    from shardwright.spec.optimizer import RowWiseAdaGrad

    torch.manual_seed(seed)
    sizes: dict[str, Any] = {"dim": size.dim, "bottom": [*size.bottom], "top": [*size.top], "modules": [*size.modules]}
    with torch.device("meta"):
        return ctr.dhen(ClickInputs(ClickStream(), RowWiseAdaGrad(lr=0.4)), **sizes, stack={"layers": LAYERS})


def describe_workload(size: ModelSize, ranks: int) -> Any:
    from shardwright.data.loading.loader import Loader
    from shardwright.data.sources.synthetic import ClickStream
    from shardwright.measure.describe import describe

    return describe(make_model(size), Loader(ClickStream(), batch_size=size.batch * ranks).peek())


def make_plans(size: ModelSize, cluster: Any) -> dict[str, Any]:
    """By rung: the planner's plan for float32, with one more precision lowered on each rung."""
    from shardwright.planner.plan import make_plan

    plan = replace(make_plan(describe_workload(size, cluster.num_ranks), cluster).plan, allow=ALLOW)
    tables = tuple(replace(t, placement=replace(t.placement, weight_dtype="float16")) for t in plan.tables)
    plans = [plan, replace(plan, tables=tables)]
    plans.append(replace(plans[-1], dense=replace(plan.dense, dtype="bfloat16")))
    plans.append(replace(plans[-1], dense=replace(plans[-1].dense, state="bfloat16")))
    plans.append(replace(plans[-1], wire=replace(plan.wire, dense="bfloat16")))
    plans.append(replace(plans[-1], wire=replace(plans[-1].wire, vectors="float16", gradients="bfloat16")))
    return dict(zip(LADDER, plans, strict=True))


def build_job(size: ModelSize, plan: Any, mesh: Any, seed: int, lr: float, hottest: Any = None) -> Any:
    import torch

    from shardwright.runtime.build import build

    model = make_model(size, seed)
    hottest = hottest or {table.name: torch.arange(table.rows) for table in model.sparse.tables}
    return build(model, plan, mesh, optimizer=lambda p: torch.optim.Adam(p, lr, fused=True), hottest=hottest)


def make_mesh(plan: Any) -> Any:
    from shardwright.comm.mesh import Mesh

    lanes = ("main", "ids", "wire", "dense")
    return Mesh(plan.mesh_axes, groups=[(lane, ()) for lane in lanes], timeout_seconds=TIMEOUT_SECONDS)


def speed_worker(folder: str, cluster_file: str) -> None:
    """Body of every rank of the speed job, which runs all rungs."""
    from time import perf_counter

    import torch

    from shardwright.comm import collective
    from shardwright.data.loading.loader import Loader
    from shardwright.data.sources.synthetic import ClickStream
    from shardwright.spec import presets

    plans = make_plans(SPEED, presets.load_cluster(cluster_file))
    mesh = make_mesh(plans[LADDER[0]])
    group = mesh.group(lane="main")
    batches = Loader(ClickStream(), batch_size=SPEED.batch * mesh.size, shard=(mesh.rank, mesh.size))
    local_batches = list(islice(batches, NUM_BATCHES))
    runs = {name: build_job(SPEED, plan, mesh, 1, 0.002).run(cycle(local_batches)) for name, plan in plans.items()}

    def barrier_time() -> float:
        collective.all_reduce(torch.zeros(1), group).wait()
        return perf_counter()

    server = TurnServer(folder, "ours", mesh.rank, make_broadcast(group))
    server.reply({})
    for name, warm, steps in server.turns():
        losses = [float(next(runs[name]).loss) for _ in range(warm)]
        start = barrier_time()
        for _ in range(steps):
            next(runs[name])
        server.reply({"seconds": barrier_time() - start, "losses": losses})
    mesh.close()


def quality_worker(steps: int, path: str) -> None:
    """Body of every rank: train the first and last rung per seed; rank 0 appends a line per run to `path`."""
    import torch

    from shardwright.data.loading.loader import Loader
    from shardwright.data.sources.source import Subset
    from shardwright.data.sources.synthetic import ClickStream
    from shardwright.runtime.rank_group import RankGroup
    from shardwright.runtime.run.metrics import WindowMetrics
    from shardwright.spec import presets

    plans = make_plans(QUALITY, presets.unmeasured_cluster(1, 2, 10**10))
    mesh = make_mesh(plans[LADDER[0]])
    rank_group, shard = RankGroup(mesh), (mesh.rank, mesh.size)
    size = QUALITY.batch * mesh.size
    for seed in SEEDS:
        for name in (LADDER[0], LADDER[-1]):
            job, stream = build_job(QUALITY, plans[name], mesh, seed, 0.002), ClickStream(seed=seed)
            with closing(Loader(stream, batch_size=size, seed=seed, shard=shard)) as loader:
                for _ in job.run(islice(loader, steps)):
                    pass
            window = WindowMetrics("click")
            held_out = Subset(replace(stream, seed=~seed), steps * size, steps * size + HELD_OUT)
            with closing(Loader(held_out, batch_size=size, shuffle=False, shard=shard)) as loader:
                for output in job.evaluate(loader):
                    window.update(output)
            values = rank_group.all_gather_window(window).compute()
            if mesh.rank == 0:
                line = {"benchmark": "precision", "part": "quality", "rung": name, "seed": seed, "steps": steps}
                line |= {key: values[key] for key in ("ne", "auc", "loss")}
                with Path(path).open("a") as file:
                    file.write(json.dumps(line) + "\n")
                print(json.dumps(line), flush=True)
    torch.manual_seed(0)
    mesh.close()


def run_speed(rounds: int, cluster_file: str) -> Iterator[dict[str, Any]]:
    with TemporaryDirectory() as folder, Lab(Shape((HOST,) * HOSTS), "precision") as lab:
        cluster = cluster_file or f"{folder}/cluster.toml"
        if not Path(cluster).exists():
            measure(lab, Path(cluster))
        call = f"from benchmarks.precision import speed_worker; speed_worker({folder!r}, {cluster!r})"
        with start_job(lab, folder, "ours", [sys.executable, "-c", call]) as client:
            replies = run_turns(lab, dict.fromkeys(LADDER, client), rounds)
        yield from result_lines(cluster, replies)


def is_message(stage: str) -> bool:
    """Whether a stage is communication; the name of its block may follow the stage's name."""
    return stage.split(" ")[0] in MESSAGES


def result_lines(cluster_file: str, replies: dict[str, list[dict[str, Any]]]) -> Iterator[dict[str, Any]]:
    from shardwright.measure.device import has_fast_bf16_matmul
    from shardwright.planner import search
    from shardwright.planner.plan import exact_precision, slowest_stage_seconds
    from shardwright.planner.reprice import reprice_plan
    from shardwright.spec import presets

    cluster = presets.load_cluster(cluster_file)
    work = describe_workload(SPEED, cluster.num_ranks)
    problem = search.define_problem(work, cluster, work.batch_size, exact_precision(work))
    plans = make_plans(SPEED, cluster)
    matmul_dtypes = {price.dtype for price in cluster.device.prices if price.op == "matmul"}
    times = {name: [1e3 * reply["seconds"] / STEPS for reply in replies[name]] for name in LADDER}
    for previous, name in pairwise((LADDER[0], *LADDER)):
        line: dict[str, Any] = {"benchmark": "precision", "part": "speed", "rung": name}
        line |= {"ms": median_min_max(times[name])}
        for key, reference_times in (("over_before", times[previous]), ("over_fp32", times[LADDER[0]])):
            ratios = [reference / ms for reference, ms in zip(reference_times, times[name], strict=True)]
            line[key] = median_min_max(ratios, 3)
        line |= {"uplink_mb": round(1e-6 * median(reply["bytes"] for reply in replies[name]), 2)}
        if plans[name].dense.dtype in matmul_dtypes:
            predicted = reprice_plan(problem, plans[name])
            parts = slowest_stage_seconds(predicted)
            line |= {"predicted_ms": round(1e3 * predicted.seconds, 1)}
            line |= {"messages_ms": round(1e3 * sum(s for stage, s in parts.items() if is_message(stage)), 1)}
            line |= {"compute_ms": round(1e3 * sum(s for stage, s in parts.items() if not is_message(stage)), 1)}
        yield line | {"losses": [round(loss, 5) for loss in replies[name][0]["losses"]]}
    yield {
        "benchmark": "precision",
        "part": "speed",
        "dense_parameters": work.dense_parameters,
        "forward_mflops_of_a_sample": round(1e-6 * sum(b.forward_flops for b in work.blocks) / work.batch_size, 2),
        "multiplies_bf16": has_fast_bf16_matmul(),
        "together": median(a / b for a, b in zip(times[LADDER[0]], times[LADDER[-1]], strict=True)),
    }


def run_quality(steps: int) -> Iterator[dict[str, Any]]:
    with TemporaryDirectory() as folder, Lab(Shape((Host(ranks=2),)), "precision") as lab:
        path = f"{folder}/quality.jsonl"
        call = f"from benchmarks.precision import quality_worker; quality_worker({steps}, {path!r})"
        result = lab.run([sys.executable, "-c", call], on_line=print_first_rank)
        if result.rank is not None:
            raise JobFailed(f"rank {result.rank} ended with status {result.status}")
        lines = [json.loads(line) for line in Path(path).read_text().splitlines()]
    yield from lines
    ne = {(line["rung"], line["seed"]): line["ne"] for line in lines}
    differences = [ne[LADDER[-1], seed] - ne[LADDER[0], seed] for seed in SEEDS]
    error = stdev(differences) / len(differences) ** 0.5
    yield {
        "benchmark": "precision",
        "part": "quality",
        "ne_fp32": [ne[LADDER[0], seed] for seed in SEEDS],
        "ne_worse_by": differences,
        "mean": mean(differences),
        "interval": [mean(differences) - T95 * error, mean(differences) + T95 * error],
        "standard_error": error,
        "ne_fp32_stdev": stdev(ne[LADDER[0], seed] for seed in SEEDS),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=("speed", "quality"), default="")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--cluster", default="", metavar="FILE", help="cluster file of such a lab; measured if missing")
    parser.add_argument("--write", default="", help="name of a file in benchmarks/results")
    parser.add_argument("--smoke", action="store_true", help="the smallest case, to see that it runs")
    args = parser.parse_args(arguments)
    if args.smoke:
        args.rounds, args.steps = 1, 2
    lines: list[dict[str, Any]] = []
    for name, results in (("speed", run_speed(args.rounds, args.cluster)), ("quality", run_quality(args.steps))):
        for line in results if args.part in ("", name) else ():
            lines.append(line)
            print(json.dumps(line), flush=True)
    if args.write:
        results_file.write(args.write, "precision", lines)
    slow = any(line.get("together", MIN_SPEEDUP) < MIN_SPEEDUP for line in lines)
    worse = any(line["mean"] > 2 * line["standard_error"] for line in lines if "mean" in line)
    return int((slow or worse) and not args.smoke)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())

"""How well the planner predicts steps and memory of GPT under drawn parallelism: pipelines, DDP, FSDP, HSDP,
recomputation.

    python -m benchmarks.drawn_layers [--on SETTING ...] [--draws N] [--seed N] [--steps N] [--rounds N] [--write NAME]

As root. For each setting a lab is created and measured by `shardwright measure`. Then configurations are drawn: ranks
of a pipeline, micro-batches, strategy of the dense model, activation checkpointing; all train the same GPT of 8
blocks with 64 sequences of 32 tokens a step by `shardwright train gpt plan.cluster=FILE plan.pipeline=...
plan.dense=...`, which predicts its own step before it starts. Settings: "4 x 1, 500 Mbit", 4 hosts with a rank of
0.45 of a core each and uplinks of that rate; "2 x 2, 250 Mbit", 2 hosts with 2 such ranks.

All configurations run, then all run again, so that two runs of one are some minutes apart. A JSON line per run: the
mean step from metrics.jsonl and the predicted one in ms, their ratio - 1 (`off`), and the steps of both halves of the
run. After the first run the job is built once more from the run's plan, and ranks count what they allocate from there
to the end of MEMORY_STEPS steps (benchmarks/live_memory.py): the peak of the fullest rank, the one that the planner
predicts, and `memory_off`, the difference of the two that is largest over ranks, as a share.

A line per configuration: means over its runs of measured and predicted steps, and their ratio - 1. A line per setting:
mean and largest size of `off`, of `memory_off`, and of `off` of single runs (`mean_run_off`); how far the last run's
measured and predicted steps are from the first run's (`mean_repeat_off`, `mean_repeat_predicted_off`), the A/A floor;
and `place`: that of the configuration that was measured fastest, in the order of predicted steps. Hosts, links and CPU
quotas are emulated. With --rounds 0 only memory is compared.
"""

import argparse
import gc
import json
import os
import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from itertools import islice, product
from pathlib import Path
from statistics import mean, median
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np

from benchmarks import results_file
from benchmarks.live_memory import Counter, compile_counter
from benchmarks.recipes import LOG_EVERY, run_training, step_seconds
from benchmarks.sharding import measure
from shardwright.lab.emulated_cluster import Lab
from shardwright.lab.shape import Host, Shape
from shardwright.report import step_times
from shardwright.spec import files
from shardwright.spec.plan import Plan
from shardwright.spec.timeline import Timeline

CPU = 0.45
SETTINGS = {
    "4 x 1, 500 Mbit": Shape((Host(uplink="500mbit", cpu=CPU),) * 4),
    "2 x 2, 250 Mbit": Shape((Host(ranks=2, uplink="250mbit", cpu=CPU),) * 2),
}
SEQUENCES, LENGTH = 64, 32
MEMORY, MEMORY_STEPS = "allocated at peak:", 4
MODEL = ("model.channels=256", "model.num_blocks=8", "model.num_heads=4", "model.hidden=688")
MODEL += (f"data.length={LENGTH}", f"train.batch_size={SEQUENCES}")


class Configuration(NamedTuple):
    pipeline: int
    micro_batches: int
    dense: str

    @property
    def keys(self) -> list[str]:
        keys = [f"plan.pipeline={self.pipeline}", f"plan.dense={self.dense}"]
        return [*keys, *([f"plan.micro_batches={self.micro_batches}"] if self.pipeline > 1 else [])]


def configurations(shape: Shape) -> list[Configuration]:
    """All that the setting can run; a pipeline is along one level of the network."""
    per_host = shape.hosts[0].ranks
    layouts = {1: ["DDP", "FSDP", *(["HSDP"] if per_host > 1 else [])], 2: ["DDP", "FSDP"]}
    layouts |= {4: ["DDP"]} if per_host == 1 else {}
    return [
        Configuration(pipeline, micro_batches, f"{layout}{checkpointing}")
        for pipeline, micro_batches, checkpointing in product(layouts, (1, 4, 8), ("", " + selective", " + full"))
        for layout in layouts[pipeline]
        if (pipeline == 1) == (micro_batches == 1)
    ]


def compare_run(path: Path) -> dict[str, Any]:
    """Predicted and measured step of a run."""
    predicted = median(step_times.step_seconds(Timeline.from_chrome((path / "predicted.json").read_text())))
    seconds, halves = step_seconds(path)
    return {
        "predicted_ms": round(1e3 * predicted, 1),
        "measured_ms": round(1e3 * seconds, 1),
        "off": round(predicted / seconds - 1, 4),
        "halves_ms": [round(1e3 * half, 1) for half in halves],
    }


def print_memory(path: str) -> None:
    """On each rank: build the job of a run, train some steps, and print the bytes allocated at their peak.

    Twice, since the first job of a process allocates some memory once.
    """
    import torch

    from shardwright import config
    from shardwright.comm.pending import Waiter
    from shardwright.kernels.matmul import use_library
    from shardwright.runtime.build import build
    from shardwright.runtime.dense_layout import mesh_for
    from shardwright.runtime.run import recipe
    from shardwright.runtime.run.setup import make_rank_loader

    settings, plan = config.load(f"{path}/config.toml"), files.read(Plan, f"{path}/plan.json")
    torch.manual_seed(settings.seed)
    use_library(settings.train.products)
    source, counter, allocated = recipe.make_source(settings), Counter(), 0
    with closing(mesh_for(plan)) as mesh:
        for _ in range(2):
            model = recipe.make_model(settings, source)
            gc.collect()
            before = counter.live
            counter.begin()
            job = build(model, plan, mesh, optimizer=recipe.make_dense_optimizer(settings), clip=settings.dense.clip)
            with closing(make_rank_loader(settings, source, plan.position(mesh.rank, plan.sample_axes))) as loader:
                for _ in job.run(islice(loader, MEMORY_STEPS)):
                    pass
            allocated = counter.most - before
            del job, model
            gc.collect()
            for waiter in (x for x in gc.get_objects() if isinstance(x, Waiter)):
                waiter.retained_works = []  # a lane keeps its last exchange until the next
    print(f"{MEMORY} {allocated}", flush=True)


def compare_memory(lab: Lab, path: Path, preload: Path, keys: Sequence[str], cluster: Path) -> dict[str, Any]:
    """Predicted and measured peak of the bytes that a rank allocates for a job."""
    from shardwright.planner.memory.budget import memory_parts_by_rank
    from shardwright.runtime.planning import read_plan_request

    problem = read_plan_request("gpt", keys, str(cluster)).make_plan().candidate.problem
    predicted_R = np.sum([*memory_parts_by_rank(problem).values()], axis=0).tolist()
    bytes_by_rank: dict[int, float] = {}
    lines: list[str] = []

    def read_line(rank: int, line: str) -> None:
        if line.startswith(MEMORY):
            bytes_by_rank[rank] = float(line.removeprefix(MEMORY))
        lines.append(f"[{rank}] {line}")

    call = f"from benchmarks.drawn_layers import print_memory; print_memory({str(path)!r})"
    result = lab.run(["env", f"LD_PRELOAD={preload}", sys.executable, "-c", call], read_line)
    if result.rank is not None or len(bytes_by_rank) != len(predicted_R):
        last = "\n".join(lines[-8:])
        raise SystemExit(f"memory of {path.name}: rank {result.rank} ended with status {result.status}\n{last}")
    measured_R = [bytes_by_rank[rank] for rank in sorted(bytes_by_rank)]
    off = [predicted / measured - 1 for predicted, measured in zip(predicted_R, measured_R, strict=True)]
    return {
        "predicted_mb": round(1e-6 * max(predicted_R), 1),
        "measured_mb": round(1e-6 * max(measured_R), 1),
        "memory_off": round(max(off, key=abs), 4),
    }


def run_setting(setting: str, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    shape = SETTINGS[setting]
    drawn = random.Random(args.seed).sample(configurations(shape), args.draws)
    common = {"benchmark": "drawn_layers", "emulated": "hosts, links, CPU quotas", "setting": setting}
    runs: dict[Configuration, list[dict[str, Any]]] = {configuration: [] for configuration in drawn}
    with TemporaryDirectory() as folder, Lab(shape, "drawn") as lab:
        cluster, paths, preload = Path(folder) / "cluster.toml", Path(folder) / "runs", compile_counter(folder)
        measure(lab, cluster)
        paths.mkdir()
        for number, configuration in product(range(args.rounds or 1), drawn):
            steps = args.steps if args.rounds else MEMORY_STEPS
            keys = [*MODEL, f"plan.cluster={cluster}", *configuration.keys, f"train.steps={steps}"]
            path = run_training(lab, paths, "gpt", keys)
            if isinstance(path, str):
                raise SystemExit(f"{setting}, {configuration}: {path}")
            memory = compare_memory(lab, path, preload, keys, cluster) if number == 0 else {}
            runs[configuration].append((compare_run(path) if args.rounds else {}) | memory)
            yield common | configuration._asdict() | {"run": number} | runs[configuration][-1]
    if not args.rounds:
        yield common | memory_summary([line for own in runs.values() for line in own])
        return
    lines = [configuration._asdict() | means(runs[configuration]) for configuration in drawn]
    yield from (common | line for line in lines)
    yield common | summary(lines, [*runs.values()])


def means(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of the runs of a configuration."""
    predicted, measured = (mean(run[name] for run in runs) for name in ("predicted_ms", "measured_ms"))
    times = {"predicted_ms": round(predicted, 1), "measured_ms": round(measured, 1)}
    memory = {name: runs[0][name] for name in ("predicted_mb", "measured_mb", "memory_off")}
    return {"runs": len(runs), **times, "off": round(predicted / measured - 1, 4), **memory}


def summary(lines: Sequence[dict[str, Any]], runs: Sequence[Sequence[dict[str, Any]]]) -> dict[str, Any]:
    """Errors of the predictions, the A/A floor, and the place of the fastest in the predicted order."""
    sizes = [abs(line["off"]) for line in lines]
    fastest = min(lines, key=lambda line: line["measured_ms"])
    order = sorted(lines, key=lambda line: line["predicted_ms"])
    repeated = {
        name: mean(abs(line[-1][key] / line[0][key] - 1) for line in runs)
        for name, key in (("mean_repeat_off", "measured_ms"), ("mean_repeat_predicted_off", "predicted_ms"))
        if len(runs[0]) > 1
    }
    return {
        "configurations": len(lines),
        "mean_off": round(mean(sizes), 4),
        "max_off": round(max(sizes), 4),
        "mean_run_off": round(mean(abs(run["off"]) for line in runs for run in line), 4),
        **{name: round(value, 4) for name, value in repeated.items()},
        **memory_summary(lines),
        "place": 1 + order.index(fastest),
    }


def memory_summary(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    sizes = [abs(line["memory_off"]) for line in lines]
    return {"mean_memory_off": round(mean(sizes), 4), "max_memory_off": round(max(sizes), 4)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--on", nargs="*", default=list(SETTINGS), choices=SETTINGS, metavar="SETTING")
    parser.add_argument("--draws", type=int, default=10, help="configurations of a setting")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=8 * LOG_EVERY)
    parser.add_argument("--rounds", type=int, default=2, help="runs of each configuration; 0: memory only")
    parser.add_argument("--write", default="", help="name of a file in benchmarks/results")
    parser.add_argument("--smoke", action="store_true", help="the smallest case, to see that it runs")
    args = parser.parse_args()
    if args.smoke:
        args.on, args.draws, args.steps, args.rounds = args.on[:1], 1, 3 * LOG_EVERY, 1
    lines: list[dict[str, Any]] = []
    for setting in args.on:
        for line in run_setting(setting, args):
            lines.append(line)
            print(json.dumps(line), flush=True)
    if args.write:
        results_file.write(args.write, "drawn_layers", lines)
    return 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())

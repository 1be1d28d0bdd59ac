"""How well the planner predicts the shipped recipes, and how good its plans are, in random labs.

    python -m benchmarks.recipes [--seed N] [--labs N] [--recipes NAME ...] [--steps N] [--write NAME]

As root. SEED draws the labs: 2 to 4 hosts, at most 4 ranks in all, one uplink rate of 100 to 500 Mbit/s, one CPU quota
of 0.4 to 0.6 of a core for each rank, limited by the number of ranks that share a core of this machine. In each lab
`shardwright measure` runs once; then, for each recipe, `shardwright train RECIPE plan.cluster=FILE` runs with the
planner's plan, with all tables row-wise, with tables assigned round robin, and with the planner's plan again, one after
the other. The global batch size is the smallest power of two whose step is predicted to take 200 ms.

A JSON line per run: the mean step from metrics.jsonl, the predicted step, and both for each part of a step, in ms; a
part's time is that of its stage without overlap. A line per lab and recipe: the step of other plans over the planner's,
and the A/A floor: the second run of the planner's plan over the first. The last line, over the planner's runs: the mean
absolute error and the bias (mean of predicted / measured - 1), in all and by part, the floor, and how often no other
plan was faster by more than the floor (at least 2 %). A failed run is reported as a line, and the exit status is 1.
Hosts, links and CPU quotas are emulated.
"""

import argparse
import json
import math
import os
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, median
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks import results_file
from benchmarks.sharding import measure
from shardwright.lab.emulated_cluster import Lab
from shardwright.lab.shape import Host, Shape
from shardwright.spec import files
from shardwright.spec.plan import Plan
from shardwright.spec.timeline import Timeline

RECIPES = ("dlrm", "dcn-v2", "deepfm", "dhen", "autoint", "wide-deep", "dlrm-moe", "logistic")
HOSTS, MAX_RANKS = (2, 3, 4), 4
UPLINK_MBIT, CPU = (100, 500), (0.4, 0.6)
SHARE_OF_CORES = 0.9  # upper bound on the sum of the quotas on a core, which TCP also uses
STEP_SECONDS = 0.2
MIN_BATCH_SIZE, MAX_BATCH_SIZE = 1 << 10, 1 << 17
LOG_EVERY = 5  # steps between lines of metrics; the first two lines are warm-up
AGAIN = "planner, again"
MIN_FLOOR = 0.02
MIN_PART_MS = 1.0  # shorter parts, predicted and measured, are not compared


@dataclass(frozen=True)
class RandomLab:
    """A lab with the same number of ranks on each host."""

    hosts: int
    ranks: int
    uplink: str
    cpu: float

    @property
    def shape(self) -> Shape:
        return Shape((Host(ranks=self.ranks, uplink=self.uplink, cpu=self.cpu),) * self.hosts)


def draw_labs(seed: int, num: int, cores: int) -> list[RandomLab]:
    rng = random.Random(seed)
    labs = []
    for _ in range(num):
        hosts = rng.choice(HOSTS)
        ranks = rng.randint(1, MAX_RANKS // hosts)
        uplink = 10 * rng.randint(UPLINK_MBIT[0] // 10, UPLINK_MBIT[1] // 10)
        max_cpu = min(CPU[1], SHARE_OF_CORES / math.ceil(hosts * ranks / cores))
        labs.append(RandomLab(hosts, ranks, f"{uplink}mbit", round(rng.uniform(min(CPU[0], max_cpu), max_cpu), 2)))
    return labs


def choose_batch(recipe: str, cluster: Path) -> int:
    """The smallest power of two as global batch size whose predicted step is long enough to measure."""
    from shardwright.runtime.planning import read_plan_request

    size = MIN_BATCH_SIZE
    while (
        size < MAX_BATCH_SIZE
        and read_plan_request(recipe, [f"train.batch_size={size}"], str(cluster)).make_plan().candidate.seconds
        < STEP_SECONDS
    ):
        size *= 2
    return size


def pins_by_side(recipe: str, batch: int, cluster: Path, num_ranks: int) -> dict[str, list[str]]:
    """By side: the pins that set the layout of tables; none for the planner's own plan."""
    from shardwright.runtime.planning import read_plan_request

    names = [
        table.table
        for table in read_plan_request(recipe, [f"train.batch_size={batch}"], str(cluster)).make_plan().plan.tables
    ]
    return {
        "planner": [],
        "all row-wise": [f"plan.pins.{name}=row" for name in names],
        "round robin": [f"plan.pins.{name}=table@{i % num_ranks}" for i, name in enumerate(names)],
        AGAIN: [],
    }


def run_training(lab: Lab, folder: Path, recipe: str, overrides: Sequence[str]) -> Path | str:
    """Train over the ranks of a lab; returns the directory of the run, or the last lines if it failed."""
    lines: list[str] = []
    name = f"run-{len(list(folder.iterdir()))}"
    options = ["train.eval_every=0", "train.checkpoint_every=0", "train.eval_samples=0", f"train.log_every={LOG_EVERY}"]
    command = [sys.executable, "-m", "shardwright.cli", "train", recipe, f"run.directory={folder}", f"run.name={name}"]
    result = lab.run([*command, *options, *overrides], lambda rank, line: lines.append(f"[{rank}] {line}"))
    if result.rank is not None:
        return "\n".join([f"rank {result.rank} ended with status {result.status}", *lines[-8:]])
    return folder / name


def step_seconds(path: Path) -> tuple[float, list[float]]:
    """Mean seconds of a step by the run's metrics after warm-up: over all lines, and over each half."""
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    times = [(line["step"], line["seconds"]) for line in lines if line["kind"] == "train"][1:]
    middle = len(times) // 2

    def rate(first: tuple[int, float], last: tuple[int, float]) -> float:
        return (last[1] - first[1]) / (last[0] - first[0])

    halves = [(times[0], times[middle]), (times[middle], times[-1])]
    return rate(times[0], times[-1]), [rate(*half) for half in halves if half[0] != half[1]]


def merge_stage_bodies(expected: dict[str, float], plan: Plan) -> dict[str, float]:
    """Predicted seconds by the names in the trace, which traces a stage's body as the stage."""
    seconds = dict(expected)
    for stage in plan.stages:
        bodies = [seconds.pop(part.name) for part in stage.body if part.lane == stage.lane and part.name in seconds]
        seconds |= {stage.name: sum(bodies)} if bodies else {}
    return seconds


def merge_reductions(seconds: dict[str, float]) -> dict[str, float]:
    """Merge all reductions of dense gradients into a part: prediction and trace split them differently."""
    names = [name for name in seconds if name.split(" ")[0] == "reduce" or name == "reduce.bottom"]
    others = {name: value for name, value in seconds.items() if name not in names}
    return others | ({"reduce": sum(seconds[name] for name in names)} if names else {})


def compare_run(path: Path) -> dict[str, Any]:
    """Compare predicted and measured milliseconds of a run's step, in all and by part."""
    from shardwright.report import step_times

    predicted = Timeline.from_chrome((path / "predicted.json").read_text())
    measured = Timeline.from_chrome((path / "trace.json").read_text())
    seconds, halves = step_seconds(path)
    predicted_seconds = median(step_times.step_seconds(predicted))
    predicted_parts = {name: part.seconds for name, part in step_times.parts_by_name(predicted).items()}
    predicted_parts = merge_reductions(merge_stage_bodies(predicted_parts, files.read(Plan, path / "plan.json")))
    measured_parts = merge_reductions({name: part.seconds for name, part in step_times.parts_by_name(measured).items()})
    parts = {
        name: [1e3 * predicted_parts[name] if name in predicted_parts else None, 1e3 * measured_parts[name]]
        for name in measured_parts
    }
    return {
        "predicted_ms": round(1e3 * predicted_seconds, 1),
        "measured_ms": round(1e3 * seconds, 1),
        "off": round(predicted_seconds / seconds - 1, 4),
        "halves_ms": [round(1e3 * half, 1) for half in halves],
        "parts_ms": {name: [None if ms is None else round(ms, 2) for ms in pair] for name, pair in parts.items()},
    }


def run_recipe(
    lab: Lab, lab_fields: Mapping[str, Any], recipe: str, cluster: Path, args: argparse.Namespace
) -> Iterator[Any]:
    """Run all sides of a recipe: a line per side, then a line that compares them."""
    name = f"synthetic-{recipe}"
    batch = args.batch or choose_batch(name, cluster)
    case = {"benchmark": "recipes", **lab_fields, "recipe": name, "batch_size": batch}
    step_ms: dict[str, float] = {}
    with TemporaryDirectory() as folder:
        for side, pins in pins_by_side(name, batch, cluster, lab.shape.num_ranks).items():
            keys = [f"plan.cluster={cluster}", f"train.batch_size={batch}", f"train.steps={args.steps}", *pins]
            run = run_training(lab, Path(folder), name, keys)
            if isinstance(run, str):
                yield {**case, "side": side, "failed": run}
                continue
            line = {**case, "side": side, **compare_run(run)}
            step_ms[side] = line["measured_ms"]
            yield line
    if "planner" in step_ms:
        planner_ms = mean(step_ms[side] for side in ("planner", AGAIN) if side in step_ms)
        ratios = {side: round(ms / planner_ms, 3) for side, ms in step_ms.items() if side not in ("planner", AGAIN)}
        floor = round(abs(step_ms[AGAIN] / step_ms["planner"] - 1), 4) if AGAIN in step_ms else None
        yield {**case, "rivals_over_planner": ratios, "floor": floor}


def summarize(lines: Sequence[dict[str, Any]], seed: int) -> dict[str, Any]:
    runs = [line for line in lines if line.get("side") in ("planner", AGAIN) and "off" in line]
    choices = [line for line in lines if "rivals_over_planner" in line]
    errors: dict[str, list[float]] = {}
    for line in runs:
        for name, (predicted, measured) in line["parts_ms"].items():
            if predicted is not None and max(predicted, measured) >= MIN_PART_MS and measured > 0:
                errors.setdefault(name, []).append(predicted / measured - 1)
    floors = [line["floor"] for line in choices if line["floor"] is not None]
    is_fastest = [
        all(ratio >= 1 - max(MIN_FLOOR, line["floor"] or 0.0) for ratio in line["rivals_over_planner"].values())
        for line in choices
    ]
    return {
        "benchmark": "recipes",
        "seed": seed,
        "runs": len(runs),
        "failed": sum("failed" in line for line in lines),
        "mean_absolute_error": round(mean(abs(line["off"]) for line in runs), 4) if runs else None,
        "bias": round(mean(line["off"] for line in runs), 4) if runs else None,
        "parts": {
            name: {
                "mean_absolute_error": round(mean(map(abs, part_errors)), 3),
                "bias": round(mean(part_errors), 3),
                "runs": len(part_errors),
            }
            for name, part_errors in errors.items()
        },
        "floor": [round(floor, 4) for floor in (median(floors), max(floors))] if floors else None,
        "planner_is_fastest": f"{sum(is_fastest)} of {len(is_fastest)}",
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--labs", type=int, default=3)
    parser.add_argument("--recipes", nargs="*", default=list(RECIPES), choices=RECIPES, metavar="NAME")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch", type=int, default=0, help="global batch size; 0: chosen for a step of 200 ms")
    parser.add_argument("--write", default="", help="name of a file in benchmarks/results")
    parser.add_argument("--smoke", action="store_true", help="the smallest case, to see that it runs")
    args = parser.parse_args()
    if args.smoke:
        args.labs, args.recipes, args.steps, args.batch = 1, ["logistic"], 6 * LOG_EVERY, MIN_BATCH_SIZE
    lines: list[dict[str, Any]] = []
    for number, random_lab in enumerate(draw_labs(args.seed, args.labs, os.cpu_count() or 1)):
        lab_fields = {"seed": args.seed, "lab": asdict(random_lab)}
        print(f"lab {number + 1} of {args.labs}, seed {args.seed}: {random_lab}", file=sys.stderr, flush=True)
        with TemporaryDirectory() as folder, Lab(random_lab.shape, "recipes") as lab:
            cluster = Path(folder) / "cluster.toml"
            measure(lab, cluster)
            for recipe in args.recipes:
                for line in run_recipe(lab, lab_fields, recipe, cluster, args):
                    lines.append(line)
                    print(json.dumps(line), flush=True)
    lines.append(summarize(lines, args.seed))
    print(json.dumps(lines[-1]), flush=True)
    if args.write:
        results_file.write(args.write, "recipes", lines)
    return 1 if lines[-1]["failed"] else 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())

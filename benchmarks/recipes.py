"""How well the planner predicts the shipped recipes, and how good its plans are, in labs drawn at random.

    python -m benchmarks.recipes [--seed N] [--labs N] [--recipes NAME ...] [--steps N] [--write NAME]

As root. SEED draws the labs: 2 to 4 hosts, at most 4 ranks in all, one uplink rate of 100 to 500 Mbit/s, one CPU quota
of 0.4 to 0.6 of a core for each rank, limited by the number of ranks that share a core of this machine. In each lab
`shardwright measure` runs once; then, for each recipe, `shardwright train RECIPE plan.cluster=FILE` runs with the
planner's plan, with all tables row-wise, with tables assigned round robin, and with the planner's plan again, one after
the other. The batch size is the smallest power of two whose step is predicted to take 200 ms.

A JSON line per run: the mean step from metrics.jsonl, the predicted step, and both for each part of a step, in ms; the
time of a part is that of its stage alone. A line per lab and recipe: other plans over the planner's, and the A/A floor:
the second run of the planner's plan over the first. The last line: over the planner's runs the mean absolute error, the
bias (mean of predicted / measured - 1) and the same by part, the floor, and how often no other plan was faster by more
than the floor (at least 2 %).
A failed run is reported as a line, and the exit status is 1. Emulated: hosts, links, CPU quotas.
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
HOSTS, MOST_RANKS = (2, 3, 4), 4
UPLINK_MBIT, CPU = (100, 500), (0.4, 0.6)
SHARE_OF_CORES = 0.9  # that quotas on a core may sum to: TCP runs there, too
STEP_SECONDS = 0.2
LEAST_BATCH, MOST_BATCH = 1 << 10, 1 << 17
EVERY = 5  # steps between lines of metrics; the first two lines warm up
AGAIN = "planner, again"
LEAST_FLOOR = 0.02
SHOWN_PART_MS = 1.0  # parts that take less, predicted and measured, are not judged


@dataclass(frozen=True)
class Drawn:
    """A lab with the same number of ranks on each host."""

    hosts: int
    ranks: int
    uplink: str
    cpu: float

    @property
    def shape(self) -> Shape:
        return Shape((Host(ranks=self.ranks, uplink=self.uplink, cpu=self.cpu),) * self.hosts)


def draw_labs(seed: int, num: int, cores: int) -> list[Drawn]:
    draw = random.Random(seed)
    found = []
    for _ in range(num):
        hosts = draw.choice(HOSTS)
        ranks = draw.randint(1, MOST_RANKS // hosts)
        uplink = 10 * draw.randint(UPLINK_MBIT[0] // 10, UPLINK_MBIT[1] // 10)
        most = min(CPU[1], SHARE_OF_CORES / math.ceil(hosts * ranks / cores))
        found.append(Drawn(hosts, ranks, f"{uplink}mbit", round(draw.uniform(min(CPU[0], most), most), 2)))
    return found


def choose_batch(recipe: str, cluster: Path) -> int:
    """The smallest power of two as global batch size whose predicted step is long enough to measure in a lab."""
    from shardwright.runtime.planning import read_plan_request

    size = LEAST_BATCH
    while (
        size < MOST_BATCH
        and read_plan_request(recipe, [f"train.batch_size={size}"], str(cluster)).make_plan().candidate.seconds
        < STEP_SECONDS
    ):
        size *= 2
    return size


def pins(recipe: str, batch: int, cluster: Path, num_ranks: int) -> dict[str, list[str]]:
    """For each side the pins that set the layout of tables; none for the planner's own plan."""
    from shardwright.runtime.planning import read_plan_request

    names = [
        table.table
        for table in read_plan_request(recipe, [f"train.batch_size={batch}"], str(cluster)).make_plan().plan.tables
    ]
    return {
        "planner": [],
        "all row-wise": [f"plan.pins.{name}=row" for name in names],
        "round robin": [f"plan.pins.{name}=table@{at % num_ranks}" for at, name in enumerate(names)],
        AGAIN: [],
    }


def train(lab: Lab, folder: Path, recipe: str, keys: Sequence[str]) -> Path | str:
    """The directory of a run over the ranks of a lab, or the last lines of one that failed."""
    lines: list[str] = []
    name = f"run-{len(list(folder.iterdir()))}"
    settled = ["train.eval_every=0", "train.checkpoint_every=0", "train.eval_samples=0", f"train.log_every={EVERY}"]
    command = [sys.executable, "-m", "shardwright.cli", "train", recipe, f"run.directory={folder}", f"run.name={name}"]
    ended = lab.run([*command, *settled, *keys], lambda rank, line: lines.append(f"[{rank}] {line}"))
    if ended.rank is not None:
        return "\n".join([f"rank {ended.rank} ended with status {ended.status}", *lines[-8:]])
    return folder / name


def step_seconds(path: Path) -> tuple[float, list[float]]:
    """Mean seconds of a step from the run's metrics without the first lines, over all lines and over each half."""
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    marks = [(line["step"], line["seconds"]) for line in lines if line["kind"] == "train"][1:]
    middle = len(marks) // 2

    def rate(first: tuple[int, float], last: tuple[int, float]) -> float:
        return (last[1] - first[1]) / (last[0] - first[0])

    halves = [(marks[0], marks[middle]), (marks[middle], marks[-1])]
    return rate(marks[0], marks[-1]), [rate(*half) for half in halves if half[0] != half[1]]


def by_stage(expected: dict[str, float], plan: Plan) -> dict[str, float]:
    """Predicted seconds by the names in the trace, where a stage's body is traced as the stage."""
    found = dict(expected)
    for stage in plan.stages:
        inside = [found.pop(part.name) for part in stage.body if part.lane == stage.lane and part.name in found]
        found |= {stage.name: sum(inside)} if inside else {}
    return found


def with_one_reduction(seconds: dict[str, float]) -> dict[str, float]:
    """Merge all reductions of dense gradients into one part: prediction and trace divide them differently."""
    names = [name for name in seconds if name.split(" ")[0] == "reduce" or name == "reduce.bottom"]
    rest = {name: value for name, value in seconds.items() if name not in names}
    return rest | ({"reduce": sum(seconds[name] for name in names)} if names else {})


def judge(path: Path) -> dict[str, Any]:
    """Predicted and measured milliseconds of a run's step, whole and by part."""
    from shardwright.report import step_times

    predicted = Timeline.from_chrome((path / "predicted.json").read_text())
    measured = Timeline.from_chrome((path / "trace.json").read_text())
    seconds, halves = step_seconds(path)
    whole = median(step_times.step_seconds(predicted))
    expected = {name: part.seconds for name, part in step_times.parts_by_name(predicted).items()}
    expected = with_one_reduction(by_stage(expected, files.read(Plan, path / "plan.json")))
    found = with_one_reduction({name: part.seconds for name, part in step_times.parts_by_name(measured).items()})
    parts = {name: [1e3 * expected[name] if name in expected else None, 1e3 * found[name]] for name in found}
    return {
        "predicted_ms": round(1e3 * whole, 1),
        "measured_ms": round(1e3 * seconds, 1),
        "off": round(whole / seconds - 1, 4),
        "halves_ms": [round(1e3 * half, 1) for half in halves],
        "parts_ms": {name: [None if one is None else round(one, 2) for one in pair] for name, pair in parts.items()},
    }


def of_recipe(
    lab: Lab, about: Mapping[str, Any], recipe: str, cluster: Path, asked: argparse.Namespace
) -> Iterator[Any]:
    """A line for each side, and one that compares them."""
    name = f"synthetic-{recipe}"
    batch = asked.batch or choose_batch(name, cluster)
    case = {"benchmark": "recipes", **about, "recipe": name, "batch_size": batch}
    steps: dict[str, float] = {}
    with TemporaryDirectory() as folder:
        for side, keys in pins(name, batch, cluster, lab.shape.num_ranks).items():
            words = [f"plan.cluster={cluster}", f"train.batch_size={batch}", f"train.steps={asked.steps}", *keys]
            run = train(lab, Path(folder), name, words)
            if isinstance(run, str):
                yield {**case, "side": side, "failed": run}
                continue
            line = {**case, "side": side, **judge(run)}
            steps[side] = line["measured_ms"]
            yield line
    if "planner" in steps:
        ours = mean(steps[side] for side in ("planner", AGAIN) if side in steps)
        over = {side: round(ms / ours, 3) for side, ms in steps.items() if side not in ("planner", AGAIN)}
        floor = round(abs(steps[AGAIN] / steps["planner"] - 1), 4) if AGAIN in steps else None
        yield {**case, "rivals_over_planner": over, "floor": floor}


def summary(lines: Sequence[dict[str, Any]], seed: int) -> dict[str, Any]:
    runs = [line for line in lines if line.get("side") in ("planner", AGAIN) and "off" in line]
    choices = [line for line in lines if "rivals_over_planner" in line]
    off: dict[str, list[float]] = {}
    for line in runs:
        for name, (predicted, measured) in line["parts_ms"].items():
            if predicted is not None and max(predicted, measured) >= SHOWN_PART_MS and measured > 0:
                off.setdefault(name, []).append(predicted / measured - 1)
    floors = [line["floor"] for line in choices if line["floor"] is not None]
    best = [
        all(ratio >= 1 - max(LEAST_FLOOR, line["floor"] or 0.0) for ratio in line["rivals_over_planner"].values())
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
                "mean_absolute_error": round(mean(map(abs, each)), 3),
                "bias": round(mean(each), 3),
                "runs": len(each),
            }
            for name, each in off.items()
        },
        "floor": [round(one, 4) for one in (median(floors), max(floors))] if floors else None,
        "planner_is_fastest": f"{sum(best)} of {len(best)}",
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
    asked = parser.parse_args()
    if asked.smoke:
        asked.labs, asked.recipes, asked.steps, asked.batch = 1, ["logistic"], 6 * EVERY, LEAST_BATCH
    lines: list[dict[str, Any]] = []
    for number, drawn in enumerate(draw_labs(asked.seed, asked.labs, os.cpu_count() or 1)):
        about = {"seed": asked.seed, "lab": asdict(drawn)}
        print(f"lab {number + 1} of {asked.labs}, seed {asked.seed}: {drawn}", file=sys.stderr, flush=True)
        with TemporaryDirectory() as folder, Lab(drawn.shape, "recipes") as lab:
            cluster = Path(folder) / "cluster.toml"
            measure(lab, cluster)
            for recipe in asked.recipes:
                for line in of_recipe(lab, about, recipe, cluster, asked):
                    lines.append(line)
                    print(json.dumps(line), flush=True)
    lines.append(summary(lines, asked.seed))
    print(json.dumps(lines[-1]), flush=True)
    if asked.write:
        results_file.write(asked.write, "recipes", lines)
    return 1 if lines[-1]["failed"] else 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())

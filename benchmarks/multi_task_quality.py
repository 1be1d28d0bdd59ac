"""Quality of MMoE and PLE against a shared bottom, on the generated stream of two tasks whose best score is known.

Trains the committed recipes on five seeds of data and weights, in turns, and a shared bottom of the size of MMoE. A
JSON line per run with each task's NE above the best reachable, and a last line for each model: the mean, and the
difference to the shared bottom with its 95 % interval over seeds. Exit status 1 if an NE is below the best reachable.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from statistics import fmean, stdev
from typing import Any

from benchmarks import results_file
from shardwright import config
from shardwright.runtime.run import recipe
from shardwright.runtime.run.train import train

SEEDS = (1, 2, 3, 4, 5)
T_QUANTILE = 2.776  # of Student's t, 97.5 %, four degrees of freedom
TASKS = ("click", "buy")
BASE = "shared bottom"
MODELS = {
    BASE: ("synthetic-shared-bottom",),
    "wide shared bottom": ("synthetic-shared-bottom", "model.bottom=[512,64]"),
    "MMoE": ("synthetic-mmoe",),
    "PLE": ("synthetic-ple",),
}
SMOKE = ("train.steps=3", "train.eval_samples=4096", "train.batch_size=256", "data.workers=0")


def run(model: str, seed: int, directory: str, overrides: Sequence[str]) -> dict[str, Any]:
    name, *own = MODELS[model]
    fixed = (f"seed={seed}", f"run.directory={directory}", "train.eval_every=0", "train.checkpoint_every=0")
    settings = config.load(name, [*own, *fixed, *overrides])
    parameters = recipe.make_model(settings, recipe.make_source(settings)).get_submodule("dense").parameters()
    result = train(settings)
    case = {"benchmark": "multi_task_quality", "model": model, "seed": seed, "samples": result.evaluation["samples"]}
    for task in TASKS:
        scores = {name: result.evaluation[f"{task}.{name}"] for name in ("ne", "auc", "calibration", "bound_ne")}
        case |= {f"{task}.{name}": value for name, value in scores.items()}
        case[f"{task}.gap"] = scores["ne"] - scores["bound_ne"]
    return case | {"dense_parameters": sum(parameter.numel() for parameter in parameters)}


def summarize(lines: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """By model, each task's mean gap to the best, and the gap's difference to that of the shared bottom."""
    for model in MODELS:
        summary: dict[str, Any] = {"benchmark": "multi_task_quality", "summary": model}
        for task in TASKS:
            own, base = ([line[f"{task}.gap"] for line in lines if line["model"] == name] for name in (model, BASE))
            differences = [gap - other for gap, other in zip(own, base, strict=True)]
            summary[f"{task}.gap"] = fmean(own)
            if model != BASE:
                summary[f"{task}.difference"] = fmean(differences)
            if model != BASE and len(differences) == len(SEEDS):
                summary[f"{task}.interval"] = T_QUANTILE * stdev(differences) / len(differences) ** 0.5
        yield summary


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", default="", help="name of a file in benchmarks/results")
    parser.add_argument("--smoke", action="store_true", help="the smallest case, to see that it runs")
    args = parser.parse_args()
    lines = []
    with tempfile.TemporaryDirectory() as directory:
        for seed in SEEDS[:1] if args.smoke else SEEDS:
            for model in MODELS:
                lines.append(run(model, seed, directory, SMOKE if args.smoke else ()))
                print(json.dumps(lines[-1]), flush=True)
    summaries = [*summarize(lines)]
    for summary in summaries:
        print(json.dumps(summary), flush=True)
    if args.write:
        results_file.write(args.write, "multi_task_quality", [*lines, *summaries])
    smallest = min(line[f"{task}.gap"] for line in lines for task in TASKS)
    return 0 if args.smoke or smallest > 0 else 1


if __name__ == "__main__":
    sys.exit(main())

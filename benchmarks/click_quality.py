"""Quality of each click model on a click log: every recipe of a dataset, with several seeds of weights and order.

    python -m benchmarks.click_quality criteo FILE [--seeds N] [--write NAME]

A JSON line per run, then a table of NE, AUC and log loss on the held-out rows: the mean over seeds and half the width
of its 95 % interval (Student's t). Runs are interleaved: all recipes with one seed, then with the next.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from statistics import mean, stdev

from rich.console import Console
from rich.table import Table

from benchmarks import criteo_like, results_file
from shardwright import config
from shardwright.runtime.run import train

FIGURES = ("ne", "auc", "log_loss")
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)  # 97.5 % points, 1 to 9 degrees of freedom


def run(recipe: str, data: str, seed: int, directory: str) -> dict:
    settings = config.load(recipe, [f"data={data}", f"seed={seed}", f"run.directory={directory}"])
    result = train.train(settings)
    metrics = {key: result.evaluation[key] for key in ("samples", *FIGURES)}
    return {"recipe": recipe, "seed": seed} | metrics | {"samples_per_second": result.samples_per_second}


def interval(values: list[float]) -> tuple[float, float]:
    """Mean and half the width of its 95 % interval."""
    half = STUDENT[len(values) - 2] * stdev(values) / len(values) ** 0.5 if len(values) > 1 else float("nan")
    return mean(values), half


def summary(lines: list[dict], recipes: list[str]) -> list[dict]:
    rows = []
    for recipe in recipes:
        runs = [line for line in lines if line["recipe"] == recipe]
        figures = {figure: interval([line[figure] for line in runs]) for figure in FIGURES}
        rows.append({"recipe": recipe, "seeds": len(runs)} | figures)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", nargs="?", default="criteo", help="criteo, avazu or movielens")
    parser.add_argument("data", nargs="?", default="", help="path of its click log")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--write", default="", help="name of a file in benchmarks/results")
    parser.add_argument("--smoke", action="store_true", help="the smallest case, to see that it runs")
    args = parser.parse_args()
    if not (args.data or args.smoke):
        parser.error("give the path of a click log, or --smoke")
    name, data = args.name, args.data
    recipes = [recipe for recipe in config.recipes() if recipe.startswith(f"{name}-")]
    lines = []
    with tempfile.TemporaryDirectory() as directory:
        if args.smoke:
            name, data, recipes, args.seeds = "criteo", f"{directory}/log.tsv", ["criteo-logistic"], 2
            criteo_like.write(Path(data), 1 << 20)
        for seed in range(1, 1 + args.seeds):
            for recipe in recipes:
                lines.append(run(recipe, data, seed, directory))
                print(json.dumps(lines[-1]), flush=True)
    rows = summary(lines, recipes)
    table = Table("recipe", "NE", "AUC", "log loss", title=f"{name}, {rows[0]['seeds']} seeds, hold-out")
    for row in rows:
        table.add_row(row["recipe"], *(f"{row[figure][0]:.4f} ± {row[figure][1]:.4f}" for figure in FIGURES))
    Console(width=100).print(table)
    if args.write:
        results_file.write(args.write, "click_quality", [*lines, *rows])
    return 0


if __name__ == "__main__":
    sys.exit(main())

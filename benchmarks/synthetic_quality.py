"""Does a model with interactions score better on the planted click stream, and does none beat the stream's own bound?

DLRM against logistic regression, the committed recipes, three seeds of data and weights each, interleaved. One JSON
line per run and a last one with the margins; exit status 1 if DLRM loses on a seed or a model passes the bound.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from statistics import median

from benchmarks import results_file
from shardwright import config
from shardwright.runtime.run import train

SEEDS = (1, 2, 3)
RECIPES = ("synthetic-dlrm", "synthetic-logistic")


def run(recipe: str, seed: int, directory: str, overrides: Sequence[str]) -> dict:
    settings = config.load(
        recipe,
        [f"seed={seed}", f"run.directory={directory}", "train.eval_every=0", "train.checkpoint_every=0", *overrides],
    )
    finished = train.train(settings)
    case = {"benchmark": "synthetic_quality", "recipe": recipe, "seed": seed}
    found = {key: finished.evaluation[key] for key in ("samples", "ne", "auc", "loss", "bound_ne")}
    return case | found | {"samples_per_second": finished.samples_per_second}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", default="", help="name of a file in benchmarks/results")
    parser.add_argument("--smoke", action="store_true", help="the smallest case, to see that it runs")
    asked = parser.parse_args()
    seeds = SEEDS[:1] if asked.smoke else SEEDS
    overrides = ["train.steps=3", "train.eval_samples=4096"] if asked.smoke else []
    lines = []
    with tempfile.TemporaryDirectory() as directory:
        for seed in seeds:
            for recipe in RECIPES:
                lines.append(run(recipe, seed, directory, overrides))
                print(json.dumps(lines[-1]), flush=True)
    by_seed = {seed: {line["recipe"]: line for line in lines if line["seed"] == seed} for seed in seeds}
    margins = [runs["synthetic-logistic"]["ne"] - runs["synthetic-dlrm"]["ne"] for runs in by_seed.values()]
    above = [line["ne"] - line["bound_ne"] for line in lines]
    summary = {
        "benchmark": "synthetic_quality",
        "ne_margin_median": median(margins),
        "ne_margin_range": [min(margins), max(margins)],
        "ne_above_bound_min": min(above),
    }
    print(json.dumps(summary), flush=True)
    if asked.write:
        results_file.write(asked.write, "synthetic_quality", [*lines, summary])
    return 0 if asked.smoke or (min(margins) > 0 and min(above) > 0) else 1


if __name__ == "__main__":
    sys.exit(main())

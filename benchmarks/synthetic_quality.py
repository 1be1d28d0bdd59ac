"""Quality on the planted click stream: DLRM, logistic regression and the stream's bound.

Trains the committed recipes on three seeds of data and weights, alternating. A JSON line per run and a last line with
the margins; exit status 1 if DLRM is worse on a seed or a model's NE is below the bound, which is the best possible.
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
    result = train.train(settings)
    case = {"benchmark": "synthetic_quality", "recipe": recipe, "seed": seed}
    metrics = {key: result.evaluation[key] for key in ("samples", "ne", "auc", "loss", "bound_ne")}
    return case | metrics | {"samples_per_second": result.samples_per_second}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", default="", help="name of a file in benchmarks/results")
    parser.add_argument("--smoke", action="store_true", help="the smallest case, to see that it runs")
    args = parser.parse_args()
    seeds = SEEDS[:1] if args.smoke else SEEDS
    overrides = ["train.steps=3", "train.eval_samples=4096"] if args.smoke else []
    lines = []
    with tempfile.TemporaryDirectory() as directory:
        for seed in seeds:
            for recipe in RECIPES:
                lines.append(run(recipe, seed, directory, overrides))
                print(json.dumps(lines[-1]), flush=True)
    by_seed = {seed: {line["recipe"]: line for line in lines if line["seed"] == seed} for seed in seeds}
    margins = [runs["synthetic-logistic"]["ne"] - runs["synthetic-dlrm"]["ne"] for runs in by_seed.values()]
    bound_gaps = [line["ne"] - line["bound_ne"] for line in lines]
    summary = {
        "benchmark": "synthetic_quality",
        "ne_margin_median": median(margins),
        "ne_margin_range": [min(margins), max(margins)],
        "ne_above_bound_min": min(bound_gaps),
    }
    print(json.dumps(summary), flush=True)
    if args.write:
        results_file.write(args.write, "synthetic_quality", [*lines, summary])
    return 0 if args.smoke or (min(margins) > 0 and min(bound_gaps) > 0) else 1


if __name__ == "__main__":
    sys.exit(main())

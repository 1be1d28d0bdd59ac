"""DIN and HSTU against the pooled history on MovieLens: AUC of the next rated items, the last seventh in time held out.

    python -m benchmarks.history_quality DIRECTORY [--seeds N] [--write NAME]

An item is a click if its user rates it 4 or more; the history has the user's ratings before it. The pooled history is
DIN with the average of the history in place of attention (model.pooling="mean"), so all else is equal. A JSON line per
run, in turns by seed, then for each model AUC and log loss (the mean over seeds and half the width of its 95 %
interval, Student's t) and the difference of its AUC to the pooled history's of the same seed.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import results_file
from benchmarks.click_quality import interval
from benchmarks.retrieval_quality import write_ratings
from shardwright import config
from shardwright.runtime.run.train import train

FIGURES = ("auc", "log_loss", "ne")
BASE = "pooled history"
MODELS = {
    BASE: ("movielens-din", "model.pooling=mean"),
    "DIN": ("movielens-din",),
    "HSTU": ("movielens-hstu",),
}


def run(model: str, seed: int, overrides: list[str]) -> dict[str, Any]:
    name, *own = MODELS[model]
    result = train(config.load(name, [*overrides, *own, f"seed={seed}"]))
    figures = {figure: result.evaluation[figure] for figure in FIGURES}
    return {"model": model, "seed": seed, **figures, "samples_per_second": result.samples_per_second}


def summarize(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    by_model = {model: [line for line in lines if line["model"] == model] for model in MODELS}
    rows = []
    for model, own in by_model.items():
        row: dict[str, Any] = {"summary": model, "seeds": len(own)}
        row |= {figure: interval([line[figure] for line in own]) for figure in FIGURES}
        pairs = zip(own, by_model[BASE], strict=True)
        row["auc_over_pooled"] = interval([line["auc"] - base["auc"] for line, base in pairs])
        rows.append(row)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", nargs="?", default="", help="the directory of MovieLens 100K")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--write", default="", help="name of a file in benchmarks/results")
    parser.add_argument("--smoke", action="store_true", help="the smallest case, to see that it runs")
    args = parser.parse_args()
    if not (args.data or args.smoke):
        parser.error("give the directory of MovieLens 100K, or --smoke")
    lines = []
    with tempfile.TemporaryDirectory() as directory:
        if args.smoke:
            args.data, args.seeds = directory, 1
            write_ratings(Path(directory))
        overrides = [f"data={args.data}", f"data.cache={directory}/cache", f"run.directory={directory}/runs"]
        for seed in range(1, 1 + args.seeds):
            for model in MODELS:
                lines.append(run(model, seed, overrides))
                print(json.dumps(lines[-1]), flush=True)
    rows = summarize(lines)
    table = Table("model", "AUC", "log loss", "AUC over pooled", title=f"MovieLens, {args.seeds} seeds, hold-out")
    for row in rows:
        cells = [f"{row[name][0]:.4f} ± {row[name][1]:.4f}" for name in ("auc", "log_loss", "auc_over_pooled")]
        table.add_row(row["summary"], *cells)
    Console(width=120).print(table)
    if args.write:
        results_file.write(args.write, "history_quality", [*lines, *rows])
    return 0


if __name__ == "__main__":
    sys.exit(main())

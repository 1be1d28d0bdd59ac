"""Quality and speed of each click model on a click log, beside a plain PyTorch model of the same form and settings.

    python -m benchmarks.click_quality criteo FILE [--seeds N] [--write NAME]

Every recipe of a dataset, as it is and with the form of BARS's settings (batch norm, dropout, L2 regularization of
embeddings), over several seeds of weights and order. In turns: Shardwright, the plain model (plain_click_models.py) on
the same rows in the same order, and Shardwright again, which must score the same and whose speed over its first run's
is the A/A floor. A JSON line per run, then for each model both sides' AUC and log loss on the held-out rows (the mean
over seeds and half the width of its 95 % interval, Student's t), and the ratio of samples per second (median, range).
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks import criteo_like, plain_click_models, results_file
from shardwright import config
from shardwright.runtime.run import train

FIGURES = ("ne", "auc", "log_loss")
SIDES = ("shardwright", "plain PyTorch", "shardwright again")
FORMS = {
    "recipe": (),
    "BARS": ("model.mlp.norm=batch", "model.mlp.dropout=0.2", "tables.weight_decay=1e-5"),
}
WITHOUT_MLP = ("logistic",)
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)  # 97.5 % points, 1 to 9 degrees of freedom


def run(side: str, recipe: str, form: str, seed: int, overrides: list[str]) -> dict[str, Any]:
    settings = config.load(recipe, [*overrides, *FORMS[form], f"seed={seed}"])
    if side == "plain PyTorch":
        scores = plain_click_models.train(settings)
    else:
        result = train.train(settings)
        scores = result.evaluation | {"samples_per_second": result.samples_per_second}
    figures = {key: scores[key] for key in (*FIGURES, "samples_per_second")}
    return {"recipe": recipe, "form": form, "side": side, "seed": seed} | figures


def interval(values: list[float]) -> tuple[float, float]:
    """Mean and half the width of its 95 % interval."""
    half = STUDENT[len(values) - 2] * stdev(values) / len(values) ** 0.5 if len(values) > 1 else float("nan")
    return mean(values), half


def summarize(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Both sides of one recipe in one form; `reaches_plain`: not worse than the plain model's interval."""
    by_side = {side: [line for line in lines if line["side"] == side] for side in SIDES}
    ours, plain, again = by_side.values()
    for first, second in zip(ours, again, strict=True):
        if any(first[figure] != second[figure] for figure in FIGURES):
            raise SystemExit(f"{first['recipe']}: two runs of seed {first['seed']} differ: {first}, {second}")
    row: dict[str, Any] = {"recipe": lines[0]["recipe"], "form": lines[0]["form"], "seeds": len(ours)}
    for figure in FIGURES:
        row[figure] = interval([line[figure] for line in ours])
        row[f"plain_{figure}"] = interval([line[figure] for line in plain])
    least_auc, most_loss = row["plain_auc"][0] - row["plain_auc"][1], sum(row["plain_log_loss"])
    row["reaches_plain"] = row["auc"][0] >= least_auc and row["log_loss"][0] <= most_loss
    for name, side in (("over_plain", plain), ("a_a", again)):
        rates = [one["samples_per_second"] / other["samples_per_second"] for one, other in zip(ours, side, strict=True)]
        row[name] = (median(rates), min(rates), max(rates))
    return row | {
        "threads": torch.get_num_threads(),
        "samples_per_second": median(line["samples_per_second"] for line in ours),
        "plain_samples_per_second": median(line["samples_per_second"] for line in plain),
    }


def print_table(rows: list[dict[str, Any]], title: str) -> None:
    table = Table("recipe", "form", "AUC", "plain", "log loss", "plain", "samples/s", "x plain", "A/A", title=title)
    for row in rows:
        figures = [row[name] for name in ("auc", "plain_auc", "log_loss", "plain_log_loss")]
        ratios = [f"{row[name][0]:.2f} ({row[name][1]:.2f}-{row[name][2]:.2f})" for name in ("over_plain", "a_a")]
        quality = [f"{value:.4f} ± {half:.4f}" for value, half in figures]
        table.add_row(row["recipe"], row["form"], *quality, f"{row['samples_per_second']:,.0f}", *ratios)
    Console(width=180).print(table)


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
    models = [f"{name}-{model.replace('_', '-')}" for model in plain_click_models.MODELS]
    cases = [(recipe, form) for recipe in models for form in FORMS if form == "recipe" or has_mlp(recipe)]
    lines: dict[tuple[str, str], list[dict[str, Any]]] = {case: [] for case in cases}
    with tempfile.TemporaryDirectory() as directory:
        if args.smoke:
            name, data, lines, args.seeds = "criteo", f"{directory}/log.tsv", {("criteo-deepfm", "BARS"): []}, 2
            criteo_like.write(Path(data), 1 << 20)
        overrides = [f"data={data}", f"data.cache={directory}/cache", f"run.directory={directory}/runs"]
        for seed in range(1, 1 + args.seeds):
            for case, case_lines in lines.items():
                for side in SIDES:
                    case_lines.append(run(side, *case, seed, overrides))
                    print(json.dumps(case_lines[-1]), flush=True)
    rows = [summarize(case_lines) for case_lines in lines.values()]
    print_table(rows, f"{name}, {args.seeds} seeds, hold-out")
    if args.write:
        results_file.write(args.write, "click_quality", [*(line for case in lines.values() for line in case), *rows])
    return 0


def has_mlp(recipe: str) -> bool:
    return recipe.split("-", 1)[1] not in WITHOUT_MLP


if __name__ == "__main__":
    sys.exit(main())

"""How well each click model scores on a log: every recipe of a data set, several seeds of weights and order each.

    python -m benchmarks.click_quality criteo FILE [SEEDS]

One JSON line per run, then a table of NE, AUC and log loss on the hold-out: the mean over seeds and half the width of
its 95 % interval (Student's t). Runs are interleaved: all recipes with one seed, then with the next.
"""

import json
import sys
import tempfile
from pathlib import Path
from statistics import mean, stdev

from rich.console import Console
from rich.table import Table

from shardwright import config
from shardwright.runtime import loop

FIGURES = ("ne", "auc", "log_loss")
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)  # 97.5 % points, 1 to 9 degrees of freedom
RESULTS = Path(__file__).parent / "results"


def run(recipe: str, data: str, seed: int, directory: str) -> dict:
    settings = config.load(recipe, [f"data={data}", f"seed={seed}", f"run.directory={directory}"])
    finished = loop.train(settings)
    found = {key: finished.evaluation[key] for key in ("samples", *FIGURES)}
    return {"recipe": recipe, "seed": seed} | found | {"samples_per_second": finished.samples_per_second}


def interval(values: list[float]) -> tuple[float, float]:
    """Mean and half the width of its 95 % interval."""
    half = STUDENT[len(values) - 2] * stdev(values) / len(values) ** 0.5 if len(values) > 1 else float("nan")
    return mean(values), half


def summary(lines: list[dict], recipes: list[str]) -> list[dict]:
    found = []
    for recipe in recipes:
        mine = [line for line in lines if line["recipe"] == recipe]
        figures = {figure: interval([line[figure] for line in mine]) for figure in FIGURES}
        found.append({"recipe": recipe, "seeds": len(mine)} | figures)
    return found


def main() -> int:
    name, data, *rest = sys.argv[1:]
    recipes = [recipe for recipe in config.recipes() if recipe.startswith(f"{name}-")]
    lines = []
    with tempfile.TemporaryDirectory() as directory:
        for seed in range(1, 1 + int(rest[0] if rest else 5)):
            for recipe in recipes:
                lines.append(run(recipe, data, seed, directory))
                print(json.dumps(lines[-1]), flush=True)
    rows = summary(lines, recipes)
    table = Table("recipe", "NE", "AUC", "log loss", title=f"{name}, {rows[0]['seeds']} seeds, hold-out")
    for row in rows:
        table.add_row(row["recipe"], *(f"{row[figure][0]:.4f} ± {row[figure][1]:.4f}" for figure in FIGURES))
    Console(width=100).print(table)
    text = "".join(json.dumps(line) + "\n" for line in [*lines, *rows])
    (RESULTS / f"click_quality-{name}-2cores.json").write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())

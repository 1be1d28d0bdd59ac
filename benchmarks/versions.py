"""This checkout against another one, after a change that must not cost speed: short forms of five benchmarks.

    python -m benchmarks.versions --other CHECKOUT [--rounds N] [--cases NAME ...] [--write MACHINE]

CHECKOUT is another clone of this repository in which `make setup` ran. As root (labs); serving needs wrk. Every side is
a new process in its own checkout and virtual environment; sides alternate, in an order rotated each round: "other",
"other, again" (the A/A floor) and "this". Both read the same cluster files, measured once with this checkout.

A JSON line per figure: median, least and most over rounds of each side, the ratio of "this" to "other" in the same
round, and that of "other, again" to "other". `within` is whether the median of the first ratio differs from 1 by at
most 3 % or the floor, which is the median distance of the second ratio from 1. Figures are milliseconds (of a step or
an answer) or requests/s, as the name says.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks import results_file
from benchmarks.dependencies import ROOT

SIDES = ("other", "other, again", "this")
TOLERANCE = 0.03
CLUSTERS = "CLUSTERS"  # in a command: the folder of cluster files
BATCH_SIZE = 2048
Figures = dict[str, float]


@dataclass(frozen=True, slots=True)
class Case:
    """A command of Python, what it reads from standard input, and how to find its figures in what it prints."""

    command: Sequence[str]
    figures: Callable[[list[dict[str, Any]], Path], Figures]  # from its JSON lines and its working folder
    input_: str = ""


def training_figures(lines: list[dict[str, Any]], folder: Path) -> Figures:
    metrics = [json.loads(line) for line in (folder / "runs/timed/metrics.jsonl").read_text().splitlines()]
    rates = [line["samples_per_second"] for line in metrics if line["kind"] == "train"]
    return {"step_ms": 1e3 * BATCH_SIZE / median(rates[1:])}


def dlrm_step_figures(lines: list[dict[str, Any]], folder: Path) -> Figures:
    return {"step_ms": median(line["milliseconds"] for line in lines[1:])}


def side_figures(lines: list[dict[str, Any]], folder: Path) -> Figures:
    return {f"{line['side']}_ms": line["ms"][0] for line in lines if "ms" in line}


def serving_figures(lines: list[dict[str, Any]], folder: Path) -> Figures:
    figures = {f"{line['side']}_requests_s": line["requests_s"][0] for line in lines if line["case"] == "requests"}
    answers = {f"answer_{line['samples']}_ms": 1e-3 * line["us"][0] for line in lines if line["case"] == "answer"}
    return figures | answers


CASES: Mapping[str, Case] = {
    "job.run": Case(
        ("-m", "shardwright.cli", "train", "synthetic-dlrm", "run.name=timed", "train.steps=200", "data.workers=0")
        + (f"train.batch_size={BATCH_SIZE}", "train.eval_every=0", "train.eval_samples=0"),
        training_figures,
    ),
    "dlrm_step": Case(("-m", "benchmarks.dlrm_step", "serve", "ours", "2"), dlrm_step_figures, "5\n" + "10\n" * 5),
    "sharding": Case(
        ("-m", "benchmarks.sharding", "--on", "lab 2 x 1", "--rounds", "2", "--cluster", CLUSTERS), side_figures
    ),
    "hsdp": Case(
        ("-m", "benchmarks.hsdp", "--depths", "4", "--sides", "DDP", "HSDP", "FSDP", "--rounds", "2")
        + ("--cluster", CLUSTERS),
        side_figures,
    ),
    "serving": Case(("-m", "benchmarks.serving", "--steps", "200", "--rounds", "1", "--seconds", "4"), serving_figures),
}


def run(case: Case, checkout: Path, clusters: Path) -> Figures:
    """Run a case in a checkout, with its own virtual environment."""
    with TemporaryDirectory() as folder:
        words = [
            str(checkout / ".venv/bin/python"),
            *(str(clusters) if word == CLUSTERS else word for word in case.command),
        ]
        environment = os.environ | {"PYTHONPATH": str(checkout)}
        done = subprocess.run(
            words, cwd=folder, env=environment, input=case.input_, capture_output=True, text=True, check=False
        )
        if done.returncode:
            sys.exit(f"{' '.join(words)} ended with status {done.returncode}\n{done.stderr[-3000:]}")
        texts = [line.removeprefix("answer ") for line in done.stdout.splitlines()]
        return case.figures([json.loads(text) for text in texts if text.startswith("{")], Path(folder))


def compare(name: str, other: Path, clusters: Path, num_rounds: int) -> Iterator[dict[str, Any]]:
    """The lines of a case."""
    case, taken = CASES[name], {side: [] for side in SIDES}
    for number in range(num_rounds):
        for side in SIDES[number % 3 :] + SIDES[: number % 3]:
            taken[side].append(run(case, ROOT if side == "this" else other, clusters))
        print(f"{name}: round {number + 1} of {num_rounds}", file=sys.stderr, flush=True)
    for figure in taken["this"][0]:
        values = {side: [figures[figure] for figures in taken[side]] for side in SIDES}
        this, again = (
            [value / base for value, base in zip(values[side], values["other"], strict=True)]
            for side in ("this", "other, again")
        )
        floor = median(abs(ratio - 1) for ratio in again)
        yield {
            "benchmark": "versions",
            "case": name,
            "figure": figure,
            **{side: spread(values[side]) for side in SIDES},
            "this_over_other": spread(this),
            "again_over_other": spread(again),
            "floor": round(floor, 3),
            "within": abs(median(this) - 1) <= max(TOLERANCE, floor),
        }


def spread(values: Sequence[float]) -> list[float]:
    return [round(value, 3) for value in (median(values), min(values), max(values))]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--other", default="", metavar="CHECKOUT", help="another clone, set up with `make setup`")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=CASES, metavar="NAME")
    parser.add_argument("--write", default="", help="write benchmarks/results/versions-CASE-MACHINE.json")
    parser.add_argument("--smoke", action="store_true", help="one round of job.run against this checkout itself")
    options = parser.parse_args()
    if options.smoke:
        options.other, options.rounds, options.cases = str(ROOT), 1, ["job.run"]
    elif not options.other:
        parser.error("--other is missing")
    other = Path(options.other).resolve()
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=other, capture_output=True, text=True, check=True).stdout
    with TemporaryDirectory() as clusters:
        for name in options.cases:
            lines: list[dict[str, Any]] = []
            for line in compare(name, other, Path(clusters), options.rounds):
                lines.append(line | {"other_commit": commit.strip()})
                print(json.dumps(lines[-1]), flush=True)
            if options.write:
                results_file.write(f"versions-{name}-{options.write}", "versions", lines)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""This checkout against another one, after a change that must not cost speed: short forms of six benchmarks.

    python -m benchmarks.versions --other CHECKOUT [--rounds N] [--cases NAME ...] [--write MACHINE]

CHECKOUT is another clone of this repository in which `make setup` ran. As root (labs); serving and requests need wrk.
Every side is a process in its own checkout and virtual environment; sides alternate, in an order rotated each round:
"other", "other, again" (the A/A floor) and "this". In `job.run`, `dlrm_step` and `requests` three processes take turns
of ten steps, or of a second of requests, twenty for each round; in the others each round starts a new process. All read
the same cluster files, measured by the first.

A JSON line per figure: median, least and most over rounds of each side, the ratio of "this" to "other" in the same
round, and that of "other, again" to "other". `within` is whether the median of the first ratio differs from 1 by at
most 3 % or the floor, the same distance for the second ratio. Figures are milliseconds (of a step, an answer, or a
request among many) or requests/s, as the name says.
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
Figures = dict[str, float]


JOB_RUN = """
import json, sys, time
from itertools import cycle
from statistics import median
import torch
import shardwright as sw
from shardwright.models.dlrm import DLRM

torch.manual_seed(1)
stream = sw.ClickStream()
tables = [sw.Table(name, rows, 16) for name, rows, _ in stream.features]
features = [sw.Feature(name, name, "mean") for name, _, _ in stream.features]
sparse = sw.EmbeddingBags(tables, features, sw.RowWiseAdaGrad(lr=0.4))
model = DLRM(sparse, stream.num_dense, bottom=[64, 16], top=[128, 64])
batches = [batch for batch, _ in zip(sw.Loader(stream, batch_size=2048), range(16))]
plan = sw.plan_for(model, batches[0])
job = sw.build(model, plan, optimizer=lambda parameters: torch.optim.Adam(parameters, lr=2e-3))
outputs = job.run(cycle(batches))
for line in sys.stdin:
    start = time.perf_counter()
    for _ in range(int(line)):
        next(outputs)
    print("answer " + json.dumps({"milliseconds": 1e3 * (time.perf_counter() - start) / int(line)}), flush=True)
"""


# A server on core 1 that answers requests of one sample; wrk asks it over 32 connections from core 0.
REQUESTS = r"""
import json, os, re, subprocess, sys, time
from pathlib import Path

shardwright = (sys.executable, "-m", "shardwright.cli")
for command in (("train", "synthetic-dlrm", "train.steps=20", "run.name=short"), ("export", "runs/short", "served")):
    subprocess.run([*shardwright, *command], check=True, capture_output=True)
sample = {"ids": {}, "numbers": [0.5] * 8}
names = "user page query ad city publisher campaign advertiser device carrier placement browser language"
sample["ids"] = {name: [7] for name in (*names.split(), "history", "keywords", "interests")}
script = 'wrk.method = "POST"; wrk.body = %r' % json.dumps({"samples": [sample]})
Path("ask.lua").write_text(script)
server = subprocess.Popen(
    ["taskset", "-c", "1", *shardwright, "serve", "served", "--port", "0"], stdout=subprocess.PIPE, text=True,
    env=os.environ | {"OMP_NUM_THREADS": "1"},
)
address = next(filter(None, (re.search(r"http://127.0.0.1:\d+", line) for line in server.stdout)))[0]
try:
    for line in sys.stdin:
        wrk = ["taskset", "-c", "0", "wrk", "-t1", "-c32", "-d1s", "-s", "ask.lua", address + "/predict"]
        text = subprocess.run(wrk, check=True, capture_output=True, text=True).stdout
        if "Non-2xx" in text:
            sys.exit(text)
        rate = float(re.search(r"Requests/sec:\s+([\d.]+)", text)[1])
        print("answer " + json.dumps({"milliseconds": 1e3 / rate}), flush=True)
finally:
    server.terminate()
    server.wait()
"""


@dataclass(frozen=True, slots=True)
class Case:
    """Arguments of Python, and how to find the figures in the JSON lines that it prints."""

    command: Sequence[str]
    figures: Callable[[list[dict[str, Any]]], Figures]


# Processes that stay alive and take turns: each reads a number of steps and answers with milliseconds per step.
LIVE_CASES: Mapping[str, tuple[str, Sequence[str]]] = {  # the name of the figure, arguments of Python
    "job.run": ("step_ms", ("-c", JOB_RUN)),
    "dlrm_step": ("step_ms", ("-m", "benchmarks.dlrm_step", "serve", "ours", "2")),
    "requests": ("request_ms", ("-c", REQUESTS)),
}
STEPS, TURNS = 10, 20  # of a turn; turns of a side for each round


def side_figures(lines: list[dict[str, Any]]) -> Figures:
    return {f"{line['side']}_ms": line["ms"][0] for line in lines if "ms" in line}


def serving_figures(lines: list[dict[str, Any]]) -> Figures:
    figures = {f"{line['side']}_requests_s": line["requests_s"][0] for line in lines if line["case"] == "requests"}
    answers = {f"answer_{line['samples']}_ms": 1e-3 * line["us"][0] for line in lines if line["case"] == "answer"}
    return figures | answers


CASES: Mapping[str, Case] = {
    "sharding": Case(
        ("-m", "benchmarks.sharding", "--on", "lab 2 x 1", "--rounds", "2", "--cluster", CLUSTERS), side_figures
    ),
    "hsdp": Case(
        ("-m", "benchmarks.hsdp", "--depths", "4", "--sides", "DDP", "HSDP", "FSDP", "--rounds", "2")
        + ("--cluster", CLUSTERS),
        side_figures,
    ),
    "serving": Case(("-m", "benchmarks.serving", "--steps", "400", "--rounds", "1", "--seconds", "2"), serving_figures),
}


def start(words: Sequence[str], checkout: Path, folder: str) -> subprocess.Popen[str]:
    """Start Python in a checkout's virtual environment, with its modules."""
    return subprocess.Popen(
        [str(checkout / ".venv/bin/python"), *words],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(checkout)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run_case(case: Case, checkout: Path, clusters: Path) -> Figures:
    with TemporaryDirectory() as folder:
        words = [str(clusters) if word == CLUSTERS else word for word in case.command]
        process = start(words, checkout, folder)
        out, error = process.communicate()
        if process.returncode:
            sys.exit(f"{' '.join(words)} in {checkout} ended with status {process.returncode}\n{error[-3000:]}")
        return case.figures([json.loads(line) for line in out.splitlines() if line.startswith("{")])


def run_live(name: str, checkouts: Mapping[str, Path], num_rounds: int) -> dict[str, list[Figures]]:
    """Milliseconds of each turn by side; all processes live at once, one works at a time."""
    figure, words = LIVE_CASES[name]
    times: dict[str, list[Figures]] = {side: [] for side in SIDES}
    with TemporaryDirectory() as folder:
        folders = {side: Path(folder, str(number)) for number, side in enumerate(SIDES)}
        for side_folder in folders.values():
            side_folder.mkdir()
        processes = {side: start(words, checkouts[side], str(folders[side])) for side in SIDES}
        for number in range(-1, TURNS * num_rounds):  # the first turn warms up
            for side in rotate(number):
                process = processes[side]
                assert process.stdin and process.stdout and process.stderr
                process.stdin.write(f"{STEPS}\n")
                process.stdin.flush()
                answer = next((line for line in process.stdout if line.startswith("answer ")), None)
                if answer is None:
                    sys.exit(f'"{side}" has ended\n{process.stderr.read()[-3000:]}')
                if number >= 0:
                    times[side].append({figure: json.loads(answer.removeprefix("answer "))["milliseconds"]})
        for process in processes.values():
            process.communicate()
    return times


def rotate(number: int) -> Sequence[str]:
    """The sides in the order of a round."""
    return SIDES[number % len(SIDES) :] + SIDES[: number % len(SIDES)]


def compare(name: str, other: Path, clusters: Path, num_rounds: int) -> Iterator[dict[str, Any]]:
    """The lines of a case."""
    checkouts = {side: ROOT if side == "this" else other for side in SIDES}
    if name in LIVE_CASES:
        figures = run_live(name, checkouts, num_rounds)
    else:
        figures = {side: [] for side in SIDES}
        for number in range(num_rounds):
            for side in rotate(number):
                figures[side].append(run_case(CASES[name], checkouts[side], clusters))
            print(f"{name}: round {number + 1} of {num_rounds}", file=sys.stderr, flush=True)
    for figure in figures["this"][0]:
        values = {side: [figures_of_round[figure] for figures_of_round in figures[side]] for side in SIDES}
        this, again = (
            [value / base for value, base in zip(values[side], values["other"], strict=True)]
            for side in ("this", "other, again")
        )
        floor = abs(median(again) - 1)
        yield {
            "benchmark": "versions",
            "case": name,
            "figure": figure,
            "rounds": len(this),
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
    parser.add_argument(
        "--cases", nargs="*", default=[*LIVE_CASES, *CASES], choices=[*LIVE_CASES, *CASES], metavar="NAME"
    )
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

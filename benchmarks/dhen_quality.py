"""DHEN against stacks of one module, against a wider DLRM and against a mixture of experts, of equal operations.

    python -m benchmarks.dhen_quality [--into FILE] [--jobs N] [--tune] [--only NAME ...] [--write NAME]
    python -m benchmarks.dhen_quality --data CRITEO_LOG [...]

On the planted click stream (8 M samples for what is claimed, 2 M for the rest; 3 seeds, 5 where these leave an interval
that may reach zero), or on a Criteo log (one epoch, 5 seeds). Runs of one seed have the same
samples in the same order and the same first tables. All cases have the same optimizers and rates, on the log those of
its recipe for a DLRM; a wide DLRM and one with experts have their own best rates, too, as --tune finds them on another
seed. A JSON line per run goes to FILE, where a run that is there is not made again, and its losses on the held-out
samples beside it (FILE of an earlier day does without them, and has no intervals of single seeds). Then summaries: NE
relative to another case in %, the mean over seeds and half of its 95 % interval (Student's t, of differences of equal
seeds), and of single seeds the interval from differences by held-out sample. Exit status 1 if DHEN does not beat every
rival by more than the interval, or runs are missing.
"""

import argparse
import hashlib
import json
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, replace
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from benchmarks import dhen_cases, results_file
from benchmarks.dhen_cases import CASES, DHEN, MORE_SEEDS, RIVALS, STACKS, TUNED
from benchmarks.dhen_data import Log, Planted
from benchmarks.dhen_summary import by_rates, claim, summaries
from shardwright.errors import UserError
from shardwright.jagged import Batch
from shardwright.layers.moe import MoE
from shardwright.runtime.build import build
from shardwright.runtime.job import Job
from shardwright.runtime.planning import plan_for
from shardwright.runtime.run.metrics import entropy
from shardwright.spec.optimizer import sparse_optimizer

TUNING_SEED, TUNING_POINTS, SMOKE_POINTS = 9, (1 << 19, 1 << 20), (1 << 13, 1 << 14)
TRIED = (DHEN, "dlrm + linear 2", "dlrm, wide", "dlrm, experts 2", *STACKS)
DENSE_RATES, TABLE_RATES = (0.001, 0.002, 0.004), (0.025, 0.05, 0.1, 0.2, 0.4)
RATES = MappingProxyType({"planted": (0.002, 0.05), "criteo": (0.003, 0.03)})  # dense, tables
OWN_RATES: MappingProxyType[str, tuple[float, float]] = MappingProxyType(
    dict(zip(TUNED, ((0.002, 0.1), (0.004, 0.05)), strict=True))
)
Data = Planted | Log
Task = tuple[str, int, tuple[float, float]]  # case, seed, rates


def run(task: Task, data: Data, folder: Path) -> dict[str, Any]:
    """Train one case with one seed; losses on the held-out samples of each point are kept in the folder."""
    torch.set_num_threads(1)
    name, seed, rates = task
    source, optimizer, first = data.source(seed), sparse_optimizer(data.tables, lr=rates[1]), data.first(seed)
    sizes = dhen_cases.sizes(CASES[name], source, optimizer, first)
    made = dhen_cases.model(CASES[name], sizes, source, optimizer)
    count = dhen_cases.flops(made, first)
    torch.manual_seed(seed)
    job = build(made, plan_for(made, first), optimizer=lambda given: torch.optim.Adam(given, lr=rates[0]))
    points, losses, seconds, at = [], [], 0.0, 0
    for stop in (point for point in data.points if point <= CASES[name].most):
        begun = time.perf_counter()
        for output in job.run(data.training(seed, at, stop)):
            if not torch.isfinite(output.loss):
                raise UserError(f"{name}, seed {seed}, rates {rates}: the loss is {output.loss.item()}")
        seconds += time.perf_counter() - begun
        each, figures = scored(job, data.held_out(seed, stop))
        losses.append(each.astype(np.float16))
        points.append({"samples": stop, **figures})
        at = stop
    line = {"benchmark": "dhen_quality", "data": data.name, "case": name, "seed": seed, "rates": rates}
    line |= {"digest": digest(task, data), "sizes": dhen_cases.used(CASES[name], sizes), "forward_flops": count}
    line |= {"dense_parameters": sum(p.numel() for p in job.model.dense.parameters()), "points": points}
    line |= {"samples_per_second": round(at / seconds), **busiest(job, data.held_out(seed, at))}
    folder.mkdir(parents=True, exist_ok=True)
    np.save(folder / f"{line['digest']}.npy", np.stack(losses))
    return line


def scored(job: Job, batches: Iterable[Batch]) -> tuple[np.ndarray, dict[str, float]]:
    """The loss on each sample, and their figures."""
    parts, clicks = [], []
    for output in job.evaluate(batches):
        label = output.batch.labels["click"].double()
        parts.append(functional.binary_cross_entropy_with_logits(output.logits.double(), label, reduction="none"))
        clicks.append(label)
    losses, rate = torch.cat(parts), float(torch.cat(clicks).mean())
    return losses.numpy(), {"ne": float(losses.mean()) / entropy(rate), "log_loss": float(losses.mean())}


def busiest(job: Job, batches: Iterable[Batch]) -> dict[str, list[float]]:
    """Of a mixture of experts: the share of the samples' choices that the busiest expert of each layer has."""
    shares: list[float] = []

    def count(layer: MoE, given: tuple[torch.Tensor, ...]) -> None:
        chosen = layer.gate(given[0]).experts_TK.flatten()
        shares.append(round(float(torch.bincount(chosen).max()) / len(chosen), 3))

    hooks = [layer.register_forward_pre_hook(count) for layer in job.model.modules() if isinstance(layer, MoE)]
    if hooks:
        list(job.evaluate(islice(batches, 1)))
    for hook in hooks:
        hook.remove()
    return {"busiest_expert": shares} if shares else {}


def digest(task: Task, data: Data) -> str:
    """All of a run's settings in few letters."""
    name, seed, rates = task
    cases = [asdict(CASES[one]) for one in (name, CASES[name].like) if one]
    told = json.dumps([cases, dhen_cases.SIZES, data.told, seed, rates], sort_keys=True)
    return hashlib.sha256(told.encode()).hexdigest()[:12]


def tasks(data: Data, asked: argparse.Namespace) -> list[Task]:
    """What the claim needs first, with every seed, then the rest."""
    rates = RATES[data.name]
    if asked.tune:
        tried = dict.fromkeys([*((dense, rates[1]) for dense in DENSE_RATES), *((rates[0], t) for t in TABLE_RATES)])
        return [(name, TUNING_SEED, one) for one in tried for name in asked.only or TRIED]
    known = [name for name in asked.only or CASES if data.name == "planted" or name not in TUNED]
    first = [name for name in (DHEN, *RIVALS) if name in known]
    rest = [name for name in known if name not in first]
    parts = [(name, seed) for seed in data.seeds for name in first]
    parts += [(name, seed) for seed in data.more_seeds for name in MORE_SEEDS if name in known]
    parts += [(name, seed) for seed in data.seeds for name in rest]
    return [(name, seed, OWN_RATES.get(name, rates)) for name, seed in parts]


def made(data: Data, asked: argparse.Namespace, into: Path) -> list[dict[str, Any]]:
    """The lines of all tasks, in their order; those that `into` lacks are made and added to it."""
    wanted = tasks(data, asked)
    lines = [json.loads(line) for line in into.read_text().splitlines()] if into.exists() else []
    found = {line["digest"]: line for line in lines if "digest" in line}
    missing = [task for task in wanted if digest(task, data) not in found]
    for seed in sorted({seed for _, seed, _ in missing}):
        data.prepare(seed)
    for line in _carried_out(missing, data, into.with_suffix(".losses"), asked.jobs):
        found[line["digest"]] = line
        with into.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(json.dumps(line), flush=True)
    return [found[digest(task, data)] for task in wanted]


def _carried_out(missing: Sequence[Task], data: Data, folder: Path, jobs: int) -> Iterator[dict[str, Any]]:
    if jobs == 1:
        for task in missing:
            yield run(task, data, folder)
        return
    failed: list[UserError] = []
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        for done in as_completed([pool.submit(run, task, data, folder) for task in missing]):
            try:
                yield done.result()
            except UserError as error:
                failed.append(error)
    if failed:
        raise SystemExit("\n".join(map(str, failed)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="", help="a Criteo log; else the planted stream")
    parser.add_argument("--into", default="", help="lines of runs, and what to go on from")
    parser.add_argument("--samples", default="", help="directory for drawn samples of the stream")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, each of one thread")
    parser.add_argument("--tune", action="store_true", help="try rates, on another seed")
    parser.add_argument("--only", nargs="*", choices=list(CASES), metavar="NAME", help="cases")
    parser.add_argument("--write", default="", help="name of a file in benchmarks/results")
    parser.add_argument("--smoke", action="store_true", help="the smallest case, to see that it runs")
    asked = parser.parse_args()
    if asked.smoke:
        asked.tune, asked.only = True, ["dlrm, wide"]
    if asked.tune and asked.data:
        parser.error("--tune is for the planted stream: a log's held-out samples would choose the rates")
    with tempfile.TemporaryDirectory() as scratch:
        into = Path(asked.into or f"{scratch}/lines.jsonl")
        planted = Planted(Path(asked.samples or scratch))
        data = (
            Log(asked.data)
            if asked.data
            else replace(planted, points=SMOKE_POINTS if asked.smoke else TUNING_POINTS)
            if asked.tune
            else planted
        )
        lines = made(data, asked, into)
        told, good = [*(by_rates(lines) if asked.tune else summaries(lines, into.with_suffix(".losses")))], True
        if not (asked.data or asked.tune):  # a log of 137 thousand rows resolves no such difference
            told += [
                {"best_ne": {seed: data.bounds(seed) for seed in data.seeds}},
                claim(lines, into.with_suffix(".losses")),
            ]
            good = not told[-1]["missing"] and all(told[-1]["beaten"].values())
    for line in told:
        print(json.dumps(line), flush=True)
    if asked.write:
        results_file.write(asked.write, "dhen_quality", [*lines, *told])
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())

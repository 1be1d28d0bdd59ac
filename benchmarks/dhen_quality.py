"""Quality of DHEN against stacks of one module, a wider DLRM and a mixture of experts with as many operations.

    python -m benchmarks.dhen_quality [--into FILE] [--jobs N] [--tune] [--only NAME ...] [--write NAME]
    python -m benchmarks.dhen_quality --data CRITEO_LOG [...]

On the synthetic click stream (8 M samples for the claim, 2 M for the rest; 3 seeds, or 5 if the interval may include
zero with 3), or on a Criteo log (one epoch, 5 seeds). Runs with one seed have the same samples in the same order and
the same initial tables. All cases have the same optimizers and learning rates, on the log those of the DLRM recipe; a
wide DLRM and one with experts also run with their own best rates, which --tune finds on another seed. A JSON line per
run is appended to FILE; runs already in FILE, such as a copy of a results file, are not repeated. The losses on the
held-out samples are stored next to FILE (without them there are no intervals of single seeds). Then summaries:
difference of NE to another case in %, the mean over seeds and half of its 95 % interval (Student's t, of differences of
equal seeds), and for single seeds the interval from differences by held-out sample. Exit status 1 if DHEN does not beat
every rival by more than the interval, or if runs are missing.
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
TRIED = (DHEN, "dlrm + linear 2", "dlrm, wide", "dlrm, experts 2", "dlrm, balanced experts 2", *STACKS)
DENSE_RATES, TABLE_RATES = (0.001, 0.002, 0.004), (0.025, 0.05, 0.1, 0.2, 0.4)
RATES = MappingProxyType({"planted": (0.002, 0.05), "criteo": (0.003, 0.03)})  # dense, tables
OWN_RATES: MappingProxyType[str, tuple[float, float]] = MappingProxyType(
    dict(zip(TUNED, ((0.002, 0.1), (0.004, 0.05), (0.002, 0.4)), strict=True))
)
Data = Planted | Log
Task = tuple[str, int, tuple[float, float]]  # case, seed, rates


def run(task: Task, data: Data, folder: Path) -> dict[str, Any]:
    """Train one case with one seed; the losses on the held-out samples of each point are stored in the folder."""
    torch.set_num_threads(1)
    name, seed, rates = task
    source, optimizer, first = data.source(seed), sparse_optimizer(data.tables, lr=rates[1]), data.first(seed)
    sizes = dhen_cases.sizes(CASES[name], source, optimizer, first)
    model = dhen_cases.model(CASES[name], sizes, source, optimizer)
    flops = dhen_cases.flops(model, first)
    torch.manual_seed(seed)
    job = build(model, plan_for(model, first), optimizer=lambda p: torch.optim.Adam(p, lr=rates[0]))
    points, losses, seconds, num_trained = [], [], 0.0, 0
    for stop in (point for point in data.points if point <= CASES[name].most):
        start = time.perf_counter()
        for output in job.run(data.training(seed, num_trained, stop)):
            if not torch.isfinite(output.loss):
                raise UserError(f"{name}, seed {seed}, rates {rates}: the loss is {output.loss.item()}")
        seconds += time.perf_counter() - start
        sample_losses, metrics = evaluate(job, data.held_out(seed, stop))
        losses.append(sample_losses.astype(np.float16))
        points.append({"samples": stop, **metrics})
        num_trained = stop
    line = {"benchmark": "dhen_quality", "data": data.name, "case": name, "seed": seed, "rates": rates}
    line |= {"digest": digest(task, data), "sizes": dhen_cases.case_sizes(CASES[name], sizes), "forward_flops": flops}
    line |= {"dense_parameters": sum(p.numel() for p in job.model.dense.parameters()), "points": points}
    line |= {"samples_per_second": round(num_trained / seconds), **expert_shares(job, data.held_out(seed, num_trained))}
    folder.mkdir(parents=True, exist_ok=True)
    np.save(folder / f"{line['digest']}.npy", np.stack(losses))
    return line


def evaluate(job: Job, batches: Iterable[Batch]) -> tuple[np.ndarray, dict[str, float]]:
    """The loss of each sample, and NE and log loss over all."""
    sample_losses, clicks = [], []
    for output in job.evaluate(batches):
        label = output.batch.labels["click"].double()
        sample_losses.append(
            functional.binary_cross_entropy_with_logits(output.logits.double(), label, reduction="none")
        )
        clicks.append(label)
    losses, rate = torch.cat(sample_losses), float(torch.cat(clicks).mean())
    return losses.numpy(), {"ne": float(losses.mean()) / entropy(rate), "log_loss": float(losses.mean())}


def expert_shares(job: Job, batches: Iterable[Batch]) -> dict[str, list[float]]:
    """For a mixture of experts: the share of all choices that go to the busiest expert, by layer."""
    shares: list[float] = []

    def count_choices(layer: MoE, inputs: tuple[torch.Tensor, ...]) -> None:
        experts = layer.gate(inputs[0]).experts_NK.flatten()
        shares.append(round(float(torch.bincount(experts).max()) / len(experts), 3))

    hooks = [layer.register_forward_pre_hook(count_choices) for layer in job.model.modules() if isinstance(layer, MoE)]
    if hooks:
        list(job.evaluate(islice(batches, 1)))
    for hook in hooks:
        hook.remove()
    return {"busiest_expert": shares} if shares else {}


def digest(task: Task, data: Data) -> str:
    """A short hash of all settings of a run."""
    name, seed, rates = task
    cases = [asdict(CASES[case]) for case in (name, CASES[name].like) if case]
    description = json.dumps([cases, dhen_cases.SIZES, data.description, seed, rates], sort_keys=True)
    return hashlib.sha256(description.encode()).hexdigest()[:12]


def tasks(data: Data, args: argparse.Namespace) -> list[Task]:
    """The runs: those that the claim needs first, with every seed, then the rest."""
    rates = RATES[data.name]
    if args.tune:
        pairs = dict.fromkeys([*((dense, rates[1]) for dense in DENSE_RATES), *((rates[0], t) for t in TABLE_RATES)])
        return [(name, TUNING_SEED, pair) for pair in pairs for name in args.only or TRIED]
    names = [name for name in args.only or CASES if data.name == "planted" or name not in TUNED]
    first = [name for name in (DHEN, *RIVALS) if name in names]
    rest = [name for name in names if name not in first]
    runs = [(name, seed) for seed in data.seeds for name in first]
    runs += [(name, seed) for seed in data.more_seeds for name in MORE_SEEDS if name in names]
    runs += [(name, seed) for seed in data.seeds for name in rest]
    return [(name, seed, OWN_RATES.get(name, rates)) for name, seed in runs]


def run_missing(data: Data, args: argparse.Namespace, into: Path) -> list[dict[str, Any]]:
    """The lines of all tasks, in order; tasks without a line in `into` are run, and their lines appended to it."""
    all_tasks = tasks(data, args)
    lines_by_digest = read_lines(into) if into.exists() else {}
    missing = [task for task in all_tasks if digest(task, data) not in lines_by_digest]
    for seed in sorted({seed for _, seed, _ in missing}):
        data.prepare(seed)
    header = results_file.make_header("dhen_quality") if missing else {}
    for line in _run_all(missing, data, into.with_suffix(".losses"), args.jobs):
        line |= {"commit": header["commit"], "modified": header["modified"]}
        lines_by_digest[line["digest"]] = line
        with into.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(json.dumps(line), flush=True)
    return [lines_by_digest[digest(task, data)] for task in all_tasks]


def read_lines(path: Path) -> dict[str, dict[str, Any]]:
    """The runs in a file by digest, each with the commit of its code; a results file names that in its header."""
    header = results_file.read_header(path)
    origin = {name: header[name] for name in ("commit", "modified") if name in header}
    return {line["digest"]: origin | line for line in results_file.read(path) if "digest" in line}


def _run_all(missing: Sequence[Task], data: Data, folder: Path, jobs: int) -> Iterator[dict[str, Any]]:
    if jobs == 1:
        for task in missing:
            yield run(task, data, folder)
        return
    errors: list[UserError] = []
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        for future in as_completed([pool.submit(run, task, data, folder) for task in missing]):
            try:
                yield future.result()
            except UserError as error:
                errors.append(error)
    if errors:
        raise SystemExit("\n".join(map(str, errors)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="", help="a Criteo log; default: the synthetic click stream")
    parser.add_argument("--into", default="", help="file for the lines of runs; lines in it are not repeated")
    parser.add_argument("--samples", default="", help="directory for generated samples of the stream")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, each of one thread")
    parser.add_argument("--tune", action="store_true", help="try learning rates, on another seed")
    parser.add_argument("--only", nargs="*", choices=list(CASES), metavar="NAME", help="cases")
    parser.add_argument("--write", default="", help="name of a file in benchmarks/results")
    parser.add_argument("--smoke", action="store_true", help="the smallest case, to see that it runs")
    args = parser.parse_args()
    if args.smoke:
        args.tune, args.only = True, ["dlrm, wide"]
    if args.tune and args.data:
        parser.error("--tune works on the synthetic stream only: a log's held-out samples would choose the rates")
    with tempfile.TemporaryDirectory() as scratch:
        into = Path(args.into or f"{scratch}/lines.jsonl")
        planted = Planted(Path(args.samples or scratch))
        data = (
            Log(args.data)
            if args.data
            else replace(planted, points=SMOKE_POINTS if args.smoke else TUNING_POINTS)
            if args.tune
            else planted
        )
        lines = run_missing(data, args, into)
        rows, holds = ([*(by_rates(lines) if args.tune else summaries(lines, into.with_suffix(".losses")))], True)
        if not (args.data or args.tune):  # with 137 thousand rows a log cannot resolve such differences
            rows += [
                {"best_ne": {seed: data.bounds(seed) for seed in data.seeds}},
                claim(lines, into.with_suffix(".losses")),
            ]
            holds = not rows[-1]["missing"] and all(rows[-1]["beaten"].values())
    for line in rows:
        print(json.dumps(line), flush=True)
    if args.write:
        results_file.write(args.write, "dhen_quality", [*lines, *rows])
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())

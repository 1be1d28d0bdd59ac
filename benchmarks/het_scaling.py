"""HET's Wide & Deep from 1 to 32 workers and from 128 to 4,096 columns: steps that the planner predicts.

    python -m benchmarks.het_scaling [--dims D ...] [--workers N ...] [--write NAME]

Nothing is run. A worker is a core of the preset two-cores; links are those of the presets het-a (1 Gbit/s) and het-b
(10 Gbit/s). Tables, ids and 128 samples a worker are those of benchmarks.het, with D columns, so that the global batch
grows with the workers. One table server for every 8 workers, as HET's 4 for 32. Sides:
    exact                     tables sharded over the workers
    bounded 10, 100           workers read copies of 15 % of the rows, with pull and push of 10 and of 100; exact if
                              that is faster, as the planner chooses
    servers 0, 10, 100        servers own the rows; workers have as many copies, exact ones and with these bounds
A JSON line per link, D, number of workers and side: the predicted milliseconds of a step (`predicted_ms`), speed over
the exact side, and the samples per second over those of one worker (`scaling`), which has the rows itself or on a
server as the side does. Null: a worker's memory is too small.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from benchmarks import results_file
from benchmarks.het import COPIES, EXPONENT, LOCAL_BATCH, MODELS, NUMBERS, ROWS, TABLES, make_batch, make_statistics
from shardwright import Bounded, UserError
from shardwright.layers.embedding import EmbeddingBags
from shardwright.measure.describe import describe
from shardwright.models.het import HetModel, HetWideDeep
from shardwright.planner import owned_rows, search, servers, staleness
from shardwright.planner.plan import exact_precision
from shardwright.planner.problem import Problem, ServerRequest
from shardwright.spec import presets
from shardwright.spec.cluster import Cluster
from shardwright.spec.optimizer import SGD
from shardwright.spec.workload import Feature, Table, Workload

LINKS = {"1 Gbit/s": "het-a", "10 Gbit/s": "het-b"}  # presets
DEVICE = "two-cores"
DIMS, WORKERS = (128, 512, 1024, 4096), (1, 2, 4, 8, 16, 32)
WORKERS_PER_SERVER = 8
BOUNDS = (10, 100)


def make_workload(dim: int, workers: int) -> Workload:
    """The model with tables of so many columns, and the statistics of its stream."""
    tables = [Table(f"t{number:02}", ROWS, dim) for number in range(TABLES)]
    with torch.device("meta"):
        sparse = EmbeddingBags(tables, [Feature(table.name, table.name) for table in tables], SGD(0.01))
        model = HetModel(sparse, HetWideDeep([dim] * TABLES, NUMBERS, (256, 256, 256)))
    weights = np.arange(1, ROWS + 1) ** -EXPONENT
    sizes = [LOCAL_BATCH << power for power in range(max(WORKERS).bit_length())]
    rows = [float(-np.expm1(size * np.log1p(-weights / weights.sum())).sum()) for size in sizes]
    distinct = tuple((size, num / size) for size, num in zip(sizes, rows, strict=True))
    statistics = [replace(each, distinct=distinct) for each in make_statistics([table.name for table in tables])]
    return describe(model, make_batch(MODELS[0], 0, LOCAL_BATCH * workers), statistics)


def make_cluster(preset: str, workers: int) -> Cluster:
    """So many workers on the links of a preset."""
    device, (link,) = presets.load_cluster(DEVICE).device, presets.load_cluster(preset).levels
    memory = replace(device, tiers=device.tiers[:1])  # no disk
    return Cluster(version=1, name=preset, source="scaled", device=memory, levels=(replace(link, num=workers),))


def with_servers(problem: Problem, bound: int) -> Problem:
    """The problem in which servers own the rows."""
    num = max(1, problem.cluster.num_ranks // WORKERS_PER_SERVER)
    syncs = dict.fromkeys(range(TABLES), Bounded(bound, bound, COPIES))
    return owned_rows.with_owners(servers.with_servers(problem, ServerRequest(num, own=True)), syncs)


def make_sides(problem: Problem) -> Iterator[tuple[str, Problem]]:
    yield "exact", problem
    for bound in BOUNDS if problem.cluster.num_ranks > 1 else ():  # one worker has no rows of others
        copies = dict.fromkeys(range(TABLES), Bounded(bound, bound, COPIES))
        yield f"bounded {bound}", staleness.with_bounds(problem, copies)
    for bound in (0, *BOUNDS):
        yield f"servers {bound}", with_servers(problem, bound)


def predict(problem: Problem) -> float | None:
    """Milliseconds of a step of the best plan; None: it does not fit."""
    try:
        return round(1e3 * search.find_best(problem).seconds, 2)
    except UserError as error:
        if "short by" not in str(error):
            raise
        return None


def predict_sides(link: str, dim: int, all_workers: Sequence[int]) -> Iterator[dict[str, Any]]:
    alone: dict[str, float | None] = {}  # milliseconds of one worker
    for workers in all_workers:
        workload = make_workload(dim, workers)
        cluster, precision = make_cluster(LINKS[link], workers), exact_precision(workload)
        problem = search.define_problem(workload, cluster, LOCAL_BATCH * workers, precision)
        milliseconds = {side: predict(option) for side, option in make_sides(problem)}
        exact = milliseconds["exact"]
        alone = milliseconds if workers == 1 else alone
        for side, own in milliseconds.items():
            if exact is not None and side.startswith("bounded"):
                own = exact if own is None else min(own, exact)  # as the planner chooses
            line: dict[str, Any] = {"benchmark": "het_scaling", "link": link, "dim": dim, "workers": workers}
            line |= {"side": side, "predicted_ms": own, "over_exact": None, "scaling": None}
            first = alone.get(side, alone.get("exact"))  # one worker has no copies of rows of others
            if own is not None:
                line["over_exact"] = None if exact is None else round(exact / own, 2)
                line["scaling"] = None if first is None else round(workers * first / own, 2)
            yield line


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dims", nargs="*", type=int, default=DIMS, metavar="D", help="columns of a table")
    parser.add_argument("--workers", nargs="*", type=int, default=WORKERS, metavar="N")
    parser.add_argument("--write", default="", help="name of a file in benchmarks/results")
    parser.add_argument("--smoke", action="store_true", help="the smallest case, to see that it runs")
    args = parser.parse_args(arguments)
    if args.smoke:
        args.dims, args.workers = DIMS[:1], WORKERS[:2]
    lines: list[dict[str, Any]] = []
    for link in LINKS:
        for dim in args.dims:
            for line in predict_sides(link, dim, args.workers):
                lines.append(line)
                print(json.dumps(line), flush=True)
    if args.write:
        results_file.write(args.write, "het_scaling", lines)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

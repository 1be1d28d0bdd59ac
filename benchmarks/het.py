"""Bounded staleness on sharded tables in HET's setting: workers on slow links that own the rows themselves.

    python -m benchmarks.het [--model MODEL ...] [--uplink RATE] [--rounds N] [--cluster FILE] [--write NAME]

As root. An emulated lab of 8 hosts with one rank of 0.2 core each. HET's models (Wide & Deep, DeepFM, DCN) with 26
tables of 40,000 rows and 128 columns train with 128 samples a rank; ids follow a power law: a tenth of the rows has
nine tenths of the lookups. All sides train in turns, in an order that rotates each round:
    exact            the planner's plan: tables sharded over the ranks
    exact A/A        the same again: how much turns differ
    bounded 10, 100  ranks read copies of rows, with pull and push of 10 and of 100; after 300 steps of warm-up. Copies
                     are of the tables whose rows the planner exchanges; of all, in row shards, if it exchanges only
                     vectors, as on fast links, where it would keep no copies
A JSON line per side: milliseconds per step (median, least, most), speedup over the exact side of the same round, bytes
per step on a host's uplink, shares of the rows read from other ranks that were validated, sent and pushed, measured and
predicted, and the predicted step. A last line for each model has the share of communication in the exact step: 1 less
the ratio of the step in a lab without limited links to this one.
"""

import argparse
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks import results_file
from benchmarks.sharding import measure, median_min_max, start_job, uplink_bytes
from benchmarks.turns import TurnServer, make_broadcast
from shardwright.lab.emulated_cluster import Lab
from shardwright.lab.shape import Host, Shape

RANKS, CPU, LOCAL_BATCH = 8, 0.2, 128
TABLES, ROWS, DIM, NUMBERS = 26, 40_000, 128, 13
EXPONENT = 1.15  # of the power law
COPIES = 6_000  # of the rows of each table, on each rank: 15 %
SIDES = ("exact", "exact A/A", "bounded 10", "bounded 100")
MODELS = ("het_wide_deep", "het_deepfm", "het_dcn")
WARM_STEPS, EXACT_WARM_STEPS, STEPS = 300, 20, 20
NUM_BATCHES = 400  # distinct batches, used in a cycle
TIMEOUT_SECONDS = 3600.0


def make_model(name: str) -> Any:
    """The model on the meta device."""
    import torch

    from shardwright.layers.embedding import EmbeddingBags
    from shardwright.models.het import HetDCN, HetDeepFM, HetModel, HetWideDeep
    from shardwright.spec.optimizer import SGD
    from shardwright.spec.workload import Feature, Table

    torch.manual_seed(1)
    tables = [Table(f"t{number:02}", ROWS, DIM) for number in range(TABLES)]
    features = [Feature(table.name, table.name) for table in tables]
    if name == "het_deepfm":  # a weight of each id besides its vector
        tables += [Table(f"w{number:02}", ROWS, 1) for number in range(TABLES)]
        features += [Feature(table.name, table.name) for table in tables[TABLES:]]
    dense = {"het_wide_deep": HetWideDeep, "het_deepfm": HetDeepFM, "het_dcn": HetDCN}[name]
    hidden = (256, 256) if name == "het_deepfm" else (256, 256, 256)
    with torch.device("meta"):
        sparse = EmbeddingBags(tables, features, SGD(0.01))
        return HetModel(sparse, dense([table.dim for table in tables], NUMBERS, hidden))


def make_batch(name: str, number: int, samples: int) -> Any:
    """Batch `number` of so many samples."""
    import numpy as np
    import torch

    from shardwright.jagged import Batch, Jagged

    rng = np.random.default_rng(1000 + number)
    shares = np.cumsum(np.arange(1, ROWS + 1) ** -EXPONENT)
    ids = np.searchsorted(shares / shares[-1], rng.random((TABLES, samples)))
    names = [f"t{table:02}" for table in range(TABLES)]
    if name == "het_deepfm":
        ids, names = np.concatenate([ids, ids]), [*names, *(f"w{table:02}" for table in range(TABLES))]
    lengths = torch.ones(len(names), samples, dtype=torch.int64)
    values = torch.from_numpy(ids.reshape(-1).astype(np.int64))
    numbers = torch.from_numpy(rng.normal(size=(samples, NUMBERS)).astype(np.float32))
    clicks = torch.from_numpy((rng.random(samples) < 0.25).astype(np.float32))
    return Batch(Jagged(tuple(names), values, lengths), numbers, {"click": clicks})


def make_statistics(features: Sequence[str]) -> list[Any]:
    """Of the stream, as a pass over it would measure them."""
    import numpy as np

    from shardwright.spec.workload import FeatureStatistics

    weights = np.arange(1, ROWS + 1) ** -EXPONENT
    probabilities, shares = weights / weights.sum(), np.cumsum(weights) / weights.sum()
    points = np.unique(np.geomspace(1, ROWS - 1, 100).astype(int))
    popularity = tuple((int(k), float(shares[k - 1])) for k in points)
    sizes = [LOCAL_BATCH << k for k in range(4)]
    distinct = tuple((size, float(-np.expm1(size * np.log1p(-probabilities)).sum() / size)) for size in sizes)
    return [FeatureStatistics(name, 1.0, distinct[-1][1], popularity, distinct) for name in features]


def define_problem(model: Any, batch: Any, statistics: Sequence[Any], cluster: Any) -> Any:
    """What the planner knows: the workload with these statistics of the features, on a cluster."""
    from shardwright.measure.describe import describe
    from shardwright.planner import search
    from shardwright.planner.plan import exact_precision

    workload = describe(model, batch, statistics)
    return search.define_problem(workload, cluster, workload.batch_size, exact_precision(workload))


def make_problem(name: str, cluster: Any) -> Any:
    batch = make_batch(name, 0, LOCAL_BATCH * cluster.num_ranks)
    return define_problem(make_model(name), batch, make_statistics(batch.features.features), cluster)


@dataclass(frozen=True)
class ClickStreamTask:
    """What a side of benchmarks.het_sides trains: a model of this file."""

    name: str
    workers: int = RANKS
    memory_share: float = 0.4

    @property
    def copies(self) -> dict[str, int]:
        """Rows of each table, on each worker."""
        return {table.name: COPIES for table in self.make_model().sparse.tables}

    def make_model(self) -> Any:
        return make_model(self.name)

    def make_batches(self, rank: int) -> list[Any]:
        """The batches of a worker."""
        return [make_batch(self.name, 10_000 * (rank + 1) + number, LOCAL_BATCH) for number in range(NUM_BATCHES)]

    def make_example(self) -> Any:
        """A global batch."""
        return make_batch(self.name, 0, LOCAL_BATCH * self.workers)

    def make_problem(self, cluster: Any) -> Any:
        """What the planner knows."""
        return make_problem(self.name, cluster)

    def hottest(self) -> dict[str, Any]:
        """Rows by table, most frequent first."""
        import numpy as np

        return {table.name: np.arange(table.rows) for table in self.make_model().sparse.tables}


def make_results(name: str, cluster: Any) -> dict[str, Any]:
    """By side, its plan and the candidate that predicts it."""
    from shardwright import Bounded, allow_staleness
    from shardwright.planner.plan import make_plan
    from shardwright.planner.reprice import reprice_plan

    problem = make_problem(name, cluster)
    workload = problem.workload
    exact = make_plan(workload, cluster)
    allowed = make_plan(workload, cluster, allow=("staleness<=800",))
    copied = [table.table for table in allowed.plan.tables if table.travel == "rows"]
    if not copied:
        copied = [table.name for table in workload.tables]
        allowed = make_plan(workload, cluster, allow=("staleness<=800",), pins=dict.fromkeys(copied, "row"))
    sides = {"exact": (exact.plan, exact.candidate), "exact A/A": (exact.plan, exact.candidate)}
    for bound in (10, 100):
        bounds = dict.fromkeys(copied, Bounded(bound, bound, COPIES))
        plan = allow_staleness(allowed.plan, bounds)
        sides[f"bounded {bound}"] = (plan, reprice_plan(problem, plan))
    print(dict(allowed.plan.why).get("staleness"), file=sys.stderr)
    return sides


def worker(folder: str, name: str, cluster_file: str, chosen: Sequence[str]) -> None:
    """Body of every rank, which trains these sides."""
    from itertools import cycle

    import torch

    from shardwright.comm.mesh import Mesh
    from shardwright.runtime.build import build
    from shardwright.spec import presets

    sides = make_results(name, presets.load_cluster(cluster_file))
    lanes = ("main", "ids", "wire", "dense")
    axes = sides["exact"][0].mesh_axes
    mesh = Mesh(axes, groups=[(lane, ()) for lane in lanes], timeout_seconds=TIMEOUT_SECONDS)
    group = mesh.group(lane="main")
    batches = [make_batch(name, 10_000 * (mesh.rank + 1) + number, LOCAL_BATCH) for number in range(NUM_BATCHES)]
    jobs, runs = {}, {}
    for side, (plan, _) in ((side, sides[side]) for side in chosen):
        model = make_model(name)
        hottest = {table.name: torch.arange(table.rows) for table in model.sparse.tables}
        jobs[side] = build(model, plan, mesh, optimizer=lambda p: torch.optim.SGD(p, 0.01), hottest=hottest)
        runs[side] = jobs[side].run(cycle(batches))
    train_turns(TurnServer(folder, "ours", mesh.rank, make_broadcast(group)), jobs, runs, group)
    mesh.close()


def train_turns(turns: TurnServer, jobs: Mapping[str, Any], runs: Mapping[str, Any], group: Any) -> None:
    """Train steps of a side in each turn; the reply has their time, and the rows of copies that were read, validated,
    sent and pushed."""
    from time import perf_counter

    import torch

    from shardwright.comm import collective

    def barrier_time() -> float:
        collective.all_reduce(torch.zeros(1), group).wait()
        return perf_counter()

    def counts(side: str) -> list[int]:
        of_groups = jobs[side].copy_counts().values()
        own = [[each.read, each.validated, each.sent, each.pushed] for each in of_groups]
        return torch.tensor([[0] * 4, *own]).sum(0).tolist()

    turns.reply({})
    for side, warm, steps in turns.turns():
        losses = [float(next(runs[side]).loss) for _ in range(warm)]
        before, start = counts(side), barrier_time()
        for _ in range(steps):
            next(runs[side])
        seconds = barrier_time() - start
        moved = [after - earlier for after, earlier in zip(counts(side), before, strict=True)]
        turns.reply({"seconds": seconds, "loss": losses[-1:], "rows": moved})


def moved_rows(replies: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Of the rows that a side read from copies, the shares that were validated, sent and pushed; empty without
    copies."""
    rows = [sum(column) for column in zip(*(reply["rows"] for reply in replies), strict=True)]
    shares = zip(("validated", "sent", "pushed"), rows[1:], strict=True)
    return {key: round(100 * num / rows[0], 1) for key, num in shares} if rows[0] else {}


def run_sides(
    uplink: str, name: str, cluster: str, sides: Sequence[str], rounds: int, steps: tuple[int, int, int]
) -> dict[str, list[dict[str, Any]]]:
    """Run these sides in turns; returns by side the reply of each round, with a step's bytes on an uplink. `steps`: of
    the warm-up, of exact sides and of others, and of a turn."""
    replies: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
    with TemporaryDirectory() as folder, Lab(Shape((Host(uplink=uplink, cpu=CPU),) * RANKS), "het") as lab:
        if not Path(cluster).exists():
            measure(lab, Path(cluster))
        call = f"from benchmarks.het import worker; worker({folder!r}, {name!r}, {cluster!r}, {list(sides)!r})"
        with start_job(lab, folder, "ours", [sys.executable, "-c", call]) as client:
            for side in sides:
                client.run_turn(side, steps[0] if side.startswith("exact") else steps[1], 1)
            for number in range(rounds):
                first = number % len(sides)
                for side in (*sides[first:], *sides[:first]):
                    bytes_before = uplink_bytes(lab)
                    reply = client.run_turn(side, 2, steps[2])
                    replies[side].append(reply | {"bytes": (uplink_bytes(lab) - bytes_before) / (2 + steps[2])})
                print(f"round {number + 1} of {rounds}", file=sys.stderr)
    return replies


def run(
    name: str, uplink: str, rounds: int, cluster_file: str, steps: tuple[int, int, int]
) -> Iterator[dict[str, Any]]:
    from shardwright.spec import presets

    with TemporaryDirectory() as folder:
        cluster = cluster_file or f"{folder}/cluster.toml"
        replies = run_sides(uplink, name, cluster, SIDES, rounds, steps)
        yield from result_lines(name, uplink, replies, make_results(name, presets.load_cluster(cluster)), steps[2])
        without = run_sides("", name, cluster, SIDES[:1], rounds, steps)
    times = [1e3 * median(reply["seconds"] for reply in side["exact"]) / steps[2] for side in (replies, without)]
    line = {"benchmark": "het", "model": name, "uplink": uplink, "side": "exact, no limited links"}
    yield line | {"ms": round(times[1], 1), "communication_percent": round(100 - 100 * times[1] / times[0])}


def result_lines(
    name: str, uplink: str, replies: dict[str, list[dict[str, Any]]], predicted: dict[str, Any], steps: int
) -> Iterator[dict[str, Any]]:
    from shardwright.planner.plan import slowest_stage_seconds

    times = {side: [1e3 * reply["seconds"] / steps for reply in replies[side]] for side in SIDES}
    for side in SIDES:
        candidate = predicted[side][1]
        ratios = [exact / ms for exact, ms in zip(times["exact"], times[side], strict=True)]
        line = {"benchmark": "het", "model": name, "uplink": uplink, "side": side, "rounds": len(ratios)}
        line |= {"ms": median_min_max(times[side]), "over_exact": median_min_max(ratios, 2)}
        line |= {"uplink_kb": round(1e-3 * median(reply["bytes"] for reply in replies[side]))}
        line |= (moved := moved_rows(replies[side]))
        loads = [load.copied for load in candidate.problem.placed_loads(candidate.placed) if load.copied is not None]
        for key in moved:
            share = sum(getattr(load, key) * load.rows_per_sample for load in loads)
            line[f"predicted_{key}"] = round(100 * share / sum(load.rows_per_sample for load in loads), 1)
        line |= {"predicted_ms": round(1e3 * candidate.seconds, 1)}
        parts = slowest_stage_seconds(candidate)
        line |= {"parts_ms": {key: round(1e3 * seconds, 1) for key, seconds in parts.items() if seconds > 5e-4}}
        yield line


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="*", choices=MODELS, default=MODELS)
    parser.add_argument("--uplink", default="30mbit", help="rate of each host's link")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cluster", default="", metavar="FILE", help="cluster file of such a lab; measured if missing")
    parser.add_argument("--write", default="", help="name of a file in benchmarks/results")
    parser.add_argument("--smoke", action="store_true", help="the smallest case, to see that it runs")
    args = parser.parse_args(arguments)
    steps = EXACT_WARM_STEPS, WARM_STEPS, STEPS
    if args.smoke:
        args.model, args.rounds, steps = MODELS[:1], 1, (2, 2, 2)
    lines: list[dict[str, Any]] = []
    for name in args.model:
        for line in run(name, args.uplink, args.rounds, args.cluster, steps):
            lines.append(line)
            print(json.dumps(line), flush=True)
    if args.write:
        results_file.write(args.write, "het", lines)
    return 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())

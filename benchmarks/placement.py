"""Placements of tables: round robin, greedy by size, greedy by cost, largest differencing, planner.

    python -m benchmarks.placement [--sets N] [--write NAME] [--peer PYTHON] [--peer-sets N]

50 random sets of 40 to 400 tables with skewed sizes and bag lengths, on 2 to 16 hosts of 8 GPUs of zionex-128-a100.
Each placement is scored by its simulated step. The first four place unsharded tables; "whole" balances the same
unsharded tables as the planner does, which shows the gain by sharding separately. For small sets, of 8 tables on 3
ranks, every placement is tried. With --peer, the Python of an environment with torchrec, TorchRec's planner shards and
places the tables of the first sets, with 20 s for each of its four proposers (two minutes are not enough for one set).
A JSON line per set.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from benchmarks import results_file
from shardwright.planner import plan as planning
from shardwright.planner import search
from shardwright.planner.memory import budget
from shardwright.planner.problem import PlacedTables, Precision, Problem
from shardwright.planner.search import Candidate, Proposal
from shardwright.planner.tables import balance
from shardwright.planner.tables.balance import Items, imbalance
from shardwright.planner.tables.sharding import Sharding
from shardwright.spec import presets
from shardwright.spec.cluster import Cluster
from shardwright.spec.optimizer import RowWiseAdaGrad
from shardwright.spec.workload import Block, Feature, FeatureStatistics, Table, Workload

SEED = 1
LOCAL_BATCH_SIZE = 512
WEIGHTS = np.array([1.0, 0.3])
PEER_SECONDS = 20  # for each of TorchRec's four proposers
SMALL_SETS, SMALL_TABLES, SMALL_RANKS = 50, 8, 3
Placer = Callable[[Items], np.ndarray | None]


def draw_problem(rng: np.random.Generator) -> tuple[Workload, Cluster]:
    """A random workload and number of hosts."""
    preset = presets.load_cluster("zionex-128-a100")
    hosts = int(rng.choice([2, 4, 8, 16]))
    cluster = replace(preset, levels=(preset.levels[0], replace(preset.levels[1], num=hosts)))
    num = int(rng.integers(40, 401))
    return draw_workload(rng, num, LOCAL_BATCH_SIZE * cluster.num_ranks, most_rows=4e7), cluster


def draw_workload(rng: np.random.Generator, num: int, batch_size: int, most_rows: float) -> Workload:
    """A random workload of `num` tables: log-normal rows and bag lengths, common numbers of columns."""
    names = [f"table-{i:03}" for i in range(num)]
    rows = np.clip(10 ** rng.normal(5.0, 1.2, num), 10, most_rows).astype(int)
    dims = rng.choice([16, 32, 64, 128, 192, 256], num, p=[0.1, 0.2, 0.3, 0.2, 0.1, 0.1])
    ids = np.clip(rng.lognormal(1.5, 1.2, num), 0.2, 200)
    return Workload(
        version=1,
        batch_size=batch_size,
        tables=tuple(Table(name, int(r), int(d)) for name, r, d in zip(names, rows, dims, strict=True)),
        features=tuple(Feature(name, name) for name in names),
        statistics=tuple(FeatureStatistics(name, float(n), 0.5) for name, n in zip(names, ids, strict=True)),
        optimizer=RowWiseAdaGrad(lr=0.01),
        blocks=(
            Block("bottom", 10**6, 4 * 10**6, 2 * 10**6 * batch_size, 4 * 10**6 * batch_size, 4096 * batch_size, False),
            Block("top", 10**7, 4 * 10**7, 2 * 10**7 * batch_size, 4 * 10**7 * batch_size, 16384 * batch_size),
        ),
    )


def round_robin(items: Items) -> np.ndarray:
    return np.arange(len(items.bytes_N)) % items.num_bins


def greedy_by_size(items: Items) -> np.ndarray | None:
    """Place tables by size, largest first, each on the rank with the fewest bytes."""
    by_bytes = replace(
        items, loads_NK=items.bytes_N[:, None], weights_K=np.ones(1), initial_loads_BK=np.zeros((items.num_bins, 1))
    )
    return balance.greedy(by_bytes)


PLACERS: dict[str, Placer] = {
    "round_robin": round_robin,
    "greedy_by_size": greedy_by_size,
    "greedy_by_cost": balance.greedy,
    "largest_differencing": balance.differencing,
    "whole": balance.assign_bins,
}


def unsharded_items(problem: Problem, weights: np.ndarray = WEIGHTS) -> tuple[list, Items]:
    """A shard unit per unsharded table, and the balancing problem of these units."""
    units = [search.unsharded_unit(problem, i) for i in range(len(problem.table_loads))]
    loads_NK = np.array([[unit.read_bytes, unit.sent_bytes] for unit in units])
    num = problem.cluster.num_ranks
    loads_NK /= loads_NK.sum(0) / num
    free = np.full(num, sum(budget.memory_budget(problem).free_bytes))
    return units, Items(loads_NK, np.array([unit.bytes_ for unit in units]), weights, np.zeros((num, 2)), free)


def evaluate_bins(problem: Problem, units: list, bins: np.ndarray) -> Candidate:
    placed = PlacedTables(tuple(units), tuple((int(bin_),) for bin_ in bins))
    return require_fit(search.evaluate(problem, Proposal(), placed))


def require_fit(candidate: Candidate | None) -> Candidate:
    if candidate is None:
        sys.exit("a placement does not fit in memory")
    return candidate


def result_fields(candidate: Candidate) -> dict[str, float]:
    work = candidate.loads.lookup_R + candidate.loads.update_R
    return {"imbalance": round(imbalance(work), 4), "step_ms": round(1e3 * candidate.seconds, 4)}


def compare_large_set(rng: np.random.Generator, torchrec: str) -> dict[str, Any]:
    work, cluster = draw_problem(rng)
    problem = search.define_problem(work, cluster, work.batch_size, Precision())
    units, items = unsharded_items(problem)
    line: dict[str, Any] = {"tables": len(units), "ranks": cluster.num_ranks}
    for name, place in PLACERS.items():
        bins = place(items)
        line[name] = result_fields(evaluate_bins(problem, units, bins)) if bins is not None else None
    start = perf_counter()
    planned = planning.make_plan(work, cluster)
    line["planner"] = result_fields(planned.candidate) | {"seconds": round(perf_counter() - start, 2)}
    if torchrec:
        start = perf_counter()
        candidate = place_with_torchrec(problem, torchrec)
        line["torchrec"] = result_fields(candidate) | {"seconds": round(perf_counter() - start, 1)}
    return line


def place_with_torchrec(problem: Problem, python: str) -> Candidate:
    """Evaluate the shards and ranks that TorchRec's planner chooses, as ours are evaluated."""
    request = {
        "ranks": problem.cluster.num_ranks,
        "local": problem.cluster.levels[0].num,
        "batch": round(problem.local_batch_size),
        "seconds": PEER_SECONDS,
        "hbm_bytes": problem.cluster.device.tiers[0].bytes_,
        "hbm_rate": problem.cluster.device.tiers[0].read_bytes_per_second,
        "local_rate": problem.cluster.levels[0].bytes_per_second,
        "host_rate": problem.cluster.levels[1].bytes_per_second,
        "tables": [[t.table.name, t.table.rows, t.table.dim, t.ids_per_sample] for t in problem.table_loads],
    }
    script = Path(__file__).with_name("placement_torchrec.py")
    command = [python, str(script)]
    process = subprocess.run(command, input=json.dumps(request), capture_output=True, text=True, check=False)
    if process.returncode:
        sys.exit(f"torchrec's planner failed: {process.stderr[-2000:]}")
    units: list = []
    ranks: list[tuple[int, ...]] = []
    replicas: list[int] = []
    by_name = {load.table.name: i for i, load in enumerate(problem.table_loads)}
    for name, kind, table_ranks in json.loads(process.stdout.splitlines()[-1]):
        table = by_name[name]
        if kind == "data_parallel":
            replicas.append(table)
            continue
        sharding = {
            "table_wise": Sharding("table"),
            "column_wise": Sharding("column", len(table_ranks)),
            "row_wise": Sharding("row", row_levels=2),
            "table_row_wise": Sharding("table-row", row_levels=1),
            "table_column_wise": Sharding("table-column", len(table_ranks), within_levels=1),
            "grid_shard": Sharding("column-row", len(table_ranks) // problem.cluster.levels[0].num, row_levels=1),
        }[kind]
        shards = search.table_units(problem, table, sharding)
        ranks_per_shard = len(table_ranks) // len(shards)
        units += shards
        ranks += [tuple(table_ranks[i * ranks_per_shard : (i + 1) * ranks_per_shard]) for i in range(len(shards))]
    return require_fit(search.evaluate(problem, Proposal(), PlacedTables(tuple(units), tuple(ranks), tuple(replicas))))


def compare_small_set(rng: np.random.Generator) -> dict[str, Any]:
    """Compare with the best of all placements: the largest load of each placement over the optimum."""
    preset = presets.load_cluster("zionex-128-a100")
    cluster = replace(preset, levels=(replace(preset.levels[0], num=SMALL_RANKS),))
    work = draw_workload(rng, SMALL_TABLES, LOCAL_BATCH_SIZE * SMALL_RANKS, most_rows=1e6)
    problem = search.define_problem(work, cluster, work.batch_size, Precision())
    _, items = unsharded_items(problem)
    assignments = np.array(list(product(range(SMALL_RANKS), repeat=SMALL_TABLES)))
    loads_XBK = np.stack(
        [np.where((assignments == rank)[:, :, None], items.loads_NK, 0.0).sum(1) for rank in range(SMALL_RANKS)], 1
    )
    best = float((loads_XBK.max(1) @ items.weights_K).min())
    bins_by_placer = {name: place(items) for name, place in PLACERS.items()}
    return {name: round(items.max_load(bins) / best, 4) for name, bins in bins_by_placer.items() if bins is not None}


def summarize(lines: list[dict[str, Any]], small_sets: list[dict[str, Any]]) -> dict[str, Any]:
    names = [name for name in (*PLACERS, "planner", "torchrec") if any(line.get(name) for line in lines)]
    result: dict[str, Any] = {"benchmark": "placement", "sets": len(lines), "simulated": True}
    for name in names:
        compared = [line for line in lines if line.get(name) and line["largest_differencing"]]
        ratios = [line[name]["step_ms"] / line["planner"]["step_ms"] for line in compared]
        result[name] = {
            "sets": len(compared),
            "median_imbalance": median(line[name]["imbalance"] for line in compared),
            "step_over_planner": [round(ratio, 3) for ratio in (median(ratios), min(ratios), max(ratios))],
            "worse_than_differencing": sum(
                bool(line[name]["step_ms"] > line["largest_differencing"]["step_ms"] * (1 + 1e-9)) for line in compared
            ),
        }
    result["small_sets"] = len(small_sets)
    result["over_optimum"] = {
        name: [median(line[name] for line in small_sets), max(line[name] for line in small_sets)] for name in PLACERS
    }
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", type=int, default=50)
    parser.add_argument("--write", default="", help="name of a file in benchmarks/results")
    parser.add_argument("--peer", default="", help="the Python of an environment with torchrec")
    parser.add_argument("--peer-sets", type=int, default=12)
    parser.add_argument("--smoke", action="store_true", help="the smallest case, to see that it runs")
    args = parser.parse_args()
    if args.smoke:
        args.sets = 2
    rng = np.random.default_rng(SEED)
    lines = []
    for number in range(args.sets):
        peer = args.peer if number < args.peer_sets else ""
        lines.append({"benchmark": "placement", "set": number} | compare_large_set(rng, peer))
        print(json.dumps(lines[-1]), flush=True)
    small_sets = [compare_small_set(rng) for _ in range(2 if args.smoke else SMALL_SETS)]
    lines.append(summarize(lines, small_sets))
    print(json.dumps(lines[-1]), flush=True)
    if args.write:
        results_file.write(args.write, "placement", lines)
    return 0


if __name__ == "__main__":
    sys.exit(main())

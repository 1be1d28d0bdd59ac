"""Who places tables best: round robin, greedy by size, greedy by cost, largest differencing, Shardwright's planner.

    python -m benchmarks.placement [--sets N] [--write NAME] [--peer PYTHON] [--peer-sets N]

50 random sets of 40 to 400 tables with skewed sizes and bags, on 2 to 16 hosts of 8 GPUs of zionex-128-a100. Each way
is scored by playing the step (simulated). The first four place whole tables; "whole" is the planner's balancing of the
same pieces, so that what cutting adds is seen apart. On sets of 8 tables and 3 ranks every placement is tried. With
--peer, the Python of an environment that has it, TorchRec's planner cuts and places the tables of the first sets, with
20 s for each of its four proposers (two minutes are not enough for one set). A JSON line per set.
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
OWN_BATCH = 512
WEIGHTS = np.array([1.0, 0.3])
PEER_SECONDS = 20  # for each of TorchRec's four ways to propose
SMALL_SETS, SMALL_TABLES, SMALL_RANKS = 50, 8, 3
Way = Callable[[Items], np.ndarray | None]


def drawn(draw: np.random.Generator) -> tuple[Workload, Cluster]:
    whole = presets.load_cluster("zionex-128-a100")
    hosts = int(draw.choice([2, 4, 8, 16]))
    cluster = replace(whole, levels=(whole.levels[0], replace(whole.levels[1], num=hosts)))
    num = int(draw.integers(40, 401))
    return workload(draw, num, OWN_BATCH * cluster.num_ranks, most_rows=4e7), cluster


def workload(draw: np.random.Generator, num: int, batch_size: int, most_rows: float) -> Workload:
    """Rows and bags log-normal, columns as models have them."""
    names = [f"table-{at:03}" for at in range(num)]
    rows = np.clip(10 ** draw.normal(5.0, 1.2, num), 10, most_rows).astype(int)
    dims = draw.choice([16, 32, 64, 128, 192, 256], num, p=[0.1, 0.2, 0.3, 0.2, 0.1, 0.1])
    ids = np.clip(draw.lognormal(1.5, 1.2, num), 0.2, 200)
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


def round_robin(things: Items) -> np.ndarray:
    return np.arange(len(things.bytes_N)) % things.num_bins


def greedy_by_size(things: Items) -> np.ndarray | None:
    """The largest in bytes first, each to the bin with fewest bytes."""
    sized = replace(
        things, loads_NK=things.bytes_N[:, None], weights_K=np.ones(1), initial_loads_BK=np.zeros((things.num_bins, 1))
    )
    return balance.greedy(sized)


WAYS: dict[str, Way] = {
    "round_robin": round_robin,
    "greedy_by_size": greedy_by_size,
    "greedy_by_cost": balance.greedy,
    "largest_differencing": balance.differencing,
    "whole": balance.assign_bins,
}


def whole_tables(problem: Problem, weights: np.ndarray = WEIGHTS) -> tuple[list, Items]:
    units = [search.unsharded_unit(problem, at) for at in range(len(problem.table_loads))]
    loads_NK = np.array([[unit.read_bytes, unit.sent_bytes] for unit in units])
    num = problem.cluster.num_ranks
    loads_NK /= loads_NK.sum(0) / num
    free = np.full(num, sum(budget.memory_budget(problem).free_bytes))
    return units, Items(loads_NK, np.array([unit.bytes_ for unit in units]), weights, np.zeros((num, 2)), free)


def scored(problem: Problem, units: list, bins: np.ndarray) -> Candidate:
    placed = PlacedTables(tuple(units), tuple((int(at),) for at in bins))
    return fitting(search.evaluate(problem, Proposal(), placed))


def fitting(found: Candidate | None) -> Candidate:
    if found is None:
        sys.exit("a placement does not fit the memory it was made for")
    return found


def told(found: Candidate) -> dict[str, float]:
    work = found.loads.lookup_R + found.loads.update_R
    return {"imbalance": round(imbalance(work), 4), "step_ms": round(1e3 * found.seconds, 4)}


def large(draw: np.random.Generator, torchrec: str) -> dict[str, Any]:
    work, cluster = drawn(draw)
    problem = search.define_problem(work, cluster, work.batch_size, Precision())
    units, things = whole_tables(problem)
    line: dict[str, Any] = {"tables": len(units), "ranks": cluster.num_ranks}
    for name, way in WAYS.items():
        bins = way(things)
        line[name] = told(scored(problem, units, bins)) if bins is not None else None
    start = perf_counter()
    made = planning.make_plan(work, cluster)
    line["planner"] = told(made.candidate) | {"seconds": round(perf_counter() - start, 2)}
    if torchrec:
        start = perf_counter()
        line["torchrec"] = told(by_torchrec(problem, torchrec)) | {"seconds": round(perf_counter() - start, 1)}
    return line


def by_torchrec(problem: Problem, python: str) -> Candidate:
    """TorchRec's own choice of how to cut and where to place, scored as ours is."""
    asked = {
        "ranks": problem.cluster.num_ranks,
        "local": problem.cluster.levels[0].num,
        "batch": round(problem.local_batch_size),
        "seconds": PEER_SECONDS,
        "hbm_bytes": problem.cluster.device.tiers[0].bytes_,
        "hbm_rate": problem.cluster.device.tiers[0].read_bytes_per_second,
        "local_rate": problem.cluster.levels[0].bytes_per_second,
        "host_rate": problem.cluster.levels[1].bytes_per_second,
        "tables": [[one.table.name, one.table.rows, one.table.dim, one.ids_per_sample] for one in problem.table_loads],
    }
    script = Path(__file__).with_name("placement_torchrec.py")
    done = subprocess.run([python, str(script)], input=json.dumps(asked), capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"torchrec's planner failed: {done.stderr[-2000:]}")
    units: list = []
    ranks: list[tuple[int, ...]] = []
    replicas: list[int] = []
    by_name = {one.table.name: at for at, one in enumerate(problem.table_loads)}
    for name, kind, its in json.loads(done.stdout.splitlines()[-1]):
        number = by_name[name]
        if kind == "data_parallel":
            replicas.append(number)
            continue
        cut = {
            "table_wise": Sharding("table"),
            "column_wise": Sharding("column", len(its)),
            "row_wise": Sharding("row", row_levels=2),
            "table_row_wise": Sharding("table-row", row_levels=1),
            "table_column_wise": Sharding("table-column", len(its), within_levels=1),
            "grid_shard": Sharding("column-row", len(its) // problem.cluster.levels[0].num, row_levels=1),
        }[kind]
        pieces = search.table_units(problem, number, cut)
        spread = len(its) // len(pieces)
        units += pieces
        ranks += [tuple(its[at * spread : (at + 1) * spread]) for at in range(len(pieces))]
    return fitting(search.evaluate(problem, Proposal(), PlacedTables(tuple(units), tuple(ranks), tuple(replicas))))


def small(draw: np.random.Generator) -> dict[str, Any]:
    """Against every placement there is."""
    whole = presets.load_cluster("zionex-128-a100")
    cluster = replace(whole, levels=(replace(whole.levels[0], num=SMALL_RANKS),))
    work = workload(draw, SMALL_TABLES, OWN_BATCH * SMALL_RANKS, most_rows=1e6)
    problem = search.define_problem(work, cluster, work.batch_size, Precision())
    _, things = whole_tables(problem)
    every = np.array(list(product(range(SMALL_RANKS), repeat=SMALL_TABLES)))
    loads_XBK = np.stack(
        [np.where((every == at)[:, :, None], things.loads_NK, 0.0).sum(1) for at in range(SMALL_RANKS)], 1
    )
    best = float((loads_XBK.max(1) @ things.weights_K).min())
    found = {name: way(things) for name, way in WAYS.items()}
    return {name: round(things.max_load(bins) / best, 4) for name, bins in found.items() if bins is not None}


def summary(lines: list[dict[str, Any]], exact: list[dict[str, Any]]) -> dict[str, Any]:
    names = [name for name in (*WAYS, "planner", "torchrec") if any(line.get(name) for line in lines)]
    found: dict[str, Any] = {"benchmark": "placement", "sets": len(lines), "simulated": True}
    for name in names:
        both = [line for line in lines if line.get(name) and line["largest_differencing"]]
        ratio = [line[name]["step_ms"] / line["planner"]["step_ms"] for line in both]
        found[name] = {
            "sets": len(both),
            "median_imbalance": median(line[name]["imbalance"] for line in both),
            "step_over_planner": [round(one, 3) for one in (median(ratio), min(ratio), max(ratio))],
            "worse_than_differencing": sum(
                bool(line[name]["step_ms"] > line["largest_differencing"]["step_ms"] * (1 + 1e-9)) for line in both
            ),
        }
    found["small_sets"] = len(exact)
    found["over_optimum"] = {
        name: [median(one[name] for one in exact), max(one[name] for one in exact)] for name in WAYS
    }
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", type=int, default=50)
    parser.add_argument("--write", default="", help="name of a file in benchmarks/results")
    parser.add_argument("--peer", default="", help="the Python of an environment with torchrec")
    parser.add_argument("--peer-sets", type=int, default=12)
    parser.add_argument("--smoke", action="store_true", help="the smallest case, to see that it runs")
    asked = parser.parse_args()
    if asked.smoke:
        asked.sets = 2
    draw = np.random.default_rng(SEED)
    lines = []
    for number in range(asked.sets):
        lines.append(
            {"benchmark": "placement", "set": number} | large(draw, asked.peer if number < asked.peer_sets else "")
        )
        print(json.dumps(lines[-1]), flush=True)
    exact = [small(draw) for _ in range(2 if asked.smoke else SMALL_SETS)]
    lines.append(summary(lines, exact))
    print(json.dumps(lines[-1]), flush=True)
    if asked.write:
        results_file.write(asked.write, "placement", lines)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Neo's models A, F and I on its 128 A100s, simulated: what each of the paper's steps gives, beside what it says.

    python -m benchmarks.neo [--write NAME]

Everything here is simulated on the preset zionex-128-a100. The paper gives the number of tables, the range and mean of
their columns, mean bag, parameters, FLOPs of a sample and the shape of the MLP; single tables are drawn so that their
sums agree (ASSUMED below says what else is assumed). One number is fitted, to one point, model A's first: what part of
published link and memory rates is reached. Everything after follows. A JSON line per figure.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from shardwright.errors import UserError
from shardwright.planner import answer as planning
from shardwright.planner import balance, memory, roofline, search
from shardwright.planner.answer import Answer
from shardwright.planner.balance import imbalance
from shardwright.planner.search import Found, Proposal
from shardwright.planner.steps import Placed, Precision
from shardwright.spec import presets
from shardwright.spec.cluster import Cluster
from shardwright.spec.optimizer import AdaGrad, RowWiseAdaGrad, SparseOptimizer
from shardwright.spec.workload import Block, Feature, FeatureStatistics, Table, Workload

OWN_BATCH = 512
LARGEST = 5e9  # parameters of a table of A and I
BATCH = 65_536
TF32_FLOPS = 156e12 * 0.9  # A100's data sheet; 90 % as in the preset
FIRST_SAMPLES = 0.7e6  # of model A, the one point that is fitted
MODELS: dict[str, "Shape"] = {}


@dataclass(frozen=True, slots=True)
class Shape:
    """What the paper says of a model."""

    tables: int
    parameters: float
    dims: tuple[int, int, float]  # least, most, mean
    ids: float  # mean of a bag
    mega_flops: float  # of a sample
    layers: int
    width: int


MODELS |= {
    "A": Shape(1000, 793e9, (4, 384, 93), 15, 638, 20, 3375),
    "I": Shape(300, 332e9, (4, 384, 92), 70, 60, 43, 682),
    "F": Shape(10, 12e12, (256, 256, 256), 20, 5, 7, 490),
}
ASSUMED = (
    "tables: A 1,000 (about 1,000s), I 300 (100s), F 10 (10s); rows and bags log-normal, so that sums agree; no table "
    "of A and I has more than 5 G parameters, since A was placed in whole tables at first",
    "FLOPs of a sample are those forward; backward takes twice as many; a fifth of them lie below the vectors",
    "products in TF32 at 90 % of 156 TFLOP/s; activations: layers x width x 4 bytes x 2 of a sample",
    "ids: popularity as Zipf with exponent 1; half of a batch's ids are repeated",
    "samples of A's figures: 64K of all ranks; weak scaling and F: 512 of each rank",
    "a tenth of each memory tier is left to the framework and the network library",
    "the text has F's tables at about 100 G rows x 256 columns each: ten such would hold 256 T parameters, not 12 T; "
    "rows are taken from the 12 T",
    "the text has +87 % over its first point (0.7 M, below it) and 1.5 M at the end, which is +114 %",
)


def workload(shape: Shape, batch_size: int, optimizer: SparseOptimizer, part: float = 1.0) -> Workload:
    """`part`: of its rows, for fewer hosts."""
    draw = np.random.default_rng(2)
    least, most, mean = shape.dims
    dims = np.full(shape.tables, least)
    if most > least:
        dims = np.clip(draw.lognormal(np.log(mean) - 0.32, 0.8, shape.tables), least, most)
        dims = np.clip(np.round(dims * mean / dims.mean() / 4) * 4, least, most).astype(int)
    rows = draw.lognormal(0, 1.2 if shape.tables > 10 else 0.0, shape.tables)
    for _ in range(20):
        rows *= shape.parameters * part / (rows * dims).sum()
        rows = np.minimum(rows, LARGEST / dims) if shape.tables > 10 else rows
    rows = np.maximum(1, rows).astype(int)
    ids = draw.lognormal(0, 0.8 if shape.tables > 10 else 0.0, shape.tables)
    ids *= shape.ids / ids.mean()
    names = [f"table-{at:04}" for at in range(shape.tables)]
    flops, kept = shape.mega_flops * 1e6 * batch_size, shape.layers * shape.width * 8 * batch_size
    weights = shape.layers * shape.width**2
    return Workload(
        version=1,
        batch_size=batch_size,
        tables=tuple(Table(name, int(r), int(d)) for name, r, d in zip(names, rows, dims, strict=True)),
        features=tuple(Feature(name, name) for name in names),
        statistics=tuple(
            FeatureStatistics(name, float(n), 0.5, zipf(int(r))) for name, n, r in zip(names, ids, rows, strict=True)
        ),
        optimizer=optimizer,
        blocks=tuple(
            Block(
                name,
                int(weights * share),
                int(4 * weights * share),
                int(flops * share),
                int(2 * flops * share),
                int(kept * share),
                needs_vectors=late,
            )
            for name, share, late in (("bottom", 0.2, False), ("top", 0.8, True))
        ),
    )


def zipf(rows: int) -> tuple[tuple[int, float], ...]:
    whole = np.log(rows) + 0.5772
    points = [4**at for at in range(20) if 4**at < rows]
    return tuple((k, float((np.log(k) + 0.5772) / whole) if k > 1 else 1 / whole) for k in points)


def machine(reached: float, hosts: int = 16) -> Cluster:
    """The preset, with a part of its link and row rates, and products in TF32."""
    whole = presets.cluster("zionex-128-a100")
    prices = []
    for one in whole.device.prices:
        if one.op == "matmul" and one.dtype == "float32":
            one = replace(one, seconds_per_flop=1 / TF32_FLOPS)
        elif one.op in ("lookup", "update", "gather"):
            one = replace(one, seconds_per_byte=one.seconds_per_byte / reached)
        prices.append(one)
    levels = [replace(level, bytes_per_second=level.bytes_per_second * reached) for level in whole.levels]
    levels[1] = replace(levels[1], num=hosts)
    device = replace(whole.device, prices=tuple(prices))
    return replace(whole, device=device, levels=tuple(levels if hosts > 1 else levels[:1]))


def first(cluster: Cluster, work: Workload) -> Found:
    """Whole tables by size: the largest in bytes first, each to the rank with fewest."""
    problem = search.pose(work, cluster, work.batch_size, Precision())
    units = [search.unit_whole(problem, at) for at in range(len(problem.demands))]
    bytes_N = np.array([unit.bytes_ for unit in units])
    num = cluster.num_ranks
    free = np.full(num, memory.budget(problem).free[0])
    bins = balance.greedy(balance.Things(bytes_N[:, None], bytes_N, np.ones(1), np.zeros((num, 1)), free))
    if bins is None:
        raise UserError("model A's tables do not fit by size")
    found = search.scored(problem, Proposal(), Placed(tuple(units), tuple((int(at),) for at in bins)))
    if found is None:
        raise UserError("model A's tables do not fit by size")
    return found


def fitted(work: Workload) -> float:
    """The part of published rates at which the first point is what the paper says."""
    low, high = 0.02, 1.0
    for _ in range(20):
        middle = (low * high) ** 0.5
        slow = work.batch_size / first(machine(middle), work).seconds < FIRST_SAMPLES
        low, high = (middle, high) if slow else (low, middle)
    reached = (low * high) ** 0.5
    rate = work.batch_size / first(machine(reached), work).seconds
    if abs(rate / FIRST_SAMPLES - 1) > 0.01:
        sys.exit(
            f"model A: with {reached:.2f} of the published rates {rate:,.0f} samples/s, not the first point's 700,000"
        )
    return reached


def told(name: str, found: Found, paper: str, **more: Any) -> dict[str, Any]:
    problem = found.problem
    bound = roofline.bound(problem.cluster, planning.load(found))
    rate = problem.batch_size / found.seconds
    most = problem.batch_size / bound.overlapped_seconds
    return {
        "benchmark": "neo",
        "simulated": True,
        "what": name,
        "samples_per_second": round(rate),
        "paper": paper,
        "bound_samples_per_second": round(most),
        "bounded_by": bound.slowest,
        "of_bound": round(rate / most, 3),
        "imbalance": round(imbalance(found.loads.lookup_R + found.loads.update_R), 3),
        **more,
    }


def model_a(reached: float) -> list[dict[str, Any]]:
    cluster = machine(reached)
    work = workload(MODELS["A"], BATCH, RowWiseAdaGrad(lr=0.01))
    large = workload(MODELS["A"], 4 * BATCH, RowWiseAdaGrad(lr=0.01))
    half, wire = ["tables.fp16"], ["tables.fp16", "wire.fp16", "wire.bf16"]
    steps: Sequence[tuple[str, str, Found]] = (
        ("A: whole tables by size, 64K", "0.7 M, fitted", first(cluster, work)),
        ("A: 4-D", "+20 %", planning.answer(work, cluster).found),
        ("A: FP16 tables, rebalanced", "+20 %", planning.answer(work, cluster, allow=half).found),
        ("A: quantized collectives", "+30 %", planning.answer(work, cluster, allow=wire).found),
        ("A: 256K", "1.5 M", planning.answer(large, cluster, allow=wire).found),
    )
    lines, before = [], None
    for name, paper, found in steps:
        rate = found.problem.batch_size / found.seconds
        more = {} if before is None else {"gain": round(rate / before - 1, 3)}
        lines.append(told(name, found, paper, **more))
        before = rate
    return lines


def scaling(reached: float) -> list[dict[str, Any]]:
    """512 samples of each rank; fewer hosts have as many tables of fewer rows."""
    lines = []
    for name, paper in (("A", "about 50 %"), ("I", "about 75 %")):
        one = 0.0
        for hosts in (1, 2, 4, 8, 16):
            cluster = machine(reached, hosts)
            work = workload(MODELS[name], OWN_BATCH * cluster.num_ranks, RowWiseAdaGrad(lr=0.01), part=hosts / 16)
            found = planning.answer(work, cluster).found
            rate = work.batch_size / found.seconds / hosts
            one = one or rate
            lines.append(
                told(f"{name}: {hosts} hosts", found, paper if hosts == 16 else "", efficiency=round(rate / one, 3))
            )
    return lines


def model_f(reached: float) -> list[dict[str, Any]]:
    cluster = machine(reached)
    refused = ""
    try:
        planning.answer(workload(MODELS["F"], BATCH, AdaGrad(lr=0.01)), cluster)
    except UserError as error:
        refused = str(error)
    work = workload(MODELS["F"], BATCH, RowWiseAdaGrad(lr=0.01))
    made: Answer = planning.answer(work, cluster, allow=["tables.fp16", "wire.fp16", "wire.bf16"])
    kept = float(np.mean(made.found.near))
    table = made.plan.tables[0]
    shape = {"scheme": planning.cut_of(made.found, 0).name, "tiers": [list(share) for share in table.placement.tiers]}
    line = told(
        "F: FP16, row-wise AdaGrad", made.found, "1.7 M", ids_in_hbm=round(kept, 3), refused_in_fp32=refused, **shape
    )
    return [line]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", default="", help="name of a file in benchmarks/results")
    asked = parser.parse_args()
    reached = fitted(workload(MODELS["A"], BATCH, RowWiseAdaGrad(lr=0.01)))
    lines: list[dict[str, Any]] = [
        {"benchmark": "neo", "simulated": True, "assumed": ASSUMED, "reached": round(reached, 4)}
    ]
    print(json.dumps(lines[0]), flush=True)
    for part in (model_a, model_f, scaling):
        for line in part(reached):
            lines.append(line)
            print(json.dumps(line), flush=True)
    if asked.write:
        path = Path(__file__).parent / "results" / f"{asked.write}.json"
        path.write_text("\n".join(json.dumps(line) for line in lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

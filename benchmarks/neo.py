"""Neo's models A, F and I on its 128 A100s, simulated: what each of the paper's steps gives, beside what it says.

    python -m benchmarks.neo [--write NAME]

Everything here is simulated on the preset zionex-128-a100. The paper gives the number of tables, the range and mean of
their columns, mean bag, parameters, FLOPs of a sample and the shape of the MLP; single tables are drawn so that their
sums agree (ASSUMED below says what else is assumed). One number is fitted, to one point, model A's first: what part of
all published rates, of links, memory and products, is reached. Everything after follows. Steps are as the paper says
("greedy": table-, column-wise and replicas, its cost function, its first heuristic, the next batch's ids beside the top
MLP), and as our planner has them. A JSON line per figure.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from benchmarks import results_file
from shardwright.errors import UserError
from shardwright.planner import plan as planning
from shardwright.planner import search
from shardwright.planner.memory import budget
from shardwright.planner.price import roofline
from shardwright.planner.problem import PlacedTables, Precision, Problem
from shardwright.planner.search import Candidate, Proposal
from shardwright.planner.step import tasks
from shardwright.planner.tables import balance
from shardwright.planner.tables.balance import Items, imbalance
from shardwright.planner.tables.schemes import enumerate_shardings
from shardwright.planner.tables.sharding import ShardUnit
from shardwright.spec import presets
from shardwright.spec.cluster import Cluster, Price
from shardwright.spec.optimizer import AdaGrad, RowWiseAdaGrad, SparseOptimizer
from shardwright.spec.workload import Block, Feature, FeatureStatistics, Table, Workload

OWN_BATCH = 512
LARGEST = 5e9  # parameters of a table of A and I
BATCH = 65_536
TF32_FLOPS = 156e12  # A100's data sheet
FIRST_SAMPLES = 0.7e6  # of model A, the one point that is fitted
FULL = 0.98  # of what is left of HBM, A's tables in FP32
HALF, WIRE = ("tables.fp16",), ("wire.fp16", "wire.bf16")
PARTS = (1.0, 0.5)  # of an even share, the most of a piece
MIXTURES = ((1.0, 1.0), (1.0, 0.0), (0.0, 1.0), (0.3, 1.0), (1.0, 0.3))  # of lookups, and of communication
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
    "tables: A 1,000 (about 1,000s), I 300 (100s), F 10, 20 and 40 (10s); rows and bags of A and I log-normal (sigma "
    "1.2 and 0.8), so that sums agree; none of theirs has more than 5 G parameters, since A was placed in whole tables "
    "at first",
    "FLOPs of a sample are those forward; backward takes twice as many; a fifth of them lie below the vectors; kernel "
    "launches take no time",
    "products in TF32; activations: layers x width x 4 bytes x 2 of a sample",
    "ids are of 8 bytes; popularity as Zipf with exponent 1; half of a batch's ids are repeated",
    "A's steps: 64K samples of all ranks; weak scaling and F: 512 of each rank",
    "A's tables in FP32 take 98 % of the HBM that is left for tables: the text has almost no room left and no number",
    "weak scaling: quantized collectives, and A's tables in FP16, since the text gives A 1.2 M in the same section, "
    "which its steps reach with these",
    "F: vectors in FP32, since the text has its tables alone in FP16",
    "the text has F's tables at about 100 G rows x 256 columns each: ten such would hold 256 T parameters, not 12 T; "
    "rows are taken from the 12 T",
    "the text has +87 % over its first point (0.7 M, below it) and 1.5 M at the end, which is +114 %; and 70 % of "
    "linear scaling after the first step beside about 50 % in the section on scaling",
)


def workload(
    shape: Shape, batch_size: int, optimizer: SparseOptimizer, part: float = 1.0, sigma: float = 0.8
) -> Workload:
    """`part`: of its rows, for fewer hosts; `sigma`: how unlike its bags are."""
    draw = np.random.default_rng(2)
    least, most, mean = shape.dims
    dims = np.full(shape.tables, least)
    if most > least:
        dims = np.clip(draw.lognormal(np.log(mean) - 0.32, 0.8, shape.tables), least, most)
        dims = np.clip(np.round(dims * mean / dims.mean() / 4) * 4, least, most).astype(int)
    rows = draw.lognormal(0, 1.2 if shape.dims[0] < shape.dims[1] else 0.0, shape.tables)
    for _ in range(20):
        rows *= shape.parameters * part / (rows * dims).sum()
        rows = np.minimum(rows, LARGEST / dims) if shape.dims[0] < shape.dims[1] else rows
    rows = np.maximum(1, rows).astype(int)
    ids = draw.lognormal(0, sigma if shape.dims[0] < shape.dims[1] else 0.0, shape.tables)
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
    """The preset with products in TF32, and a part of all its rates."""
    whole = presets.load_cluster("zionex-128-a100")
    prices: list[Price] = []
    for one in whole.device.prices:
        flop = 1 / TF32_FLOPS if (one.op, one.dtype) == ("matmul", "float32") else one.seconds_per_flop
        prices.append(replace(one, seconds_per_flop=flop / reached, seconds_per_byte=one.seconds_per_byte / reached))
    tiers = [
        replace(
            tier,
            read_bytes_per_second=tier.read_bytes_per_second * reached,
            write_bytes_per_second=tier.write_bytes_per_second * reached,
        )
        for tier in whole.device.tiers
    ]
    levels = [replace(level, bytes_per_second=level.bytes_per_second * reached) for level in whole.levels]
    levels[1] = replace(levels[1], num=hosts)
    device = replace(whole.device, prices=tuple(prices), tiers=tuple(tiers))
    return replace(whole, device=device, levels=tuple(levels if hosts > 1 else levels[:1]))


def nearly_full(cluster: Cluster, work: Workload) -> Cluster:
    """With so much HBM that the tables, in FP32, take `FULL` of what is left for them."""
    posed = search.define_problem(work, cluster, work.batch_size, Precision())
    whole = [search.unsharded_unit(posed, at) for at in range(len(posed.table_loads))]
    needed = sum(unit.bytes_ + unit.buffer_bytes for unit in whole) / cluster.num_ranks / FULL
    beside = sum(bytes_ for _, bytes_ in budget.memory_budget(posed).memory_parts)
    hbm, *others = cluster.device.tiers
    hbm = replace(hbm, bytes_=round((needed + beside) / (1 - budget.RESERVED_SHARE)))
    return replace(cluster, device=replace(cluster.device, tiers=(hbm, *others)))


def first(cluster: Cluster, work: Workload) -> Candidate:
    """Whole tables by size: the largest in bytes first, each to the rank with fewest."""
    problem = search.define_problem(work, cluster, work.batch_size, Precision())
    units = [search.unsharded_unit(problem, at) for at in range(len(problem.table_loads))]
    bytes_N = np.array([unit.bytes_ for unit in units])
    return as_published(by_greedy(problem, units, bytes_N[:, None], (1.0,)))


def greedy(cluster: Cluster, work: Workload, precision: Precision) -> Candidate:
    """As the paper places: each table whole, in equal pieces of columns, or on every rank; what costs most first, each
    to the rank where least has come; the best of a few weights of lookups and communication, which the paper tunes."""
    problem = search.define_problem(work, cluster, work.batch_size, precision)
    free = budget.memory_budget(problem).free_bytes[0]
    whole = [search.unsharded_unit(problem, at) for at in range(len(problem.table_loads))]
    even = np.array([[unit.read_bytes, unit.sent_bytes] for unit in whole]).sum(0) / cluster.num_ranks
    found: list[Candidate] = []
    for part in PARTS:
        units: list[ShardUnit] = []
        replicas: list[int] = []
        for at, demand in enumerate(problem.table_loads):
            if search.is_cheaper_data_parallel(problem, demand, free):
                replicas.append(at)
                continue
            pieces: list[ShardUnit] = []
            for cut in (one for one in enumerate_shardings(demand, cluster) if one.scheme in ("table", "column")):
                pieces = search.table_units(problem, at, cut)
                if pieces[0].read_bytes <= part * even[0] and pieces[0].bytes_ <= part * free:
                    break
            units += pieces
        loads_NK = np.array([[unit.read_bytes, unit.sent_bytes] for unit in units]) / even
        found += [one for one in (by_greedy(problem, units, loads_NK, mix, replicas) for mix in MIXTURES) if one]
    return as_published(min(found, key=lambda one: one.seconds, default=None))


def by_greedy(
    problem: Problem,
    units: list[ShardUnit],
    loads_NK: np.ndarray,
    weights: tuple[float, ...],
    replicas: Sequence[int] = (),
) -> Candidate | None:
    num = problem.cluster.num_ranks
    free = np.full(num, budget.memory_budget(problem).free_bytes[0])
    taken = np.array([unit.bytes_ + unit.buffer_bytes for unit in units])
    bins = balance.greedy(Items(loads_NK, taken, np.array(weights), np.zeros((num, len(weights))), free))
    if bins is None:
        return None
    return search.evaluate(
        problem, Proposal(), PlacedTables(tuple(units), tuple((int(at),) for at in bins), tuple(replicas))
    )


def as_published(found: Candidate | None, behind: str = "vectors") -> Candidate:
    """With the next batch's ids behind this one's vectors."""
    if found is None:
        raise UserError("a placement does not fit")
    played = tasks.predict_timeline(found.problem, found.placed, found.loads, behind)
    return replace(found, seconds=tasks.counted_step_seconds(played), ids_after=behind)


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


def told(name: str, found: Candidate, paper: float, way: str, **more: Any) -> dict[str, Any]:
    problem = found.problem
    bound = roofline.step_bound(problem.cluster, planning.resource_usage(found))
    rate = problem.batch_size / found.seconds
    most = problem.batch_size / bound.overlapped_seconds
    beside = {"paper": round(paper), "over_paper": round(rate / paper, 3)} if paper else {}
    return {
        "benchmark": "neo",
        "simulated": True,
        "what": name,
        "placed": way,
        "samples_per_second": round(rate),
        **beside,
        "bound_samples_per_second": round(most),
        "bounded_by": bound.bottleneck,
        "of_bound": round(rate / most, 3),
        "imbalance": round(imbalance(found.loads.lookup_R + found.loads.update_R), 3),
        "imbalance_of_vectors": round(imbalance(found.loads.sent_bytes_R), 3),
        "ids_behind": found.ids_after,
        **more,
    }


def model_a(reached: float) -> Iterator[dict[str, Any]]:
    work = workload(MODELS["A"], BATCH, RowWiseAdaGrad(lr=0.01))
    large = workload(MODELS["A"], 4 * BATCH, RowWiseAdaGrad(lr=0.01))
    cluster = nearly_full(machine(reached), work)
    rounded = Precision("float16", "float16", "bfloat16", "bfloat16")
    yield told("A: whole tables by size, 64K", first(cluster, work), 0.7e6, "fitted")
    points = (
        ("A: 4-D", work, Precision(), (), 0.7e6 * 1.2),
        ("A: FP16 tables, rebalanced", work, Precision("float16"), HALF, 0.7e6 * 1.2**2),
        ("A: quantized collectives", work, rounded, HALF + WIRE, 0.7e6 * 1.2**2 * 1.3),
        ("A: 256K", large, rounded, HALF + WIRE, 1.5e6),
    )
    for name, asked, precision, allow, paper in points:
        found = greedy(cluster, asked, precision)
        yield told(name, found, paper, "greedy")
        yield told(name, as_published(found, "read"), paper, "greedy, ids first")
        yield told(name, planning.make_plan(asked, cluster, allow=allow).candidate, paper, "planner")


def scaling(reached: float) -> Iterator[dict[str, Any]]:
    """512 samples of each rank; fewer hosts have as many tables of fewer rows."""
    half = Precision("float16", "float16", "bfloat16", "bfloat16")
    for name, paper, precision in (("A", 0.5, half), ("I", 0.75, replace(half, tables=None))):
        allow = WIRE if precision.tables is None else HALF + WIRE
        alone: dict[str, float] = {}
        for hosts in (1, 2, 4, 8, 16):
            cluster = machine(reached, hosts)
            work = workload(MODELS[name], OWN_BATCH * cluster.num_ranks, RowWiseAdaGrad(lr=0.01), part=hosts / 16)
            ways = {
                "greedy": greedy(cluster, work, precision),
                "planner": planning.make_plan(work, cluster, allow=allow).candidate,
            }
            for way, found in ways.items():
                rate = work.batch_size / found.seconds / hosts
                part = round(rate / alone.setdefault(way, rate), 3)
                more = {"paper_efficiency": paper} if hosts == 16 else {}
                yield told(f"{name}: {hosts} hosts", found, 0.0, way, efficiency=part, **more)


def even_bags(reached: float) -> Iterator[dict[str, Any]]:
    """Model I, were all its bags equally long."""
    alone = 0.0
    for hosts in (1, 16):
        cluster = machine(reached, hosts)
        shape = MODELS["I"]
        work = workload(shape, OWN_BATCH * cluster.num_ranks, RowWiseAdaGrad(lr=0.01), part=hosts / 16, sigma=0.0)
        found = planning.make_plan(work, cluster, allow=WIRE).candidate
        rate = work.batch_size / found.seconds / hosts
        alone = alone or rate
        yield told(f"I, even bags: {hosts} hosts", found, 0.0, "planner", efficiency=round(rate / alone, 3))


def model_f(reached: float) -> Iterator[dict[str, Any]]:
    cluster = machine(reached)
    for tables in (10, 20, 40):
        shape = replace(MODELS["F"], tables=tables)
        try:
            planning.make_plan(workload(shape, BATCH, AdaGrad(lr=0.01)), cluster)
        except UserError as error:
            yield {"benchmark": "neo", "simulated": True, "what": f"F: FP32, AdaGrad, {tables}", "refused": str(error)}
        work = workload(shape, BATCH, RowWiseAdaGrad(lr=0.01))
        rows = {table.name: "row" for table in work.tables}
        for way, pins in (("rows over all ranks", rows), ("planner", {})):
            made = planning.make_plan(work, cluster, allow=HALF, pins=pins)
            placed = made.plan.tables[0].placement.tiers
            more: dict[str, Any] = {
                "scheme": made.candidate.sharding(0).scheme,
                "tiers": [list(share) for share in placed],
                "ids_in_hbm": round(float(np.mean(made.candidate.fast_id_shares)), 3),
                "table_terabytes": round(float(made.candidate.loads.bytes_R.sum()) / 1e12, 1),
            }
            yield told(f"F: FP16, row-wise AdaGrad, {tables} tables", made.candidate, 1.7e6, way, **more)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", default="", help="name of a file in benchmarks/results")
    parser.add_argument("--smoke", action="store_true", help="the smallest case, to see that it runs")
    asked = parser.parse_args()
    reached = fitted(workload(MODELS["A"], BATCH, RowWiseAdaGrad(lr=0.01)))
    lines: list[dict[str, Any]] = [
        {"benchmark": "neo", "simulated": True, "assumed": ASSUMED, "reached": round(reached, 4)}
    ]
    print(json.dumps(lines[0]), flush=True)
    for part in (even_bags,) if asked.smoke else (model_a, model_f, scaling, even_bags):
        for line in part(reached):
            lines.append(line)
            print(json.dumps(line), flush=True)
    if asked.write:
        results_file.write(asked.write, "neo", lines)
    return 0


if __name__ == "__main__":
    sys.exit(main())

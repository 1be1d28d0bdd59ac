"""Neo's models A, F and I on its 128 A100s, simulated, compared with the paper's figures.

    python -m benchmarks.neo [--write NAME]

Everything here is simulated on the preset zionex-128-a100. The paper has the number of tables, the range and mean of
their columns, the mean bag length, parameters, FLOPs of a sample and the shape of the MLP; individual tables are drawn
so that their sums agree (ASSUMPTIONS lists what else is assumed). One number is fitted, to one point, the first of
model A: the share of all published rates, of links, memory and products, that is reached. All other figures follow from
it. Each of the paper's steps is predicted with its own placement ("greedy": table-wise, column-wise and replicas, its
cost function, its first heuristic, the next batch's ids overlapped with the top MLP) and with our planner's. A JSON
line per figure.
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
from shardwright.planner.step import prediction
from shardwright.planner.tables import balance
from shardwright.planner.tables.balance import Items, imbalance
from shardwright.planner.tables.schemes import enumerate_shardings
from shardwright.planner.tables.sharding import ShardUnit
from shardwright.spec import presets
from shardwright.spec.cluster import Cluster, Price
from shardwright.spec.optimizer import AdaGrad, RowWiseAdaGrad, SparseOptimizer
from shardwright.spec.workload import Block, Feature, FeatureStatistics, Table, Workload

LOCAL_BATCH = 512
MAX_TABLE_PARAMETERS = 5e9  # of models A and I
BATCH_SIZE = 65_536
TF32_FLOPS = 156e12  # A100's data sheet
FITTED_SAMPLES_PER_SECOND = 0.7e6  # of model A's first point, to which the rates are fitted
FILLED_SHARE = 0.98  # of the HBM that is free for tables: taken by A's tables in FP32
FP16_TABLES, WIRE = ("tables.fp16",), ("wire.fp16", "wire.bf16")
MAX_SHARD_SHARES = (1.0, 0.5)  # largest load of a shard, as a share of the mean load of a rank
COST_WEIGHTS = ((1.0, 1.0), (1.0, 0.0), (0.0, 1.0), (0.3, 1.0), (1.0, 0.3))  # of lookups and of communication
MODELS: dict[str, "Shape"] = {}


@dataclass(frozen=True, slots=True)
class Shape:
    """A model as the paper describes it."""

    tables: int
    parameters: float
    dims: tuple[int, int, float]  # smallest, largest, mean
    ids: float  # mean bag length
    mega_flops: float  # of a sample
    layers: int
    width: int


MODELS |= {
    "A": Shape(1000, 793e9, (4, 384, 93), 15, 638, 20, 3375),
    "I": Shape(300, 332e9, (4, 384, 92), 70, 60, 43, 682),
    "F": Shape(10, 12e12, (256, 256, 256), 20, 5, 7, 490),
}
ASSUMPTIONS = (
    "tables: A 1,000 (about 1,000s), I 300 (100s), F 10, 20 and 40 (10s); rows and bag lengths of A and I are "
    "log-normal (sigma 1.2 and 0.8), scaled so that sums agree; none of their tables has more than 5 G parameters, "
    "since A was placed as unsharded tables at first",
    "FLOPs of a sample are of the forward pass; the backward pass takes twice as many; a fifth of them need no "
    "vectors; kernel launches take no time",
    "products in TF32; activations: layers x width x 4 bytes x 2 of a sample",
    "ids have 8 bytes; popularity follows Zipf's law with exponent 1; half of a batch's ids are repeated",
    "global batch size of A's steps: 64K; local batch size of weak scaling and F: 512",
    "A's tables in FP32 take 98 % of the HBM that is free for tables: the paper says that almost no room is left",
    "weak scaling: quantized collectives, and A's tables in FP16, since the paper gives A 1.2 M in the same section, "
    "which its steps reach with these",
    "F: vectors in FP32, since the paper has only F's tables in FP16",
    "the paper gives F's tables about 100 G rows x 256 columns each: ten such tables would have 256 T parameters, not "
    "12 T; rows are derived from the 12 T",
    "the paper gives +87 % over its first point (0.7 M, below it) and 1.5 M at the end, which is +114 %; and 70 % of "
    "linear scaling after the first step, but about 50 % in the section on scaling",
)


def make_workload(
    shape: Shape, batch_size: int, optimizer: SparseOptimizer, row_share: float = 1.0, sigma: float = 0.8
) -> Workload:
    """A random workload of `shape` with `row_share` of its rows; `sigma`: spread of its bag lengths."""
    rng = np.random.default_rng(2)
    min_dim, max_dim, mean_dim = shape.dims
    dims = np.full(shape.tables, min_dim)
    if max_dim > min_dim:
        dims = np.clip(rng.lognormal(np.log(mean_dim) - 0.32, 0.8, shape.tables), min_dim, max_dim)
        dims = np.clip(np.round(dims * mean_dim / dims.mean() / 4) * 4, min_dim, max_dim).astype(int)
    rows = rng.lognormal(0, 1.2 if shape.dims[0] < shape.dims[1] else 0.0, shape.tables)
    for _ in range(20):
        rows *= shape.parameters * row_share / (rows * dims).sum()
        rows = np.minimum(rows, MAX_TABLE_PARAMETERS / dims) if shape.dims[0] < shape.dims[1] else rows
    rows = np.maximum(1, rows).astype(int)
    ids = rng.lognormal(0, sigma if shape.dims[0] < shape.dims[1] else 0.0, shape.tables)
    ids *= shape.ids / ids.mean()
    names = [f"table-{i:04}" for i in range(shape.tables)]
    flops, activation_bytes = shape.mega_flops * 1e6 * batch_size, shape.layers * shape.width * 8 * batch_size
    weights = shape.layers * shape.width**2
    return Workload(
        version=1,
        batch_size=batch_size,
        tables=tuple(Table(name, int(r), int(d)) for name, r, d in zip(names, rows, dims, strict=True)),
        features=tuple(Feature(name, name) for name in names),
        statistics=tuple(
            FeatureStatistics(name, float(n), 0.5, zipf_curve(int(r)))
            for name, n, r in zip(names, ids, rows, strict=True)
        ),
        optimizer=optimizer,
        blocks=tuple(
            Block(
                name,
                int(weights * share),
                int(4 * weights * share),
                int(flops * share),
                int(2 * flops * share),
                int(activation_bytes * share),
                needs_vectors=needs_vectors,
            )
            for name, share, needs_vectors in (("bottom", 0.2, False), ("top", 0.8, True))
        ),
    )


def zipf_curve(rows: int) -> tuple[tuple[int, float], ...]:
    """(number of the most popular rows, share of the ids that read them), for Zipf's law with exponent 1."""
    total = np.log(rows) + 0.5772
    points = [4**i for i in range(20) if 4**i < rows]
    return tuple((k, float((np.log(k) + 0.5772) / total) if k > 1 else 1 / total) for k in points)


def scaled_cluster(share: float, hosts: int = 16) -> Cluster:
    """The preset with products in TF32 and `share` of all its rates."""
    preset = presets.load_cluster("zionex-128-a100")
    prices: list[Price] = []
    for price in preset.device.prices:
        flop = 1 / TF32_FLOPS if (price.op, price.dtype) == ("matmul", "float32") else price.seconds_per_flop
        prices.append(replace(price, seconds_per_flop=flop / share, seconds_per_byte=price.seconds_per_byte / share))
    tiers = [
        replace(
            tier,
            read_bytes_per_second=tier.read_bytes_per_second * share,
            write_bytes_per_second=tier.write_bytes_per_second * share,
        )
        for tier in preset.device.tiers
    ]
    levels = [replace(level, bytes_per_second=level.bytes_per_second * share) for level in preset.levels]
    levels[1] = replace(levels[1], num=hosts)
    device = replace(preset.device, prices=tuple(prices), tiers=tuple(tiers))
    return replace(preset, device=device, levels=tuple(levels if hosts > 1 else levels[:1]))


def fill_hbm(cluster: Cluster, workload: Workload) -> Cluster:
    """The cluster with so much HBM that tables in FP32 take `FILLED_SHARE` of what is free for tables."""
    problem = search.define_problem(workload, cluster, workload.batch_size, Precision())
    units = [search.unsharded_unit(problem, i) for i in range(len(problem.table_loads))]
    needed = sum(unit.bytes_ + unit.buffer_bytes for unit in units) / cluster.num_ranks / FILLED_SHARE
    other_bytes = sum(bytes_ for _, bytes_ in budget.memory_budget(problem).memory_parts)
    hbm, *other_tiers = cluster.device.tiers
    hbm = replace(hbm, bytes_=round((needed + other_bytes) / (1 - budget.RESERVED_SHARE)))
    return replace(cluster, device=replace(cluster.device, tiers=(hbm, *other_tiers)))


def place_by_size(cluster: Cluster, workload: Workload) -> Candidate:
    """Place unsharded tables by size, largest first, each on the rank with the fewest bytes."""
    problem = search.define_problem(workload, cluster, workload.batch_size, Precision())
    units = [search.unsharded_unit(problem, i) for i in range(len(problem.table_loads))]
    bytes_N = np.array([unit.bytes_ for unit in units])
    return predict_as_published(place_greedily(problem, units, bytes_N[:, None], (1.0,)))


def place_as_paper(cluster: Cluster, workload: Workload, precision: Precision) -> Candidate:
    """Place tables as the paper does: table-wise, column-wise in equal shards, or on every rank.

    The most expensive shard comes first; each goes to the rank with the lowest cost. The best of a few weights of
    lookups and communication is taken; the paper tunes these.
    """
    problem = search.define_problem(workload, cluster, workload.batch_size, precision)
    free = budget.memory_budget(problem).free_bytes[0]
    unsharded = [search.unsharded_unit(problem, i) for i in range(len(problem.table_loads))]
    even_loads = np.array([[unit.read_bytes, unit.sent_bytes] for unit in unsharded]).sum(0) / cluster.num_ranks
    candidates: list[Candidate] = []
    for max_share in MAX_SHARD_SHARES:
        units: list[ShardUnit] = []
        replicas: list[int] = []
        for i, load in enumerate(problem.table_loads):
            if search.is_cheaper_data_parallel(problem, load, free):
                replicas.append(i)
                continue
            shards: list[ShardUnit] = []
            for sharding in enumerate_shardings(load, cluster):
                if sharding.scheme not in ("table", "column"):
                    continue
                shards = search.table_units(problem, i, sharding)
                if shards[0].read_bytes <= max_share * even_loads[0] and shards[0].bytes_ <= max_share * free:
                    break
            units += shards
        loads_NK = np.array([[unit.read_bytes, unit.sent_bytes] for unit in units]) / even_loads
        placements = (place_greedily(problem, units, loads_NK, weights, replicas) for weights in COST_WEIGHTS)
        candidates += filter(None, placements)
    return predict_as_published(min(candidates, key=lambda candidate: candidate.seconds, default=None))


def place_greedily(
    problem: Problem,
    units: list[ShardUnit],
    loads_NK: np.ndarray,
    weights: tuple[float, ...],
    replicas: Sequence[int] = (),
) -> Candidate | None:
    num_ranks = problem.cluster.num_ranks
    free = np.full(num_ranks, budget.memory_budget(problem).free_bytes[0])
    bytes_N = np.array([unit.bytes_ + unit.buffer_bytes for unit in units])
    bins = balance.greedy(Items(loads_NK, bytes_N, np.array(weights), np.zeros((num_ranks, len(weights))), free))
    if bins is None:
        return None
    return search.evaluate(
        problem, Proposal(), PlacedTables(tuple(units), tuple((int(bin_),) for bin_ in bins), tuple(replicas))
    )


def predict_as_published(candidate: Candidate | None, ids_after: str = "vectors") -> Candidate:
    """Predict a placement with the next batch's ids sent after stage `ids_after` of this batch."""
    if candidate is None:
        raise UserError("a placement does not fit")
    timeline = prediction.predict_timeline(candidate.problem, candidate.placed, candidate.loads, ids_after)
    return replace(candidate, seconds=prediction.counted_step_seconds(timeline), ids_after=ids_after)


def fit_rate_share(workload: Workload) -> float:
    """The share of published rates at which the prediction of model A's first point equals the paper's."""
    low, high = 0.02, 1.0
    for _ in range(20):
        middle = (low * high) ** 0.5
        seconds = place_by_size(scaled_cluster(middle), workload).seconds
        is_slow = workload.batch_size / seconds < FITTED_SAMPLES_PER_SECOND
        low, high = (middle, high) if is_slow else (low, middle)
    rate_share = (low * high) ** 0.5
    rate = workload.batch_size / place_by_size(scaled_cluster(rate_share), workload).seconds
    if abs(rate / FITTED_SAMPLES_PER_SECOND - 1) > 0.01:
        sys.exit(
            f"model A: {rate:,.0f} samples/s with {rate_share:.2f} of the published rates; the first point is 700,000"
        )
    return rate_share


def result_line(name: str, candidate: Candidate, paper_rate: float, placement: str, **fields: Any) -> dict[str, Any]:
    problem = candidate.problem
    bound = roofline.step_bound(problem.cluster, planning.resource_usage(candidate))
    rate = problem.batch_size / candidate.seconds
    bound_rate = problem.batch_size / bound.overlapped_seconds
    comparison = {"paper": round(paper_rate), "over_paper": round(rate / paper_rate, 3)} if paper_rate else {}
    return {
        "benchmark": "neo",
        "simulated": True,
        "what": name,
        "placed": placement,
        "samples_per_second": round(rate),
        **comparison,
        "bound_samples_per_second": round(bound_rate),
        "bounded_by": bound.bottleneck,
        "of_bound": round(rate / bound_rate, 3),
        "imbalance": round(imbalance(candidate.loads.lookup_R + candidate.loads.update_R), 3),
        "imbalance_of_vectors": round(imbalance(candidate.loads.sent_bytes_R), 3),
        "ids_behind": candidate.ids_after,
        **fields,
    }


def model_a(rate_share: float) -> Iterator[dict[str, Any]]:
    workload = make_workload(MODELS["A"], BATCH_SIZE, RowWiseAdaGrad(lr=0.01))
    large_workload = make_workload(MODELS["A"], 4 * BATCH_SIZE, RowWiseAdaGrad(lr=0.01))
    cluster = fill_hbm(scaled_cluster(rate_share), workload)
    half = Precision("float16", "float16", "bfloat16", "bfloat16")
    yield result_line("A: whole tables by size, 64K", place_by_size(cluster, workload), 0.7e6, "fitted")
    points = (
        ("A: 4-D", workload, Precision(), (), 0.7e6 * 1.2),
        ("A: FP16 tables, rebalanced", workload, Precision("float16"), FP16_TABLES, 0.7e6 * 1.2**2),
        ("A: quantized collectives", workload, half, FP16_TABLES + WIRE, 0.7e6 * 1.2**2 * 1.3),
        ("A: 256K", large_workload, half, FP16_TABLES + WIRE, 1.5e6),
    )
    for name, point_workload, precision, allow, paper_rate in points:
        candidate = place_as_paper(cluster, point_workload, precision)
        yield result_line(name, candidate, paper_rate, "greedy")
        yield result_line(name, predict_as_published(candidate, "read"), paper_rate, "greedy, ids first")
        yield result_line(
            name, planning.make_plan(point_workload, cluster, allow=allow).candidate, paper_rate, "planner"
        )


def scaling(rate_share: float) -> Iterator[dict[str, Any]]:
    """Weak scaling at a local batch size of 512; on fewer hosts, tables have fewer rows."""
    half = Precision("float16", "float16", "bfloat16", "bfloat16")
    for name, paper_efficiency, precision in (("A", 0.5, half), ("I", 0.75, replace(half, tables=None))):
        allow = WIRE if precision.tables is None else FP16_TABLES + WIRE
        one_host_rates: dict[str, float] = {}
        for hosts in (1, 2, 4, 8, 16):
            cluster = scaled_cluster(rate_share, hosts)
            workload = make_workload(
                MODELS[name], LOCAL_BATCH * cluster.num_ranks, RowWiseAdaGrad(lr=0.01), row_share=hosts / 16
            )
            candidates = {
                "greedy": place_as_paper(cluster, workload, precision),
                "planner": planning.make_plan(workload, cluster, allow=allow).candidate,
            }
            for placement, candidate in candidates.items():
                rate = workload.batch_size / candidate.seconds / hosts
                efficiency = round(rate / one_host_rates.setdefault(placement, rate), 3)
                fields = {"paper_efficiency": paper_efficiency} if hosts == 16 else {}
                yield result_line(f"{name}: {hosts} hosts", candidate, 0.0, placement, efficiency=efficiency, **fields)


def even_bags(rate_share: float) -> Iterator[dict[str, Any]]:
    """Model I with equal mean bag lengths in all tables."""
    one_host_rate = 0.0
    for hosts in (1, 16):
        cluster = scaled_cluster(rate_share, hosts)
        shape = MODELS["I"]
        workload = make_workload(
            shape, LOCAL_BATCH * cluster.num_ranks, RowWiseAdaGrad(lr=0.01), row_share=hosts / 16, sigma=0.0
        )
        candidate = planning.make_plan(workload, cluster, allow=WIRE).candidate
        rate = workload.batch_size / candidate.seconds / hosts
        one_host_rate = one_host_rate or rate
        efficiency = round(rate / one_host_rate, 3)
        yield result_line(f"I, even bags: {hosts} hosts", candidate, 0.0, "planner", efficiency=efficiency)


def model_f(rate_share: float) -> Iterator[dict[str, Any]]:
    cluster = scaled_cluster(rate_share)
    for tables in (10, 20, 40):
        shape = replace(MODELS["F"], tables=tables)
        try:
            planning.make_plan(make_workload(shape, BATCH_SIZE, AdaGrad(lr=0.01)), cluster)
        except UserError as error:
            yield {"benchmark": "neo", "simulated": True, "what": f"F: FP32, AdaGrad, {tables}", "refused": str(error)}
        workload = make_workload(shape, BATCH_SIZE, RowWiseAdaGrad(lr=0.01))
        rows = {table.name: "row" for table in workload.tables}
        for placement, pins in (("rows over all ranks", rows), ("planner", {})):
            result = planning.make_plan(workload, cluster, allow=FP16_TABLES, pins=pins)
            tiers = result.plan.tables[0].placement.tiers
            fields: dict[str, Any] = {
                "scheme": result.candidate.sharding(0).scheme,
                "tiers": [list(share) for share in tiers],
                "ids_in_hbm": round(float(np.mean([table.found[0] for table in result.candidate.tiers])), 3),
                "table_terabytes": round(float(result.candidate.loads.bytes_R.sum()) / 1e12, 1),
            }
            name = f"F: FP16, row-wise AdaGrad, {tables} tables"
            yield result_line(name, result.candidate, 1.7e6, placement, **fields)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", default="", help="name of a file in benchmarks/results")
    parser.add_argument("--smoke", action="store_true", help="the smallest case, to see that it runs")
    args = parser.parse_args()
    rate_share = fit_rate_share(make_workload(MODELS["A"], BATCH_SIZE, RowWiseAdaGrad(lr=0.01)))
    lines: list[dict[str, Any]] = [
        {"benchmark": "neo", "simulated": True, "assumed": ASSUMPTIONS, "reached": round(rate_share, 4)}
    ]
    print(json.dumps(lines[0]), flush=True)
    for run_part in (even_bags,) if args.smoke else (model_a, model_f, scaling, even_bags):
        for line in run_part(rate_share):
            lines.append(line)
            print(json.dumps(line), flush=True)
    if args.write:
        results_file.write(args.write, "neo", lines)
    return 0


if __name__ == "__main__":
    sys.exit(main())

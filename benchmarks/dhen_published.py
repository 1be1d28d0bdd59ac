"""DHEN on 256 A100s as published, simulated: the best parallelism strategy of the dense model by depth.

    python -m benchmarks.dhen_published [--write NAME]

Everything here is simulated, on the preset zionex-128-a100 with 32 hosts. The paper (DHEN, 2022, sections 1.2 and 1.3.3
of our text) gives FLOPs by depth (table 3), at most 22 layers with data parallelism, HSDP up to 1.2 times as fast as
FSDP at all depths, and NVLink 600 against RoCE 25 GB/s. It does not give parameters, activations or batch size. One
number is fitted, the bytes of a layer, so that data parallelism fits 22 layers and not 23; ASSUMED below lists all
others, and the ratio of HSDP to FSDP is also computed for other values of the assumptions that affect it. A JSON line
per depth.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks import results_file
from benchmarks.neo import scaled_cluster
from shardwright.planner import dense_strategies, search
from shardwright.planner.dense_strategies import DenseCandidate
from shardwright.planner.memory import budget
from shardwright.planner.price import primitives
from shardwright.planner.problem import Precision, Problem
from shardwright.planner.search import Candidate
from shardwright.spec.cluster import Cluster, Collective, Sample
from shardwright.spec.optimizer import RowWiseAdaGrad
from shardwright.spec.workload import Block, Feature, FeatureStatistics, Table, Workload

HOSTS, RANKS = 32, 256
DP_LAYERS = 22  # most layers that fit with data parallelism
LAYER_FLOPS = (4.6e9 - 1.44e9) / 4  # of a sample, table 3: from 2 layers to 6
DEPTHS = (8, 12, 16, 20, 22, 23, 24, 28, 32, 36, 37, 38, 40, 41, 48)
TABLE_BYTES = 8e9  # of a rank, a table on each
PLAIN = ("DDP", "HSDP", "FSDP")
ASSUMED = (
    "machine: 32 hosts of zionex-128-a100's kind with the share of published rates that benchmarks.neo fits to its "
    "first point; products in TF32, since mixed precision with all quantized collectives gave the paper 1.08 x",
    "FLOPs of a layer and sample in training are table 3's slope, 0.79 G: a third forward, two thirds backward",
    "local batch 512, as Neo; activations of a layer are 5 times its weights (the text: may be far larger); a tenth of "
    "them are the layer's inputs, half of them the outputs of its products",
    "weights, gradients and their buckets in FP32, two moments in FP32; the text has the optimizer in BF16",
    "the bytes of a layer are fitted: data parallelism fits 22 layers and not 23, with 90 % of 40 GB of HBM usable",
    "256 tables x 128 columns in FP16 with row-wise AdaGrad, one of 8 GB on each rank, 10 ids a sample each, all in "
    "HBM: the only tier, so that nothing is offloaded either",
    "all-gathers and reduce-scatters over all ranks are NCCL's rings, as in the paper's FSDP; latencies are those of "
    "its protocol Simple; kernel launches take no time",
    "weights are all-gathered one block ahead; gradients of a block are reduced while the next one computes",
    "figure 6 has DP up to 16 layers and the text up to 22: taken as depths 8, 16, 24 and so on in the figure",
)


@dataclass(frozen=True, slots=True)
class Setting:
    """Assumptions that the ratio of HSDP to FSDP depends on."""

    local_batch: int = 512
    activations: float = 5.0  # of a layer's weights
    latency: float = 1.0  # factor on the links' latencies
    reached: float = 0.0  # share of published rates; 0: the share that benchmarks.neo fitted
    two_levels: bool = False  # all-gathers over hosts first, then inside each, instead of NCCL's rings

    def cluster(self) -> Cluster:
        published = scaled_cluster(self.reached or neo_rate_share(), HOSTS)
        levels = (replace(level, latency_seconds=level.latency_seconds * self.latency) for level in published.levels)
        device = replace(published.device, tiers=published.device.tiers[:1])
        cluster = replace(published, name=f"zionex-{RANKS}-a100", device=device, levels=tuple(levels))
        return replace(cluster, collectives=(two_level_all_gather(cluster),)) if self.two_levels else cluster

    def workload(self, layers: int, weight_bytes: float) -> Workload:
        batch, activation_bytes = self.local_batch * RANKS, self.activations * weight_bytes * RANKS
        forward = int(LAYER_FLOPS / 3 * batch)
        block = Block(
            "",
            int(weight_bytes / 4),
            int(weight_bytes),
            forward,
            2 * forward,
            int(activation_bytes),
            input_bytes=int(0.1 * activation_bytes),
            product_bytes=int(0.5 * activation_bytes),
            peak_bytes=int(1.1 * activation_bytes),
        )
        names = [f"table-{at:03}" for at in range(RANKS)]
        rows = int(TABLE_BYTES / (128 * 2 + 4))
        return Workload(
            version=1,
            batch_size=batch,
            tables=tuple(Table(name, rows, 128, "float16") for name in names),
            features=tuple(Feature(name, name) for name in names),
            statistics=tuple(FeatureStatistics(name, 10.0, 0.5) for name in names),
            optimizer=RowWiseAdaGrad(lr=0.01),
            blocks=tuple(replace(block, name=f"dense.blocks.{at}") for at in range(layers)),
        )


def two_level_all_gather(cluster: Cluster) -> Collective:
    """An all-gather over all ranks that takes as long as one over hosts and one inside a host."""
    inside, outside = cluster.levels
    samples = tuple(
        Sample(
            (size,),
            (
                primitives.formula_cost(cluster, "all_gather", (outside.name,), size // inside.num).seconds
                + primitives.formula_cost(cluster, "all_gather", (inside.name,), size).seconds,
            ),
        )
        for size in (1 << at for at in range(16, 31, 2))
    )
    names, nums = zip(*((level.name, level.num) for level in cluster.levels), strict=True)
    return Collective(
        op="all_gather",
        levels=names,
        nums=nums,
        latency_seconds=samples[0].seconds,
        bytes_per_second=samples[-1].sizes[0] / samples[-1].seconds,
        error=0.0,
        samples=samples,
    )


def neo_rate_share() -> float:
    return results_file.read(results_file.FOLDER / "neo-simulated.json")[0]["reached"]


def define_problem(setting: Setting, layers: int, weight_bytes: float) -> Problem:
    workload = setting.workload(layers, weight_bytes)
    return search.define_problem(workload, setting.cluster(), workload.batch_size, Precision())


def free_bytes(problem: Problem) -> float:
    """Bytes of a rank's memory that its table leaves free."""
    unit = search.unsharded_unit(problem, 0)
    return budget.memory_budget(problem).free_bytes[0] - unit.bytes_ - unit.buffer_bytes


def fit_layer_bytes(setting: Setting) -> float:
    """Bytes of a layer's weights with which DP_LAYERS and a half layers fill the memory under data parallelism."""
    low, high = 1e6, 4e9
    for _ in range(40):
        middle = (low * high) ** 0.5
        free = [free_bytes(define_problem(setting, DP_LAYERS + extra_layers, middle)) for extra_layers in (0, 1)]
        low, high = (middle, high) if sum(free) > 0 else (low, middle)
    return (low * high) ** 0.5


def place_tables(setting: Setting, layers: int, weight_bytes: float) -> Candidate:
    return dense_strategies.place_tables_first(define_problem(setting, layers, weight_bytes), {})


def evaluate_depth(setting: Setting, layers: int, weight_bytes: float) -> tuple[Candidate, tuple[DenseCandidate, ...]]:
    candidate = place_tables(setting, layers, weight_bytes)
    return candidate, dense_strategies.evaluate_strategies(candidate.problem, candidate.placed, candidate.ids_after)


def depth_line(layers: int, candidate: Candidate, strategies: tuple[DenseCandidate, ...]) -> dict[str, Any]:
    batch = candidate.problem.batch_size
    best, rule = dense_strategies.fastest_candidate(strategies), dense_strategies.smallest_candidate(strategies)
    plain = {c.strategy.name: c for c in strategies if c.strategy.name in PLAIN}
    values = {
        name: {"gigabytes": round(c.peak_bytes / 1e9, 2), "samples_per_second": round(batch / c.seconds)}
        for name, c in (*plain.items(), *([("best", best)] if best else []))
    }
    for name, c in plain.items():
        values[name]["fits"] = c.fits
    fitting = [c for c in strategies if c.fits]
    return {
        "benchmark": "dhen_published",
        "simulated": True,
        "layers": layers,
        **values,
        "hsdp_over_fsdp": round(float(plain["FSDP"].seconds / plain["HSDP"].seconds), 3),
        "chosen": best.strategy.name if best else None,
        "papers_rule": rule.strategy.name if rule else None,
        "chosen_over_rule": round(float(rule.seconds / best.seconds), 3) if best and rule else None,
        "fitting": len(fitting),
        "ways": len(strategies),
    }


def sensitivity() -> Iterator[dict[str, Any]]:
    """The ratio at 24 layers under other assumptions, with the bytes of a layer fitted for each."""
    settings = {
        "as assumed": Setting(),
        "256 samples of a rank": Setting(local_batch=256),
        "1,024 samples of a rank": Setting(local_batch=1024),
        "2,048 samples of a rank": Setting(local_batch=2048),
        "activations as large as weights": Setting(activations=1.0),
        "activations 10 times the weights": Setting(activations=10.0),
        "activations 20 times the weights": Setting(activations=20.0),
        "no latencies": Setting(latency=0.0),
        "all-gathers over hosts first, then inside": Setting(two_levels=True),
        "all published rates": Setting(reached=1.0),
    }
    for name, setting in settings.items():
        weight_bytes = fit_layer_bytes(setting)
        base = place_tables(setting, 24, weight_bytes)
        by_name = {
            strategy.name: strategy
            for strategy in dense_strategies.all_strategies(base.problem.workload, base.problem.cluster)
        }
        seconds = {
            name: float(
                dense_strategies.evaluate_strategy(base.problem, base.placed, by_name[name], base.ids_after).seconds
            )
            for name in PLAIN
        }
        yield {
            "benchmark": "dhen_published",
            "simulated": True,
            "what": name,
            "megabytes_of_a_layer": round(weight_bytes / 1e6, 1),
            "hsdp_over_fsdp": round(seconds["FSDP"] / seconds["HSDP"], 3),
            "hsdp_over_ddp": round(seconds["DDP"] / seconds["HSDP"], 3),
        }


def most_layers(setting: Setting, weight_bytes: float) -> dict[str, int]:
    """The most layers that fit next to the tables, by strategy."""
    layers_by_strategy: dict[str, int] = {}
    strategies = dense_strategies.all_strategies(setting.workload(2, weight_bytes), setting.cluster())
    for number, strategy in enumerate(strategies):
        low, high = 1, 512
        while high - low > 1:
            middle = (low + high) // 2
            problem = define_problem(setting, middle, weight_bytes)
            strategy_here = dense_strategies.all_strategies(problem.workload, problem.cluster)[number]
            fits = free_bytes(dense_strategies.apply_strategy(problem, strategy_here)) > 0
            low, high = (middle, high) if fits else (low, middle)
        layers_by_strategy[strategy.name] = low
    return layers_by_strategy


def result_lines(setting: Setting, depths: Sequence[int] = DEPTHS) -> Iterator[dict[str, Any]]:
    weight_bytes = fit_layer_bytes(setting)
    yield {
        "benchmark": "dhen_published",
        "simulated": True,
        "assumed": ASSUMED,
        "megabytes_of_a_layer": round(weight_bytes / 1e6, 1),
        "most_layers": most_layers(setting, weight_bytes),
    }
    for layers in depths:
        yield depth_line(layers, *evaluate_depth(setting, layers, weight_bytes))
    if depths == DEPTHS:
        yield from sensitivity()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", default="", help="name of a file in benchmarks/results")
    parser.add_argument("--smoke", action="store_true", help="the smallest case, to see that it runs")
    args = parser.parse_args()
    lines: list[dict[str, Any]] = []
    for line in result_lines(Setting(), DEPTHS[:1] if args.smoke else DEPTHS):
        lines.append(line)
        print(json.dumps(line), flush=True)
    if args.write:
        results_file.write(args.write, "dhen_published", lines)
    return 0


if __name__ == "__main__":
    sys.exit(main())

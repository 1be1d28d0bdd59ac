"""DHEN on 256 A100s as published, simulated: which way of holding the dense part each depth wants, and what it gives.

    python -m benchmarks.dhen_published [--write NAME]

Everything here is simulated, on the preset zionex-128-a100 with 32 hosts. The paper (DHEN, 2022, sections 1.2 and 1.3.3
of our text) says: FLOPs by depth (table 3), data parallelism holds 22 layers at most, HSDP up to 1.2 times FSDP at all
depths, NVLink 600 against RoCE 25 GB/s. It says nothing of parameters, activations or batch. One number is fitted, the
bytes of a layer, so that data parallelism holds 22 layers and not 23; ASSUMED below has all others, and the ratio of
HSDP to FSDP is told for other values of those that it hangs on. A JSON line per depth and way.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks import results_file
from benchmarks.neo import machine
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
DP_LAYERS = 22  # that data parallelism holds at most
LAYER_FLOPS = (4.6e9 - 1.44e9) / 4  # of a sample, table 3: from 2 layers to 6
DEPTHS = (8, 12, 16, 20, 22, 23, 24, 28, 32, 36, 37, 38, 40, 41, 48)
TABLE_BYTES = 8e9  # of a rank, a table on each
PLAIN = ("DDP", "HSDP", "FSDP")
ASSUMED = (
    "machine: 32 hosts of zionex-128-a100's kind; of all published rates the part is reached that benchmarks.neo fits "
    "to its first point; products in TF32, since mixed precision with all quantized collectives gave the paper 1.08 x",
    "FLOPs of a layer and sample are table 3's slope, 0.79 G, of training: a third forward, two thirds backward",
    "512 samples of each rank, as Neo; activations of a layer are 5 times its weights (the text: may be far larger); a "
    "tenth of them is what a layer is called with, half of them is what its products give",
    "weights, gradients and their buckets in FP32, two moments in FP32; the text has the optimizer in BF16",
    "the bytes of a layer are fitted: data parallelism holds 22 layers and not 23, with 90 % of 40 GB of HBM usable",
    "256 tables x 128 columns in FP16 with row-wise AdaGrad, one of 8 GB on each rank, 10 ids a sample each, all in "
    "HBM: no tier beside it, so that nothing is offloaded either",
    "all-gathers and reduce-scatters over all ranks are NCCL's rings, as in the paper's FSDP; latencies are those of "
    "its protocol Simple; kernel launches take no time",
    "one block's weights are gathered ahead; the gradient of one is summed beside the next",
    "figure 6 has DP up to 16 layers and the text up to 22: taken as depths 8, 16, 24 and so on in the figure",
)


@dataclass(frozen=True, slots=True)
class Setting:
    """What the ratio of HSDP to FSDP hangs on."""

    own_batch: int = 512
    activations: float = 5.0  # of a layer's weights
    latency: float = 1.0  # of the links'
    reached: float = 0.0  # of published rates; 0: as benchmarks.neo has it
    two_levels: bool = False  # all-gathers over hosts first and then inside each, in place of NCCL's rings

    def cluster(self) -> Cluster:
        whole = machine(self.reached or neo_reached(), HOSTS)
        levels = (replace(one, latency_seconds=one.latency_seconds * self.latency) for one in whole.levels)
        device = replace(whole.device, tiers=whole.device.tiers[:1])
        found = replace(whole, name=f"zionex-{RANKS}-a100", device=device, levels=tuple(levels))
        return replace(found, collectives=(in_two_levels(found),)) if self.two_levels else found

    def workload(self, layers: int, weight_bytes: float) -> Workload:
        batch, kept = self.own_batch * RANKS, self.activations * weight_bytes * RANKS
        forward = int(LAYER_FLOPS / 3 * batch)
        block = Block(
            "",
            int(weight_bytes / 4),
            int(weight_bytes),
            forward,
            2 * forward,
            int(kept),
            input_bytes=int(0.1 * kept),
            product_bytes=int(0.5 * kept),
            peak_bytes=int(1.1 * kept),
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


def in_two_levels(cluster: Cluster) -> Collective:
    """An all-gather over all ranks, as if it had been seen to take what its two halves do."""
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


def neo_reached() -> float:
    return results_file.read(results_file.FOLDER / "neo-simulated.json")[0]["reached"]


def posed(setting: Setting, layers: int, weight_bytes: float) -> Problem:
    work = setting.workload(layers, weight_bytes)
    return search.define_problem(work, setting.cluster(), work.batch_size, Precision())


def room(problem: Problem) -> float:
    """Of a rank, behind its table."""
    unit = search.unsharded_unit(problem, 0)
    return budget.memory_budget(problem).free_bytes[0] - unit.bytes_ - unit.buffer_bytes


def fitted(setting: Setting) -> float:
    """Bytes of a layer's weights with which half a layer more than data parallelism holds would fill the memory."""
    low, high = 1e6, 4e9
    for _ in range(40):
        middle = (low * high) ** 0.5
        rooms = [room(posed(setting, DP_LAYERS + more, middle)) for more in (0, 1)]
        low, high = (middle, high) if sum(rooms) > 0 else (low, middle)
    return (low * high) ** 0.5


def placed(setting: Setting, layers: int, weight_bytes: float) -> Candidate:
    return dense_strategies.place_tables_first(posed(setting, layers, weight_bytes), {})


def depth(setting: Setting, layers: int, weight_bytes: float) -> tuple[Candidate, tuple[DenseCandidate, ...]]:
    found = placed(setting, layers, weight_bytes)
    return found, dense_strategies.evaluate_strategies(found.problem, found.placed, found.ids_after)


def told(layers: int, found: Candidate, ways: tuple[DenseCandidate, ...]) -> dict[str, Any]:
    batch = found.problem.batch_size
    best, rule = dense_strategies.fastest_candidate(ways), dense_strategies.smallest_candidate(ways)
    plain = {one.strategy.name: one for one in ways if one.strategy.name in PLAIN}
    each = {
        name: {"gigabytes": round(one.peak_bytes / 1e9, 2), "samples_per_second": round(batch / one.seconds)}
        for name, one in (*plain.items(), *([("best", best)] if best else []))
    }
    for name, one in plain.items():
        each[name]["fits"] = one.fits
    fitting = [one for one in ways if one.fits]
    return {
        "benchmark": "dhen_published",
        "simulated": True,
        "layers": layers,
        **each,
        "hsdp_over_fsdp": round(float(plain["FSDP"].seconds / plain["HSDP"].seconds), 3),
        "chosen": best.strategy.name if best else None,
        "papers_rule": rule.strategy.name if rule else None,
        "chosen_over_rule": round(float(rule.seconds / best.seconds), 3) if best and rule else None,
        "fitting": len(fitting),
        "ways": len(ways),
    }


def sensitivity() -> Iterator[dict[str, Any]]:
    """The ratio at 24 layers under other assumptions, the bytes of a layer fitted for each."""
    settings = {
        "as assumed": Setting(),
        "256 samples of a rank": Setting(own_batch=256),
        "1,024 samples of a rank": Setting(own_batch=1024),
        "2,048 samples of a rank": Setting(own_batch=2048),
        "activations as large as weights": Setting(activations=1.0),
        "activations 10 times the weights": Setting(activations=10.0),
        "activations 20 times the weights": Setting(activations=20.0),
        "no latencies": Setting(latency=0.0),
        "all-gathers over hosts first, then inside": Setting(two_levels=True),
        "all published rates": Setting(reached=1.0),
    }
    for name, setting in settings.items():
        weight_bytes = fitted(setting)
        found = placed(setting, 24, weight_bytes)
        ways = {way.name: way for way in dense_strategies.all_strategies(found.problem.workload, found.problem.cluster)}
        seconds = {
            name: float(
                dense_strategies.evaluate_strategy(found.problem, found.placed, ways[name], found.ids_after).seconds
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
    """That each way holds, beside the tables."""
    found: dict[str, int] = {}
    known = dense_strategies.all_strategies(setting.workload(2, weight_bytes), setting.cluster())
    for number, way in enumerate(known):
        low, high = 1, 512
        while high - low > 1:
            middle = (low + high) // 2
            problem = posed(setting, middle, weight_bytes)
            same = dense_strategies.all_strategies(problem.workload, problem.cluster)[number]
            fits = room(dense_strategies.apply_strategy(problem, same)) > 0
            low, high = (middle, high) if fits else (low, middle)
        found[way.name] = low
    return found


def lines(setting: Setting, depths: Sequence[int] = DEPTHS) -> Iterator[dict[str, Any]]:
    weight_bytes = fitted(setting)
    yield {
        "benchmark": "dhen_published",
        "simulated": True,
        "assumed": ASSUMED,
        "megabytes_of_a_layer": round(weight_bytes / 1e6, 1),
        "most_layers": most_layers(setting, weight_bytes),
    }
    for layers in depths:
        yield told(layers, *depth(setting, layers, weight_bytes))
    if depths == DEPTHS:
        yield from sensitivity()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", default="", help="name of a file in benchmarks/results")
    parser.add_argument("--smoke", action="store_true", help="the smallest case, to see that it runs")
    asked = parser.parse_args()
    found: list[dict[str, Any]] = []
    for line in lines(Setting(), DEPTHS[:1] if asked.smoke else DEPTHS):
        found.append(line)
        print(json.dumps(line), flush=True)
    if asked.write:
        results_file.write(asked.write, "dhen_published", found)
    return 0


if __name__ == "__main__":
    sys.exit(main())

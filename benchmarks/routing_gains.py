"""What `shardwright plan` predicts for recorded routing: copies, steps, placements, on FasterMoE's cluster johnny.

    python -m benchmarks.routing_gains [--trace FILE] [--write NAME]

FILE: the run that SmartMoE published (expert_counts_u16.npy.zst), 32 experts in 12 layers on 16 ranks; every
micro-batch is a pass. It is written in the engine's own format and read back. Without a file, routing is drawn from a
Zipf law. All times are simulated, at johnny's published rates. A JSON line for each number of channels H, with 2 H
inside an expert: gain over plain expert parallelism of all mixtures together by policy (median, least, most of the
passes), of the placement of each mixture, and of one with a replica more on every rank.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from benchmarks import results_file
from benchmarks.moe_routing import read_trace as read_counts
from benchmarks.moe_routing import zipf_routing
from benchmarks.sharding import median_min_max
from shardwright.planner.routing_gains import POLICIES, RoutingGains
from shardwright.runtime.routing_request import ExpertSizes, analyse, trace_workload
from shardwright.spec import presets
from shardwright.spec.routing import RoutedRows
from shardwright.spec.routing_trace import RoutingTrace, read_trace

CHANNELS, SMALLEST = (1024, 2048, 4096), 1024
NUM_RANKS, NUM_EXPERTS, ROWS = 16, 32, 4096
GENERATED_PASSES = 4


def recorded_lines(path: str) -> Iterator[str]:
    """Lines of the engine's own format; layers are numbered as in the file."""
    if path:
        counts = read_counts(path)  # iterations, ranks, layers, micro-batches, experts
        passes = [iteration[:, :, batch].swapaxes(0, 1) for iteration in counts for batch in range(counts.shape[3])]
    else:
        passes = [[zipf_routing(number, NUM_RANKS, NUM_EXPERTS, ROWS)] for number in range(GENERATED_PASSES)]
    for step, layers in enumerate(passes):
        for layer, rows_RE in enumerate(layers):
            yield RoutedRows(step, f"layers.{layer}", tuple(map(tuple, rows_RE.tolist()))).to_line()


def measure(trace: RoutingTrace, channels: int) -> dict[str, Any]:
    cluster, sizes = presets.load_cluster("johnny"), ExpertSizes(channels, 2 * channels)
    workload = trace_workload(trace, sizes)
    gains, replicated = (analyse(workload, cluster, trace, num_redundant=num) for num in (0, NUM_RANKS))
    imbalances = [price.imbalance for each in gains.mixtures for price in each.prices]
    return {
        "benchmark": "routing_gains",
        "channels": channels,
        "passes": len(trace.passes),
        "recorded_passes": trace.num_passes,
        "mixtures": len(trace.shares),
        "max_over_mean": median_min_max(imbalances, digits=3),
        **{policy: median_min_max(gains.total_gains(policy).tolist(), digits=3) for policy in POLICIES},
        "placed": placed_gains(gains),
        "placed_with_replicas": placed_gains(replicated),
        "copies": max(price.num_copies for each in gains.mixtures for price in each.prices),
    }


def placed_gains(gains: RoutingGains) -> list[float]:
    return median_min_max(np.concatenate([each.placed_gains for each in gains.mixtures]).tolist(), digits=3)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", default="", metavar="FILE")
    parser.add_argument("--write", default="", help="name of a file in benchmarks/results")
    parser.add_argument("--smoke", action="store_true", help="the smallest case, to see that it runs")
    args = parser.parse_args()
    with TemporaryDirectory() as folder:
        path = Path(folder) / "routing.jsonl"
        with path.open("w") as file:
            file.writelines(recorded_lines("" if args.smoke else args.trace))
        trace = read_trace(str(path))
    lines: list[dict[str, Any]] = []
    for channels in (SMALLEST,) if args.smoke else CHANNELS:
        lines.append(measure(trace, channels))
        print(json.dumps(lines[-1]), flush=True)
    if args.write:
        results_file.write(args.write, "routing_gains", lines)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Expert parallelism of one layer, forward and backward, under every policy, with recorded and generated routing.

    python -m benchmarks.moe [--trace FILE] [--rounds N] [--on SETTING ...] [--write NAME]

As root. For each setting a lab is created: hosts, links and CPU quotas are emulated. All sides run in one job, in an
order that rotates each round; a round is one draw of the routing, the same for all sides. The layer has 384 channels,
1,536 inside an expert (alpha = 4), two experts a rank and 5,760 rows a rank.

Sides: "plain", expert parallelism in one all-to-all there and back, as FastMoE does; "plain, again", the A/A floor;
"shadows", FasterMoE's Algorithm 1; "steps", its pairwise exchange between groups, one rank each; "shadows, steps",
both; "even, steps", copies so that no rank computes more rows than the mean; "ours", the fastest of all by the complete
model (planner/experts.py), in steps. "even routing", plain and in steps, has as many rows for every expert: the ideal.

Workloads: "zipf", exponent 1.2, another order of the experts each round; "trace", FILE, drawn iterations and layers.

A JSON line for each side: seconds, and its gain over "plain" in the same round (median, least, most). `predicted`: the
complete model's seconds, without overlap, from rows and links timed in the same job (`costs`); `bound`: what overlap of
all computation with all messages would leave. `ideal_share`: seconds of even routing in steps / seconds. `Pi1`: time of
computation / exchange of even rows; `Pi2`: rows a rank / (alpha H).
"""

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks import results_file
from benchmarks.moe_sides import ALPHA, CHANNELS, COSTS, EVEN, EXPERTS_PER_RANK, ROWS, SIDES, counts_of
from benchmarks.sharding import median_min_max, start_job
from benchmarks.turns import TurnClient
from shardwright.lab.emulated_cluster import Lab
from shardwright.lab.shape import Host, Shape
from shardwright.planner.experts import (
    COMPUTE_PASSES,
    EXCHANGES,
    Assignment,
    ExpertLayer,
    decide,
    without_copies,
)
from shardwright.spec.plan import ExpertCosts, ExpertPlan

STEPS, WARMUP_STEPS = 1, 1  # of a turn, each forward and backward
EVEN_STEPS, SMALLEST = f"{EVEN}, steps", "4 x 1"
SETTINGS = {
    "4 x 1": Shape((Host(uplink="230mbit", cpu=0.45),) * 4),
    "2 x 2": Shape((Host(ranks=2, local="230mbit", cpu=0.45),) * 2),
}
Line = dict[str, Any]


def assignment_of(side: str, workload: str, number: int, num_ranks: int, costs: ExpertCosts) -> Assignment:
    """What each rank computes on this side."""
    counts_RE = counts_of(workload, number, num_ranks)
    layer = ExpertLayer(tuple(expert // EXPERTS_PER_RANK for expert in range(counts_RE.shape[1])), costs)
    policy, in_steps = SIDES[side]
    computed_RE = decide(ExpertPlan("moe", (), num_ranks if in_steps else 1, policy, costs), counts_RE)
    if computed_RE is None:
        return without_copies(layer, counts_RE)
    return Assignment(layer, counts_RE, computed_RE)


def measure_setting(setting: str, workloads: Sequence[str], num_rounds: int) -> Iterator[Line]:
    call = "from benchmarks.moe_sides import worker; worker"
    with TemporaryDirectory() as folder, Lab(SETTINGS[setting], "moe") as lab:
        command = [sys.executable, "-c", f"{call}({folder!r})"]
        with start_job(lab, folder, "moe", command) as client:
            for workload in workloads:
                yield from measure_workload(setting, workload, num_rounds, client)


def measure_workload(setting: str, workload: str, num_rounds: int, client: TurnClient) -> Iterator[Line]:
    num_ranks, seconds = SETTINGS[setting].num_ranks, dict[str, list[float]]()
    turns = {name: f"{name}:{workload}" for name in SIDES} | {EVEN: f"plain:{EVEN}", EVEN_STEPS: f"steps:{EVEN}"}
    timed = client.run_turn(COSTS, 0, 0)
    costs = ExpertCosts(**timed)
    for number in range(num_rounds):
        names = [*turns]
        for name in (*names[number % len(names) :], *names[: number % len(names)]):
            reply = client.run_turn(f"{turns[name]}:{number}", WARMUP_STEPS, STEPS)
            seconds.setdefault(name, []).append(reply["seconds"])
        print(f"{setting}, {workload}: round {number + 1} of {num_rounds}", file=sys.stderr)
    even_rows = ROWS * (num_ranks - 1) / num_ranks
    for name, times in seconds.items():
        side, side_workload = turns[name].split(":")
        assignments = [assignment_of(side, side_workload, number, num_ranks, costs) for number in range(num_rounds)]
        yield {
            "benchmark": "moe",
            "setting": setting,
            "emulated": "hosts, links, CPU quotas",
            "workload": workload,
            "side": name,
            "seconds": median_min_max(times, 3),
            "over_plain": ratios(seconds["plain"], times),
            "ideal_share": ratios(seconds[EVEN_STEPS], times),
            "predicted": round(median(assignment.seconds for assignment in assignments), 3),
            "predicted_over_measured": ratios([assignment.seconds for assignment in assignments], times),
            "bound": round(median(assignment.overlapped_seconds for assignment in assignments), 3),
            "copies": [len(assignment.copies[0]) for assignment in assignments],
            "most_rows_over_mean": [round(assignment.loads_R.max() / ROWS, 3) for assignment in assignments],
            "Pi1": round(COMPUTE_PASSES * ROWS * costs.compute_row / (EXCHANGES * even_rows * costs.send_row), 3),
            "Pi2": round(ROWS / (ALPHA * CHANNELS), 2),
            "costs": timed,
        }


def ratios(above: Sequence[float], below: Sequence[float]) -> list[float]:
    """Round by round: median, least, most."""
    return median_min_max([a / b for a, b in zip(above, below, strict=True)], 3)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", default="", metavar="FILE")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--on", nargs="*", default=list(SETTINGS), choices=SETTINGS, metavar="SETTING")
    parser.add_argument("--write", default="", help="name of a file in benchmarks/results")
    parser.add_argument("--smoke", action="store_true", help="the smallest case, to see that it runs")
    args = parser.parse_args()
    if args.smoke:
        args.on, args.rounds = [SMALLEST], 1
    os.environ["MOE_TRACE"] = args.trace
    lines: list[Line] = []
    for setting in args.on:
        for line in measure_setting(setting, ["zipf", *(["trace"] if args.trace else [])], args.rounds):
            lines.append(line)
            print(json.dumps(line), flush=True)
    if args.write:
        results_file.write(args.write, "moe", lines)
    return 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())

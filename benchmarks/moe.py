"""Expert parallelism of one layer, forward and backward, under every policy, against rivals, on several workloads.

    python -m benchmarks.moe [--trace FILE] [--rounds N] [--on SETTING ...] [--workloads NAME ...] [--sides NAME ...]
                             [--into FILE] [--write NAME]

As root. For each setting a lab is created: hosts, links and CPU quotas are emulated. All sides run in one job, in an
order that rotates each round; a round is one draw of the routing, the same for all sides: of each a warm-up and a step
that is timed. The layer has 384 channels, 1,536 inside an expert (alpha = 4), two experts and 5,760 rows a rank. By
default three rounds of zipf, drift and, with --trace, trace: estimated at 2 minutes a round on four ranks and 5 on
eight, an hour and a half in all; W0 to W7, by name, take 45 minutes on four ranks.

Sides: "plain", expert parallelism in one all-to-all there and back, as FastMoE does; "plain, again", the A/A floor;
"shadows", FasterMoE's Algorithm 1; "steps", its pairwise exchange between groups, one rank each; "shadows, steps",
both; "even, steps", copies so that no rank computes more rows than the mean; "ours", the fastest of all by the complete
model (expert_assignment.py), in steps. Rival policies, in our dispatch, in steps (moe_policies.py): "EPLB", from the
counts of the draw before (in the trace, of the same layer); "LLEP"; "quota", as UltraEP. Rival executions
(moe_rivals.py): "GShard, capacity 1.2", padded, which DROPS tokens (`dropped`: their share); "ZeRO-2" and "ZeRO-3", all
experts on every rank. "even routing", plain, in steps and ours, has as many rows for every expert: in steps it is the
force-balanced ideal. "plain, computation" and "plain, messages" are the parts of plain alone, for the predictor.

Workloads (moe_routing.py): "zipf", exponent 1.2, another order of the experts each round, so that EPLB's history tells
nothing; "drift", popularity that changes slowly; "trace", FILE, drawn iterations and layers; "W0" to "W7" as
Megatron-LM's: balanced, hot set, hot rank, spread hot, source-ragged, zero-expert rank, rotating, burst.

--into: a line for each round, appended once all its sides are known, since sides are compared within a round; rounds in
FILE are not repeated, so that a run can be cut and continued, or extended by other settings, workloads and sides (start
another FILE when the code changes). Lines are printed and written from all rounds in FILE: first one for each side:
seconds, gain over "plain" in the same round (median, least, most). `predicted`: the complete model's seconds, from rows
and links timed in the same round (`costs`), and those of gathering a rank's rows, timed alone; `bound`: what overlap of
all computation with all messages would leave. `ideal_share`: seconds of the ideal / seconds. `Pi1`: time to compute a
row in forward / to send it; `Pi2`: rows a rank / (alpha H).

Then summaries (moe_summary.py). "targets": shadowing, reached gain / gain by the model (at least 0.85); the schedule,
reached gain / its bound, the computation and messages of plain, measured alone, overlapped in both passes (0.8); ours,
share of the ideal (0.9), over "shadows, steps" (1) and on even routing over plain (1), both within max(2 %, A/A floor).
"predictor": R^2, mean relative error, and those after a fit of offset and slope, of computation, messages, sides in one
step, and sides in steps. "picks": cases in which the side with least predicted time is within max(2 %, floor) of the
fastest.
"""

import argparse
import hashlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks import moe_sides, results_file
from benchmarks.moe_routing import GENERATORS
from benchmarks.moe_sides import BALANCED_STEPS, COSTS, PLAIN, SIDES, TRACE, predict
from benchmarks.moe_summary import side_lines, summaries
from benchmarks.sharding import start_job
from benchmarks.turns import TurnClient
from shardwright.lab.emulated_cluster import Lab
from shardwright.lab.shape import Host, Shape

STEPS, WARMUP_STEPS = 1, 1  # of a turn, each forward and backward
ROTATION = 7  # sides, from round to round
SMALLEST = "4 x 1"
SETTINGS = {
    "4 x 1": Shape((Host(uplink="230mbit", cpu=0.45),) * 4),
    "2 x 2": Shape((Host(ranks=2, local="230mbit", cpu=0.45),) * 2),
    "4 x 2": Shape((Host(ranks=2, local="120mbit", cpu=0.225),) * 4),
}
Line = dict[str, Any]
Round = tuple[str, str, int]  # setting, workload, number of the draw


def rounds_of(args: argparse.Namespace) -> list[Round]:
    return [(on, workload, number) for on in args.on for workload in args.workloads for number in range(args.rounds)]


def digest(each: Round, sides: Sequence[str]) -> str:
    """A short hash of all settings of a round."""
    sizes = [moe_sides.CHANNELS, moe_sides.ALPHA, moe_sides.ROWS, moe_sides.EXPERTS_PER_RANK, moe_sides.CAPACITY]
    description = json.dumps([each, sorted(sides), sizes, asdict(SETTINGS[each[0]]), STEPS, WARMUP_STEPS])
    return hashlib.sha256(description.encode()).hexdigest()[:12]


def run_missing(rounds: Sequence[Round], sides: Sequence[str], into: Path) -> list[Line]:
    """All rounds in `into`, to which those that are missing are appended."""
    lines = [json.loads(text) for text in into.read_text().splitlines()] if into.exists() else []
    known = {line["digest"] for line in lines}
    missing = [each for each in rounds if digest(each, sides) not in known]
    for line in measure(missing, sides):
        with into.open("a") as file:
            file.write(json.dumps(line) + "\n")
        lines.append(line)
    return lines


def measure(rounds: Sequence[Round], sides: Sequence[str]) -> Iterator[Line]:
    """Run rounds; those of a setting in one lab and job."""
    for setting in dict.fromkeys(setting for setting, _, _ in rounds):
        with ExitStack() as stack:
            folder = stack.enter_context(TemporaryDirectory())
            lab = stack.enter_context(Lab(SETTINGS[setting], "moe"))
            command = [sys.executable, "-c", f"from benchmarks.moe_worker import worker; worker({folder!r})"]
            client = stack.enter_context(start_job(lab, folder, "moe", command))
            for each in rounds:
                if each[0] == setting:
                    yield measure_round(each, sides, client)


def measure_round(each: Round, sides: Sequence[str], client: TurnClient) -> Line:
    setting, workload, number = each
    num_ranks, timed = SETTINGS[setting].num_ranks, client.run_turn(COSTS, 0, 0)
    measured: dict[str, Line] = {}
    start = number * ROTATION % len(sides)
    for name in (*sides[start:], *sides[:start]):
        reply = client.run_turn(f"{name}:{workload}:{number}", WARMUP_STEPS, STEPS)
        measured[name] = reply | predict(name, workload, number, num_ranks, timed)
    seconds = {name: round(measured[name]["seconds"], 3) for name in sides}
    print(f"{setting}, {workload}, round {number + 1}: {seconds}", file=sys.stderr)
    line = {"kind": "round", "digest": digest(each, sides), "setting": setting, "workload": workload}
    return line | {"number": number, "costs": timed, "sides": {name: measured[name] for name in sides}}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", default="", metavar="FILE")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--on", nargs="*", default=list(SETTINGS), choices=SETTINGS, metavar="SETTING")
    workloads = [*GENERATORS, TRACE]
    parser.add_argument("--workloads", nargs="*", choices=workloads, metavar="NAME", help=", ".join(workloads))
    parser.add_argument("--sides", nargs="*", default=list(SIDES), choices=SIDES, metavar="NAME")
    parser.add_argument("--into", default="", metavar="FILE", help="rounds measured so far; see above")
    parser.add_argument("--write", default="", help="name of a file in benchmarks/results")
    parser.add_argument("--smoke", action="store_true", help="the smallest case, to see that it runs")
    args = parser.parse_args()
    args.workloads = args.workloads or ["zipf", "drift", *([TRACE] if args.trace else [])]
    if args.smoke:
        args.on, args.workloads, args.rounds = [SMALLEST], ["zipf"], 1
    if TRACE in args.workloads and not args.trace:
        parser.error(f'the workload "{TRACE}" needs --trace FILE')
    args.sides = [name for name in SIDES if name in (PLAIN, BALANCED_STEPS, *args.sides)]  # ratios need these two
    return args


def main() -> int:
    args = parse_arguments()
    os.environ["MOE_TRACE"] = args.trace
    with TemporaryDirectory() as scratch:
        rounds = run_missing(rounds_of(args), args.sides, Path(args.into or f"{scratch}/rounds.jsonl"))
    lines = [*side_lines(rounds), *summaries(rounds)]
    for line in lines:
        print(json.dumps(line), flush=True)
    if args.write:
        results_file.write(args.write, "moe", lines)
    return 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())

"""GPT in a pipeline over ranks and hosts, with torch.distributed.pipelining alongside, and the measured bubble.

    python -m benchmarks.pipeline [--rounds N] [--on SETTING ...] [--schedules NAME ...] [--write NAME]

As root. For each setting and schedule a lab is created, and one job trains all sides in turns, in an order that rotates
each round. Sides (benchmarks/pipeline_sides.py): "ours"; "ours, again", a second job like it, whose ratio to the first
is the A/A floor; "torch", PipelineStage under Schedule1F1B or ScheduleInterleaved1F1B (two chunks a rank), with the
same cuts, micro-batches, weights, data, optimizer and Gloo; in "loopback" also "ours, sockets", without shared memory
between the ranks. A GPT of 67 M parameters in 16 blocks, 8 micro-batches of 2 x 32 tokens, SGD.

Settings: "lab 4 x 1, 500 Mbit" and "250 Mbit", 4 hosts x 1 rank with 0.45 of a core each and uplinks of that rate;
"lab 2 x 1, 500 Mbit", 2 hosts x 1 rank with 0.9 of a core; "loopback 2" and "loopback 4", ranks on one host with the
same quotas and links without a rate. Hosts, links and the quotas are emulated on two cores: a rank with 0.45 of a core
computes 2.25 of 5 ms at full speed, and a pass after a wait thus is shorter than one of several without waits.

A JSON line per side: milliseconds of a step (median, least, most over rounds), its ratio to torch's and to "ours" in
the same round, bytes per step on a host's uplink, and the largest relative difference of a loss from torch's, which may
be at most LOSS_TOLERANCE: otherwise the benchmark fails. `bubble`: time of a rank outside its passes / in them, within
the window from the first pass of a step to its last, mean over ranks; `bubble_by_rank`; `predicted_bubble`: the closed
form (p-1)/(v m), for chunks of equal time and messages that take none. `message_share`: seconds of the two messages of
a forward and a backward pass at the link's rate / seconds of the two passes.
"""

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import mean, median
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks import results_file
from benchmarks.pipeline_sides import AGAIN, MICRO_BATCHES, NUM_CHUNKS, TORCH, message_bytes
from benchmarks.sharding import median_min_max, start_job, uplink_bytes
from benchmarks.turns import TurnClient
from shardwright.lab.emulated_cluster import Lab
from shardwright.lab.shape import Host, Shape, parse_bits_per_second

STEPS, WARMUP_STEPS, FIRST_STEPS = 2, 1, 1
LOSS_TOLERANCE = 1e-4  # relative: the order of float32 sums differs
HALF, WHOLE = Host(uplink="500mbit", cpu=0.45), Host(uplink="500mbit", cpu=0.9)
SETTINGS = {
    "lab 4 x 1, 500 Mbit": Shape((HALF,) * 4),
    "lab 4 x 1, 250 Mbit": Shape((replace(HALF, uplink="250mbit"),) * 4),
    "lab 2 x 1, 500 Mbit": Shape((WHOLE,) * 2),
    "loopback 4": Shape((Host(ranks=4, cpu=0.45),)),
    "loopback 2": Shape((Host(ranks=2, cpu=0.9),)),
}
SMALLEST = "loopback 2"
Line = dict[str, Any]


def predicted_bubble(num_ranks: int, num_chunks: int, micro_batches: int) -> float:
    """Time outside the passes / in them, for chunks of equal time and messages that take none: the closed form."""
    return (num_ranks - 1) / (num_chunks * micro_batches)


def run_rounds(lab: Lab, client: TurnClient, sides: Sequence[str], num_rounds: int) -> dict[str, list[Line]]:
    """The replies of each side, with a step's bytes on an uplink; the first turns, which warm up, do not count."""
    replies: dict[str, list[Line]] = {name: [] for name in sides}
    for name in sides:
        client.run_turn(name, 0, FIRST_STEPS)
    for number in range(num_rounds):
        for name in (*sides[number % len(sides) :], *sides[: number % len(sides)]):
            bytes_before = uplink_bytes(lab)
            reply = client.run_turn(name, WARMUP_STEPS, STEPS)
            replies[name].append(reply | {"bytes": (uplink_bytes(lab) - bytes_before) / (WARMUP_STEPS + STEPS)})
        print(f"round {number + 1} of {num_rounds}", file=sys.stderr)
    return replies


def loss_difference(replies: Sequence[Line], expected: Sequence[Line]) -> float:
    """The largest relative difference of a loss in the same step."""
    pairs = [
        pair
        for reply, other in zip(replies, expected, strict=True)
        for pair in zip(reply["losses"], other["losses"], strict=True)
    ]
    return max(abs(loss - other) / abs(other) for loss, other in pairs)


def result_lines(setting: str, schedule: str, replies: dict[str, list[Line]]) -> Iterator[Line]:
    """A JSON line per side."""
    shape, num_chunks = SETTINGS[setting], NUM_CHUNKS[schedule]
    uplink = shape.hosts[0].uplink
    message_seconds = 8 * message_bytes() / parse_bits_per_second(uplink) if uplink else 0.0
    predicted = predicted_bubble(shape.num_ranks, num_chunks, MICRO_BATCHES)
    for name, side_replies in replies.items():

        def ratios(other: str, side_replies: list[Line] = side_replies) -> list[float]:
            pairs = zip(side_replies, replies[other], strict=True)
            return median_min_max([reply["seconds"] / base["seconds"] for reply, base in pairs], 3)

        busy = [median(reply["busy"][rank] for reply in side_replies) for rank in range(shape.num_ranks)]
        window = median(reply["window"] for reply in side_replies)
        bubbles = [window / rank_busy - 1 for rank_busy in busy]
        pass_seconds = mean(busy) / (num_chunks * MICRO_BATCHES)
        yield {
            "benchmark": "pipeline",
            "setting": setting,
            "emulated": "hosts, links, CPU quotas",
            "schedule": schedule,
            "side": name,
            "ms": median_min_max([1e3 * reply["seconds"] for reply in side_replies]),
            "over_torch": ratios(TORCH),
            "over_ours": ratios("ours"),
            "rounds": len(side_replies),
            "uplink_mb": round(1e-6 * median(reply["bytes"] for reply in side_replies), 2),
            "loss": round(side_replies[-1]["losses"][-1], 5),
            "loss_difference": loss_difference(side_replies, replies[TORCH]),
            "busy_ms": [round(1e3 * seconds, 1) for seconds in busy],
            "window_ms": round(1e3 * window, 1),
            "bubble": round(mean(bubbles), 4),
            "bubble_by_rank": [round(bubble, 4) for bubble in bubbles],
            "predicted_bubble": round(predicted, 4),
            "message_share": round(2 * message_seconds / pass_seconds, 4),
        }


def measure_setting(setting: str, schedule: str, num_rounds: int) -> list[Line]:
    """The lines of a setting and schedule; raises if a loss differs from torch's."""
    call = "from benchmarks.pipeline_sides import worker; worker"
    with TemporaryDirectory() as folder, Lab(SETTINGS[setting], "pipeline") as lab:
        command = [sys.executable, "-c", f"{call}{(folder, schedule)}"]
        with start_job(lab, folder, "ours", command) as client:
            has_shared_memory = SETTINGS[setting].hosts[0].ranks > 1
            sides = ["ours", AGAIN, *(["ours, sockets"] if has_shared_memory else []), TORCH]
            lines = list(result_lines(setting, schedule, run_rounds(lab, client, sides, num_rounds)))
    for line in lines:
        if not line["loss_difference"] <= LOSS_TOLERANCE:
            raise SystemExit(f"{setting}, {schedule}: {line['side']}: a loss differs by {line['loss_difference']:.1e}")
    return lines


def lines_to_keep(name: str, lines: Sequence[Line]) -> list[Line]:
    """Lines of other settings and schedules in a results file that was taken at the same commit."""
    path = results_file.FOLDER / f"{name}.json"
    header = results_file.make_header("pipeline")
    if not path.exists() or results_file.read_header(path) != header:
        return []
    measured = {(line["setting"], line["schedule"]) for line in lines}
    return [line for line in results_file.read(path) if (line["setting"], line["schedule"]) not in measured]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--on", nargs="*", default=list(SETTINGS), choices=SETTINGS, metavar="SETTING")
    parser.add_argument("--schedules", nargs="*", default=list(NUM_CHUNKS), choices=NUM_CHUNKS, metavar="NAME")
    parser.add_argument(
        "--write",
        default="",
        help="name of a file in benchmarks/results; its lines of other settings and schedules "
        "stay if they were measured at the same commit",
    )
    parser.add_argument("--smoke", action="store_true", help="the smallest case, to see that it runs")
    args = parser.parse_args()
    if args.smoke:
        args.on, args.rounds = [SMALLEST], 1
    lines: list[Line] = []
    for setting in args.on:
        for schedule in args.schedules:
            for line in measure_setting(setting, schedule, args.rounds):
                lines.append(line)
                print(json.dumps(line), flush=True)
    if args.write:
        results_file.write(args.write, "pipeline", [*lines_to_keep(args.write, lines), *lines])
    return 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())

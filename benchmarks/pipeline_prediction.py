"""How well the planner predicts a pipeline's step and bubble: GPT over four hosts in the lab.

    python -m benchmarks.pipeline_prediction [--uplinks RATE ...] [--micro-batches N ...] [--steps N] [--write NAME]

As root. For each uplink rate a lab of 4 hosts x 1 rank with 0.45 of a core each is created and measured by `shardwright
measure`. In it `shardwright train gpt plan.cluster=FILE plan.pipeline=4` runs for each number of micro-batches: with 4
the planner interleaves chunks, with 5, which 4 ranks do not divide, it cannot. The model has 67 M parameters in 16
blocks. A micro-batch has 16 sequences of 32 tokens, so that a pass is long compared with the 5 ms periods of CPU
quotas, which the planner does not know. Each run is repeated once; the ratio of both steps is the A/A floor.

A JSON line per run: the mean step from metrics.jsonl and the predicted step, in ms, and `off`, their ratio - 1; the
first rank's bubble, from the trace and predicted, and `bubble_off`, the ratio of both - 1; `closed_form`: (p - 1) / (v
m); `longest_chunk`: predicted passes of the slowest rank / mean of all ranks, 1 if the cuts are even; `message_share`:
seconds of the messages of a micro-batch at a link's rate / seconds of its passes on a rank. Hosts, links and CPU quotas
are emulated.
"""

import argparse
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import mean, median
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks import results_file
from benchmarks.recipes import LOG_EVERY, run_training, step_seconds
from benchmarks.sharding import measure
from shardwright.lab.emulated_cluster import Lab
from shardwright.lab.shape import Host, Shape, parse_bits_per_second
from shardwright.report import step_times
from shardwright.report.bubble import bubble_ratio, passes_by_step
from shardwright.spec import files
from shardwright.spec.plan import Plan
from shardwright.spec.timeline import Timeline

NUM_RANKS, CPU = 4, 0.45
CHANNELS, LENGTH = 512, 32
MODEL = (
    f"model.channels={CHANNELS}",
    "model.num_blocks=16",
    "model.num_heads=8",
    "model.hidden=1376",
    "dense.fused=true",
)
SEQUENCES_OF_A_MICRO_BATCH = 16
MESSAGE_BYTES = 4 * SEQUENCES_OF_A_MICRO_BATCH * LENGTH * CHANNELS


def compare_run(path: Path, uplink: str) -> dict[str, Any]:
    """Predicted and measured step and bubble of a run."""
    plan = files.read(Plan, path / "plan.json")
    predicted = Timeline.from_chrome((path / "predicted.json").read_text())
    measured = Timeline.from_chrome((path / "trace.json").read_text())
    assert plan.pipeline is not None
    seconds, halves = step_seconds(path)
    predicted_seconds = median(step_times.step_seconds(predicted))
    step = step_times.complete_steps(predicted)[-1]
    busy = [passes_by_step(predicted, rank)[step].busy for rank in range(NUM_RANKS)]
    num_chunks, micro_batches = len(plan.pipeline.blocks) // NUM_RANKS, plan.pipeline.micro_batches
    message_seconds = 8 * MESSAGE_BYTES * num_chunks / parse_bits_per_second(uplink)
    bubbles = [bubble_ratio(timeline) for timeline in (predicted, measured)]
    return {
        "schedule": plan.pipeline.schedule,
        "blocks": plan.pipeline.blocks,
        "micro_batches": micro_batches,
        "predicted_ms": round(1e3 * predicted_seconds, 1),
        "measured_ms": round(1e3 * seconds, 1),
        "off": round(predicted_seconds / seconds - 1, 4),
        "halves_ms": [round(1e3 * half, 1) for half in halves],
        "predicted_bubble": round(bubbles[0], 4),
        "measured_bubble": round(bubbles[1], 4),
        "bubble_off": round(bubbles[0] / bubbles[1] - 1, 4),
        "closed_form": round((NUM_RANKS - 1) / (num_chunks * micro_batches), 4),
        "longest_chunk": round(max(busy) / mean(busy), 4),
        "message_share": round(2 * message_seconds * micro_batches / mean(busy), 4),
    }


def run_uplink(uplink: str, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    shape = Shape((Host(uplink=uplink, cpu=CPU),) * NUM_RANKS)
    with TemporaryDirectory() as folder, Lab(shape, "prediction") as lab:
        cluster = Path(folder) / "cluster.toml"
        measure(lab, cluster)
        runs = Path(folder) / "runs"
        runs.mkdir()
        for micro_batches in args.micro_batches:
            case = {"benchmark": "pipeline_prediction", "emulated": "hosts, links, CPU quotas", "uplink": uplink}
            keys = [
                *MODEL,
                *(f"plan.cluster={cluster}", f"plan.pipeline={NUM_RANKS}", f"plan.micro_batches={micro_batches}"),
                *(f"data.length={LENGTH}", f"train.batch_size={SEQUENCES_OF_A_MICRO_BATCH * micro_batches}"),
                f"train.steps={args.steps}",
            ]
            steps_ms: list[float] = []
            for run in ("first", "again"):
                path = run_training(lab, runs, "gpt", keys)
                if isinstance(path, str):
                    raise SystemExit(f"{uplink}, {micro_batches} micro-batches: {path}")
                line: dict[str, Any] = case | {"run": run} | compare_run(path, uplink)
                steps_ms.append(line["measured_ms"])
                yield line | {"over_first": round(steps_ms[-1] / steps_ms[0], 4)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--uplinks", nargs="*", default=["500mbit", "250mbit"], metavar="RATE")
    parser.add_argument("--micro-batches", nargs="*", type=int, default=[5, 4], metavar="N")
    parser.add_argument("--steps", type=int, default=5 * LOG_EVERY)
    parser.add_argument("--write", default="", help="name of a file in benchmarks/results")
    parser.add_argument("--smoke", action="store_true", help="the smallest case, to see that it runs")
    args = parser.parse_args()
    if args.smoke:
        args.uplinks, args.micro_batches, args.steps = args.uplinks[:1], [4], 3 * LOG_EVERY
    lines: list[dict[str, Any]] = []
    for uplink in args.uplinks:
        for line in run_uplink(uplink, args):
            lines.append(line)
            print(json.dumps(line), flush=True)
    if args.write:
        results_file.write(args.write, "pipeline_prediction", lines)
    return 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())

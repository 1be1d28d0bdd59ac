"""The planner's steps and memory for models of layers beside other groups' published runs, without any fit to them.

    python -m benchmarks.layer_published [--write NAME]

Computed, nothing is run: runs of Megatron-LM on A100 and H100, of Llama 3, DeepSeek-V3 and torchtitan
(benchmarks/published_runs.py) are predicted with presets whose shares of the peak are fitted on Kuaishou's H800
(benchmarks.layer_calibration). A JSON line per run: published and predicted step in seconds, share of the peak and
memory of the fullest rank, their errors, the error if collectives of gradients and weights were wholly hidden
(`error_if_hidden_percent`), the error by another reading of the source, parts of the predicted step in percent, and how
the run is unlike what is predicted. Where a source does not give micro-batch and chunks, those that are predicted
fastest are taken (`open_settings`). Last line: mean errors by source, with and without their signs, and
`products_share`: the share of the peak that products would have to reach for the predicted step to be right, all else
as predicted; 0: no share does.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from benchmarks import results_file
from benchmarks.published_runs import SOURCES, Run, published_runs
from shardwright.planner.layers.degrees import even_cuts
from shardwright.planner.layers.layer_time import DTYPE, LayerTimer
from shardwright.planner.layers.memory import stage_memory
from shardwright.planner.layers.step_time import StepSeconds, step_parts, step_seconds
from shardwright.planner.price import primitives

GIB = 2**30
METRICS = (
    ("step", "error_percent"),
    ("step_if_hidden", "error_if_hidden_percent"),
    ("step_by_other_reading", "other_reading_error_percent"),
    ("memory", "memory_error_percent"),
)


def open_settings(run: Run) -> Iterator[Run]:
    """The run with every micro-batch and number of equal chunks that divide, and with or without recomputation."""
    pipeline, layers = run.degrees.pipeline, run.model.layers
    own = run.batch.sequences // run.degrees.data
    for micro in (size for size in (1, 2, 4, 8) if own % size == 0):
        for num in range(1, layers // pipeline + 1 if pipeline > 1 else 2):
            if layers % (num * pipeline) or (num > 1 and own // micro % pipeline):
                continue
            for recompute in ("none", "full"):
                degrees = replace(run.degrees, cuts=even_cuts(layers, num * pipeline), recompute=recompute)
                yield replace(run, degrees=degrees, batch=replace(run.batch, micro_sequences=micro))


def memory_bytes(run: Run) -> float:
    """Of the fullest rank, without offload."""
    degrees = replace(run.degrees, offload=(0.0,) * run.degrees.pipeline)
    return max(stage.total for stage in stage_memory(run.model, run.batch, degrees, 0.0, run.attention))


def predict(run: Run) -> tuple[LayerTimer, StepSeconds]:
    timer = LayerTimer(run.model, run.batch, run.degrees, run.cluster)
    return timer, step_seconds(timer)


def choose(run: Run) -> Run:
    """With the open settings that are predicted fastest among those that fit."""
    if not run.is_open:
        return run
    limit = run.cluster.device.tiers[0].bytes_
    fitting = [each for each in open_settings(run) if memory_bytes(each) <= limit]
    return min(fitting, key=lambda each: predict(each)[1].total)


def result_line(run: Run) -> dict[str, Any]:
    chosen, degrees = choose(run), run.degrees
    line: dict[str, Any] = {"benchmark": "layer_published", "source": run.source, "model": run.model.name}
    line |= {"ranks": degrees.num_ranks, "length": run.batch.length, "sequences": run.batch.sequences}
    line |= {"tensor": degrees.tensor, "context": degrees.context, "pipeline": degrees.pipeline, "data": degrees.data}
    line |= {"micro": chosen.batch.micro_sequences, "chunks": chosen.degrees.num_chunks}
    line |= {"recompute": chosen.degrees.recompute, "open_settings": run.is_open}
    if run.seconds:
        line |= _step(chosen)
    if run.gib:
        predicted = memory_bytes(chosen) / GIB
        line |= {"published_gib": run.gib, "predicted_gib": predicted}
        line |= {"memory_error_percent": 100 * (predicted / run.gib - 1)}
    line["unlike"] = run.unlike
    return {key: round(value, 3) if isinstance(value, float) else value for key, value in line.items()}


def _step(run: Run) -> dict[str, Any]:
    timer, step = predict(run)
    parts = step_parts(timer, step)
    price = primitives.find_price(timer.cluster.device, "matmul", DTYPE)
    share = 1 / (price.seconds_per_flop * timer.cluster.device.peak_flops_per_second)
    needed = run.seconds - (step.total - parts["products"])
    line: dict[str, Any] = {"published_s": run.seconds, "predicted_s": step.total}
    line |= {"error_percent": 100 * (step.total / run.seconds - 1)}
    line |= {"error_if_hidden_percent": 100 * ((step.total - step.gradients) / run.seconds - 1)}
    if run.other_seconds:
        line |= {"other_reading_s": run.other_seconds}
        line |= {"other_reading_error_percent": 100 * (step.total / run.other_seconds - 1)}
    if run.percent:
        line |= {"published_percent": run.percent, "predicted_percent": run.percent * run.seconds / step.total}
    line |= {"products_share": share * parts["products"] / needed if needed > 0 else 0.0}
    return line | {"parts_percent": {name: round(100 * part / step.total, 1) for name, part in parts.items() if part}}


def summary(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    last: dict[str, Any] = {"benchmark": "layer_published"}
    for source, title in SOURCES.items():
        own = [line for line in lines if line["source"] == source]
        if not own:
            continue
        last[source] = {"title": title}
        for name, key in METRICS:
            if values := [line[key] for line in own if key in line]:
                last[source] |= {f"num_{name}": len(values)}
                last[source] |= {f"mean_{name}_error_percent": round(sum(map(abs, values)) / len(values), 1)}
                last[source] |= {f"mean_signed_{name}_error_percent": round(sum(values) / len(values), 1)}
        if shares := [line["products_share"] for line in own if line.get("products_share")]:
            last[source]["median_products_share"] = round(median(shares), 3)
    return last


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", default="", help="name of a file in benchmarks/results")
    parser.add_argument("--smoke", action="store_true", help="the smallest case, to see that it runs")
    args = parser.parse_args(arguments)
    runs, lines = published_runs(), list[dict[str, Any]]()
    for number, run in enumerate(runs[:3] if args.smoke else runs, 1):
        lines.append(result_line(run))
        print(json.dumps(lines[-1]), flush=True)
        print(f"{number} of {len(runs)}", file=sys.stderr)
    lines.append(summary(lines))
    print(json.dumps(lines[-1]), flush=True)
    if args.write:
        results_file.write(args.write, "layer_published", lines)
    return 0


if __name__ == "__main__":
    sys.exit(main())

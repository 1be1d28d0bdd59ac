"""The rank of Kuaishou's published configurations of Llamas among all that fit, as the planner orders them.

    python -m benchmarks.layer_ranks [--write NAME] [--rows FIRST:LAST] [--left-out]

Computed, nothing is run: for each of the 21 rows of benchmarks/published_layers.py, all configurations of its model and
batch on its GPUs are searched with ZeRO-1, the preset h800-256 and the memory that Kuaishou's formula allows. A JSON
line per row: the rank of the published one (1: predicted fastest), how many fit, and by how many percent its predicted
step is longer than the shortest. Last line: the share of rows in the first one, three, five and ten, and the largest
and mean excess. The preset's constants are fitted to all rows; with --left-out they are fitted to the other rows only.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from benchmarks import results_file
from benchmarks.layer_calibration import Constants, fit
from benchmarks.published_layers import LIMIT, PUBLISHED, Published
from shardwright.planner.layers.layer_search import LayerSplit, SplitPins, Training, search
from shardwright.planner.layers.layer_time import Overheads
from shardwright.spec import presets
from shardwright.spec.cluster import Cluster

FIRST = (1, 3, 5, 10)


def machine(row: Published, is_left_out: bool) -> tuple[Cluster, Overheads]:
    """The preset, or with constants fitted to the other rows."""
    if not is_left_out:
        return presets.load_cluster("h800-256"), Overheads()
    constants = fit([other for other in PUBLISHED if other != row], Constants())
    return constants.cluster(), Overheads(constants.exposed, 1e-3 * constants.chunk_ms)


def result_line(row: Published, is_left_out: bool) -> dict[str, Any]:
    cluster, overheads = machine(row, is_left_out)
    host, pins = cluster.device.tiers[1].bytes_, SplitPins(zero=1)
    sizes = row.sequences, row.length, row.ranks
    splits = search(Training(row.transformer, *sizes, cluster, LIMIT, host, overheads, pins=pins)).splits
    position = next(position for position, split in enumerate(splits) if is_published(split, row))
    best, published = splits[0], splits[position]
    excess = 100 * (published.step.total / best.step.total - 1)
    line = {"benchmark": "layer_ranks", "model": row.model, "length": row.length, "ranks": row.ranks}
    line |= {"left_out": is_left_out}
    line |= {"rank": position + 1, "fitting": len(splits), "excess_percent": round(excess, 3)}
    return line | {"published": describe(published), "predicted_best": describe(best)}


def is_published(split: LayerSplit, row: Published) -> bool:
    return split.batch == row.batch and replace(split.degrees, offload=()) == row.degrees


def describe(split: LayerSplit) -> dict[str, Any]:
    degrees = split.degrees
    sizes = {"tensor": degrees.tensor, "context": degrees.context, "pipeline": degrees.pipeline, "data": degrees.data}
    sizes |= {"chunks": degrees.num_chunks, "micro": split.batch.micro_sequences}
    offload = round(max(degrees.offload), 3)
    return {**sizes, "recompute": degrees.recompute, "offload": offload, "seconds": round(split.step.total, 3)}


def summary(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    last: dict[str, Any] = {"benchmark": "layer_ranks", "rows": len(lines)}
    for num in FIRST:
        last[f"first_{num}_percent"] = round(100 * sum(line["rank"] <= num for line in lines) / len(lines), 1)
    excesses = [line["excess_percent"] for line in lines]
    return last | {"mean_excess_percent": round(sum(excesses) / len(lines), 2), "max_excess_percent": max(excesses)}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", default="", help="name of a file in benchmarks/results")
    parser.add_argument("--rows", default=":", help="some rows only, as FIRST:LAST, from 0")
    parser.add_argument("--left-out", action="store_true", help="constants fitted to the other rows")
    parser.add_argument("--smoke", action="store_true", help="the smallest case, to see that it runs")
    args = parser.parse_args(arguments)
    first, last = (int(number) if number else None for number in args.rows.split(":"))
    rows, lines = PUBLISHED[12:13] if args.smoke else PUBLISHED[first:last], list[dict[str, Any]]()
    for number, row in enumerate(rows, 1):
        lines.append(result_line(row, args.left_out))
        print(json.dumps(lines[-1]), flush=True)
        print(f"{number} of {len(rows)}", file=sys.stderr)
    lines.append(summary(lines))
    print(json.dumps(lines[-1]), flush=True)
    if args.write:
        results_file.write(args.write, "layer_ranks", lines)
    return 0


if __name__ == "__main__":
    sys.exit(main())

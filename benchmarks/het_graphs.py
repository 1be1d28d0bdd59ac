"""HET's topology on graphs: sampled neighborhoods of GraphSAGE, whose workers train nodes of their own partitions.

    python -m benchmarks.het_graphs [--graph NAME ...] [--scale SCALE] [--copies SHARE] [--rates RATE ...]
        [--sides SIDE ...] [--rounds N] [--cluster FOLDER] [--write NAME]

As root. Sides, lab, turns and lines are those of benchmarks.het_servers: 8 workers with 0.2 core and one server. Graphs
are generated (degree-corrected block models) with the nodes, degrees and fields of HET's datasets, and scaled down; a
first line for each graph has their sizes, the share of edges between partitions, and the distinct rows of a batch:
    reddit    233 thousand nodes, mean degree 492, 1 field: the node itself; an eighth of the nodes
    amazon    2.45 million nodes, mean degree 50, 17 fields: the node and 16 words; a tenth
    ogbn-mag  736 thousand nodes, mean degree 15, 21 fields: the node, 10 fields of study, 10 authors; a quarter
The graph is divided into 8 partitions with few edges between them (data/graphs/partition.py), as HET does with METIS.
128 nodes a worker, two of their neighbors and two of each of these: 896 positions, drawn anew for each batch, of which
400 are used in a cycle. All tables have 128 columns. Copies: SHARE of the rows of each table, on each worker; where
workers own the rows, each has as many of them in memory, and small tables whole (a tenth of the largest or less).

Last lines for each graph: the planner's steps at the first rate for tables of this size (`predicted_ms`) and of the
full size (`predicted_full_ms`), and speed over its step with a single copy of a row in each table, which is "no cache".
The planner knows the distribution of the first worker's lookups, and takes those of the others to be the same rows.
"""

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks import results_file
from benchmarks.graph_streams import SHAPES, GraphStream
from benchmarks.het import CPU, NUM_BATCHES, RANKS
from benchmarks.het_servers import FREE_RATE, result_lines, run_sides
from benchmarks.het_sides import BASE, SIDES, predict, predict_no_cache
from benchmarks.sharding import measure
from shardwright.lab.emulated_cluster import Lab
from shardwright.lab.shape import Host, Shape
from shardwright.spec import presets

RATES = {"reddit": ["100mbit", "25mbit"], "amazon": ["250mbit", "60mbit"], "ogbn-mag": ["250mbit", "60mbit"]}


def run(stream: GraphStream, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    first = {"benchmark": "het_graphs", "graph": stream.name}
    yield first | stream.draw()
    cluster = Path(args.cluster or stream.folder, f"{stream.name}-{args.rates[0]}.toml")
    if not cluster.exists():
        with Lab(Shape((Host(uplink=args.rates[0], cpu=CPU),) * RANKS), "het") as lab:
            measure(lab, cluster)
    replies = run_sides(stream, str(cluster), args)
    for rate, own in replies.items():
        for line in result_lines(rate, own, replies[FREE_RATE], args.steps):
            yield first | line
    full = replace(stream, repeats=round(1 / stream.scale))
    for line in predicted_lines(stream, full, presets.load_cluster(str(cluster))):
        yield first | {"rate": args.rates[0]} | line


def predicted_lines(stream: GraphStream, full: GraphStream, cluster: Any) -> Iterator[dict[str, Any]]:
    """The planner's steps for the scaled and the full tables."""
    steps = [predict(task, cluster) | {BASE: predict_no_cache(task, cluster)} for task in (stream, full)]
    for side in steps[0]:
        scaled_ms, full_ms = (float(each[side]) for each in steps)
        line: dict[str, Any] = {"side": f"predicted: {side}", "full_rows": sum(full.rows.values())}
        line |= {"predicted_ms": round(scaled_ms, 1), "predicted_full_ms": round(full_ms, 1)}
        line |= {"predicted_over_no_cache": round(steps[0][BASE] / scaled_ms, 2)}
        yield line | {"predicted_full_over_no_cache": round(steps[1][BASE] / full_ms, 2)}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graph", nargs="*", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--scale", type=float, default=0.0, help="of the nodes and rows; 0: of the graph (see above)")
    parser.add_argument("--copies", type=float, default=0.1, metavar="SHARE", help="of the rows, on each worker")
    parser.add_argument("--rates", nargs="*", default=[], help="of the links; default: of the graph")
    parser.add_argument("--sides", nargs="*", choices=SIDES, default=SIDES)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=6, help="of a turn")
    parser.add_argument("--cluster", default="", metavar="FOLDER", help="with GRAPH-RATE.toml; measured if missing")
    parser.add_argument("--write", default="", help="name of a file in benchmarks/results")
    parser.add_argument("--smoke", action="store_true", help="the smallest case, to see that it runs")
    args = parser.parse_args(arguments)
    args.sides, given = [side for side in SIDES if side in {BASE, *args.sides}], args.rates
    args.links, args.workers = "all", RANKS
    if args.smoke:
        args.graph, args.scale, args.copies, given, args.rounds, args.steps = ["reddit"], 0.01, 0.5, ["1gbit"], 1, 2
    lines: list[dict[str, Any]] = []
    for name in args.graph:
        args.rates = given or RATES[name]
        with TemporaryDirectory() as folder:
            num_batches = 20 if args.smoke else NUM_BATCHES
            stream = GraphStream(name, args.scale or SHAPES[name].scale, args.copies, folder, num_batches)
            for line in run(stream, args):
                lines.append(line)
                print(json.dumps(line), flush=True)
    if args.write:
        results_file.write(args.write, "het_graphs", lines)
    return 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())

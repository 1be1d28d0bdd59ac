"""Accuracy of GraphSAGE on citation, co-author and co-purchase graphs, beside published values under the same protocol.

    python -m benchmarks.graph_accuracy FOLDER [--graphs cora citeseer] [--seeds N] [--write NAME]

FOLDER has the graphs as NAME.npz. The protocol is that of Shchur et al., "Pitfalls of Graph Neural Network Evaluation"
(2018): the largest connected component, 20 training and 30 validation nodes of each class, all others for the test, and
the state with the least validation loss. Here each seed has its own parts, weights and draws. A JSON line per run, then
mean and standard deviation of the accuracy over drawn and over all neighbors.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from statistics import mean, stdev
from time import perf_counter

import numpy as np

from benchmarks import results_file
from shardwright import config
from shardwright.data.graphs.graph import Graph
from shardwright.data.graphs.graph_files import read_graph
from shardwright.runtime.run import train

PUBLISHED = {"cora": 79.2, "citeseer": 71.6, "coauthor_phy": 93.0, "amazon_photo": 91.4}  # GraphSAGE with means
SOURCE = "Shchur et al. 2018, 100 splits, 20 seeds each"
SETTINGS = (
    *("data.split.largest_component=true", "train.steps=400", "train.eval_every=10", "train.patience=10"),
    "train.log_every=50",
)
FIGURES = ("accuracy", "accuracy_all_neighbors")


def run(name: str, path: str, seed: int, directory: str, overrides: list[str]) -> dict:
    settings = [*SETTINGS, *overrides, f"data={path}", f"seed={seed}", f"run.directory={directory}"]
    start = perf_counter()
    result = train.train(config.load("graphsage", settings))
    accuracies = {figure: result.evaluation[figure] for figure in FIGURES}
    return {"graph": name, "seed": seed, "step": result.step} | accuracies | {"seconds": perf_counter() - start}


def summary(name: str, runs: list[dict]) -> dict:
    """Percent: mean and standard deviation over seeds."""
    row: dict = {"graph": name, "seeds": len(runs)}
    for figure in FIGURES:
        values = [100 * line[figure] for line in runs]
        row[figure] = [round(mean(values), 2), round(stdev(values), 2) if len(values) > 1 else None]
    return row | {"published": PUBLISHED.get(name), "source": SOURCE}


def smoke_graph(path: Path) -> None:
    """Three communities on a ring, with words of their own."""
    rng, labels = np.random.default_rng(0), np.arange(240) % 3
    edges = [(a, (a + step) % 240) for a in range(240) for step in (1, 3, 6)]
    sizes = np.bincount([a for a, _ in edges], minlength=240)
    np.savez(
        path,
        labels=labels,
        adj_indptr=np.concatenate([[0], sizes.cumsum()]),
        adj_indices=[b for _, b in edges],
        feat_indptr=np.arange(241),
        feat_indices=labels * 10 + rng.integers(0, 15, 240),
    )


def describe(graph: Graph) -> dict:
    return {"nodes": graph.num_nodes, "edges": len(graph.neighbors.values) // 2, "words": graph.num_words}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", default="", help="folder of the graphs")
    parser.add_argument("--graphs", nargs="+", default=list(PUBLISHED))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--set", nargs="+", default=[], help="further settings KEY=VALUE")
    parser.add_argument("--write", default="", help="name of a file in benchmarks/results")
    parser.add_argument("--smoke", action="store_true", help="the smallest case, to see that it runs")
    args = parser.parse_args()
    if not (args.folder or args.smoke):
        parser.error("give the folder of the graphs, or --smoke")
    lines, rows = [], []
    with tempfile.TemporaryDirectory() as directory:
        if args.smoke:
            args.folder, args.graphs, args.seeds, args.set = directory, ["smoke"], 2, ["train.steps=20"]
            smoke_graph(Path(directory) / "smoke.npz")
        for name in args.graphs:
            path = f"{args.folder}/{name}.npz"
            print(json.dumps({"graph": name} | describe(read_graph(path))), flush=True)
            for seed in range(1, 1 + args.seeds):
                lines.append(run(name, path, seed, directory, args.set))
                print(json.dumps(lines[-1]), flush=True)
            rows.append(summary(name, [line for line in lines if line["graph"] == name]))
            print(json.dumps(rows[-1]), flush=True)
            if args.write:
                results_file.write(args.write, "graph_accuracy", [*lines, *rows])
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Predicted against measured: 60 random micro workloads on an emulated cluster, priced only from its measurements.

    python -m benchmarks.cost_model [--uplink RATE ...] [--seed N] [--write NAME] [--page FILE.html]

Run as root. For each uplink rate a lab of 2 hosts x 2 ranks with 0.4 of a core each is created, `shardwright measure`
measures it five times into one file, and the file's digest is printed. Then workloads are drawn (collectives, uneven
all-to-alls, products, random rows, collectives overlapped with products), predicted, and run: the median of seven
rounds of 0.4 s each. The difference between the first and the last three rounds bounds the accuracy of any prediction.
After the 1 Gbit/s lab another one is created that was never measured, 3 hosts x 1 rank at 500 Mbit/s: its collectives
are predicted from the measurements of the first. A JSON line per workload, one per lab, one for all.
"""

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks import results_file
from shardwright.lab.emulated_cluster import Lab
from shardwright.lab.shape import Host, Shape, parse_bits_per_second
from shardwright.planner.price import primitives
from shardwright.spec import files
from shardwright.spec.cluster import Cluster, Level

UPLINKS = ("200mbit", "1gbit", "")
UNSEEN_UPLINK = "500mbit"
CPU = 0.4
OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "one_to_many", "many_to_one")
NUM_MEASUREMENTS = 5  # of a lab, into one file
ROUNDS, WINDOW_SECONDS = 7, 0.4
MAX_SECONDS = 0.25  # of a workload, as predicted
NAME = "costs"

# Kinds of the workloads drawn for a lab; "beside": a collective overlapped with products
KINDS = ["collective"] * 24 + ["all_to_all_v"] * 10 + ["matmul"] * 10 + ["rows"] * 6 + ["beside"] * 10

Work = dict[str, Any]


def draw_workloads(rng: random.Random, cluster: Cluster, kinds: Sequence[str]) -> Iterator[Work]:
    """Workloads of these kinds, none of which was measured."""
    for kind in kinds:
        while True:
            workload = {"kind": kind} | DRAWS[kind](rng, cluster)
            if predict(cluster, workload).seconds < MAX_SECONDS:
                break
        yield workload


def draw_collective(rng: random.Random, cluster: Cluster, min_bytes: int = 4096) -> Work:
    names = [level.name for level in cluster.levels]
    levels = rng.choice([names, *([name] for name in names)] if len(names) > 1 else [names])
    return {"op": rng.choice(OPS), "levels": levels, "bytes": int(log_uniform(rng, min_bytes, 8 << 20)) // 64 * 64}


def draw_uneven(rng: random.Random, cluster: Cluster) -> Work:
    """Bytes by source and target: some ranks send more, some receive more, one pair exchanges nothing."""
    num = cluster.num_ranks
    scale = log_uniform(rng, 16 << 10, 2 << 20)
    sends, receives = ([log_uniform(rng, 0.25, 4) for _ in range(num)] for _ in range(2))
    matrix = [[int(scale * sends[i] * receives[j] * rng.uniform(0.5, 1.5)) for j in range(num)] for i in range(num)]
    matrix[rng.randrange(num)][rng.randrange(num)] = 0
    return {"traffic": matrix}


def draw_product(rng: random.Random, cluster: Cluster) -> Work:
    """A product with the shape of a layer's: any batch size, widths in multiples of 16."""
    widths = [16 * int(log_uniform(rng, 2, 48)) for _ in range(2)]
    return {"sizes": [int(log_uniform(rng, 64, 4096)), *widths]}


def draw_rows(rng: random.Random, cluster: Cluster) -> Work:
    num = int(log_uniform(rng, 4096, 65536)) // 8 * 8
    return {
        "op": rng.choice(("gather", "rewrite", "lookup", "update")),
        "num": num,
        "row_bytes": 16 * rng.randint(3, 72),
    }


def draw_overlapped(rng: random.Random, cluster: Cluster) -> Work:
    """A message of four bursts or more, overlapped with products that take 0.3 to 2 times as long."""
    workload = draw_collective(rng, cluster, 512 << 10) | draw_product(rng, cluster)
    message_seconds = predict(cluster, {"kind": "collective"} | workload).seconds
    product_seconds = predict(cluster, {"kind": "matmul"} | workload).seconds
    return workload | {"times": max(1, round(rng.uniform(0.3, 2.0) * message_seconds / product_seconds))}


DRAWS = {
    "collective": draw_collective,
    "all_to_all_v": draw_uneven,
    "matmul": draw_product,
    "rows": draw_rows,
    "beside": draw_overlapped,
}


def log_uniform(rng: random.Random, low: float, high: float) -> float:
    return float(np.exp(rng.uniform(np.log(low), np.log(high))))


def predict(cluster: Cluster, workload: Work) -> primitives.Cost:
    match workload["kind"]:
        case "collective":
            return primitives.collective_cost(cluster, workload["op"], workload["levels"], workload["bytes"])
        case "all_to_all_v":
            return primitives.all_to_all_v_cost(
                cluster, [level.name for level in cluster.levels], np.array(workload["traffic"], float)
            )
        case "matmul":
            m, k, n = workload["sizes"]
            return primitives.matmul_cost(cluster.device, m, k, n)
        case "rows":
            return primitives.row_access_cost(cluster.device, workload["op"], workload["num"], workload["row_bytes"])
        case _:
            compute = workload["times"] * primitives.matmul_cost(cluster.device, *workload["sizes"]).seconds
            return primitives.overlapped_cost(cluster, workload["op"], workload["levels"], workload["bytes"], compute)


def worker(workloads: list[Work], output: Path) -> None:
    """Run the workloads on every rank; rank 0 writes the seconds of each, by round."""
    import torch

    from shardwright.measure.machine import measurement_mesh
    from shardwright.measure.timing import Clock

    with measurement_mesh() as mesh:
        clock = Clock(mesh.group(), torch.device("cpu"), WINDOW_SECONDS, retry_seconds=30.0)
        memory = None
        if any(workload["kind"] == "rows" for workload in workloads):
            from shardwright.measure.device import allocate_table_memory

            memory = allocate_table_memory(mesh.device)
        seconds: list[list[float]] = [[] for _ in workloads]
        for _ in range(ROUNDS):
            for workload, times in zip(workloads, seconds, strict=True):
                communicates = workload["kind"] not in ("matmul", "rows")
                times.append(clock.sample((1,), prepare_call(workload, mesh, memory), slowest=communicates).seconds)
        if mesh.rank == 0:
            output.write_text(json.dumps(seconds))


def prepare_call(workload: Work, mesh: Any, memory: Any) -> Any:
    import torch

    from shardwright.comm import collective as comm
    from shardwright.measure import device, network

    match workload["kind"]:
        case "matmul":
            m, k, n = workload["sizes"]
            return device.matmul_call(m, k, n, torch.float32, mesh.device)
        case "rows":
            return device.random_row_calls(workload["op"], memory, workload["num"], workload["row_bytes"])
        case "all_to_all_v":
            send_sizes = workload["traffic"][mesh.rank]
            receive_sizes = [row[mesh.rank] for row in workload["traffic"]]
            x = torch.zeros(sum(send_sizes), dtype=torch.uint8)
            return lambda: comm.all_to_all(x, send_sizes, receive_sizes, mesh.group()).wait()
    start = network.prepare_collective(workload["op"], workload["bytes"], mesh.group(workload["levels"]), mesh.device)
    if workload["kind"] != "beside":
        return lambda: start().wait()
    m, k, n = workload["sizes"]
    multiply = device.matmul_call(m, k, n, torch.float32, mesh.device)

    def run_overlapped() -> None:
        pending = start()
        for _ in range(workload["times"]):
            multiply()
        pending.wait()

    return run_overlapped


def run_in_lab(lab: Lab, *command: str) -> None:
    result = lab.run([sys.executable, *command], on_line=lambda rank, line: print(f"[{rank}] {line}", file=sys.stderr))
    if result.rank is not None:
        sys.exit(f"rank {result.rank} ended with status {result.status}")


def measure_workloads(lab: Lab, cluster: Cluster, workloads: list[Work], folder: Path, about: Work) -> list[Work]:
    """Predict each workload, then run it; returns and prints both."""
    lines = [
        {"work": work, "predicted": (cost := predict(cluster, work)).seconds, "basis": cost.basis} for work in workloads
    ]
    (folder / "works.json").write_text(json.dumps(workloads))
    run_in_lab(lab, "-m", "benchmarks.cost_model", "--worker", str(folder))
    for line, seconds in zip(lines, json.loads((folder / "seconds.json").read_text()), strict=True):
        line |= about | {"measured": median(seconds), "rounds": seconds}
        print(json.dumps({"benchmark": "cost_model"} | line), flush=True)
    return lines


def summary(lines: list[Work], about: Work) -> Work:
    ratio = np.array([line["predicted"] / line["measured"] for line in lines])
    logs = np.log([[line["predicted"], line["measured"]] for line in lines])
    predicted, actual = np.array([[line["predicted"], line["measured"]] for line in lines]).T
    residual, total = (((predicted - actual) ** 2).sum(), ((actual - actual.mean()) ** 2).sum())
    spreads = [max(line["rounds"]) / min(line["rounds"]) - 1 for line in lines]
    repeat_errors = [abs(median(line["rounds"][:3]) / median(line["rounds"][-3:]) - 1) for line in lines]
    kinds = sorted({line["work"]["kind"] for line in lines})
    by_kind = {kind: mean_error([line for line in lines if line["work"]["kind"] == kind]) for kind in kinds}
    return about | {
        "workloads": len(lines),
        "mean_absolute_error": round(float(np.abs(ratio - 1).mean()), 4),
        "median_absolute_error": round(float(np.median(np.abs(ratio - 1))), 4),
        "r2": round(float(1 - residual / total), 4),
        "r2_of_logarithms": round(float(np.corrcoef(logs.T)[0, 1] ** 2), 4),
        "median_spread_of_rounds": round(median(spreads), 4),
        "first_rounds_against_last": round(float(np.mean(repeat_errors)), 4),
        "by_kind": by_kind,
    }


def mean_error(lines: list[Work]) -> float:
    return round(float(np.mean([abs(line["predicted"] / line["measured"] - 1) for line in lines])), 4)


def measure_lab(
    uplink: str, seed: int, folder: Path, repeats: int, kinds: Sequence[str]
) -> Iterator[tuple[Work, list[Work]]]:
    """Measure the lab of 2 x 2 ranks and run its workloads; after 1 Gbit/s also those of the lab never measured."""
    path = folder / "cluster.toml"
    path.unlink(missing_ok=True)
    with Lab(Shape((Host(ranks=2, uplink=uplink, cpu=CPU),) * 2), NAME) as lab:
        for _ in range(repeats):
            run_in_lab(lab, "-m", "shardwright.cli", "measure", "-o", str(path))
        cluster = files.read(Cluster, path)
        about = {"uplink": uplink or "unshaped", "lab": "2 x 2", "cluster": cluster.digest()}
        workloads = list(draw_workloads(random.Random(seed), cluster, kinds))
        yield about, measure_workloads(lab, cluster, workloads, folder, about)
    if uplink == "1gbit":
        yield measure_unseen_lab(cluster, seed, folder)


def measure_unseen_lab(cluster: Cluster, seed: int, folder: Path) -> tuple[Work, list[Work]]:
    network = cluster.levels[-1]
    share = network.bytes_per_second / parse_bits_per_second("1gbit")
    level = Level(network.name, 3, network.latency_seconds, share * parse_bits_per_second(UNSEEN_UPLINK))
    unseen_cluster = primitives.scale_cluster(cluster, (level,))
    about = {"uplink": UNSEEN_UPLINK, "lab": "3 x 1, never measured", "cluster": unseen_cluster.digest()}
    rng = random.Random(seed + 1)
    workloads: list[Work] = []
    while len(workloads) < 20:
        workload = {"kind": "collective"} | draw_collective(rng, unseen_cluster, 64 << 10)
        workloads += [workload] if predict(unseen_cluster, workload).seconds < MAX_SECONDS else []
    with Lab(Shape((Host(uplink=UNSEEN_UPLINK, cpu=CPU),) * 3), NAME) as lab:
        return about, measure_workloads(lab, unseen_cluster, workloads, folder, about)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--uplink", nargs="*", default=list(UPLINKS), help='rates, "" for unshaped')
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--write", default="", help="name of a file in benchmarks/results")
    parser.add_argument("--page", type=Path, help="where to draw predicted against measured")
    parser.add_argument("--smoke", action="store_true", help="the smallest case, to see that it runs")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(json.loads((args.worker / "works.json").read_text()), args.worker / "seconds.json")
        return 0
    repeats, kinds = NUM_MEASUREMENTS, KINDS
    if args.smoke:
        args.uplink, repeats, kinds = [""], 1, [*DRAWS]
    summaries, lines = [], []
    with tempfile.TemporaryDirectory() as directory:
        for uplink in args.uplink:
            for about, lab_lines in measure_lab(uplink, args.seed, Path(directory), repeats, kinds):
                lines += lab_lines
                summaries.append(summary(lab_lines, about))
                print(json.dumps({"benchmark": "cost_model"} | summaries[-1]), flush=True)
    measured_lines = [line for line in lines if "never" not in line["lab"]]
    summaries.append(summary(measured_lines, {"uplink": "all", "lab": "2 x 2"}))
    print(json.dumps({"benchmark": "cost_model"} | summaries[-1]), flush=True)
    if args.write:
        results_file.write(
            args.write, "cost_model", [{"benchmark": "cost_model"} | line_ for line_ in (*lines, *summaries)]
        )
    if args.page:
        write_page(args.page, lines, summaries)
    return 0


def write_page(path: Path, lines: list[Work], summaries: list[Work]) -> None:
    """Write a page with predicted against measured seconds of each lab, and the errors."""
    from shardwright.report import html_template
    from shardwright.report.cluster import scatter

    figures = []
    for number, about in enumerate(summaries[:-1]):
        lab_lines = [line for line in lines if (line["uplink"], line["lab"]) == (about["uplink"], about["lab"])]
        points = [{"kind": line["work"]["kind"], "text": json.dumps(line["work"])[:90]} | line for line in lab_lines]
        figures.append(scatter(f"scatter-{number}", f"{about['lab']}, uplinks {about['uplink']}", points))
    rows = [
        (
            row["lab"],
            row["uplink"],
            str(row["workloads"]),
            f"{100 * row['mean_absolute_error']:.1f} %",
            f"{row['r2']:.3f}",
        )
        for row in summaries
    ]
    grid = html_template.Grid(("lab", "uplinks", "workloads", "mean error", "R2"), tuple(rows), num_text_columns=2)
    note = "Emulated: hosts and links are the lab's, times and bytes are real."
    text = html_template.render_template(
        "cluster.html.j2",
        brand="Shardwright cost model",
        curves_title="Workloads",
        title="Predicted against measured",
        notes=(note,),
        grids=(("Errors", grid),),
        curves=figures,
        figures=figures,
    )
    files.write_text(text, path)


if __name__ == "__main__":
    sys.exit(main())

"""Predicted against measured: 60 random micro workloads on an emulated cluster, priced from its measurements alone.

    python -m benchmarks.cost_model [--uplink RATE ...] [--seed N] [--write NAME] [--page FILE.html]

As root. For each uplink a lab of 2 hosts x 2 ranks with 0.4 of a core each comes up, `shardwright measure` looks at it
five times into one file, and the file's digest is printed. Only then workloads are drawn (collectives, uneven
all-to-alls, products, random rows, collectives beside products), predicted, and run: seven rounds of totals over 0.4 s,
of which the median counts. How far their first three rounds are from the last three says what no prediction can beat.
After the 1 Gbit/s lab another comes up that was never measured, 3 hosts x 1 rank at 500 Mbit/s: its collectives are
predicted from the measurements of the first. A JSON line per workload, one per lab, one for all.
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
UNSEEN = "500mbit"
CPU = 0.4
OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "one_to_many", "many_to_one")
TIMES = 5  # that the lab is measured, into one file
ROUNDS, WINDOW_SECONDS = 7, 0.4
LONGEST_SECONDS = 0.25  # of a workload, as predicted
NAME = "costs"

# Of the workloads that are drawn for a lab
KINDS = ["collective"] * 24 + ["all_to_all_v"] * 10 + ["matmul"] * 10 + ["rows"] * 6 + ["beside"] * 10

Work = dict[str, Any]


def drawn(draw: random.Random, cluster: Cluster, kinds: Sequence[str]) -> Iterator[Work]:
    """Workloads of these kinds, none of which was measured."""
    for kind in kinds:
        while True:
            work = {"kind": kind} | DRAWS[kind](draw, cluster)
            if predicted(cluster, work).seconds < LONGEST_SECONDS:
                break
        yield work


def collective(draw: random.Random, cluster: Cluster, least: int = 4096) -> Work:
    names = [level.name for level in cluster.levels]
    levels = draw.choice([names, *([name] for name in names)] if len(names) > 1 else [names])
    return {"op": draw.choice(OPS), "levels": levels, "bytes": int(log_uniform(draw, least, 8 << 20)) // 64 * 64}


def uneven(draw: random.Random, cluster: Cluster) -> Work:
    """Bytes by source and target: some ranks hold more, some are asked for more, one pair has nothing."""
    num = cluster.num_ranks
    scale = log_uniform(draw, 16 << 10, 2 << 20)
    holds, wants = ([log_uniform(draw, 0.25, 4) for _ in range(num)] for _ in range(2))
    matrix = [[int(scale * holds[i] * wants[j] * draw.uniform(0.5, 1.5)) for j in range(num)] for i in range(num)]
    matrix[draw.randrange(num)][draw.randrange(num)] = 0
    return {"traffic": matrix}


def product(draw: random.Random, cluster: Cluster) -> Work:
    """As layers have them: any batch, widths in steps of 16."""
    widths = [16 * int(log_uniform(draw, 2, 48)) for _ in range(2)]
    return {"sizes": [int(log_uniform(draw, 64, 4096)), *widths]}


def random_rows(draw: random.Random, cluster: Cluster) -> Work:
    num = int(log_uniform(draw, 4096, 65536)) // 8 * 8
    return {
        "op": draw.choice(("gather", "rewrite", "lookup", "update")),
        "num": num,
        "row_bytes": 16 * draw.randint(3, 72),
    }


def beside(draw: random.Random, cluster: Cluster) -> Work:
    """A message of four bursts or more, and products for 0.3 to 2 times as long."""
    work = collective(draw, cluster, 512 << 10) | product(draw, cluster)
    alone = predicted(cluster, {"kind": "collective"} | work).seconds
    one = predicted(cluster, {"kind": "matmul"} | work).seconds
    return work | {"times": max(1, round(draw.uniform(0.3, 2.0) * alone / one))}


DRAWS = {
    "collective": collective,
    "all_to_all_v": uneven,
    "matmul": product,
    "rows": random_rows,
    "beside": beside,
}


def log_uniform(draw: random.Random, low: float, high: float) -> float:
    return float(np.exp(draw.uniform(np.log(low), np.log(high))))


def predicted(cluster: Cluster, work: Work) -> primitives.Cost:
    match work["kind"]:
        case "collective":
            return primitives.collective_cost(cluster, work["op"], work["levels"], work["bytes"])
        case "all_to_all_v":
            return primitives.all_to_all_v_cost(
                cluster, [level.name for level in cluster.levels], np.array(work["traffic"], float)
            )
        case "matmul":
            m, k, n = work["sizes"]
            return primitives.matmul_cost(cluster.device, m, k, n)
        case "rows":
            return primitives.row_access_cost(cluster.device, work["op"], work["num"], work["row_bytes"])
        case _:
            compute = work["times"] * primitives.matmul_cost(cluster.device, *work["sizes"]).seconds
            return primitives.overlapped_cost(cluster, work["op"], work["levels"], work["bytes"], compute)


def worker(works: list[Work], output: Path) -> None:
    """Every rank: the seconds of each workload, by round."""
    import torch

    from shardwright.measure.machine import measurement_mesh
    from shardwright.measure.timing import Clock

    with measurement_mesh() as mesh:
        clock = Clock(mesh.group(), torch.device("cpu"), WINDOW_SECONDS, retry_seconds=30.0)
        memory = None
        if any(work["kind"] == "rows" for work in works):
            from shardwright.measure.device import allocate_table_memory

            memory = allocate_table_memory(mesh.device)
        seconds: list[list[float]] = [[] for _ in works]
        for _ in range(ROUNDS):
            for work, found in zip(works, seconds, strict=True):
                apart = work["kind"] not in ("matmul", "rows")
                found.append(clock.sample((1,), call(work, mesh, memory), slowest=apart).seconds)
        if mesh.rank == 0:
            output.write_text(json.dumps(seconds))


def call(work: Work, mesh: Any, memory: Any) -> Any:
    import torch

    from shardwright.comm import collective as comm
    from shardwright.measure import device, network

    match work["kind"]:
        case "matmul":
            m, k, n = work["sizes"]
            return device.matmul_call(m, k, n, torch.float32, mesh.device)
        case "rows":
            return device.random_row_calls(work["op"], memory, work["num"], work["row_bytes"])
        case "all_to_all_v":
            sent = work["traffic"][mesh.rank]
            received = [row[mesh.rank] for row in work["traffic"]]
            x = torch.zeros(sum(sent), dtype=torch.uint8)
            return lambda: comm.all_to_all(x, sent, received, mesh.group()).wait()
    start = network.prepare_collective(work["op"], work["bytes"], mesh.group(work["levels"]), mesh.device)
    if work["kind"] != "beside":
        return lambda: start().wait()
    m, k, n = work["sizes"]
    multiply = device.matmul_call(m, k, n, torch.float32, mesh.device)

    def both() -> None:
        under_way = start()
        for _ in range(work["times"]):
            multiply()
        under_way.wait()

    return both


def in_lab(lab: Lab, *command: str) -> None:
    ended = lab.run([sys.executable, *command], on_line=lambda rank, line: print(f"[{rank}] {line}", file=sys.stderr))
    if ended.rank is not None:
        sys.exit(f"rank {ended.rank} ended with status {ended.status}")


def judged(lab: Lab, cluster: Cluster, works: list[Work], folder: Path, about: Work) -> list[Work]:
    """Each workload, first with its prediction, then with what it took."""
    found = [
        {"work": work, "predicted": (one := predicted(cluster, work)).seconds, "basis": one.basis} for work in works
    ]
    (folder / "works.json").write_text(json.dumps(works))
    in_lab(lab, "-m", "benchmarks.cost_model", "--worker", str(folder))
    for line, seconds in zip(found, json.loads((folder / "seconds.json").read_text()), strict=True):
        line |= about | {"measured": median(seconds), "rounds": seconds}
        print(json.dumps({"benchmark": "cost_model"} | line), flush=True)
    return found


def summary(lines: list[Work], about: Work) -> Work:
    ratio = np.array([line["predicted"] / line["measured"] for line in lines])
    logs = np.log([[line["predicted"], line["measured"]] for line in lines])
    predicted_, measured = np.array([[line["predicted"], line["measured"]] for line in lines]).T
    residual, total = ((predicted_ - measured) ** 2).sum(), ((measured - measured.mean()) ** 2).sum()
    spread = [max(line["rounds"]) / min(line["rounds"]) - 1 for line in lines]
    again = [abs(median(line["rounds"][:3]) / median(line["rounds"][-3:]) - 1) for line in lines]
    kinds = sorted({line["work"]["kind"] for line in lines})
    by_kind = {kind: mean_error([line for line in lines if line["work"]["kind"] == kind]) for kind in kinds}
    return about | {
        "workloads": len(lines),
        "mean_absolute_error": round(float(np.abs(ratio - 1).mean()), 4),
        "median_absolute_error": round(float(np.median(np.abs(ratio - 1))), 4),
        "r2": round(float(1 - residual / total), 4),
        "r2_of_logarithms": round(float(np.corrcoef(logs.T)[0, 1] ** 2), 4),
        "median_spread_of_rounds": round(median(spread), 4),
        "first_rounds_against_last": round(float(np.mean(again)), 4),
        "by_kind": by_kind,
    }


def mean_error(lines: list[Work]) -> float:
    return round(float(np.mean([abs(line["predicted"] / line["measured"] - 1) for line in lines])), 4)


def measured_lab(
    uplink: str, seed: int, folder: Path, looks: int, kinds: Sequence[str]
) -> Iterator[tuple[Work, list[Work]]]:
    """The lab of 2 x 2 ranks; after 1 Gbit/s also the one that was never measured."""
    path = folder / "cluster.toml"
    path.unlink(missing_ok=True)
    with Lab(Shape((Host(ranks=2, uplink=uplink, cpu=CPU),) * 2), NAME) as lab:
        for _ in range(looks):
            in_lab(lab, "-m", "shardwright.cli", "measure", "-o", str(path))
        cluster = files.read(Cluster, path)
        about = {"uplink": uplink or "unshaped", "lab": "2 x 2", "cluster": cluster.digest()}
        works = list(drawn(random.Random(seed), cluster, kinds))
        yield about, judged(lab, cluster, works, folder, about)
    if uplink == "1gbit":
        yield unseen(cluster, seed, folder)


def unseen(cluster: Cluster, seed: int, folder: Path) -> tuple[Work, list[Work]]:
    network = cluster.levels[-1]
    share = network.bytes_per_second / parse_bits_per_second("1gbit")
    level = Level(network.name, 3, network.latency_seconds, share * parse_bits_per_second(UNSEEN))
    other = primitives.scale_cluster(cluster, (level,))
    about = {"uplink": UNSEEN, "lab": "3 x 1, never measured", "cluster": other.digest()}
    draw = random.Random(seed + 1)
    works: list[Work] = []
    while len(works) < 20:
        work = {"kind": "collective"} | collective(draw, other, 64 << 10)
        works += [work] if predicted(other, work).seconds < LONGEST_SECONDS else []
    with Lab(Shape((Host(uplink=UNSEEN, cpu=CPU),) * 3), NAME) as lab:
        return about, judged(lab, other, works, folder, about)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--uplink", nargs="*", default=list(UPLINKS), help='rates, "" for unshaped')
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--write", default="", help="name of a file in benchmarks/results")
    parser.add_argument("--page", type=Path, help="where to draw predicted against measured")
    parser.add_argument("--smoke", action="store_true", help="the smallest case, to see that it runs")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.worker:
        worker(json.loads((asked.worker / "works.json").read_text()), asked.worker / "seconds.json")
        return 0
    looks, kinds = TIMES, KINDS
    if asked.smoke:
        asked.uplink, looks, kinds = [""], 1, [*DRAWS]
    summaries, lines = [], []
    with tempfile.TemporaryDirectory() as directory:
        for uplink in asked.uplink:
            for about, found in measured_lab(uplink, asked.seed, Path(directory), looks, kinds):
                lines += found
                summaries.append(summary(found, about))
                print(json.dumps({"benchmark": "cost_model"} | summaries[-1]), flush=True)
    seen = [line for line in lines if "never" not in line["lab"]]
    summaries.append(summary(seen, {"uplink": "all", "lab": "2 x 2"}))
    print(json.dumps({"benchmark": "cost_model"} | summaries[-1]), flush=True)
    if asked.write:
        results_file.write(
            asked.write, "cost_model", [{"benchmark": "cost_model"} | one for one in (*lines, *summaries)]
        )
    if asked.page:
        drawn_to(asked.page, lines, summaries)
    return 0


def drawn_to(path: Path, lines: list[Work], summaries: list[Work]) -> None:
    """A page: predicted against measured for each lab, and the errors."""
    from shardwright.report import html_template
    from shardwright.report.cluster import scatter

    figures = []
    for number, about in enumerate(summaries[:-1]):
        found = [line for line in lines if (line["uplink"], line["lab"]) == (about["uplink"], about["lab"])]
        points = [{"kind": line["work"]["kind"], "text": json.dumps(line["work"])[:90]} | line for line in found]
        figures.append(scatter(f"scatter-{number}", f"{about['lab']}, uplinks {about['uplink']}", points))
    rows = [
        (
            one["lab"],
            one["uplink"],
            str(one["workloads"]),
            f"{100 * one['mean_absolute_error']:.1f} %",
            f"{one['r2']:.3f}",
        )
        for one in summaries
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

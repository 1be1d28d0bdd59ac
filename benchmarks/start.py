"""Time to compare the ranks' models at the start of a run by digests of tables (runtime/agreement.py).

    python -m benchmarks.start [--ranks N] [--gigabytes G] [--rounds R] [--write NAME]

N ranks on this machine, each with the full model: 8 tables of 64 columns, G gigabytes of float32 in all. Sides,
alternating: "loaded", tables with values, as after loading weights; "loaded, again", the A/A floor; "blank", tables on
the meta device, as recipes create them, which have no values to compare. A JSON line per side: seconds of the slowest
rank (median, least, most), and gigabytes per second and rank.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from statistics import median
from typing import Any

from benchmarks import results_file

NUM_TABLES, NUM_COLUMNS = 8, 64
SIDES = ("loaded", "loaded, again", "blank")


def make_model(rows: int, device: str) -> Any:
    import torch

    from shardwright.layers.embedding import EmbeddingBags
    from shardwright.models.dlrm import DLRM
    from shardwright.spec.optimizer import RowWiseAdaGrad
    from shardwright.spec.workload import Feature, Table

    torch.manual_seed(1)
    tables = [Table(f"t{i}", rows, NUM_COLUMNS) for i in range(NUM_TABLES)]
    features = [Feature(f"f{i}", f"t{i}") for i in range(NUM_TABLES)]
    with torch.device(device):
        return DLRM(EmbeddingBags(tables, features, RowWiseAdaGrad(0.05)), 13, bottom=[128, NUM_COLUMNS], top=[256, 64])


def worker(rows: int, rounds: int) -> None:
    import torch

    from benchmarks.checkpoint import batches
    from shardwright.comm import collective
    from shardwright.comm.mesh import Mesh, world_size
    from shardwright.runtime.agreement import check_agreement
    from shardwright.runtime.planning import plan_for
    from shardwright.runtime.rank_group import RankGroup

    loaded, blank = make_model(rows, "cpu"), make_model(rows, "meta")
    plan = plan_for(blank, next(batches(rows, 0, 64 * world_size())))
    mesh = Mesh([("host", world_size())])
    group, rank_group = mesh.group(), RankGroup(mesh)
    seconds_by_side: dict[str, list[float]] = {side: [] for side in SIDES}
    for _ in range(rounds):
        for side in SIDES:
            model = blank if side == "blank" else loaded
            start = time.perf_counter()
            check_agreement(model, plan, {}, 1, rank_group)
            seconds = torch.tensor([time.perf_counter() - start])
            seconds_by_side[side].append(float(collective.all_gather(seconds, [1] * group.size, group).wait().max()))
    if group.index == 0:
        print(json.dumps(seconds_by_side))
    mesh.close()


def median_min_max(values: Sequence[float]) -> list[float]:
    return [round(value, 4) for value in (median(values), min(values), max(values))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--write", default="", help="name of a file in benchmarks/results")
    parser.add_argument("--smoke", action="store_true", help="the smallest case, to see that it runs")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.smoke:
        args.gigabytes, args.rounds = 0.01, 1
    rows = int(args.gigabytes * 1e9 / (NUM_TABLES * NUM_COLUMNS * 4))
    if args.worker:
        worker(rows, args.rounds)
        return
    torchrun = ["-m", "torch.distributed.run", f"--nproc-per-node={args.ranks}", "--standalone"]
    arguments = ["-m", "benchmarks.start", "--worker", f"--gigabytes={args.gigabytes}", f"--rounds={args.rounds}"]
    process = subprocess.run([sys.executable, *torchrun, *arguments], stdout=subprocess.PIPE, text=True, check=False)
    if process.returncode:
        sys.exit(process.returncode)
    seconds_by_side = json.loads(process.stdout.splitlines()[-1])
    case = {"benchmark": "start", "ranks": args.ranks, "gigabytes": args.gigabytes, "rounds": args.rounds}
    lines = [{**case, "side": side, "seconds": median_min_max(seconds)} for side, seconds in seconds_by_side.items()]
    for line in lines[:2]:
        line["gigabytes_per_second"] = round(args.gigabytes / line["seconds"][0], 2)
    for line in lines:
        print(json.dumps(line), flush=True)
    if args.write:
        results_file.write(args.write, "start", lines)


if __name__ == "__main__":
    main()

"""What it takes, at the start of a run, to compare the ranks' models: a SHA-256 of each table (runtime/agreement.py).

    python -m benchmarks.start [--ranks N] [--gigabytes G] [--rounds R] [--write NAME]

N ranks on this machine, each with the whole model: 8 tables of 64 columns, G gigabytes of float32 in all. Sides, in
turns: "loaded", tables with values, as after loading weights; "loaded, again", the A/A floor; "blank", tables on the
meta device, as recipes make them, which have no values to compare. A JSON line per side: seconds of the slowest rank
(median, least, most), and gigabytes per second and rank.
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

TABLES, COLUMNS = 8, 64
SIDES = ("loaded", "loaded, again", "blank")


def model_of(rows: int, device: str) -> Any:
    import torch

    from shardwright.layers.embedding import EmbeddingBags
    from shardwright.models.dlrm import DLRM
    from shardwright.spec.optimizer import RowWiseAdaGrad
    from shardwright.spec.workload import Feature, Table

    torch.manual_seed(1)
    tables = [Table(f"t{at}", rows, COLUMNS) for at in range(TABLES)]
    features = [Feature(f"f{at}", f"t{at}") for at in range(TABLES)]
    with torch.device(device):
        return DLRM(EmbeddingBags(tables, features, RowWiseAdaGrad(0.05)), 13, bottom=[128, COLUMNS], top=[256, 64])


def worker(rows: int, rounds: int) -> None:
    import torch

    from benchmarks.checkpoint import batches
    from shardwright.comm import collective
    from shardwright.comm.mesh import Mesh, world_size
    from shardwright.runtime.agreement import check_agreement
    from shardwright.runtime.planning import plan_for

    loaded, blank = model_of(rows, "cpu"), model_of(rows, "meta")
    plan = plan_for(blank, next(batches(rows, 0, 64 * world_size())))
    mesh = Mesh([("host", world_size())])
    group = mesh.group()
    spent: dict[str, list[float]] = {side: [] for side in SIDES}
    for _ in range(rounds):
        for side in SIDES:
            model = blank if side == "blank" else loaded
            start = time.perf_counter()
            check_agreement(model, model.sparse, plan, {}, 1, group)
            mine = torch.tensor([time.perf_counter() - start])
            spent[side].append(float(collective.all_gather(mine, [1] * group.size, group).wait().max()))
    if group.index == 0:
        print(json.dumps(spent))
    mesh.close()


def three(values: Sequence[float]) -> list[float]:
    return [round(one, 4) for one in (median(values), min(values), max(values))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--write", default="", help="name of a file in benchmarks/results")
    parser.add_argument("--smoke", action="store_true", help="the smallest case, to see that it runs")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.smoke:
        asked.gigabytes, asked.rounds = 0.01, 1
    rows = int(asked.gigabytes * 1e9 / (TABLES * COLUMNS * 4))
    if asked.worker:
        worker(rows, asked.rounds)
        return
    torchrun = ["-m", "torch.distributed.run", f"--nproc-per-node={asked.ranks}", "--standalone"]
    words = ["-m", "benchmarks.start", "--worker", f"--gigabytes={asked.gigabytes}", f"--rounds={asked.rounds}"]
    done = subprocess.run([sys.executable, *torchrun, *words], stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit(done.returncode)
    spent = json.loads(done.stdout.splitlines()[-1])
    case = {"benchmark": "start", "ranks": asked.ranks, "gigabytes": asked.gigabytes, "rounds": asked.rounds}
    lines = [{**case, "side": side, "seconds": three(times)} for side, times in spent.items()]
    for line in lines[:2]:
        line["gigabytes_per_second"] = round(asked.gigabytes / line["seconds"][0], 2)
    for line in lines:
        print(json.dumps(line), flush=True)
    if asked.write:
        results_file.write(asked.write, "start", lines)


if __name__ == "__main__":
    main()

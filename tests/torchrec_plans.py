"""Plans of TorchRec's own planner for a few workloads, kept in tests/unit/torchrec_plans.json.

    python tests/torchrec_plans.py PYTHON        the Python of an environment with torchrec 1.8 and fbgemm-gpu-cpu 1.8.0

On the cluster CLUSTER. Each of TorchRec's proposers has 20 s, so its plans differ from run to run: what a run finds is
added to those before. A rank is a number, ranks in a row "0-7".
"""

import json
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from shardwright.planner import search
from shardwright.planner.reasons import exact_precision
from shardwright.spec import files, presets
from shardwright.spec.optimizer import RowWiseAdaGrad
from shardwright.spec.workload import Feature, FeatureStatistics, Table, Workload

ROOT = Path(__file__).parents[1]
FIXTURE = ROOT / "tests/unit/torchrec_plans.json"
CLUSTER = "zionex-128-a100"
MIXED = "24 mixed tables"
CASES = (("synthetic-dlrm", 2048), ("synthetic-dlrm", 65_536), ("synthetic-wide-deep", 65_536), (MIXED, 65_536))
SECONDS = 20


def workload(recipe: str) -> Workload:
    if recipe == MIXED:
        return mixed()
    return files.read(Workload, ROOT / f"tests/golden/plans/{recipe}.workload.json")


def mixed() -> Workload:
    """Tables of 1,000 to 40 million rows, 32 to 256 columns, 1 to 40 ids a sample."""
    names = [f"t{at:02}" for at in range(24)]
    return Workload(
        version=1,
        batch_size=65_536,
        tables=tuple(Table(name, round(1000 * 1.585**at), 32 << at % 4) for at, name in enumerate(names)),
        features=tuple(Feature(name, name) for name in names),
        statistics=tuple(FeatureStatistics(name, 1.0 + 39 * (7 * at % 24) / 23, 0.5) for at, name in enumerate(names)),
        optimizer=RowWiseAdaGrad(lr=0.01),
    )


def name_of(recipe: str, batch_size: int) -> str:
    return f"{recipe} at {batch_size}"


def asked(recipe: str, batch_size: int) -> dict[str, Any]:
    """What benchmarks/placement_torchrec.py reads."""
    work, cluster = workload(recipe), presets.load_cluster(CLUSTER)
    problem = search.define_problem(work, cluster, batch_size, exact_precision(work))
    tier = cluster.device.tiers[0]
    return {
        "ranks": cluster.num_ranks,
        "local": cluster.levels[0].num,
        "batch": round(problem.local_batch_size),
        "seconds": SECONDS,
        "hbm_bytes": tier.bytes_,
        "hbm_rate": tier.read_bytes_per_second,
        "local_rate": cluster.levels[0].bytes_per_second,
        "host_rate": cluster.levels[1].bytes_per_second,
        "tables": [
            [one.table.name, one.table.rows, one.table.dim, (one.local_pooling or one).ids_per_sample]
            for one in problem.table_loads
        ],
    }


def shortened(ranks: Sequence[int]) -> list[int | str]:
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[0] + len(ranks))):
        return [f"{ranks[0]}-{ranks[-1]}"]
    return list(ranks)


def expanded(ranks: Iterable[int | str]) -> list[int]:
    found: list[int] = []
    for one in ranks:
        first, _, last = str(one).partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


def main() -> int:
    plans: dict[str, list[list[Any]]] = json.loads(FIXTURE.read_text()) if FIXTURE.exists() else {}
    for case in CASES:
        script = str(ROOT / "benchmarks/placement_torchrec.py")
        done = subprocess.run(
            [sys.argv[1], script], input=json.dumps(asked(*case)), capture_output=True, text=True, check=False
        )
        if done.returncode:
            sys.exit(done.stderr[-2000:])
        plan = [[name, kind, shortened(ranks)] for name, kind, ranks in json.loads(done.stdout.splitlines()[-1])]
        before = plans.setdefault(name_of(*case), [])
        before += [plan] if plan not in before else []
        print(name_of(*case), flush=True)
    write(plans)
    return 0


def write(plans: dict[str, list[list[Any]]]) -> None:
    """A line for each plan."""
    cases = (json.dumps(name) + ": [\n" + ",\n".join(map(json.dumps, found)) + "\n]" for name, found in plans.items())
    FIXTURE.write_text("{\n" + ",\n".join(cases) + "\n}\n")


if __name__ == "__main__":
    sys.exit(main())

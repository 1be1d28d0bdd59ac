"""Plans of TorchRec's own planner for a few workloads, stored in tests/unit/torchrec_plans.json.

    python tests/torchrec_plans.py PYTHON        the Python of an environment with torchrec 1.8 and fbgemm-gpu-cpu 1.8.0

For the cluster CLUSTER. Each of TorchRec's proposers has 20 s, so its plans differ between runs; a run adds plans to
the file, in which a rank is a number and a range of ranks "0-7".
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
        return mixed_workload()
    return files.read(Workload, ROOT / f"tests/golden/plans/{recipe}.workload.json")


def mixed_workload() -> Workload:
    """Tables of 1,000 to 40 million rows, 32 to 256 columns, 1 to 40 ids per sample."""
    names = [f"t{number:02}" for number in range(24)]
    return Workload(
        version=1,
        batch_size=65_536,
        tables=tuple(Table(name, round(1000 * 1.585**i), 32 << i % 4) for i, name in enumerate(names)),
        features=tuple(Feature(name, name) for name in names),
        statistics=tuple(FeatureStatistics(name, 1.0 + 39 * (7 * i % 24) / 23, 0.5) for i, name in enumerate(names)),
        optimizer=RowWiseAdaGrad(lr=0.01),
    )


def name_of(recipe: str, batch_size: int) -> str:
    return f"{recipe} at {batch_size}"


def planner_input(recipe: str, batch_size: int) -> dict[str, Any]:
    """The input of benchmarks/placement_torchrec.py."""
    inputs, cluster = workload(recipe), presets.load_cluster(CLUSTER)
    problem = search.define_problem(inputs, cluster, batch_size, exact_precision(inputs))
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
            [load.table.name, load.table.rows, load.table.dim, (load.local_pooling or load).ids_per_sample]
            for load in problem.table_loads
        ],
    }


def collapse_ranks(ranks: Sequence[int]) -> list[int | str]:
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[0] + len(ranks))):
        return [f"{ranks[0]}-{ranks[-1]}"]
    return list(ranks)


def expand_ranks(ranks: Iterable[int | str]) -> list[int]:
    expanded: list[int] = []
    for entry in ranks:
        first, _, last = str(entry).partition("-")
        expanded += range(int(first), int(last or first) + 1)
    return expanded


def main() -> int:
    plans: dict[str, list[list[Any]]] = json.loads(FIXTURE.read_text()) if FIXTURE.exists() else {}
    for case in CASES:
        script = str(ROOT / "benchmarks/placement_torchrec.py")
        result = subprocess.run(
            [sys.argv[1], script], input=json.dumps(planner_input(*case)), capture_output=True, text=True, check=False
        )
        if result.returncode:
            sys.exit(result.stderr[-2000:])
        placements = json.loads(result.stdout.splitlines()[-1])
        plan = [[name, kind, collapse_ranks(ranks)] for name, kind, ranks in placements]
        stored = plans.setdefault(name_of(*case), [])
        stored += [plan] if plan not in stored else []
        print(name_of(*case), flush=True)
    write(plans)
    return 0


def write(plans: dict[str, list[list[Any]]]) -> None:
    """Write one line per plan."""
    lines = {name: ",\n".join(map(json.dumps, plans_of_case)) for name, plans_of_case in plans.items()}
    cases = (f"{json.dumps(name)}: [\n{text}\n]" for name, text in lines.items())
    FIXTURE.write_text("{\n" + ",\n".join(cases) + "\n}\n")


if __name__ == "__main__":
    sys.exit(main())

"""Sharded tables and overlapped steps: what overlap, placement and rounding gain, what was predicted, TorchRec beside.

    python -m benchmarks.sharding [--torchrec PYTHON] [--rounds N] [--on SETTING ...] [--cluster FOLDER] [--write NAME]

As root. For each setting a lab is made and measured, and a job trains all sides in turns, the order turned by one each
round; where PYTHON is .rivals/bin/python (`make rivals`), a job of TorchRec's takes turns with it
(benchmarks/turns.py), on the same tables and batches. Settings: "lab 2 x 2", 2 hosts x 2 ranks, "lab 2 x 1" and
"lab 1 x 1", each rank with 0.45 of a core, uplinks of 1 Gbit/s; "loopback 2" and "loopback 4", ranks on one host
without quota. Every rank has 4,096 samples of a step. 26 tables of skewed sizes and bags, popular ids, two MLPs
(benchmarks/sharding_tables.py).

Sides: the planner's plan executed serially and overlapped; tables round robin and all rows over all ranks,
overlapped, with the stages that the planner finds best for them; the planner's plan with vectors in fp16, gradients
in bf16 ("rounded"); and that with products in bf16, too ("bf16"). A JSON line per side: milliseconds of a step
(median, least, most over rounds), its ratio to "overlapped" in the same round, bytes that a host's uplink carried in
a step by its counter, and for ours the predicted step and the roofline's bound. `compute_ms` and `messages_ms` are
the predicted parts of a step one after the other. Emulated: hosts and links. At the end weak scaling, simulated:
samples/s of 8 to 128 ranks on hosts as measured with 2 x 2.
"""

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from threading import Thread
from typing import Any

from benchmarks import results_file
from benchmarks.sharding_tables import DENSE_RATE, OWN, batch, model, part
from benchmarks.turns import Asked, Asker, JobFailed, shared
from shardwright.lab.emulated_cluster import Lab
from shardwright.lab.shape import Host, Shape

STEPS, WARM = 8, 3
CPU, UPLINK = 0.45, "1gbit"
QUOTA = Host(ranks=2, uplink=UPLINK, cpu=CPU)
SETTINGS = {
    "lab 2 x 2": Shape((QUOTA,) * 2),
    "lab 2 x 1": Shape((replace(QUOTA, ranks=1),) * 2),
    "lab 1 x 1": Shape((replace(QUOTA, ranks=1),)),
    "loopback 2": Shape((Host(ranks=2),)),
    "loopback 4": Shape((Host(ranks=4),)),
}
EVERY = "lab 2 x 2"
RIVALS = {
    "torchrec, its planner": {},
    "torchrec, our plan": {"plan": "ours"},
    "torchrec, rounded": {"rounded": True},
    "torchrec, bf16": {"rounded": True, "bf16": True},
}
SIMULATED = (8, 16, 32, 64, 128)
PATIENCE_SECONDS = 3600.0
SECONDS_TO_END = 30.0


@dataclass(frozen=True, slots=True)
class Side:
    plan: Any
    found: Any
    overlap: bool = True


def sides(cluster: Any) -> dict[str, Side]:
    """The planner's answers, and two placements of others with the stages that the planner finds best for them."""
    from shardwright.measure.describe import describe
    from shardwright.planner import search
    from shardwright.planner.plan import exact_precision, make_plan
    from shardwright.planner.reprice import reprice_plan
    from shardwright.planner.step import tasks
    from shardwright.spec.plan import Rect

    workload = describe(model(), batch(0, cluster.num_ranks))
    ours = make_plan(workload, cluster)
    rounded = make_plan(workload, cluster, allow=("wire.fp16", "wire.bf16"))
    bf16 = make_plan(workload, cluster, allow=("wire.fp16", "wire.bf16", "dense.bf16"))
    num = cluster.num_ranks

    def placed(rects: Any) -> Side:
        tables = tuple(
            replace(table, order="id", rects=tuple(rects(at, known)), travel="vectors")
            for at, (table, known) in enumerate(zip(ours.plan.tables, workload.tables, strict=True))
        )
        problem = search.define_problem(workload, cluster, OWN * num, exact_precision(workload))
        found = reprice_plan(problem, replace(ours.plan, tables=tables))
        return Side(
            replace(
                ours.plan, tables=tables, stages=tasks.required_stages(found.problem, found.loads, found.ids_after)
            ),
            found,
        )

    def robin(at: int, table: Any) -> Any:
        return [Rect(table.name, (0, table.rows), (0, table.dim), (at % num,))]

    def rows(_: int, table: Any) -> Any:
        ends = [table.rows * rank // num for rank in range(num + 1)]
        return [Rect(table.name, (ends[rank], ends[rank + 1]), (0, table.dim), (rank,)) for rank in range(num)]

    return {
        "serial": Side(ours.plan, ours.candidate, overlap=False),
        "overlapped": Side(ours.plan, ours.candidate),
        "round robin": placed(robin),
        "all rows": placed(rows),
        "rounded": Side(rounded.plan, rounded.candidate),
        "rounded, serial": Side(rounded.plan, rounded.candidate, overlap=False),
        "bf16": Side(bf16.plan, bf16.candidate),
    }


def wanted(setting: str) -> Sequence[str]:
    return (
        ("serial", "overlapped", "round robin", "all rows", "rounded", "rounded, serial", "bf16")
        if setting == EVERY
        else ("overlapped", "rounded", "bf16")
    )


def worker(folder: str, setting: str, cluster: str) -> None:
    """Every rank of our job."""
    from itertools import cycle
    from time import perf_counter

    import torch

    from shardwright.comm import collective
    from shardwright.comm.mesh import Mesh
    from shardwright.runtime.build import build
    from shardwright.spec import presets

    measured = presets.load_cluster(cluster)
    chosen = {name: side for name, side in sides(measured).items() if name in wanted(setting)}
    lanes = ("main", "ids", "wire", "dense")
    mesh = Mesh(chosen["overlapped"].plan.axes, lanes=lanes, timeout_seconds=PATIENCE_SECONDS, along=[()])
    everyone = mesh.group(lane="main")
    mine = [part(batch(number, mesh.size), mesh.rank) for number in range(4)]
    running = {}
    for name, side in chosen.items():
        made = model()
        hottest = {table.name: torch.arange(table.rows) for table in made.sparse.tables}  # ids are drawn by popularity
        dense = {"optimizer": lambda p: torch.optim.SGD(p, DENSE_RATE), "hottest": hottest}
        running[name] = build(made, side.plan, mesh, overlap=side.overlap, **dense).run(cycle(mine))

    def together() -> float:
        collective.all_reduce(torch.zeros(1), everyone).wait()
        return perf_counter()

    turns = Asked(folder, "ours", mesh.rank, shared(everyone))
    turns.tell({})
    for name, warm, steps in turns.turns():
        losses = [float(next(running[name]).loss) for _ in range(warm)]
        start = together()
        for _ in range(steps):
            next(running[name])
        seconds = together() - start
        of_all = collective.all_reduce(torch.tensor(losses, dtype=torch.float64), everyone).wait() / mesh.size
        turns.tell({"seconds": seconds, "losses": of_all.tolist()})
    mesh.close()


@contextmanager
def job(lab: Lab, folder: str, name: str, command: list[str]) -> Iterator[Asker]:
    """Run a job's ranks in the lab, idle until they are requested. Raises JobFailed at once if one ends early."""
    print(f"starting {name} ...", file=sys.stderr)
    asker = Asker(folder, name)

    def run() -> None:
        try:
            ended = lab.run(command, lambda rank, line: print(f"[{rank}] {line}", file=sys.stderr))
            reason = (
                f"rank {ended.rank} ended with status {ended.status}" if ended.rank is not None else "all have ended"
            )
        except BaseException as error:
            reason = repr(error)
        asker.fail(f'job "{name}": {reason}')

    thread = Thread(target=run, daemon=True)
    thread.start()
    try:
        asker.ready()
        yield asker
    finally:
        asker.end()
        thread.join(SECONDS_TO_END)  # a rank that still runs then ends with its lab


def rounds(setting: str, lab: Lab, cluster: str, peer: str, num: int) -> dict[str, list[dict[str, Any]]]:
    """What every side answered in each round, and what an uplink carried meanwhile."""
    call = "from benchmarks.sharding import worker; worker"
    with (
        TemporaryDirectory() as folder,
        job(lab, folder, "ours", [sys.executable, "-c", f"{call}({folder!r}, {setting!r}, {cluster!r})"]) as ours,
    ):
        if not peer:
            return turns(lab, dict.fromkeys(wanted(setting), ours), num)
        options = {
            name: one | ({"plan": exported(cluster, folder)} if "plan" in one else {}) for name, one in RIVALS.items()
        }
        command = [peer, "-m", "benchmarks.sharding_torchrec", "--turns", folder, "torchrec", "--cluster", cluster]
        with job(lab, folder, "torchrec", [*command, "--sides", json.dumps(options)]) as theirs:
            return turns(lab, dict.fromkeys(wanted(setting), ours) | dict.fromkeys(RIVALS, theirs), num)


def turns(lab: Lab, askers: dict[str, Asker], num: int) -> dict[str, list[dict[str, Any]]]:
    names, found = list(askers), {name: [] for name in askers}
    for turn in range(num):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            before = carried(lab)
            answered = askers[name].turn(name, WARM, STEPS)
            found[name].append(answered | {"bytes": (carried(lab) - before) / (WARM + STEPS)})
        print(f"round {turn + 1} of {num}", file=sys.stderr)
    return found


def carried(lab: Lab) -> int:
    """By the uplink of the host that has sent most."""
    return max((one.sent_bytes for one in lab.traffic() if one.link.startswith("u")), default=0)


def exported(cluster: str, folder: str) -> str:
    from shardwright.measure.describe import describe
    from shardwright.planner.plan import make_plan
    from shardwright.report import plan as page
    from shardwright.spec import presets

    measured = presets.load_cluster(cluster)
    made = make_plan(describe(model(), batch(0, measured.num_ranks)), measured, torchrec=True)
    return str(page.write_torchrec_plan(made, Path(folder) / "plan.torchrec.py"))


def told(setting: str, cluster: str, found: dict[str, list[dict[str, Any]]]) -> Iterator[dict[str, Any]]:
    from shardwright.planner.plan import resource_usage, slowest_stage_seconds
    from shardwright.planner.price import roofline
    from shardwright.spec import presets

    measured = presets.load_cluster(cluster)
    planned = sides(measured)
    per_step = {name: [1e3 * one["seconds"] / STEPS for one in answers] for name, answers in found.items()}
    for name, times in per_step.items():
        ratios = [one / ours for one, ours in zip(times, per_step["overlapped"], strict=True)]
        line = {
            "benchmark": "sharding",
            "setting": setting,
            "side": name,
            "ms": three(times),
            "over_ours": three(ratios, 3),
        }
        line |= {"samples_s": round(OWN * measured.num_ranks / median(times) * 1e3)}
        line |= {"uplink_mb": round(1e-6 * median(one["bytes"] for one in found[name]), 2)}
        line |= {"losses": [round(loss, 5) for loss in found[name][0]["losses"]]}
        if name in planned:
            side, parts = planned[name].found, slowest_stage_seconds(planned[name].found)
            apart = ("ids", "lengths", "meet", "vectors", "gradients", "spread", "reduce", "reduce.bottom")
            line |= {"predicted_ms": round(1e3 * side.seconds, 1) if planned[name].overlap else None}
            line |= {"messages_ms": round(1e3 * sum(parts[one] for one in apart), 1)}
            line |= {"compute_ms": round(1e3 * sum(s for one, s in parts.items() if one not in apart), 1)}
            line |= {"bound_ms": round(1e3 * roofline.step_bound(measured, resource_usage(side)).overlapped_seconds, 1)}
        yield line


def three(values: Sequence[float], digits: int = 1) -> list[float]:
    return [round(one, digits) for one in (median(values), min(values), max(values))]


def simulated(cluster: str) -> Iterator[dict[str, Any]]:
    """More hosts of the kind that was measured."""
    from shardwright.measure.describe import describe
    from shardwright.planner.plan import make_plan
    from shardwright.planner.price import primitives
    from shardwright.spec import presets

    measured = presets.load_cluster(cluster)
    for num in SIMULATED:
        levels = (measured.levels[0], replace(measured.levels[1], num=num // measured.levels[0].num))
        found = make_plan(describe(model(), batch(0, num)), primitives.scale_cluster(measured, levels)).candidate
        rate = round(OWN * num / found.seconds)
        yield {"benchmark": "sharding", "setting": "simulated", "ranks": num, "samples_s": rate}


def measure(lab: Lab, cluster: Path) -> None:
    """The product's own measurement of a lab, into a cluster file."""
    ended = lab.run([sys.executable, "-m", "shardwright.cli", "measure", "-o", str(cluster)], on_line=quietly)
    if ended.rank is not None:
        raise JobFailed(f'job "measure": rank {ended.rank} ended with status {ended.status}')


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torchrec", default="", metavar="PYTHON", help="of an environment that has torchrec")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--on", nargs="*", default=list(SETTINGS), choices=SETTINGS, metavar="SETTING")
    parser.add_argument("--cluster", default="", help="a folder of cluster files, kept and taken again")
    parser.add_argument("--write", default="", help="name of a file in benchmarks/results")
    parser.add_argument("--smoke", action="store_true", help="the smallest case, to see that it runs")
    asked = parser.parse_args()
    if asked.smoke:
        asked.on, asked.rounds = ["loopback 2"], 1
    lines: list[dict[str, Any]] = []
    with TemporaryDirectory() as folder:
        kept = Path(asked.cluster or folder)
        for setting in asked.on:
            cluster = kept / f"{setting.replace(' ', '-')}.toml"
            with Lab(SETTINGS[setting], "sharding") as lab:
                if not cluster.exists():
                    measure(lab, cluster)
                peer = asked.torchrec if SETTINGS[setting].num_ranks > 1 else ""
                found = rounds(setting, lab, str(cluster), peer, asked.rounds)
            for line in told(setting, str(cluster), found):
                lines.append(line)
                print(json.dumps(line), flush=True)
        if EVERY in asked.on:
            for line in simulated(str(kept / f"{EVERY.replace(' ', '-')}.toml")):
                lines.append(line)
                print(json.dumps(line), flush=True)
    if asked.write:
        results_file.write(asked.write, "sharding", lines)
    return 0


def quietly(rank: int, line: str) -> None:
    if rank == 0:
        print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())

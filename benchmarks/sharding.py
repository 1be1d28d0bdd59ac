"""Sharded tables and overlapped steps: effect of overlap, placement and rounding; TorchRec alongside.

    python -m benchmarks.sharding [--torchrec PYTHON] [--rounds N] [--on SETTING ...] [--cluster FOLDER] [--write NAME]

As root. For each setting, a lab is created and measured, and a job trains all sides in turns, in an order that rotates
each round. With PYTHON, which is .rivals/bin/python after `make rivals`, a TorchRec job takes turns with it
(benchmarks/turns.py) on the same tables and batches. Settings: "lab 2 x 2", 2 hosts x 2 ranks, "lab 2 x 1" and
"lab 1 x 1", each rank with 0.45 of a core, uplinks of 1 Gbit/s; "loopback 2" and "loopback 4", ranks on one host
without a quota. The local batch has 4,096 samples. 26 tables of skewed sizes and bag lengths, popular ids, two MLPs
(benchmarks/sharding_tables.py).

Sides: the planner's plan, executed serially and overlapped; tables assigned round robin and all tables row-wise, both
overlapped, with the stages that the planner finds best for them; the planner's plan with vectors in fp16 and gradients
in bf16 ("rounded"); the same with matrix products in bf16, too ("bf16"). A JSON line per side: milliseconds of a step
(median, least, most over rounds), its ratio to "overlapped" in the same round, bytes per step on a host's uplink by
its counter, and for our sides the predicted step and the roofline bound. `compute_ms` and `messages_ms` are the
predicted parts of a step, summed without overlap. Hosts and links are emulated. At the end, simulated weak scaling:
samples/s of 8 to 128 ranks on hosts as measured with 2 x 2.
"""

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from threading import Thread
from typing import Any

from benchmarks import results_file
from benchmarks.sharding_tables import DENSE_LR, LOCAL_BATCH_SIZE, NUM_BATCHES, local_batch, make_batch, make_model
from benchmarks.turns import JobFailed, TurnClient, TurnServer, make_broadcast
from shardwright.lab.emulated_cluster import Lab
from shardwright.lab.shape import Host, Shape

STEPS, WARMUP_STEPS = 8, 3
CPU, UPLINK = 0.45, "1gbit"
HOST = Host(ranks=2, uplink=UPLINK, cpu=CPU)
SETTINGS = {
    "lab 2 x 2": Shape((HOST,) * 2),
    "lab 2 x 1": Shape((replace(HOST, ranks=1),) * 2),
    "lab 1 x 1": Shape((replace(HOST, ranks=1),)),
    "loopback 2": Shape((Host(ranks=2),)),
    "loopback 4": Shape((Host(ranks=4),)),
}
FULL_SETTING = "lab 2 x 2"
TORCHREC_SIDES = {
    "torchrec, its planner": {},
    "torchrec, our plan": {"plan": "ours"},
    "torchrec, rounded": {"rounded": True},
    "torchrec, bf16": {"rounded": True, "bf16": True},
}
SIMULATED_RANKS = (8, 16, 32, 64, 128)
TIMEOUT_SECONDS = 3600.0  # of a collective: a rank sleeps in one between turns
END_SECONDS = 30.0  # until a job has ended


@dataclass(frozen=True, slots=True)
class Side:
    """A plan with the candidate that predicts it."""

    plan: Any
    candidate: Any
    overlap: bool = True


def make_sides(cluster: Any) -> dict[str, Side]:
    """The planner's plans, and two other placements with the stages that the planner finds best for them."""
    from shardwright.measure.describe import describe
    from shardwright.planner import search
    from shardwright.planner.plan import exact_precision, make_plan
    from shardwright.planner.reprice import reprice_plan
    from shardwright.planner.step import tasks
    from shardwright.spec.plan import Rect

    workload = describe(make_model(), make_batch(0, cluster.num_ranks))
    result = make_plan(workload, cluster)
    rounded = make_plan(workload, cluster, allow=("wire.fp16", "wire.bf16"))
    bf16 = make_plan(workload, cluster, allow=("wire.fp16", "wire.bf16", "dense.bf16"))
    num_ranks = cluster.num_ranks

    def place(make_rects: Any) -> Side:
        tables = tuple(
            replace(table, order="id", rects=tuple(make_rects(i, table_spec)), travel="vectors")
            for i, (table, table_spec) in enumerate(zip(result.plan.tables, workload.tables, strict=True))
        )
        problem = search.define_problem(workload, cluster, LOCAL_BATCH_SIZE * num_ranks, exact_precision(workload))
        candidate = reprice_plan(problem, replace(result.plan, tables=tables))
        stages = tasks.required_stages(candidate.problem, candidate.loads, candidate.ids_after)
        return Side(replace(result.plan, tables=tables, stages=stages), candidate)

    def round_robin(i: int, table: Any) -> Any:
        return [Rect(table.name, (0, table.rows), (0, table.dim), (i % num_ranks,))]

    def row_wise(_: int, table: Any) -> Any:
        bounds = [table.rows * rank // num_ranks for rank in range(num_ranks + 1)]
        ranges = enumerate(pairwise(bounds))
        return [Rect(table.name, row_range, (0, table.dim), (rank,)) for rank, row_range in ranges]

    return {
        "serial": Side(result.plan, result.candidate, overlap=False),
        "overlapped": Side(result.plan, result.candidate),
        "round robin": place(round_robin),
        "all rows": place(row_wise),
        "rounded": Side(rounded.plan, rounded.candidate),
        "rounded, serial": Side(rounded.plan, rounded.candidate, overlap=False),
        "bf16": Side(bf16.plan, bf16.candidate),
    }


def side_names(setting: str) -> Sequence[str]:
    return (
        ("serial", "overlapped", "round robin", "all rows", "rounded", "rounded, serial", "bf16")
        if setting == FULL_SETTING
        else ("overlapped", "rounded", "bf16")
    )


def worker(folder: str, setting: str, cluster_file: str) -> None:
    """Body of every rank of our job."""
    from itertools import cycle
    from time import perf_counter

    import torch

    from shardwright.comm import collective
    from shardwright.comm.mesh import Mesh
    from shardwright.runtime.build import build
    from shardwright.spec import presets

    cluster = presets.load_cluster(cluster_file)
    chosen_sides = {name: side for name, side in make_sides(cluster).items() if name in side_names(setting)}
    lanes = ("main", "ids", "wire", "dense")
    axes, groups = chosen_sides["overlapped"].plan.mesh_axes, [(lane, ()) for lane in lanes]
    mesh = Mesh(axes, groups=groups, timeout_seconds=TIMEOUT_SECONDS)
    group = mesh.group(lane="main")
    batches = [local_batch(make_batch(number, mesh.size), mesh.rank) for number in range(NUM_BATCHES)]
    runs = {}
    for name, side in chosen_sides.items():
        model = make_model()
        hottest = {table.name: torch.arange(table.rows) for table in model.sparse.tables}  # ids are by popularity
        dense = {"optimizer": lambda p: torch.optim.SGD(p, DENSE_LR), "hottest": hottest}
        runs[name] = build(model, side.plan, mesh, overlap=side.overlap, **dense).run(cycle(batches))

    def barrier_time() -> float:
        collective.all_reduce(torch.zeros(1), group).wait()
        return perf_counter()

    server = TurnServer(folder, "ours", mesh.rank, make_broadcast(group))
    server.reply({})
    for name, warm, steps in server.turns():
        losses = [float(next(runs[name]).loss) for _ in range(warm)]
        start = barrier_time()
        for _ in range(steps):
            next(runs[name])
        seconds = barrier_time() - start
        mean_losses = collective.all_reduce(torch.tensor(losses, dtype=torch.float64), group).wait() / mesh.size
        server.reply({"seconds": seconds, "losses": mean_losses.tolist()})
    mesh.close()


@contextmanager
def start_job(lab: Lab, folder: str, name: str, command: list[str]) -> Iterator[TurnClient]:
    """Run a job's ranks in the lab; they sleep between turns. Raises JobFailed at once if one ends early."""
    print(f"starting {name} ...", file=sys.stderr)
    client = TurnClient(folder, name)

    def run() -> None:
        try:
            result = lab.run(command, lambda rank, line: print(f"[{rank}] {line}", file=sys.stderr))
            failure = f"rank {result.rank} ended with status {result.status}"
            reason = failure if result.rank is not None else "all ranks ended"
        except BaseException as error:
            reason = repr(error)
        client.fail(f'job "{name}": {reason}')

    thread = Thread(target=run, daemon=True)
    thread.start()
    try:
        client.wait_ready()
        yield client
    finally:
        client.end()
        thread.join(END_SECONDS)  # ranks that still run after that end with the lab


def run_rounds(
    setting: str, lab: Lab, cluster_file: str, peer: str, num_rounds: int
) -> dict[str, list[dict[str, Any]]]:
    """Run all sides in turns; returns by side the reply of each round, with a step's bytes on an uplink."""
    call = "from benchmarks.sharding import worker; worker"
    with (
        TemporaryDirectory() as folder,
        start_job(lab, folder, "ours", [sys.executable, "-c", f"{call}{(folder, setting, cluster_file)}"]) as our_job,
    ):
        clients = dict.fromkeys(side_names(setting), our_job)
        if not peer:
            return run_turns(lab, clients, num_rounds)
        options = {
            name: side | ({"plan": export_plan(cluster_file, folder)} if "plan" in side else {})
            for name, side in TORCHREC_SIDES.items()
        }
        command = [peer, "-m", "benchmarks.sharding_torchrec", "--turns", folder, "torchrec", "--cluster", cluster_file]
        with start_job(lab, folder, "torchrec", [*command, "--sides", json.dumps(options)]) as torchrec_job:
            return run_turns(lab, clients | dict.fromkeys(TORCHREC_SIDES, torchrec_job), num_rounds)


def run_turns(lab: Lab, clients: dict[str, TurnClient], num_rounds: int) -> dict[str, list[dict[str, Any]]]:
    """Run each side once per round, in an order that rotates; returns what `run_rounds` returns."""
    names, replies = list(clients), {name: [] for name in clients}
    for number in range(num_rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            bytes_before = uplink_bytes(lab)
            reply = clients[name].run_turn(name, WARMUP_STEPS, STEPS)
            replies[name].append(reply | {"bytes": (uplink_bytes(lab) - bytes_before) / (WARMUP_STEPS + STEPS)})
        print(f"round {number + 1} of {num_rounds}", file=sys.stderr)
    return replies


def uplink_bytes(lab: Lab) -> int:
    """Bytes sent by the uplink of the host that has sent most."""
    return max((link.sent_bytes for link in lab.traffic() if link.link.startswith("u")), default=0)


def export_plan(cluster_file: str, folder: str) -> str:
    """Write the planner's plan of the same tables as TorchRec reads it; returns its path."""
    from shardwright.measure.describe import describe
    from shardwright.planner.plan import make_plan
    from shardwright.report import plan as plan_report
    from shardwright.spec import presets

    cluster = presets.load_cluster(cluster_file)
    result = make_plan(describe(make_model(), make_batch(0, cluster.num_ranks)), cluster, torchrec=True)
    return str(plan_report.write_torchrec_plan(result, Path(folder) / "plan.torchrec.py"))


def result_lines(setting: str, cluster_file: str, replies: dict[str, list[dict[str, Any]]]) -> Iterator[dict[str, Any]]:
    """A JSON line per side."""
    from shardwright.planner.plan import resource_usage, slowest_stage_seconds
    from shardwright.planner.price import roofline
    from shardwright.spec import presets

    cluster = presets.load_cluster(cluster_file)
    sides = make_sides(cluster)
    per_step = {
        name: [1e3 * reply["seconds"] / STEPS for reply in side_replies] for name, side_replies in replies.items()
    }
    for name, times in per_step.items():
        ratios = [ms / overlapped for ms, overlapped in zip(times, per_step["overlapped"], strict=True)]
        line = {
            "benchmark": "sharding",
            "setting": setting,
            "side": name,
            "ms": median_min_max(times),
            "over_ours": median_min_max(ratios, 3),
        }
        line |= {"samples_s": round(LOCAL_BATCH_SIZE * cluster.num_ranks / median(times) * 1e3)}
        line |= {"uplink_mb": round(1e-6 * median(reply["bytes"] for reply in replies[name]), 2)}
        line |= {"losses": [round(loss, 5) for loss in replies[name][0]["losses"]]}
        if name in sides:
            candidate, parts = sides[name].candidate, slowest_stage_seconds(sides[name].candidate)
            message_stages = ("ids", "lengths", "meet", "vectors", "gradients", "spread", "reduce", "reduce.bottom")
            line |= {"predicted_ms": round(1e3 * candidate.seconds, 1) if sides[name].overlap else None}
            line |= {"messages_ms": round(1e3 * sum(parts[stage] for stage in message_stages), 1)}
            line |= {"compute_ms": round(1e3 * sum(s for stage, s in parts.items() if stage not in message_stages), 1)}
            bound = roofline.step_bound(cluster, resource_usage(candidate))
            line |= {"bound_ms": round(1e3 * bound.overlapped_seconds, 1)}
        yield line


def median_min_max(values: Sequence[float], digits: int = 1) -> list[float]:
    return [round(value, digits) for value in (median(values), min(values), max(values))]


def simulate_scaling(cluster_file: str) -> Iterator[dict[str, Any]]:
    """Predicted samples/s with more hosts like the measured ones, at an equal local batch size."""
    from shardwright.measure.describe import describe
    from shardwright.planner.plan import make_plan
    from shardwright.planner.price import primitives
    from shardwright.spec import presets

    cluster = presets.load_cluster(cluster_file)
    for num in SIMULATED_RANKS:
        levels = (cluster.levels[0], replace(cluster.levels[1], num=num // cluster.levels[0].num))
        scaled = primitives.scale_cluster(cluster, levels)
        candidate = make_plan(describe(make_model(), make_batch(0, num)), scaled).candidate
        rate = round(LOCAL_BATCH_SIZE * num / candidate.seconds)
        yield {"benchmark": "sharding", "setting": "simulated", "ranks": num, "samples_s": rate}


def measure(lab: Lab, cluster_file: Path) -> None:
    """Measure a lab with `shardwright measure` into a cluster file."""
    command = [sys.executable, "-m", "shardwright.cli", "measure", "-o", str(cluster_file)]
    result = lab.run(command, on_line=print_first_rank)
    if result.rank is not None:
        raise JobFailed(f'job "measure": rank {result.rank} ended with status {result.status}')


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torchrec", default="", metavar="PYTHON", help="the Python of an environment with torchrec")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--on", nargs="*", default=list(SETTINGS), choices=SETTINGS, metavar="SETTING")
    parser.add_argument("--cluster", default="", help="a folder of cluster files to reuse")
    parser.add_argument("--write", default="", help="name of a file in benchmarks/results")
    parser.add_argument("--smoke", action="store_true", help="the smallest case, to see that it runs")
    args = parser.parse_args()
    if args.smoke:
        args.on, args.rounds = ["loopback 2"], 1
    lines: list[dict[str, Any]] = []
    with TemporaryDirectory() as folder:
        cluster_folder = Path(args.cluster or folder)
        for setting in args.on:
            cluster_file = cluster_folder / f"{setting.replace(' ', '-')}.toml"
            with Lab(SETTINGS[setting], "sharding") as lab:
                if not cluster_file.exists():
                    measure(lab, cluster_file)
                peer = args.torchrec if SETTINGS[setting].num_ranks > 1 else ""
                replies = run_rounds(setting, lab, str(cluster_file), peer, args.rounds)
            for line in result_lines(setting, str(cluster_file), replies):
                lines.append(line)
                print(json.dumps(line), flush=True)
        if FULL_SETTING in args.on:
            for line in simulate_scaling(str(cluster_folder / f"{FULL_SETTING.replace(' ', '-')}.toml")):
                lines.append(line)
                print(json.dumps(line), flush=True)
    if args.write:
        results_file.write(args.write, "sharding", lines)
    return 0


def print_first_rank(rank: int, line: str) -> None:
    if rank == 0:
        print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())

"""DHEN of increasing depth over ranks and hosts: time and memory of each parallelism strategy of the dense model.

    python -m benchmarks.hsdp [--rounds N] [--on SETTING ...] [--depths N ...] [--sides NAME ...] [--cluster FOLDER]
                              [--write NAME]

Run as root. For each setting a lab is created and measured, and one job trains all sides of a depth, interleaved, with
the order rotated by one each round. Settings: "2 x 2", 2 hosts x 2 ranks, 0.45 of a core each, uplinks of 250 Mbit/s,
so that a rank computes about as much per byte of its uplink as an A100 in TF32 per byte of its 200 Gbit/s; the same
with 500 Mbit/s and 1 Gbit/s; "2 x 2, 24:1" also with links inside a host, 24 times as fast as the uplinks, as NVLink is
to RoCE in the paper; "4 x 2". The local batch is 256; a layer has about 0.6 M parameters (benchmarks/hsdp_model.py).

Sides: weights on every rank (DDP), sharded inside hosts (HSDP) or over all ranks (FSDP), each without activation
checkpointing, with "selective" and with "full", all with the same collectives and prefetch; the two strategies with
offload that the planner predicts to be fastest, with the rank's shards in a file; and torch's fully_shard on a mesh of
one and of two axes, with all tables on each rank, so that it exchanges no vectors.

A rank may allocate BUDGET bytes for a job: allocated bytes are counted from before the job is built
(benchmarks/live_memory.py), and a side with a higher peak is dropped after its first round. JSON lines: for each depth
and side milliseconds of a step (median, minimum, maximum over rounds), bytes after a step and at peak, bytes of a
host's uplink by its counter and by the formula, milliseconds that steps waited for collectives, and the planner's
predictions of time and memory; for each depth the planner's choice and how much longer it takes than the fastest that
fits; at the end the median ratio of FSDP to HSDP. Offload is priced at the disk's rates, and its errors are reported
separately: if memory is free, as here, the system keeps the whole file in it. Emulated: hosts, links and the budget.
"""

import argparse
import gc
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import cycle
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

from benchmarks import results_file
from benchmarks.hsdp_model import BATCHES, DENSE_LR, LOCAL_BATCH_SIZE, FullyShardModel, batch, local_batch, model
from benchmarks.live_memory import Counter, compile_counter
from benchmarks.sharding import measure, median_min_max, start_job, uplink_bytes
from benchmarks.turns import TurnClient, TurnServer, make_broadcast
from shardwright.lab.emulated_cluster import Lab
from shardwright.lab.shape import Host, Shape

STEPS, WARMUP_STEPS, FIRST_STEPS = 3, 1, 3  # of a round; of a new side, whose first step creates the optimizer state
DEPTHS = (2, 4, 8, 12, 16, 20, 24)
BUDGET = 160_000_000
HOST = Host(ranks=2, uplink="250mbit", cpu=0.45)
SETTINGS = {
    "2 x 2": Shape((HOST,) * 2),
    "2 x 2, 500 Mbit": Shape((replace(HOST, uplink="500mbit"),) * 2),
    "2 x 2, 1 Gbit": Shape((replace(HOST, uplink="1gbit"),) * 2),
    "2 x 2, 24:1": Shape((replace(HOST, uplink="100mbit", local="2400mbit"),) * 2),
    "4 x 2": Shape((replace(HOST, cpu=0.22),) * 4),
}
Line = dict[str, Any]
RATIOS = {
    "fsdp_over_hsdp": ("FSDP", "HSDP"),
    "fully_shard_1d_over_2d": ("fully_shard 1-D", "fully_shard 2-D"),
    "fully_shard_2d_over_hsdp": ("fully_shard 2-D", "HSDP"),
}
FULLY_SHARD = {"fully_shard 1-D": ("all",), "fully_shard 2-D": ("host", "local")}
TIMEOUT_SECONDS = 3600.0  # of a collective that sleeping ranks wait in
MAX_TURN_SECONDS = 120.0  # of a turn


@cache
def plan_in_budget(cluster: Any, depth: int) -> Any:
    """The planner's result within the budget, and all evaluated strategies."""
    from shardwright.measure.describe import describe
    from shardwright.planner import dense_strategies
    from shardwright.planner.plan import make_plan

    workload = describe(model(depth), batch(0, cluster.num_ranks))
    result = make_plan(workload, cluster)
    return result, dense_strategies.evaluate_strategies(
        result.candidate.problem, result.candidate.placed, result.candidate.ids_after
    )


def with_budget(cluster: Any) -> Any:
    """The cluster with a fastest tier such that the budget remains after the planner's reserve."""
    from shardwright.planner.memory.budget import RESERVED_SHARE

    fast, *rest = cluster.device.tiers
    return replace(
        cluster, device=replace(cluster.device, tiers=(replace(fast, bytes_=int(BUDGET / (1 - RESERVED_SHARE))), *rest))
    )


def plan_of(result: Any, strategy: Any) -> Any:
    lanes = tuple(dict.fromkeys((*result.plan.lanes, "gather", "scatter")))
    return replace(result.plan, dense=strategy.dense, lanes=lanes)


class Rank:
    """A rank of the benchmark's job: its meshes, allocation counter and batches."""

    def __init__(self, cluster: str) -> None:
        from torch.distributed.device_mesh import init_device_mesh

        from shardwright.comm.mesh import Mesh
        from shardwright.spec import presets

        self.cluster, self.counter = with_budget(presets.load_cluster(cluster)), Counter()
        axes = tuple((axis.name, axis.size) for axis in self.cluster.axes)
        lanes = ("main", "ids", "wire", "dense", "gather", "scatter")
        groups = [(lane, axes_of_group) for lane in lanes for axes_of_group in ((), *((name,) for name, _ in axes))]
        self.mesh = Mesh(axes, groups=groups, timeout_seconds=TIMEOUT_SECONDS)
        self.meshes = {
            "fully_shard 1-D": init_device_mesh("cpu", (self.mesh.size,)),
            "fully_shard 2-D": init_device_mesh("cpu", tuple(num for _, num in axes), mesh_dim_names=("a", "b")),
        }
        self.batches = [local_batch(batch(number, self.mesh.size), self.mesh.rank) for number in range(BATCHES)]

    def all_gather(self, *values: float) -> Any:
        """All-gather one row of numbers from each rank."""
        import torch

        from shardwright.comm import collective

        row = torch.tensor([values], dtype=torch.float64)
        return collective.all_gather(row, [1] * self.mesh.size, self.mesh.group(lane="main")).wait()


class Side:
    """A side of one depth, built and warmed up."""

    def __init__(self, rank: Rank, depth: int, name: str) -> None:
        import torch

        from shardwright.runtime.build import build

        gc.collect()
        before = rank.counter.live
        rank.counter.begin()
        self.job = None
        if name in FULLY_SHARD:
            sharded = FullyShardModel(depth, rank.meshes[name])
            self.run = (sharded.step(batch_) for batch_ in cycle(rank.batches))
        else:
            result, options = plan_in_budget(rank.cluster, depth)
            strategy = next(c.strategy for c in options if c.strategy.name == name)
            plan = plan_of(result, strategy)
            job = build(model(depth), plan, rank.mesh, optimizer=lambda p: torch.optim.Adam(p, DENSE_LR))
            self.job = job
            self.run = (output.loss for output in job.run(cycle(rank.batches)))
        for _ in range(FIRST_STEPS):
            next(self.run)
        bytes_RN = rank.all_gather(rank.counter.live - before, rank.counter.most - before)
        self.held, self.most = bytes_RN.max(0).values.tolist()

    def waits(self, num: int) -> dict[str, float]:
        """Milliseconds per step that this rank's thread waited, by stage, over the last `num` steps."""
        milliseconds: dict[str, float] = {}
        if self.job is None:
            return milliseconds
        for event in self.job.tracer.timeline().events:
            if event.kind == "wait" and event.step >= self.job.step - num:
                milliseconds[event.name] = milliseconds.get(event.name, 0.0) + 1e3 * (event.end - event.start) / num
        return milliseconds


def worker(folder: str, cluster: str) -> None:
    """Serve requests "DEPTH SIDE" on every rank; a side is built at its first request."""
    rank = Rank(cluster)
    broadcast, sides, depth = make_broadcast(rank.mesh.group(lane="main")), {}, ""
    turns = TurnServer(folder, "ours", rank.mesh.rank, broadcast)
    turns.reply({})
    for request, warm, steps in turns.turns():
        number, _, name = request.partition(" ")
        if not depth:
            Side(rank, int(number), "DDP")  # allocates what the first job of a process allocates once
        if number != depth:
            sides, depth = {}, number
            gc.collect()
        side = sides[name] = sides.get(name) or Side(rank, int(depth), name)
        loss = [float(next(side.run)) for _ in range(warm)][-1]
        rank.all_gather(0.0)
        start = perf_counter()
        for _ in range(steps):
            next(side.run)
        losses_R1 = rank.all_gather(loss)
        answer = {"seconds": perf_counter() - start, "loss": float(losses_R1.mean())}
        turns.reply(answer | {"held": side.held, "most": side.most, "waits": side.waits(steps)})
    rank.mesh.close()


def side_names(cluster: Any, depth: int, requested: Sequence[str]) -> list[str]:
    """The sides of a depth: those requested, or all strategies without offload, the two with offload that are predicted
    to be fastest, and torch's."""
    options = plan_in_budget(cluster, depth)[1]
    if unknown := set(requested) - {c.strategy.name for c in options} - {*FULLY_SHARD}:
        raise SystemExit(f"no side {sorted(unknown)} at depth {depth}; there are {[c.strategy.name for c in options]}")
    if requested:
        return list(requested)
    offloaded = sorted((c for c in options if c.strategy.dense.offload), key=lambda c: c.seconds)
    resident = [c.strategy.name for c in options if not c.strategy.dense.offload]
    return resident + [c.strategy.name for c in offloaded[:2]] + [*FULLY_SHARD]


def run_rounds(lab: Lab, client: TurnClient, sides: Sequence[str], depth: int, num: int) -> dict[str, list[Line]]:
    """The answers of each side of a depth; a side over the budget is dropped after its first round."""
    by_side: dict[str, list[Line]] = {name: [] for name in sides}
    for round_ in range(num):
        for name in (*sides[round_ % len(sides) :], *sides[: round_ % len(sides)]):
            if by_side[name] and (by_side[name][0]["most"] > BUDGET):
                continue
            if not by_side[name]:
                client.run_turn(f"{depth} {name}", 1, 1, MAX_TURN_SECONDS)
            before = uplink_bytes(lab)
            answer = client.run_turn(f"{depth} {name}", WARMUP_STEPS, STEPS, MAX_TURN_SECONDS)
            by_side[name].append(answer | {"bytes": (uplink_bytes(lab) - before) / (WARMUP_STEPS + STEPS)})
        print(f"depth {depth}: round {round_ + 1} of {num}", file=sys.stderr)
    return by_side


def depth_lines(setting: str, cluster: Any, depth: int, by_side: dict[str, list[Line]]) -> Iterator[dict[str, Any]]:
    planned, candidates = plan_in_budget(cluster, depth)
    by_name = {candidate.strategy.name: candidate for candidate in candidates}
    shape, bytes_ = SETTINGS[setting], planned.candidate.problem.workload.dense_bytes
    hosts = len(shape.hosts)
    for name, answers in by_side.items():
        candidate = by_name.get(name)
        fits = answers[0]["most"] <= BUDGET
        line: dict[str, Any] = {"benchmark": "hsdp", "setting": setting, "depth": depth, "side": name, "fits": fits}
        line["ms"] = median_min_max([1e3 * answer["seconds"] / STEPS for answer in answers])
        line["samples_s"] = round(LOCAL_BATCH_SIZE * shape.num_ranks / line["ms"][0] * 1e3)
        line["held_mb"], line["most_mb"] = (round(1e-6 * answers[0][key], 1) for key in ("held", "most"))
        line["uplink_mb"] = round(1e-6 * median(answer["bytes"] for answer in answers), 2)
        line["waits_ms"] = {
            key: round(median(answer["waits"].get(key, 0.0) for answer in answers), 1)
            for key in sorted({key for answer in answers for key in answer["waits"]})
        }
        if candidate is not None:
            is_fsdp = candidate.strategy.dense.shard == tuple(axis.name for axis in planned.plan.axes)
            line["dense_uplink_mb"] = round(1e-6 * bytes_ * ((3 if is_fsdp else 2) * (hosts - 1) / hosts), 2)
            line["predicted_ms"] = round(1e3 * candidate.seconds, 1)
            line["predicted_mb"] = round(1e-6 * candidate.peak_bytes, 1)
            line["predicted_fits"] = candidate.fits
        line["loss"] = round(answers[0]["loss"], 5)
        yield line


def planner_choice(lines: Sequence[dict[str, Any]], cluster: Any, depth: int) -> dict[str, Any]:
    """The planner's choice for a depth, and the fastest strategy that fits."""
    from shardwright.planner import dense_strategies

    candidates = plan_in_budget(cluster, depth)[1]
    best, rule = dense_strategies.fastest_candidate(candidates), dense_strategies.smallest_candidate(candidates)
    fitting = {line["side"]: line["ms"][0] for line in lines if line["fits"] and "predicted_ms" in line}
    fastest = min(fitting, key=fitting.__getitem__)
    chosen = best.strategy.name if best is not None else ""
    return {
        "benchmark": "hsdp",
        "setting": lines[0]["setting"],
        "depth": depth,
        "chosen": chosen,
        "smallest_set": rule.strategy.name if rule is not None else "",
        "fastest": fastest,
        "longer": round(fitting[chosen] / fitting[fastest] - 1, 3) if chosen in fitting else None,
    }


def summary(setting: str, lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Ratios over depths at which both sides fit, and errors of the predictions."""
    by_side = {(line["depth"], line["side"]): line for line in lines if "ms" in line}
    depths = sorted({depth for depth, _ in by_side})

    def ratios(first: str, second: str) -> list[float]:
        pairs = [(by_side.get((depth, first)), by_side.get((depth, second))) for depth in depths]
        return [a["ms"][0] / b["ms"][0] for a, b in pairs if a and b and a["fits"] and b["fits"]]

    def time_errors(offload: bool) -> list[float]:
        predicted = [line for (_, side), line in by_side.items() if ("offload" in side) == offload]
        return [line["predicted_ms"] / line["ms"][0] - 1 for line in predicted if "predicted_ms" in line]

    without_offload = time_errors(offload=False)
    errors = {"predicted_time_off": without_offload, "predicted_time_off_offload": time_errors(offload=True)}
    errors["predicted_memory_off"] = [
        line["predicted_mb"] / line["most_mb"] - 1 for line in by_side.values() if "predicted_mb" in line
    ]
    longer = [line["longer"] for line in lines if "longer" in line]
    return {
        "benchmark": "hsdp",
        "setting": setting,
        **{name: median_min_max(values, 2) for name, pair in RATIOS.items() if (values := ratios(*pair))},
        "deepest": {
            side: max((d for d in depths if (d, side) in by_side and by_side[d, side]["fits"]), default=0)
            for side in ("DDP", "HSDP", "FSDP")
        },
        "predicted_time_within_10": f"{sum(abs(error) <= 0.1 for error in without_offload)} of {len(without_offload)}",
        **{name: median_min_max(values, 3) for name, values in errors.items() if values},
        "choice_within_2": f"{sum(error is not None and error <= 0.02 for error in longer)} of {len(longer)}",
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--on", nargs="*", default=["2 x 2"], choices=SETTINGS, metavar="SETTING")
    parser.add_argument("--depths", nargs="*", type=int, default=list(DEPTHS))
    parser.add_argument("--sides", nargs="*", default=[], metavar="NAME", help="only these, and no planner's choice")
    parser.add_argument("--cluster", default="", help="a folder in which cluster files are kept and reused")
    parser.add_argument("--write", default="", help="name of a file in benchmarks/results")
    parser.add_argument("--smoke", action="store_true", help="the smallest case, to see that it runs")
    args = parser.parse_args()
    if args.smoke:
        args.rounds, args.depths, args.sides = 1, [2], ["DDP", "HSDP", *FULLY_SHARD]
    all_lines: list[dict[str, Any]] = []
    with TemporaryDirectory() as folder:
        cluster_folder, preload = Path(args.cluster or folder), compile_counter(folder)
        for setting in args.on:
            path = cluster_folder / f"hsdp-{setting.replace(' ', '').replace(',', '-').replace(':', '')}.toml"
            with Lab(SETTINGS[setting], "hsdp") as lab:
                if not path.exists():
                    measure(lab, path)
                for line in measure_setting(setting, lab, str(path), preload, args):
                    all_lines.append(line)
                    print(json.dumps(line), flush=True)
    if args.write:
        results_file.write(args.write, "hsdp", all_lines)
    return 0


def measure_setting(setting: str, lab: Lab, path: str, preload: Path, args: argparse.Namespace) -> Iterator[Line]:
    from shardwright.spec import presets

    cluster, lines = with_budget(presets.load_cluster(path)), []
    inside, between = cluster.levels
    uplink = between.group_bytes_per_second or between.bytes_per_second * inside.num
    ratio = inside.bytes_per_second * inside.num / uplink
    yield {"benchmark": "hsdp", "setting": setting, "inside_over_uplink": round(ratio, 1)}
    call = "from benchmarks.hsdp import worker; worker"
    with TemporaryDirectory() as pipes:
        command = ["env", f"LD_PRELOAD={preload}", sys.executable, "-c", f"{call}({pipes!r}, {path!r})"]
        with start_job(lab, pipes, "ours", command) as client:
            for depth in args.depths:
                sides = side_names(cluster, depth, args.sides)
                answers = run_rounds(lab, client, sides, depth, args.rounds)
                new_lines = list(depth_lines(setting, cluster, depth, answers))
                new_lines += [] if args.sides else [planner_choice(new_lines, cluster, depth)]
                lines += new_lines
                yield from new_lines
    yield summary(setting, lines)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())

"""DHEN of growing depth over ranks and hosts: what holding the dense part in each way takes of time and memory.

    python -m benchmarks.hsdp [--rounds N] [--on SETTING ...] [--depths N ...] [--sides NAME ...] [--cluster FOLDER]
                              [--write NAME]

As root. For each setting a lab is made and measured, and one job trains all sides of a depth in turns, the order turned
by one each round. Settings: "2 x 2", 2 hosts x 2 ranks, 0.45 of a core each, uplinks of 250 Mbit/s, so that a rank
computes about as much for each byte of its uplink as an A100 in TF32 for one of its 200 Gbit/s; the same with 500
Mbit/s and 1 Gbit/s; "2 x 2, 24:1" with links inside a host, too, and these 24 times as fast as the uplinks, as NVLink
is to RoCE in the paper; "4 x 2". Every rank has 256 samples of a step; a layer has about 0.6 M parameters
(benchmarks/hsdp_model.py).

Sides: weights on every rank (DDP), cut inside hosts (HSDP), cut over all (FSDP), each with what is computed kept,
recomputed but for products ("selective") or whole ("full"), the same gathers, sums and prefetch in all; the fastest two
of these with the rank's part in a file ("offload"); and torch's fully_shard on a mesh of one and of two axes, with
tables of its own on each rank, so that it exchanges no vectors.

A rank may hold BUDGET bytes for a job: bytes allocated are counted where memory is asked for, from before the job is
built (benchmarks/live_memory.py), and a side whose most is more does not take part. JSON lines: of each depth and side
milliseconds of a step (median, least, most over rounds), bytes at rest and at most, what a host's uplink carried by
its counter beside the closed form, milliseconds that steps waited for gathers and sums, what the planner predicts of
time and memory; of each depth what the planner chose and how much longer that takes than the fastest that fits; at the
end the median ratio of FSDP to HSDP. What is offloaded is priced at the disk's rates, and told apart: where there is
memory to spare, as here, the system keeps all of the file in it. Emulated: hosts, links and the budget.
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
from benchmarks.hsdp_model import BATCHES, OWN, RATE, Stock, batch, model, part
from benchmarks.live_memory import Counter, library
from benchmarks.sharding import carried, job, measure, three
from benchmarks.turns import Asked, Asker, shared
from shardwright.lab.emulated_cluster import Lab
from shardwright.lab.shape import Host, Shape

STEPS, WARM, SETTLED = 3, 1, 3  # of a turn, and of a side that is built: the first step makes the optimizer's state
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
RATIOS = {
    "fsdp_over_hsdp": ("FSDP", "HSDP"),
    "fully_shard_1d_over_2d": ("fully_shard 1-D", "fully_shard 2-D"),
    "fully_shard_2d_over_hsdp": ("fully_shard 2-D", "HSDP"),
}
STOCK = {"fully_shard 1-D": ("all",), "fully_shard 2-D": ("host", "local")}
PATIENCE_SECONDS = 3600.0  # of a rank that sleeps
MOST_SECONDS = 120.0  # of a turn


@cache
def planned(cluster: Any, depth: int) -> Any:
    """The planner's answer within the budget, and every way beside it."""
    from shardwright.measure.describe import describe
    from shardwright.planner import dense_strategies
    from shardwright.planner.plan import make_plan

    workload = describe(model(depth), batch(0, cluster.num_ranks))
    found = make_plan(workload, cluster)
    return found, dense_strategies.evaluate_strategies(
        found.candidate.problem, found.candidate.placed, found.candidate.ids_after
    )


def within(cluster: Any) -> Any:
    """The cluster with the budget as its fastest tier: what the planner keeps aside is not a job's."""
    from shardwright.planner.memory.budget import RESERVED_SHARE

    fast, *rest = cluster.device.tiers
    return replace(
        cluster, device=replace(cluster.device, tiers=(replace(fast, bytes_=int(BUDGET / (1 - RESERVED_SHARE))), *rest))
    )


def plan_of(found: Any, way: Any) -> Any:
    return replace(found.plan, dense=way.dense, lanes=tuple(dict.fromkeys((*found.plan.lanes, "gather", "scatter"))))


class Rank:
    """One of the job's, and the sides of the depth that it was asked for last."""

    def __init__(self, cluster: str) -> None:
        from torch.distributed.device_mesh import init_device_mesh

        from shardwright.comm.mesh import Mesh
        from shardwright.spec import presets

        self.cluster, self.counter = within(presets.load_cluster(cluster)), Counter()
        axes = tuple((level.name, level.num) for level in reversed(self.cluster.levels))
        lanes = ("main", "ids", "wire", "dense", "gather", "scatter")
        along = [(), *((name,) for name, _ in axes)]
        self.mesh = Mesh(axes, lanes=lanes, timeout_seconds=PATIENCE_SECONDS, along=along)
        self.meshes = {
            "fully_shard 1-D": init_device_mesh("cpu", (self.mesh.size,)),
            "fully_shard 2-D": init_device_mesh("cpu", tuple(num for _, num in axes), mesh_dim_names=("a", "b")),
        }
        self.batches = [part(batch(number, self.mesh.size), self.mesh.rank) for number in range(BATCHES)]

    def said(self, *values: float) -> Any:
        """What each rank says, a row of each."""
        import torch

        from shardwright.comm import collective

        own = torch.tensor([values], dtype=torch.float64)
        return collective.all_gather(own, [1] * self.mesh.size, self.mesh.group(lane="main")).wait()


class Side:
    """One of a depth, built and warm."""

    def __init__(self, rank: Rank, depth: int, name: str) -> None:
        import torch

        from shardwright.runtime.build import build

        gc.collect()
        before = rank.counter.live
        rank.counter.begin()
        self.job = None
        if name in STOCK:
            stock = Stock(depth, rank.meshes[name])
            self.run = (stock.step(one) for one in cycle(rank.batches))
        else:
            found, known = planned(rank.cluster, depth)
            way = next(one.strategy for one in known if one.strategy.name == name)
            job = build(model(depth), plan_of(found, way), rank.mesh, optimizer=lambda p: torch.optim.Adam(p, RATE))
            self.job = job
            self.run = (one.loss for one in job.run(cycle(rank.batches)))
        for _ in range(SETTLED):
            next(self.run)
        bytes_RN = rank.said(rank.counter.live - before, rank.counter.most - before)
        self.held, self.most = bytes_RN.max(0).values.tolist()

    def waits(self, num: int) -> dict[str, float]:
        """Milliseconds of a step that this rank's thread did nothing but wait, by what for."""
        found: dict[str, float] = {}
        if self.job is None:
            return found
        for event in self.job.tracer.timeline().events:
            if event.kind == "wait" and event.step >= self.job.step - num:
                found[event.name] = found.get(event.name, 0.0) + 1e3 * (event.end - event.start) / num
        return found


def worker(folder: str, cluster: str) -> None:
    """Every rank: asked for "DEPTH SIDE", it builds the sides of a depth when they are first asked for."""
    rank = Rank(cluster)
    turns, sides, depth = Asked(folder, "ours", rank.mesh.rank, shared(rank.mesh.group(lane="main"))), {}, ""
    turns.tell({})
    for asked, warm, steps in turns.turns():
        number, _, name = asked.partition(" ")
        if not depth:
            Side(rank, int(number), "DDP")  # what the first job of a process makes for all
        if number != depth:
            sides, depth = {}, number
            gc.collect()
        side = sides[name] = sides.get(name) or Side(rank, int(depth), name)
        loss = [float(next(side.run)) for _ in range(warm)][-1]
        rank.said(0.0)
        start = perf_counter()
        for _ in range(steps):
            next(side.run)
        losses_R1 = rank.said(loss)
        told = {"seconds": perf_counter() - start, "loss": float(losses_R1.mean())}
        turns.tell(told | {"held": side.held, "most": side.most, "waits": side.waits(steps)})
    rank.mesh.close()


def names(cluster: Any, depth: int, asked: Sequence[str]) -> list[str]:
    """The sides of a depth: those asked for, or all ways without offload, those that the planner holds for the two
    fastest with it, and torch's."""
    known = planned(cluster, depth)[1]
    if unknown := set(asked) - {one.strategy.name for one in known} - {*STOCK}:
        raise SystemExit(
            f"no side {sorted(unknown)} at depth {depth}; there are {[one.strategy.name for one in known]}"
        )
    if asked:
        return list(asked)
    away = sorted((one for one in known if one.strategy.dense.offload), key=lambda one: one.seconds)
    near = [one.strategy.name for one in known if not one.strategy.dense.offload]
    return near + [one.strategy.name for one in away[:2]] + [*STOCK]


def rounds(lab: Lab, asker: Asker, sides: Sequence[str], depth: int, num: int) -> dict[str, list[dict[str, Any]]]:
    """What each side of a depth answered; those that hold more than the budget after their first turn no more."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in sides}
    for turn in range(num):
        for name in (*sides[turn % len(sides) :], *sides[: turn % len(sides)]):
            if found[name] and (found[name][0]["most"] > BUDGET):
                continue
            if not found[name]:
                asker.turn(f"{depth} {name}", 1, 1, MOST_SECONDS)
            before = carried(lab)
            answer = asker.turn(f"{depth} {name}", WARM, STEPS, MOST_SECONDS)
            found[name].append(answer | {"bytes": (carried(lab) - before) / (WARM + STEPS)})
        print(f"depth {depth}: round {turn + 1} of {num}", file=sys.stderr)
    return found


def told(setting: str, cluster: Any, depth: int, found: dict[str, list[dict[str, Any]]]) -> Iterator[dict[str, Any]]:
    made, known = planned(cluster, depth)
    by_name = {one.strategy.name: one for one in known}
    shape, bytes_ = SETTINGS[setting], made.candidate.problem.workload.dense_bytes
    hosts = len(shape.hosts)
    for name, answers in found.items():
        one = by_name.get(name)
        fits = answers[0]["most"] <= BUDGET
        line: dict[str, Any] = {"benchmark": "hsdp", "setting": setting, "depth": depth, "side": name, "fits": fits}
        line["ms"] = three([1e3 * each["seconds"] / STEPS for each in answers])
        line["samples_s"] = round(OWN * shape.num_ranks / line["ms"][0] * 1e3)
        line["held_mb"], line["most_mb"] = (round(1e-6 * answers[0][key], 1) for key in ("held", "most"))
        line["uplink_mb"] = round(1e-6 * median(each["bytes"] for each in answers), 2)
        line["waits_ms"] = {
            key: round(median(each["waits"].get(key, 0.0) for each in answers), 1)
            for key in sorted({key for each in answers for key in each["waits"]})
        }
        if one is not None:
            times = (
                3 * (hosts - 1) / hosts
                if one.strategy.dense.shard == tuple(axis for axis, _ in made.plan.axes)
                else None
            )
            line["dense_uplink_mb"] = round(1e-6 * bytes_ * (times or 2 * (hosts - 1) / hosts), 2)
            line["predicted_ms"] = round(1e3 * one.seconds, 1)
            line["predicted_mb"] = round(1e-6 * one.peak_bytes, 1)
            line["predicted_fits"] = one.fits
        line["loss"] = round(answers[0]["loss"], 5)
        yield line


def choice(lines: Sequence[dict[str, Any]], cluster: Any, depth: int) -> dict[str, Any]:
    """What the planner chose for a depth, beside what was fastest."""
    from shardwright.planner import dense_strategies

    known = planned(cluster, depth)[1]
    best, rule = dense_strategies.fastest_candidate(known), dense_strategies.smallest_candidate(known)
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
    """Over depths; FSDP over HSDP where both fit."""
    by = {(line["depth"], line["side"]): line for line in lines if "ms" in line}
    depths = sorted({depth for depth, _ in by})

    def ratios(first: str, second: str) -> list[float]:
        pairs = [(by.get((depth, first)), by.get((depth, second))) for depth in depths]
        return [a["ms"][0] / b["ms"][0] for a, b in pairs if a and b and a["fits"] and b["fits"]]

    def off(away: bool) -> list[float]:
        priced = [line for line in by.values() if "predicted_ms" in line and ("offload" in line["side"]) == away]
        return [line["predicted_ms"] / line["ms"][0] - 1 for line in priced]

    errors = {"predicted_time_off": off(away=False), "predicted_time_off_offload": off(away=True)}
    errors["predicted_memory_off"] = [
        line["predicted_mb"] / line["most_mb"] - 1 for line in by.values() if "predicted_mb" in line
    ]
    longer = [line["longer"] for line in lines if "longer" in line]
    return {
        "benchmark": "hsdp",
        "setting": setting,
        **{name: three(found, 2) for name, pair in RATIOS.items() if (found := ratios(*pair))},
        "deepest": {
            side: max((d for d in depths if (d, side) in by and by[d, side]["fits"]), default=0)
            for side in ("DDP", "HSDP", "FSDP")
        },
        "predicted_time_within_10": f"{sum(abs(one) <= 0.1 for one in off(away=False))} of {len(off(away=False))}",
        **{name: three(found, 3) for name, found in errors.items() if found},
        "choice_within_2": f"{sum(one is not None and one <= 0.02 for one in longer)} of {len(longer)}",
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--on", nargs="*", default=["2 x 2"], choices=SETTINGS, metavar="SETTING")
    parser.add_argument("--depths", nargs="*", type=int, default=list(DEPTHS))
    parser.add_argument("--sides", nargs="*", default=[], metavar="NAME", help="only these, and no word on the choice")
    parser.add_argument("--cluster", default="", help="a folder of cluster files, kept and taken again")
    parser.add_argument("--write", default="", help="name of a file in benchmarks/results")
    parser.add_argument("--smoke", action="store_true", help="the smallest case, to see that it runs")
    asked = parser.parse_args()
    if asked.smoke:
        asked.rounds, asked.depths, asked.sides = 1, [2], ["DDP", "HSDP", *STOCK]
    every: list[dict[str, Any]] = []
    with TemporaryDirectory() as folder:
        kept, preload = Path(asked.cluster or folder), library(folder)
        for setting in asked.on:
            path = kept / f"hsdp-{setting.replace(' ', '').replace(',', '-').replace(':', '')}.toml"
            with Lab(SETTINGS[setting], "hsdp") as lab:
                if not path.exists():
                    measure(lab, path)
                for line in measured(setting, lab, str(path), preload, asked):
                    every.append(line)
                    print(json.dumps(line), flush=True)
    if asked.write:
        results_file.write(asked.write, "hsdp", every)
    return 0


def measured(setting: str, lab: Lab, path: str, preload: Path, wanted: argparse.Namespace) -> Iterator[dict[str, Any]]:
    from shardwright.spec import presets

    cluster, lines = within(presets.load_cluster(path)), []
    inside, across = cluster.levels
    uplink = across.group_bytes_per_second or across.bytes_per_second * inside.num
    ratio = inside.bytes_per_second * inside.num / uplink
    yield {"benchmark": "hsdp", "setting": setting, "inside_over_uplink": round(ratio, 1)}
    call = "from benchmarks.hsdp import worker; worker"
    with TemporaryDirectory() as pipes:
        command = ["env", f"LD_PRELOAD={preload}", sys.executable, "-c", f"{call}({pipes!r}, {path!r})"]
        with job(lab, pipes, "ours", command) as asker:
            for depth in wanted.depths:
                sides = names(cluster, depth, wanted.sides)
                of_depth = list(told(setting, cluster, depth, rounds(lab, asker, sides, depth, wanted.rounds)))
                of_depth += [] if wanted.sides else [choice(of_depth, cluster, depth)]
                lines += of_depth
                yield from of_depth
    yield summary(setting, lines)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())

"""HET's own topology: workers that read and update tables on one server over its slow link.

    python -m benchmarks.het_servers [--model MODEL ...] [--rates RATE ...] [--links all|server] [--sides SIDE ...]
        [--workers N] [--rounds N] [--cluster FILE] [--write NAME]

As root. An emulated lab of 9 hosts, or N + 1: 8 workers with 0.2 core, and a server without a quota, to which they
leave 0.4 core of two. Models, tables and ids are those of benchmarks.het. All sides train in turns, in an order that
rotates each round; first 300 or 20 steps of warm-up over links of 10 Gbit/s, then the rounds with these links, then
with links of each rate, of all hosts, or of the server alone (as if the workers were GPUs of one machine):
    all on the server       a row for each id, and the dense parameters, are read from the server and their gradients
                            pushed, as TensorFlow's parameter servers have it
    no duplicates removed   tables on the server, a row for each id; dense gradients are all-reduced, as in TensorFlow
                            Parallax
    no cache                each distinct row of a batch is read and its gradient pushed
    no cache A/A            the same again: how much turns differ
    HET's protocol 100      as HET's released code has it: every copy is validated in every batch
    exact, copies           rows stay in copies, and are sent again if others have changed them
    exact, rows on workers  workers own the rows, of which they have 40 % in memory together; the others are on the
                            server
    bounded 10, 100         copies with pull and push of 10 and of 100 uses of a row
    sharded                 no server: the planner's plan over the 8 workers, which own the rows (benchmarks.het has
                            the same with bounded staleness)
The rivals' own systems are not run: these are our messages, with as many rows as theirs would have. Dense gradients are
all-reduced between workers on all sides but the first. Messages are not encrypted. What a step takes longer than with
10 Gbit/s is its exposed communication. A JSON line per side and rate: milliseconds per step (median, least, most),
speedup over the side without a cache in the same round, kilobytes per step on the server's link in both directions,
exposed milliseconds, the speedup that bytes on the link, one direction after the other, and steps with 10 Gbit/s
would give (`bound`), and at the first rate, if all links have it, the planner's step (`predicted_ms`).
"""

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks import results_file
from benchmarks.het import CPU, MODELS, RANKS, ClickStreamTask, moved_rows
from benchmarks.het_sides import BASE, SERVED, SIDES, Task, predict
from benchmarks.sharding import measure, median_min_max, start_job
from shardwright.lab.emulated_cluster import Lab
from shardwright.lab.shape import Host, Shape, parse_bits_per_second
from shardwright.spec import presets

SERVER_CPU = 0.0  # no quota
FREE_RATE = "10gbit"
WARM_STEPS, SHORT_WARM_STEPS = 300, 20
UNMEASURED_STEPS = 2  # at the beginning of a turn
Replies = dict[str, list[dict[str, Any]]]  # by side, of each round


def warm_steps(side: str) -> int:
    own = SERVED.get(side)
    is_short = own is None or not own.on_workers and not own.bound
    return SHORT_WARM_STEPS if is_short else WARM_STEPS


def server_bytes(lab: Lab, workers: int) -> tuple[int, int]:
    """Bytes that the server's link has sent, and received."""
    link = next(link for link in lab.traffic() if link.link == f"u{workers}")
    return link.sent_bytes, link.received_bytes


def run_sides(task: Task, cluster: str, args: argparse.Namespace) -> dict[str, Replies]:
    """Train in turns; by rate, the replies with a step's bytes on the server's link."""
    replies: dict[str, Replies] = {rate: {side: [] for side in args.sides} for rate in (FREE_RATE, *args.rates)}
    hosts = [Host(uplink=FREE_RATE, cpu=CPU)] * args.workers + [Host(uplink=FREE_RATE, cpu=SERVER_CPU)]
    with TemporaryDirectory() as folder, Lab(Shape(tuple(hosts)), "het") as lab:
        call = f"from benchmarks.het_sides import worker; from {type(task).__module__} import {type(task).__name__}; "
        call += f"worker({folder!r}, {task!r}, {cluster!r}, {args.sides!r})"
        with start_job(lab, folder, "ours", [sys.executable, "-c", call]) as client:
            for side in args.sides:
                client.run_turn(side, 2 if args.smoke else warm_steps(side), 1)
                print(f"{side}: warm", file=sys.stderr)
            for rate, number in [(rate, number) for rate in replies for number in range(args.rounds)]:
                lab.set_uplinks(rate, [args.workers] if args.links == "server" else None)
                first = number % len(args.sides)
                for side in (*args.sides[first:], *args.sides[:first]):
                    before = server_bytes(lab, args.workers)
                    reply = client.run_turn(side, UNMEASURED_STEPS, args.steps)
                    steps = UNMEASURED_STEPS + args.steps
                    after = server_bytes(lab, args.workers)
                    moved = [(end - start) / steps for end, start in zip(after, before, strict=True)]
                    replies[rate][side].append(reply | {"bytes": moved})
                print(f"{rate}: round {number + 1} of {args.rounds}", file=sys.stderr)
            lab.set_uplinks(FREE_RATE)  # for the end of the jobs
    return replies


def run(task: Task, args: argparse.Namespace) -> list[dict[str, Any]]:
    with TemporaryDirectory() as folder:
        cluster = args.cluster or f"{folder}/cluster.toml"
        if not Path(cluster).exists():
            rate = FREE_RATE if args.links == "server" else args.rates[0]
            with Lab(Shape((Host(uplink=rate, cpu=CPU),) * args.workers), "het") as lab:
                measure(lab, Path(cluster))
        replies, predicted = run_sides(task, cluster, args), predict(task, presets.load_cluster(cluster))
    free = replies[FREE_RATE]
    lines = [line for rate, own in replies.items() for line in result_lines(rate, own, free, args.steps)]
    for line in lines if args.links == "all" else ():
        if line["rate"] == args.rates[0] and line["side"] in predicted:
            line["predicted_ms"] = round(predicted[line["side"]], 1)
    common = {"benchmark": "het_servers", "model": task.name, "links": args.links}
    common |= {"workers": args.workers} if args.workers != RANKS else {}
    return [common | line for line in lines]


def result_lines(
    rate: str, replies: Mapping[str, list[dict[str, Any]]], free: Replies, steps: int
) -> list[dict[str, Any]]:
    times = {side: [1e3 * reply["seconds"] / steps for reply in replies[side]] for side in replies}
    free_ms = {side: 1e3 * median(reply["seconds"] for reply in free[side]) / steps for side in replies}
    kilobytes = {
        side: [1e-3 * median(reply["bytes"][way] for reply in replies[side]) for way in (0, 1)] for side in replies
    }
    link_ms = {side: 8e6 * sum(kilobytes[side]) / parse_bits_per_second(rate) for side in replies}
    exposed = {side: median(times[side]) - free_ms[side] for side in replies}
    lines = list[dict[str, Any]]()
    for side in replies:
        ratios = [base / ms for base, ms in zip(times[BASE], times[side], strict=True)]
        line: dict[str, Any] = {"rate": rate, "side": side, "rounds": len(ratios)}
        line |= {"ms": median_min_max(times[side]), "over_no_cache": median_min_max(ratios, 2)}
        line |= {"server_sent_kb": round(kilobytes[side][0]), "server_received_kb": round(kilobytes[side][1])}
        line |= {"fewer_bytes_percent": round(100 - 100 * sum(kilobytes[side]) / sum(kilobytes[BASE]), 1)}
        if rate != FREE_RATE:
            line |= {"communication_percent": round(100 * exposed[side] / median(times[side]))}
            line |= {"exposed_ms": round(exposed[side], 1)}
            line |= {"less_exposed_percent": round(100 - 100 * exposed[side] / exposed[BASE], 1)}
            bounds = [free_ms[each] + link_ms[each] for each in (BASE, side)]
            line |= {"bound": round(bounds[0] / bounds[1], 2)}
        lines.append(line | moved_rows(replies[side]))
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="*", choices=MODELS, default=MODELS)
    parser.add_argument("--rates", nargs="*", default=["250mbit", "100mbit", "60mbit"], help="of the links")
    parser.add_argument("--links", choices=("all", "server"), default="all", help="others have 10 Gbit/s")
    parser.add_argument(
        "--sides", nargs="*", choices=SIDES, default=SIDES, help="the side without a cache is one of them"
    )
    parser.add_argument("--workers", type=int, default=RANKS, metavar="N", help="with 0.2 core and 128 samples each")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=6, help="of a turn")
    parser.add_argument("--cluster", default="", metavar="FILE", help="cluster file of such a lab; measured if missing")
    parser.add_argument("--write", default="", help="name of a file in benchmarks/results")
    parser.add_argument("--smoke", action="store_true", help="the smallest case, to see that it runs")
    args = parser.parse_args(arguments)
    args.sides = [side for side in SIDES if side in {BASE, *args.sides}]
    if args.smoke:
        args.model, args.rates, args.rounds, args.steps = MODELS[:1], ["1gbit"], 1, 2
    lines: list[dict[str, Any]] = []
    for name in args.model:
        for line in run(ClickStreamTask(name, args.workers), args):
            lines.append(line)
            print(json.dumps(line), flush=True)
    if args.write:
        results_file.write(args.write, "het_servers", lines)
    return 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())

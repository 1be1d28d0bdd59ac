"""Bounded staleness on HET's own topology: workers that read and update tables on one server over its slow link.

    python -m benchmarks.het_servers [--model MODEL ...] [--rate RATE] [--rounds N] [--cluster FILE] [--write NAME]

As root. An emulated lab of 9 hosts, each with a link of this rate: 8 workers with 0.2 core, and a server without a
quota, to which they leave 0.4 core of two. Models, tables and ids are those of benchmarks.het. All sides train in
turns, in an order that rotates each round:
    no duplicates removed   tables on the server, a row for each id, as TensorFlow Parallax has it (its own protocol is
                            not run: our messages, with as many rows as it would send)
    no cache                tables on the server; each distinct row of a batch is read and its gradient pushed
    no cache A/A            the same again: how much turns differ
    exact                   tables on the server; rows stay in copies, and are sent again if others have changed them
    bounded 10, 100         tables on the server; pull and push of 10 and of 100; after 300 steps of warm-up
    sharded                 no server: the planner's plan over the 8 workers, which own the rows (benchmarks.het has
                            the same with bounded staleness)
Dense gradients are all-reduced between workers on all sides. Messages to the server are not encrypted, like those
between workers. Sides on the server, but A/A and "bounded 10", run again in a lab without limited links; what a step
takes longer with them is its exposed communication. A JSON line per side: milliseconds per step (median, least, most),
speedup over the side without a cache in the same round, kilobytes per step on the server's link in both directions,
exposed milliseconds, and the speedup that bytes on the link and steps without limited links would give (`bound`).
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks import results_file
from benchmarks.het import COPIES, CPU, LOCAL_BATCH, MODELS, NUM_BATCHES, RANKS, make_batch, make_model, make_results
from benchmarks.sharding import measure, median_min_max, start_job
from benchmarks.turns import TurnServer, make_broadcast
from shardwright.lab.emulated_cluster import Lab
from shardwright.lab.shape import Host, Shape, parse_bits_per_second

SERVER_CPU = 0.0  # no quota
FIRST_PORT = 5800
BASE = "no cache"
# By side on the server: pull and push, whether rows stay in copies, whether duplicates are removed.
SERVED = {
    "no duplicates removed": (0, False, False),
    BASE: (0, False, True),
    "no cache A/A": (0, False, True),
    "exact": (0, True, True),
    "bounded 10": (10, True, True),
    "bounded 100": (100, True, True),
}
SIDES = (*SERVED, "sharded")
FREE_SIDES = ("no duplicates removed", BASE, "exact", "bounded 100")  # that run without limited links too
WARM_STEPS, STEPS = {"bounded 10": 300, "bounded 100": 300}, 10
SHORT_WARM_STEPS = 20
TIMEOUT_SECONDS = 3600.0


def serve(folder: str) -> None:
    """Body of the server's host: a table server for each side, since each serves one run."""
    from threading import Thread

    from shardwright.embeddings.service import server
    from shardwright.lab.network import rank_address

    server.check_address = lambda *_: None  # the lab's network is on this machine
    for number, _ in enumerate(SERVED):
        table_server = server.TableServer(f"tcp://{rank_address(RANKS)}:{FIRST_PORT + number}")
        Thread(target=table_server.run, args=(lambda line: None,), daemon=True).start()
    while not Path(folder, "ended").exists():
        time.sleep(0.5)


def keep_no_copies(served: Any) -> None:
    """Change tables on a server so that all distinct rows of a batch are read."""
    from shardwright.embeddings.copies.row_copies import NO_VERSION

    update = served.update

    def update_and_forget(*arguments: Any) -> None:
        update(*arguments)
        for group in served.groups:
            group.copies._version_L.fill_(NO_VERSION)
            group.copies._lease_end_L.fill_(-1)

    served.update = update_and_forget


def keep_duplicates(served: Any) -> None:
    """Change tables on a server, of which no copies are kept, so that a row is read and pushed for each id."""
    import torch

    from shardwright.comm.pending import Pending
    from shardwright.embeddings.copies.row_copies import NO_VERSION
    from shardwright.embeddings.service import calls
    from shardwright.embeddings.service.owned_rows import GroupRead

    find, push = served.find_copies, served._push
    uses: list[Any] = []

    def find_copies(distinct: Any, *, training: bool) -> Any:
        counts = torch.bincount(distinct.ids.values.long() + starts(distinct), minlength=len(distinct.rows_U))
        by_table = counts.split(distinct.counts)
        uses[:] = [torch.cat([by_table[position] for position in positions]) for positions in served._positions]
        return find(distinct, training=training)

    def starts(distinct: Any) -> Any:
        """By id, where the distinct rows of its table begin."""
        first = torch.tensor([0, *distinct.counts[:-1]]).cumsum(0)
        sizes = distinct.ids.offsets.diff().view(len(distinct.ids.tables), -1).sum(1)
        return first[torch.tensor([*distinct.ids.tables])].repeat_interleave(sizes)

    def fetch(batches: Any) -> Any:
        reads = []
        for group, batch, uses_U in zip(served.groups, batches, uses, strict=True):
            rows = group.numbers.local_rows(batch.rows_U).repeat_interleave(uses_U)
            reads.append(GroupRead(rows, torch.full_like(rows, NO_VERSION)))
        reply = served.connections[0].call(calls.read_call(served._round, reads))

        def receive() -> None:
            answers = calls.parse_answer(reply.wait())
            served._confirm()
            for group, batch, uses_U, (renewals, values) in zip(served.groups, batches, uses, answers, strict=True):
                first = uses_U.cumsum(0) - uses_U
                group.receive_renewals(batch, renewals[first])
                batch.values_FX = values[first]

        return Pending(receive)

    def push_each(by_group: Any, optimizer: Any, steps: Any) -> None:
        repeated = []
        for ((rows, counts, values),), uses_U in zip(by_group, uses, strict=True):
            parts = (rows, counts, values / uses_U.unsqueeze(1))
            repeated.append([tuple(part.repeat_interleave(uses_U, 0) for part in parts)])
        push(repeated, optimizer, steps)

    served.find_copies, served.fetch, served._push = find_copies, fetch, push_each


def build_jobs(name: str, cluster_file: str, sides: Sequence[str]) -> tuple[dict[str, Any], list[Any]]:
    """The jobs of a worker, by side, and their meshes."""
    import torch

    from shardwright import Bounded, TableServers, keep_on_servers
    from shardwright.comm.transport import servers
    from shardwright.lab.network import rank_address
    from shardwright.runtime.build import build
    from shardwright.runtime.dense_layout import mesh_for
    from shardwright.spec import presets

    servers.check_address = lambda *_: None
    plans, jobs, meshes = make_results(name, presets.load_cluster(cluster_file)), {}, []
    for side in sides:
        model = make_model(name)
        hottest = {table.name: torch.arange(table.rows) for table in model.sparse.tables}
        connections = None
        if side in SERVED:
            bound, _, _ = SERVED[side]
            plan = plans["exact"][0]
            bounds = {table.table: Bounded(bound, bound, COPIES) for table in plan.tables}
            plan = keep_on_servers(plan, bounds)
            address = f"tcp://{rank_address(RANKS)}:{FIRST_PORT + [*SERVED].index(side)}"
            connections = TableServers((address,), timeout_seconds=TIMEOUT_SECONDS)
        else:
            plan = plans["exact"][0]
        meshes.append(mesh_for(plan, TIMEOUT_SECONDS, connections))
        optimizer = lambda parameters: torch.optim.SGD(parameters, 0.01)  # noqa: E731
        jobs[side] = build(model, plan, meshes[-1], optimizer=optimizer, hottest=hottest)
        if side in SERVED:
            _, has_copies, deduplicates = SERVED[side]
            for change in [keep_no_copies] * (not has_copies) + [keep_duplicates] * (not deduplicates):
                change(model.sparse.exchange.served)
    return jobs, meshes


def worker(folder: str, name: str, cluster_file: str, sides: Sequence[str]) -> None:
    """Body of every host."""
    if os.environ["RANK"] == str(RANKS):
        serve(folder)
        return
    os.environ["WORLD_SIZE"] = os.environ["GROUP_WORLD_SIZE"] = str(RANKS)
    from itertools import cycle
    from time import perf_counter

    import torch

    from shardwright.comm import collective

    jobs, meshes = build_jobs(name, cluster_file, sides)
    group, rank = meshes[0].group(), meshes[0].rank
    batches = [make_batch(name, 10_000 * (rank + 1) + number, LOCAL_BATCH) for number in range(NUM_BATCHES)]
    runs = {side: job.run(cycle(batches)) for side, job in jobs.items()}

    def barrier_time() -> float:
        collective.all_reduce(torch.zeros(1), group).wait()
        return perf_counter()

    def counts(side: str) -> list[int]:
        of_groups = jobs[side].copy_counts().values()
        own = [[each.read, each.validated, each.sent, each.pushed] for each in of_groups]
        return torch.tensor([[0] * 4, *own]).sum(0).tolist()

    turns = TurnServer(folder, "ours", rank, make_broadcast(group))
    turns.reply({})
    for side, warm, steps in turns.turns():
        losses = [float(next(runs[side]).loss) for _ in range(warm)]
        before, start = counts(side), barrier_time()
        for _ in range(steps):
            next(runs[side])
        seconds = barrier_time() - start
        moved = [after - earlier for after, earlier in zip(counts(side), before, strict=True)]
        turns.reply({"seconds": seconds, "loss": losses[-1:], "rows": moved})
    if rank == 0:
        Path(folder, "ended").touch()
    for mesh in meshes:
        mesh.close()


def server_bytes(lab: Lab) -> tuple[int, int]:
    """Bytes that the server's link has sent, and received."""
    link = next(link for link in lab.traffic() if link.link == f"u{RANKS}")
    return link.sent_bytes, link.received_bytes


def run_sides(
    rate: str, name: str, cluster: str, sides: Sequence[str], args: argparse.Namespace
) -> dict[str, list[dict[str, Any]]]:
    """Run these sides in turns; returns by side the reply of each round, with a step's bytes on the server's link."""
    replies: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
    hosts = [Host(uplink=rate, cpu=CPU)] * RANKS + [Host(uplink=rate, cpu=SERVER_CPU)]
    with TemporaryDirectory() as folder, Lab(Shape(tuple(hosts)), "het") as lab:
        call = f"from benchmarks.het_servers import worker; worker({folder!r}, {name!r}, {cluster!r}, {list(sides)!r})"
        with start_job(lab, folder, "ours", [sys.executable, "-c", call]) as client:
            for side in sides:
                client.run_turn(side, args.warm.get(side, SHORT_WARM_STEPS), 1)
                print(f"{side}: warm", file=sys.stderr)
            for number in range(args.rounds):
                first = number % len(sides)
                for side in (*sides[first:], *sides[:first]):
                    before = server_bytes(lab)
                    reply = client.run_turn(side, 2, args.steps)
                    moved = [after - earlier for after, earlier in zip(server_bytes(lab), before, strict=True)]
                    replies[side].append(reply | {"bytes": [each / (2 + args.steps) for each in moved]})
                print(f"round {number + 1} of {args.rounds}", file=sys.stderr)
    return replies


def run(name: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    with TemporaryDirectory() as folder:
        cluster = args.cluster or f"{folder}/cluster.toml"
        if not Path(cluster).exists():
            with Lab(Shape((Host(uplink=args.rate, cpu=CPU),) * RANKS), "het") as lab:
                measure(lab, Path(cluster))
        limited = run_sides(args.rate, name, cluster, SIDES, args)
        for line in result_lines(name, args.rate, limited, {}, args.steps):  # in case the rest takes too long
            print(json.dumps(line), file=sys.stderr)
        without = run_sides("", name, cluster, FREE_SIDES, args)
    return result_lines(name, args.rate, limited, without, args.steps)


def result_lines(
    name: str,
    rate: str,
    limited: Mapping[str, list[dict[str, Any]]],
    without: Mapping[str, list[dict[str, Any]]],
    steps: int,
) -> list[dict[str, Any]]:
    times, free = (
        {side: [1e3 * reply["seconds"] / steps for reply in of_side] for side, of_side in replies.items()}
        for replies in (limited, without)
    )
    kilobytes = {
        side: [1e-3 * median(reply["bytes"][way] for reply in limited[side]) for way in (0, 1)] for side in SIDES
    }
    exposed = {side: median(times[side]) - median(free[side]) for side in free}
    link = {side: 8e6 * sum(kilobytes[side]) / parse_bits_per_second(rate) for side in SIDES}
    lines = []
    for side in SIDES:
        ratios = [base / ms for base, ms in zip(times[BASE], times[side], strict=True)]
        rows = [sum(column) for column in zip(*(reply["rows"] for reply in limited[side]), strict=True)]
        line = {"benchmark": "het_servers", "model": name, "rate": rate, "side": side, "rounds": len(ratios)}
        line |= {"ms": median_min_max(times[side]), "over_no_cache": median_min_max(ratios, 2)}
        line |= {"server_sent_kb": round(kilobytes[side][0]), "server_received_kb": round(kilobytes[side][1])}
        line |= {"fewer_bytes_percent": round(100 - 100 * sum(kilobytes[side]) / sum(kilobytes[BASE]), 1)}
        if side in free:
            line |= {"no_limit_ms": median_min_max(free[side])}
            line |= {"communication_percent": round(100 * exposed[side] / median(times[side]))}
            line |= {"exposed_ms": round(exposed[side], 1)}
            line |= {"less_exposed_percent": round(100 - 100 * exposed[side] / exposed[BASE], 1)}
            bounds = [median(free[each]) + link[each] for each in (BASE, side)]
            line |= {"bound": round(bounds[0] / bounds[1], 2)}
        keys = ("validated", "sent", "pushed") if rows[0] else ()
        line |= {key: round(100 * num / rows[0], 1) for key, num in zip(keys, rows[1:], strict=False)}
        lines.append(line)
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="*", choices=MODELS, default=MODELS)
    parser.add_argument("--rate", default="60mbit", help="of each host's link, the server's too")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cluster", default="", metavar="FILE", help="cluster file of such a lab; measured if missing")
    parser.add_argument("--write", default="", help="name of a file in benchmarks/results")
    parser.add_argument("--smoke", action="store_true", help="the smallest case, to see that it runs")
    args = parser.parse_args(arguments)
    args.steps, args.warm = STEPS, WARM_STEPS
    if args.smoke:
        args.model, args.rounds, args.steps, args.warm = MODELS[:1], 1, 2, dict.fromkeys(SIDES, 2)
    lines: list[dict[str, Any]] = []
    for name in args.model:
        for line in run(name, args):
            lines.append(line)
            print(json.dumps(line), flush=True)
    if args.write:
        results_file.write(args.write, "het_servers", lines)
    return 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())

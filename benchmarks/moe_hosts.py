"""Tokens of a mixture exchanged by hosts against rows exchanged flat, over uplinks that the ranks of a host share.

    python -m benchmarks.moe_hosts [--rounds N] [--write NAME]

As root. A lab of two hosts with two ranks each: hosts, links and CPU quotas are emulated. One layer, forward and
backward: 384 channels, 1,536 inside an expert, eight experts and 1,440 tokens a rank, each for 2 or 4 experts that are
drawn evenly. "flat": each row goes to the rank of its expert; "hosts": a token goes once to each host that has one of
its experts, and its weighted outputs come back as one row. All sides run in one job, in an order that rotates each
round; of each a warm-up and a step that is timed. The lines have the median, least and most of seconds and of the gain
over "flat" in the same round ("flat, again" is the A/A floor), and the share of flat's rows that crosses hosts.
"""

import argparse
import json
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import torch

from benchmarks import results_file
from benchmarks.moe_summary import spread
from benchmarks.sharding import start_job
from benchmarks.turns import TurnServer, make_broadcast
from shardwright.comm import collective
from shardwright.comm.mesh import Mesh
from shardwright.experts.exchange import ParallelExperts
from shardwright.experts.hosts import HostExperts
from shardwright.experts.parameters import OwnedExperts
from shardwright.kernels.native import retain_freed_memory
from shardwright.lab.emulated_cluster import Lab
from shardwright.lab.shape import Host, Shape
from shardwright.layers.gates import Routing, TopKGate
from shardwright.layers.moe import GeluExperts, MoE
from shardwright.spec.lanes import EXPERTS, MAIN

SHAPE = Shape((Host(ranks=2, uplink="230mbit", local="1gbit", cpu=0.45),) * 2)
CHANNELS, HIDDEN, EXPERTS_PER_RANK, TOKENS = 384, 1536, 2, 1440
HOST, LOCAL = ("data@host",), ("data@local",)
SIDES = ("flat", "flat, again", "hosts")
CHOSEN = (2, 4)
TIMEOUT_SECONDS = 3600.0


def draw_routing(rank: int, num_chosen: int, num_experts: int) -> Routing:
    draw = torch.Generator().manual_seed(rank)
    experts_NK = torch.rand(TOKENS, num_experts, generator=draw).topk(num_chosen, 1).indices
    weights_NK = torch.full((TOKENS, num_chosen), 1 / num_chosen, requires_grad=True)
    return Routing(experts_NK, weights_NK, torch.zeros(1))


def crossing_share(num_chosen: int) -> float:
    """Tokens that go to the other host once, over rows that go there."""
    num_experts, tokens, rows = EXPERTS_PER_RANK * SHAPE.num_ranks, 0, 0
    for rank in range(SHAPE.num_ranks):
        is_other_NK = draw_routing(rank, num_chosen, num_experts).experts_NK // (num_experts // 2) != rank // 2
        tokens, rows = tokens + int(is_other_NK.any(1).sum()), rows + int(is_other_NK.sum())
    return tokens / rows


def worker(folder: str) -> None:
    """Serve turns on every rank: a side and the number of experts of a token."""
    torch.set_num_threads(1)
    retain_freed_memory()  # as `build` does
    groups = [(MAIN, ()), *((EXPERTS, axes) for axes in (HOST, LOCAL, HOST + LOCAL))]
    mesh = Mesh((("data@host", 2), ("data@local", 2)), groups=groups, timeout_seconds=TIMEOUT_SECONDS)
    everyone, num_experts = mesh.group(HOST + LOCAL, EXPERTS), EXPERTS_PER_RANK * mesh.size
    torch.manual_seed(3)
    moe = MoE(TopKGate(CHANNELS, num_experts, 1), GeluExperts(num_experts, CHANNELS, HIDDEN))
    OwnedExperts("moe", moe, everyone)
    flat = ParallelExperts("moe", everyone)
    exchanges: dict[str, ParallelExperts | HostExperts] = {"flat": flat, "flat, again": flat}
    exchanges |= {"hosts": HostExperts(mesh.group(HOST, EXPERTS), ParallelExperts("moe", mesh.group(LOCAL, EXPERTS)))}
    tokens = torch.randn(TOKENS, CHANNELS)

    def step(exchange: ParallelExperts | HostExperts, routing: Routing) -> None:
        x = tokens.clone().requires_grad_()
        exchange.forward(moe.experts, x, routing, num_experts).backward(tokens)
        moe.zero_grad()

    def wait_for_all() -> None:
        collective.all_gather(torch.zeros(1), [1] * mesh.size, mesh.group((), MAIN)).wait()

    server = TurnServer(folder, "hosts", mesh.rank, make_broadcast(mesh.group((), MAIN)))
    server.reply({})
    for name, warm, steps in server.turns():
        side, num_chosen = name.split(":")
        run = partial(step, exchanges[side], draw_routing(mesh.rank, int(num_chosen), num_experts))
        for _ in range(warm):
            run()
        wait_for_all()
        start = perf_counter()
        for _ in range(steps):
            run()
        wait_for_all()
        server.reply({"seconds": (perf_counter() - start) / steps})
    mesh.close()


def measure(rounds: int) -> Iterator[dict[str, Any]]:
    with ExitStack() as stack:
        folder = stack.enter_context(TemporaryDirectory())
        lab = stack.enter_context(Lab(SHAPE, "moe"))
        command = [sys.executable, "-c", f"from benchmarks.moe_hosts import worker; worker({folder!r})"]
        client = stack.enter_context(start_job(lab, folder, "hosts", command))
        for num_chosen in CHOSEN:
            seconds: dict[str, list[float]] = {side: [] for side in SIDES}
            for number in range(rounds):
                for side in (*SIDES[number % len(SIDES) :], *SIDES[: number % len(SIDES)]):
                    seconds[side].append(client.run_turn(f"{side}:{num_chosen}", 1, 1)["seconds"])
            for side in SIDES:
                gains = [flat / mine for flat, mine in zip(seconds["flat"], seconds[side], strict=True)]
                line = {"benchmark": "moe_hosts", "emulated": "hosts, links, CPU quotas", "chosen": num_chosen}
                line |= {"side": side, "rounds": rounds, "seconds": spread(seconds[side]), "gain": spread(gains)}
                yield line | {"crossing_share": round(crossing_share(num_chosen), 3) if side == "hosts" else 1.0}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--write", default="", help="name of a file in benchmarks/results")
    parser.add_argument("--smoke", action="store_true", help="one round, to see that it runs")
    args = parser.parse_args()
    lines = [*measure(1 if args.smoke else args.rounds)]
    for line in lines:
        print(json.dumps(line), flush=True)
    if args.write:
        results_file.write(args.write, "moe_hosts", lines)
    return 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())

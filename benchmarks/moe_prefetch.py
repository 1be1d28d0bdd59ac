"""Copies of experts that are sent before the gate has chosen, against the same copies sent after it.

    python -m benchmarks.moe_prefetch [--trace FILE] [--rounds N] [--write NAME]

As root. A lab of four hosts: hosts, links and CPU quotas are emulated. One block, forward and backward: causal
attention (384 channels, 6 heads, 4 sequences of 720 tokens a rank), then a mixture as in benchmarks/moe.py, with
prescribed routing: "drift" (popularity that changes slowly) and, with --trace, consecutive recorded iterations of a
layer. Sides: "plain", no copies; "copies", the fastest by the complete model, in steps; "copies, again", the A/A floor;
"prefetched", the same with those of the last iteration sent at the start of the block. All sides run in one job, in an
order that rotates each round; a turn is four iterations to warm up and three that are timed. The lines have the median,
least and most of seconds of an iteration and of the gain over "copies" in the same round; `copies`: of an iteration;
`prefetched`: the share of them that ranks had before the gate had chosen.
"""

import argparse
import json
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks import moe_routing, results_file
from benchmarks.moe import SETTINGS, SMALLEST
from benchmarks.moe_sides import CHANNELS, EXPERTS_PER_RANK, NUM_CHOSEN, ROWS, TRACE, costs_of
from benchmarks.moe_summary import spread
from benchmarks.moe_worker import AXES, Layer, recorded_routing
from benchmarks.sharding import start_job
from benchmarks.turns import TurnServer, make_broadcast
from shardwright.experts.exchange import ParallelExperts
from shardwright.kernels.native import retain_freed_memory
from shardwright.lab.emulated_cluster import Lab
from shardwright.planner.experts import decide
from shardwright.spec.expert_rows import BoolArray, ExpertRowOrder, IntArray, balanced_order
from shardwright.spec.lanes import COPIES
from shardwright.spec.plan import ExpertPlan

SIDES = ("plain", "copies", "copies, again", "prefetched")
HEADS, SEQUENCE = 6, 720
WARMUP_STEPS, STEPS = 4, 3


def counts_of(workload: str, number: int, step: int, num_ranks: int) -> IntArray:
    """Rows of each expert by rank, of an iteration of a turn."""
    shape = num_ranks, EXPERTS_PER_RANK * num_ranks, ROWS
    if workload != TRACE:
        return moe_routing.GENERATORS[workload](number * (WARMUP_STEPS + STEPS) + step, *shape)
    trace = moe_routing.read_trace(os.environ["MOE_TRACE"])
    return moe_routing.fold_trace(trace, number, *shape, lag=WARMUP_STEPS + STEPS - 1 - step)


class Attention(nn.Module):
    """Causal attention over sequences of SEQUENCE tokens, added to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs, self.output = nn.Linear(CHANNELS, 3 * CHANNELS), nn.Linear(CHANNELS, CHANNELS)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.inputs(x).view(-1, SEQUENCE, 3, HEADS, CHANNELS // HEADS).permute(2, 0, 3, 1, 4)
        out = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return x + self.output(out.transpose(1, 2).reshape(x.shape))


class Choice:
    """A side's choice of copies; counts those that it makes, and those of them that were prefetched."""

    def __init__(self, plan: ExpertPlan) -> None:
        self._plan, self.num_copies, self.num_prefetched = plan, 0, 0

    def __call__(self, order: ExpertRowOrder, prefetched_RE: BoolArray | None) -> IntArray | None:
        computed_RE = decide(self._plan, order, prefetched_RE)
        if computed_RE is not None:
            is_copy_RE = computed_RE > 0
            is_copy_RE[order.owners_E, np.arange(len(order.owners_E))] = False
            self.num_copies += int(is_copy_RE.sum())
            self.num_prefetched += int((is_copy_RE & prefetched_RE).sum()) if prefetched_RE is not None else 0
        return computed_RE


def worker(folder: str) -> None:
    """Serve turns on every rank: a side, a workload and the number of a round."""
    torch.set_num_threads(1)
    retain_freed_memory()  # as `build` does
    layer, attention = Layer(), Attention()
    size, tokens = layer.mesh.size, torch.randn(ROWS // NUM_CHOSEN, CHANNELS)
    broadcast = make_broadcast(layer.main)
    server = TurnServer(folder, "prefetch", layer.mesh.rank, broadcast)
    measured = json.dumps(layer.measure_costs()).encode()
    costs = costs_of(json.loads(broadcast(measured if layer.mesh.rank == 0 else b"")))
    server.reply({})

    def step(exchange: ParallelExperts, counts_RE: IntArray, *, prefetches: bool) -> None:
        if prefetches:
            exchange.prefetch(layer.experts)
        x = attention(tokens.clone().requires_grad_())
        routing = recorded_routing(counts_RE[layer.mesh.rank])
        exchange.forward(layer.experts, x, routing, layer.num_experts).backward(tokens)
        for module in (layer.experts, attention):
            module.zero_grad()

    for name, warm, steps in server.turns():
        side, workload, number = name.split(":")
        exchange = ParallelExperts("moe", layer.group, size)
        exchange.copies, exchange.order_rows = layer.mesh.group(AXES, COPIES), balanced_order
        policy = "none" if side == "plain" else "fastest"
        exchange.decide = choice = Choice(ExpertPlan("moe", (), size, policy, costs))
        counts = (counts_of(workload, int(number), each, size) for each in range(warm + steps))
        draws = iter([*counts])
        run = partial(step, exchange, prefetches=side == "prefetched")
        for _ in range(warm):
            run(next(draws))
        choice.num_copies = choice.num_prefetched = 0
        seconds = layer.timed_mean(lambda draws=draws, run=run: run(next(draws)), steps)
        copies = {"copies": choice.num_copies / steps, "prefetched": choice.num_prefetched / max(1, choice.num_copies)}
        server.reply({"seconds": seconds} | copies)
    layer.mesh.close()


def measure(workloads: list[str], rounds: int) -> Iterator[dict[str, Any]]:
    with ExitStack() as stack:
        folder = stack.enter_context(TemporaryDirectory())
        lab = stack.enter_context(Lab(SETTINGS[SMALLEST], "moe"))
        command = [sys.executable, "-c", f"from benchmarks.moe_prefetch import worker; worker({folder!r})"]
        client = stack.enter_context(start_job(lab, folder, "prefetch", command))
        for workload in workloads:
            replies: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
            for number in range(rounds):
                for side in (*SIDES[number % len(SIDES) :], *SIDES[: number % len(SIDES)]):
                    replies[side].append(client.run_turn(f"{side}:{workload}:{number}", WARMUP_STEPS, STEPS))
                    print(workload, number, side, replies[side][-1], file=sys.stderr)
            for side in SIDES:
                seconds, base = ([each["seconds"] for each in replies[name]] for name in (side, "copies"))
                line = {"benchmark": "moe_prefetch", "emulated": "hosts, links, CPU quotas", "setting": SMALLEST}
                line |= {"workload": workload, "side": side, "rounds": rounds, "seconds": spread(seconds)}
                line |= {"gain": spread([a / b for a, b in zip(base, seconds, strict=True)])}
                yield line | {
                    name: round(np.mean([r[name] for r in replies[side]]), 3) for name in ("copies", "prefetched")
                }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", default="", metavar="FILE")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--write", default="", help="name of a file in benchmarks/results")
    parser.add_argument("--smoke", action="store_true", help="one round of drift, to see that it runs")
    args = parser.parse_args()
    os.environ["MOE_TRACE"] = args.trace
    workloads = ["drift", *([TRACE] if args.trace and not args.smoke else [])]
    lines = [*measure(workloads, 1 if args.smoke else args.rounds)]
    for line in lines:
        print(json.dumps(line), flush=True)
    if args.write:
        results_file.write(args.write, "moe_prefetch", lines)
    return 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())

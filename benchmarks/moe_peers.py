"""Our mixture of experts, split over ranks, against torchtitan's and transformers', forward and backward of a layer.

    python -m benchmarks.moe_peers [--peer PYTHON] [--trace FILE] [--rounds N] [--write NAME]

As root, after `make moe-rivals`, which creates the environment of the peers (PYTHON). In a lab of 4 hosts x 1 rank with
emulated links of 230 Mbit/s and CPU quotas, our job and the peers' job take turns; the other one sleeps. All sides have
equal weights, tokens and choices of experts: SwiGLU with 384 channels and 1,536 hidden, two experts and 5,760 rows a
rank, two experts a token. The gate's decision is imposed: "zipf", "trace" from FILE, and "W0", balanced
(benchmarks/moe_routing.py). A round is one draw of it; the order of the sides rotates.

Sides of the peers: benchmarks/moe_torchtitan.py. Ours: "plain", expert parallelism without copies in one all-to-all;
"ours", the fastest copies by the complete model, in steps. "bf16": products in bf16, by autocast;
"again": the A/A floor.

Before timing, results of every side are compared with those of "torchtitan, float32": `differs`, the largest difference
of outputs, gradients of inputs and of weights, relative to the largest number. More than `BOUNDS` is an error.

A JSON line for each side: seconds (median, least, most), tokens/s (of the median), and the speed relative to the
fastest peer with the same precision, and to ours without copies, in the same round (median, least, most).
"""

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

from benchmarks import results_file
from benchmarks.dependencies import ROOT
from benchmarks.moe_sides import CHANNELS, EXPERTS_PER_RANK, NUM_CHOSEN, ROWS, TRACE
from benchmarks.sharding import median_min_max, start_job
from benchmarks.turns import TurnClient
from shardwright.lab.emulated_cluster import Lab
from shardwright.lab.shape import Host, Shape
from shardwright.spec.wire import EXPERT_PART_BYTES

SHAPE = Shape((Host(uplink="230mbit", cpu=0.45),) * 4)
PEER = ROOT / ".rivals-moe/bin/python"
TIMEOUT_SECONDS = 3600.0  # of a collective: a rank sleeps in one between turns
WARMUP_STEPS, STEPS = 1, 1  # of a turn, each forward and backward
OURS = {  # policy of copies, and precision of products
    "plain": ("none", "float32"),
    "plain, again": ("none", "float32"),
    "ours": ("fastest", "float32"),
    "plain, bf16": ("none", "bf16"),
    "ours, bf16": ("fastest", "bf16"),
}
PEERS = {  # precision of products
    "torchtitan, float32": "float32",
    "torchtitan, float32, again": "float32",
    "transformers, grouped_mm": "float32",
    "transformers, eager": "float32",
    "torchtitan": "bf16",
    "torchtitan, again": "bf16",
}
PRECISIONS = {side: precision for side, (_, precision) in OURS.items()} | PEERS
REFERENCE = "torchtitan, float32"
SMALLEST = ("plain", "ours", REFERENCE)
BOUNDS = {"float32": 1e-4, "bf16": 3e-2}
Line = dict[str, Any]


class OurLayer:
    """A mixture with split experts; `costs` are timed at its creation, by all ranks."""

    def __init__(self, mesh: Any, gather: Any, copies: Any, precision: str) -> None:
        import torch

        from benchmarks.moe_peer_turns import HIDDEN, weights_of
        from shardwright.experts.exchange import ParallelExperts
        from shardwright.layers.moe import SwiGluExperts
        from shardwright.planner.experts import decide
        from shardwright.spec.expert_rows import balanced_order
        from shardwright.spec.lanes import COPIES, EXPERTS
        from shardwright.spec.plan import ExpertCosts, ExpertPlan

        self.experts, self.num_experts = SwiGluExperts(EXPERTS_PER_RANK, CHANNELS, HIDDEN), EXPERTS_PER_RANK * mesh.size
        for name, value in weights_of(mesh.rank, mesh.size).items():
            getattr(self.experts, name).weight.data.copy_(value)
        axes = ("data@host",)
        in_steps = copies != "none"
        self.exchange = ParallelExperts("moe", mesh.group(axes, EXPERTS), mesh.size if in_steps else 1)
        self.autocast = partial(torch.autocast, "cpu", torch.bfloat16, enabled=precision == "bf16")
        self.costs: dict[str, Any] = {}
        if in_steps:
            with self.autocast():
                self.costs = measure_costs(self.experts, mesh, gather)
            self.exchange.copies = mesh.group(axes, COPIES)
            self.exchange.order_rows = balanced_order
            self.exchange.decide = partial(
                decide, ExpertPlan("moe", axes, mesh.size, copies, ExpertCosts(**self.costs))
            )

    def forward(self, tokens_NC: Any, routing: Any) -> Any:
        with self.autocast():
            return self.exchange.forward(self.experts, tokens_NC, routing, self.num_experts)

    def take_gradients(self) -> dict[str, Any]:
        from benchmarks.moe_peer_turns import take_gradients

        names = ("gate", "up", "down")
        return take_gradients({name: (getattr(self.experts, name).weight, slice(None)) for name in names})

    def describe(self) -> Line:
        return {"costs": self.costs}


def measure_costs(experts: Any, mesh: Any, gather: Any) -> dict[str, float]:
    """Seconds to compute a row in forward (a third of all passes), to send one, and to send an expert, on rank 0."""
    import torch

    from shardwright.comm import collective
    from shardwright.spec.lanes import EXPERTS

    rows, group = torch.randn(ROWS, CHANNELS), mesh.group(("data@host",), EXPERTS)
    sizes = torch.tensor([ROWS // EXPERTS_PER_RANK] * EXPERTS_PER_RANK)
    splits = [ROWS // mesh.size] * mesh.size

    def compute() -> None:
        x = rows.clone().requires_grad_()
        experts(x, sizes).backward(rows)

    def exchange() -> None:
        collective.all_to_all(rows[: sum(splits)], splits, splits, group).wait()

    times: list[float] = []
    for function in (compute, exchange):
        function()
        gather(0.0)
        start = perf_counter()
        for _ in range(3):
            function()
        gather(0.0)
        times.append((perf_counter() - start) / 3)
    for parameter in experts.parameters():
        parameter.grad = None
    compute_seconds, exchange_seconds = gather(*times)[0].tolist()  # all ranks decide alike
    send_row = exchange_seconds / (splits[0] * (mesh.size - 1))
    expert_rows = sum(weight[0].numel() for weight in experts.parameters()) / CHANNELS
    return {
        "compute_row": compute_seconds / 3 / ROWS,
        "send_row": send_row,
        "send_expert": expert_rows * send_row,
        "hand_on": EXPERT_PART_BYTES / (4 * CHANNELS) * send_row,
    }


def worker(folder: str) -> None:
    """Serve turns on every rank of our job."""
    import torch

    from benchmarks.moe_peer_turns import serve
    from benchmarks.turns import TurnServer, make_broadcast
    from shardwright.comm import collective
    from shardwright.comm.mesh import Mesh, world_size
    from shardwright.kernels.native import retain_freed_memory
    from shardwright.spec.lanes import COPIES, EXPERTS, MAIN

    torch.set_num_threads(1)
    retain_freed_memory()  # as `build` does
    axes = ("data@host",)
    groups = [(MAIN, ()), (EXPERTS, axes), (COPIES, axes)]
    mesh = Mesh((("data@host", world_size()),), groups=groups, timeout_seconds=TIMEOUT_SECONDS)
    main_group = mesh.group((), MAIN)

    def gather(*values: float) -> Any:
        row = torch.tensor([values], dtype=torch.float64)
        return collective.all_gather(row, [1] * mesh.size, main_group).wait()

    layers = {side: OurLayer(mesh, gather, *options) for side, options in OURS.items()}
    server = TurnServer(folder, "ours", mesh.rank, make_broadcast(main_group))
    serve(server, folder, (mesh.rank, mesh.size), lambda: gather(0.0), layers)
    mesh.close()


def measure(peer: str, sides: Sequence[str], workloads: Sequence[str], num_rounds: int) -> Iterator[Line]:
    call = "from benchmarks.moe_peers import worker; worker"
    with (
        TemporaryDirectory() as folder,
        Lab(SHAPE, "moepeers") as lab,
        start_job(lab, folder, "ours", [sys.executable, "-c", f"{call}({folder!r})"]) as our_job,
        start_job(lab, folder, "peers", [peer, "-m", "benchmarks.moe_torchtitan", folder, "peers"]) as peer_job,
    ):
        clients = {side: our_job if side in OURS else peer_job for side in sides}
        for workload in workloads:
            differences = compare_results(folder, workload, clients)
            yield from measure_workload(workload, num_rounds, clients, differences)


def compare_results(folder: str, workload: str, clients: dict[str, TurnClient]) -> dict[str, float]:
    """By side, the largest difference of its results from the reference, relative to the largest number."""
    import torch
    from safetensors.torch import load_file

    from benchmarks.moe_peer_turns import values_file

    def load(side: str) -> list[dict[str, torch.Tensor]]:
        return [load_file(values_file(folder, side, rank)) for rank in range(SHAPE.num_ranks)]

    differences = dict[str, float]()
    for side in (REFERENCE, *(side for side in clients if not side.endswith("again") and side != REFERENCE)):
        clients[side].run_turn(f"{side}:{workload}:0", 0, 0)
        differences[side] = max(
            float((values[name] - wanted[name]).abs().max() / wanted[name].abs().max())
            for values, wanted in zip(load(side), load(REFERENCE), strict=True)
            for name in wanted
        )
        print(f"{workload}, {side}: results differ by {differences[side]:.1e} of the largest", file=sys.stderr)
        if not differences[side] <= BOUNDS[PRECISIONS[side]]:
            raise ValueError(f'results of "{side}" differ from those of "{REFERENCE}" by {differences[side]:.1e}')
    return differences


def measure_workload(
    workload: str, num_rounds: int, clients: dict[str, TurnClient], differences: dict[str, float]
) -> Iterator[Line]:
    replies: dict[str, list[Line]] = {side: [] for side in clients}
    names = [*clients]
    for number in range(num_rounds):
        for side in (*names[number % len(names) :], *names[: number % len(names)]):
            replies[side].append(clients[side].run_turn(f"{side}:{workload}:{number}", WARMUP_STEPS, STEPS))
        print(f"{workload}: round {number + 1} of {num_rounds}", file=sys.stderr)
    seconds = {side: [reply["seconds"] for reply in replies[side]] for side in names}
    for side, times in seconds.items():
        precision = PRECISIONS[side]
        peers = [peer for peer in seconds if PEERS.get(peer) == precision and not peer.endswith("again")]
        fastest = min(peers, key=lambda peer: median(seconds[peer]))
        plain = "plain" if precision == "float32" else f"plain, {precision}"
        yield {
            "benchmark": "moe_peers",
            "emulated": "hosts, links, CPU quotas",
            "workload": workload,
            "side": side,
            "precision": precision,
            "seconds": median_min_max(times, 3),
            "tokens_s": round(ROWS // NUM_CHOSEN * SHAPE.num_ranks / median(times)),
            "fastest_peer": fastest,
            "over_peer": ratios(seconds[fastest], times),
            "over_plain": ratios(seconds[plain], times),
            "differs": differences.get(side),
        } | {key: value for key, value in replies[side][-1].items() if key != "seconds" and value}


def ratios(above: Sequence[float], below: Sequence[float]) -> list[float]:
    """Round by round: median, least, most."""
    return median_min_max([a / b for a, b in zip(above, below, strict=True)], 3)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", default=str(PEER), metavar="PYTHON", help="of the environment that has torchtitan")
    parser.add_argument("--trace", default="", metavar="FILE")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--write", default="", help="name of a file in benchmarks/results")
    parser.add_argument("--smoke", action="store_true", help="the smallest case, to see that it runs")
    args = parser.parse_args()
    if not Path(args.peer).exists():
        reason = f"{args.peer} does not exist; create the environment of torchtitan with `make moe-rivals`"
        if args.smoke:
            print(json.dumps({"benchmark": "moe_peers", "skipped": reason}))
            return 0
        parser.error(reason)
    os.environ["MOE_TRACE"] = args.trace
    sides, workloads = (*OURS, *PEERS), ("zipf", *([TRACE] if args.trace else []), "W0")
    if args.smoke:
        sides, workloads, args.rounds = SMALLEST, workloads[:1], 1
    lines: list[Line] = []
    for line in measure(args.peer, sides, workloads, args.rounds):
        lines.append(line)
        print(json.dumps(line), flush=True)
    if args.write:
        results_file.write(args.write, "moe_peers", lines)
    return 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())

"""Sides of benchmarks/moe.py: one layer of experts under every policy, on each rank."""

import json
import os
from time import perf_counter
from typing import Any

from benchmarks import moe_routing
from benchmarks.turns import TurnServer, make_broadcast
from shardwright.spec.plan import CopyPolicy

CHANNELS, ALPHA, ROWS, EXPERTS_PER_RANK, NUM_CHOSEN = 384, 4, 5760, 2, 2
TIMEOUT_SECONDS = 3600.0  # of a collective: a rank sleeps in one between turns
EVEN = "even routing"  # before the number of a draw: the ideal
COSTS = "costs"  # a turn that times rows and messages
SIDES: dict[str, tuple[CopyPolicy, bool]] = {  # policy of copies, and whether rows are exchanged in steps
    "plain": ("none", False),
    "plain, again": ("none", False),
    "shadows": ("shadows", False),
    "steps": ("none", True),
    "shadows, steps": ("shadows", True),
    "even, steps": ("even", True),
    "ours": ("fastest", True),
}


def expert_bytes() -> int:
    return 2 * ALPHA * CHANNELS**2 * 4


def counts_of(workload: str, number: int, num_ranks: int) -> Any:
    """Rows of each expert by rank: a workload's draw."""
    num_experts = EXPERTS_PER_RANK * num_ranks
    if workload == EVEN:
        return moe_routing.even_routing(num_ranks, num_experts, ROWS)
    if workload == "zipf":
        return moe_routing.zipf_routing(number, num_ranks, num_experts, ROWS)
    trace = moe_routing.read_trace(os.environ["MOE_TRACE"])
    return moe_routing.fold_trace(trace, number, num_ranks, num_experts, ROWS)


class RecordedGate:
    """Chooses the experts that a workload says, in an order drawn once."""

    def __init__(self, counts_E: Any) -> None:
        import torch

        from shardwright.layers.gates import Routing

        chosen = torch.arange(len(counts_E)).repeat_interleave(torch.from_numpy(counts_E))
        chosen = chosen[torch.randperm(len(chosen), generator=torch.Generator().manual_seed(1))]
        experts_NK = chosen.view(-1, NUM_CHOSEN)
        weights_NK = torch.full(experts_NK.shape, 1 / NUM_CHOSEN)
        self.routing = Routing(experts_NK, weights_NK, torch.zeros(1))


def worker(folder: str) -> None:
    """Serve turns on every rank. A side's name is followed by the workload and the number of a draw."""
    from functools import partial

    import torch

    from shardwright.comm import collective
    from shardwright.comm.mesh import Mesh, world_size
    from shardwright.experts.exchange import ParallelExperts
    from shardwright.experts.parameters import OwnedExperts
    from shardwright.kernels.native import retain_freed_memory
    from shardwright.layers.gates import TopKGate
    from shardwright.layers.moe import GeluExperts, MoE
    from shardwright.planner.experts import decide
    from shardwright.spec.lanes import COPIES, EXPERTS, MAIN
    from shardwright.spec.plan import ExpertCosts, ExpertPlan

    torch.set_num_threads(1)
    retain_freed_memory()  # as `build` does
    size, axes = world_size(), ("data@host",)
    groups = [(MAIN, ()), (EXPERTS, axes), (COPIES, axes)]
    mesh = Mesh((("data@host", size),), groups=groups, timeout_seconds=TIMEOUT_SECONDS)
    group, num_experts = mesh.group(axes, EXPERTS), EXPERTS_PER_RANK * size
    torch.manual_seed(3)
    moe = MoE(TopKGate(CHANNELS, num_experts, NUM_CHOSEN), GeluExperts(num_experts, CHANNELS, ALPHA * CHANNELS))
    OwnedExperts("moe", moe, group)
    tokens = torch.randn(ROWS // NUM_CHOSEN, CHANNELS)
    gradient = torch.randn(ROWS // NUM_CHOSEN, CHANNELS)
    main = mesh.group((), MAIN)

    def gather(*values: float) -> Any:
        row = torch.tensor([values], dtype=torch.float64)
        return collective.all_gather(row, [1] * mesh.size, main).wait()

    def run(exchange: Any, routing: Any) -> None:
        x = tokens.clone().requires_grad_()
        exchange.forward(moe.experts, x, routing, num_experts).backward(gradient)
        for parameter in moe.experts.parameters():
            parameter.grad = None

    broadcast = make_broadcast(main)
    server = TurnServer(folder, "moe", mesh.rank, broadcast)
    server.reply({})
    costs: dict[str, float] = {}
    for name, warm, steps in server.turns():
        if name == COSTS:
            timed = json.dumps(calibrate(moe.experts, mesh, gather)).encode()
            costs = json.loads(broadcast(timed if mesh.rank == 0 else b""))
            server.reply(costs)
            continue
        side, workload, number = name.split(":")
        policy, in_steps = SIDES[side]
        plan = ExpertPlan("moe", axes, size if in_steps else 1, policy, ExpertCosts(**costs))
        exchange = ParallelExperts("moe", group, plan.groups)
        exchange.copies = mesh.group(axes, COPIES)
        exchange.decide = partial(decide, plan) if policy != "none" else None
        routing = RecordedGate(counts_of(workload, int(number), size)[mesh.rank]).routing
        for _ in range(warm):
            run(exchange, routing)
        server.reply({"seconds": timed_mean(partial(run, exchange, routing), steps, gather) if steps else 0.0})
    mesh.close()


def timed_mean(function: Any, num: int, gather: Any) -> float:
    """Seconds of a call, until the slowest rank has ended."""
    gather(0.0)
    start = perf_counter()
    for _ in range(num):
        function()
    gather(0.0)
    return (perf_counter() - start) / num


def calibrate(experts: Any, mesh: Any, gather: Any) -> dict[str, float]:
    """Seconds of a rank to compute a row in forward, and to send one: a third of all passes, and an all-to-all."""
    import torch

    from shardwright.comm import collective
    from shardwright.spec.lanes import EXPERTS

    rows, group = torch.randn(ROWS, CHANNELS), mesh.group(("data@host",), EXPERTS)
    sizes = torch.tensor([ROWS // EXPERTS_PER_RANK] * EXPERTS_PER_RANK)

    def compute() -> None:
        x = rows.clone().requires_grad_()
        experts(x, sizes).backward(rows)

    def exchange() -> None:
        splits = [ROWS // mesh.size] * mesh.size
        collective.all_to_all(rows[: sum(splits)], splits, splits, group).wait()

    times: list[float] = []
    for function in (compute, exchange):
        function()
        times.append(timed_mean(function, 3, gather))
    for parameter in experts.parameters():
        parameter.grad = None
    sent = ROWS // mesh.size * (mesh.size - 1)
    seconds_per_byte = times[1] / (4 * CHANNELS * sent)
    return {
        "compute_row": times[0] / 3 / ROWS,
        "send_row": 4 * CHANNELS * seconds_per_byte,
        "send_expert": expert_bytes() * seconds_per_byte,
    }

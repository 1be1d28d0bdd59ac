"""Ranks of benchmarks/moe.py: one layer of experts, forward and backward, under every side, in turns."""

import json
from collections.abc import Callable
from functools import partial
from time import perf_counter, process_time
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.moe_rivals import CapacityExperts, GatheredExperts
from benchmarks.moe_sides import (
    ALPHA,
    CHANNELS,
    COSTS,
    EXPERTS_PER_RANK,
    NUM_CHOSEN,
    ROWS,
    SIDES,
    costs_of,
    decide_of,
    expert_bytes,
    num_slots,
    order_rows_of,
    routing_of,
)
from benchmarks.turns import TurnServer, make_broadcast
from shardwright.comm import collective
from shardwright.comm.mesh import Mesh, world_size
from shardwright.experts.exchange import ParallelExperts
from shardwright.experts.parameters import OwnedExperts
from shardwright.kernels.native import retain_freed_memory
from shardwright.layers.gates import Routing, TopKGate
from shardwright.layers.moe import GeluExperts, LocalExperts, MoE
from shardwright.spec.expert_rows import IntArray
from shardwright.spec.lanes import COPIES, EXPERTS, MAIN
from shardwright.spec.plan import ExpertCosts
from shardwright.spec.wire import EXPERT_PART_BYTES

TIMEOUT_SECONDS = 3600.0  # of a collective: a rank sleeps in one between turns
AXES = ("data@host",)
Step = Callable[[], None]


def recorded_routing(counts_E: IntArray) -> Routing:
    """Choices of experts with these counts, in an order drawn once."""
    chosen = torch.arange(len(counts_E)).repeat_interleave(torch.from_numpy(counts_E))
    chosen = chosen[torch.randperm(len(chosen), generator=torch.Generator().manual_seed(1))]
    experts_NK = chosen.view(-1, NUM_CHOSEN)
    return Routing(experts_NK, torch.full(experts_NK.shape, 1 / NUM_CHOSEN), torch.zeros(1))


class Unchanged(nn.Module):
    """Experts that compute nothing."""

    def forward(self, rows: Tensor, sizes: Tensor) -> Tensor:
        return rows.clone()


class Layer:
    """A layer of experts on this rank."""

    def __init__(self) -> None:
        size = world_size()
        groups = [(MAIN, ()), (EXPERTS, AXES), (COPIES, AXES)]
        self.mesh = Mesh((("data@host", size),), groups=groups, timeout_seconds=TIMEOUT_SECONDS)
        self.main, self.group = self.mesh.group((), MAIN), self.mesh.group(AXES, EXPERTS)
        self.num_experts = EXPERTS_PER_RANK * size
        torch.manual_seed(3)
        gate = TopKGate(CHANNELS, self.num_experts, NUM_CHOSEN)
        moe = MoE(gate, GeluExperts(self.num_experts, CHANNELS, ALPHA * CHANNELS))
        OwnedExperts("moe", moe, self.group)
        self.experts = moe.experts
        self.full: GeluExperts | None = None  # all experts, for ZeRO

    def step_of(self, side: str, workload: str, number: int, costs: ExpertCosts) -> Step:
        """What a step of a side runs."""
        counts_RE = routing_of(side, workload, number, self.mesh.size)
        match SIDES[side].execution:
            case "computation":
                return self._computation(counts_RE)
            case "messages":
                return partial(self._exchange_rows, counts_RE)
            case "capacity":
                return self._layer_step(CapacityExperts(self.group, num_slots(self.mesh.size)), counts_RE)
            case "zero 2" | "zero 3" as execution:
                if self.full is None:
                    self.full = GeluExperts(self.num_experts, CHANNELS, ALPHA * CHANNELS)
                shards = [*self.experts.parameters()]
                zero = GatheredExperts(self.full, shards, self.group, int(execution[-1]))
                return self._layer_step(zero, counts_RE, zero.finish)
            case "exchange":
                exchange = ParallelExperts("moe", self.group, self.mesh.size if SIDES[side].in_steps else 1)
                exchange.copies = self.mesh.group(AXES, COPIES)
                exchange.order_rows = order_rows_of(side)
                exchange.decide = decide_of(side, workload, number, self.mesh.size, costs)
                return self._layer_step(exchange, counts_RE)

    def gather(self, *values: float) -> Tensor:
        row = torch.tensor([values], dtype=torch.float64)
        return collective.all_gather(row, [1] * self.mesh.size, self.main).wait()

    def timed_mean(self, function: Step, num: int) -> float:
        """Seconds of a call, until the slowest rank has ended."""
        self.gather(0.0)
        start = perf_counter()
        for _ in range(num):
            function()
        self.gather(0.0)
        return (perf_counter() - start) / num

    def measure_costs(self) -> dict[str, float]:
        """Seconds of a rank to compute a row in forward, and to send one: a third of all passes, and an all-to-all.

        "slowdown": of the processor's time that computation would have had, the share that an all-to-all takes.
        "gather": seconds to gather all rows of a rank and to add up their results, in both passes.
        """
        rows, size = torch.randn(ROWS, CHANNELS), self.mesh.size
        sizes = torch.tensor([ROWS // EXPERTS_PER_RANK] * EXPERTS_PER_RANK)
        splits = [ROWS // size] * size

        def exchange() -> None:
            collective.all_to_all(rows[: sum(splits)], splits, splits, self.group).wait()

        even_RE = np.full((size, self.num_experts), ROWS // self.num_experts)
        gather = self._layer_step(LocalExperts(), even_RE, experts=Unchanged())
        times, shares = list[float](), list[float]()
        for function in (partial(self._compute, rows, sizes), exchange, gather):
            function()
            start, used = perf_counter(), process_time()
            times.append(self.timed_mean(function, 3))
            shares.append((process_time() - used) / (perf_counter() - start))
        sent = ROWS // size * (size - 1)
        seconds_per_byte = times[1] / (4 * CHANNELS * sent)
        return {
            "compute_row": times[0] / 3 / ROWS,
            "send_row": 4 * CHANNELS * seconds_per_byte,
            "send_expert": expert_bytes() * seconds_per_byte,
            "hand_on": EXPERT_PART_BYTES * seconds_per_byte,
            "slowdown": shares[1] / shares[0],
            "gather": times[2],
        }

    def _layer_step(
        self,
        exchange: Any,
        counts_RE: IntArray,
        finish: Callable[[], object] | None = None,
        experts: nn.Module | None = None,
    ) -> Step:
        routing = recorded_routing(counts_RE[self.mesh.rank])
        tokens, gradient = (torch.randn(len(routing.experts_NK), CHANNELS) for _ in range(2))

        def step() -> None:
            x = tokens.clone().requires_grad_()
            exchange.forward(experts or self.experts, x, routing, self.num_experts).backward(gradient)
            if finish is not None:
                finish()
            self._drop_gradients()

        return step

    def _computation(self, counts_RE: IntArray) -> Step:
        """Forward and backward of the rows that this rank computes without copies."""
        sizes = torch.from_numpy(counts_RE.sum(0)[self._own(self.mesh.rank)])
        return partial(self._compute, torch.randn(int(sizes.sum()), CHANNELS), sizes)

    def _compute(self, rows: Tensor, sizes: Tensor) -> None:
        x = rows.clone().requires_grad_()
        self.experts(x, sizes).backward(rows)
        self._drop_gradients()

    def _exchange_rows(self, counts_RE: IntArray) -> None:
        """The exchanges of rows without copies: there and back, forward and backward."""
        rank, ranks = self.mesh.rank, range(self.mesh.size)
        sends = [int(counts_RE[rank, self._own(other)].sum()) for other in ranks]
        receives = [int(counts_RE[other, self._own(rank)].sum()) for other in ranks]
        rows = torch.zeros(sum(sends), CHANNELS)
        for _ in range(2):
            received = collective.all_to_all(rows, sends, receives, self.group).wait()
            rows = collective.all_to_all(received, receives, sends, self.group).wait()

    def _own(self, rank: int) -> slice:
        return slice(rank * EXPERTS_PER_RANK, (rank + 1) * EXPERTS_PER_RANK)

    def _drop_gradients(self) -> None:
        for parameter in self.experts.parameters():
            parameter.grad = None


def worker(folder: str) -> None:
    """Serve turns on every rank. A side's name is followed by the workload and the number of a draw."""
    torch.set_num_threads(1)
    retain_freed_memory()  # as `build` does
    layer = Layer()
    broadcast = make_broadcast(layer.main)
    server = TurnServer(folder, "moe", layer.mesh.rank, broadcast)
    server.reply({})
    costs = ExpertCosts(0.0, 0.0, 0.0)
    for name, warm, steps in server.turns():
        if name == COSTS:
            measured = json.dumps(layer.measure_costs()).encode()
            timed = json.loads(broadcast(measured if layer.mesh.rank == 0 else b""))
            costs = costs_of(timed)
            server.reply(timed)
            continue
        side, workload, number = name.split(":")
        step = layer.step_of(side, workload, int(number), costs)
        for _ in range(warm):
            step()
        server.reply({"seconds": layer.timed_mean(step, steps)})
    layer.mesh.close()

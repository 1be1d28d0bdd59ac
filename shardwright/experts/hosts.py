"""Expert parallelism by hosts: a token goes to a host once, however many of its experts are there.

Phases: there   tokens and their choices to the rank of the same local index on each host that has one of their experts
        inside  the ranks of a host exchange and compute them (exchange.py), each token's rows weighted and added up
        back    one row for each token and host, to the token's rank, which adds them

Backward is the reverse of it. Only rows of these messages cross hosts; a message of a host's rank goes to one rank of
another host.

Shape legend: N tokens of this rank; U of them by host, on this rank and received; C, H channels; K experts per token.
"""

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shardwright.comm import collective
from shardwright.comm.mesh import Group
from shardwright.experts.exchange import ParallelExperts
from shardwright.layers.gates import DROPPED, Routing
from shardwright.spec.expert_rows import IntArray
from shardwright.step.tracer import Tracer


class HostExperts:
    """The exchange of a mixture whose experts are split over hosts, as many on each, then over the ranks of a host.

    `hosts`: the ranks of this one's local index; `inside`: the exchange between the ranks of its host. `computed_E`:
    rows that this rank computed in the last call.
    """

    def __init__(self, hosts: Group, inside: ParallelExperts) -> None:
        self._hosts, self.inside, self.name = hosts, inside, inside.name
        self.tracer: Tracer | None = None
        self.computed_E: IntArray = np.zeros(0, np.int64)

    def forward(self, experts: nn.Module, tokens_NC: Tensor, routing: Routing, num_experts: int) -> Tensor:
        hosts, on_host = self._hosts, num_experts // self._hosts.size
        host_NK = routing.experts_NK.div(on_host, rounding_mode="floor")  # DROPPED is on none
        goes = (host_NK == torch.arange(hosts.size).view(-1, 1, 1)).any(2)
        host_U, token_U = goes.nonzero(as_tuple=True)
        sent = goes.sum(1)
        received = collective.all_to_all_rows(sent.unsqueeze(1), hosts).wait().flatten().tolist()
        splits = (sent.tolist(), received)
        is_there_UK = host_NK[token_U] == host_U.unsqueeze(1)
        chosen_UK = routing.experts_NK[token_U] - on_host * host_U.unsqueeze(1)
        chosen_UK = collective.all_to_all(torch.where(is_there_UK, chosen_UK, DROPPED), *splits, hosts).wait()
        weights_UK = self._send(torch.where(is_there_UK, routing.weights_NK[token_U], 0.0), splits)
        tokens_UC = self._send(tokens_NC.index_select(0, token_U), splits)
        inside, self.inside.tracer = Routing(chosen_UK, weights_UK, routing.penalty_B), self.tracer
        out_UH = self.inside.forward(experts, tokens_UC, inside, on_host)
        out_UH = self._send(out_UH, (splits[1], splits[0]))
        before = on_host * hosts.index
        self.computed_E = np.pad(self.inside.computed_E, (before, num_experts - before - on_host))
        return out_UH.new_zeros(len(tokens_NC), out_UH.shape[1]).index_add(0, token_U, out_UH)

    def _send(self, rows: Tensor, splits: tuple[Sequence[int], Sequence[int]]) -> Tensor:
        return _Send.apply(rows, splits, self)  # pyright: ignore[reportReturnType]

    def exchange(self, rows: Tensor, splits: tuple[Sequence[int], Sequence[int]]) -> Tensor:
        """An all-to-all between hosts, recorded as `hosts NAME`."""
        pending = collective.all_to_all(rows, *splits, self._hosts)
        name, start = f"hosts {self.name}", time.perf_counter()
        if self.tracer is not None:
            self.tracer.add_flight(name, self._hosts.lane, pending)
        received = pending.wait()
        if self.tracer is not None:
            self.tracer.add_wait(name, start)
        return received


class _Send(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, splits: Any, owner: HostExperts) -> Tensor:
        ctx.splits, ctx.owner = splits, owner
        return owner.exchange(rows, splits)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        sent, received = ctx.splits
        return ctx.owner.exchange(gradient.contiguous(), (received, sent)), None, None

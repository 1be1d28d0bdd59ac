"""Expert parallelism by hosts: a token goes to a host once, however many of its experts are there.

Phases: to hosts      each token with its choices, once to each host with one of its experts, to the rank with the same
                      local index
        inside hosts  the ranks of a host exchange and compute rows (exchange.py), and add up a token's weighted outputs
        to ranks      one row for each token and host, to the token's rank, which adds them up

Backward is the reverse of it. Only these messages cross hosts.

Shape legend: N tokens of this rank; U pairs of a token and a host, of this rank or received; C, H channels; K experts
per token; in goes_HN, H hosts.
"""

import time
from typing import Any, NamedTuple

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
        hosts, of_host = self._hosts, num_experts // self._hosts.size
        host_NK = routing.experts_NK.div(of_host, rounding_mode="floor")  # DROPPED is on none
        goes_HN = (host_NK == torch.arange(hosts.size).view(-1, 1, 1)).any(2)
        host_U, token_U = goes_HN.nonzero(as_tuple=True)
        sent = goes_HN.sum(1)
        received = collective.all_to_all_rows(sent.unsqueeze(1), hosts).wait().flatten()
        splits = Splits(sent.tolist(), received.tolist())
        is_there_UK = host_NK[token_U] == host_U.unsqueeze(1)
        chosen_UK = routing.experts_NK[token_U] - of_host * host_U.unsqueeze(1)
        (chosen_UK,) = self.exchange(splits, torch.where(is_there_UK, chosen_UK, DROPPED))
        weights_UK = torch.where(is_there_UK, routing.weights_NK[token_U], 0.0)
        tokens_UC, weights_UK = _Exchange.apply(self, splits, tokens_NC.index_select(0, token_U), weights_UK)
        self.inside.tracer = self.tracer
        out_UH = self.inside.forward(experts, tokens_UC, Routing(chosen_UK, weights_UK, routing.penalty_B), of_host)
        first = of_host * hosts.index
        self.computed_E = np.pad(self.inside.computed_E, (first, num_experts - first - of_host))
        (out_UH,) = _Exchange.apply(self, splits.reversed(), out_UH)
        total_NH = weights_UK.new_zeros(len(tokens_NC), out_UH.shape[1])
        return total_NH.index_add(0, token_U, out_UH.to(total_NH.dtype)).to(out_UH.dtype)

    def exchange(self, splits: "Splits", *tensors: Tensor) -> tuple[Tensor, ...]:
        """All-to-alls of rows between hosts, recorded as `hosts NAME`."""
        pending = [collective.all_to_all(rows, *splits, self._hosts) for rows in tensors]
        name, start = f"hosts {self.name}", time.perf_counter()
        if self.tracer is not None:
            for each in pending:
                self.tracer.add_flight(name, self._hosts.lane, each)
        received = tuple(each.wait() for each in pending)
        if self.tracer is not None:
            self.tracer.add_wait(name, start)
        return received


class Splits(NamedTuple):
    """Rows to and from each host."""

    sent: list[int]
    received: list[int]

    def reversed(self) -> "Splits":
        return Splits(self.received, self.sent)


class _Exchange(torch.autograd.Function):
    """Backward exchanges gradients of all tensors, zeros for those without: all ranks send the same messages."""

    @staticmethod
    def forward(ctx: Any, owner: HostExperts, splits: Splits, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.owner, ctx.splits = owner, splits
        return owner.exchange(splits, *tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        contiguous = (gradient.contiguous() for gradient in gradients)
        return None, None, *ctx.owner.exchange(ctx.splits.reversed(), *contiguous)

"""Rival executions of a layer of experts for benchmarks/moe.py, called as the exchange of `layers/moe.py: MoE`.

Shape legend: N tokens; C, H channels; E experts; R ranks; K experts per token; S slots: rows of an expert's buffer; A
choices that have a slot.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from shardwright.comm import collective
from shardwright.comm.mesh import Group
from shardwright.layers.gates import Routing
from shardwright.layers.moe import LocalExperts


def choose_slots(experts_NK: Tensor, num_experts: int, num_slots: int) -> tuple[Tensor, Tensor]:
    """(A,) (A,): the choices that are not dropped, and their slots among those of all experts.

    An expert takes the first `num_slots` choices of it: all first choices, in the order of tokens, before any second.
    """
    experts = experts_NK.t().flatten()
    order = experts.argsort(stable=True)
    counts_E = torch.bincount(experts, minlength=num_experts)
    places = torch.arange(len(order)) - (counts_E.cumsum(0) - counts_E)[experts[order]]
    kept = order[places < num_slots]
    slots = experts[kept] * num_slots + places[places < num_slots]
    num_tokens, num_chosen = experts_NK.shape
    return kept % num_tokens * num_chosen + kept // num_tokens, slots


class CapacityExperts:
    """GShard: a buffer of `num_slots` rows for each expert on each rank, padded; choices beyond are dropped.

    Two all-to-alls of equal, fixed size over `group`, blocking; padding is sent and computed. Backward: two more.
    """

    def __init__(self, group: Group, num_slots: int) -> None:
        self.group, self.num_slots = group, num_slots

    def forward(self, experts: nn.Module, tokens_NC: Tensor, routing: Routing, num_experts: int) -> Tensor:
        choices, slots = choose_slots(routing.experts_NK, num_experts, self.num_slots)
        of_token = choices // routing.experts_NK.shape[1]
        buffer = tokens_NC.new_zeros(num_experts * self.num_slots, tokens_NC.shape[1])
        buffer = buffer.index_copy(0, slots, tokens_NC.index_select(0, of_token))
        num_own = num_experts // self.group.size
        shape = (self.group.size, num_own, self.num_slots)
        rows = self._exchange(buffer).unflatten(0, shape).transpose(0, 1).flatten(0, 2)
        sizes_E = torch.full((num_own,), self.group.size * self.num_slots)
        outputs = experts(rows, sizes_E).unflatten(0, (num_own, self.group.size, self.num_slots))
        returned = self._exchange(outputs.transpose(0, 1).flatten(0, 2).contiguous())
        weighted = returned.index_select(0, slots) * routing.weights_NK.flatten()[choices].unsqueeze(1)
        return weighted.new_zeros(len(tokens_NC), weighted.shape[1]).index_add(0, of_token, weighted)

    def _exchange(self, rows: Tensor) -> Tensor:
        splits = [len(rows) // self.group.size] * self.group.size
        return collective.all_to_all_autograd(rows, splits, splits, self.group)


class GatheredExperts:
    """All experts on every rank, which computes its own rows; `shards`: this rank's experts of each parameter.

    ZeRO-3 all-gathers weights over `group` before forward and again before backward, then reduce-scatters gradients.
    ZeRO-2 keeps weights, reduce-scatters gradients, then all-gathers the weights that an optimizer would have updated.
    All blocking, a collective for each parameter. Call `finish` after backward; it returns the gradients of `shards`.
    """

    def __init__(self, full: nn.Module, shards: Sequence[Tensor], group: Group, stage: int) -> None:
        self.full, self.group, self.stage = full, group, stage
        self._shards = [shard.detach() for shard in shards]
        self._sizes = [len(self._shards[0])] * group.size
        self._gather()

    def forward(self, experts: nn.Module, tokens_NC: Tensor, routing: Routing, num_experts: int) -> Tensor:
        if self.stage == 3:
            self._gather()
        out = LocalExperts().forward(self.full, tokens_NC, routing, num_experts)
        if self.stage == 3:
            out.register_hook(lambda _: self._gather())
        return out

    def finish(self) -> list[Tensor]:
        gradients: list[Tensor] = []
        for parameter in self.full.parameters():
            assert parameter.grad is not None
            gradients.append(collective.reduce_scatter(parameter.grad, self._sizes, self.group).wait())
            parameter.grad = None
        if self.stage == 2:
            self._gather()
        return gradients

    def _gather(self) -> None:
        for parameter, shard in zip(self.full.parameters(), self._shards, strict=True):
            parameter.data.copy_(collective.all_gather(shard, self._sizes, self.group).wait())

"""Gates of a mixture of experts: choose the experts of each token.

What couples the tokens of a batch, capacity and balance loss, is computed in groups of consecutive samples: with
`groups=G`, one process computes what G ranks or micro-batches compute, each from its part of the batch.

Shape legend: B samples, N tokens of all samples, C channels, E experts, K experts per token.
"""

import math
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from shardwright.errors import UserError
from shardwright.layers.draws import LayerDraws

DROPPED = -1  # in place of an expert that had no capacity left, or of a second choice dropped at random


class Routing(NamedTuple):
    """The experts of each token, highest score first, or DROPPED; and their weights."""

    experts_NK: Tensor
    weights_NK: Tensor
    penalty_B: Tensor  # of each sample: the auxiliary losses of its group, times their coefficients


class TopKGate(nn.Module):
    """The K experts with the highest scores, with softmax weights; of equal scores, the lower index wins.

    `over_chosen`: weights are the softmax over the chosen experts, which sum to 1 per token; otherwise over all.
    `capacity`: an expert takes at most capacity * K * tokens / E tokens of a group, rounded up; all first choices come
    before any second choice, and within a choice tokens in order; others are dropped. 0: no limit. `balance` and `z`
    are the coefficients of two auxiliary losses of a group: the load-balancing loss (Switch), E * sum of f_e p_e, where
    f_e is the share of choices of expert e and p_e its mean probability; and the router z-loss (ST-MoE), the mean
    square of the logarithm of the sum of exponentials of a token's scores.
    """

    def __init__(
        self,
        channels: int,
        num_experts: int,
        num_chosen: int,
        *,
        over_chosen: bool = True,
        capacity: float = 0.0,
        balance: float = 0.0,
        z: float = 0.0,
        groups: int = 1,
    ) -> None:
        super().__init__()
        if not 1 <= num_chosen <= num_experts:
            raise UserError(f"a gate that chooses {num_chosen} of {num_experts} experts; wanted 1 to {num_experts}")
        for name, value, least in (
            ("capacity", capacity, 0),
            ("balance", balance, 0),
            ("z", z, 0),
            ("groups", groups, 1),
        ):
            if value < least:
                raise UserError(f"a gate with {name}={value:g}; wanted {least} or more")
        self.num_chosen, self.over_chosen = num_chosen, over_chosen
        self.capacity, self.balance, self.z, self.groups = capacity, balance, z, groups
        self.random_second, self.draws = False, LayerDraws()
        self.scores = nn.Linear(channels, num_experts, bias=False)

    def with_random_second(self) -> "TopKGate":
        """This gate, with GShard's second choice: in training a token keeps it with a probability of twice its weight.

        If dropped, it takes no capacity, and the weight of the first choice stays as it is.
        """
        if self.num_chosen != 2 or not self.over_chosen:
            raise UserError(
                f"a random second choice with num_chosen={self.num_chosen} and over_chosen={self.over_chosen}; "
                "wanted 2 and True"
            )
        self.random_second = True
        return self

    @property
    def may_drop(self) -> bool:
        """Whether some choices may be dropped."""
        return bool(self.capacity or self.random_second)

    def forward(self, x_BC: Tensor) -> Routing:
        """(B, C) or (B, ..., C): samples with one token or several."""
        scores_NE = self._score(x_BC.flatten(0, -2))
        ordered_NE, order_NE = scores_NE.sort(dim=1, descending=True, stable=True)
        experts_NK = order_NE[:, : self.num_chosen]
        if self.over_chosen:
            weights_NK = ordered_NE[:, : self.num_chosen].softmax(1)
        else:
            weights_NK = scores_NE.softmax(1).gather(1, experts_NK)
        num_tokens = math.prod(x_BC.shape[1:-1])  # of a sample
        ends = [x_BC.shape[0] * group // self.groups for group in range(1, self.groups + 1)]
        sizes = [end - start for start, end in pairwise((0, *ends))]
        groups = [slice((end - size) * num_tokens, end * num_tokens) for end, size in zip(ends, sizes, strict=True)]
        penalties = [self._penalty(scores_NE[group], experts_NK[group]) for group in groups]
        penalty_B = torch.cat([penalty.expand(size) for penalty, size in zip(penalties, sizes, strict=True)])
        if self.may_drop and not experts_NK.is_meta:
            kept_NK = torch.cat(
                [self._keep(experts_NK[group], weights_NK[group], number) for number, group in enumerate(groups)]
            )
            experts_NK, weights_NK = torch.where(kept_NK, experts_NK, DROPPED), torch.where(kept_NK, weights_NK, 0.0)
        return Routing(experts_NK, weights_NK, penalty_B)

    def _score(self, x_NC: Tensor) -> Tensor:
        """The scores, in float32 or float64 also under autocast: rounded scores would choose other experts."""
        x_NC = x_NC.float() if x_NC.dtype in (torch.bfloat16, torch.float16) else x_NC
        with torch.autocast(x_NC.device.type if not x_NC.is_meta else "cpu", enabled=False):
            return functional.linear(x_NC, self.scores.weight.to(x_NC.dtype))

    def _penalty(self, scores_NE: Tensor, experts_NK: Tensor) -> Tensor:
        """The auxiliary losses of a group's tokens, times their coefficients."""
        penalty, num = scores_NE.new_zeros(()), self.scores.out_features
        if self.balance and len(scores_NE):
            chosen_E = torch.zeros_like(scores_NE[0]).index_add(
                0, experts_NK.flatten(), torch.ones_like(scores_NE[0, 0]).expand(experts_NK.numel())
            )
            penalty = (
                penalty + self.balance * num / experts_NK.numel() * (chosen_E * scores_NE.softmax(1).mean(0)).sum()
            )
        if self.z and len(scores_NE):
            penalty = penalty + self.z * scores_NE.logsumexp(1).square().mean()
        return penalty

    def _keep(self, experts_NK: Tensor, weights_NK: Tensor, group: int) -> Tensor:
        """Whether each choice of a group's tokens is kept."""
        kept_NK = torch.ones_like(experts_NK, dtype=torch.bool)
        if self.random_second and self.training:
            draws_N = self.draws.uniform(len(experts_NK), group, self.groups).to(experts_NK.device)
            kept_NK[:, 1] = draws_N < 2 * weights_NK[:, 1].detach()
        return self._is_within_capacity(torch.where(kept_NK, experts_NK, DROPPED)) if self.capacity else kept_NK

    def _is_within_capacity(self, experts_NK: Tensor) -> Tensor:
        """Whether each choice of a group's tokens that was not dropped is within its expert's capacity."""
        num = self.scores.out_features
        capacity = math.ceil(self.capacity * experts_NK.numel() / num - 1e-9)
        by_choice = experts_NK.t().flatten() + 1  # dropped choices are the first
        order = by_choice.argsort(stable=True)
        sizes = torch.bincount(by_choice, minlength=num + 1)
        starts = sizes.cumsum(0) - sizes
        places = torch.arange(len(order), device=order.device) - starts[by_choice[order]]  # among those of an expert
        kept = torch.empty_like(order, dtype=torch.bool).index_copy(0, order, places < capacity)
        return kept.view(experts_NK.shape[::-1]).t() & (experts_NK != DROPPED)

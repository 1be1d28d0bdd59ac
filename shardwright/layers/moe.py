"""Mixture of experts with all experts on this device.

Shape legend: T tokens, C input channels, H output channels, K experts per token, R = T * K rows, ordered by expert.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from shardwright.layers.gates import TopKGate


@dataclass(frozen=True, slots=True)
class MoESpec:
    """The number of experts, and the number of experts per token."""

    num_experts: int
    num_chosen: int


class LinearExperts(nn.Module):
    """One linear layer per expert: (R, C) -> (R, H); rows ordered by expert, `sizes` rows of each."""

    def __init__(self, num_experts: int, in_features: int, out_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_experts, out_features, in_features))
        self.bias = nn.Parameter(torch.empty(num_experts, out_features))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize like nn.Linear."""
        bound = self.weight.shape[2] ** -0.5
        nn.init.uniform_(self.weight, -bound, bound)
        nn.init.uniform_(self.bias, -bound, bound)

    def forward(self, rows_RC: Tensor, sizes: Sequence[int]) -> Tensor:
        by_expert = zip(rows_RC.split(list(sizes)), self.weight, self.bias, strict=True)
        return torch.cat([functional.linear(rows, weight, bias) for rows, weight, bias in by_expert])


class MoE(nn.Module):
    """Each token's weighted sum of the outputs of its experts, which the gate chooses: (T, C) -> (T, H).

    `experts(rows, sizes)` returns one output row per row; `sizes` are the numbers of rows by expert.
    """

    def __init__(self, gate: TopKGate, experts: nn.Module) -> None:
        super().__init__()
        self.gate = gate
        self.experts = experts

    def forward(self, x_TC: Tensor) -> Tensor:
        chosen_TK, weights_TK = self.gate(x_TC)
        order_R = chosen_TK.flatten().argsort(stable=True)
        rows_RC = x_TC.index_select(0, order_R.div(chosen_TK.shape[1], rounding_mode="floor"))
        out_RH = self.experts(rows_RC, self._rows_per_expert(chosen_TK))
        position_R = torch.empty_like(order_R).index_copy(0, order_R, torch.arange(len(order_R), device=x_TC.device))
        out_TKH = out_RH.index_select(0, position_R).unflatten(0, tuple(chosen_TK.shape))
        return (out_TKH * weights_TK.unsqueeze(2)).sum(1)

    def _rows_per_expert(self, chosen_TK: Tensor) -> list[int]:
        """Rows of each expert; on the meta device, where they are unknown, as even as possible."""
        num = self.gate.scores.out_features
        if chosen_TK.device.type == "meta":
            rows = chosen_TK.numel()
            return [rows // num + (i < rows % num) for i in range(num)]
        return torch.bincount(chosen_TK.flatten(), minlength=num).tolist()


class MoEMLP(nn.Module):
    """Mixtures of linear experts, each followed by ReLU, then a linear layer."""

    def __init__(self, in_features: int, widths: Sequence[int], out_features: int, mixture: MoESpec) -> None:
        super().__init__()
        sizes = (in_features, *widths)
        self.layers = nn.ModuleList(
            MoE(TopKGate(wide, mixture.num_experts, mixture.num_chosen), LinearExperts(mixture.num_experts, wide, out))
            for wide, out in zip(sizes, sizes[1:], strict=False)
        )
        self.last = nn.Linear(sizes[-1], out_features)

    def forward(self, x_TC: Tensor) -> Tensor:
        for layer in self.layers:
            x_TC = functional.relu(layer(x_TC))
        return self.last(x_TC)

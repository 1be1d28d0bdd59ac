"""A mixture of experts, all of them on this device.

Shape legend: T tokens, C channels in, H channels out, E experts, K chosen, R = T * K rows, expert by expert.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from shardwright.layers.gates import TopKGate


@dataclass(frozen=True, slots=True)
class MoESpec:
    """How many experts there are, and how many of them a token goes to."""

    num_experts: int
    num_chosen: int


class LinearExperts(nn.Module):
    """A linear layer each: rows in the order of experts and the number of rows of each, (R, C) -> (R, H)."""

    def __init__(self, num_experts: int, in_features: int, out_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_experts, out_features, in_features))
        self.bias = nn.Parameter(torch.empty(num_experts, out_features))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As nn.Linear begins."""
        bound = self.weight.shape[2] ** -0.5
        nn.init.uniform_(self.weight, -bound, bound)
        nn.init.uniform_(self.bias, -bound, bound)

    def forward(self, rows_RC: Tensor, sizes: Sequence[int]) -> Tensor:
        parts = zip(rows_RC.split(list(sizes)), self.weight, self.bias, strict=True)
        return torch.cat([functional.linear(rows, weight, bias) for rows, weight, bias in parts])


class MoE(nn.Module):
    """Every token through the experts its gate chose, their outputs added by its weights: (T, C) -> (T, H).

    `experts(rows, sizes)` gives a row for each row; `sizes` says how many rows each expert has.
    """

    def __init__(self, gate: TopKGate, experts: nn.Module) -> None:
        super().__init__()
        self.gate = gate
        self.experts = experts

    def forward(self, x_TC: Tensor) -> Tensor:
        chosen_TK, weights_TK = self.gate(x_TC)
        order_R = chosen_TK.flatten().argsort(stable=True)
        rows_RC = x_TC.index_select(0, order_R.div(chosen_TK.shape[1], rounding_mode="floor"))
        out_RH = self.experts(rows_RC, self._sizes(chosen_TK))
        place_R = torch.empty_like(order_R).index_copy(0, order_R, torch.arange(len(order_R), device=x_TC.device))
        out_TKH = out_RH.index_select(0, place_R).unflatten(0, tuple(chosen_TK.shape))
        return (out_TKH * weights_TK.unsqueeze(2)).sum(1)

    def _sizes(self, chosen_TK: Tensor) -> list[int]:
        """Rows of each expert; on the meta device, where nobody knows, as even as can be."""
        num = self.gate.scores.out_features
        if chosen_TK.device.type == "meta":
            rows = chosen_TK.numel()
            return [rows // num + (at < rows % num) for at in range(num)]
        return torch.bincount(chosen_TK.flatten(), minlength=num).tolist()


class MoEMLP(nn.Module):
    """An MLP whose layers are mixtures of linear experts, with a ReLU behind each; then one plain linear layer."""

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
